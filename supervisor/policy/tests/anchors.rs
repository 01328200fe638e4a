//! Cases from tests and bug reports of other systems, each with its source. Cases about permits, deadlines
//! and workers are in `cases.rs`. Cases about the breaker, the queue and the retry budget are beside their
//! code.

#![expect(clippy::panic, reason = "a test says what is wrong by panicking")]

mod stage;

use bulkhead_policy::{
    Activity, BreakerLimits, BreakerState, Change, Death, Event, Limits, Note, PoisonLimits, Reply,
    RetryLimits,
};
use bulkhead_shared::{JobId, Priority, RejectReason};
use stage::{MS, SECOND, Stage, limits};

fn change(max_in_flight: Option<u32>, processes: Option<u32>) -> Event<u32> {
    Event::Change(Change { max_in_flight, processes, ..Change::default() })
}

// Resizing.

/// resilience4j, `SemaphoreBulkheadTest.changeConfig`: a waiting job gets a permit as soon as the limit
/// grows.
#[test]
fn growth_wakes_a_waiter_at_once() {
    let mut stage = Stage::ready(limits(1, 1, 4));
    let first = stage.job();
    let waiting: Vec<_> = (0..3).map(|_| stage.job()).collect();
    stage.apply(change(Some(3), None));
    let worker = stage.holder(first);
    assert_eq!(stage.limited, [(worker, 3)]);
    assert_eq!(stage.dispatched.len(), 3, "min(delta, waiters) are woken");
    assert!(stage.was_given_out(waiting[1]) && !stage.was_given_out(waiting[2]));
    assert_eq!(stage.bulkhead.limit(), 3);
}

/// resilience4j, `SemaphoreBulkhead.changeConfig` blocks until enough permits are free. Here no caller
/// blocks, and running jobs continue. Semian, `test_resize_tickets_decrease_with_worker_expiry`: the target
/// is reached.
#[test]
fn shrinking_does_not_block_and_reaches_its_target_under_load() {
    let mut stage = Stage::ready(limits(2, 4, 100));
    let running: Vec<_> = (0..8).map(|_| stage.job()).collect();
    let waiting: Vec<_> = (0..8).map(|_| stage.job()).collect();
    stage.apply(change(Some(1), None));
    assert_eq!((stage.cancelled.len(), stage.killed.len(), stage.answers.len()), (0, 0, 0));
    assert_eq!((stage.bulkhead.in_flight(), stage.bulkhead.limit()), (8, 2));
    for (done, &job) in running.iter().enumerate() {
        stage.reply(job);
        let expected = (8 - done as u64 - 1).max(2);
        assert_eq!(stage.bulkhead.in_flight(), expected, "after {} replies", done + 1);
    }
    for &job in &waiting {
        stage.reply(job);
    }
    assert_eq!(stage.bulkhead.counters().ok, 16);
}

/// resilience4j, `SemaphoreBulkheadTest.testZeroMaxConcurrentCalls`: a limit of 0 rejects every call.
#[test]
fn a_limit_of_zero_rejects_all() {
    let mut stage = Stage::ready(limits(1, 0, 0));
    assert_eq!(stage.submit(), None);
    assert_eq!(stage.last_reason(), Some("queue_full"));
    let mut stage = Stage::ready(limits(1, 2, 0));
    let running = stage.job();
    stage.apply(change(Some(0), None));
    assert_eq!(stage.submit(), None);
    assert_eq!(stage.rejected(RejectReason::QueueFull), 1);
    stage.reply(running);
    stage.expect(running, "ok", None);
    // The worker was drained. Another one is started once the limit is above 0 again.
    stage.apply(change(Some(1), None));
    let job = stage.job();
    stage.die(stage.newest_worker(), Death::Exit(0));
    stage.bring_up(stage.newest_worker());
    assert!(stage.was_given_out(job));
}

