//! A job on its way: what is asked for, what comes back, and what can go wrong.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bulkhead_shared::codec::tag;
use bulkhead_shared::limits::{OPERATION_BYTES_MAX, TENANT_BYTES_MAX};
use bulkhead_shared::{Executed, Outcome, Priority, RejectReason, Verdict};
use tokio::sync::{mpsc, oneshot};

use crate::connection::Client;
use crate::requests::Ticket;

/// Progress reports that wait for a slow reader; later ones are dropped.
pub(crate) const PROGRESS_MAX: usize = 16;

/// A job that is being put together. Nothing is sent before [`Job::send`] or [`Job::start`].
#[must_use = "a job does nothing before it is sent"]
#[derive(Clone, Debug)]
pub struct Job {
    client: Client,
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

    /// On whose behalf; up to 256 bytes.
    pub fn tenant(mut self, name: impl Into<String>) -> Self {
        self.tenant = name.into();
        self
    }

    /// How long the job may take, from its receipt to its answer, queue included. Without it, and at
    /// most, what the bulkhead allows.
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
    pub async fn send(self) -> Result<Reply, JobError> {
        self.start_with(None).await?.await
    }

    /// Sends the job and returns at once, with a handle for its progress and its outcome. Dropping the
    /// handle cancels the job.
    ///
    /// Errors: those that need no answer from the supervisor.
    pub async fn start(self) -> Result<JobHandle, JobError> {
        let (sender, progress) = mpsc::channel(PROGRESS_MAX);
        let mut handle = self.start_with(Some(sender)).await?;
        handle.progress = Some(progress);
        Ok(handle)
    }

    async fn start_with(self, progress: Option<mpsc::Sender<Progress>>) -> Result<JobHandle, JobError> {
        self.check()?;
        let client = self.client.clone();
        client.begin(self, progress).await
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
        if self.bulkhead.len() > 1024 || self.traceparent.as_ref().is_some_and(|text| text.len() > 1024) {
            return Err(self.refused(RejectReason::Invalid, "a name is longer than 1024 bytes".into()));
        }
        Ok(())
    }

    pub(crate) fn refused(&self, reason: RejectReason, message: String) -> JobError {
        JobError::Rejected(Box::new(Outcome {
            verdict: Verdict::Rejected { reason, message },
            bulkhead: self.bulkhead.clone(),
            attempts: 0,
            queued: Duration::ZERO,
            ran: Duration::ZERO,
            worker_pid: None,
            retryable: reason.is_retryable(),
            retry_after: None,
            deadline: self.deadline.unwrap_or_default(),
        }))
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

/// A job that is under way. It is a future of its outcome.
#[derive(Debug)]
pub struct JobHandle {
    pub(crate) outcome: oneshot::Receiver<Result<Reply, JobError>>,
    pub(crate) progress: Option<mpsc::Receiver<Progress>>,
    /// Cancels the job when dropped before its outcome has come.
    pub(crate) ticket: Ticket,
}

impl JobHandle {
    /// The next report of progress; `None` when there will be no more. Reports that nobody waits for are
    /// dropped beyond a few.
    pub async fn progress(&mut self) -> Option<Progress> {
        self.progress.as_mut()?.recv().await
    }
}

impl Future for JobHandle {
    type Output = Result<Reply, JobError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let result = std::task::ready!(Pin::new(&mut self.outcome).poll(cx));
        self.ticket.disarm();
        Poll::Ready(result.unwrap_or_else(|_| Err(JobError::disconnected(Executed::Unknown))))
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

    /// Who served the job, how long it took, and the like.
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
    /// Somebody cancelled it.
    Cancelled(Box<Outcome>),
    /// The supervisor went away, or was not there.
    Disconnected {
        /// Whether the job may have run.
        executed: Executed,
        /// What happened, for people.
        message: String,
    },
}

impl JobError {
    pub(crate) fn disconnected(executed: Executed) -> Self {
        let message = "the supervisor closed the connection".to_owned();
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
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Disconnected { message, .. } => f.write_str(message),
            _ => self.outcome().map_or(Ok(()), |outcome| outcome.fmt(f)),
        }
    }
}

impl std::error::Error for JobError {}
