//! Rules for prefetching jobs, and for jobs that a worker has not started.

use bulkhead_policy::{BreakerState, KillReason, Overflow, WorkerId};
use bulkhead_shared::{CrashReason, JobId, Priority, RejectReason, Verdict};

use super::{Job, Mode, Model, Phase, Worker};

/// Maximum number of prefetched jobs per worker.
const JOBS_MAX: usize = 64;

/// Number of dispatches that a job can lose because its run limit expires before the worker starts the job.
const RUN_LIMIT_EXPIRIES_MAX: u32 = 10;

impl Job {
    pub(super) fn is_prefetched(&self) -> bool {
        self.prefetched.is_some()
    }
}

impl Model {
    /// Returns the number of queue places in use.
    pub(super) fn queue_places(&self) -> usize {
        self.queue.len() + self.prefetched_waiting()
    }

    pub(super) fn prefetched_waiting(&self) -> usize {
        self.jobs.values().filter(|job| job.is_prefetched() && !job.is_answered).count()
    }

    pub(super) fn prefetch(&mut self, id: WorkerId, job: JobId) {
        self.coverage.see("prefetched");
        assert!(self.mode == Mode::Open && self.suspects.is_empty() && self.limits.critical_reserve == 0.0);
        assert!(!self.limits.lookahead.is_zero() && !self.is_breaking, "prefetching is not allowed now");
        assert_eq!(self.limits.overflow, Overflow::Reject);
        let (in_use, limit) = self.permits();
        assert!(in_use <= limit, "{in_use} jobs are running although the limit is {limit}");
        let worker = self.live(id).expect("only a living worker can be sent jobs");
        let is_full = worker.jobs.len() >= self.capacity(worker);
        assert!(worker.has_journal && !worker.is_exclusive && self.is_available(worker) && is_full);
        assert!(
            worker.prefetched.len() < JOBS_MAX.min(self.jobs_left(worker)),
            "too many jobs were prefetched"
        );
        let tenant = self.jobs[&job].tenant;
        let is_of_same = |other: &JobId| self.jobs[other].tenant == tenant;
        assert!(
            worker.jobs.iter().chain(&worker.prefetched).chain(&self.queue).all(is_of_same),
            "the prefetched job belongs to another tenant"
        );
        let class = self.queue.iter().map(|id| self.jobs[id].priority).max();
        let first = self.queue.iter().find(|id| Some(self.jobs[id].priority) == class);
        assert_eq!(first, Some(&job), "another job must be prefetched first");
        self.queue.retain(|&waiting| waiting != job);
        let entry = self.jobs.get_mut(&job).expect("a waiting job must be in the model");
        assert!(!entry.is_answered && entry.deadline_at > self.now && entry.before.is_none());
        assert!(entry.is_resendable, "{job:?} was prefetched although it cannot be recalled");
        entry.prefetched = Some(id.place);
        self.live_mut(id).expect("the worker must be alive").prefetched.push(job);
        self.sent(id, job);
    }

    /// Records that a job was sent to a worker.
    pub(super) fn sent(&mut self, id: WorkerId, job: JobId) {
        let worker = self.live_mut(id).expect("only a living worker can be sent jobs");
        worker.sent += 1;
        let sent = worker.sent;
        self.jobs.get_mut(&job).expect("the job must be in the model").send_number = sent;
    }

    /// Starts a worker's oldest prefetched job after the worker has replied to the previous job.
    pub(super) fn begin_prefetched(&mut self, id: WorkerId) {
        let now = self.now;
        let Some(worker) = self.live_mut(id) else { return };
        if worker.prefetched.is_empty() {
            return;
        }
        let job = worker.prefetched.remove(0);
        worker.jobs.push(job);
        let entry = self.jobs.get_mut(&job).expect("the job must be in the model");
        entry.prefetched = None;
        entry.attempts += 1;
        entry.worker = Some(id.place);
        entry.since = now;
        entry.is_overdue = entry.is_overdue && entry.hard_deadline_at <= now;
        if entry.is_answered {
            self.step.to_cancel.insert((id, job));
        }
        self.coverage.see("prefetched job begun");
        self.begin(id);
    }

    // Jobs that were sent to a worker but have not started.

    /// Returns the worker's unstarted jobs in the order of their recall, newest first.
    fn unbegun(&self, worker: &Worker) -> Vec<JobId> {
        let begun = self.registry.begun_at_recall(worker.id);
        let is_unbegun = |job: &JobId| worker.has_journal && self.jobs[job].send_number > begun;
        let mut jobs: Vec<JobId> =
            worker.jobs.iter().chain(&worker.prefetched).copied().filter(is_unbegun).collect();
        jobs.sort_by_key(|job| std::cmp::Reverse(self.jobs[job].send_number));
        jobs
    }

