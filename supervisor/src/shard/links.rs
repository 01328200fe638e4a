//! The workers' side: spawning through the keeper, handshake, jobs out, replies in. A worker is trusted
//! no more than a client: what it says is checked, and whoever breaks the protocol is killed.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use bulkhead_policy::{Death, Event, Reply, WorkerId};
use bulkhead_shared::client_protocol::{Hello, PROTOCOL_VERSION, Refused, role};
use bulkhead_shared::codec::{self, tag};
use bulkhead_shared::connection::{Inbox, Item, Outbox, Payload, Received, Scratch};
use bulkhead_shared::frame::{Header, MAGIC, kind};
use bulkhead_shared::limits::{CODE_BYTES_MAX, FRAME_OVERHEAD_BYTES_MAX, MESSAGE_BYTES_MAX, cut};
use bulkhead_shared::outcome::RESULT_TOO_LARGE;
use bulkhead_shared::worker_protocol::{
    Empty, Extend, Failed, Job, Limits, ProgramCrashed, Progressed, Status, WorkerWelcome, capability,
};
use bulkhead_shared::{Fault, HandlerFailure, JobId, RejectReason};
use mio::Interest;
use mio::unix::SourceFd;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::pipe::{PipeFlags, pipe_with};
use serde_json::json;

use super::{Endpoint, Incoming, Shard};
use crate::command::{Notice, Severity};
use crate::confinement::Whom;
use crate::keeper::{self, Exit, Observed, Report, Usage};
use crate::program::Program;

/// A worker that has closed its link has so long to exit before it counts as broken.
const EXIT_AFTER_CLOSE: Duration = Duration::from_secs(1);

/// Reads in a row before others have their turn.
const READS_PER_TURN: usize = 8;

/// How long the keeper may take to answer: it turns in milliseconds, unless the machine hardly does.
const KEEPER_ANSWERS_WITHIN: Duration = Duration::from_secs(10);

/// A keeper that lived so long is not one that dies at once.
const KEEPER_PROVEN_AFTER: Duration = Duration::from_secs(10);

/// The pause before the fourth keeper in a row; it doubles up to sixteen times itself.
const KEEPER_PAUSE: Duration = Duration::from_millis(100);

/// Bytes of a worker's own words about itself that are kept.
const STATUS_BYTES_MAX: usize = 256;

/// Violations of a worker's programs that are remembered until that one says how they ended.
const VIOLATIONS_MAX: usize = 64;

/// Reports that are read ahead to find one: as many as the keeper has waiting at most.
const REPORTS_AHEAD_MAX: usize = 1024;

/// Why a worker that is to have an id of its own is not started.
const NO_ID_LEFT: &str =
    "all ids of `worker_uids` are taken: write a larger range in [supervisor], or fewer `processes`";

/// Messages in a turn that a worker may send without being about a job; more is a flood, and waits.
const JOBS_UNKNOWN_MAX: u32 = 100_000;

pub(super) struct Link {
    pub(super) compartment: usize,
    pub(super) worker: WorkerId,
    slot: u32,
    /// The keeper's name for the worker.
    spawn: u64,
    /// What it was started with.
    pub(super) program: Arc<Program>,
    socket: UnixStream,
    pidfd: Option<OwnedFd>,
    pub(super) pid: Option<u32>,
    /// Since it is silent.
    pub(super) watch: Option<super::starvation::Watch>,
    /// How far it is confined, once its process runs.
    pub(super) observed: Option<Observed>,
    /// Its user id, if that is its own.
    id: Option<u32>,
    /// Forbidden system calls of programs that it has started: by which process, and which call.
    violations: VecDeque<(u32, u32)>,
    /// The reading ends of its output, until its process runs.
    output: Option<(OwnedFd, OwnedFd)>,
    stage: Stage,
    inbox: Inbox,
    outbox: Outbox,
    counted_waiting: usize,
    pub(super) status: Option<String>,
    pub(super) is_dirty: bool,
    closed_at: Option<bulkhead_policy::Time>,
    /// Whether it closed its end with something unread.
    left_unread: bool,
    /// Whether the last frame for it was a job: what it left unread then is that job, or the end of it.
    ends_with_job: bool,
    /// Replies for jobs it does not have.
    strays: u32,
    /// Nothing more comes than what waits in the socket.
    pub(super) is_read_closed: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    AwaitingHello,
    Welcomed,
    /// It broke the protocol; nothing it says counts any more.
    Disbelieved,
}

