//! Events that a bulkhead handles and actions that it returns. `T` is the caller's record of a job. Policy
//! stores the record and returns it with the job's answer.

use std::sync::Arc;
use std::time::Duration;

use bulkhead_shared::{HandlerFailure, JobId, Priority, RejectReason, Verdict};

use crate::adaptive::AdaptiveLimits;
use crate::breaker::Transition;
use crate::ending::{Death, Ending, KillReason, RecycleReason, RestartCause};
use crate::limits::{Limits, TenantOverrides};
use crate::poison::Digest;
use crate::rate::RateLimit;
use crate::tenants::TenantId;
use crate::time::Time;

/// Identity of one worker process. The generation keeps a late message from an earlier worker in the same
/// place from matching.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerId {
    /// Index in the bulkhead's table of workers.
    pub place: u32,
    /// Sequence number of the start, counted over all workers of the bulkhead.
    pub generation: u32,
}

/// Request to accept a job.
#[derive(Clone, Debug)]
pub struct Submission<T> {
    /// Caller's record of the job.
    pub record: T,
    /// Lower bound for the job's sequence number, which becomes part of the [`JobId`]. A caller with several
    /// bulkheads counts over all bulkheads, so that job ids are unique.
    pub sequence: u64,
    /// Requested deadline, clamped to `deadline_max`. `None` selects the bulkhead's default.
    pub deadline: Option<Duration>,
    /// Maximum run time of each attempt, from the dispatch. The bulkhead's own `run_limit` applies in
    /// addition.
    pub run_limit: Option<Duration>,
    /// Priority class.
    pub priority: Priority,
    /// True if the job may safely run twice.
    pub idempotent: bool,
    /// True if the caller keeps the payload, so that the job can be dispatched again.
    pub is_resendable: bool,
    /// Digest of operation and payload, if the bulkhead detects poison payloads.
    pub digest: Option<Digest>,
    /// True if another bulkhead passed the job on. The other bulkhead has already counted and charged the
    /// job, and `deadline_max` does not apply.
    pub is_fallback: bool,
    /// Tenant of the job, from a [`crate::Bulkhead::tenant`] call just before this submission.
    pub tenant: TenantId,
    /// Cost of the job for the rate limit and for the tenant's share of turns in the queue.
    pub cost: u32,
    /// Number of bytes that the job takes on a worker's link.
    pub bytes: u32,
    /// Preferred worker, used if it has a free permit at submission.
    pub preferred_worker: Option<WorkerId>,
}

impl<T> Submission<T> {
    /// Returns a submission with default options.
    pub fn new(record: T) -> Self {
        Self {
            record,
            sequence: 0,
            deadline: None,
            run_limit: None,
            priority: Priority::Normal,
            idempotent: false,
            is_resendable: true,
            digest: None,
            is_fallback: false,
            tenant: TenantId::NONE,
            cost: 1,
            bytes: 0,
            preferred_worker: None,
        }
    }
}

/// Result of a job, as reported by a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The job succeeded.
    Ok,
    /// The handler failed.
    Failed(HandlerFailure),
    /// The program that ran the job was killed by a signal. The worker itself is healthy.
    ProgramCrashed {
        /// Signal that the worker saw, or a more precise cause that the supervisor knows.
        death: Death,
        /// Human-readable message.
        message: String,
    },
}

/// Optional capabilities of a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// True if the worker sends heartbeats while jobs run.
    pub has_dispatch_thread: bool,
    /// True if `max_in_flight` can be changed after the welcome.
    pub can_resize: bool,
}

/// Shared record of the jobs that a worker has begun. The worker begins jobs in the order in which they were
/// sent, and writes the number of each job before beginning the job.
pub trait JobJournal: std::fmt::Debug + Send {
    /// Returns the number of the last job begun, counted from 1 in the order of sending.
    fn begun(&self) -> u64;

