//! Tests of each rule, and properties of all advice.

use bulkhead_api::{Late, Marks};
use bulkhead_policy::AdaptiveMode;
use proptest::prelude::*;
use serde_json::json;

use super::*;
use bulkhead_config::defaults::{
    DURATION_MAX, IN_FLIGHT_CEILING, PERMITS_CEILING, PROCESSES_CEILING, QUEUE_CEILING,
};

const MACHINE: Machine = Machine { processors: 4, memory_bytes: Some(16 << 30) };

fn setup() -> Setup {
    Setup {
        processes: 4,
        max_in_flight: 1,
        max_queue: 20,
        queue_timeout: None,
        deadline: Duration::from_secs(5),
        deadline_max: Duration::from_secs(5),
        adaptive: None,
        sets_of_workers: 1,
        spares: 0,
        cgroup_memory: None,
        is_memory_bounded: true,
    }
}

/// Two hours of observations in which the limits of [`setup`] fit.
fn seen() -> Seen {
    Seen {
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
        ..Seen::default()
    }
}

/// Observations with more load than [`setup`] can serve.
fn overloaded() -> Seen {
    Seen {
        concurrency: Marks { p50: 4, p99: 4, max: 4 },
        demand: Marks { p50: 6, p99: 24, max: 24 },
        queued: Marks { p50: 2, p99: 20, max: 20 },
        time_at_limit: 0.6,
        rejected: [("queue_full".into(), 2000), ("rate_limited".into(), 7)].into(),
        ..seen()
    }
}

fn advice(seen: Seen, setup: &Setup) -> Advice {
    advise("b".into(), seen, setup, &MACHINE)
}

fn proposed(seen: Seen, setup: &Setup, key: &str) -> Option<(Setting, String)> {
    let advice = advice(seen, setup).advice;
    advice.into_iter().find(|item| item.key == key).map(|item| (item.proposed, item.reason))
}

fn kept(seen: Seen, setup: &Setup, key: &str) -> String {
    let advice = advice(seen, setup);
    let found = advice.kept.iter().find(|kept| kept.key == key);
    found.unwrap_or_else(|| panic!("{key} is not kept: {advice:?}")).reason.clone()
}

#[test]
fn all_is_well_and_said_to_be() {
    let advice = advice(seen(), &setup());
    assert!(advice.enough && advice.advice.is_empty(), "{advice:?}");
    let keys: Vec<&str> = advice.kept.iter().map(|kept| &*kept.key).collect();
    assert_eq!(keys, ["processes", "max_queue", "deadline"]);
    assert!(advice.kept[0].reason.contains("at most 3 jobs were in flight (peak: 4)"), "{advice:?}");
}

/// In monitor mode the limit holds no jobs back, so more processes are proposed.
#[test]
fn proposes_no_processes_if_adaptive_limit_holds_jobs_back() {
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
    let with = |adaptive: bulkhead_api::Adaptive| Setup { adaptive: Some(adaptive), ..setup() };
    assert!(proposed(overloaded(), &setup(), "processes").is_some());
    assert_eq!(proposed(overloaded(), &with(adaptive.clone()), "processes"), None);
    assert!(kept(overloaded(), &with(adaptive.clone()), "processes").contains("1 of at most 4"));
    let least = kept(overloaded(), &with(adaptive.clone()), "adaptive");
    assert!(least.contains("80 ms, with a target of 50 ms") && least.contains("longer target"), "{least}");
    let monitored = bulkhead_api::Adaptive { mode: AdaptiveMode::Monitor.into(), limit: 2, ..adaptive };
    assert!(proposed(overloaded(), &with(monitored.clone()), "processes").is_some());
    assert!(kept(overloaded(), &with(monitored), "adaptive").contains("would let 2 jobs run at once"));
}

#[test]
fn tenants_that_are_apart_have_an_adaptive_limit_each() {
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
        Setup { adaptive: Some(adaptive), sets_of_workers: 3, ..setup() }
    };
    assert!(kept(overloaded(), &of_three(6), "processes").contains("6 of at most 12"));
    assert!(kept(overloaded(), &of_three(3), "adaptive").contains("although the limit is at the minimum"));
    assert!(kept(overloaded(), &of_three(12), "adaptive").contains("all 12 can run at once"));
}

