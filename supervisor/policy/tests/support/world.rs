//! Everything outside policy. A caller performs actions. Workers start, run jobs, misbehave and die. Clients submit and
//! cancel jobs. An operator issues commands. The world is realistic where policy depends on it: a killed process exits
//! some time later, and messages from living workers arrive in order. Only messages from exited workers (ghosts) arrive
//! at random times.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use bulkhead_policy::{
    Action, Capabilities, Death, Event, LimitChange, Limits, Reply, Submission, Time, WorkerId,
};
use bulkhead_shared::{Fault, HandlerFailure, JobId, Priority};

use super::Tag;
use super::journal::Registry;
use super::random::Random;
use super::settings::{self, Behaviour, RSS_LIMIT_BYTES};

/// A scheduled event. An event that concerns a worker is dropped if the worker exits before the event is due.
#[derive(Debug)]
enum WorldEvent {
    Arrival,
    Cancel(JobId),
    MemoryExhausted(JobId),
    Operator,
    Resume,
    Wake,
    StaleMessage,
    Process(WorkerId, WorkerMessage),
    /// All descendants of a dead process are gone.
    Reaped(WorkerId),
}

#[derive(Debug)]
enum WorkerMessage {
    Spawned,
    SpawnFailed,
    Hello,
    Extend,
    StartStatus,
    Ready,
    Beat,
    Reply(JobId),
    /// The worker starts every job up to this sequence number.
    Begins(u64),
    /// The worker returns the job with this sequence number because the supervisor has recalled the job.
    ReturnsJob(u64),
    /// Part of an oversized result. The second value is the number of parts that are still to come.
    Part(JobId, u64),
    Stopping,
    ProtocolViolated,
    Memory,
    CpuTimeChecked,
    /// The supervisor reads the timestamp that the worker last wrote.
    AliveAt(Time),
    Exited(Death),
}

struct Process {
    has_dispatch_thread: bool,
    can_resize: bool,
    has_journal: bool,
    /// All jobs ever sent to the worker, in order.
    sent: Vec<JobId>,
    /// Jobs recently recalled from the worker.
    taken: Vec<JobId>,
    /// Prefetched jobs.
    prefetched: VecDeque<JobId>,
    /// Heartbeat interval sent to the worker.
    heartbeat: Duration,
    is_ready: bool,
    is_silent: bool,
    is_draining: bool,
    /// True if the process is about to exit and no longer reads jobs.
    is_exiting: bool,
    /// Jobs in flight.
    jobs: Vec<JobId>,
    /// Jobs in flight that the worker has not read yet.
    unread: Vec<JobId>,
    /// Jobs in flight for which an oversized result has started to arrive.
    oversized: Vec<JobId>,
}

impl Process {
    /// Returns the number of a job among all jobs sent to the worker. If the job was sent more than once, returns the
    /// last of its numbers.
    fn send_number(&self, job: JobId) -> u64 {
        self.sent.iter().rposition(|sent| *sent == job).map_or(0, |at| at as u64 + 1)
    }
}

pub(crate) struct World {
    random: Random,
    behaviour: Behaviour,
    limits: Limits,
    registry: Registry,
    agenda: BTreeMap<(Time, u64), WorldEvent>,
    sequence: u64,
    processes: HashMap<WorkerId, Process>,
    /// Workers that exited recently. Stale messages from them can still arrive.
    exited: Vec<WorkerId>,
    /// Recently dispatched jobs, including jobs that have already ended.
    dispatched_jobs: Vec<JobId>,
    next_tag: u64,
    next_pid: u32,
}

impl World {
    pub(crate) fn new(mut random: Random, limits: Limits, registry: Registry) -> Self {
        let behaviour = Behaviour::draw(&mut random);
        let mut world = Self {
            random,
            behaviour,
            limits,
            registry,
            agenda: BTreeMap::new(),
            sequence: 0,
            processes: HashMap::new(),
            exited: Vec::new(),
            dispatched_jobs: Vec::new(),
            next_tag: 0,
            next_pid: 100,
        };
        world.schedule(Time::ZERO, WorldEvent::Arrival);
        world.schedule(Time::ZERO + Duration::from_millis(3), WorldEvent::StaleMessage);
        let first_operator = world.random.millis(1, world.behaviour.operator_ms);
        world.schedule(Time::ZERO + first_operator, WorldEvent::Operator);
        world
    }