    /// Recalls all jobs up to number `up_to`, the last job sent, except jobs already begun. Returns the
    /// number of the last job begun. If the worker was just about to begin that job, the worker returns the
    /// job with [`Event::JobReturned`].
    fn recall(&self, up_to: u64) -> u64;
}

/// Input of the state machine.
#[derive(Debug)]
pub enum Event<T> {
    /// The bulkhead must start its workers.
    Start,
    /// Time has passed. Due at [`crate::Bulkhead::next_deadline`].
    Tick,
    /// A client submits a job.
    Submit(Submission<T>),
    /// A client cancels a job or has disconnected.
    Cancel {
        /// Job to cancel.
        job: JobId,
        /// True if the job must continue once it has begun.
        unless_begun: bool,
    },
    /// The memory for waiting jobs is exhausted. Rejects a waiting job. Does nothing if a worker has the job.
    MemoryExhausted {
        /// Job to reject.
        job: JobId,
    },
    /// A worker's process runs.
    Spawned {
        /// Worker that was spawned.
        worker: WorkerId,
        /// Process id.
        pid: u32,
    },
    /// A worker's process could not be started. No further event follows for this worker.
    SpawnFailed {
        /// Worker that could not be started.
        worker: WorkerId,
        /// Human-readable cause.
        message: String,
    },
    /// A worker sent its hello and was welcomed.
    Hello {
        /// Worker that sent the hello.
        worker: WorkerId,
        /// Capabilities announced by the worker.
        capabilities: Capabilities,
        /// The worker's record of begun jobs. Without a record, jobs are neither prefetched nor recalled.
        journal: Option<Box<dyn JobJournal>>,
    },
    /// A worker asks for more time to initialise.
    ExtendStart {
        /// Worker that asks.
        worker: WorkerId,
        /// Requested time, counted from now.
        more: Duration,
    },
    /// A worker reports its status. If the start fails, the last status becomes part of the failure message.
    StartStatus {
        /// Worker that reports.
        worker: WorkerId,
        /// Status text.
        text: String,
    },
    /// A worker is ready for jobs.
    Ready {
        /// Worker that is ready.
        worker: WorkerId,
    },
    /// A heartbeat or any other frame arrived from a worker.
    FrameReceived {
        /// Worker that sent the frame.
        worker: WorkerId,
    },
    /// A worker was alive at an earlier time, according to a timestamp that the worker wrote. The caller
    /// reads the timestamp only of silent workers.
    AliveAt {
        /// Worker that was alive.
        worker: WorkerId,
        /// Time of the timestamp, not later than now.
        at: Time,
    },
    /// Answer to [`Action::CheckCpuTime`].
    CpuTimeChecked {
        /// Worker that was examined.
        worker: WorkerId,
        /// True if the worker wanted to run since [`Action::RecordCpuTime`] and got hardly any processor time. The
        /// silence is then the machine's fault.
        is_starved: bool,
    },
    /// A worker reports the result of a job.
    Replied {
        /// Worker that reports.
        worker: WorkerId,
        /// Job, according to the worker.
        job: JobId,
        /// Result of the job.
        reply: Reply,
    },
    /// A worker returns a job that was recalled just when the worker was about to begin the job.
    JobReturned {
        /// Worker that returns the job.
        worker: WorkerId,
        /// Job, according to the worker.
        job: JobId,
        /// The job's number in the order of sending, according to the worker.
        send_number: u64,
    },
    /// A worker has begun to send a result that exceeds the size limit. Until [`Event::Replied`], all data
    /// from the worker belongs to this result.
    ResultTooLarge {
        /// Worker that sends the result.
        worker: WorkerId,
        /// Job, according to the worker.
        job: JobId,
        /// Failure to report to the client.
        failure: HandlerFailure,
    },
    /// A worker violated the protocol, or closed its link while the process lives on. Nothing that the worker
    /// sent can be trusted any more.
    ProtocolViolated {
        /// Worker that violated the protocol.
        worker: WorkerId,
        /// Human-readable description of the violation.
        message: String,
    },
    /// A worker announces that it takes no more jobs and will exit.
    Stopping {
        /// Worker that will exit.
        worker: WorkerId,
    },
    /// A dead worker had read no byte of this job, so it cannot have begun the job. Comes before
    /// [`Event::Exited`].
    JobUnread {
        /// Worker that died.
        worker: WorkerId,
        /// Job that was not read.
        job: JobId,
    },
    /// A dead worker had not begun this job, according to a record that the worker itself wrote. Comes before
    /// [`Event::Exited`].
    JobNotBegun {
        /// Worker that died.
        worker: WorkerId,
        /// Job that was not begun.
        job: JobId,
    },
    /// A worker's process has exited. Descendants may still live. The slot stays occupied until
    /// [`Event::Reaped`].
    Exited {
        /// Worker that exited.
        worker: WorkerId,
        /// Cause of the exit.
        death: Death,
    },
    /// All descendants of an exited worker are gone.
    Reaped {
        /// Worker whose descendants are gone.
        worker: WorkerId,
    },
    /// A worker and all its descendants are gone, because the keeper died and the supervisor killed all
    /// workers. No further event follows for this worker.
    LostWithKeeper {
        /// Worker that is gone.
        worker: WorkerId,
    },
    /// A worker's memory usage was measured.
    Memory {
        /// Worker that was measured.
        worker: WorkerId,
        /// Resident set size, in bytes.
        rss_bytes: u64,
    },
    /// The supervisor itself was paused. Silence until now says nothing about the workers.
    SupervisorPaused,
    /// Replaces all workers, one after the other.
    Restart,
    /// Rejects queued jobs and accepts no new ones. Jobs in flight continue.
    Drain,
    /// Accepts jobs again after [`Event::Drain`].
    Resume,
    /// Clears the restart history, starts failed slots at once, closes the breaker, and releases quarantined
    /// payloads.
    Reset,
    /// Changes single limits at once, without dropping a job.
    ChangeLimits(LimitChange),
    /// Replaces all limits at once, without dropping a job. Deadlines and queue timeouts of existing jobs do
    /// not change.
    Reconfigure(Box<Limits>),
    /// New workers run another program or configuration from now on. Replaces all workers, one after the
    /// other. Each old worker continues until its replacement is ready.
    ReplaceWorkers,
    /// Sets the limits of one tenant.
    ChangeTenantLimits {
        /// Name of the tenant.
        tenant: String,
        /// Complete set of the tenant's own limits.
        overrides: TenantOverrides,
    },
    /// Stops all workers until the next [`Event::Start`], because no jobs are expected.
    ScaleToZero,
    /// Announces an [`Event::Start`], so that jobs may wait for workers.
    AnnounceStart,
    /// Forces the breaker open, or releases a forced-open breaker.
    ForceBreaker {
        /// True to force the breaker open, false to release it.
        open: bool,
    },
    /// Stops the bulkhead. Queued jobs are rejected at once, jobs in flight may continue until `by`.
    Stop {
        /// Time at which the remaining workers are killed.
        by: Time,
    },
}

