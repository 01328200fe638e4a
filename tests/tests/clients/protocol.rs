//! Tests of `docs/protocol.md`. Some tests pin the bytes of every kind of frame. The other tests use a client and a
//! worker that were written from the page alone, without the workspace's code.

use std::io::{Read, Write};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use bulkhead_shared::client_protocol::{
    ClientWelcome, Hello, OutcomeMessage, Progress, Refused, Submit, outcome_code, role,
};
use bulkhead_shared::codec::tag;
use bulkhead_shared::connection::{BufferPool, Outbox, Payload};
use bulkhead_shared::frame::{self, MAGIC};
use bulkhead_shared::limits::IN_FLIGHT_CEILING;
use bulkhead_shared::worker_protocol::{
    Empty, Extend, Failed, Job, Limits, ProgramCrashed, Status, WorkerWelcome, capability,
};
use bulkhead_shared::{CrashReason, RejectReason};
use bulkhead_tests::{Supervisor, wait_for};
use nix::poll::{PollFd, PollFlags, PollTimeout};

mod rules;

// Numbers copied from the protocol page, so that the test does not depend on the workspace's code.

const BULKHEAD: u64 = 0x4441_4548_4b4c_5542;
const HELLO: u8 = 1;
const CLIENT_WELCOME: u8 = 2;
const REFUSED: u8 = 3;
const WORKER_WELCOME: u8 = 4;
const SUBMIT: u8 = 16;
const CANCEL: u8 = 17;
const OUTCOME: u8 = 32;
const PROGRESS: u8 = 33;
const JOB: u8 = 48;
const CANCEL_JOB: u8 = 49;
const DRAIN: u8 = 50;
const LIMITS: u8 = 51;
const JOURNAL: u8 = 53;
const READY: u8 = 64;
const RESULT: u8 = 66;
const FAILED: u8 = 67;
const PROGRESSED: u8 = 68;
const STATUS: u8 = 69;
const EXTEND_START: u8 = 70;
const HEARTBEAT: u8 = 71;
const STOPPING: u8 = 72;
const PROGRAM_CRASHED: u8 = 73;
const RETURNED: u8 = 74;

/// Frame kind that does not exist in version 1.
const NEWER: u8 = 200;
const CRITICAL: u8 = 1;

const OK: u8 = 0;
const FAILED_OUTCOME: u8 = 1;
const REJECTED: u8 = 2;
const DEADLINE_EXCEEDED: u8 = 3;
const CRASHED: u8 = 4;
const CANCELLED: u8 = 5;

const TRACEPARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

/// Builder of a frame's metadata.
#[derive(Clone, Default)]
struct Meta(Vec<u8>);

impl Meta {
    fn u8(mut self, value: u8) -> Self {
        self.0.push(value);
        self
    }

    fn u16(mut self, value: u16) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn u64(mut self, value: u64) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn f32(mut self, value: f32) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn text(mut self, value: &str) -> Self {
        self = self.u64(value.len() as u64);
        self.0.extend(value.as_bytes());
        self
    }

    fn extensions(mut self, list: &[(u16, &[u8])]) -> Self {
        self = self.u64(list.len() as u64);
        for (tag, bytes) in list {
            self = self.u16(*tag).u64(bytes.len() as u64);
            self.0.extend(*bytes);
        }
        self
    }

    fn end(self) -> Self {
        self.extensions(&[])
    }
}

fn empty() -> Meta {
    Meta::default().end()
}

fn frame(kind: u8, flags: u8, number: u64, meta: Meta, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(meta.0.len() + payload.len()).unwrap();
    let mut bytes = length.to_le_bytes().to_vec();
    bytes.extend([kind, flags]);
    bytes.extend(u16::try_from(meta.0.len()).unwrap().to_le_bytes());
    bytes.extend(number.to_le_bytes());
    bytes.extend(meta.0);
    bytes.extend(payload);
    bytes
}

/// Reader of a frame's metadata.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count);
        self.0 = rest;
        taken
    }

    fn u8(&mut self) -> u8 {
        self.take(1)[0]
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take(2).try_into().unwrap())
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take(4).try_into().unwrap())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take(8).try_into().unwrap())
    }

    fn text(&mut self) -> String {
        let count = self.u64() as usize;
        String::from_utf8(self.take(count).to_vec()).unwrap()
    }

    /// Reads the list of extensions, which must be the last part of the metadata.
    fn end(&mut self) -> Vec<(u16, Vec<u8>)> {
        let list = (0..self.u64())
            .map(|_| {
                let (tag, count) = (self.u16(), self.u64() as usize);
                (tag, self.take(count).to_vec())
            })
            .collect();
        assert!(self.0.is_empty(), "{} bytes follow the list of extensions", self.0.len());
        list
    }
}

#[derive(Clone, Debug)]
struct Frame {
    kind: u8,
    flags: u8,
    number: u64,
    meta: Vec<u8>,
    payload: Vec<u8>,
}

/// Reads a whole frame. Returns `None` if the connection is closed.
fn read_frame(mut socket: &UnixStream) -> Option<Frame> {
    let mut header = [0; 16];
    // If the supervisor closes a connection with unread bytes, the read fails with an error instead of an end
    // of file.
    socket.read_exact(&mut header).ok()?;
    let length = u32::from_le_bytes(header[0..4].try_into().unwrap()) as usize;
    let meta_length = u16::from_le_bytes(header[6..8].try_into().unwrap()) as usize;
    assert!(meta_length <= length, "{header:?}");
    let mut meta = vec![0; length];
    socket.read_exact(&mut meta).ok()?;
    let payload = meta.split_off(meta_length);
    let number = u64::from_le_bytes(header[8..16].try_into().unwrap());
    Some(Frame { kind: header[4], flags: header[5], number, meta, payload })
}

/// Fields of an OUTCOME frame.
#[derive(Debug)]
struct Outcome {
    number: u64,
    outcome: u8,
    reason: u8,
    executed: u8,
    retryable: u8,
    fault: u8,
    attempts: u32,
    queued_us: u64,
    ran_us: u64,
    deadline_us: u64,
    pid: u32,
    retry_after_us: Option<u64>,
    status: Option<i32>,
    bulkhead: String,
    code: String,
    message: String,
    payload: Vec<u8>,
}

impl Frame {
    /// Returns the extensions of an OUTCOME frame.
    fn extensions(&self) -> Vec<(u16, Vec<u8>)> {
        let mut fields = Fields(&self.meta);
        fields.take(5 + 4 + 3 * 8 + 4 + 1 + 8 + 1 + 4);
        (0..3).for_each(|_| drop(fields.text()));
        fields.end()
    }
}

