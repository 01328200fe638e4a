//! Metrics as Prometheus reads them: names, formats, and numbers that add up in every single scrape, even under load.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use bulkhead_client::{Client, Job, Priority};
use bulkhead_tests::openmetrics::Page;
use bulkhead_tests::{PATIENCE, Supervisor, connect, not_run, outcome, run, tally, wait_for};

// Scraping.

/// Scrapes the metrics. Returns the content type and the body.
fn scrape_as(admin: &Path, accept: Option<&str>) -> (String, String) {
    let mut socket = UnixStream::connect(admin).expect("the admin socket accepts connections");
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let accept = accept.map_or(String::new(), |accept| format!("Accept: {accept}\r\n"));
    write!(socket, "GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{accept}\r\n").unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).expect("the answer is valid UTF-8");
    let (head, body) = answer.split_once("\r\n\r\n").expect("an answer");
    assert!(head.starts_with("HTTP/1.1 200 "), "{answer}");
    assert!(!head.contains("chunked"), "{head}");
    let content_type = head.lines().find_map(|line| line.strip_prefix("content-type: "));
    (content_type.expect("the answer has a content type").to_owned(), body.to_owned())
}

fn admin(supervisor: &Supervisor) -> PathBuf {
    supervisor.folder.path().join("admin.sock")
}

fn page_at(admin: &Path) -> Page {
    let (_, body) = scrape_as(admin, None);
    Page::parse(&body).unwrap_or_else(|error| panic!("{error}\n{body}"))
}

fn page(supervisor: &Supervisor) -> Page {
    page_at(&admin(supervisor))
}

/// Checks the invariants of a single scrape.
fn check_books(page: &Page) {
    let sum = |name: &str, labels: &[(&str, &str)]| page.sum(name, labels);
    let (mut elsewhere, mut guests) = (0, 0);
    for limit in &page.family("bulkhead_limit").samples {
        let name = limit.labels["bulkhead"].as_str();
        let of = [("bulkhead", name)];
        let sum_of = |metric: &str| sum(metric, &of);
        let open = sum_of("bulkhead_active_calls") + sum_of("bulkhead_queue_length");
        let (away, here) = (sum_of("bulkhead_jobs_elsewhere"), sum_of("bulkhead_jobs_guests"));
        let (submitted, ended) = (sum_of("bulkhead_submitted_total"), sum_of("bulkhead_jobs_total"));
        assert_eq!(submitted + here, ended + open + away, "{name}");
        (elsewhere, guests) = (elsewhere + away, guests + here);
        for priority in Priority::ALL {
            let by = [of[0], ("priority", priority.name())];
            let rejected = [by[0], by[1], ("outcome", "rejected")];
            assert_eq!(sum("bulkhead_rejected_total", &by), sum("bulkhead_jobs_total", &rejected), "{name}");
            assert!(sum("bulkhead_jobs_total", &by) <= sum("bulkhead_submitted_total", &by), "{name}");
        }
        let crashed = [of[0], ("outcome", "crashed")];
        assert_eq!(sum_of("bulkhead_crashed_total"), sum("bulkhead_jobs_total", &crashed), "{name}");
        assert_eq!(sum_of("bulkhead_tenant_jobs_total"), ended, "{name}");
        assert_eq!(sum_of("bulkhead_breaker_state"), 1, "{name}");
    }
    assert_eq!(elsewhere, guests);
    let open = sum("bulkhead_active_calls", &[]) + sum("bulkhead_queue_length", &[]);
    let (submitted, ended) = (sum("bulkhead_submitted_total", &[]), sum("bulkhead_jobs_total", &[]));
    assert_eq!(submitted, ended + open, "over all bulkheads");
}

fn check_growth(before: &Page, after: &Page) {
    let now = after.growing();
    for (series, value) in before.growing() {
        let grown = now.get(&series).unwrap_or_else(|| panic!("{series:?} has disappeared"));
        assert!(*grown >= value, "{series:?} went from {value} to {grown}");
    }
}

/// Scrapes the metrics continuously. Checks each scrape by itself and against the previous scrape.
struct Scraper {
    is_over: Arc<AtomicBool>,
    thread: JoinHandle<(u64, Page)>,
}

impl Scraper {
    fn of(supervisor: &Supervisor) -> Self {
        let (admin, is_over) = (admin(supervisor), Arc::new(AtomicBool::new(false)));
        let told = is_over.clone();
        let thread = std::thread::spawn(move || {
            let mut last = page_at(&admin);
            let mut scrapes = 1;
            loop {
                let is_last = told.load(Ordering::SeqCst);
                let next = page_at(&admin);
                check_books(&next);
                check_growth(&last, &next);
                (last, scrapes) = (next, scrapes + 1);
                if is_last {
                    return (scrapes, last);
                }
                std::thread::park_timeout(Duration::from_millis(1));
            }
        });
        Self { is_over, thread }
    }

    /// Scrapes the metrics once more, stops the thread, and returns the last page.
    fn finish(self) -> Page {
        self.is_over.store(true, Ordering::SeqCst);
        let (scrapes, page) = self.thread.join().expect("all scrapes are consistent");
        eprintln!("{scrapes} scrapes");
        page
    }
}

