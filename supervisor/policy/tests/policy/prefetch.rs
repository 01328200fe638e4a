//! Tests of prefetched jobs, and of dispatched jobs that the worker has not started.

use std::time::Duration;

use bulkhead_policy::{
    BreakerLimits, Capabilities, Death, Event, KillReason, LimitChange, Limits, Overflow, Recycle, Reply,
    RetryLimits, Submission, WorkerId,
};
use bulkhead_shared::{Executed, JobId, Priority, Verdict};

use crate::fixture::{Fixture, MS, SECOND, limits};

const ABLE: Capabilities = Capabilities { has_dispatch_thread: true, can_resize: true };

/// Returns a bulkhead with a `lookahead` of 100 ms. Each worker has already completed jobs that took 10 ms.
fn fixture(limits: Limits) -> Fixture {
    let mut fixture = Fixture::starting(Limits { lookahead: 100 * MS, ..limits });
    for worker in fixture.spawned.clone() {
        fixture.bring_up_with_journal(worker, ABLE);
    }
    let workers = fixture.spawned.len();
    warm_up(&mut fixture, workers);
    fixture
}

fn warm_up(fixture: &mut Fixture, workers: usize) {
    for _ in 0..20 {
        let jobs = jobs(fixture, workers);
        fixture.wait(10 * MS);
        jobs.into_iter().for_each(|job| fixture.reply(job));
    }
}

fn jobs(fixture: &mut Fixture, count: usize) -> Vec<JobId> {
    (0..count).map(|_| fixture.job()).collect()
}

fn prefetched(fixture: &Fixture) -> Vec<JobId> {
    fixture.prefetched.iter().map(|&(_, job)| job).collect()
}

/// Returns a bulkhead whose first worker is stuck and starts no further jobs. Also returns the ID of this worker.
fn beside_a_stuck_one(limits: Limits) -> (Fixture, WorkerId) {
    let mut fixture = fixture(limits);
    let stuck = fixture.spawned[0];
    fixture.set_stuck(stuck, true);
    (fixture, stuck)
}

#[test]
fn each_reply_starts_the_oldest_prefetched_job() {
    let mut fixture = fixture(limits(1, 1, 10));
    let jobs = jobs(&mut fixture, 4);
    assert_eq!(prefetched(&fixture), jobs[1..]);
    let is_in_flight = |fixture: &mut Fixture, job| {
        let worker = fixture.holder(job);
        fixture.bulkhead.holds(worker, job)
    };
    for (at, &job) in jobs.iter().enumerate() {
        assert_eq!(fixture.bulkhead.queued(), 3 - at);
        assert_eq!(fixture.bulkhead.in_flight(), 1);
        assert!(is_in_flight(&mut fixture, job));
        fixture.reply(job);
        fixture.expect(job, "ok", None);
    }
}

#[test]
fn reply_to_a_job_not_yet_started_kills_the_worker() {
    let mut fixture = fixture(limits(1, 1, 10));
    let jobs = jobs(&mut fixture, 3);
    fixture.reply(jobs[2]);
    assert!(matches!(fixture.killed[..], [(_, KillReason::Protocol(_))]));
    // The job has run, so it is not sent to another worker.
    fixture.expect(jobs[2], "crashed", Some("protocol"));
}

#[test]
fn prefetching_stops_above_the_limit() {
    let mut fixture = fixture(limits(2, 1, 20));
    let first = fixture.spawned[0];
    let jobs = jobs(&mut fixture, 8);
    let (runs, runs_elsewhere): (Vec<_>, Vec<_>) =
        jobs[..2].iter().copied().partition(|&job| fixture.holder(job) == first);
    let before = prefetched(&fixture);
    assert!(!before.is_empty());
    fixture.apply(Event::ChangeLimits(LimitChange { processes: Some(1), ..LimitChange::default() }));
    assert!(before.iter().all(|job| fixture.recalled_jobs.contains(job)));
    let sent = fixture.sent.len();
    fixture.reply(runs[0]);
    assert_eq!(
        fixture.sent.len(),
        sent,
        "no job must be sent while the number of running jobs is at the limit"
    );
    fixture.reply(runs_elsewhere[0]);
    assert!(fixture.sent.len() > sent);
}

