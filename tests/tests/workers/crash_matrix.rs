//! Worker failures and their effects on jobs, bulkheads and neighbours.

use std::time::{Duration, Instant};

use bulkhead_client::Client;
use bulkhead_tests::{
    PATIENCE, SAME_NUMBERS, Supervisor, descriptors, heavy, is_alive, outcome, overrun, resident_bytes, run,
    threads, wait_for,
};

const PLAIN: &str = "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\ndeadline = \"300s\"\n\
                     [bulkhead.other]\ncommand = [\"MISBEHAVE\"]\n";

const SPARED: &str =
    "[bulkhead.spared]\ncommand = [\"MISBEHAVE\"]\ndeadline = \"300s\"\nstart = { spares = 2 }\n";

/// Bulkheads with forked workers, one for each profile. Each entry contains the name and the sandbox keys.
const FORKED: [(&str, &str); 3] = [
    ("forked-none", "profile = \"none\""),
    ("forked-default", "profile = \"default\""),
    ("forked-strict", "profile = \"strict\", best_effort = [\"identity\"]"),
];

fn forked() -> String {
    let one = |(name, sandbox): &(&str, &str)| {
        format!(
            "[bulkhead.{name}]\ncommand = [\"MISBEHAVE\"]\ndeadline = \"300s\"\nstart.mode = \"fork\"\n\
             sandbox = {{ {sandbox} }}\n"
        )
    };
    FORKED.iter().map(one).collect()
}

/// Sends a harmful job to each kind of bulkhead, and checks that this bulkhead and its neighbour still serve jobs.
/// Returns the job's outcome, which must be the same for all kinds, except for `die-answering`.
fn after(operation: &str, payload: &str) -> String {
    let supervisor = Supervisor::start(&format!("{PLAIN}{SPARED}{}", forked()));
    let after_in = |bulkhead, payload: &str| after_in(&supervisor, bulkhead, operation, payload);
    let plain = after_in("b", payload);
    let spared = after_in("spared", payload);
    let large = format!("{payload}{}", " ".repeat(100_000));
    let in_file = after_in("b", &large);
    if operation != "die-answering" {
        assert_eq!(plain, spared, "a spare does not change the outcome");
        assert_eq!(plain, in_file, "a payload in a memory file does not change the outcome");
        for (bulkhead, _) in FORKED {
            assert_eq!(plain, after_in(bulkhead, payload), "{bulkhead}: {operation}");
        }
        for embedded in after_embedded(operation, payload) {
            assert_eq!(plain, embedded, "embedded: {operation}");
        }
    }
    plain
}

/// Runs the job in an embedded supervisor, first with the data plane on a separate thread and then on the application's
/// thread. Returns both outcomes.
fn after_embedded(operation: &str, payload: &str) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let mut application = std::process::Command::new(bulkhead_tests::programs().join("application"));
    application.args(["after", operation, payload]).current_dir(folder.path());
    application.env("MISBEHAVE", bulkhead_tests::programs().join("misbehave"));
    let ended = bulkhead_tests::output(&mut application);
    let (said, error) = (String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
    assert!(ended.status.success() && said.ends_with("done\n"), "{}\n{said}\n{error}", ended.status);
    let told: Vec<_> = said.lines().take(2).map(str::to_owned).collect();
    assert_eq!(said.lines().count(), 3, "{said}");
    told
}

fn after_in(supervisor: &Supervisor, bulkhead: &str, operation: &str, payload: &str) -> String {
    run(async {
        let client = Client::connect(supervisor.socket()).await.unwrap();
        let place =
            async || client.job(bulkhead, payload.to_owned()).operation("where").send().await.unwrap();
        let began = Instant::now();
        while payload.len() > 65_536 && place().await.payload() != b"file" {
            assert!(began.elapsed() < PATIENCE, "no payload of {bulkhead} was in a memory file");
        }
        let result = client.job(bulkhead, payload.to_owned()).operation(operation).send().await;
        assert!(client.job("other", "x").send().await.is_ok());
        assert!(client.job(bulkhead, "x").send().await.is_ok(), "{bulkhead} after {operation}");
        outcome(&result)
    })
}

#[test]
fn worker_death_during_a_job_is_a_crash() {
    assert_eq!(after("segv", ""), "crashed/signal");
    assert_eq!(after("abort", ""), "crashed/signal");
    assert_eq!(after("exit", "0"), "crashed/exit");
    assert_eq!(after("exit", "99"), "crashed/exit");
}

#[test]
fn panic_or_output_flood_is_not_a_crash() {
    assert_eq!(after("panic", ""), "failed/panic");
    assert_eq!(after("flood", "20000"), "ok");
    assert_eq!(after("threads", "50"), "ok");
}

