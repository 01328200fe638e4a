//! Recycling. Workers that reach their limit on jobs, age or memory are replaced, and no job fails.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bulkhead_client::blocking::Client;
use bulkhead_tests::{PATIENCE, Supervisor, wait_for};

use bulkhead_tests::SetOnDrop;

/// Sends jobs from several threads until enough different workers have served jobs. `enough` is called with the number
/// of these workers. Every job must succeed. Returns the workers' PIDs.
fn serve_until(
    supervisor: &Supervisor,
    operation: &str,
    payload: &str,
    enough: impl Fn(usize) -> bool,
) -> BTreeSet<u32> {
    let client = Client::connect(supervisor.socket()).unwrap();
    let is_enough = AtomicBool::new(false);
    let pids = Mutex::new(BTreeSet::<u32>::new());
    let served = || pids.lock().unwrap().len();
    std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    while !is_enough.load(Ordering::Relaxed) {
                        let reply = client.job("b", payload).operation(operation).send();
                        let pid = reply.unwrap().outcome().worker_pid;
                        pids.lock().unwrap().extend(pid);
                    }
                })
            })
            .collect();
        let began = Instant::now();
        let has_failed = || lanes.iter().any(|lane| lane.is_finished());
        while !enough(served()) && began.elapsed() < PATIENCE && !has_failed() {
            std::thread::park_timeout(Duration::from_millis(20));
        }
        is_enough.store(true, Ordering::Relaxed);
        assert!(began.elapsed() < PATIENCE, "too few workers were recycled within {PATIENCE:?}");
        lanes.into_iter().for_each(|lane| lane.join().unwrap());
    });
    pids.into_inner().unwrap()
}

/// Returns the number of `worker_recycled` events with the given reason.
fn recycled(supervisor: &Supervisor, reason: &str) -> usize {
    let output = supervisor.command().args(["--json", "events"]).output().unwrap();
    let events = String::from_utf8(output.stdout).unwrap();
    let is_one = |event: &serde_json::Value| event["kind"] == "worker_recycled" && event["reason"] == reason;
    events.lines().filter(|line| serde_json::from_str(line).is_ok_and(|event| is_one(&event))).count()
}

fn supervisor(recycle: &str) -> Supervisor {
    Supervisor::start(&format!(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nprocesses = 2\nmax_in_flight = 2\nmax_queue = 10\n\
         recycle = {{ {recycle} }}\n"
    ))
}

/// Checks that all replaced workers are gone, and that exactly the two configured workers are left.
fn assert_settled(supervisor: &Supervisor, served: &BTreeSet<u32>) {
    let now: BTreeSet<u32> = wait_for("two workers are left", || {
        let pids = supervisor.worker_pids("b");
        (pids.len() == 2).then(|| pids.into_iter().collect())
    });
    let left: Vec<_> = served.difference(&now).filter(|&&pid| bulkhead_tests::is_alive(pid)).collect();
    assert!(left.is_empty(), "workers {left:?} are still alive");
    assert_eq!(supervisor.number("b", "crashed"), 0);
    assert_eq!(supervisor.number("b", "failed"), 0);
}

#[test]
fn worker_is_recycled_after_configured_number_of_jobs() {
    let supervisor = supervisor("jobs = 10");
    let pids = serve_until(&supervisor, "echo", "x", |_| recycled(&supervisor, "jobs") >= 6);
    assert!(pids.len() >= 6, "{pids:?}");
    assert_settled(&supervisor, &pids);
}

#[test]
fn worker_is_recycled_at_maximum_age() {
    let supervisor = supervisor("age = \"100ms\"");
    // On a busy machine, workers can be recycled before they have served any jobs.
    let enough = |served: usize| served >= 6 && recycled(&supervisor, "age") >= 6;
    let pids = serve_until(&supervisor, "echo", "x", enough);
    assert!(pids.len() >= 6, "{pids:?}");
    drop(supervisor);
}

#[test]
fn worker_is_recycled_above_memory_limit() {
    let supervisor = supervisor("rss = \"48MiB\"");
    let enough = |served: usize| served >= 3 && recycled(&supervisor, "rss") >= 3;
    let pids = serve_until(&supervisor, "hoard", "4", enough);
    assert!(pids.len() >= 3, "{pids:?}");
    assert_settled(&supervisor, &pids);
}

/// The bulkhead has no queue, so jobs wait only if a worker is starting.
#[test]
fn recycling_after_each_job_gives_fresh_processes() {
    let bulkhead = |name: &str, program: &str| {
        format!("[bulkhead.{name}]\n{program}\nprocesses = 2\nmax_queue = 0\nrecycle = {{ jobs = 1 }}\n")
    };
    let supervisor = Supervisor::start(&format!(
        "{}{}",
        bulkhead("b", "command = [\"MISBEHAVE\"]"),
        bulkhead("x", "exec = [\"cat\"]")
    ));
    for (name, count) in [("b", 100), ("x", 20)] {
        let client = Client::connect(supervisor.socket()).unwrap();
        let pids: Vec<Option<u32>> = std::thread::scope(|scope| {
            let lane = || {
                let job = || client.job(name, "x").operation("echo").send().unwrap().outcome().worker_pid;
                scope.spawn(move || (0..count).map(|_| job()).collect::<Vec<_>>())
            };
            let lanes = [lane(), lane()];
            lanes.into_iter().flat_map(|lane| lane.join().unwrap()).collect()
        });
        assert_eq!(pids.iter().collect::<BTreeSet<_>>().len(), 2 * count, "{name}: {pids:?}");
        assert_eq!(supervisor.number(name, "done"), 2 * count as u64, "{name}");
    }
}

/// `recycle.jobs` limits the number of jobs even if `max_in_flight` changes while jobs run.
#[test]
fn worker_never_runs_more_jobs_than_recycle_allows() {
    let supervisor = supervisor("jobs = 5");
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let resizing = SetOnDrop(&is_over);
        scope.spawn(|| {
            for most in [4, 1, 3].into_iter().cycle() {
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
                supervisor.resize("b", &format!("{{\"max_in_flight\": {most}}}"));
                std::thread::park_timeout(Duration::from_millis(5));
            }
        });
        let client = Client::connect(supervisor.socket()).unwrap();
        let pids: Vec<Option<u32>> = std::thread::scope(|scope| {
            let job = || client.job("b", "x").operation("echo").send().unwrap().outcome().worker_pid;
            let lanes: Vec<_> =
                (0..4).map(|_| scope.spawn(move || (0..50).map(|_| job()).collect::<Vec<_>>())).collect();
            lanes.into_iter().flat_map(|lane| lane.join().unwrap()).collect()
        });
        drop(resizing);
        let served = bulkhead_tests::tally(pids);
        assert!(served.values().all(|&jobs| jobs <= 5), "{served:?}");
    });
}
