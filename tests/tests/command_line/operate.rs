//! Operating a supervisor with the `bulkhead` command: logs, events, jobs, readiness, waiting, crash reports, and other
//! hosts.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;

use bulkhead_tests::http::Place;
use bulkhead_tests::{Supervisor, wait_for};
use serde_json::{Value, json};

use super::running::{Ran, blocker, bulkhead, fed, follow, plain, spawn, unread};

/// Two bulkheads whose workers write their payload to standard output and to standard error.
const TWO: &str = "[bulkhead.a]\ncommand = [\"MISBEHAVE\"]\n[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\n";

fn words(line: &str) -> Vec<&str> {
    line.split_ascii_whitespace().collect()
}

fn names(list: &Value) -> Vec<&str> {
    list.as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap()).collect()
}

// Logs.

/// Makes a worker write a line to standard output and to standard error, and waits until the supervisor has read both
/// lines.
fn say(supervisor: &Supervisor, bulkhead_name: &str, text: &str) {
    fed(supervisor, &["submit", bulkhead_name, "say", "--payload-file", "-"], text.as_bytes()).expect(0);
    wait_for("the output is stored", || {
        let stored = bulkhead(supervisor, &["logs", bulkhead_name, "-o", "cat"]).expect(0);
        (stored.text().lines().filter(|line| *line == text).count() == 2).then_some(())
    });
}

#[test]
fn logs_merges_bulkheads_by_time() {
    let supervisor = Supervisor::start(TWO);
    for (name, text) in [("a", "one"), ("b", "two"), ("a", "three")] {
        say(&supervisor, name, text);
    }
    let run = |arguments: &[&str]| bulkhead(&supervisor, &[&["logs"], arguments].concat()).expect(0);
    let texts =
        |arguments: &[&str]| -> Vec<String> { run(arguments).text().lines().map(str::to_owned).collect() };
    let stderr = ["--stream", "stderr", "-o", "cat"];
    assert_eq!(texts(&stderr), ["one", "two", "three"]);
    assert_eq!(texts(&[&["b", "a"], &stderr[..]].concat()), ["one", "two", "three"]);
    assert_eq!(texts(&[&["a", "a"], &stderr[..]].concat()), ["one", "three"]);
    assert_eq!(texts(&["-o", "cat", "-n", "2"]), ["three", "three"]);
    assert_eq!(texts(&[&["-n", "2"], &stderr[..]].concat()), ["two", "three"]);
    assert_eq!(texts(&["-n", "0"]), [""; 0]);

    let objects = run(&["--json"]).objects();
    assert_eq!(objects.len(), 6);
    let (first, last) = (&objects[0], &objects[5]);
    let pid = supervisor.worker_pids("a")[0];
    assert_eq!((&first["bulkhead"], &first["seq"], &first["pid"]), (&"a".into(), &1.into(), &pid.into()));
    let (first, last) = (first["at"].as_str().unwrap(), last["at"].as_str().unwrap());
    let line = texts(&["a", "--stream", "stdout"]).remove(0);
    assert!(line.ends_with(&format!("Z a[{pid}] stdout: one")), "{line}");
    assert!(line.starts_with("20") && line.find(' ') == Some("2026-11-21T14:07:35.201Z".len()), "{line}");

    assert_eq!(texts(&["--since", "1h"]).len(), 6);
    assert_eq!(texts(&["--since", "-1h"]).len(), 6);
    assert!(texts(&["--until", "1h"]).is_empty());
    assert!(texts(&["--since", last, "-o", "cat"]).iter().all(|text| text == "three"));
    assert!(texts(&["--until", first, "-o", "cat"]).iter().all(|text| text == "one"));
    bulkhead(&supervisor, &["logs", "a", "nobody"]).expect(66);
}

#[test]
fn followed_logs_neither_repeat_nor_lose_lines() {
    let supervisor = Supervisor::start(TWO);
    say(&supervisor, "a", "old");
    say(&supervisor, "b", "last");
    let arguments = ["logs", "-f", "-n", "1", "-o", "cat", "--stream", "stderr"];
    let following = follow(supervisor.command().args(arguments));
    assert_eq!(following.lines.recv_timeout(bulkhead_tests::PATIENCE).unwrap(), "last");
    // The follower may not be connected yet, but must get these lines in any case.
    for text in ["new a", "newer a"] {
        say(&supervisor, "a", text);
    }
    say(&supervisor, "b", "new b");
    let mut seen: Vec<String> = (0..3).map(|_| following.line_with("")).collect();
    seen.sort();
    assert_eq!(seen, ["new a", "new b", "newer a"]);
    assert!(following.lines.try_recv().is_err());
    assert_eq!(following.interrupt(), Some(130));
}

// Events.

