//! What a bulkhead looks like from outside, for snapshots and for the invariants that tests check.

use std::sync::Arc;
use std::time::Duration;

use bulkhead_shared::{JobId, Priority, RejectReason, Verdict, vocabulary};

use super::{Activity, Bulkhead, Mode};
use crate::breaker::BreakerState;
use crate::jobs::Place;
use crate::messages::{KillReason, WorkerId};
use crate::poison::Digest;
use crate::time::Time;
use crate::workers::{Apart, Role, Silence, Slot, Worker};

// Codes begin at 1 and leave no gap.
const REASONS: usize = RejectReason::ALL.len() + 1;

/// How many jobs ended how, since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "each is the outcome of that name")]
pub struct Counters {
    /// Jobs that asked to be taken, whatever became of them.
    pub submitted: u64,
    pub ok: u64,
    pub failed: u64,
    pub deadline_exceeded: u64,
    pub crashed: u64,
    pub cancelled: u64,
    /// By the code of the [`RejectReason`].
    pub rejected: [u64; REASONS],
    /// How often a job was given to another worker since its own had died.
    pub retries: u64,
    /// Jobs that another bulkhead has, whose outcome is counted here.
    pub elsewhere: u64,
    /// Replies for jobs that were answered already, or that the worker never had.
    pub late_replies: u64,
    /// How often the adaptive limit grew.
    pub limit_raised: u64,
    /// How often it fell.
    pub limit_lowered: u64,
}

impl Counters {
    pub(super) fn count(&mut self, verdict: &Verdict) {
        *self.of(verdict) += 1;
    }

    pub(super) fn of(&mut self, verdict: &Verdict) -> &mut u64 {
        match verdict {
            Verdict::Ok => &mut self.ok,
            Verdict::Failed(_) => &mut self.failed,
            Verdict::Rejected { reason, .. } => &mut self.rejected[reason.code() as usize],
            Verdict::DeadlineQueued | Verdict::DeadlineRunning => &mut self.deadline_exceeded,
            Verdict::Crashed { .. } => &mut self.crashed,
            Verdict::Cancelled { .. } => &mut self.cancelled,
        }
    }

    /// Counts a job that was refused before anything else was known of it.
    pub fn count_refused(&mut self, reason: RejectReason) {
        self.submitted += 1;
        self.rejected[reason.code() as usize] += 1;
    }

    /// Adds what was counted elsewhere, for a sum over several bulkheads.
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

    /// Jobs that have their outcome.
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
    /// The state of a bulkhead in one word.
    BulkheadState {
        /// No worker is ready, and none has failed yet.
        Starting = "starting",
        /// Every slot has a worker that is ready.
        Ready = "ready",
        /// Some slot has none.
        Degraded = "degraded",
        /// No slot has a worker or will have one soon.
        Failed = "failed",
        /// It takes no jobs.
        Draining = "draining",
    }
}

/// One worker from outside.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "the names say it")]
pub struct WorkerView {
    pub id: WorkerId,
    pub slot: u32,
    pub pid: Option<u32>,
    pub state: &'static str,
    pub uptime: Duration,
    pub in_flight: u32,
    pub served: u64,
    /// Workers that the slot got after the first, recycling not counted.
    pub restarts: u64,
    /// How the worker before this one ended.
    pub last_exit: Option<String>,
    /// Whether it fills its slot; otherwise it is coming or going.
    pub is_current: bool,
    /// Whether it takes no jobs but one that is to be alone.
    pub is_apart: bool,
    /// True if the worker was late to begin a job and gets no more jobs before its next sign of life.
    pub is_stalled: bool,
    /// Whether it is ready to take over a slot, or will be.
    pub is_spare: bool,
}

/// One worker in brief.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "the names say it")]
pub struct StaffView {
    pub slot: u32,
    pub pid: Option<u32>,
    /// One of [`crate::WORKER_STATES`].
    pub state: &'static str,
    /// Whether it fills its slot; otherwise it is coming or going, or is a spare.
    pub is_current: bool,
    /// Whether it is ready to take over a slot.
    pub is_ready_spare: bool,
}

/// A worker whose process is gone, as long as its bulkhead has not been told.
#[derive(Clone, Debug)]
pub struct PostMortem {
    /// Its slot.
    pub slot: u32,
    /// Its process.
    pub pid: u32,
    /// Why, if the supervisor killed it.
    pub killed: Option<KillReason>,
    /// Whether it was ever ready.
    pub was_ready: bool,
    /// How long it ran.
    pub uptime: Duration,
    /// How many jobs it answered.
    pub served: u64,
    /// Jobs that it held, and some of them, the oldest first.
    pub in_flight: u32,
    /// How many of those it may have begun.
    pub begun: u32,
    /// See there.
    pub jobs: Vec<HeldJob>,
}

