//! Decides when a bulkhead's workers start, become ready, drain, are killed, and are replaced or restarted. Returns
//! actions, which the data plane and the keeper carry out. `restart` computes delays, `spares` manages spare workers,
//! and `recycle` handles `recycle.jobs`.

use std::time::Duration;

use bulkhead_shared::RejectReason;

use super::prefetch::time_to_begin;
use super::recovery::Suspicion;
use super::{Activity, Bulkhead, Mode};
use crate::ending::{Death, Ending, KillReason, RecycleReason, RestartCause, SIGKILL};
use crate::limits::{Health, RARE_HEARTBEATS_MISSED, RestartPolicy};
use crate::messages::{Action, Capabilities, JobJournal, OperatorEvent, StopReason, WorkerId};
use crate::restart::{HISTORY_CLEARED_AFTER, NextStart, RestartSpacing};
use crate::time::Time;
use crate::worker::{Assignment, EndEffect, Phase, Revision, SilenceCheck, Worker};
use crate::workers::SlotState;

/// Maximum time that an idle worker has to exit before it is killed.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum number of times in a row that a worker's silence is blamed on a busy machine. After that, a silent worker
/// counts as hung.
const EXCUSED_SILENCES_MAX: u32 = 20;

/// Interval between attempts to start a worker for which no user ID is free.
const ID_RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Interval between attempts to replace the same worker.
pub(super) const RECYCLE_INTERVAL: Duration = Duration::from_secs(1);

impl<T> Bulkhead<T> {
    /// Starts a worker for a slot. If `successor` is set, the new worker is a successor that will replace the
    /// slot's current worker. Otherwise, the new worker fills the slot.
    pub(super) fn spawn(&mut self, now: Time, slot: u32, successor: Option<RecycleReason>) {
        if self.is_stopping() {
            return;
        }
        let assignment = match successor {
            Some(reason) => Assignment::Successor { slot, reason },
            None => Assignment::of_slot(slot, self.workers.slot(slot).is_spare_slot),
        };
        let worker = self.workers.insert(&self.limits, now, assignment);
        let record = self.workers.record(slot);
        let is_restart = std::mem::replace(&mut record.has_had_worker, true);
        // A previous worker without a recorded cause exited because the supervisor had asked it to exit.
        let cause =
            successor.map_or_else(|| record.last_end.unwrap_or(RestartCause::Stopped), RestartCause::from);
        record.restarts += u64::from(is_restart && !cause.is_recycling());
        if successor.is_none() {
            self.set_slot(slot, SlotState::Occupied(worker.place));
        }
        self.actions.push(Action::Spawn { worker, slot, restart_cause: is_restart.then_some(cause) });
    }

    pub(super) fn set_slot(&mut self, slot: u32, state: SlotState) {
        self.workers.set_slot(&self.limits, slot, state);
        self.spares_changed = true;
    }

    // Functions for the start of a worker, from the spawn until the worker is ready.

    pub(super) fn spawned(&mut self, now: Time, id: WorkerId, pid: u32) {
        let handshake = self.limits.start.handshake;
        self.record_sign_of_life(now, id);
        let slot = self.edit_by_id(id, |worker| {
            worker.pid = Some(pid);
            if let Phase::Handshaking { until } = &mut worker.phase {
                *until = now + handshake;
            }
            worker.assignment.slot()
        });
        if let Some(slot) = slot {
            self.actions.push(Action::Report(OperatorEvent::WorkerStarted { worker: id, slot, pid }));
        }
    }

    pub(super) fn spawn_failed(&mut self, now: Time, id: WorkerId, message: String, lacks_id: bool) {
        let Some(worker) = self.workers.by_id(id) else { return };
        let slot = worker.assignment.slot();
        let is_current = self.workers.slot(slot).state.worker() == Some(id.place);
        let is_not_needed = worker.phase == Phase::Killing(KillReason::NotNeeded);
        let record = self.workers.record(slot);
        if is_not_needed {
            record.last_end = Some(RestartCause::Stopped);
        } else {
            let before = record.last_exit.replace(message.clone());
            record.last_end = Some(RestartCause::NotStarted);
            // The next attempt continues this start, which has been counted already.
            record.has_had_worker &= !(lacks_id && is_current);
            // A shortage of user IDs can last long, so it is reported once.
            if !lacks_id || before.is_none_or(|before| before != message) {
                let what = OperatorEvent::WorkerNotStarted { slot, message: message.clone() };
                self.actions.push(Action::Report(what));
            }
            self.last_failure = message;
        }
        self.remove_and_replace(
            now,
            id.place,
            EndEffect { is_failure: true, is_not_needed, lacks_id, ..EndEffect::default() },
        );
    }

