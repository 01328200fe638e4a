//! Jobs that are ahead of their worker: they have been sent and are not its turn yet, so that it need not be waited
//! for between two jobs. For everything but the way to the worker they are queued: they hold no permit, and have the
//! places and the patience of those that wait.
//!
//! A worker begins what it was sent in order, and a job only when it has told how the one before ended. So each of its
//! answers lets the oldest job ahead begin, whatever the worker says, and what is still ahead when a worker dies was
//! never begun. What changes its mind about a job ahead asks for it back by [`Action::Recall`]; until the worker has
//! said that it gives it back ([`Event::Returned`](crate::Event::Returned)) or answered it, the job may have begun.

use bulkhead_shared::{CrashReason, JobId, Priority, RejectReason, Verdict};

use super::{Bulkhead, Mode};
use crate::breaker::BreakerState;
use crate::jobs::Place;
use crate::limits::Overflow;
use crate::messages::{Action, KillReason, WorkerId, rejection};
use crate::time::Time;
use crate::workers::{Apart, Worker};

/// Jobs ahead of one worker.
const JOBS_MAX: usize = 64;

/// Their bytes.
const BYTES_MAX: u32 = 64 * 1024;

/// A job that came back so often waits for its turn here.
const RETURNS_MAX: u8 = 3;

/// A job whose time is up sooner than so many times `lookahead` waits here.
const TIME_LEFT: u32 = 2;

impl<T> Bulkhead<T> {
    /// Sends jobs ahead of the workers that have all they may have, as long as those that wait are of the one tenant
    /// that such a worker runs already: so nothing is sent ahead of somebody else's turn.
    pub(super) fn look_ahead(&mut self, now: Time, out: &mut Vec<Action<T>>) {
        if self.room.least().is_none() || self.queue.len() == 0 || !self.may_look_ahead() {
            return;
        }
        let soon = now + self.limits.lookahead * TIME_LEFT;
        while let Some(place) = self.room.least()
            && let Some(index) = self.queue.peek(Priority::BestEffort)
        {
            let job = self.jobs.get(index);
            let due = job.patience_until.map_or(job.deadline_at, |at| at.min(job.deadline_at));
            let (tenant, bytes, deadline_at) = (job.tenant, job.bytes, job.deadline_at);
            let is_fit = due > soon && job.returned < RETURNS_MAX && job.before.is_none();
            let is_kept_out = self.is_quarantined(now, self.jobs.digest(index));
            let lookahead = self.limits.lookahead;
            let Some(worker) = self.workers[place as usize].as_mut() else { return };
            if worker.turned_at + lookahead <= now {
                worker.is_slow = true;
                self.mind_room(place);
                continue;
            }
            let fits = worker.ahead_bytes.saturating_add(bytes) <= BYTES_MAX;
            let is_alone = self.queue.len_of_tenant(tenant.0) == self.queue.len();
            if !is_fit || is_kept_out || !fits || !is_alone || worker.tenant != Some(tenant) {
                return;
            }
            let id = worker.id;
            worker.ahead.push_back(index);
            worker.ahead_bytes += bytes;
            self.queue.pop(Priority::BestEffort);
            self.jobs.get(index).place = Place::Ahead { worker: place, is_recalled: false, leaves: None };
            self.tenants.get(tenant).ahead += 1;
            self.ahead += 1;
            let remaining = deadline_at.since(now);
            out.push(Action::Dispatch { worker: id, job: self.jobs.id(index), remaining, is_ahead: true });
            self.mind_room(place);
            self.arm(place);
        }
    }

    fn may_look_ahead(&self) -> bool {
        // The last permits are not for all, and a breaker that is not closed counts each job.
        !self.limits.lookahead.is_zero()
            && self.mode == Mode::Open
            && self.suspects.is_empty()
            && self.limits.critical_reserve == 0.0
            && self.breaker.state() == BreakerState::Closed
            // Which job is the oldest, and whose are most, is asked of the queue alone.
            && self.limits.overflow == Overflow::Reject
            // While more run than should, each that ends is a permit less.
            && u64::from(self.in_use) <= self.limit()
    }

