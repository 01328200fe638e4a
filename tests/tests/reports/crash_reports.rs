//! Crash reports: contents for each cause of death, storage, and replay.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Output;
use std::time::Instant;

use bulkhead_client::blocking::Client;
use bulkhead_tests::http::Place;
use bulkhead_tests::{
    Supervisor, children, is_alive, kill_pid, not_run, outcome, overrun_blocking, programs, tally, wait_for,
};
use nix::sys::signal::Signal;
use serde_json::Value;

const B: &str = "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\ndeadline = \"20s\"\n";

fn crashes(supervisor: &Supervisor) -> Vec<Value> {
    supervisor.get("/v1/crashes")["crashes"].as_array().expect("an array").clone()
}

/// Waits until there are `count` reports, and returns the full reports.
fn reports(supervisor: &Supervisor, count: usize) -> Vec<Value> {
    let listed = wait_for(&format!("there are {count} crash reports"), || {
        Some(crashes(supervisor)).filter(|listed| listed.len() >= count)
    });
    assert_eq!(listed.len(), count, "{listed:?}");
    listed.iter().map(|crash| supervisor.get(&format!("/v1/crashes/{}", id(crash)))).collect()
}

/// Waits until each report contains either a backtrace or the reason why there is none. Returns the reports.
fn complete_reports(supervisor: &Supervisor, count: usize) -> Vec<Value> {
    wait_for("the reports have backtraces", || {
        Some(reports(supervisor, count)).filter(|all| all.iter().all(|one| one.get("native").is_some()))
    })
}

fn id(report: &Value) -> String {
    report["id"].as_str().expect("an id").to_owned()
}

/// Sends one job and returns the outcome.
fn send(supervisor: &Supervisor, operation: &str, payload: impl Into<Vec<u8>>) -> String {
    let client = Client::connect(supervisor.socket()).unwrap();
    outcome(&client.job("b", payload.into()).operation(operation).tenant("acme").send())
}

/// Starts a supervisor and crashes a worker with one job. Returns the supervisor and its only crash report.
fn after(bulkhead: &str, operation: &str, payload: &str) -> (Supervisor, Value) {
    let supervisor = Supervisor::start(bulkhead);
    let ended = send(&supervisor, operation, payload);
    assert!(ended.starts_with("crashed/"), "{ended}");
    let report = reports(&supervisor, 1).remove(0);
    (supervisor, report)
}

/// Crashes a worker with one job. Returns the outcome and the crash report that the outcome names.
fn crash(supervisor: &Supervisor, bulkhead: &str, operation: &str) -> (String, Value) {
    let client = Client::connect(supervisor.socket()).unwrap();
    let ended = client.job(bulkhead, "x").operation(operation).tenant("acme").send();
    let error = ended.as_ref().expect_err("the job crashes its worker");
    let id = error.outcome().and_then(|outcome| outcome.report.clone()).expect("an id");
    (outcome(&ended), supervisor.crash_report(&id))
}

fn replay(supervisor: &Supervisor, report: &Value) -> Value {
    let (status, body) = supervisor.post(&format!("/v1/crashes/{}/replay", id(report)));
    assert_eq!(status, 200, "{body}");
    serde_json::from_str(&body).expect("JSON")
}

fn command(supervisor: &Supervisor, arguments: &[&str]) -> Output {
    supervisor.command().args(arguments).output().expect("the command runs")
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("text")
}

fn files(folder: &Path) -> Vec<String> {
    let names = std::fs::read_dir(folder).expect("the folder exists");
    let mut names: Vec<String> =
        names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| name != ".lock");
    names.sort();
    names
}

/// Returns keys for the `[supervisor]` table that make the supervisor store crash reports in a folder.
fn kept_in(folder: &Path, keep: usize) -> String {
    format!("crash_dir = {folder:?}\ncrash_keep = {keep}\n")
}

// Contents.

#[test]
fn report_of_signal_death_describes_worker_and_job() {
    let (supervisor, report) = after(B, "segv", "the payload");
    assert_eq!((&report["cause"], &report["signal"]), (&"signal".into(), &"SIGSEGV".into()));
    assert_eq!((&report["victim"], &report["stage"]), (&"worker".into(), &"working".into()));
    assert_eq!((&report["culprit"], &report["in_flight"]), (&0.into(), &1.into()));
    assert!(report["usage"]["max_rss_bytes"].as_u64().unwrap() > 1 << 16, "{report}");
    let job = &report["jobs"][0];
    assert_eq!((&job["operation"], &job["tenant"]), (&"segv".into(), &"acme".into()));
    assert_eq!((&job["payload"], &job["payload_bytes"]), (&"dGhlIHBheWxvYWQ=".into(), &11.into()));
    for kind in ["worker_exited", "job_crashed"] {
        let event = supervisor.wait_events(kind, 1).remove(0);
        assert_eq!(event["report"], report["id"], "{event}");
        assert_eq!(event["pid"], report["pid"]);
    }
    let told = replay(&supervisor, &report);
    assert_eq!((&told["verdict"], &told["before"]["signal"]), (&"same".into(), &"SIGSEGV".into()), "{told}");
    assert_eq!(told["replays"][0]["cause"]["signal"], "SIGSEGV");
    assert_ne!(told["replays"][0]["worker_pid"], report["pid"]);
}

