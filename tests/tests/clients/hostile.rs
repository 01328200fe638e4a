//! Hostile clients and workers: the supervisor rejects malformed input, bounds the resources that a peer can
//! occupy, and keeps serving everyone else.

use std::io::{Read, Write};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bulkhead_client::blocking::Client;
use bulkhead_client::{JobError, Reply};
use bulkhead_shared::client_protocol::{Hello, OutcomeMessage, Progress, Refused, Submit, role};
use bulkhead_shared::codec;
use bulkhead_shared::frame::{HEADER_BYTES, Header, MAGIC, kind};
use bulkhead_shared::worker_protocol::{Empty, LINK_VARIABLE, Status};
use bulkhead_shared::{Outcome, RejectReason, Verdict};
use bulkhead_tests::{
    PATIENCE, Supervisor, descriptors, heavy, is_alive, kill_pid, programs, resident_bytes, wait_for,
};
use nix::sys::signal::Signal;
use rustix::net::SendFlags;

const MIB: u64 = 1 << 20;

/// Encodes a frame header from arbitrary fields, which need not be valid.
fn header(length: u32, kind: u8, metadata_length: u16, number: u64) -> [u8; HEADER_BYTES] {
    Header { length, kind, flags: 0, metadata_length, number }.encode()
}

fn frame<M: bincode::Encode>(kind: u8, number: u64, message: &M, payload: &[u8]) -> Vec<u8> {
    let mut metadata = Vec::new();
    codec::encode(message, &[], &mut metadata).unwrap();
    let length = u32::try_from(metadata.len() + payload.len()).unwrap();
    let mut bytes = header(length, kind, metadata.len() as u16, number).to_vec();
    bytes.extend(metadata);
    bytes.extend(payload);
    bytes
}

fn hello(role: u8) -> Vec<u8> {
    let hello = Hello {
        version_min: 1,
        version_max: 1,
        role,
        frame_bytes_max: u32::MAX,
        capabilities: 0,
        name: "hostile",
        version: "0",
    };
    frame(kind::HELLO, MAGIC, &hello, b"")
}

const PLAIN: Submit<'static> = Submit {
    bulkhead: "victim",
    operation: "",
    tenant: "",
    deadline_us: 0,
    priority: 1,
    idempotent: 0,
    cost: 0,
};

fn submit(number: u64, operation: &str, payload: &[u8]) -> Vec<u8> {
    frame(kind::SUBMIT, number, &Submit { operation, ..PLAIN }, payload)
}

/// Encodes the beginning of a SUBMIT frame whose header announces a payload of `payload_bytes` bytes.
fn announcement(number: u64, payload_bytes: u32) -> Vec<u8> {
    let mut bytes = frame(kind::SUBMIT, number, &PLAIN, b"");
    let metadata_bytes = (bytes.len() - HEADER_BYTES) as u32;
    bytes[..4].copy_from_slice(&metadata_bytes.saturating_add(payload_bytes).to_le_bytes());
    bytes
}

/// Connects without sending anything.
fn dial(path: &Path) -> UnixStream {
    bulkhead_tests::dial(path).unwrap()
}

/// Connects and completes the handshake.
fn open(path: &Path) -> UnixStream {
    let mut socket = dial(path);
    socket.write_all(&hello(role::CLIENT)).unwrap();
    assert_eq!(next(&socket).map(|frame| frame.0.kind), Some(kind::CLIENT_WELCOME));
    socket
}

/// Writes to a socket that the supervisor may already have closed.
fn push(mut socket: &UnixStream, bytes: &[u8]) {
    let _ = socket.write_all(bytes);
}

/// Reads the next frame (header, metadata, payload). Returns `None` if the connection is closed.
fn next(mut socket: &UnixStream) -> Option<(Header, Vec<u8>, Vec<u8>)> {
    let ended = |error: std::io::Error| {
        assert_ne!(error.kind(), std::io::ErrorKind::WouldBlock, "no frame arrived within {PATIENCE:?}");
    };
    let mut bytes = [0; HEADER_BYTES];
    socket.read_exact(&mut bytes).map_err(ended).ok()?;
    let header = Header::decode(&bytes).check().unwrap();
    let mut metadata = vec![0; header.length as usize];
    socket.read_exact(&mut metadata).map_err(ended).ok()?;
    let payload = metadata.split_off(header.metadata_length.into());
    Some((header, metadata, payload))
}

/// Reads the next outcome (job number, outcome, result). Skips progress frames.
fn outcome(socket: &UnixStream) -> (u64, Outcome, Vec<u8>) {
    let mut frames = std::iter::from_fn(|| next(socket));
    let (header, metadata, payload) =
        frames.find(|(header, ..)| header.kind != kind::PROGRESS).expect("the connection stays open");
    assert_eq!(header.kind, kind::OUTCOME);
    let (message, _) = codec::decode::<OutcomeMessage<'_>>(&metadata, &[]).unwrap();
    (header.number, message.to_outcome().unwrap(), payload)
}

fn rejection(outcome: Outcome) -> (RejectReason, String) {
    match outcome.verdict {
        Verdict::Rejected { reason, message } => (reason, message),
        other => panic!("{other:?}"),
    }
}

/// Reads the supervisor's refusal, which must be the last frame on the connection. Skips all earlier frames.
fn refusal(socket: &UnixStream) -> (u8, String) {
    loop {
        let (header, metadata, _) = next(socket).expect("the supervisor sends a refusal");
        if header.kind == kind::REFUSED {
            let (refused, _) = codec::decode::<Refused<'_>>(&metadata, &[]).unwrap();
            assert!(next(socket).is_none(), "the connection ends with the refusal");
            return (refused.reason, refused.message.to_owned());
        }
    }
}

fn is_refused(socket: &UnixStream, why: &str) {
    let (reason, message) = refusal(socket);
    assert_eq!(reason, RejectReason::Invalid.code(), "{message}");
    assert!(message.contains(why), "{message}");
}

fn ended(result: &Result<Reply, JobError>) -> String {
    match result {
        Ok(_) => "ok".into(),
        Err(error) => match error.outcome() {
            Some(outcome) => {
                format!("{}/{}", outcome.verdict.name(), outcome.verdict.reason().unwrap_or_default())
            }
            None => format!("no outcome: {error}"),
        },
    }
}

fn is_healthy(supervisor: &Supervisor) {
    wait_for("/healthz answers", || (supervisor.try_get("/healthz")?.0 == 200).then_some(()));
}

/// Sends one job as an honest client and checks the echoed payload. The payload size depends on `round`.
fn honest_job(client: &Client, round: usize) {
    let size = [0, 1, 1000, 70_000, 300_000][round % 5];
    let payload: Vec<u8> = (0..size).map(|i| (i * 7 + i / 251 + round) as u8).collect();
    let reply = client.job("honest", payload.clone()).send();
    let reply = reply.unwrap_or_else(|error| panic!("an honest job of {size} bytes: {error}"));
    assert!(reply.payload() == payload, "{size} bytes came back as {}", reply.payload().len());
}

/// Memory usage and number of open descriptors of a supervisor.
#[derive(Clone, Copy, Debug)]
struct Held {
    bytes: u64,
    descriptors: usize,
}

impl Held {
    fn by(supervisor: &Supervisor) -> Self {
        Self { bytes: resident_bytes(supervisor.pid()), descriptors: descriptors(supervisor.pid()) }
    }
}

/// Runs `attack` while an honest client sends jobs, all of which must succeed. Returns the peak memory and descriptor
/// usage.
fn beside_an_honest_client(supervisor: &Supervisor, attack: impl FnOnce()) -> Held {
    let client = Client::connect(supervisor.socket()).unwrap();
    let is_over = AtomicBool::new(false);
    let (bytes, most_descriptors, rounds) = (AtomicU64::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
    let look = || {
        let held = Held::by(supervisor);
        bytes.fetch_max(held.bytes, Ordering::Relaxed);
        most_descriptors.fetch_max(held.descriptors, Ordering::Relaxed);
    };
    std::thread::scope(|scope| {
        let honest = scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                honest_job(&client, rounds.fetch_add(1, Ordering::Relaxed));
                look();
            }
        });
        let healthy = scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                is_healthy(supervisor);
                look();
            }
        });
        // Catches a panic in the attack, so that the two threads above are stopped.
        let attacked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(attack));
        is_over.store(true, Ordering::Relaxed);
        honest.join().unwrap();
        healthy.join().unwrap();
        if let Err(panic) = attacked {
            std::panic::resume_unwind(panic);
        }
    });
    // A new client must also be served. Clients that have left may still count as connected for a moment.
    let late = wait_for("another client is accepted", || Client::connect(supervisor.socket()).ok());
    honest_job(&late, 3);
    assert!(rounds.load(Ordering::Relaxed) > 0);
    Held { bytes: bytes.into_inner(), descriptors: most_descriptors.into_inner() }
}

