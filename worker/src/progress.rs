//! Limits each job's progress reports to ten per second, so that a handler can report progress in every
//! iteration of a loop. The last report before the result is always sent.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use bulkhead_shared::connection::Payload;
use bulkhead_shared::frame::kind;
use bulkhead_shared::worker_protocol::Progressed;

use crate::link::Writer;

/// Minimum interval between two progress reports of a job.
const REPORT_INTERVAL: Duration = Duration::from_millis(100);

/// State of a job's progress reports.
#[derive(Default)]
pub(crate) struct Progress(Mutex<State>);

#[derive(Default)]
struct State {
    sent_at: Option<Instant>,
    delayed: Option<(f32, String)>,
}

impl Progress {
    /// Sends a report, or stores it if the previous report was sent less than [`REPORT_INTERVAL`] ago.
    pub(crate) fn report(&self, writer: &Writer, number: u64, fraction: f32, text: &str) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if state.sent_at.is_some_and(|at| now - at < REPORT_INTERVAL) {
            state.delayed = Some((fraction, text.to_owned()));
            return;
        }
        (state.sent_at, state.delayed) = (Some(now), None);
        writer.send(kind::PROGRESSED, number, &Progressed { fraction, text });
    }

    /// Queues the report that the rate limit has delayed. Returns false if no report was delayed.
    pub(crate) fn send_delayed(&self, writer: &Writer, number: u64) -> bool {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((fraction, text)) = state.delayed.take() else { return false };
        state.sent_at = Some(Instant::now());
        writer.push(kind::PROGRESSED, number, &Progressed { fraction, text: &text }, Payload::NONE);
        true
    }
}
