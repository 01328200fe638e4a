//! Reaps dead workers, reports their exits, and kills the processes that they left behind. These processes are killed
//! in small steps between other work. Also kills workers on behalf of other modules. Workers in the namespace of a
//! template are handled in `templates/namespaces.rs`.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use bulkhead_linux::process_tree::{DescendantKiller, Progress, is_alive, start_time};
use rustix::io::Errno;

use super::{Child, EventLoop, Stage, deregister};
use crate::confine::cgroup::Leaf;
use crate::protocol::{Exit, ReportMessage, Usage};
use crate::sample::descendants;
use crate::spawn::{self, SpawnError};
use crate::wait::{self, Waited};

/// Maximum time that the keeper waits for processes to die from SIGKILL. After this time, the worker that left the
/// processes behind is reported as reaped anyway.
const KILL_TIMEOUT: Duration = Duration::from_secs(2);

/// Minimum and maximum pause between searches for descendants of dead workers, while there are any left.
const RUN_INTERVAL_MIN: Duration = Duration::from_millis(2);
const RUN_INTERVAL_MAX: Duration = Duration::from_millis(64);

/// Delay of an additional scan of all processes after a worker's death, and minimum interval between such scans. The
/// scan finds processes that were forked with CLONE_PARENT and are therefore siblings of the worker instead of
/// descendants.
const AUDIT_INTERVAL: Duration = Duration::from_secs(1);

/// Maximum number of processes to reap, and maximum number of processes to scan, in one iteration of the loop. Reaping
/// or scanning this many processes takes a few hundred microseconds.
const REAPS_PER_ITERATION: usize = 64;
const SCANNED_PER_ITERATION: usize = 64;

/// Number of bytes read from templates after which an iteration stops reaping. The limit is needed because a template
/// can send messages faster than the keeper reads them.
const MESSAGE_BYTES_PER_ITERATION: u64 = 4096;

/// A dead worker that has been reaped, but whose descendants are still being killed.
struct DeadWorker {
    worker: u64,
    /// True if the keeper must report that the worker was reaped. False if the worker's start was reported as failed.
    is_reported: bool,
    folder: Option<PathBuf>,
    leaf: Option<Leaf>,
    since: Instant,
    /// Number of scans of all processes that had been started when the worker died.
    scan_number: u64,
}

/// State of finding and killing the processes that dead workers have left behind.
pub(super) struct DescendantReaper {
    /// True if orphans cannot be distinguished from workers on this kernel. All processes must then be scanned to find
    /// out whether descendants are left.
    scans_always: bool,
    dead_workers: Vec<DeadWorker>,
    /// First processes of workers' PID namespaces that are exiting, with the time at which the keeper noticed this.
    /// Such a process disappears only after all other processes in the namespace.
    exiting: HashMap<u32, Instant>,
    killer: DescendantKiller,
    /// Time at which the next search for leftover processes starts.
    next_run: Option<Instant>,
    run_interval: Duration,
    /// Number of processes that were killed by the last search.
    last_killed: usize,
    /// Number of processes that could not be killed. Later searches are expected to find the same number again.
    unkillable: usize,
    next_audit: Option<Instant>,
    /// True if some exited processes might not have been reaped yet.
    may_have_unreaped: bool,
    /// True if the next search for leftover processes must wait until the forks in progress are complete.
    waits_for_forks: bool,
}

impl DescendantReaper {
    pub(super) fn new(scans_always: bool) -> Self {
        Self {
            scans_always,
            dead_workers: Vec::new(),
            exiting: HashMap::new(),
            killer: DescendantKiller::default(),
            next_run: None,
            run_interval: RUN_INTERVAL_MIN,
            last_killed: 0,
            unkillable: 0,
            next_audit: None,
            may_have_unreaped: false,
            waits_for_forks: false,
        }
    }

    /// Returns true if forks must wait, because a search for leftover processes is running or about to start.
    pub(super) fn blocks_forks(&self) -> bool {
        self.waits_for_forks || self.killer.is_active()
    }

    /// Returns the time at which the reaper next has work to do, or `now` if there is already work to do.
    pub(super) fn next_due(&self, now: Instant) -> Option<Instant> {
        if self.may_have_unreaped || self.killer.is_active() {
            return Some(now);
        }
        if self.waits_for_forks {
            return Some(now + RUN_INTERVAL_MIN);
        }
        let overdue = self.dead_workers.iter().map(|dead| dead.since + KILL_TIMEOUT).min();
        let next = overdue.map_or(self.next_audit, |time| Some(time.min(self.next_run.unwrap_or(now))));
        let overdue = self.exiting.values().min().map(|since| *since + KILL_TIMEOUT);
        next.into_iter().chain(overdue).min()
    }
}

