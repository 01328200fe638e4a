//! Tests of the rules in `docs/protocol.md` about unusual behaviour. Each test runs a worker or a client that behaves
//! in an unusual way. The quotations are from that page.

use std::fs::OpenOptions;

use rustix::net::RecvFlags;

use super::*;

/// Payload that is small enough for the supervisor to keep a copy, and too large for a worker to read accidentally
/// together with the header.
static PAYLOAD: [u8; 60_000] = [7; 60_000];

/// Capability of a worker whose heartbeats do not depend on its handlers.
const DISPATCH_THREAD: u64 = 1;

/// Starts a supervisor with a worker that exercises the protocol rule named `rule`.
fn start(rule: &str, keys: &str) -> Supervisor {
    let heartbeat =
        if keys.contains("health") { "" } else { "health = { heartbeat = \"200ms\", missed = 50 }" };
    Supervisor::start(&by_hand(&format!("rules-{rule}"), &format!("{heartbeat}\n{keys}")))
}

/// Sends HELLO with the given capabilities. Then sends READY.
fn open(worker: &mut Worker, capabilities: u64) {
    let hello = Meta::default().u16(1).u16(1).u8(2).u32(u32::MAX).u64(capabilities);
    worker.send(HELLO, BULKHEAD, hello.text("by hand").text("1").end(), b"");
    assert_eq!(worker.next().kind, WORKER_WELCOME);
    worker.heartbeat = PollTimeout::from(100_u8);
    worker.send(READY, 0, empty(), b"");
}

/// Appends a byte to the file `name` in the working folder. Returns the previous length of the file.
fn mark(name: &str) -> u64 {
    let mut file = OpenOptions::new().create(true).append(true).open(name).unwrap();
    let before = file.metadata().unwrap().len();
    file.write_all(b".").unwrap();
    before
}

/// Reads as much of the first job as `rule` specifies, then aborts the process. Workers that start later serve jobs
/// normally.
fn leave(worker: &mut Worker, rule: &str) {
    while !worker.has_bytes() {
        worker.send(HEARTBEAT, 0, empty(), b"");
    }
    if mark("came") > 0 {
        return serve(worker);
    }
    let mut bytes = [0; 100];
    match rule {
        "reads-nothing" => {}
        "reads-a-byte" => worker.socket.read_exact(&mut bytes[..1]).unwrap(),
        "reads-a-header" => {
            worker.socket.read_exact(&mut bytes[..16]).unwrap();
            let length = usize::from(u16::from_le_bytes([bytes[6], bytes[7]]));
            worker.socket.read_exact(&mut bytes[..length]).unwrap();
        }
        // Reports progress of a job whose bytes the worker has only peeked at.
        "peeks" => {
            let header: Vec<u8> = peek(&worker.socket, 16);
            let number = u64::from_le_bytes(header[8..].try_into().unwrap());
            worker.send(PROGRESSED, number, Meta::default().f32(0.0).text("").end(), b"");
        }
        // Begins the first job, and leaves the second job unread.
        "reads-one-of-two" => {
            let first = worker.next();
            worker.send(PROGRESSED, first.number, Meta::default().f32(0.0).text("").end(), b"");
            while !worker.has_bytes() {}
        }
        other => panic!("{other}"),
    }
    if rule == "reads-a-header" {
        let number = u64::from_le_bytes(bytes[8..16].try_into().unwrap());
        worker.send(PROGRESSED, number, Meta::default().f32(0.0).text("").end(), b"");
    }
    std::process::abort();
}

fn peek(socket: &UnixStream, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    let flags = RecvFlags::PEEK | RecvFlags::WAITALL;
    assert_eq!(rustix::net::recv(socket, &mut bytes[..], flags).unwrap().1, count);
    bytes
}

/// Answers every job with its payload. Counts the jobs that have begun.
fn serve(worker: &mut Worker) {
    loop {
        let frame = worker.next();
        match frame.kind {
            JOB => {
                mark("begun");
                worker.send(RESULT, frame.number, empty(), &frame.payload);
            }
            DRAIN => return,
            _ => {}
        }
    }
}

