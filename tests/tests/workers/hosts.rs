//! The two hosts: `exec` runs unmodified programs, and `library` loads C libraries. The tests check that both behave as
//! the `exec` contract and `bulkhead.h` specify.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use bulkhead_client::blocking::Client;
use bulkhead_client::{JobError, Reply};
use bulkhead_shared::{Fault, HandlerFailure, Verdict};
use bulkhead_tests::{
    Supervisor, children, compile_cpp_library, compile_library, heavy, is_alive, kill_pid, name, not_run,
    outcome, overrun_blocking, programs, resident_bytes, tally, wait_for,
};
use nix::sys::signal::Signal;

/// Default configuration keys with a `PATH` for programs, and with a deadline that no job misses by accident.
const COMMON: &str =
    "[defaults]\nenv = { PATH = \"/usr/bin:/bin\" }\ndeadline = \"300s\"\ngrace = \"20ms\"\n";

fn start(bulkheads: &str) -> (Supervisor, Client) {
    let supervisor = Supervisor::start(&format!("{COMMON}{bulkheads}"));
    let client = Client::connect(supervisor.socket()).unwrap();
    (supervisor, client)
}

/// Starts a supervisor with a bulkhead `x` that runs `script`, with further `keys`.
fn shell(script: &str, keys: &str) -> (Supervisor, Client) {
    start(&format!("[bulkhead.x]\nexec = [\"sh\", \"-c\", {script:?}]\n{keys}\n"))
}

fn failure(result: Result<Reply, JobError>) -> HandlerFailure {
    let error = result.expect_err("the job cannot have succeeded");
    match error.outcome().map(|outcome| outcome.verdict.clone()) {
        Some(Verdict::Failed(failure)) => failure,
        other => panic!("{error}: {other:?}"),
    }
}

fn text(result: Result<Reply, JobError>) -> String {
    String::from_utf8(result.unwrap().payload().to_vec()).unwrap()
}

/// A library whose job forks a child that traces the worker. The worker then exits. The kernel hides the exit status of
/// a traced process from its parent.
const TRACED: &str = r#"
#define _GNU_SOURCE
#include <bulkhead.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <unistd.h>

BULKHEAD_LIBRARY

int bulkhead_handle(const bulkhead_job *job, const bulkhead_host *host)
{
    int ready[2];
    char is_traced = 0;
    pid_t worker = getpid();
    if (pipe(ready)) return 1;
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
    if (!fork()) {
        setsid();
        is_traced = !ptrace(PTRACE_SEIZE, worker, 0, 0);
        if (write(ready[1], &is_traced, 1)) pause();
        _exit(0);
    }
    if (read(ready[0], &is_traced, 1) == 1 && is_traced) _exit(3);
    return host->result(job, "not traced", 10);
}
"#;

#[test]
fn worker_that_its_own_child_traces_counts_as_exited() {
    let (_folder, path) = compile_library(TRACED, &[]);
    let (supervisor, client) =
        start(&format!("[bulkhead.t]\nlibrary = {path:?}\nsandbox = {{ profile = \"none\" }}\n"));
    for _ in 0..2 {
        match client.job("t", "").send() {
            Ok(_) => return not_run!("this machine does not permit a process to trace its parent"),
            error => assert_eq!(outcome(&error), "crashed/exit"),
        }
    }
    assert_eq!(supervisor.number("t", "crashed"), 2);
}