    /// Returns true if the worker has an unstarted job, other than `other`, whose payload the bulkhead cannot send
    /// again.
    fn is_fixed(&self, worker: &Worker, other: Option<JobId>) -> bool {
        let unbegun = self.unbegun(worker);
        unbegun.iter().any(|job| Some(*job) != other && !self.jobs[job].is_resendable)
    }

    /// Returns two flags for a job that its worker has not started. The first is true if the job must end like a
    /// waiting job. The second is true if this depends on whether another job is recalled first.
    pub(super) fn can_be_recalled(&self, id: JobId) -> (bool, bool) {
        let job = &self.jobs[&id];
        let worker = job.worker.or(job.prefetched).and_then(|place| self.workers.get(&place));
        let Some(worker) = worker.filter(|worker| worker.dead.is_none()) else { return (false, false) };
        let is_unbegun = self.unbegun(worker).contains(&id);
        let is_fixed = self.is_fixed(worker, Some(id));
        (is_unbegun && !is_fixed, is_unbegun && is_fixed)
    }

    pub(super) fn recalled(&mut self, id: WorkerId, job: JobId) {
        let seen = self.registry.begun_at_recall(id);
        // The prefetched jobs of a dead worker have already been handled.
        let Some(worker) = self.live(id) else { return };
        let returns_job = self.step.returned == Some((id, job));
        assert!(
            returns_job || self.jobs[&job].send_number > seen,
            "{job:?} was recalled although it has started"
        );
        assert!(
            worker.prefetched.contains(&job) || worker.jobs.contains(&job),
            "{job:?} is not in the worker"
        );
        let now = self.now;
        self.step.recalled_from.insert(id);
        let worker = self.live_mut(id).expect("the worker must be alive");
        let had_permit = worker.jobs.contains(&job);
        worker.prefetched.retain(|&prefetched| prefetched != job);
        worker.jobs.retain(|&held| held != job);
        worker.begun -= u64::from(had_permit);
        worker.is_stalled = worker.stalls;
        if had_permit && !worker.has_dispatch_thread {
            (worker.last_heard_at, worker.observed_since, worker.was_checked) = (now, None, false);
        }
        if let Phase::Draining { idle_since } = &mut worker.phase
            && worker.jobs.is_empty()
            && worker.prefetched.is_empty()
        {
            *idle_since = Some(now);
        }
        self.coverage.see(match (returns_job, had_permit) {
            (true, _) => "recalled job returned",
            (false, true) => "job with a permit recalled",
            (false, false) => "prefetched job recalled",
        });
        let entry = self.jobs.get_mut(&job).expect("the job must be in the model");
        let has_expired = entry.run_limits[0].is_some_and(|limit| entry.since + limit <= now);
        entry.run_limit_expiries += u32::from(had_permit && has_expired);
        entry.attempts -= u32::from(had_permit);
        entry.queue_timeout_at = entry.queue_timeout_at.filter(|_| !had_permit);
        (entry.worker, entry.prefetched, entry.is_overdue) = (None, None, false);
        entry.recalled_from = Some(id);
        self.end_or_requeue(job);
        if returns_job && had_permit {
            self.begin_prefetched(id);
        }
    }

    pub(super) fn returned(&mut self, id: WorkerId, job: JobId, send_number: u64) {
        let taken = self.registry.with(id, |record| record.recalled_up_to);
        let Some(worker) = self.live(id) else { return };
        let lives = worker.killed.is_none();
        if send_number > taken {
            self.coverage.see("returned job not recalled");
            self.step.sent_invalid_reply = lives.then_some(id);
            return;
        }
        let worker = self.live(id).expect("the worker must be alive");
        let has_it = worker.jobs.contains(&job) || worker.prefetched.contains(&job);
        if has_it && self.jobs[&job].send_number == send_number && !self.jobs[&job].is_oversized {
            self.step.returned = Some((id, job));
        } else {
            self.coverage.see("recalled job returned too late");
        }
    }

    fn end_or_requeue(&mut self, id: JobId) {
        let job = &self.jobs[&id];
        if job.is_answered {
            self.jobs.remove(&id);
            return;
        }
        if self.step.ambiguous.contains(&id) {
            self.step.required.remove(&id);
        } else if self.step.required.contains_key(&id) {
            return;
        }
        let verdict = if job.deadline_at <= self.now {
            Verdict::DeadlineQueued
        } else if job.run_limit_expiries >= RUN_LIMIT_EXPIRIES_MAX {
            self.coverage.see("run limit expired too often");
            Verdict::DeadlineQueued
        } else if self.mode != Mode::Open {
            Verdict::rejected(RejectReason::Draining)
        } else if !job.is_resendable || self.live_slots() == 0 {
            Verdict::rejected(RejectReason::Unavailable)
        } else {
            return self.requeue(id);
        };
        let verdict = self.overall_verdict_of_waiting(id, verdict);
        self.step.required.insert(id, verdict);
    }

