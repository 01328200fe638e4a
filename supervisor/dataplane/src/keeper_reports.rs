//! Reports from the keeper: processes that start, violate the sandbox, and end, and the loss of the keeper itself.
//! Policy decides what happens to the jobs.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;

use bulkhead_api::{Severity, What};
use bulkhead_keeper::{self as keeper, Exit, Keeper, Observed, Report, Usage};
use bulkhead_policy::{Death, Event, WorkerId};
use mio::Interest;
use mio::unix::SourceFd;
use rustix::event::{PollFd, PollFlags, Timespec};

use super::background::Done;
use super::links::{End, Link, Running};
use super::slab::{CompartmentIndex, LinkIndex};
use super::{DataPlane, Endpoint, Incoming};

/// Maximum number of violations remembered per worker until the worker reports the end of the program.
const VIOLATIONS_MAX: usize = 64;

/// Maximum number of reports to read ahead in search of a violation, equal to the maximum that the keeper can have
/// queued.
const REPORTS_AHEAD_MAX: usize = 1024;

/// Maximum number of reads from a dead worker's link, enough for a full socket.
const READS_AFTER_DEATH_MAX: usize = 256;

/// A dead worker whose descendants are being reaped.
pub(super) struct Reaping {
    compartment: CompartmentIndex,
    worker: WorkerId,
    /// User id of the worker, if the worker has a separate user id.
    id: Option<u32>,
}

impl DataPlane {
    pub(super) fn keeper_ready(&mut self) {
        if self.keeper.serving().and_then(Keeper::flush).is_err() {
            return self.keeper_gone();
        }
        loop {
            // Deferred reports are handled before newer reports.
            self.handle_deferred_reports();
            match self.keeper.serving().and_then(Keeper::receive) {
                Ok(Some(report)) => self.keeper_report(report),
                Ok(None) => break,
                Err(_) => return self.keeper_gone(),
            }
        }
    }

    /// Handles deferred reports.
    pub(super) fn handle_deferred_reports(&mut self) {
        while let Some(report) = self.keeper.next_deferred_report() {
            self.keeper_report(report);
        }
    }

    fn keeper_report(&mut self, report: Report) {
        self.keeper.report_received();
        match report {
            Report::Started { .. } => {
                self.reporter.pulse.keeper.store(self.keeper.pid().unwrap_or(0), Ordering::Relaxed);
            }
            Report::Spawned { worker, pid, .. } if self.template_spawned(worker, pid) => {}
            Report::Spawned { worker, pid, pidfd, observed } => {
                self.worker_spawned(worker, pid, pidfd, observed);
            }
            Report::Violation { worker, process, call } => self.report_violation(worker, process, call),
            Report::SpawnFailed { worker, step, error } => {
                if self.template_failed(worker, &format!("failed to start the template: {step}: {error}")) {
                    return;
                }
                let Some(link) = self.take_link(worker) else { return };
                self.links.give_back(link.id);
                let message = format!(
                    "failed to start {}: {step}: {error}{}",
                    link.program.describe(),
                    keeper::advice(&step, &error)
                );
                let event = Event::SpawnFailed { worker: link.worker, message };
                self.apply(link.compartment, event, Incoming::None);
            }
            Report::Template { worker, word } => self.handle_template_message(worker, word),
            Report::Exited { worker, exit, .. } if self.template_ended(worker, Some(exit)) => {}
            Report::Exited { worker, exit, usage } => {
                let death = self.death(worker, exit);
                match self.host_of_programs(worker) {
                    Some(link) => {
                        link.end = End::Dead { death, usage };
                        // The worker gets no more jobs until then, as after announcing its end.
                        let (compartment, worker) = (link.compartment, link.worker);
                        self.apply(compartment, Event::Stopping { worker }, Incoming::None);
                    }
                    None => self.worker_gone(worker, Some((death, usage))),
                }
            }
            Report::Swept { worker } => {
                if let Some(death) = self.take_deferred_death(worker) {
                    self.worker_gone(worker, Some(death));
                }
                self.descendants_reaped(worker);
            }
            Report::Pong => {}
            Report::Remains { count } => {
                self.report_trouble(
                    "processes of a dead worker cannot be killed",
                    &format!("{count} remain"),
                );
            }
        }
    }

    /// Returns the link of a worker that runs a program for each job. The death of such a worker is reported when no
    /// program is left, because a program may still be working on a job.
    fn host_of_programs(&mut self, spawn: u64) -> Option<&mut Link> {
        self.links.of_spawn_mut(spawn).filter(|link| link.program.runs_programs())
    }

    /// Returns the deferred death of a worker that runs programs, which must be reported now.
    fn take_deferred_death(&mut self, spawn: u64) -> Option<(Death, Usage)> {
        let link = self.host_of_programs(spawn)?;
        match std::mem::replace(&mut link.end, End::None) {
            End::Dead { death, usage } => Some((death, usage)),
            End::None | End::Overfull => None,
        }
    }

