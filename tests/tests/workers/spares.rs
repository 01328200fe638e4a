//! Spares, which take over the slots of workers that die, are killed or are recycled. The supervisor then starts new
//! spares.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use bulkhead_client::Executed;
use bulkhead_client::blocking::Client;
use bulkhead_tests::{Supervisor, is_alive, kill_pid, outcome, overrun_blocking, wait_for};
use nix::sys::signal::Signal;

use bulkhead_tests::SetOnDrop;

fn bulkhead(keys: &str) -> String {
    format!("[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 20\n{keys}\n")
}

fn spares(supervisor: &Supervisor) -> Vec<u32> {
    let workers = supervisor.state("b").workers;
    let ready = workers.iter().filter(|worker| worker.spare && worker.state == "ready");
    ready.filter_map(|worker| worker.pid).collect()
}

/// Waits until exactly `count` spares are ready.
fn wait_spares(supervisor: &Supervisor, count: usize) -> Vec<u32> {
    wait_for(&format!("{count} spares are ready"), || {
        Some(spares(supervisor)).filter(|spares| spares.len() == count)
    })
}

fn serving(supervisor: &Supervisor) -> u32 {
    let serves = |state: &str| state == "ready" || state == "busy";
    wait_for("a worker has the slot", || {
        let workers = supervisor.state("b").workers;
        let worker = workers.iter().find(|worker| !worker.spare && serves(worker.state.as_ref()));
        worker.and_then(|worker| worker.pid)
    })
}

#[test]
fn spare_takes_slot_of_dead_worker() {
    let supervisor = Supervisor::start(&bulkhead("start = { spares = 1 }"));
    let client = Client::connect(supervisor.socket()).unwrap();
    for round in 1..=10 {
        let spare = wait_spares(&supervisor, 1)[0];
        assert_eq!(supervisor.number("b", "limit"), 1, "a spare has no permits");
        // Counts earlier events, because a spare can become ready before the slot's first worker and take over the
        // slot.
        let before = supervisor.events("spare_took_over").len();
        kill_pid(serving(&supervisor), Signal::SIGKILL);
        supervisor.wait_events("spare_took_over", before + 1);
        let reply = client.job("b", "x").send().unwrap();
        assert_eq!(reply.outcome().worker_pid, Some(spare), "round {round}");
    }
    assert_eq!(supervisor.number("b", "crashed"), 0);
}