// Two hundred hostile clients at once.

struct Attack {
    path: PathBuf,
    /// True once every attack that does not call [`Attack::hold`] has ended.
    is_over: AtomicBool,
}

impl Attack {
    /// Keeps a connection open until `is_over` is true.
    fn hold(&self, socket: UnixStream) {
        wait_for("the attack has ended", || self.is_over.load(Ordering::Relaxed).then_some(()));
        drop(socket);
    }
}

fn silent(attack: &Attack) {
    is_refused(&dial(&attack.path), "did not send HELLO in time");
}

fn half_a_header(attack: &Attack) {
    let socket = dial(&attack.path);
    push(&socket, &hello(role::CLIENT)[..7]);
    is_refused(&socket, "did not send HELLO in time");
}

fn half_a_hello(attack: &Attack) {
    let socket = dial(&attack.path);
    push(&socket, &hello(role::CLIENT)[..40]);
    is_refused(&socket, "did not send HELLO in time");
}

fn four_gibibytes_first(attack: &Attack) {
    let socket = dial(&attack.path);
    push(&socket, &header(u32::MAX, kind::SUBMIT, 8, 1));
    push(&socket, &[0; 100_000]);
    is_refused(&socket, "HELLO comes first");
}

fn four_gibibytes(attack: &Attack) {
    let socket = open(&attack.path);
    push(&socket, &announcement(1, u32::MAX));
    let (number, outcome, _) = outcome(&socket);
    assert_eq!((number, rejection(outcome).0), (1, RejectReason::TooLarge));
    push(&socket, &[7; 1 << 20]);
    attack.hold(socket);
}

fn garbage_first(attack: &Attack) {
    for byte in [0xa5, 0xff, 0x20, 0x00] {
        let socket = dial(&attack.path);
        push(&socket, &[byte; 200_000]);
        assert_eq!(refusal(&socket).0, RejectReason::Invalid.code());
    }
}

fn garbage_after_hello(attack: &Attack) {
    let socket = open(&attack.path);
    push(&socket, &[0xff; 100_000]);
    is_refused(&socket, "a critical frame");
    let socket = open(&attack.path);
    push(&socket, &header(4, kind::SUBMIT, 5, 1));
    is_refused(&socket, "5 bytes of metadata, but a total length of only 4");
}

fn never_reads(attack: &Attack) {
    let mut socket = open(&attack.path);
    socket.set_write_timeout(Some(Duration::from_millis(500))).unwrap();
    let mut sent = 0;
    for number in 0.. {
        // Most jobs are rejected at once because their bulkhead does not exist.
        let bulkhead = if number % 100 == 0 { "victim" } else { "nobody" };
        let bytes = frame(kind::SUBMIT, number, &Submit { bulkhead, ..PLAIN }, b"");
        if socket.write_all(&bytes).is_err() {
            break;
        }
        sent += bytes.len() as u64;
        assert!(sent < 16 * MIB, "the supervisor keeps reading from a client that does not read");
    }
    attack.hold(socket);
}

fn never_reads_results(attack: &Attack) {
    let socket = open(&attack.path);
    for number in 0..30 {
        push(&socket, &submit(number, "big", b"1000000"));
    }
    attack.hold(socket);
}

fn submits_and_leaves(attack: &Attack) {
    for number in 0..10 {
        let socket = open(&attack.path);
        push(&socket, &submit(number, ["yield", "sleep", "echo"][number as usize % 3], b"20"));
    }
}

fn comes_and_goes(attack: &Attack) {
    for _ in 0..50 {
        push(&dial(&attack.path), &hello(role::CLIENT));
    }
}

fn cancels_what_is_not_there(attack: &Attack) {
    let socket = open(&attack.path);
    for number in 0..1000_u64 {
        push(&socket, &frame(kind::CANCEL, number.wrapping_mul(0x9e37_79b9_7f4a_7c15), &Empty, b""));
    }
    push(&socket, &frame(kind::SUBMIT, 1, &Submit { bulkhead: "nobody", ..PLAIN }, b""));
    assert_eq!(rejection(outcome(&socket).1).0, RejectReason::NotFound);
}

fn uses_a_number_twice(attack: &Attack) {
    let socket = open(&attack.path);
    // The first job may already have been rejected. In that case, its number is free and the second job gets an
    // outcome.
    push(&socket, &submit(1, "yield", b""));
    push(&socket, &submit(1, "yield", b""));
    let (header, ..) = next(&socket).unwrap();
    assert!([kind::REFUSED, kind::OUTCOME].contains(&header.kind));
}

fn dribbles(attack: &Attack) {
    let socket = open(&attack.path);
    let payload = vec![9; 20_000];
    let bytes = frame(kind::SUBMIT, 1, &Submit { bulkhead: "honest", ..PLAIN }, &payload);
    for byte in bytes {
        push(&socket, &[byte]);
    }
    let (_, outcome, result) = outcome(&socket);
    assert_eq!(outcome.verdict, Verdict::Ok);
    assert!(result == payload);
}

fn pretends_to_be_a_worker(attack: &Attack) {
    let socket = dial(&attack.path);
    push(&socket, &hello(role::WORKER));
    push(&socket, &frame(kind::READY, 0, &Empty, b""));
    push(&socket, &frame(kind::RESULT, 1 << 24, &Empty, b"not mine"));
    is_refused(&socket, "only clients");
}

fn half_a_payload(attack: &Attack) {
    let socket = open(&attack.path);
    push(&socket, &announcement(1, 2 << 20));
    push(&socket, &[1; 1 << 20]);
    attack.hold(socket);
}

#[test]
fn honest_jobs_succeed_despite_two_hundred_hostile_clients() {
    let _turn = heavy();
    /// Number of concurrent attackers for each kind of attack.
    const EACH: usize = 13;
    /// Attacks that end without waiting for other attacks.
    const ANSWERED: [fn(&Attack); 12] = [
        silent,
        half_a_header,
        half_a_hello,
        four_gibibytes_first,
        garbage_first,
        garbage_after_hello,
        submits_and_leaves,
        comes_and_goes,
        cancels_what_is_not_there,
        uses_a_number_twice,
        dribbles,
        pretends_to_be_a_worker,
    ];
    /// Attacks that keep resources occupied until all attacks in `ANSWERED` have ended.
    const HOLDING: [fn(&Attack); 4] = [four_gibibytes, never_reads, never_reads_results, half_a_payload];
    let supervisor = Supervisor::start_with(
        "max_payload = \"4MiB\"\nmax_buffered = \"64MiB\"",
        "[defaults]\ndeadline = \"300s\"\n\
         [bulkhead.honest]\ncommand = [\"MISBEHAVE\"]\nmax_in_flight = 4\nmax_queue = 100\n\
         [bulkhead.victim]\ncommand = [\"MISBEHAVE\"]\nmax_in_flight = 4\nmax_queue = 50\n",
    );
    let client = Client::connect(supervisor.socket()).unwrap();
    (0..50).for_each(|round| honest_job(&client, round));
    drop(client);
    let before = Held::by(&supervisor);
    let restarts = supervisor.number("honest", "restarts");
    let attack = Attack { path: supervisor.socket(), is_over: AtomicBool::new(false) };
    let most = beside_an_honest_client(&supervisor, || {
        std::thread::scope(|scope| {
            let attack = &attack;
            let start = |kind: fn(&Attack)| scope.spawn(move || kind(attack));
            let holding: Vec<_> = (0..EACH).flat_map(|_| HOLDING).map(start).collect();
            let answered: Vec<_> = (0..EACH).flat_map(|_| ANSWERED).map(start).collect();
            let mut ends: Vec<_> = answered.into_iter().map(|thread| thread.join()).collect();
            attack.is_over.store(true, Ordering::Relaxed);
            ends.extend(holding.into_iter().map(|thread| thread.join()));
            for end in ends {
                if let Err(panic) = end {
                    std::panic::resume_unwind(panic);
                }
            }
        });
    });
    assert!(most.bytes < before.bytes + 256 * MIB, "before: {before:?}, peak: {most:?}");
    assert!(
        most.descriptors < before.descriptors + 1200,
        "max_clients is 1024; before: {before:?}, peak: {most:?}"
    );
    wait_for("the descriptors are free again", || {
        (descriptors(supervisor.pid()) <= before.descriptors + 4).then_some(())
    });
    let after = Held::by(&supervisor);
    assert!(after.bytes < before.bytes + 96 * MIB, "before: {before:?}, after: {after:?}");
    assert_eq!(supervisor.number("honest", "restarts"), restarts);
    supervisor.wait_number("victim", "in_flight", 0);
    supervisor.wait_number("victim", "queued", 0);
}

