//! Decides whether a new job runs immediately, waits, or is rejected. Also dispatches waiting jobs when workers have
//! free permits. `queue` orders the waiting jobs, and `prefetch` sends jobs to busy workers.
//!
//! The checks run in the order of the table in `docs/semantics.md`. The rate limit comes before the checks that depend
//! on load. A client that exceeds its rate therefore gets the `rate_limited` reason even under load. The rate limit is
//! also the only check that charges a job even if a later check rejects the job.

use std::sync::Arc;
use std::time::Duration;

use bulkhead_shared::{JobId, Priority, RejectReason, Verdict};

use super::{Activity, Bulkhead, Mode};
use crate::breaker::Admission;
use crate::jobs::JobState;
use crate::limits::Overflow;
use crate::messages::{Action, JobOutcome, OperatorEvent, Submission, rejection};
use crate::rate::{Excess, RateLimit, RatePer};
use crate::tenants::TenantId;
use crate::time::{Time, earlier};
use crate::workers::SlotState;

/// Minimum interval between throttling reports about the same tenant. The same interval applies between eviction
/// reports.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

struct Rejection {
    verdict: Verdict,
    /// Time that the client should wait before retrying.
    wait: Wait,
}

#[derive(Clone, Copy)]
enum Wait {
    ByReason,
    RetryIn(Duration),
    Never,
}

impl From<Verdict> for Rejection {
    fn from(verdict: Verdict) -> Self {
        Self { verdict, wait: Wait::ByReason }
    }
}

impl From<RejectReason> for Rejection {
    fn from(reason: RejectReason) -> Self {
        rejection(reason).into()
    }
}

fn rejected_with(reason: RejectReason, message: String) -> Rejection {
    Verdict::Rejected { reason, message }.into()
}

/// Formats a duration in seconds, minutes or hours, rounded up.
fn rounded_up(duration: Duration) -> String {
    match duration.as_secs_f64().ceil() as u64 {
        seconds @ ..=120 => format!("{seconds} s"),
        seconds @ ..=7200 => format!("{} min", seconds.div_ceil(60)),
        seconds => format!("{} h", seconds.div_ceil(3600)),
    }
}

impl<T> Bulkhead<T> {
    /// Returns the ID of the named tenant, for use in the next submission. Adds the tenant to the table if necessary.
    pub fn tenant(&mut self, name: &str) -> TenantId {
        self.tenants.find_or_add(name)
    }

    /// Returns the index of a tenant in [`crate::TenantLimits::labelled`]. If the list does not contain the tenant,
    /// returns the length of the list.
    pub fn label(&mut self, tenant: TenantId) -> usize {
        self.tenants.get(tenant).label as usize
    }

    pub(super) fn submit(&mut self, now: Time, submission: Submission<T>) -> Option<JobId> {
        let most = if submission.is_fallback { Duration::MAX } else { self.limits.deadline_max };
        let limit = submission.deadline.map_or(self.limits.deadline, |asked| asked.min(most));
        if !submission.is_fallback {
            self.counters.submitted += 1;
            self.tenants.get(submission.tenant).submitted += 1;
        }
        let worker = match self.admit(now, &submission, limit) {
            Ok(worker) => worker,
            Err(rejection) => {
                self.reject(now, submission, rejection, limit);
                return None;
            }
        };
        let (tenant, priority) = (submission.tenant, submission.priority);
        let index = self.jobs.insert(now, submission, limit, &self.limits);
        self.idle_since = None;
        self.tenants.add_job(tenant);
        let id = self.jobs.id(index);
        match worker {
            Some(worker) => {
                self.try_dispatch(now, index, worker);
                if self.limits.recycle.jobs.is_some() {
                    // If the worker has just received its last job, a standby takes over the slot and can run waiting
                    // jobs.
                    self.pump(now);
                }
            }
            None => {
                self.enqueue(index);
                self.recall_lower_priority(now, priority);
                self.pump(now);
            }
        }
        Some(id)
    }

