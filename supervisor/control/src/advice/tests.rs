//! Tests of each rule, and property tests of the complete advice.

use bulkhead_api::{DeadlineMisses, Marks};
use bulkhead_policy::AdaptiveMode;
use proptest::prelude::*;
use serde_json::json;

use super::*;
use bulkhead_config::defaults::{
    DURATION_MAX, IN_FLIGHT_CEILING, PERMITS_CEILING, PROCESSES_CEILING, QUEUE_CEILING,
};

const MACHINE: Machine = Machine { processors: 4, memory_bytes: Some(16 << 30) };

fn settings() -> Settings {
    Settings {
        processes: 4,
        max_in_flight: 1,
        max_queue: 20,
        queue_timeout: None,
        deadline: Duration::from_secs(5),
        deadline_max: Duration::from_secs(5),
        has_deadline_max: false,
        deadline_max_least: Duration::ZERO,
        adaptive: None,
        adaptive_ceiling: u64::MAX,
        worker_sets: 1,
        spares: 0,
        cgroup_memory: None,
        has_memory_limit: true,
    }
}

/// Returns observations that cover two hours, during which the limits in [`settings`] were appropriate for the load.
fn seen() -> Observations {
    Observations {
        watched: Duration::from_secs(7200),
        busy_ms: 7_000_000,
        jobs: 100_000,
        ran: 100_000,
        limit: 4,
        concurrency: Marks { p50: 1, p99: 3, max: 4 },
        demand: Marks { p50: 1, p99: 3, max: 6 },
        queued: Marks { p50: 0, p99: 0, max: 2 },
        time_at_limit: 0.004,
        queue_ms: Marks { p50: 0.0, p99: 5.0, max: 90.0 },
        run_ms: Marks { p50: 300.0, p99: 900.0, max: 1500.0 },
        run_mean_ms: 350.0,
        processors_per_job: Some(0.1),
        rss_max_bytes: Some(100 << 20),
        ..Observations::default()
    }
}

/// Returns observations under a load that is too high for the limits in [`settings`].
fn overloaded() -> Observations {
    Observations {
        concurrency: Marks { p50: 4, p99: 4, max: 4 },
        demand: Marks { p50: 6, p99: 24, max: 24 },
        queued: Marks { p50: 2, p99: 20, max: 20 },
        time_at_limit: 0.6,
        rejected: [("queue_full".into(), 2000), ("rate_limited".into(), 7)].into(),
        ..seen()
    }
}

fn advice(seen: Observations, settings: &Settings) -> Advice {
    advise("b".into(), seen, settings, &MACHINE)
}

fn proposed(seen: Observations, settings: &Settings, key: &str) -> Option<(Setting, String)> {
    let advice = advice(seen, settings).advice;
    advice.into_iter().find(|item| item.key == key).map(|item| (item.proposed, item.reason))
}

fn kept(seen: Observations, settings: &Settings, key: &str) -> String {
    let advice = advice(seen, settings);
    let found = advice.kept.iter().find(|kept| kept.key == key);
    found.unwrap_or_else(|| panic!("{key} is not kept: {advice:?}")).reason.clone()
}

#[test]
fn advice_keeps_suitable_values_and_gives_reasons() {
    let advice = advice(seen(), &settings());
    assert!(advice.enough && advice.advice.is_empty(), "{advice:?}");
    let keys: Vec<&str> = advice.kept.iter().map(|kept| &*kept.key).collect();
    assert_eq!(keys, ["processes", "max_queue", "deadline"]);
    assert!(advice.kept[0].reason.contains("at most 3 jobs were in flight (peak: 4)"), "{advice:?}");
}

