//! Divides a bulkhead's permits between the two supervisors in an upgrade. The predecessor reports to the successor how
//! many permits it still needs. This number can only decrease, so the two supervisors together never exceed the limit.
//! This module only computes the numbers; `wiring/handover.rs` of the data plane exchanges them.

use super::Bulkhead;
use crate::poison::Digest;
use crate::time::Time;

/// Restrictions on this supervisor's permits during an upgrade.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Handover {
    /// Number of permits that the predecessor still needs.
    pub(super) predecessor_permits: u32,
    /// Number of jobs in the predecessor that are waiting for a permit.
    pub(super) predecessor_waiting: u32,
    /// Maximum number of permits that this supervisor can use, or `None` if there is no successor.
    pub(super) permits_max: Option<u32>,
}

impl<T> Bulkhead<T> {
    /// Returns the number of permits, out of `permits`, that this supervisor can use. During an upgrade, the other
    /// supervisor uses the rest.
    pub(super) fn own_permits(&self, permits: u64) -> u64 {
        let Handover { predecessor_permits, permits_max, .. } = self.handover;
        let permits = permits.saturating_sub(predecessor_permits.into());
        permits_max.map_or(permits, |most| permits.min(most.into()))
    }

    /// Returns the number of permits that this supervisor's jobs need, and the number of jobs that must wait for one of
    /// these permits. `incoming` is the number of jobs whose payload has not arrived yet.
    pub fn needed_permits(&self, incoming: u32) -> (u32, u32) {
        let jobs = self.jobs.len() + incoming;
        let configured = u64::from(self.limits.processes) * u64::from(self.limits.max_in_flight);
        let most = configured.min(self.adaptive_bound());
        let most = u32::try_from(most).unwrap_or(u32::MAX).max(self.workers.totals().in_use);
        let permits = jobs.min(most);
        (permits, jobs - permits)
    }

    /// Returns the number of unfinished jobs in the predecessor.
    pub fn predecessor_jobs(&self) -> u64 {
        u64::from(self.handover.predecessor_permits) + u64::from(self.handover.predecessor_waiting)
    }

    /// Returns the number of jobs that are waiting in the predecessor. They count towards `max_queue`.
    pub fn predecessor_waiting(&self) -> u64 {
        self.handover.predecessor_waiting.into()
    }

    /// Returns the digests of the quarantined payloads, which are passed on to a successor.
    pub fn quarantined_payloads(&self, now: Time) -> Vec<Digest> {
        self.poison.quarantined(now).collect()
    }
}