    fn schedule(&mut self, at: Time, happening: WorldEvent) {
        self.sequence += 1;
        self.agenda.insert((at, self.sequence), happening);
    }

    fn schedule_message(&mut self, at: Time, worker: WorkerId, message: WorkerMessage) {
        self.schedule(at, WorldEvent::Process(worker, message));
    }

    /// Returns the time of the next event.
    pub(crate) fn due(&self) -> Option<Time> {
        self.agenda.first_key_value().map(|((at, _), _)| *at)
    }

    /// Returns the random time by which the supervisor is late, or `None` if the supervisor is on time.
    pub(crate) fn supervisor_delay(&mut self) -> Option<Duration> {
        self.random.percent(self.behaviour.supervisor_delay).then(|| self.random.millis(1, 5000))
    }

    pub(crate) fn chance(&mut self, percent: u64) -> bool {
        self.random.percent(percent)
    }

    pub(crate) fn millis(&mut self, low: u64, high: u64) -> Duration {
        self.random.millis(low, high)
    }

    /// Returns the next due event as the caller would report it to the bulkhead. Returns `None` if no event is due or
    /// the event's worker has exited.
    pub(crate) fn take(&mut self, now: Time) -> Option<Event<Tag>> {
        let entry = self.agenda.first_entry().filter(|entry| entry.key().0 <= now)?;
        match entry.remove() {
            WorldEvent::Arrival => Some(self.send_number(now)),
            WorldEvent::Cancel(job) => Some(Event::Cancel { job, unless_begun: self.random.percent(30) }),
            WorldEvent::MemoryExhausted(job) => Some(Event::MemoryExhausted { job }),
            WorldEvent::Operator => Some(self.operator(now)),
            WorldEvent::Resume => Some(Event::Resume),
            WorldEvent::Wake => Some(Event::Start),
            WorldEvent::StaleMessage => self.stale_message(now),
            WorldEvent::Process(worker, message) => self.worker_message(now, worker, message),
            WorldEvent::Reaped(worker) => Some(match self.random.percent(3) {
                true => Event::LostWithKeeper { worker },
                false => Event::Reaped { worker },
            }),
        }
    }

    // Clients and the operator.

    fn send_number(&mut self, now: Time) -> Event<Tag> {
        let pause = match self.random.percent(self.behaviour.burst) {
            true => Duration::ZERO,
            false => self.random.millis(0, 2 * self.behaviour.arrival_ms),
        };
        self.schedule(now + pause, WorldEvent::Arrival);
        self.next_tag += 1;
        let most = 2 * u64::try_from(self.limits.deadline.as_millis()).unwrap_or(u64::MAX) + 2;
        let deadline = self
            .random
            .percent(self.behaviour.own_deadline)
            .then(|| if self.random.percent(3) { Duration::ZERO } else { self.random.millis(1, most) });
        let own_run_limit = self.random.percent(self.behaviour.own_run_limit);
        let run_limit = own_run_limit.then(|| {
            // With a very short limit, a job is recalled often before a worker starts it.
            let most = if self.random.percent(30) { 5 } else { most };
            self.random.millis(1, most)
        });
        let priority = self.random.pick(&[Priority::Critical, Priority::Normal, Priority::BestEffort]);
        let idempotent = self.random.percent(50);
        let cost = self.random.pick(&[1, 1, 1, 2, 7]);
        let is_resendable = self.random.percent(90);
        let digest = self.limits.poison.is_some().then(|| u128::from(self.random.range(0, 8)).into());
        let record = Tag(self.next_tag);
        let plain = Submission::new(record);
        let times = Submission { deadline, run_limit, ..plain };
        // Chooses a worker that exists or has existed.
        let mut workers: Vec<WorkerId> = self.processes.keys().chain(&self.exited).copied().collect();
        workers.sort_unstable();
        // The choice is derived from the job's number and not from a random number, so that the random sequence stays
        // the same.
        let tag = usize::try_from(self.next_tag).unwrap_or_default();
        let preferred_worker =
            (tag % 4 == 0).then(|| workers.get(tag / 4 % workers.len().max(1)).copied()).flatten();
        Event::Submit(Submission {
            priority,
            idempotent,
            is_resendable,
            digest,
            cost,
            preferred_worker,
            ..times
        })
    }