    /// Requeues a dead worker's prefetched jobs, except for jobs that have started and are not idempotent, because such
    /// jobs must not run again.
    pub(super) fn requeue_prefetched(&mut self, place: u32, verdict: &Verdict) {
        let Some(worker) = self.workers.get_mut(&place) else { return };
        let begun = self.registry.begun(worker.id);
        for job in std::mem::take(&mut worker.prefetched).into_iter().rev() {
            self.coverage.see("prefetched to a worker that died");
            let entry = self.jobs.get_mut(&job).expect("the job must be in the model");
            (entry.prefetched, entry.is_overdue) = (None, false);
            if entry.send_number <= begun && !entry.idempotent && !entry.is_answered {
                self.coverage.see("prefetched job started before its worker died");
                entry.attempts += 1;
                let verdict = self.overall_verdict_of_waiting(job, verdict.clone());
                self.step.required.insert(job, verdict);
                continue;
            }
            self.end_or_requeue(job);
        }
    }

    /// Returns the prefetched job that must be recalled and rejected if a job of this class arrives while the queue is
    /// full.
    pub(super) fn shed_prefetched(&self, priority: Priority) -> Option<JobId> {
        let has_lower =
            |worker: &&Worker| worker.prefetched.iter().any(|id| self.jobs[id].priority < priority);
        let workers = self.workers.values().filter(|worker| worker.dead.is_none()).filter(has_lower);
        let back = workers.filter(|worker| !self.is_fixed(worker, None)).flat_map(|w| self.unbegun(w));
        let may_leave = |id: &JobId| !self.jobs[id].is_answered && self.jobs[id].priority < priority;
        let leaves = back.filter(may_leave).filter(|id| self.jobs[id].deadline_at > self.now);
        leaves.min_by_key(|id| self.jobs[id].priority)
    }

    /// Checks that prefetched jobs are recalled as soon as prefetching is no longer allowed.
    pub(super) fn check_prefetched(&self, breaker: BreakerState, is_tick: bool) {
        let is_open = self.mode == Mode::Open && self.suspects.is_empty() && breaker == BreakerState::Closed;
        for worker in self.workers.values().filter(|worker| worker.is_alive()) {
            let begun = self.registry.begun(worker.id);
            let unbegun = worker.prefetched.iter().find(|id| self.jobs[*id].send_number > begun);
            if let Some(first) = unbegun.filter(|_| !self.is_fixed(worker, None)) {
                assert!(
                    self.is_available(worker) && !worker.is_exclusive,
                    "{first:?} is prefetched to {:?}, which does not accept jobs",
                    worker.id
                );
                assert!(is_open || !is_tick, "{first:?} is prefetched although prefetching is not allowed");
                let job = &self.jobs[first];
                assert!(
                    !job.is_answered || job.was_fixed,
                    "{first:?} has an outcome but is still prefetched"
                );
            }
        }
        for worker in self.workers.values() {
            let is_alone = worker.jobs.is_empty();
            assert!(
                worker.prefetched.is_empty() || !is_alone,
                "{:?} has prefetched jobs but is not running any",
                worker.id
            );
        }
    }

    /// Handles the protocol violation of a worker that has sent a result for a prefetched or recalled job.
    pub(super) fn kill_for_invalid_reply(&mut self, id: WorkerId, job: JobId) {
        let Some(worker) = self.live(id) else { return };
        let is_too_soon = worker.prefetched.contains(&job);
        let lives = worker.killed.is_none();
        let was_taken = self.jobs.get(&job).is_some_and(|entry| entry.recalled_from == Some(id));
        if !is_too_soon && !was_taken {
            return;
        }
        self.coverage.see(if is_too_soon { "reply before the job began" } else { "reply after a recall" });
        self.step.sent_invalid_reply = lives.then_some(id);
        // The job has run. It must not run again unless another worker is already running it.
        let reason = CrashReason::Protocol;
        let crash = Verdict::Crashed { reason, status: None, message: String::new() };
        if is_too_soon {
            self.live_mut(id)
                .expect("the worker must be alive")
                .prefetched
                .retain(|&prefetched| prefetched != job);
        } else if !self.queue.contains(&job) && !self.suspects.contains(&job) {
            return;
        }
        let crash = self.overall_verdict_of_waiting(job, crash);
        let entry = self.jobs.get_mut(&job).expect("the job must be in the model");
        entry.prefetched = None;
        entry.attempts += 1;
        if entry.is_answered {
            self.jobs.remove(&job);
        } else {
            self.step.required.insert(job, crash);
        }
    }

    pub(super) fn is_protocol_kill_allowed(&self, worker: &Worker, reason: &KillReason) -> bool {
        matches!(reason, KillReason::Protocol(_)) && self.step.sent_invalid_reply == Some(worker.id)
    }
}
