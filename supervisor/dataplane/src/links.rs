//! Stores the links to workers: the state of each worker's process and connection, and the link work that is due.
//!
//! This module neither accesses the sockets nor sends orders to the keeper. The wiring does both. Policy decides when a
//! worker is started or killed.

mod read_position;
mod unsolicited_frames;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use bulkhead_api::Confinement;
use bulkhead_keeper::{self as keeper, Exit, Observed, Usage};
use bulkhead_plane::program::Program;
use bulkhead_plane::worker_ids::IdAllocator;
use bulkhead_policy::{Death, Time, WorkerId};
use bulkhead_shared::connection::{Inbox, Outbox, Payload};
use bulkhead_shared::{HandlerFailure, JobId};

pub(super) use read_position::{JobPosition, ReadPosition};
use unsolicited_frames::UnsolicitedFrames;

use super::bulkheads::{Compartments, DescribeWorker, WorkerDetails};
use super::crashes::Hang;
use super::journal::Journal;
use super::keeper_link::WorkerOrder;
use super::slab::{CompartmentIndex, LinkIndex, Slab, owns_slab};
use super::starvation::Watch;
use super::unread_loans::ReceiverLoans;

/// Maximum time for a worker to exit after closing its link. A worker that takes longer is killed.
const EXIT_AFTER_CLOSE: Duration = Duration::from_secs(1);

/// Maximum number of sandbox violations remembered per worker. A violation by one of the worker's programs is
/// remembered until the worker reports that the program has died.
const VIOLATIONS_MAX: usize = 64;

/// Maximum number of replies from a worker about jobs that the worker does not have. A worker that sends more is
/// killed.
const UNKNOWN_REPLIES_MAX: u32 = 100_000;

pub(super) struct Link {
    ordered: OrderedWorker,
    pub(super) socket: UnixStream,
    pub(super) inbox: Inbox,
    pub(super) outbox: Outbox,
    /// Determines how many bytes the worker had read when it died.
    pub(super) read_position: ReadPosition,
    /// Number of memory-file loans that the worker might not have read from its socket yet.
    pub(super) unread: ReceiverLoans,
    /// Journal shared with the worker. After the worker's death, replies that the worker did not send are read from the
    /// journal.
    pub(super) journal: Option<Journal>,
    /// Stacks of a worker that did not respond. Included in the crash report about the worker.
    hang: Option<Hang>,
    process: Process,
    end: EndCause,
    reads: ReadState,
    is_dirty: bool,
    /// Size of the outbox in bytes when it was last counted towards the memory limit.
    counted_waiting: usize,
    /// True if the worker writes heartbeats to the journal instead of sending heartbeat frames.
    beats_in_journal: bool,
    phase: Phase,
    /// Maximum size of a result, in bytes, as stated in the welcome message. Does not change in a reload.
    result_bytes_max: u64,
    /// Budget for frames that are not replies to jobs, such as heartbeats.
    pub(super) unsolicited: UnsolicitedFrames,
    status: Option<String>,
}

/// State of a worker's process.
enum Process {
    /// The keeper has been ordered to start the process. `output` contains the read ends of the process's standard
    /// output and standard error. `is_template_retired` is true if the supervisor has killed the template that forks the
    /// worker.
    Ordered { output: Output, is_template_retired: bool },
    /// The process is running or has exited.
    Running(Box<Running>),
}

/// Read ends of a worker's standard output and standard error.
pub(super) type Output = (OwnedFd, OwnedFd);

struct Running {
    pid: u32,
    pidfd: OwnedFd,
    /// Confinement of the process, as observed in the kernel.
    observed: Observed,
    /// Measurement that shows whether a silent worker gets enough processor time. `None` if the worker is not being
    /// measured.
    watch: Option<Arc<Watch>>,
    /// Read ends of the pipes for the worker's output. `None` once they have been passed to the control plane.
    output: Option<Output>,
    /// Forbidden system calls made by programs that the worker started. Each entry contains a PID and a system
    /// call number.
    violations: VecDeque<(u32, u32)>,
}