#[test]
fn spare_takes_slot_before_killed_worker_exits() {
    let keys = "deadline = \"2s\"\ngrace = \"20ms\"\nstart = { spares = 1 }";
    let supervisor = Supervisor::start(&bulkhead(keys));
    let spare = wait_spares(&supervisor, 1)[0];
    let client = Client::connect(supervisor.socket()).unwrap();
    let hung = overrun_blocking(&client.job("b", "").operation("hang"));
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

/// Maximum number of replaced workers of a bulkhead that can be exiting at the same time.
const EXITING_MAX: usize = 16;

/// The number of workers never exceeds the sum of slots, spares and the maximum number of exiting workers.
#[test]
fn spares_provide_a_fresh_process_for_each_job() {
    let keys = "recycle = { jobs = 1 }\nstart = { spares = 2 }";
    let supervisor = Supervisor::start(&bulkhead(keys));
    wait_spares(&supervisor, 2);
    let client = Client::connect(supervisor.socket()).unwrap();
    let mut pids = BTreeSet::new();
    for round in 0..50 {
        let reply = client.job("b", "x").send().unwrap();
        assert!(pids.insert(reply.outcome().worker_pid.unwrap()), "round {round}: a worker ran two jobs");
        let there = supervisor.state("b").workers.len();
        assert!(there <= 3 + EXITING_MAX, "{there} workers");
    }
    wait_spares(&supervisor, 2);
    wait_for("the used workers are gone", || {
        let now: BTreeSet<u32> = supervisor.worker_pids("b").into_iter().collect();
        pids.difference(&now).all(|&pid| !is_alive(pid)).then_some(())
    });
    assert_eq!(supervisor.number("b", "crashed"), 0);
}

#[test]
fn dead_or_hung_spare_is_replaced() {
    let keys = "start = { spares = 1 }\nhealth = { heartbeat = \"100ms\", missed = 4 }\n\
                restart = { max = 1000, backoff_max = \"1s\" }";
    let supervisor = Supervisor::start(&bulkhead(keys));
    for signal in [Signal::SIGKILL, Signal::SIGSTOP] {
        let (spare, at_work) = (wait_spares(&supervisor, 1)[0], serving(&supervisor));
        kill_pid(spare, signal);
        wait_for("another spare is ready", || {
            let now = spares(&supervisor);
            (now.len() == 1 && now[0] != spare).then_some(())
        });
        // On a busy machine, the worker in the slot can count as hung, too.
        if serving(&supervisor) != at_work {
            wait_for(&format!("{signal}: the worker in the slot stays, or was hung"), || {
                supervisor.events("worker_hung").iter().any(|event| event["pid"] == at_work).then_some(())
            });
        }
    }
}

/// Workers and spares die with the keeper and are then restarted. Each job has one outcome, and no job begins twice.
#[test]
fn spares_are_restarted_after_keeper_death() {
    const KILLS: usize = 5;
    let keys = "processes = 2\nstart = { spares = 2 }\ndeadline = \"60s\"\nsandbox = { profile = \"none\" }";
    let supervisor = Supervisor::start(&bulkhead(keys));
    let folder = tempfile::tempdir().unwrap();
    let is_over = AtomicBool::new(false);
    let client = Client::connect(supervisor.socket()).unwrap();
    let lane = &|lane: usize| {
        let mut told = 0;
        while !is_over.load(Ordering::SeqCst) {
            told += 1;
            let file = folder.path().join(format!("{lane}-{told}"));
            let (began, ended) = (file.with_extension("began"), file.with_extension("ended"));
            let steps = format!("steps:count {};sleep 5;count {}", began.display(), ended.display());
            let result = client.job("b", "").operation(steps).send();
            let count = |path: &Path| std::fs::metadata(path).map_or(0, |found| found.len());
            let counts = (count(&began), count(&ended));
            match &result {
                Ok(_) => assert_eq!(counts, (1, 1), "{lane}-{told}"),
                Err(error) if error.executed() == Executed::No => {
                    assert_eq!(counts, (0, 0), "{lane}-{told}: {error}");
                }
                Err(error) => {
                    assert_eq!(error.outcome().map(|outcome| outcome.verdict.name()), Some("crashed"));
                    assert!(counts.0 <= 1 && counts.1 <= counts.0, "{lane}-{told}: {counts:?}");
                }
            }
        }
        told
    };
    std::thread::scope(|scope| {
        let submitting = SetOnDrop(&is_over);
        let lanes: Vec<_> = (0..6).map(|number| scope.spawn(move || lane(number))).collect();
        for killed in 1..=KILLS {
            wait_spares(&supervisor, 2);
            supervisor.wait_number("b", "limit", 2);
            let (keeper, workers) = (supervisor.keeper(), supervisor.worker_pids("b"));
            let served = supervisor.number("b", "done");
            wait_for("jobs are done", || (supervisor.number("b", "done") > served + 20).then_some(()));
            kill_pid(keeper, Signal::SIGKILL);
            supervisor.wait_events("supervisor_trouble", killed);
            wait_for("the keeper and its workers are gone", || {
                workers.iter().chain([&keeper]).all(|&pid| !is_alive(pid)).then_some(())
            });
        }
        wait_spares(&supervisor, 2);
        supervisor.wait_number("b", "limit", 2);
        drop(submitting);
        for lane in lanes {
            assert!(lane.join().unwrap() > KILLS);
        }
    });
    assert_eq!(supervisor.worker_pids("b").len(), 4);
    supervisor.wait_number("b", "available", 2);
}

/// A new number of spares takes effect immediately. If a reload changes the program, both workers and spares are
/// replaced.
#[test]
fn reload_changes_number_of_spares() {
    let supervisor = Supervisor::start(&bulkhead(""));
    let at_work = serving(&supervisor);
    let reload = |keys: &str| {
        supervisor.configure("", &bulkhead(keys));
        assert!(supervisor.command().arg("reload").output().unwrap().status.success());
    };
    reload("start = { spares = 2 }");
    let before = wait_spares(&supervisor, 2);
    assert_eq!(serving(&supervisor), at_work, "the change does not replace any workers");
    reload("start = { spares = 2 }\nenv = { REVISION = \"2\" }");
    wait_for("all workers have the new revision", || {
        let now = supervisor.worker_pids("b");
        let is_new = now.len() == 3 && !now.contains(&at_work) && before.iter().all(|pid| !now.contains(pid));
        is_new.then_some(())
    });
    wait_spares(&supervisor, 2);
    reload("start = { spares = 0 }\nenv = { REVISION = \"2\" }");
    wait_for("one worker is left", || (supervisor.worker_pids("b").len() == 1).then_some(()));
}
