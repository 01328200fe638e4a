//! The workers' side: spawning through the keeper, handshake, jobs out, replies in. A worker is trusted
//! no more than a client: what it says is checked, and one that breaks the protocol is killed.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use bulkhead_policy::{Death, Event, Reply, Time, WorkerId};
use bulkhead_shared::client_protocol::{Hello, PROTOCOL_VERSION, Refused, role};
use bulkhead_shared::codec::{self, tag};
use bulkhead_shared::connection::{Inbox, Item, Outbox, Payload, Received, Scratch};
use bulkhead_shared::frame::{Header, MAGIC, kind};
use bulkhead_shared::limits::{
    CODE_BYTES_MAX, FRAME_OVERHEAD_BYTES_MAX, INLINE_PAYLOAD_BYTES_MAX, MESSAGE_BYTES_MAX, cut,
};
use bulkhead_shared::outcome::RESULT_TOO_LARGE;
use bulkhead_shared::worker_protocol::{
    Empty, Extend, Failed, Job, Limits, ProgramCrashed, Progressed, Status, WorkerWelcome, capability,
};
use bulkhead_shared::{Fault, HandlerFailure, JobId, RejectReason};
use mio::unix::SourceFd;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::pipe::{PipeFlags, pipe_with};

use super::keeper_link::Wanted;
use super::notices::Notices;
use super::slab::{CompartmentIndex, LinkIndex};
use super::starvation::Watch;
use super::unread::Reading;
use super::{DataPlane, Endpoint, INTEREST, Incoming};
use crate::confinement::Whom;
use crate::descriptors::{CAME_WITH_DESCRIPTORS, NOT_TAKEN};
use crate::keeper::{Observed, Usage};
use crate::program::Program;

/// A worker that has closed its link has so long to exit before it counts as broken.
const EXIT_AFTER_CLOSE: Duration = Duration::from_secs(1);

/// Reads in a row before others have their turn.
const READS_PER_TURN: usize = 8;

/// Bytes of a worker's own words about itself that are kept.
const STATUS_BYTES_MAX: usize = 256;

/// Messages in a turn that a worker may send without being about a job; more is a flood, and waits.
const JOBS_UNKNOWN_MAX: u32 = 100_000;

pub(super) struct Link {
    pub(super) compartment: CompartmentIndex,
    pub(super) worker: WorkerId,
    slot: u32,
    /// The keeper's name for the worker.
    pub(super) spawn: u64,
    /// What it was started with.
    pub(super) program: Arc<Program>,
    pub(super) process: Process,
    /// Its user id, if that is its own.
    pub(super) id: Option<u32>,
    pub(super) end: End,
    // The socket, both ways.
    pub(super) socket: UnixStream,
    inbox: Inbox,
    pub(super) reads: Reads,
    pub(super) outbox: Outbox,
    pub(super) is_dirty: bool,
    /// Bytes in the outbox, as counted last.
    pub(super) counted_waiting: usize,
    /// What it has read of the link, for the time after it.
    pub(super) reading: Reading,
    // What it says.
    stage: Stage,
    pub(super) notices: Notices,
    pub(super) status: Option<String>,
}

/// What is known of a worker's process.
pub(super) enum Process {
    /// It is ordered. Its output has these reading ends.
    Ordered { output: Output },
    /// It runs, or ran.
    Running(Box<Running>),
}

/// The reading ends of a worker's standard output and error.
pub(super) type Output = (OwnedFd, OwnedFd);

pub(super) struct Running {
    pub(super) pid: u32,
    pub(super) pidfd: OwnedFd,
    /// How far it is confined.
    pub(super) observed: Observed,
    /// Since it is silent.
    pub(super) watch: Option<Arc<Watch>>,
    /// Until there is room for it at the control plane.
    pub(super) output: Option<Output>,
    /// Forbidden system calls of programs that it has started: by which process, and which call.
    pub(super) violations: VecDeque<(u32, u32)>,
}