/// State of receiving on a link, from open to completely read.
enum ReadState {
    Open,
    /// The worker has closed its end. The remaining bytes in the socket must still be read.
    Closing,
    /// The worker has closed its end, and all bytes have been read.
    Closed {
        at: Time,
    },
}

/// Reason for the end of a worker, if policy did not decide to end the worker.
enum EndCause {
    /// No cause is known.
    None,
    /// The worker is being killed because its temporary folder is too large.
    TmpFull,
    /// The process has exited. Policy receives a report about the death once all programs that the worker started have
    /// exited.
    Dead { death: Death, usage: Usage },
}

enum Phase {
    AwaitingHello,
    Welcomed {
        /// Number of replies that the worker has sent for jobs that it does not have.
        unknown_replies: u32,
        oversized: Option<Oversized>,
    },
    /// The worker violated the protocol. Further frames from the worker are ignored.
    ProtocolViolated,
}

/// An oversized result that is still arriving. The client already has the outcome, but the job holds its
/// permit until the worker has sent the whole result.
pub(super) type Oversized = (JobId, HandlerFailure);

/// A worker that the keeper has been ordered to start.
pub(super) struct OrderedWorker {
    pub(super) order: WorkerOrder,
    pub(super) spawn: u64,
    /// Template that forks the worker, or `None` if the worker is not forked.
    pub(super) template: Option<u64>,
    /// The worker's separate UID, or `None` if workers have no separate UIDs.
    pub(super) id: Option<u32>,
    pub(super) program: Arc<Program>,
}

impl Link {
    pub(super) fn new(
        ordered: OrderedWorker,
        socket: UnixStream,
        read_position: ReadPosition,
        output: Output,
    ) -> Self {
        Self {
            ordered,
            socket,
            inbox: Inbox::default(),
            outbox: Outbox::default(),
            read_position,
            unread: ReceiverLoans::default(),
            journal: None,
            hang: None,
            process: Process::Ordered { output, is_template_retired: false },
            end: EndCause::None,
            reads: ReadState::Open,
            is_dirty: false,
            counted_waiting: 0,
            beats_in_journal: false,
            phase: Phase::AwaitingHello,
            result_bytes_max: 0,
            unsolicited: UnsolicitedFrames::default(),
            status: None,
        }
    }

    // The order.

    /// Returns the pair of compartment and worker ID that identifies the worker.
    pub(super) fn key(&self) -> (CompartmentIndex, WorkerId) {
        (self.compartment(), self.worker())
    }

    pub(super) fn compartment(&self) -> CompartmentIndex {
        self.ordered.order.compartment
    }

    pub(super) fn worker(&self) -> WorkerId {
        self.ordered.order.worker
    }

    pub(super) fn slot(&self) -> u32 {
        self.ordered.order.slot
    }

    pub(super) fn spawn(&self) -> u64 {
        self.ordered.spawn
    }

    /// Returns the template that forked the worker, or `None` if the worker was not forked.
    pub(super) fn template(&self) -> Option<u64> {
        self.ordered.template
    }

    /// Returns the program that the worker was started with.
    pub(super) fn program(&self) -> &Arc<Program> {
        &self.ordered.program
    }

    /// Returns true if a filter checks the system calls of the worker and its programs.
    pub(super) fn filters_calls(&self) -> bool {
        self.ordered.program.sandbox().filters_calls()
    }

    // The process.

    fn running(&self) -> Option<&Running> {
        match &self.process {
            Process::Ordered { .. } => None,
            Process::Running(running) => Some(running),
        }
    }

    fn running_mut(&mut self) -> Option<&mut Running> {
        match &mut self.process {
            Process::Ordered { .. } => None,
            Process::Running(running) => Some(running),
        }
    }

