//! Spares: which slots they take over, when, and the effect on the limit.

#![expect(clippy::panic, reason = "a test says what is wrong by panicking")]

mod stage;

use bulkhead_policy::{Death, Event, Limits, Note, RestartCause};
use stage::{MS, SECOND, Stage, limits};

fn with_spares(limits: Limits, spares: u32) -> Limits {
    let mut limits = limits;
    limits.start.spares = spares;
    limits
}

fn takeovers(stage: &Stage) -> usize {
    stage.notes.iter().filter(|note| matches!(note, Note::SpareTookOver { .. })).count()
}

#[test]
fn a_spare_has_no_permits_until_it_takes_over() {
    let mut stage = Stage::ready(with_spares(limits(1, 2, 0), 2));
    assert_eq!((stage.spawned.len(), stage.bulkhead.limit(), stage.bulkhead.available()), (3, 2, 2));
    let first = stage.spawned[0];
    stage.apply(Event::Exited { worker: first, death: Death::Signal(9) });
    assert_eq!((takeovers(&stage), stage.bulkhead.limit(), stage.bulkhead.available()), (1, 2, 2));
    assert_eq!(stage.spawned.len(), 3, "what died has its place in the reserve until it is swept");
    stage.apply(Event::Swept { worker: first });
    assert_eq!(stage.spawned.len(), 4);
    assert_eq!(stage.causes.last(), Some(&Some(RestartCause::Signal)));
}

/// Semantics 4: with a spare, the slot is free as soon as the kill is sent. The jobs of the killed worker do
/// not count against the slot.
#[test]
fn a_hung_job_gives_its_slot_to_a_spare_with_the_kill() {
    let mut limits = with_spares(limits(1, 1, 1), 1);
    limits.deadline = SECOND;
    let mut stage = Stage::ready(limits);
    let hung = stage.job();
    let victim = stage.holder(hung);
    stage.wait(999 * MS);
    let waiting = stage.job();
    stage.wait(200 * MS);
    assert_eq!(stage.killed.len(), 1);
    assert!(stage.was_given_out(waiting) && stage.holder(waiting) != victim);
    assert_eq!(stage.spawned.len(), 2, "no third process while the killed one is there");
    stage.die(victim, Death::Signal(9));
    assert_eq!(stage.spawned.len(), 3);
}

/// Semantics 7: jobs that still run in a worker that was given its last job count against the spare that
/// follows.
#[test]
fn the_bound_holds_when_a_spare_follows_a_spent_worker() {
    let mut limits = with_spares(limits(1, 1, 2), 2);
    limits.recycle.jobs = Some(1);
    let mut stage = Stage::ready(limits);
    let (first, second) = (stage.job(), stage.job());
    assert_eq!((takeovers(&stage), stage.was_given_out(second)), (1, false), "two at once, of one");
    stage.reply(first);
    assert!(stage.was_given_out(second), "at once, without a start");
    assert_ne!(stage.holder(first), stage.holder(second));
    // The next spare does not wait for the exit of a worker that has answered its jobs.
    assert_eq!((stage.spawned.len(), stage.causes[3]), (4, Some(RestartCause::Jobs)));
    stage.die(stage.holder(first), Death::Exit(0));
    assert_eq!(stage.spawned.len(), 4);
}

/// A worker that dies without having done a job counts against the slot that it filled, even if a spare has
/// this slot now.
#[test]
fn spares_do_not_hide_a_crash_loop() {
    let mut limits = with_spares(limits(1, 1, 0), 1);
    limits.restart.max = 3;
    let mut stage = Stage::ready(limits);
    let mut next = 0;
    while let Some(&worker) = stage.spawned.get(next) {
        next += 1;
        assert!(next < 100, "workers are started without end");
        if next > 2 {
            stage.bring_up(worker);
        }
        stage.die(worker, Death::Exit(1));
        if !stage.notes.iter().any(|note| matches!(note, Note::BulkheadFailed { .. })) {
            stage.wait(SECOND);
        }
    }
    assert!(stage.notes.iter().any(|note| matches!(note, Note::BulkheadFailed { .. })));
}

#[test]
fn a_restart_replaces_by_spares_and_starts_no_successors() {
    let mut stage = Stage::ready(with_spares(limits(2, 1, 0), 1));
    stage.apply(Event::Restart);
    assert_eq!((stage.killed.len(), stage.drained.len()), (1, 0), "the spare is begun anew first");
    for _ in 0..3 {
        let worker = stage.killed[0].0;
        if let Some(leaving) = stage.drained.last().copied().or(Some(worker)) {
            stage.die(leaving, Death::Exit(0));
        }
        stage.bring_up(stage.newest_worker());
    }
    assert_eq!(stage.drained, stage.spawned[..2], "one after the other");
    assert_eq!(stage.bulkhead.limit(), 2);
    assert_eq!(stage.bulkhead.workers(stage.now).len(), 3);
}
