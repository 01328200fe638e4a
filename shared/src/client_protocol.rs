//! Messages between a client and the supervisor in version 1 of the protocol. Also converts outcomes to messages and
//! back. The structure of each kind of frame is frozen. New fields are added as extensions (see [`crate::codec`], which
//! encodes the messages).

use std::time::Duration;

use bincode::{BorrowDecode, Encode};

use crate::JobOptions;
use crate::flat::flat;
use crate::outcome::{CrashReason, Executed, Fault, HandlerFailure, Outcome, RejectReason, Verdict};

/// Version of the client protocol and the worker protocol that this crate implements.
pub const PROTOCOL_VERSION: u16 = 1;

/// Values of [`Hello::role`].
pub mod role {
    /// A client, which submits jobs.
    pub const CLIENT: u8 = 1;
    /// A worker, which runs jobs.
    pub const WORKER: u8 = 2;
}

/// Optional features of a supervisor, as bits of [`ClientWelcome::capabilities`].
pub mod capability {
    /// The supervisor accepts the [`RUN_LIMIT`](crate::codec::tag::RUN_LIMIT) extension in SUBMIT frames.
    pub const RUN_LIMIT: u64 = 1;

    /// The supervisor grants [leases](crate::memory_files) to clients on request.
    pub const MEMORY_FILES: u64 = 2;

    /// The supervisor accepts the [`UNLESS_BEGUN`](crate::codec::tag::UNLESS_BEGUN) extension in CANCEL frames.
    pub const CANCEL_UNLESS_BEGUN: u64 = 4;
}

/// Optional features of a client, as bits of [`Hello::capabilities`].
pub mod client_capability {
    /// The client understands [`GOAWAY`](crate::frame::kind::GOAWAY). After this frame, the client opens a new
    /// connection, resubmits every job that the supervisor has not processed, and closes the old connection after
    /// its last outcome.
    pub const GOAWAY: u64 = 1;
}

/// Decodes the value of the [`RUN_LIMIT`](crate::codec::tag::RUN_LIMIT) extension. Returns `None` if the value is
/// invalid.
///
/// ```
/// use std::time::Duration;
/// # use bulkhead_shared::client_protocol::{decode_run_limit, encode_run_limit};
/// let bytes = encode_run_limit(Duration::from_millis(200));
/// assert_eq!(decode_run_limit(&bytes), Some(Duration::from_millis(200)));
/// assert_eq!(decode_run_limit(&[0; 8]), None);
/// ```
pub fn decode_run_limit(bytes: &[u8]) -> Option<Duration> {
    let limit = u64::from_le_bytes(bytes.try_into().ok()?);
    (limit > 0).then(|| Duration::from_micros(limit))
}

/// Encodes a run limit as the value of the [`RUN_LIMIT`](crate::codec::tag::RUN_LIMIT) extension. A limit below one
/// microsecond is encoded as one microsecond.
pub fn encode_run_limit(limit: Duration) -> [u8; 8] {
    micros(limit).max(1).to_le_bytes()
}

/// [`HELLO`](crate::frame::kind::HELLO): the first frame that a client or worker sends. The frame number is
/// [`MAGIC`](crate::frame::MAGIC).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub struct Hello<'a> {
    /// Oldest protocol version that the sender supports.
    pub version_min: u16,
    /// Newest protocol version that the sender supports.
    pub version_max: u16,
    /// Role of the sender, as a value from [`role`].
    pub role: u8,
    /// Maximum size of a frame that the sender accepts, in bytes, excluding the header.
    pub frame_bytes_max: u32,
    /// Bit mask of the sender's capabilities: [`client_capability`] for a client,
    /// [`crate::worker_protocol::capability`] for a worker.
    pub capabilities: u64,
    /// Name of the client or worker library.
    pub name: &'a str,
    /// Version of the client or worker library.
    pub version: &'a str,
}

/// [`CLIENT_WELCOME`](crate::frame::kind::CLIENT_WELCOME): the supervisor accepts the client, which can now
/// submit jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub struct ClientWelcome<'a> {
    /// Protocol version that both sides will use.
    pub version: u16,
    /// Maximum size of a frame that the supervisor accepts, in bytes, excluding the header.
    pub frame_bytes_max: u32,
    /// Bit mask of the supervisor's [`capability`] values.
    pub capabilities: u64,
    /// Version of the supervisor.
    pub server_version: &'a str,
}