#[test]
fn invalid_job_does_not_close_the_connection() {
    let supervisor = Supervisor::start(
        "[bulkhead.victim]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 10\nmax_payload = \"100KiB\"\n\
         deadline = \"60s\"\ndeadline_max = \"90s\"\n",
    );
    let socket = open(&supervisor.socket());
    let long = "x".repeat(257);
    let huge = "x".repeat(60_000);
    let escapes = "\x1b[2J\r\n\u{202e}";
    let cases = [
        (Submit { bulkhead: "", ..PLAIN }, RejectReason::NotFound, "''"),
        (Submit { bulkhead: "VICTIM", ..PLAIN }, RejectReason::NotFound, "VICTIM"),
        (Submit { bulkhead: "victim\0", ..PLAIN }, RejectReason::NotFound, "victim\\0"),
        (Submit { bulkhead: "../victim", ..PLAIN }, RejectReason::NotFound, "../victim"),
        (Submit { bulkhead: escapes, ..PLAIN }, RejectReason::NotFound, "\\u{1b}"),
        (Submit { bulkhead: &huge, ..PLAIN }, RejectReason::NotFound, "xxx"),
        (Submit { operation: &long, ..PLAIN }, RejectReason::Invalid, "operation"),
        (Submit { operation: &huge, ..PLAIN }, RejectReason::Invalid, "operation"),
        (Submit { operation: "e\0cho", ..PLAIN }, RejectReason::Invalid, "NUL"),
        (Submit { tenant: &long, ..PLAIN }, RejectReason::Invalid, "tenant"),
        (Submit { tenant: "\0", ..PLAIN }, RejectReason::Invalid, "NUL"),
        (Submit { priority: 3, ..PLAIN }, RejectReason::Invalid, "priority 3"),
        (Submit { priority: 255, ..PLAIN }, RejectReason::Invalid, "priority 255"),
    ];
    for (number, (message, reason, why)) in cases.iter().enumerate() {
        for payload in [&b""[..], &[1; 70_000]] {
            push(&socket, &frame(kind::SUBMIT, number as u64, message, payload));
            let (answered, outcome, result) = outcome(&socket);
            assert_eq!((answered, result.len()), (number as u64, 0));
            assert!(outcome.bulkhead.len() <= 64);
            let (said, sentence) = rejection(outcome);
            assert_eq!(said, *reason, "{sentence}");
            assert!(sentence.contains(why) && sentence.len() < 500, "{sentence}");
            assert!(!sentence.contains(char::is_control), "{sentence:?}");
        }
    }

    // Invalid UTF-8, and lengths that do not match the frame.
    let valid = submit(77, "echo", b"");
    let spoilt = |at: usize, with: &[u8]| {
        let mut bytes = valid.clone();
        bytes[at..at + with.len()].copy_from_slice(with);
        bytes
    };
    let (length, name, operation) = (HEADER_BYTES, HEADER_BYTES + 8, HEADER_BYTES + 22);
    let spoilt = [
        spoilt(name, b"v\xff"),
        spoilt(operation, b"\xc3"),
        spoilt(length, &u64::MAX.to_le_bytes()),
        spoilt(length, &(1_u64 << 40).to_le_bytes()),
        spoilt(valid.len() - 8, &u64::MAX.to_le_bytes()),
        header(0, kind::SUBMIT, 0, 77).to_vec(),
    ];
    for bytes in spoilt {
        push(&socket, &bytes);
        let (number, outcome, _) = outcome(&socket);
        let (reason, sentence) = rejection(outcome);
        assert_eq!((number, reason), (77, RejectReason::Invalid), "{sentence}");
        assert!(!sentence.contains(char::is_control), "{sentence:?}");
    }

    // Unusual but valid values.
    let longest = "x".repeat(256);
    push(&socket, &frame(kind::SUBMIT, 1, &Submit { operation: &longest, tenant: &longest, ..PLAIN }, b""));
    let (_, unknown, _) = outcome(&socket);
    assert_eq!(unknown.verdict.reason(), Some("unknown_operation"));
    push(&socket, &frame(kind::SUBMIT, 2, &Submit { deadline_us: u64::MAX, cost: u32::MAX, ..PLAIN }, b"x"));
    let (_, patient, result) = outcome(&socket);
    assert_eq!((patient.verdict, patient.deadline), (Verdict::Ok, Duration::from_secs(90)));
    assert_eq!(result, b"x");
    push(&socket, &frame(kind::SUBMIT, 3, &Submit { deadline_us: 1, operation: "hang", ..PLAIN }, b""));
    assert_eq!(outcome(&socket).1.verdict.name(), "deadline_exceeded");
    for number in [0, 3, 77, u64::MAX] {
        push(&socket, &frame(kind::CANCEL, number, &Empty, b""));
    }
    push(&socket, &submit(u64::MAX, "echo", b"still here"));
    assert_eq!(outcome(&socket).2, b"still here");

    let snapshot = supervisor.snapshot("victim");
    let rejected = snapshot["rejected"].as_object().unwrap().values().filter_map(serde_json::Value::as_u64);
    let ends = ["done", "failed", "crashed", "deadline_exceeded", "cancelled"];
    let others = ends.iter().filter_map(|name| snapshot[name].as_u64());
    assert_eq!(snapshot["submitted"].as_u64(), Some(rejected.chain(others).sum()), "{snapshot}");
}

#[test]
fn reusing_a_running_jobs_number_closes_the_connection() {
    let supervisor =
        Supervisor::start("[bulkhead.victim]\ncommand = [\"MISBEHAVE\"]\nmax_payload = \"100KiB\"\n");
    // The supervisor would treat each of these jobs differently if the job number were unused.
    let seconds = [
        submit(7, "echo", b""),
        submit(7, "echo", &[1; 70_000]),
        submit(7, "echo", &[1; 200_000]),
        frame(kind::SUBMIT, 7, &Submit { bulkhead: "nobody", ..PLAIN }, b""),
    ];
    for second in seconds {
        let socket = open(&supervisor.socket());
        supervisor.wait_number("victim", "available", 1);
        push(&socket, &submit(7, "yield", b""));
        supervisor.wait_number("victim", "in_flight", 1);
        push(&socket, &second);
        let (header, metadata, _) = next(&socket).expect("the supervisor answers");
        assert_eq!(header.kind, kind::REFUSED, "the reused number got an answer other than REFUSED");
        let (refused, _) = codec::decode::<Refused<'_>>(&metadata, &[]).unwrap();
        assert!(refused.message.contains('7'), "{}", refused.message);
        supervisor.wait_number("victim", "in_flight", 0);
    }
}

#[test]
fn http_request_on_jobs_socket_names_admin_socket() {
    let supervisor = Supervisor::start("[bulkhead.victim]\ncommand = [\"MISBEHAVE\"]\n");
    for request in
        ["GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n", "POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n"]
    {
        let socket = dial(&supervisor.socket());
        push(&socket, request.as_bytes());
        is_refused(&socket, "admin socket");
    }
}