/// How far a link can still be read.
pub(super) enum Reads {
    Open,
    /// The worker has closed its end: nothing more comes than what waits in the socket.
    Closing,
    /// All was read.
    Closed {
        at: Time,
    },
}

impl Reads {
    /// The worker has closed its end.
    pub(super) fn close(&mut self) {
        if matches!(self, Self::Open) {
            *self = Self::Closing;
        }
    }
}

/// How a worker comes to its end, beyond what policy decides.
pub(super) enum End {
    /// It does not, as far as is known.
    None,
    /// It is ended since it has too much in its temporary folder.
    Overfull,
    /// Its process ended in this way, which is told when nothing is left of its programs.
    Dead { death: Death, usage: Usage },
}

enum Stage {
    AwaitingHello,
    Welcomed {
        /// Replies for jobs it does not have.
        strays: u32,
        oversized: Option<Oversized>,
    },
    /// It broke the protocol; nothing it says counts any more.
    ProtocolViolated,
}

/// A result that is too large and still coming: its client was told, and its job has its permit until the worker has
/// sent it all.
struct Oversized {
    job: JobId,
    failure: HandlerFailure,
}

impl DataPlane {
    // Coming.

    pub(super) fn spawn(&mut self, compartment: CompartmentIndex, worker: WorkerId, slot: u32) {
        if self.keeper.wait_with(Wanted { compartment, worker, slot }) {
            return;
        }
        self.links.spawned += 1;
        let spawn = self.links.spawned;
        match self.try_spawn(compartment, worker, slot, spawn) {
            Ok(index) => {
                let links = &mut self.compartments[compartment].links;
                let place = worker.place as usize;
                if links.len() <= place {
                    links.resize(place + 1, None);
                }
                links[place] = Some(index);
                self.links.by_spawn.insert(spawn, index);
            }
            Err(error) => {
                let message = format!("the worker could not be prepared: {error}");
                self.defer_spawn_failure(compartment, worker, message);
            }
        }
    }

    /// A spawn that failed here is reported like one that failed in the keeper: not from within the
    /// action, which would turn a full table of descriptors into a recursion.
    fn defer_spawn_failure(&mut self, compartment: CompartmentIndex, worker: WorkerId, message: String) {
        self.links.failed_spawns.push((compartment, worker, message));
    }

    pub(super) fn report_failed_spawns(&mut self) {
        for (compartment, worker, message) in std::mem::take(&mut self.links.failed_spawns) {
            self.apply(compartment, Event::SpawnFailed { worker, message }, Incoming::None);
        }
    }

    fn try_spawn(
        &mut self,
        compartment: CompartmentIndex,
        worker: WorkerId,
        slot: u32,
        spawn: u64,
    ) -> io::Result<LinkIndex> {
        let program = self.owner(compartment).program.clone();
        let sandbox = program.sandbox();
        if let Some(obstacle) = sandbox.obstacle() {
            return Err(io::Error::other(obstacle));
        }
        let id = match sandbox.whom() {
            Whom::Each => self.links.take_id()?,
            Whom::Own | Whom::One(_) => None,
        };
        let tried = self.order_worker(compartment, worker, slot, spawn, id);
        if tried.is_err() {
            self.links.give_back(id);
        }
        tried
    }

