//! State machine for one bulkhead, without I/O and without a clock. The data plane passes in events and performs the
//! returned actions. This file handles dispatch, deadlines and cancellation. The submodules handle the other parts,
//! such as [`admission`], [`recovery`] of jobs, [`life`] of workers, [`prefetch`], [`permits`] and [`size`].

mod adapt;
mod admission;
mod handover;
mod life;
mod oversized;
mod permits;
mod prefetch;
mod recovery;
mod recycle;
mod size;
mod spares;
mod view;
mod withheld;

use std::collections::VecDeque;
use std::time::Duration;

use bulkhead_shared::{CrashReason, Executed, Fault, JobId, RejectReason, Verdict};

use crate::adaptive::Adaptive;
use crate::breaker::{Breaker, CallResult, Transition};
use crate::budget::RetryBudget;
use crate::ending::{Ending, RecycleReason};
use crate::jobs::{JobState, Jobs};
use crate::limits::Limits;
use crate::messages::{Action, Event, JobOutcome, OperatorEvent, Reply, WorkerId, rejection};
use crate::poison::Poison;
use crate::queue::Queue;
use crate::restart::RestartSpacing;
use crate::retry_after::RetryAfter;
use crate::tenants::Tenants;
use crate::time::{Time, earlier};
use crate::timers::Timers;
use crate::worker::{Phase, Worker};
use crate::workers::{SlotState, Workers};

use admission::Evictions;
use handover::Handover;
use prefetch::time_to_begin;
use recovery::Suspicion;
use withheld::Withheld;

pub use size::Activity;
pub use view::{
    BulkheadState, Counters, HeldJob, JobProgress, JobView, PostMortem, TenantView, WorkerSummary, WorkerView,
};

/// State machine of a bulkhead. `T` is the type of the caller's record of a job.
pub struct Bulkhead<T> {
    limits: Limits,
    mode: Mode,
    activity: Activity,
    /// Time at which the bulkhead became idle. Tracked only if `idle` is configured.
    idle_since: Option<Time>,
    jobs: Jobs<T>,
    job_timers: Timers,
    workers: Workers,
    queue: Queue,
    /// Suspect jobs that are waiting for an idle worker, oldest first.
    suspects: VecDeque<u32>,
    tenants: Tenants,
    withheld: Vec<Withheld>,
    breaker: Breaker,
    retries: RetryBudget,
    poison: Poison,
    adaptive: Option<Box<Adaptive>>,
    /// Number of prefetched jobs whose clients are still waiting.
    prefetched: usize,
    /// True if all prefetched jobs must be recalled.
    must_recall_all: bool,
    /// Workers that have been marked as late, because they did not start a job in time.
    late_workers: Vec<u32>,
    /// Recalled jobs that must be sent to the same workers again.
    to_resend: Vec<u32>,
    /// Replaced workers that have left their slots but have not exited yet, oldest first.
    exiting: VecDeque<u32>,
    /// Number of permits in use before the current event was applied.
    in_use_before_event: u32,
    /// Number of permits reserved for critical jobs before the current event was applied. Set only if there
    /// is an adaptive limit.
    reserved_before_event: u32,
    spacing: RestartSpacing,
    /// True if a worker or slot has changed since [`Self::fill_from_spares`] last looked for slots that need a spare.
    spares_changed: bool,
    /// Slots whose workers must still be replaced in the current rolling restart, with the reason for the restart.
    rolling: VecDeque<(u32, RecycleReason)>,
    /// Cause of the failure that made the last restart stop early, or `None` if the restart did not fail.
    restart_failure: Option<String>,
    random: u64,
    counters: Counters,
    /// Adaptive `Retry-After` values, indexed by priority code. A value is created when a job of that priority is first
    /// rejected.
    retry_after_values: [Option<Box<RetryAfter>>; 3],
    /// True if queue pressure has been reported and the pressure still persists.
    is_pressure_reported: bool,
    evictions: Evictions,
    handover: Handover,
    last_failure: String,
    /// Actions that result from the current event, collected in the caller's buffer.
    actions: Vec<Action<T>>,
    /// Events that refer to outcomes, and must be reported after these outcomes.
    deferred_events: Vec<OperatorEvent>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Open,
    Draining,
    Stopping { by: Time },
}