/// A job in the hands of a worker.
#[derive(Clone, Copy, Debug)]
pub struct HeldJob {
    /// Which.
    pub id: JobId,
    /// How long the worker has had it.
    pub ran: Duration,
    /// How often it was given to a worker, this time included.
    pub attempts: u32,
    /// Whether the worker is gone and had not read it.
    pub is_unread: bool,
    /// What tells its payload from all others, where that is asked for.
    pub digest: Option<Digest>,
}

/// One tenant from outside.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "the names say it")]
pub struct TenantView {
    pub name: Arc<str>,
    pub in_flight: u32,
    pub queued: usize,
    /// Jobs that asked to be taken, since the tenant was last forgotten.
    pub submitted: u64,
    /// How many of them were refused at once.
    pub rejected: u64,
}

impl<T> Bulkhead<T> {
    /// The tenants that have most jobs here, at most so many; jobs without a tenant are not among them.
    pub fn tenants(&self, most: usize) -> Vec<TenantView> {
        let mut views: Vec<TenantView> = self
            .tenants
            .iter()
            .map(|(id, tenant)| TenantView {
                name: self.tenants.name(id).clone(),
                in_flight: tenant.in_flight,
                queued: self.queue.len_of_tenant(id.0) + tenant.ahead as usize,
                submitted: tenant.submitted,
                rejected: tenant.rejected,
            })
            .collect();
        let load = |view: &TenantView| (view.in_flight as usize + view.queued, view.submitted);
        views.sort_unstable_by(|a, b| load(b).cmp(&load(a)).then_with(|| a.name.cmp(&b.name)));
        views.truncate(most);
        views
    }

    /// What was counted since the start.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Where its breaker stands.
    pub fn breaker(&self) -> BreakerState {
        self.breaker.state()
    }

    /// Jobs that wait, be it for any worker or for one for themselves.
    pub fn queued(&self) -> usize {
        self.queue.len() + self.suspects.len() + self.ahead
    }

    /// Payloads that are kept out since they kill workers.
    pub fn quarantined(&self, now: Time) -> usize {
        self.poison.len(now)
    }

    /// Charges the rate limit for a job that was refused before it was charged, and is to go elsewhere: a limit
    /// that a closed door leads past would be none. If it is over the limit, that is why it is refused, and this
    /// says for how long.
    pub fn charge_late(&mut self, now: Time, tenant: &str, cost: u32, refused: &Verdict) -> Option<Duration> {
        let tenant = self.tenant(tenant);
        let wait = self.take_rate(now, tenant, cost)?;
        let count = self.counters.of(refused);
        *count = count.saturating_sub(1);
        self.counters.rejected[RejectReason::RateLimited.code() as usize] += 1;
        Some(wait)
    }

    /// A job's answer was not told: it has gone to another bulkhead, whose answer will count here.
    pub fn passed_on(&mut self, verdict: &Verdict) {
        let count = self.counters.of(verdict);
        *count = count.saturating_sub(1);
        self.counters.elsewhere += 1;
    }

    /// The answer for a job that was passed on.
    pub fn came_back(&mut self, verdict: &Verdict) {
        self.counters.elsewhere = self.counters.elsewhere.saturating_sub(1);
        self.counters.count(verdict);
    }

    /// Jobs that a worker has and a client waits for.
    pub fn in_flight(&self) -> u64 {
        self.workers.iter().flatten().map(|w| u64::from(w.wanted)).sum()
    }

    /// Permits that are taken, those of workers that take no more jobs included.
    pub fn permits_taken(&self) -> u32 {
        self.held
    }

    /// Whether an ordinary job that came now would not run at once, since no permit is free that it may have.
    pub fn is_full(&self) -> bool {
        u64::from(self.in_use) >= self.limit() || self.lowest_admitted() == Priority::Critical
    }

    /// Permits that are free now.
    pub fn available(&self) -> u64 {
        let able = self.workers.iter().flatten().filter(|worker| worker.listed.is_some());
        let free: u64 =
            able.map(|worker| u64::from(worker.permits).saturating_sub(worker.jobs.len() as u64)).sum();
        free.min(self.limit().saturating_sub(self.in_use.into()))
    }

    /// How many jobs may wait now.
    pub fn queue_capacity(&self) -> usize {
        self.waiting_max()
    }

    /// How often a worker was started again.
    pub fn restarts(&self) -> u64 {
        self.slots.iter().map(|slot| slot.restarts).sum()
    }

    /// Whether the first start of every slot has ended, well or not.
    pub fn has_settled(&self) -> bool {
        self.activity == Activity::Resting || self.slots_at_work().all(|slot| slot.has_settled)
    }

    fn slots_at_work(&self) -> impl Iterator<Item = &Slot> {
        self.slots.iter().filter(|slot| slot.state.is_wanted() && !slot.is_reserve)
    }