    /// Sometimes schedules the cancellation of an accepted job, or a shortage of memory for the job.
    pub(crate) fn accepted(&mut self, now: Time, job: JobId) {
        if self.random.percent(self.behaviour.cancels) {
            let after = self.random.millis(0, 2 * self.behaviour.job_ms + 20);
            let is_given_up = self.random.percent(30);
            let end = if is_given_up { WorldEvent::MemoryExhausted(job) } else { WorldEvent::Cancel(job) };
            self.schedule(now + after, end);
        }
    }

    fn operator(&mut self, now: Time) -> Event<Tag> {
        let pause = self.random.millis(1, 2 * self.behaviour.operator_ms);
        self.schedule(now + pause, WorldEvent::Operator);
        match self.random.range(0, 16) {
            13 | 14 => Event::Reconfigure(Box::new(self.limits())),
            15 | 16 => Event::ReplaceWorkers,
            0 => {
                let until = now + self.random.millis(0, 2000);
                self.schedule(until, WorldEvent::Resume);
                Event::Drain
            }
            8..11 => Event::ChangeLimits(self.change()),
            11 => {
                let until = now + self.random.millis(0, 200);
                self.schedule(until, WorldEvent::Wake);
                Event::ScaleToZero
            }
            12 => {
                // This event has an effect only while the bulkhead is scaled to zero. Jobs then wait for the start.
                let until = now + self.random.millis(0, 200);
                self.schedule(until, WorldEvent::Wake);
                Event::AnnounceStart
            }
            6 => Event::ForceBreaker { open: true },
            7 => Event::ForceBreaker { open: false },
            1 => Event::Resume,
            2 => Event::Reset,
            3 => Event::SupervisorPaused,
            _ => Event::Restart,
        }
    }

    /// Returns randomly changed limits, as if the configuration file had been edited. Either all keys or only a few
    /// have new values.
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

    fn change(&mut self) -> LimitChange {
        let mut pick = |numbers: &[u32]| self.random.percent(50).then(|| self.random.pick(numbers));
        LimitChange {
            processes: pick(&[1, 2, 3, 5]),
            max_in_flight: pick(&[1, 1, 2, 4, 8]),
            max_queue: pick(&[0, 1, 5, 20]),
            rate_limit: None,
        }
    }

    /// Returns a stale message: either from a worker that has exited or never existed, or about a job that the worker
    /// does not have.
    fn stale_message(&mut self, now: Time) -> Option<Event<Tag>> {
        let pause = self.random.millis(1, 100 * self.behaviour.arrival_ms);
        self.schedule(now + pause, WorldEvent::StaleMessage);
        let job = match self.dispatched_jobs.len() as u64 {
            0 => JobId(self.random.draw()),
            count => self.dispatched_jobs[self.random.range(0, count - 1) as usize],
        };
        if self.random.percent(20) {
            return Some(Event::Cancel { job, unless_begun: self.random.percent(30) });
        }
        let count = self.exited.len() as u64;
        if count == 0 {
            return None;
        }
        let mut worker = self.exited[self.random.range(0, count - 1) as usize];
        if self.random.percent(10) {
            worker = WorkerId { place: worker.place + 1000, generation: 7 };
        }
        let message = "a stale message".to_owned();
        Some(match self.random.range(0, 14) {
            0 => Event::Spawned { worker, pid: 1 },
            1 => Event::SpawnFailed { worker, message, lacks_id: false },
            2 => Event::Hello {
                worker,
                capabilities: Capabilities { has_dispatch_thread: true, can_resize: true },
                journal: None,
            },
            3 => Event::Ready { worker },
            4 => Event::FrameReceived { worker },
            5 => Event::ProtocolViolated { worker, message },
            6 => Event::Stopping { worker },
            7 => match self.random.percent(50) {
                true => Event::Exited { worker, death: Death::Exit(0) },
                false => Event::JobUnread { worker, job },
            },
            8 => Event::Memory { worker, rss_bytes: u64::MAX },
            9 => Event::ExtendStart { worker, more: Duration::from_secs(9) },
            10 => Event::StartStatus { worker, text: message },
            11 => Event::CpuTimeChecked { worker, is_starved: false },
            12 => Event::ResultTooLarge { worker, job, failure: too_large() },
            13 => Event::AliveAt { worker, at: Time(u64::MAX) },
            _ => Event::Replied { worker, job, reply: Reply::Ok },
        })
    }