#[test]
fn client_beyond_max_clients_is_rejected_as_overloaded() {
    const MOST: usize = 64;
    let supervisor = Supervisor::start_with(
        &format!("max_clients = {MOST}"),
        "[bulkhead.honest]\ncommand = [\"MISBEHAVE\"]\nmax_in_flight = 4\nmax_queue = 10\ndeadline = \"300s\"\n",
    );
    let before = Held::by(&supervisor);
    let path = supervisor.socket();
    // Leaves two connections free, for the honest client and for the client that connects after the attack.
    let places: Vec<UnixStream> = (0..MOST - 2).map(|_| open(&path)).collect();
    let refused = AtomicUsize::new(0);
    let most = beside_an_honest_client(&supervisor, || {
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..10 {
                        let sockets: Vec<_> = (0..50).map(|_| dial(&path)).collect();
                        for socket in &sockets {
                            push(socket, &hello(role::CLIENT));
                        }
                        for socket in &sockets {
                            let (header, metadata, _) = next(socket).expect("every client gets an answer");
                            if header.kind == kind::REFUSED {
                                let (said, _) = codec::decode::<Refused<'_>>(&metadata, &[]).unwrap();
                                assert_eq!(said.reason, RejectReason::Overloaded.code());
                                assert!(said.message.contains("max_clients"), "{}", said.message);
                                refused.fetch_add(1, Ordering::Relaxed);
                            }
                        }
                    }
                });
            }
        });
    });
    assert!(refused.into_inner() >= 4 * 10 * 49);
    assert!(most.descriptors < before.descriptors + MOST + 250, "before: {before:?}, peak: {most:?}");
    drop(places);
    wait_for("the descriptors are free again", || {
        (descriptors(supervisor.pid()) <= before.descriptors + 4).then_some(())
    });
}

#[test]
fn incomplete_payloads_use_memory_only_for_received_bytes() {
    let supervisor = Supervisor::start_with(
        "max_payload = \"4MiB\"\nmax_buffered = \"32MiB\"",
        "[bulkhead.victim]\ncommand = [\"MISBEHAVE\"]\n",
    );
    let path = supervisor.socket();
    for _ in 0..10 {
        drop(open(&path));
    }
    let before = Held::by(&supervisor);
    let sockets: Vec<UnixStream> = (0..200).map(|_| open(&path)).collect();
    for socket in &sockets {
        push(socket, &announcement(1, 4 << 20));
        push(socket, &[1; 70_000]);
    }
    // When a new client gets its welcome, the supervisor has read all earlier data.
    let wait_read = || (0..10).for_each(|_| drop(open(&path)));
    wait_read();
    for socket in &sockets {
        push(socket, &[1]);
    }
    wait_read();
    let most = Held::by(&supervisor);
    assert!(
        most.bytes < before.bytes + 80 * MIB,
        "200 incomplete payloads of 70 kB; before: {before:?}, peak: {most:?}"
    );
    drop(sockets);
    wait_for("the descriptors are free again", || {
        (descriptors(supervisor.pid()) <= before.descriptors + 4).then_some(())
    });
}

#[test]
fn unread_results_stay_within_memory_limit() {
    let supervisor = Supervisor::start_with(
        "max_payload = \"4MiB\"\nmax_buffered = \"64MiB\"",
        "[defaults]\ndeadline = \"300s\"\n\
         [bulkhead.honest]\ncommand = [\"MISBEHAVE\"]\nmax_in_flight = 4\nmax_queue = 10\n\
         [bulkhead.victim]\ncommand = [\"MISBEHAVE\"]\nmax_in_flight = 2\nmax_queue = 1000\n",
    );
    let path = supervisor.socket();
    let before = Held::by(&supervisor);
    let most = beside_an_honest_client(&supervisor, || {
        let sockets: Vec<UnixStream> = (0..10).map(|_| open(&path)).collect();
        // Sends all jobs of a client in one write, because the supervisor reads nothing more from a client
        // with unread results.
        let jobs: Vec<u8> = (0..20).flat_map(|number| submit(number, "big", b"1000000")).collect();
        sockets.iter().for_each(|socket| push(socket, &jobs));
        // The results have a total size of 200 MB.
        wait_for("every job has ended", || {
            let snapshot = supervisor.snapshot("victim");
            let ended = ["done", "cancelled"].iter().filter_map(|name| snapshot[name].as_u64()).sum::<u64>();
            (ended == 200).then_some(())
        });
    });
    assert!(most.bytes < before.bytes + 192 * MIB, "before: {before:?}, peak: {most:?}");
}

#[test]
fn clients_cannot_exhaust_descriptors() {
    let folder = tempfile::tempdir().unwrap();
    let program = programs().join("misbehave");
    let config = format!(
        "[supervisor]\nsocket = \"jobs.sock\"\nadmin = \"admin.sock\"\n\
         [bulkhead.honest]\ncommand = [{program:?}]\nmax_in_flight = 4\ndeadline = \"60s\"\n\
         restart = {{ backoff_max = \"100ms\" }}\n"
    );
    std::fs::write(folder.path().join("workers.toml"), config).unwrap();
    let child = Command::new("/bin/sh")
        .args(["-c", "ulimit -n 128; exec \"$0\" --config \"$1\""])
        .args([programs().join("bulkhead-supervisor"), folder.path().join("workers.toml")])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(folder.path().join("log")).unwrap())
        .spawn()
        .unwrap();
    let supervisor = Supervisor { child, folder };
    wait_for("the supervisor is ready", || (supervisor.try_get("/readyz")?.0 == 200).then_some(()));
    let before = Held::by(&supervisor);
    let honest = Client::connect(supervisor.socket()).unwrap();
    let sockets: Vec<UnixStream> = (0..300)
        .map(|_| {
            let socket = dial(&supervisor.socket());
            push(&socket, &hello(role::CLIENT));
            socket
        })
        .collect();
    honest_job(&honest, 3);
    is_healthy(&supervisor);
    for _ in 0..3 {
        assert_eq!(ended(&honest.job("honest", "").operation("abort").send()), "crashed/signal");
        honest_job(&honest, 4);
    }
    is_healthy(&supervisor);
    drop(sockets);
    wait_for("the descriptors are free again", || {
        (descriptors(supervisor.pid()) <= before.descriptors + 4).then_some(())
    });
    // Clients that left before the supervisor accepted them may still count as connected for a moment.
    let late = wait_for("another client is accepted", || Client::connect(supervisor.socket()).ok());
    honest_job(&late, 4);
}

// Several events in one iteration of the event loop.

/// Stops the supervisor with SIGSTOP. All data sent before the call to [`goes_on`] then reaches the supervisor at once.
fn is_stopped(supervisor: &Supervisor) {
    supervisor.signal(Signal::SIGSTOP);
    wait_stopped(supervisor);
}

fn wait_stopped(supervisor: &Supervisor) {
    wait_for("the supervisor is stopped", || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", supervisor.pid())).ok()?;
        stat[stat.rfind(')')? + 1..].trim_start().starts_with('T').then_some(())
    });
}

fn goes_on(supervisor: &Supervisor) {
    supervisor.signal(Signal::SIGCONT);
}

#[test]
fn out_of_band_byte_closes_only_its_own_connection() {
    let notes = tempfile::tempdir().unwrap();
    let folder = notes.path();
    let confined = format!("sandbox = {{ user = \"shared\", write = [{folder:?}] }}");
    let bulkheads = by_hand(folder, PATIENT).replace(&confined, "sandbox = { profile = \"none\" }");
    let supervisor = Supervisor::start(&bulkheads);
    let client = Client::connect(supervisor.socket()).unwrap();
    let other = client.job("honest", "").operation("hang").start().unwrap();
    supervisor.wait_number("honest", "in_flight", 1);
    // Sends the out-of-band byte before the first frame, between frames, and within a frame.
    for sent in [&b""[..], &hello(role::CLIENT), &hello(role::CLIENT)[..7]] {
        let socket = dial(&supervisor.socket());
        push(&socket, sent);
        rustix::net::send(&socket, b"!", SendFlags::OOB).unwrap();
        is_refused(&socket, "out-of-band");
    }
    let flooded = result(&client, "out-of-band", "").unwrap_err();
    let verdict = &flooded.outcome().unwrap().verdict;
    assert_eq!((verdict.name(), verdict.reason()), ("crashed", Some("protocol")), "{flooded}");
    assert_eq!(result(&client, "echo", "x").unwrap().payload(), b"x");
    honest_job(&client, 1);
    assert_eq!(supervisor.number("honest", "in_flight"), 1, "the job on the other connection still runs");
    drop(other);
}

