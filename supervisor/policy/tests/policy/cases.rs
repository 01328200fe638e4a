//! Rules that come from other systems or are promised by the documentation. The comment on each test names the source
//! of its rule.

use std::time::Duration;

use crate::fixture::{Fixture, MS, SECOND, limits};
use bulkhead_policy::{
    Activity, BulkheadState, Death, Event, KillReason, Limits, OperatorEvent, Overflow, RecycleReason, Reply,
    Restart, RestartCause, RestartPolicy, RetryLimits, Submission, Time,
};
use bulkhead_shared::{CrashReason, Executed, Fault, HandlerFailure, Priority, RejectReason, Verdict};

// Permits.

/// Follows `BulkheadScenarios` in Polly: of L calls with N permits and Q queue places, min(L, N) run and
/// max(0, L - N - Q) are rejected. At the end, all permits are free.
#[test]
fn rejects_jobs_beyond_permits_and_queue() {
    for (processes, max_in_flight, queue) in [(1, 1, 0), (1, 4, 2), (4, 1, 2), (2, 3, 0), (3, 2, 7)] {
        for load in 0..20 {
            let mut fixture = Fixture::ready(limits(processes, max_in_flight, queue));
            for _ in 0..load {
                fixture.submit();
            }
            let permits = processes * max_in_flight;
            assert_eq!(fixture.bulkhead.in_flight(), u64::from(load.min(permits)));
            assert_eq!(fixture.bulkhead.queued() as u32, load.saturating_sub(permits).min(queue));
            let rejected = u64::from(load.saturating_sub(permits + queue));
            assert_eq!(fixture.rejected(RejectReason::QueueFull), rejected);
            let mut done = 0;
            while let Some(&(_, job)) = fixture.dispatched.get(done) {
                fixture.reply(job);
                done += 1;
            }
            assert_eq!(fixture.bulkhead.counters().ok, u64::from(load.min(permits + queue)));
            assert_eq!(fixture.bulkhead.available(), u64::from(permits));
        }
    }
}

/// During an upgrade, the two supervisors together never run more jobs than the bulkhead's limit allows
/// (`docs/operations/upgrade.md`).
#[test]
fn does_not_use_permits_of_the_other_supervisor() {
    let mut successor = Fixture::ready(limits(2, 2, 3));
    successor.apply(Event::PredecessorHolds { permits: 3, waiting: 2 });
    assert_eq!((successor.bulkhead.limit(), successor.bulkhead.queue_capacity()), (1, 1));
    let jobs: Vec<_> = (0..2).map(|_| successor.job()).collect();
    successor.submit();
    assert_eq!(successor.rejected(RejectReason::QueueFull), 1);
    assert!(successor.was_dispatched(jobs[0]) && !successor.was_dispatched(jobs[1]));
    assert_eq!((successor.bulkhead.predecessor_jobs(), successor.bulkhead.predecessor_waiting()), (5, 2));
    successor.apply(Event::PredecessorHolds { permits: 2, waiting: 0 });
    assert_eq!(successor.bulkhead.predecessor_jobs(), 2);
    assert!(successor.was_dispatched(jobs[1]));

    let mut predecessor = Fixture::ready(limits(2, 2, 3));
    let jobs: Vec<_> = (0..6).map(|_| predecessor.job()).collect();
    assert_eq!(predecessor.bulkhead.needed_permits(1), (4, 3));
    predecessor.apply(Event::CapPermits { most: Some(4) });
    jobs[..5].iter().for_each(|&job| predecessor.reply(job));
    assert!(predecessor.was_dispatched(jobs[5]));
    assert_eq!(predecessor.bulkhead.needed_permits(0), (1, 0));
    predecessor.apply(Event::CapPermits { most: Some(1) });
    assert_eq!(predecessor.bulkhead.limit(), 1);
    predecessor.apply(Event::CapPermits { most: None });
    assert_eq!(predecessor.bulkhead.limit(), 4);
}

/// Follows Failsafe #393: jobs that time out while waiting must not use up permits.
#[test]
fn jobs_that_time_out_do_not_reduce_capacity() {
    let mut fixture = Fixture::ready(Limits { queue_timeout: Some(SECOND), ..limits(8, 1, 8) });
    let running: Vec<_> = (0..8).map(|_| fixture.job()).collect();
    let waiting: Vec<_> = (0..8).map(|_| fixture.job()).collect();
    fixture.wait(SECOND);
    waiting.iter().for_each(|&job| fixture.expect(job, "rejected", Some("queue_timeout")));
    running.iter().for_each(|&job| fixture.reply(job));
    assert_eq!(fixture.bulkhead.available(), 8);
    let next: Vec<_> = (0..8).map(|_| fixture.job()).collect();
    assert!(next.iter().all(|&job| fixture.was_dispatched(job)));
}

/// Follows Netflix concurrency-limits: if a permit becomes free just as a waiting job times out, the permit must go
/// either to that job or to the next job.
#[test]
fn permit_freed_at_the_timeout_is_not_lost() {
    for reply_comes_first in [true, false] {
        let mut fixture = Fixture::ready(Limits { queue_timeout: Some(SECOND), ..limits(1, 1, 1) });
        let (first, second) = (fixture.job(), fixture.job());
        fixture.now = Time::ZERO + SECOND;
        if reply_comes_first {
            fixture.reply(first);
            fixture.apply(Event::Tick);
            fixture.reply(second);
            fixture.expect(second, "ok", None);
        } else {
            fixture.apply(Event::Tick);
            fixture.reply(first);
            fixture.expect(second, "rejected", Some("queue_timeout"));
        }
        assert_eq!(fixture.bulkhead.available(), 1);
    }
}

