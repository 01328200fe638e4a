//! The client library with a real supervisor, and with a fake supervisor that violates the protocol.

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use bulkhead_client::{Client, ConnectError, Executed, JobError, Reply, Verdict, blocking};
use bulkhead_shared::client_protocol::{ClientWelcome, Hello, OutcomeMessage, Progress, Refused, capability};
use bulkhead_shared::codec;
use bulkhead_shared::frame::{FLAG_CRITICAL, HEADER_BYTES, Header, MAGIC, kind};
use bulkhead_shared::memory_files::LeaseRef;
use bulkhead_shared::{Outcome, RejectReason};
use bulkhead_tests::{PATIENCE, Supervisor, descriptors, output, resident_bytes, wait_for};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use tempfile::TempDir;

pub(super) fn run<T>(future: impl Future<Output = T>) -> T {
    // Tests block their thread while they wait for conditions, so the client needs another thread.
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        tokio::time::timeout(PATIENCE, future).await.expect("the test ends within the time limit")
    })
}

/// Returns the execution status and the error message of a lost job. Panics if the job was not lost.
pub(super) fn lost(result: Result<Reply, JobError>) -> (Executed, String) {
    let error = result.expect_err("the job cannot have succeeded");
    assert!(error.outcome().is_none(), "{error}");
    assert_eq!(error.exit_code(), 69);
    (error.executed(), error.to_string())
}

// A real supervisor.

/// Configuration with a single worker. The long grace period gives cancelled handlers time to return, even on a busy
/// machine.
const ONE: &str = "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\ngrace = \"60s\"\ndeadline = \"60s\"\n";

#[test]
fn client_reconnects_to_restarted_supervisor() {
    let mut supervisor = Supervisor::start(ONE);
    run(async {
        let client = Client::connect(supervisor.socket()).await.unwrap();
        client.job("b", "x").send().await.unwrap();
        let running = client.job("b", "").operation("hang").start().await.unwrap();
        supervisor.wait_number("b", "in_flight", 1);
        supervisor.child.kill().unwrap();
        supervisor.wait();

        let error = running.await.unwrap_err();
        assert_eq!(error.executed(), Executed::Unknown, "the job was running when the supervisor was killed");
        assert!(!error.is_retryable(), "{error}");
        assert!(error.to_string().contains("the job may have run"), "{error}");

        // No supervisor is running. A job with a short deadline must not wait until the client gives up reconnecting,
        // which takes longer than the test's time limit.
        let patient = client.clone().reconnect_timeout(2 * PATIENCE);
        let limit = Duration::from_millis(50);
        let hasty = patient.job("b", "x").deadline(limit).send().await.unwrap_err();
        assert_eq!(hasty.executed(), Executed::No);
        assert!(hasty.is_retryable(), "{hasty}");
        assert!(hasty.to_string().contains("jobs.sock is not reachable"), "{hasty}");

        let folder = std::mem::replace(&mut supervisor.folder, tempfile::tempdir().unwrap());
        supervisor = Supervisor::launch(folder, "", ONE);
        let began = Instant::now();
        loop {
            match client.job("b", "again").send().await {
                Ok(reply) => break assert_eq!(reply.payload(), b"again"),
                Err(error) => assert_eq!(error.executed(), Executed::No, "{error}"),
            }
            assert!(began.elapsed() < PATIENCE, "the client did not reconnect");
        }
    });
}

/// The jobs have no deadline, so the test would time out if the client lost a job.
#[test]
fn reconnected_client_sends_all_waiting_jobs() {
    const TASKS: usize = 200;
    let keys = "max_in_flight = 8\nmax_queue = 1000\n";
    let mut supervisor = Supervisor::start(&format!("{ONE}{keys}"));
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(8).enable_all().build().unwrap();
    let client = runtime.block_on(Client::connect(supervisor.socket())).unwrap();
    for round in 0..5 {
        supervisor.child.kill().unwrap();
        supervisor.wait();
        let tasks: Vec<_> = (0..TASKS)
            .map(|_| {
                let client = client.clone();
                runtime.spawn(async move {
                    loop {
                        match client.job("b", "x").send().await {
                            Ok(reply) => break reply.payload().to_vec(),
                            // The connection was lost before the job was sent, or the client gave up reconnecting.
                            Err(error) => assert_ne!(error.executed(), Executed::Yes, "{error}"),
                        }
                    }
                })
            })
            .collect();
        let folder = std::mem::replace(&mut supervisor.folder, tempfile::tempdir().unwrap());
        supervisor = Supervisor::launch(folder, "", &format!("{ONE}{keys}"));
        runtime.block_on(async {
            for task in tasks {
                let reply = tokio::time::timeout(PATIENCE, task).await;
                assert_eq!(
                    reply.unwrap_or_else(|_| panic!("a job from round {round} is still waiting")).unwrap(),
                    b"x"
                );
            }
        });
    }
}

