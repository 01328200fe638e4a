//! Outcomes of jobs with a real supervisor and real workers: results, limits, deadlines and cancellation.

use std::time::{Duration, Instant};

use bulkhead_client::Client;
use bulkhead_shared::{Executed, RejectReason, Verdict};
use bulkhead_tests::confined::{STRICT_LAYERS, has_layers, is_root};
use bulkhead_tests::{Supervisor, heavy, outcome, overrun, run, tally, wait_for};

#[test]
fn payloads_of_every_size_come_back_unchanged() {
    let supervisor =
        Supervisor::start("[bulkhead.echo]\ncommand = [\"MISBEHAVE\"]\n[bulkhead.cat]\nexec = [\"cat\"]\n");
    run(async {
        let client = Client::connect(supervisor.socket()).await.unwrap();
        for size in [0, 1, 64, 65_535, 65_536, 65_537, 300_000, 5_000_000] {
            let payload: Vec<u8> = (0..size).map(|i| (i * 7 + i / 251) as u8).collect();
            for name in ["echo", "cat"] {
                let reply = client.job(name, payload.clone()).send().await.unwrap();
                assert!(reply.payload() == payload, "{size} bytes came back changed from {name}");
                assert_eq!(reply.outcome().bulkhead, name);
                assert_eq!(reply.outcome().attempts, 1);
                assert!(reply.outcome().worker_pid.is_some());
            }
        }
    });
}

#[test]
fn limit_and_queue_size_are_never_exceeded() {
    let supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nprocesses = 2\nmax_in_flight = 2\nmax_queue = 5\n",
    );
    supervisor.wait_number("b", "limit", 4);
    let results = run(async {
        let client = Client::connect(supervisor.socket()).await.unwrap();
        let steps = "steps:count begun;wait end;ledger marks 200 job";
        let send = |_| tokio::spawn(client.job("b", "").operation(steps).send());
        let mut jobs: Vec<_> = (0..4).map(send).collect();
        // While a worker is slow to begin a job, the queue accepts more jobs than `max_queue`.
        wait_for("four jobs have begun", || (supervisor.file_bytes("begun") == 4).then_some(()));
        supervisor.wait_number("b", "queue_capacity", 5);
        jobs.extend((0..26).map(send));
        wait_for("all other jobs are queued or rejected", || {
            let snapshot = supervisor.snapshot("b");
            (snapshot["queued"] == 5 && snapshot["rejected"]["queue_full"] == 21).then_some(())
        });
        assert_eq!(supervisor.file_bytes("begun"), 4);
        supervisor.touch("end");
        let mut results = Vec::new();
        for job in jobs {
            results.push(job.await.unwrap());
        }
        results
    });
    for error in results.iter().filter_map(|r| r.as_ref().err()) {
        let outcome = error.outcome().unwrap();
        assert_eq!(outcome.verdict.executed(), Executed::No);
        assert!(outcome.retry_after.is_some(), "{outcome:?}");
    }
    let counts = tally(results.iter().map(outcome));
    assert_eq!(counts.get("ok"), Some(&9), "{counts:?}");
    assert_eq!(counts.get("rejected/queue_full"), Some(&21), "{counts:?}");
    let (mut running, mut most) = (0, 0);
    for mark in std::fs::read_to_string(supervisor.file("marks")).unwrap().lines() {
        running += if mark.starts_with("begin") { 1 } else { -1 };
        most = most.max(running);
    }
    assert!(most <= 4, "{most} jobs ran at once");
    assert_eq!(running, 0);
}

