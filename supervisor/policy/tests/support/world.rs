//! Everything outside of policy: a caller that performs actions, workers that start, work, disobey and die,
//! clients that submit and cancel jobs, and an operator. Where that matters, the world is realistic. A killed
//! process exits some time later, and messages of living workers are in order. Only ghosts, which are
//! messages from workers that have exited, come at random.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use bulkhead_policy::{Abilities, Action, Change, Death, Event, Limits, Reply, Submission, Time, WorkerId};
use bulkhead_shared::{Fault, HandlerFailure, JobId, Priority};

use super::Tag;
use super::claims::Registry;
use super::random::Random;
use super::settings::{self, RSS_LIMIT_BYTES, Temper};

/// Future event. Dropped if its process has exited by then.
#[derive(Debug)]
enum Happening {
    Arrival,
    Cancel(JobId),
    GiveUp(JobId),
    Operator,
    Resume,
    Wake,
    Ghost,
    Process(WorkerId, Sign),
    /// All descendants of a dead process are gone.
    Swept(WorkerId),
}

#[derive(Debug)]
enum Sign {
    Spawned,
    SpawnFailed,
    Hello,
    Extend,
    Said,
    Ready,
    Beat,
    Reply(JobId),
    /// The worker begins its jobs up to this number.
    Begins(u64),
    /// The worker returns the job with this number, because the job was recalled.
    GivesBack(u64),
    /// A part of a result that is too large arrives, and this number of parts remains.
    Part(JobId, u64),
    Stopping,
    Broke,
    Memory,
    Looked,
    /// The caller reads the timestamp that the worker wrote.
    WasAlive(Time),
    Exited(Death),
}

struct Process {
    has_dispatch_thread: bool,
    can_resize: bool,
    /// True if the worker keeps a record of begun jobs.
    has_claims: bool,
    /// All jobs that were ever sent to the worker.
    sent: Vec<JobId>,
    /// Jobs recently recalled from the worker.
    taken: Vec<JobId>,
    /// Prefetched jobs.
    ahead: VecDeque<JobId>,
    /// Heartbeat interval that the worker was given.
    heartbeat: Duration,
    is_ready: bool,
    is_silent: bool,
    is_draining: bool,
    /// True if the process is about to exit and reads nothing more.
    is_leaving: bool,
    /// Jobs with a permit.
    jobs: Vec<JobId>,
    /// Jobs with a permit that the worker never read.
    unread: Vec<JobId>,
    /// Jobs with a permit for which a result that is too large has begun.
    oversized: Vec<JobId>,
}

impl Process {
    /// Returns the job's number in the order of sending, for the last time that it was sent.
    fn arrival(&self, job: JobId) -> u64 {
        self.sent.iter().rposition(|sent| *sent == job).map_or(0, |at| at as u64 + 1)
    }
}

pub(crate) struct World {
    random: Random,
    temper: Temper,
    limits: Limits,
    registry: Registry,
    agenda: BTreeMap<(Time, u64), Happening>,
    sequence: u64,
    processes: HashMap<WorkerId, Process>,
    /// Most recently exited workers, for ghosts.
    gone: Vec<WorkerId>,
    /// Most recently dispatched jobs, whatever their state.
    handed_out: Vec<JobId>,
    next_tag: u64,
    next_pid: u32,
}

impl World {
    pub(crate) fn new(mut random: Random, limits: Limits, registry: Registry) -> Self {
        let temper = Temper::draw(&mut random);
        let mut world = Self {
            random,
            temper,
            limits,
            registry,
            agenda: BTreeMap::new(),
            sequence: 0,
            processes: HashMap::new(),
            gone: Vec::new(),
            handed_out: Vec::new(),
            next_tag: 0,
            next_pid: 100,
        };
        world.plan(Time::ZERO, Happening::Arrival);
        world.plan(Time::ZERO + Duration::from_millis(3), Happening::Ghost);
        let first_operator = world.random.millis(1, world.temper.operator_ms);
        world.plan(Time::ZERO + first_operator, Happening::Operator);
        world
    }

    fn plan(&mut self, at: Time, happening: Happening) {
        self.sequence += 1;
        self.agenda.insert((at, self.sequence), happening);
    }

    fn plan_sign(&mut self, at: Time, worker: WorkerId, sign: Sign) {
        self.plan(at, Happening::Process(worker, sign));
    }