/// Checks that the advice does not add processes if an enforced adaptive limit is the bottleneck. If the adaptive limit
/// is only monitored, it does not hold jobs back, so the advice is to add processes.
#[test]
fn adaptive_limit_prevents_advice_for_more_processes() {
    let adaptive = bulkhead_api::Adaptive {
        mode: AdaptiveMode::Enforce.into(),
        min: 1,
        max: 4,
        target_ms: 50.0,
        limit: 1,
        limits: 1,
        latency_ms: Some(80.0),
        raised: 2,
        lowered: 5,
    };
    let with = |adaptive: bulkhead_api::Adaptive| Settings { adaptive: Some(adaptive), ..settings() };
    assert!(proposed(overloaded(), &settings(), "processes").is_some());
    assert_eq!(proposed(overloaded(), &with(adaptive.clone()), "processes"), None);
    assert!(kept(overloaded(), &with(adaptive.clone()), "processes").contains("1 of at most 4"));
    let least = kept(overloaded(), &with(adaptive.clone()), "adaptive");
    assert!(least.contains("80 ms, with a target of 50 ms") && least.contains("longer target"), "{least}");
    let monitored = bulkhead_api::Adaptive { mode: AdaptiveMode::Monitor.into(), limit: 2, ..adaptive };
    assert!(proposed(overloaded(), &with(monitored.clone()), "processes").is_some());
    assert!(kept(overloaded(), &with(monitored), "adaptive").contains("would let 2 jobs run concurrently"));
}

/// Returns the state of an enforced adaptive limit that has reached its maximum.
fn at_maximum(max: u32) -> bulkhead_api::Adaptive {
    bulkhead_api::Adaptive {
        mode: AdaptiveMode::Enforce.into(),
        min: 1,
        max,
        target_ms: 5000.0,
        limit: max.into(),
        limits: 1,
        ..bulkhead_api::Adaptive::default()
    }
}

#[test]
fn advice_raises_adaptive_maximum_together_with_processes() {
    let of = |processes, max| Settings { processes, adaptive: Some(at_maximum(max)), ..settings() };
    let first = advice(overloaded(), &of(2, 2));
    let proposed_of = |advice: &Advice| -> Vec<_> {
        advice.advice.iter().map(|item| (String::from(&*item.key), item.proposed)).collect()
    };
    let count = |key: &str, count| (key.to_owned(), Setting::Count(count));
    assert_eq!(proposed_of(&first), [count("processes", 4), count("adaptive.max", 4)]);
    // An operator who raises only `processes` is advised to raise `adaptive.max` as well.
    let second = advice(overloaded(), &of(4, 2));
    assert_eq!(proposed_of(&second), [count("adaptive.max", 4)]);
    assert!(kept(overloaded(), &of(4, 2), "max_queue").contains("but first add permits"));
    assert!(kept(overloaded(), &of(4, 2), "processes").contains("at most 2: first raise `adaptive.max`"));
    // The configuration rejects an `adaptive.max` that exceeds the number of permits of an isolated tenant.
    let bound = Settings { adaptive_ceiling: 2, ..of(4, 2) };
    assert_eq!(proposed(overloaded(), &bound, "processes"), None);
    assert_eq!(proposed(overloaded(), &bound, "adaptive.max"), None);
    assert!(kept(overloaded(), &bound, "processes").contains("only 2 permits: first raise"));
    let bound = Settings { adaptive_ceiling: 3, ..of(4, 2) };
    assert_eq!(proposed_of(&advice(overloaded(), &bound)), [count("adaptive.max", 3)]);
}

#[test]
fn advice_sums_adaptive_limits_of_isolated_tenants() {
    let of_three = |limit: u64| {
        let adaptive = bulkhead_api::Adaptive {
            mode: AdaptiveMode::Enforce.into(),
            min: 1,
            max: 4,
            target_ms: 50.0,
            limit,
            limits: 3,
            latency_ms: Some(80.0),
            ..bulkhead_api::Adaptive::default()
        };
        Settings { adaptive: Some(adaptive), worker_sets: 3, ..settings() }
    };
    assert!(kept(overloaded(), &of_three(6), "processes").contains("6 of at most 12"));
    assert!(kept(overloaded(), &of_three(3), "adaptive").contains("although the limit is at the minimum"));
    assert!(kept(overloaded(), &of_three(12), "adaptive").contains("all 12 jobs can run concurrently"));
}

#[test]
fn advice_from_few_jobs_is_provisional() {
    let few = advice(Observations { jobs: 312, ..overloaded() }, &settings());
    assert_eq!(few.missing.as_deref(), Some("not enough observations: 312 of 1000 jobs"));
    assert!(!few.enough && !few.advice.is_empty(), "provisional: {few:?}");
    let short = advice(
        Observations { watched: Duration::from_secs(90), was_changed: true, ..overloaded() },
        &settings(),
    );
    let missing = "not enough observations since the limits were changed: 1m 30s of 10m";
    assert_eq!(short.missing.as_deref(), Some(missing));
    let hardly_any = advice(Observations { jobs: PROVISIONAL_JOBS - 1, ..overloaded() }, &settings());
    assert!(!hardly_any.enough && hardly_any.advice.is_empty() && hardly_any.kept.is_empty());
    // A short observation never leads to a lower value.
    let idle = Observations { watched: Duration::from_secs(90), ..seen() };
    assert!(advice_of_large(idle).advice.is_empty());
}

