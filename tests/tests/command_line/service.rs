//! Bulkheads whose workers are ready but whose jobs fail. The tests check the service state in `status`, `top`,
//! snapshots and metrics.

use bulkhead_client::JobError;
use bulkhead_client::blocking::Client;
use bulkhead_tests::{Supervisor, wait_for};
use serde_json::json;
use std::time::Duration;

const BULKHEADS: &str = r#"
[bulkhead.callers]
exec = ["sh", "-c", "exit 64"]
max_queue = 100
env = { PATH = "/usr/bin:/bin" }
[bulkhead.fails]
exec = ["sh", "-c", "exit 3"]
max_queue = 100
env = { PATH = "/usr/bin:/bin" }
[bulkhead.idle]
command = ["MISBEHAVE"]
[bulkhead.late]
command = ["MISBEHAVE"]
max_in_flight = 12
grace = "30s"
[bulkhead.mixed]
command = ["MISBEHAVE"]
"#;

fn jobs(client: &Client, bulkhead: &str, operation: &str, count: usize) {
    for _ in 0..count {
        let _: Result<_, JobError> = client.job(bulkhead, "").operation(operation).send();
    }
}

/// Sends several jobs at once, all of which miss their deadline. The deadline is long enough for a slow machine to
/// begin the jobs.
fn late(client: &Client, bulkhead: &str) {
    let job = client.job(bulkhead, "").operation("yield").deadline(Duration::from_secs(2));
    let jobs: Vec<_> = (0..12).map(|_| job.clone().start().unwrap()).collect();
    for job in jobs {
        assert!(matches!(job.wait(), Err(JobError::DeadlineExceeded(_))));
    }
}

fn stdout(supervisor: &Supervisor, arguments: &[&str]) -> String {
    let output = bulkhead_tests::output(supervisor.command().args(arguments));
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn failing_jobs_change_service_state_of_ready_bulkhead() {
    let supervisor = Supervisor::start(BULKHEADS);
    let client = Client::connect(supervisor.socket()).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| late(&client, "late"));
        scope.spawn(|| jobs(&client, "callers", "", 12));
        scope.spawn(|| jobs(&client, "fails", "", 12));
        jobs(&client, "mixed", "echo", 18);
        jobs(&client, "mixed", "abort", 2);
    });
    let service = |name: &str| {
        let told = supervisor.snapshot(name);
        (told["service"].clone(), told["service_cause"].clone())
    };
    let cause = |text: &str| json!(format!("{text} jobs in the last minute"));
    assert_eq!(service("late"), (json!("failing"), cause("deadline_exceeded/running: 12 of 12")));
    assert_eq!(service("fails"), (json!("failing"), cause("failed/exit_3: 12 of 12")));
    assert_eq!(service("mixed"), (json!("degraded"), cause("crashed/signal: 2 of 20")));
    assert_eq!(service("callers"), (json!("ok"), json!(null)));
    assert_eq!(service("idle"), (json!("ok"), json!(null)));

    // `status` lists the worst bulkheads first, with the causes.
    wait_for("workers are ready", || {
        let all = supervisor.get("/v1/bulkheads");
        let all = all["bulkheads"].as_array().unwrap();
        all.iter().all(|bulkhead| bulkhead["state"] == "ready").then_some(())
    });
    let table = stdout(&supervisor, &["status"]);
    assert!(table.contains("\n\nfails: service failing: failed/exit_3: 12 of 12 jobs"), "{table}");
    let table = table.split("\n\n").next().unwrap();
    let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    let column = |head: &str| rows[0].iter().position(|&one| one == head).unwrap();
    let (service, late) = (column("SERVICE"), column("LATE"));
    let told: Vec<(&str, &str, &str)> =
        rows[1..].iter().map(|row| (row[0], row[service], row[late])).collect();
    let expected = [
        ("fails", "failing", "0"),
        ("late", "failing", "12"),
        ("mixed", "degraded", "0"),
        ("callers", "ok", "0"),
        ("idle", "ok", "0"),
    ];
    assert_eq!(told, expected, "{table}");
    let one = stdout(&supervisor, &["status", "late"]);
    assert!(one.contains("late: service failing: deadline_exceeded/running: 12 of 12"), "{one}");
    let top = stdout(&supervisor, &["top", "--once", "--interval", "100ms"]);
    let names: Vec<&str> =
        top.lines().skip(1).take(5).filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(names, ["fails", "late", "mixed", "callers", "idle"], "{top}");

    let (_, page) = supervisor.try_get("/metrics").unwrap();
    for (name, state) in [("late", "failing"), ("mixed", "degraded"), ("callers", "ok"), ("idle", "ok")] {
        for each in ["ok", "degraded", "failing"] {
            let is_it = u8::from(each == state);
            let line = format!("bulkhead_service{{bulkhead=\"{name}\",state=\"{each}\"}} {is_it}\n");
            assert!(page.contains(&line), "{line}");
        }
    }
    assert!(page.contains("bulkhead_state{bulkhead=\"late\",state=\"ready\"} 1\n"), "{page}");
}

