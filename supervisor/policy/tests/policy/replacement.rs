//! Tests of replaced workers: number of running jobs during a replacement, workers that hang at exit, and
//! `recycle.jobs`.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::fixture::{Fixture, MS, SECOND, limits};
use bulkhead_policy::{
    Capabilities, Death, Event, KillReason, LimitChange, Limits, OperatorEvent, RecycleReason, RestartCause,
    RestartPolicy, WorkerId,
};
use bulkhead_shared::JobId;

// Workers that hang at exit.

/// Runs one job in each worker, and returns the bulkhead after all outcomes have been sent. None of the workers exits.
fn served_by_workers_that_hang_at_exit(count: u32) -> Fixture {
    let mut limits = limits(1, 1, count);
    limits.recycle.jobs = Some(1);
    let mut fixture = Fixture::ready(limits);
    let jobs: Vec<_> = (0..count).map(|_| fixture.job()).collect();
    for (nth, &job) in jobs.iter().enumerate() {
        if nth > 0 {
            fixture.bring_up(fixture.newest_worker());
        }
        assert!(fixture.was_dispatched(job), "job {nth} must not wait for a worker to exit");
        fixture.reply(job);
    }
    fixture
}

#[test]
fn worker_that_hangs_at_exit_does_not_delay_jobs() {
    let fixture = served_by_workers_that_hang_at_exit(10);
    assert!(fixture.killed.is_empty(), "{:?}", fixture.killed);
}

#[test]
fn kills_oldest_workers_that_hang_at_exit() {
    let mut fixture = served_by_workers_that_hang_at_exit(20);
    let all = fixture.spawned.clone();
    let killed: Vec<_> = fixture.killed.iter().map(|(worker, _)| *worker).collect();
    // The last of the twenty workers fills the slot, and sixteen other workers may still be exiting.
    assert_eq!(killed, all[..3]);
    fixture.bring_up(fixture.newest_worker());
    assert_eq!(fixture.killed.len(), 4);
    assert!(fixture.killed.iter().all(|(_, reason)| *reason == KillReason::ExitTimeout));
}

// The limit across generations.

/// Returns a bulkhead whose workers are being replaced one after another. Each of the two old workers has a job, and
/// two more jobs are waiting.
fn replaced(order: impl Fn(&mut Fixture), limits: Limits) -> (Fixture, Vec<JobId>, Vec<JobId>) {
    let mut fixture = Fixture::ready(limits);
    let running: Vec<_> = (0..2).map(|_| fixture.job()).collect();
    let old: Vec<_> = running.iter().map(|&job| fixture.holder(job)).collect();
    order(&mut fixture);
    let mut brought_up = 2;
    while let Some(&worker) = fixture.spawned.get(brought_up) {
        fixture.bring_up(worker);
        brought_up += 1;
    }
    let drained: BTreeSet<_> = fixture.drained.iter().collect();
    assert_eq!((brought_up, drained), (4, old.iter().collect()), "all workers must be replaced");
    let waiting = (0..2).map(|_| fixture.job()).collect();
    (fixture, running, waiting)
}

