//! Tenants that send hostile messages or exceed their share, which must not affect the jobs of other tenants.

use std::time::Duration;

use bulkhead_client::{Executed, JobError};
use bulkhead_fleet::FleetError;
use bulkhead_tests::fleet::{TestFleet, VERSIONS, result_of};
use bulkhead_tests::{connect, run, wait_for};

use super::commands::get;
use super::jobs::{BULKHEADS, settings};

#[test]
fn tenant_cannot_escape_its_backlog_by_inventing_lanes() {
    let settings = settings().replace("[streams]\n", "[streams]\ntenant_backlog = 5\n");
    let Some(fleet) = TestFleet::start(VERSIONS[0], 1, &settings) else { return };
    let publish = |lane: &str| fleet.request(format!("bh.job.b.{lane}.acme").as_bytes(), b"", b"");
    for lane in ["n.99", "n.16", "n.02", "n.x", "m.2"] {
        assert!(publish(lane).starts_with("NATS/1.0 503"), "{lane}");
    }
    for _ in 0..5 {
        assert!(publish("n.2").contains("\"seq\""));
    }
    assert!(publish("n.2").contains("maximum messages per subject"));
    assert_eq!(fleet.pending("b"), Some(5));
}

#[test]
fn job_with_a_long_traceparent_does_not_occupy_a_permit() {
    let Some(mut fleet) = TestFleet::start(VERSIONS[0], 1, &settings()) else { return };
    let long = "a".repeat(65_400);
    // More jobs than permits.
    for number in 0..6 {
        let headers = format!("NATS/1.0\r\nBulkhead-Id: {number}\r\ntraceparent: {long}\r\n\r\n");
        let answer = fleet.request(b"bh.job.b.n.2.acme", headers.as_bytes(), b"");
        assert!(answer.contains("\"seq\""), "{answer}");
    }
    fleet.add_host("host-a", BULKHEADS);
    run(async {
        let client = fleet.connect().await;
        result_of(client.job("b", "").submit().await.unwrap()).await.unwrap();
    });
    fleet.wait_drained("b");
    let (_, letters) = fleet.json(&["dead", "list"]);
    assert_eq!(letters.len(), 6, "{letters:?}");
    assert!(letters.iter().all(|letter| letter["reason"] == "invalid"), "{letters:?}");
}

#[test]
fn unreadable_record_does_not_occupy_a_permit() {
    for version in VERSIONS {
        let Some(mut fleet) = TestFleet::start(version, 1, &settings()) else { return };
        fleet.add_host("host-a", BULKHEADS);
        let begun = fleet.hosts[0].supervisor.file("begun");
        run(async {
            let client = fleet.connect().await;
            let head = "NATS/1.0\r\nBulkhead-Phase: claimed\r\nBulkhead-Agent: a\r\nBulkhead-Nonce: n\r\n\
                        Bulkhead-Attempts: 1\r\nBulkhead-Stream-Sequence: 1\r\nBulkhead-Delivery: 1\r\n\r\n";
            let bytes = head.len();
            fleet.send(format!("HPUB bh.ledger.acme.claim {bytes} {bytes}\r\n{head}\r\n").as_bytes());
            // The last records are copies of another job's claim. There are more jobs than permits.
            let mut corrupt = Vec::new();
            for number in 0..8 {
                let id = format!("corrupt-{number}");
                let message = match number {
                    0..6 => format!("PUB bh.ledger.acme.{id} 2\r\n{{}}\r\n"),
                    _ => {
                        let read = "$JS.API.DIRECT.GET.BH_LEDGER.bh.ledger.acme.claim";
                        format!("PUB {read} bh.ledger.acme.{id} 0\r\n\r\n")
                    }
                };
                fleet.send(message.as_bytes());
                let subject = format!("$JS.API.DIRECT.GET.BH_LEDGER.bh.ledger.acme.{id}");
                wait_for("the record is stored", || {
                    (!fleet.request(subject.as_bytes(), b"", b"").contains(" 404 ")).then_some(())
                });
                let job = client.job("b", "").tenant("acme").id(id).idempotent(true);
                let operation = format!("steps:trace {}", begun.display());
                let job = job.operation(operation).deadline(Duration::from_secs(5));
                corrupt.push(job.submit().await.unwrap());
            }
            let sound = client.job("b", "").deadline(Duration::from_secs(30)).submit().await.unwrap();
            result_of(sound).await.unwrap();
            for job in corrupt {
                let error = result_of(job).await.unwrap_err();
                let FleetError::Job(JobError::Crashed(outcome)) = &error else { panic!("{error}") };
                assert_eq!(outcome.verdict.reason(), Some("host_lost"));
                assert_eq!(outcome.verdict.executed(), Executed::Unknown);
            }
        });
        fleet.wait_drained("b");
        assert!(!begun.exists());
        let page = get(fleet.hosts[0].http, "/metrics").1;
        let line =
            page.lines().find(|line| line.starts_with("bulkhead_fleet_unreadable_total{bulkhead=\"b\"}"));
        assert!(line.is_some_and(|line| !line.ends_with(" 0")), "{page}");
    }
}