/// Semian returns a permit when the process that holds it is killed by SIGKILL. Here, a killed worker's permit is
/// available again when the next worker is ready.
#[test]
fn permit_of_a_killed_worker_becomes_free_again() {
    let mut fixture = Fixture::ready(limits(1, 1, 1));
    let (first, second) = (fixture.job(), fixture.job());
    fixture.exit_worker(fixture.holder(first), Death::Signal(9));
    fixture.expect(first, "crashed", Some("signal"));
    assert!(!fixture.was_dispatched(second), "the job must wait until a worker is ready");
    fixture.bring_up(fixture.newest_worker());
    fixture.reply(second);
    fixture.expect(second, "ok", None);
    assert_eq!(fixture.bulkhead.available(), 1);
}

/// In tower, dropping a future returns its permit. Here, if a client disconnects, its job's permit is returned only
/// after the worker has replied or exited, because the job may still be running.
#[test]
fn cancelled_job_keeps_its_permit_until_its_work_ends() {
    for obeys in [true, false] {
        let mut fixture = Fixture::ready(limits(1, 1, 0));
        let (worker, job) = (fixture.newest_worker(), fixture.job());
        fixture.apply(Event::Cancel { job, unless_begun: false });
        assert_eq!((&fixture.cancelled[..], fixture.bulkhead.available()), (&[job][..], 0));
        if obeys {
            fixture.reply(job);
        } else {
            fixture.wait(100 * MS);
            assert_eq!(fixture.killed, [(worker, KillReason::Deadline)]);
            assert_eq!(
                fixture.bulkhead.available(),
                0,
                "the permit must not be free before the worker has exited"
            );
            fixture.exit_worker(worker, Death::Signal(9));
            fixture.bring_up(fixture.newest_worker());
        }
        assert_eq!(fixture.verdicts(job), [&Verdict::Cancelled { executed: Executed::Yes }]);
        assert_eq!(fixture.bulkhead.available(), 1);
    }
}

/// When an oversized result starts to arrive, the client gets the job's outcome immediately. Until the whole result has
/// arrived, the job keeps its permit and the worker gets no new job. The result does not count as a late reply.
#[test]
fn oversized_result_holds_its_permit_until_it_has_arrived() {
    let mut fixture =
        Fixture::ready(Limits { deadline: 60 * SECOND, grace: Duration::ZERO, ..limits(1, 1, 1) });
    let (worker, job) = (fixture.newest_worker(), fixture.job());
    fixture.apply(Event::ResultTooLarge { worker, job, failure: too_large() });
    fixture.expect(job, "failed", Some("result_too_large"));
    let next = fixture.job();
    for _ in 0..9 {
        fixture.now = fixture.now + SECOND - MS;
        fixture.apply(Event::FrameReceived { worker });
        fixture.apply(Event::Tick);
    }
    assert_eq!((fixture.was_dispatched(next), fixture.bulkhead.permits_held()), (false, 1));
    fixture.apply(Event::Replied { worker, job, reply: Reply::Failed(too_large()) });
    assert!(fixture.was_dispatched(next));
    fixture.reply(next);
    assert_eq!((fixture.killed.len(), fixture.cancelled.len(), fixture.verdicts(job).len()), (0, 0, 1));
    assert_eq!((fixture.bulkhead.counters().late_replies, fixture.bulkhead.available()), (0, 1));
}

/// A worker is killed if it stops in the middle of an oversized result or is still sending the result after the job's
/// deadline.
#[test]
fn kills_worker_with_endless_oversized_result() {
    for (parts, lives_for) in [(0, 1), (5, 6), (1000, 10)] {
        let mut fixture =
            Fixture::ready(Limits { deadline: 10 * SECOND, grace: Duration::ZERO, ..limits(1, 1, 0) });
        let (worker, job) = (fixture.newest_worker(), fixture.job());
        fixture.apply(Event::ResultTooLarge { worker, job, failure: too_large() });
        for part in 1.. {
            fixture.now = fixture.now + SECOND;
            // Data that has arrived is handled before the timer.
            if part <= parts {
                fixture.apply(Event::FrameReceived { worker });
            }
            fixture.apply(Event::Tick);
            if !fixture.killed.is_empty() {
                break;
            }
        }
        assert_eq!(fixture.killed, [(worker, KillReason::Deadline)]);
        assert_eq!(
            fixture.now.since(Time::ZERO),
            lives_for * SECOND,
            "the worker was killed at the wrong time after {parts} parts"
        );
        fixture.exit_worker(worker, Death::Signal(9));
        fixture.expect(job, "failed", Some("result_too_large"));
    }
}

fn too_large() -> HandlerFailure {
    HandlerFailure {
        code: "result_too_large".into(),
        message: String::new(),
        retryable: false,
        fault: Fault::Dependency,
    }
}

