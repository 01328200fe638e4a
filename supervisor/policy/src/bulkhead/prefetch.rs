//! Prefetching sends jobs to a worker before its current job has ended, so that the worker does not sit idle between
//! jobs. Apart from that, prefetched jobs count as queued: they hold no permit, count towards the limits of the queue,
//! and are subject to the queue timeout.
//!
//! A worker starts jobs in the order in which they were sent, and starts each job only after replying to the previous
//! one. When a reply arrives, the oldest prefetched job therefore starts. When a worker dies, none of its prefetched
//! jobs has started, except after a protocol violation (see `requeue_prefetched`).
//!
//! A job that has not started, whether prefetched or with a permit, is recalled without asking the worker
//! ([`JobJournal`](crate::JobJournal)). If the job is cancelled or its deadline passes, it is recalled immediately.
//! Otherwise, it is recalled after the `lookahead` time if another worker can start it then.

use std::time::Duration;

use bulkhead_shared::{CrashReason, JobId, Priority, RejectReason, Verdict};

use super::{Bulkhead, Mode};
use crate::breaker::BreakerState;
use crate::ending::KillReason;
use crate::jobs::JobState;
use crate::limits::Overflow;
use crate::messages::{Action, WorkerId, rejection};
use crate::time::{Time, earlier};
use crate::worker::{Exclusivity, SilenceCheck, Worker};

/// Maximum total size of the jobs prefetched to a worker, in bytes.
const BYTES_MAX: u32 = 64 * 1024;

/// Number of recalls after which a job is no longer prefetched.
const RECALLS_MAX: u8 = 3;

/// Number of dispatches that a job can lose because its run limit expires before the worker starts the job. With the
/// last of them, the job ends. Otherwise, a job with a very short run limit could move between the queue and a worker
/// until its deadline.
const RUN_LIMIT_EXPIRIES_MAX: u8 = 10;

/// Minimum time before a job's deadline and queue timeout, in multiples of `lookahead`. If less time is left, the job
/// is not prefetched.
const TIME_LEFT_FACTOR: u32 = 2;

/// Time that a worker has to start a job, in addition to `lookahead`. On a busy machine, a worker can wait this long
/// for a processor.
const BEGIN_GRACE: Duration = Duration::from_millis(2);

/// Maximum number of times that the check interval, and the time in which a job must start, are doubled.
const DOUBLINGS_MAX: u8 = 10;

/// Index of the job that causes a recall, and the verdict with which the job ends. If the verdict is `None`, the job
/// returns to the queue.
pub(super) type RecallTarget = (u32, Option<Verdict>);

impl<T> Bulkhead<T> {
    /// Prefetches jobs to workers whose permits are all in use. All waiting jobs and all of the worker's jobs must
    /// belong to the same tenant, so that prefetching does not delay another tenant's turn.
    pub(super) fn prefetch(&mut self, now: Time) {
        if self.workers.prefetch_candidate().is_none() || self.queue.len() == 0 || !self.may_prefetch() {
            return;
        }
        let soon = now + self.limits.lookahead * TIME_LEFT_FACTOR;
        while let Some(place) = self.workers.prefetch_candidate()
            && let Some(index) = self.queue.peek(Priority::BestEffort)
        {
            let job = self.jobs.get(index);
            let due = job.queue_timeout_at.map_or(job.deadline_at, |at| at.min(job.deadline_at));
            let (tenant, bytes, deadline_at) = (job.tenant, job.bytes, job.deadline_at);
            // A job cannot be recalled if the supervisor has no copy of its payload.
            let can_return = job.recalls < RECALLS_MAX && job.is_resendable;
            let is_fit = due > soon && can_return && job.earlier_attempts.is_none();
            let is_kept_out = self.is_quarantined(now, self.jobs.digest(index));
            let lookahead = self.limits.lookahead;
            let Some(worker) = self.workers.get(place) else { return };
            if worker.last_progress_at + lookahead <= now {
                self.mark_late(place);
                continue;
            }
            let fits = worker.prefetched_bytes.saturating_add(bytes) <= BYTES_MAX;
            let is_alone = self.queue.len_of_tenant(tenant.0) == self.queue.len();
            if !is_fit || is_kept_out || !fits || !is_alone || worker.tenant != Some(tenant) {
                return;
            }
            self.queue.pop(Priority::BestEffort);
            self.jobs.get(index).state = JobState::Prefetched { worker: place };
            self.tenants.get(tenant).prefetched += 1;
            self.prefetched += 1;
            let check_at = self.begin_check_at(now);
            let sent = self.edit(place, |worker| {
                worker.prefetched.push_back(index);
                worker.prefetched_bytes += bytes;
                worker.send(check_at)
            });
            self.sent(index, sent, (deadline_at.since(now), true));
        }
    }