/// Output of the state machine. The caller must perform each action.
#[derive(Debug)]
pub enum Action<T> {
    /// Start a process for a worker.
    Spawn {
        /// Id of the new worker.
        worker: WorkerId,
        /// Slot that the worker is started for.
        slot: u32,
        /// Cause of the restart. `None` for the first worker of the slot.
        restart_cause: Option<RestartCause>,
    },
    /// Send a job to a worker. [`crate::Bulkhead::record_mut`] returns the caller's record of the job.
    Dispatch {
        /// Worker to send the job to.
        worker: WorkerId,
        /// Job to send.
        job: JobId,
        /// Time left for the job.
        remaining: Duration,
        /// True if the job is prefetched. A prefetched job counts as queued until the worker begins it.
        is_prefetched: bool,
    },
    /// A job was recalled from a worker that had not begun the job.
    Recalled {
        /// Worker that had the job.
        worker: WorkerId,
        /// Job that was recalled.
        job: JobId,
    },
    /// Ask a worker to stop working on a job.
    Cancel {
        /// Worker that has the job.
        worker: WorkerId,
        /// Job to stop.
        job: JobId,
    },
    /// A worker is silent. Record how much processor time it has had and how long it has waited for a
    /// processor.
    RecordCpuTime {
        /// Worker to examine.
        worker: WorkerId,
    },
    /// The worker is still silent. Compare with the values recorded at [`Action::RecordCpuTime`], and always answer
    /// with [`Event::CpuTimeChecked`].
    CheckCpuTime {
        /// Worker to examine.
        worker: WorkerId,
    },
    /// Send a worker its new `max_in_flight`.
    SetMaxInFlight {
        /// Worker to inform.
        worker: WorkerId,
        /// New maximum number of jobs in flight.
        max_in_flight: u32,
    },
    /// Ask a worker to finish its jobs and exit.
    Drain {
        /// Worker to drain.
        worker: WorkerId,
    },
    /// Kill a worker and all its descendants. The kill is complete at [`Event::Exited`].
    Kill {
        /// Worker to kill.
        worker: WorkerId,
        /// Reason for the kill.
        reason: KillReason,
    },
    /// Send the client the outcome of its job.
    SendOutcome(JobOutcome<T>),
    /// Report an occurrence to operators.
    Report(OperatorEvent),
}