/// Returns a tenant name that is unique on this machine. The name is in the environment of all descendants of a
/// program, even of processes that leave the session.
fn tenant(what: &str) -> String {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("{what}-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Returns the names of all live processes that were started for `tenant`.
fn processes_of(tenant: &str) -> Vec<String> {
    let wanted = format!("BULKHEAD_TENANT={tenant}");
    let entries = std::fs::read_dir("/proc").unwrap();
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    let is_one = |pid: &u32| {
        // A zombie or exiting process has no environment.
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|&byte| byte == 0).any(|variable| variable == wanted.as_bytes())
    };
    pids.filter(is_one).filter_map(name).collect()
}

const NOBODY: [&str; 0] = [];

/// Returns a script that starts a process tree and then runs `then`. The processes leave the session, ignore
/// signals and keep standard output open.
fn tree(then: &str) -> String {
    format!(
        "trap '' TERM HUP INT; \
         (setsid sh -c \"trap '' TERM; sleep 1000; :\" &); \
         (setsid sh -c \"(setsid sh -c 'sleep 1000; :' &)\" &); \
         sh -c \"trap '' TERM HUP; sleep 1000; :\" & \
         {then}"
    )
}

fn stands(tenant: &str) -> bool {
    processes_of(tenant).iter().filter(|name| *name == "sleep").count() >= 3
}

fn wait_standing(tenant: &str) {
    wait_for("the process tree is complete", || stands(tenant).then_some(()));
}

fn wait_gone(tenant: &str) {
    wait_for("the tree is gone", || processes_of(tenant).is_empty().then_some(()));
}

// `exec`: input and output.

#[test]
fn program_reads_payload_and_writes_result() {
    let (_supervisor, client) = start("[bulkhead.x]\nexec = [\"cat\"]\n");
    for size in [0, 1, 300_000, 8 << 20] {
        let payload: Vec<u8> = (0..size).map(|i: usize| (i * 7 + i / 251) as u8).collect();
        let reply = client.job("x", payload.clone()).send().unwrap();
        assert!(reply.payload() == payload, "{size} bytes came back as {}", reply.payload().len());
    }
}

#[test]
fn program_can_ignore_its_input() {
    let script = "case $BULKHEAD_OPERATION in \
                  ignore) echo ignored;; \
                  close) exec <&-; echo closed;; \
                  some) head -c 3;; \
                  esac";
    let (_supervisor, client) = shell(script, "");
    let payload = b"abcdefgh".repeat(1 << 18);
    let submit = |operation: &str| client.job("x", payload.clone()).operation(operation).send();
    assert_eq!(text(submit("ignore")), "ignored\n");
    assert_eq!(text(submit("close")), "closed\n");
    assert_eq!(text(submit("some")), "abc");
}

/// Parses lines of the form `NAME=value`.
fn variables(text: &str) -> BTreeMap<String, String> {
    text.lines().filter_map(|line| line.split_once('=')).map(|(k, v)| (k.into(), v.into())).collect()
}

#[test]
fn program_environment_has_only_documented_variables() {
    let (_supervisor, client) = start("[bulkhead.x]\nexec = [\"env\"]\nenv = { MOTTO = \"both ways\" }\n");
    let job = client.job("x", "").operation("turn left").tenant("acme").deadline(Duration::from_secs(40));
    let first = variables(&text(job.send()));
    let names: Vec<_> = first.keys().map(String::as_str).collect();
    let expected = [
        "BULKHEAD_DEADLINE_MS",
        "BULKHEAD_JOB",
        "BULKHEAD_OPERATION",
        "BULKHEAD_TENANT",
        "HOME",
        "MOTTO",
        "PATH",
        "TMPDIR",
    ];
    assert_eq!(names, expected);
    assert_eq!(first["BULKHEAD_OPERATION"], "turn left");
    assert_eq!(first["BULKHEAD_TENANT"], "acme");
    assert_eq!((first["MOTTO"].as_str(), first["PATH"].as_str()), ("both ways", "/usr/bin:/bin"));
    let remaining: u64 = first["BULKHEAD_DEADLINE_MS"].parse().unwrap();
    assert!((1..=40_000).contains(&remaining), "{remaining}");

    let second = variables(&text(client.job("x", "").send()));
    assert_eq!((second["BULKHEAD_OPERATION"].as_str(), second["BULKHEAD_TENANT"].as_str()), ("", ""));
    assert_ne!(first["BULKHEAD_JOB"], second["BULKHEAD_JOB"]);
}

#[test]
fn program_sees_the_job_number_used_in_events() {
    let (supervisor, client) = shell("echo job=$BULKHEAD_JOB >&2; kill -KILL $$", "");
    let error = client.job("x", "").send().unwrap_err();
    let Some(Verdict::Crashed { message, .. }) = error.outcome().map(|o| &o.verdict) else {
        panic!("{error}");
    };
    let (_, named) = message.split_once("job=").unwrap_or_else(|| panic!("{message}"));
    let event = wait_for("the event is there", || {
        let events = supervisor.try_get("/v1/events?bulkhead=x&follow=false")?.1;
        events.lines().find(|line| line.contains("\"job_crashed\"")).map(str::to_owned)
    });
    let event: serde_json::Value = serde_json::from_str(&event).unwrap();
    assert_eq!(event["job"].as_str(), Some(named), "{event}");
}

#[test]
fn job_numbers_are_unique_across_bulkheads() {
    let numbers = "exec = [\"sh\", \"-c\", \"echo $BULKHEAD_JOB\"]\n";
    let (_supervisor, client) = start(&format!(
        "[bulkhead.one]\n{numbers}[bulkhead.other]\n{numbers}[bulkhead.tenants]\n{numbers}tenants.isolate = true\n\
         [bulkhead.full]\nexec = [\"true\"]\nmax_in_flight = 0\nfallback = [\"other\"]\n"
    ));
    let places = [("one", ""), ("other", ""), ("full", ""), ("tenants", "a"), ("tenants", "b")];
    let jobs = places.iter().cycle().take(4 * places.len());
    let submit = |&(name, tenant): &(&str, &str)| text(client.job(name, "").tenant(tenant).send());
    let numbers: Vec<String> = jobs.map(submit).collect();
    let different: std::collections::BTreeSet<&String> = numbers.iter().collect();
    assert_eq!(different.len(), numbers.len(), "{numbers:?}");
}

#[test]
fn program_starts_in_configured_folder() {
    let elsewhere = tempfile::tempdir().unwrap();
    let (supervisor, client) = start(&format!(
        "[bulkhead.there]\nexec = [\"pwd\"]\ncwd = {:?}\n[bulkhead.here]\nexec = [\"pwd\"]\n",
        elsewhere.path()
    ));
    let folder = |name: &str| PathBuf::from(text(client.job(name, "").send()).trim_end());
    assert_eq!(folder("there"), elsewhere.path().canonicalize().unwrap());
    assert_eq!(folder("here"), supervisor.folder.path().canonicalize().unwrap());
}

#[test]
fn output_flood_keeps_first_and_last_lines() {
    let _turn = heavy();
    let (supervisor, client) = shell("seq -f 'line %.0f.' 20000 >&2", "");
    assert_eq!(text(client.job("x", "").send()), "");
    // The loss must be logged although the program writes nothing afterwards.
    wait_for("head, loss and end are in the log", || {
        let log = supervisor.log();
        let parts = ["line 1.", "lines of output were dropped", "line 20000."];
        parts.iter().all(|part| log.contains(part)).then_some(())
    });
    wait_for("the bulkhead's own log has the loss", || {
        let (_, lines) = supervisor.try_get("/v1/bulkheads/x/logs?follow=false")?;
        lines.contains("\"dropped\"").then_some(())
    });
}

#[test]
fn program_inherits_neither_descriptors_nor_signal_settings() {
    let (_supervisor, client) = start(
        "[bulkhead.files]\nexec = [\"ls\", \"/proc/self/fd\"]\n\
         [bulkhead.status]\nexec = [\"cat\", \"/proc/self/status\"]\n",
    );
    // Descriptor 3 is the listed folder, opened by `ls`.
    assert_eq!(text(client.job("files", "").send()), "0\n1\n2\n3\n");
    let status = text(client.job("status", "").send());
    for field in ["SigBlk", "SigIgn"] {
        let line = status.lines().find(|line| line.starts_with(field)).unwrap();
        assert_eq!(line.split_whitespace().nth(1), Some("0000000000000000"), "{line}");
    }
}

#[test]
fn rlimits_apply_to_each_program_separately() {
    let (supervisor, client) = shell(
        "case $BULKHEAD_OPERATION in spin) while :; do :; done;; *) ulimit -n; ulimit -Hn;; esac",
        "[bulkhead.x.rlimits]\nnofile = 48\ncpu = \"1s\"\n",
    );
    assert_eq!(text(client.job("x", "").send()), "48\n48\n");
    let spun = client.job("x", "").operation("spin").send();
    assert_eq!(outcome(&spun), "crashed/signal");
    let message = spun.unwrap_err().to_string();
    assert!(message.contains("SIGXCPU"), "{message}");
    assert_eq!(supervisor.number("x", "restarts"), 0);
}

// `exec`: exit codes and signals.

#[test]
fn exit_status_determines_code_and_fault() {
    let script = "echo \"first line\nstatus $BULKHEAD_OPERATION\" >&2; exit $BULKHEAD_OPERATION";
    let (supervisor, client) = shell(script, "");
    let cases = [
        (1, false, Fault::Dependency),
        (2, false, Fault::Dependency),
        (63, false, Fault::Dependency),
        (64, false, Fault::Caller),
        (65, false, Fault::Caller),
        (66, false, Fault::Dependency),
        (75, true, Fault::Dependency),
        (127, false, Fault::Dependency),
        // A shell exits with 128 + N if signal N killed its child. The job still counts as failed, not as
        // crashed.
        (139, false, Fault::Dependency),
        (255, false, Fault::Dependency),
    ];
    for (status, retryable, fault) in cases {
        let failed = failure(client.job("x", "").operation(status.to_string()).send());
        assert_eq!(failed.code, format!("exit_{status}"));
        assert_eq!(failed.message, format!("first line\nstatus {status}"));
        assert_eq!((failed.retryable, failed.fault), (retryable, fault), "{status}");
    }
    assert_eq!(outcome(&client.job("x", "").operation("0").send()), "ok");
    assert_eq!(supervisor.number("x", "failed"), cases.len() as u64);
    assert_eq!(supervisor.number("x", "restarts"), 0);
}

#[test]
fn failure_message_is_the_end_of_standard_error() {
    let script = "i=0; while [ $i -lt 2000 ]; do echo \"line $i of much\" >&2; i=$((i+1)); done; \
                  printf 'caf\\303\\251 \\377 at last' >&2; exit 3";
    let (supervisor, client) = shell(script, "");
    let failed = failure(client.job("x", "").send());
    assert!(failed.message.ends_with("line 1999 of much\ncafé \u{fffd} at last"), "{}", failed.message);
    assert!((1000..=8192).contains(&failed.message.len()), "{} bytes", failed.message.len());
    wait_for("the log has the beginning of standard error", || {
        supervisor.log().contains("line 7 of much").then_some(())
    });
}

#[test]
fn signal_death_of_program_leaves_worker_running() {
    let (supervisor, client) = shell("echo dying >&2; kill -$BULKHEAD_OPERATION $$; sleep 1000", "");
    let worker = supervisor.worker_pids("x");
    let signals = [("SEGV", 11), ("KILL", 9), ("ABRT", 6), ("TERM", 15), ("BUS", 7), ("PIPE", 13)];
    for (signal, number) in signals {
        let result = client.job("x", "").operation(signal).send();
        assert_eq!(outcome(&result), "crashed/signal", "{signal}");
        let error = result.unwrap_err();
        let Verdict::Crashed { status, message, .. } = &error.outcome().unwrap().verdict else { panic!() };
        assert_eq!(*status, Some(number), "{message}");
        assert!(message.contains(&format!("SIG{signal}")) && message.contains("dying"), "{message}");
    }
    // The number of crashes exceeds `restart.max` (5), the limit on worker deaths.
    assert_eq!(supervisor.number("x", "crashed"), signals.len() as u64);
    assert_eq!(supervisor.number("x", "restarts"), 0);
    assert_eq!(supervisor.worker_pids("x"), worker);
    assert_eq!(supervisor.snapshot("x")["state"], "ready");
}

#[test]
fn missing_program_fails_only_its_job() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("program");
    std::fs::copy("/bin/cat", &program).unwrap();
    let (supervisor, client) = start(&format!("[bulkhead.x]\nexec = [{program:?}]\n"));
    assert_eq!(text(client.job("x", "here").send()), "here");
    std::fs::remove_file(&program).unwrap();
    let failed = failure(client.job("x", "gone").send());
    assert!(failed.message.contains(program.to_str().unwrap()), "{}", failed.message);
    std::fs::copy("/bin/cat", &program).unwrap();
    assert_eq!(text(client.job("x", "again").send()), "again");
    assert_eq!(supervisor.number("x", "restarts"), 0);
}

