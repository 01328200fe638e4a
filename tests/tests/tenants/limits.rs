//! Limits of a single tenant, set in the file or live, with shared or isolated workers.

use std::process::Output;
use std::time::{Duration, Instant};

use bulkhead_client::Client;
use bulkhead_tests::tenants::{assert_balanced, isolated, part, patch, pids, wait_for_rest, wait_part};
use bulkhead_tests::{PATIENCE, Running, Supervisor, connect, outcome, overrun, run, spawn, wait_for};
use serde_json::{Value, json};

/// Returns the configuration of a bulkhead `b` whose tenants share its workers.
fn shared(keys: &str) -> String {
    format!("[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\ndeadline = \"60s\"\n{keys}\n")
}

fn hang(client: &Client, tenant: &str) -> Running {
    spawn(client.job("b", "").operation("hang").tenant(tenant))
}

/// Starts a job that appends a byte to the file `begun-TENANT` and ignores cancellation.
fn hold(client: &Client, tenant: &str) -> Running {
    let steps = format!("steps:count begun-{tenant};sleep 3600000");
    spawn(client.job("b", "").operation(steps).tenant(tenant))
}

/// Waits until `count` jobs of [`hold`] have begun and the supervisor no longer waits for any of the isolated tenant's
/// workers to begin a job. While the supervisor waits, the tenant's queue is longer.
fn wait_begun(supervisor: &Supervisor, tenant: &str, count: u64, max_queue: u64) {
    let file = format!("begun-{tenant}");
    wait_for(&format!("{count} jobs of {tenant} have begun"), || {
        (supervisor.file_bytes(&file) as u64 == count).then_some(())
    });
    wait_part(supervisor, tenant, "queue_capacity", max_queue);
}

/// Sends jobs that hang, one after another, until one of them raises `field` to the given value. Several attempts can
/// be needed, because on a busy machine the supervisor rejects jobs before the tenant has used up its share.
fn hang_until(
    supervisor: &Supervisor,
    client: &Client,
    tenant: &str,
    (field, value): (&str, u64),
) -> Running {
    let began = Instant::now();
    loop {
        assert!(began.elapsed() < PATIENCE, "{field} of {tenant} has never been {value}");
        let job = hang(client, tenant);
        let is_counted = || share(supervisor, tenant, field) == value;
        wait_for("the job is counted or has ended", || (is_counted() || job.is_finished()).then_some(()));
        if !job.is_finished() {
            return job;
        }
    }
}

async fn told(client: &Client, tenant: &str) -> String {
    outcome(&client.job("b", "").tenant(tenant).send().await)
}

/// Returns a field of a tenant's entry in the snapshot, or 0 if there is no entry.
fn share(supervisor: &Supervisor, tenant: &str, field: &str) -> u64 {
    let snapshot = supervisor.snapshot("b");
    let tenants = snapshot["tenants"].as_array().unwrap();
    let one = tenants.iter().find(|one| one["name"] == tenant);
    one.map_or(0, |one| one[field].as_u64().unwrap())
}

fn wait_share(supervisor: &Supervisor, tenant: &str, field: &str, value: u64) {
    wait_for(&format!("{field} of {tenant} is {value}"), || {
        (share(supervisor, tenant, field) == value).then_some(())
    });
}

fn resize(supervisor: &Supervisor, arguments: &[&str]) -> Output {
    supervisor.command().arg("resize").args(arguments).output().unwrap()
}