impl EventLoop {
    /// Handles the exit of a worker, or of the first process in a worker's PID namespace.
    pub(super) fn reap_worker(&mut self, pid: u32, now: Instant) {
        if !self.children.contains_key(&pid) {
            return;
        }
        if !bulkhead_linux::wait::has_ended(pid) {
            // The worker is being traced, which delays its exit status. If the worker left the tracer behind, an
            // additional scan finds and kills the tracer.
            self.reaper.next_audit = Some(now);
            return;
        }
        // Handles the messages that the worker may have sent before it exited.
        self.advance_start(pid);
        self.read_pending_messages(pid);
        while self.handle_exits(pid) {}
        wait::kill_group(pid);
        self.reap_one(pid, now);
    }

    /// Reaps exited workers and orphans. A worker's exit also raises a separate event, so that the exit is handled
    /// promptly even if a thousand orphans are waiting to be reaped.
    pub(super) fn reap(&mut self, now: Instant) {
        self.reaper.may_have_unreaped = false;
        if self.samples.is_busy(now) {
            return;
        }
        let mut message_bytes = 0;
        for _ in 0..REAPS_PER_ITERATION {
            if message_bytes >= MESSAGE_BYTES_PER_ITERATION {
                break;
            }
            let Some(pid) = bulkhead_linux::wait::peek_ended() else { return };
            if !self.children.contains_key(&pid) {
                message_bytes += self.read_fork_messages();
            }
            if self.children.contains_key(&pid) && bulkhead_linux::wait::has_ended(pid) {
                self.reap_worker(pid, now);
            } else if !self.reap_one(pid, now) {
                return;
            }
        }
        self.reaper.may_have_unreaped = true;
    }

    /// Handles one state change of a child, which has exited or stopped. Returns false if there is none.
    fn reap_one(&mut self, pid: u32, now: Instant) -> bool {
        match wait::try_reap(pid) {
            Waited::NoChild | Waited::NoChange => return false,
            // Threads that are stopped for a sample do not need to be resumed here. The kernel resumes them when the
            // sampling thread exits.
            Waited::Stopped { .. } if self.samples.may_have_stopped(now) => {}
            Waited::Stopped { pid } => wait::kill_child(pid),
            Waited::Ended { pid, exit, usage } => match self.remove(pid) {
                Some(child) => self.clean_up_after(pid, child, (exit, usage), now),
                None => self.any_fork_ended(pid),
            },
        }
        true
    }

    /// Handles the report that a worker has exited, sent by the first process of the worker's PID namespace. If this
    /// first process was killed, handles the end of its pipe. The first process disappears later, after all other
    /// processes in the namespace.
    pub(super) fn handle_init_status(&mut self, pid: u32, now: Instant) {
        let Some(child) = self.children.get_mut(&pid) else { return };
        let Some(status) = child.status.take() else { return };
        // The first process sends only one message, so the pipe is no longer needed, even if the message is
        // invalid.
        deregister(&self.poll, &status);
        self.reaper.exiting.insert(pid, now);
        let Some(status) = spawn::read_status(&status) else { return };
        self.advance_start(pid);
        let Some(child) = self.children.get_mut(&pid) else { return };
        if matches!(child.stage, Stage::Running) {
            child.stage = Stage::Ended;
            let (worker, exit) = (child.worker, child.exit_cause(status.0));
            self.report(&ReportMessage::Exited { worker, exit, usage: status.1 }, None);
        }
    }