    fn order_worker(
        &mut self,
        compartment: CompartmentIndex,
        worker: WorkerId,
        slot: u32,
        spawn: u64,
        id: Option<u32>,
    ) -> io::Result<LinkIndex> {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        let (stdout_read, stdout_write) = pipe_with(PipeFlags::CLOEXEC)?;
        let (stderr_read, stderr_write) = pipe_with(PipeFlags::CLOEXEC)?;
        let socket = UnixStream::from(ours);
        socket.set_nonblocking(true)?;
        let reading = Reading::of(&theirs)?;
        self.entrance.intake.prepare(&socket)?;
        let program = self.owner(compartment).program.clone();
        let token = Endpoint::Link(self.links.next()).token();
        let fd = socket.as_raw_fd();
        self.poll.registry().register(&mut SourceFd(&fd), token, INTEREST)?;
        // Last: what has been ordered has the id, whatever becomes of it here.
        let ordered = self.keeper.spawn(&program.order(spawn, id), theirs, (stdout_write, stderr_write));
        if let Err(error) = ordered {
            let _ = self.poll.registry().deregister(&mut SourceFd(&fd));
            return Err(error);
        }
        self.ask_keeper();
        Ok(self.links.insert(Link {
            compartment,
            worker,
            slot,
            spawn,
            program,
            process: Process::Ordered { output: (stdout_read, stderr_read) },
            id,
            end: End::None,
            socket,
            inbox: Inbox::default(),
            reads: Reads::Open,
            outbox: Outbox::default(),
            is_dirty: false,
            counted_waiting: 0,
            reading,
            stage: Stage::AwaitingHello,
            notices: Notices::default(),
            status: None,
        }))
    }

    pub(super) fn link_of(&self, compartment: CompartmentIndex, worker: WorkerId) -> Option<LinkIndex> {
        let index = (*self.compartments[compartment].links.get(worker.place as usize)?)?;
        self.links.get(index).is_some_and(|link| link.worker == worker).then_some(index)
    }

    pub(super) fn kill(&mut self, compartment: CompartmentIndex, worker: WorkerId) {
        if let Some(index) = self.link_of(compartment, worker) {
            self.keeper.kill(self.links[index].spawn, self.now);
            self.want_housekeeping();
        } else if self.keeper.forget_wanted(compartment, worker) {
            let message = "it was ended before there was a keeper process to start it".to_owned();
            self.defer_spawn_failure(compartment, worker, message);
        }
    }

    // Frames out.

    pub(super) fn dispatch(
        &mut self,
        compartment: CompartmentIndex,
        worker: WorkerId,
        job: JobId,
        remaining: Duration,
        incoming: &mut Incoming<'_>,
    ) {
        let Some(index) = self.link_of(compartment, worker) else { return };
        let Some(record) = self.compartments[compartment].policy.cargo_mut(job) else { return };
        let Some(link) = self.links.get_mut(index) else { return };
        record.given = link.reading.given_behind(link.outbox.waiting_bytes());
        let coming = if record.held.is_empty() { incoming.take() } else { Payload::NONE };
        self.memory.discharge(&mut record.charge);
        let payload = record.held.give(coming);
        let message = Job {
            operation: &record.operation,
            tenant: &record.tenant,
            remaining_us: u64::try_from(remaining.as_micros()).unwrap_or(u64::MAX),
        };
        let trace = record.trace.as_deref().map(|trace| (tag::TRACEPARENT, trace.handed_on().as_bytes()));
        // The names were checked when the job came in, so that the metadata fits.
        let pushed = link.outbox.push_pooled(
            kind::JOB,
            job.0,
            &message,
            trace.as_slice(),
            payload,
            &mut self.buffers.pool,
        );
        debug_assert!(pushed.is_ok(), "a job did not fit");
        link.notices.add_job();
        if record.held.payload.is_some() {
            self.charge_kept(compartment, job);
        }
        self.mark_dirty(Endpoint::Link(index));
    }

    pub(super) fn send_cancel(&mut self, compartment: CompartmentIndex, worker: WorkerId, job: JobId) {
        self.send_plain(compartment, worker, kind::CANCEL_JOB, job.0);
    }

    pub(super) fn send_drain(&mut self, compartment: CompartmentIndex, worker: WorkerId) {
        self.send_plain(compartment, worker, kind::DRAIN, 0);
    }

    pub(super) fn send_limits(
        &mut self,
        compartment: CompartmentIndex,
        worker: WorkerId,
        max_in_flight: u32,
    ) {
        let Some(index) = self.link_of(compartment, worker) else { return };
        let limits = Limits { max_in_flight };
        let _ = self.links[index].outbox.push(kind::LIMITS, 0, &limits, &[], Payload::NONE);
        self.mark_dirty(Endpoint::Link(index));
    }

