//! Handles deaths: reaps dead workers, reports their deaths, and kills the processes left behind, in small
//! steps between other work.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use bulkhead_linux::process_tree::{DescendantKiller, Progress};
use rustix::io::Errno;

use super::{Child, Process, Stage, deregister};
use crate::confine::cgroup::Leaf;
use crate::spawn::{self, Refusal};
use crate::wait::{self, Waited};
use crate::{Exit, ReportMessage, Usage};

/// Time after which processes that survive SIGKILL are left to the kernel, and their worker is reported as
/// swept.
const SWEEP_PATIENCE: Duration = Duration::from_secs(2);

/// Pause between two hunts while workers are leaving.
const HUNT_PAUSE_MIN: Duration = Duration::from_millis(2);
const HUNT_PAUSE_MAX: Duration = Duration::from_millis(64);

/// Time from a death to an additional scan of all processes, and minimum interval between these audits. An
/// audit is needed because a worker that forks with CLONE_PARENT creates siblings instead of descendants.
const AUDIT_PAUSE: Duration = Duration::from_secs(1);

/// Maximum numbers of processes that are reaped, and that are scanned, in one iteration of the loop. Each
/// takes some hundred microseconds in total.
const REAPS_PER_TURN: usize = 64;
const LOOKS_PER_TURN: usize = 64;

/// Number of bytes read from templates after which an iteration reaps no more processes, because a template
/// can send without end.
const HEARD_PER_TURN: u64 = 4096;

/// A worker that is dead and reaped, while the processes it left behind are being killed.
struct Leaving {
    worker: u64,
    /// True if the worker must be reported as swept. A worker reported as failed must not.
    is_reported: bool,
    folder: Option<PathBuf>,
    leaf: Option<Leaf>,
    since: Instant,
    /// Number of scans begun before the worker's death.
    scan_number: u64,
}

/// Workers that are leaving, and the hunt for the processes they left behind.
pub(super) struct Sweep {
    /// True if the kernel does not distinguish orphans from workers, so that only a scan of all processes
    /// shows whether something is left.
    looks_always: bool,
    leaving: Vec<Leaving>,
    hunt: DescendantKiller,
    /// Start time of the next hunt.
    next: Option<Instant>,
    pause: Duration,
    /// Number of processes that the last hunt killed.
    found: usize,
    /// Number of processes that were given up. The same number is expected in later hunts.
    stuck: usize,
    audit: Option<Instant>,
    /// True if there may be ended processes that have not been reaped.
    has_dead: bool,
    /// True if the next hunt waits for forks in progress.
    waits_for_forks: bool,
}

impl Sweep {
    pub(super) fn new(looks_always: bool) -> Self {
        Self {
            looks_always,
            leaving: Vec::new(),
            hunt: DescendantKiller::default(),
            next: None,
            pause: HUNT_PAUSE_MIN,
            found: 0,
            stuck: 0,
            audit: None,
            has_dead: false,
            waits_for_forks: false,
        }
    }

    /// True if no fork must be started, because a hunt is in progress or about to begin.
    pub(super) fn wants_quiet(&self) -> bool {
        self.waits_for_forks || self.hunt.is_active()
    }

    /// Returns the time of the next work, which is `now` if there is work already.
    pub(super) fn due(&self, now: Instant) -> Option<Instant> {
        if self.has_dead || self.hunt.is_active() {
            return Some(now);
        }
        if self.waits_for_forks {
            return Some(now + HUNT_PAUSE_MIN);
        }
        let overdue = self.leaving.iter().map(|leaving| leaving.since + SWEEP_PATIENCE).min();
        overdue.map_or(self.audit, |overdue| Some(overdue.min(self.next.unwrap_or(now))))
    }
}

impl Process {
    /// Handles the end of a worker's process, or of the first process of its namespace.
    pub(super) fn reap_worker(&mut self, pid: u32, now: Instant) {
        if self.children.contains_key(&pid) && bulkhead_linux::wait::has_ended(pid) {
            // Messages that the worker sent before it ended must be handled first.
            self.look_at_start(pid);
            self.hear_what_waits(pid);
            while self.hear_ends(pid) {}
            wait::kill_group(pid);
            self.reap_one(pid, now);
        }
    }