    /// Returns true if the process was started, even if it has exited in the meantime.
    pub(super) fn is_running(&self) -> bool {
        self.running().is_some()
    }

    /// Returns the order to repeat if the worker's template was killed, although it had not failed, before the worker was
    /// forked.
    pub(super) fn lost_order(&self) -> Option<WorkerOrder> {
        let is_lost = matches!(self.process, Process::Ordered { is_template_retired: true, .. });
        is_lost.then_some(self.ordered.order)
    }

    pub(super) fn pid(&self) -> Option<u32> {
        self.running().map(|running| running.pid)
    }

    pub(super) fn pidfd(&self) -> Option<&OwnedFd> {
        self.running().map(|running| &running.pidfd)
    }

    /// Records that the process has been started.
    pub(super) fn run(&mut self, pid: u32, pidfd: OwnedFd, observed: Observed) {
        let violations = VecDeque::new();
        let running = Running { pid, pidfd, observed, watch: None, output: None, violations };
        // Moves the output to the running process.
        let ordered = std::mem::replace(&mut self.process, Process::Running(Box::new(running)));
        if let (Process::Ordered { output, .. }, Some(running)) = (ordered, self.running_mut()) {
            running.output = Some(output);
        }
    }

    /// Returns the worker's confinement, as reported by the kernel.
    pub(super) fn confinement(&self) -> Option<Confinement> {
        Some(self.ordered.program.sandbox().describe(&self.running()?.observed))
    }

    /// Removes and returns the worker's output, together with the worker's PID. Returns `None` if the output was
    /// already passed to the control plane.
    pub(super) fn take_output(&mut self) -> Option<(u32, Output)> {
        let running = self.running_mut()?;
        Some((running.pid, running.output.take()?))
    }

    /// Stores the worker's output pipes again, because they could not be passed to the control plane.
    pub(super) fn keep_output(&mut self, output: Output) {
        if let Some(running) = self.running_mut() {
            running.output = Some(output);
        }
    }

    pub(super) fn set_watch(&mut self, watch: Option<Arc<Watch>>) {
        if let Some(running) = self.running_mut() {
            running.watch = watch;
        }
    }

    pub(super) fn take_watch(&mut self) -> Option<Arc<Watch>> {
        self.running_mut()?.watch.take()
    }

    /// Records a forbidden system call made by a process that the worker started. Returns the worker's PID.
    pub(super) fn add_violation(&mut self, process: u32, call: u32) -> Option<u32> {
        // The keeper reports the start of a process before its violations.
        let Running { pid, violations, .. } = self.running_mut()?;
        if violations.len() >= VIOLATIONS_MAX {
            violations.pop_front();
        }
        violations.push_back((process, call));
        Some(*pid)
    }

    /// Removes and returns the forbidden system call recorded for a process.
    pub(super) fn take_violation(&mut self, process: Option<u32>) -> Option<u32> {
        let violations = &mut self.running_mut()?.violations;
        let at = violations.iter().position(|(violator, _)| Some(*violator) == process)?;
        violations.remove(at).map(|(_, call)| call)
    }

    /// Removes and returns the worker's UID. Returns `None` if workers have no separate UIDs.
    pub(super) fn take_id(&mut self) -> Option<u32> {
        self.ordered.id.take()
    }

    // The end of the worker.

    /// Records that the worker is being killed because its temporary folder is too large. Returns false if another
    /// reason for the worker's end is already known.
    pub(super) fn end_as_overfull(&mut self) -> bool {
        let is_first = matches!(self.end, EndCause::None);
        if is_first {
            self.end = EndCause::TmpFull;
        }
        is_first
    }

    /// Returns true if the worker was killed because its temporary folder was too large.
    fn is_overfull(&self) -> bool {
        matches!(self.end, EndCause::TmpFull)
    }