#[test]
fn jobs_fail_quickly_after_reconnection_has_failed() {
    let mut supervisor = Supervisor::start(ONE);
    run(async {
        let client = Client::connect(supervisor.socket()).await.unwrap();
        client.job("b", "x").send().await.unwrap();
        supervisor.child.kill().unwrap();
        supervisor.wait();

        // Only the first job waits until the client gives up reconnecting (5 s). If every job waited, the loop would
        // take minutes.
        let began = Instant::now();
        for job in 0..100 {
            let error = client.job("b", "x").send().await.unwrap_err();
            assert_eq!(error.executed(), Executed::No, "{error}");
            // The first job can fail with a different error, because the client may not have noticed the loss yet.
            assert!(job == 0 || error.to_string().contains("jobs.sock is not reachable"), "{error}");
        }
        assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());

        // The next job makes the client reconnect immediately instead of after the backoff.
        let folder = std::mem::replace(&mut supervisor.folder, tempfile::tempdir().unwrap());
        supervisor = Supervisor::launch(folder, "", ONE);
        // The job waits for at most 5 s, so the supervisor must already have started.
        wait_for("the supervisor answers", || (supervisor.try_get("/healthz")?.0 == 200).then_some(()));
        assert_eq!(client.job("b", "again").send().await.unwrap().payload(), b"again");
    });
}

#[test]
fn job_continues_after_its_client_is_dropped() {
    let supervisor = Supervisor::start(ONE);
    run(async {
        let client = Client::connect(supervisor.socket()).await.unwrap();
        let handle = client.job("b", "200").operation("sleep").start().await.unwrap();
        drop(client);
        assert_eq!(handle.await.unwrap().payload(), b"done");

        // Dropping the handle cancels the job even after the client was dropped.
        let client = Client::connect(supervisor.socket()).await.unwrap();
        let handle = client.job("b", "").operation("yield").start().await.unwrap();
        supervisor.wait_number("b", "in_flight", 1);
        drop(client);
        drop(handle);
        supervisor.wait_number("b", "cancelled", 1);
        supervisor.wait_number("b", "available", 1);
    });
    assert_eq!(supervisor.number("b", "restarts"), 0, "the handler returned when its job was cancelled");
}

#[test]
fn dropping_a_handle_cancels_its_job() {
    let supervisor = Supervisor::start(ONE);
    run(async {
        let client = Client::connect(supervisor.socket()).await.unwrap();
        let handle = client.job("b", "").operation("yield").start().await.unwrap();
        supervisor.wait_number("b", "in_flight", 1);
        drop(handle);
        // The handler returns only when the job is cancelled, and the worker survives.
        supervisor.wait_number("b", "available", 1);
        assert_eq!(supervisor.number("b", "cancelled"), 1);
        assert_eq!(supervisor.number("b", "restarts"), 0);

        // Dropping the handle to a finished job cancels nothing, not even the next job, which reuses the job number.
        let handle = client.job("b", "x").start().await.unwrap();
        supervisor.wait_number("b", "done", 1);
        drop(handle);
        assert_eq!(client.job("b", "next").send().await.unwrap().payload(), b"next");
        assert_eq!(supervisor.number("b", "cancelled"), 1);
    });
}

#[test]
fn cloned_clients_share_one_connection() {
    const JOBS: u64 = 2000;
    let supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_in_flight = 8\nmax_queue = 4000\ndeadline = \"60s\"\n",
    );
    run(async {
        let client = Client::connect(supervisor.socket()).await.unwrap();
        client.job("b", "").send().await.unwrap();
        let before = descriptors(supervisor.pid());
        let mut blockers = Vec::new();
        for _ in 0..8 {
            blockers.push(client.job("b", "").operation("yield").start().await.unwrap());
        }
        let mut handles = Vec::new();
        for number in 0..JOBS {
            let client = client.clone();
            handles.push(client.job("b", number.to_string()).start().await.unwrap());
        }
        supervisor.wait_number("b", "queued", JOBS);
        assert!(descriptors(supervisor.pid()) <= before + 1, "clones do not open connections");
        drop(blockers);
        for (number, handle) in handles.into_iter().enumerate().rev() {
            assert_eq!(handle.await.unwrap().payload(), number.to_string().as_bytes());
        }
    });
}

#[test]
fn progress_arrives_in_order_before_the_result() {
    let supervisor = Supervisor::start(ONE);
    let expected: Vec<(f32, String)> = (1..=4).map(|i| (i as f32 / 4.0, format!("step {i}"))).collect();
    run(async {
        let client = Client::connect(supervisor.socket()).await.unwrap();
        let mut handle = client.job("b", "").operation("progress").start().await.unwrap();
        let mut seen = Vec::new();
        while let Some(progress) = handle.progress().await {
            seen.push((progress.fraction, progress.text));
        }
        assert_eq!(seen, expected);
        assert_eq!(handle.await.unwrap().payload(), b"done");
    });
    let client = blocking::Client::connect(supervisor.socket()).unwrap();
    let mut handle = client.job("b", "").operation("progress").start().unwrap();
    let mut seen = Vec::new();
    while let Some(progress) = handle.progress() {
        seen.push((progress.fraction, progress.text));
    }
    assert_eq!(seen, expected);
    assert_eq!(handle.wait().unwrap().payload(), b"done");
}

