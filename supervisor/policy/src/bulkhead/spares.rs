//! Spares (`start.spares`): workers in a reserve, started and ready, that have no permits. One takes over a slot
//! whose worker is sent SIGKILL, dies, has begun its last job, is replaced or is not there yet; what had the slot
//! goes to the reserve in its place, and when that is gone, the next spare is started there. So there are never
//! more workers, those that are dying included, than slots and places in the reserve.
//!
//! A place of the reserve is a slot like others, after those that are to run jobs: a spare that hangs or dies is
//! replaced with the same backoff.

use super::Bulkhead;
use crate::limits::RestartPolicy;
use crate::messages::{Action, KillReason, Note, RecycleReason};
use crate::time::Time;
use crate::workers::{End, Phase, Role, Silence, Slot, SlotState, Worker};

impl<T> Bulkhead<T> {
    pub(super) fn spares_wanted(&self) -> usize {
        if self.limits.max_in_flight == 0 { 0 } else { self.limits.start.spares as usize }
    }

    pub(super) fn has_reserve(&self) -> bool {
        self.spares_wanted() > 0
    }

    /// After something that concerns the workers: fills the slots that have none at work as far as there are spares.
    pub(super) fn fill_from_reserve(&mut self, now: Time, out: &mut Vec<Action<T>>) {
        let is_concerned = std::mem::take(&mut self.is_reserve_concerned);
        if !is_concerned || !self.has_reserve() || self.is_stopping() {
            return;
        }
        for slot in 0..self.slots.len() as u32 {
            if self.wants_spare(slot) {
                let Some(spare) = self.ready_spare() else { break };
                self.take_over(now, slot, spare, None, out);
            }
        }
        self.roll_on(now, out);
    }

    /// A spare that can take over now.
    pub(super) fn ready_spare(&self) -> Option<u32> {
        let is_free = |slot: &&Slot| slot.is_reserve && slot.successor.is_none() && slot.retired == 0;
        let mut places = self.slots.iter().filter(is_free).filter_map(|slot| slot.state.worker());
        // One that is silent may hang.
        places.find(|&place| {
            let worker = self.workers[place as usize].as_ref();
            worker.is_some_and(|worker| worker.phase == Phase::Ready && worker.silence == Silence::None)
        })
    }

    /// Whether a spare is ready, or will be unless its start fails.
    fn has_live_reserve(&self) -> bool {
        self.has_reserve() && self.slots.iter().any(|slot| slot.is_reserve && slot.state.is_occupied())
    }

    /// Whether the replacement of a slot's worker waits until a spare is ready.
    pub(super) fn awaits_spare(&self, slot: u32) -> bool {
        let is_at_work = self.slots[slot as usize].state.worker().is_some();
        let is_free = self.standby(slot).is_none() && self.ready_spare().is_none();
        is_at_work && is_free && self.has_live_reserve()
    }

    /// Whether no worker is at work in a slot that is to have one, and a spare may change that.
    fn wants_spare(&self, slot: u32) -> bool {
        let entry = &self.slots[slot as usize];
        if entry.is_reserve || entry.successor.is_some() {
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
            Phase::Draining => worker.is_spent || policy == RestartPolicy::Always,
            Phase::Killing(KillReason::Unwanted) => true,
            Phase::Killing(_) => policy != RestartPolicy::Never,
            Phase::Dead(end) => end.is_unwanted || self.may_restart(end),
        }
    }

    /// Whether a worker that ended like this is followed by another.
    pub(super) fn may_restart(&self, end: End) -> bool {
        match self.limits.restart.policy {
            RestartPolicy::Always => true,
            // One that was replaced in time would not have been asked either.
            _ if end.is_clean && end.is_spent => true,
            RestartPolicy::OnFailure => !end.is_clean,
            RestartPolicy::Never => false,
        }
    }

    /// A spare takes a slot. What had it goes to the reserve: a worker that may still end well is drained, and all
    /// else goes on as it does.
    pub(super) fn take_over(
        &mut self,
        now: Time,
        slot: u32,
        spare: u32,
        reason: Option<RecycleReason>,
        out: &mut Vec<Action<T>>,
    ) {
        let Some(worker) = self.workers[spare as usize].as_mut() else { return };
        let reserve = worker.slot;
        (worker.slot, worker.owes, worker.is_spare) = (slot, slot, false);
        worker.succession_after = now;
        let note = Note::SpareTookOver { worker: worker.id, slot, pid: worker.pid.unwrap_or(0) };
        let before = self.slots[slot as usize].state;
        self.slots[slot as usize].has_settled = true;
        self.set_slot(slot, SlotState::Occupied(spare));
        out.push(Action::Note(note));
        match before {
            SlotState::Occupied(place) => self.put_away(now, place, reserve, reason, out),
            state => self.set_slot(reserve, state),
        }
        self.refresh(spare);
        self.arm(spare);
    }

    /// A worker whose slot another has taken goes to the reserve.
    fn put_away(
        &mut self,
        now: Time,
        place: u32,
        reserve: u32,
        reason: Option<RecycleReason>,
        out: &mut Vec<Action<T>>,
    ) {
        let Some(worker) = self.workers[place as usize].as_mut() else { return };
        (worker.slot, worker.is_spare) = (reserve, true);
        match worker.phase {
            Phase::Ready | Phase::Draining => {
                worker.role = Role::Retired;
                let entry = &mut self.slots[reserve as usize];
                entry.retired += 1;
                let reason = reason.or(worker.is_spent.then_some(RecycleReason::Jobs));
                entry.last_end = reason.map(Into::into).or(entry.last_end);
                self.set_slot(reserve, SlotState::Awaiting);
                self.drain_worker(now, place, out);
            }
            Phase::Handshaking { .. } | Phase::Initializing { .. } => {
                worker.owes = reserve;
                self.set_slot(reserve, SlotState::Occupied(place));
            }
            Phase::Killing(_) | Phase::Dead(_) => {
                // What has been sent SIGKILL already does not keep the next worker waiting.
                worker.is_written_off = true;
                let last_end = self.slots[worker.owes as usize].last_end;
                self.slots[reserve as usize].last_end = last_end;
                self.set_slot(reserve, SlotState::Occupied(place));
            }
        }
        self.refresh(place);
        self.arm(place);
    }

    /// Ends spares that are not what is wanted any more: they have done nothing yet.
    pub(super) fn dismiss_spares(&mut self, is_unwanted: impl Fn(&Worker) -> bool, out: &mut Vec<Action<T>>) {
        for place in 0..self.workers.len() as u32 {
            let worker = self.workers[place as usize].as_ref();
            if worker.is_some_and(|worker| worker.is_ready_spare() && is_unwanted(worker)) {
                self.kill(place, KillReason::Unwanted, out);
            }
        }
    }

    /// A place of the reserve becomes a slot for jobs, with the worker that is there.
    pub(super) fn take_from_reserve(&mut self, slot: u32) {
        let entry = &mut self.slots[slot as usize];
        entry.is_reserve = false;
        self.live_slots += u32::from(entry.state.is_live());
        for place in 0..self.workers.len() as u32 {
            if let Some(worker) = self.workers[place as usize].as_mut().filter(|worker| worker.slot == slot) {
                worker.is_spare = false;
                self.refresh(place);
                self.arm(place);
            }
        }
        self.count_in_use(slot);
        self.is_reserve_concerned = true;
    }
}
