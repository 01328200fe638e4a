//! Replaced workers: the number of jobs that run meanwhile, exits that hang, and `recycle.jobs`.

#![expect(clippy::panic, reason = "a test says what is wrong by panicking")]

mod stage;

use std::collections::BTreeSet;

use bulkhead_policy::{
    Abilities, Change, Death, Event, KillReason, Limits, Note, RecycleReason, RestartCause, RestartPolicy,
};
use bulkhead_shared::JobId;
use stage::{MS, SECOND, Stage, limits};

// Exits that hang.

/// Runs one job in each worker, while no worker exits. Returns the stage when all jobs are answered.
fn served_by_workers_that_hang_at_exit(count: u32) -> Stage {
    let mut limits = limits(1, 1, count);
    limits.recycle.jobs = Some(1);
    let mut stage = Stage::ready(limits);
    let jobs: Vec<_> = (0..count).map(|_| stage.job()).collect();
    for (nth, &job) in jobs.iter().enumerate() {
        if nth > 0 {
            stage.bring_up(stage.newest_worker());
        }
        assert!(stage.was_given_out(job), "job {nth} waits for an exit");
        stage.reply(job);
    }
    stage
}

#[test]
fn no_job_waits_for_an_exit_that_hangs() {
    let stage = served_by_workers_that_hang_at_exit(10);
    assert!(stage.killed.is_empty(), "{:?}", stage.killed);
}

#[test]
fn of_many_exits_that_hang_the_oldest_end() {
    let mut stage = served_by_workers_that_hang_at_exit(20);
    let all = stage.spawned.clone();
    let killed: Vec<_> = stage.killed.iter().map(|(worker, _)| *worker).collect();
    // The last of twenty workers holds the slot, and sixteen more may still be exiting.
    assert_eq!(killed, all[..3]);
    stage.bring_up(stage.newest_worker());
    assert_eq!(stage.killed.len(), 4);
    assert!(stage.killed.iter().all(|(_, reason)| *reason == KillReason::Overdue));
}

// The limit across generations.

/// Returns a stage in which every worker has a job, workers are replaced one after the other, and as many
/// jobs wait.
fn replaced(order: impl Fn(&mut Stage), limits: Limits) -> (Stage, Vec<JobId>, Vec<JobId>) {
    let mut stage = Stage::ready(limits);
    let running: Vec<_> = (0..2).map(|_| stage.job()).collect();
    let old: Vec<_> = running.iter().map(|&job| stage.holder(job)).collect();
    order(&mut stage);
    let mut brought_up = 2;
    while let Some(&worker) = stage.spawned.get(brought_up) {
        stage.bring_up(worker);
        brought_up += 1;
    }
    let drained: BTreeSet<_> = stage.drained.iter().collect();
    assert_eq!((brought_up, drained), (4, old.iter().collect()), "all are replaced");
    let waiting = (0..2).map(|_| stage.job()).collect();
    (stage, running, waiting)
}

/// Semantics 7: at every moment at most `processes` x `max_in_flight` jobs run, also while workers are
/// recycled, restarted and replaced by another program.
#[test]
fn the_bound_holds_while_workers_are_replaced() {
    let age = |limits: Limits| {
        let mut limits = limits;
        limits.recycle.age = Some(SECOND);
        limits
    };
    let restart: fn(&mut Stage) = |stage| {
        stage.apply(Event::Restart);
    };
    let reload: fn(&mut Stage) = |stage| {
        stage.apply(Event::Replace);
    };
    let recycle: fn(&mut Stage) = |stage| stage.wait(SECOND);
    let two = limits(2, 1, 4);
    for (order, limits) in [(restart, two.clone()), (reload, two.clone()), (recycle, age(two))] {
        let (mut stage, running, waiting) = replaced(order, limits);
        let held = |stage: &Stage| (stage.bulkhead.in_flight(), stage.bulkhead.limit());
        assert!(waiting.iter().all(|&job| !stage.was_given_out(job)), "four at once, of two");
        assert_eq!((held(&stage), stage.bulkhead.available()), ((2, 2), 0));
        stage.reply(running[1]);
        assert!(stage.was_given_out(waiting[0]) && !stage.was_given_out(waiting[1]));
        assert_eq!((held(&stage), stage.bulkhead.available()), ((2, 2), 0));
        stage.die(stage.holder(running[0]), Death::Signal(11));
        assert!(stage.was_given_out(waiting[1]), "the dead one's permit is back");
        waiting.iter().for_each(|&job| stage.reply(job));
        assert_eq!(stage.bulkhead.available(), 2);
    }
}