pub(super) fn work(mut worker: Worker, rule: &str) {
    match rule {
        "stops" => {
            open(&mut worker, 0);
            stop(&mut worker);
        }
        "falls-silent" => {
            open(&mut worker, 0);
            fall_silent(&mut worker);
        }
        "strays" => {
            open(&mut worker, 0);
            (1..=2_000).for_each(|number| worker.send(RESULT, number, empty(), b"whose?"));
            let odd = Meta::default().text("odd").text("").u8(2).u8(9).end();
            let job = worker.next();
            worker.send(FAILED, job.number, odd, b"");
            serve(&mut worker);
        }
        "waits" => {
            open(&mut worker, 0);
            assert_eq!(worker.next().kind, JOB);
            mark("begun");
            assert_eq!(worker.next().kind, CANCEL_JOB);
            mark("cancelled");
            forever();
        }
        "closes" => {
            open(&mut worker, DISPATCH_THREAD);
            assert_eq!(worker.next().kind, JOB);
            drop(worker);
            forever();
        }
        _ => {
            open(&mut worker, 0);
            leave(&mut worker, rule);
        }
    }
}

/// Sends STOPPING while the supervisor is still sending jobs. Keeps serving jobs until DRAIN arrives.
fn stop(worker: &mut Worker) {
    if mark("came") > 0 {
        return serve(worker);
    }
    let first = worker.next();
    worker.send(STOPPING, 0, empty(), b"");
    worker.send(RESULT, first.number, empty(), &first.payload);
    serve(worker);
    mark("drained");
}

/// Sends no heartbeats for ten heartbeat intervals while a job is running, and none after the result. The worker
/// does not announce the `DISPATCH_THREAD` capability.
fn fall_silent(worker: &mut Worker) {
    let again = mark("came") > 0;
    let job = read_frame(&worker.socket).unwrap();
    if again {
        return worker.send(RESULT, job.number, empty(), b"again");
    }
    std::thread::sleep(std::time::Duration::from_secs(2));
    worker.send(RESULT, job.number, empty(), b"late but well");
    forever();
}

fn forever() -> ! {
    loop {
        std::thread::park();
    }
}

// Jobs begin once.

/// "If a worker dies before it has read any byte of a job or reported progress on the job, another worker receives the
/// job". Regression test: a worker read the header and metadata, reported progress and died without reading the
/// payload. As a result, the job was sent to workers four times.
#[test]
fn partly_read_job_is_not_rerun() {
    for rule in ["reads-a-byte", "reads-a-header", "peeks"] {
        let supervisor = start(rule, "");
        let mut client = Client::connect(&supervisor);
        let outcome = client.job(&format!("rules-{rule}"), "", &PAYLOAD);
        assert_eq!((outcome.kind(), outcome.attempts), ((CRASHED, CrashReason::Signal as u8), 1), "{rule}");
        assert_eq!(outcome.executed, 2, "{rule}: it is unknown whether the job ran");
        assert_eq!(client.job(&format!("rules-{rule}"), "", b"next").kind(), (OK, 0), "{rule}");
        assert_eq!((supervisor.file_bytes("came"), supervisor.file_bytes("begun")), (2, 1), "{rule}");
    }
}

#[test]
fn unread_job_goes_to_next_worker() {
    let supervisor = start("reads-nothing", "");
    let outcome = Client::connect(&supervisor).job("rules-reads-nothing", "", &PAYLOAD);
    assert_eq!((outcome.kind(), outcome.attempts, outcome.payload.len()), ((OK, 0), 1, PAYLOAD.len()));
    assert_eq!((supervisor.file_bytes("came"), supervisor.file_bytes("begun")), (2, 1));
}

/// The worker dies after it has begun the first job but before it reads the second job.
#[test]
fn worker_death_requeues_only_unread_jobs() {
    let supervisor = start("reads-one-of-two", "max_in_flight = 2");
    let mut client = Client::connect(&supervisor);
    for (number, payload) in [(1, &b"read"[..]), (2, &PAYLOAD)] {
        client.send(SUBMIT, number, submit("rules-reads-one-of-two", "").end(), payload);
    }
    let mut outcomes = [client.outcome(), client.outcome()];
    outcomes.sort_by_key(|outcome| outcome.number);
    let kinds = outcomes.each_ref().map(|outcome| (outcome.kind(), outcome.attempts));
    assert_eq!(kinds, [((CRASHED, CrashReason::Signal as u8), 1), ((OK, 0), 1)]);
    assert_eq!(supervisor.file_bytes("begun"), 1);
}

