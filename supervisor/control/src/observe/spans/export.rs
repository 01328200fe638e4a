//! Exports spans to a collector for `spans`. Queues spans, sends them in batches, and retries after failures. The
//! number of spans in memory is limited, regardless of what the collector does. `otlp` encodes and transmits a batch.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::otlp::{Collector, SendError};
use bulkhead_plane::span::JobSpan;

/// Maximum number of spans per message to the collector.
const BATCH_SPANS: usize = 512;

/// Maximum number of spans in the queue. Further spans are dropped and counted.
const QUEUED_SPANS_MAX: usize = 4096;

/// Maximum time that a span waits in the queue for a batch to fill up.
const BATCH_DELAY_MAX: Duration = Duration::from_secs(1);

/// Minimum and maximum delay before a failed message is sent again. The delay doubles with each consecutive failure.
const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// Maximum time, at shutdown, to spend on sending the remaining spans.
const EXPORT_FINISH_TIMEOUT: Duration = Duration::from_secs(1);

/// An encoded message and the number of spans in it.
struct Batch {
    body: Bytes,
    spans: usize,
}

pub(super) struct Export {
    collector: Arc<Collector>,
    queued_spans: VecDeque<Box<JobSpan>>,
    /// Time when the oldest span in the queue arrived.
    oldest_at: Instant,
    /// Message that is being sent or that must be resent after a failure.
    batch: Option<Batch>,
    sending: Option<JoinHandle<Result<(), SendError>>>,
    /// Earliest time at which a message can be sent after a failure.
    retry_at: Instant,
    /// Delay that will be used after the next failure.
    pause: Duration,
    lost: u64,
}

impl Export {
    pub(super) fn new(collector: Collector) -> Self {
        let now = Instant::now();
        Self {
            collector: Arc::new(collector),
            queued_spans: VecDeque::new(),
            oldest_at: now,
            batch: None,
            sending: None,
            retry_at: now,
            pause: PAUSE_MIN,
            lost: 0,
        }
    }

    /// Returns the number of spans dropped so far, for example because the queue was full.
    pub(super) fn lost(&self) -> u64 {
        self.lost
    }

    pub(super) fn add(&mut self, span: Box<JobSpan>) {
        if self.queued_spans.len() >= QUEUED_SPANS_MAX {
            self.lost += 1;
            return;
        }
        if self.queued_spans.is_empty() {
            self.oldest_at = Instant::now();
        }
        self.queued_spans.push_back(span);
    }

    /// Waits until the next step is due, and then performs the step. Cancel safe.
    pub(super) async fn step(&mut self) {
        let due = self.due();
        match (&mut self.sending, due) {
            (Some(sending), _) => {
                let sent = sending.await;
                self.sent(sent.unwrap_or(Err(SendError::ended())));
            }
            (None, Some(at)) => {
                tokio::time::sleep_until(at).await;
                self.send();
            }
            (None, None) => std::future::pending().await,
        }
    }

    /// Returns the time when the next message is due, or `None` if there are no spans.
    fn due(&self) -> Option<Instant> {
        let is_full = self.batch.is_some() || self.queued_spans.len() >= BATCH_SPANS;
        match (is_full, self.queued_spans.is_empty()) {
            (true, _) => Some(self.retry_at),
            (false, false) => Some(self.retry_at.max(self.oldest_at + BATCH_DELAY_MAX)),
            (false, true) => None,
        }
    }

    fn send(&mut self) {
        let batch = self.batch.take().unwrap_or_else(|| {
            let spans: Vec<_> = self.queued_spans.drain(..self.queued_spans.len().min(BATCH_SPANS)).collect();
            self.oldest_at = Instant::now();
            Batch { body: self.collector.render(&spans).into(), spans: spans.len() }
        });
        let (collector, body) = (self.collector.clone(), batch.body.clone());
        self.batch = Some(batch);
        self.sending = Some(tokio::spawn(async move { collector.send(body).await }));
    }

