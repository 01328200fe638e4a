//! A job that is under way.

use std::pin::Pin;
use std::task::{Context, Poll};

use bulkhead_shared::Executed;
use tokio::sync::{mpsc, oneshot};

use crate::answer::{JobError, Progress, Reply};
use crate::requests::{Sent, Ticket};

/// A job that is under way. It is a future of its outcome. It needs its [`Client`](crate::Client) no longer.
#[must_use = "dropping it cancels the job"]
#[derive(Debug)]
pub struct JobHandle {
    outcome: oneshot::Receiver<Result<Reply, JobError>>,
    pub(crate) progress: Option<mpsc::Receiver<Progress>>,
    /// Cancels the job when dropped before its outcome has come.
    ticket: Ticket,
}

impl JobHandle {
    pub(crate) fn new((outcome, ticket): Sent) -> Self {
        Self { outcome, progress: None, ticket }
    }

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