/// The outcome can name the report before the report is stored, because the data plane assigns the report's ID in
/// advance.
#[test]
fn crashed_outcome_names_its_report() {
    let exec =
        "[bulkhead.x]\nexec = [\"sh\", \"-c\", \"kill -SEGV $$\"]\nenv = { PATH = \"/usr/bin:/bin\" }\n";
    let supervisor = Supervisor::start(&format!("{B}{exec}"));
    let client = Client::connect(supervisor.socket()).unwrap();
    for (count, bulkhead) in ["b", "x"].into_iter().enumerate() {
        let error = client.job(bulkhead, "p").operation("segv").send().unwrap_err();
        let report = error.outcome().unwrap().report.clone().expect("an id");
        assert!(error.to_string().ends_with(&format!("; see `bulkhead crashes {report}`")), "{error}");
        let kept = reports(&supervisor, count + 1).into_iter().find(|kept| kept["id"] == report.as_str());
        let kept = kept.expect("the report with this id is stored");
        assert_eq!(kept["jobs"][0]["job"], error.outcome().unwrap().job.unwrap().to_string());
        let shown = command(&supervisor, &["crashes", &report]);
        assert!(shown.status.success() && stdout(&shown).contains("SIGSEGV"), "{shown:?}");
    }
    let told = command(&supervisor, &["submit", "b", "segv", "-n"]);
    let last = id(reports(&supervisor, 3).last().unwrap());
    let complaint = String::from_utf8_lossy(&told.stderr).into_owned();
    assert!(complaint.contains(&format!("bulkhead crashes {last}")), "{complaint}");
    let json = command(&supervisor, &["submit", "b", "segv", "-n", "--json"]);
    let json: Value = serde_json::from_str(&stdout(&json)).unwrap();
    assert_eq!(json["report"], id(reports(&supervisor, 4).last().unwrap()), "{json}");
    let fine = client.job("b", "p").send().unwrap();
    assert_eq!(fine.outcome().report, None);
}

#[test]
fn outcome_names_the_last_crash_if_no_retry_ran() {
    let supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"sh\", \"-c\", \"while [ -e hold ]; do sleep 0.02; done; exec MISBEHAVE\"]\n\
         retry = { attempts = 2, budget = 1.0 }\nmax_queue = 5\ndeadline = \"60s\"\n",
    );
    supervisor.wait_number("b", "available", 1);
    // No worker can start any more, so the retry waits.
    supervisor.touch("hold");
    let (retried, answer) = std::thread::scope(|scope| {
        let job = || Place::of(&supervisor).job("b", "abort", &["Bulkhead-Idempotent: true"], b"x");
        let job = scope.spawn(job);
        let retried = supervisor.wait_events("job_retried", 1).remove(0);
        supervisor.wait_number("b", "queued", 1);
        assert_eq!(supervisor.get("/v1/jobs")["jobs"][0]["attempts"], 1);
        assert_eq!(supervisor.post("/v1/bulkheads/b/drain").0, 200);
        (retried, job.join().unwrap())
    });
    let report = retried["report"].as_str().expect("a report");
    let problem = answer.problem(502);
    assert_eq!((&problem["outcome"], &problem["attempts"]), (&"crashed".into(), &1.into()), "{problem}");
    assert_eq!((&problem["report"], answer.header("bulkhead-report")), (&report.into(), report), "{problem}");
    assert_eq!(supervisor.wait_events("job_crashed", 1)[0]["report"], report);
    let report = supervisor.crash_report(report);
    assert_eq!(report["jobs"][0]["job"], problem["job"], "{report}");
}

#[test]
fn reports_contain_exit_code_even_if_zero() {
    for code in ["0", "99"] {
        let (supervisor, report) = after(B, "exit", code);
        assert_eq!(report["exit_code"].to_string(), code);
        assert_eq!(replay(&supervisor, &report)["verdict"], "same");
    }
}

#[test]
fn replay_reproduces_hung_worker() {
    let hasty = format!("{B}health = {{ heartbeat = \"100ms\", missed = 2 }}\nrestart = {{ max = 1000 }}\n");
    let supervisor = Supervisor::start(&hasty);
    let (_, report) = crash(&supervisor, "b", "stop");
    assert_eq!((&report["cause"], &report["signal"]), (&"hung".into(), &Value::Null), "{report}");
    let told = replay(&supervisor, &report);
    assert_eq!(told["verdict"], "same", "{told}");
}

