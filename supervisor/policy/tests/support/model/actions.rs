//! Checks that each action is allowed, and applies its effect to the model.

use std::time::Duration;

use bulkhead_policy::{
    Action, JobOutcome, KillReason, Limits, OperatorEvent, StopReason, TenantId, Time, WorkerId,
};
use bulkhead_shared::{JobId, RejectReason, Verdict};

use super::slots::SlotState;
use super::{Cause, Mode, Model, Phase, Worker, is_same};
use crate::support::Tag;

/// Maximum time that an idle worker can take to exit before it is killed.
const EXIT_PATIENCE: Duration = Duration::from_secs(2);

/// Maximum number of replaced workers that have no jobs but are still exiting. If there are more, the oldest one is
/// killed.
const LEAVING_MAX: usize = 16;

/// Maximum time between the request to start a process and the report that it is running.
const SPAWN_PATIENCE: Duration = Duration::from_secs(60);

impl Worker {
    pub(super) fn new(id: WorkerId, slot: u32, now: Time, limits: &Limits) -> Self {
        Self {
            id,
            slot,
            charged_slot: slot,
            phase: Phase::Spawned,
            spawned_at: now,
            ready_at: None,
            last_heard_at: now,
            has_dispatch_thread: false,
            can_resize: false,
            has_journal: false,
            sent: 0,
            prefetched: Vec::new(),
            is_stalled: false,
            stalls: false,
            heartbeat: limits.health.heartbeat,
            missed_min: 0,
            hello_by: now + limits.start.handshake.max(SPAWN_PATIENCE),
            is_outdated: false,
            has_old_program: false,
            retry_replacement_at: None,
            sent_max_in_flight: u32::MAX,
            is_exclusive: false,
            killed_before_replacement: false,
            observed_since: None,
            was_checked: false,
            excused_silences: 0,
            jobs: Vec::new(),
            served: 0,
            begun: 0,
            is_at_job_limit: false,
            pid: None,
            stands_by: false,
            killed: None,
            dead: None,
            left: None,
            killed_at: None,
            next_replacement_at: Time::ZERO,
        }
    }
}

impl Model {
    pub(super) fn action(&mut self, action: &Action<Tag>) {
        match action {
            Action::Spawn { worker, slot, restart_cause } => self.spawn(*worker, *slot, *restart_cause),
            Action::Dispatch { worker, job, remaining, is_prefetched: true } => {
                assert_eq!(*remaining, self.jobs[job].deadline_at.since(self.now));
                self.prefetch(*worker, *job);
            }
            Action::Dispatch { worker, job, remaining, .. } => self.dispatch(*worker, *job, *remaining),
            Action::Recalled { worker, job } => self.recalled(*worker, *job),
            Action::Cancel { worker, job } => {
                assert!(
                    self.step.to_cancel.remove(&(*worker, *job)),
                    "{job:?} was cancelled without a reason"
                );
            }
            Action::Drain { worker } => self.drain_worker(*worker),
            Action::RecordCpuTime { worker } => self.record_cpu_time(*worker),
            Action::CheckCpuTime { worker } => self.check_cpu_time(*worker),
            Action::SetMaxInFlight { worker, max_in_flight } => {
                let required = self.step.to_resize.remove(worker);
                assert_eq!(required, Some(*max_in_flight), "{worker:?} was sent a limit without a reason");
            }
            Action::Kill { worker, reason } => self.kill(*worker, reason),
            Action::SendOutcome(answer) => self.answer(answer),
            Action::Report(note) => self.operator_event(note),
        }
    }

    fn dispatch(&mut self, id: WorkerId, job_id: JobId, remaining: Duration) {
        if self.live(id).is_some_and(|worker| worker.jobs.contains(&job_id)) {
            return self.resend(id, job_id, remaining);
        }
        assert!(self.mode == Mode::Open, "a job was dispatched while the bulkhead is draining");
        self.release_withheld();
        if self.next_suspect() == Some(job_id) {
            self.take_suspect(id, job_id);
        } else {
            let immediate = self.step.immediate.filter(|(job, _)| *job == job_id).map(|(_, worker)| worker);
            let expected = immediate.or_else(|| self.least_loaded());
            assert_eq!(expected, Some(id), "a job was dispatched to the wrong worker");
            let next = self.next_candidates();
            assert!(next.contains(&job_id), "{job_id:?} was dispatched before one of {next:?}");
            self.queue.retain(|&waiting| waiting != job_id);
        }
        let bound = (self.limits.processes * self.limits.max_in_flight) as usize;
        assert!(
            self.running() < bound,
            "{job_id:?} was dispatched while {} jobs were running and the limit was {bound}",
            self.running()
        );
        let job = self.jobs.get_mut(&job_id).expect("a waiting job must be in the model");
        assert!(!job.is_answered, "{job_id:?} was dispatched after its outcome");
        assert!(job.deadline_at > self.now, "{job_id:?} was dispatched after its deadline");
        let run_limit = job.run_limits[0].unwrap_or(Duration::MAX);
        assert_eq!(remaining, job.deadline_at.since(self.now).min(run_limit));
        job.since = self.now;
        job.attempts += 1;
        job.worker = Some(id.place);
        self.workers.entry(id.place).and_modify(|worker| worker.jobs.push(job_id));
        self.step.dispatched.push((id, job_id));
        self.sent(id, job_id);
        self.begin(id);
    }

