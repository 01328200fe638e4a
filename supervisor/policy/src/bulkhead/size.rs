//! Number of workers and of permits per worker, which can change while jobs run, and the resting state
//! without workers. Growth takes effect at once. Surplus workers finish their jobs.

use super::{Bulkhead, Mode};
use crate::limits::{Limits, RestartPolicy, TenantOverrides};
use crate::messages::{Action, KillReason, LimitChange, RecycleReason};
use crate::time::Time;
use crate::workers::{Phase, Role, SilenceCheck, SlotState};

/// Maximum number of replaced workers that may still be exiting while their slots have new workers. One more
/// causes the oldest to be killed.
const EXITING_MAX: usize = 16;

/// Demand for workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    /// No workers are needed: before [`crate::Event::Start`], after [`crate::Event::ScaleToZero`], or after `idle`
    /// without a job.
    ScaledToZero,
    /// Workers will be needed soon, because [`crate::Event::Start`] was announced.
    StartAnnounced,
    /// Workers are needed.
    Started,
}

impl<T> Bulkhead<T> {
    /// Returns the demand for workers.
    pub fn activity(&self) -> Activity {
        self.activity
    }

    /// Returns true if the bulkhead has no processes left.
    pub fn has_no_workers(&self) -> bool {
        self.workers.iter().all(Option::is_none)
    }