/// The last progress report must arrive before the result.
#[test]
fn client_receives_at_most_ten_progress_reports_per_second() {
    let supervisor = Supervisor::start(ONE);
    let client = blocking::Client::connect(supervisor.socket()).unwrap();
    let began = Instant::now();
    let mut handle = client.job("b", "").operation("progress-often").start().unwrap();
    let mut seen = Vec::new();
    while let Some(progress) = handle.progress() {
        seen.push((progress.fraction, progress.text));
    }
    handle.wait().unwrap();
    // The limit does not apply to the first or the last report.
    let most = 2 + began.elapsed().as_millis() / 100;
    assert!(seen.len() >= 2 && seen.len() as u128 <= most, "{} of {most}", seen.len());
    assert_eq!(seen.last(), Some(&(1.0, "step 20000".to_owned())));

    // The second report must arrive although the job has not ended.
    let go = supervisor.file("go").display().to_string();
    let mut handle = client.job("b", go).operation("progress-and-wait").start().unwrap();
    let mut texts = std::iter::from_fn(|| handle.progress()).map(|progress| progress.text);
    assert_eq!([texts.next(), texts.next()], [Some("first".into()), Some("second".into())]);
    supervisor.touch("go");
    assert_eq!(texts.next(), None);
    handle.wait().unwrap();
}

#[test]
fn blocking_client_runs_and_cancels_jobs() {
    let supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_in_flight = 4\nmax_queue = 100\ndeadline = \"60s\"\n",
    );
    let client = blocking::Client::connect(supervisor.socket()).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let client = client.clone();
            scope.spawn(move || {
                for number in 0..50 {
                    let text = format!("{thread}/{number}");
                    assert_eq!(client.job("b", text.clone()).send().unwrap().payload(), text.as_bytes());
                }
            });
        }
    });
    let failed = client.job("b", "").operation("fail").send().unwrap_err();
    assert_eq!(failed.exit_code(), 1);
    let limit = Duration::from_millis(30);
    let late = client.job("b", "10000").operation("sleep").deadline(limit).send().unwrap_err();
    assert!(matches!(late, JobError::DeadlineExceeded(_)), "{late}");
    assert!(late.to_string().contains("did not finish within 30 ms"), "{late}");

    let handle = client.job("b", "").operation("yield").start().unwrap();
    drop(client);
    supervisor.wait_number("b", "cancelled", 0);
    drop(handle);
    supervisor.wait_number("b", "cancelled", 1);
    let other = blocking::Client::connect(supervisor.socket()).unwrap();
    let handle = other.job("b", "x").start().unwrap();
    drop(other);
    assert_eq!(handle.wait().unwrap().payload(), b"x");
    assert!(blocking::Client::connect("/nonexistent/jobs.sock").is_err());
}

#[test]
fn connect_error_suggests_checking_the_supervisor() {
    let text = |path: &Path| run(Client::connect(path)).expect_err("no supervisor listens").to_string();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("jobs.sock");
    let missing = text(&path);
    assert!(missing.starts_with(&format!("failed to connect to {}", path.display())), "{missing}");
    assert!(missing.contains("the socket does not exist; is the supervisor running?"), "{missing}");

    drop(UnixListener::bind(&path).unwrap());
    let stale = text(&path);
    assert!(stale.contains("no process is listening on the socket; is the supervisor running?"), "{stale}");

    let too_long = text(&folder.path().join("x".repeat(200)));
    assert!(too_long.contains("check that the path is correct"), "{too_long}");
}

#[test]
fn job_error_says_whether_to_retry() {
    let supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\ndeadline = \"60s\"\nrestart = { max = 100 }\n",
    );
    run(async {
        let client = Client::connect(supervisor.socket()).await.unwrap();
        let crashed = client.job("b", "").operation("abort").send().await.unwrap_err().to_string();
        assert!(crashed.starts_with("crashed (signal)"), "{crashed}");
        assert!(crashed.contains("send the job again only if it can safely run twice"), "{crashed}");
        let again = client.job("b", "").operation("abort").idempotent(true).send().await.unwrap_err();
        assert!(again.to_string().contains("; the job can be sent again"), "{again}");

        let _blocker = client.job("b", "").operation("yield").start().await.unwrap();
        supervisor.wait_number("b", "in_flight", 1);
        let full = client.job("b", "").send().await.unwrap_err();
        let wait = full.retry_after().unwrap().as_micros().div_ceil(1000);
        assert!(full.to_string().ends_with(&format!("; try again after {wait} ms")), "{full}");
        let long = client.job("b", "").tenant("x".repeat(257)).send().await.unwrap_err().to_string();
        assert_eq!(long, "rejected (invalid): the tenant's name is longer than 256 bytes");
    });
}

