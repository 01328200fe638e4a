//! Backtraces in crash reports. A symbolizer derives them from a worker's crash record, which is untrusted.

use std::time::Instant;

use bulkhead_client::blocking::Client;
use bulkhead_tests::http::Place;
use bulkhead_tests::{Supervisor, compile_library, outcome, programs, wait_for};
use serde_json::Value;

/// A library that crashes in an inner function.
const LIBRARY: &str = r#"
#define _GNU_SOURCE
#include <bulkhead.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

BULKHEAD_LIBRARY

struct node { struct node *next; int value; };

static __attribute__((noinline)) int walk_list(const struct node *node)
{
    int sum = 0;
    for (;;) {
        sum += *(volatile const int *)&node->value; /* the line that crashes */
        node = node->next;
    }
    return sum;
}

static __attribute__((noinline)) int overflow(volatile char *previous)
{
    volatile char page[1000];
    if (previous[0]) return 0;
    page[0] = previous[0];
    return overflow(page) + page[0];
}

/* Reads a page of an empty file. */
static int read_beyond_end(void)
{
    int file = memfd_create("empty", 0);
    return *(volatile char *)mmap(NULL, 4096, PROT_READ, MAP_SHARED, file, 0);
}

static pthread_barrier_t barrier;

static void *crash_together(void *unused)
{
    pthread_barrier_wait(&barrier);
    walk_list(NULL);
    return unused;
}

int bulkhead_handle(const bulkhead_job *job, const bulkhead_host *host)
{
    const char *op = job->operation;
    struct node last = { NULL, 1 }, first = { &last, 2 };
    volatile char start = 0;
    int (*volatile nowhere)(void) = NULL;
    if (!strcmp(op, "walk")) return walk_list(&first);
    if (!strcmp(op, "call")) return nowhere() + 1;
    if (!strcmp(op, "overflow")) return overflow(&start) + 1;
    if (!strcmp(op, "abort")) abort();
#ifdef __x86_64__
    if (!strcmp(op, "breakpoint")) __asm__ volatile("int3");
    if (!strcmp(op, "illegal")) __asm__ volatile("ud2");
    if (!strcmp(op, "divide")) return 100 / (int)start;
#else
    if (!strcmp(op, "breakpoint")) __asm__ volatile("brk #0");
    if (!strcmp(op, "illegal")) __asm__ volatile("udf #0");
    if (!strcmp(op, "divide")) raise(SIGFPE); /* A division by zero is no error. */
#endif
    if (!strcmp(op, "beyond-end")) return read_beyond_end() + 1;
    if (!strcmp(op, "kill")) {
        kill(getpid(), SIGSEGV);
        for (;;) pause();
    }
    if (!strcmp(op, "unrecorded")) {
        signal(SIGSEGV, SIG_DFL);
        return walk_list(NULL);
    }
    if (!strcmp(op, "child")) {
        int status = 0;
        pid_t child = fork();
        if (child == 0) return walk_list(NULL);
        waitpid(child, &status, 0);
        op = WIFSIGNALED(status) ? strsignal(WTERMSIG(status)) : "not killed";
    }
    if (!strncmp(op, "both-", 5)) {
        pthread_t thread;
        pthread_barrier_init(&barrier, NULL, 2);
        pthread_create(&thread, NULL, crash_together, NULL);
        pthread_barrier_wait(&barrier);
        if (!strcmp(op, "both-abort")) abort();
        return walk_list(NULL);
    }
    return host->result(job, op, strlen(op));
}
"#;

const STRICT: &str = "sandbox = { profile = \"strict\", best_effort = [\"identity\"] }";

/// Crashes a worker of the bulkhead `b`. Returns the crash report with a backtrace.
fn crash(supervisor: &Supervisor, operation: &str) -> Value {
    crash_in(supervisor, "b", operation)
}

/// Crashes a worker of a bulkhead. Returns the crash report with a backtrace.
fn crash_in(supervisor: &Supervisor, bulkhead: &str, operation: &str) -> Value {
    let client = Client::connect(supervisor.socket()).unwrap();
    let error = client.job(bulkhead, "p").operation(operation).send().unwrap_err();
    let id = error.outcome().and_then(|outcome| outcome.report.clone()).expect("an id");
    wait_for("the backtrace", || {
        let report = supervisor.crash_report(&id);
        report.get("native").is_some().then_some(report)
    })
}

