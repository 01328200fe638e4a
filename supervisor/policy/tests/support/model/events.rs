//! Applies events to the model.

use std::time::Duration;

use std::collections::{BTreeMap, BTreeSet};

use bulkhead_policy::{
    Capabilities, Death, Event, Health, KillReason, Overflow, RARE_HEARTBEATS_MISSED, Reply, Submission,
    TenantId, Time, WorkerId,
};
use bulkhead_shared::{CrashReason, Executed, HandlerFailure, JobId, Priority, RejectReason, Verdict};

use super::recovery;
use super::slots::SlotState;
use super::{Cause, Dead, Job, Mode, Model, PendingSubmission, Phase, Step, Worker};
use crate::support::Tag;

/// Maximum number of workers that can die before reading the same job. After one more death, the job is not requeued.
const UNREAD_ATTEMPTS_MAX: u32 = 3;

/// Maximum number of times in a row that a worker's silence can be attributed to a busy machine.
const FORGIVEN_MAX: u32 = 20;

impl Worker {
    fn record_sign_of_life(&mut self, now: Time) {
        (self.last_heard_at, self.observed_since, self.was_checked) = (now, None, false);
    }
}

impl Model {
    /// Applies an event to the model before the bulkhead handles it.
    pub(crate) fn handle_event(&mut self, now: Time, event: &Event<Tag>) {
        self.now = now;
        self.registry.next_step();
        self.in_use_before_event = self.permits().0;
        self.reserved_before_event = self.reserved_permits();
        self.step = Step { cause: cause(event), ..Step::default() };
        self.coverage.see(event_name(event));
        if !matches!(event, Event::Submit(_)) {
            let before = self.withheld.len();
            self.withheld.retain(|&(.., until)| until > now);
            if self.withheld.len() < before {
                self.coverage.see("withheld permit returned after its time");
            }
        }
        match event {
            Event::Start => self.start(),
            Event::ScaleToZero => self.scale_to_zero(),
            Event::AnnounceStart => self.announce_start(),
            Event::Reset => self.poison = recovery::Poison::default(),
            Event::Spawned { worker, pid } => self.spawned(*worker, *pid),
            Event::Stopping { worker } => self.stopping(*worker),
            Event::FrameReceived { worker } => self.extend_kill_time(*worker),
            Event::AliveAt { worker, at } => self.alive_at(*worker, *at),
            Event::ResultTooLarge { worker, job, failure } => self.oversized(*worker, *job, failure),
            Event::ChangeTenantLimits { .. } => {}
            Event::ForceBreaker { .. } => {}
            // The simulation does not generate these events. The rules for upgrades are in `cases.rs`.
            Event::CapPermits { .. } | Event::PredecessorHolds { .. } | Event::Quarantine { .. } => {}
            Event::LostWithKeeper { worker } => {
                let is_dead =
                    self.workers.get(&worker.place).is_some_and(|w| w.id == *worker && w.dead.is_some());
                self.coverage.see(if is_dead {
                    "lost with the keeper while reaped"
                } else {
                    "lost with the keeper"
                });
                if let Some(worker) = self.live_mut(*worker) {
                    worker.killed = Some(KillReason::KeeperDied);
                }
                self.exited(*worker, Death::Signal(9));
                self.swept(*worker);
            }
            Event::ChangeLimits(change) => self.change(*change),
            Event::Reconfigure(limits) => self.reconfigure(limits),
            Event::ReplaceWorkers => self.replace(),
            Event::Memory { .. } | Event::ProtocolViolated { .. } | Event::StartStatus { .. } => {}
            Event::Tick => self.tick(),
            Event::Submit(submission) => self.submit(submission),
            Event::Cancel { job, unless_begun } => self.cancel(*job, *unless_begun),
            Event::MemoryExhausted { job } => self.memory_exhausted(*job),
            Event::SpawnFailed { worker, lacks_id, .. } => {
                self.coverage.see(if *lacks_id { "no user ID" } else { "spawn failed" });
                if self.live(*worker).is_some() {
                    let dead = Dead {
                        is_failure: true,
                        lacks_id: *lacks_id,
                        is_clean: false,
                        is_early_death: false,
                    };
                    self.worker_gone(*worker, dead);
                }
            }
            Event::Hello { worker, capabilities, journal } => {
                self.hello(*worker, *capabilities, journal.is_some())
            }
            Event::JobReturned { worker, job, send_number } => self.returned(*worker, *job, *send_number),
            Event::ExtendStart { worker, more } => self.extend_start(*worker, *more),
            Event::Ready { worker } => self.ready(*worker),
            Event::Replied { worker, job, reply } => self.replied(*worker, *job, reply),
            Event::JobUnread { worker, job } => self.unread(*worker, *job, false),
            Event::JobNotBegun { worker, job } => self.unread(*worker, *job, true),
            Event::Exited { worker, death } => self.exited(*worker, *death),
            Event::Reaped { worker } => self.swept(*worker),
            Event::SupervisorPaused => {
                self.workers.values_mut().for_each(|worker| worker.record_sign_of_life(now))
            }
            Event::CpuTimeChecked { worker, is_starved } => self.cpu_time_checked(*worker, *is_starved),
            Event::Restart => self.restart(),
            Event::Drain => self.drain(),
            Event::Resume => self.resume(),
            Event::Stop { by } => self.stop(*by),
        }
        self.record_sign_of_life(event);
        if matches!(event, Event::Reset) {
            self.reset();
        }
    }