/// Checks a rule in `docs/semantics.md`: at any time, at most `processes` x `max_in_flight` jobs are running, even
/// while workers are recycled, restarted or replaced because of a new program.
#[test]
fn limit_holds_while_workers_are_replaced() {
    let age = |limits: Limits| {
        let mut limits = limits;
        limits.recycle.age = Some(SECOND);
        limits
    };
    let restart: fn(&mut Fixture) = |fixture| {
        fixture.apply(Event::Restart);
    };
    let reload: fn(&mut Fixture) = |fixture| {
        fixture.apply(Event::ReplaceWorkers);
    };
    let recycle: fn(&mut Fixture) = |fixture| fixture.wait(SECOND);
    let two = limits(2, 1, 4);
    for (order, limits) in [(restart, two.clone()), (reload, two.clone()), (recycle, age(two))] {
        let (mut fixture, running, waiting) = replaced(order, limits);
        let held = |fixture: &Fixture| (fixture.bulkhead.in_flight(), fixture.bulkhead.limit());
        assert!(
            waiting.iter().all(|&job| !fixture.was_dispatched(job)),
            "more jobs would run than the limit allows"
        );
        assert_eq!((held(&fixture), fixture.bulkhead.available()), ((2, 2), 0));
        fixture.reply(running[1]);
        assert!(fixture.was_dispatched(waiting[0]) && !fixture.was_dispatched(waiting[1]));
        assert_eq!((held(&fixture), fixture.bulkhead.available()), ((2, 2), 0));
        fixture.exit_worker(fixture.holder(running[0]), Death::Signal(11));
        assert!(fixture.was_dispatched(waiting[1]), "the permit of the dead worker must be free");
        waiting.iter().for_each(|&job| fixture.reply(job));
        assert_eq!(fixture.bulkhead.available(), 2);
    }
}

/// A worker that was sent SIGKILL before another worker took over its slot does not reduce the permits of that other
/// worker. A worker that is killed later holds its permits until it has exited.
#[test]
fn worker_killed_before_replacement_does_not_add_overcommit() {
    for is_killed_first in [true, false] {
        let mut fixture = Fixture::ready(limits(1, 1, 1));
        let (old, job) = (fixture.newest_worker(), fixture.job_with(Some(SECOND)));
        fixture.apply(Event::Restart);
        let new = fixture.newest_worker();
        let kill = |fixture: &mut Fixture| {
            fixture.wait(SECOND + 200 * MS);
            assert_eq!(fixture.killed, [(old, KillReason::Deadline)]);
        };
        if is_killed_first {
            kill(&mut fixture);
            fixture.bring_up(new);
        } else {
            fixture.bring_up(new);
            kill(&mut fixture);
        }
        fixture.expect(job, "deadline_exceeded", Some("running"));
        let next = fixture.job();
        assert_eq!(fixture.was_dispatched(next), is_killed_first);
        fixture.exit_worker(old, Death::Signal(9));
        assert_eq!(fixture.holder(next), new);
    }
}

/// The jobs of a replaced worker are charged only to the slot that the worker filled, even if the slot's new worker has
/// also exited.
#[test]
fn jobs_of_a_replaced_worker_are_charged_to_its_slot() {
    let mut fixture = Fixture::ready(limits(2, 2, 4));
    let jobs: Vec<_> = (0..4).map(|_| fixture.job()).collect();
    fixture.apply(Event::Restart);
    let new = fixture.newest_worker();
    fixture.bring_up(new);
    let other = fixture.holder(jobs[1]);
    fixture.reply(jobs[1]);
    let next = fixture.job();
    assert_eq!(fixture.bulkhead.in_flight(), 4);
    assert_eq!(fixture.holder(next), new);
    fixture.exit_worker(new, Death::Signal(11));
    fixture.reply(jobs[3]);
    let (one, two) = (fixture.job(), fixture.job());
    assert_eq!((fixture.holder(one), fixture.holder(two)), (other, other));
    assert_eq!((fixture.bulkhead.in_flight(), fixture.bulkhead.limit()), (4, 2));
}

// Workers that are starting when a restart begins.

/// Returns the workers that were started before the most recent restart.
fn outdated(fixture: &Fixture) -> Vec<WorkerId> {
    let views = fixture.bulkhead.workers(fixture.now);
    views.iter().filter(|view| view.is_outdated).map(|view| view.id).collect()
}

