//! Jobs ahead of their worker: which may be sent, when they are asked back, and what becomes of them.

use bulkhead_policy::{BreakerState, KillReason, Overflow, WorkerId};
use bulkhead_shared::{CrashReason, Executed, JobId, Priority, RejectReason, Verdict};

use super::{Job, Mode, Model, Worker};

/// Jobs ahead of one worker.
const JOBS_MAX: usize = 64;

/// Where a job ahead is.
#[derive(Clone, Copy, Default)]
pub(super) struct Ahead {
    pub(super) worker: Option<u32>,
    is_recalled: bool,
    /// Why it leaves when it is back.
    leaves: Option<RejectReason>,
}

impl Job {
    pub(super) fn is_ahead(&self) -> bool {
        self.ahead.worker.is_some()
    }

    /// Whether it has a place among those that wait.
    pub(super) fn has_place_ahead(&self) -> bool {
        self.is_ahead() && !self.is_answered && self.ahead.leaves.is_none()
    }
}

impl Model {
    /// Jobs that have places in the queue.
    pub(super) fn places_taken(&self) -> usize {
        self.queue.len() + self.jobs.values().filter(|job| job.has_place_ahead()).count()
    }

    pub(super) fn ahead_waiting(&self) -> usize {
        self.jobs.values().filter(|job| job.is_ahead() && !job.is_answered).count()
    }

    pub(super) fn send_ahead(&mut self, id: WorkerId, job: JobId) {
        self.coverage.see("ahead");
        assert!(self.mode == Mode::Open && self.suspects.is_empty() && self.limits.critical_reserve == 0.0);
        assert!(!self.limits.lookahead.is_zero() && !self.is_breaking, "nothing may be ahead now");
        assert_eq!(self.limits.overflow, Overflow::Reject);
        let (in_use, limit) = self.permits();
        assert!(in_use <= limit, "{in_use} run, of {limit} that may");
        let worker = self.live(id).expect("only what lives is sent something");
        let is_full = worker.jobs.len() >= self.capacity(worker);
        assert!(worker.can_look_ahead && !worker.is_apart && self.is_available(worker) && is_full);
        assert!(worker.ahead.len() < JOBS_MAX.min(self.jobs_left(worker)), "too many are ahead");
        let tenant = self.jobs[&job].tenant;
        let is_of_same = |other: &JobId| self.jobs[other].tenant == tenant;
        assert!(
            worker.jobs.iter().chain(&worker.ahead).chain(&self.queue).all(is_of_same),
            "of another tenant"
        );
        let class = self.queue.iter().map(|id| self.jobs[id].priority).max();
        let first = self.queue.iter().find(|id| Some(self.jobs[id].priority) == class);
        assert_eq!(first, Some(&job), "it is not its turn");
        self.queue.retain(|&waiting| waiting != job);
        let entry = self.jobs.get_mut(&job).expect("a job that waits is known");
        assert!(!entry.is_answered && entry.deadline_at > self.now && entry.before.is_none());
        entry.ahead = Ahead { worker: Some(id.place), ..Ahead::default() };
        self.live_mut(id).expect("it is live").ahead.push(job);
    }

    pub(super) fn recall(&mut self, id: WorkerId, job: JobId) {
        self.coverage.see("recalled");
        let worker = self.live(id).expect("only what lives is asked");
        assert!(worker.ahead.contains(&job), "{job:?} is asked back, and is not ahead");
        let entry = self.jobs.get_mut(&job).expect("it is known");
        assert!(!std::mem::replace(&mut entry.ahead.is_recalled, true), "{job:?} is asked back twice");
    }

    /// A worker has answered for one: the oldest ahead of it runs, by our count.
    pub(super) fn begin_ahead(&mut self, id: WorkerId) {
        let now = self.now;
        let Some(worker) = self.live_mut(id) else { return };
        worker.turned_at = now;
        if worker.ahead.is_empty() {
            return;
        }
        let job = worker.ahead.remove(0);
        worker.jobs.push(job);
        let entry = self.jobs.get_mut(&job).expect("it is known");
        entry.ahead = Ahead::default();
        entry.attempts += 1;
        entry.worker = Some(id.place);
        entry.since = now;
        entry.is_overdue = entry.is_overdue && entry.hard_deadline_at <= now;
        if entry.is_answered {
            self.step.to_cancel.insert((id, job));
        }
        self.coverage.see("begun ahead");
        self.begin(id);
    }

    pub(super) fn returned(&mut self, id: WorkerId, job: JobId) {
        let Some(worker) = self.live_mut(id).filter(|worker| worker.can_look_ahead) else {
            self.counters.late_replies += 1;
            return;
        };
        if let Some(at) = worker.ahead.iter().position(|&ahead| ahead == job) {
            self.coverage.see("returned");
            self.live_mut(id).expect("it is live").ahead.remove(at);
            self.settle_returned(job);
        } else if let Some(at) = worker.jobs.iter().position(|&running| running == job)
            && !self.jobs[&job].is_oversized
        {
            self.coverage.see("returned by one that runs it");
            let now = self.now;
            let worker = self.live_mut(id).expect("it is live");
            worker.jobs.swap_remove(at);
            if let super::Phase::Draining { idle_since } = &mut worker.phase
                && worker.jobs.is_empty()
                && worker.ahead.is_empty()
            {
                *idle_since = Some(now);
            }
            let entry = self.jobs.get_mut(&job).expect("it is known");
            entry.attempts -= 1;
            entry.worker = None;
            self.settle_returned(job);
            self.begin_ahead(id);
        } else {
            self.counters.late_replies += 1;
        }
    }