/// For a missing interpreter, the kernel returns the same error as for a missing file.
#[test]
fn error_for_missing_interpreter_names_the_cause() {
    let folder = tempfile::tempdir().unwrap();
    let [program, worker] = ["program", "worker"].map(|name| folder.path().join(name));
    for path in [&program, &worker] {
        std::fs::write(path, "#!/bin/sh\r\necho\r\n").unwrap();
        std::fs::set_permissions(path, PermissionsExt::from_mode(0o755)).unwrap();
    }
    std::fs::write(&program, "#!/bin/sh\ncat\n").unwrap();
    let (supervisor, client) = start(&format!(
        "[bulkhead.program]\nexec = [{program:?}]\n\
         [bulkhead.worker]\ncommand = [{worker:?}]\nrestart = {{ backoff = \"10ms\", max = 2 }}\n"
    ));
    assert_eq!(text(client.job("program", "fine").send()), "fine");
    std::fs::copy(&worker, &program).unwrap();
    let failed = failure(client.job("program", "").send());
    assert!(failed.message.contains("check for CRLF line endings"), "{}", failed.message);
    let told = &supervisor.wait_events("worker_not_started", 1)[0];
    assert!(told.to_string().contains("exec: the interpreter in the first line"), "{told}");
}

#[test]
fn check_with_start_reports_programs_that_cannot_be_executed() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str, mode: u32| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        path
    };
    let missing = write("missing", "#! /nowhere/sh -e\n", 0o755);
    let cases = [
        ("good", write("good", "#!/bin/sh\n", 0o755), None),
        ("crlf", write("crlf", "#!/bin/sh\r\necho\r\n", 0o755), Some("\"/bin/sh\\r\"")),
        ("script", write("script", &format!("#!{}\n", missing.display()), 0o755), Some("\"/nowhere/sh\"")),
        ("missing", missing, Some("\"/nowhere/sh\"")),
    ];
    for (name, path, why) in cases {
        let config = folder.path().join("workers.toml");
        std::fs::write(&config, format!("[supervisor]\nsocket = \"s\"\n[bulkhead.x]\nexec = [{path:?}]\n"))
            .unwrap();
        let mut command = Command::new(programs().join("bulkhead-supervisor"));
        let output =
            bulkhead_tests::output(command.arg("--config").arg(&config).args(["--check", "--start"]));
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.success(), why.is_none(), "{name}: {told}");
        let is_told = why.is_none_or(|why| told.contains("cannot be executed") && told.contains(why));
        assert!(is_told, "{name}: {told}");
    }
}

#[test]
fn result_over_max_result_fails_the_job() {
    let script = "case $BULKHEAD_OPERATION in \
                  endless) cat /dev/zero;; \
                  inherited) cat /dev/zero & exit 0;; \
                  *) head -c $BULKHEAD_OPERATION /dev/zero;; esac";
    let (supervisor, client) = shell(script, "max_result = \"100KiB\"\n");
    let submit = |operation: &str| client.job("x", "").operation(operation).send();
    assert_eq!(submit("102400").unwrap().payload().len(), 102_400);
    for operation in ["102401", "9000000", "endless"] {
        assert_eq!(outcome(&submit(operation)), "failed/result_too_large", "{operation}");
    }
    // A child that keeps writing fails the job when the result is too large or when `output_grace` ends.
    let inherited = outcome(&submit("inherited"));
    let ends = ["failed/output_incomplete", "failed/result_too_large"];
    assert!(ends.contains(&inherited.as_str()), "{inherited}");
    assert!(resident_bytes(supervisor.worker_pids("x")[0]) < 64 << 20, "an endless result is not stored");
    assert_eq!(supervisor.number("x", "restarts"), 0);
}