    /// Brings the table of workers that may have more ahead up to date.
    pub(super) fn mind_room(&mut self, place: u32) {
        let most = self.worth_ahead();
        let Some(worker) = self.workers[place as usize].as_mut() else { return };
        let level = worker.ahead.len();
        let left = worker.jobs_left(&self.limits);
        let has_room = level < most
            && (level as u64) < left
            && worker.served > 0
            && worker.recalled == 0
            && !worker.is_slow;
        let room = (worker.takes_ahead() && has_room).then_some(level as u32);
        if worker.room != room {
            if let Some(level) = std::mem::replace(&mut worker.room, room) {
                self.room.remove(place, level);
            }
            if let Some(level) = room {
                self.room.insert(place, level);
            }
        }
    }

    /// How many jobs are worth `lookahead`, by how long they take.
    fn worth_ahead(&self) -> usize {
        let worth = u64::try_from(self.limits.lookahead.as_nanos()).unwrap_or(u64::MAX);
        usize::try_from(worth / self.service_ns.max(1)).unwrap_or(JOBS_MAX).min(JOBS_MAX)
    }

    /// When it is seen that the worker takes longer than the jobs ahead of it may wait.
    pub(super) fn ahead_due(&self, worker: &Worker) -> Option<Time> {
        let may_wait = !worker.ahead.is_empty() && worker.recalled < worker.ahead.len();
        may_wait.then(|| worker.turned_at + self.limits.lookahead)
    }

    /// What is ahead of a worker that takes longer than was expected is asked back: others may have it.
    pub(super) fn mind_ahead(&mut self, now: Time, place: u32, out: &mut Vec<Action<T>>) {
        let Some(worker) = self.workers[place as usize].as_ref() else { return };
        if self.ahead_due(worker).is_some_and(|at| at <= now) {
            self.recall(place, out);
        }
    }

    // Asking for them back.

    /// Asks for all back that is ahead of a worker, the newest first: so the oldest is the first to wait again.
    pub(super) fn recall(&mut self, place: u32, out: &mut Vec<Action<T>>) {
        let Some(worker) = self.workers[place as usize].as_ref() else { return };
        let ahead: Vec<u32> = worker.ahead.iter().rev().copied().collect();
        ahead.into_iter().for_each(|index| self.recall_one(index, out));
    }

    pub(super) fn recall_all(&mut self, out: &mut Vec<Action<T>>) {
        for place in 0..self.workers.len() as u32 {
            self.recall(place, out);
        }
    }

    /// Those of workers that take no more for now.
    pub(super) fn recall_noted(&mut self, out: &mut Vec<Action<T>>) {
        while let Some(place) = self.to_recall.pop() {
            let takes = |worker: &Worker| worker.is_available() && worker.apart == Apart::No;
            if !self.workers[place as usize].as_ref().is_some_and(takes) {
                self.recall(place, out);
            }
        }
        let recalls_all = std::mem::take(&mut self.recalls_all);
        if self.ahead > 0 && (recalls_all || !self.may_look_ahead()) {
            self.recall_all(out);
        }
    }

    pub(super) fn recall_one(&mut self, index: u32, out: &mut Vec<Action<T>>) {
        let Place::Ahead { worker: place, is_recalled, .. } = &mut self.jobs.get(index).place else { return };
        let place = *place;
        if std::mem::replace(is_recalled, true) {
            return;
        }
        let job = self.jobs.id(index);
        let Some(worker) = self.workers[place as usize].as_mut() else { return };
        worker.recalled += 1;
        out.push(Action::Recall { worker: worker.id, job });
        self.mind_room(place);
    }

    /// A job of this class waits: those of lower classes that are ahead are not to go before it.
    pub(super) fn recall_lower(&mut self, class: Priority, out: &mut Vec<Action<T>>) {
        if self.ahead == 0 || class == Priority::BestEffort {
            return;
        }
        for place in 0..self.workers.len() {
            let Some(worker) = self.workers[place].as_ref() else { continue };
            let ahead: Vec<u32> = worker.ahead.iter().rev().copied().collect();
            let lower = ahead.into_iter().filter(|&index| self.jobs.get(index).priority < class);
            let lower: Vec<u32> = lower.collect();
            lower.into_iter().for_each(|index| self.recall_one(index, out));
        }
    }