impl Shard {
    // Coming.

    pub(super) fn spawn(&mut self, compartment: usize, worker: WorkerId, slot: u32) {
        self.spawns += 1;
        let spawn = self.spawns;
        match self.try_spawn(compartment, worker, slot, spawn) {
            Ok(index) => {
                let links = &mut self.compartments[compartment].links;
                let place = worker.place as usize;
                if links.len() <= place {
                    links.resize(place + 1, None);
                }
                links[place] = Some(index);
                self.links_by_spawn.insert(spawn, index);
            }
            Err(error) => {
                let message = format!("the worker could not be prepared: {error}");
                self.later(compartment, worker, message);
            }
        }
    }

    /// A spawn that failed here is reported like one that failed in the keeper: not from within the
    /// action, which would turn a full table of descriptors into a recursion.
    fn later(&mut self, compartment: usize, worker: WorkerId, message: String) {
        self.failed_spawns.push((compartment, worker, message));
    }

    pub(super) fn report_failed_spawns(&mut self) {
        for (compartment, worker, message) in std::mem::take(&mut self.failed_spawns) {
            self.apply(compartment, Event::SpawnFailed { worker, message }, Incoming::None);
        }
    }

    fn try_spawn(
        &mut self,
        compartment: usize,
        worker: WorkerId,
        slot: u32,
        spawn: u64,
    ) -> io::Result<usize> {
        let program = self.owner(compartment).program.clone();
        let sandbox = program.sandbox();
        if let Some(obstacle) = sandbox.obstacle() {
            return Err(io::Error::other(obstacle));
        }
        let id = match sandbox.whom() {
            Whom::Each => Some(self.ids.take().ok_or_else(|| io::Error::other(NO_ID_LEFT))?),
            Whom::Own | Whom::One(_) => None,
        };
        let tried = self.order_worker(compartment, worker, slot, spawn, id);
        if tried.is_err() {
            id.into_iter().for_each(|id| self.ids.give_back(id));
        }
        tried
    }

    fn order_worker(
        &mut self,
        compartment: usize,
        worker: WorkerId,
        slot: u32,
        spawn: u64,
        id: Option<u32>,
    ) -> io::Result<usize> {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        let (stdout_read, stdout_write) = pipe_with(PipeFlags::CLOEXEC)?;
        let (stderr_read, stderr_write) = pipe_with(PipeFlags::CLOEXEC)?;
        let socket = UnixStream::from(ours);
        socket.set_nonblocking(true)?;
        let program = self.owner(compartment).program.clone();
        self.keeper.spawn(&program.order(spawn, id), theirs, stdout_write, stderr_write)?;
        self.ask_keeper();
        let index = self.free_links.pop().unwrap_or_else(|| {
            self.links.push(None);
            self.links.len() - 1
        });
        let interest = Interest::READABLE | Interest::WRITABLE;
        let token = Endpoint::Link(index).token();
        let registered = self.poll.registry().register(&mut SourceFd(&socket.as_raw_fd()), token, interest);
        if let Err(error) = registered {
            self.free_links.push(index);
            let _ = self.keeper.kill(spawn);
            return Err(error);
        }
        self.links[index] = Some(Link {
            compartment,
            worker,
            slot,
            spawn,
            program,
            socket,
            pidfd: None,
            pid: None,
            watch: None,
            observed: None,
            id,
            violations: VecDeque::new(),
            output: Some((stdout_read, stderr_read)),
            stage: Stage::AwaitingHello,
            inbox: Inbox::default(),
            outbox: Outbox::default(),
            counted_waiting: 0,
            status: None,
            is_dirty: false,
            closed_at: None,
            left_unread: false,
            ends_with_job: false,
            strays: 0,
            is_read_closed: false,
        });
        Ok(index)
    }