// `exec`: processes that a program leaves behind.

#[test]
fn processes_holding_output_of_exited_program_are_killed() {
    let (supervisor, client) = shell(&tree("echo out; exit $BULKHEAD_OPERATION"), "");
    for status in ["0", "4"] {
        let tenant = tenant("HOLDER");
        let result = client.job("x", "").tenant(&tenant).operation(status).send();
        // Does not wait, because all processes must be gone before the outcome is sent.
        assert_eq!(processes_of(&tenant), NOBODY, "processes are left after exit {status}");
        match result {
            Ok(_) => panic!("the result may have been cut short"),
            Err(error) => {
                let code = if status == "0" { "output_incomplete" } else { "exit_4" };
                assert_eq!(
                    (error.payload(), failure(Err(error.clone())).code.as_str()),
                    (&b"out\n"[..], code)
                );
            }
        }
    }
    assert_eq!(supervisor.number("x", "restarts"), 0);
}

#[test]
fn flooding_child_does_not_delay_end_of_program() {
    let _turn = heavy();
    // `yes` writes as fast as possible, so the pipes are never empty for long.
    let script = "yes >&2 & yes >&2 & exit 6";
    let (supervisor, client) = shell(script, "");
    let tenant = tenant("FLOOD");
    let result = client.job("x", "").tenant(&tenant).send();
    assert_eq!(outcome(&result), "failed/exit_6");
    assert_eq!(processes_of(&tenant), NOBODY);
    assert_eq!(supervisor.number("x", "restarts"), 0);
}

#[test]
fn output_flood_after_exit_leaves_neighbour_running() {
    let _turn = heavy();
    let script = "case $BULKHEAD_OPERATION in \
                  wait) n=0; while [ ! -e go ] && [ $n -lt 6000 ]; do sleep 0.01; n=$((n+1)); done; echo here;; \
                  out) yes & yes >&2 & sleep .1; exit 0;; \
                  *) exec >&2; yes & yes & sleep .1; exit 0;; esac";
    let (supervisor, client) = shell(script, "max_in_flight = 2\n");
    let worker = supervisor.worker_pids("x");
    let neighbour = client.job("x", "").operation("wait").start().unwrap();
    for _ in 0..3 {
        let tenant = tenant("FLOOD");
        assert_eq!(outcome(&client.job("x", "").tenant(&tenant).send()), "ok");
        assert_eq!(processes_of(&tenant), NOBODY);
    }
    let flooded = outcome(&client.job("x", "").operation("out").send());
    let ends = ["failed/output_incomplete", "failed/result_too_large"];
    assert!(ends.contains(&flooded.as_str()), "{flooded}");
    std::fs::write(supervisor.folder.path().join("go"), "").unwrap();
    assert_eq!(text(neighbour.wait()), "here\n");
    assert_eq!(supervisor.worker_pids("x"), worker);
}

#[test]
fn deadline_kills_only_the_jobs_process_tree() {
    let (supervisor, client) = shell(&tree("wait; sleep 1000"), "max_in_flight = 2\ngrace = \"60s\"\n");
    let worker = supervisor.worker_pids("x");
    let (ours, theirs) = (tenant("DEADLINE"), tenant("NEIGHBOUR"));
    let neighbour = client.job("x", "").tenant(&theirs).start().unwrap();
    wait_standing(&theirs);
    let deadline = Duration::from_secs(3);
    let late = overrun_blocking(&client.job("x", "").tenant(&ours).deadline(deadline));
    assert_eq!(outcome(&late), "deadline_exceeded/running");
    wait_gone(&ours);
    supervisor.wait_number("x", "available", 1);
    assert!(stands(&theirs), "a neighbour's processes were killed");

    // If the neighbour's client drops the job, the neighbour's processes are killed too.
    drop(neighbour);
    wait_gone(&theirs);
    supervisor.wait_number("x", "available", 2);
    assert_eq!(supervisor.number("x", "cancelled"), 1);
    assert_eq!(supervisor.number("x", "restarts"), 0);
    assert_eq!(supervisor.worker_pids("x"), worker);
}

#[test]
fn client_disconnect_kills_its_program() {
    let (supervisor, client) = shell(&tree("wait; sleep 1000"), "max_in_flight = 2\n");
    let (ours, theirs) = (tenant("LEFT"), tenant("STAYED"));
    let stays = client.job("x", "").tenant(&theirs).start().unwrap();
    wait_standing(&theirs);
    let other = Client::connect(supervisor.socket()).unwrap();
    let job = other.job("x", "").tenant(&ours).start().unwrap();
    wait_standing(&ours);
    // A killed client only closes its socket. Dropping the library's client has the same effect.
    drop(job);
    drop(other);
    wait_gone(&ours);
    assert!(stands(&theirs), "a neighbour's processes were killed");
    drop(stays);
    wait_gone(&theirs);
}

#[test]
fn max_in_flight_limits_concurrent_programs() {
    let script = "printf + >> marks; n=0; \
                  while [ ! -e go ] && [ $n -lt 3000 ]; do sleep 0.01; n=$((n+1)); done; \
                  sleep 0.02; printf - >> marks";
    let (supervisor, client) = shell(script, "max_in_flight = 3\nmax_queue = 50\n");
    let marks = supervisor.folder.path().join("marks");
    let read = || std::fs::read_to_string(&marks).unwrap_or_default();
    let jobs: Vec<_> = (0..24).map(|_| client.job("x", "").start().unwrap()).collect();
    wait_for("three programs run", || (read().len() == 3).then_some(()));
    supervisor.wait_number("x", "queued", 21);
    let worker = supervisor.worker_pids("x")[0];
    let programs = children(worker).into_iter().filter(|&pid| name(pid).as_deref() == Some("sh")).count();
    assert_eq!(programs, 3, "number of programs in the worker");
    std::fs::write(supervisor.folder.path().join("go"), "").unwrap();
    for job in jobs {
        job.wait().unwrap();
    }
    let (mut running, mut most) = (0, 0);
    for mark in read().bytes() {
        running += if mark == b'+' { 1 } else { -1 };
        most = most.max(running);
    }
    assert_eq!((running, most), (0, 3), "{}", read());
}

