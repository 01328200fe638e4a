//! Live changes to `max_in_flight` and `processes` while jobs run and wait. No job is interrupted or lost, and the
//! limit is never exceeded.

use std::os::unix::process::ExitStatusExt;
use std::process::Output;
use std::time::Duration;

use bulkhead_client::{Client, Job, Priority};
use bulkhead_tests::{
    Auditor, Running, SAME_NUMBERS, Supervisor, children, connect, descriptors, heavy, is_alive, kill_pid,
    name, outcome, run, spawn, tally, wait_for,
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

/// Starts a supervisor with a bulkhead `b`.
fn start(keys: &str) -> Supervisor {
    start_with("command = [\"MISBEHAVE\"]", keys)
}

fn start_with(program: &str, keys: &str) -> Supervisor {
    Supervisor::start(&format!(
        "{SAME_NUMBERS}[defaults]\ndeadline = \"120s\"\n\
         restart = {{ backoff = \"1ms\", backoff_max = \"5ms\", max = 1000 }}\n\
         [bulkhead.b]\n{program}\n{keys}\n"
    ))
}

fn steps(client: &Client, steps: &str) -> Job {
    client.job("b", "").operation(format!("steps:{steps}"))
}

/// Starts jobs that append a byte to the file `ran` and run until the file `end` exists.
fn holders(client: &Client, count: usize) -> Vec<Running> {
    (0..count).map(|_| spawn(steps(client, "count ran;wait end;pid"))).collect()
}

async fn texts(jobs: Vec<Running>) -> Vec<String> {
    let mut texts = Vec::new();
    for job in jobs {
        texts.push(String::from_utf8(job.await.unwrap().unwrap().into_payload()).unwrap());
    }
    texts
}

fn wait_ran(supervisor: &Supervisor, count: usize) {
    wait_for(&format!("{count} jobs run"), || (supervisor.file_bytes("ran") == count).then_some(()));
}

/// Returns the number of running jobs and the number of waiting jobs from a single snapshot.
fn load(supervisor: &Supervisor) -> (u64, u64) {
    let snapshot = supervisor.snapshot("b");
    (snapshot["in_flight"].as_u64().unwrap(), snapshot["queued"].as_u64().unwrap())
}

fn wait_load(supervisor: &Supervisor, in_flight: u64, queued: u64) {
    wait_for(&format!("{in_flight} jobs in flight, {queued} jobs waiting"), || {
        (load(supervisor) == (in_flight, queued)).then_some(())
    });
}

/// Waits until exactly `count` workers exist and all of them are ready. Returns their PIDs.
fn wait_workers(supervisor: &Supervisor, count: usize) -> Vec<u32> {
    wait_for(&format!("{count} workers are ready"), || {
        let snapshot = supervisor.snapshot("b");
        let workers = snapshot["workers"].as_array().unwrap().clone();
        let are_ready = workers.iter().all(|worker| worker["state"] == "ready");
        let pids: Vec<u32> = workers.iter().filter_map(|w| w["pid"].as_u64()).map(|pid| pid as u32).collect();
        (are_ready && pids.len() == count && workers.len() == count).then_some(pids)
    })
}

/// Checks that no worker was killed. Ignores idle workers that were killed because they did not exit in time on a busy
/// machine.
fn assert_none_killed(supervisor: &Supervisor) {
    let mut killed = supervisor.events("worker_killed");
    killed.retain(|event| event["reason"] != "the worker was asked to stop but was still running");
    assert!(killed.is_empty(), "{killed:?}");
}

// `max_in_flight`.

#[test]
fn raising_max_in_flight_starts_queued_jobs_without_restart() {
    let supervisor = start("max_queue = 10");
    let auditor = Auditor::of(&supervisor);
    let workers = supervisor.worker_pids("b");
    run(async {
        let client = connect(&supervisor).await;
        let jobs = holders(&client, 6);
        wait_load(&supervisor, 1, 5);
        let snapshot = supervisor.resize("b", r#"{"max_in_flight": 4}"#);
        // The response already counts the newly dispatched jobs.
        let shown = ["limit", "in_flight", "queued", "available"].map(|field| snapshot[field].clone());
        assert_eq!(shown, [4, 4, 2, 0].map(Value::from), "{snapshot}");
        // The jobs have begun, so the worker has started more threads.
        wait_ran(&supervisor, 4);
        assert_eq!(load(&supervisor), (4, 2));
        assert_eq!(supervisor.file_bytes("ran"), 4);
        supervisor.touch("end");
        let pids = tally(texts(jobs).await);
        assert_eq!(pids.keys().collect::<Vec<_>>(), [&workers[0].to_string()], "{pids:?}");
    });
    assert_eq!(supervisor.worker_pids("b"), workers);
    assert_eq!(supervisor.number("b", "restarts"), 0);
    let told = supervisor.wait_events("limits_changed", 1);
    assert_eq!((told.len(), &told[0]["max_in_flight"]), (1, &4.into()), "{told:?}");
    auditor.finish();
}

#[test]
fn worker_accepts_limit_far_above_its_initial_limit() {
    let supervisor = start("max_queue = 300");
    let workers = supervisor.worker_pids("b");
    run(async {
        let client = connect(&supervisor).await;
        let jobs = holders(&client, 300);
        wait_load(&supervisor, 1, 299);
        supervisor.resize("b", r#"{"max_in_flight": 256}"#);
        wait_ran(&supervisor, 256);
        assert_eq!(load(&supervisor), (256, 44));
        supervisor.touch("end");
        assert_eq!(texts(jobs).await.len(), 300);
    });
    assert_eq!(supervisor.worker_pids("b"), workers);
}

/// A queued job starts only when the number of running jobs is below the new limit.
#[test]
fn lowering_max_in_flight_does_not_interrupt_running_jobs() {
    let supervisor = start("max_in_flight = 4\nmax_queue = 10");
    supervisor.wait_number("b", "limit", 4);
    let auditor = Auditor::of(&supervisor);
    run(async {
        let client = connect(&supervisor).await;
        let running: Vec<_> =
            (0..4).map(|i| spawn(steps(&client, &format!("count ran;wait end-{i}")))).collect();
        wait_ran(&supervisor, 4);
        let waiting: Vec<_> = (0..2).map(|_| spawn(steps(&client, "count waited;wait end"))).collect();
        supervisor.wait_number("b", "queued", 2);
        let snapshot = supervisor.resize("b", r#"{"max_in_flight": 1}"#);
        let shown = ["limit", "in_flight", "available"].map(|field| snapshot[field].clone());
        assert_eq!(shown, [1, 4, 0].map(Value::from), "{snapshot}");
        for (i, job) in running.into_iter().enumerate() {
            assert_eq!(load(&supervisor), (4 - i as u64, 2));
            assert_eq!(supervisor.file_bytes("waited"), 0, "a queued job began while {} jobs ran", 4 - i);
            supervisor.touch(&format!("end-{i}"));
            assert_eq!(outcome(&job.await.unwrap()), "ok");
        }
        wait_load(&supervisor, 1, 1);
        wait_for("the next job begins", || (supervisor.file_bytes("waited") == 1).then_some(()));
        supervisor.touch("end");
        for job in waiting {
            assert_eq!(outcome(&job.await.unwrap()), "ok");
        }
    });
    assert_eq!(supervisor.number("b", "restarts"), 0);
    auditor.finish();
}

#[test]
fn raising_max_in_flight_overrides_earlier_lower_limit() {
    let supervisor = start("max_in_flight = 4\nmax_queue = 10");
    supervisor.wait_number("b", "limit", 4);
    let workers = supervisor.worker_pids("b");
    run(async {
        let client = connect(&supervisor).await;
        let jobs = holders(&client, 10);
        wait_load(&supervisor, 4, 6);
        for (most, in_flight) in [(1, 4), (3, 4), (4, 4), (2, 4), (6, 6), (1, 6), (8, 8)] {
            let snapshot = supervisor.resize("b", &format!("{{\"max_in_flight\": {most}}}"));
            let shown = ["limit", "in_flight", "queued"].map(|field| snapshot[field].clone());
            assert_eq!(shown, [most, in_flight, 10 - in_flight].map(Value::from), "{snapshot}");
        }
        wait_ran(&supervisor, 8);
        supervisor.touch("end");
        assert_eq!(texts(jobs).await.len(), 10);
    });
    assert_eq!(supervisor.worker_pids("b"), workers);
}

#[test]
fn worker_still_starting_gets_the_raised_limit() {
    let supervisor = start_with("command = [\"MISBEHAVE\", \"slow-again\", \"starts\"]", "max_queue = 10");
    run(async {
        let client = connect(&supervisor).await;
        assert_eq!(outcome(&steps(&client, "die").send().await), "crashed/signal");
        // The replacement received `max_in_flight` 1 in its welcome, and is not ready yet.
        wait_for("the next worker is initialising", || {
            (supervisor.snapshot("b")["workers"][0]["state"] == "initializing").then_some(())
        });
        let jobs = holders(&client, 4);
        supervisor.wait_number("b", "queued", 4);
        supervisor.resize("b", r#"{"max_in_flight": 3}"#);
        assert_eq!(load(&supervisor), (0, 4));
        let workers = supervisor.worker_pids("b");
        supervisor.touch("go");
        wait_ran(&supervisor, 3);
        assert_eq!(load(&supervisor), (3, 1));
        assert_eq!(supervisor.worker_pids("b"), workers);
        supervisor.touch("end");
        assert_eq!(texts(jobs).await.len(), 4);
    });
}

#[test]
fn restarted_worker_keeps_resized_limits() {
    let supervisor = start("max_queue = 10");
    supervisor.resize("b", r#"{"max_in_flight": 3}"#);
    run(async {
        let client = connect(&supervisor).await;
        assert_eq!(outcome(&steps(&client, "die").send().await), "crashed/signal");
        let jobs = holders(&client, 5);
        wait_ran(&supervisor, 3);
        wait_load(&supervisor, 3, 2);
        supervisor.touch("end");
        assert_eq!(texts(jobs).await.len(), 5);
        assert_eq!(supervisor.post("/v1/bulkheads/b/restart").0, 200);
        wait_for("the worker is replaced", || (supervisor.number("b", "restarts") == 2).then_some(()));
        wait_workers(&supervisor, 1);
        assert_eq!(supervisor.number("b", "limit"), 3);
    });
}

#[test]
fn max_in_flight_of_zero_disables_the_bulkhead() {
    let supervisor = start("max_queue = 5");
    let auditor = Auditor::of(&supervisor);
    run(async {
        let client = connect(&supervisor).await;
        let running = spawn(steps(&client, "count ran;wait end"));
        wait_ran(&supervisor, 1);
        let waiting: Vec<_> = (0..3).map(|_| spawn(steps(&client, "count never-ran"))).collect();
        supervisor.wait_number("b", "queued", 3);
        // A limit of 0 with a queue is refused, because queued jobs would never begin.
        let (status, problem) = supervisor.patch("/v1/bulkheads/b", r#"{"max_in_flight": 0}"#);
        assert_eq!(status, 400, "{problem}");
        assert!(problem["detail"].as_str().unwrap().contains("max_queue"), "{problem}");
        assert_eq!(supervisor.number("b", "limit"), 1);
        let snapshot = supervisor.resize("b", r#"{"max_in_flight": 0, "max_queue": 0}"#);
        assert_eq!(snapshot["limit"], 0, "{snapshot}");
        for _ in 0..3 {
            assert_eq!(outcome(&client.job("b", "").send().await), "rejected/queue_full");
            let critical = client.job("b", "").priority(Priority::Critical);
            assert_eq!(outcome(&critical.send().await), "rejected/queue_full");
        }
        // Waiting jobs are rejected, and running jobs can finish.
        for job in waiting {
            let told = outcome(&job.await.unwrap());
            assert!(told.starts_with("rejected/"), "{told}");
        }
        supervisor.touch("end");
        assert_eq!(outcome(&running.await.unwrap()), "ok");
        supervisor.resize("b", r#"{"max_in_flight": 1}"#);
        // The job waits if the new worker is not ready yet.
        assert_eq!(outcome(&client.job("b", "").send().await), "ok");
        wait_workers(&supervisor, 1);
        assert_eq!(supervisor.number("b", "limit"), 1);
        assert_eq!(supervisor.file_bytes("never-ran"), 0);
    });
    auditor.finish();
}

// `processes`.

#[test]
fn additional_processes_run_queued_jobs() {
    let supervisor = start("max_queue = 10");
    let auditor = Auditor::of(&supervisor);
    let first = supervisor.worker_pids("b")[0];
    run(async {
        let client = connect(&supervisor).await;
        let jobs = holders(&client, 5);
        wait_load(&supervisor, 1, 4);
        supervisor.resize("b", r#"{"processes": 3}"#);
        wait_ran(&supervisor, 3);
        assert_eq!(load(&supervisor), (3, 2));
        assert_eq!(supervisor.number("b", "limit"), 3);
        supervisor.touch("end");
        let pids = tally(texts(jobs).await);
        assert!(pids.len() == 3 && pids.contains_key(&first.to_string()), "{pids:?}");
    });
    let workers = wait_workers(&supervisor, 3);
    assert!(workers.contains(&first), "the first worker was replaced");
    // The first start in a slot does not count as a restart.
    assert_eq!(supervisor.number("b", "restarts"), 0);
    assert_eq!(supervisor.snapshot("b")["state"], "ready");
    auditor.finish();
}

#[test]
fn removed_processes_finish_their_jobs() {
    let supervisor = start("processes = 3\nmax_in_flight = 2\nmax_queue = 10");
    supervisor.wait_number("b", "limit", 6);
    let auditor = Auditor::of(&supervisor);
    let before = supervisor.worker_pids("b");
    run(async {
        let client = connect(&supervisor).await;
        let jobs = holders(&client, 6);
        wait_ran(&supervisor, 6);
        let waiting = spawn(steps(&client, "count waited"));
        supervisor.wait_number("b", "queued", 1);
        let snapshot = supervisor.resize("b", r#"{"processes": 1}"#);
        let shown = ["limit", "in_flight", "queued", "available"].map(|field| snapshot[field].clone());
        assert_eq!(shown, [2, 6, 1, 0].map(Value::from), "{snapshot}");
        assert!(before.iter().all(|&pid| is_alive(pid)));
        assert_eq!(supervisor.file_bytes("waited"), 0);
        supervisor.touch("end");
        assert_eq!(tally(texts(jobs).await).values().sum::<usize>(), 6);
        assert_eq!(outcome(&waiting.await.unwrap()), "ok");
    });
    let left = wait_workers(&supervisor, 1);
    assert!(before.contains(&left[0]), "the remaining worker is new");
    wait_for("the other workers have exited", || {
        before.iter().all(|pid| left.contains(pid) || !is_alive(*pid)).then_some(())
    });
    let snapshot = supervisor.snapshot("b");
    let shown = ["limit", "crashed", "restarts", "state"].map(|field| snapshot[field].clone());
    assert_eq!(shown, [json!(2), json!(0), json!(0), json!("ready")], "{snapshot}");
    assert_none_killed(&supervisor);
    auditor.finish();
}

// Jobs in removed processes count towards the limit, so no job begins while more jobs run than the new limit allows.
#[test]
fn queued_job_waits_until_removed_processes_have_finished() {
    let supervisor = start("processes = 3\nmax_queue = 10");
    supervisor.wait_number("b", "limit", 3);
    run(async {
        let client = connect(&supervisor).await;
        let jobs: Vec<_> = (0..3).map(|_| spawn(steps(&client, "count ran;wait-own"))).collect();
        wait_ran(&supervisor, 3);
        let waiting = spawn(steps(&client, "count waited;wait end"));
        supervisor.wait_number("b", "queued", 1);
        supervisor.resize("b", r#"{"processes": 1}"#);
        let snapshot = supervisor.snapshot("b");
        let (leaving, staying): (Vec<Value>, Vec<Value>) =
            snapshot["workers"].as_array().unwrap().iter().cloned().partition(|w| w["state"] == "draining");
        assert_eq!((leaving.len(), staying.len()), (2, 1), "{snapshot}");
        for (worker, left) in staying.iter().chain(&leaving).zip([2, 1, 0]) {
            assert_eq!(
                supervisor.file_bytes("waited"),
                0,
                "the queued job began while {} jobs ran",
                left + 1
            );
            supervisor.touch(&format!("end-{}", worker["pid"]));
            supervisor.wait_number("b", "done", 3 - left);
        }
        wait_for("the queued job begins", || (supervisor.file_bytes("waited") == 1).then_some(()));
        supervisor.touch("end");
        for job in jobs.into_iter().chain([waiting]) {
            assert_eq!(outcome(&job.await.unwrap()), "ok");
        }
    });
}

// The job in the killed worker has begun and is not idempotent, so its outcome is `crashed`. See
// `started_job_is_not_repeated_after_missed_resize`.
#[test]
fn surplus_process_is_not_restarted_after_it_dies() {
    let supervisor = start("processes = 2\ndeadline_max = \"120s\"\ndeadline = \"1s\"\ngrace = \"10ms\"");
    supervisor.wait_number("b", "limit", 2);
    run(async {
        let client = connect(&supervisor).await;
        let jobs: Vec<_> = (0..2)
            .map(|_| spawn(steps(&client, "count ran;wait end;pid").deadline(Duration::from_secs(60))))
            .collect();
        wait_ran(&supervisor, 2);
        supervisor.resize("b", r#"{"processes": 1}"#);
        let leaving = wait_for("a worker is draining", || {
            let snapshot = supervisor.snapshot("b");
            let workers = snapshot["workers"].as_array().unwrap().clone();
            workers.iter().find(|worker| worker["state"] == "draining").map(|worker| worker["pid"].clone())
        });
        kill_pid(leaving.as_u64().unwrap() as u32, Signal::SIGKILL);
        supervisor.wait_number("b", "crashed", 1);
        supervisor.touch("end");
        let mut ends = Vec::new();
        for job in jobs {
            ends.push(outcome(&job.await.unwrap()));
        }
        let ends = tally(ends);
        assert_eq!((ends.get("ok"), ends.get("crashed/signal")), (Some(&1), Some(&1)), "{ends:?}");
    });
    wait_workers(&supervisor, 1);
    assert_eq!((supervisor.number("b", "limit"), supervisor.number("b", "restarts")), (1, 0));
}

#[test]
fn repeated_process_resizes_lose_no_running_jobs() {
    let supervisor = start("processes = 4\nmax_queue = 20");
    supervisor.wait_number("b", "limit", 4);
    let auditor = Auditor::of(&supervisor);
    run(async {
        let client = connect(&supervisor).await;
        let jobs = holders(&client, 8);
        wait_ran(&supervisor, 4);
        for processes in [1, 4, 2, 3, 1, 4] {
            supervisor.resize("b", &format!("{{\"processes\": {processes}}}"));
        }
        supervisor.touch("end");
        assert_eq!(texts(jobs).await.len(), 8);
    });
    wait_workers(&supervisor, 4);
    let snapshot = supervisor.snapshot("b");
    let shown = ["limit", "available", "in_flight", "crashed"].map(|field| snapshot[field].clone());
    assert_eq!(shown, [4, 4, 0, 0].map(Value::from), "{snapshot}");
    auditor.finish();
}

#[test]
fn resize_to_current_limits_changes_nothing() {
    let supervisor = start("processes = 2\nmax_in_flight = 2\nmax_queue = 4");
    supervisor.wait_number("b", "limit", 4);
    let workers = supervisor.worker_pids("b");
    for body in ["{}", r#"{"processes": 2, "max_in_flight": 2, "max_queue": 4}"#, r#"{"breaker": "auto"}"#] {
        let snapshot = supervisor.resize("b", body);
        assert_eq!((&snapshot["limit"], &snapshot["queue_capacity"]), (&4.into(), &4.into()), "{snapshot}");
    }
    assert_eq!(supervisor.worker_pids("b"), workers);
    assert_eq!(supervisor.number("b", "restarts"), 0);
}

#[test]
fn resize_of_drained_bulkhead_takes_effect_after_resume() {
    let supervisor = start("");
    assert_eq!(supervisor.post("/v1/bulkheads/b/drain").0, 200);
    supervisor.resize("b", r#"{"processes": 2, "max_in_flight": 2, "max_queue": 2}"#);
    assert_eq!(supervisor.post("/v1/bulkheads/b/resume").0, 200);
    wait_workers(&supervisor, 2);
    assert_eq!(supervisor.number("b", "limit"), 4);
    run(async {
        let client = connect(&supervisor).await;
        let jobs = holders(&client, 6);
        wait_load(&supervisor, 4, 2);
        supervisor.touch("end");
        assert_eq!(texts(jobs).await.len(), 6);
    });
}

// Under load.

/// Generator of reproducible pseudo-random numbers.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

/// Repeatedly resizes the bulkhead while running jobs that `job` creates. Stops after at least `jobs` jobs and
/// `resizes` resizes. Returns each job's outcome and number of attempts.
fn resize_under_load(
    supervisor: &Supervisor,
    jobs: usize,
    resizes: usize,
    processes_max: u64,
    in_flight_max: u64,
    job: impl Fn(&Client, usize) -> Job,
) -> Vec<(String, u32)> {
    run(async {
        let client = connect(supervisor).await;
        let mut dice = Dice(7);
        let (mut tasks, mut sent, mut resized) = (Vec::new(), 0, 0);
        let batch = (jobs / 20).max(200);
        while sent < jobs || resized < resizes {
            // Keeps jobs in the queue, so that each increase can start some. Does not wait for a minimum queue length,
            // because jobs can end faster than they arrive.
            if load(supervisor).1 < 100 {
                tasks.extend((0..batch).map(|i| spawn(job(&client, sent + i))));
                sent += batch;
                let expected = sent as u64;
                wait_for("the batch is submitted", || {
                    (supervisor.number("b", "submitted") == expected).then_some(())
                });
            }
            if resized < resizes {
                let (processes, most) = (1 + dice.roll(processes_max), 1 + dice.roll(in_flight_max));
                let change = match dice.roll(3) {
                    0 => json!({"processes": processes}),
                    1 => json!({"max_in_flight": most}),
                    _ => json!({"processes": processes, "max_in_flight": most}),
                };
                supervisor.resize("b", &change.to_string());
                resized += 1;
            }
        }
        let mut ends = Vec::new();
        for task in tasks {
            let result = task.await.unwrap();
            let attempts = match &result {
                Ok(reply) => reply.outcome().attempts,
                Err(error) => error.outcome().unwrap().attempts,
            };
            ends.push((outcome(&result), attempts));
        }
        assert!(ends.len() >= jobs);
        ends
    })
}

#[test]
fn a_hundred_resizes_under_load_lose_no_jobs() {
    let _turn = heavy();
    let supervisor = start("processes = 3\nmax_in_flight = 5\nmax_queue = 100000");
    wait_workers(&supervisor, 3);
    let open = |supervisor: &Supervisor| (descriptors(supervisor.pid()), descriptors(supervisor.keeper()));
    let before = wait_for("the number of descriptors is stable", || {
        // The supervisor closes prepared confinement rules after a quarter of a second.
        let first = open(&supervisor);
        std::thread::park_timeout(Duration::from_millis(300));
        (first == open(&supervisor)).then_some(first)
    });
    let auditor = Auditor::of(&supervisor);
    let ends = resize_under_load(&supervisor, 5000, 100, 4, 8, |client, _| steps(client, "sleep 2"));
    let count = ends.len();
    let ends = tally(ends);
    // No job needed a second attempt.
    assert_eq!(ends.get(&("ok".to_owned(), 1)), Some(&count), "{ends:?}");
    auditor.finish();
    supervisor.resize("b", r#"{"processes": 3, "max_in_flight": 5}"#);
    wait_workers(&supervisor, 3);
    let snapshot = supervisor.snapshot("b");
    let shown = ["limit", "available", "in_flight", "queued", "crashed"].map(|field| snapshot[field].clone());
    assert_eq!(shown, [15, 15, 0, 0, 0].map(Value::from), "{snapshot}");
    assert_eq!(children(supervisor.keeper()).len(), 3, "number of the keeper's children");
    wait_for(&format!("descriptors are {before:?} again"), || (open(&supervisor) == before).then_some(()));
}

// A started job must not go to another worker, even if the worker died before it handled the resize.
#[test]
fn started_job_is_not_repeated_after_missed_resize() {
    let supervisor = start("max_queue = 5\nhealth = { heartbeat = \"60s\" }");
    let worker = supervisor.worker_pids("b")[0];
    run(async {
        let client = connect(&supervisor).await;
        let job = spawn(steps(&client, "freeze-first 1 ran"));
        wait_ran(&supervisor, 1);
        supervisor.resize("b", r#"{"max_in_flight": 2}"#);
        // The snapshot comes from a later iteration of the event loop, so the resize has been sent.
        assert_eq!(supervisor.number("b", "limit"), 2);
        kill_pid(worker, Signal::SIGKILL);
        let result = job.await.unwrap();
        assert_eq!(outcome(&result), "crashed/signal");
        assert_eq!(result.unwrap_err().outcome().unwrap().attempts, 1);
    });
    assert_eq!(supervisor.file_bytes("ran"), 1, "the job ran more than once");
}

#[test]
fn crashes_during_resizes_fail_only_the_culprits() {
    let _turn = heavy();
    let supervisor = start(
        "processes = 2\nmax_in_flight = 4\nmax_queue = 100000\nretry = { budget = 1.0 }\nbreaker = { min_calls = 1000000 }",
    );
    wait_workers(&supervisor, 2);
    let auditor = Auditor::of(&supervisor);
    let ends = resize_under_load(&supervisor, 1000, 60, 3, 6, |client, i| {
        let what = if i % 25 == 7 { "sleep 1;die" } else { "sleep 2" };
        client.job("b", vec![i as u8; i % 3 * 50_000]).operation(format!("steps:{what}")).idempotent(true)
    });
    let (count, ends) = (ends.len(), tally(ends));
    let culprits = (0..count).filter(|i| i % 25 == 7).count();
    assert_eq!(ends.get(&("crashed/signal".to_owned(), 2)), Some(&culprits), "{ends:?}");
    let innocent = [1, 2].map(|attempts| ends.get(&("ok".to_owned(), attempts)).copied().unwrap_or(0));
    assert_eq!(innocent.iter().sum::<usize>(), count - culprits, "{ends:?}");
    supervisor.resize("b", r#"{"processes": 2, "max_in_flight": 3}"#);
    wait_workers(&supervisor, 2);
    let snapshot = supervisor.snapshot("b");
    let shown = ["limit", "available", "in_flight", "queued"].map(|field| snapshot[field].clone());
    assert_eq!(shown, [6, 6, 0, 0].map(Value::from), "{snapshot}");
    auditor.finish();
}

#[test]
fn concurrent_jobs_never_exceed_a_changing_limit() {
    let _turn = heavy();
    // Each job reports how many jobs ran at once. The number must not exceed the highest limit.
    let supervisor = start("max_in_flight = 2\nmax_queue = 100000");
    let ends = run(async {
        let client = connect(&supervisor).await;
        let jobs: Vec<_> = (0..600).map(|_| spawn(steps(&client, "peak 1"))).collect();
        for turn in 0..60 {
            supervisor.resize("b", &format!("{{\"max_in_flight\": {}}}", 1 + turn % 3));
            let snapshot = supervisor.snapshot("b");
            assert!(snapshot["in_flight"].as_u64() <= Some(3), "{snapshot}");
        }
        texts(jobs).await
    });
    let peaks = tally(ends);
    assert!(peaks.keys().all(|peak| ["1", "2", "3"].contains(&peak.as_str())), "{peaks:?}");
}

// Workers that cannot be resized.

/// The old worker finishes its running jobs and receives no new jobs.
#[test]
fn worker_that_cannot_be_resized_is_replaced() {
    let supervisor = start_with(
        "command = [\"MISBEHAVE\", \"raw\", \"hoard\"]",
        "max_in_flight = 2\nmax_queue = 10\nhealth = { heartbeat = \"60s\" }",
    );
    supervisor.wait_number("b", "limit", 2);
    let auditor = Auditor::of(&supervisor);
    let first = supervisor.worker_pids("b")[0];
    run(async {
        let client = connect(&supervisor).await;
        let jobs: Vec<_> = (0..6).map(|_| spawn(client.job("b", ""))).collect();
        wait_load(&supervisor, 2, 4);
        supervisor.resize("b", r#"{"max_in_flight": 4}"#);
        // The replacement serves jobs before the first worker has finished.
        wait_for("the replacement has jobs", || {
            let snapshot = supervisor.snapshot("b");
            let workers = snapshot["workers"].as_array().unwrap();
            workers.iter().any(|w| w["pid"] != first && w["in_flight"].as_u64() > Some(0)).then_some(())
        });
        assert!(is_alive(first), "the first worker still has two jobs");
        supervisor.touch("go");
        for peak in texts(jobs).await {
            assert!(peak.parse::<u32>().unwrap() <= 4, "{peak}");
        }
        let workers = wait_workers(&supervisor, 1);
        assert_ne!(workers[0], first);
        assert_eq!(supervisor.number("b", "limit"), 4);
        wait_for("the first worker has exited", || (!is_alive(first)).then_some(()));
        let told = supervisor.wait_events("worker_recycled", 1);
        assert_eq!((&told[0]["reason"], told.len()), (&"resize".into(), 1), "{told:?}");
        assert_none_killed(&supervisor);

        // The supervisor sends no message to a worker if the limit is at most the value in the worker's welcome.
        std::fs::remove_file(supervisor.file("go")).unwrap();
        supervisor.resize("b", r#"{"max_in_flight": 1}"#);
        let jobs: Vec<_> = (0..5).map(|_| spawn(client.job("b", ""))).collect();
        wait_load(&supervisor, 1, 4);
        supervisor.resize("b", r#"{"max_in_flight": 3}"#);
        assert_eq!(load(&supervisor), (3, 2));
        supervisor.touch("go");
        texts(jobs).await;
        assert_eq!(supervisor.worker_pids("b"), workers);
    });
    assert_eq!(supervisor.file_bytes("too-many"), 0);
    assert_eq!(supervisor.file_bytes("told"), 0);
    assert_eq!(supervisor.wait_events("worker_recycled", 1).len(), 1);
    auditor.finish();
}

#[test]
fn workers_that_cannot_be_resized_are_replaced_one_by_one() {
    let supervisor = start_with(
        "command = [\"MISBEHAVE\", \"raw\", \"hoard\"]",
        "processes = 3\nmax_queue = 1000\nhealth = { heartbeat = \"60s\" }",
    );
    supervisor.touch("go");
    wait_workers(&supervisor, 3);
    let first = supervisor.worker_pids("b");
    let auditor = Auditor::of(&supervisor);
    run(async {
        let client = connect(&supervisor).await;
        let jobs: Vec<_> = (0..300).map(|_| spawn(client.job("b", ""))).collect();
        supervisor.resize("b", r#"{"max_in_flight": 2}"#);
        wait_for("all workers are replaced", || {
            let snapshot = supervisor.snapshot("b");
            let workers = snapshot["workers"].as_array().unwrap();
            // Capacity never drops.
            assert!(snapshot["limit"].as_u64() >= Some(3), "{snapshot}");
            // Any number of old workers can be draining, but only one new worker starts at a time.
            let is_coming = |worker: &&Value| {
                ["spawning", "handshaking", "initializing"].iter().any(|state| worker["state"] == *state)
            };
            assert!(workers.iter().filter(is_coming).count() <= 1, "{snapshot}");
            (snapshot["limit"] == 6).then_some(())
        });
        for peak in texts(jobs).await {
            assert!(["1", "2"].contains(&peak.as_str()), "{peak}");
        }
    });
    let workers = wait_workers(&supervisor, 3);
    assert!(workers.iter().all(|pid| !first.contains(pid)), "{workers:?} after {first:?}");
    assert_eq!((supervisor.file_bytes("too-many"), supervisor.file_bytes("told")), (0, 0));
    auditor.finish();
}

// Programs of `exec`.

#[test]
fn resize_starts_more_programs_in_the_same_worker() {
    let script = "printf . >>ran; while [ ! -e end ]; do sleep 0.01; done; echo fine";
    let supervisor = start_with(&format!("exec = [\"sh\", \"-c\", {script:?}]"), "max_queue = 20");
    let auditor = Auditor::of(&supervisor);
    let worker = supervisor.worker_pids("b");
    let programs = || {
        let below = children(worker[0]);
        below.into_iter().filter(|&pid| name(pid).as_deref() == Some("sh")).count()
    };
    run(async {
        let client = connect(&supervisor).await;
        let jobs: Vec<_> = (0..8).map(|_| spawn(client.job("b", ""))).collect();
        wait_ran(&supervisor, 1);
        wait_load(&supervisor, 1, 7);
        supervisor.resize("b", r#"{"max_in_flight": 3}"#);
        wait_ran(&supervisor, 3);
        assert_eq!((load(&supervisor), programs()), ((3, 5), 3));
        supervisor.resize("b", r#"{"max_in_flight": 2}"#);
        assert_eq!((load(&supervisor), programs()), ((3, 5), 3));
        supervisor.resize("b", r#"{"max_in_flight": 5}"#);
        wait_ran(&supervisor, 5);
        assert_eq!(programs(), 5);
        supervisor.touch("end");
        texts(jobs).await;
    });
    assert_eq!(supervisor.worker_pids("b"), worker);
    auditor.finish();
}

#[test]
fn resizing_an_exec_bulkhead_loses_no_jobs() {
    let supervisor = start_with("exec = [\"cat\"]", "processes = 2\nmax_in_flight = 2\nmax_queue = 100000");
    let auditor = Auditor::of(&supervisor);
    let ends = resize_under_load(&supervisor, 200, 40, 3, 3, |client, i| {
        client.job("b", vec![i as u8; i % 200 * 100])
    });
    let ends = tally(ends);
    assert_eq!(ends.keys().collect::<Vec<_>>(), [&("ok".to_owned(), 1)], "{ends:?}");
    supervisor.resize("b", r#"{"processes": 1, "max_in_flight": 2}"#);
    wait_workers(&supervisor, 1);
    assert_eq!(supervisor.number("b", "limit"), 2);
    auditor.finish();
}

// Queue, rate limit, tenants.

#[test]
fn higher_tenant_limit_applies_immediately() {
    let supervisor =
        start("max_in_flight = 4\nmax_queue = 10\ntenants = { max_in_flight = 1, max_queue = 3 }");
    supervisor.wait_number("b", "limit", 4);
    let path = "/v1/bulkheads/b/tenants/acme";
    run(async {
        let client = connect(&supervisor).await;
        let holder = || spawn(steps(&client, "count ran;wait end;pid").tenant("acme"));
        let mut jobs: Vec<_> = (0..4).map(|_| holder()).collect();
        wait_load(&supervisor, 1, 3);
        assert_eq!(outcome(&client.job("b", "").tenant("acme").send().await), "rejected/tenant_quota");
        let (status, told) = supervisor.patch(path, r#"{"max_in_flight": 3}"#);
        assert_eq!((status, &told["max_in_flight"]), (200, &3.into()), "{told}");
        assert_eq!(load(&supervisor), (3, 1));
        let (status, told) = supervisor.patch(path, r#"{"max_queue": 5}"#);
        assert_eq!(
            (status, &told["max_in_flight"], &told["max_queue"]),
            (200, &3.into(), &5.into()),
            "{told}"
        );
        jobs.extend((0..4).map(|_| holder()));
        wait_load(&supervisor, 3, 5);
        // The resize does not affect another tenant.
        let other = |_| spawn(steps(&client, "wait end").tenant("other"));
        let others: Vec<_> = (0..2).map(other).collect();
        wait_load(&supervisor, 4, 6);
        supervisor.touch("end");
        for job in jobs.into_iter().chain(others) {
            assert_eq!(outcome(&job.await.unwrap()), "ok");
        }
    });
}

#[test]
fn isolated_tenant_has_separate_limits() {
    let supervisor = start("max_queue = 10\ntenants = { isolate = true }");
    let auditor = Auditor::of(&supervisor);
    let of = |tenant: &str, field: &str| {
        supervisor.get(&format!("/v1/bulkheads/b?tenant={tenant}"))[field].as_u64().unwrap()
    };
    let wait = |tenant: &str, in_flight: u64, queued: u64| {
        wait_for(&format!("{tenant} has {in_flight} jobs in flight and {queued} queued"), || {
            ((of(tenant, "in_flight"), of(tenant, "queued")) == (in_flight, queued)).then_some(())
        });
    };
    run(async {
        let client = connect(&supervisor).await;
        let hold = |tenant: &'static str| {
            let job = move |client: &Client| steps(client, "count ran;wait end").tenant(tenant);
            (0..6).map(|_| spawn(job(&client))).collect::<Vec<_>>()
        };
        let mut jobs = hold("one");
        jobs.extend(hold("two"));
        supervisor.wait_number("b", "submitted", 12);
        wait("one", 1, 5);
        wait("two", 1, 5);
        let resize = |arguments: &[&str]| {
            let mut command = supervisor.command();
            let output = command.args(["resize", "b"]).args(arguments).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        };
        resize(&["--tenant", "one", "--max-in-flight", "2", "--processes", "2"]);
        wait("one", 4, 2);
        wait("two", 1, 5);
        // A change to the bulkhead's limits applies only to tenants without separate limits.
        resize(&["--max-in-flight", "3"]);
        wait("two", 3, 3);
        wait("one", 4, 2);
        // New tenants get the bulkhead's limits, too.
        jobs.extend(hold("three"));
        supervisor.wait_number("b", "submitted", 18);
        wait("three", 3, 3);
        supervisor.touch("end");
        for job in jobs {
            assert_eq!(outcome(&job.await.unwrap()), "ok");
        }
    });
    assert_eq!(supervisor.number("b", "done"), 18);
    auditor.finish();
}

// The command, and invalid requests.

fn resize(supervisor: &Supervisor, arguments: &[&str]) -> Output {
    supervisor.command().arg("resize").args(arguments).output().unwrap()
}

fn code(output: &Output) -> i32 {
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.signal(), None, "{told}");
    // A command that fails prints the reason.
    assert!(output.status.success() || !told.trim().is_empty());
    assert!(!told.contains("panicked"), "{told}");
    output.status.code().unwrap()
}

#[test]
fn resize_command_changes_every_limit() {
    let supervisor = start("");
    let in_force = |arguments: &[&str]| {
        let output = resize(&supervisor, &[&["b"], arguments].concat());
        assert_eq!(code(&output), 0, "{arguments:?}");
        assert!(!output.stdout.is_empty());
        supervisor.snapshot("b")
    };
    assert_eq!(in_force(&["--max-in-flight", "3"])["limit"], 3);
    in_force(&["--processes", "2"]);
    supervisor.wait_number("b", "limit", 6);
    assert_eq!(in_force(&["--max-queue", "7"])["queue_capacity"], 7);
    assert_eq!(in_force(&["--breaker", "forced_open"])["breaker"], "forced_open");
    assert_eq!(in_force(&["--breaker", "auto"])["breaker"], "closed");
    let all = in_force(&["--max-in-flight", "2", "--processes", "1", "--max-queue", "1"]);
    assert_eq!((&all["limit"], &all["queue_capacity"]), (&2.into(), &1.into()), "{all}");
    in_force(&["--rate", "0.001", "--burst", "2"]);
    run(async {
        let client = connect(&supervisor).await;
        for expected in ["ok", "ok", "rejected/rate_limited"] {
            assert_eq!(outcome(&client.job("b", "").send().await), expected);
        }
    });
    let output = supervisor.command().args(["--json", "resize", "b", "--max-queue", "9"]).output().unwrap();
    assert_eq!(code(&output), 0);
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&told["name"], &told["queue_capacity"]), (&"b".into(), &9.into()), "{told}");
    let mut command = supervisor.command();
    let output =
        command.args(["--json", "resize", "b", "--tenant", "a/ü b", "--max-queue", "4"]).output().unwrap();
    assert_eq!(code(&output), 0);
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(told["max_queue"], 4, "{told}");
    let events = supervisor.wait_events("limits_changed", 7);
    assert!(events.iter().any(|event| event["tenant"] == "a/ü b"), "{events:?}");
}

#[test]
fn resize_command_rejects_invalid_limits() {
    let mut supervisor = start("max_queue = 5");
    for (arguments, expected) in [
        (&["b"][..], 2),
        (&["b", "--processes", "many"], 2),
        (&["b", "--processes", "-1"], 2),
        (&["b", "--processes", "4294967296"], 2),
        (&["b", "--breaker", "open"], 2),
        (&["b", "--burst", "3"], 2),
        (&["b", "--tenant", "t", "--breaker", "auto"], 2),
        (&["b", "--tenant", "t"], 2),
        (&["b", "--processes", "0"], 65),
        (&["b", "--processes", "1025"], 65),
        (&["b", "--max-in-flight", "4097"], 65),
        (&["b", "--max-in-flight", "0"], 65),
        (&["b", "--processes", "1024", "--max-in-flight", "4096"], 65),
        (&["b", "--max-queue", "1000001"], 65),
        (&["b", "--rate", "0"], 65),
        (&["b", "--rate", "nan"], 65),
        (&["b", "--rate", "inf"], 65),
        (&["b", "--rate", "5", "--burst", "0"], 65),
        (&["b", "--tenant", "t", "--max-in-flight", "0"], 65),
        (&["b", "--tenant", "t", "--processes", "2"], 65),
        (&["nobody", "--processes", "2"], 66),
        (&["nobody", "--tenant", "t", "--max-queue", "2"], 66),
    ] {
        let output = resize(&supervisor, arguments);
        assert_eq!(code(&output), expected, "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    let snapshot = supervisor.snapshot("b");
    assert_eq!((&snapshot["limit"], &snapshot["queue_capacity"]), (&1.into(), &5.into()), "{snapshot}");
    assert_eq!(supervisor.events("limits_changed").len(), 0);
    supervisor.signal(Signal::SIGTERM);
    assert!(supervisor.wait().success());
    assert_eq!(code(&resize(&supervisor, &["b", "--processes", "2"])), 69);
}

#[test]
fn resize_command_rejects_empty_tenant_name() {
    let supervisor = start("max_queue = 5");
    let output = resize(&supervisor, &["b", "--tenant", "", "--max-queue", "2"]);
    let told = String::from_utf8_lossy(&output.stderr);
    assert!([2, 65].contains(&code(&output)) && told.contains("tenant"), "{:?}: {told}", output.status);
}

#[test]
fn invalid_limits_are_rejected_and_change_nothing() {
    let supervisor = start("processes = 2\nmax_in_flight = 2\nmax_queue = 5");
    supervisor.wait_number("b", "limit", 4);
    let workers = supervisor.worker_pids("b");
    for (path, body, why) in [
        ("b", "", "JSON"),
        ("b", "[]", "JSON|expected|map|sequence"),
        ("b", "null", "JSON"),
        ("b", "[2, 2, 5]", "JSON"),
        ("b", r#"{"processes": 0}"#, "processes"),
        ("b", r#"{"processes": 1025}"#, "processes"),
        ("b", r#"{"processes": 2.5}"#, "processes"),
        ("b", r#"{"processes": "2"}"#, "processes"),
        ("b", r#"{"processes": -1}"#, "processes"),
        ("b", r#"{"max_in_flight": 4097}"#, "max_in_flight"),
        ("b", r#"{"max_in_flight": 99999999999}"#, "max_in_flight"),
        ("b", r#"{"max_in_flight": 0}"#, "max_queue"),
        ("b", r#"{"max_queue": 1000001}"#, "max_queue"),
        ("b", r#"{"max_queue": 3, "processes": 0}"#, "processes"),
        ("b", r#"{"max_queue": 3, "more": 1}"#, "more"),
        ("b", r#"{"rate_limit": {"per_second": 1e300}}"#, "per_second"),
        ("b", r#"{"rate_limit": {"per_second": 1, "per": "planet"}}"#, "per"),
        ("b", r#"{"rate_limit": {}}"#, "per_second"),
        ("b", r#"{"rate_limit": 5}"#, "rate_limit"),
        ("b", r#"{"breaker": "half_open"}"#, "forced_open"),
        ("b", r#"{"max_in_flight": null}"#, "not removed"),
        ("b", r#"{"processes": null}"#, "not removed"),
        ("b", r#"{"max_queue": null}"#, "not removed"),
        ("b", r#"{"breaker": null}"#, "not removed"),
        ("b/tenants/t", r#"{"processes": 2}"#, "isolate"),
        ("b/tenants/t", r#"{"max_in_flight": 0}"#, "max_in_flight"),
        ("b/tenants/t", r#"{"rate_limit": null}"#, "not removed"),
        ("b/tenants/t", r#"{"breaker": "auto"}"#, "breaker"),
        ("b/tenants/t", r#"{"rate_limit": {"per_second": -1}}"#, "per_second"),
        ("b/tenants/t%00", r#"{"max_queue": 1}"#, "tenant"),
    ] {
        let (status, problem) = supervisor.patch(&format!("/v1/bulkheads/{path}"), body);
        assert_eq!(status, 400, "{path} {body}: {problem}");
        let detail = problem["detail"].as_str().unwrap();
        assert!(why.split('|').any(|word| detail.contains(word)), "{path} {body}: {detail}");
    }
    let long = format!("/v1/bulkheads/b/tenants/{}", "t".repeat(257));
    assert_eq!(supervisor.patch(&long, r#"{"max_queue": 1}"#).0, 400);
    assert_eq!(supervisor.patch("/v1/bulkheads/nobody", r#"{"max_queue": 1}"#).0, 404);
    // A request that is partly invalid changes nothing.
    let snapshot = supervisor.snapshot("b");
    assert_eq!((&snapshot["limit"], &snapshot["queue_capacity"]), (&4.into(), &5.into()), "{snapshot}");
    assert_eq!(supervisor.worker_pids("b"), workers);
    assert_eq!(supervisor.events("limits_changed").len(), 0);
}

/// Checking a configuration file with the same conflict must report the same error as the live change.
#[test]
fn queue_required_by_other_keys_cannot_be_removed() {
    let some = "max_queue = 5\n";
    for (keys, why) in [
        (
            "overflow = \"evict-oldest\"",
            "`overflow` (\"evict-oldest\") needs a queue (`max_queue` is 0): write `max_queue = 1` or more, or \
             `overflow = \"reject\"`",
        ),
        (
            "pressure = { warn = 0.8 }",
            "`pressure` needs a queue (`max_queue` is 0): write `max_queue = 1` or more, or remove `pressure`",
        ),
    ] {
        let supervisor = start(&format!("{some}{keys}"));
        let output = resize(&supervisor, &["b", "--max-queue", "0"]);
        assert_eq!(code(&output), 65);
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(told.contains(why), "{told}");
        assert_eq!(supervisor.number("b", "queue_capacity"), 5);
        assert_eq!(code(&resize(&supervisor, &["b", "--max-queue", "1"])), 0);
    }
    // In `[defaults]`, `pressure` applies only to bulkheads with a queue.
    let all =
        "[defaults]\npressure = { warn = 0.8 }\n[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 5\n";
    let supervisor = Supervisor::start(all);
    assert_eq!(code(&resize(&supervisor, &["b", "--max-queue", "0"])), 0);
}

#[test]
fn worker_maximum_includes_spares_of_isolated_tenants() {
    let supervisor =
        start("tenants = { isolate = true, max_active = 1024 }\nstart.spares = 2\nmax_queue = 5");
    let output = resize(&supervisor, &["b", "--processes", "15"]);
    assert_eq!(code(&output), 65);
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(told.contains("(processes + start.spares) x tenants.max_active must be at most 16384"), "{told}");
    assert_eq!(code(&resize(&supervisor, &["b", "--processes", "14"])), 0);
}

/// The maximum applies to the sum of all tenants' processes, including tenants with a separate limit. Configuration
/// files have the same maximum.
#[test]
fn worker_maximum_adds_processes_of_isolated_tenants() {
    let supervisor = start("tenants = { isolate = true, max_active = 1024 }\nprocesses = 15");
    let set = |arguments: &[&str]| resize(&supervisor, &[&["b"], arguments].concat());
    // 1023 tenants with 15 processes each, and a tenant with 1024 processes.
    assert_eq!(code(&set(&["--tenant", "big", "--processes", "1024"])), 0);
    assert_eq!(code(&set(&["--tenant", "big", "--processes", "1024", "--max-queue", "3"])), 0);
    for arguments in [&["--tenant", "other", "--processes", "31"][..], &["--processes", "16"]] {
        let output = set(arguments);
        assert_eq!(code(&output), 65, "{arguments:?}");
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(told.contains("workers at the same time, above 16384"), "{told}");
    }
    assert_eq!(code(&set(&["--tenant", "other", "--processes", "30"])), 0);
    assert_eq!(code(&set(&["--tenant", "big", "--processes", "15"])), 0);
    assert_eq!(code(&set(&["--tenant", "other", "--processes", "31"])), 0);
}

#[test]
fn resize_during_shutdown_is_rejected() {
    let mut supervisor = start("");
    run(async {
        let client = connect(&supervisor).await;
        let jobs = holders(&client, 1);
        wait_ran(&supervisor, 1);
        supervisor.signal(Signal::SIGTERM);
        wait_for("the supervisor stops", || supervisor.log().contains("draining").then_some(()));
        let (status, problem) = supervisor.patch("/v1/bulkheads/b", r#"{"processes": 3}"#);
        assert_eq!(status, 409, "{problem}");
        assert_eq!(code(&resize(&supervisor, &["b", "--processes", "3"])), 75);
        supervisor.touch("end");
        assert_eq!(texts(jobs).await.len(), 1);
    });
    assert!(supervisor.wait().success());
}

/// A queue that is lengthened again must accept more jobs immediately.
#[test]
fn shortening_the_queue_drops_no_jobs() {
    let supervisor = start("max_queue = 3");
    let auditor = Auditor::of(&supervisor);
    run(async {
        let client = connect(&supervisor).await;
        let mut jobs = holders(&client, 4);
        wait_load(&supervisor, 1, 3);
        assert_eq!(outcome(&client.job("b", "").send().await), "rejected/queue_full");
        let snapshot = supervisor.resize("b", r#"{"max_queue": 0}"#);
        let shown = ["queued", "queue_capacity", "queue_available"].map(|field| snapshot[field].clone());
        assert_eq!(shown, [3, 0, 0].map(Value::from), "{snapshot}");
        assert_eq!(outcome(&client.job("b", "").send().await), "rejected/queue_full");
        supervisor.resize("b", r#"{"max_queue": 6}"#);
        jobs.extend(holders(&client, 3));
        wait_load(&supervisor, 1, 6);
        assert_eq!(outcome(&client.job("b", "").send().await), "rejected/queue_full");
        supervisor.touch("end");
        assert_eq!(texts(jobs).await.len(), 7);
    });
    auditor.finish();
}
