//! Admission under overload with real workers: accepted, queued and rejected jobs, and retry delays.

use std::time::{Duration, Instant};

use bulkhead_client::{Client, JobError, Priority, Reply};
use bulkhead_tests::{PATIENCE, Running, Supervisor, connect, outcome, run, spawn, tally, wait_for};
use serde_json::Value;

fn message(result: &Result<Reply, JobError>) -> String {
    result.as_ref().err().map(ToString::to_string).unwrap_or_default()
}

/// Occupies `permits` permits with critical jobs until the returned tasks are aborted.
async fn block(supervisor: &Supervisor, client: &Client, permits: u64) -> Vec<Running> {
    let blockers =
        (0..permits).map(|_| spawn(client.job("b", "").operation("hang").priority(Priority::Critical)));
    let blockers = blockers.collect();
    supervisor.wait_number("b", "in_flight", permits);
    blockers
}

#[test]
fn flooding_tenant_does_not_delay_another_tenant() {
    let supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nprocesses = 4\nmax_queue = 200\ndeadline = \"60s\"\n\
         tenants = { max_in_flight = 3 }\n",
    );
    supervisor.wait_number("b", "limit", 4);
    run(async {
        let client = connect(&supervisor).await;
        let flood: Vec<_> =
            (0..100).map(|_| spawn(client.job("b", "").operation("steps:wait end").tenant("a"))).collect();
        wait_for("97 jobs of the flood are queued", || {
            (supervisor.number("b", "queued") == 97).then_some(())
        });
        // This job ends while all jobs of the flood are still running or queued.
        client.job("b", "50").operation("sleep").tenant("b").send().await.unwrap();
        let tenants = supervisor.snapshot("b")["tenants"].clone();
        assert_eq!(tenants[0]["name"], "a", "{tenants}");
        assert_eq!(tenants[0]["in_flight"], 3, "{tenants}");
        flood.iter().for_each(Running::abort);
    });
}

#[test]
fn critical_jobs_have_reserved_permits_and_start_first() {
    let supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nprocesses = 4\nmax_queue = 2\ndeadline = \"60s\"\n\
         priority = { critical_reserve = 0.25 }\n",
    );
    supervisor.wait_number("b", "limit", 4);
    run(async {
        let client = connect(&supervisor).await;
        let job =
            |priority| client.job("b", "").operation("steps:count begun;sleep 3600000").priority(priority);
        let begun = |count: usize| {
            wait_for("the jobs have begun", || (supervisor.file_bytes("begun") == count).then_some(()));
        };
        let mut running: Vec<_> = (0..3).map(|_| spawn(job(Priority::Normal))).collect();
        // A job that has not begun could be recalled, and would then not get the reserved permit.
        begun(3);
        // The fourth permit is reserved for critical jobs, so this job has to wait.
        running.push(spawn(job(Priority::Normal)));
        supervisor.wait_number("b", "queued", 1);
        running.push(spawn(job(Priority::Critical)));
        begun(4);

        let shed = spawn(job(Priority::BestEffort));
        supervisor.wait_number("b", "queued", 2);
        assert_eq!(outcome(&job(Priority::BestEffort).send().await), "rejected/queue_full");
        running.push(spawn(job(Priority::Critical)));
        assert_eq!(outcome(&shed.await.unwrap()), "rejected/shed");
        // The critical job starts before the normal job, although it arrived last.
        running[0].abort();
        supervisor.wait_number("b", "queued", 1);
        supervisor.wait_number("b", "in_flight", 4);
        assert!(running[1..].iter().all(|task| !task.is_finished()));
        running.iter().for_each(Running::abort);
    });
}

#[test]
fn queue_under_pressure_accepts_only_critical_jobs() {
    let supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 100\ndeadline = \"60s\"\n\
         pressure = { warn = 0.8, reject = 0.95 }\n",
    );
    supervisor.wait_number("b", "limit", 1);
    run(async {
        let client = connect(&supervisor).await;
        let mut running = block(&supervisor, &client, 1).await;
        running.extend((0..96).map(|_| spawn(client.job("b", ""))));
        supervisor.wait_number("b", "queued", 96);
        let pressed = client.job("b", "").send().await;
        assert_eq!(outcome(&pressed), "rejected/backpressure");
        assert!(message(&pressed).contains("96 %"), "{}", message(&pressed));
        assert!(pressed.as_ref().unwrap_err().retry_after() >= Some(Duration::from_secs(1)));
        let critical = |_| spawn(client.job("b", "").priority(Priority::Critical));
        running.extend((0..4).map(critical));
        supervisor.wait_number("b", "queued", 100);
        // The queue is full, so a normal job is rejected.
        assert_eq!(outcome(&client.job("b", "").send().await), "rejected/queue_full");
        let told = supervisor.wait_events("queue_pressure", 1);
        assert_eq!(told.len(), 1, "{told:?}");
        assert_eq!((&told[0]["queued"], &told[0]["queue_capacity"]), (&80.into(), &100.into()));
        running.iter().for_each(Running::abort);
    });
}