#[test]
fn worker_death_kills_process_trees_of_programs() {
    let (supervisor, client) = shell(&tree("wait; sleep 1000"), "max_in_flight = 2\n");
    for round in 0..5 {
        let worker = supervisor.worker_pids("x")[0];
        let tenants = [tenant("HOST"), tenant("HOST")];
        let jobs = tenants.each_ref().map(|tenant| client.job("x", "").tenant(tenant).start().unwrap());
        tenants.iter().for_each(|tenant| wait_standing(tenant));
        kill_pid(worker, Signal::SIGKILL);
        for (job, tenant) in jobs.into_iter().zip(&tenants) {
            let result = job.wait();
            // Does not wait, because the outcome must come after all processes are gone.
            assert_eq!(processes_of(tenant), NOBODY, "round {round}");
            assert_eq!(outcome(&result), "crashed/signal", "round {round}");
        }
        assert!(!is_alive(worker));
        supervisor.wait_number("x", "limit", 2);
    }
    assert_eq!(supervisor.number("x", "crashed"), 10);
}

/// The test covers programs that succeed, programs that fail, and programs that are killed by a signal.
#[test]
fn finished_programs_leave_no_processes_or_descriptors() {
    let _turn = heavy();
    let script = "(setsid sleep 1000 &); \
                  case $BULKHEAD_OPERATION in kill) kill -KILL $$;; fail) exit 3;; esac; echo fine";
    let (supervisor, client) = shell(script, "max_in_flight = 4\nmax_queue = 1000\n");
    let worker = supervisor.worker_pids("x")[0];
    let tenant = tenant("MANY");
    let round = || {
        let operations = ["", "kill", "fail"].into_iter().cycle().take(60);
        let submit = |operation| client.job("x", "").tenant(&tenant).operation(operation).start().unwrap();
        let jobs: Vec<_> = operations.map(submit).collect();
        let counts = tally(jobs.into_iter().map(|job| outcome(&job.wait())));
        assert_eq!(counts.len(), 3, "{counts:?}");
        assert!(counts.values().all(|&count| count == 20), "{counts:?}");
        assert_eq!(processes_of(&tenant), NOBODY);
        bulkhead_tests::descriptors(worker)
    };
    let before = round();
    for _ in 0..3 {
        round();
    }
    // The host may close its last descriptors only after it has sent the outcome.
    wait_for("the worker has no more descriptors than before", || {
        (bulkhead_tests::descriptors(worker) <= before).then_some(())
    });
    wait_for("the worker has no zombies", || zombies_of(worker).is_empty().then_some(()));
}

/// Returns the zombie children of `parent`.
fn zombies_of(parent: u32) -> Vec<u32> {
    let is_zombie_of = |pid: &u32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        status.contains("\nState:\tZ") && status.contains(&format!("\nPPid:\t{parent}\n"))
    };
    let entries = std::fs::read_dir("/proc").unwrap();
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(is_zombie_of).collect()
}

// `library`.

/// Source of the library that the tests load. Each job's operation selects what the library does.
const LIBRARY: &str = r#"
#include <bulkhead.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

BULKHEAD_LIBRARY

static atomic_int inits, inside;

int bulkhead_init(char *message, size_t size)
{
    snprintf(message, size, "all is well");
    inits++;
    return 0;
}

static int says(const bulkhead_job *job, const bulkhead_host *host, const char *text)
{
    return host->result(job, text, strlen(text));
}

static int parts(const bulkhead_job *job, const bulkhead_host *host)
{
    char text[200];
    if (job->struct_size != sizeof *job || host->struct_size != sizeof *host || !job->payload)
        return 100;
    if (host->abi_version != BULKHEAD_ABI_VERSION || !host->remaining_ms(job) || !job->number)
        return 101;
    snprintf(text, sizeof text, "%s|%s|%zu|%d|", job->operation, job->tenant, job->payload_len, inits);
    says(job, host, text);
    host->result(job, NULL, 0);
    host->result(job, job->payload, job->payload_len);
    return says(job, host, "|end");
}

static int fills(const bulkhead_job *job, const bulkhead_host *host)
{
    static char zeros[1000];
    int n = 0;
    while (n < 1000000 && host->result(job, zeros, sizeof zeros) == 0)
        n++;
    return 0;
}

static int meets(const bulkhead_job *job, const bulkhead_host *host)
{
    inside++;
    while (inside < 4 && !host->is_cancelled(job))
        usleep(1000);
    return 0;
}

int bulkhead_handle(const bulkhead_job *job, const bulkhead_host *host)
{
    const char *op = job->operation;
    char text[32];
    if (!strcmp(op, "parts")) return parts(job, host);
    if (!strcmp(op, "fill")) return fills(job, host);
    if (!strcmp(op, "meet")) return meets(job, host);
    if (!strcmp(op, "silent")) return 7;
    if (!strcmp(op, "deep")) { volatile char stack[6 << 20]; for (size_t i = 0; i < sizeof stack; i += 4096) stack[i] = 1; return 0; }
    if (!strcmp(op, "secret")) return says(job, host, getenv("SECRET"));
    if (!strcmp(op, "segv")) *(volatile int *)0 = 1;
    if (!strcmp(op, "exit")) exit(9);
    if (!strcmp(op, "abort")) abort();
    if (!strcmp(op, "fail")) {
        host->result(job, "half", 4);
        host->error(job, "bad_header", "the magic is missing", BULKHEAD_CALLER_FAULT);
        return 1;
    }
    if (!strcmp(op, "busy")) { host->error(job, "busy", NULL, BULKHEAD_RETRYABLE); return -1; }
    if (!strcmp(op, "null")) return host->result(job, NULL, 5) == -1 ? says(job, host, "refused") : 1;
    if (!strcmp(op, "wait")) {
        host->progress(job, 0.25, "waiting");
        while (!host->is_cancelled(job)) usleep(1000);
        return 1;
    }
    if (!strcmp(op, "thread")) {
        snprintf(text, sizeof text, "%d", (int)gettid());
        return says(job, host, text);
    }
    return host->result(job, job->payload, job->payload_len);
}

int other_entry(const bulkhead_job *job, const bulkhead_host *host)
{
    return says(job, host, "from the other entry");
}
"#;

fn library(keys: &str) -> (tempfile::TempDir, Supervisor, Client) {
    let (folder, path) = compile_library(LIBRARY, &["-D_GNU_SOURCE"]);
    let (supervisor, client) = start(&format!("[bulkhead.x]\nlibrary = {path:?}\n{keys}\n"));
    (folder, supervisor, client)
}