    fn send_plain(&mut self, compartment: CompartmentIndex, worker: WorkerId, kind: u8, number: u64) {
        let Some(index) = self.link_of(compartment, worker) else { return };
        let _ = self.links[index].outbox.push(kind, number, &Empty, &[], Payload::NONE);
        self.mark_dirty(Endpoint::Link(index));
    }

    pub(super) fn flush_link(&mut self, index: LinkIndex) {
        let Some(link) = self.links.get_mut(index) else { return };
        link.is_dirty = false;
        let before = link.outbox.waiting_bytes();
        // An error means that the worker has shut its end down; reading will tell.
        let _ = link.outbox.flush(&link.socket, &mut self.buffers.pool);
        let waiting = link.outbox.waiting_bytes();
        link.reading.written(before - waiting);
        let was = std::mem::replace(&mut link.counted_waiting, waiting);
        self.memory.recount_workers(was, waiting);
    }

    // Frames in. A link goes when the keeper says so, and never while it is read: what the keeper says meanwhile is put
    // off. So its number names it from the first byte to the last.

    pub(super) fn link_readable(&mut self, index: LinkIndex) {
        // Not before its process is known, so that every event about it has a worker.
        let is_known = self.links.get(index).is_some_and(|link| link.running().is_some());
        if !is_known || self.is_paused(index) {
            return;
        }
        for _ in 0..READS_PER_TURN {
            if !self.read_link_once(index) || self.is_paused(index) {
                return;
            }
        }
        self.links.read_again(index);
    }

    /// Reads once; returns whether there may be more.
    pub(super) fn read_link_once(&mut self, index: LinkIndex) -> bool {
        let link = &mut self.links[index];
        if matches!(link.reads, Reads::Closed { .. }) {
            return false;
        }
        let (compartment, worker) = (link.compartment, link.worker);
        let mut inbox = std::mem::take(&mut link.inbox);
        let mut scratch = std::mem::take(&mut self.buffers.scratch);
        let result = self.read_link(index, &mut inbox, &mut scratch);
        self.buffers.scratch = scratch;
        let heard = self.hear_notices(index);
        let result = result.and_then(|received| heard.map(|()| received));
        let link = &mut self.links[index];
        link.inbox = inbox;
        let (is_mid_frame, is_closing) = (link.inbox.is_mid_frame(), matches!(link.reads, Reads::Closing));
        let begun = link.inbox.begun_header().filter(|_| !matches!(link.stage, Stage::ProtocolViolated));
        let is_new = matches!(link.stage, Stage::AwaitingHello);
        let result = result.and_then(|received| {
            begun.map_or(Ok(()), |header| check_begun(header, is_new))?;
            Ok(received)
        });
        if is_mid_frame && result.is_ok() {
            // A large answer on its way is a sign of life, however long it takes.
            self.apply(compartment, Event::Heard { worker }, Incoming::None);
        }
        match result {
            Ok(Received::More) => true,
            Ok(Received::Drained) => is_closing,
            Ok(Received::Closed) => {
                self.links[index].reads = Reads::Closed { at: self.now };
                self.want_housekeeping();
                false
            }
            Err(message) => {
                self.break_link(index, message);
                false
            }
        }
    }

    /// The worker broke the protocol: nothing that it says counts any more.
    pub(super) fn break_link(&mut self, index: LinkIndex, message: String) {
        let Some(link) = self.links.get_mut(index) else { return };
        link.stage = Stage::ProtocolViolated;
        let (compartment, worker) = (link.compartment, link.worker);
        self.apply(compartment, Event::Broke { worker, message }, Incoming::None);
    }