    /// Stores the cause of the worker's death and the worker's resource usage, to be reported to policy later.
    pub(super) fn defer_death(&mut self, death: Death, usage: Usage) {
        self.end = EndCause::Dead { death, usage };
    }

    /// Removes and returns the stored cause of the worker's death and the worker's resource usage, if any.
    pub(super) fn take_deferred_death(&mut self) -> Option<(Death, Usage)> {
        match std::mem::replace(&mut self.end, EndCause::None) {
            EndCause::Dead { death, usage } => Some((death, usage)),
            EndCause::None | EndCause::TmpFull => None,
        }
    }

    // Reading.

    /// Records that the worker has closed its end of the link.
    pub(super) fn peer_closed(&mut self) {
        if matches!(self.reads, ReadState::Open) {
            self.reads = ReadState::Closing;
        }
    }

    /// Returns true if the worker has closed its end of the link but some of its bytes have not been read yet.
    pub(super) fn is_closing(&self) -> bool {
        matches!(self.reads, ReadState::Closing)
    }

    /// Returns true if all bytes from the worker have been read.
    pub(super) fn is_closed(&self) -> bool {
        matches!(self.reads, ReadState::Closed { .. })
    }

    pub(super) fn set_status(&mut self, text: String) {
        self.status = Some(text.clone());
        self.unsolicited.set_status(text);
    }

    // The protocol.

    /// Returns true if the worker has not sent its HELLO yet.
    pub(super) fn awaits_hello(&self) -> bool {
        matches!(self.phase, Phase::AwaitingHello)
    }

    /// Returns true if the handshake is complete and the worker has not violated the protocol.
    pub(super) fn is_welcomed(&self) -> bool {
        matches!(self.phase, Phase::Welcomed { .. })
    }

    /// Returns true if the worker has violated the protocol. All further frames from the worker are ignored.
    pub(super) fn has_violated_protocol(&self) -> bool {
        matches!(self.phase, Phase::ProtocolViolated)
    }

    pub(super) fn violate_protocol(&mut self) {
        self.phase = Phase::ProtocolViolated;
    }

    /// Completes the handshake.
    pub(super) fn welcome(&mut self, result_bytes_max: u64) {
        self.phase = Phase::Welcomed { unknown_replies: 0, oversized: None };
        self.result_bytes_max = result_bytes_max;
    }

    pub(super) fn result_bytes_max(&self) -> u64 {
        self.result_bytes_max
    }

    /// Removes and returns the stacks that were recorded because the worker did not respond.
    pub(super) fn take_hang(&mut self) -> Option<Hang> {
        self.hang.take()
    }

    pub(super) fn set_hang(&mut self, hang: Hang) {
        self.hang = Some(hang);
    }

    /// Removes and returns the file with the worker's crash record. Returns `None` if the worker does not write crash
    /// records.
    pub(super) fn take_crash_record(&mut self) -> Option<OwnedFd> {
        self.journal.take().and_then(Journal::into_crash_record)
    }

    /// Sets whether the worker writes its heartbeats to the journal instead of sending frames.
    pub(super) fn set_beats_in_journal(&mut self, beats_in_journal: bool) {
        self.beats_in_journal = beats_in_journal && self.journal.is_some();
    }

    pub(super) fn beats_in_journal(&self) -> bool {
        self.beats_in_journal
    }

    /// Returns the time since the last heartbeat in the journal.
    pub(super) fn since_beat(&self) -> Option<Duration> {
        self.journal.as_ref().filter(|_| self.beats_in_journal).and_then(Journal::since_beat)
    }

    /// Counts a reply for a job that the worker does not have.
    pub(super) fn count_unknown_reply(&mut self) {
        if let Phase::Welcomed { unknown_replies, .. } = &mut self.phase {
            *unknown_replies = unknown_replies.saturating_add(1);
        }
    }