impl<T> Bulkhead<T> {
    /// Memory used by the table entries of a waiting job, in bytes. Each entry is counted twice, because up to half of
    /// a table can be unused.
    pub const JOB_BYTES: usize =
        2 * (size_of::<Option<crate::jobs::Job<T>>>() + Queue::JOB_BYTES + Timers::ENTRY_BYTES);

    /// Creates a bulkhead that has not been started. Two bulkheads with the same seed and the same events make the same
    /// decisions.
    pub fn new(limits: Limits, seed: u64) -> Self {
        let breaker = Breaker::new(limits.breaker.clone());
        let retries = RetryBudget::new(limits.retry.clone());
        let poison = Poison::new(limits.poison.clone());
        let tenants = Tenants::new(&limits.tenants);
        let adaptive = limits.adaptive.clone().map(|limits| Box::new(Adaptive::new(limits, Time::ZERO)));
        let workers = Workers::new(limits.slot_count(), limits.spare_count());
        Self {
            limits,
            mode: Mode::Open,
            activity: Activity::ScaledToZero,
            idle_since: None,
            jobs: Jobs::default(),
            job_timers: Timers::default(),
            workers,
            queue: Queue::default(),
            suspects: VecDeque::new(),
            tenants,
            withheld: Vec::new(),
            adaptive,
            prefetched: 0,
            must_recall_all: false,
            late_workers: Vec::new(),
            to_resend: Vec::new(),
            exiting: VecDeque::new(),
            in_use_before_event: 0,
            reserved_before_event: 0,
            spacing: RestartSpacing::default(),
            spares_changed: false,
            rolling: VecDeque::new(),
            restart_failure: None,
            random: seed,
            breaker,
            retries,
            poison,
            counters: Counters::default(),
            retry_after_values: Default::default(),
            is_pressure_reported: false,
            evictions: Evictions::default(),
            handover: Handover::default(),
            last_failure: String::new(),
            actions: Vec::new(),
            deferred_events: Vec::new(),
        }
    }

    /// Applies an event that occurred at `now` and appends the resulting actions to `out`. If [`Event::Submit`] was
    /// applied and the job was accepted, returns the job's ID.
    pub fn apply(&mut self, now: Time, event: Event<T>, out: &mut Vec<Action<T>>) -> Option<JobId> {
        self.actions = std::mem::take(out);
        let job = self.handle(now, event);
        self.workers.set_timers(&self.limits, self.is_stopping());
        *out = std::mem::take(&mut self.actions);
        #[cfg(debug_assertions)]
        self.workers.check(&self.limits, self.is_stopping());
        job
    }