/// The only tenant with workers is idle and gives up its workers, which makes room for only one of the other tenants.
#[test]
fn idle_tenant_makes_room_for_only_one_of_many() {
    const TENANTS: u64 = 40;
    let supervisor = Supervisor::start(
        "[bulkhead.victim]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 5\ndeadline = \"60s\"\n\
         tenants = { isolate = true, max_active = 1 }\n",
    );
    let socket = open(&supervisor.socket());
    let of = |number: u64| {
        let tenant = format!("tenant {number}");
        frame(kind::SUBMIT, number, &Submit { tenant: &tenant, ..PLAIN }, b"")
    };
    push(&socket, &of(0));
    assert_eq!(outcome(&socket).1.verdict, Verdict::Ok);
    // The stopped worker does not exit before the supervisor has handled all jobs.
    kill_pid(supervisor.worker_pids("victim")[0], Signal::SIGSTOP);
    is_stopped(&supervisor);
    (1..=TENANTS).for_each(|number| push(&socket, &of(number)));
    goes_on(&supervisor);
    for _ in 1..TENANTS {
        let (number, rejected, _) = outcome(&socket);
        assert_eq!(rejection(rejected).0, RejectReason::Unavailable, "tenant {number}");
    }
    let (number, served, _) = outcome(&socket);
    assert_eq!((number, served.verdict), (1, Verdict::Ok));
}

/// The out-of-band byte can arrive before the supervisor knows that the worker process is running.
#[test]
fn out_of_band_byte_during_start_kills_worker() {
    const STARTS: usize = 12;
    let notes = tempfile::tempdir().unwrap();
    let keys = format!(
        "{PATIENT}start = {{ handshake = \"600s\", ready = \"600s\" }}\n\
         restart = {{ backoff = \"1ms\", backoff_max = \"1ms\", max = 1000 }}\n"
    );
    let bulkheads =
        by_hand(notes.path(), &keys).replace("env = { NOTES", "env = { OUT_OF_BAND = \"1\", NOTES");
    let bulkheads = bulkheads.replacen("sandbox = { ", "sandbox = { profile = \"none\" }\n# ", 1);
    let folder = tempfile::tempdir().unwrap();
    let supervisor = Supervisor::launch(folder, "", &bulkheads);
    wait_for("the supervisor answers", || supervisor.try_get("/healthz"));
    // The worker must be killed at every start. If the supervisor missed one violation, no further worker would start.
    for event in supervisor.wait_events("worker_killed", STARTS) {
        assert!(event["reason"].as_str().unwrap().contains("out-of-band"), "{event}");
    }
}

/// The supervisor serves users and connections in turn, so that many connections with unread frames do not delay a job
/// on another connection.
#[test]
fn flooding_clients_do_not_delay_a_job() {
    const FLOODS: usize = 200;
    const SUBMITS: u64 = 1200;
    let supervisor = Supervisor::start(
        "[bulkhead.honest]\ncommand = [\"MISBEHAVE\"]\ndeadline = \"60s\"\nsandbox = { profile = \"none\" }\n",
    );
    let mut floods: Vec<UnixStream> = (0..FLOODS).map(|_| open(&supervisor.socket())).collect();
    let honest = open(&supervisor.socket());
    is_stopped(&supervisor);
    let nowhere = Submit { bulkhead: "nowhere", ..PLAIN };
    let flood: Vec<u8> = (0..SUBMITS).flat_map(|n| frame(kind::SUBMIT, n, &nowhere, b"")).collect();
    assert!(flood.len() < 128 << 10, "the flood does not fit into one read: {}", flood.len());
    floods.iter_mut().for_each(|socket| socket.write_all(&flood).unwrap());
    // The worker stops the supervisor when the job arrives, so the test can count the answers that were sent before
    // that.
    let freeze = Submit { bulkhead: "honest", operation: "freeze", ..PLAIN };
    push(&honest, &frame(kind::SUBMIT, 1, &freeze, supervisor.pid().to_string().as_bytes()));
    goes_on(&supervisor);
    wait_stopped(&supervisor);
    let answered: u64 = floods.iter().map(|socket| rustix::io::ioctl_fionread(socket).unwrap()).sum();
    goes_on(&supervisor);
    assert_eq!(outcome(&honest).1.verdict, Verdict::Ok);
    let most = FLOODS as u64 * (40 << 10);
    assert!(
        answered < most,
        "the flooding clients got {answered} bytes of answers first; the limit is {most}"
    );
}

/// Clients whose jobs are all rejected, and clients that connect and leave, get only a share of the data plane's time.
/// If the data plane were always busy, workers and other clients would be delayed.
#[test]
fn rejected_clients_get_limited_processor_time() {
    let supervisor = Supervisor::start("[bulkhead.honest]\ncommand = [\"MISBEHAVE\"]\n");
    let path = supervisor.socket();
    let nowhere = Submit { bulkhead: "nowhere", ..PLAIN };
    let flood: Vec<u8> = (0..64).flat_map(|n| frame(kind::SUBMIT, n, &nowhere, b"")).collect();
    let sockets: Vec<UnixStream> = (0..4).map(|_| open(&path)).collect();
    sockets.iter().for_each(|socket| socket.set_nonblocking(true).unwrap());
    // Offset in `flood` at which each socket continues.
    let mut rests = vec![0; sockets.len()];
    let (mut answers, mut is_open) = (vec![0; 1 << 16], true);
    let mut floods = || {
        for (mut socket, at) in sockets.iter().zip(&mut rests) {
            while socket.read(&mut answers).is_ok_and(|count| count == answers.len()) {}
            *at = (*at + socket.write(&flood[*at..]).unwrap_or(0)) % flood.len();
        }
    };
    let mut comes_and_goes = || drop(dial(&path));
    let attacks: [&mut dyn FnMut(); 2] = [&mut floods, &mut comes_and_goes];
    for attack in attacks {
        let (began, before) = (Instant::now(), processor_time(&supervisor));
        while processor_time(&supervisor) < before + Duration::from_millis(100) {
            (0..50).for_each(|_| attack());
            is_open &= began.elapsed() < Duration::from_secs(300);
            assert!(is_open, "the attack used hardly any processor time");
        }
        let (took, used) = (began.elapsed(), processor_time(&supervisor) - before);
        assert!(used < took / 2, "{used:?} of {took:?}");
    }
    // A flooding client that sends a valid job is served.
    let socket = &sockets[0];
    socket.set_nonblocking(false).unwrap();
    push(socket, &flood[rests[0]..]);
    push(
        socket,
        &frame(kind::SUBMIT, 1000, &Submit { bulkhead: "honest", operation: "echo", ..PLAIN }, b"x"),
    );
    let served = std::iter::repeat_with(|| outcome(socket)).find(|(number, ..)| *number == 1000).unwrap();
    assert_eq!(served.1.verdict, Verdict::Ok);
}

#[test]
fn delayed_clients_raise_an_event() {
    let supervisor = Supervisor::start("[bulkhead.victim]\ncommand = [\"MISBEHAVE\"]\n");
    let is_over = AtomicBool::new(false);
    let told = std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    drop(UnixStream::connect(supervisor.socket()));
                }
            });
        }
        // Catches a panic, so that the threads above are stopped.
        let told = std::panic::catch_unwind(|| supervisor.wait_events("clients_delayed", 1).remove(0));
        is_over.store(true, Ordering::Relaxed);
        told.unwrap()
    });
    assert!(told["for_ms"].as_u64().unwrap() >= 1000 && told["accepted"].as_u64().unwrap() > 0, "{told}");
    assert_eq!((&told["severity"], &told["bulkhead"]), (&"warning".into(), &serde_json::Value::Null));
    is_healthy(&supervisor);
}

