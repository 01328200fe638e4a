//! Isolated tenants. Each tenant has separate workers, permits, queue, rate limit and breaker, and no tenant affects
//! another.

use std::collections::BTreeMap;
use std::time::Duration;

use bulkhead_client::Client;
use bulkhead_tests::tenants::{
    assert_balanced, isolated, outcomes, part, patch, pids, wait_for_rest, wait_part,
};
use bulkhead_tests::{
    Running, Supervisor, children, connect, is_alive, outcome, overrun, run, spawn, tally, wait_for,
};
use serde_json::Value;

async fn pid_of(client: &Client, tenant: &str) -> u32 {
    let reply = client.job("b", "").operation("pid").tenant(tenant).send().await.unwrap();
    std::str::from_utf8(reply.payload()).unwrap().parse().unwrap()
}

/// A worker that is started when `file` exists.
fn command_after(file: &str) -> String {
    format!(
        "command = [\"/bin/sh\", \"-c\", \"while [ ! -e {file} ]; do sleep 0.01; done; exec MISBEHAVE\"]\n\
         start = {{ handshake = \"120s\" }}\ndeadline = \"120s\"\nsandbox = {{ profile = \"none\" }}\n"
    )
}

#[test]
fn supervisor_becomes_ready_while_workers_of_tenants_start() {
    let isolated = format!("[bulkhead.a]\n{}tenants = {{ isolate = true }}\n", command_after("go-a"));
    let bulkheads = format!("{isolated}[bulkhead.b]\n{}", command_after("go-b"));
    let supervisor = Supervisor::launch(tempfile::tempdir().unwrap(), "", &bulkheads);
    wait_for("the supervisor serves jobs", || supervisor.try_get("/v1/bulkheads/a").map(drop));
    run(async {
        let client = connect(&supervisor).await;
        let job = spawn(client.job("a", "x").tenant("acme"));
        wait_for("the tenant's worker is starting", || {
            (supervisor.worker_pids("a").len() == 1).then_some(())
        });
        supervisor.touch("go-b");
        let supervisor = supervisor.until_ready();
        supervisor.touch("go-a");
        assert_eq!(job.await.unwrap().unwrap().payload(), b"x");
    });
}

#[test]
fn no_worker_is_started_before_the_first_job() {
    let supervisor = Supervisor::start(&isolated("max_active = 3", "processes = 2"));
    for path in ["/readyz", "/readyz?bulkhead=b"] {
        assert_eq!(supervisor.try_get(path).unwrap().0, 200, "{path}");
    }
    assert!(supervisor.worker_pids("b").is_empty());
    // A keeper that has just started may have another child for a moment.
    wait_for_rest(&supervisor);
    assert!(supervisor.events("worker_started").is_empty());
    assert_eq!(supervisor.snapshot("b")["state"], "ready");
    run(async {
        let client = connect(&supervisor).await;
        // The first job waits for the first worker even without a queue.
        let reply = client.job("b", "x").tenant("acme").send().await.unwrap();
        assert_eq!((reply.payload(), reply.outcome().attempts), (&b"x"[..], 1));
        wait_part(&supervisor, "acme", "limit", 2);
        assert_eq!(children(supervisor.keeper()).len(), 2);
    });
}

#[test]
fn tenants_never_share_a_process() {
    let supervisor =
        Supervisor::start(&isolated("max_active = 5", "processes = 2\nmax_in_flight = 2\nmax_queue = 100"));
    run(async {
        let client = connect(&supervisor).await;
        let names = ["", "a", "A", "a ", "b"];
        let jobs: Vec<_> = (0..100)
            .map(|number: usize| {
                let tenant = names[number % names.len()];
                (tenant, spawn(client.job("b", "").operation("pid").tenant(tenant)))
            })
            .collect();
        let mut owners = BTreeMap::new();
        for (tenant, job) in jobs {
            let pid = String::from_utf8(job.await.unwrap().unwrap().payload().to_vec()).unwrap();
            let owner = *owners.entry(pid.clone()).or_insert(tenant);
            assert_eq!(owner, tenant, "worker {pid} serves both tenants");
        }
        assert_eq!(tally(owners.values().copied()).len(), names.len(), "{owners:?}");
        let snapshot = supervisor.snapshot("b");
        for worker in snapshot["workers"].as_array().unwrap() {
            if let Some(owner) = owners.get(&worker["pid"].to_string()) {
                assert_eq!(worker["tenant"], *owner, "{worker}");
            }
        }
        // Jobs without a tenant name form a separate tenant.
        assert_eq!(part(&supervisor, "")["done"], 20);
        assert_eq!(part(&supervisor, "a%20")["done"], 20);
        assert_balanced(&snapshot);
    });
}

