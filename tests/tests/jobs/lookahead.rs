//! Prefetched jobs (`lookahead`). No prefetched jobs are lost when a worker dies, and no job begins twice. Jobs behind
//! a slow job go to other workers.

use std::time::{Duration, Instant};

use bulkhead_client::{Client, Job, Priority};
use bulkhead_shared::Executed;
use bulkhead_tests::{
    PATIENCE, Running, Supervisor, connect, kill_pid, outcome, run, spawn, tally, wait_for,
};
use nix::sys::signal::Signal;

/// Number of jobs sent by tests that need many jobs.
const MANY: usize = 200;

/// A lookahead long enough for one worker to prefetch all jobs of a test.
const LONG: &str = "lookahead = \"10s\"";

fn start(keys: &str) -> Supervisor {
    start_with("", keys)
}

fn start_with(arguments: &str, keys: &str) -> Supervisor {
    let arguments = if arguments.is_empty() { String::new() } else { format!(", \"{arguments}\"") };
    Supervisor::start(&format!(
        "[defaults]\ndeadline = \"60s\"\nrestart = {{ backoff = \"1ms\", backoff_max = \"5ms\", max = 1000 }}\n\
         [defaults.sandbox]\nprofile = \"none\"\n\
         [bulkhead.b]\ncommand = [\"MISBEHAVE\"{arguments}]\nmax_queue = 1000\n{keys}\n"
    ))
}

fn steps(client: &Client, steps: &str) -> Job {
    client.job("b", "").operation(format!("steps:{steps}"))
}

/// Runs a few short jobs, because the supervisor prefetches jobs only for workers that are known to be fast.
async fn warm_up(client: &Client) {
    for _ in 0..20 {
        assert!(client.job("b", "x").send().await.is_ok());
    }
}

/// A dying worker loses only its running jobs, and no job begins twice.
#[test]
fn worker_death_fails_only_the_running_job() {
    for max_in_flight in [1, 3] {
        let supervisor = start(&format!("max_in_flight = {max_in_flight}\n{LONG}"));
        run(async {
            let client = connect(&supervisor).await;
            warm_up(&client).await;
            let jobs: Vec<Running> = (0..MANY)
                .map(|n| {
                    let death = if n % 20 == 10 { ";die" } else { "" };
                    spawn(steps(&client, &format!("count begun-{n}{death};count ended-{n}")))
                })
                .collect();
            let mut ends = Vec::new();
            for (n, job) in jobs.into_iter().enumerate() {
                let end = outcome(&job.await.unwrap());
                let (begun, ended) = (
                    supervisor.file_bytes(&format!("begun-{n}")),
                    supervisor.file_bytes(&format!("ended-{n}")),
                );
                assert!(begun <= 1, "job {n} began {begun} times, and ended as {end}");
                assert!(end != "ok" || ended == 1, "job {n} finished {ended} times, but ended as {end}");
                if max_in_flight == 1 {
                    // The worker runs one job at a time, so only the job that killed the worker fails.
                    assert_eq!(end != "ok", n % 20 == 10, "job {n} ended as {end}");
                }
                ends.push(end);
            }
            let ends = tally(ends.iter().map(String::as_str));
            assert!(ends["ok"] >= MANY - 10 * (2 * max_in_flight - 1), "{ends:?}");
        });
    }
}

/// Sends SIGKILL to the worker at ten different moments.
#[test]
fn killed_worker_loses_at_most_one_job() {
    let supervisor = start(LONG);
    run(async {
        let client = connect(&supervisor).await;
        let mut lost = 0;
        for round in 0..10 {
            warm_up(&client).await;
            let before = supervisor.number("b", "restarts");
            let pid = supervisor.worker_pids("b")[0];
            let path = |n: usize, what: &str| format!("{what}-{round}-{n}");
            let jobs: Vec<Running> = (0..MANY)
                .map(|n| {
                    let (begun, ended) = (path(n, "begun"), path(n, "ended"));
                    spawn(steps(&client, &format!("count {begun};count {ended}")))
                })
                .collect();
            wait_for("a job of the round has ended", || {
                (supervisor.file_bytes(&path(10 * round, "ended")) > 0).then_some(())
            });
            kill_pid(pid, Signal::SIGKILL);
            for (n, job) in jobs.into_iter().enumerate() {
                let end = outcome(&job.await.unwrap());
                let begun = supervisor.file_bytes(&path(n, "begun"));
                assert!(begun <= 1, "job {n} of round {round} began {begun} times, and ended as {end}");
                lost += usize::from(end != "ok");
            }
            supervisor.wait_number("b", "restarts", before + 1);
        }
        assert!(lost <= 10, "{lost} jobs were lost in 10 deaths");
    });
}

