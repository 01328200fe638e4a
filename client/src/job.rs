//! A job on its way: what is asked for, what comes back, and what can go wrong.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bulkhead_shared::client_protocol::OutcomeMessage;
use bulkhead_shared::codec::tag;
use bulkhead_shared::limits::{OPERATION_BYTES_MAX, TENANT_BYTES_MAX};
use bulkhead_shared::{Executed, Outcome, Priority, RejectReason, Verdict};
use tokio::sync::{mpsc, oneshot};

use crate::connection::Client;
use crate::requests::Ticket;

/// Progress reports that wait for a slow reader; later ones are dropped.
pub(crate) const PROGRESS_MAX: usize = 16;

/// Bytes of a bulkhead's name and of a traceparent that are sent at all; the supervisor takes fewer.
const TEXT_BYTES_MAX: usize = 1024;

/// A job that is being put together. Nothing is sent before [`Job::send`] or [`Job::start`].
#[must_use = "a job does nothing before it is sent"]
#[derive(Clone, Debug)]
pub struct Job {
    pub(crate) client: Client,
    pub(crate) bulkhead: String,
    pub(crate) payload: Vec<u8>,
    pub(crate) operation: String,
    pub(crate) tenant: String,
    pub(crate) deadline: Option<Duration>,
    pub(crate) priority: Priority,
    pub(crate) cost: u32,
    pub(crate) is_idempotent: bool,
    pub(crate) traceparent: Option<String>,
}

impl Job {
    pub(crate) fn new(client: Client, bulkhead: String, payload: Vec<u8>) -> Self {
        Self {
            client,
            bulkhead,
            payload,
            operation: String::new(),
            tenant: String::new(),
            deadline: None,
            priority: Priority::Normal,
            cost: 1,
            is_idempotent: false,
            traceparent: None,
        }
    }

    /// What the handler is to do; up to 256 bytes.
    pub fn operation(mut self, name: impl Into<String>) -> Self {
        self.operation = name.into();
        self
    }

    /// The tenant; up to 256 bytes.
    pub fn tenant(mut self, name: impl Into<String>) -> Self {
        self.tenant = name.into();
        self
    }

    /// How long the job may take, from [`Job::send`] to its outcome, queue included. Without it the
    /// bulkhead's own `deadline` applies; what is more than its `deadline_max` is clamped, see
    /// [`Outcome::deadline`].
    ///
    /// The supervisor keeps the time from the job's receipt on; what the client waited for a connection, or
    /// for room on it, is subtracted before.
    pub fn deadline(mut self, limit: Duration) -> Self {
        self.deadline = Some(limit);
        self
    }

    /// How much the job matters.
    pub fn priority(mut self, priority: Priority) -> Self {
        self.priority = priority;
        self
    }

    /// What the job counts against a rate limit.
    pub fn cost(mut self, cost: u32) -> Self {
        self.cost = cost;
        self
    }

    /// Whether the job may safely run twice.
    pub fn idempotent(mut self, is_idempotent: bool) -> Self {
        self.is_idempotent = is_idempotent;
        self
    }

    /// A W3C `traceparent`, handed on to the handler.
    pub fn traceparent(mut self, text: impl Into<String>) -> Self {
        self.traceparent = Some(text.into());
        self
    }

    /// Sends the job and waits for its outcome. Dropping the future cancels the job.
    ///
    /// Errors: every outcome but `ok`, and [`JobError::Disconnected`].
    ///
    /// ```no_run
    /// # async fn example(client: bulkhead_client::Client) {
    /// match client.job("thumbnail", b"...".to_vec()).send().await {
    ///     Ok(reply) => println!("{} bytes", reply.payload().len()),
    ///     Err(error) if error.is_retryable() => println!("again in {:?}: {error}", error.retry_after()),
    ///     Err(error) => println!("{error}"),
    /// }
    /// # }
    /// ```
    pub async fn send(mut self) -> Result<Reply, JobError> {
        self.check()?;
        Client::begin(&mut self, &mut None).await?.await
    }