    /// Adds the action that sends a job to a worker. `sent` contains the worker, and the job's number among all jobs
    /// sent to that worker.
    pub(super) fn sent(
        &mut self,
        index: u32,
        sent: Option<(WorkerId, u64)>,
        (remaining, is_prefetched): (Duration, bool),
    ) {
        let Some((worker, send_number)) = sent else { return };
        self.jobs.get(index).send_number = send_number;
        self.actions.push(Action::Dispatch { worker, job: self.jobs.id(index), remaining, is_prefetched });
    }

    /// Returns the time by which a worker should start a job that is sent now. Returns `None` if there is only one
    /// worker, because no other worker could run the job after a recall.
    pub(super) fn begin_check_at(&self, now: Time) -> Option<Time> {
        (self.workers.totals().live_slots > 1).then(|| now + time_to_begin(self.limits.lookahead, 0))
    }

    /// Schedules a check of whether the worker has started its jobs in time.
    pub(super) fn schedule_begin_check(&mut self, now: Time, place: u32) {
        let at = now + time_to_begin(self.limits.lookahead, 0);
        self.edit_timing(place, |worker| worker.schedule_begin_check(at));
    }

    fn may_prefetch(&self) -> bool {
        // Jobs are prefetched only if all priority classes can use all permits, and if the breaker does not need to
        // count individual jobs.
        !self.limits.lookahead.is_zero()
            && self.mode == Mode::Open
            && self.suspects.is_empty()
            && self.limits.critical_reserve == 0.0
            && self.breaker.state() == BreakerState::Closed
            // Eviction needs all of a tenant's waiting jobs in the queue, to find the oldest one.
            && self.limits.overflow == Overflow::Reject
            // If more jobs are running than the limit allows, a worker's reply does not free a permit.
            && u64::from(self.workers.totals().in_use) <= self.limit()
    }

    // Functions for workers that are late in starting a job.

    /// If a check is due, checks whether a worker is late in starting a job.
    pub(super) fn check_begun(&mut self, now: Time, place: u32) {
        let next_check = self.workers.get(place).and_then(|worker| worker.next_begin_check);
        if next_check.is_none_or(|at| at > now) {
            return;
        }
        self.edit_timing(place, |worker| worker.next_begin_check = None);
        let Some(begun) = self.read_begun(place, None) else { return };
        let lookahead = self.limits.lookahead;
        let Some(worker) = self.workers.get(place) else { return };
        let prefetched = worker.prefetched.back().filter(|&&last| self.jobs.get(last).send_number > begun);
        let ahead_due = prefetched.map(|_| worker.last_progress_at + lookahead);
        let mut held_due = None;
        for &index in &worker.jobs {
            let job = self.jobs.get(index);
            if let JobState::InFlight { since, .. } = job.state
                && job.send_number > begun
            {
                held_due = earlier(held_due, Some(since + time_to_begin(lookahead, job.recalls)));
            }
        }
        let is_stuck = held_due.is_some_and(|at| at <= now);
        let is_stalled = is_stuck || worker.is_stalled && begun <= worker.recalled_up_to;
        let is_late = is_stuck || ahead_due.is_some_and(|at| at <= now);
        let stall_changes = worker.is_stalled != is_stalled;
        if is_late {
            self.mark_late(place);
        }
        self.edit_timing(place, |worker| {
            worker.next_begin_check = match earlier(held_due, ahead_due) {
                Some(_) if is_late => Some(now + time_to_begin(lookahead, worker.late_checks)),
                due => due,
            };
        });
        if stall_changes {
            self.edit(place, |worker| worker.is_stalled = is_stalled);
        }
    }