    /// A job ahead that makes room for one of a higher class, as soon as it is back: the newest of the lowest class.
    pub(super) fn victim_ahead(&mut self, priority: Priority) -> Option<u32> {
        let mut victim: Option<(Priority, std::cmp::Reverse<JobId>, u32)> = None;
        for place in 0..self.workers.len() {
            let count = self.workers[place].as_ref().map_or(0, |worker| worker.ahead.len());
            for at in 0..count {
                let Some(worker) = self.workers[place].as_ref() else { break };
                let index = worker.ahead[at];
                let id = self.jobs.id(index);
                let job = self.jobs.get(index);
                let stays = job.cargo.is_some() && matches!(job.place, Place::Ahead { leaves: None, .. });
                let entry = (job.priority, std::cmp::Reverse(id), index);
                if stays && job.priority < priority && victim.is_none_or(|found| entry < found) {
                    victim = Some(entry);
                }
            }
        }
        victim.map(|(_, _, index)| index)
    }

    /// A job ahead is to leave for this reason unless it has begun.
    pub(super) fn leave_ahead(&mut self, index: u32, reason: RejectReason, out: &mut Vec<Action<T>>) {
        if let Place::Ahead { leaves, .. } = &mut self.jobs.get(index).place
            && leaves.replace(reason).is_none()
        {
            self.leaving += 1;
        }
        self.recall_one(index, out);
    }

    /// A client is told of a job ahead before it is known whether that has begun.
    pub(super) fn abandon_ahead(
        &mut self,
        now: Time,
        index: u32,
        verdict: Verdict,
        out: &mut Vec<Action<T>>,
    ) {
        self.recall_one(index, out);
        self.answer(now, index, verdict, out);
        self.uncount_waiting(index);
        self.job_timers.clear(index);
    }

    /// A job ahead does not wait any more; its client was told just now, or its worker begins it.
    fn uncount_waiting(&mut self, index: u32) {
        let job = self.jobs.get(index);
        let (tenant, is_leaving) = (job.tenant, matches!(job.place, Place::Ahead { leaves: Some(_), .. }));
        if let Place::Ahead { leaves, .. } = &mut job.place {
            *leaves = None;
        }
        self.ahead -= 1;
        self.leaving -= usize::from(is_leaving);
        self.tenants.get(tenant).ahead -= 1;
    }

    // What becomes of them.

    /// A worker has answered for a job: it begins the oldest that is ahead, or has.
    pub(super) fn begin_ahead(&mut self, now: Time, place: u32, out: &mut Vec<Action<T>>) {
        let Some(worker) = self.workers[place as usize].as_mut() else { return };
        (worker.turned_at, worker.is_slow) = (now, false);
        let Some(index) = worker.ahead.pop_front() else { return };
        let job = self.jobs.get(index);
        let (is_wanted, was_recalled) =
            (job.cargo.is_some(), matches!(job.place, Place::Ahead { is_recalled: true, .. }));
        worker.ahead_bytes -= job.bytes;
        worker.recalled -= usize::from(was_recalled);
        if is_wanted {
            self.uncount_waiting(index);
        }
        let claim = match is_wanted && !self.breaker.is_absent() {
            true => self.breaker.claim(now, self.ready > 0),
            false => None,
        };
        if let Some((claim, transition)) = claim {
            self.jobs.get(index).claim = Some(claim);
            self.note_transition(transition, out);
        }
        self.hand_over(now, index, place);
        if !is_wanted && let Some(worker) = self.workers[place as usize].as_mut() {
            worker.wanted -= 1;
            // Asked back it was, which means nothing to a worker that has begun it.
            out.push(Action::Cancel { worker: worker.id, job: self.jobs.id(index) });
        }
        if self.limits.recycle.jobs.is_some() {
            self.mind_jobs_left(now, place, out);
        }
    }

    /// A worker gives a job back that it has not begun.
    pub(super) fn returned(&mut self, now: Time, id: WorkerId, job: JobId, out: &mut Vec<Action<T>>) {
        self.heard(now, id);
        let found = self.jobs.find(job).filter(|_| self.worker(id).is_some_and(|w| w.can_look_ahead));
        let place = found.map(|index| self.jobs.get(index).place);
        match (found, place) {
            (Some(index), Some(Place::Ahead { worker, .. })) if worker == id.place => {
                self.take_out(index, id.place);
                self.mind_room(id.place);
                self.settle_returned(now, index, out);
            }
            (Some(index), Some(Place::InFlight { worker, since, is_oversized: false, .. }))
                if worker == id.place =>
            {
                // It had its turn by our count, and that came to nothing.
                let entry = self.jobs.get(index);
                let (is_wanted, is_due) = (entry.cargo.is_some(), entry.answer_by(since) <= now);
                if is_due {
                    // As it is to: its time to run was over, be it since a client gave it too little.
                    entry.returned = entry.returned.saturating_sub(1);
                } else if is_wanted && entry.returned >= RETURNS_MAX {
                    // It was sent ahead less often.
                    let message = format!("it gave the job {job} back again and again");
                    return self.kill(id.place, KillReason::Protocol(message), out);
                }
                self.withdraw(index);
                let entry = self.jobs.get(index);
                entry.attempts -= 1;
                let claim = entry.claim.take();
                if let Some(claim) = claim {
                    self.breaker.give_back(claim);
                }
                if let Some(worker) = self.worker_mut(id) {
                    worker.wanted -= u32::from(is_wanted);
                }
                self.settle_returned(now, index, out);
                self.begin_ahead(now, id.place, out);
                self.review(now, id.place);
                self.after_job(now, id.place);
            }
            _ => self.counters.late_replies += 1,
        }
    }

