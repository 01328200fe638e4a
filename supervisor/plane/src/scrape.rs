//! The numbers behind the metrics, as they were at one moment: copied on the data plane's thread, written as
//! text on another one.

use std::sync::Arc;

use bulkhead_api::Service;
use bulkhead_policy::{BreakerState, BulkheadState, StaffView};

use crate::tally::Tally;

/// All numbers of the data plane, of one moment.
#[derive(Debug)]
pub struct Scrape {
    /// Clients that are connected.
    pub(crate) clients: u64,
    /// The tenants that have a label, sorted.
    pub(crate) labels: Arc<[String]>,
    /// The bulkheads that take jobs or have some left.
    pub(crate) bulkheads: Vec<BulkheadNumbers>,
}

/// What became of attempts to put another configuration in force.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReloadCounts {
    pub(crate) succeeded: u64,
    pub(crate) rejected: u64,
    /// Whether the last one succeeded; the file that the supervisor was started with has.
    pub(crate) was_successful: bool,
}

impl Default for ReloadCounts {
    fn default() -> Self {
        Self { succeeded: 0, rejected: 0, was_successful: true }
    }
}

/// The numbers of one bulkhead.
#[derive(Debug)]
pub(crate) struct BulkheadNumbers {
    pub(crate) name: Arc<str>,
    pub(crate) tally: Tally,
    pub(crate) active: u64,
    pub(crate) limit: u64,
    pub(crate) queued: u64,
    pub(crate) queue_capacity: u64,
    /// The breaker that matters most.
    pub(crate) breaker: BreakerState,
    /// The state of its workers.
    pub(crate) state: BulkheadState,
    /// How well it serves.
    pub(crate) service: Service,
    /// Its workers; the slots of tenants that are apart are numbered through.
    pub(crate) workers: Vec<StaffView>,
    /// Slots that are shown, whether they have a worker or not.
    pub(crate) slots: u32,
    /// How many bytes a worker may hold before it is replaced or ended.
    pub(crate) memory_limit: Option<u64>,
}
