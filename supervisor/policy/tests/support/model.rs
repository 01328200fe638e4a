//! The rules, told a second time in the plainest way, without timers, tables or lists that must agree:
//! from the same events it works out who is to be answered what, who may be given a job, killed or
//! started, and it compares. It is slow where the policy is fast, and that is the point.

mod actions;
mod events;
mod slots;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use bulkhead_policy::{
    Action, BreakerState, Bulkhead, Counters, KillReason, Limits, TenantId, Time, WorkerId,
};
use bulkhead_shared::{JobId, Priority, Verdict};

use super::Tag;
use super::coverage::Coverage;
use slots::{Slot, SlotState};

pub(crate) struct Model {
    limits: Limits,
    /// The longest queue that was ever allowed: what waits stays.
    max_queue_ever: u32,
    mode: Mode,
    now: Time,
    /// Jobs that have no answer yet, or that a worker still has.
    jobs: HashMap<JobId, Job>,
    queue: VecDeque<JobId>,
    /// By their place in the policy's table.
    workers: BTreeMap<u32, Worker>,
    slots: Vec<Slot>,
    /// Slots that a rolling restart may still reach.
    rolling: BTreeSet<u32>,
    counters: Counters,
    newest_generation: u32,
    newest_job: JobId,
    step: Step,
    /// Whether the breaker kept jobs out before this event, or does after it.
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
    attempts: u32,
    is_answered: bool,
    is_overdue: bool,
    worker: Option<u32>,
}

struct Worker {
    id: WorkerId,
    slot: u32,
    phase: Phase,
    spawned_at: Time,
    ready_at: Option<Time>,
    heard_at: Time,
    has_dispatch_thread: bool,
    jobs: Vec<JobId>,
    served: u64,
    killed: Option<KillReason>,
    /// Since when it has deserved to be killed for its jobs.
    stuck_since: Option<Time>,
    no_successor_before: Time,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Spawned,
    Initializing { until: Time },
    Ready,
    Draining { idle_since: Option<Time> },
}

/// What one event is about and what has to follow from it.
#[derive(Default)]
struct Step {
    cause: Cause,
    submission: Option<Submitted>,
    /// Answers that are due now.
    owed: BTreeMap<JobId, Verdict>,
    /// Workers that are to be asked to stop work on a job.
    to_cancel: BTreeSet<(WorkerId, JobId)>,
    dispatched: Vec<(WorkerId, JobId)>,
    /// One of these has to make room for the submission, if there are any.
    evictable: BTreeSet<JobId>,
    /// Whether the submission may be refused instead: not every one of the equals may be evicted for it.
    may_be_full: bool,
    /// The one of those owed an answer that makes room for the submission.
    shed: Option<JobId>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Cause {
    #[default]
    Other,
    Start,
    Tick,
    Replied(WorkerId),
    Memory(WorkerId),
    Broke(WorkerId),
    Stopping(WorkerId),
    Reset,
    Stop,
}

struct Submitted {
    tag: u64,
    priority: Priority,
    tenant: TenantId,
    limit: std::time::Duration,
    refusal: Option<Verdict>,
}

impl Model {
    pub(crate) fn new(limits: Limits) -> Self {
        let slots = (0..limits.processes).map(|_| Slot::default()).collect();
        Self {
            max_queue_ever: limits.max_queue,
            limits,
            mode: Mode::Open,
            now: Time::ZERO,
            jobs: HashMap::new(),
            queue: VecDeque::new(),
            workers: BTreeMap::new(),
            slots,
            rolling: BTreeSet::new(),
            counters: Counters::default(),
            newest_generation: 0,
            newest_job: JobId(0),
            step: Step::default(),
            is_breaking: false,
            was_breaking: false,
            coverage: Coverage::default(),
        }
    }

