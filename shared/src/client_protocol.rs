//! The messages between a client and the supervisor, version 1: frozen structures, one per kind of
//! frame. What comes later goes into extensions ([`crate::codec`]).

use std::time::Duration;

use bincode::{BorrowDecode, Encode};

use crate::flat::flat;
use crate::outcome::{CrashReason, Executed, Fault, HandlerFailure, Outcome, RejectReason, Verdict};

/// The version of both protocols that this crate speaks.
pub const PROTOCOL_VERSION: u16 = 1;

/// The role of the peer that says hello.
pub mod role {
    /// A client: submits jobs.
    pub const CLIENT: u8 = 1;
    /// A worker: runs them.
    pub const WORKER: u8 = 2;
}

/// What a supervisor can do beyond the frozen structures; their sum is in
/// [`ClientWelcome::capabilities`].
pub mod capability {
    /// Takes [`RUN_LIMIT`](crate::codec::tag::RUN_LIMIT) on a submit.
    pub const RUN_LIMIT: u64 = 1;

    /// Gives [leases](crate::memory_files) to clients that ask for them.
    pub const MEMORY_FILES: u64 = 2;

    /// Takes [`UNLESS_BEGUN`](crate::codec::tag::UNLESS_BEGUN) on a cancellation.
    pub const CANCEL_UNLESS_BEGUN: u64 = 4;
}

/// The value of a [`RUN_LIMIT`](crate::codec::tag::RUN_LIMIT); `None` if the bytes are no such.
///
/// ```
/// use std::time::Duration;
/// # use bulkhead_shared::client_protocol::{read_run_limit, run_limit_bytes};
/// let bytes = run_limit_bytes(Duration::from_millis(200));
/// assert_eq!(read_run_limit(&bytes), Some(Duration::from_millis(200)));
/// assert_eq!(read_run_limit(&[0; 8]), None);
/// ```
pub fn read_run_limit(bytes: &[u8]) -> Option<Duration> {
    let limit = u64::from_le_bytes(bytes.try_into().ok()?);
    (limit > 0).then(|| Duration::from_micros(limit))
}

/// What [`read_run_limit`] reads; at least a microsecond.
pub fn run_limit_bytes(limit: Duration) -> [u8; 8] {
    micros(limit).max(1).to_le_bytes()
}

/// [`HELLO`](crate::frame::kind::HELLO): the first frame of a client; its number is
/// [`MAGIC`](crate::frame::MAGIC).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub struct Hello<'a> {
    /// The oldest protocol version spoken.
    pub version_min: u16,
    /// The newest one.
    pub version_max: u16,
    /// One of [`role`].
    pub role: u8,
    /// The largest frame accepted, in bytes behind the header.
    pub frame_bytes_max: u32,
    /// A sum of capabilities; none is defined for clients, [`crate::worker_protocol::capability`] for
    /// workers.
    pub capabilities: u64,
    /// The library that speaks.
    pub name: &'a str,
    /// Its version.
    pub version: &'a str,
}

/// [`CLIENT_WELCOME`](crate::frame::kind::CLIENT_WELCOME): jobs may follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub struct ClientWelcome<'a> {
    /// The version that both will speak.
    pub version: u16,
    /// The largest frame accepted, in bytes behind the header.
    pub frame_bytes_max: u32,
    /// A sum of [`capability`].
    pub capabilities: u64,
    /// The version of the supervisor.
    pub server_version: &'a str,
}

/// [`REFUSED`](crate::frame::kind::REFUSED): the connection ends here, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub struct Refused<'a> {
    /// The code of a [`RejectReason`].
    pub reason: u8,
    /// A sentence that a person can act on.
    pub message: &'a str,
}

/// [`SUBMIT`](crate::frame::kind::SUBMIT): a job. The frame's number is the client's own and comes
/// back in the outcome; the payload follows the metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Submit<'a> {
    /// The bulkhead's name.
    pub bulkhead: &'a str,
    /// What the handler is to do; may be empty.
    pub operation: &'a str,
    /// The tenant; may be empty.
    pub tenant: &'a str,
    /// The time limit in microseconds from receipt; 0 for the bulkhead's own.
    pub deadline_us: u64,
    /// The code of a [`crate::Priority`].
    pub priority: u8,
    /// 1 if the job may safely run twice, else 0.
    pub idempotent: u8,
    /// What the job counts against a rate limit; 0 counts as 1.
    pub cost: u32,
}