    /// Marks a worker as late in starting jobs, so that other workers can take over its jobs.
    fn mark_late(&mut self, place: u32) {
        self.edit(place, |worker| worker.late_checks = (worker.late_checks + 1).min(DOUBLINGS_MAX));
        if !self.late_workers.contains(&place) {
            self.late_workers.push(place);
        }
    }

    /// If another worker has a free permit, recalls the jobs that a late worker has not started. Returns true if a job
    /// was recalled.
    pub(super) fn recall_from_late_workers(&mut self, now: Time) -> bool {
        let Some(next) = self.next_worker().filter(|_| self.mode == Mode::Open) else { return false };
        // Jobs that were sent while handling the current event are not recalled, because the worker has not received
        // them yet.
        let is_due = |place: &u32| {
            *place != next && self.workers.get(*place).is_none_or(|worker| worker.last_progress_at < now)
        };
        let due: Vec<u32> = self.late_workers.iter().copied().filter(is_due).collect();
        for place in due {
            self.late_workers.retain(|late| *late != place);
            // A job that must run alone is recalled only if another worker is idle.
            let is_idle = self.idle_worker().is_some();
            let is_late = |worker: &Worker| {
                worker.late_checks > 0 && (worker.exclusivity != Exclusivity::Exclusive || is_idle)
            };
            if self.workers.get(place).is_some_and(is_late) && self.recall(now, place, None) {
                return true;
            }
        }
        false
    }

    // Recall.

    /// Reads the number of the last job that a worker has started. If `recall_up_to` is set, first recalls the jobs up
    /// to that number, so that the worker can no longer start them. Returns `None` if the worker has no journal. If the
    /// value is implausible, kills the worker and returns `None`.
    fn read_begun(&mut self, place: u32, recall_up_to: Option<u64>) -> Option<u64> {
        let worker = self.workers.get(place)?;
        let (last_begun, sent) = (worker.last_begun, worker.sent);
        let journal = worker.journal.as_ref()?;
        let begun = recall_up_to.map_or_else(|| journal.begun(), |up_to| journal.recall(up_to));
        if (last_begun..=sent).contains(&begun) {
            self.edit_timing(place, |worker| worker.last_begun = begun);
            return Some(begun);
        }
        let message = format!(
            "the worker's journal reports {begun} started jobs, but {sent} jobs were sent, and the journal \
             previously reported {last_begun}"
        );
        self.edit(place, |worker| worker.journal = None);
        self.kill(place, KillReason::Protocol(message));
        None
    }

