//! Recovers jobs after the death of their worker or program. Payloads that repeatedly kill workers are quarantined,
//! idempotent jobs are retried, and all other jobs end as crashed. `life` handles the worker itself, and `budget` and
//! `poison` count retries and crashes.
//!
//! A job that may have crashed a worker is a suspect. A suspect is retried only in a worker that runs no other job.
//! This identifies the culprit, and prevents it from crashing the other jobs a second time.

use bulkhead_shared::{JobId, Verdict};

use super::{Bulkhead, Mode};
use crate::ending::Ending;
use crate::jobs::{EarlierAttempts, JobState};
use crate::messages::{Action, OperatorEvent, WorkerId};
use crate::poison::Digest;
use crate::time::Time;
use crate::worker::Exclusivity;

/// Likelihood that a job caused the death of its worker or program.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Suspicion {
    /// The job was the only one in the worker that died.
    OnlyJob,
    /// The program that ran the job died. The program ran no other job.
    Program,
    /// The worker that died was running several jobs, each of which could be the cause.
    OneOfSeveral,
    /// The job cannot have caused the death.
    Cleared,
}

impl Suspicion {
    /// Returns the degree of suspicion against a job that a dead worker may have started. `jobs` is the total number of
    /// jobs that the worker may have started.
    pub(super) fn of(ending: &Ending, jobs: usize) -> Self {
        match (ending.may_be_caused_by_job(), jobs) {
            (true, 1) => Self::OnlyJob,
            (true, _) => Self::OneOfSeveral,
            (false, _) => Self::Cleared,
        }
    }
}

impl<T> Bulkhead<T> {
    /// Retries or ends a job whose worker is dead.
    pub(super) fn job_lost(&mut self, now: Time, index: u32, verdict: &Verdict, loss: Suspicion) {
        self.job_timers.clear(index);
        let is_retried = self.decide_retry(now, index, verdict, loss);
        if !is_retried {
            self.send_outcome(now, index, verdict.clone());
        }
        let job = self.jobs.get(index);
        job.state = JobState::Unplaced;
        let tenant = job.tenant;
        self.count_in_flight(tenant, false);
        if is_retried {
            self.requeue(index);
        } else {
            self.forget(index);
        }
    }

    /// Decides whether a crashed job is retried, and if so, records the attempt and reports the retry. If no other job
    /// can be the cause, first records the crash under the payload's digest.
    pub(super) fn decide_retry(&mut self, now: Time, index: u32, verdict: &Verdict, loss: Suspicion) -> bool {
        if matches!(loss, Suspicion::OnlyJob | Suspicion::Program) {
            self.record_payload_crash(now, index);
        }
        if !self.may_retry(now, index) {
            return false;
        }
        self.record_call(now, index, verdict);
        let job = self.jobs.get(index);
        let JobState::InFlight { worker, since, .. } = job.state else { return false };
        let ran =
            job.earlier_attempts.as_ref().map(|earlier| earlier.ran).unwrap_or_default() + now.since(since);
        let worker_pid = self.workers.get(worker).and_then(|worker| worker.pid);
        job.earlier_attempts = Some(Box::new(EarlierAttempts { crash: verdict.clone(), ran, worker_pid }));
        job.is_suspect |= matches!(loss, Suspicion::OnlyJob | Suspicion::OneOfSeveral);
        let attempts = job.attempts;
        self.counters.retries += 1;
        let (job, crash) = (self.jobs.id(index), verdict.clone());
        self.actions.push(Action::Report(OperatorEvent::JobRetried { job, attempts, crash, worker_pid }));
        true
    }

    fn record_payload_crash(&mut self, now: Time, index: u32) {
        let Some(digest) = self.jobs.get(index).digest else { return };
        let was_quarantined = self.poison.is_quarantined(now, digest);
        if self.poison.record_crash(now, digest) && !was_quarantined {
            self.deferred_events.push(OperatorEvent::JobQuarantined { job: self.jobs.id(index), digest });
            // Jobs with this payload may have been prefetched to other workers.
            self.must_recall_all = self.prefetched > 0;
        }
    }

    pub(super) fn is_quarantined(&self, now: Time, digest: Option<Digest>) -> bool {
        digest.is_some_and(|digest| self.poison.is_quarantined(now, digest))
    }

    /// Returns true if the job can be retried. In that case, charges the retry to the retry budget.
    fn may_retry(&mut self, now: Time, index: u32) -> bool {
        let is_open = self.mode == Mode::Open && self.workers.totals().live_slots > 0;
        let job = self.jobs.get(index);
        let (digest, attempts) = (job.digest, job.attempts);
        let is_fit = job.idempotent && job.is_resendable && job.record.is_some() && job.deadline_at > now;
        is_open && is_fit && !self.is_quarantined(now, digest) && self.retries.try_retry(now, attempts)
    }

    /// Records that a worker died before reading this job.
    pub(super) fn job_unread(&mut self, worker: WorkerId, job: JobId) {
        if let Some((index, _)) = self.find_at(worker, job)
            && let JobState::InFlight { is_unread, .. } = &mut self.jobs.get(index).state
        {
            *is_unread = true;
            // Drops only the journal. The worker's jobs are handled by the worker's exit event, which follows.
            self.edit_by_id(worker, |worker| worker.journal = None);
        }
    }

