//! Workers with a maximum number of jobs (`recycle.jobs`), and their successors.

use std::time::Duration;

use bulkhead_policy::{RecycleReason, WorkerId};

use super::slots::SlotState;
use super::{Cause, Model, Phase, Worker};

impl Model {
    /// Returns the number of jobs that the worker can still be given under `recycle.jobs`.
    pub(super) fn jobs_left(&self, worker: &Worker) -> usize {
        let left = self.limits.recycle.jobs.map(|most| most.saturating_sub(worker.begun));
        left.map_or(usize::MAX / 2, |left| left as usize)
    }

    /// Records that a worker was given a job.
    pub(super) fn begin(&mut self, id: WorkerId) {
        self.workers.entry(id.place).and_modify(|worker| worker.begun += 1);
        let most = self.limits.recycle.jobs.unwrap_or(u64::MAX);
        assert!(self.workers[&id.place].begun <= most, "{id:?} was given more than {most} jobs");
        self.reach_job_limit(id.place);
    }

    pub(super) fn apply_job_limit(&mut self) {
        self.step.is_recounted = true;
        let places: Vec<u32> = self.workers.keys().copied().collect();
        places.into_iter().for_each(|place| self.reach_job_limit(place));
    }

    /// Records that a worker has been given its last job. The slot's standby, if any, takes over.
    fn reach_job_limit(&mut self, place: u32) {
        let worker = &self.workers[&place];
        let is_at_work = worker.phase == Phase::Ready && worker.is_alive() && self.is_current(worker);
        if is_at_work && self.jobs_left(worker) == 0 {
            self.workers.entry(place).and_modify(|worker| worker.is_at_job_limit = true);
            self.hand_over_to_standby(place);
        }
    }

    pub(super) fn hand_over_to_standby(&mut self, place: u32) -> bool {
        let slot = self.workers[&place].slot as usize;
        let SlotState::Occupied { current, successor: Some(next) } = self.slots[slot].state else {
            return false;
        };
        let standby = &self.workers[&next];
        let is_ready = standby.phase == Phase::Ready && standby.is_alive();
        if current == place && is_ready {
            self.coverage.see("standby takes over");
            self.slots[slot].state = SlotState::Occupied { current: next, successor: None };
            return true;
        }
        false
    }

    pub(super) fn stopping(&mut self, id: WorkerId) {
        let is_ready = |worker: &Worker| worker.phase == Phase::Ready && worker.is_alive();
        if self.live(id).is_some_and(is_ready) {
            self.hand_over_to_standby(id.place);
        }
    }

    /// Handles a report that a worker is being replaced. If a standby is waiting in the worker's slot, the standby
    /// takes over, whatever the reason for the replacement.
    pub(super) fn recycled(&mut self, pid: u32, reason: RecycleReason) {
        let worker = self.workers.values().find(|worker| worker.pid == Some(pid) && self.is_current(worker));
        let Some((place, slot)) = worker.map(|worker| (worker.id.place, worker.slot)) else { return };
        if reason == RecycleReason::Jobs && !self.workers[&place].is_at_job_limit {
            assert!(self.has_standby_waited(slot), "slot {slot}: the standby took over too early");
            self.coverage.see("standby takes over an idle slot");
            assert!(self.hand_over_to_standby(place) && self.workers[&place].jobs.is_empty());
        } else if reason != RecycleReason::Jobs && self.hand_over_to_standby(place) {
            self.coverage.see("standby takes over for another reason");
            self.check_standby(slot, place);
        }
    }

    /// Returns true if a standby has been waiting for at least one second and for at least four times as long as it
    /// took to start.
    pub(super) fn has_standby_waited(&self, slot: u32) -> bool {
        let of_slot = self.workers.values().filter(|worker| worker.slot == slot);
        of_slot.filter(|worker| self.is_standby(worker)).any(|worker| {
            let ready_at = worker.ready_at.unwrap_or(self.now);
            let kill_delay = (ready_at.since(worker.spawned_at) * 4).max(Duration::from_secs(1));
            ready_at + kill_delay <= self.now
        })
    }