#[test]
fn too_little_is_called_that() {
    let few = advice(Seen { jobs: 312, ..overloaded() }, &setup());
    assert_eq!(few.missing.as_deref(), Some("seen too little: 312 of 1000 jobs"));
    assert!(!few.enough && !few.advice.is_empty(), "provisional: {few:?}");
    let short =
        advice(Seen { watched: Duration::from_secs(90), was_changed: true, ..overloaded() }, &setup());
    let missing = "seen too little since the limits were changed: 1m 30s of 10m";
    assert_eq!(short.missing.as_deref(), Some(missing));
    let hardly_any = advice(Seen { jobs: PROVISIONAL_JOBS - 1, ..overloaded() }, &setup());
    assert!(!hardly_any.enough && hardly_any.advice.is_empty() && hardly_any.kept.is_empty());
    // A short observation never leads to a lower value.
    let idle = Seen { watched: Duration::from_secs(90), ..seen() };
    assert!(advice_of_large(idle).advice.is_empty());
}

fn advice_of_large(seen: Seen) -> Advice {
    let setup = Setup { processes: 64, deadline: Duration::from_secs(3600), ..setup() };
    advice(Seen { limit: 64, ..seen }, &Setup { deadline_max: setup.deadline, ..setup })
}

#[test]
fn the_p99_of_concurrency_and_a_quarter() {
    let busy = Seen { concurrency: Marks { p50: 2, p99: 4, max: 4 }, ..seen() };
    let (processes, reason) = proposed(busy, &setup(), "processes").unwrap();
    assert_eq!(processes, Setting::Count(5));
    assert!(
        reason.contains("at most 4 jobs were in flight") && reason.contains("500MiB of 16GiB"),
        "{reason}"
    );
}

#[test]
fn at_the_limit_it_is_what_waited_and_what_was_turned_away() {
    let (processes, reason) = proposed(overloaded(), &setup(), "processes").unwrap();
    assert_eq!(processes, Setting::Count(8), "twice as many at a time");
    for part in
        ["for 60 % of the time", "there were 24", "2000 of 100000 jobs", "(queue_full 2000)", "be 30, but"]
    {
        assert!(reason.contains(part), "{reason}");
    }
    // Without a queue, only rejections show the additional demand: half of it.
    let lost = Seen {
        demand: Marks { p50: 4, p99: 4, max: 4 },
        rejected: [("queue_full".into(), 50_000)].into(),
        ..overloaded()
    };
    let setup = Setup { max_queue: 0, ..setup() };
    assert_eq!(proposed(lost.clone(), &setup, "processes").unwrap().0, Setting::Count(8));
    let some = Seen { rejected: [("queue_full".into(), 10_000)].into(), ..lost };
    assert_eq!(proposed(some, &setup, "processes").unwrap().0, Setting::Count(5));
}

#[test]
fn one_process_that_does_several_jobs_is_given_more_of_them() {
    let setup = Setup { processes: 1, max_in_flight: 4, ..setup() };
    assert_eq!(proposed(overloaded(), &setup, "max_in_flight").unwrap().0, Setting::Count(8));
    assert_eq!(proposed(overloaded(), &setup, "processes"), None);
    let setup = Setup { processes: 2, max_in_flight: 2, ..setup };
    assert_eq!(proposed(overloaded(), &setup, "processes").unwrap().0, Setting::Count(4));
    let none = advice(overloaded(), &Setup { max_in_flight: 0, max_queue: 0, ..setup });
    assert!(none.advice.is_empty() && none.kept[0].reason.contains("rejects every job"), "{none:?}");
}

#[test]
fn processors_and_memory_hold_it_back() {
    let hot = Seen { processors_per_job: Some(0.95), ..overloaded() };
    let reason = kept(hot.clone(), &Setup { processes: 5, ..setup() }, "processes");
    assert!(
        reason.contains("95 % of a processor") && reason.contains("the 4 processors here more than 5"),
        "{reason}"
    );
    let (processes, reason) = proposed(hot, &setup(), "processes").unwrap();
    assert_eq!(processes, Setting::Count(5));
    assert!(reason.contains("would only compete"), "{reason}");
    let large = Seen { rss_max_bytes: Some(2 << 30), ..overloaded() };
    let (processes, reason) = proposed(large, &setup(), "processes").unwrap();
    assert_eq!(processes, Setting::Count(6));
    assert!(reason.contains("80 % of the 16GiB of memory here"), "{reason}");
    let tenants = Setup { sets_of_workers: 64, ..setup() };
    let reason = kept(overloaded(), &tenants, "processes");
    assert!(reason.contains("more than 2 jobs at once could need"), "{reason}");
}

