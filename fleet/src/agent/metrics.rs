//! Collects an agent's metrics, and formats them as OpenMetrics text. `runner`, `pulls` and `watch` update the values,
//! and `http` serves the text. The supervisor on the same host has separate metrics.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Counters of one bulkhead.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Number of outcomes recorded by this agent.
    pub(crate) decided: AtomicU64,
    /// Number of attempts after which the job was returned to the queue.
    pub(crate) returned: AtomicU64,
    /// Number of outcomes discarded because another agent had taken over the job.
    pub(crate) fenced: AtomicU64,
    /// Number of reads that found a record which this agent could not decode.
    pub(crate) unreadable: AtomicU64,
    /// Number of messages that were redelivered.
    pub(crate) redelivered: AtomicU64,
    /// Number of jobs in the whole fleet that have no outcome yet.
    pub(crate) pending: AtomicU64,
}

/// Metrics of an agent.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    bulkheads: BTreeMap<String, Counters>,
    /// Fill level of each stream, as a fraction of the stream's maximum size.
    stored: Mutex<BTreeMap<&'static str, f64>>,
}

/// Increments a counter.
pub(crate) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

type Family = (&'static str, &'static str, &'static str, fn(&Counters) -> &AtomicU64);

/// Metric families that have a `bulkhead` label. Each entry contains a name, a type, a description and a function
/// that returns the counter.
const FAMILIES: [Family; 6] = [
    ("decided", "counter", "Jobs whose outcome this agent recorded.", |of| &of.decided),
    ("returned", "counter", "Attempts after which the job was returned to the queue.", |of| &of.returned),
    ("fenced", "counter", "Outcomes dropped because another agent had taken over the job.", |of| &of.fenced),
    ("unreadable", "counter", "Reads of records that the agent could not decode.", |of| &of.unreadable),
    ("redelivered", "counter", "Messages that were delivered more than once.", |of| &of.redelivered),
    ("pending", "gauge", "Jobs in the whole fleet that have no outcome yet.", |of| &of.pending),
];

impl Metrics {
    /// Creates the counters for each bulkhead.
    pub(crate) fn new<'a>(bulkheads: impl Iterator<Item = &'a String>) -> Self {
        let bulkheads = bulkheads.map(|name| (name.clone(), Counters::default())).collect();
        Self { bulkheads, stored: Mutex::default() }
    }

    /// Returns the counters of a bulkhead.
    pub(crate) fn of(&self, bulkhead: &str) -> Option<&Counters> {
        self.bulkheads.get(bulkhead)
    }

    /// Sets the fill level of a stream, as a fraction of the stream's maximum size.
    pub(crate) fn set_stored(&self, stream: &'static str, ratio: f64) {
        self.stored.lock().unwrap_or_else(PoisonError::into_inner).insert(stream, ratio);
    }

    /// Formats all metrics as OpenMetrics text. Bulkhead names need no escaping.
    pub(crate) fn text(&self, clock_offset_seconds: f64) -> String {
        let mut text = String::new();
        for (name, kind, help, number) in FAMILIES {
            let suffix = if kind == "counter" { "_total" } else { "" };
            let _ =
                writeln!(text, "# TYPE bulkhead_fleet_{name} {kind}\n# HELP bulkhead_fleet_{name} {help}");
            for (bulkhead, counters) in &self.bulkheads {
                let value = number(counters).load(Ordering::Relaxed);
                let _ = writeln!(text, "bulkhead_fleet_{name}{suffix}{{bulkhead=\"{bulkhead}\"}} {value}");
            }
        }
        text.push_str(
            "# TYPE bulkhead_fleet_stored_ratio gauge\n# HELP bulkhead_fleet_stored_ratio Used fraction of a stream's capacity.\n",
        );
        for (stream, ratio) in &*self.stored.lock().unwrap_or_else(PoisonError::into_inner) {
            let _ = writeln!(text, "bulkhead_fleet_stored_ratio{{stream=\"{stream}\"}} {ratio}");
        }
        let _ = write!(
            text,
            "# TYPE bulkhead_fleet_clock_offset_seconds gauge\n# HELP bulkhead_fleet_clock_offset_seconds Server \
             clock minus host clock, in seconds.\nbulkhead_fleet_clock_offset_seconds {clock_offset_seconds}\n# EOF\n"
        );
        text
    }
}
