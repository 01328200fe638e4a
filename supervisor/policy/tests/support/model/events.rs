//! Effect of each event on the model.

use std::time::Duration;

use std::collections::{BTreeMap, BTreeSet};

use bulkhead_policy::{
    Abilities, Death, Event, KillReason, Overflow, Reply, Submission, TenantId, Time, WorkerId,
};
use bulkhead_shared::{CrashReason, Executed, HandlerFailure, JobId, Priority, RejectReason, Verdict};

use super::recovery;
use super::slots::SlotState;
use super::{Cause, Dead, Job, Mode, Model, Phase, Step, Submitted, Worker};
use crate::support::Tag;

/// Number of workers that may die with a job unread before the job is no longer requeued.
const UNREAD_ATTEMPTS_MAX: u32 = 3;

/// Number of consecutive silences that are blamed on the machine.
const FORGIVEN_MAX: u32 = 20;

impl Worker {
    fn hear(&mut self, now: Time) {
        (self.heard_at, self.watched_at, self.was_looked_at) = (now, None, false);
    }
}

impl Model {
    /// Records an event before policy handles it.
    pub(crate) fn happened(&mut self, now: Time, event: &Event<Tag>) {
        self.now = now;
        self.registry.next_step();
        self.in_use_before = self.permits().0;
        self.reserve_before = self.reserve();
        self.step = Step { cause: cause(event), ..Step::default() };
        self.coverage.see(event_name(event));
        if !matches!(event, Event::Submit(_)) {
            let before = self.withheld.len();
            self.withheld.retain(|&(.., until)| until > now);
            if self.withheld.len() < before {
                self.coverage.see("place given back for its age");
            }
        }
        match event {
            Event::Start => self.start(),
            Event::Rest => self.rest(),
            Event::Await => self.wait_for_start(),
            Event::Reset => self.poison = recovery::Poison::default(),
            Event::Spawned { worker, pid } => self.spawned(*worker, *pid),
            Event::Stopping { worker } => self.stopping(*worker),
            Event::Heard { worker } => self.sends_on(*worker),
            Event::WasAlive { worker, at } => self.was_alive(*worker, *at),
            Event::Oversized { worker, job, failure } => self.oversized(*worker, *job, failure),
            Event::ChangeTenant { .. } => {}
            Event::ForceBreaker { .. } => {}
            Event::Lost { worker } => {
                let is_dead =
                    self.workers.get(&worker.place).is_some_and(|w| w.id == *worker && w.dead.is_some());
                self.coverage.see(if is_dead { "lost while it is swept" } else { "lost" });
                if let Some(worker) = self.live_mut(*worker) {
                    worker.killed = Some(KillReason::KeeperDied);
                }
                self.exited(*worker, Death::Signal(9));
                self.swept(*worker);
            }
            Event::Change(change) => self.change(*change),
            Event::Reconfigure(limits) => self.reconfigure(limits),
            Event::Replace => self.replace(),
            Event::Memory { .. } | Event::Broke { .. } | Event::Said { .. } => {}
            Event::Tick => self.tick(),
            Event::Submit(submission) => self.submit(submission),
            Event::Cancel { job, unless_begun } => self.cancel(*job, *unless_begun),
            Event::GiveUp { job } => self.give_up(*job),
            Event::SpawnFailed { worker, .. } => {
                self.coverage.see("spawn failed");
                if self.live(*worker).is_some() {
                    let dead = Dead { is_unfit: true, is_clean: false, is_in_vain: false };
                    self.worker_gone(*worker, dead);
                }
            }
            Event::Hello { worker, can, claims } => self.hello(*worker, *can, claims.is_some()),
            Event::Returned { worker, job, arrival } => self.returned(*worker, *job, *arrival),
            Event::ExtendStart { worker, more } => self.extend_start(*worker, *more),
            Event::Ready { worker } => self.ready(*worker),
            Event::Replied { worker, job, reply } => self.replied(*worker, *job, reply),
            Event::Unread { worker, job } => self.unread(*worker, *job, false),
            Event::Unbegun { worker, job } => self.unread(*worker, *job, true),
            Event::Exited { worker, death } => self.exited(*worker, *death),
            Event::Swept { worker } => self.swept(*worker),
            Event::HeldUp => self.workers.values_mut().for_each(|worker| worker.hear(now)),
            Event::Looked { worker, is_starved } => self.looked(*worker, *is_starved),
            Event::Restart => self.restart(),
            Event::Drain => self.drain(),
            Event::Resume => self.resume(),
            Event::Stop { by } => self.stop(*by),
        }
        self.hear(event);
        if matches!(event, Event::Reset) {
            self.reset();
        }
    }