    /// Returns the time of the next event.
    pub(crate) fn due(&self) -> Option<Time> {
        self.agenda.first_key_value().map(|((at, _), _)| *at)
    }

    /// Returns a random delay of the supervisor. `None` in most cases.
    pub(crate) fn jump(&mut self) -> Option<Duration> {
        self.random.percent(self.temper.jump).then(|| self.random.millis(1, 5000))
    }

    pub(crate) fn chance(&mut self, percent: u64) -> bool {
        self.random.percent(percent)
    }

    pub(crate) fn millis(&mut self, low: u64, high: u64) -> Duration {
        self.random.millis(low, high)
    }

    /// Returns the next event that is due, as the caller would report it. `None` if its process has exited.
    pub(crate) fn take(&mut self, now: Time) -> Option<Event<Tag>> {
        let entry = self.agenda.first_entry().filter(|entry| entry.key().0 <= now)?;
        match entry.remove() {
            Happening::Arrival => Some(self.arrival(now)),
            Happening::Cancel(job) => Some(Event::Cancel { job, unless_begun: self.random.percent(30) }),
            Happening::GiveUp(job) => Some(Event::GiveUp { job }),
            Happening::Operator => Some(self.operator(now)),
            Happening::Resume => Some(Event::Resume),
            Happening::Wake => Some(Event::Start),
            Happening::Ghost => self.ghost(now),
            Happening::Process(worker, sign) => self.sign(now, worker, sign),
            Happening::Swept(worker) => Some(match self.random.percent(3) {
                true => Event::Lost { worker },
                false => Event::Swept { worker },
            }),
        }
    }

    // Clients and the operator.

    fn arrival(&mut self, now: Time) -> Event<Tag> {
        let pause = match self.random.percent(self.temper.burst) {
            true => Duration::ZERO,
            false => self.random.millis(0, 2 * self.temper.arrival_ms),
        };
        self.plan(now + pause, Happening::Arrival);
        self.next_tag += 1;
        let most = 2 * u64::try_from(self.limits.deadline.as_millis()).unwrap_or(u64::MAX) + 2;
        let deadline = self
            .random
            .percent(self.temper.own_deadline)
            .then(|| if self.random.percent(3) { Duration::ZERO } else { self.random.millis(1, most) });
        let own_run_limit = self.random.percent(self.temper.own_run_limit);
        let run_limit = own_run_limit.then(|| self.random.millis(1, most));
        let priority = self.random.pick(&[Priority::Critical, Priority::Normal, Priority::BestEffort]);
        let idempotent = self.random.percent(50);
        let cost = self.random.pick(&[1, 1, 1, 2, 7]);
        let is_repeatable = self.random.percent(90);
        let digest = self.limits.poison.is_some().then(|| u128::from(self.random.range(0, 8)).into());
        let cargo = Tag(self.next_tag);
        let plain = Submission::new(cargo);
        let times = Submission { deadline, run_limit, ..plain };
        // A worker that exists or has existed.
        let mut workers: Vec<WorkerId> = self.processes.keys().chain(&self.gone).copied().collect();
        workers.sort_unstable();
        // Derived from the job's number instead of a random number, so that the random sequence does not
        // change.
        let tag = usize::try_from(self.next_tag).unwrap_or_default();
        let prefers = (tag % 4 == 0).then(|| workers.get(tag / 4 % workers.len().max(1)).copied()).flatten();
        Event::Submit(Submission { priority, idempotent, is_repeatable, digest, cost, prefers, ..times })
    }

    /// Handles an accepted job, which its client may cancel later.
    pub(crate) fn taken(&mut self, now: Time, job: JobId) {
        if self.random.percent(self.temper.cancels) {
            let after = self.random.millis(0, 2 * self.temper.job_ms + 20);
            let is_given_up = self.random.percent(30);
            let end = if is_given_up { Happening::GiveUp(job) } else { Happening::Cancel(job) };
            self.plan(now + after, end);
        }
    }