fn advice_of_large(seen: Observations) -> Advice {
    let settings = Settings { processes: 64, deadline: Duration::from_secs(3600), ..settings() };
    advice(Observations { limit: 64, ..seen }, &Settings { deadline_max: settings.deadline, ..settings })
}

#[test]
fn proposed_processes_cover_p99_demand_plus_headroom() {
    let busy = Observations { concurrency: Marks { p50: 2, p99: 4, max: 4 }, ..seen() };
    let (processes, reason) = proposed(busy, &settings(), "processes").unwrap();
    assert_eq!(processes, Setting::Count(5));
    assert!(
        reason.contains("at most 4 jobs were in flight") && reason.contains("500MiB of this machine's 16GiB"),
        "{reason}"
    );
}

#[test]
fn demand_at_limit_includes_waiting_and_rejected_jobs() {
    let (processes, reason) = proposed(overloaded(), &settings(), "processes").unwrap();
    assert_eq!(processes, Setting::Count(8), "a proposal at most doubles the value");
    for part in [
        "for 60 % of the busy time",
        "demand was 24",
        "2000 of 100000 jobs",
        "(queue_full 2000)",
        "30 would be needed",
    ] {
        assert!(reason.contains(part), "{reason}");
    }
    // If there is no queue, half of the demand shows up only as rejected jobs.
    let lost = Observations {
        demand: Marks { p50: 4, p99: 4, max: 4 },
        rejected: [("queue_full".into(), 50_000)].into(),
        ..overloaded()
    };
    let settings = Settings { max_queue: 0, ..settings() };
    assert_eq!(proposed(lost.clone(), &settings, "processes").unwrap().0, Setting::Count(8));
    let some = Observations { rejected: [("queue_full".into(), 10_000)].into(), ..lost };
    assert_eq!(proposed(some, &settings, "processes").unwrap().0, Setting::Count(5));
}

#[test]
fn advice_raises_max_in_flight_for_single_process() {
    let settings = Settings { processes: 1, max_in_flight: 4, ..settings() };
    assert_eq!(proposed(overloaded(), &settings, "max_in_flight").unwrap().0, Setting::Count(8));
    assert_eq!(proposed(overloaded(), &settings, "processes"), None);
    let settings = Settings { processes: 2, max_in_flight: 2, ..settings };
    assert_eq!(proposed(overloaded(), &settings, "processes").unwrap().0, Setting::Count(4));
    let none = advice(overloaded(), &Settings { max_in_flight: 0, max_queue: 0, ..settings });
    assert!(none.advice.is_empty() && none.kept[0].reason.contains("rejects every job"), "{none:?}");
}

#[test]
fn proposed_processes_fit_processors_and_memory() {
    let hot = Observations { processors_per_job: Some(0.95), ..overloaded() };
    let reason = kept(hot.clone(), &Settings { processes: 5, ..settings() }, "processes");
    assert!(
        reason.contains("95 % of a processor") && reason.contains("with 4 processors, more than 5"),
        "{reason}"
    );
    let (processes, reason) = proposed(hot, &settings(), "processes").unwrap();
    assert_eq!(processes, Setting::Count(5));
    assert!(reason.contains("would only compete"), "{reason}");
    let large = Observations { rss_max_bytes: Some(2 << 30), ..overloaded() };
    let (processes, reason) = proposed(large, &settings(), "processes").unwrap();
    assert_eq!(processes, Setting::Count(6));
    assert!(reason.contains("80 % of this machine's memory (16GiB)"), "{reason}");
    let tenants = Settings { worker_sets: 64, ..settings() };
    let reason = kept(overloaded(), &tenants, "processes");
    assert!(reason.contains("more than 2 concurrent jobs could need"), "{reason}");
}