/// Prefetched jobs that are stuck behind an unexpectedly slow job move to another worker.
#[test]
fn jobs_behind_slow_job_go_to_another_worker() {
    let supervisor = start("processes = 2\nlookahead = \"50ms\"");
    run(async {
        let client = connect(&supervisor).await;
        for _ in 0..3 {
            let quick: Vec<Running> = (0..50).map(|_| spawn(client.job("b", "x"))).collect();
            for job in quick {
                assert_eq!(outcome(&job.await.unwrap()), "ok");
            }
        }
        // The slow job ends only after all jobs behind it are done.
        let slow = spawn(steps(&client, "wait go"));
        let quick: Vec<Running> = (0..100).map(|_| spawn(client.job("b", "x"))).collect();
        for job in quick {
            assert_eq!(outcome(&job.await.unwrap()), "ok");
        }
        supervisor.touch("go");
        assert_eq!(outcome(&slow.await.unwrap()), "ok");
    });
}

/// A prefetched job counts as queued until the job begins. Clients can cancel such jobs, and critical jobs can overtake
/// them.
#[test]
fn prefetched_jobs_count_as_queued() {
    let supervisor = start(LONG);
    run(async {
        let client = connect(&supervisor).await;
        warm_up(&client).await;
        let first = spawn(steps(&client, "wait go"));
        supervisor.wait_number("b", "in_flight", 1);
        let normal: Vec<Running> =
            (0..5).map(|n| spawn(steps(&client, &format!("count order-{n};count order")))).collect();
        supervisor.wait_number("b", "queued", 5);
        assert_eq!(supervisor.number("b", "in_flight"), 1);
        let cancelled = steps(&client, "count cancelled").start().await.unwrap();
        supervisor.wait_number("b", "queued", 6);
        cancelled.cancel();
        let end = outcome(&cancelled.await);
        assert!(end.starts_with("cancelled"), "{end}");
        supervisor.wait_number("b", "queued", 5);
        // The critical job has to overtake the prefetched jobs.
        let critical = spawn(steps(&client, "count critical").priority(Priority::Critical));
        supervisor.wait_number("b", "queued", 6);
        supervisor.touch("go");
        assert_eq!(outcome(&critical.await.unwrap()), "ok");
        for job in normal {
            assert_eq!(outcome(&job.await.unwrap()), "ok");
        }
        assert_eq!(outcome(&first.await.unwrap()), "ok");
        assert_eq!(supervisor.file_bytes("cancelled"), 0, "the job was cancelled before it began");
    });
}

#[test]
fn cancel_unless_begun_does_not_cancel_running_job() {
    let supervisor = start("lookahead = \"0s\"");
    run(async {
        let client = connect(&supervisor).await;
        let begun = steps(&client, "count begun;wait go").start().await.unwrap();
        wait_for("the job has begun", || (supervisor.file_bytes("begun") > 0).then_some(()));
        let waits = steps(&client, "count waited").start().await.unwrap();
        waits.cancel_unless_begun();
        begun.cancel_unless_begun();
        assert_eq!(outcome(&waits.await), "cancelled/");
        supervisor.touch("go");
        assert_eq!(outcome(&begun.await), "ok");
        assert_eq!(supervisor.file_bytes("waited"), 0);
    });
}

/// A drain rejects prefetched jobs in the same way as queued jobs.
#[test]
fn drain_rejects_prefetched_jobs() {
    let supervisor = start(LONG);
    run(async {
        let client = connect(&supervisor).await;
        warm_up(&client).await;
        let first = spawn(steps(&client, "wait go"));
        supervisor.wait_number("b", "in_flight", 1);
        let others: Vec<Running> = (0..5).map(|_| spawn(steps(&client, "count begun"))).collect();
        supervisor.wait_number("b", "queued", 5);
        assert_eq!(supervisor.post("/v1/bulkheads/b/drain").0, 200);
        for job in others {
            assert_eq!(outcome(&job.await.unwrap()), "rejected/draining");
        }
        supervisor.touch("go");
        assert_eq!(outcome(&first.await.unwrap()), "ok");
        assert_eq!(supervisor.file_bytes("begun"), 0);
    });
}