/// Returns the frames of the first thread in the report.
fn frames(report: &Value) -> &Vec<Value> {
    let native = &report["native"];
    assert_eq!(native["unavailable"], Value::Null, "{native:#}");
    native["threads"][0]["frames"].as_array().expect("frames")
}

fn frame_of<'r>(report: &'r Value, function: &str) -> &'r Value {
    let has_name = |frame: &&Value| frame["function"].as_str().is_some_and(|name| name.contains(function));
    frames(report)
        .iter()
        .find(has_name)
        .unwrap_or_else(|| panic!("no frame of {function}: {:#}", report["native"]))
}

fn line_of(text: &str) -> u64 {
    1 + LIBRARY.lines().position(|line| line.contains(text)).expect("a line") as u64
}

#[test]
fn report_of_crash_in_strict_library_names_function_and_line() {
    let (_folder, path) = compile_library(LIBRARY, &["-g", "-O1"]);
    let supervisor = Supervisor::start(&format!("[bulkhead.b]\nlibrary = {path:?}\n{STRICT}\n"));
    let report = crash(&supervisor, "walk");
    let (native, crashed) = (&report["native"], &frames(&report)[0]);
    assert_eq!(
        (&crashed["function"], &crashed["line"]),
        (&"walk_list".into(), &line_of("that crashes").into())
    );
    assert!(crashed["file"].as_str().unwrap().ends_with("library.c"), "{crashed}");
    assert_eq!((&native["signal_code"], &native["address"]), (&1.into(), &"0x8".into()), "{native:#}");
    assert_eq!(frame_of(&report, "bulkhead_handle")["module"], path.to_str().unwrap());
    let registers = native["threads"][0]["registers"].as_object().unwrap();
    assert!(registers.contains_key(if cfg!(target_arch = "x86_64") { "rip" } else { "pc" }), "{registers:?}");
    // The host calls the library from a pool thread, whose frames have names as well.
    assert!(frame_of(&report, "bulkhead_worker::pool")["line"].is_u64());
    let shown = supervisor.command().args(["crashes", "last"]).output().unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.contains("#0  walk_list at ") && shown.contains("address 0x8"), "{shown}");

    let report = crash(&supervisor, "call");
    assert_eq!(frames(&report)[0]["offset"], "0x0");
    assert_eq!(frames(&report)[1]["function"], "bulkhead_handle");
    assert_eq!(frames(&report)[1]["line"], line_of("return nowhere()"));

    let report = crash(&supervisor, "abort");
    assert_eq!((&report["signal"], &report["native"]["address"]), (&"SIGABRT".into(), &"0x0".into()));
    assert_eq!(frame_of(&report, "bulkhead_handle")["line"], line_of("abort();"));

    let report = crash(&supervisor, "overflow");
    assert_eq!((frames(&report).len(), &frames(&report)[50]["function"]), (64, &"overflow".into()));
}

/// On x86-64, the program continues after a breakpoint if the signal handler returns.
#[test]
fn every_fatal_signal_kills_worker_with_a_backtrace() {
    let (_folder, path) = compile_library(LIBRARY, &["-g", "-O1"]);
    let supervisor = Supervisor::start(&format!("[bulkhead.b]\nlibrary = {path:?}\n{STRICT}\n"));
    for (operation, signal) in [
        ("breakpoint", "SIGTRAP"),
        ("abort", "SIGABRT"),
        ("illegal", "SIGILL"),
        ("divide", "SIGFPE"),
        ("beyond-end", "SIGBUS"),
    ] {
        let report = crash(&supervisor, operation);
        assert_eq!(report["signal"], signal, "{operation}");
        assert!(frame_of(&report, "bulkhead_handle")["line"].is_u64(), "{:#}", report["native"]);
    }
}

/// The kernel can deliver the signal to any thread.
#[test]
fn sent_signal_kills_worker_with_a_backtrace() {
    let (_folder, path) = compile_library(LIBRARY, &["-g", "-O1"]);
    let supervisor = Supervisor::start(&format!("[bulkhead.b]\nlibrary = {path:?}\n{STRICT}\n"));
    let report = crash(&supervisor, "kill");
    let native = &report["native"];
    assert_eq!(report["signal"], "SIGSEGV");
    assert_eq!((&native["signal_code"], &native["address"]), (&0.into(), &"0x0".into()), "{native:#}");
    assert!(!frames(&report).is_empty());
}

