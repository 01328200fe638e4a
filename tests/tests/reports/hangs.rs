//! Reports about jobs that are still running at their deadline. The reports contain stacks, which the keeper samples
//! just before the supervisor stops the job.

use std::time::Duration;

use bulkhead_client::Executed;
use bulkhead_client::blocking::{Client, Job};
use bulkhead_shared::Verdict;
use bulkhead_tests::{Supervisor, compile_library, kill_pid, wait_for};
use nix::sys::signal::Signal;
use serde_json::Value;

/// A library that hangs in an inner function.
const LIBRARY: &str = r#"
#include <bulkhead.h>
#include <string.h>
#include <unistd.h>

BULKHEAD_LIBRARY

static __attribute__((noinline)) int nap(int seconds)
{
    for (;;) sleep(seconds); /* the line that sleeps */
    return seconds;
}

static __attribute__((noinline)) int spin(volatile int *turns)
{
    while (*turns >= 0) *turns = (*turns + 1) & 0xffff; /* the line that spins */
    return *turns;
}

int bulkhead_handle(const bulkhead_job *job, const bulkhead_host *host)
{
    volatile int turns = 0;
    if (!strcmp(job->operation, "nap")) return nap(100) + 1;
    if (!strcmp(job->operation, "spin")) return spin(&turns) + 1;
    return host->result(job, "ok", 2);
}
"#;

const STRICT: &str = "sandbox = { profile = \"strict\", best_effort = [\"identity\"] }";

/// Runs a job past its deadline. Returns the ID of the crash report, if there is one. On a busy machine, the deadline
/// can pass before a worker has begun the job. There is no report in this case.
fn exceed_deadline(supervisor: &Supervisor, operation: &str, deadline_ms: u64) -> Option<String> {
    let client = Client::connect(supervisor.socket()).unwrap();
    exceed(client.job("b", "p").operation(operation).deadline(Duration::from_millis(deadline_ms)))
}

/// Runs a job past its deadline or run limit. Returns the ID of the crash report, if there is one.
fn exceed(job: Job) -> Option<String> {
    let error = job.send().unwrap_err();
    if error.executed() == Executed::No {
        return None;
    }
    let outcome = error.outcome().expect("an outcome");
    assert_eq!(outcome.verdict, Verdict::DeadlineRunning);
    outcome.report.clone()
}

/// Waits until the report contains backtraces. Returns the report.
fn report(supervisor: &Supervisor, id: &str) -> Value {
    wait_for("the backtraces", || {
        let report = supervisor.crash_report(id);
        report.get("native").is_some().then_some(report)
    })
}

/// Runs jobs that exceed their deadline until a report contains a frame of the given function. A bulkhead produces at
/// most one report per second, and on a busy machine a worker's threads might not stop in time.
fn hang(supervisor: &Supervisor, operation: &str, function: &str) -> Value {
    wait_for("a report has stacks", || {
        let id = exceed_deadline(supervisor, operation, 300)?;
        let report = report(supervisor, &id);
        let jobs = &report["jobs"];
        assert_eq!((&report["cause"], &jobs[0]["operation"]), (&"deadline".into(), &operation.into()));
        find_frame(&report, function).is_some().then_some(report)
    })
}

/// Waits for the first crash report and checks its cause. Returns the report with its backtraces.
fn first_report(supervisor: &Supervisor, cause: &str) -> Value {
    let crash = wait_for("there is a report", || {
        let (_, body) = supervisor.try_get("/v1/crashes")?;
        let crashes: Value = serde_json::from_str(&body).ok()?;
        crashes["crashes"].as_array()?.first().cloned()
    });
    assert_eq!(crash["cause"], cause, "{crash}");
    report(supervisor, crash["id"].as_str().expect("an id"))
}

/// Returns the stack frame of the given function, and the thread that contains the frame.
fn find_frame<'r>(report: &'r Value, function: &str) -> Option<(&'r Value, &'r Value)> {
    let has_name = |frame: &&Value| frame["function"].as_str().is_some_and(|name| name.contains(function));
    report["native"]["threads"].as_array()?.iter().find_map(|thread| {
        let frame = thread["frames"].as_array()?.iter().find(has_name)?;
        Some((thread, frame))
    })
}

