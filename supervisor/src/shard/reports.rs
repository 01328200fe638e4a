//! What the keeper reports: processes that run, break the rules of their sandbox, and end; and whether the keeper
//! itself is well. What becomes of their jobs is for policy.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bulkhead_policy::{Death, Event, WorkerId};
use mio::Interest;
use mio::unix::SourceFd;
use rustix::event::{PollFd, PollFlags, Timespec};
use serde_json::json;

use super::links::Link;
use super::{Endpoint, Incoming, Shard};
use crate::command::Severity;
use crate::keeper::{self, Exit, Observed, Report, Usage};

/// How long the keeper may take to answer: it turns in milliseconds, unless the machine hardly does.
const KEEPER_ANSWERS_WITHIN: Duration = Duration::from_secs(10);

/// A keeper that lived so long is not one that dies at once.
const KEEPER_PROVEN_AFTER: Duration = Duration::from_secs(10);

/// The pause before the fourth keeper in a row; it doubles up to sixteen times itself.
const KEEPER_PAUSE: Duration = Duration::from_millis(100);

/// Violations of a worker's programs that are remembered until that one says how they ended.
const VIOLATIONS_MAX: usize = 64;

/// Reports that are read ahead to find one: as many as the keeper has waiting at most.
const REPORTS_AHEAD_MAX: usize = 1024;

/// Reads of a dead worker's link: more than what a socket holds takes.
const READS_AFTER_DEATH_MAX: usize = 256;

/// A worker that is gone, while what it left behind is being ended.
pub(super) struct Sweeping {
    compartment: usize,
    worker: WorkerId,
    /// Its user id, if that is its own.
    id: Option<u32>,
}

impl Shard {
    pub(super) fn keeper_ready(&mut self) -> io::Result<()> {
        if self.keeper.flush().is_err() {
            return self.keeper_gone();
        }
        loop {
            // What could not be heard when it came goes before what came after it.
            self.hear_late_reports();
            match self.keeper.receive() {
                Ok(Some(report)) => self.keeper_report(report),
                Ok(None) => break,
                Err(_) => return self.keeper_gone(),
            }
        }
        Ok(())
    }

    /// What could not be heard when it came.
    pub(super) fn hear_late_reports(&mut self) {
        while let Some(report) = self.late_reports.pop_front() {
            self.keeper_report(report);
        }
    }

    fn keeper_report(&mut self, report: Report) {
        self.keeper_asked_at = None;
        match report {
            Report::Started { .. } => self.pulse.keeper.store(self.keeper.pid(), Ordering::Relaxed),
            Report::Spawned { worker, pid, pidfd, observed } => {
                self.process_runs(worker, pid, pidfd, observed);
            }
            Report::Violation { worker, process, call } => self.violation(worker, process, call),
            Report::SpawnFailed { worker, step, error } => {
                let Some(link) = self.take_link(worker) else { return };
                self.give_back(link.id);
                let message = format!(
                    "failed to start {}: {step}: {error}{}",
                    link.program.describe(),
                    advice(&step, &error)
                );
                let event = Event::SpawnFailed { worker: link.worker, message };
                self.apply(link.compartment, event, Incoming::None);
            }
            Report::Exited { worker, exit, usage } => {
                let death = self.death(worker, exit);
                match self.host_of_programs(worker) {
                    Some(link) => {
                        link.death = Some((death, usage));
                        // It gets no more jobs meanwhile, as one that says that it ends.
                        let (compartment, worker) = (link.compartment, link.worker);
                        self.apply(compartment, Event::Stopping { worker }, Incoming::None);
                    }
                    None => self.process_gone(worker, Some((death, usage))),
                }
            }
            Report::Swept { worker } => {
                if let Some(death) = self.host_of_programs(worker).and_then(|link| link.death.take()) {
                    self.process_gone(worker, Some(death));
                }
                self.swept(worker);
            }
            Report::Pong => {}
            Report::Remains { count } => {
                self.note_trouble("processes of a dead worker cannot be killed", &format!("{count} remain"));
            }
        }
    }

    /// A worker that runs a program for each job: its death is told when nothing is left of them, since what is
    /// left of a job may still do its work.
    fn host_of_programs(&mut self, spawn: u64) -> Option<&mut Link> {
        let index = *self.links_by_spawn.get(&spawn)?;
        self.links[index].as_mut().filter(|link| link.program.runs_programs())
    }

    fn death(&self, spawn: u64, exit: Exit) -> Death {
        match exit {
            Exit::Signal { number: libc::SIGKILL, .. } if self.is_overfull(spawn) => Death::Overfull,
            Exit::Code(code) => Death::Exit(code),
            Exit::Oom => Death::Oom,
            Exit::Violation { call } => Death::Violation(keeper::call_name(call)),
            Exit::Signal { number: libc::SIGSYS, .. } if self.is_filtered(spawn) => Death::Violation(""),
            Exit::Signal { number, .. } => Death::Signal(number),
        }
    }