/// Returns the processor time used by the supervisor's first thread, which runs the data plane.
fn processor_time(supervisor: &Supervisor) -> Duration {
    let pid = supervisor.pid();
    let told = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/schedstat")).unwrap();
    Duration::from_nanos(told.split(' ').next().unwrap().parse().unwrap())
}

#[test]
fn disconnect_after_last_frame_releases_the_client() {
    let supervisor = Supervisor::start(
        "[bulkhead.victim]\ncommand = [\"MISBEHAVE\"]\ngrace = \"20s\"\ndeadline = \"900s\"\n",
    );
    let path = supervisor.socket();
    let before = Held::by(&supervisor);
    let (takes, halves) = (open(&path), open(&path));
    let waits: Vec<UnixStream> = (0..5).map(|_| open(&path)).collect();
    is_stopped(&supervisor);
    push(&takes, &submit(1, "yield", b""));
    push(&halves, &submit(1, "yield", b"")[..30]);
    for socket in &waits {
        push(socket, &frame(kind::CANCEL, 1, &Empty, b""));
    }
    drop((takes, halves, waits));
    goes_on(&supervisor);
    supervisor.wait_number("victim", "cancelled", 1);
    supervisor.wait_number("victim", "available", 1);
    wait_for("the descriptors are free again", || {
        (descriptors(supervisor.pid()) <= before.descriptors + 1).then_some(())
    });
    assert_eq!(supervisor.number("victim", "restarts"), 0);
}

// Workers: the supervisor runs this test program with `clients::hostile::hostile_worker` as the only test.

/// Returns the configuration of two bulkheads. `victim` runs the worker [`hostile_worker`] and has further `keys`, and
/// `honest` runs a normal worker. The hostile worker creates its note files in `folder`.
fn by_hand(folder: &Path, keys: &str) -> String {
    let program = std::env::current_exe().unwrap();
    format!(
        "[bulkhead.victim]\n\
         command = [{program:?}, \"clients::hostile::hostile_worker\", \"--exact\", \"--ignored\", \"--nocapture\"]\n\
         env = {{ NOTES = {folder:?} }}\nsandbox = {{ user = \"shared\", write = [{folder:?}] }}\n\
         {keys}\n\
         [bulkhead.honest]\ncommand = [\"MISBEHAVE\"]\nmax_in_flight = 4\nmax_queue = 10\ndeadline = \"300s\"\n"
    )
}

/// Configuration keys with a deadline and a heartbeat interval that exceed the duration of any test.
const PATIENT: &str = "deadline = \"300s\"\nhealth = { heartbeat = \"600s\" }\n";

#[test]
#[ignore = "not a test, but the worker process that the supervisor starts in other tests"]
fn hostile_worker() {
    let Ok(notes) = std::env::var("NOTES") else { return };
    let fd: i32 = std::env::var(LINK_VARIABLE).unwrap().parse().unwrap();
    #[expect(unsafe_code, reason = "the supervisor passed this descriptor to its worker")]
    // SAFETY: the supervisor handed us this descriptor, and nothing else in this process uses it.
    let socket = UnixStream::from(unsafe { OwnedFd::from_raw_fd(fd) });
    socket.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    let mut worker = Worker { socket, notes: notes.into(), held: None, is_silent: false, out: Vec::new() };
    worker.say(&hello(role::WORKER));
    if std::env::var_os("OUT_OF_BAND").is_some() {
        worker.flush();
        rustix::net::send(&worker.socket, b"!", SendFlags::OOB).unwrap();
    }
    worker.say(&frame(kind::READY, 0, &Empty, b""));
    worker.work();
}

struct Worker {
    socket: UnixStream,
    notes: PathBuf,
    /// Job that stays unanswered until a job with the operation "release" arrives.
    held: Option<u64>,
    /// True if the worker has stopped sending heartbeats.
    is_silent: bool,
    out: Vec<u8>,
}

impl Worker {
    fn work(&mut self) -> ! {
        let (mut bytes, mut chunk) = (Vec::new(), vec![0; 65_536]);
        loop {
            let mut at = 0;
            while let Some(head) = bytes[at..].first_chunk::<HEADER_BYTES>() {
                let header = Header::decode(head);
                let end = at + HEADER_BYTES + header.length as usize;
                if bytes.len() < end {
                    break;
                }
                let payload = bytes[end - header.payload_length()..end].to_vec();
                let metadata = bytes[at + HEADER_BYTES..end - payload.len()].to_vec();
                self.frame(header, &metadata, &payload);
                at = end;
            }
            bytes.drain(..at);
            self.flush();
            match self.socket.read(&mut chunk) {
                Ok(count) if count > 0 => bytes.extend(&chunk[..count]),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => self.beat(),
                Ok(_) | Err(_) => std::process::exit(0),
            }
        }
    }

    fn flush(&mut self) {
        if self.socket.write_all(&std::mem::take(&mut self.out)).is_err() {
            std::process::exit(0);
        }
    }

    fn say(&mut self, bytes: &[u8]) {
        self.out.extend(bytes);
        if self.out.len() > 1 << 20 {
            self.flush();
        }
    }

    fn beat(&mut self) {
        if !self.is_silent {
            self.say(&frame(kind::HEARTBEAT, 0, &Empty, b""));
        }
    }

    fn answer(&mut self, job: u64, result: &[u8]) {
        self.say(&frame(kind::RESULT, job, &Empty, result));
    }

    fn note(&self, name: &str) -> PathBuf {
        self.notes.join(name)
    }

    fn noted(&self) -> u64 {
        let number = || std::fs::read_to_string(self.note("job")).ok()?.parse().ok();
        wait_for("a job has noted its number", number)
    }

    fn frame(&mut self, header: Header, metadata: &[u8], payload: &[u8]) {
        match header.kind {
            kind::JOB => {
                let (job, _) =
                    codec::decode::<bulkhead_shared::worker_protocol::Job<'_>>(metadata, &[]).unwrap();
                self.job(header.number, job.operation, payload);
            }
            kind::CANCEL_JOB if self.held != Some(header.number) => self.answer(header.number, b"late"),
            kind::DRAIN => std::process::exit(0),
            _ => {}
        }
    }

