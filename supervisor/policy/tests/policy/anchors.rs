//! Cases taken from tests and bug reports of other systems, each with its source. Cases about permits, deadlines and
//! workers are in `cases.rs`. Unit tests of the breaker, the queue and the retry budget are next to the code that they
//! test.

use crate::fixture::{Fixture, MS, SECOND, limits};
use bulkhead_policy::{
    Activity, BreakerLimits, BreakerState, Death, Event, LimitChange, Limits, OperatorEvent, PoisonLimits,
    Reply, RetryLimits,
};
use bulkhead_shared::{JobId, Priority, RejectReason};

fn change(max_in_flight: Option<u32>, processes: Option<u32>) -> Event<u32> {
    Event::ChangeLimits(LimitChange { max_in_flight, processes, ..LimitChange::default() })
}

// Resizing.

/// Follows `SemaphoreBulkheadTest.changeConfig` in resilience4j: a waiting job gets a permit as soon as the limit is
/// raised.
#[test]
fn raised_limit_immediately_dispatches_waiting_jobs() {
    let mut fixture = Fixture::ready(limits(1, 1, 4));
    let first = fixture.job();
    let waiting: Vec<_> = (0..3).map(|_| fixture.job()).collect();
    fixture.apply(change(Some(3), None));
    let worker = fixture.holder(first);
    assert_eq!(fixture.resized, [(worker, 3)]);
    assert_eq!(
        fixture.dispatched.len(),
        3,
        "two more jobs must be dispatched, because there are two more permits"
    );
    assert!(fixture.was_dispatched(waiting[1]) && !fixture.was_dispatched(waiting[2]));
    assert_eq!(fixture.bulkhead.limit(), 3);
}

/// In resilience4j, `SemaphoreBulkhead.changeConfig` blocks until enough permits are free. Here, the caller is not
/// blocked, and running jobs continue. As in Semian's `test_resize_tickets_decrease_with_worker_expiry`, the number of
/// running jobs gradually falls to the new limit.
#[test]
fn number_of_running_jobs_falls_to_lowered_limit() {
    let mut fixture = Fixture::ready(limits(2, 4, 100));
    let running: Vec<_> = (0..8).map(|_| fixture.job()).collect();
    let waiting: Vec<_> = (0..8).map(|_| fixture.job()).collect();
    fixture.apply(change(Some(1), None));
    assert_eq!((fixture.cancelled.len(), fixture.killed.len(), fixture.outcomes.len()), (0, 0, 0));
    assert_eq!((fixture.bulkhead.in_flight(), fixture.bulkhead.limit()), (8, 2));
    for (done, &job) in running.iter().enumerate() {
        fixture.reply(job);
        let expected = (8 - done as u64 - 1).max(2);
        assert_eq!(
            fixture.bulkhead.in_flight(),
            expected,
            "wrong number of jobs in flight after {} replies",
            done + 1
        );
    }
    for &job in &waiting {
        fixture.reply(job);
    }
    assert_eq!(fixture.bulkhead.counters().ok, 16);
}

/// Follows `SemaphoreBulkheadTest.testZeroMaxConcurrentCalls` in resilience4j: a limit of 0 rejects every call.
#[test]
fn zero_max_in_flight_rejects_all_jobs() {
    let mut fixture = Fixture::ready(limits(1, 0, 0));
    assert_eq!(fixture.submit(), None);
    assert_eq!(fixture.last_reason(), Some("queue_full"));
    let mut fixture = Fixture::ready(limits(1, 2, 0));
    let running = fixture.job();
    fixture.apply(change(Some(0), None));
    assert_eq!(fixture.submit(), None);
    assert_eq!(fixture.rejected(RejectReason::QueueFull), 1);
    fixture.reply(running);
    fixture.expect(running, "ok", None);
    // The worker was drained. Another worker starts when the limit is above 0 again.
    fixture.apply(change(Some(1), None));
    let job = fixture.job();
    fixture.exit_worker(fixture.newest_worker(), Death::Exit(0));
    fixture.bring_up(fixture.newest_worker());
    assert!(fixture.was_dispatched(job));
}