    pub(super) fn hello(
        &mut self,
        now: Time,
        id: WorkerId,
        capabilities: Capabilities,
        journal: Option<Box<dyn JobJournal>>,
    ) {
        let (ready, most) = (self.limits.start.ready, self.limits.max_in_flight);
        let Health { heartbeat, missed, .. } = self.limits.health;
        self.record_sign_of_life(now, id);
        self.edit_by_id(id, |worker| {
            if let Phase::Handshaking { .. } = worker.phase {
                worker.phase = Phase::Initializing { until: now + ready };
                worker.has_dispatch_thread = capabilities.has_dispatch_thread;
                worker.can_resize = capabilities.can_resize;
                worker.journal = journal;
                worker.sent_max_in_flight = most;
                worker.heartbeat = heartbeat;
                worker.missed_min = if missed >= RARE_HEARTBEATS_MISSED { RARE_HEARTBEATS_MISSED } else { 0 };
            }
        });
    }

    pub(super) fn extend_start(&mut self, now: Time, id: WorkerId, more: Duration) {
        let most = self.limits.start.ready;
        self.record_sign_of_life(now, id);
        self.edit_by_id(id, |worker| {
            if let Phase::Initializing { until } = &mut worker.phase {
                *until = (*until).max(now + more.min(most));
            }
        });
    }

    pub(super) fn start_status(&mut self, now: Time, id: WorkerId, text: String) {
        self.record_sign_of_life(now, id);
        self.edit_by_id(id, |worker| {
            if worker.ready_at.is_none() {
                worker.last_start_status = Some(text);
            }
        });
    }

    pub(super) fn worker_ready(&mut self, now: Time, id: WorkerId) {
        self.record_sign_of_life(now, id);
        let Some(worker) = self.workers.by_id(id) else { return };
        if !matches!(worker.phase, Phase::Initializing { .. }) {
            return;
        }
        let assignment = worker.assignment;
        let (pid, after) = (worker.pid.unwrap_or(0), now.since(worker.spawned_at));
        self.edit(id.place, |worker| {
            worker.phase = Phase::Ready;
            worker.ready_at = Some(now);
            worker.last_start_status = None;
            if worker.is_standby() {
                // The replacement time of a standby is set later, when the standby takes over the slot.
                worker.next_replacement_at = Time(u64::MAX);
            }
        });
        self.actions.push(Action::Report(OperatorEvent::WorkerReady { worker: id, pid, after }));
        self.workers.record(assignment.slot()).has_settled = true;
        self.spares_changed = true;
        if let Assignment::Successor { slot, reason } = assignment
            && !self.must_stand_by(now, slot, id.place, reason)
        {
            self.hand_over_slot(now, slot, id.place, reason);
        }
        // The new worker can take over jobs that other workers have received but not started.
        self.workers.places().for_each(|place| self.schedule_begin_check(now, place));
        self.continue_rolling_restart(now);
    }

    /// Assigns a slot to a ready successor, and drains the worker that the slot had before.
    pub(super) fn hand_over_slot(&mut self, now: Time, slot: u32, place: u32, reason: RecycleReason) {
        let old = self.workers.slot(slot).state.worker();
        self.set_slot(slot, SlotState::Occupied(place));
        self.reassign(place, |worker| {
            worker.assignment = Assignment::Active { slot, is_at_job_limit: false };
            worker.next_replacement_at = now;
        });
        let Some(old) = old else { return };
        // The replacement of a worker that reached `recycle.jobs` was already reported. The replacement of a dead
        // worker is never reported.
        let recycled = self.reassign(old, |worker| {
            let is_reported = worker.is_dead() || worker.assignment.is_at_job_limit();
            // The exit of a worker that was already sent SIGKILL must not delay the worker's replacement.
            worker.replace(slot, worker.is_ending());
            let pid = worker.pid.unwrap_or(0);
            (!is_reported).then_some(OperatorEvent::WorkerRecycled { pid, reason })
        });
        self.actions.extend(recycled.flatten().map(Action::Report));
        self.drain_worker(now, old);
    }