/// A saturated tenant uses all of its permits and has a full queue.
#[test]
fn saturated_tenant_does_not_use_permits_of_other_tenants() {
    let supervisor = Supervisor::start(&isolated(
        "max_active = 3",
        "processes = 2\nmax_in_flight = 2\nmax_queue = 3\npressure = { warn = 0.5 }",
    ));
    run(async {
        let client = connect(&supervisor).await;
        let flood = async |tenant: &str| {
            let begun = format!("begun-{tenant}");
            let steps = format!("steps:count {begun};sleep 3600000");
            let hang = || spawn(client.job("b", "").operation(steps.clone()).tenant(tenant));
            let mut jobs = vec![hang()];
            wait_part(&supervisor, tenant, "limit", 4);
            jobs.extend((0..6).map(|_| hang()));
            wait_for("four jobs have begun", || (supervisor.file_bytes(&begun) == 4).then_some(()));
            wait_part(&supervisor, tenant, "in_flight", 4);
            wait_part(&supervisor, tenant, "queued", 3);
            // While a worker is slow to begin a job, the queue accepts more jobs.
            wait_part(&supervisor, tenant, "queue_capacity", 3);
            assert_eq!(outcome(&client.job("b", "").tenant(tenant).send().await), "rejected/queue_full");
            jobs
        };
        let first = flood("a").await;
        for _ in 0..10 {
            let reply = client.job("b", "").tenant("b").send().await.unwrap();
            assert!(reply.outcome().queued < Duration::from_secs(10), "{:?}", reply.outcome());
        }
        let second = flood("b").await;
        let (a, b, all) = (part(&supervisor, "a"), part(&supervisor, "b"), supervisor.snapshot("b"));
        for one in [&a, &b] {
            assert_eq!((&one["in_flight"], &one["limit"]), (&4.into(), &4.into()), "{one}");
            assert_eq!((&one["queued"], &one["queue_capacity"]), (&3.into(), &3.into()), "{one}");
            assert_eq!(one["rejected"]["queue_full"], 1, "{one}");
        }
        for (field, sum) in [("in_flight", 8), ("limit", 8), ("queued", 6), ("queue_capacity", 6)] {
            assert_eq!(all[field], sum, "{field}: {all}");
        }
        assert_eq!(all["workers"].as_array().unwrap().len(), 4);
        assert_balanced(&all);
        let pressed =
            tally(supervisor.wait_events("queue_pressure", 2).iter().map(|e| e["tenant"].to_string()));
        assert_eq!(pressed.into_values().collect::<Vec<_>>(), [1, 1], "one event per tenant");
        first.iter().chain(&second).for_each(Running::abort);
    });
}

#[test]
fn crashes_and_hangs_affect_only_their_tenant() {
    let supervisor = Supervisor::start(&isolated("max_active = 4", "max_in_flight = 2\nmax_queue = 10"));
    run(async {
        let client = connect(&supervisor).await;
        let quiet = pid_of(&client, "quiet").await;
        let long = spawn(client.job("b", "5000").operation("sleep").tenant("quiet"));
        wait_part(&supervisor, "quiet", "in_flight", 1);
        for (operation, expected) in
            [("segv", "crashed/signal"), ("exit", "crashed/exit"), ("abort", "crashed/signal")]
        {
            let result = client.job("b", "3").operation(operation).tenant("loud").send().await;
            assert_eq!(outcome(&result), expected);
            assert_eq!(outcome(&client.job("b", "").tenant("quiet").send().await), "ok");
        }
        let spin = client.job("b", "").operation("spin").tenant("loud").deadline(Duration::from_secs(2));
        let late = overrun(&spin).await;
        assert_eq!(outcome(&late), "deadline_exceeded/running");
        let long = long.await.unwrap().unwrap();
        assert_eq!((long.outcome().attempts, long.outcome().worker_pid), (1, Some(quiet)));
        assert_eq!(pid_of(&client, "quiet").await, quiet);
        let (loud, quiet) = (part(&supervisor, "loud"), part(&supervisor, "quiet"));
        assert!(loud["crashed"] == 3 && loud["deadline_exceeded"].as_u64() >= Some(1), "{loud}");
        assert_eq!((&quiet["crashed"], &quiet["restarts"]), (&0.into(), &0.into()), "{quiet}");
        assert_eq!(outcome(&client.job("b", "").tenant("loud").send().await), "ok");
    });
}

