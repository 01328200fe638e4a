//! Tenants that come and go during other changes: recycled workers, keeper deaths, shutdown and changed limits. Also
//! covers programs that are unaware of tenants.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bulkhead_client::Client;
use bulkhead_tests::tenants::{assert_balanced, isolated, part, patch, wait_for_rest};
use bulkhead_tests::{
    PATIENCE, SAME_NUMBERS, Supervisor, connect, heavy, is_alive, kill_pid, outcome, run, tally, wait_for,
};
use nix::sys::signal::Signal;

async fn told(client: &Client, tenant: &str) -> String {
    outcome(&client.job("b", "").tenant(tenant).send().await)
}

/// Starts `clients` clients, which send jobs for `tenants` tenants until `end` is set. A client stops early if it
/// loses its connection. Returns the outcomes.
async fn crowd(supervisor: &Supervisor, clients: usize, tenants: usize, end: Arc<AtomicBool>) -> Vec<String> {
    let lanes: Vec<_> = (0..clients)
        .map(|lane| {
            let (socket, end) = (supervisor.socket(), end.clone());
            tokio::spawn(async move {
                let client = Client::connect(socket).await.unwrap();
                let (mut told, mut turn) = (Vec::new(), lane);
                while !end.load(Ordering::Relaxed) {
                    turn += 7;
                    let tenant = format!("tenant {}", turn % tenants);
                    let job = client.job("b", "1").operation("sleep").tenant(tenant);
                    told.push(outcome(&job.send().await));
                    if told.last().is_some_and(|last| last.starts_with("no outcome")) {
                        break;
                    }
                }
                told
            })
        })
        .collect();
    let mut told = Vec::new();
    for lane in lanes {
        told.extend(lane.await.unwrap());
    }
    told
}

#[test]
fn recycled_workers_yield_to_other_tenants() {
    let supervisor = Supervisor::start(&isolated(
        "max_active = 1, idle = \"5ms\"",
        "max_queue = 10\nrecycle = { jobs = 1 }",
    ));
    run(async {
        let client = connect(&supervisor).await;
        for round in 0..60 {
            for tenant in ["a", "b", "b"] {
                assert_eq!(told(&client, tenant).await, "ok", "round {round}");
            }
        }
        wait_for_rest(&supervisor);
        assert_eq!(supervisor.number("b", "done"), 180);
        assert_eq!(supervisor.number("b", "crashed"), 0);
    });
}

#[test]
fn keeper_deaths_crash_only_running_jobs() {
    let _turn = heavy();
    let supervisor = Supervisor::start(&isolated("max_active = 3, idle = \"20ms\"", "max_queue = 20"));
    run(async {
        let end = Arc::new(AtomicBool::new(false));
        let jobs = crowd(&supervisor, 8, 10, end.clone());
        let killer = async {
            for _ in 0..6 {
                let done = supervisor.number("b", "done");
                wait_for("jobs are done", || (supervisor.number("b", "done") > done + 5).then_some(()));
                let keeper = supervisor.keeper();
                kill_pid(keeper, Signal::SIGKILL);
                wait_for("the keeper is dead", || (!is_alive(keeper)).then_some(()));
            }
            end.store(true, Ordering::Relaxed);
        };
        let both = tokio::time::timeout(3 * PATIENCE, async { tokio::join!(jobs, killer).0 });
        let told = tally(both.await.expect("every job has an outcome"));
        let known = ["ok", "rejected/unavailable", "crashed/signal"];
        assert!(told.keys().all(|key| known.contains(&key.as_str())), "{told:?}");
        for tenant in ["tenant 0", "tenant 5", "new"] {
            assert_eq!(told_in_the_end(&supervisor, tenant).await, "ok");
        }
        let all = supervisor.snapshot("b");
        assert_balanced(&all);
        assert_eq!(all["state"], "ready", "{all}");
    });
}

