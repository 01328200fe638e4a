//! Lifecycle of a bulkhead's workers: start, welcome, readiness, replacement, drain, kill, restart.

use std::time::Duration;

use bulkhead_shared::{CrashReason, RejectReason, Verdict};

use super::recovery::Suspicion;
use super::{Activity, Bulkhead, Mode, earlier};
use crate::growth::reserve_one;
use crate::limits::RestartPolicy;
use crate::messages::{
    Action, Capabilities, Death, JobJournal, KillReason, OperatorEvent, RecycleReason, RestartCause,
    StopReason, WorkerId,
};
use crate::restart::{HISTORY_CLEARED_AFTER, NextStart, RestartSpacing};
use crate::time::Time;
use crate::workers::{End, Phase, Revision, Role, SilenceCheck, SlotState, Worker};

const SIGKILL: i32 = 9;

/// Maximum time for an idle worker to exit.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);

/// Number of consecutive silences that are blamed on the machine. After that, the worker counts as hung.
const EXCUSED_SILENCES_MAX: u32 = 20;

/// Interval between attempts to replace a worker.
pub(super) const RECYCLE_INTERVAL: Duration = Duration::from_secs(1);

impl<T> Bulkhead<T> {
    /// Starts a worker for a slot, either to fill the slot or to succeed the current worker.
    pub(super) fn spawn(&mut self, now: Time, slot: u32, role: Role, out: &mut Vec<Action<T>>) {
        if matches!(self.mode, Mode::Stopping { .. }) {
            return;
        }
        self.last_generation = self.last_generation.wrapping_add(1);
        let place = self.free_places.pop().unwrap_or_else(|| {
            reserve_one(&mut self.workers);
            self.workers.push(None);
            self.workers.len() as u32 - 1
        });
        let id = WorkerId { place, generation: self.last_generation };
        let is_spare = self.slots[slot as usize].is_spare_slot;
        let worker = Worker::new(id, slot, role, now, &self.limits);
        self.workers[place as usize] = Some(Worker { is_spare, ..worker });
        let entry = &mut self.slots[slot as usize];
        let is_restart = std::mem::replace(&mut entry.has_had_worker, true);
        let cause = match role {
            Role::Successor(reason) => reason.into(),
            // Without a recorded end, the previous worker was asked to exit.
            Role::Current | Role::Replaced => entry.last_end.unwrap_or(RestartCause::Stopped),
        };
        entry.restarts += u64::from(is_restart && !cause.is_recycling());
        match role {
            Role::Successor(_) => self.slots[slot as usize].successor = Some(place),
            Role::Current | Role::Replaced => self.set_slot(slot, SlotState::Occupied(place)),
        }
        self.arm(place);
        out.push(Action::Spawn { worker: id, slot, restart_cause: is_restart.then_some(cause) });
    }

    pub(super) fn set_slot(&mut self, slot: u32, state: SlotState) {
        match state {
            SlotState::Backoff { until: at } | SlotState::Stopped { probe_at: Some(at) } => {
                self.slot_timers.set(slot, at);
            }
            _ => self.slot_timers.clear(slot),
        }
        let entry = &mut self.slots[slot as usize];
        let was_live = entry.state.is_live() && !entry.is_spare_slot;
        let is_live = state.is_live() && !entry.is_spare_slot;
        entry.state = state;
        self.live_slots = self.live_slots + u32::from(is_live) - u32::from(was_live);
        self.spares_changed = true;
        self.count_in_use(slot);
    }

    // From spawn to ready.

    pub(super) fn spawned(&mut self, now: Time, id: WorkerId, pid: u32, out: &mut Vec<Action<T>>) {
        let handshake = self.limits.start.handshake;
        self.record_sign_of_life(now, id);
        let Some(worker) = self.worker_mut(id) else { return };
        worker.pid = Some(pid);
        let slot = worker.slot;
        if let Phase::Handshaking { until } = &mut worker.phase {
            *until = now + handshake;
            self.arm(id.place);
        }
        out.push(Action::Report(OperatorEvent::WorkerStarted { worker: id, slot, pid }));
    }

    pub(super) fn spawn_failed(
        &mut self,
        now: Time,
        id: WorkerId,
        message: String,
        out: &mut Vec<Action<T>>,
    ) {
        let Some(worker) = self.worker(id) else { return };
        let (slot, is_not_needed) = (worker.slot, worker.phase == Phase::Killing(KillReason::NotNeeded));
        self.slots[slot as usize].last_exit = Some(message.clone());
        self.slots[slot as usize].last_end = Some(RestartCause::NotStarted);
        out.push(Action::Report(OperatorEvent::WorkerNotStarted { slot, message: message.clone() }));
        self.last_failure = message;
        self.remove_and_replace(now, id.place, End { is_not_needed, ..End::NOT_STARTED }, out);
    }

    pub(super) fn hello(
        &mut self,
        now: Time,
        id: WorkerId,
        capabilities: Capabilities,
        journal: Option<Box<dyn JobJournal>>,
    ) {
        let (ready, most) = (self.limits.start.ready, self.limits.max_in_flight);
        let heartbeat = self.limits.health.heartbeat;
        self.record_sign_of_life(now, id);
        let Some(worker) = self.worker_mut(id) else { return };
        if let Phase::Handshaking { .. } = worker.phase {
            worker.phase = Phase::Initializing { until: now + ready };
            worker.has_dispatch_thread = capabilities.has_dispatch_thread;
            worker.can_resize = capabilities.can_resize;
            worker.journal = journal;
            worker.sent_max_in_flight = most;
            worker.heartbeat = heartbeat;
            self.arm(id.place);
        }
    }

