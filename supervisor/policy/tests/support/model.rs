//! A simple, independent implementation of the rules, without timers, indexes or redundant tables. From the events, the
//! model computes which outcomes, dispatches, kills and starts are allowed or required, and compares them with policy's
//! actions. The model is designed to be simple rather than fast.

mod actions;
mod adaptive;
mod events;
mod prefetch;
mod recovery;
mod recycle;
mod slots;
mod spares;
mod withheld;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::Duration;

use bulkhead_policy::{
    Action, Activity, BreakerState, Bulkhead, Counters, Digest, JobProgress, KillReason, Limits, TenantId,
    Time, WorkerId,
};
use bulkhead_shared::{JobId, Priority, Verdict};

use super::Tag;
use super::coverage::Coverage;
use super::journal::Registry;
use slots::{Slot, SlotState};

/// Minimum time allowed for a worker to send the next part of an oversized result.
const STALL_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(1);
/// Minimum time allowed for a worker to end an overdue job itself while clients are waiting for its other jobs.
const SLOW_END_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(5);

pub(crate) struct Model {
    limits: Limits,
    registry: Registry,
    adaptive: Option<adaptive::Adaptive>,
    /// Number of permits in use before the current event.
    in_use_before_event: usize,
    reserved_before_event: usize,
    /// Highest `max_queue` configured so far. The queue can still be this long, because waiting jobs stay queued when
    /// the limit is lowered.
    max_queue_ever: u32,
    /// Highest number of permits configured so far.
    permits_ever: u32,
    mode: Mode,
    activity: Activity,
    idle_since: Option<Time>,
    now: Time,
    /// All jobs without an outcome, and jobs that have an outcome but that a worker still holds.
    jobs: HashMap<JobId, Job>,
    queue: VecDeque<JobId>,
    /// Suspect jobs, each waiting to run alone in an idle worker.
    suspects: VecDeque<JobId>,
    /// Places withheld from tenants' quotas. Each entry contains the tenant, the slot of the lost worker, and the
    /// latest time at which the place is released.
    withheld: Vec<(TenantId, usize, Time)>,
    poison: recovery::Poison,
    /// Workers, by their indexes in the bulkhead's table.
    workers: BTreeMap<u32, Worker>,
    slots: Vec<Slot>,
    /// Number of consecutive workers that died during their first jobs.
    early_deaths: u32,
    /// Time of the most recent start that was subject to the minimum interval between starts after early deaths.
    last_spaced_start: Option<Time>,
    /// Slots whose workers still have to be replaced by a rolling restart.
    rolling: BTreeSet<u32>,
    /// True after a restart or a program change, until the replacement of a worker fails.
    is_restarting: bool,
    counters: Counters,
    /// Numbers of submitted and of rejected jobs of each tenant.
    tenants: BTreeMap<TenantId, (u64, u64)>,
    newest_generation: u32,
    /// Number of calls to `release_slots`. Used to determine the order in which workers left their slots.
    release_count: u64,
    newest_job: JobId,
    step: Step,
    /// True if the breaker was not closed before the current event, or is not closed after the event.
    is_breaking: bool,
    was_breaking: bool,
    pub(crate) coverage: Coverage,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Open,
    Draining,
    Stopping { by: Time },
}

struct Job {
    tag: u64,
    priority: Priority,
    tenant: TenantId,
    received: Time,
    deadline_at: Time,
    hard_deadline_at: Time,
    /// Two limits on the job's run time. At the first limit, the client gets the outcome. At the second limit, the job
    /// causes its worker to be killed.
    run_limits: [Option<Duration>; 2],
    /// Time of the dispatch.
    since: Time,
    idempotent: bool,
    is_resendable: bool,
    digest: Option<Digest>,
    /// Outcome of the previous attempt, or `None` during the first attempt.
    before: Option<Verdict>,
    is_suspect: bool,
    /// True if the worker died before it could start the job.
    is_unread: bool,
    /// True if the worker's own record is the only evidence that the job was not started.
    is_by_journal: bool,
    attempts: u32,
    /// Number of workers that died before reading this job. These deaths do not count as attempts.
    unread_returns: u32,
    is_answered: bool,
    /// True if the client got the job's outcome while the job was still prefetched, and another job prevented the
    /// recall of this job.
    was_fixed: bool,
    is_overdue: bool,
    /// True if the worker is still sending an oversized result for the job.
    is_oversized: bool,
    /// Time at which the queue timeout expires.
    queue_timeout_at: Option<Time>,
    worker: Option<u32>,
    /// Worker to which the job was prefetched, or `None` if the job is not prefetched.
    prefetched: Option<u32>,
    /// Sequence number of the job among all jobs sent to its worker.
    send_number: u64,
    /// Number of dispatches whose run limit expired before the worker started the job.
    run_limit_expiries: u32,
    recalled_from: Option<WorkerId>,
}

