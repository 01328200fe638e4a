//! Links to workers: ordering workers from the keeper, and writing frames to workers.

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
use super::keeper_link::WorkerOrder;
use super::memory_files::Lending;
use super::read_position::ReadPosition;
use super::slab::{CompartmentIndex, LinkIndex};
use super::starvation::Watch;
use super::unread_loans::ReceiverLoans;
use super::unsolicited_frames::UnsolicitedFrames;
use super::{DataPlane, Endpoint, INTEREST, Incoming};

/// Time limit for a worker to exit after closing the link. A worker that stays longer counts as broken.
const EXIT_AFTER_CLOSE: Duration = Duration::from_secs(1);

pub(super) struct Link {
    pub(super) compartment: CompartmentIndex,
    pub(super) worker: WorkerId,
    pub(super) slot: u32,
    /// Spawn number of the worker.
    pub(super) spawn: u64,
    /// Program with which the worker was started.
    pub(super) program: Arc<Program>,
    pub(super) process: Process,
    /// User id of the worker, if the worker has a separate user id.
    pub(super) id: Option<u32>,
    /// Template that forked the worker, if any.
    pub(super) template: Option<u64>,
    pub(super) end: End,
    // The socket, in both directions.
    pub(super) socket: UnixStream,
    pub(super) inbox: Inbox,
    pub(super) reads: Reads,
    pub(super) outbox: Outbox,
    pub(super) is_dirty: bool,
    /// Size of the outbox in bytes, as last counted.
    pub(super) counted_waiting: usize,
    /// Tracks which bytes the worker has read. Used after the worker's death.
    pub(super) read_position: ReadPosition,
    /// Answers that the worker has not sent yet. Used after the worker's death.
    pub(super) journal: Option<Journal>,
    /// State of lending memory files to the worker.
    pub(super) lending: Lending,
    /// Total size of the files lent to the worker, in bytes.
    pub(super) lent_bytes: u64,
    /// Lends that the worker may not have read yet.
    pub(super) unread: ReceiverLoans,
    /// True if the worker writes heartbeats into the journal instead of sending frames.
    pub(super) beats_in_journal: bool,
    // Input from the worker.
    pub(super) stage: Stage,
    pub(super) unsolicited: UnsolicitedFrames,
    pub(super) status: Option<String>,
}

/// Maximum number of workers ordered per iteration.
const SPAWNS_PER_ITERATION_MAX: usize = 4;

/// Way in which a worker is created.
enum Origin {
    Spawn,
    /// Forked from this template.
    Fork(u64),
    /// The worker waits for a template that is not ready yet.
    Awaited,
}

/// State of a worker's process.
pub(super) enum Process {
    /// Ordered. `output` contains the reading ends of stdout and stderr.
    Ordered { output: Output },
    /// Running, or ended.
    Running(Box<Running>),
}

/// The reading ends of a worker's standard output and error.
pub(super) type Output = (OwnedFd, OwnedFd);

pub(super) struct Running {
    pub(super) pid: u32,
    pub(super) pidfd: OwnedFd,
    /// Confinement as read back from the kernel.
    pub(super) observed: Observed,
    /// Set while a silent worker is watched.
    pub(super) watch: Option<Arc<Watch>>,
    /// Set until the control plane has room for the output.
    pub(super) output: Option<Output>,
    /// Forbidden system calls of programs that the worker has started: process and call number.
    pub(super) violations: VecDeque<(u32, u32)>,
}

/// State of the reading side of a link.
pub(super) enum Reads {
    Open,
    /// The worker has closed its end. Only the bytes in the socket are left to read.
    Closing,
    /// Everything has been read.
    Closed {
        at: Time,
    },
}

impl Reads {
    /// Records that the worker has closed its end.
    pub(super) fn close(&mut self) {
        if matches!(self, Self::Open) {
            *self = Self::Closing;
        }
    }
}

/// Cause of a worker's end that policy did not decide.
pub(super) enum End {
    /// No such cause is known.
    None,
    /// The worker is being killed because its temporary folder is too large.
    Overfull,
    /// The process has ended. Reported to policy when none of the worker's programs is left.
    Dead { death: Death, usage: Usage },
}

pub(super) enum Stage {
    AwaitingHello,
    Welcomed {
        /// Number of replies for jobs that the worker does not have.
        unknown_replies: u32,
        oversized: Option<Oversized>,
    },
    /// The worker broke the protocol. Further frames are ignored.
    ProtocolViolated,
}

/// A result that is too large and still arriving. The client has the outcome, but the job holds a permit until the
/// worker has sent the whole result.
pub(super) struct Oversized {
    pub(super) job: JobId,
    pub(super) failure: HandlerFailure,
}

impl DataPlane {
    // Ordering workers.