#[test]
fn evictions_are_distributed_among_tenants() {
    let supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 20\ndeadline = \"60s\"\n\
         overflow = \"evict-oldest\"\n",
    );
    supervisor.wait_number("b", "limit", 1);
    run(async {
        let client = connect(&supervisor).await;
        let running = block(&supervisor, &client, 1).await;
        let names = ["a", "b", "c", "d", "e"];
        let jobs: Vec<_> = (0..520)
            .map(|number: usize| {
                let tenant = names[number % 5];
                (tenant, spawn(client.job("b", "").tenant(tenant)))
            })
            .collect();
        wait_for("500 jobs are evicted", || {
            (supervisor.snapshot("b")["rejected"]["evicted"] == 500).then_some(())
        });
        let mut evicted = Vec::new();
        for (tenant, job) in jobs {
            if job.is_finished() {
                assert_eq!(outcome(&job.await.unwrap()), "rejected/evicted");
                evicted.push(tenant);
            } else {
                job.abort();
            }
        }
        let by_tenant = tally(evicted);
        assert!(by_tenant.values().all(|&count| count <= 150), "{by_tenant:?}");
        running.iter().for_each(Running::abort);

        // If a single tenant floods the queue, a `tenant_evictions` event names the tenant.
        supervisor.wait_number("b", "queued", 0);
        let running = block(&supervisor, &client, 1).await;
        let flood: Vec<_> = (0..200).map(|_| spawn(client.job("b", "").tenant("flood"))).collect();
        let told =
            wait_for("there is a `tenant_evictions` event", || supervisor.events("tenant_evictions").pop());
        assert_eq!(told["tenant"], "flood");
        flood.iter().chain(&running).for_each(Running::abort);
    });
}

/// The tenant that exceeds its rate must still get its full rate.
#[test]
fn tenant_over_its_rate_does_not_affect_other_tenants() {
    let supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_in_flight = 64\nmax_queue = 1000\n\
         rate_limit = { per_second = 20, burst = 50, per = \"tenant\" }\n",
    );
    supervisor.wait_number("b", "limit", 64);
    run(async {
        let client = connect(&supervisor).await;
        let (began, mut passed, mut waits) = (Instant::now(), 0_u32, Vec::new());
        // On a slow machine, a single round of 200 jobs might not exceed the rate.
        while waits.is_empty() {
            assert!(began.elapsed() < PATIENCE, "{passed} jobs were admitted, and none was rejected");
            for job in (0..200).map(|_| spawn(client.job("b", "").tenant("greedy"))).collect::<Vec<_>>() {
                let result = job.await.unwrap();
                match outcome(&result).as_str() {
                    "ok" => passed += 1,
                    "rejected/rate_limited" => waits.extend(result.unwrap_err().retry_after()),
                    other => panic!("{other}"),
                }
            }
        }
        let most = 20.0 * began.elapsed().as_secs_f64() + 50.0;
        assert!(f64::from(passed) <= most + 1.0, "{passed} jobs were admitted, but the rate allows {most}");
        assert!(passed >= 50, "only {passed} jobs were admitted");
        for _ in 0..50 {
            assert_eq!(outcome(&client.job("b", "").tenant("modest").send().await), "ok");
        }
        // A client that waits for the suggested time succeeds.
        for _ in 0..10 {
            if let Err(error) = client.job("b", "").tenant("greedy").cost(7).send().await {
                tokio::time::sleep(error.retry_after().unwrap()).await;
                assert_eq!(outcome(&client.job("b", "").tenant("greedy").cost(7).send().await), "ok");
            }
        }
        let dear = client.job("b", "").tenant("modest").cost(51).send().await;
        assert_eq!(outcome(&dear), "rejected/rate_limited");
        assert!(!dear.unwrap_err().is_retryable(), "a cost above the burst can never be admitted");
        let told = wait_for("there is an event about the tenant", || {
            let told = supervisor.events("tenant_throttled");
            told.iter().any(|event| event["tenant"] == "greedy").then_some(told)
        });
        // Events about the same tenant are at least ten seconds apart.
        let count = told.iter().filter(|event| event["tenant"] == "greedy").count();
        assert!(count == 1 || began.elapsed() > Duration::from_secs(9), "{told:?}");
        assert!(told.iter().all(|event| event["limit"] == "rate_limit per tenant"), "{told:?}");
    });
}