#[test]
fn followed_logs_have_a_limit_on_bulkheads() {
    let names: Vec<String> = (0..65).map(|number| format!("b{number}")).collect();
    let mut named = plain(&["--admin", "/nonexistent", "logs", "-f"]);
    let named = spawn(named.args(&names)).end().expect(2);
    assert!(named.stderr.contains("at most 64"), "{}", named.stderr);
    let bulkheads: Vec<Value> = names.iter().map(|name| json!({ "name": name })).collect();
    let all = StandIn::new()
        .serve(&["logs", "-f"], &[("GET /v1/bulkheads ", 200, json!({ "bulkheads": bulkheads }))]);
    assert!(all.expect(2).stderr.contains("at most 64"));
}

#[test]
fn events_are_filtered_by_kind_severity_and_time() {
    let supervisor = Supervisor::start(TWO);
    for name in ["a", "b"] {
        bulkhead(&supervisor, &["submit", name, "abort"]).expect(70);
        supervisor.wait_number(name, "limit", 1);
    }
    bulkhead(&supervisor, &["drain", "a"]).expect(0);
    let run = |arguments: &[&str]| {
        bulkhead(&supervisor, &[&["events", "--json"], arguments].concat()).expect(0).objects()
    };
    let all = run(&[]);
    assert!(all.len() > 8, "{all:?}");
    let crashed = run(&["--kind", "job_crashed,draining"]);
    let kind = |event: &Value, field: &str| event[field].as_str().unwrap().to_owned();
    let kinds: Vec<_> = crashed.iter().map(|event| (kind(event, "kind"), kind(event, "bulkhead"))).collect();
    let kinds: Vec<_> = kinds.iter().map(|(kind, name)| (kind.as_str(), name.as_str())).collect();
    assert_eq!(kinds, [("job_crashed", "a"), ("job_crashed", "b"), ("draining", "a")]);
    let severe = run(&["--severity", "warning"]);
    assert!(!severe.is_empty() && severe.iter().all(|event| event["severity"] != "info"), "{severe:?}");
    assert!(run(&["--severity", "critical"]).is_empty());
    let of_b = run(&["--bulkhead", "b"]);
    assert!(!of_b.is_empty() && of_b.iter().all(|event| event["bulkhead"] == "b"), "{of_b:?}");
    // Further events can follow, for example after a pause of the supervisor on a busy machine.
    let newest = run(&["-n", "1"]);
    assert_eq!(newest.len(), 1, "{newest:?}");
    assert!(newest[0]["seq"].as_u64() >= all.last().unwrap()["seq"].as_u64(), "{newest:?}");
    assert_eq!(run(&["-n", "1", "--kind", "job_crashed"]), [crashed[1].clone()]);
    let at = crashed[2]["at"].as_str().unwrap();
    assert!(run(&["--since", at]).contains(&crashed[2]));
    assert!(run(&["--since", at]).len() < all.len());
    bulkhead(&supervisor, &["events", "--bulkhead", "nobody"]).expect(66);

    let arguments = ["events", "-f", "-n", "1", "--kind", "draining,resumed"];
    let following = follow(supervisor.command().args(arguments));
    following.line_with("draining a");
    bulkhead(&supervisor, &["resume", "a"]).expect(0);
    assert!(following.line_with("").contains("resumed a"));
    assert_eq!(following.interrupt(), Some(130));
}

// Status and readiness.

const BROKEN: &str =
    "[bulkhead.broken]\ncommand = [\"MISBEHAVE\", \"exit-at-start\"]\nrestart = { policy = \"never\" }\n";

#[test]
fn status_selects_and_sorts_bulkheads() {
    let supervisor = Supervisor::start(&format!(
        "[bulkhead.a]\ncommand = [\"MISBEHAVE\"]\nmax_payload = 4\n\
         [bulkhead.busy]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 3\ndeadline = \"300s\"\n{BROKEN}"
    ));
    wait_for("the worker has failed", || (supervisor.snapshot("broken")["state"] == "failed").then_some(()));
    fed(&supervisor, &["submit", "a", "", "--payload-file", "-"], b"too large").expect(65);
    let running = blocker(&supervisor, &["submit", "busy", "hang"]);
    let queued = spawn(supervisor.command().args(["submit", "busy", "-n"]));
    supervisor.wait_number("busy", "queued", 1);
    let shown = |arguments: &[&str]| -> Vec<String> {
        let ran = bulkhead(&supervisor, &[&["status"], arguments].concat()).expect(0);
        let rows = ran.text().lines().skip(1).take_while(|line| !line.is_empty());
        rows.map(|row| words(row)[0].to_owned()).collect()
    };
    assert_eq!(shown(&[]), ["broken", "a", "busy"]);
    assert_eq!(shown(&["--sort", "trouble"]), ["broken", "a", "busy"]);
    assert_eq!(shown(&["--sort", "name"]), ["a", "broken", "busy"]);
    assert_eq!(shown(&["--sort", "queue"]), ["busy", "a", "broken"]);
    assert_eq!(shown(&["--sort", "rejected"]), ["a", "broken", "busy"]);
    assert_eq!(shown(&["--failed"]), ["broken"]);
    let json = |arguments: &[&str]| {
        bulkhead(&supervisor, &[&["status", "--json"], arguments].concat()).expect(0).object()
    };
    assert_eq!(names(&json(&["--failed"])["bulkheads"]), ["broken"]);
    assert_eq!(names(&json(&["--sort", "queue"])["bulkheads"]), ["busy", "a", "broken"]);
    assert_eq!(json(&["--failed"])["bulkheads"][0]["state"], "failed");
    drop((queued, running));
    bulkhead(&supervisor, &["drain", "busy"]).expect(0);
}