    /// Decides whether a job is accepted. Returns the worker that can run the job immediately, or `None` if the job
    /// must wait.
    fn admit(
        &mut self,
        now: Time,
        submission: &Submission<T>,
        limit: Duration,
    ) -> Result<Option<u32>, Rejection> {
        if self.mode != Mode::Open {
            return Err(RejectReason::Draining.into());
        }
        if limit.is_zero() {
            return Err(Verdict::DeadlineQueued.into());
        }
        if self.is_quarantined(now, submission.digest) {
            return Err(rejected_with(RejectReason::Quarantined, self.quarantine_message()));
        }
        self.check_breaker(now)?;
        if !submission.is_fallback {
            self.charge(now, submission)?;
        }
        if self.limits.max_in_flight == 0 {
            return Err(RejectReason::QueueFull.into());
        }
        if self.workers.totals().live_slots == 0 {
            return Err(rejected_with(RejectReason::Unavailable, self.no_worker_message()));
        }
        if self.jobs.is_full() {
            return Err(RejectReason::Overloaded.into());
        }
        let has_share = !self.is_at_quota(submission.tenant);
        if has_share
            && submission.priority >= self.lowest_admitted()
            && let Some(worker) = self.next_worker_for(submission.preferred_worker)
        {
            // Waiting jobs are not overtaken. A waiting job that could use the free permit would already have been
            // dispatched.
            return Ok(Some(worker));
        }
        self.check_tenant_queue(submission.tenant, has_share)?;
        self.check_next_start(now, limit)?;
        self.make_room(now, submission.priority)?;
        Ok(None)
    }

    /// Returns the message for a quarantined job. The message mentions no command, because an embedded supervisor has
    /// no admin API.
    fn quarantine_message(&self) -> String {
        let limits = self.limits.poison.as_ref();
        let (crashes, within) = limits.map_or((0, Duration::ZERO), |poison| (poison.crashes, poison.within));
        format!(
            "this payload has crashed its worker or program at least {crashes} times while no other job was running \
             there; the quarantine ends {} after the last crash, or when the bulkhead is reset",
            rounded_up(within)
        )
    }

    /// Asks the breaker whether a job can be accepted. Does not change the breaker's state, because probes are assigned
    /// only when jobs are dispatched.
    fn check_breaker(&self, now: Time) -> Result<(), Rejection> {
        // A worker that is about to be started also counts, because the job can then become the probe.
        let has_worker = self.has_ready_worker() || self.activity == Activity::StartAnnounced;
        match self.breaker.peek(now, has_worker).is_admitted() {
            true => Ok(()),
            false => Err(RejectReason::CircuitOpen.into()),
        }
    }

    /// Charges a job's cost against the rate limit. Rejects the job if the limit is exceeded.
    fn charge(&mut self, now: Time, submission: &Submission<T>) -> Result<(), Rejection> {
        let Some((limit, whose)) = self.rate_of(submission.tenant) else { return Ok(()) };
        match self.tenants.get(whose).bucket.take(now, &limit, submission.cost.max(1)) {
            Ok(()) => Ok(()),
            Err(Excess::RetryIn(wait)) => {
                self.report_throttled(now, (limit.per, whose), wait);
                let verdict = rejection(RejectReason::RateLimited);
                Err(Rejection { verdict, wait: Wait::RetryIn(wait) })
            }
            Err(Excess::Never) => {
                let message = format!(
                    "the job costs {}, but rate_limit.burst is {}, so the job can never run: lower the cost, \
                     or raise the burst",
                    submission.cost, limit.burst
                );
                let verdict = Verdict::Rejected { reason: RejectReason::RateLimited, message };
                Err(Rejection { verdict, wait: Wait::Never })
            }
        }
    }

    /// Charges the cost of a job to the rate limit. If the job exceeds the limit, returns the time to wait. Unlike
    /// [`Self::charge`], does not report throttling to operators.
    pub(super) fn take_rate(&mut self, now: Time, tenant: TenantId, cost: u32) -> Option<Duration> {
        let (limit, whose) = self.rate_of(tenant)?;
        match self.tenants.get(whose).bucket.take(now, &limit, cost.max(1)) {
            Ok(()) => None,
            Err(Excess::RetryIn(wait)) => Some(wait),
            Err(Excess::Never) => Some(Duration::MAX),
        }
    }

