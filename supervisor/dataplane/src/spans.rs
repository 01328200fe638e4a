//! Creates job spans. If tracing is on, each job that its client has marked as sampled gets a span in the client's
//! trace. The worker is sent the context of this span. Finished spans are sent to `control/src/observe/spans.rs`, which
//! formats and exports them on another thread.

use std::hash::{BuildHasher, RandomState};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use bulkhead_plane::counters::SharedCounters;
use bulkhead_plane::span::{JobSpan, SpanSender};
use bulkhead_policy::Time;
use bulkhead_shared::client_protocol::Submit;
use bulkhead_shared::limits::{
    BULKHEAD_NAME_BYTES_MAX, OPERATION_BYTES_MAX, PAYLOAD_BYTES_CEILING, TENANT_BYTES_MAX, truncate,
};
use bulkhead_shared::trace::Traceparent;
use bulkhead_shared::{Outcome, Priority, Verdict};

use super::JobData;

/// Trace context of a job.
pub(super) struct Trace {
    /// Trace context sent by the client.
    given: Traceparent,
    /// Span of the job, or `None` if the job is not sampled.
    span: Option<OpenSpan>,
}

/// A span that has not ended.
struct OpenSpan {
    own: Traceparent,
    began: SystemTime,
    received: Time,
}

impl Trace {
    /// Returns the trace ID, which consists of 32 hexadecimal digits.
    pub(super) fn id(&self) -> &str {
        self.given.trace_id()
    }

    /// Returns the trace context to send to the worker. This is the context of the job's span or, if there is no span,
    /// the context that the client sent.
    pub(super) fn outgoing(&self) -> &str {
        self.span.as_ref().map_or(&self.given, |span| &span.own).as_str()
    }
}

impl JobData {
    /// Returns the trace context of the job's span, or `None` if there is no span.
    pub(super) fn span(&self) -> Option<Traceparent> {
        Some(self.trace.as_ref()?.span.as_ref()?.own)
    }
}

/// Creates and sends the spans of jobs.
pub(super) struct Spans {
    /// Channel for finished spans, or `None` if tracing is off.
    sender: Option<SpanSender>,
    ids: SpanIds,
    counters: Arc<SharedCounters>,
}

/// Generator of span IDs (SplitMix64). Starts in a random state to avoid collisions with IDs from other
/// participants in a trace.
struct SpanIds(u64);

impl SpanIds {
    fn next(&mut self) -> NonZeroU64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        NonZeroU64::new(mixed ^ (mixed >> 31)).unwrap_or(NonZeroU64::MIN)
    }
}

impl Spans {
    pub(super) fn new(sender: Option<SpanSender>, counters: Arc<SharedCounters>) -> Self {
        Self { sender, ids: SpanIds(RandomState::new().hash_one(std::process::id())), counters }
    }

    /// Creates the trace context of a new job. Calls `clock` only for a sampled job.
    pub(super) fn start(
        &mut self,
        (now, clock): (Time, fn() -> SystemTime),
        given: Option<Traceparent>,
    ) -> Option<Box<Trace>> {
        let given = given?;
        let is_recorded = self.sender.is_some() && given.is_sampled();
        let span = is_recorded.then(|| OpenSpan {
            own: given.with_span(self.ids.next()),
            began: clock(),
            received: now,
        });
        Some(Box::new(Trace { given, span }))
    }

    /// Sends a span for a submission that was rejected before it became a job. Returns the trace context of the span,
    /// or `None` if there is no span.
    pub(super) fn send_rejected(
        &mut self,
        (now, clock): (Time, fn() -> SystemTime),
        submit: &Submit<'_>,
        given: Option<Traceparent>,
        payload_bytes: usize,
        verdict: &Verdict,
    ) -> Option<Traceparent> {
        let trace = self.start((now, clock), given);
        let priority = Priority::from_code(submit.priority).unwrap_or_default();
        let mut record = JobData { trace, priority, payload_bytes, ..JobData::default() };
        let span = record.span()?;
        record.operation = truncate(submit.operation, OPERATION_BYTES_MAX).into();
        record.tenant = truncate(submit.tenant, TENANT_BYTES_MAX).into();
        let name = truncate(submit.bulkhead, BULKHEAD_NAME_BYTES_MAX);
        let outcome = Outcome {
            verdict: verdict.clone(),
            job: None,
            bulkhead: name.to_owned(),
            attempts: 0,
            queued: Duration::ZERO,
            ran: Duration::ZERO,
            worker_pid: None,
            retryable: verdict.is_retryable(false),
            retry_after: None,
            deadline: Duration::ZERO,
            run_limit: None,
            status: None,
            report: None,
        };
        self.send(now, name.into(), &mut record, &outcome);
        Some(span)
    }

    /// Sends the span of a finished job. Takes the names out of the job's record instead of copying them, because the
    /// record no longer needs them.
    pub(super) fn send(&self, now: Time, bulkhead: Arc<str>, record: &mut JobData, outcome: &Outcome) {
        let Some(sender) = &self.sender else { return };
        let Some(Trace { given, span: Some(span) }) = record.trace.as_deref() else { return };
        // Reserves a place in the channel before creating the span. If the channel is full, the span is only counted as
        // dropped.
        let Ok(place) = sender.try_reserve() else {
            self.counters.spans_dropped.fetch_add(1, Ordering::Relaxed);
            return;
        };
        let span = JobSpan {
            parent: *given,
            own: span.own,
            began: span.began,
            took: now.since(span.received),
            bulkhead,
            operation: std::mem::take(&mut record.operation),
            tenant: std::mem::take(&mut record.tenant),
            priority: record.priority,
            payload_bytes: Some(record.payload_bytes).filter(|bytes| *bytes as u64 <= PAYLOAD_BYTES_CEILING),
            outcome: outcome.into(),
        };
        place.send(Box::new(span));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn span_ids_do_not_repeat() {
        let mut ids = SpanIds(7);
        let mut drawn: Vec<_> = (0..100_000).map(|_| ids.next()).collect();
        drawn.sort_unstable();
        drawn.dedup();
        assert_eq!(drawn.len(), 100_000);
        // This is the only state for which the generator's mixing function returns zero, which is not a valid span ID.
        assert_eq!(SpanIds(0_u64.wrapping_sub(0x9e37_79b9_7f4a_7c15)).next(), NonZeroU64::MIN);
    }
}
