//! The adaptive limit with jobs whose run time depends on the number of running jobs. Checks that the limit
//! falls, rises, settles where it should, and lets all jobs through.

#![expect(clippy::panic, reason = "a test says what is wrong by panicking")]

mod stage;

use std::collections::BTreeMap;
use std::time::Duration;

use bulkhead_policy::{AdaptiveLimits, AdaptiveMode, Event, Limits, Note, Reply, Time};
use bulkhead_shared::{Fault, HandlerFailure, JobId, Priority};
use stage::{MS, SECOND, Stage, limits};

fn adaptive(min: u32, max: u32, target: Duration) -> AdaptiveLimits {
    AdaptiveLimits { min, max, target, mode: AdaptiveMode::Enforce }
}

/// Workers that run jobs of `waiting` clients, each of which submits its jobs one after the other, and a
/// record of the limit.
struct Load {
    stage: Stage,
    /// Running jobs, by the time of their end.
    ends: BTreeMap<(Time, u64), JobId>,
    seen: usize,
    waiting: usize,
    random: u64,
    done: u64,
    /// The limit in force at the end of each millisecond.
    limits: Vec<u32>,
}

impl Load {
    fn new(limits: Limits, waiting: usize) -> Self {
        let stage = Stage::ready(limits);
        Self { stage, ends: BTreeMap::new(), seen: 0, waiting, random: 7, done: 0, limits: Vec::new() }
    }

    /// Returns a factor between 0.9 and 1.1.
    fn jitter(&mut self) -> f64 {
        self.random = self.random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        0.9 + (self.random >> 33) as f64 / (1_u64 << 31) as f64 / 5.0
    }

    fn limit(&self) -> u32 {
        self.stage.bulkhead.adaptive().unwrap_or_else(|| panic!("it adapts")).limit
    }

    /// Runs for `time` with jobs that take `service(running)`.
    fn run(&mut self, time: Duration, service: impl Fn(usize) -> Duration) {
        let end = self.stage.now + time;
        while self.stage.now < end {
            self.stage.wait(MS);
            let now = self.stage.now;
            while let Some(entry) = self.ends.first_entry().filter(|entry| entry.key().0 <= now) {
                let job = entry.remove();
                self.stage.reply(job);
                self.done += 1;
            }
            let held = self.stage.bulkhead.in_flight() as usize + self.stage.bulkhead.queued();
            for _ in held..self.waiting {
                self.stage.job();
            }
            for at in self.seen..self.stage.dispatched.len() {
                let (_, job) = self.stage.dispatched[at];
                let jitter = self.jitter();
                let running = self.stage.bulkhead.in_flight() as usize;
                self.ends.insert((now + service(running).mul_f64(jitter), at as u64), job);
            }
            self.seen = self.stage.dispatched.len();
            let limit = self.limit();
            let view = self.stage.bulkhead.adaptive().unwrap_or_else(|| panic!("it adapts"));
            assert!((view.numbers.min..=view.numbers.max).contains(&limit), "{limit}");
            if view.numbers.mode == AdaptiveMode::Enforce {
                assert!(self.stage.bulkhead.limit() <= u64::from(limit));
            }
            self.limits.push(limit);
        }
    }

    /// Returns the lowest and the highest limit in the last `last`.
    fn range(&self, last: Duration) -> (u32, u32) {
        let last = &self.limits[self.limits.len() - last.as_millis() as usize..];
        (*last.iter().min().unwrap_or(&0), *last.iter().max().unwrap_or(&0))
    }

    fn changes(&self, last: Duration) -> usize {
        let last = &self.limits[self.limits.len() - last.as_millis() as usize..];
        last.windows(2).filter(|pair| pair[0] != pair[1]).count()
    }
}

fn failure() -> HandlerFailure {
    HandlerFailure { code: "no".into(), message: String::new(), retryable: false, fault: Fault::Dependency }
}

fn crowded(processes: u32, max_in_flight: u32, adaptive: AdaptiveLimits) -> Limits {
    let mut limits = limits(processes, max_in_flight, 1000);
    limits.adaptive = Some(adaptive);
    limits.deadline = 3600 * SECOND;
    limits.deadline_max = limits.deadline;
    limits
}

/// Returns the run time on shared cores: 5 ms while there is a core for each job, and proportionally more
/// beyond.
fn cores(count: usize) -> impl Fn(usize) -> Duration {
    move |running| (5 * MS).mul_f64((running as f64 / count as f64).max(1.0))
}