    /// Records a sign of life from the worker that sent the event. Ignores events that do not come from a worker.
    fn record_sign_of_life(&mut self, event: &Event<Tag>) {
        let (Event::Spawned { worker, .. }
        | Event::Hello { worker, .. }
        | Event::ExtendStart { worker, .. }
        | Event::Ready { worker }
        | Event::FrameReceived { worker }
        | Event::StartStatus { worker, .. }
        | Event::Replied { worker, .. }
        | Event::JobReturned { worker, .. }
        | Event::ResultTooLarge { worker, .. }
        | Event::ProtocolViolated { worker, .. }
        | Event::Stopping { worker }) = event
        else {
            return;
        };
        let now = self.now;
        match self.live_mut(*worker) {
            Some(worker) => {
                worker.record_sign_of_life(now);
                worker.excused_silences = 0;
            }
            None => self.coverage.see("stale message"),
        }
    }

    fn alive_at(&mut self, id: WorkerId, at: Time) {
        let (now, missed) = (self.now, self.limits.health.missed);
        let Some(worker) = self.live_mut(id).filter(|worker| at > worker.last_heard_at) else { return };
        let missed = missed.max(worker.missed_min);
        let was_watched = worker.observed_since.is_some();
        (worker.last_heard_at, worker.excused_silences) = (at.min(now), 0);
        if worker.last_heard_at + worker.heartbeat * (missed + 1) > now + worker.heartbeat / 2 {
            (worker.observed_since, worker.was_checked) = (None, false);
            if was_watched {
                self.coverage.see("alive according to the timestamp");
            }
        }
    }

    fn cpu_time_checked(&mut self, id: WorkerId, is_starved: bool) {
        let now = self.now;
        let Some(worker) = self.live_mut(id) else { return };
        if is_starved
            && worker.was_checked
            && worker.killed.is_none()
            && worker.excused_silences < FORGIVEN_MAX
        {
            worker.excused_silences += 1;
            worker.record_sign_of_life(now);
            self.step.is_excused = true;
            self.coverage.see("silence excused");
        }
    }

    /// Ends the observation of each worker that, according to its timestamps, is no longer silent.
    fn end_observations(&mut self) {
        let is_over = |worker: &&Worker| {
            let is_due = worker.observed_since.is_some_and(|at| at + worker.heartbeat <= self.now);
            is_due && !worker.was_checked && !self.is_silent(worker)
        };
        let over: Vec<u32> = self.workers.values().filter(is_over).map(|worker| worker.id.place).collect();
        for place in over {
            self.workers.entry(place).and_modify(|worker| worker.observed_since = None);
        }
    }

    // Clients.

