//! Tests changes to limits and programs while jobs are running: which changes take effect immediately, which take
//! effect later, and which state is kept.

use crate::fixture::{Fixture, MS, SECOND, limits};
use bulkhead_policy::{
    BreakerLimits, BreakerState, BulkheadState, Death, Event, Health, KillReason, LimitChange, Limits,
    OperatorEvent, RARE_HEARTBEATS_MISSED, RateLimit, RatePer, RecycleReason, Restart, RestartCause,
    RestartPolicy, TenantLimits, TenantOverrides,
};
use bulkhead_shared::{Priority, RejectReason};

fn reconfigure(fixture: &mut Fixture, limits: Limits) {
    fixture.apply(Event::Reconfigure(Box::new(limits)));
}

#[test]
fn reload_keeps_deadlines_of_existing_jobs() {
    let patient = Limits { queue_timeout: Some(5 * SECOND), deadline: 60 * SECOND, ..limits(1, 1, 5) };
    let mut fixture = Fixture::ready(Limits { deadline_max: 60 * SECOND, ..patient.clone() });
    let (_, before) = (fixture.job(), fixture.job());
    reconfigure(&mut fixture, Limits { queue_timeout: Some(SECOND), deadline_max: 60 * SECOND, ..patient });
    let after = fixture.job();
    fixture.wait(SECOND);
    fixture.expect(after, "rejected", Some("queue_timeout"));
    assert!(fixture.verdicts(before).is_empty());
    fixture.wait(4 * SECOND);
    fixture.expect(before, "rejected", Some("queue_timeout"));
}

/// After the limit has been lowered, queued jobs do not start until the number of running jobs has fallen below the new
/// limit.
#[test]
fn lower_limits_do_not_drop_any_jobs() {
    let mut fixture = Fixture::ready(limits(2, 2, 10));
    let jobs: Vec<_> = (0..10).map(|_| fixture.job()).collect();
    reconfigure(&mut fixture, limits(1, 1, 2));
    assert_eq!((fixture.bulkhead.in_flight(), fixture.bulkhead.queued()), (4, 6));
    assert_eq!(fixture.submit(), None);
    assert_eq!(fixture.rejected(RejectReason::QueueFull), 1);
    for job in &jobs[..3] {
        fixture.reply(*job);
        assert!(
            !fixture.was_dispatched(jobs[4]),
            "the job must wait until fewer jobs are running than the new limit allows"
        );
    }
    fixture.reply(jobs[3]);
    assert!(fixture.was_dispatched(jobs[4]) && !fixture.was_dispatched(jobs[5]));
}

/// Returns the slot and the state of each worker that fills a slot.
fn slots(fixture: &Fixture) -> Vec<(u32, &'static str)> {
    let views = fixture.bulkhead.workers(fixture.now).into_iter();
    views.filter(|view| view.is_current).map(|view| (view.slot, view.state)).collect()
}

fn resize(fixture: &mut Fixture, processes: u32) {
    let change = LimitChange { processes: Some(processes), ..LimitChange::default() };
    fixture.apply(Event::ChangeLimits(change));
}

/// The worker in slot 0 is gone, so a decrease must not stop the ready worker in slot 1.
#[test]
fn decrease_keeps_the_only_ready_worker() {
    let with = |policy, max| {
        let base = limits(2, 1, 5);
        Limits { restart: Restart { policy, max, ..base.restart.clone() }, ..base }
    };
    let stopped = [with(RestartPolicy::Never, 5), with(RestartPolicy::Always, 0)];
    for limits in stopped {
        let mut fixture = Fixture::ready(limits.clone());
        fixture.exit_worker(fixture.spawned[0], Death::Exit(1));
        assert_eq!(slots(&fixture), [(1, "ready")]);
        let running = fixture.job();
        let waiting = fixture.job();
        resize(&mut fixture, 1);
        assert_eq!(slots(&fixture), [(0, "busy")]);
        assert_eq!((fixture.bulkhead.state(), fixture.drained.len()), (BulkheadState::Ready, 0));
        fixture.reply(running);
        fixture.reply(waiting);
        fixture.expect(waiting, "ok", None);
        resize(&mut fixture, 2);
        assert_eq!(fixture.spawned.len(), 3, "the second slot must get a worker again");
    }
}

#[test]
fn decrease_stops_starting_workers_before_ready_ones() {
    let mut fixture = Fixture::starting(limits(3, 1, 5));
    let kept = fixture.spawned[1];
    fixture.bring_up(kept);
    let job = fixture.job();
    resize(&mut fixture, 1);
    assert_eq!(slots(&fixture), [(0, "busy")]);
    assert_eq!((fixture.killed.len(), fixture.drained.len()), (2, 0));
    fixture.reply(job);
    fixture.expect(job, "ok", None);
}