#[test]
fn limit_settles_at_target_and_follows_service_time() {
    let mut load = Load::new(crowded(4, 16, adaptive(1, 64, 20 * MS)), 100);
    assert_eq!(load.limit(), 64, "it begins with all");
    // Sixteen concurrent jobs take 20 ms on four cores.
    load.run(60 * SECOND, cores(4));
    let (low, high) = load.range(30 * SECOND);
    assert!(low >= 10 && high <= 18, "{low} to {high}");
    assert!(load.changes(30 * SECOND) <= 60, "{} changes in 30 s", load.changes(30 * SECOND));
    // Four times as slow, so four concurrent jobs take 20 ms.
    load.run(30 * SECOND, cores(1));
    let (low, high) = load.range(20 * SECOND);
    assert!(low >= 2 && high <= 5, "{low} to {high}");
    // Fast enough for any number of jobs.
    load.run(15 * SECOND, cores(64));
    assert_eq!(load.limit(), 64);
    assert_eq!(load.range(5 * SECOND), (64, 64));
}

#[test]
fn it_comes_down_within_a_second_and_is_up_again_within_seconds() {
    let mut load = Load::new(crowded(1, 64, adaptive(2, 64, 50 * MS)), 200);
    load.run(5 * SECOND, |_| 10 * MS);
    assert_eq!(load.range(4 * SECOND), (64, 64));
    load.run(3 * SECOND, |_| 200 * MS);
    assert_eq!(load.limit(), 2, "whatever the limit, jobs take too long: the least is left");
    assert!(!load.stage.bulkhead.is_short_of_workers(), "what it took away is not missing");
    let done = load.done;
    load.run(2 * SECOND, |_| 200 * MS);
    assert!(load.done > done, "the least goes on");
    load.run(8 * SECOND, |_| 10 * MS);
    assert_eq!(load.limit(), 64);
}

/// Slow jobs count although quick jobs end first.
#[test]
fn limit_stays_low_if_a_third_of_jobs_is_slow() {
    let mut load = Load::new(crowded(1, 32, adaptive(1, 32, 50 * MS)), 100);
    let turn = std::cell::Cell::new(0);
    load.run(20 * SECOND, |_| {
        turn.set(turn.get() + 1);
        if turn.get() % 3 == 0 { 700 * MS } else { 10 * MS }
    });
    let (_, high) = load.range(15 * SECOND);
    assert!(high <= 8, "up to {high}");
}

#[test]
fn limit_ignores_few_slow_jobs_and_grows_only_in_use() {
    let mut load = Load::new(crowded(1, 32, adaptive(2, 32, 50 * MS)), 100);
    load.run(5 * SECOND, |_| 500 * MS);
    assert_eq!(load.limit(), 2);
    load.waiting = 0;
    load.run(SECOND, |_| 2 * MS);
    let turn = std::cell::Cell::new(0);
    load.waiting = 1;
    load.run(SECOND, |_| 5 * MS);
    let before = load.limit();
    load.run(20 * SECOND, |_| 5 * MS);
    assert!((2..32).contains(&before) && load.limit() == before, "one at once says nothing of more");
    load.waiting = 100;
    load.run(20 * SECOND, |_| {
        turn.set(turn.get() + 1);
        if turn.get() % 20 == 0 { 300 * MS } else { 10 * MS }
    });
    assert_eq!(load.range(5 * SECOND), (32, 32), "nine of ten are quick");
}

/// Runs eight workers for 20 s under a target of 50 ms, with the given numbers of clients and run times for
/// each tenant. Returns the lowest limit in that time.
fn least_limit(tenants: &[(&str, usize, Duration)]) -> Option<u32> {
    let mut stage = Stage::ready(crowded(8, 1, adaptive(1, 8, 50 * MS)));
    let (mut least, mut seen) = (None, 0);
    let mut jobs: Vec<(JobId, usize, Option<Time>)> = Vec::new();
    for _ in 0..20_000 {
        stage.wait(MS);
        for (at, (tenant, clients, _)) in tenants.iter().enumerate() {
            for _ in jobs.iter().filter(|(_, of, _)| *of == at).count()..*clients {
                let job = stage.submit_as(Priority::Normal, tenant);
                jobs.push((job.unwrap_or_else(|| panic!("there is room")), at, None));
            }
        }
        let now = stage.now;
        for (_, given) in &stage.dispatched[seen..] {
            let begun = jobs.iter_mut().filter(|(job, ..)| job == given);
            begun.for_each(|(_, tenant, ends_at)| *ends_at = Some(now + tenants[*tenant].2));
        }
        seen = stage.dispatched.len();
        for (job, ..) in jobs.extract_if(.., |(.., ends_at)| ends_at.is_some_and(|at| at <= now)) {
            stage.reply(job);
        }
        least = least.min(stage.bulkhead.adaptive().map(|view| view.limit)).or(Some(8));
    }
    least
}

