//! The simulated fleet: agents, supervisors, submitters and the network. Checks all invariants.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::Duration;

use bulkhead_fleet::decide::delivery::host_lost;
use bulkhead_fleet::decide::outcome::{AttemptEnd, Pause};
use bulkhead_fleet::decide::{
    Action, Conclusion, Event, Faults, Handling, Message, Rules, Step, Terms, Write,
};
use bulkhead_fleet::record::{Ending, Phase, Record, Stored};
use bulkhead_shared::{CrashReason, Outcome, RejectReason, Verdict};
use bytes::Bytes;

use super::random::Random;
use super::server::{Ms, Server, is_foreign};

pub(crate) const ACK_WAIT: Ms = 10_000;
pub(crate) const HOST_LOST_AFTER: Ms = 2 * ACK_WAIT;
const HEARTBEAT: Ms = ACK_WAIT / 3;
/// Maximum duration of a short freeze or outage. Short freezes and outages must have no consequences.
pub(crate) const SHORT: Ms = 1500;
/// End of the period in which faults occur.
pub(crate) const FAULTS_UNTIL: Ms = 120_000;
/// Longest run time of a simulated job.
const RUN_MAX: Ms = 6000;
/// Longest deadline of a simulated job.
const DEADLINE_MAX: Ms = 400_000;
/// Time after the last fault within which every job must have an outcome: the guaranteed limit, plus the time for three
/// attempts and the delays between them.
const DECIDED_WITHIN: Ms = HOST_LOST_AFTER + 15_000 + 3 * RUN_MAX + 5000;
/// Time after the last fault within which every message must be acknowledged. Allows for a duplicate that is delayed by
/// `host_lost_after` several times.
const DRAINED_WITHIN: Ms = DECIDED_WITHIN + 3 * HOST_LOST_AFTER;
/// Maximum difference between an agent's corrected clock and the server's clock.
const CLOCK_ERROR: Ms = 300;
/// Delay before the server redelivers a message that an agent has returned unhandled.
const GIVEN_BACK_DELAY: Ms = 250;
/// Maximum delay before the server redelivers a message that several agents have returned unhandled.
const GIVEN_BACK_DELAY_MAX: Ms = 5000;
/// Start of the simulated time. Large enough that subtracting a duration does not underflow.
const EPOCH: Ms = 1_000_000;
/// Maximum number of events in one history.
const EVENTS_MAX: u64 = 2_000_000;

/// Counts how often each situation occurs in the histories.
#[derive(Debug, Default)]
pub(crate) struct Coverage(BTreeMap<&'static str, u64>);

/// Situations that must occur in at least one of the histories.
const REQUIRED: [&str; 28] = [
    "agent killed",
    "agent frozen beyond host_lost_after",
    "outage beyond ack_wait",
    "short outage",
    "leader changed",
    "supervisor lost",
    "write answered as pending",
    "write conflicted",
    "answer lost",
    "stale read",
    "second copy",
    "fenced",
    "host_lost decided",
    "lost claim taken over",
    "decided again announced",
    "returned",
    "left to holder",
    "late decided",
    "given back",
    "given back again",
    "late without a permit",
    "permit kept",
    "dead letter stored",
    "removed dead letter's job repeated",
    "result too large",
    "record overwritten",
    "foreign record read",
    "foreign record replaced",
];

impl Coverage {
    pub(crate) fn count(&mut self, what: &'static str) {
        *self.0.entry(what).or_default() += 1;
    }

    /// Panics if one of the required situations has never occurred.
    pub(crate) fn demand_all(&self) {
        let missing: Vec<_> = REQUIRED.iter().filter(|what| !self.0.contains_key(*what)).collect();
        assert!(missing.is_empty(), "never happened: {missing:?}");
    }
}

/// A scheduled event of the simulation.
#[derive(Clone, Debug)]
pub(crate) enum Happening {
    Publish { job: usize, tries: u32 },
    Published { job: usize },
    Poll { agent: usize },
    Delivered { to: Holder, sequence: u64, job: usize, delivery: u64, published: Ms },
    Perform { to: Holder, sequence: u64, action: Action },
    Arrive { to: Holder, sequence: u64, request: Request },
    Stored { job: usize, writer: Holder, sequence: u64, is_answered: bool },
    Answer { to: Holder, sequence: u64, event: Event },
    Begin { to: Holder, sequence: u64 },
    RunEnds { to: Holder, sequence: u64, run: u64 },
    Heartbeat { agent: usize },
    Kill { agent: usize },
    Freeze { agent: usize, time: Ms },
    LoseSupervisor { agent: usize },
    Outage { time: Ms },
    OutageEnds,
    ChangeLeader,
    Overwrite { job: usize },
    RemoveLetter { job: usize },
}

/// An agent's request to the server, which concerns a single message.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "requests live briefly")]
pub(crate) enum Request {
    Read,
    Write(Write),
    Acknowledge,
    InProgress,
    Negative(Ms),
}

/// Identifies one process of an agent. A killed agent restarts as a new process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Holder {
    pub(crate) agent: usize,
    pub(crate) life: u64,
}

