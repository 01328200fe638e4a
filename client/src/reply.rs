//! Defines the replies, progress reports and errors of jobs. An error tells whether the job began and whether a retry
//! is safe. `requests::frames` creates most of them from the supervisor's frames. `job` decides whether a job is
//! retried.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bulkhead_shared::client_protocol::OutcomeMessage;
use bulkhead_shared::{CrashReason, Executed, Outcome, Verdict};

use crate::mapped::MappedResult;
use crate::success::SuccessRecord;

/// Maximum time after a job's deadline to wait for the outcome. The supervisor usually reports a missed deadline at
/// once. The margin leaves time for a supervisor that is only slow, and for results that arrive late.
pub(crate) const OUTCOME_MARGIN: Duration = Duration::from_secs(10);

/// A progress report from a job.
#[derive(Clone, Debug, PartialEq)]
pub struct Progress {
    /// Completed fraction, from 0 to 1.
    pub fraction: f32,
    /// Short text from the handler.
    pub text: String,
}

/// Result and outcome of a job that ended as `ok`.
#[derive(Clone)]
pub struct Reply {
    pub(crate) payload: Vec<u8>,
    pub(crate) success: SuccessRecord,
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
    /// Returns the job's result, which is empty if the result is [mapped](Self::mapped).
    pub fn payload(&self) -> &[u8] {
        &self.payload
    }

    /// Returns the job's result as an owned buffer, which is empty if the result is [mapped](Self::mapped).
    pub fn into_payload(self) -> Vec<u8> {
        self.payload
    }

    /// Returns a result that is still in the memory file. Returns `None` unless
    /// [`Job::map_result`](crate::Job::map_result) was called and the worker wrote the result to a memory
    /// file. If the result is mapped, [`Reply::payload`] is empty.
    pub fn mapped(&self) -> Option<&MappedResult> {
        self.mapped.as_deref()
    }

    /// Returns the outcome, which contains the serving bulkhead, the queue time, the run time and other details.
    pub fn outcome(&self) -> &Outcome {
        self.success.outcome()
    }
}

/// The [`Outcome`] and the error payload of a failed job; see [`JobError::payload`].
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

/// Error returned for a job that has no result. All variants except `Disconnected` contain the complete [`Outcome`].
#[derive(Clone, PartialEq, Eq)]
pub enum JobError {
    /// The handler reported an error.
    Failed(Box<Failure>),
    /// The job was rejected and did not run.
    Rejected(Box<Outcome>),
    /// The deadline passed before the job ended.
    DeadlineExceeded(Box<Outcome>),
    /// The worker to which the job had been dispatched died.
    Crashed(Box<Outcome>),
    /// The job was cancelled.
    Cancelled(Box<Outcome>),
    /// There is no connection to the supervisor, the connection was lost, or this client could not read the outcome
    /// or the result. Also returned if the supervisor has sent no outcome 10 s after the job's deadline.
    Disconnected {
        /// Whether the handler began the job.
        executed: Executed,
        /// Human-readable description of the problem.
        message: String,
    },
}

impl JobError {
    /// Returns the error for a job whose connection was lost while the job was pending.
    pub(crate) fn lost(executed: Executed, reason: &str) -> Self {
        let advice = match executed {
            Executed::No => "the job was not sent: send the job again",
            _ => "the job may have run: send the job again only if it can safely run twice",
        };
        let message = format!("the connection to the supervisor was lost ({reason}); {advice}");
        Self::Disconnected { executed, message }
    }

    /// Returns the error for a job that still has no outcome long after its deadline.
    pub(crate) fn unanswered() -> Self {
        let message = format!(
            "no outcome within {} s after the deadline: the supervisor does not respond; the job may have run: \
             send the job again only if it can safely run twice",
            OUTCOME_MARGIN.as_secs()
        );
        Self::Disconnected { executed: Executed::Unknown, message }
    }

    /// Returns the error for a job that waited too long for a connection.
    pub(crate) fn unreachable(executed: Executed, problem: &str) -> Self {
        let advice = match executed {
            Executed::No => {
                "the job was not sent: check that the supervisor is running, then send the job again"
            }
            _ => {
                "the job may have run: check that the supervisor is running, then send the job again only if \
                 it can safely run twice"
            }
        };
        Self::Disconnected { executed, message: format!("{problem}; {advice}") }
    }

    /// Adjusts the error of a job that was sent again after its connection was lost. The job may have run after it
    /// was sent the first time, even if the supervisor reports that it did not run.
    pub(crate) fn after_loss(self) -> Self {
        if self.executed() != Executed::No {
            return self;
        }
        match self {
            Self::Rejected(outcome) | Self::DeadlineExceeded(outcome) => {
                let message = format!(
                    "the connection to the supervisor was lost while the job was in progress; the job was sent \
                     again and ended as {outcome}"
                );
                let verdict = Verdict::Crashed { reason: CrashReason::Stopped, status: None, message };
                Self::Crashed(Box::new(Outcome { verdict, ..*outcome }))
            }
            Self::Cancelled(outcome) => {
                let verdict = Verdict::Cancelled { executed: Executed::Unknown };
                Self::Cancelled(Box::new(Outcome { verdict, ..*outcome }))
            }
            Self::Disconnected { message, .. } => Self::Disconnected { executed: Executed::Unknown, message },
            other => other,
        }
    }