#[test]
fn evict_oldest_disables_prefetching() {
    let mut fixture = fixture(Limits { overflow: Overflow::EvictOldest, ..limits(1, 1, 3) });
    let jobs = jobs(&mut fixture, 4);
    assert!(prefetched(&fixture).is_empty());
    assert!(fixture.submit().is_some());
    fixture.expect(jobs[1], "rejected", Some("evicted"));
}

#[test]
fn prefetch_requires_support_and_a_completed_job() {
    let mut fixture = Fixture::ready(Limits { lookahead: 100 * MS, ..limits(1, 1, 10) });
    warm_up(&mut fixture, 1);
    jobs(&mut fixture, 3);
    assert!(fixture.prefetched.is_empty());
    let mut fixture = Fixture::starting(Limits { lookahead: 100 * MS, ..limits(1, 1, 10) });
    fixture.bring_up_with_journal(fixture.newest_worker(), ABLE);
    jobs(&mut fixture, 3);
    assert!(fixture.prefetched.is_empty());
}

#[test]
fn prefetch_depth_follows_run_time() {
    let mut fixture = fixture(limits(1, 1, 1000));
    jobs(&mut fixture, 500);
    let many = fixture.prefetched.len();
    assert!((8..=13).contains(&many), "{many} jobs of 10 ms were prefetched with a lookahead of 100 ms");
    let mut slow = Fixture::starting(Limits { lookahead: 5 * MS, ..limits(1, 1, 10) });
    slow.bring_up_with_journal(slow.newest_worker(), ABLE);
    warm_up(&mut slow, 1);
    jobs(&mut slow, 3);
    assert!(slow.prefetched.is_empty(), "a job of 10 ms must not be prefetched with a lookahead of 5 ms");
}

#[test]
fn late_prefetched_job_moves_to_an_idle_worker() {
    let mut fixture = fixture(limits(2, 1, 10));
    let jobs = jobs(&mut fixture, 6);
    let slow = fixture.holder(jobs[0]);
    let (of_slow, of_other): (Vec<_>, Vec<_>) =
        fixture.prefetched.clone().into_iter().partition(|(worker, _)| *worker == slow);
    assert_eq!((of_slow.len(), of_other.len()), (2, 2), "both workers must have prefetched two jobs");
    fixture.wait(101 * MS);
    assert!(fixture.recalled_jobs.is_empty(), "no job must be recalled if no other worker can start it");
    fixture.reply(jobs[1]);
    of_other.iter().for_each(|&(_, job)| fixture.reply(job));
    assert_eq!(fixture.recalled_jobs, [of_slow[1].1, of_slow[0].1]);
    let worker = fixture.holder(jobs[1]);
    assert!(
        fixture.bulkhead.holds(worker, of_slow[0].1),
        "the other worker must have been given the oldest recalled job"
    );
    assert_eq!(fixture.holder(of_slow[1].1), worker, "the other worker must have prefetched the rest");
}

#[test]
fn critical_job_overtakes_prefetched_jobs() {
    let mut fixture = fixture(limits(1, 1, 10));
    let first = fixture.job();
    let normal = jobs(&mut fixture, 3);
    let critical = fixture.submit_as(Priority::Critical, "").unwrap();
    assert_eq!(fixture.recalled_jobs, [normal[2], normal[1], normal[0]]);
    fixture.reply(first);
    assert!(fixture.bulkhead.holds(fixture.holder(first), critical));
    // Recalled jobs are put at the front of their priority class.
    fixture.reply(critical);
    assert!(fixture.bulkhead.holds(fixture.holder(first), normal[0]));
}

#[test]
fn prefetching_stops_if_another_tenant_waits() {
    let mut fixture = fixture(limits(1, 1, 10));
    let first = fixture.submit_as(Priority::Normal, "a").unwrap();
    let second = fixture.submit_as(Priority::Normal, "a").unwrap();
    let of_other = fixture.submit_as(Priority::Normal, "b").unwrap();
    let last = fixture.submit_as(Priority::Normal, "a").unwrap();
    assert_eq!(prefetched(&fixture), [second]);
    fixture.reply(first);
    fixture.reply(second);
    assert!(fixture.was_dispatched(of_other) && !prefetched(&fixture).contains(&last));
}

