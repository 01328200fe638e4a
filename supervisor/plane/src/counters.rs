//! The counters and flags that the data plane and the control plane share. The data plane never blocks on them. The
//! counters of a single bulkhead are in `bulkhead_counters`, and only the data plane changes them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, PoisonError};

use bulkhead_shared::limits::BULKHEAD_NAME_BYTES_MAX;
use bulkhead_shared::{Priority, RejectReason};

/// Maximum number of distinct keys in [`RejectedJobs`] between two reads. The number is limited because clients can
/// invent any number of bulkhead names.
const REJECTED_KEYS_MAX: usize = 16 * 1024;

/// Counters shared by the data plane and the control plane.
#[derive(Debug, Default)]
pub struct SharedCounters {
    /// Number of notices dropped because the control plane did not keep up.
    pub notices_dropped: AtomicU64,
    /// Number of job spans dropped because the thread that renders spans did not keep up.
    pub spans_dropped: AtomicU64,
    /// Revision number. Incremented whenever a cached state of the bulkheads becomes outdated.
    pub revision: AtomicU64,
    pub clients: AtomicU64,
    /// Total size of payloads waiting in the data plane, in bytes.
    pub buffered: AtomicUsize,
    /// Memory used by payloads of unknown length that the control plane is still receiving, in bytes. Counts
    /// towards `max_buffered`. Written by the control plane.
    pub spooled: AtomicUsize,
    /// Part of `spooled` that is charged to the supervisor's own user.
    pub own_spool: Arc<SpoolCounters>,
    /// True once the data plane is shutting down.
    pub has_ended: AtomicBool,
    /// True once the data plane has stopped and has sent an outcome for every job that it received. Any other job was
    /// not started and gets no outcome. Stays false if the data plane fails.
    pub has_answered_all: AtomicBool,
    /// Number of bytes guaranteed to each user or token for payloads of unknown length, regardless of how much
    /// memory other clients use.
    pub spool_share: AtomicUsize,
    /// The keeper's PID.
    pub keeper_pid: AtomicU32,
    /// Jobs rejected by the HTTP interface before they reached the data plane.
    pub rejected_jobs: RejectedJobs,
}

/// Memory used by one user's or token's payloads of unknown length while the control plane receives them.
#[derive(Debug, Default)]
pub struct SpoolCounters {
    /// Memory used by the payloads, in bytes.
    pub held: AtomicUsize,
    /// Number of bytes that the control plane must free because the data plane needs this memory for other clients.
    pub bytes_to_free: AtomicUsize,
    /// Notified when `bytes_to_free` grows.
    pub free_requested: tokio::sync::Notify,
}

/// Key under which a job rejected by the HTTP interface is counted.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct RejectedJob {
    pub bulkhead: String,
    /// Tenant for which the job is counted. Empty if the client has no permission for the job's tenant.
    pub tenant: String,
    pub priority: Priority,
    pub reason: RejectReason,
}

/// Number of rejected jobs, by bulkhead, tenant, priority and reason. The data plane collects these counts before it
/// replies to a request for counters.
#[derive(Debug, Default)]
pub struct RejectedJobs(Mutex<HashMap<RejectedJob, u64>>);

impl RejectedJobs {
    pub fn count(&self, job: RejectedJob) {
        if job.bulkhead.len() > BULKHEAD_NAME_BYTES_MAX {
            return;
        }
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_full = counts.len() >= REJECTED_KEYS_MAX;
        match counts.entry(job) {
            Entry::Occupied(mut entry) => *entry.get_mut() += 1,
            Entry::Vacant(entry) if !is_full => drop(entry.insert(1)),
            Entry::Vacant(_) => {}
        }
    }

    /// Removes and returns all counts. If another thread holds the lock, returns an empty map and leaves the
    /// counts for a later call.
    pub fn take(&self) -> HashMap<RejectedJob, u64> {
        self.0.try_lock().map(|mut counts| std::mem::take(&mut *counts)).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_table_still_counts_its_keys() {
        let rejected = RejectedJobs::default();
        let job = |name: &str| RejectedJob {
            bulkhead: name.to_owned(),
            tenant: String::new(),
            priority: Priority::Normal,
            reason: RejectReason::NotFound,
        };
        let count = |name: &str| rejected.count(job(name));
        (0..=REJECTED_KEYS_MAX).for_each(|number| count(&number.to_string()));
        count("0");
        let counts = rejected.take();
        let of = |name: &str| counts.get(&job(name));
        assert_eq!((counts.len(), of("0")), (REJECTED_KEYS_MAX, Some(&2)));
        assert_eq!(of(&REJECTED_KEYS_MAX.to_string()), None);
    }
}