/// A worker that is still starting when a restart is requested might have read an old secret, so it is replaced.
/// Workers that were started after the restart are not replaced again.
#[test]
fn restart_replaces_workers_that_are_starting_only_once() {
    for is_draining in [false, true] {
        let mut fixture = Fixture::starting(limits(3, 1, 0));
        let [serving, initializing, spawning] = fixture.spawned[..] else {
            panic!("three workers must start")
        };
        fixture.bring_up(serving);
        fixture.apply(Event::Spawned { worker: initializing, pid: 1 });
        fixture.apply(Event::Hello {
            worker: initializing,
            capabilities: Capabilities::default(),
            journal: None,
        });
        if is_draining {
            fixture.apply(Event::Drain);
        }
        fixture.apply(Event::Restart);
        let not_needed = |worker| (worker, KillReason::NotNeeded);
        assert_eq!(fixture.killed, [not_needed(initializing), not_needed(spawning)]);
        assert_eq!(outdated(&fixture), [serving, initializing, spawning]);
        let successor = fixture.newest_worker();
        for worker in [initializing, spawning] {
            fixture.exit_worker(worker, Death::Signal(9));
            fixture.bring_up(fixture.newest_worker());
        }
        assert_eq!((outdated(&fixture), &fixture.drained), (vec![serving], &vec![]));
        fixture.bring_up(successor);
        fixture.exit_worker(serving, Death::Exit(0));
        fixture.wait(SECOND);
        assert_eq!((fixture.spawned.len(), fixture.killed.len(), &fixture.drained), (6, 2, &vec![serving]));
        assert_eq!((outdated(&fixture), fixture.bulkhead.limit()), (vec![], 3));
    }
}

/// A successor that was started before a restart does not take over the slot, regardless of why it was started.
#[test]
fn restart_kills_starting_successors() {
    let restart: fn(&mut Fixture) = |fixture| {
        fixture.apply(Event::Restart);
    };
    let recycle: fn(&mut Fixture) = |fixture| fixture.wait(SECOND);
    let work: fn(&mut Fixture) = |fixture| fixture.reply_to_next();
    for (start_successor, jobs, age) in
        [(restart, None, None), (recycle, None, Some(SECOND)), (work, Some(3), None)]
    {
        let mut limits = limits(1, 1, 0);
        (limits.recycle.jobs, limits.recycle.age) = (jobs, age);
        let mut fixture = Fixture::ready(limits);
        let old = fixture.newest_worker();
        start_successor(&mut fixture);
        let (successor, started) = (fixture.newest_worker(), fixture.spawned.len());
        assert_ne!(successor, old);
        fixture.apply(Event::Restart);
        assert_eq!(fixture.killed, [(successor, KillReason::NotNeeded)]);
        fixture.reply_to_next();
        fixture.exit_worker(successor, Death::Signal(9));
        assert_eq!(fixture.spawned.len(), started + 1, "the next successor must be started immediately");
        let new = fixture.newest_worker();
        fixture.bring_up(new);
        assert_eq!(fixture.drained, [old]);
        let job = fixture.job();
        assert_eq!(fixture.holder(job), new);
    }
}

#[test]
fn restart_kills_successor_of_a_worker_at_its_job_limit() {
    let mut fixture = Fixture::ready(counted(1, limits(1, 1, 1)));
    let last = fixture.job();
    let successor = fixture.newest_worker();
    fixture.apply(Event::Restart);
    assert_eq!(fixture.killed, [(successor, KillReason::NotNeeded)]);
    fixture.exit_worker(successor, Death::Signal(9));
    let new = fixture.newest_worker();
    fixture.bring_up(new);
    let next = fixture.job();
    fixture.reply(last);
    assert_eq!(fixture.holder(next), new);
}

/// A worker that is killed because of a restart does not count as a failure of its slot. Under every restart policy,
/// another worker is started in the slot.
#[test]
fn restarting_a_starting_worker_does_not_stop_its_slot() {
    for policy in [RestartPolicy::Always, RestartPolicy::OnFailure, RestartPolicy::Never] {
        let mut limits = limits(1, 1, 0);
        (limits.restart.policy, limits.restart.max) = (policy, 1);
        let mut fixture = Fixture::starting(limits);
        let job = fixture.job();
        for restarts in 1..=10 {
            fixture.apply(Event::Restart);
            fixture.exit_worker(fixture.newest_worker(), Death::Signal(9));
            assert_eq!(fixture.spawned.len(), 1 + restarts, "{policy:?}");
        }
        fixture.bring_up(fixture.newest_worker());
        fixture.reply(job);
        fixture.expect(job, "ok", None);
    }
}