    fn submit(&mut self, submission: &Submission<Tag>) {
        self.counters.submitted += 1;
        self.tenants.entry(submission.tenant).or_default().0 += 1;
        let cpu_time_checks =
            submission.deadline.map(|cpu_time_checks| cpu_time_checks.min(self.limits.deadline_max));
        let limit = cpu_time_checks.unwrap_or(self.limits.deadline);
        let Submission {
            priority,
            tenant,
            idempotent,
            is_resendable,
            digest,
            run_limit,
            preferred_worker,
            ..
        } = *submission;
        let own = self.limits.run_limit;
        let run_limits = [
            run_limit.map_or(own, |cpu_time_checks| {
                Some(own.map_or(cpu_time_checks, |own| own.min(cpu_time_checks)))
            }),
            own,
        ];
        let immediate_worker = self.immediate_worker(priority, tenant, preferred_worker);
        let rejection = match self.rejection(limit, priority, tenant, immediate_worker.is_some()) {
            early @ Some(Verdict::DeadlineQueued) => early,
            early if self.mode != Mode::Open => early,
            _ if self.is_quarantined(digest) => {
                // The quarantine is checked before the queue.
                self.step = Step { cause: self.step.cause, ..Step::default() };
                Some(Verdict::rejected(RejectReason::Quarantined))
            }
            other => other,
        };
        let tag = submission.record.0;
        let submitted = PendingSubmission {
            tag,
            priority,
            tenant,
            idempotent,
            is_resendable,
            digest,
            limit,
            run_limits,
            rejection,
            immediate_worker,
        };
        self.step.submission = Some(submitted);
    }

    /// Returns the worker that must run a job that arrives now, or `None` if no permit is free for the job.
    fn immediate_worker(
        &self,
        priority: Priority,
        tenant: TenantId,
        preferred: Option<WorkerId>,
    ) -> Option<WorkerId> {
        let is_admitted = !self.is_at_quota(tenant) && priority >= self.lowest_admitted();
        let preferred = preferred.filter(|worker| self.able().any(|able| able.id == *worker));
        preferred.or_else(|| self.least_loaded()).filter(|_| is_admitted)
    }

    /// Returns the reason why a job that arrives now must be rejected, or `None` if it must be accepted.
    fn rejection(
        &mut self,
        limit: Duration,
        priority: Priority,
        tenant: TenantId,
        is_immediate: bool,
    ) -> Option<Verdict> {
        let reject = |reason| Some(Verdict::rejected(reason));
        let has_share = !self.is_at_quota(tenant);
        let of_queue = self.queue.iter().filter(|id| self.jobs[id].tenant == tenant).count();
        let is_prefetched = |job: &&Job| job.is_prefetched() && !job.is_answered && job.tenant == tenant;
        let of_tenant = of_queue + self.jobs.values().filter(is_prefetched).count();
        if self.mode != Mode::Open {
            reject(RejectReason::Draining)
        } else if limit.is_zero() {
            Some(Verdict::DeadlineQueued)
        } else if self.live_slots() == 0 {
            reject(RejectReason::Unavailable)
        } else if is_immediate {
            None
        } else if self.limits.tenants.max_queue.is_some_and(|most| of_tenant >= most as usize)
            || !has_share && self.limits.max_queue == 0
        {
            reject(RejectReason::TenantQuota)
        } else if self.next_start() > Some(self.now + limit) {
            reject(RejectReason::Unavailable)
        } else if self.queue_places() >= self.queue_capacity() {
            self.make_room(priority)
        } else if self.is_pressed() && priority != Priority::Critical {
            reject(RejectReason::Backpressure)
        } else {
            None
        }
    }

    fn is_pressed(&self) -> bool {
        self.queue_places() as f64 > self.limits.pressure.reject * self.queue_capacity() as f64
    }

