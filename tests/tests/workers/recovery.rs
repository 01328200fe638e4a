//! Jobs whose workers die: retries, suspects that run alone, and quarantined payloads. The workers are real processes.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use bulkhead_client::{Client, Executed, Job, JobError, Reply};
use bulkhead_tests::{Auditor, Supervisor, connect, heavy, outcome, overrun, run, spawn, tally, wait_for};
use nix::sys::signal::Signal;
use serde_json::Value;

/// Starts a supervisor with a bulkhead `b`. Restarts are fast and unlimited, so that they do not affect the test.
fn start(keys: &str) -> Supervisor {
    start_with("command = [\"MISBEHAVE\"]", keys)
}

/// Starts a supervisor whose first worker becomes ready immediately. Later workers wait for the file `go`.
fn start_slow(keys: &str) -> Supervisor {
    start_with("command = [\"MISBEHAVE\", \"slow-again\", \"starts\"]", keys)
}

/// Starts a supervisor that runs a shell script for each job.
fn start_shell(script: &str, keys: &str) -> Supervisor {
    start_with(&format!("exec = [\"sh\", \"-c\", {script:?}]"), keys)
}

fn start_with(program: &str, keys: &str) -> Supervisor {
    Supervisor::start(&format!(
        "[defaults]\ndeadline = \"60s\"\n\
         restart = {{ backoff = \"1ms\", backoff_max = \"5ms\", max = 1000 }}\n\
         [bulkhead.b]\n{program}\n{keys}\n"
    ))
}

/// Returns an idempotent job for the bulkhead `b`. The worker executes the given steps.
fn steps(client: &Client, steps: &str) -> Job {
    client.job("b", "").operation(format!("steps:{steps}")).idempotent(true)
}

fn attempts(result: &Result<Reply, JobError>) -> u32 {
    match result {
        Ok(reply) => reply.outcome().attempts,
        Err(error) => error.outcome().unwrap().attempts,
    }
}

/// Returns the outcome of a job and the number of attempts.
fn end(result: &Result<Reply, JobError>) -> (String, u32) {
    (outcome(result), attempts(result))
}

fn ended(how: &str, attempts: u32) -> (String, u32) {
    (how.to_owned(), attempts)
}

// Retries.

#[test]
fn idempotent_job_succeeds_on_retry_after_worker_death() {
    let supervisor = start("retry = {}");
    let auditor = Auditor::of(&supervisor);
    run(async {
        let client = connect(&supervisor).await;
        let first = supervisor.worker_pids("b");
        let job = steps(&client, "die-first 1 ran").tenant("acme");
        let reply = job.send().await.unwrap();
        assert_eq!(reply.outcome().attempts, 2);
        let second = reply.outcome().worker_pid.unwrap();
        assert_eq!(supervisor.worker_pids("b"), [second]);
        assert!(!first.contains(&second), "{first:?}");
        assert_eq!(supervisor.file_bytes("ran"), 2);
    });
    let snapshot = supervisor.snapshot("b");
    let counted =
        ["submitted", "done", "crashed", "retries", "restarts"].map(|field| snapshot[field].clone());
    assert_eq!(counted, [1, 1, 0, 1, 1].map(Value::from), "{snapshot}");
    let told = supervisor.wait_events("job_retried", 1);
    assert_eq!(told.len(), 1, "{told:?}");
    assert_eq!(told[0]["bulkhead"], "b", "{told:?}");
    assert_eq!(told[0]["operation"], "steps:die-first 1 ran", "{told:?}");
    assert_eq!(told[0]["tenant"], "acme", "{told:?}");
    assert_eq!(told[0]["attempts"], 1, "{told:?}");
    // The job succeeded in the end, so there is no crash event.
    assert_eq!(supervisor.events("job_crashed").len(), 0);
    auditor.finish();
}

#[test]
fn non_idempotent_job_is_not_retried() {
    let supervisor = start("retry = { attempts = 5, budget = 1.0 }");
    run(async {
        let client = connect(&supervisor).await;
        let result = steps(&client, "die-first 1 ran").idempotent(false).send().await;
        assert_eq!(end(&result), ended("crashed/signal", 1));
        let error = result.unwrap_err();
        assert!(!error.is_retryable());
        assert_eq!(error.executed(), Executed::Unknown);
        assert_eq!(supervisor.file_bytes("ran"), 1);
    });
    assert_eq!(supervisor.number("b", "retries"), 0);
}