#[test]
fn runtime_shutdown_fails_pending_jobs() {
    let supervisor = Supervisor::start(ONE);
    let server = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let client = server.block_on(Client::connect(supervisor.socket())).unwrap();
    let handle = server.block_on(client.job("b", "").operation("yield").start()).unwrap();
    server.shutdown_background();
    run(async {
        let (executed, text) = lost(handle.await);
        assert_eq!(executed, Executed::Unknown);
        assert!(text.contains("the async runtime that served the connection has shut down"), "{text}");
        let (executed, text) = lost(client.job("b", "").send().await);
        assert_eq!(executed, Executed::No, "{text}");
    });
}

// A fake supervisor.

/// A listening socket that stands in for a supervisor.
pub(super) struct Fake {
    listener: UnixListener,
    pub(super) path: PathBuf,
    _folder: Option<TempDir>,
}

/// The supervisor's end of a client connection.
pub(super) struct Peer(UnixStream);

pub(super) fn frame(kind: u8, flags: u8, number: u64, metadata: &[u8], payload: &[u8]) -> Vec<u8> {
    let length = (metadata.len() + payload.len()) as u32;
    let header = Header { length, kind, flags, metadata_length: metadata.len() as u16, number };
    [&header.encode()[..], metadata, payload].concat()
}

pub(super) fn metadata<'m>(message: &impl codec::Message<'m>) -> Vec<u8> {
    let mut bytes = Vec::new();
    codec::encode(message, &[], &mut bytes).unwrap();
    bytes
}

/// Checks the `Debug` format of errors, in which Rust prints an error that `main` returns.
#[test]
fn debug_format_of_errors_is_their_message() {
    let error = blocking::Client::connect("/nonexistent/jobs.sock").unwrap_err();
    assert_eq!(format!("{error:?}"), error.to_string());
    let lost = JobError::Disconnected { executed: Executed::No, message: "the supervisor is gone".into() };
    assert_eq!(format!("{lost:?}"), "the supervisor is gone");
    let failed = bulkhead_worker::HandlerError::new("bad_header", "the magic is missing");
    assert_eq!(format!("{failed:?}"), "bad_header: the magic is missing");
}

fn outcome_metadata(outcome: u8, reason: u8) -> Vec<u8> {
    let verdict = Verdict::Cancelled { executed: Executed::Yes };
    let told = Outcome {
        verdict,
        job: None,
        bulkhead: "b".into(),
        attempts: 1,
        queued: Duration::ZERO,
        ran: Duration::ZERO,
        worker_pid: None,
        retryable: false,
        retry_after: None,
        deadline: Duration::from_secs(1),
        run_limit: None,
        status: None,
        report: None,
    };
    metadata(&OutcomeMessage { outcome, reason, ..OutcomeMessage::from_outcome(&told) })
}

pub(super) fn outcome(number: u64, payload: &[u8]) -> Vec<u8> {
    frame(kind::OUTCOME, 0, number, &outcome_metadata(0, 0), payload)
}

pub(super) fn welcome(version: u16) -> Vec<u8> {
    let welcome =
        ClientWelcome { version, frame_bytes_max: 1 << 30, capabilities: 0, server_version: "fake" };
    frame(kind::CLIENT_WELCOME, 0, MAGIC, &metadata(&welcome), b"")
}

fn refused(message: &str) -> Vec<u8> {
    let reason = RejectReason::Overloaded.code();
    frame(kind::REFUSED, 0, 0, &metadata(&Refused { reason, message }), b"")
}

impl Fake {
    pub(super) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut fake = Self::at(&folder.path().join("jobs.sock"));
        fake._folder = Some(folder);
        fake
    }

    /// Creates a listening socket at the given path, which must not exist yet.
    pub(super) fn at(path: &Path) -> Self {
        let listener = UnixListener::bind(path).unwrap();
        // If no client connects, the test fails instead of blocking.
        listener.set_nonblocking(true).unwrap();
        Self { listener, path: path.to_owned(), _folder: None }
    }

    /// Accepts a connection and reads the client's hello.
    pub(super) fn accept(&self) -> Peer {
        let mut peer = Peer(wait_for("a client connects", || self.listener.accept().ok()).0);
        peer.0.set_nonblocking(false).unwrap();
        peer.0.set_read_timeout(Some(PATIENCE)).unwrap();
        peer.0.set_write_timeout(Some(PATIENCE)).unwrap();
        let (header, metadata, _) = peer.next().expect("the client sends a hello");
        assert_eq!((header.kind, header.number), (kind::HELLO, MAGIC));
        let (hello, _) = codec::decode::<Hello<'_>>(&metadata, &[]).unwrap();
        assert!(hello.frame_bytes_max < u32::MAX, "the client announces a frame limit");
        peer
    }

    pub(super) fn welcome(&self) -> Peer {
        let mut peer = self.accept();
        peer.send(&welcome(1));
        peer
    }
}