    fn job(&mut self, job: u64, operation: &str, payload: &[u8]) {
        let count = || std::str::from_utf8(payload).unwrap().parse::<u64>().unwrap();
        match operation {
            "echo" => self.answer(job, payload),
            // A later "release" answers this job.
            "hold" | "note" => {
                self.held = Some(job);
                if operation == "note" {
                    let number = self.note("number");
                    std::fs::write(&number, job.to_string()).unwrap();
                    std::fs::rename(number, self.note("job")).unwrap();
                }
            }
            "release" => {
                let held = self.held.take().unwrap();
                self.answer(held, b"kept");
                self.answer(job, b"released");
            }
            "until-cancelled" => {}
            "die" => std::process::exit(1),
            "answer-for-another" => {
                let other = self.noted();
                self.answer(other, b"stolen");
                let failed = Status { text: "the failure of another worker's job" };
                self.say(&frame(kind::PROGRESSED, other, &Progress { fraction: 0.5, text: "stolen" }, b""));
                self.say(&frame(kind::STATUS, other, &failed, b""));
                self.answer(job, b"done");
            }
            "answer-often" => {
                for answer in 0..100_u8 {
                    self.answer(job, &[answer]);
                }
            }
            "too-large" => self.answer(job, &vec![1; count() as usize]),
            // Sends the second half when the test has written the note "go".
            "too-large-slowly" => {
                let whole = frame(kind::RESULT, job, &Empty, &vec![1; count() as usize]);
                let (first, rest) = whole.split_at(whole.len() / 2);
                self.say(first);
                self.flush();
                std::fs::write(self.note("half"), "").unwrap();
                while !self.note("go").exists() {
                    std::thread::sleep(Duration::from_millis(5));
                }
                self.say(rest);
            }
            "flood-progress" => {
                let text = "x".repeat(8 << 10);
                for step in 0..count() {
                    let fraction = [0.5, -1.0, f32::NAN, f32::INFINITY, 2.0][step as usize % 5];
                    self.say(&frame(kind::PROGRESSED, job, &Progress { fraction, text: &text }, b""));
                }
                self.answer(job, b"done");
            }
            "flood-heartbeats" => loop {
                self.say(&frame(kind::HEARTBEAT, 0, &Empty, b""));
            },
            "out-of-band" => {
                rustix::net::send(&self.socket, b"!", SendFlags::OOB).unwrap();
            }
            // Sends each frame with a separate write, as a simple implementation would.
            "chatter" => {
                for step in 0..count() {
                    let progress = Progress { fraction: 0.5, text: &step.to_string() };
                    self.say(&frame(kind::PROGRESSED, job, &progress, b""));
                    self.flush();
                }
                self.answer(job, b"done");
            }
            "flood-answers" => loop {
                self.answer(job.wrapping_add(1 << 24), b"nobody's");
            },
            "flood-words" => {
                let text = "\x1b[31m\0".repeat(5000);
                for _ in 0..count() {
                    self.say(&frame(kind::STATUS, job, &Status { text: &text }, b""));
                    self.say(&frame(200, job, &Status { text: &text }, &[1; 100_000]));
                    self.say(&frame(kind::HEARTBEAT, job, &Empty, b""));
                    self.say(&frame(kind::READY, 0, &Empty, b""));
                }
                self.answer(job, b"done");
            }
            "flood-errors" => {
                let rubbish: Vec<u8> =
                    (0..1 << 20).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
                let mut stderr = std::io::stderr();
                for line_end in [&b""[..], b"", b"", b"\n", b"\n\n\n\n", b"\r\n\x1b]0;owned\x07\n"] {
                    let _ = stderr.write_all(&rubbish).and_then(|()| stderr.write_all(line_end));
                }
                self.answer(job, b"done");
            }
            "half-an-answer" | "answer-and-a-half" => {
                if operation == "answer-and-a-half" {
                    self.answer(job, b"whole");
                }
                let half = frame(kind::RESULT, job, &Empty, &[7; 1000]);
                self.say(&half[..500]);
                self.is_silent = true;
            }
            // Waits for the test, so that the supervisor sees the answer and the closed link at the same time.
            "answer-and-close" => {
                wait_for("the test allows the answer", || self.note("go").exists().then_some(()));
                self.answer(job, b"goodbye");
                self.flush();
                let _ = self.socket.shutdown(std::net::Shutdown::Both);
                std::fs::write(self.note("gone"), "").unwrap();
                loop {
                    std::thread::park();
                }
            }
            other => panic!("{other}"),
        }
    }
}

fn result(client: &Client, operation: &str, payload: &str) -> Result<Reply, JobError> {
    client.job("victim", payload.to_owned()).operation(operation).send()
}

#[test]
fn worker_cannot_answer_other_workers_jobs() {
    let notes = tempfile::tempdir().unwrap();
    let keys = format!("{PATIENT}processes = 2\nmax_queue = 10\n");
    let supervisor = Supervisor::start(&by_hand(notes.path(), &keys));
    supervisor.wait_number("victim", "limit", 2);
    let client = Client::connect(supervisor.socket()).unwrap();
    std::thread::scope(|scope| {
        let held = scope.spawn(|| result(&client, "note", ""));
        supervisor.wait_number("victim", "in_flight", 1);
        let thief = result(&client, "answer-for-another", "").unwrap();
        assert_eq!(thief.payload(), b"done");
        assert_eq!(supervisor.number("victim", "in_flight"), 1, "another worker answered the job");
        let pids = supervisor.worker_pids("victim");
        let holder = pids.into_iter().find(|&pid| thief.outcome().worker_pid != Some(pid)).unwrap();
        kill_pid(holder, Signal::SIGKILL);
        assert_eq!(ended(&held.join().unwrap()), "crashed/signal");
    });
    // The job with the noted number has ended. The supervisor drops all answers for this number.
    for _ in 0..4 {
        assert_eq!(result(&client, "answer-for-another", "").unwrap().payload(), b"done");
    }
    assert!(supervisor.number("victim", "late_replies") >= 5);
    assert_eq!(supervisor.number("victim", "crashed"), 1);
}

#[test]
fn flooding_worker_stays_within_limits() {
    let _turn = heavy();
    let notes = tempfile::tempdir().unwrap();
    let keys = format!("{PATIENT}max_queue = 10\nmax_result = 100000\ngrace = \"60s\"\n");
    let supervisor = Supervisor::start(&by_hand(notes.path(), &keys));
    let client = Client::connect(supervisor.socket()).unwrap();
    assert_eq!(result(&client, "echo", "x").unwrap().payload(), b"x");
    let before = Held::by(&supervisor);
    let most = beside_an_honest_client(&supervisor, || {
        for size in ["100001", "1000000", "30000000"] {
            assert_eq!(ended(&result(&client, "too-large", size)), "failed/result_too_large");
        }
        assert_eq!(result(&client, "too-large", "100000").unwrap().payload().len(), 100_000);
        for _ in 0..3 {
            assert_eq!(result(&client, "answer-often", "").unwrap().payload(), [0]);
        }
        assert_eq!(result(&client, "flood-progress", "1000").unwrap().payload(), b"done");
        assert_eq!(result(&client, "flood-words", "100").unwrap().payload(), b"done");
        assert_eq!(result(&client, "flood-errors", "").unwrap().payload(), b"done");

        // The supervisor limits the progress reports that it buffers for a client that does not read.
        let done = supervisor.number("victim", "done");
        let socket = open(&supervisor.socket());
        push(&socket, &submit(1, "flood-progress", b"2000"));
        supervisor.wait_number("victim", "done", done + 1);
        let mut bytes = 0;
        let end = loop {
            let (header, _, payload) = next(&socket).unwrap();
            bytes += header.length as usize;
            if header.kind == kind::OUTCOME {
                break payload;
            }
        };
        assert_eq!(end, b"done");
        assert!(bytes < 4 << 20, "{bytes} bytes of 16 MiB of progress were buffered");
    });
    assert_eq!(supervisor.number("victim", "restarts"), 0);
    let status =
        supervisor.snapshot("victim")["workers"][0]["status"].as_str().unwrap_or_default().to_owned();
    assert!(status.len() <= 256, "the status has {} bytes", status.len());
    let logs = wait_for("the logs have lines", || {
        let (_, logs) = supervisor.try_get("/v1/bulkheads/victim/logs")?;
        (logs.lines().count() > 0).then_some(logs)
    });
    for line in logs.lines() {
        let line: serde_json::Value = serde_json::from_str(line).expect("a line of JSON");
        // A record of dropped lines contains their number instead of text.
        assert!(line["dropped"].is_u64() || line["line"].as_str().unwrap().len() < 40_000);
    }
    assert!(logs.len() < 1 << 20, "the logs have {} bytes", logs.len());
    let log = std::fs::read(supervisor.folder.path().join("log")).unwrap();
    let control = log.iter().find(|&&byte| byte < b' ' && byte != b'\n' && byte != b'\t');
    assert_eq!(control, None, "the log contains a control character");
    assert!(most.bytes < before.bytes + 64 * MIB, "before: {before:?}, peak: {most:?}");

    // A reply with many small progress frames is allowed, although it takes longer.
    assert_eq!(result(&client, "chatter", "3000").unwrap().payload(), b"done");
    assert_eq!(supervisor.number("victim", "restarts"), 0);

    // An endless flood of heartbeats is a protocol violation.
    let flooded = result(&client, "flood-heartbeats", "").unwrap_err();
    let verdict = &flooded.outcome().unwrap().verdict;
    assert_eq!((verdict.name(), verdict.reason()), ("crashed", Some("protocol")), "{flooded}");
    assert_eq!(result(&client, "echo", "x").unwrap().payload(), b"x");
    let exits = supervisor.wait_events("worker_killed", 1);
    assert!(exits.iter().any(|event| event.to_string().contains("300000")), "{exits:?}");

    // An endless flood of replies for unknown jobs is a protocol violation.
    assert_eq!(ended(&result(&client, "flood-answers", "")), "crashed/protocol");
    assert_eq!(result(&client, "echo", "x").unwrap().payload(), b"x");
}