pub(crate) struct Held {
    pub(crate) job: usize,
    handling: Handling,
    /// Identifies the current run of the job. `None` if the job is not running.
    pub(crate) run: Option<u64>,
}

pub(crate) struct Agent {
    pub(crate) life: u64,
    pub(crate) dead_until: Ms,
    pub(crate) frozen_until: Ms,
    pub(crate) held: BTreeMap<u64, Held>,
    clock_error: i64,
    permits: usize,
    /// Times at which permits become free. Contains one entry for each permit that stays in use after a rejection.
    pub(crate) kept_until: Vec<Ms>,
}

#[derive(Clone, Debug)]
pub(crate) struct Job {
    is_idempotent: bool,
    deadline: Ms,
    run: Ms,
    is_accepted: bool,
    begun: u32,
    pub(crate) completed: u32,
    letter: Letter,
}

/// State of a job's dead letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Letter {
    None,
    Stored,
    /// An operator removed the letter at this time.
    Removed(Ms),
}

/// State of a simulated history.
pub(crate) struct World {
    pub(crate) random: Random,
    pub(crate) now: Ms,
    order: u64,
    agenda: BinaryHeap<Reverse<(Ms, u64)>>,
    happenings: BTreeMap<u64, Happening>,
    pub(crate) server: Server,
    pub(crate) agents: Vec<Agent>,
    pub(crate) jobs: Vec<Job>,
    /// Agent processes that were killed, or frozen for longer than [`SHORT`].
    pub(crate) impaired: Vec<Holder>,
    /// Time at which the last fault ends.
    pub(crate) last_fault: Ms,
    /// Percentage of requests and responses that are lost.
    loss: u64,
    faults: Faults,
    runs: u64,
    violation: Option<String>,
    trace: Option<Vec<String>>,
}

impl World {
    /// Creates a history from a seed.
    pub(crate) fn new(seed: u64, faults: Faults) -> Self {
        let mut random = Random::new(seed);
        let agents = random.between(2, 5) as usize;
        let jobs = random.between(5, 40) as usize;
        let loss = [0, 0, 2, 10][random.below(4) as usize];
        let trace = std::env::var("BULKHEAD_SIM_TRACE").is_ok().then(Vec::new);
        let mut world = Self {
            now: EPOCH,
            order: 0,
            agenda: BinaryHeap::new(),
            happenings: BTreeMap::new(),
            server: Server::new(jobs, ACK_WAIT),
            agents: Vec::new(),
            jobs: Vec::new(),
            impaired: Vec::new(),
            last_fault: EPOCH,
            loss,
            faults,
            runs: 0,
            violation: None,
            trace,
            random,
        };
        (0..agents).for_each(|_| world.add_agent());
        (0..jobs).for_each(|_| world.add_job());
        world.plan_faults();
        world
    }

