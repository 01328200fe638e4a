//! Spares: workers in spare slots, and the slots that they can take over.

use bulkhead_policy::{KillReason, RestartPolicy, WorkerId};

use super::slots::SlotState;
use super::{Cause, Model, Phase, Worker};

impl Model {
    pub(super) fn is_ready_spare(&self, worker: &Worker) -> bool {
        let is_in_reserve = self.slots[worker.slot as usize].is_spare_slot;
        is_in_reserve && self.is_current(worker) && worker.phase == Phase::Ready && worker.is_alive()
    }

    /// Returns true if a worker can take over a slot now. A silent worker cannot take over, because it might be hung.
    fn can_take_over(&self, worker: &Worker) -> bool {
        let others = self.workers.values().filter(|other| Self::is_in(other, worker.slot)).count();
        self.is_ready_spare(worker) && others <= 1 && worker.observed_since.is_none()
    }

    /// Returns true if a ready spare has exceeded `recycle.age`.
    pub(super) fn is_stale_spare(&self, worker: &Worker) -> bool {
        let is_outdated = self.limits.recycle.age.is_some_and(|age| worker.spawned_at + age <= self.now);
        self.is_ready_spare(worker)
            && is_outdated
            && self.step.cause == Cause::Tick
            && !self.is_silent(worker)
    }

    /// Checks that a spare was allowed to take over a slot. Then moves the slot's previous worker to the spare slot.
    pub(super) fn spare_took_over(&mut self, id: WorkerId, slot: u32) {
        let spare = self.live(id).expect("only a living spare can take over");
        assert!(self.can_take_over(spare), "{id:?} is not a ready spare");
        assert!(!self.slots[slot as usize].is_spare_slot, "{id:?} took over a spare slot");
        assert!(!self.is_stopping(), "{id:?} took over while the bulkhead is stopping");
        let reserved_permits = spare.slot;
        let before = self.slots[slot as usize].state;
        if self.needs_spare(slot) {
            self.coverage.see("spare took over");
        } else {
            let SlotState::Occupied { current, successor: None } = before else {
                panic!("slot {slot} must not be taken over by a spare: {before:?}")
            };
            let worker = &self.workers[&current];
            assert!(worker.phase == Phase::Ready && worker.is_alive(), "the worker is already leaving");
            self.coverage.see("spare replaces a worker");
            if !worker.is_at_job_limit {
                self.check_standby(slot, current);
            }
        }
        self.slots[slot as usize].state = SlotState::Occupied { current: id.place, successor: None };
        let now = self.now;
        let spare = self.live_mut(id).expect("the worker must be alive");
        (spare.slot, spare.charged_slot, spare.next_replacement_at) = (slot, slot, now);
        self.slots[reserved_permits as usize].state = match before {
            SlotState::Occupied { current, .. } => self.move_to_spare_slot(current, reserved_permits),
            state => state,
        };
    }

    fn move_to_spare_slot(&mut self, place: u32, reserved_permits: u32) -> SlotState {
        let worker = self.workers.get_mut(&place).expect("the previous worker must be in the model");
        worker.slot = reserved_permits;
        let stays = SlotState::Occupied { current: place, successor: None };
        if worker.killed.is_some() || worker.dead.is_some() {
            self.coverage.see("spare for a killed or dead worker");
            worker.killed_before_replacement = true;
            return stays;
        }
        match worker.phase {
            Phase::Spawned | Phase::Initializing { .. } => {
                self.coverage.see("spare for a starting worker");
                worker.charged_slot = reserved_permits;
                stays
            }
            Phase::Ready | Phase::Draining { .. } => SlotState::Awaiting,
        }
    }

    /// Returns true if a slot should have a usable worker but does not.
    fn needs_spare(&self, slot: u32) -> bool {
        let state = self.slots[slot as usize].state;
        let current = match state {
            SlotState::Occupied { current, successor: None } => &self.workers[&current],
            SlotState::Waiting { .. } | SlotState::Stopped { probe_at: Some(_) } => return true,
            // Without a spare, the slot would have to wait.
            SlotState::Vacant(next) => return !matches!(next, super::slots::NextStart::Never),
            _ => return false,
        };
        let policy = self.limits.restart.policy;
        if let Some(dead) = current.dead {
            let is_asked = policy == RestartPolicy::Always
                || dead.is_clean && current.is_at_job_limit
                || policy == RestartPolicy::OnFailure && !dead.is_clean;
            return is_asked || current.killed == Some(KillReason::NotNeeded);
        }
        match (&current.killed, current.phase) {
            (Some(KillReason::NotNeeded), _) => true,
            (Some(_), _) => policy != RestartPolicy::Never,
            (None, Phase::Spawned | Phase::Initializing { .. }) => true,
            (None, Phase::Ready) => false,
            (None, Phase::Draining { .. }) => current.is_at_job_limit || policy == RestartPolicy::Always,
        }
    }

    /// Returns true if no spare is ready but a spare is starting or about to be started.
    pub(super) fn is_waiting_for_spare(&self) -> bool {
        self.has_live_spare() && !self.workers.values().any(|worker| self.can_take_over(worker))
    }

    fn has_live_spare(&self) -> bool {
        let is_coming = |state| matches!(state, SlotState::Occupied { .. } | SlotState::Awaiting);
        self.slots.iter().any(|slot| slot.is_spare_slot && is_coming(slot.state))
    }

    /// Checks that no spare is ready or starting when a successor is started. Otherwise, the number of workers could
    /// exceed the number of job slots plus spares.
    pub(super) fn check_no_spare_expected(&self, slot: u32) {
        assert!(!self.has_live_spare(), "slot {slot} got a successor although there are spares");
    }

    /// Checks that no spare is ready while a slot has no usable worker.
    pub(super) fn check_spares(&self) {
        if self.is_stopping() {
            return;
        }
        let spare = self.workers.values().find(|worker| self.can_take_over(worker));
        for slot in 0..self.slots.len() as u32 {
            let needs_spare = !self.slots[slot as usize].is_spare_slot && self.needs_spare(slot);
            assert!(spare.is_none() || !needs_spare, "slot {slot} is waiting although a spare is ready");
        }
    }
}