/// Message headers that `async-nats` cannot parse. The last two make this library panic.
const UNREADABLE: [&[u8]; 6] = [
    b"GARBAGE\r\n\r\n",
    b"NATS/1.0\r\nno colon\r\n\r\n",
    b"NATS/1.0\r\nBulkhead-Id: \xff\r\n\r\n",
    b"NATS/1.0\r\nA\x01: b\r\n\r\n",
    b"NATS/1.0\r\nBulkhead-Id: a\rb\r\n\r\n",
    b"NATS/1.0\r\nBulkhead-Id: a\rb\r\n\r\n",
];

#[test]
fn unreadable_messages_are_deleted_and_harm_no_other_job() {
    for version in VERSIONS {
        let Some(mut fleet) = TestFleet::start(version, 1, &settings()) else { return };
        fleet.add_host("host-a", BULKHEADS);
        let [begun, go] = ["begun", "go"].map(|name| fleet.hosts[0].supervisor.file(name));
        run(async {
            let client = fleet.connect().await;
            let operation = format!("steps:trace {};wait {}", begun.display(), go.display());
            let running = client.job("b", "").operation(operation).submit().await.unwrap();
            wait_for("the job has begun", || begun.exists().then_some(()));
            for headers in UNREADABLE {
                fleet.request(b"bh.job.b.n.2.acme", headers, b"");
            }
            fleet.request(b"bh.job.b.n.3.\xff", b"", b"");
            result_of(client.job("b", "").submit().await.unwrap()).await.unwrap();
            std::fs::write(&go, "").unwrap();
            result_of(running).await.unwrap();
        });
        fleet.wait_drained("b");
        assert_eq!(std::fs::read_to_string(begun).unwrap().lines().count(), 1);
        assert!(fleet.hosts[0].log().contains("could not be parsed"));
    }
}

/// Returns the number of attempts after which the agent returned the job to the queue.
fn returned(fleet: &TestFleet) -> Option<u64> {
    let page = get(fleet.hosts[0].http, "/metrics").1;
    let line = page.lines().find(|line| line.starts_with("bulkhead_fleet_returned_total"))?;
    line.rsplit(' ').next()?.parse().ok()
}

#[test]
fn tenant_above_its_rate_limit_does_not_stop_other_tenants() {
    // Number of jobs, chosen to exceed the number that the agent requests with one pull.
    const JOBS: u64 = 30;
    let Some(mut fleet) = TestFleet::start(VERSIONS[0], 1, &settings()) else { return };
    let limit = "rate_limit = { per_second = 0.001, burst = 1, per = \"tenant\" }\n";
    fleet.add_host("host-a", &format!("{BULKHEADS}{limit}"));
    run(async {
        let client = fleet.connect().await;
        result_of(client.job("b", "").tenant("acme").submit().await.unwrap()).await.unwrap();
        for _ in 0..JOBS {
            client.job("b", "").tenant("acme").submit().await.unwrap();
        }
        wait_for("all other jobs are returned", || returned(&fleet).filter(|count| *count >= JOBS));
        // The supervisor has asked the agent to wait for at least a minute before it submits the jobs of `acme` again.
        let quiet = client.job("b", "").tenant("quiet").deadline(Duration::from_secs(40));
        result_of(quiet.submit().await.unwrap()).await.unwrap();
    });
    assert_eq!(fleet.pending("b"), Some(JOBS));
}

#[test]
fn permit_reserved_for_critical_jobs_does_not_stop_others() {
    let Some(mut fleet) = TestFleet::start(VERSIONS[0], 1, &settings()) else { return };
    let bulkheads = BULKHEADS.replace("max_queue = 10", "priority = { critical_reserve = 0.25 }");
    fleet.add_host("host-a", &bulkheads.replace("deadline = \"30s\"", "deadline = \"120s\""));
    let [begun, go] = ["begun", "go"].map(|name| fleet.hosts[0].supervisor.file(name));
    run(async {
        let client = fleet.connect().await;
        let operation = format!("steps:trace {};wait {}", begun.display(), go.display());
        let mut running = Vec::new();
        for _ in 0..3 {
            running.push(client.job("b", "").operation(&operation).submit().await.unwrap());
        }
        let begun = || std::fs::read_to_string(&begun).unwrap_or_default().lines().count();
        wait_for("three jobs have begun", || (begun() == 3).then_some(()));
        // After many rejections, the supervisor asks the client to wait longer before it retries.
        let local = connect(&fleet.hosts[0].supervisor).await;
        while !matches!(&local.job("b", "").send().await, Err(error) if asks_for_pause(error)) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        client.job("b", "").submit().await.unwrap();
        wait_for("the job is returned", || returned(&fleet).filter(|count| *count > 0));
        std::fs::write(&go, "").unwrap();
        for submitted in running {
            result_of(submitted).await.unwrap();
        }
        // Submits more jobs than the agent requests with one pull, because one pull can be pending when the rejection
        // arrives.
        for _ in 0..10 {
            let job = client.job("b", "").deadline(Duration::from_secs(12));
            result_of(job.submit().await.unwrap()).await.unwrap();
        }
    });
}