    pub(super) fn extend_start(&mut self, now: Time, id: WorkerId, more: Duration) {
        let most = self.limits.start.ready;
        self.record_sign_of_life(now, id);
        let Some(worker) = self.worker_mut(id) else { return };
        if let Phase::Initializing { until } = &mut worker.phase {
            *until = (*until).max(now + more.min(most));
            self.arm(id.place);
        }
    }

    pub(super) fn start_status(&mut self, now: Time, id: WorkerId, text: String) {
        self.record_sign_of_life(now, id);
        let Some(worker) = self.worker_mut(id) else { return };
        if worker.ready_at.is_none() {
            worker.last_start_status = Some(text);
        }
    }

    pub(super) fn worker_ready(&mut self, now: Time, id: WorkerId, out: &mut Vec<Action<T>>) {
        self.record_sign_of_life(now, id);
        let Some(worker) = self.worker_mut(id) else { return };
        if !matches!(worker.phase, Phase::Initializing { .. }) {
            return;
        }
        worker.phase = Phase::Ready;
        worker.ready_at = Some(now);
        worker.last_start_status = None;
        let (slot, role) = (worker.slot, worker.role);
        let (pid, after) = (worker.pid.unwrap_or(0), now.since(worker.spawned_at));
        out.push(Action::Report(OperatorEvent::WorkerReady { worker: id, pid, after }));
        self.slots[slot as usize].has_settled = true;
        self.spares_changed = true;
        if let Role::Successor(reason) = role
            && !self.must_stand_by(now, slot, id.place, reason)
        {
            self.hand_over_slot(now, slot, id.place, reason, out);
        }
        self.refresh(id.place);
        self.arm(id.place);
        // The new worker could begin jobs that other workers were sent and have not begun.
        (0..self.workers.len() as u32).for_each(|place| self.schedule_begin_check(now, place));
        self.continue_rolling_restart(now, out);
    }

    /// Hands the slot over to a successor that is ready, and drains the slot's previous worker.
    pub(super) fn hand_over_slot(
        &mut self,
        now: Time,
        slot: u32,
        place: u32,
        reason: RecycleReason,
        out: &mut Vec<Action<T>>,
    ) {
        self.slots[slot as usize].successor = None;
        let old = self.slots[slot as usize].state.worker();
        self.set_slot(slot, SlotState::Occupied(place));
        if let Some(worker) = self.workers[place as usize].as_mut() {
            worker.role = Role::Current;
            worker.next_replacement_at = now;
        }
        self.refresh(place);
        self.arm(place);
        let Some(old) = old else { return };
        if let Some(worker) = self.workers[old as usize].as_mut() {
            worker.role = Role::Replaced;
            // A worker that was already sent SIGKILL does not delay the next worker.
            worker.killed_before_replacement = matches!(worker.phase, Phase::Killing(_) | Phase::Dead(_));
            self.slots[slot as usize].replaced += 1;
            // A worker that reached `recycle.jobs` was reported before, and a dead worker is not replaced.
            let recycled = (!worker.is_dead() && !worker.is_at_job_limit)
                .then(|| OperatorEvent::WorkerRecycled { pid: worker.pid.unwrap_or(0), reason });
            out.extend(recycled.map(Action::Report));
        }
        self.drain_worker(now, old, out);
        self.refresh(old);
    }

    /// Asks a worker to finish its jobs and exit. Kills a worker that is not ready yet.
    pub(super) fn drain_worker(&mut self, now: Time, place: u32, out: &mut Vec<Action<T>>) {
        let Some(worker) = self.workers[place as usize].as_mut() else { return };
        let id = worker.id;
        match worker.phase {
            Phase::Ready => {
                self.spares_changed = true;
                worker.phase = Phase::Draining;
                if worker.jobs.is_empty() {
                    worker.kill_at = Some(now + EXIT_TIMEOUT);
                }
                out.push(Action::Drain { worker: id });
            }
            Phase::Handshaking { .. } | Phase::Initializing { .. } => {
                self.kill(place, KillReason::NotNeeded, out);
                return;
            }
            Phase::Draining | Phase::Killing(_) | Phase::Dead(_) => return,
        }
        self.refresh(place);
        // The successor can run jobs that this worker has not begun.
        self.schedule_begin_check(now, place);
        self.arm(place);
    }

    // While running.

    pub(super) fn record_sign_of_life(&mut self, now: Time, id: WorkerId) {
        let Some(worker) = self.worker_mut(id) else { return };
        worker.last_heard_at = now;
        worker.excused_silences = 0;
        let is_stalled = worker.is_stalled;
        if worker.silence != SilenceCheck::None {
            worker.silence = SilenceCheck::None;
            self.spares_changed |= worker.is_spare;
            self.arm(id.place);
        }
        if is_stalled {
            self.clear_stall(id.place);
        }
    }