    /// Records a sign of life for every event that comes from a worker.
    fn hear(&mut self, event: &Event<Tag>) {
        let (Event::Spawned { worker, .. }
        | Event::Hello { worker, .. }
        | Event::ExtendStart { worker, .. }
        | Event::Ready { worker }
        | Event::Heard { worker }
        | Event::Said { worker, .. }
        | Event::Replied { worker, .. }
        | Event::Returned { worker, .. }
        | Event::Oversized { worker, .. }
        | Event::Broke { worker, .. }
        | Event::Stopping { worker }) = event
        else {
            return;
        };
        let now = self.now;
        match self.live_mut(*worker) {
            Some(worker) => {
                worker.hear(now);
                worker.forgiven = 0;
            }
            None => self.coverage.see("ghost"),
        }
    }

    fn was_alive(&mut self, id: WorkerId, at: Time) {
        let (now, missed) = (self.now, self.limits.health.missed);
        let Some(worker) = self.live_mut(id).filter(|worker| at > worker.heard_at) else { return };
        let was_watched = worker.watched_at.is_some();
        (worker.heard_at, worker.forgiven) = (at.min(now), 0);
        if worker.heard_at + worker.heartbeat * (missed + 1) > now + worker.heartbeat / 2 {
            (worker.watched_at, worker.was_looked_at) = (None, false);
            if was_watched {
                self.coverage.see("was alive");
            }
        }
    }

    fn looked(&mut self, id: WorkerId, is_starved: bool) {
        let now = self.now;
        let Some(worker) = self.live_mut(id) else { return };
        if is_starved && worker.was_looked_at && worker.killed.is_none() && worker.forgiven < FORGIVEN_MAX {
            worker.forgiven += 1;
            worker.hear(now);
            self.step.is_forgiven = true;
            self.coverage.see("forgiven");
        }
    }

    // Clients.

    fn submit(&mut self, submission: &Submission<Tag>) {
        self.counters.submitted += 1;
        let asked = submission.deadline.map(|asked| asked.min(self.limits.deadline_max));
        let limit = asked.unwrap_or(self.limits.deadline);
        let Submission { priority, tenant, idempotent, is_repeatable, digest, run_limit, prefers, .. } =
            *submission;
        let own = self.limits.run_limit;
        let run_limits = [run_limit.map_or(own, |asked| Some(own.map_or(asked, |own| own.min(asked)))), own];
        let refusal = match self.refusal(limit, priority, tenant) {
            early @ Some(Verdict::DeadlineQueued) => early,
            early if self.mode != Mode::Open => early,
            _ if self.is_quarantined(digest) => {
                // Quarantine is checked before the queue.
                self.step = Step { cause: self.step.cause, ..Step::default() };
                Some(Verdict::rejected(RejectReason::Quarantined))
            }
            other => other,
        };
        let tag = submission.cargo.0;
        let submitted = Submitted {
            tag,
            priority,
            tenant,
            idempotent,
            is_repeatable,
            digest,
            limit,
            run_limits,
            refusal,
            prefers,
        };
        self.step.submission = Some(submitted);
    }

    /// Returns the reason for rejecting a job that arrives now, or `None` if the job is accepted.
    fn refusal(&mut self, limit: Duration, priority: Priority, tenant: TenantId) -> Option<Verdict> {
        let reject = |reason| Some(Verdict::rejected(reason));
        let has_share = !self.is_at_its_share(tenant);
        let of_queue = self.queue.iter().filter(|id| self.jobs[id].tenant == tenant).count();
        let is_ahead = |job: &&Job| job.is_ahead() && !job.is_answered && job.tenant == tenant;
        let of_tenant = of_queue + self.jobs.values().filter(is_ahead).count();
        if self.mode != Mode::Open {
            reject(RejectReason::Draining)
        } else if limit.is_zero() {
            Some(Verdict::DeadlineQueued)
        } else if self.live_slots() == 0 {
            reject(RejectReason::Unavailable)
        } else if has_share && priority >= self.lowest_admitted() && self.least_loaded().is_some() {
            None
        } else if self.limits.tenants.max_queue.is_some_and(|most| of_tenant >= most as usize)
            || !has_share && self.queue_capacity() == 0
        {
            reject(RejectReason::TenantQuota)
        } else if self.next_start() > Some(self.now + limit) {
            reject(RejectReason::Unavailable)
        } else if self.places_taken() >= self.queue_capacity() {
            self.make_room(priority)
        } else if self.is_pressed() && priority != Priority::Critical {
            reject(RejectReason::Backpressure)
        } else {
            None
        }
    }

