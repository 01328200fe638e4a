//! Tests of the supervisor program and its admin socket, from an operator's point of view: command line, sockets, HTTP,
//! events, logs and signals.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bulkhead_client::blocking::Client;
use bulkhead_tests::{PATIENCE, Supervisor, heavy, is_alive, kill_pid, programs, wait_for};
use nix::sys::signal::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::command_line::running;

// HTTP.

/// Status and headers of a response whose body has not been read yet.
struct Answer {
    status: u16,
    headers: BTreeMap<String, String>,
    body: BufReader<UnixStream>,
}

/// Sends a request. Returns `None` if there is no response.
fn try_ask(folder: &Path, method: &str, path: &str, headers: &[&str]) -> Option<Answer> {
    let mut socket = UnixStream::connect(folder.join("admin.sock")).ok()?;
    socket.set_read_timeout(Some(PATIENCE)).ok()?;
    let headers: String = headers.iter().map(|header| format!("{header}\r\n")).collect();
    write!(
        socket,
        "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n{headers}\r\n"
    )
    .ok()?;
    read_head(socket)
}

fn read_head(socket: UnixStream) -> Option<Answer> {
    let mut body = BufReader::new(socket);
    let mut line = || {
        let mut line = String::new();
        body.read_line(&mut line).ok().map(|_| line.trim_end().to_owned())
    };
    let status = line()?.split(' ').nth(1)?.parse().ok()?;
    let mut headers = BTreeMap::new();
    while let Some((name, value)) = line()?.split_once(": ") {
        headers.insert(name.to_ascii_lowercase(), value.to_owned());
    }
    Some(Answer { status, headers, body })
}

fn ask(supervisor: &Supervisor, method: &str, path: &str, headers: &[&str]) -> Answer {
    let answer = try_ask(supervisor.folder.path(), method, path, headers);
    answer.unwrap_or_else(|| panic!("no response to {method} {path}"))
}

fn get(supervisor: &Supervisor, path: &str) -> Answer {
    ask(supervisor, "GET", path, &["Accept: */*"])
}

impl Answer {
    fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", String::as_str)
    }

    fn is_chunked(&self) -> bool {
        self.header("transfer-encoding") == "chunked"
    }

    /// Returns the next chunk of a chunked body. The last chunk is empty.
    fn chunk(&mut self) -> Vec<u8> {
        let mut size = String::new();
        self.body.read_line(&mut size).expect("a chunk arrives in time");
        let size = usize::from_str_radix(size.trim_end(), 16).unwrap_or(0);
        let mut chunk = vec![0; size + 2];
        self.body.read_exact(&mut chunk).expect("a chunk arrives in time");
        chunk.truncate(size);
        chunk
    }

    /// Reads the whole body.
    fn bytes(&mut self) -> Vec<u8> {
        let mut whole = Vec::new();
        if self.is_chunked() {
            while let chunk @ [_, ..] = &self.chunk()[..] {
                whole.extend_from_slice(chunk);
            }
        } else {
            self.body.read_to_end(&mut whole).expect("the body arrives in time");
        }
        whole
    }

    fn text(&mut self) -> String {
        String::from_utf8(self.bytes()).expect("text")
    }

    fn json(&mut self) -> Value {
        let text = self.text();
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    fn lines(&mut self) -> Vec<Value> {
        self.text().lines().map(|line| serde_json::from_str(line).expect("a JSON object")).collect()
    }
}

/// A stream of server-sent events.
struct Stream {
    answer: Answer,
    partial: String,
}

impl Stream {
    fn open(supervisor: &Supervisor, path: &str, headers: &[&str]) -> Self {
        let answer = ask(supervisor, "GET", path, headers);
        assert_eq!(answer.status, 200, "{path}");
        assert_eq!(answer.header("content-type"), "text/event-stream", "{path}");
        Self { answer, partial: String::new() }
    }

    /// Returns the next event, or `None` if the stream has ended.
    fn next(&mut self) -> Option<Value> {
        let began = Instant::now();
        loop {
            // The stream also contains comments, so a time limit for each chunk would not be enough.
            assert!(began.elapsed() < PATIENCE, "no event arrives");
            while let Some((block, rest)) = self.partial.split_once("\n\n") {
                let field =
                    |name: &str| block.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
                let event = field("data:").map(|data| (data.to_owned(), field("id:").map(str::to_owned)));
                self.partial = rest.to_owned();
                if let Some((data, id)) = event {
                    let event: Value = serde_json::from_str(&data).expect("a JSON object");
                    assert_eq!(id, Some(event["seq"].to_string()), "{event}");
                    return Some(event);
                }
            }
            let chunk = self.answer.chunk();
            if chunk.is_empty() {
                return None;
            }
            self.partial.push_str(std::str::from_utf8(&chunk).expect("text"));
        }
    }
}

/// Checks that a response is a problem document with the given status. Returns the document.
#[track_caller]
fn check_problem(mut answer: Answer, status: u16, what: &str) -> Value {
    let content = answer.header("content-type").to_owned();
    let body = answer.json();
    assert_eq!((answer.status, content.as_str()), (status, "application/problem+json"), "{what}: {body}");
    assert_eq!(body["status"], status, "{what}: {body}");
    for text in ["type", "title", "detail"] {
        assert!(body[text].as_str().is_some_and(|text| !text.is_empty()), "{what}: {body}");
    }
    body
}

// Starting the supervisor manually.

/// Creates a folder with a configuration file.
fn configured(config: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let config = config.replace("MISBEHAVE", programs().join("misbehave").to_str().unwrap());
    std::fs::write(folder.path().join("workers.toml"), config).unwrap();
    folder
}

const SOCKETS: &str = "[supervisor]\nsocket = \"jobs.sock\"\nadmin = \"admin.sock\"\n";
/// Configuration of a bulkhead with a long grace period. Even on a busy machine, a cancelled `yield` job then ends
/// before the worker is killed.
const ONE: &str = "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\ngrace = \"20s\"\ndeadline = \"300s\"\n";

fn program(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(programs().join("bulkhead-supervisor"));
    command.arg("--config").arg(folder.join("workers.toml")).args(arguments).stdin(Stdio::null());
    command
}

/// A supervisor that the test starts manually. Dropping this value kills the process.
struct Started(Child, PathBuf);

impl Started {
    fn start(folder: &Path, arguments: &[&str]) -> Self {
        Self::spawn(folder, &mut program(folder, arguments))
    }

    fn spawn(folder: &Path, command: &mut Command) -> Self {
        let log = std::fs::File::create(folder.join("log")).unwrap();
        Self(command.stdout(Stdio::null()).stderr(log).spawn().unwrap(), folder.to_owned())
    }