    pub(super) fn alive_at(&mut self, now: Time, id: WorkerId, at: Time) {
        let missed = self.limits.health.missed;
        let Some(worker) = self.worker_mut(id).filter(|worker| at > worker.last_heard_at) else { return };
        worker.last_heard_at = at.min(now);
        worker.excused_silences = 0;
        // A worker with little time left stays silent and is looked up again. Otherwise a worker could cause
        // a lookup all the time.
        let is_clear = worker.last_heard_at + worker.silence_max(missed) > now + worker.heartbeat / 2;
        if worker.silence != SilenceCheck::None && is_clear {
            worker.silence = SilenceCheck::None;
            self.spares_changed |= worker.is_spare;
            self.arm(id.place);
        }
        self.clear_stall(id.place);
    }

    pub(super) fn supervisor_paused(&mut self, now: Time) {
        for place in 0..self.workers.len() as u32 {
            if let Some(worker) = self.workers[place as usize].as_mut() {
                worker.last_heard_at = now;
                worker.silence = SilenceCheck::None;
                self.spares_changed |= worker.is_spare;
                self.arm(place);
            }
        }
    }

    /// Handles a worker that missed its heartbeats. The worker is observed for one heartbeat interval before
    /// it counts as hung. On a machine without free processor time, a kill would only add to the load.
    fn check_silence(&mut self, now: Time, place: u32, out: &mut Vec<Action<T>>) {
        let Some(worker) = self.workers[place as usize].as_mut() else { return };
        let id = worker.id;
        match worker.silence {
            SilenceCheck::None => {
                worker.silence = SilenceCheck::Observing { until: now + worker.heartbeat };
                out.push(Action::RecordCpuTime { worker: id });
            }
            SilenceCheck::Observing { until } if until <= now => {
                worker.silence = SilenceCheck::AwaitingResult;
                out.push(Action::CheckCpuTime { worker: id });
            }
            SilenceCheck::Observing { .. } | SilenceCheck::AwaitingResult => {}
        }
    }

    pub(super) fn cpu_time_checked(
        &mut self,
        now: Time,
        id: WorkerId,
        is_starved: bool,
        out: &mut Vec<Action<T>>,
    ) {
        let Some(worker) = self.worker_mut(id) else { return };
        if worker.silence != SilenceCheck::AwaitingResult || matches!(worker.phase, Phase::Killing(_)) {
            return;
        }
        if is_starved && worker.excused_silences < EXCUSED_SILENCES_MAX {
            worker.excused_silences += 1;
            worker.silence = SilenceCheck::None;
            worker.last_heard_at = now;
            self.spares_changed |= worker.is_spare;
            self.arm(id.place);
        } else {
            self.kill(id.place, KillReason::Hung, out);
        }
    }

    /// Limits the time to exit of a draining worker that has just answered its last job.
    pub(super) fn limit_exit_time(&mut self, now: Time, place: u32) {
        let Some(worker) = self.workers[place as usize].as_mut() else { return };
        if worker.phase == Phase::Draining && worker.jobs.is_empty() {
            worker.kill_at = Some(now + EXIT_TIMEOUT);
            self.arm(place);
        }
    }

    pub(super) fn memory(&mut self, now: Time, id: WorkerId, rss_bytes: u64, out: &mut Vec<Action<T>>) {
        let Some(worker) = self.worker(id) else { return };
        let slot = worker.slot;
        let is_at_work = worker.role == Role::Current && !worker.is_spare;
        if is_at_work && self.limits.recycle.rss.is_some_and(|most| rss_bytes > most) {
            self.recycle(now, slot, RecycleReason::Memory, out);
        }
    }

    /// Replaces the worker of a slot by its standby, by a spare, or by a successor that is started now. Does
    /// nothing if a successor is starting or has just failed. Does nothing if a replaced worker has not left
    /// the slot yet, because a slot has at most two workers.
    fn recycle(&mut self, now: Time, slot: u32, reason: RecycleReason, out: &mut Vec<Action<T>>) {
        let Some(worker) = self.worker_of(slot) else { return };
        let (entry, standby) = (&self.slots[slot as usize], self.standby(slot));
        let is_due = match reason {
            // The slot may have a new worker since it was listed for the rolling restart.
            RecycleReason::Reload => worker.revision != Revision::UpToDate,
            _ => now >= worker.next_replacement_at,
        };
        if entry.successor != standby || entry.replaced > 0 || worker.phase != Phase::Ready || !is_due {
            return;
        }
        let pid = worker.pid.unwrap_or(0);
        match standby {
            Some(standby) => self.hand_over_slot(now, slot, standby, reason, out),
            None if self.must_wait_for_spare(slot) => {}
            None if let Some(spare) = self.ready_spare() => {
                out.push(Action::Report(OperatorEvent::WorkerRecycled { pid, reason }));
                self.take_over(now, slot, spare, Some(reason), out);
            }
            None => self.spawn(now, slot, Role::Successor(reason), out),
        }
    }

    pub(super) fn rolling_restart(&mut self, now: Time, out: &mut Vec<Action<T>>) {
        let slots = (0..self.slots.len() as u32).filter(|&slot| self.needs_restart(slot));
        self.rolling = slots.map(|slot| (slot, RecycleReason::Restart)).collect();
        for worker in self.workers.iter_mut().flatten() {
            worker.next_replacement_at = now;
        }
        self.dismiss_standbys(|_| true, out);
        self.dismiss_spares(|_| true, out);
        self.continue_rolling_restart(now, out);
        self.start_successors_at_job_limit(now, out);
    }