#[test]
fn hanging_job_does_not_affect_other_jobs_in_worker() {
    let supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_in_flight = 4\ndeadline = \"60s\"\ngrace = \"50ms\"\n",
    );
    supervisor.wait_number("b", "limit", 4);
    run(async {
        let good = Client::connect(supervisor.socket()).await.unwrap();
        let neighbours: Vec<_> = (0..3)
            .map(|_| {
                let good = good.clone();
                tokio::spawn(async move { good.job("b", "").operation("steps:wait end").send().await })
            })
            .collect();
        wait_for("three jobs are in flight", || (supervisor.number("b", "in_flight") == 3).then_some(()));

        let bad = Client::connect(supervisor.socket()).await.unwrap();
        // The deadline is long enough for the job to begin, because a job that has not begun holds no permit.
        let asked = overrun(&bad.job("b", "").operation("hang").deadline(Duration::from_secs(2))).await;
        assert_eq!(outcome(&asked), "deadline_exceeded/running");
        // The hanging job still holds its permit, so a fifth job is rejected at once.
        assert_eq!(outcome(&good.job("b", "").send().await), "rejected/queue_full");
        supervisor.touch("end");
        drop(bad);
        for neighbour in neighbours {
            assert_eq!(outcome(&neighbour.await.unwrap()), "ok");
        }
        // The hanging job is now alone in its worker, so the worker is killed.
        supervisor.wait_number("b", "restarts", 1);
        let reply = good.job("b", "x").send().await.unwrap();
        assert_eq!(reply.payload(), b"x");
    });
}

#[test]
fn worker_is_killed_if_its_only_job_ignores_cancellation() {
    let supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\ngrace = \"20ms\"\ndeadline = \"60s\"\n\
         [bulkhead.patient]\ncommand = [\"MISBEHAVE\"]\ngrace = \"60s\"\ndeadline = \"60s\"\nmax_queue = 1\n",
    );
    run(async {
        let client = Client::connect(supervisor.socket()).await.unwrap();
        // The job ignores the cancellation, and has begun when its client drops it.
        let stubborn = client.job("b", "").operation("steps:count begun;sleep 3600000");
        let task = tokio::spawn(stubborn.send());
        wait_for("the job has begun", || (supervisor.file_bytes("begun") == 1).then_some(()));
        task.abort();
        supervisor.wait_number("b", "restarts", 1);
        assert_eq!(supervisor.number("b", "cancelled"), 1);

        let other = Client::connect(supervisor.socket()).await.unwrap();
        // A job that has not begun would be recalled, and its worker would be kept.
        let stubborn = other.job("b", "").operation("steps:count begun;sleep 3600000");
        let task = tokio::spawn(async move { stubborn.send().await });
        wait_for("the second job has begun", || (supervisor.file_bytes("begun") == 2).then_some(()));
        task.abort();
        supervisor.wait_number("b", "restarts", 2);
        // If a job obeys the cancellation, its worker is kept.
        let pid = client.job("patient", "").operation("pid").send().await.unwrap().outcome().worker_pid;
        let obedient = client.job("patient", "").operation("steps:count obedient;wait never");
        let task = tokio::spawn(obedient.send());
        wait_for("the third job has begun", || (supervisor.file_bytes("obedient") == 1).then_some(()));
        task.abort();
        let again = client.job("patient", "").operation("pid").send().await.unwrap();
        assert_eq!(again.outcome().worker_pid, pid);
    });
}

#[test]
fn async_handlers_run_concurrently_and_stop_when_cancelled() {
    let supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_in_flight = 50\ngrace = \"60s\"\ndeadline = \"60s\"\n",
    );
    run(async {
        let client = Client::connect(supervisor.socket()).await.unwrap();
        let pid = client.job("b", "").operation("pid").send().await.unwrap().outcome().worker_pid;
        let sleeping: Vec<_> =
            (0..49).map(|_| tokio::spawn(client.job("b", "50000").operation("async-sleep").send())).collect();
        wait_for("all 49 jobs run", || (supervisor.number("b", "in_flight") == 49).then_some(()));
        let brief = client.job("b", "1").operation("async-sleep").send().await;
        assert_eq!(brief.unwrap().payload(), b"slept");
        sleeping.iter().for_each(tokio::task::JoinHandle::abort);
        wait_for("all handlers have stopped", || (supervisor.number("b", "in_flight") == 0).then_some(()));
        let late = client.job("b", "50000").operation("async-sleep").deadline(Duration::from_secs(2));
        assert_eq!(outcome(&overrun(&late).await), "deadline_exceeded/running");
        let again = client.job("b", "").operation("pid").send().await.unwrap();
        assert_eq!(again.outcome().worker_pid, pid, "the worker was replaced");
    });
}