    /// Checks that the bulkhead was allowed to send a job again to the worker from which the job had been recalled
    /// together with other jobs.
    fn resend(&mut self, id: WorkerId, job_id: JobId, remaining: Duration) {
        self.coverage.see("sent again");
        let job = &self.jobs[&job_id];
        assert!(
            self.mode != Mode::Open
                && !job.is_answered
                && job.send_number > self.registry.begun_at_recall(id)
        );
        let ends_at =
            job.run_limits[0].map_or(job.deadline_at, |limit| job.deadline_at.min(job.since + limit));
        assert_eq!(remaining, ends_at.since(self.now));
        self.sent(id, job_id);
    }

    fn drain_worker(&mut self, id: WorkerId) {
        let now = self.now;
        let is_due = self.live(id).is_some_and(|worker| {
            let says_so = self.step.cause == Cause::Stopping(id);
            self.is_stopping() || says_so || worker.is_at_job_limit || !self.is_current(worker)
        });
        assert!(is_due, "{id:?} was drained without a reason");
        let worker = self.live_mut(id).expect("the worker must be alive");
        assert!(worker.phase == Phase::Ready && worker.killed.is_none(), "{id:?} was drained twice");
        worker.phase = Phase::Draining { idle_since: worker.jobs.is_empty().then_some(now) };
    }

    // Kills.

    fn kill(&mut self, id: WorkerId, reason: &KillReason) {
        self.coverage.see(&format!("kill {}", kill_name(reason)));
        let is_late = |worker: &Worker| matches!(worker.phase, Phase::Draining { idle_since: Some(since) } if since + EXIT_PATIENCE <= self.now);
        // If a worker is killed before its own exit timeout, another worker has left its slot and too many workers are
        // exiting.
        if *reason == KillReason::ExitTimeout && !self.is_stopping() && !self.live(id).is_some_and(is_late) {
            self.release_slots();
        }
        let worker = self.live(id).expect("only a living worker can be killed");
        assert_eq!(worker.killed, None, "{id:?} was killed twice");
        assert!(
            self.is_kill_allowed(worker, reason),
            "{id:?} was killed although the rules do not allow it: {reason:?}"
        );
        let is_ready = worker.ready_at.is_some();
        if worker.is_outdated && !is_ready && self.step.is_restarted && self.step.cause != Cause::Replace {
            self.coverage.see("starting worker killed by a restart");
        }
        self.live_mut(id).expect("the worker must be alive").killed = Some(reason.clone());
        self.step.sent_invalid_reply = self.step.sent_invalid_reply.filter(|&liar| liar != id);
    }

    fn is_kill_allowed(&self, worker: &Worker, reason: &KillReason) -> bool {
        let now = self.now;
        match reason {
            KillReason::Protocol(_) => {
                self.step.cause == Cause::ProtocolViolated(worker.id)
                    || self.is_protocol_kill_allowed(worker, reason)
            }
            KillReason::NoHello => worker.phase == Phase::Spawned && worker.hello_by <= now,
            KillReason::NotReady => {
                matches!(worker.phase, Phase::Initializing { until } if until <= now)
            }
            KillReason::Deadline => self.is_stuck(worker) && self.killed_at(worker) <= now,
            KillReason::Hung => self.step.cause == Cause::CpuTimeChecked(worker.id) && worker.was_checked,
            KillReason::ExitTimeout => self.is_overdue(worker),
            KillReason::NotNeeded => {
                let has_not_begun = matches!(worker.phase, Phase::Spawned | Phase::Initializing { .. });
                let is_unwanted = worker.is_outdated || !self.is_wanted(worker);
                has_not_begun && (self.is_stopping() || is_unwanted)
                    || self.is_surplus_standby(worker)
                    || self.is_stale_spare(worker)
            }
            KillReason::KeeperDied => false,
        }
    }