    pub(super) fn link_of(&self, compartment: usize, worker: WorkerId) -> Option<usize> {
        let index = (*self.compartments[compartment].links.get(worker.place as usize)?)?;
        self.links[index].as_ref().is_some_and(|link| link.worker == worker).then_some(index)
    }

    // The keeper.

    pub(super) fn keeper_ready(&mut self) -> io::Result<()> {
        if self.keeper.flush().is_err() {
            return self.keeper_gone();
        }
        loop {
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
            Report::Started { .. } => {}
            Report::Spawned { worker, pid, pidfd, observed } => {
                self.process_runs(worker, pid, pidfd, observed);
            }
            Report::Violation { worker, process, call } => self.violation(worker, process, call),
            Report::SpawnFailed { worker, step, error } => {
                let Some(link) = self.take_link(worker) else { return };
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
                self.process_gone(worker, Some((death, usage)));
            }
            Report::Pong => {}
            Report::Remains { count } => {
                self.note_trouble("processes of a dead worker cannot be killed", &format!("{count} remain"));
            }
        }
    }

    fn death(&self, spawn: u64, exit: Exit) -> Death {
        match exit {
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
    fn program_death(&mut self, index: usize, signal: i32, process: Option<u32>) -> Death {
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
        if let Some((stdout, stderr)) = link.output.take() {
            let bulkhead = self.owner(compartment).name.clone();
            self.notify(Notice::Output { bulkhead, pid, stdout, stderr });
        }
        self.apply(compartment, Event::Spawned { worker, pid }, Incoming::None);
        // Its hello may have come before the news of its birth.
        self.link_readable(index);
    }

    /// A worker's process is gone; without a death of its own it was ended with its keeper.
    fn process_gone(&mut self, spawn: u64, death: Option<(Death, Usage)>) {
        let Some(&index) = self.links_by_spawn.get(&spawn) else { return };
        // What it said before it died still counts.
        let mut rounds = 0;
        while self.links[index].as_ref().is_some_and(|link| link.closed_at.is_none()) && rounds < 4096 {
            rounds += 1;
            self.read_link_once(index);
        }
        let Some(link) = self.take_link(spawn) else { return };
        let (compartment, worker) = (link.compartment, link.worker);
        // What never left our own buffer was not read either.
        let left_unread = link.ends_with_job && (link.left_unread || !link.outbox.is_empty());
        let event = match death {
            Some((death, usage)) => {
                self.report_death(&link, death, usage, left_unread);
                Event::Exited { worker, death, left_unread }
            }
            None => Event::Lost { worker, left_unread },
        };
        self.apply(compartment, event, Incoming::None);
        self.last_report = None;
    }

    fn take_link(&mut self, spawn: u64) -> Option<Link> {
        let index = self.links_by_spawn.remove(&spawn)?;
        let link = self.links[index].take()?;
        link.id.into_iter().for_each(|id| self.ids.give_back(id));
        self.freed_links.push(index);
        self.dirty.retain(|&endpoint| endpoint != Endpoint::Link(index));
        self.again.retain(|&endpoint| endpoint != Endpoint::Link(index));
        let _ = self.poll.registry().deregister(&mut SourceFd(&link.socket.as_raw_fd()));
        self.buffered -= link.counted_waiting;
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
            self.process_gone(spawn, None);
        }
        Ok(())
    }

    /// Wants to hear from the keeper, after an order that matters.
    fn ask_keeper(&mut self) {
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

    pub(super) fn kill(&mut self, compartment: usize, worker: WorkerId) {
        let Some(index) = self.link_of(compartment, worker) else { return };
        if let Some(link) = self.links[index].as_ref() {
            // An error means that the keeper is gone, which is noticed and dealt with elsewhere.
            let _ = self.keeper.kill(link.spawn);
            self.ask_keeper();
        }
    }

    // Frames out.

    pub(super) fn dispatch(
        &mut self,
        compartment: usize,
        worker: WorkerId,
        job: JobId,
        remaining: Duration,
        incoming: &mut Incoming<'_>,
    ) {
        let Some(index) = self.link_of(compartment, worker) else { return };
        let Some(record) = self.compartments[compartment].policy.cargo_mut(job) else { return };
        let coming = if record.held.is_empty() { incoming.take() } else { Payload::NONE };
        let payload = record.held.give(coming, &mut self.buffered);
        let message = Job {
            operation: &record.operation,
            tenant: &record.tenant,
            remaining_us: u64::try_from(remaining.as_micros()).unwrap_or(u64::MAX),
        };
        let trace = record.trace.as_deref().map(|trace| (tag::TRACEPARENT, trace.handed_on().as_bytes()));
        let Some(link) = self.links[index].as_mut() else { return };
        // The names were checked when the job came in, so that the metadata fits.
        let pushed =
            link.outbox.push_pooled(kind::JOB, job.0, &message, trace.as_slice(), payload, &mut self.pool);
        debug_assert!(pushed.is_ok(), "a job did not fit");
        link.ends_with_job = true;
        self.mark_dirty(Endpoint::Link(index));
    }

    pub(super) fn send_cancel(&mut self, compartment: usize, worker: WorkerId, job: JobId) {
        self.send_plain(compartment, worker, kind::CANCEL_JOB, job.0);
    }

    pub(super) fn send_drain(&mut self, compartment: usize, worker: WorkerId) {
        self.send_plain(compartment, worker, kind::DRAIN, 0);
    }

    pub(super) fn send_limits(&mut self, compartment: usize, worker: WorkerId, max_in_flight: u32) {
        let Some(index) = self.link_of(compartment, worker) else { return };
        if let Some(link) = self.links[index].as_mut() {
            let limits = Limits { max_in_flight };
            let _ = link.outbox.push(kind::LIMITS, 0, &limits, &[], Payload::NONE);
            link.ends_with_job = false;
            self.mark_dirty(Endpoint::Link(index));
        }
    }

    fn send_plain(&mut self, compartment: usize, worker: WorkerId, kind: u8, number: u64) {
        let Some(index) = self.link_of(compartment, worker) else { return };
        if let Some(link) = self.links[index].as_mut() {
            let _ = link.outbox.push(kind, number, &Empty, &[], Payload::NONE);
            link.ends_with_job = false;
            self.mark_dirty(Endpoint::Link(index));
        }
    }

    pub(super) fn flush_link(&mut self, index: usize) {
        let Some(link) = self.links.get_mut(index).and_then(Option::as_mut) else { return };
        link.is_dirty = false;
        // An error means that the worker has closed its end; reading will tell.
        let _ = link.outbox.flush(&link.socket, &mut self.pool);
        let waiting = link.outbox.waiting_bytes();
        self.buffered = self.buffered - link.counted_waiting + waiting;
        link.counted_waiting = waiting;
    }

    // Frames in.

    pub(super) fn link_readable(&mut self, index: usize) {
        // Not before its process is known, so that every event about it has a worker.
        let is_known = self.links.get(index).and_then(Option::as_ref).is_some_and(|l| l.pidfd.is_some());
        if !is_known {
            return;
        }
        for _ in 0..READS_PER_TURN {
            if !self.read_link_once(index) {
                return;
            }
        }
        self.again.push(Endpoint::Link(index));
    }

    /// Reads once; returns whether there may be more.
    fn read_link_once(&mut self, index: usize) -> bool {
        let Some(link) = self.links[index].as_mut() else { return false };
        if link.closed_at.is_some() {
            return false;
        }
        let (compartment, worker) = (link.compartment, link.worker);
        let mut inbox = std::mem::take(&mut link.inbox);
        let mut scratch = std::mem::take(&mut self.scratch);
        let result = self.read_link(index, &mut inbox, &mut scratch);
        self.scratch = scratch;
        let Some(link) = self.links[index].as_mut() else { return false };
        link.inbox = inbox;
        let (is_mid_frame, is_read_closed) = (link.inbox.is_mid_frame(), link.is_read_closed);
        if is_mid_frame && result.is_ok() {
            // A large answer on its way is a sign of life, however long it takes.
            self.apply(compartment, Event::Heard { worker }, Incoming::None);
        }
        match result {
            Ok(Received::More) => true,
            Ok(Received::Drained) => is_read_closed,
            Ok(Received::Closed) => {
                if let Some(link) = self.links[index].as_mut() {
                    link.closed_at = Some(self.now);
                }
                self.want_housekeeping();
                false
            }
            Err(message) => {
                if let Some(link) = self.links[index].as_mut() {
                    link.stage = Stage::Disbelieved;
                }
                self.apply(compartment, Event::Broke { worker, message }, Incoming::None);
                false
            }
        }
    }

    fn read_link(
        &mut self,
        index: usize,
        inbox: &mut Inbox,
        scratch: &mut Scratch,
    ) -> Result<Received, String> {
        let Some(link) = self.links[index].as_ref() else { return Ok(Received::Drained) };
        let is_disbelieved = link.stage == Stage::Disbelieved;
        let (received, mut batch) = match inbox.receive(&link.socket, scratch) {
            Ok(read) => read,
            Err(error) => {
                // A reset is the kernel's word for a peer that closed with bytes unread.
                let is_reset = error.kind() == io::ErrorKind::ConnectionReset;
                if let Some(link) = self.links[index].as_mut() {
                    link.left_unread = is_reset;
                }
                return Ok(Received::Closed);
            }
        };
        if is_disbelieved {
            return Ok(received);
        }
        while let Some(item) = batch.next().map_err(|error| error.to_string())? {
            match item {
                Item::Frame { header, metadata, payload } => {
                    self.worker_frame(index, header, metadata, Incoming::Borrowed(payload))?;
                }
                Item::Large { header, metadata, payload } => {
                    self.worker_frame(index, header, &metadata, Incoming::Owned(payload))?;
                }
                Item::Announced { header, metadata } => {
                    if self.worker_announces(index, header, metadata)? {
                        batch.accept(self.pool.take(header.payload_length()));
                    }
                }
            }
        }
        Ok(received)
    }

    /// A large frame begins: whether its payload is wanted.
    fn worker_announces(&mut self, index: usize, header: Header, metadata: &[u8]) -> Result<bool, String> {
        let Some(link) = self.links[index].as_ref() else { return Ok(false) };
        if link.stage == Stage::AwaitingHello || header.kind != kind::RESULT {
            self.worker_frame(index, header, metadata, Incoming::None)?;
            return Ok(false);
        }
        let (compartment, worker) = (link.compartment, link.worker);
        let most = self.owner(compartment).max_result;
        let size = header.payload_length() as u64;
        if size <= most {
            return Ok(true);
        }
        let failure = too_large(size, most);
        self.reply(compartment, worker, header.number, Reply::Failed(failure), Incoming::None);
        Ok(false)
    }

    fn worker_frame(
        &mut self,
        index: usize,
        header: Header,
        metadata: &[u8],
        payload: Incoming<'_>,
    ) -> Result<(), String> {
        let Some(link) = self.links[index].as_ref() else { return Ok(()) };
        let (compartment, worker, stage) = (link.compartment, link.worker, link.stage);
        match stage {
            Stage::AwaitingHello => return self.worker_hello(index, header, metadata),
            Stage::Disbelieved => return Ok(()),
            Stage::Welcomed => {}
        }
        let number = header.number;
        match header.kind {
            kind::RESULT => {
                check_empty(metadata)?;
                let most = self.owner(compartment).max_result;
                let size = payload.len() as u64;
                if size > most {
                    let reply = Reply::Failed(too_large(size, most));
                    self.reply(compartment, worker, number, reply, Incoming::None);
                } else {
                    self.reply(compartment, worker, number, Reply::Ok, payload);
                }
            }
            kind::FAILED => {
                let failed = decode::<Failed<'_>>(metadata)?;
                let failure = HandlerFailure {
                    code: cut(failed.code, CODE_BYTES_MAX).to_owned(),
                    message: cut(failed.message, MESSAGE_BYTES_MAX).to_owned(),
                    retryable: failed.retryable != 0,
                    fault: if failed.fault == Fault::Caller as u8 {
                        Fault::Caller
                    } else {
                        Fault::Dependency
                    },
                };
                self.reply(compartment, worker, number, Reply::Failed(failure), Incoming::None);
            }
            kind::PROGRAM_CRASHED => {
                let (crashed, extensions) =
                    codec::decode::<ProgramCrashed<'_>>(metadata, &[]).map_err(|error| error.to_string())?;
                let process = extensions.get(tag::PROCESS).and_then(|bytes| bytes.try_into().ok());
                let death = self.program_death(index, crashed.signal, process.map(u32::from_le_bytes));
                let message = match death {
                    Death::Violation(_) => describe_program(death),
                    _ => cut(crashed.message, MESSAGE_BYTES_MAX).to_owned(),
                };
                self.report_program(compartment, worker, JobId(number), death, &message);
                let reply = Reply::ProgramCrashed { death, message };
                self.reply(compartment, worker, number, reply, Incoming::None);
                self.last_report = None;
            }
            _ => self.worker_notice(index, header, metadata)?,
        }
        self.check_strays(index)
    }

    /// Frames that are not the answer to a job.
    fn worker_notice(&mut self, index: usize, header: Header, metadata: &[u8]) -> Result<(), String> {
        let Some(link) = self.links[index].as_mut() else { return Ok(()) };
        let (compartment, worker) = (link.compartment, link.worker);
        let event = match header.kind {
            kind::READY | kind::HEARTBEAT | kind::STARTED | kind::STOPPING => {
                check_empty(metadata)?;
                match header.kind {
                    kind::READY => Event::Ready { worker },
                    kind::STOPPING => Event::Stopping { worker },
                    _ => Event::Heard { worker },
                }
            }
            kind::EXTEND_START => {
                let extend = decode::<Extend>(metadata)?;
                Event::ExtendStart { worker, more: Duration::from_millis(extend.more_ms.into()) }
            }
            kind::STATUS => {
                let status = decode::<Status<'_>>(metadata)?;
                let text = cut(status.text, STATUS_BYTES_MAX).to_owned();
                link.status = Some(text.clone());
                Event::Said { worker, text }
            }
            kind::PROGRESSED => {
                let progress = decode::<Progressed<'_>>(metadata)?;
                self.progress(compartment, worker, header.number, progress);
                Event::Heard { worker }
            }
            kind::HELLO => return Err("it said hello twice".into()),
            unknown if header.is_critical() => {
                return Err(format!("it sent a frame of kind {unknown} that must be understood"));
            }
            _ => Event::Heard { worker },
        };
        self.apply(compartment, event, Incoming::None);
        Ok(())
    }

    fn worker_hello(&mut self, index: usize, header: Header, metadata: &[u8]) -> Result<(), String> {
        if header.kind != kind::HELLO || header.number != MAGIC {
            return Err("its first frame is not a hello".into());
        }
        let hello = decode::<Hello<'_>>(metadata)?;
        let Some(link) = self.links[index].as_mut() else { return Ok(()) };
        let (compartment, worker) = (link.compartment, link.worker);
        if hello.role != role::WORKER {
            return Err("it says hello in the role of a client".into());
        }
        if !(hello.version_min..=hello.version_max).contains(&PROTOCOL_VERSION) {
            let message = format!(
                "{} {} speaks the protocol versions {} to {}, this supervisor version {PROTOCOL_VERSION}: \
                 build the worker with a matching SDK",
                cut(hello.name, 64),
                cut(hello.version, 64),
                hello.version_min,
                hello.version_max
            );
            let refused = Refused { reason: RejectReason::Invalid.code(), message: &message };
            let _ = link.outbox.push(kind::REFUSED, 0, &refused, &[], Payload::NONE);
            self.flush_link(index);
            return Err(message);
        }
        let (entry, max_in_flight) = (
            &self.named[self.compartments[compartment].named],
            self.compartments[compartment].policy.limits().max_in_flight,
        );
        let welcome = WorkerWelcome {
            version: PROTOCOL_VERSION,
            frame_bytes_max: (entry.max_result + FRAME_OVERHEAD_BYTES_MAX as u64).min(u64::from(u32::MAX))
                as u32,
            capabilities: 0,
            slot: link.slot,
            generation: worker.generation,
            max_in_flight,
            heartbeat_ms: u32::try_from(entry.heartbeat.as_millis()).unwrap_or(u32::MAX),
            result_bytes_max: entry.max_result,
            bulkhead: &entry.name,
        };
        let seal = link.program.sandbox().seal().map(|program| (tag::SEAL, program));
        let _ = link.outbox.push(kind::WORKER_WELCOME, MAGIC, &welcome, seal.as_slice(), Payload::NONE);
        link.stage = Stage::Welcomed;
        self.mark_dirty(Endpoint::Link(index));
        let has_dispatch_thread = hello.capabilities & capability::DISPATCH_THREAD != 0;
        let can_resize = hello.capabilities & capability::RESIZE != 0;
        let event = Event::Hello { worker, has_dispatch_thread, can_resize };
        self.apply(compartment, event, Incoming::None);
        Ok(())
    }

    fn reply(
        &mut self,
        compartment: usize,
        worker: WorkerId,
        number: u64,
        reply: Reply,
        payload: Incoming<'_>,
    ) {
        // The answer to a job that was cancelled is late and yet owed.
        let is_owed = self.compartments[compartment].policy.holds(worker, JobId(number));
        let late = |shard: &Self| shard.compartments[compartment].policy.counters().late_replies;
        let before = late(self);
        self.apply(compartment, Event::Replied { worker, job: JobId(number), reply }, payload);
        if !self.compartments[compartment].is_replay {
            let count = late(self) - before;
            self.named_tally(compartment).late_replies += count;
        }
        if !is_owed
            && let Some(index) = self.link_of(compartment, worker)
            && let Some(link) = self.links[index].as_mut()
        {
            link.strays = link.strays.saturating_add(1);
        }
    }

    /// A few replies that match nothing are late; very many are a worker that has lost its mind.
    fn check_strays(&self, index: usize) -> Result<(), String> {
        match self.links[index].as_ref() {
            Some(link) if link.strays > JOBS_UNKNOWN_MAX => {
                Err(format!("it sent more than {JOBS_UNKNOWN_MAX} replies for jobs that it does not have"))
            }
            _ => Ok(()),
        }
    }

    fn progress(&mut self, compartment: usize, worker: WorkerId, number: u64, progress: Progressed<'_>) {
        let policy = &mut self.compartments[compartment].policy;
        if !policy.holds(worker, JobId(number)) || !progress.fraction.is_finite() {
            return;
        }
        let Some(record) = policy.cargo_mut(JobId(number)) else { return };
        let (session, request) = (record.session, record.request);
        let text = cut(progress.text, MESSAGE_BYTES_MAX);
        let fraction = progress.fraction.clamp(0.0, 1.0);
        self.send_progress(session, request, Progressed { fraction, text });
    }

    pub(super) fn look_after_links(&mut self) {
        let now = self.now;
        for index in 0..self.links.len() {
            let Some(link) = self.links[index].as_ref() else { continue };
            let Some(closed_at) = link.closed_at else { continue };
            let (compartment, worker) = (link.compartment, link.worker);
            if now.since(closed_at) >= EXIT_AFTER_CLOSE {
                let message = "it closed its link and lives on".to_owned();
                self.apply(compartment, Event::Broke { worker, message }, Incoming::None);
            } else {
                self.want_housekeeping();
            }
        }
    }
}

fn decode<'m, M: bincode::BorrowDecode<'m, ()>>(metadata: &'m [u8]) -> Result<M, String> {
    codec::decode(metadata, &[]).map(|(message, _)| message).map_err(|error| error.to_string())
}

/// Metadata without a structure can still have extensions, and among them one that must be understood.
fn check_empty(metadata: &[u8]) -> Result<(), String> {
    if metadata == [0; 8] { Ok(()) } else { decode::<Empty>(metadata).map(|_| ()) }
}

fn too_large(size: u64, most: u64) -> HandlerFailure {
    HandlerFailure {
        code: RESULT_TOO_LARGE.to_owned(),
        message: format!("the result has {size} bytes; max_result is {most}"),
        retryable: false,
        fault: Fault::Dependency,
    }
}

/// What to do about a start that failed, where that can be known.
fn advice(step: &str, error: &io::Error) -> &'static str {
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

/// How a program ended, for people.
fn describe_program(death: Death) -> String {
    format!("the program {death}")
}
