//! Test fixture: a bulkhead with a clock, and a record of its actions.

#![allow(dead_code, reason = "each file of tests needs another part of it")]

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bulkhead_policy::{
    Abilities, Action, Answer, Bulkhead, Claims, Death, Event, KillReason, Limits, Note, Reply, RestartCause,
    Submission, Time, WorkerId,
};
use bulkhead_shared::{JobId, Priority, RejectReason, Verdict};

pub(crate) const MS: Duration = Duration::from_millis(1);
pub(crate) const SECOND: Duration = Duration::from_secs(1);

/// A worker's record of the last job begun.
#[derive(Clone, Debug, Default)]
pub(crate) struct Begun(pub(crate) Arc<AtomicU64>);

impl Claims for Begun {
    fn begun(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn take_back(&self, _: u64) -> u64 {
        self.begun()
    }
}

/// Jobs of a worker: the number sent, and the jobs not begun.
#[derive(Default)]
pub(crate) struct Sent {
    pub(crate) begun: Begun,
    pub(crate) count: u64,
    pub(crate) waiting: VecDeque<(JobId, u64)>,
    /// True if the worker begins no more jobs.
    pub(crate) is_stuck: bool,
}

impl Sent {
    fn begin(&mut self) {
        if !self.is_stuck
            && let Some((_, arrival)) = self.waiting.pop_front()
        {
            self.begun.0.store(arrival, Ordering::Relaxed);
        }
    }
}

/// A bulkhead, its clock, and a record of its actions.
pub(crate) struct Stage {
    pub(crate) bulkhead: Bulkhead<u32>,
    pub(crate) now: Time,
    pub(crate) submitted: u32,
    pub(crate) spawned: Vec<WorkerId>,
    /// Cause of each start in `spawned`; `None` for a first start.
    pub(crate) causes: Vec<Option<RestartCause>>,
    pub(crate) dispatched: Vec<(WorkerId, JobId)>,
    /// All jobs sent, with a permit or prefetched.
    pub(crate) sent: Vec<(WorkerId, JobId)>,
    /// Prefetched jobs, and recalled jobs.
    pub(crate) ahead: Vec<(WorkerId, JobId)>,
    pub(crate) taken_back: Vec<JobId>,
    /// Jobs of each worker that records begun jobs. Such a worker begins jobs with a permit at once.
    pub(crate) claims: BTreeMap<WorkerId, Sent>,
    pub(crate) cancelled: Vec<JobId>,
    pub(crate) drained: Vec<WorkerId>,
    pub(crate) limited: Vec<(WorkerId, u32)>,
    pub(crate) asked: Vec<WorkerId>,
    pub(crate) killed: Vec<(WorkerId, KillReason)>,
    pub(crate) answers: Vec<Answer<u32>>,
    pub(crate) notes: Vec<Note>,
}

impl Stage {
    pub(crate) fn starting(limits: Limits) -> Self {
        let mut stage = Self {
            bulkhead: Bulkhead::new(limits, 1),
            now: Time::ZERO,
            submitted: 0,
            spawned: Vec::new(),
            causes: Vec::new(),
            dispatched: Vec::new(),
            sent: Vec::new(),
            ahead: Vec::new(),
            taken_back: Vec::new(),
            claims: BTreeMap::new(),
            cancelled: Vec::new(),
            drained: Vec::new(),
            limited: Vec::new(),
            asked: Vec::new(),
            killed: Vec::new(),
            answers: Vec::new(),
            notes: Vec::new(),
        };
        stage.apply(Event::Start);
        stage
    }

    pub(crate) fn ready(limits: Limits) -> Self {
        let mut stage = Self::starting(limits);
        for worker in stage.spawned.clone() {
            stage.bring_up(worker);
        }
        stage
    }

    pub(crate) fn apply(&mut self, event: Event<u32>) -> Option<JobId> {
        let mut actions = Vec::new();
        let job = self.bulkhead.apply(self.now, event, &mut actions);
        for action in actions {
            if let Action::Dispatch { worker, job, is_ahead, .. } = action {
                self.sent.push((worker, job));
                if let Some(sent) = self.claims.get_mut(&worker) {
                    sent.count += 1;
                    sent.waiting.push_back((job, sent.count));
                    if !is_ahead {
                        sent.begin();
                    }
                }
            }
            match action {
                Action::Spawn { worker, again, .. } => {
                    self.spawned.push(worker);
                    self.causes.push(again);
                }
                Action::Dispatch { worker, job, is_ahead: true, .. } => self.ahead.push((worker, job)),
                Action::TookBack { worker, job } => {
                    self.taken_back.push(job);
                    if let Some(sent) = self.claims.get_mut(&worker) {
                        sent.waiting.retain(|(waiting, _)| *waiting != job);
                    }
                }
                Action::Dispatch { worker, job, .. } => self.dispatched.push((worker, job)),
                Action::Cancel { job, .. } => self.cancelled.push(job),
                Action::Drain { worker } => self.drained.push(worker),
                Action::Limit { worker, max_in_flight } => self.limited.push((worker, max_in_flight)),
                Action::Kill { worker, reason } => self.killed.push((worker, reason)),
                Action::Watch { .. } => {}
                Action::Look { worker } => self.asked.push(worker),
                Action::Answer(answer) => self.answers.push(answer),
                Action::Note(note) => self.notes.push(note),
            }
        }
        job
    }

    pub(crate) fn bring_up(&mut self, worker: WorkerId) {
        self.bring_up_as(worker, Abilities { can_resize: true, ..Abilities::default() });
    }

    pub(crate) fn bring_up_as(&mut self, worker: WorkerId, can: Abilities) {
        self.apply(Event::Spawned { worker, pid: 100 + worker.generation });
        self.apply(Event::Hello { worker, can, claims: None });
        self.apply(Event::Ready { worker });
    }