struct Worker {
    id: WorkerId,
    slot: u32,
    /// Last slot that the worker filled.
    charged_slot: u32,
    phase: Phase,
    spawned_at: Time,
    ready_at: Option<Time>,
    last_heard_at: Time,
    has_dispatch_thread: bool,
    can_resize: bool,
    has_journal: bool,
    /// Number of jobs sent to the worker.
    sent: u64,
    /// Prefetched jobs, oldest first.
    prefetched: Vec<JobId>,
    /// True if the worker receives no jobs because it was late in starting a job. The value is copied from the bulkhead
    /// under test.
    is_stalled: bool,
    /// New value of `is_stalled`, which takes effect at the end of this step.
    stalls: bool,
    /// Value of `health.heartbeat` when the worker received its welcome message.
    heartbeat: Duration,
    /// Minimum number of heartbeats that the worker must miss before it counts as hung.
    missed_min: u32,
    /// Time by which the worker must send HELLO.
    hello_by: Time,
    /// True if the worker was started before the last restart or the last program change.
    is_outdated: bool,
    /// True if the worker runs a previous program.
    has_old_program: bool,
    /// Time of the next attempt to replace a worker that runs a previous program. Set after a failed attempt.
    retry_replacement_at: Option<Time>,
    /// Most recent `max_in_flight` sent to the worker.
    sent_max_in_flight: u32,
    /// True if the worker is reserved for a suspect job. The value is copied from the bulkhead under test.
    is_exclusive: bool,
    /// True if the worker had already been killed when another worker took over its slot.
    killed_before_replacement: bool,
    /// Time at which the supervisor began to measure the silent worker's processor time.
    observed_since: Option<Time>,
    /// True once the caller has been asked how much processor time the silent worker used.
    was_checked: bool,
    excused_silences: u32,
    jobs: Vec<JobId>,
    served: u64,
    /// Number of jobs given to the worker.
    begun: u64,
    /// True if the worker has been given all the jobs that `recycle.jobs` allows.
    is_at_job_limit: bool,
    pid: Option<u32>,
    /// True if the worker was started as a successor because the slot's worker was about to reach `recycle.jobs`.
    stands_by: bool,
    killed: Option<KillReason>,
    /// Consequences of the worker's exit, which are stored until its descendants are gone.
    dead: Option<Dead>,
    /// Value of `release_count` when the worker left its slot, or `None` if the worker has not left the slot yet.
    left: Option<u64>,
    /// Earliest time at which the worker can be killed because of its jobs. Set only if the worker was already stuck
    /// before this step.
    killed_at: Option<Time>,
    next_replacement_at: Time,
}

#[derive(Clone, Copy)]
struct Dead {
    lacks_id: bool,
    is_failure: bool,
    is_clean: bool,
    is_early_death: bool,
}

