//! Measures decisions alone: the time that the state machine takes to admit and release a job, without sockets or
//! processes. The baseline of admission is the time to acquire and release a semaphore permit. The clock is simulated,
//! because reading a real clock would take as long as the semaphore operations.

use std::collections::VecDeque;
use std::hint::black_box;
use std::time::{Duration, Instant};

use bulkhead_policy::{
    Action, BreakerLimits, Bulkhead, Capabilities, Event, Limits, Pressure, RateLimit, RatePer, Reply,
    Submission, TenantLimits, Time, Timers, WorkerId,
};
use bulkhead_shared::{JobId, Priority, Verdict};
use tokio::sync::Semaphore;

use crate::Result;
use crate::load::median;
use crate::pairs::paired;
use crate::plan::Plan;
use crate::report::{Figure, Report, Target};

/// Prefix of the names of the measurements in this module.
pub(crate) const GROUP: &str = "policy";

/// Maximum time that a decision may take, in nanoseconds.
const LIMIT_NS: f64 = 500.0;

/// Maximum number of jobs in flight per bulkhead.
const PERMITS: u32 = 64;

/// Simulated duration of a cycle, in which one job is submitted and another job completes. Too short for any timer to
/// expire.
const STEP: Duration = Duration::from_micros(1);

/// Number of queued jobs, most of which are then cancelled. The first and the last `STAYING` jobs are kept.
const WAITING: usize = 10_000;
const STAYING: usize = 500;

/// Stand-in for the supervisor's record of a job, which has the size of a pointer.
type Record = u64;

/// Takes all requested measurements.
pub(crate) fn all(plan: &Plan, report: &Report) -> Result<()> {
    let settings: Vec<_> = settings().into_iter().filter(|setting| report.wants(setting.name)).collect();
    cycles(plan, &settings)?.into_iter().for_each(|figure| report.add(figure));
    let cancels = "policy: cancel 9,000 amid 10,000 waiting";
    if report.wants(cancels) {
        let rounds = plan.rounds().map(|_| cancel()).collect::<Result<Vec<_>>>()?;
        let figure = Figure::alone(cancels, "ns", median(rounds));
        report.add(figure.with_target(Target::FigureAtMost, LIMIT_NS));
    }
    Ok(())
}

/// Measures all settings in turn in each round, so that other load on the machine affects all settings equally.
fn cycles(plan: &Plan, settings: &[Setting]) -> Result<Vec<Figure>> {
    if settings.is_empty() {
        return Ok(Vec::new());
    }
    let mut scenes = settings.iter().map(Scene::new).collect::<Result<Vec<_>>>()?;
    let mut bare = Vec::new();
    let mut real = vec![Vec::new(); scenes.len()];
    for _ in plan.rounds() {
        bare.push(semaphore(plan.decisions)?);
        for (scene, rounds) in scenes.iter_mut().zip(&mut real) {
            rounds.push(scene.round(plan.decisions)?);
        }
    }
    let figures = settings.iter().zip(real).map(|(setting, real)| {
        let pairs: Vec<_> = bare.iter().copied().zip(real).collect();
        paired(setting.name.to_owned(), "ns", &pairs, Target::FigureAtMost, LIMIT_NS)
    });
    Ok(figures.collect())
}

/// Returns the time, in nanoseconds, to acquire and release a permit while all other permits are in use.
fn semaphore(cycles: usize) -> Result<f64> {
    let permits = Semaphore::new(PERMITS as usize);
    let _taken = permits.try_acquire_many(PERMITS - 1)?;
    let began = Instant::now();
    for _ in 0..cycles {
        drop(black_box(permits.try_acquire()?));
    }
    Ok(nanoseconds_each(began, cycles))
}

fn nanoseconds_each(began: Instant, count: usize) -> f64 {
    began.elapsed().as_secs_f64() * 1e9 / count as f64
}

/// Initial state of the bulkheads in one measurement.
struct Setting {
    name: &'static str,
    limits: Limits,
    bulkheads: usize,
    /// Number of tenants, or 0 for jobs without a tenant.
    tenants: usize,
    priorities: &'static [Priority],
    /// Number of running jobs per bulkhead at the start of each cycle.
    running: usize,
    /// Number of waiting jobs per bulkhead at the start of each cycle.
    waiting: usize,
}