flat!(Submit: [bulkhead, operation, tenant], [deadline_us: u64, priority: u8, idempotent: u8, cost: u32], []);

/// [`PROGRESS`](crate::frame::kind::PROGRESS): how far a running job is.
#[derive(Clone, Copy, Debug, PartialEq, Encode, BorrowDecode)]
pub struct Progress<'a> {
    /// From 0 to 1.
    pub fraction: f32,
    /// A few words, possibly none.
    pub text: &'a str,
}

/// [`OUTCOME`](crate::frame::kind::OUTCOME): the outcome of the job with the frame's number. The payload is the result
/// of an `ok` job, or the handler's payload of a `failed` job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OutcomeMessage<'a> {
    /// One of [`outcome_code`].
    pub outcome: u8,
    /// The code of a [`RejectReason`] or [`CrashReason`]; for a deadline 1 (queued) or 2 (running).
    pub reason: u8,
    /// 0 no, 1 yes, 2 unknown.
    pub executed: u8,
    /// 1 if the same job may be sent again.
    pub retryable: u8,
    /// For `failed`: 1 the caller's fault, 2 the dependency's.
    pub fault: u8,
    /// How often a worker was given the job.
    pub attempts: u32,
    /// Microseconds that the job waited for a permit.
    pub queued_us: u64,
    /// Microseconds that a worker had it.
    pub ran_us: u64,
    /// The time limit that applied, in microseconds.
    pub deadline_us: u64,
    /// The process that ran it; 0 if none did.
    pub worker_pid: u32,
    /// Whether `retry_after_us` means anything.
    pub has_retry_after: u8,
    /// Microseconds to wait before sending it again.
    pub retry_after_us: u64,
    /// Whether `status` means anything.
    pub has_status: u8,
    /// The exit code or signal number of a crash, or the exit status of a program whose job ended `ok` or `failed`.
    pub status: i32,
    /// The bulkhead that served the job, or was asked to.
    pub bulkhead: &'a str,
    /// The handler's code, for `failed`.
    pub code: &'a str,
    /// A sentence for people, possibly empty.
    pub message: &'a str,
}

flat!(OutcomeMessage: [], [
    outcome: u8, reason: u8, executed: u8, retryable: u8, fault: u8, attempts: u32, queued_us: u64, ran_us: u64,
    deadline_us: u64, worker_pid: u32, has_retry_after: u8, retry_after_us: u64, has_status: u8, status: i32
], [bulkhead, code, message]);

/// The numbers of [`OutcomeMessage::outcome`].
#[expect(missing_docs, reason = "each is the outcome of that name")]
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
    // In 64 bits: this is done several times for every job.
    duration.as_secs().saturating_mul(1_000_000).saturating_add(duration.subsec_micros().into())
}

impl<'a> OutcomeMessage<'a> {
    /// The message that tells of `outcome`.
    pub fn from_outcome(outcome: &'a Outcome) -> Self {
        Self {
            retryable: outcome.retryable.into(),
            attempts: outcome.attempts,
            worker_pid: outcome.worker_pid.unwrap_or(0),
            ..Self::of_verdict(&outcome.verdict, &outcome.bulkhead)
        }
        .with_times(outcome.queued, outcome.ran, outcome.deadline, outcome.retry_after)
        .with_status(outcome.status)
    }

    /// Adds the exit status of the program that ran the job, if there is one.
    #[must_use]
    pub fn with_status(self, status: Option<i32>) -> Self {
        match status {
            Some(status) => Self { has_status: 1, status, ..self },
            None => self,
        }
    }

    /// What a verdict says by itself. No time has passed, and no worker had the job.
    pub fn of_verdict(verdict: &'a Verdict, bulkhead: &'a str) -> Self {
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

    /// The same with the times of the job: how long it waited and ran, its limit, and how long to stay away.
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

    /// Converts the message to an outcome, without the extensions (job number, run limit, crash report). `None` if the
    /// message uses a code that this version does not know.
    pub fn to_outcome(self) -> Option<Outcome> {
        self.to_outcome_at(self.bulkhead.to_owned())
    }

    /// The same for a reader that has the bulkhead's name already.
    pub fn to_outcome_at(&self, bulkhead: String) -> Option<Outcome> {
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
    fn every_verdict_survives_the_wire() {
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