    /// Returns an error if the worker has sent too many replies for jobs that it does not have. A limited number is
    /// tolerated, because replies can arrive late.
    pub(super) fn check_unknown_replies(&self) -> Result<(), String> {
        match self.phase {
            Phase::Welcomed { unknown_replies, .. } if unknown_replies > UNKNOWN_REPLIES_MAX => {
                Err(format!("the worker sent more than {UNKNOWN_REPLIES_MAX} replies for unknown jobs"))
            }
            _ => Ok(()),
        }
    }

    /// Records that the worker has begun to send an oversized result.
    pub(super) fn begin_oversized(&mut self, begun: Oversized) {
        if let Phase::Welcomed { oversized, .. } = &mut self.phase {
            *oversized = Some(begun);
        }
    }

    pub(super) fn is_oversized(&self) -> bool {
        matches!(self.phase, Phase::Welcomed { oversized: Some(_), .. })
    }

    /// Removes and returns the record of an oversized result. Called once the complete result has arrived.
    pub(super) fn take_oversized(&mut self) -> Option<Oversized> {
        match &mut self.phase {
            Phase::Welcomed { oversized, .. } => oversized.take(),
            _ => None,
        }
    }
}

/// All links to workers, and the work on links that is deferred to the end of the iteration.
#[derive(Default)]
pub(super) struct Links {
    slab: Slab<LinkIndex, Link>,
    /// Links, by the worker's spawn number.
    by_spawn: HashMap<u64, LinkIndex>,
    /// Number of workers and templates started so far.
    spawned: u64,
    /// Pool of UIDs, or `None` if workers have no separate UIDs.
    ids: Option<Arc<IdAllocator>>,
    /// Dead workers whose descendants are still being reaped, by spawn number. Each entry ends with the worker's
    /// separate UID, if any.
    reaping: HashMap<u64, (CompartmentIndex, WorkerId, Option<u32>)>,
    /// Links of dead workers whose descriptors must still be closed. They are closed after the clients have received
    /// the outcomes of the workers' jobs.
    closed: Vec<Link>,
    /// Links with input left to read, because the data plane reads only a limited number of bytes per iteration.
    unfinished_reads: Vec<LinkIndex>,
    /// Earliest time at which the pause of a paused link ends.
    resume_at: Option<Time>,
    /// Workers that could not be started, because the request to the keeper could not be sent. The failures are
    /// reported to policy at the end of the iteration.
    failed_spawns: Vec<(CompartmentIndex, WorkerId, String)>,
    /// Silent workers whose processor time could not be checked. At the end of the iteration, they are reported to
    /// policy as lacking processor time.
    starvation_results: Vec<(CompartmentIndex, WorkerId, bool)>,
    /// Links whose outboxes contain data to write.
    dirty: VecDeque<LinkIndex>,
    /// True if there might be a worker that has closed its link and whose death has not been reported.
    has_closed: bool,
    /// True if the output pipes of a worker could not be passed to the control plane because the channel was full.
    has_outputs: bool,
}

owns_slab!(Links, LinkIndex, Link);

impl Links {
    pub(super) fn new(ids: Option<Arc<IdAllocator>>) -> Self {
        Self { ids, ..Self::default() }
    }

    #[inline]
    pub(super) fn of_worker(
        &self,
        compartments: &Compartments,
        (compartment, worker): (CompartmentIndex, WorkerId),
    ) -> Option<LinkIndex> {
        let index = compartments[compartment].link_at(worker)?;
        self.slab.get(index).is_some_and(|link| link.worker() == worker).then_some(index)
    }

    /// Returns the link of the worker with this spawn number.
    pub(super) fn of_spawn(&self, spawn: u64) -> Option<&Link> {
        self.slab.get(*self.by_spawn.get(&spawn)?)
    }

    pub(super) fn of_spawn_mut(&mut self, spawn: u64) -> Option<&mut Link> {
        self.slab.get_mut(*self.by_spawn.get(&spawn)?)
    }

    pub(super) fn index_of_spawn(&self, spawn: u64) -> Option<LinkIndex> {
        self.by_spawn.get(&spawn).copied()
    }

