//! State machine of one bulkhead: dispatch, deadlines and cancellation. The other parts are in submodules.
//! [`admission`] has admission and queueing, [`recovery`] the jobs of dead workers, and [`life`] and
//! [`recycle`] the lifecycle of workers. [`permits`] and [`adapt`] bound the number of running jobs.
//! [`spares`] has the spares, and [`size`] the number of workers.

mod adapt;
mod admission;
mod ahead;
mod life;
mod oversized;
mod permits;
mod recovery;
mod recycle;
mod size;
mod spares;
mod view;
mod withheld;

use std::collections::VecDeque;
use std::time::Duration;

use bulkhead_shared::{CrashReason, Executed, Fault, JobId, RejectReason, Verdict};

use crate::adaptive::Adaptive;
use crate::breaker::{Breaker, CallResult, Transition};
use crate::budget::RetryBudget;
use crate::drops::Drops;
use crate::jobs::{Jobs, Place};
use crate::limits::Limits;
use crate::load::Load;
use crate::messages::{Action, Answer, Event, Note, RecycleReason, Reply, WorkerId, rejection};
use crate::poison::Poison;
use crate::queue::Queue;
use crate::restart::Spacing;
use crate::tenants::Tenants;
use crate::time::Time;
use crate::timers::Timers;
use crate::workers::{Apart, Phase, Slot, Worker};

use admission::Evictions;
use withheld::Withheld;

pub use life::describe as describe_end;
pub use size::Activity;
pub use view::{BulkheadState, Counters, HeldJob, PostMortem, StaffView, TenantView, WorkerView};

/// One bulkhead. `T` is the caller's record of a job.
pub struct Bulkhead<T> {
    limits: Limits,
    mode: Mode,
    activity: Activity,
    /// Time at which the bulkhead became idle. Tracked only if `idle` is configured.
    idle_since: Option<Time>,
    jobs: Jobs<T>,
    job_timers: Timers,
    workers: Vec<Option<Worker>>,
    free_places: Vec<u32>,
    worker_timers: Timers,
    slots: Vec<Slot>,
    slot_timers: Timers,
    queue: Queue,
    /// Suspects, which wait for an idle worker; oldest first.
    suspects: VecDeque<u32>,
    /// Worker that takes no new jobs, in order to become idle for the first suspect.
    reserved: Option<u32>,
    tenants: Tenants,
    withheld: Vec<Withheld>,
    breaker: Breaker,
    retries: RetryBudget,
    poison: Poison,
    /// The adaptive limit, if configured.
    adaptive: Option<Box<Adaptive>>,
    load: Load,
    /// Workers with free prefetch slots, indexed by the number of prefetched jobs.
    room: Load,
    /// Number of prefetched jobs that a client waits for.
    ahead: usize,
    /// Workers that may have prefetched jobs to recall, because they take no more jobs.
    to_take_back: Vec<u32>,
    /// True if all prefetched jobs must be recalled.
    takes_all_back: bool,
    /// Workers that are late to begin a job.
    lagging: Vec<u32>,
    /// Recalled jobs that must be sent to the same worker again.
    to_send_again: Vec<u32>,
    /// Replaced workers that have answered all their jobs since the last event.
    to_leave: Vec<u32>,
    /// Replaced workers that have left their slots but have not exited, oldest first.
    exiting: VecDeque<u32>,
    /// Number of workers that count towards the limit.
    ready: u32,
    /// Number of ready workers that are late to begin a job and get no other until they show that they are alive.
    stalled: u32,
    /// Number of permits of all workers that count towards the limit.
    permits: u64,
    /// Number of permits in use.
    in_use: u32,
    /// Permits in use before the current event.
    in_use_before: u32,
    /// Permits reserved for critical jobs before the current event (adaptive limit only).
    kept_before: u32,
    /// Number of permits held, including those of workers that no longer count towards the limit.
    held: u32,
    /// Number of slots that have or will have a worker.
    live_slots: u32,
    generations: u32,
    spacing: Spacing,
    /// True if a worker or slot has changed so that a spare may have to take over.
    is_reserve_concerned: bool,
    /// Slots that a rolling restart has not reached yet.
    rolling: VecDeque<(u32, RecycleReason)>,
    random: u64,
    /// Smoothed time that a worker has a job, in nanoseconds.
    service_ns: u64,
    counters: Counters,
    /// Adaptive `Retry-After` by priority code, created at the first rejection.
    drops: [Option<Box<Drops>>; 3],
    /// True if queue pressure has been reported.
    is_pressed: bool,
    evictions: Evictions,
    last_trouble: String,
    /// Reports to send after the answers that they refer to.
    late_notes: Vec<Note>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Open,
    Draining,
    Stopping { by: Time },
}

