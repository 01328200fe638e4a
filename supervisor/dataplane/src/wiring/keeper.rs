//! Handles the keeper's reports of processes that have started, violated the sandbox or exited, and the loss of the
//! keeper itself. Policy decides what happens to the jobs.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use bulkhead_api::{EventKind, Severity};
use bulkhead_keeper::{self as keeper, Exit, Keeper, Observed, Report, Usage};
use bulkhead_policy::{Death, Event, WorkerId};
use mio::Interest;
use mio::unix::SourceFd;
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::links::{Link, death_of};
use crate::slab::{CompartmentIndex, LinkIndex};
use crate::{DataPlane, Endpoint, Incoming};

/// Maximum number of keeper reports to read ahead when looking for a violation. The keeper never queues more reports
/// than this.
const REPORTS_AHEAD_MAX: usize = 1024;

/// Maximum number of reads from a dead worker's link. This is enough to drain a full socket.
const READS_AFTER_DEATH_MAX: usize = 256;

impl DataPlane {
    // Workers.

    pub(crate) fn worker_spawned(&mut self, spawn: u64, pid: u32, pidfd: OwnedFd, observed: Observed) {
        let Some(index) = self.links.index_of_spawn(spawn) else { return };
        let link = &mut self.links[index];
        let (compartment, worker) = link.key();
        link.run(pid, pidfd, observed);
        self.forward_output(index);
        self.apply(compartment, Event::Spawned { worker, pid }, Incoming::None);
        if has_out_of_band(&self.links[index].socket) {
            self.out_of_band(Endpoint::Link(index));
        }
        // HELLO may have arrived before the keeper reported that the process had started.
        self.read_link(index);
    }

    /// Handles a report that a worker could not be started.
    pub(crate) fn spawn_failed(&mut self, spawn: u64, step: &str, error: &io::Error) {
        let Some(mut link) = self.take_link(spawn) else { return };
        self.links.give_back(link.take_id());
        let (compartment, worker) = link.key();
        let is_alive = self.compartments[compartment].policy.is_alive(worker);
        if let Some(order) = link.lost_order().filter(|_| is_alive) {
            // The worker has not failed, so policy is not notified, and another template forks the worker.
            return self.keeper.queue_worker(order);
        }
        let message = spawn_failure_message(&link, step, error);
        self.apply(compartment, Event::SpawnFailed { worker, message }, Incoming::None);
    }

    /// Handles the exit of a worker's process. If the worker runs one program per job, the death is not reported to
    /// policy until all programs have exited, because a program might still be working on a job.
    pub(crate) fn worker_exited(&mut self, spawn: u64, exit: Exit, usage: Usage) {
        let link = self.links.of_spawn_mut(spawn);
        let death = death_of(exit, link.as_deref());
        match link.filter(|link| link.program().runs_programs()) {
            Some(link) => {
                link.defer_death(death, usage);
                // While the report of its death is deferred, the worker gets no more jobs, as if the worker had
                // announced its exit.
                let (compartment, worker) = link.key();
                self.apply(compartment, Event::Stopping { worker }, Incoming::None);
            }
            None => self.worker_gone(spawn, Some((death, usage))),
        }
    }

    /// Handles a report that all descendants of a dead worker are gone.
    pub(crate) fn worker_reaped(&mut self, spawn: u64) {
        if let Some(death) = self.take_deferred_death(spawn) {
            self.worker_gone(spawn, Some(death));
        }
        self.descendants_reaped(spawn);
    }

    /// Removes and returns the cause of death and the resource usage of a worker that runs programs, if the report of
    /// its death was deferred.
    fn take_deferred_death(&mut self, spawn: u64) -> Option<(Death, Usage)> {
        let link = self.links.of_spawn_mut(spawn).filter(|link| link.program().runs_programs());
        link?.take_deferred_death()
    }