/// [`REFUSED`](crate::frame::kind::REFUSED): the supervisor closes the connection for the given reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub struct Refused<'a> {
    /// Code of a [`RejectReason`].
    pub reason: u8,
    /// Human-readable message with a suggested fix.
    pub message: &'a str,
}

/// [`SUBMIT`](crate::frame::kind::SUBMIT): submits a job. The client chooses the frame number, and the outcome has the
/// same number. The payload follows the metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Submit<'a> {
    /// Name of the bulkhead.
    pub bulkhead: &'a str,
    /// Operation that the handler performs, possibly empty.
    pub operation: &'a str,
    /// Tenant that the job belongs to. Empty if the job has no tenant.
    pub tenant: &'a str,
    /// Time limit for the job in microseconds, measured from receipt. 0 selects the bulkhead's default.
    pub deadline_us: u64,
    /// Code of a [`crate::Priority`].
    pub priority: u8,
    /// 1 if the job can safely run twice, otherwise 0.
    pub idempotent: u8,
    /// Cost of the job for rate limiting. An ordinary job costs 1. A value of 0 is treated as 1.
    pub cost: u32,
}

impl<'a> Submit<'a> {
    /// Creates the message from a job's options, except for the run limit, which is sent separately as the
    /// [`RUN_LIMIT`](crate::codec::tag::RUN_LIMIT) extension.
    pub fn new<T: AsRef<str>>(bulkhead: &'a str, options: &'a JobOptions<T>) -> Self {
        Self {
            bulkhead,
            operation: options.operation.as_ref(),
            tenant: options.tenant.as_ref(),
            deadline_us: options.deadline.map_or(0, |limit| micros(limit).max(1)),
            priority: options.priority.code(),
            idempotent: options.is_idempotent.into(),
            cost: options.cost,
        }
    }
}

flat!(Submit: [bulkhead, operation, tenant], [deadline_us: u64, priority: u8, idempotent: u8, cost: u32], []);

/// [`PROGRESS`](crate::frame::kind::PROGRESS): progress of a running job.
#[derive(Clone, Copy, Debug, PartialEq, Encode, BorrowDecode)]
pub struct Progress<'a> {
    /// Completed fraction, from 0 to 1.
    pub fraction: f32,
    /// Short description of the progress, possibly empty.
    pub text: &'a str,
}

/// [`OUTCOME`](crate::frame::kind::OUTCOME): the outcome of a job. The frame number is that of the SUBMIT frame. The
/// payload is the result of an `ok` job, or the error payload of a `failed` job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OutcomeMessage<'a> {
    /// Kind of the outcome, as a value from [`outcome_code`].
    pub outcome: u8,
    /// For a rejected or crashed job, the code of the [`RejectReason`] or [`CrashReason`]. For an exceeded deadline, 1
    /// if the job was queued and 2 if it was running.
    pub reason: u8,
    /// 0 if the handler did not start the job, 1 if it did, or 2 if unknown.
    pub executed: u8,
    /// 1 if resubmitting the job is safe and may succeed, otherwise 0.
    pub retryable: u8,
    /// For a failed job, 1 if the caller is at fault and 2 if the dependency is at fault. Otherwise 0.
    pub fault: u8,
    /// Number of times the job was dispatched to a worker.
    pub attempts: u32,
    /// Time the job spent waiting for a permit, in microseconds.
    pub queued_us: u64,
    /// Total time the job spent in workers, in microseconds.
    pub ran_us: u64,
    /// Time limit that applied to the job, in microseconds.
    pub deadline_us: u64,
    /// PID of the last worker to which the job was dispatched, or 0 if there was none.
    pub worker_pid: u32,
    /// 1 if `retry_after_us` is valid.
    pub has_retry_after: u8,
    /// Minimum time to wait before resubmitting the job, in microseconds.
    pub retry_after_us: u64,
    /// 1 if `status` is valid.
    pub has_status: u8,
    /// For a crashed job, the exit code or signal number of the crash. For a job that succeeded or failed, the exit
    /// status of the program that ran the job.
    pub status: i32,
    /// The bulkhead that served or rejected the job.
    pub bulkhead: &'a str,
    /// Error code from the handler if the job failed, otherwise empty.
    pub code: &'a str,
    /// Human-readable message, possibly empty.
    pub message: &'a str,
}