    /// Finds the queued job to evict so that a job with the given priority fits into a full queue. If there is none,
    /// returns the verdict with which the new job is rejected.
    fn make_room(&mut self, priority: Priority) -> Option<Verdict> {
        let lowest = self.queue.iter().map(|id| self.jobs[id].priority).min();
        if let Some(class) = lowest.filter(|&class| class < priority) {
            let newest = self.queue.iter().rev().find(|id| self.jobs[id].priority == class).copied();
            self.step.shed = newest;
            let verdict =
                newest.map(|id| (id, self.overall_verdict(id, Verdict::rejected(RejectReason::Shed))));
            self.step.required.extend(verdict);
            return None;
        }
        if self.limits.overflow == Overflow::Reject {
            return self.make_room_by_recall(priority);
        }
        let mut held: BTreeMap<TenantId, Vec<JobId>> = BTreeMap::new();
        for &id in &self.queue {
            held.entry(self.jobs[&id].tenant).or_default().push(id);
        }
        let most = held.values().map(Vec::len).max();
        let oldest = held.values().filter(|jobs| Some(jobs.len()) == most).map(|jobs| jobs[0]);
        let (evictable, others): (Vec<_>, Vec<_>) = oldest.partition(|id| self.jobs[id].priority <= priority);
        if evictable.is_empty() {
            return self.make_room_by_recall(priority);
        }
        self.step.may_be_full = !others.is_empty();
        self.step.evictable = evictable.into_iter().collect();
        None
    }

    /// Makes room for a job by recalling and rejecting a prefetched job. Called if rejecting a queued job cannot make
    /// room.
    fn make_room_by_recall(&mut self, priority: Priority) -> Option<Verdict> {
        let Some(leaving) = self.shed_prefetched(priority) else {
            return Some(Verdict::rejected(RejectReason::QueueFull));
        };
        self.coverage.see("prefetched job shed");
        self.step.shed = Some(leaving);
        let verdict = self.overall_verdict_of_waiting(leaving, Verdict::rejected(RejectReason::Shed));
        self.step.required.insert(leaving, verdict);
        None
    }

    /// Returns the earliest time at which a worker can become available. If any slot already has a worker, regardless
    /// of its state, this is the current time.
    fn next_start(&self) -> Option<Time> {
        let at_work = self.slots.iter().filter(|slot| !slot.is_spare_slot);
        let starts = at_work.filter_map(|slot| match slot.state {
            SlotState::Occupied { .. } | SlotState::Awaiting => Some(self.now),
            SlotState::Waiting { until } => Some(until),
            _ => None,
        });
        starts.min()
    }

    /// Records that a submitted job was accepted.
    pub(super) fn submitted(&mut self, taken: Option<JobId>) {
        let Some(id) = taken else { return };
        let submission = self.step.submission.take().expect("a job was accepted without a submission");
        assert_eq!(submission.rejection, None, "a job that must be rejected was accepted");
        assert!(id > self.newest_job, "a job ID was used twice");
        self.newest_job = id;
        self.step.immediate = submission.immediate_worker.map(|worker| (id, worker));
        let job = Job {
            tag: submission.tag,
            priority: submission.priority,
            tenant: submission.tenant,
            received: self.now,
            deadline_at: self.now + submission.limit,
            hard_deadline_at: self.now + submission.limit.max(self.limits.deadline),
            run_limits: submission.run_limits,
            since: self.now,
            idempotent: submission.idempotent,
            is_resendable: submission.is_resendable,
            digest: submission.digest,
            before: None,
            is_suspect: false,
            is_unread: false,
            is_by_journal: false,
            attempts: 0,
            unread_returns: 0,
            is_answered: false,
            was_fixed: false,
            is_overdue: false,
            is_oversized: false,
            queue_timeout_at: self.limits.queue_timeout.map(|kill_delay| self.now + kill_delay),
            worker: None,
            prefetched: None,
            send_number: 0,
            run_limit_expiries: 0,
            recalled_from: None,
        };
        self.jobs.insert(id, job);
        self.queue.push_back(id);
    }

    fn cancel(&mut self, id: JobId, unless_begun: bool) {
        let Some(job) = self.jobs.get(&id).filter(|job| !job.is_answered) else { return };
        let (has_worker, has_run) = (job.worker.is_some() || job.is_prefetched(), job.before.is_some());
        let (can_be_recalled, _) = self.can_be_recalled(id);
        if unless_begun && has_run {
            return self.coverage.see("continues because an attempt has crashed");
        }
        if unless_begun && has_worker && !can_be_recalled {
            return self.coverage.see("continues because it has begun");
        }
        if can_be_recalled {
            self.coverage.see("prefetched job cancelled");
        }
        let executed = if has_run || has_worker && !can_be_recalled { Executed::Yes } else { Executed::No };
        self.step.required.insert(id, Verdict::Cancelled { executed });
    }