#[test]
fn limit_falls_only_while_most_tenants_are_slow() {
    let (quick, slow) = (5 * MS, 60 * MS);
    assert_eq!(least_limit(&[("a", 2, slow), ("b", 6, quick)]), Some(8));
    assert_eq!(least_limit(&[("a", 2, SECOND), ("b", 6, quick)]), Some(8));
    assert_eq!(least_limit(&[("a", 3, slow), ("b", 3, slow), ("c", 1, quick), ("d", 1, quick)]), Some(8));
    // Not even while the fast tenant has hardly any jobs.
    assert_eq!(least_limit(&[("a", 20, slow), ("b", 1, quick)]), Some(8));
    assert!(least_limit(&[("a", 3, slow), ("b", 3, slow), ("c", 2, quick)]) < Some(8));
    assert!(least_limit(&[("a", 4, slow), ("b", 4, slow)]) < Some(8));
    assert!(least_limit(&[("a", 8, slow)]) < Some(8), "one tenant alone has the only vote");
}

/// A hung job counts at its deadline.
#[test]
fn quick_failures_do_not_count_but_deadline_misses_do() {
    let mut limits = crowded(1, 8, adaptive(1, 8, 50 * MS));
    (limits.deadline, limits.grace) = (200 * MS, 3600 * SECOND);
    limits.deadline_max = limits.deadline;
    let mut stage = Stage::ready(limits);
    let limit = |stage: &Stage| stage.bulkhead.adaptive().map(|view| view.limit);
    for _ in 0..100 {
        let jobs: Vec<JobId> = (0..8).map(|_| stage.job()).collect();
        stage.wait(5 * MS);
        for job in jobs {
            let (worker, failure) = (stage.holder(job), failure());
            stage.apply(Event::Replied { worker, job, reply: Reply::Failed(failure) });
        }
    }
    let view = stage.bulkhead.adaptive();
    assert!(view.is_some_and(|view| view.limit == 8 && view.latency.is_none()), "of 800 failures");
    for _ in 0..2 {
        let jobs: Vec<JobId> = (0..8).map(|_| stage.job()).collect();
        // The clients are answered at the deadline, and the worker replies just after.
        stage.wait(200 * MS);
        let given: Vec<JobId> = jobs.into_iter().filter(|job| stage.was_given_out(*job)).collect();
        given.into_iter().for_each(|job| stage.reply(job));
    }
    assert!(limit(&stage) < Some(8), "{:?}", limit(&stage));
}

#[test]
fn monitoring_bounds_nothing_and_says_what_the_limit_would_be() {
    let numbers = AdaptiveLimits { mode: AdaptiveMode::Monitor, ..adaptive(1, 64, 20 * MS) };
    let mut load = Load::new(crowded(4, 16, numbers), 100);
    load.run(20 * SECOND, cores(4));
    assert_eq!((load.stage.bulkhead.limit(), load.stage.bulkhead.in_flight()), (64, 64));
    let (low, high) = load.range(10 * SECOND);
    assert!(low >= 10 && high <= 40, "{low} to {high}");
    load.run(10 * SECOND, cores(64));
    assert_eq!(load.limit(), 64);
}

/// Ordinary jobs cannot use permits reserved for critical jobs. The limit must rise without them.
#[test]
fn it_grows_again_beside_a_reserve_for_critical_jobs() {
    for reserve in [0.1, 0.25, 0.5] {
        let limits = Limits { critical_reserve: reserve, ..crowded(4, 16, adaptive(2, 64, 20 * MS)) };
        let mut load = Load::new(limits, 100);
        load.run(20 * SECOND, cores(4));
        assert!(load.limit() <= 40, "{reserve}: {}", load.limit());
        load.run(30 * SECOND, cores(64));
        assert_eq!(load.limit(), 64, "{reserve}");
    }
}

