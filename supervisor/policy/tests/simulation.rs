//! Random sequences of events with a virtual clock. A model of the rules checks every step.
//!
//! `BULKHEAD_SIM_SEED` replays a single history. `BULKHEAD_SIM_STEPS` sets the total number of steps.

#![expect(clippy::expect_used, clippy::panic, reason = "a test says what is wrong by panicking")]

mod support;

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use bulkhead_policy::{Action, Bulkhead, Event, Time};

use support::Tag;
use support::coverage::Coverage;
use support::journal::Registry;
use support::model::Model;
use support::random::Random;
use support::settings;
use support::world::World;

const STEPS: u64 = 2_000_000;
const STEPS_PER_HISTORY_MAX: u64 = 2000;

/// Maximum time between the stop timeout and the last event. Remaining workers are killed at the stop timeout. The time
/// includes delays of the simulated supervisor itself.
const STOP_MARGIN: Duration = Duration::from_secs(20);

const TRACE_LINES: usize = 60;

#[test]
fn policy_follows_the_rules_in_random_histories() {
    let mut coverage = Coverage::default();
    if let Some(seed) = variable("BULKHEAD_SIM_SEED") {
        replay(seed, &mut coverage);
        return coverage.print();
    }
    let steps = variable("BULKHEAD_SIM_STEPS").unwrap_or(STEPS);
    let (mut done, mut seed) = (0, 0);
    while done < steps {
        seed += 1;
        done += replay(seed, &mut coverage);
    }
    println!("{done} steps in {seed} histories");
    coverage.print();
    if steps >= STEPS {
        coverage.demand(&REQUIRED);
    }
}

/// Situations that must occur at least once in every long simulation.
const REQUIRED: [&str; 128] = [
    "no user ID",
    "ready worker changes its slot",
    "slots exchanged",
    "death withholds no permit",
    "death withholds the permit of a tenant",
    "death withholds permits of several tenants",
    "withheld permit returned",
    "withheld permit returned after its time",
    "suspect at its quota",
    "limit lowered enforce",
    "limit lowered monitor",
    "limit raised enforce",
    "limit raised monitor",
    "limit unchanged",
    "waits for the adaptive limit",
    "prefetched",
    "prefetched job begun",
    "prefetched job recalled",
    "job with a permit recalled",
    "recalled job returned",
    "recalled job returned too late",
    "returned job not recalled",
    "stalled",
    "prefetched to a worker that died",
    "prefetched job cancelled",
    "continues because it has begun",
    "continues because an attempt has crashed",
    "prefetched job shed",
    "reply before the job began",
    "reply after a recall",
    "spare took over",
    "spare replaces a worker",
    "spare for a killed or dead worker",
    "spare for a starting worker",
    "standby takes over an idle slot",
    "standby takes over",
    "standby takes over after a death",
    "unread job requeued beside others",
    "killed before replacement",
    "overcommit of a replaced worker",
    "dead and not reaped",
    "lost with the keeper while reaped",
    "kill not needed",
    "starting worker killed by a restart",
    "backoff continues after scaling to zero",
    "cpu time recorded",
    "alive according to the timestamp",
    "silence excused",
    "lost with the keeper",
    "scales to zero",
    "start announced",
    "sent its maximum",
    "recycled resize",
    "retried",
    "suspect retried",
    "suspect runs alone",
    "rejected quarantined",
    "quarantined in the queue",
    "ok",
    "failed",
    "cancelled",
    "deadline_exceeded queued",
    "deadline_exceeded running",
    "crashed exit",
    "crashed signal",
    "crashed hung",
    "crashed protocol",
    "crashed stopped",
    "crashed collateral",
    "rejected draining",
    "rejected queue_full",
    "rejected backpressure",
    "rejected shed",
    "rejected circuit_open",
    "breaker closed",
    "breaker open",
    "breaker half_open",
    "breaker forced_open",
    "rejected evicted",
    "rejected tenant_quota",
    "rejected queue_timeout",
    "rejected unavailable",
    "kill deadline",
    "kill hung",
    "kill protocol",
    "kill no hello",
    "kill not ready",
    "kill exit timeout",
    "recycled jobs",
    "recycled age",
    "recycled rss",
    "recycled restart",
    "successor failed",
    "exited beside another",
    "backoff",
    "many early deaths",
    "probe",
    "history cleared",
    "bulkhead failed",
    "bulkhead failed by policy",
    "spawn failed",
    "start extended",
    "unread job requeued",
    "reply without a job",
    "late reply",
    "oversized",
    "oversized result continues",
    "oversized result ended",
    "stale message",
    "drain",
    "resume",
    "state starting",
    "state ready",
    "state degraded",
    "state failed",
    "state draining",
    "event SupervisorPaused",
    "event Reset",
    "event Restart",
    "event Reconfigure",
    "event ReplaceWorkers",
    "recycled reload",
    "replacement failed",
    "event Stopping",
    "event Cancel",
    "event MemoryExhausted",
    "waiting job rejected for memory",
    "event Stop",
];