/// Returns the retry delays from all events about failed replacements.
fn failed_replacements(fixture: &Fixture) -> Vec<Option<Duration>> {
    let delay = |note: &OperatorEvent| match note {
        OperatorEvent::ReplacementFailed { retry_in, .. } => Some(*retry_in),
        _ => None,
    };
    fixture.events.iter().filter_map(delay).collect()
}

#[test]
fn failed_replacement_stops_a_restart_until_the_next_one() {
    let mut fixture = Fixture::ready(limits(2, 1, 0));
    let old = fixture.spawned.clone();
    fixture.apply(Event::Restart);
    assert_eq!(fixture.bulkhead.restart_failure(), None);
    fixture.exit_worker(fixture.newest_worker(), Death::Exit(1));
    let cause = fixture.bulkhead.restart_failure().expect("the restart has stopped");
    assert!(cause.contains("status 1"), "{cause}");
    fixture.wait(60 * SECOND);
    assert_eq!((fixture.spawned.len(), outdated(&fixture)), (3, old.clone()));
    assert_eq!(failed_replacements(&fixture), [None]);
    fixture.apply(Event::Restart);
    for _ in 0..2 {
        assert_eq!(fixture.bulkhead.restart_failure(), None);
        fixture.bring_up(fixture.newest_worker());
    }
    assert_eq!((&fixture.drained, failed_replacements(&fixture).len()), (&old, 1));
}

/// A restart stops if any replacement fails to start, even a replacement that was started for another reason, because
/// all replacements run the same program.
#[test]
fn failed_replacement_for_another_reason_stops_a_restart() {
    let mut limits = limits(3, 1, 0);
    limits.recycle.rss = Some(1);
    let mut fixture = Fixture::ready(limits);
    let [first, second, third] = fixture.spawned[..] else { panic!("three workers must start") };
    fixture.apply(Event::Restart);
    let successor = fixture.newest_worker();
    fixture.apply(Event::Memory { worker: third, rss_bytes: 2 });
    assert_ne!(fixture.newest_worker(), successor);
    fixture.exit_worker(fixture.newest_worker(), Death::Exit(1));
    fixture.bring_up(successor);
    assert_eq!((&fixture.drained, failed_replacements(&fixture)), (&vec![first], vec![None]));
    assert_eq!(outdated(&fixture), [first, second, third]);
    assert!(fixture.bulkhead.restart_failure().is_some());
}

/// If the workers are also outdated because of a reload, further attempts are made to replace the workers even after a
/// restart has failed.
#[test]
fn failed_restart_after_a_reload_is_retried() {
    let mut fixture = Fixture::ready(limits(1, 1, 0));
    fixture.apply(Event::ReplaceWorkers);
    fixture.exit_worker(fixture.newest_worker(), Death::Exit(1));
    fixture.apply(Event::Restart);
    fixture.exit_worker(fixture.newest_worker(), Death::Exit(1));
    let [Some(_), Some(delay)] = failed_replacements(&fixture)[..] else { panic!("both are retried") };
    fixture.wait(delay);
    assert_eq!(fixture.spawned.len(), 4);
}

/// During a restart, a resize replaces a slot's new worker. The cause of this replacement is the resize, not
/// the restart.
#[test]
fn resize_during_a_restart_replaces_new_workers() {
    let mut fixture = Fixture::ready(limits(2, 1, 0));
    let [first, second] = fixture.spawned[..] else { panic!("two workers must start") };
    fixture.apply(Event::Restart);
    let successor = fixture.newest_worker();
    fixture.exit_worker(second, Death::Signal(11));
    let new = fixture.newest_worker();
    fixture.bring_up_as(new, Capabilities::default());
    fixture.apply(Event::ChangeLimits(LimitChange { max_in_flight: Some(2), ..LimitChange::default() }));
    fixture.bring_up(successor);
    fixture.exit_worker(first, Death::Exit(0));
    fixture.bring_up(fixture.newest_worker());
    assert_eq!((&fixture.drained, fixture.bulkhead.limit()), (&vec![first, new], 4));
}

