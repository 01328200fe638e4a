//! The events that a bulkhead handles, and the actions that it returns. The caller, usually the data plane, creates the
//! events and performs the actions. `T` is the caller's record of a job, which the bulkhead stores and returns with the
//! outcome. `Bulkhead` decides which actions follow.

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

/// Identity of a worker process. The generation distinguishes the worker from earlier workers in the same
/// table entry, so that a late message is not attributed to the wrong worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerId {
    /// Index in the bulkhead's table of workers.
    pub place: u32,
    /// Sequence number of the worker among all workers ever started in the bulkhead.
    pub generation: u32,
}

/// A job submitted by a client.
#[derive(Clone, Debug)]
pub struct Submission<T> {
    /// Caller's record of the job.
    pub record: T,
    /// Lower bound for the job's sequence number, which becomes part of the [`JobId`]. A caller with several bulkheads
    /// uses one sequence for all of them, so that job IDs are unique.
    pub sequence: u64,
    /// ID that the job got in another bulkhead, which passed the job on. The job keeps this ID. `None` if the job has no
    /// ID yet.
    pub job: Option<JobId>,
    /// Requested deadline, which is clamped to `deadline_max`. `None` selects the bulkhead's default.
    pub deadline: Option<Duration>,
    /// Maximum run time of each attempt, measured from dispatch. The bulkhead's own `run_limit` also applies.
    pub run_limit: Option<Duration>,
    /// Priority class of the job.
    pub priority: Priority,
    /// True if it is safe to run the job more than once.
    pub idempotent: bool,
    /// True if the caller keeps a copy of the payload, so that the job can be dispatched again.
    pub is_resendable: bool,
    /// Digest of the job's operation and payload, or `None` if the bulkhead does not use poison detection.
    pub digest: Option<Digest>,
    /// True if another bulkhead passed the job on to this fallback. The other bulkhead has already counted the job and
    /// charged the job's cost to its own rate limit. `deadline_max` does not apply to the job.
    pub is_fallback: bool,
    /// The job's tenant. This must be the value that [`crate::Bulkhead::tenant`] returned immediately before this
    /// submission.
    pub tenant: TenantId,
    /// Cost of the job, used for the rate limit and for fair queueing.
    pub cost: u32,
    /// Number of bytes sent to the worker for this job.
    pub bytes: u32,
    /// Preferred worker. Ignored if the worker has no free permit at the time of submission.
    pub preferred_worker: Option<WorkerId>,
}

impl<T> Submission<T> {
    /// Returns a submission with default options.
    pub fn new(record: T) -> Self {
        Self {
            record,
            sequence: 0,
            job: None,
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
    /// The program that ran the job was killed by a signal. The worker itself continues to run.
    ProgramCrashed {
        /// Signal reported by the worker, or a more precise cause of death if the supervisor knows one.
        death: Death,
        /// Human-readable message.
        message: String,
    },
}

/// Optional capabilities that a worker announces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// True if the worker sends heartbeats while jobs are running.
    pub has_dispatch_thread: bool,
    /// True if the worker accepts a new `max_in_flight` while it is running.
    pub can_resize: bool,
}

/// Journal in memory shared with a worker. The worker starts jobs in the order in which they were sent, and writes the
/// number of each job to the journal before starting it.
pub trait JobJournal: std::fmt::Debug + Send {
    /// Returns the number of the last job that the worker has started. Jobs are numbered from 1, in the order in which
    /// they are sent.
    fn begun(&self) -> u64;