#[test]
fn decrease_removes_stopped_slots_first() {
    let base = limits(2, 1, 5);
    let restart = Restart { max: 1, backoff: SECOND, backoff_max: 60 * SECOND, ..base.restart.clone() };
    let mut fixture = Fixture::starting(Limits { restart, ..base });
    let second = fixture.spawned[1];
    fixture.exit_worker(fixture.spawned[0], Death::Exit(1));
    fixture.exit_worker(fixture.newest_worker(), Death::Exit(1));
    fixture.exit_worker(second, Death::Exit(1));
    let coming = fixture.newest_worker();
    let job = fixture.job();
    resize(&mut fixture, 1);
    fixture.bring_up(coming);
    fixture.reply(job);
    fixture.expect(job, "ok", None);
}

#[test]
fn reload_keeps_rate_limit_charges() {
    let rate = |per_second, burst| Some(RateLimit { per_second, burst, per: RatePer::Bulkhead });
    let mut fixture = Fixture::ready(Limits { rate_limit: rate(1.0, 4), ..limits(8, 8, 0) });
    for _ in 0..4 {
        fixture.job();
    }
    reconfigure(&mut fixture, Limits { rate_limit: rate(2.0, 5), ..limits(8, 8, 0) });
    fixture.job();
    assert_eq!((fixture.submit(), fixture.last_reason()), (None, Some("rate_limited")));
    reconfigure(&mut fixture, limits(8, 8, 0));
    fixture.job();
}

/// After a rate limit has been removed and another limit has been set, earlier charges no longer count. This applies to
/// every way of removing and setting a limit.
#[test]
fn rate_limit_that_was_removed_leaves_no_charges() {
    let slow = RateLimit { per_second: 1.0, burst: 4, per: RatePer::Tenant };
    let fast = RateLimit { per_second: 1000.0, burst: 10, per: RatePer::Tenant };
    let of_reload = |rate_limit| Event::Reconfigure(Box::new(Limits { rate_limit, ..limits(8, 8, 0) }));
    let of_change = |rate_limit| {
        Event::ChangeLimits(LimitChange { rate_limit: Some(rate_limit), ..LimitChange::default() })
    };
    let of_tenant = |rate_limit| {
        let overrides = TenantOverrides { rate_limit, ..TenantOverrides::default() };
        Event::ChangeTenantLimits { tenant: "acme".to_owned(), overrides }
    };
    let ways: [&dyn Fn(Option<RateLimit>) -> Event<u32>; 3] = [&of_reload, &of_change, &of_tenant];
    for (number, way) in ways.into_iter().enumerate() {
        let mut fixture = Fixture::ready(limits(8, 8, 0));
        fixture.apply(way(Some(slow)));
        let pass = |fixture: &mut Fixture| {
            (0..20).filter(|_| fixture.submit_as(Priority::Normal, "acme").is_some()).count()
        };
        assert_eq!(pass(&mut fixture), 4, "way {number}");
        fixture.apply(way(None));
        fixture.apply(way(Some(fast)));
        assert_eq!(pass(&mut fixture), 10, "way {number}");
    }
}

#[test]
fn tenant_quotas_change_immediately() {
    let share = |most: Option<u32>, own: &[(&str, u32)]| {
        let own = own.iter().map(|(name, most)| {
            ((*name).to_owned(), TenantOverrides { max_in_flight: Some(*most), ..TenantOverrides::default() })
        });
        let tenants = TenantLimits {
            max_in_flight: most,
            max_queue: None,
            overrides: own.collect(),
            ..TenantLimits::default()
        };
        Limits { tenants, ..limits(1, 4, 10) }
    };
    let mut fixture = Fixture::ready(share(Some(1), &[("acme", 2)]));
    let of = |fixture: &mut Fixture, tenant| fixture.submit_as(Priority::Normal, tenant).unwrap();
    let acme: Vec<_> = (0..4).map(|_| of(&mut fixture, "acme")).collect();
    let globex: Vec<_> = (0..2).map(|_| of(&mut fixture, "globex")).collect();
    let given = |fixture: &Fixture, jobs: &[bulkhead_shared::JobId]| {
        jobs.iter().filter(|&&job| fixture.was_dispatched(job)).count()
    };
    assert_eq!((given(&fixture, &acme), given(&fixture, &globex)), (2, 1));
    // The general quota now applies to this tenant. Its surplus jobs continue.
    reconfigure(&mut fixture, share(Some(1), &[]));
    fixture.reply(acme[0]);
    assert_eq!((given(&fixture, &acme), given(&fixture, &globex)), (2, 1));
    reconfigure(&mut fixture, share(None, &[]));
    assert_eq!((given(&fixture, &acme), given(&fixture, &globex)), (3, 2));
}