    fn operator(&mut self, now: Time) -> Event<Tag> {
        let pause = self.random.millis(1, 2 * self.temper.operator_ms);
        self.plan(now + pause, Happening::Operator);
        match self.random.range(0, 16) {
            13 | 14 => Event::Reconfigure(Box::new(self.limits())),
            15 | 16 => Event::Replace,
            0 => {
                let until = now + self.random.millis(0, 2000);
                self.plan(until, Happening::Resume);
                Event::Drain
            }
            8..11 => Event::Change(self.change()),
            11 => {
                let until = now + self.random.millis(0, 200);
                self.plan(until, Happening::Wake);
                Event::Rest
            }
            12 => {
                // Has an effect only while the bulkhead rests. Jobs then wait until the wake-up.
                let until = now + self.random.millis(0, 200);
                self.plan(until, Happening::Wake);
                Event::Await
            }
            6 => Event::ForceBreaker { open: true },
            7 => Event::ForceBreaker { open: false },
            1 => Event::Resume,
            2 => Event::Reset,
            3 => Event::HeldUp,
            _ => Event::Restart,
        }
    }

    /// Returns limits as an operator may change them in the file, all of them or a few.
    fn limits(&mut self) -> Limits {
        let fresh = settings::limits(&mut self.random);
        if self.random.percent(50) {
            self.limits = fresh;
        } else {
            let Limits { processes, max_in_flight, max_queue, deadline, deadline_max, .. } = fresh;
            self.limits =
                Limits { processes, max_in_flight, max_queue, deadline, deadline_max, ..self.limits.clone() };
        }
        self.limits.clone()
    }

    fn change(&mut self) -> Change {
        let mut pick = |numbers: &[u32]| self.random.percent(50).then(|| self.random.pick(numbers));
        Change {
            processes: pick(&[1, 2, 3, 5]),
            max_in_flight: pick(&[1, 1, 2, 4, 8]),
            max_queue: pick(&[0, 1, 5, 20]),
            rate_limit: None,
        }
    }

    /// Returns a message from a worker that has exited or never existed, or for a job that is elsewhere.
    fn ghost(&mut self, now: Time) -> Option<Event<Tag>> {
        let pause = self.random.millis(1, 100 * self.temper.arrival_ms);
        self.plan(now + pause, Happening::Ghost);
        let job = match self.handed_out.len() as u64 {
            0 => JobId(self.random.draw()),
            count => self.handed_out[self.random.range(0, count - 1) as usize],
        };
        if self.random.percent(20) {
            return Some(Event::Cancel { job, unless_begun: self.random.percent(30) });
        }
        let count = self.gone.len() as u64;
        if count == 0 {
            return None;
        }
        let mut worker = self.gone[self.random.range(0, count - 1) as usize];
        if self.random.percent(10) {
            worker = WorkerId { place: worker.place + 1000, generation: 7 };
        }
        let message = "a ghost".to_owned();
        Some(match self.random.range(0, 14) {
            0 => Event::Spawned { worker, pid: 1 },
            1 => Event::SpawnFailed { worker, message },
            2 => Event::Hello {
                worker,
                can: Abilities { has_dispatch_thread: true, can_resize: true },
                claims: None,
            },
            3 => Event::Ready { worker },
            4 => Event::Heard { worker },
            5 => Event::Broke { worker, message },
            6 => Event::Stopping { worker },
            7 => match self.random.percent(50) {
                true => Event::Exited { worker, death: Death::Exit(0) },
                false => Event::Unread { worker, job },
            },
            8 => Event::Memory { worker, rss_bytes: u64::MAX },
            9 => Event::ExtendStart { worker, more: Duration::from_secs(9) },
            10 => Event::Said { worker, text: message },
            11 => Event::Looked { worker, is_starved: false },
            12 => Event::Oversized { worker, job, failure: too_large() },
            13 => Event::WasAlive { worker, at: Time(u64::MAX) },
            _ => Event::Replied { worker, job, reply: Reply::Ok },
        })
    }

    // Processes.