/// When memory is exhausted, waiting jobs are rejected to free memory, and running jobs continue. Each job has exactly
/// one outcome, and the counters are consistent.
#[test]
fn memory_exhaustion_rejects_only_waiting_jobs() {
    let mut fixture = Fixture::ready(limits(1, 1, 2));
    let [running, first, second] = [(); 3].map(|()| fixture.job());
    for job in [running, first, first] {
        fixture.apply(Event::MemoryExhausted { job });
    }
    fixture.expect(first, "rejected", Some("overloaded"));
    assert!(fixture.verdicts(running).is_empty() && !fixture.bulkhead.is_waiting(running));
    assert!(fixture.bulkhead.is_waiting(second));
    fixture.reply(running);
    fixture.expect(running, "ok", None);
    assert!(fixture.was_dispatched(second));
    fixture.reply(second);
    let counters = fixture.bulkhead.counters();
    assert_eq!((counters.submitted, counters.outcomes()), (3, 3));
}

/// Checks a rule in `docs/architecture.md`: a reply from an earlier generation is dropped and counted.
#[test]
fn drops_reply_from_an_earlier_generation() {
    let mut fixture = Fixture::ready(limits(1, 1, 1));
    let (old, first, second) = (fixture.newest_worker(), fixture.job(), fixture.job());
    fixture.exit_worker(old, Death::Signal(11));
    fixture.bring_up(fixture.newest_worker());
    assert_eq!(fixture.holder(second).place, old.place);
    for job in [first, second] {
        fixture.apply(Event::Replied { worker: old, job, reply: Reply::Ok });
    }
    assert_eq!((fixture.verdicts(second), fixture.bulkhead.counters().late_replies), (vec![], 2));
}

// The queue.

/// Follows Hystrix: a job that is cancelled while waiting never runs.
#[test]
fn job_cancelled_while_queued_never_runs() {
    let mut fixture = Fixture::ready(limits(1, 1, 3));
    let jobs: Vec<_> = (0..4).map(|_| fixture.job()).collect();
    fixture.apply(Event::Cancel { job: jobs[1], unless_begun: false });
    assert_eq!(fixture.verdicts(jobs[1]), [&Verdict::Cancelled { executed: Executed::No }]);
    for job in [jobs[0], jobs[2], jobs[3]] {
        fixture.reply(job);
    }
    assert!(!fixture.was_dispatched(jobs[1]));
    assert_eq!(fixture.bulkhead.counters().ok, 3);
}

/// Checks a rule in `docs/semantics.md`: the outcome of a waiting job depends on whether the queue timeout or
/// the deadline expires first.
#[test]
fn queue_timeout_and_deadline_have_different_reasons() {
    let mut fixture = Fixture::ready(Limits { queue_timeout: Some(SECOND), ..limits(1, 1, 5) });
    let running = fixture.job();
    let (patient, hasty) = (fixture.job(), fixture.job_with(Some(500 * MS)));
    fixture.wait(500 * MS);
    fixture.expect(hasty, "deadline_exceeded", Some("queued"));
    assert_eq!(fixture.verdicts(patient).len(), 0);
    fixture.wait(500 * MS);
    fixture.expect(patient, "rejected", Some("queue_timeout"));
    fixture.wait(29 * SECOND);
    fixture.expect(running, "deadline_exceeded", Some("running"));
}

/// Checks a rule in `docs/semantics.md`: a job never starts after its deadline, even if another event is handled
/// between the deadline and the next tick.
#[test]
fn expired_job_never_runs() {
    let mut fixture = Fixture::ready(limits(1, 1, 2));
    let (running, hasty, patient) = (fixture.job(), fixture.job_with(Some(SECOND)), fixture.job());
    fixture.now = Time::ZERO + 2 * SECOND;
    fixture.reply(running);
    fixture.expect(hasty, "deadline_exceeded", Some("queued"));
    assert!(!fixture.was_dispatched(hasty) && fixture.was_dispatched(patient));
    let too_late = fixture.submit_with(Some(Duration::ZERO));
    assert_eq!(
        (too_late, fixture.outcomes.last().map(|a| &a.verdict)),
        (None, Some(&Verdict::DeadlineQueued))
    );
}

/// Checks a rule in `docs/semantics.md`: even without a queue, as many jobs can wait for a starting worker as the
/// worker will have permits.
#[test]
fn jobs_wait_for_starting_workers() {
    let mut fixture = Fixture::starting(limits(2, 3, 0));
    let jobs: Vec<_> = (0..6).map(|_| fixture.job()).collect();
    assert_eq!(fixture.submit(), None);
    assert_eq!(fixture.rejected(RejectReason::QueueFull), 1);
    for worker in fixture.spawned.clone() {
        fixture.bring_up(worker);
    }
    assert!(jobs.iter().all(|&job| fixture.was_dispatched(job)));
    assert_eq!((fixture.submit(), fixture.bulkhead.queue_capacity()), (None, 0));
}

/// If a worker dies before reading its job, the job does not count as started, and the next worker runs this job first.
#[test]
fn unread_job_is_dispatched_first() {
    let mut fixture = Fixture::ready(limits(1, 1, 5));
    let (unread, later) = (fixture.job(), fixture.job());
    let worker = fixture.newest_worker();
    fixture.apply(Event::JobUnread { worker, job: unread });
    fixture.exit_worker(worker, Death::Exit(0));
    assert_eq!(fixture.verdicts(unread).len(), 0);
    fixture.bring_up(fixture.newest_worker());
    assert_eq!(fixture.holder(unread), fixture.newest_worker());
    fixture.reply(unread);
    assert_eq!(fixture.holder(later), fixture.newest_worker());
}