impl<T> Bulkhead<T> {
    /// Memory per waiting job in the tables of policy, which may be half empty, in bytes.
    pub const JOB_BYTES: usize =
        2 * (size_of::<Option<crate::jobs::Job<T>>>() + Queue::JOB_BYTES + Timers::ENTRY_BYTES);

    /// Returns a bulkhead that has not started. Equal seeds and equal histories give equal decisions.
    pub fn new(limits: Limits, seed: u64) -> Self {
        let breaker = Breaker::new(limits.breaker.clone());
        let retries = RetryBudget::new(limits.retry.clone());
        let poison = Poison::new(limits.poison.clone());
        let tenants = Tenants::new(&limits.tenants);
        let adaptive = limits.adaptive.clone().map(|numbers| Box::new(Adaptive::new(numbers, Time::ZERO)));
        let mut bulkhead = Self {
            limits,
            mode: Mode::Open,
            activity: Activity::Resting,
            idle_since: None,
            jobs: Jobs::default(),
            job_timers: Timers::default(),
            workers: Vec::new(),
            free_places: Vec::new(),
            worker_timers: Timers::default(),
            slots: Vec::new(),
            slot_timers: Timers::default(),
            queue: Queue::default(),
            suspects: VecDeque::new(),
            reserved: None,
            tenants,
            withheld: Vec::new(),
            adaptive,
            load: Load::default(),
            room: Load::default(),
            ahead: 0,
            to_take_back: Vec::new(),
            takes_all_back: false,
            lagging: Vec::new(),
            to_send_again: Vec::new(),
            to_leave: Vec::new(),
            exiting: VecDeque::new(),
            ready: 0,
            stalled: 0,
            permits: 0,
            in_use: 0,
            in_use_before: 0,
            kept_before: 0,
            held: 0,
            live_slots: 0,
            generations: 0,
            spacing: Spacing::default(),
            is_reserve_concerned: false,
            rolling: VecDeque::new(),
            random: seed,
            breaker,
            retries,
            poison,
            service_ns: 0,
            counters: Counters::default(),
            drops: Default::default(),
            is_pressed: false,
            evictions: Evictions::default(),
            last_trouble: String::new(),
            late_notes: Vec::new(),
        };
        let slots = bulkhead.slots_wanted();
        let spares = (0..bulkhead.spares_wanted()).map(|_| Slot { is_reserve: true, ..Slot::default() });
        bulkhead.slots.reserve_exact(slots + spares.len());
        bulkhead.slots.resize_with(slots, Slot::default);
        bulkhead.slots.extend(spares);
        bulkhead
    }