#[test]
fn tenant_table_sets_share_of_shared_workers() {
    let supervisor = Supervisor::start(&shared(
        "processes = 8\nmax_queue = 100\ntenants = { max_in_flight = 2, max_queue = 1 }\n\
         [bulkhead.b.tenant.acme]\nmax_in_flight = 4\nmax_queue = 3\n\
         [bulkhead.b.tenant.\"small fry\"]\nmax_in_flight = 1\nmax_queue = 0",
    ));
    supervisor.wait_number("b", "limit", 8);
    run(async {
        let client = connect(&supervisor).await;
        let mut running = Vec::new();
        for (tenant, in_flight, queued) in [("acme", 4, 3), ("anyone", 2, 1), ("small fry", 1, 0)] {
            for (field, most) in [("in_flight", in_flight), ("queued", queued)] {
                for number in 1..=most {
                    running.push(hang_until(&supervisor, &client, tenant, (field, number)));
                }
            }
            assert_eq!(told(&client, tenant).await, "rejected/tenant_quota", "{tenant}");
        }
        running.iter().for_each(Running::abort);
    });
}

/// The tenant's jobs ignore their deadlines, so the supervisor kills their workers. The replacement workers start
/// slowly.
#[test]
fn tenant_that_lost_a_worker_waits_for_replacement() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("go"), "").unwrap();
    let supervisor = Supervisor::launch(
        folder,
        "",
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\", \"slow-again\", \"starts\"]\nsandbox = { profile = \"none\" }\n\
         processes = 3\nmax_queue = 100\ndeadline = \"60s\"\ngrace = \"0s\"\ntenants = { max_in_flight = 1 }\n",
    )
    .until_ready();
    supervisor.wait_number("b", "limit", 3);
    // From now on, a new worker is not ready until this file exists again.
    std::fs::remove_file(supervisor.file("go")).unwrap();
    run(async {
        let client = connect(&supervisor).await;
        let ends_a_worker = || client.job("b", "").tenant("greedy").operation("steps:sleep 3600000");
        // The deadline leaves the job enough time to begin.
        let end = overrun(&ends_a_worker().deadline(Duration::from_secs(2))).await;
        assert!(outcome(&end).starts_with("deadline_exceeded"), "{end:?}");
        supervisor.wait_number("b", "limit", 2);
        let next = spawn(client.job("b", "").tenant("greedy").operation("steps:count begun"));
        wait_share(&supervisor, "greedy", "queued", 1);
        for _ in 0..5 {
            let end = ends_a_worker().deadline(Duration::from_millis(5)).send().await;
            assert_eq!(outcome(&end), "deadline_exceeded/queued");
            assert_eq!(told(&client, "other").await, "ok", "two workers serve the other tenants");
        }
        assert_eq!((share(&supervisor, "greedy", "queued"), supervisor.file_bytes("begun")), (1, 0));
        assert_eq!(supervisor.wait_events("worker_exited", 1).len(), 1, "only one worker has exited");
        supervisor.touch("go");
        assert_eq!(outcome(&next.await.unwrap()), "ok");
        supervisor.wait_number("b", "limit", 3);
    });
}

#[test]
fn tenant_table_overrides_the_rate_limit() {
    for general in ["rate_limit = { per_second = 0.01, burst = 2, per = \"tenant\" }", ""] {
        let supervisor = Supervisor::start(&shared(&format!(
            "{general}\n[bulkhead.b.tenant.acme]\nrate_limit = {{ per_second = 0.01, burst = 5 }}"
        )));
        supervisor.wait_number("b", "limit", 1);
        run(async {
            let client = connect(&supervisor).await;
            for _ in 0..5 {
                assert_eq!(told(&client, "acme").await, "ok");
            }
            assert_eq!(told(&client, "acme").await, "rejected/rate_limited");
            for tenant in ["a", "b", ""] {
                assert_eq!(
                    (told(&client, tenant).await, told(&client, tenant).await),
                    ("ok".into(), "ok".into())
                );
                let third = if general.is_empty() { "ok" } else { "rejected/rate_limited" };
                assert_eq!(told(&client, tenant).await, third, "{tenant}");
            }
            // A new common limit does not change a tenant with a separate limit.
            let more = r#"{"rate_limit": {"per_second": 1000, "burst": 1000, "per": "tenant"}}"#;
            assert_eq!(patch(&supervisor, "b", more).0, 200);
            assert_eq!(told(&client, "acme").await, "rejected/rate_limited");
            assert_eq!(told(&client, "c").await, "ok");
        });
    }
}

