//! Upgrades: the supervisor's program is replaced while clients use it. Each test runs real processes under a stand-in
//! for the service manager. The workers record how many jobs ran at once, and whether a job began twice.

mod failures;
mod load;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use bulkhead_client::blocking::Client;
use bulkhead_shared::RejectReason;
use bulkhead_shared::client_protocol::{
    Hello, OutcomeMessage, Refused, Submit, client_capability, outcome_code, role,
};
use bulkhead_shared::codec::{self, Message, tag};
use bulkhead_shared::connection::{BufferPool, Outbox, Payload};
use bulkhead_shared::frame::{HEADER_BYTES, Header, MAGIC, kind};
use bulkhead_shared::memory_files::{LeaseRef, LeaseRequest, is_whole, receive_with_files};
use bulkhead_shared::worker_protocol::Empty;
use bulkhead_tests::http::{KeptAlive, Place};
use bulkhead_tests::manager::Manager;
use bulkhead_tests::{PATIENCE, Supervisor, is_alive, kill_pid, wait_for};
use nix::sys::signal::Signal;
use nix::sys::wait::WaitStatus;
use serde_json::Value;

const ONE: &str = "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nprocesses = 2\nmax_in_flight = 2\nmax_queue = 1000\n\
                   deadline = \"60s\"\ncwd = \".\"\n";

fn start(bulkheads: &str) -> Manager {
    Manager::start(tempfile::tempdir().unwrap(), "", bulkheads, &[])
}

/// Starts a service with a `jobs_http` listener, and returns the listener's address. The token is
/// `a-token-for-the-jobs`.
fn start_with_jobs_http(bulkheads: &str) -> (Manager, Place) {
    let folder = tempfile::tempdir().unwrap();
    let token = folder.path().join("jobs");
    std::fs::write(&token, "a-token-for-the-jobs").unwrap();
    std::fs::set_permissions(&token, std::fs::Permissions::from_mode(0o600)).unwrap();
    let manager = Manager::start(folder, JOBS_HTTP, &with_access(bulkheads), &[]);
    let address = wait_for("the log has the address", || {
        let log = manager.log();
        let (_, rest) = log.split_once("jobs_http on ")?;
        rest.split(char::is_whitespace).next()?.parse().ok()
    });
    (manager, Place::Tcp(address))
}

const JOBS_HTTP: &str = "jobs_http = \"127.0.0.1:0\"";

fn with_access(bulkheads: &str) -> String {
    let uid = nix::unistd::getuid();
    format!("[[access]]\ntoken_file = \"jobs\"\n[[access]]\nuid = {uid}\n{bulkheads}")
}

fn upgrade(manager: &Manager, arguments: &[&str]) -> Output {
    let mut command = manager.command();
    bulkhead_tests::output(command.arg("--json").arg("upgrade").args(arguments))
}

/// Upgrades the supervisor. Returns the PID of the new program.
fn upgraded(manager: &Manager) -> u32 {
    upgraded_with(manager, &[])
}

fn upgraded_with(manager: &Manager, arguments: &[&str]) -> u32 {
    let before = manager.main();
    let output = upgrade(manager, arguments);
    assert_eq!(output.status.code(), Some(0), "{output:?}\n{}", manager.log());
    let lines = String::from_utf8(output.stdout).unwrap();
    let steps: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let names: Vec<&str> = steps.iter().map(|step| step["step"].as_str().unwrap()).collect();
    assert_eq!(names, ["started", "ready", "switched", "finished"]);
    let main = steps[3]["pid"].as_u64().unwrap() as u32;
    assert_ne!(main, before);
    wait_for("the service manager knows the new main process", || (manager.main() == main).then_some(()));
    wait_for("the old program has exited", || (manager.supervisors() == [main]).then_some(()));
    assert_eq!(manager.restarts(), 0);
    main
}

fn get(manager: &Manager, path: &str) -> Value {
    let place = Place::Unix(manager.folder.path().join("admin.sock"));
    let answer = place.ask("GET", path, &[], b"");
    assert_eq!(answer.status, 200, "{path}");
    serde_json::from_slice(&answer.body).unwrap()
}

/// A client that encodes frames without the client library.
struct Raw(UnixStream);

impl Raw {
    fn connect(path: &Path) -> Self {
        Self::connect_with(path, 0)
    }

    fn connect_with(path: &Path, capabilities: u64) -> Self {
        let mut raw = Self(UnixStream::connect(path).unwrap());
        raw.0.set_read_timeout(Some(PATIENCE)).unwrap();
        let hello = Hello {
            version_min: 1,
            version_max: 1,
            role: role::CLIENT,
            frame_bytes_max: u32::MAX,
            capabilities,
            name: "raw",
            version: "0",
        };
        raw.send(kind::HELLO, MAGIC, &hello);
        assert_eq!(raw.frame().0.kind, kind::CLIENT_WELCOME);
        raw
    }

    fn submit_bytes(number: u64, operation: &str, payload: &[u8]) -> Vec<u8> {
        Self::submit_bytes_with(number, operation, &[], payload)
    }

