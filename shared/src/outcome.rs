//! What became of a job: the one table of outcomes and reasons that the wire, the command line, HTTP
//! and the metrics share. It says what happened; it never decides it.

use std::fmt;
use std::time::Duration;

use crate::JobId;
use crate::vocabulary::codes;

codes! {
    /// Whether the handler began to work on the job.
    Executed {
        /// Certainly not: it is safe to send the job again.
        No = 0 "no",
        /// It did.
        Yes = 1 "yes",
        /// The worker died with the job in its hands; how far it came cannot be told.
        Unknown = 2 "unknown",
    }
}

codes! {
    /// The party that a handler blames for its failure.
    #[derive(Default)]
    Fault {
        /// The job itself was wrong; it says nothing about the health of the bulkhead.
        Caller = 1 "caller",
        /// The code or service behind the bulkhead failed.
        #[default]
        Dependency = 2 "dependency",
    }
}

/// What a handler says when it cannot do its job.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HandlerFailure {
    /// A short word for programs.
    pub code: String,
    /// A sentence for people.
    pub message: String,
    /// Whether the same job may succeed later.
    pub retryable: bool,
    /// The party to blame.
    pub fault: Fault,
}

/// The code of a [`HandlerFailure`] whose result was larger than the bulkhead's `max_result`.
pub const RESULT_TOO_LARGE: &str = "result_too_large";

codes! {
    /// Why a job was not taken. None of these ran.
    RejectReason {
        /// The request makes no sense.
        Invalid = 1 "invalid",
        /// The payload is larger than the bulkhead's `max_payload`.
        TooLarge = 2 "too_large",
        /// There is no such bulkhead.
        NotFound = 3 "not_found",
        /// The client cannot be identified.
        Unauthenticated = 4 "unauthenticated",
        /// This client may not.
        Forbidden = 5 "forbidden",
        /// More than the agreed rate.
        RateLimited = 6 "rate_limited",
        /// More than the tenant's share.
        TenantQuota = 7 "tenant_quota",
        /// The queue is filling up.
        Backpressure = 8 "backpressure",
        /// The queue is full.
        QueueFull = 9 "queue_full",
        /// The job waited for its `queue_timeout`.
        QueueTimeout = 10 "queue_timeout",
        /// A more important job needed the place.
        Shed = 11 "shed",
        /// A newer job needed the place.
        Evicted = 12 "evicted",
        /// The breaker is open.
        CircuitOpen = 13 "circuit_open",
        /// The bulkhead, or the supervisor, takes no more jobs.
        Draining = 14 "draining",
        /// No worker runs, and none will in time.
        Unavailable = 15 "unavailable",
        /// The supervisor holds as many bytes or clients as it may.
        Overloaded = 16 "overloaded",
        /// This payload has killed too many workers.
        Quarantined = 17 "quarantined",
    }
}

impl RejectReason {
    /// Whether the same job may be taken later.
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

    /// Whether it is the caller's own doing, and says nothing of how well the bulkhead serves.
    pub const fn is_callers(self) -> bool {
        match self {
            Self::Invalid | Self::TooLarge | Self::NotFound | Self::Unauthenticated | Self::Forbidden => true,
            Self::RateLimited | Self::TenantQuota | Self::Quarantined => true,
            Self::Backpressure | Self::QueueFull | Self::QueueTimeout | Self::Shed | Self::Evicted => false,
            Self::CircuitOpen | Self::Draining | Self::Unavailable | Self::Overloaded => false,
        }
    }

    /// The HTTP status of the contract's table.
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

    /// The exit code of the `bulkhead` command.
    pub const fn exit_code(self) -> u8 {
        match self {
            Self::Invalid | Self::TooLarge | Self::Quarantined => 65,
            Self::NotFound => 66,
            Self::Unauthenticated | Self::Forbidden => 77,
            _ => 75,
        }
    }
}

codes! {
    /// How a worker, or a program run by one, ended while it held a job.
    CrashReason {
        /// It exited with a status, whatever the status.
        Exit = 1 "exit",
        /// A signal that the supervisor did not send killed it.
        Signal = 2 "signal",
        /// The kernel killed it for its memory.
        Oom = 3 "oom",
        /// It made a system call that the sandbox forbids.
        Violation = 4 "violation",
        /// It broke the protocol.
        Protocol = 5 "protocol",
        /// It no longer answered heartbeats.
        Hung = 6 "hung",
        /// The supervisor's own stop outran it.
        Stopped = 7 "stopped",
        /// Another job brought the worker down.
        Collateral = 8 "collateral",
    }
}