    fn memory_exhausted(&mut self, id: JobId) {
        if self.queue.contains(&id) || self.suspects.contains(&id) {
            self.coverage.see("waiting job rejected for memory");
            let verdict = self.overall_verdict(id, Verdict::rejected(RejectReason::Overloaded));
            self.step.required.insert(id, verdict);
        }
    }

    // Time.

    fn tick(&mut self) {
        let now = self.now;
        self.replace_again();
        self.end_observations();
        self.end_waits_of_announced_start();
        if self.idle_since.zip(self.limits.idle).is_some_and(|(since, idle)| since + idle <= now) {
            self.scale_to_zero();
        }
        let is_in_time = |worker: &Worker| !worker.jobs.iter().any(|job| self.jobs[job].is_overdue);
        let were_in_time =
            self.workers.iter().filter(|(_, w)| is_in_time(w)).map(|(&place, _)| place).collect();
        let ids: Vec<JobId> = self.jobs.keys().copied().collect();
        let takeable: BTreeMap<JobId, (bool, bool)> =
            ids.into_iter().map(|id| (id, self.can_be_recalled(id))).collect();
        for (id, job) in &mut self.jobs {
            let has_run_for = |limit: Option<Duration>| limit.is_some_and(|limit| job.since + limit <= now);
            let [is_late, is_overdue] = job.run_limits.map(has_run_for);
            job.is_overdue = job.worker.is_some() && (is_overdue || job.hard_deadline_at <= now);
            if job.is_answered {
                continue;
            }
            let (can_be_recalled, is_either) = takeable[id];
            if is_either {
                self.step.ambiguous.insert(*id);
            }
            let is_waiting = job.worker.is_none() && !job.is_prefetched() || can_be_recalled;
            // The run limit restarts with the next dispatch.
            let is_late = is_late && (!can_be_recalled || !job.is_resendable);
            let queue_timeout_at = job.queue_timeout_at.filter(|_| job.before.is_none());
            let has_permit = job.worker.is_some();
            let verdict = if job.deadline_at <= now || (has_permit && is_late) {
                match (is_waiting, &job.before) {
                    (false, _) => Verdict::DeadlineRunning,
                    (true, Some(crash)) => crash.clone(),
                    (true, None) => Verdict::DeadlineQueued,
                }
            } else if is_waiting && !has_permit && queue_timeout_at.is_some_and(|at| at <= now) {
                Verdict::rejected(RejectReason::QueueTimeout)
            } else {
                continue;
            };
            self.step.required.insert(*id, verdict);
        }
        self.shorten_kill_time(&were_in_time);
    }

    // Workers.

    fn spawned(&mut self, id: WorkerId, pid: u32) {
        let hello_by = self.now + self.limits.start.handshake;
        self.live_mut(id).into_iter().for_each(|worker| worker.pid = Some(pid));
        if let Some(worker) = self.live_mut(id)
            && worker.phase == Phase::Spawned
            && worker.killed.is_none()
        {
            worker.hello_by = hello_by;
        }
    }

    fn hello(&mut self, id: WorkerId, capabilities: Capabilities, has_journal: bool) {
        let (until, most) = (self.now + self.limits.start.ready, self.limits.max_in_flight);
        let Health { heartbeat, missed } = self.limits.health;
        if let Some(worker) = self.live_mut(id)
            && worker.phase == Phase::Spawned
            && worker.killed.is_none()
        {
            worker.phase = Phase::Initializing { until };
            worker.has_dispatch_thread = capabilities.has_dispatch_thread;
            worker.can_resize = capabilities.can_resize;
            worker.has_journal = has_journal;
            worker.sent_max_in_flight = most;
            worker.heartbeat = heartbeat;
            worker.missed_min = if missed < RARE_HEARTBEATS_MISSED { 0 } else { RARE_HEARTBEATS_MISSED };
        }
    }