    fn submit_bytes_with(
        number: u64,
        operation: &str,
        extensions: &[(u16, &[u8])],
        payload: &[u8],
    ) -> Vec<u8> {
        let submit = Submit {
            bulkhead: "b",
            operation,
            tenant: "",
            deadline_us: 0,
            priority: 1,
            idempotent: 0,
            cost: 1,
        };
        let mut bytes = vec![0; HEADER_BYTES];
        codec::encode(&submit, extensions, &mut bytes).unwrap();
        let metadata_length = (bytes.len() - HEADER_BYTES) as u16;
        bytes.extend_from_slice(payload);
        let length = (bytes.len() - HEADER_BYTES) as u32;
        let header = Header { length, kind: kind::SUBMIT, flags: 0, metadata_length, number };
        bytes[..HEADER_BYTES].copy_from_slice(&header.encode());
        bytes
    }

    fn submit(&mut self, number: u64, operation: &str, payload: &[u8]) {
        self.0.write_all(&Self::submit_bytes(number, operation, payload)).unwrap();
    }

    /// Submits a job whose payload of 100,000 bytes is in a memory file.
    fn submit_leased(&mut self, number: u64, operation: &str, lease: LeaseRef) {
        let named = LeaseRef { bytes: 100_000, ..lease }.to_bytes();
        let bytes = Self::submit_bytes_with(number, operation, &[(tag::LEASE, &named)], b"");
        self.0.write_all(&bytes).unwrap();
    }

    /// Requests a lease and accepts it. Returns the lease, the payload file and the result file.
    fn lease(&mut self) -> (LeaseRef, std::fs::File, OwnedFd) {
        self.send(kind::LEASE, 1, &LeaseRequest { bulkhead: "b", tenant: "", bytes: 1 << 20 });
        let (mut bytes, mut files) = ([0; 1024], Vec::new());
        let length =
            wait_for("the lease arrives", || receive_with_files(&self.0, &mut bytes, &mut files).ok());
        assert_eq!(Header::decode(bytes.first_chunk().unwrap()).kind, kind::LEASED);
        let (lease, _) = codec::decode::<LeaseRef>(&bytes[HEADER_BYTES..length], &[]).unwrap();
        self.send(kind::LEASE_TAKEN, lease.lease, &Empty);
        let [payload, result] = <[OwnedFd; 2]>::try_from(files).unwrap();
        (lease, payload.into(), result)
    }

    /// Sends a frame that has no payload.
    fn send<'a>(&mut self, kind: u8, number: u64, message: &impl Message<'a>) {
        let mut outbox = Outbox::default();
        outbox.push(kind, number, message, &[], Payload::NONE).unwrap();
        outbox.flush(&self.0, &mut BufferPool::default()).unwrap();
    }

    fn frame(&mut self) -> (Header, Vec<u8>) {
        let mut header = [0; HEADER_BYTES];
        self.0.read_exact(&mut header).unwrap();
        let header = Header::decode(&header);
        let mut rest = vec![0; header.length as usize];
        self.0.read_exact(&mut rest).unwrap();
        (header, rest)
    }

    /// Reads the next outcome. Returns the job's number, the outcome and the reason.
    fn outcome(&mut self) -> (u64, (u8, u8)) {
        loop {
            let (header, rest) = self.frame();
            if header.kind == kind::OUTCOME {
                let metadata = &rest[..header.metadata_length.into()];
                let (message, _) = codec::decode::<OutcomeMessage<'_>>(metadata, &[]).unwrap();
                return (header.number, (message.outcome, message.reason));
            }
        }
    }

    fn outcome_text(&mut self) -> String {
        match self.outcome() {
            (_, (0, 0)) => "ok".into(),
            other => format!("raw: {other:?}"),
        }
    }
}

#[test]
fn jobs_in_the_old_program_count_towards_the_limit() {
    let manager = start(&ONE.replace("processes = 2\nmax_in_flight = 2", "processes = 1\nmax_in_flight = 1"));
    let gate = manager.folder.path().join("gate");
    let mut first = Raw::connect(&manager.socket());
    first.submit(1, &format!("steps:wait {}", gate.display()), b"");
    wait_for("the job runs", || (get(&manager, "/v1/bulkheads/b")["in_flight"] == 1).then_some(()));
    let old = manager.main();
    // The rest of a request is sent after the upgrade.
    let mut half = Raw::connect(&manager.socket());
    let bytes = Raw::submit_bytes(7, "", b"half");
    half.0.write_all(&bytes[..20]).unwrap();
    let output = upgrade(&manager, &[]);
    assert_eq!(output.status.code(), Some(0), "{output:?}\n{}", manager.log());
    let new = wait_for("the main process changes", || Some(manager.main()).filter(|&main| main != old));
    assert!(is_alive(old), "the old program has a job");
    half.0.write_all(&bytes[20..]).unwrap();
    // On a connection with a running job, a new job waits until that job has ended.
    first.submit(2, "", b"");
    wait_for("the job waits in the new program", || {
        let snapshot = get(&manager, "/v1/bulkheads/b");
        assert_eq!(snapshot["in_flight"], 0, "{snapshot}");
        (snapshot["queued"] == 1 && snapshot["limit"] == 0).then_some(())
    });
    assert_eq!(upgrade(&manager, &[]).status.code(), Some(75), "the old program still has a job");
    std::fs::write(&gate, "").unwrap();
    assert_eq!(first.outcome(), (1, (0, 0)));
    assert_eq!(half.outcome(), (7, (0, 0)));
    assert_eq!(first.outcome(), (2, (0, 0)));
    wait_for("the old program has exited", || (manager.supervisors() == [new]).then_some(()));
    wait_for("all permits are free", || (get(&manager, "/v1/bulkheads/b")["limit"] == 1).then_some(()));
    let finished = wait_for("the new program reports that the upgrade has finished", || {
        let place = Place::Unix(manager.folder.path().join("admin.sock"));
        let events = place.ask("GET", "/v1/events?follow=false", &[], b"");
        let events = String::from_utf8(events.body).unwrap();
        events.lines().find(|line| line.contains("upgrade_finished")).map(str::to_owned)
    });
    let finished: Value = serde_json::from_str(&finished).unwrap();
    assert_eq!(finished["pid"], new);
    assert!(finished["seq"].as_u64().unwrap() > 1 << 24, "{finished}");
}