/// The setting `lookahead = "0s"` turns prefetching off.
#[test]
fn lookahead_of_zero_disables_prefetching() {
    let supervisor = start("lookahead = \"0s\"");
    run(async {
        let client = connect(&supervisor).await;
        warm_up(&client).await;
        let jobs: Vec<Running> = (0..MANY).map(|_| spawn(client.job("b", "x"))).collect();
        for job in jobs {
            assert_eq!(outcome(&job.await.unwrap()), "ok");
        }
    });
    // Without prefetching, a job behind a slow job stays in the queue and misses its deadline there.
    run(async {
        let client = connect(&supervisor).await;
        let slow = spawn(steps(&client, "wait go"));
        supervisor.wait_number("b", "in_flight", 1);
        let short = client.job("b", "x").deadline(Duration::from_millis(20)).send().await;
        assert_eq!(outcome(&short), "deadline_exceeded/queued");
        supervisor.touch("go");
        assert_eq!(outcome(&slow.await.unwrap()), "ok");
    });
}

/// The worker answers a prefetched job before it has answered the current job.
#[test]
fn worker_that_answers_prefetched_job_early_is_killed() {
    // The worker sends no heartbeats.
    let supervisor = start_with("raw\", \"liar", &format!("health = {{ heartbeat = \"60s\" }}\n{LONG}"));
    run(async {
        let client = connect(&supervisor).await;
        warm_up(&client).await;
        let lie = spawn(client.job("b", "").operation("lie"));
        supervisor.wait_number("b", "in_flight", 1);
        let behind: Vec<Running> = (0..3).map(|_| spawn(client.job("b", "x"))).collect();
        assert_eq!(outcome(&lie.await.unwrap()), "crashed/protocol");
        let mut ends = Vec::new();
        for job in behind {
            ends.push(outcome(&job.await.unwrap()));
        }
        // A job that the worker answered too early counts as executed, so no other worker runs it. The worker can
        // answer more jobs correctly before it is killed.
        let (crashed, done): (Vec<_>, Vec<_>) = ends.iter().partition(|end| *end == "crashed/protocol");
        assert!(!crashed.is_empty() && done.iter().all(|end| *end == "ok"), "{ends:?}");
    });
}

/// The worker writes garbage or false results to its journal. The supervisor validates the journal as strictly as
/// it validates frames on the link.
#[test]
fn invalid_journal_does_not_affect_other_jobs() {
    // The worker sends no heartbeats.
    let supervisor = start_with("raw\", \"scribbler", &format!("health = {{ heartbeat = \"60s\" }}\n{LONG}"));
    run(async {
        let client = connect(&supervisor).await;
        for (operation, end) in [("scribble garbage", "crashed/signal"), ("scribble results", "ok")] {
            for _ in 0..5 {
                warm_up(&client).await;
                let job = spawn(client.job("b", "").operation(operation));
                let behind: Vec<Running> = (0..3).map(|_| spawn(client.job("b", "x"))).collect();
                assert_eq!(outcome(&job.await.unwrap()), end, "{operation}");
                for job in behind {
                    assert_eq!(outcome(&job.await.unwrap()), "ok", "behind {operation}");
                }
            }
        }
        assert_eq!(supervisor.number("b", "in_flight"), 0);
    });
}

// Blocked workers.

/// Ways in which a worker can stop making progress in the middle of a job.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Blocked {
    /// The worker process is stopped with SIGSTOP.
    Stopped,
    /// A worker without the worker library keeps running, but does not read frames, answer jobs or send heartbeats.
    Ignores,
    /// Like [`Blocked::Ignores`], but the worker has not even begun the job.
    IgnoresAll,
}

const BLOCKED: [Blocked; 3] = [Blocked::Stopped, Blocked::Ignores, Blocked::IgnoresAll];

impl Blocked {
    fn start(self, keys: &str) -> Supervisor {
        let arguments = if self == Self::Stopped { "" } else { "raw\", \"liar" };
        start_with(arguments, &format!("health = {{ heartbeat = \"10s\", missed = 10 }}\n{keys}"))
    }

    /// Makes one worker stop making progress. First runs short jobs, so that all workers are known to be fast.
    async fn block(self, client: &Client) {
        for _ in 0..5 {
            let warm: Vec<Running> = (0..50).map(|_| spawn(client.job("b", "x"))).collect();
            for job in warm {
                assert_eq!(outcome(&job.await.unwrap()), "ok");
            }
        }
        let operation = match self {
            Self::Stopped => "stop",
            Self::Ignores => "ignore",
            Self::IgnoresAll => "ignore all",
        };
        // Does not await the job, because the supervisor exits first.
        drop(spawn(client.job("b", "").operation(operation)));
    }