    fn add_agent(&mut self) {
        let agent = self.agents.len();
        let clock_error = self.random.below(2 * CLOCK_ERROR) as i64 - CLOCK_ERROR as i64;
        let permits = self.random.between(1, 6) as usize;
        let (life, dead_until, frozen_until) = (0, 0, 0);
        self.agents.push(Agent {
            life,
            dead_until,
            frozen_until,
            held: BTreeMap::new(),
            clock_error,
            permits,
            kept_until: Vec::new(),
        });
        let (first, heartbeat) = (self.random.below(200), self.random.below(HEARTBEAT));
        self.after(first, Happening::Poll { agent });
        self.after(heartbeat, Happening::Heartbeat { agent });
    }

    fn add_job(&mut self) {
        let job = self.jobs.len();
        let deadline = if self.random.chance(15) { self.random.between(500, 8000) } else { DEADLINE_MAX };
        let (is_idempotent, run) = (self.random.chance(50), self.random.below(RUN_MAX));
        let (is_accepted, begun, completed, letter) = (false, 0, 0, Letter::None);
        self.jobs.push(Job { is_idempotent, deadline, run, is_accepted, begun, completed, letter });
        let at = self.random.below(FAULTS_UNTIL * 3 / 4);
        // The job must have a short deadline, because it has no outcome before its deadline.
        let is_overwritten = deadline < DEADLINE_MAX && self.random.chance(30);
        if is_overwritten {
            let moment = (at + self.random.below(12_000)).saturating_sub(2000);
            self.after(moment, Happening::Overwrite { job });
        }
        self.after(at, Happening::Publish { job, tries: 0 });
        // The outcome that replaces an overwritten record leads to another dead letter.
        if !is_overwritten && self.random.chance(30) {
            self.after(at, Happening::RemoveLetter { job });
        }
        if self.random.chance(10) {
            let again = at + self.random.below(20_000);
            self.after(again, Happening::Publish { job, tries: 0 });
        }
    }

    pub(crate) fn after(&mut self, delay: Ms, happening: Happening) {
        self.order += 1;
        self.agenda.push(Reverse((self.now + delay, self.order)));
        self.happenings.insert(self.order, happening);
    }

    pub(crate) fn violate(&mut self, text: String) {
        self.violation.get_or_insert(text);
    }

    /// Runs the history to the end. Returns the first violation of an invariant.
    pub(crate) fn run(mut self, coverage: &mut Coverage) -> Result<(), String> {
        let mut events = 0;
        while let Some(Reverse((at, order))) = self.agenda.pop() {
            self.now = at;
            let happening = self.happenings.remove(&order).expect("each scheduled entry has an event");
            if let Some(trace) = &mut self.trace {
                trace.push(format!("{} {happening:?}", at - EPOCH));
            }
            self.happen(happening, coverage);
            events += 1;
            assert!(events < EVENTS_MAX, "the history does not end");
            if let Some(violation) = self.violation.take() {
                self.trace.iter().flatten().for_each(|line| println!("{line}"));
                return Err(violation);
            }
            let calm = EPOCH.max(self.last_fault).max(EPOCH + FAULTS_UNTIL);
            if self.now > calm + DECIDED_WITHIN {
                self.check_decided()?;
            }
            if self.now > calm + DRAINED_WITHIN {
                return self.check_drained();
            }
        }
        Ok(())
    }

    fn check_decided(&self) -> Result<(), String> {
        for (number, job) in self.jobs.iter().enumerate().filter(|(_, job)| job.is_accepted) {
            let last = self.server.ledgers[number].history.last();
            // The record might have been overwritten after the job had an outcome.
            let is_over = |record: &Record| match is_foreign(record) {
                true => !self.server.queue.values().any(|message| message.job == number),
                false => matches!(record.phase, Phase::Decided { .. }),
            };
            if !last.is_some_and(|stored| is_over(&stored.record)) {
                self.trace.iter().flatten().for_each(|line| println!("{line}"));
                return Err(format!("job {number} was accepted but is lost or late: {job:?}, {last:?}"));
            }
        }
        Ok(())
    }