#[test]
fn protocol_violation_produces_crash_report() {
    let (supervisor, report) =
        after("[bulkhead.b]\ncommand = [\"MISBEHAVE\", \"raw\", \"rubbish\"]\n", "", "");
    assert_eq!(report["cause"], "protocol", "{report}");
    assert_eq!(replay(&supervisor, &report)["verdict"], "same");
}

#[test]
fn replay_reproduces_crash_of_c_library() {
    let library = programs().join("libthumbnail.so");
    let supervisor = Supervisor::start(&format!("[bulkhead.b]\nlibrary = {library:?}\n"));
    let picture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/data/crash.gif");
    let picture = std::fs::read(picture).unwrap();
    assert_eq!(send(&supervisor, "", picture.clone()), "crashed/signal");
    let report = reports(&supervisor, 1).remove(0);
    assert_eq!(report["signal"], "SIGSEGV");
    assert_eq!(replay(&supervisor, &report)["verdict"], "same");

    let saved = supervisor.file("again.gif");
    let output = command(
        &supervisor,
        &["crashes", &id(&report), "--output", saved.to_str().expect("the path is valid UTF-8")],
    );
    assert!(output.status.success(), "{output:?}");
    assert_eq!(std::fs::read(saved).unwrap(), picture);
}

#[test]
fn report_identifies_killed_program_as_victim() {
    let script = "echo last words >&2; cat >/dev/null; kill -SEGV $$";
    let supervisor = Supervisor::start(&format!(
        "[bulkhead.b]\nexec = [\"sh\", \"-c\", {script:?}]\nenv = {{ PATH = \"/usr/bin:/bin\" }}\n"
    ));
    let worker = supervisor.worker_pids("b");
    assert_eq!(send(&supervisor, "", "x"), "crashed/signal");
    let report = reports(&supervisor, 1).remove(0);
    assert_eq!((&report["victim"], &report["signal"]), (&"program".into(), &"SIGSEGV".into()));
    assert_eq!(report["stderr_tail"], "last words");
    let event = supervisor.wait_events("job_crashed", 1).remove(0);
    assert_eq!(event["report"], report["id"]);
    let told = replay(&supervisor, &report);
    assert_eq!(
        (&told["verdict"], &told["replays"][0]["cause"]["signal"]),
        (&"same".into(), &"SIGSEGV".into())
    );
    assert_eq!(supervisor.worker_pids("b"), worker);
    reports(&supervisor, 1);
}

