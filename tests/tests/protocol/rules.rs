//! The sentences of `docs/protocol.md` about what a worker or a client may do beside the usual, each held by a
//! worker or a client that does it.

use std::fs::OpenOptions;

use rustix::net::RecvFlags;

use super::*;

/// A payload that is kept for another worker, and that no careless read brings along with its header.
const PAYLOAD: [u8; 60_000] = [7; 60_000];

/// The capability of heartbeats that do not depend on handlers.
const DISPATCH_THREAD: u64 = 1;

/// A bulkhead whose worker does what `rule` says.
fn start(rule: &str, keys: &str) -> Supervisor {
    let heartbeat =
        if keys.contains("health") { "" } else { "health = { heartbeat = \"200ms\", missed = 50 }" };
    Supervisor::start(&by_hand(&format!("rules-{rule}"), &format!("{heartbeat}\n{keys}")))
}

/// Says hello with these capabilities, and is ready.
fn open(worker: &mut Worker, capabilities: u64) {
    let hello = Meta::default().u16(1).u16(1).u8(2).u32(u32::MAX).u64(capabilities);
    worker.send(HELLO, BULKHEAD, hello.text("by hand").text("1").end(), b"");
    assert_eq!(worker.next().kind, WORKER_WELCOME);
    worker.heartbeat = PollTimeout::from(100_u8);
    worker.send(READY, 0, empty(), b"");
}

/// Leaves a mark in the folder of the configuration, and returns how many of its kind there were.
fn mark(name: &str) -> u64 {
    let mut file = OpenOptions::new().create(true).append(true).open(name).unwrap();
    let before = file.metadata().unwrap().len();
    file.write_all(b".").unwrap();
    before
}

/// What a worker does that is to leave its first job in some state, and to be an honest one the next time.
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
        // A number that it has not read, as if it had looked at the bytes without taking them.
        "peeks" => {
            let header: Vec<u8> = peek(&worker.socket, 16);
            let number = u64::from_le_bytes(header[8..].try_into().unwrap());
            worker.send(STARTED, number, empty(), b"");
        }
        // The first it runs, whatever comes behind it is not read.
        "reads-one-of-two" => {
            let first = worker.next();
            worker.send(STARTED, first.number, empty(), b"");
            while !worker.has_bytes() {}
        }
        other => panic!("{other}"),
    }
    if rule == "reads-a-header" {
        let number = u64::from_le_bytes(bytes[8..16].try_into().unwrap());
        worker.send(STARTED, number, empty(), b"");
    }
    std::process::abort();
}

fn peek(socket: &UnixStream, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    let flags = RecvFlags::PEEK | RecvFlags::WAITALL;
    assert_eq!(rustix::net::recv(socket, &mut bytes[..], flags).unwrap().1, count);
    bytes
}

/// Answers every job with what came, and counts those that it begins.
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

fn forever() -> ! {
    loop {
        std::thread::park();
    }
}

// Begun once.

/// "A job that is not idempotent is given to another worker only if ... nothing of it was read": reproduced with
/// a worker that reads header and metadata, says STARTED and dies with the payload unread, and was given the job
/// four times.
#[test]
fn a_job_of_which_anything_was_read_is_not_given_to_another_worker() {
    for rule in ["reads-a-byte", "reads-a-header", "peeks"] {
        let supervisor = start(rule, "");
        let mut client = Client::connect(&supervisor);
        let outcome = client.job(&format!("rules-{rule}"), "", &PAYLOAD);
        assert_eq!((outcome.kind(), outcome.attempts), ((CRASHED, CrashReason::Signal as u8), 1), "{rule}");
        assert_eq!(outcome.executed, 2, "{rule}: it may have run");
        assert_eq!(client.job(&format!("rules-{rule}"), "", b"next").kind(), (OK, 0), "{rule}");
        assert_eq!((supervisor.file_bytes("came"), supervisor.file_bytes("begun")), (2, 1), "{rule}");
    }
}

#[test]
fn a_job_of_which_nothing_was_read_is_the_next_workers() {
    let supervisor = start("reads-nothing", "");
    let outcome = Client::connect(&supervisor).job("rules-reads-nothing", "", &PAYLOAD);
    assert_eq!((outcome.kind(), outcome.attempts, outcome.payload.len()), ((OK, 0), 2, PAYLOAD.len()));
    assert_eq!((supervisor.file_bytes("came"), supervisor.file_bytes("begun")), (2, 1));
}

/// The same beside one that it had begun.
#[test]
fn what_was_read_and_what_was_not_are_told_apart() {
    let supervisor = start("reads-one-of-two", "max_in_flight = 2");
    let mut client = Client::connect(&supervisor);
    for (number, payload) in [(1, &b"read"[..]), (2, &PAYLOAD)] {
        client.send(SUBMIT, number, submit("rules-reads-one-of-two", "").end(), payload);
    }
    let mut outcomes = [client.outcome(), client.outcome()];
    outcomes.sort_by_key(|outcome| outcome.number);
    let kinds = outcomes.each_ref().map(|outcome| (outcome.kind(), outcome.attempts));
    assert_eq!(kinds, [((CRASHED, CrashReason::Signal as u8), 1), ((OK, 0), 2)]);
    assert_eq!(supervisor.file_bytes("begun"), 1);
}

/// "One that only closes its descriptor is found by its heartbeats".
#[test]
fn a_worker_that_closes_its_descriptor_and_lives_on_is_found() {
    let supervisor = start("closes", "health = { heartbeat = \"200ms\", missed = 3 }");
    let outcome = Client::connect(&supervisor).job("rules-closes", "", b"");
    assert_eq!(outcome.kind(), (CRASHED, CrashReason::Hung as u8));
    supervisor.wait_number("rules-closes", "limit", 1);
}