// Maximum number of jobs per worker.

fn counted(jobs: u64, mut limits: Limits) -> Limits {
    limits.recycle.jobs = Some(jobs);
    limits
}

fn recycled(fixture: &Fixture) -> usize {
    let is_one = |note: &&OperatorEvent| {
        matches!(note, OperatorEvent::WorkerRecycled { reason: RecycleReason::Jobs, .. })
    };
    fixture.events.iter().filter(is_one).count()
}

/// With `recycle.jobs` = 1, each job gets a new process. If no worker is ready, newly arrived jobs wait as they would
/// during startup, even without a queue.
#[test]
fn recycle_jobs_of_1_gives_each_job_a_new_worker() {
    for policy in [RestartPolicy::Always, RestartPolicy::OnFailure, RestartPolicy::Never] {
        let mut limits = counted(1, limits(2, 1, 0));
        limits.restart.policy = policy;
        let mut fixture = Fixture::ready(limits);
        for _ in 0..100 {
            let jobs = [fixture.job(), fixture.job()];
            // Both jobs have started, or are waiting for one of two starting workers.
            for _ in 0..2 {
                let gone = fixture.drained.clone();
                fixture.bulkhead.workers(fixture.now).iter().filter(|view| view.in_flight == 0).for_each(
                    |view| {
                        if gone.contains(&view.id) {
                            fixture.exit_worker(view.id, Death::Exit(0));
                        } else if fixture.bulkhead.limit() < 2 {
                            fixture.bring_up(view.id);
                        }
                    },
                );
            }
            jobs.iter().for_each(|&job| fixture.reply(job));
        }
        assert_eq!(fixture.bulkhead.counters().ok, 200, "{policy:?}");
        let workers: BTreeSet<_> = fixture.dispatched.iter().map(|(worker, _)| worker.generation).collect();
        assert_eq!((workers.len(), recycled(&fixture)), (200, 200), "{policy:?}");
        assert!(fixture.causes.iter().flatten().all(|&cause| cause == RestartCause::Jobs));
    }
}

/// The successor is ready before the worker is given its last job, and takes over at that moment. No job has to wait,
/// and each worker starts exactly the allowed number of jobs.
#[test]
fn successor_is_ready_when_last_job_is_dispatched() {
    let mut fixture = Fixture::starting(counted(10, limits(1, 1, 0)));
    for turn in 0..5 {
        let worker = fixture.newest_worker();
        if turn == 0 {
            fixture.wait(SECOND);
            fixture.bring_up(worker);
        }
        for job in 0..10 {
            let job_id = fixture.job();
            assert_eq!(fixture.holder(job_id), worker, "turn {turn}: job {job} is in the wrong worker");
            fixture.wait(SECOND);
            fixture.reply(job_id);
            let next = fixture.newest_worker();
            assert!(job < 9 || next != worker, "turn {turn}: the successor was started too late");
            if job == 8 {
                assert_ne!(next, worker, "turn {turn}: the successor must be started before the last job");
                fixture.bring_up(next);
                assert_eq!((fixture.bulkhead.limit(), fixture.drained.len()), (1, turn));
            }
        }
        assert_eq!((fixture.drained[turn], recycled(&fixture)), (worker, turn + 1));
        fixture.exit_worker(worker, Death::Exit(0));
        // The next start also takes a second.
        fixture.wait(SECOND);
    }
    assert_eq!(fixture.killed, []);
}