    fn read_link(
        &mut self,
        index: LinkIndex,
        inbox: &mut Inbox,
        scratch: &mut Scratch,
    ) -> Result<Received, String> {
        let link = &self.links[index];
        let is_violated = matches!(link.stage, Stage::ProtocolViolated);
        let (received, mut batch) =
            match inbox.receive_by(scratch, |buffer| self.entrance.intake.receive(&link.socket, buffer)) {
                Ok(read) => read,
                Err(error) if error.raw_os_error() == Some(CAME_WITH_DESCRIPTORS.raw_os_error()) => {
                    return if is_violated { Ok(Received::Drained) } else { Err(NOT_TAKEN.into()) };
                }
                Err(_) => return Ok(Received::Closed),
            };
        if is_violated {
            return Ok(received);
        }
        let mut is_oversized = link.is_oversized();
        while let Some(item) = batch.next().map_err(|error| error.to_string())? {
            // Another frame begins only where the one before has ended.
            if std::mem::take(&mut is_oversized) {
                self.end_oversized(index);
            }
            match item {
                Item::Frame { header, metadata, payload } => {
                    self.worker_frame(index, header, metadata, Incoming::Borrowed(payload))?;
                }
                Item::Large { header, metadata, payload } => {
                    self.worker_frame(index, header, &metadata, Incoming::Owned(payload))?;
                }
                Item::Announced { header, metadata } => {
                    if self.worker_announces(index, header, metadata)? {
                        let fit = self.buffers.pool.take(batch.buffer_bytes());
                        batch.accept(fit);
                    } else {
                        is_oversized = self.links.get(index).is_some_and(Link::is_oversized);
                    }
                }
            }
        }
        if is_oversized && !batch.is_skipping() {
            self.end_oversized(index);
        }
        Ok(received)
    }

    /// A large frame begins: whether its payload is wanted.
    fn worker_announces(
        &mut self,
        index: LinkIndex,
        header: Header,
        metadata: &[u8],
    ) -> Result<bool, String> {
        let link = &self.links[index];
        if matches!(link.stage, Stage::AwaitingHello) || header.kind != kind::RESULT {
            self.worker_frame(index, header, metadata, Incoming::None)?;
            return Ok(false);
        }
        let compartment = link.compartment;
        let most = self.owner(compartment).max_result;
        let size = header.payload_length() as u64;
        if size <= most {
            return Ok(true);
        }
        check_empty(metadata)?;
        let (worker, job, failure) = (link.worker, JobId(header.number), too_large(size, most));
        if let Some(Link { stage: Stage::Welcomed { oversized, .. }, .. }) = self.links.get_mut(index) {
            *oversized = Some(Oversized { job, failure: failure.clone() });
        }
        self.apply(compartment, Event::Oversized { worker, job, failure }, Incoming::None);
        Ok(false)
    }

    /// A result that is too large has come to its end: its permit is free.
    fn end_oversized(&mut self, index: LinkIndex) {
        let link = &mut self.links[index];
        let (compartment, worker) = (link.compartment, link.worker);
        let Stage::Welcomed { oversized, .. } = &mut link.stage else { return };
        if let Some(Oversized { job, failure }) = oversized.take() {
            self.reply(compartment, worker, job.0, Reply::Failed(failure), Incoming::None);
        }
    }