#[test]
fn cancelled_or_late_prefetched_job_ends_as_not_executed() {
    let mut fixture = fixture(limits(1, 1, 10));
    let first = fixture.job();
    let cancelled = fixture.job();
    let late = fixture.job_with(Some(SECOND));
    assert_eq!(prefetched(&fixture), [cancelled, late]);
    fixture.apply(Event::Cancel { job: cancelled, unless_begun: false });
    assert_eq!(fixture.verdicts(cancelled), [&Verdict::Cancelled { executed: Executed::No }]);
    fixture.wait(SECOND);
    fixture.expect(late, "deadline_exceeded", Some("queued"));
    assert_eq!(fixture.bulkhead.queued(), 0);
    assert!(fixture.outcomes.iter().rev().take(2).all(|answer| answer.attempts == 0));
    fixture.reply(first);
    assert!(fixture.bulkhead.has_no_jobs() && fixture.killed.is_empty());
}

#[test]
fn prefetched_job_started_early_counts_as_executed() {
    let mut fixture = fixture(limits(1, 1, 10));
    let first = fixture.job();
    let (cancelled, late) = (fixture.job(), fixture.job_with(Some(SECOND)));
    let worker = fixture.holder(first);
    // The worker has started both jobs, and its replies are in transit.
    fixture.journal.get_mut(&worker).unwrap().begun.0.fetch_add(2, std::sync::atomic::Ordering::Relaxed);
    fixture.apply(Event::Cancel { job: cancelled, unless_begun: true });
    assert!(
        fixture.verdicts(cancelled).is_empty(),
        "the job has started, so it must not have an outcome yet"
    );
    fixture.apply(Event::Cancel { job: cancelled, unless_begun: false });
    assert_eq!(fixture.verdicts(cancelled), [&Verdict::Cancelled { executed: Executed::Yes }]);
    fixture.wait(SECOND);
    fixture.expect(late, "deadline_exceeded", Some("running"));
    let told: Vec<_> = fixture.outcomes.iter().map(|answer| (answer.attempts, answer.worker_pid)).collect();
    assert_eq!(told[told.len() - 2..], [(1, Some(100 + worker.generation)); 2]);
    for job in [first, cancelled, late] {
        fixture.apply(Event::Replied { worker, job, reply: Reply::Ok });
    }
    assert!(fixture.bulkhead.has_no_jobs());
}

#[test]
fn run_limit_restarts_for_a_job_not_yet_started() {
    let mut fixture = fixture(limits(1, 1, 10));
    let worker = fixture.spawned[0];
    fixture.set_stuck(worker, true);
    let job = fixture.job_that_runs_for(MS);
    fixture.now = fixture.now + MS;
    fixture.apply(Event::Tick);
    assert_eq!((&fixture.recalled_jobs[..], fixture.verdicts(job).len()), (&[job][..], 0));
    fixture.set_stuck(worker, false);
    fixture.wait(5 * MS);
    assert_eq!(fixture.bulkhead.queued(), 1, "the worker must not get any job before its next sign of life");
    fixture.apply(Event::FrameReceived { worker });
    fixture.wait(MS);
    fixture.expect(job, "deadline_exceeded", Some("running"));
}

/// Otherwise, a job whose run limit is shorter than the time that a worker needs to start it would be sent again and
/// again until its deadline.
#[test]
fn job_ends_when_its_run_limit_has_restarted_too_often() {
    let mut fixture = fixture(limits(1, 1, 10));
    let worker = fixture.spawned[0];
    fixture.set_stuck(worker, true);
    let job = fixture.job_that_runs_for(MS);
    for _ in 0..10 {
        assert_eq!(fixture.verdicts(job).len(), 0);
        fixture.now = fixture.now + MS;
        fixture.apply(Event::Tick);
        fixture.apply(Event::FrameReceived { worker });
    }
    fixture.expect(job, "deadline_exceeded", Some("queued"));
    assert_eq!(fixture.outcomes.last().map(|answer| answer.attempts), Some(0));
    fixture.set_stuck(worker, false);
    let next = fixture.job();
    fixture.reply(next);
    fixture.expect(next, "ok", None);
}

