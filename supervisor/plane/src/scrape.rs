//! A consistent copy of the numbers behind the metrics. The data plane's thread takes the copy, and another
//! thread renders the text.

use std::sync::Arc;

use bulkhead_api::{Adaptive, Service};
use bulkhead_policy::{BreakerState, BulkheadState, WorkerSummary};

use crate::bulkhead_counters::BulkheadCounters;
use crate::possible_series::PossibleSeries;

/// All numbers of the data plane at one moment.
#[derive(Debug)]
pub struct Scrape {
    /// Number of connected clients.
    pub clients: u64,
    /// Bytes that count towards `max_buffered`.
    pub buffered_bytes: u64,
    /// Total size of all memory files, in bytes.
    pub memory_file_bytes: u64,
    /// Tenants with a label, sorted.
    pub labels: Arc<[String]>,
    /// Bulkheads that accept jobs or still have some.
    pub bulkheads: Vec<BulkheadNumbers>,
}

/// Counts of configuration reloads.
#[derive(Clone, Copy, Debug)]
pub struct ReloadCounts {
    pub succeeded: u64,
    pub rejected: u64,
    /// True if the last reload succeeded. True before the first reload.
    pub was_successful: bool,
}

impl Default for ReloadCounts {
    fn default() -> Self {
        Self { succeeded: 0, rejected: 0, was_successful: true }
    }
}

#[derive(Debug)]
pub struct BulkheadNumbers {
    pub name: Arc<str>,
    pub counters: BulkheadCounters,
    /// Series that can grow under the configuration.
    pub possible: PossibleSeries,
    pub active: u64,
    pub limit: u64,
    /// State of the adaptive limit, if there is one.
    pub adaptive: Option<Adaptive>,
    pub queued: u64,
    pub queue_capacity: u64,
    /// State of the breaker; with isolated tenants, the most severe one.
    pub breaker: BreakerState,
    /// Aggregate state of the workers.
    pub state: BulkheadState,
    /// Service level of the last minute.
    pub service: Service,
    /// Workers. The slots of isolated tenants are numbered consecutively.
    pub workers: Vec<WorkerSummary>,
    /// Number of slots shown, with or without a worker.
    pub slots: u32,
    /// Memory at which a worker is replaced or ended, in bytes.
    pub memory_limit: Option<u64>,
}