/// A library in standard C99.
const STANDARD_C: &str = r#"
#include <bulkhead.h>

BULKHEAD_LIBRARY

int bulkhead_handle(const bulkhead_job *job, const bulkhead_host *host)
{
    return host->result(job, job->payload, job->payload_len);
}
"#;

#[test]
fn library_can_be_compiled_with_hidden_visibility() {
    let flags = ["-std=c99", "-pedantic", "-fvisibility=hidden"];
    let (_folder, path) = compile_library(STANDARD_C, &flags);
    let (_supervisor, client) = start(&format!("[bulkhead.c]\nlibrary = {path:?}\n"));
    assert_eq!(text(client.job("c", "said").send()), "said");
}

/// A library in C++. Its functions have C linkage because `bulkhead.h` declares them.
const CPP: &str = r#"
#include <bulkhead.h>
#include <stdexcept>
#include <string>

BULKHEAD_LIBRARY

static std::string greeting;

static void fail()
{
    throw std::runtime_error("nobody catches this");
}

int bulkhead_init(char *message, size_t size) BULKHEAD_NOEXCEPT
{
    greeting = "hello ";
    return 0;
}

int bulkhead_handle(const bulkhead_job *job, const bulkhead_host *host) BULKHEAD_NOEXCEPT
{
    std::string result = greeting + std::string(reinterpret_cast<const char *>(job->payload), job->payload_len);
    if (result == "hello exception") fail();
    return host->result(job, result.data(), result.size());
}

extern "C" BULKHEAD_EXPORT int handle_loudly(const bulkhead_job *job, const bulkhead_host *host) BULKHEAD_NOEXCEPT
{
    return host->result(job, "HELLO", 5);
}
"#;

#[test]
fn library_can_be_written_in_cpp() {
    for standard in ["-std=c++98", "-std=c++11", "-std=c++17"] {
        let flags = [standard, "-pedantic", "-fvisibility=hidden"];
        let Some((_folder, path)) = compile_cpp_library(CPP, &flags) else { return };
        let (supervisor, client) = start(&format!(
            "[bulkhead.cpp]\nlibrary = {path:?}\n[bulkhead.loud]\nlibrary = {path:?}\nentry = \"handle_loudly\"\n"
        ));
        assert_eq!(text(client.job("cpp", "said").send()), "hello said", "{standard}");
        assert_eq!(text(client.job("loud", "said").send()), "HELLO", "{standard}");
        assert_eq!(outcome(&client.job("cpp", "exception").send()), "crashed/signal", "{standard}");
        wait_for("the log has the exception", || {
            supervisor.log().contains("nobody catches this").then_some(())
        });
    }
}

#[test]
fn library_can_return_its_result_in_parts() {
    let (_folder, supervisor, client) = library("");
    for _ in 0..3 {
        // The count of `bulkhead_init` calls in the result stays 1 for all jobs.
        let reply = client.job("x", "payload").operation("parts").tenant("acme").send();
        assert_eq!(text(reply), "parts|acme|7|1|payload|end");
    }
    assert_eq!(text(client.job("x", "").operation("parts").send()), "parts||0|1||end");
    for size in [0, 1, 300_000, 8 << 20] {
        let payload: Vec<u8> = (0..size).map(|i: usize| (i * 13 + i / 257) as u8).collect();
        assert!(client.job("x", payload.clone()).send().unwrap().payload() == payload, "{size} bytes");
    }
    assert_eq!(supervisor.number("x", "restarts"), 0);
}

#[test]
fn library_gets_secret_from_file() {
    use std::os::unix::fs::PermissionsExt as _;
    let secret = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(secret.path(), "sesame\n").unwrap();
    std::fs::set_permissions(secret.path(), std::fs::Permissions::from_mode(0o600)).unwrap();
    let (_folder, _supervisor, client) = library(&format!("env_files = {{ SECRET = {:?} }}", secret.path()));
    assert_eq!(text(client.job("x", "").operation("secret").send()), "sesame");
}

#[test]
fn library_reports_failure_reason() {
    let (_folder, supervisor, client) = library("max_result = \"1MiB\"\n");
    let submit = |operation: &str| failure(client.job("x", "").operation(operation).send());
    let failed = submit("fail");
    assert_eq!((failed.code.as_str(), failed.message.as_str()), ("bad_header", "the magic is missing"));
    assert_eq!((failed.retryable, failed.fault), (false, Fault::Caller));
    let failed = submit("busy");
    assert_eq!((failed.code.as_str(), failed.message.as_str()), ("busy", ""));
    assert_eq!((failed.retryable, failed.fault), (true, Fault::Dependency));
    assert_eq!(submit("silent").code, "error_7");
    assert_eq!(submit("fill").code, "result_too_large");
    let failed = submit("null");
    assert_eq!((failed.code.as_str(), failed.message.contains("NULL")), ("library", true), "{failed:?}");
    assert_eq!(supervisor.number("x", "restarts"), 0);
}

#[test]
fn library_observes_deadline_and_cancellation() {
    let (_folder, supervisor, client) = library("grace = \"30s\"\n");
    let worker = supervisor.worker_pids("x");
    let limit = Duration::from_secs(2);
    let late = overrun_blocking(&client.job("x", "").operation("wait").deadline(limit));
    assert_eq!(outcome(&late), "deadline_exceeded/running");
    // The permit is free long before the `grace` period of 30 s ends, because the library checks for cancellation.
    supervisor.wait_number("x", "available", 1);

    let mut job = client.job("x", "").operation("wait").start().unwrap();
    let progress = job.progress().unwrap();
    assert_eq!((progress.fraction, progress.text.as_str()), (0.25, "waiting"));
    drop(job);
    supervisor.wait_number("x", "cancelled", 1);
    supervisor.wait_number("x", "available", 1);
    assert_eq!(supervisor.worker_pids("x"), worker);
}

#[test]
fn library_crash_kills_only_its_worker() {
    let (_folder, supervisor, client) = library("");
    for (operation, expected) in
        [("segv", "crashed/signal"), ("abort", "crashed/signal"), ("exit", "crashed/exit")]
    {
        assert_eq!(outcome(&client.job("x", "").operation(operation).send()), expected);
        supervisor.wait_number("x", "limit", 1);
        assert_eq!(text(client.job("x", "well").send()), "well");
    }
    let error = client.job("x", "").operation("segv").send().unwrap_err();
    assert!(error.to_string().contains("SIGSEGV"), "{error}");
}