/// The queue timeout limits only the wait for the first permit.
#[test]
fn unread_job_has_no_queue_timeout() {
    let mut fixture = Fixture::ready(Limits { queue_timeout: Some(SECOND), ..limits(1, 1, 5) });
    let (worker, job) = (fixture.newest_worker(), fixture.job());
    fixture.wait(2 * SECOND);
    fixture.apply(Event::JobUnread { worker, job });
    fixture.exit_worker(worker, Death::Exit(0));
    fixture.wait(MS);
    assert_eq!(fixture.verdicts(job).len(), 0);
    fixture.bring_up(fixture.newest_worker());
    fixture.reply(job);
    fixture.expect(job, "ok", None);
}

/// If a worker dies without having started its job, and no other worker will start, the client gets the job's outcome
/// immediately.
#[test]
fn unread_job_ends_if_no_worker_will_start() {
    let mut limits = limits(1, 1, 5);
    limits.restart.policy = RestartPolicy::Never;
    let mut fixture = Fixture::ready(limits);
    let (old, job) = (fixture.newest_worker(), fixture.job());
    fixture.apply(Event::Restart);
    fixture.bring_up(fixture.newest_worker());
    fixture.exit_worker(fixture.newest_worker(), Death::Exit(1));
    fixture.apply(Event::JobUnread { worker: old, job });
    fixture.exit_worker(old, Death::Signal(9));
    fixture.expect(job, "crashed", Some("signal"));
}

// Deadlines.

/// Checks a rule in `docs/semantics.md`: a short deadline requested by a client never ends the worker's other jobs.
#[test]
fn short_deadline_does_not_stop_other_jobs() {
    let mut fixture = Fixture::ready(limits(1, 2, 0));
    let (hasty, patient) = (fixture.job_with(Some(SECOND)), fixture.job());
    fixture.wait(2 * SECOND);
    fixture.expect(hasty, "deadline_exceeded", Some("running"));
    assert_eq!(fixture.cancelled, [hasty]);
    fixture.wait(20 * SECOND);
    assert_eq!((&fixture.killed[..], fixture.bulkhead.available()), (&[][..], 0));
    fixture.reply(patient);
    fixture.expect(patient, "ok", None);
    fixture.wait(100 * MS);
    assert_eq!(fixture.killed.len(), 1, "the worker must be killed because it has no other jobs");
}

/// Checks a rule in `docs/semantics.md`: when a job exceeds the bulkhead's own deadline, its worker is killed
/// and the worker's other jobs crash.
#[test]
fn bulkhead_deadline_kills_the_worker_and_its_other_jobs() {
    let limits = Limits { deadline: 5 * SECOND, deadline_max: 60 * SECOND, ..limits(1, 2, 0) };
    let mut fixture = Fixture::ready(limits);
    let (stuck, innocent) = (fixture.job(), fixture.job_with(Some(60 * SECOND)));
    fixture.wait(5 * SECOND + 99 * MS);
    assert_eq!((fixture.verdicts(stuck).len(), fixture.killed.len()), (1, 0));
    fixture.wait(MS);
    assert_eq!(fixture.killed, [(fixture.holder(stuck), KillReason::Deadline)]);
    fixture.exit_worker(fixture.holder(stuck), Death::Signal(9));
    fixture.expect(stuck, "deadline_exceeded", Some("running"));
    fixture.expect(innocent, "crashed", Some("collateral"));
}

/// Checks a rule in `docs/semantics.md`: a worker that replies within `grace` after a deadline is not killed. Until it
/// has replied, the worker gets no other job.
#[test]
fn worker_that_replies_within_grace_survives() {
    let mut fixture = Fixture::ready(Limits { deadline: SECOND, ..limits(1, 1, 1) });
    let job = fixture.job();
    fixture.wait(SECOND + 99 * MS);
    fixture.expect(job, "deadline_exceeded", Some("running"));
    let next = fixture.job();
    assert!(!fixture.was_dispatched(next));
    fixture.reply(job);
    assert!(fixture.was_dispatched(next));
    fixture.wait(500 * MS);
    assert_eq!((fixture.killed.len(), fixture.verdicts(job).len()), (0, 1));
}

/// Checks a rule in `docs/semantics.md`: the run limit excludes time in the queue, and starts over with each attempt.
#[test]
fn run_limit_counts_from_each_dispatch() {
    let retry = Some(RetryLimits { attempts: 2, budget: 1.0 });
    let mut fixture = Fixture::ready(Limits { run_limit: Some(SECOND), retry, ..limits(1, 1, 1) });
    let (first, waits) = (fixture.idempotent_job(), fixture.idempotent_job());
    fixture.wait(900 * MS);
    fixture.reply(first);
    fixture.wait(900 * MS);
    fixture.exit_worker(fixture.holder(waits), Death::Signal(11));
    fixture.bring_up(fixture.newest_worker());
    fixture.wait(999 * MS);
    assert_eq!(fixture.verdicts(waits).len(), 0);
    fixture.wait(MS);
    fixture.expect(waits, "deadline_exceeded", Some("running"));
    assert_eq!(fixture.outcomes.last().map(|answer| answer.run_limit), Some(Some(SECOND)));
}