    /// Checks that there is a reason other than `recycle.jobs` to replace a healthy worker.
    pub(super) fn check_standby(&mut self, slot: u32, current: u32) {
        let worker = &self.workers[&current];
        let recycle = &self.limits.recycle;
        let is_due = match self.step.cause {
            Cause::Memory(id) => id == worker.id && recycle.rss.is_some(),
            Cause::Tick => recycle.age.is_some_and(|age| worker.spawned_at + age <= self.now),
            _ => false,
        };
        if is_due {
            assert!(worker.next_replacement_at <= self.now, "the next successor was started too soon");
            return;
        }
        // Even a worker that was started for this reason may be unable to raise its maximum number of concurrent jobs.
        let is_behind = worker.sent_max_in_flight < self.limits.max_in_flight;
        assert!(self.rolling.remove(&slot) || is_behind, "slot {slot} was recycled without a reason");
        let on_their_way = self.workers.values().filter(|w| self.is_successor(w) && !self.is_standby(w));
        assert_eq!(on_their_way.count(), 0, "a rolling restart must replace one worker at a time");
    }

    /// Returns true if the slot's worker can run more jobs before its standby takes over.
    pub(super) fn has_jobs_left(&self, current: u32, next: u32) -> bool {
        let is_counted = self.workers[&next].stands_by && self.limits.recycle.jobs.is_some();
        let worker = &self.workers[&current];
        let is_at_work = worker.phase == Phase::Ready && worker.is_alive();
        is_counted && is_at_work && self.jobs_left(worker) > 0
    }

    /// Checks that once a restart has ended, no worker from before the restart runs jobs. The restart continues while
    /// any worker is being replaced or any spare is starting, and ends early if a replacement fails.
    pub(super) fn check_outdated(&self) {
        if !self.is_restarting || self.is_stopping() {
            return;
        }
        let is_replacing = |worker: &Worker| {
            let is_leaving = worker.left.is_none() && !self.is_wanted(worker);
            is_leaving || self.is_successor(worker) && !self.is_standby(worker)
        };
        if self.is_waiting_for_spare() || self.workers.values().any(is_replacing) {
            return;
        }
        let is_at_work =
            |worker: &&Worker| worker.phase == Phase::Ready && worker.is_alive() && self.is_current(worker);
        let outdated = self.workers.values().filter(is_at_work).find(|worker| worker.is_outdated);
        let id = outdated.map(|worker| worker.id);
        assert_eq!(id, None, "the worker was started before the restart and is not being replaced");
    }

    fn is_successor(&self, worker: &Worker) -> bool {
        let state = self.slots[worker.slot as usize].state;
        matches!(state, SlotState::Occupied { successor, .. } if successor == Some(worker.id.place))
    }

    /// Returns true if the worker is a ready successor.
    pub(super) fn is_standby(&self, worker: &Worker) -> bool {
        worker.phase == Phase::Ready && worker.is_alive() && self.is_successor(worker)
    }

    /// Returns true if the worker is a spare or standby that is no longer needed.
    pub(super) fn is_surplus_standby(&self, worker: &Worker) -> bool {
        let is_behind = self.step.is_resized && worker.sent_max_in_flight < self.limits.max_in_flight;
        let is_unwanted = self.step.is_restarted || self.step.is_recounted || is_behind;
        let is_dismissed_spare =
            self.is_ready_spare(worker) && (self.step.is_restarted || is_behind) && !self.is_stopping();
        self.is_standby(worker) && is_unwanted && !self.is_stopping() || is_dismissed_spare
    }

    /// Returns true if the worker has been given its last job and should have a successor, but has none.
    pub(super) fn needs_successor(&self, worker: &Worker) -> bool {
        let is_exiting = matches!(worker.phase, Phase::Draining { .. }) && worker.is_alive();
        let is_other = |other: &&Worker| other.id != worker.id && Self::is_in(other, worker.slot);
        let others = self.workers.values().filter(is_other).count();
        let may_be = self.is_current(worker) && !self.is_stopping() && worker.next_replacement_at <= self.now;
        // A silent worker does not get a successor before the cause of the silence is known.
        let has_reserve = self.limits.start.spares > 0;
        worker.is_at_job_limit
            && is_exiting
            && others == 0
            && may_be
            && !has_reserve
            && !self.is_silent(worker)
    }
}
