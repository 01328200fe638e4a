//! Provides views of a bulkhead's state, from which the data plane builds snapshots, metrics, job lists and crash
//! reports. Also contains the job counters, and counts and rate-limits jobs that are passed on to fallbacks. Nothing in
//! this module changes jobs or workers.

use std::sync::Arc;
use std::time::Duration;

use bulkhead_shared::{JobId, Priority, RejectReason, Verdict, vocabulary};

use super::{Activity, Bulkhead, Mode};
use crate::breaker::BreakerState;
use crate::ending::KillReason;
use crate::jobs::JobState;
use crate::messages::WorkerId;
use crate::poison::Digest;
use crate::tenants::TenantId;
use crate::time::Time;
use crate::worker::{Exclusivity, SilenceCheck, Worker};
use crate::workers::{Slot, SlotState};

// The codes of reject reasons start at 1 and are contiguous.
const REASONS: usize = RejectReason::ALL.len() + 1;

/// Job counts by outcome.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "each field counts the jobs with the outcome of the same name")]
pub struct Counters {
    /// Number of submitted jobs, excluding jobs passed on from other bulkheads.
    pub submitted: u64,
    pub ok: u64,
    pub failed: u64,
    pub deadline_exceeded: u64,
    pub crashed: u64,
    pub cancelled: u64,
    /// Number of rejected jobs, indexed by the code of their [`RejectReason`].
    pub rejected: [u64; REASONS],
    /// Number of retries after the death of a worker or program.
    pub retries: u64,
    /// Number of jobs that were passed on to another bulkhead and have no outcome yet. The outcomes will be counted for
    /// this bulkhead.
    pub elsewhere: u64,
    /// Number of replies that were ignored, because either the client already had the outcome or the worker never had
    /// the job.
    pub late_replies: u64,
    /// Number of times that the adaptive limit was raised.
    pub limit_raised: u64,
    /// Number of times that the adaptive limit was lowered.
    pub limit_lowered: u64,
}

impl Counters {
    fn count(&mut self, verdict: &Verdict) {
        *self.of(verdict) += 1;
    }

    fn of(&mut self, verdict: &Verdict) -> &mut u64 {
        match verdict {
            Verdict::Ok => &mut self.ok,
            Verdict::Failed(_) => &mut self.failed,
            Verdict::Rejected { reason, .. } => &mut self.rejected[reason.code() as usize],
            Verdict::DeadlineQueued | Verdict::DeadlineRunning => &mut self.deadline_exceeded,
            Verdict::Crashed { .. } => &mut self.crashed,
            Verdict::Cancelled { .. } => &mut self.cancelled,
        }
    }

    /// Counts a job that was rejected before it reached the state machine.
    pub fn count_rejected(&mut self, reason: RejectReason) {
        self.submitted += 1;
        self.rejected[reason.code() as usize] += 1;
    }

    /// Adds the counts of another bulkhead to the counts of this bulkhead.
    pub fn add(&mut self, other: &Self) {
        self.submitted += other.submitted;
        self.ok += other.ok;
        self.failed += other.failed;
        self.deadline_exceeded += other.deadline_exceeded;
        self.crashed += other.crashed;
        self.cancelled += other.cancelled;
        self.retries += other.retries;
        self.elsewhere += other.elsewhere;
        self.late_replies += other.late_replies;
        self.limit_raised += other.limit_raised;
        self.limit_lowered += other.limit_lowered;
        for (own, others) in self.rejected.iter_mut().zip(&other.rejected) {
            *own += others;
        }
    }

    /// Returns the total number of jobs that have an outcome.
    pub fn outcomes(&self) -> u64 {
        self.ok
            + self.failed
            + self.deadline_exceeded
            + self.crashed
            + self.cancelled
            + self.rejected.iter().sum::<u64>()
    }
}

vocabulary! {
    /// State of a bulkhead.
    BulkheadState {
        /// At least one slot is still starting its first worker.
        Starting = "starting",
        /// Every slot has a ready worker.
        Ready = "ready",
        /// At least one slot has no ready worker.
        Degraded = "degraded",
        /// No slot has a worker or will get one soon.
        Failed = "failed",
        /// The bulkhead does not accept jobs.
        Draining = "draining",
    }
}