/// The library gets stacks of the size that threads of an ordinary C program would have under the same limit.
#[test]
fn library_can_use_the_stack_of_rlimits() {
    let (_folder, _supervisor, client) = library("max_in_flight = 2\nrlimits = { stack = \"8MiB\" }\n");
    let jobs = [(); 2].map(|()| client.job("x", "").operation("deep").start().unwrap());
    for job in jobs {
        job.wait().unwrap();
    }
}

#[test]
fn library_is_called_from_max_in_flight_threads() {
    let (_folder, _supervisor, client) = library("");
    let submit = || text(client.job("x", "").operation("thread").send());
    let first = submit();
    assert!((0..30).all(|_| submit() == first));

    // Each job waits inside the library for the other three.
    let (_folder, _supervisor, client) = library("max_in_flight = 4\n");
    let jobs: Vec<_> = (0..4).map(|_| client.job("x", "").operation("meet").start().unwrap()).collect();
    jobs.into_iter().for_each(|job| assert_eq!(outcome(&job.wait()), "ok"));
}

#[test]
fn entry_key_selects_the_library_function() {
    let (_folder, _supervisor, client) = library("entry = \"other_entry\"\n");
    assert_eq!(text(client.job("x", "").send()), "from the other entry");
}

const FAILS_AT_INIT: &str = "#include <bulkhead.h>\n#include <stdio.h>\nBULKHEAD_LIBRARY\n\
    int bulkhead_handle(const bulkhead_job *job, const bulkhead_host *host) { return 0; }\n\
    int bulkhead_init(char *message, size_t size)\n\
    { snprintf(message, size, \"the licence has expired\"); return 5; }\n";

const OF_ANOTHER_VERSION: &str = "#include <bulkhead.h>\nconst uint32_t bulkhead_abi_version = 2;\n\
    int bulkhead_handle(const bulkhead_job *job, const bulkhead_host *host) { return 0; }\n\
    int bulkhead_init(char *message, size_t size) { return 1; }\n";

const UNMARKED: &str = "#include <bulkhead.h>\n\
    int bulkhead_handle(const bulkhead_job *job, const bulkhead_host *host) { return 0; }\n\
    int bulkhead_init(char *message, size_t size) { return 1; }\n";

const INCOMPLETE: &str = "#include <bulkhead.h>\nBULKHEAD_LIBRARY\nint defined_nowhere(void);\n\
    int bulkhead_handle(const bulkhead_job *job, const bulkhead_host *host)\n\
    { return defined_nowhere(); }\n";

const DIES_AT_INIT: &str = "#include <bulkhead.h>\n#include <stdlib.h>\nBULKHEAD_LIBRARY\n\
    int bulkhead_handle(const bulkhead_job *job, const bulkhead_host *host) { return 0; }\n\
    int bulkhead_init(char *message, size_t size) { abort(); }\n";

fn wait_failed(supervisor: &Supervisor, bulkhead: &str) {
    wait_for(&format!("{bulkhead} has failed"), || {
        (supervisor.snapshot(bulkhead)["state"] == "failed").then_some(())
    });
}

#[test]
fn log_explains_why_library_cannot_be_used() {
    let sources = [
        (FAILS_AT_INIT, "returned 5: the licence has expired"),
        (OF_ANOTHER_VERSION, "version 2 of bulkhead.h"),
        (UNMARKED, "BULKHEAD_LIBRARY"),
        (INCOMPLETE, "defined_nowhere"),
        (DIES_AT_INIT, "SIGABRT"),
    ];
    let compiled = sources.map(|(source, _)| compile_library(source, &[]));
    let (_folder, good) = compile_library(LIBRARY, &["-D_GNU_SOURCE"]);
    let text_file = compiled[0].0.path().join("text.so");
    std::fs::write(&text_file, "not a library").unwrap();

    let mut cases: Vec<_> = compiled.iter().zip(sources).map(|((_, p), (_, why))| (p, "", why)).collect();
    cases.push((&good, "entry = \"no_such_entry\"\n", "no function no_such_entry"));
    cases.push((&text_file, "", "failed to load"));
    let bulkheads = cases.iter().enumerate().map(|(i, (path, keys, _))| {
        format!("[bulkhead.b{i}]\nlibrary = {path:?}\n{keys}restart = {{ backoff = \"10ms\", max = 2 }}\n")
    });
    let (supervisor, client) =
        start(&format!("{}[bulkhead.good]\nlibrary = {good:?}\n", bulkheads.collect::<String>()));
    for (i, (_, _, why)) in cases.iter().enumerate() {
        wait_failed(&supervisor, &format!("b{i}"));
        wait_for(&format!("the log says '{why}'"), || supervisor.log().contains(why).then_some(()));
        assert_eq!(outcome(&client.job(format!("b{i}"), "").send()), "rejected/unavailable");
    }
    assert_eq!(text(client.job("good", "well").send()), "well");
}

/// The configured limit on open files is higher than any user can set.
#[test]
fn rlimit_above_hard_limit_prevents_start_of_exec() {
    let keys = "rlimits = { nofile = 1099511627776 }\nrestart = { backoff = \"10ms\", max = 2 }\n";
    let (supervisor, client) = shell("exit 0", keys);
    wait_failed(&supervisor, "x");
    let why =
        "rlimit nofile: 1099511627776 is above the hard limit of the supervisor: lower `rlimits.nofile`";
    wait_for("the log names the limit", || supervisor.log().contains(why).then_some(()));
    assert_eq!(outcome(&client.job("x", "").send()), "rejected/unavailable");
}

/// A confined host has a lower limit on open files than its supervisor by default.
#[test]
fn exec_programs_can_have_the_supervisors_limit_on_open_files() {
    let folder = tempfile::tempdir().unwrap();
    let bulkheads = "[bulkhead.x]\nexec = [\"sh\", \"-c\", \"ulimit -n\"]\nrlimits = { nofile = 1024 }\n";
    let prlimit = ["prlimit", "--nofile=1024:1024"];
    let supervisor = Supervisor::launch_under(&prlimit, folder, "", bulkheads).until_ready();
    let client = Client::connect(supervisor.socket()).unwrap();
    assert_eq!(text(client.job("x", "").send()), "1024\n");
}