    /// Returns the rate limit for a tenant's jobs, and the tenant whose token bucket is charged.
    fn rate_of(&mut self, tenant: TenantId) -> Option<(RateLimit, TenantId)> {
        let limit = self.tenants.get(tenant).overrides.rate_limit.or(self.limits.rate_limit)?;
        let whose = match limit.per {
            RatePer::Bulkhead => TenantId::NONE,
            RatePer::Tenant => tenant,
        };
        Some((limit, whose))
    }

    /// Returns the maximum number of jobs that a tenant can have in flight, or `None` if there is no limit.
    pub(super) fn quota(&self, tenant: TenantId) -> Option<u32> {
        self.tenants.look_up(tenant).overrides.max_in_flight.or(self.limits.tenants.max_in_flight)
    }

    /// Returns true if a tenant has used up its quota. Places that are withheld from the tenant count as used.
    pub(super) fn is_at_quota(&self, id: TenantId) -> bool {
        let tenant = self.tenants.look_up(id);
        self.quota(id).is_some_and(|most| tenant.in_flight + tenant.withheld >= most)
    }

    fn check_tenant_queue(&mut self, tenant: TenantId, has_share: bool) -> Result<(), Rejection> {
        let waiting = self.queue.len_of_tenant(tenant.0) + self.tenants.get(tenant).prefetched as usize;
        let most = self.tenants.get(tenant).overrides.max_queue.or(self.limits.tenants.max_queue);
        let is_over = most.is_some_and(|most| waiting >= most as usize);
        // Without a queue, a job cannot wait until another job of the same tenant ends.
        if is_over || !has_share && self.limits.max_queue == 0 {
            let name = self.tenants.name(tenant).escape_debug().to_string();
            let message = match self.tenants.look_up(tenant).withheld {
                0 => format!("tenant '{name}' already uses its full share of this bulkhead"),
                withheld => format!(
                    "tenant '{name}' already uses its full share of this bulkhead; {withheld} places of the \
                     share are withheld until the workers that the tenant's jobs killed have been replaced"
                ),
            };
            return Err(rejected_with(RejectReason::TenantQuota, message));
        }
        Ok(())
    }

    fn check_next_start(&self, now: Time, limit: Duration) -> Result<(), Rejection> {
        let next_start = if self.has_ready_worker() { None } else { self.next_start() };
        if next_start.is_some_and(|at| at > now + limit) {
            let message =
                "no worker is running, and the next start is scheduled after the job's deadline".to_owned();
            return Err(rejected_with(RejectReason::Unavailable, message));
        }
        Ok(())
    }

    /// Makes room in the queue for a job of the given priority, if necessary by rejecting another job.
    fn make_room(&mut self, now: Time, priority: Priority) -> Result<(), Rejection> {
        let (queued, most) = (self.queue.len() + self.prefetched, self.waiting_max());
        if queued < most {
            let is_over_pressure = queued as f64 > self.limits.pressure.reject * most as f64;
            if is_over_pressure && priority != Priority::Critical {
                let message = format!("the queue is {} % full", 100 * queued / most);
                return Err(rejected_with(RejectReason::Backpressure, message));
            }
            return Ok(());
        }
        let mut found = self.victim(priority);
        if found.is_none() && self.prefetched > 0 && priority > Priority::BestEffort {
            self.recall_lower_priority(now, priority);
            found = self.victim(priority);
        }
        let Some((victim, reason)) = found else {
            self.pump(now);
            let message = match self.limits.max_queue {
                0 => "no worker is free, and no queue is configured: set `max_queue` to let jobs wait"
                    .to_owned(),
                _ => String::new(),
            };
            return Err(rejected_with(RejectReason::QueueFull, message));
        };
        let tenant = self.jobs.get(victim).tenant;
        self.leave_queue(now, victim, rejection(reason));
        if reason == RejectReason::Evicted {
            self.report_eviction(now, tenant);
        }
        Ok(())
    }