    fn settle_returned(&mut self, id: JobId) {
        let job = self.jobs.get_mut(&id).expect("it is known");
        let leaves = std::mem::take(&mut job.ahead).leaves;
        job.is_overdue = false;
        let is_late = job.deadline_at <= self.now;
        if job.is_answered {
            self.jobs.remove(&id);
            return;
        }
        let verdict = if is_late {
            Verdict::DeadlineQueued
        } else if self.mode != Mode::Open {
            Verdict::rejected(RejectReason::Draining)
        } else if self.live_slots() == 0 {
            Verdict::rejected(RejectReason::Unavailable)
        } else if let Some(reason) = leaves {
            Verdict::rejected(reason)
        } else {
            return self.wait_again(id);
        };
        let verdict = self.told(id, verdict);
        self.step.owed.insert(id, verdict);
    }

    /// Its worker is gone: what was ahead of it was not begun.
    pub(super) fn take_ahead_back(&mut self, place: u32) {
        let Some(worker) = self.workers.get_mut(&place) else { return };
        for job in std::mem::take(&mut worker.ahead).into_iter().rev() {
            self.coverage.see("ahead of one that died");
            self.settle_returned(job);
        }
    }

    /// A client is told of a job ahead, before it is known whether it has begun.
    pub(super) fn cancelled_ahead() -> Verdict {
        Verdict::Cancelled { executed: Executed::Yes }
    }

    /// The newest of the lowest class ahead, if that is below this: it leaves as soon as it is back.
    pub(super) fn may_leave_for(&self, priority: Priority) -> Option<JobId> {
        let stays = self.jobs.iter().filter(|(_, job)| job.has_place_ahead() && job.priority < priority);
        stays.map(|(&id, job)| (job.priority, std::cmp::Reverse(id))).min().map(|(_, id)| id.0)
    }

    pub(super) fn leave_ahead(&mut self, id: JobId, reason: RejectReason) {
        self.coverage.see("leaves when it is back");
        let job = self.jobs.get_mut(&id).expect("it is known");
        job.ahead.leaves.get_or_insert(reason);
    }

    /// What is ahead is asked back as soon as it is not to be there.
    pub(super) fn check_ahead(&self, breaker: BreakerState, is_tick: bool) {
        let is_open = self.mode == Mode::Open && self.suspects.is_empty() && breaker == BreakerState::Closed;
        for worker in self.workers.values().filter(|worker| worker.lives_on()) {
            let kept = |id: &&JobId| !self.jobs[*id].ahead.is_recalled;
            let Some(&first) = worker.ahead.iter().find(kept) else { continue };
            assert!(self.is_available(worker) && !worker.is_apart, "{first:?} is ahead of {:?}", worker.id);
            assert!(is_open || !is_tick, "{first:?} is ahead, and nothing may be");
            let is_slow = worker.turned_at + self.limits.lookahead <= self.now;
            assert!(!is_tick || !is_slow, "{first:?} waits for long");
            for job in worker.ahead.iter().map(|id| &self.jobs[id]) {
                assert!(job.ahead.is_recalled || !job.is_answered && job.ahead.leaves.is_none());
            }
        }
        for worker in self.workers.values() {
            assert!(
                worker.ahead.is_empty() || !worker.jobs.is_empty(),
                "{:?} has nothing to wait for",
                worker.id
            );
        }
    }

    /// An answer for a job that is ahead is a lie.
    pub(super) fn is_too_soon(&mut self, id: WorkerId, job: JobId) -> bool {
        let is_too_soon = self.live(id).is_some_and(|worker| worker.ahead.contains(&job));
        if is_too_soon {
            self.coverage.see("answered too soon");
            self.step.lied = Some(id);
            // It ran, and does not run again.
            self.live_mut(id).expect("it is live").ahead.retain(|&ahead| ahead != job);
            let entry = self.jobs.get_mut(&job).expect("it is known");
            entry.ahead = Ahead::default();
            entry.attempts += 1;
            let reason = CrashReason::Protocol;
            let crash = Verdict::Crashed { reason, status: None, message: String::new() };
            if entry.is_answered {
                self.jobs.remove(&job);
            } else {
                self.step.owed.insert(job, crash);
            }
        }
        is_too_soon
    }

    pub(super) fn may_kill_liar(&self, worker: &Worker, reason: &KillReason) -> bool {
        matches!(reason, KillReason::Protocol(_)) && self.step.lied == Some(worker.id)
    }
}
