//! Applies changed limits while jobs are running, and scales the bulkhead to zero workers and back. Increases take
//! effect immediately. After a decrease, surplus workers finish their jobs. `life` starts and stops single workers, and
//! `adapt` changes the adaptive limit.

use std::cmp::Reverse;

use super::{Bulkhead, Mode};
use crate::ending::{KillReason, RecycleReason};
use crate::limits::{Limits, RestartPolicy, TenantOverrides};
use crate::messages::{Action, LimitChange};
use crate::time::Time;
use crate::worker::{Phase, SilenceCheck, SlotExchange, Worker};
use crate::workers::{Slot, SlotState};

/// Maximum number of replaced workers that are still exiting although their slots have new workers. If there are more,
/// the oldest one is killed.
const EXITING_MAX: usize = 16;

/// Whether a bulkhead needs workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    /// No workers are needed. This is the state before [`crate::Event::Start`], after [`crate::Event::ScaleToZero`],
    /// and after the [`crate::Limits::idle`] time without jobs.
    ScaledToZero,
    /// Workers will be needed soon, as announced by [`crate::Event::AnnounceStart`].
    StartAnnounced,
    /// Workers are needed.
    Started,
}

/// Order in which slots are kept when their number decreases, the least useful slots first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Usefulness {
    /// The slot is stopped, because its workers failed or must not be restarted.
    Stopped,
    /// The slot waits for its next worker, or its worker is about to exit.
    Waiting,
    /// The slot's worker is not ready yet.
    Starting,
    /// The slot's worker is ready and has no jobs.
    Idle,
    /// The slot's worker is ready and has jobs.
    Busy,
}

impl<T> Bulkhead<T> {
    /// Returns whether the bulkhead needs workers.
    pub fn activity(&self) -> Activity {
        self.activity
    }

    /// Returns true if the bulkhead has no processes left.
    pub fn has_no_workers(&self) -> bool {
        self.workers.is_empty()
    }