    #[inline]
    fn handle(&mut self, now: Time, event: Event<T>) -> Option<JobId> {
        self.in_use_before_event = self.workers.totals().in_use;
        if self.adaptive.is_some() {
            self.reserved_before_event = u32::try_from(self.reserved_permits()).unwrap_or(u32::MAX);
        }
        match event {
            Event::Submit(submission) => return self.submit(now, submission),
            Event::Replied { worker, job, reply } => self.replied(now, worker, job, reply),
            Event::JobReturned { worker, job, send_number } => {
                self.job_returned(now, worker, (job, send_number))
            }
            Event::ResultTooLarge { worker, job, failure } => {
                self.result_too_large(now, worker, job, failure)
            }
            Event::Tick => self.tick(now),
            Event::Cancel { job, unless_begun } => self.cancel(now, job, unless_begun),
            Event::MemoryExhausted { job } => self.memory_exhausted(now, job),
            Event::Start => self.start(now),
            Event::Spawned { worker, pid } => self.spawned(now, worker, pid),
            Event::SpawnFailed { worker, message, lacks_id } => {
                self.spawn_failed(now, worker, message, lacks_id);
            }
            Event::Hello { worker, capabilities, journal } => self.hello(now, worker, capabilities, journal),
            Event::StartStatus { worker, text } => self.start_status(now, worker, text),
            Event::ExtendStart { worker, more } => self.extend_start(now, worker, more),
            Event::Ready { worker } => self.worker_ready(now, worker),
            Event::FrameReceived { worker } => {
                self.record_sign_of_life(now, worker);
                self.extend_kill_time(now, worker);
            }
            Event::AliveAt { worker, at } => self.alive_at(now, worker, at),
            Event::ProtocolViolated { worker, message } => self.protocol_violated(now, worker, message),
            Event::Stopping { worker } => self.worker_stopping(now, worker),
            Event::CpuTimeChecked { worker, is_starved } => self.cpu_time_checked(now, worker, is_starved),
            Event::JobUnread { worker, job } => self.job_unread(worker, job),
            Event::JobNotBegun { worker, job } => self.job_not_begun(worker, job),
            Event::Exited { worker, death } => self.exited(now, worker, death),
            Event::Reaped { worker } => self.reaped(now, worker),
            Event::LostWithKeeper { worker } => self.lost_with_keeper(now, worker),
            Event::Memory { worker, rss_bytes } => self.memory(now, worker, rss_bytes),
            Event::SupervisorPaused => self.supervisor_paused(now),
            Event::Restart => self.rolling_restart(now),
            Event::Drain => self.drain(now),
            Event::Resume => self.resume(),
            Event::Reset => self.reset(now),
            Event::ChangeLimits(change) => self.change(now, change),
            Event::Reconfigure(limits) => self.reconfigure(now, *limits),
            Event::ReplaceWorkers => self.replace(now),
            Event::ChangeTenantLimits { tenant, overrides } => {
                self.change_tenant_limits(now, &tenant, overrides)
            }
            Event::ScaleToZero => self.scale_to_zero(now),
            Event::AnnounceStart => self.announce_start(now),
            Event::ForceBreaker { open } => self.force_breaker(now, open),
            Event::Stop { by } => self.stop(now, by),
            Event::CapPermits { most } => self.handover.permits_max = most,
            Event::PredecessorHolds { permits, waiting } => {
                self.handover.predecessor_permits = permits;
                self.handover.predecessor_waiting = waiting;
            }
            Event::Quarantine { digest } => self.poison.quarantine(now, digest),
        }
        self.fill_from_spares(now);
        while self.release_slots(now) {
            self.fill_from_spares(now);
        }
        self.release_withheld(now);
        self.adapt(now);
        self.report_deferred_events();
        let transition = self.breaker.advance(now, self.has_ready_worker());
        self.report_transition(transition);
        // Dispatches waiting jobs, because any event can free a permit or reduce the number of reserved permits.
        self.pump(now);
        // A job recalled by the previous call may have been the last job of a replaced worker.
        while self.release_slots(now) {
            self.fill_from_spares(now);
            self.release_withheld(now);
            self.pump(now);
        }
        self.report_deferred_events();
        self.update_idle_since(now);
        None
    }

    #[inline]
    fn report_deferred_events(&mut self) {
        // This check saves time. Most events defer no reports, and draining even an empty vector has a cost.
        if !self.deferred_events.is_empty() {
            self.actions.extend(self.deferred_events.drain(..).map(Action::Report));
        }
    }