    /// Returns true if a rolling restart must include this slot.
    fn needs_restart(&self, slot: u32) -> bool {
        let entry = &self.slots[slot as usize];
        entry.state.is_wanted() && !entry.is_spare_slot
    }

    /// Continues the rolling restart if no successor is starting and the next slot has room for one.
    pub(super) fn continue_rolling_restart(&mut self, now: Time, out: &mut Vec<Action<T>>) {
        while let Some(&(slot, reason)) = self.rolling.front()
            && self.slots[slot as usize].replaced == 0
            && !self.must_wait_for_spare(slot)
            && (0..self.slots.len() as u32)
                .all(|slot| self.slots[slot as usize].successor == self.standby(slot))
        {
            self.rolling.pop_front();
            match self.slots[slot as usize].state {
                SlotState::Occupied(_) => self.recycle(now, slot, reason, out),
                SlotState::Backoff { .. } | SlotState::Stopped { .. } => {
                    self.spawn(now, slot, Role::Current, out);
                }
                SlotState::Empty | SlotState::Awaiting | SlotState::Closed => {}
            }
        }
    }

    // New program or configuration.

    /// Replaces all workers, because new workers run another program or configuration from now on. Running
    /// workers continue until a replacement is ready, one after the other. Workers that are still starting
    /// are killed. Earlier failures are forgotten, because they say nothing about the new program.
    pub(super) fn replace(&mut self, now: Time, out: &mut Vec<Action<T>>) {
        for place in 0..self.workers.len() as u32 {
            let Some(worker) = self.workers[place as usize].as_mut() else { continue };
            worker.revision = Revision::Outdated { retry_at: None };
            worker.next_replacement_at = now;
            let is_starting = matches!(worker.phase, Phase::Handshaking { .. } | Phase::Initializing { .. });
            if is_starting && worker.role != Role::Replaced {
                self.kill(place, KillReason::NotNeeded, out);
            }
        }
        self.dismiss_standbys(|_| true, out);
        self.dismiss_spares(|_| true, out);
        self.spacing = RestartSpacing::default();
        for slot in &mut self.slots {
            slot.history.clear();
            slot.saved_state = None;
        }
        let slots = (0..self.slots.len() as u32).filter(|&slot| self.needs_restart(slot));
        self.rolling = slots.map(|slot| (slot, RecycleReason::Reload)).collect();
        self.continue_rolling_restart(now, out);
        self.start_successors_at_job_limit(now, out);
    }

    /// Makes the next attempt to replace an outdated worker.
    fn retry_replacement(&mut self, now: Time, place: u32, out: &mut Vec<Action<T>>) {
        let Some(worker) = self.workers[place as usize].as_mut() else { return };
        if worker.retry_replacement_at().is_none_or(|at| at > now) {
            return;
        }
        worker.revision = Revision::Outdated { retry_at: None };
        worker.next_replacement_at = now;
        let slot = worker.slot;
        if !self.rolling.iter().any(|(rolling, _)| *rolling == slot) {
            self.rolling.push_back((slot, RecycleReason::Reload));
        }
        self.continue_rolling_restart(now, out);
    }

    pub(super) fn worker_stopping(&mut self, now: Time, id: WorkerId, out: &mut Vec<Action<T>>) {
        self.record_sign_of_life(now, id);
        if let Some(worker) = self.worker_mut(id)
            && worker.phase == Phase::Ready
        {
            let slot = worker.slot;
            match self.standby(slot) {
                Some(standby) if standby != id.place => {
                    self.hand_over_slot(now, slot, standby, RecycleReason::Jobs, out);
                }
                _ => self.drain_worker(now, id.place, out),
            }
        }
    }

    // Kill and exit.

    pub(super) fn protocol_violated(
        &mut self,
        now: Time,
        id: WorkerId,
        message: String,
        out: &mut Vec<Action<T>>,
    ) {
        self.record_sign_of_life(now, id);
        if self.worker(id).is_some_and(|w| !matches!(w.phase, Phase::Killing(_))) {
            self.kill(id.place, KillReason::Protocol(message), out);
        }
    }

    pub(super) fn kill(&mut self, place: u32, reason: KillReason, out: &mut Vec<Action<T>>) {
        let Some(worker) = self.workers[place as usize].as_mut() else { return };
        if matches!(worker.phase, Phase::Killing(_) | Phase::Dead(_)) {
            return;
        }
        worker.phase = Phase::Killing(reason.clone());
        worker.kill_at = None;
        self.spares_changed = true;
        let (id, pid) = (worker.id, worker.pid);
        self.exiting.retain(|&exiting| exiting != place);
        self.worker_timers.clear(place);
        self.refresh(place);
        out.push(Action::Kill { worker: id, reason: reason.clone() });
        // Before the process is known to run, there is nothing to report.
        out.extend(pid.map(|pid| Action::Report(OperatorEvent::WorkerKilled { pid, reason })));
    }