/// Changed limits. `None` leaves a limit unchanged.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LimitChange {
    /// Number of worker processes. Surplus workers finish their jobs first.
    pub processes: Option<u32>,
    /// Maximum number of jobs in flight per worker. Running jobs above a lower maximum continue.
    pub max_in_flight: Option<u32>,
    /// Maximum number of queued jobs. A lower maximum removes no job from the queue.
    pub max_queue: Option<u32>,
    /// New rate limit, or `Some(None)` for no limit. Earlier charges remain.
    pub rate_limit: Option<Option<RateLimit>>,
}

impl LimitChange {
    /// Applies the changes to `limits`.
    pub fn apply_to(self, limits: &mut Limits) {
        limits.processes = self.processes.unwrap_or(limits.processes);
        limits.max_in_flight = self.max_in_flight.unwrap_or(limits.max_in_flight);
        limits.max_queue = self.max_queue.unwrap_or(limits.max_queue);
        limits.rate_limit = self.rate_limit.unwrap_or(limits.rate_limit);
    }
}

/// Final outcome of a job.
#[derive(Debug)]
pub struct JobOutcome<T> {
    /// Job id. `None` if the job was rejected at submission.
    pub job: Option<JobId>,
    /// Caller's record of the job.
    pub record: T,
    /// Outcome.
    pub verdict: Verdict,
    /// Number of attempts. A dispatch that the worker had not begun does not count.
    pub attempts: u32,
    /// Total time in the queue.
    pub queued: Duration,
    /// Total time in workers.
    pub ran: Duration,
    /// Process id of the last worker that had the job.
    pub worker_pid: Option<u32>,
    /// True if the client may submit the job again.
    pub retryable: bool,
    /// Time that the client should wait before submitting the job again.
    pub retry_after: Option<Duration>,
    /// Deadline that applied, counted from the submission.
    pub deadline: Duration,
    /// Run limit that applied to each attempt, if any.
    pub run_limit: Option<Duration>,
}

/// Reason for a slot to stay without a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// Workers of the slot failed too often.
    Failed,
    /// `restart.policy` forbids a restart.
    Policy,
}

