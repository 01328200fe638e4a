//! Counters that the data plane and the control plane share. The data plane never waits for one.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};
use std::sync::{Mutex, PoisonError};

use bulkhead_shared::limits::BULKHEAD_NAME_BYTES_MAX;
use bulkhead_shared::{Priority, RejectReason};

/// Kinds of refused jobs that are counted apart until the data plane has taken the counts: a few for each bulkhead, and
/// names that there are not.
const REFUSED_KINDS_MAX: usize = 16 * 1024;

/// Counts that the data plane keeps for the control plane to look at.
#[derive(Debug, Default)]
pub struct SharedCounters {
    /// Notices that were dropped since the control plane did not keep up.
    pub notices_dropped: AtomicU64,
    /// Spans of jobs that were dropped since they were not taken fast enough.
    pub spans_dropped: AtomicU64,
    /// Counts what changed the state of bulkheads by order, or once and for all.
    pub revision: AtomicU64,
    /// Clients that are connected.
    pub clients: AtomicU64,
    /// Bytes of payloads that wait in the data plane.
    pub buffered: AtomicUsize,
    /// Bytes of payloads that wait in the control plane, where they come in. They count with the others: it is
    /// the control plane that keeps this one.
    pub spooled: AtomicUsize,
    /// Whether the data plane gives its last answers, or has: what it has not heard of by then, it never will.
    pub is_over: AtomicBool,
    /// So many of these are to be given up, since others need the room.
    pub spool_unwanted: AtomicUsize,
    /// Called when some are.
    pub spool_called: tokio::sync::Notify,
    /// So many of them may be there, however much others hold.
    pub spool_share: AtomicUsize,
    /// The keeper's process.
    pub keeper: AtomicU32,
    /// Jobs that were refused as they came in by HTTP, of which the data plane has not heard.
    pub refused: RefusedJobs,
}

/// Jobs by bulkhead, priority and why they were refused. The data plane takes the counts before it next answers.
#[derive(Debug, Default)]
pub struct RefusedJobs(Mutex<HashMap<(String, Priority, RejectReason), u64>>);

impl RefusedJobs {
    /// Counts one.
    pub fn count(&self, bulkhead: &str, priority: Priority, reason: RejectReason) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if bulkhead.len() <= BULKHEAD_NAME_BYTES_MAX && counts.len() < REFUSED_KINDS_MAX {
            *counts.entry((bulkhead.to_owned(), priority, reason)).or_default() += 1;
        }
    }

    /// Takes the counts, unless one is being added: then they are there the next time.
    pub fn take(&self) -> HashMap<(String, Priority, RejectReason), u64> {
        self.0.try_lock().map(|mut counts| std::mem::take(&mut *counts)).unwrap_or_default()
    }
}