#[test]
fn crash_of_forked_child_leaves_no_record() {
    let (_folder, path) = compile_library(LIBRARY, &["-g", "-O1"]);
    let supervisor = Supervisor::start(&format!("[bulkhead.b]\nlibrary = {path:?}\n{STRICT}\n"));
    let client = Client::connect(supervisor.socket()).unwrap();
    let reply = client.job("b", "p").operation("child").send().unwrap();
    assert_eq!(reply.payload(), b"Segmentation fault");
    let report = crash(&supervisor, "unrecorded");
    assert_eq!(reply.outcome().worker_pid, report["pid"].as_u64().map(|pid| pid as u32), "{report:#}");
    assert!(report["native"]["unavailable"].as_str().unwrap().contains("no record"), "{}", report["native"]);
    assert_eq!(frames(&crash(&supervisor, "walk"))[0]["function"], "walk_list");
}

/// The first thread records its state, and the other thread waits until the process is dead.
#[test]
fn simultaneous_crashes_of_two_threads_produce_one_backtrace() {
    let (_folder, path) = compile_library(LIBRARY, &["-g", "-O1", "-pthread"]);
    let supervisor = Supervisor::start(&format!("[bulkhead.b]\nlibrary = {path:?}\n{STRICT}\n"));
    for operation in ["both-walk", "both-abort"] {
        let report = crash(&supervisor, operation);
        let function = if report["signal"] == "SIGABRT" { "bulkhead_handle" } else { "walk_list" };
        frame_of(&report, function);
    }
}

/// Simulates a package update that replaces the program's file while the supervisor is running.
#[test]
fn replaced_program_file_does_not_prevent_backtraces() {
    let (_library, path) = compile_library(LIBRARY, &["-g", "-O1"]);
    let place = tempfile::tempdir().unwrap();
    let install = |name: &str| std::fs::copy(programs().join(name), place.path().join(name)).unwrap();
    install("bulkhead-worker");
    install("bulkhead-supervisor");
    let installed = place.path().join("bulkhead-supervisor");
    let script = "shift && exec \"$0\" \"$@\"";
    let wrapper = ["sh", "-c", script, installed.to_str().unwrap()];
    let bulkhead = format!("[bulkhead.b]\nlibrary = {path:?}\n{STRICT}\n");
    let supervisor =
        Supervisor::launch_under(&wrapper, tempfile::tempdir().unwrap(), "", &bulkhead).until_ready();
    std::fs::remove_file(&installed).unwrap();
    install("bulkhead-supervisor");
    let report = crash(&supervisor, "walk");
    assert_eq!(frames(&report)[0]["function"], "walk_list");
}

#[test]
fn report_of_crash_in_stripped_library_names_module_and_offset() {
    let (_folder, path) = compile_library(LIBRARY, &["-s", "-O1", "-Wl,--build-id"]);
    let supervisor = Supervisor::start(&format!("[bulkhead.b]\nlibrary = {path:?}\n{STRICT}\n"));
    let report = crash(&supervisor, "walk");
    let crashed = &frames(&report)[0];
    assert_eq!((&crashed["function"], &crashed["module"]), (&Value::Null, &path.to_str().unwrap().into()));
    assert_eq!(crashed["build_id"].as_str().unwrap().len(), 40, "{crashed}");
    let offset =
        u64::from_str_radix(crashed["offset"].as_str().unwrap().trim_start_matches("0x"), 16).unwrap();
    assert!((0x100..0x10000).contains(&offset), "{crashed}");
    // Exported functions keep their names in the file.
    assert_eq!(frames(&report)[1]["function"], "bulkhead_handle");
}

/// The test covers several sandbox profiles, a worker forked from a template, and a panic that aborts the process.
#[test]
fn report_of_rust_worker_crash_has_a_backtrace() {
    for (keys, operation, function) in [
        ("", "segv", "misbehave::misbehave"),
        (STRICT, "panic-in-c", "misbehave::panic_in_c"),
        ("start = { mode = \"fork\" }", "segv", "misbehave::misbehave"),
        ("sandbox = { profile = \"none\" }", "abort", "misbehave::misbehave"),
    ] {
        let supervisor = Supervisor::start(&format!("[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\n{keys}\n"));
        let report = crash(&supervisor, operation);
        let frame = frame_of(&report, function);
        assert!(
            frame["file"].as_str().unwrap().ends_with("misbehave.rs") && frame["line"].is_u64(),
            "{keys}: {frame}"
        );
    }
}