    /// Marks a job as not started because a record written by its dead worker says so. The job still counts as a
    /// possible culprit, because a worker could otherwise make another job the only suspect.
    pub(super) fn job_not_begun(&mut self, id: WorkerId, job: JobId) {
        // The record is trusted only once per job, because a job that manipulates the record could otherwise be
        // dispatched forever.
        if self.jobs.find(job).is_some_and(|index| self.jobs.get(index).unread_returns > 0) {
            return;
        }
        self.job_unread(id, job);
        if self.holds(id, job) {
            self.edit_by_id(id, |worker| worker.unbegun += 1);
        }
    }

    /// Requeues the jobs that a dead worker did not read, in their original order. Returns the unread jobs that cannot
    /// be requeued, followed by the jobs that the worker may have started.
    pub(super) fn requeue_unread(&mut self, jobs: Vec<u32>) -> (Vec<u32>, Vec<u32>) {
        let (mut unread, begun): (Vec<_>, Vec<_>) = jobs.into_iter().partition(|&index| {
            matches!(self.jobs.get(index).state, JobState::InFlight { is_unread: true, .. })
        });
        if self.mode == Mode::Open && self.workers.totals().live_slots > 0 {
            unread.sort_unstable_by_key(|&index| std::cmp::Reverse(self.jobs.id(index)));
            unread.retain(|&index| !self.requeue_unread_job(index));
        }
        (unread, begun)
    }

    /// Requeues an unread job. Returns false if the client already has the outcome, if the payload is gone, or if too
    /// many workers have died before reading the job.
    fn requeue_unread_job(&mut self, index: u32) -> bool {
        let job = self.jobs.get(index);
        if job.record.is_none() || !job.is_resendable || job.unread_returns >= UNREAD_ATTEMPTS_MAX {
            return false;
        }
        // The dispatch does not count as an attempt, because the job was never started.
        job.attempts -= 1;
        job.unread_returns += 1;
        // The job was already dispatched once, so the queue timeout no longer applies.
        job.queue_timeout_at = None;
        job.state = JobState::Unplaced;
        let (tenant, claim) = (job.tenant, job.claim.take());
        if let Some(claim) = claim {
            self.breaker.return_claim(claim);
        }
        self.count_in_flight(tenant, false);
        self.requeue(index);
        true
    }

    /// Puts a job back at the front of its class, because the job was already dispatched once. The tenant is not
    /// charged again. If the job is a suspect, adds it to the list of suspects instead.
    pub(super) fn requeue(&mut self, index: u32) {
        let job = self.jobs.get(index);
        if !job.is_suspect {
            return self.enqueue_first(index);
        }
        job.state = JobState::WaitingSuspect;
        let deadline_at = job.deadline_at;
        self.suspects.push_back(index);
        self.job_timers.set(index, deadline_at);
    }

    /// Returns the final outcome of a job, considering all attempts. If an earlier attempt crashed and the job is not
    /// running now, the outcome is that crash, unless the job was cancelled.
    pub(super) fn overall_verdict(&mut self, index: u32, verdict: Verdict) -> Verdict {
        let job = self.jobs.get(index);
        match (&job.state, &job.earlier_attempts, verdict) {
            (JobState::InFlight { .. }, _, verdict) | (_, None, verdict) => verdict,
            (_, Some(_), Verdict::Cancelled { .. }) => {
                Verdict::Cancelled { executed: bulkhead_shared::Executed::Yes }
            }
            (_, Some(earlier), _) => earlier.crash.clone(),
        }
    }

    // Exclusive workers for suspects.

    /// Dispatches suspect jobs to idle workers. If no worker is idle, reserves the least loaded worker, which then gets
    /// no new jobs until it is idle.
    pub(super) fn dispatch_suspects(&mut self, now: Time) {
        while let Some(at) = self.next_suspect()
            && let Some(place) = self.idle_worker()
            && let Some(index) = self.suspects.remove(at)
        {
            self.release_reserved_worker();
            self.jobs.get(index).state = JobState::Unplaced;
            self.job_timers.clear(index);
            if self.jobs.get(index).deadline_at <= now {
                self.send_outcome(now, index, Verdict::DeadlineQueued);
                self.forget(index);
            } else {
                self.try_dispatch(now, index, place);
            }
        }
        if self.next_suspect().is_none() {
            self.release_reserved_worker();
        } else if self.workers.reserved().is_none()
            && let Some(place) = self.workers.least_loaded()
        {
            self.edit(place, |worker| worker.exclusivity = Exclusivity::Draining);
        }
    }

    /// Returns the position of the oldest suspect job whose tenant has not used up its quota.
    pub(super) fn next_suspect(&self) -> Option<usize> {
        self.suspects.iter().position(|&index| !self.is_at_quota(self.jobs.tenant(index)))
    }

    fn release_reserved_worker(&mut self) {
        if let Some(place) = self.workers.reserved() {
            self.edit(place, |worker| worker.exclusivity = Exclusivity::Shared);
        }
    }
}

/// Maximum number of workers that can die before reading the same job. After that, the job is not requeued.
const UNREAD_ATTEMPTS_MAX: u32 = 3;