#[test]
fn no_job_is_retried_without_retry_table() {
    let supervisor = start("");
    run(async {
        let client = connect(&supervisor).await;
        let result = steps(&client, "die-first 1 ran").send().await;
        assert_eq!(end(&result), ended("crashed/signal", 1));
        assert!(result.unwrap_err().is_retryable(), "the client may retry the job");
    });
}

#[test]
fn retry_attempts_key_limits_the_number_of_runs() {
    let supervisor = start("retry = { attempts = 3 }");
    run(async {
        let client = connect(&supervisor).await;
        let result = steps(&client, "die-first 2 twice").send().await;
        assert_eq!(end(&result), ended("ok", 3));
        let result = steps(&client, "die-first 9 always").send().await;
        assert_eq!(end(&result), ended("crashed/signal", 3));
        assert!(result.unwrap_err().is_retryable());
        assert_eq!((supervisor.file_bytes("twice"), supervisor.file_bytes("always")), (3, 3));
    });
    assert_eq!(supervisor.number("b", "retries"), 4);
    let told = supervisor.wait_events("job_crashed", 1);
    assert_eq!((told.len(), &told[0]["attempts"]), (1, &3.into()), "{told:?}");
}

#[test]
fn failed_or_overdue_job_is_not_retried() {
    let supervisor = start("retry = { attempts = 5, budget = 1.0 }");
    run(async {
        let client = connect(&supervisor).await;
        let result = client.job("b", "").operation("fail").idempotent(true).send().await;
        assert_eq!(end(&result), ended("failed/bad_input", 1));
        let late = client.job("b", "").operation("hang").idempotent(true);
        let result = overrun(&late.deadline(Duration::from_secs(2))).await;
        assert_eq!(end(&result), ended("deadline_exceeded/running", 1));
    });
    assert_eq!(supervisor.number("b", "retries"), 0);
}

// A job that has begun and is not idempotent must not go to another worker, even after a replacement has
// taken the slot.
#[test]
fn started_job_is_not_retried_after_worker_replacement() {
    // The frozen worker must not count as hung.
    let supervisor = start("health = { heartbeat = \"60s\" }");
    let worker = supervisor.worker_pids("b")[0];
    run(async {
        let client = connect(&supervisor).await;
        let job = spawn(steps(&client, "freeze-first 1 ran").idempotent(false));
        wait_for("the job runs", || (supervisor.file_bytes("ran") == 1).then_some(()));
        assert_eq!(supervisor.post("/v1/bulkheads/b/restart").0, 200);
        wait_for("another worker has the slot", || {
            let snapshot = supervisor.snapshot("b");
            let states = snapshot["workers"].as_array().unwrap().iter().map(|worker| worker["state"].clone());
            (states.collect::<Vec<_>>() == ["draining", "ready"]).then_some(())
        });
        bulkhead_tests::kill_pid(worker, Signal::SIGKILL);
        let result = job.await.unwrap();
        assert_eq!(end(&result), ended("crashed/signal", 1));
    });
    assert_eq!(supervisor.file_bytes("ran"), 1, "number of times the job ran");
}

#[test]
fn run_time_includes_all_attempts() {
    let supervisor = start("retry = {}");
    run(async {
        let client = connect(&supervisor).await;
        let began = Instant::now();
        let reply = steps(&client, "sleep 60;die-first 1 ran").send().await.unwrap();
        let passed = began.elapsed();
        let told = reply.outcome();
        assert!(told.ran >= Duration::from_millis(120), "{told:?}");
        assert!(told.ran + told.queued <= passed, "{told:?} in {passed:?}");
    });
}

#[test]
fn retry_preserves_payload_bytes() {
    let supervisor = start("retry = { budget = 1.0 }\nprocesses = 2\nmax_queue = 10");
    let auditor = Auditor::of(&supervisor);
    run(async {
        let client = connect(&supervisor).await;
        let sizes = [0_usize, 1, 65_535, 65_536, 65_537, 5 << 20, (9 << 20) + 7];
        let jobs: Vec<_> = sizes
            .iter()
            .map(|&size| {
                let payload: Vec<u8> = (0..size).map(|i| (i * 31 + size + i / 256) as u8).collect();
                let job = client.job("b", payload.clone()).idempotent(true);
                (payload, spawn(job.operation(format!("steps:die-first 1 ran-{size};echo"))))
            })
            .collect();
        for (payload, job) in jobs {
            let reply = job.await.unwrap().unwrap();
            assert_eq!(reply.outcome().attempts, 2, "{} bytes", payload.len());
            assert!(reply.payload() == payload, "{} bytes came back changed", payload.len());
        }
    });
    auditor.finish();
}