impl Worker {
    /// Returns true if the worker is neither dead nor being killed.
    fn is_alive(&self) -> bool {
        self.killed.is_none() && self.dead.is_none()
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Spawned,
    Initializing { until: Time },
    Ready,
    Draining { idle_since: Option<Time> },
}

/// Details of the current event, and the actions that the event requires.
#[derive(Default)]
struct Step {
    cause: Cause,
    submission: Option<PendingSubmission>,
    /// The accepted job, and the worker that must run the job immediately.
    immediate: Option<(JobId, WorkerId)>,
    /// Outcomes that the bulkhead must send in this step.
    required: BTreeMap<JobId, Verdict>,
    /// True if all workers must be replaced. Workers that are still starting must be killed.
    is_restarted: bool,
    /// True if `recycle.jobs` has changed.
    is_recounted: bool,
    /// True if `max_in_flight` may have changed.
    is_resized: bool,
    /// True if this event attributes the silence of a worker to a busy machine.
    is_excused: bool,
    /// Jobs in `required` that can be retried instead of ending with an outcome. The value is true if the job becomes a
    /// suspect when it is retried.
    retryable: BTreeMap<JobId, bool>,
    /// Payloads that must be reported as quarantined.
    to_quarantine: Vec<Digest>,
    /// Worker that sent a result for a job that it cannot have started.
    sent_invalid_reply: Option<WorkerId>,
    /// A job that is being returned, and the worker that returns it.
    returned: Option<(WorkerId, JobId)>,
    /// Jobs whose outcomes depend on the order in which the bulkhead handles several jobs at once.
    ambiguous: BTreeSet<JobId>,
    /// Workers to notify of a new maximum number of jobs.
    to_resize: BTreeMap<WorkerId, u32>,
    /// Jobs that workers must be asked to cancel.
    to_cancel: BTreeSet<(WorkerId, JobId)>,
    dispatched: Vec<(WorkerId, JobId)>,
    /// Workers from which a job was recalled.
    recalled_from: BTreeSet<WorkerId>,
    /// Workers whose kill is due now because of a recall. The bulkhead can recall jobs after its timers have fired. In
    /// that case, these workers are killed at the next tick.
    kills_at_next_tick: BTreeSet<WorkerId>,
    /// Jobs that are candidates for eviction. One of them must be evicted to make room for the submitted job. Empty if
    /// no eviction is needed.
    evictable: BTreeSet<JobId>,
    /// True if the submitted job can be rejected instead of evicting another job, because several tenants are tied for
    /// the most jobs and the oldest job of one of these tenants has a higher priority.
    may_be_full: bool,
    /// Job in `required` that is rejected to make room for the submitted job.
    shed: Option<JobId>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Cause {
    #[default]
    Other,
    Start,
    Tick,
    Replied(WorkerId),
    CpuTimeChecked(WorkerId),
    Memory(WorkerId),
    ProtocolViolated(WorkerId),
    Stopping(WorkerId),
    Reset,
    Stop,
    Resize,
    /// All workers are replaced. Slots that were in restart backoff can get a worker immediately.
    Replace,
}

struct PendingSubmission {
    tag: u64,
    priority: Priority,
    tenant: TenantId,
    idempotent: bool,
    is_resendable: bool,
    digest: Option<Digest>,
    limit: Duration,
    run_limits: [Option<Duration>; 2],
    rejection: Option<Verdict>,
    /// Worker that must run the job immediately, or `None` if the job must wait. Determined before the bulkhead handles
    /// the submission, because the dispatch can change which worker is reserved for a suspect job.
    immediate_worker: Option<WorkerId>,
}

impl Model {
    pub(crate) fn new(limits: Limits, registry: Registry) -> Self {
        let in_all = limits.processes + limits.start.spares;
        let slots = (0..in_all).map(|slot| Slot::new(slot >= limits.processes)).collect();
        let adaptive = limits.adaptive.clone().map(|numbers| adaptive::Adaptive::new(numbers, Time::ZERO));
        Self {
            adaptive,
            in_use_before_event: 0,
            reserved_before_event: 0,
            max_queue_ever: limits.max_queue,
            permits_ever: limits.processes * limits.max_in_flight,
            limits,
            registry,
            mode: Mode::Open,
            activity: Activity::ScaledToZero,
            idle_since: None,
            now: Time::ZERO,
            jobs: HashMap::new(),
            queue: VecDeque::new(),
            suspects: VecDeque::new(),
            withheld: Vec::new(),
            poison: recovery::Poison::default(),
            workers: BTreeMap::new(),
            slots,
            early_deaths: 0,
            last_spaced_start: None,
            rolling: BTreeSet::new(),
            is_restarting: false,
            counters: Counters::default(),
            tenants: BTreeMap::new(),
            newest_generation: 0,
            release_count: 0,
            newest_job: JobId(0),
            step: Step::default(),
            is_breaking: false,
            was_breaking: false,
            coverage: Coverage::default(),
        }
    }