/// A failed start or the death of an idle worker produces a crash report without a job.
#[test]
fn failed_starts_and_idle_deaths_cannot_be_replayed() {
    let never = "restart = { policy = \"never\" }\n";
    let supervisor = Supervisor::start(&format!(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\n{never}\
         [bulkhead.exits]\ncommand = [\"MISBEHAVE\", \"exit-at-start\"]\n{never}\
         [bulkhead.mute]\ncommand = [\"MISBEHAVE\", \"raw\", \"never-hello\"]\n{never}start = {{ handshake = \"200ms\" }}\n\
         [bulkhead.slow]\ncommand = [\"MISBEHAVE\", \"init-hangs\"]\n{never}start = {{ ready = \"200ms\" }}\n"
    ));
    assert_eq!(send(&supervisor, "echo", ""), "ok");
    kill_pid(supervisor.worker_pids("b")[0], Signal::SIGKILL);
    let all = reports(&supervisor, 4);
    let told = tally(all.iter().map(|report| {
        format!("{} {} {}", report["bulkhead"], report["stage"], report["cause"]).replace('"', "")
    }));
    let expected =
        ["b idle signal", "exits starting exit", "mute starting no_hello", "slow starting not_ready"];
    assert_eq!(told.into_keys().collect::<Vec<_>>(), expected);
    for report in &all {
        let (status, body) = supervisor.post(&format!("/v1/crashes/{}/replay", id(report)));
        assert!(status == 422 && body.contains("no job to replay"), "{status} {body}");
        assert_eq!(command(&supervisor, &["replay", &id(report)]).status.code(), Some(65));
    }
}

#[test]
fn failures_and_restarts_produce_no_report() {
    let supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\n\
         [bulkhead.late]\ncommand = [\"MISBEHAVE\"]\ndeadline = \"2s\"\ngrace = \"10ms\"\n",
    );
    let client = Client::connect(supervisor.socket()).unwrap();
    let late = overrun_blocking(&client.job("late", "").operation("hang"));
    assert_eq!(outcome(&late), "deadline_exceeded/running");
    assert_eq!(send(&supervisor, "fail", ""), "failed/bad_input");
    assert_eq!(supervisor.post("/v1/bulkheads/b/restart").0, 200);
    // One worker was killed at the deadline, and one was replaced by the restart.
    supervisor.wait_events("worker_exited", 2);
    // The only report is about the overdue job.
    let causes: Vec<Value> =
        reports(&supervisor, 1).into_iter().map(|crash| crash["cause"].clone()).collect();
    assert_eq!(causes, ["deadline"]);
    let listed = command(&supervisor, &["crashes"]);
    assert_eq!((listed.status.code(), stdout(&listed).lines().count()), (Some(0), 2));
}

#[test]
fn report_omits_large_payload() {
    let supervisor = Supervisor::start(&format!("{B}poison = {{ crashes = 9 }}\n"));
    assert_eq!(send(&supervisor, "abort", vec![b'x'; 65_536]), "crashed/signal");
    assert_eq!(send(&supervisor, "abort", vec![b'x'; 65_537]), "crashed/signal");
    let all = reports(&supervisor, 2);
    let (kept, large) = (&all[0]["jobs"][0], &all[1]["jobs"][0]);
    assert!(kept["payload"].is_string() && kept["blake3"].is_string());
    assert_eq!((&large["payload"], &large["payload_bytes"]), (&Value::Null, &65_537.into()));
    assert_eq!(large["digest"].as_str().map(str::len), Some(32));
    assert_eq!(replay(&supervisor, &all[0])["verdict"], "same");
    let refused = command(&supervisor, &["replay", &id(&all[1])]);
    assert_eq!(refused.status.code(), Some(65));
    assert!(
        String::from_utf8_lossy(&refused.stderr)
            .contains("a payload of 65537 bytes is too large for a report")
    );
}

#[test]
fn reports_omit_payloads_if_crash_payloads_is_false() {
    let folder = tempfile::tempdir().unwrap();
    let keys = format!("{}crash_payloads = false\n", kept_in(&folder.path().join("crashes"), 9));
    let supervisor = Supervisor::start_with(&keys, B);
    assert_eq!(send(&supervisor, "abort", "my-secret"), "crashed/signal");
    let report = reports(&supervisor, 1).remove(0);
    let job = &report["jobs"][0];
    assert_eq!(
        (&job["payload"], &job["blake3"], &job["payload_bytes"]),
        (&Value::Null, &Value::Null, &9.into())
    );
    let kept = std::fs::read_to_string(folder.path().join("crashes").join(format!("{}.json", id(&report))));
    let kept = kept.expect("the report is a file");
    assert!(!kept.contains("my-secret") && !kept.contains("bXktc2VjcmV0"), "{kept}");
    let shown = stdout(&command(&supervisor, &["crashes", &id(&report)]));
    assert!(shown.contains("9 bytes, not stored in the report"), "{shown}");
    let refused = command(&supervisor, &["replay", &id(&report)]);
    assert_eq!(refused.status.code(), Some(65));
    assert!(
        String::from_utf8_lossy(&refused.stderr)
            .contains("the supervisor did not store the payload of 9 bytes")
    );
}

#[test]
fn crash_commands_escape_hostile_names() {
    let supervisor = Supervisor::start(B);
    let client = Client::connect(supervisor.socket()).unwrap();
    let operation = "steps:die-on \u{1b}[31m\u{9b}2J\r;die";
    let ended = client.job("b", "\u{1b}]0;owned\u{7}").operation(operation).tenant("\u{1b}[2J\nx").send();
    assert_eq!(outcome(&ended), "crashed/signal");
    let report = reports(&supervisor, 1).remove(0);
    for arguments in [&["crashes"][..], &["crashes", &id(&report)], &["replay", &id(&report)]] {
        let output = command(&supervisor, arguments);
        assert!(output.status.success(), "{output:?}");
        let text = stdout(&output);
        assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{arguments:?}: {text:?}");
        let json = command(&supervisor, &[&["--json"], arguments].concat());
        assert!(serde_json::from_slice::<Value>(&json.stdout).is_ok(), "{json:?}");
    }
}

#[test]
fn report_ids_cannot_leave_the_crash_folder() {
    let folder = tempfile::tempdir().unwrap();
    let secret = folder.path().join("20260307T101530123-0001.json");
    std::fs::write(secret, "{\"secret\": true}").unwrap();
    let supervisor = Supervisor::start_with(&kept_in(&folder.path().join("crashes"), 10), B);
    let long = "9".repeat(4000);
    let hostile = [
        "..%2F..%2Fetc%2Fpasswd",
        "..%2F20260307T101530123-0001",
        "20260307T101530123-0001",
        "20260307T101530123-0001%00",
        "%00",
        ".lock",
        "%FF%FE",
        &long,
    ];
    for id in hostile {
        for (status, body) in [
            supervisor.try_get(&format!("/v1/crashes/{id}")).unwrap(),
            supervisor.post(&format!("/v1/crashes/{id}/replay")),
        ] {
            assert!(status == 404 || status == 400, "{id}: {status} {body}");
            assert!(!body.contains("root:") && !body.contains("secret"), "{body}");
        }
    }
    for arguments in [["crashes", "../../etc/passwd"], ["replay", "../../etc/passwd"]] {
        assert_eq!(command(&supervisor, &arguments).status.code(), Some(66));
    }
}

// Several jobs in flight.

#[test]
fn replay_tries_each_job_until_crash_recurs() {
    let supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_in_flight = 3\ndeadline = \"60s\"\n\
         grace = \"10ms\"\n",
    );
    let client = Client::connect(supervisor.socket()).unwrap();
    std::thread::scope(|scope| {
        let client = &client;
        for payload in ["first", "second"] {
            scope.spawn(move || client.job("b", payload).operation("steps:count ran;wait end").send());
        }
        wait_for("both jobs run", || (supervisor.file_bytes("ran") == 2).then_some(()));
        let ended = client.job("b", "third").operation("steps:sleep 10;die").send();
        assert_eq!(outcome(&ended), "crashed/signal");
    });
    let report = reports(&supervisor, 1).remove(0);
    let operations: Vec<&Value> =
        report["jobs"].as_array().unwrap().iter().map(|job| &job["operation"]).collect();
    assert_eq!((report["culprit"].clone(), operations.len()), (Value::Null, 3));
    assert_eq!(operations[2], "steps:sleep 10;die", "the oldest job is listed first");
    supervisor.touch("end");
    let told = replay(&supervisor, &report);
    let verdicts: Vec<&str> =
        told["replays"].as_array().unwrap().iter().filter_map(|replay| replay["verdict"].as_str()).collect();
    assert_eq!(
        (&told["verdict"], verdicts),
        (&"same".into(), vec!["no_crash", "no_crash", "same"]),
        "{told}"
    );
    let one = command(&supervisor, &["--json", "replay", &id(&report), "--job", "0"]);
    let one: Value = serde_json::from_slice(&one.stdout).unwrap();
    assert_eq!((&one["verdict"], &one["replays"][0]["job"]), (&"no_crash".into(), &0.into()));
    let none = command(&supervisor, &["replay", &id(&report), "--job", "3"]);
    assert_eq!(none.status.code(), Some(65));
    assert_eq!(command(&supervisor, &["crashes", &id(&report), "--output", "-"]).status.code(), Some(2));
    let second = command(&supervisor, &["crashes", &id(&report), "--output", "-", "--job", "2"]);
    assert_eq!(stdout(&second), "third");
}