    /// Returns the time at which [`Event::Tick`] is due.
    pub fn next_deadline(&self) -> Option<Time> {
        let stop = match self.mode {
            Mode::Stopping { by } if !self.is_stopped() => Some(by),
            _ => None,
        };
        let breaker = self.breaker.next_deadline(self.has_ready_worker());
        let scale_to_zero = self.scale_to_zero_at();
        let jobs_or_workers = earlier(self.job_timers.next(), self.workers.next_deadline());
        let report =
            self.adaptive.as_deref().and_then(Adaptive::report_due_at).filter(|_| !self.is_stopped());
        let report_or_release = earlier(report, self.next_withheld_release());
        earlier(earlier(jobs_or_workers, breaker), earlier(earlier(scale_to_zero, stop), report_or_release))
    }

    /// Returns the caller's record of a job, or `None` if the client already has the outcome.
    pub fn record_mut(&mut self, job: JobId) -> Option<&mut T> {
        let index = self.jobs.find(job)?;
        self.jobs.get(index).record.as_mut()
    }

    /// Returns true if the job is in the queue. Such a job can be rejected by [`Event::MemoryExhausted`].
    pub fn is_waiting(&self, job: JobId) -> bool {
        let place = self.jobs.find(job).and_then(|index| self.jobs.state(index));
        matches!(place, Some(JobState::Queued | JobState::WaitingSuspect))
    }

    /// Returns true if the job is in flight in the given worker. A prefetched job does not count as in flight.
    pub fn holds(&self, worker: WorkerId, job: JobId) -> bool {
        matches!(self.find_at(worker, job), Some((_, JobState::InFlight { .. })))
    }

    /// Returns the worker to which a job has been dispatched or prefetched.
    pub fn worker_of(&self, job: JobId) -> Option<WorkerId> {
        match self.jobs.state(self.jobs.find(job)?)? {
            JobState::InFlight { worker, .. } | JobState::Prefetched { worker } => {
                self.workers.get(worker).map(|worker| worker.id)
            }
            JobState::Queued | JobState::WaitingSuspect | JobState::Unplaced => None,
        }
    }

    /// Returns the index and the state of a job that is in flight in, or prefetched to, the given worker.
    fn find_at(&self, worker: WorkerId, job: JobId) -> Option<(u32, JobState)> {
        let index = self.jobs.find(job)?;
        let place = self.jobs.state(index)?;
        let (JobState::InFlight { worker: at, .. } | JobState::Prefetched { worker: at }) = place else {
            return None;
        };
        (at == worker.place && self.workers.by_id(worker).is_some()).then_some((index, place))
    }

    /// Returns the current limits.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Returns the next number in the seeded sequence (SplitMix64, Steele et al. 2014).
    fn next_random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    // Dispatch.

    /// Dispatches a job to a worker. Rejects the job if its payload is quarantined or the breaker does not admit it.
    fn try_dispatch(&mut self, now: Time, index: u32, worker: u32) {
        if self.is_quarantined(now, self.jobs.digest(index)) {
            self.send_outcome(now, index, rejection(RejectReason::Quarantined));
            return self.forget(index);
        }
        if self.breaker.is_disabled() {
            return self.dispatch(now, index, worker);
        }
        match self.breaker.claim(now, self.has_ready_worker()) {
            Some((claim, transition)) => {
                self.jobs.get(index).claim = Some(claim);
                self.report_transition(transition);
                self.dispatch(now, index, worker);
            }
            None => {
                self.send_outcome(now, index, rejection(RejectReason::CircuitOpen));
                self.forget(index);
            }
        }
    }

    fn force_breaker(&mut self, now: Time, open: bool) {
        let transition = if open { self.breaker.force_open(now) } else { self.breaker.release(now) };
        self.report_transition(transition);
    }

    fn report_transition(&mut self, transition: Option<Transition>) {
        if let Some(transition) = transition {
            self.actions.push(Action::Report(OperatorEvent::Breaker(transition)));
        }
    }

