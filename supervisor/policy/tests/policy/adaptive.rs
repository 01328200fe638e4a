//! Tests the adaptive limit with jobs whose run time depends on the number of running jobs. The limit must fall and
//! rise, settle at the expected value, and let all jobs complete.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::fixture::{Fixture, MS, SECOND, limits};
use bulkhead_policy::{AdaptiveLimits, AdaptiveMode, Event, Limits, OperatorEvent, Reply, Time};
use bulkhead_shared::{Fault, HandlerFailure, JobId, Priority};

fn adaptive(min: u32, max: u32, target: Duration) -> AdaptiveLimits {
    AdaptiveLimits { min, max, target, mode: AdaptiveMode::Enforce }
}

/// A bulkhead under load, with a record of its limit over time. Each of the `waiting` clients submits one job after
/// another.
struct Load {
    fixture: Fixture,
    /// Running jobs, ordered by the time at which they will end.
    ends: BTreeMap<(Time, u64), JobId>,
    seen: usize,
    waiting: usize,
    random: u64,
    done: u64,
    /// Limit at the end of each millisecond.
    limits: Vec<u32>,
}

impl Load {
    fn new(limits: Limits, waiting: usize) -> Self {
        let fixture = Fixture::ready(limits);
        Self { fixture, ends: BTreeMap::new(), seen: 0, waiting, random: 7, done: 0, limits: Vec::new() }
    }

    /// Returns a random factor between 0.9 and 1.1.
    fn jitter(&mut self) -> f64 {
        self.random = self.random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        0.9 + (self.random >> 33) as f64 / (1_u64 << 31) as f64 / 5.0
    }

    fn limit(&self) -> u32 {
        self.fixture
            .bulkhead
            .adaptive()
            .unwrap_or_else(|| panic!("the bulkhead must have an adaptive limit"))
            .limit
    }

    /// Runs the clients for `time`. The function `service` returns the duration of a job for the given number of
    /// running jobs.
    fn run(&mut self, time: Duration, service: impl Fn(usize) -> Duration) {
        let end = self.fixture.now + time;
        while self.fixture.now < end {
            self.fixture.wait(MS);
            let now = self.fixture.now;
            while let Some(entry) = self.ends.first_entry().filter(|entry| entry.key().0 <= now) {
                let job = entry.remove();
                self.fixture.reply(job);
                self.done += 1;
            }
            let held = self.fixture.bulkhead.in_flight() as usize + self.fixture.bulkhead.queued();
            for _ in held..self.waiting {
                self.fixture.job();
            }
            for at in self.seen..self.fixture.dispatched.len() {
                let (_, job) = self.fixture.dispatched[at];
                let jitter = self.jitter();
                let running = self.fixture.bulkhead.in_flight() as usize;
                self.ends.insert((now + service(running).mul_f64(jitter), at as u64), job);
            }
            self.seen = self.fixture.dispatched.len();
            let limit = self.limit();
            let view = self
                .fixture
                .bulkhead
                .adaptive()
                .unwrap_or_else(|| panic!("the bulkhead must have an adaptive limit"));
            assert!((view.limits.min..=view.limits.max).contains(&limit), "{limit}");
            if view.limits.mode == AdaptiveMode::Enforce {
                assert!(self.fixture.bulkhead.limit() <= u64::from(limit));
            }
            self.limits.push(limit);
        }
    }