/// State of one worker, used in snapshots.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "the names are self-explanatory")]
pub struct WorkerView {
    pub id: WorkerId,
    pub slot: u32,
    pub pid: Option<u32>,
    pub state: &'static str,
    pub uptime: Duration,
    pub in_flight: u32,
    pub served: u64,
    /// Number of times that the slot's worker was restarted, not counting replacements by `recycle`.
    pub restarts: u64,
    /// Description of how the slot's previous worker ended.
    pub last_exit: Option<String>,
    /// True if the worker is the slot's current worker. False if the worker is starting as a successor or has been
    /// replaced.
    pub is_current: bool,
    /// True if the worker is reserved for a suspect job. The worker finishes its other jobs first and then runs
    /// the suspect job alone.
    pub is_exclusive: bool,
    /// True if the worker was late in starting a job. Such a worker gets no new jobs until its next sign of life.
    pub is_stalled: bool,
    /// True if the worker is a spare, whether ready or starting.
    pub is_spare: bool,
    /// True if the worker was started before the bulkhead's last restart, or if it runs a previous program or
    /// configuration.
    pub is_outdated: bool,
}

/// Summary of one worker.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "the names are self-explanatory")]
pub struct WorkerSummary {
    pub slot: u32,
    pub pid: Option<u32>,
    /// State, from [`crate::WORKER_STATES`].
    pub state: &'static str,
    /// True if the worker is a slot's current worker. False for spares, successors and replaced workers.
    pub is_current: bool,
    /// True if the worker is ready to take over a slot.
    pub is_ready_spare: bool,
}

/// Description of a worker whose process has exited. Created before the state machine handles the exit.
#[derive(Clone, Debug)]
pub struct PostMortem {
    /// The worker's slot.
    pub slot: u32,
    /// PID.
    pub pid: u32,
    /// Reason why the supervisor killed the worker, or `None` if the supervisor did not kill it.
    pub killed: Option<KillReason>,
    /// True if the worker had become ready before it exited.
    pub was_ready: bool,
    /// Time since the spawn.
    pub uptime: Duration,
    /// Number of jobs whose results the worker has sent.
    pub served: u64,
    /// Number of jobs that were in flight in the worker.
    pub in_flight: u32,
    /// Number of in-flight jobs that the worker may have started.
    pub begun: u32,
    /// Jobs in flight that have run for the longest time, up to the requested number of jobs.
    pub jobs: Vec<HeldJob>,
}

/// A job in flight in a worker.
#[derive(Clone, Copy, Debug)]
pub struct HeldJob {
    /// Job ID.
    pub id: JobId,
    /// Time since the dispatch.
    pub ran: Duration,
    /// Number of attempts, including the current one.
    pub attempts: u32,
    /// True if the worker exited without starting the job.
    pub is_unread: bool,
    /// Digest of the job's operation and payload, or `None` if the bulkhead does not use poison detection.
    pub digest: Option<Digest>,
}

vocabulary! {
    /// Progress of a job whose client is waiting for the outcome.
    JobProgress {
        /// The job is waiting for a permit.
        Queued = "queued",
        /// The job was sent to a worker that has not started it yet.
        Prefetched = "prefetched",
        /// A worker is running the job.
        Running = "running",
    }
}

/// A job whose client is waiting for the outcome, as shown in job lists.
#[derive(Debug)]
pub struct JobView<'a, T> {
    /// Job ID.
    pub id: JobId,
    /// The caller's record.
    pub record: &'a T,
    /// Progress of the job.
    pub progress: JobProgress,
    /// Time at which the bulkhead received the job.
    pub received: Time,
    /// True if the job was passed on from another bulkhead.
    pub is_fallback: bool,
    /// Time since the job was last dispatched, or `None` if no worker is running the job.
    pub ran: Option<Duration>,
    /// Maximum time until the client gets an outcome.
    pub left: Duration,
    /// Number of attempts, including the current one.
    pub attempts: u32,
    /// PID of the worker that has the job.
    pub worker_pid: Option<u32>,
}

/// State of one tenant, used in snapshots.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "the names are self-explanatory")]
pub struct TenantView {
    pub name: Arc<str>,
    pub in_flight: u32,
    pub queued: usize,
    /// Number of jobs submitted since the tenant was added to the tenant table.
    pub submitted: u64,
    /// Number of rejected jobs. As in [`Counters`], jobs passed on from other bulkheads do not count, here or in
    /// `submitted`.
    pub rejected: u64,
}

fn is_rejection(verdict: &Verdict) -> bool {
    matches!(verdict, Verdict::Rejected { .. })
}