    fn wait_ready(&self) {
        wait_for("the supervisor is ready", || {
            (try_ask(&self.1, "GET", "/readyz", &[])?.status == 200).then_some(())
        });
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.1.join("log")).unwrap()
    }

    fn stop(&mut self) -> Option<i32> {
        kill_pid(self.0.id(), Signal::SIGTERM);
        wait_for("the supervisor exits", || self.0.try_wait().unwrap()).code()
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        // The process may have exited already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

// Health.

#[test]
fn readyz_reflects_supervisor_state_from_start_to_stop() {
    let folder = tempfile::tempdir().unwrap();
    let mut supervisor = Supervisor::launch(
        folder,
        "drain_timeout = \"60s\"",
        "[bulkhead.slow]\ncwd = \".\"\nenv = { PATH = \"/usr/bin:/bin\" }\nstart = { handshake = \"60s\" }\n\
         command = [\"sh\", \"-c\", \"until test -e gate; do sleep 0.02; done; exec 'MISBEHAVE'\"]\n\
         deadline = \"60s\"\n\
         [bulkhead.broken]\ncommand = [\"MISBEHAVE\", \"exit-at-start\"]\nrestart = { policy = \"never\" }\n\
         [bulkhead.good]\ncommand = [\"MISBEHAVE\"]\n",
    );
    let ready = |path: &str| {
        let mut answer = get(&supervisor, path);
        assert_eq!(answer.header("content-type"), "application/json");
        assert_eq!(answer.header("retry-after"), if answer.status == 503 { "1" } else { "" });
        (answer.status, answer.json())
    };
    let named = |body: &Value| -> Vec<(String, String)> {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        body["degraded"].as_array().unwrap().iter().map(|b| (text(&b["name"]), text(&b["state"]))).collect()
    };
    let pair = |name: &str, state: &str| (name.to_owned(), state.to_owned());
    wait_for("the supervisor listens", || {
        try_ask(supervisor.folder.path(), "GET", "/healthz", &[]).map(drop)
    });
    wait_for("the bulkheads `good` and `broken` have started", || {
        (supervisor.snapshot("good")["state"] == "ready"
            && supervisor.snapshot("broken")["state"] == "failed")
            .then_some(())
    });
    assert_eq!(get(&supervisor, "/healthz").status, 200, "the supervisor is healthy before it is ready");
    let (status, body) = ready("/readyz");
    assert_eq!((status, &body["status"]), (503, &"starting".into()));
    assert_eq!(named(&body), [pair("slow", "starting"), pair("broken", "failed")]);
    assert_eq!(ready("/readyz?bulkhead=good").0, 200);
    let (status, body) = ready("/readyz?bulkhead=slow");
    assert_eq!((status, &body["retry_after_ms"]), (503, &1000.0.into()), "{body}");
    for path in
        ["/readyz?bulkhed=slow", "/healthz?x=1", "/metrics?x", "/v1/config?x=1", "/v1/bulkheads?x=1", "/?x=1"]
    {
        let mut answer = get(&supervisor, path);
        let (status, body) = (answer.status, answer.json());
        assert!(status == 400 && body["detail"].is_string(), "{path}: {status} {body}");
    }

    std::fs::write(supervisor.folder.path().join("gate"), "").unwrap();
    wait_for("the supervisor is ready", || (ready("/readyz").0 == 200).then_some(()));
    let (_, body) = ready("/readyz");
    assert_eq!(
        named(&body),
        [pair("broken", "failed")],
        "a failed bulkhead is listed but does not prevent readiness"
    );
    assert_eq!(ready("/readyz?bulkhead=slow").0, 200);
    assert_eq!(ready("/readyz?bulkhead=broken").0, 503);
    assert_eq!(supervisor.post("/v1/bulkheads/good/drain").0, 200);
    assert_eq!(ready("/readyz").0, 200, "a draining bulkhead does not affect readiness");
    assert_eq!(ready("/readyz?bulkhead=good").0, 503);

    let client = Client::connect(supervisor.socket()).unwrap();
    let _job = client.job("slow", "").operation("hang").start().unwrap();
    supervisor.wait_number("slow", "in_flight", 1);
    supervisor.signal(Signal::SIGTERM);
    wait_for("the supervisor drains", || (get(&supervisor, "/readyz").status == 503).then_some(()));
    assert_eq!(get(&supervisor, "/readyz").json()["status"], "draining");
    assert_eq!(get(&supervisor, "/healthz").status, 200, "the supervisor is healthy until it exits");
    for verb in ["restart", "drain", "resume", "reset"] {
        let path = format!("/v1/bulkheads/slow/{verb}");
        check_problem(ask(&supervisor, "POST", &path, &[]), 409, &path);
    }
    supervisor.signal(Signal::SIGTERM);
    assert_eq!(supervisor.wait().code(), Some(0));
}

/// The readiness of one bulkhead does not change when a failing worker waits for its next start, or when the first
/// worker of an isolated tenant starts.
#[test]
fn readyz_of_one_bulkhead_needs_a_worker_or_starts_on_demand() {
    let supervisor = Supervisor::start(
        "[bulkhead.broken]\ncommand = [\"MISBEHAVE\", \"exit-at-start\"]\n\
         restart = { max = 50, backoff = \"60s\", backoff_max = \"60s\", within = \"1h\" }\n\
         [bulkhead.apart]\ncommand = [\"MISBEHAVE\", \"hang-at-start\"]\ntenants = { isolate = true }\n\
         start = { handshake = \"60s\" }\ndeadline = \"60s\"\nmax_queue = 1\n\
         [bulkhead.good]\ncommand = [\"MISBEHAVE\"]\n",
    );
    let ready = |name: &str| {
        let mut answer = get(&supervisor, &format!("/readyz?bulkhead={name}"));
        (answer.status, answer.json()["status"].as_str().unwrap().to_owned())
    };
    assert_eq!(ready("good"), (200, "ready".to_owned()));
    assert_eq!(ready("broken"), (503, "degraded".to_owned()));
    assert_eq!(ready("apart"), (200, "ready".to_owned()));
    let client = Client::connect(supervisor.socket()).unwrap();
    let _job = client.job("apart", "").tenant("x").start().unwrap();
    wait_for("the tenant's worker starts", || {
        (supervisor.snapshot("apart")["state"] == "starting").then_some(())
    });
    // The cached states may be older than the snapshot.
    wait_for("the cache is refreshed", || (ready("apart").1 == "starting").then_some(()));
    assert_eq!(ready("apart").0, 200);
    assert_eq!(supervisor.post("/v1/bulkheads/apart/drain").0, 200);
    assert_eq!(ready("apart"), (503, "draining".to_owned()));
}

// Routes and errors.

#[test]
fn invalid_requests_return_problem_documents() {
    let supervisor = Supervisor::start(ONE);
    let not_found = [
        ("GET", "/nope"),
        ("GET", "/v1"),
        ("GET", "/v1/bulkheads/"),
        ("GET", "/v1/bulkheads/nobody"),
        ("GET", "/v1/bulkheads/nobody/logs"),
        ("GET", "/v1/bulkheads/nobody/logs?follow=true"),
        ("GET", "/v1/bulkheads/..%2f..%2fetc"),
        ("GET", "/v1/bulkheads/b/nonsense"),
        ("POST", "/v1/bulkheads/b/nonsense"),
        ("POST", "/v1/bulkheads/nobody/restart"),
        ("POST", "/v1/bulkheads/nobody/drain"),
        ("POST", "/v1/bulkheads/nobody/resume"),
        ("POST", "/v1/bulkheads/nobody/reset"),
        ("GET", "/v1/jobs?bulkhead=nobody"),
        ("POST", "/v1/bulkheads/nobody/jobs/1000001/cancel"),
        ("POST", "/v1/bulkheads/b/jobs/1000001/cancel"),
        ("POST", "/v1/bulkheads/b/jobs/job-1/cancel"),
        ("POST", "/v1/bulkheads/b/jobs/+1/cancel"),
        ("GET", "/readyz?bulkhead=nobody"),
    ];
    for (method, path) in not_found {
        check_problem(ask(&supervisor, method, path, &[]), 404, path);
    }
    let named = check_problem(get(&supervisor, "/v1/bulkheads/no%1b%0abody"), 404, "a hostile name");
    assert!(!named["detail"].as_str().unwrap().contains(char::is_control), "{named}");
    let not_allowed = [
        ("POST", "/healthz", "GET"),
        ("DELETE", "/readyz", "GET"),
        ("POST", "/v1/bulkheads", "GET"),
        ("DELETE", "/v1/bulkheads/b", "GET"),
        ("PUT", "/v1/bulkheads/b/logs", "GET"),
        ("POST", "/v1/events", "GET"),
        ("GET", "/v1/bulkheads/b/restart", "POST"),
        ("GET", "/v1/bulkheads/b/drain", "POST"),
        ("DELETE", "/v1/bulkheads/b/reset", "POST"),
    ];
    for (method, path, allowed) in not_allowed {
        let answer = ask(&supervisor, method, path, &[]);
        assert!(answer.header("allow").contains(allowed), "{method} {path}: {:?}", answer.headers);
        check_problem(answer, 405, path);
    }
    let invalid = [
        "/v1/events?since=yesterday",
        "/v1/events?since=-1",
        "/v1/events?limit=many",
        "/v1/events?follow=perhaps",
        "/v1/events?follow",
        "/v1/events?follow=",
        "/v1/events?follow=0",
        "/v1/bulkheads/b/logs?follow=perhaps",
        "/v1/bulkheads/b/logs?limit=-1",
        "/v1/bulkheads/b/logs?since=noon",
        "/v1/bulkheads/b/logs?bulkhead=b",
        "/v1/jobs?state=done",
        "/v1/jobs?limit=many",
        "/v1/jobs?tenant=acme",
        "/v1/bulkheads/%ff",
    ];
    for path in invalid {
        check_problem(get(&supervisor, path), 400, path);
    }
    // Input that is not HTTP must not affect other clients.
    for rubbish in [&b"rubbish\r\n\r\n"[..], &[0xff; 4096], b"GET / HTTP/9.9\r\n\r\n", b""] {
        let mut socket = UnixStream::connect(supervisor.folder.path().join("admin.sock")).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        // The supervisor can close the connection before reading everything.
        let _ = socket.write_all(rubbish).and_then(|()| socket.shutdown(std::net::Shutdown::Write));
        let _ = socket.read_to_end(&mut Vec::new());
    }
    let head = ask(&supervisor, "HEAD", "/healthz", &[]).bytes();
    assert!(head.is_empty());
    assert_eq!(get(&supervisor, "/healthz").status, 200);
    assert_eq!(supervisor.snapshot("b")["state"], "ready", "the invalid requests had no effect");
}

#[test]
fn operator_can_drain_resume_restart_and_reset_bulkhead() {
    let supervisor = Supervisor::start(&format!("{ONE}processes = 2\n"));
    supervisor.wait_number("b", "limit", 2);
    let post = |verb: &str| {
        let mut answer = ask(&supervisor, "POST", &format!("/v1/bulkheads/b/{verb}"), &[]);
        assert_eq!((answer.status, answer.header("content-type")), (200, "application/json"));
        let body = answer.json();
        assert_eq!((&body["bulkhead"], &body["done"]), (&"b".into(), &verb.into()));
    };
    let client = Client::connect(supervisor.socket()).unwrap();
    let running = client.job("b", "").operation("yield").start().unwrap();
    supervisor.wait_number("b", "in_flight", 1);
    post("drain");
    post("drain");
    let snapshot = supervisor.snapshot("b");
    assert_eq!((&snapshot["state"], &snapshot["in_flight"]), (&"draining".into(), &1.into()));
    let refused = client.job("b", "").send().unwrap_err();
    assert_eq!(refused.outcome().unwrap().verdict.reason(), Some("draining"));
    drop(running);
    supervisor.wait_number("b", "available", 2);
    post("resume");
    client.job("b", "").send().unwrap();

    let before = supervisor.worker_pids("b");
    post("restart");
    wait_for("both workers are replaced", || {
        // Each replacement is ready before the old worker stops, so the limit never drops.
        assert!(supervisor.number("b", "limit") >= 2);
        let now = supervisor.worker_pids("b");
        (now.len() == 2 && now.iter().all(|pid| !before.contains(pid))).then_some(())
    });
    post("reset");
    let rejected = &supervisor.snapshot("b")["rejected"];
    assert_eq!(rejected["draining"], 1, "{rejected}");
}

// Snapshots.

#[test]
fn snapshot_counts_every_outcome() {
    let supervisor = Supervisor::start(&format!(
        "{ONE}processes = 2\nmax_in_flight = 2\nmax_queue = 3\n[bulkhead.other]\ncommand = [\"MISBEHAVE\"]\n"
    ));
    supervisor.wait_number("b", "limit", 4);
    let client = Client::connect(supervisor.socket()).unwrap();
    for operation in ["echo", "echo", "fail"] {
        let _ = client.job("b", "").operation(operation).send();
    }
    client.job("b", "").operation("abort").send().unwrap_err();
    client.job("b", "").operation("yield").deadline(Duration::from_millis(50)).send().unwrap_err();
    drop(client.job("b", "").operation("yield").start().unwrap());
    supervisor.wait_number("b", "cancelled", 1);
    supervisor.wait_number("b", "available", 4);
    let running: Vec<_> = (0..4).map(|_| client.job("b", "").operation("yield").start().unwrap()).collect();
    supervisor.wait_number("b", "in_flight", 4);
    let waiting: Vec<_> = (0..3).map(|_| client.job("b", "").start().unwrap()).collect();
    supervisor.wait_number("b", "queued", 3);
    client.job("b", "").send().unwrap_err();

    let all = get(&supervisor, "/v1/bulkheads").json();
    let names: Vec<_> = all["bulkheads"].as_array().unwrap().iter().map(|b| b["name"].clone()).collect();
    assert_eq!(names, ["b", "other"]);
    let mut answer = get(&supervisor, "/v1/bulkheads/b");
    assert_eq!((answer.status, answer.header("content-type")), (200, "application/json"));
    let snapshot = answer.json();
    let whole = all["bulkheads"][0].as_object().unwrap();
    assert!(
        whole.keys().eq(snapshot.as_object().unwrap().keys()),
        "the list and the single snapshot have the same fields"
    );

    let numbers = [
        ("limit", 4),
        ("in_flight", 4),
        ("available", 0),
        ("queued", 3),
        ("queue_capacity", 3),
        ("queue_available", 0),
        ("done", 2),
        ("failed", 1),
        ("crashed", 1),
        ("deadline_exceeded", 1),
        ("cancelled", 1),
    ];
    for (name, number) in numbers {
        assert_eq!(snapshot[name], number, "{name}: {snapshot}");
    }
    assert_eq!((&snapshot["name"], &snapshot["state"]), (&"b".into(), &"ready".into()));
    assert_eq!(snapshot["rejected"], serde_json::json!({"queue_full": 1}));
    assert_eq!(snapshot["breaker"], "closed");
    assert_eq!(snapshot["restarts"], 1, "one crash: {snapshot}");
    for which in ["run", "queue"] {
        for share in ["p50", "p90", "p99", "max"] {
            assert!(snapshot["latency_ms"][which][share].is_number(), "{which} {share}: {snapshot}");
        }
    }
    let workers = snapshot["workers"].as_array().unwrap();
    assert_eq!(workers.len(), 2);
    for worker in workers {
        let numbers = ["pid", "generation", "uptime_ms", "in_flight", "served", "rss_bytes", "cpu_ms"];
        for name in numbers {
            assert!(worker[name].is_u64(), "{name}: {worker}");
        }
        assert!(worker["rss_bytes"].as_u64() > Some(100_000), "{worker}");
        assert!(is_alive(worker["pid"].as_u64().unwrap() as u32), "{worker}");
        assert!(worker["state"].is_string(), "{worker}");
        assert!(worker["last_exit"].is_string() || worker["last_exit"].is_null(), "{worker}");
        assert_eq!((&worker["in_flight"], &worker["outdated"]), (&2.into(), &false.into()), "{worker}");
    }
    let exits: String = workers.iter().filter_map(|w| w["last_exit"].as_str()).collect();
    assert_eq!(exits, "killed by SIGABRT", "{snapshot}");

    let idle = supervisor.snapshot("other");
    assert_eq!(idle["rejected"], serde_json::json!({}));
    assert!(idle["latency_ms"]["run"]["p50"].is_null(), "nothing was measured: {idle}");
    drop(running);
    for job in waiting {
        job.wait().unwrap();
    }
}

// Events.

const KINDS: &str = "worker_started worker_ready worker_exited worker_killed worker_hung worker_recycled \
    restart_backoff bulkhead_failed job_timeout job_crashed draining stopped";

#[test]
fn events_have_the_fields_defined_for_their_kind() {
    let mut supervisor = Supervisor::start(
        "[defaults]\ngrace = \"20ms\"\ndeadline = \"60s\"\n\
         [bulkhead.b]\ncommand = [\"MISBEHAVE\"]\n\
         [bulkhead.sick]\ncommand = [\"MISBEHAVE\"]\nhealth = { heartbeat = \"100ms\", missed = 5 }\n\
         restart = { max = 1000 }\n\
         [bulkhead.broken]\ncommand = [\"sh\", \"-c\", \"echo last words >&2; exit 3\"]\n\
         env = { PATH = \"/usr/bin:/bin\" }\nrestart = { backoff = \"1ms\", max = 2, within = \"60s\" }\n",
    );
    let mut stream = Stream::open(&supervisor, "/v1/events", &["Accept: */*"]);
    let mut seen: Vec<Value> = Vec::new();
    let client = Client::connect(supervisor.socket()).unwrap();
    let trace = "0af7651916cd43dd8448eb211c80319c";
    let late = client.job("b", "payload").operation("hang").tenant("acme");
    let late = late.traceparent(format!("00-{trace}-b7ad6b7169203331-01"));
    late.deadline(Duration::from_secs(2)).send().unwrap_err();
    client.job("b", "").operation("abort").send().unwrap_err();
    client.job("sick", "").operation("stop").send().unwrap_err();
    client.job("b", "").send().unwrap();
    assert_eq!(supervisor.post("/v1/bulkheads/b/restart").0, 200);
    while !["worker_recycled", "worker_hung", "bulkhead_failed"]
        .iter()
        .all(|kind| seen.iter().any(|event| event["kind"] == *kind))
    {
        seen.push(stream.next().expect("the stream continues"));
    }
    supervisor.signal(Signal::SIGTERM);
    seen.extend(std::iter::from_fn(|| stream.next()));
    assert_eq!(supervisor.wait().code(), Some(0));

    for (index, event) in seen.iter().enumerate() {
        assert_eq!(event["seq"], index + 1, "event numbers have no gap and no duplicate: {event}");
        let at = event["at"].as_str().unwrap();
        assert!(at.len() >= 20 && at.as_bytes()[10] == b'T' && at.ends_with('Z'), "RFC 3339: {event}");
        assert!(matches!(event["severity"].as_str(), Some("info" | "warning" | "critical")), "{event}");
        assert!(event["kind"].is_string(), "{event}");
        assert!(event.as_object().unwrap().contains_key("bulkhead"), "{event}");
    }
    let one = |kind: &str, bulkhead: &str| {
        let is_it = |event: &&Value| event["kind"] == kind && event["bulkhead"] == bulkhead;
        seen.iter().find(is_it).unwrap_or_else(|| panic!("no {kind} event for {bulkhead}: {seen:?}"))
    };
    for kind in KINDS.split_ascii_whitespace() {
        assert!(seen.iter().any(|event| event["kind"] == kind), "no {kind}");
    }
    let timeout = one("job_timeout", "b");
    assert_eq!(timeout["severity"], "warning");
    assert_eq!((&timeout["operation"], &timeout["tenant"]), (&"hang".into(), &"acme".into()));
    assert_eq!(timeout["trace_id"], trace);
    assert_eq!(timeout["timeout_ms"], 2000.0);
    assert!(timeout["actual_duration_ms"].as_f64() >= Some(2000.0), "{timeout}");
    assert!(timeout["job"].is_string(), "{timeout}");
    let crashed = one("job_crashed", "b");
    assert_eq!((&crashed["reason"], &crashed["operation"]), (&"signal".into(), &"abort".into()));
    assert_eq!(one("job_crashed", "sick")["reason"], "hung");
    assert!(one("worker_hung", "sick")["pid"].is_u64());
    assert!(one("worker_killed", "b")["reason"].as_str().unwrap().contains("deadline"));
    for kind in ["worker_started", "worker_ready", "worker_exited", "worker_recycled"] {
        assert!(one(kind, "b")["pid"].is_u64(), "{kind}");
    }
    assert!(one("restart_backoff", "broken")["delay_ms"].is_number());
    let failed = one("bulkhead_failed", "broken");
    assert_eq!(failed["severity"], "critical");
    assert!(failed["message"].as_str().unwrap().contains("status 3"), "{failed}");
    let exits: Vec<_> =
        seen.iter().filter(|e| e["kind"] == "worker_exited" && e["bulkhead"] == "broken").collect();
    for exit in exits {
        assert_eq!(exit["exit_code"], 3);
        assert_eq!(exit["stderr_tail"], "last words\n", "each exit has its own output: {exit}");
    }
    let last = seen.last().unwrap();
    assert_eq!(
        (&last["kind"], &last["bulkhead"]),
        (&"stopped".into(), &Value::Null),
        "`stopped` is the last event"
    );
}

#[test]
fn event_stream_continues_stored_events_without_gaps() {
    let supervisor = Supervisor::start(&format!("{ONE}[bulkhead.other]\ncommand = [\"MISBEHAVE\"]\n"));
    let kept = || get(&supervisor, "/v1/events?follow=false").lines();
    let before = kept();
    assert_eq!(get(&supervisor, "/v1/events?follow=false").header("content-type"), "application/x-ndjson");
    let last = before.last().unwrap()["seq"].as_u64().unwrap();
    // Ways to choose the first event: the `since` parameter, the `Last-Event-ID` header of a reconnecting browser,
    // which repeats the `since` of its first request, and the beginning of the log.
    let middle = format!("Last-Event-ID: {}", last - 1);
    let paths = [
        (format!("/v1/events?since={last}"), "Accept: */*", last),
        (format!("/v1/events?since={last}&follow=true"), "Accept: application/json", last),
        ("/v1/events".to_owned(), middle.as_str(), last - 1),
        ("/v1/events?since=0".to_owned(), middle.as_str(), last - 1),
        ("/v1/events?since=0&follow=true".to_owned(), "X: y", 0),
    ];
    let mut streams: Vec<_> = paths
        .iter()
        .map(|(path, header, since)| {
            (Stream::open(&supervisor, path, &["Accept: text/event-stream", header]), *since)
        })
        .collect();
    let mut of_other = Stream::open(&supervisor, "/v1/events?bulkhead=other&since=0&follow=true", &[]);
    for verb in ["drain", "resume", "drain"] {
        assert_eq!(supervisor.post(&format!("/v1/bulkheads/b/{verb}")).0, 200);
    }
    assert_eq!(supervisor.post("/v1/bulkheads/other/drain").0, 200);
    // Other events can come in between, for example after a pause of the supervisor on a busy machine.
    let mut ends = Vec::new();
    for (stream, since) in &mut streams {
        let mut seq = *since;
        loop {
            let event = stream.next().expect("an event");
            seq += 1;
            assert_eq!(event["seq"], seq, "{event}");
            if event["kind"] == "draining" && event["bulkhead"] == "other" {
                break;
            }
        }
        ends.push(seq);
    }
    let end = ends[0];
    assert!(end >= last + 4 && ends.iter().all(|one| *one == end), "{ends:?}");
    loop {
        let event = of_other.next().expect("an event");
        assert_eq!(event["bulkhead"], "other", "{event}");
        if event["kind"] == "draining" {
            break;
        }
    }
    let seqs = |path: &str| -> Vec<u64> {
        get(&supervisor, path).lines().iter().map(|event| event["seq"].as_u64().unwrap()).collect()
    };
    assert_eq!(seqs(&format!("/v1/events?follow=false&since={}", end - 2))[..2], [end - 1, end]);
    let newest = seqs("/v1/events?follow=false&limit=1");
    assert!(newest.len() == 1 && newest[0] >= end, "{newest:?}");
    assert_eq!(seqs("/v1/events?follow=false&bulkhead=other&limit=1"), [end]);
    // A number that this supervisor has not used yet comes from an earlier supervisor, so all events are returned.
    assert_eq!(seqs("/v1/events?follow=false&since=99999999")[..4], [1, 2, 3, 4]);
    assert_eq!(get(&supervisor, "/v1/events?follow=false&bulkhead=nobody").status, 404);
}

// Jobs.

#[test]
fn job_list_is_bounded_and_sorted_oldest_first() {
    const JOBS: usize = 20_000;
    let supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 30000\ndeadline = \"600s\"\n\
         [bulkhead.other]\ncommand = [\"MISBEHAVE\"]\ntenants = { isolate = true }\n",
    );
    let client = Client::connect(supervisor.socket()).unwrap();
    let mut handles = vec![client.job("b", "").operation("hang").start().unwrap()];
    supervisor.wait_number("b", "in_flight", 1);
    handles.extend((1..JOBS).map(|_| client.job("b", "").start().unwrap()));
    supervisor.wait_number("b", "queued", JOBS as u64 - 1);
    // The list is built over several iterations of the event loop.
    let list = |query: &str| supervisor.get(&format!("/v1/jobs?{query}"));
    let all = list("");
    assert_eq!((&all["total"], all["jobs"].as_array().unwrap().len()), (&JOBS.into(), 100));
    assert_eq!((&all["jobs"][0]["state"], &all["jobs"][1]["state"]), (&"running".into(), &"queued".into()));
    let long = list("limit=100000&bulkhead=b");
    let numbers: Vec<u64> = long["jobs"].as_array().unwrap().iter().map(number_of).collect();
    assert_eq!(numbers.len(), 1000);
    assert!(numbers.is_sorted(), "job numbers rise with the time of submission");
    assert_eq!(list("limit=0")["total"], JOBS);
    assert_eq!(list("state=queued")["total"], JOBS - 1);
    let none = list("bulkhead=other");
    assert_eq!((&none["total"], none["jobs"].as_array().unwrap().len()), (&0.into(), 0));
    handles.iter().for_each(|handle| handle.cancel());
    wait_for("no jobs are left", || (list("")["total"] == 0).then_some(()));
}

