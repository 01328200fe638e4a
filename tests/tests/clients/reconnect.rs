//! Jobs whose connection is lost. The client sends jobs again, reports jobs as failed, or retries rejected jobs.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use bulkhead_client::{Client, CrashReason, Executed, JobError, Reply, Verdict, blocking};
use bulkhead_shared::client_protocol::{OutcomeMessage, Progress, Submit};
use bulkhead_shared::codec;
use bulkhead_shared::frame::kind;
use bulkhead_shared::{Fault, HandlerFailure, Outcome, RejectReason};
use bulkhead_tests::ledger::worker::{self, Mark};
use bulkhead_tests::{PATIENCE, SetOnDrop, Supervisor, programs, run, wait_for};

use super::client::{Fake, Peer, against, frame, lost, metadata, outcome, welcome};

/// A duration that exceeds any wait in these tests.
const LONG: Duration = Duration::from_secs(100);

// A supervisor that does not respond.

/// The deadlines pass while the supervisor is stopped. Jobs that the supervisor has already received run to completion,
/// but the clients ignore their outcomes.
#[test]
fn deadlines_end_jobs_of_a_stopped_supervisor() {
    const MIB: usize = 1 << 20;
    let supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_in_flight = 10\ndeadline = \"60s\"\n",
    );
    let limit = Duration::from_secs(5);
    let submit = || {
        let mut command = supervisor.command();
        command.args(["submit", "b", "steps:count ran;wait end", "-n", "--deadline", "5s", "--json"]);
        command.stdout(std::process::Stdio::piped()).spawn().unwrap()
    };
    let blocking = blocking::Client::connect(supervisor.socket()).unwrap();
    let unlimited = blocking.job("b", "").operation("steps:count ran;wait end;echo").start().unwrap();
    let connected = submit();
    wait_for("the jobs run", || (supervisor.file_bytes("ran") == 2).then_some(()));
    run(async {
        let client = Client::connect(supervisor.socket()).await.unwrap();
        // The client gets a memory file for later jobs.
        for _ in 0..10 {
            client.job("b", vec![1; MIB]).send().await.unwrap();
        }
        let paused = supervisor.pause();
        let unconnected = submit();
        let job = |payload| client.job("b", payload).idempotent(true).deadline(limit).retry(true);
        let (small, large) = tokio::join!(job(Vec::new()).send(), job(vec![2; MIB]).send());
        let of_thread = blocking.job("b", "").idempotent(true).deadline(limit);
        let of_thread = tokio::task::spawn_blocking(|| of_thread.send()).await.unwrap();
        for error in [small, large, of_thread].map(Result::unwrap_err) {
            assert!(!error.is_retryable() && error.outcome().is_none(), "{error}");
            assert_eq!(error.executed(), Executed::Unknown, "{error}");
            assert!(error.to_string().contains("the supervisor does not respond"), "{error}");
        }
        for (command, executed) in [(connected, "unknown"), (unconnected, "no")] {
            let output = command.wait_with_output().unwrap();
            let record: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
            assert_eq!((output.status.code(), &record["executed"]), (Some(69), &executed.into()), "{record}");
        }
        drop(paused);
        supervisor.touch("end");
        for size in [0, MIB, MIB] {
            let reply = client.job("b", vec![3; size]).send().await.unwrap();
            assert_eq!(reply.payload(), vec![3; size]);
        }
    });
    // The connection of the unlimited job is still open.
    unlimited.wait().unwrap();
}

// A supervisor that is killed.

/// Maximum number of concurrent jobs in the bulkhead.
const BOUND: usize = 4;

/// A client's record of a job.
#[derive(Debug)]
struct Entry {
    is_idempotent: bool,
    outcomes: usize,
    result: Result<(), (Executed, String)>,
}