/// The runtime needs a pair of sockets, because the worker's program uses tokio's `signal` feature. A strictly confined
/// worker cannot create sockets once it is ready.
#[test]
fn async_handlers_run_under_strict_profile() {
    for (mode, is_supported) in [("spawn", true), ("fork", is_root())] {
        if !is_supported || !has_layers(STRICT_LAYERS) {
            continue;
        }
        let supervisor = Supervisor::start(&format!(
            "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nstart.mode = \"{mode}\"\ndeadline = \"60s\"\n\
             sandbox = {{ profile = \"strict\", best_effort = [\"identity\"] }}\n"
        ));
        run(async {
            let client = Client::connect(supervisor.socket()).await.unwrap();
            let reply = client.job("b", "1").operation("async-sleep").send().await;
            assert_eq!(reply.unwrap().payload(), b"slept", "{mode}");
        });
    }
}

#[test]
fn deadline_kills_the_whole_process_tree() {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("tree.sh");
    let program = format!("PROGRAM-{}", std::process::id());
    std::fs::write(
        &script,
        format!(
            "trap '' TERM\n(setsid sh -c 'sleep 1000 # {program}; :' &)\nsh -c 'sleep 1000 # {program}; :'\n"
        ),
    )
    .unwrap();
    let supervisor = Supervisor::start(&format!(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\ndeadline = \"2s\"\ngrace = \"100ms\"\n\
         [bulkhead.x]\nexec = [\"sh\", {script:?}]\ndeadline = \"2s\"\ngrace = \"20s\"\n\
         env = {{ PATH = \"/usr/bin:/bin\" }}\n"
    ));
    let marker = format!("TREE-{}", supervisor.pid());
    run(async {
        let client = Client::connect(supervisor.socket()).await.unwrap();
        let began = Instant::now();
        let result = overrun(&client.job("b", marker.clone()).operation("tree")).await;
        let took = began.elapsed();
        assert_eq!(outcome(&result), "deadline_exceeded/running");
        assert!(took >= Duration::from_secs(2), "{took:?}");
        wait_for("the tree is gone", || bulkhead_tests::processes_with(&marker).is_empty().then_some(()));
        supervisor.wait_number("b", "available", 1);

        let result = overrun(&client.job("x", "")).await;
        assert_eq!(outcome(&result), "deadline_exceeded/running");
        wait_for("the program's process tree is gone", || {
            bulkhead_tests::processes_with(&program).is_empty().then_some(())
        });
        supervisor.wait_number("x", "available", 1);
        assert_eq!(supervisor.number("x", "restarts"), 0, "only the job's own process tree is killed");
    });
}

#[test]
fn rejections_and_failures_have_specific_reasons() {
    let supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_payload = \"1KiB\"\nmax_result = \"100KiB\"\n\
         max_queue = 10\nqueue_timeout = \"50ms\"\ndeadline = \"60s\"\ndeadline_max = \"120s\"\n",
    );
    run(async {
        let client = Client::connect(supervisor.socket()).await.unwrap();
        let rejected = |reason: RejectReason| format!("rejected/{reason}");
        assert_eq!(outcome(&client.job("nobody", "").send().await), rejected(RejectReason::NotFound));
        let large = client.job("b", vec![0; 1025]).send().await;
        assert_eq!(outcome(&large), rejected(RejectReason::TooLarge));
        let larger = client.job("b", vec![0; 10 << 20]).send().await;
        assert_eq!(outcome(&larger), rejected(RejectReason::TooLarge));
        let named = client.job("b", "").operation("x".repeat(300)).send().await;
        assert_eq!(outcome(&named), rejected(RejectReason::Invalid));

        let failed = client.job("b", "").operation("fail").send().await.unwrap_err();
        let Verdict::Failed(failure) = &failed.outcome().unwrap().verdict else { panic!("{failed}") };
        assert_eq!((failure.code.as_str(), failure.fault.name()), ("bad_input", "caller"));
        assert_eq!(outcome(&client.job("b", "").operation("panic").send().await), "failed/panic");
        for size in ["200000", "102401"] {
            let big = client.job("b", size).operation("big").send().await;
            assert_eq!(outcome(&big), "failed/result_too_large");
        }
        assert!(client.job("b", "102400").operation("big").send().await.is_ok());

        let slow = client.job("b", "").operation("steps:wait end").send();
        let waits = async {
            wait_for("the job runs", || (supervisor.number("b", "in_flight") == 1).then_some(()));
            let waited = client.job("b", "").send().await;
            supervisor.touch("end");
            waited
        };
        let (slow, waited) = tokio::join!(slow, waits);
        assert_eq!(outcome(&slow), "ok");
        assert_eq!(outcome(&waited), rejected(RejectReason::QueueTimeout));
        let clamped = client.job("b", "").deadline(Duration::from_secs(3600)).send().await.unwrap();
        assert_eq!(clamped.outcome().deadline, Duration::from_secs(120));
    });
    assert_eq!(supervisor.number("b", "restarts"), 0);
    let snapshot = supervisor.snapshot("b");
    let outcomes = ["done", "failed", "crashed", "deadline_exceeded", "cancelled"];
    let ended: u64 = outcomes.iter().map(|name| snapshot[name].as_u64().unwrap()).sum();
    let rejected: u64 =
        snapshot["rejected"].as_object().unwrap().values().map(|count| count.as_u64().unwrap()).sum();
    assert_eq!(snapshot["submitted"].as_u64(), Some(ended + rejected), "{snapshot}");
}