    /// Recalls all jobs that a worker has not started. If `ending` contains a verdict, its job ends with this verdict.
    /// All other jobs return to the front of their classes in the queue. Returns true if at least one job was recalled.
    pub(super) fn recall(&mut self, now: Time, place: u32, ending: Option<RecallTarget>) -> bool {
        let Some(worker) = self.workers.get(place).filter(|worker| !worker.is_dead()) else { return false };
        if !worker.may_have_unbegun() && self.to_resend.is_empty() {
            return false;
        }
        let Some(begun) = self.read_begun(place, None) else { return false };
        let (id, sent, held, is_ready) = match self.workers.get(place) {
            Some(worker) if begun < worker.sent => {
                (worker.id, worker.sent, worker.jobs.clone(), worker.is_ready())
            }
            _ => return false,
        };
        // Without a copy of the payload, no other worker can run the job.
        let is_fixed = |job: &crate::jobs::Job<T>| job.send_number > begun && !job.is_resendable;
        let end_of = ending.as_ref().map(|(index, _)| *index);
        if held.iter().any(|&index| Some(index) != end_of && is_fixed(self.jobs.get(index))) {
            return false;
        }
        let Some(begun) = self.read_begun(place, Some(sent)) else { return false };
        // All jobs sent so far have been started or recalled, so the next check concerns only later jobs.
        self.edit_timing(place, |worker| {
            (worker.recalled_up_to, worker.next_begin_check) = (sent, None);
        });
        let (mut ending, mut is_any) = (ending, false);
        let is_let_in = is_ready && self.mode != Mode::Open;
        while let Some(&index) = self.workers.get(place).and_then(|worker| worker.prefetched.back())
            && self.jobs.get(index).send_number > begun
        {
            self.remove_prefetched(index, place);
            self.end_or_requeue(now, (index, id), &mut ending);
            is_any = true;
        }
        let mut held: Vec<_> = held.iter().map(|&index| (self.jobs.get(index).send_number, index)).collect();
        held.sort_unstable();
        for (_, index) in held.into_iter().rev().take_while(|(send_number, _)| *send_number > begun) {
            let is_wanted = self.jobs.get(index).record.is_some();
            if is_let_in && is_wanted && end_of != Some(index) {
                // A job with a permit can finish even if the bulkhead is draining.
                self.to_resend.push(index);
                continue;
            }
            let is_late = self.is_late_to_begin(now, index);
            self.withdraw_unbegun(now, index, |worker| worker.is_stalled |= is_late);
            self.end_or_requeue(now, (index, id), &mut ending);
            is_any = true;
        }
        self.update_kill_time(now, place);
        self.limit_exit_time(now, place);
        is_any
    }

    /// Returns true if the worker is so late in starting this job that it must get no new jobs until its next sign of
    /// life. Returns false for a job that is cancelled right after its dispatch.
    fn is_late_to_begin(&mut self, now: Time, index: u32) -> bool {
        let due_after = time_to_begin(self.limits.lookahead, 0);
        let job = self.jobs.get(index);
        let JobState::InFlight { since, .. } = job.state else { return false };
        job.answer_by(since) <= now || self.workers.totals().live_slots > 1 && since + due_after <= now
    }

    /// Recalls one job unless the worker has started it. The recalled job ends with `verdict`, or returns to the queue
    /// if `verdict` is `None`. Returns true if the worker no longer has the job.
    pub(super) fn recall_job(&mut self, now: Time, index: u32, verdict: Option<Verdict>) -> bool {
        let job = self.jobs.get(index);
        let (JobState::Prefetched { worker } | JobState::InFlight { worker, .. }) = job.state else {
            return false;
        };
        let send_number = job.send_number;
        let last_begun = self.workers.get(worker).map_or(u64::MAX, |worker| worker.last_begun);
        if send_number <= last_begun {
            return false;
        }
        let id = self.jobs.id(index);
        self.recall(now, worker, Some((index, verdict)));
        // The recall may have ended the job, and another job may already use the same index.
        self.jobs.find(id).is_none_or(|index| {
            let job = self.jobs.get(index);
            !matches!(job.state, JobState::Prefetched { .. } | JobState::InFlight { .. })
        })
    }

    pub(super) fn recall_all(&mut self, now: Time) {
        for place in self.workers.places() {
            self.recall_prefetched(now, place);
        }
    }

    fn recall_prefetched(&mut self, now: Time, place: u32) {
        if self.workers.get(place).is_some_and(|worker| !worker.prefetched.is_empty()) {
            self.recall(now, place, None);
        }
    }