#[test]
fn open_tenant_breaker_survives_idle_shutdown() {
    let supervisor = Supervisor::start(&isolated(
        "max_active = 2, idle = \"100ms\"",
        "max_queue = 10\nbreaker = { window = \"5m\", min_calls = 3, open_for = \"5m\" }",
    ));
    run(async {
        let client = connect(&supervisor).await;
        for _ in 0..3 {
            let crash = client.job("b", "").operation("abort").tenant("bad").send().await;
            assert_eq!(outcome(&crash), "crashed/signal");
        }
        assert_eq!(outcome(&client.job("b", "").tenant("bad").send().await), "rejected/circuit_open");
        assert_eq!(outcome(&client.job("b", "").tenant("good").send().await), "ok");
        assert_eq!(part(&supervisor, "bad")["breaker"], "open");
        assert_eq!(part(&supervisor, "good")["breaker"], "closed");
        let opened = supervisor.wait_events("breaker_opened", 1);
        assert_eq!((opened.len(), &opened[0]["tenant"]), (1, &"bad".into()), "{opened:?}");

        wait_for_rest(&supervisor);
        let refused = client.job("b", "").tenant("bad").send().await;
        assert_eq!(outcome(&refused), "rejected/circuit_open");
        let wait = refused.unwrap_err().retry_after().unwrap();
        assert!(wait > Duration::from_secs(120), "expected the rest of open_for, got {wait:?}");
        assert_eq!(part(&supervisor, "bad")["breaker"], "open");
        assert_eq!(outcome(&client.job("b", "").tenant("good").send().await), "ok");
        assert_eq!(supervisor.post("/v1/bulkheads/b/reset").0, 200);
        assert_eq!(outcome(&client.job("b", "").tenant("bad").send().await), "ok");
    });
}

#[test]
fn tenant_rate_limit_survives_idle_shutdown() {
    for per in ["bulkhead", "tenant"] {
        let supervisor = Supervisor::start(&isolated(
            "max_active = 3, idle = \"100ms\"",
            &format!("rate_limit = {{ per_second = 0.01, burst = 1, per = \"{per}\" }}"),
        ));
        run(async {
            let client = connect(&supervisor).await;
            for tenant in ["a", "b", ""] {
                assert_eq!(outcome(&client.job("b", "").tenant(tenant).send().await), "ok");
                let refused = client.job("b", "").tenant(tenant).send().await;
                assert_eq!(outcome(&refused), "rejected/rate_limited");
                let wait = refused.unwrap_err().retry_after().unwrap();
                assert!(wait > Duration::from_secs(50) && wait <= Duration::from_secs(100), "{wait:?}");
            }
            for _ in 0..3 {
                wait_for_rest(&supervisor);
                assert_eq!(outcome(&client.job("b", "").tenant("a").send().await), "rejected/rate_limited");
            }
            let throttled = supervisor.wait_events("tenant_throttled", 3);
            let by_tenant = tally(throttled.iter().map(|event| event["tenant"].to_string()));
            assert_eq!(by_tenant.len(), 3, "{throttled:?}");
        });
    }
}

#[test]
fn idle_tenant_has_no_workers_until_next_job() {
    let supervisor = Supervisor::start(&isolated("max_active = 3, idle = \"150ms\"", "processes = 2"));
    run(async {
        let client = connect(&supervisor).await;
        let mut before = 0;
        for round in 1..=3 {
            let now = pid_of(&client, "acme").await;
            assert_ne!(now, before);
            wait_for_rest(&supervisor);
            assert!(!is_alive(now));
            // The supervisor still lists the tenant, in the state `ready`.
            let resting = part(&supervisor, "acme");
            assert_eq!((&resting["done"], &resting["limit"]), (&round.into(), &0.into()), "{resting}");
            assert_eq!((&resting["state"], &resting["crashed"]), (&"ready".into(), &0.into()), "{resting}");
            assert_eq!(supervisor.try_get("/readyz?bulkhead=b").unwrap().0, 200);
            before = now;
        }
        // A tenant with a job is not idle, however long the job takes.
        let long = client.job("b", "1000").operation("sleep").tenant("acme").send().await;
        assert_eq!((outcome(&long).as_str(), long.unwrap().outcome().attempts), ("ok", 1));
        assert!(supervisor.events("restart_backoff").is_empty());
    });
}