#[test]
fn largest_payload_fits_into_an_equal_max_buffered() {
    for size in [100, 16 << 10, 2 << 20] {
        let supervisor = Supervisor::start_with(
            &format!("max_payload = {size}\nmax_buffered = {size}"),
            "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 3",
        );
        let client = bulkhead_client::blocking::Client::connect(supervisor.socket()).unwrap();
        for _ in 0..3 {
            client.job("b", vec![1; size]).send().unwrap();
        }
    }
}

#[test]
fn queued_payloads_stay_within_max_buffered() {
    let _turn = heavy();
    let supervisor = Supervisor::start_with(
        "max_payload = \"1MiB\"\nmax_buffered = \"64MiB\"",
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 10000\ndeadline = \"120s\"\n\
         [bulkhead.other]\ncommand = [\"MISBEHAVE\"]\n",
    );
    let before = bulkhead_tests::resident_bytes(supervisor.pid());
    run(async {
        let client = Client::connect(supervisor.socket()).await.unwrap();
        let blocker = client.clone();
        let blocker = tokio::spawn(async move { blocker.job("b", "").operation("hang").send().await });
        wait_for("the job runs", || (supervisor.number("b", "in_flight") == 1).then_some(()));
        let mut jobs = tokio::task::JoinSet::new();
        let mut rejected = 0_u64;
        for batch in 0..20 {
            for _ in 0..20 {
                let client = client.clone();
                jobs.spawn(async move { client.job("b", vec![batch; 1 << 20]).send().await });
            }
            tokio::task::yield_now().await;
            while let Some(done) = jobs.try_join_next() {
                assert_eq!(outcome(&done.unwrap()), "rejected/overloaded");
                rejected += 1;
            }
        }
        // Jobs whose payloads fit into `max_buffered` wait in the queue. All others are rejected.
        while rejected < 400 - 64 {
            let done = jobs.join_next().await.unwrap();
            assert_eq!(outcome(&done.unwrap()), "rejected/overloaded");
            rejected += 1;
        }
        wait_for("all other jobs are queued", || {
            rejected += std::iter::from_fn(|| jobs.try_join_next()).count() as u64;
            (supervisor.number("b", "queued") + rejected == 400).then_some(())
        });
        let queued = supervisor.number("b", "queued");
        assert!(
            (56..=64).contains(&queued),
            "{queued} payloads of 1 MiB wait, with `max_buffered` of 64 MiB"
        );
        let grown = bulkhead_tests::resident_bytes(supervisor.pid()).saturating_sub(before);
        assert!(grown < 192 << 20, "memory grew by {} MiB", grown >> 20);
        blocker.abort();
    });
}