    fn wait(self, supervisor: &Supervisor) {
        let is_stopped = |pid: &u32| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
            stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
        };
        wait_for("a worker is blocked", || {
            let is_blocked = match self {
                Self::Stopped => supervisor.worker_pids("b").iter().any(is_stopped),
                Self::Ignores | Self::IgnoresAll => supervisor.file_bytes("ignores") > 0,
            };
            is_blocked.then_some(())
        });
    }
}

#[test]
fn blocked_worker_does_not_hold_back_jobs() {
    for how in BLOCKED {
        let supervisor = how.start("processes = 2");
        run(async {
            let client = connect(&supervisor).await;
            how.block(&client).await;
            let quick: Vec<Running> = (0..60).map(|_| spawn(client.job("b", "x"))).collect();
            for job in quick {
                assert_eq!(outcome(&job.await.unwrap()), "ok");
            }
            how.wait(&supervisor);
            assert_eq!(supervisor.number("b", "restarts"), 0);
        });
    }
}

#[test]
fn jobs_not_started_by_blocked_worker_are_reported_as_not_run() {
    for (how, max_in_flight) in BLOCKED.into_iter().flat_map(|how| [(how, 1), (how, 4)]) {
        let supervisor = how.start(&format!("max_in_flight = {max_in_flight}"));
        run(async {
            let client = connect(&supervisor).await;
            how.block(&client).await;
            how.wait(&supervisor);
            let quick = || client.job("b", "x").deadline(Duration::from_secs(1));
            let quick: Vec<Running> = (0..60).map(|_| spawn(quick())).collect();
            for job in quick {
                let result = job.await.unwrap();
                assert_eq!(outcome(&result), "deadline_exceeded/queued", "{how:?} {max_in_flight}");
                let error = result.unwrap_err();
                let attempts = error.outcome().map(|outcome| outcome.attempts);
                assert_eq!((error.executed(), attempts), (Executed::No, Some(0)));
            }
            assert_eq!(supervisor.number("b", "restarts"), 0);
            let waiting = client.job("b", "x").start().await.unwrap();
            waiting.cancel_unless_begun();
            assert_eq!(waiting.await.unwrap_err().executed(), Executed::No);
        });
    }
}

/// The supervisor can send one job to the stopped worker, and later gives this job to another worker. The stopped
/// worker receives no further jobs until SIGCONT.
#[test]
fn stopped_worker_gets_no_jobs_until_it_continues() {
    let supervisor = start("processes = 2\nhealth = { heartbeat = \"10s\", missed = 10 }");
    run(async {
        let client = connect(&supervisor).await;
        warm_up(&client).await;
        let pids = supervisor.worker_pids("b");
        kill_pid(pids[0], Signal::SIGSTOP);
        for _ in 0..50 {
            let reply = client.job("b", "").operation("pid").send().await.unwrap();
            assert_eq!(reply.payload(), pids[1].to_string().as_bytes());
        }
        kill_pid(pids[0], Signal::SIGCONT);
        let (began, mut reply) = (Instant::now(), None);
        while reply.as_deref() != Some(pids[0].to_string().as_bytes()) {
            assert!(began.elapsed() < PATIENCE, "the worker gets no jobs after SIGCONT");
            let beside = spawn(steps(&client, "sleep 2"));
            reply = Some(client.job("b", "").operation("pid").send().await.unwrap().payload().to_vec());
            assert_eq!(outcome(&beside.await.unwrap()), "ok");
        }
    });
}

/// Cancels a third of the jobs right after submission. Each outcome must correctly state whether the job ran.
#[test]
fn cancelled_job_reports_whether_it_ran() {
    let supervisor = start(&format!("processes = 2\nmax_in_flight = 2\n{LONG}"));
    run(async {
        let client = connect(&supervisor).await;
        warm_up(&client).await;
        let mut unbegun = 0;
        for round in 0..10 {
            let mut jobs = Vec::new();
            for n in 0..MANY {
                let job = steps(&client, &format!("count ran-{round}-{n}")).start().await.unwrap();
                if n % 3 == 0 {
                    job.cancel_unless_begun();
                }
                jobs.push(job);
            }
            for (n, job) in jobs.into_iter().enumerate() {
                let result = job.await;
                let ran = supervisor.file_bytes(&format!("ran-{round}-{n}"));
                match &result {
                    Ok(_) => assert_eq!(ran, 1),
                    Err(error) => {
                        unbegun += 1;
                        let end = (outcome(&result), error.executed(), ran);
                        assert_eq!(end, ("cancelled/".to_owned(), Executed::No, 0));
                    }
                }
            }
        }
        assert!(unbegun > 0, "no job was cancelled before it began");
    });
}