flat!(OutcomeMessage: [], [
    outcome: u8, reason: u8, executed: u8, retryable: u8, fault: u8, attempts: u32, queued_us: u64, ran_us: u64,
    deadline_us: u64, worker_pid: u32, has_retry_after: u8, retry_after_us: u64, has_status: u8, status: i32
], [bulkhead, code, message]);

/// Values of [`OutcomeMessage::outcome`].
#[expect(missing_docs, reason = "each constant represents the outcome of the same name")]
pub mod outcome_code {
    pub const OK: u8 = 0;
    pub const FAILED: u8 = 1;
    pub const REJECTED: u8 = 2;
    pub const DEADLINE_EXCEEDED: u8 = 3;
    pub const CRASHED: u8 = 4;
    pub const CANCELLED: u8 = 5;
}

const QUEUED: u8 = 1;
const RUNNING: u8 = 2;

fn micros(duration: Duration) -> u64 {
    // Uses 64-bit arithmetic, because `Duration::as_micros` is slower and this function runs several times per job.
    duration.as_secs().saturating_mul(1_000_000).saturating_add(duration.subsec_micros().into())
}

impl<'a> OutcomeMessage<'a> {
    /// Creates the message that reports `outcome`.
    pub fn from_outcome(outcome: &'a Outcome) -> Self {
        Self {
            retryable: outcome.retryable.into(),
            attempts: outcome.attempts,
            worker_pid: outcome.worker_pid.unwrap_or(0),
            ..Self::from_verdict(&outcome.verdict, &outcome.bulkhead)
        }
        .with_times(outcome.queued, outcome.ran, outcome.deadline, outcome.retry_after)
        .with_status(outcome.status)
    }

    /// Sets the exit status of the program that ran the job. Does nothing if `status` is `None`.
    #[must_use]
    pub fn with_status(self, status: Option<i32>) -> Self {
        match status {
            Some(status) => Self { has_status: 1, status, ..self },
            None => self,
        }
    }

    /// Creates the message that reports `verdict`. The caller must set the fields that do not depend on the verdict,
    /// such as the times and the worker's PID.
    pub fn from_verdict(verdict: &'a Verdict, bulkhead: &'a str) -> Self {
        let (code, reason, status) = match verdict {
            Verdict::Ok => (outcome_code::OK, 0, None),
            Verdict::Failed(_) => (outcome_code::FAILED, 0, None),
            Verdict::Rejected { reason, .. } => (outcome_code::REJECTED, reason.code(), None),
            Verdict::DeadlineQueued => (outcome_code::DEADLINE_EXCEEDED, QUEUED, None),
            Verdict::DeadlineRunning => (outcome_code::DEADLINE_EXCEEDED, RUNNING, None),
            Verdict::Crashed { reason, status, .. } => (outcome_code::CRASHED, reason.code(), *status),
            Verdict::Cancelled { .. } => (outcome_code::CANCELLED, 0, None),
        };
        let (handler_code, fault) = match verdict {
            Verdict::Failed(failure) => (failure.code.as_str(), failure.fault as u8),
            _ => ("", 0),
        };
        Self {
            outcome: code,
            reason,
            executed: verdict.executed() as u8,
            fault,
            has_status: status.is_some().into(),
            status: status.unwrap_or(0),
            bulkhead,
            code: handler_code,
            message: verdict.message().unwrap_or(""),
            ..Self::default()
        }
    }

    /// Sets the queue time, run time, time limit and retry delay.
    #[must_use]
    pub fn with_times(
        self,
        queued: Duration,
        ran: Duration,
        deadline: Duration,
        retry_after: Option<Duration>,
    ) -> Self {
        Self {
            queued_us: micros(queued),
            ran_us: micros(ran),
            deadline_us: micros(deadline),
            has_retry_after: retry_after.is_some().into(),
            retry_after_us: retry_after.map_or(0, micros),
            ..self
        }
    }