    /// Checks the actions that the bulkhead returned for the event passed to [`Model::handle_event`].
    pub(crate) fn check_actions(
        &mut self,
        taken: Option<JobId>,
        actions: &[Action<Tag>],
        bulkhead: &mut Bulkhead<Tag>,
    ) {
        let is_breaking = bulkhead.breaker() != BreakerState::Closed;
        self.is_breaking = is_breaking || std::mem::replace(&mut self.was_breaking, is_breaking);
        self.coverage.see(&format!("breaker {}", bulkhead.breaker().name()));
        self.submitted(taken);
        self.record_exclusive_workers(bulkhead, actions);
        self.adapt(actions);
        for action in actions {
            self.action(action);
        }
        self.release_slots();
        self.update_slots();
        self.update_workers();
        let is_tick = self.step.cause == Cause::Tick;
        self.check_prefetched(bulkhead.breaker(), is_tick);
        self.check_idle_since(bulkhead);
        self.release_withheld();
        self.check_requirements();
        self.check_sums(bulkhead);
        self.check_workers(bulkhead);
        self.check_adaptive(bulkhead);
        let next = bulkhead.next_deadline();
        if self.step.cause == Cause::Tick {
            let is_kill_due = !self.step.kills_at_next_tick.is_empty();
            assert!(
                next.is_none_or(|at| at > self.now || is_kill_due),
                "after a tick at {:?}, the next deadline {next:?} is not in the future",
                self.now
            );
        }
        self.coverage.see(&format!("state {}", bulkhead.state().name()));
    }

    /// Checks that no jobs, workers or timers are left after the bulkhead has stopped.
    pub(crate) fn check_end(&self, bulkhead: &Bulkhead<Tag>) {
        assert!(bulkhead.is_stopped());
        assert!(self.workers.is_empty(), "the bulkhead reports that it has stopped, but workers are left");
        assert!(self.jobs.is_empty(), "jobs without an outcome: {:?}", self.jobs.keys());
        assert_eq!(self.counters.submitted, self.counters.outcomes());
        assert_eq!(bulkhead.next_deadline(), None, "no timer must be set after the end");
    }

    // Invariants that hold between two events.

    fn check_requirements(&mut self) {
        let ambiguous = std::mem::take(&mut self.step.ambiguous);
        self.step.required.retain(|id, _| !ambiguous.contains(id));
        let step = &self.step;
        assert!(
            step.sent_invalid_reply.is_none(),
            "{:?} sent an invalid reply and was not killed",
            step.sent_invalid_reply
        );
        assert!(step.submission.is_none(), "the submission was neither accepted nor rejected");
        assert!(step.evictable.is_empty(), "no job was evicted to make room for the accepted job");
        assert!(step.required.is_empty(), "outcomes are missing: {:?}", step.required);
        assert!(
            step.to_cancel.is_empty(),
            "workers were not asked to cancel these jobs: {:?}",
            step.to_cancel
        );
        assert!(step.to_resize.is_empty(), "workers were not sent their new limit: {:?}", step.to_resize);
        assert!(
            step.to_quarantine.is_empty(),
            "quarantined payloads were not reported: {:?}",
            step.to_quarantine
        );
        self.check_suspects();
        self.check_spares();
        self.check_outdated();
        let has_room = self.least_loaded().is_some();
        assert!(self.next_candidates().is_empty() || !has_room, "a job waits although a worker could run it");
        assert!(self.queue.is_empty() || self.live_slots() > 0, "a job waits although no worker will start");
        assert!(
            self.queue.is_empty() || self.mode == Mode::Open,
            "a job waits although the bulkhead is draining"
        );
        self.check_queue_bound();
    }