impl Peer {
    pub(super) fn send(&mut self, bytes: &[u8]) {
        // The client may have closed the connection.
        let _ = self.0.write_all(bytes);
    }

    /// Returns the next frame (header, metadata, payload), or `None` if the client has disconnected.
    pub(super) fn next(&mut self) -> Option<(Header, Vec<u8>, Vec<u8>)> {
        let mut header = [0; HEADER_BYTES];
        self.0.read_exact(&mut header).ok()?;
        let header = Header::decode(&header);
        let mut rest = vec![0; header.length as usize];
        self.0.read_exact(&mut rest).ok()?;
        let payload = rest.split_off(usize::from(header.metadata_length));
        Some((header, rest, payload))
    }

    /// Reads the next job and returns its number.
    pub(super) fn job(&mut self) -> u64 {
        let (header, ..) = self.next().expect("the client sends a job");
        assert_eq!(header.kind, kind::SUBMIT);
        header.number
    }

    /// Waits until the client closes the connection.
    pub(super) fn end(mut self) {
        while self.next().is_some() {}
        assert!(matches!(self.0.read(&mut [0]), Ok(0) | Err(_)), "the client is still connected");
    }
}

/// Runs `script` as a fake supervisor, and `work` as its client. Every wait of `script` needs a time limit. Otherwise,
/// if `work` panics, the thread of `script` never ends, and the panic is never reported.
pub(super) fn against<T>(script: impl FnOnce(&Fake) + Send, work: impl AsyncFnOnce(PathBuf) -> T) -> T {
    let fake = Fake::new();
    let path = fake.path.clone();
    std::thread::scope(|scope| {
        // The thread owns the listener, so the socket closes when the script ends.
        scope.spawn(move || script(&fake));
        run(work(path))
    })
}

/// A read that returns descriptors stops at the end of the message that carried them. The client must read again,
/// because the kernel sends no new notification for bytes that have already arrived.
#[test]
fn frames_that_follow_descriptors_are_read_immediately() {
    let fake = Fake::new();
    let path = fake.path.clone();
    let (sent, is_sent) = mpsc::channel();
    let script = move || {
        let mut peer = fake.accept();
        let welcome = ClientWelcome {
            version: 1,
            frame_bytes_max: 1 << 30,
            capabilities: capability::MEMORY_FILES,
            server_version: "fake",
        };
        peer.send(&frame(kind::CLIENT_WELCOME, 0, MAGIC, &metadata(&welcome), b""));
        let (mut request, mut job) = (None, None);
        while request.is_none() || job.is_none() {
            let (header, ..) = peer.next().expect("the client requests a lease and sends a job");
            match header.kind {
                kind::LEASE => request = Some(header.number),
                kind::SUBMIT => job = Some(header.number),
                other => panic!("kind {other}"),
            }
        }
        let lease = metadata(&LeaseRef { lease: 1, bytes: 1 << 20 });
        let file = tempfile::tempfile().unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut rights = SendAncillaryBuffer::new(&mut space);
        let files = [file.as_fd(), file.as_fd()];
        assert!(rights.push(SendAncillaryMessage::ScmRights(&files)));
        let leased = frame(kind::LEASED, 0, request.unwrap(), &lease, b"");
        sendmsg(&peer.0, &[IoSlice::new(&leased)], &mut rights, SendFlags::empty()).unwrap();
        peer.send(&outcome(job.unwrap(), b"result"));
        sent.send(()).unwrap();
        // Reads nothing more, because reading frees buffer space, and the kernel would then notify the client again.
        peer
    };
    std::thread::scope(|scope| {
        let peer = scope.spawn(script);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let client = Client::connect(path).await.unwrap();
            // Lets the connection's task run until it waits for the socket, so that the runtime is notified of both
            // messages at once.
            for _ in 0..1000 {
                tokio::task::yield_now().await;
            }
            // The payload is large enough for the client to request a memory file.
            let job = client.job("b", vec![0; 100_000]).start().await.unwrap();
            // The runtime has a single thread, which reads nothing before both messages have arrived.
            is_sent.recv_timeout(PATIENCE).unwrap();
            let reply = tokio::time::timeout(PATIENCE, job).await.expect("the outcome is read");
            assert_eq!(reply.unwrap().payload(), b"result");
        });
        // Closes the connection.
        drop(runtime);
        peer.join().unwrap().end();
    });
}

