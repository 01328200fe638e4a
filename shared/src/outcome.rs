//! Defines the outcomes of jobs and the reasons for them. Also maps each outcome to an HTTP status and an exit code,
//! and says whether a job can be sent again. The wire protocol, the command line, the HTTP API and the metrics share
//! these definitions. The supervisor's policy decides which outcome a job gets.

use std::fmt;
use std::time::Duration;

use crate::JobId;
use crate::exit;
use crate::vocabulary::codes;

codes! {
    /// Whether the handler started the job.
    Executed {
        /// The handler did not start the job. Resubmitting the job is safe.
        No = 0 "no",
        /// The handler started the job.
        Yes = 1 "yes",
        /// It is unknown whether the handler started the job, because the worker died after the job had been
        /// dispatched.
        Unknown = 2 "unknown",
    }
}

codes! {
    /// The party that caused a failure, according to the handler.
    #[derive(Default)]
    Fault {
        /// The job itself was invalid. The failure does not count against the health of the bulkhead.
        Caller = 1 "caller",
        /// The code or service behind the bulkhead failed.
        #[default]
        Dependency = 2 "dependency",
    }
}

/// The error that a handler returned.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HandlerFailure {
    /// Short, machine-readable error code.
    pub code: String,
    /// Human-readable message.
    pub message: String,
    /// True if resubmitting the job may succeed.
    pub retryable: bool,
    /// The party that caused the failure.
    pub fault: Fault,
}

/// Error code of a [`HandlerFailure`] that reports a result larger than the bulkhead's `max_result`.
pub const RESULT_TOO_LARGE: &str = "result_too_large";

codes! {
    /// Reason for rejecting a job. Rejected jobs never ran.
    RejectReason {
        /// The request is invalid.
        Invalid = 1 "invalid",
        /// The payload is larger than the bulkhead's `max_payload`.
        TooLarge = 2 "too_large",
        /// The bulkhead does not exist.
        NotFound = 3 "not_found",
        /// The client cannot be identified.
        Unauthenticated = 4 "unauthenticated",
        /// The client is not allowed to use the bulkhead.
        Forbidden = 5 "forbidden",
        /// The rate limit is exceeded.
        RateLimited = 6 "rate_limited",
        /// The tenant's quota is exceeded.
        TenantQuota = 7 "tenant_quota",
        /// The queue has reached its rejection level but is not full.
        Backpressure = 8 "backpressure",
        /// The queue is full.
        QueueFull = 9 "queue_full",
        /// The job was still queued when `queue_timeout` expired.
        QueueTimeout = 10 "queue_timeout",
        /// The job was removed from the queue to make room for a job of higher priority.
        Shed = 11 "shed",
        /// The job was removed from the queue to make room for a newer job.
        Evicted = 12 "evicted",
        /// The circuit breaker is open.
        CircuitOpen = 13 "circuit_open",
        /// The bulkhead or the supervisor accepts no more jobs.
        Draining = 14 "draining",
        /// No worker is running, and none will be ready in time for the job.
        Unavailable = 15 "unavailable",
        /// The supervisor has reached its memory limit or its maximum number of clients.
        Overloaded = 16 "overloaded",
        /// The payload has killed too many workers.
        Quarantined = 17 "quarantined",
    }
}

impl RejectReason {
    /// Returns true if the same job may be accepted later.
    pub const fn is_retryable(self) -> bool {
        !matches!(
            self,
            Self::Invalid
                | Self::TooLarge
                | Self::NotFound
                | Self::Unauthenticated
                | Self::Forbidden
                | Self::Quarantined
        )
    }

    /// Returns true if the caller caused the rejection. A rejection of this kind does not count against the health of
    /// the bulkhead.
    pub const fn is_caller_fault(self) -> bool {
        match self {
            Self::Invalid | Self::TooLarge | Self::NotFound | Self::Unauthenticated | Self::Forbidden => true,
            Self::RateLimited | Self::TenantQuota | Self::Quarantined => true,
            Self::Backpressure | Self::QueueFull | Self::QueueTimeout | Self::Shed | Self::Evicted => false,
            Self::CircuitOpen | Self::Draining | Self::Unavailable | Self::Overloaded => false,
        }
    }

    /// Returns the HTTP status code for a job that was rejected for this reason.
    pub const fn http_status(self) -> u16 {
        match self {
            Self::Invalid => 400,
            Self::TooLarge => 413,
            Self::NotFound => 404,
            Self::Unauthenticated => 401,
            Self::Forbidden => 403,
            Self::RateLimited | Self::TenantQuota | Self::Backpressure => 429,
            Self::Quarantined => 422,
            _ => 503,
        }
    }

