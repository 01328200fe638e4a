//! The two stages of a worker's death: the exit is reported immediately, and the slot is freed when all descendants are
//! gone. Also tests that the start timeouts count from the time at which the process is running.

use bulkhead_policy::{Death, Event, KillReason, OperatorEvent};

use crate::fixture::{Fixture, SECOND, limits};

/// When a worker dies, clients receive the outcomes of their jobs immediately. The worker's slot waits until
/// all descendants are gone.
#[test]
fn slot_waits_for_descendants_of_a_dead_worker() {
    let mut fixture = Fixture::ready(limits(1, 2, 5));
    let worker = fixture.newest_worker();
    let (first, second, waits) = (fixture.job(), fixture.job(), fixture.job());
    fixture.apply(Event::Exited { worker, death: Death::Signal(11) });
    for job in [first, second] {
        fixture.expect(job, "crashed", Some("signal"));
    }
    assert!(
        fixture.events.iter().any(|note| matches!(note, OperatorEvent::WorkerExited { in_flight: 2, .. }))
    );
    assert_eq!((fixture.spawned.len(), fixture.bulkhead.limit(), fixture.bulkhead.in_flight()), (1, 0, 0));
    let view = &fixture.bulkhead.workers(fixture.now)[0];
    assert_eq!((view.state, view.pid, view.in_flight), ("reaping", None, 0));
    assert!(!fixture.bulkhead.is_stopped());

    // Later events about this worker, even a second exit, have no effect.
    fixture.apply(Event::Exited { worker, death: Death::Exit(0) });
    fixture.apply(Event::SpawnFailed { worker, message: String::new(), lacks_id: false });
    fixture.apply(Event::ProtocolViolated { worker, message: String::new() });
    fixture.apply(Event::Ready { worker });
    assert_eq!((fixture.spawned.len(), fixture.outcomes.len(), fixture.killed.len()), (1, 2, 0));

    fixture.apply(Event::Reaped { worker });
    assert_eq!(fixture.spawned.len(), 2);
    fixture.bring_up(fixture.newest_worker());
    assert_eq!(fixture.holder(waits), fixture.newest_worker());
}

/// The descendants of a dead worker block only the slot of that worker.
#[test]
fn other_workers_run_jobs_during_reaping() {
    let mut fixture = Fixture::ready(limits(2, 1, 5));
    let (dies, lives) = (fixture.spawned[0], fixture.spawned[1]);
    let jobs = [fixture.job(), fixture.job(), fixture.job()];
    let of_the_living =
        jobs.into_iter().find(|&job| fixture.was_dispatched(job) && fixture.holder(job) == lives);
    fixture.apply(Event::Exited { worker: dies, death: Death::Exit(3) });
    fixture.reply(of_the_living.unwrap_or_else(|| panic!("the living worker must have a job")));
    assert_eq!(fixture.holder(jobs[2]), lives);
    assert_eq!(fixture.bulkhead.limit(), 1);
}

#[test]
fn stop_waits_for_reaping() {
    let mut fixture = Fixture::ready(limits(1, 1, 0));
    let worker = fixture.newest_worker();
    let by = fixture.now + SECOND;
    fixture.apply(Event::Stop { by });
    fixture.apply(Event::Exited { worker, death: Death::Exit(0) });
    assert!(!fixture.bulkhead.is_stopped());
    fixture.apply(Event::Reaped { worker });
    assert!(fixture.bulkhead.is_stopped());
}

/// The keeper dies before all descendants of a dead worker are gone. The bulkhead must not wait for further events
/// about that worker, because none will arrive.
#[test]
fn keeper_death_ends_wait_for_descendants() {
    let mut fixture = Fixture::ready(limits(1, 1, 0));
    let worker = fixture.newest_worker();
    fixture.apply(Event::Exited { worker, death: Death::Exit(1) });
    fixture.apply(Event::LostWithKeeper { worker });
    assert_eq!(fixture.spawned.len(), 2);
}

/// The keeper starts workers one at a time, so the last of many workers has to wait for all the others.
#[test]
fn handshake_timeout_counts_from_the_spawn() {
    let mut limits = limits(1, 1, 0);
    limits.start.handshake = SECOND;
    let mut fixture = Fixture::starting(limits);
    let worker = fixture.newest_worker();
    fixture.wait(SECOND * 20);
    assert_eq!(fixture.killed, []);
    fixture.apply(Event::Spawned { worker, pid: 100 });
    fixture.wait(SECOND / 2);
    assert_eq!(fixture.killed, []);
    fixture.wait(SECOND);
    assert_eq!(fixture.killed, [(worker, KillReason::NoHello)]);
}

/// A template may request more time to initialise. If the template is killed, the start of the worker fails.
#[test]
fn forked_worker_waits_for_its_template() {
    let mut limits = limits(1, 1, 0);
    limits.start.mode = bulkhead_policy::StartMode::Fork;
    limits.start.handshake = SECOND;
    let mut fixture = Fixture::starting(limits);
    let worker = fixture.newest_worker();
    fixture.wait(SECOND * 600);
    assert_eq!(fixture.killed, []);
    fixture.apply(Event::Spawned { worker, pid: 100 });
    fixture.wait(SECOND * 2);
    assert_eq!(fixture.killed, [(worker, KillReason::NoHello)]);
}

/// A process must be reported as running within a limited time after the request to start it.
#[test]
fn spawn_order_without_report_times_out() {
    let mut fixture = Fixture::starting(limits(1, 1, 0));
    fixture.wait(SECOND * 61);
    assert_eq!(fixture.killed.len(), 1);
}