/// Waits until the metrics and the snapshot agree. Both can still change, because workers finish late jobs, restart
/// or become idle.
fn check_against_snapshot(supervisor: &Supervisor, bulkhead: &str) {
    let mut told = Vec::new();
    wait_for("metrics and snapshot agree", || {
        let differences = differences(&page(supervisor), &supervisor.snapshot(bulkhead), bulkhead);
        if !differences.is_empty() && differences != told {
            eprintln!("{bulkhead}: the metrics differ from the snapshot: {differences:?}");
        }
        told = differences;
        told.is_empty().then_some(())
    });
}

/// Compares the metrics with the snapshot of a bulkhead in which every job has an outcome. Returns the name and both
/// values of each metric that differs.
fn differences(page: &Page, snapshot: &serde_json::Value, bulkhead: &str) -> Vec<(String, u64, u64)> {
    let of = ("bulkhead", bulkhead);
    let number = |field: &str| snapshot[field].as_u64().unwrap_or_else(|| panic!("{field}: {snapshot}"));
    let mut pairs = Vec::new();
    for (outcome, field) in
        [("ok", "done"), ("failed", "failed"), ("crashed", "crashed"), ("cancelled", "cancelled")]
    {
        let counted = page.sum("bulkhead_jobs_total", &[of, ("outcome", outcome)]);
        pairs.push((outcome.to_owned(), counted, number(field)));
    }
    for (reason, count) in snapshot["rejected"].as_object().unwrap() {
        let counted = page.sum("bulkhead_rejected_total", &[of, ("reason", reason)]);
        pairs.push((reason.clone(), counted, count.as_u64().unwrap()));
    }
    for (name, field) in [
        ("submitted_total", "submitted"),
        ("retries_total", "retries"),
        ("late_replies_total", "late_replies"),
        ("limit", "limit"),
        ("queue_capacity", "queue_capacity"),
    ] {
        pairs.push((field.to_owned(), page.sum(&format!("bulkhead_{name}"), &[of]), number(field)));
    }
    // Tenants without a label share one series.
    let samples = &page.family("bulkhead_tenant_jobs").samples;
    let labelled: BTreeSet<_> = samples.iter().map(|sample| sample.labels["tenant"].as_str()).collect();
    for tenant in snapshot["tenants"].as_array().unwrap() {
        let name = tenant["name"].as_str().unwrap();
        if labelled.contains(name) {
            let of = [of, ("tenant", name)];
            let ended = page.sum("bulkhead_tenant_jobs_total", &of);
            let rejected = page.sum("bulkhead_tenant_jobs_total", &[of[0], of[1], ("outcome", "rejected")]);
            for (field, counted) in [("submitted", ended), ("rejected", rejected)] {
                pairs.push((format!("{field} for {name}"), counted, tenant[field].as_u64().unwrap()));
            }
        }
    }
    pairs.retain(|(_, counted, number)| counted != number);
    pairs
}

// Families and labels.

const TWO: &str = "[defaults]\nmax_queue = 4\noverflow = \"evict-oldest\"\nbreaker = {}\n\
                   [bulkhead.plain]\ncommand = [\"MISBEHAVE\"]\nfallback = [\"apart\"]\n\
                   [bulkhead.plain.tenant.acme]\nmax_in_flight = 1\n\
                   [bulkhead.plain.recycle]\nrss = \"1GiB\"\n\
                   [bulkhead.apart]\ncommand = [\"MISBEHAVE\"]\ntenants = { isolate = true }\n";