#[test]
fn is_ready_reports_and_waits_for_readiness() {
    let supervisor = Supervisor::start(&format!("[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\n{BROKEN}"));
    wait_for("the worker has failed", || (supervisor.snapshot("broken")["state"] == "failed").then_some(()));
    let all = bulkhead(&supervisor, &["is-ready"]).expect(0);
    let lines: Vec<&str> = all.text().lines().collect();
    assert_eq!(lines[0], "ready");
    assert!(lines[1].starts_with("broken: failed: the worker did not start"), "{lines:?}");
    assert_eq!(bulkhead(&supervisor, &["is-ready", "b"]).expect(0).text(), "ready\n");
    let broken = bulkhead(&supervisor, &["is-ready", "broken", "--json"]).expect(3).object();
    assert_eq!((&broken["status"], &broken["degraded"][0]["name"]), (&"failed".into(), &"broken".into()));
    for more in [&["is-ready", "broken"] as &[&str], &["is-ready", "broken", "--json"]] {
        unread(supervisor.command().args(more)).expect(3);
    }
    // The exit code is 69 if the supervisor takes several seconds to respond.
    wait_for("the command waits without success", || {
        (bulkhead(&supervisor, &["is-ready", "broken", "--wait", "150ms"]).code == Some(3)).then_some(())
    });
    bulkhead(&supervisor, &["is-ready", "nobody", "--wait", "60s"]).expect(66);
    bulkhead(&supervisor, &["drain", "b"]).expect(0);
    let waiting = spawn(supervisor.command().args(["is-ready", "b", "--wait", "60s"]));
    bulkhead(&supervisor, &["resume", "b"]).expect(0);
    waiting.end().expect(0);
}

#[test]
fn is_ready_does_not_wait_for_a_silent_supervisor() {
    let folder = tempfile::tempdir().unwrap();
    let admin = folder.path().join("admin.sock");
    let _listener = UnixListener::bind(&admin).unwrap();
    let arguments = ["--admin", admin.to_str().unwrap(), "is-ready", "--wait", "50ms"];
    let told = spawn(&mut plain(&arguments)).end().expect(69);
    assert!(told.stderr.contains("did not respond in time"), "{}", told.stderr);
}

#[test]
fn is_ready_waits_for_the_supervisor_to_start() {
    let folder = tempfile::tempdir().unwrap();
    let admin = folder.path().join("admin.sock");
    let arguments = ["--admin", admin.to_str().unwrap(), "is-ready", "--wait", "60s"];
    let waiting = spawn(&mut plain(&arguments));
    spawn(&mut plain(&["--admin", admin.to_str().unwrap(), "is-ready"])).end().expect(69);
    spawn(&mut plain(&["--admin", admin.to_str().unwrap(), "is-ready", "--wait", "50ms"])).end().expect(69);
    let _supervisor = Supervisor::launch(folder, "", "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\n");
    // A bulkhead whose workers have not reported yet follows on a separate line.
    let ended = waiting.end().expect(0);
    assert!(ended.text().starts_with("ready\n"), "{}", ended.text());
}

// Jobs.