/// The recall of prefetched jobs also takes back the job that holds the permit, because the worker has not started it.
#[test]
fn suspect_runs_at_once_in_a_worker_idle_after_a_recall() {
    let retry = Some(RetryLimits { attempts: 2, budget: 1.0 });
    let (mut fixture, stuck) = beside_a_stuck_one(Limits { retry, ..limits(2, 1, 10) });
    let other = fixture.spawned[1];
    let (held, suspect) = (fixture.job(), fixture.idempotent_job());
    jobs(&mut fixture, 2);
    assert_eq!((fixture.holder(held), fixture.holder(suspect)), (stuck, other));
    assert!(fixture.prefetched.iter().any(|&(worker, _)| worker == stuck));
    fixture.exit_worker(other, Death::Signal(11));
    assert_eq!(fixture.holder(suspect), stuck);
}

#[test]
fn cancel_unless_begun_ignores_a_retry_not_yet_started() {
    let retry = Some(RetryLimits { attempts: 2, budget: 1.0 });
    let mut fixture = fixture(Limits { retry, ..limits(2, 1, 10) });
    let (first, second) = (fixture.spawned[0], fixture.spawned[1]);
    fixture.set_stuck(second, true);
    let job = fixture.idempotent_job();
    fixture.exit_worker(first, Death::Signal(11));
    assert_eq!(fixture.holder(job), second);
    fixture.apply(Event::Cancel { job, unless_begun: true });
    assert_eq!((fixture.verdicts(job).len(), fixture.recalled_jobs.len()), (0, 0));
    fixture.apply(Event::Cancel { job, unless_begun: false });
    assert_eq!(fixture.verdicts(job), [&Verdict::Cancelled { executed: Executed::Yes }]);
}

#[test]
fn death_crashes_running_jobs_and_requeues_prefetched_jobs() {
    let mut fixture = fixture(limits(1, 1, 10));
    let first = fixture.job();
    let others = jobs(&mut fixture, 3);
    fixture.exit_worker(fixture.holder(first), Death::Signal(11));
    fixture.expect(first, "crashed", Some("signal"));
    assert_eq!(fixture.bulkhead.queued(), 3);
    fixture.bring_up_with_journal(fixture.newest_worker(), ABLE);
    for job in others {
        fixture.reply(job);
        fixture.expect(job, "ok", None);
    }
}

/// After a protocol violation, the supervisor no longer reads the worker's replies. The bulkhead therefore still treats
/// jobs that the worker has started in the meantime as prefetched.
#[test]
fn started_prefetched_job_does_not_run_twice() {
    let mut fixture = fixture(limits(1, 1, 10));
    let first = fixture.job();
    let others = jobs(&mut fixture, 2);
    let worker = fixture.holder(first);
    let journal = &fixture.journal[&worker];
    journal.begun.0.store(journal.count - 1, std::sync::atomic::Ordering::Relaxed);
    fixture.apply(Event::ProtocolViolated { worker, message: "invalid frame".into() });
    fixture.exit_worker(worker, Death::Signal(9));
    fixture.expect(first, "crashed", Some("protocol"));
    fixture.expect(others[0], "crashed", Some("protocol"));
    assert_eq!(fixture.outcomes.last().unwrap().attempts, 1);
    fixture.bring_up_with_journal(fixture.newest_worker(), ABLE);
    fixture.reply(others[1]);
    fixture.expect(others[1], "ok", None);
}

#[test]
fn prefetch_respects_recycle_jobs() {
    let recycle = Recycle { jobs: Some(24), ..Recycle::default() };
    let mut fixture = fixture(Limits { recycle, ..limits(1, 1, 10) });
    // Twenty jobs have been completed.
    jobs(&mut fixture, 8);
    assert_eq!(fixture.prefetched.len(), 3);
}

#[test]
fn running_and_prefetched_jobs_respect_recycle_jobs() {
    let recycle = Recycle { jobs: Some(24), ..Recycle::default() };
    let mut fixture = fixture(Limits { recycle, ..limits(1, 1, 10) });
    let worker = fixture.spawned[0];
    let jobs = jobs(&mut fixture, 8);
    assert_eq!(jobs.iter().filter(|&&job| fixture.sent.contains(&(worker, job))).count(), 4);
    fixture.apply(Event::ChangeLimits(LimitChange { max_in_flight: Some(4), ..LimitChange::default() }));
    assert_eq!(
        fixture.bulkhead.in_flight(),
        4,
        "the recalled jobs must be dispatched to the same worker again"
    );
}

