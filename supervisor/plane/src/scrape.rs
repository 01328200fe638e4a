//! The numbers behind the metrics, as they were at one moment: copied on the data plane's thread, written as
//! text on another one.

use std::sync::Arc;

use bulkhead_api::{Adaptive, Service};
use bulkhead_policy::{BreakerState, BulkheadState, StaffView};

use crate::possible::Possible;
use crate::tally::Tally;

/// All numbers of the data plane, of one moment.
#[derive(Debug)]
pub struct Scrape {
    /// Clients that are connected.
    pub clients: u64,
    /// Bytes that count towards `max_buffered`.
    pub buffered_bytes: u64,
    /// Bytes of memory files.
    pub memory_file_bytes: u64,
    /// The tenants that have a label, sorted.
    pub labels: Arc<[String]>,
    /// The bulkheads that take jobs or have some left.
    pub bulkheads: Vec<BulkheadNumbers>,
}

/// What became of attempts to put another configuration in force.
#[derive(Clone, Copy, Debug)]
pub struct ReloadCounts {
    pub succeeded: u64,
    pub rejected: u64,
    /// Whether the last one succeeded; the file that the supervisor was started with has.
    pub was_successful: bool,
}

impl Default for ReloadCounts {
    fn default() -> Self {
        Self { succeeded: 0, rejected: 0, was_successful: true }
    }
}

/// The numbers of one bulkhead.
#[derive(Debug)]
pub struct BulkheadNumbers {
    pub name: Arc<str>,
    pub tally: Tally,
    /// What can be counted as it is configured.
    pub possible: Possible,
    pub active: u64,
    pub limit: u64,
    /// The limit that follows how long jobs take, if there is one.
    pub adaptive: Option<Adaptive>,
    pub queued: u64,
    pub queue_capacity: u64,
    /// The breaker that matters most.
    pub breaker: BreakerState,
    /// The state of its workers.
    pub state: BulkheadState,
    /// How well it serves.
    pub service: Service,
    /// Its workers; the slots of tenants that are apart are numbered through.
    pub workers: Vec<StaffView>,
    /// Slots that are shown, whether they have a worker or not.
    pub slots: u32,
    /// How many bytes a worker may hold before it is replaced or ended.
    pub memory_limit: Option<u64>,
}
