//! The two stages of a worker's end: the exit, which is reported at once, and the end of all descendants,
//! which frees the slot. Also the start: time limits count from the moment when the process runs.

#![expect(clippy::panic, reason = "a test says what is wrong by panicking")]

mod stage;

use bulkhead_policy::{Death, Event, KillReason, Note};

use stage::{SECOND, Stage, limits};

/// The client does not wait for the descendants, but the slot does.
#[test]
fn jobs_fail_at_once_but_the_slot_waits_for_descendants() {
    let mut stage = Stage::ready(limits(1, 2, 5));
    let worker = stage.newest_worker();
    let (first, second, waits) = (stage.job(), stage.job(), stage.job());
    stage.apply(Event::Exited { worker, death: Death::Signal(11) });
    for job in [first, second] {
        stage.expect(job, "crashed", Some("signal"));
    }
    assert!(stage.notes.iter().any(|note| matches!(note, Note::WorkerExited { in_flight: 2, .. })));
    assert_eq!((stage.spawned.len(), stage.bulkhead.limit(), stage.bulkhead.in_flight()), (1, 0, 0));
    let view = &stage.bulkhead.workers(stage.now)[0];
    assert_eq!((view.state, view.pid, view.in_flight), ("reaping", None, 0));
    assert!(!stage.bulkhead.is_stopped());

    // Later messages about this worker have no effect, not even a second exit.
    stage.apply(Event::Exited { worker, death: Death::Exit(0) });
    stage.apply(Event::SpawnFailed { worker, message: String::new() });
    stage.apply(Event::Broke { worker, message: String::new() });
    stage.apply(Event::Ready { worker });
    assert_eq!((stage.spawned.len(), stage.answers.len(), stage.killed.len()), (1, 2, 0));

    stage.apply(Event::Swept { worker });
    assert_eq!(stage.spawned.len(), 2);
    stage.bring_up(stage.newest_worker());
    assert_eq!(stage.holder(waits), stage.newest_worker());
}

/// Remaining descendants delay only the slot of their own worker.
#[test]
fn jobs_go_on_beside_a_sweep() {
    let mut stage = Stage::ready(limits(2, 1, 5));
    let (dies, lives) = (stage.spawned[0], stage.spawned[1]);
    let jobs = [stage.job(), stage.job(), stage.job()];
    let of_the_living = jobs.into_iter().find(|&job| stage.was_given_out(job) && stage.holder(job) == lives);
    stage.apply(Event::Exited { worker: dies, death: Death::Exit(3) });
    stage.reply(of_the_living.unwrap_or_else(|| panic!("it has none")));
    assert_eq!(stage.holder(jobs[2]), lives);
    assert_eq!(stage.bulkhead.limit(), 1);
}

#[test]
fn a_stop_waits_for_the_sweep() {
    let mut stage = Stage::ready(limits(1, 1, 0));
    let worker = stage.newest_worker();
    let by = stage.now + SECOND;
    stage.apply(Event::Stop { by });
    stage.apply(Event::Exited { worker, death: Death::Exit(0) });
    assert!(!stage.bulkhead.is_stopped());
    stage.apply(Event::Swept { worker });
    assert!(stage.bulkhead.is_stopped());
}

/// The keeper died while descendants remained. No further event follows, so nothing must wait for one.
#[test]
fn a_lost_sweep_is_over() {
    let mut stage = Stage::ready(limits(1, 1, 0));
    let worker = stage.newest_worker();
    stage.apply(Event::Exited { worker, death: Death::Exit(1) });
    stage.apply(Event::Lost { worker });
    assert_eq!(stage.spawned.len(), 2);
}

/// The keeper starts workers one after the other. The last of many waits for all earlier ones.
#[test]
fn the_handshake_counts_from_the_spawn_and_not_from_the_order() {
    let mut limits = limits(1, 1, 0);
    limits.start.handshake = SECOND;
    let mut stage = Stage::starting(limits);
    let worker = stage.newest_worker();
    stage.wait(SECOND * 20);
    assert_eq!(stage.killed, []);
    stage.apply(Event::Spawned { worker, pid: 100 });
    stage.wait(SECOND / 2);
    assert_eq!(stage.killed, []);
    stage.wait(SECOND);
    assert_eq!(stage.killed, [(worker, KillReason::NoHello)]);
}

/// A template may take as long as it asks for. If it is killed, the start fails.
#[test]
fn a_worker_that_is_to_be_forked_waits_for_its_template() {
    let mut limits = limits(1, 1, 0);
    limits.start.mode = bulkhead_policy::StartMode::Fork;
    limits.start.handshake = SECOND;
    let mut stage = Stage::starting(limits);
    let worker = stage.newest_worker();
    stage.wait(SECOND * 600);
    assert_eq!(stage.killed, []);
    stage.apply(Event::Spawned { worker, pid: 100 });
    stage.wait(SECOND * 2);
    assert_eq!(stage.killed, [(worker, KillReason::NoHello)]);
}

/// The wait for an ordered process is limited.
#[test]
fn an_order_that_becomes_no_process_is_given_up() {
    let mut stage = Stage::starting(limits(1, 1, 0));
    stage.wait(SECOND * 61);
    assert_eq!(stage.killed.len(), 1);
}