    fn check_drained(&self) -> Result<(), String> {
        match self.server.queue.iter().next() {
            Some(message) => Err(format!("a message was never acknowledged: {message:?}")),
            None => self.check_letters(),
        }
    }

    fn check_letters(&self) -> Result<(), String> {
        for (number, job) in self.jobs.iter().enumerate() {
            let Some(Stored { record, .. }) = self.server.ledgers[number].history.last() else { continue };
            if let Phase::Decided { ending, .. } = &record.phase
                && ending.outcome.verdict != Verdict::Ok
                && job.letter == Letter::None
            {
                return Err(format!("the dead letter of job {number} is lost: {job:?}, {ending:?}"));
            }
        }
        Ok(())
    }

    fn happen(&mut self, happening: Happening, coverage: &mut Coverage) {
        match happening {
            Happening::Publish { job, tries } => self.publish(job, tries, coverage),
            Happening::Published { job } => self.jobs[job].is_accepted = true,
            Happening::Poll { agent } => self.poll(agent),
            Happening::Delivered { to, sequence, job, delivery, published } => {
                self.delivered(to, sequence, (job, delivery, published), coverage);
            }
            Happening::Perform { to, sequence, action } => self.perform(to, sequence, action, coverage),
            Happening::Arrive { to, sequence, request } => self.arrive(to, sequence, request, coverage),
            Happening::Stored { job, writer, sequence, is_answered } => {
                self.stored(job, writer, sequence, is_answered, coverage);
            }
            Happening::Answer { to, sequence, event } => self.answer(to, sequence, event, coverage),
            Happening::Begin { to, sequence } => self.begin(to, sequence),
            Happening::RunEnds { to, sequence, run } => self.run_ends(to, sequence, run),
            Happening::Heartbeat { agent } => self.heartbeat(agent),
            Happening::Kill { agent } => self.kill(agent, coverage),
            Happening::Overwrite { job } => self.overwrite(job, coverage),
            Happening::RemoveLetter { job } => self.remove_letter(job, coverage),
            Happening::Freeze { agent, time } => self.freeze(agent, time, coverage),
            Happening::LoseSupervisor { agent } => self.lose_supervisor(agent, coverage),
            Happening::Outage { time } => self.outage(time, coverage),
            Happening::OutageEnds => {
                self.server.is_up = true;
                self.last_fault = self.now;
            }
            Happening::ChangeLeader => {
                coverage.count("leader changed");
                self.server.change_leader(self.now, &mut self.random);
            }
        }
    }

    // The submitter.

    fn publish(&mut self, job: usize, tries: u32, coverage: &mut Coverage) {
        const TRIES_MAX: u32 = 8;
        if tries == TRIES_MAX {
            return;
        }
        let is_lost = !self.server.is_up || self.is_lost();
        let is_answer_lost = self.is_lost();
        if !is_lost {
            if self.server.queue.values().any(|message| message.job == job) {
                coverage.count("second copy");
            }
            self.server.publish(job, self.now);
        }
        if is_lost || is_answer_lost {
            self.after(5000, Happening::Publish { job, tries: tries + 1 });
        } else {
            let delay = self.latency();
            self.after(delay, Happening::Published { job });
        }
    }

    /// Simulates a client that overwrites a job's record with a message that no agent can decode.
    fn overwrite(&mut self, job: usize, coverage: &mut Coverage) {
        let previous = host_lost(&self.terms(job), 1);
        let (nonce, agent) = (String::new(), String::new());
        let record =
            Record { nonce, agent, attempts: 0, phase: Phase::Returned { previous, delivery: None } };
        match self.server.is_up && self.server.overwrite(job, record) {
            true => coverage.count("record overwritten"),
            false => self.after(20, Happening::Overwrite { job }),
        }
    }