#[test]
fn connect_fails_without_valid_welcome() {
    let no_welcome: &[(&str, Vec<u8>)] = &[
        ("closed the connection before the welcome", Vec::new()),
        ("the supervisor rejected the connection", refused("too many clients; try later")),
        ("instead of a welcome", outcome(1, b"")),
        ("the metadata is malformed", frame(kind::CLIENT_WELCOME, 0, MAGIC, b"", &[0; 1 << 17])),
        ("the metadata is malformed", frame(kind::CLIENT_WELCOME, 0, MAGIC, b"abc", b"")),
        ("metadata, but a total length", [0xff, 0, 0, 0, 2, 0, 0xff, 0xff].repeat(8)),
        ("protocol version 9", welcome(9)),
    ];
    for (expected, answer) in no_welcome {
        against(
            |fake| fake.accept().send(answer),
            async |path| {
                let error = Client::connect(path).await.expect_err("the welcome is missing or invalid");
                assert!(error.to_string().contains(expected), "{expected}: {error}");
                let is_refusal = matches!(&error, ConnectError::Refused { message, .. }
                    if message == "too many clients; try later");
                assert_eq!(is_refusal, expected.contains("rejected"), "{error:?}");
            },
        );
    }
}

#[test]
fn protocol_violation_by_supervisor_fails_the_job() {
    let header = |kind, length, metadata_length| {
        Header { length, kind, flags: 0, metadata_length, number: 1 << 32 }.encode().to_vec()
    };
    let critical = frame(200, FLAG_CRITICAL, 0, b"", b"");
    let large = [frame(200, FLAG_CRITICAL, 0, b"", &[0; 1 << 20]), vec![0; 100]].concat();
    let cases: &[(&str, Vec<u8>)] = &[
        ("announced a frame of 4294967295 bytes", [header(kind::OUTCOME, u32::MAX, 8), vec![0; 8]].concat()),
        ("announced a frame of 4294967295 bytes", [header(77, u32::MAX, 8), vec![0; 8]].concat()),
        ("metadata, but a total length", header(kind::OUTCOME, 4, 100)),
        ("cannot be read", frame(kind::OUTCOME, 0, 1 << 32, &[0; 20], b"")),
        ("cannot be read", frame(kind::OUTCOME, 0, 1 << 32, &[0xff; 200], b"")),
        ("cannot be read", frame(kind::PROGRESS, 0, 1 << 32, &[0xff; 20], b"")),
        ("unknown kind 200", critical),
        ("unknown kind 200", large),
        ("your frames are odd", refused("your frames are odd")),
        ("in the middle of a frame", outcome(1 << 32, b"result")[..60].to_vec()),
        ("in the middle of a frame", outcome(1 << 32, &vec![7; 1 << 20])[..100_000].to_vec()),
        ("the supervisor closed the connection", Vec::new()),
    ];
    for (expected, answer) in cases {
        against(
            |fake| {
                let mut peer = fake.welcome();
                assert_eq!(peer.job(), 1 << 32, "the cases above use this job number");
                peer.send(answer);
                peer.0.shutdown(std::net::Shutdown::Write).unwrap();
                // The client makes a second connection for the next job.
                drop(peer);
                let mut peer = fake.welcome();
                let number = peer.job();
                peer.send(&outcome(number, b"sound"));
                peer.end();
            },
            async |path| {
                let client = Client::connect(path).await.unwrap();
                let (executed, text) = lost(client.job("b", "x").send().await);
                assert!(text.contains(expected), "{expected}: {text}");
                assert_eq!(executed, Executed::Unknown);
                let next = client.job("b", "x").deadline(PATIENCE).send().await.unwrap();
                assert_eq!(next.payload(), b"sound");
            },
        );
    }
}

#[test]
fn client_ignores_unknown_frames_and_job_numbers() {
    against(
        |fake| {
            let mut peer = fake.welcome();
            let number = peer.job();
            peer.send(&frame(200, 0, number, b"?", b"a kind of the future"));
            peer.send(&frame(200, 0, number, b"?", &[1; 1 << 20]));
            for stranger in [0, number + 1, number + (1 << 32), u64::MAX] {
                peer.send(&outcome(stranger, b"not yours"));
                peer.send(&outcome(stranger, &[1; 1 << 20]));
                peer.send(&frame(
                    kind::PROGRESS,
                    0,
                    stranger,
                    &metadata(&Progress { fraction: 0.5, text: "" }),
                    b"",
                ));
            }
            for fraction in [f32::NAN, f32::INFINITY, -3.0] {
                let progress = Progress { fraction, text: "odd" };
                peer.send(&frame(kind::PROGRESS, 0, number, &metadata(&progress), b""));
            }
            peer.send(&outcome(number, b"yours"));
            peer.send(&outcome(number, b"yours again"));
            // Sends an outcome with an unknown code, and a rejection with an unknown reason.
            for (code, reason) in [(99, 0), (2, 200)] {
                let number = peer.job();
                peer.send(&frame(kind::OUTCOME, 0, number, &outcome_metadata(code, reason), b""));
            }
            let number = peer.job();
            peer.send(&outcome(number, b"still the same connection"));
            peer.end();
        },
        async |path| {
            let client = Client::connect(path).await.unwrap();
            let mut handle = client.job("b", "x").start().await.unwrap();
            let mut fractions = Vec::new();
            while let Some(progress) = handle.progress().await {
                fractions.push(progress.fraction);
            }
            assert_eq!(fractions, [0.0, 1.0, 0.0]);
            assert_eq!(handle.await.unwrap().payload(), b"yours");
            for expected in ["outcome 99, reason 0", "outcome 2, reason 200"] {
                let (executed, text) = lost(client.job("b", "x").send().await);
                assert_eq!(executed, Executed::Yes, "the outcome says that the job ran");
                assert!(text.contains(expected), "{text}");
            }
            let last = client.job("b", "x").send().await.unwrap();
            assert_eq!(last.payload(), b"still the same connection");
        },
    );
}