impl<T> Bulkhead<T> {
    /// Returns up to `most` tenants, starting with the tenant that has the most jobs. Jobs without a tenant are not
    /// included.
    pub fn tenants(&self, most: usize) -> Vec<TenantView> {
        let mut views: Vec<TenantView> = self
            .tenants
            .iter()
            .map(|(id, tenant)| TenantView {
                name: self.tenants.name(id).clone(),
                in_flight: tenant.in_flight,
                queued: self.queue.len_of_tenant(id.0) + tenant.prefetched as usize,
                submitted: tenant.submitted,
                rejected: tenant.rejected,
            })
            .collect();
        let load = |view: &TenantView| (view.in_flight as usize + view.queued, view.submitted);
        views.sort_unstable_by(|a, b| load(b).cmp(&load(a)).then_with(|| a.name.cmp(&b.name)));
        views.truncate(most);
        views
    }

    /// Returns the job counts by outcome.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Returns the state of the circuit breaker.
    pub fn breaker(&self) -> BreakerState {
        self.breaker.state()
    }

    /// Returns the number of waiting jobs, which includes queued jobs, suspects and prefetched jobs.
    pub fn queued(&self) -> usize {
        self.queue.len() + self.suspects.len() + self.prefetched
    }

    /// Returns the number of quarantined payloads.
    pub fn quarantined(&self, now: Time) -> usize {
        self.poison.len(now)
    }

    /// Charges a rejected job to the rate limit before the job is passed on to a fallback. Otherwise, clients could use
    /// the fallback to avoid the rate limit. The job must not have been charged before. If the job exceeds the limit,
    /// counts the rejection as `rate_limited` instead, and returns the time to wait.
    pub fn charge_fallback(
        &mut self,
        now: Time,
        tenant: &str,
        cost: u32,
        refused: &Verdict,
    ) -> Option<Duration> {
        let tenant = self.tenant(tenant);
        let wait = self.take_rate(now, tenant, cost)?;
        self.uncount(tenant, refused);
        self.count(tenant, &Verdict::rejected(RejectReason::RateLimited));
        Some(wait)
    }

    /// Stops counting the outcome of a tenant's job, because the job is passed on to another bulkhead instead.
    pub fn count_fallback(&mut self, tenant: &str, verdict: &Verdict) {
        let tenant = self.tenant(tenant);
        self.uncount(tenant, verdict);
        self.counters.elsewhere += 1;
        // The tenant stays in the table until the outcome is counted.
        self.tenants.add_job(tenant);
    }

    /// Counts the outcome of a tenant's job that was passed on to another bulkhead.
    pub fn count_fallback_outcome(&mut self, tenant: &str, verdict: &Verdict) {
        let tenant = self.tenant(tenant);
        self.counters.elsewhere = self.counters.elsewhere.saturating_sub(1);
        self.count(tenant, verdict);
        self.tenants.remove_job(tenant);
    }

    /// Counts a tenant's job that was rejected before it reached the state machine. Such a job is malformed or too
    /// large, or memory was exhausted.
    pub fn count_rejected(&mut self, tenant: &str, reason: RejectReason) {
        let tenant = self.tenant(tenant);
        self.counters.submitted += 1;
        self.tenants.get(tenant).submitted += 1;
        self.count(tenant, &Verdict::rejected(reason));
    }

    /// Counts the outcome of a tenant's job.
    pub(super) fn count(&mut self, tenant: TenantId, verdict: &Verdict) {
        self.counters.count(verdict);
        self.tenants.get(tenant).rejected += u64::from(is_rejection(verdict));
    }

    fn uncount(&mut self, tenant: TenantId, verdict: &Verdict) {
        let count = self.counters.of(verdict);
        *count = count.saturating_sub(1);
        let rejected = &mut self.tenants.get(tenant).rejected;
        *rejected = rejected.saturating_sub(u64::from(is_rejection(verdict)));
    }

    /// Returns the number of jobs in flight whose clients are still waiting.
    pub fn in_flight(&self) -> u64 {
        self.workers.iter().map(|worker| u64::from(worker.awaited_jobs)).sum()
    }

    /// Returns the number of permits in use, including permits held by workers that will receive no more jobs.
    pub fn permits_held(&self) -> u32 {
        self.workers.totals().held
    }

    /// Returns true if no permit is free for a job of normal priority.
    pub fn is_full(&self) -> bool {
        u64::from(self.workers.totals().in_use) >= self.limit()
            || self.lowest_admitted() == Priority::Critical
    }

    /// Returns the number of free permits.
    pub fn available(&self) -> u64 {
        self.workers.free_permits().min(self.limit().saturating_sub(self.workers.totals().in_use.into()))
    }

    /// Returns the current maximum number of waiting jobs.
    pub fn queue_capacity(&self) -> usize {
        self.waiting_max()
    }

    /// Returns the number of worker restarts.
    pub fn restarts(&self) -> u64 {
        self.workers.slots().iter().map(|slot| slot.record.restarts).sum()
    }