/// Applies Semian's `test_resize_tickets_increase` and `_decrease` to workers: new workers start immediately, and
/// surplus workers finish their jobs.
#[test]
fn number_of_workers_follows_processes_key() {
    let mut fixture = Fixture::ready(limits(1, 1, 10));
    let running = fixture.job();
    let waiting = [fixture.job(), fixture.job()];
    fixture.apply(change(None, Some(3)));
    assert_eq!(fixture.spawned.len(), 3);
    for worker in [fixture.spawned[1], fixture.spawned[2]] {
        fixture.bring_up(worker);
    }
    assert!(waiting.iter().all(|&job| fixture.was_dispatched(job)));
    fixture.apply(change(None, Some(1)));
    assert_eq!(fixture.drained, fixture.spawned[1..], "the newest workers must be drained first");
    assert_eq!((fixture.bulkhead.limit(), fixture.outcomes.len()), (1, 0));
    for job in waiting {
        fixture.reply(job);
        fixture.expect(job, "ok", None);
        fixture.exit_worker(fixture.holder(job), Death::Exit(0));
    }
    assert_eq!(fixture.spawned.len(), 3, "drained surplus workers must not be replaced");
    fixture.reply(running);
    assert_eq!(fixture.bulkhead.available(), 1);
}

// Sharing.

/// With a limit of 10, Netflix concurrency-limits admits 10 batch calls and then 7 live calls, because a partition can
/// always use its share. Here, permits are reserved instead, and the limit is never exceeded.
#[test]
fn jobs_in_flight_never_exceed_the_limit() {
    let mut fixture = Fixture::ready(Limits { critical_reserve: 0.7, ..limits(1, 10, 0) });
    let batch = (0..20).filter_map(|_| fixture.submit_as(Priority::BestEffort, "")).count();
    assert_eq!(batch, 3);
    let live = (0..20).filter_map(|_| fixture.submit_as(Priority::Critical, "")).count();
    assert_eq!(live, 7);
    assert_eq!(fixture.bulkhead.in_flight(), fixture.bulkhead.limit());
    // Critical jobs can also use permits that are not reserved.
    let mut fixture = Fixture::ready(Limits { critical_reserve: 0.7, ..limits(1, 10, 0) });
    let live = (0..20).filter_map(|_| fixture.submit_as(Priority::Critical, "")).count();
    assert_eq!(live, 10);
    assert_eq!(fixture.submit_as(Priority::BestEffort, ""), None);
}

/// Kubernetes API Priority and Fairness lets a request wait for up to a quarter of its deadline. For example, the
/// `queueWaitTime` of a request with a deadline of 60 s is 15 s. Here, the maximum wait is configured. If it is not
/// configured, a job waits until its deadline.
#[test]
fn job_waits_at_most_until_queue_timeout_or_deadline() {
    let deadline = 60 * SECOND;
    for (queue_timeout, wait, reason) in [
        (Some(deadline / 4), 15 * SECOND, ("rejected", Some("queue_timeout"))),
        (None, deadline, ("deadline_exceeded", Some("queued"))),
    ] {
        let of_minutes = Limits { deadline: 10 * deadline, deadline_max: 10 * deadline, ..limits(1, 1, 1) };
        let mut fixture = Fixture::ready(Limits { queue_timeout, ..of_minutes });
        fixture.job();
        let waiting = fixture.job_with(Some(deadline));
        fixture.wait(wait - MS);
        assert!(fixture.verdicts(waiting).is_empty());
        fixture.wait(MS);
        fixture.expect(waiting, reason.0, reason.1);
    }
}

