//! Replaces workers after a number of jobs (`recycle.jobs`). A worker that was given its last job is asked to exit, and
//! a successor takes over the slot as soon as possible. The successor is started in advance, based on the job rate, and
//! then waits as a standby. `life` replaces workers because of their age or memory.

use super::Bulkhead;
use super::life::RECYCLE_INTERVAL;
use crate::ending::{KillReason, RecycleReason};
use crate::messages::{Action, OperatorEvent};
use crate::time::Time;
use crate::worker::{Assignment, Worker};

impl<T> Bulkhead<T> {
    /// Checks a worker against `recycle.jobs` after the worker was given a job or the setting was changed. If the
    /// worker will soon be given its last job, starts a successor. If the worker was already given its last job,
    /// replaces or drains the worker.
    pub(super) fn check_job_limit(&mut self, now: Time, place: u32) {
        let Some(worker) = self.workers.get(place).filter(|worker| worker.is_ready()) else { return };
        let Assignment::Active { slot, .. } = worker.assignment else { return };
        let left = worker.jobs_left(&self.limits);
        if left > 0 {
            if is_near_job_limit(worker, now, left) {
                self.start_successor(now, slot);
            }
            return;
        }
        let (pid, reason) = (worker.pid.unwrap_or(0), RecycleReason::Jobs);
        self.reassign(place, |worker| {
            worker.assignment = Assignment::Active { slot, is_at_job_limit: true };
        });
        self.actions.push(Action::Report(OperatorEvent::WorkerRecycled { pid, reason }));
        match self.standby(slot) {
            Some(standby) => self.hand_over_slot(now, slot, standby, reason),
            None if self.workers.slot(slot).successor.is_none()
                && let Some(spare) = self.ready_spare() =>
            {
                self.take_over(now, slot, spare, Some(reason));
            }
            None => {
                self.start_successor(now, slot);
                self.drain_worker(now, place);
            }
        }
    }

    pub(super) fn check_all_job_limits(&mut self, now: Time) {
        for place in self.workers.places() {
            self.check_job_limit(now, place);
        }
    }

    /// Starts a successor for a slot's worker, unless the slot already has a successor or a successor has just failed.
    fn start_successor(&mut self, now: Time, slot: u32) {
        let entry = self.workers.slot(slot);
        // A bulkhead with spares needs no separate successor, because the next spare takes over.
        let has_room = entry.successor.is_none() && entry.replaced == 0 && !self.limits.has_spares();
        if has_room && self.workers.of_slot(slot).is_some_and(|worker| now >= worker.next_replacement_at) {
            self.spawn(now, slot, Some(RecycleReason::Jobs));
        }
    }

    /// Starts a successor for a slot's worker if that worker has received the last job allowed by `recycle.jobs`.
    pub(super) fn start_successor_at_job_limit(&mut self, now: Time, slot: u32) {
        if self.workers.of_slot(slot).is_some_and(Worker::is_leaving_at_job_limit) {
            self.start_successor(now, slot);
        }
    }

    /// Starts a successor for each worker that has received the last job allowed by `recycle.jobs`. Called after
    /// earlier failures of successors have been forgotten.
    pub(super) fn start_successors_at_job_limit(&mut self, now: Time) {
        for slot in self.workers.slot_numbers() {
            self.start_successor_at_job_limit(now, slot);
        }
    }

    pub(super) fn retry_successor(&mut self, now: Time, place: u32) {
        let Some(worker) = self.workers.get(place) else { return };
        if worker.is_leaving_at_job_limit() {
            self.start_successor(now, worker.assignment.slot());
        }
    }

    // Successors on standby.

    /// Returns the successor of a slot's worker if the successor is ready.
    pub(super) fn standby(&self, slot: u32) -> Option<u32> {
        let is_ready = |place: &u32| self.workers.get(*place).is_some_and(Worker::is_ready);
        self.workers.slot(slot).successor.filter(is_ready)
    }

    /// Returns true if a ready successor must wait until the slot's worker is given its last job. In that case,
    /// schedules a first check after four times the successor's start time, to find out whether the slot's worker is
    /// idle. The worker should have been given its last job by then, because the successor is started when the last job
    /// is expected within twice the start time.
    pub(super) fn must_stand_by(&mut self, now: Time, slot: u32, place: u32, reason: RecycleReason) -> bool {
        let waits = self.has_jobs_left(slot, reason);
        if waits {
            self.edit_timing(place, |worker| {
                worker.next_replacement_at = now + (now.since(worker.spawned_at) * 4).max(RECYCLE_INTERVAL);
            });
        }
        waits
    }

    fn has_jobs_left(&self, slot: u32, reason: RecycleReason) -> bool {
        let Some(worker) = self.workers.of_slot(slot) else { return false };
        let is_counted = reason == RecycleReason::Jobs && self.limits.recycle.jobs.is_some();
        is_counted && worker.is_ready() && worker.jobs_left(&self.limits) > 0
    }

    /// Lets a standby take over the slot if the slot's worker is idle, because the slot would otherwise have two
    /// workers for as long as no jobs arrive.
    pub(super) fn check_standby(&mut self, now: Time, place: u32) {
        let Some(worker) = self.workers.get(place).filter(|worker| worker.is_standby()) else { return };
        if now < worker.next_replacement_at {
            return;
        }
        let slot = worker.assignment.slot();
        self.edit_timing(place, |worker| worker.next_replacement_at = now + RECYCLE_INTERVAL);
        if self.workers.of_slot(slot).is_some_and(|worker| worker.is_ready() && worker.jobs.is_empty()) {
            self.hand_over_slot(now, slot, place, RecycleReason::Jobs);
        }
    }

    /// Kills standbys for which `is_not_needed` returns true. No job is lost, because standbys have not received any
    /// jobs.
    pub(super) fn dismiss_standbys(&mut self, is_not_needed: impl Fn(&Worker) -> bool) {
        for slot in self.workers.slot_numbers() {
            if let Some(place) = self.standby(slot)
                && self.workers.get(place).is_some_and(&is_not_needed)
            {
                self.kill(place, KillReason::NotNeeded);
            }
        }
    }
}

/// Returns true if the worker will reach its job limit soon. At the current job rate, this means within twice the time
/// that the start of the worker took.
fn is_near_job_limit(worker: &Worker, now: Time, left: u64) -> bool {
    let start = worker.ready_at.map_or(0, |at| at.since(worker.spawned_at).as_nanos());
    let so_far = now.since(worker.spawned_at).as_nanos();
    u128::from(left).saturating_mul(so_far) <= start.saturating_mul(2 * u128::from(worker.jobs_given))
}