/// Occurrence to report to operators.
#[derive(Clone, Debug, PartialEq)]
pub enum OperatorEvent {
    /// A worker's process was started.
    WorkerStarted {
        /// Worker that was started.
        worker: WorkerId,
        /// Slot of the worker.
        slot: u32,
        /// Process id.
        pid: u32,
    },
    /// A worker became ready for jobs.
    WorkerReady {
        /// Worker that is ready.
        worker: WorkerId,
        /// Process id.
        pid: u32,
        /// Time since the spawn.
        after: Duration,
    },
    /// A worker could not be started.
    WorkerNotStarted {
        /// Slot of the worker.
        slot: u32,
        /// Human-readable cause.
        message: String,
    },
    /// A worker exited.
    WorkerExited {
        /// Worker that exited.
        worker: WorkerId,
        /// Slot of the worker.
        slot: u32,
        /// Process id.
        pid: u32,
        /// Death, and the reason if the supervisor killed the worker.
        ending: Ending,
        /// Time since the spawn.
        uptime: Duration,
        /// Number of jobs that the worker answered.
        served: u64,
        /// Number of jobs that the worker held at its exit.
        in_flight: u32,
    },
    /// The supervisor kills a worker.
    WorkerKilled {
        /// Process id.
        pid: u32,
        /// Reason for the kill.
        reason: KillReason,
    },
    /// A spare took over a slot.
    SpareTookOver {
        /// Worker that took over.
        worker: WorkerId,
        /// Slot that was taken over.
        slot: u32,
        /// Process id.
        pid: u32,
    },
    /// A worker is drained because it is being replaced.
    WorkerRecycled {
        /// Process id of the old worker.
        pid: u32,
        /// Reason for the replacement.
        reason: RecycleReason,
    },
    /// A replacement with the new program or configuration failed to start. The old worker continues.
    ReplacementFailed {
        /// Slot of the worker.
        slot: u32,
        /// Human-readable cause.
        message: String,
        /// Time until the next attempt.
        retry_in: Duration,
    },
    /// The next worker of a slot starts after a delay.
    RestartBackoff {
        /// Slot that waits.
        slot: u32,
        /// Length of the delay.
        delay: Duration,
    },
    /// No slot has a worker or will get one soon.
    BulkheadFailed {
        /// Reason for the stop of the last slot.
        reason: StopReason,
        /// Human-readable description of the last failure.
        message: String,
    },
    /// A job will be retried because its worker or its program died.
    JobRetried {
        /// Job to retry.
        job: JobId,
        /// Number of attempts so far.
        attempts: u32,
        /// Outcome of the last attempt.
        crash: Verdict,
        /// Process id of the worker that had the job.
        worker_pid: Option<u32>,
    },
    /// A payload has caused too many crashes and is quarantined.
    JobQuarantined {
        /// Job that caused the last of these crashes.
        job: JobId,
        /// Digest of the payload.
        digest: Digest,
    },
    /// The breaker changed its state.
    Breaker(Transition),
    /// The queue has reached the share `pressure.warn` of its capacity.
    QueuePressure {
        /// Number of queued jobs.
        queued: usize,
        /// Capacity of the queue.
        capacity: usize,
    },
    /// The adaptive limit has changed since the last report.
    LimitAdapted {
        /// Limit at the last report.
        from: u32,
        /// Current limit.
        to: u32,
        /// Lower median of the tenants' 90th percentiles of run times.
        latency: Duration,
        /// Configuration of the adaptive limit.
        limits: AdaptiveLimits,
    },
    /// Jobs are rejected because of a rate limit.
    TenantThrottled {
        /// Tenant that exceeds its own limit, empty for jobs without a tenant. `None` means the limit of the
        /// bulkhead.
        tenant: Option<Arc<str>>,
        /// Time until the next job would pass.
        retry_after: Duration,
    },
    /// A tenant has more than half of the recent evictions.
    TenantEvictions {
        /// Name of the tenant.
        tenant: Arc<str>,
        /// Share of the evictions, from 0 to 1.
        share: f64,
    },
    /// The bulkhead no longer accepts jobs.
    Draining,
    /// The bulkhead accepts jobs again.
    Resumed,
}

pub(crate) fn rejection(reason: RejectReason) -> Verdict {
    Verdict::rejected(reason)
}