    /// Asks a worker to finish its jobs and exit. If the worker is not ready yet, kills it instead.
    pub(super) fn drain_worker(&mut self, now: Time, place: u32) {
        let Some(worker) = self.workers.get(place) else { return };
        match worker.phase {
            Phase::Ready => {
                self.actions.push(Action::Drain { worker: worker.id });
                self.spares_changed = true;
                let check_at = now + time_to_begin(self.limits.lookahead, 0);
                self.edit(place, |worker| {
                    worker.phase = Phase::Draining;
                    if worker.jobs.is_empty() {
                        worker.kill_at = Some(now + EXIT_TIMEOUT);
                    }
                    // The successor can run jobs that this worker has received but not started.
                    worker.schedule_begin_check(check_at);
                });
            }
            Phase::Handshaking { .. } | Phase::Initializing { .. } => {
                self.kill(place, KillReason::NotNeeded);
            }
            Phase::Draining | Phase::Killing(_) | Phase::Dead(_) => {}
        }
    }

    // While the worker runs.

    pub(super) fn record_sign_of_life(&mut self, now: Time, id: WorkerId) {
        self.spares_changed |= self.workers.record_sign_of_life(&self.limits, id, now);
    }

    pub(super) fn alive_at(&mut self, now: Time, id: WorkerId, at: Time) {
        let missed = self.limits.health.missed;
        let Some(_) = self.workers.by_id(id).filter(|worker| at > worker.last_heard_at) else { return };
        self.edit(id.place, |worker| {
            worker.last_heard_at = at.min(now);
            worker.excused_silences = 0;
            worker.is_stalled = false;
            // If the silence limit has almost been reached, the worker still counts as silent, and the caller reads its
            // timestamp again. Otherwise, the worker could cause such reads continuously.
            if worker.last_heard_at + worker.silence_max(missed) > now + worker.heartbeat / 2 {
                worker.silence = SilenceCheck::None;
            }
        });
        self.spares_changed = true;
    }

    pub(super) fn supervisor_paused(&mut self, now: Time) {
        for place in self.workers.places() {
            self.edit_timing(place, |worker| {
                worker.last_heard_at = now;
                worker.silence = SilenceCheck::None;
            });
        }
        self.spares_changed = true;
    }

    /// Handles a worker that has missed its heartbeats. The worker counts as hung only after it has been observed for
    /// one more heartbeat interval. If the machine has no free processor time, killing the worker would only add to the
    /// load.
    fn check_silence(&mut self, now: Time, place: u32) {
        let Some(worker) = self.workers.get(place) else { return };
        let (id, heartbeat) = (worker.id, worker.heartbeat);
        let (silence, action) = match worker.silence {
            SilenceCheck::None => {
                (SilenceCheck::Observing { until: now + heartbeat }, Action::RecordCpuTime { worker: id })
            }
            SilenceCheck::Observing { until } if until <= now => {
                (SilenceCheck::AwaitingResult, Action::CheckCpuTime { worker: id })
            }
            SilenceCheck::Observing { .. } | SilenceCheck::AwaitingResult => return,
        };
        self.edit_timing(place, |worker| worker.silence = silence);
        self.actions.push(action);
    }

    pub(super) fn cpu_time_checked(&mut self, now: Time, id: WorkerId, is_starved: bool) {
        let Some(worker) = self.workers.by_id(id) else { return };
        if worker.silence != SilenceCheck::AwaitingResult || worker.is_ending() {
            return;
        }
        if !is_starved || worker.excused_silences >= EXCUSED_SILENCES_MAX {
            return self.kill(id.place, KillReason::Hung);
        }
        self.edit_timing(id.place, |worker| {
            worker.excused_silences += 1;
            worker.silence = SilenceCheck::None;
            worker.last_heard_at = now;
        });
        self.spares_changed = true;
    }

    /// Sets an exit timeout for a draining worker that has completed its last job.
    pub(super) fn limit_exit_time(&mut self, now: Time, place: u32) {
        let Some(worker) = self.workers.get(place) else { return };
        if worker.phase == Phase::Draining && worker.jobs.is_empty() {
            self.edit_timing(place, |worker| worker.kill_at = Some(now + EXIT_TIMEOUT));
        }
    }

    pub(super) fn memory(&mut self, now: Time, id: WorkerId, rss_bytes: u64) {
        let Some(worker) = self.workers.by_id(id) else { return };
        if let Assignment::Active { slot, .. } = worker.assignment
            && self.limits.recycle.rss.is_some_and(|most| rss_bytes > most)
        {
            self.recycle(now, slot, RecycleReason::Memory);
        }
    }