/// Checks a rule in `docs/semantics.md`: at the bulkhead's own run limit, the worker is killed. At a run limit
/// requested by the client, the worker is killed only if it has no other jobs.
#[test]
fn only_bulkhead_run_limit_kills_a_shared_worker() {
    let mut fixture = Fixture::ready(Limits { run_limit: Some(10 * SECOND), ..limits(1, 2, 0) });
    let hasty = fixture.job_that_runs_for(SECOND);
    let patient = fixture.job_that_runs_for(60 * SECOND);
    fixture.wait(2 * SECOND);
    fixture.expect(hasty, "deadline_exceeded", Some("running"));
    fixture.wait(8 * SECOND);
    fixture.expect(patient, "deadline_exceeded", Some("running"));
    assert_eq!(fixture.killed.len(), 0, "grace");
    fixture.wait(100 * MS);
    assert_eq!(fixture.killed, [(fixture.holder(patient), KillReason::Deadline)]);
}

// Restarts.

/// Checks a rule in `docs/semantics.md`: the first restart is immediate, and later restarts are delayed by a `backoff`
/// that doubles each time. After more than `max` failures, the slot has failed, and another worker is started after
/// `backoff_max`. A reset clears the history.
#[test]
fn failed_starts_are_retried_with_backoff() {
    let mut fixture = Fixture::starting(limits(1, 1, 0));
    for ceiling_ms in [0, 100, 200, 400, 800] {
        let died_at = fixture.now;
        fixture.exit_worker(fixture.newest_worker(), Death::Exit(1));
        let delay = fixture.bulkhead.next_deadline().map_or(Duration::ZERO, |at| at.since(died_at));
        let count = fixture.spawned.len();
        if ceiling_ms > 0 {
            assert!(delay <= ceiling_ms * MS, "the delay {delay:?} exceeds {ceiling_ms} ms");
            fixture.wait(delay);
        }
        assert_eq!(fixture.spawned.len(), count + usize::from(ceiling_ms > 0));
    }
    fixture.exit_worker(fixture.newest_worker(), Death::Exit(1));
    assert_eq!((fixture.bulkhead.state(), fixture.submit()), (BulkheadState::Failed, None));
    assert_eq!(fixture.rejected(RejectReason::Unavailable), 1);
    let count = fixture.spawned.len();
    fixture.wait(30 * SECOND - MS);
    assert_eq!(fixture.spawned.len(), count);
    fixture.wait(MS);
    assert_eq!(fixture.spawned.len(), count + 1);
    fixture.exit_worker(fixture.newest_worker(), Death::Exit(1));
    fixture.apply(Event::Reset);
    fixture.bring_up(fixture.newest_worker());
    assert_eq!(fixture.bulkhead.state(), BulkheadState::Ready);
}

/// A bulkhead that is scaled to zero stays `failed` as long as it would reject its next job.
#[test]
fn scaling_to_zero_does_not_hide_a_failed_slot() {
    for (policy, heals) in [(RestartPolicy::Always, true), (RestartPolicy::Never, false)] {
        let base = limits(1, 1, 5);
        let restart = Restart { policy, max: 0, ..base.restart.clone() };
        let mut fixture = Fixture::starting(Limits { restart, idle: Some(SECOND), ..base });
        fixture.exit_worker(fixture.newest_worker(), Death::Exit(1));
        fixture.wait(10 * SECOND);
        let state = |fixture: &Fixture| (fixture.bulkhead.activity(), fixture.bulkhead.state());
        assert_eq!(state(&fixture), (Activity::ScaledToZero, BulkheadState::Failed));
        fixture.apply(Event::Start);
        assert_eq!(fixture.submit(), None, "the slot must still reject jobs");
        fixture.wait(10 * SECOND);
        assert_eq!(state(&fixture), (Activity::ScaledToZero, BulkheadState::Failed));
        fixture.wait(60 * SECOND);
        let expected = if heals { BulkheadState::Ready } else { BulkheadState::Failed };
        assert_eq!(state(&fixture), (Activity::ScaledToZero, expected));
        fixture.apply(Event::Start);
        assert_eq!(fixture.submit().is_some(), heals);
        fixture.apply(Event::ScaleToZero);
        fixture.apply(Event::Reset);
        assert_eq!(state(&fixture), (Activity::ScaledToZero, BulkheadState::Ready));
    }
}

/// While a start is only announced, a slot whose backoff ends must wait for the start, because the limit on the number
/// of tenants with workers might not permit a worker yet.
#[test]
fn backoff_that_ends_during_announced_start_starts_no_worker() {
    let base = limits(1, 1, 5);
    let restart = Restart { backoff: 5 * SECOND, backoff_max: 5 * SECOND, ..base.restart.clone() };
    let mut fixture = Fixture::starting(Limits { restart, deadline: 60 * SECOND, ..base });
    for _ in 0..2 {
        fixture.exit_worker(fixture.newest_worker(), Death::Exit(1));
    }
    fixture.apply(Event::ScaleToZero);
    fixture.apply(Event::AnnounceStart);
    let started = fixture.spawned.len();
    let job = fixture.job();
    fixture.wait(20 * SECOND);
    assert_eq!(fixture.spawned.len(), started);
    fixture.apply(Event::Start);
    fixture.bring_up(fixture.spawned[started]);
    fixture.reply(job);
    fixture.expect(job, "ok", None);
}

