//! Places withheld from the quotas of tenants whose jobs have taken down a worker.

use bulkhead_policy::{KillReason, TenantId, WorkerId};
use bulkhead_shared::JobId;

use super::slots::SlotState;
use super::{Model, Phase};

impl Model {
    /// Withholds one place in the quota of each tenant whose jobs may have caused this worker's death.
    pub(super) fn withhold(&mut self, id: WorkerId, killed: Option<&KillReason>) {
        let worker = &self.workers[&id.place];
        if !self.is_current(worker)
            || worker.killed_before_replacement
            || self.limits.tenants.max_in_flight.is_none()
        {
            return;
        }
        let (late, in_time): (Vec<JobId>, Vec<JobId>) =
            worker.jobs.iter().partition(|id| self.jobs[id].is_overdue);
        let suspects = match killed {
            None | Some(KillReason::Hung | KillReason::Protocol(_)) => {
                worker.jobs.iter().copied().filter(|id| !self.jobs[id].is_unread).collect()
            }
            Some(KillReason::Deadline) if late.is_empty() => in_time,
            Some(KillReason::Deadline) => late,
            Some(_) => Vec::new(),
        };
        let mut tenants: Vec<TenantId> = suspects.iter().map(|id| self.jobs[id].tenant).collect();
        tenants.sort();
        tenants.dedup();
        self.coverage.see(match tenants.len() {
            0 => "death withholds no permit",
            1 => "death withholds the permit of a tenant",
            _ => "death withholds permits of several tenants",
        });
        let (slot, until) = (worker.charged_slot as usize, self.now + self.limits.start.ready);
        self.withheld.extend(tenants.into_iter().map(|tenant| (tenant, slot, until)));
    }

    /// Returns the number of permits withheld from a tenant because the tenant's jobs have taken down workers.
    pub(super) fn withheld_from(&self, tenant: TenantId) -> usize {
        self.withheld.iter().filter(|&&(of, slot, _)| of == tenant && self.is_without_worker(slot)).count()
    }

    /// Returns true if a slot needs a ready worker but has none.
    fn is_without_worker(&self, slot: usize) -> bool {
        let entry = &self.slots[slot];
        let is_ready = match entry.state {
            SlotState::Occupied { current, .. } => {
                let worker = &self.workers[&current];
                worker.phase == Phase::Ready && worker.is_alive()
            }
            _ => false,
        };
        entry.is_live() && !entry.is_spare_slot && !is_ready && !self.is_stopping()
    }

    /// Gives back each withheld place once a new worker is ready in the slot whose worker died. If that new worker dies
    /// later, the place is not withheld again.
    pub(super) fn release_withheld(&mut self) {
        let mut withheld = std::mem::take(&mut self.withheld);
        let before = withheld.len();
        withheld.retain(|&(_, slot, _)| self.is_without_worker(slot));
        if withheld.len() < before {
            self.coverage.see("withheld permit returned");
        }
        self.withheld = withheld;
    }
}