    /// Brings up a worker that records the jobs it begins.
    pub(crate) fn bring_up_with_claims(&mut self, worker: WorkerId, can: Abilities) {
        let sent = Sent::default();
        let claims: Box<dyn Claims> = Box::new(sent.begun.clone());
        self.claims.insert(worker, sent);
        self.apply(Event::Spawned { worker, pid: 100 + worker.generation });
        self.apply(Event::Hello { worker, can, claims: Some(claims) });
        self.apply(Event::Ready { worker });
    }

    /// Makes a worker begin no more jobs, or continue.
    pub(crate) fn stick(&mut self, worker: WorkerId, is_stuck: bool) {
        let sent = self.claims.entry(worker).or_default();
        sent.is_stuck = is_stuck;
    }

    /// Lets time pass. Workers that must send heartbeats do so.
    pub(crate) fn wait(&mut self, duration: Duration) {
        let end = self.now + duration;
        while let Some(at) = self.bulkhead.next_deadline().filter(|&at| at <= end) {
            self.now = self.now.max(at);
            for view in self.bulkhead.workers(self.now) {
                self.apply(Event::Heard { worker: view.id });
            }
            self.apply(Event::Tick);
        }
        self.now = end;
    }

    pub(crate) fn submit(&mut self) -> Option<JobId> {
        self.submit_with(None)
    }

    /// Submits a job with a priority and a tenant, which may be rejected.
    pub(crate) fn submit_as(&mut self, priority: Priority, tenant: &str) -> Option<JobId> {
        self.submitted += 1;
        let tenant = self.bulkhead.tenant(tenant);
        self.apply(Event::Submit(Submission { priority, tenant, ..Submission::new(self.submitted) }))
    }

    /// Submits a job that may run twice.
    pub(crate) fn idempotent_job(&mut self) -> JobId {
        self.submitted += 1;
        let submission = Submission { idempotent: true, ..Submission::new(self.submitted) };
        self.apply(Event::Submit(submission)).unwrap_or_else(|| panic!("refused: {:?}", self.answers.last()))
    }

    /// Submits a job with a payload of this digest, which may be rejected.
    pub(crate) fn submit_payload(&mut self, digest: u128) -> Option<JobId> {
        self.submitted += 1;
        let submission = Submission { digest: Some(digest.into()), ..Submission::new(self.submitted) };
        self.apply(Event::Submit(submission))
    }

    /// Returns the reason of the last answer.
    pub(crate) fn last_reason(&self) -> Option<&str> {
        self.answers.last().and_then(|answer| answer.verdict.reason())
    }

    pub(crate) fn submit_with(&mut self, deadline: Option<Duration>) -> Option<JobId> {
        self.submitted += 1;
        let mut submission = Submission::new(self.submitted);
        submission.deadline = deadline;
        self.apply(Event::Submit(submission))
    }

    /// Submits a job whose client asks for this run limit.
    pub(crate) fn job_that_runs_for(&mut self, limit: Duration) -> JobId {
        self.submitted += 1;
        let submission = Submission { run_limit: Some(limit), ..Submission::new(self.submitted) };
        self.apply(Event::Submit(submission)).unwrap_or_else(|| panic!("refused: {:?}", self.answers.last()))
    }

    /// Submits a job that must be accepted.
    pub(crate) fn job(&mut self) -> JobId {
        self.job_with(None)
    }

    pub(crate) fn job_with(&mut self, deadline: Option<Duration>) -> JobId {
        self.submit_with(deadline).unwrap_or_else(|| panic!("refused: {:?}", self.answers.last()))
    }

    pub(crate) fn holder(&self, job: JobId) -> WorkerId {
        let given = self.sent.iter().rev().find(|(_, j)| *j == job);
        given.map_or_else(|| panic!("{job:?} was given to no worker"), |(worker, _)| *worker)
    }

    pub(crate) fn was_given_out(&self, job: JobId) -> bool {
        self.dispatched.iter().any(|(_, j)| *j == job)
    }

    pub(crate) fn reply(&mut self, job: JobId) {
        let worker = self.holder(job);
        // The worker begins its next job when it has sent the answer.
        if let Some(sent) = self.claims.get_mut(&worker) {
            sent.begin();
        }
        self.apply(Event::Replied { worker, job, reply: Reply::Ok });
    }

    /// Submits a job that must be dispatched at once, and answers it.
    pub(crate) fn reply_to_next(&mut self) {
        let job = self.job();
        self.reply(job);
    }

    /// Lets the worker exit without descendants.
    pub(crate) fn die(&mut self, worker: WorkerId, death: Death) {
        self.apply(Event::Exited { worker, death });
        self.apply(Event::Swept { worker });
    }

    pub(crate) fn newest_worker(&self) -> WorkerId {
        *self.spawned.last().unwrap_or_else(|| panic!("no worker was started"))
    }

    pub(crate) fn verdicts(&self, job: JobId) -> Vec<&Verdict> {
        self.answers.iter().filter(|a| a.job == Some(job)).map(|a| &a.verdict).collect()
    }

    pub(crate) fn rejected(&self, reason: RejectReason) -> u64 {
        self.bulkhead.counters().rejected[reason.code() as usize]
    }

    #[track_caller]
    pub(crate) fn expect(&self, job: JobId, name: &str, reason: Option<&str>) {
        let got: Vec<_> = self.verdicts(job).iter().map(|v| (v.name(), v.reason())).collect();
        assert_eq!(got, [(name, reason)]);
    }
}

pub(crate) fn limits(processes: u32, max_in_flight: u32, max_queue: u32) -> Limits {
    Limits { processes, max_in_flight, max_queue, ..Limits::default() }
}
