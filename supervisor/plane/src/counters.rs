//! Counters that the data plane and the control plane share, without a lock.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};

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
}
