//! Reloads of the configuration while jobs run. A valid file takes effect at once and no job is lost. An invalid file
//! changes nothing.

use std::os::unix::fs::symlink;
use std::process::Output;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bulkhead_client::{Client, Job};
use bulkhead_tests::{
    Auditor, Running, SAME_NUMBERS, Supervisor, connect, descriptors, heavy, is_alive, kill_pid, not_run,
    outcome, overrun, programs, run, spawn, tally, threads, wait_for,
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

const B: &str = "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\n";

/// Default keys with long deadlines and short restart delays.
const DEFAULTS: &str = "[defaults]\ndeadline = \"120s\"\n\
                        restart = { backoff = \"1ms\", backoff_max = \"5ms\", max = 1000 }\n";

fn start(bulkheads: &str) -> Supervisor {
    Supervisor::start(&format!("{SAME_NUMBERS}{DEFAULTS}{bulkheads}"))
}

fn configure(supervisor: &Supervisor, bulkheads: &str) {
    supervisor.configure("", &format!("{SAME_NUMBERS}{DEFAULTS}{bulkheads}"));
}

/// Writes a new configuration and reloads it. Returns the response, which lists the changes.
fn reload(supervisor: &Supervisor, bulkheads: &str) -> Value {
    configure(supervisor, bulkheads);
    post(supervisor, "/v1/reload", 200)
}

fn post(supervisor: &Supervisor, path: &str, expected: u16) -> Value {
    let (status, body) = supervisor.post(path);
    assert_eq!(status, expected, "{body}");
    serde_json::from_str(&body).unwrap()
}

fn command(supervisor: &Supervisor, arguments: &[&str]) -> Output {
    supervisor.command().args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn steps(client: &Client, bulkhead: &str, steps: &str) -> Job {
    client.job(bulkhead, "").operation(format!("steps:{steps}"))
}

/// Starts jobs that append a byte to the file `ran` and run until the file `end` exists.
fn holders(client: &Client, bulkhead: &str, count: usize) -> Vec<Running> {
    (0..count).map(|_| spawn(steps(client, bulkhead, "count ran;wait end;pid"))).collect()
}

fn wait_ran(supervisor: &Supervisor, count: usize) {
    wait_for(&format!("{count} jobs run"), || (supervisor.file_bytes("ran") == count).then_some(()));
}

async fn outcomes(jobs: Vec<Running>) -> Vec<String> {
    let mut outcomes = Vec::new();
    for job in jobs {
        outcomes.push(outcome(&job.await.unwrap()));
    }
    outcomes
}

/// Sends a job and returns its result as text.
async fn answer(client: &Client, bulkhead: &str, operation: &str) -> String {
    let reply = client.job(bulkhead, "").operation(operation).send().await.unwrap();
    text(&reply.into_payload()).trim().to_owned()
}

/// Waits until all workers of a bulkhead are ready and none of their PIDs is in `before`. Returns the PIDs.
fn wait_replaced(supervisor: &Supervisor, bulkhead: &str, before: &[u32]) -> Vec<u32> {
    wait_for("all workers are replaced", || {
        let snapshot = supervisor.snapshot(bulkhead);
        let workers = snapshot["workers"].as_array().unwrap().clone();
        let pids: Vec<u32> = workers.iter().filter_map(|w| w["pid"].as_u64()).map(|pid| pid as u32).collect();
        let are_ready = workers.iter().all(|worker| worker["state"] == "ready");
        let are_new = pids.iter().all(|pid| !before.contains(pid));
        (are_ready && are_new && pids.len() == before.len()).then_some(pids)
    })
}

fn names(supervisor: &Supervisor) -> Vec<String> {
    let all = supervisor.get("/v1/bulkheads");
    let names = all["bulkheads"].as_array().unwrap().iter().map(|b| b["name"].as_str().unwrap().to_owned());
    names.collect()
}

// Changes in place.

#[test]
fn reload_changes_limits_without_replacing_workers() {
    let supervisor = start(&format!("{B}max_queue = 10\n"));
    let auditor = Auditor::of(&supervisor);
    let workers = supervisor.worker_pids("b");
    run(async {
        let client = connect(&supervisor).await;
        let jobs = holders(&client, "b", 5);
        wait_ran(&supervisor, 1);
        supervisor.wait_number("b", "queued", 4);
        let keys = "max_queue = 2\nmax_in_flight = 3\nqueue_timeout = \"60s\"\ngrace = \"1s\"\n\
                    rate_limit = { per_second = 0.001, burst = 1 }\npoison = { crashes = 2 }\n\
                    breaker = { window = \"5s\" }\nretry = { attempts = 3 }\n";
        let changes = reload(&supervisor, &format!("{B}{keys}"));
        let keys = json!([
            "breaker",
            "grace",
            "max_in_flight",
            "max_queue",
            "poison",
            "queue_timeout",
            "rate_limit",
            "retry"
        ]);
        let change = json!({"bulkhead": "b", "change": "changed", "keys": keys, "replaces_workers": false,
            "live_dropped": []});
        let expected = json!({
            "dry_run": false, "bulkheads": [change], "supervisor": [], "access": false, "ignored": []
        });
        assert_eq!(changes, expected);
        // Waiting jobs get the new permits in the same worker, and no job is dropped.
        wait_ran(&supervisor, 3);
        assert_eq!(supervisor.snapshot("b")["queue_capacity"], 2);
        // The first job passes the rate limit and is rejected by the queue. The second job exceeds the rate limit.
        let refused = client.job("b", "").operation("echo").send().await;
        assert_eq!(outcome(&refused), "rejected/queue_full");
        let refused = client.job("b", "").operation("echo").send().await;
        assert_eq!(outcome(&refused), "rejected/rate_limited");
        supervisor.touch("end");
        assert_eq!(outcomes(jobs).await, vec!["ok"; 5]);
    });
    assert_eq!(supervisor.worker_pids("b"), workers);
    let [told] = &supervisor.wait_events("config_reloaded", 1)[..] else {
        panic!("expected exactly one event")
    };
    assert_eq!(told["changes"]["bulkheads"][0]["bulkhead"], "b");
    auditor.finish();
}

#[test]
fn shorter_deadline_applies_only_to_later_jobs() {
    // Gives the handler enough time to obey the cancellation. Otherwise, the worker would be killed with both jobs.
    let b = format!("{B}max_in_flight = 2\ngrace = \"60s\"\n");
    let supervisor = start(&b);
    run(async {
        let client = connect(&supervisor).await;
        let before = holders(&client, "b", 1);
        wait_ran(&supervisor, 1);
        reload(&supervisor, &format!("{b}deadline = \"2s\"\n"));
        let after = overrun(&steps(&client, "b", "wait end")).await;
        assert_eq!(outcome(&after), "deadline_exceeded/running");
        supervisor.touch("end");
        assert_eq!(outcomes(before).await, ["ok"]);
    });
}

#[test]
fn reload_keeps_live_values_of_unchanged_keys() {
    let tenants = "tenants = { max_queue = 5 }\n";
    let file = format!("{B}max_queue = 10\nmax_in_flight = 2\n{tenants}");
    let supervisor = start(&file);
    supervisor.resize("b", r#"{"max_queue": 77, "max_in_flight": 4, "breaker": "forced_open"}"#);
    let path = "/v1/bulkheads/b/tenants/acme";
    assert_eq!(supervisor.patch(path, r#"{"max_queue": 3}"#).0, 200);
    // The file changes `grace`. It also changes `max_in_flight`, which had been changed live.
    reload(&supervisor, &file.replace("max_in_flight = 2", "max_in_flight = 3\ngrace = \"7ms\""));
    let snapshot = supervisor.snapshot("b");
    assert_eq!((&snapshot["max_in_flight"], &snapshot["queue_capacity"]), (&json!(3), &json!(77)));
    assert_eq!(snapshot["breaker"], "forced_open");
    let own = supervisor.patch(path, "{}").1;
    assert_eq!(own["max_queue"], 3, "the limits of a tenant are live values, too");
    // The file changes `max_queue`, and the value in the file overrides the live value.
    reload(&supervisor, &file.replace("max_queue = 10", "max_queue = 11"));
    assert_eq!(supervisor.snapshot("b")["queue_capacity"], 11);
    // If a live value conflicts with the new file, the file takes precedence.
    supervisor.resize("b", r#"{"max_queue": 20}"#);
    reload(&supervisor, &format!("{B}max_queue = 0\nmax_in_flight = 0\n"));
    assert_eq!(supervisor.snapshot("b")["limit"], 0);
}

/// If a live change conflicts with the new file, the reload drops the changed value and names its key in the response.
/// Other live changes stay in effect.
#[test]
fn reload_lists_the_runtime_values_it_discards() {
    let file = format!("{B}max_queue = 10\nmax_in_flight = 4\n");
    let supervisor = start(&file);
    supervisor.resize("b", r#"{"max_queue": 77, "max_in_flight": 1}"#);
    let adaptive = format!("{file}adaptive = {{ min = 1, max = 4, target = \"50ms\" }}\n");
    configure(&supervisor, &adaptive);
    let tried = post(&supervisor, "/v1/reload?dry_run=true", 200);
    assert_eq!(tried["bulkheads"][0]["live_dropped"], json!(["max_in_flight"]));
    let told = text(&command(&supervisor, &["reload", "--dry-run"]).stdout);
    let dropped =
        "values set at runtime were dropped because they conflict with the configuration file: max_in_flight";
    assert!(told.starts_with(&format!("b: adaptive; {dropped}\n")), "{told}");
    assert_eq!(supervisor.snapshot("b")["max_in_flight"], 1, "a dry run drops nothing");
    let changes = reload(&supervisor, &adaptive);
    assert_eq!(changes["bulkheads"][0]["keys"], json!(["adaptive"]));
    assert_eq!(changes["bulkheads"][0]["live_dropped"], json!(["max_in_flight"]));
    let snapshot = supervisor.snapshot("b");
    assert_eq!((&snapshot["max_in_flight"], &snapshot["queue_capacity"]), (&json!(4), &json!(77)));
    let [told] = &supervisor.wait_events("config_reloaded", 1)[..] else {
        panic!("expected exactly one event")
    };
    assert_eq!(told["changes"]["bulkheads"][0]["live_dropped"], json!(["max_in_flight"]));
}

// Replacement.

#[test]
fn changing_environment_or_program_replaces_workers() {
    let exec = |env: &str, script: &str| {
        format!("[bulkhead.e]\nexec = [\"/bin/sh\", \"-c\", \"{script}\"]\nenv = {{ MODE = \"{env}\" }}\n{B}")
    };
    let supervisor = start(&exec("one", "echo $MODE"));
    let auditor = Auditor::of(&supervisor);
    run(async {
        let client = connect(&supervisor).await;
        assert_eq!(answer(&client, "e", "").await, "one");
        let (before, others) = (supervisor.worker_pids("e"), supervisor.worker_pids("b"));
        let changes = reload(&supervisor, &exec("two", "echo $MODE"));
        assert_eq!(changes["bulkheads"][0]["keys"], json!(["env"]));
        assert_eq!(changes["bulkheads"][0]["replaces_workers"], true);
        let after = wait_replaced(&supervisor, "e", &before);
        assert_eq!(answer(&client, "e", "").await, "two");
        reload(&supervisor, &exec("two", "echo not $MODE"));
        wait_replaced(&supervisor, "e", &after);
        assert_eq!(answer(&client, "e", "").await, "not two");
        assert_eq!(supervisor.worker_pids("b"), others, "workers of another bulkhead were replaced");
    });
    let recycled = supervisor.wait_events("worker_recycled", 2);
    assert!(recycled.len() == 2 && recycled.iter().all(|event| event["reason"] == "reload"), "{recycled:?}");
    auditor.finish();
}

#[test]
fn running_job_finishes_in_the_old_worker() {
    let supervisor = start(&format!("{B}processes = 2\nmax_queue = 10\n"));
    run(async {
        let client = connect(&supervisor).await;
        let before = supervisor.worker_pids("b");
        let jobs = holders(&client, "b", 2);
        wait_ran(&supervisor, 2);
        let waiting: Vec<_> = (0..4).map(|_| spawn(steps(&client, "b", "pid"))).collect();
        reload(&supervisor, &format!("{B}processes = 2\nmax_queue = 10\nenv = {{ A = \"b\" }}\n"));
        // Both workers are replaced. The jobs that they are still running use all permits.
        supervisor.wait_events("worker_recycled", 2);
        let snapshot = supervisor.snapshot("b");
        let numbers = ["limit", "in_flight", "available", "queued"].map(|name| snapshot[name].as_u64());
        assert_eq!(numbers, [2, 2, 0, 4].map(Some), "{snapshot}");
        assert!(before.iter().all(|&pid| is_alive(pid)));
        supervisor.touch("end");
        assert_eq!(outcomes(jobs).await, ["ok", "ok"]);
        for job in waiting {
            let pid: u32 = text(&job.await.unwrap().unwrap().into_payload()).parse().unwrap();
            assert!(!before.contains(&pid));
        }
        wait_replaced(&supervisor, "b", &before);
    });
}

#[test]
fn old_workers_stay_if_replacement_fails() {
    let supervisor = start(&format!("{B}processes = 2\n"));
    let before = supervisor.worker_pids("b");
    reload(&supervisor, "[bulkhead.b]\ncommand = [\"MISBEHAVE\", \"exit-at-start\"]\nprocesses = 2\n");
    let told = supervisor.wait_events("replacement_failed", 1);
    assert_eq!((&told[0]["serves_on"], &told[0]["severity"]), (&json!(true), &json!("critical")), "{told:?}");
    assert!(told[0]["message"].as_str().unwrap().contains("exited with status 3"), "{told:?}");
    run(async {
        let client = connect(&supervisor).await;
        assert_eq!(answer(&client, "b", "echo").await, "");
    });
    assert!(before.iter().all(|&pid| is_alive(pid)));
    // The supervisor retries the failed replacement.
    supervisor.wait_events("replacement_failed", 2);
    reload(&supervisor, &format!("{B}processes = 2\nenv = {{ A = \"b\" }}\n"));
    wait_replaced(&supervisor, "b", &before);
}

#[test]
fn reload_replaces_workers_that_hang_at_start() {
    let hanging = B.replace("\"MISBEHAVE\"", "\"MISBEHAVE\", \"hang-at-start\"");
    let supervisor = start(&format!("{B}[bulkhead.other]\ncommand = [\"MISBEHAVE\"]\n"));
    let start = "start = { handshake = \"60s\" }\nrestart = { policy = \"never\" }\n";
    reload(&supervisor, &format!("{B}[bulkhead.h]\n{}{start}", &hanging["[bulkhead.b]\n".len()..]));
    run(async {
        let client = connect(&supervisor).await;
        let waits = spawn(client.job("h", "").operation("echo"));
        supervisor.wait_number("h", "queued", 1);
        reload(&supervisor, &format!("{B}[bulkhead.h]\n{}{start}", &B["[bulkhead.b]\n".len()..]));
        assert_eq!(outcome(&waits.await.unwrap()), "ok");
    });
}

// Added and removed bulkheads.

#[test]
fn removed_bulkhead_finishes_accepted_jobs() {
    let supervisor = start(&format!("{B}[bulkhead.gone]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 10\n"));
    run(async {
        let client = connect(&supervisor).await;
        let pids = supervisor.worker_pids("gone");
        let jobs = holders(&client, "gone", 4);
        wait_ran(&supervisor, 1);
        supervisor.wait_number("gone", "queued", 3);
        let changes = reload(&supervisor, B);
        assert_eq!(changes["bulkheads"][0]["change"], "removed");
        let refused = client.job("gone", "").operation("echo").send().await;
        assert_eq!(outcome(&refused), "rejected/not_found");
        assert_eq!(supervisor.try_get("/v1/bulkheads/gone").unwrap().0, 404);
        assert_eq!(names(&supervisor), ["b"]);
        assert_eq!(supervisor.get("/v1/jobs?bulkhead=gone")["total"], 4);
        assert!(is_alive(pids[0]));
        supervisor.touch("end");
        assert_eq!(outcomes(jobs).await, vec!["ok"; 4]);
        let gone = supervisor.wait_events("bulkhead_removed", 1);
        assert_eq!((&gone[0]["bulkhead"], &gone[0]["done"]), (&json!("gone"), &json!(4)));
        assert_eq!(supervisor.try_get("/v1/jobs?bulkhead=gone").unwrap().0, 404);
        let events = supervisor.try_get("/v1/events?bulkhead=gone&follow=false").unwrap();
        assert!(events.0 == 200 && events.1.contains("bulkhead_removed"), "{events:?}");
        assert_eq!(supervisor.try_get("/v1/events?bulkhead=none&follow=false").unwrap().0, 404);
        wait_for("the worker of the removed bulkhead has exited", || (!is_alive(pids[0])).then_some(()));
        // A new bulkhead with the removed name starts with empty counters, and is listed at its place in the file.
        reload(&supervisor, &format!("[bulkhead.gone]\ncommand = [\"MISBEHAVE\"]\n{B}"));
        assert_eq!(names(&supervisor), ["gone", "b"]);
        assert_eq!(answer(&client, "gone", "echo").await, "");
        let snapshot = supervisor.snapshot("gone");
        assert_eq!((&snapshot["submitted"], &snapshot["queue_capacity"]), (&json!(1), &json!(0)));
    });
}

#[test]
fn renamed_bulkhead_finishes_accepted_jobs() {
    let supervisor = start(&format!("{B}max_queue = 5\n"));
    run(async {
        let client = connect(&supervisor).await;
        let jobs = holders(&client, "b", 3);
        wait_ran(&supervisor, 1);
        supervisor.wait_number("b", "queued", 2);
        reload(&supervisor, &format!("{}max_queue = 5\n", B.replace("bulkhead.b", "bulkhead.c")));
        wait_for("the new bulkhead is ready", || {
            (supervisor.snapshot("c")["state"] == "ready").then_some(())
        });
        assert_eq!(answer(&client, "c", "echo").await, "");
        supervisor.touch("end");
        assert_eq!(outcomes(jobs).await, vec!["ok"; 3]);
    });
    supervisor.wait_events("bulkhead_removed", 1);
}

#[test]
fn enabling_tenant_isolation_rebuilds_the_bulkhead() {
    let supervisor = start(&format!("{B}max_queue = 5\n"));
    run(async {
        let client = connect(&supervisor).await;
        let jobs = holders(&client, "b", 2);
        wait_ran(&supervisor, 1);
        let changes = reload(&supervisor, &format!("{B}tenants = {{ isolate = true }}\n"));
        assert_eq!(changes["bulkheads"][0]["change"], "rebuilt");
        let of = |tenant: &str| client.job("b", "").operation("pid").tenant(tenant.to_owned()).send();
        let (acme, globex) = (of("acme").await.unwrap(), of("globex").await.unwrap());
        assert_ne!(acme.into_payload(), globex.into_payload());
        supervisor.touch("end");
        assert_eq!(outcomes(jobs).await, vec!["ok"; 2]);
        supervisor.wait_events("bulkhead_removed", 1);
        // Reloading the first file removes isolation while the bulkhead has active tenants.
        reload(&supervisor, B);
        assert_eq!(answer(&client, "b", "echo").await, "");
        supervisor.wait_events("bulkhead_removed", 2);
    });
}

#[test]
fn rebuilt_bulkhead_stays_closed() {
    let supervisor = start(&format!("{B}max_queue = 5\n"));
    supervisor.resize("b", r#"{"max_queue": 9, "breaker": "forced_open"}"#);
    assert_eq!(supervisor.command().args(["drain", "b"]).status().unwrap().code(), Some(0));
    let mut is_isolated = false;
    for dropped in [vec!["max_queue"], vec![]] {
        is_isolated = !is_isolated;
        let changes =
            reload(&supervisor, &format!("{B}max_queue = 5\ntenants = {{ isolate = {is_isolated} }}\n"));
        assert_eq!(changes["bulkheads"][0]["live_dropped"], json!(dropped));
        let snapshot = supervisor.snapshot("b");
        assert_eq!((&snapshot["state"], &snapshot["breaker"]), (&json!("draining"), &json!("forced_open")));
        assert_eq!(snapshot["max_queue"], 5);
    }
}

#[test]
fn reload_changes_limits_of_isolated_tenants() {
    let keys = "tenants = { isolate = true, max_active = 4 }\n";
    let supervisor = start(&format!("{B}{keys}"));
    run(async {
        let client = connect(&supervisor).await;
        let of = |tenant: &str| client.job("b", "").operation("pid").tenant(tenant.to_owned()).send();
        let before = text(&of("acme").await.unwrap().into_payload());
        let own = "[bulkhead.b.tenant.globex]\nprocesses = 2\n";
        reload(&supervisor, &format!("{B}{keys}max_queue = 9\nenv = {{ A = \"b\" }}\n{own}"));
        let of_tenant = |tenant: &str, field: &str| {
            supervisor.get(&format!("/v1/bulkheads/b?tenant={tenant}"))[field].clone()
        };
        assert_eq!(of_tenant("acme", "queue_capacity"), 9);
        let before: u32 = before.parse().unwrap();
        wait_for("acme's worker is replaced", || (!is_alive(before)).then_some(()));
        of("globex").await.unwrap();
        assert_eq!((of_tenant("acme", "processes"), of_tenant("globex", "processes")), (json!(1), json!(2)));
    });
}

#[test]
fn reload_keeps_fallbacks_by_name() {
    let with = |fallback: &str, others: &str| format!("{B}fallback = [{fallback}]\n{others}");
    let other = |name: &str| format!("[bulkhead.{name}]\ncommand = [\"MISBEHAVE\"]\n");
    let supervisor = start(&with("\"x\", \"y\"", &(other("x") + &other("y"))));
    run(async {
        let client = connect(&supervisor).await;
        let served_by =
            async || client.job("b", "").operation("echo").send().await.unwrap().outcome().bulkhead.clone();
        supervisor.resize("b", r#"{"breaker": "forced_open"}"#);
        assert_eq!(served_by().await, "x");
        // Removes the fallback `x`. Another bulkhead gets the index of `x`.
        reload(&supervisor, &with("\"y\"", &(other("y") + &other("z"))));
        assert_eq!(served_by().await, "y");
        reload(&supervisor, &with("\"z\"", &other("z")));
        assert_eq!(served_by().await, "z");
    });
}

/// The worker was told the limit that applied when it started.
#[test]
fn reload_does_not_lower_result_limit_of_running_jobs() {
    let supervisor = start(&format!("{B}max_result = \"1MiB\"\n"));
    run(async {
        let client = connect(&supervisor).await;
        let job = client.job("b", vec![b'x'; 100_000]).operation("steps:count ran;wait end;echo");
        let job = spawn(job);
        wait_ran(&supervisor, 1);
        reload(&supervisor, &format!("{B}max_result = \"1KiB\"\n"));
        // Until then, the old worker would also get the next job.
        supervisor.wait_events("worker_recycled", 1);
        supervisor.touch("end");
        assert_eq!(job.await.unwrap().unwrap().payload().len(), 100_000);
        let refused = client.job("b", vec![b'x'; 100_000]).operation("echo").send().await;
        assert_eq!(outcome(&refused), "failed/result_too_large");
    });
}

/// Two removed bulkheads with the same name can still have jobs.
#[test]
fn metrics_show_only_the_newest_removed_bulkhead_of_each_name() {
    let supervisor = start(B);
    run(async {
        let client = connect(&supervisor).await;
        let mut jobs = holders(&client, "b", 1);
        wait_ran(&supervisor, 1);
        // Isolating the tenants replaces the bulkhead.
        reload(&supervisor, &format!("{B}tenants = {{ isolate = true }}\n"));
        jobs.push(spawn(steps(&client, "b", "count ran;wait end;pid").tenant("acme")));
        wait_ran(&supervisor, 2);
        reload(&supervisor, "[bulkhead.c]\ncommand = [\"MISBEHAVE\"]\n");
        let (_, metrics) = supervisor.try_get("/metrics").unwrap();
        let lines = metrics.lines().filter(|line| line.starts_with("bulkhead_limit{bulkhead=\"b\"}"));
        assert_eq!(lines.count(), 1, "{metrics}");
        supervisor.touch("end");
        assert_eq!(outcomes(jobs).await, ["ok", "ok"]);
    });
}

#[test]
fn removed_bulkhead_waits_for_jobs_in_fallback() {
    let b = format!("{B}max_queue = 5\n");
    let supervisor = start(&format!("[bulkhead.entry]\ncommand = [\"MISBEHAVE\"]\nfallback = [\"b\"]\n{b}"));
    run(async {
        let client = connect(&supervisor).await;
        supervisor.resize("entry", r#"{"breaker": "forced_open"}"#);
        let jobs = holders(&client, "entry", 2);
        wait_ran(&supervisor, 1);
        supervisor.wait_number("b", "queued", 1);
        reload(&supervisor, &b);
        // In the meantime, adds another bulkhead, which gets a free index.
        reload(&supervisor, &format!("{b}[bulkhead.c]\ncommand = [\"MISBEHAVE\"]\n"));
        assert!(supervisor.events("bulkhead_removed").is_empty());
        supervisor.touch("end");
        assert_eq!(outcomes(jobs).await, ["ok", "ok"]);
        let gone = supervisor.wait_events("bulkhead_removed", 1);
        assert_eq!((&gone[0]["bulkhead"], &gone[0]["done"]), (&json!("entry"), &json!(2)));
        assert_eq!(
            supervisor.number("b", "done"),
            0,
            "the jobs count at the bulkhead to which they were sent"
        );
    });
}

/// An invalid file in `conf.d` must change nothing, and `bulkhead reload` must report it as an error.
#[test]
fn files_in_conf_d_are_reloaded() {
    let supervisor = start(B);
    let misbehave = programs().join("misbehave");
    let write = |name: &str, text: &str| {
        let text = text.replace("MISBEHAVE", misbehave.to_str().unwrap());
        std::fs::write(supervisor.file("conf.d").join(name), text).unwrap();
    };
    std::fs::create_dir(supervisor.file("conf.d")).unwrap();
    write("c.toml", "[bulkhead.c]\ncommand = [\"MISBEHAVE\"]\ncwd = \"..\"\n");
    let ran = command(&supervisor, &["reload"]);
    assert!(ran.status.success() && text(&ran.stdout) == "c: added\n", "{ran:?}");
    write("a.toml", "[bulkhead.b]\nexec = [\"cat\"]\n");
    let ran = command(&supervisor, &["reload"]);
    assert_eq!(ran.status.code(), Some(2), "{ran:?}");
    let said = text(&ran.stderr);
    assert!(
        said.contains("bulkhead `b` is already defined in ") && said.contains("conf.d/a.toml:1:11"),
        "{said}"
    );
    let told = supervisor.wait_events("config_rejected", 1);
    let file = supervisor.file("conf.d/a.toml");
    assert_eq!((&told[0]["file"], &told[0]["line"]), (&json!(file), &json!(1)), "{told:?}");
    assert_eq!(told[0]["errors"][0]["file"], json!(file), "{told:?}");
    std::fs::remove_file(&file).unwrap();
    std::fs::remove_file(supervisor.file("conf.d/c.toml")).unwrap();
    let ran = command(&supervisor, &["reload"]);
    assert!(ran.status.success() && text(&ran.stdout).starts_with("c: removed"), "{ran:?}");
}

// Invalid files.

#[test]
fn invalid_file_is_rejected_with_line_numbers() {
    let supervisor = start(&format!("{B}max_queue = 3\n"));
    let before = supervisor.snapshot("b");
    let broken = format!("{B}max_queue = 9\nmax_qeue = 4\n[bulkhead.c]\ncommand = [\"/no/such/program\"]\n");
    configure(&supervisor, &broken);
    let line = std::fs::read_to_string(supervisor.file("workers.toml")).unwrap();
    let line = line.lines().position(|line| line.starts_with("max_qeue")).unwrap() + 1;
    for path in ["/v1/reload", "/v1/reload?dry_run=true"] {
        let problem = post(&supervisor, path, 422);
        assert_eq!(problem["errors"][0]["line"], line, "{problem}");
        assert_eq!(problem["errors"].as_array().unwrap().len(), 2);
        let detail = problem["detail"].as_str().unwrap();
        assert!(detail.contains("max_qeue = 4") && detail.contains("did you mean `max_queue`?"), "{detail}");
    }
    let told = supervisor.wait_events("config_rejected", 1);
    assert_eq!((&told[0]["line"], &told[0]["errors_in_all"]), (&json!(line), &json!(2)), "{told:?}");
    assert_eq!(told.len(), 1, "a dry run raised an event");
    for arguments in [&["reload"][..], &["reload", "--dry-run"]] {
        let ran = command(&supervisor, arguments);
        assert_eq!(ran.status.code(), Some(2), "{ran:?}");
        assert!(text(&ran.stderr).contains("max_qeue = 4"), "{ran:?}");
    }
    // A reload by SIGHUP is also rejected, as are a missing file and a folder.
    supervisor.signal(Signal::SIGHUP);
    supervisor.wait_events("config_rejected", 3);
    std::fs::remove_file(supervisor.file("workers.toml")).unwrap();
    let problem = post(&supervisor, "/v1/reload", 422);
    assert!(problem["detail"].as_str().unwrap().contains("No such file"), "{problem}");
    std::fs::create_dir(supervisor.file("workers.toml")).unwrap();
    post(&supervisor, "/v1/reload", 422);
    let after = supervisor.snapshot("b");
    assert_eq!(
        (&after["queue_capacity"], &after["workers"][0]["pid"]),
        (&json!(3), &before["workers"][0]["pid"])
    );
    std::fs::remove_dir(supervisor.file("workers.toml")).unwrap();
    assert_eq!(
        reload(&supervisor, &format!("{B}max_queue = 4\n"))["bulkheads"][0]["keys"],
        json!(["max_queue"])
    );
}

#[test]
fn dry_run_reports_changes_without_applying_them() {
    let supervisor = start(&format!("{B}[bulkhead.old]\ncommand = [\"MISBEHAVE\"]\n"));
    let before = supervisor.worker_pids("b");
    let next =
        format!("{B}max_queue = 9\nenv = {{ A = \"b\" }}\n[bulkhead.new]\ncommand = [\"MISBEHAVE\"]\n");
    supervisor
        .configure("crash_keep = 7\ndrain_timeout = \"9s\"", &format!("{SAME_NUMBERS}{DEFAULTS}{next}"));
    let dry = post(&supervisor, "/v1/reload?dry_run=true", 200);
    // An unknown query parameter must not start a real reload.
    let misspelt = post(&supervisor, "/v1/reload?dryrun=true", 400);
    assert!(misspelt["detail"].as_str().unwrap().contains("dryrun"), "{misspelt}");
    for value in ["", "=", "=1", "=yes", "=True"] {
        let invalid = post(&supervisor, &format!("/v1/reload?dry_run{value}"), 400);
        assert!(invalid["detail"].as_str().unwrap().contains("true or false"), "{value}: {invalid}");
    }
    let ran = command(&supervisor, &["reload", "--dry-run"]);
    let expected = "old: removed; accepted jobs can still finish\n\
                    b: env, max_queue; workers are replaced one at a time\n\
                    new: added\n\
                    [supervisor]: drain_timeout\n\
                    [supervisor]: not applied: crash_keep; restart the supervisor to apply these changes\n\
                    dry run: nothing was changed\n";
    assert_eq!((ran.status.code(), &*text(&ran.stdout)), (Some(0), expected));
    assert_eq!(names(&supervisor), ["b", "old"]);
    assert_eq!(supervisor.snapshot("b")["queue_capacity"], 0);
    assert_eq!(supervisor.worker_pids("b"), before);
    assert!(supervisor.events("config_reloaded").is_empty());
    let mut real: Value =
        serde_json::from_slice(&command(&supervisor, &["--json", "reload"]).stdout).unwrap();
    assert_eq!(real["dry_run"], false);
    real["dry_run"] = json!(true);
    assert_eq!(dry, real);
    assert_eq!(names(&supervisor), ["b", "new"]);
    // The second reload lists only the change that needs a restart.
    let again = post(&supervisor, "/v1/reload", 200);
    assert_eq!((&again["ignored"], &again["bulkheads"]), (&json!(["crash_keep"]), &json!([])));
}

// Ways to reload.

#[test]
fn many_sighups_apply_the_last_file() {
    let supervisor = start(B);
    for size in 1..=50 {
        configure(&supervisor, &format!("{B}max_queue = {size}\n"));
        supervisor.signal(Signal::SIGHUP);
    }
    wait_for("the last file is in force", || {
        (supervisor.snapshot("b")["queue_capacity"] == 50).then_some(())
    });
    assert!(supervisor.events("config_rejected").is_empty());
    assert!(supervisor.events("config_reloaded").len() <= 50);
}

#[test]
fn concurrent_reloads_apply_a_change_only_once() {
    let supervisor = Arc::new(start(B));
    configure(&supervisor, &format!("{B}max_queue = 5\n"));
    let askers: Vec<_> = (0..8)
        .map(|_| {
            let supervisor = supervisor.clone();
            std::thread::spawn(move || post(&supervisor, "/v1/reload", 200))
        })
        .collect();
    let changed = askers.into_iter().map(|asker| asker.join().unwrap());
    let changed = changed.filter(|changes| changes["bulkheads"] != json!([])).count();
    assert_eq!(changed, 1, "more than one reload changed something");
}

#[test]
fn reload_follows_symbolic_link() {
    let supervisor = start(B);
    let file = std::fs::read_to_string(supervisor.file("workers.toml")).unwrap();
    std::fs::create_dir(supervisor.file("v2")).unwrap();
    std::fs::write(
        supervisor.file("v2/real.toml"),
        file.replace(B.lines().next().unwrap(), "[bulkhead.b]\nmax_queue = 6"),
    )
    .unwrap();
    symlink(supervisor.file("v2/real.toml"), supervisor.file("link")).unwrap();
    std::fs::rename(supervisor.file("link"), supervisor.file("workers.toml")).unwrap();
    let changes = post(&supervisor, "/v1/reload", 200);
    assert_eq!(changes["bulkheads"][0]["keys"], json!(["max_queue"]), "{changes}");
    assert_eq!(supervisor.snapshot("b")["queue_capacity"], 6);
}

// Access.

#[test]
fn new_access_rules_apply_to_connected_clients() {
    let own = nix::unistd::Uid::effective();
    let entry = |bulkheads: &str| format!("[[access]]\nuid = {own}\nbulkheads = [{bulkheads}]\n");
    let both = format!("{B}max_queue = 5\n[bulkhead.c]\ncommand = [\"MISBEHAVE\"]\n");
    let supervisor = start(&both);
    run(async {
        let client = connect(&supervisor).await;
        let ends = async |bulkhead: &str| outcome(&client.job(bulkhead, "").operation("echo").send().await);
        assert_eq!((ends("b").await, ends("c").await), ("ok".into(), "ok".into()));
        let jobs = holders(&client, "b", 2);
        wait_ran(&supervisor, 1);
        let changes = reload(&supervisor, &(both.clone() + &entry("\"c\"")));
        assert_eq!((&changes["access"], &changes["ignored"]), (&json!(true), &json!(["socket_mode"])));
        assert_eq!((ends("b").await, ends("c").await), ("rejected/forbidden".into(), "ok".into()));
        // The user loses all rights, but accepted jobs still get their outcomes.
        reload(&supervisor, &(both.clone() + "[[access]]\nuid = 61001\n"));
        assert_eq!(
            (ends("b").await, ends("c").await),
            ("rejected/forbidden".into(), "rejected/forbidden".into())
        );
        supervisor.touch("end");
        assert_eq!(outcomes(jobs).await, ["ok", "ok"]);
        reload(&supervisor, &both);
        assert_eq!((ends("b").await, ends("c").await), ("ok".into(), "ok".into()));
    });
}

// Confinement.

#[test]
fn reload_can_enable_confinement() {
    let with = |profile: &str| format!("{B}[bulkhead.b.sandbox]\nprofile = \"{profile}\"\n");
    let supervisor = start(&with("none"));
    let profile = || supervisor.snapshot("b")["workers"][0]["confinement"]["profile"].clone();
    assert_eq!(profile(), "none");
    let before = supervisor.worker_pids("b");
    let changes = reload(&supervisor, &with("default"));
    assert_eq!(changes["bulkheads"][0]["keys"][0], "sandbox.profile");
    let denied = supervisor.events("worker_not_started");
    if let Some(denied) = denied.first() {
        not_run!("this machine cannot confine workers: {denied}");
        return;
    }
    wait_replaced(&supervisor, "b", &before);
    assert_eq!(profile(), "default");
}

// Stopping the supervisor.

#[test]
fn shutdown_waits_for_jobs_of_removed_bulkhead() {
    let mut supervisor = start(&format!("{B}[bulkhead.gone]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 5\n"));
    run(async {
        let client = connect(&supervisor).await;
        let jobs = holders(&client, "gone", 2);
        wait_ran(&supervisor, 1);
        supervisor.wait_number("gone", "queued", 1);
        reload(&supervisor, B);
        supervisor.signal(Signal::SIGTERM);
        wait_for("the supervisor drains", || (!supervisor.events("draining").is_empty()).then_some(()));
        let (status, body) = supervisor.post("/v1/reload?dry_run=false");
        assert!(status == 200 || status == 409, "{body}");
        supervisor.touch("end");
        let ends = tally(outcomes(jobs).await).into_iter().collect::<Vec<_>>();
        assert_eq!(ends, [("ok".to_owned(), 1), ("rejected/draining".to_owned(), 1)]);
        assert!(supervisor.wait().success());
    });
}

// Many reloads under load.

/// Sends jobs until `is_over` is set, some of them to bulkheads that are added and removed by reloads. Returns the
/// outcomes.
async fn load(client: Client, bulkheads: &'static [&'static str], is_over: Arc<AtomicBool>) -> Vec<String> {
    let mut ends = Vec::new();
    let mut turn = 0;
    while !is_over.load(Ordering::SeqCst) {
        turn += 1;
        let bulkhead = bulkheads[turn % bulkheads.len()];
        ends.push(format!(
            "{bulkhead} {}",
            outcome(&client.job(bulkhead, "x").operation("echo").send().await)
        ));
    }
    ends
}

#[test]
fn a_hundred_reloads_under_load_lose_no_jobs() {
    let _turn = heavy();
    const ROUNDS: usize = 100;
    const JOBS_MIN: usize = 20_000;
    let file = |round: usize| {
        let (limits, env) = (1 + round % 4, round / 5 % 2);
        let program = ["command = [\"MISBEHAVE\"]", "exec = [\"/bin/cat\"]"][round / 10 % 2];
        let steady = format!(
            "[bulkhead.steady]\ncommand = [\"MISBEHAVE\"]\nprocesses = {}\nmax_in_flight = {limits}\n\
             max_queue = {}\nenv = {{ ROUND = \"{env}\" }}\n",
            1 + round % 2,
            100 + round
        );
        let swapped = format!("[bulkhead.swapped]\n{program}\nmax_queue = 200\n");
        let coming = match round % 3 {
            0 => "[bulkhead.comes]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 200\n",
            1 => {
                "[bulkhead.comes]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 200\ntenants = { isolate = true }\n"
            }
            _ => "",
        };
        steady + &swapped + coming
    };
    let supervisor = start(&file(0));
    let (descriptors_before, threads_before) = (descriptors(supervisor.pid()), threads(supervisor.pid()));
    let auditor = Auditor::of(&supervisor);
    run(async {
        let is_over = Arc::new(AtomicBool::new(false));
        let mut loads = Vec::new();
        for _ in 0..16 {
            let client = connect(&supervisor).await;
            loads.push(tokio::spawn(load(
                client,
                &["steady", "swapped", "comes", "steady"],
                is_over.clone(),
            )));
        }
        let done = || supervisor.number("steady", "done") as usize;
        for round in 1..=ROUNDS {
            tokio::task::block_in_place(|| reload(&supervisor, &file(round)));
            let enough = JOBS_MIN * round / ROUNDS / 2;
            tokio::task::block_in_place(|| {
                wait_for("more jobs are done", || (done() >= enough).then_some(()))
            });
        }
        is_over.store(true, Ordering::SeqCst);
        let mut ends = Vec::new();
        for load in loads {
            ends.extend(load.await.unwrap());
        }
        let seen = tally(ends.iter().map(String::as_str));
        eprintln!("{} jobs during {ROUNDS} reloads: {seen:?}", ends.len());
        assert!(ends.len() >= JOBS_MIN);
        let allowed = ["steady ok", "swapped ok", "comes ok", "comes rejected/not_found"];
        assert!(seen.keys().all(|end| allowed.contains(end)), "{seen:?}");
    });
    auditor.finish();
    assert!(supervisor.events("config_rejected").is_empty());
    // Loads the first configuration again. The other configurations must not leave descriptors or threads behind.
    reload(&supervisor, &file(0));
    wait_for("the supervisor has no more descriptors than before", || {
        (descriptors(supervisor.pid()) <= descriptors_before).then_some(())
    });
    wait_for("the supervisor has no more threads than before", || {
        (threads(supervisor.pid()) <= threads_before).then_some(())
    });
}

#[test]
fn reload_survives_keeper_death() {
    let file = |round: usize| {
        format!(
            "{B}max_queue = 500\nprocesses = 2\nenv = {{ ROUND = \"{round}\" }}\nretry = {{ attempts = 50, budget = 1.0 }}\n"
        )
    };
    let supervisor = start(&file(0));
    let auditor = Auditor::of(&supervisor);
    run(async {
        let client = connect(&supervisor).await;
        let jobs: Vec<_> =
            (0..200).map(|_| spawn(client.job("b", "20").operation("sleep").idempotent(true))).collect();
        for round in 1..=3 {
            configure(&supervisor, &file(round));
            let keeper = supervisor.keeper();
            supervisor.signal(Signal::SIGHUP);
            kill_pid(keeper, Signal::SIGKILL);
            supervisor.wait_events("config_reloaded", round);
            wait_for("the keeper has exited", || (!is_alive(keeper)).then_some(()));
        }
        let ends = tally(outcomes(jobs).await);
        let allowed = ["ok", "crashed/signal", "crashed/collateral"];
        assert!(ends.keys().all(|end| allowed.contains(&end.as_str())), "{ends:?}");
        assert_eq!(answer(&client, "b", "echo").await, "");
    });
    auditor.finish();
}