/// The payloads must no longer count towards the limit once the jobs have ended.
#[test]
fn payloads_waiting_for_retry_count_towards_max_buffered() {
    let supervisor = Supervisor::start_with(
        "max_payload = \"4MiB\"\nmax_buffered = \"7MiB\"",
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\", \"slow-again\", \"starts\"]\nmax_in_flight = 2\nretry = {}\n\
         deadline = \"120s\"\n[bulkhead.other]\ncommand = [\"MISBEHAVE\"]\n",
    );
    supervisor.wait_number("b", "limit", 2);
    run(async {
        let client = connect(&supervisor).await;
        let big = |steps: &str| {
            let job = client.job("b", vec![7; 2 << 20]).idempotent(true);
            job.operation(format!("steps:{steps};echo"))
        };
        let neighbour = spawn(big("count ran;wait end"));
        wait_for("the job runs", || (supervisor.file_bytes("ran") == 1).then_some(()));
        let culprit = spawn(big("die-first 1 died"));
        supervisor.wait_number("b", "retries", 2);
        let other = || client.job("other", vec![1; 3_500_000]).send();
        assert_eq!(outcome(&other().await), "rejected/overloaded");
        supervisor.touch("go");
        supervisor.touch("end");
        for job in [neighbour, culprit] {
            let reply = job.await.unwrap().unwrap();
            assert_eq!((reply.payload().len(), reply.outcome().attempts), (2 << 20, 2));
        }
        for _ in 0..5 {
            assert_eq!(outcome(&other().await), "ok");
        }
    });
}

// A payload must not be counted twice while its frame is checked. Otherwise, a payload over half of `max_buffered`
// would be rejected even if nothing else is buffered.
#[test]
fn payload_over_half_of_max_buffered_is_accepted() {
    let supervisor = Supervisor::start_with(
        "max_payload = \"4MiB\"\nmax_buffered = \"6MiB\"",
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\n",
    );
    run(async {
        let client = connect(&supervisor).await;
        for _ in 0..5 {
            assert_eq!(outcome(&client.job("b", vec![7; 4 << 20]).send().await), "ok");
        }
    });
}

#[test]
fn cancelled_job_is_not_retried() {
    let supervisor = start_slow("retry = {}");
    let auditor = Auditor::of(&supervisor);
    run(async {
        let client = connect(&supervisor).await;
        let handle = steps(&client, "die-first 1 ran").start().await.unwrap();
        supervisor.wait_number("b", "retries", 1);
        supervisor.wait_number("b", "queued", 1);
        handle.cancel();
        let error = handle.await.unwrap_err();
        assert!(matches!(error, JobError::Cancelled(_)), "{error:?}");
        assert_eq!(error.executed(), Executed::Yes);
        assert_eq!(supervisor.number("b", "queued"), 0);
        assert_eq!(supervisor.number("b", "cancelled"), 1);
        supervisor.touch("go");
        assert_eq!(outcome(&client.job("b", "").send().await), "ok");
        assert_eq!(supervisor.file_bytes("ran"), 1);
    });
    auditor.finish();
}

#[test]
fn job_of_disconnected_client_is_not_retried() {
    let supervisor = start_slow("retry = {}");
    let auditor = Auditor::of(&supervisor);
    run(async {
        let client = connect(&supervisor).await;
        let job = spawn(steps(&client, "die-first 1 ran"));
        supervisor.wait_number("b", "retries", 1);
        supervisor.wait_number("b", "queued", 1);
        job.abort();
        drop(client);
        supervisor.wait_number("b", "cancelled", 1);
        assert_eq!(supervisor.number("b", "queued"), 0);
        supervisor.touch("go");
        let client = connect(&supervisor).await;
        assert_eq!(outcome(&client.job("b", "").send().await), "ok");
        assert_eq!(supervisor.file_bytes("ran"), 1);
    });
    auditor.finish();
}

#[test]
fn killed_client_cancels_second_attempt() {
    let supervisor = start("retry = { attempts = 9, budget = 1.0 }");
    let auditor = Auditor::of(&supervisor);
    // Uses a client process, which can be killed together with all its connections.
    let mut client = supervisor.command();
    client.args(["submit", "b", "steps:die-first 1 ran;count again;wait never", "--idempotent"]);
    let mut client = client.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    wait_for("the second attempt runs", || (supervisor.file_bytes("again") == 1).then_some(()));
    client.kill().unwrap();
    client.wait().unwrap();
    supervisor.wait_number("b", "cancelled", 1);
    supervisor.wait_number("b", "limit", 1);
    wait_for("another worker is ready", || {
        (supervisor.snapshot("b")["workers"][0]["state"] == "ready").then_some(())
    });
    run(async {
        let client = connect(&supervisor).await;
        assert_eq!(outcome(&client.job("b", "").send().await), "ok");
    });
    assert_eq!((supervisor.file_bytes("ran"), supervisor.file_bytes("again")), (2, 1));
    assert_eq!(supervisor.number("b", "retries"), 1);
    auditor.finish();
}

