//! A job that is under way.

use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::sync::mpsc;

use crate::answer::{JobError, Progress, Reply};
use crate::requests::Ticket;

/// A job that is under way. It is a future of its outcome. It needs its [`Client`](crate::Client) no longer.
#[must_use = "dropping it cancels the job"]
#[derive(Debug)]
pub struct JobHandle {
    pub(crate) progress: Option<mpsc::Receiver<Progress>>,
    /// Cancels the job when dropped before its outcome has come.
    ticket: Ticket,
}

impl JobHandle {
    pub(crate) fn new(ticket: Ticket) -> Self {
        Self { progress: None, ticket }
    }

    /// The next report of progress; `None` when there will be no more, which is when the outcome is there.
    /// Reports that are not taken are dropped beyond a few.
    pub async fn progress(&mut self) -> Option<Progress> {
        self.progress.as_mut()?.recv().await
    }

    /// Asks the supervisor to cancel the job. Its outcome still comes: `cancelled`, or what it was if it had
    /// ended before. A caller that does not want to know drops the handle instead.
    pub fn cancel(&self) {
        self.ticket.cancel(false);
    }

    /// Asks the supervisor to cancel the job unless it has begun. The outcome still arrives: `cancelled` with
    /// `executed: no`, or the outcome of the running job. A supervisor without this capability lets the job continue.
    pub fn cancel_unless_begun(&self) {
        self.ticket.cancel(true);
    }

    #[inline]
    pub(crate) fn poll_outcome(&mut self, cx: &Context<'_>) -> Poll<Result<Reply, JobError>> {
        self.ticket.poll(cx)
    }
}

impl Future for JobHandle {
    type Output = Result<Reply, JobError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.poll_outcome(cx)
    }
}
