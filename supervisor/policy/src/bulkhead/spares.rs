//! Spares (`start.spares`): workers in a reserve, started and ready, without permits. A spare takes over a
//! slot whose worker is sent SIGKILL, dies, was given its last job, is replaced or is not ready yet. The
//! slot's previous worker moves to the reserve. When that worker is gone, the next spare is started in its
//! place. So the number of workers, including dying ones, never exceeds the number of slots plus spares.
//!
//! The places of the reserve are slots as well, after the slots for jobs. A spare that hangs or dies is
//! restarted with the usual backoff.

use super::Bulkhead;
use crate::limits::RestartPolicy;
use crate::messages::{Action, KillReason, OperatorEvent, RecycleReason};
use crate::time::Time;
use crate::workers::{End, Phase, Role, SilenceCheck, Slot, SlotState, Worker};

impl<T> Bulkhead<T> {
    pub(super) fn spare_count(&self) -> usize {
        if self.limits.max_in_flight == 0 { 0 } else { self.limits.start.spares as usize }
    }

    pub(super) fn has_spares(&self) -> bool {
        self.spare_count() > 0
    }

    /// Lets ready spares take over slots without a working worker. Does nothing unless a worker or slot has
    /// changed.
    pub(super) fn fill_from_spares(&mut self, now: Time, out: &mut Vec<Action<T>>) {
        let is_concerned = std::mem::take(&mut self.spares_changed);
        if !is_concerned || !self.has_spares() || self.is_stopping() {
            return;
        }
        for slot in 0..self.slots.len() as u32 {
            if self.needs_spare(slot) {
                let Some(spare) = self.ready_spare() else { break };
                self.take_over(now, slot, spare, None, out);
            }
        }
        self.continue_rolling_restart(now, out);
    }

    /// Returns a spare that can take over now.
    pub(super) fn ready_spare(&self) -> Option<u32> {
        let is_free = |slot: &&Slot| slot.is_spare_slot && slot.successor.is_none() && slot.replaced == 0;
        let mut places = self.slots.iter().filter(is_free).filter_map(|slot| slot.state.worker());
        // A silent spare may hang.
        places.find(|&place| {
            let worker = self.workers[place as usize].as_ref();
            worker.is_some_and(|worker| worker.phase == Phase::Ready && worker.silence == SilenceCheck::None)
        })
    }

    /// Returns true if a spare is ready, or will be unless its start fails.
    fn has_live_spare(&self) -> bool {
        self.has_spares() && self.slots.iter().any(|slot| slot.is_spare_slot && slot.state.is_occupied())
    }

    /// Returns true if the replacement of a slot's worker must wait until a spare is ready.
    pub(super) fn must_wait_for_spare(&self, slot: u32) -> bool {
        let is_at_work = self.slots[slot as usize].state.worker().is_some();
        let is_free = self.standby(slot).is_none() && self.ready_spare().is_none();
        is_at_work && is_free && self.has_live_spare()
    }

    /// Returns true if the slot should have a working worker, lacks one, and may get a spare.
    fn needs_spare(&self, slot: u32) -> bool {
        let entry = &self.slots[slot as usize];
        if entry.is_spare_slot || entry.successor.is_some() {
            return false;
        }
        let place = match entry.state {
            SlotState::Occupied(place) => place,
            SlotState::Backoff { .. } => return true,
            SlotState::Stopped { probe_at } => return probe_at.is_some(),
            SlotState::Empty | SlotState::Awaiting | SlotState::Closed => return false,
        };
        let Some(worker) = self.workers[place as usize].as_ref() else { return false };
        let policy = self.limits.restart.policy;
        match worker.phase {
            Phase::Ready => false,
            Phase::Handshaking { .. } | Phase::Initializing { .. } => true,
            Phase::Draining => worker.is_at_job_limit || policy == RestartPolicy::Always,
            Phase::Killing(KillReason::NotNeeded) => true,
            Phase::Killing(_) => policy != RestartPolicy::Never,
            Phase::Dead(end) => end.is_not_needed || self.may_restart(end),
        }
    }