#[test]
fn drain_reports_crash_of_job_waiting_for_retry() {
    let supervisor = start_slow("retry = {}");
    let auditor = Auditor::of(&supervisor);
    run(async {
        let client = connect(&supervisor).await;
        let job = spawn(steps(&client, "die-first 1 ran"));
        supervisor.wait_number("b", "retries", 1);
        assert_eq!(supervisor.post("/v1/bulkheads/b/drain").0, 200);
        let result = job.await.unwrap();
        assert_eq!(end(&result), ended("crashed/signal", 1));
        let error = result.unwrap_err();
        assert_eq!(error.executed(), Executed::Unknown);
        assert!(error.is_retryable());
        assert_eq!(supervisor.post("/v1/bulkheads/b/resume").0, 200);
        supervisor.touch("go");
        assert_eq!(outcome(&client.job("b", "").send().await), "ok");
        assert_eq!(supervisor.file_bytes("ran"), 1);
    });
    auditor.finish();
}

#[test]
fn drain_finishes_running_retry_but_starts_none() {
    let supervisor = start("retry = { attempts = 9, budget = 1.0 }\nprocesses = 2");
    supervisor.wait_number("b", "limit", 2);
    run(async {
        let client = connect(&supervisor).await;
        let second = spawn(steps(&client, "die-first 1 ran;count again;wait end"));
        let first = spawn(steps(&client, "count first;wait end;die"));
        wait_for("both jobs run", || {
            (supervisor.file_bytes("again") == 1 && supervisor.file_bytes("first") == 1).then_some(())
        });
        assert_eq!(supervisor.post("/v1/bulkheads/b/drain").0, 200);
        supervisor.touch("end");
        assert_eq!(end(&second.await.unwrap()), ended("ok", 2));
        assert_eq!(end(&first.await.unwrap()), ended("crashed/signal", 1));
    });
}

#[test]
fn shutdown_reports_crash_of_job_waiting_for_retry() {
    let mut supervisor = start_slow("retry = {}");
    run(async {
        let client = connect(&supervisor).await;
        let job = spawn(steps(&client, "die-first 1 ran"));
        supervisor.wait_number("b", "retries", 1);
        supervisor.signal(Signal::SIGTERM);
        let result = job.await.unwrap();
        assert_eq!(end(&result), ended("crashed/signal", 1));
    });
    // The next worker never becomes ready, and must not delay the shutdown.
    assert!(supervisor.wait().success());
    assert_eq!(supervisor.file_bytes("ran"), 1);
}

#[test]
fn shutdown_finishes_running_retry() {
    let mut supervisor = start("retry = { attempts = 9, budget = 1.0 }\nmax_in_flight = 2");
    run(async {
        let client = connect(&supervisor).await;
        let job = spawn(steps(&client, "die-first 1 ran;count again;wait end"));
        wait_for("the second attempt runs", || (supervisor.file_bytes("again") == 1).then_some(()));
        supervisor.signal(Signal::SIGTERM);
        wait_for("the supervisor drains", || (supervisor.log().contains("draining")).then_some(()));
        supervisor.touch("end");
        assert_eq!(end(&job.await.unwrap()), ended("ok", 2));
    });
    assert!(supervisor.wait().success());
}

#[test]
fn no_job_is_retried_during_shutdown() {
    let mut supervisor = start("retry = { attempts = 9, budget = 1.0 }");
    run(async {
        let client = connect(&supervisor).await;
        let job = spawn(steps(&client, "count ran;wait end;die"));
        wait_for("the job runs", || (supervisor.file_bytes("ran") == 1).then_some(()));
        supervisor.signal(Signal::SIGTERM);
        wait_for("the supervisor drains", || (supervisor.log().contains("draining")).then_some(()));
        supervisor.touch("end");
        assert_eq!(end(&job.await.unwrap()), ended("crashed/signal", 1));
    });
    assert!(supervisor.wait().success());
    assert_eq!(supervisor.file_bytes("ran"), 1);
}