    /// Returns the link of a worker with one of the given PIDs.
    pub(super) fn of_process(&self, pids: &[u32]) -> Option<&Link> {
        self.slab.values().find(|link| link.pid().is_some_and(|pid| pids.contains(&pid)))
    }

    // Workers.

    /// Returns the spawn number for the next worker or template.
    pub(super) fn next_spawn(&mut self) -> u64 {
        self.spawned += 1;
        self.spawned
    }

    /// Adds the link of a worker that the keeper has been ordered to start.
    pub(super) fn add(&mut self, link: Link) -> LinkIndex {
        let spawn = link.spawn();
        let index = self.slab.insert(link);
        self.by_spawn.insert(spawn, index);
        index
    }

    /// Records that a template that has not failed is being killed. Forks in progress fail as a result. Returns the
    /// template's spawn number.
    pub(super) fn retire_template(&mut self, template: u64) -> u64 {
        for link in self.slab.values_mut().filter(|link| link.template() == Some(template)) {
            if let Process::Ordered { is_template_retired, .. } = &mut link.process {
                *is_template_retired = true;
            }
        }
        template
    }

    /// Removes the link of a dead worker. The caller must return the worker's UID to the pool separately.
    pub(super) fn remove(&mut self, spawn: u64) -> Option<(LinkIndex, Link)> {
        let index = self.by_spawn.remove(&spawn)?;
        let Some(link) = self.slab.retire(index) else { unreachable!("every link in `by_spawn` exists") };
        self.dirty.retain(|&dirty| dirty != index);
        self.unfinished_reads.retain(|&unfinished| unfinished != index);
        Some((index, link))
    }

    /// Stores a dead worker's link until the end of the iteration.
    pub(super) fn keep_closed(&mut self, link: Link) {
        self.closed.push(link);
    }

    pub(super) fn drop_closed(&mut self) {
        self.closed.clear();
    }

    /// Returns the spawn numbers of all workers. The workers for which `is_first` returns true are at the beginning.
    pub(super) fn spawns(&self, is_first: impl Fn(&Link) -> bool) -> Vec<u64> {
        let mut spawns: Vec<u64> = self.by_spawn.keys().copied().collect();
        spawns.sort_unstable_by_key(|spawn| (!self.of_spawn(*spawn).is_some_and(&is_first), *spawn));
        spawns
    }

    /// Takes a UID from the pool for a new worker. Returns `None` if workers do not have separate UIDs.
    pub(super) fn take_id(&self) -> io::Result<Option<u32>> {
        self.ids.as_ref().map(|ids| ids.allocate()).transpose()
    }

    /// Returns a worker's UID to the pool. All processes of the worker must already have exited.
    pub(super) fn give_back(&self, id: Option<u32>) {
        if let (Some(ids), Some(id)) = (&self.ids, id) {
            ids.free(id);
        }
    }

    /// Records that a dead worker's descendants are being reaped.
    pub(super) fn begin_reaping(&mut self, link: &mut Link) {
        self.reaping.insert(link.spawn(), (link.compartment(), link.worker(), link.ordered.id.take()));
    }

    /// Ends the reaping of a dead worker's descendants. Returns the worker, and releases its UID to the pool.
    pub(super) fn end_reaping(&mut self, spawn: u64) -> Option<(CompartmentIndex, WorkerId)> {
        let (compartment, worker, id) = self.reaping.remove(&spawn)?;
        self.give_back(id);
        Some((compartment, worker))
    }

    /// Returns the spawn numbers of dead workers whose descendants are still being reaped.
    pub(super) fn reaping_spawns(&self) -> Vec<u64> {
        let mut spawns: Vec<u64> = self.reaping.keys().copied().collect();
        spawns.sort_unstable();
        spawns
    }