    fn sign(&mut self, now: Time, worker: WorkerId, sign: Sign) -> Option<Event<Tag>> {
        let process = self.processes.get_mut(&worker)?;
        let event = match sign {
            Sign::Spawned => {
                self.next_pid += 1;
                Event::Spawned { worker, pid: self.next_pid }
            }
            Sign::SpawnFailed => {
                self.retire(worker);
                Event::SpawnFailed { worker, message: "no such program".into() }
            }
            Sign::Exited(death) => {
                if let Some(job) = process.unread.pop() {
                    process.is_leaving = true;
                    self.plan_sign(now, worker, Sign::Exited(death));
                    return Some(match self.random.percent(30) {
                        true => Event::Unbegun { worker, job },
                        false => Event::Unread { worker, job },
                    });
                }
                self.retire(worker);
                match self.random.percent(5) {
                    true => Event::Lost { worker },
                    false => {
                        self.plan_sweep(now, worker);
                        Event::Exited { worker, death }
                    }
                }
            }
            _ if process.is_leaving => return None,
            Sign::Hello => {
                let Process { has_dispatch_thread, can_resize, has_claims, .. } = *process;
                let can = Abilities { has_dispatch_thread, can_resize };
                let claims = has_claims.then(|| self.registry.claims(worker));
                process.heartbeat = self.limits.health.heartbeat;
                self.plan_sign(now + self.limits.health.heartbeat / 2, worker, Sign::Beat);
                Event::Hello { worker, can, claims }
            }
            Sign::Extend => Event::ExtendStart { worker, more: self.random.millis(0, 3000) },
            Sign::Said => Event::Said { worker, text: "half way".into() },
            Sign::Ready => {
                process.is_ready = true;
                if self.random.percent(self.temper.dies_idle) {
                    self.leave_idle(now, worker);
                }
                Event::Ready { worker }
            }
            Sign::Beat => return self.beat(now, worker),
            Sign::Reply(job) => return self.reply(now, worker, job),
            Sign::Begins(arrival) => {
                self.begin(now, worker, arrival);
                return None;
            }
            Sign::GivesBack(arrival) => return self.give_back(now, worker, arrival),
            Sign::Part(job, left) => return self.part(now, worker, job, left),
            Sign::Stopping => {
                self.go(now, worker);
                Event::Stopping { worker }
            }
            Sign::Broke => Event::Broke { worker, message: "nonsense".into() },
            Sign::Looked => Event::Looked { worker, is_starved: self.random.percent(30) },
            Sign::WasAlive(at) => Event::WasAlive { worker, at },
            Sign::Memory => {
                let rss_bytes = self.random.range(0, 2 * RSS_LIMIT_BYTES);
                Event::Memory { worker, rss_bytes }
            }
        };
        Some(event)
    }

    /// Schedules the end of the descendants. Usually there are none; sometimes they take long to end.
    fn plan_sweep(&mut self, now: Time, worker: WorkerId) {
        let within_ms = self.random.pick(&[0, 0, 0, 20, 3000]);
        let after = self.random.millis(0, within_ms);
        self.plan(now + after, Happening::Swept(worker));
    }

    /// Returns a job that was begun just as it was recalled, without running it. Policy decides which worker
    /// runs the job.
    fn give_back(&mut self, now: Time, worker: WorkerId, arrival: u64) -> Option<Event<Tag>> {
        let process = self.processes.get_mut(&worker)?;
        let job = *process.sent.get(arrival as usize - 1)?;
        let is_its = process.arrival(job) == arrival && !process.oversized.contains(&job);
        if let Some(at) = process.ahead.iter().position(|&ahead| is_its && ahead == job) {
            process.ahead.remove(at);
        } else if let Some(at) = process.jobs.iter().position(|&held| is_its && held == job) {
            process.jobs.swap_remove(at);
            self.begin_ahead(now, worker);
            let process = self.processes.get_mut(&worker)?;
            if process.is_draining && process.jobs.is_empty() {
                self.go(now, worker);
            }
        }
        Some(Event::Returned { worker, job, arrival })
    }

    fn retire(&mut self, worker: WorkerId) {
        self.registry.forget(worker);
        self.processes.remove(&worker);
        self.gone.push(worker);
        if self.gone.len() > 20 {
            self.gone.remove(0);
        }
    }

    fn beat(&mut self, now: Time, worker: WorkerId) -> Option<Event<Tag>> {
        let process = self.processes.get_mut(&worker)?;
        if process.is_silent {
            return None;
        }
        if self.random.percent(self.temper.falls_silent) && self.random.percent(10) {
            process.is_silent = true;
        }
        let is_deaf = !process.has_dispatch_thread && !process.jobs.is_empty();
        let wait = process.heartbeat.mul_f64(self.random.range(50, 95) as f64 / 100.0);
        self.plan_sign(now + wait, worker, Sign::Beat);
        if self.random.percent(self.temper.reports_memory) {
            self.plan_sign(now, worker, Sign::Memory);
        }
        (!is_deaf).then_some(Event::Heard { worker })
    }