    /// Handles the death of a worker. `death` is `None` if the worker died because the keeper died.
    fn worker_gone(&mut self, spawn: u64, death: Option<(Death, Usage)>) {
        let Some(index) = self.links.index_of_spawn(spawn) else { return };
        let read = self.links[index].read_position.end();
        // Frames sent before the death still count. An end of file does not arrive as long as a descendant keeps the
        // worker's end of the link open.
        let waiting = |link: &Link| rustix::io::ioctl_fionread(&link.socket).unwrap_or(0);
        let mut reads = 0;
        while reads < READS_AFTER_DEATH_MAX
            && !self.links[index].is_closed()
            && waiting(&self.links[index]) > 0
        {
            reads += 1;
            self.read_link_once(index);
        }
        let begun = self.apply_journal(index);
        let Some(mut link) = self.take_link(spawn) else { return };
        self.unread_loans.close(&link.socket, &mut link.unread);
        let (compartment, worker) = link.key();
        self.update_leases(|leases, now| leases.worker_gone(now, spawn));
        self.report_unread_jobs(compartment, worker, read, begun);
        // The UID must not be reused as long as descendants of the worker are running under it.
        match death {
            Some(_) => self.links.begin_reaping(&mut link),
            None => self.links.give_back(link.take_id()),
        }
        let event = match death {
            Some((death, usage)) => {
                self.report_death(&mut link, death, usage);
                if let Some(template) = link.template() {
                    self.update_templates(|it, _| it.forked_worker_died(compartment, template, death));
                }
                Event::Exited { worker, death }
            }
            None => Event::LostWithKeeper { worker },
        };
        self.apply(compartment, event, Incoming::None);
        self.crashes.death_applied();
        self.links.keep_closed(link);
    }

    /// Tells policy which jobs cannot have been started by a worker that has read only `read` bytes. If the worker has
    /// a journal, this includes all jobs after the last job that the worker started.
    fn report_unread_jobs(
        &mut self,
        compartment: CompartmentIndex,
        worker: WorkerId,
        read: u64,
        begun: Option<u64>,
    ) {
        for job in self.compartments[compartment].policy.jobs_of(worker) {
            let Some(record) = self.compartments[compartment].policy.record_mut(job) else { continue };
            let position = record.position;
            if position.is_unread(read) {
                self.apply(compartment, Event::JobUnread { worker, job }, Incoming::None);
            } else if position.is_unbegun(begun) {
                self.apply(compartment, Event::JobNotBegun { worker, job }, Incoming::None);
            }
        }
    }

    fn descendants_reaped(&mut self, spawn: u64) {
        let Some((compartment, worker)) = self.links.end_reaping(spawn) else { return };
        self.apply(compartment, Event::Reaped { worker }, Incoming::None);
    }

    /// Removes and returns a dead worker's link. The worker's UID does not return to the pool yet.
    fn take_link(&mut self, spawn: u64) -> Option<Link> {
        let (index, link) = self.links.remove(spawn)?;
        let _ = self.poll.registry().deregister(&mut SourceFd(&link.socket.as_raw_fd()));
        self.intake.close_soon(&link.socket);
        self.memory.recount_workers(link.counted_waiting(), 0);
        self.compartments[link.compartment()].clear_link(link.worker(), index);
        Some(link)
    }

    // Violations of the sandbox.

    /// Handles the keeper's report that one of a worker's processes made a forbidden system call. The keeper kills
    /// the process.
    pub(crate) fn report_violation(&mut self, spawn: u64, process: u32, call: u32) {
        let Some(link) = self.links.of_spawn_mut(spawn) else { return };
        let Some(pid) = link.add_violation(process, call) else { return };
        let system_call = keeper::syscall_name(call).into();
        let what = EventKind::SandboxViolation { pid, process, system_call };
        let compartment = &self.compartments[link.compartment()];
        let subject = (&self.bulkheads.owner(compartment).name, &compartment.tenant);
        self.reporter.compartment_event(Severity::Critical, subject, what, None);
    }