/// Based on `TestDifferentFlowsExpectUnequal` in Kubernetes API Priority and Fairness. While both tenants have waiting
/// jobs, a tenant with ten times the demand of the other tenant gets no more than its share.
#[test]
fn tenants_with_unequal_demand_get_equal_shares() {
    let mut fixture = Fixture::ready(limits(1, 1, 200));
    fixture.job();
    for turn in 0..110 {
        let tenant = if turn % 11 == 0 { "modest" } else { "greedy" };
        fixture.submit_as(Priority::Normal, tenant);
    }
    let mut served = Vec::new();
    for turn in 0..21 {
        let (_, job) = fixture.dispatched[turn];
        fixture.reply(job);
        let record = fixture.outcomes.last().and_then(|answer| answer.record.checked_sub(2));
        served.push(record.is_some_and(|record| record % 11 == 0));
    }
    // The first job had no tenant. Of the next twenty jobs, each tenant has ten.
    assert_eq!(served[1..].iter().filter(|&&is_modest| is_modest).count(), 10);
}

// The breaker in combination with jobs.

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

/// Returns a bulkhead with a ready worker and an open breaker. Five crashes have opened the breaker.
fn tripped(max_in_flight: u32) -> Fixture {
    let mut fixture = Fixture::ready(Limits { breaker: Some(breaker()), ..limits(1, max_in_flight, 10) });
    for _ in 0..5 {
        let job = fixture.job();
        fixture.exit_worker(fixture.holder(job), Death::Signal(11));
        fixture.bring_up(fixture.newest_worker());
    }
    assert_eq!(fixture.bulkhead.breaker(), BreakerState::Open);
    fixture
}

/// As in `testLowVolumeDoesNotTripCircuit` in Hystrix, the breaker does not open before a minimum number of calls, even
/// if all calls fail.
#[test]
fn low_volume_does_not_open_the_breaker() {
    let mut fixture = Fixture::ready(Limits { breaker: Some(breaker()), ..limits(1, 1, 0) });
    for _ in 0..4 {
        let job = fixture.job();
        fixture.exit_worker(fixture.holder(job), Death::Signal(11));
        fixture.bring_up(fixture.newest_worker());
    }
    assert_eq!(fixture.bulkhead.breaker(), BreakerState::Closed);
}

/// As in `shouldOnlyPermitFourCallsInHalfOpenState` in resilience4j, a half-open breaker admits only the configured
/// number of probes. There are enough permits, so only the breaker rejects jobs.
#[test]
fn half_open_breaker_admits_only_the_configured_probes() {
    let mut fixture = tripped(8);
    assert_eq!(fixture.submit(), None);
    assert_eq!(fixture.last_reason(), Some("circuit_open"));
    fixture.wait(5 * SECOND);
    let probes: Vec<JobId> = (0..8).filter_map(|_| fixture.submit()).collect();
    assert_eq!(probes.len(), 2);
    for probe in probes {
        fixture.reply(probe);
    }
    assert_eq!(fixture.bulkhead.breaker(), BreakerState::Closed);
}

/// Checks a rule in `docs/semantics.md`: `Retry-After` is exact for `circuit_open`, also for jobs that were waiting when
/// the breaker opened.
#[test]
fn waiting_jobs_learn_when_the_breaker_admits_probes() {
    let mut fixture = Fixture::ready(Limits { breaker: Some(breaker()), ..limits(1, 5, 10) });
    let crashing: Vec<JobId> = (0..5).map(|_| fixture.job()).collect();
    let (patient, hasty) = (fixture.job(), fixture.job_with(Some(3 * SECOND)));
    fixture.exit_worker(fixture.holder(crashing[0]), Death::Signal(11));
    assert_eq!(fixture.bulkhead.breaker(), BreakerState::Open);
    fixture.wait(SECOND);
    fixture.bring_up(fixture.newest_worker());
    assert_eq!(fixture.submit(), None);
    for (job, is_retryable) in [(Some(patient), true), (Some(hasty), false), (None, true)] {
        let answer = fixture.outcomes.iter().find(|answer| answer.job == job);
        let told = answer.map(|answer| (answer.verdict.reason(), answer.retry_after, answer.retryable));
        assert_eq!(told, Some((Some("circuit_open"), Some(4 * SECOND), is_retryable)));
    }
}