#[test]
fn program_killed_by_signal_is_retried_in_same_worker() {
    let script = "printf . >>ran; [ $(wc -c <ran) -gt 1 ] || kill -SEGV $$; cat";
    let supervisor = start_shell(script, "retry = {}");
    let auditor = Auditor::of(&supervisor);
    let worker = supervisor.worker_pids("b");
    run(async {
        let client = connect(&supervisor).await;
        let payload = vec![b'x'; 3 << 20];
        let reply = client.job("b", payload.clone()).idempotent(true).send().await.unwrap();
        assert_eq!(reply.outcome().attempts, 2);
        assert!(reply.payload() == payload);
        std::fs::remove_file(supervisor.file("ran")).unwrap();
        let result = client.job("b", "").send().await;
        assert_eq!(end(&result), ended("crashed/signal", 1));
        assert!(!result.unwrap_err().is_retryable());
    });
    assert_eq!(supervisor.worker_pids("b"), worker);
    assert_eq!((supervisor.number("b", "retries"), supervisor.number("b", "restarts")), (1, 0));
    auditor.finish();
}

#[test]
fn program_with_nonzero_exit_status_is_not_retried() {
    let supervisor = start_shell("printf . >>ran; exit 75", "retry = {}");
    run(async {
        let client = connect(&supervisor).await;
        let result = client.job("b", "").idempotent(true).send().await;
        assert_eq!(end(&result), ended("failed/exit_75", 1));
    });
    assert_eq!(supervisor.file_bytes("ran"), 1);
}

// Suspects.

#[test]
fn innocent_neighbours_of_a_culprit_succeed_on_retry() {
    let supervisor = start("retry = {}\nmax_in_flight = 4");
    supervisor.wait_number("b", "limit", 4);
    let auditor = Auditor::of(&supervisor);
    run(async {
        let client = connect(&supervisor).await;
        let innocent: Vec<_> =
            (0..3).map(|i| spawn(steps(&client, &format!("count ran-{i};wait end")))).collect();
        wait_for("the innocent jobs run", || {
            (0..3).all(|i| supervisor.file_bytes(&format!("ran-{i}")) == 1).then_some(())
        });
        let culprit = spawn(steps(&client, "die"));
        supervisor.wait_number("b", "retries", 4);
        supervisor.touch("end");
        for job in innocent {
            assert_eq!(end(&job.await.unwrap()), ended("ok", 2));
        }
        assert_eq!(end(&culprit.await.unwrap()), ended("crashed/signal", 2));
    });
    // The worker died once with all of the jobs, and once with only the culprit.
    supervisor.wait_number("b", "restarts", 2);
    auditor.finish();
}

#[test]
fn suspect_is_retried_alone_in_its_worker() {
    let supervisor = start("retry = { budget = 1.0 }\nprocesses = 2\nmax_in_flight = 4\nmax_queue = 500");
    supervisor.wait_number("b", "limit", 8);
    let auditor = Auditor::of(&supervisor);
    run(async {
        let client = connect(&supervisor).await;
        // Sends a stream of jobs that would fill every free permit.
        let stream: Vec<_> = (0..8)
            .map(|_| {
                let (client, over) = (client.clone(), supervisor.file("over"));
                tokio::spawn(async move {
                    let (mut ends, mut peak) = (Vec::new(), 0);
                    while !over.exists() {
                        let job = client.job("b", "").operation("steps:peak 2").idempotent(true);
                        let result = job.send().await;
                        let seen = result.as_ref().map(|reply| String::from_utf8_lossy(reply.payload()));
                        peak = peak.max(seen.map_or(0, |seen| seen.parse::<u32>().unwrap()));
                        ends.push(outcome(&result));
                    }
                    (ends, peak)
                })
            })
            .collect();
        for i in 0..5 {
            let reply = steps(&client, &format!("die-first 1 ran-{i};peak 100")).send().await.unwrap();
            assert_eq!(
                String::from_utf8_lossy(reply.payload()),
                "1",
                "number of jobs in the worker of the suspect"
            );
            assert_eq!(reply.outcome().attempts, 2);
        }
        supervisor.touch("over");
        let (mut ends, mut peak) = (Vec::new(), 0);
        for job in stream {
            let (its_ends, its_peak) = job.await.unwrap();
            ends.extend(its_ends);
            peak = peak.max(its_peak);
        }
        // All other jobs succeeded, and several of them ran in the same worker at once.
        let told = tally(ends);
        assert_eq!(told.keys().collect::<Vec<_>>(), ["ok"], "{told:?}");
        assert!(peak > 1, "{peak}");
    });
    auditor.finish();
}

