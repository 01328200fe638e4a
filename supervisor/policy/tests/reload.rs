//! Limits and programs that change while jobs run: what takes effect at once, what later, and what is kept.

#![expect(clippy::panic, reason = "a test says what is wrong by panicking")]

mod stage;

use bulkhead_policy::{
    BreakerLimits, BreakerState, Death, Event, Health, KillReason, Limits, Note, OwnNumbers, RateLimit,
    RatePer, RecycleReason, Restart, RestartPolicy, TenantLimits,
};
use bulkhead_shared::{Priority, RejectReason};
use stage::{MS, SECOND, Stage, limits};

fn reconfigure(stage: &mut Stage, limits: Limits) {
    stage.apply(Event::Reconfigure(Box::new(limits)));
}

#[test]
fn deadlines_and_patience_are_those_of_the_time_a_job_came_in() {
    let patient = Limits { queue_timeout: Some(5 * SECOND), deadline: 60 * SECOND, ..limits(1, 1, 5) };
    let mut stage = Stage::ready(Limits { deadline_max: 60 * SECOND, ..patient.clone() });
    let (_, before) = (stage.job(), stage.job());
    reconfigure(&mut stage, Limits { queue_timeout: Some(SECOND), deadline_max: 60 * SECOND, ..patient });
    let after = stage.job();
    stage.wait(SECOND);
    stage.expect(after, "rejected", Some("queue_timeout"));
    assert!(stage.verdicts(before).is_empty());
    stage.wait(4 * SECOND);
    stage.expect(before, "rejected", Some("queue_timeout"));
}

/// Queued jobs start only after the excess jobs have ended.
#[test]
fn lower_limits_drop_neither_running_nor_queued_jobs() {
    let mut stage = Stage::ready(limits(2, 2, 10));
    let jobs: Vec<_> = (0..10).map(|_| stage.job()).collect();
    reconfigure(&mut stage, limits(1, 1, 2));
    assert_eq!((stage.bulkhead.in_flight(), stage.bulkhead.queued()), (4, 6));
    assert_eq!(stage.submit(), None);
    assert_eq!(stage.rejected(RejectReason::QueueFull), 1);
    for job in &jobs[..3] {
        stage.reply(*job);
        assert!(!stage.was_given_out(jobs[4]), "the debt is not paid yet");
    }
    stage.reply(jobs[3]);
    assert!(stage.was_given_out(jobs[4]) && !stage.was_given_out(jobs[5]));
}

#[test]
fn what_was_charged_stays_charged() {
    let rate = |per_second, burst| Some(RateLimit { per_second, burst, per: RatePer::Bulkhead });
    let mut stage = Stage::ready(Limits { rate_limit: rate(1.0, 4), ..limits(8, 8, 0) });
    for _ in 0..4 {
        stage.job();
    }
    reconfigure(&mut stage, Limits { rate_limit: rate(2.0, 5), ..limits(8, 8, 0) });
    stage.job();
    assert_eq!((stage.submit(), stage.last_reason()), (None, Some("rate_limited")));
    reconfigure(&mut stage, limits(8, 8, 0));
    stage.job();
}

#[test]
fn tenants_have_their_new_shares_at_once() {
    let share = |most: Option<u32>, own: &[(&str, u32)]| {
        let own = own.iter().map(|(name, most)| {
            ((*name).to_owned(), OwnNumbers { max_in_flight: Some(*most), ..OwnNumbers::default() })
        });
        let tenants = TenantLimits {
            max_in_flight: most,
            max_queue: None,
            own: own.collect(),
            ..TenantLimits::default()
        };
        Limits { tenants, ..limits(1, 4, 10) }
    };
    let mut stage = Stage::ready(share(Some(1), &[("acme", 2)]));
    let of = |stage: &mut Stage, tenant| stage.submit_as(Priority::Normal, tenant).unwrap();
    let acme: Vec<_> = (0..4).map(|_| of(&mut stage, "acme")).collect();
    let globex: Vec<_> = (0..2).map(|_| of(&mut stage, "globex")).collect();
    let given = |stage: &Stage, jobs: &[bulkhead_shared::JobId]| {
        jobs.iter().filter(|&&job| stage.was_given_out(job)).count()
    };
    assert_eq!((given(&stage, &acme), given(&stage, &globex)), (2, 1));
    // This tenant now has the general share. Its surplus jobs continue.
    reconfigure(&mut stage, share(Some(1), &[]));
    stage.reply(acme[0]);
    assert_eq!((given(&stage, &acme), given(&stage, &globex)), (2, 1));
    reconfigure(&mut stage, share(None, &[]));
    assert_eq!((given(&stage, &acme), given(&stage, &globex)), (3, 2));
}

fn breaker(failure_rate: f64) -> Option<BreakerLimits> {
    let (window, open_for) = (10 * SECOND, 5 * SECOND);
    let (slow_call, slow_rate) = (None, 1.0);
    Some(BreakerLimits { window, min_calls: 3, failure_rate, slow_call, slow_rate, open_for, probes: 1 })
}

fn crash(stage: &mut Stage) {
    let job = stage.job();
    stage.die(stage.holder(job), Death::Signal(11));
    let next = stage.newest_worker();
    stage.bring_up(next);
}