    /// Replaces a slot's worker with its standby, with a spare, or with a successor that is started now. A slot has at
    /// most two workers. Does nothing if a successor is starting or has just failed, or if a replaced worker still
    /// occupies the slot.
    fn recycle(&mut self, now: Time, slot: u32, reason: RecycleReason) {
        let Some(worker) = self.workers.of_slot(slot) else { return };
        let (entry, standby) = (self.workers.slot(slot), self.standby(slot));
        let is_due = match reason {
            // The slot may have got a new worker after the slot was listed for the rolling restart.
            RecycleReason::Restart | RecycleReason::Reload => worker.is_outdated(),
            RecycleReason::Resize => worker.sent_max_in_flight < self.limits.max_in_flight,
            _ => now >= worker.next_replacement_at,
        };
        if entry.successor != standby || entry.replaced > 0 || !worker.is_ready() || !is_due {
            return;
        }
        let pid = worker.pid.unwrap_or(0);
        match standby {
            Some(standby) => self.hand_over_slot(now, slot, standby, reason),
            None if self.must_wait_for_spare(slot) => {}
            None if let Some(spare) = self.ready_spare() => {
                self.actions.push(Action::Report(OperatorEvent::WorkerRecycled { pid, reason }));
                self.take_over(now, slot, spare, Some(reason));
            }
            None => self.spawn(now, slot, Some(reason)),
        }
    }

    /// Replaces all workers. An operator requests this if the workers' secrets, environment or program may be outdated.
    pub(super) fn rolling_restart(&mut self, now: Time) {
        self.restart_failure = None;
        for place in self.workers.places() {
            self.edit_timing(place, |worker| {
                if worker.revision == Revision::UpToDate {
                    worker.revision = Revision::BeforeRestart;
                }
            });
        }
        self.replace_outdated(now, RecycleReason::Restart);
    }

    /// Replaces all workers, which must already be marked as outdated. Ready workers are replaced one after another,
    /// and each continues to run until its replacement is ready. Starting workers, standbys and spares have no jobs,
    /// and are killed immediately.
    fn replace_outdated(&mut self, now: Time, reason: RecycleReason) {
        for place in self.workers.places() {
            let is_starting = self.edit_timing(place, |worker| {
                worker.next_replacement_at = now;
                worker.is_starting() && !worker.assignment.is_replaced()
            });
            if is_starting == Some(true) {
                self.kill(place, KillReason::NotNeeded);
            }
        }
        let slots = self.workers.slot_numbers().filter(|&slot| self.needs_restart(slot));
        self.rolling = slots.map(|slot| (slot, reason)).collect();
        self.dismiss_standbys(|_| true);
        self.dismiss_spares(|_| true);
        self.continue_rolling_restart(now);
        self.start_successors_at_job_limit(now);
    }

    /// Returns true if a rolling restart must include this slot.
    fn needs_restart(&self, slot: u32) -> bool {
        let entry = self.workers.slot(slot);
        entry.state.is_wanted() && !entry.is_spare_slot
    }

    /// Continues the rolling restart with the next slot, unless a successor is still starting or the slot cannot get a
    /// successor yet.
    pub(super) fn continue_rolling_restart(&mut self, now: Time) {
        while let Some(&(slot, reason)) = self.rolling.front()
            && self.workers.slot(slot).replaced == 0
            && !self.must_wait_for_spare(slot)
            && self.workers.slot_numbers().all(|slot| self.workers.slot(slot).successor == self.standby(slot))
        {
            self.rolling.pop_front();
            match self.workers.slot(slot).state {
                SlotState::Occupied(_) => self.recycle(now, slot, reason),
                // Nothing to do, because the next worker in this slot starts with the new maximum anyway.
                _ if reason == RecycleReason::Resize => {}
                SlotState::Backoff { .. } | SlotState::Stopped { .. } => {
                    self.spawn(now, slot, None);
                }
                SlotState::Empty | SlotState::Awaiting | SlotState::Closed => {}
            }
        }
    }

    // New program or configuration.

    /// Replaces all workers because the program or the configuration has changed. Forgets earlier failures, because
    /// they do not apply to the new workers.
    pub(super) fn replace(&mut self, now: Time) {
        self.restart_failure = None;
        for place in self.workers.places() {
            self.edit_timing(place, |worker| worker.revision = Revision::BeforeReload { retry_at: None });
        }
        self.spacing = RestartSpacing::default();
        for slot in self.workers.slot_numbers() {
            let record = self.workers.record(slot);
            record.failures.clear();
            record.saved_state = None;
        }
        self.replace_outdated(now, RecycleReason::Reload);
    }