    /// Orders queued workers, a few per iteration. Ordering takes time, and answers have precedence.
    pub(super) fn spawn_queued_workers(&mut self) {
        for _ in 0..SPAWNS_PER_ITERATION_MAX {
            let Some(WorkerOrder { compartment, worker, slot }) = self.keeper.next_worker_order() else {
                return;
            };
            self.spawn(compartment, worker, slot);
        }
    }

    fn spawn(&mut self, compartment: CompartmentIndex, worker: WorkerId, slot: u32) {
        let template = match self.spawn_origin(compartment, worker, slot) {
            Ok(Origin::Spawn) => None,
            Ok(Origin::Fork(template)) => Some(template),
            Ok(Origin::Awaited) => return,
            Err(error) => {
                let message = format!("the template could not be prepared: {error}");
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

    /// Chooses how to create a worker.
    fn spawn_origin(
        &mut self,
        compartment: CompartmentIndex,
        worker: WorkerId,
        slot: u32,
    ) -> io::Result<Origin> {
        let program = &self.owner(compartment).program;
        // A replay must not share anything with other workers.
        if !program.is_forked() || self.compartments[compartment].is_replay {
            return Ok(Origin::Spawn);
        }
        if let Some(obstacle) = program.sandbox().obstacle() {
            return Err(io::Error::other(obstacle));
        }
        Ok(self.template_for(compartment, worker, slot)?.map_or(Origin::Awaited, Origin::Fork))
    }

    /// Defers the report of a failed spawn to the end of the iteration, like the report of a failure in the keeper.
    /// Reporting it within the action would recurse while no descriptors are free.
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
        let read_position = ReadPosition::of(&theirs)?;
        self.acceptor.intake.prepare(&socket)?;
        let program = self.owner(compartment).program.clone();
        let token = Endpoint::Link(self.links.next()).token();
        let fd = socket.as_raw_fd();
        self.poll.registry().register(&mut SourceFd(&fd), token, INTEREST)?;
        // Ordered last, because an ordered worker owns the user id whatever fails afterwards.
        let ordered = self.keeper.serving().and_then(|keeper| match template {
            None => keeper.spawn(&program.order(spawn, id), theirs, stdout_write, stderr_write),
            Some(template) => keeper.fork((spawn, template), theirs, stdout_write, stderr_write),
        });
        if let Err(error) = ordered {
            let _ = self.poll.registry().deregister(&mut SourceFd(&fd));
            return Err(error);
        }
        self.ping_keeper();
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
            read_position,
            journal: None,
            lending: Lending::Never,
            lent_bytes: 0,
            unread: ReceiverLoans::default(),
            beats_in_journal: false,
            stage: Stage::AwaitingHello,
            unsolicited: UnsolicitedFrames::default(),
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
            self.schedule_checks();
        } else if self.keeper.cancel_worker_order(compartment, worker) {
            let message = "the worker was ended before the start".to_owned();
            self.defer_spawn_failure(compartment, worker, message);
        } else if let Some(message) = self.cancel_fork(compartment, worker) {
            self.defer_spawn_failure(compartment, worker, message);
        }
    }

    // Outgoing frames.

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
            // Ignoring this would make the link's count of jobs differ from the policy's.
            debug_assert!(false, "{job} was answered before the supervisor sent the job");
            return self.end_link_for_violation(
                index,
                "a job was answered before the supervisor sent the job".to_owned(),
            );
        };
        if record.held.file.is_some() {
            return self.dispatch_leased(compartment, index, job, remaining);
        }
        let Some(link) = self.links.get_mut(index) else { return };
        record.position = link.read_position.position_behind(link.outbox.waiting_bytes());
        let coming = if record.held.is_empty() { incoming.take() } else { Payload::NONE };
        self.memory.discharge(&mut record.charge);
        let payload = record.held.take_for_worker(coming);
        let message = Job {
            operation: &record.operation,
            tenant: &record.tenant,
            remaining_us: u64::try_from(remaining.as_micros()).unwrap_or(u64::MAX),
        };
        let trace = record.trace.as_deref().map(|trace| (tag::TRACEPARENT, trace.outgoing().as_bytes()));
        // The names were checked at submission, so the metadata fits.
        let pushed = link.outbox.push_pooled(
            kind::JOB,
            job.0,
            &message,
            trace.as_slice(),
            payload,
            &mut self.buffers.pool,
        );
        debug_assert!(pushed.is_ok(), "a job did not fit");
        link.unsolicited.add_job();
        if is_ahead {
            self.charge_prefetched(compartment, job);
        } else if record.held.payload.is_some() {
            self.charge_kept(compartment, job);
        }
        self.schedule_flush(Endpoint::Link(index));
    }

    /// Dispatches a job whose payload is in a memory file. Such a job is too large to be prefetched.
    fn dispatch_leased(
        &mut self,
        compartment: CompartmentIndex,
        index: LinkIndex,
        job: JobId,
        remaining: Duration,
    ) {
        let (named, payload) = self.leased_payload_for(index, compartment, job);
        let Some(record) = self.compartments[compartment].policy.cargo_mut(job) else { return };
        let Some(link) = self.links.get_mut(index) else { return };
        record.position = link.read_position.position_behind(link.outbox.waiting_bytes());
        self.memory.discharge(&mut record.charge);
        let message = Job {
            operation: &record.operation,
            tenant: &record.tenant,
            remaining_us: u64::try_from(remaining.as_micros()).unwrap_or(u64::MAX),
        };
        let trace = record.trace.as_deref().map(|trace| (tag::TRACEPARENT, trace.outgoing().as_bytes()));
        let named = named.map(Named::to_bytes);
        let named = named.as_ref().map(|named| (tag::LEASE, &named[..]));
        let extensions: Vec<_> = trace.into_iter().chain(named).collect();
        let pushed = link.outbox.push(kind::JOB, job.0, &message, &extensions, payload);
        debug_assert!(pushed.is_ok(), "a job did not fit");
        link.unsolicited.add_job();
        if record.held.file.as_ref().is_some_and(|file| file.is_kept) {
            self.charge_kept(compartment, job);
        }
        self.schedule_flush(Endpoint::Link(index));
    }

    /// Sends a frame without a payload to a worker.
    pub(super) fn send(
        &mut self,
        (compartment, worker): (CompartmentIndex, WorkerId),
        (kind, number): (u8, u64),
        message: &impl bincode::Encode,
    ) {
        let Some(index) = self.link_of(compartment, worker) else { return };
        let _ = self.links[index].outbox.push(kind, number, message, &[], Payload::NONE);
        self.schedule_flush(Endpoint::Link(index));
    }

    pub(super) fn flush_link(&mut self, index: LinkIndex) {
        let Some(link) = self.links.get_mut(index) else { return };
        link.is_dirty = false;
        let before = link.outbox.waiting_bytes();
        // An error means that the worker has shut down its end. The next read reports this.
        let _ = link.outbox.flush(&link.socket, &mut self.buffers.pool);
        link.outbox.rest(&mut self.buffers.pool);
        let waiting = link.outbox.waiting_bytes();
        link.read_position.add_written(before - waiting);
        let was = std::mem::replace(&mut link.counted_waiting, waiting);
        self.memory.recount_workers(was, waiting);
    }

    pub(super) fn check_closed_links(&mut self) {
        let now = self.now;
        for index in self.links.indices() {
            let Some(link) = self.links.get(index) else { continue };
            let Reads::Closed { at: closed_at } = link.reads else { continue };
            let (compartment, worker) = (link.compartment, link.worker);
            if now.since(closed_at) >= EXIT_AFTER_CLOSE && !link.has_ended() {
                let message = "the worker closed the link and still runs".to_owned();
                self.apply(compartment, Event::Broke { worker, message }, Incoming::None);
            } else {
                // The report of the death may be late. A keeper that does not report at all is replaced.
                self.ping_keeper();
                self.schedule_checks();
            }
        }
    }
}