#[test]
fn where_workers_are_missing_their_number_is_not_the_question() {
    let dying = Seen { time_short_of_workers: 0.3, ..overloaded() };
    let reason = kept(dying, &setup(), "processes");
    assert!(reason.contains("workers were missing for 30 %"), "{reason}");
}

#[test]
fn where_nothing_ran_there_is_nothing_to_go_by() {
    let rejected = [("unavailable".into(), 5000)].into();
    let down = Seen { watched: Duration::from_secs(7200), jobs: 5000, limit: 4, rejected, ..Seen::default() };
    let advice = advice(down, &setup());
    assert!(
        advice.advice.is_empty() && advice.kept[0].reason.ends_with("rejected were: unavailable 5000"),
        "{advice:?}"
    );
}

#[test]
fn nothing_is_proposed_for_an_idle_bulkhead() {
    let idle = Seen { busy_ms: 40_000, ..seen() };
    let large =
        Setup { processes: 64, deadline: Duration::from_secs(3600), is_memory_bounded: false, ..setup() };
    assert!(!advice(seen(), &large).advice.is_empty());
    let told = advice(idle.clone(), &large);
    assert!(told.advice.is_empty() && told.kept[0].reason.contains("in flight for 0.6 %"), "{told:?}");
    let lost = Seen { rejected: [("queue_full".into(), 5000)].into(), ..idle };
    assert!(!advice(lost, &large).advice.is_empty(), "it is not idle when jobs find no room");
}

#[test]
fn what_was_not_needed_for_an_hour_is_too_much() {
    let advice = advice_of_large(seen());
    let told: Vec<_> = advice.advice.iter().map(|item| (&*item.key, item.proposed)).collect();
    let deadline = Setting::Time(Duration::from_secs(8));
    assert_eq!(told, [("processes", Setting::Count(4)), ("deadline", deadline)], "{advice:?}");
    // Jobs that arrive together each need a permit or a place in the queue.
    let bursts = Seen { concurrency: Marks { p50: 1, p99: 3, max: 40 }, ..seen() };
    let setup = Setup { processes: 64, max_queue: 0, ..setup() };
    assert_eq!(proposed(bursts, &setup, "processes"), None);
}

#[test]
fn a_queue_is_as_long_as_what_can_be_served_in_time() {
    // More processes cannot help, so more jobs must wait: 4 at once, 350 ms each, 4.1 s until it is too late.
    let bound = Seen { processors_per_job: Some(1.0), ..overloaded() };
    let (places, reason) = proposed(bound.clone(), &setup(), "max_queue").unwrap();
    assert_eq!(places, Setting::Count(40));
    assert!(reason.contains("the 4.1 s that the deadline leaves is 46 jobs"), "{reason}");
    let setup = setup();
    let (places, _) =
        proposed(bound.clone(), &Setup { max_queue: 40, ..setup.clone() }, "max_queue").unwrap();
    assert_eq!(places, Setting::Count(46));
    let reason = kept(bound.clone(), &Setup { max_queue: 46, ..setup.clone() }, "max_queue");
    assert!(reason.contains("more jobs would wait in vain"), "{reason}");
    let impatient = Setup { queue_timeout: Some(Duration::from_secs(1)), ..setup.clone() };
    let reason = kept(bound.clone(), &impatient, "max_queue");
    assert!(reason.contains("queue_timeout (1.0 s) is 11 jobs"), "{reason}");
    // Too many jobs wait in vain.
    let vain = Seen { rejected: [("queue_timeout".into(), 3000)].into(), ..bound.clone() };
    let (places, reason) = proposed(vain, &impatient, "max_queue").unwrap();
    assert_eq!(places, Setting::Count(11));
    assert!(reason.contains("3000 of 100000 jobs waited in vain"), "{reason}");
    // A queue of 0 is the default, not a decision.
    let (places, _) = proposed(bound, &Setup { max_queue: 0, ..setup.clone() }, "max_queue").unwrap();
    assert_eq!(places, Setting::Count(4));
    // More permits take precedence over a longer queue.
    assert!(kept(overloaded(), &setup, "max_queue").contains("more permits come before"));
}