#[test]
fn jobs_waiting_in_the_old_program_take_places_in_the_queue() {
    let keys = "processes = 1\nmax_in_flight = 1\nmax_queue = 3";
    let manager = start(&ONE.replace("processes = 2\nmax_in_flight = 2\nmax_queue = 1000", keys));
    let shows = |fields: [&str; 3], values: [u64; 3]| {
        let snapshot = get(&manager, "/v1/bulkheads/b");
        (fields.map(|field| snapshot[field].as_u64().unwrap()) == values).then_some(())
    };
    let gate = manager.folder.path().join("gate");
    let operation = format!("steps:wait {}", gate.display());
    let client = Client::connect(manager.socket()).unwrap();
    let jobs = [(); 3].map(|()| client.job("b", "").operation(&operation).start().unwrap());
    wait_for("two jobs wait", || shows(["in_flight", "queued", "queue_available"], [1, 2, 1]));
    let output = upgrade(&manager, &[]);
    assert_eq!(output.status.code(), Some(0), "{output:?}\n{}", manager.log());
    let fields = ["predecessor_jobs", "queued", "queue_available"];
    wait_for("the new program counts the waiting jobs", || shows(fields, [3, 0, 1]));
    std::fs::write(&gate, "").unwrap();
    jobs.into_iter().for_each(|job| drop(job.wait().unwrap()));
    wait_for("the queue is empty", || shows(fields, [0, 0, 3]));
}

#[test]
fn job_survives_upgrade_while_its_payload_arrives() {
    let manager = start(&format!("{ONE}{}", ONE.replace("bulkhead.b", "bulkhead.c")));
    let old = manager.main();
    let of_c = get(&manager, "/v1/bulkheads/c")["workers"][0]["pid"].as_u64().unwrap() as u32;
    let mut raw = Raw::connect(&manager.socket());
    let bytes = Raw::submit_bytes(1, "", &[7; 1 << 20]);
    raw.0.write_all(&bytes[..1000]).unwrap();
    let output = upgrade(&manager, &[]);
    assert_eq!(output.status.code(), Some(0), "{output:?}\n{}", manager.log());
    wait_for("the old program has stopped its idle workers", || (!is_alive(of_c)).then_some(()));
    assert!(manager.supervisors().contains(&old), "the old program awaits a payload");
    raw.0.write_all(&bytes[1000..]).unwrap();
    assert_eq!(raw.outcome(), (1, (0, 0)));
    drop(raw);
    wait_for("the old program has exited", || (manager.supervisors() == [manager.main()]).then_some(()));
}

#[test]
fn old_program_serves_http_while_it_waits_for_leases() {
    let manager = start(ONE);
    let mut raw = Raw::connect(&manager.socket());
    raw.send(kind::LEASE, 1, &LeaseRequest { bulkhead: "b", tenant: "", bytes: 1 << 20 });
    let (header, metadata) = raw.frame();
    assert_eq!(header.kind, kind::LEASED);
    let (lease, _) = codec::decode::<LeaseRef>(&metadata, &[]).unwrap();
    raw.send(kind::LEASE_TAKEN, lease.lease, &Empty);
    // The client does not return the lease when the old program recalls it.
    let upgrading = Upgrading::start(&manager);
    upgrading.until("ready");
    let place = Place::Unix(manager.folder.path().join("admin.sock"));
    let events = place.ask("GET", "/v1/events?follow=false", &[], b"").text();
    assert!(events.contains("upgrade_started") && !events.contains("upgrade_switched"), "{events}");
    upgrading.until("switched");
}