#[test]
fn tenant_throttled_event_names_the_bulkhead_limit() {
    let supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nrate_limit = { per_second = 0.01, burst = 1 }\n",
    );
    run(async {
        let client = connect(&supervisor).await;
        let began = Instant::now();
        assert_eq!(outcome(&client.job("b", "").tenant("a").send().await), "ok");
        for tenant in ["a", "b", ""] {
            let refused = client.job("b", "").tenant(tenant).send().await;
            assert_eq!(outcome(&refused), "rejected/rate_limited");
        }
        let told = supervisor.wait_events("tenant_throttled", 1);
        // Events about the same limit are at least ten seconds apart.
        assert!(told.len() == 1 || began.elapsed() > Duration::from_secs(9), "{told:?}");
        assert_eq!(told[0]["limit"], "rate_limit per bulkhead");
        assert!(told[0].get("tenant").is_none(), "{told:?}");
    });
}

#[test]
fn breaker_opens_after_crashes_and_closes_after_probe() {
    let supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 10\n\
         breaker = { window = \"5m\", min_calls = 4, failure_rate = 0.5, open_for = \"1s\" }\n\
         [bulkhead.long]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 10\n\
         breaker = { window = \"5m\", min_calls = 4, failure_rate = 0.5, open_for = \"5m\" }\n",
    );
    supervisor.wait_number("b", "limit", 1);
    supervisor.wait_number("long", "limit", 1);
    run(async {
        let client = connect(&supervisor).await;
        let open = async |name: &str| {
            // Failures caused by the caller do not count.
            for _ in 0..10 {
                assert_eq!(outcome(&client.job(name, "").operation("fail").send().await), "failed/bad_input");
            }
            for _ in 0..4 {
                assert_eq!(outcome(&client.job(name, "").operation("segv").send().await), "crashed/signal");
            }
        };
        tokio::join!(open("b"), open("long"));
        // On a busy machine, the breaker of `b` can already admit a probe.
        let refused = client.job("long", "").send().await;
        assert_eq!(outcome(&refused), "rejected/circuit_open");
        let wait = refused.unwrap_err().retry_after().unwrap();
        assert!(wait <= Duration::from_secs(300), "{wait:?}");
        assert_ne!(supervisor.snapshot("long")["breaker"], "closed");
        // The first probe fails, so the breaker opens again for a longer time.
        let failed = wait_for("a probe is admitted", || {
            let result = tokio::task::block_in_place(|| {
                tokio::runtime::Handle::current().block_on(client.job("b", "").operation("segv").send())
            });
            (outcome(&result) != "rejected/circuit_open").then_some(result)
        });
        assert_eq!(outcome(&failed), "crashed/signal");
        let ok = wait_for("a probe is admitted", || {
            let result = tokio::task::block_in_place(|| {
                tokio::runtime::Handle::current().block_on(client.job("b", "").send())
            });
            (outcome(&result) != "rejected/circuit_open").then_some(result)
        });
        assert_eq!(outcome(&ok), "ok");
        assert_eq!(supervisor.snapshot("b")["breaker"], "closed");
        wait_for("there is an event for each change of the breaker", || {
            let of_b = |event: &&Value| event["bulkhead"] == "b";
            let count = |kind| supervisor.events(kind).iter().filter(of_b).count();
            let told = (count("breaker_opened"), count("breaker_half_open"), count("breaker_closed"));
            (told == (2, 2, 1)).then_some(())
        });
        let opened = &supervisor.events("breaker_opened")[0];
        assert_eq!((&opened["from"], &opened["failure_rate"]), (&"closed".into(), &1.0.into()), "{opened}");
    });
}

#[test]
fn tenant_over_its_quota_waits_or_is_rejected() {
    let supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nprocesses = 2\nmax_queue = 10\ndeadline = \"60s\"\n\
         tenants = { max_in_flight = 1, max_queue = 2 }\n\
         [bulkhead.none]\ncommand = [\"MISBEHAVE\"]\nprocesses = 2\ndeadline = \"60s\"\n\
         tenants = { max_in_flight = 1 }\n",
    );
    supervisor.wait_number("b", "limit", 2);
    supervisor.wait_number("none", "limit", 2);
    run(async {
        let client = connect(&supervisor).await;
        let hang = |name: &'static str| spawn(client.job(name, "").operation("hang").tenant("acme"));
        let running: Vec<_> = (0..3).map(|_| hang("b")).collect();
        supervisor.wait_number("b", "queued", 2);
        assert_eq!(supervisor.number("b", "in_flight"), 1);
        let over = client.job("b", "").tenant("acme").send().await;
        assert_eq!(outcome(&over), "rejected/tenant_quota");
        assert!(message(&over).contains("acme"), "{}", message(&over));
        assert_eq!(outcome(&client.job("b", "").tenant("other").send().await), "ok");
        // Without a queue, a job over the tenant's share is rejected at once.
        let alone = hang("none");
        supervisor.wait_number("none", "in_flight", 1);
        assert_eq!(outcome(&client.job("none", "").tenant("acme").send().await), "rejected/tenant_quota");
        assert_eq!(outcome(&client.job("none", "").send().await), "ok");
        alone.abort();
        running.iter().for_each(Running::abort);
    });
}