    /// Returns the exit code of the `bulkhead` command for a job that was rejected for this reason.
    pub const fn exit_code(self) -> u8 {
        match self {
            Self::Invalid | Self::TooLarge | Self::Quarantined => exit::INVALID,
            Self::NotFound => exit::NOT_FOUND,
            Self::Unauthenticated | Self::Forbidden => exit::FORBIDDEN,
            _ => exit::TRY_LATER,
        }
    }
}

codes! {
    /// Cause of a crash that ended a job.
    CrashReason {
        /// The process exited on its own, with any exit status.
        Exit = 1 "exit",
        /// The process was killed by a signal that the supervisor did not send.
        Signal = 2 "signal",
        /// The kernel killed the process because of its memory use.
        Oom = 3 "oom",
        /// The process made a system call that the sandbox forbids.
        Violation = 4 "violation",
        /// The worker violated the protocol.
        Protocol = 5 "protocol",
        /// The worker stopped sending heartbeats.
        Hung = 6 "hung",
        /// The supervisor stopped before the job ended.
        Stopped = 7 "stopped",
        /// The worker died because of another job that it was running.
        Collateral = 8 "collateral",
        /// The host was lost before the job ended. Only a fleet reports this reason, never a supervisor.
        HostLost = 9 "host_lost",
    }
}

/// Final state of a job: success, failure, rejection, timeout, crash or cancellation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The handler succeeded. The result is not part of the verdict.
    Ok,
    /// The handler returned an error.
    Failed(HandlerFailure),
    /// The job was rejected.
    Rejected {
        /// Reason for the rejection.
        reason: RejectReason,
        /// Human-readable message, possibly empty.
        message: String,
    },
    /// The deadline passed before the job ran.
    DeadlineQueued,
    /// The deadline passed while the job ran.
    DeadlineRunning,
    /// The worker died after the job had been dispatched to it.
    Crashed {
        /// The reason why the worker died.
        reason: CrashReason,
        /// Exit code of the worker (for `Exit`) or number of the signal (for `Signal`), if known.
        status: Option<i32>,
        /// Human-readable message, such as "killed by SIGSEGV". Can be empty.
        message: String,
    },
    /// The client cancelled the job or disconnected.
    Cancelled {
        /// Whether the handler started the job before the cancellation.
        executed: Executed,
    },
}

impl Verdict {
    /// Creates a rejection without a message.
    pub const fn rejected(reason: RejectReason) -> Self {
        Self::Rejected { reason, message: String::new() }
    }

    /// Returns the name of the outcome, such as `ok` or `rejected`.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Failed(_) => "failed",
            Self::Rejected { .. } => "rejected",
            Self::DeadlineQueued | Self::DeadlineRunning => "deadline_exceeded",
            Self::Crashed { .. } => "crashed",
            Self::Cancelled { .. } => "cancelled",
        }
    }

    /// Returns the machine-readable reason for the outcome. Returns `None` if the outcome has no reason.
    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::Ok | Self::Cancelled { .. } => None,
            Self::Failed(failure) => Some(&failure.code),
            Self::Rejected { reason, .. } => Some(reason.name()),
            Self::DeadlineQueued => Some("queued"),
            Self::DeadlineRunning => Some("running"),
            Self::Crashed { reason, .. } => Some(reason.name()),
        }
    }

    /// Returns the human-readable message, if there is one.
    pub fn message(&self) -> Option<&str> {
        let text = match self {
            Self::Failed(failure) => &failure.message,
            Self::Rejected { message, .. } | Self::Crashed { message, .. } => message,
            _ => return None,
        };
        (!text.is_empty()).then_some(text)
    }

    /// Returns whether the handler started the job.
    pub const fn executed(&self) -> Executed {
        match self {
            Self::Ok | Self::Failed(_) | Self::DeadlineRunning => Executed::Yes,
            Self::Rejected { .. } | Self::DeadlineQueued => Executed::No,
            Self::Crashed { .. } => Executed::Unknown,
            Self::Cancelled { executed } => *executed,
        }
    }

    /// Returns true if resubmitting the job is safe and may succeed. `idempotent` is true if the client has
    /// declared that the job can safely run twice.
    pub const fn is_retryable(&self, idempotent: bool) -> bool {
        match self {
            Self::Ok | Self::Cancelled { .. } => false,
            Self::Failed(failure) => failure.retryable,
            Self::Rejected { reason, .. } => reason.is_retryable(),
            Self::DeadlineQueued => true,
            Self::DeadlineRunning | Self::Crashed { .. } => idempotent,
        }
    }

    /// Returns the HTTP status code for a job with this verdict.
    pub const fn http_status(&self) -> u16 {
        match self {
            Self::Ok => 200,
            Self::Failed(_) => 422,
            Self::Rejected { reason, .. } => reason.http_status(),
            Self::DeadlineQueued | Self::DeadlineRunning => 504,
            Self::Crashed { .. } => 502,
            Self::Cancelled { .. } => 499,
        }
    }

    /// Returns the exit code of the `bulkhead` command for a job with this verdict.
    pub const fn exit_code(&self) -> u8 {
        match self {
            Self::Ok => exit::OK,
            Self::Failed(_) => exit::FAILED,
            Self::Rejected { reason, .. } => reason.exit_code(),
            Self::DeadlineQueued | Self::DeadlineRunning => exit::TIMED_OUT,
            Self::Crashed { .. } => exit::CRASHED,
            Self::Cancelled { .. } => exit::CANCELLED,
        }
    }
}