fn number_of(job: &Value) -> u64 {
    u64::from_str_radix(job["job"].as_str().unwrap(), 16).unwrap()
}

#[test]
fn job_in_a_fallback_is_listed_and_cancelled_there() {
    let supervisor = Supervisor::start(
        "[bulkhead.first]\ncommand = [\"MISBEHAVE\"]\nfallback = [\"second\"]\n\
         [bulkhead.second]\ncommand = [\"MISBEHAVE\"]\ndeadline = \"60s\"\ntenants = { isolate = true }\n",
    );
    supervisor.post("/v1/bulkheads/first/drain");
    let client = Client::connect(supervisor.socket()).unwrap();
    let handle = client.job("first", "").operation("yield").tenant("acme").start().unwrap();
    let job = wait_for("the job runs", || {
        let jobs = supervisor.get("/v1/jobs?state=running");
        jobs["jobs"].get(0).cloned()
    });
    assert_eq!((&job["bulkhead"], &job["tenant"]), (&"second".into(), &"acme".into()), "{job}");
    assert!(job["age_ms"].as_f64() >= job["ran_ms"].as_f64(), "{job}");
    assert_eq!(supervisor.get("/v1/jobs?bulkhead=first")["total"], 0);
    let path = |name: &str| format!("/v1/bulkheads/{name}/jobs/{}/cancel", job["job"].as_str().unwrap());
    assert_eq!(supervisor.post(&path("first")).0, 404);
    assert_eq!(supervisor.post(&path("second")).0, 200);
    let error = handle.wait().unwrap_err();
    assert_eq!(bulkhead_tests::outcome(&Err(error)), "cancelled/");
    let event = supervisor.wait_events("job_cancelled", 1).remove(0);
    assert_eq!((&event["bulkhead"], &event["tenant"]), (&"second".into(), &"acme".into()), "{event}");
    supervisor.wait_number("first", "cancelled", 1);
}