    /// Recalls all jobs up to number `up_to` that the worker has not started. `up_to` is the number of the last job
    /// sent. Returns the number of the last job that the worker has started. If the worker was just about to start that
    /// job, the worker returns the job with [`Event::JobReturned`].
    fn recall(&self, up_to: u64) -> u64;
}

/// An event for the state machine.
#[derive(Debug)]
pub enum Event<T> {
    /// The bulkhead must start its workers.
    Start,
    /// A timer is due. The caller must send this event at the time that [`crate::Bulkhead::next_deadline`] returns.
    Tick,
    /// A client submits a job.
    Submit(Submission<T>),
    /// A client cancels a job or has disconnected.
    Cancel {
        /// Job to cancel.
        job: JobId,
        /// True if the job must not be cancelled once any attempt has been started.
        unless_begun: bool,
    },
    /// The memory for waiting jobs is exhausted. The given job is rejected unless a worker already has it.
    MemoryExhausted {
        /// Job to reject.
        job: JobId,
    },
    /// A worker's process is running.
    Spawned {
        /// Worker that was spawned.
        worker: WorkerId,
        /// PID.
        pid: u32,
    },
    /// A worker's process could not be started. No further event follows for this worker.
    SpawnFailed {
        /// Worker that could not be started.
        worker: WorkerId,
        /// Human-readable cause.
        message: String,
        /// True if no user ID was free for the worker. This is no failure of the worker.
        lacks_id: bool,
    },
    /// A worker has sent HELLO and received its welcome message.
    Hello {
        /// Worker that sent HELLO.
        worker: WorkerId,
        /// Capabilities announced by the worker.
        capabilities: Capabilities,
        /// The worker's journal. If this is `None`, no jobs are prefetched to the worker or recalled from it.
        journal: Option<Box<dyn JobJournal>>,
    },
    /// A worker asks for more time to initialise.
    ExtendStart {
        /// Worker that requests more time.
        worker: WorkerId,
        /// Requested time from this event until the new start deadline.
        more: Duration,
    },
    /// A worker reports the status of its initialisation. If the start fails, the failure message contains the most
    /// recent status.
    StartStatus {
        /// Worker that reports its status.
        worker: WorkerId,
        /// Status text.
        text: String,
    },
    /// A worker is ready to accept jobs.
    Ready {
        /// Worker that is ready.
        worker: WorkerId,
    },
    /// A worker has sent a heartbeat or another frame.
    FrameReceived {
        /// Worker that sent the frame.
        worker: WorkerId,
    },
    /// A worker was still alive at an earlier time, according to a timestamp that it wrote to shared memory. The caller
    /// reads the timestamp only while the worker is silent.
    AliveAt {
        /// Worker that wrote the timestamp.
        worker: WorkerId,
        /// Time at which the worker was alive, which must not be later than the time of this event.
        at: Time,
    },
    /// Result of [`Action::CheckCpuTime`].
    CpuTimeChecked {
        /// Worker that was examined.
        worker: WorkerId,
        /// True if the worker has been waiting for a processor since [`Action::RecordCpuTime`] and has used hardly any
        /// processor time. The silence is then attributed to a busy machine.
        is_starved: bool,
    },
    /// A worker has sent a job's result.
    Replied {
        /// Worker that sent the result.
        worker: WorkerId,
        /// ID that the worker has sent for the job.
        job: JobId,
        /// Result of the job.
        reply: Reply,
    },
    /// A worker returns a job that was recalled just before the worker started it.
    JobReturned {
        /// Worker that returns the job.
        worker: WorkerId,
        /// ID that the worker has sent for the job.
        job: JobId,
        /// Number that the worker has sent for the job. This is the job's position among all jobs sent to the worker.
        send_number: u64,
    },
    /// A worker has started sending a result that exceeds the size limit. Until [`Event::Replied`], all data from this
    /// worker belongs to that result.
    ResultTooLarge {
        /// Worker that is sending the result.
        worker: WorkerId,
        /// ID that the worker has sent for the job.
        job: JobId,
        /// Failure that is sent to the client as the outcome of the job.
        failure: HandlerFailure,
    },
    /// A worker violated the protocol, or closed its link although its process is still running. Further data from the
    /// worker cannot be trusted.
    ProtocolViolated {
        /// Worker that violated the protocol.
        worker: WorkerId,
        /// Human-readable description of the violation.
        message: String,
    },
    /// A worker announces that it accepts no more jobs and will exit.
    Stopping {
        /// Worker that will exit.
        worker: WorkerId,
    },
    /// A worker died before it read any byte of the given job, so the job was not started. This event precedes
    /// [`Event::Exited`].
    JobUnread {
        /// Worker that died.
        worker: WorkerId,
        /// Job that the worker did not read.
        job: JobId,
    },
    /// A worker died and, according to its own record, had not started the given job. This event precedes
    /// [`Event::Exited`].
    JobNotBegun {
        /// Worker that died.
        worker: WorkerId,
        /// Job that the worker did not start.
        job: JobId,
    },
    /// A worker's process has exited, but its descendants may still be running. The slot stays occupied until
    /// [`Event::Reaped`].
    Exited {
        /// Worker that exited.
        worker: WorkerId,
        /// Cause of death.
        death: Death,
    },
    /// All descendants of an exited worker are gone.
    Reaped {
        /// The exited worker.
        worker: WorkerId,
    },
    /// A worker and all of its descendants were killed by the supervisor because the keeper had died. No further event
    /// follows for this worker.
    LostWithKeeper {
        /// Worker that is gone.
        worker: WorkerId,
    },
    /// A worker's memory usage was measured.
    Memory {
        /// Worker whose memory was measured.
        worker: WorkerId,
        /// Resident set size, in bytes.
        rss_bytes: u64,
    },
    /// The supervisor itself was paused. Workers that seem to have been silent may therefore be healthy.
    SupervisorPaused,
    /// Replaces all workers one after another. Each old worker continues to run until its replacement is ready. Workers
    /// that are still starting are killed and restarted.
    Restart,
    /// Rejects queued jobs and stops accepting new jobs. Jobs in flight continue to run.
    Drain,
    /// Accepts jobs again after [`Event::Drain`].
    Resume,
    /// Clears the restart history, immediately starts workers in slots that have failed or are in backoff, closes the
    /// breaker, and releases quarantined payloads.
    Reset,
    /// Changes individual limits immediately, without dropping any job.
    ChangeLimits(LimitChange),
    /// Replaces all limits immediately, without dropping any job. Deadlines and queue timeouts of existing jobs do not
    /// change.
    Reconfigure(Box<Limits>),
    /// Replaces all workers like [`Event::Restart`], because new workers will run a different program or configuration.
    /// If a replacement fails to start, another attempt follows.
    ReplaceWorkers,
    /// Sets the limits of one tenant.
    ChangeTenantLimits {
        /// Name of the tenant.
        tenant: String,
        /// New overrides. They replace all previous overrides of the tenant.
        overrides: TenantOverrides,
    },
    /// Stops all workers until the next [`Event::Start`], because no jobs are expected.
    ScaleToZero,
    /// Announces that [`Event::Start`] will follow. Until then, jobs are accepted and wait for workers.
    AnnounceStart,
    /// Forces the breaker open, or releases it again.
    ForceBreaker {
        /// True to force the breaker open, false to release it.
        open: bool,
    },
    /// Caps the number of permits during an upgrade, so that the successor can use the rest. The remaining jobs of this
    /// bulkhead never need more permits than the cap allows.
    CapPermits {
        /// Maximum number of permits, or `None` if the successor no longer exists.
        most: Option<u32>,
    },
    /// Sets the number of permits that the predecessor still needs during an upgrade. This bulkhead leaves these
    /// permits to the predecessor.
    PredecessorHolds {
        /// Number of permits.
        permits: u32,
        /// Number of jobs that are waiting in the predecessor. They count towards `max_queue`.
        waiting: u32,
    },
    /// Quarantines a payload that was quarantined in the predecessor.
    Quarantine {
        /// Digest of the payload.
        digest: Digest,
    },
    /// Stops the bulkhead. Queued jobs are rejected immediately. Jobs in flight can continue until `by`.
    Stop {
        /// Time at which the remaining workers are killed.
        by: Time,
    },
}

/// An action requested by the state machine, which the caller must perform.
#[derive(Debug)]
pub enum Action<T> {
    /// Start a process for a worker.
    Spawn {
        /// ID of the new worker.
        worker: WorkerId,
        /// Slot for which the worker is started.
        slot: u32,
        /// Cause of the restart, or `None` if this is the slot's first worker.
        restart_cause: Option<RestartCause>,
    },
    /// Send a job to a worker. [`crate::Bulkhead::record_mut`] returns the caller's record of the job.
    Dispatch {
        /// Worker that receives the job.
        worker: WorkerId,
        /// Job to send.
        job: JobId,
        /// Time left until the job reaches its deadline or its run limit, whichever comes first.
        remaining: Duration,
        /// True if the job is prefetched. A prefetched job counts as queued until the worker starts it.
        is_prefetched: bool,
    },
    /// A job was recalled from a worker that had not started it.
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
    /// Record the processor time used by a silent worker, and the time for which the worker has waited for a processor.
    RecordCpuTime {
        /// The silent worker.
        worker: WorkerId,
    },
    /// Compare the processor time of a worker that is still silent with the values recorded at
    /// [`Action::RecordCpuTime`]. Always send the result as [`Event::CpuTimeChecked`].
    CheckCpuTime {
        /// The silent worker.
        worker: WorkerId,
    },
    /// Send a worker its new `max_in_flight`.
    SetMaxInFlight {
        /// Worker that receives the new limit.
        worker: WorkerId,
        /// New maximum number of jobs in flight.
        max_in_flight: u32,
    },
    /// Ask a worker to finish its jobs and exit.
    Drain {
        /// Worker to drain.
        worker: WorkerId,
    },
    /// Kill a worker and all its descendants. The caller confirms the kill with [`Event::Exited`].
    Kill {
        /// Worker to kill.
        worker: WorkerId,
        /// Reason for the kill.
        reason: KillReason,
    },
    /// Send a job's outcome to its client.
    SendOutcome(JobOutcome<T>),
    /// Report an event to operators.
    Report(OperatorEvent),
}

/// Changes to individual limits. `None` means that a limit does not change.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LimitChange {
    /// Number of worker processes. After a decrease, surplus workers finish their jobs before they exit.
    pub processes: Option<u32>,
    /// Maximum number of jobs in flight per worker. After a decrease, jobs that are already running continue.
    pub max_in_flight: Option<u32>,
    /// Maximum number of queued jobs. A decrease does not remove any job from the queue.
    pub max_queue: Option<u32>,
    /// New rate limit, or `Some(None)` to remove the limit. If one limit replaces another, earlier charges still count.
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
    /// Job ID, or `None` if the job was rejected at submission.
    pub job: Option<JobId>,
    /// Caller's record of the job.
    pub record: T,
    /// Outcome of the job, excluding payload and times.
    pub verdict: Verdict,
    /// Number of attempts, not counting dispatches to workers that did not start the job.
    pub attempts: u32,
    /// Total time that the job spent in the queue.
    pub queued: Duration,
    /// Total time that the job spent in workers.
    pub ran: Duration,
    /// PID of the last worker that had the job.
    pub worker_pid: Option<u32>,
    /// True if it is safe and useful for the client to submit the job again.
    pub retryable: bool,
    /// Time that the client should wait before it submits the job again.
    pub retry_after: Option<Duration>,
    /// Deadline that applied to the job, as a duration from submission.
    pub deadline: Duration,
    /// Run limit that applied to each attempt, or `None` if there was no limit.
    pub run_limit: Option<Duration>,
}