#[test]
fn jobs_are_listed_and_cancelled_one_by_one() {
    let supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 5\nlookahead = \"0s\"\ndeadline = \"300s\"\n\
         [bulkhead.idle]\ncommand = [\"MISBEHAVE\"]\n",
    );
    let running = blocker(&supervisor, &["submit", "b", "yield", "--json", "--tenant", "acme"]);
    let queue = ["submit", "b", "echo", "--json", "--priority", "critical", "--payload-file", "-"];
    let mut queued = spawn(supervisor.command().args(queue));
    queued.stdin.take().unwrap().write_all(b"12345").unwrap();
    supervisor.wait_number("b", "queued", 1);

    let listed = bulkhead(&supervisor, &["jobs", "--json"]).expect(0).object();
    assert_eq!(listed["total"], 2, "{listed}");
    let (first, second) = (&listed["jobs"][0], &listed["jobs"][1]);
    for (field, value) in [
        ("bulkhead", Value::from("b")),
        ("state", "running".into()),
        ("priority", "normal".into()),
        ("tenant", "acme".into()),
        ("operation", "yield".into()),
        ("client", format!("pid:{}", running.child.id()).into()),
        ("worker_pid", supervisor.worker_pids("b")[0].into()),
        ("attempts", 1.into()),
        ("payload_bytes", 0.into()),
    ] {
        assert_eq!(first[field], value, "{field}: {first}");
    }
    for (field, value) in [
        ("state", Value::from("queued")),
        ("priority", "critical".into()),
        ("tenant", "".into()),
        ("ran_ms", Value::Null),
        ("worker_pid", Value::Null),
        ("attempts", 0.into()),
        ("payload_bytes", 5.into()),
    ] {
        assert_eq!(second[field], value, "{field}: {second}");
    }
    let ms = |job: &Value, field: &str| job[field].as_f64().unwrap();
    assert!(ms(first, "age_ms") >= ms(second, "age_ms") && ms(first, "ran_ms") <= ms(first, "age_ms"));
    assert!((0.0..=300_000.0).contains(&ms(first, "left_ms")), "{first}");

    let text = bulkhead(&supervisor, &["jobs", "b"]).expect(0);
    let lines: Vec<Vec<&str>> = text.text().lines().map(words).collect();
    let head = "JOB BULKHEAD STATE AGE RAN LEFT PRIORITY TENANT OPERATION CLIENT WORKER ATTEMPT BYTES";
    assert_eq!(lines[0], words(head));
    assert_eq!((lines.len(), lines[1].len(), lines[2].len()), (3, 13, 13), "{lines:?}");
    assert_eq!((lines[2][2], lines[2][4], lines[2][12]), ("queued", "-", "5"));
    let count = |arguments: &[&str]| {
        bulkhead(&supervisor, &[&["jobs"], arguments].concat()).expect(0).text().lines().count() - 1
    };
    assert_eq!(
        (count(&["--state", "queued"]), count(&["--state", "prefetched"]), count(&["idle"])),
        (1, 0, 0)
    );
    let short = bulkhead(&supervisor, &["jobs", "-n", "1"]).expect(0);
    assert!(short.stderr.contains("1 newer jobs"), "{}", short.stderr);
    bulkhead(&supervisor, &["jobs", "nobody"]).expect(66);

    let told = bulkhead(&supervisor, &["cancel", "idle", first["job"].as_str().unwrap()]).expect(66);
    assert!(told.stderr.contains("in bulkhead `b`"), "{}", told.stderr);
    // The running job holds the only permit, so the queued job cannot begin before it is cancelled.
    let cancel =
        |job: &Value| bulkhead(&supervisor, &["cancel", "b", job["job"].as_str().unwrap(), "--json"]);
    let told = cancel(second).expect(0).object();
    assert_eq!(
        (&told["done"], &told["bulkhead"], &told["job"]),
        (&"cancel".into(), &"b".into(), &second["job"])
    );
    let outcome = queued.end().expect(130).object();
    assert_eq!((&outcome["outcome"], &outcome["executed"]), (&"cancelled".into(), &"no".into()));
    assert_eq!(outcome["job"], second["job"]);
    cancel(first).expect(0);
    let outcome = running.end().expect(130).object();
    assert_eq!((&outcome["outcome"], &outcome["executed"]), (&"cancelled".into(), &"yes".into()));
    for gone in [first, second] {
        let told = cancel(gone).expect(66);
        assert!(told.stderr.contains("no such job"), "{}", told.stderr);
    }
    bulkhead(&supervisor, &["cancel", "nobody", "1"]).expect(66);
    let events = supervisor.wait_events("job_cancelled", 2);
    assert_eq!((&events[0]["job"], &events[0]["state"]), (&second["job"], &"queued".into()));
    assert_eq!((&events[1]["tenant"], &events[1]["state"]), (&"acme".into(), &"running".into()));
    supervisor.wait_number("b", "cancelled", 2);
    supervisor.wait_number("b", "available", 1);
}

// Waiting.