#[test]
fn report_explains_missing_backtrace() {
    let exec =
        "[bulkhead.b]\nexec = [\"sh\", \"-c\", \"kill -SEGV $$\"]\nenv = { PATH = \"/usr/bin:/bin\" }\n";
    let supervisor = Supervisor::start(exec);
    let report = crash(&supervisor, "");
    assert!(report["native"]["unavailable"].as_str().unwrap().contains("`exec`"), "{}", report["native"]);

    let supervisor = Supervisor::start("[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\n");
    let report = crash(&supervisor, "unrecorded-segv");
    assert!(report["native"]["unavailable"].as_str().unwrap().contains("no record"), "{}", report["native"]);
    let shown = supervisor.command().args(["crashes", "last"]).output().unwrap();
    assert!(String::from_utf8_lossy(&shown.stdout).contains("no backtrace: the worker wrote no record"));
}

/// Registers can contain parts of a payload, so the monitoring token must not grant access to registers.
#[test]
fn registers_are_hidden_from_monitoring_token() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["token", "read"] {
        let path = folder.path().join(name);
        std::fs::write(&path, format!("a-token-of-the-tests-{name}\n")).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    }
    let http = "http = \"127.0.0.1:0\"\nhttp_token_file = \"token\"";
    let read =
        "[[access]]\ntoken_file = \"read\"\nrole = \"read\"\n[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\n";
    let supervisor = Supervisor::launch(folder, http, read).until_ready();
    let Place::Tcp(address) = Place::tcp(&supervisor) else { panic!("no address") };
    let id = crash(&supervisor, "segv")["id"].as_str().unwrap().to_owned();
    for (token, has_registers) in [("token", true), ("read", false)] {
        let mut command = std::process::Command::new(programs().join("bulkhead"));
        command.args(["--host", &format!("http://{address}"), "--token-file"]);
        command.arg(supervisor.folder.path().join(token)).args(["crashes", &id, "--json"]);
        let shown = command.output().unwrap();
        let report: Value = serde_json::from_slice(&shown.stdout).unwrap_or_else(|_| panic!("{shown:?}"));
        let thread = &report["native"]["threads"][0];
        assert_eq!(!thread["registers"].as_object().unwrap().is_empty(), has_registers, "{thread}");
        assert!(!frames(&report).is_empty());
    }
}

/// Workers forge crash records that contain mappings of other files and random contents. `BULKHEAD_FORGED` sets the
/// number of records, for example 1000.
#[test]
fn forged_record_affects_only_its_report() {
    let count = std::env::var("BULKHEAD_FORGED").map_or(9, |count| count.parse().expect("a number"));
    // A bulkhead can produce a burst of ten reports.
    let names: Vec<_> = (0..count).step_by(9).map(|number| format!("b{number}")).collect();
    let forgers = names.iter().map(|name| format!("[bulkhead.{name}]\ncommand = [\"MISBEHAVE\"]\n"));
    let sibling = "[bulkhead.sibling]\ncommand = [\"MISBEHAVE\"]\n".to_owned();
    let supervisor = Supervisor::start(&forgers.chain([sibling]).collect::<String>());
    let client = Client::connect(supervisor.socket()).unwrap();
    let began = Instant::now();
    let jobs = std::thread::scope(|scope| {
        let forger = scope.spawn(|| {
            let client = Client::connect(supervisor.socket()).unwrap();
            for number in 0..count {
                let name = &names[number / 9];
                let report = crash_in(&supervisor, name, "forged-record");
                assert_eq!((&report["cause"], &report["signal"]), (&"signal".into(), &"SIGSEGV".into()));
                let text = report["native"].to_string();
                assert!(!text.contains("root:") && text.len() < 100_000, "{text}");
                assert_eq!(outcome(&client.job(name, "p").operation("echo").send()), "ok");
            }
        });
        let mut jobs = 0;
        while !forger.is_finished() {
            assert_eq!(outcome(&client.job("sibling", "p").operation("echo").send()), "ok");
            jobs += 1;
        }
        jobs
    });
    println!(
        "{count} forged records in {:?}; meanwhile, the sibling's {jobs} jobs ended ok",
        began.elapsed()
    );
}