#[test]
fn neighbour_of_hung_job_is_retried() {
    let supervisor =
        start("retry = {}\nmax_in_flight = 2\ndeadline = \"3s\"\ndeadline_max = \"60s\"\ngrace = \"50ms\"");
    supervisor.wait_number("b", "limit", 2);
    run(async {
        let client = connect(&supervisor).await;
        let minute = Duration::from_secs(60);
        let neighbour = spawn(steps(&client, "count ran;wait end").deadline(minute));
        wait_for("the neighbour runs", || (supervisor.file_bytes("ran") == 1).then_some(()));
        let culprit = overrun(&client.job("b", "").operation("hang")).await;
        assert_eq!(outcome(&culprit), "deadline_exceeded/running");
        supervisor.wait_number("b", "retries", 1);
        supervisor.touch("end");
        assert_eq!(end(&neighbour.await.unwrap()), ended("ok", 2));
        assert_eq!(supervisor.file_bytes("ran"), 2);
    });
}

#[test]
fn innocent_jobs_succeed_among_many_culprits() {
    let _turn = heavy();
    let keys = "retry = { budget = 1.0 }\nprocesses = 2\nmax_in_flight = 4\nmax_queue = 1000\n\
                deadline = \"300s\"";
    let supervisor = start(keys);
    supervisor.wait_number("b", "limit", 8);
    let auditor = Auditor::of(&supervisor);
    run(async {
        let client = connect(&supervisor).await;
        let jobs: Vec<_> = (0..300)
            .map(|i| match i % 10 {
                3 => (true, spawn(steps(&client, "sleep 1;die"))),
                _ => (false, spawn(steps(&client, "sleep 3;echo"))),
            })
            .collect();
        let mut told = Vec::new();
        for (is_culprit, job) in jobs {
            let result = job.await.unwrap();
            told.push((is_culprit, outcome(&result), attempts(&result)));
        }
        let told = tally(told);
        // The budget is 100 % of the jobs, which suffices for one retry of each job.
        let expected = [(true, "crashed/signal", 2), (false, "ok", 1), (false, "ok", 2)];
        for (is_culprit, how, attempts) in told.keys() {
            assert!(expected.contains(&(*is_culprit, how, *attempts)), "{told:?}");
        }
    });
    assert_eq!(supervisor.number("b", "queued") + supervisor.number("b", "in_flight"), 0);
    auditor.finish();
}

// Poison.

const POISONOUS: &str = "steps:die-on poison;echo";

/// Returns a job for the bulkhead `b`. The job kills its worker if the payload is "poison".
fn dose(client: &Client, payload: &str) -> Job {
    client.job("b", payload).operation(POISONOUS)
}

fn submit(supervisor: &Supervisor, payload: &str, operation: &str) -> Command {
    std::fs::write(supervisor.file("payload"), payload).unwrap();
    let mut command = supervisor.command();
    command.args(["--json", "submit", "b", operation, "--payload-file"]).arg(supervisor.file("payload"));
    command
}

#[test]
fn payload_that_kills_three_workers_is_quarantined_until_reset() {
    let supervisor = start("poison = { crashes = 3 }");
    let auditor = Auditor::of(&supervisor);
    run(async {
        let client = connect(&supervisor).await;
        for _ in 0..3 {
            assert_eq!(outcome(&dose(&client, "poison").send().await), "crashed/signal");
        }
        let error = dose(&client, "poison").idempotent(true).send().await.unwrap_err();
        assert_eq!(outcome(&Err(error.clone())), "rejected/quarantined");
        assert_eq!((error.executed(), error.is_retryable()), (Executed::No, false));
        assert_eq!(error.retry_after(), None);
        assert_eq!(error.outcome().unwrap().attempts, 0);
        assert!(error.to_string().contains("the quarantine ends 72 h after the last crash"), "{error}");
        // Other payloads and other operations are not quarantined.
        assert_eq!(outcome(&dose(&client, "poison ").send().await), "ok");
        assert_eq!(outcome(&dose(&client, "").send().await), "ok");
        assert_eq!(outcome(&client.job("b", "poison").operation("echo").send().await), "ok");
        assert_eq!(outcome(&client.job("b", "poison").send().await), "ok");
        // The quarantine applies to all clients and tenants.
        assert_eq!(outcome(&dose(&client, "poison").tenant("t").send().await), "rejected/quarantined");
    });
    let told = submit(&supervisor, "poison", POISONOUS).output().unwrap();
    assert_eq!(told.status.code(), Some(65));
    let told: Value = serde_json::from_slice(&told.stdout).unwrap();
    assert_eq!((&told["outcome"], &told["reason"]), (&"rejected".into(), &"quarantined".into()), "{told}");
    assert_eq!((&told["executed"], &told["retryable"]), (&"no".into(), &false.into()), "{told}");

    let snapshot = supervisor.snapshot("b");
    assert_eq!((&snapshot["quarantined"], &snapshot["restarts"]), (&1.into(), &3.into()), "{snapshot}");
    assert_eq!(snapshot["rejected"]["quarantined"], 3, "{snapshot}");
    let events = supervisor.wait_events("job_quarantined", 1);
    assert_eq!(events.len(), 1, "{events:?}");
    let digest = events[0]["digest"].as_str().unwrap();
    assert!(digest.len() >= 16 && digest.chars().all(|c| c.is_ascii_hexdigit()), "{digest}");

    assert!(supervisor.command().args(["reset", "b"]).output().unwrap().status.success());
    assert_eq!(supervisor.number("b", "quarantined"), 0);
    run(async {
        let client = connect(&supervisor).await;
        // The reset also forgets the three deaths.
        for _ in 0..3 {
            assert_eq!(outcome(&dose(&client, "poison").send().await), "crashed/signal");
        }
        assert_eq!(outcome(&dose(&client, "poison").send().await), "rejected/quarantined");
    });
    auditor.finish();
}