/// Architecture, 2: a worker that was sent SIGKILL before another worker took its slot does not delay its
/// permits. A worker that is killed later holds them until it has exited.
#[test]
fn what_was_killed_before_it_was_replaced_is_no_debt() {
    for is_killed_first in [true, false] {
        let mut stage = Stage::ready(limits(1, 1, 1));
        let (old, job) = (stage.newest_worker(), stage.job_with(Some(SECOND)));
        stage.apply(Event::Restart);
        let new = stage.newest_worker();
        let kill = |stage: &mut Stage| {
            stage.wait(SECOND + 200 * MS);
            assert_eq!(stage.killed, [(old, KillReason::Deadline)]);
        };
        if is_killed_first {
            kill(&mut stage);
            stage.bring_up(new);
        } else {
            stage.bring_up(new);
            kill(&mut stage);
        }
        stage.expect(job, "deadline_exceeded", Some("running"));
        let next = stage.job();
        assert_eq!(stage.was_given_out(next), is_killed_first);
        stage.die(old, Death::Signal(9));
        assert_eq!(stage.holder(next), new);
    }
}

/// If the new worker of a slot has exited again, the jobs of the replaced worker count against the share of
/// this slot, not against that of others.
#[test]
fn jobs_of_a_replaced_worker_count_against_its_slot() {
    let mut stage = Stage::ready(limits(2, 2, 4));
    let jobs: Vec<_> = (0..4).map(|_| stage.job()).collect();
    stage.apply(Event::Restart);
    let new = stage.newest_worker();
    stage.bring_up(new);
    let other = stage.holder(jobs[1]);
    stage.reply(jobs[1]);
    let next = stage.job();
    assert_eq!(stage.bulkhead.in_flight(), 4);
    assert_eq!(stage.holder(next), new);
    stage.die(new, Death::Signal(11));
    stage.reply(jobs[3]);
    let (one, two) = (stage.job(), stage.job());
    assert_eq!((stage.holder(one), stage.holder(two)), (other, other));
    assert_eq!((stage.bulkhead.in_flight(), stage.bulkhead.limit()), (4, 2));
}

// Maximum number of jobs per worker.

fn counted(jobs: u64, mut limits: Limits) -> Limits {
    limits.recycle.jobs = Some(jobs);
    limits
}

fn recycled(stage: &Stage) -> usize {
    let is_one = |note: &&Note| matches!(note, Note::WorkerRecycled { reason: RecycleReason::Jobs, .. });
    stage.notes.iter().filter(is_one).count()
}

/// `recycle.jobs` = 1 gives each job a fresh process. Jobs that arrive without a ready worker wait as they do
/// at the start, even without a queue.
#[test]
fn one_job_each_takes_as_many_workers_as_jobs() {
    for policy in [RestartPolicy::Always, RestartPolicy::OnFailure, RestartPolicy::Never] {
        let mut limits = counted(1, limits(2, 1, 0));
        limits.restart.policy = policy;
        let mut stage = Stage::ready(limits);
        for _ in 0..100 {
            let jobs = [stage.job(), stage.job()];
            // Both jobs have begun, or wait for two workers that are starting.
            for _ in 0..2 {
                let gone = stage.drained.clone();
                stage.bulkhead.workers(stage.now).iter().filter(|view| view.in_flight == 0).for_each(
                    |view| {
                        if gone.contains(&view.id) {
                            stage.die(view.id, Death::Exit(0));
                        } else if stage.bulkhead.limit() < 2 {
                            stage.bring_up(view.id);
                        }
                    },
                );
            }
            jobs.iter().for_each(|&job| stage.reply(job));
        }
        assert_eq!(stage.bulkhead.counters().ok, 200, "{policy:?}");
        let workers: BTreeSet<_> = stage.dispatched.iter().map(|(worker, _)| worker.generation).collect();
        assert_eq!((workers.len(), recycled(&stage)), (200, 200), "{policy:?}");
        assert!(stage.causes.iter().flatten().all(|&cause| cause == RestartCause::Jobs));
    }
}