#[test]
fn raised_rate_limit_applies_to_the_next_job() {
    let keys = "max_in_flight = 100\nrate_limit = { per_second = 0.1, burst = 120, per = \"tenant\" }";
    for (path, body) in [
        ("b/tenants/acme", r#"{"rate_limit": {"per_second": 1000, "burst": 1000}}"#),
        ("b", r#"{"rate_limit": {"per_second": 1000, "burst": 1000}}"#),
    ] {
        let supervisor = Supervisor::start(&shared(keys));
        supervisor.wait_number("b", "limit", 100);
        run(async {
            let client = connect(&supervisor).await;
            let dear = client.job("b", "").tenant("acme").cost(120).send().await;
            assert_eq!(outcome(&dear), "ok");
            assert_eq!(told(&client, "acme").await, "rejected/rate_limited");
            assert_eq!(patch(&supervisor, path, body).0, 200);
            let next = client.job("b", "").tenant("acme").send().await;
            let wait = next.err().and_then(|error| error.retry_after()).unwrap_or_default();
            assert!(wait < Duration::from_secs(5), "{path}: retry_after is {wait:?}");
        });
    }
}

/// Reducing a tenant's share must not drop any jobs.
#[test]
fn larger_share_starts_the_tenants_waiting_jobs() {
    let supervisor = Supervisor::start(&shared(
        "processes = 6\nmax_queue = 100\ntenants = { max_in_flight = 1, max_queue = 50 }",
    ));
    supervisor.wait_number("b", "limit", 6);
    run(async {
        let client = connect(&supervisor).await;
        // Starts the jobs one after another, so that the first four are the jobs that run.
        let mut jobs = Vec::new();
        for _ in 0..8 {
            jobs.push(client.job("b", "").operation("hang").tenant("acme").start().await.unwrap());
        }
        let other: Vec<_> = (0..2).map(|_| hang(&client, "other")).collect();
        wait_share(&supervisor, "acme", "queued", 7);
        wait_share(&supervisor, "other", "queued", 1);
        // While a worker is slow to begin a job, the worker gets no further jobs and the queue is longer.
        jobs[0].progress().await.expect("the job reports progress when it starts");
        supervisor.wait_number("b", "queue_capacity", 100);
        // The resize has to start the jobs, because no other event would wake them.
        let (status, own) = patch(&supervisor, "b/tenants/acme", r#"{"max_in_flight": 4}"#);
        assert_eq!((status, &own), (200, &json!({"max_in_flight": 4})));
        // If a worker is slow to begin its job, the job returns to the queue for a moment. The test therefore waits
        // until all four run.
        for job in &mut jobs[1..4] {
            job.progress().await.expect("the job reports progress when it starts");
        }
        wait_share(&supervisor, "acme", "in_flight", 4);
        wait_share(&supervisor, "acme", "queued", 4);
        assert_eq!(share(&supervisor, "other", "queued"), 1, "the limit applies only to acme");

        let (status, own) = patch(&supervisor, "b/tenants/acme", r#"{"max_in_flight": 2, "max_queue": 1}"#);
        assert_eq!((status, &own), (200, &json!({"max_in_flight": 2, "max_queue": 1})));
        assert_eq!((share(&supervisor, "acme", "in_flight"), share(&supervisor, "acme", "queued")), (4, 4));
        assert_eq!(told(&client, "acme").await, "rejected/tenant_quota");
        // After two finished jobs, the tenant is at its new limit. The third finished job lets a waiting job start.
        for (in_flight, queued) in [(3, 4), (2, 4), (2, 3)] {
            drop(jobs.remove(0));
            wait_share(&supervisor, "acme", "in_flight", in_flight);
            wait_share(&supervisor, "acme", "queued", queued);
        }
        drop(jobs);
        other.iter().for_each(Running::abort);
        let changes = supervisor.wait_events("limits_changed", 2);
        let of_acme = |event: &Value| event["tenant"] == "acme" && event["bulkhead"] == "b";
        assert!(changes.len() == 2 && changes.iter().all(of_acme), "{changes:?}");
        assert_eq!((&changes[1]["max_in_flight"], &changes[1]["max_queue"]), (&2.into(), &1.into()));
    });
}

#[test]
fn tenant_table_overrides_limits_of_isolated_tenant() {
    let supervisor = Supervisor::start(&isolated(
        "max_active = 3",
        "max_queue = 1\nrate_limit = { per_second = 0.01, burst = 4 }\n\
         [bulkhead.b.tenant.acme]\nprocesses = 2\nmax_in_flight = 3\nmax_queue = 2\n\
         rate_limit = { per_second = 0.01, burst = 9 }",
    ));
    run(async {
        let client = connect(&supervisor).await;
        let mut running = Vec::new();
        for (tenant, limit, queued, workers) in [("acme", 6, 2, 2), ("other", 1, 1, 1)] {
            running.push(hold(&client, tenant));
            wait_part(&supervisor, tenant, "limit", limit);
            running.extend((1..limit + queued).map(|_| hold(&client, tenant)));
            wait_begun(&supervisor, tenant, limit, queued);
            wait_part(&supervisor, tenant, "in_flight", limit);
            wait_part(&supervisor, tenant, "queued", queued);
            assert_eq!(pids(&supervisor, tenant).len(), workers);
            assert_eq!(told(&client, tenant).await, "rejected/queue_full");
        }
        let snapshot = supervisor.snapshot("b");
        // The limit of each tenant, and the sum over both tenants.
        assert_eq!((&snapshot["max_queue"], &snapshot["queue_capacity"]), (&1.into(), &3.into()));
        assert_eq!(part(&supervisor, "acme")["max_queue"], 2);
        assert_eq!(told(&client, "acme").await, "rejected/rate_limited");
        assert_eq!(told(&client, "other").await, "rejected/queue_full");
        assert_eq!(told(&client, "other").await, "rejected/rate_limited");
        running.iter().for_each(Running::abort);
    });
}

#[test]
fn bulkhead_limits_must_fit_live_limits_of_isolated_tenants() {
    let keys = "processes = 2\nmax_in_flight = 4\nadaptive = { target = \"50ms\", min = 1, max = 4 }\nmax_queue = 1\n";
    let supervisor = Supervisor::start(&isolated("max_active = 3", keys));
    assert_eq!(patch(&supervisor, "b/tenants/acme", r#"{"max_in_flight": 2}"#).0, 200);
    // The tenant would have two permits, fewer than `adaptive.max`.
    let (status, problem) = patch(&supervisor, "b", r#"{"processes": 1}"#);
    assert_eq!(status, 400, "{problem}");
    assert_eq!(patch(&supervisor, "b/tenants/acme", r#"{"max_in_flight": 4}"#).0, 200);
    assert_eq!(patch(&supervisor, "b", r#"{"processes": 1}"#).0, 200);
}

/// A tenant's separate limit counts only once towards the maximum number of processes. The bulkhead's limit counts for
/// each other tenant.
#[test]
fn large_isolated_tenant_does_not_prevent_live_changes() {
    let keys = "processes = 1\nmax_queue = 1\n[bulkhead.b.tenant.big]\nprocesses = 20\n";
    let supervisor = Supervisor::start(&isolated("max_active = 1024", keys));
    let (status, snapshot) = patch(&supervisor, "b", r#"{"max_queue": 5, "breaker": "forced_open"}"#);
    assert_eq!((status, &snapshot["breaker"]), (200, &"forced_open".into()), "{snapshot}");
}

/// New limits must take effect immediately in running workers.
#[test]
fn live_limits_for_isolated_tenant_survive_idle_shutdown() {
    let supervisor = Supervisor::start(&isolated("max_active = 3, idle = \"300ms\"", "max_queue = 10"));
    run(async {
        let client = connect(&supervisor).await;
        let jobs: Vec<_> = (0..6).map(|_| hold(&client, "acme")).collect();
        let other: Vec<_> = (0..2).map(|_| hang(&client, "other")).collect();
        wait_part(&supervisor, "acme", "queued", 5);
        wait_part(&supervisor, "other", "queued", 1);
        assert_eq!(
            resize(&supervisor, &["b", "--tenant", "acme", "--max-in-flight", "2"]).status.code(),
            Some(0)
        );
        wait_part(&supervisor, "acme", "in_flight", 2);
        assert_eq!(
            resize(&supervisor, &["b", "--tenant", "acme", "--processes", "2"]).status.code(),
            Some(0)
        );
        wait_part(&supervisor, "acme", "in_flight", 4);
        wait_part(&supervisor, "acme", "queued", 2);
        wait_begun(&supervisor, "acme", 4, 10);
        // Common limits do not apply to a tenant with separate limits.
        let (status, snapshot) =
            patch(&supervisor, "b", r#"{"max_in_flight": 1, "processes": 1, "max_queue": 1}"#);
        assert_eq!(status, 200, "{snapshot}");
        let acme = part(&supervisor, "acme");
        assert_eq!((&acme["in_flight"], &acme["limit"], &acme["queued"]), (&4.into(), &4.into(), &2.into()));
        assert_eq!(acme["queue_capacity"], 1, "acme has no separate max_queue: {acme}");
        assert_eq!(part(&supervisor, "other")["in_flight"], 1);
        // Lower limits do not drop any jobs.
        let fewer = ["b", "--tenant", "acme", "--processes", "1", "--max-in-flight", "1", "--max-queue", "0"];
        assert_eq!(resize(&supervisor, &fewer).status.code(), Some(0));
        let acme = part(&supervisor, "acme");
        assert_eq!((&acme["in_flight"], &acme["queued"]), (&4.into(), &2.into()), "{acme}");
        assert_eq!(told(&client, "acme").await, "rejected/queue_full");
        assert!(jobs.iter().chain(&other).all(|job| !job.is_finished()));
        jobs.iter().chain(&other).for_each(Running::abort);

        wait_for_rest(&supervisor);
        assert_eq!(patch(&supervisor, "b/tenants/acme", r#"{"processes": 3}"#).0, 200);
        assert_eq!(patch(&supervisor, "b/tenants/later", r#"{"processes": 2, "max_in_flight": 2}"#).0, 200);
        assert_eq!(patch(&supervisor, "b", r#"{"processes": 2}"#).0, 200);
        for (tenant, limit) in [("acme", 3), ("later", 4), ("other", 2)] {
            assert_eq!(told(&client, tenant).await, "ok");
            let keep = hang(&client, tenant);
            wait_part(&supervisor, tenant, "limit", limit);
            keep.abort();
        }
        assert_balanced(&supervisor.snapshot("b"));
    });
}

#[test]
fn tenant_limits_accept_unusual_tenant_names() {
    let supervisor = Supervisor::start(&isolated("max_active = 20", "max_in_flight = 2"));
    let long = "l".repeat(256);
    run(async {
        let client = connect(&supervisor).await;
        for name in ["acme", "a b", "a/b", "ünï→😀", "..", "%2F", "a?b#c&d=e+f", "\"\\\n", &long] {
            let done = resize(&supervisor, &["b", "--tenant", name, "--max-in-flight", "3"]);
            assert_eq!(done.status.code(), Some(0), "{name}: {done:?}");
            assert_eq!(told(&client, name).await, "ok");
            let shown =
                supervisor.command().args(["--json", "status", "b", "--tenant", name]).output().unwrap();
            let shown: Value = serde_json::from_slice(&shown.stdout).unwrap();
            assert_eq!((&shown["tenant"], &shown["limit"]), (&name.into(), &3.into()), "{shown}");
            let last = wait_for("there is an event about the change", || {
                supervisor.events("limits_changed").pop().filter(|event| event["tenant"] == name)
            });
            assert_eq!((&last["tenant"], &last["max_in_flight"]), (&name.into(), &3.into()), "{last}");
        }
        // A handwritten path with every byte percent-encoded.
        assert_eq!(patch(&supervisor, "b/tenants/%61%2f%62", r#"{"max_in_flight": 4}"#).0, 200);
        wait_part(&supervisor, "a/b", "limit", 4);
    });
    let before = supervisor.wait_events("limits_changed", 10).len();
    let too_long = "l".repeat(257);
    for (path, status) in [
        (format!("b/tenants/{too_long}"), 400),
        ("b/tenants/%00".into(), 400),
        ("b/tenants/%ff%fe".into(), 400),
        ("none/tenants/acme".into(), 404),
    ] {
        let (told, problem) = patch(&supervisor, &path, r#"{"max_in_flight": 3}"#);
        assert_eq!((told, &problem["status"]), (status, &status.into()), "{path}: {problem}");
    }
    let (status, problem) = patch(&supervisor, "b/tenants/", r#"{"max_in_flight": 3}"#);
    assert!(matches!(status, 400 | 404), "{problem}");
    for tenant in ["", &too_long] {
        let refused = resize(&supervisor, &["b", "--tenant", tenant, "--max-in-flight", "3"]);
        assert!(matches!(refused.status.code(), Some(2 | 65 | 66)), "{refused:?}");
        assert!(!refused.stderr.is_empty());
    }
    assert_eq!(supervisor.events("limits_changed").len(), before);
}

#[test]
fn invalid_tenant_limits_are_rejected_without_effect() {
    let supervisor = Supervisor::start(&format!(
        "{}[bulkhead.common]\ncommand = [\"MISBEHAVE\"]\nrate_limit = {{ per_second = 5 }}\n",
        isolated("max_active = 3", "")
    ));
    for (path, body, why) in [
        ("b/tenants/acme", "", "not JSON"),
        ("b/tenants/acme", "[]", ""),
        ("b/tenants/acme", r#"{"max_que": 1}"#, "max_que"),
        ("b/tenants/acme", r#"{"breaker": "auto"}"#, "breaker"),
        ("b/tenants/acme", r#"{"max_queue": -1}"#, "max_queue"),
        ("b/tenants/acme", r#"{"max_queue": 1.5}"#, "max_queue"),
        ("b/tenants/acme", r#"{"max_queue": 1000001}"#, "max_queue"),
        ("b/tenants/acme", r#"{"max_in_flight": 0}"#, "max_in_flight"),
        ("b/tenants/acme", r#"{"max_in_flight": 4097}"#, "max_in_flight"),
        ("b/tenants/acme", r#"{"processes": 0}"#, "processes"),
        ("b/tenants/acme", r#"{"processes": 1025}"#, "processes"),
        ("b/tenants/acme", r#"{"processes": 1024, "max_in_flight": 4096}"#, "at most"),
        ("b/tenants/acme", r#"{"rate_limit": {"per_second": 0}}"#, "above 0"),
        ("b/tenants/acme", r#"{"rate_limit": {"per_second": 1, "burst": 0}}"#, "burst"),
        ("b/tenants/acme", r#"{"rate_limit": {"per_second": 1, "per": "tenant"}}"#, "per"),
        ("common/tenants/acme", r#"{"processes": 2}"#, "isolate"),
        ("common/tenants/acme", r#"{"rate_limit": {"per_second": 1}}"#, "per"),
    ] {
        let (status, problem) = patch(&supervisor, path, body);
        assert_eq!(status, 400, "{path} {body}: {problem}");
        assert!(problem["detail"].as_str().unwrap().contains(why), "{path} {body}: {problem}");
    }
    assert!(supervisor.events("limits_changed").is_empty());
    // A request that is partly invalid changes nothing.
    let (status, _) = patch(&supervisor, "common/tenants/acme", r#"{"max_in_flight": 1, "processes": 2}"#);
    assert_eq!(status, 400);
    let (status, own) = patch(&supervisor, "common/tenants/acme", r#"{"max_queue": 7}"#);
    assert_eq!((status, own), (200, json!({"max_queue": 7})));
}

/// The test covers a tenant that shares the bulkhead's workers with other tenants.
#[test]
fn tenant_share_has_same_maximum_live_and_in_configuration() {
    let own = "[bulkhead.b.tenant.acme]\nmax_in_flight = 1000000";
    let supervisor = Supervisor::start(&shared(own));
    let (status, told) = patch(&supervisor, "b/tenants/acme", r#"{"max_in_flight": 5000}"#);
    assert_eq!((status, &told["max_in_flight"]), (200, &5000.into()), "{told}");
}

#[test]
fn tenant_queue_without_permits_is_rejected() {
    let general = "max_in_flight = 0";
    let file = format!("{}[bulkhead.b.tenant.acme]\nmax_queue = 5\n", isolated("max_active = 64", general));
    let folder = tempfile::tempdir().unwrap();
    let mut refused = Supervisor::launch(folder, "", &file);
    assert_eq!(refused.wait().code(), Some(2), "a queue that is never served is a configuration error");
    let supervisor = Supervisor::start(&isolated("max_active = 64", general));
    let (status, told) = patch(&supervisor, "b/tenants/acme", r#"{"max_queue": 5}"#);
    assert_eq!(status, 400, "{told}");
}

#[test]
fn bulkhead_without_permits_conflicts_with_tenant_queue() {
    let own = "[bulkhead.b.tenant.acme]\nmax_queue = 5";
    let supervisor = Supervisor::start(&isolated("max_active = 64", own));
    let change = r#"{"max_in_flight": 0}"#;
    let (status, told) = patch(&supervisor, "b", change);
    assert_eq!(status, 400, "{told}");
    let detail = told["detail"].as_str().unwrap();
    assert!(detail.contains("tenant 'acme'") && detail.contains("max_queue"), "{detail}");
    assert_eq!(patch(&supervisor, "b/tenants/acme", r#"{"max_in_flight": 1}"#).0, 200);
    assert_eq!(patch(&supervisor, "b", change).0, 200);
}

#[test]
fn bulkhead_wide_rate_limit_conflicts_with_tenant_rate_limit() {
    let own = "[bulkhead.b.tenant.acme]\nrate_limit = { per_second = 5 }";
    let tenant = "rate_limit = { per_second = 5, per = \"tenant\" }";
    let supervisor = Supervisor::start(&shared(&format!("{tenant}\n{own}")));
    let (status, told) = patch(&supervisor, "b", r#"{"rate_limit": {"per_second": 5, "per": "bulkhead"}}"#);
    assert_eq!(status, 400, "{told}");
}

#[test]
fn changing_limits_under_load_loses_no_jobs() {
    let supervisor = Supervisor::start(&isolated("max_active = 2, idle = \"20ms\"", "max_queue = 200"));
    run(async {
        let client = connect(&supervisor).await;
        let jobs: Vec<_> = (0..200)
            .map(|n: u32| {
                let tenant = if n.is_multiple_of(2) { "a" } else { "b" };
                spawn(client.job("b", "3").operation("sleep").tenant(tenant))
            })
            .collect();
        for round in 0..30 {
            let numbers = json!({"processes": 1 + round % 3, "max_in_flight": 1 + round % 4}).to_string();
            let path = ["b/tenants/a", "b", "b/tenants/b"][round % 3];
            assert_eq!(patch(&supervisor, path, &numbers).0, 200);
        }
        for job in jobs {
            assert_eq!(outcome(&tokio::time::timeout(PATIENCE, job).await.unwrap().unwrap()), "ok");
        }
        let all = supervisor.snapshot("b");
        assert_eq!((&all["done"], &all["submitted"]), (&200.into(), &200.into()), "{all}");
        wait_for_rest(&supervisor);
    });
}