// Logs.

#[test]
fn logs_escape_control_characters_in_worker_output() {
    let supervisor = Supervisor::start(
        "[bulkhead.x]\nenv = { PATH = \"/usr/bin:/bin\" }\nexec = [\"sh\", \"-c\", \"cat >&2\"]\n\
         [bulkhead.w]\nenv = { PATH = \"/usr/bin:/bin\" }\n\
         command = [\"sh\", \"-c\", \"echo from stdout; echo from stderr >&2; exec 'MISBEHAVE'\"]\n",
    );
    let client = Client::connect(supervisor.socket()).unwrap();
    let mut live = ask(&supervisor, "GET", "/v1/bulkheads/x/logs?follow=true", &[]);
    assert_eq!((live.status, live.header("content-type")), (200, "application/x-ndjson"));
    let mut rubbish: Vec<u8> = (0..=255).filter(|&byte| byte != b'\n').collect();
    rubbish.extend_from_slice("\u{9b}31m \u{202e} \u{7f}\n".as_bytes());
    rubbish.extend_from_slice(b"{\"at\":\"forged\"}\r\n\n");
    rubbish.extend_from_slice(&vec![b'y'; 100_000]);
    rubbish.extend_from_slice(b"\nno end");
    client.job("x", rubbish).send().unwrap();
    let lines = wait_for("the log has all five lines", || {
        let lines = get(&supervisor, "/v1/bulkheads/x/logs").lines();
        (lines.len() == 5).then_some(lines)
    });
    let pid = supervisor.worker_pids("x")[0];
    for line in &lines {
        assert_eq!((&line["bulkhead"], &line["stream"]), (&"x".into(), &"stderr".into()), "{line}");
        assert!(line["at"].as_str().unwrap().ends_with('Z') && line["line"].is_string(), "{line}");
        assert_eq!(line["pid"], pid, "{line}");
    }
    let text = |index: usize| lines[index]["line"].as_str().unwrap();
    assert!(text(0).starts_with("\0\u{1}\u{2}") && text(0).contains("abc"), "{:?}", text(0));
    assert!(text(1).starts_with("{\"at\":\"forged\"}"), "{:?}", text(1));
    assert_eq!(text(2), "");
    assert!(text(3).starts_with("yyy") && text(3).len() < 10_000 && text(3).ends_with("[cut]"));
    assert_eq!(text(4), "no end");
    let raw = get(&supervisor, "/v1/bulkheads/x/logs").text();
    let is_raw = |c: char| (c.is_control() && c != '\n') || c == '\u{202e}';
    assert!(!raw.contains(is_raw), "{raw:?}");
    let raw = live.chunk();
    assert!(!String::from_utf8(raw).unwrap().contains(is_raw));
    let log = wait_for("the supervisor's log contains the escaped output", || {
        Some(supervisor.log()).filter(|log| log.contains(r"\u{1b}") && log.contains("[cut]"))
    });
    assert!(!log.chars().any(|c| c.is_control() && c != '\n'), "{log:?}");
    assert_eq!(get(&supervisor, "/v1/bulkheads/x/logs?limit=2").lines().len(), 2);
    let numbers = |path: &str| -> Vec<u64> {
        get(&supervisor, path).lines().iter().map(|line| line["seq"].as_u64().unwrap()).collect()
    };
    assert_eq!(numbers("/v1/bulkheads/x/logs?since=1"), [2, 3, 4, 5]);
    assert_eq!(numbers("/v1/bulkheads/x/logs?since=1&limit=1").len(), 1);
    // A number that this supervisor has not used yet comes from an earlier supervisor, so everything in the log is
    // returned.
    assert_eq!(numbers("/v1/bulkheads/x/logs?since=1000")[..3], [1, 2, 3]);

    let lines = wait_for("the log has a line from each stream", || {
        let lines = get(&supervisor, "/v1/bulkheads/w/logs").lines();
        (lines.len() == 2).then_some(lines)
    });
    for stream in ["stdout", "stderr"] {
        let line = lines.iter().find(|line| line["stream"] == stream).unwrap();
        assert_eq!(line["line"], format!("from {stream}"));
    }
}