#[test]
fn prefetched_jobs_count_towards_max_queue() {
    let mut fixture = fixture(limits(1, 1, 3));
    let first = fixture.job();
    let normal = jobs(&mut fixture, 3);
    assert_eq!((fixture.submit(), fixture.last_reason()), (None, Some("queue_full")));
    // A normal job is rejected to make room for a job of a higher class.
    let critical = fixture.submit_as(Priority::Critical, "").unwrap();
    fixture.expect(normal[2], "rejected", Some("shed"));
    for job in [first, critical, normal[0], normal[1]] {
        fixture.reply(job);
        fixture.expect(job, "ok", None);
    }
}

fn recalls_all_prefetched_jobs(mut fixture: Fixture, event: Event<u32>) -> (Fixture, WorkerId, Vec<JobId>) {
    let first = fixture.job();
    let others = jobs(&mut fixture, 2);
    assert_eq!(prefetched(&fixture), others);
    fixture.apply(event);
    assert_eq!(fixture.recalled_jobs, [others[1], others[0]]);
    let worker = fixture.holder(first);
    (fixture, worker, others)
}

#[test]
fn limit_changes_recall_prefetched_jobs() {
    let change = LimitChange { max_in_flight: Some(2), ..LimitChange::default() };
    let (fixture, worker, _) =
        recalls_all_prefetched_jobs(self::fixture(limits(1, 1, 10)), Event::ChangeLimits(change));
    assert_eq!(fixture.resized, [(worker, 2)]);
    let (fixture, _, others) = recalls_all_prefetched_jobs(self::fixture(limits(1, 1, 10)), Event::Drain);
    for job in others {
        fixture.expect(job, "rejected", Some("draining"));
    }
    let breaker = BreakerLimits {
        window: 10 * SECOND,
        min_calls: 1000,
        failure_rate: 1.0,
        slow_call: None,
        slow_rate: 1.0,
        open_for: Duration::from_secs(5),
        probes: 1,
    };
    let limits = Limits { breaker: Some(breaker), ..limits(1, 1, 10) };
    let (mut fixture, ..) =
        recalls_all_prefetched_jobs(self::fixture(limits), Event::ForceBreaker { open: true });
    let first = fixture.dispatched.last().unwrap().1;
    fixture.reply(first);
    assert_eq!(fixture.bulkhead.in_flight(), 0, "an open breaker must not let any job pass");
}

#[test]
fn worker_journal_alone_cannot_quarantine_a_payload() {
    let poison = bulkhead_policy::PoisonLimits { crashes: 1, within: 60 * SECOND };
    let mut fixture = fixture(Limits { poison: Some(poison), ..limits(1, 2, 10) });
    let (one, other) = (fixture.submit_payload(1).unwrap(), fixture.submit_payload(2).unwrap());
    let worker = fixture.holder(one);
    fixture.apply(Event::JobNotBegun { worker, job: other });
    fixture.exit_worker(worker, Death::Signal(11));
    assert_eq!(fixture.bulkhead.quarantined(fixture.now), 0);
    fixture.expect(one, "crashed", Some("signal"));
    assert!(fixture.verdicts(other).is_empty(), "the job must wait for the next worker");
}

// Jobs that were dispatched with a permit but have not started.

#[test]
fn job_not_yet_started_moves_to_an_idle_worker() {
    let (mut fixture, stuck) = beside_a_stuck_one(limits(2, 1, 10));
    let job = fixture.job();
    assert_eq!(fixture.holder(job), stuck);
    fixture.wait(102 * MS);
    assert_eq!(fixture.recalled_jobs, [job]);
    assert_ne!(fixture.holder(job), stuck);
    fixture.reply(job);
    fixture.expect(job, "ok", None);
    assert_eq!(
        fixture.outcomes.last().unwrap().attempts,
        1,
        "a dispatch to a worker that did not start the job must not count"
    );
    // The stuck worker gets no jobs until its next sign of life.
    let next = jobs(&mut fixture, 2);
    assert!(next.iter().all(|&job| fixture.sent.last().unwrap().0 != stuck && fixture.holder(job) != stuck));
    fixture.set_stuck(stuck, false);
    fixture.apply(Event::FrameReceived { worker: stuck });
    let last = fixture.job();
    assert_eq!(fixture.holder(last), stuck);
}