    /// Defers the report that a worker could not be started to the end of the iteration. An immediate report could
    /// recurse deeply, because policy can respond by starting another worker. That start can also fail, for example
    /// when there are no free descriptors.
    pub(super) fn defer_spawn_failure(
        &mut self,
        compartment: CompartmentIndex,
        worker: WorkerId,
        message: String,
    ) {
        self.failed_spawns.push((compartment, worker, message));
    }

    pub(super) fn take_failed_spawns(&mut self) -> Vec<(CompartmentIndex, WorkerId, String)> {
        std::mem::take(&mut self.failed_spawns)
    }

    pub(super) fn has_failed_spawns(&self) -> bool {
        !self.failed_spawns.is_empty()
    }

    /// Records that a silent worker's processor time could not be checked. At the end of the iteration, the worker is
    /// reported to policy as lacking processor time.
    pub(super) fn defer_starvation_result(&mut self, compartment: CompartmentIndex, worker: WorkerId) {
        self.starvation_results.push((compartment, worker, true));
    }

    pub(super) fn take_starvation_results(&mut self) -> Vec<(CompartmentIndex, WorkerId, bool)> {
        std::mem::take(&mut self.starvation_results)
    }

    // Output of workers.

    /// Records that the output pipes of a worker could not be passed to the control plane.
    pub(super) fn output_waits(&mut self) {
        self.has_outputs = true;
    }

    /// Returns the links whose output pipes might still have to be passed to the control plane.
    pub(super) fn take_waiting_outputs(&mut self) -> impl Iterator<Item = LinkIndex> + use<> {
        let count = if std::mem::take(&mut self.has_outputs) { usize::MAX } else { 0 };
        self.slab.indices().take(count)
    }

    // Reading.

    /// Schedules another read of a link in the next iteration.
    pub(super) fn schedule_read(&mut self, index: LinkIndex) {
        if !self.unfinished_reads.contains(&index) {
            self.unfinished_reads.push(index);
        }
    }

    pub(super) fn has_unfinished_reads(&self) -> bool {
        !self.unfinished_reads.is_empty()
    }

    /// Returns the links that must be read now. Includes links whose pause has ended.
    pub(super) fn take_unfinished_reads(&mut self, now: Time) -> Vec<LinkIndex> {
        if self.resume_at.is_some_and(|at| at <= now) {
            self.resume_at = None;
            for index in self.slab.indices() {
                let Some(link) = self.slab.get_mut(index) else { continue };
                if link.unsolicited.resume(now) {
                    self.unfinished_reads.push(index);
                } else if let Some(until) = link.unsolicited.paused_until() {
                    self.schedule_resume(until);
                }
            }
        }
        std::mem::take(&mut self.unfinished_reads)
    }

    /// Returns the earliest time at which a paused link must be read again.
    pub(super) fn resume_at(&self) -> Option<Time> {
        self.resume_at
    }

    fn schedule_resume(&mut self, at: Time) {
        self.resume_at = Some(self.resume_at.map_or(at, |before| before.min(at)));
    }

    /// Completes a read from a worker that can run `jobs` jobs at once. Returns `None` if all frames were replies to
    /// jobs. Otherwise, returns the last status text, and an error if the worker must be killed.
    pub(super) fn end_read(
        &mut self,
        index: LinkIndex,
        now: Time,
        jobs: u32,
    ) -> Option<(Option<String>, Result<(), String>)> {
        let link = &mut self.slab[index];
        let ended = link.unsolicited.end_read(now, jobs);
        if ended.is_some()
            && let Some(until) = link.unsolicited.paused_until()
        {
            self.schedule_resume(until);
        }
        ended
    }

    /// Records that all bytes from a worker have been read.
    pub(super) fn set_closed(&mut self, index: LinkIndex, at: Time) {
        self.slab[index].reads = ReadState::Closed { at };
        self.has_closed = true;
    }