#[test]
fn client_allocates_memory_only_for_received_bytes() {
    const ALONE: &str = "MEASURES_MEMORY_ALONE";
    if std::env::var_os(ALONE).is_none() {
        // Runs this test again in a separate process, because concurrent tests would distort the measurement.
        let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
        alone
            .args(["clients::client::client_allocates_memory_only_for_received_bytes", "--exact"])
            .env(ALONE, "1");
        let ran = output(&mut alone);
        assert!(ran.status.success(), "{ran:?}");
        assert!(String::from_utf8_lossy(&ran.stdout).contains("1 passed"), "{ran:?}");
        return;
    }
    let before = resident_bytes(std::process::id());
    against(
        |fake| {
            let mut peer = fake.welcome();
            let number = peer.job();
            let metadata = outcome_metadata(0, 0);
            let metadata_length = metadata.len() as u16;
            let header = Header { length: 1 << 30, kind: kind::OUTCOME, flags: 0, metadata_length, number };
            peer.send(&[&header.encode()[..], &metadata, &[0; 100_000]].concat());
            peer.end();
        },
        async |path| {
            let client = Client::connect(path).await.unwrap();
            let handle = client.job("b", "x").start().await.unwrap();
            // The test cannot observe when the client has read the bytes, so the test waits for 200 ms.
            assert!(tokio::time::timeout(Duration::from_millis(200), handle).await.is_err());
            let grown = resident_bytes(std::process::id()).saturating_sub(before);
            assert!(grown < 64 << 20, "memory grew by {} MiB", grown >> 20);
        },
    );
}

#[test]
fn client_buffer_limits_unsent_jobs() {
    const JOBS: usize = 40;
    let (read_on, told) = mpsc::channel::<()>();
    against(
        move |fake| {
            let mut peer = fake.welcome();
            told.recv_timeout(PATIENCE).unwrap();
            // Skips frames that are not jobs.
            while let Some((header, _, payload)) = peer.next() {
                if header.kind == kind::SUBMIT {
                    peer.send(&outcome(header.number, &payload[..4]));
                }
            }
        },
        async |path| {
            let client = Client::connect(path).await.unwrap();
            let (started, mut starts) = tokio::sync::mpsc::unbounded_channel();
            let mut jobs = tokio::task::JoinSet::new();
            for index in 0..JOBS {
                let job = client.job("b", [&(index as u32).to_le_bytes()[..], &[0; 1 << 20]].concat());
                let started = started.clone();
                jobs.spawn(async move {
                    let handle = job.start().await?;
                    started.send(()).unwrap();
                    handle.await
                });
            }
            let mut count = 0;
            while count < 8 {
                starts.recv().await.unwrap();
                count += 1;
            }
            // The client's buffer is full, so the deadline passes before the job is sent.
            let limit = Duration::from_millis(100);
            let late = client.job("b", vec![0; 1 << 20]).deadline(limit).send().await.unwrap_err();
            let outcome = late.outcome().expect("the client made an outcome");
            assert_eq!(outcome.verdict, Verdict::DeadlineQueued);
            assert_eq!((outcome.deadline, late.executed()), (limit, Executed::No));
            while starts.try_recv().is_ok() {
                count += 1;
            }
            assert!(count <= 12, "{count} jobs of 1 MiB fit into a buffer of 8 MiB");

            read_on.send(()).unwrap();
            let mut seen = [false; JOBS];
            while let Some(done) = jobs.join_next().await {
                let reply = done.unwrap().unwrap();
                let index = u32::from_le_bytes(reply.payload().try_into().unwrap());
                assert!(!std::mem::replace(&mut seen[index as usize], true), "job {index} has two results");
            }
            assert_eq!(seen, [true; JOBS]);
        },
    );
}

#[test]
fn lost_connection_distinguishes_sent_and_unsent_jobs() {
    let (end, told) = mpsc::channel::<()>();
    against(
        move |fake| {
            let mut peer = fake.welcome();
            peer.job();
            told.recv_timeout(PATIENCE).unwrap();
        },
        async |path| {
            let client = Client::connect(path).await.unwrap();
            let sent = client.job("b", "small").start().await.unwrap();
            let mut others = Vec::new();
            for _ in 0..4 {
                // The payload does not fit into the socket buffer, so none of these jobs is sent completely.
                others.push(client.job("b", vec![0; 3 << 20]).start().await);
            }
            // The client's buffer has no room for this job.
            let waiting = client.job("b", vec![0; 3 << 20]).send();
            let (waiting, ()) = tokio::join!(waiting, async { end.send(()).unwrap() });
            let (executed, text) = lost(sent.await);
            assert_eq!(executed, Executed::Unknown);
            assert!(text.contains("send the job again only if it can safely run twice"), "{text}");
            // These jobs wait until the client has reconnected.
            for handle in others {
                let (executed, text) = lost(handle.unwrap().await);
                assert_eq!(executed, Executed::No);
                assert!(
                    text.contains("the job was not sent: check that the supervisor is running"),
                    "{text}"
                );
            }
            assert_eq!(lost(waiting).0, Executed::No);
        },
    );
}