    /// Returns true if a worker that ended in this way is followed by another.
    pub(super) fn may_restart(&self, end: End) -> bool {
        match self.limits.restart.policy {
            RestartPolicy::Always => true,
            // A worker that reached `recycle.jobs` is always followed by another, as it would be by a
            // replacement in time.
            _ if end.is_clean && end.is_at_job_limit => true,
            RestartPolicy::OnFailure => !end.is_clean,
            RestartPolicy::Never => false,
        }
    }

    /// Lets a spare take over a slot. The slot's previous worker moves to the reserve. A healthy worker is
    /// drained there. Any other worker continues to start or to die.
    pub(super) fn take_over(
        &mut self,
        now: Time,
        slot: u32,
        spare: u32,
        reason: Option<RecycleReason>,
        out: &mut Vec<Action<T>>,
    ) {
        let Some(worker) = self.workers[spare as usize].as_mut() else { return };
        let spare_slot = worker.slot;
        (worker.slot, worker.charged_slot, worker.is_spare) = (slot, slot, false);
        worker.next_replacement_at = now;
        let note = OperatorEvent::SpareTookOver { worker: worker.id, slot, pid: worker.pid.unwrap_or(0) };
        let before = self.slots[slot as usize].state;
        self.slots[slot as usize].has_settled = true;
        self.set_slot(slot, SlotState::Occupied(spare));
        out.push(Action::Report(note));
        match before {
            SlotState::Occupied(place) => self.move_to_spare_slot(now, place, spare_slot, reason, out),
            state => self.set_slot(spare_slot, state),
        }
        self.refresh(spare);
        self.arm(spare);
    }

    /// Moves a worker whose slot was taken over to the reserve.
    fn move_to_spare_slot(
        &mut self,
        now: Time,
        place: u32,
        spare_slot: u32,
        reason: Option<RecycleReason>,
        out: &mut Vec<Action<T>>,
    ) {
        let Some(worker) = self.workers[place as usize].as_mut() else { return };
        (worker.slot, worker.is_spare) = (spare_slot, true);
        match worker.phase {
            Phase::Ready | Phase::Draining => {
                worker.role = Role::Replaced;
                let entry = &mut self.slots[spare_slot as usize];
                entry.replaced += 1;
                let reason = reason.or(worker.is_at_job_limit.then_some(RecycleReason::Jobs));
                entry.last_end = reason.map(Into::into).or(entry.last_end);
                self.set_slot(spare_slot, SlotState::Awaiting);
                self.drain_worker(now, place, out);
            }
            Phase::Handshaking { .. } | Phase::Initializing { .. } => {
                worker.charged_slot = spare_slot;
                self.set_slot(spare_slot, SlotState::Occupied(place));
            }
            Phase::Killing(_) | Phase::Dead(_) => {
                // A worker that was already sent SIGKILL does not delay the next worker.
                worker.killed_before_replacement = true;
                let last_end = self.slots[worker.charged_slot as usize].last_end;
                self.slots[spare_slot as usize].last_end = last_end;
                self.set_slot(spare_slot, SlotState::Occupied(place));
            }
        }
        self.refresh(place);
        self.arm(place);
    }

    /// Kills ready spares that are no longer useful. They run no jobs.
    pub(super) fn dismiss_spares(
        &mut self,
        is_not_needed: impl Fn(&Worker) -> bool,
        out: &mut Vec<Action<T>>,
    ) {
        for place in 0..self.workers.len() as u32 {
            let worker = self.workers[place as usize].as_ref();
            if worker.is_some_and(|worker| worker.is_ready_spare() && is_not_needed(worker)) {
                self.kill(place, KillReason::NotNeeded, out);
            }
        }
    }

    /// Turns a place of the reserve into a slot for jobs, with the worker in it.
    pub(super) fn convert_spare_slot(&mut self, slot: u32) {
        let entry = &mut self.slots[slot as usize];
        entry.is_spare_slot = false;
        self.live_slots += u32::from(entry.state.is_live());
        for place in 0..self.workers.len() as u32 {
            if let Some(worker) = self.workers[place as usize].as_mut().filter(|worker| worker.slot == slot) {
                worker.is_spare = false;
                self.refresh(place);
                self.arm(place);
            }
        }
        self.count_in_use(slot);
        self.spares_changed = true;
    }
}
