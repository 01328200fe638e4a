//! Failures of isolated tenants: retries, quarantine, failed starts, breakers that close again, and
//! fallbacks.

use std::time::{Duration, Instant};

use bulkhead_client::Client;
use bulkhead_tests::confined::{DEFAULT_LAYERS, has_layers, is_root};
use bulkhead_tests::tenants::{assert_balanced, isolated, part, pids, wait_for_rest, wait_part};
use bulkhead_tests::{
    Ended, PATIENCE, Running, Supervisor, connect, is_alive, kill_pid, outcome, run, spawn, wait_for,
};
use nix::sys::signal::Signal;

async fn send(client: &Client, tenant: &str, operation: &str) -> Ended {
    client.job("b", "").operation(operation).tenant(tenant).send().await
}

fn hang(client: &Client, bulkhead: &str, tenant: &str) -> Running {
    spawn(client.job(bulkhead, "").operation("hang").tenant(tenant))
}

/// Sends a job that succeeds. Then sends a job that kills its first worker and is retried in the next worker.
async fn kill_own(supervisor: &Supervisor, client: &Client, tenant: &str) -> Ended {
    assert_eq!(outcome(&send(client, tenant, "").await), "ok");
    supervisor.touch("first");
    let file = supervisor.file("first").to_str().unwrap().to_owned();
    client.job("b", file).operation("die-once").tenant(tenant).idempotent(true).send().await
}

#[test]
fn retry_runs_in_worker_of_same_tenant() {
    let supervisor = Supervisor::start(&isolated(
        "max_active = 2",
        "max_queue = 5\nretry = { attempts = 2, budget = 1.0 }",
    ));
    run(async {
        let client = connect(&supervisor).await;
        assert_eq!(outcome(&send(&client, "quiet", "").await), "ok");
        let quiet = pids(&supervisor, "quiet");
        let told = kill_own(&supervisor, &client, "loud").await.unwrap();
        assert_eq!(told.outcome().attempts, 2);
        assert_eq!(told.outcome().worker_pid, Some(pids(&supervisor, "loud")[0]));
        assert_eq!(pids(&supervisor, "quiet"), quiet);
        let (loud, quiet) = (part(&supervisor, "loud"), part(&supervisor, "quiet"));
        assert_eq!((&loud["retries"], &loud["done"], &loud["crashed"]), (&1.into(), &2.into(), &0.into()));
        assert_eq!((&quiet["retries"], &quiet["restarts"]), (&0.into(), &0.into()));
        let retried = supervisor.wait_events("job_retried", 1);
        assert_eq!((retried.len(), &retried[0]["tenant"]), (1, &"loud".into()), "{retried:?}");
        // A crash in the last attempt is final.
        let crash = client.job("b", "").operation("abort").tenant("loud").idempotent(true).send().await;
        assert_eq!(
            (outcome(&crash).as_str(), crash.unwrap_err().outcome().unwrap().attempts),
            ("crashed/signal", 2)
        );
    });
}

/// A quarantined payload stays in quarantine until a reset, even if the tenant has no workers in the meantime.
#[test]
fn poison_payload_is_quarantined_for_its_tenant_only() {
    let supervisor = Supervisor::start(&isolated(
        "max_active = 3, idle = \"100ms\"",
        "max_queue = 5\npoison = { crashes = 2 }",
    ));
    run(async {
        let client = connect(&supervisor).await;
        for _ in 0..2 {
            assert_eq!(outcome(&send(&client, "a", "abort").await), "crashed/signal");
        }
        assert_eq!(outcome(&send(&client, "a", "abort").await), "rejected/quarantined");
        assert_eq!(outcome(&send(&client, "a", "").await), "ok");
        assert_eq!(outcome(&send(&client, "b", "abort").await), "crashed/signal");
        let counts = ["a", "b"].map(|tenant| part(&supervisor, tenant)["quarantined"].clone());
        assert_eq!((&counts[0], &counts[1]), (&1.into(), &0.into()));
        assert_eq!(supervisor.number("b", "quarantined"), 1);
        let told = supervisor.wait_events("job_quarantined", 1);
        assert_eq!((told.len(), &told[0]["tenant"]), (1, &"a".into()), "{told:?}");

        wait_for_rest(&supervisor);
        assert_eq!(outcome(&send(&client, "a", "abort").await), "rejected/quarantined");
        wait_for_rest(&supervisor);
        assert_eq!(supervisor.post("/v1/bulkheads/b/reset").0, 200);
        assert_eq!(supervisor.number("b", "quarantined"), 0);
        assert_eq!(outcome(&send(&client, "a", "abort").await), "crashed/signal");
    });
}

