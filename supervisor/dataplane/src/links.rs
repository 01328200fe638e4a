//! The workers' connections: ordering workers from the keeper, and what is written to them.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use bulkhead_api::Confinement;
use bulkhead_keeper::{Observed, Usage};
use bulkhead_plane::confinement::WorkerIdentity;
use bulkhead_plane::program::Program;
use bulkhead_policy::{Death, Event, Time, WorkerId};
use bulkhead_shared::codec::tag;
use bulkhead_shared::connection::{Inbox, Outbox, Payload};
use bulkhead_shared::frame::kind;
use bulkhead_shared::memory_files::Named;
use bulkhead_shared::worker_protocol::Job;
use bulkhead_shared::{HandlerFailure, JobId};
use mio::unix::SourceFd;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::pipe::{PipeFlags, pipe_with};

use super::journal::Journal;
use super::keeper_link::Wanted;
use super::lends::Unread;
use super::memory_files::Lending;
use super::notices::Notices;
use super::slab::{CompartmentIndex, LinkIndex};
use super::starvation::Watch;
use super::unread::Reading;
use super::{DataPlane, Endpoint, INTEREST, Incoming};

/// A worker that has closed its link has so long to exit before it counts as broken.
const EXIT_AFTER_CLOSE: Duration = Duration::from_secs(1);

pub(super) struct Link {
    pub(super) compartment: CompartmentIndex,
    pub(super) worker: WorkerId,
    pub(super) slot: u32,
    /// The keeper's name for the worker.
    pub(super) spawn: u64,
    /// What it was started with.
    pub(super) program: Arc<Program>,
    pub(super) process: Process,
    /// Its user id, if that is its own.
    pub(super) id: Option<u32>,
    /// What has forked it, if it was forked.
    pub(super) template: Option<u64>,
    pub(super) end: End,
    // The socket, both ways.
    pub(super) socket: UnixStream,
    pub(super) inbox: Inbox,
    pub(super) reads: Reads,
    pub(super) outbox: Outbox,
    pub(super) is_dirty: bool,
    /// Bytes in the outbox, as counted last.
    pub(super) counted_waiting: usize,
    /// What it has read of the link, for the time after it.
    pub(super) reading: Reading,
    /// What it has answered and not sent, for the time after it.
    pub(super) journal: Option<Journal>,
    /// Whether it can be lent memory files.
    pub(super) lending: Lending,
    /// Bytes of those that it has.
    pub(super) lent_bytes: u64,
    /// Those that it may not have read yet.
    pub(super) unread: Unread,
    /// Whether it writes into its journal when it was alive, and does not say so.
    pub(super) has_beats: bool,
    // What it says.
    pub(super) stage: Stage,
    pub(super) notices: Notices,
    pub(super) status: Option<String>,
}

/// Workers that are ordered in one turn.
const ORDERS_PER_TURN: usize = 4;

/// How a worker comes to be.
enum Origin {
    Spawn,
    /// From this template.
    Fork(u64),
    /// From a template that is not ready yet.
    Awaited,
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

pub(super) enum Stage {
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
pub(super) struct Oversized {
    pub(super) job: JobId,
    pub(super) failure: HandlerFailure,
}

impl DataPlane {
    // Coming.

    /// Orders what is wanted, a few in each turn: it takes its time, and what was answered goes first.
    pub(super) fn order_wanted(&mut self) {
        for _ in 0..ORDERS_PER_TURN {
            let Some(Wanted { compartment, worker, slot }) = self.keeper.next_wanted() else { return };
            self.spawn(compartment, worker, slot);
        }
    }

