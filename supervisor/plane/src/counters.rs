//! Counters shared by the data plane and the control plane. The data plane never blocks on them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};
use std::sync::{Mutex, PoisonError};

use bulkhead_shared::limits::BULKHEAD_NAME_BYTES_MAX;
use bulkhead_shared::{Priority, RejectReason};

/// Maximum number of distinct keys in [`RejectedJobs`] between two reads. Each bulkhead needs a few, and so do
/// unknown names.
const REJECTED_KEYS_MAX: usize = 16 * 1024;

/// Counters shared by both planes.
#[derive(Debug, Default)]
pub struct SharedCounters {
    /// Notices dropped because the control plane did not keep up.
    pub notices_dropped: AtomicU64,
    /// Job spans dropped because the span thread did not keep up.
    pub spans_dropped: AtomicU64,
    /// Incremented when the cached state of bulkheads is no longer valid.
    pub revision: AtomicU64,
    /// Number of connected clients.
    pub clients: AtomicU64,
    /// Size of payloads waiting in the data plane, in bytes.
    pub buffered: AtomicUsize,
    /// Size of payloads being received by the control plane, in bytes. Counts towards `max_buffered`. Written
    /// by the control plane.
    pub spooled: AtomicUsize,
    /// True once the data plane is ending. Jobs not received by then get no outcome.
    pub has_ended: AtomicBool,
    /// Number of bytes that the control plane must free, because others need the memory.
    pub spool_bytes_to_free: AtomicUsize,
    /// Notified when `spool_bytes_to_free` grows.
    pub spool_free_requested: tokio::sync::Notify,
    /// Number of bytes that the control plane can always hold, however much memory the data plane uses.
    pub spool_share: AtomicUsize,
    /// Process id of the keeper.
    pub keeper_pid: AtomicU32,
    /// Jobs rejected by the HTTP interface before they reached the data plane.
    pub rejected_jobs: RejectedJobs,
}

/// Number of rejected jobs by bulkhead, priority and reason. The data plane reads the counts before it next
/// replies.
#[derive(Debug, Default)]
pub struct RejectedJobs(Mutex<HashMap<(String, Priority, RejectReason), u64>>);

impl RejectedJobs {
    pub fn count(&self, bulkhead: &str, priority: Priority, reason: RejectReason) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if bulkhead.len() <= BULKHEAD_NAME_BYTES_MAX && counts.len() < REJECTED_KEYS_MAX {
            *counts.entry((bulkhead.to_owned(), priority, reason)).or_default() += 1;
        }
    }

    /// Takes the counts without blocking. If the lock is held, the counts are returned by a later call.
    pub fn take(&self) -> HashMap<(String, Priority, RejectReason), u64> {
        self.0.try_lock().map(|mut counts| std::mem::take(&mut *counts)).unwrap_or_default()
    }
}