#[test]
fn drain_waits_until_no_jobs_are_left() {
    let supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\ndeadline = \"300s\"\n[bulkhead.idle]\ncommand = [\"MISBEHAVE\"]\n",
    );
    assert!(bulkhead(&supervisor, &["drain", "idle", "--wait=60s"]).expect(0).text().contains("drained"));
    let running = blocker(&supervisor, &["submit", "b", "yield"]);
    // The exit code is 69 if the supervisor takes several seconds to respond.
    let late = wait_for("the command waits without success", || {
        Some(bulkhead(&supervisor, &["drain", "b", "--wait=50ms", "--json"]))
            .filter(|ran| ran.code == Some(124))
    });
    assert!(late.object()["message"].as_str().unwrap().contains("jobs left: 1"), "{}", late.stderr);
    let waiting = spawn(supervisor.command().args(["drain", "--all", "--wait", "--json"]));
    let job = bulkhead(&supervisor, &["jobs", "--json"]).expect(0).object()["jobs"][0]["job"].clone();
    bulkhead(&supervisor, &["cancel", "b", job.as_str().unwrap()]).expect(0);
    running.end().expect(130);
    let done = waiting.end().expect(0).objects();
    let done: Vec<_> = done.iter().map(|one| (&one["bulkhead"], &one["done"])).collect();
    assert_eq!(done, [(&"b".into(), &"drain".into()), (&"idle".into(), &"drain".into())]);

    bulkhead(&supervisor, &["resume", "b"]).expect(0);
    let running = blocker(&supervisor, &["submit", "b", "yield"]);
    let waiting = spawn(supervisor.command().args(["drain", "b", "--wait"]));
    wait_for("the bulkhead drains", || (supervisor.snapshot("b")["state"] == "draining").then_some(()));
    bulkhead(&supervisor, &["resume", "b"]).expect(0);
    assert!(waiting.end().expect(1).stderr.contains("resumed"));
    drop(running);
}

#[test]
fn drain_all_skips_bulkheads_that_are_removed() {
    let list =
        ("GET /v1/bulkheads ", 200, json!({"bulkheads": [{"name": "a"}, {"name": "b"}, {"name": "c"}]}));
    let drained = |name: &str| json!({"bulkhead": name, "done": "drain"});
    let gone = || (404, json!({"detail": "there is no such bulkhead"}));
    let draining = || json!({"state": "draining"});
    let stand_in = StandIn::new();
    let told = stand_in.serve(
        &["drain", "--all", "--wait"],
        &[
            list.clone(),
            ("POST /v1/bulkheads/a/drain ", 200, drained("a")),
            ("POST /v1/bulkheads/b/drain ", gone().0, gone().1),
            ("POST /v1/bulkheads/c/drain ", 200, drained("c")),
            ("GET /v1/bulkheads/a ", gone().0, gone().1),
            ("GET /v1/bulkheads/c ", 200, draining()),
        ],
    );
    let told = told.expect(0);
    assert_eq!(told.text().lines().count(), 1, "{}", told.text());
    assert!(told.text().starts_with("c: drained"), "{}", told.text());

    // Bulkheads that have been drained are printed even if another one fails.
    let refused = || (409, json!({"detail": "an upgrade is in progress"}));
    let told = stand_in.serve(
        &["drain", "--all", "--wait"],
        &[
            list.clone(),
            ("POST /v1/bulkheads/a/drain ", 200, drained("a")),
            ("POST /v1/bulkheads/b/drain ", refused().0, refused().1),
        ],
    );
    let told = told.expect(75);
    assert_eq!(told.text().lines().count(), 1, "{}", told.text());
    assert!(told.text().starts_with("a: new and queued jobs are rejected"), "{}", told.text());
    assert!(told.stderr.contains("an upgrade is in progress"), "{}", told.stderr);
    let told = stand_in.serve(
        &["drain", "--all", "--wait", "--json"],
        &[
            list,
            ("POST /v1/bulkheads/a/drain ", 200, drained("a")),
            ("POST /v1/bulkheads/b/drain ", 200, drained("b")),
            ("POST /v1/bulkheads/c/drain ", 200, drained("c")),
            ("GET /v1/bulkheads/a ", 200, json!({"state": "ready"})),
        ],
    );
    let told = told.expect(1).objects();
    assert_eq!(told[..2], [drained("b"), drained("c")]);
    assert!(told[2]["message"].as_str().unwrap().contains("a: the bulkhead was resumed"), "{told:?}");

    let named = stand_in.serve(&["drain", "b"], &[("POST /v1/bulkheads/b/drain ", gone().0, gone().1)]);
    named.expect(66);
}

#[test]
fn restart_waits_until_all_workers_are_replaced() {
    let supervisor = Supervisor::start(&breakable("processes = 3\nstart = { handshake = \"60s\" }\n"));
    supervisor.wait_number("b", "limit", 3);
    let before = supervisor.worker_pids("b");
    bulkhead(&supervisor, &["restart", "b", "--wait"]).expect(0);
    let after = supervisor.worker_pids("b");
    assert!(after.len() == 3 && after.iter().all(|pid| !before.contains(pid)), "{before:?} {after:?}");
    supervisor.touch("hangs");
    let late = bulkhead(&supervisor, &["restart", "b", "--wait=200ms"]).expect(124);
    assert!(late.stderr.contains("old workers left: 3"), "{}", late.stderr);
    bulkhead(&supervisor, &["submit", "b"]).expect(0);
    bulkhead(&supervisor, &["restart", "nobody", "--wait"]).expect(66);
}