#[test]
fn unknown_processor_time_limits_processes_to_processors() {
    let unknown = Observations { processors_per_job: None, ..overloaded() };
    let of = |processes, max_in_flight| Settings { processes, max_in_flight, ..settings() };
    let (processes, reason) = proposed(unknown.clone(), &of(3, 1), "processes").unwrap();
    assert_eq!(processes, Setting::Count(4));
    assert!(reason.contains("not be more processes than processors (4)"), "{reason}");
    assert_eq!(proposed(unknown.clone(), &of(3, 2), "processes").unwrap().0, Setting::Count(4));
    for processes in [4, 6] {
        assert!(kept(unknown.clone(), &of(processes, 1), "processes").contains("than processors (4)"));
    }
    assert_eq!(proposed(unknown, &of(1, 4), "max_in_flight").unwrap().0, Setting::Count(8));
}

#[test]
fn too_few_workers_prevent_advice() {
    let dying = Observations { time_short_of_workers: 0.3, ..overloaded() };
    let reason = kept(dying, &settings(), "processes");
    assert!(reason.contains("workers were missing for 30 %"), "{reason}");
}

#[test]
fn bulkhead_that_ran_no_jobs_gets_no_advice() {
    let rejected = [("unavailable".into(), 5000)].into();
    let down = Observations {
        watched: Duration::from_secs(7200),
        jobs: 5000,
        limit: 4,
        rejected,
        ..Observations::default()
    };
    let advice = advice(down, &settings());
    assert!(
        advice.advice.is_empty() && advice.kept[0].reason.ends_with("rejected jobs: unavailable 5000"),
        "{advice:?}"
    );
}

#[test]
fn idle_bulkhead_gets_no_advice() {
    let idle = Observations { busy_ms: 40_000, ..seen() };
    let large = Settings {
        processes: 64,
        deadline: Duration::from_secs(3600),
        has_memory_limit: false,
        ..settings()
    };
    assert!(!advice(seen(), &large).advice.is_empty());
    let actual = advice(idle.clone(), &large);
    assert!(
        actual.advice.is_empty() && actual.kept[0].reason.contains("in flight for only 0.6 %"),
        "{actual:?}"
    );
    let lost = Observations { rejected: [("queue_full".into(), 5000)].into(), ..idle };
    assert!(!advice(lost, &large).advice.is_empty(), "a bulkhead that rejects jobs is not idle");
}

#[test]
fn advice_lowers_values_unused_for_an_hour() {
    let advice = advice_of_large(seen());
    let actual: Vec<_> = advice.advice.iter().map(|item| (&*item.key, item.proposed)).collect();
    let deadline = Setting::Time(Duration::from_secs(8));
    assert_eq!(actual, [("processes", Setting::Count(4)), ("deadline", deadline)], "{advice:?}");
    // The configuration rejects a deadline below `run_limit` or `adaptive.target`, unless `deadline_max` is set.
    let hour = Duration::from_secs(3600);
    let least = Duration::from_secs(20);
    let of = |deadline_max_least, has_deadline_max| Settings {
        deadline: hour,
        deadline_max: hour,
        deadline_max_least,
        has_deadline_max,
        ..settings()
    };
    let (proposal, reason) = proposed(seen(), &of(least, false), "deadline").unwrap();
    assert_eq!(proposal, Setting::Time(least));
    assert!(reason.contains("`run_limit` and `adaptive.target` permit no shorter deadline"), "{reason}");
    assert_eq!(proposed(seen(), &of(least, true), "deadline").unwrap().0, deadline);
    assert_eq!(proposed(seen(), &of(hour / 2 + least, false), "deadline"), None);
    // A bulkhead without a queue needs a permit for each job of a burst.
    let bursts = Observations { concurrency: Marks { p50: 1, p99: 3, max: 40 }, ..seen() };
    let settings = Settings { processes: 64, max_queue: 0, ..settings() };
    assert_eq!(proposed(bursts, &settings, "processes"), None);
}