    pub(super) fn death(&self, spawn: u64, exit: Exit) -> Death {
        match exit {
            Exit::Signal { number: libc::SIGKILL, .. } if self.is_overfull(spawn) => Death::Overfull,
            Exit::Code(code) => Death::Exit(code),
            Exit::Oom => Death::Oom,
            Exit::Violation { call } => Death::Violation(keeper::call_name(call)),
            Exit::Signal { number: libc::SIGSYS, .. } if self.is_filtered(spawn) => Death::Violation(""),
            Exit::Signal { number, .. } => Death::Signal(number),
        }
    }

    /// Returns true if a worker's system calls are filtered.
    fn is_filtered(&self, spawn: u64) -> bool {
        self.links.of_spawn(spawn).is_some_and(|link| link.program.sandbox().filters())
    }

    /// Handles a forbidden system call by a process of a worker. The keeper is killing the process.
    fn report_violation(&mut self, spawn: u64, process: u32, call: u32) {
        let Some(link) = self.links.of_spawn_mut(spawn) else { return };
        let compartment = link.compartment;
        // The keeper reports the start of a process before any violation.
        let Some(Running { pid, violations, .. }) = link.running_mut() else { return };
        if violations.len() >= VIOLATIONS_MAX {
            violations.pop_front();
        }
        violations.push_back((process, call));
        let pid = *pid;
        let name = keeper::call_name(call);
        let what = What::SandboxViolation { pid, process, system_call: name.into() };
        self.event(Severity::Critical, Some(compartment), what);
    }

    /// Returns the cause of a program's death by a signal. The worker only knows the signal, but the keeper may have
    /// reported a violation.
    pub(super) fn program_death(&mut self, index: LinkIndex, signal: i32, process: Option<u32>) -> Death {
        if signal == libc::SIGKILL && process.is_some() {
            // The keeper reports a violation before killing the process. All other reports are deferred, because one
            // of them may be the death of this worker, whose answer is being read.
            for _ in 0..REPORTS_AHEAD_MAX {
                let Ok(Some(report)) = self.keeper.serving().and_then(Keeper::receive) else { break };
                match report {
                    Report::Violation { worker, process, call } => {
                        self.report_violation(worker, process, call)
                    }
                    other => self.keeper.defer_report(other),
                }
            }
        }
        let Some(link) = self.links.get_mut(index) else { return Death::Signal(signal) };
        let is_filtered = link.program.sandbox().filters();
        let call = link.running_mut().and_then(|running| {
            let violations = &mut running.violations;
            let at = violations.iter().position(|(violator, _)| Some(*violator) == process)?;
            violations.remove(at).map(|(_, call)| keeper::call_name(call))
        });
        match call {
            Some(call) => Death::Violation(call),
            None if signal == libc::SIGSYS && is_filtered => Death::Violation(""),
            None => Death::Signal(signal),
        }
    }

    fn worker_spawned(&mut self, spawn: u64, pid: u32, pidfd: OwnedFd, observed: Observed) {
        let Some(&index) = self.links.by_spawn.get(&spawn) else { return };
        let link = &mut self.links[index];
        let (compartment, worker) = (link.compartment, link.worker);
        link.run(pid, pidfd, observed);
        self.forward_output(index);
        self.apply(compartment, Event::Spawned { worker, pid }, Incoming::None);
        if has_out_of_band(&self.links[index].socket) {
            self.out_of_band(Endpoint::Link(index));
        }
        // The hello may have arrived before the report of the start.
        self.read_link_input(index);
    }

    /// Handles the end of a worker's process. `death` is `None` if the worker was ended together with the keeper.
    fn worker_gone(&mut self, spawn: u64, death: Option<(Death, Usage)>) {
        let Some(&index) = self.links.by_spawn.get(&spawn) else { return };
        let read = self.links[index].read_position.end();
        // Frames from before the death still count. The end of file does not arrive while a descendant has the
        // worker's end of the link.
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
        self.leases.lends.close(&link.socket, &mut link.unread);
        let (compartment, worker) = (link.compartment, link.worker);
        self.end_leases_of_worker(spawn);
        self.report_unread_jobs(compartment, worker, read, begun);
        if death.is_some() {
            // The user id must not be reused while descendants of the worker have the id.
            self.links.reaping.insert(spawn, Reaping { compartment, worker, id: link.id.take() });
        }
        let id = link.id.take();
        self.links.give_back(id);
        let event = match death {
            Some((death, usage)) => {
                self.report_death(&link, death, usage);
                if let Some(template) = link.template {
                    self.count_forked_death(compartment, template, death);
                }
                Event::Exited { worker, death }
            }
            None => Event::Lost { worker },
        };
        self.apply(compartment, event, Incoming::None);
        self.reporter.last_report = None;
        self.links.closed.push(link);
    }