fn line_of(text: &str) -> u64 {
    1 + LIBRARY.lines().position(|line| line.contains(text)).expect("a line") as u64
}

#[test]
fn report_of_hung_library_names_function_and_line() {
    let (_folder, path) = compile_library(LIBRARY, &["-g", "-O1"]);
    let supervisor = Supervisor::start(&format!("[bulkhead.b]\nlibrary = {path:?}\n{STRICT}\n"));
    let report = hang(&supervisor, "nap", "nap");
    let (thread, frame) = find_frame(&report, "nap").unwrap();
    assert_eq!(frame["line"], line_of("that sleeps"), "{frame}");
    assert_eq!(thread["state"], "S", "{thread:#}");
    assert_eq!(find_frame(&report, "bulkhead_handle").unwrap().1["module"], path.to_str().unwrap());
    assert_eq!(thread["registers"], serde_json::json!({}), "registers can contain parts of a payload");

    let report = hang(&supervisor, "spin", "spin");
    let (thread, frame) = find_frame(&report, "spin").unwrap();
    assert_eq!((&frame["line"], &thread["state"]), (&line_of("that spins").into(), &"R".into()));
    let shown = supervisor.command().args(["crashes", "last"]).output().unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    for expected in ["still running a job at its deadline", "#0  spin at ", ", state R"] {
        assert!(shown.contains(expected), "{expected}: {shown}");
    }
}

#[test]
fn report_of_stopped_worker_contains_its_stack() {
    let (_folder, path) = compile_library(LIBRARY, &["-g", "-O1"]);
    let supervisor = Supervisor::start(&format!(
        "[bulkhead.b]\nlibrary = {path:?}\n{STRICT}\n[bulkhead.b.health]\nheartbeat = \"60s\"\n"
    ));
    let report = wait_for("a report has stacks", || {
        std::thread::scope(|scope| {
            let job = scope.spawn(|| exceed_deadline(&supervisor, "spin", 2000));
            let worker = wait_for("the job runs or has ended", || {
                let is_running = supervisor.snapshot("b")["in_flight"] == 1 || job.is_finished();
                supervisor.worker_pids("b").first().copied().filter(|_| is_running)
            });
            kill_pid(worker, Signal::SIGSTOP);
            let id = job.join().unwrap();
            // If the worker was stopped before it had begun the job, the worker still exists.
            kill_pid(worker, Signal::SIGCONT);
            let report = report(&supervisor, &id?);
            let is_stopped = find_frame(&report, "spin").is_some_and(|(thread, _)| thread["state"] == "T");
            is_stopped.then_some(report)
        })
    });
    let (thread, frame) = find_frame(&report, "spin").unwrap();
    assert_eq!((&thread["state"], &frame["line"]), (&"T".into(), &line_of("that spins").into()));
}

/// The test covers each sandbox profile, and a worker forked from a template.
#[test]
fn report_of_late_job_shows_rust_handler() {
    for (keys, operation, state) in [
        (STRICT, "hang", "S"),
        ("", "spin", "R"),
        ("start = { mode = \"fork\" }", "stop", "T"),
        ("sandbox = { profile = \"none\" }", "hang", "S"),
    ] {
        let supervisor = Supervisor::start(&format!("[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\n{keys}\n"));
        let report = hang(&supervisor, operation, "misbehave::misbehave");
        let (thread, frame) = find_frame(&report, "misbehave::misbehave").unwrap();
        assert!(frame["line"].is_u64() && thread["state"] == state, "{keys}: {thread:#}");
    }
}

#[test]
fn report_of_job_beyond_its_run_limit_shows_handler() {
    let bulkhead = "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\ndeadline = \"60s\"\nrun_limit = \"300ms\"\n";
    let supervisor = Supervisor::start(bulkhead);
    let client = Client::connect(supervisor.socket()).unwrap();
    let report = wait_for("a report has stacks", || {
        let report = report(&supervisor, &exceed(client.job("b", "p").operation("hang"))?);
        find_frame(&report, "misbehave::misbehave").is_some().then_some(report)
    });
    assert_eq!((&report["cause"], &report["jobs"][0]["operation"]), (&"deadline".into(), &"hang".into()));
}