#[test]
fn who_cannot_be_served_hears_it_early() {
    let late = Seen { deadline_exceeded: Late { queued: 5000, ..Late::default() }, ..seen() };
    let (timeout, reason) = proposed(late.clone(), &setup(), "queue_timeout").unwrap();
    assert_eq!(timeout, Setting::Time(Duration::from_millis(4100)));
    assert!(reason.contains("5000 of 100000 jobs waited until their deadline"), "{reason}");
    let set = Setup { queue_timeout: Some(Duration::from_secs(4)), ..setup() };
    assert_eq!(proposed(late, &set, "queue_timeout"), None);
}

#[test]
fn a_deadline_leaves_room_and_not_too_much() {
    let near = Seen { run_ms: Marks { p50: 1000.0, p99: 4300.0, max: 4900.0 }, ..seen() };
    let (deadline, reason) = proposed(near.clone(), &setup(), "deadline").unwrap();
    assert_eq!(deadline, Setting::Time(Duration::from_millis(6500)));
    assert!(reason.contains("at most 4300 ms of 5s") || reason.contains("at most 4.3 s of 5s"), "{reason}");
    let clients = Setup { deadline_max: Duration::from_secs(6), ..setup() };
    assert_eq!(proposed(near, &clients, "deadline").unwrap().0, Setting::Time(Duration::from_secs(6)));
    let late = Late { running: 4000, by_own: 3000, queued: 0 };
    let (deadline, reason) =
        proposed(Seen { deadline_exceeded: late, ..seen() }, &setup(), "deadline").unwrap();
    assert_eq!(deadline, Setting::Time(Duration::from_secs(10)));
    assert!(reason.contains("3000 of 100000 jobs were stopped"), "{reason}");
    // Deadlines set by clients are not a reason for a longer default.
    let hurried = Seen { deadline_exceeded: Late { by_own: 0, ..late }, ..seen() };
    assert_eq!(proposed(hurried, &setup(), "deadline"), None);
}

#[test]
fn memory_is_bounded_at_twice_what_was_held() {
    let of = |cgroup_memory, is_memory_bounded| Setup { cgroup_memory, is_memory_bounded, ..setup() };
    let twice = Setting::Bytes(200 << 20);
    assert_eq!(proposed(seen(), &of(None, false), "recycle.rss").unwrap().0, twice);
    assert_eq!(proposed(seen(), &of(Some(110 << 20), false), "cgroup.memory").unwrap().0, twice);
    assert_eq!(proposed(seen(), &of(Some(1 << 30), true), "cgroup.memory").unwrap().0, twice);
    assert!(kept(seen(), &of(Some(256 << 20), false), "cgroup.memory").contains("held 100MiB of 256MiB"));
    // Memory is not bounded before enough is known.
    let early = Seen { jobs: 500, ..seen() };
    assert_eq!(proposed(early, &of(None, false), "recycle.rss"), None);
}

#[test]
fn values_are_written_as_in_the_file() {
    let told = [
        Setting::Unset,
        Setting::Count(8),
        Setting::Time(Duration::from_millis(1500)),
        Setting::Bytes(200 << 20),
    ];
    assert_eq!(serde_json::to_value(told).unwrap(), json!([null, 8, "1s 500ms", "200MiB"]));
}

// Properties of all advice.

/// A load that does not depend on the limits.
#[derive(Clone, Debug)]
struct Load {
    demand: Marks<u64>,
    run_ms: f64,
    processors_per_job: Option<f64>,
    rss: u64,
}