    /// Sets a worker's timer to its next deadline.
    pub(super) fn arm(&mut self, place: u32) {
        let missed = self.limits.health.missed;
        let Some(worker) = self.workers[place as usize].as_ref() else { return };
        let silence = match worker.silence {
            SilenceCheck::None => Some(worker.last_heard_at + worker.silence_max(missed)),
            SilenceCheck::Observing { until } => Some(until),
            SilenceCheck::AwaitingResult => None,
        };
        let due = match worker.phase {
            Phase::Handshaking { until } => Some(until),
            Phase::Initializing { until } if worker.has_dispatch_thread => earlier(Some(until), silence),
            Phase::Initializing { until } => Some(until),
            Phase::Ready | Phase::Draining => {
                // A silent worker is not replaced before the cause of the silence is known.
                let age = match (worker.role, self.limits.recycle.age) {
                    (Role::Current, Some(age))
                        if worker.silence == SilenceCheck::None && !worker.is_at_job_limit =>
                    {
                        Some(
                            (worker.spawned_at + age)
                                .max(worker.next_replacement_at)
                                .max(worker.next_age_check),
                        )
                    }
                    _ => None,
                };
                let again = worker.retry_replacement_at().filter(|_| worker.silence == SilenceCheck::None);
                let follower =
                    self.successor_check_at(worker).filter(|_| worker.silence == SilenceCheck::None);
                let begun_or_killed = earlier(worker.next_begin_check, worker.kill_at);
                earlier(earlier(silence, again), earlier(earlier(age, follower), begun_or_killed))
            }
            Phase::Killing(_) | Phase::Dead(_) => None,
        };
        match due {
            // Each frame from a worker postpones the deadline. The timer is not postponed, and the deadline is
            // checked when the timer fires.
            Some(at) => self.worker_timers.set_at_latest(place, at),
            None => self.worker_timers.clear(place),
        }
    }

    pub(super) fn worker_timer_due(&mut self, now: Time, place: u32, out: &mut Vec<Action<T>>) {
        let missed = self.limits.health.missed;
        let Some(worker) = self.workers[place as usize].as_mut() else { return };
        if !worker.owes_heartbeats() {
            worker.last_heard_at = now;
            worker.silence = SilenceCheck::None;
        }
        let is_silent = worker.last_heard_at + worker.silence_max(missed) <= now;
        if !is_silent {
            worker.silence = SilenceCheck::None;
        }
        match worker.phase {
            Phase::Handshaking { until } if until <= now => self.kill(place, KillReason::NoHello, out),
            Phase::Initializing { until } if until <= now => self.kill(place, KillReason::NotReady, out),
            Phase::Initializing { .. } if worker.has_dispatch_thread && is_silent => {
                self.check_silence(now, place, out);
            }
            Phase::Ready | Phase::Draining => {
                self.check_begun(now, place, out);
                let Some(worker) = self.workers[place as usize].as_mut() else { return };
                if worker.kill_at.is_some_and(|at| at <= now) {
                    let reason =
                        if worker.jobs.is_empty() { KillReason::ExitTimeout } else { KillReason::Deadline };
                    self.kill(place, reason, out);
                } else if is_silent {
                    self.check_silence(now, place, out);
                } else {
                    self.recycle_if_old(now, place, out);
                    self.retry_replacement(now, place, out);
                    self.retry_successor(now, place, out);
                    self.check_standby(now, place, out);
                }
            }
            Phase::Handshaking { .. } | Phase::Initializing { .. } | Phase::Killing(_) | Phase::Dead(_) => {}
        }
        self.arm(place);
    }

    fn recycle_if_old(&mut self, now: Time, place: u32, out: &mut Vec<Action<T>>) {
        let Some(worker) = self.workers[place as usize].as_mut() else { return };
        let is_old = self.limits.recycle.age.is_some_and(|age| worker.spawned_at + age <= now);
        let is_due = now >= worker.next_replacement_at && now >= worker.next_age_check;
        if worker.role != Role::Current || worker.is_at_job_limit || !is_old || !is_due {
            return;
        }
        let slot = worker.slot;
        if worker.is_ready_spare() {
            // A ready spare runs no job, so it can be killed at once. A new spare is started in its place.
            self.kill(place, KillReason::NotNeeded, out);
            return;
        }
        self.recycle(now, slot, RecycleReason::Age, out);
        // Wait until this attempt has succeeded or failed. If no attempt was possible, a replaced worker is
        // about to leave the slot. Other reasons for a replacement do not wait, because this was no failure.
        let again = match self.slots[slot as usize].successor {
            Some(_) => now + self.limits.start.handshake + self.limits.start.ready,
            None => now + RECYCLE_INTERVAL,
        };
        if let Some(worker) = self.workers[place as usize].as_mut() {
            worker.next_age_check = again;
        }
    }

    /// Handles the loss of a worker and all its descendants with the keeper, which is no fault of the worker.
    pub(super) fn lost_with_keeper(&mut self, now: Time, id: WorkerId, out: &mut Vec<Action<T>>) {
        if let Some(worker) = self.worker_mut(id) {
            worker.phase = Phase::Killing(KillReason::KeeperDied);
            self.refresh(id.place);
            self.exited(now, id, Death::Signal(SIGKILL), out);
        }
        self.reaped(now, id, out);
    }

    /// Refills the slot of a dead worker whose descendants are all gone.
    pub(super) fn reaped(&mut self, now: Time, id: WorkerId, out: &mut Vec<Action<T>>) {
        let worker = self.workers.get(id.place as usize).and_then(Option::as_ref).filter(|w| w.id == id);
        if let Some(Worker { phase: Phase::Dead(end), .. }) = worker {
            let end = *end;
            self.remove_and_replace(now, id.place, end, out);
        }
    }

