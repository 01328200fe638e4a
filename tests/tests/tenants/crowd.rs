//! More tenants than `max_active`. Checks the order in which tenants give up their workers, and that no job is lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bulkhead_client::{Client, JobHandle};
use bulkhead_tests::tenants::{
    assert_balanced, isolated, outcomes, part, patch, pids, wait_for_rest, wait_part,
};
use bulkhead_tests::{
    PATIENCE, Running, Supervisor, children, connect, descriptors, heavy, is_alive, kill_pid, outcome,
    resident_bytes, run, spawn, tally, threads, wait_for,
};
use nix::sys::signal::Signal;
use serde_json::Value;

use bulkhead_tests::SetOnDrop;

async fn ok(client: &Client, tenant: &str) {
    let result = client.job("b", "").tenant(tenant).send().await;
    assert_eq!(outcome(&result), "ok", "{tenant}");
}

fn hang(client: &Client, tenant: &str) -> Running {
    spawn(client.job("b", "").operation("hang").tenant(tenant))
}

/// Starts a job that hangs, and waits until the job has begun. Otherwise the job could move to another worker if its
/// worker died before reading it.
async fn running(client: &Client, tenant: &str) -> JobHandle {
    let mut job = client.job("b", "").operation("hang").tenant(tenant).start().await.unwrap();
    job.progress().await.expect("the job reports progress when it starts");
    job
}

