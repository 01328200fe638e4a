//! Tests of spares: when spares take over slots, which slots the spares take over, and how spares affect the limit.

use crate::fixture::{Fixture, MS, SECOND, limits};
use bulkhead_policy::{Death, Event, KillReason, Limits, OperatorEvent, RestartCause};

fn with_spares(limits: Limits, spares: u32) -> Limits {
    let mut limits = limits;
    limits.start.spares = spares;
    limits
}

fn takeovers(fixture: &Fixture) -> usize {
    fixture.events.iter().filter(|note| matches!(note, OperatorEvent::SpareTookOver { .. })).count()
}

#[test]
fn spare_has_no_permits_before_takeover() {
    let mut fixture = Fixture::ready(with_spares(limits(1, 2, 0), 2));
    assert_eq!((fixture.spawned.len(), fixture.bulkhead.limit(), fixture.bulkhead.available()), (3, 2, 2));
    let first = fixture.spawned[0];
    fixture.apply(Event::Exited { worker: first, death: Death::Signal(9) });
    assert_eq!((takeovers(&fixture), fixture.bulkhead.limit(), fixture.bulkhead.available()), (1, 2, 2));
    assert_eq!(fixture.spawned.len(), 3, "a dead worker must keep its spare slot until it is reaped");
    fixture.apply(Event::Reaped { worker: first });
    assert_eq!(fixture.spawned.len(), 4);
    assert_eq!(fixture.causes.last(), Some(&Some(RestartCause::Signal)));
}

/// Checks a rule in `docs/semantics.md`: a ready spare takes over a hung worker's slot as soon as the worker is sent
/// SIGKILL. The killed worker's jobs are not charged to the slot.
#[test]
fn spare_takes_over_when_a_hung_worker_is_killed() {
    let mut limits = with_spares(limits(1, 1, 1), 1);
    limits.deadline = SECOND;
    let mut fixture = Fixture::ready(limits);
    let hung = fixture.job();
    let victim = fixture.holder(hung);
    fixture.wait(999 * MS);
    let waiting = fixture.job();
    fixture.wait(200 * MS);
    assert_eq!(fixture.killed.len(), 1);
    assert!(fixture.was_dispatched(waiting) && fixture.holder(waiting) != victim);
    assert_eq!(fixture.spawned.len(), 2, "no third process must start before the killed worker is gone");
    fixture.exit_worker(victim, Death::Signal(9));
    assert_eq!(fixture.spawned.len(), 3);
}

/// Checks a rule in `docs/semantics.md`: once a worker has been given its last job and a spare has taken over the slot,
/// the worker's running jobs are charged to that spare.
#[test]
fn limit_holds_when_a_spare_replaces_a_recycled_worker() {
    let mut limits = with_spares(limits(1, 1, 2), 2);
    limits.recycle.jobs = Some(1);
    let mut fixture = Fixture::ready(limits);
    let (first, second) = (fixture.job(), fixture.job());
    assert_eq!(
        (takeovers(&fixture), fixture.was_dispatched(second)),
        (1, false),
        "no more jobs may run than the limit allows"
    );
    fixture.reply(first);
    assert!(
        fixture.was_dispatched(second),
        "the job must be dispatched immediately, without starting a worker"
    );
    assert_ne!(fixture.holder(first), fixture.holder(second));
    // When a worker has completed its jobs, the next spare starts without waiting for the worker to exit.
    assert_eq!((fixture.spawned.len(), fixture.causes[3]), (4, Some(RestartCause::Jobs)));
    fixture.exit_worker(fixture.holder(first), Death::Exit(0));
    assert_eq!(fixture.spawned.len(), 4);
}

/// The death of a worker that has not completed a job is charged as a failure to the slot that the worker filled, even
/// if a spare has since taken over the slot.
#[test]
fn spares_do_not_hide_a_crash_loop() {
    let mut limits = with_spares(limits(1, 1, 0), 1);
    limits.restart.max = 3;
    let mut fixture = Fixture::ready(limits);
    let mut next = 0;
    while let Some(&worker) = fixture.spawned.get(next) {
        next += 1;
        assert!(next < 100, "workers must not be restarted over and over");
        if next > 2 {
            fixture.bring_up(worker);
        }
        fixture.exit_worker(worker, Death::Exit(1));
        if !fixture.events.iter().any(|note| matches!(note, OperatorEvent::BulkheadFailed { .. })) {
            fixture.wait(SECOND);
        }
    }
    assert!(fixture.events.iter().any(|note| matches!(note, OperatorEvent::BulkheadFailed { .. })));
}

/// A spare that is starting might have read an old secret, so it must not take over a slot.
#[test]
fn restart_kills_starting_spares() {
    let mut fixture = Fixture::starting(with_spares(limits(1, 1, 0), 1));
    let [old, spare] = fixture.spawned[..] else { panic!("a worker and a spare must start") };
    fixture.bring_up(old);
    fixture.apply(Event::Restart);
    assert_eq!(fixture.killed, [(spare, KillReason::NotNeeded)]);
    fixture.exit_worker(spare, Death::Signal(9));
    let new = fixture.newest_worker();
    fixture.bring_up(new);
    assert_eq!((takeovers(&fixture), &fixture.drained), (1, &vec![old]));
    let job = fixture.job();
    assert_eq!(fixture.holder(job), new);
}

#[test]
fn restart_uses_spares_instead_of_successors() {
    let mut fixture = Fixture::ready(with_spares(limits(2, 1, 0), 1));
    fixture.apply(Event::Restart);
    assert_eq!((fixture.killed.len(), fixture.drained.len()), (1, 0), "the spare must be restarted first");
    for _ in 0..3 {
        let worker = fixture.killed[0].0;
        if let Some(leaving) = fixture.drained.last().copied().or(Some(worker)) {
            fixture.exit_worker(leaving, Death::Exit(0));
        }
        fixture.bring_up(fixture.newest_worker());
    }
    assert_eq!(fixture.drained, fixture.spawned[..2], "the workers must be drained one after the other");
    assert_eq!(fixture.bulkhead.limit(), 2);
    assert_eq!(fixture.bulkhead.workers(fixture.now).len(), 3);
}