// Replays.

#[test]
fn replay_distinguishes_no_crash_from_different_crash() {
    let patient = format!("{B}[bulkhead.hasty]\ncommand = [\"MISBEHAVE\"]\nrestart = {{ max = 1000 }}\n");
    let hasty = format!("{patient}health = {{ heartbeat = \"100ms\", missed = 2 }}\n");
    let supervisor = Supervisor::start(&hasty);
    let (died, of_death) = crash(&supervisor, "b", "steps:die-first 1 once");
    let (hung, of_hang) = crash(&supervisor, "hasty", "steps:freeze-first 1 frozen;die");
    assert_eq!((died.as_str(), hung.as_str()), ("crashed/signal", "crashed/hung"));
    let all = [of_death, of_hang];
    // On a busy machine, the worker of the replay could count as hung, too.
    supervisor.configure("", &patient);
    assert_eq!(supervisor.post("/v1/reload").0, 200);
    let told = replay(&supervisor, &all[0]);
    assert_eq!((&told["verdict"], &told["replays"][0]["outcome"]), (&"no_crash".into(), &"ok".into()));
    let told = replay(&supervisor, &all[1]);
    assert_eq!((&told["verdict"], &told["before"]["cause"]), (&"different".into(), &"hung".into()), "{told}");
    assert_eq!(told["replays"][0]["cause"]["signal"], "SIGABRT");
    for (report, words) in [(&all[0], "verdict      no crash"), (&all[1], "verdict      different")] {
        let output = command(&supervisor, &["replay", &id(report)]);
        assert_eq!(output.status.code(), Some(0));
        assert!(stdout(&output).starts_with(words), "{}", stdout(&output));
    }
}