    /// Retries the replacement of an outdated worker if the retry is due.
    fn retry_replacement(&mut self, now: Time, place: u32) {
        let Some(worker) = self.workers.get(place) else { return };
        if worker.retry_replacement_at().is_none_or(|at| at > now) {
            return;
        }
        let slot = worker.assignment.slot();
        self.edit_timing(place, |worker| {
            worker.revision = Revision::BeforeReload { retry_at: None };
            worker.next_replacement_at = now;
        });
        if !self.rolling.iter().any(|(rolling, _)| *rolling == slot) {
            self.rolling.push_back((slot, RecycleReason::Reload));
        }
        self.continue_rolling_restart(now);
    }

    pub(super) fn worker_stopping(&mut self, now: Time, id: WorkerId) {
        self.record_sign_of_life(now, id);
        if let Some(worker) = self.workers.by_id(id)
            && worker.is_ready()
        {
            let slot = worker.assignment.slot();
            match self.standby(slot) {
                Some(standby) if standby != id.place => {
                    self.hand_over_slot(now, slot, standby, RecycleReason::Jobs);
                }
                _ => self.drain_worker(now, id.place),
            }
        }
    }

    // Forced and voluntary exits.

    pub(super) fn protocol_violated(&mut self, now: Time, id: WorkerId, message: String) {
        self.record_sign_of_life(now, id);
        if self.workers.by_id(id).is_some_and(|worker| !worker.is_ending()) {
            self.kill(id.place, KillReason::Protocol(message));
        }
    }

    pub(super) fn kill(&mut self, place: u32, reason: KillReason) {
        let Some(worker) = self.workers.get(place).filter(|worker| !worker.is_ending()) else { return };
        let (id, pid) = (worker.id, worker.pid);
        self.spares_changed = true;
        self.exiting.retain(|&exiting| exiting != place);
        self.edit(place, |worker| {
            worker.phase = Phase::Killing(reason.clone());
            worker.kill_at = None;
        });
        self.actions.push(Action::Kill { worker: id, reason: reason.clone() });
        // The kill is reported only if the process was previously reported as running.
        self.actions.extend(pid.map(|pid| Action::Report(OperatorEvent::WorkerKilled { pid, reason })));
    }

    pub(super) fn worker_timer_due(&mut self, now: Time, place: u32) {
        let Some(worker) = self.workers.get(place) else { return };
        let is_silent = worker.is_silent(now, self.limits.health.missed);
        match worker.phase {
            Phase::Handshaking { until } if until <= now => self.kill(place, KillReason::NoHello),
            Phase::Initializing { until } if until <= now => self.kill(place, KillReason::NotReady),
            Phase::Initializing { .. } if worker.has_dispatch_thread && is_silent => {
                self.check_silence(now, place);
            }
            Phase::Ready | Phase::Draining => {
                self.check_begun(now, place);
                let Some(worker) = self.workers.get(place) else { return };
                if worker.kill_at.is_some_and(|at| at <= now) {
                    let reason =
                        if worker.jobs.is_empty() { KillReason::ExitTimeout } else { KillReason::Deadline };
                    self.kill(place, reason);
                } else if is_silent {
                    self.check_silence(now, place);
                } else {
                    self.recycle_if_old(now, place);
                    self.retry_replacement(now, place);
                    self.retry_successor(now, place);
                    self.check_standby(now, place);
                }
            }
            Phase::Handshaking { .. } | Phase::Initializing { .. } | Phase::Killing(_) | Phase::Dead(_) => {}
        }
    }

    fn recycle_if_old(&mut self, now: Time, place: u32) {
        let Some(worker) = self.workers.get(place) else { return };
        let (assignment, slot) = (worker.assignment, worker.assignment.slot());
        let is_old = self.limits.recycle.age.is_some_and(|age| worker.spawned_at + age <= now);
        let is_due = now >= worker.next_replacement_at && now >= worker.next_age_check;
        if !assignment.is_current() || assignment.is_at_job_limit() || !is_old || !is_due {
            return;
        }
        if worker.is_ready_spare() {
            // A ready spare has no jobs, so it can be killed immediately. Another spare is then started in the same
            // slot.
            self.kill(place, KillReason::NotNeeded);
            return;
        }
        self.recycle(now, slot, RecycleReason::Age);
        // The next check takes place after this attempt has succeeded or failed. If no attempt was possible, a replaced
        // worker is about to leave the slot. Replacements for other reasons do not need to wait, because nothing has
        // failed.
        let again = match self.workers.slot(slot).successor {
            Some(_) => now + self.limits.start.handshake + self.limits.start.ready,
            None => now + RECYCLE_INTERVAL,
        };
        self.edit_timing(place, |worker| worker.next_age_check = again);
    }