    /// Applies an event that occurred at `now`, and appends the resulting actions to `out`. Returns the id of
    /// a job that was accepted by [`Event::Submit`].
    pub fn apply(&mut self, now: Time, event: Event<T>, out: &mut Vec<Action<T>>) -> Option<JobId> {
        self.in_use_before = self.in_use;
        if self.adaptive.is_some() {
            self.kept_before = u32::try_from(self.reserve()).unwrap_or(u32::MAX);
        }
        match event {
            Event::Submit(submission) => return self.submit(now, submission, out),
            Event::Replied { worker, job, reply } => self.replied(now, worker, job, reply, out),
            Event::Returned { worker, job, arrival } => self.returned(now, worker, (job, arrival), out),
            Event::Oversized { worker, job, failure } => self.oversized(now, worker, job, failure, out),
            Event::Tick => self.tick(now, out),
            Event::Cancel { job, unless_begun } => self.cancel(now, job, unless_begun, out),
            Event::GiveUp { job } => self.give_up(now, job, out),
            Event::Start => self.start(now, out),
            Event::Spawned { worker, pid } => self.spawned(now, worker, pid, out),
            Event::SpawnFailed { worker, message } => self.spawn_failed(now, worker, message, out),
            Event::Hello { worker, can, claims } => self.hello(now, worker, can, claims),
            Event::Said { worker, text } => self.said(now, worker, text),
            Event::ExtendStart { worker, more } => self.extend_start(now, worker, more),
            Event::Ready { worker } => self.worker_ready(now, worker, out),
            Event::Heard { worker } => {
                self.heard(now, worker);
                self.sends_on(now, worker);
            }
            Event::WasAlive { worker, at } => self.was_alive(now, worker, at),
            Event::Broke { worker, message } => self.broke(now, worker, message, out),
            Event::Stopping { worker } => self.worker_stopping(now, worker, out),
            Event::Looked { worker, is_starved } => self.looked(now, worker, is_starved, out),
            Event::Unread { worker, job } => self.unread(worker, job),
            Event::Unbegun { worker, job } => self.unbegun(worker, job),
            Event::Exited { worker, death } => self.exited(now, worker, death, out),
            Event::Swept { worker } => self.swept(now, worker, out),
            Event::Lost { worker } => self.lost(now, worker, out),
            Event::Memory { worker, rss_bytes } => self.memory(now, worker, rss_bytes, out),
            Event::HeldUp => self.held_up(now),
            Event::Restart => self.rolling_restart(now, out),
            Event::Drain => self.drain(now, out),
            Event::Resume => self.resume(out),
            Event::Reset => self.reset(now, out),
            Event::Change(change) => self.change(now, change, out),
            Event::Reconfigure(limits) => self.reconfigure(now, *limits, out),
            Event::Replace => self.replace(now, out),
            Event::ChangeTenant { tenant, numbers } => self.change_tenant(now, &tenant, numbers, out),
            Event::Rest => self.rest(now, out),
            Event::Await => self.wait_for_start(now),
            Event::ForceBreaker { open } => self.force_breaker(now, open, out),
            Event::Stop { by } => self.stop(now, by, out),
        }
        self.fill_from_reserve(now, out);
        while self.leave_slots(now, out) {
            self.fill_from_reserve(now, out);
        }
        self.give_back_withheld(now);
        self.adapt(now, out);
        out.extend(self.late_notes.drain(..).map(Action::Note));
        let transition = self.breaker.advance(now, self.ready > 0);
        self.note_transition(transition, out);
        // Any event may have freed a permit, or reduced the number of reserved permits.
        self.pump(now, out);
        // A recalled job can have been the last job of a replaced worker.
        while self.leave_slots(now, out) {
            self.fill_from_reserve(now, out);
            self.give_back_withheld(now);
            self.pump(now, out);
        }
        out.extend(self.late_notes.drain(..).map(Action::Note));
        self.mind_idleness(now);
        None
    }

    /// Returns the time at which [`Event::Tick`] is due.
    pub fn next_deadline(&self) -> Option<Time> {
        let stop = match self.mode {
            Mode::Stopping { by } if !self.is_stopped() => Some(by),
            _ => None,
        };
        let breaker = self.breaker.next_deadline(self.ready > 0);
        let rest = self.rests_at();
        let jobs_or_workers = earlier(self.job_timers.next(), self.worker_timers.next());
        let slots_or_breaker = earlier(self.slot_timers.next(), breaker);
        let tells = self.adaptive.as_deref().and_then(Adaptive::tells_at).filter(|_| !self.is_stopped());
        let tells_or_places = earlier(tells, self.next_given_back());
        earlier(earlier(jobs_or_workers, slots_or_breaker), earlier(earlier(rest, stop), tells_or_places))
    }

    /// Returns the caller's record of a job while its client waits.
    pub fn cargo_mut(&mut self, job: JobId) -> Option<&mut T> {
        let index = self.jobs.find(job)?;
        self.jobs.get(index).cargo.as_mut()
    }

    /// Returns true if the job is in the queue, so that [`Event::GiveUp`] can reject it.
    pub fn is_waiting(&self, job: JobId) -> bool {
        let place = self.jobs.find(job).and_then(|index| self.jobs.place(index));
        matches!(place, Some(Place::Queued | Place::Apart))
    }

    /// Returns true if this worker has this job with a permit.
    pub fn holds(&self, worker: WorkerId, job: JobId) -> bool {
        matches!(self.find_at(worker, job), Some((_, Place::InFlight { .. })))
    }