#[test]
fn worker_death_during_large_reply_is_a_crash() {
    let ended = after("die-answering", "");
    assert!(ended == "crashed/signal" || ended == "ok", "{ended}");
}

#[test]
fn deadline_stops_hanging_and_spinning_jobs() {
    for operation in ["hang", "spin", "leak"] {
        let supervisor = Supervisor::start(
            "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\ndeadline = \"1s\"\ngrace = \"20ms\"\n\
             deadline_max = \"60s\"\n[bulkhead.b.rlimits]\nas = \"2GiB\"\n",
        );
        run(async {
            let client = Client::connect(supervisor.socket()).await.unwrap();
            let ended = outcome(&overrun(&client.job("b", "").operation(operation)).await);
            let expected = ["deadline_exceeded/running", "crashed/signal"];
            assert!(expected.contains(&ended.as_str()), "{operation}: {ended}");
            let deadline = Duration::from_secs(60);
            supervisor.wait_number("b", "available", 1);
            let reply = client.job("b", "x").deadline(deadline).send().await;
            assert_eq!(outcome(&reply), "ok");
        });
    }
}

#[test]
fn stopped_worker_counts_as_hung() {
    let supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nhealth = { heartbeat = \"50ms\", missed = 4 }\n\
         restart = { max = 1000, backoff_max = \"1s\" }\n",
    );
    run(async {
        let client = Client::connect(supervisor.socket()).await.unwrap();
        assert_eq!(outcome(&client.job("b", "").operation("stop").send().await), "crashed/hung");
    });
    // On a busy machine, a worker that runs this job can also count as hung.
    wait_for("a worker serves a job", || {
        run(async {
            let client = Client::connect(supervisor.socket()).await.unwrap();
            client.job("b", "x").send().await.ok().map(drop)
        })
    });
    // An idle worker that is stopped counts as hung, too.
    let pid = wait_for("a worker runs", || supervisor.worker_pids("b").first().copied());
    bulkhead_tests::kill_pid(pid, nix::sys::signal::Signal::SIGSTOP);
    wait_for("the worker is replaced", || (!is_alive(pid)).then_some(()));
}

/// A worker can write heartbeats to its journal without waking the supervisor. If these heartbeats stop, the worker
/// counts as hung.
#[test]
fn worker_without_journal_heartbeats_counts_as_hung() {
    let supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\", \"raw\", \"beater\"]\n\
         health = { heartbeat = \"200ms\", missed = 4 }\nrestart = { max = 1000, backoff_max = \"1s\" }\n",
    );
    // The heartbeats continue for three times the permitted silence. On a busy machine, a worker can pause for longer
    // than permitted and is then replaced, so the count starts again with each worker.
    let (mut seen, mut beats_before) = (0, 0);
    let pid = wait_for("a worker has written 150 heartbeats", || {
        let (pid, beats) = (*supervisor.worker_pids("b").first()?, supervisor.file_bytes("beats"));
        if pid != seen {
            (seen, beats_before) = (pid, beats);
        }
        (beats >= beats_before + 150).then_some(pid)
    });
    supervisor.touch("still");
    wait_for("the worker is replaced", || (!is_alive(pid)).then_some(()));
    wait_for("an event says that the worker was hung", || {
        supervisor.events("worker_hung").iter().any(|event| event["pid"] == pid).then_some(())
    });
}

#[test]
fn dead_idle_worker_is_replaced_without_failing_jobs() {
    let supervisor = Supervisor::start(PLAIN);
    run(async {
        let client = Client::connect(supervisor.socket()).await.unwrap();
        for round in 1..=20 {
            let pid = supervisor.worker_pids("b")[0];
            bulkhead_tests::kill_pid(pid, nix::sys::signal::Signal::SIGKILL);
            supervisor.wait_number("b", "restarts", round);
            let reply = client.job("b", "x").send().await;
            assert_eq!(outcome(&reply), "ok", "round {round}");
        }
    });
    assert_eq!(supervisor.number("b", "crashed"), 0);
}

#[test]
fn workers_that_kill_each_other_are_replaced() {
    for count in [1_u64, 2, 5, 13] {
        let supervisor = Supervisor::start(&format!(
            "{SAME_NUMBERS}[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nprocesses = {count}\nmax_queue = 100\n\
             deadline = \"300s\"\nrestart = {{ max = 100 }}\n"
        ));
        supervisor.wait_number("b", "limit", count);
        let pids = supervisor.worker_pids("b");
        let list = pids.iter().map(u32::to_string).collect::<Vec<_>>().join(" ");
        run(async {
            let client = Client::connect(supervisor.socket()).await.unwrap();
            let jobs: Vec<_> = (0..count)
                .map(|_| {
                    let (client, list) = (client.clone(), list.clone());
                    tokio::spawn(async move { client.job("b", list).operation("kill").send().await })
                })
                .collect();
            for job in jobs {
                let ended = outcome(&job.await.unwrap());
                assert!(["crashed/signal", "ok"].contains(&ended.as_str()), "{count}: {ended}");
            }
        });
        wait_for("all workers are replaced", || pids.iter().all(|&pid| !is_alive(pid)).then_some(()));
        supervisor.wait_number("b", "limit", count);
    }
}

