//! The types of a consistent copy of the values shown in the metrics. The data plane fills the copy in one iteration of
//! its event loop. `observe::metrics` in the control plane converts the copy to text.

use std::sync::Arc;

use bulkhead_api::{Adaptive, Service};
use bulkhead_policy::{BreakerState, BulkheadState, WorkerSummary};

use crate::bulkhead_counters::BulkheadCounters;
use crate::possible_series::PossibleSeries;

/// Values copied from the data plane, all within one iteration of its event loop.
#[derive(Debug)]
pub struct Scrape {
    /// Number of connected clients.
    pub clients: u64,
    /// Memory that counts towards `max_buffered`, in bytes.
    pub buffered_bytes: u64,
    /// Total size of all memory files, in bytes.
    pub memory_file_bytes: u64,
    /// Sorted names of the tenants that have a separate label.
    pub labels: Arc<[String]>,
    /// Values for each bulkhead that accepts jobs or still has jobs.
    pub bulkheads: Vec<BulkheadNumbers>,
}

/// Counts of configuration reloads, by result.
#[derive(Clone, Copy, Debug)]
pub struct ReloadCounts {
    pub succeeded: u64,
    pub rejected: u64,
    /// True if the last reload succeeded, or if there has been no reload yet.
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
    /// Determines which metric series can exist under the configuration.
    pub possible: PossibleSeries,
    pub active: u64,
    pub limit: u64,
    /// State of the adaptive limit, or `None` if the bulkhead has no adaptive limit.
    pub adaptive: Option<Adaptive>,
    pub queued: u64,
    pub queue_capacity: u64,
    /// State of the breaker. If tenants are isolated, this is the most severe state among the tenants' breakers.
    pub breaker: BreakerState,
    /// State of the bulkhead, derived from the states of all workers.
    pub state: BulkheadState,
    /// Service level, computed from the outcomes of the last minute.
    pub service: Service,
    /// Summaries of all workers. The slots of isolated tenants are numbered consecutively.
    pub workers: Vec<WorkerSummary>,
    /// Number of slots shown in the metrics, including slots that have no worker.
    pub slots: u32,
    /// Memory usage in bytes at which a worker is replaced or killed, or `None` if there is no limit.
    pub memory_limit: Option<u64>,
}