    /// Returns true if the first worker of every slot has become ready or failed to start, or if the bulkhead is scaled
    /// to zero.
    pub fn has_settled(&self) -> bool {
        self.activity == Activity::ScaledToZero || self.slots_at_work().all(|slot| slot.record.has_settled)
    }

    fn slots_at_work(&self) -> impl Iterator<Item = &Slot> {
        self.workers.slots().iter().filter(|slot| slot.state.is_wanted() && !slot.is_spare_slot)
    }

    /// Returns a description of the most recent worker failure, or an empty string if no worker has failed.
    pub fn last_failure(&self) -> &str {
        &self.last_failure
    }

    /// Returns the reason why the last restart stopped before all workers were replaced, or `None` if the restart was
    /// not stopped.
    pub fn restart_failure(&self) -> Option<&str> {
        self.restart_failure.as_deref()
    }

    /// Returns the state of the bulkhead. While the bulkhead is scaled to zero, the state depends on the slots that
    /// would reject its next job.
    pub fn state(&self) -> BulkheadState {
        if self.mode != Mode::Open {
            return BulkheadState::Draining;
        }
        if self.activity == Activity::ScaledToZero {
            let slots = || {
                self.workers
                    .slots()
                    .iter()
                    .filter(|slot| slot.state == SlotState::Empty && !slot.is_spare_slot)
            };
            let is_stopped = |slot: &Slot| matches!(slot.record.saved_state, Some(SlotState::Stopped { .. }));
            return match slots().filter(|slot| is_stopped(slot)).count() {
                0 => BulkheadState::Ready,
                stopped if stopped == slots().count() => BulkheadState::Failed,
                _ => BulkheadState::Degraded,
            };
        }
        let slots = self.slots_at_work().count();
        match (self.ready_slots(), self.workers.totals().live_slots) {
            (ready, _) if ready == slots => BulkheadState::Ready,
            (0, 0) => BulkheadState::Failed,
            _ if !self.has_settled() => BulkheadState::Starting,
            _ => BulkheadState::Degraded,
        }
    }

    /// Returns true if the bulkhead accepts jobs, has a ready worker, and is not starting.
    pub fn is_serving(&self) -> bool {
        matches!(self.state(), BulkheadState::Ready | BulkheadState::Degraded) && self.ready_slots() > 0
    }

    fn ready_slots(&self) -> usize {
        let has_worker = |slot: &&Slot| {
            let worker = slot.state.worker().and_then(|place| self.workers.get(place));
            worker.is_some_and(|worker| worker.is_available() || worker.assignment.is_at_job_limit())
        };
        self.slots_at_work().filter(has_worker).count()
    }

    /// Returns a description of a worker whose exit is about to be reported, with at most `jobs_max` of its
    /// jobs.
    pub fn post_mortem(&mut self, now: Time, id: WorkerId, jobs_max: usize) -> Option<PostMortem> {
        let worker = self.workers.by_id(id)?;
        let killed = worker.killed();
        let (slot, pid, uptime) =
            (worker.assignment.slot(), worker.pid.unwrap_or(0), now.since(worker.spawned_at));
        let (was_ready, served) = (worker.ready_at.is_some(), worker.served);
        let unbegun = worker.unbegun as u32;
        let indexes = worker.jobs.clone();
        let in_flight = indexes.len() as u32;
        let mut jobs: Vec<HeldJob> =
            indexes.into_iter().map(|index| self.describe_held_job(now, index)).collect();
        // If only the worker's own record says that a job was not started, the job counts as started. Otherwise, a
        // worker could make another job look like the only suspect.
        let begun = jobs.iter().filter(|job| !job.is_unread).count() as u32 + unbegun;
        jobs.sort_by_key(|job| std::cmp::Reverse(job.ran));
        jobs.truncate(jobs_max);
        Some(PostMortem { slot, pid, killed, was_ready, uptime, served, in_flight, begun, jobs })
    }

    /// Returns true if the worker has been silent for so long that it might be hung.
    pub fn is_silent(&self, worker: WorkerId) -> bool {
        self.workers.by_id(worker).is_some_and(|worker| worker.silence != SilenceCheck::None)
    }

    /// Returns true if the worker is a spare that is ready to take over a slot.
    pub fn is_spare(&self, worker: WorkerId) -> bool {
        self.workers.by_id(worker).is_some_and(Worker::is_ready_spare)
    }

    /// Returns true if the worker has not exited and is not being killed.
    pub fn is_alive(&self, worker: WorkerId) -> bool {
        self.workers.by_id(worker).is_some_and(|worker| !worker.is_ending())
    }