    /// Whether the system calls of a worker are filtered.
    fn is_filtered(&self, spawn: u64) -> bool {
        let link = self.links_by_spawn.get(&spawn).and_then(|&index| self.links[index].as_ref());
        link.is_some_and(|link| link.program.sandbox().filters())
    }

    /// A process of a worker's made a forbidden system call, and is being killed.
    fn violation(&mut self, spawn: u64, process: u32, call: u32) {
        let Some(&index) = self.links_by_spawn.get(&spawn) else { return };
        let Some(link) = self.links[index].as_mut() else { return };
        if link.violations.len() >= VIOLATIONS_MAX {
            link.violations.pop_front();
        }
        link.violations.push_back((process, call));
        let (compartment, pid) = (link.compartment, link.pid);
        let name = keeper::call_name(call);
        let fields = vec![("pid", json!(pid)), ("process", json!(process)), ("system_call", json!(name))];
        self.event(Severity::Critical, "sandbox_violation", Some(compartment), fields);
    }

    /// How a program of a worker's ended, by a signal as that one says: the keeper may know more.
    pub(super) fn program_death(&mut self, index: usize, signal: i32, process: Option<u32>) -> Death {
        if signal == libc::SIGKILL && process.is_some() {
            // What it said of a violation it said before it killed. The rest has to wait: it may be the end
            // of this very worker, whose answer is being read.
            for _ in 0..REPORTS_AHEAD_MAX {
                let Ok(Some(report)) = self.keeper.receive() else { break };
                match report {
                    Report::Violation { worker, process, call } => self.violation(worker, process, call),
                    other => self.late_reports.push_back(other),
                }
            }
        }
        let Some(link) = self.links[index].as_mut() else { return Death::Signal(signal) };
        let at = link.violations.iter().position(|(violator, _)| Some(*violator) == process);
        let call = at.and_then(|at| link.violations.remove(at)).map(|(_, call)| keeper::call_name(call));
        let is_filtered = self.is_filtered_at(index);
        match call {
            Some(call) => Death::Violation(call),
            None if signal == libc::SIGSYS && is_filtered => Death::Violation(""),
            None => Death::Signal(signal),
        }
    }

    fn is_filtered_at(&self, index: usize) -> bool {
        self.links[index].as_ref().is_some_and(|link| self.is_filtered(link.spawn))
    }

    fn process_runs(&mut self, spawn: u64, pid: u32, pidfd: OwnedFd, observed: Observed) {
        let Some(&index) = self.links_by_spawn.get(&spawn) else { return };
        let Some(link) = self.links[index].as_mut() else { return };
        link.observed = Some(observed);
        link.pidfd = Some(pidfd);
        link.pid = Some(pid);
        let (compartment, worker) = (link.compartment, link.worker);
        self.hand_output_over(index);
        self.apply(compartment, Event::Spawned { worker, pid }, Incoming::None);
        if self.links[index].as_ref().is_some_and(|link| has_out_of_band(&link.socket)) {
            self.out_of_band(Endpoint::Link(index));
        }
        // Its hello may have come before the news of its birth.
        self.link_readable(index);
    }

    /// A worker's process is gone; without a death of its own it was ended with its keeper.
    fn process_gone(&mut self, spawn: u64, death: Option<(Death, Usage)>) {
        let Some(&index) = self.links_by_spawn.get(&spawn) else { return };
        let read = self.links[index].as_mut().map_or(0, |link| link.reading.end());
        // What it said before it died still counts.
        // No end of file comes while something that it left behind has its end of the link.
        let waiting = |link: &Link| rustix::io::ioctl_fionread(&link.socket).unwrap_or(0);
        let mut reads = 0;
        while reads < READS_AFTER_DEATH_MAX
            && self.links[index].as_ref().is_some_and(|link| link.closed_at.is_none() && waiting(link) > 0)
        {
            reads += 1;
            self.read_link_once(index);
        }
        let Some(mut link) = self.take_link(spawn) else { return };
        let (compartment, worker) = (link.compartment, link.worker);
        self.tell_unread(compartment, worker, read);
        if death.is_some() {
            // Its id is not another's before all that has it is gone.
            self.sweeping.insert(spawn, Sweeping { compartment, worker, id: link.id.take() });
        }
        let id = link.id.take();
        self.give_back(id);
        let event = match death {
            Some((death, usage)) => {
                self.report_death(&link, death, usage);
                Event::Exited { worker, death }
            }
            None => Event::Lost { worker },
        };
        self.apply(compartment, event, Incoming::None);
        self.last_report = None;
    }