    fn worker_frame(
        &mut self,
        index: LinkIndex,
        header: Header,
        metadata: &[u8],
        payload: Incoming<'_>,
    ) -> Result<(), String> {
        let link = &self.links[index];
        let (compartment, worker) = (link.compartment, link.worker);
        match link.stage {
            Stage::AwaitingHello => return self.worker_hello(index, header, metadata),
            Stage::ProtocolViolated => return Ok(()),
            Stage::Welcomed { .. } => {}
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
                self.reporter.last_report = None;
            }
            _ => self.worker_notice(index, header, metadata)?,
        }
        self.check_strays(index)
    }

    /// Frames that are not the answer to a job.
    fn worker_notice(&mut self, index: LinkIndex, header: Header, metadata: &[u8]) -> Result<(), String> {
        let link = &mut self.links[index];
        let (compartment, worker) = (link.compartment, link.worker);
        link.notices.spend(header.length as usize);
        let event = match header.kind {
            kind::READY | kind::HEARTBEAT | kind::STARTED | kind::STOPPING => {
                check_empty(metadata)?;
                match header.kind {
                    kind::STARTED => {
                        self.note_begun(compartment, worker, JobId(header.number));
                        return Ok(());
                    }
                    kind::READY => Event::Ready { worker },
                    kind::STOPPING => Event::Stopping { worker },
                    _ => return Ok(()),
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
                link.notices.say(text);
                return Ok(());
            }
            kind::PROGRESSED => {
                let progress = decode::<Progressed<'_>>(metadata)?;
                self.progress(compartment, worker, header.number, progress);
                return Ok(());
            }
            kind::HELLO => return Err("it said hello twice".into()),
            unknown if header.is_critical() => {
                return Err(format!("it sent a frame of kind {unknown} that must be understood"));
            }
            _ => return Ok(()),
        };
        self.apply(compartment, event, Incoming::None);
        Ok(())
    }

    fn worker_hello(&mut self, index: LinkIndex, header: Header, metadata: &[u8]) -> Result<(), String> {
        if header.kind != kind::HELLO || header.number != MAGIC {
            return Err("its first frame is not a hello".into());
        }
        let hello = decode::<Hello<'_>>(metadata)?;
        let link = &mut self.links[index];
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
            &self.bulkheads[self.compartments[compartment].bulkhead],
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
        link.stage = Stage::Welcomed { strays: 0, oversized: None };
        self.mark_dirty(Endpoint::Link(index));
        let has_dispatch_thread = hello.capabilities & capability::DISPATCH_THREAD != 0;
        let can_resize = hello.capabilities & capability::RESIZE != 0;
        let event = Event::Hello { worker, has_dispatch_thread, can_resize };
        self.apply(compartment, event, Incoming::None);
        Ok(())
    }

    fn reply(
        &mut self,
        compartment: CompartmentIndex,
        worker: WorkerId,
        number: u64,
        reply: Reply,
        payload: Incoming<'_>,
    ) {
        let size = payload.len();
        // The answer to a job that was cancelled is late and yet owed.
        let is_owed = self.compartments[compartment].policy.holds(worker, JobId(number));
        let late = |plane: &Self| plane.compartments[compartment].policy.counters().late_replies;
        let before = late(self);
        self.apply(compartment, Event::Replied { worker, job: JobId(number), reply }, payload);
        if !self.compartments[compartment].is_replay {
            let count = late(self) - before;
            self.tally_of(compartment).late_replies += count;
        }
        if !is_owed
            && let Some(index) = self.link_of(compartment, worker)
            && let Some(link) = self.links.get_mut(index)
        {
            link.notices.spend(size);
            if let Stage::Welcomed { strays, .. } = &mut link.stage {
                *strays = strays.saturating_add(1);
            }
        }
    }

    /// A few replies that match nothing are late; very many are a worker that has lost its mind.
    fn check_strays(&self, index: LinkIndex) -> Result<(), String> {
        match self.links.get(index).map(|link| &link.stage) {
            Some(Stage::Welcomed { strays, .. }) if *strays > JOBS_UNKNOWN_MAX => {
                Err(format!("it sent more than {JOBS_UNKNOWN_MAX} replies for jobs that it does not have"))
            }
            _ => Ok(()),
        }
    }

    fn progress(
        &mut self,
        compartment: CompartmentIndex,
        worker: WorkerId,
        number: u64,
        progress: Progressed<'_>,
    ) {
        let policy = &mut self.compartments[compartment].policy;
        if !policy.holds(worker, JobId(number)) || !progress.fraction.is_finite() {
            return;
        }
        let Some(record) = policy.cargo_mut(JobId(number)) else { return };
        record.given.has_begun = true;
        let (session, request) = (record.session, record.request);
        let text = cut(progress.text, MESSAGE_BYTES_MAX);
        let fraction = progress.fraction.clamp(0.0, 1.0);
        self.send_progress(session, request, Progressed { fraction, text });
    }

    pub(super) fn look_after_links(&mut self) {
        let now = self.now;
        for index in self.links.indices() {
            let Some(link) = self.links.get(index) else { continue };
            let Reads::Closed { at: closed_at } = link.reads else { continue };
            let (compartment, worker) = (link.compartment, link.worker);
            if now.since(closed_at) >= EXIT_AFTER_CLOSE && !link.has_ended() {
                let message = "it closed its link and lives on".to_owned();
                self.apply(compartment, Event::Broke { worker, message }, Incoming::None);
            } else {
                // The report of its death may be late; a keeper that does not report at all is replaced.
                self.ask_keeper();
                self.want_housekeeping();
            }
        }
    }
}