/// Raising `max_in_flight` or lowering `recycle.jobs` does not let a worker start more jobs than `recycle.jobs` allows.
#[test]
fn worker_never_starts_more_jobs_than_recycle_jobs() {
    let mut fixture = Fixture::ready(counted(3, limits(1, 2, 8)));
    let worker = fixture.newest_worker();
    fixture.apply(Event::ChangeLimits(LimitChange { max_in_flight: Some(8), ..LimitChange::default() }));
    let jobs: Vec<_> = (0..5).map(|_| fixture.job()).collect();
    assert_eq!(fixture.dispatched.iter().filter(|(holder, _)| *holder == worker).count(), 3);
    fixture.bring_up(fixture.newest_worker());
    assert!(jobs.iter().all(|&job| fixture.was_dispatched(job)));

    let mut fixture = Fixture::ready(counted(9, limits(1, 2, 8)));
    let worker = fixture.newest_worker();
    let (one, _two) = (fixture.job(), fixture.job());
    fixture.apply(Event::Reconfigure(Box::new(counted(2, limits(1, 2, 8)))));
    assert_eq!(fixture.drained, [worker]);
    fixture.reply(one);
    let three = fixture.job();
    assert!(!fixture.was_dispatched(three));
}

/// If a successor fails to start, another attempt is made while the worker is running its last job.
#[test]
fn failed_successor_is_retried() {
    let mut limits = counted(1, limits(1, 1, 1));
    limits.restart.backoff_max = SECOND;
    let mut fixture = Fixture::ready(limits);
    let (old, job) = (fixture.newest_worker(), fixture.job());
    fixture.exit_worker(fixture.newest_worker(), Death::Exit(3));
    assert_eq!(fixture.spawned.len(), 2);
    fixture.wait(SECOND);
    assert_eq!(fixture.spawned.len(), 3);
    let next = fixture.job();
    fixture.bring_up(fixture.newest_worker());
    assert!(!fixture.was_dispatched(next), "the job must wait while the replaced worker is running a job");
    fixture.reply(job);
    fixture.exit_worker(old, Death::Exit(0));
    assert_eq!(fixture.holder(next), fixture.spawned[2]);
}

/// A restart also replaces standbys, because a standby might be outdated.
#[test]
fn restart_kills_standbys() {
    let mut fixture = Fixture::ready(counted(3, limits(1, 1, 0)));
    let (old, job) = (fixture.newest_worker(), fixture.job());
    let standby = fixture.newest_worker();
    fixture.bring_up(standby);
    assert_ne!(standby, old);
    fixture.apply(Event::Restart);
    assert_eq!(fixture.killed, [(standby, KillReason::NotNeeded)]);
    fixture.exit_worker(standby, Death::Signal(9));
    let new = fixture.newest_worker();
    fixture.bring_up(new);
    assert_eq!((fixture.spawned.len(), &fixture.drained), (3, &vec![old]));
    fixture.reply(job);
}

/// If no more jobs arrive, the standby takes over, because a slot must not have two workers for long.
#[test]
fn standby_takes_over_an_idle_slot() {
    let mut fixture = Fixture::ready(counted(3, limits(1, 1, 0)));
    let (old, job) = (fixture.newest_worker(), fixture.job());
    let standby = fixture.newest_worker();
    fixture.bring_up(standby);
    fixture.wait(5 * SECOND);
    assert_eq!(fixture.drained, [], "the worker must not be replaced while a job is running");
    fixture.reply(job);
    fixture.wait(SECOND);
    assert_eq!((&fixture.drained, fixture.bulkhead.limit(), recycled(&fixture)), (&vec![old], 1, 1));
    fixture.exit_worker(old, Death::Exit(0));
    let next = fixture.job();
    assert_eq!(fixture.holder(next), standby);
}