    /// Selects the job to remove from a full queue in favour of a job of this priority: the newest job of the lowest
    /// class below `priority`. If there is no such job and `overflow` is `"evict-oldest"`, selects the oldest job of
    /// the tenant with the most queued jobs. A job of a higher priority is never selected.
    fn victim(&mut self, priority: Priority) -> Option<(u32, RejectReason)> {
        let below = [Priority::BestEffort, Priority::Normal].into_iter().filter(|&class| class < priority);
        if let Some(shed) = below.map(|class| self.queue.newest(class)).find_map(|newest| newest) {
            return Some((shed, RejectReason::Shed));
        }
        if self.limits.overflow != Overflow::EvictOldest {
            return None;
        }
        let oldest = self.queue.oldest(self.queue.fullest()?)?;
        (self.jobs.get(oldest).priority <= priority).then_some((oldest, RejectReason::Evicted))
    }

    /// Returns the maximum number of waiting jobs. This is `max_queue`, plus the permits of starting workers and the
    /// free permits of stalled workers, minus the number of jobs that are waiting in a predecessor.
    pub(super) fn waiting_max(&self) -> usize {
        let totals = self.workers.totals();
        let coming =
            totals.live_slots.saturating_sub(totals.ready) as usize * self.limits.max_in_flight as usize;
        let queue = self.limits.max_queue.saturating_sub(self.handover.predecessor_waiting);
        queue as usize + coming + totals.stalled_permits as usize
    }

    /// Returns the time at which the first slot's backoff ends and a worker starts. Returns `None` if any slot has a
    /// worker or no slot is in backoff.
    fn next_start(&self) -> Option<Time> {
        let mut next = None;
        for slot in self.workers.slots().iter().filter(|slot| !slot.is_spare_slot) {
            match slot.state {
                SlotState::Backoff { until } => next = Some(next.map_or(until, |n: Time| n.min(until))),
                SlotState::Occupied(_) | SlotState::Awaiting => return None,
                SlotState::Empty | SlotState::Closed | SlotState::Stopped { .. } => {}
            }
        }
        next
    }

    /// Returns the lowest priority class that can use a free permit. Reserved permits are available only to critical
    /// jobs, and other permits to all classes. The last permit is never reserved.
    pub(super) fn lowest_admitted(&self) -> Priority {
        if self.limits.critical_reserve == 0.0 {
            return Priority::BestEffort;
        }
        let is_free = u64::from(self.workers.totals().in_use) + self.reserved_permits() < self.limit();
        if is_free { Priority::BestEffort } else { Priority::Critical }
    }

    /// Returns the number of permits reserved for critical jobs.
    pub(super) fn reserved_permits(&self) -> u64 {
        if self.limits.critical_reserve == 0.0 {
            return 0;
        }
        let configured = u64::from(self.limits.processes) * u64::from(self.limits.max_in_flight);
        let configured = configured.min(self.adaptive_bound());
        let reserved = (self.limits.critical_reserve * configured as f64).ceil() as u64;
        reserved.min(self.limit().saturating_sub(1))
    }

    fn reject(&mut self, now: Time, submission: Submission<T>, rejection: Rejection, limit: Duration) {
        let Rejection { verdict, wait } = rejection;
        if !submission.is_fallback {
            self.count(submission.tenant, &verdict);
        }
        let retry_after = match wait {
            Wait::RetryIn(wait) => Some(wait),
            Wait::Never => None,
            Wait::ByReason => self.retry_after(now, &verdict, submission.priority),
        };
        let run_limit = earlier(submission.run_limit, self.limits.run_limit);
        let is_pointless = matches!(wait, Wait::Never) || retry_after.is_some_and(|wait| wait > limit);
        self.actions.push(Action::SendOutcome(JobOutcome {
            job: None,
            record: submission.record,
            retryable: verdict.is_retryable(submission.idempotent) && !is_pointless,
            verdict,
            attempts: 0,
            queued: Duration::ZERO,
            ran: Duration::ZERO,
            worker_pid: None,
            retry_after,
            deadline: limit,
            run_limit,
        }));
    }

