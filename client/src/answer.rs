//! What comes back of a job, and what can go wrong.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bulkhead_shared::client_protocol::OutcomeMessage;
use bulkhead_shared::{Executed, Outcome, Verdict};

use crate::mapped::MappedResult;
use crate::served::Served;

/// How far a job is.
#[derive(Clone, Debug, PartialEq)]
pub struct Progress {
    /// From 0 to 1.
    pub fraction: f32,
    /// A few words of the handler's.
    pub text: String,
}

/// The outcome `ok`, and the result.
#[derive(Clone)]
pub struct Reply {
    pub(crate) payload: Vec<u8>,
    pub(crate) served: Served,
    pub(crate) mapped: Option<Arc<MappedResult>>,
}

impl fmt::Debug for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reply")
            .field("payload", &self.payload)
            .field("outcome", self.outcome())
            .field("mapped", &self.mapped)
            .finish()
    }
}

impl PartialEq for Reply {
    fn eq(&self, other: &Self) -> bool {
        let same_place = |a: &Option<Arc<MappedResult>>, b: &Option<Arc<MappedResult>>| match (a, b) {
            (None, None) => true,
            (Some(a), Some(b)) => Arc::ptr_eq(a, b),
            _ => false,
        };
        self.payload == other.payload
            && self.outcome() == other.outcome()
            && same_place(&self.mapped, &other.mapped)
    }
}

impl Eq for Reply {}

impl Reply {
    /// The result's bytes.
    pub fn payload(&self) -> &[u8] {
        &self.payload
    }

    /// The result's bytes, to keep.
    pub fn into_payload(self) -> Vec<u8> {
        self.payload
    }

    /// The result where it stands, if [`Job::map_result`](crate::Job::map_result) asked for that and it is in a memory
    /// file; then [`Reply::payload`] is empty.
    pub fn mapped(&self) -> Option<&MappedResult> {
        self.mapped.as_deref()
    }

    /// The bulkhead that served the job, how long it took, and the like.
    pub fn outcome(&self) -> &Outcome {
        self.served.outcome()
    }
}

/// The [`Outcome`] of a job that failed, and the payload that came along: see [`JobError::payload`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    outcome: Outcome,
    payload: Vec<u8>,
}

impl std::ops::Deref for Failure {
    type Target = Outcome;

    fn deref(&self) -> &Outcome {
        &self.outcome
    }
}

/// Why there is no result. Each but the last carries the whole [`Outcome`].
#[derive(Clone, PartialEq, Eq)]
pub enum JobError {
    /// The handler said that it cannot.
    Failed(Box<Failure>),
    /// The job was not taken; it did not run.
    Rejected(Box<Outcome>),
    /// The deadline passed.
    DeadlineExceeded(Box<Outcome>),
    /// The worker died with the job in its hands.
    Crashed(Box<Outcome>),
    /// It was cancelled.
    Cancelled(Box<Outcome>),
    /// The supervisor went away, or was not there, or said what this client does not know.
    Disconnected {
        /// Whether the job may have run.
        executed: Executed,
        /// What happened, for people.
        message: String,
    },
}

impl JobError {
    /// The connection ended while the job was under way.
    pub(crate) fn lost(executed: Executed, why: &str) -> Self {
        let advice = match executed {
            Executed::No => "the job was not sent: send it again",
            _ => "whether the job ran is unknown: send it again only if it may run twice",
        };
        let message = format!("the connection to the supervisor was lost ({why}); {advice}");
        Self::Disconnected { executed, message }
    }

    /// The job is done, and its result was read too late.
    pub(crate) fn result_lost() -> Self {
        let message = "the job is done, and its result was taken back before it was read: this program was stopped for \
                       many seconds; send the job again only if it may run twice";
        Self::Disconnected { executed: Executed::Yes, message: message.to_owned() }
    }

    /// The supervisor told of an end that this version has no word for.
    pub(crate) fn unintelligible(message: &OutcomeMessage<'_>) -> Self {
        let executed = Executed::from_code(message.executed).unwrap_or(Executed::Unknown);
        let OutcomeMessage { outcome, reason, message: said, .. } = message;
        let message = format!(
            "the supervisor told of an outcome that this client does not know \
             (outcome {outcome}, reason {reason}: {said}); update this program"
        );
        Self::Disconnected { executed, message }
    }