#[test]
fn job_not_yet_started_stays_if_no_other_worker_is_free() {
    let (mut fixture, stuck) = beside_a_stuck_one(limits(2, 1, 10));
    let (first, second) = (fixture.job(), fixture.job());
    fixture.wait(300 * MS);
    assert_eq!((fixture.holder(first), fixture.recalled_jobs.len()), (stuck, 0));
    fixture.reply(second);
    assert_eq!((fixture.recalled_jobs[0], fixture.holder(first)), (first, fixture.holder(second)));
}

#[test]
fn job_not_yet_started_ends_without_killing_its_worker() {
    for in_flight in [1, 3] {
        let (mut fixture, _) = beside_a_stuck_one(limits(1, in_flight, 10));
        let late = fixture.job_with(Some(SECOND));
        let others = jobs(&mut fixture, in_flight as usize - 1);
        fixture.wait(SECOND);
        fixture.expect(late, "deadline_exceeded", Some("queued"));
        let cancelled = fixture.job();
        fixture.apply(Event::Cancel { job: cancelled, unless_begun: true });
        assert_eq!(fixture.verdicts(cancelled), [&Verdict::Cancelled { executed: Executed::No }]);
        assert!(others.iter().all(|&job| fixture.verdicts(job).is_empty()), "the other jobs must wait");
        fixture.wait(2 * SECOND);
        assert!(fixture.killed.is_empty(), "{:?}", fixture.killed);
    }
}

#[test]
fn job_waits_for_a_stalled_worker_even_without_queue() {
    let (mut fixture, stuck) = beside_a_stuck_one(limits(2, 1, 0));
    let moved = fixture.job();
    fixture.wait(102 * MS);
    assert_ne!(fixture.holder(moved), stuck);
    let waits = fixture.submit().expect("the job must wait for the stalled worker's permit");
    assert!(fixture.verdicts(waits).is_empty());
    fixture.reply(moved);
    fixture.reply(waits);
    fixture.expect(waits, "ok", None);
}

#[test]
fn used_permits_of_a_stalled_worker_do_not_extend_the_queue() {
    let (mut fixture, _stuck) = beside_a_stuck_one(limits(2, 2, 1));
    // All permits of both workers are in use, and the first worker has not started its second job.
    let jobs = jobs(&mut fixture, 4);
    fixture.wait(102 * MS);
    let queued = fixture.job();
    assert!(fixture.verdicts(queued).is_empty());
    let excess = fixture.submit();
    assert!(fixture.bulkhead.workers(fixture.now).iter().any(|worker| worker.is_stalled));
    assert!(excess.is_none(), "the queue must have only one place");
    assert!(jobs.iter().all(|&job| fixture.verdicts(job).is_empty()));
}

#[test]
fn job_without_payload_copy_is_not_prefetched() {
    let mut fixture = fixture(limits(1, 1, 10));
    let _running = fixture.job();
    fixture.submitted += 1;
    let submission = Submission { is_resendable: false, ..Submission::new(fixture.submitted) };
    let job = fixture.apply(Event::Submit(submission)).unwrap();
    assert!(prefetched(&fixture).is_empty() && fixture.bulkhead.queued() == 1);
    assert!(fixture.verdicts(job).is_empty());
}

#[test]
fn immediate_cancellation_keeps_worker_available() {
    for workers in [1, 2] {
        let mut fixture = fixture(limits(workers, 2, 0));
        for worker in fixture.spawned.clone() {
            fixture.set_stuck(worker, true);
        }
        let _held = jobs(&mut fixture, 2 * workers as usize - 1);
        for _ in 0..3 {
            let cancelled = fixture.job();
            fixture.apply(Event::Cancel { job: cancelled, unless_begun: false });
            fixture.expect(cancelled, "cancelled", None);
        }
    }
}

#[test]
fn drain_keeps_dispatched_jobs_that_have_not_started() {
    let (mut fixture, stuck) = beside_a_stuck_one(limits(1, 2, 10));
    let all = jobs(&mut fixture, 4);
    fixture.apply(Event::Drain);
    assert!(all[2..].iter().all(|&job| fixture.verdicts(job).len() == 1), "the waiting jobs must have ended");
    fixture.set_stuck(stuck, false);
    for &job in &all[..2] {
        assert!(fixture.bulkhead.holds(stuck, job));
        fixture.reply(job);
        fixture.expect(job, "ok", None);
    }
}