#[test]
fn crashing_bulkhead_does_not_affect_other_bulkheads() {
    let _turn = heavy();
    let supervisor = Supervisor::start(
        "[defaults]\nmax_queue = 1000\ndeadline = \"60s\"\n\
         [bulkhead.a]\ncommand = [\"MISBEHAVE\"]\nmax_in_flight = 8\n\
         [bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_in_flight = 8\n\
         [bulkhead.c]\ncommand = [\"MISBEHAVE\"]\nmax_in_flight = 8\n\
         [bulkhead.crash]\ncommand = [\"MISBEHAVE\"]\nprocesses = 2\n",
    );
    let counts = run(async {
        let client = Client::connect(supervisor.socket()).await.unwrap();
        let mut workers = tokio::task::JoinSet::new();
        for lane in 0..64_u32 {
            let client = client.clone();
            workers.spawn(async move {
                let mut seen = Vec::new();
                for round in 0..32_u32 {
                    let number = round * 64 + lane;
                    if number >= 2_000 {
                        break;
                    }
                    let (name, operation) = match number % 4 {
                        0 => ("a", "echo"),
                        1 => ("b", "echo"),
                        2 => ("c", "echo"),
                        _ => ("crash", "segv"),
                    };
                    let result = client.job(name, "x").operation(operation).send().await;
                    seen.push(format!("{name} {}", outcome(&result)));
                }
                seen
            });
        }
        tally(workers.join_all().await.into_iter().flatten())
    });
    assert_eq!(counts.values().sum::<usize>(), 2_000);
    for name in ["a", "b", "c"] {
        assert_eq!(counts.get(&format!("{name} ok")), Some(&500), "{counts:?}");
    }
    assert_eq!(counts.get("crash crashed/signal"), Some(&500), "{counts:?}");
    assert!(supervisor.number("crash", "restarts") >= 200);
}

/// The supervisor is stopped when the deadline passes. The worker finishes before the supervisor checks the
/// deadline, so the job counts as done.
#[test]
fn result_sent_during_supervisor_pause_is_delivered() {
    let supervisor = Supervisor::start("[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\n");
    run(async {
        let client = Client::connect(supervisor.socket()).await.unwrap();
        let deadline = Duration::from_secs(5);
        let began = Instant::now();
        let steps = "steps:count ran;wait end;count over";
        let job = tokio::spawn(client.job("b", "").operation(steps).deadline(deadline).send());
        wait_for("the job runs", || (supervisor.file_bytes("ran") == 1).then_some(()));
        supervisor.signal(nix::sys::signal::Signal::SIGSTOP);
        supervisor.touch("end");
        wait_for("the job is over", || (supervisor.file_bytes("over") == 1).then_some(()));
        wait_for("the deadline passed a second ago", || {
            (began.elapsed() > deadline + Duration::from_secs(1)).then_some(())
        });
        supervisor.signal(nix::sys::signal::Signal::SIGCONT);
        let reply = job.await.unwrap().unwrap();
        assert!(reply.outcome().ran > deadline, "{:?}", reply.outcome());
    });
    // On a busy machine, there can be events about shorter pauses.
    let told = wait_for("there is an event about the pause", || {
        let mut told = supervisor.events("held_up").into_iter();
        told.find(|event| event["late_ms"].as_u64() > Some(500))
    });
    assert_eq!((&told["severity"], supervisor.number("b", "deadline_exceeded")), (&"warning".into(), 0));
}

#[test]
fn unknown_operation_error_lists_the_operations() {
    let supervisor = Supervisor::start("[bulkhead.b]\ncommand = [\"MISBEHAVE\", \"forked\", \"stray\"]\n");
    let client = bulkhead_client::blocking::Client::connect(supervisor.socket()).unwrap();
    let error = client.job("b", "").operation("whom").send().unwrap_err();
    let Some(Verdict::Failed(failure)) = error.outcome().map(|outcome| &outcome.verdict) else {
        panic!("{error}")
    };
    assert_eq!(failure.code, "unknown_operation");
    assert_eq!(
        failure.message,
        "this worker has no operation \"whom\"; available operations: \"template\", \"who\", \"worker\""
    );
}

#[test]
fn operation_registered_twice_prevents_start() {
    let supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\", \"registers-twice\"]\nrestart = { backoff = \"10ms\", max = 1 }\n",
    );
    wait_for("the snapshot shows the error", || {
        let snapshot = supervisor.snapshot("b");
        snapshot["detail"]
            .as_str()?
            .contains("`operation(\"turn\")` of `Server` was called twice")
            .then_some(())
    });
}