/// Checks repeatedly until `end` is set that at most `max_active` tenants have workers, according to the snapshot and
/// to the processes, and that no counter decreases. A tenant can have new workers while its old workers are still
/// exiting. Counts the checks in `checks`.
fn watch(
    supervisor: &Supervisor,
    end: &AtomicBool,
    checks: &AtomicUsize,
    max_active: usize,
    processes: usize,
) {
    let keeper = supervisor.keeper();
    let (mut submitted, mut ended) = (0, 0);
    while !end.load(Ordering::Relaxed) {
        let workers = children(keeper).len();
        assert!(workers <= 2 * max_active * processes, "{workers} processes");
        let snapshot = supervisor.snapshot("b");
        let of = |worker: &Value| worker["tenant"].as_str().expect("the worker names its tenant").to_owned();
        let workers = snapshot["workers"].as_array().unwrap();
        let active = tally(workers.iter().map(of));
        assert!(active.len() <= max_active, "{active:?}");
        let is_exiting = |worker: &Value| {
            ["draining", "terminating", "killing", "reaping"].contains(&worker["state"].as_str().unwrap())
        };
        let staying = tally(workers.iter().filter(|worker| !is_exiting(worker)).map(of));
        assert!(staying.values().all(|&count| count <= processes), "{workers:?}");
        let now = (snapshot["submitted"].as_u64().unwrap(), outcomes(&snapshot));
        assert!(now.0 >= submitted && now.1 >= ended, "{now:?} after {submitted} and {ended}");
        (submitted, ended) = now;
        assert_balanced(&snapshot);
        checks.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn longest_idle_tenant_yields_its_workers() {
    let supervisor = Supervisor::start(&isolated("max_active = 3", ""));
    run(async {
        let client = connect(&supervisor).await;
        for tenant in ["a", "b", "c", "a"] {
            ok(&client, tenant).await;
        }
        // Even without a queue, the newcomer's job waits until `b` has yielded.
        let (a, b, c) = (pids(&supervisor, "a"), pids(&supervisor, "b"), pids(&supervisor, "c"));
        ok(&client, "d").await;
        assert!(!is_alive(b[0]), "b had been idle the longest");
        assert_eq!((pids(&supervisor, "a"), pids(&supervisor, "c")), (a.clone(), c.clone()));
        assert!(pids(&supervisor, "b").is_empty());
        // A tenant with a job does not yield, however old the job is.
        let busy = hang(&client, "c");
        wait_part(&supervisor, "c", "in_flight", 1);
        ok(&client, "e").await;
        ok(&client, "f").await;
        assert_eq!(pids(&supervisor, "c"), c);
        assert!(!is_alive(a[0]));
        let yielded = supervisor.events("worker_exited");
        // On a busy machine, an idle worker can be killed because it did not exit in time.
        let is_late = |event: &Value| event["killed"] == "the worker was asked to stop but was still running";
        assert!(yielded.iter().all(|event| event["exit_code"] == 0 || is_late(event)), "{yielded:?}");
        busy.abort();
    });
}

#[test]
fn new_tenant_is_rejected_while_others_are_busy() {
    let supervisor = Supervisor::start(&isolated("max_active = 2", "max_queue = 5"));
    run(async {
        let client = connect(&supervisor).await;
        let busy: Vec<_> = ["a", "b"].map(|tenant| hang(&client, tenant)).into();
        supervisor.wait_number("b", "in_flight", 2);
        for _ in 0..5 {
            let refused = client.job("b", "").tenant("c").send().await;
            assert_eq!(outcome(&refused), "rejected/unavailable");
            let error = refused.unwrap_err();
            assert!(error.is_retryable() && error.retry_after() >= Some(Duration::from_secs(1)), "{error}");
            assert!(error.to_string().contains("max_active"), "{error}");
        }
        assert_eq!(children(supervisor.keeper()).len(), 2);
        assert_eq!(part(&supervisor, "c")["rejected"]["unavailable"], 5);
        // As soon as one tenant is idle, newcomers are no longer rejected.
        busy[0].abort();
        wait_part(&supervisor, "a", "in_flight", 0);
        wait_for("the new tenant is served", || {
            let send = client.job("b", "").tenant("c").send();
            let result = tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(send));
            (outcome(&result) == "ok").then_some(())
        });
        busy[1].abort();
    });
}

#[test]
fn max_active_limit_holds_with_two_hundred_tenants() {
    let _turn = heavy();
    let supervisor = Supervisor::start(&isolated("max_active = 3, idle = \"50ms\"", "max_queue = 10"));
    let end = AtomicBool::new(false);
    let checks = Arc::new(AtomicUsize::new(0));
    // The order of the tenants is mixed, but the same in every run. The step of 149 is a prime number.
    let order: Arc<Vec<usize>> = Arc::new((0..400).map(|n| (n * 149 + n / 200 * 31) % 200).collect());
    let told = std::thread::scope(|scope| {
        let watched = SetOnDrop(&end);
        let watcher = scope.spawn(|| watch(&supervisor, &end, &checks, 3, 1));
        let told = run(async {
            let clients: Vec<_> = (0..20)
                .map(|lane| {
                    let (socket, order, checks) = (supervisor.socket(), order.clone(), checks.clone());
                    tokio::spawn(async move {
                        let client = Client::connect(socket).await.unwrap();
                        let mut told = Vec::new();
                        // Rejections are fast, so one pass can end before the state has been checked.
                        let began = Instant::now();
                        while told.is_empty()
                            || checks.load(Ordering::Relaxed) < 4 && began.elapsed() < PATIENCE
                        {
                            for tenant in order.iter().skip(lane).step_by(20) {
                                let name = format!("tenant {tenant}");
                                let job = client.job("b", "2").operation("sleep").tenant(name);
                                told.push(outcome(&job.send().await));
                            }
                        }
                        told
                    })
                })
                .collect();
            let mut told = Vec::new();
            for client in clients {
                told.extend(client.await.unwrap());
            }
            told
        });
        drop(watched);
        watcher.join().unwrap();
        assert!(checks.load(Ordering::Relaxed) >= 4);
        told
    });
    let submitted = told.len();
    let told = tally(told);
    let passed = told.get("ok").copied().unwrap_or(0);
    let refused = told.get("rejected/unavailable").copied().unwrap_or(0);
    assert_eq!(passed + refused, submitted, "{told:?}");
    assert!(passed >= 3, "{told:?}");
    let all = supervisor.snapshot("b");
    assert_eq!((&all["submitted"], &all["done"]), (&submitted.into(), &passed.into()), "{all}");
    assert_eq!(all["rejected"]["unavailable"].as_u64().unwrap_or(0), refused as u64, "{all}");
    wait_for_rest(&supervisor);
    assert_eq!(all["tenants"].as_array().unwrap().len(), 10, "only the busiest are listed");
}

#[test]
fn retrying_tenants_are_all_served_eventually() {
    let supervisor =
        Supervisor::start(&isolated("max_active = 2", "processes = 2\nmax_queue = 10\nmax_in_flight = 2"));
    let end = AtomicBool::new(false);
    let checks = Arc::new(AtomicUsize::new(0));
    let done = std::thread::scope(|scope| {
        let watched = SetOnDrop(&end);
        let watcher = scope.spawn(|| watch(&supervisor, &end, &checks, 2, 2));
        let done = run(async {
            let lanes: Vec<_> = (0..12)
                .map(|lane| {
                    let (socket, checks) = (supervisor.socket(), checks.clone());
                    tokio::spawn(async move {
                        let client = Client::connect(socket).await.unwrap();
                        let (began, mut done) = (Instant::now(), 0);
                        while done < 5 || checks.load(Ordering::Relaxed) < 2 {
                            match outcome(&client.job("b", "").tenant(lane.to_string()).send().await).as_str()
                            {
                                "ok" => done += 1,
                                "rejected/unavailable" => tokio::time::sleep(Duration::from_millis(5)).await,
                                other => panic!("{other}"),
                            }
                            assert!(
                                began.elapsed() < PATIENCE,
                                "tenant {lane} has finished only {done} jobs"
                            );
                        }
                        done
                    })
                })
                .collect();
            let mut done = 0;
            for lane in lanes {
                done += lane.await.unwrap();
            }
            done
        });
        drop(watched);
        watcher.join().unwrap();
        done
    });
    assert_eq!(supervisor.number("b", "done"), done);
}

/// The job waits until the workers of another tenant have exited.
#[test]
fn job_waiting_for_tenant_eviction_keeps_its_deadline() {
    let supervisor = Supervisor::start(&isolated("max_active = 1", "max_queue = 5"));
    run(async {
        let client = connect(&supervisor).await;
        ok(&client, "a").await;
        // The stopped worker ignores the order to exit and is killed later.
        kill_pid(pids(&supervisor, "a")[0], Signal::SIGSTOP);
        let late = client.job("b", "").tenant("b").deadline(Duration::from_millis(100)).send().await;
        assert_eq!(outcome(&late), "deadline_exceeded/queued");
        // Afterwards, another tenant can become active again.
        wait_for_rest(&supervisor);
        for tenant in ["c", "a", "b"] {
            ok(&client, tenant).await;
        }
        let waits = part(&supervisor, "b");
        assert_eq!((&waits["deadline_exceeded"], &waits["done"]), (&1.into(), &1.into()), "{waits}");
    });
}

/// Returns the configuration of a bulkhead whose first worker becomes ready at once, and whose other workers become
/// ready when the file `go` exists. This keeps a new tenant's job waiting, no matter how early the workers of another
/// tenant exit.
fn starting_on_request(tenants: &str, more: &str) -> String {
    isolated(tenants, more).replace("[\"MISBEHAVE\"]", "[\"MISBEHAVE\", \"slow-again\", \"starts\"]")
}

#[test]
fn cancelled_tenant_does_not_block_the_next_tenant() {
    let supervisor = Supervisor::start(&starting_on_request("max_active = 1", "max_queue = 5"));
    run(async {
        let client = connect(&supervisor).await;
        ok(&client, "a").await;
        kill_pid(pids(&supervisor, "a")[0], Signal::SIGSTOP);
        let gone = spawn(client.job("b", "").tenant("gone"));
        wait_part(&supervisor, "gone", "queued", 1);
        gone.abort();
        wait_part(&supervisor, "gone", "cancelled", 1);
        supervisor.touch("go");
        ok(&client, "next").await;
    });
}

#[test]
fn evicted_tenant_gets_new_workers() {
    let supervisor = Supervisor::start(&isolated("max_active = 1", "max_queue = 5"));
    run(async {
        let client = connect(&supervisor).await;
        ok(&client, "a").await;
        let old = pids(&supervisor, "a");
        kill_pid(old[0], Signal::SIGSTOP);
        let first = spawn(client.job("b", "").tenant("b"));
        wait_part(&supervisor, "b", "queued", 1);
        // The workers of `a` are already exiting to make room for `b`.
        let second = spawn(client.job("b", "").tenant("a"));
        for job in [first, second] {
            assert_eq!(outcome(&job.await.unwrap()), "ok");
        }
        assert_ne!(pids(&supervisor, "a"), old);
        assert_balanced(&supervisor.snapshot("b"));
    });
}

#[test]
fn rate_limited_tenant_does_not_evict_other_tenants() {
    let supervisor = Supervisor::start(&isolated("max_active = 1", ""));
    assert_eq!(
        patch(&supervisor, "b/tenants/spam", r#"{"rate_limit": {"per_second": 0.001, "burst": 1}}"#).0,
        200
    );
    run(async {
        let client = connect(&supervisor).await;
        ok(&client, "spam").await;
        ok(&client, "a").await;
        let before = pids(&supervisor, "a");
        for _ in 0..20 {
            let refused = client.job("b", "").tenant("spam").send().await;
            assert_eq!(outcome(&refused), "rejected/rate_limited");
        }
        ok(&client, "a").await;
        assert_eq!(
            pids(&supervisor, "a"),
            before,
            "a tenant without permission to run a job took the workers of a"
        );
    });
}

#[test]
fn disabled_tenants_do_not_evict_other_tenants() {
    let supervisor = Supervisor::start(&format!(
        "{}[bulkhead.b.tenant.a]\nmax_in_flight = 1\n",
        isolated("max_active = 1", "max_in_flight = 0")
    ));
    run(async {
        let client = connect(&supervisor).await;
        ok(&client, "a").await;
        let before = pids(&supervisor, "a");
        for stranger in ["x", "y"] {
            let refused = client.job("b", "").tenant(stranger).send().await;
            assert_eq!(outcome(&refused), "rejected/queue_full");
        }
        ok(&client, "a").await;
        assert_eq!(pids(&supervisor, "a"), before);
    });
}

#[test]
fn shutdown_finishes_running_jobs_and_rejects_waiting_tenants() {
    let mut supervisor = Supervisor::start(&starting_on_request("max_active = 3", "max_queue = 5"));
    let keeper = supervisor.keeper();
    let workers = run(async {
        let client = connect(&supervisor).await;
        supervisor.touch("go");
        ok(&client, "leaving").await;
        ok(&client, "idle").await;
        let busy = spawn(client.job("b", "").operation("steps:wait end").tenant("busy"));
        wait_part(&supervisor, "busy", "in_flight", 1);
        let behind = spawn(client.job("b", "").tenant("busy"));
        wait_part(&supervisor, "busy", "queued", 1);
        let workers = supervisor.worker_pids("b");
        std::fs::remove_file(supervisor.file("go")).unwrap();
        kill_pid(pids(&supervisor, "leaving")[0], Signal::SIGSTOP);
        let waiting = spawn(client.job("b", "").tenant("waiting"));
        wait_part(&supervisor, "waiting", "queued", 1);
        supervisor.signal(Signal::SIGTERM);
        assert_eq!(outcome(&waiting.await.unwrap()), "rejected/draining");
        assert_eq!(outcome(&behind.await.unwrap()), "rejected/draining");
        for tenant in ["new", "idle", "leaving", "waiting"] {
            assert_eq!(outcome(&client.job("b", "").tenant(tenant).send().await), "rejected/draining");
        }
        supervisor.touch("end");
        assert_eq!(outcome(&busy.await.unwrap()), "ok");
        workers
    });
    assert_eq!(supervisor.wait().code(), Some(0));
    assert_eq!(workers.len(), 3);
    let left: Vec<_> = workers.iter().chain([&keeper]).filter(|&&pid| is_alive(pid)).collect();
    assert!(left.is_empty(), "{left:?} still exist");
}

#[test]
fn drain_timeout_kills_workers_of_every_tenant() {
    let mut supervisor =
        Supervisor::start_with("drain_timeout = \"200ms\"", &isolated("max_active = 4", "processes = 2"));
    let workers = run(async {
        let client = connect(&supervisor).await;
        let mut jobs = Vec::new();
        for tenant in ["a", "b", "c", "d"] {
            jobs.push(running(&client, tenant).await);
        }
        supervisor.wait_number("b", "in_flight", 4);
        supervisor.wait_number("b", "limit", 8);
        let workers = supervisor.worker_pids("b");
        supervisor.signal(Signal::SIGTERM);
        for job in jobs {
            assert_eq!(outcome(&job.await), "crashed/stopped");
        }
        workers
    });
    assert_eq!(supervisor.wait().code(), Some(0));
    assert!(workers.len() == 8 && !workers.iter().any(|&pid| is_alive(pid)));
}

#[test]
fn killed_keeper_is_replaced_for_all_tenants() {
    let supervisor = Supervisor::start(&starting_on_request("max_active = 3", "max_queue = 5"));
    run(async {
        let client = connect(&supervisor).await;
        supervisor.touch("go");
        for round in 1..=4 {
            ok(&client, "leaving").await;
            ok(&client, "idle").await;
            let busy = client.job("b", "").operation("steps:count begun;sleep 3600000").tenant("busy");
            let busy = spawn(busy);
            // A job that the dying worker has not read would go to another worker.
            wait_for("the job has begun", || (supervisor.file_bytes("begun") == round).then_some(()));
            std::fs::remove_file(supervisor.file("go")).unwrap();
            kill_pid(pids(&supervisor, "leaving")[0], Signal::SIGSTOP);
            let waiting = spawn(client.job("b", "").tenant("waiting"));
            wait_part(&supervisor, "waiting", "queued", 1);
            let (keeper, before) = (supervisor.keeper(), supervisor.worker_pids("b"));
            kill_pid(keeper, Signal::SIGKILL);
            assert_eq!(outcome(&busy.await.unwrap()), "crashed/signal");
            supervisor.touch("go");
            assert_eq!(outcome(&waiting.await.unwrap()), "ok");
            wait_for("no old workers are left", || (!before.iter().any(|&pid| is_alive(pid))).then_some(()));
            for tenant in ["busy", "idle", "leaving", "waiting", "new"] {
                ok(&client, tenant).await;
            }
            assert!(children(supervisor.keeper()).len() <= 3);
        }
        assert_balanced(&supervisor.snapshot("b"));
        assert_eq!(supervisor.snapshot("b")["state"], "ready");
    });
}

#[test]
fn two_thousand_tenants_leak_no_resources() {
    let _turn = heavy();
    let supervisor = Supervisor::start(&isolated("max_active = 2", ""));
    run(async {
        let client = connect(&supervisor).await;
        let turns = async |from: usize, to: usize| {
            for tenant in from..to {
                ok(&client, &format!("tenant {tenant}")).await;
            }
        };
        turns(0, 200).await;
        let (pid, keeper) = (supervisor.pid(), supervisor.keeper());
        let before = (resident_bytes(pid), descriptors(pid), threads(pid), descriptors(keeper));
        turns(200, 2000).await;
        assert!(children(keeper).len() <= 2);
        let after = (resident_bytes(pid), descriptors(pid), threads(pid), descriptors(keeper));
        assert!(after.1 <= before.1 + 8, "descriptors: {}, before: {}", after.1, before.1);
        assert!(after.2 <= before.2, "threads: {}, before: {}", after.2, before.2);
        assert!(after.3 <= before.3 + 4, "the keeper's descriptors: {}, before: {}", after.3, before.3);
        assert!(after.0 < before.0 + (32 << 20), "memory: {}, before: {}", after.0, before.0);
        let all = supervisor.snapshot("b");
        assert_eq!((&all["submitted"], &all["done"]), (&2000.into(), &2000.into()), "{all}");
    });
}

#[test]
fn rejected_tenants_use_bounded_memory() {
    let _turn = heavy();
    let supervisor =
        Supervisor::start(&isolated("max_active = 1", "max_in_flight = 2\ndeadline_max = \"1h\""));
    run(async {
        let client = connect(&supervisor).await;
        // The job must outlast all others, even on a busy machine.
        let hour = Duration::from_secs(3600);
        let busy = spawn(client.job("b", "").operation("hang").tenant("busy").deadline(hour));
        wait_part(&supervisor, "busy", "in_flight", 1);
        let flood = async |from: usize, to: usize| {
            for tenant in from..to {
                let result = client.job("b", "").tenant(format!("tenant {tenant}")).send().await;
                assert_eq!(outcome(&result), "rejected/unavailable");
            }
        };
        // Sends jobs of as many tenants as are remembered, and then of three times as many.
        flood(0, 5_000).await;
        let pid = supervisor.pid();
        let before = (resident_bytes(pid), descriptors(pid), threads(pid));
        let first = supervisor.snapshot("b");
        flood(5_000, 20_000).await;
        let after = (resident_bytes(pid), descriptors(pid), threads(pid));
        assert!(after.0 < before.0 + (16 << 20), "memory: {}, before: {}", after.0, before.0);
        assert!(after.1 <= before.1 + 4 && after.2 <= before.2, "{after:?} after {before:?}");
        // A tenant with a job is not forgotten, and no count is lost.
        assert_eq!(outcome(&client.job("b", "").tenant("busy").send().await), "ok");
        let all = supervisor.snapshot("b");
        assert_eq!(first["submitted"], 5_001, "{}", first["rejected"]);
        assert_eq!((&all["submitted"], &all["rejected"]["unavailable"]), (&20_002.into(), &20_000.into()));
        assert_balanced(&all);
        assert_eq!(supervisor.try_get("/v1/bulkheads/b?tenant=tenant%200").unwrap().0, 404);
        assert_eq!(supervisor.try_get("/healthz").unwrap().0, 200);
        busy.abort();
    });
}

/// The supervisor must remember tenants whose jobs are waiting in the fallback, and must still forget other tenants
/// when there are too many.
#[test]
fn other_tenants_are_forgotten_while_jobs_are_at_a_fallback() {
    const WAITING: usize = 30;
    let _turn = heavy();
    let keys = format!(
        "fallback = [\"f\"]\n[bulkhead.f]\ncommand = [\"MISBEHAVE\"]\nmax_queue = {WAITING}\ndeadline = \"1h\""
    );
    let supervisor = Supervisor::start(
        &isolated("max_active = 1", &keys).replace("deadline = \"60s\"", "deadline = \"1h\""),
    );
    run(async {
        let client = connect(&supervisor).await;
        let busy = running(&client, "busy").await;
        // One job runs in the fallback, and the others wait there.
        let mut at_fallback = Vec::new();
        for number in 0..=WAITING {
            let job = client.job("b", "").operation("hang").tenant(format!("waiting {number}"));
            at_fallback.push(job.start().await.unwrap());
        }
        supervisor.wait_number("f", "queued", WAITING as u64);
        for tenant in 0..5_000 {
            let result = client.job("b", "").tenant(format!("tenant {tenant}")).send().await;
            assert_eq!(outcome(&result), "rejected/unavailable");
        }
        let is_remembered =
            |tenant: &str| supervisor.try_get(&format!("/v1/bulkheads/b?tenant={tenant}")).unwrap().0 == 200;
        assert!(!is_remembered("tenant%20200"));
        assert!((0..=WAITING).all(|number| is_remembered(&format!("waiting%20{number}"))));
        drop((busy, at_fallback));
        supervisor.wait_number("b", "cancelled", WAITING as u64 + 2);
        assert_balanced(&supervisor.snapshot("b"));
    });
}