    /// Returns the cause of death of a program that was killed by a signal. The worker knows only the signal, but the
    /// keeper might have reported that the program made a forbidden system call.
    pub(crate) fn program_death(&mut self, index: LinkIndex, signal: i32, process: Option<u32>) -> Death {
        if signal == libc::SIGKILL && process.is_some() {
            // The keeper reports a violation before it kills the process. Other reports are deferred, because
            // one of them may be the death of the worker whose reply is being handled.
            for _ in 0..REPORTS_AHEAD_MAX {
                let Ok(Some(report)) = self.keeper.serving().and_then(Keeper::receive) else { break };
                match report {
                    Report::Violation { worker, process, call } => {
                        self.report_violation(worker, process, call);
                    }
                    other => self.keeper.defer_report(other),
                }
            }
        }
        let Some(link) = self.links.get_mut(index) else { return Death::Signal(signal) };
        match link.take_violation(process) {
            Some(call) => Death::Violation(keeper::syscall_name(call)),
            None if signal == libc::SIGSYS && link.filters_calls() => Death::Violation(""),
            None => Death::Signal(signal),
        }
    }

    // The keeper.

    /// Handles the loss of the keeper. Kills all workers, because nothing supervises them any longer, and starts
    /// another keeper.
    pub(crate) fn keeper_lost(&mut self) {
        // The old keeper's socket is closed later by the background thread.
        let Some(old) = self.keeper.descriptor() else { return };
        let _ = self.poll.registry().deregister(&mut SourceFd(&old));
        self.keeper.replace(self.now, &mut self.background);
        self.reporter.trouble("the keeper process died", "all workers are killed and restarted");
        for pidfd in self.links.values().filter_map(Link::pidfd) {
            let _ = rustix::process::pidfd_send_signal(pidfd, rustix::process::Signal::KILL);
        }
    }

    /// Handles the report that all processes of a lost keeper, including all workers, are gone.
    pub(crate) fn keeper_reaped(&mut self) {
        // Handles spares before other workers. Otherwise, a dead worker's slot could be given to a spare that is also
        // dead.
        let compartments = &self.compartments;
        let is_spare = |link: &Link| compartments[link.compartment()].policy.is_spare(link.worker());
        for spawn in self.links.spawns(is_spare) {
            let death = self.take_deferred_death(spawn);
            self.worker_gone(spawn, death);
        }
        for spawn in self.links.reaping_spawns() {
            self.descendants_reaped(spawn);
        }
    }

    /// Installs a new keeper. The workers in the start queue can then be started. If the keeper could not be started,
    /// returns the error, and the supervisor must stop.
    pub(crate) fn keeper_replaced(&mut self, keeper: io::Result<Box<Keeper>>) -> io::Result<()> {
        let descriptor = self.keeper.install(keeper, self.now)?;
        let interest = Interest::READABLE | Interest::WRITABLE;
        self.poll.registry().register(&mut SourceFd(&descriptor), crate::KEEPER, interest)
    }

    pub(crate) fn check_keeper(&mut self) {
        if self.keeper.kill_if_silent(self.now) {
            let detail = "the keeper is killed and replaced";
            self.reporter.trouble("the keeper process is not responding", detail);
        }
    }
}

fn spawn_failure_message(link: &Link, step: &str, error: &io::Error) -> String {
    let (program, advice) = (link.program().path_for_messages(), keeper::spawn_failure_advice(step, error));
    format!("failed to start {program}: {step}: {error}{advice}")
}

/// Returns true if out-of-band bytes are pending on a socket. Such bytes are ignored until the keeper has reported the
/// worker's process.
fn has_out_of_band(socket: &UnixStream) -> bool {
    let mut entries = [PollFd::new(socket, PollFlags::PRI)];
    rustix::event::poll(&mut entries, Some(&Timespec::default())).is_ok_and(|count| count > 0)
        && entries[0].revents().contains(PollFlags::PRI)
}