#[test]
fn failed_starts_stop_the_bulkhead_with_a_reason() {
    // Only workers that have to exceed a timeout have a short timeout.
    let (long, hello, ready) = ("", "handshake = \"2s\"", "ready = \"2s\"");
    let cases = [
        ("exit-at-start", "exited with status 3", long),
        ("hang-at-start", "did not send HELLO", hello),
        ("init-fails", "exited with status", long),
        ("init-hangs", "not ready within", ready),
        ("raw never-hello", "did not send HELLO", hello),
        ("raw wrong-version", "versions 99 to 99", long),
        ("raw rubbish-first", "HELLO", long),
        ("raw text-first", "did not send HELLO: ", long),
    ];
    let bulkheads: String = cases
        .iter()
        .enumerate()
        .map(|(i, (arguments, _, limit))| {
            let arguments: Vec<String> = arguments.split(' ').map(|a| format!("{a:?}")).collect();
            let command = arguments.join(", ");
            format!("[bulkhead.b{i}]\ncommand = [\"MISBEHAVE\", {command}]\nstart = {{ {limit} }}\n")
        })
        .collect();
    let supervisor = Supervisor::start(&format!(
        "[defaults]\nstart = {{ handshake = \"60s\", ready = \"60s\" }}\nmax_queue = 10\n\
         restart = {{ backoff = \"10ms\", backoff_max = \"1h\", max = 2 }}\n{bulkheads}\
         [bulkhead.good]\ncommand = [\"MISBEHAVE\"]\n"
    ));
    for (i, (arguments, why, _)) in cases.iter().enumerate() {
        let name = format!("b{i}");
        wait_for(&format!("{arguments} has failed"), || {
            (supervisor.snapshot(&name)["state"] == "failed").then_some(())
        });
        let detail = supervisor.snapshot(&name)["detail"].as_str().unwrap_or_default().to_owned();
        assert!(detail.contains(why), "{arguments}: {detail}");
    }
    run(async {
        let client = Client::connect(supervisor.socket()).await.unwrap();
        let refused = client.job("b0", "").send().await;
        assert_eq!(outcome(&refused), "rejected/unavailable");
        assert_eq!(outcome(&client.job("good", "").send().await), "ok");
    });
    assert_eq!(
        supervisor.try_get("/readyz").unwrap().0,
        200,
        "one failed bulkhead does not make the supervisor unready"
    );
}

#[test]
fn queued_jobs_are_rejected_if_no_worker_can_start() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("worker");
    std::fs::copy(bulkhead_tests::programs().join("misbehave"), &program).unwrap();
    let supervisor = Supervisor::start(&format!(
        "[bulkhead.b]\ncommand = [{program:?}]\nmax_queue = 10\ndeadline = \"60s\"\n\
         restart = {{ backoff = \"10ms\", max = 3 }}\n"
    ));
    run(async {
        let client = Client::connect(supervisor.socket()).await.unwrap();
        let mut hanging = client.job("b", "").operation("hang").start().await.unwrap();
        // The progress report proves that the job has started. A job that a dead worker never read would go back to the
        // queue.
        assert!(hanging.progress().await.is_some());
        let waiting: Vec<_> = (0..5)
            .map(|_| {
                let client = client.clone();
                tokio::spawn(async move { client.job("b", "").send().await })
            })
            .collect();
        tokio::task::yield_now().await;
        wait_for("five jobs wait", || (supervisor.number("b", "queued") == 5).then_some(()));
        std::fs::remove_file(&program).unwrap();
        bulkhead_tests::kill_pid(supervisor.worker_pids("b")[0], nix::sys::signal::Signal::SIGKILL);
        assert_eq!(outcome(&hanging.await), "crashed/signal");
        for job in waiting {
            assert_eq!(outcome(&job.await.unwrap()), "rejected/unavailable");
        }
    });
}