/// The successor is ready before the last job is dispatched, and takes over exactly then. No job waits, and
/// each worker begins exactly the allowed number of jobs.
#[test]
fn the_next_worker_is_there_when_the_last_job_has_begun() {
    let mut stage = Stage::starting(counted(10, limits(1, 1, 0)));
    for turn in 0..5 {
        let worker = stage.newest_worker();
        if turn == 0 {
            stage.wait(SECOND);
            stage.bring_up(worker);
        }
        for job in 0..10 {
            let job_id = stage.job();
            assert_eq!(stage.holder(job_id), worker, "turn {turn}, job {job}");
            stage.wait(SECOND);
            stage.reply(job_id);
            let next = stage.newest_worker();
            assert!(job < 9 || next != worker, "turn {turn}: it starts too late");
            if job == 8 {
                assert_ne!(next, worker, "turn {turn}: a start takes as long as a job");
                stage.bring_up(next);
                assert_eq!((stage.bulkhead.limit(), stage.drained.len()), (1, turn));
            }
        }
        assert_eq!((stage.drained[turn], recycled(&stage)), (worker, turn + 1));
        stage.die(worker, Death::Exit(0));
        // The next start takes a second as well.
        stage.wait(SECOND);
    }
    assert_eq!(stage.killed, []);
}

/// Neither a larger `max_in_flight` nor a smaller `recycle.jobs` lets a worker begin more jobs than allowed.
#[test]
fn no_number_lets_a_worker_begin_more() {
    let mut stage = Stage::ready(counted(3, limits(1, 2, 8)));
    let worker = stage.newest_worker();
    stage.apply(Event::Change(Change { max_in_flight: Some(8), ..Change::default() }));
    let jobs: Vec<_> = (0..5).map(|_| stage.job()).collect();
    assert_eq!(stage.dispatched.iter().filter(|(holder, _)| *holder == worker).count(), 3);
    stage.bring_up(stage.newest_worker());
    assert!(jobs.iter().all(|&job| stage.was_given_out(job)));

    let mut stage = Stage::ready(counted(9, limits(1, 2, 8)));
    let worker = stage.newest_worker();
    let (one, _two) = (stage.job(), stage.job());
    stage.apply(Event::Reconfigure(Box::new(counted(2, limits(1, 2, 8)))));
    assert_eq!(stage.drained, [worker]);
    stage.reply(one);
    let three = stage.job();
    assert!(!stage.was_given_out(three));
}

/// A successor that fails to start is tried again while the worker runs its last job.
#[test]
fn a_follower_that_fails_is_tried_again() {
    let mut limits = counted(1, limits(1, 1, 1));
    limits.restart.backoff_max = SECOND;
    let mut stage = Stage::ready(limits);
    let (old, job) = (stage.newest_worker(), stage.job());
    stage.die(stage.newest_worker(), Death::Exit(3));
    assert_eq!(stage.spawned.len(), 2);
    stage.wait(SECOND);
    assert_eq!(stage.spawned.len(), 3);
    let next = stage.job();
    stage.bring_up(stage.newest_worker());
    assert!(!stage.was_given_out(next), "the bound");
    stage.reply(job);
    stage.die(old, Death::Exit(0));
    assert_eq!(stage.holder(next), stage.spawned[2]);
}

/// A successor on standby may be outdated, so a restart replaces it as well.
#[test]
fn a_restart_ends_those_that_wait_for_their_turn() {
    let mut stage = Stage::ready(counted(3, limits(1, 1, 0)));
    let (old, job) = (stage.newest_worker(), stage.job());
    let standby = stage.newest_worker();
    stage.bring_up(standby);
    assert_ne!(standby, old);
    stage.apply(Event::Restart);
    assert_eq!(stage.killed, [(standby, KillReason::Unwanted)]);
    stage.die(standby, Death::Signal(9));
    let new = stage.newest_worker();
    stage.bring_up(new);
    assert_eq!((stage.spawned.len(), &stage.drained), (3, &vec![old]));
    stage.reply(job);
}