impl Outcome {
    fn read(frame: &Frame) -> Self {
        assert_eq!(frame.kind, OUTCOME, "{frame:?}");
        let mut fields = Fields(&frame.meta);
        let has = |flag: u8| match flag {
            0 => false,
            1 => true,
            other => panic!("{other} is neither 0 nor 1"),
        };
        let outcome = Self {
            number: frame.number,
            outcome: fields.u8(),
            reason: fields.u8(),
            executed: fields.u8(),
            retryable: fields.u8(),
            fault: fields.u8(),
            attempts: fields.u32(),
            queued_us: fields.u64(),
            ran_us: fields.u64(),
            deadline_us: fields.u64(),
            pid: fields.u32(),
            retry_after_us: {
                let (flag, value) = (fields.u8(), fields.u64());
                has(flag).then_some(value)
            },
            status: {
                let (flag, value) = (fields.u8(), fields.u32() as i32);
                has(flag).then_some(value)
            },
            bulkhead: fields.text(),
            code: fields.text(),
            message: fields.text(),
            payload: frame.payload.clone(),
        };
        fields.end();
        outcome
    }

    fn kind(&self) -> (u8, u8) {
        (self.outcome, self.reason)
    }
}

/// Encodes a client's HELLO, without the list of extensions.
fn client_hello(oldest: u16, newest: u16) -> Meta {
    let meta = Meta::default().u16(oldest).u16(newest).u8(1).u32(u32::MAX).u64(0);
    meta.text("by hand").text("1")
}

/// Encodes a SUBMIT, without the list of extensions.
fn submit(bulkhead: &str, operation: &str) -> Meta {
    submit_for(bulkhead, operation, 0)
}

fn submit_for(bulkhead: &str, operation: &str, deadline_us: u64) -> Meta {
    let meta = Meta::default().text(bulkhead).text(operation).text("acme");
    meta.u64(deadline_us).u8(1).u8(0).u32(0)
}

struct Client {
    socket: UnixStream,
}

impl Client {
    fn dial(supervisor: &Supervisor) -> Self {
        Self { socket: bulkhead_tests::dial(&supervisor.socket()).unwrap() }
    }

    /// Connects and completes the handshake.
    fn connect(supervisor: &Supervisor) -> Self {
        let mut client = Self::dial(supervisor);
        client.send(HELLO, BULKHEAD, client_hello(1, 1).end(), b"");
        let welcome = client.next();
        assert_eq!(welcome.kind, CLIENT_WELCOME, "{welcome:?}");
        client
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.socket.write_all(bytes).unwrap();
    }

    fn send(&mut self, kind: u8, number: u64, meta: Meta, payload: &[u8]) {
        self.bytes(&frame(kind, 0, number, meta, payload));
    }

    fn next(&mut self) -> Frame {
        read_frame(&self.socket).expect("the supervisor keeps the connection open")
    }

    fn outcome(&mut self) -> Outcome {
        loop {
            let frame = self.next();
            if frame.kind != PROGRESS {
                return Outcome::read(&frame);
            }
        }
    }

    fn job(&mut self, bulkhead: &str, operation: &str, payload: &[u8]) -> Outcome {
        self.send(SUBMIT, 1, submit(bulkhead, operation).end(), payload);
        let outcome = self.outcome();
        assert_eq!(outcome.number, 1);
        outcome
    }

    /// Reads a refusal, which must be the last frame on the connection. Returns the reason and the message.
    fn refusal(&mut self) -> (u8, String) {
        let refused = self.next();
        assert_eq!((refused.kind, refused.number, refused.payload.len()), (REFUSED, 0, 0), "{refused:?}");
        let mut fields = Fields(&refused.meta);
        let (reason, sentence) = (fields.u8(), fields.text());
        fields.end();
        assert!(read_frame(&self.socket).is_none(), "the connection ends with the refusal");
        (reason, sentence)
    }
}

// Worker: the supervisor runs this test program with `clients::protocol::worker_written_from_the_page` as the only
// test.

/// Returns the configuration of a bulkhead with the worker [`worker_written_from_the_page`] and further `keys`.
fn by_hand(name: &str, keys: &str) -> String {
    let program = std::env::current_exe().unwrap();
    format!(
        "[bulkhead.{name}]\n\
         command = [{program:?}, \"clients::protocol::worker_written_from_the_page\", \"--exact\", \"--ignored\", \"--nocapture\"]\n\
         env = {{ BY_HAND = \"{name}\" }}\n{keys}\n"
    )
}

#[test]
#[ignore = "not a test, but the worker process that the supervisor starts in other tests"]
fn worker_written_from_the_page() {
    let Ok(bulkhead) = std::env::var("BY_HAND") else { return };
    let fd: i32 = std::env::var("BULKHEAD_LINK_FD").unwrap().parse().unwrap();
    #[expect(unsafe_code, reason = "the supervisor passed this descriptor to its worker")]
    // SAFETY: the supervisor handed us this descriptor, and nothing else in this process uses it.
    let socket = UnixStream::from(unsafe { OwnedFd::from_raw_fd(fd) });
    match bulkhead.strip_prefix("rules-") {
        Some(rule) => rules::work(Worker::new(socket), rule),
        None => Worker::new(socket).work(&bulkhead),
    }
    std::process::exit(0);
}

struct Worker {
    socket: UnixStream,
    heartbeat: PollTimeout,
    result_bytes_max: u64,
}

impl Worker {
    fn new(socket: UnixStream) -> Self {
        Self { socket, heartbeat: PollTimeout::NONE, result_bytes_max: 0 }
    }

    fn bytes(&mut self, bytes: &[u8]) {
        if self.socket.write_all(bytes).is_err() {
            std::process::exit(0);
        }
    }

    fn send(&mut self, kind: u8, number: u64, meta: Meta, payload: &[u8]) {
        self.bytes(&frame(kind, 0, number, meta, payload));
    }

    /// Waits for the next frame. Sends heartbeats while waiting.
    fn next(&mut self) -> Frame {
        while !self.has_bytes() {
            self.send(HEARTBEAT, 0, empty(), b"");
        }
        read_frame(&self.socket).unwrap_or_else(|| std::process::exit(0))
    }

    /// Returns true if bytes arrive before the next heartbeat is due.
    fn has_bytes(&self) -> bool {
        let mut poll = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
        nix::poll::poll(&mut poll, self.heartbeat).unwrap() > 0
    }

    fn work(&mut self, bulkhead: &str) {
        let hello = Meta::default().u16(1).u16(1).u8(2).u32(u32::MAX).u64(0).text("by hand").text("1");
        // An unknown extension, as from a newer worker.
        self.send(HELLO, BULKHEAD, hello.extensions(&[(77, b"news")]), b"");
        self.welcomed(bulkhead);
        self.send(EXTEND_START, 0, Meta::default().u32(5000).end(), b"");
        self.send(STATUS, 0, Meta::default().text("loading the model").end(), b"");
        if bulkhead == "unready" {
            self.send(STATUS, 0, Meta::default().text("the model file is missing").end(), b"");
            std::process::exit(9);
        }
        self.send(NEWER, 0, Meta(b"whatever a newer worker says".to_vec()), &[7; 70_000]);
        self.send(READY, 0, empty(), b"");
        loop {
            let frame = self.next();
            match frame.kind {
                JOB => self.job(&frame),
                CANCEL_JOB => assert_eq!(Fields(&frame.meta).end(), []),
                DRAIN => {
                    assert_eq!((Fields(&frame.meta).end(), frame.number), (vec![], 0));
                    return;
                }
                _ => assert_eq!(frame.flags & CRITICAL, 0, "not understood: {frame:?}"),
            }
        }
    }