/// The final result of a job, with everything a caller needs to decide what to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Final state of the job.
    pub verdict: Verdict,
    /// Job ID, as used in events, in crash reports and by the worker. Unique within the bulkhead. `None` if the job
    /// was rejected.
    pub job: Option<JobId>,
    /// The bulkhead that served or rejected the job.
    pub bulkhead: String,
    /// Number of times the job was dispatched to a worker.
    pub attempts: u32,
    /// Time the job spent waiting for a permit.
    pub queued: Duration,
    /// Total time the job spent in workers.
    pub ran: Duration,
    /// PID of the last worker to which the job was dispatched, in the supervisor's PID namespace.
    pub worker_pid: Option<u32>,
    /// True if resubmitting the job is safe and may succeed.
    pub retryable: bool,
    /// Minimum time to wait before resubmitting the job.
    pub retry_after: Option<Duration>,
    /// Time limit that applied to the job, after clamping to the bulkhead's `deadline_max`.
    pub deadline: Duration,
    /// Maximum run time of each attempt, measured from dispatch. `None` if there was no limit.
    pub run_limit: Option<Duration>,
    /// Exit status of the program that ran the job, for a bulkhead with `exec`. `None` if the program did not exit, or
    /// if the outcome is neither `ok` nor `failed`.
    pub status: Option<i32>,
    /// ID of the report on the crash that ended the job, or on a job that was still running at its deadline; `bulkhead
    /// crashes ID` shows the report. `None` if there is no such report. If too many crashes happen at once, some are
    /// counted but not reported.
    pub report: Option<String>,
}

impl fmt::Display for Outcome {
    /// Writes a human-readable line, such as `crashed (signal): killed by SIGSEGV`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.verdict.name())?;
        if let Some(reason) = self.verdict.reason() {
            write!(f, " ({reason})")?;
        }
        if let Some(message) = self.verdict.message() {
            write!(f, ": {message}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reject_reasons_have_unique_codes_and_names() {
        for reason in RejectReason::ALL {
            assert_eq!(RejectReason::from_code(reason.code()), Some(reason));
        }
        for reason in CrashReason::ALL {
            assert_eq!(CrashReason::from_code(reason.code()), Some(reason));
        }
        let mut names: Vec<_> = RejectReason::ALL.iter().map(|r| r.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), RejectReason::ALL.len());
    }

    #[test]
    fn verdicts_map_to_http_status_and_exit_code() {
        use RejectReason as R;
        let rows = [
            (R::Invalid, 400, 65, false),
            (R::TooLarge, 413, 65, false),
            (R::NotFound, 404, 66, false),
            (R::Unauthenticated, 401, 77, false),
            (R::Forbidden, 403, 77, false),
            (R::RateLimited, 429, 75, true),
            (R::TenantQuota, 429, 75, true),
            (R::Backpressure, 429, 75, true),
            (R::QueueFull, 503, 75, true),
            (R::QueueTimeout, 503, 75, true),
            (R::Shed, 503, 75, true),
            (R::Evicted, 503, 75, true),
            (R::CircuitOpen, 503, 75, true),
            (R::Draining, 503, 75, true),
            (R::Unavailable, 503, 75, true),
            (R::Overloaded, 503, 75, true),
            (R::Quarantined, 422, 65, false),
        ];
        assert_eq!(rows.len(), R::ALL.len());
        for (reason, http, exit, retryable) in rows {
            let verdict = Verdict::rejected(reason);
            assert_eq!(verdict.http_status(), http, "{reason}");
            assert_eq!(verdict.exit_code(), exit, "{reason}");
            assert_eq!(verdict.is_retryable(false), retryable, "{reason}");
            assert_eq!(verdict.executed(), Executed::No, "{reason}");
        }
        let crashed =
            Verdict::Crashed { reason: CrashReason::Signal, status: Some(11), message: String::new() };
        assert_eq!((crashed.http_status(), crashed.exit_code()), (502, 70));
        assert!(crashed.is_retryable(true) && !crashed.is_retryable(false));
        assert_eq!(Verdict::DeadlineRunning.exit_code(), 124);
        assert!(Verdict::DeadlineQueued.is_retryable(false));
        assert_eq!(Verdict::Cancelled { executed: Executed::Yes }.exit_code(), 130);
    }
}