    /// Checks the length of the queue. Jobs that return to the queue after being in flight can exceed the queue's
    /// limit, because they have already been accepted.
    fn check_queue_bound(&self) {
        let most = (2 * self.max_queue_ever + 2 * self.permits_ever) as usize;
        let waiting = self.queue.len() + self.suspects.len();
        assert!(waiting <= most, "{waiting} jobs are waiting, but the maximum is {most}");
    }

    fn check_sums(&mut self, bulkhead: &mut Bulkhead<Tag>) {
        assert_eq!(bulkhead.counters(), &self.counters);
        for view in bulkhead.tenants(usize::MAX) {
            let counts = self.tenants.get(&bulkhead.tenant(&view.name)).copied().unwrap_or_default();
            assert_eq!((view.submitted, view.rejected), counts, "tenant {}", view.name);
        }
        let counters = bulkhead.counters();
        let held = bulkhead.in_flight() + bulkhead.queued() as u64;
        assert_eq!(counters.submitted, counters.outcomes() + held, "a job was lost, or has two outcomes");
        assert_eq!(bulkhead.queued(), self.queue.len() + self.suspects.len() + self.prefetched_waiting());
        let listed = (0..bulkhead.job_positions()).filter_map(|position| bulkhead.job_at(self.now, position));
        let (running, waiting): (Vec<_>, Vec<_>) =
            listed.map(|view| view.progress).partition(|progress| *progress == JobProgress::Running);
        assert_eq!((running.len() as u64, waiting.len()), (bulkhead.in_flight(), bulkhead.queued()));
        assert_eq!(bulkhead.queue_capacity(), self.queue_capacity());
        let available: Vec<_> = self.workers.values().filter(|w| self.is_available(w)).collect();
        let limit: usize = available.iter().map(|w| self.capacity(w)).sum();
        let able = available.iter().filter(|w| !w.is_exclusive && !w.is_stalled);
        let free: usize = able.map(|w| self.capacity(w).saturating_sub(w.jobs.len())).sum();
        assert_eq!(bulkhead.limit(), self.adaptive_limit(limit) as u64);
        let (in_use, limit_in_all) = self.permits();
        assert_eq!(bulkhead.available(), free.min(limit_in_all.saturating_sub(in_use)) as u64);
        let most = self.limits.processes * self.limits.max_in_flight;
        assert!(limit <= most as usize, "the limit exceeds the number of permits");
        assert_eq!(bulkhead.activity(), self.activity);
        assert_eq!(bulkhead.quarantined(self.now), self.poison.len(self.now, &self.limits));
        let is_replaced =
            |w: &&Worker| !self.is_current(w) && !w.killed_before_replacement && !w.jobs.is_empty();
        if self.workers.values().any(|w| is_replaced(&w)) && !self.next_candidates().is_empty() {
            self.coverage.see("overcommit of a replaced worker");
        }
        for (worker, job) in self.step.dispatched.drain(..) {
            assert!(bulkhead.holds(worker, job), "{job:?} is not in the worker to which it was sent");
            assert_eq!(bulkhead.record_mut(job).map(|tag| tag.0), self.jobs.get(&job).map(|j| j.tag));
        }
    }

    fn check_workers(&mut self, bulkhead: &Bulkhead<Tag>) {
        let views = bulkhead.workers(self.now);
        assert_eq!(views.len(), self.workers.len());
        for view in views {
            let worker = &self.workers[&view.id.place];
            assert_eq!(view.state == "reaping", worker.dead.is_some(), "{:?}", view.id);
            if worker.dead.is_some() {
                self.coverage.see("dead and not reaped");
            }
            let in_flight = worker.jobs.len() as u32;
            let expected = (worker.id, worker.slot, in_flight, worker.served, self.is_current(worker));
            assert_eq!((view.id, view.slot, view.in_flight, view.served, view.is_current), expected);
            assert_eq!(view.is_outdated, worker.is_outdated, "{:?}", view.id);
        }
    }

    // Queries.

    fn live(&self, id: WorkerId) -> Option<&Worker> {
        self.workers.get(&id.place).filter(|worker| worker.id == id && worker.dead.is_none())
    }