    fn record_cpu_time(&mut self, id: WorkerId) {
        let now = self.now;
        let worker = self.live(id).expect("only a living worker can be observed");
        assert!(
            self.is_silent(worker) && worker.observed_since.is_none(),
            "{id:?} was observed without a reason"
        );
        self.coverage.see("cpu time recorded");
        self.live_mut(id).expect("the worker must be alive").observed_since = Some(now);
    }

    fn check_cpu_time(&mut self, id: WorkerId) {
        let now = self.now;
        let worker = self.live(id).expect("only a living worker can be checked");
        let is_due = worker.observed_since.is_some_and(|at| at + worker.heartbeat <= now);
        assert!(self.is_silent(worker) && is_due && !worker.was_checked, "{id:?} was checked too soon");
        self.live_mut(id).expect("the worker must be alive").was_checked = true;
    }

    pub(super) fn is_silent(&self, worker: &Worker) -> bool {
        let missed = self.limits.health.missed.max(worker.missed_min);
        let is_silent = worker.last_heard_at + worker.heartbeat * (missed + 1) <= self.now;
        match worker.phase {
            Phase::Spawned => false,
            Phase::Initializing { .. } => is_silent && worker.has_dispatch_thread,
            _ => is_silent && (worker.has_dispatch_thread || worker.jobs.is_empty()),
        }
    }

    fn is_overdue(&self, worker: &Worker) -> bool {
        match (self.mode, worker.phase) {
            (Mode::Stopping { by }, _) if by <= self.now => true,
            (_, Phase::Draining { idle_since: Some(since) }) if since + EXIT_PATIENCE <= self.now => true,
            _ if worker.left.is_some() => {
                let is_later =
                    |other: &&Worker| other.id != worker.id && other.left >= worker.left && other.is_alive();
                self.workers.values().filter(is_later).count() >= LEAVING_MAX
            }
            _ => false,
        }
    }

    /// Checks that all workers that should be killed or drained by now have been killed or drained.
    pub(super) fn update_workers(&mut self) {
        let now = self.now;
        let stuck = |(&place, w): (&u32, &Worker)| (place, self.is_stuck(w).then(|| self.killed_at(w)));
        let stuck: Vec<_> = self.workers.iter().map(stuck).collect();
        for (place, killed_at) in stuck {
            let worker = self.workers.get_mut(&place).expect("the worker must be alive");
            let is_due = |at: Option<Time>| at.is_some_and(|at| at <= now);
            let becomes_due = is_due(killed_at) && !is_due(worker.killed_at);
            worker.killed_at = killed_at;
            if becomes_due && worker.is_alive() && self.step.recalled_from.contains(&worker.id) {
                self.coverage.see("kill due after a recall");
                self.step.kills_at_next_tick.insert(worker.id);
            }
        }
        if let Cause::CpuTimeChecked(id) = self.step.cause
            && !self.step.is_excused
            && let Some(worker) = self.live(id)
        {
            // A worker without a dispatch thread does not need to send heartbeats if it has been given a job in the
            // meantime.
            let is_due = worker.was_checked && (worker.has_dispatch_thread || worker.jobs.is_empty());
            assert!(!is_due || worker.killed.is_some(), "{id:?} is hung but was not killed");
        }
        for worker in self.workers.values().filter(|worker| worker.is_alive()) {
            let has_not_begun = matches!(worker.phase, Phase::Spawned | Phase::Initializing { .. });
            assert!(
                !has_not_begun || !worker.is_outdated || !self.is_wanted(worker),
                "{:?} was started before a restart and is still starting, but was not killed",
                worker.id
            );
            assert!(
                self.step.cause != Cause::ProtocolViolated(worker.id),
                "{:?} violated the protocol but was not killed",
                worker.id
            );
            if self.step.cause == Cause::Tick {
                self.check_kill_time(worker);
            }
            let is_ready = worker.phase == Phase::Ready;
            let is_exiting = matches!(worker.phase, Phase::Draining { .. });
            assert!(
                is_exiting || self.is_wanted(worker),
                "{:?} is a surplus worker but was not drained",
                worker.id
            );
            assert!(
                !is_ready || !self.is_stopping(),
                "{:?} was not drained although the bulkhead is stopping",
                worker.id
            );
            let is_in_place = self.is_current(worker) || self.is_standby(worker);
            assert!(!is_ready || is_in_place, "{:?} was replaced but not drained", worker.id);
            assert!(
                !is_ready || !worker.is_at_job_limit,
                "{:?} was given its last job but was not drained",
                worker.id
            );
            assert!(
                !self.is_surplus_standby(worker),
                "{:?} is no longer needed as a standby but was not killed",
                worker.id
            );
        }
    }