    fn sent(&mut self, result: Result<(), SendError>) {
        self.sending = None;
        let Err(error) = result else {
            self.batch = None;
            self.pause = PAUSE_MIN;
            return;
        };
        // Only the first of several consecutive failures is logged. Lost spans are reported separately.
        if self.pause == PAUSE_MIN {
            tracing::warn!("failed to send job spans to {}: {error}", self.collector);
        }
        self.retry_at = Instant::now() + self.pause;
        self.pause = (2 * self.pause).min(PAUSE_MAX);
        if !error.is_retryable {
            self.lost += self.batch.take().map_or(0, |batch| batch.spans as u64);
        }
    }

    /// Sends the remaining spans. Drops any that cannot be sent within the time limit.
    pub(super) async fn finish(&mut self) {
        // If the last message failed, the collector is unlikely to accept the remaining spans, so they are
        // dropped.
        let last_send_succeeded = self.pause == PAUSE_MIN;
        if last_send_succeeded {
            let _ = tokio::time::timeout(EXPORT_FINISH_TIMEOUT, self.send_all()).await;
        }
        self.lost += self.batch.take().map_or(0, |batch| batch.spans as u64) + self.queued_spans.len() as u64;
        self.queued_spans.clear();
    }

    /// Sends all remaining spans. Stops at the first failure.
    async fn send_all(&mut self) {
        while self.sending.is_some() || self.batch.is_some() || !self.queued_spans.is_empty() {
            if self.sending.is_none() {
                self.send();
            }
            self.step().await;
            if self.pause > PAUSE_MIN {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use bulkhead_shared::trace::Traceparent;
    use bulkhead_shared::{Outcome, Priority, Verdict};

    use super::*;

    fn span() -> Box<JobSpan> {
        let parent = Traceparent::parse("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01").unwrap();
        let outcome = Outcome {
            verdict: Verdict::Ok,
            job: None,
            bulkhead: "b".into(),
            attempts: 1,
            queued: Duration::ZERO,
            ran: Duration::ZERO,
            worker_pid: Some(7),
            retryable: false,
            retry_after: None,
            deadline: Duration::from_secs(1),
            run_limit: None,
            status: None,
            report: None,
        };
        Box::new(JobSpan {
            parent,
            own: parent,
            began: SystemTime::now(),
            took: Duration::ZERO,
            bulkhead: "b".into(),
            operation: "".into(),
            tenant: "".into(),
            priority: Priority::Normal,
            payload_bytes: Some(0),
            outcome: (&outcome).into(),
        })
    }

    fn export() -> Export {
        let variable = |name: &str| name.ends_with("OTLP_ENDPOINT").then(|| "http://127.0.0.1:1".to_owned());
        Export::new(Collector::find(variable).unwrap().unwrap())
    }

    #[test]
    fn full_span_queue_counts_lost_spans() {
        let mut export = export();
        (0..QUEUED_SPANS_MAX + 10).for_each(|_| export.add(span()));
        assert_eq!((export.queued_spans.len(), export.lost()), (QUEUED_SPANS_MAX, 10));
    }

    /// Checks that a failed message is sent again after a pause. Also checks that a full batch is due immediately,
    /// whereas an incomplete batch waits for more spans.
    #[test]
    fn failed_span_export_is_retried_after_pause() {
        let mut export = export();
        assert_eq!(export.due(), None);
        export.add(span());
        assert_eq!(export.due(), Some(export.oldest_at + BATCH_DELAY_MAX));
        (1..BATCH_SPANS).for_each(|_| export.add(span()));
        assert!(export.due().is_some_and(|at| at <= Instant::now()));

        export.batch = Some(Batch { body: Bytes::new(), spans: 3 });
        export.sent(Err(SendError::ended()));
        assert!(export.batch.is_some() && export.lost() == 0, "the batch is kept for another attempt");
        assert_eq!((export.due(), export.pause), (Some(export.retry_at), 2 * PAUSE_MIN));
        (0..20).for_each(|_| export.sent(Err(SendError::ended())));
        assert_eq!(export.pause, PAUSE_MAX);
        export.sent(Ok(()));
        assert_eq!((export.batch.is_none(), export.pause, export.lost()), (true, PAUSE_MIN, 0));
    }
}