    fn extend_start(&mut self, id: WorkerId, more: Duration) {
        let extended = self.now + more.min(self.limits.start.ready);
        if let Some(worker) = self.live_mut(id)
            && let Phase::Initializing { until } = &mut worker.phase
            && extended > *until
        {
            *until = extended;
            self.coverage.see("start extended");
        }
    }

    fn ready(&mut self, id: WorkerId) {
        let now = self.now;
        let Some(worker) = self.live_mut(id) else { return };
        if worker.killed.is_some() || !matches!(worker.phase, Phase::Initializing { .. }) {
            return;
        }
        worker.phase = Phase::Ready;
        worker.ready_at = Some(now);
        let slot = worker.slot;
        if let SlotState::Occupied { current, successor } = self.slots[slot as usize].state
            && successor == Some(id.place)
            && !self.has_jobs_left(current, id.place)
        {
            let replaced = current;
            self.slots[slot as usize].state = SlotState::Occupied { current: id.place, successor: None };
            let is_killed = |worker: &Worker| worker.killed.is_some();
            let replaced = self.workers.get_mut(&replaced).filter(|worker| is_killed(worker));
            if let Some(replaced) = replaced {
                replaced.killed_before_replacement = true;
                self.coverage.see("killed before replacement");
            }
        }
    }

    fn replied(&mut self, id: WorkerId, job: JobId, reply: &Reply) {
        let held = self.live(id).and_then(|worker| worker.jobs.iter().position(|&j| j == job));
        let Some(at) = held else {
            self.kill_for_invalid_reply(id, job);
            self.coverage.see("reply without a job");
            self.counters.late_replies += 1;
            return;
        };
        let now = self.now;
        if let Some(worker) = self.live_mut(id) {
            worker.jobs.swap_remove(at);
            worker.served += 1;
            if let Phase::Draining { idle_since } = &mut worker.phase
                && worker.jobs.is_empty()
                && worker.prefetched.is_empty()
            {
                *idle_since = Some(now);
            }
        }
        self.end_of_reply(id, job, reply);
        self.begin_prefetched(id);
    }

    fn end_of_reply(&mut self, _id: WorkerId, job: JobId, reply: &Reply) {
        if matches!(reply, Reply::ProgramCrashed { .. }) {
            self.crashed_as_only_job(job);
        }
        if self.jobs[&job].is_oversized {
            self.coverage.see("oversized result ended");
            self.jobs.remove(&job);
            return;
        }
        if self.jobs[&job].is_answered {
            self.coverage.see("late reply");
            self.counters.late_replies += 1;
            self.jobs.remove(&job);
            return;
        }
        let verdict = match reply {
            Reply::Ok => Verdict::Ok,
            Reply::Failed(failure) => Verdict::Failed(failure.clone()),
            Reply::ProgramCrashed { death, .. } => {
                self.allow_retry(job, false);
                verdict_of(*death, None)
            }
        };
        self.step.required.insert(job, verdict);
    }

    /// Records that the bulkhead must report a failure for a job with an oversized result. The worker still holds the
    /// job.
    fn oversized(&mut self, id: WorkerId, job: JobId, failure: &HandlerFailure) {
        let is_held = self.live(id).is_some_and(|worker| worker.jobs.contains(&job));
        let Some(entry) = self.jobs.get_mut(&job).filter(|job| is_held && !job.is_answered) else { return };
        self.coverage.see("oversized");
        entry.is_oversized = true;
        self.step.required.insert(job, Verdict::Failed(failure.clone()));
    }

    fn extend_kill_time(&mut self, id: WorkerId) {
        let Some(worker) = self.live(id) else { return };
        if worker.killed_at.is_some() && self.is_sending(worker) {
            let killed_at = self.now + self.kill_delay(worker);
            self.coverage.see("oversized result continues");
            self.live_mut(id).into_iter().for_each(|worker| worker.killed_at = Some(killed_at));
        }
    }