    /// Judges what the policy made of the event that [`Model::happened`] was told of.
    pub(crate) fn judge(
        &mut self,
        taken: Option<JobId>,
        actions: &[Action<Tag>],
        bulkhead: &mut Bulkhead<Tag>,
    ) {
        let is_breaking = bulkhead.breaker() != BreakerState::Closed;
        self.is_breaking = is_breaking || std::mem::replace(&mut self.was_breaking, is_breaking);
        self.coverage.see(&format!("breaker {}", bulkhead.breaker().name()));
        self.submitted(taken);
        for action in actions {
            self.action(action);
        }
        self.settle_slots();
        self.settle_workers();
        self.check_promises();
        self.check_sums(bulkhead);
        self.check_workers(bulkhead);
        let next = bulkhead.next_deadline();
        if self.step.cause == Cause::Tick {
            assert!(next.is_none_or(|at| at > self.now), "after a tick at {:?}, due {next:?}", self.now);
        }
        self.coverage.see(&format!("state {}", bulkhead.state().name()));
    }

    /// Judges the end: it has stopped, and nothing is left.
    pub(crate) fn judge_end(&self, bulkhead: &Bulkhead<Tag>) {
        assert!(bulkhead.is_stopped());
        assert!(self.workers.is_empty(), "it says that it has stopped, and workers are left");
        assert!(self.jobs.is_empty(), "jobs without an answer: {:?}", self.jobs.keys());
        assert_eq!(self.counters.submitted, self.counters.outcomes());
        assert_eq!(bulkhead.next_deadline(), None, "nothing is left to be waited for");
    }

    // What is true between two events.

    fn check_promises(&mut self) {
        let step = &self.step;
        assert!(step.submission.is_none(), "a submission was neither taken nor refused");
        assert!(step.evictable.is_empty(), "nobody made room for the job that was taken");
        assert!(step.owed.is_empty(), "answers are missing: {:?}", step.owed);
        assert!(step.to_cancel.is_empty(), "not asked to stop: {:?}", step.to_cancel);
        let has_room = self.least_loaded().is_some();
        assert!(self.next_ones().is_empty() || !has_room, "a job waits though a worker could take it");
        assert!(self.queue.is_empty() || self.live_slots() > 0, "a job waits for no one");
        assert!(self.queue.is_empty() || self.mode == Mode::Open, "a job waits while draining");
        self.check_queue_bound();
    }

    /// What is taken back from the dead stands beside the queue's own bound: it had been let in before.
    fn check_queue_bound(&self) {
        let start_allowance = self.limits.processes * self.limits.max_in_flight;
        let most = (self.max_queue_ever + start_allowance) as usize;
        let taken_back = self.queue.iter().filter(|job| self.jobs[job].attempts > 0).count();
        let fresh = self.queue.len() - taken_back;
        assert!(fresh <= most, "{fresh} wait, at most {most} may");
        assert!(taken_back <= 2 * self.slots.len(), "{taken_back} were taken back");
    }

    fn check_sums(&mut self, bulkhead: &mut Bulkhead<Tag>) {
        assert_eq!(bulkhead.counters(), &self.counters);
        let counters = bulkhead.counters();
        let held = bulkhead.in_flight() + bulkhead.queued() as u64;
        assert_eq!(counters.submitted, counters.outcomes() + held, "a job was lost, or answered twice");
        assert_eq!(bulkhead.queued(), self.queue.len());
        assert_eq!(bulkhead.queue_capacity(), self.queue_capacity());
        let max = u64::from(self.limits.max_in_flight);
        let available: Vec<_> = self.workers.values().filter(|w| self.is_available(w)).collect();
        let free: u64 = available.iter().map(|w| max - w.jobs.len() as u64).sum();
        assert_eq!(bulkhead.limit(), available.len() as u64 * max);
        assert_eq!(bulkhead.available(), free);
        assert!(bulkhead.limit() <= u64::from(self.limits.processes) * max, "more permits than there are");
        for (worker, job) in self.step.dispatched.drain(..) {
            assert!(bulkhead.holds(worker, job), "{job:?} is not where it was sent");
            assert_eq!(bulkhead.cargo_mut(job).map(|tag| tag.0), self.jobs.get(&job).map(|j| j.tag));
        }
    }

