//! Performs policy's actions for workers, such as ordering their start, sending jobs to them and killing them. Also
//! passes their output to the control plane and checks silent workers. `frames` handles the frames that workers send.
//! Policy decides which worker gets a job, and the keeper starts the processes.

mod frames;

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use bulkhead_plane::confinement::WorkerIdentity;
use bulkhead_plane::notices::WorkerOutput;
use bulkhead_policy::{Event, KillReason, WorkerId};
use bulkhead_shared::JobId;
use bulkhead_shared::codec::tag;
use bulkhead_shared::connection::Payload;
use bulkhead_shared::frame::kind;
use bulkhead_shared::memory_files::LeaseRef;
use bulkhead_shared::worker_protocol::Job;
use mio::unix::SourceFd;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::pipe::{PipeFlags, pipe_with};

use crate::keeper_link::WorkerOrder;
use crate::links::{Link, OrderedWorker, ReadPosition};
use crate::memory::ChargeKind;
use crate::samples::HeldAction;
use crate::slab::{CompartmentIndex, LinkIndex, SlabIndex};
use crate::starvation::{Watch, beat_at};
use crate::{DataPlane, Endpoint, INTEREST, Incoming};

/// Maximum number of worker start orders sent per iteration.
const SPAWNS_PER_ITERATION_MAX: usize = 4;

/// Number of neighbouring links whose journals are read together to look for heartbeats.
const BEATS_READ_TOGETHER: usize = 128;

/// Method of creating a worker's process.
enum SpawnOrigin {
    Spawn,
    /// The worker is forked from the template with this spawn number.
    Fork(u64),
    /// The worker must wait for its template.
    Waits,
}

/// Returns true if a worker was not started because no user ID was free.
fn lacks_id(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::ResourceBusy
}

impl DataPlane {
    // Ordering workers.

    /// Sends start orders for queued workers. Sends only a few orders per iteration, because preparing an order takes
    /// time and replies are more urgent.
    pub(crate) fn spawn_queued_workers(&mut self) {
        for _ in 0..SPAWNS_PER_ITERATION_MAX {
            let Some(order) = self.keeper.next_worker_order() else { return };
            let (compartment, worker) = (order.compartment, order.worker);
            let prepared = match self.spawn_origin(&order) {
                Ok(SpawnOrigin::Waits) => Ok(()),
                Ok(SpawnOrigin::Spawn) => self.spawn(order, None).map_err(|error| ("worker", error)),
                Ok(SpawnOrigin::Fork(it)) => self.spawn(order, Some(it)).map_err(|error| ("worker", error)),
                Err(error) => Err(("template", error)),
            };
            if let Err((what, error)) = prepared {
                let message = format!("failed to prepare the {what}: {error}");
                self.links.defer_spawn_failure(compartment, worker, message, lacks_id(&error));
            }
        }
    }

    /// Chooses how a worker's process is created.
    fn spawn_origin(&mut self, order: &WorkerOrder) -> io::Result<SpawnOrigin> {
        let compartment = &self.compartments[order.compartment];
        let program = &self.bulkheads.owner(compartment).program;
        // A replay's worker must not share memory with other workers.
        if !program.is_forked() || compartment.is_replay {
            return Ok(SpawnOrigin::Spawn);
        }
        if let Some(obstacle) = program.sandbox().obstacle() {
            return Err(io::Error::other(obstacle));
        }
        let template = self.template_for(order.compartment, order.worker, order.slot)?;
        Ok(template.map_or(SpawnOrigin::Waits, SpawnOrigin::Fork))
    }

    fn spawn(&mut self, order: WorkerOrder, template: Option<u64>) -> io::Result<()> {
        let (compartment, worker) = (order.compartment, order.worker);
        let spawn = self.links.next_spawn();
        let program = self.bulkheads.owner(&self.compartments[compartment]).program.clone();
        let sandbox = program.sandbox();
        if let Some(obstacle) = sandbox.obstacle() {
            return Err(io::Error::other(obstacle));
        }
        let id = match sandbox.identity() {
            WorkerIdentity::Each if template.is_none() => self.links.take_id()?,
            WorkerIdentity::Each | WorkerIdentity::Own | WorkerIdentity::One(_) => None,
        };
        let ordered = OrderedWorker { order, spawn, template, id, program };
        let link = self.order_worker(ordered).inspect_err(|_| self.links.give_back(id))?;
        self.keeper.ping(self.now);
        let index = self.links.add(link);
        self.compartments[compartment].set_link(worker, index);
        Ok(())
    }

