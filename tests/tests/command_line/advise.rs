//! Advice on limits, based on jobs that were observed by a real supervisor.

use std::process::Output;
use std::time::Duration;

use bulkhead_client::blocking::Client;
use bulkhead_client::{JobError, Reply};
use bulkhead_tests::{Supervisor, outcome, tally, wait_for};
use serde_json::Value;

fn advice(supervisor: &Supervisor, bulkhead: &str) -> Value {
    supervisor.get(&format!("/v1/bulkheads/{bulkhead}/advice"))
}

fn advise(supervisor: &Supervisor, arguments: &[&str]) -> Output {
    bulkhead_tests::output(supervisor.command().arg("advise").args(arguments))
}

fn text(output: &Output) -> String {
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{complaint}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// Waits until `is_seen` returns true for the observed statistics. Returns the statistics.
fn wait_seen(supervisor: &Supervisor, bulkhead: &str, what: &str, is_seen: impl Fn(&Value) -> bool) -> Value {
    let mut last = Value::Null;
    wait_for(&format!("{bulkhead}: {what}"), || {
        last = advice(supervisor, bulkhead)["seen"].clone();
        is_seen(&last).then(|| last.clone())
    })
}

#[test]
fn advice_for_new_bulkhead_reports_missing_observations() {
    let supervisor = Supervisor::start(
        "[bulkhead.fresh]\ncommand = [\"MISBEHAVE\"]\n[bulkhead.other]\nexec = [\"cat\"]\n",
    );
    let fresh = wait_for("the worker's memory is measured", || {
        Some(advice(&supervisor, "fresh")).filter(|fresh| fresh["seen"]["rss_max_bytes"].is_u64())
    });
    assert_eq!(
        (&fresh["bulkhead"], &fresh["enough"], &fresh["jobs"]),
        (&"fresh".into(), &false.into(), &0.into())
    );
    assert!(
        fresh["missing"].as_str().unwrap().starts_with("not enough observations: 0 of 1000 jobs, "),
        "{fresh}"
    );
    assert_eq!((fresh["advice"].as_array().unwrap().len(), fresh["kept"].as_array().unwrap().len()), (0, 0));
    assert!(fresh["seen"]["rss_max_bytes"].as_u64().unwrap() > 100_000, "{fresh}");
    // For `exec`, the host process's memory usage is not that of the programs.
    assert!(advice(&supervisor, "other")["seen"]["rss_max_bytes"].is_null());

    let told = text(&advise(&supervisor, &["fresh"]));
    assert!(told.starts_with("fresh: 0 jobs in ") && told.contains("no recommendations yet"), "{told}");
    let told = text(&advise(&supervisor, &[]));
    assert!(told.contains("\n\nother: ") && told.starts_with("fresh: "), "{told}");
    let one: Value = serde_json::from_str(&text(&advise(&supervisor, &["--json", "fresh"]))).unwrap();
    assert_eq!(one["bulkhead"], "fresh");
    let all: Value = serde_json::from_str(&text(&advise(&supervisor, &["--json"]))).unwrap();
    assert_eq!(all["bulkheads"].as_array().unwrap().len(), 2, "{all}");

    assert_eq!(supervisor.try_get("/v1/bulkheads/nobody/advice").unwrap().0, 404);
    assert_eq!(advise(&supervisor, &["nobody"]).status.code(), Some(66));
    let nowhere = ["--admin", "/nonexistent/admin.sock"];
    assert_eq!(advise(&supervisor, &nowhere).status.code(), Some(69));
}

#[test]
fn advice_reports_observed_demand_and_concurrency() {
    let supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nprocesses = 3\nmax_queue = 5\ndeadline = \"10m\"\n\
         [bulkhead.own]\ncommand = [\"MISBEHAVE\"]\nprocesses = 2\ndeadline = \"10m\"\ntenants = { isolate = true }\n",
    );
    supervisor.wait_number("b", "limit", 3);
    bulkhead_tests::run(async {
        let client = bulkhead_client::Client::connect(supervisor.socket()).await.unwrap();
        let hang = |tenant: &str, bulkhead: &str| {
            tokio::spawn(client.job(bulkhead, "").operation("hang").tenant(tenant).send())
        };
        let mut jobs = vec![hang("", "b"), hang("", "b")];
        supervisor.wait_number("b", "in_flight", 2);
        let seen =
            wait_seen(&supervisor, "b", "two jobs are in flight", |seen| seen["concurrency"]["p50"] == 2);
        assert_eq!((&seen["concurrency"]["max"], &seen["demand"]["max"]), (&2.into(), &2.into()), "{seen}");
        assert_eq!((&seen["limit"], &seen["time_at_limit"]), (&3.into(), &0.0.into()), "{seen}");

        jobs.extend((0..3).map(|_| hang("", "b")));
        supervisor.wait_number("b", "queued", 2);
        // The medians reach the new values once these values have lasted for more than half of the time. All new jobs
        // are queued until the third worker begins one of them.
        let seen = wait_seen(&supervisor, "b", "the demand is five", |seen| {
            (&seen["demand"]["p50"], &seen["concurrency"]["p50"], &seen["queued"]["p50"])
                == (&5.into(), &3.into(), &2.into())
        });
        assert_eq!((&seen["concurrency"]["max"], &seen["demand"]["max"]), (&3.into(), &5.into()), "{seen}");
        assert!(seen["time_at_limit"].as_f64().unwrap() >= 0.4, "{seen}");

        // A change to the limits resets statistics that depend on the old limits, but not the observed demand.
        supervisor.resize("b", r#"{"processes": 6}"#);
        supervisor.wait_number("b", "in_flight", 5);
        let seen =
            wait_seen(&supervisor, "b", "five jobs are in flight", |seen| seen["concurrency"]["p50"] == 5);
        assert_eq!(seen["limit"], 6, "{seen}");
        // Three jobs were queued for a moment if all new jobs arrived before the third worker began one of them.
        assert!([2, 3].contains(&seen["queued"]["max"].as_u64().unwrap()), "{seen}");
        assert!(
            advice(&supervisor, "b")["missing"].as_str().unwrap().contains("since the limits were changed")
        );

        // With isolated tenants, the statistics are collected per tenant.
        jobs.extend(["a", "b", "c"].map(|tenant| hang(tenant, "own")));
        supervisor.wait_number("own", "in_flight", 3);
        let seen =
            wait_seen(&supervisor, "own", "each tenant has one job", |seen| seen["concurrency"]["p50"] == 1);
        assert_eq!((&seen["concurrency"]["max"], &seen["limit"]), (&1.into(), &2.into()), "{seen}");
        jobs.iter().for_each(tokio::task::JoinHandle::abort);
    });
}

/// The processor time of a worker is the difference between two samples, which are some seconds apart.
#[test]
fn processor_time_is_unknown_for_short_lived_workers() {
    let supervisor = Supervisor::start(
        "[bulkhead.long]\ncommand = [\"MISBEHAVE\"]\ndeadline = \"10m\"\n\
         [bulkhead.short]\ncommand = [\"MISBEHAVE\"]\nrecycle = { jobs = 1 }\n",
    );
    bulkhead_tests::run(async {
        let client = bulkhead_client::Client::connect(supervisor.socket()).await.unwrap();
        let job = tokio::spawn(client.job("long", "").operation("hang").send());
        supervisor.wait_number("long", "in_flight", 1);
        let short = client.clone();
        let jobs = tokio::spawn(async move {
            loop {
                let _ = short.job("short", "50").operation("sleep").send().await;
            }
        });
        wait_seen(&supervisor, "long", "the processor time is measured", |seen| {
            seen["processors_per_job"].is_f64()
        });
        let number = |seen: &Value, key: &str| seen[key].as_f64().unwrap();
        let seen = wait_seen(&supervisor, "short", "jobs have run for a second", |seen| {
            number(seen, "ran") * number(seen, "run_mean_ms") >= 1000.0
        });
        assert!(seen["processors_per_job"].is_null(), "{seen}");
        job.abort();
        jobs.abort();
    });
}

/// Sends more jobs than one process can handle, and returns the outcomes.
fn overload(supervisor: &Supervisor) -> Vec<String> {
    let client = Client::connect(supervisor.socket()).unwrap();
    let one = || -> Result<Reply, JobError> { client.job("small", "5").operation("sleep").send() };
    std::thread::scope(|scope| {
        let callers: Vec<_> = (0..8)
            .map(|_| {
                scope.spawn(|| {
                    let mut ends = Vec::new();
                    for _ in 0..60 {
                        let result = one();
                        if result.is_err() {
                            // Real clients do not retry immediately. This pause is short enough to find the queue full
                            // again.
                            std::thread::park_timeout(Duration::from_millis(2));
                        }
                        ends.push(outcome(&result));
                    }
                    ends
                })
            })
            .collect();
        callers.into_iter().flat_map(|caller| caller.join().unwrap()).collect()
    })
}

#[test]
fn advice_recommends_more_processes_for_overloaded_bulkhead() {
    let supervisor = Supervisor::start(
        "[bulkhead.small]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 2\nrestart = { backoff = \"1ms\" }\n",
    );
    supervisor.wait_number("small", "limit", 1);
    let ends = tally(overload(&supervisor));
    assert!(ends["rejected/queue_full"] > 0 && ends["ok"] > 0, "{ends:?}");

    let told = advice(&supervisor, "small");
    assert_eq!((&told["enough"], &told["jobs"]), (&false.into(), &480.into()), "{told}");
    let seen = &told["seen"];
    assert_eq!(seen["rejected"]["queue_full"], ends["rejected/queue_full"], "{told}");
    assert_eq!((&seen["ran"], &seen["concurrency"]["p99"]), (&ends["ok"].into(), &1.into()), "{told}");
    assert_eq!((&seen["demand"]["max"], &seen["queued"]["max"]), (&3.into(), &2.into()), "{told}");
    assert!(seen["run_ms"]["p50"].as_f64().unwrap() >= 4.0, "{told}");
    let processes =
        told["advice"].as_array().unwrap().iter().find(|item| item["key"] == "processes").unwrap();
    assert_eq!((&processes["now"], &processes["proposed"]), (&1.into(), &2.into()), "{told}");
    let reason = processes["reason"].as_str().unwrap();
    assert!(reason.contains(&format!("queue_full {}", ends["rejected/queue_full"])), "{told}");

    // The printed command can be run unchanged.
    let said = text(&advise(&supervisor, &["small"]));
    assert!(
        said.contains("the recommendations are provisional") && said.contains("\n[bulkhead.small]\n"),
        "{said}"
    );
    let command =
        said.lines().find(|line| line.starts_with("bulkhead resize small --processes 2")).expect(&said);
    let typed = bulkhead_tests::output(supervisor.command().args(command.split(' ').skip(1)));
    assert_eq!(typed.status.code(), Some(0), "{}", String::from_utf8_lossy(&typed.stderr));
    let then = advice(&supervisor, "small");
    assert_eq!((&then["seen"]["limit"], &then["jobs"]), (&2.into(), &0.into()), "{then}");
    assert_eq!(then["advice"].as_array().unwrap().len(), 0, "applied advice is not repeated: {then}");
}