    fn dispatch(&mut self, now: Time, index: u32, place: u32) {
        let check_at = self.begin_check_at(now);
        let sent = self.assign(now, index, place, |worker| worker.send(check_at));
        let remaining = self.jobs.get(index).answer_by(now).since(now);
        self.sent(index, sent, (remaining, false));
        if self.limits.recycle.jobs.is_some() {
            self.check_job_limit(now, place);
        }
    }

    /// Assigns a job to a worker, and applies a further change to the worker in the same update.
    fn assign<R>(
        &mut self,
        now: Time,
        index: u32,
        place: u32,
        change: impl FnOnce(&mut Worker) -> R,
    ) -> Option<R> {
        let job = self.jobs.get(index);
        let (tenant, is_suspect) = (job.tenant, job.is_suspect);
        let (at, result) = self.workers.edit_jobs(&self.limits, place, |worker| {
            let at = worker.add_job(now, index, tenant, is_suspect);
            (at, change(worker))
        })?;
        job.attempts += 1;
        if !std::mem::replace(&mut job.is_counted, true) {
            self.retries.call(now);
        }
        job.state = JobState::InFlight {
            worker: place,
            index: at,
            since: now,
            is_overdue: false,
            is_unread: false,
            is_oversized: false,
        };
        let due = if job.record.is_some() { job.answer_by(now) } else { job.kill_by(now) };
        self.count_in_flight(tenant, true);
        self.job_timers.set(index, due);
        Some(result)
    }

    // Outcomes.

    /// Sends a job's outcome to the client. A job that a worker is still running stays assigned to that worker.
    fn send_outcome(&mut self, now: Time, index: u32, verdict: Verdict) {
        let job = self.jobs.get(index);
        let Some(record) = job.record.take() else { return };
        let (tenant, priority) = (job.tenant, job.priority);
        let (is_fallback, has_claim) = (job.is_fallback, job.claim.is_some());
        let verdict =
            if job.earlier_attempts.is_some() { self.overall_verdict(index, verdict) } else { verdict };
        if !is_fallback {
            self.count(tenant, &verdict);
        }
        if has_claim {
            self.record_call(now, index, &verdict);
        }
        let job = self.jobs.get(index);
        if let JobState::InFlight { since, .. } = job.state {
            self.record_run_time(now, since, tenant, &verdict);
        }
        let retry_after = self.retry_after(now, &verdict, priority);
        let id = self.jobs.id(index);
        let job = self.jobs.get(index);
        let mut attempts = job.attempts;
        let (mut ran, mut worker_pid) = job
            .earlier_attempts
            .as_ref()
            .map_or((Duration::ZERO, None), |before| (before.ran, before.worker_pid));
        if let JobState::InFlight { worker, .. } | JobState::Prefetched { worker, .. } = job.state {
            worker_pid = self.workers.get(worker).and_then(|worker| worker.pid);
        }
        match job.state {
            JobState::InFlight { since, .. } => ran += now.since(since),
            // A prefetched job gets this verdict only if it was started, so the current attempt counts.
            JobState::Prefetched { .. } => attempts += 1,
            _ => {}
        }
        let is_in_time = retry_after.is_none_or(|wait| wait <= job.deadline_at.since(now));
        let answer = JobOutcome {
            job: Some(id),
            record,
            retryable: is_in_time && verdict.is_retryable(job.idempotent),
            verdict,
            attempts,
            queued: now.since(job.received).saturating_sub(ran),
            ran,
            worker_pid,
            retry_after,
            deadline: job.limit(),
            run_limit: (job.run_limit < Duration::MAX).then_some(job.run_limit),
        };
        self.actions.push(Action::SendOutcome(answer));
    }

    /// Passes the result of a job's call to the breaker. Does nothing for a job that was never dispatched, because such
    /// a job has no claim.
    fn record_call(&mut self, now: Time, index: u32, verdict: &Verdict) {
        let job = self.jobs.get(index);
        let Some(claim) = job.claim.take() else { return };
        let JobState::InFlight { since, .. } = job.state else { return self.breaker.return_claim(claim) };
        let transition = self.breaker.record(now, claim, call_result(verdict), now.since(since));
        self.report_transition(transition);
    }