/// Follows `shouldIncreaseCounterOnReleasePermission` and #544 in resilience4j: a probe whose outcome says nothing
/// about the worker does not use up one of the permitted probes. In this test, the probes are cancelled.
#[test]
fn ignored_probe_returns_its_claim() {
    let mut fixture = tripped(8);
    fixture.wait(5 * SECOND);
    for _ in 0..10 {
        let probes = [fixture.job(), fixture.job()];
        assert_eq!(fixture.submit(), None, "no job must be admitted while both probes are in progress");
        for probe in probes {
            fixture.apply(Event::Cancel { job: probe, unless_begun: false });
            fixture.reply(probe);
        }
        assert_eq!(fixture.bulkhead.breaker(), BreakerState::HalfOpen);
    }
}

/// Follows `maxWaitDurationInHalfOpenState` in resilience4j: probes that never end must not keep the breaker half-open
/// forever. Here, a probe's deadline ends the half-open state.
#[test]
fn half_open_state_ends_at_deadline_of_a_probe() {
    let mut fixture = tripped(8);
    fixture.wait(5 * SECOND);
    let probe = fixture.job_with(Some(3 * SECOND));
    fixture.wait(3 * SECOND - MS);
    assert_eq!(fixture.bulkhead.breaker(), BreakerState::HalfOpen);
    fixture.wait(MS);
    fixture.expect(probe, "deadline_exceeded", Some("running"));
    assert_eq!(fixture.bulkhead.breaker(), BreakerState::Open);
}

/// Follows `testCircuitBreakerSlowCallRateThresholdExceeded` in resilience4j: slow calls open the breaker even if all
/// of them succeed.
#[test]
fn slow_calls_open_the_breaker() {
    let mut fixture = Fixture::ready(Limits { breaker: Some(breaker()), ..limits(1, 8, 0) });
    let jobs: Vec<_> = (0..5).map(|_| fixture.job()).collect();
    fixture.wait(SECOND + MS);
    jobs.iter().for_each(|&job| fixture.reply(job));
    assert_eq!(fixture.bulkhead.counters().ok, 5);
    assert_eq!(fixture.bulkhead.breaker(), BreakerState::Open);
}

/// Follows `transitionToForcedOpenState` in resilience4j: no call passes until an operator releases the breaker.
#[test]
fn forced_open_breaker_stays_open_until_release() {
    let mut fixture = Fixture::ready(limits(1, 2, 5));
    let running = fixture.job();
    fixture.apply(Event::ForceBreaker { open: true });
    fixture.wait(100 * MS);
    assert_eq!(fixture.submit(), None);
    assert_eq!(fixture.last_reason(), Some("circuit_open"));
    fixture.reply(running);
    fixture.expect(running, "ok", None);
    fixture.apply(Event::ForceBreaker { open: false });
    let job = fixture.job();
    assert!(fixture.was_dispatched(job));
}

// Retries and quarantine.

fn retrying(max_in_flight: u32, budget: f64) -> Limits {
    Limits { retry: Some(RetryLimits { attempts: 2, budget }), ..limits(1, max_in_flight, 100) }
}

/// Follows the budget of failsafe-go's `RetryPolicy`: a few retries are always allowed. Beyond that, the number of
/// retries is limited to a fraction of the number of jobs.
#[test]
fn retry_budget_always_allows_a_few_retries() {
    let mut fixture = Fixture::ready(retrying(1, 0.01));
    let jobs: Vec<_> = (0..30).map(|_| fixture.idempotent_job()).collect();
    while fixture.outcomes.len() < jobs.len() {
        let worker = fixture.newest_worker();
        fixture.exit_worker(worker, Death::Signal(11));
        // After many consecutive deaths, restarts are delayed.
        fixture.wait(20 * MS);
        fixture.bring_up(fixture.newest_worker());
    }
    assert_eq!(fixture.bulkhead.counters().retries, 10);
    assert_eq!(fixture.bulkhead.counters().crashed, 30);
}