    /// Reaps ended processes, workers and orphans. Ends of workers also have separate events, and so do not
    /// wait behind a thousand orphans.
    pub(super) fn reap(&mut self, now: Instant) {
        self.sweep.has_dead = false;
        let mut heard = 0;
        for _ in 0..REAPS_PER_TURN {
            if heard >= HEARD_PER_TURN {
                break;
            }
            let Some(pid) = bulkhead_linux::wait::peek_ended() else { return };
            if !self.children.contains_key(&pid) {
                heard += self.hear_forks();
            }
            if self.children.contains_key(&pid) && bulkhead_linux::wait::has_ended(pid) {
                self.reap_worker(pid, now);
            } else if !self.reap_one(pid, now) {
                return;
            }
        }
        self.sweep.has_dead = true;
    }

    /// Returns true if there was a change of state to take.
    fn reap_one(&mut self, pid: u32, now: Instant) -> bool {
        match wait::try_reap(pid) {
            Waited::NoChild | Waited::NoChange => return false,
            Waited::Stopped { pid } => wait::kill_child(pid),
            Waited::Ended { pid, exit, usage } => match self.remove(pid) {
                Some(child) => self.left(pid, child, (exit, usage), now),
                None => self.any_fork_ended(pid),
            },
        }
        true
    }

    /// Handles the report of a pid namespace's first process on how the worker ended. The first process
    /// itself can end only after all other processes in the namespace.
    pub(super) fn hear_end(&mut self, pid: u32) {
        let Some(child) = self.children.get_mut(&pid) else { return };
        let Some(status) = child.status.take() else { return };
        // There is only one message, whatever was read.
        deregister(&self.poll, &status);
        let Some(told) = spawn::read_status(&status) else { return };
        self.look_at_start(pid);
        let Some(child) = self.children.get_mut(&pid) else { return };
        if matches!(child.stage, Stage::Running) {
            child.stage = Stage::Ended;
            let (worker, exit) = (child.worker, child.cause(told.0));
            self.report(&ReportMessage::Exited { worker, exit, usage: told.1 }, None);
        }
    }

    /// Handles a reaped child. Reports the death at once, and begins to clean up.
    fn left(&mut self, pid: u32, mut child: Child, (exit, usage): (Exit, Usage), now: Instant) {
        child.forget_descriptors(&self.poll);
        child.leaf.iter().for_each(|leaf| _ = leaf.kill());
        let is_reported = !matches!(child.stage, Stage::Failed);
        if let Some(template) = child.template.take() {
            self.template_ended(template);
        }
        let nest = child.nest.take();
        match child.stage {
            Stage::Running => {
                // The first process of a pid namespace has reported the worker's end, unless the first
                // process was killed before.
                let told = child.status.as_ref().and_then(spawn::read_status);
                let (exit, usage) = told.unwrap_or((exit, usage));
                let (worker, exit) = (child.worker, child.cause(exit));
                self.report(&ReportMessage::Exited { worker, exit, usage }, None);
            }
            Stage::Ended => {}
            Stage::Starting(_) => {
                // The child has not reported a reason, but the order needs an answer.
                self.report_failure(child.worker, &Refusal::new("start", Errno::CHILD));
                return self.failed(child);
            }
            // The program can have run and left processes behind.
            Stage::Failed if child.is_confined => {}
            Stage::Failed => return self.failed(child),
        }
        // Comes after the report, so that no worker is ordered from a template that has ended.
        nest.into_iter().for_each(|nest| self.nest_ended(pid, nest));
        let Child { worker, folder, leaf, .. } = child;
        let scan_number = self.sweep.hunt.scan_number();
        self.sweep.leaving.push(Leaving { worker, is_reported, folder, leaf, since: now, scan_number });
        self.sweep.audit.get_or_insert(now + AUDIT_PAUSE);
    }

    /// Cleans up after a worker that never ran.
    fn failed(&mut self, child: Child) {
        self.precedence.give_back();
        self.clear(child.folder, child.leaf);
    }

    /// Performs a step of killing what the dead left behind, and reports workers of which nothing is left.
    pub(super) fn sweep(&mut self, now: Instant) {
        // Any process that the dead left behind would be a child of this thread.
        let is_waited_for = !self.sweep.leaving.is_empty() && !self.sweep.looks_always;
        if is_waited_for && !bulkhead_linux::wait::thread_has_children() {
            self.sweep.stuck = 0;
            self.report_swept(|_, _| true);
        }
        self.hunt(now);
        self.give_up_on_overdue(now);
        if !self.sweep.leaving.is_empty() {
            self.precedence.take();
        } else if !self.sweep.hunt.is_active() {
            self.sweep.next = None;
            self.sweep.pause = HUNT_PAUSE_MIN;
        }
    }

