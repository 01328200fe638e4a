//! Workers that may begin only so many jobs (`recycle.jobs`). One that has begun its last is told to finish, and
//! the worker that follows it takes the slot as soon as it is ready. It is started before, as early as the pace
//! of the jobs so far asks for, and then waits for its turn.

use super::Bulkhead;
use super::life::RECYCLE_PAUSE;
use crate::messages::{Action, KillReason, Note, RecycleReason};
use crate::time::Time;
use crate::workers::{Phase, Role, SlotState, Worker};

impl<T> Bulkhead<T> {
    /// A worker was given a job, or the number of those that it may be given is another.
    pub(super) fn mind_jobs_left(&mut self, now: Time, place: u32, out: &mut Vec<Action<T>>) {
        let Some(worker) = self.workers[place as usize].as_mut() else { return };
        if worker.phase != Phase::Ready || worker.role != Role::Current {
            return;
        }
        let (slot, left) = (worker.slot, worker.jobs_left(&self.limits));
        if left > 0 {
            if is_nearly_spent(worker, now, left) {
                self.follow(now, slot, out);
            }
            return;
        }
        worker.is_spent = true;
        let pid = worker.pid.unwrap_or(0);
        out.push(Action::Note(Note::WorkerRecycled { pid, reason: RecycleReason::Jobs }));
        match self.standby(slot) {
            Some(standby) => self.succeed(now, slot, standby, RecycleReason::Jobs, out),
            None if self.slots[slot as usize].successor.is_none()
                && let Some(spare) = self.ready_spare() =>
            {
                self.take_over(now, slot, spare, Some(RecycleReason::Jobs), out);
            }
            None => {
                // What its timer waits for depends on whether one follows now.
                self.follow(now, slot, out);
                self.drain_worker(now, place, out);
            }
        }
    }

    /// The same for all workers.
    pub(super) fn recount_jobs_left(&mut self, now: Time, out: &mut Vec<Action<T>>) {
        for place in 0..self.workers.len() as u32 {
            self.mind_jobs_left(now, place, out);
        }
    }

    /// Starts the worker that follows the one of a slot, if none is on its way or has failed just now.
    fn follow(&mut self, now: Time, slot: u32, out: &mut Vec<Action<T>>) {
        let entry = &self.slots[slot as usize];
        // Where there is a reserve, the next spare follows.
        let has_room = entry.successor.is_none() && entry.retired == 0 && !self.has_reserve();
        if has_room && self.worker_of(slot).is_some_and(|worker| now >= worker.succession_after) {
            self.spawn(now, slot, Role::Successor(RecycleReason::Jobs), out);
        }
    }

    /// The same, if that one has begun all that it may.
    pub(super) fn follow_spent(&mut self, now: Time, slot: u32, out: &mut Vec<Action<T>>) {
        if let SlotState::Occupied(place) = self.slots[slot as usize].state
            && self.workers[place as usize].as_ref().is_some_and(is_leaving_spent)
        {
            self.follow(now, slot, out);
            self.arm(place);
        }
    }

    /// The same for all slots, when what failed before says nothing any more.
    pub(super) fn follow_all_spent(&mut self, now: Time, out: &mut Vec<Action<T>>) {
        for slot in 0..self.slots.len() as u32 {
            self.follow_spent(now, slot, out);
        }
    }

    /// When the next attempt to have a spent worker followed is made, or one that waits for its turn is looked at.
    pub(super) fn follower_due(&self, worker: &Worker) -> Option<Time> {
        let slot = &self.slots[worker.slot as usize];
        let may_follow = !self.is_stopping() && !self.has_reserve();
        let has_room = slot.successor.is_none() && slot.retired == 0 && may_follow;
        let is_standby = worker.phase == Phase::Ready && matches!(worker.role, Role::Successor(_));
        (is_standby || is_leaving_spent(worker) && has_room).then_some(worker.succession_after)
    }

    pub(super) fn follow_again(&mut self, now: Time, place: u32, out: &mut Vec<Action<T>>) {
        let Some(worker) = self.workers[place as usize].as_ref() else { return };
        if is_leaving_spent(worker) && self.follower_due(worker).is_some_and(|at| at <= now) {
            self.follow(now, worker.slot, out);
        }
    }

    // Those that wait for their turn.

    /// The worker that is ready to follow the one of a slot.
    pub(super) fn standby(&self, slot: u32) -> Option<u32> {
        let is_ready =
            |place: &u32| self.workers[*place as usize].as_ref().is_some_and(|w| w.phase == Phase::Ready);
        self.slots[slot as usize].successor.filter(is_ready)
    }

    /// Whether one that is ready to follow waits until the worker of the slot has begun its last job. It does for
    /// longer than its own start took, in which that was to happen.
    pub(super) fn waits_for_its_turn(
        &mut self,
        now: Time,
        slot: u32,
        place: u32,
        reason: RecycleReason,
    ) -> bool {
        let waits = self.has_turns_left(slot, reason);
        if waits && let Some(worker) = self.workers[place as usize].as_mut() {
            worker.succession_after = now + (now.since(worker.spawned_at) * 4).max(RECYCLE_PAUSE);
        }
        waits
    }

    fn has_turns_left(&self, slot: u32, reason: RecycleReason) -> bool {
        let Some(worker) = self.worker_of(slot) else { return false };
        let is_counted = reason == RecycleReason::Jobs && self.limits.recycle.jobs.is_some();
        is_counted && worker.phase == Phase::Ready && worker.jobs_left(&self.limits) > 0
    }

    /// Where no more jobs come, what waits for its turn has it now: nothing is to be there twice for long.
    pub(super) fn mind_turn(&mut self, now: Time, place: u32, out: &mut Vec<Action<T>>) {
        let Some(worker) = self.workers[place as usize].as_mut() else { return };
        let is_standby = worker.phase == Phase::Ready && matches!(worker.role, Role::Successor(_));
        if !is_standby || now < worker.succession_after {
            return;
        }
        worker.succession_after = now + RECYCLE_PAUSE;
        let slot = worker.slot;
        if self.worker_of(slot).is_some_and(|worker| worker.phase == Phase::Ready && worker.jobs.is_empty()) {
            self.succeed(now, slot, place, RecycleReason::Jobs, out);
        }
    }

    /// Ends those that wait and are not what is wanted any more: they have done nothing yet.
    pub(super) fn dismiss_standbys(
        &mut self,
        is_unwanted: impl Fn(&Worker) -> bool,
        out: &mut Vec<Action<T>>,
    ) {
        for slot in 0..self.slots.len() as u32 {
            if let Some(place) = self.standby(slot)
                && self.workers[place as usize].as_ref().is_some_and(&is_unwanted)
            {
                self.kill(place, KillReason::Unwanted, out);
            }
        }
    }
}

/// Whether it goes since it has begun all jobs that it may.
fn is_leaving_spent(worker: &Worker) -> bool {
    worker.is_spent && worker.role == Role::Current && worker.phase == Phase::Draining
}

/// Whether, at the pace of its jobs so far, it will have begun its last one within twice the time that its own
/// start took.
fn is_nearly_spent(worker: &Worker, now: Time, left: u64) -> bool {
    let start = worker.ready_at.map_or(0, |at| at.since(worker.spawned_at).as_nanos());
    let so_far = now.since(worker.spawned_at).as_nanos();
    u128::from(left).saturating_mul(so_far) <= start.saturating_mul(2 * u128::from(worker.begun))
}