    /// Handles the exit of a worker. Answers or retries the worker's jobs. The slot stays occupied until the
    /// worker is [swept](Self::reaped).
    pub(super) fn exited(&mut self, now: Time, id: WorkerId, death: Death, out: &mut Vec<Action<T>>) {
        let Some(worker) = self.worker_mut(id) else { return };
        let killed = worker.killed();
        let note = OperatorEvent::WorkerExited {
            worker: id,
            slot: worker.slot,
            pid: worker.pid.unwrap_or(0),
            death,
            killed: killed.clone(),
            uptime: now.since(worker.spawned_at),
            served: worker.served,
            in_flight: worker.jobs.len() as u32,
        };
        let jobs = std::mem::take(&mut worker.jobs);
        let unbegun = worker.unbegun;
        // The exit of a replaced worker leaves no slot empty.
        let leaves_slot = worker.role == Role::Current && !worker.killed_before_replacement;
        let last_start_status = worker.last_start_status.take();
        let (slot, charged_slot, was_ready) = (worker.slot, worker.charged_slot, worker.ready_at.is_some());
        let is_current = worker.role == Role::Current;
        let is_mute = killed.is_none() && matches!(worker.phase, Phase::Handshaking { .. });
        let clears_history =
            worker.served > 0 && now.since(worker.ready_at.unwrap_or(now)) >= HISTORY_CLEARED_AFTER;
        // True if the worker exited by itself, did not start, hung or violated the protocol. False if the
        // supervisor killed it for another reason.
        let is_own_doing = worker.role != Role::Replaced
            && matches!(
                killed,
                None | Some(
                    KillReason::Hung | KillReason::Protocol(_) | KillReason::NoHello | KillReason::NotReady
                )
            );
        let is_failure = is_own_doing && (!was_ready || jobs.is_empty() && worker.served == 0);
        let is_clean = killed.is_none() && death == Death::Exit(0) && jobs.is_empty() && was_ready;
        let is_of_jobs = is_own_doing || killed == Some(KillReason::Deadline);
        let is_early_death = is_of_jobs && !is_failure && worker.served == 0;
        let is_at_job_limit = worker.is_at_job_limit;
        let sentence = describe(death, killed.as_ref());
        // Under other policies, even a clean exit can be the last one.
        if is_failure || self.limits.restart.policy != RestartPolicy::Always {
            self.last_failure = match (was_ready, last_start_status) {
                (true, _) if is_failure => format!("the worker ended before completing a job: {sentence}"),
                (true, _) => format!("the worker ended: {sentence}"),
                (false, None) if is_mute => format!(
                    "the worker did not start: {sentence} before the worker said hello; a program that is \
                     not built with the worker SDK needs `exec` instead of `command`"
                ),
                (false, None) => format!("the worker did not start: {sentence}"),
                (false, Some(words)) => format!("the worker did not start: {sentence}; last status: {words}"),
            };
        }
        if clears_history {
            self.slots[charged_slot as usize].history.clear();
        }
        for slot in [slot, charged_slot] {
            self.slots[slot as usize].last_exit = Some(sentence.clone());
        }
        if is_current {
            let end = RestartCause::of_end(death, killed.as_ref());
            let end = if is_clean && is_at_job_limit { RestartCause::Jobs } else { end };
            self.slots[slot as usize].last_end = Some(end);
        }
        out.push(Action::Report(note));
        if leaves_slot {
            self.withhold(now, charged_slot, &jobs, killed.as_ref());
        }
        let (unread, begun) = self.requeue_unread(jobs);
        let loss = match (&killed, begun.len() + unbegun) {
            (None | Some(KillReason::Hung | KillReason::Protocol(_)), 1) => Suspicion::OnlyJob,
            (None | Some(KillReason::Hung | KillReason::Protocol(_)), _) => Suspicion::OneOfSeveral,
            _ => Suspicion::Cleared,
        };
        let verdict = crash(death, killed.as_ref(), sentence);
        for index in begun {
            self.job_lost(now, index, &verdict, loss, out);
        }
        for index in unread {
            self.job_lost(now, index, &verdict, Suspicion::Cleared, out);
        }
        self.requeue_prefetched(now, id, out);
        let is_not_needed = killed == Some(KillReason::NotNeeded);
        self.exiting.retain(|&exiting| exiting != id.place);
        if let Some(worker) = self.worker_mut(id) {
            worker.phase =
                Phase::Dead(End { is_failure, is_clean, is_early_death, is_not_needed, is_at_job_limit });
            (worker.awaited_jobs, worker.overdue_jobs, worker.kill_at) = (0, 0, None);
            self.spares_changed = true;
            self.refresh(id.place);
            self.arm(id.place);
        }
        // A standby does not wait for the descendants of its predecessor.
        if is_current && let Some(standby) = self.standby(slot) {
            self.hand_over_slot(now, slot, standby, RecycleReason::Jobs, out);
        }
    }

