//! Spans of jobs: logged if the log level includes them, and sent to a collector if one is configured. A
//! separate thread does both, so that a flood of spans or a hanging collector delays nothing else.

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
use bulkhead_plane::threads::Fate;
use export::Export;
use otlp::Collector;

/// Capacity of the channel to the thread. Further spans are dropped and counted.
const SPANS_MAX: usize = 4096;

/// Minimum interval between two warnings about lost spans.
const TELL_AGAIN_AFTER: Duration = Duration::from_secs(10);

/// Time limit at shutdown for the thread. The thread itself gives up earlier (`FINISH_WITHIN`) if it is
/// scheduled.
const SETTLE_WITHIN: Duration = Duration::from_secs(3);

/// The running thread.
#[derive(Debug)]
pub struct SpanThread(blocking::Receiver<()>);

impl SpanThread {
    /// Waits, within a time limit, until all spans are written and sent. Call this after all senders are
    /// dropped.
    pub fn settle(self) {
        // The channel closes when the thread ends.
        let _ = self.0.recv_timeout(SETTLE_WITHIN);
        super::logging::settle();
    }
}

/// Starts the thread if spans are needed: for the log, according to its level for `bulkhead::job`, or for a
/// collector, according to the environment.
pub fn start(pulse: Arc<SharedCounters>, fate: &Fate) -> io::Result<Option<(SpanSender, SpanThread)>> {
    let is_logged = tracing::enabled!(target: "bulkhead::job", tracing::Level::DEBUG);
    let collector = Collector::find(|name| std::env::var(name).ok()).unwrap_or_else(|error| {
        tracing::warn!("spans of jobs are not sent anywhere: {error}");
        None
    });
    if !is_logged && collector.is_none() {
        return Ok(None);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (sender, spans) = mpsc::channel(SPANS_MAX);
    let (alive, ended) = blocking::channel::<()>();
    let run = move || {
        runtime.block_on(take_spans(spans, is_logged, collector, &pulse));
        drop(alive);
        // A thread may still resolve the collector's address, which cannot be interrupted.
        runtime.shutdown_background();
    };
    fate.spawn("spans", run)?;
    Ok(Some((sender, SpanThread(ended))))
}

async fn take_spans(
    mut spans: mpsc::Receiver<Box<JobSpan>>,
    is_logged: bool,
    collector: Option<Collector>,
    pulse: &SharedCounters,
) {
    let mut export = collector.map(Export::new);
    let mut losses = Losses::default();
    loop {
        tokio::select! {
            span = spans.recv() => match span {
                Some(span) => take(span, is_logged, export.as_mut()),
                None => break,
            },
            () = step(export.as_mut()) => {}
            () = tokio::time::sleep(TELL_AGAIN_AFTER) => {}
        }
        losses.tell(pulse, export.as_ref(), false);
    }
    if let Some(export) = &mut export {
        export.finish().await;
    }
    losses.tell(pulse, export.as_ref(), true);
}

fn take(span: Box<JobSpan>, is_logged: bool, export: Option<&mut Export>) {
    if is_logged {
        log(&span);
    }
    if let Some(export) = export {
        export.add(span);
    }
}

/// Advances the export. Never completes without a collector.
async fn step(export: Option<&mut Export>) {
    match export {
        Some(export) => export.step().await,
        None => std::future::pending().await,
    }
}

/// Number of lost spans that were reported, and the time of the last report.
#[derive(Default)]
struct Losses {
    told: u64,
    told_at: Option<Instant>,
}

impl Losses {
    fn tell(&mut self, pulse: &SharedCounters, export: Option<&Export>, is_last: bool) {
        let unsent = export.map_or(0, Export::lost);
        let lost = pulse.spans_dropped.load(Ordering::Relaxed) + unsent;
        let is_due = is_last || self.told_at.is_none_or(|at| at.elapsed() >= TELL_AGAIN_AFTER);
        if lost > self.told && is_due {
            tracing::warn!(
                "{} spans of jobs were lost: too many at once, or the collector does not take them",
                lost - self.told
            );
            self.told = lost;
            self.told_at = Some(Instant::now());
        }
    }
}

/// Logs a span in one line, with the fields that are sent to a collector.
fn log(span: &JobSpan) {
    let end = &span.end;
    tracing::debug!(
        target: "bulkhead::job",
        trace_id = span.given.trace_id(),
        span_id = span.own.span_id(),
        parent_span_id = span.given.span_id(),
        name = otlp::name(span),
        kind = "server",
        start_time = %humantime::format_rfc3339_micros(span.began),
        duration_ms = millis(span.took),
        bulkhead = &*span.bulkhead,
        operation = &*span.operation,
        tenant = &*span.tenant,
        priority = span.priority.name(),
        outcome = end.outcome,
        reason = end.reason.as_deref(),
        executed = end.executed.name(),
        job = end.job.map(|job| job.to_string()),
        served_by = &*end.served_by,
        attempts = end.attempts,
        queued_ms = millis(end.queued),
        ran_ms = millis(end.ran),
        worker_pid = end.worker_pid,
        payload_bytes = span.payload_bytes,
        "span"
    );
}