    // Processes.

    fn worker_message(&mut self, now: Time, worker: WorkerId, message: WorkerMessage) -> Option<Event<Tag>> {
        let process = self.processes.get_mut(&worker)?;
        let event = match message {
            WorkerMessage::Spawned => {
                self.next_pid += 1;
                Event::Spawned { worker, pid: self.next_pid }
            }
            WorkerMessage::SpawnFailed => {
                self.retire(worker);
                let lacks_id = worker.generation.is_multiple_of(4);
                Event::SpawnFailed { worker, message: "no such program".into(), lacks_id }
            }
            WorkerMessage::Exited(death) => {
                if let Some(job) = process.unread.pop() {
                    process.is_exiting = true;
                    self.schedule_message(now, worker, WorkerMessage::Exited(death));
                    return Some(match self.random.percent(30) {
                        true => Event::JobNotBegun { worker, job },
                        false => Event::JobUnread { worker, job },
                    });
                }
                self.retire(worker);
                match self.random.percent(5) {
                    true => Event::LostWithKeeper { worker },
                    false => {
                        self.schedule_reaping(now, worker);
                        Event::Exited { worker, death }
                    }
                }
            }
            _ if process.is_exiting => return None,
            WorkerMessage::Hello => {
                let Process { has_dispatch_thread, can_resize, has_journal, .. } = *process;
                let capabilities = Capabilities { has_dispatch_thread, can_resize };
                let journal = has_journal.then(|| self.registry.journal(worker));
                process.heartbeat = self.limits.health.heartbeat;
                self.schedule_message(now + self.limits.health.heartbeat / 2, worker, WorkerMessage::Beat);
                Event::Hello { worker, capabilities, journal }
            }
            WorkerMessage::Extend => Event::ExtendStart { worker, more: self.random.millis(0, 3000) },
            WorkerMessage::StartStatus => Event::StartStatus { worker, text: "half way".into() },
            WorkerMessage::Ready => {
                process.is_ready = true;
                if self.random.percent(self.behaviour.dies_idle) {
                    self.exit_idle(now, worker);
                }
                Event::Ready { worker }
            }
            WorkerMessage::Beat => return self.beat(now, worker),
            WorkerMessage::Reply(job) => return self.reply(now, worker, job),
            WorkerMessage::Begins(send_number) => {
                self.begin(now, worker, send_number);
                return None;
            }
            WorkerMessage::ReturnsJob(send_number) => return self.return_job(now, worker, send_number),
            WorkerMessage::Part(job, left) => return self.part(now, worker, job, left),
            WorkerMessage::Stopping => {
                self.start_draining(now, worker);
                Event::Stopping { worker }
            }
            WorkerMessage::ProtocolViolated => Event::ProtocolViolated { worker, message: "nonsense".into() },
            WorkerMessage::CpuTimeChecked => {
                Event::CpuTimeChecked { worker, is_starved: self.random.percent(30) }
            }
            WorkerMessage::AliveAt(at) => Event::AliveAt { worker, at },
            WorkerMessage::Memory => {
                let rss_bytes = self.random.range(0, 2 * RSS_LIMIT_BYTES);
                Event::Memory { worker, rss_bytes }
            }
        };
        Some(event)
    }