    fn check_kill_time(&self, worker: &Worker) {
        use KillReason::{Deadline, ExitTimeout, NoHello, NotNeeded, NotReady};
        let is_watched = worker.observed_since.is_some_and(|at| self.now < at + worker.heartbeat);
        let is_fine = !self.is_silent(worker) || is_watched || worker.was_checked;
        assert!(is_fine, "{:?} is silent but is not being checked", worker.id);
        assert!(!self.needs_successor(worker), "{:?} was given its last job but has no successor", worker.id);
        for reason in [Deadline, NoHello, NotReady, ExitTimeout, NotNeeded] {
            let may_wait = reason == Deadline && self.step.kills_at_next_tick.contains(&worker.id);
            assert!(
                may_wait || !self.is_kill_allowed(worker, &reason),
                "{:?} was not killed despite {reason:?}",
                worker.id
            );
        }
    }

    // Outcomes.

    fn answer(&mut self, answer: &JobOutcome<Tag>) {
        let pending = self.step.submission.as_ref();
        let tenant = answer.job.map_or_else(|| pending.map(|it| it.tenant), |id| Some(self.jobs[&id].tenant));
        self.count(tenant.expect("a rejection was sent without a submission"), &answer.verdict);
        let Some(id) = answer.job else { return self.rejected(answer) };
        let is_next = self.next_candidates().contains(&id) || self.next_suspect() == Some(id);
        let told = |verdict| self.overall_verdict(id, verdict);
        let is_broken = is_same(&answer.verdict, &told(Verdict::rejected(RejectReason::CircuitOpen)));
        let is_evicted = is_same(&answer.verdict, &told(Verdict::rejected(RejectReason::Evicted)));
        let is_late = is_same(&answer.verdict, &told(Verdict::DeadlineQueued));
        let is_poison = is_same(&answer.verdict, &told(Verdict::rejected(RejectReason::Quarantined)));
        let is_quarantined = self.is_quarantined(self.jobs[&id].digest);
        let (_, was_fixed) = self.can_be_recalled(id);
        let job = self.jobs.get_mut(&id).expect("an outcome was sent for an unknown job");
        assert!(!job.is_answered, "{id:?} has two outcomes");
        assert_eq!(answer.record.0, job.tag, "the outcome has the record of another job");
        let is_expired_at_the_head = is_next && job.deadline_at <= self.now;
        let is_either = self.step.ambiguous.contains(&id)
            && matches!(
                answer.verdict,
                Verdict::DeadlineQueued
                    | Verdict::DeadlineRunning
                    | Verdict::Crashed { .. }
                    | Verdict::Rejected { reason: RejectReason::QueueTimeout, .. }
            );
        match self.step.required.remove(&id) {
            _ if is_either => {}
            Some(required) => {
                assert!(
                    is_same(&required, &answer.verdict),
                    "{id:?} got the outcome {answer:?} instead of {required:?}"
                )
            }
            // If an earlier attempt crashed, that crash is the outcome.
            None if is_evicted && self.step.evictable.contains(&id) => self.step.evictable.clear(),
            None if is_next && is_quarantined && is_poison => self.coverage.see("quarantined in the queue"),
            None if is_next && self.is_breaking && is_broken => {}
            None if is_expired_at_the_head && is_late => {}
            None if is_evicted => panic!("{id:?} was evicted although another job must be evicted first"),
            None => panic!("{id:?} got the outcome {answer:?} too early"),
        }
        // If a prefetched job gets its outcome, the job has started, and the start counts as an attempt.
        assert_eq!(answer.attempts, job.attempts + u32::from(job.is_prefetched()));
        assert_eq!(answer.queued + answer.ran, self.now.since(job.received));
        assert_eq!(answer.deadline, job.deadline_at.since(job.received));
        assert_eq!(answer.run_limit, job.run_limits[0]);
        (job.is_answered, job.was_fixed) = (true, was_fixed);
        self.leave(id, &answer.verdict);
    }

    /// Removes a job from the queue because the job has an outcome. A job that has already been sent stays in its
    /// worker, and the bulkhead must then ask the worker to cancel the job.
    fn leave(&mut self, id: JobId, verdict: &Verdict) {
        let place = self.jobs[&id].worker;
        let is_abandoned = matches!(verdict, Verdict::DeadlineRunning | Verdict::Cancelled { .. });
        let is_sent = self.jobs[&id].is_oversized;
        if self.jobs[&id].is_prefetched() {
            return;
        }
        match place.and_then(|place| self.workers.get(&place)) {
            Some(_) if is_sent => {}
            Some(worker) if is_abandoned => {
                assert!(worker.jobs.contains(&id));
                self.step.to_cancel.insert((worker.id, id));
            }
            _ => {
                self.queue.retain(|&waiting| waiting != id);
                self.suspects.retain(|&waiting| waiting != id);
                self.jobs.remove(&id);
            }
        }
    }

