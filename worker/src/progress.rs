//! Rate limit for the progress reports of a job: at most ten per second. So a handler can report in every
//! iteration of a loop. The last report is always sent, before the result.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use bulkhead_shared::connection::Payload;
use bulkhead_shared::frame::kind;
use bulkhead_shared::worker_protocol::Progressed;

use crate::link::Writer;

/// Minimum interval between two reports.
const INTERVAL: Duration = Duration::from_millis(100);

/// Progress reports of a job.
#[derive(Default)]
pub(crate) struct Progress(Mutex<Said>);

#[derive(Default)]
struct Said {
    told_at: Option<Instant>,
    unreported: Option<(f32, String)>,
}

impl Progress {
    /// Sends the report, or keeps it until the interval has passed.
    pub(crate) fn say(&self, writer: &Writer, number: u64, fraction: f32, text: &str) {
        let mut said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if said.told_at.is_some_and(|at| now - at < INTERVAL) {
            said.unreported = Some((fraction, text.to_owned()));
            return;
        }
        (said.told_at, said.unreported) = (Some(now), None);
        writer.send(kind::PROGRESSED, number, &Progressed { fraction, text });
    }

    /// Writes the kept report to the outbox, before the next frame. Returns false if there was none.
    pub(crate) fn settle(&self, writer: &Writer, number: u64) -> bool {
        let mut said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((fraction, text)) = said.unreported.take() else { return false };
        said.told_at = Some(Instant::now());
        writer.push(kind::PROGRESSED, number, &Progressed { fraction, text: &text }, Payload::NONE);
        true
    }
}
