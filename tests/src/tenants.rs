//! Helpers for tests of isolated tenants.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use crate::{SAME_NUMBERS, Supervisor, children, kill_pid, wait_for};
use bulkhead_client::{Client, Job, JobError, Reply};
use nix::sys::signal::Signal;
use serde_json::Value;

/// Result of a job.
pub type Ended = Result<Reply, JobError>;
/// Task that waits for a job.
pub type Running = tokio::task::JoinHandle<Ended>;

/// Returns the configuration of a bulkhead `b` with isolated tenants. `more` are further keys.
pub fn isolated(tenants: &str, more: &str) -> String {
    format!(
        "{SAME_NUMBERS}[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\ndeadline = \"60s\"\n\
         tenants = {{ isolate = true, {tenants} }}\n{more}\n"
    )
}

/// Connects a client to the supervisor.
pub async fn connect(supervisor: &Supervisor) -> Client {
    Client::connect(supervisor.socket()).await.unwrap()
}

/// Submits the job in a new task.
pub fn start(job: Job) -> Running {
    tokio::spawn(job.send())
}

/// Returns the events of a kind that the supervisor still keeps.
pub fn events(supervisor: &Supervisor, kind: &str) -> Vec<Value> {
    let (status, all) = supervisor.try_get("/v1/events?follow=false").expect("the admin socket answers");
    assert_eq!(status, 200, "{all}");
    let parsed = all.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    parsed.filter(|event| event["kind"] == kind).collect()
}

/// Sends a PATCH to a path below `/v1/bulkheads/`. Returns the status and the answer.
pub fn patch(supervisor: &Supervisor, path: &str, body: &str) -> (u16, Value) {
    let mut socket = UnixStream::connect(supervisor.folder.path().join("admin.sock")).unwrap();
    let length = body.len();
    write!(
        socket,
        "PATCH /v1/bulkheads/{path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\
         Content-Length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), serde_json::from_str(body).unwrap())
}

/// Returns the snapshot of one tenant of the bulkhead `b`.
pub fn part(supervisor: &Supervisor, tenant: &str) -> Value {
    supervisor.get(&format!("/v1/bulkheads/b?tenant={tenant}"))
}

/// Waits until a number in a tenant's snapshot has this value. The tenant can still be unknown.
pub fn wait_part(supervisor: &Supervisor, tenant: &str, field: &str, value: u64) {
    wait_for(&format!("{field} of {tenant} is {value}"), || {
        let (status, body) = supervisor.try_get(&format!("/v1/bulkheads/b?tenant={tenant}"))?;
        let part: Value = serde_json::from_str(&body).ok().filter(|_| status == 200)?;
        (part[field].as_u64() == Some(value)).then_some(())
    });
}

/// Returns the process ids of a tenant's workers.
pub fn pids(supervisor: &Supervisor, tenant: &str) -> Vec<u32> {
    let part = part(supervisor, tenant);
    let workers = part["workers"].as_array().expect("workers");
    workers.iter().filter_map(|w| w["pid"].as_u64()).map(|pid| pid as u32).collect()
}

/// Stops a process, and waits until all of its threads have stopped.
pub fn stop(pid: u32) {
    kill_pid(pid, Signal::SIGSTOP);
    wait_for("it has stopped", || {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("it is there");
        let mut stats = tasks.map(|task| std::fs::read_to_string(task.ok()?.path().join("stat")).ok());
        let is_stopped = |stat: Option<String>| stat.is_some_and(|stat| stat.contains(") T "));
        stats.all(is_stopped).then_some(())
    });
}

/// Waits until no worker runs, according to the snapshot and to the kernel.
pub fn wait_for_rest(supervisor: &Supervisor) {
    wait_for("no worker runs", || {
        let is_at_rest = supervisor.worker_pids("b").is_empty() && children(supervisor.keeper()).is_empty();
        is_at_rest.then_some(())
    });
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// Returns the number of rejected jobs.
pub fn rejected(snapshot: &Value) -> u64 {
    snapshot["rejected"].as_object().expect("by reason").values().map(number).sum()
}

/// Returns the number of jobs that have an outcome.
pub fn outcomes(snapshot: &Value) -> u64 {
    let ended = ["done", "failed", "crashed", "deadline_exceeded", "cancelled"];
    ended.iter().map(|field| number(&snapshot[*field])).sum::<u64>() + rejected(snapshot)
}

/// Checks that each submitted job has an outcome or is under way.
pub fn assert_balanced(snapshot: &Value) {
    let underway: u64 =
        ["in_flight", "queued", "elsewhere"].iter().map(|field| number(&snapshot[*field])).sum();
    assert_eq!(number(&snapshot["submitted"]), outcomes(snapshot) + underway, "{snapshot}");
}
