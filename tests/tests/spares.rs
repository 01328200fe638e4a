//! Spares take over the slots of workers that die, are killed or have done their share, and are replaced themselves.

use std::collections::BTreeSet;

use bulkhead_client::blocking::Client;
use bulkhead_tests::{Supervisor, is_alive, kill_pid, outcome, wait_for};
use nix::sys::signal::Signal;

fn bulkhead(keys: &str) -> String {
    format!("[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 20\n{keys}\n")
}

/// The spares that are ready.
fn spares(supervisor: &Supervisor) -> Vec<u32> {
    let workers = supervisor.state("b").workers;
    let ready = workers.iter().filter(|worker| worker.spare && worker.state == "ready");
    ready.filter_map(|worker| worker.pid).collect()
}

/// Waits until so many spares are ready.
fn wait_spares(supervisor: &Supervisor, count: usize) -> Vec<u32> {
    wait_for(&format!("{count} spares are ready"), || {
        Some(spares(supervisor)).filter(|spares| spares.len() == count)
    })
}

fn serving(supervisor: &Supervisor) -> u32 {
    let workers = supervisor.state("b").workers;
    let serves = |state: &str| state == "ready" || state == "busy";
    let pid = workers.iter().find(|worker| !worker.spare && serves(worker.state.as_ref()));
    pid.and_then(|worker| worker.pid).unwrap()
}

#[test]
fn a_spare_takes_the_slot_of_a_worker_that_dies() {
    let supervisor = Supervisor::start(&bulkhead("start = { spares = 1 }"));
    let client = Client::connect(supervisor.socket()).unwrap();
    for round in 1..=10 {
        let spare = wait_spares(&supervisor, 1)[0];
        assert_eq!(supervisor.number("b", "limit"), 1, "a spare has no permits");
        // One more than at the start, if the spare was ready before the first worker of the slot.
        let before = supervisor.events("spare_took_over").len();
        kill_pid(serving(&supervisor), Signal::SIGKILL);
        supervisor.wait_events("spare_took_over", before + 1);
        let reply = client.job("b", "x").send().unwrap();
        assert_eq!(reply.outcome().worker_pid, Some(spare), "round {round}");
    }
    assert_eq!(supervisor.number("b", "crashed"), 0);
}

/// The spare does not wait for the end of the one that is killed.
#[test]
fn a_spare_takes_the_slot_as_soon_as_the_kill_is_sent() {
    let keys = "deadline = \"200ms\"\ngrace = \"20ms\"\nstart = { spares = 1 }";
    let supervisor = Supervisor::start(&bulkhead(keys));
    let spare = wait_spares(&supervisor, 1)[0];
    let client = Client::connect(supervisor.socket()).unwrap();
    let hung = client.job("b", "").operation("hang").send();
    assert_eq!(outcome(&hung), "deadline_exceeded/running");
    supervisor.wait_events("worker_exited", 1);
    let events = supervisor.command().args(["--json", "events"]).output().unwrap();
    let events = String::from_utf8(events.stdout).unwrap();
    let mut kinds =
        events.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["kind"].clone());
    assert!(kinds.any(|kind| kind == "worker_killed"), "{events}");
    assert!(
        kinds.take_while(|kind| kind != "worker_exited").any(|kind| kind == "spare_took_over"),
        "{events}"
    );
    assert!(supervisor.worker_pids("b").contains(&spare));
}

/// Each job has a process of its own, and there are never more than slots and spares.
#[test]
fn a_fresh_process_for_each_job_is_a_spare() {
    let keys = "recycle = { jobs = 1 }\nstart = { spares = 2 }";
    let supervisor = Supervisor::start(&bulkhead(keys));
    wait_spares(&supervisor, 2);
    let client = Client::connect(supervisor.socket()).unwrap();
    let mut pids = BTreeSet::new();
    for round in 0..50 {
        let reply = client.job("b", "x").send().unwrap();
        assert!(pids.insert(reply.outcome().worker_pid.unwrap()), "round {round}: one began two jobs");
        let there = supervisor.state("b").workers.len();
        assert!(there <= 3, "{there} workers");
    }
    wait_spares(&supervisor, 2);
    wait_for("those that ran are gone", || {
        let now: BTreeSet<u32> = supervisor.worker_pids("b").into_iter().collect();
        pids.difference(&now).all(|&pid| !is_alive(pid)).then_some(())
    });
    assert_eq!(supervisor.number("b", "crashed"), 0);
}

#[test]
fn a_spare_that_dies_or_hangs_is_replaced() {
    let keys = "start = { spares = 1 }\nhealth = { heartbeat = \"100ms\", missed = 4 }";
    let supervisor = Supervisor::start(&bulkhead(keys));
    for signal in [Signal::SIGKILL, Signal::SIGSTOP] {
        let (spare, at_work) = (wait_spares(&supervisor, 1)[0], serving(&supervisor));
        kill_pid(spare, signal);
        wait_for("another spare is ready", || {
            let now = spares(&supervisor);
            (now.len() == 1 && now[0] != spare).then_some(())
        });
        assert_eq!(serving(&supervisor), at_work, "{signal}: the other goes on");
    }
}

/// The number holds at once, and what a reload starts is what is to be run then.
#[test]
fn spares_follow_a_reload() {
    let supervisor = Supervisor::start(&bulkhead(""));
    let at_work = serving(&supervisor);
    let reload = |keys: &str| {
        supervisor.configure("", &bulkhead(keys));
        assert!(supervisor.command().arg("reload").output().unwrap().status.success());
    };
    reload("start = { spares = 2 }");
    let before = wait_spares(&supervisor, 2);
    assert_eq!(serving(&supervisor), at_work, "no worker is replaced for it");
    reload("start = { spares = 2 }\nenv = { REVISION = \"2\" }");
    wait_for("all are of the new revision", || {
        let now = supervisor.worker_pids("b");
        let is_new = now.len() == 3 && !now.contains(&at_work) && before.iter().all(|pid| !now.contains(pid));
        is_new.then_some(())
    });
    wait_spares(&supervisor, 2);
    reload("start = { spares = 0 }\nenv = { REVISION = \"2\" }");
    wait_for("one worker is left", || (supervisor.worker_pids("b").len() == 1).then_some(()));
}