/// A worker's successor starts as soon as the worker is given its last job, unless another successor has just failed.
#[test]
fn worker_at_its_job_limit_immediately_gets_a_successor() {
    let mut limits = counted(2, limits(1, 1, 0));
    limits.recycle.age = Some(2 * SECOND);
    let mut fixture = Fixture::ready(limits.clone());
    let old = fixture.newest_worker();
    fixture.reply_to_next();
    let standby = fixture.newest_worker();
    // The worker reached `recycle.age` while a replaced worker was still exiting, so no successor could be
    // started yet.
    fixture.apply(Event::Restart);
    fixture.exit_worker(standby, Death::Signal(9));
    let current = fixture.newest_worker();
    fixture.bring_up(current);
    fixture.wait(2 * SECOND - MS);
    assert_eq!((&fixture.drained, fixture.spawned.len()), (&vec![old], 3));
    fixture.wait(MS);
    fixture.exit_worker(old, Death::Exit(0));
    limits.recycle.age = None;
    fixture.apply(Event::Reconfigure(Box::new(limits)));
    fixture.reply_to_next();
    let (_last, successor) = (fixture.job(), fixture.newest_worker());
    assert_eq!(fixture.drained, [old, current]);
    assert_ne!(successor, current, "no other worker must be started");
}

/// When the slot's worker dies, the standby takes over without waiting for the worker's descendants to exit. Later, the
/// standby gets a successor like any other worker.
#[test]
fn standby_takes_over_when_the_worker_dies() {
    let mut fixture = Fixture::starting(counted(3, limits(1, 1, 1)));
    fixture.wait(SECOND);
    let old = fixture.newest_worker();
    fixture.bring_up(old);
    fixture.reply_to_next();
    let job = fixture.job();
    let standby = fixture.newest_worker();
    assert_ne!(standby, old);
    fixture.wait(SECOND);
    fixture.bring_up(standby);
    let waiting = fixture.job();
    fixture.apply(Event::Exited { worker: old, death: Death::Signal(11) });
    fixture.expect(job, "crashed", Some("signal"));
    assert_eq!(fixture.holder(waiting), standby);
    fixture.apply(Event::Reaped { worker: old });
    fixture.reply(waiting);
    fixture.reply_to_next();
    let last = fixture.job();
    assert_eq!((fixture.holder(last), fixture.drained.last()), (standby, Some(&standby)));
    assert_ne!(fixture.newest_worker(), standby, "no other worker must be started");
}

/// After a worker has been given its last job and the worker's successor has been started, the next deadline lies in
/// the future.
#[test]
fn timers_are_cleared_when_the_successor_starts() {
    let mut fixture = Fixture::ready(counted(1, limits(1, 1, 0)));
    let old = fixture.newest_worker();
    fixture.apply(Event::Restart);
    let current = fixture.newest_worker();
    fixture.wait(SECOND);
    fixture.bring_up(current);
    fixture.exit_worker(old, Death::Exit(0));
    fixture.wait(MS);
    let _last = fixture.job();
    assert_ne!(fixture.newest_worker(), current);
    assert!(
        fixture.bulkhead.next_deadline() > Some(fixture.now),
        "the next deadline must not be in the past"
    );
}

/// If a successor fails to start after the slot's worker has been given its last job, a resize does not shorten the
/// delay before the next attempt.
#[test]
fn resize_does_not_shorten_the_successor_delay() {
    let mut limits = counted(1, limits(1, 1, 0));
    limits.restart.backoff_max = SECOND;
    let mut fixture = Fixture::starting(limits);
    let worker = fixture.newest_worker();
    fixture.apply(Event::Spawned { worker, pid: 1 });
    fixture.apply(Event::Hello { worker, capabilities: Capabilities::default(), journal: None });
    fixture.apply(Event::Ready { worker });
    let job = fixture.job();
    fixture.exit_worker(fixture.newest_worker(), Death::Exit(3));
    fixture.apply(Event::ChangeLimits(LimitChange { max_in_flight: Some(2), ..LimitChange::default() }));
    fixture.reply(job);
    fixture.wait(SECOND - MS);
    assert_eq!(fixture.spawned.len(), 2, "the next successor must not start too soon after a failure");
    fixture.wait(MS);
    assert_eq!(fixture.spawned.len(), 3);
}