    /// Handles the end of all descendants of a dead worker.
    fn descendants_reaped(&mut self, spawn: u64) {
        self.template_reaped(spawn);
        let Some(Reaping { compartment, worker, id }) = self.links.reaping.remove(&spawn) else { return };
        self.links.give_back(id);
        self.apply(compartment, Event::Swept { worker }, Incoming::None);
    }

    /// Removes the link of a dead worker. The user id is not returned to the pool yet.
    fn take_link(&mut self, spawn: u64) -> Option<Link> {
        let index = self.links.by_spawn.remove(&spawn)?;
        let Some(link) = self.links.retire(index) else {
            unreachable!("the keeper names only existing links")
        };
        self.dirty.retain(|&endpoint| endpoint != Endpoint::Link(index));
        self.links.unfinished_reads.retain(|&link| link != index);
        let _ = self.poll.registry().deregister(&mut SourceFd(&link.socket.as_raw_fd()));
        self.acceptor.intake.close_soon(&link.socket);
        self.memory.recount_workers(link.counted_waiting, 0);
        let place = &mut self.compartments[link.compartment].links[link.worker.place as usize];
        if *place == Some(index) {
            *place = None;
        }
        Some(link)
    }

    /// Handles the loss of the keeper. No process supervises the workers any more, so all are ended, and another
    /// keeper is started.
    fn keeper_gone(&mut self) {
        // The background thread closes the socket.
        let Some(old) = self.keeper.descriptor() else { return };
        let _ = self.poll.registry().deregister(&mut SourceFd(&old));
        self.keeper.replace(self.now, &mut self.background);
        self.report_trouble("the keeper process died", "all workers are ended and started again");
        for running in self.links.values().filter_map(Link::running) {
            let _ = rustix::process::pidfd_send_signal(&running.pidfd, rustix::process::Signal::KILL);
        }
    }

    /// Handles the end of all processes of a lost keeper, including all workers.
    fn keeper_reaped(&mut self) {
        self.end_all_templates();
        // Spares come first, so that no slot is taken over by a spare that is dead too.
        let (spares, others): (Vec<_>, Vec<_>) =
            self.links.by_spawn.keys().copied().partition(|spawn| self.is_spare(*spawn));
        for spawn in spares.into_iter().chain(others) {
            let death = self.take_deferred_death(spawn);
            self.worker_gone(spawn, death);
        }
        let reaping: Vec<u64> = self.links.reaping.keys().copied().collect();
        reaping.into_iter().for_each(|spawn| self.descendants_reaped(spawn));
    }

    fn is_spare(&self, spawn: u64) -> bool {
        let link = self.links.of_spawn(spawn);
        link.is_some_and(|link| self.compartments[link.compartment].policy.is_spare(link.worker))
    }

    /// Puts a new keeper into service. The queued workers can then be ordered.
    fn keeper_replaced(&mut self, keeper: Box<Keeper>) -> io::Result<()> {
        let interest = Interest::READABLE | Interest::WRITABLE;
        self.poll.registry().register(&mut SourceFd(&keeper.as_raw_fd()), super::KEEPER, interest)?;
        self.keeper.install(keeper, self.now);
        Ok(())
    }

    /// Handles the results of the background threads. Errors are those of a keeper that cannot be replaced.
    pub(super) fn handle_background_results(&mut self) -> io::Result<()> {
        while let Some(done) = self.background.done() {
            match done {
                Done::KeeperSwept(swept) => {
                    swept?;
                    self.keeper_reaped();
                }
                Done::Keeper(keeper) => self.keeper_replaced(keeper?)?,
                Done::Looked { compartment, worker, is_starved } => {
                    self.report_starvation_result(compartment, worker, is_starved);
                }
                Done::FilesMade { lease, bytes, files } => self.files_created(lease, bytes, files),
                Done::Watched | Done::FilesFreed => {}
            }
        }
        Ok(())
    }

    /// Requests an answer from the keeper after an important order.
    pub(super) fn ping_keeper(&mut self) {
        self.keeper.ping(self.now);
        self.schedule_checks();
    }

    pub(super) fn check_keeper(&mut self) {
        if self.keeper.kill_if_silent(self.now) {
            self.report_trouble("the keeper process does not answer", "the keeper is killed and replaced");
        } else if self.keeper.awaits_pong() {
            self.schedule_checks();
        }
    }
}

/// Returns true if out-of-band bytes are pending. Bytes that came before the process was known have been ignored so
/// far.
fn has_out_of_band(socket: &UnixStream) -> bool {
    let mut entries = [PollFd::new(socket, PollFlags::PRI)];
    rustix::event::poll(&mut entries, Some(&Timespec::default())).is_ok_and(|count| count > 0)
        && entries[0].revents().contains(PollFlags::PRI)
}