/// Tasks send jobs while the supervisor is repeatedly killed and restarted. The workers record which jobs began.
#[test]
fn only_idempotent_jobs_are_repeated_after_supervisor_death() {
    const TASKS: u64 = 16;
    const KILLS: usize = 4;
    /// Number of jobs that must finish before each kill of the supervisor.
    const JOBS_PER_ROUND: u64 = 150;
    let notes = tempfile::tempdir().unwrap();
    let keys = format!(
        "[bulkhead.b]\ncommand = [{:?}, \"worker\", {:?}, \"b\", \"{BOUND}\"]\nprocesses = 2\nmax_in_flight = 2\n\
         max_queue = 1000\ndeadline = \"60s\"\nsandbox = {{ profile = \"none\" }}\n",
        programs().join("ledger"),
        notes.path(),
    );
    let mut supervisor = Supervisor::start(&keys);
    let socket = supervisor.socket();
    let book: Mutex<HashMap<u64, Entry>> = Mutex::default();
    let (done, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
    let file = tempfile::NamedTempFile::new().unwrap();
    let payload_of = |number: u64| match number % 4 {
        0 => worker::payload(number, 100_000),
        _ => worker::payload(number, 64),
    };
    let job_of = |client: &blocking::Client, number: u64| {
        let job = client.job("b", payload_of(number)).operation("sleep 2000");
        job.idempotent(number.is_multiple_of(2)).deadline(LONG)
    };
    std::thread::scope(|scope| {
        let end = SetOnDrop(&is_over);
        for task in 0..TASKS {
            // All clients connect before the supervisor is killed for the first time.
            let client = blocking::Client::connect(&socket).unwrap();
            let (book, done, is_over, file) = (&book, &done, &is_over, &file);
            scope.spawn(move || {
                let mut number = task << 32;
                while !is_over.load(Ordering::SeqCst) {
                    number += 1;
                    let mut job = job_of(&client, number);
                    if number.is_multiple_of(50) {
                        // No other job uses this job number, so the file is written once.
                        let path = file.path().with_extension(number.to_string());
                        std::fs::write(&path, payload_of(number)).unwrap();
                        job = job.payload_file(std::fs::File::open(&path).unwrap()).unwrap();
                        std::fs::remove_file(&path).unwrap();
                    }
                    let result = match job.send() {
                        Ok(reply) if reply.payload() == payload_of(number) => Ok(()),
                        Ok(reply) => panic!("job {number} has the result {:?}", reply.payload().get(..16)),
                        Err(error) => Err((error.executed(), error.to_string())),
                    };
                    let mut book = book.lock().unwrap();
                    let entry = book.entry(number).or_insert(Entry {
                        is_idempotent: number.is_multiple_of(2),
                        outcomes: 0,
                        result,
                    });
                    entry.outcomes += 1;
                    done.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        for _ in 0..KILLS {
            let goal = done.load(Ordering::SeqCst) + JOBS_PER_ROUND;
            wait_for("the clients continue", || (done.load(Ordering::SeqCst) >= goal).then_some(()));
            supervisor.child.kill().unwrap();
            supervisor.wait();
            let folder = std::mem::replace(&mut supervisor.folder, tempfile::tempdir().unwrap());
            supervisor = Supervisor::launch(folder, "", &keys);
        }
        let goal = done.load(Ordering::SeqCst) + JOBS_PER_ROUND;
        wait_for("the clients continue", || (done.load(Ordering::SeqCst) >= goal).then_some(()));
        drop(end);
    });
    let (mut begun, mut ended) = (HashMap::<u64, usize>::new(), HashMap::<u64, usize>::new());
    for record in worker::read(notes.path()) {
        match record.mark {
            Mark::Begun => *begun.entry(record.job).or_default() += 1,
            Mark::Ended => *ended.entry(record.job).or_default() += 1,
            Mark::OverBound | Mark::Held => {}
        }
    }
    let book = book.into_inner().unwrap();
    let mut unknown = 0;
    for (number, entry) in &book {
        let begun = begun.get(number).copied().unwrap_or_default();
        assert_eq!(entry.outcomes, 1, "{number}: {entry:?}");
        assert!(entry.is_idempotent || begun <= 1, "job {number} began {begun} times: {entry:?}");
        match &entry.result {
            Ok(()) => assert!(ended.contains_key(number), "job {number} never ended: {entry:?}"),
            Err((Executed::No, _)) => assert_eq!(begun, 0, "job {number} began: {entry:?}"),
            Err((Executed::Unknown, _)) => unknown += 1,
            Err((Executed::Yes, _)) => panic!("no job can fail after it has run: {entry:?}"),
        }
        assert!(!entry.is_idempotent || entry.result.is_ok(), "job {number}: {entry:?}");
    }
    assert!(begun.keys().all(|number| book.contains_key(number)), "a job began that no client sent");
    let repeated = begun.values().filter(|&&times| times > 1).count();
    println!("{} jobs, {unknown} unknown, {repeated} began more than once", book.len());
    assert!(unknown > 0, "jobs were in progress when the supervisor was killed");
}

// A fake supervisor.

/// Reads the next SUBMIT frame. Returns the job's number, the time left until its deadline, and its payload.
fn next_job(peer: &mut Peer) -> (u64, Duration, Vec<u8>) {
    loop {
        let (header, metadata, payload) = peer.next().expect("the client sends a job");
        if header.kind == kind::SUBMIT {
            let (submit, _) = codec::decode::<Submit<'_>>(&metadata, &[]).unwrap();
            return (header.number, Duration::from_micros(submit.deadline_us), payload);
        }
    }
}

fn ended(number: u64, verdict: Verdict, retry_after: Option<Duration>) -> Vec<u8> {
    let retryable = verdict.is_retryable(true);
    let told = Outcome {
        verdict,
        job: None,
        bulkhead: "b".into(),
        attempts: 0,
        queued: Duration::ZERO,
        ran: Duration::ZERO,
        worker_pid: None,
        retryable,
        retry_after,
        deadline: Duration::from_secs(1),
        run_limit: None,
        status: None,
        report: None,
    };
    frame(kind::OUTCOME, 0, number, &metadata(&OutcomeMessage::from_outcome(&told)), b"")
}

fn rejection(number: u64, reason: RejectReason, retry_after: Option<Duration>) -> Vec<u8> {
    ended(number, Verdict::Rejected { reason, message: String::new() }, retry_after)
}

#[test]
fn idempotent_job_is_sent_again_with_remaining_time() {
    against(
        |fake| {
            let mut peer = fake.welcome();
            let (_, first, payload) = next_job(&mut peer);
            assert_eq!(payload, b"x");
            drop(peer);
            let mut peer = fake.welcome();
            let (number, second, payload) = next_job(&mut peer);
            assert_eq!(payload, b"x");
            assert!(first <= LONG && second < first, "{first:?}, then {second:?}");
            let progress = Progress { fraction: 0.5, text: "half" };
            peer.send(&frame(kind::PROGRESS, 0, number, &metadata(&progress), b""));
            peer.send(&outcome(number, b"done"));
            peer.end();
        },
        async |path| {
            let client = Client::connect(path).await.unwrap();
            let job = client.job("b", "x").idempotent(true).deadline(LONG);
            let mut handle = job.start().await.unwrap();
            // A job continues after its client has been dropped.
            drop(client);
            assert_eq!(handle.progress().await.map(|progress| progress.text), Some("half".into()));
            assert_eq!(handle.await.unwrap().payload(), b"done");
        },
    );
}

#[test]
fn job_that_breaks_every_connection_is_sent_four_times() {
    against(
        |fake| {
            for _ in 0..4 {
                let mut peer = fake.welcome();
                next_job(&mut peer);
            }
            let mut peer = fake.welcome();
            let number = peer.job();
            peer.send(&outcome(number, b"another"));
            peer.end();
        },
        async |path| {
            let client = Client::connect(path).await.unwrap();
            // A job without a deadline would wait for each connection for at most 5 s.
            let job = client.job("b", "x").idempotent(true).deadline(LONG);
            let (executed, text) = lost(job.send().await);
            assert_eq!(executed, Executed::Unknown, "{text}");
            assert_eq!(client.job("b", "y").deadline(LONG).send().await.unwrap().payload(), b"another");
        },
    );
}

#[test]
fn unsent_jobs_are_sent_again_in_order() {
    let (end, told) = mpsc::channel::<()>();
    against(
        move |fake| {
            let mut peer = fake.welcome();
            next_job(&mut peer);
            told.recv_timeout(PATIENCE).unwrap();
            drop(peer);
            let mut peer = fake.welcome();
            for index in 0..4_u8 {
                let (again, _, payload) = next_job(&mut peer);
                assert_eq!((payload.len(), payload[0]), (3 << 20, index));
                peer.send(&outcome(again, &payload[..1]));
            }
            peer.end();
        },
        async |path| {
            let client = Client::connect(path).await.unwrap();
            let sent = client.job("b", "small").start().await.unwrap();
            let mut others = Vec::new();
            for index in 0..3_u8 {
                // The payload does not fit into the socket buffer, so none of these jobs is sent completely.
                let job = client.job("b", vec![index; 3 << 20]).deadline(LONG);
                others.push(job.start().await.unwrap());
            }
            // The client's buffer has no room for this job, whose payload is read only when the job is sent.
            let fill = |buffer: &mut [u8]| buffer.fill(3);
            let waiting = client.job("b", []).payload_in_place(3 << 20, fill).deadline(LONG).send();
            let (waiting, ()) = tokio::join!(waiting, async { end.send(()).unwrap() });
            assert_eq!(lost(sent.await).0, Executed::Unknown);
            for (index, handle) in others.into_iter().enumerate() {
                assert_eq!(handle.await.unwrap().payload(), [index as u8]);
            }
            assert_eq!(waiting.unwrap().payload(), [3]);
        },
    );
}

#[test]
fn jobs_cancelled_while_disconnected_are_not_sent() {
    let (go_on, told) = mpsc::channel::<()>();
    let (closed, is_closed) = tokio::sync::oneshot::channel::<()>();
    against(
        move |fake| {
            let mut peer = fake.welcome();
            for _ in 0..3 {
                next_job(&mut peer);
            }
            drop(peer);
            // The client reconnects, but gets no welcome until the jobs are cancelled.
            let mut peer = fake.accept();
            closed.send(()).unwrap();
            told.recv_timeout(PATIENCE).unwrap();
            peer.send(&welcome(1));
            let (number, _, payload) = next_job(&mut peer);
            assert_eq!(payload, b"stays");
            peer.send(&outcome(number, b"done"));
            peer.end();
        },
        async |path| {
            let client = Client::connect(path).await.unwrap();
            let job = |payload: &str| client.job("b", payload).idempotent(true).deadline(LONG);
            let dropped = job("dropped").start().await.unwrap();
            let cancelled = job("cancelled").start().await.unwrap();
            let stays = job("stays").start().await.unwrap();
            is_closed.await.unwrap();
            drop(dropped);
            // The job may have begun on the first connection.
            stays.cancel_unless_begun();
            cancelled.cancel();
            let error = cancelled.await.unwrap_err();
            assert!(matches!(error, JobError::Cancelled(_)), "{error}");
            assert_eq!(error.executed(), Executed::Unknown);
            go_on.send(()).unwrap();
            assert_eq!(stays.await.unwrap().payload(), b"done");
        },
    );
}

#[test]
fn cancelled_job_that_was_not_sent_is_not_lost() {
    let (end, told) = mpsc::channel::<()>();
    against(
        move |fake| {
            let _peer = fake.welcome();
            told.recv_timeout(PATIENCE).unwrap();
        },
        async |path| {
            let client = Client::connect(path).await.unwrap();
            // The payload does not fit into the socket buffer, so the next job is not sent.
            let _large = client.job("b", vec![0; 3 << 20]).start().await.unwrap();
            let unsent = client.job("b", "x").start().await.unwrap();
            unsent.cancel();
            end.send(()).unwrap();
            let error = unsent.await.unwrap_err();
            assert!(matches!(error, JobError::Cancelled(_)), "{error}");
            assert_eq!(error.executed(), Executed::No);
        },
    );
}

#[test]
fn panic_in_payload_function_ends_only_its_job() {
    const REASON: &str = "the function that writes the payload panicked";
    against(
        |fake| {
            let mut peer = fake.welcome();
            next_job(&mut peer);
            next_job(&mut peer);
            drop(peer);
            let mut peer = fake.welcome();
            let (number, _, payload) = next_job(&mut peer);
            assert_eq!(payload, b"other");
            peer.send(&outcome(number, b"done"));
            peer.end();
        },
        async |path| {
            let client = Client::connect(path).await.unwrap();
            let calls = AtomicU64::new(0);
            let fill = move |_: &mut [u8]| assert_eq!(calls.fetch_add(1, Ordering::SeqCst), 0);
            let job = client.job("b", []).payload_in_place(1, fill).idempotent(true).deadline(LONG);
            let panics = job.start().await.unwrap();
            let job = client.job("b", "other").idempotent(true).deadline(LONG);
            let other = job.start().await.unwrap();
            let error = panics.await.unwrap_err();
            assert!(error.to_string().contains(REASON), "{error}");
            assert_eq!(error.executed(), Executed::Unknown);
            assert_eq!(other.await.unwrap().payload(), b"done");
            let job = client.job("b", []).payload_in_place(1, |_| panic!("the first call"));
            let error = job.send().await.unwrap_err();
            assert!(matches!(error, JobError::Rejected(_)) && error.to_string().contains(REASON), "{error}");
        },
    );
}

/// The supervisor that rejects the retry cannot know whether the first attempt ran.
#[test]
fn rejected_retry_leaves_execution_of_lost_job_unknown() {
    let wait = Duration::from_millis(40);
    let cases: [(Verdict, Option<Duration>); 3] = [
        (Verdict::Rejected { reason: RejectReason::QueueFull, message: String::new() }, Some(wait)),
        (Verdict::DeadlineQueued, None),
        (Verdict::Cancelled { executed: Executed::No }, None),
    ];
    for (verdict, retry_after) in cases {
        let answer = verdict.clone();
        against(
            move |fake| {
                next_job(&mut fake.welcome());
                let mut peer = fake.welcome();
                let (number, ..) = next_job(&mut peer);
                peer.send(&ended(number, answer, retry_after));
                peer.end();
            },
            async |path| {
                let client = Client::connect(path).await.unwrap();
                let job = client.job("b", "x").idempotent(true).deadline(LONG);
                let error = job.send().await.unwrap_err();
                assert_eq!(error.executed(), Executed::Unknown, "{error}");
                assert_eq!(error.retry_after(), retry_after);
                match (&verdict, &error.outcome().unwrap().verdict) {
                    (Verdict::Cancelled { .. }, Verdict::Cancelled { .. }) => {}
                    (_, Verdict::Crashed { reason: CrashReason::Stopped, message, .. }) => {
                        assert!(
                            error.is_retryable() && message.contains("the job was sent again and ended as"),
                            "{error}"
                        );
                    }
                    (_, other) => panic!("{other:?}"),
                }
            },
        );
    }
}

#[test]
fn job_ends_at_its_deadline_if_no_supervisor_answers() {
    let (end, told) = mpsc::channel::<()>();
    against(
        move |fake| {
            next_job(&mut fake.welcome());
            // The listener stays open until all jobs have ended, but sends no further welcome.
            told.recv_timeout(PATIENCE).unwrap();
        },
        async |path| {
            let client = Client::connect(path).await.unwrap();
            let limit = Duration::from_millis(400);
            let sent = client.job("b", "x").idempotent(true).deadline(limit).send().await;
            let (executed, text) = lost(sent);
            assert_eq!(executed, Executed::Unknown, "{text}");
            assert!(text.contains("the job may have run"), "{text}");
            let (executed, text) = lost(client.job("b", "x").deadline(limit).send().await);
            assert_eq!(executed, Executed::No, "{text}");
            assert!(text.contains("the job was not sent"), "{text}");
            end.send(()).unwrap();
        },
    );
}

#[test]
fn zero_reconnect_timeout_ends_jobs_when_connection_is_lost() {
    against(
        |fake| {
            next_job(&mut fake.welcome());
        },
        async |path| {
            let client = Client::connect(path).await.unwrap().reconnect_timeout(Duration::ZERO);
            let job = client.job("b", "x").idempotent(true).deadline(LONG);
            assert_eq!(lost(job.send().await).0, Executed::Unknown);
            // The listener is gone, so one attempt to reconnect fails at once.
            assert_eq!(lost(client.job("b", "x").deadline(LONG).send().await).0, Executed::No);
        },
    );
}

fn go_away(taken: u64) -> Vec<u8> {
    frame(kind::GOAWAY, 0, taken, b"", b"")
}

#[test]
fn job_not_accepted_by_old_supervisor_waits_for_the_new_one() {
    for timeout in [LONG, Duration::ZERO] {
        let (end, is_lost) = mpsc::channel::<()>();
        against(
            move |fake| {
                let mut old = fake.welcome();
                next_job(&mut old);
                next_job(&mut old);
                std::fs::remove_file(&fake.path).unwrap();
                old.send(&go_away(1));
                drop(old);
                // The client has noticed that the old supervisor is gone.
                is_lost.recv_timeout(PATIENCE).unwrap();
                let new = Fake::at(&fake.path);
                let mut new = new.welcome();
                let (number, _, payload) = next_job(&mut new);
                assert_eq!(payload, b"not taken");
                new.send(&outcome(number, b"done"));
                new.end();
            },
            async |path| {
                let client = Client::connect(path).await.unwrap().reconnect_timeout(timeout);
                let taken = client.job("b", "taken").start().await.unwrap();
                let not_taken = client.job("b", "not taken").start().await.unwrap();
                assert_eq!(lost(taken.await).0, Executed::Unknown);
                end.send(()).unwrap();
                assert_eq!(not_taken.await.unwrap().payload(), b"done");
            },
        );
    }
}

#[test]
fn job_not_accepted_by_old_supervisor_ends_at_its_deadline() {
    let (end, has_ended) = mpsc::channel::<()>();
    against(
        move |fake| {
            let mut old = fake.welcome();
            next_job(&mut old);
            std::fs::remove_file(&fake.path).unwrap();
            old.send(&go_away(0));
            has_ended.recv_timeout(PATIENCE).unwrap();
        },
        async |path| {
            let client = Client::connect(path).await.unwrap();
            let job = client.job("b", "x").deadline(Duration::from_millis(300));
            let (executed, text) = lost(job.send().await);
            assert_eq!(executed, Executed::No, "{text}");
            end.send(()).unwrap();
        },
    );
}

#[test]
fn cancelled_job_not_accepted_by_old_supervisor_is_not_lost() {
    against(
        |fake| {
            let mut old = fake.welcome();
            next_job(&mut old);
            let (header, ..) = old.next().expect("the client cancels the job");
            assert_eq!(header.kind, kind::CANCEL);
            old.send(&go_away(0));
            old.end();
        },
        async |path| {
            let client = Client::connect(path).await.unwrap();
            let handle = client.job("b", "x").start().await.unwrap();
            handle.cancel();
            let error = handle.await.unwrap_err();
            assert!(matches!(error, JobError::Cancelled(_)), "{error}");
            assert_eq!(error.executed(), Executed::No);
        },
    );
}

/// While the client waits for a new supervisor, the old supervisor dies without answering an idempotent job.
#[test]
fn accepted_job_ends_if_no_new_supervisor_starts() {
    let (end, is_disconnected) = mpsc::channel::<()>();
    against(
        move |fake| {
            let mut old = fake.welcome();
            next_job(&mut old);
            next_job(&mut old);
            std::fs::remove_file(&fake.path).unwrap();
            old.send(&go_away(1));
            is_disconnected.recv_timeout(PATIENCE).unwrap();
        },
        async |path| {
            let client = Client::connect(path).await.unwrap().reconnect_timeout(Duration::from_secs(1));
            let taken = client.job("b", "taken").idempotent(true).start().await.unwrap();
            let not_taken = client.job("b", "x").deadline(Duration::from_millis(300)).send().await;
            assert_eq!(lost(not_taken).0, Executed::No);
            end.send(()).unwrap();
            let (executed, text) = lost(taken.await);
            assert_eq!(executed, Executed::Unknown, "{text}");
        },
    );
}

/// Applications can wait for their jobs in any order, so a job must be sent again even if its handle is not polled.
#[test]
fn job_is_sent_again_before_its_handle_is_polled() {
    let (seen, was_seen) = mpsc::channel::<()>();
    let fake = Fake::new();
    let path = fake.path.clone();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            next_job(&mut fake.welcome());
            let mut peer = fake.welcome();
            let (number, ..) = next_job(&mut peer);
            seen.send(()).unwrap();
            peer.send(&outcome(number, b"done"));
            peer.end();
        });
        let client = blocking::Client::connect(path).unwrap();
        let handle = client.job("b", "x").idempotent(true).deadline(LONG).start().unwrap();
        was_seen.recv_timeout(PATIENCE).unwrap();
        assert_eq!(handle.wait().unwrap().payload(), b"done");
    });
}

// Retries.

/// Rejects the first `rejected` jobs and accepts all others. Returns the time that each job had left until its
/// deadline.
fn reject(fake: &Fake, rejected: usize, retry_after: Option<Duration>) -> Vec<Duration> {
    let mut peer = fake.welcome();
    let mut times = Vec::new();
    while let Some((header, submitted, _)) = peer.next() {
        if header.kind != kind::SUBMIT {
            continue;
        }
        let (submit, _) = codec::decode::<Submit<'_>>(&submitted, &[]).unwrap();
        times.push(Duration::from_micros(submit.deadline_us));
        if times.len() <= rejected {
            peer.send(&rejection(header.number, RejectReason::QueueFull, retry_after));
        } else {
            peer.send(&outcome(header.number, b"done"));
        }
    }
    times
}

/// Runs `work` with a client of a fake supervisor that rejects the first `rejected` jobs. Returns the time that each
/// job had left until its deadline.
fn while_rejected(
    rejected: usize,
    retry_after: Option<Duration>,
    work: impl AsyncFnOnce(Client),
) -> Vec<Duration> {
    let (times, counted) = mpsc::channel();
    against(
        move |fake| times.send(reject(fake, rejected, retry_after)).unwrap(),
        async |path| work(Client::connect(path).await.unwrap()).await,
    );
    counted.recv_timeout(PATIENCE).unwrap()
}

fn is_full(result: Result<Reply, JobError>) -> bool {
    matches!(result, Err(JobError::Rejected(outcome)) if outcome.retryable)
}

#[test]
fn rejected_job_is_retried_with_remaining_time() {
    let wait = Duration::from_millis(20);
    let times = while_rejected(3, Some(wait), async |client| {
        let job = client.job("b", vec![7; 100_000]).deadline(LONG).retry(true);
        assert_eq!(job.send().await.unwrap().payload(), b"done");
    });
    assert_eq!(times.len(), 4);
    assert!(times.is_sorted_by(|before, after| *after + wait <= *before), "{times:?}");

    // Covers the client's default, a job without retries, and too many rejections.
    let times = while_rejected(5, Some(Duration::from_millis(1)), async |client| {
        let client = client.retry(true);
        assert!(is_full(client.job("b", "x").retry(false).send().await));
        assert!(is_full(client.job("b", "x").send().await), "three retries are rejected as well");
        // Jobs awaited through a handle are not retried.
        assert_eq!(client.job("b", "x").start().await.unwrap().await.unwrap().payload(), b"done");
    });
    assert_eq!(times.len(), 6);
}

#[test]
fn job_is_not_retried_beyond_its_deadline() {
    let times = while_rejected(9, Some(Duration::from_secs(30)), async |client| {
        let job = client.job("b", "x").deadline(Duration::from_secs(20)).retry(true);
        assert!(is_full(job.send().await));
    });
    assert_eq!(times.len(), 1);
}

#[test]
fn retries_stay_within_the_client_budget() {
    const JOBS: usize = 200;
    let times = while_rejected(usize::MAX, Some(Duration::ZERO), async |client| {
        for _ in 0..JOBS {
            assert!(is_full(client.job("b", "x").retry(true).send().await));
        }
    });
    let retries = times.len() - JOBS;
    // On a machine that is not busy, all jobs end within one window of ten seconds. A longer run covers several
    // windows, each with a minimum of ten retries.
    assert!((JOBS / 5..=JOBS).contains(&retries), "{retries} retries of {JOBS} jobs");
}

/// If a retry is rejected, the client must still learn that the first attempt ran.
#[test]
fn rejected_retry_reports_the_attempt_that_ran() {
    against(
        |fake| {
            let mut peer = fake.welcome();
            let failure = HandlerFailure {
                code: "busy".into(),
                message: "try again".into(),
                retryable: true,
                fault: Fault::Dependency,
            };
            let number = peer.job();
            peer.send(&ended(number, Verdict::Failed(failure), Some(Duration::from_millis(1))));
            for _ in 0..3 {
                let number = peer.job();
                peer.send(&rejection(number, RejectReason::QueueFull, Some(Duration::from_millis(1))));
            }
            peer.end();
        },
        async |path| {
            let client = Client::connect(path).await.unwrap();
            let error = client.job("b", "x").retry(true).send().await.unwrap_err();
            assert!(matches!(&error, JobError::Failed(_)), "{error}");
            assert_eq!(error.executed(), Executed::Yes);
        },
    );
}