    fn replied(&mut self, now: Time, worker: WorkerId, job: JobId, reply: Reply) {
        self.record_sign_of_life(now, worker);
        let found = self.find_at(worker, job);
        let Some((index, JobState::InFlight { since, is_oversized: is_answered, .. })) = found else {
            if found.is_some() || self.was_recalled_from(worker, job) {
                self.kill_for_invalid_reply(now, worker, job);
            }
            self.counters.late_replies += 1;
            return;
        };
        self.workers.record_service_time(now.since(since));
        let job = self.jobs.get(index);
        let (send_number, is_wanted) = (job.send_number, job.record.is_some());
        if !is_wanted && !is_answered {
            // The worker has only now finished a job whose client received the outcome earlier, for example at the
            // deadline.
            self.counters.late_replies += 1;
        }
        let verdict = match reply {
            Reply::Ok => Verdict::Ok,
            Reply::Failed(failure) => Verdict::Failed(failure),
            Reply::ProgramCrashed { death, message } => Ending::from(death).verdict(message),
        };
        let is_crash = matches!(verdict, Verdict::Crashed { .. });
        let is_retried = is_crash && self.decide_retry(now, index, &verdict, Suspicion::Program);
        if !is_retried {
            self.send_outcome(now, index, verdict);
        }
        let check_at = now + time_to_begin(self.limits.lookahead, 0);
        self.withdraw(index, |worker| {
            worker.served += 1;
            worker.last_begun = worker.last_begun.max(send_number);
            worker.awaited_jobs -= u32::from(is_wanted);
            worker.record_progress(now, check_at);
        });
        if is_retried {
            self.requeue(index);
        } else {
            self.forget(index);
        }
        self.begin_prefetched(now, worker.place);
        self.update_kill_time(now, worker.place);
        self.limit_exit_time(now, worker.place);
    }

    /// Removes an in-flight job from its worker, and applies a further change to the worker in the same update.
    fn withdraw(&mut self, index: u32, change: impl FnOnce(&mut Worker)) {
        self.job_timers.clear(index);
        let job = self.jobs.get(index);
        let (state, tenant, is_suspect) = (job.state, job.tenant, job.is_suspect);
        job.state = JobState::Unplaced;
        if let JobState::InFlight { worker, index: at, is_overdue, .. } = state {
            let moved = self.edit(worker, |worker| {
                let moved = worker.remove_job(at, is_overdue, is_suspect);
                change(worker);
                moved
            });
            if let Some(Some(moved)) = moved
                && let JobState::InFlight { index, .. } = &mut self.jobs.get(moved).state
            {
                *index = at;
            }
        }
        self.count_in_flight(tenant, false);
    }

    // Deadlines and cancellation.

    fn cancel(&mut self, now: Time, id: JobId, unless_begun: bool) {
        let Some(index) = self.jobs.find(id) else { return };
        // A job that waits for a retry, or whose retry has not started, has already run.
        if unless_begun && self.jobs.get(index).earlier_attempts.is_some() {
            return;
        }
        let unbegun = Verdict::Cancelled { executed: Executed::No };
        if self.recall_job(now, index, Some(unbegun)) {
            return;
        }
        let place = self.jobs.get(index).state;
        match place {
            JobState::Queued | JobState::WaitingSuspect => {
                self.leave_queue(now, index, Verdict::Cancelled { executed: Executed::No });
            }
            _ if unless_begun => {}
            JobState::InFlight { since, .. } if self.jobs.get(index).record.is_some() => {
                let kill_by = self.jobs.get(index).kill_by(since);
                self.abandon(now, index, Verdict::Cancelled { executed: Executed::Yes });
                self.job_timers.set(index, kill_by);
            }
            JobState::Prefetched { .. } if self.jobs.get(index).record.is_some() => {
                self.abandon_prefetched(now, index, Verdict::Cancelled { executed: Executed::Yes });
            }
            JobState::InFlight { .. } | JobState::Prefetched { .. } | JobState::Unplaced => {}
        }
    }