/// Returns the configuration of a bulkhead whose new workers exit if the file `fails` exists, and hang if the file
/// `hangs` exists.
fn breakable(keys: &str) -> String {
    let script = "test -e fails && exit 3; test -e hangs && exec 'MISBEHAVE' hang-at-start; exec 'MISBEHAVE'";
    format!(
        "[bulkhead.b]\ncommand = [\"sh\", \"-c\", \"{script}\"]\ncwd = \".\"\n\
         env = {{ PATH = \"/usr/bin:/bin\" }}\n{keys}"
    )
}

#[test]
fn restart_fails_if_a_replacement_does_not_start() {
    for tenants in ["", "tenants = { isolate = true }\n"] {
        let supervisor = Supervisor::start(&breakable(&format!("processes = 2\n{tenants}")));
        bulkhead(&supervisor, &["submit", "b", "--tenant", "acme"]).expect(0);
        supervisor.wait_number("b", "limit", 2);
        let before = supervisor.worker_pids("b");
        supervisor.touch("fails");
        let failed = bulkhead(&supervisor, &["restart", "b", "--wait"]).expect(1);
        let message = &failed.stderr;
        assert!(message.contains("status 3; the old workers continue to serve"), "{message}");
        let cause = supervisor.snapshot("b")["restart_failure"].clone();
        assert!(cause.as_str().is_some_and(|cause| cause.contains("status 3")), "{cause}");
        let event = &supervisor.wait_events("replacement_failed", 1)[0];
        assert_eq!((&event["message"], &event["serves_on"]), (&cause, &true.into()));
        assert!(event.get("again_in_ms").is_none(), "there is no further attempt: {event}");
        bulkhead(&supervisor, &["submit", "b", "--tenant", "acme"]).expect(0);
        assert_eq!(supervisor.worker_pids("b"), before);
        std::fs::remove_file(supervisor.file("fails")).unwrap();
        bulkhead(&supervisor, &["restart", "b", "--wait"]).expect(0);
        assert!(supervisor.snapshot("b").get("restart_failure").is_none());
    }
}

// Crash reports.