    /// Schedules the time at which all descendants of a worker have exited. Usually there are no descendants, but
    /// sometimes they take a long time to exit.
    fn schedule_reaping(&mut self, now: Time, worker: WorkerId) {
        let within_ms = self.random.pick(&[0, 0, 0, 20, 3000]);
        let after = self.random.millis(0, within_ms);
        self.schedule(now + after, WorldEvent::Reaped(worker));
    }

    /// Returns a recalled job to the bulkhead, which decides whether to run the job again.
    fn return_job(&mut self, now: Time, worker: WorkerId, send_number: u64) -> Option<Event<Tag>> {
        let process = self.processes.get_mut(&worker)?;
        let job = *process.sent.get(send_number as usize - 1)?;
        let is_its = process.send_number(job) == send_number && !process.oversized.contains(&job);
        if let Some(at) = process.prefetched.iter().position(|&prefetched| is_its && prefetched == job) {
            process.prefetched.remove(at);
        } else if let Some(at) = process.jobs.iter().position(|&held| is_its && held == job) {
            process.jobs.swap_remove(at);
            self.begin_prefetched(now, worker);
            let process = self.processes.get_mut(&worker)?;
            if process.is_draining && process.jobs.is_empty() {
                self.start_draining(now, worker);
            }
        }
        Some(Event::JobReturned { worker, job, send_number })
    }

    fn retire(&mut self, worker: WorkerId) {
        self.registry.forget(worker);
        self.processes.remove(&worker);
        self.exited.push(worker);
        if self.exited.len() > 20 {
            self.exited.remove(0);
        }
    }

    fn beat(&mut self, now: Time, worker: WorkerId) -> Option<Event<Tag>> {
        let process = self.processes.get_mut(&worker)?;
        if process.is_silent {
            return None;
        }
        if self.random.percent(self.behaviour.falls_silent) && self.random.percent(10) {
            process.is_silent = true;
        }
        let is_muted = !process.has_dispatch_thread && !process.jobs.is_empty();
        let wait = process.heartbeat.mul_f64(self.random.range(50, 95) as f64 / 100.0);
        self.schedule_message(now + wait, worker, WorkerMessage::Beat);
        if self.random.percent(self.behaviour.reports_memory) {
            self.schedule_message(now, worker, WorkerMessage::Memory);
        }
        (!is_muted).then_some(Event::FrameReceived { worker })
    }