    fn memory_exhausted(&mut self, now: Time, id: JobId) {
        if self.is_waiting(id)
            && let Some(index) = self.jobs.find(id)
        {
            let message =
                "the memory for waiting jobs (max_buffered) is full, and this job's user, connection \
                           or bulkhead holds more than an equal share"
                    .to_owned();
            self.leave_queue(now, index, Verdict::Rejected { reason: RejectReason::Overloaded, message });
        }
    }

    /// Sends the client the outcome of an in-flight job and tells the worker to cancel the job. The job keeps its
    /// permit.
    fn abandon(&mut self, now: Time, index: u32, verdict: Verdict) {
        self.send_outcome(now, index, verdict);
        let JobState::InFlight { worker: place, .. } = self.jobs.get(index).state else { return };
        let job = self.jobs.id(index);
        let worker = self.edit(place, |worker| {
            worker.awaited_jobs -= 1;
            worker.id
        });
        self.actions.extend(worker.map(|worker| Action::Cancel { worker, job }));
        self.update_kill_time(now, place);
    }

    fn job_timer_due(&mut self, now: Time, index: u32) {
        let job = self.jobs.get(index);
        let deadline_at = job.deadline_at;
        let unbegun = match job.state {
            JobState::Prefetched { .. } if deadline_at > now => Some(rejection(RejectReason::QueueTimeout)),
            // The run limit expired before the worker started the job. The job is recalled, and the run limit starts
            // again at the next dispatch.
            _ if deadline_at > now && job.is_resendable => None,
            _ => Some(Verdict::DeadlineQueued),
        };
        if self.recall_job(now, index, unbegun) {
            return;
        }
        let job = self.jobs.get(index);
        match job.state {
            JobState::Queued | JobState::WaitingSuspect => {
                let verdict = if deadline_at <= now {
                    Verdict::DeadlineQueued
                } else {
                    rejection(RejectReason::QueueTimeout)
                };
                self.leave_queue(now, index, verdict);
            }
            JobState::InFlight { worker, since, .. } => {
                let kill_by = job.kill_by(since);
                if job.record.is_some() {
                    self.abandon(now, index, Verdict::DeadlineRunning);
                }
                if kill_by > now {
                    self.job_timers.set(index, kill_by);
                } else {
                    self.mark_overdue(now, index, worker);
                    self.update_kill_time(now, worker);
                }
            }
            JobState::Prefetched { .. } if deadline_at <= now => {
                self.abandon_prefetched(now, index, Verdict::DeadlineRunning);
            }
            JobState::Prefetched { .. } => self.job_timers.set(index, deadline_at),
            JobState::Unplaced => {}
        }
    }

    fn mark_overdue(&mut self, now: Time, index: u32, place: u32) {
        let kill_at = now + self.limits.grace;
        if let JobState::InFlight { is_overdue, .. } = &mut self.jobs.get(index).state
            && !std::mem::replace(is_overdue, true)
        {
            self.edit(place, |worker| {
                if worker.overdue_jobs == 0 {
                    worker.kill_at = worker.kill_at.map(|at| at.min(kill_at));
                }
                worker.overdue_jobs += 1;
            });
        }
    }