/// Semian, `test_resize_tickets_increase` and `_decrease`, applied to workers: new workers start at once,
/// surplus workers finish their jobs.
#[test]
fn processes_come_and_go_with_their_number() {
    let mut stage = Stage::ready(limits(1, 1, 10));
    let running = stage.job();
    let waiting = [stage.job(), stage.job()];
    stage.apply(change(None, Some(3)));
    assert_eq!(stage.spawned.len(), 3);
    for worker in [stage.spawned[1], stage.spawned[2]] {
        stage.bring_up(worker);
    }
    assert!(waiting.iter().all(|&job| stage.was_given_out(job)));
    stage.apply(change(None, Some(1)));
    assert_eq!(stage.drained, stage.spawned[1..], "the last come are the first to go");
    assert_eq!((stage.bulkhead.limit(), stage.answers.len()), (1, 0));
    for job in waiting {
        stage.reply(job);
        stage.expect(job, "ok", None);
        stage.die(stage.holder(job), Death::Exit(0));
    }
    assert_eq!(stage.spawned.len(), 3, "no worker follows them");
    stage.reply(running);
    assert_eq!(stage.bulkhead.available(), 1);
}

// Sharing.

/// Netflix concurrency-limits admits 10 batch and 7 live calls with a limit of 10, because a partition can
/// always use its share. Here a reserve is kept free, and the sum never exceeds the limit.
#[test]
fn partitions_never_overshoot() {
    let mut stage = Stage::ready(Limits { critical_reserve: 0.7, ..limits(1, 10, 0) });
    let batch = (0..20).filter_map(|_| stage.submit_as(Priority::BestEffort, "")).count();
    assert_eq!(batch, 3);
    let live = (0..20).filter_map(|_| stage.submit_as(Priority::Critical, "")).count();
    assert_eq!(live, 7);
    assert_eq!(stage.bulkhead.in_flight(), stage.bulkhead.limit());
    // Critical jobs may use permits that are not reserved.
    let mut stage = Stage::ready(Limits { critical_reserve: 0.7, ..limits(1, 10, 0) });
    let live = (0..20).filter_map(|_| stage.submit_as(Priority::Critical, "")).count();
    assert_eq!(live, 10);
    assert_eq!(stage.submit_as(Priority::BestEffort, ""), None);
}

/// Kubernetes' API Priority and Fairness lets a request wait for a quarter of its deadline: the
/// `queueWaitTime` of a request with 60 s is 15 s. Here the wait is configured. Without it, a job waits until
/// its deadline.
#[test]
fn queue_wait_is_bounded_by_queue_timeout_or_deadline() {
    let deadline = 60 * SECOND;
    for (queue_timeout, wait, reason) in [
        (Some(deadline / 4), 15 * SECOND, ("rejected", Some("queue_timeout"))),
        (None, deadline, ("deadline_exceeded", Some("queued"))),
    ] {
        let of_minutes = Limits { deadline: 10 * deadline, deadline_max: 10 * deadline, ..limits(1, 1, 1) };
        let mut stage = Stage::ready(Limits { queue_timeout, ..of_minutes });
        stage.job();
        let waiting = stage.job_with(Some(deadline));
        stage.wait(wait - MS);
        assert!(stage.verdicts(waiting).is_empty());
        stage.wait(MS);
        stage.expect(waiting, reason.0, reason.1);
    }
}

/// Kubernetes' API Priority and Fairness, `TestDifferentFlowsExpectUnequal`: a tenant with ten times the
/// demand gets no more than its share while the other tenant has waiting jobs.
#[test]
fn unequal_flows_get_equal_shares() {
    let mut stage = Stage::ready(limits(1, 1, 200));
    stage.job();
    for turn in 0..110 {
        let tenant = if turn % 11 == 0 { "modest" } else { "greedy" };
        stage.submit_as(Priority::Normal, tenant);
    }
    let mut served = Vec::new();
    for turn in 0..21 {
        let (_, job) = stage.dispatched[turn];
        stage.reply(job);
        let cargo = stage.answers.last().and_then(|answer| answer.cargo.checked_sub(2));
        served.push(cargo.is_some_and(|cargo| cargo % 11 == 0));
    }
    // The first job had no tenant. Of the next twenty, each tenant has ten.
    assert_eq!(served[1..].iter().filter(|&&is_modest| is_modest).count(), 10);
}

// The breaker, with jobs.