// The event names the operation and the tenant, because operators cannot identify a payload by its digest
// alone.
#[test]
fn quarantine_event_names_operation_and_tenant() {
    let supervisor = start("poison = { crashes = 1 }");
    run(async {
        let client = connect(&supervisor).await;
        assert_eq!(outcome(&dose(&client, "poison").tenant("acme").send().await), "crashed/signal");
    });
    let events = supervisor.wait_events("job_quarantined", 1);
    assert_eq!(
        (&events[0]["operation"], &events[0]["tenant"]),
        (&POISONOUS.into(), &"acme".into()),
        "{events:?}"
    );
}

#[test]
fn empty_and_large_payloads_can_be_quarantined() {
    let supervisor = start("poison = { crashes = 1 }");
    run(async {
        let client = connect(&supervisor).await;
        let large = |last: u8| {
            let mut payload = vec![0_u8; 4 << 20];
            *payload.last_mut().unwrap() = last;
            payload
        };
        for payload in [Vec::new(), large(0)] {
            let job = || client.job("b", payload.clone()).operation("abort");
            assert_eq!(outcome(&job().send().await), "crashed/signal");
            assert_eq!(outcome(&job().send().await), "rejected/quarantined");
        }
        // A payload that differs in one byte counts as a different payload.
        assert_eq!(outcome(&client.job("b", large(1)).operation("abort").send().await), "crashed/signal");
        // Operation and payload are separate parts of the digest.
        assert_eq!(outcome(&client.job("b", "abort").operation("").send().await), "ok");
    });
    assert_eq!(supervisor.number("b", "quarantined"), 3);
}

#[test]
fn crash_with_two_jobs_in_flight_quarantines_neither() {
    let supervisor = start("poison = { crashes = 1 }\nmax_in_flight = 2");
    supervisor.wait_number("b", "limit", 2);
    run(async {
        let client = connect(&supervisor).await;
        let neighbour = spawn(steps(&client, "count ran;wait never"));
        wait_for("the job runs", || (supervisor.file_bytes("ran") == 1).then_some(()));
        assert_eq!(outcome(&dose(&client, "poison").send().await), "crashed/signal");
        assert!(outcome(&neighbour.await.unwrap()).starts_with("crashed/"));
        assert_eq!(supervisor.number("b", "quarantined"), 0);
        // If a worker dies while it runs only this job, the job must be the culprit.
        assert_eq!(outcome(&dose(&client, "poison").send().await), "crashed/signal");
        assert_eq!(supervisor.number("b", "quarantined"), 1);
        assert_eq!(outcome(&dose(&client, "poison").send().await), "rejected/quarantined");
    });
}

#[test]
fn jobs_killed_by_supervisor_are_not_quarantined() {
    let supervisor = start("poison = { crashes = 1 }\ngrace = \"0s\"\nhealth = { heartbeat = \"10s\" }");
    run(async {
        let client = connect(&supervisor).await;
        let hang = || client.job("b", "slow").operation("hang");
        for _ in 0..2 {
            supervisor.wait_number("b", "available", 1);
            let late = overrun(&hang().deadline(Duration::from_secs(2))).await;
            assert_eq!(outcome(&late), "deadline_exceeded/running");
            let handle = hang().start().await.unwrap();
            supervisor.wait_number("b", "in_flight", 1);
            handle.cancel();
            assert_eq!(outcome(&handle.await), "cancelled/");
            let gone = spawn(hang());
            supervisor.wait_number("b", "in_flight", 1);
            gone.abort();
            supervisor.wait_number("b", "in_flight", 0);
        }
        assert_eq!(supervisor.number("b", "quarantined"), 0);
        supervisor.wait_number("b", "available", 1);
        let late = overrun(&hang().deadline(Duration::from_secs(2))).await;
        assert_eq!(outcome(&late), "deadline_exceeded/running");
    });
}

