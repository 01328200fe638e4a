//! Random limits, and random behaviour of workers and clients. Extreme values are as likely as average values, because
//! histories with only average values rarely find bugs.

use std::time::Duration;

use bulkhead_policy::{
    AdaptiveLimits, AdaptiveMode, BreakerLimits, Health, Limits, Overflow, PoisonLimits, Pressure, Recycle,
    Restart, RestartPolicy, RetryLimits, Start, StartMode, TenantLimits,
};

use super::random::Random;

pub(crate) fn limits(random: &mut Random) -> Limits {
    let mut limits = crowded_or_not(random);
    if random.percent(40) {
        let most = u64::from(limits.processes * limits.max_in_flight);
        let max = random.range(1, most);
        limits.adaptive = Some(AdaptiveLimits {
            min: random.range(1, max) as u32,
            max: max as u32,
            target: random.millis(1, 500),
            mode: random.pick(&[AdaptiveMode::Enforce, AdaptiveMode::Monitor]),
        });
    }
    limits
}

fn crowded_or_not(random: &mut Random) -> Limits {
    let limits = any_limits(random);
    if !random.percent(30) {
        return limits;
    }
    // With these settings, many jobs wait and many jobs are prefetched.
    let deadline = random.millis(1000, 10_000);
    Limits {
        max_in_flight: random.pick(&[1, 1, 2, 4]),
        max_queue: random.pick(&[5, 20, 40]),
        lookahead: random.millis(20, 500),
        queue_timeout: random.percent(30).then(|| random.millis(800, 5000)),
        deadline,
        deadline_max: deadline,
        critical_reserve: 0.0,
        ..limits
    }
}

fn any_limits(random: &mut Random) -> Limits {
    let deadline = random.millis(5, 3000);
    Limits {
        processes: random.pick(&[1, 1, 2, 2, 3, 5]),
        max_in_flight: random.pick(&[1, 1, 1, 2, 3, 4, 8]),
        max_queue: random.pick(&[0, 0, 1, 2, 5, 20, 20]),
        queue_timeout: random.percent(50).then(|| random.millis(1, 1000)),
        run_limit: random.percent(30).then(|| random.millis(1, 2000)),
        deadline,
        deadline_max: if random.percent(50) { deadline } else { deadline + random.millis(0, 5000) },
        lookahead: Duration::from_millis(random.pick(&[0, 5, 50, 200, 400])),
        grace: if random.percent(20) { Duration::ZERO } else { random.millis(0, 300) },
        worker_ends_jobs: random.percent(30),
        restart: restart(random),
        start: Start {
            handshake: random.millis(20, 2000),
            ready: random.millis(20, 2000),
            mode: StartMode::Spawn,
            spares: random.pick(&[0, 0, 0, 0, 1, 3]),
        },
        health: health(random),
        recycle: recycle(random),
        critical_reserve: random.pick(&[0.0, 0.0, 0.2, 0.5, 0.9]),
        pressure: Pressure { warn: 0.5, reject: random.pick(&[0.5, 0.8, 1.0, 1.0]) },
        overflow: random.pick(&[Overflow::Reject, Overflow::EvictOldest]),
        rate_limit: None,
        breaker: random.percent(40).then(|| breaker(random)),
        tenants: TenantLimits {
            max_in_flight: random.pick(&[None, None, Some(1), Some(2)]),
            max_queue: random.pick(&[None, None, Some(0), Some(2)]),
            ..TenantLimits::default()
        },
        retry: random
            .percent(50)
            .then(|| RetryLimits { attempts: random.pick(&[2, 2, 3, 5]), budget: random.pick(&[0.2, 1.0]) }),
        poison: random
            .percent(30)
            .then(|| PoisonLimits { crashes: random.pick(&[1, 2, 3]), within: random.millis(100, 60_000) }),
        adaptive: None,
        idle: random.percent(20).then(|| random.millis(1, 5000)),
    }
}

/// Returns random heartbeat settings. With a long heartbeat interval, a history contains fewer heartbeats and covers
/// more time.
fn health(random: &mut Random) -> Health {
    let (low, high) = if random.percent(70) { (50, 1000) } else { (5000, 30_000) };
    Health { heartbeat: random.millis(low, high), missed: random.pick(&[0, 1, 3, 5]) }
}

fn restart(random: &mut Random) -> Restart {
    let backoff = random.pick(&[0, 1, 20, 100, 500]);
    Restart {
        policy: random.pick(&[
            RestartPolicy::Always,
            RestartPolicy::Always,
            RestartPolicy::Always,
            RestartPolicy::OnFailure,
            RestartPolicy::Never,
        ]),
        backoff: Duration::from_millis(backoff),
        backoff_max: Duration::from_millis(backoff) + random.millis(0, 3000),
        max: random.pick(&[0, 1, 2, 5, 5]),
        within: random.millis(10, 30_000),
    }
}