#[test]
fn report_of_hung_worker_contains_its_stacks() {
    let bulkhead =
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nhealth = { heartbeat = \"100ms\", missed = 3 }\n";
    // On a busy machine, the threads might not stop in time. The next report of the same bulkhead contains stacks only
    // after a second.
    wait_for("a report has stacks", || {
        let supervisor = Supervisor::start(bulkhead);
        let client = Client::connect(supervisor.socket()).unwrap();
        let error = client.job("b", "p").operation("stop").send().unwrap_err();
        let report = report(&supervisor, error.outcome().and_then(|outcome| outcome.report.as_ref())?);
        assert_eq!(report["cause"], "hung");
        let (thread, _) = find_frame(&report, "misbehave::misbehave")?;
        assert_eq!(thread["state"], "T", "{report:#}");
        Some(())
    });
}

#[test]
fn report_of_hung_start_contains_stacks() {
    let (_folder, path) = compile_library(
        "#include <bulkhead.h>\n#include <unistd.h>\nBULKHEAD_LIBRARY\n\
         int bulkhead_init(char *message, size_t size) { for (;;) pause(); return 0; }\n\
         int bulkhead_handle(const bulkhead_job *job, const bulkhead_host *host) { return 0; }\n",
        &["-g"],
    );
    let keys = "start = { handshake = \"60s\", ready = \"500ms\" }";
    let bulkhead = format!("[bulkhead.b]\nlibrary = {path:?}\n{keys}\n");
    // Later failures share the first report, which has no stacks if the worker's threads did not stop in time.
    wait_for("a report has stacks", || {
        let supervisor = Supervisor::launch(tempfile::tempdir().unwrap(), "", &bulkhead);
        let report = first_report(&supervisor, "not_ready");
        find_frame(&report, "bulkhead_init").is_some().then_some(())
    });
}

#[test]
fn report_of_late_program_shows_spinning_or_stopped_shell() {
    let shell = std::fs::canonicalize("/bin/sh").unwrap();
    for (script, state) in [("while :; do :; done", "R"), ("kill -STOP $$; true", "T")] {
        let supervisor =
            Supervisor::start(&format!("[bulkhead.b]\nexec = [\"sh\", \"-c\", {script:?}]\n{STRICT}\n"));
        wait_for("a report has stacks", || {
            let report = report(&supervisor, &exceed_deadline(&supervisor, "late", 300)?);
            let threads = report["native"]["threads"].as_array()?;
            // On a busy machine, the program can reach its deadline before it runs the script.
            let is_expected = |thread: &&Value| thread["program"] == "sh" && thread["state"] == state;
            let frames = threads.iter().find(is_expected)?["frames"].as_array()?;
            frames.iter().any(|frame| frame["module"] == shell.to_str().unwrap()).then_some(())
        });
    }
}

#[test]
fn report_contains_only_programs_of_the_late_job() {
    let supervisor = Supervisor::start(&format!(
        "[bulkhead.b]\nexec = [\"sh\", \"-c\", \"sleep 100; true\"]\nmax_in_flight = 2\n{STRICT}\n"
    ));
    let client = Client::connect(supervisor.socket()).unwrap();
    // This thread ends when the supervisor exits.
    std::thread::spawn(move || client.job("b", "p").operation("other").send());
    wait_for("the other job runs", || (supervisor.snapshot("b")["in_flight"] == 1).then_some(()));
    let report = wait_for("a report has stacks", || {
        let report = report(&supervisor, &exceed_deadline(&supervisor, "late", 300)?);
        let threads = report["native"]["threads"].as_array()?;
        // On a busy machine, the shell can reach its deadline before the other program has started.
        let has_started = threads.iter().any(|thread| thread["program"] == "sleep");
        (has_started && threads.iter().all(|thread| thread["frames"][0].is_object())).then_some(report)
    });
    let threads = report["native"]["threads"].as_array().expect("threads").iter();
    let programs: Vec<_> = threads.map(|thread| thread["program"].clone()).collect();
    assert_eq!((programs, &report["victim"]), (vec!["sh".into(), "sleep".into()], &"program".into()));
}