/// Returns the configuration of a bulkhead whose workers fail to start while the file `marker` exists.
fn failing_while(marker: &std::path::Path, tenants: &str, more: &str) -> String {
    let script = format!("test -e {} && exit 3; exec 'MISBEHAVE'", marker.display());
    let restart = "restart = { max = 1, within = \"10m\", backoff = \"10ms\", backoff_max = \"10m\" }";
    isolated(tenants, &format!("{restart}\n{more}"))
        .replace("[\"MISBEHAVE\"]", &format!("[\"/bin/sh\", \"-c\", \"{script}\"]"))
}

#[test]
fn failed_starts_of_one_tenant_do_not_affect_others() {
    let folder = tempfile::tempdir().unwrap();
    let marker = folder.path().join("broken");
    let supervisor = Supervisor::start(&failing_while(&marker, "max_active = 3", "max_queue = 5"));
    run(async {
        let client = connect(&supervisor).await;
        assert_eq!(outcome(&send(&client, "well", "").await), "ok");
        let well = pids(&supervisor, "well");
        std::fs::write(&marker, "").unwrap();
        let refused = send(&client, "ill", "").await;
        assert_eq!(outcome(&refused), "rejected/unavailable");
        assert!(refused.unwrap_err().to_string().contains("status 3"));
        assert_eq!(outcome(&send(&client, "well", "").await), "ok");
        assert_eq!(pids(&supervisor, "well"), well);
        let (ill, all) = (part(&supervisor, "ill"), supervisor.snapshot("b"));
        assert_eq!((&ill["state"], &all["state"]), (&"failed".into(), &"degraded".into()), "{ill}");
        assert!(all["detail"].as_str().unwrap().contains("status 3"), "{all}");
        assert_eq!(part(&supervisor, "well")["state"], "ready");
        let (status, body) = supervisor.try_get("/readyz").unwrap();
        assert!(status == 200 && body.contains("degraded"), "{body}");
        let failed = supervisor.wait_events("bulkhead_failed", 1);
        assert_eq!((failed.len(), &failed[0]["tenant"]), (1, &"ill".into()), "{failed:?}");

        std::fs::remove_file(&marker).unwrap();
        assert_eq!(outcome(&send(&client, "ill", "").await), "rejected/unavailable");
        assert_eq!(supervisor.post("/v1/bulkheads/b/reset").0, 200);
        assert_eq!(outcome(&send(&client, "ill", "").await), "ok");
        assert_eq!(supervisor.snapshot("b")["state"], "ready");
        assert_balanced(&supervisor.snapshot("b"));
    });
}