    /// Sends the job and returns as soon as it is on its way, with a handle for its progress and its outcome.
    /// Dropping the handle cancels the job.
    ///
    /// Errors: those that need no answer from the supervisor.
    ///
    /// ```no_run
    /// # async fn example(client: bulkhead_client::Client) -> Result<(), bulkhead_client::JobError> {
    /// let mut handle = client.job("thumbnail", b"...".to_vec()).start().await?;
    /// while let Some(progress) = handle.progress().await {
    ///     println!("{:.0} % {}", progress.fraction * 100.0, progress.text);
    /// }
    /// let reply = handle.await?;
    /// # drop(reply);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn start(mut self) -> Result<JobHandle, JobError> {
        self.check()?;
        let (sender, progress) = mpsc::channel(PROGRESS_MAX);
        let mut handle = Client::begin(&mut self, &mut Some(sender)).await?;
        handle.progress = Some(progress);
        Ok(handle)
    }

    /// What the supervisor would refuse anyway.
    fn check(&self) -> Result<(), JobError> {
        let too_long = |what: &str, most: usize| {
            let message = format!("the {what}'s name is longer than {most} bytes");
            Err(self.refused(RejectReason::Invalid, message))
        };
        if self.operation.len() > OPERATION_BYTES_MAX {
            return too_long("operation", OPERATION_BYTES_MAX);
        }
        if self.tenant.len() > TENANT_BYTES_MAX {
            return too_long("tenant", TENANT_BYTES_MAX);
        }
        let traceparent = self.traceparent.as_deref().unwrap_or_default();
        for (what, text) in [("bulkhead's name", self.bulkhead.as_str()), ("traceparent", traceparent)] {
            if text.len() > TEXT_BYTES_MAX {
                let message = format!("the {what} is longer than {TEXT_BYTES_MAX} bytes");
                return Err(self.refused(RejectReason::Invalid, message));
            }
        }
        Ok(())
    }

    pub(crate) fn refused(&self, reason: RejectReason, message: String) -> JobError {
        JobError::Rejected(Box::new(self.unsent(Verdict::Rejected { reason, message })))
    }

    /// The whole of the job's deadline went by before there was room to send it.
    pub(crate) fn expired(&self, deadline: Duration) -> JobError {
        let outcome = self.unsent(Verdict::DeadlineQueued);
        JobError::DeadlineExceeded(Box::new(Outcome { queued: deadline, deadline, ..outcome }))
    }

    /// The outcome of a job that the supervisor never saw.
    fn unsent(&self, verdict: Verdict) -> Outcome {
        Outcome {
            job: None,
            bulkhead: self.bulkhead.clone(),
            attempts: 0,
            queued: Duration::ZERO,
            ran: Duration::ZERO,
            worker_pid: None,
            retryable: verdict.is_retryable(self.is_idempotent),
            retry_after: None,
            deadline: self.deadline.unwrap_or_default(),
            verdict,
        }
    }

    pub(crate) fn extensions(&self) -> Option<(u16, &[u8])> {
        self.traceparent.as_ref().map(|text| (tag::TRACEPARENT, text.as_bytes()))
    }
}

/// How far a job is.
#[derive(Clone, Debug, PartialEq)]
pub struct Progress {
    /// From 0 to 1.
    pub fraction: f32,
    /// A few words of the handler's.
    pub text: String,
}

/// A job that is under way. It is a future of its outcome. It needs its [`Client`] no longer.
#[must_use = "dropping it cancels the job"]
#[derive(Debug)]
pub struct JobHandle {
    pub(crate) outcome: oneshot::Receiver<Result<Reply, JobError>>,
    pub(crate) progress: Option<mpsc::Receiver<Progress>>,
    /// Cancels the job when dropped before its outcome has come.
    pub(crate) ticket: Ticket,
}

impl JobHandle {
    /// The next report of progress; `None` when there will be no more, which is when the outcome is there.
    /// Reports that are not taken are dropped beyond a few.
    pub async fn progress(&mut self) -> Option<Progress> {
        self.progress.as_mut()?.recv().await
    }