    /// Returns the time that a client should wait after a rejection, or `None` if a retry is pointless. For an open
    /// breaker, the value is the time until the breaker admits probes. For all other rejections, the value is the
    /// estimated time until the queue is empty, but at least the adaptive `Retry-After` of the class. Random jitter of
    /// up to a fifth is added to the estimate, so that clients do not all retry at once.
    #[inline]
    pub(super) fn retry_after(
        &mut self,
        now: Time,
        verdict: &Verdict,
        priority: Priority,
    ) -> Option<Duration> {
        let Verdict::Rejected { reason, .. } = verdict else { return None };
        // The state of the workers is irrelevant until the open time has expired. After that, it is not known when the
        // breaker can admit a job, because a probe needs a ready worker.
        if *reason == RejectReason::CircuitOpen
            && let Admission::Open { retry_after } = self.breaker.peek(now, true)
        {
            return Some(retry_after);
        }
        reason.is_retryable().then(|| self.estimate_retry_after(now, priority))
    }

    #[cold]
    fn estimate_retry_after(&mut self, now: Time, priority: Priority) -> Duration {
        let limit = self
            .workers
            .totals()
            .permits
            .max(u64::from(self.limits.max_in_flight))
            .min(self.adaptive_bound())
            .max(1);
        let waiting = self.queued() as u64 + 1;
        let estimate = Duration::from_nanos(waiting.saturating_mul(self.workers.service_ns()) / limit);
        let retry_after_values =
            self.retry_after_values[usize::from(priority.code())].get_or_insert_default();
        let base = estimate.max(retry_after_values.record(now));
        let jitter = (self.next_random() >> 40) as f64 / (1_u64 << 24) as f64;
        base + base.mul_f64(jitter / 5.0)
    }

    // The queue.

    fn enqueue(&mut self, index: u32) {
        let job = self.jobs.get(index);
        job.state = JobState::Queued;
        self.queue.push(index, job.priority, job.tenant.0, job.cost);
        self.await_turn(index);
    }

    /// Returns a job to the front of its priority class. The tenant is not charged again, because the job was already
    /// dispatched once.
    pub(super) fn enqueue_first(&mut self, index: u32) {
        let job = self.jobs.get(index);
        job.state = JobState::Queued;
        self.queue.push_first(index, job.priority, job.tenant.0);
        self.await_turn(index);
    }

    fn await_turn(&mut self, index: u32) {
        let job = self.jobs.get(index);
        // The queue timeout does not apply to a retry.
        let patience = job.queue_timeout_at.filter(|_| job.earlier_attempts.is_none());
        let due = patience.map_or(job.deadline_at, |at| at.min(job.deadline_at));
        self.job_timers.set(index, due);
    }

    /// Dispatches waiting jobs as long as workers have free permits.
    pub(super) fn pump(&mut self, now: Time) {
        if !self.suspects.is_empty() || self.workers.reserved().is_some() {
            self.dispatch_suspects(now);
        }
        if self.prefetched > 0 {
            self.recall_pending(now);
            // The recall also takes back jobs that hold a permit, so the reserved worker can now be idle.
            if !self.suspects.is_empty() {
                self.dispatch_suspects(now);
            }
        }
        if !self.to_resend.is_empty() {
            self.resend(now);
        }
        if self.queue.len() == 0 && !self.is_pressure_reported && self.late_workers.is_empty() {
            return;
        }
        loop {
            // Recalls the jobs of late workers first, because these jobs arrived before the jobs in the queue.
            let has_taken = !self.late_workers.is_empty() && self.recall_from_late_workers(now);
            if has_taken && !self.suspects.is_empty() {
                self.dispatch_suspects(now);
            }
            while let Some(worker) = self.next_worker()
                && let Some(index) = self.queue.pop(self.lowest_admitted())
            {
                self.jobs.get(index).state = JobState::Unplaced;
                self.job_timers.clear(index);
                if self.jobs.get(index).deadline_at <= now {
                    self.send_outcome(now, index, Verdict::DeadlineQueued);
                    self.forget(index);
                    continue;
                }
                self.try_dispatch(now, index, worker);
            }
            if !has_taken {
                break;
            }
        }
        self.prefetch(now);
        self.report_pressure();
    }

    /// Removes a job from the queue and sends its outcome to the client.
    pub(super) fn leave_queue(&mut self, now: Time, index: u32, verdict: Verdict) {
        match self.jobs.get(index).state {
            JobState::WaitingSuspect => self.suspects.retain(|&suspect| suspect != index),
            _ => self.queue.remove(index),
        }
        self.jobs.get(index).state = JobState::Unplaced;
        self.job_timers.clear(index);
        self.send_outcome(now, index, verdict);
        self.forget(index);
    }