fn breaker() -> BreakerLimits {
    BreakerLimits {
        window: 10 * SECOND,
        min_calls: 5,
        failure_rate: 0.5,
        slow_call: Some(SECOND),
        slow_rate: 1.0,
        open_for: 5 * SECOND,
        probes: 2,
    }
}

/// Returns a stage with an open breaker after five crashes, and a ready worker.
fn tripped(max_in_flight: u32) -> Stage {
    let mut stage = Stage::ready(Limits { breaker: Some(breaker()), ..limits(1, max_in_flight, 10) });
    for _ in 0..5 {
        let job = stage.job();
        stage.die(stage.holder(job), Death::Signal(11));
        stage.bring_up(stage.newest_worker());
    }
    assert_eq!(stage.bulkhead.breaker(), BreakerState::Open);
    stage
}

/// Hystrix, `testLowVolumeDoesNotTripCircuit`: few calls are no evidence, however bad they are.
#[test]
fn low_volume_does_not_trip() {
    let mut stage = Stage::ready(Limits { breaker: Some(breaker()), ..limits(1, 1, 0) });
    for _ in 0..4 {
        let job = stage.job();
        stage.die(stage.holder(job), Death::Signal(11));
        stage.bring_up(stage.newest_worker());
    }
    assert_eq!(stage.bulkhead.breaker(), BreakerState::Closed);
}

/// resilience4j, `shouldOnlyPermitFourCallsInHalfOpenState`, with jobs that wait for nothing else.
#[test]
fn half_open_admits_so_many_probes_and_no_more() {
    let mut stage = tripped(8);
    assert_eq!(stage.submit(), None);
    assert_eq!(stage.last_reason(), Some("circuit_open"));
    stage.wait(5 * SECOND);
    let probes: Vec<JobId> = (0..8).filter_map(|_| stage.submit()).collect();
    assert_eq!(probes.len(), 2);
    for probe in probes {
        stage.reply(probe);
    }
    assert_eq!(stage.bulkhead.breaker(), BreakerState::Closed);
}

/// resilience4j #544 and `shouldIncreaseCounterOnReleasePermission`: a probe without evidence returns its
/// permission. Here the probe is cancelled, or its deadline passes before its turn.
#[test]
fn a_probe_whose_outcome_is_ignored_gives_its_permission_back() {
    let mut stage = tripped(8);
    stage.wait(5 * SECOND);
    for _ in 0..10 {
        let probes = [stage.job(), stage.job()];
        assert_eq!(stage.submit(), None, "both probes are under way");
        for probe in probes {
            stage.apply(Event::Cancel { job: probe, unless_begun: false });
            stage.reply(probe);
        }
        assert_eq!(stage.bulkhead.breaker(), BreakerState::HalfOpen);
    }
}

/// resilience4j, `maxWaitDurationInHalfOpenState`: probes that never end do not keep the breaker half-open
/// forever. Here, the deadline of the probe is the maximum.
#[test]
fn half_open_ends_when_a_probe_has_waited_its_maximum() {
    let mut stage = tripped(8);
    stage.wait(5 * SECOND);
    let probe = stage.job_with(Some(3 * SECOND));
    stage.wait(3 * SECOND - MS);
    assert_eq!(stage.bulkhead.breaker(), BreakerState::HalfOpen);
    stage.wait(MS);
    stage.expect(probe, "deadline_exceeded", Some("running"));
    assert_eq!(stage.bulkhead.breaker(), BreakerState::Open);
}

/// resilience4j, `testCircuitBreakerSlowCallRateThresholdExceeded`: slow calls open the breaker although all
/// succeed.
#[test]
fn slow_calls_open_it() {
    let mut stage = Stage::ready(Limits { breaker: Some(breaker()), ..limits(1, 8, 0) });
    let jobs: Vec<_> = (0..5).map(|_| stage.job()).collect();
    stage.wait(SECOND + MS);
    jobs.iter().for_each(|&job| stage.reply(job));
    assert_eq!(stage.bulkhead.counters().ok, 5);
    assert_eq!(stage.bulkhead.breaker(), BreakerState::Open);
}