fn breaker(failure_rate: f64) -> Option<BreakerLimits> {
    let (window, open_for) = (10 * SECOND, 5 * SECOND);
    let (slow_call, slow_rate) = (None, 1.0);
    Some(BreakerLimits { window, min_calls: 3, failure_rate, slow_call, slow_rate, open_for, probes: 1 })
}

fn crash(fixture: &mut Fixture) {
    let job = fixture.job();
    fixture.exit_worker(fixture.holder(job), Death::Signal(11));
    let next = fixture.newest_worker();
    fixture.bring_up(next);
}

#[test]
fn reload_of_other_keys_keeps_breaker_state() {
    let with = |breaker, queue| Limits { breaker, ..limits(1, 1, queue) };
    let mut fixture = Fixture::ready(with(breaker(0.5), 0));
    (0..2).for_each(|_| crash(&mut fixture));
    reconfigure(&mut fixture, with(breaker(0.6), 0));
    (0..2).for_each(|_| crash(&mut fixture));
    assert_eq!(
        fixture.bulkhead.breaker(),
        BreakerState::Closed,
        "only two calls have been counted since the change"
    );
    reconfigure(&mut fixture, with(breaker(0.6), 7));
    crash(&mut fixture);
    assert_eq!(
        fixture.bulkhead.breaker(),
        BreakerState::Open,
        "three calls have been counted since the breaker's keys changed"
    );
    // A new limit does not close an open breaker.
    reconfigure(&mut fixture, with(breaker(0.9), 7));
    assert_eq!(fixture.bulkhead.breaker(), BreakerState::Open);
    fixture.wait(5 * SECOND);
    assert_eq!(fixture.bulkhead.breaker(), BreakerState::HalfOpen);
    // A probe that was admitted under the previous limits does not affect the breaker.
    let probe = fixture.job();
    reconfigure(&mut fixture, with(breaker(0.8), 7));
    fixture.reply(probe);
    assert_eq!(fixture.bulkhead.breaker(), BreakerState::HalfOpen);
    let probe = fixture.job();
    fixture.reply(probe);
    assert_eq!(fixture.bulkhead.breaker(), BreakerState::Closed);
    fixture.apply(Event::ForceBreaker { open: true });
    reconfigure(&mut fixture, with(None, 7));
    assert_eq!(fixture.bulkhead.breaker(), BreakerState::ForcedOpen, "the breaker must remain forced open");
    fixture.apply(Event::ForceBreaker { open: false });
    fixture.job();
}

#[test]
fn reload_keeps_heartbeat_interval_of_running_worker() {
    let health = |heartbeat| Limits { health: Health { heartbeat, missed: 2 }, ..limits(1, 1, 0) };
    let mut fixture = Fixture::ready(health(10 * SECOND));
    reconfigure(&mut fixture, health(SECOND));
    fixture.now = fixture.now + 9 * SECOND;
    fixture.apply(Event::Tick);
    assert!(fixture.cpu_time_checks.is_empty() && fixture.killed.is_empty());
}

/// With the default of `missed`, workers with a journal send only every second heartbeat.
#[test]
fn lower_missed_does_not_apply_to_workers_with_rare_heartbeats() {
    let health = |missed| Limits { health: Health { heartbeat: SECOND, missed }, ..limits(1, 1, 0) };
    for (before, is_checked) in [(RARE_HEARTBEATS_MISSED, false), (RARE_HEARTBEATS_MISSED - 1, true)] {
        let mut fixture = Fixture::ready(health(before));
        reconfigure(&mut fixture, health(1));
        // A silent worker is observed for one more heartbeat interval before the supervisor checks the cause of the
        // silence.
        for time in [3 * SECOND, SECOND] {
            fixture.now = fixture.now + time;
            fixture.apply(Event::Tick);
        }
        assert_eq!(!fixture.cpu_time_checks.is_empty(), is_checked, "{before}");
    }
}

#[test]
fn new_restart_policy_fills_stopped_slots() {
    let policy = |policy| {
        let base = limits(1, 1, 0);
        Limits { restart: Restart { policy, ..base.restart.clone() }, ..base }
    };
    let mut fixture = Fixture::ready(policy(RestartPolicy::Never));
    fixture.exit_worker(fixture.newest_worker(), Death::Exit(0));
    assert_eq!(fixture.spawned.len(), 1);
    reconfigure(&mut fixture, policy(RestartPolicy::Always));
    assert_eq!(fixture.spawned.len(), 2);
}

// Replacing the program.