    fn reply(&mut self, now: Time, worker: WorkerId, job: JobId) -> Option<Event<Tag>> {
        let process = self.processes.get_mut(&worker)?;
        // Two replies can be scheduled for a cancelled job. Most workers send only the first of them.
        let known = process.jobs.iter().position(|&j| j == job);
        if known.is_none() && !self.random.percent(20) {
            return None;
        }
        if self.random.percent(6)
            && let Some(prefetched) = process.prefetched.pop_back()
        {
            return Some(Event::Replied { worker, job: prefetched, reply: Reply::Ok });
        }
        if self.random.percent(4)
            && let Some(taken) = process.taken.pop()
            && !process.jobs.contains(&taken)
            && !process.prefetched.contains(&taken)
        {
            return Some(Event::Replied { worker, job: taken, reply: Reply::Ok });
        }
        if self.random.percent(1) && process.has_journal && self.random.percent(20) {
            let send_number = process.send_number(job) + 1;
            return Some(Event::JobReturned { worker, job, send_number });
        }
        let send_number = process.send_number(job);
        if known.is_some() {
            self.begin(now, worker, send_number);
        }
        let process = self.processes.get_mut(&worker)?;
        if process.oversized.contains(&job) {
            // The reply follows after the last part of the result.
            return None;
        }
        if self.random.percent(self.behaviour.oversizes) {
            process.oversized.push(job);
            let parts = self.random.range(0, 8);
            self.schedule_part(now, worker, job, parts);
            return Some(Event::ResultTooLarge { worker, job, failure: too_large() });
        }
        if let Some(at) = known {
            process.jobs.swap_remove(at);
            self.begin_prefetched(now, worker);
        }
        let process = self.processes.get_mut(&worker)?;
        if process.is_draining && process.jobs.is_empty() {
            self.start_draining(now, worker);
        } else if self.random.percent(self.behaviour.leaves_after_job) {
            self.exit_after_job(now, worker);
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

    /// Schedules the next part of an oversized result. Occasionally schedules nothing, to simulate a worker that stops
    /// in the middle of the result.
    fn schedule_part(&mut self, now: Time, worker: WorkerId, job: JobId, left: u64) {
        let within_ms = self.random.pick(&[0, 10, 500, 500, 1500]);
        if !self.random.percent(5) {
            let after = self.random.millis(0, within_ms);
            self.schedule_message(now + after, worker, WorkerMessage::Part(job, left));
        }
    }

    fn part(&mut self, now: Time, worker: WorkerId, job: JobId, left: u64) -> Option<Event<Tag>> {
        if left > 0 {
            self.schedule_part(now, worker, job, left - 1);
            return Some(Event::FrameReceived { worker });
        }
        let process = self.processes.get_mut(&worker)?;
        process.oversized.retain(|&other| other != job);
        process.jobs.retain(|&other| other != job);
        self.begin_prefetched(now, worker);
        let process = self.processes.get_mut(&worker)?;
        if process.is_draining && process.jobs.is_empty() {
            self.start_draining(now, worker);
        }
        Some(Event::Replied { worker, job, reply: Reply::Failed(too_large()) })
    }

    fn exit_idle(&mut self, now: Time, worker: WorkerId) {
        if self.random.percent(30) {
            let after = self.random.millis(0, 1000);
            self.schedule_message(now + after, worker, WorkerMessage::Stopping);
        } else {
            self.schedule_exit(now, worker, 1000);
        }
    }

    /// Makes a worker exit after a job. Some workers announce their exit, and others do not.
    fn exit_after_job(&mut self, now: Time, worker: WorkerId) {
        if self.random.percent(50) {
            self.schedule_message(now, worker, WorkerMessage::Stopping);
        } else if let Some(process) = self.processes.get_mut(&worker)
            && process.jobs.is_empty()
        {
            process.is_exiting = true;
            let after = self.random.millis(0, 20);
            self.schedule_message(now + after, worker, WorkerMessage::Exited(Death::Exit(0)));
        }
    }

    /// Makes a process start draining. The process exits once it has no jobs left.
    fn start_draining(&mut self, now: Time, worker: WorkerId) {
        let disobeys = self.random.percent(self.behaviour.ignores_drain);
        let after = self.random.millis(0, 50);
        let Some(process) = self.processes.get_mut(&worker) else { return };
        process.is_draining = true;
        if process.jobs.is_empty() && !disobeys {
            process.is_exiting = true;
            self.schedule_message(now + after, worker, WorkerMessage::Exited(Death::Exit(0)));
        }
    }

    fn schedule_exit(&mut self, now: Time, worker: WorkerId, within_ms: u64) {
        let after = self.random.millis(0, within_ms);
        let death = self.random.pick(&[
            Death::Exit(0),
            Death::Exit(1),
            Death::Signal(9),
            Death::Signal(11),
            Death::Violation("ptrace"),
            Death::Oom,
            Death::TmpFull,
        ]);
        self.schedule_message(now + after, worker, WorkerMessage::Exited(death));
    }

    // Actions.

    pub(crate) fn perform(&mut self, now: Time, action: &Action<Tag>) {
        match action {
            Action::Spawn { worker, .. } => self.spawn(now, *worker),
            Action::Dispatch { worker, job, is_prefetched, .. } => {
                let begins_during_recall = self.random.percent(20);
                self.registry.with(*worker, |record| record.begins_during_recall = begins_during_recall);
                if let Some(process) = self.processes.get_mut(worker) {
                    process.sent.push(*job);
                    process.jobs.retain(|held| held != job);
                    if *is_prefetched {
                        process.prefetched.push_back(*job);
                    }
                }
                match is_prefetched {
                    true => self.dispatched_jobs.push(*job),
                    false => self.dispatch(now, *worker, *job),
                }
            }
            Action::Recalled { worker, job } => self.recall(now, *worker, *job),
            Action::Cancel { worker, job } => {
                if !self.random.percent(self.behaviour.ignores_cancel) {
                    let after = self.random.millis(0, 400);
                    self.schedule_message(now + after, *worker, WorkerMessage::Reply(*job));
                }
            }
            Action::Drain { worker } => self.start_draining(now, *worker),
            Action::Kill { worker, .. } => self.kill(now, *worker),
            Action::SetMaxInFlight { worker, .. } => {
                let can_resize = self.processes.get(worker).is_none_or(|process| process.can_resize);
                assert!(can_resize, "{worker:?} was sent a frame that it does not support");
            }
            Action::CheckCpuTime { worker } => {
                self.schedule_message(now, *worker, WorkerMessage::CpuTimeChecked)
            }
            Action::RecordCpuTime { worker } => {
                if self.random.percent(50) {
                    let most = self.random.pick(&[0, 100, 5_000]);
                    let before = self.random.millis(0, most);
                    self.schedule_message(now, *worker, WorkerMessage::AliveAt(now - before));
                }
            }
            Action::SendOutcome(_) | Action::Report(_) => {}
        }
    }

    fn spawn(&mut self, now: Time, worker: WorkerId) {
        let process = Process {
            has_dispatch_thread: self.random.percent(self.behaviour.has_dispatch_thread),
            can_resize: self.random.percent(70),
            has_journal: self.random.percent(70),
            sent: Vec::new(),
            taken: Vec::new(),
            prefetched: VecDeque::new(),
            heartbeat: self.limits.health.heartbeat,
            is_ready: false,
            is_silent: false,
            is_draining: false,
            is_exiting: false,
            jobs: Vec::new(),
            unread: Vec::new(),
            oversized: Vec::new(),
        };
        self.processes.insert(worker, process);
        let born = now + self.random.millis(0, self.behaviour.start_ms);
        if self.random.percent(self.behaviour.spawn_fails) {
            self.schedule_message(born, worker, WorkerMessage::SpawnFailed);
            return;
        }
        self.schedule_message(born, worker, WorkerMessage::Spawned);
        if self.random.percent(self.behaviour.dies_at_start) {
            self.schedule_exit(born, worker, self.behaviour.start_ms);
        }
        if self.random.percent(self.behaviour.never_says_hello) {
            return;
        }
        let hello = born + self.random.millis(0, self.behaviour.start_ms);
        self.schedule_message(hello, worker, WorkerMessage::Hello);
        if self.random.percent(self.behaviour.extends_start) {
            let after = self.random.millis(0, self.behaviour.start_ms);
            self.schedule_message(hello + after, worker, WorkerMessage::Extend);
            self.schedule_message(hello + after, worker, WorkerMessage::StartStatus);
        }
        if !self.random.percent(self.behaviour.never_ready) {
            let ready = hello + self.random.millis(0, 2 * self.behaviour.start_ms);
            self.schedule_message(ready, worker, WorkerMessage::Ready);
        }
    }

    fn dispatch(&mut self, now: Time, worker: WorkerId, job: JobId) {
        self.dispatched_jobs.push(job);
        if self.dispatched_jobs.len() > 20 {
            self.dispatched_jobs.remove(0);
        }
        let reads_nothing = self.random.percent(self.behaviour.reads_nothing);
        let is_late = self.random.percent(self.behaviour.begins_late);
        let late_ms = if is_late { self.random.pick(&[5, 500, 5000]) } else { 0 };
        let late = self.random.millis(0, late_ms);
        let Some(process) = self.processes.get_mut(&worker) else { return };
        assert!(process.is_ready, "a job was sent to a process that was never ready");
        process.jobs.push(job);
        let send_number = process.send_number(job);
        if process.is_exiting || reads_nothing {
            process.unread.push(job);
            if reads_nothing && !process.is_exiting {
                self.schedule_exit(now + late, worker, 5);
            }
        } else if process.has_journal && late_ms > 0 {
            self.schedule_message(now + late, worker, WorkerMessage::Begins(send_number));
        } else {
            self.begin(now, worker, send_number);
        }
    }

    /// Makes a process start every job up to the given number, except for jobs that have been recalled.
    fn begin(&mut self, now: Time, worker: WorkerId, send_number: u64) {
        let Some(process) = self.processes.get_mut(&worker) else { return };
        let begun = self.registry.begun(worker);
        let taken = self.registry.with(worker, |record| record.recalled_up_to);
        if send_number <= begun.max(taken) {
            return;
        }
        let is_next = |job: &JobId| (begun + 1..=send_number).contains(&process.send_number(*job));
        let jobs: Vec<JobId> = process.jobs.iter().copied().filter(is_next).collect();
        self.registry.with(worker, |record| record.begun = send_number);
        jobs.into_iter().for_each(|job| self.run(now, worker, job));
    }

    /// Decides how a job that has started will end.
    fn run(&mut self, now: Time, worker: WorkerId, job: JobId) {
        let after = self.random.millis(0, 2 * self.behaviour.job_ms);
        let roll = self.random.range(0, 99);
        let Some(process) = self.processes.get_mut(&worker) else { return };
        let crashes = self.behaviour.job_crashes;
        let breaks = crashes + self.behaviour.job_breaks_protocol;
        let hangs = breaks + self.behaviour.job_hangs;
        let at = now + after;
        if process.is_exiting {
            // The exit is already scheduled.
        } else if roll < crashes {
            self.schedule_exit(at, worker, 5);
        } else if roll < breaks {
            self.schedule_message(at, worker, WorkerMessage::ProtocolViolated);
        } else if roll >= hangs {
            self.schedule_message(at, worker, WorkerMessage::Reply(job));
        }
    }

    /// Removes a recalled job from a worker. If the worker had just started the job, schedules the return of the job.
    fn recall(&mut self, now: Time, worker: WorkerId, job: JobId) {
        let begun_during_recall = self.registry.with(worker, |record| record.begun_during_recall.take());
        let begun = self.registry.begun(worker);
        let Some(process) = self.processes.get_mut(&worker) else { return };
        process.prefetched.retain(|&prefetched| prefetched != job);
        process.jobs.retain(|&held| held != job);
        process.unread.retain(|&unread| unread != job);
        process.taken.push(job);
        if process.is_draining && process.jobs.is_empty() {
            self.start_draining(now, worker);
        }
        // Returns the job that was started during the recall. Sometimes returns the last job that was started before
        // the recall instead.
        let returns_job = begun_during_recall.is_none() && begun > 0 && self.random.percent(10);
        if let Some(send_number) = begun_during_recall.or(returns_job.then_some(begun)) {
            let within_ms = self.random.pick(&[0, 5, 50]);
            let after = self.random.millis(0, within_ms);
            self.schedule_message(now + after, worker, WorkerMessage::ReturnsJob(send_number));
        }
    }

    /// Starts the oldest prefetched job.
    fn begin_prefetched(&mut self, now: Time, worker: WorkerId) {
        let next = self.processes.get_mut(&worker).and_then(|process| process.prefetched.pop_front());
        if let Some(job) = next {
            self.dispatch(now, worker, job);
        }
    }

    /// Schedules the exit of a process that was sent SIGKILL. In the meantime, the process might die of another cause.
    fn kill(&mut self, now: Time, worker: WorkerId) {
        let after =
            if self.random.percent(10) { self.random.millis(0, 3000) } else { self.random.millis(0, 30) };
        self.schedule_message(now + after, worker, WorkerMessage::Exited(Death::Signal(9)));
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