    /// Handles the exit of a worker and all its descendants after the keeper died. The exit does not count as a
    /// failure of the worker.
    pub(super) fn lost_with_keeper(&mut self, now: Time, id: WorkerId) {
        let killed = Phase::Killing(KillReason::KeeperDied);
        if self.edit_by_id(id, |worker| worker.phase = killed).is_some() {
            self.exited(now, id, Death::Signal(SIGKILL));
        }
        self.reaped(now, id);
    }

    /// Starts a new worker in a dead worker's slot, now that all descendants of the dead worker are gone.
    pub(super) fn reaped(&mut self, now: Time, id: WorkerId) {
        let worker = self.workers.get(id.place).filter(|worker| worker.id == id);
        if let Some(&Worker { phase: Phase::Dead(effect), .. }) = worker {
            self.remove_and_replace(now, id.place, effect);
        }
    }

    /// Handles the exit of a worker. Retries the worker's jobs or ends them. The slot stays occupied until the worker
    /// is [reaped](Self::reaped).
    pub(super) fn exited(&mut self, now: Time, id: WorkerId, death: Death) {
        let Some(worker) = self.workers.by_id(id) else { return };
        let ending = Ending { death, killed: worker.killed() };
        let effect = EndEffect::of(worker, &ending);
        let (slot, charged_slot) = (worker.assignment.slot(), worker.assignment.charged_slot());
        let is_current = worker.assignment.is_current();
        let clears_history =
            worker.served > 0 && now.since(worker.ready_at.unwrap_or(now)) >= HISTORY_CLEARED_AFTER;
        let sentence = ending.to_string();
        // Unless `restart.policy` is `always`, clean exits are recorded too, because they can leave the bulkhead
        // without workers.
        if effect.is_failure || self.limits.restart.policy != RestartPolicy::Always {
            self.last_failure = describe_failure(worker, effect, &sentence);
        }
        self.actions.push(Action::Report(OperatorEvent::WorkerExited {
            worker: id,
            slot,
            pid: worker.pid.unwrap_or(0),
            ending: ending.clone(),
            uptime: now.since(worker.spawned_at),
            served: worker.served,
            in_flight: worker.jobs.len() as u32,
        }));
        if clears_history {
            self.workers.record(charged_slot).failures.clear();
        }
        self.workers.record(charged_slot).last_exit = Some(sentence.clone());
        let record = self.workers.record(slot);
        record.last_exit = Some(sentence.clone());
        if is_current {
            let is_recycled = effect.is_clean && effect.is_at_job_limit;
            record.last_end = Some(if is_recycled { RestartCause::Jobs } else { ending.restart_cause() });
        }
        self.lose_jobs(now, id, &ending, sentence);
        self.exiting.retain(|&exiting| exiting != id.place);
        self.spares_changed = true;
        self.edit(id.place, |worker| {
            worker.phase = Phase::Dead(effect);
            (worker.awaited_jobs, worker.overdue_jobs, worker.kill_at) = (0, 0, None);
        });
        // A standby can take over the slot even while descendants of the previous worker are still running.
        if is_current && let Some(standby) = self.standby(slot) {
            self.hand_over_slot(now, slot, standby, RecycleReason::Jobs);
        }
    }

    /// Ends, retries or requeues the jobs of a worker that has exited.
    fn lose_jobs(&mut self, now: Time, id: WorkerId, ending: &Ending, message: String) {
        let Some((jobs, assignment, unbegun)) = self
            .edit(id.place, |worker| (std::mem::take(&mut worker.jobs), worker.assignment, worker.unbegun))
        else {
            return;
        };
        // A replaced worker no longer occupies a slot, so its exit does not leave a slot empty.
        if let Assignment::Active { slot, .. } | Assignment::Spare { slot } = assignment {
            self.withhold(now, slot, &jobs, ending);
        }
        let (unread, begun) = self.requeue_unread(jobs);
        let suspicion = Suspicion::of(ending, begun.len() + unbegun);
        let verdict = ending.verdict(message);
        for index in begun {
            self.job_lost(now, index, &verdict, suspicion);
        }
        for index in unread {
            self.job_lost(now, index, &verdict, Suspicion::Cleared);
        }
        self.requeue_prefetched(now, id, &verdict);
    }