/// A shortage of user IDs is no failure of the worker, regardless of the restart policy.
#[test]
fn worker_without_a_user_id_is_retried_without_limit() {
    for policy in [RestartPolicy::Always, RestartPolicy::Never] {
        let base = limits(1, 1, 5);
        let restart = Restart { policy, max: 1, ..base.restart.clone() };
        let mut fixture = Fixture::starting(Limits { restart, deadline: 60 * SECOND, ..base });
        let job = fixture.job();
        for started in 1..10 {
            assert_eq!(fixture.spawned.len(), started);
            let (worker, message) = (fixture.newest_worker(), "no user ID is free".to_owned());
            fixture.apply(Event::SpawnFailed { worker, message, lacks_id: true });
            assert_eq!(fixture.bulkhead.state(), BulkheadState::Degraded);
            fixture.wait(SECOND);
        }
        let is_report = |event: &&OperatorEvent| matches!(event, OperatorEvent::WorkerNotStarted { .. });
        assert_eq!(fixture.events.iter().filter(is_report).count(), 1);
        assert_eq!(fixture.bulkhead.restarts(), 0, "all attempts belong to the first start");
        let worker = fixture.newest_worker();
        fixture.bring_up(worker);
        fixture.reply(job);
        fixture.expect(job, "ok", None);
    }
}

/// Checks a rule in `docs/semantics.md`: crashes during jobs and kills at a deadline do not count as failed starts, so
/// that bad payloads cannot stop a bulkhead for all clients.
#[test]
fn deaths_during_jobs_are_not_failed_starts() {
    let mut fixture = Fixture::ready(Limits { deadline: SECOND, ..limits(1, 1, 0) });
    for round in 0..40 {
        let (worker, job) = (fixture.newest_worker(), fixture.job());
        if round % 2 == 0 {
            fixture.wait(2 * SECOND);
            assert_eq!(fixture.killed.last(), Some(&(worker, KillReason::Deadline)));
        }
        fixture.exit_worker(worker, Death::Signal(11));
        assert_eq!(fixture.verdicts(job).len(), 1);
        // From the eleventh consecutive death on, a restart can be delayed.
        fixture.wait(if round < 10 { Duration::ZERO } else { 20 * MS });
        assert_ne!(fixture.newest_worker(), worker, "the next worker must be started immediately");
        fixture.bring_up(fixture.newest_worker());
    }
    assert_eq!(fixture.bulkhead.state(), BulkheadState::Ready);
}

/// Checks a rule in `docs/semantics.md`: an exit with status 0 while a job is in flight is a crash (pebble and loky
/// treat it as success).
#[test]
fn clean_exit_with_a_job_in_flight_is_a_crash() {
    let mut fixture = Fixture::ready(limits(1, 1, 0));
    let job = fixture.job();
    fixture.exit_worker(fixture.newest_worker(), Death::Exit(0));
    let message = "exited with status 0".to_owned();
    assert_eq!(
        fixture.verdicts(job),
        [&Verdict::Crashed { reason: CrashReason::Exit, status: Some(0), message }]
    );
}

// Recycling.

/// Checks a rule in `docs/semantics.md`: when a worker is recycled, it is drained only after its replacement is ready,
/// so that the number of permits does not drop.
#[test]
fn recycled_worker_continues_until_its_replacement_is_ready() {
    let mut limits = limits(1, 1, 0);
    limits.recycle.age = Some(SECOND);
    let mut fixture = Fixture::ready(limits);
    let old = fixture.newest_worker();
    fixture.wait(SECOND);
    let new = fixture.newest_worker();
    assert_ne!(new, old);
    let between = fixture.job();
    assert_eq!((fixture.holder(between), &fixture.drained[..]), (old, &[][..]));
    fixture.bring_up(new);
    assert_eq!((&fixture.drained[..], fixture.bulkhead.available()), (&[old][..], 0));
    fixture.reply(between);
    assert_eq!(fixture.bulkhead.available(), 1, "the job must be charged to the old worker");
    fixture.exit_worker(old, Death::Exit(0));
    fixture.expect(between, "ok", None);
    assert_eq!(
        fixture.spawned.len(),
        2,
        "the end of the old worker's last job must not recycle another worker"
    );
    assert_eq!((fixture.bulkhead.last_failure(), fixture.bulkhead.limit()), ("", 1));
}

/// Checks the rule in `docs/architecture.md` that everything is bounded. Jobs that hang in replaced workers must not
/// increase the number of workers.
#[test]
fn slot_has_at_most_two_workers() {
    let mut limits = limits(1, 2, 0);
    limits.recycle.jobs = Some(2);
    let mut fixture = Fixture::ready(limits);
    let _hangs = fixture.job();
    for _ in 0..3 {
        let job = fixture.job();
        fixture.reply(job);
        if fixture.spawned.len() == 2 && fixture.bulkhead.limit() == 0 {
            fixture.bring_up(fixture.newest_worker());
        }
    }
    assert_eq!(
        (fixture.spawned.len(), fixture.drained.len()),
        (2, 2),
        "both workers must have been given all the jobs that `recycle.jobs` allows"
    );
    let waits = fixture.job();
    fixture.exit_worker(fixture.drained[0], Death::Signal(11));
    assert_eq!(fixture.spawned.len(), 3, "the next replacement must start immediately");
    fixture.bring_up(fixture.newest_worker());
    fixture.reply(waits);
}

