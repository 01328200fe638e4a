//! Memory files for large payloads and results. Data must arrive unchanged in all cases. Clients and workers that
//! misuse files do not affect others.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use bulkhead_client::{Client, Job};
use bulkhead_shared::Executed;
use bulkhead_shared::client_protocol::{ClientWelcome, Hello, OutcomeMessage, Submit, capability, role};
use bulkhead_shared::codec::{self, tag};
use bulkhead_shared::connection::{BufferPool, Inbox, Item, Outbox, Payload, Received, Scratch};
use bulkhead_shared::frame::{MAGIC, kind};
use bulkhead_shared::memory_files::{LeaseRef, LeaseRequest, receive_with_files};
use bulkhead_shared::worker_protocol::Empty;
use bulkhead_tests::{
    PATIENCE, Supervisor, connect, descriptors, dial, kill_pid, outcome, programs, run, wait_for,
};
use nix::sys::signal::Signal;

const MIB: usize = 1 << 20;

/// Memory limits that are high enough for the largest payload of these tests.
const SUPERVISOR: &str = "max_payload = \"64MiB\"\nmax_buffered = \"512MiB\"\nmax_pooled = \"256MiB\"\n";

fn start(bulkheads: &str) -> Supervisor {
    Supervisor::start_with(SUPERVISOR, bulkheads)
}

fn one(keys: &str) -> Supervisor {
    start(&format!("[defaults]\ndeadline = \"120s\"\n[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\n{keys}\n"))
}

/// Starts a supervisor with a bulkhead whose worker is the test program `borrower`.
fn by_hand(mode: &str) -> Supervisor {
    let program = programs().join("borrower");
    let program = program.to_str().unwrap();
    let mode = if mode.is_empty() { String::new() } else { format!(", \"{mode}\"") };
    start(&format!(
        "[defaults]\ndeadline = \"120s\"\n[bulkhead.b]\ncommand = [\"{program}\"{mode}]\n\
         [bulkhead.other]\ncommand = [\"MISBEHAVE\"]\n"
    ))
}

/// Returns test data in which each byte depends on its position and on the seed.
fn pattern(seed: usize, bytes: usize) -> Vec<u8> {
    const PAGE: usize = 4096;
    let mut all = Vec::with_capacity(bytes.next_multiple_of(PAGE));
    for page in 0..bytes.div_ceil(PAGE) {
        // Computes few bytes and copies many, because tests are compiled without optimisation.
        let part: Vec<u8> = (0..256).map(|at| ((at * 31) ^ (page * 7) ^ seed) as u8).collect();
        all.extend(part.repeat(PAGE / part.len()));
    }
    all.truncate(bytes);
    all
}

/// Returns "file" if a worker receives a payload of 1 MiB in a memory file, or "bytes" if the payload arrives over the
/// socket.
async fn place(client: &Client, tenant: &str) -> String {
    let job = client.job("b", vec![7; MIB]).tenant(tenant).operation("where");
    String::from_utf8(job.send().await.unwrap().into_payload()).unwrap()
}