    /// Handles a child that was reaped. Reports its exit immediately, and starts the cleanup.
    fn clean_up_after(&mut self, pid: u32, mut child: Child, (exit, usage): (Exit, Usage), now: Instant) {
        child.deregister_all(&self.poll);
        self.reaper.exiting.remove(&pid);
        child.leaf.iter().for_each(|leaf| _ = leaf.kill());
        let is_reported = !matches!(child.stage, Stage::Failed);
        if let Some(template) = child.template.take() {
            self.template_ended(template);
        }
        let namespace = child.namespace.take();
        match child.stage {
            Stage::Running => {
                // The exit status of the worker was reported by the first process of its PID namespace, unless the
                // first process was killed earlier.
                let status = child.status.as_ref().and_then(spawn::read_status);
                let (exit, usage) = status.unwrap_or((exit, usage));
                let (worker, exit) = (child.worker, child.exit_cause(exit));
                self.report(&ReportMessage::Exited { worker, exit, usage }, None);
            }
            Stage::Ended => {}
            Stage::Abandoned => return self.remove_resources(child.folder, child.leaf),
            Stage::Starting(_) => {
                // The supervisor waits for the result of the order, so the failure is reported even though the child
                // has given no reason.
                self.report_failure(child.worker, &SpawnError::new("start", Errno::CHILD));
                return self.clean_up_failed(child);
            }
            // The program may have been running already, and may have left processes behind.
            Stage::Failed if child.is_confined => {}
            Stage::Failed => return self.clean_up_failed(child),
        }
        // This must follow the exit report. Otherwise, the supervisor could order a fork from a template that has
        // exited.
        namespace.into_iter().for_each(|namespace| self.namespace_ended(pid, namespace));
        let Child { worker, folder, leaf, .. } = child;
        let scan_number = self.reaper.killer.scan_number();
        self.reaper.dead_workers.push(DeadWorker {
            worker,
            is_reported,
            folder,
            leaf,
            since: now,
            scan_number,
        });
        self.reaper.next_audit.get_or_insert(now + AUDIT_INTERVAL);
    }

    /// Cleans up after a worker whose program was never executed.
    fn clean_up_failed(&mut self, child: Child) {
        self.priority.restore();
        self.remove_resources(child.folder, child.leaf);
    }

    /// Performs one step in killing the processes left behind by dead workers. Reports a worker as reaped once no such
    /// process is left.
    pub(super) fn reap_descendants(&mut self, now: Instant) {
        // Processes left behind by a worker become children of this thread.
        let is_waited_for = !self.reaper.dead_workers.is_empty() && !self.reaper.scans_always;
        if is_waited_for && !bulkhead_linux::wait::thread_has_children() {
            self.reaper.unkillable = 0;
            self.report_reaped(|_, _| true);
        }
        self.step_killer(now);
        self.give_up_on_overdue(now);
        self.give_up_on_namespaces(now);
        if !self.reaper.dead_workers.is_empty() {
            self.priority.raise();
        } else if !self.reaper.killer.is_active() {
            self.reaper.next_run = None;
            self.reaper.run_interval = RUN_INTERVAL_MIN;
        }
    }

    /// Continues the killer's current run, or begins the next run if it is due.
    fn step_killer(&mut self, now: Instant) {
        if !self.reaper.killer.is_active() {
            let is_audit = self.reaper.dead_workers.is_empty();
            let due = if is_audit { self.reaper.next_audit } else { self.reaper.next_run.or(Some(now)) };
            if due.is_none_or(|due| now < due) {
                return;
            }
            // A search during a fork could mistake the forked process for a leftover process.
            self.reaper.waits_for_forks = self.is_forking();
            if self.reaper.waits_for_forks {
                return;
            }
            if self.reaper.killer.begin().is_err() {
                return self.killer_finished(now, None);
            }
        }
        let (children, hung_paths) = (&self.children, &self.hung_paths);
        let is_spared = |pid| children.contains_key(&pid) || hung_paths.is_check(pid);
        match self.reaper.killer.step(SCANNED_PER_ITERATION, is_spared) {
            Ok(Progress::InProgress) => {}
            Ok(Progress::ScanComplete) => {
                self.report_reaped(|reaper, dead| reaper.killer.has_nothing_new_since(dead.scan_number))
            }
            Ok(Progress::Finished(found)) => self.killer_finished(now, Some(found)),
            Err(_) => self.killer_finished(now, None),
        }
    }

    /// Handles the end of a search for leftover processes. `found` is the number of processes found, or `None` if the
    /// search failed.
    fn killer_finished(&mut self, now: Instant, found: Option<usize>) {
        self.reaper.next_run = Some(now + self.reaper.run_interval);
        self.reaper.run_interval = (self.reaper.run_interval * 2).min(RUN_INTERVAL_MAX);
        if let Some(found) = found {
            self.reaper.last_killed = found;
            self.report_reaped(|reaper, dead| {
                found <= reaper.unkillable && reaper.killer.scan_number() > dead.scan_number
            });
        }
        if self.reaper.dead_workers.is_empty() {
            self.reaper.next_run = None;
            // Repeats the scan until it finds nothing, because each scan can miss children of the processes that it
            // kills.
            let found_something = found != Some(0) || !self.groups.retry_removals();
            self.reaper.next_audit = found_something.then(|| now + AUDIT_INTERVAL);
            if found_something { self.priority.raise() } else { self.priority.restore() }
        }
    }