/// While jobs take too long, the reported limit falls, however many jobs run.
#[test]
fn monitoring_never_rises_while_jobs_take_too_long() {
    let numbers = AdaptiveLimits { mode: AdaptiveMode::Monitor, ..adaptive(1, 64, 20 * MS) };
    let mut load = Load::new(crowded(4, 16, numbers), 100);
    let mut before = load.limit();
    for _ in 0..20 {
        load.run(SECOND, cores(4));
        assert!(load.limit() <= before, "{before} to {}", load.limit());
        before = load.limit();
    }
}

/// The last report names the final limit.
#[test]
fn reports_limit_changes_at_most_every_ten_seconds() {
    let mut load = Load::new(crowded(4, 16, adaptive(1, 64, 20 * MS)), 100);
    load.run(60 * SECOND, cores(4));
    load.run(60 * SECOND, cores(64));
    let told: Vec<(u32, u32)> = load
        .stage
        .notes
        .iter()
        .filter_map(|note| match note {
            Note::LimitAdapted { from, to, .. } => Some((*from, *to)),
            _ => None,
        })
        .collect();
    assert!((2..=13).contains(&told.len()), "{told:?}");
    assert_eq!((told[0].0, told[told.len() - 1].1), (64, 64), "{told:?}");
    assert!(told.windows(2).all(|pair| pair[0].1 == pair[1].0), "{told:?}");
}

/// A change that was held back is reported when it is due, not with the next job.
#[test]
fn where_it_ended_is_told_though_no_job_comes() {
    let mut load = Load::new(crowded(4, 16, adaptive(1, 64, 20 * MS)), 100);
    load.run(3 * SECOND, cores(4));
    let told = |load: &Load| {
        let last = load.stage.notes.iter().rev().find_map(|note| match note {
            Note::LimitAdapted { to, .. } => Some(*to),
            _ => None,
        });
        last.unwrap_or(64)
    };
    assert_ne!(told(&load), load.limit(), "it moved on since");
    load.waiting = 0;
    for job in std::mem::take(&mut load.ends).into_values() {
        load.stage.apply(Event::Cancel { job, unless_begun: false });
    }
    let due = load.stage.bulkhead.next_deadline();
    assert!(due.is_some_and(|at| at <= load.stage.now + 10 * SECOND), "{due:?}");
    load.stage.wait(10 * SECOND);
    assert_eq!(told(&load), load.limit());
    load.stage.wait(SECOND);
    let due = load.stage.bulkhead.next_deadline();
    assert!(due.is_none_or(|at| at > load.stage.now), "{due:?}");
}

#[test]
fn reloaded_numbers_bound_the_learned_limit_at_once() {
    let mut load = Load::new(crowded(2, 8, adaptive(1, 16, 50 * MS)), 50);
    load.run(5 * SECOND, |_| 500 * MS);
    assert!(load.limit() <= 2);
    let reload = |load: &mut Load, numbers: Option<AdaptiveLimits>| {
        let mut limits = load.stage.bulkhead.limits().clone();
        limits.adaptive = numbers;
        load.stage.apply(Event::Reconfigure(Box::new(limits)));
    };
    reload(&mut load, Some(adaptive(6, 12, 50 * MS)));
    assert_eq!((load.limit(), load.stage.bulkhead.in_flight()), (6, 6), "at once");
    reload(&mut load, None);
    assert_eq!((load.stage.bulkhead.limit(), load.stage.bulkhead.in_flight()), (16, 16));
    reload(&mut load, Some(adaptive(1, 4, 50 * MS)));
    assert_eq!((load.stage.bulkhead.limit(), load.stage.bulkhead.available()), (4, 0));
}

/// The reserve is a share of the current limit, not of the maximum.
#[test]
fn critical_reserve_is_a_share_of_the_adaptive_limit() {
    let mut limits = crowded(1, 100, adaptive(10, 10, 50 * MS));
    limits.critical_reserve = 0.2;
    let mut stage = Stage::ready(limits);
    for _ in 0..20 {
        stage.submit_as(Priority::Normal, "");
    }
    assert_eq!(stage.bulkhead.in_flight(), 8);
    for _ in 0..20 {
        stage.submit_as(Priority::Critical, "");
    }
    assert_eq!(stage.bulkhead.in_flight(), 10);
}
