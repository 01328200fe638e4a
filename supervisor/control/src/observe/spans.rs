//! Logs job spans if the log level includes them, and sends spans to a collector if one is configured. The data plane
//! creates the spans. A separate thread handles the spans, so that neither a flood of spans nor a hung collector can
//! delay anything else.

mod export;
mod otlp;

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc as blocking;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use bulkhead_api::millis;
use bulkhead_plane::counters::SharedCounters;
use bulkhead_plane::span::{JobSpan, SpanSender};
use bulkhead_plane::threads::ThreadMonitor;
use export::Export;
use otlp::Collector;

/// Maximum number of spans in the channel to the thread that processes spans. Further spans are dropped and counted.
const SPANS_MAX: usize = 4096;

/// Minimum interval between warnings about lost spans.
const LOSS_REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// Maximum time to wait at shutdown for the thread that processes spans. The thread usually exits earlier, because it
/// stops sending spans after `EXPORT_FINISH_TIMEOUT`.
const FINISH_TIMEOUT: Duration = Duration::from_secs(3);

/// Handle to the thread that processes spans.
#[derive(Debug)]
pub struct SpanThread(blocking::Receiver<()>);

impl SpanThread {
    /// Waits until all spans have been logged and sent, or until a timeout expires. All senders must already
    /// have been dropped.
    pub fn finish(self) {
        // The call returns when the thread exits, because the channel is then closed.
        let _ = self.0.recv_timeout(FINISH_TIMEOUT);
        super::logging::finish();
    }
}

/// Starts the thread if spans are needed. They are needed if the log level of the `bulkhead::job` target includes
/// spans, or if environment variables configure a collector.
pub fn start(
    counters: Arc<SharedCounters>,
    threads: &ThreadMonitor,
) -> io::Result<Option<(SpanSender, SpanThread)>> {
    let is_logged = tracing::enabled!(target: "bulkhead::job", tracing::Level::DEBUG);
    let collector = Collector::find(|name| std::env::var(name).ok()).unwrap_or_else(|error| {
        tracing::warn!("job spans will not be sent: {error}");
        None
    });
    if !is_logged && collector.is_none() {
        return Ok(None);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (sender, spans) = mpsc::channel(SPANS_MAX);
    let (alive, ended) = blocking::channel::<()>();
    let run = move || {
        runtime.block_on(handle_spans(spans, is_logged, collector, &counters));
        drop(alive);
        // Shutdown does not wait for the runtime, because one of its threads may still be resolving the collector's
        // address, which cannot be interrupted.
        runtime.shutdown_background();
    };
    threads.spawn("spans", run)?;
    Ok(Some((sender, SpanThread(ended))))
}

async fn handle_spans(
    mut spans: mpsc::Receiver<Box<JobSpan>>,
    is_logged: bool,
    collector: Option<Collector>,
    counters: &SharedCounters,
) {
    let mut export = collector.map(Export::new);
    let mut losses = LossReports::default();
    loop {
        tokio::select! {
            span = spans.recv() => match span {
                Some(span) => handle_span(span, is_logged, export.as_mut()),
                None => break,
            },
            () = step(export.as_mut()) => {}
            () = tokio::time::sleep(LOSS_REPORT_INTERVAL) => {}
        }
        losses.report(counters, export.as_ref(), false);
    }
    if let Some(export) = &mut export {
        export.finish().await;
    }
    losses.report(counters, export.as_ref(), true);
}

fn handle_span(span: Box<JobSpan>, is_logged: bool, export: Option<&mut Export>) {
    if is_logged {
        log(&span);
    }
    if let Some(export) = export {
        export.add(span);
    }
}

/// Waits for the next step of the export and performs it. If no collector is configured, waits forever.
async fn step(export: Option<&mut Export>) {
    match export {
        Some(export) => export.step().await,
        None => std::future::pending().await,
    }
}

/// Number of lost spans that a warning has already reported, and the time of the last warning.
#[derive(Default)]
struct LossReports {
    reported: u64,
    reported_at: Option<Instant>,
}

impl LossReports {
    fn report(&mut self, counters: &SharedCounters, export: Option<&Export>, is_last: bool) {
        let unsent = export.map_or(0, Export::lost);
        let lost = counters.spans_dropped.load(Ordering::Relaxed) + unsent;
        let is_due = is_last || self.reported_at.is_none_or(|at| at.elapsed() >= LOSS_REPORT_INTERVAL);
        if lost > self.reported && is_due {
            tracing::warn!(
                "{} job spans were dropped because of overload or collector errors",
                lost - self.reported
            );
            self.reported = lost;
            self.reported_at = Some(Instant::now());
        }
    }
}

/// Logs a span as a single line that contains the same fields as a span sent to a collector.
fn log(span: &JobSpan) {
    let outcome = &span.outcome;
    tracing::debug!(
        target: "bulkhead::job",
        trace_id = span.parent.trace_id(),
        span_id = span.own.span_id(),
        parent_span_id = span.parent.span_id(),
        name = otlp::name(span),
        kind = "server",
        start_time = %humantime::format_rfc3339_micros(span.began),
        duration_ms = millis(span.took),
        bulkhead = &*span.bulkhead,
        operation = &*span.operation,
        tenant = &*span.tenant,
        priority = span.priority.name(),
        outcome = outcome.outcome,
        reason = outcome.reason.as_deref(),
        executed = outcome.executed.name(),
        job = outcome.job.map(|job| job.to_string()),
        served_by = &*outcome.served_by,
        attempts = outcome.attempts,
        queued_ms = millis(outcome.queued),
        ran_ms = millis(outcome.ran),
        worker_pid = outcome.worker_pid,
        payload_bytes = span.payload_bytes,
        "span"
    );
}