    /// Returns true if no job is waiting and no worker has a job.
    pub fn has_no_jobs(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Returns the time at which the bulkhead became idle. Tracked only if [`crate::Limits::idle`] is
    /// configured.
    pub fn idle_since(&self) -> Option<Time> {
        self.idle_since
    }

    // Changes of limits.

    pub(super) fn change(&mut self, now: Time, change: LimitChange) {
        self.limits.max_queue = change.max_queue.unwrap_or(self.limits.max_queue);
        if let Some(limit) = change.rate_limit {
            let before = std::mem::replace(&mut self.limits.rate_limit, limit);
            if let Some(limit) = limit {
                self.tenants.rescale(now, before.as_ref(), &limit);
            }
        }
        self.limits.processes = change.processes.unwrap_or(self.limits.processes);
        if let Some(most) = change.max_in_flight {
            // Jobs that a worker has not started must be recalled before the worker receives a new maximum.
            self.recall_all(now);
            self.limits.max_in_flight = most;
            self.send_max_in_flight();
        }
        self.resize_slots(now);
        self.replace_unresizable(now);
    }

    /// Replaces all limits, for example when the configuration is reloaded.
    pub(super) fn reconfigure(&mut self, now: Time, limits: Limits) {
        let before = std::mem::replace(&mut self.limits, limits);
        if let Some(limit) = self.limits.rate_limit {
            self.tenants.rescale(now, before.rate_limit.as_ref(), &limit);
        }
        self.reconfigure_tenants(now);
        self.idle_since = self.idle_since.filter(|_| self.limits.idle.is_some());
        if before.breaker != self.limits.breaker {
            let transition = self.breaker.reconfigure(now, self.limits.breaker.clone());
            self.report_transition(transition);
        }
        self.retries.reconfigure(self.limits.retry.clone());
        self.poison.reconfigure(now, self.limits.poison.clone());
        self.reconfigure_adaptive(now);
        self.recall_all(now);
        self.send_max_in_flight();
        self.resize_slots(now);
        if before.restart.policy != self.limits.restart.policy {
            self.start_stopped(now);
        }
        self.replace_unresizable(now);
        self.spares_changed = true;
        if self.limits.worker_ends_jobs {
            self.workers.places().for_each(|place| self.update_kill_time(now, place));
        }
        if before.recycle.jobs != self.limits.recycle.jobs {
            self.check_all_job_limits(now);
            self.dismiss_standbys(|_| true);
        }
        let is_judged_anew = before.health.missed != self.limits.health.missed;
        for place in self.workers.places() {
            // Updates the worker's timer, which depends on the limits for heartbeats and age.
            self.edit_timing(place, |worker| {
                worker.silence = if is_judged_anew { SilenceCheck::None } else { worker.silence };
            });
        }
    }

    /// If the new restart policy allows restarts, starts workers in slots that were stopped under the previous policy.
    fn start_stopped(&mut self, now: Time) {
        let is_stopping = matches!(self.mode, Mode::Stopping { .. });
        if self.limits.restart.policy == RestartPolicy::Never || is_stopping {
            return;
        }
        for slot in self.workers.slot_numbers() {
            let stopped = SlotState::Stopped { probe_at: None };
            let record = self.workers.record(slot);
            record.saved_state = record.saved_state.filter(|state| *state != stopped);
            if self.workers.slot(slot).state == stopped {
                self.open_slot(now, slot);
            }
        }
    }

    /// Sends the new `max_in_flight` to the workers. A worker that has not received its welcome message yet gets the
    /// value in that message.
    fn send_max_in_flight(&mut self) {
        let most = self.limits.max_in_flight;
        for place in self.workers.places() {
            let informed = self.edit(place, |worker| {
                let is_welcomed = matches!(worker.phase, Phase::Initializing { .. } | Phase::Ready);
                let is_informed = is_welcomed && worker.can_resize && worker.sent_max_in_flight != most;
                worker.sent_max_in_flight = if is_informed { most } else { worker.sent_max_in_flight };
                is_informed.then_some(worker.id)
            });
            if let Some(Some(worker)) = informed {
                self.actions.push(Action::SetMaxInFlight { worker, max_in_flight: most });
            }
        }
    }

    /// Replaces workers that cannot accept a higher `max_in_flight` while running. The workers are replaced one at a
    /// time.
    fn replace_unresizable(&mut self, now: Time) {
        let most = self.limits.max_in_flight;
        self.dismiss_standbys(|worker| worker.sent_max_in_flight < most);
        self.dismiss_spares(|worker| worker.sent_max_in_flight < most);
        for place in self.workers.places() {
            let Some(worker) = self.workers.get(place) else { continue };
            let slot = worker.assignment.slot();
            // A worker that has reached `recycle.jobs` is already being replaced.
            let is_replaced = worker.sent_max_in_flight < most && !worker.assignment.is_at_job_limit();
            if !is_replaced || !self.workers.fills_job_slot(worker) {
                continue;
            }
            self.edit_timing(place, |worker| worker.next_replacement_at = now);
            // A restart that is already pending for this slot does not suffice. It skips workers that were started
            // after the restart was requested.
            if !self.rolling.contains(&(slot, RecycleReason::Resize)) {
                self.rolling.push_back((slot, RecycleReason::Resize));
            }
        }
        self.continue_rolling_restart(now);
    }

    /// Opens or closes slots until the number of slots matches the configuration.
    fn resize_slots(&mut self, now: Time) {
        let wanted = self.limits.slot_count();
        let in_all = wanted + self.limits.spare_count();
        if matches!(self.mode, Mode::Stopping { .. }) {
            return;
        }
        self.keep_most_useful_slots(now, wanted, false);
        self.keep_most_useful_slots(now, in_all, true);
        self.workers.add_slots(in_all);
        for slot in self.workers.slot_numbers() {
            let entry = self.workers.slot(slot);
            let (is_closed, is_spare_slot) = (entry.state == SlotState::Closed, entry.is_spare_slot);
            let (is_wanted, becomes_spare_slot) = ((slot as usize) < in_all, slot as usize >= wanted);
            match (is_wanted, is_closed) {
                (true, true) => {
                    self.workers.set_spare_slot(&self.limits, slot, becomes_spare_slot);
                    self.open_slot(now, slot);
                }
                (true, false) if is_spare_slot && !becomes_spare_slot => {
                    self.workers.set_spare_slot(&self.limits, slot, false);
                    self.spares_changed = true;
                }
                (true, false) if !is_spare_slot && becomes_spare_slot => {
                    self.clear_slot(now, slot, SlotState::Closed);
                    self.workers.set_spare_slot(&self.limits, slot, true);
                    self.open_slot(now, slot);
                }
                (false, false) => self.clear_slot(now, slot, SlotState::Closed),
                (true, false) | (false, true) => {}
            }
        }
        self.reject_without_workers(now);
    }

    /// Exchanges slots' numbers until no slot numbered `count` or higher is more useful than a lower slot of the same
    /// kind. Otherwise, a decrease could stop the only worker that is ready.
    fn keep_most_useful_slots(&mut self, now: Time, count: usize, are_spare_slots: bool) {
        loop {
            let slots = self.workers.slots().iter().zip(0..);
            let (kept, surplus): (Vec<_>, Vec<_>) = slots
                .filter(|(slot, _)| slot.is_spare_slot == are_spare_slots && slot.state != SlotState::Closed)
                .map(|(slot, number)| (self.usefulness(now, slot), number))
                .partition(|&(_, number): &(_, u32)| (number as usize) < count);
            let least = kept.into_iter().min();
            let most = surplus.into_iter().min_by_key(|&(usefulness, number)| (Reverse(usefulness), number));
            let (Some(least), Some(most)) = (least, most) else { return };
            if least.0 >= most.0 {
                return;
            }
            let exchange = SlotExchange(least.1, most.1);
            self.workers.exchange_slots(exchange);
            self.renumber_withheld(exchange);
            self.rolling.iter_mut().for_each(|(slot, _)| exchange.apply(slot));
            self.spares_changed = true;
        }
    }

    fn usefulness(&self, now: Time, slot: &Slot) -> Usefulness {
        let is_waiting = |state: &SlotState| state.next_start().is_none_or(|at| at > now);
        let saved_state = slot.record.saved_state.filter(is_waiting);
        let worker = slot.state.worker().and_then(|place| self.workers.get(place));
        match (saved_state.unwrap_or(slot.state), worker) {
            (SlotState::Stopped { .. }, _) => Usefulness::Stopped,
            (_, Some(worker)) if worker.is_starting() => Usefulness::Starting,
            (_, Some(worker)) if worker.is_ready() && worker.kill_at.is_none() => {
                if worker.jobs.is_empty() {
                    Usefulness::Idle
                } else {
                    Usefulness::Busy
                }
            }
            _ => Usefulness::Waiting,
        }
    }

    /// Starts a worker in a slot, either immediately or as soon as the slot becomes available.
    fn open_slot(&mut self, now: Time, slot: u32) {
        if self.activity != Activity::ScaledToZero && self.restore_backoff(now, slot) {
            return;
        }
        let has_room = self.workers.slot(slot).replaced == 0;
        match self.activity {
            Activity::ScaledToZero => self.set_slot(slot, SlotState::Empty),
            Activity::Started if has_room => self.spawn(now, slot, None),
            Activity::Started | Activity::StartAnnounced => self.set_slot(slot, SlotState::Awaiting),
        }
    }

    /// Restores the backoff or the stopped state that a slot had before the bulkhead was scaled to zero, so that
    /// scaling to zero does not hide failing workers. Returns true if the slot must wait.
    fn restore_backoff(&mut self, now: Time, slot: u32) -> bool {
        let waits = |state: &SlotState| match state {
            SlotState::Backoff { until: at } | SlotState::Stopped { probe_at: Some(at) } => *at > now,
            SlotState::Stopped { probe_at: None } => true,
            _ => false,
        };
        match self.workers.record(slot).saved_state.take().filter(waits) {
            Some(state) => {
                self.set_slot(slot, state);
                true
            }
            None => false,
        }
    }

    /// Sets a slot's state, and asks all workers of the slot to finish their jobs and exit.
    fn clear_slot(&mut self, now: Time, slot: u32, state: SlotState) {
        let entry = self.workers.slot(slot);
        let (before, successor) = (entry.state, entry.successor);
        let record = self.workers.record(slot);
        let is_waiting = matches!(before, SlotState::Backoff { .. } | SlotState::Stopped { .. });
        if is_waiting && state == SlotState::Empty {
            record.saved_state = Some(before);
        }
        record.has_had_worker = false;
        record.has_settled = false;
        self.rolling.retain(|(rolling, _)| *rolling != slot);
        self.set_slot(slot, state);
        for place in before.worker().into_iter().chain(successor) {
            self.reassign(place, |worker| worker.replace(slot, false));
            self.drain_worker(now, place);
        }
    }

    /// Handles the exit of a replaced or surplus worker, or the worker's removal from its slot. The slot may have been
    /// waiting for the worker to leave.
    pub(super) fn replaced_worker_gone(&mut self, now: Time, slot: u32) {
        if self.workers.slot(slot).state == SlotState::Awaiting {
            self.open_slot(now, slot);
        }
        self.continue_rolling_restart(now);
        self.start_successor_at_job_limit(now, slot);
    }

    /// Removes one replaced worker without jobs from its slot, so that the slot does not have to wait until the
    /// worker's destructors have run and the worker has exited. Returns false if there is no such worker.
    pub(super) fn release_slots(&mut self, now: Time) -> bool {
        let Some(place) = self.workers.pop_finished() else { return false };
        if self.workers.get(place).is_some_and(Worker::is_finished) {
            let slot = self.reassign(place, Worker::release_slot);
            self.exiting.push_back(place);
            if self.exiting.len() > EXITING_MAX
                && let Some(oldest) = self.exiting.pop_front()
            {
                self.kill(oldest, KillReason::ExitTimeout);
            }
            self.spares_changed = true;
            if let Some(slot) = slot {
                self.replaced_worker_gone(now, slot);
            }
        }
        true
    }

    // Functions that scale the bulkhead to zero and back.

    /// Starts workers in all empty slots.
    pub(super) fn start(&mut self, now: Time) {
        if matches!(self.mode, Mode::Stopping { .. }) {
            return;
        }
        self.activity = Activity::Started;
        for slot in self.workers.slot_numbers() {
            if matches!(self.workers.slot(slot).state, SlotState::Empty | SlotState::Awaiting) {
                self.open_slot(now, slot);
            }
        }
    }

    pub(super) fn announce_start(&mut self, now: Time) {
        if self.activity != Activity::ScaledToZero || matches!(self.mode, Mode::Stopping { .. }) {
            return;
        }
        self.activity = Activity::StartAnnounced;
        for slot in self.workers.slot_numbers() {
            if self.workers.slot(slot).state == SlotState::Empty && !self.restore_backoff(now, slot) {
                self.set_slot(slot, SlotState::Awaiting);
            }
        }
    }

    pub(super) fn scale_to_zero(&mut self, now: Time) {
        if self.activity == Activity::ScaledToZero || matches!(self.mode, Mode::Stopping { .. }) {
            return;
        }
        self.activity = Activity::ScaledToZero;
        self.idle_since = None;
        self.restart_failure = None;
        for slot in self.workers.slot_numbers() {
            if self.workers.slot(slot).state != SlotState::Closed {
                self.clear_slot(now, slot, SlotState::Empty);
            }
        }
        self.reject_without_workers(now);
    }

    /// Returns the time at which the bulkhead is scaled to zero unless a job arrives.
    pub(super) fn scale_to_zero_at(&self) -> Option<Time> {
        Some(self.idle_since? + self.limits.idle?)
    }

    pub(super) fn update_idle_since(&mut self, now: Time) {
        if self.limits.idle.is_none() {
            return;
        }
        let is_stopping = matches!(self.mode, Mode::Stopping { .. });
        let is_idle = self.jobs.is_empty() && self.activity == Activity::Started && !is_stopping;
        self.idle_since = is_idle.then(|| self.idle_since.unwrap_or(now));
    }

    // Tenants.

    /// Applies new tenant limits, and updates which tenants are blocked in the queue.
    fn reconfigure_tenants(&mut self, now: Time) {
        let general = self.limits.rate_limit;
        self.tenants.reconfigure(now, &self.limits.tenants.overrides, general.as_ref());
        for id in self.tenants.ids() {
            self.update_tenant_block(id);
        }
    }

    pub(super) fn change_tenant_limits(&mut self, now: Time, name: &str, overrides: TenantOverrides) {
        self.recall_all(now);
        let general = self.limits.rate_limit;
        if let Some(id) = self.tenants.set_overrides(now, name, overrides, general.as_ref()) {
            self.update_tenant_block(id);
        }
    }
}
