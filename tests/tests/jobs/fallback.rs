//! Fallbacks. A job that the first bulkhead (the entry) rejects is diverted to a fallback. The job keeps its deadline,
//! is subject to the limits of the fallback, and is counted at the entry.

use std::process::Stdio;
use std::time::{Duration, Instant};

use bulkhead_client::{Client, Executed, Job, JobError, Priority, Reply};
use bulkhead_tests::{
    Auditor, SAME_NUMBERS, Supervisor, connect, heavy, kill_pid, outcome, overrun, run, spawn, tally,
    wait_for,
};
use nix::sys::signal::Signal;
use serde_json::Value;

/// Starts a supervisor with the bulkheads `entry` and `safe`, which have the given additional keys. `safe` is the
/// fallback of `entry`.
fn start(entry: &str, safe: &str) -> Supervisor {
    start_more(&format!("fallback = [\"safe\"]\n{entry}"), &format!("[bulkhead.safe]\n{WORKER}\n{safe}\n"))
}

/// Starts a supervisor with a bulkhead `entry`, which has the given keys, and with the bulkheads in `more`.
fn start_more(entry: &str, more: &str) -> Supervisor {
    Supervisor::start(&format!(
        "{SAME_NUMBERS}[defaults]\ndeadline = \"60s\"\nfallback = []\n[bulkhead.entry]\n{WORKER}\n{entry}\n{more}\n"
    ))
}

const WORKER: &str = "command = [\"MISBEHAVE\"]";

const FORCED_OPEN: &str = r#"{"breaker": "forced_open"}"#;

/// Returns a job for the bulkhead `entry`. The worker executes the given steps.
fn steps(client: &Client, steps: &str) -> Job {
    client.job("entry", "").operation(format!("steps:{steps}"))
}

/// Returns the outcome of a job, and the name of the bulkhead that reports the outcome.
fn end(result: &Result<Reply, JobError>) -> (String, String) {
    let told = match result {
        Ok(reply) => reply.outcome(),
        Err(error) => error.outcome().unwrap(),
    };
    (outcome(result), told.bulkhead.clone())
}

fn ended(how: &str, by: &str) -> (String, String) {
    (how.to_owned(), by.to_owned())
}

fn counted(supervisor: &Supervisor, bulkhead: &str) -> [u64; 5] {
    let snapshot = supervisor.snapshot(bulkhead);
    let rejected = snapshot["rejected"].as_object().unwrap().values().filter_map(Value::as_u64).sum();
    let number = |field: &str| snapshot[field].as_u64().unwrap();
    [number("submitted"), number("done"), number("crashed"), rejected, number("elsewhere")]
}

// Conditions.