fn asks_for_pause(error: &JobError) -> bool {
    let asked = error.outcome().and_then(|outcome| outcome.retry_after);
    asked.is_some_and(|asked| asked >= Duration::from_secs(16))
}

#[test]
fn open_breaker_of_an_isolated_tenant_does_not_stop_others() {
    let Some(mut fleet) = TestFleet::start(VERSIONS[0], 1, &settings()) else { return };
    let breaker = "breaker = { min_calls = 4, failure_rate = 0.5, open_for = \"60s\" }\n";
    let isolated = "tenants = { isolate = true, max_active = 4 }\n";
    fleet.add_host("host-a", &format!("{BULKHEADS}{breaker}{isolated}"));
    run(async {
        let client = fleet.connect().await;
        result_of(client.job("b", "").tenant("quiet").submit().await.unwrap()).await.unwrap();
        let local = connect(&fleet.hosts[0].supervisor).await;
        let crash = || local.job("b", "").operation("segv").tenant("acme").send();
        while !matches!(&crash().await, Err(error) if asks_for_pause(error)) {}
        client.job("b", "").tenant("acme").submit().await.unwrap();
        wait_for("the job is returned", || returned(&fleet).filter(|count| *count > 0));
        // Submits more jobs than the agent requests with one pull, because one pull can be pending when the rejection
        // arrives.
        for _ in 0..20 {
            let quiet = client.job("b", "").tenant("quiet").deadline(Duration::from_secs(40));
            result_of(quiet.submit().await.unwrap()).await.unwrap();
        }
    });
}

#[test]
fn isolated_tenant_at_its_limit_does_not_delay_others() {
    let Some(mut fleet) = TestFleet::start(VERSIONS[0], 1, &settings()) else { return };
    let bulkheads = BULKHEADS.replace("30s", "300s");
    fleet.add_host("host-a", &format!("{bulkheads}tenants = {{ isolate = true, max_active = 4 }}\n"));
    run(async {
        let client = fleet.connect().await;
        for tenant in ["acme", "calm"] {
            result_of(client.job("b", "").tenant(tenant).submit().await.unwrap()).await.unwrap();
        }
        for _ in 0..40 {
            let long = client.job("b", "300000").operation("sleep").tenant("acme");
            long.deadline(Duration::from_secs(300)).submit().await.unwrap();
        }
        fleet.hosts[0].supervisor.wait_number("b", "in_flight", 4);
        for _ in 0..20 {
            let calm = client.job("b", "").tenant("calm").deadline(Duration::from_secs(40));
            result_of(calm.submit().await.unwrap()).await.unwrap();
        }
    });
}

/// A tenant's backlog must not delay the jobs of another tenant. The backlog must still use all permits of its tenant.
#[test]
fn backlog_of_isolated_tenant_neither_delays_others_nor_starves() {
    let Some(mut fleet) = TestFleet::start(VERSIONS[0], 1, &settings()) else { return };
    let bulkheads = BULKHEADS.replace("max_in_flight = 4", "max_in_flight = 1");
    fleet.add_host("host-a", &format!("{bulkheads}tenants = {{ isolate = true, max_active = 4 }}\n"));
    run(async {
        let client = fleet.connect().await;
        for tenant in ["acme", "calm"] {
            result_of(client.job("b", "").tenant(tenant).submit().await.unwrap()).await.unwrap();
        }
        let submit = || client.job("b", "250").operation("sleep").tenant("acme").submit();
        let mut backlog = Vec::new();
        for _ in 0..80 {
            backlog.push(submit().await.unwrap());
        }
        // All jobs of the backlog together run longer than this deadline.
        for _ in 0..5 {
            let calm = client.job("b", "").tenant("calm").deadline(Duration::from_secs(15));
            result_of(calm.submit().await.unwrap()).await.unwrap();
        }
        for job in backlog {
            result_of(job).await.unwrap();
        }
    });
}

#[test]
fn first_job_of_an_isolated_tenant_is_pulled() {
    let Some(mut fleet) = TestFleet::start(VERSIONS[0], 1, &settings()) else { return };
    fleet.add_host("host-a", &format!("{BULKHEADS}tenants = {{ isolate = true, max_active = 4 }}\n"));
    run(async {
        let client = fleet.connect().await;
        for tenant in ["acme", "quiet"] {
            result_of(client.job("b", "").tenant(tenant).submit().await.unwrap()).await.unwrap();
        }
    });
}