#[test]
fn new_program_replaces_workers_one_at_a_time() {
    let mut fixture = Fixture::ready(limits(3, 1, 5));
    let (old, job) = (fixture.spawned.clone(), fixture.job());
    fixture.apply(Event::ReplaceWorkers);
    for turn in 1..=3 {
        assert_eq!((fixture.spawned.len(), fixture.drained.len()), (3 + turn, turn - 1));
        fixture.bring_up(fixture.newest_worker());
    }
    assert_eq!(fixture.drained, old);
    fixture.reply(job);
    old.iter().for_each(|&worker| fixture.exit_worker(worker, Death::Exit(0)));
    fixture.wait(60 * SECOND);
    assert_eq!((fixture.spawned.len(), fixture.killed.len()), (6, 0));
    let reason = |note: &OperatorEvent| {
        matches!(note, OperatorEvent::WorkerRecycled { reason: RecycleReason::Reload, .. })
    };
    assert_eq!(fixture.events.iter().filter(|note| reason(note)).count(), 3);
}

#[test]
fn retries_failed_replacement_while_old_workers_run_jobs() {
    let mut fixture = Fixture::ready(limits(2, 1, 0));
    fixture.apply(Event::ReplaceWorkers);
    for attempt in 1..=3 {
        assert_eq!(fixture.spawned.len(), 2 + attempt);
        fixture.exit_worker(fixture.newest_worker(), Death::Exit(1));
        let failed = |note: &&OperatorEvent| {
            matches!(note, OperatorEvent::ReplacementFailed { retry_in: Some(_), .. })
        };
        assert_eq!(fixture.events.iter().filter(failed).count(), attempt);
        let (a, b) = (fixture.job(), fixture.job());
        fixture.reply(a);
        fixture.reply(b);
        assert_eq!(fixture.spawned.len(), 2 + attempt, "the next attempt must not be immediate");
        fixture.wait(30 * SECOND);
    }
    // After the first replacement has started, the second one starts without further delay.
    fixture.bring_up(fixture.newest_worker());
    assert_eq!(fixture.spawned.len(), 7);
    fixture.bring_up(fixture.newest_worker());
    assert_eq!(fixture.drained.len(), 2);
}

#[test]
fn replacement_without_a_user_id_is_retried_every_second() {
    let mut fixture = Fixture::ready(limits(1, 1, 0));
    fixture.apply(Event::ReplaceWorkers);
    for started in 2..10 {
        assert_eq!(fixture.spawned.len(), started);
        let (worker, message) = (fixture.newest_worker(), "no user ID is free".to_owned());
        fixture.apply(Event::SpawnFailed { worker, message, lacks_id: true });
        fixture.wait(SECOND);
    }
    fixture.bring_up(fixture.newest_worker());
    assert_eq!(fixture.drained, [fixture.spawned[0]]);
}

#[test]
fn new_program_kills_starting_workers() {
    let base = limits(1, 1, 5);
    let never = Limits { restart: Restart { policy: RestartPolicy::Never, ..base.restart.clone() }, ..base };
    let mut fixture = Fixture::starting(never);
    let (waits, first) = (fixture.job(), fixture.newest_worker());
    fixture.apply(Event::Spawned { worker: first, pid: 1 });
    fixture.apply(Event::ReplaceWorkers);
    assert_eq!(fixture.killed, [(first, KillReason::NotNeeded)]);
    fixture.exit_worker(first, Death::Signal(9));
    assert_eq!(fixture.spawned.len(), 2);
    fixture.bring_up(fixture.newest_worker());
    fixture.reply(waits);
    fixture.expect(waits, "ok", None);
}

#[test]
fn unneeded_worker_that_never_started_is_no_failure() {
    let mut fixture = Fixture::starting(limits(1, 1, 5));
    let first = fixture.newest_worker();
    fixture.apply(Event::ReplaceWorkers);
    assert_eq!(fixture.killed, [(first, KillReason::NotNeeded)]);
    let message = "the template was not ready in time".to_owned();
    fixture.apply(Event::SpawnFailed { worker: first, message, lacks_id: false });
    assert_eq!(fixture.causes.last(), Some(&Some(RestartCause::Stopped)));
    let is_failure = |event: &OperatorEvent| matches!(event, OperatorEvent::WorkerNotStarted { .. });
    assert!(!fixture.events.iter().any(is_failure), "{:?}", fixture.events);
}

#[test]
fn newer_program_restarts_an_ongoing_replacement() {
    let mut fixture = Fixture::ready(limits(1, 1, 0));
    fixture.apply(Event::ReplaceWorkers);
    let first = fixture.newest_worker();
    fixture.apply(Event::ReplaceWorkers);
    assert_eq!(fixture.killed, [(first, KillReason::NotNeeded)]);
    fixture.exit_worker(first, Death::Signal(9));
    assert_eq!(fixture.spawned.len(), 3, "the replacement must be started immediately");
    fixture.bring_up(fixture.newest_worker());
    assert_eq!(fixture.drained.len(), 1);
    fixture.wait(10 * MS);
}