/// A rolling restart replaces the workers one after another, without reporting failures.
#[test]
fn rolling_restart_replaces_one_slot_at_a_time() {
    let mut fixture = Fixture::ready(limits(3, 1, 0));
    let old = fixture.spawned.clone();
    fixture.apply(Event::Restart);
    for (done, &worker) in old.iter().enumerate() {
        assert_eq!((fixture.spawned.len(), fixture.drained.len()), (4 + done, done));
        fixture.bring_up(fixture.newest_worker());
        assert_eq!((fixture.drained.last(), fixture.bulkhead.limit()), (Some(&worker), 3));
        fixture.exit_worker(worker, Death::Exit(0));
    }
    assert_eq!((fixture.spawned.len(), fixture.bulkhead.last_failure()), (6, ""));
    let recycled = |note: &&OperatorEvent| {
        matches!(note, OperatorEvent::WorkerRecycled { reason: RecycleReason::Restart, .. })
    };
    assert_eq!(fixture.events.iter().filter(recycled).count(), 3);
}

// Operator commands.

/// Checks a rule in `docs/semantics.md`: while the bulkhead is draining, new and queued jobs are rejected immediately,
/// and jobs in flight are completed.
#[test]
fn drain_rejects_queued_jobs_and_keeps_running_jobs() {
    let mut fixture = Fixture::ready(limits(1, 1, 1));
    let (running, waiting) = (fixture.job(), fixture.job());
    fixture.apply(Event::Drain);
    fixture.expect(waiting, "rejected", Some("draining"));
    assert_eq!((fixture.submit(), fixture.rejected(RejectReason::Draining)), (None, 2));
    fixture.reply(running);
    fixture.expect(running, "ok", None);
    fixture.apply(Event::Resume);
    let next = fixture.job();
    assert!(fixture.was_dispatched(next));
}

#[test]
fn tenant_counts_include_rejections_after_queueing() {
    let settings = Limits { overflow: Overflow::EvictOldest, queue_timeout: Some(SECOND), ..limits(1, 1, 2) };
    let mut fixture = Fixture::ready(settings);
    let submit = |fixture: &mut Fixture, tenant: &str| fixture.submit_as(Priority::Normal, tenant);
    let jobs = [(); 5].map(|()| submit(&mut fixture, "a").unwrap());
    fixture.expect(jobs[1], "rejected", Some("evicted"));
    fixture.wait(SECOND);
    fixture.expect(jobs[4], "rejected", Some("queue_timeout"));
    let waiting = submit(&mut fixture, "a").unwrap();
    fixture.apply(Event::Drain);
    fixture.expect(waiting, "rejected", Some("draining"));
    assert_eq!((submit(&mut fixture, "a"), submit(&mut fixture, "b")), (None, None));
    fixture.reply(jobs[0]);
    assert_eq!(fixture.tenants(), [("a".to_owned(), 7, 6), ("b".to_owned(), 1, 1)]);
}

#[test]
fn zero_deadline_is_not_a_rejection_of_the_tenant() {
    let mut fixture = Fixture::ready(limits(1, 1, 0));
    let tenant = fixture.bulkhead.tenant("a");
    let submission = Submission { tenant, deadline: Some(Duration::ZERO), ..Submission::new(1) };
    assert_eq!(fixture.apply(Event::Submit(submission)), None);
    assert_eq!(fixture.outcomes[0].verdict, Verdict::DeadlineQueued);
    assert_eq!(fixture.tenants(), [("a".to_owned(), 1, 0)]);
}

#[test]
fn evictions_of_jobs_without_tenant_are_not_reported() {
    let mut fixture = Fixture::ready(Limits { overflow: Overflow::EvictOldest, ..limits(1, 1, 1) });
    let evict = |fixture: &mut Fixture, tenant: &str, count: u32| {
        (0..count).for_each(|_| assert!(fixture.submit_as(Priority::Normal, tenant).is_some()));
    };
    evict(&mut fixture, "", 100);
    assert_eq!(fixture.tenants_reported_for_evictions(), [""; 0]);
    // The evictions of jobs without a tenant still count as recent evictions, so the first half is not enough.
    evict(&mut fixture, "a", 33);
    assert_eq!(fixture.tenants_reported_for_evictions(), [""; 0]);
    evict(&mut fixture, "a", 1);
    assert_eq!(fixture.tenants_reported_for_evictions(), ["a"]);
}