#[test]
fn job_arriving_during_idle_shutdown_succeeds() {
    let supervisor = Supervisor::start(&isolated("max_active = 2, idle = \"1ms\"", "max_queue = 10"));
    run(async {
        let client = connect(&supervisor).await;
        // Varies the pause around the moment at which idle workers exit.
        for pause in (0..150).map(|step| Duration::from_micros(step * 40)) {
            let pairs = ["a", "b"].map(|tenant| spawn(client.job("b", "x").tenant(tenant)));
            for job in pairs {
                assert_eq!(outcome(&job.await.unwrap()), "ok");
            }
            tokio::time::sleep(pause).await;
        }
        let all = supervisor.snapshot("b");
        assert_eq!((&all["done"], &all["submitted"]), (&300.into(), &300.into()), "{all}");
        wait_for_rest(&supervisor);
    });
}

#[test]
fn status_can_show_a_single_tenant() {
    let supervisor = Supervisor::start(&format!(
        "{}[bulkhead.shared]\ncommand = [\"MISBEHAVE\"]\n",
        isolated("max_active = 3", "")
    ));
    run(async {
        let client = connect(&supervisor).await;
        for (tenant, jobs) in [("a", 3), ("b c/d?e=f&g", 2), ("ünï→😀", 1), ("..", 1)] {
            for _ in 0..jobs {
                assert_eq!(outcome(&client.job("b", "").tenant(tenant).send().await), "ok");
            }
            let output =
                supervisor.command().args(["--json", "status", "b", "--tenant", tenant]).output().unwrap();
            assert_eq!(output.status.code(), Some(0), "{tenant}");
            let told: Value = serde_json::from_slice(&output.stdout).unwrap();
            assert_eq!((&told["tenant"], &told["done"]), (&tenant.into(), &jobs.into()), "{told}");
            let workers = told["workers"].as_array().unwrap();
            assert!(workers.len() == 1 && workers[0]["tenant"] == tenant, "{told}");
        }
        assert_eq!(supervisor.number("b", "done"), 7);
        assert!(supervisor.snapshot("b").get("tenant").is_none());
    });
    for (path, status) in [
        ("/v1/bulkheads/b?tenant=nobody", 404),
        ("/v1/bulkheads/b?tenant=", 404),
        ("/v1/bulkheads/shared?tenant=a", 400),
        ("/v1/bulkheads/none?tenant=a", 404),
    ] {
        let (told, body) = supervisor.try_get(path).unwrap();
        assert_eq!(told, status, "{path}: {body}");
        let problem: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(problem["status"], status, "{path}: {body}");
    }
    patch(&supervisor, "b/tenants/limited", r#"{"max_queue": 7}"#);
    assert_eq!(part(&supervisor, "limited")["max_queue"], 7);
    for (arguments, code) in [
        (&["status", "b", "--tenant", "nobody"][..], 66),
        (&["status", "shared", "--tenant", "a"], 65),
        (&["status", "--tenant", "a"], 2),
    ] {
        let output = supervisor.command().args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {output:?}");
    }
}

#[test]
fn tenant_statistics_exclude_other_tenants() {
    let supervisor = Supervisor::start(&isolated("max_active = 3", "max_payload = 10"));
    run(async {
        let client = connect(&supervisor).await;
        // The job is rejected before it reaches the compartment of its tenant.
        let large = client.job("b", vec![0; 100]).tenant("other").send().await;
        assert_eq!(outcome(&large), "rejected/too_large");
        assert_eq!(outcome(&client.job("b", "").tenant("a").send().await), "ok");
        let all = supervisor.snapshot("b");
        assert_eq!((&all["submitted"], &all["rejected"]["too_large"]), (&2.into(), &1.into()), "{all}");
        let a = part(&supervisor, "a");
        assert_eq!((&a["submitted"], &a["done"]), (&1.into(), &1.into()), "{a}");
        assert!(a["rejected"].as_object().unwrap().is_empty(), "{a}");
        // Once the tenant has a compartment, such jobs count for the tenant.
        let large = client.job("b", vec![0; 100]).tenant("a").send().await;
        assert_eq!(outcome(&large), "rejected/too_large");
        let a = part(&supervisor, "a");
        assert_eq!((&a["submitted"], &a["rejected"]["too_large"]), (&2.into(), &1.into()), "{a}");
        assert_eq!(supervisor.snapshot("b")["submitted"], 3);
    });
}

#[test]
fn tenant_latency_excludes_other_tenants() {
    let supervisor = Supervisor::start(&isolated("max_active = 3", ""));
    run(async {
        let client = connect(&supervisor).await;
        let fast = client.job("b", "").tenant("fast").send().await.unwrap();
        let own = fast.outcome().ran.as_secs_f64() * 1000.0;
        let slow = client.job("b", "3000").operation("sleep").tenant("slow").send().await;
        assert_eq!(outcome(&slow), "ok");
        let fast = part(&supervisor, "fast");
        let most = fast["latency_ms"]["run"]["max"].as_f64().unwrap_or(0.0);
        // On a busy machine, even the short job can take seconds.
        assert!(most < (1.5 * own).max(2900.0), "its only job took {own} ms: {}", fast["latency_ms"]);
    });
}

#[test]
fn drain_applies_to_existing_and_new_tenants() {
    let supervisor = Supervisor::start(&isolated("max_active = 3, idle = \"200ms\"", "max_queue = 5"));
    run(async {
        let client = connect(&supervisor).await;
        assert_eq!(outcome(&client.job("b", "").tenant("resting").send().await), "ok");
        wait_for_rest(&supervisor);
        let running = spawn(client.job("b", "").operation("steps:wait end").tenant("busy"));
        wait_part(&supervisor, "busy", "in_flight", 1);
        let waiting = spawn(client.job("b", "").tenant("busy"));
        wait_part(&supervisor, "busy", "queued", 1);
        assert_eq!(supervisor.post("/v1/bulkheads/b/drain").0, 200);
        assert_eq!(outcome(&waiting.await.unwrap()), "rejected/draining");
        for tenant in ["busy", "resting", "new", ""] {
            assert_eq!(outcome(&client.job("b", "").tenant(tenant).send().await), "rejected/draining");
        }
        assert_eq!(supervisor.snapshot("b")["state"], "draining");
        assert_eq!(supervisor.try_get("/readyz?bulkhead=b").unwrap().0, 503);
        supervisor.touch("end");
        assert_eq!(outcome(&running.await.unwrap()), "ok");
        // No tenant has any jobs, so all workers exit.
        wait_for_rest(&supervisor);

        assert_eq!(supervisor.post("/v1/bulkheads/b/resume").0, 200);
        for tenant in ["busy", "resting", "new", "newest"] {
            assert_eq!(outcome(&client.job("b", "").tenant(tenant).send().await), "ok");
            assert_eq!(part(&supervisor, tenant)["state"], "ready");
        }
        assert_eq!(supervisor.snapshot("b")["state"], "ready");
        assert_balanced(&supervisor.snapshot("b"));
    });
}

#[test]
fn drain_applies_to_tenant_without_workers() {
    let supervisor = Supervisor::start(&isolated("max_active = 3, idle = \"100ms\"", ""));
    run(async {
        let client = connect(&supervisor).await;
        assert_eq!(outcome(&client.job("b", "").tenant("a").send().await), "ok");
        wait_for_rest(&supervisor);
        assert_eq!(supervisor.post("/v1/bulkheads/b/drain").0, 200);
        assert_eq!(outcome(&client.job("b", "").tenant("a").send().await), "rejected/draining");
        assert_eq!(part(&supervisor, "a")["state"], "draining");
    });
}

#[test]
fn forced_breaker_applies_to_existing_and_new_tenants() {
    let supervisor = Supervisor::start(&isolated("max_active = 3, idle = \"200ms\"", "breaker = {}"));
    run(async {
        let client = connect(&supervisor).await;
        for tenant in ["resting", "active"] {
            assert_eq!(outcome(&client.job("b", "").tenant(tenant).send().await), "ok");
        }
        assert_eq!(patch(&supervisor, "b", r#"{"breaker": "forced_open"}"#).1["breaker"], "forced_open");
        for tenant in ["resting", "active", "new"] {
            let refused = client.job("b", "").tenant(tenant).send().await;
            assert_eq!(outcome(&refused), "rejected/circuit_open");
            assert!(refused.unwrap_err().retry_after().is_some());
            assert_eq!(part(&supervisor, tenant)["breaker"], "forced_open");
        }
        for release in ["auto", "reset"] {
            match release {
                "auto" => {
                    assert_eq!(patch(&supervisor, "b", r#"{"breaker": "auto"}"#).1["breaker"], "closed")
                }
                _ => assert_eq!(supervisor.post("/v1/bulkheads/b/reset").0, 200),
            }
            for tenant in ["resting", "active", "new", "newest"] {
                assert_eq!(outcome(&client.job("b", "").tenant(tenant).send().await), "ok", "{release}");
            }
            assert_eq!(supervisor.snapshot("b")["breaker"], "closed");
            assert_eq!(patch(&supervisor, "b", r#"{"breaker": "forced_open"}"#).0, 200);
        }
    });
}

#[test]
fn restart_replaces_workers_of_every_tenant() {
    let supervisor = Supervisor::start(&isolated("max_active = 3", "processes = 2\nmax_queue = 100"));
    run(async {
        let client = connect(&supervisor).await;
        let tenants = ["a", "b", "c"];
        for tenant in tenants {
            assert_eq!(outcome(&client.job("b", "").tenant(tenant).send().await), "ok");
            wait_part(&supervisor, tenant, "limit", 2);
        }
        let before = supervisor.worker_pids("b");
        let jobs: Vec<_> = (0..150)
            .map(|n: usize| spawn(client.job("b", "5").operation("sleep").tenant(tenants[n % 3])))
            .collect();
        assert_eq!(supervisor.post("/v1/bulkheads/b/restart").0, 200);
        for job in jobs {
            assert_eq!(outcome(&job.await.unwrap()), "ok");
        }
        wait_for("all workers are new", || {
            let now = supervisor.worker_pids("b");
            (now.len() == 6 && now.iter().all(|pid| !before.contains(pid))).then_some(())
        });
        for tenant in tenants {
            assert_eq!(pids(&supervisor, tenant).len(), 2);
        }
        assert_eq!(outcomes(&supervisor.snapshot("b")), 153);
    });
}

#[test]
fn operator_events_name_the_tenant() {
    let supervisor = Supervisor::start(&isolated("max_active = 3, idle = \"100ms\"", "grace = \"10ms\""));
    run(async {
        let client = connect(&supervisor).await;
        let name = "ac\"me\n\u{1b}[31m";
        assert_eq!(outcome(&client.job("b", "").tenant("").send().await), "ok");
        let crash = client.job("b", "").operation("abort").tenant(name).send().await;
        assert_eq!(outcome(&crash), "crashed/signal");
        let late = client.job("b", "").operation("hang").tenant(name).deadline(Duration::from_secs(2));
        assert_eq!(outcome(&overrun(&late).await), "deadline_exceeded/running");
        wait_for_rest(&supervisor);
        for kind in
            ["worker_started", "worker_ready", "worker_exited", "job_crashed", "job_timeout", "worker_killed"]
        {
            let told = wait_for(kind, || {
                let told = supervisor.events(kind);
                told.iter().any(|event| event["tenant"] == name).then_some(told)
            });
            assert!(told.iter().all(|event| event["tenant"].is_string()), "{told:?}");
        }
        let output = supervisor.command().arg("events").output().unwrap();
        assert!(!output.stdout.contains(&0x1b), "a tenant's name reached the terminal unescaped");
    });
}

#[test]
fn recycling_by_memory_affects_only_one_tenant() {
    let supervisor =
        Supervisor::start(&isolated("max_active = 3", "max_queue = 10\nrecycle = { rss = \"48MiB\" }"));
    run(async {
        let client = connect(&supervisor).await;
        let modest = pid_of(&client, "modest").await;
        let mut greedy = Vec::new();
        wait_for("the tenant's workers were recycled twice", || {
            let reply = tokio::task::block_in_place(|| {
                let job = client.job("b", "8").operation("hoard").tenant("greedy").send();
                tokio::runtime::Handle::current().block_on(job)
            });
            greedy.extend(reply.unwrap().outcome().worker_pid);
            (supervisor.events("worker_recycled").len() >= 2).then_some(())
        });
        for recycled in supervisor.events("worker_recycled") {
            assert_eq!((&recycled["tenant"], &recycled["reason"]), (&"greedy".into(), &"rss".into()));
        }
        assert_eq!(pid_of(&client, "modest").await, modest);
        assert!(tally(greedy).len() >= 2);
    });
}