    /// Limits the remaining lifetime of each worker that now has an overdue job and had none before. The maximum is
    /// `grace`.
    fn shorten_kill_time(&mut self, were_in_time: &BTreeSet<u32>) {
        let at = self.now + self.limits.grace;
        for (place, worker) in &mut self.workers {
            if were_in_time.contains(place) && worker.jobs.iter().any(|job| self.jobs[job].is_overdue) {
                worker.killed_at = worker.killed_at.map(|killed_at| killed_at.min(at));
            }
        }
    }

    fn unread(&mut self, id: WorkerId, job: JobId, is_by_journal: bool) {
        // The worker's own record is trusted only once per job.
        if is_by_journal && self.jobs.get(&job).is_some_and(|job| job.unread_returns > 0) {
            return;
        }
        if self.live(id).is_some_and(|worker| worker.jobs.contains(&job)) {
            self.live_mut(id).into_iter().for_each(|worker| worker.has_journal = false);
            self.jobs.entry(job).and_modify(|job| (job.is_unread, job.is_by_journal) = (true, is_by_journal));
        }
    }

    fn exited(&mut self, id: WorkerId, death: Death) {
        let Some(worker) = self.live(id) else { return };
        let (jobs, killed) = (worker.jobs.clone(), worker.killed.clone());
        let was_ready = worker.ready_at.is_some();
        let is_ours = matches!(
            killed,
            Some(
                KillReason::Deadline
                    | KillReason::ExitTimeout
                    | KillReason::KeeperDied
                    | KillReason::NotNeeded
            )
        );
        let is_failure = !is_ours && (!was_ready || (jobs.is_empty() && worker.served == 0));
        let is_clean = killed.is_none() && death == Death::Exit(0) && jobs.is_empty() && was_ready;
        let is_early_death =
            (!is_ours || killed == Some(KillReason::Deadline)) && !is_failure && worker.served == 0;
        let verdict = verdict_of(death, killed.as_ref());
        self.withhold(id, killed.as_ref());
        let (mut unread, begun): (Vec<_>, Vec<_>) = jobs.into_iter().partition(|id| self.jobs[id].is_unread);
        unread.sort();
        let is_crash = !matches!(
            killed,
            Some(
                KillReason::Deadline
                    | KillReason::ExitTimeout
                    | KillReason::KeeperDied
                    | KillReason::NoHello
                    | KillReason::NotReady
                    | KillReason::NotNeeded
            )
        );
        if let &[job] = &begun[..]
            && is_crash
            && unread.iter().all(|id| !self.jobs[id].is_by_journal)
        {
            self.crashed_as_only_job(job);
        }
        // Iterates in reverse order, so that the oldest job comes first in the queue.
        for &job in unread.iter().rev() {
            if self.can_be_requeued(job) {
                self.coverage.see(if begun.is_empty() {
                    "unread job requeued"
                } else {
                    "unread job requeued beside others"
                });
                self.requeue(job);
                self.jobs.entry(job).and_modify(|job| {
                    (job.worker, job.is_unread, job.is_by_journal) = (None, false, false);
                    job.attempts -= 1;
                    job.unread_returns += 1;
                    job.queue_timeout_at = None;
                });
            } else {
                self.job_lost(job, false, &verdict);
            }
        }
        begun.into_iter().for_each(|job| self.job_lost(job, is_crash, &verdict));
        self.requeue_prefetched(id.place, &verdict);
        self.worker_dead(id, Dead { is_failure, lacks_id: false, is_clean, is_early_death });
    }

    fn job_lost(&mut self, job: JobId, is_suspect: bool, verdict: &Verdict) {
        if self.jobs[&job].is_answered {
            self.jobs.remove(&job);
        } else {
            self.allow_retry(job, is_suspect);
            self.step.required.insert(job, verdict.clone());
        }
    }

    fn can_be_requeued(&self, job: JobId) -> bool {
        let job = &self.jobs[&job];
        let may_wait = self.mode == Mode::Open && self.live_slots() > 0;
        may_wait && !job.is_answered && job.is_resendable && job.unread_returns < UNREAD_ATTEMPTS_MAX
    }

    // Operator commands.

    fn restart(&mut self) {
        self.step.is_restarted = true;
        self.rolling = (0..self.slots.len() as u32).collect();
        self.is_restarting = true;
        let now = self.now;
        for worker in self.workers.values_mut() {
            (worker.is_outdated, worker.next_replacement_at) = (true, now);
        }
    }