    /// Returns the IDs of a worker's in-flight jobs.
    pub fn jobs_of(&self, worker: WorkerId) -> Vec<JobId> {
        let jobs = self.workers.by_id(worker).map(|worker| &worker.jobs);
        jobs.into_iter().flatten().map(|&index| self.jobs.id(index)).collect()
    }

    /// Returns the number of positions in the job table, for use with [`Self::job_at`]. Some positions can be free, so
    /// there can be fewer jobs.
    pub fn job_positions(&self) -> usize {
        self.jobs.positions()
    }

    /// Returns the job at a position in the job table. Returns `None` if the position is free or the client already has
    /// the outcome. A job's position never changes.
    pub fn job_at(&self, now: Time, position: usize) -> Option<JobView<'_, T>> {
        let job = self.jobs.at(position)?;
        let (progress, place, since) = match job.state {
            JobState::Unplaced => return None,
            JobState::Queued | JobState::WaitingSuspect => (JobProgress::Queued, None, None),
            JobState::Prefetched { worker } => (JobProgress::Prefetched, Some(worker), None),
            JobState::InFlight { worker, since, .. } => (JobProgress::Running, Some(worker), Some(since)),
        };
        Some(JobView {
            id: self.jobs.id(position as u32),
            record: job.record.as_ref()?,
            progress,
            received: job.received,
            is_fallback: job.is_fallback,
            ran: since.map(|since| now.since(since)),
            left: since.map_or(job.deadline_at, |since| job.answer_by(since)).since(now),
            attempts: job.attempts,
            worker_pid: place.and_then(|place| self.workers.get(place)).and_then(|worker| worker.pid),
        })
    }

    /// Returns the job with this ID. Returns `None` if the client already has the outcome.
    pub fn job(&self, now: Time, id: JobId) -> Option<JobView<'_, T>> {
        self.job_at(now, self.jobs.find(id)? as usize)
    }

    /// Returns a description of an in-flight job. Used in a report about the death of the program that ran the job.
    pub fn held_job(&mut self, now: Time, id: JobId) -> Option<HeldJob> {
        let index = self.jobs.find(id)?;
        Some(self.describe_held_job(now, index))
    }

    fn describe_held_job(&mut self, now: Time, index: u32) -> HeldJob {
        let id = self.jobs.id(index);
        let job = self.jobs.get(index);
        let (ran, is_unread) = match job.state {
            JobState::InFlight { since, is_unread, .. } => (now.since(since), is_unread),
            JobState::Unplaced
            | JobState::Queued
            | JobState::WaitingSuspect
            | JobState::Prefetched { .. } => (Duration::ZERO, false),
        };
        HeldJob { id, ran, attempts: job.attempts, is_unread, digest: job.digest }
    }

    /// Returns summaries of all workers, in no particular order. Does not allocate memory.
    pub fn worker_summaries(&self) -> impl Iterator<Item = WorkerSummary> {
        self.workers.iter().map(|worker| WorkerSummary {
            slot: worker.assignment.slot(),
            pid: worker.living_pid(),
            state: worker.state_name(),
            is_current: self.workers.fills_job_slot(worker),
            is_ready_spare: worker.is_ready_spare(),
        })
    }

    /// Returns the number of jobs sent to a worker, and the number of these jobs that are unfinished. Returns `None` if
    /// the worker is dead.
    pub fn job_counts(&self, id: WorkerId) -> Option<(u64, usize)> {
        self.workers.by_id(id).map(|worker| (worker.jobs_given, worker.jobs.len()))
    }

    /// Returns the states of all workers, ordered by slot.
    pub fn workers(&self, now: Time) -> Vec<WorkerView> {
        let mut views: Vec<WorkerView> = self
            .workers
            .iter()
            .map(|worker| {
                let slot = worker.assignment.slot();
                let record = &self.workers.slot(slot).record;
                WorkerView {
                    id: worker.id,
                    slot,
                    pid: worker.living_pid(),
                    state: worker.state_name(),
                    uptime: now.since(worker.spawned_at),
                    in_flight: worker.jobs.len() as u32,
                    served: worker.served,
                    restarts: record.restarts,
                    last_exit: record.last_exit.clone(),
                    is_current: worker.assignment.is_current(),
                    is_exclusive: worker.exclusivity != Exclusivity::Shared,
                    is_stalled: worker.is_stalled,
                    is_spare: worker.assignment.is_spare(),
                    is_outdated: worker.is_outdated(),
                }
            })
            .collect();
        views.sort_by_key(|view| (view.slot, view.id.generation));
        views
    }
}
