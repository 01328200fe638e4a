//! Progress of a job, told ten times a second at most: a handler may say it in every round of its loop. The last
//! word is told before the result.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use bulkhead_shared::connection::Payload;
use bulkhead_shared::frame::kind;
use bulkhead_shared::worker_protocol::Progressed;

use crate::link::Writer;

/// The time from one to the next.
const INTERVAL: Duration = Duration::from_millis(100);

/// What a job has said.
#[derive(Default)]
pub(crate) struct Progress(Mutex<Said>);

#[derive(Default)]
struct Said {
    told_at: Option<Instant>,
    unreported: Option<(f32, String)>,
}

impl Progress {
    /// Tells it, or keeps it until it is time.
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

    /// Puts what was kept before whatever is written next. Returns whether there was something.
    pub(crate) fn settle(&self, writer: &Writer, number: u64) -> bool {
        let mut said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((fraction, text)) = said.unreported.take() else { return false };
        said.told_at = Some(Instant::now());
        writer.push(kind::PROGRESSED, number, &Progressed { fraction, text: &text }, Payload::NONE);
        true
    }
}