    fn welcomed(&mut self, bulkhead: &str) {
        let welcome = self.next();
        assert_eq!(welcome.kind, WORKER_WELCOME, "{welcome:?}");
        let mut fields = Fields(&welcome.meta);
        assert_eq!(fields.u16(), 1, "version");
        assert!(fields.u32() > 100_000, "largest frame");
        assert_eq!(fields.u64(), 0, "capabilities");
        assert_eq!(fields.u32(), 0, "slot");
        assert!(fields.u32() >= 1, "generation");
        assert_eq!(fields.u32(), 2, "most jobs at once");
        assert_eq!(fields.u32(), 200, "heartbeat interval");
        self.heartbeat = PollTimeout::from(100_u8);
        self.result_bytes_max = fields.u64();
        assert_eq!(self.result_bytes_max, 100_000);
        assert_eq!(fields.text(), bulkhead);
        fields.end();
    }

    fn job(&mut self, job: &Frame) {
        let mut fields = Fields(&job.meta);
        let (operation, tenant, remaining_us) = (fields.text(), fields.text(), fields.u64());
        let extensions = fields.end();
        let number = job.number;
        match operation.as_str() {
            "echo" => self.send(RESULT, number, empty(), &job.payload),
            "describe" => {
                let trace = match &extensions[..] {
                    [] => "none".to_owned(),
                    [(1, bytes)] => String::from_utf8(bytes.clone()).unwrap(),
                    other => panic!("{other:?}"),
                };
                let text = format!("{tenant} {remaining_us} {trace}");
                self.send(RESULT, number, empty(), text.as_bytes());
            }
            "fail" => {
                let failed = Meta::default().text("bad_input").text("größer als erlaubt").u8(1).u8(1);
                self.send(FAILED, number, failed.end(), &job.payload);
            }
            "progress" => {
                self.send(PROGRESSED, number, Meta::default().f32(0.25).text("page 1 of 4").end(), b"");
                self.send(RESULT, number, empty(), b"read");
            }
            "program" => {
                let crashed = Meta::default().u32(11).text("killed by SIGSEGV").end();
                self.send(PROGRAM_CRASHED, number, crashed, b"");
            }
            "signal" => {
                let signal = u32::from_le_bytes(job.payload[..4].try_into().unwrap());
                let crashed = Meta::default().u32(signal).text("").end();
                self.send(PROGRAM_CRASHED, number, crashed, b"");
            }
            "until-cancelled" => {
                let cancel = self.next();
                assert_eq!((cancel.kind, cancel.number), (CANCEL_JOB, number), "{cancel:?}");
                let failed = Meta::default().text("cancelled").text("told to stop").u8(0).u8(1);
                self.send(FAILED, number, failed.end(), b"");
            }
            "large" => self.send(RESULT, number, empty(), &vec![7; self.result_bytes_max as usize]),
            "too-large" => self.send(RESULT, number, empty(), &vec![7; self.result_bytes_max as usize + 1]),
            "last" => {
                self.send(STOPPING, 0, empty(), b"");
                self.send(RESULT, number, empty(), b"my last");
            }
            "newer" => {
                self.send(NEWER, number, Meta(vec![1, 2, 3]), b"");
                self.send(RESULT, number, Meta::default().extensions(&[(9, b"new"), (10, b"")]), b"known");
            }
            "critical-frame" => {
                self.bytes(&frame(NEWER, CRITICAL, 0, empty(), b""));
                self.send(RESULT, number, empty(), b"");
            }
            "critical-in-failed" => {
                let failed = Meta::default().text("bad").text("").u8(0).u8(1);
                self.send(FAILED, number, failed.extensions(&[(0x8009, b"")]), b"");
            }
            "critical-in-result" => {
                self.send(RESULT, number, Meta::default().extensions(&[(0x8009, b"")]), b"misread");
            }
            other => panic!("{other}"),
        }
    }
}

// Pinned bytes.