    fn is_pressed(&self) -> bool {
        self.places_taken() as f64 > self.limits.pressure.reject * self.queue_capacity() as f64
    }

    /// Determines the job that must leave a full queue for a job of this priority. Returns the rejection if
    /// there is none.
    fn make_room(&mut self, priority: Priority) -> Option<Verdict> {
        let lowest = self.queue.iter().map(|id| self.jobs[id].priority).min();
        if let Some(class) = lowest.filter(|&class| class < priority) {
            let newest = self.queue.iter().rev().find(|id| self.jobs[id].priority == class).copied();
            self.step.shed = newest;
            let verdict = newest.map(|id| (id, self.told(id, Verdict::rejected(RejectReason::Shed))));
            self.step.owed.extend(verdict);
            return None;
        }
        if self.limits.overflow == Overflow::Reject {
            return self.make_room_ahead(priority);
        }
        let mut held: BTreeMap<TenantId, Vec<JobId>> = BTreeMap::new();
        for &id in &self.queue {
            held.entry(self.jobs[&id].tenant).or_default().push(id);
        }
        let most = held.values().map(Vec::len).max();
        let oldest = held.values().filter(|jobs| Some(jobs.len()) == most).map(|jobs| jobs[0]);
        let (evictable, others): (Vec<_>, Vec<_>) = oldest.partition(|id| self.jobs[id].priority <= priority);
        if evictable.is_empty() {
            return self.make_room_ahead(priority);
        }
        self.step.may_be_full = !others.is_empty();
        self.step.evictable = evictable.into_iter().collect();
        None
    }

    /// Determines the prefetched job that must leave, if no queued job can.
    fn make_room_ahead(&mut self, priority: Priority) -> Option<Verdict> {
        let Some(leaving) = self.shed_ahead(priority) else {
            return Some(Verdict::rejected(RejectReason::QueueFull));
        };
        self.coverage.see("shed ahead");
        self.step.shed = Some(leaving);
        let verdict = self.told_waiting(leaving, Verdict::rejected(RejectReason::Shed));
        self.step.owed.insert(leaving, verdict);
        None
    }

    /// Returns the earliest time at which a worker may be available, which is now if a worker exists in any
    /// state.
    fn next_start(&self) -> Option<Time> {
        let at_work = self.slots.iter().filter(|slot| !slot.is_reserve);
        let starts = at_work.filter_map(|slot| match slot.state {
            SlotState::Held { .. } | SlotState::Awaiting => Some(self.now),
            SlotState::Waiting { until } => Some(until),
            _ => None,
        });
        starts.min()
    }