    fn reply(&mut self, now: Time, worker: WorkerId, job: JobId) -> Option<Event<Tag>> {
        let process = self.processes.get_mut(&worker)?;
        // A cancelled job is answered once, by whichever reply comes first. A few workers reply again.
        let known = process.jobs.iter().position(|&j| j == job);
        if known.is_none() && !self.random.percent(20) {
            return None;
        }
        if self.random.percent(6)
            && let Some(ahead) = process.ahead.pop_back()
        {
            return Some(Event::Replied { worker, job: ahead, reply: Reply::Ok });
        }
        if self.random.percent(4)
            && let Some(taken) = process.taken.pop()
            && !process.jobs.contains(&taken)
            && !process.ahead.contains(&taken)
        {
            return Some(Event::Replied { worker, job: taken, reply: Reply::Ok });
        }
        if self.random.percent(1) && process.has_claims && self.random.percent(20) {
            let arrival = process.arrival(job) + 1;
            return Some(Event::Returned { worker, job, arrival });
        }
        let arrival = process.arrival(job);
        if known.is_some() {
            self.begin(now, worker, arrival);
        }
        let process = self.processes.get_mut(&worker)?;
        if process.oversized.contains(&job) {
            // The reply follows after the last part.
            return None;
        }
        if self.random.percent(self.temper.oversizes) {
            process.oversized.push(job);
            let parts = self.random.range(0, 8);
            self.plan_part(now, worker, job, parts);
            return Some(Event::Oversized { worker, job, failure: too_large() });
        }
        if let Some(at) = known {
            process.jobs.swap_remove(at);
            self.begin_ahead(now, worker);
        }
        let process = self.processes.get_mut(&worker)?;
        if process.is_draining && process.jobs.is_empty() {
            self.go(now, worker);
        } else if self.random.percent(self.temper.leaves_after_job) {
            self.leave_after_job(now, worker);
        }
        let reply = match self.random.range(0, 9) {
            0..7 => Reply::Ok,
            7 => Reply::ProgramCrashed { death: Death::Signal(11), message: "segmentation fault".into() },
            _ => Reply::Failed(HandlerFailure {
                code: "no".into(),
                message: "it cannot".into(),
                retryable: self.random.percent(50),
                fault: Fault::Dependency,
            }),
        };
        Some(Event::Replied { worker, job, reply })
    }

    /// Schedules the next part of a result that is too large. In a few cases the result stops.
    fn plan_part(&mut self, now: Time, worker: WorkerId, job: JobId, left: u64) {
        let within_ms = self.random.pick(&[0, 10, 500, 500, 1500]);
        if !self.random.percent(5) {
            let after = self.random.millis(0, within_ms);
            self.plan_sign(now + after, worker, Sign::Part(job, left));
        }
    }

    fn part(&mut self, now: Time, worker: WorkerId, job: JobId, left: u64) -> Option<Event<Tag>> {
        if left > 0 {
            self.plan_part(now, worker, job, left - 1);
            return Some(Event::Heard { worker });
        }
        let process = self.processes.get_mut(&worker)?;
        process.oversized.retain(|&other| other != job);
        process.jobs.retain(|&other| other != job);
        self.begin_ahead(now, worker);
        let process = self.processes.get_mut(&worker)?;
        if process.is_draining && process.jobs.is_empty() {
            self.go(now, worker);
        }
        Some(Event::Replied { worker, job, reply: Reply::Failed(too_large()) })
    }

    fn leave_idle(&mut self, now: Time, worker: WorkerId) {
        if self.random.percent(30) {
            let after = self.random.millis(0, 1000);
            self.plan_sign(now + after, worker, Sign::Stopping);
        } else {
            self.plan_death(now, worker, 1000);
        }
    }

    /// Some workers announce their exit, others just exit.
    fn leave_after_job(&mut self, now: Time, worker: WorkerId) {
        if self.random.percent(50) {
            self.plan_sign(now, worker, Sign::Stopping);
        } else if let Some(process) = self.processes.get_mut(&worker)
            && process.jobs.is_empty()
        {
            process.is_leaving = true;
            let after = self.random.millis(0, 20);
            self.plan_sign(now + after, worker, Sign::Exited(Death::Exit(0)));
        }
    }

    /// Lets a process drain. It exits once it has no jobs left.
    fn go(&mut self, now: Time, worker: WorkerId) {
        let disobeys = self.random.percent(self.temper.ignores_drain);
        let after = self.random.millis(0, 50);
        let Some(process) = self.processes.get_mut(&worker) else { return };
        process.is_draining = true;
        if process.jobs.is_empty() && !disobeys {
            process.is_leaving = true;
            self.plan_sign(now + after, worker, Sign::Exited(Death::Exit(0)));
        }
    }