/// Reason why a slot has no worker and will not get one soon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// The slot's workers failed too often.
    Failed,
    /// `restart.policy` does not allow a restart.
    Policy,
}

/// An event to report to operators.
#[derive(Clone, Debug, PartialEq)]
pub enum OperatorEvent {
    /// A worker's process was started.
    WorkerStarted {
        /// Worker that was started.
        worker: WorkerId,
        /// Slot of the worker.
        slot: u32,
        /// PID.
        pid: u32,
    },
    /// A worker became ready to run jobs.
    WorkerReady {
        /// Worker that is ready.
        worker: WorkerId,
        /// PID.
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
    /// A worker's process exited.
    WorkerExited {
        /// Worker that exited.
        worker: WorkerId,
        /// Slot of the worker.
        slot: u32,
        /// PID.
        pid: u32,
        /// Cause of the worker's death. If the supervisor killed the worker, also contains the reason for the kill.
        ending: Ending,
        /// Time since the spawn.
        uptime: Duration,
        /// Number of jobs for which the worker has sent results.
        served: u64,
        /// Number of jobs in flight when the worker exited.
        in_flight: u32,
    },
    /// The supervisor is killing a worker.
    WorkerKilled {
        /// PID.
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
        /// PID.
        pid: u32,
    },
    /// A worker is being drained because it is being replaced.
    WorkerRecycled {
        /// PID of the old worker.
        pid: u32,
        /// Reason for the replacement.
        reason: RecycleReason,
    },
    /// The replacement for an outdated worker failed to start. The old worker continues to run.
    ReplacementFailed {
        /// Slot of the worker.
        slot: u32,
        /// Human-readable cause.
        message: String,
        /// Time until the next attempt to replace outdated workers, or `None` if no attempt will follow. A failed
        /// replacement is not retried if only an operator's restart requested it.
        retry_in: Option<Duration>,
    },
    /// A slot's next worker will be started after a delay.
    RestartBackoff {
        /// Slot that is waiting.
        slot: u32,
        /// Length of the delay.
        delay: Duration,
    },
    /// No slot of the bulkhead has a worker or will get one soon.
    BulkheadFailed {
        /// Reason why the last remaining slot was stopped.
        reason: StopReason,
        /// Human-readable description of the most recent failure.
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
        /// PID of the worker in which the last attempt ran.
        worker_pid: Option<u32>,
    },
    /// A payload was quarantined because it has caused too many crashes.
    JobQuarantined {
        /// Job that caused the most recent crash.
        job: JobId,
        /// Digest of the payload.
        digest: Digest,
    },
    /// The state of the breaker has changed.
    Breaker(Transition),
    /// The number of queued jobs has reached the warning threshold, which is the fraction `pressure.warn` of the
    /// queue's capacity.
    QueuePressure {
        /// Number of queued jobs.
        queued: usize,
        /// Capacity of the queue.
        capacity: usize,
    },
    /// The adaptive limit has changed since the last report.
    LimitAdapted {
        /// Previously reported adaptive limit.
        from: u32,
        /// Current adaptive limit.
        to: u32,
        /// Latency that caused the change. This is the lower median of the tenants' 90th-percentile run times.
        latency: Duration,
        /// Configuration of the adaptive limit.
        limits: AdaptiveLimits,
    },
    /// Jobs are being rejected because of a rate limit.
    TenantThrottled {
        /// Name of the tenant that exceeds its rate limit. The name is empty for jobs without a tenant. `None` if
        /// the limit applies to the whole bulkhead.
        tenant: Option<Arc<str>>,
        /// Time until the rate limit admits another job.
        retry_after: Duration,
    },
    /// A tenant accounts for more than half of the recent evictions. Not reported for jobs without a tenant.
    TenantEvictions {
        /// Name of the tenant.
        tenant: Arc<str>,
        /// Fraction of the recent evictions that were evictions of this tenant's jobs, from 0 to 1.
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
