//! Permits: the number of jobs that may run, the number that do, and the workers that may take the next job.
//!
//! The limit holds across generations of workers. Jobs that still run in a replaced worker are an overcommit
//! of the slot. The overcommit is charged first to the part of the slot's share that is not in the limit.
//! While no worker is ready, this is the whole share. Next comes the slot's new worker. The other slots bear
//! only an excess over the slot's share.

use super::Bulkhead;
use crate::messages::WorkerId;
use crate::workers::{Exclusivity, Phase, Role, SlotState};

impl<T> Bulkhead<T> {
    /// Updates the limit and the table of workers that may take a job after a change of a worker.
    pub(super) fn refresh(&mut self, place: u32) {
        let Some(worker) = self.workers[place as usize].as_mut() else { return };
        let is_available = worker.is_available();
        let level = worker.jobs.len() as u32;
        // Prefetched jobs may already have begun.
        let left = worker.jobs_left(&self.limits).saturating_sub(worker.prefetched.len() as u64);
        let left = u32::try_from(left).unwrap_or(u32::MAX);
        let capacity =
            self.limits.max_in_flight.min(worker.sent_max_in_flight).min(level.saturating_add(left));
        if !is_available && worker.exclusivity == Exclusivity::Draining {
            worker.exclusivity = Exclusivity::Shared;
            self.reserved = None;
        }
        let takes_jobs = is_available && worker.exclusivity == Exclusivity::Shared && !worker.is_stalled;
        let load_level = (takes_jobs && level < capacity).then_some(level);
        self.load.set_level(place, &mut worker.load_level, load_level);
        let permits = if is_available { capacity } else { 0 };
        self.permits =
            self.permits + u64::from(permits) - u64::from(std::mem::replace(&mut worker.permits, permits));
        let stalls = is_available && worker.is_stalled;
        self.stalled = self.stalled + u32::from(stalls)
            - u32::from(std::mem::replace(&mut worker.counted_as_stalled, stalls));
        if worker.counts_towards_limit != is_available {
            worker.counts_towards_limit = is_available;
            self.ready = if is_available { self.ready + 1 } else { self.ready - 1 };
        }
        let overcommit =
            if worker.role == Role::Replaced && !worker.killed_before_replacement { level } else { 0 };
        if worker.role == Role::Replaced
            && worker.phase == Phase::Draining
            && !worker.has_released_slot
            && worker.is_idle()
        {
            self.finished_replaced.push(place);
        }
        let (slot, charged_slot) = (worker.slot, worker.charged_slot);
        let before = std::mem::replace(&mut worker.overcommit, overcommit);
        self.slots[charged_slot as usize].overcommit =
            self.slots[charged_slot as usize].overcommit + overcommit - before;
        self.count_in_use(slot);
        if charged_slot != slot {
            self.count_in_use(charged_slot);
        }
        if self.limits.lookahead.is_zero() && self.prefetched == 0 {
            return;
        }
        self.update_prefetch_level(place);
        let has_ahead =
            self.workers[place as usize].as_ref().is_some_and(|worker| !worker.prefetched.is_empty());
        if has_ahead && !takes_jobs {
            self.to_recall.push(place);
        }
    }

    /// Removes a dead worker from the tables and from the limit.
    pub(super) fn remove_worker(&mut self, place: u32) -> Option<crate::workers::Worker> {
        let mut worker = self.workers[place as usize].take()?;
        self.load.set_level(place, &mut worker.load_level, None);
        self.prefetch_candidates.set_level(place, &mut worker.prefetch_level, None);
        if self.reserved == Some(place) {
            self.reserved = None;
        }
        self.ready -= u32::from(worker.counts_towards_limit);
        self.stalled -= u32::from(worker.counted_as_stalled);
        self.permits -= u64::from(worker.permits);
        self.slots[worker.charged_slot as usize].overcommit -= worker.overcommit;
        self.count_in_use(worker.slot);
        self.count_in_use(worker.charged_slot);
        Some(worker)
    }

    /// Updates the number of permits that the workers of a slot use.
    pub(super) fn count_in_use(&mut self, slot: u32) {
        let entry = &self.slots[slot as usize];
        let (current, share) = match entry.state {
            // Workers of the reserve have no permits. Jobs that still run there are charged to the last slot
            // of each worker.
            _ if entry.is_spare_slot => (None, 0),
            SlotState::Occupied(place) => (self.workers[place as usize].as_ref(), self.limits.max_in_flight),
            SlotState::Closed => (None, 0),
            _ => (None, self.limits.max_in_flight),
        };
        let level = current
            .map_or(0, |worker| if worker.killed_before_replacement { 0 } else { worker.jobs.len() as u32 });
        let (taken, permits, overcommit) = match current.filter(|worker| worker.is_available()) {
            // A job that runs alone uses all permits of its worker.
            Some(worker) if worker.exclusivity != Exclusivity::Shared => {
                (level.max(worker.permits), worker.permits, entry.overcommit)
            }
            Some(worker) => (level, worker.permits, entry.overcommit),
            None => (0, 0, level + entry.overcommit),
        };
        // The part of the slot's share that is not in the limit bears as much of the overcommit as it can.
        // While new limits are being applied, a worker may still have the number of permits from before.
        let in_use = taken + overcommit.saturating_sub(share.saturating_sub(permits));
        let held = taken + overcommit;
        let entry = &mut self.slots[slot as usize];
        self.permits_held = self.permits_held + held - std::mem::replace(&mut entry.permits_held, held);
        self.in_use = self.in_use + in_use - std::mem::replace(&mut entry.in_use, in_use);
    }

    /// Returns the worker for the next job. `None` if no permit is free, for example because more jobs run
    /// than the limit allows.
    pub(super) fn next_worker(&self) -> Option<u32> {
        self.load.least_loaded().filter(|_| u64::from(self.in_use) < self.limit())
    }

    /// Returns the worker for a job with a preferred worker.
    pub(super) fn next_worker_for(&self, preferred_worker: Option<WorkerId>) -> Option<u32> {
        let next = self.next_worker()?;
        let is_able = |id: &WorkerId| {
            let worker = self.workers.get(id.place as usize).and_then(Option::as_ref);
            worker.is_some_and(|worker| worker.id == *id && worker.load_level.is_some())
        };
        Some(preferred_worker.filter(is_able).map_or(next, |id| id.place))
    }

    /// Returns a worker without jobs if there is a permit for a job that runs alone. The permits of the
    /// worker reserved for a suspect count as free.
    pub(super) fn idle_worker(&self) -> Option<u32> {
        let idle = |place: u32| {
            self.workers[place as usize]
                .as_ref()
                .filter(|worker| worker.jobs.is_empty() && !worker.is_stalled)
        };
        let next = self.next_worker().filter(|&place| idle(place).is_some());
        next.or_else(|| {
            let place = self.reserved?;
            let others = u64::from(self.in_use - idle(place)?.permits);
            (others < self.limit()).then_some(place)
        })
    }
}
