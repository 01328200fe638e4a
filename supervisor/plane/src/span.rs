//! The types of a job's span, which the data plane sends to the thread that renders it. A span contains only plain
//! values of limited size. The data plane chooses the jobs, and `observe::spans` in the control plane logs and exports
//! the spans.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bulkhead_shared::limits::truncate;
use bulkhead_shared::trace::Traceparent;
use bulkhead_shared::{Executed, Fault, JobId, Outcome, Priority, Verdict};

/// Maximum size of an outcome's message in a span, in bytes.
const MESSAGE_BYTES_MAX: usize = 512;

/// Sender for the spans of jobs that have ended.
pub type SpanSender = tokio::sync::mpsc::Sender<Box<JobSpan>>;

/// Span of a sampled job, from receipt to outcome.
#[derive(Debug)]
pub struct JobSpan {
    /// Trace context sent by the client: the trace ID and the ID of the client's span.
    pub parent: Traceparent,
    /// Trace context sent to the worker: the trace ID of `parent` and the ID of this span.
    pub own: Traceparent,
    /// Time when the job was received.
    pub began: SystemTime,
    /// Time from the receipt of the job to its outcome.
    pub took: Duration,
    /// Name of the bulkhead, as given by the client. Untrusted text if there is no such bulkhead.
    pub bulkhead: Arc<str>,
    /// Operation, as given by the client. Untrusted text.
    pub operation: Box<str>,
    /// Tenant, as given by the client. Untrusted text.
    pub tenant: Box<str>,
    pub priority: Priority,
    /// Size of the payload in bytes. `None` if the size is unknown because the payload was not received.
    pub payload_bytes: Option<usize>,
    pub outcome: SpanOutcome,
}

/// The parts of an outcome that are recorded in a span.
#[derive(Debug)]
pub struct SpanOutcome {
    pub outcome: &'static str,
    /// Reason for the outcome, or the handler's error code. `None` if there is neither. An error code is
    /// untrusted text.
    pub reason: Option<Box<str>>,
    /// Human-readable message, truncated to a maximum size. Untrusted text if it comes from the handler.
    pub message: Option<Box<str>>,
    /// True if the job failed because of the server, not because of the job itself.
    pub is_error: bool,
    /// Whether the handler ever started running the job.
    pub executed: Executed,
    /// Job ID, or `None` if the job was not accepted.
    pub job: Option<JobId>,
    /// Name of the bulkhead that ran the job or rejected it. With fallbacks, this bulkhead can differ from the bulkhead
    /// named by the client.
    pub served_by: Box<str>,
    /// Number of times that the job was sent to a worker.
    pub attempts: u32,
    /// Total time that the job spent in the queue.
    pub queued: Duration,
    /// Time that workers spent on the job, summed over all attempts.
    pub ran: Duration,
    /// PID of the last worker that had the job.
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

/// Returns true if the verdict is a server error, which corresponds to an HTTP status of 500 or above.
fn is_error(verdict: &Verdict) -> bool {
    match verdict {
        Verdict::Failed(failure) => failure.fault == Fault::Dependency,
        _ => verdict.http_status() >= 500,
    }
}