#[test]
fn logs_keep_at_most_1000_lines() {
    let _turn = heavy();
    let supervisor = Supervisor::start(ONE);
    let client = Client::connect(supervisor.socket()).unwrap();
    client.job("b", "20000").operation("flood").send().unwrap();
    let lines = wait_for("lines are kept", || {
        Some(get(&supervisor, "/v1/bulkheads/b/logs").lines()).filter(|lines| !lines.is_empty())
    });
    assert!(lines.len() <= 1000, "{} lines were kept", lines.len());
    assert_eq!(get(&supervisor, "/healthz").status, 200);
    client.job("b", "").send().unwrap();
}

// Sockets.

fn mode(path: &Path) -> u32 {
    std::fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
}

#[test]
fn sockets_and_created_folders_are_private() {
    let folder = configured(&format!(
        "[supervisor]\nsocket = \"new/run/jobs.sock\"\nsocket_mode = \"0660\"\nadmin = \"admin.sock\"\n{ONE}"
    ));
    let path = folder.path();
    let mut supervisor = Started::start(path, &[]);
    supervisor.wait_ready();
    let jobs = path.join("new/run/jobs.sock");
    assert!(std::fs::symlink_metadata(&jobs).unwrap().file_type().is_socket());
    assert_eq!((mode(&jobs), mode(&path.join("admin.sock"))), (0o660, 0o600));
    assert_eq!((mode(&path.join("new")), mode(&path.join("new/run"))), (0o700, 0o700));
    assert_eq!(supervisor.stop(), Some(0));
    assert!(!jobs.exists() && !path.join("admin.sock").exists(), "both sockets are removed");

    // By default, both sockets are private, and the admin socket is in the same folder as the jobs socket.
    let folder = configured(&format!("[supervisor]\nsocket = \"jobs.sock\"\n{ONE}"));
    let supervisor = Started::start(folder.path(), &[]);
    supervisor.wait_ready();
    for name in ["jobs.sock", "admin.sock"] {
        assert_eq!(mode(&folder.path().join(name)), 0o600, "{name}");
    }
}