/// resilience4j, `transitionToForcedOpenState`: no call passes until an operator releases the breaker,
/// however long that takes.
#[test]
fn forced_open_stays_until_it_is_released() {
    let mut stage = Stage::ready(limits(1, 2, 5));
    let running = stage.job();
    stage.apply(Event::ForceBreaker { open: true });
    stage.wait(100 * MS);
    assert_eq!(stage.submit(), None);
    assert_eq!(stage.last_reason(), Some("circuit_open"));
    stage.reply(running);
    stage.expect(running, "ok", None);
    stage.apply(Event::ForceBreaker { open: false });
    let job = stage.job();
    assert!(stage.was_given_out(job));
}

// Retries and poison.

fn retrying(max_in_flight: u32, budget: f64) -> Limits {
    Limits { retry: Some(RetryLimits { attempts: 2, budget }), ..limits(1, max_in_flight, 100) }
}

/// failsafe-go, `RetryPolicy` with a budget: a few retries are always allowed. Beyond that, the share
/// applies.
#[test]
fn the_budget_has_a_floor_and_then_a_share() {
    let mut stage = Stage::ready(retrying(1, 0.01));
    let jobs: Vec<_> = (0..30).map(|_| stage.idempotent_job()).collect();
    while stage.answers.len() < jobs.len() {
        let worker = stage.newest_worker();
        stage.die(worker, Death::Signal(11));
        // Restarts are spaced after many consecutive deaths.
        stage.wait(20 * MS);
        stage.bring_up(stage.newest_worker());
    }
    assert_eq!(stage.bulkhead.counters().retries, 10);
    assert_eq!(stage.bulkhead.counters().crashed, 30);
}

/// Beyond the floor, the budget is a share of the jobs of the last seconds.
#[test]
fn retry_budget_grows_with_the_number_of_jobs() {
    let mut stage = Stage::ready(retrying(1, 0.1));
    (0..200).for_each(|_| stage.reply_to_next());
    let jobs: Vec<_> = (0..40).map(|_| stage.idempotent_job()).collect();
    while stage.answers.len() < 200 + jobs.len() {
        stage.die(stage.newest_worker(), Death::Signal(11));
        stage.wait(20 * MS);
        stage.bring_up(stage.newest_worker());
    }
    let retries = stage.bulkhead.counters().retries;
    assert!((20..=24).contains(&retries), "{retries}");
}

/// A worker with four jobs dies. Erlang's advice for such a case is to find the culprit. Each job is retried
/// alone, so that an innocent job never dies because of the same neighbour twice.
#[test]
fn the_suspects_of_a_shared_crash_are_tried_again_one_by_one() {
    let mut stage = Stage::ready(retrying(4, 1.0));
    let jobs: Vec<_> = (0..4).map(|_| stage.idempotent_job()).collect();
    let fresh = stage.job();
    stage.die(stage.holder(jobs[0]), Death::Signal(11));
    assert!(stage.answers.is_empty());
    let before = stage.dispatched.len();
    stage.bring_up(stage.newest_worker());
    for (turn, &job) in jobs.iter().enumerate() {
        assert_eq!(stage.dispatched.len(), before + turn + 1, "one at a time");
        assert_eq!(stage.dispatched[before + turn].1, job, "in their order, before who has not run yet");
        if turn == 2 {
            stage.die(stage.holder(job), Death::Signal(11));
            stage.bring_up(stage.newest_worker());
        } else {
            stage.reply(job);
        }
    }
    stage.expect(jobs[2], "crashed", Some("signal"));
    for innocent in [jobs[0], jobs[1], jobs[3]] {
        stage.expect(innocent, "ok", None);
    }
    let answers: Vec<u32> = stage.answers.iter().map(|answer| answer.attempts).collect();
    assert_eq!(answers, [2; 4]);
    assert!(stage.was_given_out(fresh));
}

/// A job is not retried after its deadline. The outcome is that of the first attempt.
#[test]
fn a_retry_never_comes_after_the_deadline() {
    let mut stage = Stage::ready(retrying(1, 1.0));
    let job = stage.idempotent_job();
    stage.die(stage.holder(job), Death::Signal(11));
    let limit = stage.bulkhead.limits().deadline;
    stage.wait(limit);
    stage.expect(job, "crashed", Some("signal"));
    assert_eq!(stage.answers[0].attempts, 1);
}

