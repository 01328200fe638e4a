//! A job's span, from the data plane to the thread that writes it down: plain values, of bounded size, unrendered.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bulkhead_shared::limits::cut;
use bulkhead_shared::trace::Traceparent;
use bulkhead_shared::{Executed, Fault, JobId, Outcome, Priority, Verdict};

/// Bytes of an outcome's sentence for people that a span has.
const MESSAGE_BYTES_MAX: usize = 512;

/// Where the data plane puts the spans of jobs that have ended.
pub type SpanSender = tokio::sync::mpsc::Sender<Box<JobSpan>>;

/// What became of a sampled job, from its receipt to its outcome, whatever happened in between.
#[derive(Debug)]
pub struct JobSpan {
    /// What the job came with: the trace, and the span of its caller.
    pub given: Traceparent,
    /// What its worker was given: the same trace, and this span.
    pub own: Traceparent,
    /// When the job was received.
    pub began: SystemTime,
    /// From then to its outcome.
    pub took: Duration,
    /// Where it was sent. If there is no such bulkhead, that is anything.
    pub bulkhead: Arc<str>,
    /// As its client said; anything.
    pub operation: Box<str>,
    /// As its client said; anything.
    pub tenant: Box<str>,
    /// How much it matters.
    pub priority: Priority,
    /// Bytes of its payload.
    pub payload_bytes: usize,
    /// What became of it.
    pub end: SpanEnd,
}

/// What an outcome says to a span.
#[derive(Debug)]
pub struct SpanEnd {
    /// `ok`, or what else became of it.
    pub outcome: &'static str,
    /// Why, where there is a reason; a handler's own code is anything.
    pub reason: Option<Box<str>>,
    /// A sentence for people, or the beginning of it; a handler's own is anything.
    pub message: Option<Box<str>>,
    /// Whether something is wrong here, and not with the job.
    pub is_error: bool,
    /// Whether the handler began.
    pub executed: Executed,
    /// Its number there; `None` if it was not taken.
    pub job: Option<JobId>,
    /// The bulkhead that served it, or was asked to: a fallback, perhaps.
    pub served_by: Box<str>,
    /// How often a worker was given it.
    pub attempts: u32,
    /// How long it waited.
    pub queued: Duration,
    /// How long workers had it.
    pub ran: Duration,
    /// The process that had it last.
    pub worker_pid: Option<u32>,
}

impl From<&Outcome> for SpanEnd {
    fn from(outcome: &Outcome) -> Self {
        let verdict = &outcome.verdict;
        Self {
            outcome: verdict.name(),
            reason: verdict.reason().map(Into::into),
            message: verdict.message().map(|message| cut(message, MESSAGE_BYTES_MAX).into()),
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

/// A server's span is in error for what is the server's fault, as with the status 500 and above in HTTP.
fn is_error(verdict: &Verdict) -> bool {
    match verdict {
        Verdict::Failed(failure) => failure.fault == Fault::Dependency,
        _ => verdict.http_status() >= 500,
    }
}
