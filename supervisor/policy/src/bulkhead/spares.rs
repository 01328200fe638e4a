//! Manages spares (`start.spares`), which are workers that have been started and are ready, but have no permits. A
//! spare takes over a slot whose worker is killed, dies, was given its last job, is being replaced or is not ready yet.
//! The previous worker moves to the spare slot, and the next spare starts there once that worker is gone. The number of
//! workers, including dying ones, therefore never exceeds the number of slots plus spares.
//!
//! The spare slots are numbered after the job slots. A spare that hangs or dies is restarted with the usual backoff.

use super::Bulkhead;
use crate::ending::{KillReason, RecycleReason};
use crate::limits::RestartPolicy;
use crate::messages::{Action, OperatorEvent};
use crate::time::Time;
use crate::worker::{Assignment, EndEffect, Phase, SilenceCheck, Worker};
use crate::workers::{Slot, SlotState};

impl<T> Bulkhead<T> {
    /// Lets ready spares take over slots that have no usable worker. Does nothing if no worker or slot has changed
    /// since the last call.
    pub(super) fn fill_from_spares(&mut self, now: Time) {
        let is_concerned = std::mem::take(&mut self.spares_changed);
        if !is_concerned || !self.limits.has_spares() || self.is_stopping() {
            return;
        }
        for slot in self.workers.slot_numbers() {
            if self.needs_spare(slot) {
                let Some(spare) = self.ready_spare() else { break };
                self.take_over(now, slot, spare, None);
            }
        }
        self.continue_rolling_restart(now);
    }

    /// Returns a spare that can take over a slot now.
    pub(super) fn ready_spare(&self) -> Option<u32> {
        let is_free = |slot: &&Slot| slot.is_spare_slot && slot.successor.is_none() && slot.replaced == 0;
        let mut places = self.workers.slots().iter().filter(is_free).filter_map(|slot| slot.state.worker());
        // A spare that has been silent for too long is skipped, because it might be hung.
        places.find(|&place| {
            let worker = self.workers.get(place);
            worker.is_some_and(|worker| worker.is_ready() && worker.silence == SilenceCheck::None)
        })
    }

    /// Returns true if any spare is ready or starting.
    fn has_live_spare(&self) -> bool {
        self.limits.has_spares()
            && self.workers.slots().iter().any(|slot| slot.is_spare_slot && slot.state.is_occupied())
    }

    /// Returns true if the slot's worker cannot be replaced until a spare becomes ready.
    pub(super) fn must_wait_for_spare(&self, slot: u32) -> bool {
        let is_at_work = self.workers.slot(slot).state.worker().is_some();
        let is_free = self.standby(slot).is_none() && self.ready_spare().is_none();
        is_at_work && is_free && self.has_live_spare()
    }

    /// Returns true if a spare should take over the slot, because the slot has no usable worker.
    fn needs_spare(&self, slot: u32) -> bool {
        let entry = self.workers.slot(slot);
        if entry.is_spare_slot || entry.successor.is_some() {
            return false;
        }
        let place = match entry.state {
            SlotState::Occupied(place) => place,
            SlotState::Backoff { .. } => return true,
            SlotState::Stopped { probe_at } => return probe_at.is_some(),
            SlotState::Empty | SlotState::Awaiting | SlotState::Closed => return false,
        };
        let Some(worker) = self.workers.get(place) else { return false };
        let policy = self.limits.restart.policy;
        match worker.phase {
            Phase::Ready => false,
            Phase::Handshaking { .. } | Phase::Initializing { .. } => true,
            Phase::Draining => worker.assignment.is_at_job_limit() || policy == RestartPolicy::Always,
            Phase::Killing(KillReason::NotNeeded) => true,
            Phase::Killing(_) => policy != RestartPolicy::Never,
            Phase::Dead(effect) => effect.is_not_needed || self.may_restart(effect),
        }
    }

    /// Returns true if the restart policy allows a new worker after the previous worker has ended in the given way.
    pub(super) fn may_restart(&self, effect: EndEffect) -> bool {
        match self.limits.restart.policy {
            RestartPolicy::Always => true,
            // A worker that has reached `recycle.jobs` is always replaced, even if it exits before its successor takes
            // over.
            _ if effect.is_clean && effect.is_at_job_limit => true,
            RestartPolicy::OnFailure => !effect.is_clean,
            RestartPolicy::Never => false,
        }
    }

    /// Lets a spare take over a slot. The slot's previous worker moves to the spare slot. If the previous worker is
    /// healthy, it is drained. Otherwise, it continues to start or to exit.
    pub(super) fn take_over(&mut self, now: Time, slot: u32, spare: u32, reason: Option<RecycleReason>) {
        let Some(worker) = self.workers.get(spare) else { return };
        let spare_slot = worker.assignment.slot();
        let event = OperatorEvent::SpareTookOver { worker: worker.id, slot, pid: worker.pid.unwrap_or(0) };
        let before = self.workers.slot(slot).state;
        self.workers.record(slot).has_settled = true;
        self.set_slot(slot, SlotState::Occupied(spare));
        self.actions.push(Action::Report(event));
        match before {
            SlotState::Occupied(place) => self.move_to_spare_slot(now, place, spare_slot, reason),
            state => self.set_slot(spare_slot, state),
        }
        self.reassign(spare, |worker| {
            worker.assignment = Assignment::of_slot(slot, false);
            worker.next_replacement_at = now;
        });
    }

    /// Moves a worker to a spare slot, because a spare has taken over the worker's previous slot.
    fn move_to_spare_slot(&mut self, now: Time, place: u32, spare_slot: u32, reason: Option<RecycleReason>) {
        let Some(worker) = self.workers.get(place) else { return };
        let (assignment, charged_slot) = (worker.assignment, worker.assignment.charged_slot());
        match worker.phase {
            Phase::Ready | Phase::Draining => {
                let reason = reason.or(assignment.is_at_job_limit().then_some(RecycleReason::Jobs));
                let record = self.workers.record(spare_slot);
                record.last_end = reason.map(Into::into).or(record.last_end);
                self.set_slot(spare_slot, SlotState::Awaiting);
                self.reassign(place, |worker| worker.replace(spare_slot, false));
                self.drain_worker(now, place);
            }
            Phase::Handshaking { .. } | Phase::Initializing { .. } => {
                self.set_slot(spare_slot, SlotState::Occupied(place));
                self.reassign(place, |worker| worker.assignment = Assignment::of_slot(spare_slot, true));
            }
            Phase::Killing(_) | Phase::Dead(_) => {
                // The exit of a worker that was already sent SIGKILL must not delay the slot's next worker.
                self.workers.record(spare_slot).last_end = self.workers.slot(charged_slot).record.last_end;
                self.set_slot(spare_slot, SlotState::Occupied(place));
                let is_at_job_limit = assignment.is_at_job_limit();
                self.reassign(place, |worker| {
                    worker.assignment =
                        Assignment::Displaced { slot: spare_slot, charged_slot, is_at_job_limit };
                });
            }
        }
    }

    /// Kills ready spares for which `is_not_needed` returns true. No job is lost, because spares do not run jobs.
    pub(super) fn dismiss_spares(&mut self, is_not_needed: impl Fn(&Worker) -> bool) {
        for place in self.workers.places() {
            if self.workers.get(place).is_some_and(|worker| worker.is_ready_spare() && is_not_needed(worker))
            {
                self.kill(place, KillReason::NotNeeded);
            }
        }
    }
}