impl Link {
    /// The process, once it runs.
    pub(super) fn running(&self) -> Option<&Running> {
        match &self.process {
            Process::Ordered { .. } => None,
            Process::Running(running) => Some(running),
        }
    }

    pub(super) fn running_mut(&mut self) -> Option<&mut Running> {
        match &mut self.process {
            Process::Ordered { .. } => None,
            Process::Running(running) => Some(running),
        }
    }

    pub(super) fn pid(&self) -> Option<u32> {
        self.running().map(|running| running.pid)
    }

    /// Its process runs.
    pub(super) fn run(&mut self, pid: u32, pidfd: OwnedFd, observed: Observed) {
        // Its output goes with it.
        let ordered = std::mem::replace(
            &mut self.process,
            Process::Running(Box::new(Running {
                pid,
                pidfd,
                observed,
                watch: None,
                output: None,
                violations: VecDeque::new(),
            })),
        );
        if let (Process::Ordered { output }, Some(running)) = (ordered, self.running_mut()) {
            running.output = Some(output);
        }
    }

    /// Whether all was read that it ever sent.
    pub(super) fn is_closed(&self) -> bool {
        matches!(self.reads, Reads::Closed { .. })
    }

    /// Whether a result that is too large is coming.
    fn is_oversized(&self) -> bool {
        matches!(self.stage, Stage::Welcomed { oversized: Some(_), .. })
    }

    /// Whether the process has ended, be that reported or not.
    fn has_ended(&self) -> bool {
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        let is_readable = |pidfd: &OwnedFd| {
            let mut fds = [rustix::event::PollFd::new(pidfd, rustix::event::PollFlags::IN)];
            rustix::event::poll(&mut fds, Some(&now)).is_ok_and(|count| count > 0)
        };
        // In a pid namespace the descriptor names the first process, whose end follows.
        self.running().is_some_and(|running| is_readable(&running.pidfd) || is_zombie(running.pid))
    }
}

fn is_zombie(pid: u32) -> bool {
    let stat = bulkhead_linux::process_tree::read_small(&format!("/proc/{pid}/stat"));
    // After the name in parentheses comes the state.
    stat.map_or(true, |stat| stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['Z', 'X'])))
}

fn decode<'m, M: bincode::BorrowDecode<'m, ()>>(metadata: &'m [u8]) -> Result<M, String> {
    codec::decode(metadata, &[]).map(|(message, _)| message).map_err(|error| error.to_string())
}

/// Metadata without a structure can still have extensions, and among them one that must be understood.
/// What is no frame looks like a long one as a rule, whose end would be waited for in vain.
fn check_begun(header: Header, is_new: bool) -> Result<(), String> {
    if is_new && header.kind != kind::HELLO {
        return Err(format!("it did not say hello: its first frame is of kind {}", header.kind));
    }
    // A result that is too large is thrown away, however large.
    let most = FRAME_OVERHEAD_BYTES_MAX + INLINE_PAYLOAD_BYTES_MAX;
    if header.kind != kind::RESULT && header.length as usize > most {
        return Err(format!("it began a frame of kind {} with {} bytes", header.kind, header.length));
    }
    Ok(())
}

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

/// How a program ended, for people.
fn describe_program(death: Death) -> String {
    format!("the program {death}")
}