    /// Removes a worker from the table and decides how its slot continues.
    fn remove_and_replace(&mut self, now: Time, place: u32, end: End, out: &mut Vec<Action<T>>) {
        let Some(worker) = self.remove_worker(place) else { return };
        self.worker_timers.clear(place);
        self.free_places.push(place);
        self.spares_changed = true;
        let (slot, is_not_needed) = (worker.slot, end.is_not_needed);
        if end.is_failure && !is_not_needed {
            self.slots[slot as usize].has_settled = true;
        }
        match worker.role {
            Role::Replaced if worker.has_released_slot => {}
            Role::Replaced => self.replaced_worker_gone(now, slot, out),
            Role::Successor(_) if is_not_needed => {
                self.slots[slot as usize].successor = None;
                self.continue_rolling_restart(now, out);
                self.start_successor_at_job_limit(now, slot, out);
            }
            Role::Successor(reason) => self.successor_failed(now, slot, reason, out),
            Role::Current if is_not_needed && self.slots[slot as usize].successor.is_none() => {
                // Has no effect while the bulkhead stops, because `spawn` then does nothing.
                self.set_slot(slot, SlotState::Empty);
                self.spawn(now, slot, Role::Current, out);
            }
            Role::Current => self.refill_slot(now, slot, worker.charged_slot, end, out),
        }
    }

    /// Handles the failure of a successor. The current worker continues, and the next attempt waits.
    fn successor_failed(&mut self, now: Time, slot: u32, reason: RecycleReason, out: &mut Vec<Action<T>>) {
        self.slots[slot as usize].successor = None;
        let pause = self.limits.restart.backoff_max.max(Duration::from_secs(1));
        if let SlotState::Occupied(place) = self.slots[slot as usize].state {
            if let Some(worker) = self.workers[place as usize].as_mut() {
                (worker.next_replacement_at, worker.next_age_check) = (now + pause, now + pause);
            }
            self.arm(place);
        }
        // The cause probably affects the other successors as well.
        self.rolling.clear();
        for place in 0..self.workers.len() as u32 {
            let Some(worker) = self.workers[place as usize].as_mut() else { continue };
            if let Revision::Outdated { retry_at } = &mut worker.revision {
                *retry_at = Some(now + pause);
                self.arm(place);
            }
        }
        if reason == RecycleReason::Reload {
            let message = self.slots[slot as usize].last_exit.clone().unwrap_or_default();
            out.push(Action::Report(OperatorEvent::ReplacementFailed { slot, message, retry_in: pause }));
        }
    }

    /// Fills a slot whose worker is gone. The slot waits, is restarted, or stops, depending on the worker's
    /// end.
    fn refill_slot(&mut self, now: Time, slot: u32, charged_slot: u32, end: End, out: &mut Vec<Action<T>>) {
        if matches!(self.mode, Mode::Stopping { .. }) {
            self.set_slot(slot, SlotState::Empty);
            return;
        }
        if let Some(successor) = self.slots[slot as usize].successor.take() {
            if let Some(worker) = self.workers[successor as usize].as_mut() {
                worker.role = Role::Current;
            }
            self.set_slot(slot, SlotState::Occupied(successor));
            self.refresh(successor);
            self.arm(successor);
            return;
        }
        if !self.may_restart(end) {
            self.stop_slot(now, slot, StopReason::Policy, None, out);
            return;
        }
        let next = if end.is_failure {
            let random = self.next_random();
            self.slots[charged_slot as usize].history.record_failure(now, &self.limits.restart, random)
        } else {
            NextStart::At(self.spacing.record_death(now, end.is_early_death))
        };
        match next {
            NextStart::At(at) if at <= now => self.spawn(now, slot, Role::Current, out),
            NextStart::At(until) => {
                self.set_slot(slot, SlotState::Backoff { until });
                let delay = until.since(now);
                out.push(Action::Report(OperatorEvent::RestartBackoff { slot, delay }));
            }
            NextStart::Failed { probe_at } => {
                self.stop_slot(now, slot, StopReason::Failed, Some(probe_at), out)
            }
        }
    }

    fn stop_slot(
        &mut self,
        now: Time,
        slot: u32,
        reason: StopReason,
        probe_at: Option<Time>,
        out: &mut Vec<Action<T>>,
    ) {
        self.slots[slot as usize].has_settled = true;
        self.set_slot(slot, SlotState::Stopped { probe_at });
        if self.live_slots > 0 || self.slots[slot as usize].is_spare_slot {
            return;
        }
        if reason == StopReason::Policy {
            self.last_failure.push_str("; restart.policy allows no restart");
        }
        self.reject_without_workers(now, out);
        let message = self.last_failure.clone();
        out.push(Action::Report(OperatorEvent::BulkheadFailed { reason, message }));
    }

    /// Rejects all waiting jobs if no slot will get a worker.
    pub(super) fn reject_without_workers(&mut self, now: Time, out: &mut Vec<Action<T>>) {
        if self.live_slots == 0 && self.queued() > 0 {
            let sentence = self.no_worker_message();
            self.reject_queue(now, RejectReason::Unavailable, &sentence, out);
        }
    }

    /// Returns a message for clients that says why no worker runs.
    pub(super) fn no_worker_message(&self) -> String {
        match (self.activity, self.limits.max_in_flight) {
            (_, 0) => "max_in_flight is 0".to_owned(),
            (Activity::ScaledToZero, _) => {
                "all tenants that may have workers are busy (tenants.max_active)".into()
            }
            _ => format!("no worker runs: {}", self.last_failure),
        }
    }

