//! Named rules: lessons of other systems and promises of the design. The source of each rule is in its
//! comment.

#![expect(clippy::panic, reason = "a test says what is wrong by panicking")]

mod stage;

use std::time::Duration;

use bulkhead_policy::{
    BulkheadState, Death, Event, KillReason, Limits, Note, RecycleReason, Reply, RestartCause, RestartPolicy,
    RetryLimits, Time,
};
use bulkhead_shared::{CrashReason, Executed, Fault, HandlerFailure, RejectReason, Verdict};
use stage::{MS, SECOND, Stage, limits};

// Permits.

/// Polly, `BulkheadScenarios`: of L calls on N permits and Q queue places, min(L, N) execute and max(0, L - N
/// - Q) are rejected. All permits are free in the end.
#[test]
fn so_many_run_so_many_wait_and_the_rest_is_rejected() {
    for (processes, max_in_flight, queue) in [(1, 1, 0), (1, 4, 2), (4, 1, 2), (2, 3, 0), (3, 2, 7)] {
        for load in 0..20 {
            let mut stage = Stage::ready(limits(processes, max_in_flight, queue));
            for _ in 0..load {
                stage.submit();
            }
            let permits = processes * max_in_flight;
            assert_eq!(stage.bulkhead.in_flight(), u64::from(load.min(permits)));
            assert_eq!(stage.bulkhead.queued() as u32, load.saturating_sub(permits).min(queue));
            let rejected = u64::from(load.saturating_sub(permits + queue));
            assert_eq!(stage.rejected(RejectReason::QueueFull), rejected);
            let mut done = 0;
            while let Some(&(_, job)) = stage.dispatched.get(done) {
                stage.reply(job);
                done += 1;
            }
            assert_eq!(stage.bulkhead.counters().ok, u64::from(load.min(permits + queue)));
            assert_eq!(stage.bulkhead.available(), u64::from(permits));
        }
    }
}

/// Failsafe #393: waiting jobs that time out must not take a permit with them.
#[test]
fn eight_waiters_that_timed_out_leave_full_capacity() {
    let mut stage = Stage::ready(Limits { queue_timeout: Some(SECOND), ..limits(8, 1, 8) });
    let running: Vec<_> = (0..8).map(|_| stage.job()).collect();
    let waiting: Vec<_> = (0..8).map(|_| stage.job()).collect();
    stage.wait(SECOND);
    waiting.iter().for_each(|&job| stage.expect(job, "rejected", Some("queue_timeout")));
    running.iter().for_each(|&job| stage.reply(job));
    assert_eq!(stage.bulkhead.available(), 8);
    let next: Vec<_> = (0..8).map(|_| stage.job()).collect();
    assert!(next.iter().all(|&job| stage.was_given_out(job)));
}

/// Netflix concurrency-limits: a permit that is granted at the moment when the waiting job times out belongs
/// to one of the two jobs, never to neither.
#[test]
fn a_grant_that_races_a_timeout_is_not_lost() {
    for reply_comes_first in [true, false] {
        let mut stage = Stage::ready(Limits { queue_timeout: Some(SECOND), ..limits(1, 1, 1) });
        let (first, second) = (stage.job(), stage.job());
        stage.now = Time::ZERO + SECOND;
        if reply_comes_first {
            stage.reply(first);
            stage.apply(Event::Tick);
            stage.reply(second);
            stage.expect(second, "ok", None);
        } else {
            stage.apply(Event::Tick);
            stage.reply(first);
            stage.expect(second, "rejected", Some("queue_timeout"));
        }
        assert_eq!(stage.bulkhead.available(), 1);
    }
}

/// Semian: the permit of a holder that is killed by SIGKILL returns. Here it returns with the next process.
#[test]
fn the_permit_of_a_killed_holder_returns() {
    let mut stage = Stage::ready(limits(1, 1, 1));
    let (first, second) = (stage.job(), stage.job());
    stage.die(stage.holder(first), Death::Signal(9));
    stage.expect(first, "crashed", Some("signal"));
    assert!(!stage.was_given_out(second), "there is no worker yet to give it to");
    stage.bring_up(stage.newest_worker());
    stage.reply(second);
    stage.expect(second, "ok", None);
    assert_eq!(stage.bulkhead.available(), 1);
}