#[test]
fn replays_do_not_change_statistics_or_workers() {
    let (supervisor, report) = after(
        &format!(
            "{B}poison = {{ crashes = 1 }}\nbreaker = {{ min_calls = 1, failure_rate = 0.1, open_for = \"1h\" }}\n"
        ),
        "segv",
        "x",
    );
    wait_for("the next worker is ready", || (supervisor.number("b", "limit") == 1).then_some(()));
    for (kind, count) in [("worker_started", 2), ("worker_exited", 1), ("job_crashed", 1)] {
        supervisor.wait_events(kind, count);
    }
    let books = || {
        let mut books = supervisor.snapshot("b");
        for worker in books["workers"].as_array_mut().unwrap() {
            // These values change even without jobs.
            for field in ["uptime_ms", "rss_bytes", "cpu_ms"] {
                worker[field] = Value::Null;
            }
        }
        books
    };
    let before = books();
    assert_eq!((&before["quarantined"], &before["breaker"]), (&1.into(), &"open".into()));
    let workers = children(supervisor.keeper());
    let kinds = |kind: &str| supervisor.events(kind).len();
    let told_before = (kinds("worker_started"), kinds("worker_exited"), kinds("job_crashed"));
    for _ in 0..5 {
        assert_eq!(replay(&supervisor, &report)["verdict"], "same");
    }
    assert_eq!(books(), before);
    assert_eq!(supervisor.wait_events("crash_replayed", 5).len(), 5);
    assert_eq!((kinds("worker_started"), kinds("worker_exited"), kinds("job_crashed")), told_before);
    assert_eq!(children(supervisor.keeper()), workers);
    reports(&supervisor, 1);
}

#[test]
fn replay_works_in_failed_and_draining_bulkheads() {
    let bulkhead = "[bulkhead.b]\ncommand = [\"MISBEHAVE\", \"slow-again\", \"once\"]\n\
                    start = { ready = \"2s\" }\n\
                    restart = { backoff = \"10ms\", backoff_max = \"1h\", max = 1 }\n";
    // On a busy machine, even the first worker can become ready too late.
    let supervisor = wait_for("the first worker serves a job", || {
        let supervisor = Supervisor::start(bulkhead);
        (send(&supervisor, "steps:die", "x") == "crashed/signal").then_some(supervisor)
    });
    wait_for("the bulkhead has failed", || (supervisor.snapshot("b")["state"] == "failed").then_some(()));
    let all =
        wait_for("both deaths are reported", || Some(crashes(&supervisor)).filter(|all| all.len() >= 2));
    let report = supervisor.get(&format!("/v1/crashes/{}", id(&all[0])));
    assert_eq!(report["stage"], "working");
    // The replay's worker does not start either.
    let told = command(&supervisor, &["replay", &id(&report)]);
    assert_eq!(told.status.code(), Some(75), "{told:?}");
    assert!(stdout(&told).contains("not ready within start.ready"), "{}", stdout(&told));
    // A worker could start now, but the bulkhead has not been reset.
    supervisor.touch("go");
    let replay_in_time = || {
        wait_for("the worker of the replay is ready in time", || {
            let told = replay(&supervisor, &report);
            (!told.to_string().contains("not ready within start.ready")).then_some(told)
        })
    };
    assert_eq!(replay_in_time()["verdict"], "same");
    assert_eq!(supervisor.snapshot("b")["state"], "failed");
    assert_eq!(supervisor.post("/v1/bulkheads/b/drain").0, 200);
    assert_eq!(replay_in_time()["verdict"], "same");
}

#[test]
fn crash_of_isolated_tenant_can_be_replayed() {
    let (supervisor, report) =
        after(&format!("{B}tenants = {{ isolate = true, max_active = 1, idle = \"60s\" }}\n"), "segv", "x");
    assert_eq!(report["tenant"], "acme");
    assert_eq!(replay(&supervisor, &report)["verdict"], "same");
    let books = supervisor.snapshot("b");
    assert_eq!((&books["submitted"], &books["crashed"]), (&1.into(), &1.into()));
}

/// A replay that is still running at shutdown is stopped.
#[test]
fn third_concurrent_replay_is_rejected() {
    let mut supervisor =
        Supervisor::start_with("drain_timeout = \"100ms\"\n", &format!("{B}env = {{ A = \"b\" }}\n"));
    assert_eq!(send(&supervisor, "steps:die-first 1 once;wait end", "x"), "crashed/signal");
    let report = reports(&supervisor, 1).remove(0);
    let path = format!("/v1/crashes/{}/replay", id(&report));
    std::thread::scope(|scope| {
        let begun: Vec<_> = (0..2).map(|_| scope.spawn(|| supervisor.post(&path))).collect();
        wait_for("both replays run", || (children(supervisor.keeper()).len() == 3).then_some(()));
        let (status, body) = wait_for("the third replay is rejected", || {
            Some(supervisor.post(&path)).filter(|(status, _)| *status != 200)
        });
        assert!(status == 429 && body.contains("2 replays are already running"), "{status} {body}");
        assert_eq!(command(&supervisor, &["replay", &id(&report)]).status.code(), Some(75));
        supervisor.touch("end");
        for replay in begun {
            let (status, body) = replay.join().unwrap();
            assert!(status == 200 && body.contains("\"verdict\":\"no_crash\""), "{body}");
        }
    });
    std::fs::remove_file(supervisor.file("end")).unwrap();
    // This replay does not end, so the shutdown has to stop it.
    let client = supervisor.command().args(["replay", &id(&report)]).spawn().unwrap();
    wait_for("the replay runs", || (children(supervisor.keeper()).len() == 2).then_some(()));
    let workers = children(supervisor.keeper());
    supervisor.signal(Signal::SIGTERM);
    assert!(supervisor.wait().success());
    let mut client = client;
    wait_for("the replay command exits", || client.try_wait().unwrap());
    assert!(workers.iter().all(|&pid| !is_alive(pid)));
}