/// Each copy of the job is rejected just before it would be dispatched.
#[test]
fn queued_copies_of_poison_payload_are_rejected() {
    let supervisor = start("poison = { crashes = 1 }\nmax_queue = 20");
    let auditor = Auditor::of(&supervisor);
    run(async {
        let client = connect(&supervisor).await;
        let blocker = spawn(steps(&client, "wait end"));
        supervisor.wait_number("b", "in_flight", 1);
        let twins: Vec<_> = (0..8).map(|_| spawn(dose(&client, "poison"))).collect();
        supervisor.wait_number("b", "queued", 8);
        let others: Vec<_> = (0..4).map(|_| spawn(dose(&client, "honey"))).collect();
        supervisor.wait_number("b", "queued", 12);
        supervisor.touch("end");
        let mut told = Vec::new();
        for job in twins {
            told.push(outcome(&job.await.unwrap()));
        }
        let told = tally(told);
        assert_eq!(told.get("crashed/signal"), Some(&1), "{told:?}");
        assert_eq!(told.get("rejected/quarantined"), Some(&7), "{told:?}");
        for job in others.into_iter().chain([blocker]) {
            assert_eq!(outcome(&job.await.unwrap()), "ok");
        }
    });
    assert_eq!(supervisor.number("b", "restarts"), 1);
    auditor.finish();
}

#[test]
fn poison_job_is_retried_only_until_quarantine() {
    let supervisor = start("poison = { crashes = 3 }\nretry = { attempts = 9, budget = 1.0 }");
    run(async {
        let client = connect(&supervisor).await;
        let result = dose(&client, "poison").idempotent(true).send().await;
        assert_eq!(end(&result), ended("crashed/signal", 3));
        assert_eq!(outcome(&dose(&client, "poison").send().await), "rejected/quarantined");
    });
    assert_eq!(supervisor.number("b", "quarantined"), 1);
}

#[test]
fn payload_that_kills_programs_is_quarantined() {
    let supervisor = start_shell(
        "read word; printf . >>ran; [ \"$word\" != poison ] || kill -SEGV $$",
        "poison = { crashes = 2 }\nmax_in_flight = 4",
    );
    supervisor.wait_number("b", "limit", 4);
    run(async {
        let client = connect(&supervisor).await;
        let job = |payload: &'static str| client.job("b", payload).send();
        // Each program is a separate process, so the culprit is certain even if another program runs at the
        // same time.
        assert_eq!(outcome(&job("poison").await), "crashed/signal");
        assert_eq!(outcome(&job("honey").await), "ok");
        assert_eq!(outcome(&job("poison").await), "crashed/signal");
        assert_eq!(outcome(&job("poison").await), "rejected/quarantined");
        assert_eq!(outcome(&job("honey").await), "ok");
    });
    assert_eq!(supervisor.file_bytes("ran"), 4);
    assert_eq!((supervisor.number("b", "quarantined"), supervisor.number("b", "restarts")), (1, 0));
}

#[test]
fn quarantine_expires_without_a_reset() {
    let supervisor = start("poison = { crashes = 1, within = \"3s\" }");
    run(async {
        let client = connect(&supervisor).await;
        let began = quarantine(&client).await;
        supervisor.wait_number("b", "quarantined", 0);
        let passed = began.elapsed();
        assert!(passed >= Duration::from_secs(3), "{passed:?}");
        quarantine(&client).await;
    });
}

/// Sends a payload that kills workers until the payload is quarantined. Returns the time at which the last job that
/// killed a worker was sent.
async fn quarantine(client: &Client) -> Instant {
    let mut began = Instant::now();
    assert_eq!(outcome(&dose(client, "poison").send().await), "crashed/signal");
    for _ in 0..20 {
        let sent = Instant::now();
        let ended = outcome(&dose(client, "poison").send().await);
        if ended == "rejected/quarantined" {
            return began;
        }
        // On a busy machine, the quarantine can expire before the next job arrives.
        assert_eq!(ended, "crashed/signal");
        began = sent;
    }
    panic!("the payload is never quarantined");
}
