//! Workers with a maximum number of jobs (`recycle.jobs`). A worker that was given its last job is asked to
//! finish, and a successor takes the slot as soon as possible. The successor is started in advance, based on
//! the pace of the jobs so far, and then stays on standby until its turn.

use super::Bulkhead;
use super::life::RECYCLE_INTERVAL;
use crate::messages::{Action, KillReason, OperatorEvent, RecycleReason};
use crate::time::Time;
use crate::workers::{Phase, Role, SlotState, Worker};

impl<T> Bulkhead<T> {
    /// Handles that a worker was given a job, or that `recycle.jobs` has changed. Starts a successor if the
    /// worker will soon be given its last job. Replaces or drains a worker that was given its last job.
    pub(super) fn check_job_limit(&mut self, now: Time, place: u32, out: &mut Vec<Action<T>>) {
        let Some(worker) = self.workers[place as usize].as_mut() else { return };
        if worker.phase != Phase::Ready || worker.role != Role::Current {
            return;
        }
        let (slot, left) = (worker.slot, worker.jobs_left(&self.limits));
        if left > 0 {
            if is_near_job_limit(worker, now, left) {
                self.start_successor(now, slot, out);
            }
            return;
        }
        worker.is_at_job_limit = true;
        let pid = worker.pid.unwrap_or(0);
        out.push(Action::Report(OperatorEvent::WorkerRecycled { pid, reason: RecycleReason::Jobs }));
        match self.standby(slot) {
            Some(standby) => self.hand_over_slot(now, slot, standby, RecycleReason::Jobs, out),
            None if self.slots[slot as usize].successor.is_none()
                && let Some(spare) = self.ready_spare() =>
            {
                self.take_over(now, slot, spare, Some(RecycleReason::Jobs), out);
            }
            None => {
                // The deadline of the worker's timer depends on whether a successor is starting.
                self.start_successor(now, slot, out);
                self.drain_worker(now, place, out);
            }
        }
    }

    /// Applies `recycle.jobs` to all workers.
    pub(super) fn check_all_job_limits(&mut self, now: Time, out: &mut Vec<Action<T>>) {
        for place in 0..self.workers.len() as u32 {
            self.check_job_limit(now, place, out);
        }
    }

    /// Starts the successor of a slot's worker unless one exists or has just failed.
    fn start_successor(&mut self, now: Time, slot: u32, out: &mut Vec<Action<T>>) {
        let entry = &self.slots[slot as usize];
        // With spares, the next spare takes over.
        let has_room = entry.successor.is_none() && entry.replaced == 0 && !self.has_spares();
        if has_room && self.worker_of(slot).is_some_and(|worker| now >= worker.next_replacement_at) {
            self.spawn(now, slot, Role::Successor(RecycleReason::Jobs), out);
        }
    }

    /// Starts the successor of a slot's worker if that worker was given its last job.
    pub(super) fn start_successor_at_job_limit(&mut self, now: Time, slot: u32, out: &mut Vec<Action<T>>) {
        if let SlotState::Occupied(place) = self.slots[slot as usize].state
            && self.workers[place as usize].as_ref().is_some_and(is_leaving_at_job_limit)
        {
            self.start_successor(now, slot, out);
            self.arm(place);
        }
    }

    /// Starts the successors of all workers that were given their last jobs, because earlier failures no
    /// longer count.
    pub(super) fn start_successors_at_job_limit(&mut self, now: Time, out: &mut Vec<Action<T>>) {
        for slot in 0..self.slots.len() as u32 {
            self.start_successor_at_job_limit(now, slot, out);
        }
    }

    /// Returns the time of the next attempt to start a successor for a worker that was given its last job.
    /// For a successor on standby, returns the time of the next check for an idle slot.
    pub(super) fn successor_check_at(&self, worker: &Worker) -> Option<Time> {
        let slot = &self.slots[worker.slot as usize];
        let may_follow = !self.is_stopping() && !self.has_spares();
        let has_room = slot.successor.is_none() && slot.replaced == 0 && may_follow;
        let is_standby = worker.phase == Phase::Ready && matches!(worker.role, Role::Successor(_));
        (is_standby || is_leaving_at_job_limit(worker) && has_room).then_some(worker.next_replacement_at)
    }