#[test]
fn first_scrape_contains_every_metric() {
    let supervisor = Supervisor::start(TWO);
    // The memory is measured a moment after the worker has started.
    let page = wait_for("the worker's memory is measured", || {
        let worker = [("bulkhead", "plain"), ("slot", "0")];
        Some(page(&supervisor)).filter(|page| page.sum("bulkhead_worker_rss_bytes", &worker) > 0)
    });
    check_books(&page);
    let labels_of = |name: &str| -> BTreeSet<String> {
        page.samples(name, &[]).flat_map(|sample| sample.labels.keys().cloned()).collect()
    };
    let of_each: &[(&str, &[&str])] = &[
        ("bulkhead_submitted_total", &["priority"]),
        ("bulkhead_jobs_total", &["priority", "outcome"]),
        ("bulkhead_rejected_total", &["priority", "reason"]),
        ("bulkhead_crashed_total", &["reason"]),
        ("bulkhead_tenant_jobs_total", &["tenant", "outcome"]),
        ("bulkhead_evicted_total", &["tenant"]),
        ("bulkhead_retries_total", &[]),
        ("bulkhead_worker_restarts_total", &["cause"]),
        ("bulkhead_breaker_transitions_total", &["from", "to"]),
        ("bulkhead_late_replies_total", &[]),
        ("bulkhead_active_calls", &[]),
        ("bulkhead_limit", &[]),
        ("bulkhead_queue_length", &[]),
        ("bulkhead_queue_capacity", &[]),
        ("bulkhead_breaker_state", &["state"]),
        ("bulkhead_workers", &["state"]),
        ("bulkhead_worker_rss_bytes", &["slot"]),
        ("bulkhead_queue_wait_seconds_bucket", &["le"]),
        ("bulkhead_execution_seconds_bucket", &["le"]),
        ("bulkhead_job_duration_seconds_bucket", &["le"]),
    ];
    for (name, labels) in of_each {
        for bulkhead in ["plain", "apart"] {
            assert!(page.samples(name, &[("bulkhead", bulkhead)]).count() > 0, "{name} of {bulkhead}");
        }
        let expected: BTreeSet<String> =
            labels.iter().copied().chain(["bulkhead"]).map(str::to_owned).collect();
        assert_eq!(labels_of(name), expected, "{name}");
    }
    let target = [("bulkhead", "plain"), ("target", "apart")];
    assert_eq!(page.samples("bulkhead_fallback_total", &target).count(), 6);
    let alone = [
        "bulkhead_clients",
        "bulkhead_buffered_bytes",
        "bulkhead_config_last_reload_successful",
        "bulkhead_build_info",
    ];
    let process = [
        "process_cpu_seconds_total",
        "process_open_fds",
        "process_max_fds",
        "process_virtual_memory_bytes",
        "process_resident_memory_bytes",
        "process_start_time_seconds",
    ];
    for name in alone.iter().chain(&process) {
        assert_eq!(page.samples(name, &[]).count(), 1, "{name}");
    }
    let version = [("version", env!("CARGO_PKG_VERSION"))];
    assert_eq!(page.sum("bulkhead_build_info", &version), 1);
    assert_eq!(page.sum("bulkhead_config_last_reload_successful", &[]), 1);
    for result in ["success", "failure"] {
        assert_eq!(page.samples("bulkhead_config_reloads_total", &[("result", result)]).count(), 1);
    }
    for outcome in ["ok", "failed", "rejected", "deadline_exceeded", "crashed", "cancelled"] {
        for priority in Priority::ALL {
            let labels = [("outcome", outcome), ("priority", priority.name())];
            assert_eq!(page.samples("bulkhead_jobs_total", &labels).count(), 2, "{labels:?}");
        }
    }
    for tenant in ["acme", "_other"] {
        assert_eq!(page.samples("bulkhead_evicted_total", &[("tenant", tenant)]).count(), 2, "{tenant}");
    }
    assert_eq!(page.sum("bulkhead_worker_memory_limit_bytes", &[]), 1 << 30);
    assert!(page.sum("bulkhead_worker_rss_bytes", &[("bulkhead", "plain"), ("slot", "0")]) > 0);
    assert_eq!(page.sum("bulkhead_workers", &[("bulkhead", "plain"), ("state", "ready")]), 1);
    // All counters start at zero.
    let counted = page.growing().into_iter().filter(|((name, _), _)| name.starts_with("bulkhead_"));
    for (series, value) in counted {
        assert_eq!(value, 0.0, "{series:?}");
    }
}

