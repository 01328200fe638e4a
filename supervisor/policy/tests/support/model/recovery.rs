//! Jobs of dead workers: retries, suspects, and quarantined payloads.

use std::collections::BTreeMap;

use bulkhead_policy::{
    Action, Activity, Bulkhead, Digest, LimitChange, Limits, RestartPolicy, Time, WorkerId,
};
use bulkhead_shared::{Executed, JobId, Verdict};

use super::{Mode, Model, Phase};
use crate::support::Tag;

/// Minimum number of retries that every retry budget allows.
const RETRIES_FLOOR: u64 = 10;

/// Crashes and quarantined payloads.
#[derive(Default)]
pub(super) struct Poison {
    crashes: Vec<(Time, Digest)>,
    quarantined: BTreeMap<Digest, Time>,
}

impl Poison {
    fn forget(&mut self, now: Time, within: std::time::Duration) {
        self.crashes.retain(|(at, _)| now.since(*at) < within);
        self.quarantined.retain(|_, since| now.since(*since) < within);
    }

    pub(super) fn len(&self, now: Time, limits: &Limits) -> usize {
        let Some(limits) = &limits.poison else { return 0 };
        self.quarantined.values().filter(|&&since| now.since(since) < limits.within).count()
    }
}

impl Model {
    pub(super) fn is_quarantined(&self, digest: Option<Digest>) -> bool {
        let Some((limits, digest)) = self.limits.poison.as_ref().zip(digest) else { return false };
        let since = self.poison.quarantined.get(&digest);
        since.is_some_and(|&since| self.now.since(since) < limits.within)
    }

    /// Records that a worker or program died while running only this job.
    pub(super) fn crashed_as_only_job(&mut self, job: JobId) {
        let digest = self.jobs[&job].digest;
        let was_quarantined = self.is_quarantined(digest);
        let Some((limits, digest)) = self.limits.poison.as_ref().zip(digest) else { return };
        let (now, within) = (self.now, limits.within);
        self.poison.quarantined.retain(|_, since| now.since(*since) < within);
        self.poison.crashes.push((now, digest));
        let is_recent = |&&(at, d): &&(Time, Digest)| d == digest && now.since(at) < within;
        if self.poison.crashes.iter().filter(is_recent).count() >= limits.crashes as usize {
            self.poison.quarantined.insert(digest, now);
            if !was_quarantined {
                self.coverage.see("quarantined");
                self.step.to_quarantine.push(digest);
            }
        }
    }

    /// Marks a job of a lost worker as retryable if the retry limits allow another attempt. The retry budget is checked
    /// later.
    pub(super) fn allow_retry(&mut self, id: JobId, is_suspect: bool) {
        let Some(limits) = &self.limits.retry else { return };
        let job = &self.jobs[&id];
        let is_open = self.mode == Mode::Open && self.live_slots() > 0;
        let is_fit = job.idempotent && job.is_resendable && !job.is_answered && job.deadline_at > self.now;
        let has_attempts = job.attempts < limits.attempts;
        if is_open && is_fit && has_attempts && !self.is_quarantined(job.digest) {
            self.step.retryable.insert(id, is_suspect || job.is_suspect);
        }
    }

    pub(super) fn retried(&mut self, id: JobId, attempts: u32) {
        let is_suspect =
            self.step.retryable.remove(&id).expect("a job was retried although the rules do not allow it");
        self.coverage.see(if is_suspect { "suspect retried" } else { "retried" });
        self.counters.retries += 1;
        let crash =
            self.step.required.remove(&id).expect("a job that can be retried must have a required outcome");
        let job = self.jobs.get_mut(&id).expect("a retried job must be in the model");
        assert_eq!(attempts, job.attempts);
        (job.before, job.worker, job.is_suspect) = (Some(crash.clone()), None, is_suspect);
        job.is_unread = false;
        self.requeue(id);
        if self.live_slots() == 0 {
            // No other worker will start.
            self.step.required.insert(id, crash);
        }
    }

    pub(super) fn requeue(&mut self, id: JobId) {
        match self.jobs[&id].is_suspect {
            true => self.suspects.push_back(id),
            false => self.queue.push_front(id),
        }
    }

    /// Returns the verdict to send to the client. If the job is waiting for another attempt, this is the verdict of the
    /// previous attempt.
    pub(super) fn overall_verdict(&self, id: JobId, verdict: Verdict) -> Verdict {
        match self.jobs[&id].worker {
            Some(_) => verdict,
            None => self.overall_verdict_of_waiting(id, verdict),
        }
    }

    /// Returns the verdict that the client receives when a waiting job ends with `verdict`. An earlier crash of the job
    /// takes precedence unless the job was cancelled.
    pub(super) fn overall_verdict_of_waiting(&self, id: JobId, verdict: Verdict) -> Verdict {
        match (&self.jobs[&id].before, &verdict) {
            (Some(_), Verdict::Cancelled { .. }) => Verdict::Cancelled { executed: Executed::Yes },
            (Some(crash), _) => crash.clone(),
            (None, _) => verdict,
        }
    }

    // Exclusive workers for suspects.