#[test]
fn configuration_shows_number_of_clients_that_open_files_allow() {
    let folder = tempfile::tempdir().unwrap();
    let bulkheads = "[bulkhead.x]\nexec = [\"true\"]\n";
    let prlimit = ["prlimit", "--nofile=1024:1024"];
    let supervisor =
        Supervisor::launch_under(&prlimit, folder, "max_clients = 100000", bulkheads).until_ready();
    let shown = || supervisor.get("/v1/config")["supervisor"]["max_clients"].as_u64().unwrap();
    let before = shown();
    assert!(before < 1024, "{before}");
    assert_eq!(supervisor.post("/v1/reload").0, 200);
    assert_eq!(shown(), before);
}

/// If a start fails, the host first sends the reason in STATUS, so that operators need not search the output of the
/// dead process.
#[test]
fn event_explains_failed_library_start() {
    let (_folder, path) = compile_library(FAILS_AT_INIT, &[]);
    let (supervisor, _client) =
        start(&format!("[bulkhead.x]\nlibrary = {path:?}\nrestart = {{ backoff = \"10ms\", max = 2 }}\n"));
    wait_failed(&supervisor, "x");
    let event = wait_for("the event is there", || {
        let events = supervisor.try_get("/v1/events?bulkhead=x&follow=false")?.1;
        events.lines().find(|line| line.contains("bulkhead_failed")).map(str::to_owned)
    });
    assert!(event.contains("the licence has expired"), "{event}");
    let snapshot = supervisor.snapshot("x");
    let detail = snapshot["detail"].as_str().unwrap_or_default();
    assert!(detail.contains("the licence has expired"), "{detail}");
}

/// Source of a library that damages its worker. Forked processes return from library functions, and handlers close
/// or replace descriptors.
const CARELESS: &str = r#"
#include <bulkhead.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
BULKHEAD_LIBRARY

static const char *left;
static char initialised[32] = "no child";

static void at_exit(void)
{
    if (left) close(open(left, O_CREAT | O_WRONLY, 0600));
}

static void wait_for(pid_t child, char *text, size_t size)
{
    int status = 0;
    waitpid(child, &status, 0);
    if (WIFEXITED(status)) snprintf(text, size, "exited with %d", WEXITSTATUS(status));
    else snprintf(text, size, "killed by %d", WTERMSIG(status));
}

int bulkhead_init(char *message, size_t size)
{
    pid_t child = fork();
    if (child == 0) { alarm(60); return 0; }
    wait_for(child, initialised, sizeof initialised);
    atexit(at_exit);
    return 0;
}

int bulkhead_handle(const bulkhead_job *job, const bulkhead_host *host)
{
    const char *op = job->operation;
    char text[64];
    if (!strcmp(op, "fork")) {
        char path[256];
        snprintf(path, sizeof path, "%.*s", (int)job->payload_len, (const char *)job->payload);
        left = path;
        pid_t child = fork();
        if (child == 0) {
            alarm(60);
            host->progress(job, 0.5, "in the child");
            host->result(job, "child", 5);
            return 0;
        }
        wait_for(child, text, sizeof text);
        left = NULL;
    } else if (!strcmp(op, "close")) {
        for (int fd = 3; fd < 256; fd++) close(fd);
        return 0;
    } else if (!strcmp(op, "replace")) {
        int pair[2];
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) return 1;
        for (int fd = 3; fd < 256; fd++)
            if (fd != pair[0] && fd != pair[1] && fcntl(fd, F_GETFD) >= 0) dup2(pair[0], fd);
        pause();
        return 0;
    } else if (!strcmp(op, "abort")) {
        abort();
    } else if (!strcmp(op, "init")) {
        strcpy(text, initialised);
    } else {
        snprintf(text, sizeof text, "%d", (int)getpid());
    }
    return host->result(job, text, strlen(text));
}
"#;

fn careless(keys: &str) -> (tempfile::TempDir, Supervisor, Client) {
    let (folder, path) = compile_library(CARELESS, &["-D_GNU_SOURCE"]);
    let (supervisor, client) = start(&format!("[bulkhead.x]\nlibrary = {path:?}\n{keys}\n"));
    (folder, supervisor, client)
}

#[test]
fn forked_process_that_returns_is_not_a_worker() {
    let (folder, supervisor, client) = careless("");
    let submit = |operation: &str, payload: &str| client.job("x", payload).operation(operation).send();
    assert_eq!(text(submit("init", "")), "exited with 1");
    let process = text(submit("who", ""));
    let left = folder.path().join("left");
    assert_eq!(text(submit("fork", left.to_str().unwrap())), "exited with 1");
    assert!(!left.exists(), "the forked process ran the exit handler of the library");
    assert_eq!(text(submit("who", "")), process);
    assert_eq!(outcome(&submit("abort", "")), "crashed/signal");
    assert_eq!(supervisor.number("x", "late_replies"), 0);
    wait_for("the log names the mistake", || {
        supervisor.log().contains("a process forked by this worker returned from its handler").then_some(())
    });
}

#[test]
fn worker_exits_when_its_link_is_lost() {
    let (_folder, supervisor, client) = careless("health = { heartbeat = \"200ms\", missed = 500 }\n");
    for (nth, operation) in ["close", "replace"].into_iter().enumerate() {
        let job = client.job("x", "").operation(operation).start().unwrap();
        supervisor.wait_number("x", "restarts", nth as u64 + 1);
        // The worker exits because its link is lost, long before the job's deadline of one minute.
        assert_ne!(outcome(&job.wait()), "deadline_exceeded/running");
        assert_eq!(text(client.job("x", "").operation("init").send()), "exited with 1");
    }
    wait_for("the log names the mistake", || {
        supervisor.log().contains("closed or replaced the worker's link").then_some(())
    });
}

const HANGS_AT_EXIT: &str = "#include <bulkhead.h>\n#include <unistd.h>\nBULKHEAD_LIBRARY\n\
    __attribute__((destructor)) static void hang(void) { for (;;) pause(); }\n\
    int bulkhead_handle(const bulkhead_job *job, const bulkhead_host *host) { return 0; }\n";

#[test]
fn hanging_destructor_does_not_delay_jobs() {
    let (_folder, path) = compile_library(HANGS_AT_EXIT, &[]);
    let keys = "recycle = { jobs = 1 }\nmax_queue = 4\nsandbox.profile = \"none\"\n";
    let (_supervisor, client) = start(&format!("[bulkhead.x]\nlibrary = {path:?}\n{keys}"));
    let mut workers = Vec::new();
    // On a busy machine, starting a worker can take longer than killing a hanging one.
    wait_for("a job is served while an earlier worker hangs", || {
        workers.push(client.job("x", "").send().unwrap().outcome().worker_pid.unwrap());
        let two_before = workers.len().checked_sub(3).map(|at| workers[at]);
        two_before.filter(|&pid| is_alive(pid))
    });
}