/// Sends jobs until the worker receives a payload in a memory file.
async fn until_in_file(client: &Client, tenant: &str) {
    let began = Instant::now();
    while place(client, tenant).await != "file" {
        assert!(began.elapsed() < PATIENCE, "no payload was in a file");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

fn file_bytes(supervisor: &Supervisor) -> u64 {
    let (_, page) = supervisor.try_get("/metrics").unwrap();
    let line = page.lines().find_map(|line| line.strip_prefix("bulkhead_memory_file_bytes ")).unwrap();
    line.parse::<f64>().unwrap() as u64
}

#[test]
fn memory_files_keep_payloads_and_results_intact() {
    let supervisor = one("max_in_flight = 4\nmax_queue = 100");
    run(async {
        let client = connect(&supervisor).await;
        until_in_file(&client, "").await;
        for (seed, bytes) in
            [65_536, 65_537, 100_000, MIB, 5 * MIB + 3, MIB, 64 * MIB, 64 * MIB].into_iter().enumerate()
        {
            let payload = pattern(seed, bytes);
            let reply = client.job("b", payload.clone()).send().await.unwrap();
            assert!(reply.payload() == payload, "a payload of {bytes} bytes came back changed");
        }
        // Sends many jobs at once, some with a file and some without.
        let jobs: Vec<_> = (0..60)
            .map(|seed| {
                let job = client.job("b", pattern(seed, MIB + seed));
                tokio::spawn(async move { (seed, job.send().await.unwrap().into_payload()) })
            })
            .collect();
        for job in jobs {
            let (seed, payload) = job.await.unwrap();
            assert!(payload == pattern(seed, MIB + seed), "job {seed} has a wrong result");
        }
    });
}

/// The test covers payloads that the client reads from a file, and payloads that a callback writes in place.
#[test]
fn payloads_from_files_and_mapped_results_are_intact() {
    let supervisor = one("");
    run(async {
        let client = connect(&supervisor).await;
        let payload = pattern(3, 3 * MIB);
        let inverted: Vec<u8> = payload.iter().map(|byte| !byte).collect();
        let path = supervisor.file("payload");
        std::fs::write(&path, &payload).unwrap();
        let (mut was_mapped, mut was_not) = (false, false);
        let began = Instant::now();
        while !(was_mapped && was_not) {
            assert!(began.elapsed() < PATIENCE, "mapped: {was_mapped}, not mapped: {was_not}");
            let written = payload.clone();
            let jobs: [Job; 2] = [
                client.job("b", []).payload_file(File::open(&path).unwrap()).unwrap(),
                client
                    .job("b", [])
                    .payload_in_place(payload.len(), move |place| place.copy_from_slice(&written)),
            ];
            for job in jobs {
                let job = job.operation("invert");
                assert!(job.clone().send().await.unwrap().payload() == inverted);
                let reply = job.map_result().send().await.unwrap();
                match reply.mapped() {
                    Some(mapped) => {
                        let mut copy = vec![0; mapped.len()];
                        mapped.read(0, &mut copy).unwrap();
                        assert!(copy == inverted && reply.payload().is_empty());
                        was_mapped = true;
                    }
                    None => {
                        assert!(reply.payload() == inverted);
                        was_not = true;
                    }
                }
            }
        }
        let gone = client.job("b", []).payload_file(File::open(&path).unwrap()).unwrap();
        std::fs::write(&path, b"short").unwrap();
        assert_eq!(outcome(&gone.send().await), "rejected/invalid");
    });
}

/// A file whose size is not known in advance, such as one in `/proc`, is read completely. An endless file is rejected.
#[test]
fn unusual_payload_file_is_sent_whole_or_rejected() {
    let supervisor = one("");
    run(async {
        let client = connect(&supervisor).await;
        let job = |path: &std::path::Path| client.job("b", "left").payload_file(File::open(path).unwrap());
        let told = job("/proc/filesystems".as_ref()).unwrap().operation("echo").send().await.unwrap();
        assert_eq!(told.payload(), std::fs::read("/proc/filesystems").unwrap());
        let empty = supervisor.file("empty");
        std::fs::write(&empty, "").unwrap();
        assert_eq!(job(&empty).unwrap().operation("echo").send().await.unwrap().payload(), b"");
        let (_reader, writer) = std::io::pipe().unwrap();
        let pipe = File::from(std::os::fd::OwnedFd::from(writer));
        let refused =
            [client.job("b", "").payload_file(pipe), job("/dev/zero".as_ref()), job("/tmp".as_ref())];
        for refused in refused {
            assert_eq!(refused.unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
        }
        let write_only = File::options().write(true).open(&empty).unwrap();
        assert!(client.job("b", "").payload_file(write_only).is_err());
    });
}

/// If a worker dies while it uses a file, the next worker gets the original bytes, and later jobs get a new file.
#[test]
fn retry_in_another_worker_receives_the_original_payload() {
    let supervisor = one("processes = 2\nmax_queue = 100\nretry = { attempts = 3, budget = 1.0 }\n\
         restart = { backoff = \"1ms\", backoff_max = \"5ms\", max = 1000 }");
    run(async {
        let client = connect(&supervisor).await;
        let mut died = 0;
        for round in 0..5 {
            until_in_file(&client, "").await;
            let payload = pattern(round, MIB);
            let job = client.job("b", payload.clone()).operation("die-if-file").idempotent(true);
            let reply = job.send().await.unwrap();
            assert!(reply.payload() == payload, "round {round}");
            // A job that the worker does not begin in time goes to another worker, without a file.
            died += reply.outcome().attempts - 1;
        }
        assert!(died > 0, "no worker died while it used the file");
        // Kills workers with running jobs.
        for round in 0..5 {
            until_in_file(&client, "").await;
            let jobs: Vec<_> = (0..8)
                .map(|seed| {
                    let job = client.job("b", pattern(seed, MIB)).idempotent(true);
                    tokio::spawn(async move { (seed, job.send().await) })
                })
                .collect();
            supervisor.worker_pids("b").into_iter().for_each(|pid| kill_pid(pid, Signal::SIGKILL));
            for job in jobs {
                let (seed, ended) = job.await.unwrap();
                match ended {
                    Ok(reply) => assert!(reply.payload() == pattern(seed, MIB), "round {round}, job {seed}"),
                    Err(error) => assert!(error.to_string().contains("crashed"), "{error}"),
                }
            }
        }
    });
}

#[test]
fn fallback_receives_payload_over_the_socket() {
    let supervisor = start(
        "[defaults]\ndeadline = \"120s\"\n\
         [bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nfallback = [\"second\"]\n\
         restart = { backoff = \"1ms\", backoff_max = \"5ms\", max = 1000 }\n\
         [bulkhead.second]\ncommand = [\"MISBEHAVE\"]\n",
    );
    run(async {
        let client = connect(&supervisor).await;
        let payload = pattern(1, MIB);
        let began = Instant::now();
        loop {
            until_in_file(&client, "").await;
            let job = client.job("b", payload.clone()).operation("die-if-file").idempotent(true);
            let reply = job.send().await.unwrap();
            assert!(reply.payload() == payload);
            if reply.outcome().bulkhead == "second" {
                break;
            }
            // Tries again, because the client does not use a file that has been idle for seconds.
            assert!(began.elapsed() < PATIENCE, "no worker died while it used a file");
        }
    });
}

#[test]
fn poison_detection_or_zero_max_pooled_disables_memory_files() {
    let supervisor = one("poison = { crashes = 2, within = \"1m\" }");
    let without = Supervisor::start_with("max_pooled = 0", "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\n");
    // Poison detection in the fallback needs payload digests, so jobs of the first bulkhead use the socket, too.
    let falls_back = one(
        "fallback = [\"second\"]\n[bulkhead.second]\ncommand = [\"MISBEHAVE\"]\npoison = { crashes = 2, within = \"1m\" }",
    );
    run(async {
        for supervisor in [&supervisor, &without, &falls_back] {
            let client = connect(supervisor).await;
            for _ in 0..20 {
                assert_eq!(place(&client, "").await, "bytes");
            }
            assert_eq!(file_bytes(supervisor), 0);
        }
    });
    // If a reload enables poison detection, memory files are no longer used.
    let supervisor = one("");
    run(async {
        let client = connect(&supervisor).await;
        until_in_file(&client, "").await;
        supervisor.configure(
            SUPERVISOR,
            "[defaults]\ndeadline = \"120s\"\n[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\n\
             poison = { crashes = 2, within = \"1m\" }\n",
        );
        assert_eq!(supervisor.post("/v1/reload").0, 200);
        wait_for("all files are freed", || (file_bytes(&supervisor) == 0).then_some(()));
        assert_eq!(place(&client, "").await, "bytes");
    });
}

/// Clients without a memory file are served over the socket. Idle files are recalled from clients and leased to others.
#[test]
fn total_file_size_stays_below_max_pooled() {
    let supervisor = Supervisor::start_with(
        "max_pooled = \"8MiB\"",
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_in_flight = 4\nmax_queue = 100\n",
    );
    let before = descriptors(supervisor.pid());
    run(async {
        let clients = [connect(&supervisor).await, connect(&supervisor).await, connect(&supervisor).await];
        for round in 0..3 {
            for client in &clients {
                // One client sends jobs while the others are idle.
                until_in_file(client, "").await;
                let jobs: Vec<_> = (0..12)
                    .map(|seed| {
                        let job = client.job("b", pattern(seed, MIB));
                        tokio::spawn(async move { (seed, job.send().await.unwrap().into_payload()) })
                    })
                    .collect();
                for job in jobs {
                    let (seed, payload) = job.await.unwrap();
                    assert!(payload == pattern(seed, MIB), "round {round}, job {seed}");
                }
                let bytes = file_bytes(&supervisor);
                assert!(bytes <= 8 << 20, "the files have a total size of {bytes} bytes");
            }
        }
    });
    // The clients were dropped and have disconnected.
    wait_for("all files and descriptors are freed", || {
        (file_bytes(&supervisor) == 0 && descriptors(supervisor.pid()) <= before).then_some(())
    });
}

#[test]
fn replaced_worker_leaves_no_memory_files() {
    let keys = |env: &str| {
        format!(
            "[defaults]\ndeadline = \"120s\"\n[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nenv = {{ ROUND = \"{env}\" }}\n"
        )
    };
    let supervisor = start(&keys("0"));
    run(async {
        let client = connect(&supervisor).await;
        until_in_file(&client, "").await;
        let before = (descriptors(supervisor.pid()), file_bytes(&supervisor));
        for round in 1..6 {
            let old = supervisor.worker_pids("b");
            supervisor.configure(SUPERVISOR, &keys(&round.to_string()));
            assert_eq!(supervisor.post("/v1/reload").0, 200);
            wait_for("the worker is replaced", || (supervisor.worker_pids("b") != old).then_some(()));
            until_in_file(&client, "").await;
        }
        wait_for("there are as many files and descriptors as before", || {
            (descriptors(supervisor.pid()) <= before.0 && file_bytes(&supervisor) <= before.1).then_some(())
        });
    });
}

/// The worker answers another job while it is still running the handler of a job whose client already has the outcome.
#[test]
fn late_handler_cannot_change_results_of_other_jobs() {
    let supervisor = one("max_in_flight = 8\ngrace = \"60s\"");
    run(async {
        let client = connect(&supervisor).await;
        until_in_file(&client, "").await;
        // If no client were waiting for a job of this worker, the worker would get no new jobs until its late handlers
        // return.
        let _wanted = client.job("b", "").operation("yield").start().await.unwrap();
        for round in 0..5 {
            let slow = client.job("b", vec![b'5'; MIB]).operation("yield").deadline(Duration::from_secs(1));
            assert_eq!(outcome(&slow.send().await), "deadline_exceeded/running");
            let payload = pattern(round, MIB);
            assert!(client.job("b", payload.clone()).send().await.unwrap().payload() == payload);
            // Repeats the check with a job that the client has dropped.
            let dropped = client.job("b", vec![1; MIB]).operation("yield").start().await.unwrap();
            drop(dropped);
            assert!(client.job("b", payload.clone()).send().await.unwrap().payload() == payload);
        }
    });
}

#[test]
fn tenants_do_not_share_memory_files() {
    let supervisor = one("");
    run(async {
        let client = connect(&supervisor).await;
        for tenant in ["a", "b", "c"] {
            // The first job of each tenant has no file yet.
            assert_eq!(place(&client, tenant).await, "bytes");
            until_in_file(&client, tenant).await;
        }
    });
}

#[test]
fn worker_can_write_only_results_to_memory_files() {
    let supervisor = by_hand("");
    run(async {
        let client = connect(&supervisor).await;
        let began = Instant::now();
        let attack = loop {
            until_in_file(&client, "").await;
            let attack = client.job("b", vec![9; MIB]).operation("attack").send().await.unwrap();
            // Tries again if the payload was not in a file. The client does not use a file that has been idle for
            // seconds.
            if attack.payload().len() < MIB {
                break attack;
            }
            assert!(began.elapsed() < PATIENCE, "the payload was never in a file");
        };
        assert_eq!(String::from_utf8_lossy(attack.payload()), "done: ");
        // A worker can still write to its result file after the answer, but must not be able to change other results.
        let scribbled = client.job("b", vec![9; MIB]).operation("scribble").send().await.unwrap();
        assert_eq!(scribbled.payload().len(), MIB);
        let payload = pattern(5, MIB);
        assert!(client.job("b", payload.clone()).send().await.unwrap().payload() == payload);
        assert!(client.job("other", payload.clone()).send().await.unwrap().payload() == payload);
    });
}

#[test]
fn invalid_lease_from_worker_is_a_protocol_violation() {
    for lie in ["lie-lease", "lie-bytes", "lie-both"] {
        let supervisor = by_hand("");
        run(async {
            let client = connect(&supervisor).await;
            let began = Instant::now();
            let lied = loop {
                until_in_file(&client, "").await;
                let lied = client.job("b", vec![9; MIB]).operation(lie).send().await;
                // Tries again if the payload was not in a file. The client does not use a file that has been idle for
                // seconds.
                if lied.is_err() {
                    break lied;
                }
                assert!(began.elapsed() < PATIENCE, "the worker never lied");
            };
            assert_eq!(outcome(&lied), "crashed/protocol");
            let payload = pattern(5, MIB);
            assert!(client.job("b", payload.clone()).send().await.unwrap().payload() == payload);
        });
    }
}

/// A worker that never confirms files gets every payload over the socket.
#[test]
fn worker_that_never_confirms_files_gets_payloads_over_socket() {
    let supervisor = by_hand("never-takes");
    run(async {
        let client = connect(&supervisor).await;
        for round in 0..20 {
            assert_eq!(place(&client, "").await, "bytes");
            let payload = pattern(round, 2 * MIB);
            assert!(client.job("b", payload.clone()).send().await.unwrap().payload() == payload);
        }
    });
}

/// Client that encodes its own frames instead of using the client library.
struct Raw {
    socket: UnixStream,
    inbox: Inbox,
    scratch: Scratch,
    files: Vec<OwnedFd>,
}

/// A frame from the supervisor.
#[derive(Debug, PartialEq, Eq)]
enum Told {
    Leased(u64, LeaseRef),
    Refused(u64),
    Ended(u64),
    Outcome(u64, u8, u8),
    Other,
}

impl Raw {
    fn connect(supervisor: &Supervisor) -> Self {
        let socket = dial(&supervisor.socket()).unwrap();
        let mut raw =
            Self { socket, inbox: Inbox::default(), scratch: Scratch::default(), files: Vec::new() };
        let hello = Hello {
            version_min: 1,
            version_max: 1,
            role: role::CLIENT,
            frame_bytes_max: u32::MAX,
            capabilities: 0,
            name: "raw",
            version: "0",
        };
        raw.send(kind::HELLO, MAGIC, &hello, &[]);
        assert_eq!(raw.told(), Told::Other);
        raw
    }

    fn send(&self, kind: u8, number: u64, message: &impl bincode::Encode, extensions: &[(u16, &[u8])]) {
        let (mut outbox, mut pool) = (Outbox::default(), BufferPool::default());
        outbox.push(kind, number, message, extensions, Payload::NONE).unwrap();
        // The socket buffer can be full while the supervisor reads slowly, so a single flush might not send the whole
        // frame.
        wait_for("the supervisor reads from the socket", || {
            outbox.flush(&self.socket, &mut pool).unwrap().then_some(())
        });
    }

    fn told(&mut self) -> Told {
        let began = Instant::now();
        loop {
            assert!(began.elapsed() < PATIENCE, "the supervisor sent no frame within {PATIENCE:?}");
            let mut poll = [rustix::event::PollFd::new(&self.socket, rustix::event::PollFlags::IN)];
            // Bytes left over from the last read can contain a whole frame.
            let soon = rustix::event::Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
            let _ = rustix::event::poll(&mut poll, Some(&soon));
            let (socket, files) = (&self.socket, &mut self.files);
            let read =
                self.inbox.receive_by(&mut self.scratch, |buffer| receive_with_files(socket, buffer, files));
            let (received, mut batch) = read.unwrap();
            let Some(item) = batch.next().unwrap() else {
                assert_ne!(received, Received::Closed, "the supervisor closed the connection");
                continue;
            };
            let Item::Frame { header, metadata, .. } = item else { panic!("{item:?}") };
            if header.kind == kind::PROGRESS {
                batch.keep_rest();
                continue;
            }
            let told = match header.kind {
                kind::CLIENT_WELCOME => {
                    let (welcome, _) = codec::decode::<ClientWelcome<'_>>(metadata, &[]).unwrap();
                    assert!(welcome.capabilities & capability::MEMORY_FILES != 0);
                    Told::Other
                }
                kind::LEASED => {
                    Told::Leased(header.number, codec::decode::<LeaseRef>(metadata, &[]).unwrap().0)
                }
                kind::LEASE_REFUSED => Told::Refused(header.number),
                kind::LEASE_ENDED => Told::Ended(header.number),
                kind::OUTCOME => {
                    let (outcome, _) = codec::decode::<OutcomeMessage<'_>>(metadata, &[tag::LEASE]).unwrap();
                    Told::Outcome(header.number, outcome.outcome, outcome.reason)
                }
                other => panic!("kind {other}"),
            };
            batch.keep_rest();
            return told;
        }
    }

    /// Returns the next frame. Skips a recall of the given lease, because the supervisor recalls leases that have been
    /// idle for seconds.
    fn told_except_recall(&mut self, of: LeaseRef) -> Told {
        loop {
            let told = self.told();
            if told != Told::Ended(of.lease) {
                return told;
            }
        }
    }

    fn ask(&self, number: u64, tenant: &str, bytes: usize) {
        self.send(kind::LEASE, number, &LeaseRequest { bulkhead: "b", tenant, bytes: bytes as u64 }, &[]);
    }

    /// Requests a lease. Returns the lease, the payload file and the result file.
    fn lease(&mut self, tenant: &str) -> (LeaseRef, File, File) {
        self.ask(1, tenant, MIB);
        let told = self.told();
        let Told::Leased(1, named) = told else { panic!("no lease: {told:?}") };
        self.send(kind::LEASE_TAKEN, named.lease, &Empty, &[]);
        let mut files = self.files.drain(..).map(File::from);
        (named, files.next().unwrap(), files.next().unwrap())
    }

    fn submit(&self, number: u64, tenant: &str, operation: &str, named: LeaseRef) {
        let submit =
            Submit { bulkhead: "b", operation, tenant, deadline_us: 0, priority: 1, idempotent: 0, cost: 1 };
        self.send(kind::SUBMIT, number, &submit, &[(tag::LEASE, &named.to_bytes())]);
    }
}

const OK: u8 = 0;
const REJECTED: u8 = 2;
const INVALID: u8 = 1;
const OVERLOADED: u8 = 16;

#[test]
fn lease_that_does_not_match_the_job_is_rejected() {
    let supervisor = one("max_in_flight = 2");
    let (mut raw, mut other) = (Raw::connect(&supervisor), Raw::connect(&supervisor));
    let (lease, file, _) = raw.lease("a");
    let (foreign, ..) = other.lease("a");
    file.write_all_at(&[7; MIB], 0).unwrap();
    assert!(file.set_len(0).is_err() && file.set_len(1 << 30).is_err(), "the size of the file is sealed");
    let mut number = 10;
    let mut refused = |raw: &mut Raw, tenant: &str, named: LeaseRef| {
        number += 1;
        raw.submit(number, tenant, "", named);
        let told = raw.told_except_recall(lease);
        assert_eq!(told, Told::Outcome(number, REJECTED, INVALID), "{tenant} {named:?}");
    };
    let bytes = MIB as u64;
    refused(&mut raw, "b", LeaseRef { bytes, ..lease });
    refused(&mut raw, "a", LeaseRef { bytes: lease.bytes + 1, ..lease });
    refused(&mut raw, "a", LeaseRef { bytes: 65_536, ..lease });
    refused(&mut raw, "a", LeaseRef { bytes, ..foreign });
    refused(&mut raw, "a", LeaseRef { bytes, lease: 1 << 40 });
    // Two jobs cannot use one lease at the same time.
    raw.submit(1, "a", "yield", LeaseRef { bytes, ..lease });
    refused(&mut raw, "a", LeaseRef { bytes, ..lease });
    raw.send(kind::CANCEL, 1, &Empty, &[]);
    loop {
        match raw.told() {
            Told::Outcome(1, ..) => break,
            other => assert_eq!(other, Told::Ended(lease.lease)),
        }
    }
    // A lease that is too large is refused.
    raw.ask(50, "a", 100 * MIB);
    assert_eq!(raw.told_except_recall(lease), Told::Refused(50));
}

/// A client must not use a lease that it has returned, whether or not the supervisor had recalled the lease.
#[test]
fn returned_lease_is_rejected() {
    let supervisor = one("");
    let (mut raw, mut other) = (Raw::connect(&supervisor), Raw::connect(&supervisor));
    let (returned, ..) = raw.lease("");
    let (foreign, ..) = other.lease("");
    raw.send(kind::LEASE_RETURNED, returned.lease, &Empty, &[]);
    other.send(kind::LEASE_RETURNED, foreign.lease, &Empty, &[]);
    let (called_back, ..) = raw.lease("");
    while raw.told() != Told::Ended(called_back.lease) {}
    raw.send(kind::LEASE_RETURNED, called_back.lease, &Empty, &[]);
    for (number, named) in [(2, returned), (3, foreign), (4, called_back)] {
        raw.submit(number, "", "pid", LeaseRef { bytes: MIB as u64, ..named });
        assert_eq!(raw.told(), Told::Outcome(number, REJECTED, INVALID));
    }
    // A revoked lease is rejected as overloaded until the client returns the lease, and as invalid
    // afterwards.
    let (lost, ..) = raw.lease("");
    wait_for("the lease is revoked", || (file_bytes(&supervisor) == 0).then_some(()));
    let mut submit = |number: u64| {
        raw.submit(number, "", "pid", LeaseRef { bytes: MIB as u64, ..lost });
        loop {
            match raw.told() {
                Told::Outcome(of, outcome, reason) if of == number => return (outcome, reason),
                told => assert_eq!(told, Told::Ended(lost.lease)),
            }
        }
    };
    assert_eq!(submit(5), (REJECTED, OVERLOADED));
    assert_eq!(submit(6), (REJECTED, OVERLOADED));
    raw.send(kind::LEASE_RETURNED, lost.lease, &Empty, &[]);
    raw.submit(7, "", "pid", LeaseRef { bytes: MIB as u64, ..lost });
    assert_eq!(raw.told(), Told::Outcome(7, REJECTED, INVALID));
}

/// Writes another configuration and reloads it.
fn reload(supervisor: &Supervisor, bulkheads: &str) {
    supervisor.configure(SUPERVISOR, bulkheads);
    let (status, body) = supervisor.post("/v1/reload");
    assert_eq!(status, 200, "{body}");
}

/// The reload happens after the supervisor has created all files and before it has offered all leases.
#[test]
fn enabling_poison_detection_refuses_pending_lease_requests() {
    let bulkhead = "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\n";
    let supervisor = start(bulkhead);
    let mut raw = Raw::connect(&supervisor);
    (1..=4).for_each(|number| raw.ask(number, "", MIB));
    let Told::Leased(1, offered) = raw.told() else { panic!("no lease") };
    wait_for("all files exist", || (file_bytes(&supervisor) == 4 * 2 * offered.bytes).then_some(()));
    reload(&supervisor, &format!("{bulkhead}poison = {{ crashes = 2, within = \"1m\" }}\n"));
    assert_eq!(raw.told(), Told::Ended(offered.lease));
    raw.send(kind::LEASE_RETURNED, offered.lease, &Empty, &[]);
    let mut refused: Vec<u64> = (2..=4)
        .map(|_| match raw.told() {
            Told::Refused(number) => number,
            told => panic!("{told:?}"),
        })
        .collect();
    refused.sort_unstable();
    assert_eq!(refused, [2, 3, 4]);
    wait_for("all files are freed", || (file_bytes(&supervisor) == 0).then_some(()));
}

/// The test covers a fallback that starts to use poison detection, a fallback that the reload adds, and a fallback
/// whose tenants become isolated.
#[test]
fn fallback_with_poison_detection_ends_leases() {
    let entry = "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\n";
    let target = "[bulkhead.second]\ncommand = [\"MISBEHAVE\"]\n";
    let (falls_back, poison) = ("fallback = [\"second\"]\n", "poison = { crashes = 2, within = \"1m\" }\n");
    let apart = "tenants = { isolate = true }\n";
    let after = format!("{entry}{falls_back}{target}{poison}");
    let cases = [
        (format!("{entry}{falls_back}{target}"), after.clone()),
        (format!("{entry}{target}{poison}"), after.clone()),
        (entry.to_owned(), after.clone()),
        (format!("{entry}{falls_back}{target}"), format!("{after}{apart}")),
    ];
    for (before, after) in cases {
        let supervisor = start(&before);
        let mut raw = Raw::connect(&supervisor);
        let (lease, ..) = raw.lease("");
        // A lease in use is not recalled as idle, so only the reload can end the lease.
        raw.submit(1, "", "steps:count ran;wait end", LeaseRef { bytes: MIB as u64, ..lease });
        wait_for("the job runs", || (supervisor.file_bytes("ran") == 1).then_some(()));
        reload(&supervisor, &after);
        supervisor.touch("end");
        assert_eq!(raw.told(), Told::Ended(lease.lease), "{before}\n{after}");
        assert_eq!(raw.told(), Told::Outcome(1, OK, 0));
        raw.send(kind::LEASE_RETURNED, lease.lease, &Empty, &[]);
        raw.ask(2, "", MIB);
        assert_eq!(raw.told(), Told::Refused(2));
    }
}

/// The test covers a client that never returns a lease, and a client that neither reads nor confirms the leases offered
/// to it.
#[test]
fn unreturned_leases_are_revoked() {
    let supervisor = one("");
    let before = descriptors(supervisor.pid());
    let mut keeps = Raw::connect(&supervisor);
    let (lease, file, _) = keeps.lease("");
    file.write_all_at(&[7; MIB], 0).unwrap();
    keeps.submit(1, "", "pid", LeaseRef { bytes: MIB as u64, ..lease });
    assert_eq!(keeps.told_except_recall(lease), Told::Outcome(1, OK, 0));
    let silent = Raw::connect(&supervisor);
    (0..10).for_each(|number| silent.ask(number, "", MIB));
    wait_for("files for the silent client exist", || (file_bytes(&supervisor) > 4 << 20).then_some(()));
    wait_for("all leases are revoked", || (file_bytes(&supervisor) == 0).then_some(()));
    let began = Instant::now();
    let mut bytes = [1; 8];
    while bytes != [0; 8] {
        assert!(began.elapsed() < 2 * PATIENCE, "the memory of the file is not freed");
        std::thread::sleep(Duration::from_millis(50));
        file.read_exact_at(&mut bytes, 0).unwrap();
    }
    keeps.submit(2, "", "pid", LeaseRef { bytes: MIB as u64, ..lease });
    loop {
        match keeps.told() {
            Told::Outcome(number, outcome, reason) => {
                assert_eq!((number, outcome, reason), (2, REJECTED, OVERLOADED));
                break;
            }
            other => assert_eq!(other, Told::Ended(lease.lease)),
        }
    }
    drop((keeps, silent));
    wait_for("all files and descriptors are freed", || {
        (file_bytes(&supervisor) == 0 && descriptors(supervisor.pid()) <= before).then_some(())
    });
}

/// A client is stopped until its lease has been revoked. The client must get an error instead of a result filled
/// with zeros.
#[test]
fn result_in_revoked_file_is_an_error() {
    let supervisor = one("health = { heartbeat = \"60s\" }");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let client = runtime.block_on(async {
        let client = connect(&supervisor).await;
        until_in_file(&client, "").await;
        client
    });
    // Stops the worker, so that the answer arrives while the client's runtime is not running.
    let worker = supervisor.worker_pids("b")[0];
    kill_pid(worker, Signal::SIGSTOP);
    let job = runtime.block_on(client.job("b", pattern(1, MIB)).start()).unwrap();
    kill_pid(worker, Signal::SIGCONT);
    wait_for("the files of the client are freed", || (file_bytes(&supervisor) == 0).then_some(()));
    let late = runtime.block_on(job).map(|reply| reply.payload().len()).unwrap_err();
    assert!(late.to_string().contains("because this program did not read it"), "{late}");
    assert_eq!(late.executed(), Executed::Yes);
    // The client can send further jobs.
    let payload = pattern(2, MIB);
    assert!(runtime.block_on(client.job("b", payload.clone()).send()).unwrap().payload() == payload);
}

/// A hostile client can confirm leases without reading them. The unread descriptors then stay in flight in the
/// kernel, which limits the number of such descriptors for an unprivileged supervisor.
#[test]
fn client_that_never_reads_receives_few_leases() {
    let supervisor = one("");
    let mut raw = Raw::connect(&supervisor);
    let on_their_way = |raw: &Raw| -> u64 {
        let path = format!("/proc/self/fdinfo/{}", raw.socket.as_raw_fd());
        let info = std::fs::read_to_string(path).unwrap();
        let count = info.lines().find_map(|line| line.strip_prefix("scm_fds:"));
        count.expect("Linux 5.9 or later has `scm_fds`").trim().parse().unwrap()
    };
    let mut most = 0;
    let mut ask = |raw: &Raw, round: u64| {
        raw.ask(round, "", MIB);
        // The client guesses the numbers of its leases.
        for number in 1..=round {
            raw.send(kind::LEASE_TAKEN, number, &Empty, &[]);
            raw.send(kind::LEASE_RETURNED, number, &Empty, &[]);
        }
        most = most.max(on_their_way(raw));
        most
    };
    let mut round = 0;
    wait_for("eight descriptors are in flight", || {
        round += 1;
        (ask(&raw, round) >= 8).then_some(())
    });
    for _ in 0..30 {
        round += 1;
        file_bytes(&supervisor);
        assert!(ask(&raw, round) <= 8, "more than eight descriptors are in flight");
    }
    // Other clients still get leases, and so does this client after reading.
    Raw::connect(&supervisor).lease("");
    wait_for("no descriptors are in flight", || {
        raw.told();
        raw.files.clear();
        (on_their_way(&raw) == 0).then_some(())
    });
    wait_for("the client gets another lease", || {
        round += 1;
        raw.ask(round, "", MIB);
        loop {
            match raw.told() {
                Told::Leased(asked, _) if asked == round => return Some(()),
                Told::Refused(asked) if asked == round => return None,
                _ => {}
            }
        }
    });
}

/// Memory files count towards the worker's memory, so the supervisor limits their total size to a fraction of
/// `recycle.rss`.
#[test]
fn recycle_rss_limits_memory_files_of_worker() {
    let supervisor = one("recycle.rss = \"64MiB\"\n");
    run(async {
        let client = connect(&supervisor).await;
        until_in_file(&client, "").await;
        // A lease for 9 MiB consists of two files of 16 MiB each. This worker gets files with a total size of at most
        // 16 MiB.
        for round in 0..40 {
            let job = client.job("b", pattern(round, 9 * MIB)).operation("where");
            assert_eq!(job.send().await.unwrap().payload(), b"bytes");
        }
    });
}

/// The client disconnects while the supervisor is processing the client's frames and offering leases.
#[test]
fn disconnect_during_lease_offer_leaves_supervisor_running() {
    let supervisor = one("");
    for _ in 0..5 {
        let (mut raw, mut after) = (Raw::connect(&supervisor), Raw::connect(&supervisor));
        raw.ask(1, "", MIB);
        raw.ask(2, "", MIB);
        let told = raw.told();
        let Told::Leased(1, named) = told else { panic!("no lease: {told:?}") };
        // Files are created one after another, so the second lease of `raw` is ready too.
        after.lease("");
        raw.socket.shutdown(std::net::Shutdown::Read).unwrap();
        let mut outbox = Outbox::default();
        let submit = Submit {
            bulkhead: "missing",
            operation: "",
            tenant: "",
            deadline_us: 0,
            priority: 1,
            idempotent: 0,
            cost: 1,
        };
        outbox.push(kind::SUBMIT, 7, &submit, &[], Payload::NONE).unwrap();
        outbox.push(kind::LEASE_TAKEN, named.lease, &Empty, &[], Payload::NONE).unwrap();
        outbox.push(kind::CANCEL, 9, &Empty, &[], Payload::NONE).unwrap();
        outbox.flush(&raw.socket, &mut BufferPool::default()).unwrap();
        wait_for("the leases of the disconnected client have ended", || {
            (file_bytes(&supervisor) <= 2 << 20).then_some(())
        });
    }
    run(async { assert!(connect(&supervisor).await.job("b", "x").send().await.is_ok()) });
}

/// The crash report must not contain a payload that was sent in a memory file.
#[test]
fn memory_file_of_running_job_does_not_count_as_buffered() {
    let supervisor = one("max_queue = 4");
    let buffered = || {
        let (_, page) = supervisor.try_get("/metrics").unwrap();
        let line = page.lines().find_map(|line| line.strip_prefix("bulkhead_buffered_bytes ")).unwrap();
        line.parse::<f64>().unwrap() as usize
    };
    let mut raw = Raw::connect(&supervisor);
    let (lease, ..) = raw.lease("");
    raw.submit(1, "", "steps:count ran;sleep 3600000", LeaseRef { bytes: MIB as u64, ..lease });
    wait_for("the job has begun", || (supervisor.file_bytes("ran") == 1).then_some(()));
    assert!(buffered() < MIB / 2, "{}", buffered());
    let (waits, ..) = raw.lease("");
    raw.submit(2, "", "pid", LeaseRef { bytes: MIB as u64, ..waits });
    supervisor.wait_number("b", "queued", 1);
    assert!(buffered() >= MIB, "{}", buffered());
    kill_pid(supervisor.worker_pids("b")[0], Signal::SIGKILL);
    wait_for("the second job has ended", || {
        let told = raw.told();
        matches!(told, Told::Outcome(2, OK, _)).then_some(())
    });
    let report = wait_for("there is a crash report", || {
        let listed = supervisor.get("/v1/crashes")["crashes"].as_array().cloned().unwrap_or_default();
        let id = listed.first()?["id"].as_str()?.to_owned();
        Some(supervisor.get(&format!("/v1/crashes/{id}")))
    });
    let job = &report["jobs"][0];
    assert_eq!(job["payload_bytes"], MIB, "{job}");
    assert!(job["payload"].is_null() && job["blake3"].is_null(), "{job}");
}

/// The payload's memory file is freed when the program is killed, even though the job continues in the fallback.
#[test]
fn fallback_after_crash_frees_the_memory_file() {
    let supervisor = start(
        "[defaults]\ndeadline = \"120s\"\n\
         [bulkhead.b]\nexec = [\"/bin/sh\", \"-c\", \"kill -SEGV $$\"]\nfallback = [\"second\"]\n\
         [bulkhead.second]\ncommand = [\"MISBEHAVE\"]\n",
    );
    run(async {
        let client = connect(&supervisor).await;
        let busy = client.job("second", "").operation("hang").start().await.unwrap();
        supervisor.wait_number("second", "in_flight", 1);
        for _ in 0..4 {
            let mut raw = Raw::connect(&supervisor);
            let (lease, ..) = raw.lease("");
            let submit = Submit {
                bulkhead: "b",
                operation: "",
                tenant: "",
                deadline_us: 1_000_000,
                priority: 1,
                idempotent: 1,
                cost: 1,
            };
            let named = LeaseRef { bytes: MIB as u64, ..lease };
            raw.send(kind::SUBMIT, 5, &submit, &[(tag::LEASE, &named.to_bytes())]);
            while !matches!(raw.told(), Told::Outcome(5, ..)) {}
        }
        wait_for("all files are freed", || (file_bytes(&supervisor) == 0).then_some(()));
        drop(busy);
    });
}

/// The descriptors of a returned lease stay open until the job that uses the lease has finished.
#[test]
fn returned_leases_count_towards_limit_until_their_jobs_end() {
    let folder = tempfile::tempdir().unwrap();
    let bulkheads = "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 1000\ndeadline = \"600s\"\n";
    let supervisor =
        Supervisor::launch_under(&["prlimit", "--nofile=1024:1024"], folder, "", bulkheads).until_ready();
    let before = descriptors(supervisor.pid());
    let mut raw = Raw::connect(&supervisor);
    let mut count = 0;
    let refused = loop {
        count += 1;
        raw.ask(count, "", MIB / 4);
        let named = match raw.told() {
            Told::Leased(_, named) => named,
            told => break told,
        };
        raw.files.clear();
        raw.send(kind::LEASE_TAKEN, named.lease, &Empty, &[]);
        raw.submit(count, "", "hang", LeaseRef { bytes: 65_537, ..named });
        raw.send(kind::LEASE_RETURNED, named.lease, &Empty, &[]);
        assert!(count <= 64, "the number of leases is not limited");
    };
    assert_eq!(refused, Told::Refused(count));
    assert!(descriptors(supervisor.pid()) <= before + 4 * 64 + 8);
    let mut other = Raw::connect(&supervisor);
    other.ask(1, "", MIB);
    assert_eq!(other.told(), Told::Refused(1));
}

/// The client has not yet read the message that revokes its lease, because its thread was busy.
#[test]
fn client_with_revoked_lease_uses_the_socket() {
    let supervisor = one("");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let client = runtime.block_on(async {
        let client = connect(&supervisor).await;
        until_in_file(&client, "").await;
        client
    });
    wait_for("the files of the client are freed", || (file_bytes(&supervisor) == 0).then_some(()));
    let payload = pattern(3, MIB);
    let reply = runtime.block_on(client.job("b", payload.clone()).send());
    assert!(reply.map(|reply| reply.payload() == payload).unwrap());
}