/// Returns the hex encoding of a frame that the workspace's codec has encoded.
fn written<M: bincode::Encode>(
    kind: u8,
    number: u64,
    message: &M,
    extensions: &[(u16, &[u8])],
    payload: &[u8],
) -> String {
    let (here, mut there) = UnixStream::pair().unwrap();
    let mut outbox = Outbox::default();
    outbox.push(kind, number, message, extensions, Payload::Copied(payload)).unwrap();
    assert!(outbox.flush(&here, &mut BufferPool::default()).unwrap());
    drop(here);
    let mut bytes = Vec::new();
    there.read_to_end(&mut bytes).unwrap();
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Compares a frame with a hex literal. White space in the literal is ignored.
fn pin(name: &str, literal: &str, written: &str) {
    let literal: String = literal.split_whitespace().collect();
    assert_eq!(written, literal, "{name}");
}

const JOB_NUMBER: u64 = 0x0100_0005;

#[test]
fn handshake_frames_have_pinned_bytes() {
    let hello = Hello {
        version_min: 1,
        version_max: 1,
        role: role::CLIENT,
        frame_bytes_max: u32::MAX,
        capabilities: 0,
        name: "doc",
        version: "1",
    };
    let client_hello = "2d000000 01 00 2d00 42554c4b48454144
        0100 0100 01 ffffffff 0000000000000000 0300000000000000 646f63 0100000000000000 31
        0000000000000000";
    pin("HELLO of a client", client_hello, &written(frame::kind::HELLO, MAGIC, &hello, &[], b""));
    let hello = Hello {
        version_min: 1,
        version_max: 2,
        role: role::WORKER,
        frame_bytes_max: 65_536,
        capabilities: capability::DISPATCH_THREAD | capability::RESIZE,
        name: "w",
        version: "",
    };
    pin(
        "HELLO of a worker",
        "2a000000 01 00 2a00 42554c4b48454144
         0100 0200 02 00000100 0300000000000000 0100000000000000 77 0000000000000000
         0000000000000000",
        &written(frame::kind::HELLO, MAGIC, &hello, &[], b""),
    );
    let welcome =
        ClientWelcome { version: 1, frame_bytes_max: 0x0400_ffff, capabilities: 0, server_version: "0.1.0" };
    pin(
        "CLIENT_WELCOME",
        "23000000 02 00 2300 42554c4b48454144
         0100 ffff0004 0000000000000000 0500000000000000 302e312e30 0000000000000000",
        &written(frame::kind::CLIENT_WELCOME, MAGIC, &welcome, &[], b""),
    );
    let refused = Refused { reason: RejectReason::Overloaded.code(), message: "later" };
    pin(
        "REFUSED",
        "16000000 03 00 1600 0000000000000000 10 0500000000000000 6c61746572 0000000000000000",
        &written(frame::kind::REFUSED, 0, &refused, &[], b""),
    );
    let welcome = WorkerWelcome {
        version: 1,
        frame_bytes_max: 0x0001_020f,
        capabilities: 0,
        slot: 2,
        generation: 7,
        max_in_flight: 4,
        heartbeat_ms: 1000,
        result_bytes_max: 65_536,
        bulkhead: "pdf",
    };
    pin(
        "WORKER_WELCOME",
        "39000000 04 00 3900 42554c4b48454144
         0100 0f020100 0000000000000000 02000000 07000000 04000000 e8030000 0000010000000000
         0300000000000000 706466 0000000000000000",
        &written(frame::kind::WORKER_WELCOME, MAGIC, &welcome, &[], b""),
    );
}

#[test]
fn client_job_frames_have_pinned_bytes() {
    let submit = Submit {
        bulkhead: "pdf",
        operation: "to-text",
        tenant: "acme",
        deadline_us: 500_000,
        priority: 2,
        idempotent: 1,
        cost: 3,
    };
    pin(
        "SUBMIT",
        "3e000000 10 00 3c00 0201000000000000
         0300000000000000 706466 0700000000000000 746f2d74657874 0400000000000000 61636d65
         20a1070000000000 02 01 03000000 0000000000000000
         cafe",
        &written(frame::kind::SUBMIT, 0x0102, &submit, &[], b"\xca\xfe"),
    );
    let submit = Submit {
        bulkhead: "pdf",
        operation: "",
        tenant: "",
        deadline_us: 0,
        priority: 1,
        idempotent: 0,
        cost: 0,
    };
    pin(
        "SUBMIT with a traceparent",
        "72000000 10 00 7200 0100000000000000
         0300000000000000 706466 0000000000000000 0000000000000000 0000000000000000 01 00 00000000
         0100000000000000 0100 3700000000000000
         30302d30616637363531393136636434336464383434386562323131633830333139632d
         623761643662373136393230333333312d3031",
        &written(frame::kind::SUBMIT, 1, &submit, &[(tag::TRACEPARENT, TRACEPARENT.as_bytes())], b""),
    );
    pin(
        "CANCEL",
        "08000000 11 00 0800 0201000000000000 0000000000000000",
        &written(frame::kind::CANCEL, 0x0102, &Empty, &[], b""),
    );
    pin(
        "PROGRESS",
        "1a000000 21 00 1a00 0201000000000000 0000803e 0600000000000000 706167652031 0000000000000000",
        &written(frame::kind::PROGRESS, 0x0102, &Progress { fraction: 0.25, text: "page 1" }, &[], b""),
    );
    pin(
        "GOAWAY",
        "10000000 25 00 0800 0300000000000000 0000000000000000 0201000000000000",
        &written(frame::kind::GOAWAY, 3, &Empty, &[], &0x0102_u64.to_le_bytes()),
    );
}

#[test]
fn outcome_frames_have_pinned_bytes() {
    let ok = OutcomeMessage {
        outcome: outcome_code::OK,
        reason: 0,
        executed: 1,
        retryable: 0,
        fault: 0,
        attempts: 1,
        queued_us: 1500,
        ran_us: 3000,
        deadline_us: 5_000_000,
        worker_pid: 4242,
        has_retry_after: 0,
        retry_after_us: 0,
        has_status: 0,
        status: 0,
        bulkhead: "pdf",
        code: "",
        message: "",
    };
    pin(
        "OUTCOME ok",
        "5a000000 20 00 5600 0201000000000000
         00 00 01 00 00 01000000 dc05000000000000 b80b000000000000 404b4c0000000000 92100000
         00 0000000000000000 00 00000000 0300000000000000 706466 0000000000000000 0000000000000000
         0000000000000000
         646f6e65",
        &written(frame::kind::OUTCOME, 0x0102, &ok, &[], b"done"),
    );
    let failed = OutcomeMessage {
        outcome: outcome_code::FAILED,
        retryable: 1,
        fault: 1,
        attempts: 2,
        queued_us: 0,
        ran_us: 1,
        deadline_us: 2,
        worker_pid: 3,
        code: "bad",
        message: "no",
        ..ok
    };
    pin(
        "OUTCOME failed",
        "5b000000 20 00 5b00 0100000000000000
         01 00 01 01 01 02000000 0000000000000000 0100000000000000 0200000000000000 03000000
         00 0000000000000000 00 00000000 0300000000000000 706466 0300000000000000 626164
         0200000000000000 6e6f 0000000000000000",
        &written(frame::kind::OUTCOME, 1, &failed, &[], b""),
    );
    let rejected = OutcomeMessage {
        outcome: outcome_code::REJECTED,
        reason: RejectReason::QueueFull.code(),
        executed: 0,
        retryable: 1,
        attempts: 0,
        queued_us: 0,
        ran_us: 0,
        deadline_us: 0,
        worker_pid: 0,
        has_retry_after: 1,
        retry_after_us: 250_000,
        message: "full",
        ..ok
    };
    pin(
        "OUTCOME rejected",
        "5a000000 20 00 5a00 0200000000000000
         02 09 00 01 00 00000000 0000000000000000 0000000000000000 0000000000000000 00000000
         01 90d0030000000000 00 00000000 0300000000000000 706466 0000000000000000
         0400000000000000 66756c6c 0000000000000000",
        &written(frame::kind::OUTCOME, 2, &rejected, &[], b""),
    );
    let crashed = OutcomeMessage {
        outcome: outcome_code::CRASHED,
        reason: CrashReason::Signal.code(),
        executed: 2,
        attempts: 1,
        queued_us: 0,
        ran_us: 0,
        deadline_us: 0,
        worker_pid: 9,
        has_status: 1,
        status: 11,
        message: "SIGSEGV",
        ..ok
    };
    pin(
        "OUTCOME crashed",
        "5d000000 20 00 5d00 0300000000000000
         04 02 02 00 00 01000000 0000000000000000 0000000000000000 0000000000000000 09000000
         00 0000000000000000 01 0b000000 0300000000000000 706466 0000000000000000
         0700000000000000 53494753454756 0000000000000000",
        &written(frame::kind::OUTCOME, 3, &crashed, &[], b""),
    );
}

#[test]
fn worker_link_frames_have_pinned_bytes() {
    let job = Job { operation: "to-text", tenant: "acme", remaining_us: 499_000 };
    pin(
        "JOB",
        "2d000000 30 00 2b00 0500000100000000
         0700000000000000 746f2d74657874 0400000000000000 61636d65 389d070000000000 0000000000000000
         cafe",
        &written(frame::kind::JOB, JOB_NUMBER, &job, &[], b"\xca\xfe"),
    );
    let plain = [
        ("CANCEL_JOB", frame::kind::CANCEL_JOB, JOB_NUMBER, "31 00 0800 0500000100000000"),
        ("DRAIN", frame::kind::DRAIN, 0, "32 00 0800 0000000000000000"),
        ("JOURNAL", frame::kind::JOURNAL, 0, "35 00 0800 0000000000000000"),
        ("READY", frame::kind::READY, 0, "40 00 0800 0000000000000000"),
        ("HEARTBEAT", frame::kind::HEARTBEAT, 0, "47 00 0800 0000000000000000"),
        ("STOPPING", frame::kind::STOPPING, 0, "48 00 0800 0000000000000000"),
    ];
    for (name, kind, number, header) in plain {
        let literal = format!("08000000 {header} 0000000000000000");
        pin(name, &literal, &written(kind, number, &Empty, &[], b""));
    }
    let arrival = (tag::ARRIVAL, &7_u64.to_le_bytes()[..]);
    pin(
        "RETURNED",
        "1a000000 4a 00 1a00 0500000100000000 0100000000000000 0a00 0800000000000000 0700000000000000",
        &written(frame::kind::RETURNED, JOB_NUMBER, &Empty, &[arrival], b""),
    );
    pin(
        "LIMITS",
        "0c000000 33 00 0c00 0000000000000000 03020000 0000000000000000",
        &written(frame::kind::LIMITS, 0, &Limits { max_in_flight: 0x0203 }, &[], b""),
    );
    pin(
        "RESULT",
        "0c000000 42 00 0800 0500000100000000 0000000000000000 646f6e65",
        &written(frame::kind::RESULT, JOB_NUMBER, &Empty, &[], b"done"),
    );
    let failed = Failed { code: "bad", message: "no", retryable: 1, fault: 2 };
    pin(
        "FAILED",
        "1f000000 43 00 1f00 0500000100000000
         0300000000000000 626164 0200000000000000 6e6f 01 02 0000000000000000",
        &written(frame::kind::FAILED, JOB_NUMBER, &failed, &[], b""),
    );
    pin(
        "PROGRESSED",
        "14000000 44 00 1400 0500000100000000 0000803f 0000000000000000 0000000000000000",
        &written(frame::kind::PROGRESSED, JOB_NUMBER, &Progress { fraction: 1.0, text: "" }, &[], b""),
    );
    pin(
        "STATUS",
        "17000000 45 00 1700 0000000000000000 0700000000000000 6c6f6164696e67 0000000000000000",
        &written(frame::kind::STATUS, 0, &Status { text: "loading" }, &[], b""),
    );
    pin(
        "EXTEND_START",
        "0c000000 46 00 0c00 0000000000000000 dc050000 0000000000000000",
        &written(frame::kind::EXTEND_START, 0, &Extend { more_ms: 1500 }, &[], b""),
    );
    let crashed = ProgramCrashed { signal: 11, message: "SIGSEGV" };
    pin(
        "PROGRAM_CRASHED",
        "1b000000 49 00 1b00 0500000100000000
         0b000000 0700000000000000 53494753454756 0000000000000000",
        &written(frame::kind::PROGRAM_CRASHED, JOB_NUMBER, &crashed, &[], b""),
    );
}

#[test]
fn protocol_page_lists_every_worker_capability() {
    let page = page();
    for (number, meaning) in [
        (capability::DISPATCH_THREAD, "sends heartbeats from a separate thread"),
        (capability::RESIZE, "understands LIMITS"),
        (capability::PREFETCH, "accepts [prefetched jobs]"),
        (capability::JOURNAL_HEARTBEATS, "can write heartbeats into its journal"),
    ] {
        assert!(page.contains(&format!("| {number} | {meaning}")), "{number}");
    }
    assert!(page.contains(&format!(
        "capabilities ({}: accepts extension 5",
        bulkhead_shared::client_protocol::capability::RUN_LIMIT
    )));
    assert!(page.contains(&format!("(The SDK runs up to {IN_FLIGHT_CEILING} jobs at once")));
}

fn page() -> String {
    std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/protocol.md")).unwrap()
}

#[test]
fn protocol_page_shows_the_bytes_of_hello() {
    let page = page();
    let (_, example) = page.split_once("(name `doc`, version `1`):\n\n```text\n").unwrap();
    let (example, _) = example.split_once("```").unwrap();
    // In each line of the example, the text after two spaces is an explanation.
    let literal: String = example.lines().filter_map(|line| line.split("  ").next()).collect();
    let meta = Meta::default().u16(1).u16(1).u8(1).u32(u32::MAX).u64(0).text("doc").text("1").end();
    let by_hand = frame(HELLO, 0, BULKHEAD, meta, b"");
    let by_hand: String = by_hand.iter().map(|byte| format!("{byte:02x}")).collect();
    pin("HELLO by hand", &literal, &by_hand);
}

#[test]
fn protocol_page_lists_every_frame_kind_and_reason() {
    let page = page();
    let named = [
        ("CLIENT_WELCOME", frame::kind::CLIENT_WELCOME, CLIENT_WELCOME),
        ("REFUSED", frame::kind::REFUSED, REFUSED),
        ("WORKER_WELCOME", frame::kind::WORKER_WELCOME, WORKER_WELCOME),
        ("SUBMIT", frame::kind::SUBMIT, SUBMIT),
        ("CANCEL", frame::kind::CANCEL, CANCEL),
        ("OUTCOME", frame::kind::OUTCOME, OUTCOME),
        ("PROGRESS", frame::kind::PROGRESS, PROGRESS),
        ("JOB", frame::kind::JOB, JOB),
        ("CANCEL_JOB", frame::kind::CANCEL_JOB, CANCEL_JOB),
        ("DRAIN", frame::kind::DRAIN, DRAIN),
        ("LIMITS", frame::kind::LIMITS, LIMITS),
        ("JOURNAL", frame::kind::JOURNAL, JOURNAL),
    ];
    for (name, real, by_hand) in named {
        assert_eq!(real, by_hand, "{name}");
        assert!(page.contains(&format!("**{name}** ({real})")), "{name}");
    }
    let rows = [
        ("READY", frame::kind::READY, READY),
        ("RESULT", frame::kind::RESULT, RESULT),
        ("FAILED", frame::kind::FAILED, FAILED),
        ("PROGRESSED", frame::kind::PROGRESSED, PROGRESSED),
        ("STATUS", frame::kind::STATUS, STATUS),
        ("EXTEND_START", frame::kind::EXTEND_START, EXTEND_START),
        ("HEARTBEAT", frame::kind::HEARTBEAT, HEARTBEAT),
        ("STOPPING", frame::kind::STOPPING, STOPPING),
        ("PROGRAM_CRASHED", frame::kind::PROGRAM_CRASHED, PROGRAM_CRASHED),
        ("RETURNED", frame::kind::RETURNED, RETURNED),
    ];
    for (name, real, by_hand) in rows {
        assert_eq!(real, by_hand, "{name}");
        assert!(page.contains(&format!("| {name} {real} |")), "{name}");
    }
    let reasons = |outcome: &str| -> Vec<(u8, String)> {
        let row = page.lines().find(|line| line.starts_with(&format!("| {outcome} |"))).unwrap();
        let cell = row.split('|').nth(2).unwrap();
        let pairs = cell.split(',').map(|pair| pair.trim().split_once(' ').unwrap());
        pairs.map(|(code, name)| (code.parse().unwrap(), name.to_owned())).collect()
    };
    let rejections: Vec<_> = RejectReason::ALL.iter().map(|r| (r.code(), r.name().to_owned())).collect();
    assert_eq!(reasons("2 rejected"), rejections);
    let crashes: Vec<_> = CrashReason::ALL.iter().map(|r| (r.code(), r.name().to_owned())).collect();
    assert_eq!(reasons("4 crashed"), crashes);
    assert_eq!(reasons("3 deadline_exceeded"), [(1, "queued".to_owned()), (2, "running".to_owned())]);
    for (code, name) in [(OK, "ok"), (FAILED_OUTCOME, "failed"), (CANCELLED, "cancelled")] {
        assert!(page.contains(&format!("| {code} {name} |")), "{name}");
    }
}

// Tests with a client that was written from the protocol page alone.

const SDK: &str = "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 100\ndeadline = \"60s\"\n\
                   deadline_max = \"90s\"\nmax_payload = \"1MiB\"\n";

#[test]
fn client_without_sdk_is_served() {
    let supervisor = Supervisor::start_with("max_payload = \"2MiB\"", SDK);
    let mut client = Client::dial(&supervisor);
    client.send(HELLO, BULKHEAD, client_hello(1, 1).end(), b"");
    let welcome = client.next();
    assert_eq!((welcome.kind, welcome.flags, welcome.payload.len()), (CLIENT_WELCOME, 0, 0), "{welcome:?}");
    let mut fields = Fields(&welcome.meta);
    assert_eq!(fields.u16(), 1, "version");
    assert!((2 << 20..3 << 20).contains(&fields.u32()), "largest frame: max_payload and a little");
    assert_eq!(fields.u64(), 7, "capabilities: a run limit, memory files, a cancellation unless begun");
    assert!(!fields.text().is_empty(), "the supervisor's version");
    assert_eq!(fields.end(), []);

    // The sizes include the largest inline payload and the smallest announced payload.
    for size in [0, 1, 1000, 65_535, 65_536, 65_537, 300_000, 1 << 20] {
        let payload: Vec<u8> = (0..size).map(|i| (i * 7 + i / 251) as u8).collect();
        let outcome = client.job("b", "echo", &payload);
        assert!(outcome.payload == payload, "{size} bytes came back as {}", outcome.payload.len());
        assert_eq!((outcome.kind(), outcome.executed, outcome.attempts), ((OK, 0), 1, 1), "{outcome:?}");
        assert_eq!((outcome.retryable, outcome.fault), (0, 0), "{outcome:?}");
        assert_eq!((outcome.bulkhead.as_str(), outcome.deadline_us), ("b", 60_000_000));
        assert_eq!((outcome.code.as_str(), outcome.status, outcome.retry_after_us), ("", None, None));
        assert_eq!(supervisor.worker_pids("b"), [outcome.pid]);
        assert!(outcome.queued_us < 60_000_000 && outcome.ran_us < 60_000_000);
    }

    // Concurrent jobs are distinguished by number. All 64 bits of the number are significant.
    let numbers = [7, u64::MAX, 0, 1 << 63];
    for number in numbers {
        let payload = number.to_le_bytes();
        client.send(SUBMIT, number, submit("b", "echo").end(), &payload);
    }
    let mut answered: Vec<u64> = numbers
        .map(|_| {
            let outcome = client.outcome();
            assert_eq!(outcome.payload, outcome.number.to_le_bytes());
            outcome.number
        })
        .to_vec();
    answered.sort_unstable();
    assert_eq!(answered, [0, 7, 1 << 63, u64::MAX]);

    // A frame can arrive in any number of pieces.
    for byte in frame(SUBMIT, 0, 9, submit("b", "echo").end(), b"bit by bit") {
        client.bytes(&[byte]);
    }
    assert_eq!(client.outcome().payload, b"bit by bit");
}

#[test]
fn client_without_sdk_receives_every_outcome() {
    let supervisor = Supervisor::start_with("max_payload = \"2MiB\"", SDK);
    let mut client = Client::connect(&supervisor);

    client.send(SUBMIT, 5, submit("b", "progress").end(), b"");
    let mut steps = Vec::new();
    let outcome = loop {
        let frame = client.next();
        if frame.kind == OUTCOME {
            break Outcome::read(&frame);
        }
        assert_eq!((frame.kind, frame.flags, frame.number), (PROGRESS, 0, 5), "{frame:?}");
        let mut fields = Fields(&frame.meta);
        steps.push((f32::from_bits(fields.u32()), fields.text()));
        fields.end();
    };
    assert_eq!((outcome.kind(), outcome.payload.as_slice()), ((OK, 0), &b"done"[..]));
    let expected = [0.25, 0.5, 0.75, 1.0].map(|fraction| (fraction, format!("step {}", fraction * 4.0)));
    assert_eq!(steps, expected);

    let failed = client.job("b", "fail", b"");
    assert_eq!((failed.kind(), failed.executed, failed.fault), ((FAILED_OUTCOME, 0), 1, 1), "{failed:?}");
    assert_eq!((failed.code.as_str(), failed.message.as_str()), ("bad_input", "the input is bad"));
    let crashed = client.job("b", "exit", b"7");
    assert_eq!((crashed.kind(), crashed.executed, crashed.status), ((CRASHED, 1), 2, Some(7)), "{crashed:?}");
    let crashed = client.job("b", "abort", b"");
    assert_eq!((crashed.kind(), crashed.status), ((CRASHED, 2), Some(6)), "{crashed:?}");

    // Waits until the next worker is ready, so that the next job does not spend its deadline in the queue.
    assert_eq!(client.job("b", "echo", b"").kind(), (OK, 0));
    client.send(SUBMIT, 6, submit_for("b", "yield", 100_000).end(), b"");
    let late = client.outcome();
    assert_eq!((late.kind(), late.executed, late.deadline_us), ((DEADLINE_EXCEEDED, 2), 1, 100_000));
    client.send(SUBMIT, 7, submit_for("b", "echo", u64::MAX).end(), b"");
    assert_eq!(client.outcome().deadline_us, 90_000_000, "clamped to deadline_max");

    client.send(SUBMIT, 8, submit("b", "yield").end(), b"");
    wait_for("the job runs", || (supervisor.number("b", "in_flight") == 1).then_some(()));
    client.send(CANCEL, 8, empty(), b"");
    assert_eq!(client.outcome().kind(), (CANCELLED, 0));
    // Cancelling an unknown or finished job has no effect.
    client.send(CANCEL, 999, empty(), b"");
    client.send(CANCEL, 8, empty(), b"");

    let unknown = client.job("nobody", "", b"");
    assert_eq!((unknown.kind(), unknown.executed, unknown.retryable), ((REJECTED, 3), 0, 0), "{unknown:?}");
    assert!(unknown.message.contains("nobody"), "{unknown:?}");
    // An oversized payload is rejected before the bytes arrive, and the bytes are discarded.
    let large = frame(SUBMIT, 0, 10, submit("b", "echo").end(), &vec![1; (1 << 20) + 1]);
    let (begin, rest) = large.split_at(100);
    client.bytes(begin);
    let too_large = client.outcome();
    assert_eq!((too_large.number, too_large.kind(), too_large.executed), (10, (REJECTED, 2), 0));
    client.bytes(rest);
    assert_eq!(client.job("b", "echo", b"and on it goes").payload, b"and on it goes");
}

#[test]
fn disconnecting_client_cancels_its_jobs() {
    let supervisor = Supervisor::start(SDK);
    let mut client = Client::connect(&supervisor);
    for number in 0..10 {
        client.send(SUBMIT, number, submit("b", "yield").end(), b"");
    }
    wait_for("one job runs and nine wait", || {
        let snapshot = supervisor.snapshot("b");
        (snapshot["in_flight"] == 1 && snapshot["queued"] == 9).then_some(())
    });
    drop(client);
    supervisor.wait_number("b", "cancelled", 10);
    supervisor.wait_number("b", "available", 1);
    assert_eq!(Client::connect(&supervisor).job("b", "echo", b"x").payload, b"x");
}

// Tests with a worker that was written from the protocol page alone.

const KEYS: &str = "max_in_flight = 2\nmax_queue = 10\nmax_result = 100000\ndeadline = \"60s\"\n\
                    grace = \"20s\"\nhealth = { heartbeat = \"200ms\", missed = 100 }\n";

#[test]
fn worker_without_sdk_serves_jobs() {
    let mut supervisor = Supervisor::start(&by_hand("w", KEYS));
    let mut client = Client::connect(&supervisor);
    for size in [0, 1, 65_536, 65_537, 100_000] {
        let payload: Vec<u8> = (0..size).map(|i| (i * 7 + i / 251) as u8).collect();
        let outcome = client.job("w", "echo", &payload);
        assert!(outcome.payload == payload, "{size} bytes came back as {}", outcome.payload.len());
    }

    let described = String::from_utf8(client.job("w", "describe", b"").payload).unwrap();
    let (tenant, rest) = described.split_once(' ').unwrap();
    let (remaining_us, trace) = rest.split_once(' ').unwrap();
    assert_eq!((tenant, trace), ("acme", "none"));
    let remaining_us: u64 = remaining_us.parse().unwrap();
    assert!(remaining_us > 1_000_000 && remaining_us <= 60_000_000, "{remaining_us} µs of a minute remain");
    let traced = submit("w", "describe").extensions(&[(1, TRACEPARENT.as_bytes())]);
    client.send(SUBMIT, 3, traced, b"");
    assert!(client.outcome().payload.ends_with(TRACEPARENT.as_bytes()));

    for payload in [&b""[..], b"line 7", &[7; 60_000], &[8; 65_536]] {
        let failed = client.job("w", "fail", payload);
        assert_eq!(
            (failed.kind(), failed.fault, failed.retryable),
            ((FAILED_OUTCOME, 0), 1, 1),
            "{failed:?}"
        );
        assert_eq!((failed.code.as_str(), failed.message.as_str()), ("bad_input", "größer als erlaubt"));
        assert!(failed.payload == payload, "{} bytes came with the failure", failed.payload.len());
    }
    let program = client.job("w", "program", b"");
    assert_eq!((program.kind(), program.status), ((CRASHED, 2), Some(11)), "{program:?}");

    client.send(SUBMIT, 4, submit("w", "progress").end(), b"");
    let progress = client.next();
    assert_eq!((progress.kind, progress.number), (PROGRESS, 4), "{progress:?}");
    let mut fields = Fields(&progress.meta);
    assert_eq!((f32::from_bits(fields.u32()), fields.text()), (0.25, "page 1 of 4".to_owned()));
    assert_eq!(client.outcome().payload, b"read");

    client.send(SUBMIT, 5, submit("w", "until-cancelled").end(), b"");
    wait_for("the job runs", || (supervisor.number("w", "in_flight") == 1).then_some(()));
    client.send(CANCEL, 5, empty(), b"");
    assert_eq!(client.outcome().kind(), (CANCELLED, 0));
    supervisor.wait_number("w", "available", 2);

    assert_eq!(client.job("w", "large", b"").payload.len(), 100_000);
    let large = client.job("w", "too-large", b"");
    assert_eq!((large.kind(), large.code.as_str()), ((FAILED_OUTCOME, 0), "result_too_large"), "{large:?}");
    assert_eq!(supervisor.number("w", "restarts"), 0, "one worker ran all jobs");
    assert_eq!(supervisor.number("w", "late_replies"), 1, "only the cancelled job has a late reply");
    let status = supervisor.snapshot("w")["workers"][0]["status"].clone();
    assert_eq!(status, "loading the model");

    // The worker announces its exit with STOPPING, and the supervisor starts another worker.
    let before = supervisor.worker_pids("w");
    assert_eq!(client.job("w", "last", b"").payload, b"my last");
    let after = client.job("w", "echo", b"next");
    assert_eq!(after.payload, b"next");
    assert!(!before.contains(&after.pid));
    assert_eq!(supervisor.number("w", "crashed"), 1, "only the job `program` crashed");
    supervisor.signal(nix::sys::signal::Signal::SIGTERM);
    assert_eq!(supervisor.wait().code(), Some(0));
    let log = supervisor.log();
    assert!(!log.contains("panicked"), "an assertion of the test worker failed:\n{log}");
}

#[test]
fn failed_start_shows_last_worker_status() {
    let keys = format!("{KEYS}restart = {{ backoff = \"10ms\", backoff_max = \"60s\", max = 1 }}\n");
    let supervisor = Supervisor::start(&by_hand("unready", &keys));
    wait_for("the bulkhead has failed", || {
        (supervisor.snapshot("unready")["state"] == "failed").then_some(())
    });
    let detail = supervisor.snapshot("unready")["detail"].as_str().unwrap_or_default().to_owned();
    assert!(detail.contains("the model file is missing"), "{detail}");
    let refused = Client::connect(&supervisor).job("unready", "", b"");
    assert_eq!(refused.kind(), (REJECTED, 15), "{refused:?}");
    assert!(refused.message.contains("the model file is missing"), "{refused:?}");
}

/// The supervisor must still serve other jobs after each violation.
#[test]
fn invalid_signal_number_is_a_protocol_violation() {
    let keys = format!("{KEYS}restart = {{ backoff = \"1ms\", backoff_max = \"1ms\", max = 1000 }}\n");
    let supervisor = Supervisor::start(&by_hand("w", &keys));
    let mut client = Client::connect(&supervisor);
    for signal in [i32::MIN, -1, 0, 65, i32::MAX] {
        let told = client.job("w", "signal", &signal.to_le_bytes());
        assert_eq!(told.kind(), (CRASHED, 5), "{signal}: {told:?}");
    }
    for signal in [1_i32, 64] {
        let told = client.job("w", "signal", &signal.to_le_bytes());
        assert_eq!((told.kind(), told.status), ((CRASHED, 2), Some(signal)), "{told:?}");
    }
}

// Later versions.

#[test]
fn outcome_reports_the_jobs_run_limit() {
    let supervisor = Supervisor::start(SDK);
    let mut client = Client::connect(&supervisor);
    let long = 50_000_000_u64.to_le_bytes();
    client.send(SUBMIT, 1, submit("b", "echo").extensions(&[(5, &long)]), b"x");
    let told = client.next();
    assert_eq!(Outcome::read(&told).payload, b"x");
    assert!(told.extensions().contains(&(5, long.to_vec())), "{told:?}");
    let limit = 250_000_u64.to_le_bytes();
    client.send(SUBMIT, 2, submit("b", "yield").extensions(&[(5, &limit)]), b"");
    let outcome = client.outcome();
    assert_eq!((outcome.kind(), outcome.deadline_us), ((3, 2), 60_000_000), "{outcome:?}");
    assert!(outcome.ran_us >= 250_000, "{outcome:?}");
    for wrong in [&[][..], &[1; 7], &[0; 8], &[1; 9]] {
        client.send(SUBMIT, 3, submit("b", "echo").extensions(&[(5, wrong)]), b"x");
        let outcome = client.outcome();
        assert_eq!((outcome.kind(), outcome.executed), ((REJECTED, 1), 0), "{outcome:?}");
        assert!(outcome.message.contains("run limit"), "{outcome:?}");
    }
    client.send(SUBMIT, 4, submit("b", "echo").end(), b"x");
    let told = client.next();
    assert!(
        told.extensions().iter().all(|(tag, _)| *tag != 5),
        "a job without a run limit has none in its outcome: {told:?}"
    );
}

#[test]
fn unknown_client_data_is_ignored_unless_critical() {
    let supervisor = Supervisor::start(SDK);
    let mut client = Client::dial(&supervisor);
    client.send(HELLO, BULKHEAD, client_hello(1, 7).extensions(&[(9, b"new"), (1, b""), (9, b"")]), b"");
    let welcome = client.next();
    assert_eq!((welcome.kind, Fields(&welcome.meta).u16()), (CLIENT_WELCOME, 1), "the common version");

    // Unknown frame kinds, unknown flags and invalid metadata of unknown frames are ignored.
    client.send(NEWER, 1, Meta(b"\xffanything".to_vec()), b"payload");
    client.send(NEWER, 2, Meta::default(), &vec![3; 300_000]);
    client.bytes(&frame(NEWER + 1, 0xfe, 3, empty(), b""));
    client.bytes(&frame(SUBMIT, 0xff, 4, submit("b", "echo").extensions(&[(0x7fff, &[0; 999])]), b"x"));
    let outcome = client.outcome();
    assert_eq!((outcome.number, outcome.payload.as_slice()), (4, &b"x"[..]), "{outcome:?}");
    client.send(SUBMIT, 5, submit("b", "echo").extensions(&[(1, b"\xff\xfenot a trace")]), b"y");
    assert_eq!(client.outcome().payload, b"y");
}

#[test]
fn unknown_critical_client_data_is_refused() {
    let supervisor = Supervisor::start(SDK);
    for payload in [&b""[..], &[1; 300_000]] {
        let mut client = Client::connect(&supervisor);
        client.send(SUBMIT, 1, submit("b", "yield").end(), b"");
        // The supervisor can close the connection before everything is written.
        let _ = client.socket.write_all(&frame(NEWER, CRITICAL, 1, empty(), payload));
        let (reason, sentence) = client.refusal();
        assert_eq!(reason, 1);
        assert!(sentence.contains(&NEWER.to_string()), "{sentence}");
    }
    let mut client = Client::dial(&supervisor);
    client.send(HELLO, BULKHEAD, client_hello(1, 1).extensions(&[(0x8009, b"new")]), b"");
    let (reason, sentence) = client.refusal();
    assert!(reason == 1 && sentence.contains("0x8009"), "{sentence}");

    let mut client = Client::connect(&supervisor);
    client.send(SUBMIT, 2, submit("b", "echo").extensions(&[(0x8009, b"")]), b"");
    let outcome = client.outcome();
    assert_eq!((outcome.number, outcome.kind(), outcome.executed), (2, (REJECTED, 1), 0), "{outcome:?}");
    assert!(outcome.message.contains("0x8009"), "{outcome:?}");
    assert_eq!(
        client.job("b", "echo", b"z").payload,
        b"z",
        "the connection stays open after the rejected job"
    );
    client.send(CANCEL, 2, Meta::default().extensions(&[(0x8009, b"")]), b"");
    let (reason, sentence) = client.refusal();
    assert!(reason == 1 && sentence.contains("0x8009"), "{sentence}");
}

#[test]
fn metadata_with_wrong_length_is_rejected() {
    let supervisor = Supervisor::start(SDK);
    // New fields must be extensions, so a HELLO of another length is an error.
    let longer = client_hello(1, 1).end().u32(7);
    let shorter = Meta::default().u16(1).u16(1).u8(1).u32(u32::MAX).u64(0).text("by hand").end();
    let lying = Meta::default().u16(1).u16(1).u8(1).u32(u32::MAX).u64(0).u64(1 << 40).end();
    for meta in [longer, shorter, lying, Meta::default()] {
        let mut client = Client::dial(&supervisor);
        client.send(HELLO, BULKHEAD, meta, b"");
        let (reason, sentence) = client.refusal();
        assert!(reason == 1 && sentence.contains("metadata"), "{sentence}");
    }
    let mut client = Client::connect(&supervisor);
    for meta in [submit("b", "echo").end().u8(0), submit("b", "echo"), Meta(vec![0xff; 65_535])] {
        client.send(SUBMIT, 1, meta, b"");
        let outcome = client.outcome();
        assert_eq!((outcome.number, outcome.kind()), (1, (REJECTED, 1)), "{outcome:?}");
        assert!(outcome.message.contains("metadata"), "{outcome:?}");
    }
    assert_eq!(client.job("b", "echo", b"x").payload, b"x");
}

#[test]
fn version_mismatch_names_both_version_ranges() {
    let supervisor = Supervisor::start(SDK);
    for (oldest, newest) in [(2, 3), (40, u16::MAX), (0, 0), (2, 1)] {
        let mut client = Client::dial(&supervisor);
        client.send(HELLO, BULKHEAD, client_hello(oldest, newest).end(), b"");
        let (reason, sentence) = client.refusal();
        assert_eq!(reason, 1);
        assert!(sentence.contains(&format!("{oldest} to {newest}")), "{sentence}");
        assert!(sentence.contains("version 1"), "{sentence}");
    }
    for (oldest, newest) in [(0, 1), (1, 1), (0, 9), (1, u16::MAX)] {
        let mut client = Client::dial(&supervisor);
        client.send(HELLO, BULKHEAD, client_hello(oldest, newest).end(), b"");
        assert_eq!(client.next().kind, CLIENT_WELCOME);
    }
}

/// The supervisor kills a worker that sends unknown data marked as critical.
#[test]
fn unknown_worker_data_is_ignored_unless_critical() {
    let supervisor = Supervisor::start(&by_hand("w", KEYS));
    let mut client = Client::connect(&supervisor);
    assert_eq!(client.job("w", "newer", b"").payload, b"known");
    assert_eq!(supervisor.number("w", "restarts"), 0);
    for operation in ["critical-frame", "critical-in-failed", "critical-in-result"] {
        let outcome = client.job("w", operation, b"");
        assert_eq!((outcome.kind(), outcome.executed), ((CRASHED, 5), 2), "{operation}: {outcome:?}");
        assert_eq!(client.job("w", "echo", b"x").payload, b"x");
    }
}