/// A waiting request hides the return of a lease from the old program.
#[test]
fn waiting_job_does_not_wait_for_return_of_lease() {
    let manager = start(ONE);
    let old = manager.main();
    let gate = manager.folder.path().join("gate");
    let mut clients = [(); 2].map(|()| Raw::connect(&manager.socket()));
    let leases = clients.each_mut().map(|client| {
        let (lease, payload, result) = client.lease();
        payload.write_all_at(&[7; 100_000], 0).unwrap();
        client.submit_leased(1, &format!("steps:wait {}", gate.display()), lease);
        (lease, result)
    });
    wait_for("the jobs run", || (get(&manager, "/v1/bulkheads/b")["in_flight"] == 2).then_some(()));
    let upgrading = Upgrading::start(&manager);
    upgrading.until_switched(&manager, old);
    let [plain, leased] = &mut clients;
    plain.submit(2, "", b"");
    leased.submit_leased(2, "", leases[1].0);
    let opened = Instant::now();
    std::fs::write(&gate, "").unwrap();
    assert_eq!(plain.outcome(), (1, (0, 0)));
    assert_eq!(leased.outcome(), (1, (0, 0)));
    // Leases do not move to the new program.
    assert_eq!(leased.outcome(), (2, (outcome_code::REJECTED, RejectReason::Overloaded.code())));
    assert_eq!(plain.outcome(), (2, (0, 0)));
    // The old program would otherwise have revoked the leases before it moved the connections.
    let are_whole = leases.iter().all(|(_, result)| is_whole(result));
    // After five seconds, the files may be freed.
    assert!(are_whole || opened.elapsed() > Duration::from_secs(4), "the results cannot be read any more");
    for (client, (lease, _)) in clients.iter_mut().zip(&leases) {
        client.send(kind::LEASE_RETURNED, lease.lease, &Empty);
        client.submit(3, "", b"");
        assert_eq!(client.outcome(), (3, (0, 0)));
    }
    wait_for("the old program has exited", || (manager.supervisors() == [manager.main()]).then_some(()));
    assert!(leases.iter().all(|(_, result)| !is_whole(result)), "the old program has freed the files");
    assert_eq!((upgrading.end().0, manager.restarts()), (Some(0), 0));
}

#[test]
fn new_configuration_applies_to_jobs_on_old_http_connections() {
    let small = format!("{ONE}max_payload = \"64KiB\"\n");
    let (manager, jobs_http) = start_with_jobs_http(&small);
    let job = |connection: &mut KeptAlive, bulkhead: &str, payload: &[u8]| {
        let path = format!("/v1/bulkheads/{bulkhead}/jobs");
        let answer = connection.ask("POST", &path, &["Authorization: Bearer a-token-for-the-jobs"], payload);
        let answer = answer.expect("the connection is open");
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(answer.body, payload);
    };
    let mut connections = [(); 2].map(|()| jobs_http.keep_alive());
    connections.iter_mut().for_each(|connection| job(connection, "b", b"x"));
    let new = format!("{ONE}{}", ONE.replace("bulkhead.b", "bulkhead.c"));
    manager.configure(JOBS_HTTP, &with_access(&new));
    let upgrading = Upgrading::start(&manager);
    upgrading.until("switched");
    job(&mut connections[0], "c", b"x");
    job(&mut connections[1], "b", &[7; 100 << 10]);
}