#[test]
fn proposed_queue_holds_only_jobs_that_can_finish_in_time() {
    // More processes cannot help, so a longer queue is proposed. With 4 jobs at once and 350 ms per job, 46
    // jobs can run in the 4.1 s that the deadline leaves.
    let bound = Observations { processors_per_job: Some(1.0), ..overloaded() };
    let (places, reason) = proposed(bound.clone(), &settings(), "max_queue").unwrap();
    assert_eq!(places, Setting::Count(40));
    assert!(reason.contains("the 4.1 s that the deadline leaves is 46,"), "{reason}");
    let settings = settings();
    let (places, _) =
        proposed(bound.clone(), &Settings { max_queue: 40, ..settings.clone() }, "max_queue").unwrap();
    assert_eq!(places, Setting::Count(46));
    let reason = kept(bound.clone(), &Settings { max_queue: 46, ..settings.clone() }, "max_queue");
    assert!(reason.contains("further jobs would not run in time"), "{reason}");
    let impatient = Settings { queue_timeout: Some(Duration::from_secs(1)), ..settings.clone() };
    let reason = kept(bound.clone(), &impatient, "max_queue");
    assert!(reason.contains("queue_timeout (1.0 s) is 11:"), "{reason}");
    // A shorter queue is proposed if too many jobs wait and never run.
    let vain = Observations { rejected: [("queue_timeout".into(), 3000)].into(), ..bound.clone() };
    let (places, reason) = proposed(vain, &impatient, "max_queue").unwrap();
    assert_eq!(places, Setting::Count(11));
    assert!(reason.contains("3000 of 100000 jobs waited but then did not run"), "{reason}");
    // `max_queue = 0` is the default, so a queue is still proposed.
    let (places, _) = proposed(bound, &Settings { max_queue: 0, ..settings.clone() }, "max_queue").unwrap();
    assert_eq!(places, Setting::Count(4));
    // Advice recommends more permits before it recommends a longer queue.
    assert!(kept(overloaded(), &settings, "max_queue").contains("but first add permits"));
}

#[test]
fn advice_sets_queue_timeout_for_late_jobs() {
    let late = Observations {
        deadline_exceeded: DeadlineMisses { queued: 5000, ..DeadlineMisses::default() },
        ..seen()
    };
    let (timeout, reason) = proposed(late.clone(), &settings(), "queue_timeout").unwrap();
    assert_eq!(timeout, Setting::Time(Duration::from_millis(4100)));
    assert!(reason.contains("5000 of 100000 jobs waited until their deadline"), "{reason}");
    let set = Settings { queue_timeout: Some(Duration::from_secs(4)), ..settings() };
    assert_eq!(proposed(late, &set, "queue_timeout"), None);
}

#[test]
fn proposed_deadline_leaves_headroom() {
    let near = Observations { run_ms: Marks { p50: 1000.0, p99: 4300.0, max: 4900.0 }, ..seen() };
    let (deadline, reason) = proposed(near.clone(), &settings(), "deadline").unwrap();
    assert_eq!(deadline, Setting::Time(Duration::from_millis(6500)));
    assert!(reason.contains("at most 4300 ms of 5s") || reason.contains("at most 4.3 s of 5s"), "{reason}");
    let clients = Settings { deadline_max: Duration::from_secs(6), has_deadline_max: true, ..settings() };
    assert_eq!(
        proposed(near.clone(), &clients, "deadline").unwrap().0,
        Setting::Time(Duration::from_secs(6))
    );
    assert_eq!(proposed(near.clone(), &clients, "deadline_max"), None);
    // The configuration rejects a deadline above `deadline_max`.
    assert_eq!(proposed(near.clone(), &settings(), "deadline_max"), None);
    let equal = Settings { has_deadline_max: true, ..settings() };
    let raised = Setting::Time(Duration::from_millis(6500));
    assert_eq!(proposed(near.clone(), &equal, "deadline").unwrap().0, raised);
    assert_eq!(proposed(near, &equal, "deadline_max").unwrap().0, raised);
    let late = DeadlineMisses { running: 4000, by_own: 3000, queued: 0 };
    let (deadline, reason) =
        proposed(Observations { deadline_exceeded: late, ..seen() }, &settings(), "deadline").unwrap();
    assert_eq!(deadline, Setting::Time(Duration::from_secs(10)));
    assert!(reason.contains("3000 of 100000 jobs were stopped"), "{reason}");
    // Jobs that miss a deadline set by the client are no reason to propose a longer default deadline.
    let hurried = Observations { deadline_exceeded: DeadlineMisses { by_own: 0, ..late }, ..seen() };
    assert_eq!(proposed(hurried, &settings(), "deadline"), None);
}