/// The states show a tenant's failure for as long as its slots reject jobs, even after `idle` without jobs.
#[test]
fn failed_tenant_is_shown_after_idle_time() {
    let folder = tempfile::tempdir().unwrap();
    let marker = folder.path().join("broken");
    std::fs::write(&marker, "").unwrap();
    let tenants = "max_active = 3, idle = \"20ms\"";
    let supervisor = Supervisor::start(&failing_while(&marker, tenants, "max_queue = 5"));
    run(async {
        let client = connect(&supervisor).await;
        assert_eq!(outcome(&send(&client, "ill", "").await), "rejected/unavailable");
        // The capacity of the queue is zero once the tenant's workers have been stopped.
        wait_for("the tenant is idle", || (part(&supervisor, "ill")["queue_capacity"] == 0).then_some(()));
        assert_eq!(outcome(&send(&client, "ill", "").await), "rejected/unavailable");
        wait_for("the tenant is idle", || (part(&supervisor, "ill")["queue_capacity"] == 0).then_some(()));
        let (ill, all) = (part(&supervisor, "ill"), supervisor.snapshot("b"));
        assert_eq!((&ill["state"], &all["state"]), (&"failed".into(), &"degraded".into()), "{ill} {all}");
        assert!(all["detail"].as_str().unwrap().contains("status 3"), "{all}");
        let (status, body) = supervisor.try_get("/readyz?bulkhead=b").unwrap();
        assert!(status == 200 && body.contains("degraded"), "{body}");

        std::fs::remove_file(&marker).unwrap();
        assert_eq!(supervisor.post("/v1/bulkheads/b/reset").0, 200);
        assert_eq!(supervisor.snapshot("b")["state"], "ready");
        assert_eq!(outcome(&send(&client, "ill", "").await), "ok");
    });
}

/// A worker waits until a user ID is free. The shortage does not count as a failed start.
#[test]
fn tenant_waits_for_user_id_of_other_tenant() {
    if !is_root() || !has_layers(DEFAULT_LAYERS) {
        return;
    }
    let restart = "restart = { max = 1, backoff_max = \"10m\", backoff = \"10ms\", within = \"10m\" }";
    let bulkhead = isolated("max_active = 3, idle = \"500ms\"", &format!("{restart}\nmax_queue = 5"));
    let ids = "worker_uids = \"60604-60604\"";
    let supervisor = Supervisor::start_with(ids, &bulkhead.replace("\"none\"", "\"default\""));
    run(async {
        let client = connect(&supervisor).await;
        for tenant in ["a", "b", "a"] {
            assert_eq!(outcome(&send(&client, tenant, "").await), "ok", "{}", supervisor.log());
        }
    });
}

#[test]
fn restart_backoff_survives_idle_time() {
    let folder = tempfile::tempdir().unwrap();
    let marker = folder.path().join("broken");
    std::fs::write(&marker, "").unwrap();
    let supervisor = Supervisor::start(&failing_while(&marker, "max_active = 3, idle = \"20ms\"", ""));
    run(async {
        let client = connect(&supervisor).await;
        // The pauses exceed `idle`.
        for _ in 0..15 {
            assert_eq!(outcome(&send(&client, "ill", "").await), "rejected/unavailable");
            tokio::time::sleep(Duration::from_millis(60)).await;
        }
        let starts = supervisor.events("worker_started").len();
        assert!(starts <= 3, "{starts} starts, and the next probe was due in ten minutes");
    });
}

#[test]
fn breaker_closes_even_if_worker_start_exceeds_idle_time() {
    let supervisor = Supervisor::start(
        &isolated(
            "max_active = 3, idle = \"100ms\"",
            "max_queue = 5\nbreaker = { window = \"5m\", min_calls = 1, open_for = \"100ms\" }",
        )
        .replace("[\"MISBEHAVE\"]", "[\"/bin/sh\", \"-c\", \"/bin/sleep 0.5; exec 'MISBEHAVE'\"]"),
    );
    run(async {
        let client = connect(&supervisor).await;
        assert_eq!(outcome(&send(&client, "a", "abort").await), "crashed/signal");
        let began = Instant::now();
        let mut refusals = 0;
        while outcome(&send(&client, "a", "").await) != "ok" {
            refusals += 1;
            tokio::time::sleep(Duration::from_millis(20)).await;
            // If `idle` stopped a worker that is still starting, the breaker's probe would never run.
            assert!(began.elapsed() < PATIENCE, "{refusals} rejections, but no probe");
        }
    });
}