/// A slot does not have two workers for long. If no more jobs arrive, the successor on standby takes over.
#[test]
fn who_waits_for_a_turn_that_does_not_come_takes_it() {
    let mut stage = Stage::ready(counted(3, limits(1, 1, 0)));
    let (old, job) = (stage.newest_worker(), stage.job());
    let standby = stage.newest_worker();
    stage.bring_up(standby);
    stage.wait(5 * SECOND);
    assert_eq!(stage.drained, [], "a job runs");
    stage.reply(job);
    stage.wait(SECOND);
    assert_eq!((&stage.drained, stage.bulkhead.limit(), recycled(&stage)), (&vec![old], 1, 1));
    stage.die(old, Death::Exit(0));
    let next = stage.job();
    assert_eq!(stage.holder(next), standby);
}

/// The successor of a worker that was given its last job starts at once, unless a successor has just failed.
#[test]
fn a_spent_worker_is_followed_at_once_whatever_its_age() {
    let mut limits = counted(2, limits(1, 1, 0));
    limits.recycle.age = Some(2 * SECOND);
    let mut stage = Stage::ready(limits.clone());
    let old = stage.newest_worker();
    stage.reply_to_next();
    // The age was reached while a replaced worker was still exiting, so no successor could start yet.
    stage.apply(Event::Restart);
    let current = stage.newest_worker();
    stage.bring_up(current);
    stage.wait(2 * SECOND - MS);
    assert_eq!((&stage.drained, stage.spawned.len()), (&vec![old], 2));
    stage.wait(MS);
    stage.die(old, Death::Exit(0));
    limits.recycle.age = None;
    stage.apply(Event::Reconfigure(Box::new(limits)));
    stage.reply_to_next();
    let (_last, successor) = (stage.job(), stage.newest_worker());
    assert_eq!(stage.drained, [old, current]);
    assert_ne!(successor, current, "nothing follows");
}

/// When the slot's worker dies, the successor on standby takes over before the descendants are gone, and
/// later gets a successor like any other worker.
#[test]
fn who_waits_for_its_turn_has_it_when_the_one_before_dies() {
    let mut stage = Stage::starting(counted(3, limits(1, 1, 1)));
    stage.wait(SECOND);
    let old = stage.newest_worker();
    stage.bring_up(old);
    stage.reply_to_next();
    let job = stage.job();
    let standby = stage.newest_worker();
    assert_ne!(standby, old);
    stage.wait(SECOND);
    stage.bring_up(standby);
    let waiting = stage.job();
    stage.apply(Event::Exited { worker: old, death: Death::Signal(11) });
    stage.expect(job, "crashed", Some("signal"));
    assert_eq!(stage.holder(waiting), standby);
    stage.apply(Event::Swept { worker: old });
    stage.reply(waiting);
    stage.reply_to_next();
    let last = stage.job();
    assert_eq!((stage.holder(last), stage.drained.last()), (standby, Some(&standby)));
    assert_ne!(stage.newest_worker(), standby, "nothing follows");
}

/// A worker that was given its last job and already has a successor leaves no timer that is due.
#[test]
fn nothing_is_due_once_a_spent_worker_is_followed() {
    let mut stage = Stage::ready(counted(1, limits(1, 1, 0)));
    let old = stage.newest_worker();
    stage.apply(Event::Restart);
    let current = stage.newest_worker();
    stage.wait(SECOND);
    stage.bring_up(current);
    stage.die(old, Death::Exit(0));
    stage.wait(MS);
    let _last = stage.job();
    assert_ne!(stage.newest_worker(), current);
    assert!(stage.bulkhead.next_deadline() > Some(stage.now), "due in the past");
}

/// A resize does not clear the pause after a failed successor of a worker that was given its last job.
#[test]
fn a_resize_does_not_hurry_what_follows_a_spent_worker() {
    let mut limits = counted(1, limits(1, 1, 0));
    limits.restart.backoff_max = SECOND;
    let mut stage = Stage::starting(limits);
    let worker = stage.newest_worker();
    stage.apply(Event::Spawned { worker, pid: 1 });
    stage.apply(Event::Hello { worker, can: Abilities::default(), claims: None });
    stage.apply(Event::Ready { worker });
    let job = stage.job();
    stage.die(stage.newest_worker(), Death::Exit(3));
    stage.apply(Event::Change(Change { max_in_flight: Some(2), ..Change::default() }));
    stage.reply(job);
    stage.wait(SECOND - MS);
    assert_eq!(stage.spawned.len(), 2, "too soon after one that failed");
    stage.wait(MS);
    assert_eq!(stage.spawned.len(), 3);
}