    fn give_up_on_overdue(&mut self, now: Instant) {
        let is_overdue = |dead: &DeadWorker| now >= dead.since + KILL_TIMEOUT;
        if self.reaper.dead_workers.iter().any(is_overdue) {
            self.reaper.unkillable = self.reaper.last_killed.max(1);
            self.report(&ReportMessage::Unkillable { count: self.reaper.unkillable as u64 }, None);
            self.report_reaped(|_, dead| is_overdue(dead));
        }
    }

    /// Reports workers as exited and reaped if a process in their PID namespace survives SIGKILL. The first process of
    /// the namespace waits for this process.
    fn give_up_on_namespaces(&mut self, now: Instant) {
        const KILLED: Exit = Exit::Signal { number: libc::SIGKILL, core_dumped: false };
        let overdue = self.reaper.exiting.extract_if(|_, since| now >= *since + KILL_TIMEOUT);
        let overdue: Vec<u32> = overdue.map(|(pid, _)| pid).collect();
        for pid in overdue {
            let Some(child) = self.children.get_mut(&pid) else { continue };
            let left = descendants(pid);
            let exit = match child.stage {
                // The worker itself survives. Its exit must not be reported yet, because a system call of its jobs is
                // still in progress.
                Stage::Running if left.contains(&child.process) && is_running(child.process) => {
                    self.reaper.exiting.insert(pid, now);
                    continue;
                }
                Stage::Running => Some(child.exit_cause(KILLED)),
                Stage::Ended => None,
                // The failure of the start is reported instead.
                Stage::Starting(_) | Stage::Failed | Stage::Abandoned => continue,
            };
            child.stage = Stage::Abandoned;
            let (worker, folder) = (child.worker, child.folder.take());
            if let Some(exit) = exit {
                self.report(&ReportMessage::Exited { worker, exit, usage: Usage::default() }, None);
            }
            self.report(&ReportMessage::Unkillable { count: left.len().max(1) as u64 }, None);
            self.remove_resources(folder, None);
            self.report(&ReportMessage::Reaped { worker }, None);
            if self.reaper.dead_workers.is_empty() {
                self.priority.restore();
            }
        }
    }

    /// Removes the folders and groups of all dead workers for which `is_reaped` returns true. Also reports each of
    /// these workers as reaped, unless its start failed.
    fn report_reaped(&mut self, is_reaped: impl Fn(&DescendantReaper, &DeadWorker) -> bool) {
        let all = std::mem::take(&mut self.reaper.dead_workers);
        let (reaped, left) = all.into_iter().partition(|dead| is_reaped(&self.reaper, dead));
        self.reaper.dead_workers = left;
        let reaped: Vec<DeadWorker> = reaped;
        if !reaped.is_empty() && self.reaper.dead_workers.is_empty() {
            self.priority.restore();
        }
        for DeadWorker { worker, is_reported, folder, leaf, .. } in reaped {
            self.remove_resources(folder, leaf);
            if is_reported {
                self.report(&ReportMessage::Reaped { worker }, None);
            }
        }
    }

    /// Removes the folder and the control group of a worker whose processes are all gone.
    pub(super) fn remove_resources(&mut self, folder: Option<PathBuf>, leaf: Option<Leaf>) {
        folder.into_iter().for_each(|folder| self.folders.remove(folder));
        leaf.into_iter().for_each(|leaf| self.groups.remove(leaf));
    }

    /// Kills a worker, together with the descendants in its control group or process group.
    pub(super) fn kill(&mut self, pid: u32) {
        let Some(child) = self.children.get(&pid) else { return };
        // Does not kill the control group of a running template. The group also contains the first process of the
        // namespace, and all workers die with this process.
        let is_alone = child.namespace.is_none() || !matches!(child.stage, Stage::Running | Stage::Ended);
        if let Some(leaf) = child.leaf.as_ref().filter(|_| is_alone) {
            // Errors are ignored, because the calls below also kill the worker.
            let _ = leaf.kill();
        }
        match child.member {
            Some(member) => self.kill_in_namespace(member),
            None if child.namespace.is_some() => self.kill_template(pid),
            None => wait::kill_group(pid),
        }
    }
}

fn is_running(pid: u32) -> bool {
    start_time(pid).is_some_and(|started| is_alive(pid, started))
}