#[test]
fn isolated_fallback_isolates_guest_jobs_by_tenant() {
    let supervisor = Supervisor::start(
        "[bulkhead.entry]\ncommand = [\"MISBEHAVE\"]\nfallback = [\"b\"]\ndeadline = \"60s\"\n\
         rate_limit = { per_second = 0.01, burst = 50, per = \"tenant\" }\n\
         [bulkhead.b]\ncommand = [\"MISBEHAVE\"]\ndeadline = \"60s\"\n\
         rate_limit = { per_second = 0.01, burst = 1 }\n\
         tenants = { isolate = true, max_active = 2, idle = \"100ms\" }\n",
    );
    supervisor.wait_number("entry", "limit", 1);
    run(async {
        let client = connect(&supervisor).await;
        let busy = hang(&client, "entry", "busy");
        supervisor.wait_number("entry", "in_flight", 1);
        let mut served = Vec::new();
        for round in 0..3 {
            for tenant in ["a", "b"] {
                let reply = client.job("entry", "").tenant(tenant).send().await.unwrap();
                assert_eq!(reply.outcome().bulkhead, "b", "round {round}");
                served.push((tenant, reply.outcome().worker_pid.unwrap()));
            }
            // The fallback's rate limit does not count diverted jobs. The tenants' idle workers exit nevertheless.
            wait_for("the tenants' workers have exited", || {
                supervisor.worker_pids("b").is_empty().then_some(())
            });
        }
        for (tenant, pid) in &served {
            assert!(!served.iter().any(|(other, theirs)| other != tenant && pid == theirs), "{served:?}");
            assert_eq!(
                part(&supervisor, tenant)["submitted"],
                0,
                "the job counts in the bulkhead that the client named"
            );
        }
        // If the fallback is full too, the client gets the first bulkhead's reject reason.
        let both = ["x", "y"].map(|tenant| hang(&client, "entry", tenant));
        supervisor.wait_number("b", "in_flight", 2);
        let refused = client.job("entry", "").tenant("z").send().await;
        assert_eq!(outcome(&refused), "rejected/queue_full");
        assert_eq!(refused.unwrap_err().outcome().unwrap().bulkhead, "entry");
        both.iter().for_each(Running::abort);
        busy.abort();
        supervisor.wait_number("entry", "cancelled", 3);
        supervisor.wait_number("entry", "elsewhere", 0);
        let entry = supervisor.snapshot("entry");
        assert_eq!((&entry["submitted"], &entry["done"]), (&10.into(), &6.into()), "{entry}");
        assert_eq!(entry["rejected"]["queue_full"], 1, "{entry}");
        assert_eq!(supervisor.number("b", "submitted"), 0);
    });
}

/// Returns the configuration of a bulkhead `b` that isolates its tenants and has room for one tenant, and of the
/// fallback `safe`, whose tenants share its workers.
fn with_fallback(entry: &str, safe: &str) -> String {
    format!(
        "{}[bulkhead.safe]\ncommand = [\"MISBEHAVE\"]\ndeadline = \"60s\"\n{safe}\n",
        isolated("max_active = 1, idle = \"100ms\"", &format!("fallback = [\"safe\"]\n{entry}"))
    )
}

/// Each job must be counted once, in the bulkhead that the client named.
#[test]
fn fallback_serves_tenant_beyond_max_active() {
    let supervisor = Supervisor::start(&with_fallback("", "max_queue = 20"));
    supervisor.wait_number("safe", "limit", 1);
    run(async {
        let client = connect(&supervisor).await;
        let busy = hang(&client, "b", "busy");
        wait_part(&supervisor, "busy", "in_flight", 1);
        for tenant in ["a", "a", "b"] {
            let reply = client.job("b", "").tenant(tenant).send().await.unwrap();
            assert_eq!(reply.outcome().bulkhead, "safe");
        }
        assert_eq!(outcome(&send(&client, "a", "fail").await), "failed/bad_input");
        let a = part(&supervisor, "a");
        assert_eq!((&a["submitted"], &a["done"], &a["failed"]), (&3.into(), &2.into(), &1.into()), "{a}");
        assert_eq!(supervisor.number("safe", "submitted"), 0);
        busy.abort();
        wait_for("the tenants' workers have exited", || supervisor.worker_pids("b").is_empty().then_some(()));
        // While the bulkhead drains, all jobs go to the fallback.
        assert_eq!(supervisor.post("/v1/bulkheads/b/drain").0, 200);
        for tenant in ["a", "new"] {
            let reply = client.job("b", "").tenant(tenant).send().await.unwrap();
            assert_eq!(reply.outcome().bulkhead, "safe");
        }
        let all = supervisor.snapshot("b");
        assert_eq!((&all["submitted"], &all["done"], &all["elsewhere"]), (&7.into(), &5.into(), &0.into()));
        assert_balanced(&all);
        let used = supervisor.events("fallback_used");
        assert!(used.iter().all(|event| event["bulkhead"] == "b" && event["target"] == "safe"), "{used:?}");
    });
}

