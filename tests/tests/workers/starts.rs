//! Replacements, late starts and failed starts. The limit on running jobs is never exceeded, keeper delays do not count
//! against a worker, and failures are reported immediately.

use bulkhead_client::Client;
use bulkhead_tests::{SAME_NUMBERS, Supervisor, kill_pid, outcome, run, wait_for};
use nix::sys::signal::Signal;
use serde_json::Value;

fn start(keys: &str) -> Supervisor {
    Supervisor::start(&format!(
        "{SAME_NUMBERS}[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\ndeadline = \"120s\"\n{keys}\n"
    ))
}

fn workers(supervisor: &Supervisor, state: &str) -> usize {
    let snapshot = supervisor.snapshot("b");
    let workers: &Vec<Value> = snapshot["workers"].as_array().unwrap();
    workers.iter().filter(|worker| worker["state"] == state).count()
}

/// Jobs that are still running in replaced workers count towards the concurrency limit.
#[test]
fn restart_does_not_exceed_concurrency_limit() {
    let supervisor = start("processes = 2\nmax_queue = 10");
    supervisor.wait_number("b", "limit", 2);
    run(async {
        let client = Client::connect(supervisor.socket()).await.unwrap();
        let job = |steps: &str| tokio::spawn(client.job("b", "").operation(format!("steps:{steps}")).send());
        let before: Vec<_> = (0..2).map(|_| job("count before;wait end")).collect();
        wait_for("both jobs run", || (supervisor.file_bytes("before") == 2).then_some(()));
        assert!(supervisor.post("/v1/bulkheads/b/restart").0 < 300);
        wait_for("both workers are replaced", || {
            ((workers(&supervisor, "draining"), workers(&supervisor, "ready")) == (2, 2)).then_some(())
        });
        let after: Vec<_> = (0..2).map(|_| job("count after;wait end")).collect();
        supervisor.wait_number("b", "queued", 2);
        assert_eq!((supervisor.file_bytes("after"), supervisor.number("b", "in_flight")), (0, 2));
        supervisor.touch("end");
        for job in before.into_iter().chain(after) {
            assert_eq!(outcome(&job.await.unwrap()), "ok");
        }
        assert_eq!(supervisor.file_bytes("after"), 2);
    });
}

/// The timeout `start.handshake` is measured from the start of the process. A busy keeper therefore does not
/// shorten a worker's time.
#[test]
fn slow_keeper_does_not_cause_handshake_timeouts() {
    let supervisor = start("processes = 1\nstart = { handshake = \"4s\" }");
    let keeper = supervisor.keeper();
    run(async {
        let client = Client::connect(supervisor.socket()).await.unwrap();
        let job = client.job("b", "").operation("steps:count ran;sleep 5000");
        let job = tokio::spawn(job.send());
        wait_for("the job runs", || (supervisor.file_bytes("ran") == 1).then_some(()));
        kill_pid(keeper, Signal::SIGSTOP);
        supervisor.resize("b", r#"{"processes": 2}"#);
        // The job takes longer than `start.handshake`, but less than the time for which a keeper may stay silent.
        assert_eq!(outcome(&job.await.unwrap()), "ok");
        kill_pid(keeper, Signal::SIGCONT);
    });
    supervisor.wait_number("b", "limit", 2);
    let killed = supervisor.events("worker_killed");
    assert!(killed.is_empty(), "{killed:?}");
    assert_eq!(supervisor.number("b", "restarts"), 0);
}

/// The supervisor reports a failed start even if no other event wakes it.
#[test]
fn unsendable_start_order_is_reported_immediately() {
    // The largest possible environment and long paths together exceed the maximum size of an order to the keeper.
    let folder = tempfile::tempdir().unwrap();
    let mut deep = folder.path().to_owned();
    (0..15).for_each(|_| deep.push("d".repeat(240)));
    let paths: Vec<_> = (0..32).map(|number| deep.join(number.to_string())).collect();
    paths.iter().for_each(|path| std::fs::create_dir_all(path).unwrap());
    let long = "x".repeat(90 << 10);
    let supervisor = Supervisor::launch(
        folder,
        "",
        &format!(
            "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nenv = {{ LONG = \"{long}\" }}\n\
             restart = {{ backoff = \"1ms\", max = 3 }}\nsandbox = {{ read = {paths:?} }}\n"
        ),
    );
    // Sends no request in the meantime, because a request would wake the supervisor.
    wait_for("the last failure is logged", || supervisor.log().contains("bulkhead_failed").then_some(()));
}