    /// Recalls the prefetched jobs of workers that accept no more jobs, or of all workers if prefetching is no longer
    /// allowed.
    pub(super) fn recall_pending(&mut self, now: Time) {
        while let Some(place) = self.workers.pop_to_recall() {
            let takes = |worker: &Worker| worker.is_available() && worker.exclusivity == Exclusivity::Shared;
            if !self.workers.get(place).is_some_and(takes) {
                self.recall_prefetched(now, place);
            }
        }
        let must_recall_all = std::mem::take(&mut self.must_recall_all);
        if self.prefetched > 0 && (must_recall_all || !self.may_prefetch()) {
            self.recall_all(now);
        }
    }

    /// Recalls prefetched jobs of lower priority, to make room for a waiting job of priority `class`.
    pub(super) fn recall_lower_priority(&mut self, now: Time, class: Priority) {
        if self.prefetched == 0 || class == Priority::BestEffort {
            return;
        }
        for place in self.workers.places() {
            let prefetched = self.workers.get(place).map(|worker| worker.prefetched.iter());
            let prefetched: Vec<u32> = prefetched.into_iter().flatten().copied().collect();
            if prefetched.into_iter().any(|index| self.jobs.get(index).priority < class) {
                self.recall(now, place, None);
            }
        }
    }

    /// Sends the outcome of a job that a worker has already started, but which is still counted as prefetched.
    pub(super) fn abandon_prefetched(&mut self, now: Time, index: u32, verdict: Verdict) {
        self.send_outcome(now, index, verdict);
        self.uncount_waiting(index);
        self.job_timers.clear(index);
    }

    /// Stops counting a prefetched job as waiting. Called when the job starts or its client receives the outcome.
    fn uncount_waiting(&mut self, index: u32) {
        let tenant = self.jobs.get(index).tenant;
        self.prefetched -= 1;
        self.tenants.get(tenant).prefetched -= 1;
    }

    // Functions for prefetched jobs that the worker starts or returns.

    /// Handles a reply from a worker. The reply frees a permit, with which the worker's oldest prefetched job starts.
    pub(super) fn begin_prefetched(&mut self, now: Time, place: u32) {
        let Some(&index) = self.workers.get(place).and_then(|worker| worker.prefetched.front()) else {
            return;
        };
        let job = self.jobs.get(index);
        let (is_wanted, bytes) = (job.record.is_some(), job.bytes);
        if is_wanted {
            self.uncount_waiting(index);
        }
        let claim = match is_wanted && !self.breaker.is_disabled() {
            true => self.breaker.claim(now, self.has_ready_worker()),
            false => None,
        };
        if let Some((claim, transition)) = claim {
            self.jobs.get(index).claim = Some(claim);
            self.report_transition(transition);
        }
        let worker = self.assign(now, index, place, |worker| {
            worker.prefetched.pop_front();
            worker.prefetched_bytes -= bytes;
            worker.awaited_jobs -= u32::from(!is_wanted);
            worker.id
        });
        if let Some(worker) = worker.filter(|_| !is_wanted) {
            self.actions.push(Action::Cancel { worker, job: self.jobs.id(index) });
        }
        if self.limits.recycle.jobs.is_some() {
            self.check_job_limit(now, place);
        }
    }

    /// Handles the return of a job that was recalled while the worker was about to start it. Only the worker knows
    /// whether the recall came before the start. A returned job can be dispatched again.
    pub(super) fn job_returned(&mut self, now: Time, id: WorkerId, (job, send_number): (JobId, u64)) {
        self.record_sign_of_life(now, id);
        let Some(worker) = self.workers.by_id(id) else { return };
        if send_number > worker.recalled_up_to {
            let message = format!("the worker returned job {job}, which had not been recalled");
            return self.kill(id.place, KillReason::Protocol(message));
        }
        let Some(index) =
            self.jobs.find(job).filter(|&index| self.jobs.get(index).send_number == send_number)
        else {
            return;
        };
        match self.jobs.get(index).state {
            JobState::Prefetched { worker } if worker == id.place => {
                self.remove_prefetched(index, id.place);
                self.end_or_requeue(now, (index, id), &mut None);
            }
            JobState::InFlight { worker, is_oversized: false, .. } if worker == id.place => {
                let check_at = now + time_to_begin(self.limits.lookahead, 0);
                self.withdraw_unbegun(now, index, |worker| worker.record_progress(now, check_at));
                self.end_or_requeue(now, (index, id), &mut None);
                self.begin_prefetched(now, id.place);
                self.update_kill_time(now, id.place);
                self.limit_exit_time(now, id.place);
            }
            _ => {}
        }
    }