#[test]
fn proposed_memory_limit_is_twice_the_peak() {
    let of = |cgroup_memory, has_memory_limit| Settings { cgroup_memory, has_memory_limit, ..settings() };
    let twice = Setting::Bytes(200 << 20);
    assert_eq!(proposed(seen(), &of(None, false), "recycle.rss").unwrap().0, twice);
    assert_eq!(proposed(seen(), &of(Some(110 << 20), false), "cgroup.memory").unwrap().0, twice);
    // A child of the worker may need the memory that the worker itself does not use.
    assert!(
        kept(seen(), &of(Some(1 << 30), true), "cgroup.memory")
            .contains("used 100MiB of memory, with a limit of 1GiB")
    );
    assert!(
        kept(seen(), &of(Some(256 << 20), false), "cgroup.memory")
            .contains("used 100MiB of memory, with a limit of 256MiB")
    );
    // No memory limit is proposed while there are too few observations.
    let early = Observations { jobs: 500, ..seen() };
    assert_eq!(proposed(early, &of(None, false), "recycle.rss"), None);
}

#[test]
fn proposed_values_use_configuration_syntax() {
    let actual = [
        Setting::Unset,
        Setting::Count(8),
        Setting::Time(Duration::from_millis(1500)),
        Setting::Bytes(200 << 20),
    ];
    assert_eq!(serde_json::to_value(actual).unwrap(), json!([null, 8, "1s 500ms", "200MiB"]));
}

// Property tests of the complete advice.

/// A simulated load that does not depend on the limits.
#[derive(Clone, Debug)]
struct Load {
    demand: Marks<u64>,
    run_ms: f64,
    processors_per_job: Option<f64>,
    rss: u64,
}

impl Load {
    /// Simulates a bulkhead with this load and the limits in `settings`. Returns the observations.
    fn seen(&self, settings: &Settings) -> Observations {
        let limit = running_max(settings);
        let below = |marks: Marks<u64>, most: u64| Marks {
            p50: marks.p50.min(most),
            p99: marks.p99.min(most),
            max: marks.max.min(most),
        };
        let places = limit + u64::from(settings.max_queue);
        let demand = below(self.demand, places);
        let beyond = |of: u64| of.saturating_sub(limit).min(settings.max_queue.into());
        let lost = if self.demand.p99 > places { 5000 } else { 20 * u64::from(self.demand.max > places) };
        let time_at_limit = if self.demand.p99 >= limit { 0.05 } else { 0.005 };
        Observations {
            limit,
            concurrency: below(self.demand, limit),
            demand,
            queued: Marks {
                p50: beyond(self.demand.p50),
                p99: beyond(self.demand.p99),
                max: beyond(self.demand.max),
            },
            time_at_limit,
            rejected: if lost > 0 { [("queue_full".into(), lost)].into() } else { Default::default() },
            run_ms: Marks { p50: self.run_ms, p99: self.run_ms, max: self.run_ms },
            run_mean_ms: self.run_ms,
            processors_per_job: self.processors_per_job,
            rss_max_bytes: Some(self.rss),
            ..seen()
        }
    }
}

/// Returns the maximum number of running jobs.
fn running_max(settings: &Settings) -> u64 {
    let permits = settings.permits();
    settings.adaptive.as_ref().map_or(permits, |adaptive| permits.min(adaptive.max.into()))
}

fn applied(settings: &Settings, advice: &Advice) -> Settings {
    let mut settings = settings.clone();
    let count = |setting| match setting {
        Setting::Count(count) => u32::try_from(count).unwrap(),
        other => panic!("{other:?} is not a count"),
    };
    for item in &advice.advice {
        match (&*item.key, item.proposed) {
            ("processes", to) => settings.processes = count(to),
            ("max_in_flight", to) => settings.max_in_flight = count(to),
            ("max_queue", to) => settings.max_queue = count(to),
            ("adaptive.max", to) => settings.adaptive = Some(at_maximum(count(to))),
            ("deadline", Setting::Time(to)) => {
                settings.deadline = to;
                if !settings.has_deadline_max {
                    settings.deadline_max = to;
                }
            }
            ("deadline_max", Setting::Time(to)) => settings.deadline_max = to,
            ("queue_timeout", Setting::Time(to)) => settings.queue_timeout = Some(to),
            ("cgroup.memory", Setting::Bytes(to)) => settings.cgroup_memory = Some(to),
            ("recycle.rss", Setting::Bytes(_)) => settings.has_memory_limit = true,
            other => panic!("unknown key, or wrong kind of value: {other:?}"),
        }
    }
    settings
}