    pub(super) fn reject_queue(&mut self, now: Time, reason: RejectReason, message: &str) {
        self.recall_all(now);
        self.resend(now);
        for index in self.jobs.queued() {
            let verdict = Verdict::Rejected { reason, message: message.to_owned() };
            self.leave_queue(now, index, verdict);
        }
    }

    /// Removes a job from the table, so that its index can be reused.
    pub(super) fn forget(&mut self, index: u32) {
        let tenant = self.jobs.get(index).tenant;
        self.jobs.remove(index);
        self.tenants.remove_job(tenant);
    }

    /// Updates the number of a tenant's jobs in flight. `is_given` is true if a job is dispatched, and false if a job
    /// leaves its worker.
    pub(super) fn count_in_flight(&mut self, tenant: TenantId, is_given: bool) {
        let entry = self.tenants.get(tenant);
        entry.in_flight = if is_given { entry.in_flight + 1 } else { entry.in_flight - 1 };
        if self.quota(tenant).is_some() {
            self.update_tenant_block(tenant);
        }
    }

    /// Blocks a tenant in the queue if the tenant has used up its quota. Otherwise, unblocks the tenant.
    pub(super) fn update_tenant_block(&mut self, tenant: TenantId) {
        match self.is_at_quota(tenant) {
            true => self.queue.block(tenant.0),
            false => self.queue.unblock(tenant.0),
        }
    }

    // Reports to operators.

    /// Reports queue pressure. The next report requires that the queue length first falls below 90 % of the threshold.
    fn report_pressure(&mut self) {
        let capacity = self.limits.max_queue as usize;
        let (queued, warn) =
            ((self.queue.len() + self.prefetched) as f64, self.limits.pressure.warn * capacity as f64);
        if capacity > 0 && queued >= warn && !self.is_pressure_reported {
            self.is_pressure_reported = true;
            let queued = self.queue.len() + self.prefetched;
            self.actions.push(Action::Report(OperatorEvent::QueuePressure { queued, capacity }));
        } else if queued < warn * 0.9 {
            self.is_pressure_reported = false;
        }
    }

    fn report_throttled(&mut self, now: Time, (per, id): (RatePer, TenantId), wait: Duration) {
        let tenant = self.tenants.get(id);
        if tenant.throttled_at.is_some_and(|at| now < at + REPORT_INTERVAL) {
            return;
        }
        tenant.throttled_at = Some(now);
        let tenant = (per == RatePer::Tenant).then(|| self.tenants.name(id).clone());
        self.actions.push(Action::Report(OperatorEvent::TenantThrottled { tenant, retry_after: wait }));
    }

    fn report_eviction(&mut self, now: Time, id: TenantId) {
        let Some((tenant, share)) = self.evictions.record(now, self.tenants.name(id)) else { return };
        self.actions.push(Action::Report(OperatorEvent::TenantEvictions { tenant, share }));
    }
}

/// Names of the tenants whose jobs were evicted most recently.
#[derive(Default)]
pub(super) struct Evictions {
    recent: std::collections::VecDeque<Arc<str>>,
    reported_at: Option<Time>,
}

impl Evictions {
    /// Number of recent evictions that are examined. A tenant is reported only after at least half this many evictions.
    const RECENT: usize = 64;

    /// Records an eviction. If the tenant accounts for more than half of the recent evictions and there was no recent
    /// report, returns the tenant and its share. Returns `None` for a job without a tenant, whose name is empty.
    fn record(&mut self, now: Time, tenant: &Arc<str>) -> Option<(Arc<str>, f64)> {
        if self.recent.len() == Self::RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back(tenant.clone());
        let own = self.recent.iter().filter(|name| *name == tenant).count();
        let is_reported = self.reported_at.is_some_and(|at| now < at + REPORT_INTERVAL);
        if tenant.is_empty()
            || is_reported
            || self.recent.len() < Self::RECENT / 2
            || 2 * own <= self.recent.len()
        {
            return None;
        }
        self.reported_at = Some(now);
        Some((tenant.clone(), own as f64 / self.recent.len() as f64))
    }
}