    /// Continues the current hunt, or begins the next if it is due.
    fn hunt(&mut self, now: Instant) {
        if !self.sweep.hunt.is_active() {
            let is_audit = self.sweep.leaving.is_empty();
            let due = if is_audit { self.sweep.audit } else { self.sweep.next.or(Some(now)) };
            if due.is_none_or(|due| now < due) {
                return;
            }
            // A process that is being forked could not be distinguished from the hunted processes.
            self.sweep.waits_for_forks = self.is_forking();
            if self.sweep.waits_for_forks {
                return;
            }
            if self.sweep.hunt.begin().is_err() {
                return self.hunted(now, None);
            }
        }
        let children = &self.children;
        match self.sweep.hunt.step(LOOKS_PER_TURN, |pid| children.contains_key(&pid)) {
            Ok(Progress::InProgress) => {}
            Ok(Progress::ScanComplete) => {
                self.report_swept(|sweep, leaving| sweep.hunt.has_nothing_new_since(leaving.scan_number))
            }
            Ok(Progress::Finished(found)) => self.hunted(now, Some(found)),
            Err(_) => self.hunted(now, None),
        }
    }

    /// Handles the end of a hunt. `found` is `None` if the hunt failed.
    fn hunted(&mut self, now: Instant, found: Option<usize>) {
        self.sweep.next = Some(now + self.sweep.pause);
        self.sweep.pause = (self.sweep.pause * 2).min(HUNT_PAUSE_MAX);
        if let Some(found) = found {
            self.sweep.found = found;
            self.report_swept(|sweep, leaving| {
                found <= sweep.stuck && sweep.hunt.scan_number() > leaving.scan_number
            });
        }
        if self.sweep.leaving.is_empty() {
            self.sweep.next = None;
            // Repeats until a scan finds nothing, because the children of killed processes are only found in
            // the next scan.
            let found_something = found != Some(0) || !self.groups.retry_removals();
            self.sweep.audit = found_something.then(|| now + AUDIT_PAUSE);
            if found_something { self.precedence.take() } else { self.precedence.give_back() }
        }
    }

    fn give_up_on_overdue(&mut self, now: Instant) {
        let is_overdue = |leaving: &Leaving| now >= leaving.since + SWEEP_PATIENCE;
        if self.sweep.leaving.iter().any(is_overdue) {
            self.sweep.stuck = self.sweep.found.max(1);
            self.report(&ReportMessage::Unkillable { count: self.sweep.stuck as u64 }, None);
            self.report_swept(|_, leaving| is_overdue(leaving));
        }
    }

    /// Reports workers of which nothing is left.
    fn report_swept(&mut self, is_swept: impl Fn(&Sweep, &Leaving) -> bool) {
        let all = std::mem::take(&mut self.sweep.leaving);
        let (swept, left) = all.into_iter().partition(|leaving| is_swept(&self.sweep, leaving));
        self.sweep.leaving = left;
        let swept: Vec<Leaving> = swept;
        if !swept.is_empty() && self.sweep.leaving.is_empty() {
            self.precedence.give_back();
        }
        for Leaving { worker, is_reported, folder, leaf, .. } in swept {
            self.clear(folder, leaf);
            if is_reported {
                self.report(&ReportMessage::Reaped { worker }, None);
            }
        }
    }

    /// Removes the folder and the control group of a worker of which nothing is left.
    pub(super) fn clear(&mut self, folder: Option<PathBuf>, leaf: Option<Leaf>) {
        folder.into_iter().for_each(|folder| self.folders.remove(folder));
        leaf.into_iter().for_each(|leaf| self.groups.remove(leaf));
    }

    /// Kills a worker and all its descendants, as far as one call reaches.
    pub(super) fn kill(&mut self, pid: u32) {
        let Some(child) = self.children.get(&pid) else { return };
        // A running template's control group also has the first process of the namespace, and killing that
        // would kill the workers.
        let is_alone = child.nest.is_none() || !matches!(child.stage, Stage::Running | Stage::Ended);
        if let Some(leaf) = child.leaf.as_ref().filter(|_| is_alone) {
            // The following calls reach what this misses.
            let _ = leaf.kill();
        }
        match child.home {
            Some(home) => self.kill_in_nest(home),
            None if child.nest.is_some() => self.kill_template(pid),
            None => wait::kill_group(pid),
        }
    }
}