/// Returns all settings. Some settings differ only in one number, which is small in one setting and large in another.
/// This number should not affect the results. In most settings, all permits but one are in use.
fn settings() -> Vec<Setting> {
    let one = || Setting {
        name: "policy: 1 bulkhead, 63 jobs running",
        limits: Limits { max_in_flight: PERMITS, ..Limits::default() },
        bulkheads: 1,
        tenants: 0,
        priorities: &[Priority::Normal],
        running: PERMITS as usize - 1,
        waiting: 0,
    };
    let shared = || Limits {
        tenants: TenantLimits { max_in_flight: Some(1), ..TenantLimits::default() },
        max_queue: WAITING as u32 + 1,
        ..one().limits
    };
    // With no free permit, every job has to wait.
    let queued = || Setting { limits: shared(), tenants: 10_000, running: PERMITS as usize, ..one() };
    vec![
        one(),
        Setting { name: "policy: shares of 64 tenants", limits: shared(), tenants: 64, ..one() },
        Setting { name: "policy: shares of 10,000 tenants", limits: shared(), tenants: 10_000, ..one() },
        Setting { name: "policy: shares of 10,000 tenants, 100 wait", waiting: 100, ..queued() },
        Setting { name: "policy: shares of 10,000 tenants, 10,000 wait", waiting: WAITING, ..queued() },
        Setting { name: "policy: 1 bulkhead, nothing running", running: 0, ..one() },
        Setting { name: "policy: 1,000 bulkheads, nothing running", running: 0, bulkheads: 1_000, ..one() },
        Setting { name: "policy: 1,000 bulkheads, 63 jobs running in each", bulkheads: 1_000, ..one() },
        Setting {
            name: "policy: everything on, 10,000 tenants",
            limits: everything(shared()),
            tenants: 10_000,
            priorities: &Priority::ALL,
            // Normal jobs can use three quarters of the permits.
            running: PERMITS as usize * 3 / 4 - 1,
            ..one()
        },
    ]
}

/// Enables all limits, with values that the measurement never reaches.
fn everything(limits: Limits) -> Limits {
    Limits {
        queue_timeout: Some(Duration::from_secs(10)),
        critical_reserve: 0.25,
        pressure: Pressure { warn: 0.5, reject: 0.9 },
        rate_limit: Some(RateLimit { per_second: 1e6, burst: 1_000, per: RatePer::Tenant }),
        breaker: Some(BreakerLimits {
            window: Duration::from_secs(10),
            min_calls: 20,
            failure_rate: 0.5,
            slow_call: Some(Duration::from_secs(1)),
            slow_rate: 0.8,
            open_for: Duration::from_secs(5),
            probes: 3,
        }),
        ..limits
    }
}

/// Bulkheads with running and waiting jobs, used to measure one setting.
struct Scene {
    subjects: Vec<Subject>,
    effects: Effects,
    /// Timers of the bulkheads, managed in the same way as in the supervisor.
    timers: Timers,
    /// Order in which the bulkheads receive jobs.
    order: Vec<u32>,
    names: Names,
    priorities: &'static [Priority],
    now: Time,
    turn: usize,
}

impl Scene {
    fn new(setting: &Setting) -> Result<Self> {
        let subject = || Subject::new(setting.limits.clone());
        let mut scene = Self {
            subjects: (0..setting.bulkheads).map(|_| subject()).collect::<Result<_>>()?,
            effects: Effects::default(),
            timers: Timers::default(),
            order: shuffled(setting.bulkheads),
            names: Names::new(setting.tenants),
            priorities: setting.priorities,
            now: Time::ZERO,
            turn: 0,
        };
        scene.fill(setting)?;
        Ok(scene)
    }

    /// Creates all tenants, and submits the jobs that the setting requires.
    fn fill(&mut self, setting: &Setting) -> Result<()> {
        for _ in 0..setting.tenants {
            let name = self.names.next();
            self.subjects.iter_mut().for_each(|subject| _ = subject.bulkhead.tenant(name));
        }
        for _ in 0..setting.bulkheads * (setting.running + setting.waiting) {
            self.submit();
        }
        let wanted = setting.bulkheads * setting.running;
        if self.effects.running.len() == wanted {
            Ok(())
        } else {
            Err("some jobs that should be running are waiting".into())
        }
    }

    /// Admits and releases `cycles` jobs. Returns the time per job in nanoseconds.
    fn round(&mut self, cycles: usize) -> Result<f64> {
        let before = (self.effects.done, self.effects.running.len());
        let began = Instant::now();
        for _ in 0..cycles {
            self.cycle();
        }
        let took = nanoseconds_each(began, cycles);
        let (done, running) = (self.effects.done - before.0, self.effects.running.len());
        if (done, running) == (cycles, before.1) {
            return Ok(took);
        }
        Err(format!("{done} of {cycles} jobs ended `ok`, and {running} jobs run instead of {}", before.1)
            .into())
    }

    fn cycle(&mut self) {
        let index = self.submit();
        let subject = &mut self.subjects[index as usize];
        // The bulkheads take turns, so the oldest running job belongs to this bulkhead.
        if let Some(job) = self.effects.running.pop_front() {
            subject.reply(self.now, job, &mut self.effects);
        }
        match subject.bulkhead.next_deadline() {
            Some(at) => self.timers.set(index, at),
            None => self.timers.clear(index),
        }
        black_box(self.timers.next());
    }

    /// Submits the next job to the next bulkhead, and returns the index of the bulkhead.
    fn submit(&mut self) -> u32 {
        self.now = self.now + STEP;
        let index = self.order[self.turn % self.order.len()];
        let priority = self.priorities[self.turn % self.priorities.len()];
        self.turn += 1;
        self.subjects[index as usize].submit(self.now, self.names.next(), priority, &mut self.effects);
        index
    }
}