/// The supervisor keeps the tenant's record even if jobs of many other tenants arrive.
#[test]
fn tenant_with_job_in_fallback_is_remembered() {
    let supervisor = Supervisor::start(&with_fallback("deadline_max = \"1h\"", ""));
    supervisor.wait_number("safe", "limit", 1);
    run(async {
        let client = connect(&supervisor).await;
        // Both jobs must outlast all others, even on a busy machine.
        let hang = |tenant: &str| {
            client.job("b", "").operation("hang").tenant(tenant).deadline(Duration::from_secs(3600))
        };
        let busy = spawn(hang("busy"));
        wait_part(&supervisor, "busy", "in_flight", 1);
        // Waits until the job has begun, because an unread job would go to the next worker.
        let mut away = hang("away").start().await.unwrap();
        away.progress().await.expect("the job reports progress when it starts");
        wait_part(&supervisor, "away", "elsewhere", 1);
        supervisor.wait_number("safe", "in_flight", 1);
        for tenant in 0..5_000 {
            let refused = send(&client, &format!("tenant {tenant}"), "").await;
            assert_eq!(outcome(&refused), "rejected/unavailable");
        }
        assert_eq!(supervisor.try_get("/v1/bulkheads/b?tenant=tenant%200").unwrap().0, 404);
        assert_eq!(part(&supervisor, "away")["elsewhere"], 1);
        assert_balanced(&supervisor.snapshot("b"));
        kill_pid(supervisor.worker_pids("safe")[0], Signal::SIGKILL);
        let told = away.await;
        assert_eq!(outcome(&told), "crashed/signal");
        assert_eq!(told.unwrap_err().outcome().unwrap().bulkhead, "safe");
        let away = part(&supervisor, "away");
        assert_eq!(
            (&away["submitted"], &away["crashed"], &away["elsewhere"]),
            (&1.into(), &1.into(), &0.into())
        );
        busy.abort();
        wait_part(&supervisor, "busy", "cancelled", 1);
        let all = supervisor.snapshot("b");
        assert_eq!(
            (&all["submitted"], &all["crashed"], &all["cancelled"]),
            (&5002.into(), &1.into(), &1.into())
        );
        assert_balanced(&all);
    });
}

#[test]
fn job_that_crashed_isolated_worker_is_retried_in_fallback() {
    let supervisor = Supervisor::start(&with_fallback("max_queue = 5", "max_queue = 5"));
    supervisor.wait_number("safe", "limit", 1);
    run(async {
        let client = connect(&supervisor).await;
        let told = kill_own(&supervisor, &client, "a").await.unwrap();
        assert_eq!((told.outcome().bulkhead.as_str(), told.outcome().attempts), ("safe", 2));
        let a = part(&supervisor, "a");
        assert_eq!((&a["submitted"], &a["done"], &a["crashed"]), (&2.into(), &2.into(), &0.into()), "{a}");
        // A job that is not idempotent is not retried.
        let safe = supervisor.worker_pids("safe");
        let crash = send(&client, "a", "abort").await.unwrap_err();
        assert_eq!((crash.exit_code(), crash.outcome().unwrap().attempts), (70, 1));
        assert!(supervisor.worker_pids("safe") == safe && is_alive(safe[0]));
        wait_for("the crash is counted", || (part(&supervisor, "a")["crashed"] == 1).then_some(()));
        assert_balanced(&supervisor.snapshot("b"));
    });
}