    fn rejected(&mut self, answer: &JobOutcome<Tag>) {
        let submission = self.step.submission.take().expect("a rejection was sent without a submission");
        assert_eq!(answer.record.0, submission.tag);
        if self.is_breaking && answer.verdict == Verdict::rejected(RejectReason::CircuitOpen) {
            // The breaker is checked before the queue.
            self.step.evictable.clear();
            if let Some(shed) = self.step.shed.take() {
                self.step.required.remove(&shed);
            }
            return;
        }
        let is_full = matches!(answer.verdict, Verdict::Rejected { reason: RejectReason::QueueFull, .. });
        if self.step.may_be_full && is_full {
            self.step.evictable.clear();
            return;
        }
        let expected =
            submission.rejection.unwrap_or_else(|| panic!("a job was rejected without a reason: {answer:?}"));
        assert!(
            is_same(&expected, &answer.verdict),
            "a job was rejected with {answer:?} instead of {expected:?}"
        );
        assert_eq!(answer.deadline, submission.limit);
    }

    fn count(&mut self, tenant: TenantId, verdict: &Verdict) {
        let name = verdict.name();
        match (verdict, verdict.reason()) {
            (Verdict::Failed(_), _) | (_, None) => self.coverage.see(name),
            (_, Some(reason)) => self.coverage.see(&format!("{name} {reason}")),
        }
        let counters = &mut self.counters;
        match verdict {
            Verdict::Ok => counters.ok += 1,
            Verdict::Failed(_) => counters.failed += 1,
            Verdict::Rejected { reason, .. } => {
                counters.rejected[reason.code() as usize] += 1;
                self.tenants.entry(tenant).or_default().1 += 1;
            }
            Verdict::DeadlineQueued | Verdict::DeadlineRunning => counters.deadline_exceeded += 1,
            Verdict::Crashed { .. } => counters.crashed += 1,
            Verdict::Cancelled { .. } => counters.cancelled += 1,
        }
    }

    // Operator events.

    fn operator_event(&mut self, note: &OperatorEvent) {
        match note {
            OperatorEvent::RestartBackoff { slot, delay } => {
                self.coverage.see("backoff");
                self.backoff(*slot, *delay);
            }
            OperatorEvent::WorkerRecycled { pid, reason } => {
                self.coverage.see(&format!("recycled {}", reason.name()));
                self.recycled(*pid, *reason);
            }
            OperatorEvent::BulkheadFailed { reason, .. } => {
                assert_eq!(
                    self.live_slots(),
                    0,
                    "the bulkhead was reported as failed although a slot is live"
                );
                self.coverage.see(match reason {
                    StopReason::Failed => "bulkhead failed",
                    StopReason::Policy => "bulkhead failed by policy",
                });
            }
            OperatorEvent::ReplacementFailed { slot, .. } => {
                self.coverage.see("replacement failed");
                let is_served = matches!(self.slots[*slot as usize].state, SlotState::Occupied { .. });
                assert!(
                    is_served || self.is_stopping(),
                    "slot {slot} lost its worker although the replacement failed to start"
                );
            }
            OperatorEvent::SpareTookOver { worker, slot, .. } => self.spare_took_over(*worker, *slot),
            OperatorEvent::JobRetried { job, attempts, .. } => self.retried(*job, *attempts),
            OperatorEvent::JobQuarantined { digest, .. } => {
                let at = self.step.to_quarantine.iter().position(|d| d == digest);
                self.step.to_quarantine.remove(at.expect("a payload was quarantined without a reason"));
            }
            OperatorEvent::WorkerExited { slot, .. } => {
                if matches!(self.slots[*slot as usize].state, SlotState::Occupied { .. }) {
                    self.coverage.see("exited beside another");
                }
            }
            _ => {}
        }
    }
}

fn kill_name(reason: &KillReason) -> &'static str {
    match reason {
        KillReason::Deadline => "deadline",
        KillReason::Hung => "hung",
        KillReason::Protocol(_) => "protocol",
        KillReason::NoHello => "no hello",
        KillReason::NotReady => "not ready",
        KillReason::ExitTimeout => "exit timeout",
        KillReason::NotNeeded => "not needed",
        KillReason::KeeperDied => "keeper died",
    }
}