/// Handler for the bulkheads' actions. Ignores actions that do not affect the measurement.
#[derive(Default)]
struct Effects {
    actions: Vec<Action<Record>>,
    /// Running jobs, oldest first. The jobs complete in this order.
    running: VecDeque<JobId>,
    /// Number of jobs that succeeded.
    done: usize,
    cancelled: usize,
}

impl Effects {
    fn perform(&mut self) {
        for action in self.actions.drain(..) {
            match action {
                Action::Dispatch { job, .. } => self.running.push_back(job),
                Action::SendOutcome(answer) => match black_box(answer).verdict {
                    Verdict::Ok => self.done += 1,
                    Verdict::Cancelled { .. } => self.cancelled += 1,
                    _ => {}
                },
                _ => {}
            }
        }
    }
}

/// A bulkhead with a single worker.
struct Subject {
    bulkhead: Bulkhead<Record>,
    worker: WorkerId,
}

impl Subject {
    /// Creates a bulkhead whose worker is ready.
    fn new(limits: Limits) -> Result<Self> {
        let mut bulkhead = Bulkhead::new(limits, 7);
        let mut actions = Vec::new();
        bulkhead.apply(Time::ZERO, Event::Start, &mut actions);
        let Some(Action::Spawn { worker, .. }) = actions.pop() else { return Err("no Spawn action".into()) };
        bulkhead.apply(Time::ZERO, Event::Spawned { worker, pid: 1 }, &mut actions);
        bulkhead.apply(
            Time::ZERO,
            Event::Hello {
                worker,
                capabilities: Capabilities { has_dispatch_thread: true, can_resize: true },
                journal: None,
            },
            &mut actions,
        );
        bulkhead.apply(Time::ZERO, Event::Ready { worker }, &mut actions);
        Ok(Self { bulkhead, worker })
    }

    fn submit(
        &mut self,
        now: Time,
        tenant: &str,
        priority: Priority,
        effects: &mut Effects,
    ) -> Option<JobId> {
        let tenant = self.bulkhead.tenant(tenant);
        let submission = Submission { tenant, priority, ..Submission::new(0) };
        self.apply(now, Event::Submit(submission), effects)
    }

    /// Reports that the worker has completed a job.
    fn reply(&mut self, now: Time, job: JobId, effects: &mut Effects) {
        self.apply(now, Event::Replied { worker: self.worker, job, reply: Reply::Ok }, effects);
    }

    fn apply(&mut self, now: Time, event: Event<Record>, effects: &mut Effects) -> Option<JobId> {
        let job = self.bulkhead.apply(now, event, &mut effects.actions);
        effects.perform();
        job
    }
}

/// Fills a queue and cancels nine tenths of the jobs in random order, sparing both ends of the queue. Returns the
/// time per cancelled job in nanoseconds.
fn cancel() -> Result<f64> {
    let mut subject = Subject::new(Limits { max_queue: WAITING as u32, ..Limits::default() })?;
    let mut effects = Effects::default();
    let mut submit =
        || subject.submit(Time::ZERO, "", Priority::Normal, &mut effects).ok_or("a job was rejected");
    submit()?;
    let waiting = (0..WAITING).map(|_| submit()).collect::<std::result::Result<Vec<_>, _>>()?;
    let middle = &waiting[STAYING..WAITING - STAYING];
    let order: Vec<JobId> = shuffled(middle.len()).into_iter().map(|index| middle[index as usize]).collect();
    let began = Instant::now();
    for &job in &order {
        subject.apply(Time::ZERO, Event::Cancel { job, unless_begun: false }, &mut effects);
    }
    let took = nanoseconds_each(began, order.len());
    if effects.cancelled == order.len() { Ok(took) } else { Err("a job was not cancelled".into()) }
}

/// Tenant names in random order. The names are adjacent in memory, so that the measurement does not include
/// cache misses. (A real name arrives with its job and is in the cache.)
struct Names {
    text: String,
    at: usize,
}

impl Names {
    /// Length of each name in bytes.
    const LEN: usize = 12;

    fn new(count: usize) -> Self {
        let text = shuffled(count).into_iter().map(|number| format!("tenant {number:05}")).collect();
        Self { text, at: 0 }
    }

    /// Returns the next name, starting over after the last name. Returns an empty name if there are no tenants.
    fn next(&mut self) -> &str {
        if self.at == self.text.len() {
            self.at = 0;
        }
        let from = self.at;
        self.at = self.text.len().min(from + Self::LEN);
        &self.text[from..self.at]
    }
}

/// Returns the numbers from 0 to `count - 1` in a shuffled order. The order is the same in every run.
fn shuffled(count: usize) -> Vec<u32> {
    let mut numbers: Vec<u32> = (0..count as u32).collect();
    let mut random = 1_u64;
    for last in (1..count).rev() {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        numbers.swap(last, (random >> 33) as usize % (last + 1));
    }
    numbers
}