#[test]
fn crash_reports_are_selected_by_prefix_and_cause() {
    let supervisor = Supervisor::start(TWO);
    assert!(bulkhead(&supervisor, &["crashes", "last"]).expect(66).stderr.contains("no crash reports"));
    for (name, operation) in [("a", "abort"), ("b", "segv"), ("a", "exit")] {
        let crash = ["submit", name, operation, "--payload-file", "-"];
        fed(&supervisor, &crash, b"3").expect(70);
        supervisor.wait_number(name, "limit", 1);
    }
    let json = |arguments: &[&str]| {
        bulkhead(&supervisor, &[&["crashes", "--json"], arguments].concat()).expect(0).object()
    };
    let reports = wait_for("there are three reports", || {
        let reports = json(&[])["crashes"].as_array().unwrap().clone();
        (reports.len() == 3).then_some(reports)
    });
    let ids: Vec<&str> = reports.iter().map(|report| report["id"].as_str().unwrap()).collect();
    assert_eq!(json(&["last"])["id"], ids[2]);
    let is_unique = |prefix: &str| ids.iter().filter(|id| id.starts_with(prefix)).count() == 1;
    let unique = (1..ids[0].len()).map(|end| &ids[0][..end]).find(|prefix| is_unique(prefix)).unwrap();
    assert_eq!(json(&[unique])["id"], ids[0]);
    assert!(bulkhead(&supervisor, &["crashes", unique]).expect(0).text().contains("SIGABRT"));
    let common = &unique[..unique.len() - 1];
    let told = bulkhead(&supervisor, &["crashes", common]).expect(2);
    assert!(
        ids.iter().filter(|id| id.starts_with(common)).all(|id| told.stderr.contains(id)),
        "{}",
        told.stderr
    );
    let odd = supervisor.folder.path().join(OsStr::from_bytes(b"odd\xff"));
    let mut save = supervisor.command();
    let saved =
        spawn(save.args(["crashes", "last", "--json", "--output"]).arg(&odd)).end().expect(0).object();
    assert_eq!((&saved["payload_bytes"], std::fs::read(&odd).unwrap().as_slice()), (&1.into(), &b"3"[..]));
    bulkhead(&supervisor, &["replay", common]).expect(2);
    bulkhead(&supervisor, &["crashes", "nonsense"]).expect(66);
    bulkhead(&supervisor, &["crashes", ""]).expect(66);
    let replayed = bulkhead(&supervisor, &["replay", "last", "--json"]).expect(0).object();
    assert_eq!((&replayed["id"], &replayed["verdict"]), (&ids[2].into(), &"same".into()));

    let listed = |arguments: &[&str]| -> Vec<String> {
        let list = json(arguments)["crashes"].as_array().unwrap().clone();
        list.iter().map(|report| report["id"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(listed(&["--cause", "sigsegv"]), [ids[1]]);
    assert_eq!(listed(&["--cause", "signal"]), ids[..2]);
    assert_eq!(listed(&["--cause", "exit:3"]), [ids[2]]);
    assert!(listed(&["--cause", "exit:4"]).is_empty());
    assert_eq!(listed(&["--cause", "exit", "--bulkhead", "a"]), [ids[2]]);
    assert_eq!(listed(&["--limit", "2"]), ids[1..]);
    assert_eq!(listed(&["--cause", "signal", "--limit", "1"]), [ids[1]]);
    assert_eq!(listed(&["--since", "1h"]), ids);
    assert!(listed(&["--since", "0s"]).is_empty());
    let last = reports[2]["at"].as_str().unwrap();
    assert!(listed(&["--since", last]).contains(&ids[2].to_owned()));
    let table = bulkhead(&supervisor, &["crashes", "--cause", "SIGSEGV"]).expect(0);
    assert_eq!(table.text().lines().count(), 2, "{}", table.text());
}

// Other hosts.

/// Waits for a request and sends a response. Returns the first line of the request.
fn respond(listener: &TcpListener, status: &str, body: &str) -> String {
    let (mut stream, _) = wait_for("the command connects", || listener.accept().ok());
    stream.set_read_timeout(Some(bulkhead_tests::PATIENCE)).unwrap();
    let head = BufReader::new(&stream).lines().map_while(Result::ok);
    let head: Vec<String> = head.take_while(|line| !line.is_empty()).collect();
    assert!(head.len() > 1, "{head:?}");
    let length = body.len();
    let head_sent = format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n");
    stream.write_all(format!("{head_sent}{body}").as_bytes()).unwrap();
    head[0].clone()
}

/// A fake admin API that sends prepared responses. Used to test states that last only a moment in a real supervisor.
struct StandIn(TcpListener);

impl StandIn {
    fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        Self(listener)
    }

    fn host(&self) -> String {
        format!("http://{}", self.0.local_addr().unwrap())
    }

    /// Runs a command against the fake API. Each element of `responses` contains the expected beginning of a request,
    /// and the status and body to send in response.
    fn serve(&self, arguments: &[&str], responses: &[(&str, u16, Value)]) -> Ran {
        let running = spawn(&mut plain(&[&["--host", &self.host()], arguments].concat()));
        for (expected, status, body) in responses {
            let request = respond(&self.0, &format!("{status} Prepared"), &body.to_string());
            assert!(request.starts_with(expected), "{request} instead of {expected}");
        }
        running.end()
    }
}

#[test]
fn response_from_another_program_is_an_error() {
    const ID: &str = "20261128T002643449-0001";
    let StandIn(listener) = StandIn::new();
    let host = format!("http://{}", listener.local_addr().unwrap());
    for (arguments, status, part) in [
        (&["status"][..], "502 Bad Gateway", "check that this address belongs to a supervisor"),
        (&["jobs"][..], "302 Found", "check that this address belongs to a supervisor"),
        (&["status"][..], "200 OK", "failed to parse"),
        (&["logs", "b"][..], "200 OK", "failed to parse"),
        (&["events"][..], "200 OK", "failed to parse"),
    ] {
        let running = spawn(&mut plain(&[&["--host", &host], arguments].concat()));
        respond(&listener, status, "<html>\n");
        let told = running.end().expect(1);
        assert!(told.stderr.contains(part), "{arguments:?}: {}", told.stderr);
    }
    for arguments in [
        &["status"][..],
        &["status", "b"],
        &["top", "--once"],
        &["jobs"],
        &["advise"],
        &["advise", "b"],
        &["events"],
        &["logs"],
        &["logs", "b"],
        &["logs", "b", "--follow"],
        &["crashes"],
        &["crashes", "last"],
        &["crashes", ID],
        &["replay", ID],
        &["drain", "--all"],
        &["restart", "b", "--wait=1s"],
        &["reload"],
        &["is-ready"],
    ] {
        for format in [&[][..], &["--json"]] {
            for body in ["[[]]", "[]", "null", "3", "\"x\""] {
                let running = spawn(&mut plain(&[&["--host", &host], format, arguments].concat()));
                respond(&listener, "200 OK", body);
                let told = running.end().expect(1);
                assert!(told.stderr.contains("failed to parse"), "{arguments:?}: {}", told.stderr);
            }
        }
    }
    for arguments in [
        &["drain", "b"][..],
        &["resume", "b"],
        &["restart", "b"],
        &["reset", "b"],
        &["resize", "b", "--max-queue", "3"],
        &["cancel", "b", "1"],
        &["reload"],
        &["is-ready"],
    ] {
        for format in [&[][..], &["--json"]] {
            let running = spawn(&mut plain(&[&["--host", &host], format, arguments].concat()));
            respond(&listener, "200 OK", "<html>\n");
            let told = running.end().expect(1);
            assert!(told.stderr.contains("failed to parse"), "{arguments:?}: {}", told.stderr);
            assert!(!told.text().contains("html"), "{arguments:?}: {}", told.text());
        }
    }
}

const TOKEN: &str = "a-token-of-the-tests";

fn write_token(folder: &Path, name: &str, token: &str) {
    let path = folder.join(name);
    std::fs::write(&path, format!("{token}\n")).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
}

#[test]
fn commands_reach_a_supervisor_over_tcp() {
    let folder = tempfile::tempdir().unwrap();
    for (name, token) in [("token", TOKEN), ("read", "a-reading-token-of-the-tests")] {
        write_token(folder.path(), name, token);
    }
    let supervisor = Supervisor::launch(
        folder,
        "http = \"127.0.0.1:0\"\nhttp_token_file = \"token\"",
        "[[access]]\ntoken_file = \"read\"\nrole = \"read\"\n[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\n",
    )
    .until_ready();
    let Place::Tcp(address) = Place::tcp(&supervisor) else { panic!("no address") };
    let host = format!("http://{address}");
    let file = |name: &str| supervisor.folder.path().join(name).to_str().unwrap().to_owned();
    let run = |arguments: &[&str]| -> Ran {
        spawn(&mut plain(&[&["--host", &host, "--token-file", &file("token")], arguments].concat())).end()
    };
    for arguments in [
        &["status"][..],
        &["status", "b"],
        &["top", "--once"],
        &["events", "-n", "1"],
        &["logs"],
        &["jobs"],
        &["is-ready"],
        &["restart", "b", "--wait=60s"],
        &["drain", "b", "--wait"],
        &["resume", "b"],
        &["reset", "b"],
        &["resize", "b", "--max-queue", "3"],
        &["advise"],
        &["reload", "--dry-run"],
        &["crashes"],
    ] {
        run(arguments).expect(0);
    }
    assert_eq!(supervisor.snapshot("b")["queue_capacity"], 3);
    let variables = |command: &mut Command| spawn(command.env("BULKHEAD_HOST", &host)).end();
    variables(plain(&["status"]).env("BULKHEAD_TOKEN_FILE", file("token"))).expect(0);
    // Sockets named on the command line take precedence over the variable.
    variables(&mut plain(&["status", "--admin", &file("admin.sock")])).expect(0);
    variables(&mut plain(&["submit", "b", "-n", "--socket", &file("jobs.sock")])).expect(0);
    variables(plain(&["submit", "b", "-n"]).env("BULKHEAD_SOCKET", file("jobs.sock"))).expect(0);
    let told = variables(&mut plain(&["submit", "b", "-n"])).expect(2);
    assert!(told.stderr.contains("--socket"), "{}", told.stderr);

    // Only health checks need no token.
    variables(&mut plain(&["is-ready"])).expect(0);
    let told = variables(&mut plain(&["status"])).expect(77);
    assert!(told.stderr.contains("--token-file") && told.stderr.contains(&host), "{}", told.stderr);
    write_token(supervisor.folder.path(), "wrong", "another-token-of-the-tests");
    write_token(supervisor.folder.path(), "odd", "not a token");
    let with = |token: &str, arguments: &[&str]| {
        let host = ["--host", &host, "--token-file", &file(token)];
        spawn(&mut plain(&[&host[..], arguments].concat())).end()
    };
    assert!(with("wrong", &["status"]).expect(77).stderr.contains("does not accept"));
    assert!(with("odd", &["status"]).expect(2).stderr.contains("nothing else"));
    let endless = ["--host", &host, "--token-file", "/dev/zero", "status"];
    assert!(spawn(&mut plain(&endless)).end().expect(2).stderr.contains("nothing else"));
    // A read-only token.
    for arguments in [&["status"][..], &["jobs"], &["events"], &["logs", "b"], &["crashes"]] {
        with("read", arguments).expect(0);
    }
    for arguments in
        [&["drain", "b"][..], &["cancel", "b", "1000001"], &["restart", "b", "--wait"], &["reload"]]
    {
        let told = with("read", arguments).expect(77);
        assert!(told.stderr.contains("can only read"), "{}", told.stderr);
    }
    assert_eq!(supervisor.snapshot("b")["state"], "ready");
    // Nothing listens on this port after the supervisor has exited.
    drop(supervisor);
    let told = spawn(&mut plain(&["--host", &host, "status", "--json"])).end().expect(69);
    assert_eq!(told.object()["outcome"], "unreachable");
    assert!(told.stderr.contains(&host), "{}", told.stderr);
}