    /// Takes a job ahead out of its worker's hands.
    fn take_out(&mut self, index: u32, place: u32) {
        let job = self.jobs.get(index);
        let (bytes, is_wanted) = (job.bytes, job.cargo.is_some());
        let was_recalled = matches!(job.place, Place::Ahead { is_recalled: true, .. });
        let Some(worker) = self.workers[place as usize].as_mut() else { return };
        if let Some(at) = worker.ahead.iter().rposition(|&ahead| ahead == index) {
            worker.ahead.remove(at);
            worker.ahead_bytes -= bytes;
            worker.recalled -= usize::from(was_recalled);
        }
        // It may have as many more.
        self.refresh(place);
        let leaves = match self.jobs.get(index).place {
            Place::Ahead { leaves, .. } => leaves,
            _ => None,
        };
        if is_wanted {
            self.uncount_waiting(index);
        }
        self.jobs.get(index).leaves = leaves;
    }

    /// A job that was sent and has not begun is here again. Its run limit begins anew.
    fn settle_returned(&mut self, now: Time, index: u32, out: &mut Vec<Action<T>>) {
        self.job_timers.clear(index);
        let job = self.jobs.get(index);
        job.place = Place::Entered;
        job.returned = job.returned.saturating_add(1);
        let leaves = job.leaves.take();
        let verdict = if job.cargo.is_none() {
            return self.forget(index);
        } else if job.deadline_at <= now {
            Verdict::DeadlineQueued
        } else if self.mode != Mode::Open {
            rejection(RejectReason::Draining)
        } else if self.live_slots == 0 {
            Verdict::Rejected { reason: RejectReason::Unavailable, message: self.no_worker() }
        } else if let Some(reason) = leaves {
            rejection(reason)
        } else {
            return self.wait_again(index);
        };
        self.answer(now, index, verdict, out);
        self.forget(index);
    }

    /// A worker is gone: what was ahead of it was not begun.
    pub(super) fn take_ahead_back(&mut self, now: Time, place: u32, out: &mut Vec<Action<T>>) {
        while let Some(index) = self.workers[place as usize].as_ref().and_then(|w| w.ahead.back().copied()) {
            self.take_out(index, place);
            self.settle_returned(now, index, out);
        }
    }

    /// A worker has answered for a job that it was not to begin yet. It ran, and is not given to another.
    pub(super) fn begun_too_soon(
        &mut self,
        now: Time,
        worker: WorkerId,
        job: JobId,
        out: &mut Vec<Action<T>>,
    ) {
        let message =
            format!("it answered the job {job}, which it was not to begin before another had ended");
        if let Some(index) = self.jobs.find(job) {
            self.take_out(index, worker.place);
            self.job_timers.clear(index);
            let entry = self.jobs.get(index);
            (entry.place, entry.leaves) = (Place::Entered, None);
            entry.attempts += 1;
            let reason = KillReason::Protocol(message.clone());
            let (reason, message) = (CrashReason::Protocol, reason.describe());
            self.answer(now, index, Verdict::Crashed { reason, status: None, message }, out);
            self.forget(index);
        }
        self.kill(worker.place, KillReason::Protocol(message), out);
    }
}

impl Worker {
    /// Whether it has all jobs that it may have, and may have more ahead of them: not if it has even more, since then
    /// an answer lets none begin.
    fn takes_ahead(&self) -> bool {
        self.can_look_ahead
            && self.is_available()
            && self.apart == Apart::No
            && !self.jobs.is_empty()
            && self.jobs.len() as u32 == self.permits
    }
}