// Storage.

#[test]
fn crash_reports_survive_supervisor_restart() {
    let folder = tempfile::tempdir().unwrap();
    let crash_dir = folder.path().join("not/yet/there");
    let keys = kept_in(&crash_dir, 10);
    let mut first = Supervisor::start_with(&keys, B);
    assert_eq!(send(&first, "segv", "payload"), "crashed/signal");
    assert_eq!(send(&first, "abort", "other"), "crashed/signal");
    let before = complete_reports(&first, 2);
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode(&crash_dir), 0o700);
    for name in files(&crash_dir) {
        assert_eq!(mode(&crash_dir.join(name)), 0o600);
    }
    first.signal(Signal::SIGTERM);
    assert!(first.wait().success());
    drop(first);

    let second = Supervisor::start_with(&keys, &format!("{B}[bulkhead.c]\ncommand = [\"MISBEHAVE\"]\n"));
    assert_eq!(reports(&second, 2), before);
    assert_eq!(replay(&second, &before[0])["verdict"], "same");
    assert_eq!(send(&second, "exit", "3"), "crashed/exit");
    assert_eq!(reports(&second, 3)[..2], before);
    drop(second);

    let mut third = Supervisor::start_with(&keys, "[bulkhead.c]\ncommand = [\"MISBEHAVE\"]\n");
    reports(&third, 3);
    let (status, body) = third.post(&format!("/v1/crashes/{}/replay", id(&before[0])));
    assert!(status == 404 && body.contains("no longer configured"), "{status} {body}");
    let refused = command(&third, &["replay", &id(&before[0])]);
    assert_eq!(refused.status.code(), Some(66), "{}", String::from_utf8_lossy(&refused.stderr));
    third.signal(Signal::SIGTERM);
    assert!(third.wait().success());
}

#[test]
fn crash_keep_retains_newest_reports() {
    let folder = tempfile::tempdir().unwrap();
    for keys in [kept_in(&folder.path().join("crashes"), 3), "crash_keep = 3\n".to_owned()] {
        let supervisor = Supervisor::start_with(&keys, B);
        for code in 1..=5 {
            assert_eq!(send(&supervisor, "exit", code.to_string()), "crashed/exit");
        }
        let codes =
            || crashes(&supervisor).iter().map(|crash| crash["exit_code"].as_i64()).collect::<Vec<_>>();
        let expected = [Some(3), Some(4), Some(5)];
        wait_for("only the newest reports are kept", || (codes() == expected).then_some(()));
        let listed = command(&supervisor, &["crashes", "--limit", "1"]);
        assert!(stdout(&listed).lines().count() == 2 && stdout(&listed).contains("exit:5"));
        wait_for("the files of older reports are deleted", || {
            (files(&folder.path().join("crashes")).len() == 3).then_some(())
        });
    }
}

/// The crash folder must not be readable by other users or in use by another supervisor.
#[test]
fn supervisor_rejects_readable_or_occupied_crash_folder() {
    let folder = tempfile::tempdir().unwrap();
    let crash_dir = folder.path().join("crashes");
    std::fs::create_dir(&crash_dir).unwrap();
    std::fs::set_permissions(&crash_dir, std::fs::Permissions::from_mode(0o755)).unwrap();
    let keys = kept_in(&crash_dir, 10);
    let refused = || {
        let mut supervisor = Supervisor::launch(tempfile::tempdir().unwrap(), &keys, B);
        let status = supervisor.wait();
        assert_eq!(status.code(), Some(1), "{}", supervisor.log());
        supervisor.log()
    };
    let log = refused();
    assert!(log.contains("chmod 700") && log.contains("0755"), "{log}");
    std::fs::set_permissions(&crash_dir, std::fs::Permissions::from_mode(0o700)).unwrap();
    let _first = Supervisor::start_with(&keys, B);
    let log = refused();
    assert!(log.contains("another supervisor is using the directory"), "{log}");
}

#[test]
fn supervisor_rejects_unreadable_crash_folder() {
    let folder = tempfile::tempdir().unwrap();
    if std::fs::metadata(folder.path()).unwrap().uid() == 0 {
        not_run!("root can read every folder");
        return;
    }
    let crash_dir = folder.path().join("crashes");
    std::fs::create_dir(&crash_dir).unwrap();
    std::fs::set_permissions(&crash_dir, std::fs::Permissions::from_mode(0o000)).unwrap();
    let mut supervisor = Supervisor::launch(tempfile::tempdir().unwrap(), &kept_in(&crash_dir, 10), B);
    assert_eq!(supervisor.wait().code(), Some(1));
    assert!(supervisor.log().contains("cannot be read"), "{}", supervisor.log());
}

