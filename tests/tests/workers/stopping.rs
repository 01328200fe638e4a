//! SIGTERM sent to a worker by an operator, or to the whole control group. The worker exits in an orderly way and loses
//! no accepted jobs, including jobs that are still on their way to the worker.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bulkhead_client::blocking::Client;
use bulkhead_tests::{Supervisor, kill_pid, wait_for};
use nix::sys::signal::Signal;

use bulkhead_tests::SetOnDrop;

/// Number of times that the test sends SIGTERM to a running worker.
const SIGNALS: usize = 20;

/// Number of clients. Each client sends one job after another.
const CLIENTS: usize = 8;

/// Number of jobs that must finish between two signals.
const JOBS_BETWEEN: u64 = 10;

/// Repeatedly sends SIGTERM to the only worker of a bulkhead while clients send jobs without a pause.
fn no_job_is_lost(bulkhead: &str) {
    let supervisor = Supervisor::start(bulkhead);
    let client = Client::connect(supervisor.socket()).unwrap();
    let (is_over, done) = (AtomicBool::new(false), AtomicU64::new(0));
    let submit = || {
        let mut lost = Vec::new();
        while !is_over.load(Ordering::Relaxed) {
            match client.job("x", "payload").operation("echo").send() {
                Ok(_) => drop(done.fetch_add(1, Ordering::Relaxed)),
                Err(error) => lost.push(error.to_string()),
            }
        }
        lost
    };
    let lost: Vec<String> = std::thread::scope(|scope| {
        let submitting = SetOnDrop(&is_over);
        let clients: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(submit)).collect();
        let mut last = 0;
        for _ in 0..SIGNALS {
            let before = done.load(Ordering::Relaxed);
            let worker = wait_for("another worker serves", || {
                let worker = supervisor.worker_pids("x").into_iter().find(|pid| *pid != last)?;
                (done.load(Ordering::Relaxed) >= before + JOBS_BETWEEN).then_some(worker)
            });
            kill_pid(worker, Signal::SIGTERM);
            wait_for("the worker is gone", || (!supervisor.worker_pids("x").contains(&worker)).then_some(()));
            last = worker;
        }
        drop(submitting);
        clients.into_iter().flat_map(|client| client.join().unwrap()).collect()
    });
    assert!(lost.is_empty(), "{} of {} jobs were lost: {lost:?}", lost.len(), done.load(Ordering::Relaxed));
    assert_eq!(supervisor.number("x", "crashed"), 0);
}

const KEYS: &str = "max_in_flight = 4\nmax_queue = 100\ndeadline = \"60s\"\n";

#[test]
fn sdk_worker_finishes_all_accepted_jobs() {
    no_job_is_lost(&format!("[bulkhead.x]\ncommand = [\"MISBEHAVE\"]\n{KEYS}"));
}

#[test]
fn program_host_finishes_all_accepted_jobs() {
    no_job_is_lost(&format!("[bulkhead.x]\nexec = [\"cat\"]\n{KEYS}"));
}

#[test]
fn sigterm_stops_starting_worker_immediately() {
    let supervisor = Supervisor::start(
        "[bulkhead.x]\ncommand = [\"MISBEHAVE\", \"slow-again\", \"once\"]\nsandbox = { profile = \"none\" }\n\
         max_queue = 10\ndeadline = \"60s\"\nstart = { ready = \"60s\" }\nrestart = { backoff = \"1ms\" }\n",
    );
    let first = supervisor.worker_pids("x")[0];
    kill_pid(first, Signal::SIGTERM);
    let second = wait_for("a second worker starts", || {
        supervisor.worker_pids("x").into_iter().find(|pid| *pid != first)
    });
    let third = wait_for("a third worker starts", || {
        kill_pid(second, Signal::SIGTERM);
        supervisor.worker_pids("x").into_iter().find(|pid| *pid != first && *pid != second)
    });
    assert_ne!(third, second);
    std::fs::write(supervisor.folder.path().join("go"), "").unwrap();
    let client = Client::connect(supervisor.socket()).unwrap();
    assert_eq!(client.job("x", "here").send().unwrap().payload(), b"here");
}
