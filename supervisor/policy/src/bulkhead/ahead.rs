//! Prefetched jobs ("jobs ahead"): sent before their turn, so that the worker does not idle between two jobs.
//! In every other respect these jobs are queued: they hold no permit, count towards the queue's limits, and
//! can exceed the queue timeout.
//!
//! A worker begins jobs in the order of sending, each only after the answer for the previous job. So each
//! answer makes the oldest prefetched job begin, whatever the worker claims. Jobs that are still prefetched
//! when a worker dies have not begun.
//!
//! A job that has not begun, prefetched or with a permit, is recalled without asking the worker
//! ([`Claims`](crate::Claims)). This happens at once to end the job, and after `lookahead` if another worker
//! can begin the job now.

use std::time::Duration;

use bulkhead_shared::{CrashReason, JobId, Priority, RejectReason, Verdict};

use super::{Bulkhead, Mode};
use crate::breaker::BreakerState;
use crate::jobs::Place;
use crate::limits::Overflow;
use crate::messages::{Action, KillReason, WorkerId, rejection};
use crate::time::Time;
use crate::workers::{Apart, Phase, Silence, Worker};

/// Maximum number of prefetched jobs per worker.
const JOBS_MAX: usize = 64;

/// Maximum size of a worker's prefetched jobs, in bytes.
const BYTES_MAX: u32 = 64 * 1024;

/// Number of recalls after which a job is no longer prefetched.
const RETURNS_MAX: u8 = 3;

/// A job is only prefetched if its deadline and queue timeout are more than this multiple of `lookahead`
/// away.
const TIME_LEFT: u32 = 2;

/// Time that a worker has to begin a job, in addition to `lookahead`. On a busy machine a worker may get its processor
/// this late.
const PATIENCE: Duration = Duration::from_millis(2);

/// Maximum number of doublings of the time between two checks, and of the time to begin a recalled job.
const DOUBLINGS_MAX: u8 = 10;

/// The job that causes a recall: its index, and the verdict if the job ends.
pub(super) type Ending = (u32, Option<Verdict>);