/// While the worker is still sending the rejected result, the permit stays in use and no other job can start.
#[test]
fn oversized_result_keeps_its_permit_until_fully_read() {
    let notes = tempfile::tempdir().unwrap();
    let keys = format!("max_result = \"1MiB\"\nmax_queue = 10\ngrace = \"60s\"\n{PATIENT}");
    let supervisor = Supervisor::start(&by_hand(notes.path(), &keys));
    let client = Client::connect(supervisor.socket()).unwrap();
    // The client gets the failure before the worker sends the rest of the result, which it does after the note "go".
    let large = result(&client, "too-large-slowly", "3000000");
    assert_eq!(ended(&large), "failed/result_too_large");
    let next = std::thread::spawn(move || ended(&result(&client, "echo", "next")));
    supervisor.wait_number("victim", "queued", 1);
    // The permit stays in use, no matter how much of the result has been read.
    for _ in 0..20 {
        let snapshot = supervisor.snapshot("victim");
        assert_eq!((&snapshot["workers"][0]["in_flight"], &snapshot["queued"]), (&1.into(), &1.into()));
    }
    assert!(!next.is_finished());
    std::fs::write(notes.path().join("go"), "").unwrap();
    assert_eq!(next.join().unwrap(), "ok");
    for what in ["crashed", "restarts", "late_replies", "in_flight"] {
        assert_eq!(supervisor.number("victim", what), 0, "{what}");
    }
    assert_eq!(supervisor.number("victim", "done"), 1);
}

#[test]
fn worker_stalled_mid_frame_is_replaced() {
    let notes = tempfile::tempdir().unwrap();
    let keys = "max_queue = 10\ndeadline = \"2s\"\ndeadline_max = \"60s\"\ngrace = \"20ms\"\n\
                health = { heartbeat = \"100ms\", missed = 40 }\n";
    let supervisor = Supervisor::start(&by_hand(notes.path(), keys));
    let client = Client::connect(supervisor.socket()).unwrap();
    // While the stalled worker has a job, the worker is killed at the job's deadline.
    assert_eq!(ended(&result(&client, "half-an-answer", "")), "deadline_exceeded/running");
    let patient = |operation: &str| {
        client.job("victim", "x").operation(operation).deadline(Duration::from_secs(60)).send()
    };
    assert_eq!(patient("echo").unwrap().payload(), b"x");
    // While the stalled worker has no job, the worker is killed because of missed heartbeats.
    let last = patient("answer-and-a-half").unwrap();
    assert_eq!(last.payload(), b"whole");
    let pid = last.outcome().worker_pid.unwrap();
    wait_for("the stalled worker is killed", || (!is_alive(pid)).then_some(()));
    assert_eq!(patient("echo").unwrap().payload(), b"x");
    honest_job(&client, 3);
}

#[test]
fn worker_that_closes_its_link_is_replaced() {
    let notes = tempfile::tempdir().unwrap();
    let supervisor = Supervisor::start(&by_hand(notes.path(), PATIENT));
    let client = Client::connect(supervisor.socket()).unwrap();
    std::thread::scope(|scope| {
        let job = scope.spawn(|| result(&client, "answer-and-close", ""));
        supervisor.wait_number("victim", "in_flight", 1);
        let paused = supervisor.pause();
        std::fs::write(notes.path().join("go"), "").unwrap();
        wait_for("the worker has closed its link", || notes.path().join("gone").exists().then_some(()));
        drop(paused);
        assert_eq!(job.join().unwrap().unwrap().payload(), b"goodbye");
    });
    supervisor.wait_number("victim", "restarts", 1);
    assert_eq!(result(&client, "echo", "x").unwrap().payload(), b"x");
}

#[test]
fn cancellations_do_not_kill_a_shared_worker() {
    /// Number of replies to unknown jobs, chosen to exceed the number that the supervisor accepts from a worker
    /// (100,000).
    const MANY: u64 = 110_000;
    const AT_ONCE: u64 = 500;
    let notes = tempfile::tempdir().unwrap();
    let keys = "max_in_flight = 1000\ndeadline = \"600s\"\nhealth = { heartbeat = \"600s\" }\n";
    let supervisor = Supervisor::start(&by_hand(notes.path(), keys));
    let client = Client::connect(supervisor.socket()).unwrap();
    std::thread::scope(|scope| {
        let neighbour = scope.spawn(|| result(&client, "hold", ""));
        supervisor.wait_number("victim", "in_flight", 1);
        let socket = open(&supervisor.socket());
        let mut taken = 0;
        let mut answers = std::io::BufReader::with_capacity(1 << 20, &socket);
        while taken < MANY && !neighbour.is_finished() {
            let mut bytes = Vec::new();
            for number in 0..AT_ONCE {
                bytes.extend(submit(number, "until-cancelled", b""));
                bytes.extend(frame(kind::CANCEL, number, &Empty, b""));
            }
            push(&socket, &bytes);
            for _ in 0..AT_ONCE {
                let mut head = [0; HEADER_BYTES];
                answers.read_exact(&mut head).unwrap();
                let mut rest = vec![0; Header::decode(&head).length as usize];
                answers.read_exact(&mut rest).unwrap();
                // Counts only cancelled jobs. Other jobs are rejected because the worker lags behind.
                taken += u64::from(rest[0] == bulkhead_shared::client_protocol::outcome_code::CANCELLED);
            }
        }
        // The worker handles jobs in order, so all earlier jobs have been answered by then.
        let released = result(&client, "release", "");
        assert_eq!(ended(&released), "ok");
        let neighbour = neighbour.join().unwrap();
        assert_eq!(ended(&neighbour), "ok", "after {taken} cancelled jobs in the same worker");
        assert_eq!(neighbour.unwrap().payload(), b"kept");
    });
    assert_eq!(supervisor.number("victim", "restarts"), 0);
}

// Tests that take more than half a minute.

/// A stalled client stops sending in the middle of a frame, or never reads.
#[test]
#[ignore = "waits for the limits of 30 s"]
fn stalled_clients_are_disconnected_but_slow_client_stays() {
    let supervisor = Supervisor::start_with(
        "max_payload = \"4MiB\"",
        "[bulkhead.victim]\ncommand = [\"MISBEHAVE\"]\nmax_in_flight = 4\nmax_queue = 100\ndeadline = \"90s\"\n",
    );
    let path = supervisor.socket();
    let before = Held::by(&supervisor);
    let unread = open(&path);
    for number in 0..10 {
        push(&unread, &submit(number, "big", b"1000000"));
    }
    std::thread::scope(|scope| {
        let cut_off = [
            scope.spawn(|| {
                let socket = open(&path);
                push(&socket, &submit(1, "echo", &[1; 1000])[..500]);
                is_refused(&socket, "not finish sending a frame in time");
            }),
            scope.spawn(|| {
                let socket = open(&path);
                push(&socket, &announcement(1, 2 << 20));
                push(&socket, &[1; 1 << 20]);
                is_refused(&socket, "not finish sending a frame in time");
            }),
        ];
        // This client completes each frame quickly, but always has an incomplete frame on the connection. The client
        // continues for a while after the stalled clients have been disconnected.
        let slow = open(&path);
        let mut bytes = submit(0, "sleep", b"5");
        let half = bytes.len() / 2;
        push(&slow, &bytes[..half]);
        let mut rounds_left = 200;
        for number in 0_u64.. {
            let following = submit(number + 1, "sleep", b"5");
            push(&slow, &[&bytes[half..], &following[..half]].concat());
            let (header, ..) = next(&slow).unwrap();
            assert_eq!(
                (header.kind, header.number),
                (kind::OUTCOME, number),
                "the slow client was disconnected"
            );
            bytes = following;
            rounds_left -= usize::from(cut_off.iter().all(std::thread::ScopedJoinHandle::is_finished));
            if rounds_left == 0 {
                break;
            }
        }
    });
    wait_for("the client that never reads is disconnected", || {
        (descriptors(supervisor.pid()) <= before.descriptors).then_some(())
    });
    drop(unread);
}