    /// The outcome, or `ok`.
    pub(crate) fn from_outcome(outcome: Box<Outcome>, payload: Vec<u8>) -> Result<Reply, Self> {
        match outcome.verdict {
            Verdict::Ok => Ok(Reply { payload, served: outcome.into(), mapped: None }),
            Verdict::Failed(_) => Err(Self::Failed(Box::new(Failure { outcome: *outcome, payload }))),
            Verdict::Rejected { .. } => Err(Self::Rejected(outcome)),
            Verdict::DeadlineQueued | Verdict::DeadlineRunning => Err(Self::DeadlineExceeded(outcome)),
            Verdict::Crashed { .. } => Err(Self::Crashed(outcome)),
            Verdict::Cancelled { .. } => Err(Self::Cancelled(outcome)),
        }
    }

    /// The outcome that the supervisor told, if it did.
    pub fn outcome(&self) -> Option<&Outcome> {
        match self {
            Self::Failed(failure) => Some(failure),
            Self::Rejected(outcome)
            | Self::DeadlineExceeded(outcome)
            | Self::Crashed(outcome)
            | Self::Cancelled(outcome) => Some(outcome),
            Self::Disconnected { .. } => None,
        }
    }

    /// Returns the payload of a failure: what the handler sent along, or the standard output of a program, of which the
    /// first 64 KiB arrive. Empty for all else.
    pub fn payload(&self) -> &[u8] {
        if let Self::Failed(failure) = self { &failure.payload } else { &[] }
    }

    /// Whether the handler began.
    pub fn executed(&self) -> Executed {
        match self {
            Self::Disconnected { executed, .. } => *executed,
            _ => self.outcome().map_or(Executed::Unknown, |outcome| outcome.verdict.executed()),
        }
    }

    /// Whether the same job may be sent again and end otherwise.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Disconnected { executed, .. } => *executed == Executed::No,
            _ => self.outcome().is_some_and(|outcome| outcome.retryable),
        }
    }

    /// How long to wait before that, if the supervisor said.
    pub fn retry_after(&self) -> Option<Duration> {
        self.outcome().and_then(|outcome| outcome.retry_after)
    }

    /// The exit code that the `bulkhead` command gives it.
    pub fn exit_code(&self) -> u8 {
        self.outcome().map_or(69, |outcome| outcome.verdict.exit_code())
    }
}

impl fmt::Display for JobError {
    /// One line for people: what happened, and what to do.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Disconnected { message, .. } => f.write_str(message),
            Self::Failed(failure) => failure.outcome.fmt(f),
            Self::Cancelled(outcome) => outcome.fmt(f),
            Self::Rejected(outcome) => match outcome.retry_after {
                Some(wait) if outcome.retryable => {
                    write!(f, "{outcome}; try again after {} ms", wait.as_micros().div_ceil(1000))
                }
                _ => outcome.fmt(f),
            },
            Self::DeadlineExceeded(outcome) => {
                let limit_ms = outcome.deadline.as_millis();
                if let Some(limit) = outcome.run_limit.filter(|limit| outcome.ran >= *limit) {
                    let limit_ms = limit.as_millis();
                    return write!(
                        f,
                        "{outcome}: it ran for {limit_ms} ms, its run limit; allow more, or send less"
                    );
                }
                write!(f, "{outcome}: not within {limit_ms} ms; allow more time, or send less at once")
            }
            Self::Crashed(outcome) => {
                let advice = match outcome.retryable {
                    true => "it may be sent again",
                    false => "whether the job ran is unknown: send it again only if it may run twice",
                };
                write!(f, "{outcome}; {advice}")?;
                outcome.report.iter().try_for_each(|id| write!(f, "; see `bulkhead crashes {id}`"))
            }
        }
    }
}

impl std::error::Error for JobError {}

bulkhead_shared::debug_by_display!(JobError);