/// A second attempt gets no more time: the deadline counts from the submission.
#[test]
fn deadline_covers_all_attempts() {
    let mut stage = Stage::ready(retrying(1, 1.0));
    let job = stage.idempotent_job();
    let limit = stage.bulkhead.limits().deadline;
    stage.wait(limit / 2);
    stage.die(stage.holder(job), Death::Signal(11));
    stage.bring_up(stage.newest_worker());
    stage.wait(limit / 2);
    stage.expect(job, "deadline_exceeded", Some("running"));
    assert_eq!(stage.answers[0].attempts, 2);
}

/// SQS, `maxReceiveCount`: a message that was received too often is set aside, and other messages are served.
#[test]
fn a_payload_that_kills_again_and_again_is_kept_out() {
    let poison = Some(PoisonLimits { crashes: 3, within: 3600 * SECOND });
    let mut stage = Stage::ready(Limits { poison, ..limits(1, 2, 10) });
    for _ in 0..3 {
        let Some(job) = stage.submit_payload(7) else { panic!("kept out too early") };
        stage.die(stage.holder(job), Death::Signal(11));
        stage.bring_up(stage.newest_worker());
    }
    let is_told = |note: &Note| matches!(note, Note::JobQuarantined { digest, .. } if *digest == 7.into());
    assert_eq!(stage.notes.iter().filter(|note| is_told(note)).count(), 1);
    assert_eq!(stage.submit_payload(7), None);
    assert_eq!(stage.last_reason(), Some("quarantined"));
    let Some(other) = stage.submit_payload(8) else { panic!("another payload is kept out") };
    // With two jobs in the worker, the culprit is unknown.
    let beside = stage.job();
    stage.die(stage.holder(other), Death::Signal(11));
    stage.expect(beside, "crashed", Some("signal"));
    stage.bring_up(stage.newest_worker());
    assert_eq!(stage.bulkhead.quarantined(stage.now), 1);
    stage.apply(Event::Reset);
    assert!(stage.submit_payload(7).is_some());
}

/// Six bad payloads must not close a bulkhead to all other jobs, because deaths during jobs are not failed
/// starts.
#[test]
fn quarantine_does_not_cost_the_worker_its_slot() {
    let poison = Some(PoisonLimits { crashes: 1, within: 3600 * SECOND });
    let mut stage = Stage::ready(Limits { poison, ..limits(1, 1, 10) });
    for payload in 0..50 {
        let Some(job) = stage.submit_payload(payload) else { panic!("it has not been here before") };
        stage.die(stage.holder(job), Death::Signal(11));
        // Restarts are spaced after many consecutive deaths.
        stage.wait(20 * MS);
        stage.bring_up(stage.newest_worker());
    }
    let job = stage.job();
    stage.reply(job);
    stage.expect(job, "ok", None);
}

// Rest.

/// systemd's socket activation with an idle timeout: workers stop when there is nothing to do, and start with
/// the next job. Learned state is kept.
#[test]
fn an_idle_bulkhead_rests_and_wakes() {
    let mut stage = Stage::ready(Limits { idle: Some(10 * SECOND), ..limits(2, 1, 5) });
    let job = stage.job();
    stage.wait(5 * SECOND);
    stage.reply(job);
    stage.wait(10 * SECOND - MS);
    assert_eq!(stage.bulkhead.activity(), Activity::Started);
    stage.wait(MS);
    assert_eq!(stage.bulkhead.activity(), Activity::Resting);
    assert_eq!(stage.drained.len(), 2);
    for worker in stage.spawned.clone() {
        stage.die(worker, Death::Exit(0));
    }
    assert!(stage.bulkhead.has_no_workers());
    assert_eq!(stage.bulkhead.next_deadline(), None, "nothing is waited for");
    stage.apply(Event::Await);
    let waiting = stage.job();
    assert_eq!(stage.spawned.len(), 2, "not yet");
    stage.apply(Event::Start);
    let worker = stage.spawned[2];
    stage.bring_up(worker);
    stage.apply(Event::Replied { worker, job: waiting, reply: Reply::Ok });
    stage.expect(waiting, "ok", None);
    assert_eq!(stage.bulkhead.restarts(), 0, "a rest is no restart");
}