    /// Records the acceptance of a submission.
    pub(super) fn submitted(&mut self, taken: Option<JobId>) {
        let Some(id) = taken else { return };
        let submission = self.step.submission.take().expect("a job came from nowhere");
        assert_eq!(submission.refusal, None, "taken, though it should have been refused");
        assert!(id > self.newest_job, "a job's number was used twice");
        self.newest_job = id;
        self.step.preferred = submission.prefers.map(|worker| (id, worker));
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
            is_repeatable: submission.is_repeatable,
            digest: submission.digest,
            before: None,
            is_suspect: false,
            is_unread: false,
            is_by_word: false,
            attempts: 0,
            taken_back: 0,
            is_answered: false,
            is_overdue: false,
            is_oversized: false,
            patience_until: self.limits.queue_timeout.map(|patience| self.now + patience),
            worker: None,
            ahead: None,
            arrival: 0,
            taken_from: None,
        };
        self.jobs.insert(id, job);
        self.queue.push_back(id);
    }

    fn cancel(&mut self, id: JobId, unless_begun: bool) {
        let Some(job) = self.jobs.get(&id).filter(|job| !job.is_answered) else { return };
        let (has_worker, has_run) = (job.worker.is_some() || job.is_ahead(), job.before.is_some());
        let (can_be_taken, _) = self.can_be_taken(id);
        if unless_begun && has_worker && !can_be_taken {
            return self.coverage.see("goes on since it has begun");
        }
        if can_be_taken {
            self.coverage.see("cancelled ahead");
        }
        let executed = if has_run || has_worker && !can_be_taken { Executed::Yes } else { Executed::No };
        self.step.owed.insert(id, Verdict::Cancelled { executed });
    }

    fn give_up(&mut self, id: JobId) {
        if self.queue.contains(&id) || self.suspects.contains(&id) {
            self.coverage.see("waiting job given up");
            let verdict = self.told(id, Verdict::rejected(RejectReason::Overloaded));
            self.step.owed.insert(id, verdict);
        }
    }

    // Time.

    fn tick(&mut self) {
        let now = self.now;
        self.replace_again();
        if self.idle_since.zip(self.limits.idle).is_some_and(|(since, idle)| since + idle <= now) {
            self.rest();
        }
        let is_in_time = |worker: &Worker| !worker.jobs.iter().any(|job| self.jobs[job].is_overdue);
        let were_in_time =
            self.workers.iter().filter(|(_, w)| is_in_time(w)).map(|(&place, _)| place).collect();
        let ids: Vec<JobId> = self.jobs.keys().copied().collect();
        let takeable: BTreeMap<JobId, (bool, bool)> =
            ids.into_iter().map(|id| (id, self.can_be_taken(id))).collect();
        for (id, job) in &mut self.jobs {
            let has_run_for = |limit: Option<Duration>| limit.is_some_and(|limit| job.since + limit <= now);
            let [is_late, is_overdue] = job.run_limits.map(has_run_for);
            job.is_overdue = job.worker.is_some() && (is_overdue || job.hard_deadline_at <= now);
            if job.is_answered {
                continue;
            }
            let (can_be_taken, is_either) = takeable[id];
            if is_either {
                self.step.either.insert(*id);
            }
            let is_waiting = job.worker.is_none() && !job.is_ahead() || can_be_taken;
            // The run limit starts again with the next dispatch.
            let is_late = is_late && (!can_be_taken || !job.is_repeatable);
            let patience_until = job.patience_until.filter(|_| job.before.is_none());
            let has_permit = job.worker.is_some();
            let verdict = if job.deadline_at <= now || (has_permit && is_late) {
                match (is_waiting, &job.before) {
                    (false, _) => Verdict::DeadlineRunning,
                    (true, Some(crash)) => crash.clone(),
                    (true, None) => Verdict::DeadlineQueued,
                }
            } else if is_waiting && !has_permit && patience_until.is_some_and(|at| at <= now) {
                Verdict::rejected(RejectReason::QueueTimeout)
            } else {
                continue;
            };
            self.step.owed.insert(*id, verdict);
        }
        self.hurry(&were_in_time);
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

    fn hello(&mut self, id: WorkerId, can: Abilities, has_claims: bool) {
        let (until, most) = (self.now + self.limits.start.ready, self.limits.max_in_flight);
        let heartbeat = self.limits.health.heartbeat;
        if let Some(worker) = self.live_mut(id)
            && worker.phase == Phase::Spawned
            && worker.killed.is_none()
        {
            worker.phase = Phase::Initializing { until };
            worker.has_dispatch_thread = can.has_dispatch_thread;
            worker.can_resize = can.can_resize;
            worker.has_claims = has_claims;
            worker.promised = most;
            worker.heartbeat = heartbeat;
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
        if let SlotState::Held { current, successor } = self.slots[slot as usize].state
            && successor == Some(id.place)
            && !self.has_turns_left(current, id.place)
        {
            let replaced = current;
            self.slots[slot as usize].state = SlotState::Held { current: id.place, successor: None };
            let is_killed = |worker: &Worker| worker.killed.is_some();
            let replaced = self.workers.get_mut(&replaced).filter(|worker| is_killed(worker));
            if let Some(replaced) = replaced {
                replaced.is_written_off = true;
                self.coverage.see("written off");
            }
        }
    }

    fn replied(&mut self, id: WorkerId, job: JobId, reply: &Reply) {
        let held = self.live(id).and_then(|worker| worker.jobs.iter().position(|&j| j == job));
        let Some(at) = held else {
            self.answers_without_right(id, job);
            self.coverage.see("reply for nothing");
            self.counters.late_replies += 1;
            return;
        };
        let now = self.now;
        if let Some(worker) = self.live_mut(id) {
            worker.jobs.swap_remove(at);
            worker.served += 1;
            if let Phase::Draining { idle_since } = &mut worker.phase
                && worker.jobs.is_empty()
                && worker.ahead.is_empty()
            {
                *idle_since = Some(now);
            }
        }
        self.end_of_reply(id, job, reply);
        self.begin_ahead(id);
    }

    fn end_of_reply(&mut self, _id: WorkerId, job: JobId, reply: &Reply) {
        if matches!(reply, Reply::ProgramCrashed { .. }) {
            self.crashed_alone(job);
        }
        if self.jobs[&job].is_oversized {
            self.coverage.see("oversized and ended");
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
                self.may_be_retried(job, false);
                verdict_of(*death, None)
            }
        };
        self.step.owed.insert(job, verdict);
    }

    /// The client is answered now. The worker keeps the job.
    fn oversized(&mut self, id: WorkerId, job: JobId, failure: &HandlerFailure) {
        let is_held = self.live(id).is_some_and(|worker| worker.jobs.contains(&job));
        let Some(entry) = self.jobs.get_mut(&job).filter(|job| is_held && !job.is_answered) else { return };
        self.coverage.see("oversized");
        entry.is_oversized = true;
        self.step.owed.insert(job, Verdict::Failed(failure.clone()));
    }

    fn sends_on(&mut self, id: WorkerId) {
        let Some(worker) = self.live(id) else { return };
        if worker.killed_at.is_some() && self.is_sending(worker) {
            let killed_at = self.now + self.patience(worker);
            self.coverage.see("oversized and goes on");
            self.live_mut(id).into_iter().for_each(|worker| worker.killed_at = Some(killed_at));
        }
    }

    /// Limits the remaining time to `grace` for workers whose first job has just become overdue.
    fn hurry(&mut self, were_in_time: &BTreeSet<u32>) {
        let at = self.now + self.limits.grace;
        for (place, worker) in &mut self.workers {
            if were_in_time.contains(place) && worker.jobs.iter().any(|job| self.jobs[job].is_overdue) {
                worker.killed_at = worker.killed_at.map(|killed_at| killed_at.min(at));
            }
        }
    }

    fn unread(&mut self, id: WorkerId, job: JobId, is_by_word: bool) {
        // The worker's own record is believed once per job.
        if is_by_word && self.jobs.get(&job).is_some_and(|job| job.taken_back > 0) {
            return;
        }
        if self.live(id).is_some_and(|worker| worker.jobs.contains(&job)) {
            self.live_mut(id).into_iter().for_each(|worker| worker.has_claims = false);
            self.jobs.entry(job).and_modify(|job| (job.is_unread, job.is_by_word) = (true, is_by_word));
        }
    }

    fn exited(&mut self, id: WorkerId, death: Death) {
        let Some(worker) = self.live(id) else { return };
        let (jobs, killed) = (worker.jobs.clone(), worker.killed.clone());
        let was_ready = worker.ready_at.is_some();
        let is_ours = matches!(
            killed,
            Some(KillReason::Deadline | KillReason::Overdue | KillReason::KeeperDied | KillReason::Unwanted)
        );
        let is_unfit = !is_ours && (!was_ready || (jobs.is_empty() && worker.served == 0));
        let is_clean = killed.is_none() && death == Death::Exit(0) && jobs.is_empty() && was_ready;
        let is_in_vain =
            (!is_ours || killed == Some(KillReason::Deadline)) && !is_unfit && worker.served == 0;
        let verdict = verdict_of(death, killed.as_ref());
        self.withhold(id, killed.as_ref());
        let (mut unread, begun): (Vec<_>, Vec<_>) = jobs.into_iter().partition(|id| self.jobs[id].is_unread);
        unread.sort();
        let is_crash = !matches!(
            killed,
            Some(
                KillReason::Deadline
                    | KillReason::Overdue
                    | KillReason::KeeperDied
                    | KillReason::NoHello
                    | KillReason::NotReady
                    | KillReason::Unwanted
            )
        );
        if let &[job] = &begun[..]
            && is_crash
            && unread.iter().all(|id| !self.jobs[id].is_by_word)
        {
            self.crashed_alone(job);
        }
        // Reverse order, so that the oldest job ends up first.
        for &job in unread.iter().rev() {
            if self.may_be_given_again(job) {
                self.coverage.see(if begun.is_empty() {
                    "taken back unread"
                } else {
                    "taken back beside others"
                });
                self.wait_again(job);
                self.jobs.entry(job).and_modify(|job| {
                    (job.worker, job.is_unread, job.is_by_word) = (None, false, false);
                    job.attempts -= 1;
                    job.taken_back += 1;
                });
            } else {
                self.lost(job, false, &verdict);
            }
        }
        begun.into_iter().for_each(|job| self.lost(job, is_crash, &verdict));
        self.take_ahead_back(id.place);
        self.worker_dead(id, Dead { is_unfit, is_clean, is_in_vain });
    }

    fn lost(&mut self, job: JobId, is_suspect: bool, verdict: &Verdict) {
        if self.jobs[&job].is_answered {
            self.jobs.remove(&job);
        } else {
            self.may_be_retried(job, is_suspect);
            self.step.owed.insert(job, verdict.clone());
        }
    }

    fn may_be_given_again(&self, job: JobId) -> bool {
        let job = &self.jobs[&job];
        let may_wait = self.mode == Mode::Open && self.live_slots() > 0;
        may_wait && !job.is_answered && job.is_repeatable && job.taken_back < UNREAD_ATTEMPTS_MAX
    }

    // Operator commands.

    fn restart(&mut self) {
        self.step.is_restarted = true;
        self.rolling = (0..self.slots.len() as u32).collect();
        let now = self.now;
        self.workers.values_mut().for_each(|worker| worker.no_successor_before = now);
    }

    /// New workers run another program.
    fn replace(&mut self) {
        self.step.is_replaced = true;
        self.restart();
        for worker in self.workers.values_mut() {
            (worker.is_old, worker.replaced_again_at) = (true, None);
        }
        self.reset();
    }

    fn drain(&mut self) {
        if self.mode == Mode::Open {
            self.coverage.see("drain");
            self.mode = Mode::Draining;
            self.owe_the_queue(RejectReason::Draining);
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
        self.owe_the_queue(RejectReason::Draining);
        for slot in &mut self.slots {
            if !matches!(slot.state, SlotState::Held { .. }) {
                slot.state = SlotState::Empty;
            }
        }
    }

    pub(super) fn owe_the_queue(&mut self, reason: RejectReason) {
        for &job in self.queue.iter().chain(&self.suspects) {
            let verdict = self.told(job, Verdict::rejected(reason));
            self.step.owed.insert(job, verdict);
        }
    }
}

fn cause(event: &Event<Tag>) -> Cause {
    match event {
        Event::Start => Cause::Start,
        Event::Tick => Cause::Tick,
        Event::Replied { worker, .. } => Cause::Replied(*worker),
        Event::Looked { worker, .. } => Cause::Looked(*worker),
        Event::Memory { worker, rss_bytes } if *rss_bytes > crate::support::settings::RSS_LIMIT_BYTES => {
            Cause::Memory(*worker)
        }
        Event::Broke { worker, .. } => Cause::Broke(*worker),
        Event::Stopping { worker } => Cause::Stopping(*worker),
        Event::Reset => Cause::Reset,
        Event::Stop { .. } => Cause::Stop,
        Event::Change(_) => Cause::Resize,
        Event::Replace => Cause::Replace,
        _ => Cause::Other,
    }
}

fn event_name(event: &Event<Tag>) -> &'static str {
    match event {
        Event::HeldUp => "event HeldUp",
        Event::Reset => "event Reset",
        Event::Restart => "event Restart",
        Event::Reconfigure(_) => "event Reconfigure",
        Event::Replace => "event Replace",
        Event::Stopping { .. } => "event Stopping",
        Event::Cancel { .. } => "event Cancel",
        Event::GiveUp { .. } => "event GiveUp",
        Event::Stop { .. } => "event Stop",
        _ => "event",
    }
}

/// Returns the outcome of jobs whose worker ended in this way.
fn verdict_of(death: Death, killed: Option<&KillReason>) -> Verdict {
    match (killed, death) {
        (None, Death::Exit(status)) => crashed(CrashReason::Exit, Some(status)),
        (None, Death::Signal(signal)) => crashed(CrashReason::Signal, Some(signal)),
        (None, Death::Violation(_)) => crashed(CrashReason::Violation, None),
        (None, Death::Oom) => crashed(CrashReason::Oom, None),
        (None, Death::Overfull) => crashed(CrashReason::Violation, None),
        (Some(KillReason::Hung), _) => crashed(CrashReason::Hung, None),
        (Some(KillReason::Protocol(_)), _) => crashed(CrashReason::Protocol, None),
        (Some(KillReason::Overdue), _) => crashed(CrashReason::Stopped, None),
        (Some(KillReason::KeeperDied), _) => crashed(CrashReason::Signal, Some(9)),
        (Some(_), _) => crashed(CrashReason::Collateral, None),
    }
}

fn crashed(reason: CrashReason, status: Option<i32>) -> Verdict {
    Verdict::Crashed { reason, status, message: String::new() }
}