fn variable(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{name} must be a number, not {value:?}")))
}

/// Runs the random history that is generated from a seed. Returns the number of steps. If the bulkhead breaks a rule,
/// runs the history again with a trace.
fn replay(seed: u64, coverage: &mut Coverage) -> u64 {
    let quiet = catch_unwind(AssertUnwindSafe(|| History::new(seed, Trace::Off).run()));
    let history = quiet.unwrap_or_else(|_| {
        let trace = Trace::On { seed, lines: VecDeque::new() };
        History::new(seed, trace).run()
    });
    coverage.add(&history.model.coverage);
    history.steps
}

struct History {
    now: Time,
    bulkhead: Bulkhead<Tag>,
    world: World,
    model: Model,
    actions: Vec<Action<Tag>>,
    steps: u64,
    steps_max: u64,
    /// Number of tenants in this history. The tenants are the first entries of [`TENANTS`].
    tenants: usize,
    trace: Trace,
}

const TENANTS: [&str; 5] = ["", "acme", "globex", "initech", "umbrella"];

impl History {
    fn new(seed: u64, trace: Trace) -> Self {
        let mut random = Random::new(seed);
        let limits = settings::limits(&mut random);
        let steps_max = random.range(10, STEPS_PER_HISTORY_MAX);
        let tenants = random.pick(&[1, 2, 5]);
        let registry = Registry::default();
        Self {
            now: Time::ZERO,
            bulkhead: Bulkhead::new(limits.clone(), random.draw()),
            model: Model::new(limits.clone(), registry.clone()),
            world: World::new(random, limits, registry),
            actions: Vec::new(),
            steps: 0,
            steps_max,
            tenants,
            trace,
        }
    }

    fn run(mut self) -> Self {
        self.apply(Event::Start);
        while self.steps < self.steps_max {
            self.step();
        }
        let by = self.now + self.world.millis(0, 5000);
        self.apply(Event::Stop { by });
        let is_urgent = self.world.chance(20);
        while !self.bulkhead.is_stopped() {
            self.step();
            if is_urgent && self.world.chance(20) {
                self.apply(Event::Stop { by: self.now });
            }
            assert!(self.now <= by + STOP_MARGIN, "the bulkhead did not stop in time");
        }
        self.model.check_end(&self.bulkhead);
        self
    }

    /// Advances the clock to the next event and applies that event.
    fn step(&mut self) {
        let tick_at = self.bulkhead.next_deadline();
        let next = tick_at
            .into_iter()
            .chain(self.world.due())
            .min()
            .expect("a next arrival must always be scheduled");
        self.now = self.now.max(next);
        if let Some(held_up_for) = self.world.supervisor_delay() {
            self.now = self.now + held_up_for;
        }
        let tick_is_due = tick_at.is_some_and(|at| at <= self.now);
        let world_is_due = self.world.due().is_some_and(|at| at <= self.now);
        if tick_is_due && (!world_is_due || self.world.chance(50)) {
            self.apply(Event::Tick);
        } else if let Some(event) = self.world.take(self.now) {
            self.apply(event);
        }
    }

    fn apply(&mut self, mut event: Event<Tag>) {
        self.steps += 1;
        if let Event::Submit(submission) = &mut event {
            let turn = submission.record.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
            submission.tenant = self.bulkhead.tenant(TENANTS[turn as usize % self.tenants]);
        }
        self.trace.event(self.now, &event);
        self.model.handle_event(self.now, &event);
        let taken = self.bulkhead.apply(self.now, event, &mut self.actions);
        self.trace.actions(&self.actions);
        self.model.check_actions(taken, &self.actions, &mut self.bulkhead);
        for action in self.actions.drain(..) {
            self.world.perform(self.now, &action);
        }
        if let Some(job) = taken {
            self.world.accepted(self.now, job);
        }
    }
}

/// Log of the most recent events and actions in a history. The log is printed when this value is dropped.
enum Trace {
    Off,
    On { seed: u64, lines: VecDeque<String> },
}

impl Trace {
    fn event(&mut self, now: Time, event: &Event<Tag>) {
        self.line(|| format!("{:>12.6} {event:?}", now.since(Time::ZERO).as_secs_f64()));
    }

    fn actions(&mut self, actions: &[Action<Tag>]) {
        for action in actions {
            self.line(|| format!("             -> {action:?}"));
        }
    }

    fn line(&mut self, write: impl FnOnce() -> String) {
        if let Self::On { lines, .. } = self {
            lines.push_back(write());
            if lines.len() > TRACE_LINES {
                lines.pop_front();
            }
        }
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        if let Self::On { seed, lines } = self {
            lines.iter().for_each(|line| println!("{line}"));
            println!("to replay: BULKHEAD_SIM_SEED={seed}");
        }
    }
}