/// tower: a dropped future returns its permit. Here the client disconnects, and the permit returns only when
/// the worker replies or exits, because the job may still run.
#[test]
fn cancelled_job_keeps_its_permit_until_the_work_ends() {
    for obeys in [true, false] {
        let mut stage = Stage::ready(limits(1, 1, 0));
        let (worker, job) = (stage.newest_worker(), stage.job());
        stage.apply(Event::Cancel { job, unless_begun: false });
        assert_eq!((&stage.cancelled[..], stage.bulkhead.available()), (&[job][..], 0));
        if obeys {
            stage.reply(job);
        } else {
            stage.wait(100 * MS);
            assert_eq!(stage.killed, [(worker, KillReason::Deadline)]);
            assert_eq!(stage.bulkhead.available(), 0, "killed is not gone");
            stage.die(worker, Death::Signal(9));
            stage.bring_up(stage.newest_worker());
        }
        assert_eq!(stage.verdicts(job), [&Verdict::Cancelled { executed: Executed::Yes }]);
        assert_eq!(stage.bulkhead.available(), 1);
    }
}

/// The client is told about a result that is too large when the result begins. The permit returns when all of
/// the result has arrived. This does not count as a late reply, and until then the worker gets no new job.
#[test]
fn oversized_result_keeps_its_permit_until_its_end() {
    let mut stage = Stage::ready(Limits { deadline: 60 * SECOND, grace: Duration::ZERO, ..limits(1, 1, 1) });
    let (worker, job) = (stage.newest_worker(), stage.job());
    stage.apply(Event::Oversized { worker, job, failure: too_large() });
    stage.expect(job, "failed", Some("result_too_large"));
    let next = stage.job();
    for _ in 0..9 {
        stage.now = stage.now + SECOND - MS;
        stage.apply(Event::Heard { worker });
        stage.apply(Event::Tick);
    }
    assert_eq!((stage.was_given_out(next), stage.bulkhead.permits_taken()), (false, 1));
    stage.apply(Event::Replied { worker, job, reply: Reply::Failed(too_large()) });
    assert!(stage.was_given_out(next));
    stage.reply(next);
    assert_eq!((stage.killed.len(), stage.cancelled.len(), stage.verdicts(job).len()), (0, 0, 1));
    assert_eq!((stage.bulkhead.counters().late_replies, stage.bulkhead.available()), (0, 1));
}