    /// Simulates an operator who removes a dead letter, and a submitter who repeats the submission later.
    fn remove_letter(&mut self, job: usize, coverage: &mut Coverage) {
        const PAUSE: Ms = 50;
        if self.jobs[job].letter == Letter::Stored {
            coverage.count("removed dead letter's job repeated");
            self.jobs[job].letter = Letter::Removed(self.now);
            self.after(PAUSE, Happening::Publish { job, tries: 0 });
        } else if self.now < EPOCH + FAULTS_UNTIL {
            self.after(PAUSE, Happening::RemoveLetter { job });
        }
    }

    /// Stores the dead letter of the job whose message has this sequence number.
    fn store_letter(&mut self, job: usize, sequence: u64, coverage: &mut Coverage) {
        coverage.count("dead letter stored");
        let published = self.server.queue.get(&sequence).map(|message| message.published);
        match self.jobs[job].letter {
            Letter::Removed(at) if published.is_some_and(|published| published > at) => {
                self.violate(format!("the dead letter of job {job} was removed and has been stored again"));
            }
            // The first letter was acknowledged too late to prevent a second one.
            Letter::Removed(_) => {}
            Letter::None | Letter::Stored => self.jobs[job].letter = Letter::Stored,
        }
    }

    // The network.

    pub(crate) fn latency(&mut self) -> Ms {
        if self.random.chance(2) { self.random.below(3000) } else { self.random.below(20) }
    }

    /// Decides at random whether a request or response is lost. No messages are lost after the period in which faults
    /// occur.
    pub(crate) fn is_lost(&mut self) -> bool {
        self.now < EPOCH + FAULTS_UNTIL && self.random.chance(self.loss)
    }

    /// Returns true if this agent process has exited.
    fn is_over(&self, to: Holder) -> bool {
        self.agents[to.agent].life != to.life
    }

    /// Postpones the event if the agent is frozen. Returns true if the event was postponed.
    fn is_postponed(&mut self, to: Holder, happening: &Happening) -> bool {
        let until = self.agents[to.agent].frozen_until;
        if until > self.now {
            let late = until - self.now + self.random.below(5);
            self.after(late, happening.clone());
        }
        until > self.now
    }

    // The agents.

    pub(crate) fn holder(&self, agent: usize) -> Holder {
        Holder { agent, life: self.agents[agent].life }
    }

    fn can_act(&self, agent: usize) -> bool {
        self.agents[agent].dead_until <= self.now && self.agents[agent].frozen_until <= self.now
    }

    fn poll(&mut self, agent: usize) {
        let pause = self.random.between(20, 200);
        self.after(pause, Happening::Poll { agent });
        let now = self.now;
        let Agent { held, permits, kept_until, .. } = &mut self.agents[agent];
        kept_until.retain(|until| *until > now);
        let has_permit = held.len() + kept_until.len() < *permits;
        // Without a permit, an agent pulls a message from time to time, because the job's deadline may have passed.
        let pulls = has_permit || self.random.chance(5);
        if !self.can_act(agent) || !self.server.is_up || !pulls {
            return;
        }
        if let Some((sequence, queued)) = self.server.pull(self.now, &mut self.random) {
            let (to, delay) = (self.holder(agent), self.latency());
            let (job, delivery, published) = (queued.job, queued.deliveries, queued.published);
            self.after(delay, Happening::Delivered { to, sequence, job, delivery, published });
        }
    }