/// The worker closes its link but continues to run, so its heartbeats stop.
#[test]
fn worker_with_closed_link_counts_as_hung() {
    let supervisor = start("closes", "health = { heartbeat = \"200ms\", missed = 3 }");
    let outcome = Client::connect(&supervisor).job("rules-closes", "", b"");
    assert_eq!(outcome.kind(), (CRASHED, CrashReason::Hung as u8));
    supervisor.wait_number("rules-closes", "limit", 1);
}

// Tests of the other rules on the protocol page.

/// "There is no half-close".
#[test]
fn half_closed_client_counts_as_disconnected() {
    let supervisor = start("waits", "");
    let mut client = Client::connect(&supervisor);
    client.send(SUBMIT, 1, submit("rules-waits", "").end(), b"");
    wait_for("the job runs", || (supervisor.file_bytes("begun") == 1).then_some(()));
    client.socket.shutdown(std::net::Shutdown::Write).unwrap();
    assert!(read_frame(&client.socket).is_none(), "the connection ends without an outcome");
    supervisor.wait_number("rules-waits", "cancelled", 1);
    wait_for("the worker gets the cancellation", || (supervisor.file_bytes("cancelled") == 1).then_some(()));
}

/// The supervisor treats an `idempotent` value of 2 like 1. Cancelling an unknown job number has no effect.
#[test]
fn unusual_client_values_are_accepted() {
    let supervisor = start("reads-a-byte", "retry = { attempts = 2, budget = 1.0 }");
    let mut client = Client::connect(&supervisor);
    let meta = Meta::default().text("rules-reads-a-byte").text("").text("").u64(0).u8(1).u8(2).u32(0);
    client.send(CANCEL, 1, empty(), b"");
    client.send(SUBMIT, 1, meta.end(), b"twice");
    let outcome = client.outcome();
    assert_eq!(
        (outcome.kind(), outcome.attempts),
        ((OK, 0), 2),
        "the job was retried because it is idempotent"
    );
    for number in [1, 77, u64::MAX] {
        client.send(CANCEL, number, empty(), b"");
    }
    assert_eq!(
        client.job("rules-reads-a-byte", "", b"").kind(),
        (OK, 0),
        "the cancellations have no effect on later jobs"
    );
}

/// "The supervisor drops and counts replies to unknown or completed jobs". A nonzero `retryable` counts as true. A
/// `fault` other than 0 or 1 is attributed to the dependency.
#[test]
fn unusual_worker_values_are_accepted() {
    let supervisor = start("strays", "");
    let mut client = Client::connect(&supervisor);
    let outcome = client.job("rules-strays", "", b"");
    assert_eq!((outcome.kind(), outcome.retryable, outcome.fault), ((FAILED_OUTCOME, 0), 1, 2));
    assert_eq!(client.job("rules-strays", "", b"").kind(), (OK, 0));
    supervisor.wait_number("rules-strays", "late_replies", 2_000);
    assert_eq!(supervisor.number("rules-strays", "restarts"), 0);
}

/// A worker that has sent STOPPING reads until DRAIN, finishes all jobs that have arrived, and exits with status 0.
#[test]
fn stopping_worker_finishes_all_received_jobs() {
    let supervisor = start("stops", "max_in_flight = 8\nmax_queue = 100");
    let mut client = Client::connect(&supervisor);
    for number in 1..=50 {
        client.send(SUBMIT, number, submit("rules-stops", "").end(), b"x");
    }
    let outcomes: Vec<_> = (0..50).map(|_| client.outcome()).collect();
    assert!(
        outcomes.iter().all(|outcome| outcome.kind() == (OK, 0) && outcome.attempts == 1),
        "{outcomes:?}"
    );
    wait_for("the worker is drained", || (supervisor.file_bytes("drained") == 1).then_some(()));
    supervisor.wait_number("rules-stops", "crashed", 0);
}

/// A worker without capability 1 must send heartbeats after READY, but only while it has no jobs.
#[test]
fn idle_worker_without_heartbeats_counts_as_hung() {
    let supervisor = start("falls-silent", "health = { heartbeat = \"200ms\", missed = 2 }");
    // The worker gets its job as soon as it is ready, before a heartbeat can be missed.
    let outcome = Client::connect(&supervisor).job("rules-falls-silent", "", b"");
    assert_eq!(outcome.kind(), (OK, 0), "{outcome:?}");
    supervisor.wait_events("worker_hung", 1);
}