#[test]
fn open_breaker_diverts_jobs_to_fallback() {
    let supervisor = start("", "");
    let auditor = Auditor::of(&supervisor);
    supervisor.resize("entry", FORCED_OPEN);
    run(async {
        let client = connect(&supervisor).await;
        let reply = steps(&client, "pid").send().await.unwrap();
        let safe = supervisor.worker_pids("safe");
        assert_eq!(String::from_utf8_lossy(reply.payload()), safe[0].to_string());
        let told = reply.outcome();
        assert_eq!((told.bulkhead.as_str(), told.attempts, told.worker_pid), ("safe", 1, Some(safe[0])));
        assert_eq!(told.deadline, Duration::from_secs(60));
    });
    // The job is counted once, in the bulkhead that the client named.
    assert_eq!(counted(&supervisor, "entry"), [1, 1, 0, 0, 0]);
    assert_eq!(counted(&supervisor, "safe"), [0, 0, 0, 0, 0]);
    let told = supervisor.wait_events("fallback_used", 1);
    assert_eq!((told.len(), &told[0]["bulkhead"]), (1, &"entry".into()), "{told:?}");
    assert_eq!(
        (&told[0]["target"], &told[0]["reason"]),
        (&"safe".into(), &"circuit_open".into()),
        "{told:?}"
    );
    // Once the breaker is closed, jobs run in `entry` again.
    supervisor.resize("entry", r#"{"breaker": "auto"}"#);
    run(async {
        let client = connect(&supervisor).await;
        assert_eq!(end(&steps(&client, "pid").send().await), ended("ok", "entry"));
    });
    auditor.finish();
}

#[test]
fn submit_command_names_the_serving_bulkhead() {
    let supervisor = start("", "");
    supervisor.resize("entry", FORCED_OPEN);
    let told =
        supervisor.command().args(["--json", "submit", "entry"]).stdin(Stdio::null()).output().unwrap();
    assert!(told.status.success());
    let told: Value = serde_json::from_slice(&told.stdout).unwrap();
    assert_eq!((&told["outcome"], &told["bulkhead"]), (&"ok".into(), &"safe".into()), "{told}");
}

#[test]
fn full_queue_diverts_jobs_to_fallback() {
    let supervisor = start("max_queue = 1", "");
    let auditor = Auditor::of(&supervisor);
    run(async {
        let client = connect(&supervisor).await;
        let first = spawn(steps(&client, "wait end"));
        supervisor.wait_number("entry", "in_flight", 1);
        let second = spawn(steps(&client, "wait end"));
        supervisor.wait_number("entry", "queued", 1);
        assert_eq!(end(&steps(&client, "echo").send().await), ended("ok", "safe"));
        supervisor.touch("end");
        for job in [first, second] {
            assert_eq!(end(&job.await.unwrap()), ended("ok", "entry"));
        }
    });
    assert_eq!(supervisor.wait_events("fallback_used", 1)[0]["reason"], "queue_full");
    assert_eq!(counted(&supervisor, "entry"), [3, 3, 0, 0, 0]);
    auditor.finish();
}

#[test]
fn backpressure_diverts_noncritical_jobs_to_fallback() {
    let supervisor = start("max_queue = 10\npressure = { warn = 0.4, reject = 0.5 }", "");
    run(async {
        let client = connect(&supervisor).await;
        let mut waiting = vec![spawn(steps(&client, "wait end"))];
        supervisor.wait_number("entry", "in_flight", 1);
        waiting.extend((0..6).map(|_| spawn(steps(&client, "wait end"))));
        supervisor.wait_number("entry", "queued", 6);
        assert_eq!(end(&steps(&client, "echo").send().await), ended("ok", "safe"));
        let critical = spawn(steps(&client, "echo").priority(Priority::Critical));
        supervisor.wait_number("entry", "queued", 7);
        supervisor.touch("end");
        for job in waiting.into_iter().chain([critical]) {
            assert_eq!(end(&job.await.unwrap()), ended("ok", "entry"));
        }
    });
    assert_eq!(supervisor.wait_events("fallback_used", 1)[0]["reason"], "backpressure");
}

#[test]
fn bulkhead_without_workers_diverts_jobs_to_fallback() {
    let supervisor = start("max_queue = 10\nrestart = { policy = \"never\" }", "max_queue = 10");
    let auditor = Auditor::of(&supervisor);
    run(async {
        let client = connect(&supervisor).await;
        let last = spawn(steps(&client, "wait end;die"));
        supervisor.wait_number("entry", "in_flight", 1);
        let payload: Vec<u8> = (0..3 << 20).map(|i| (i % 251) as u8).collect();
        let big = |_| spawn(client.job("entry", payload.clone()).operation("echo"));
        let waiting: Vec<_> = (0..3).map(big).collect();
        let small = spawn(client.job("entry", "small").operation("echo"));
        supervisor.wait_number("entry", "queued", 4);
        supervisor.touch("end");
        // This job is not diverted, because it has run and is not idempotent.
        assert_eq!(end(&last.await.unwrap()), ended("crashed/signal", "entry"));
        for job in waiting {
            let reply = job.await.unwrap().unwrap();
            assert_eq!((reply.outcome().bulkhead.as_str(), reply.outcome().attempts), ("safe", 1));
            assert!(reply.payload() == payload, "the payload came back changed");
        }
        assert_eq!(small.await.unwrap().unwrap().payload(), b"small");
        let reply = client.job("entry", "new").operation("echo").send().await.unwrap();
        assert_eq!((reply.payload(), reply.outcome().bulkhead.as_str()), (&b"new"[..], "safe"));
    });
    assert_eq!(supervisor.wait_events("fallback_used", 1)[0]["reason"], "unavailable");
    assert_eq!(counted(&supervisor, "entry"), [6, 5, 1, 0, 0]);
    auditor.finish();
}

#[test]
fn drained_bulkhead_diverts_jobs_to_fallback() {
    let supervisor = start("max_queue = 10", "max_queue = 10");
    let auditor = Auditor::of(&supervisor);
    run(async {
        let client = connect(&supervisor).await;
        let running = spawn(steps(&client, "wait end"));
        supervisor.wait_number("entry", "in_flight", 1);
        let waiting: Vec<_> = (0..5).map(|_| spawn(steps(&client, "count ran;echo"))).collect();
        supervisor.wait_number("entry", "queued", 5);
        assert_eq!(supervisor.post("/v1/bulkheads/entry/drain").0, 200);
        for job in waiting {
            assert_eq!(end(&job.await.unwrap()), ended("ok", "safe"));
        }
        assert_eq!(supervisor.file_bytes("ran"), 5);
        assert_eq!(end(&steps(&client, "echo").send().await), ended("ok", "safe"));
        supervisor.touch("end");
        assert_eq!(end(&running.await.unwrap()), ended("ok", "entry"));
    });
    assert_eq!(supervisor.wait_events("fallback_used", 1)[0]["reason"], "draining");
    auditor.finish();
}

#[test]
fn crash_diverts_only_idempotent_jobs() {
    let supervisor = start("restart = { max = 1000, backoff = \"1ms\", backoff_max = \"5ms\" }", "");
    let auditor = Auditor::of(&supervisor);
    run(async {
        let client = connect(&supervisor).await;
        let once = steps(&client, "die-first 1 once").send().await;
        assert_eq!(end(&once), ended("crashed/signal", "entry"));
        for size in [0, 1, 70_000, 5 << 20] {
            let payload: Vec<u8> = (0..size).map(|i| (i % 249) as u8).collect();
            let job = client.job("entry", payload.clone()).idempotent(true);
            let job = job.operation(format!("steps:sleep 40;die-first 1 ran-{size};echo"));
            let began = Instant::now();
            let reply = job.send().await.unwrap();
            let (told, passed) = (reply.outcome(), began.elapsed());
            assert_eq!((told.bulkhead.as_str(), told.attempts), ("safe", 2), "{size} bytes");
            assert_eq!(told.worker_pid, Some(supervisor.worker_pids("safe")[0]));
            // `ran` is the sum of both attempts and is within the total time.
            assert!(told.ran >= Duration::from_millis(80), "{told:?}");
            assert!(told.ran + told.queued <= passed, "{told:?} in {passed:?}");
            assert!(reply.payload() == payload, "{size} bytes came back changed");
        }
    });
    assert_eq!(counted(&supervisor, "entry"), [5, 4, 1, 0, 0]);
    assert_eq!(counted(&supervisor, "safe"), [0, 0, 0, 0, 0]);
    assert_eq!(supervisor.wait_events("fallback_used", 1)[0]["reason"], "signal");
    auditor.finish();
}

#[test]
fn crashed_job_is_retried_in_the_entry_and_in_the_fallback() {
    let retry =
        "retry = { attempts = 2 }\nrestart = { max = 1000, backoff = \"1ms\", backoff_max = \"5ms\" }";
    let supervisor = start(retry, retry);
    let auditor = Auditor::of(&supervisor);
    run(async {
        let client = connect(&supervisor).await;
        for (deaths, how, by, attempts) in [
            (1, "ok", "entry", 2),
            (2, "ok", "safe", 3),
            (3, "ok", "safe", 4),
            (4, "crashed/signal", "safe", 4),
        ] {
            let job = steps(&client, &format!("die-first {deaths} ran-{deaths}")).idempotent(true);
            let result = job.send().await;
            assert_eq!(end(&result), ended(how, by), "{deaths} deaths");
            let tried = match &result {
                Ok(reply) => reply.outcome().attempts,
                Err(error) => error.outcome().unwrap().attempts,
            };
            assert_eq!(tried, attempts, "{deaths} deaths");
        }
    });
    auditor.finish();
}

#[test]
fn job_specific_failures_do_not_use_fallback() {
    let supervisor = start(
        "max_payload = 1000\nmax_queue = 5\nqueue_timeout = \"50ms\"\npoison = { crashes = 1 }\n\
         rate_limit = { per_second = 0.001, burst = 1000 }\ntenants = { max_queue = 0 }\n",
        "",
    );
    run(async {
        let client = connect(&supervisor).await;
        let job = |operation: &str| client.job("entry", "").operation(operation).idempotent(true);
        assert_eq!(end(&job("fail").send().await), ended("failed/bad_input", "entry"));
        let dear = job("echo").cost(1001).send().await;
        assert_eq!(end(&dear), ended("rejected/rate_limited", "entry"));
        let large = client.job("entry", vec![0; 1001]).send().await;
        assert_eq!(end(&large), ended("rejected/too_large", "entry"));
        let late = overrun(&job("hang").deadline(Duration::from_secs(2))).await;
        assert_eq!(end(&late), ended("deadline_exceeded/running", "entry"));
        supervisor.wait_number("entry", "available", 1);
        assert_eq!(end(&job("abort").idempotent(false).send().await), ended("crashed/signal", "entry"));
        assert_eq!(end(&job("abort").send().await), ended("rejected/quarantined", "entry"));
        supervisor.wait_number("entry", "available", 1);
        let running = spawn(steps(&client, "wait end").tenant("t"));
        supervisor.wait_number("entry", "in_flight", 1);
        assert_eq!(end(&job("echo").tenant("t").send().await), ended("rejected/tenant_quota", "entry"));
        supervisor.touch("end");
        assert_eq!(end(&running.await.unwrap()), ended("ok", "entry"));
    });
    assert_eq!(supervisor.events("fallback_used").len(), 0);
    assert_eq!(supervisor.number("entry", "elsewhere"), 0);
}

#[test]
fn queue_timeout_does_not_use_fallback() {
    let supervisor = start("max_queue = 5\nqueue_timeout = \"50ms\"", "");
    run(async {
        let client = connect(&supervisor).await;
        let running = spawn(steps(&client, "wait end"));
        supervisor.wait_number("entry", "in_flight", 1);
        assert_eq!(end(&steps(&client, "echo").send().await), ended("rejected/queue_timeout", "entry"));
        supervisor.touch("end");
        assert_eq!(outcome(&running.await.unwrap()), "ok");
    });
    assert_eq!(supervisor.events("fallback_used").len(), 0);
}

// Targets.

#[test]
fn fallbacks_are_tried_in_order() {
    let supervisor = start_more(
        "fallback = [\"drained\", \"closed\", \"full\"]",
        &format!("[bulkhead.drained]\n{WORKER}\n[bulkhead.closed]\n{WORKER}\n[bulkhead.full]\n{WORKER}\n"),
    );
    let auditor = Auditor::of(&supervisor);
    run(async {
        let client = connect(&supervisor).await;
        let job = || steps(&client, "echo").send();
        assert_eq!(end(&job().await), ended("ok", "entry"));
        supervisor.resize("entry", FORCED_OPEN);
        assert_eq!(end(&job().await), ended("ok", "drained"));
        assert_eq!(supervisor.post("/v1/bulkheads/drained/drain").0, 200);
        assert_eq!(end(&job().await), ended("ok", "closed"));
        supervisor.resize("closed", FORCED_OPEN);
        assert_eq!(end(&job().await), ended("ok", "full"));
        supervisor.resize("full", r#"{"max_in_flight": 0}"#);
        let refused = job().await;
        assert_eq!(end(&refused), ended("rejected/circuit_open", "entry"));
        let error = refused.unwrap_err();
        let told = error.outcome().unwrap();
        assert_eq!((told.attempts, told.worker_pid), (0, None));
        assert_eq!(error.executed(), Executed::No);
        assert!(error.is_retryable() && error.retry_after().is_some(), "{told:?}");
        // The job goes to the first available fallback.
        assert_eq!(supervisor.post("/v1/bulkheads/drained/resume").0, 200);
        assert_eq!(end(&job().await), ended("ok", "drained"));
    });
    assert_eq!(counted(&supervisor, "entry"), [6, 5, 0, 1, 0]);
    for other in ["drained", "closed", "full"] {
        assert_eq!(counted(&supervisor, other), [0, 0, 0, 0, 0], "{other}");
    }
    auditor.finish();
}

#[test]
fn unavailable_fallback_leaves_crash_as_outcome() {
    let supervisor = start("", "");
    let auditor = Auditor::of(&supervisor);
    supervisor.resize("safe", FORCED_OPEN);
    run(async {
        let client = connect(&supervisor).await;
        let result = steps(&client, "die").idempotent(true).send().await;
        assert_eq!(end(&result), ended("crashed/signal", "entry"));
        let error = result.unwrap_err();
        assert_eq!((error.executed(), error.is_retryable()), (Executed::Unknown, true));
        assert_eq!(error.outcome().unwrap().attempts, 1);
        assert!(error.outcome().unwrap().worker_pid.is_some());
    });
    assert_eq!(counted(&supervisor, "entry"), [1, 0, 1, 0, 0]);
    auditor.finish();
}

/// The crash is the outcome, although the first and the last bulkhead rejected the job. Otherwise, the client would learn
/// that the job has not run.
#[test]
fn crash_in_first_fallback_outlasts_rejection_by_the_second() {
    let supervisor = start_more(
        "fallback = [\"one\", \"two\"]",
        &format!(
            "[bulkhead.one]\n{WORKER}\n[bulkhead.two]\n{WORKER}\nmax_queue = 5\nqueue_timeout = \"50ms\"\n"
        ),
    );
    let auditor = Auditor::of(&supervisor);
    supervisor.resize("entry", FORCED_OPEN);
    run(async {
        let client = connect(&supervisor).await;
        let running = spawn(client.job("two", "").operation("steps:wait end"));
        supervisor.wait_number("two", "in_flight", 1);
        // In `two`, the first job exceeds the queue timeout, and the second job is not admitted.
        for breaker in [r#"{"breaker": "auto"}"#, FORCED_OPEN] {
            supervisor.resize("two", breaker);
            supervisor.wait_number("one", "available", 1);
            let result = steps(&client, "die").idempotent(true).send().await;
            assert_eq!(end(&result), ended("crashed/signal", "one"));
            let error = result.unwrap_err();
            assert_eq!((error.executed(), error.is_retryable()), (Executed::Unknown, true));
            let told = error.outcome().unwrap();
            assert_eq!((told.attempts, told.report.is_some()), (1, true), "{told:?}");
        }
        supervisor.touch("end");
        assert_eq!(outcome(&running.await.unwrap()), "ok");
    });
    assert_eq!(counted(&supervisor, "entry"), [2, 0, 2, 0, 0]);
    auditor.finish();
}

#[test]
fn mutual_fallbacks_do_not_loop() {
    let both =
        format!("[bulkhead.a]\n{WORKER}\nfallback = [\"b\"]\n[bulkhead.b]\n{WORKER}\nfallback = [\"a\"]\n");
    let supervisor = Supervisor::start(&both);
    let auditor = Auditor::of(&supervisor);
    run(async {
        let client = connect(&supervisor).await;
        supervisor.resize("a", FORCED_OPEN);
        assert_eq!(end(&client.job("a", "").send().await), ended("ok", "b"));
        supervisor.resize("b", FORCED_OPEN);
        for name in ["a", "b"] {
            let refused = client.job(name, "").send().await;
            assert_eq!(end(&refused), ended("rejected/circuit_open", name));
        }
        let deadly = client.job("a", "").operation("abort").idempotent(true);
        supervisor.resize("a", r#"{"breaker": "auto"}"#);
        supervisor.resize("b", r#"{"breaker": "auto"}"#);
        let result = deadly.send().await;
        assert_eq!(end(&result), ended("crashed/signal", "b"));
        assert_eq!(result.unwrap_err().outcome().unwrap().attempts, 2);
    });
    assert_eq!(counted(&supervisor, "a"), [3, 1, 1, 1, 0]);
    assert_eq!(counted(&supervisor, "b"), [1, 0, 0, 1, 0]);
    auditor.finish();
}

#[test]
fn fallback_with_smaller_max_payload_is_skipped() {
    let supervisor = start_more(
        "fallback = [\"small\", \"big\"]",
        &format!(
            "[bulkhead.small]\n{WORKER}\nmax_payload = 1000\n[bulkhead.big]\n{WORKER}\n\
             [bulkhead.other]\n{WORKER}\nfallback = [\"small\"]\n"
        ),
    );
    let auditor = Auditor::of(&supervisor);
    supervisor.resize("entry", FORCED_OPEN);
    supervisor.resize("other", FORCED_OPEN);
    run(async {
        let client = connect(&supervisor).await;
        let job = |name: &str, size| client.job(name, vec![7; size]).operation("echo").send();
        assert_eq!(end(&job("entry", 1000).await), ended("ok", "small"));
        assert_eq!(end(&job("entry", 1001).await), ended("ok", "big"));
        assert_eq!(end(&job("other", 1001).await), ended("rejected/circuit_open", "other"));
    });
    auditor.finish();
}

#[test]
fn large_payloads_reach_the_fallback_unchanged() {
    let supervisor = start_more(
        "fallback = [\"shut\", \"safe\"]",
        &format!("[bulkhead.shut]\n{WORKER}\n[bulkhead.safe]\n{WORKER}\nmax_in_flight = 4\nmax_queue = 20\n"),
    );
    let auditor = Auditor::of(&supervisor);
    supervisor.resize("entry", FORCED_OPEN);
    supervisor.resize("shut", FORCED_OPEN);
    run(async {
        let client = connect(&supervisor).await;
        let jobs: Vec<_> = [1, 65_535, 65_537, 1 << 20, 5 << 20, (9 << 20) + 1]
            .into_iter()
            .flat_map(|size| [(size, false), (size, true)])
            .map(|(size, idempotent)| {
                let payload: Vec<u8> = (0..size).map(|i| (i * 7 + i / 256 + size) as u8).collect();
                let job = client.job("entry", payload.clone()).operation("echo").idempotent(idempotent);
                (payload, spawn(job))
            })
            .collect();
        for (payload, job) in jobs {
            let reply = job.await.unwrap().unwrap();
            assert_eq!(reply.outcome().bulkhead, "safe");
            assert!(reply.payload() == payload, "{} bytes came back changed", payload.len());
        }
    });
    auditor.finish();
}

// Rules of the fallback.

#[test]
fn fallback_limit_includes_diverted_jobs() {
    let supervisor = start("", "max_in_flight = 2\nmax_queue = 100");
    supervisor.wait_number("safe", "limit", 2);
    let auditor = Auditor::of(&supervisor);
    supervisor.resize("entry", FORCED_OPEN);
    run(async {
        let client = connect(&supervisor).await;
        let jobs: Vec<_> = (0..40)
            .map(|i| {
                let name = if i % 2 == 0 { "entry" } else { "safe" };
                spawn(client.job(name, "").operation("steps:peak 10"))
            })
            .collect();
        let mut peaks = Vec::new();
        for job in jobs {
            let reply = job.await.unwrap().unwrap();
            assert_eq!(reply.outcome().bulkhead, "safe");
            peaks.push(String::from_utf8_lossy(reply.payload()).into_owned());
        }
        let peaks = tally(peaks);
        assert!(peaks.keys().all(|peak| peak == "1" || peak == "2"), "{peaks:?}");
    });
    assert_eq!(counted(&supervisor, "entry"), [20, 20, 0, 0, 0]);
    assert_eq!(counted(&supervisor, "safe"), [20, 20, 0, 0, 0]);
    auditor.finish();
}

#[test]
fn full_fallback_reports_the_entrys_reject_reason() {
    let supervisor = start("", "max_queue = 1");
    let auditor = Auditor::of(&supervisor);
    supervisor.resize("entry", FORCED_OPEN);
    run(async {
        let client = connect(&supervisor).await;
        let running = spawn(steps(&client, "wait end"));
        supervisor.wait_number("safe", "in_flight", 1);
        let waiting = spawn(steps(&client, "echo"));
        supervisor.wait_number("safe", "queued", 1);
        // Jobs that run in the fallback are counted in `entry`.
        assert_eq!(counted(&supervisor, "entry"), [2, 0, 0, 0, 2]);
        let entry = supervisor.snapshot("entry");
        assert_eq!((&entry["in_flight"], &entry["queued"]), (&0.into(), &0.into()), "{entry}");
        assert_eq!(end(&steps(&client, "echo").send().await), ended("rejected/circuit_open", "entry"));
        let own = client.job("safe", "").send().await;
        assert_eq!(end(&own), ended("rejected/queue_full", "safe"));
        supervisor.touch("end");
        for job in [running, waiting] {
            assert_eq!(end(&job.await.unwrap()), ended("ok", "safe"));
        }
    });
    assert_eq!(counted(&supervisor, "entry"), [3, 2, 0, 1, 0]);
    assert_eq!(counted(&supervisor, "safe"), [1, 0, 0, 1, 0]);
    auditor.finish();
}

#[test]
fn queue_timeout_in_fallback_reports_the_entrys_reason() {
    let supervisor = start("", "max_queue = 5\nqueue_timeout = \"50ms\"");
    let auditor = Auditor::of(&supervisor);
    supervisor.resize("entry", FORCED_OPEN);
    run(async {
        let client = connect(&supervisor).await;
        let running = spawn(client.job("safe", "").operation("steps:wait end"));
        supervisor.wait_number("safe", "in_flight", 1);
        assert_eq!(end(&steps(&client, "echo").send().await), ended("rejected/circuit_open", "entry"));
        supervisor.touch("end");
        assert_eq!(outcome(&running.await.unwrap()), "ok");
    });
    assert_eq!(counted(&supervisor, "entry"), [1, 0, 0, 1, 0]);
    auditor.finish();
}

#[test]
fn fallback_respects_tenant_and_priority() {
    let supervisor = start(
        "",
        "processes = 2\nmax_queue = 5\npriority = { critical_reserve = 0.5 }\n\
         tenants = { max_in_flight = 1, max_queue = 0 }",
    );
    supervisor.wait_number("safe", "limit", 2);
    supervisor.resize("entry", FORCED_OPEN);
    run(async {
        let client = connect(&supervisor).await;
        let one = spawn(steps(&client, "count begun;wait end").tenant("one"));
        // A job that has not begun could be recalled, and its permit would not be available for a while.
        wait_for("the job has begun", || (supervisor.file_bytes("begun") == 1).then_some(()));
        assert_eq!(supervisor.snapshot("safe")["tenants"][0]["name"], "one");
        // The tenant has reached its quota in the fallback, so the client gets the reject reason of `entry`.
        let over = steps(&client, "echo").tenant("one").priority(Priority::Critical).send().await;
        assert_eq!(end(&over), ended("rejected/circuit_open", "entry"));
        for attempt in 0.. {
            let critical = steps(&client, "echo").tenant("two").priority(Priority::Critical).send().await;
            // While a busy machine delays the free worker's heartbeats, the worker gets no jobs, and this tenant's jobs
            // cannot wait.
            if attempt == 100 || end(&critical) != ended("rejected/circuit_open", "entry") {
                assert_eq!(end(&critical), ended("ok", "safe"));
                break;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        supervisor.touch("end");
        assert_eq!(end(&one.await.unwrap()), ended("ok", "safe"));
    });
}

#[test]
fn fallback_isolates_tenants() {
    let isolated = "tenants = { isolate = true }";
    let supervisor = start(isolated, isolated);
    let auditor = Auditor::of(&supervisor);
    supervisor.resize("entry", FORCED_OPEN);
    run(async {
        let client = connect(&supervisor).await;
        let pid = |tenant: &str| {
            let job = steps(&client, "pid").tenant(tenant);
            async move {
                let reply = job.send().await.unwrap();
                assert_eq!(reply.outcome().bulkhead, "safe");
                String::from_utf8_lossy(reply.payload()).into_owned()
            }
        };
        let (one, two) = (pid("one").await, pid("two").await);
        assert_ne!(one, two);
        assert_eq!(pid("one").await, one);
    });
    assert_eq!(counted(&supervisor, "entry"), [3, 3, 0, 0, 0]);
    let one = supervisor.snapshot("entry?tenant=one");
    assert_eq!(
        (&one["submitted"], &one["done"], &one["elsewhere"]),
        (&2.into(), &2.into(), &0.into()),
        "{one}"
    );
    auditor.finish();
}

#[test]
fn rate_limit_counts_jobs_only_at_the_entry() {
    let rate = |burst: u32| format!("rate_limit = {{ per_second = 0.001, burst = {burst} }}");
    let supervisor = start(&rate(4), &format!("{}\nmax_in_flight = 8", rate(1)));
    supervisor.wait_number("safe", "limit", 8);
    run(async {
        let client = connect(&supervisor).await;
        let running = spawn(steps(&client, "wait end"));
        supervisor.wait_number("entry", "in_flight", 1);
        for _ in 0..3 {
            assert_eq!(end(&steps(&client, "echo").send().await), ended("ok", "safe"));
        }
        assert_eq!(end(&steps(&client, "echo").send().await), ended("rejected/rate_limited", "entry"));
        // Diverted jobs do not count against the rate limit of the fallback.
        assert_eq!(end(&client.job("safe", "").send().await), ended("ok", "safe"));
        assert_eq!(end(&client.job("safe", "").send().await), ended("rejected/rate_limited", "safe"));
        supervisor.touch("end");
        assert_eq!(outcome(&running.await.unwrap()), "ok");
    });
}

#[test]
fn tenants_of_diverted_jobs_are_counted_only_at_the_entry() {
    let supervisor = start("", "max_queue = 1");
    let auditor = Auditor::of(&supervisor);
    let counts = |bulkhead: &str| {
        let snapshot = supervisor.snapshot(bulkhead);
        let tenants = snapshot["tenants"].as_array().unwrap().iter();
        let mut counts: Vec<_> = tenants
            .map(|tenant| ["name", "submitted", "rejected"].map(|field| tenant[field].to_string()).join(" "))
            .collect();
        counts.sort();
        counts
    };
    run(async {
        let client = connect(&supervisor).await;
        let job = |tenant: &str| steps(&client, "wait end").tenant(tenant);
        let first = spawn(job("a"));
        supervisor.wait_number("entry", "in_flight", 1);
        let second = spawn(job("a"));
        supervisor.wait_number("safe", "in_flight", 1);
        let third = spawn(job("b"));
        supervisor.wait_number("safe", "queued", 1);
        assert_eq!(end(&job("a").send().await), ended("rejected/queue_full", "entry"));
        assert_eq!(counts("entry"), ["\"a\" 3 1", "\"b\" 1 0"]);
        supervisor.touch("end");
        for (job, bulkhead) in [(first, "entry"), (second, "safe"), (third, "safe")] {
            assert_eq!(end(&job.await.unwrap()), ended("ok", bulkhead));
        }
    });
    assert_eq!(counts("entry"), ["\"a\" 3 1", "\"b\" 1 0"]);
    assert_eq!(counts("safe"), ["\"a\" 0 0", "\"b\" 0 0"]);
    auditor.finish();
}

/// The rate limit of `entry` must apply even while its breaker is open. Otherwise a client could run any number of jobs
/// in the fallback.
#[test]
fn open_breaker_does_not_bypass_rate_limit() {
    let supervisor = start("rate_limit = { per_second = 0.001, burst = 3 }", "max_in_flight = 8");
    supervisor.wait_number("safe", "limit", 8);
    supervisor.resize("entry", FORCED_OPEN);
    run(async {
        let client = connect(&supervisor).await;
        let mut ok = 0;
        for _ in 0..10 {
            ok += u32::from(steps(&client, "echo").send().await.is_ok());
        }
        assert!(ok <= 3, "{ok} jobs were admitted by a rate limit of 3");
    });
}

// Deadlines.

#[test]
fn deadline_includes_time_in_the_entry_queue() {
    let supervisor = start("max_queue = 5", "");
    run(async {
        let client = connect(&supervisor).await;
        let running = spawn(steps(&client, "wait end"));
        supervisor.wait_number("entry", "in_flight", 1);
        let limit = Duration::from_secs(10);
        let began = Instant::now();
        let job = spawn(steps(&client, "wait never").deadline(limit));
        supervisor.wait_number("entry", "queued", 1);
        wait_for("the job has waited for five seconds", || {
            (began.elapsed() > Duration::from_secs(5)).then_some(())
        });
        assert_eq!(supervisor.post("/v1/bulkheads/entry/drain").0, 200);
        let result = job.await.unwrap();
        let passed = began.elapsed();
        assert_eq!(end(&result), ended("deadline_exceeded/running", "safe"));
        let told = result.unwrap_err().outcome().unwrap().clone();
        assert_eq!(told.deadline, limit);
        assert!(passed >= limit && passed < Duration::from_millis(14_500), "{passed:?}: {told:?}");
        assert!(told.queued >= Duration::from_millis(4900), "{told:?}");
        assert!(told.ran < Duration::from_millis(9500), "{told:?}");
        supervisor.touch("end");
        assert_eq!(outcome(&running.await.unwrap()), "ok");
    });
}

#[test]
fn entry_deadline_applies_in_the_fallback() {
    let supervisor = start("deadline = \"40s\"", "deadline = \"50ms\"");
    supervisor.resize("entry", FORCED_OPEN);
    run(async {
        let client = connect(&supervisor).await;
        let reply = steps(&client, "sleep 300").send().await.unwrap();
        assert_eq!(reply.outcome().deadline, Duration::from_secs(40));
        // The maximum deadline of `entry` applies, even if the job runs in the fallback.
        let reply = steps(&client, "echo").deadline(Duration::from_secs(600)).send().await.unwrap();
        assert_eq!(reply.outcome().deadline, Duration::from_secs(40));
    });
}

#[test]
fn job_that_expires_in_fallback_queue_counts_as_not_run() {
    let supervisor = start("", "max_queue = 5");
    let auditor = Auditor::of(&supervisor);
    supervisor.resize("entry", FORCED_OPEN);
    run(async {
        let client = connect(&supervisor).await;
        let running = spawn(client.job("safe", "").operation("steps:wait end"));
        supervisor.wait_number("safe", "in_flight", 1);
        let late = steps(&client, "count ran").deadline(Duration::from_millis(200)).send().await;
        assert_eq!(outcome(&late), "deadline_exceeded/queued");
        assert_eq!(late.unwrap_err().executed(), Executed::No);
        supervisor.touch("end");
        assert_eq!(outcome(&running.await.unwrap()), "ok");
        assert_eq!(end(&client.job("safe", "").send().await), ended("ok", "safe"));
        assert_eq!(supervisor.file_bytes("ran"), 0);
    });
    assert_eq!(supervisor.number("entry", "deadline_exceeded"), 1);
    assert_eq!(supervisor.number("safe", "deadline_exceeded"), 0);
    auditor.finish();
}

// Job numbers.

#[test]
fn crashed_job_keeps_its_number_in_the_fallback() {
    let crash = "echo number $BULKHEAD_JOB >&2; kill -KILL $$";
    let supervisor = Supervisor::start(&format!(
        "[defaults]\ndeadline = \"60s\"\nenv = {{ PATH = \"/usr/bin:/bin\" }}\n\
         [bulkhead.other]\n{WORKER}\n\
         [bulkhead.entry]\nexec = [\"sh\", \"-c\", \"{crash}\"]\nfallback = [\"second\", \"safe\"]\n\
         [bulkhead.second]\nexec = [\"sh\", \"-c\", \"{crash}\"]\n\
         [bulkhead.safe]\nexec = [\"sh\", \"-c\", \"printf %s $BULKHEAD_JOB\"]\ntenants.isolate = true\n"
    ));
    run(async {
        let client = connect(&supervisor).await;
        let reply = client.job("entry", "").tenant("t").idempotent(true).send().await.unwrap();
        let number = reply.outcome().job.expect("a number").to_string();
        assert_eq!(String::from_utf8_lossy(reply.payload()), number, "the last program");
        assert_eq!((reply.outcome().bulkhead.as_str(), reply.outcome().attempts), ("safe", 3));
        let crashed = supervisor.wait_events("job_crashed", 2);
        for (event, (bulkhead, attempts)) in crashed.iter().zip([("entry", 1), ("second", 2)]) {
            assert_eq!(event["job"], *number, "{event}");
            assert_eq!((&event["bulkhead"], &event["attempts"]), (&bulkhead.into(), &attempts.into()));
            let report = supervisor.crash_report(event["report"].as_str().expect("a report"));
            let job = &report["jobs"][0];
            assert_eq!((&job["job"], &job["attempts"]), (&(*number).into(), &attempts.into()), "{report}");
            assert!(report["stderr_tail"].as_str().unwrap().contains(&number), "{report}");
        }
    });
}

#[test]
fn job_in_fallback_is_listed_and_cancelled_by_its_number() {
    let supervisor = start("", "max_queue = 5");
    run(async {
        let client = connect(&supervisor).await;
        let running = spawn(client.job("safe", "").operation("steps:wait end"));
        supervisor.wait_number("safe", "in_flight", 1);
        let waiting = steps(&client, "die").idempotent(true).start().await.unwrap();
        supervisor.wait_number("safe", "queued", 1);
        let crashed = supervisor.wait_events("job_crashed", 1);
        let number = crashed[0]["job"].as_str().expect("a number");
        let jobs = supervisor.get("/v1/jobs?bulkhead=safe&state=queued");
        let job = &jobs["jobs"][0];
        assert_eq!((&job["job"], &job["attempts"]), (&number.into(), &1.into()), "{jobs}");
        let (status, answer) = supervisor.post(&format!("/v1/bulkheads/safe/jobs/{number}/cancel"));
        assert_eq!(status, 200, "{answer}");
        let error = waiting.await.unwrap_err();
        let told = error.outcome().unwrap();
        assert_eq!((outcome(&Err(error.clone())).as_str(), told.attempts), ("cancelled/", 1));
        assert_eq!(told.job.expect("a number").to_string(), number);
        assert_eq!(supervisor.wait_events("job_cancelled", 1)[0]["job"], number);
        supervisor.touch("end");
        assert_eq!(outcome(&running.await.unwrap()), "ok");
    });
}

#[test]
fn rejected_job_has_the_number_that_the_fallback_assigned() {
    let supervisor = start("", "max_queue = 5");
    supervisor.resize("entry", FORCED_OPEN);
    run(async {
        let client = connect(&supervisor).await;
        let running = spawn(client.job("safe", "").operation("steps:wait end"));
        supervisor.wait_number("safe", "in_flight", 1);
        let waiting = spawn(steps(&client, "echo"));
        supervisor.wait_number("safe", "queued", 1);
        let jobs = supervisor.get("/v1/jobs?bulkhead=safe&state=queued");
        assert_eq!(supervisor.post("/v1/bulkheads/safe/drain").0, 200);
        let rejected = waiting.await.unwrap();
        assert_eq!(end(&rejected), ended("rejected/circuit_open", "entry"));
        let told = rejected.unwrap_err().outcome().cloned().unwrap();
        assert_eq!(told.job.expect("a number").to_string(), jobs["jobs"][0]["job"], "{jobs}");
        supervisor.touch("end");
        assert_eq!(outcome(&running.await.unwrap()), "ok");
        // No bulkhead accepts this job, so the job has no number.
        let refused = steps(&client, "echo").send().await.unwrap_err();
        assert_eq!(refused.outcome().unwrap().job, None);
    });
}

// Cancellation and shutdown.

#[test]
fn cancellation_reaches_jobs_in_fallback() {
    let supervisor = start("", "max_queue = 5");
    let auditor = Auditor::of(&supervisor);
    supervisor.resize("entry", FORCED_OPEN);
    run(async {
        let client = connect(&supervisor).await;
        let running = steps(&client, "count ran;wait never").start().await.unwrap();
        wait_for("the job runs", || (supervisor.file_bytes("ran") == 1).then_some(()));
        let waiting = steps(&client, "count never-ran").start().await.unwrap();
        supervisor.wait_number("safe", "queued", 1);
        waiting.cancel();
        let error = waiting.await.unwrap_err();
        assert_eq!((outcome(&Err(error.clone())), error.executed()), ("cancelled/".into(), Executed::No));
        supervisor.wait_number("safe", "queued", 0);
        running.cancel();
        let error = running.await.unwrap_err();
        assert_eq!((outcome(&Err(error.clone())), error.executed()), ("cancelled/".into(), Executed::Yes));
        assert_eq!(end(&client.job("safe", "").send().await), ended("ok", "safe"));
    });
    assert_eq!(supervisor.number("entry", "cancelled"), 2);
    assert_eq!(supervisor.number("safe", "cancelled"), 0);
    assert_eq!(supervisor.number("entry", "elsewhere"), 0);
    assert_eq!(supervisor.file_bytes("never-ran"), 0);
    auditor.finish();
}

#[test]
fn crashed_job_cancelled_in_fallback_queue_counts_as_run() {
    let supervisor = start("", "max_queue = 5");
    run(async {
        let client = connect(&supervisor).await;
        let running = spawn(client.job("safe", "").operation("steps:wait end"));
        supervisor.wait_number("safe", "in_flight", 1);
        let waiting = steps(&client, "die").idempotent(true).start().await.unwrap();
        supervisor.wait_number("safe", "queued", 1);
        waiting.cancel();
        let error = waiting.await.unwrap_err();
        assert_eq!((outcome(&Err(error.clone())), error.executed()), ("cancelled/".into(), Executed::Yes));
        assert_eq!(error.outcome().unwrap().attempts, 1);
        supervisor.touch("end");
        assert_eq!(outcome(&running.await.unwrap()), "ok");
    });
}

#[test]
fn cancel_unless_begun_ignores_job_that_crashed_before_fallback() {
    let supervisor = start("", "max_queue = 5");
    let auditor = Auditor::of(&supervisor);
    run(async {
        let client = connect(&supervisor).await;
        let running = spawn(client.job("safe", "").operation("steps:wait end"));
        supervisor.wait_number("safe", "in_flight", 1);
        let waiting = steps(&client, "die-first 1 ran").idempotent(true).start().await.unwrap();
        supervisor.wait_number("safe", "queued", 1);
        waiting.cancel_unless_begun();
        // This job follows on the same connection. Its outcome shows that the supervisor has read the cancellation.
        assert_eq!(outcome(&client.job("missing", "").send().await), "rejected/not_found");
        supervisor.touch("end");
        assert_eq!(outcome(&running.await.unwrap()), "ok");
        let result = waiting.await;
        assert_eq!(end(&result), ended("ok", "safe"));
        assert_eq!(result.unwrap().outcome().attempts, 2);
    });
    auditor.finish();
}

/// When the client disconnects, the cancellation of the job that holds the permit lets the breaker reject the client's
/// waiting jobs.
#[test]
fn disconnected_clients_jobs_do_not_reach_fallback() {
    let supervisor =
        start("max_queue = 100\nhealth = { heartbeat = \"10s\", missed = 10 }", "max_queue = 100");
    let auditor = Auditor::of(&supervisor);
    let worker = supervisor.worker_pids("entry")[0];
    // The stopped worker begins no job, so a cancellation frees its permit at once.
    kill_pid(worker, Signal::SIGSTOP);
    let jobs = ["--repeat", "40", "--concurrency", "40", "-n"];
    let mut command = supervisor.command();
    command.args(["submit", "entry", "steps:count ran"]).args(jobs);
    let mut client = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    supervisor.wait_number("entry", "queued", 39);
    supervisor.resize("entry", FORCED_OPEN);
    client.kill().unwrap();
    client.wait().unwrap();
    supervisor.wait_number("entry", "in_flight", 0);
    kill_pid(worker, Signal::SIGCONT);
    run(async {
        let client = connect(&supervisor).await;
        assert_eq!(end(&client.job("safe", "").send().await), ended("ok", "safe"));
    });
    assert_eq!(supervisor.file_bytes("ran"), 0);
    assert_eq!(supervisor.events("fallback_used").len(), 0);
    auditor.finish();
}

#[test]
fn client_disconnect_cancels_jobs_in_fallback() {
    let supervisor = start("", "max_queue = 5");
    let auditor = Auditor::of(&supervisor);
    supervisor.resize("entry", FORCED_OPEN);
    let submit = |operation: &str| {
        let mut command = supervisor.command();
        command.args(["submit", "entry", operation]).stdin(Stdio::null());
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    };
    let mut running = submit("steps:count ran;wait never");
    wait_for("the job runs", || (supervisor.file_bytes("ran") == 1).then_some(()));
    let mut waiting = submit("steps:count ran");
    supervisor.wait_number("safe", "queued", 1);
    for client in [&mut waiting, &mut running] {
        client.kill().unwrap();
        client.wait().unwrap();
    }
    supervisor.wait_number("entry", "cancelled", 2);
    supervisor.wait_number("safe", "queued", 0);
    run(async {
        let client = connect(&supervisor).await;
        assert_eq!(end(&client.job("safe", "").send().await), ended("ok", "safe"));
    });
    assert_eq!(supervisor.number("entry", "elsewhere"), 0);
    assert_eq!(supervisor.file_bytes("ran"), 1);
    auditor.finish();
}

#[test]
fn shutdown_finishes_running_jobs_in_fallback() {
    let mut supervisor = start("", "max_queue = 5");
    supervisor.resize("entry", FORCED_OPEN);
    run(async {
        let client = connect(&supervisor).await;
        let running = spawn(steps(&client, "wait end"));
        supervisor.wait_number("safe", "in_flight", 1);
        let waiting = spawn(steps(&client, "count ran"));
        supervisor.wait_number("safe", "queued", 1);
        supervisor.signal(Signal::SIGTERM);
        let refused = waiting.await.unwrap();
        assert!(outcome(&refused).starts_with("rejected/"), "{}", outcome(&refused));
        supervisor.touch("end");
        assert_eq!(end(&running.await.unwrap()), ended("ok", "safe"));
    });
    assert!(supervisor.wait().success());
    assert_eq!(supervisor.file_bytes("ran"), 0);
}

// All conditions together.

#[test]
fn every_job_has_one_outcome_as_bulkheads_drain_and_resume() {
    let _turn = heavy();
    let quick = "restart = { max = 1000, backoff = \"1ms\", backoff_max = \"5ms\" }";
    let supervisor = start_more(
        &format!("fallback = [\"one\", \"two\"]\nmax_in_flight = 2\nmax_queue = 20\n{quick}"),
        &format!(
            "[bulkhead.one]\n{WORKER}\nmax_in_flight = 2\nmax_queue = 20\n{quick}\n\
             [bulkhead.two]\n{WORKER}\nmax_in_flight = 2\nmax_queue = 400\nretry = {{ budget = 1.0 }}\n{quick}\n"
        ),
    );
    let auditor = Auditor::of(&supervisor);
    let told = run(async {
        let client = connect(&supervisor).await;
        let jobs: Vec<_> = (0..4)
            .map(|lane| {
                let client = client.clone();
                tokio::spawn(async move {
                    let mut told = Vec::new();
                    for turn in 0..50 {
                        let burst: Vec<_> = (0..5)
                            .map(|i| {
                                let what =
                                    if (turn + i) % 25 == lane { "sleep 1;die" } else { "sleep 1;echo" };
                                let payload = vec![lane as u8; 1 + 20_000 * i * (turn % 3)];
                                let job = client.job("entry", payload).operation(format!("steps:{what}"));
                                spawn(job.idempotent(i % 2 == 0))
                            })
                            .collect();
                        for job in burst {
                            told.push(end(&job.await.unwrap()));
                        }
                    }
                    told
                })
            })
            .collect();
        let mut turn = 0;
        while !jobs.iter().all(tokio::task::JoinHandle::is_finished) {
            let name = ["entry", "one"][turn / 4 % 2];
            match turn % 4 {
                0 => drop(supervisor.post(&format!("/v1/bulkheads/{name}/drain"))),
                1 => drop(supervisor.post(&format!("/v1/bulkheads/{name}/resume"))),
                2 => drop(supervisor.resize(name, FORCED_OPEN)),
                _ => drop(supervisor.resize(name, r#"{"breaker": "auto"}"#)),
            }
            turn += 1;
            tokio::time::sleep(Duration::from_millis(3)).await;
        }
        let mut told = Vec::new();
        for job in jobs {
            told.extend(job.await.unwrap());
        }
        told
    });
    assert_eq!(told.len(), 1000);
    let told = tally(told);
    assert!(told.keys().all(|(how, _)| how == "ok" || how.starts_with("crashed/")), "{told:?}");
    assert_eq!(counted(&supervisor, "entry")[0], 1000);
    for name in ["entry", "one", "two"] {
        let snapshot = supervisor.snapshot(name);
        for field in ["in_flight", "queued", "elsewhere"] {
            assert_eq!(snapshot[field], 0, "{name}: {snapshot}");
        }
        assert!(name == "entry" || snapshot["submitted"] == 0, "{snapshot}");
    }
    auditor.finish();
}

#[test]
fn fallback_event_is_not_sent_for_every_job() {
    let supervisor = start("", "max_in_flight = 8");
    supervisor.wait_number("safe", "limit", 8);
    supervisor.resize("entry", FORCED_OPEN);
    run(async {
        let client = connect(&supervisor).await;
        let began = Instant::now();
        for _ in 0..100 {
            assert_eq!(end(&steps(&client, "echo").send().await), ended("ok", "safe"));
        }
        let told = supervisor.wait_events("fallback_used", 1).len();
        let passed = began.elapsed();
        assert!(told == 1 || passed > Duration::from_secs(9), "{told} events in {passed:?}");
    });
}