/// A worker that stops sending such a result is killed, and so is a worker that still sends it after the
/// job's deadline.
#[test]
fn a_result_that_is_too_large_must_come_to_its_end() {
    for (parts, lives_for) in [(0, 1), (5, 6), (1000, 10)] {
        let mut stage =
            Stage::ready(Limits { deadline: 10 * SECOND, grace: Duration::ZERO, ..limits(1, 1, 0) });
        let (worker, job) = (stage.newest_worker(), stage.job());
        stage.apply(Event::Oversized { worker, job, failure: too_large() });
        for part in 1.. {
            stage.now = stage.now + SECOND;
            // Data that has arrived is read before the timer is handled.
            if part <= parts {
                stage.apply(Event::Heard { worker });
            }
            stage.apply(Event::Tick);
            if !stage.killed.is_empty() {
                break;
            }
        }
        assert_eq!(stage.killed, [(worker, KillReason::Deadline)]);
        assert_eq!(stage.now.since(Time::ZERO), lives_for * SECOND, "{parts} parts");
        stage.die(worker, Death::Signal(9));
        stage.expect(job, "failed", Some("result_too_large"));
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

/// Waiting jobs make room when memory is short. Running jobs continue. Each job has one outcome, and the sums
/// agree.
#[test]
fn a_job_that_waits_can_be_given_up_and_one_that_runs_cannot() {
    let mut stage = Stage::ready(limits(1, 1, 2));
    let [running, first, second] = [(); 3].map(|()| stage.job());
    for job in [running, first, first] {
        stage.apply(Event::GiveUp { job });
    }
    stage.expect(first, "rejected", Some("overloaded"));
    assert!(stage.verdicts(running).is_empty() && !stage.bulkhead.is_waiting(running));
    assert!(stage.bulkhead.is_waiting(second));
    stage.reply(running);
    stage.expect(running, "ok", None);
    assert!(stage.was_given_out(second));
    stage.reply(second);
    let counters = stage.bulkhead.counters();
    assert_eq!((counters.submitted, counters.outcomes()), (3, 3));
}

/// Architecture, 4: a reply from an earlier generation is dropped and counted.
#[test]
fn a_reply_from_an_earlier_generation_reaches_nobody() {
    let mut stage = Stage::ready(limits(1, 1, 1));
    let (old, first, second) = (stage.newest_worker(), stage.job(), stage.job());
    stage.die(old, Death::Signal(11));
    stage.bring_up(stage.newest_worker());
    assert_eq!(stage.holder(second).place, old.place);
    for job in [first, second] {
        stage.apply(Event::Replied { worker: old, job, reply: Reply::Ok });
    }
    assert_eq!((stage.verdicts(second), stage.bulkhead.counters().late_replies), (vec![], 2));
}

// The queue.

/// Hystrix: a job that is cancelled while it waits never runs.
#[test]
fn a_job_cancelled_in_the_queue_never_runs() {
    let mut stage = Stage::ready(limits(1, 1, 3));
    let jobs: Vec<_> = (0..4).map(|_| stage.job()).collect();
    stage.apply(Event::Cancel { job: jobs[1], unless_begun: false });
    assert_eq!(stage.verdicts(jobs[1]), [&Verdict::Cancelled { executed: Executed::No }]);
    for job in [jobs[0], jobs[2], jobs[3]] {
        stage.reply(job);
    }
    assert!(!stage.was_given_out(jobs[1]));
    assert_eq!(stage.bulkhead.counters().ok, 3);
}

/// Semantics 1: the outcome depends on which passes first, the queue timeout or the deadline.
#[test]
fn the_queue_timeout_and_the_deadline_each_have_their_own_name() {
    let mut stage = Stage::ready(Limits { queue_timeout: Some(SECOND), ..limits(1, 1, 5) });
    let running = stage.job();
    let (patient, hasty) = (stage.job(), stage.job_with(Some(500 * MS)));
    stage.wait(500 * MS);
    stage.expect(hasty, "deadline_exceeded", Some("queued"));
    assert_eq!(stage.verdicts(patient).len(), 0);
    stage.wait(500 * MS);
    stage.expect(patient, "rejected", Some("queue_timeout"));
    stage.wait(29 * SECOND);
    stage.expect(running, "deadline_exceeded", Some("running"));
}

/// Semantics 1, step 9: a job past its deadline never runs, even if no tick was handled in between.
#[test]
fn an_expired_job_never_runs() {
    let mut stage = Stage::ready(limits(1, 1, 2));
    let (running, hasty, patient) = (stage.job(), stage.job_with(Some(SECOND)), stage.job());
    stage.now = Time::ZERO + 2 * SECOND;
    stage.reply(running);
    stage.expect(hasty, "deadline_exceeded", Some("queued"));
    assert!(!stage.was_given_out(hasty) && stage.was_given_out(patient));
    let too_late = stage.submit_with(Some(Duration::ZERO));
    assert_eq!((too_late, stage.answers.last().map(|a| &a.verdict)), (None, Some(&Verdict::DeadlineQueued)));
}

/// Semantics 1: while workers start, as many jobs as they can take may wait, even without a queue.
#[test]
fn jobs_wait_for_workers_that_start() {
    let mut stage = Stage::starting(limits(2, 3, 0));
    let jobs: Vec<_> = (0..6).map(|_| stage.job()).collect();
    assert_eq!(stage.submit(), None);
    assert_eq!(stage.rejected(RejectReason::QueueFull), 1);
    for worker in stage.spawned.clone() {
        stage.bring_up(worker);
    }
    assert!(jobs.iter().all(|&job| stage.was_given_out(job)));
    assert_eq!((stage.submit(), stage.bulkhead.queue_capacity()), (None, 0));
}

/// A worker that dies before it has read its job has not begun it. The job is the first one of the next
/// worker.
#[test]
fn a_job_left_unread_goes_to_the_next_worker_before_all_others() {
    let mut stage = Stage::ready(limits(1, 1, 5));
    let (unread, later) = (stage.job(), stage.job());
    let worker = stage.newest_worker();
    stage.apply(Event::Unread { worker, job: unread });
    stage.die(worker, Death::Exit(0));
    assert_eq!(stage.verdicts(unread).len(), 0);
    stage.bring_up(stage.newest_worker());
    assert_eq!(stage.holder(unread), stage.newest_worker());
    stage.reply(unread);
    assert_eq!(stage.holder(later), stage.newest_worker());
}

/// If no further worker will start, the client is answered at once.
#[test]
fn a_job_left_unread_does_not_wait_for_nobody() {
    let mut limits = limits(1, 1, 5);
    limits.restart.policy = RestartPolicy::Never;
    let mut stage = Stage::ready(limits);
    let (old, job) = (stage.newest_worker(), stage.job());
    stage.apply(Event::Restart);
    stage.bring_up(stage.newest_worker());
    stage.die(stage.newest_worker(), Death::Exit(1));
    stage.apply(Event::Unread { worker: old, job });
    stage.die(old, Death::Signal(9));
    stage.expect(job, "crashed", Some("signal"));
}

// Deadlines.

/// Semantics 3: a client that asks for a short deadline ends its own job, never the worker's other jobs.
#[test]
fn the_short_deadline_of_one_does_not_end_its_neighbour() {
    let mut stage = Stage::ready(limits(1, 2, 0));
    let (hasty, patient) = (stage.job_with(Some(SECOND)), stage.job());
    stage.wait(2 * SECOND);
    stage.expect(hasty, "deadline_exceeded", Some("running"));
    assert_eq!(stage.cancelled, [hasty]);
    stage.wait(20 * SECOND);
    assert_eq!((&stage.killed[..], stage.bulkhead.available()), (&[][..], 0));
    stage.reply(patient);
    stage.expect(patient, "ok", None);
    stage.wait(100 * MS);
    assert_eq!(stage.killed.len(), 1, "no job is left in there that it could harm");
}

/// Semantics 3: at the bulkhead's own deadline the worker is killed, together with its other jobs.
#[test]
fn bulkhead_deadline_kills_the_worker_and_its_other_jobs() {
    let limits = Limits { deadline: 5 * SECOND, deadline_max: 60 * SECOND, ..limits(1, 2, 0) };
    let mut stage = Stage::ready(limits);
    let (stuck, innocent) = (stage.job(), stage.job_with(Some(60 * SECOND)));
    stage.wait(5 * SECOND + 99 * MS);
    assert_eq!((stage.verdicts(stuck).len(), stage.killed.len()), (1, 0));
    stage.wait(MS);
    assert_eq!(stage.killed, [(stage.holder(stuck), KillReason::Deadline)]);
    stage.die(stage.holder(stuck), Death::Signal(9));
    stage.expect(stuck, "deadline_exceeded", Some("running"));
    stage.expect(innocent, "crashed", Some("collateral"));
}

/// Semantics 3: within `grace` the worker can still reply and survive. Until then it gets no other job.
#[test]
fn a_worker_that_comes_round_within_grace_lives() {
    let mut stage = Stage::ready(Limits { deadline: SECOND, ..limits(1, 1, 1) });
    let job = stage.job();
    stage.wait(SECOND + 99 * MS);
    stage.expect(job, "deadline_exceeded", Some("running"));
    let next = stage.job();
    assert!(!stage.was_given_out(next));
    stage.reply(job);
    assert!(stage.was_given_out(next));
    stage.wait(500 * MS);
    assert_eq!((stage.killed.len(), stage.verdicts(job).len()), (0, 1));
}

/// Semantics 3: the run limit counts from the dispatch, whatever time the job waited, and again for each
/// attempt.
#[test]
fn the_run_limit_counts_from_each_dispatch() {
    let retry = Some(RetryLimits { attempts: 2, budget: 1.0 });
    let mut stage = Stage::ready(Limits { run_limit: Some(SECOND), retry, ..limits(1, 1, 1) });
    let (first, waits) = (stage.idempotent_job(), stage.idempotent_job());
    stage.wait(900 * MS);
    stage.reply(first);
    stage.wait(900 * MS);
    stage.die(stage.holder(waits), Death::Signal(11));
    stage.bring_up(stage.newest_worker());
    stage.wait(999 * MS);
    assert_eq!(stage.verdicts(waits).len(), 0);
    stage.wait(MS);
    stage.expect(waits, "deadline_exceeded", Some("running"));
    assert_eq!(stage.answers.last().map(|answer| answer.run_limit), Some(Some(SECOND)));
}

/// Semantics 3: at the bulkhead's own run limit the worker is killed. At a client's run limit it is killed
/// only if it has no other job.
#[test]
fn only_bulkhead_run_limit_kills_a_shared_worker() {
    let mut stage = Stage::ready(Limits { run_limit: Some(10 * SECOND), ..limits(1, 2, 0) });
    let hasty = stage.job_that_runs_for(SECOND);
    let patient = stage.job_that_runs_for(60 * SECOND);
    stage.wait(2 * SECOND);
    stage.expect(hasty, "deadline_exceeded", Some("running"));
    stage.wait(8 * SECOND);
    stage.expect(patient, "deadline_exceeded", Some("running"));
    assert_eq!(stage.killed.len(), 0, "grace");
    stage.wait(100 * MS);
    assert_eq!(stage.killed, [(stage.holder(patient), KillReason::Deadline)]);
}

// Restarts.

/// Semantics 4: the first restart is immediate, later ones follow within a doubling `backoff`. After more
/// than `max` failures the slot has failed, and is probed after `backoff_max`. A reset clears the history.
#[test]
fn a_worker_that_does_not_start_is_tried_less_and_less_often() {
    let mut stage = Stage::starting(limits(1, 1, 0));
    for ceiling_ms in [0, 100, 200, 400, 800] {
        let died_at = stage.now;
        stage.die(stage.newest_worker(), Death::Exit(1));
        let delay = stage.bulkhead.next_deadline().map_or(Duration::ZERO, |at| at.since(died_at));
        let count = stage.spawned.len();
        if ceiling_ms > 0 {
            assert!(delay <= ceiling_ms * MS, "{delay:?} of {ceiling_ms} ms");
            stage.wait(delay);
        }
        assert_eq!(stage.spawned.len(), count + usize::from(ceiling_ms > 0));
    }
    stage.die(stage.newest_worker(), Death::Exit(1));
    assert_eq!((stage.bulkhead.state(), stage.submit()), (BulkheadState::Failed, None));
    assert_eq!(stage.rejected(RejectReason::Unavailable), 1);
    let count = stage.spawned.len();
    stage.wait(30 * SECOND - MS);
    assert_eq!(stage.spawned.len(), count);
    stage.wait(MS);
    assert_eq!(stage.spawned.len(), count + 1);
    stage.die(stage.newest_worker(), Death::Exit(1));
    stage.apply(Event::Reset);
    stage.bring_up(stage.newest_worker());
    assert_eq!(stage.bulkhead.state(), BulkheadState::Ready);
}

/// Semantics 4: crashes during jobs and kills for a deadline do not count as failed starts, so that bad
/// payloads cannot close a bulkhead to everyone.
#[test]
fn deaths_under_jobs_do_not_count_as_failed_starts() {
    let mut stage = Stage::ready(Limits { deadline: SECOND, ..limits(1, 1, 0) });
    for round in 0..40 {
        let (worker, job) = (stage.newest_worker(), stage.job());
        if round % 2 == 0 {
            stage.wait(2 * SECOND);
            assert_eq!(stage.killed.last(), Some(&(worker, KillReason::Deadline)));
        }
        stage.die(worker, Death::Signal(11));
        assert_eq!(stage.verdicts(job).len(), 1);
        // From the eleventh consecutive death on, restarts are spaced.
        stage.wait(if round < 10 { Duration::ZERO } else { 20 * MS });
        assert_ne!(stage.newest_worker(), worker, "the next one comes at once");
        stage.bring_up(stage.newest_worker());
    }
    assert_eq!(stage.bulkhead.state(), BulkheadState::Ready);
}

/// Semantics 4: exit status 0 with a job in flight is a crash (pebble and loky treat it as success).
#[test]
fn a_clean_exit_with_a_job_in_flight_is_a_crash() {
    let mut stage = Stage::ready(limits(1, 1, 0));
    let job = stage.job();
    stage.die(stage.newest_worker(), Death::Exit(0));
    let message = "exited with status 0".to_owned();
    assert_eq!(
        stage.verdicts(job),
        [&Verdict::Crashed { reason: CrashReason::Exit, status: Some(0), message }]
    );
}

// Recycling.

/// Semantics 4: the replacement is ready first, so capacity does not drop.
#[test]
fn a_recycled_worker_goes_on_until_its_replacement_is_ready() {
    let mut limits = limits(1, 1, 0);
    limits.recycle.age = Some(SECOND);
    let mut stage = Stage::ready(limits);
    let old = stage.newest_worker();
    stage.wait(SECOND);
    let new = stage.newest_worker();
    assert_ne!(new, old);
    let between = stage.job();
    assert_eq!((stage.holder(between), &stage.drained[..]), (old, &[][..]));
    stage.bring_up(new);
    assert_eq!((&stage.drained[..], stage.bulkhead.available()), (&[old][..], 0));
    stage.reply(between);
    assert_eq!(stage.bulkhead.available(), 1, "it was the debt of the old one");
    stage.die(old, Death::Exit(0));
    stage.expect(between, "ok", None);
    assert_eq!(stage.spawned.len(), 2, "the last job of the old one recycles no other worker");
    assert_eq!((stage.bulkhead.last_trouble(), stage.bulkhead.limit()), ("", 1));
}

/// Architecture, 6: everything is bounded. Jobs that hang in replaced workers do not make these workers pile
/// up.
#[test]
fn a_slot_has_two_workers_at_most() {
    let mut limits = limits(1, 2, 0);
    limits.recycle.jobs = Some(2);
    let mut stage = Stage::ready(limits);
    let _hangs = stage.job();
    for _ in 0..3 {
        let job = stage.job();
        stage.reply(job);
        if stage.spawned.len() == 2 && stage.bulkhead.limit() == 0 {
            stage.bring_up(stage.newest_worker());
        }
    }
    assert_eq!((stage.spawned.len(), stage.drained.len()), (2, 2), "both have begun all that they may");
    let waits = stage.job();
    stage.die(stage.drained[0], Death::Signal(11));
    assert_eq!(stage.spawned.len(), 3, "now there is room for the next replacement");
    stage.bring_up(stage.newest_worker());
    stage.reply(waits);
}

/// A rolling restart replaces one worker after the other and reports no failure.
#[test]
fn a_rolling_restart_goes_from_slot_to_slot() {
    let mut stage = Stage::ready(limits(3, 1, 0));
    let old = stage.spawned.clone();
    stage.apply(Event::Restart);
    for (done, &worker) in old.iter().enumerate() {
        assert_eq!((stage.spawned.len(), stage.drained.len()), (4 + done, done));
        stage.bring_up(stage.newest_worker());
        assert_eq!((stage.drained.last(), stage.bulkhead.limit()), (Some(&worker), 3));
        stage.die(worker, Death::Exit(0));
    }
    assert_eq!((stage.spawned.len(), stage.bulkhead.last_trouble()), (6, ""));
    let recycled = |note: &&Note| matches!(note, Note::WorkerRecycled { reason: RecycleReason::Restart, .. });
    assert_eq!(stage.notes.iter().filter(recycled).count(), 3);
}

// Operator commands.

/// Semantics 6: new and queued jobs are rejected at once, jobs in flight are finished.
#[test]
fn draining_ends_the_queue_and_not_the_work() {
    let mut stage = Stage::ready(limits(1, 1, 1));
    let (running, waiting) = (stage.job(), stage.job());
    stage.apply(Event::Drain);
    stage.expect(waiting, "rejected", Some("draining"));
    assert_eq!((stage.submit(), stage.rejected(RejectReason::Draining)), (None, 2));
    stage.reply(running);
    stage.expect(running, "ok", None);
    stage.apply(Event::Resume);
    let next = stage.job();
    assert!(stage.was_given_out(next));
}

/// Semantics 6: jobs in flight may continue until `by`. After that they end as `crashed/stopped`.
#[test]
fn a_stop_waits_for_work_as_long_as_it_was_told_to() {
    for finishes in [true, false] {
        let mut stage = Stage::ready(limits(1, 1, 1));
        let (worker, running, waiting) = (stage.newest_worker(), stage.job(), stage.job());
        stage.apply(Event::Stop { by: stage.now + 5 * SECOND });
        stage.expect(waiting, "rejected", Some("draining"));
        assert_eq!(stage.drained, [worker]);
        if finishes {
            stage.reply(running);
            stage.die(worker, Death::Exit(0));
            stage.expect(running, "ok", None);
        } else {
            stage.wait(5 * SECOND);
            assert_eq!(stage.killed, [(worker, KillReason::Overdue)]);
            stage.die(worker, Death::Signal(9));
            stage.expect(running, "crashed", Some("stopped"));
        }
        assert!(stage.bulkhead.is_stopped());
        assert_eq!((stage.spawned.len(), stage.bulkhead.next_deadline()), (1, None));
    }
}

/// If the machine gives a worker no processor time, its silence proves nothing, and a kill would add to the
/// load. But the number of such excuses is limited.
#[test]
fn a_starved_worker_is_forgiven_and_a_stuck_one_is_not() {
    for (is_starved, looks) in [(true, 21), (false, 1)] {
        let mut stage = Stage::ready(limits(1, 1, 0));
        let worker = stage.newest_worker();
        while stage.killed.is_empty() {
            let Some(due) = stage.bulkhead.next_deadline() else { panic!("it has no timer any more") };
            stage.now = due;
            let asked = stage.asked.len();
            stage.apply(Event::Tick);
            if stage.asked.len() > asked {
                stage.apply(Event::Looked { worker, is_starved });
            }
        }
        assert_eq!(stage.killed, [(worker, KillReason::Hung)]);
        assert_eq!(stage.asked.len(), looks);
    }
}

/// A worker that ends each job itself has time to do so while a client waits for another of its jobs.
#[test]
fn a_job_that_dies_slowly_does_not_take_its_neighbours_along() {
    for is_answered in [true, false] {
        let numbers = Limits { deadline: SECOND, grace: MS, jobs_end_alone: true, ..limits(1, 2, 0) };
        let mut stage = Stage::ready(numbers);
        let (worker, slow) = (stage.newest_worker(), stage.job());
        stage.wait(900 * MS);
        let other = stage.job();
        stage.wait(900 * MS);
        stage.expect(slow, "deadline_exceeded", Some("running"));
        assert_eq!(stage.killed, []);
        if is_answered {
            stage.reply(other);
            assert_eq!(stage.verdicts(other).len(), 1);
        } else {
            stage.wait(101 * MS);
            stage.expect(other, "deadline_exceeded", Some("running"));
        }
        // Now no client waits for any job of the worker.
        stage.wait(2 * MS);
        assert_eq!(stage.killed, [(worker, KillReason::Deadline)]);
    }
}

/// Each restart is reported with the end of the previous worker, or with the reason for its replacement.
#[test]
fn every_restart_has_its_cause() {
    let mut stage = Stage::ready(Limits { grace: MS, ..limits(1, 1, 0) });
    let deaths = [
        (Death::Exit(3), RestartCause::Exit),
        (Death::Signal(11), RestartCause::Signal),
        (Death::Violation("ptrace"), RestartCause::Violation),
        (Death::Oom, RestartCause::Oom),
        (Death::Overfull, RestartCause::Violation),
    ];
    for (death, cause) in deaths {
        stage.job();
        stage.die(stage.newest_worker(), death);
        assert_eq!(stage.causes.last(), Some(&Some(cause)));
        stage.bring_up(stage.newest_worker());
    }
    // Killed because of a job that does not end.
    stage.job_with(Some(SECOND));
    stage.wait(60 * SECOND);
    stage.die(stage.newest_worker(), Death::Signal(9));
    assert_eq!(stage.causes.last(), Some(&Some(RestartCause::Deadline)));
    stage.bring_up(stage.newest_worker());
    stage.apply(Event::Broke { worker: stage.newest_worker(), message: "rubbish".into() });
    stage.die(stage.newest_worker(), Death::Signal(9));
    stage.wait(SECOND);
    assert_eq!(stage.causes.last(), Some(&Some(RestartCause::Protocol)));
    let worker = stage.newest_worker();
    stage.apply(Event::SpawnFailed { worker, message: "no such file".into() });
    stage.wait(SECOND);
    assert_eq!(stage.causes.last(), Some(&Some(RestartCause::NotStarted)));
    let worker = stage.newest_worker();
    stage.bring_up(worker);
    // The replacement starts first, so the end of the previous worker is no cause of a further restart.
    stage.apply(Event::Restart);
    assert_eq!(stage.causes.last(), Some(&Some(RestartCause::Restart)));
    stage.bring_up(stage.newest_worker());
    stage.die(worker, Death::Exit(0));
    let count = stage.causes.len();
    assert_eq!((stage.bulkhead.restarts() as usize, stage.causes[0]), (count - 1, None));
    assert!(stage.causes[1..].iter().all(Option::is_some));
}