impl Load {
    /// Returns the observations of this load under the limits of `setup`.
    fn seen(&self, setup: &Setup) -> Seen {
        let limit = setup.permits();
        let below = |marks: Marks<u64>, most: u64| Marks {
            p50: marks.p50.min(most),
            p99: marks.p99.min(most),
            max: marks.max.min(most),
        };
        let places = limit + u64::from(setup.max_queue);
        let demand = below(self.demand, places);
        let beyond = |of: u64| of.saturating_sub(limit).min(setup.max_queue.into());
        let lost = if self.demand.p99 > places { 5000 } else { 20 * u64::from(self.demand.max > places) };
        let time_at_limit = if self.demand.p99 >= limit { 0.05 } else { 0.005 };
        Seen {
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

fn applied(setup: &Setup, advice: &Advice) -> Setup {
    let mut setup = setup.clone();
    let count = |setting| match setting {
        Setting::Count(count) => u32::try_from(count).unwrap(),
        other => panic!("{other:?} is no count"),
    };
    for item in &advice.advice {
        match (&*item.key, item.proposed) {
            ("processes", to) => setup.processes = count(to),
            ("max_in_flight", to) => setup.max_in_flight = count(to),
            ("max_queue", to) => setup.max_queue = count(to),
            ("deadline", Setting::Time(to)) => {
                setup.deadline = to;
                setup.deadline_max = setup.deadline_max.max(to);
            }
            ("queue_timeout", Setting::Time(to)) => setup.queue_timeout = Some(to),
            ("cgroup.memory", Setting::Bytes(to)) => setup.cgroup_memory = Some(to),
            ("recycle.rss", Setting::Bytes(_)) => setup.is_memory_bounded = true,
            other => panic!("{other:?} is no key, or of another kind"),
        }
    }
    setup
}

fn loads() -> impl Strategy<Value = Load> {
    let marks = (1..5000_u64, 0..2000_u64, 0..5000_u64);
    let marks = marks.prop_map(|(p50, p99, max)| Marks { p50, p99: p50 + p99, max: p50 + p99 + max });
    (marks, 0.5..20_000.0, prop::option::of(0.0..4.0), 1..1_u64 << 33).prop_map(
        |(demand, run_ms, processors_per_job, rss)| Load { demand, run_ms, processors_per_job, rss },
    )
}

fn setups() -> impl Strategy<Value = Setup> {
    let sizes = (1..=1024_u32, 0..=64_u32, 0..2000_u32, 1..=64_u32);
    let times = (1..100_000_u64, prop::option::of(1..100_000_u64));
    let memory = (prop::option::of(1 << 20..1_u64 << 34), any::<bool>());
    (sizes, times, memory).prop_map(|((processes, max_in_flight, max_queue, sets), times, memory)| Setup {
        processes,
        max_in_flight,
        max_queue: if max_in_flight == 0 { 0 } else { max_queue },
        queue_timeout: times.1.map(Duration::from_millis),
        deadline: Duration::from_millis(times.0),
        deadline_max: Duration::from_millis(times.0),
        adaptive: None,
        sets_of_workers: sets,
        spares: 0,
        cgroup_memory: memory.0,
        is_memory_bounded: memory.1,
    })
}

proptest! {
    #[test]
    fn nothing_is_proposed_that_could_not_be(load in loads(), setup in setups()) {
        let advice = advice(load.seen(&setup), &setup);
        for item in &advice.advice {
            prop_assert_ne!(item.now, item.proposed);
            prop_assert!(!item.reason.is_empty() && !item.reason.contains(char::is_control));
        }
        let after = applied(&setup, &advice);
        prop_assert!((1..=PROCESSES_CEILING).contains(&u64::from(after.processes)));
        prop_assert!(u64::from(after.max_in_flight) <= IN_FLIGHT_CEILING && after.permits() <= PERMITS_CEILING);
        prop_assert!(after.permits() > 0 || setup.permits() == 0);
        prop_assert!(u64::from(after.max_queue) <= QUEUE_CEILING);
        prop_assert!(!after.deadline.is_zero() && after.deadline <= DURATION_MAX);
        prop_assert!(after.permits() <= 2 * setup.permits(), "no more than twice as many at a time");
    }

    #[test]
    fn who_wants_more_is_not_given_less(load in loads(), setup in setups(), more in 0..500_u64) {
        let Marks { p50, p99, max } = load.demand;
        let larger = Load { demand: Marks { p50, p99: p99 + more, max: max + more }, ..load.clone() };
        let permits = |load: &Load| applied(&setup, &advice(load.seen(&setup), &setup)).permits();
        prop_assert!(permits(&larger) >= permits(&load));
    }

    #[test]
    fn who_does_as_advised_is_soon_advised_nothing(load in loads(), setup in setups()) {
        let mut setup = setup;
        // Doubling at each step reaches the maximum value within these iterations.
        for _ in 0..40 {
            let advice = advice(load.seen(&setup), &setup);
            if advice.advice.is_empty() {
                return Ok(());
            }
            setup = applied(&setup, &advice);
        }
        prop_assert!(false, "{:?}", advice(load.seen(&setup), &setup));
    }
}