/// Sends a PATCH request and returns the status and the body.
fn patch(supervisor: &Supervisor, name: &str, body: &str) -> (u16, Value) {
    supervisor.patch(&format!("/v1/bulkheads/{name}"), body)
}

#[test]
fn changing_limits_loses_no_queued_jobs() {
    let supervisor =
        Supervisor::start("[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 3\ndeadline = \"60s\"\n");
    supervisor.wait_number("b", "limit", 1);
    run(async {
        let client = connect(&supervisor).await;
        let running = block(&supervisor, &client, 1).await;
        let mut waiting: Vec<_> = (0..3).map(|_| spawn(client.job("b", ""))).collect();
        supervisor.wait_number("b", "queued", 3);
        assert_eq!(outcome(&client.job("b", "").send().await), "rejected/queue_full");

        let (status, snapshot) = patch(&supervisor, "b", r#"{"max_queue": 5}"#);
        assert_eq!((status, &snapshot["queue_capacity"]), (200, &5.into()), "{snapshot}");
        waiting.extend((0..2).map(|_| spawn(client.job("b", ""))));
        supervisor.wait_number("b", "queued", 5);
        // Queued jobs stay in the queue, but new jobs are rejected.
        assert_eq!(patch(&supervisor, "b", r#"{"max_queue": 1}"#).0, 200);
        assert_eq!(supervisor.number("b", "queued"), 5);
        assert_eq!(outcome(&client.job("b", "").send().await), "rejected/queue_full");
        running.iter().for_each(Running::abort);
        for job in waiting {
            assert_eq!(outcome(&job.await.unwrap()), "ok");
        }

        assert_eq!(patch(&supervisor, "b", r#"{"breaker": "forced_open"}"#).1["breaker"], "forced_open");
        assert_eq!(outcome(&client.job("b", "").send().await), "rejected/circuit_open");
        assert_eq!(patch(&supervisor, "b", r#"{"breaker": "auto"}"#).1["breaker"], "closed");
        assert_eq!(outcome(&client.job("b", "").send().await), "ok");

        assert_eq!(patch(&supervisor, "b", r#"{"rate_limit": {"per_second": 0.01, "burst": 1}}"#).0, 200);
        assert_eq!(outcome(&client.job("b", "").send().await), "ok");
        assert_eq!(outcome(&client.job("b", "").send().await), "rejected/rate_limited");
        let changed = supervisor.wait_events("limits_changed", 3);
        assert_eq!(changed.len(), 3, "{changed:?}");
        assert_eq!(changed[2]["rate_limit"]["per_second"], 0.01, "{changed:?}");
    });
    // The snapshot shows the current limits, and `null` removes a limit.
    let snapshot = supervisor.snapshot("b");
    assert_eq!(
        (&snapshot["max_in_flight"], &snapshot["rate_limit"]["burst"]),
        (&1.into(), &1.into()),
        "{snapshot}"
    );
    assert_eq!(patch(&supervisor, "b", r#"{"rate_limit": null}"#).1["rate_limit"], Value::Null);
    run(async {
        let client = connect(&supervisor).await;
        for _ in 0..3 {
            assert_eq!(outcome(&client.job("b", "").send().await), "ok");
        }
    });
    for (body, why) in [
        ("", "not JSON"),
        (r#"{"max_queue": -1}"#, "max_queue"),
        (r#"{"max_queue": 99999999}"#, "0 to 1000000"),
        (r#"{"max_que": 1}"#, "max_que"),
        (r#"{"breaker": "open"}"#, "forced_open"),
        (r#"{"rate_limit": {"per_second": 0}}"#, "above 0"),
        (r#"{"rate_limit": {"per_second": 1, "burst": 0}}"#, "burst"),
        (r#"{"processes": 0}"#, "processes"),
        (r#"{"processes": 1024, "max_in_flight": 4096}"#, "at most"),
        (r#"{"max_in_flight": 0}"#, "max_queue"),
    ] {
        let (status, problem) = patch(&supervisor, "b", body);
        assert_eq!(status, 400, "{body}: {problem}");
        assert!(problem["detail"].as_str().unwrap().contains(why), "{body}: {problem}");
    }
    assert_eq!(patch(&supervisor, "nobody", r#"{"max_queue": 1}"#).0, 404);
}