impl Link {
    /// Returns the process, once started.
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

    /// Returns the worker's confinement as read back from the kernel.
    pub(super) fn confinement(&self) -> Option<Confinement> {
        Some(self.program.sandbox().describe(&self.running()?.observed))
    }

    pub(super) fn pid(&self) -> Option<u32> {
        self.running().map(|running| running.pid)
    }

    /// Records that the process runs.
    pub(super) fn run(&mut self, pid: u32, pidfd: OwnedFd, observed: Observed) {
        // The output moves from the order to the running process.
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

    /// Counts a frame about a job that the worker does not have.
    pub(super) fn count_unknown_reply(&mut self) {
        if let Stage::Welcomed { unknown_replies, .. } = &mut self.stage {
            *unknown_replies = unknown_replies.saturating_add(1);
        }
    }

    /// Returns true if everything that the worker sent has been read.
    pub(super) fn is_closed(&self) -> bool {
        matches!(self.reads, Reads::Closed { .. })
    }

    /// Returns true if a result that is too large is arriving.
    pub(super) fn is_oversized(&self) -> bool {
        matches!(self.stage, Stage::Welcomed { oversized: Some(_), .. })
    }

    /// Returns true if the process has ended, even if the keeper has not reported the end.
    fn has_ended(&self) -> bool {
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        let is_readable = |pidfd: &OwnedFd| {
            let mut fds = [rustix::event::PollFd::new(pidfd, rustix::event::PollFlags::IN)];
            rustix::event::poll(&mut fds, Some(&now)).is_ok_and(|count| count > 0)
        };
        // In a pid namespace the pidfd refers to the first process, which ends later.
        self.running().is_some_and(|running| is_readable(&running.pidfd) || is_zombie(running.pid))
    }
}

fn is_zombie(pid: u32) -> bool {
    let stat = bulkhead_linux::process_tree::read_small(&format!("/proc/{pid}/stat"));
    // The state follows the name in parentheses.
    stat.map_or(true, |stat| stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['Z', 'X'])))
}