    pub(super) fn retry_successor(&mut self, now: Time, place: u32, out: &mut Vec<Action<T>>) {
        let Some(worker) = self.workers[place as usize].as_ref() else { return };
        if is_leaving_at_job_limit(worker) && self.successor_check_at(worker).is_some_and(|at| at <= now) {
            self.start_successor(now, worker.slot, out);
        }
    }

    // Successors on standby.

    /// Returns the ready successor of a slot's worker.
    pub(super) fn standby(&self, slot: u32) -> Option<u32> {
        let is_ready =
            |place: &u32| self.workers[*place as usize].as_ref().is_some_and(|w| w.phase == Phase::Ready);
        self.slots[slot as usize].successor.filter(is_ready)
    }

    /// Returns true if a ready successor must wait until the slot's worker was given its last job. The first
    /// check for an idle slot follows after four times the successor's start time. This is long enough,
    /// because the successor was started when the last job was expected within twice the start time of the
    /// worker.
    pub(super) fn must_stand_by(&mut self, now: Time, slot: u32, place: u32, reason: RecycleReason) -> bool {
        let waits = self.has_jobs_left(slot, reason);
        if waits && let Some(worker) = self.workers[place as usize].as_mut() {
            worker.next_replacement_at = now + (now.since(worker.spawned_at) * 4).max(RECYCLE_INTERVAL);
        }
        waits
    }

    fn has_jobs_left(&self, slot: u32, reason: RecycleReason) -> bool {
        let Some(worker) = self.worker_of(slot) else { return false };
        let is_counted = reason == RecycleReason::Jobs && self.limits.recycle.jobs.is_some();
        is_counted && worker.phase == Phase::Ready && worker.jobs_left(&self.limits) > 0
    }

    /// Lets a successor on standby take the slot of an idle worker. So a slot does not have two workers for
    /// long when no jobs arrive.
    pub(super) fn check_standby(&mut self, now: Time, place: u32, out: &mut Vec<Action<T>>) {
        let Some(worker) = self.workers[place as usize].as_mut() else { return };
        let is_standby = worker.phase == Phase::Ready && matches!(worker.role, Role::Successor(_));
        if !is_standby || now < worker.next_replacement_at {
            return;
        }
        worker.next_replacement_at = now + RECYCLE_INTERVAL;
        let slot = worker.slot;
        if self.worker_of(slot).is_some_and(|worker| worker.phase == Phase::Ready && worker.jobs.is_empty()) {
            self.hand_over_slot(now, slot, place, RecycleReason::Jobs, out);
        }
    }

    /// Kills successors on standby that are no longer useful. They have run no jobs.
    pub(super) fn dismiss_standbys(
        &mut self,
        is_not_needed: impl Fn(&Worker) -> bool,
        out: &mut Vec<Action<T>>,
    ) {
        for slot in 0..self.slots.len() as u32 {
            if let Some(place) = self.standby(slot)
                && self.workers[place as usize].as_ref().is_some_and(&is_not_needed)
            {
                self.kill(place, KillReason::NotNeeded, out);
            }
        }
    }
}

/// Returns true if the worker exits because it was given its last job.
fn is_leaving_at_job_limit(worker: &Worker) -> bool {
    worker.is_at_job_limit && worker.role == Role::Current && worker.phase == Phase::Draining
}

/// Returns true if the worker will be given its last job within twice its own start time, at the pace of its
/// jobs so far.
fn is_near_job_limit(worker: &Worker, now: Time, left: u64) -> bool {
    let start = worker.ready_at.map_or(0, |at| at.since(worker.spawned_at).as_nanos());
    let so_far = now.since(worker.spawned_at).as_nanos();
    u128::from(left).saturating_mul(so_far) <= start.saturating_mul(2 * u128::from(worker.jobs_given))
}