/// The output of `bulkhead status` must show the quarantine, the start mode and the breaker of a bulkhead.
#[test]
fn bulkhead_status_shows_rejections_and_tenants() {
    let supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_payload = \"1KiB\"\npoison = { crashes = 1 }\n\
         [bulkhead.forked]\ncommand = [\"MISBEHAVE\"]\nstart.mode = \"fork\"\nbreaker = { min_calls = 5 }\n",
    );
    let client = Client::connect(supervisor.socket()).unwrap();
    let job = |payload: &str, operation: &str| {
        let _ = client.job("b", payload).operation(operation).tenant("acme\u{202e}").send();
    };
    job("poison", "abort");
    job("poison", "abort");
    job(&"x".repeat(2000), "echo");
    let told = stdout(&supervisor, &["status", "b"]);
    for part in [
        "\nstart     spawn\n",
        "rejected  quarantined 1  too_large 1\n",
        "quarantine  1 payload",
        "tenant    'acme\\u{202e}'  in flight 0  queued 0  submitted ",
    ] {
        assert!(told.contains(part), "{part:?} is not in\n{told}");
    }
    assert!(stdout(&supervisor, &["status", "forked"]).contains("\nstart     fork\n"));
    let table = stdout(&supervisor, &["status"]);
    let breaker = |name: &str| {
        let row = table.lines().find(|line| line.trim_start().starts_with(name)).unwrap();
        row.split_whitespace().nth(12).unwrap().to_owned()
    };
    assert_eq!((breaker("b ").as_str(), breaker("forked ").as_str()), ("-", "closed"), "{table}");
    let json = stdout(&supervisor, &["status", "b", "--json"]);
    assert!(!json.contains('\u{202e}') && json.contains("acme\\u202e"), "{json}");
}

/// Recycled workers are counted in the metrics by cause.
#[test]
fn recycled_workers_do_not_count_as_restarts() {
    let supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nrecycle = { jobs = 2 }\n\
         [bulkhead.c]\ncommand = [\"MISBEHAVE\"]\n",
    );
    let client = Client::connect(supervisor.socket()).unwrap();
    wait_for("three workers were recycled", || {
        let _ = client.job("b", "").operation("pid").send();
        let (_, page) = supervisor.try_get("/metrics").unwrap();
        let line = page
            .lines()
            .find(|line| line.starts_with("bulkhead_worker_restarts_total{bulkhead=\"b\",cause=\"jobs\"}"))?;
        (line.rsplit(' ').next()?.parse::<f64>().unwrap() >= 3.0).then_some(())
    });
    assert_eq!(supervisor.number("b", "restarts"), 0);
    // Uses a bulkhead without recycling, because otherwise the next worker could already have been started.
    let _ = client.job("c", "").operation("abort").deadline(Duration::from_secs(20)).send();
    wait_for("the crash counts as a restart", || (supervisor.number("c", "restarts") > 0).then_some(()));
}