impl<T> Bulkhead<T> {
    /// Prefetches jobs to workers that use all their permits. All waiting jobs, and all jobs of the worker,
    /// must belong to the same tenant, so that no other tenant's turn is delayed.
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
            // Without a copy of the payload a job cannot be taken back.
            let can_return = job.returned < RETURNS_MAX && job.is_repeatable;
            let is_fit = due > soon && can_return && job.before.is_none();
            let is_kept_out = self.is_quarantined(now, self.jobs.digest(index));
            let lookahead = self.limits.lookahead;
            let Some(worker) = self.workers[place as usize].as_mut() else { return };
            if worker.turned_at + lookahead <= now {
                self.note_lag(place);
                continue;
            }
            let fits = worker.ahead_bytes.saturating_add(bytes) <= BYTES_MAX;
            let is_alone = self.queue.len_of_tenant(tenant.0) == self.queue.len();
            if !is_fit || is_kept_out || !fits || !is_alone || worker.tenant != Some(tenant) {
                return;
            }
            worker.ahead.push_back(index);
            worker.ahead_bytes += bytes;
            self.queue.pop(Priority::BestEffort);
            self.jobs.get(index).place = Place::Ahead { worker: place };
            self.tenants.get(tenant).ahead += 1;
            self.ahead += 1;
            self.send(now, index, place, (deadline_at.since(now), true), out);
            self.mind_room(place);
        }
    }

    /// Sends a job to a worker, and assigns the next number in the worker's order of jobs.
    pub(super) fn send(
        &mut self,
        now: Time,
        index: u32,
        place: u32,
        (remaining, is_ahead): (Duration, bool),
        out: &mut Vec<Action<T>>,
    ) {
        let Some(worker) = self.workers[place as usize].as_mut() else { return };
        worker.sent += 1;
        let job = self.jobs.get(index);
        job.arrival = worker.sent;
        out.push(Action::Dispatch { worker: worker.id, job: self.jobs.id(index), remaining, is_ahead });
        // With one worker, a recalled job could not run elsewhere.
        if self.live_slots > 1 {
            self.expect_begin(now, place);
        }
    }

    /// Schedules a check for jobs that a worker should have begun.
    pub(super) fn expect_begin(&mut self, now: Time, place: u32) {
        let at = now + patience(self.limits.lookahead, 0);
        if let Some(worker) = self.workers[place as usize].as_mut()
            && worker.claims.is_some()
            && worker.check_at.is_none()
            && worker.may_have_unbegun()
        {
            worker.check_at = Some(at);
            self.worker_timers.set_at_latest(place, at);
        }
    }

    fn may_look_ahead(&self) -> bool {
        // Reserved permits are not for all classes, and a breaker that is not closed must count each job.
        !self.limits.lookahead.is_zero()
            && self.mode == Mode::Open
            && self.suspects.is_empty()
            && self.limits.critical_reserve == 0.0
            && self.breaker.state() == BreakerState::Closed
            // For evictions, the queue must contain all jobs of a tenant, oldest first.
            && self.limits.overflow == Overflow::Reject
            // While too many jobs run, an answer does not free a permit.
            && u64::from(self.in_use) <= self.limit()
    }

    /// Updates the table of workers with free prefetch slots.
    pub(super) fn mind_room(&mut self, place: u32) {
        let most = self.worth_ahead();
        let Some(worker) = self.workers[place as usize].as_mut() else { return };
        let level = worker.ahead.len();
        let left = worker.jobs_left(&self.limits);
        let has_room = level < most && (level as u64) < left && worker.served > 0 && worker.lag == 0;
        let room = (worker.takes_ahead() && has_room).then_some(level as u32);
        self.room.list(place, &mut worker.room, room);
    }

    /// Returns the number of jobs that take about `lookahead` together, by recent run times.
    fn worth_ahead(&self) -> usize {
        let worth = u64::try_from(self.limits.lookahead.as_nanos()).unwrap_or(u64::MAX);
        usize::try_from(worth / self.service_ns.max(1)).unwrap_or(JOBS_MAX).min(JOBS_MAX)
    }

    // Workers that are late to begin a job.

    /// Checks, if due, for jobs that a worker is late to begin.
    pub(super) fn check_begun(&mut self, now: Time, place: u32, out: &mut Vec<Action<T>>) {
        let Some(worker) = self.workers[place as usize].as_mut() else { return };
        if worker.check_at.is_none_or(|at| at > now) {
            return;
        }
        worker.check_at = None;
        let Some(begun) = self.begun(place, None, out) else { return };
        let lookahead = self.limits.lookahead;
        let Some(worker) = self.workers[place as usize].as_ref() else { return };
        let ahead = worker.ahead.back().filter(|&&last| self.jobs.get(last).arrival > begun);
        let ahead_due = ahead.map(|_| worker.turned_at + lookahead);
        let mut held_due = None;
        for &index in &worker.jobs {
            let job = self.jobs.get(index);
            if let Place::InFlight { since, .. } = job.place
                && job.arrival > begun
            {
                held_due = super::earlier(held_due, Some(since + patience(lookahead, job.returned)));
            }
        }
        let is_stuck = held_due.is_some_and(|at| at <= now);
        let is_stalled = is_stuck || worker.is_stalled && begun <= worker.taken;
        let is_late = is_stuck || ahead_due.is_some_and(|at| at <= now);
        if is_late {
            self.note_lag(place);
        }
        let Some(worker) = self.workers[place as usize].as_mut() else { return };
        worker.check_at = match super::earlier(held_due, ahead_due) {
            Some(_) if is_late => Some(now + patience(lookahead, worker.lag)),
            due => due,
        };
        if std::mem::replace(&mut worker.is_stalled, is_stalled) != is_stalled {
            self.refresh(place);
        }
    }

    /// Records that a worker is late to begin jobs, so that other workers can take its jobs over.
    fn note_lag(&mut self, place: u32) {
        let Some(worker) = self.workers[place as usize].as_mut() else { return };
        worker.lag = (worker.lag + 1).min(DOUBLINGS_MAX);
        if !self.lagging.contains(&place) {
            self.lagging.push(place);
        }
        self.mind_room(place);
    }

    /// Recalls the unbegun jobs of one late worker if another worker has a free permit. Returns true if a job
    /// was recalled.
    pub(super) fn take_from_lagging(&mut self, now: Time, out: &mut Vec<Action<T>>) -> bool {
        let Some(next) = self.next_worker().filter(|_| self.mode == Mode::Open) else { return false };
        // A job must not be recalled in the step that sends it, because the worker has not received it yet.
        let is_due = |place: &u32| {
            let worker = self.workers[*place as usize].as_ref();
            *place != next && worker.is_none_or(|worker| worker.turned_at < now)
        };
        let due: Vec<u32> = self.lagging.iter().copied().filter(is_due).collect();
        for place in due {
            self.lagging.retain(|lagging| *lagging != place);
            // A job that must run alone needs an idle worker.
            let is_idle = self.idle_worker().is_some();
            let lags = |worker: &Worker| worker.lag > 0 && (worker.apart != Apart::Taken || is_idle);
            if self.workers[place as usize].as_ref().is_some_and(lags)
                && self.take_back(now, place, None, out)
            {
                return true;
            }
        }
        false
    }

    /// Records a sign of life from a worker. The worker may then get new jobs again.
    pub(super) fn no_longer_stalled(&mut self, place: u32) {
        if let Some(worker) = self.workers[place as usize].as_mut()
            && std::mem::replace(&mut worker.is_stalled, false)
        {
            self.refresh(place);
        }
    }

    // Recall.

    /// Reads the number of the last job that a worker has begun. With `taken_to`, first recalls the jobs up
    /// to this number, which the worker can then no longer begin. Returns `None` if the worker has no record.
    /// If the record is implausible, kills the worker and returns `None`.
    fn begun(&mut self, place: u32, taken_to: Option<u64>, out: &mut Vec<Action<T>>) -> Option<u64> {
        let worker = self.workers[place as usize].as_mut()?;
        let claims = worker.claims.as_ref()?;
        let begun = taken_to.map_or_else(|| claims.begun(), |up_to| claims.take_back(up_to));
        if (worker.begun_last..=worker.sent).contains(&begun) {
            worker.begun_last = begun;
            return Some(begun);
        }
        let message = format!(
            "the journal counts {begun} jobs begun, but {} were sent and {} had begun before",
            worker.sent, worker.begun_last
        );
        worker.claims = None;
        self.kill(place, KillReason::Protocol(message), out);
        None
    }

    /// Recalls all jobs that a worker has not begun. Jobs that do not end wait again, at the front of their
    /// classes. Returns true if at least one job was recalled.
    pub(super) fn take_back(
        &mut self,
        now: Time,
        place: u32,
        ending: Option<Ending>,
        out: &mut Vec<Action<T>>,
    ) -> bool {
        let Some(worker) = self.workers[place as usize].as_ref().filter(|worker| !worker.is_dead()) else {
            return false;
        };
        if !worker.may_have_unbegun() && self.to_send_again.is_empty() {
            return false;
        }
        let Some(begun) = self.begun(place, None, out) else { return false };
        let (id, sent, held) = match self.workers[place as usize].as_ref() {
            Some(worker) if begun < worker.sent => (worker.id, worker.sent, worker.jobs.clone()),
            _ => return false,
        };
        // The supervisor keeps no copy of this job's payload, so no other worker can run the job.
        let is_fixed = |job: &crate::jobs::Job<T>| job.arrival > begun && !job.is_repeatable;
        let end_of = ending.as_ref().map(|(index, _)| *index);
        if held.iter().any(|&index| Some(index) != end_of && is_fixed(self.jobs.get(index))) {
            return false;
        }
        let Some(begun) = self.begun(place, Some(sent), out) else { return false };
        if let Some(worker) = self.workers[place as usize].as_mut() {
            // All jobs sent so far are settled. The next check is for later jobs.
            (worker.taken, worker.check_at) = (sent, None);
        }
        let (mut ending, mut is_any) = (ending, false);
        let is_ready =
            self.workers[place as usize].as_ref().is_some_and(|worker| worker.phase == Phase::Ready);
        let is_let_in = is_ready && self.mode != Mode::Open;
        while let Some(worker) = self.workers[place as usize].as_ref()
            && let Some(&index) = worker.ahead.back()
            && self.jobs.get(index).arrival > begun
        {
            self.take_out(index, place);
            self.settle_unbegun(now, (index, id), &mut ending, out);
            is_any = true;
        }
        let mut held: Vec<_> = held.iter().map(|&index| (self.jobs.get(index).arrival, index)).collect();
        held.sort_unstable();
        for (_, index) in held.into_iter().rev().take_while(|(arrival, _)| *arrival > begun) {
            let is_wanted = self.jobs.get(index).cargo.is_some();
            if is_let_in && is_wanted && end_of != Some(index) {
                // A job with a permit may finish although the bulkhead drains.
                self.to_send_again.push(index);
                continue;
            }
            let is_late = self.is_late_to_begin(now, index);
            self.withdraw_unbegun(now, index, place);
            self.settle_unbegun(now, (index, id), &mut ending, out);
            if let Some(worker) = self.workers[place as usize].as_mut() {
                worker.is_stalled |= is_late;
            }
            is_any = true;
        }
        self.review(now, place);
        self.after_job(now, place);
        is_any
    }

    /// Returns true if the worker of an unbegun job should get no new jobs before its next sign of life. A
    /// job that is cancelled right after the dispatch says nothing about the worker.
    fn is_late_to_begin(&mut self, now: Time, index: u32) -> bool {
        let due_after = patience(self.limits.lookahead, 0);
        let job = self.jobs.get(index);
        let Place::InFlight { since, .. } = job.place else { return false };
        job.answer_by(since) <= now || self.live_slots > 1 && since + due_after <= now
    }

    /// Recalls one job unless the worker has begun it. The job then ends with `verdict`, or waits again
    /// without a verdict. Returns true if the worker no longer has the job.
    pub(super) fn take_back_one(
        &mut self,
        now: Time,
        index: u32,
        verdict: Option<Verdict>,
        out: &mut Vec<Action<T>>,
    ) -> bool {
        let job = self.jobs.get(index);
        let (Place::Ahead { worker } | Place::InFlight { worker, .. }) = job.place else { return false };
        let arrival = job.arrival;
        let begun_last = self.workers[worker as usize].as_ref().map_or(u64::MAX, |worker| worker.begun_last);
        if arrival <= begun_last {
            return false;
        }
        let id = self.jobs.id(index);
        self.take_back(now, worker, Some((index, verdict)), out);
        // The job may have ended, and the index may already belong to another job.
        self.jobs.find(id).is_none_or(|index| {
            let job = self.jobs.get(index);
            !matches!(job.place, Place::Ahead { .. } | Place::InFlight { .. })
        })
    }

    pub(super) fn take_back_all(&mut self, now: Time, out: &mut Vec<Action<T>>) {
        for place in 0..self.workers.len() as u32 {
            self.take_back_ahead(now, place, out);
        }
    }

    fn take_back_ahead(&mut self, now: Time, place: u32, out: &mut Vec<Action<T>>) {
        if self.workers[place as usize].as_ref().is_some_and(|worker| !worker.ahead.is_empty()) {
            self.take_back(now, place, None, out);
        }
    }

    /// Recalls prefetched jobs from workers that take no more jobs, and from all workers if prefetching is no
    /// longer allowed.
    pub(super) fn take_back_noted(&mut self, now: Time, out: &mut Vec<Action<T>>) {
        while let Some(place) = self.to_take_back.pop() {
            let takes = |worker: &Worker| worker.is_available() && worker.apart == Apart::No;
            if !self.workers[place as usize].as_ref().is_some_and(takes) {
                self.take_back_ahead(now, place, out);
            }
        }
        let takes_all_back = std::mem::take(&mut self.takes_all_back);
        if self.ahead > 0 && (takes_all_back || !self.may_look_ahead()) {
            self.take_back_all(now, out);
        }
    }

    /// Recalls prefetched jobs from workers with jobs of lower classes, because a waiting job of `class` has
    /// priority.
    pub(super) fn take_back_lower(&mut self, now: Time, class: Priority, out: &mut Vec<Action<T>>) {
        if self.ahead == 0 || class == Priority::BestEffort {
            return;
        }
        for place in 0..self.workers.len() as u32 {
            let ahead = self.workers[place as usize].as_ref().map(|worker| worker.ahead.iter());
            let ahead: Vec<u32> = ahead.into_iter().flatten().copied().collect();
            if ahead.into_iter().any(|index| self.jobs.get(index).priority < class) {
                self.take_back(now, place, None, out);
            }
        }
    }

    /// Answers the client of a prefetched job that turned out to have begun.
    pub(super) fn abandon_ahead(
        &mut self,
        now: Time,
        index: u32,
        verdict: Verdict,
        out: &mut Vec<Action<T>>,
    ) {
        self.answer(now, index, verdict, out);
        self.uncount_waiting(index);
        self.job_timers.clear(index);
    }

    /// Removes a prefetched job from the counts of waiting jobs, because the client was answered or the job
    /// begins.
    fn uncount_waiting(&mut self, index: u32) {
        let tenant = self.jobs.get(index).tenant;
        self.ahead -= 1;
        self.tenants.get(tenant).ahead -= 1;
    }

    // Jobs that begin or come back.

    /// Handles an answer of a worker: the worker's oldest prefetched job begins and gets the permit.
    pub(super) fn begin_ahead(&mut self, now: Time, place: u32, out: &mut Vec<Action<T>>) {
        let Some(worker) = self.workers[place as usize].as_mut() else { return };
        worker.turned_at = now;
        if std::mem::take(&mut worker.lag) > 0 {
            worker.check_at = None;
            self.expect_begin(now, place);
        }
        let Some(worker) = self.workers[place as usize].as_mut() else { return };
        let Some(index) = worker.ahead.pop_front() else { return };
        let job = self.jobs.get(index);
        let is_wanted = job.cargo.is_some();
        worker.ahead_bytes -= job.bytes;
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
            out.push(Action::Cancel { worker: worker.id, job: self.jobs.id(index) });
        }
        if self.limits.recycle.jobs.is_some() {
            self.mind_jobs_left(now, place, out);
        }
    }

    /// Handles the return of a job that was recalled just when the worker was about to begin it. Only the
    /// worker knows which happened first. After the return, the job can be dispatched again.
    pub(super) fn returned(
        &mut self,
        now: Time,
        id: WorkerId,
        (job, arrival): (JobId, u64),
        out: &mut Vec<Action<T>>,
    ) {
        self.heard(now, id);
        let Some(worker) = self.worker(id) else { return };
        if arrival > worker.taken {
            let message = format!("the worker returned the job {job}, which was not recalled");
            return self.kill(id.place, KillReason::Protocol(message), out);
        }
        let Some(index) = self.jobs.find(job).filter(|&index| self.jobs.get(index).arrival == arrival) else {
            return;
        };
        match self.jobs.get(index).place {
            Place::Ahead { worker } if worker == id.place => {
                self.take_out(index, id.place);
                self.mind_room(id.place);
                self.settle_unbegun(now, (index, id), &mut None, out);
            }
            Place::InFlight { worker, is_oversized: false, .. } if worker == id.place => {
                self.withdraw_unbegun(now, index, id.place);
                self.settle_unbegun(now, (index, id), &mut None, out);
                self.begin_ahead(now, id.place, out);
                self.review(now, id.place);
                self.after_job(now, id.place);
            }
            _ => {}
        }
    }

    /// Takes an unbegun job with a permit away from its worker. The dispatch does not count as an attempt.
    fn withdraw_unbegun(&mut self, now: Time, index: u32, place: u32) {
        self.withdraw(index);
        let job = self.jobs.get(index);
        job.attempts -= 1;
        // The job had its turn, so the queue timeout no longer applies.
        job.patience_until = None;
        let is_wanted = job.cargo.is_some();
        if let Some(claim) = job.claim.take() {
            self.breaker.give_back(claim);
        }
        if let Some(worker) = self.workers[place as usize].as_mut() {
            worker.wanted -= u32::from(is_wanted);
            worker.begun -= 1;
            // A worker without a dispatch thread need not send heartbeats while running jobs, so silence
            // counts from now.
            if !worker.has_dispatch_thread {
                (worker.last_heard, worker.silence) = (now, Silence::None);
            }
        }
        self.refresh(place);
    }

    /// Takes a prefetched job away from its worker.
    fn take_out(&mut self, index: u32, place: u32) {
        let job = self.jobs.get(index);
        let (bytes, is_wanted) = (job.bytes, job.cargo.is_some());
        let Some(worker) = self.workers[place as usize].as_mut() else { return };
        if let Some(at) = worker.ahead.iter().rposition(|&ahead| ahead == index) {
            worker.ahead.remove(at);
            worker.ahead_bytes -= bytes;
        }
        // A prefetch slot is free again.
        self.refresh(place);
        if is_wanted {
            self.uncount_waiting(index);
        }
    }

    /// Ends or requeues a job that came back from its worker without having begun. The run limit starts again
    /// with the next dispatch.
    fn settle_unbegun(
        &mut self,
        now: Time,
        (index, worker): (u32, WorkerId),
        ending: &mut Option<Ending>,
        out: &mut Vec<Action<T>>,
    ) {
        out.push(Action::TookBack { worker, job: self.jobs.id(index) });
        self.job_timers.clear(index);
        let job = self.jobs.get(index);
        job.place = Place::Entered;
        job.returned = job.returned.saturating_add(1);
        job.taken_from = Some(worker);
        let end = ending.take_if(|(ending, _)| *ending == index).and_then(|(_, verdict)| verdict);
        let verdict = if job.cargo.is_none() {
            return self.forget(index);
        } else if let Some(verdict) = end {
            verdict
        } else if job.deadline_at <= now {
            Verdict::DeadlineQueued
        } else if self.mode != Mode::Open {
            rejection(RejectReason::Draining)
        } else if !job.is_repeatable {
            let message =
                "the worker returned the job, and the supervisor kept no copy of the payload: send the job \
                 again"
                    .to_owned();
            Verdict::Rejected { reason: RejectReason::Unavailable, message }
        } else if self.live_slots == 0 {
            Verdict::Rejected { reason: RejectReason::Unavailable, message: self.no_worker() }
        } else {
            return self.wait_again(index);
        };
        self.answer(now, index, verdict, out);
        self.forget(index);
    }

    /// Sends jobs with a permit back to the worker from which they were recalled together with other jobs.
    pub(super) fn send_again(&mut self, now: Time, out: &mut Vec<Action<T>>) {
        let mut again = std::mem::take(&mut self.to_send_again);
        again.sort_unstable_by_key(|&index| self.jobs.id(index));
        again.dedup();
        for index in again {
            if let Some(Place::InFlight { worker, since, .. }) = self.jobs.place(index)
                && self.jobs.get(index).cargo.is_some()
            {
                let remaining = self.jobs.get(index).answer_by(since).since(now);
                self.send(now, index, worker, (remaining, false), out);
            }
        }
    }

    /// Requeues or ends the prefetched jobs of a dead worker, because these jobs have not begun.
    pub(super) fn take_ahead_back(&mut self, now: Time, id: WorkerId, out: &mut Vec<Action<T>>) {
        while let Some(worker) = self.workers[id.place as usize].as_ref()
            && let Some(&index) = worker.ahead.back()
        {
            self.take_out(index, id.place);
            self.settle_unbegun(now, (index, id), &mut None, out);
        }
    }

    /// Kills a worker that answered a job before its turn, or after the job was recalled. The job has run and
    /// therefore ends as `crashed`, unless another worker already has the job.
    pub(super) fn answered_without_right(
        &mut self,
        now: Time,
        worker: WorkerId,
        job: JobId,
        out: &mut Vec<Action<T>>,
    ) {
        let message = format!("the worker answered the job {job}, which had not begun or had been recalled");
        let reason = KillReason::Protocol(message);
        let crash =
            Verdict::Crashed { reason: CrashReason::Protocol, status: None, message: reason.describe() };
        let place = self.jobs.find(job).map(|index| (index, self.jobs.get(index).place));
        match place {
            Some((index, Place::Ahead { worker: at })) if at == worker.place => {
                self.take_out(index, worker.place);
                self.job_timers.clear(index);
                let entry = self.jobs.get(index);
                (entry.place, entry.attempts) = (Place::Entered, entry.attempts + 1);
                self.answer(now, index, crash, out);
                self.forget(index);
            }
            Some((index, Place::Queued | Place::Apart)) => {
                self.jobs.get(index).attempts += 1;
                self.leave_queue(now, index, crash, out);
            }
            _ => {}
        }
        self.kill(worker.place, reason, out);
    }

    /// Returns true if this worker was the last from which the job was recalled.
    pub(super) fn was_taken_from(&mut self, worker: WorkerId, job: JobId) -> bool {
        let found = self.jobs.find(job).filter(|_| self.worker(worker).is_some());
        found.is_some_and(|index| self.jobs.get(index).taken_from == Some(worker))
    }
}

/// Returns the time that a worker has to begin a job. The time doubles with each recall of the job, so that
/// jobs do not move between workers forever on an overloaded machine.
fn patience(lookahead: Duration, returned: u8) -> Duration {
    (lookahead + PATIENCE).saturating_mul(1 << returned.min(DOUBLINGS_MAX))
}

impl Worker {
    /// Returns true if some jobs of the worker had not begun at the last reading.
    fn may_have_unbegun(&self) -> bool {
        self.begun_last.max(self.taken) < self.sent
    }

    /// Returns true if the worker can prefetch jobs: all its permits are used, but not more. With more jobs
    /// than permits, an answer would not free a permit for a prefetched job.
    fn takes_ahead(&self) -> bool {
        self.claims.is_some()
            && self.is_available()
            && self.apart == Apart::No
            && !self.jobs.is_empty()
            && self.jobs.len() as u32 == self.permits
    }
}
