//! `GET /v1/watch`: the states of all bulkheads and all events in one stream.

use std::io::{BufRead, BufReader};
use std::time::Instant;

use bulkhead_tests::http::{Place, Socket};
use bulkhead_tests::{PATIENCE, Supervisor, not_run, wait_for};
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use serde_json::Value;

const ONE: &str = "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nprocesses = 1\n";

/// A message from the event stream.
#[derive(Debug)]
struct Said {
    event: String,
    id: Option<u64>,
    data: Value,
}

struct Watcher(BufReader<Socket>);

impl Watcher {
    fn begin(supervisor: &Supervisor, query: &str, headers: &[&str]) -> Self {
        let mut socket = Place::of(supervisor).connect();
        socket.send_head("GET", &format!("/v1/watch{query}"), headers, None);
        let mut reader = BufReader::new(socket);
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            assert!(reader.read_line(&mut head).expect("the response head arrives in time") > 0, "{head}");
        }
        assert!(head.starts_with("HTTP/1.1 200") && head.contains("text/event-stream"), "{head}");
        Self(reader)
    }

    /// Returns the next message, or `None` if the stream has ended. Skips the chunk sizes of the HTTP encoding and the
    /// comments in the stream.
    fn next(&mut self) -> Option<Said> {
        let mut said = Said { event: String::new(), id: None, data: Value::Null };
        let began = Instant::now();
        loop {
            // The stream also contains comments, so a time limit for each line would not be enough.
            assert!(began.elapsed() < PATIENCE, "no message arrives");
            let mut line = String::new();
            if self.0.read_line(&mut line).expect("a line arrives in time") == 0 {
                return None;
            }
            let line = line.trim_end();
            match line.split_once(": ") {
                Some(("event", name)) => said.event = name.to_owned(),
                Some(("id", id)) => said.id = id.parse().ok(),
                Some(("data", data)) => said.data = serde_json::from_str(data).expect("JSON"),
                _ if line.is_empty() && !said.event.is_empty() && !said.data.is_null() => return Some(said),
                _ => {}
            }
        }
    }

    fn next_of(&mut self, event: &str) -> Said {
        let began = Instant::now();
        loop {
            assert!(began.elapsed() < PATIENCE, "no message of kind {event} arrives");
            let said = self.next().expect("the stream continues");
            if said.event == event {
                return said;
            }
        }
    }
}

#[test]
fn watch_streams_snapshots_and_events() {
    let supervisor = Supervisor::start(ONE);
    let mut watcher = Watcher::begin(&supervisor, "", &[]);
    let hello = watcher.next().unwrap();
    assert_eq!((hello.event.as_str(), hello.data["pid"].as_u64()), ("hello", Some(supervisor.pid().into())));
    assert!(hello.data["started"].is_string() && hello.data["version"].is_string(), "{hello:?}");
    let state = watcher.next_of("bulkheads").data;
    let asked = supervisor.get("/v1/bulkheads");
    let keys = |of: &Value| of["bulkheads"][0].as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(keys(&state), keys(&asked));
    assert!(state["at"].is_string());

    // The stream continues with new states and events.
    assert_eq!(Place::of(&supervisor).job("b", "echo", &[], b"").status, 200);
    wait_for("a state includes the job", || {
        (watcher.next_of("bulkheads").data["bulkheads"][0]["done"] == 1).then_some(())
    });
    Place::of(&supervisor).job("b", "abort", &[], b"").problem(502);
    let crashed = wait_for("an event reports the crash", || {
        let said = watcher.next_of("event");
        assert_eq!(said.id, said.data["seq"].as_u64(), "{said:?}");
        (said.data["kind"] == "job_crashed").then(|| said.id.unwrap())
    });
    // A new watcher can ask for all events after a given event.
    let query = format!("?since={}", crashed - 1);
    let last = format!("Last-Event-ID: {}", crashed - 1);
    for (query, header) in [(query.as_str(), "X-None: 1"), ("", last.as_str())] {
        let first = Watcher::begin(&supervisor, query, &[header]).next_of("event");
        assert_eq!(first.id, Some(crashed), "{first:?}");
    }
    supervisor.wait_events("worker_ready", 2);
    // Further events can follow, for example after a pause of the supervisor on a busy machine.
    wait_for("a watcher begins with the newest event", || {
        let first = Watcher::begin(&supervisor, "?limit=1", &[]).next_of("event").id;
        let (_, newest) = supervisor.try_get("/v1/events?follow=false&limit=1")?;
        let newest: Value = serde_json::from_str(newest.trim_end()).ok()?;
        (first.is_some() && first == newest["seq"].as_u64()).then_some(())
    });
    supervisor.signal(Signal::SIGTERM);
    wait_for("the stream ends", || watcher.next().is_none().then_some(()));
}

#[test]
fn watch_accepts_128_concurrent_clients() {
    let supervisor = Supervisor::start(ONE);
    let mut watchers: Vec<_> = (0..100).map(|_| Watcher::begin(&supervisor, "", &[])).collect();
    for watcher in &mut watchers {
        watcher.next_of("bulkheads");
    }
    // All watchers share the same snapshots.
    let moments: Vec<String> =
        watchers.iter_mut().map(|it| it.next_of("bulkheads").data["at"].to_string()).collect();
    let different = bulkhead_tests::tally(moments).len();
    assert!(different <= 50, "{different} moments for 100 watchers");
    // At most 128 watchers can connect. When a watcher disconnects, another can connect.
    let rest: Vec<_> = (100..128).map(|_| Watcher::begin(&supervisor, "", &[])).collect();
    Place::of(&supervisor).ask("GET", "/v1/watch", &[], b"").problem(503);
    drop((watchers, rest));
    wait_for("another watcher is accepted", || {
        let mut socket = Place::of(&supervisor).connect();
        socket.send_head("GET", "/v1/watch", &[], None);
        let mut line = String::new();
        BufReader::new(socket).read_line(&mut line).ok()?;
        line.starts_with("HTTP/1.1 200").then_some(())
    });
    // After a while without watchers, a new watcher still gets the current state.
    let done = supervisor.number("b", "done");
    Place::of(&supervisor).job("b", "echo", &[], b"");
    let mut late = Watcher::begin(&supervisor, "", &[]);
    wait_for("the new watcher sees the completed job", || {
        (late.next_of("bulkheads").data["bulkheads"][0]["done"] == done + 1).then_some(())
    });
}

#[test]
fn watch_reports_stuck_data_plane() {
    let supervisor = Supervisor::start(ONE);
    let mut watcher = Watcher::begin(&supervisor, "", &[]);
    watcher.next_of("bulkheads");
    // Stops only the first thread, which runs the data plane.
    let thread = Pid::from_raw(supervisor.pid() as i32);
    if let Err(error) = ptrace::seize(thread, ptrace::Options::empty()) {
        not_run!("this machine does not permit ptrace(2) of another process: {error}");
        return;
    }
    ptrace::interrupt(thread).unwrap();
    wait_for("the data plane has stopped", || {
        let status = waitpid(thread, Some(WaitPidFlag::__WALL | WaitPidFlag::WNOHANG)).unwrap();
        (status != WaitStatus::StillAlive).then_some(())
    });
    watcher.next_of("stuck");
    ptrace::detach(thread, None).unwrap();
    watcher.next_of("bulkheads");
}