    /// Returns true if no job waits and no worker has a job.
    pub fn has_no_jobs(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Returns the time at which the bulkhead became idle. Tracked only if [`crate::Limits::idle`] is
    /// configured.
    pub fn idle_since(&self) -> Option<Time> {
        self.idle_since
    }

    pub(super) fn slot_count(&self) -> usize {
        if self.limits.max_in_flight == 0 { 0 } else { self.limits.processes as usize }
    }

    // New limits.

    pub(super) fn change(&mut self, now: Time, change: LimitChange, out: &mut Vec<Action<T>>) {
        self.limits.max_queue = change.max_queue.unwrap_or(self.limits.max_queue);
        if let Some(limit) = change.rate_limit {
            let before = std::mem::replace(&mut self.limits.rate_limit, limit);
            if let Some(limit) = limit {
                self.tenants.rescale(now, before.as_ref(), &limit);
            }
        }
        self.limits.processes = change.processes.unwrap_or(self.limits.processes);
        if let Some(most) = change.max_in_flight {
            // Workers must not get another maximum before their unbegun jobs are recalled.
            self.recall_all(now, out);
            self.limits.max_in_flight = most;
            self.send_max_in_flight(out);
        }
        self.resize_slots(now, out);
        self.replace_unresizable(now, out);
    }

    /// Replaces all limits, as in a reload of the configuration.
    pub(super) fn reconfigure(&mut self, now: Time, limits: Limits, out: &mut Vec<Action<T>>) {
        let before = std::mem::replace(&mut self.limits, limits);
        if let Some(limit) = self.limits.rate_limit {
            self.tenants.rescale(now, before.rate_limit.as_ref(), &limit);
        }
        self.reconfigure_tenants(now);
        self.idle_since = self.idle_since.filter(|_| self.limits.idle.is_some());
        if before.breaker != self.limits.breaker {
            let transition = self.breaker.reconfigure(now, self.limits.breaker.clone());
            self.report_transition(transition, out);
        }
        self.retries.reconfigure(self.limits.retry.clone());
        self.poison.reconfigure(now, self.limits.poison.clone());
        self.reconfigure_adaptive(now);
        self.recall_all(now, out);
        self.send_max_in_flight(out);
        self.resize_slots(now, out);
        if before.restart.policy != self.limits.restart.policy {
            self.start_stopped(now, out);
        }
        self.replace_unresizable(now, out);
        self.spares_changed = true;
        if self.limits.worker_ends_jobs {
            (0..self.workers.len() as u32).for_each(|place| self.update_kill_time(now, place));
        }
        if before.recycle.jobs != self.limits.recycle.jobs {
            self.check_all_job_limits(now, out);
            self.dismiss_standbys(|_| true, out);
        }
        let is_judged_anew = before.health.missed != self.limits.health.missed;
        for place in 0..self.workers.len() as u32 {
            if let Some(worker) = self.workers[place as usize].as_mut().filter(|_| is_judged_anew) {
                worker.silence = SilenceCheck::None;
            }
            // The timer depends on limits for heartbeats and age.
            self.arm(place);
        }
    }

    /// Starts workers in slots that the previous restart policy has stopped, if the new policy allows
    /// restarts.
    fn start_stopped(&mut self, now: Time, out: &mut Vec<Action<T>>) {
        let is_stopping = matches!(self.mode, Mode::Stopping { .. });
        if self.limits.restart.policy == RestartPolicy::Never || is_stopping {
            return;
        }
        for slot in 0..self.slots.len() as u32 {
            let entry = &mut self.slots[slot as usize];
            entry.saved_state =
                entry.saved_state.filter(|state| !matches!(state, SlotState::Stopped { probe_at: None }));
            if matches!(entry.state, SlotState::Stopped { probe_at: None }) {
                self.open_slot(now, slot, out);
            }
        }
    }

    /// Tells workers their new maximum number of jobs. A worker that has not been welcomed yet gets the
    /// number with its welcome.
    fn send_max_in_flight(&mut self, out: &mut Vec<Action<T>>) {
        let most = self.limits.max_in_flight;
        for place in 0..self.workers.len() as u32 {
            let Some(worker) = self.workers[place as usize].as_mut() else { continue };
            let is_told = matches!(worker.phase, Phase::Initializing { .. } | Phase::Ready);
            if is_told && worker.can_resize && worker.sent_max_in_flight != most {
                worker.sent_max_in_flight = most;
                out.push(Action::SetMaxInFlight { worker: worker.id, max_in_flight: most });
            }
            self.refresh(place);
        }
    }

    /// Replaces workers that cannot increase their maximum number of jobs, one after the other.
    fn replace_unresizable(&mut self, now: Time, out: &mut Vec<Action<T>>) {
        let most = self.limits.max_in_flight;
        self.dismiss_standbys(|worker| worker.sent_max_in_flight < most, out);
        self.dismiss_spares(|worker| worker.sent_max_in_flight < most, out);
        for worker in self.workers.iter_mut().flatten() {
            // A worker that reached `recycle.jobs` is being replaced anyway.
            let is_at_work = worker.role == Role::Current && !worker.is_spare && !worker.is_at_job_limit;
            if !is_at_work || worker.sent_max_in_flight >= most {
                continue;
            }
            worker.next_replacement_at = now;
            if !self.rolling.iter().any(|(slot, _)| *slot == worker.slot) {
                self.rolling.push_back((worker.slot, RecycleReason::Resize));
            }
        }
        self.continue_rolling_restart(now, out);
    }

    /// Opens and closes slots to match the configured number.
    fn resize_slots(&mut self, now: Time, out: &mut Vec<Action<T>>) {
        let (wanted, in_all) = (self.slot_count(), self.slot_count() + self.spare_count());
        if matches!(self.mode, Mode::Stopping { .. }) {
            return;
        }
        while self.slots.len() < in_all {
            self.slots.push(super::Slot { state: SlotState::Closed, ..super::Slot::default() });
        }
        for slot in 0..self.slots.len() as u32 {
            let entry = &self.slots[slot as usize];
            let is_closed = matches!(entry.state, SlotState::Closed);
            let (is_wanted, becomes_spare_slot) = ((slot as usize) < in_all, slot as usize >= wanted);
            match (is_wanted, is_closed) {
                (true, true) => {
                    self.slots[slot as usize].is_spare_slot = becomes_spare_slot;
                    self.open_slot(now, slot, out);
                }
                (true, false) if entry.is_spare_slot && !becomes_spare_slot => self.convert_spare_slot(slot),
                (true, false) if !entry.is_spare_slot && becomes_spare_slot => {
                    self.clear_slot(now, slot, SlotState::Closed, out);
                    self.slots[slot as usize].is_spare_slot = true;
                    self.open_slot(now, slot, out);
                }
                (false, false) => self.clear_slot(now, slot, SlotState::Closed, out),
                (true, false) | (false, true) => {}
            }
        }
        self.reject_without_workers(now, out);
    }

    /// Fills a slot as soon as possible.
    fn open_slot(&mut self, now: Time, slot: u32, out: &mut Vec<Action<T>>) {
        if self.activity != Activity::ScaledToZero && self.restore_backoff(now, slot) {
            return;
        }
        let has_room = self.slots[slot as usize].replaced == 0;
        match self.activity {
            Activity::ScaledToZero => self.set_slot(slot, SlotState::Empty),
            Activity::Started if has_room => self.spawn(now, slot, Role::Current, out),
            Activity::Started | Activity::StartAnnounced => self.set_slot(slot, SlotState::Awaiting),
        }
    }

    /// Restores the backoff or stop that a slot had before the bulkhead rested, so that a rest does not hide
    /// that workers fail. Returns true if the slot has to wait.
    fn restore_backoff(&mut self, now: Time, slot: u32) -> bool {
        let waits = |state: &SlotState| match state {
            SlotState::Backoff { until: at } | SlotState::Stopped { probe_at: Some(at) } => *at > now,
            SlotState::Stopped { probe_at: None } => true,
            _ => false,
        };
        match self.slots[slot as usize].saved_state.take().filter(waits) {
            Some(state) => {
                self.set_slot(slot, state);
                true
            }
            None => false,
        }
    }

    /// Sets a slot to `state`. The slot's workers finish their jobs and then exit.
    fn clear_slot(&mut self, now: Time, slot: u32, state: SlotState, out: &mut Vec<Action<T>>) {
        let entry = &mut self.slots[slot as usize];
        let successor = entry.successor.take();
        let is_waiting = matches!(entry.state, SlotState::Backoff { .. } | SlotState::Stopped { .. });
        if is_waiting && matches!(state, SlotState::Empty) {
            entry.saved_state = Some(entry.state);
        }
        let current = entry.state.worker();
        entry.has_had_worker = false;
        entry.has_settled = false;
        self.rolling.retain(|(rolling, _)| *rolling != slot);
        self.set_slot(slot, state);
        for place in current.into_iter().chain(successor) {
            if let Some(worker) = self.workers[place as usize].as_mut() {
                worker.role = Role::Replaced;
                self.slots[slot as usize].replaced += 1;
            }
            self.drain_worker(now, place, out);
            self.refresh(place);
        }
    }

    /// Handles that a replaced or surplus worker has exited or left its slot. The slot may wait for that.
    pub(super) fn replaced_worker_gone(&mut self, now: Time, slot: u32, out: &mut Vec<Action<T>>) {
        self.slots[slot as usize].replaced -= 1;
        if matches!(self.slots[slot as usize].state, SlotState::Awaiting) {
            self.open_slot(now, slot, out);
        }
        self.continue_rolling_restart(now, out);
        self.start_successor_at_job_limit(now, slot, out);
    }

    /// Takes one replaced worker without jobs out of its slot. The slot then does not wait for the exit,
    /// which a destructor may delay. Returns false if there is no such worker.
    pub(super) fn release_slots(&mut self, now: Time, out: &mut Vec<Action<T>>) -> bool {
        let Some(place) = self.finished_replaced.pop() else { return false };
        if let Some(worker) = self.workers[place as usize].as_mut()
            && worker.role == Role::Replaced
            && worker.phase == Phase::Draining
            && !worker.has_released_slot
            && worker.is_idle()
        {
            worker.has_released_slot = true;
            let slot = worker.slot;
            self.exiting.push_back(place);
            if self.exiting.len() > EXITING_MAX
                && let Some(oldest) = self.exiting.pop_front()
            {
                self.kill(oldest, KillReason::ExitTimeout, out);
            }
            self.spares_changed = true;
            self.replaced_worker_gone(now, slot, out);
        }
        true
    }

    // Rest.

    /// Starts workers in all empty slots.
    pub(super) fn start(&mut self, now: Time, out: &mut Vec<Action<T>>) {
        if matches!(self.mode, Mode::Stopping { .. }) {
            return;
        }
        self.activity = Activity::Started;
        for slot in 0..self.slots.len() as u32 {
            if matches!(self.slots[slot as usize].state, SlotState::Empty | SlotState::Awaiting) {
                self.open_slot(now, slot, out);
            }
        }
    }

    pub(super) fn announce_start(&mut self, now: Time) {
        if self.activity != Activity::ScaledToZero || matches!(self.mode, Mode::Stopping { .. }) {
            return;
        }
        self.activity = Activity::StartAnnounced;
        for slot in 0..self.slots.len() as u32 {
            if matches!(self.slots[slot as usize].state, SlotState::Empty) && !self.restore_backoff(now, slot)
            {
                self.set_slot(slot, SlotState::Awaiting);
            }
        }
    }

    pub(super) fn scale_to_zero(&mut self, now: Time, out: &mut Vec<Action<T>>) {
        if self.activity == Activity::ScaledToZero || matches!(self.mode, Mode::Stopping { .. }) {
            return;
        }
        self.activity = Activity::ScaledToZero;
        self.idle_since = None;
        for slot in 0..self.slots.len() as u32 {
            if !matches!(self.slots[slot as usize].state, SlotState::Closed) {
                self.clear_slot(now, slot, SlotState::Empty, out);
            }
        }
        self.reject_without_workers(now, out);
    }

    /// Returns the time at which the bulkhead rests if no job arrives.
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

    /// Applies new limits of tenants. This may block or unblock any tenant in the queue.
    fn reconfigure_tenants(&mut self, now: Time) {
        let general = self.limits.rate_limit;
        self.tenants.reconfigure(now, &self.limits.tenants.overrides, general.as_ref());
        for id in self.tenants.ids() {
            self.update_tenant_block(id);
        }
    }

    pub(super) fn change_tenant_limits(
        &mut self,
        now: Time,
        name: &str,
        overrides: TenantOverrides,
        out: &mut Vec<Action<T>>,
    ) {
        self.recall_all(now, out);
        let general = self.limits.rate_limit;
        if let Some(id) = self.tenants.set_overrides(now, name, overrides, general.as_ref()) {
            self.update_tenant_block(id);
        }
    }
}