/// How a job ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The handler answered; the result travels beside the outcome.
    Ok,
    /// The handler said that it cannot.
    Failed(HandlerFailure),
    /// The job was not taken.
    Rejected {
        /// Why not.
        reason: RejectReason,
        /// A sentence for people, possibly empty.
        message: String,
    },
    /// The deadline passed before the job ran.
    DeadlineQueued,
    /// The deadline passed while the job ran.
    DeadlineRunning,
    /// The worker died with the job in its hands.
    Crashed {
        /// How.
        reason: CrashReason,
        /// The exit code (for [`CrashReason::Exit`]) or the signal's number
        /// (for [`CrashReason::Signal`]), where known.
        status: Option<i32>,
        /// A sentence for people, possibly empty: "killed by SIGSEGV".
        message: String,
    },
    /// The client asked for that, or went away.
    Cancelled {
        /// Whether the handler had begun.
        executed: Executed,
    },
}

impl Verdict {
    /// A rejection that needs no further words.
    pub const fn rejected(reason: RejectReason) -> Self {
        Self::Rejected { reason, message: String::new() }
    }

    /// The outcome's name: the first column of the contract's table.
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

    /// The reason's name: the second column; `None` for `ok` and `cancelled`.
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

    /// The sentence for people that goes with it, if there is one.
    pub fn message(&self) -> Option<&str> {
        let text = match self {
            Self::Failed(failure) => &failure.message,
            Self::Rejected { message, .. } | Self::Crashed { message, .. } => message,
            _ => return None,
        };
        (!text.is_empty()).then_some(text)
    }

    /// Whether the handler began.
    pub const fn executed(&self) -> Executed {
        match self {
            Self::Ok | Self::Failed(_) | Self::DeadlineRunning => Executed::Yes,
            Self::Rejected { .. } | Self::DeadlineQueued => Executed::No,
            Self::Crashed { .. } => Executed::Unknown,
            Self::Cancelled { executed } => *executed,
        }
    }

    /// Whether the same job may be sent again, given whether its sender called it idempotent.
    pub const fn is_retryable(&self, idempotent: bool) -> bool {
        match self {
            Self::Ok | Self::Cancelled { .. } => false,
            Self::Failed(failure) => failure.retryable,
            Self::Rejected { reason, .. } => reason.is_retryable(),
            Self::DeadlineQueued => true,
            Self::DeadlineRunning | Self::Crashed { .. } => idempotent,
        }
    }

    /// The HTTP status of the contract's table.
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

    /// The exit code of the `bulkhead` command.
    pub const fn exit_code(&self) -> u8 {
        match self {
            Self::Ok => 0,
            Self::Failed(_) => 1,
            Self::Rejected { reason, .. } => reason.exit_code(),
            Self::DeadlineQueued | Self::DeadlineRunning => 124,
            Self::Crashed { .. } => 70,
            Self::Cancelled { .. } => 130,
        }
    }
}

/// What became of a job, with everything a caller needs to decide what to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// How it ended.
    pub verdict: Verdict,
    /// The number under which events, crash reports and the worker know it, in that bulkhead; `None` if it was not
    /// taken.
    pub job: Option<JobId>,
    /// The bulkhead that served it, or was asked to.
    pub bulkhead: String,
    /// How often a worker was given the job.
    pub attempts: u32,
    /// How long it waited for a permit.
    pub queued: Duration,
    /// How long a worker had it.
    pub ran: Duration,
    /// The process that ran it last, as the supervisor sees it.
    pub worker_pid: Option<u32>,
    /// Whether the same job may be sent again and end otherwise.
    pub retryable: bool,
    /// How long to wait before that.
    pub retry_after: Option<Duration>,
    /// The time limit that applied, after clamping to `deadline_max`.
    pub deadline: Duration,
    /// The longest run of each attempt, from its dispatch, if there was such a limit.
    pub run_limit: Option<Duration>,
    /// Exit status of the program that ran the job (`exec`), if it exited and the job ended `ok` or `failed`.
    pub status: Option<i32>,
    /// The id of the crash report about the death that ended the job: `bulkhead crashes ID` shows it. `None` if the job
    /// did not crash, or if the crash was only counted, because many came at once.
    pub report: Option<String>,
}

impl fmt::Display for Outcome {
    /// One line for people: `crashed (signal): killed by SIGSEGV`.
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
    fn codes_and_names_are_unique_and_survive_the_round_trip() {
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
    fn the_table_of_the_contract() {
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