/// A minimum number of retries is always allowed. Beyond that, the number of retries is limited to a fraction of the
/// number of recent jobs.
#[test]
fn retry_budget_grows_with_the_number_of_jobs() {
    let mut fixture = Fixture::ready(retrying(1, 0.1));
    (0..200).for_each(|_| fixture.reply_to_next());
    let jobs: Vec<_> = (0..40).map(|_| fixture.idempotent_job()).collect();
    while fixture.outcomes.len() < 200 + jobs.len() {
        fixture.exit_worker(fixture.newest_worker(), Death::Signal(11));
        fixture.wait(20 * MS);
        fixture.bring_up(fixture.newest_worker());
    }
    let retries = fixture.bulkhead.counters().retries;
    assert!((20..=24).contains(&retries), "{retries}");
}

/// A worker dies while running four jobs. Each job is retried alone to find the culprit, as Erlang recommends. The
/// culprit therefore cannot crash the other jobs a second time.
#[test]
fn suspects_of_a_shared_crash_are_retried_alone() {
    let mut fixture = Fixture::ready(retrying(4, 1.0));
    let jobs: Vec<_> = (0..4).map(|_| fixture.idempotent_job()).collect();
    let fresh = fixture.job();
    fixture.exit_worker(fixture.holder(jobs[0]), Death::Signal(11));
    assert!(fixture.outcomes.is_empty());
    let before = fixture.dispatched.len();
    fixture.bring_up(fixture.newest_worker());
    for (turn, &job) in jobs.iter().enumerate() {
        assert_eq!(fixture.dispatched.len(), before + turn + 1, "suspects must run one at a time");
        assert_eq!(
            fixture.dispatched[before + turn].1,
            job,
            "suspects must run in their original order, before jobs that have not run yet"
        );
        if turn == 2 {
            fixture.exit_worker(fixture.holder(job), Death::Signal(11));
            fixture.bring_up(fixture.newest_worker());
        } else {
            fixture.reply(job);
        }
    }
    fixture.expect(jobs[2], "crashed", Some("signal"));
    for innocent in [jobs[0], jobs[1], jobs[3]] {
        fixture.expect(innocent, "ok", None);
    }
    let outcomes: Vec<u32> = fixture.outcomes.iter().map(|answer| answer.attempts).collect();
    assert_eq!(outcomes, [2; 4]);
    assert!(fixture.was_dispatched(fresh));
}

/// A job that has run once is not cancelled by a client that cancels only jobs that have not begun.
#[test]
fn cancel_unless_begun_ignores_job_waiting_for_a_retry() {
    let mut fixture = Fixture::ready(retrying(1, 1.0));
    let job = fixture.idempotent_job();
    fixture.exit_worker(fixture.holder(job), Death::Signal(11));
    fixture.apply(Event::Cancel { job, unless_begun: true });
    assert_eq!(fixture.verdicts(job).len(), 0);
    fixture.bring_up(fixture.newest_worker());
    fixture.reply(job);
    fixture.expect(job, "ok", None);
}

/// A job is not retried after its deadline. The outcome of the first attempt becomes the job's outcome.
#[test]
fn job_is_not_retried_after_its_deadline() {
    let mut fixture = Fixture::ready(retrying(1, 1.0));
    let job = fixture.idempotent_job();
    fixture.exit_worker(fixture.holder(job), Death::Signal(11));
    let limit = fixture.bulkhead.limits().deadline;
    fixture.wait(limit);
    fixture.expect(job, "crashed", Some("signal"));
    assert_eq!(fixture.outcomes[0].attempts, 1);
}

/// A second attempt gets no extra time, because the deadline counts from submission.
#[test]
fn deadline_covers_all_attempts() {
    let mut fixture = Fixture::ready(retrying(1, 1.0));
    let job = fixture.idempotent_job();
    let limit = fixture.bulkhead.limits().deadline;
    fixture.wait(limit / 2);
    fixture.exit_worker(fixture.holder(job), Death::Signal(11));
    fixture.bring_up(fixture.newest_worker());
    fixture.wait(limit / 2);
    fixture.expect(job, "deadline_exceeded", Some("running"));
    assert_eq!(fixture.outcomes[0].attempts, 2);
}