#[test]
fn start_fails_if_socket_path_is_in_use() {
    let folder = configured(&format!("{SOCKETS}{ONE}"));
    let path = folder.path();
    let refused = |arguments: &[&str], text: &str| {
        let output = bulkhead_tests::output(&mut program(path, arguments));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(text), "{said}");
    };
    // The sockets that a killed supervisor leaves behind do not prevent a new start.
    drop((UnixListener::bind(path.join("jobs.sock")), UnixListener::bind(path.join("admin.sock"))));
    let mut first = Started::start(path, &[]);
    first.wait_ready();
    refused(&[], "another supervisor");

    // The start also fails with a different jobs socket, because the admin socket is still in use.
    let config = std::fs::read_to_string(path.join("workers.toml")).unwrap();
    std::fs::write(path.join("workers.toml"), config.replace("jobs.sock", "others.sock")).unwrap();
    refused(&["--log-format", "json"], "another supervisor");
    assert!(!path.join("others.sock").exists(), "the rejected supervisor removed its jobs socket");
    assert_eq!(
        try_ask(path, "GET", "/readyz", &[]).unwrap().status,
        200,
        "the first supervisor is not affected"
    );
    assert_eq!(first.stop(), Some(0));

    std::fs::write(path.join("admin.sock"), "precious").unwrap();
    refused(&[], "not a socket");
    assert_eq!(std::fs::read_to_string(path.join("admin.sock")).unwrap(), "precious");
    std::fs::remove_file(path.join("admin.sock")).unwrap();
    let other = UnixListener::bind(path.join("admin.sock")).unwrap();
    refused(&[], "is already listening on this socket");
    drop(other);
    let second = Started::start(path, &[]);
    second.wait_ready();
}

// The command line.

#[test]
fn check_prints_the_effective_configuration() {
    let folder = configured(&format!("{SOCKETS}{ONE}processes = 3\n"));
    let output = bulkhead_tests::output(&mut program(folder.path(), &["--check"]));
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stderr.is_empty());
    let told = String::from_utf8(output.stdout).unwrap();
    for part in ["[bulkhead.b]", "processes = 3", "max_in_flight = 1", "deadline = \"5m\"", "jobs.sock"] {
        assert!(told.contains(part), "{part}: {told}");
    }
    assert_eq!(told.lines().last(), Some("# ok: the configuration is valid"), "{told}");
    assert!(!folder.path().join("jobs.sock").exists(), "nothing is started");
    // The printed configuration is itself a valid file, and printing that file produces the same text.
    std::fs::write(folder.path().join("workers.toml"), &told).unwrap();
    let again = bulkhead_tests::output(&mut program(folder.path(), &["--check"]));
    assert_eq!(String::from_utf8(again.stdout).unwrap(), told);
}