    /// Removes a job that has not started from its worker, and applies `change` to the worker in the same update. The
    /// dispatch does not count as an attempt.
    fn withdraw_unbegun(&mut self, now: Time, index: u32, change: impl FnOnce(&mut Worker)) {
        let job = self.jobs.get(index);
        job.attempts -= 1;
        // The job was already dispatched once, so the queue timeout no longer applies.
        job.queue_timeout_at = None;
        if matches!(job.state, JobState::InFlight { since, .. } if since + job.run_limit <= now) {
            job.run_limit_expiries += 1;
        }
        let is_wanted = job.record.is_some();
        if let Some(claim) = job.claim.take() {
            self.breaker.return_claim(claim);
        }
        self.withdraw(index, |worker| {
            worker.awaited_jobs -= u32::from(is_wanted);
            worker.jobs_given -= 1;
            // The worker's silence is measured from now on, because a worker without a dispatch thread sends no
            // heartbeats while running jobs.
            if !worker.has_dispatch_thread {
                (worker.last_heard_at, worker.silence) = (now, SilenceCheck::None);
            }
            change(worker);
        });
    }

    fn remove_prefetched(&mut self, index: u32, place: u32) {
        let job = self.jobs.get(index);
        let (bytes, is_wanted) = (job.bytes, job.record.is_some());
        self.edit(place, |worker| {
            if let Some(at) = worker.prefetched.iter().rposition(|&prefetched| prefetched == index) {
                worker.prefetched.remove(at);
                worker.prefetched_bytes -= bytes;
            }
        });
        if is_wanted {
            self.uncount_waiting(index);
        }
    }

    /// Ends or requeues a job that its worker has not started. The run limit starts again at the next dispatch, unless
    /// it has expired too often.
    fn end_or_requeue(
        &mut self,
        now: Time,
        (index, worker): (u32, WorkerId),
        ending: &mut Option<RecallTarget>,
    ) {
        self.actions.push(Action::Recalled { worker, job: self.jobs.id(index) });
        self.job_timers.clear(index);
        let job = self.jobs.get(index);
        job.state = JobState::Unplaced;
        job.recalls = job.recalls.saturating_add(1);
        job.recalled_from = Some(worker);
        let end = ending.take_if(|(ending, _)| *ending == index).and_then(|(_, verdict)| verdict);
        let verdict = if job.record.is_none() {
            return self.forget(index);
        } else if let Some(verdict) = end {
            verdict
        } else if job.deadline_at <= now || job.run_limit_expiries >= RUN_LIMIT_EXPIRIES_MAX {
            Verdict::DeadlineQueued
        } else if self.mode != Mode::Open {
            rejection(RejectReason::Draining)
        } else if !job.is_resendable {
            let message =
                "the worker returned the job, and the supervisor has no copy of the payload: send the job \
                 again"
                    .to_owned();
            Verdict::Rejected { reason: RejectReason::Unavailable, message }
        } else if self.workers.totals().live_slots == 0 {
            Verdict::Rejected { reason: RejectReason::Unavailable, message: self.no_worker_message() }
        } else {
            return self.requeue(index);
        };
        self.send_outcome(now, index, verdict);
        self.forget(index);
    }