    fn order_worker(&mut self, ordered: OrderedWorker) -> io::Result<Link> {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        let (stdout_read, stdout_write) = pipe_with(PipeFlags::CLOEXEC)?;
        let (stderr_read, stderr_write) = pipe_with(PipeFlags::CLOEXEC)?;
        let socket = UnixStream::from(ours);
        socket.set_nonblocking(true)?;
        let read_position = ReadPosition::of(&theirs)?;
        self.intake.prepare(&socket)?;
        let token = Endpoint::Link(self.links.next()).token();
        let fd = socket.as_raw_fd();
        self.poll.registry().register(&mut SourceFd(&fd), token, INTEREST)?;
        // Sends the order last, because the UID could not be returned to the pool if a step failed after the order was
        // sent.
        let (spawn, id) = (ordered.spawn, ordered.id);
        let sent = self.keeper.serving().and_then(|keeper| match ordered.template {
            None => keeper.spawn(&ordered.program.order(spawn, id), theirs, stdout_write, stderr_write),
            Some(template) => keeper.fork((spawn, template), theirs, stdout_write, stderr_write),
        });
        if let Err(error) = sent {
            let _ = self.poll.registry().deregister(&mut SourceFd(&fd));
            return Err(error);
        }
        Ok(Link::new(ordered, socket, read_position, (stdout_read, stderr_read)))
    }

    pub(crate) fn report_failed_spawns(&mut self) {
        for (compartment, event) in self.links.take_failed_spawns() {
            self.apply(compartment, event, Incoming::None);
        }
    }

    pub(crate) fn kill(&mut self, compartment: CompartmentIndex, worker: WorkerId, reason: &KillReason) {
        if let Some(index) = self.links.of_worker(&self.compartments, (compartment, worker)) {
            self.sample_hung_worker(index, reason);
            if !self.is_held(Some(index), HeldAction::Kill) {
                self.keeper.kill(self.links[index].spawn(), self.now);
            }
        } else if self.keeper.cancel_worker_order(compartment, worker) {
            let message = "the worker's start was cancelled".to_owned();
            self.links.defer_spawn_failure(compartment, worker, message, false);
        } else if let Some(message) = self.templates.cancel(compartment, worker) {
            self.links.defer_spawn_failure(compartment, worker, message, false);
        }
    }

    // Dispatching jobs.