/// Follows `maxReceiveCount` in SQS: a message that has been received too often is moved to the dead-letter queue, and
/// all other messages are still delivered.
#[test]
fn repeatedly_crashing_payload_is_quarantined() {
    let poison = Some(PoisonLimits { crashes: 3, within: 3600 * SECOND });
    let mut fixture = Fixture::ready(Limits { poison, ..limits(1, 2, 10) });
    for _ in 0..3 {
        let Some(job) = fixture.submit_payload(7) else { panic!("the payload must not be quarantined yet") };
        fixture.exit_worker(fixture.holder(job), Death::Signal(11));
        fixture.bring_up(fixture.newest_worker());
    }
    let is_told = |note: &OperatorEvent| matches!(note, OperatorEvent::JobQuarantined { digest, .. } if *digest == 7.into());
    assert_eq!(fixture.events.iter().filter(|note| is_told(note)).count(), 1);
    assert_eq!(fixture.submit_payload(7), None);
    assert_eq!(fixture.last_reason(), Some("quarantined"));
    let Some(other) = fixture.submit_payload(8) else { panic!("another payload must not be quarantined") };
    // The culprit is unknown, because the worker has two jobs.
    let beside = fixture.job();
    fixture.exit_worker(fixture.holder(other), Death::Signal(11));
    fixture.expect(beside, "crashed", Some("signal"));
    fixture.bring_up(fixture.newest_worker());
    assert_eq!(fixture.bulkhead.quarantined(fixture.now), 1);
    fixture.apply(Event::Reset);
    assert!(fixture.submit_payload(7).is_some());
}

/// A worker's death during a job is not a failed start, so even fifty bad payloads must not stop the slot. A stopped
/// slot would affect all other jobs.
#[test]
fn quarantined_payloads_do_not_stop_the_slot() {
    let poison = Some(PoisonLimits { crashes: 1, within: 3600 * SECOND });
    let mut fixture = Fixture::ready(Limits { poison, ..limits(1, 1, 10) });
    for payload in 0..50 {
        let Some(job) = fixture.submit_payload(payload) else {
            panic!("a payload that has never been submitted must be accepted")
        };
        fixture.exit_worker(fixture.holder(job), Death::Signal(11));
        // After many consecutive deaths, restarts are delayed.
        fixture.wait(20 * MS);
        fixture.bring_up(fixture.newest_worker());
    }
    let job = fixture.job();
    fixture.reply(job);
    fixture.expect(job, "ok", None);
}

// Scaling to zero.

/// As with systemd socket activation and an idle timeout, workers are stopped when there are no jobs and started again
/// for the next job. Stopping them does not discard measurements.
#[test]
fn idle_bulkhead_scales_to_zero_and_restarts_for_next_job() {
    let mut fixture = Fixture::ready(Limits { idle: Some(10 * SECOND), ..limits(2, 1, 5) });
    let job = fixture.job();
    fixture.wait(5 * SECOND);
    fixture.reply(job);
    fixture.wait(10 * SECOND - MS);
    assert_eq!(fixture.bulkhead.activity(), Activity::Started);
    fixture.wait(MS);
    assert_eq!(fixture.bulkhead.activity(), Activity::ScaledToZero);
    assert_eq!(fixture.drained.len(), 2);
    for worker in fixture.spawned.clone() {
        fixture.exit_worker(worker, Death::Exit(0));
    }
    assert!(fixture.bulkhead.has_no_workers());
    assert_eq!(fixture.bulkhead.next_deadline(), None, "no timer must be set");
    fixture.apply(Event::AnnounceStart);
    let waiting = fixture.job();
    assert_eq!(fixture.spawned.len(), 2, "the bulkhead must not start workers yet");
    fixture.apply(Event::Start);
    let worker = fixture.spawned[2];
    fixture.bring_up(worker);
    fixture.apply(Event::Replied { worker, job: waiting, reply: Reply::Ok });
    fixture.expect(waiting, "ok", None);
    assert_eq!(fixture.bulkhead.restarts(), 0, "scaling to zero must not count as a restart");
}