    /// Returns index and place of a job that this worker has, with a permit or prefetched.
    fn find_at(&self, worker: WorkerId, job: JobId) -> Option<(u32, Place)> {
        let index = self.jobs.find(job)?;
        let place = self.jobs.place(index)?;
        let (Place::InFlight { worker: at, .. } | Place::Ahead { worker: at }) = place else { return None };
        (at == worker.place && self.worker(worker).is_some()).then_some((index, place))
    }

    /// Returns the limits in force.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Counts a job that was rejected before it reached the state machine, because it was malformed or too
    /// large, or because memory was short.
    pub fn count_refused(&mut self, reason: RejectReason) {
        self.counters.count_refused(reason);
    }

    /// Returns the next number of the seeded sequence (SplitMix64, Steele et al. 2014).
    fn draw(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    // Dispatch.

    /// Dispatches a job to a worker if the payload is not quarantined and the breaker lets the job pass.
    /// Rejects the job otherwise.
    fn give(&mut self, now: Time, index: u32, worker: u32, out: &mut Vec<Action<T>>) {
        if self.is_quarantined(now, self.jobs.digest(index)) {
            self.answer(now, index, rejection(RejectReason::Quarantined), out);
            return self.forget(index);
        }
        if self.breaker.is_absent() {
            return self.dispatch(now, index, worker, out);
        }
        match self.breaker.claim(now, self.ready > 0) {
            Some((claim, transition)) => {
                self.jobs.get(index).claim = Some(claim);
                self.note_transition(transition, out);
                self.dispatch(now, index, worker, out);
            }
            None => {
                self.answer(now, index, rejection(RejectReason::CircuitOpen), out);
                self.forget(index);
            }
        }
    }

    fn force_breaker(&mut self, now: Time, open: bool, out: &mut Vec<Action<T>>) {
        let transition = if open { self.breaker.force_open(now) } else { self.breaker.release(now) };
        self.note_transition(transition, out);
    }

    fn note_transition(&mut self, transition: Option<Transition>, out: &mut Vec<Action<T>>) {
        if let Some(transition) = transition {
            out.push(Action::Note(Note::Breaker(transition)));
        }
    }

    fn dispatch(&mut self, now: Time, index: u32, place: u32, out: &mut Vec<Action<T>>) {
        self.hand_over(now, index, place);
        let remaining = self.jobs.get(index).answer_by(now).since(now);
        self.send(now, index, place, (remaining, false), out);
        if self.limits.recycle.jobs.is_some() {
            self.mind_jobs_left(now, place, out);
        }
    }

    /// Assigns a job to a worker.
    fn hand_over(&mut self, now: Time, index: u32, place: u32) {
        let Some(worker) = self.workers[place as usize].as_mut() else { return };
        let job = self.jobs.get(index);
        job.attempts += 1;
        if !std::mem::replace(&mut job.is_counted, true) {
            self.retries.call(now);
        }
        job.place = Place::InFlight {
            worker: place,
            index: worker.jobs.len() as u32,
            since: now,
            is_overdue: false,
            is_unread: false,
            is_oversized: false,
        };
        let is_of_same = worker.jobs.is_empty() || worker.tenant == Some(job.tenant);
        worker.tenant = is_of_same.then_some(job.tenant);
        worker.turned_at = now;
        worker.lag = if worker.jobs.is_empty() { 0 } else { worker.lag };
        worker.jobs.push(index);
        worker.wanted += 1;
        worker.begun += 1;
        if job.is_suspect {
            worker.apart = Apart::Taken;
        }
        let due = if job.cargo.is_some() { job.answer_by(now) } else { job.end_by(now) };
        let tenant = job.tenant;
        self.count_in_flight(tenant, true);
        self.job_timers.set(index, due);
        self.refresh(place);
    }

    // Answers.

    /// Sends the client its answer. The job stays where it is.
    fn answer(&mut self, now: Time, index: u32, verdict: Verdict, out: &mut Vec<Action<T>>) {
        let job = self.jobs.get(index);
        let Some(cargo) = job.cargo.take() else { return };
        let (priority, is_guest, has_claim) = (job.priority, job.is_guest, job.claim.is_some());
        let verdict = if job.before.is_some() { self.verdict_in_all(index, verdict) } else { verdict };
        if !is_guest {
            self.counters.count(&verdict);
        }
        if has_claim {
            self.tell_breaker(now, index, &verdict, out);
        }
        let job = self.jobs.get(index);
        if let Place::InFlight { since, .. } = job.place {
            let tenant = job.tenant;
            self.time_run(now, since, tenant, &verdict);
        }
        let retry_after = self.retry_after(now, &verdict, priority);
        let id = self.jobs.id(index);
        let job = self.jobs.get(index);
        let mut attempts = job.attempts;
        let (mut ran, mut worker_pid) =
            job.before.as_ref().map_or((Duration::ZERO, None), |before| (before.ran, before.worker_pid));
        if let Place::InFlight { worker, .. } | Place::Ahead { worker, .. } = job.place {
            worker_pid = self.workers[worker as usize].as_ref().and_then(|worker| worker.pid);
        }
        match job.place {
            Place::InFlight { since, .. } => ran += now.since(since),
            // The verdict says that the job has begun.
            Place::Ahead { .. } => attempts += 1,
            _ => {}
        }
        let is_in_time = retry_after.is_none_or(|wait| wait <= job.deadline_at.since(now));
        let answer = Answer {
            job: Some(id),
            cargo,
            retryable: is_in_time && verdict.is_retryable(job.idempotent),
            verdict,
            attempts,
            queued: now.since(job.received).saturating_sub(ran),
            ran,
            worker_pid,
            retry_after,
            deadline: job.limit(),
            run_limit: (job.run_limit < Duration::MAX).then_some(job.run_limit),
        };
        out.push(Action::Answer(answer));
    }

    /// Reports a call to the breaker. A job that is answered from the queue has no claim.
    fn tell_breaker(&mut self, now: Time, index: u32, verdict: &Verdict, out: &mut Vec<Action<T>>) {
        let job = self.jobs.get(index);
        let Some(claim) = job.claim.take() else { return };
        let Place::InFlight { since, .. } = job.place else { return self.breaker.give_back(claim) };
        let transition = self.breaker.record(now, claim, judge(verdict), now.since(since));
        self.note_transition(transition, out);
    }

    fn replied(&mut self, now: Time, worker: WorkerId, job: JobId, reply: Reply, out: &mut Vec<Action<T>>) {
        self.heard(now, worker);
        let found = self.find_at(worker, job);
        let Some((index, Place::InFlight { since, is_oversized: is_told, .. })) = found else {
            if found.is_some() || self.was_taken_from(worker, job) {
                self.answered_without_right(now, worker, job, out);
            }
            self.counters.late_replies += 1;
            return;
        };
        let took = u64::try_from(now.since(since).as_nanos()).unwrap_or(u64::MAX);
        self.service_ns = self.service_ns - self.service_ns / 8 + took / 8;
        let job = self.jobs.get(index);
        let (arrival, is_wanted) = (job.arrival, job.cargo.is_some());
        if !is_wanted && !is_told {
            // The client was answered earlier, for example at the deadline, and the worker has now finished.
            self.counters.late_replies += 1;
        }
        let verdict = match reply {
            Reply::Ok => Verdict::Ok,
            Reply::Failed(failure) => Verdict::Failed(failure),
            Reply::ProgramCrashed { death, message } => life::crash(death, None, message),
        };
        if !self.recover_program(now, index, worker, &verdict, out) {
            self.answer(now, index, verdict, out);
            self.release(index);
        }
        if let Some(worker) = self.worker_mut(worker) {
            worker.served += 1;
            worker.begun_last = worker.begun_last.max(arrival);
            worker.wanted -= u32::from(is_wanted);
        }
        self.begin_ahead(now, worker.place, out);
        self.review(now, worker.place);
        self.after_job(now, worker.place);
    }

    /// Removes a job in flight from its worker and from the table.
    fn release(&mut self, index: u32) {
        debug_assert!(self.jobs.get(index).cargo.is_none(), "released without an answer");
        self.withdraw(index);
        self.forget(index);
    }

    /// Removes a job in flight from its worker.
    fn withdraw(&mut self, index: u32) {
        self.job_timers.clear(index);
        let job = self.jobs.get(index);
        let (held, tenant, is_suspect) = (job.place, job.tenant, job.is_suspect);
        if let Place::InFlight { worker: place, index: at, is_overdue, .. } = held
            && let Some(worker) = self.workers[place as usize].as_mut()
        {
            worker.jobs.swap_remove(at as usize);
            worker.overdue -= u32::from(is_overdue);
            if is_suspect {
                worker.apart = Apart::No;
            }
            if let Some(&moved) = worker.jobs.get(at as usize)
                && let Place::InFlight { index, .. } = &mut self.jobs.get(moved).place
            {
                *index = at;
            }
        }
        self.count_in_flight(tenant, false);
        self.jobs.get(index).place = Place::Entered;
    }

    // Deadlines and cancellation.

    fn cancel(&mut self, now: Time, id: JobId, unless_begun: bool, out: &mut Vec<Action<T>>) {
        let Some(index) = self.jobs.find(id) else { return };
        let unbegun = Verdict::Cancelled { executed: Executed::No };
        if self.take_back_one(now, index, Some(unbegun), out) {
            return;
        }
        let place = self.jobs.get(index).place;
        match place {
            Place::Queued | Place::Apart => {
                self.leave_queue(now, index, Verdict::Cancelled { executed: Executed::No }, out);
            }
            _ if unless_begun => {}
            Place::InFlight { since, .. } if self.jobs.get(index).cargo.is_some() => {
                let end_by = self.jobs.get(index).end_by(since);
                self.abandon(now, index, Verdict::Cancelled { executed: Executed::Yes }, out);
                self.job_timers.set(index, end_by);
            }
            Place::Ahead { .. } if self.jobs.get(index).cargo.is_some() => {
                self.abandon_ahead(now, index, Verdict::Cancelled { executed: Executed::Yes }, out);
            }
            Place::InFlight { .. } | Place::Ahead { .. } | Place::Entered => {}
        }
    }

    fn give_up(&mut self, now: Time, id: JobId, out: &mut Vec<Action<T>>) {
        if self.is_waiting(id)
            && let Some(index) = self.jobs.find(id)
        {
            let message =
                "the memory for waiting jobs is used up, and the client of the job holds most of the memory"
                    .to_owned();
            self.leave_queue(
                now,
                index,
                Verdict::Rejected { reason: RejectReason::Overloaded, message },
                out,
            );
        }
    }

    /// Answers a job in flight and asks its worker to cancel it. The permit stays in use.
    fn abandon(&mut self, now: Time, index: u32, verdict: Verdict, out: &mut Vec<Action<T>>) {
        self.answer(now, index, verdict, out);
        let Place::InFlight { worker: place, .. } = self.jobs.get(index).place else { return };
        let job = self.jobs.id(index);
        if let Some(worker) = self.workers[place as usize].as_mut() {
            worker.wanted -= 1;
            out.push(Action::Cancel { worker: worker.id, job });
        }
        self.review(now, place);
    }

    fn job_due(&mut self, now: Time, index: u32, out: &mut Vec<Action<T>>) {
        let job = self.jobs.get(index);
        let deadline_at = job.deadline_at;
        let unbegun = match job.place {
            Place::Ahead { .. } if deadline_at > now => Some(rejection(RejectReason::QueueTimeout)),
            // The run limit has expired before the job began, and starts again with the next dispatch.
            _ if deadline_at > now && job.is_repeatable => None,
            _ => Some(Verdict::DeadlineQueued),
        };
        if self.take_back_one(now, index, unbegun, out) {
            return;
        }
        let job = self.jobs.get(index);
        match job.place {
            Place::Queued | Place::Apart => {
                let verdict = if deadline_at <= now {
                    Verdict::DeadlineQueued
                } else {
                    rejection(RejectReason::QueueTimeout)
                };
                self.leave_queue(now, index, verdict, out);
            }
            Place::InFlight { worker, since, .. } => {
                let end_by = job.end_by(since);
                if job.cargo.is_some() {
                    self.abandon(now, index, Verdict::DeadlineRunning, out);
                }
                if end_by > now {
                    self.job_timers.set(index, end_by);
                } else {
                    self.mark_overdue(now, index, worker);
                    self.review(now, worker);
                }
            }
            Place::Ahead { .. } if deadline_at <= now => {
                self.abandon_ahead(now, index, Verdict::DeadlineRunning, out);
            }
            Place::Ahead { .. } => self.job_timers.set(index, deadline_at),
            Place::Entered => {}
        }
    }

    fn mark_overdue(&mut self, now: Time, index: u32, place: u32) {
        let kill_at = now + self.limits.grace;
        if let Place::InFlight { is_overdue, .. } = &mut self.jobs.get(index).place
            && !std::mem::replace(is_overdue, true)
            && let Some(worker) = self.workers[place as usize].as_mut()
        {
            if worker.overdue == 0 {
                worker.kill_at = worker.kill_at.map(|at| at.min(kill_at));
            }
            worker.overdue += 1;
        }
    }

    /// Decides if a worker must be killed because of its jobs. The worker is killed after `grace` if no
    /// client waits for any of the worker's jobs. It is also killed if a job has passed the bulkhead's own
    /// deadline or run limit. So a client can end its own job early, but not the jobs of others. A worker
    /// that [ends each job itself](Self::patience) has more time while clients wait for other jobs. Until the
    /// kill, the worker takes no new jobs. While the worker sends a result that is too large, `grace` starts
    /// again [with each data received](Self::sends_on).
    pub(super) fn review(&mut self, now: Time, place: u32) {
        let Some(worker) = self.workers[place as usize].as_ref() else { return };
        match worker.phase {
            Phase::Ready | Phase::Draining => {}
            _ => return self.refresh(place),
        }
        let is_stuck = !worker.jobs.is_empty() && (worker.wanted == 0 || worker.overdue > 0);
        let kill_at = now + if is_stuck { self.patience(place) } else { Duration::ZERO };
        let Some(worker) = self.workers[place as usize].as_mut() else { return };
        if is_stuck && worker.kill_at.is_none() {
            worker.kill_at = Some(kill_at);
        } else if is_stuck && self.limits.jobs_end_alone {
            // The patience may have become shorter, because no client waits any more.
            worker.kill_at = worker.kill_at.map(|at| at.min(kill_at));
        } else if !is_stuck && (worker.phase == Phase::Ready || !worker.jobs.is_empty()) {
            worker.kill_at = None;
        }
        self.refresh(place);
        self.arm(place);
    }

    fn tick(&mut self, now: Time, out: &mut Vec<Action<T>>) {
        if self.rests_at().is_some_and(|at| at <= now) {
            self.rest(now, out);
        }
        while let Some(index) = self.job_timers.pop_due(now) {
            self.job_due(now, index, out);
        }
        while let Some(place) = self.worker_timers.pop_due(now) {
            self.worker_due(now, place, out);
        }
        while let Some(slot) = self.slot_timers.pop_due(now) {
            self.spawn(now, slot, crate::workers::Role::Current, out);
        }
        if let Mode::Stopping { by } = self.mode
            && by <= now
        {
            self.stop_all(out);
        }
    }

    // Tables.

    /// Returns a worker that has not exited. No further frames of an exited worker are valid.
    fn worker(&self, id: WorkerId) -> Option<&Worker> {
        self.workers.get(id.place as usize)?.as_ref().filter(|w| w.id == id && !w.is_dead())
    }

    /// Returns the worker that fills a slot, even if the worker has exited.
    fn worker_of(&self, slot: u32) -> Option<&Worker> {
        self.workers[self.slots[slot as usize].state.worker()? as usize].as_ref()
    }

    fn worker_mut(&mut self, id: WorkerId) -> Option<&mut Worker> {
        self.workers.get_mut(id.place as usize)?.as_mut().filter(|w| w.id == id && !w.is_dead())
    }
}

/// Returns the earlier of two values, or the only one.
fn earlier<T: Ord>(a: Option<T>, b: Option<T>) -> Option<T> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// Classifies a verdict as evidence about the dependency of the workers.
fn judge(verdict: &Verdict) -> CallResult {
    match verdict {
        Verdict::Ok => CallResult::Success,
        Verdict::Failed(failure) if failure.fault == Fault::Dependency => CallResult::Failure,
        Verdict::DeadlineRunning => CallResult::Failure,
        // Another job crashed the worker, or the supervisor stopped it.
        Verdict::Crashed { reason: CrashReason::Collateral | CrashReason::Stopped, .. } => {
            CallResult::Ignored
        }
        Verdict::Crashed { .. } => CallResult::Failure,
        Verdict::Failed(_)
        | Verdict::Cancelled { .. }
        | Verdict::DeadlineQueued
        | Verdict::Rejected { .. } => CallResult::Ignored,
    }
}