    fn plan_death(&mut self, now: Time, worker: WorkerId, within_ms: u64) {
        let after = self.random.millis(0, within_ms);
        let death = self.random.pick(&[
            Death::Exit(0),
            Death::Exit(1),
            Death::Signal(9),
            Death::Signal(11),
            Death::Violation("ptrace"),
            Death::Oom,
            Death::Overfull,
        ]);
        self.plan_sign(now + after, worker, Sign::Exited(death));
    }

    // Actions.

    pub(crate) fn perform(&mut self, now: Time, action: &Action<Tag>) {
        match action {
            Action::Spawn { worker, .. } => self.spawn(now, *worker),
            Action::Dispatch { worker, job, is_ahead, .. } => {
                let will_race = self.random.percent(20);
                self.registry.with(*worker, |numbers| numbers.will_race = will_race);
                if let Some(process) = self.processes.get_mut(worker) {
                    process.sent.push(*job);
                    process.jobs.retain(|held| held != job);
                    if *is_ahead {
                        process.ahead.push_back(*job);
                    }
                }
                match is_ahead {
                    true => self.handed_out.push(*job),
                    false => self.dispatch(now, *worker, *job),
                }
            }
            Action::TookBack { worker, job } => self.take_back(now, *worker, *job),
            Action::Cancel { worker, job } => {
                if !self.random.percent(self.temper.ignores_cancel) {
                    let after = self.random.millis(0, 400);
                    self.plan_sign(now + after, *worker, Sign::Reply(*job));
                }
            }
            Action::Drain { worker } => self.go(now, *worker),
            Action::Kill { worker, .. } => self.kill(now, *worker),
            Action::Limit { worker, .. } => {
                let can_resize = self.processes.get(worker).is_none_or(|process| process.can_resize);
                assert!(can_resize, "{worker:?} is told what it does not understand");
            }
            Action::Look { worker } => self.plan_sign(now, *worker, Sign::Looked),
            Action::Watch { worker } => {
                if self.random.percent(50) {
                    let most = self.random.pick(&[0, 100, 5_000]);
                    let before = self.random.millis(0, most);
                    self.plan_sign(now, *worker, Sign::WasAlive(now - before));
                }
            }
            Action::Answer(_) | Action::Note(_) => {}
        }
    }

    fn spawn(&mut self, now: Time, worker: WorkerId) {
        let process = Process {
            has_dispatch_thread: self.random.percent(self.temper.has_dispatch_thread),
            can_resize: self.random.percent(70),
            has_claims: self.random.percent(70),
            sent: Vec::new(),
            taken: Vec::new(),
            ahead: VecDeque::new(),
            heartbeat: self.limits.health.heartbeat,
            is_ready: false,
            is_silent: false,
            is_draining: false,
            is_leaving: false,
            jobs: Vec::new(),
            unread: Vec::new(),
            oversized: Vec::new(),
        };
        self.processes.insert(worker, process);
        let born = now + self.random.millis(0, self.temper.start_ms);
        if self.random.percent(self.temper.spawn_fails) {
            self.plan_sign(born, worker, Sign::SpawnFailed);
            return;
        }
        self.plan_sign(born, worker, Sign::Spawned);
        if self.random.percent(self.temper.dies_at_start) {
            self.plan_death(born, worker, self.temper.start_ms);
        }
        if self.random.percent(self.temper.never_says_hello) {
            return;
        }
        let hello = born + self.random.millis(0, self.temper.start_ms);
        self.plan_sign(hello, worker, Sign::Hello);
        if self.random.percent(self.temper.extends_start) {
            let after = self.random.millis(0, self.temper.start_ms);
            self.plan_sign(hello + after, worker, Sign::Extend);
            self.plan_sign(hello + after, worker, Sign::Said);
        }
        if !self.random.percent(self.temper.never_ready) {
            let ready = hello + self.random.millis(0, 2 * self.temper.start_ms);
            self.plan_sign(ready, worker, Sign::Ready);
        }
    }

