//! The handle to a submitted job, with which the caller waits for progress and the outcome, or cancels the job.
//! `Job::start` returns the handle. The handle never retries the job, unlike `Job::send`.

use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::sync::mpsc;

use crate::job_request::JobRequest;
use crate::reply::{JobError, Progress, Reply};
use crate::requests::PendingOutcome;

/// Handle to a submitted job. The handle is also a future that resolves to the outcome, and remains valid
/// after the [`Client`](crate::Client) is dropped.
#[must_use = "dropping the handle cancels the job"]
#[derive(Debug)]
pub struct JobHandle {
    pub(crate) progress: Option<mpsc::Receiver<Progress>>,
    /// The pending outcome. If this value is dropped before the outcome has arrived, the job is cancelled.
    outcome: PendingOutcome,
}

impl JobHandle {
    pub(crate) fn new(outcome: PendingOutcome) -> Self {
        Self { progress: None, outcome }
    }

    /// Waits for the next progress report. Returns `None` when the job has ended. Up to 16 unread reports are
    /// kept; further reports are dropped.
    pub async fn progress(&mut self) -> Option<Progress> {
        self.progress.as_mut()?.recv().await
    }

    /// Asks the supervisor to cancel the job. An outcome still arrives: `cancelled`, or another outcome if
    /// the job ends first. If there is no connection, the job ends immediately. To cancel without waiting for
    /// the outcome, drop the handle.
    pub fn cancel(&self) {
        self.outcome.cancel(false);
    }

    /// Asks the supervisor to cancel the job unless the job has begun. The outcome still arrives: `cancelled` with
    /// `executed: no`, or the outcome of the job if it has begun. If the supervisor does not support such requests,
    /// the job continues.
    pub fn cancel_unless_begun(&self) {
        self.outcome.cancel(true);
    }

    /// Returns the job so that it can be retried. Must be called after the outcome has been received.
    pub(crate) fn take_request(&mut self) -> Option<Box<JobRequest>> {
        self.outcome.take_request()
    }

    #[inline]
    pub(crate) fn poll_outcome(&mut self, cx: &Context<'_>) -> Poll<Result<Reply, JobError>> {
        self.outcome.poll(cx)
    }
}

impl Future for JobHandle {
    type Output = Result<Reply, JobError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.poll_outcome(cx)
    }
}