    /// Removes a worker from the table and refills its slot depending on how the worker ended.
    fn remove_and_replace(&mut self, now: Time, place: u32, effect: EndEffect) {
        let Some(worker) = self.workers.remove(&self.limits, place) else { return };
        self.spares_changed = true;
        let (slot, is_not_needed) = (worker.assignment.slot(), effect.is_not_needed);
        if effect.is_failure && !is_not_needed {
            self.workers.record(slot).has_settled = true;
        }
        match worker.assignment {
            Assignment::Replaced { has_released_slot: true, .. } => {}
            Assignment::Replaced { .. } => self.replaced_worker_gone(now, slot),
            Assignment::Successor { .. } if is_not_needed => {
                self.continue_rolling_restart(now);
                self.start_successor_at_job_limit(now, slot);
            }
            Assignment::Successor { reason, .. } => self.successor_failed(now, slot, reason, effect.lacks_id),
            _ if is_not_needed && self.workers.slot(slot).successor.is_none() => {
                // If the bulkhead is stopping, the slot stays empty, because `spawn` then does nothing.
                self.set_slot(slot, SlotState::Empty);
                self.spawn(now, slot, None);
            }
            assignment => self.refill_slot(now, slot, assignment.charged_slot(), effect),
        }
    }

    /// Handles the failure of a successor. The slot keeps its current worker. The replacement is attempted again later,
    /// unless an operator's restart requested it.
    fn successor_failed(&mut self, now: Time, slot: u32, reason: RecycleReason, lacks_id: bool) {
        let pause = self.limits.restart.backoff_max.max(Duration::from_secs(1));
        let pause = if lacks_id { ID_RETRY_INTERVAL } else { pause };
        if let SlotState::Occupied(place) = self.workers.slot(slot).state {
            self.edit_timing(place, |worker| {
                (worker.next_replacement_at, worker.next_age_check) = (now + pause, now + pause);
            });
        }
        // Cancels the remaining replacements, because their successors would probably fail for the same reason.
        let mut stopped = self.rolling.iter().map(|&(_, reason)| reason).chain([reason]);
        let stops_restart = stopped.any(|reason| reason == RecycleReason::Restart);
        self.rolling.clear();
        for place in self.workers.places() {
            self.edit_timing(place, |worker| {
                if let Revision::BeforeReload { retry_at } = &mut worker.revision {
                    *retry_at = Some(now + pause);
                }
            });
        }
        if stops_restart || reason == RecycleReason::Reload && !lacks_id {
            let message = self.workers.slot(slot).record.last_exit.clone().unwrap_or_default();
            if stops_restart {
                self.restart_failure = Some(message.clone());
            }
            let is_retried =
                |place| self.workers.get(place).is_some_and(|worker| worker.retry_replacement_at().is_some());
            let retry_in = self.workers.places().any(is_retried).then_some(pause);
            self.actions.push(Action::Report(OperatorEvent::ReplacementFailed { slot, message, retry_in }));
        }
    }

    /// Handles a slot whose worker has ended. Depending on how the worker ended, starts another worker now, starts one
    /// later, or stops the slot.
    fn refill_slot(&mut self, now: Time, slot: u32, charged_slot: u32, effect: EndEffect) {
        if self.is_stopping() {
            self.set_slot(slot, SlotState::Empty);
            return;
        }
        if let Some(successor) = self.workers.slot(slot).successor {
            self.set_slot(slot, SlotState::Occupied(successor));
            self.reassign(successor, |worker| worker.assignment = Assignment::of_slot(slot, false));
            // The successor now fills the slot, so the next slot in the rolling restart can get a successor.
            self.continue_rolling_restart(now);
            return;
        }
        if effect.lacks_id {
            self.set_slot(slot, SlotState::Backoff { until: now + ID_RETRY_INTERVAL });
            return;
        }
        if !self.may_restart(effect) {
            self.stop_slot(now, slot, StopReason::Policy, None);
            return;
        }
        let next = if effect.is_failure {
            let random = self.next_random();
            self.workers.record(charged_slot).failures.record_failure(now, &self.limits.restart, random)
        } else {
            NextStart::At(self.spacing.record_death(now, effect.is_early_death))
        };
        match next {
            NextStart::At(at) if at <= now => self.spawn(now, slot, None),
            NextStart::At(until) => {
                self.set_slot(slot, SlotState::Backoff { until });
                let delay = until.since(now);
                self.actions.push(Action::Report(OperatorEvent::RestartBackoff { slot, delay }));
            }
            NextStart::Failed { probe_at } => self.stop_slot(now, slot, StopReason::Failed, Some(probe_at)),
        }
    }