    /// Updates the time at which a worker will be killed because of its jobs. A worker is killed after the `grace`
    /// period if no client is waiting for any of its jobs, or if a job has exceeded the bulkhead's own deadline or run
    /// limit. A client can therefore end its own job early, but not the jobs of other clients. A worker that [ends each
    /// job itself](Self::kill_delay) has more time while clients are waiting for its other jobs. Until it is killed,
    /// the worker gets no new jobs. While the worker is sending an oversized result, the `grace` period restarts
    /// [whenever data arrives](Self::extend_kill_time).
    pub(super) fn update_kill_time(&mut self, now: Time, place: u32) {
        let Some(worker) = self.workers.get(place) else { return };
        if !matches!(worker.phase, Phase::Ready | Phase::Draining) {
            return;
        }
        let kill_at = if !worker.is_stuck() {
            // An idle worker that is being drained keeps its exit timeout.
            worker.kill_at.filter(|_| !worker.is_ready() && worker.jobs.is_empty())
        } else if worker.kill_at.is_none() || self.limits.worker_ends_jobs {
            // The time until the kill may now be shorter, because no client is waiting for the worker's jobs any
            // longer.
            earlier(worker.kill_at, Some(now + self.kill_delay(place)))
        } else {
            worker.kill_at
        };
        if kill_at != worker.kill_at {
            self.edit(place, |worker| worker.kill_at = kill_at);
        }
    }

    fn tick(&mut self, now: Time) {
        if self.scale_to_zero_at().is_some_and(|at| at <= now) {
            self.scale_to_zero(now);
        }
        while let Some(index) = self.job_timers.pop_due(now) {
            self.job_timer_due(now, index);
        }
        while let Some(place) = self.workers.pop_due(&self.limits, self.is_stopping(), now) {
            self.worker_timer_due(now, place);
        }
        while let Some(slot) = self.workers.pop_due_slot(now) {
            match self.workers.slot(slot).state {
                SlotState::Empty => self.workers.record(slot).saved_state = None,
                // The bulkhead may not have workers yet. `Event::Start` starts the worker.
                _ if self.activity == Activity::StartAnnounced => self.set_slot(slot, SlotState::Awaiting),
                _ => self.spawn(now, slot, None),
            }
        }
        if let Mode::Stopping { by } = self.mode
            && by <= now
        {
            self.kill_all();
        }
    }

    // Workers.

    /// Applies a change to a worker and updates all values derived from the worker's state.
    fn edit<R>(&mut self, place: u32, change: impl FnOnce(&mut Worker) -> R) -> Option<R> {
        self.workers.edit(&self.limits, place, change)
    }

    /// Applies a change that can affect a worker's assignment, and updates all values derived from the worker.
    fn reassign<R>(&mut self, place: u32, change: impl FnOnce(&mut Worker) -> R) -> Option<R> {
        self.workers.reassign(&self.limits, place, change)
    }

    /// Applies a change to a worker and updates all values derived from the worker. Does nothing if the worker has
    /// exited.
    fn edit_by_id<R>(&mut self, id: WorkerId, change: impl FnOnce(&mut Worker) -> R) -> Option<R> {
        self.workers.edit_by_id(&self.limits, id, change)
    }

    /// Applies a change that affects only a worker's timer.
    fn edit_timing<R>(&mut self, place: u32, change: impl FnOnce(&mut Worker) -> R) -> Option<R> {
        self.workers.edit_timing(place, change)
    }

    fn has_ready_worker(&self) -> bool {
        self.workers.totals().ready > 0
    }
}

/// Converts a job's verdict to a result for the circuit breaker.
fn call_result(verdict: &Verdict) -> CallResult {
    match verdict {
        Verdict::Ok => CallResult::Success,
        Verdict::Failed(failure) if failure.fault == Fault::Dependency => CallResult::Failure,
        Verdict::DeadlineRunning => CallResult::Failure,
        // The worker was crashed by another job, or was stopped by the supervisor.
        Verdict::Crashed { reason: CrashReason::Collateral | CrashReason::Stopped, .. } => {
            CallResult::Ignored
        }
        Verdict::Crashed { .. } => CallResult::Failure,
        Verdict::Failed(_)
        | Verdict::Cancelled { .. }
        | Verdict::DeadlineQueued
        | Verdict::Rejected { .. } => CallResult::Ignored,
    }
}