    pub(crate) fn dispatch(
        &mut self,
        (compartment, worker): (CompartmentIndex, WorkerId),
        job: JobId,
        (remaining, is_prefetched): (Duration, bool),
        incoming: &mut Incoming<'_>,
    ) {
        let Some(index) = self.links.of_worker(&self.compartments, (compartment, worker)) else { return };
        let compartment_of_job = &mut self.compartments[compartment];
        let bulkhead = compartment_of_job.bulkhead;
        let Some(record) = compartment_of_job.policy.record_mut(job) else {
            // The link must be closed, because the link and policy would otherwise disagree on the number of the
            // worker's jobs.
            debug_assert!(false, "the worker replied to {job} before the supervisor sent the job");
            let message = "the worker sent a result for a job that it had not received yet".to_owned();
            return self.end_link_for_violation(index, message);
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
        // The metadata fits into a frame, because the names were checked at submission.
        let pushed = link.outbox.push_pooled(
            kind::JOB,
            job.0,
            &message,
            trace.as_slice(),
            payload,
            &mut self.buffers.pool,
        );
        debug_assert!(pushed.is_ok(), "the job does not fit into a frame");
        link.unsolicited.add_job();
        if is_prefetched || record.held.payload.is_some() {
            let kind = if is_prefetched { ChargeKind::Prefetched } else { ChargeKind::Kept };
            let connection = self.sessions.holder(record.session);
            self.memory.charge(record, kind, connection, bulkhead);
        }
        self.links.schedule_flush(index);
    }

    /// Dispatches a job whose payload is in a memory file. Such a job is too large to be prefetched.
    fn dispatch_leased(
        &mut self,
        compartment: CompartmentIndex,
        index: LinkIndex,
        job: JobId,
        remaining: Duration,
    ) {
        let (named, payload) = self.give_leased_payload(index, compartment, job);
        let Some(record) = self.compartments[compartment].policy.record_mut(job) else { return };
        let Some(link) = self.links.get_mut(index) else { return };
        record.position = link.read_position.position_behind(link.outbox.waiting_bytes());
        self.memory.discharge(&mut record.charge);
        let message = Job {
            operation: &record.operation,
            tenant: &record.tenant,
            remaining_us: u64::try_from(remaining.as_micros()).unwrap_or(u64::MAX),
        };
        let trace = record.trace.as_deref().map(|trace| (tag::TRACEPARENT, trace.outgoing().as_bytes()));
        let named = named.map(LeaseRef::to_bytes);
        let named = named.as_ref().map(|named| (tag::LEASE, &named[..]));
        let extensions: Vec<_> = trace.into_iter().chain(named).collect();
        let pushed = link.outbox.push(kind::JOB, job.0, &message, &extensions, payload);
        debug_assert!(pushed.is_ok(), "the job does not fit into a frame");
        link.unsolicited.add_job();
        if record.held.file.as_ref().is_some_and(|file| file.is_kept()) {
            self.charge(compartment, job, ChargeKind::Kept);
        }
        self.links.schedule_flush(index);
    }

    /// Ends a worker's access to the memory files of a job that was recalled from the worker. The worker will neither
    /// read the payload nor write the result.
    pub(crate) fn job_recalled(&mut self, compartment: CompartmentIndex, worker: WorkerId, job: JobId) {
        if let Some(index) = self.links.of_worker(&self.compartments, (compartment, worker)) {
            self.end_file_use((compartment, self.links[index].spawn()), job);
        }
    }

    // Outgoing frames.

    /// Sends a frame without a payload to a worker.
    pub(crate) fn send(
        &mut self,
        worker: (CompartmentIndex, WorkerId),
        frame: (u8, u64),
        message: &impl bincode::Encode,
    ) {
        if let Some(index) = self.links.of_worker(&self.compartments, worker) {
            self.links.send(index, frame, message);
        }
    }

    pub(crate) fn flush_link(&mut self, index: LinkIndex) {
        let Some(link) = self.links.get_mut(index) else { return };
        let before = link.outbox.waiting_bytes();
        // A write error means that the worker has shut down its end of the link. The next read detects and reports the
        // shutdown.
        let _ = link.outbox.flush(&link.socket, &mut self.buffers.pool);
        link.outbox.release_buffer(&mut self.buffers.pool);
        let (was, is) = self.links.flushed(index, before);
        self.memory.recount_workers(was, is);
    }

    // Output of workers.

    /// Passes the read ends of a worker's output to the control plane, unless this was already done. If the channel is
    /// full, keeps the read ends open and tries again later. Otherwise, the worker would die because it could not write
    /// its output.
    pub(crate) fn forward_output(&mut self, index: LinkIndex) {
        // The worker may have exited since an earlier attempt to pass on its output.
        let Some(link) = self.links.get_mut(index) else { return };
        let Some((pid, (stdout, stderr))) = link.take_output() else { return };
        let bulkhead = self.bulkheads.owner(&self.compartments[link.compartment()]).name.clone();
        let output = WorkerOutput { bulkhead, pid, is_template: false, stdout, stderr };
        if let Err(WorkerOutput { stdout, stderr, .. }) = self.reporter.output(output) {
            link.keep_output((stdout, stderr));
            self.links.output_waits();
        }
    }

    // Silent workers.

    /// Starts observing how much processor time a silent worker receives.
    pub(crate) fn watch(&mut self, compartment: CompartmentIndex, worker: WorkerId) {
        let Some(index) = self.links.of_worker(&self.compartments, (compartment, worker)) else { return };
        self.read_journal_beats(index);
        if !self.compartments[compartment].policy.is_silent(worker) {
            return;
        }
        let link = &mut self.links[index];
        let Some(watch) = link.pid().map(|pid| Arc::new(Watch::new(pid))) else { return };
        link.set_watch(self.background.watch(&watch).then_some(watch));
    }

    /// Reads heartbeats from the journals of this worker and of its neighbours in the table of links. Reading them
    /// together saves an iteration of the event loop for each neighbour.
    fn read_journal_beats(&mut self, index: LinkIndex) {
        if !self.links[index].beats_in_journal() {
            return;
        }
        let first = index.number() / BEATS_READ_TOGETHER * BEATS_READ_TOGETHER;
        for number in first..first + BEATS_READ_TOGETHER {
            let Some(link) = self.links.get(LinkIndex::from_number(number)) else { continue };
            let (compartment, worker) = link.key();
            if let Some(since) = link.since_beat() {
                let heartbeat = self.bulkheads.owner(&self.compartments[compartment]).heartbeat;
                let at = beat_at(self.now, since, heartbeat);
                self.apply(compartment, Event::AliveAt { worker, at }, Incoming::None);
            }
        }
    }

    /// Starts checking whether a worker is silent because it received too little processor time. Policy receives the
    /// result in a later iteration.
    pub(crate) fn check_starvation(&mut self, compartment: CompartmentIndex, worker: WorkerId) {
        let index = self.links.of_worker(&self.compartments, (compartment, worker));
        if let Some(index) = index {
            self.read_journal_beats(index);
            if !self.compartments[compartment].policy.is_silent(worker) {
                return;
            }
        }
        // Skips the check if the link is paused, because heartbeats from the worker might still be waiting in the
        // socket.
        let read = index.filter(|&index| !self.links[index].unsolicited.is_paused());
        match read.and_then(|index| self.links[index].take_watch()) {
            Some(watch) if self.keeper.is_running() => {
                self.background.check_starvation(compartment, worker, watch);
            }
            // The worker is dead, its link is not being read, or the worker was not observed because too many checks
            // are pending. A dead worker counts as starved until its death is reported to policy, which happens once
            // all processes of the worker are gone.
            _ => self.links.defer_starvation_result(compartment, worker),
        }
    }

    pub(crate) fn report_starvation_results(&mut self) {
        for (compartment, worker, is_starved) in self.links.take_starvation_results() {
            self.apply(compartment, Event::CpuTimeChecked { worker, is_starved }, Incoming::None);
        }
    }

    // Checks.

    /// Kills workers that have closed their link but are still running. Also tries again to pass on worker output that
    /// did not fit into the channel to the control plane.
    pub(crate) fn check_links(&mut self) {
        for (index, is_late) in self.links.check_closed(self.now) {
            let link = &self.links[index];
            if is_late && !has_ended(link) {
                let (compartment, worker) = link.key();
                let message = "the worker closed its link to the supervisor but is still running".to_owned();
                self.apply(compartment, Event::ProtocolViolated { worker, message }, Incoming::None);
            } else {
                // The keeper's report of the worker's death might only be late. If the keeper does not reply to the
                // ping either, it is replaced.
                self.keeper.ping(self.now);
                self.links.check_closed_again();
            }
        }
        self.links.take_waiting_outputs().for_each(|index| self.forward_output(index));
    }

    /// Kills a worker whose temporary folder is too large. The control plane measures the folders and sends their
    /// sizes. For a template, `apart` is the size without the folders of its workers.
    pub(crate) fn check_temporary_folder(
        &mut self,
        spawn: u64,
        (bytes, apart): (u64, u64),
        template: Option<u64>,
    ) {
        let Some(link) = self.links.of_spawn_mut(spawn) else {
            return self.update_templates(|it, _| it.check_temporary_folder(spawn, apart));
        };
        // Checks that the folder belongs to this worker, because any worker can create a folder with the name of
        // another worker's folder.
        let is_its_own = link.template() == template;
        let is_too_large = link.program().sandbox().temporary_bytes().is_some_and(|most| bytes > most);
        if is_its_own && is_too_large && link.end_as_overfull() {
            self.keeper.kill(spawn, self.now);
        }
    }
}

/// Returns true if a worker's process has exited, even if the keeper has not reported the exit yet.
fn has_ended(link: &Link) -> bool {
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    let is_readable = |pidfd: &OwnedFd| {
        let mut fds = [rustix::event::PollFd::new(pidfd, rustix::event::PollFlags::IN)];
        rustix::event::poll(&mut fds, Some(&now)).is_ok_and(|count| count > 0)
    };
    // In a PID namespace, the pidfd refers to the namespace's first process, which exits later.
    link.pidfd().is_some_and(is_readable) || link.pid().is_some_and(is_zombie)
}

fn is_zombie(pid: u32) -> bool {
    let stat = bulkhead_linux::process_tree::read_proc_file(&format!("/proc/{pid}/stat"));
    // The process state is the field after the process name, which is in parentheses.
    stat.map_or(true, |stat| stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['Z', 'X'])))
}