    /// Records that the bulkhead's program has changed. All current workers run the old program.
    fn replace(&mut self) {
        self.restart();
        for worker in self.workers.values_mut() {
            (worker.has_old_program, worker.retry_replacement_at) = (true, None);
        }
        self.reset();
    }

    fn drain(&mut self) {
        if self.mode == Mode::Open {
            self.coverage.see("drain");
            self.mode = Mode::Draining;
            self.reject_queue(RejectReason::Draining);
        }
    }

    fn resume(&mut self) {
        if self.mode == Mode::Draining {
            self.coverage.see("resume");
            self.mode = Mode::Open;
        }
    }

    fn stop(&mut self, by: Time) {
        self.mode = Mode::Stopping { by };
        self.rolling.clear();
        self.reject_queue(RejectReason::Draining);
        for slot in &mut self.slots {
            if !matches!(slot.state, SlotState::Occupied { .. }) {
                slot.state = SlotState::Empty;
            }
        }
    }

    pub(super) fn reject_queue(&mut self, reason: RejectReason) {
        for &job in self.queue.iter().chain(&self.suspects) {
            let verdict = self.overall_verdict(job, Verdict::rejected(reason));
            self.step.required.insert(job, verdict);
        }
    }
}

fn cause(event: &Event<Tag>) -> Cause {
    match event {
        Event::Start => Cause::Start,
        Event::Tick => Cause::Tick,
        Event::Replied { worker, .. } => Cause::Replied(*worker),
        Event::CpuTimeChecked { worker, .. } => Cause::CpuTimeChecked(*worker),
        Event::Memory { worker, rss_bytes } if *rss_bytes > crate::support::settings::RSS_LIMIT_BYTES => {
            Cause::Memory(*worker)
        }
        Event::ProtocolViolated { worker, .. } => Cause::ProtocolViolated(*worker),
        Event::Stopping { worker } => Cause::Stopping(*worker),
        Event::Reset => Cause::Reset,
        Event::Stop { .. } => Cause::Stop,
        Event::ChangeLimits(_) => Cause::Resize,
        Event::ReplaceWorkers => Cause::Replace,
        _ => Cause::Other,
    }
}

fn event_name(event: &Event<Tag>) -> &'static str {
    match event {
        Event::SupervisorPaused => "event SupervisorPaused",
        Event::Reset => "event Reset",
        Event::Restart => "event Restart",
        Event::Reconfigure(_) => "event Reconfigure",
        Event::ReplaceWorkers => "event ReplaceWorkers",
        Event::Stopping { .. } => "event Stopping",
        Event::Cancel { .. } => "event Cancel",
        Event::MemoryExhausted { .. } => "event MemoryExhausted",
        Event::Stop { .. } => "event Stop",
        _ => "event",
    }
}

/// Returns the verdict for the jobs of a worker that has died.
fn verdict_of(death: Death, killed: Option<&KillReason>) -> Verdict {
    match (killed, death) {
        (None, Death::Exit(status)) => crashed(CrashReason::Exit, Some(status)),
        (None, Death::Signal(signal)) => crashed(CrashReason::Signal, Some(signal)),
        (None, Death::Violation(_)) => crashed(CrashReason::Violation, None),
        (None, Death::Oom) => crashed(CrashReason::Oom, None),
        (None, Death::TmpFull) => crashed(CrashReason::Violation, None),
        (Some(KillReason::Hung), _) => crashed(CrashReason::Hung, None),
        (Some(KillReason::Protocol(_)), _) => crashed(CrashReason::Protocol, None),
        (Some(KillReason::ExitTimeout), _) => crashed(CrashReason::Stopped, None),
        (Some(KillReason::KeeperDied), _) => crashed(CrashReason::Signal, Some(9)),
        (Some(_), _) => crashed(CrashReason::Collateral, None),
    }
}

fn crashed(reason: CrashReason, status: Option<i32>) -> Verdict {
    Verdict::Crashed { reason, status, message: String::new() }
}
