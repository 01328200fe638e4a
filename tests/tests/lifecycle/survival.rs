//! Deaths of the supervisor and of its keeper. No process survives, no client waits forever, and another supervisor can
//! start.

use std::process::{Child, Stdio};
use std::time::Duration;

use bulkhead_client::Client;
use bulkhead_tests::{Supervisor, children, is_alive, kill_pid, name, processes_with, run, wait_for};
use nix::sys::signal::Signal;

use bulkhead_tests::in_time;

const TREE: &str = "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nprocesses = 2\ndeadline = \"100s\"\n";

/// Submits a job that starts a tree of processes. The processes try to outlive the worker.
fn with_tree(supervisor: &Supervisor, marker: &str) -> Child {
    let job = supervisor
        .command()
        .args(["submit", "b", "tree", "--payload-file", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .and_then(|mut child| {
            use std::io::Write;
            child.stdin.take().unwrap().write_all(marker.as_bytes())?;
            Ok(child)
        })
        .unwrap();
    wait_for("the process tree exists", || (processes_with(marker).len() >= 3).then_some(()));
    job
}

/// Waits until a program has exited, and returns the exit code.
fn exit_code(program: &mut Child) -> Option<i32> {
    wait_for("the program exits", || program.try_wait().unwrap()).code()
}

#[test]
fn killed_supervisor_leaves_no_processes() {
    let supervisor = Supervisor::start(TREE);
    let marker = format!("OUTLIVE-{}", supervisor.pid());
    let mut job = with_tree(&supervisor, &marker);
    let (workers, keeper) = (supervisor.worker_pids("b"), supervisor.keeper());
    supervisor.signal(Signal::SIGKILL);
    wait_for("no descendants are left", || processes_with(&marker).is_empty().then_some(()));
    wait_for("no workers are left", || {
        workers.iter().chain([&keeper]).all(|&pid| !is_alive(pid)).then_some(())
    });
    assert_eq!(exit_code(&mut job), Some(69));
    let again = supervisor.command().args(["submit", "b"]).stderr(Stdio::null()).status().unwrap();
    assert_eq!(again.code(), Some(69));
}

#[test]
fn workers_die_when_the_keeper_is_killed() {
    let supervisor = Supervisor::start(TREE);
    let marker = format!("KEEPER-{}", supervisor.pid());
    let mut job = with_tree(&supervisor, &marker);
    let (workers, keeper) = (supervisor.worker_pids("b"), supervisor.keeper());
    kill_pid(keeper, Signal::SIGKILL);
    wait_for("no descendants are left", || processes_with(&marker).is_empty().then_some(()));
    wait_for("no workers are left", || workers.iter().all(|&pid| !is_alive(pid)).then_some(()));
    assert_eq!(exit_code(&mut job), Some(70));
    assert_ne!(supervisor.keeper(), keeper);
    run(async {
        let client = Client::connect(supervisor.socket()).await.unwrap();
        let reply = client.job("b", "x").deadline(Duration::from_secs(60)).send().await.unwrap();
        assert_eq!(reply.payload(), b"x");
    });
    supervisor.wait_number("b", "limit", 2);
}

#[test]
fn shutdown_finishes_running_jobs_and_rejects_new_ones() {
    let mut supervisor = Supervisor::start(TREE);
    let keeper = supervisor.keeper();
    run(async {
        let client = Client::connect(supervisor.socket()).await.unwrap();
        let slow = client.clone();
        let slow = tokio::spawn(async move { slow.job("b", "").operation("steps:wait end").send().await });
        tokio::task::yield_now().await;
        wait_for("the job runs", || (supervisor.number("b", "in_flight") == 1).then_some(()));
        supervisor.signal(Signal::SIGTERM);
        wait_for("the supervisor drains", || (supervisor.try_get("/readyz")?.0 == 503).then_some(()));
        let refused = client.job("b", "").send().await.unwrap_err();
        assert_eq!(refused.outcome().unwrap().verdict.reason(), Some("draining"));
        supervisor.touch("end");
        assert_eq!(slow.await.unwrap().unwrap().payload(), b"done");
    });
    assert_eq!(supervisor.wait().code(), Some(0));
    assert!(!is_alive(keeper));
    assert!(!supervisor.socket().exists(), "the socket still exists");
}

#[test]
fn second_signal_or_drain_timeout_forces_immediate_stop() {
    for is_second_signal in [true, false] {
        let timeout = if is_second_signal { "60s" } else { "300ms" };
        let mut supervisor = Supervisor::start_with(&format!("drain_timeout = \"{timeout}\""), TREE);
        run(async {
            let client = Client::connect(supervisor.socket()).await.unwrap();
            let job = client.clone();
            let steps = "steps:count begun;sleep 3600000";
            let job = tokio::spawn(async move { job.job("b", "").operation(steps).send().await });
            wait_for("the job runs", || (supervisor.file_bytes("begun") == 1).then_some(()));
            supervisor.signal(Signal::SIGTERM);
            if is_second_signal {
                wait_for("the supervisor drains", || (supervisor.try_get("/readyz")?.0 == 503).then_some(()));
                supervisor.signal(Signal::SIGINT);
            }
            let ended = job.await.unwrap().unwrap_err();
            let verdict = &ended.outcome().expect("the job has an outcome").verdict;
            assert_eq!((verdict.name(), verdict.reason()), ("crashed", Some("stopped")));
        });
        assert_eq!(supervisor.wait().code(), Some(0));
    }
}

#[test]
fn supervisor_replaces_only_a_stale_socket() {
    let mut first = Supervisor::start(TREE);
    let mut second = std::process::Command::new(bulkhead_tests::programs().join("bulkhead-supervisor"));
    second.arg("--config").arg(first.folder.path().join("workers.toml"));
    let refused = bulkhead_tests::output(&mut second);
    assert!(!refused.status.success());
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains("another supervisor"), "{said}");
    assert_eq!(first.number("b", "limit"), 2, "the first supervisor was affected");

    first.signal(Signal::SIGKILL);
    first.wait();
    assert!(first.socket().exists(), "a killed supervisor leaves its socket");
    let mut third = second.stderr(Stdio::inherit()).spawn().unwrap();
    wait_for("the next supervisor is ready", || {
        assert_eq!(third.try_wait().unwrap(), None, "the next supervisor has exited");
        (first.try_get("/readyz")?.0 == 200).then_some(())
    });
    kill_pid(third.id(), Signal::SIGTERM);
    assert_eq!(exit_code(&mut third), Some(0));
}

#[test]
fn command_drains_resumes_restarts_and_resets_bulkhead() {
    let supervisor = Supervisor::start(TREE);
    supervisor.wait_number("b", "limit", 2);
    let run_command = |arguments: &[&str]| {
        let output = supervisor.command().args(arguments).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    assert_eq!(run_command(&["drain", "b"]).0, Some(0));
    assert_eq!(supervisor.snapshot("b")["state"], "draining");
    assert_eq!(run_command(&["submit", "b"]).0, Some(75));
    assert_eq!(run_command(&["resume", "b"]).0, Some(0));
    assert_eq!(run_command(&["submit", "b"]).0, Some(0));
    let before = supervisor.worker_pids("b");
    assert_eq!(run_command(&["restart", "b"]).0, Some(0));
    wait_for("both workers are replaced", || {
        let now = supervisor.worker_pids("b");
        (now.len() == 2 && now.iter().all(|pid| !before.contains(pid))).then_some(())
    });
    assert_eq!(run_command(&["reset", "b"]).0, Some(0));
    assert_eq!(run_command(&["restart", "nobody"]).0, Some(66));
    assert_eq!(run_command(&["status"]).0, Some(0));
    assert_eq!(run_command(&["status", "nobody"]).0, Some(66));
}

#[test]
fn stopped_keeper_is_killed_and_replaced() {
    let mut supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\ndeadline = \"2s\"\n\
         deadline_max = \"60s\"\ngrace = \"10ms\"\n\
         [bulkhead.other]\ncommand = [\"MISBEHAVE\"]\n",
    );
    supervisor.wait_number("b", "limit", 1);
    let client = bulkhead_client::blocking::Client::connect(supervisor.socket()).unwrap();
    let keeper = supervisor.keeper();
    kill_pid(keeper, Signal::SIGSTOP);
    // On a busy machine, the deadline can pass before the job has begun. Then there is no worker to kill.
    let late = wait_for("a job exceeds its deadline while it runs", || {
        let late = client.job("b", "").operation("hang").send().unwrap_err();
        let is_queued = late.outcome().is_some_and(|outcome| outcome.verdict.reason() == Some("queued"));
        (!is_queued).then_some(late)
    });
    assert_eq!(late.exit_code(), 124);
    wait_for("the stopped keeper is killed", || (!is_alive(keeper)).then_some(()));
    supervisor.wait_number("b", "limit", 1);
    assert!(client.job("b", "x").deadline(Duration::from_secs(60)).send().is_ok());
    assert!(client.job("other", "x").send().is_ok());
    supervisor.signal(Signal::SIGTERM);
    assert!(supervisor.wait().success());
}

#[test]
fn keeper_deaths_do_not_fail_idle_bulkheads() {
    let supervisor = Supervisor::start("[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\n");
    for killed in 1..=8 {
        supervisor.wait_number("b", "limit", 1);
        kill_pid(supervisor.keeper(), Signal::SIGKILL);
        // Waits for the event, because the snapshot is outdated until then.
        supervisor.wait_events("worker_exited", killed);
    }
    supervisor.wait_number("b", "limit", 1);
    assert_eq!(supervisor.snapshot("b")["state"], "ready");
}

/// The supervisor restarts a repeatedly dying keeper after a pause. During the pause, clients get answers without
/// waiting for the keeper.
#[test]
fn jobs_are_answered_without_a_keeper() {
    let supervisor = Supervisor::start("[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\n");
    let client = bulkhead_client::blocking::Client::connect(supervisor.socket()).unwrap();
    let has_keeper = || {
        children(supervisor.pid()).into_iter().any(|pid| name(pid).is_some_and(|it| it == "bulkhead-keeper"))
    };
    // The pause before the restart grows up to 1.6 s. On a busy machine, a single answer can take that long, so the
    // test tries again.
    let was_answered = (1..=30).any(|killed| {
        kill_pid(supervisor.keeper(), Signal::SIGKILL);
        supervisor.wait_events("supervisor_trouble", killed);
        let refused = client.job("elsewhere", "").send().unwrap_err();
        assert_eq!(refused.exit_code(), 66);
        !has_keeper()
    });
    assert!(was_answered, "each answer waited for the next keeper");
    assert_eq!(client.job("b", "x").deadline(Duration::from_secs(60)).send().unwrap().payload(), b"x");
}

#[test]
fn disabled_bulkhead_does_not_prevent_readiness() {
    let off = "[bulkhead.off]\ncommand = [\"MISBEHAVE\"]\nmax_in_flight = 0\n";
    let both = format!("{off}[bulkhead.on]\ncommand = [\"MISBEHAVE\"]\n");
    for bulkheads in [off, &both] {
        let supervisor = Supervisor::start(bulkheads);
        wait_for("the supervisor is ready", || (supervisor.try_get("/readyz")?.0 == 200).then_some(()));
        let client = bulkhead_client::blocking::Client::connect(supervisor.socket()).unwrap();
        assert_eq!(client.job("off", "").send().unwrap_err().exit_code(), 75);
    }
}

/// The supervisor sees that the worker's link is closed before the keeper reports the worker's death.
#[test]
fn late_death_report_has_the_correct_cause() {
    let supervisor = Supervisor::start(&format!("{TREE}\n[bulkhead.clock]\ncommand = [\"MISBEHAVE\"]\n"));
    let uptime = || supervisor.snapshot("clock")["workers"][0]["uptime_ms"].as_f64().unwrap_or(0.0);
    let mut job = supervisor.command();
    job.args(["submit", "b", "pid", "--json"]).stdout(Stdio::null());
    assert!(job.status().unwrap().success());
    let mut job = supervisor.command();
    // A job that has not begun would move to the other worker.
    let stubborn = "steps:count begun;sleep 3600000";
    let job = job.args(["submit", "b", stubborn, "--json"]).stdout(Stdio::piped()).stderr(Stdio::null());
    let job = job.spawn().unwrap();
    wait_for("the job has begun", || (supervisor.file_bytes("begun") == 1).then_some(()));
    let busy = wait_for("a worker has the job", || {
        let snapshot = supervisor.snapshot("b");
        let busy = snapshot["workers"].as_array()?.iter().find(|worker| worker["in_flight"] == 1)?.clone();
        busy["pid"].as_u64()
    });
    kill_pid(supervisor.keeper(), Signal::SIGSTOP);
    kill_pid(busy as u32, Signal::SIGKILL);
    let began = uptime();
    wait_for("three seconds have passed", || (uptime() > began + 3000.0).then_some(()));
    kill_pid(supervisor.keeper(), Signal::SIGCONT);
    let output = in_time("the submitting command exits", || job.wait_with_output().unwrap());
    let outcome: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&outcome["outcome"], &outcome["reason"]), (&"crashed".into(), &"signal".into()), "{outcome}");
}