    /// Nothing is left of a worker that was told to be gone.
    fn swept(&mut self, spawn: u64) {
        let Some(Sweeping { compartment, worker, id }) = self.sweeping.remove(&spawn) else { return };
        self.give_back(id);
        self.apply(compartment, Event::Swept { worker }, Incoming::None);
    }

    /// Of a worker that is gone. Its id is not given back yet.
    fn take_link(&mut self, spawn: u64) -> Option<Link> {
        let index = self.links_by_spawn.remove(&spawn)?;
        let link = self.links[index].take()?;
        self.freed_links.push(index);
        self.dirty.retain(|&endpoint| endpoint != Endpoint::Link(index));
        self.again.retain(|&link| link != index);
        let _ = self.poll.registry().deregister(&mut SourceFd(&link.socket.as_raw_fd()));
        self.intake.close_soon(&link.socket);
        self.memory.recount_workers(link.counted_waiting, 0);
        let place = &mut self.compartments[link.compartment].links[link.worker.place as usize];
        if *place == Some(index) {
            *place = None;
        }
        Some(link)
    }

    /// The keeper is gone: nobody watches the workers. They are all ended, and all is begun anew.
    fn keeper_gone(&mut self) -> io::Result<()> {
        self.note_trouble("the keeper process died", "all workers are ended and started again");
        for link in self.links.iter().flatten() {
            if let Some(pidfd) = &link.pidfd {
                let _ = rustix::process::pidfd_send_signal(pidfd, rustix::process::Signal::KILL);
            }
        }
        let old = self.keeper.as_raw_fd();
        let _ = self.poll.registry().deregister(&mut SourceFd(&old));
        self.pause_before_keeper();
        self.keeper.replace(std::path::Path::new("/proc/self/exe"))?;
        self.keeper_asked_at = None;
        let interest = Interest::READABLE | Interest::WRITABLE;
        let fd = self.keeper.as_raw_fd();
        self.poll.registry().register(&mut SourceFd(&fd), super::KEEPER, interest)?;
        self.read_clock();
        self.keeper_since = self.now;
        let spawns: Vec<u64> = self.links_by_spawn.keys().copied().collect();
        for spawn in spawns {
            let death = self.host_of_programs(spawn).and_then(|link| link.death.take());
            self.process_gone(spawn, death);
        }
        // What the dead left behind was ended with the rest.
        let sweeping: Vec<u64> = self.sweeping.keys().copied().collect();
        sweeping.into_iter().for_each(|spawn| self.swept(spawn));
        Ok(())
    }

    /// Wants to hear from the keeper, after an order that matters.
    pub(super) fn ask_keeper(&mut self) {
        if self.keeper_asked_at.is_none() && self.keeper.ping().is_ok() {
            self.keeper_asked_at = Some(self.now);
            self.want_housekeeping();
        }
    }

    /// A keeper that is stopped, or stuck, would leave workers unkilled and deaths unnoticed for ever.
    pub(super) fn look_after_keeper(&mut self) {
        let Some(asked_at) = self.keeper_asked_at else { return };
        if self.now.since(asked_at) < KEEPER_ANSWERS_WITHIN {
            return self.want_housekeeping();
        }
        self.note_trouble("the keeper process does not answer", "it is killed, and replaced");
        self.keeper_asked_at = None;
        // Its end of the socket closes, and the rest is as if it had died by itself.
        let _ = self.keeper.kill_keeper();
    }

    /// A keeper that dies again and again is not started again and again at once. Without one there is
    /// nothing that could be done meanwhile.
    fn pause_before_keeper(&mut self) {
        let is_again = self.now.since(self.keeper_since) < KEEPER_PROVEN_AFTER;
        self.keeper_deaths = if is_again { self.keeper_deaths + 1 } else { 0 };
        if self.keeper_deaths > 2 {
            let doublings = (self.keeper_deaths - 3).min(4);
            std::thread::sleep(KEEPER_PAUSE * (1 << doublings));
        }
    }
}

/// Whether bytes out of band wait: what came before its process was known was not heard.
fn has_out_of_band(socket: &UnixStream) -> bool {
    let mut entries = [PollFd::new(socket, PollFlags::PRI)];
    rustix::event::poll(&mut entries, Some(&Timespec::default())).is_ok_and(|count| count > 0)
        && entries[0].revents().contains(PollFlags::PRI)
}

/// What to do about a start that failed, where that can be known.
pub(crate) fn advice(step: &str, error: &io::Error) -> &'static str {
    let is_step = |name: &str| step == name;
    if error.kind() != io::ErrorKind::PermissionDenied {
        return "";
    }
    if is_step("exec") || is_step("working directory") || step.starts_with("mount namespace: show") {
        return " (see whether the worker's user can reach it, and every folder above it)";
    }
    if step.starts_with("rlimit") {
        return " (a limit above the supervisor's own takes CAP_SYS_RESOURCE)";
    }
    ""
}
