//! Workers that are replaced: how many jobs run meanwhile.

#![expect(clippy::panic, reason = "a test says what is wrong by panicking")]

mod stage;

use bulkhead_policy::{Death, Event, KillReason, Limits};
use bulkhead_shared::JobId;
use stage::{MS, SECOND, Stage, limits};

// The bound across generations.

/// Every worker of this stage has a job, and one after the other is replaced. As many jobs wait.
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
    assert_eq!((brought_up, &stage.drained), (4, &old), "all are replaced");
    let waiting = (0..2).map(|_| stage.job()).collect();
    (stage, running, waiting)
}

/// Semantics 7: at every moment no more than `processes` x `max_in_flight` jobs run, also while workers are
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

/// Architecture, 2: of a worker that was sent SIGKILL before another took its slot, the permits are not waited
/// for. One that is killed later holds them until it is gone.
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

/// A worker that was replaced by one that is gone again runs on the share of its slot, not on that of others.
#[test]
fn a_debt_is_that_of_its_own_slot_as_long_as_nothing_has_taken_it() {
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