/// Checks a rule in `docs/semantics.md`: when the bulkhead stops, jobs in flight can continue until `by`. Jobs
/// still running at that time end as `crashed/stopped`.
#[test]
fn stop_waits_for_jobs_until_its_time_limit() {
    for finishes in [true, false] {
        let mut fixture = Fixture::ready(limits(1, 1, 1));
        let (worker, running, waiting) = (fixture.newest_worker(), fixture.job(), fixture.job());
        fixture.apply(Event::Stop { by: fixture.now + 5 * SECOND });
        fixture.expect(waiting, "rejected", Some("draining"));
        assert_eq!(fixture.drained, [worker]);
        if finishes {
            fixture.reply(running);
            fixture.exit_worker(worker, Death::Exit(0));
            fixture.expect(running, "ok", None);
        } else {
            fixture.wait(5 * SECOND);
            assert_eq!(fixture.killed, [(worker, KillReason::ExitTimeout)]);
            fixture.exit_worker(worker, Death::Signal(9));
            fixture.expect(running, "crashed", Some("stopped"));
        }
        assert!(fixture.bulkhead.is_stopped());
        assert_eq!((fixture.spawned.len(), fixture.bulkhead.next_deadline()), (1, None));
    }
}

/// The silence of a worker that gets no processor time does not prove that the worker is hung, and killing the worker
/// would only add to the load. Such a silence is excused only a limited number of times.
#[test]
fn starved_worker_is_killed_later_than_hung_worker() {
    for (is_starved, looks) in [(true, 21), (false, 1)] {
        let mut fixture = Fixture::ready(limits(1, 1, 0));
        let worker = fixture.newest_worker();
        while fixture.killed.is_empty() {
            let Some(due) = fixture.bulkhead.next_deadline() else {
                panic!("the bulkhead must still have a timer")
            };
            fixture.now = due;
            let cpu_time_checks = fixture.cpu_time_checks.len();
            fixture.apply(Event::Tick);
            if fixture.cpu_time_checks.len() > cpu_time_checks {
                fixture.apply(Event::CpuTimeChecked { worker, is_starved });
            }
        }
        assert_eq!(fixture.killed, [(worker, KillReason::Hung)]);
        assert_eq!(fixture.cpu_time_checks.len(), looks);
    }
}

/// If a worker can end individual jobs and clients are waiting for its other jobs, the worker gets extra time to end an
/// overdue job.
#[test]
fn slowly_ending_job_does_not_stop_other_jobs() {
    for is_answered in [true, false] {
        let numbers = Limits { deadline: SECOND, grace: MS, worker_ends_jobs: true, ..limits(1, 2, 0) };
        let mut fixture = Fixture::ready(numbers);
        let (worker, slow) = (fixture.newest_worker(), fixture.job());
        fixture.wait(900 * MS);
        let other = fixture.job();
        fixture.wait(900 * MS);
        fixture.expect(slow, "deadline_exceeded", Some("running"));
        assert_eq!(fixture.killed, []);
        if is_answered {
            fixture.reply(other);
            assert_eq!(fixture.verdicts(other).len(), 1);
        } else {
            fixture.wait(101 * MS);
            fixture.expect(other, "deadline_exceeded", Some("running"));
        }
        // From now on, no client is waiting for any of the worker's jobs.
        fixture.wait(2 * MS);
        assert_eq!(fixture.killed, [(worker, KillReason::Deadline)]);
    }
}

/// Each restart is reported with its cause: the exit of the previous worker, or the reason for replacing it.
#[test]
fn restarts_report_their_causes() {
    let mut fixture = Fixture::ready(Limits { grace: MS, ..limits(1, 1, 0) });
    let deaths = [
        (Death::Exit(3), RestartCause::Exit),
        (Death::Signal(11), RestartCause::Signal),
        (Death::Violation("ptrace"), RestartCause::Violation),
        (Death::Oom, RestartCause::Oom),
        (Death::TmpFull, RestartCause::Violation),
    ];
    for (death, cause) in deaths {
        fixture.job();
        fixture.exit_worker(fixture.newest_worker(), death);
        assert_eq!(fixture.causes.last(), Some(&Some(cause)));
        fixture.bring_up(fixture.newest_worker());
    }
    // The worker is killed because of a job that does not end.
    fixture.job_with(Some(SECOND));
    fixture.wait(60 * SECOND);
    fixture.exit_worker(fixture.newest_worker(), Death::Signal(9));
    assert_eq!(fixture.causes.last(), Some(&Some(RestartCause::Deadline)));
    fixture.bring_up(fixture.newest_worker());
    fixture.apply(Event::ProtocolViolated { worker: fixture.newest_worker(), message: "rubbish".into() });
    fixture.exit_worker(fixture.newest_worker(), Death::Signal(9));
    fixture.wait(SECOND);
    assert_eq!(fixture.causes.last(), Some(&Some(RestartCause::Protocol)));
    let worker = fixture.newest_worker();
    fixture.apply(Event::SpawnFailed { worker, message: "no such file".into(), lacks_id: false });
    fixture.wait(SECOND);
    assert_eq!(fixture.causes.last(), Some(&Some(RestartCause::NotStarted)));
    let worker = fixture.newest_worker();
    fixture.bring_up(worker);
    // The replacement starts first, so the previous worker's exit does not cause another restart.
    fixture.apply(Event::Restart);
    assert_eq!(fixture.causes.last(), Some(&Some(RestartCause::Restart)));
    fixture.bring_up(fixture.newest_worker());
    fixture.exit_worker(worker, Death::Exit(0));
    let count = fixture.causes.len();
    assert_eq!((fixture.bulkhead.restarts() as usize, fixture.causes[0]), (count - 1, None));
    assert!(fixture.causes[1..].iter().all(Option::is_some));
}