#[test]
fn drain_waits_for_jobs_in_the_old_program() {
    let two = ONE.replace("bulkhead.b", "bulkhead.c");
    let manager = start(&format!("{ONE}{two}tenants = {{ isolate = true }}\n"));
    let gate = manager.folder.path().join("gate");
    let operation = format!("steps:wait {}", gate.display());
    let client = Client::connect(manager.socket()).unwrap();
    let job = |bulkhead: &str, tenant: &str| {
        client.job(bulkhead, "").operation(&operation).tenant(tenant).start().unwrap()
    };
    let jobs = [job("b", ""), job("c", "x"), job("c", "y")];
    let shows = |bulkhead: &str, field: &str, count: u64| {
        (get(&manager, &format!("/v1/bulkheads/{bulkhead}"))[field] == count).then_some(())
    };
    wait_for("the jobs run", || shows("b", "in_flight", 1).and(shows("c", "in_flight", 2)));
    let drain = |arguments: &[&str]| {
        let mut command = manager.command();
        command.arg("drain").args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let mut waiting = drain(&["b", "--wait"]);
    wait_for("the bulkhead drains", || {
        (get(&manager, "/v1/bulkheads/b")["state"] == "draining").then_some(())
    });
    let output = upgrade(&manager, &[]);
    assert_eq!(output.status.code(), Some(0), "{output:?}\n{}", manager.log());
    for (bulkhead, left) in [("b", 1), ("c", 2)] {
        shows(bulkhead, "predecessor_jobs", left).expect("the snapshot counts jobs of the old program");
        let late = drain(&[bulkhead, "--wait=50ms"]).wait_with_output().unwrap();
        let text = String::from_utf8(late.stderr).unwrap();
        assert_eq!(late.status.code(), Some(124), "{text}");
        assert!(text.contains(&format!("jobs left: {left}")), "{text}");
    }
    assert!(waiting.try_wait().unwrap().is_none(), "the job in the old program is still running");
    std::fs::write(&gate, "").unwrap();
    jobs.into_iter().for_each(|job| drop(job.wait().unwrap()));
    for child in [waiting, drain(&["--all", "--wait"])] {
        let drained = child.wait_with_output().unwrap();
        assert_eq!(drained.status.code(), Some(0), "{drained:?}");
    }
    wait_for("no jobs are left", || shows("b", "predecessor_jobs", 0).and(shows("c", "predecessor_jobs", 0)));
}

#[test]
fn operator_changes_survive_an_upgrade() {
    let two = ONE.replace("bulkhead.b", "bulkhead.c");
    let manager = start(&format!("{ONE}{two}"));
    let resize = |arguments: &[&str]| {
        let output = manager.command().arg("resize").args(arguments).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    };
    resize(&["b", "--processes", "3", "--rate", "500"]);
    resize(&["c", "--breaker", "forced_open"]);
    let drained = manager.command().args(["drain", "c"]).output().unwrap();
    assert!(drained.status.success(), "{drained:?}");
    upgraded(&manager);
    let (b, c) = (get(&manager, "/v1/bulkheads/b"), get(&manager, "/v1/bulkheads/c"));
    assert_eq!((&b["processes"], &b["rate_limit"]["per_second"]), (&3.into(), &500.0.into()), "{b}");
    assert_eq!((&c["breaker"], &c["state"]), (&"forced_open".into(), &"draining".into()), "{c}");
    resize(&["b", "--max-queue", "20"]);
    wait_for("the third worker is ready", || (get(&manager, "/v1/bulkheads/b")["limit"] == 6).then_some(()));
}

/// Sets values at runtime that are valid together, but not with the values in the file. The bulkhead's value in `b`
/// depends on the value of a tenant. In `c`, the tenant's value depends on the value of the bulkhead.
#[test]
fn live_limits_that_depend_on_each_other_survive_an_upgrade() {
    let isolated = "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nprocesses = 2\nmax_in_flight = 4\nmax_queue = 1\n\
                    adaptive = { target = \"50ms\", min = 1, max = 4 }\ntenants = { isolate = true, max_active = 3 }\n";
    let small = "[bulkhead.b.tenant.acme]\nmax_in_flight = 2\n";
    let manager = start(&format!("{isolated}{small}{}", isolated.replace("bulkhead.b", "bulkhead.c")));
    let place = Place::Unix(manager.folder.path().join("admin.sock"));
    let patch = |path: &str, body: &str| {
        let path = format!("/v1/bulkheads/{path}");
        let answer = place.ask("PATCH", &path, &["Content-Type: application/json"], body.as_bytes());
        assert_eq!(answer.status, 200, "{path}: {}", String::from_utf8_lossy(&answer.body));
    };
    // Each bulkhead or tenant needs at least `adaptive.max` permits.
    patch("b/tenants/acme", r#"{"max_in_flight": 4}"#);
    patch("b", r#"{"processes": 1}"#);
    patch("c", r#"{"processes": 4}"#);
    patch("c/tenants/acme", r#"{"max_in_flight": 1}"#);
    upgraded(&manager);
    let processes = |name: &str| get(&manager, &format!("/v1/bulkheads/{name}"))["processes"].clone();
    assert_eq!((processes("b"), processes("c")), (1.into(), 4.into()));
}

#[test]
fn followed_events_continue_with_the_new_program() {
    let manager = start(ONE);
    let mut command = manager.command();
    command.args(["--json", "events", "--follow", "--bulkhead", "b", "--kind", "limits_changed"]);
    command.stdout(Stdio::piped());
    let mut following = command.spawn().unwrap();
    let mut lines = BufReader::new(following.stdout.take().unwrap()).lines();
    let mut next_queue = || {
        let line = lines.next().expect("the command has ended").unwrap();
        serde_json::from_str::<Value>(&line).unwrap()["max_queue"].clone()
    };
    let resize = |queue: &str| {
        let output = manager.command().args(["resize", "b", "--max-queue", queue]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    };
    for round in 1..=3_u32 {
        resize(&(10 * round).to_string());
        assert_eq!(next_queue(), 10 * round);
        upgraded(&manager);
        // The new program restores the value before it takes over.
        assert_eq!(next_queue(), 10 * round);
    }
    resize("70");
    assert_eq!(next_queue(), 70);
    assert!(matches!(manager.stop(), WaitStatus::Exited(_, 0)));
    let status = wait_for("the command exits", || following.try_wait().unwrap());
    assert!(matches!(status.code(), Some(0 | 69)), "{status}");
}

#[test]
fn followed_logs_continue_with_the_new_program() {
    let manager = start(&format!("{ONE}{}", ONE.replace("bulkhead.b", "bulkhead.c")));
    let follow = |names: &[&str]| {
        let mut command = manager.command();
        command.args(["logs", "--follow", "-o", "cat", "--stream", "stderr"]).args(names);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        (child, lines)
    };
    let mut all = [follow(&["b"]), follow(&[])];
    let say = |text: &str| {
        let mut command = manager.command();
        command.args(["submit", "b", "say", "--payload-file", "-"]).stdout(Stdio::null());
        let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
        assert!(child.wait().unwrap().success());
    };
    let stored = || {
        let output = manager.command().args(["logs", "b", "-o", "cat", "--stream", "stderr"]).output();
        String::from_utf8(output.unwrap().stdout).unwrap()
    };
    for round in 1..=3_u32 {
        for text in [format!("first {round}"), format!("second {round}")] {
            say(&text);
            // The follower may not be connected yet, but prints each line once in any case.
            wait_for("the line is stored", || stored().lines().any(|line| line == text).then_some(()));
            for (_, lines) in &mut all {
                assert_eq!(lines.next().expect("the command has ended").unwrap(), text);
            }
        }
        upgraded(&manager);
    }
    assert!(matches!(manager.stop(), WaitStatus::Exited(_, 0)));
    for (mut child, mut lines) in all {
        let status = wait_for("the command exits", || child.try_wait().unwrap());
        assert!(matches!(status.code(), Some(0 | 69)), "{status}");
        assert!(lines.next().is_none());
    }
}

#[test]
fn impossible_upgrade_is_rejected_with_a_reason() {
    let supervisor = Supervisor::start(ONE);
    let refused = supervisor.command().arg("upgrade").output().unwrap();
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(2), "{text}");
    assert!(text.contains("--unmanaged"), "{text}");
    let (reader, writer) = std::io::pipe().unwrap();
    let number = std::os::fd::AsRawFd::as_raw_fd(&reader);
    nix::fcntl::fcntl(&reader, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::empty())).unwrap();
    let supervisor = Supervisor::start_as(&["--while-open", &number.to_string()], &[], ONE);
    let refused = supervisor.command().args(["upgrade", "--unmanaged"]).output().unwrap();
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(2), "{text}");
    assert!(text.contains("--while-open"), "{text}");
    drop(writer);
}

/// A running `bulkhead upgrade` command.
struct Upgrading {
    child: Child,
    /// Lines that the upgrade command prints to standard output.
    lines: Receiver<String>,
}

/// Maximum number of lines that an upgrade command prints.
const LINES_MAX: usize = 100;

impl Upgrading {
    fn start(manager: &Manager) -> Self {
        Self::start_with(manager, &[])
    }

    fn start_with(manager: &Manager, arguments: &[&str]) -> Self {
        Self::run(manager.command().arg("upgrade").args(arguments))
    }

    fn run(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = sync_channel(LINES_MAX);
        // Reads on a separate thread, because a read from a pipe has no time limit.
        std::thread::spawn(move || {
            stdout.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        Self { child, lines }
    }

    /// Returns the next line that the command prints, or `None` at the end of the output.
    fn line(&self) -> Option<String> {
        match self.lines.recv_timeout(PATIENCE) {
            Ok(line) => Some(line),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!("the upgrade has made no progress for {PATIENCE:?}"),
        }
    }

    /// Waits until the upgrade command has reported the given step.
    fn until(&self, step: &str) {
        while !self.line().expect("the step is reached").starts_with(step) {}
    }

    /// Waits until the new program serves clients. Returns the PID of the new program.
    fn until_switched(&self, manager: &Manager, old: u32) -> u32 {
        self.until("switched");
        manager.supervisors().into_iter().find(|&pid| pid != old).expect("two programs run")
    }

    /// Waits for the command to exit. Returns the exit code and the error message.
    fn end(self) -> (Option<i32>, String) {
        while self.line().is_some() {}
        let output = self.child.wait_with_output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    }
}

/// Sends operator requests whose effects a failed upgrade would undo. Returns the method, path and response status
/// of each request.
fn operators_requests(manager: &Manager) -> Vec<(String, u16)> {
    let place = Place::Unix(manager.folder.path().join("admin.sock"));
    let requests = [
        ("POST", "/v1/reload", ""),
        ("POST", "/v1/bulkheads/b/drain", ""),
        ("POST", "/v1/bulkheads/b/resume", ""),
        ("POST", "/v1/bulkheads/b/restart", ""),
        ("POST", "/v1/bulkheads/b/reset", ""),
        ("PATCH", "/v1/bulkheads/b", "{\"max_queue\": 10}"),
        ("PATCH", "/v1/bulkheads/b/tenants/x", "{\"max_queue\": 10}"),
    ];
    let ask = |(method, path, body): (&str, &str, &str)| {
        let answer = place.ask(method, path, &["Content-Type: application/json"], body.as_bytes());
        (format!("{method} {path}"), answer.status)
    };
    requests.into_iter().map(ask).collect()
}

#[test]
fn operator_requests_are_rejected_during_an_upgrade() {
    // The workers of the new program do not become ready.
    let manager = start(ONE);
    let slow = ONE.replace("[\"MISBEHAVE\"]", "[\"MISBEHAVE\", \"init-hangs\"]");
    manager.configure("", &slow);
    let upgrading = Upgrading::start(&manager);
    wait_for("two programs run", || (manager.supervisors().len() == 2).then_some(()));
    assert_eq!(upgrade(&manager, &[]).status.code(), Some(75));
    for (request, status) in operators_requests(&manager) {
        assert_eq!(status, 409, "{request}");
    }
    // A signal stops the new program, and then the old one.
    assert!(matches!(manager.stop(), WaitStatus::Exited(_, 0)));
    let (code, text) = upgrading.end();
    assert_eq!(code, Some(1));
    assert!(text.contains("a signal stopped") && !text.contains("continues to serve"), "{text}");
}

/// Stops the service while the old and the new program each have a running job. The signal is sent either to the main
/// process only or, like Ctrl-C in a terminal, to both programs.
fn stop_during_jobs_of_both(is_new_main: bool, is_to_both: bool) {
    let manager = start(ONE);
    let gate = manager.folder.path().join("gate");
    let operation = format!("steps:wait {}", gate.display());
    let mut of_old = Raw::connect(&manager.socket());
    of_old.submit(1, &operation, b"");
    wait_for("the job runs", || (get(&manager, "/v1/bulkheads/b")["in_flight"] == 1).then_some(()));
    let old = manager.main();
    let upgrading = Upgrading::start(&manager);
    let new = upgrading.until_switched(&manager, old);
    let mut of_new = Raw::connect(&manager.socket());
    of_new.submit(1, &operation, b"");
    wait_for("the job runs", || (get(&manager, "/v1/bulkheads/b")["in_flight"] == 1).then_some(()));
    if is_new_main {
        upgrading.until("finished");
    }
    assert_eq!(manager.main() != old, is_new_main);
    let drain = || {
        wait_for("both programs drain", || (manager.log().matches("draining").count() >= 2).then_some(()));
    };
    if is_to_both {
        // The old program receives the new program's message before the signal.
        kill_pid(new, Signal::SIGTERM);
        drain();
    }
    manager.begin_stop();
    drain();
    if is_to_both {
        // The old program has handled SIGTERM when it has logged two summaries.
        for count in 1..=2 {
            kill_pid(old, Signal::SIGUSR1);
            let is_summary = |line: &&str| line.contains("summary") && line.contains("bulkhead=\"b\"");
            wait_for("the old program logs a summary", || {
                (manager.log().lines().filter(is_summary).count() >= count).then_some(())
            });
        }
    }
    std::fs::write(&gate, "").unwrap();
    assert_eq!(of_old.outcome(), (1, (0, 0)));
    assert_eq!(of_new.outcome(), (1, (0, 0)));
    let stopped = manager.ended();
    assert!(matches!(stopped, WaitStatus::Exited(_, 0)), "{stopped:?}");
    assert!(!manager.socket().exists(), "the socket still exists");
    let (code, text) = upgrading.end();
    assert!(is_new_main == (code == Some(0)) && !text.contains("continues to serve"), "{code:?}: {text}");
}

#[test]
fn signal_to_the_old_program_stops_both_programs() {
    stop_during_jobs_of_both(false, false);
}

#[test]
fn signal_to_the_new_program_stops_both_programs() {
    stop_during_jobs_of_both(true, false);
}

#[test]
fn signal_to_both_programs_counts_once() {
    stop_during_jobs_of_both(false, true);
}

#[test]
fn second_signal_ends_the_drain_notice_of_both_programs() {
    let keys = "drain_notice = \"1h\"\ndrain_timeout = \"1h\"\n";
    for is_paused in [false, true] {
        let manager = Manager::start(tempfile::tempdir().unwrap(), keys, ONE, &[]);
        let old = manager.main();
        let upgrading = Upgrading::start(&manager);
        let new = upgrading.until_switched(&manager, old);
        let mut of_new = Raw::connect(&manager.socket());
        of_new.submit(1, "hang", b"");
        wait_for("the job runs", || (get(&manager, "/v1/bulkheads/b")["in_flight"] == 1).then_some(()));
        manager.begin_stop();
        wait_for("the notice of both programs begins", || {
            (manager.log().matches("stopping in 1h").count() == 2).then_some(())
        });
        if is_paused {
            // Suspends the new program, so that the old program stops before the new program can learn of the signal.
            kill_pid(new, Signal::SIGSTOP);
            kill_pid(old, Signal::SIGTERM);
            wait_for("the old program stops", || {
                manager.log().contains("INFO bulkhead: stopped").then_some(())
            });
            kill_pid(new, Signal::SIGCONT);
        } else {
            manager.signal(Signal::SIGTERM);
        }
        manager.ended();
        wait_for("both programs exit", || manager.supervisors().is_empty().then_some(()));
        upgrading.end();
    }
}

#[test]
fn interrupted_command_does_not_interrupt_the_upgrade() {
    let manager = start(ONE);
    let old = manager.main();
    let upgrading = Upgrading::start(&manager);
    upgrading.until("started");
    kill_pid(upgrading.child.id(), Signal::SIGINT);
    let (code, text) = upgrading.end();
    assert!(code == Some(130) && text.contains("the upgrade continues"), "{code:?}: {text}");
    wait_for("the new program takes over", || (manager.main() != old).then_some(()));
}

#[test]
fn stopping_supervisor_does_not_hand_over_connections() {
    let manager = start(ONE);
    let old = manager.main();
    let gates = ["first", "second"].map(|name| manager.folder.path().join(name));
    let mut clients = gates.each_ref().map(|gate| {
        let mut raw = Raw::connect(&manager.socket());
        raw.submit(1, &format!("steps:wait {}", gate.display()), b"");
        raw
    });
    wait_for("both jobs run", || (get(&manager, "/v1/bulkheads/b")["in_flight"] == 2).then_some(()));
    let upgrading = Upgrading::start(&manager);
    upgrading.until_switched(&manager, old);
    manager.begin_stop();
    wait_for("the new program has exited", || (manager.supervisors() == [old]).then_some(()));
    std::fs::write(&gates[0], "").unwrap();
    assert_eq!(clients[0].outcome(), (1, (0, 0)));
    clients[0].submit(2, "", b"");
    assert_eq!(clients[0].outcome(), (2, (outcome_code::REJECTED, RejectReason::Draining.code())));
    std::fs::write(&gates[1], "").unwrap();
    assert_eq!(clients[1].outcome(), (1, (0, 0)));
    assert!(matches!(manager.ended(), WaitStatus::Exited(_, 0)));
}

/// The old program transfers each connection together with the first part of a frame. The transfer socket fills up
/// while the new program does not read.
#[test]
fn slow_new_program_takes_over_every_connection() {
    const CONNECTIONS: usize = 66;
    let manager = start(&ONE.replace("60s", "600s"));
    let old = manager.main();
    let gate = manager.folder.path().join("gate");
    let operation = format!("steps:wait {}", gate.display());
    let second = Raw::submit_bytes(2, "", &[0; 60_000]);
    let (first_part, rest) = second.split_at(50_000);
    let mut clients: Vec<Raw> = (0..CONNECTIONS).map(|_| Raw::connect(&manager.socket())).collect();
    for client in &mut clients {
        client.submit(1, &operation, b"");
        client.0.write_all(first_part).unwrap();
    }
    let submitted = || get(&manager, "/v1/bulkheads/b")["submitted"] == CONNECTIONS;
    wait_for("all jobs are accepted", || submitted().then_some(()));
    let upgrading = Upgrading::start(&manager);
    let new = upgrading.until_switched(&manager, old);
    upgrading.until("finished");
    kill_pid(new, Signal::SIGSTOP);
    std::fs::write(&gate, "").unwrap();
    for client in &mut clients {
        assert_eq!(client.outcome(), (1, (0, 0)));
    }
    kill_pid(new, Signal::SIGCONT);
    for client in &mut clients {
        client.0.write_all(rest).unwrap();
        assert_eq!(client.outcome(), (2, (0, 0)));
    }
    wait_for("the old program has exited", || (manager.supervisors() == [new]).then_some(()));
    assert_eq!((upgrading.end().0, manager.restarts()), (Some(0), 0));
}

#[test]
fn client_that_ignores_goaway_is_disconnected() {
    let manager = start(ONE);
    let old = manager.main();
    let (gate, begun) = (manager.folder.path().join("gate"), manager.folder.path().join("begun"));
    let mut raw = Raw::connect_with(&manager.socket(), client_capability::GOAWAY);
    raw.submit(1, &format!("steps:count {};wait {}", begun.display(), gate.display()), b"");
    wait_for("the job runs", || begun.exists().then_some(()));
    let upgrading = Upgrading::start(&manager);
    upgrading.until_switched(&manager, old);
    assert_eq!(raw.frame().0.kind, kind::GOAWAY);
    std::fs::write(&gate, "").unwrap();
    assert_eq!(raw.outcome(), (1, (0, 0)));
    // Further input does not extend the time limit.
    let mut outbox = Outbox::default();
    wait_for("the old program closes the connection", || {
        let _ = outbox.push(kind::CANCEL, 1, &Empty, &[], Payload::NONE);
        outbox.flush(&raw.0, &mut BufferPool::default()).err()
    });
    wait_for("the old program has exited", || (manager.supervisors() == [manager.main()]).then_some(()));
    assert_eq!((upgrading.end().0, manager.restarts()), (Some(0), 0));
}

#[test]
fn connections_above_lowered_max_clients_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let manager = Manager::start(folder, "max_clients = 8", ONE, &[]);
    let old = manager.main();
    let mut clients: Vec<Raw> = (0..6).map(|_| Raw::connect(&manager.socket())).collect();
    manager.configure("max_clients = 4", ONE);
    let upgrading = Upgrading::start(&manager);
    upgrading.until_switched(&manager, old);
    let mut rejected = 0;
    for (number, client) in (1..).zip(&mut clients) {
        // Fails if the connection is closed already.
        let _ = client.0.write_all(&Raw::submit_bytes(number, "", b""));
        match client.frame() {
            (header, _) if header.kind == kind::OUTCOME => assert_eq!(header.number, number),
            (header, rest) => {
                assert_eq!(header.kind, kind::REFUSED);
                let (refused, _) = codec::decode::<Refused<'_>>(&rest, &[]).unwrap();
                assert_eq!(refused.reason, RejectReason::Overloaded.code(), "{}", refused.message);
                rejected += 1;
            }
        }
    }
    assert_eq!(rejected, 2);
}