    fn live_mut(&mut self, id: WorkerId) -> Option<&mut Worker> {
        self.workers.get_mut(&id.place).filter(|worker| worker.id == id && worker.dead.is_none())
    }

    fn is_stopping(&self) -> bool {
        matches!(self.mode, Mode::Stopping { .. })
    }

    /// Returns the maximum number of concurrent jobs for the worker. The result never exceeds the most recent
    /// maximum sent to the worker.
    fn capacity(&self, worker: &Worker) -> usize {
        let most = self.limits.max_in_flight.min(worker.sent_max_in_flight) as usize;
        most.min(worker.jobs.len() + self.jobs_left(worker))
    }

    fn is_current(&self, worker: &Worker) -> bool {
        matches!(self.slots[worker.slot as usize].state,
            SlotState::Occupied { current, .. } if current == worker.id.place)
    }

    /// Returns true if the worker has jobs but no client is waiting for any of them, or if one of the jobs has exceeded
    /// the bulkhead's own deadline or run limit.
    fn is_stuck(&self, worker: &Worker) -> bool {
        let jobs = || worker.jobs.iter().map(|job| &self.jobs[job]);
        !worker.jobs.is_empty() && (jobs().all(|job| job.is_answered) || jobs().any(|job| job.is_overdue))
    }

    /// Returns true if the worker is sending an oversized result and none of its jobs is overdue.
    fn is_sending(&self, worker: &Worker) -> bool {
        let jobs = || worker.jobs.iter().map(|job| &self.jobs[job]);
        jobs().any(|job| job.is_oversized) && !jobs().any(|job| job.is_overdue)
    }

    /// Returns the time at which a stuck worker will be killed.
    fn killed_at(&self, worker: &Worker) -> Time {
        let at = self.now + self.kill_delay(worker);
        match worker.killed_at {
            Some(known) if self.limits.worker_ends_jobs => known.min(at),
            known => known.unwrap_or(at),
        }
    }

    /// Returns the delay before a stuck worker is killed. While the worker is sending an oversized result, the
    /// delay starts over whenever data arrives.
    fn kill_delay(&self, worker: &Worker) -> std::time::Duration {
        let grace = self.limits.grace;
        let is_wanted = worker.jobs.iter().any(|job| !self.jobs[job].is_answered);
        if self.limits.worker_ends_jobs && is_wanted {
            grace.max(SLOW_END_TIMEOUT)
        } else if self.is_sending(worker) {
            grace.max(STALL_TIMEOUT)
        } else {
            grace
        }
    }

    fn is_available(&self, worker: &Worker) -> bool {
        let is_ready = worker.phase == Phase::Ready && worker.is_alive();
        let is_at_work = self.is_current(worker) && !self.slots[worker.slot as usize].is_spare_slot;
        is_ready && !self.is_stuck(worker) && is_at_work
    }

    /// Returns the workers that can be given another job.
    fn able(&self) -> impl Iterator<Item = &Worker> {
        let has_room = |w: &&Worker| {
            !w.is_exclusive && !w.is_stalled && w.jobs.len() < self.capacity(w) && self.is_available(w)
        };
        let (in_use, limit) = self.permits();
        self.workers.values().filter(has_room).filter(move |_| in_use < limit)
    }

    /// Returns the worker that should receive the next job.
    fn least_loaded(&self) -> Option<WorkerId> {
        self.able().min_by_key(|w| (w.jobs.len(), w.id.place)).map(|w| w.id)
    }

    /// Returns the jobs that can be dispatched next. These are the oldest job of each tenant below its quota, in the
    /// highest priority class that can use a permit.
    fn next_candidates(&self) -> Vec<JobId> {
        let may_go = |id: &&JobId| {
            let job = &self.jobs[*id];
            job.priority >= self.lowest_admitted() && !self.is_at_quota(job.tenant)
        };
        let able: Vec<JobId> = self.queue.iter().filter(may_go).copied().collect();
        let class = able.iter().map(|id| self.jobs[id].priority).max();
        let mut tenants = BTreeSet::new();
        let in_class = able.into_iter().filter(|id| Some(self.jobs[id].priority) == class);
        in_class.filter(|id| tenants.insert(self.jobs[id].tenant)).collect()
    }