    /// Returns the error for a result that was revoked before the client had read it. The job itself succeeded.
    pub(crate) fn result_revoked() -> Self {
        let message = "the job succeeded, but the supervisor revoked the result because this program did not \
                       read it for several seconds; send the job again only if it can safely run twice";
        Self::Disconnected { executed: Executed::Yes, message: message.to_owned() }
    }

    /// Returns the error for an outcome whose code this version does not know.
    pub(crate) fn unknown_outcome(message: &OutcomeMessage<'_>) -> Self {
        let executed = Executed::from_code(message.executed).unwrap_or(Executed::Unknown);
        let OutcomeMessage { outcome, reason, message: said, .. } = message;
        let message = format!(
            "the supervisor reported an outcome that this client does not know (outcome {outcome}, reason \
             {reason}: {said}); update this program"
        );
        Self::Disconnected { executed, message }
    }

    /// Converts an outcome to a result. `payload` is the result, or the payload of a failure. Intended for programs
    /// that receive outcomes without a [`Client`](crate::Client).
    pub fn from_outcome(outcome: Box<Outcome>, payload: Vec<u8>) -> Result<Reply, Self> {
        match outcome.verdict {
            Verdict::Ok => Ok(Reply { payload, success: outcome.into(), mapped: None }),
            Verdict::Failed(_) => Err(Self::Failed(Box::new(Failure { outcome: *outcome, payload }))),
            Verdict::Rejected { .. } => Err(Self::Rejected(outcome)),
            Verdict::DeadlineQueued | Verdict::DeadlineRunning => Err(Self::DeadlineExceeded(outcome)),
            Verdict::Crashed { .. } => Err(Self::Crashed(outcome)),
            Verdict::Cancelled { .. } => Err(Self::Cancelled(outcome)),
        }
    }

    /// Returns the outcome of the job, or `None` if the client did not receive one.
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

    /// Returns the error payload of a failed job, which is either data from the handler or the first 64 KiB of a
    /// program's standard output. Empty for all other errors.
    pub fn payload(&self) -> &[u8] {
        if let Self::Failed(failure) = self { &failure.payload } else { &[] }
    }

    /// Returns whether the handler began the job.
    pub fn executed(&self) -> Executed {
        match self {
            Self::Disconnected { executed, .. } => *executed,
            _ => self.outcome().map_or(Executed::Unknown, |outcome| outcome.verdict.executed()),
        }
    }

    /// Returns true if sending the job again is safe and can succeed.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Disconnected { executed, .. } => *executed == Executed::No,
            _ => self.outcome().is_some_and(|outcome| outcome.retryable),
        }
    }

    /// Returns the minimum time to wait before a retry, if the supervisor has set one.
    pub fn retry_after(&self) -> Option<Duration> {
        self.outcome().and_then(|outcome| outcome.retry_after)
    }

    /// Returns the exit code that the `bulkhead` command uses for this error.
    pub fn exit_code(&self) -> u8 {
        self.outcome().map_or(69, |outcome| outcome.verdict.exit_code())
    }
}

impl fmt::Display for JobError {
    /// Writes a human-readable line that describes the problem and suggests an action.
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
                    write!(
                        f,
                        "{outcome}: the job reached the run limit of {limit_ms} ms; raise the run limit, or \
                         give the job less work"
                    )?;
                } else if outcome.run_limit.is_some() && has_ended_before_deadline(outcome) {
                    write!(
                        f,
                        "{outcome}: the run limit expired several times before a worker began the job; raise the \
                         run limit"
                    )?;
                } else {
                    write!(
                        f,
                        "{outcome}: the job did not finish within {limit_ms} ms; raise the deadline, or \
                         send fewer jobs concurrently"
                    )?;
                }
                write_report(f, outcome)
            }
            Self::Crashed(outcome) => {
                let advice = match outcome.retryable {
                    true => "the job can be sent again",
                    false => "the job may have run: send the job again only if it can safely run twice",
                };
                write!(f, "{outcome}; {advice}")?;
                write_report(f, outcome)
            }
        }
    }
}

/// Returns true if a job that no worker began ended long before its deadline.
fn has_ended_before_deadline(outcome: &Outcome) -> bool {
    outcome.verdict == Verdict::DeadlineQueued && outcome.queued < outcome.deadline / 2
}

fn write_report(f: &mut fmt::Formatter<'_>, outcome: &Outcome) -> fmt::Result {
    outcome.report.iter().try_for_each(|id| write!(f, "; see `bulkhead crashes {id}`"))
}

impl std::error::Error for JobError {}

bulkhead_shared::debug_by_display!(JobError);