fn loads() -> impl Strategy<Value = Load> {
    let marks = (1..5000_u64, 0..2000_u64, 0..5000_u64);
    let marks = marks.prop_map(|(p50, p99, max)| Marks { p50, p99: p50 + p99, max: p50 + p99 + max });
    (marks, 0.5..20_000.0, prop::option::of(0.0..4.0), 1..1_u64 << 33).prop_map(
        |(demand, run_ms, processors_per_job, rss)| Load { demand, run_ms, processors_per_job, rss },
    )
}

fn setups() -> impl Strategy<Value = Settings> {
    let sizes = (1..=1024_u32, 0..=64_u32, 0..2000_u32, 1..=64_u32);
    let times = (1..100_000_u64, prop::option::of(1..100_000_u64), any::<bool>(), 0..100_000_u64);
    let memory = (prop::option::of(1 << 20..1_u64 << 34), any::<bool>());
    let adaptive_max = prop::option::of(1..=2000_u32);
    let parts = (sizes, times, memory, adaptive_max);
    parts.prop_map(|((processes, max_in_flight, max_queue, sets), times, memory, adaptive_max)| Settings {
        processes,
        max_in_flight,
        max_queue: if max_in_flight == 0 { 0 } else { max_queue },
        queue_timeout: times.1.map(Duration::from_millis),
        deadline: Duration::from_millis(times.0),
        deadline_max: Duration::from_millis(times.0),
        has_deadline_max: times.2,
        deadline_max_least: Duration::from_millis(times.3.min(times.0)),
        adaptive: adaptive_max.map(|max| at_maximum(max.min(processes * max_in_flight).max(1))),
        adaptive_ceiling: u64::MAX,
        worker_sets: sets,
        spares: 0,
        cgroup_memory: memory.0,
        has_memory_limit: memory.1,
    })
}

proptest! {
    #[test]
    fn proposed_values_are_always_valid(load in loads(), settings in setups()) {
        let advice = advice(load.seen(&settings), &settings);
        for item in &advice.advice {
            prop_assert_ne!(item.now, item.proposed);
            prop_assert!(!item.reason.is_empty() && !item.reason.contains(char::is_control));
        }
        let after = applied(&settings, &advice);
        prop_assert!((1..=PROCESSES_CEILING).contains(&u64::from(after.processes)));
        prop_assert!(u64::from(after.max_in_flight) <= IN_FLIGHT_CEILING && after.permits() <= PERMITS_CEILING);
        prop_assert!(after.permits() > 0 || settings.permits() == 0);
        prop_assert!(u64::from(after.max_queue) <= QUEUE_CEILING);
        prop_assert!(!after.deadline.is_zero() && after.deadline <= DURATION_MAX);
        prop_assert!(after.deadline <= after.deadline_max && after.deadline_max >= after.deadline_max_least);
        prop_assert!(after.permits() <= 2 * settings.permits(), "a proposal at most doubles the permits");
        let adaptive_max = after.adaptive.as_ref().map_or(0, |adaptive| adaptive.max.into());
        prop_assert!(adaptive_max <= after.permits().max(1));
        if after.permits() > settings.permits() {
            prop_assert!(running_max(&after) > running_max(&settings), "more permits have an effect");
        }
    }

    #[test]
    fn higher_demand_never_lowers_proposed_permits(load in loads(), settings in setups(), more in 0..500_u64) {
        let Marks { p50, p99, max } = load.demand;
        let larger = Load { demand: Marks { p50, p99: p99 + more, max: max + more }, ..load.clone() };
        let permits = |load: &Load| applied(&settings, &advice(load.seen(&settings), &settings)).permits();
        prop_assert!(permits(&larger) >= permits(&load));
    }

    #[test]
    fn repeatedly_applied_advice_converges(load in loads(), settings in setups()) {
        let mut settings = settings;
        // Each proposal at most doubles a value, so 40 iterations are enough to reach any maximum.
        for _ in 0..40 {
            let advice = advice(load.seen(&settings), &settings);
            if advice.advice.is_empty() {
                return Ok(());
            }
            settings = applied(&settings, &advice);
        }
        prop_assert!(false, "{:?}", advice(load.seen(&settings), &settings));
    }
}