/// Sends jobs until a job is not rejected as unavailable. Returns the last outcome, or "never" if all jobs were
/// rejected.
async fn told_in_the_end(supervisor: &Supervisor, tenant: &str) -> String {
    let client = connect(supervisor).await;
    let began = Instant::now();
    while began.elapsed() < PATIENCE {
        let told = told(&client, tenant).await;
        if told != "rejected/unavailable" {
            return told;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    "never".into()
}

#[test]
fn every_tenant_job_has_an_outcome_after_shutdown() {
    for _ in 0..3 {
        let mut supervisor = Supervisor::start(&isolated("max_active = 3, idle = \"5ms\"", "max_queue = 20"));
        let keeper = supervisor.keeper();
        let told = run(async {
            let jobs = crowd(&supervisor, 10, 30, Arc::default());
            let stop = async {
                wait_for("jobs are done", || (supervisor.number("b", "done") > 20).then_some(()));
                supervisor.signal(Signal::SIGTERM);
            };
            let all = tokio::time::timeout(PATIENCE, async { tokio::join!(jobs, stop).0 });
            all.await.expect("every job has an outcome")
        });
        assert_eq!(supervisor.wait().code(), Some(0));
        assert!(!is_alive(keeper));
        for (how, count) in tally(told) {
            let known = ["ok", "rejected/unavailable", "rejected/draining"];
            assert!(known.contains(&how.as_str()) || how.starts_with("no outcome"), "{count} times {how}");
        }
    }
}

#[test]
fn live_limits_can_disable_and_enable_all_tenants() {
    let supervisor = Supervisor::start(&isolated("max_active = 3, idle = \"200ms\"", "max_queue = 5"));
    run(async {
        let client = connect(&supervisor).await;
        for tenant in ["a", "b"] {
            assert_eq!(told(&client, tenant).await, "ok");
        }
        assert_eq!(patch(&supervisor, "b", r#"{"max_in_flight": 0}"#).0, 400);
        assert_eq!(patch(&supervisor, "b", r#"{"max_in_flight": 0, "max_queue": 0}"#).0, 200);
        wait_for_rest(&supervisor);
        for tenant in ["a", "b", "new"] {
            assert_eq!(told(&client, tenant).await, "rejected/queue_full");
        }
        assert_eq!(patch(&supervisor, "b", r#"{"max_in_flight": 2, "processes": 2, "max_queue": 5}"#).0, 200);
        for tenant in ["a", "b", "new"] {
            assert_eq!(told(&client, tenant).await, "ok");
        }
    });
    for body in
        [r#"{"processes": 0}"#, r#"{"processes": 1025}"#, r#"{"max_active": 5}"#, r#"{"tenants": {}}"#]
    {
        assert_eq!(patch(&supervisor, "b", body).0, 400, "{body}");
    }
}

#[test]
fn programs_of_different_tenants_run_in_different_hosts() {
    let supervisor = Supervisor::start(&format!(
        "{SAME_NUMBERS}[bulkhead.b]\nexec = [\"/bin/sh\", \"-c\", \"echo $BULKHEAD_TENANT $PPID\"]\n\
         max_queue = 10\ntenants = {{ isolate = true, max_active = 2, idle = \"100ms\" }}\n"
    ));
    run(async {
        let client = connect(&supervisor).await;
        let mut hosts = Vec::new();
        for tenant in ["a", "b", "a", "b", "c"] {
            let reply = client.job("b", "").tenant(tenant).send().await.unwrap();
            let said = String::from_utf8(reply.payload().to_vec()).unwrap();
            let (name, host) = said.trim().split_once(' ').unwrap();
            assert_eq!(name, tenant);
            assert_eq!(host.parse().ok(), reply.outcome().worker_pid);
            hosts.push((tenant, host.to_owned()));
        }
        for (tenant, host) in &hosts {
            assert!(!hosts.iter().any(|(other, theirs)| other != tenant && theirs == host), "{hosts:?}");
        }
        wait_for_rest(&supervisor);
        assert_eq!(told(&client, "a").await, "ok");
    });
}

#[test]
fn rejected_new_tenants_produce_no_events() {
    let supervisor = Supervisor::start(&isolated("max_active = 3", "breaker = {}"));
    run(async {
        let client = connect(&supervisor).await;
        assert_eq!(supervisor.post("/v1/bulkheads/b/drain").0, 200);
        for stranger in 0..50 {
            assert_eq!(told(&client, &format!("tenant {stranger}")).await, "rejected/draining");
        }
        assert_eq!(supervisor.post("/v1/bulkheads/b/resume").0, 200);
        assert_eq!(patch(&supervisor, "b", r#"{"breaker": "forced_open"}"#).0, 200);
        for stranger in 50..100 {
            assert_eq!(told(&client, &format!("tenant {stranger}")).await, "rejected/circuit_open");
        }
        let count = |kind| supervisor.events(kind).len();
        assert!(count("draining") <= 2, "{} events for one drain", count("draining"));
        let opened = supervisor.events("breaker_opened");
        let strangers = opened.iter().filter(|event| {
            let name = event["tenant"].as_str().unwrap_or_default();
            name.strip_prefix("tenant ").and_then(|n| n.parse().ok()).is_some_and(|n: u32| n >= 50)
        });
        assert_eq!(strangers.count(), 0, "tenants that arrived later have no event");
    });
}

#[test]
fn client_honouring_retry_after_gets_past_open_breaker() {
    let supervisor = Supervisor::start(&isolated(
        "max_active = 3, idle = \"200ms\"",
        "max_queue = 5\nbreaker = { window = \"5m\", min_calls = 1, open_for = \"100ms\" }",
    ));
    run(async {
        let client = connect(&supervisor).await;
        let crash = client.job("b", "").operation("abort").tenant("a").send().await;
        assert_eq!(outcome(&crash), "crashed/signal");
        wait_for_rest(&supervisor);
        let mut refusals = Vec::new();
        while let Err(error) = client.job("b", "").tenant("a").send().await {
            let wait = error.retry_after().unwrap();
            refusals.push(wait);
            assert!(refusals.len() < 4, "still refused after {refusals:?}");
            tokio::time::sleep(wait).await;
        }
        assert_eq!(part(&supervisor, "a")["breaker"], "closed");
    });
}