    fn delivered(
        &mut self,
        to: Holder,
        sequence: u64,
        (job, delivery, published): (usize, u64, Ms),
        coverage: &mut Coverage,
    ) {
        let same = Happening::Delivered { to, sequence, job, delivery, published };
        if self.is_over(to) || self.is_postponed(to, &same) {
            return;
        }
        if self.agents[to.agent].held.contains_key(&sequence) {
            return self.request(to, sequence, Request::InProgress);
        }
        // In a few cases, all permits are acquired between the pull and the delivery.
        let Agent { held, permits, kept_until, clock_error, .. } = &self.agents[to.agent];
        let is_full = held.len() + kept_until.len() >= *permits;
        let now = Duration::from_millis(self.now.saturating_add_signed(*clock_error));
        let has_permit = !is_full && !self.random.chance(5);
        let message =
            Message { stream_sequence: sequence, delivery, published: Duration::from_millis(published) };
        let is_late = self.terms(job).time_left(&message, now).is_zero();
        let delay = self.random.between(GIVEN_BACK_DELAY, GIVEN_BACK_DELAY_MAX);
        if !has_permit && delivery == 1 && !is_late {
            coverage.count("given back");
            return self.request(to, sequence, Request::Negative(delay));
        }
        if !has_permit && is_late {
            coverage.count("late without a permit");
        }
        if delivery > 1 {
            coverage.count("delivered again");
        }
        let nonce = format!("{}.{}.{}", to.agent, to.life, self.random.next());
        let agent = format!("agent-{}-{}", to.agent, to.life);
        let (terms, rules) = (self.terms(job), rules(self.faults));
        let (handling, step) = if has_permit {
            Handling::begin(message, terms, rules, agent, nonce, 0.5)
        } else {
            coverage.count("given back again");
            let delay = Duration::from_millis(delay);
            Handling::begin_without_permit(message, terms, rules, agent, nonce, delay)
        };
        self.agents[to.agent].held.insert(sequence, Held { job, handling, run: None });
        self.step(to, sequence, step, coverage);
    }

    fn terms(&self, job: usize) -> Terms {
        let deadline = Duration::from_millis(self.jobs[job].deadline);
        Terms { bulkhead: "b".into(), deadline, is_idempotent: self.jobs[job].is_idempotent }
    }

    fn step(&mut self, to: Holder, sequence: u64, step: Step, coverage: &mut Coverage) {
        match step {
            Step::Do(action, delay) => {
                let delay = delay.as_millis() as Ms + self.latency();
                self.after(delay, Happening::Perform { to, sequence, action });
            }
            Step::Done(conclusion) => {
                self.agents[to.agent].held.remove(&sequence);
                match conclusion {
                    Conclusion::Decided => coverage.count("decided"),
                    Conclusion::Repeated => coverage.count("decided again announced"),
                    Conclusion::Fenced => coverage.count("fenced"),
                    Conclusion::Returned { delay, pause } => {
                        coverage.count("returned");
                        if let Pause::Permit(time) = pause {
                            coverage.count("permit kept");
                            let until = self.now + time.as_millis() as Ms;
                            self.agents[to.agent].kept_until.push(until);
                        }
                        self.request(to, sequence, Request::Negative(delay.as_millis() as Ms));
                    }
                    Conclusion::Left(delay) => {
                        coverage.count("left to holder");
                        if let Some(delay) = delay {
                            self.request(to, sequence, Request::Negative(delay.as_millis() as Ms));
                        }
                    }
                }
            }
        }
    }

    fn perform(&mut self, to: Holder, sequence: u64, action: Action, coverage: &mut Coverage) {
        let same = Happening::Perform { to, sequence, action: action.clone() };
        if self.is_over(to) || self.is_postponed(to, &same) {
            return;
        }
        match action {
            Action::Read => self.request(to, sequence, Request::Read),
            Action::Write(write) => self.request(to, sequence, Request::Write(write)),
            Action::Acknowledge => self.request(to, sequence, Request::Acknowledge),
            Action::Submit(_) => {
                let delay = self.latency();
                self.after(delay, Happening::Begin { to, sequence });
            }
            Action::Announce { is_dead, .. } => {
                let is_stored = self.server.is_up && !self.is_lost();
                if is_stored
                    && is_dead
                    && let Some(held) = self.agents[to.agent].held.get(&sequence)
                {
                    self.store_letter(held.job, sequence, coverage);
                }
                self.after(5, Happening::Answer { to, sequence, event: Event::Announced(is_stored) });
            }
        }
    }

