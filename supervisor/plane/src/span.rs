//! The span of a job, sent from the data plane to the thread that renders it. Holds plain values of bounded
//! size.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bulkhead_shared::limits::truncate;
use bulkhead_shared::trace::Traceparent;
use bulkhead_shared::{Executed, Fault, JobId, Outcome, Priority, Verdict};

/// Maximum size of the outcome's message in a span, in bytes.
const MESSAGE_BYTES_MAX: usize = 512;

/// Sender for the spans of finished jobs.
pub type SpanSender = tokio::sync::mpsc::Sender<Box<JobSpan>>;

/// The span of a sampled job, from its receipt to its outcome.
#[derive(Debug)]
pub struct JobSpan {
    /// Trace context of the request: the trace and the caller's span.
    pub parent: Traceparent,
    /// Trace context given to the worker: the same trace, and this span.
    pub own: Traceparent,
    /// Time of receipt.
    pub began: SystemTime,
    /// Time from receipt to outcome.
    pub took: Duration,
    /// Requested bulkhead. Untrusted if no such bulkhead exists.
    pub bulkhead: Arc<str>,
    /// Operation given by the client; untrusted.
    pub operation: Box<str>,
    /// Tenant given by the client; untrusted.
    pub tenant: Box<str>,
    pub priority: Priority,
    /// Size of the payload in bytes.
    pub payload_bytes: usize,
    pub outcome: SpanOutcome,
}

/// The part of an outcome that a span records.
#[derive(Debug)]
pub struct SpanOutcome {
    /// Name of the outcome.
    pub outcome: &'static str,
    /// Reason of the outcome, if any. A handler's code is untrusted.
    pub reason: Option<Box<str>>,
    /// Message for people, cut to a maximum length. A handler's message is untrusted.
    pub message: Option<Box<str>>,
    /// True if the error lies with the server, not with the job.
    pub is_error: bool,
    /// Whether the handler began.
    pub executed: Executed,
    /// Number of the job; `None` if it was not accepted.
    pub job: Option<JobId>,
    /// Bulkhead that served the job or was asked to, which can be a fallback.
    pub served_by: Box<str>,
    /// Number of dispatches to a worker.
    pub attempts: u32,
    /// Time in the queue.
    pub queued: Duration,
    /// Time with workers.
    pub ran: Duration,
    /// Process id of the last worker.
    pub worker_pid: Option<u32>,
}

impl From<&Outcome> for SpanOutcome {
    fn from(outcome: &Outcome) -> Self {
        let verdict = &outcome.verdict;
        Self {
            outcome: verdict.name(),
            reason: verdict.reason().map(Into::into),
            message: verdict.message().map(|message| truncate(message, MESSAGE_BYTES_MAX).into()),
            is_error: is_error(verdict),
            executed: verdict.executed(),
            job: outcome.job,
            served_by: outcome.bulkhead.as_str().into(),
            attempts: outcome.attempts,
            queued: outcome.queued,
            ran: outcome.ran,
            worker_pid: outcome.worker_pid,
        }
    }
}

/// Returns true for errors of the server, which correspond to HTTP status 500 and above.
fn is_error(verdict: &Verdict) -> bool {
    match verdict {
        Verdict::Failed(failure) => failure.fault == Fault::Dependency,
        _ => verdict.http_status() >= 500,
    }
}