#[test]
fn a_breaker_forgets_only_when_its_own_keys_change() {
    let with = |breaker, queue| Limits { breaker, ..limits(1, 1, queue) };
    let mut stage = Stage::ready(with(breaker(0.5), 0));
    (0..2).for_each(|_| crash(&mut stage));
    reconfigure(&mut stage, with(breaker(0.6), 0));
    (0..2).for_each(|_| crash(&mut stage));
    assert_eq!(stage.bulkhead.breaker(), BreakerState::Closed, "two calls since then");
    reconfigure(&mut stage, with(breaker(0.6), 7));
    crash(&mut stage);
    assert_eq!(stage.bulkhead.breaker(), BreakerState::Open, "three calls since its own change");
    // A new limit does not close the breaker.
    reconfigure(&mut stage, with(breaker(0.9), 7));
    assert_eq!(stage.bulkhead.breaker(), BreakerState::Open);
    stage.wait(5 * SECOND);
    assert_eq!(stage.bulkhead.breaker(), BreakerState::HalfOpen);
    // A probe under the previous limits has no effect.
    let probe = stage.job();
    reconfigure(&mut stage, with(breaker(0.8), 7));
    stage.reply(probe);
    assert_eq!(stage.bulkhead.breaker(), BreakerState::HalfOpen);
    let probe = stage.job();
    stage.reply(probe);
    assert_eq!(stage.bulkhead.breaker(), BreakerState::Closed);
    stage.apply(Event::ForceBreaker { open: true });
    reconfigure(&mut stage, with(None, 7));
    assert_eq!(stage.bulkhead.breaker(), BreakerState::ForcedOpen, "that was done by hand");
    stage.apply(Event::ForceBreaker { open: false });
    stage.job();
}

#[test]
fn a_worker_is_held_to_the_heartbeat_that_it_was_told() {
    let health = |heartbeat| Limits { health: Health { heartbeat, missed: 2 }, ..limits(1, 1, 0) };
    let mut stage = Stage::ready(health(10 * SECOND));
    reconfigure(&mut stage, health(SECOND));
    stage.now = stage.now + 9 * SECOND;
    stage.apply(Event::Tick);
    assert!(stage.asked.is_empty() && stage.killed.is_empty());
}

#[test]
fn slots_that_the_policy_of_before_gave_up_are_filled() {
    let policy = |policy| {
        let base = limits(1, 1, 0);
        Limits { restart: Restart { policy, ..base.restart.clone() }, ..base }
    };
    let mut stage = Stage::ready(policy(RestartPolicy::Never));
    stage.die(stage.newest_worker(), Death::Exit(0));
    assert_eq!(stage.spawned.len(), 1);
    reconfigure(&mut stage, policy(RestartPolicy::Always));
    assert_eq!(stage.spawned.len(), 2);
}

// Another program.

#[test]
fn workers_are_replaced_one_after_the_other_and_their_jobs_end() {
    let mut stage = Stage::ready(limits(3, 1, 5));
    let (old, job) = (stage.spawned.clone(), stage.job());
    stage.apply(Event::Replace);
    for turn in 1..=3 {
        assert_eq!((stage.spawned.len(), stage.drained.len()), (3 + turn, turn - 1));
        stage.bring_up(stage.newest_worker());
    }
    assert_eq!(stage.drained, old);
    stage.reply(job);
    old.iter().for_each(|&worker| stage.die(worker, Death::Exit(0)));
    stage.wait(60 * SECOND);
    assert_eq!((stage.spawned.len(), stage.killed.len()), (6, 0));
    let reason = |note: &Note| matches!(note, Note::WorkerRecycled { reason: RecycleReason::Reload, .. });
    assert_eq!(stage.notes.iter().filter(|note| reason(note)).count(), 3);
}

#[test]
fn what_does_not_start_is_tried_again_while_the_old_ones_serve() {
    let mut stage = Stage::ready(limits(2, 1, 0));
    stage.apply(Event::Replace);
    for attempt in 1..=3 {
        assert_eq!(stage.spawned.len(), 2 + attempt);
        stage.die(stage.newest_worker(), Death::Exit(1));
        let failed = |note: &&Note| matches!(note, Note::ReplacementFailed { .. });
        assert_eq!(stage.notes.iter().filter(failed).count(), attempt);
        let (a, b) = (stage.job(), stage.job());
        stage.reply(a);
        stage.reply(b);
        assert_eq!(stage.spawned.len(), 2 + attempt, "not at once");
        stage.wait(30 * SECOND);
    }
    // The replacement finally starts, and the other one follows without a further pause.
    stage.bring_up(stage.newest_worker());
    assert_eq!(stage.spawned.len(), 7);
    stage.bring_up(stage.newest_worker());
    assert_eq!(stage.drained.len(), 2);
}

#[test]
fn what_has_not_begun_is_not_waited_for() {
    let base = limits(1, 1, 5);
    let never = Limits { restart: Restart { policy: RestartPolicy::Never, ..base.restart.clone() }, ..base };
    let mut stage = Stage::starting(never);
    let (waits, first) = (stage.job(), stage.newest_worker());
    stage.apply(Event::Spawned { worker: first, pid: 1 });
    stage.apply(Event::Replace);
    assert_eq!(stage.killed, [(first, KillReason::Unwanted)]);
    stage.die(first, Death::Signal(9));
    assert_eq!(stage.spawned.len(), 2);
    stage.bring_up(stage.newest_worker());
    stage.reply(waits);
    stage.expect(waits, "ok", None);
}

#[test]
fn a_replacement_under_way_is_begun_again() {
    let mut stage = Stage::ready(limits(1, 1, 0));
    stage.apply(Event::Replace);
    let first = stage.newest_worker();
    stage.apply(Event::Replace);
    assert_eq!(stage.killed, [(first, KillReason::Unwanted)]);
    stage.die(first, Death::Signal(9));
    assert_eq!(stage.spawned.len(), 3, "at once");
    stage.bring_up(stage.newest_worker());
    assert_eq!(stage.drained.len(), 1);
    stage.wait(10 * MS);
}