#[test]
fn schema_option_prints_the_documented_schema() {
    let mut command = Command::new(programs().join("bulkhead-supervisor"));
    let output = bulkhead_tests::output(command.arg("--schema"));
    assert_eq!((output.status.code(), output.stderr.len()), (Some(0), 0));
    let printed: Value = serde_json::from_slice(&output.stdout).unwrap();
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/workers.schema.json");
    let file: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    assert!(printed == file, "docs/workers.schema.json differs");
}

#[test]
fn unwritable_standard_output_exits_with_status_74() {
    let folder = configured("[bulkhead.one]\nexec = [\"cat\"]\n");
    let check: &[&str] = &["--config", "workers.toml", "--check"];
    for arguments in [check, &["--schema"], &["doctor"], &["--version"], &["--help"], &["help", "doctor"]] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let mut command = Command::new(programs().join("bulkhead-supervisor"));
        command.args(arguments).current_dir(folder.path()).stdin(Stdio::null()).stdout(full);
        let output = running::output_of(command.stderr(Stdio::piped()).spawn().unwrap());
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(74), "{arguments:?}: {said}");
        assert!(said.contains("standard output"), "{arguments:?}: {said}");
        let mut shell = Command::new("sh");
        shell.args(["-c", "exec \"$0\" \"$@\" >&-"]).arg(command.get_program()).args(arguments);
        let output = bulkhead_tests::output(shell.current_dir(folder.path()));
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(74), "{arguments:?}: {said}");
        assert!(said.contains("standard output: standard output is closed"), "{arguments:?}: {said}");
    }
}

#[test]
fn invalid_configuration_reports_all_errors_with_lines() {
    let config = "[supervisor]\nmax_client = 5\ndrain_timeout = 30\n\n\
                  [bulkhead.one]\nexec = [\"no-such-program\"]\nprocesses = 0\nfallback = [\"nobody\"]\n\n\
                  [bulkhead.TWO]\ncommand = \"x\"\n\n\
                  [bulkhead.three]\nexec = [\"sh\"]\nmax_in_flight = 0\nmax_queue = 5\n\
                  start = { mode = \"fork\" }\n";
    let folder = configured(config);
    let path = folder.path().join("workers.toml");
    for arguments in [&["--check"][..], &[]] {
        let output = bulkhead_tests::output(&mut program(folder.path(), arguments));
        assert_eq!(output.status.code(), Some(2));
        assert!(output.stdout.is_empty());
        let said = String::from_utf8(output.stderr).unwrap();
        for line in [2, 3, 6, 7, 8, 10, 11, 15, 17] {
            let place = format!("{}:{line}:", path.display());
            assert!(said.contains(&place), "the message names line {line}: {said}");
            let text = config.lines().nth(line - 1).unwrap();
            assert!(said.contains(text), "the message shows line {line}: {said}");
        }
        for part in ["max_clients", "no-such-program", "cannot fork its workers", "help"] {
            assert!(said.contains(part), "{part}: {said}");
        }
        assert!(!said.contains('\u{1b}'), "no colours without a terminal");
    }
    assert!(!folder.path().join("jobs.sock").exists());
}

#[test]
fn invalid_command_line_exits_with_status_2() {
    let folder = configured(&format!("{SOCKETS}{ONE}"));
    let program = |arguments: &[&str]| {
        let mut command = Command::new(programs().join("bulkhead-supervisor"));
        command.env("BULKHEAD_CONFIG", "/nonexistent/default.toml");
        bulkhead_tests::output(command.args(arguments))
    };
    let config = folder.path().join("workers.toml");
    let config = config.to_str().unwrap();
    let wrong = [
        &[][..],
        &["--check"],
        &["--config"],
        &["--config", "/nonexistent/workers.toml"],
        &["--config", "/nonexistent/workers.toml", "--check"],
        &["--config", config, "--nonsense"],
        &["--config", config, "--log-format", "xml"],
        &["--config", config, "--log-level", "loud"],
        &["--config", config, "--log-level", "info,b=loud"],
        &["--config", config, "--check", "--log-level", "loud"],
    ];
    for arguments in wrong {
        let output = program(arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        assert!(!said.is_empty(), "{arguments:?}");
    }
    for arguments in ["--help", "--version"] {
        assert_eq!(program(&[arguments]).status.code(), Some(0));
    }
    let said = program(&[]).stderr;
    let said = String::from_utf8_lossy(&said);
    assert!(said.contains("there is no configuration file /nonexistent/default.toml"), "{said}");
}

#[test]
fn default_configuration_file_is_found_without_an_option() {
    let folder = configured(&format!("{SOCKETS}{ONE}"));
    let check = |variables: &[(&str, &Path)]| {
        let mut command = Command::new(programs().join("bulkhead-supervisor"));
        for name in ["BULKHEAD_CONFIG", "XDG_CONFIG_HOME", "HOME"] {
            command.env_remove(name);
        }
        bulkhead_tests::output(command.envs(variables.iter().copied()).arg("--check"))
    };
    let file = folder.path().join("workers.toml");
    let output = check(&[("BULKHEAD_CONFIG", &file)]);
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("[bulkhead.b]"), "{output:?}");
    if rustix::process::geteuid().is_root() {
        return eprintln!("NOT RUN: the default path of root is in /etc");
    }
    let home = folder.path().join("bulkhead");
    std::fs::create_dir(&home).unwrap();
    std::fs::rename(&file, home.join("workers.toml")).unwrap();
    let output = check(&[("XDG_CONFIG_HOME", folder.path())]);
    assert!(output.status.success(), "{output:?}");
    let output = check(&[]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("neither XDG_CONFIG_HOME nor HOME is set"), "{said}");
}

// Signals and the log.

#[test]
fn json_log_has_one_object_per_line() {
    let folder = configured(&format!("{SOCKETS}{ONE}"));
    let mut supervisor = Started::start(folder.path(), &["--log-format", "json", "--log-level", "info"]);
    supervisor.wait_ready();
    let objects = |supervisor: &Started| -> Vec<Value> {
        let log = supervisor.log();
        let whole = log.rsplit_once('\n').map_or("", |(whole, _)| whole);
        let parse = |line: &str| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
        whole.lines().map(parse).collect()
    };
    let message = |object: &Value| object["message"].as_str().unwrap_or_default().to_owned();
    wait_for("the log says that the supervisor is ready", || {
        objects(&supervisor).iter().any(|o| message(o) == "ready").then_some(())
    });
    kill_pid(supervisor.0.id(), Signal::SIGUSR1);
    let summary = wait_for("the summary is logged", || {
        objects(&supervisor).into_iter().find(|o| message(o).starts_with("summary") && o["bulkhead"] == "b")
    });
    assert_eq!((&summary["kind"], &summary["state"]), (&"summary".into(), &"ready".into()), "{summary}");
    assert_eq!(message(&summary), "summary", "all values of the summary are fields");
    for (field, number) in [("workers", 1), ("in_flight", 0), ("queued", 0), ("done", 0), ("restarts", 0)] {
        assert_eq!(summary[field], number, "{field}: {summary}");
    }
    kill_pid(supervisor.0.id(), Signal::SIGHUP);
    wait_for("the reload is logged", || {
        objects(&supervisor).iter().any(|o| message(o) == "config_reloaded").then_some(())
    });
    assert_eq!(try_ask(folder.path(), "GET", "/readyz", &[]).unwrap().status, 200);
    assert_eq!(supervisor.stop(), Some(0));
    let all = objects(&supervisor);
    for object in &all {
        assert!(object["timestamp"].is_string() && object["level"].is_string(), "{object}");
        assert!(object["target"].is_string() && object["message"].is_string(), "{object}");
    }
    assert_eq!(
        all.iter().filter(|o| message(o) == "ready").count(),
        1,
        "the log says once that the supervisor is ready"
    );
    assert_eq!(message(all.last().unwrap()), "stopped", "{all:?}");
}