    /// Converts the message to an outcome. Omits the values that are sent as extensions: job ID, run limit and crash
    /// report. Returns `None` if the message contains a code that this version does not know.
    pub fn to_outcome(self) -> Option<Outcome> {
        self.to_outcome_with_bulkhead(self.bulkhead.to_owned())
    }

    /// Converts the message to an outcome like [`OutcomeMessage::to_outcome`], but takes the bulkhead's name from the
    /// caller. Saves an allocation if the caller already has the name as a `String`.
    pub fn to_outcome_with_bulkhead(&self, bulkhead: String) -> Option<Outcome> {
        let status = (self.has_status != 0).then_some(self.status);
        let message = self.message.to_owned();
        let verdict = match self.outcome {
            outcome_code::OK => Verdict::Ok,
            outcome_code::FAILED => Verdict::Failed(HandlerFailure {
                code: self.code.to_owned(),
                message,
                retryable: self.retryable != 0,
                fault: if self.fault == Fault::Caller as u8 { Fault::Caller } else { Fault::Dependency },
            }),
            outcome_code::REJECTED => {
                Verdict::Rejected { reason: RejectReason::from_code(self.reason)?, message }
            }
            outcome_code::DEADLINE_EXCEEDED if self.reason == QUEUED => Verdict::DeadlineQueued,
            outcome_code::DEADLINE_EXCEEDED => Verdict::DeadlineRunning,
            outcome_code::CRASHED => {
                Verdict::Crashed { reason: CrashReason::from_code(self.reason)?, status, message }
            }
            outcome_code::CANCELLED => Verdict::Cancelled {
                executed: Executed::from_code(self.executed).unwrap_or(Executed::Unknown),
            },
            _ => return None,
        };
        Some(Outcome {
            verdict,
            job: None,
            bulkhead,
            attempts: self.attempts,
            queued: Duration::from_micros(self.queued_us),
            ran: Duration::from_micros(self.ran_us),
            worker_pid: (self.worker_pid != 0).then_some(self.worker_pid),
            retryable: self.retryable != 0,
            retry_after: (self.has_retry_after != 0).then(|| Duration::from_micros(self.retry_after_us)),
            deadline: Duration::from_micros(self.deadline_us),
            run_limit: None,
            status: status.filter(|_| matches!(self.outcome, outcome_code::OK | outcome_code::FAILED)),
            report: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec;

    fn outcome(verdict: Verdict) -> Outcome {
        Outcome {
            retryable: verdict.is_retryable(true),
            status: matches!(verdict, Verdict::Ok | Verdict::Failed(_)).then_some(1),
            verdict,
            job: None,
            bulkhead: "thumbnail".into(),
            attempts: 2,
            queued: Duration::from_micros(1500),
            ran: Duration::from_millis(3),
            worker_pid: Some(4242),
            retry_after: Some(Duration::from_millis(250)),
            deadline: Duration::from_secs(5),
            run_limit: None,
            report: None,
        }
    }

    #[test]
    fn every_verdict_survives_encoding() {
        let mut verdicts = vec![
            Verdict::Ok,
            Verdict::DeadlineQueued,
            Verdict::DeadlineRunning,
            Verdict::Cancelled { executed: Executed::Yes },
            Verdict::Cancelled { executed: Executed::No },
            Verdict::Failed(HandlerFailure {
                code: "bad_header".into(),
                message: "no magic".into(),
                retryable: false,
                fault: Fault::Caller,
            }),
        ];
        verdicts.extend(RejectReason::ALL.iter().map(|&r| Verdict::rejected(r)));
        verdicts.extend(CrashReason::ALL.iter().map(|&reason| Verdict::Crashed {
            reason,
            status: Some(-11),
            message: "killed by SIGSEGV".into(),
        }));
        for verdict in verdicts {
            let sent = outcome(verdict);
            let mut bytes = Vec::new();
            codec::encode(&OutcomeMessage::from_outcome(&sent), &[], &mut bytes).unwrap();
            let (message, _) = codec::decode::<OutcomeMessage<'_>>(&bytes, &[]).unwrap();
            assert_eq!(message.to_outcome(), Some(sent));
        }
    }
}
