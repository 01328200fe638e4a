//! Temporarily reduces a tenant's quota after one of the tenant's jobs has taken down a worker. Otherwise, a tenant
//! could take down one worker after another with short deadlines, cancellations or crashes. While new workers start,
//! the tenant could then use far more of the bulkhead than its quota.

use super::Bulkhead;
use crate::ending::{Ending, KillReason};
use crate::jobs::JobState;
use crate::tenants::TenantId;
use crate::time::Time;
use crate::worker::{SlotExchange, Worker};

/// A place in a tenant's quota that is withheld because one of the tenant's jobs may have caused a worker to end. The
/// place is released once another worker is ready in the ended worker's slot. For each ended worker, a tenant loses at
/// most one place.
pub(super) struct Withheld {
    tenant: TenantId,
    slot: u32,
    /// Time at which the withheld place is released even if the slot still has no ready worker.
    until: Time,
}

impl<T> Bulkhead<T> {
    /// Withholds one place in the quota of each tenant whose job may have caused a worker to end. `slot` is the
    /// worker's slot, and `jobs` contains all of the worker's jobs.
    pub(super) fn withhold(&mut self, now: Time, slot: u32, jobs: &[u32], ending: &Ending) {
        let is_late = |place| matches!(place, Some(JobState::InFlight { is_overdue: true, .. }));
        let has_late = jobs.iter().any(|&index| is_late(self.jobs.state(index)));
        let before = self.withheld.len();
        for &index in jobs {
            let job = self.jobs.get(index);
            let JobState::InFlight { is_overdue, is_unread, .. } = job.state else { continue };
            let is_suspect = match ending.killed {
                // If no job is overdue, all jobs are suspects. The worker was then killed because no client was waiting
                // for any of its jobs.
                Some(KillReason::Deadline) => is_overdue == has_late,
                _ => ending.may_be_caused_by_job() && !is_unread,
            };
            let tenant = job.tenant;
            let has_paid = self.withheld[before..].iter().any(|place| place.tenant == tenant);
            if is_suspect && !has_paid && self.quota(tenant).is_some() {
                self.withheld.push(Withheld { tenant, slot, until: now + self.limits.start.ready });
                // Keeps the tenant in the table, because the tenant's number must not change while the place is
                // withheld.
                self.tenants.add_job(tenant);
                self.tenants.get(tenant).withheld += 1;
                self.update_tenant_block(tenant);
            }
        }
    }

    /// Releases withheld places in quotas. A place is released when it expires, when its slot has a ready worker,
    /// or when its slot will not get a worker.
    pub(super) fn release_withheld(&mut self, now: Time) {
        let mut places = std::mem::take(&mut self.withheld);
        places.retain(|place| {
            let stays = place.until > now && self.awaits_worker(place.slot);
            if !stays {
                self.tenants.get(place.tenant).withheld -= 1;
                self.update_tenant_block(place.tenant);
                self.tenants.remove_job(place.tenant);
            }
            stays
        });
        self.withheld = places;
    }

    /// Applies an exchange of two slots' numbers to the withheld places.
    pub(super) fn renumber_withheld(&mut self, exchange: SlotExchange) {
        self.withheld.iter_mut().for_each(|place| exchange.apply(&mut place.slot));
    }

    fn awaits_worker(&self, slot: u32) -> bool {
        let is_ready = self.workers.of_slot(slot).is_some_and(Worker::is_ready);
        self.workers.slot(slot).is_live() && !is_ready && !self.is_stopping()
    }

    /// Returns the earliest time at which a withheld place in a quota is released.
    pub(super) fn next_withheld_release(&self) -> Option<Time> {
        self.withheld.iter().map(|place| place.until).min()
    }
}