#[test]
fn foreign_files_in_crash_folder_are_ignored() {
    let folder = tempfile::tempdir().unwrap();
    let crash_dir = folder.path().join("crashes");
    let keys = kept_in(&crash_dir, 10);
    let first = Supervisor::start_with(&keys, B);
    assert_eq!(send(&first, "segv", "x"), "crashed/signal");
    let report = complete_reports(&first, 1).remove(0);
    drop(first);
    let good = std::fs::read_to_string(crash_dir.join(format!("{}.json", id(&report)))).unwrap();
    let put = |name: &str, text: &str| std::fs::write(crash_dir.join(name), text).unwrap();
    put("20260307T101530123-0001.json", "{");
    put("20260307T101530123-0002.json", &good);
    put("20260307T101530123-0003.json", "\u{1b}[31m\0");
    put("20260307T101530123-0004.json.new", &good[..20]);
    put("mine.txt", "notes");
    put("\u{1b}[31m", "");
    let second = Supervisor::start_with(&keys, B);
    assert_eq!(reports(&second, 1), [report]);
    wait_for("the log has a warning", || second.log().contains("that are not crash reports").then_some(()));
    let log = second.log();
    assert_eq!(log.matches("that are not crash reports").count(), 1, "{log}");
    assert!(log.contains("5 files") && !log.contains('\u{1b}'), "{log}");
    assert!(crash_dir.join("mine.txt").exists());
    // A report file can also become unreadable while the supervisor runs.
    put(&format!("{}.json", id(&reports(&second, 1)[0])), "rubbish");
    let path = format!("/v1/crashes/{}", id(&crashes(&second)[0]));
    let (status, body) = second.try_get(&path).unwrap();
    assert!(status == 500 && body.contains("cannot be read"), "{status} {body}");
    assert_eq!(send(&second, "echo", "x"), "ok");
}

#[test]
fn unwritable_report_is_kept_in_memory() {
    let folder = tempfile::tempdir().unwrap();
    let crash_dir = folder.path().join("crashes");
    let supervisor = Supervisor::start_with(&kept_in(&crash_dir, 10), B);
    std::fs::remove_dir_all(&crash_dir).unwrap();
    std::fs::write(&crash_dir, "").unwrap();
    assert_eq!(send(&supervisor, "segv", "x"), "crashed/signal");
    assert_eq!(send(&supervisor, "abort", "x"), "crashed/signal");
    let all = reports(&supervisor, 2);
    assert_eq!(replay(&supervisor, &all[0])["verdict"], "same");
    wait_for("the log has a warning", || {
        supervisor.log().contains("failed to write a crash report").then_some(())
    });
    let log = supervisor.log();
    assert_eq!(log.matches("failed to write a crash report").count(), 1, "{log}");
    assert_eq!(send(&supervisor, "echo", "x"), "ok");
}

#[test]
fn crash_storm_produces_limited_number_of_reports() {
    const CRASHES: usize = 500;
    let folder = tempfile::tempdir().unwrap();
    let crash_dir = folder.path().join("crashes");
    let supervisor = Supervisor::start_with(
        &kept_in(&crash_dir, 20),
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nprocesses = 4\nmax_queue = 1000\ndeadline = \"60s\"\n\
         [bulkhead.other]\ncommand = [\"MISBEHAVE\"]\n",
    );
    let client = Client::connect(supervisor.socket()).unwrap();
    let began = Instant::now();
    std::thread::scope(|scope| {
        let client = &client;
        for _ in 0..10 {
            scope.spawn(move || {
                for _ in 0..CRASHES / 10 {
                    let payload = vec![b'x'; 60_000];
                    assert_eq!(
                        outcome(&client.job("b", payload).operation("abort").send()),
                        "crashed/signal"
                    );
                }
            });
        }
        assert_eq!(outcome(&client.job("other", "x").send()), "ok");
    });
    let deaths = supervisor.wait_events("worker_exited", CRASHES);
    let reported = deaths.iter().filter(|event| event["report"].is_string()).count();
    assert!((10..CRASHES).contains(&reported), "{reported}");
    wait_for("the rest is counted", || {
        let told = supervisor.events("crashes_not_reported");
        let counted: u64 = told.iter().map(|event| event["crashes"].as_u64().unwrap()).sum();
        (counted as usize == CRASHES - reported).then_some(())
    });
    // One event is allowed every ten seconds.
    let most = 5 + began.elapsed().as_secs() / 10;
    assert!(supervisor.events("crashes_not_reported").len() as u64 <= most);
    wait_for("older reports are deleted", || {
        (crashes(&supervisor).len() <= 20 && files(&crash_dir).len() <= 20).then_some(())
    });
    assert_eq!(supervisor.number("b", "crashed"), CRASHES as u64);
}