    fn spawn(&mut self, compartment: CompartmentIndex, worker: WorkerId, slot: u32) {
        let template = match self.origin_of(compartment, worker, slot) {
            Ok(Origin::Spawn) => None,
            Ok(Origin::Fork(template)) => Some(template),
            Ok(Origin::Awaited) => return,
            Err(error) => {
                let message = format!("its template could not be prepared: {error}");
                return self.defer_spawn_failure(compartment, worker, message);
            }
        };
        self.links.spawned += 1;
        let spawn = self.links.spawned;
        match self.try_spawn(compartment, worker, slot, (spawn, template)) {
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

    /// How a worker comes to be.
    fn origin_of(
        &mut self,
        compartment: CompartmentIndex,
        worker: WorkerId,
        slot: u32,
    ) -> io::Result<Origin> {
        let program = &self.owner(compartment).program;
        // A replay is to have nothing in common with other workers.
        if !program.is_forked() || self.compartments[compartment].is_replay {
            return Ok(Origin::Spawn);
        }
        if let Some(obstacle) = program.sandbox().obstacle() {
            return Err(io::Error::other(obstacle));
        }
        Ok(self.template_for(compartment, worker, slot)?.map_or(Origin::Awaited, Origin::Fork))
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
        (spawn, template): (u64, Option<u64>),
    ) -> io::Result<LinkIndex> {
        let program = self.owner(compartment).program.clone();
        let sandbox = program.sandbox();
        if let Some(obstacle) = sandbox.obstacle() {
            return Err(io::Error::other(obstacle));
        }
        let id = match sandbox.identity() {
            WorkerIdentity::Each if template.is_none() => self.links.take_id()?,
            WorkerIdentity::Each | WorkerIdentity::Own | WorkerIdentity::One(_) => None,
        };
        let tried = self.order_worker(compartment, worker, slot, (spawn, template), id);
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
        (spawn, template): (u64, Option<u64>),
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
        let ordered = self.keeper.serving().and_then(|keeper| match template {
            None => keeper.spawn(&program.order(spawn, id), theirs, stdout_write, stderr_write),
            Some(template) => keeper.fork((spawn, template), theirs, stdout_write, stderr_write),
        });
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
            template,
            end: End::None,
            socket,
            inbox: Inbox::default(),
            reads: Reads::Open,
            outbox: Outbox::default(),
            is_dirty: false,
            counted_waiting: 0,
            reading,
            journal: None,
            lending: Lending::Never,
            lent_bytes: 0,
            unread: Unread::default(),
            has_beats: false,
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
            let message = "it was ended before it was started".to_owned();
            self.defer_spawn_failure(compartment, worker, message);
        } else if let Some(message) = self.forget_fork(compartment, worker) {
            self.defer_spawn_failure(compartment, worker, message);
        }
    }

    // Frames out.

    pub(super) fn dispatch(
        &mut self,
        compartment: CompartmentIndex,
        worker: WorkerId,
        job: JobId,
        (remaining, is_ahead): (Duration, bool),
        incoming: &mut Incoming<'_>,
    ) {
        let Some(index) = self.link_of(compartment, worker) else { return };
        let Some(record) = self.compartments[compartment].policy.cargo_mut(job) else {
            // From here on it would count otherwise than policy.
            debug_assert!(false, "{job} was answered before it was sent");
            return self.break_link(index, "a job for it was answered before it was sent".to_owned());
        };
        if record.held.file.is_some() {
            return self.dispatch_leased(compartment, index, job, remaining);
        }
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
        if is_ahead {
            self.charge_ahead(compartment, job);
        } else if record.held.payload.is_some() {
            self.charge_kept(compartment, job);
        }
        self.mark_dirty(Endpoint::Link(index));
    }

    /// The same for a job whose payload is in a file. It is never ahead, since it is too large for that.
    fn dispatch_leased(
        &mut self,
        compartment: CompartmentIndex,
        index: LinkIndex,
        job: JobId,
        remaining: Duration,
    ) {
        let (named, payload) = self.give_leased(index, compartment, job);
        let Some(record) = self.compartments[compartment].policy.cargo_mut(job) else { return };
        let Some(link) = self.links.get_mut(index) else { return };
        record.given = link.reading.given_behind(link.outbox.waiting_bytes());
        self.memory.discharge(&mut record.charge);
        let message = Job {
            operation: &record.operation,
            tenant: &record.tenant,
            remaining_us: u64::try_from(remaining.as_micros()).unwrap_or(u64::MAX),
        };
        let trace = record.trace.as_deref().map(|trace| (tag::TRACEPARENT, trace.handed_on().as_bytes()));
        let named = named.map(Named::to_bytes);
        let named = named.as_ref().map(|named| (tag::LEASE, &named[..]));
        let extensions: Vec<_> = trace.into_iter().chain(named).collect();
        let pushed = link.outbox.push(kind::JOB, job.0, &message, &extensions, payload);
        debug_assert!(pushed.is_ok(), "a job did not fit");
        link.notices.add_job();
        if record.held.file.as_ref().is_some_and(|file| file.is_kept) {
            self.charge_kept(compartment, job);
        }
        self.mark_dirty(Endpoint::Link(index));
    }

    /// Sends what has no payload.
    pub(super) fn send(
        &mut self,
        (compartment, worker): (CompartmentIndex, WorkerId),
        (kind, number): (u8, u64),
        message: &impl bincode::Encode,
    ) {
        let Some(index) = self.link_of(compartment, worker) else { return };
        let _ = self.links[index].outbox.push(kind, number, message, &[], Payload::NONE);
        self.mark_dirty(Endpoint::Link(index));
    }

    pub(super) fn flush_link(&mut self, index: LinkIndex) {
        let Some(link) = self.links.get_mut(index) else { return };
        link.is_dirty = false;
        let before = link.outbox.waiting_bytes();
        // An error means that the worker has shut its end down; reading will tell.
        let _ = link.outbox.flush(&link.socket, &mut self.buffers.pool);
        link.outbox.rest(&mut self.buffers.pool);
        let waiting = link.outbox.waiting_bytes();
        link.reading.written(before - waiting);
        let was = std::mem::replace(&mut link.counted_waiting, waiting);
        self.memory.recount_workers(was, waiting);
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

    /// What confines it, as read back from the kernel.
    pub(super) fn confinement(&self) -> Option<Confinement> {
        Some(self.program.sandbox().describe(&self.running()?.observed))
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

    /// It said something of a job that it does not have.
    pub(super) fn stray(&mut self) {
        if let Stage::Welcomed { strays, .. } = &mut self.stage {
            *strays = strays.saturating_add(1);
        }
    }

    /// Whether all was read that it ever sent.
    pub(super) fn is_closed(&self) -> bool {
        matches!(self.reads, Reads::Closed { .. })
    }

    /// Whether a result that is too large is coming.
    pub(super) fn is_oversized(&self) -> bool {
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