    /// Sends recalled jobs that still hold a permit again, each to the same worker as before.
    pub(super) fn resend(&mut self, now: Time) {
        let mut again = std::mem::take(&mut self.to_resend);
        again.sort_unstable_by_key(|&index| self.jobs.id(index));
        again.dedup();
        for index in again {
            if let Some(JobState::InFlight { worker, since, .. }) = self.jobs.state(index)
                && self.jobs.get(index).record.is_some()
            {
                let remaining = self.jobs.get(index).answer_by(since).since(now);
                let check_at = self.begin_check_at(now);
                let sent = self.edit_timing(worker, |worker| worker.send(check_at));
                self.sent(index, sent, (remaining, false));
            }
        }
    }

    /// Requeues or ends a dead worker's prefetched jobs. The worker's journal can show that a job has started even
    /// though the supervisor has not read the reply to the preceding job, because the supervisor reads nothing after a
    /// protocol violation. Such a job ends with `verdict` unless it is idempotent. An implausible journal is ignored,
    /// so that a worker that overwrites its journal does not affect other jobs.
    pub(super) fn requeue_prefetched(&mut self, now: Time, id: WorkerId, verdict: &Verdict) {
        let Some(worker) = self.workers.get(id.place) else { return };
        let journal = worker.journal.as_ref().map(|journal| journal.begun());
        let begun = journal.filter(|begun| (worker.last_begun..=worker.sent).contains(begun)).unwrap_or(0);
        while let Some(&index) = self.workers.get(id.place).and_then(|worker| worker.prefetched.back()) {
            let job = self.jobs.get(index);
            if job.send_number <= begun && !job.idempotent && job.record.is_some() {
                self.end_started(now, index, id.place, verdict.clone());
                continue;
            }
            self.remove_prefetched(index, id.place);
            self.end_or_requeue(now, (index, id), &mut None);
        }
    }

    /// Ends a prefetched job that its worker has already started. The dispatch counts as an attempt.
    fn end_started(&mut self, now: Time, index: u32, place: u32, verdict: Verdict) {
        self.remove_prefetched(index, place);
        self.job_timers.clear(index);
        let job = self.jobs.get(index);
        (job.state, job.attempts) = (JobState::Unplaced, job.attempts + 1);
        self.send_outcome(now, index, verdict);
        self.forget(index);
    }

    /// Kills a worker that sent a job's result too early or after the job was recalled. The job has run and therefore
    /// ends as `crashed`, unless another worker already has it.
    pub(super) fn kill_for_invalid_reply(&mut self, now: Time, worker: WorkerId, job: JobId) {
        let message =
            format!("the worker sent a result for job {job}, which had not started or had been recalled");
        let reason = KillReason::Protocol(message);
        let crash =
            Verdict::Crashed { reason: CrashReason::Protocol, status: None, message: reason.describe() };
        let place = self.jobs.find(job).map(|index| (index, self.jobs.get(index).state));
        match place {
            Some((index, JobState::Prefetched { worker: at })) if at == worker.place => {
                self.end_started(now, index, worker.place, crash);
            }
            Some((index, JobState::Queued | JobState::WaitingSuspect)) => {
                self.jobs.get(index).attempts += 1;
                self.leave_queue(now, index, crash);
            }
            _ => {}
        }
        self.kill(worker.place, reason);
    }

    /// Returns true if the job was last recalled from this worker.
    pub(super) fn was_recalled_from(&mut self, worker: WorkerId, job: JobId) -> bool {
        let found = self.jobs.find(job).filter(|_| self.workers.by_id(worker).is_some());
        found.is_some_and(|index| self.jobs.get(index).recalled_from == Some(worker))
    }
}

/// Returns the time allowed for a worker to start a job. The time doubles with each recall, so that jobs do not keep
/// moving between the workers of an overloaded machine.
pub(super) fn time_to_begin(lookahead: Duration, recalls: u8) -> Duration {
    (lookahead + BEGIN_GRACE).saturating_mul(1 << recalls.min(DOUBLINGS_MAX))
}