    /// Asks the supervisor to cancel the job. Its outcome still comes: `cancelled`, or what it was if it had
    /// ended before. A caller that does not want to know drops the handle instead.
    pub fn cancel(&self) {
        self.ticket.cancel();
    }
}

impl Future for JobHandle {
    type Output = Result<Reply, JobError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let result = std::task::ready!(Pin::new(&mut self.outcome).poll(cx));
        self.ticket.disarm();
        // Every way of the connection to end tells its waiters why.
        Poll::Ready(
            result.unwrap_or_else(|_| Err(JobError::lost(Executed::Unknown, "its connection is gone"))),
        )
    }
}

/// The outcome `ok`, and the result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    pub(crate) payload: Vec<u8>,
    pub(crate) outcome: Outcome,
}

impl Reply {
    /// The result's bytes.
    pub fn payload(&self) -> &[u8] {
        &self.payload
    }

    /// The result's bytes, to keep.
    pub fn into_payload(self) -> Vec<u8> {
        self.payload
    }

    /// The bulkhead that served the job, how long it took, and the like.
    pub fn outcome(&self) -> &Outcome {
        &self.outcome
    }
}

/// Why there is no result. Each but the last carries the whole [`Outcome`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobError {
    /// The handler said that it cannot.
    Failed(Box<Outcome>),
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

    /// The supervisor told of an end that this version has no word for.
    pub(crate) fn unintelligible(message: &OutcomeMessage<'_>) -> Self {
        let executed = match message.executed {
            0 => Executed::No,
            1 => Executed::Yes,
            _ => Executed::Unknown,
        };
        let OutcomeMessage { outcome, reason, message: said, .. } = message;
        let message = format!(
            "the supervisor told of an outcome that this client does not know \
             (outcome {outcome}, reason {reason}: {said}); update this program"
        );
        Self::Disconnected { executed, message }
    }

    /// The outcome, or `ok`.
    pub(crate) fn from_outcome(outcome: Outcome, payload: Vec<u8>) -> Result<Reply, Self> {
        match outcome.verdict {
            Verdict::Ok => Ok(Reply { payload, outcome }),
            Verdict::Failed(_) => Err(Self::Failed(Box::new(outcome))),
            Verdict::Rejected { .. } => Err(Self::Rejected(Box::new(outcome))),
            Verdict::DeadlineQueued | Verdict::DeadlineRunning => {
                Err(Self::DeadlineExceeded(Box::new(outcome)))
            }
            Verdict::Crashed { .. } => Err(Self::Crashed(Box::new(outcome))),
            Verdict::Cancelled { .. } => Err(Self::Cancelled(Box::new(outcome))),
        }
    }

    /// The outcome that the supervisor told, if it did.
    pub fn outcome(&self) -> Option<&Outcome> {
        match self {
            Self::Failed(outcome)
            | Self::Rejected(outcome)
            | Self::DeadlineExceeded(outcome)
            | Self::Crashed(outcome)
            | Self::Cancelled(outcome) => Some(outcome),
            Self::Disconnected { .. } => None,
        }
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
            Self::Failed(outcome) | Self::Cancelled(outcome) => outcome.fmt(f),
            Self::Rejected(outcome) => match outcome.retry_after {
                Some(wait) if outcome.retryable => {
                    write!(f, "{outcome}; try again after {} ms", wait.as_micros().div_ceil(1000))
                }
                _ => outcome.fmt(f),
            },
            Self::DeadlineExceeded(outcome) => {
                let limit_ms = outcome.deadline.as_millis();
                write!(f, "{outcome}: not within {limit_ms} ms; allow more time, or send less at once")
            }
            Self::Crashed(outcome) if outcome.retryable => write!(f, "{outcome}; it may be sent again"),
            Self::Crashed(outcome) => {
                write!(f, "{outcome}; whether the job ran is unknown: send it again only if it may run twice")
            }
        }
    }
}

impl std::error::Error for JobError {}