fn recycle(random: &mut Random) -> Recycle {
    Recycle {
        jobs: random.percent(40).then(|| random.range(1, 20)),
        rss: random.percent(40).then_some(RSS_LIMIT_BYTES),
        age: random.percent(30).then(|| random.millis(100, 20_000)),
    }
}

fn breaker(random: &mut Random) -> BreakerLimits {
    BreakerLimits {
        window: random.millis(100, 10_000),
        min_calls: random.pick(&[1, 3, 10]),
        failure_rate: random.pick(&[0.1, 0.5, 1.0]),
        slow_call: random.percent(30).then(|| random.millis(1, 500)),
        slow_rate: random.pick(&[0.5, 1.0]),
        open_for: random.millis(1, 2000),
        probes: random.pick(&[1, 1, 3]),
    }
}

/// Value of `recycle.rss` in random histories that set this key.
pub(crate) const RSS_LIMIT_BYTES: u64 = 1 << 20;

/// Behaviour of the simulated workers and clients during one random history. Most fields are probabilities in percent.
#[derive(Debug)]
pub(crate) struct Behaviour {
    pub(crate) spawn_fails: u64,
    pub(crate) never_says_hello: u64,
    pub(crate) never_ready: u64,
    pub(crate) extends_start: u64,
    pub(crate) dies_at_start: u64,
    pub(crate) has_dispatch_thread: u64,
    pub(crate) falls_silent: u64,
    pub(crate) job_hangs: u64,
    pub(crate) job_crashes: u64,
    pub(crate) job_breaks_protocol: u64,
    pub(crate) leaves_after_job: u64,
    pub(crate) dies_idle: u64,
    pub(crate) reads_nothing: u64,
    pub(crate) begins_late: u64,
    pub(crate) oversizes: u64,
    pub(crate) ignores_cancel: u64,
    pub(crate) ignores_drain: u64,
    pub(crate) reports_memory: u64,
    pub(crate) start_ms: u64,
    pub(crate) job_ms: u64,
    pub(crate) arrival_ms: u64,
    pub(crate) burst: u64,
    pub(crate) own_deadline: u64,
    pub(crate) own_run_limit: u64,
    pub(crate) cancels: u64,
    pub(crate) operator_ms: u64,
    pub(crate) supervisor_delay: u64,
}

impl Behaviour {
    pub(crate) fn draw(random: &mut Random) -> Self {
        // In most histories, something fails, but only in a few does everything fail. Without any worker, there is
        // little to test.
        let (starts_well, works_well) = (random.percent(70), random.percent(30));
        let start = |random: &mut Random, chances: &[u64]| if starts_well { 0 } else { random.pick(chances) };
        let work = |random: &mut Random, chances: &[u64]| if works_well { 0 } else { random.pick(chances) };
        Self {
            spawn_fails: start(random, &[0, 0, 5, 40, 100]),
            never_says_hello: start(random, &[0, 0, 0, 5, 40]),
            never_ready: start(random, &[0, 0, 0, 5, 40]),
            extends_start: random.pick(&[0, 20, 80]),
            dies_at_start: start(random, &[0, 0, 0, 10, 60, 100]),
            has_dispatch_thread: random.pick(&[0, 50, 100]),
            falls_silent: work(random, &[0, 0, 5, 50]),
            job_hangs: work(random, &[0, 2, 10, 40]),
            job_crashes: work(random, &[0, 0, 5, 30, 80]),
            job_breaks_protocol: work(random, &[0, 0, 5]),
            leaves_after_job: work(random, &[0, 0, 5, 50]),
            dies_idle: work(random, &[0, 0, 10, 60]),
            reads_nothing: work(random, &[0, 5, 30]),
            begins_late: random.pick(&[0, 0, 2, 30, 100]),
            oversizes: work(random, &[0, 0, 5, 30]),
            ignores_cancel: random.pick(&[0, 20, 100]),
            ignores_drain: work(random, &[0, 0, 10, 60]),
            reports_memory: random.pick(&[0, 20]),
            start_ms: random.pick(&[1, 50, 500]),
            job_ms: random.pick(&[1, 10, 100, 1000]),
            arrival_ms: random.pick(&[1, 10, 50, 200, 2000, 20_000]),
            burst: random.pick(&[0, 30, 80]),
            own_deadline: random.pick(&[0, 50, 100]),
            own_run_limit: random.pick(&[0, 0, 50]),
            cancels: random.pick(&[0, 5, 40]),
            operator_ms: random.pick(&[500, 5000, 100_000]),
            supervisor_delay: random.pick(&[0, 0, 1]),
        }
    }
}