    fn answer(&mut self, to: Holder, sequence: u64, event: Event, coverage: &mut Coverage) {
        let same = Happening::Answer { to, sequence, event: event.clone() };
        if self.is_over(to) || self.is_postponed(to, &same) {
            return;
        }
        let agent = &mut self.agents[to.agent];
        let Some(held) = agent.held.get_mut(&sequence) else { return };
        let now = Duration::from_millis(self.now.saturating_add_signed(agent.clock_error));
        let step = held.handling.apply(event, now);
        self.step(to, sequence, step, coverage);
    }

    /// Simulates the submission of a job to the agent's supervisor, which rejects a few jobs.
    fn begin(&mut self, to: Holder, sequence: u64) {
        if self.is_over(to) {
            return;
        }
        let Some(held) = self.agents[to.agent].held.get_mut(&sequence) else { return };
        let job = held.job;
        if self.random.chance(5) {
            let reasons = [RejectReason::QueueFull, RejectReason::Draining, RejectReason::Quarantined];
            let reason = reasons[self.random.below(3) as usize];
            let end = reported(self.outcome(job, Verdict::rejected(reason)));
            return self.after(1, Happening::Answer { to, sequence, event: Event::Ended(end) });
        }
        self.runs += 1;
        held.run = Some(self.runs);
        self.jobs[job].begun += 1;
        if self.jobs[job].begun > 1 && !self.jobs[job].is_idempotent {
            self.violate(format!("job {job} is not idempotent and began twice"));
        }
        let (time, run) = (self.jobs[job].run, self.runs);
        self.after(time, Happening::RunEnds { to, sequence, run });
    }

    fn run_ends(&mut self, to: Holder, sequence: u64, run: u64) {
        if self.is_over(to) {
            return;
        }
        let Some(held) = self.agents[to.agent].held.get_mut(&sequence).filter(|held| held.run == Some(run))
        else {
            return;
        };
        held.run = None;
        let job = held.job;
        let verdict = match self.random.below(20) {
            0 => Verdict::Crashed { reason: CrashReason::Signal, status: Some(11), message: String::new() },
            1 => Verdict::DeadlineRunning,
            _ => Verdict::Ok,
        };
        self.jobs[job].completed += u32::from(verdict == Verdict::Ok);
        let has_payload = verdict == Verdict::Ok && self.random.chance(30);
        let payload = Bytes::from_static(if has_payload { b"result" } else { b"" });
        let end = AttemptEnd::Reported(Ending { outcome: self.outcome(job, verdict), payload });
        self.after(1, Happening::Answer { to, sequence, event: Event::Ended(end) });
    }

    fn outcome(&self, job: usize, verdict: Verdict) -> Outcome {
        let terms = self.terms(job);
        let retryable = verdict.is_retryable(terms.is_idempotent);
        Outcome { verdict, retryable, ..host_lost(&terms, 1) }
    }

    fn heartbeat(&mut self, agent: usize) {
        self.after(HEARTBEAT, Happening::Heartbeat { agent });
        if self.can_act(agent) {
            let to = self.holder(agent);
            let held: Vec<u64> = self.agents[agent].held.keys().copied().collect();
            held.into_iter().for_each(|sequence| self.request(to, sequence, Request::InProgress));
        }
    }
}

fn rules(faults: Faults) -> Rules {
    Rules {
        ack_wait: Duration::from_millis(ACK_WAIT),
        host_lost_after: Duration::from_millis(HOST_LOST_AFTER),
        attempts_max: 3,
        result_bytes_max: 1 << 20,
        is_rate_limit_shared: false,
        is_isolated: false,
        faults,
    }
}

fn reported(outcome: Outcome) -> AttemptEnd {
    AttemptEnd::Reported(Ending { outcome, payload: Bytes::new() })
}
