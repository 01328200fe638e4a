//! Permits during an upgrade, in which two supervisors run jobs of the same bulkhead. The previous supervisor tells the
//! next one how many permits it still needs, and this number only falls. So both together never exceed the limit.

use super::Bulkhead;
use crate::poison::Digest;
use crate::time::Time;

/// Permits that another supervisor uses, or leaves to this one.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Handover {
    /// Number of permits that the previous supervisor still needs.
    pub(super) predecessor_permits: u32,
    /// Number of further jobs that wait in the previous supervisor.
    pub(super) predecessor_waiting: u32,
    /// Maximum number of permits that this supervisor may use, or `None` if it has no successor.
    pub(super) permits_max: Option<u32>,
}

impl<T> Bulkhead<T> {
    /// Reduces the number of permits by those that the other supervisor of an upgrade needs.
    pub(super) fn own_permits(&self, permits: u64) -> u64 {
        let Handover { predecessor_permits, permits_max, .. } = self.handover;
        let permits = permits.saturating_sub(predecessor_permits.into());
        permits_max.map_or(permits, |most| permits.min(most.into()))
    }

    /// Returns the number of permits that the jobs of this supervisor need, and the number of jobs that wait in addition.
    /// `incoming` is the number of jobs whose payload has not arrived yet.
    pub fn needed_permits(&self, incoming: u32) -> (u32, u32) {
        let jobs = self.jobs.len() + incoming;
        let configured = u64::from(self.limits.processes) * u64::from(self.limits.max_in_flight);
        let most = configured.min(self.adaptive_bound());
        let most = u32::try_from(most).unwrap_or(u32::MAX).max(self.workers.totals().in_use);
        let permits = jobs.min(most);
        (permits, jobs - permits)
    }

    /// Returns the payloads in quarantine.
    pub fn quarantined_payloads(&self, now: Time) -> Vec<Digest> {
        self.poison.quarantined(now).collect()
    }
}