#[test]
fn log_defaults_to_text_without_colours() {
    let folder = configured(&format!("{SOCKETS}{ONE}"));
    let mut supervisor = Started::start(folder.path(), &[]);
    supervisor.wait_ready();
    kill_pid(supervisor.0.id(), Signal::SIGUSR1);
    wait_for("the summary is logged", || supervisor.log().contains("summary").then_some(()));
    assert_eq!(supervisor.stop(), Some(0));
    let log = supervisor.log();
    assert_eq!(log.lines().filter(|line| line.contains(" ready bulkheads=")).count(), 1, "{log}");
    assert!(!log.contains('\u{1b}'), "no colours in a file: {log}");
    let mut quiet = Started::start(folder.path(), &["--log-level", "error"]);
    quiet.wait_ready();
    assert_eq!(quiet.stop(), Some(0));
    assert_eq!(quiet.log(), "");
}

#[test]
fn systemd_is_notified_of_start_reload_and_stop() {
    let folder = configured(&format!("{SOCKETS}{ONE}"));
    let path = folder.path().join("notify.sock");
    check_notifications(&folder, UnixDatagram::bind(&path).unwrap(), path.to_str().unwrap());
}

#[test]
fn systemd_is_notified_at_an_abstract_address() {
    let folder = configured(&format!("{SOCKETS}{ONE}"));
    let name = folder.path().to_str().unwrap();
    let manager = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap();
    check_notifications(&folder, manager, &format!("@{name}"));
}

fn check_notifications(folder: &TempDir, manager: UnixDatagram, address: &str) {
    manager.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut command = program(folder.path(), &[]);
    let mut supervisor = Started::spawn(folder.path(), command.env("NOTIFY_SOCKET", address));
    let told = || {
        let mut buffer = [0; 1024];
        let count = manager.recv(&mut buffer).expect("a message");
        String::from_utf8_lossy(&buffer[..count]).into_owned()
    };
    let ready = told();
    assert!(ready.lines().any(|line| line == "READY=1"), "{ready}");
    assert_eq!(try_ask(folder.path(), "GET", "/readyz", &[]).unwrap().status, 200);
    // systemd waits for `READY=1` at the end of a reload, so the supervisor sends the message even if the new file is
    // invalid.
    for file in [format!("{SOCKETS}{ONE}max_queue = 3\n"), "nonsense".to_owned()] {
        std::fs::write(folder.path().join("workers.toml"), file).unwrap();
        kill_pid(supervisor.0.id(), Signal::SIGHUP);
        let (reloading, ready) = (told(), told());
        assert!(reloading.lines().any(|line| line == "RELOADING=1"), "{reloading}");
        assert!(reloading.lines().any(|line| line.starts_with("MONOTONIC_USEC=")), "{reloading}");
        assert!(ready.lines().any(|line| line == "READY=1"), "{ready}");
    }
    kill_pid(supervisor.0.id(), Signal::SIGTERM);
    let stopping = told();
    assert!(stopping.lines().any(|line| line == "STOPPING=1"), "{stopping}");
    assert_eq!(supervisor.stop(), Some(0));
}

#[test]
fn shutdown_answers_every_job_and_removes_sockets() {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let mut supervisor = Supervisor::start(
            "[bulkhead.b]\nmax_queue = 5\ndeadline = \"60s\"\ncwd = \".\"\n\
             exec = [\"sh\", \"-c\", \"until test -e gate; do sleep 0.02; done; echo done\"]\n\
             env = { PATH = \"/usr/bin:/bin\" }\n",
        );
        let (keeper, workers) = (supervisor.keeper(), supervisor.worker_pids("b"));
        let client = Client::connect(supervisor.socket()).unwrap();
        let running = client.job("b", "").start().unwrap();
        supervisor.wait_number("b", "in_flight", 1);
        let queued = client.job("b", "").start().unwrap();
        supervisor.wait_number("b", "queued", 1);
        supervisor.signal(signal);
        let told = queued.wait().unwrap_err();
        assert_eq!(told.outcome().unwrap().verdict.reason(), Some("draining"));
        assert!(told.retry_after().is_some(), "{told}");
        std::fs::write(supervisor.folder.path().join("gate"), "").unwrap();
        assert_eq!(running.wait().unwrap().payload(), b"done\n");
        assert_eq!(supervisor.wait().code(), Some(0), "{signal}");
        assert!(workers.iter().chain([&keeper]).all(|&pid| !is_alive(pid)), "{signal}");
        for name in ["jobs.sock", "admin.sock"] {
            assert!(!supervisor.folder.path().join(name).exists(), "{name} is removed");
        }
        assert!(Client::connect(supervisor.socket()).is_err());
    }
}

/// Clients that open connections and then neither send nor read must not block operators permanently.
#[test]
fn admin_socket_answers_despite_idle_connections() {
    let _turn = heavy();
    let supervisor = Supervisor::start("[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\n");
    let connect = || UnixStream::connect(supervisor.folder.path().join("admin.sock")).unwrap();
    let mut held: Vec<UnixStream> = (0..150).map(|_| connect()).collect();
    for _ in 0..150 {
        let mut socket = connect();
        let _ = socket.write_all(b"GET /v1/events HTTP/1.1\r\nHost: x\r\n");
        held.push(socket);
    }
    let health = wait_for("the admin socket answers again", || {
        let socket = UnixStream::connect(supervisor.folder.path().join("admin.sock")).ok()?;
        socket.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
        (&socket).write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n").ok()?;
        read_head(socket)
    });
    assert_eq!(health.status, 200);
    assert_eq!(health.headers["connection"], "close");
    drop(held);

    // With the maximum number of event streams (128) open, other requests still get a connection.
    let streams: Vec<Answer> = (0..128).map(|_| get(&supervisor, "/v1/events")).collect();
    assert!(streams.iter().all(|stream| stream.status == 200));
    assert_eq!(get(&supervisor, "/v1/events").status, 503);
    assert_eq!(get(&supervisor, "/v1/events?follow=false").status, 200);
    drop(streams);
    wait_for("another event stream is accepted", || {
        (get(&supervisor, "/v1/events").status == 200).then_some(())
    });
    assert_eq!(get(&supervisor, "/v1/events?bulkhead=nobody").status, 404);
}