#[test]
fn protocol_violation_kills_the_worker() {
    for mode in ["rubbish", "text", "close", "hello-twice", "bad-metadata"] {
        let supervisor =
            Supervisor::start(&format!("[bulkhead.b]\ncommand = [\"MISBEHAVE\", \"raw\", \"{mode}\"]\n"));
        run(async {
            let client = Client::connect(supervisor.socket()).await.unwrap();
            let ended = outcome(&client.job("b", "").send().await);
            assert_eq!(ended, "crashed/protocol", "{mode}");
        });
        supervisor.wait_number("b", "limit", 1);
    }
    // A worker that announces 4 GiB and sends only a little keeps the permit until the worker is killed.
    let supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\", \"raw\", \"huge\"]\nmax_queue = 10\ndeadline = \"60s\"\n",
    );
    run(async {
        let client = Client::connect(supervisor.socket()).await.unwrap();
        for restarts in 0..3 {
            assert_eq!(outcome(&client.job("b", "").send().await), "failed/result_too_large");
            // The current worker is killed one second later, so the count may already include its replacement.
            let counted = supervisor.number("b", "restarts");
            assert!(
                (restarts..=restarts + 1).contains(&counted),
                "{counted}, expected {restarts} or one more"
            );
        }
    });
    assert_eq!(supervisor.number("b", "crashed"), 0);
    assert!(resident_bytes(supervisor.pid()) < 100 << 20);
}

#[test]
fn duplicate_and_unknown_replies_reach_no_client() {
    for (mode, expected) in [("twice", &b"first"[..]), ("stranger", b"yours")] {
        let supervisor =
            Supervisor::start(&format!("[bulkhead.b]\ncommand = [\"MISBEHAVE\", \"raw\", \"{mode}\"]\n"));
        run(async {
            let client = Client::connect(supervisor.socket()).await.unwrap();
            for _ in 0..10 {
                let reply = client.job("b", "").send().await.unwrap();
                assert_eq!(reply.payload(), expected);
            }
        });
        wait_for("the extra replies are counted", || {
            (supervisor.number("b", "late_replies") >= 10).then_some(())
        });
        assert_eq!(supervisor.number("b", "done"), 10);
    }
}

#[test]
fn reply_sent_before_worker_death_counts() {
    let supervisor =
        Supervisor::start("[bulkhead.b]\ncommand = [\"MISBEHAVE\", \"raw\", \"reply-and-die\"]\n");
    run(async {
        let client = Client::connect(supervisor.socket()).await.unwrap();
        for _ in 0..20 {
            let reply = client.job("b", "").deadline(Duration::from_secs(20)).send().await.unwrap();
            assert_eq!(reply.payload(), b"my last words");
        }
    });
    let half = Supervisor::start("[bulkhead.b]\ncommand = [\"MISBEHAVE\", \"raw\", \"half-answer\"]\n");
    run(async {
        let client = Client::connect(half.socket()).await.unwrap();
        assert_eq!(outcome(&client.job("b", "").send().await), "crashed/signal");
    });
}

#[test]
fn six_crashes_do_not_stop_the_bulkhead() {
    let supervisor = Supervisor::start(PLAIN);
    run(async {
        let client = Client::connect(supervisor.socket()).await.unwrap();
        for _ in 0..6 {
            assert_eq!(outcome(&client.job("b", "").operation("segv").send().await), "crashed/signal");
        }
        assert!(client.job("b", "x").send().await.is_ok());
    });
    assert_eq!(supervisor.snapshot("b")["state"], "ready");
}

#[test]
fn a_thousand_crashes_leak_no_resources() {
    let _turn = heavy();
    let supervisor = Supervisor::start(PLAIN);
    let keeper = supervisor.keeper();
    let round = |count: u32| {
        run(async {
            let client = Client::connect(supervisor.socket()).await.unwrap();
            for _ in 0..count {
                assert_eq!(outcome(&client.job("b", "").operation("segv").send().await), "crashed/signal");
            }
        });
        supervisor.wait_number("b", "limit", 1);
        wait_for("output is read to its end", || (descriptors(supervisor.pid()) < 60).then_some(()));
        (
            descriptors(supervisor.pid()),
            descriptors(keeper),
            threads(supervisor.pid()),
            resident_bytes(supervisor.pid()),
        )
    };
    let before = round(100);
    let after = round(900);
    // The symbolizer keeps the files of crashes that are waiting for a backtrace.
    wait_for("the supervisor closes descriptors", || {
        (descriptors(supervisor.pid()) <= before.0 + 4).then_some(())
    });
    wait_for("the keeper closes descriptors", || (descriptors(keeper) <= before.1 + 2).then_some(()));
    // The supervisor may have one more thread, which periodically checks temporary folders.
    assert!(after.2 <= before.2 + 1, "threads: {before:?} {after:?}");
    assert!(after.3 <= before.3 + (8 << 20), "memory: {before:?} {after:?}");
}
