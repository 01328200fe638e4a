//! The adaptive limit with real workers: sudden changes in service time, reports to operators, and configuration
//! changes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use bulkhead_client::Client;
use bulkhead_tests::{PATIENCE, Supervisor, kill_pid, run, wait_for};
use nix::sys::signal::Signal;
use serde_json::Value;

/// Returns the configuration of a bulkhead with two processes that run up to four jobs each.
fn bulkhead(keys: &str) -> String {
    format!(
        "[defaults]\ndeadline = \"120s\"\n[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nprocesses = 2\n\
         max_in_flight = 4\nmax_queue = 100\n{keys}\n"
    )
}

const ENFORCE: &str = "adaptive = { min = 1, max = 8, target = \"200ms\" }";
const MONITOR: &str = "adaptive = { min = 1, max = 8, target = \"200ms\", mode = \"monitor\" }";

/// Sixteen clients that keep the bulkhead under load until this value is dropped. Each client sends one job at a time.
struct Load {
    service_ms: Arc<AtomicU64>,
    failed: Arc<AtomicU64>,
    is_over: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Load {
    fn of(supervisor: &Supervisor, service_ms: u64) -> Self {
        let (service_ms, failed) = (Arc::new(AtomicU64::new(service_ms)), Arc::new(AtomicU64::new(0)));
        let is_over = Arc::new(AtomicBool::new(false));
        let (socket, service, over, lost) =
            (supervisor.socket(), service_ms.clone(), is_over.clone(), failed.clone());
        let clients = async move {
            let client = Client::connect(socket).await.unwrap();
            let mut clients = tokio::task::JoinSet::new();
            for _ in 0..16 {
                let (client, service, over, lost) =
                    (client.clone(), service.clone(), over.clone(), lost.clone());
                clients.spawn(async move {
                    while !over.load(Ordering::SeqCst) {
                        let time = service.load(Ordering::SeqCst).to_string();
                        if client.job("b", time).operation("sleep").send().await.is_err() {
                            lost.fetch_add(1, Ordering::SeqCst);
                        }
                    }
                });
            }
            clients.join_all().await;
        };
        let thread = Some(std::thread::spawn(|| run(clients)));
        Self { service_ms, failed, is_over, thread }
    }

    fn takes(&self, ms: u64) {
        self.service_ms.store(ms, Ordering::SeqCst);
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        let _ = self.thread.take().map(std::thread::JoinHandle::join);
    }
}

fn adaptive(supervisor: &Supervisor, field: &str) -> u64 {
    supervisor.snapshot("b")["adaptive"][field].as_u64().unwrap_or_else(|| panic!("{field}"))
}

/// Waits until the adaptive limit reaches the given value. Returns the snapshot.
fn wait_limit(supervisor: &Supervisor, limit: u64) -> Value {
    wait_for(&format!("the limit is {limit}"), || {
        let snapshot = supervisor.snapshot("b");
        (snapshot["adaptive"]["limit"] == limit).then_some(snapshot)
    })
}

#[test]
fn limit_falls_for_slow_jobs_and_recovers_for_fast_jobs() {
    let supervisor = Supervisor::start(&bulkhead(ENFORCE));
    assert_eq!((supervisor.number("b", "limit"), adaptive(&supervisor, "limit")), (8, 8));
    let load = Load::of(&supervisor, 1);
    wait_for("50 jobs are done", || (supervisor.number("b", "done") > 50).then_some(()));
    load.takes(400);
    let slow = wait_limit(&supervisor, 1);
    assert_eq!((&slow["limit"], &slow["adaptive"]["mode"]), (&1.into(), &"enforce".into()), "{slow}");
    assert!(slow["adaptive"]["latency_ms"].as_f64() >= Some(400.0), "{slow}");
    // Running jobs finish first. Afterwards all workers together run at most `limit` jobs.
    wait_for("one job is in flight", || (supervisor.number("b", "in_flight") == 1).then_some(()));
    let done = supervisor.number("b", "done");
    wait_for("jobs run at the minimum limit", || (supervisor.number("b", "done") > done).then_some(()));
    assert!(supervisor.number("b", "in_flight") <= 1);
    load.takes(1);
    wait_limit(&supervisor, 8);
    assert_eq!(load.failed.load(Ordering::SeqCst), 0, "a job was rejected although the queue had room");
    let told = supervisor.wait_events("limit_adapted", 1);
    assert_eq!((&told[0]["bulkhead"], &told[0]["from"]), (&"b".into(), &8.into()), "{told:?}");
    assert!(told[0]["to"].as_u64() < Some(8) && told[0]["target_ms"] == 200.0, "{told:?}");
    // On a busy machine, the limit can fall again for a moment.
    let metrics = wait_for("the metrics contain the limit", || {
        let metrics = supervisor.try_get("/metrics")?.1;
        metrics.contains("bulkhead_adaptive_limit{bulkhead=\"b\"} 8").then_some(metrics)
    });
    assert!(
        metrics.contains("bulkhead_adaptive_changes_total{bulkhead=\"b\",direction=\"down\"}"),
        "{metrics}"
    );
    wait_for("the status shows the limit", || {
        let status = supervisor.command().args(["status", "b"]).output().unwrap();
        let status = String::from_utf8(status.stdout).unwrap();
        status.contains("adaptive  enforce limit 8 of 1..8").then_some(())
    });
    let advice = supervisor.get("/v1/bulkheads/b/advice");
    let keeps = advice["kept"].as_array().unwrap();
    let kept = keeps.iter().find(|kept| kept["key"] == "adaptive");
    assert!(kept.is_some_and(|kept| kept["reason"].as_str().unwrap().contains("of 200 ms")), "{advice}");
}

#[test]
fn monitor_mode_reports_but_does_not_limit() {
    let supervisor = Supervisor::start(&bulkhead(MONITOR));
    let _load = Load::of(&supervisor, 400);
    wait_for("the limit falls", || (adaptive(&supervisor, "limit") < 8).then_some(()));
    wait_for("eight jobs are in flight", || (supervisor.number("b", "in_flight") == 8).then_some(()));
    assert_eq!(supervisor.number("b", "limit"), 8);
    let told = supervisor.wait_events("limit_adapted", 1);
    assert_eq!(told[0]["mode"], "monitor", "{told:?}");
    // A reload that switches to `enforce` keeps the learned limit.
    supervisor.configure("", &bulkhead(ENFORCE));
    assert_eq!(supervisor.post("/v1/reload").0, 200);
    wait_for("the lower limit is enforced", || (supervisor.number("b", "limit") < 8).then_some(()));
    // A reload that removes `adaptive` lifts the limit.
    supervisor.configure("", &bulkhead(""));
    assert_eq!(supervisor.post("/v1/reload").0, 200);
    assert_eq!(supervisor.number("b", "limit"), 8);
    assert!(supervisor.snapshot("b")["adaptive"].is_null());
}

#[test]
fn worker_deaths_do_not_reset_adaptive_limit() {
    let supervisor = Supervisor::start(&bulkhead(&format!("{ENFORCE}\nstart = {{ spares = 1 }}")));
    let load = Load::of(&supervisor, 400);
    wait_limit(&supervisor, 1);
    for _ in 0..3 {
        let pids = supervisor.worker_pids("b");
        pids.into_iter().for_each(|pid| kill_pid(pid, Signal::SIGKILL));
        wait_for("the bulkhead is ready and runs jobs", || {
            let done = supervisor.number("b", "done");
            wait_for("another job is done", || (supervisor.number("b", "done") > done).then_some(()));
            (supervisor.snapshot("b")["state"] == "ready").then_some(())
        });
        assert!(supervisor.number("b", "in_flight") <= adaptive(&supervisor, "limit").max(2));
    }
    supervisor.post("/v1/bulkheads/b/restart");
    load.takes(1);
    wait_limit(&supervisor, 8);
}

#[test]
fn resize_below_adaptive_maximum_is_rejected() {
    let supervisor = Supervisor::start(&bulkhead(ENFORCE));
    for change in
        [r#"{"processes": 1}"#, r#"{"max_in_flight": 3}"#, r#"{"max_in_flight": 0, "max_queue": 0}"#]
    {
        let (status, problem) = supervisor.patch("/v1/bulkheads/b", change);
        let said = problem["detail"].as_str().unwrap_or_default().to_owned();
        assert!(status == 400 && said.contains("adaptive.max (8)"), "{status} {problem}");
    }
    let snapshot = supervisor.snapshot("b");
    assert_eq!((&snapshot["processes"], &snapshot["limit"]), (&2.into(), &8.into()));
    supervisor.resize("b", r#"{"processes": 4}"#);
    wait_for("there are four workers", || (supervisor.worker_pids("b").len() == 4).then_some(()));
    assert_eq!(supervisor.number("b", "limit"), 8, "the limit stays at `adaptive.max`");
    // A reload with an invalid file changes nothing.
    let above = ENFORCE.replace("max = 8", "max = 9");
    supervisor.configure("", &bulkhead(&above));
    let (status, said) = supervisor.post("/v1/reload");
    assert!(
        status >= 400 && said.contains("adaptive.max") && said.contains("max_in_flight"),
        "{status} {said}"
    );
    assert_eq!(supervisor.number("b", "limit"), 8);
}

#[test]
fn each_isolated_tenant_has_its_own_adaptive_limit() {
    let isolated = |idle: &str| {
        bulkhead(&format!("{ENFORCE}\ntenants = {{ isolate = true, max_active = 4, idle = \"{idle}\" }}"))
    };
    let supervisor = Supervisor::start(&isolated("5m"));
    run(async {
        let client = Client::connect(supervisor.socket()).await.unwrap();
        let began = Instant::now();
        let slow = async {
            while supervisor.snapshot("b")["adaptive"]["lowered"].as_u64().unwrap_or(0) == 0 {
                assert!(began.elapsed() < PATIENCE, "the tenant's slow jobs do not lower the limit");
                let mut jobs = tokio::task::JoinSet::new();
                for _ in 0..8 {
                    jobs.spawn(client.job("b", "400").operation("sleep").tenant("slow").send());
                }
                jobs.join_all().await;
            }
        };
        let quick = client.job("b", "1").operation("sleep").tenant("quick");
        let (_, quick) = tokio::join!(slow, quick.send());
        assert!(quick.is_ok());
    });
    let part = |tenant: &str| supervisor.get(&format!("/v1/bulkheads/b?tenant={tenant}"));
    assert!(part("slow")["limit"].as_u64() < Some(8), "{}", part("slow"));
    assert_eq!(part("quick")["limit"], 8);
    let (status, problem) = supervisor.patch("/v1/bulkheads/b/tenants/quick", r#"{"processes": 1}"#);
    assert!(status == 400 && problem.to_string().contains("adaptive.max"), "{status} {problem}");
    // The counters remain when no tenant has workers.
    supervisor.configure("", &isolated("100ms"));
    assert_eq!(supervisor.post("/v1/reload").0, 200);
    wait_for("no tenant has workers", || (adaptive(&supervisor, "limit") == 0).then_some(()));
    assert!(adaptive(&supervisor, "lowered") > 0);
}