#[test]
fn series_for_unconfigured_features_are_absent() {
    let plain = "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_payload = 16\n";
    let supervisor = Supervisor::start(plain);
    let there = |name: &str, labels: &[(&str, &str)]| {
        let page = page(&supervisor);
        check_books(&page);
        page.samples(name, labels).count()
    };
    let rejected = |reason: &str| there("bulkhead_rejected_total", &[("reason", reason)]);
    for reason in ["rate_limited", "tenant_quota", "backpressure", "evicted", "circuit_open", "quarantined"] {
        assert_eq!(rejected(reason), 0, "{reason}");
    }
    assert_eq!((rejected("forbidden"), rejected("queue_timeout"), rejected("too_large")), (0, 0, 1));
    for cause in ["jobs", "rss", "age"] {
        assert_eq!(there("bulkhead_worker_restarts_total", &[("cause", cause)]), 0, "{cause}");
    }
    for name in
        ["bulkhead_evicted_total", "bulkhead_spares", "bulkhead_jobs_elsewhere", "bulkhead_jobs_guests"]
    {
        assert_eq!(there(name, &[]), 0, "{name}");
    }
    assert_eq!(there("bulkhead_breaker_transitions_total", &[]), 2);
    assert_eq!(there("bulkhead_execution_seconds_bucket", &[]), 1);
    // Series that are used to compute rates must exist from the start.
    let critical = [("priority", "critical"), ("outcome", "rejected")];
    assert_eq!(there("bulkhead_jobs_total", &critical), 1);
    let of_critical = [("priority", "critical"), ("reason", "too_large")];
    assert_eq!(there("bulkhead_rejected_total", &of_critical), 0);
    run(async {
        let client = connect(&supervisor).await;
        client.job("b", "").send().await.unwrap();
        let large = client.job("b", vec![0; 17]).priority(Priority::Critical).send().await;
        assert_eq!(outcome(&large), "rejected/too_large");
    });
    let of_all = page(&supervisor);
    assert_eq!(of_all.sum("bulkhead_rejected_total", &of_critical), 1);
    assert_eq!(of_all.samples("bulkhead_rejected_total", &[("priority", "best-effort")]).count(), 0);
    assert_eq!(of_all.samples("bulkhead_execution_seconds_bucket", &[]).count(), 22);
    assert_eq!(of_all.sum("bulkhead_execution_seconds_count", &[]), 1);
    // Operators can open a breaker that is not configured, so the counter must be exported as 0 before the first
    // rejection.
    supervisor.resize("b", r#"{"breaker": "forced_open"}"#);
    assert_eq!((rejected("circuit_open"), there("bulkhead_breaker_state", &[])), (2, 2));
    supervisor.resize("b", r#"{"breaker": "auto"}"#);
    let more = "breaker = {}\noverflow = \"evict-oldest\"\nmax_queue = 2\nrecycle = { jobs = 1000 }\n";
    supervisor.configure("", &format!("{plain}{more}"));
    assert_eq!(supervisor.post("/v1/reload").0, 200);
    assert_eq!((rejected("circuit_open"), rejected("evicted")), (2, 2));
    assert_eq!(there("bulkhead_breaker_transitions_total", &[]), 9);
    assert_eq!(there("bulkhead_worker_restarts_total", &[("cause", "jobs")]), 1);
    // Once exported, a series does not disappear.
    supervisor.configure("", plain);
    assert_eq!(supervisor.post("/v1/reload").0, 200);
    assert_eq!((rejected("evicted"), there("bulkhead_breaker_transitions_total", &[])), (2, 9));
}

#[test]
fn accept_header_selects_the_format() {
    let supervisor = Supervisor::start(TWO);
    let open = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    let classic = "text/plain; version=0.0.4; charset=utf-8";
    let prometheus =
        "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1";
    for accept in [None, Some("*/*"), Some("application/openmetrics-text"), Some(prometheus)] {
        let (content_type, body) = scrape_as(&admin(&supervisor), accept);
        assert_eq!(content_type, open, "{accept:?}");
        Page::parse(&body).unwrap();
    }
    for accept in [
        "text/plain",
        "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
        "application/openmetrics-text;q=0,text/plain",
    ] {
        let (content_type, body) = scrape_as(&admin(&supervisor), Some(accept));
        assert_eq!(content_type, classic, "{accept}");
        assert!(!body.contains("# EOF"), "{body}");
        // In the classic format, a counter has the same name as its samples. Nothing else differs.
        let totals =
            |line: &str| line.starts_with("# ") && line.split(' ').nth(2).unwrap().ends_with("_total");
        let strict: String = body
            .lines()
            .map(
                |line| {
                    if totals(line) { line.replacen("_total ", " ", 1) + "\n" } else { format!("{line}\n") }
                },
            )
            .collect();
        assert_eq!(body.matches(" counter\n").count(), body.matches("_total counter\n").count());
        check_books(&Page::parse(&format!("{strict}# EOF\n")).unwrap());
    }
    assert_eq!(supervisor.post("/metrics").0, 405);
}

// Tenants.

#[test]
fn tenant_names_are_escaped_and_unlisted_ones_share_a_label() {
    let hostile = "a\"} 1\n# EOF\n\\{b=\"ü";
    let toml = hostile.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    let supervisor = Supervisor::start(&format!(
        "[bulkhead.\"a.b-c_0\"]\ncommand = [\"MISBEHAVE\"]\n[bulkhead.\"a.b-c_0\".tenant.\"{toml}\"]\n\
         max_in_flight = 1\n[bulkhead.\"a.b-c_0\".tenant._other]\nmax_in_flight = 1\n"
    ));
    run(async {
        let client = connect(&supervisor).await;
        let job = || client.job("a.b-c_0", "");
        job().tenant(hostile).send().await.unwrap();
        for stranger in ["x", "_other", "acme\n", "\u{202e}"] {
            job().tenant(stranger).send().await.unwrap();
        }
        job().send().await.unwrap();
        job().tenant(hostile).operation("fail").send().await.unwrap_err();
    });
    let page = page(&supervisor);
    check_books(&page);
    let tenants: BTreeSet<&str> = page
        .samples("bulkhead_tenant_jobs_total", &[])
        .map(|sample| sample.labels["tenant"].as_str())
        .collect();
    assert_eq!(tenants, BTreeSet::from([hostile, "_other"]));
    let ended =
        |tenant, outcome| page.sum("bulkhead_tenant_jobs_total", &[("tenant", tenant), ("outcome", outcome)]);
    assert_eq!((ended(hostile, "ok"), ended(hostile, "failed")), (1, 1));
    assert_eq!((ended("_other", "ok"), ended("_other", "failed")), (5, 0));
}

#[test]
fn tenant_labels_key_limits_named_tenants() {
    let tenants: String =
        ["c", "b", "a"].map(|t| format!("[bulkhead.b.tenant.{t}]\nmax_in_flight = 1\n")).concat();
    let bulkhead = format!("[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\n{tenants}");
    let supervisor = Supervisor::start_with("tenant_labels = 2", &bulkhead);
    run(async {
        let client = connect(&supervisor).await;
        for tenant in ["a", "b", "c"] {
            client.job("b", "").tenant(tenant).send().await.unwrap();
        }
    });
    let page = page(&supervisor);
    let counts: Vec<u64> = ["a", "b", "c", "_other"]
        .map(|tenant| page.sum("bulkhead_tenant_jobs_total", &[("tenant", tenant)]))
        .to_vec();
    // The first two tenants in the file have labels.
    assert_eq!(counts, [0, 1, 1, 1]);
}

#[test]
fn metrics_count_jobs_rejected_at_admission() {
    let own = nix::unistd::geteuid();
    let supervisor = Supervisor::start(&format!(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_payload = 10\n[bulkhead.closed]\ncommand = [\"MISBEHAVE\"]\n\
         [[access]]\nuid = {own}\nbulkheads = [\"b\"]\ntenants = [\"acme\"]\n"
    ));
    run(async {
        let client = connect(&supervisor).await;
        let job = |name: &str, payload: Vec<u8>| client.job(name, payload).tenant("acme");
        let ended = [
            job("b", vec![0; 11]).priority(Priority::Critical).send().await,
            job("b", vec![0; 100_000]).send().await,
            job("b", Vec::new()).operation("x\0").send().await,
            job("b", Vec::new()).tenant("umbrella").send().await,
            client.job("b", "").send().await,
            job("closed", Vec::new()).send().await,
            job("b", Vec::new()).send().await,
        ];
        let ended: Vec<String> = ended.iter().map(outcome).collect();
        let expected = ["too_large", "too_large", "invalid", "forbidden", "forbidden", "forbidden"];
        let expected = expected.map(|reason| format!("rejected/{reason}"));
        assert_eq!(ended[..6], expected);
        assert_eq!(ended[6], "ok");
    });
    let page = page(&supervisor);
    check_books(&page);
    let rejected = |bulkhead: &str, reason: &str| {
        page.sum("bulkhead_rejected_total", &[("bulkhead", bulkhead), ("reason", reason)])
    };
    assert_eq!((rejected("b", "too_large"), rejected("b", "invalid"), rejected("b", "forbidden")), (2, 1, 2));
    assert_eq!(rejected("closed", "forbidden"), 1);
    let critical = [("bulkhead", "b"), ("priority", "critical"), ("reason", "too_large")];
    assert_eq!(page.sum("bulkhead_rejected_total", &critical), 1);
    // Forbidden jobs do not count for the tenant that they name.
    let of_acme =
        |outcome| page.sum("bulkhead_tenant_jobs_total", &[("tenant", "acme"), ("outcome", outcome)]);
    assert_eq!((of_acme("rejected"), of_acme("ok")), (3, 1));
    for bulkhead in ["b", "closed"] {
        check_against_snapshot(&supervisor, bulkhead);
    }
}

// Counters.

#[test]
fn buffered_bytes_include_queued_payloads() {
    let supervisor = Supervisor::start("[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 4\n");
    let held = || page(&supervisor).sum("bulkhead_buffered_bytes", &[]);
    run(async {
        let client = connect(&supervisor).await;
        let first = tokio::spawn(client.job("b", "").operation("steps:wait end").send());
        supervisor.wait_number("b", "in_flight", 1);
        let before = held();
        let second = tokio::spawn(client.job("b", vec![0; 1 << 20]).send());
        supervisor.wait_number("b", "queued", 1);
        let waiting = held();
        assert!((1 << 20..1 << 22).contains(&(waiting - before)), "{before}, then {waiting}");
        supervisor.touch("end");
        for job in [first, second] {
            job.await.unwrap().unwrap();
        }
    });
    wait_for("the buffered bytes are released", || (held() < 1 << 20).then_some(()));
}

#[test]
fn metrics_count_evictions_restarts_and_late_replies() {
    let supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 2\noverflow = \"evict-oldest\"\ndeadline = \"60s\"\n\
         grace = \"60s\"\n[bulkhead.b.tenant.greedy]\nmax_queue = 2\n\
         [bulkhead.b.breaker]\nmin_calls = 1000\n",
    );
    let scraper = Scraper::of(&supervisor);
    run(async {
        let client = connect(&supervisor).await;
        let job = |steps: &str| client.job("b", "").operation(format!("steps:{steps}"));
        let first = tokio::spawn(job("wait end").send());
        supervisor.wait_number("b", "in_flight", 1);
        let mut greedy = Vec::new();
        for _ in 0..2 {
            greedy.push(tokio::spawn(job("echo").tenant("greedy").send()));
            supervisor.wait_number("b", "queued", greedy.len() as u64);
        }
        let other = tokio::spawn(job("echo").send());
        assert_eq!(outcome(&greedy.remove(0).await.unwrap()), "rejected/evicted");
        supervisor.touch("end");
        for job in [first, other, greedy.remove(0)] {
            job.await.unwrap().unwrap();
        }
        // The client gets the outcome long before the job ends.
        // Unlike a deadline, a run limit does not pass before the worker has begun the job.
        let late = job("wait later").run_limit(Duration::from_secs(2)).send().await;
        assert_eq!(outcome(&late), "deadline_exceeded/running");
        supervisor.touch("later");
        supervisor.wait_number("b", "late_replies", 1);
        assert_eq!(outcome(&client.job("b", "").operation("abort").send().await), "crashed/signal");
        wait_for("the worker has been replaced", || (supervisor.number("b", "limit") == 1).then_some(()));
        supervisor.post("/v1/bulkheads/b/restart");
        supervisor.wait_events("worker_recycled", 1);
        wait_for("both restarts are counted", || {
            (page(&supervisor).sum("bulkhead_worker_restarts_total", &[]) == 2).then_some(())
        });
        supervisor.resize("b", r#"{"breaker": "forced_open"}"#);
        assert_eq!(outcome(&client.job("b", "").send().await), "rejected/circuit_open");
        supervisor.resize("b", r#"{"breaker": "auto"}"#);
    });
    let page = scraper.finish();
    let counted = |name: &str, labels: &[(&str, &str)]| page.sum(name, labels);
    assert_eq!(counted("bulkhead_evicted_total", &[("tenant", "greedy")]), 1);
    assert_eq!(counted("bulkhead_evicted_total", &[]), 1);
    assert_eq!(counted("bulkhead_late_replies_total", &[]), 1);
    assert_eq!(counted("bulkhead_crashed_total", &[("reason", "signal")]), 1);
    assert_eq!(counted("bulkhead_worker_restarts_total", &[("cause", "signal")]), 1);
    assert_eq!(counted("bulkhead_worker_restarts_total", &[("cause", "restart")]), 1);
    assert_eq!(counted("bulkhead_worker_restarts_total", &[]), 2);
    let opened = [("from", "closed"), ("to", "forced_open")];
    assert_eq!(counted("bulkhead_breaker_transitions_total", &opened), 1);
    assert_eq!(counted("bulkhead_breaker_transitions_total", &[]), 2);
    assert_eq!(counted("bulkhead_breaker_state", &[("state", "closed")]), 1);
    // Jobs that are rejected on arrival are not in any histogram. The evicted job is, because it waited.
    let count = |name: &str| counted(&format!("bulkhead_{name}_seconds_count"), &[]);
    assert_eq!((count("queue_wait"), count("execution"), count("job_duration")), (6, 5, 6));
    check_against_snapshot(&supervisor, "b");
}

/// Returns a job, and true if the client should cancel it. Depending on `number`, the job succeeds, fails, crashes,
/// is retried or misses its deadline.
fn job(client: &Client, number: usize) -> (Job, bool) {
    let bulkhead = ["entry", "entry", "safe", "apart"][number % 4];
    let (operation, payload) = match number / 4 % 9 {
        0 | 1 => ("echo", ""),
        2 => ("sleep", "3"),
        3 => ("fail", ""),
        4 => ("abort", ""),
        5 => ("exit", "3"),
        6 => ("sleep", "40"),
        7 => ("yield", ""),
        _ => ("echo", "a payload that is too large"),
    };
    let deadline = if number.is_multiple_of(5) { 20 } else { 30_000 };
    let deadline = Duration::from_millis(if operation == "yield" { 10 } else { deadline });
    let job = client
        .job(bulkhead, payload)
        .operation(operation)
        .deadline(deadline)
        .priority(Priority::ALL[number % 3])
        .tenant(["acme", "umbrella", "", "stranger"][number / 3 % 4])
        .idempotent(number.is_multiple_of(2));
    (job, number.is_multiple_of(11))
}

const LOADED: &str = "[defaults]\nprocesses = 2\nmax_queue = 4\nmax_payload = 16\n\
    deadline = \"30s\"\nretry = { attempts = 3, budget = 1.0 }\n\
    restart = { backoff = \"1ms\", max = 1000 }\n\
    [bulkhead.entry]\ncommand = [\"MISBEHAVE\"]\nmax_in_flight = 2\nfallback = [\"safe\", \"apart\"]\npressure = { reject = 0.5 }\n\
    breaker = { window = \"1s\", min_calls = 5, failure_rate = 0.3, open_for = \"50ms\" }\n\
    [bulkhead.entry.tenant]\nacme = { max_queue = 2 }\numbrella = {}\n\
    [bulkhead.safe]\ncommand = [\"MISBEHAVE\"]\noverflow = \"evict-oldest\"\nqueue_timeout = \"20ms\"\n\
    priority = { critical_reserve = 0.5 }\n\
    [bulkhead.apart]\ncommand = [\"MISBEHAVE\"]\nprocesses = 1\ntenants = { isolate = true, max_active = 2, idle = \"5ms\" }\n";

#[test]
fn metrics_are_consistent_in_every_scrape() {
    let supervisor = Supervisor::start(LOADED);
    let scraper = Scraper::of(&supervisor);
    let ended = run(async {
        let client = connect(&supervisor).await;
        let mut workers = Vec::new();
        for lane in 0..24 {
            let client = client.clone();
            workers.push(tokio::spawn(async move {
                let mut ended = Vec::new();
                for number in (0..60).map(|round| lane + 24 * round) {
                    let (job, is_given_up) = job(&client, number);
                    if is_given_up {
                        // Dropping the future cancels the job.
                        drop(tokio::time::timeout(Duration::from_millis(2), job.send()).await);
                    } else {
                        ended.push(outcome(&job.send().await));
                    }
                }
                ended
            }));
        }
        let mut ended = Vec::new();
        for worker in workers {
            ended.extend(worker.await.unwrap());
        }
        ended
    });
    wait_for("no jobs are open", || {
        let page = page(&supervisor);
        let open = page.sum("bulkhead_active_calls", &[]) + page.sum("bulkhead_queue_length", &[]);
        (open == 0).then_some(())
    });
    let page = scraper.finish();
    let seen = tally(ended);
    eprintln!("{seen:?}");
    let submitted = page.sum("bulkhead_submitted_total", &[]);
    assert!((1200..=1440).contains(&submitted), "{submitted}");
    for name in ["bulkhead_retries_total", "bulkhead_fallback_total", "bulkhead_worker_restarts_total"] {
        assert!(page.sum(name, &[]) > 0, "{name}");
    }
    for outcome in ["ok", "failed", "rejected", "deadline_exceeded", "crashed", "cancelled"] {
        assert!(page.sum("bulkhead_jobs_total", &[("outcome", outcome)]) > 0, "{outcome}");
    }
    for bulkhead in ["entry", "safe", "apart"] {
        check_against_snapshot(&supervisor, bulkhead);
    }
}

/// Counters survive reloads, even in bulkheads that are no longer fallbacks.
#[test]
fn metrics_stay_consistent_across_reloads() {
    const ROUNDS: usize = 20;
    let file = |round: usize| {
        let fallback = ["[\"x\"]", "[\"y\", \"x\"]", "[]", "[\"y\"]"][round % 4];
        let others: String = ["x", "y"]
            .map(|name| format!("[bulkhead.{name}]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 4\n"))
            .concat();
        format!(
            "[bulkhead.entry]\ncommand = [\"MISBEHAVE\"]\nmax_in_flight = {}\nmax_queue = 2\nfallback = {fallback}\n\
             env = {{ ROUND = \"{}\" }}\n[bulkhead.entry.tenant.acme]\nmax_queue = {}\n{others}",
            1 + round % 3,
            round / 5,
            1 + round % 2,
        )
    };
    let supervisor = Supervisor::start(&file(0));
    let scraper = Scraper::of(&supervisor);
    run(async {
        let client = connect(&supervisor).await;
        let is_over = Arc::new(AtomicBool::new(false));
        let lanes: Vec<_> = (0..16)
            .map(|lane| {
                let (client, is_over) = (client.clone(), is_over.clone());
                tokio::spawn(async move {
                    let tenant = ["acme", "stranger"][lane % 2];
                    while !is_over.load(Ordering::SeqCst) {
                        let bulkhead = ["entry", "entry", "entry", "x"][lane % 4];
                        let job = client.job(bulkhead, "1").operation("sleep").tenant(tenant);
                        let _ = job.idempotent(true).send().await;
                    }
                })
            })
            .collect();
        for round in 1..=ROUNDS {
            tokio::task::block_in_place(|| {
                supervisor.configure("", &file(round));
                assert_eq!(supervisor.post("/v1/reload").0, 200);
                let submitted = || supervisor.number("entry", "submitted");
                let before = submitted();
                wait_for("jobs continue", || (submitted() >= before + 50).then_some(()));
            });
        }
        is_over.store(true, Ordering::SeqCst);
        for lane in lanes {
            lane.await.unwrap();
        }
    });
    let page = scraper.finish();
    let counted = |name: &str, labels: &[(&str, &str)]| page.sum(name, labels);
    assert_eq!(counted("bulkhead_config_reloads_total", &[("result", "success")]), ROUNDS as u64);
    for target in ["x", "y"] {
        assert!(counted("bulkhead_fallback_total", &[("target", target)]) > 0, "{target}");
    }
    assert!(counted("bulkhead_tenant_jobs_total", &[("bulkhead", "entry"), ("tenant", "acme")]) > 0);
    assert!(counted("bulkhead_worker_restarts_total", &[("cause", "reload")]) > 0);
    check_against_snapshot(&supervisor, "entry");
}

#[test]
fn metrics_still_count_jobs_from_forgotten_tenants() {
    let supervisor = Supervisor::start(
        "[bulkhead.apart]\ncommand = [\"MISBEHAVE\"]\ntenants = { isolate = true, max_active = 2, idle = \"5ms\" }\n",
    );
    let scraper = Scraper::of(&supervisor);
    run(async {
        let client = connect(&supervisor).await;
        let job = |tenant: &str| client.job("apart", "").tenant(tenant);
        for tenant in ["a", "b", "c"] {
            job(tenant).send().await.unwrap();
            assert_eq!(outcome(&job(tenant).operation("abort").send().await), "crashed/signal");
        }
        supervisor.resize("apart", r#"{"breaker": "forced_open"}"#);
        // Submits jobs for more tenants than the supervisor remembers.
        for number in 0..4500 {
            let refused = job(&format!("stranger {number}")).send().await;
            assert_eq!(outcome(&refused), "rejected/circuit_open");
        }
    });
    let page = scraper.finish();
    assert_eq!(page.sum("bulkhead_submitted_total", &[]), 4506);
    assert_eq!(page.sum("bulkhead_jobs_total", &[("outcome", "ok")]), 3);
    assert_eq!(page.sum("bulkhead_tenant_jobs_total", &[("tenant", "_other")]), 4506);
    check_against_snapshot(&supervisor, "apart");
}

// Alerts, dashboards and parsers.

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Returns the names of all metrics that the given text mentions.
fn named_in(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words
        .filter(|word| word.starts_with("bulkhead_") || word.starts_with("process_"))
        .map(str::to_owned)
        .collect()
}

#[test]
fn alerts_and_dashboard_use_existing_metrics() {
    let folder = tempfile::tempdir().unwrap();
    let token = folder.path().join("token");
    std::fs::write(&token, "a-token-of-the-tests").unwrap();
    std::fs::set_permissions(&token, std::fs::Permissions::from_mode(0o600)).unwrap();
    let bulkheads = format!("[[access]]\ntoken_file = \"token\"\n{TWO}");
    let supervisor = Supervisor::launch(folder, "jobs_http = \"127.0.0.1:0\"", &bulkheads).until_ready();
    let page = page(&supervisor);
    let known: BTreeSet<&str> =
        page.families.iter().flat_map(|family| &family.samples).map(|sample| sample.name.as_str()).collect();
    let dashboard = read("deploy/grafana/dashboard.json");
    let parsed: serde_json::Value = serde_json::from_str(&dashboard).unwrap();
    assert!(parsed["panels"].as_array().unwrap().len() > 8);
    assert!(
        named_in(&dashboard).contains("bulkhead_buffered_bytes"),
        "the dashboard shows how full the buffer is"
    );
    for text in [dashboard, read("deploy/prometheus/alerts.yml"), read("deploy/prometheus/alerts_test.yml")] {
        let named = named_in(&text);
        assert!(named.len() > 5, "{named:?}");
        for name in named {
            assert!(known.contains(name.as_str()), "{name}");
        }
    }
}

/// The tests in `alerts_test.yml` contain copies of two expressions, which must be the same as in the dashboard.
#[test]
fn alert_tests_contain_dashboard_expressions() {
    let dashboard: serde_json::Value = serde_json::from_str(&read("deploy/grafana/dashboard.json")).unwrap();
    let tests = read("deploy/prometheus/alerts_test.yml");
    let panels = dashboard["panels"].as_array().unwrap();
    for title in ["Service", "Breaker"] {
        let panel = panels.iter().rfind(|panel| panel["title"] == title).unwrap();
        let expression = panel["targets"][0]["expr"].as_str().unwrap();
        let expression = expression.replace(r#"instance=~"$instance", bulkhead=~"$bulkhead", "#, "");
        assert!(tests.contains(&format!("expr: '{expression}'")), "{title}: {expression}");
    }
}

#[test]
fn promtool_accepts_alert_rules_and_metrics() {
    let promtool = |arguments: &[&str]| Command::new("promtool").args(arguments).current_dir(root()).output();
    let Ok(checked) =
        promtool(&["check", "rules", "deploy/prometheus/alerts.yml", "deploy/prometheus/fleet-alerts.yml"])
    else {
        not_run!("promtool, which tests alert rules, is not installed: install Debian's package prometheus");
        return;
    };
    assert!(checked.status.success(), "{checked:?}");
    let tests = ["deploy/prometheus/alerts_test.yml", "deploy/prometheus/fleet-alerts_test.yml"];
    let tested = promtool(&["test", "rules", tests[0], tests[1]]).unwrap();
    assert!(
        tested.status.success(),
        "{}{}",
        String::from_utf8_lossy(&tested.stdout),
        String::from_utf8_lossy(&tested.stderr)
    );
    let supervisor = Supervisor::start(TWO);
    let (_, classic) = scrape_as(&admin(&supervisor), Some("text/plain"));
    let mut child = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(classic.as_bytes()).unwrap();
    let judged = child.wait_with_output().unwrap();
    // Exit status 3 reports only style problems.
    let said = String::from_utf8_lossy(&judged.stderr).into_owned();
    assert!(matches!(judged.status.code(), Some(0 | 3)), "{said}");
}

/// Python program that parses both metrics formats with Prometheus's Python library.
const PYTHON: &str = r#"
import sys
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client import parser as classic
hostile = sys.argv[3]
for path, parse in ((sys.argv[1], openmetrics), (sys.argv[2], classic)):
    with open(path, newline="\n") as page:
        families = list(parse.text_fd_to_metric_families(page))
    kinds = {family.name: family.type for family in families}
    assert kinds["bulkhead_jobs"] == "counter", kinds
    assert kinds["bulkhead_active_calls"] == "gauge", kinds
    assert kinds["bulkhead_queue_wait_seconds"] == "histogram", kinds
    samples = [sample for family in families for sample in family.samples]
    done = [s for s in samples if s.name == "bulkhead_tenant_jobs_total" and s.labels["outcome"] == "ok" and s.value]
    assert [(s.labels["tenant"], s.value) for s in done] == [(hostile, 1.0)], done
"#;

#[test]
fn prometheus_parsers_read_both_formats() {
    let folder = tempfile::tempdir().unwrap();
    let Some(python) = python(folder.path()) else {
        not_run!("prometheus_client is not installed, and pip cannot install it");
        return;
    };
    let hostile = "a\"} 1\n# EOF\\n";
    let supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\n[bulkhead.b.tenant.\"a\\\"} 1\\n# EOF\\\\n\"]\nmax_in_flight = 1\n",
    );
    run(async {
        connect(&supervisor).await.job("b", "").tenant(hostile).send().await.unwrap();
    });
    let paths = [(None, "open"), (Some("text/plain"), "classic")].map(|(accept, name)| {
        let path = folder.path().join(name);
        std::fs::write(&path, scrape_as(&admin(&supervisor), accept).1).unwrap();
        path
    });
    let read = Command::new(python).arg("-c").arg(PYTHON).args(&paths).arg(hostile).output().unwrap();
    assert!(read.status.success(), "{}", String::from_utf8_lossy(&read.stderr));
}

/// Returns a Python interpreter that can import Prometheus's library. If necessary, installs the library into a
/// virtual environment.
fn python(folder: &Path) -> Option<PathBuf> {
    let has_library = |python: &Path| {
        let tried = Command::new(python).args(["-c", "import prometheus_client.openmetrics"]).output();
        tried.is_ok_and(|tried| tried.status.success())
    };
    if has_library(Path::new("python3")) {
        return Some("python3".into());
    }
    let environment = folder.join("venv");
    Command::new("python3").arg("-m").arg("venv").arg(&environment).output().ok()?;
    let install = ["install", "--quiet", "--timeout", "10", "--retries", "0", "prometheus_client"];
    Command::new(environment.join("bin/pip")).args(install).output().ok()?;
    Some(environment.join("bin/python")).filter(|python| has_library(python))
}