#[test]
fn job_without_payload_copy_stays_with_its_worker() {
    let (mut fixture, stuck) = beside_a_stuck_one(limits(2, 1, 10));
    fixture.submitted += 1;
    let submission = Submission { is_resendable: false, ..Submission::new(fixture.submitted) };
    let job = fixture.apply(Event::Submit(submission)).unwrap();
    fixture.wait(SECOND);
    assert_eq!((fixture.holder(job), fixture.recalled_jobs.len()), (stuck, 0));
    fixture.apply(Event::Cancel { job, unless_begun: false });
    assert_eq!(fixture.verdicts(job), [&Verdict::Cancelled { executed: Executed::No }]);
}

#[test]
fn reply_to_a_recalled_job_kills_the_worker() {
    let (mut fixture, stuck) = beside_a_stuck_one(limits(2, 1, 10));
    let job = fixture.job();
    fixture.wait(102 * MS);
    fixture.apply(Event::Replied { worker: stuck, job, reply: Reply::Ok });
    assert!(matches!(fixture.killed[..], [(worker, KillReason::Protocol(_))] if worker == stuck));
    fixture.reply(job);
    fixture.expect(job, "ok", None);
}

/// A job is recalled from one worker and then prefetched to another. The first worker is killed, because it sends a
/// result for the recalled job.
#[test]
fn stale_reply_to_moved_job_does_not_affect_the_new_worker() {
    let (mut fixture, stuck) = beside_a_stuck_one(limits(2, 1, 10));
    let all = jobs(&mut fixture, 6);
    let other = fixture.spawned[1];
    let held = |fixture: &mut Fixture| all.iter().copied().find(|&job| fixture.bulkhead.holds(other, job));
    fixture.wait(300 * MS);
    while fixture.recalled_jobs.is_empty() {
        let running = held(&mut fixture).expect("the other worker's permit must be in use");
        fixture.reply(running);
    }
    let is_elsewhere =
        |job: &&JobId| fixture.recalled_jobs.contains(job) && prefetched(&fixture).contains(job);
    let moved =
        *all.iter().find(is_elsewhere).expect("the recalled job must be prefetched to the other worker");
    fixture.apply(Event::Replied { worker: stuck, job: moved, reply: Reply::Ok });
    assert!(matches!(fixture.killed[..], [(worker, KillReason::Protocol(_))] if worker == stuck));
    fixture.exit_worker(stuck, Death::Signal(9));
    while let Some(running) = held(&mut fixture) {
        fixture.reply(running);
    }
    all.iter().for_each(|&job| fixture.expect(job, "ok", None));
}

#[test]
fn implausible_journal_kills_the_worker() {
    for says in [0, 1000] {
        let (mut fixture, stuck) = beside_a_stuck_one(limits(1, 1, 10));
        let job = fixture.job();
        fixture.journal[&stuck].begun.0.store(says, std::sync::atomic::Ordering::Relaxed);
        fixture.apply(Event::Cancel { job, unless_begun: false });
        assert!(matches!(fixture.killed[..], [(_, KillReason::Protocol(_))]), "{says}");
    }
}

#[test]
fn job_started_during_recall_is_returned_once() {
    let (mut fixture, stuck) = beside_a_stuck_one(limits(1, 2, 10));
    let all = jobs(&mut fixture, 2);
    let first = fixture.journal[&stuck].count - 1;
    fixture.journal[&stuck].begun.0.store(first, std::sync::atomic::Ordering::Relaxed);
    fixture.apply(Event::Cancel { job: all[1], unless_begun: false });
    // The worker was about to start the first job when the job was recalled.
    fixture.apply(Event::JobReturned { worker: stuck, job: all[0], send_number: first });
    assert_eq!(
        fixture.sent.iter().filter(|(_, job)| *job == all[0]).count(),
        2,
        "the job must be sent again"
    );
    fixture.apply(Event::JobReturned { worker: stuck, job: all[0], send_number: first });
    assert!(
        fixture.bulkhead.holds(stuck, all[0]),
        "a return with the number of an earlier dispatch must be ignored"
    );
    assert!(fixture.killed.is_empty());
    let send_number = fixture.journal[&stuck].count;
    fixture.apply(Event::JobReturned { worker: stuck, job: all[0], send_number });
    assert!(
        matches!(fixture.killed[..], [(_, KillReason::Protocol(_))]),
        "a worker that returns a job that was not recalled must be killed"
    );
}