    /// Returns true if there might be closed links, or output pipes that still have to be passed to the control plane.
    pub(super) fn needs_checks(&self) -> bool {
        self.has_closed || self.has_outputs
    }

    /// Returns the links that were closed by workers whose deaths have not been reported. The flag is true if the
    /// worker has not exited in time.
    pub(super) fn check_closed(&mut self, now: Time) -> Vec<(LinkIndex, bool)> {
        let closed = self.slab.iter().filter_map(|(index, link)| match link.reads {
            ReadState::Closed { at } => Some((index, now.since(at) >= EXIT_AFTER_CLOSE)),
            _ => None,
        });
        let closed = closed.collect();
        self.has_closed = false;
        closed
    }

    /// Schedules another check of a link whose worker has closed its end.
    pub(super) fn check_closed_again(&mut self) {
        self.has_closed = true;
    }

    // Writing.

    /// Schedules the link's output to be written at the end of the iteration.
    #[inline]
    pub(super) fn schedule_flush(&mut self, index: LinkIndex) {
        if let Some(link) = self.slab.get_mut(index)
            && !std::mem::replace(&mut link.is_dirty, true)
        {
            self.dirty.push_back(index);
        }
    }

    /// Returns the next link whose outbox contains data to write. The caller must then call [`Self::flushed`].
    pub(super) fn next_dirty(&mut self) -> Option<LinkIndex> {
        self.dirty.pop_front()
    }

    /// Adds a frame without a payload to a worker's output.
    pub(super) fn send(
        &mut self,
        index: LinkIndex,
        (kind, number): (u8, u64),
        message: &impl bincode::Encode,
    ) {
        if let Some(link) = self.slab.get_mut(index) {
            let _ = link.outbox.push(kind, number, message, &[], Payload::NONE);
            self.schedule_flush(index);
        }
    }

    /// Adds a frame without a payload to the output of the worker with this spawn number. Does nothing if the worker is
    /// gone.
    pub(super) fn send_to_spawn(&mut self, spawn: u64, frame: (u8, u64), message: &impl bincode::Encode) {
        if let Some(index) = self.index_of_spawn(spawn) {
            self.send(index, frame, message);
        }
    }

    /// Records that some of a link's output was written. `before` is the size of the outbox before the write. Returns
    /// the size that was last counted, and the current size.
    pub(super) fn flushed(&mut self, index: LinkIndex, before: usize) -> (usize, usize) {
        let link = &mut self.slab[index];
        link.is_dirty = false;
        let waiting = link.outbox.waiting_bytes();
        link.read_position.add_written(before - waiting);
        (std::mem::replace(&mut link.counted_waiting, waiting), waiting)
    }
}

/// Determines the cause of a worker's death from the exit of its process. `link` is the worker's link.
pub(super) fn death_of(exit: Exit, link: Option<&Link>) -> Death {
    let is_filtered = || link.is_some_and(Link::filters_calls);
    match exit {
        Exit::Signal { number: libc::SIGKILL, .. } if link.is_some_and(Link::is_overfull) => Death::TmpFull,
        Exit::Code(code) => Death::Exit(code),
        Exit::Oom => Death::Oom,
        Exit::Violation { call } => Death::Violation(keeper::syscall_name(call)),
        Exit::Signal { number: libc::SIGSYS, .. } if is_filtered() => Death::Violation(""),
        Exit::Signal { number, .. } => Death::Signal(number),
    }
}

impl Link {
    /// Returns the size of the outbox in bytes when it was last counted.
    pub(super) fn counted_waiting(&self) -> usize {
        self.counted_waiting
    }
}

impl DescribeWorker for Links {
    fn describe(&self, link: Option<LinkIndex>, worker: WorkerId) -> WorkerDetails {
        let link = link.and_then(|index| self.slab.get(index)).filter(|link| link.worker() == worker);
        let status = link.and_then(|link| link.status.clone());
        WorkerDetails { status, confinement: link.and_then(Link::confinement) }
    }
}