    fn stop_slot(&mut self, now: Time, slot: u32, reason: StopReason, probe_at: Option<Time>) {
        self.workers.record(slot).has_settled = true;
        self.set_slot(slot, SlotState::Stopped { probe_at });
        if self.workers.totals().live_slots > 0 || self.workers.slot(slot).is_spare_slot {
            return;
        }
        if reason == StopReason::Policy {
            self.last_failure.push_str("; restart.policy does not allow a restart");
        }
        self.reject_without_workers(now);
        let message = self.last_failure.clone();
        self.actions.push(Action::Report(OperatorEvent::BulkheadFailed { reason, message }));
    }

    /// Rejects all waiting jobs if no slot has a worker or will get one.
    pub(super) fn reject_without_workers(&mut self, now: Time) {
        if self.workers.totals().live_slots == 0 && self.queued() > 0 {
            let sentence = self.no_worker_message();
            self.reject_queue(now, RejectReason::Unavailable, &sentence);
        }
    }

    /// Returns the message with which jobs are rejected when no worker is running.
    pub(super) fn no_worker_message(&self) -> String {
        match (self.activity, self.limits.max_in_flight) {
            (_, 0) => "max_in_flight is 0".to_owned(),
            (Activity::ScaledToZero, _) => {
                "tenants.max_active has been reached, and all tenants with workers are busy".into()
            }
            _ => format!("no worker is running: {}", self.last_failure),
        }
    }

    // Operator commands.

    pub(super) fn drain(&mut self, now: Time) {
        if self.mode == Mode::Open {
            self.mode = Mode::Draining;
            self.reject_queue(now, RejectReason::Draining, "");
            self.actions.push(Action::Report(OperatorEvent::Draining));
        }
    }

    pub(super) fn resume(&mut self) {
        if self.mode == Mode::Draining {
            self.mode = Mode::Open;
            self.actions.push(Action::Report(OperatorEvent::Resumed));
        }
    }

    pub(super) fn reset(&mut self, now: Time) {
        self.poison.reset();
        self.spacing = RestartSpacing::default();
        let transition = self.breaker.reset(now);
        self.report_transition(transition);
        for slot in self.workers.slot_numbers() {
            let record = self.workers.record(slot);
            record.failures.clear();
            record.saved_state = None;
            let state = self.workers.slot(slot).state;
            if matches!(state, SlotState::Backoff { .. } | SlotState::Stopped { .. }) {
                self.spawn(now, slot, None);
            }
        }
    }

    pub(super) fn stop(&mut self, now: Time, by: Time) {
        let was_stopping = self.is_stopping();
        self.mode = Mode::Stopping { by };
        if !was_stopping {
            self.rolling.clear();
            self.reject_queue(now, RejectReason::Draining, "");
            for slot in self.workers.slot_numbers() {
                self.workers.record(slot).saved_state = None;
                if self.workers.slot(slot).state.worker().is_none() {
                    self.set_slot(slot, SlotState::Empty);
                }
            }
            for place in self.workers.places() {
                self.drain_worker(now, place);
            }
        }
        if by <= now {
            self.kill_all();
        }
    }

    /// Kills all workers because the stop timeout has expired.
    pub(super) fn kill_all(&mut self) {
        for place in self.workers.places() {
            self.kill(place, KillReason::ExitTimeout);
        }
        // Disables the stop timeout, so that it does not expire again. The bulkhead is gone once its workers have
        // exited.
        self.mode = Mode::Stopping { by: Time(u64::MAX) };
    }

    /// Returns true if the bulkhead was asked to stop.
    pub fn is_stopping(&self) -> bool {
        matches!(self.mode, Mode::Stopping { .. })
    }

    /// Returns true if the bulkhead was asked to stop and has no workers left.
    pub fn is_stopped(&self) -> bool {
        self.is_stopping() && self.workers.is_empty()
    }
}

/// Returns a description of a worker's failure for messages that tell clients why no worker is running.
fn describe_failure(worker: &Worker, effect: EndEffect, sentence: &str) -> String {
    let is_before_hello = matches!(worker.phase, Phase::Handshaking { .. });
    match &worker.last_start_status {
        _ if worker.ready_at.is_some() && effect.is_failure => {
            format!("the worker terminated before it completed a job: {sentence}")
        }
        _ if worker.ready_at.is_some() => format!("the worker terminated: {sentence}"),
        Some(status) => format!("the worker did not start: {sentence}; last status: {status}"),
        None if is_before_hello => format!(
            "the worker did not start: {sentence} before the worker sent HELLO; a program that is not built \
             with the worker SDK needs `exec` instead of `command`"
        ),
        None => format!("the worker did not start: {sentence}"),
    }
}