    fn dispatch(&mut self, now: Time, worker: WorkerId, job: JobId) {
        self.handed_out.push(job);
        if self.handed_out.len() > 20 {
            self.handed_out.remove(0);
        }
        let reads_nothing = self.random.percent(self.temper.reads_nothing);
        let is_late = self.random.percent(self.temper.begins_late);
        let late_ms = if is_late { self.random.pick(&[5, 500, 5000]) } else { 0 };
        let late = self.random.millis(0, late_ms);
        let Some(process) = self.processes.get_mut(&worker) else { return };
        assert!(process.is_ready, "a job for a process that never said it was ready");
        process.jobs.push(job);
        let arrival = process.arrival(job);
        if process.is_leaving || reads_nothing {
            process.unread.push(job);
            if reads_nothing && !process.is_leaving {
                self.plan_death(now + late, worker, 5);
            }
        } else if process.has_claims && late_ms > 0 {
            self.plan_sign(now + late, worker, Sign::Begins(arrival));
        } else {
            self.begin(now, worker, arrival);
        }
    }

    /// Lets a process begin its jobs up to this number, unless they were recalled.
    fn begin(&mut self, now: Time, worker: WorkerId, arrival: u64) {
        let Some(process) = self.processes.get_mut(&worker) else { return };
        let begun = self.registry.begun(worker);
        let taken = self.registry.with(worker, |numbers| numbers.taken);
        if arrival <= begun.max(taken) {
            return;
        }
        let is_next = |job: &JobId| (begun + 1..=arrival).contains(&process.arrival(*job));
        let jobs: Vec<JobId> = process.jobs.iter().copied().filter(is_next).collect();
        self.registry.with(worker, |numbers| numbers.begun = arrival);
        jobs.into_iter().for_each(|job| self.run(now, worker, job));
    }

    /// Decides the fate of a job that has begun.
    fn run(&mut self, now: Time, worker: WorkerId, job: JobId) {
        let after = self.random.millis(0, 2 * self.temper.job_ms);
        let roll = self.random.range(0, 99);
        let Some(process) = self.processes.get_mut(&worker) else { return };
        let crashes = self.temper.job_crashes;
        let breaks = crashes + self.temper.job_breaks_protocol;
        let hangs = breaks + self.temper.job_hangs;
        let at = now + after;
        if process.is_leaving {
            // The exit is already scheduled.
        } else if roll < crashes {
            self.plan_death(at, worker, 5);
        } else if roll < breaks {
            self.plan_sign(at, worker, Sign::Broke);
        } else if roll >= hangs {
            self.plan_sign(at, worker, Sign::Reply(job));
        }
    }

    /// Returns a recalled job to policy.
    fn take_back(&mut self, now: Time, worker: WorkerId, job: JobId) {
        let raced = self.registry.with(worker, |numbers| numbers.raced.take());
        let begun = self.registry.begun(worker);
        let Some(process) = self.processes.get_mut(&worker) else { return };
        process.ahead.retain(|&ahead| ahead != job);
        process.jobs.retain(|&held| held != job);
        process.unread.retain(|&unread| unread != job);
        process.taken.push(job);
        if process.is_draining && process.jobs.is_empty() {
            self.go(now, worker);
        }
        // Returns the job that was begun during the recall, or sometimes the last job begun before.
        let is_given_back = raced.is_none() && begun > 0 && self.random.percent(10);
        if let Some(arrival) = raced.or(is_given_back.then_some(begun)) {
            let within_ms = self.random.pick(&[0, 5, 50]);
            let after = self.random.millis(0, within_ms);
            self.plan_sign(now + after, worker, Sign::GivesBack(arrival));
        }
    }

    /// Begins the oldest prefetched job.
    fn begin_ahead(&mut self, now: Time, worker: WorkerId) {
        let next = self.processes.get_mut(&worker).and_then(|process| process.ahead.pop_front());
        if let Some(job) = next {
            self.dispatch(now, worker, job);
        }
    }

    /// Schedules the exit of a killed process some time later. The process may die of another cause before.
    fn kill(&mut self, now: Time, worker: WorkerId) {
        let after =
            if self.random.percent(10) { self.random.millis(0, 3000) } else { self.random.millis(0, 30) };
        self.plan_sign(now + after, worker, Sign::Exited(Death::Signal(9)));
    }
}

fn too_large() -> HandlerFailure {
    HandlerFailure {
        code: "result_too_large".into(),
        message: "all too much".into(),
        retryable: false,
        fault: Fault::Dependency,
    }
}