    fn check_workers(&mut self, bulkhead: &Bulkhead<Tag>) {
        let views = bulkhead.workers(self.now);
        assert_eq!(views.len(), self.workers.len());
        for view in views {
            let worker = &self.workers[&view.id.place];
            let in_flight = worker.jobs.len() as u32;
            assert!(in_flight <= self.limits.max_in_flight, "{:?} has too many jobs", view.id);
            let expected = (worker.id, worker.slot, in_flight, worker.served, self.is_current(worker));
            assert_eq!((view.id, view.slot, view.in_flight, view.served, view.is_current), expected);
        }
    }

    // Questions.

    fn live(&self, id: WorkerId) -> Option<&Worker> {
        self.workers.get(&id.place).filter(|worker| worker.id == id)
    }

    fn live_mut(&mut self, id: WorkerId) -> Option<&mut Worker> {
        self.workers.get_mut(&id.place).filter(|worker| worker.id == id)
    }

    fn is_stopping(&self) -> bool {
        matches!(self.mode, Mode::Stopping { .. })
    }

    fn is_current(&self, worker: &Worker) -> bool {
        matches!(self.slots[worker.slot as usize].state,
            SlotState::Held { current, .. } if current == worker.id.place)
    }

    /// Whether nobody waits for anything in it, or something in it has passed the bulkhead's deadline.
    fn is_stuck(&self, worker: &Worker) -> bool {
        let jobs = || worker.jobs.iter().map(|job| &self.jobs[job]);
        !worker.jobs.is_empty() && (jobs().all(|job| job.is_answered) || jobs().any(|job| job.is_overdue))
    }

    fn is_available(&self, worker: &Worker) -> bool {
        worker.phase == Phase::Ready && worker.killed.is_none() && !self.is_stuck(worker)
    }

    /// Which worker is to have the next job.
    fn least_loaded(&self) -> Option<WorkerId> {
        let max = self.limits.max_in_flight as usize;
        let able = self.workers.values().filter(|w| w.jobs.len() < max && self.is_available(w));
        able.min_by_key(|w| (w.jobs.len(), w.id.place)).map(|w| w.id)
    }

    /// The jobs of which one is to be next: of the highest class that waits and gets a permit, the oldest of
    /// each tenant that is below its share.
    fn next_ones(&self) -> Vec<JobId> {
        let may_go = |id: &&JobId| {
            let job = &self.jobs[*id];
            job.priority >= self.lowest_admitted() && !self.is_at_its_share(job.tenant)
        };
        let able: Vec<JobId> = self.queue.iter().filter(may_go).copied().collect();
        let class = able.iter().map(|id| self.jobs[id].priority).max();
        let mut tenants = BTreeSet::new();
        let in_class = able.into_iter().filter(|id| Some(self.jobs[id].priority) == class);
        in_class.filter(|id| tenants.insert(self.jobs[id].tenant)).collect()
    }

    fn is_at_its_share(&self, tenant: TenantId) -> bool {
        let of_tenant = |job: &&Job| job.tenant == tenant && job.worker.is_some();
        let in_flight = self.jobs.values().filter(of_tenant).count();
        self.limits.tenants.max_in_flight.is_some_and(|most| in_flight >= most as usize)
    }

    fn lowest_admitted(&self) -> Priority {
        let available: Vec<_> = self.workers.values().filter(|w| self.is_available(w)).collect();
        let limit = available.len() * self.limits.max_in_flight as usize;
        let in_use: usize = available.iter().map(|w| w.jobs.len()).sum();
        let configured = self.limits.processes * self.limits.max_in_flight;
        let reserve = (self.limits.critical_reserve * f64::from(configured)).ceil() as usize;
        let reserve = reserve.min(limit.saturating_sub(1));
        if in_use + reserve < limit { Priority::BestEffort } else { Priority::Critical }
    }

    fn queue_capacity(&self) -> usize {
        let available = self.workers.values().filter(|w| self.is_available(w)).count();
        let coming = self.live_slots().saturating_sub(available);
        self.limits.max_queue as usize + coming * self.limits.max_in_flight as usize
    }
}

/// Whether two verdicts are the same but for the sentence.
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