    /// Returns the lowest and the highest limit during the last part of the run. `last` is the length of this part.
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

/// Returns the run time of a job on a machine with `count` cores. The run time is 5 ms if there is a core for each
/// running job, and proportionally longer if more jobs are running.
fn cores(count: usize) -> impl Fn(usize) -> Duration {
    move |running| (5 * MS).mul_f64((running as f64 / count as f64).max(1.0))
}

#[test]
fn limit_follows_job_run_times() {
    let mut load = Load::new(crowded(4, 16, adaptive(1, 64, 20 * MS)), 100);
    assert_eq!(load.limit(), 64, "the limit must start at the maximum");
    // Sixteen concurrent jobs take 20 ms on four cores.
    load.run(60 * SECOND, cores(4));
    let (low, high) = load.range(30 * SECOND);
    assert!(low >= 10 && high <= 18, "the limit ranged from {low} to {high}");
    assert!(load.changes(30 * SECOND) <= 60, "the limit changed {} times in 30 s", load.changes(30 * SECOND));
    // Jobs are now four times as slow, so four concurrent jobs take 20 ms.
    load.run(30 * SECOND, cores(1));
    let (low, high) = load.range(20 * SECOND);
    assert!(low >= 2 && high <= 5, "the limit ranged from {low} to {high}");
    // The machine is now fast enough for any number of jobs.
    load.run(15 * SECOND, cores(64));
    assert_eq!(load.limit(), 64);
    assert_eq!(load.range(5 * SECOND), (64, 64));
}

#[test]
fn limit_recovers_within_seconds_after_an_overload() {
    let mut load = Load::new(crowded(1, 64, adaptive(2, 64, 50 * MS)), 200);
    load.run(5 * SECOND, |_| 10 * MS);
    assert_eq!(load.range(4 * SECOND), (64, 64));
    load.run(3 * SECOND, |_| 200 * MS);
    assert_eq!(load.limit(), 2, "jobs take too long at any limit, so the limit must fall to its minimum");
    assert!(
        !load.fixture.bulkhead.is_short_of_workers(),
        "permits removed by the adaptive limit must not count as missing"
    );
    let done = load.done;
    load.run(2 * SECOND, |_| 200 * MS);
    assert!(load.done > done, "jobs must continue at the minimum limit");
    load.run(8 * SECOND, |_| 10 * MS);
    assert_eq!(load.limit(), 64);
}

/// Slow jobs affect the limit even though quick jobs end first.
#[test]
fn limit_stays_low_if_a_third_of_the_jobs_are_slow() {
    let mut load = Load::new(crowded(1, 32, adaptive(1, 32, 50 * MS)), 100);
    let turn = std::cell::Cell::new(0);
    load.run(20 * SECOND, |_| {
        turn.set(turn.get() + 1);
        if turn.get() % 3 == 0 { 700 * MS } else { 10 * MS }
    });
    let (_, high) = load.range(15 * SECOND);
    assert!(high <= 8, "the limit was as high as {high}");
}

#[test]
fn limit_rises_only_when_all_permits_are_in_use() {
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
    assert!(
        (2..32).contains(&before) && load.limit() == before,
        "the limit must not change while only one job runs at a time"
    );
    load.waiting = 100;
    load.run(20 * SECOND, |_| {
        turn.set(turn.get() + 1);
        if turn.get() % 20 == 0 { 300 * MS } else { 10 * MS }
    });
    assert_eq!(
        load.range(5 * SECOND),
        (32, 32),
        "the limit must be at the maximum if nine of ten jobs are fast"
    );
}

/// Runs eight workers for 20 s with a target of 50 ms. For each tenant, `tenants` contains the name, the number of
/// clients, and the run time of each job. Returns the lowest limit that was reached.
fn least_limit(tenants: &[(&str, usize, Duration)]) -> Option<u32> {
    let mut fixture = Fixture::ready(crowded(8, 1, adaptive(1, 8, 50 * MS)));
    let (mut least, mut seen) = (None, 0);
    let mut jobs: Vec<(JobId, usize, Option<Time>)> = Vec::new();
    for _ in 0..20_000 {
        fixture.wait(MS);
        for (at, (tenant, clients, _)) in tenants.iter().enumerate() {
            for _ in jobs.iter().filter(|(_, of, _)| *of == at).count()..*clients {
                let job = fixture.submit_as(Priority::Normal, tenant);
                jobs.push((job.unwrap_or_else(|| panic!("the queue must have room")), at, None));
            }
        }
        let now = fixture.now;
        for (_, given) in &fixture.dispatched[seen..] {
            let begun = jobs.iter_mut().filter(|(job, ..)| job == given);
            begun.for_each(|(_, tenant, ends_at)| *ends_at = Some(now + tenants[*tenant].2));
        }
        seen = fixture.dispatched.len();
        for (job, ..) in jobs.extract_if(.., |(.., ends_at)| ends_at.is_some_and(|at| at <= now)) {
            fixture.reply(job);
        }
        least = least.min(fixture.bulkhead.adaptive().map(|view| view.limit)).or(Some(8));
    }
    least
}

#[test]
fn limit_falls_only_while_most_tenants_are_slow() {
    let (quick, slow) = (5 * MS, 60 * MS);
    assert_eq!(least_limit(&[("a", 2, slow), ("b", 6, quick)]), Some(8));
    assert_eq!(least_limit(&[("a", 2, SECOND), ("b", 6, quick)]), Some(8));
    assert_eq!(least_limit(&[("a", 3, slow), ("b", 3, slow), ("c", 1, quick), ("d", 1, quick)]), Some(8));
    // The limit does not fall even if the fast tenant has hardly any jobs.
    assert_eq!(least_limit(&[("a", 20, slow), ("b", 1, quick)]), Some(8));
    assert!(least_limit(&[("a", 3, slow), ("b", 3, slow), ("c", 2, quick)]) < Some(8));
    assert!(least_limit(&[("a", 4, slow), ("b", 4, slow)]) < Some(8));
    assert!(least_limit(&[("a", 8, slow)]) < Some(8), "if there is only one tenant, its vote must decide");
}

/// A job that hangs is counted as slow when its deadline passes.
#[test]
fn deadline_misses_lower_the_limit_unlike_quick_failures() {
    let mut limits = crowded(1, 8, adaptive(1, 8, 50 * MS));
    (limits.deadline, limits.grace) = (200 * MS, 3600 * SECOND);
    limits.deadline_max = limits.deadline;
    let mut fixture = Fixture::ready(limits);
    let limit = |fixture: &Fixture| fixture.bulkhead.adaptive().map(|view| view.limit);
    for _ in 0..100 {
        let jobs: Vec<JobId> = (0..8).map(|_| fixture.job()).collect();
        fixture.wait(5 * MS);
        for job in jobs {
            let (worker, failure) = (fixture.holder(job), failure());
            fixture.apply(Event::Replied { worker, job, reply: Reply::Failed(failure) });
        }
    }
    let view = fixture.bulkhead.adaptive();
    assert!(
        view.is_some_and(|view| view.limit == 8 && view.latency.is_none()),
        "failed jobs must not count as run times"
    );
    for _ in 0..2 {
        let jobs: Vec<JobId> = (0..8).map(|_| fixture.job()).collect();
        // The clients get their outcomes at the deadline, and the workers reply just after that.
        fixture.wait(200 * MS);
        let given: Vec<JobId> = jobs.into_iter().filter(|job| fixture.was_dispatched(*job)).collect();
        given.into_iter().for_each(|job| fixture.reply(job));
    }
    assert!(limit(&fixture) < Some(8), "{:?}", limit(&fixture));
}

#[test]
fn monitor_mode_reports_limit_without_enforcing_it() {
    let numbers = AdaptiveLimits { mode: AdaptiveMode::Monitor, ..adaptive(1, 64, 20 * MS) };
    let mut load = Load::new(crowded(4, 16, numbers), 100);
    load.run(20 * SECOND, cores(4));
    assert_eq!((load.fixture.bulkhead.limit(), load.fixture.bulkhead.in_flight()), (64, 64));
    let (low, high) = load.range(10 * SECOND);
    assert!(low >= 10 && high <= 40, "the limit ranged from {low} to {high}");
    load.run(10 * SECOND, cores(64));
    assert_eq!(load.limit(), 64);
}

/// Free permits that are reserved for critical jobs must not keep the limit from rising, because ordinary jobs cannot
/// use these permits.
#[test]
fn limit_rises_although_reserved_permits_are_free() {
    for reserved_permits in [0.1, 0.25, 0.5] {
        let limits =
            Limits { critical_reserve: reserved_permits, ..crowded(4, 16, adaptive(2, 64, 20 * MS)) };
        let mut load = Load::new(limits, 100);
        load.run(20 * SECOND, cores(4));
        assert!(load.limit() <= 40, "the limit with a reserve of {reserved_permits} was {}", load.limit());
        load.run(30 * SECOND, cores(64));
        assert_eq!(load.limit(), 64, "{reserved_permits}");
    }
}

/// While jobs take too long, the reported limit must not rise, regardless of the number of running jobs.
#[test]
fn monitored_limit_does_not_rise_if_jobs_are_slow() {
    let numbers = AdaptiveLimits { mode: AdaptiveMode::Monitor, ..adaptive(1, 64, 20 * MS) };
    let mut load = Load::new(crowded(4, 16, numbers), 100);
    let mut before = load.limit();
    for _ in 0..20 {
        load.run(SECOND, cores(4));
        assert!(load.limit() <= before, "the limit rose from {before} to {}", load.limit());
        before = load.limit();
    }
}

/// Limit changes are reported at a limited rate, but the last report always contains the final limit.
#[test]
fn limit_changes_are_reported_at_most_once_every_ten_seconds() {
    let mut load = Load::new(crowded(4, 16, adaptive(1, 64, 20 * MS)), 100);
    load.run(60 * SECOND, cores(4));
    load.run(60 * SECOND, cores(64));
    let told: Vec<(u32, u32)> = load
        .fixture
        .events
        .iter()
        .filter_map(|note| match note {
            OperatorEvent::LimitAdapted { from, to, .. } => Some((*from, *to)),
            _ => None,
        })
        .collect();
    assert!((2..=13).contains(&told.len()), "{told:?}");
    assert_eq!((told[0].0, told[told.len() - 1].1), (64, 64), "{told:?}");
    assert!(told.windows(2).all(|pair| pair[0].1 == pair[1].0), "{told:?}");
}

/// A delayed report of a limit change is sent when it is due, even if no further jobs arrive.
#[test]
fn reports_final_limit_even_without_further_jobs() {
    let mut load = Load::new(crowded(4, 16, adaptive(1, 64, 20 * MS)), 100);
    load.run(3 * SECOND, cores(4));
    let told = |load: &Load| {
        let last = load.fixture.events.iter().rev().find_map(|note| match note {
            OperatorEvent::LimitAdapted { to, .. } => Some(*to),
            _ => None,
        });
        last.unwrap_or(64)
    };
    assert_ne!(told(&load), load.limit(), "the limit must have changed since the report");
    load.waiting = 0;
    for job in std::mem::take(&mut load.ends).into_values() {
        load.fixture.apply(Event::Cancel { job, unless_begun: false });
    }
    let due = load.fixture.bulkhead.next_deadline();
    assert!(due.is_some_and(|at| at <= load.fixture.now + 10 * SECOND), "{due:?}");
    load.fixture.wait(10 * SECOND);
    assert_eq!(told(&load), load.limit());
    load.fixture.wait(SECOND);
    let due = load.fixture.bulkhead.next_deadline();
    assert!(due.is_none_or(|at| at > load.fixture.now), "{due:?}");
}

#[test]
fn reload_clamps_the_current_limit() {
    let mut load = Load::new(crowded(2, 8, adaptive(1, 16, 50 * MS)), 50);
    load.run(5 * SECOND, |_| 500 * MS);
    assert!(load.limit() <= 2);
    let reload = |load: &mut Load, numbers: Option<AdaptiveLimits>| {
        let mut limits = load.fixture.bulkhead.limits().clone();
        limits.adaptive = numbers;
        load.fixture.apply(Event::Reconfigure(Box::new(limits)));
    };
    reload(&mut load, Some(adaptive(6, 12, 50 * MS)));
    assert_eq!(
        (load.limit(), load.fixture.bulkhead.in_flight()),
        (6, 6),
        "the new limit must apply immediately"
    );
    reload(&mut load, None);
    assert_eq!((load.fixture.bulkhead.limit(), load.fixture.bulkhead.in_flight()), (16, 16));
    reload(&mut load, Some(adaptive(1, 4, 50 * MS)));
    assert_eq!((load.fixture.bulkhead.limit(), load.fixture.bulkhead.available()), (4, 0));
}

/// The reserved permits are a fraction of the current limit, not of the maximum.
#[test]
fn critical_reserve_is_a_share_of_the_adaptive_limit() {
    let mut limits = crowded(1, 100, adaptive(10, 10, 50 * MS));
    limits.critical_reserve = 0.2;
    let mut fixture = Fixture::ready(limits);
    for _ in 0..20 {
        fixture.submit_as(Priority::Normal, "");
    }
    assert_eq!(fixture.bulkhead.in_flight(), 8);
    for _ in 0..20 {
        fixture.submit_as(Priority::Critical, "");
    }
    assert_eq!(fixture.bulkhead.in_flight(), 10);
}