#[test]
fn client_backs_off_when_supervisor_closes_after_welcome() {
    let fake = Fake::new();
    run(async {
        let path = fake.path.clone();
        let (client, ()) = tokio::join!(tokio::spawn(Client::connect(path)), async {
            drop(fake.welcome());
        });
        let _client = client.unwrap().unwrap();
        let (began, mut count) = (Instant::now(), 0);
        while began.elapsed() < Duration::from_millis(500) {
            drop(fake.welcome());
            count += 1;
        }
        // Without backoff, there would be thousands of connections. With backoff, the eighth attempt starts after more
        // than a second.
        assert!(count <= 8, "{count} connections in half a second");
    });
}

#[test]
fn connection_closes_when_last_handle_and_client_are_dropped() {
    let (client_gone, told) = mpsc::channel::<()>();
    against(
        move |fake| {
            let mut peer = fake.welcome();
            let number = peer.job();
            told.recv_timeout(PATIENCE).unwrap();
            peer.send(&outcome(number, b"late"));
            peer.end();
            // The client does not reconnect after its last handle is dropped.
            let mut peer = fake.welcome();
            peer.job();
            drop(peer);
        },
        async |path| {
            let client = Client::connect(&path).await.unwrap();
            let handle = client.job("b", "x").start().await.unwrap();
            drop(client);
            client_gone.send(()).unwrap();
            assert_eq!(handle.await.unwrap().payload(), b"late");

            let client = Client::connect(&path).await.unwrap();
            let handle = client.job("b", "x").start().await.unwrap();
            drop(client);
            assert!(lost(handle.await).1.contains("the supervisor closed the connection"));
        },
    );
}

#[test]
fn job_waits_while_client_connects() {
    let (go_on, told) = mpsc::channel::<()>();
    against(
        move |fake| {
            drop(fake.welcome());
            let mut second = fake.accept();
            told.recv_timeout(PATIENCE).unwrap();
            second.send(&welcome(1));
            let number = second.job();
            second.send(&outcome(number, b"waited"));
            second.end();
        },
        async |path| {
            let client = Client::connect(path).await.unwrap();
            let job = client.job("b", "x").deadline(PATIENCE);
            let (reply, ()) = tokio::join!(job.send(), async {
                tokio::task::yield_now().await;
                go_on.send(()).unwrap();
            });
            // The client may have sent the job before noticing the loss. The job then ends with an error.
            match reply {
                Ok(reply) => assert_eq!(reply.payload(), b"waited"),
                Err(error) => {
                    assert!(error.to_string().contains("lost"), "{error}");
                    let next = client.job("b", "x").deadline(PATIENCE).send().await.unwrap();
                    assert_eq!(next.payload(), b"waited");
                }
            }
        },
    );
}

#[test]
fn each_failed_outcome_has_an_error_variant() {
    let supervisor = Supervisor::start(ONE);
    run(async {
        let client = Client::connect(supervisor.socket()).await.unwrap();
        wait_for("a worker is ready", || (supervisor.number("b", "available") == 1).then_some(()));
        let failed = client.job("b", "").operation("fail").send().await.unwrap_err();
        assert!(matches!(failed, JobError::Failed(_)), "{failed:?}");
        let rejected = client.job("nobody", "").send().await.unwrap_err();
        assert!(matches!(rejected, JobError::Rejected(_)), "{rejected:?}");
        let crashed = client.job("b", "9").operation("exit").send().await.unwrap_err();
        assert!(matches!(crashed, JobError::Crashed(_)), "{crashed:?}");
        // Waits for a worker, because the next job could otherwise miss its deadline while still in the queue.
        wait_for("a worker is ready", || (supervisor.number("b", "available") == 1).then_some(()));
        let limit = Duration::from_secs(2);
        let late = client.job("b", "").operation("yield").deadline(limit).send().await.unwrap_err();
        assert!(matches!(late, JobError::DeadlineExceeded(_)), "{late:?}");
        let codes = [&failed, &rejected, &crashed, &late].map(|error| error.exit_code());
        assert_eq!(codes, [1, 66, 70, 124]);
        let executed = [&failed, &rejected, &crashed, &late].map(|error| error.executed());
        assert_eq!(executed, [Executed::Yes, Executed::No, Executed::Unknown, Executed::Yes]);
    });
}