    /// What went wrong last with its workers, for people; empty if nothing did.
    pub fn last_trouble(&self) -> &str {
        &self.last_trouble
    }

    /// Its state in one word.
    pub fn state(&self) -> BulkheadState {
        if self.mode != Mode::Open {
            return BulkheadState::Draining;
        }
        let slots = self.slots_at_work().count() as u32;
        let has_worker = |slot: &&Slot| {
            let worker = slot.state.worker().and_then(|place| self.workers[place as usize].as_ref());
            worker.is_some_and(|worker| worker.counted || worker.is_spent)
        };
        let ready_slots = self.slots_at_work().filter(has_worker).count() as u32;
        match (ready_slots, self.live_slots) {
            (ready, _) if ready == slots => BulkheadState::Ready,
            (0, 0) => BulkheadState::Failed,
            _ if !self.has_settled() => BulkheadState::Starting,
            _ => BulkheadState::Degraded,
        }
    }

    /// What is known of a worker that is about to be reported as gone, with at most so many of its jobs.
    pub fn post_mortem(&mut self, now: Time, id: WorkerId, jobs_max: usize) -> Option<PostMortem> {
        let worker = self.worker(id)?;
        let killed = worker.killed();
        let (slot, pid, uptime) = (worker.slot, worker.pid.unwrap_or(0), now.since(worker.spawned_at));
        let (was_ready, served) = (worker.ready_at.is_some(), worker.served);
        let unbegun = worker.unbegun as u32;
        let indexes = worker.jobs.clone();
        let in_flight = indexes.len() as u32;
        let mut jobs: Vec<HeldJob> = indexes.into_iter().map(|index| self.held_job(now, index)).collect();
        // What it says itself of its jobs leaves no other to be the one to blame.
        let begun = jobs.iter().filter(|job| !job.is_unread).count() as u32 + unbegun;
        jobs.sort_by_key(|job| std::cmp::Reverse(job.ran));
        jobs.truncate(jobs_max);
        Some(PostMortem { slot, pid, killed, was_ready, uptime, served, in_flight, begun, jobs })
    }

    /// Whether a worker has not been heard for so long that it may be hung.
    pub fn is_silent(&self, worker: WorkerId) -> bool {
        self.worker(worker).is_some_and(|worker| worker.silence != Silence::None)
    }

    /// Whether a worker waits to take over a slot.
    pub fn is_spare(&self, worker: WorkerId) -> bool {
        self.worker(worker).is_some_and(Worker::is_ready_spare)
    }

    /// The jobs that a worker has.
    pub fn jobs_of(&self, worker: WorkerId) -> Vec<JobId> {
        let jobs = self.worker(worker).map(|worker| &worker.jobs);
        jobs.into_iter().flatten().map(|&index| self.jobs.id(index)).collect()
    }

    /// A job that a worker has, for a report about its program.
    pub fn held(&mut self, now: Time, id: JobId) -> Option<HeldJob> {
        let index = self.jobs.find(id)?;
        Some(self.held_job(now, index))
    }

    fn held_job(&mut self, now: Time, index: u32) -> HeldJob {
        let id = self.jobs.id(index);
        let job = self.jobs.get(index);
        let (ran, is_unread) = match job.place {
            Place::InFlight { since, is_unread, .. } => (now.since(since), is_unread),
            Place::Entered | Place::Queued | Place::Apart | Place::Ahead { .. } => (Duration::ZERO, false),
        };
        HeldJob { id, ran, attempts: job.attempts, is_unread, digest: job.digest }
    }

    /// The same in brief, without order and without a copy of anything.
    pub fn staff(&self) -> impl Iterator<Item = StaffView> {
        self.workers.iter().flatten().map(|worker| StaffView {
            slot: worker.slot,
            pid: worker.living_pid(),
            state: worker.state_name(),
            is_current: worker.role == Role::Current && !worker.is_spare,
            is_ready_spare: worker.is_ready_spare(),
        })
    }

    /// Its workers, by slot.
    pub fn workers(&self, now: Time) -> Vec<WorkerView> {
        let mut views: Vec<WorkerView> = self
            .workers
            .iter()
            .flatten()
            .map(|worker| {
                let slot = &self.slots[worker.slot as usize];
                WorkerView {
                    id: worker.id,
                    slot: worker.slot,
                    pid: worker.living_pid(),
                    state: worker.state_name(),
                    uptime: now.since(worker.spawned_at),
                    in_flight: worker.jobs.len() as u32,
                    served: worker.served,
                    restarts: slot.restarts,
                    last_exit: slot.last_exit.clone(),
                    is_current: worker.role == Role::Current,
                    is_apart: worker.apart != Apart::No,
                    is_stalled: worker.is_stalled,
                    is_spare: worker.is_kept_spare(),
                }
            })
            .collect();
        views.sort_by_key(|view| (view.slot, view.id.generation));
        views
    }
}