    fn is_at_quota(&self, tenant: TenantId) -> bool {
        let of_tenant = |job: &&Job| job.tenant == tenant && job.worker.is_some();
        let in_flight = self.jobs.values().filter(of_tenant).count();
        let taken = in_flight + self.withheld_from(tenant);
        self.limits.tenants.max_in_flight.is_some_and(|most| taken >= most as usize)
    }

    /// Returns the number of permits in use, and the limit.
    fn permits(&self) -> (usize, usize) {
        let available = self.workers.values().filter(|w| self.is_available(w));
        let limit = self.adaptive_limit(available.map(|w| self.capacity(w)).sum());
        ((0..self.slots.len()).map(|slot| self.taken(slot)).sum(), limit)
    }

    /// Returns the number of permits that are in use in one slot and count towards the limit. Jobs in replaced workers
    /// first use the slot's own unused permits, then those of the slot's worker. A job that runs alone uses all permits
    /// of its worker.
    fn taken(&self, slot: usize) -> usize {
        let of_slot = || {
            self.workers.values().filter(|w| w.charged_slot as usize == slot && !w.killed_before_replacement)
        };
        let running: usize = of_slot().map(|w| w.jobs.len()).sum();
        let is_closed = self.slots[slot].state == SlotState::Closed || self.slots[slot].is_spare_slot;
        let own = if is_closed { 0 } else { self.limits.max_in_flight as usize };
        let Some(worker) = of_slot().find(|w| self.is_available(w)) else {
            return running.saturating_sub(own);
        };
        let (jobs, capacity) = (worker.jobs.len(), self.capacity(worker));
        let taken = if worker.is_exclusive { jobs.max(capacity) } else { jobs };
        // The jobs of replaced workers first use the slot's permits that do not count towards the limit.
        taken + (running - jobs).saturating_sub(own - capacity.min(own))
    }

    /// Returns the number of running jobs. Excludes the jobs of workers that had already been killed when other workers
    /// took over their slots.
    fn running(&self) -> usize {
        self.workers.values().filter(|w| !w.killed_before_replacement).map(|w| w.jobs.len()).sum()
    }

    /// Returns true if there are enough permits for a job that runs alone in this worker.
    fn has_permit(&self, worker: &Worker) -> bool {
        let (in_use, limit) = self.permits();
        let own = if worker.is_exclusive { self.capacity(worker) } else { 0 };
        in_use - own < limit
    }

    fn lowest_admitted(&self) -> Priority {
        let (in_use, limit) = self.permits();
        if in_use + self.reserved_permits() < limit { Priority::BestEffort } else { Priority::Critical }
    }

    /// Returns the number of permits reserved for critical jobs.
    fn reserved_permits(&self) -> usize {
        let configured = self.adaptive_limit((self.limits.processes * self.limits.max_in_flight) as usize);
        let reserved_permits = (self.limits.critical_reserve * configured as f64).ceil() as usize;
        reserved_permits.min(self.permits().1.saturating_sub(1))
    }

    fn queue_capacity(&self) -> usize {
        let available = || self.workers.values().filter(|w| self.is_available(w));
        let coming = self.live_slots().saturating_sub(available().count());
        let stalled_permits =
            available().filter(|w| w.stalls).map(|w| self.capacity(w).saturating_sub(w.jobs.len()));
        self.limits.max_queue as usize
            + coming * self.limits.max_in_flight as usize
            + stalled_permits.sum::<usize>()
    }
}

/// Returns true if two verdicts are equal apart from their messages.
fn is_same(one: &Verdict, other: &Verdict) -> bool {
    let plain = |verdict: &Verdict| {
        let mut verdict = verdict.clone();
        match &mut verdict {
            Verdict::Rejected { message, .. } | Verdict::Crashed { message, .. } => message.clear(),
            _ => {}
        }
        verdict
    };
    plain(one) == plain(other)
}