    // Operator commands.

    pub(super) fn drain(&mut self, now: Time, out: &mut Vec<Action<T>>) {
        if self.mode == Mode::Open {
            self.mode = Mode::Draining;
            self.reject_queue(now, RejectReason::Draining, "", out);
            out.push(Action::Report(OperatorEvent::Draining));
        }
    }

    pub(super) fn resume(&mut self, out: &mut Vec<Action<T>>) {
        if self.mode == Mode::Draining {
            self.mode = Mode::Open;
            out.push(Action::Report(OperatorEvent::Resumed));
        }
    }

    pub(super) fn reset(&mut self, now: Time, out: &mut Vec<Action<T>>) {
        self.poison.reset();
        self.spacing = RestartSpacing::default();
        let transition = self.breaker.reset(now);
        self.report_transition(transition, out);
        for slot in 0..self.slots.len() as u32 {
            let entry = &mut self.slots[slot as usize];
            entry.history.clear();
            entry.saved_state = None;
            if matches!(entry.state, SlotState::Backoff { .. } | SlotState::Stopped { .. }) {
                self.spawn(now, slot, Role::Current, out);
            }
        }
    }

    pub(super) fn stop(&mut self, now: Time, by: Time, out: &mut Vec<Action<T>>) {
        let was_stopping = self.is_stopping();
        self.mode = Mode::Stopping { by };
        if !was_stopping {
            self.rolling.clear();
            self.reject_queue(now, RejectReason::Draining, "", out);
            for slot in 0..self.slots.len() as u32 {
                if !matches!(self.slots[slot as usize].state, SlotState::Occupied(_)) {
                    self.set_slot(slot, SlotState::Empty);
                }
            }
            for place in 0..self.workers.len() as u32 {
                self.drain_worker(now, place, out);
            }
        }
        if by <= now {
            self.kill_all(out);
        }
    }

    /// Kills all workers, because the time to stop is up.
    pub(super) fn kill_all(&mut self, out: &mut Vec<Action<T>>) {
        for place in 0..self.workers.len() as u32 {
            self.kill(place, KillReason::ExitTimeout, out);
        }
        // The timer must not fire again. Only the exits of the workers are still expected.
        self.mode = Mode::Stopping { by: Time(u64::MAX) };
    }

    /// Returns true if the bulkhead was asked to stop.
    pub fn is_stopping(&self) -> bool {
        matches!(self.mode, Mode::Stopping { .. })
    }

    /// Returns true if the bulkhead was asked to stop and has no workers left.
    pub fn is_stopped(&self) -> bool {
        matches!(self.mode, Mode::Stopping { .. }) && self.workers.iter().all(Option::is_none)
    }
}

/// Returns the outcome of jobs whose worker died.
pub(super) fn crash(death: Death, killed: Option<&KillReason>, message: String) -> Verdict {
    let (reason, status) = match (killed, death) {
        (None, Death::Exit(code)) => (CrashReason::Exit, Some(code)),
        (None, Death::Signal(signal)) => (CrashReason::Signal, Some(signal)),
        (None, Death::Violation(_) | Death::TmpFull) => (CrashReason::Violation, None),
        (None, Death::Oom) => (CrashReason::Oom, None),
        (Some(KillReason::Hung), _) => (CrashReason::Hung, None),
        (Some(KillReason::Protocol(_)), _) => (CrashReason::Protocol, None),
        (Some(KillReason::ExitTimeout), _) => (CrashReason::Stopped, None),
        (Some(KillReason::KeeperDied), _) => (CrashReason::Signal, Some(SIGKILL)),
        (
            Some(KillReason::Deadline | KillReason::NoHello | KillReason::NotReady | KillReason::NotNeeded),
            _,
        ) => (CrashReason::Collateral, None),
    };
    Verdict::Crashed { reason, status, message }
}

/// Returns a description of a worker's end, to be appended to the worker's name.
pub fn describe(death: Death, killed: Option<&KillReason>) -> String {
    match (killed, death) {
        (Some(reason), _) => format!("killed by the supervisor: {}", reason.describe()),
        (None, death) => death.to_string(),
    }
}

impl std::fmt::Display for Death {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Exit(code) => write!(f, "exited with status {code}"),
            Self::Signal(signal) => write!(f, "killed by {}", signal_name(*signal)),
            Self::Violation("") => write!(
                f,
                "made a system call that the sandbox forbids; the kernel does not report which call (32-bit \
                 calls have no name)"
            ),
            Self::Violation(call) => write!(f, "made the system call {call}, which the sandbox forbids"),
            Self::TmpFull => {
                write!(f, "ended by the supervisor: the temporary folder held more than sandbox.tmp allows")
            }
            Self::Oom => write!(f, "killed by the kernel: the memory limit was exceeded"),
        }
    }
}

/// Returns the name of a signal, such as `SIGSEGV`, by its Linux number on x86-64 and AArch64.
fn signal_name(signal: i32) -> String {
    const NAMES: [&str; 31] = [
        "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE",
        "ALRM", "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ",
        "VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS",
    ];
    let name = usize::try_from(signal).ok().and_then(|number| NAMES.get(number.checked_sub(1)?));
    name.map_or_else(|| format!("signal {signal}"), |name| format!("SIG{name}"))
}