    pub(super) fn record_exclusive_workers(&mut self, bulkhead: &Bulkhead<Tag>, actions: &[Action<Tag>]) {
        for view in bulkhead.workers(self.now) {
            if let Some(worker) = self.live_mut(view.id) {
                worker.is_exclusive = view.is_exclusive;
                // A worker that was given a job in this step was not stalled at that time. If the worker is stalled
                // now, the job must have been recalled.
                let is_given = |action: &Action<Tag>| matches!(action, Action::Dispatch { worker, is_prefetched: false, .. } if *worker == view.id);
                worker.stalls = view.is_stalled;
                worker.is_stalled = view.is_stalled && !actions.iter().any(is_given);
                if view.is_stalled {
                    self.coverage.see("stalled");
                }
            }
        }
    }

    /// Returns the oldest suspect job whose tenant has not reached its quota.
    pub(super) fn next_suspect(&self) -> Option<JobId> {
        self.suspects.iter().copied().find(|id| !self.is_at_quota(self.jobs[id].tenant))
    }

    pub(super) fn take_suspect(&mut self, id: WorkerId, job: JobId) {
        let worker = self.live(id).expect("only a living worker can be given a job");
        assert!(worker.jobs.is_empty() && self.is_available(worker), "a suspect was not dispatched alone");
        self.coverage.see("suspect runs alone");
        if self.suspects.front() != Some(&job) {
            self.coverage.see("suspect at its quota");
        }
        self.suspects.retain(|&waiting| waiting != job);
    }

    pub(super) fn check_suspects(&self) {
        let step = &self.step;
        let was_within_budget = self.limits.retry.is_some() && self.counters.retries < RETRIES_FLOOR;
        assert!(
            !was_within_budget || step.retryable.is_empty(),
            "jobs were not retried: {:?}",
            step.retryable
        );
        let available = || self.workers.values().filter(|worker| self.is_available(worker));
        let is_suspect = |job: &JobId| self.jobs[job].is_suspect;
        if self.next_suspect().is_some() {
            assert!(
                available().all(|w| !w.jobs.is_empty() || w.is_stalled || !self.has_permit(w)),
                "a suspect waits although a worker is idle"
            );
            let has_one = available().any(|worker| worker.is_exclusive);
            assert!(has_one || self.least_loaded().is_none(), "no worker is reserved for a suspect");
        }
        for worker in available() {
            let has_suspect = worker.jobs.iter().any(is_suspect);
            assert!(!has_suspect || worker.jobs.len() == 1, "a suspect does not run alone");
            assert!(!has_suspect || worker.is_exclusive);
            assert!(
                !worker.is_exclusive || has_suspect || !self.suspects.is_empty(),
                "{:?} is reserved although there is no suspect",
                worker.id
            );
        }
    }

    // New limits.

    pub(super) fn reconfigure(&mut self, limits: &Limits) {
        let before = std::mem::replace(&mut self.limits, limits.clone());
        match (&before.poison, &limits.poison) {
            (_, None) => self.poison = Poison::default(),
            (Some(before), Some(_)) => self.poison.forget(self.now, before.within),
            (None, Some(_)) => {}
        }
        if before.health.missed != limits.health.missed {
            for worker in self.workers.values_mut() {
                (worker.observed_since, worker.was_checked) = (None, false);
            }
        }
        self.reconfigure_adaptive();
        let (policy, policy_before) = (limits.restart.policy, before.restart.policy);
        self.apply_limits(true);
        if before.recycle.jobs != limits.recycle.jobs {
            self.apply_job_limit();
        }
        if policy != policy_before && policy != RestartPolicy::Never && !self.is_stopping() {
            self.start_stopped();
        }
    }

    pub(super) fn change(&mut self, change: LimitChange) {
        self.limits.max_queue = change.max_queue.unwrap_or(self.limits.max_queue);
        self.limits.processes = change.processes.unwrap_or(self.limits.processes);
        self.limits.max_in_flight = change.max_in_flight.unwrap_or(self.limits.max_in_flight);
        self.apply_limits(change.max_in_flight.is_some());
    }

    /// Applies changed limits on permits, workers and queue places.
    fn apply_limits(&mut self, is_resized: bool) {
        self.max_queue_ever = self.max_queue_ever.max(self.limits.max_queue);
        self.permits_ever = self.permits_ever.max(self.limits.processes * self.limits.max_in_flight);
        let (most, now) = (self.limits.max_in_flight, self.now);
        self.step.is_resized = true;
        for worker in self.workers.values_mut().filter(|worker| worker.is_alive()) {
            let is_told = matches!(worker.phase, Phase::Initializing { .. } | Phase::Ready);
            if is_resized && is_told && worker.can_resize && worker.sent_max_in_flight != most {
                self.coverage.see("sent its maximum");
                worker.sent_max_in_flight = most;
                self.step.to_resize.insert(worker.id, most);
            }
        }
        if !self.is_stopping() {
            self.resize_slots();
        }
        for worker in self.workers.values_mut().filter(|worker| worker.sent_max_in_flight < most) {
            if !worker.is_at_job_limit {
                worker.next_replacement_at = worker.next_replacement_at.min(now);
            }
            self.rolling.insert(worker.slot);
        }
    }

    pub(super) fn check_idle_since(&mut self, bulkhead: &Bulkhead<Tag>) {
        let is_started = self.activity == Activity::Started && !self.is_stopping();
        let is_idle = self.jobs.is_empty() && is_started;
        self.idle_since = match self.limits.idle {
            Some(_) if is_idle => Some(self.idle_since.unwrap_or(self.now)),
            _ => None,
        };
        assert_eq!(bulkhead.idle_since(), self.idle_since);
    }
}
