//! The `bulkhead` command as users run it: a process with arguments, standard streams and an exit code, against a real
//! supervisor.

use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use bulkhead_tests::{Supervisor, kill_pid, not_run, programs, tally, wait_for};
use nix::sys::signal::Signal;
use serde_json::Value;

use super::running::{
    Ran, Running, blocker, bulkhead, fed, follow, output_of, plain, read_all, spawn, unread,
};

// Outcomes and exit codes.

const OUTCOMES: [&str; 6] = ["ok", "failed", "rejected", "deadline_exceeded", "crashed", "cancelled"];

/// Checks that a JSON object contains all fields that its outcome requires, each with the correct type.
fn check_shape(object: &Value) {
    let outcome = object["outcome"].as_str().expect("outcome");
    assert!(OUTCOMES.contains(&outcome), "{object}");
    assert!(object.as_object().unwrap().contains_key("reason"), "{object}");
    assert!(object["reason"].is_string() != matches!(outcome, "ok" | "cancelled"), "{object}");
    assert!(object["bulkhead"].is_string(), "{object}");
    assert!(object["attempts"].is_u64(), "{object}");
    for time in ["queued_ms", "ran_ms"] {
        assert!(object[time].as_f64().is_some_and(|ms| ms >= 0.0), "{object}");
    }
    assert!(matches!(object["executed"].as_str(), Some("yes" | "no" | "unknown")), "{object}");
    assert!(object["retryable"].is_boolean(), "{object}");
    let has_run = object["executed"] != "no";
    assert_eq!(object["worker_pid"].is_u64(), has_run, "{object}");
    assert_eq!(object["attempts"].as_u64() > Some(0), has_run, "{object}");
    if let Some(wait) = object.get("retry_after_ms") {
        assert!(wait.as_f64().is_some_and(|ms| ms > 0.0), "{object}");
    }
    let is_nested = |value: &Value| value.is_object() || value.is_array();
    assert!(!object.as_object().unwrap().values().any(is_nested), "no field is nested: {object}");
}

/// Checks that the output of `submit --json` matches a row of the outcome table.
#[track_caller]
fn check_end(ran: Ran, code: i32, outcome: &str, reason: &str, executed: &str, retryable: bool) -> Value {
    let object = ran.expect(code).object();
    check_shape(&object);
    let told = (&object["outcome"], &object["executed"], &object["retryable"]);
    assert_eq!(told, (&outcome.into(), &executed.into(), &retryable.into()), "{object}");
    assert_eq!(object["reason"].as_str().unwrap_or(""), reason, "{object}");
    object
}

const SHELL: &str = "env = { PATH = \"/usr/bin:/bin\" }\n";

#[test]
fn submit_reports_each_outcome_as_json_and_exit_code() {
    let supervisor = Supervisor::start(
        "[defaults]\ndeadline = \"60s\"\ngrace = \"20ms\"\n\
         [bulkhead.b]\ncommand = [\"MISBEHAVE\"]\n\
         [bulkhead.small]\ncommand = [\"MISBEHAVE\"]\nmax_payload = \"1KiB\"\nmax_result = \"1KiB\"\n\
         [bulkhead.liar]\ncommand = [\"MISBEHAVE\", \"raw\", \"rubbish\"]\n\
         [bulkhead.sick]\ncommand = [\"MISBEHAVE\"]\nhealth = { heartbeat = \"100ms\", missed = 5 }\n\
         restart = { max = 1000 }\n\
         [bulkhead.broken]\ncommand = [\"MISBEHAVE\", \"exit-at-start\"]\nrestart = { policy = \"never\" }\n",
    );
    let submit = |arguments: &[&str], input: &str| {
        let fixed = ["submit", "--json", "--payload-file", "-"];
        fed(&supervisor, &[&fixed[..], arguments].concat(), input.as_bytes())
    };
    let ok = check_end(submit(&["b"], "1234"), 0, "ok", "", "yes", false);
    assert_eq!((&ok["bulkhead"], &ok["result_bytes"]), (&"b".into(), &4.into()));

    let failed = check_end(submit(&["b", "fail"], ""), 1, "failed", "bad_input", "yes", false);
    assert_eq!(failed["code"], "bad_input");
    assert_eq!(failed["message"], "the input is bad");
    assert_eq!(failed["fault"], "caller");
    let panicked = submit(&["b", "panic"], "");
    assert_eq!(check_end(panicked, 1, "failed", "panic", "yes", false)["fault"], "dependency");
    check_end(submit(&["small", "big"], "2000"), 1, "failed", "result_too_large", "yes", false);

    check_end(submit(&["b", &"x".repeat(300)], ""), 65, "rejected", "invalid", "no", false);
    check_end(submit(&["small"], &"x".repeat(1025)), 65, "rejected", "too_large", "no", false);
    check_end(submit(&["nobody"], ""), 66, "rejected", "not_found", "no", false);
    check_end(submit(&["Not A Name\u{1b}"], ""), 66, "rejected", "not_found", "no", false);
    let unavailable = check_end(submit(&["broken"], ""), 75, "rejected", "unavailable", "no", true);
    assert!(unavailable["retry_after_ms"].is_number(), "{unavailable}");

    let exited = check_end(submit(&["b", "exit"], "3"), 70, "crashed", "exit", "unknown", false);
    assert_eq!(exited["exit_code"], 3);
    let zero = check_end(submit(&["b", "exit"], "0"), 70, "crashed", "exit", "unknown", false);
    assert_eq!(zero["exit_code"], 0, "an exit during a job is a crash, even with status 0");
    let killed = submit(&["b", "segv", "--idempotent"], "");
    assert_eq!(check_end(killed, 70, "crashed", "signal", "unknown", true)["signal"], "SIGSEGV");
    check_end(submit(&["liar"], ""), 70, "crashed", "protocol", "unknown", false);
    check_end(submit(&["sick", "stop"], ""), 70, "crashed", "hung", "unknown", false);

    let late = |more: &[&str]| {
        // A job that has to wait for a worker could miss its deadline before it starts.
        supervisor.wait_number("b", "available", 1);
        submit(&[&["b", "hang", "--deadline", "2s"], more].concat(), "")
    };
    let late_once = check_end(late(&[]), 124, "deadline_exceeded", "running", "yes", false);
    assert!(late_once["ran_ms"].as_f64() >= Some(40.0), "{late_once}");
    check_end(late(&["--idempotent"]), 124, "deadline_exceeded", "running", "yes", true);
}

#[test]
fn submit_marks_temporary_rejections_as_retryable() {
    let supervisor = Supervisor::start(
        "[defaults]\ndeadline = \"300s\"\ngrace = \"20ms\"\n\
         [bulkhead.full]\ncommand = [\"MISBEHAVE\"]\n\
         [bulkhead.queue]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 5\n\
         [bulkhead.hasty]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 5\nqueue_timeout = \"50ms\"\n",
    );
    let names = ["full", "queue", "hasty"];
    let blockers = names.map(|name| blocker(&supervisor, &["submit", name, "yield"]));
    let end = |arguments: &[&str], code, outcome, reason| {
        let ran = bulkhead(&supervisor, &[&["submit", "--json"], arguments].concat());
        check_end(ran, code, outcome, reason, "no", true)
    };
    let mut told = vec![end(&["full"], 75, "rejected", "queue_full")];
    let message = told[0]["message"].as_str().unwrap();
    assert!(message.contains("no queue is configured") && message.contains("`max_queue`"), "{message}");
    told.push(end(&["hasty"], 75, "rejected", "queue_timeout"));
    let late = end(&["queue", "--deadline", "50ms"], 124, "deadline_exceeded", "queued");
    assert!(late["queued_ms"].as_f64() >= Some(40.0), "{late}");
    // The drain rejects queued and new jobs.
    let waiting = spawn(supervisor.command().args(["submit", "queue", "--json", "-n"]));
    supervisor.wait_number("queue", "queued", 1);
    bulkhead(&supervisor, &["drain", "queue"]).expect(0);
    told.push(check_end(waiting.end(), 75, "rejected", "draining", "no", true));
    told.push(end(&["queue"], 75, "rejected", "draining"));
    for object in told {
        assert!(object["retry_after_ms"].is_number(), "{object}");
    }
    for blocker in &blockers {
        kill_pid(blocker.child.id(), Signal::SIGINT);
    }
    for blocker in blockers {
        blocker.end().expect(130);
    }
}

#[test]
fn sigint_cancels_submitted_jobs() {
    let supervisor = Supervisor::start(
        "[defaults]\ndeadline = \"60s\"\n\
         [bulkhead.one]\ncommand = [\"MISBEHAVE\"]\n\
         [bulkhead.two]\ncommand = [\"MISBEHAVE\"]\nprocesses = 2\n",
    );
    let one = blocker(&supervisor, &["submit", "one", "yield"]);
    let two =
        spawn(supervisor.command().args("submit two yield -n --json --repeat 5 --concurrency 2".split(' ')));
    supervisor.wait_number("two", "in_flight", 2);
    kill_pid(one.child.id(), Signal::SIGINT);
    let one = one.end().expect(130);
    assert!(one.stdout.is_empty() && one.stderr.contains("cancelled"), "{}", one.stderr);
    kill_pid(two.child.id(), Signal::SIGINT);
    let objects = two.end().expect(130).objects();
    assert_eq!(objects.len(), 2, "one object for each job in flight: {objects:?}");
    objects.iter().for_each(check_shape);
    let is_told = |o: &Value| o["outcome"] == "cancelled" && o["bulkhead"] == "two" && o["executed"] == "yes";
    assert!(objects.iter().all(is_told), "{objects:?}");
    supervisor.wait_number("one", "cancelled", 1);
    supervisor.wait_number("two", "cancelled", 2);
    supervisor.wait_number("two", "available", 2);
}

#[test]
fn submit_reports_collateral_crash_and_forced_shutdown() {
    let mut supervisor = Supervisor::start(
        "[defaults]\ngrace = \"20ms\"\ndeadline_max = \"60s\"\n\
         [bulkhead.b]\ncommand = [\"MISBEHAVE\"]\ndeadline = \"60s\"\n\
         [bulkhead.pair]\ncommand = [\"MISBEHAVE\"]\nmax_in_flight = 2\ndeadline = \"3s\"\n",
    );
    let innocent = blocker(&supervisor, &["submit", "pair", "hang", "--json", "--deadline", "60s"]);
    let guilty = bulkhead(&supervisor, &["submit", "pair", "hang", "--json"]);
    check_end(guilty, 124, "deadline_exceeded", "running", "yes", false);
    check_end(innocent.end(), 70, "crashed", "collateral", "unknown", false);

    let job = blocker(&supervisor, &["submit", "b", "hang", "--json"]);
    supervisor.signal(Signal::SIGTERM);
    wait_for("the supervisor drains", || (supervisor.try_get("/readyz")?.0 == 503).then_some(()));
    let refused = bulkhead(&supervisor, &["restart", "b"]).expect(75);
    assert!(refused.stderr.contains("stopping"), "{}", refused.stderr);
    check_end(bulkhead(&supervisor, &["submit", "b", "--json"]), 75, "rejected", "draining", "no", true);
    supervisor.signal(Signal::SIGTERM);
    check_end(job.end(), 70, "crashed", "stopped", "unknown", false);
    assert_eq!(supervisor.wait().code(), Some(0));
}

#[test]
fn commands_exit_69_without_supervisor() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("jobs.sock");
    let admin = folder.path().join("admin.sock");
    let check = |hint: &str| {
        let sockets = ["--socket", socket.to_str().unwrap(), "--admin", admin.to_str().unwrap()];
        let run =
            |arguments: &[&str]| spawn(&mut plain(&[&sockets[..], arguments].concat())).end().expect(69);
        let submitted = run(&["submit", "b", "--json"]);
        let object = submitted.object();
        assert_eq!((&object["outcome"], &object["executed"]), (&"unreachable".into(), &"no".into()));
        assert!(submitted.stderr.contains(hint), "{}", submitted.stderr);
        assert!(submitted.stderr.contains("is the supervisor running?"), "{}", submitted.stderr);
        let commands = [
            &["submit", "b"][..],
            &["submit", "b", "--repeat", "3"],
            &["bench", "b"],
            &["status"],
            &["status", "b"],
            &["events"],
            &["events", "--follow"],
            &["logs", "b"],
            &["restart", "b"],
            &["drain", "b"],
            &["resume", "b"],
            &["reset", "b"],
        ];
        for command in commands {
            let ran = run(command);
            assert!(ran.stdout.is_empty(), "{command:?}");
            assert!(ran.stderr.contains(folder.path().to_str().unwrap()), "{command:?}: {}", ran.stderr);
            let is_told = ran.stderr.contains("--socket") && ran.stderr.contains("BULKHEAD_SOCKET");
            assert!(is_told, "{command:?}: {}", ran.stderr);
        }
    };
    check("the socket does not exist");
    drop((UnixListener::bind(&socket).unwrap(), UnixListener::bind(&admin).unwrap()));
    check("no process is listening on the socket");
}

#[test]
fn submit_exits_75_above_max_clients() {
    let supervisor = Supervisor::start_with(
        "max_clients = 1",
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nprocesses = 2\ndeadline = \"60s\"\n",
    );
    let first = blocker(&supervisor, &["submit", "b", "yield"]);
    let second = bulkhead(&supervisor, &["submit", "b", "--json"]);
    assert!(second.stderr.contains("max_clients"), "{}", second.stderr);
    check_end(second, 75, "rejected", "overloaded", "no", true);
    kill_pid(first.child.id(), Signal::SIGINT);
    first.end().expect(130);
    wait_for("the supervisor accepts another client", || {
        (bulkhead(&supervisor, &["submit", "b"]).code == Some(0)).then_some(())
    });
}

/// Copies the `bulkhead` program, for a user who cannot enter the folder of the original.
fn copy_command(to: &Path) {
    // `cp` makes the copy, because a child that another test starts at the same time could inherit a file that this
    // process is writing. Executing that file would fail with ETXTBSY.
    let copied = Command::new("cp").arg(programs().join("bulkhead")).arg(to).status().unwrap();
    assert!(copied.success());
}

#[test]
fn commands_exit_77_for_forbidden_user() {
    let supervisor =
        Supervisor::start_with("socket_mode = \"0666\"", "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\n");
    let folder = supervisor.folder.path();
    if std::fs::metadata(folder).unwrap().uid() != 0 {
        not_run!("running a program as another user requires root; the test removes permissions instead");
        for socket in ["jobs.sock", "admin.sock"] {
            std::fs::set_permissions(folder.join(socket), PermissionsExt::from_mode(0o000)).unwrap();
        }
        bulkhead(&supervisor, &["submit", "b"]).expect(77);
        bulkhead(&supervisor, &["status"]).expect(77);
        return;
    }
    // The other user must be able to run the program and to enter the folder.
    std::fs::set_permissions(folder, PermissionsExt::from_mode(0o755)).unwrap();
    let program = folder.join("bulkhead");
    copy_command(&program);
    let stranger = |arguments: &[&str]| {
        let mut command = Command::new(&program);
        command.arg("--socket").arg(supervisor.socket()).arg("--admin").arg(folder.join("admin.sock"));
        spawn(command.args(arguments).uid(65_534).gid(65_534)).end().expect(77)
    };
    // The file mode allows every user to connect, but the supervisor rejects this user.
    let told = stranger(&["submit", "b", "--json"]);
    assert!(told.stderr.contains("65534"), "{}", told.stderr);
    check_end(told, 77, "rejected", "forbidden", "no", false);
    for command in [&["status"][..], &["events"], &["logs", "b"], &["drain", "b"]] {
        let told = stranger(command);
        assert!(told.stdout.is_empty() && told.stderr.contains("admin.sock"), "{}", told.stderr);
    }
    std::fs::set_permissions(supervisor.socket(), PermissionsExt::from_mode(0o600)).unwrap();
    check_end(stranger(&["submit", "b", "--json"]), 77, "rejected", "forbidden", "no", false);
    assert_eq!(supervisor.snapshot("b")["state"], "ready");
}

#[test]
fn invalid_arguments_are_usage_errors() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing");
    let missing = missing.to_str().unwrap();
    let cases = [
        &[][..],
        &["nonsense"],
        &["--nonsense"],
        &["submit"],
        &["submit", "b", "operation", "more"],
        &["submit", "b", "--deadline", "soon"],
        &["submit", "b", "--deadline", "500"],
        &["submit", "b", "--deadline", "0ms"],
        &["submit", "b", "--priority", "urgent"],
        &["submit", "b", "--cost", "-1"],
        &["submit", "b", "--repeat", "0"],
        &["submit", "b", "--repeat", "2", "--concurrency", "0"],
        &["submit", "b", "--payload-file"],
        &["submit", "b", "--payload-file", missing],
        &["status", "a", "b"],
        &["status", "--sort", "size"],
        &["status", "b", "--failed"],
        &["events", "--since", "x"],
        &["events", "--since", "9999-01-01T00:00:00Z"],
        &["events", "--kind", "moon_rose"],
        &["events", "--severity", "loud"],
        &["events", "-n", "-1"],
        &["logs", "--stream", "both"],
        &["logs", "-o", "xml"],
        &["logs", "-f", "--until", "10m"],
        &["logs", "-o", "cat", "--json"],
        &["jobs", "--state", "done"],
        &["jobs", "-n", "0"],
        &["jobs", "-n", "1001"],
        &["cancel", "b"],
        &["cancel", "b", "job-1"],
        &["cancel", "b", "12345678901234567"],
        &["is-ready", "--wait"],
        &["is-ready", "--wait", "0s"],
        &["restart"],
        &["restart", "b", "--wait=soon"],
        &["drain"],
        &["drain", "b", "--all"],
        &["drain", "b", "--wait=0s"],
        &["crashes", "--cause", "bad luck"],
        &["crashes", "last", "--since", "10m"],
        &["crashes", "--since", "tomorrow"],
        &["--host", "127.0.0.1:9", "status"],
        &["--host", "http://127.0.0.1:0", "status"],
        &["--host", "https://127.0.0.1:9", "status"],
        &["--host", "http://127.0.0.1:9", "--admin", "x", "status"],
        &["--host", "http://127.0.0.1:9", "--token-file", missing, "status"],
        &["--host", "http://127.0.0.1:9", "bench", "b"],
        &["resume"],
        &["reset"],
        &["bench"],
        &["bench", "b", "--duration", "0s"],
        &["bench", "b", "--duration", "500000000000years"],
        &["bench", "b", "--payload-bytes", "9000000000000"],
        &["bench", "b", "--payload-bytes", "9223372036854775808"],
        &["--socket", "", "status"],
        &["completions"],
        &["completions", "tcsh"],
        &["man"],
    ];
    for case in cases {
        let ran = spawn(&mut plain(case)).end();
        assert_eq!(ran.code, Some(2), "{case:?}: {}", ran.stderr);
        assert!(ran.stdout.is_empty(), "{case:?}");
        assert!(!ran.stderr.is_empty(), "{case:?}");
    }
    let told = spawn(&mut plain(&["submit", "b", "--deadline", "soon"])).end();
    assert!(told.stderr.contains("500ms"), "the message gives an example: {}", told.stderr);
    for case in [&["--help"][..], &["--version"], &["submit", "--help"], &["help", "status"]] {
        assert!(!spawn(&mut plain(case)).end().expect(0).stdout.is_empty(), "{case:?}");
    }
}

#[test]
fn socket_options_override_environment_variables() {
    let supervisor = Supervisor::start("[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\n");
    let admin = supervisor.folder.path().join("admin.sock");
    let run = |arguments: &[&str], variables: &[(&str, &Path)]| {
        spawn(plain(arguments).envs(variables.iter().copied())).end()
    };
    let (socket, nowhere) = (supervisor.socket(), Path::new("/nonexistent/jobs.sock"));
    let here = ("BULKHEAD_SOCKET", socket.as_path());
    run(&["submit", "b"], &[here]).expect(0);
    run(&["status"], &[here]).expect(0);
    run(&["status"], &[("BULKHEAD_ADMIN", &admin)]).expect(0);
    run(&["submit", "b"], &[("BULKHEAD_SOCKET", nowhere)]).expect(69);
    run(&["status"], &[here, ("BULKHEAD_ADMIN", nowhere)]).expect(69);
    let socket = socket.to_str().unwrap();
    run(&["submit", "b", "--socket", socket], &[("BULKHEAD_SOCKET", nowhere)]).expect(0);
    run(&["--socket", socket, "status"], &[("BULKHEAD_SOCKET", nowhere)]).expect(0);
    // An empty variable counts as unset.
    let unset = ["BULKHEAD_ADMIN", "BULKHEAD_HOST", "BULKHEAD_TOKEN_FILE"].map(|name| (name, Path::new("")));
    run(&["status"], &[&unset[..], &[here]].concat()).expect(0);
    let host = ("BULKHEAD_HOST", Path::new("http://127.0.0.1:9"));
    run(&["submit", "b", "-n"], &[host, ("BULKHEAD_SOCKET", Path::new(""))]).expect(2);
    run(&["status"], &[("BULKHEAD_SOCKET", Path::new("")), ("BULKHEAD_ADMIN", &admin)]).expect(0);
}

#[test]
fn relative_runtime_dir_is_ignored() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("bulkhead");
    copy_command(&program);
    let run = |value: &str| {
        let mut command = Command::new(&program);
        command.arg("status").env("XDG_RUNTIME_DIR", value).env_remove("BULKHEAD_SOCKET");
        command.env_remove("BULKHEAD_ADMIN").env_remove("BULKHEAD_HOST").current_dir(folder.path());
        // Root does not use the variable.
        if folder.path().metadata().unwrap().uid() == 0 {
            std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
            command.uid(65_534).gid(65_534);
        }
        spawn(&mut command).end().stderr
    };
    for value in ["", "run", "./run"] {
        let message = run(value);
        assert!(message.contains("admin socket /run/bulkhead/admin.sock"), "{value:?}: {message}");
    }
    assert!(run("/nonexistent").contains("admin socket /nonexistent/bulkhead/admin.sock"));
}

/// If the command line names a supervisor, environment variables must not select a different one.
#[test]
fn supervisor_on_command_line_overrides_variables() {
    let supervisor = Supervisor::start("[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\n");
    let path = |name: &str| supervisor.folder.path().join(name).to_str().unwrap().to_owned();
    let (socket, admin) = (path("jobs.sock"), path("admin.sock"));
    let run = |arguments: &[&str], variable: (&str, &str)| spawn(plain(arguments).envs([variable])).end();
    let elsewhere = ("BULKHEAD_ADMIN", "/nonexistent/admin.sock");
    run(&["--socket", &socket, "status"], elsewhere).expect(0);
    run(&["status", "--socket", &socket], elsewhere).expect(0);
    run(&["--socket", "/nonexistent/jobs.sock", "status"], ("BULKHEAD_ADMIN", &admin)).expect(69);
    run(&["--socket", &socket, "--admin", &admin, "status"], elsewhere).expect(0);
    run(&["--socket", "/nonexistent/jobs.sock", "--admin", &admin, "status"], elsewhere).expect(0);
    let host = ["--host", "http://127.0.0.1:9", "submit", "b", "-n"];
    run(&host, ("BULKHEAD_SOCKET", &socket)).expect(2);
    assert_eq!(supervisor.number("b", "submitted"), 0);
}

// Payloads, results, repetition.

#[test]
fn submit_preserves_bytes_of_payload_and_result() {
    let supervisor = Supervisor::start(&format!(
        "[bulkhead.cat]\nexec = [\"cat\"]\n\
         [bulkhead.env]\nexec = [\"sh\", \"-c\", \"echo $BULKHEAD_OPERATION/$BULKHEAD_TENANT\"]\n{SHELL}"
    ));
    let folder = supervisor.folder.path();
    let payload: Vec<u8> = (0..300_000_u32).map(|i| (i * 7 + i / 251) as u8).collect();
    let (file, output) = (folder.join("payload"), folder.join("result"));
    std::fs::write(&file, &payload).unwrap();
    let (file, out) = (file.to_str().unwrap(), output.to_str().unwrap());

    let piped = fed(&supervisor, &["submit", "cat", "--payload-file", "-"], &payload).expect(0);
    assert!(piped.stdout == payload, "{} bytes came back", piped.stdout.len());
    assert!(piped.stderr.starts_with("ok: cat "), "a summary: {}", piped.stderr);
    assert_eq!(piped.stderr.lines().count(), 1);
    let read = bulkhead(&supervisor, &["submit", "cat", "--payload-file", file]).expect(0);
    assert!(read.stdout == payload, "{} bytes came back", read.stdout.len());
    // Without a file, standard input is the payload, unless `-n` is given.
    assert_eq!(fed(&supervisor, &["submit", "cat"], b"read").expect(0).stdout, b"read");
    assert!(fed(&supervisor, &["submit", "cat", "-n"], b"unread").expect(0).stdout.is_empty());

    let saved = bulkhead(&supervisor, &["submit", "cat", "--payload-file", file, "--output", out]).expect(0);
    assert!(saved.stdout.is_empty());
    assert!(std::fs::read(&output).unwrap() == payload);
    std::fs::remove_file(&output).unwrap();
    let told = bulkhead(&supervisor, &["submit", "cat", "--payload-file", file, "--json"]).expect(0);
    assert_eq!(told.object()["result_bytes"], 300_000, "only the object goes to standard output");
    let arguments = ["submit", "cat", "--payload-file", "-", "--json", "--output", out];
    let both = fed(&supervisor, &arguments, &payload).expect(0);
    assert_eq!(both.object()["outcome"], "ok");
    assert!(std::fs::read(&output).unwrap() == payload);
    let nowhere = folder.join("missing/result");
    let lost = bulkhead(&supervisor, &["submit", "cat", "--output", nowhere.to_str().unwrap()]).expect(74);
    assert!(lost.stderr.contains("cannot be written"), "{}", lost.stderr);

    let arguments = "submit env op --tenant acme --priority critical --cost 3 --idempotent --deadline 20s";
    let told = bulkhead(&supervisor, &arguments.split(' ').collect::<Vec<_>>()).expect(0);
    assert_eq!(told.text(), "op/acme\n");
}

/// Starts a bulkhead that runs shell commands. The first job runs the first line of `lines`, the second job runs the
/// second line, and so on.
fn scripted(lines: &[&str]) -> Supervisor {
    let branches: String =
        lines.iter().enumerate().map(|(i, line)| format!("{}) {line} ;; ", i + 1)).collect();
    let script = format!("echo >> count; case $(wc -l < count) in {branches} esac");
    Supervisor::start(&format!("[bulkhead.b]\nexec = [\"sh\", \"-c\", \"{script}\"]\ncwd = \".\"\n{SHELL}"))
}

#[test]
fn repeated_submit_exits_with_code_of_first_failure() {
    for (lines, code) in [
        (["echo one", "exit 64", "kill -9 $$", "echo four"], 1),
        (["echo one", "kill -9 $$", "exit 64", "echo four"], 70),
        (["echo one", "echo two", "echo three", "echo four"], 0),
    ] {
        let supervisor = scripted(&lines);
        let ran = bulkhead(&supervisor, &["submit", "b", "--json", "--repeat", "4"]).expect(code);
        let seen = ran.objects();
        seen.iter().for_each(check_shape);
        let expected = lines.map(|line| match line {
            "exit 64" => "failed",
            "kill -9 $$" => "crashed",
            _ => "ok",
        });
        assert_eq!(seen.iter().map(|o| o["outcome"].as_str().unwrap()).collect::<Vec<_>>(), expected);
    }
    let supervisor = scripted(&["echo one", "exit 1", "echo three"]);
    let ran = bulkhead(&supervisor, &["submit", "b", "--repeat", "3"]).expect(1);
    assert_eq!(ran.text(), "one\nthree\n", "only results go to standard output");
    assert!(ran.stderr.starts_with("3 jobs in "), "{}", ran.stderr);
    assert!(ran.stderr.contains("2  ok\n") && ran.stderr.contains("1  failed/exit_1\n"), "{}", ran.stderr);
}

#[test]
fn submit_runs_jobs_concurrently() {
    let supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nprocesses = 2\nmax_queue = 2\ndeadline = \"60s\"\n",
    );
    supervisor.wait_number("b", "limit", 2);
    let count = |arguments: &str, code| {
        let arguments = [&["submit", "b", "--json"], &arguments.split(' ').collect::<Vec<_>>()[..]].concat();
        let objects = fed(&supervisor, &arguments, b"150").expect(code).objects();
        tally(objects.iter().map(|o| (o["outcome"].to_string(), o["reason"].to_string())))
    };
    let fits = count("--repeat 40 --concurrency 4", 0);
    assert_eq!(fits.into_values().collect::<Vec<_>>(), [40]);
    // The accepted jobs run until all others have been rejected.
    let wait = format!("steps:wait {}", supervisor.file("go").display());
    let many = ["submit", "b", wait.as_str(), "-n", "--json", "--repeat", "10", "--concurrency", "10"];
    let spilling = spawn(supervisor.command().args(many));
    wait_for("six jobs are rejected", || {
        (supervisor.snapshot("b")["rejected"]["queue_full"] == 6).then_some(())
    });
    supervisor.touch("go");
    let objects = spilling.end().expect(75).objects();
    let spills = tally(objects.iter().map(|o| (o["outcome"].to_string(), o["reason"].to_string())));
    let expected = [("\"ok\"", "null", 4), ("\"rejected\"", "\"queue_full\"", 6)];
    assert_eq!(spills.iter().map(|((o, r), n)| (o.as_str(), r.as_str(), *n)).collect::<Vec<_>>(), expected);
    let rest = count("--repeat 3 --concurrency 1000", 0);
    assert_eq!(rest.into_values().collect::<Vec<_>>(), [3]);
}

#[test]
fn closed_output_pipe_is_an_error_only_for_results() {
    const LOST: &str = "failed to write to standard output: the reader has closed the pipe";
    let supervisor = scripted(&["exit 64", "yes | head -c 300000", "yes | head -c 300000"]);
    let ran = unread(supervisor.command().args(["submit", "b", "--repeat", "3"])).expect(74);
    assert_eq!(ran.stderr, format!("bulkhead: {LOST}; jobs not submitted: 1\n"));
    let ran = unread(supervisor.command().args(["submit", "b", "--json"])).expect(74);
    assert_eq!(ran.stderr, format!("bulkhead: {LOST}\n"));
    let many: &[&[&str]] = &[
        &["completions", "bash"],
        &["status"],
        &["status", "b"],
        &["events"],
        &["events", "--json"],
        &["man", supervisor.folder.path().to_str().unwrap()],
        &["reset", "b"],
    ];
    for arguments in many {
        let ran = unread(supervisor.command().args(*arguments)).expect(0);
        assert!(ran.stderr.is_empty(), "{arguments:?}: {}", ran.stderr);
    }

    // A job that was not sent is reported even if standard output has no reader.
    let unsent = unread(&mut plain(&["--socket", "/nonexistent", "submit", "b", "-n", "--json"])).expect(69);
    assert!(unsent.stderr.contains("/nonexistent"), "{}", unsent.stderr);

    // A reader that reads only the first bytes, as `head` does.
    let big = Supervisor::start("[bulkhead.cat]\nexec = [\"cat\"]\n");
    let payload = big.folder.path().join("payload");
    std::fs::write(&payload, vec![b'x'; 3_000_000]).unwrap();
    let mut head = big.command();
    let submit = ["submit", "cat", "--payload-file", payload.to_str().unwrap()];
    let mut child =
        head.args(submit).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let stderr = read_all(child.stderr.take().unwrap());
    let mut stdout = child.stdout.take().unwrap();
    let reader = std::thread::spawn(move || stdout.read_exact(&mut [0; 10]));
    wait_for("the first bytes arrive", || reader.is_finished().then_some(()));
    reader.join().unwrap().unwrap();
    let ran = Running { child, stdin: None, stdout: None, stderr }.end().expect(74);
    assert!(ran.stderr.contains(LOST), "{}", ran.stderr);

    // A result that cannot be written is lost, so the command fails.
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut lost = big.command();
    lost.args(submit).stdin(Stdio::null()).stdout(full).stderr(Stdio::piped());
    let output = output_of(lost.spawn().unwrap());
    assert_eq!(output.status.code(), Some(74));
    assert!(String::from_utf8_lossy(&output.stderr).contains("failed to write to standard output"));
}

/// Runs a command with standard output closed. Uses a shell, because `Command` cannot close a stream.
fn without_stdout(command: &Command) -> Ran {
    let mut shell = Command::new("sh");
    shell.args(["-c", "exec \"$0\" \"$@\" >&-"]).arg(command.get_program()).args(command.get_args());
    spawn(&mut shell).end()
}

#[test]
fn commands_exit_74_if_standard_output_is_closed() {
    let supervisor = Supervisor::start("[bulkhead.b]\nexec = [\"echo\", \"a\", \"result\"]\n");
    let file = supervisor.folder.path().join("result").display().to_string();
    let pages = supervisor.folder.path().join("pages").display().to_string();
    let many: &[&[&str]] = &[
        &["submit", "b"],
        &["submit", "b", "--json"],
        &["submit", "b", "--repeat", "2"],
        &["status"],
        &["status", "b", "--json"],
        &["top", "--once", "--interval", "100ms"],
        &["events"],
        &["reset", "b"],
        &["resize", "b", "--max-queue", "3"],
        &["reload"],
        &["advise"],
        &["crashes"],
        &["bench", "b", "--duration", "50ms"],
        &["completions", "bash"],
        &["man", &pages],
        &["--version"],
        &["status", "--help"],
    ];
    for arguments in many {
        let ran = without_stdout(supervisor.command().args(*arguments)).expect(74);
        let said = "failed to write to standard output: standard output is closed";
        assert!(ran.stderr.contains(said), "{arguments:?}: {}", ran.stderr);
    }
    // A command that writes nothing does not need standard output.
    without_stdout(supervisor.command().args(["submit", "b", "--output", &file])).expect(0);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "a result\n");
}

#[test]
fn failed_commands_print_json_errors() {
    let supervisor = Supervisor::start("[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\n");
    let nowhere =
        |arguments: &[&str]| spawn(&mut plain(&[&["--admin", "/nonexistent"], arguments].concat())).end();
    let every: &[&[&str]] = &[
        &["status"],
        &["top"],
        &["events"],
        &["logs", "b"],
        &["logs"],
        &["jobs"],
        &["cancel", "b", "1000001"],
        &["is-ready"],
        &["restart", "b"],
        &["restart", "b", "--wait"],
        &["drain", "b"],
        &["drain", "--all", "--wait"],
        &["resume", "b"],
        &["reset", "b"],
        &["resize", "b", "--max-queue", "3"],
        &["advise"],
        &["reload"],
        &["crashes"],
        &["replay", "20260307T101530123-0001"],
    ];
    for arguments in every {
        let ran = nowhere(&[arguments, &["--json"][..]].concat()).expect(69);
        let told = ran.object();
        assert_eq!((&told["outcome"], &told["retryable"]), (&"unreachable".into(), &true.into()), "{told}");
        let message = told["message"].as_str().unwrap();
        assert!(ran.stderr.contains(message), "{arguments:?}: {}", ran.stderr);
    }
    assert!(
        nowhere(&["status"]).expect(69).stdout.is_empty(),
        "without --json, only standard error has output"
    );
    for (arguments, code) in [(&["status", "none"][..], 66), (&["crashes", "nonsense"], 66)] {
        let told = bulkhead(&supervisor, &[arguments, &["--json"]].concat()).expect(code).object();
        assert_eq!((&told["outcome"], &told["retryable"]), (&"error".into(), &false.into()), "{told}");
    }
    let bench = ["bench", "b", "--duration", "50ms", "--json"];
    let told =
        spawn(&mut plain(&[&["--socket", "/nonexistent"], &bench[..]].concat())).end().expect(69).object();
    assert_eq!(told["outcome"], "unreachable");
}

// Operating a supervisor.

fn words(line: &str) -> Vec<&str> {
    line.split_ascii_whitespace().collect()
}

const COLUMNS: &str = "NAME STATE SERVICE WORKERS INFLIGHT/LIMIT QUEUE DONE FAILED LATE REJECTED CRASHED RESTARTS BREAKER P50 P99";
const WORKER_COLUMNS: &str = "PID STATE UPTIME INFLIGHT SERVED RESTARTS RSS LAST-EXIT";

#[test]
fn status_prints_tables_of_bulkheads_and_workers() {
    let supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nprocesses = 2\nmax_in_flight = 3\nmax_queue = 7\n\
         [bulkhead.broken]\ncommand = [\"MISBEHAVE\", \"exit-at-start\"]\nrestart = { policy = \"never\" }\n",
    );
    supervisor.wait_number("b", "limit", 6);
    let fresh = bulkhead(&supervisor, &["status"]).expect(0);
    let row = fresh.text().lines().find(|line| words(line).first() == Some(&"b")).unwrap();
    assert_eq!(words(row), "b ready ok 2 0/6 0/7 0 0 0 0 0 0 - - -".split(' ').collect::<Vec<_>>());
    for (operation, code) in [("", 0), ("", 0), ("fail", 1), ("abort", 70)] {
        bulkhead(&supervisor, &["submit", "b", operation]).expect(code);
    }
    bulkhead(&supervisor, &["submit", "b", &"x".repeat(257)]).expect(65);
    supervisor.wait_number("b", "limit", 6);

    let all = bulkhead(&supervisor, &["status"]).expect(0);
    let lines: Vec<&str> = all.text().lines().collect();
    assert_eq!(words(lines[0]), words(COLUMNS));
    assert_eq!((lines.len(), lines[3]), (5, ""), "{lines:?}");
    assert!(lines[4].starts_with("broken: state failed: the worker did not start"), "{lines:?}");
    let row = words(lines.iter().find(|line| words(line)[0] == "b").unwrap());
    assert_eq!(row[..13], words("b ready ok 2 0/6 0/7 2 1 0 0 1 1 -"));
    assert!(row[13].ends_with("ms") && row[14].ends_with("ms"), "{row:?}");
    let row = words(lines.iter().find(|line| words(line)[0] == "broken").unwrap());
    assert_eq!(row, words("broken failed ok 0 0/0 0/0 0 0 0 0 0 0 - - -"));

    let one = bulkhead(&supervisor, &["status", "b"]).expect(0);
    let lines: Vec<&str> = one.text().lines().collect();
    assert_eq!(words(lines[0]), words(COLUMNS));
    let workers = lines.iter().position(|line| words(line) == words(WORKER_COLUMNS)).unwrap();
    let pids = supervisor.worker_pids("b");
    for line in &lines[workers + 1..workers + 3] {
        let row = words(line);
        assert!(pids.contains(&row[0].parse().unwrap()), "{row:?} {pids:?}");
        assert!(row[1] == "ready" || row[1] == "busy", "{row:?}");
        assert!(row[6].ends_with("iB"), "{row:?}");
    }
    assert!(one.text().contains("killed by SIGABRT"), "the last exit: {}", one.text());
    assert!(one.text().contains("job_crashed"), "the last events: {}", one.text());
    let broken = bulkhead(&supervisor, &["status", "broken"]).expect(0);
    assert!(broken.text().contains("bulkhead_failed"), "{}", broken.text());

    let all = bulkhead(&supervisor, &["status", "--json"]).expect(0).object();
    let names: Vec<_> = all["bulkheads"].as_array().unwrap().iter().map(|b| b["name"].clone()).collect();
    assert_eq!(names, ["b", "broken"]);
    let one = bulkhead(&supervisor, &["--json", "status", "b"]).expect(0).object();
    assert_eq!((&one["name"], &one["done"], &one["crashed"]), (&"b".into(), &2.into(), &1.into()));
    assert!(one["events"].as_array().unwrap().iter().any(|e| e["kind"] == "job_crashed"), "{one}");
    let nobody = bulkhead(&supervisor, &["status", "nobody"]).expect(66);
    assert!(nobody.stdout.is_empty() && nobody.stderr.contains("'nobody'"), "{}", nobody.stderr);
    for odd in ["", "..", "a/b", "b?x=1", "%62", "\u{1b}[31m"] {
        let told = bulkhead(&supervisor, &["status", odd]).expect(66);
        assert!(!told.stderr.contains('\u{1b}'), "{}", told.stderr);
    }
}

#[test]
fn events_command_prints_past_and_new_events() {
    let supervisor = Supervisor::start("[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\n");
    let text = bulkhead(&supervisor, &["events"]).expect(0);
    let ready = text.text().lines().find(|line| line.contains("worker_ready")).unwrap();
    assert_eq!(words(ready)[1..4], ["info", "worker_ready", "b"], "{ready}");
    let events = bulkhead(&supervisor, &["events", "--json"]).expect(0).objects();
    let first = events.iter().find(|event| event["bulkhead"] == "b").unwrap();
    assert_eq!(first["kind"], "worker_started");
    let follows: Vec<_> = [&["events", "--follow"][..], &["events", "--follow", "--json"]]
        .iter()
        .map(|arguments| follow(supervisor.command().args(*arguments)))
        .collect();
    for following in &follows {
        following.line_with("worker_ready");
    }
    bulkhead(&supervisor, &["drain", "b"]).expect(0);
    follows[0].line_with(" draining b");
    let json: Value = serde_json::from_str(&follows[1].line_with("draining")).unwrap();
    assert_eq!((&json["kind"], &json["bulkhead"]), (&"draining".into(), &"b".into()));
    for following in follows {
        assert_eq!(following.interrupt(), Some(130));
    }
}

#[test]
fn following_commands_end_when_the_supervisor_exits() {
    let mut supervisor = Supervisor::start("[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\n");
    let mut events = follow(supervisor.command().args(["events", "--follow"]));
    let mut logs = follow(supervisor.command().args(["logs", "b", "--follow"]));
    events.line_with("worker_ready");
    supervisor.signal(Signal::SIGTERM);
    events.line_with("draining");
    assert_eq!(supervisor.wait().code(), Some(0));
    for following in [&mut events, &mut logs] {
        let status = wait_for("the command exits", || following.child.try_wait().unwrap());
        assert!(matches!(status.code(), Some(0 | 69)), "{status}");
    }
}

#[test]
fn followed_logs_end_when_the_bulkhead_is_removed() {
    let other = "[bulkhead.other]\ncommand = [\"MISBEHAVE\"]\n";
    let supervisor = Supervisor::start(&format!(
        "{other}[bulkhead.x]\nexec = [\"sh\", \"-c\", \"echo $BULKHEAD_OPERATION >&2\"]\n{SHELL}"
    ));
    let mut following = follow(supervisor.command().args(["logs", "x", "--follow"]));
    // The first line can be a stored one. The second shows that the follower is connected to the stream.
    for operation in ["first", "second"] {
        wait_for("the follower has printed the line", || {
            bulkhead(&supervisor, &["submit", "-n", "x", operation]).expect(0);
            following.lines.try_iter().find(|line| line.contains(operation))
        });
    }
    supervisor.configure("", other);
    assert_eq!(supervisor.post("/v1/reload").0, 200);
    let status = wait_for("the command exits", || following.child.try_wait().unwrap());
    assert_eq!(status.code(), Some(0));
}

#[test]
fn logs_command_escapes_control_characters() {
    let script = r"printf 'a\\033[31mb\\007c\\302\\233d\\177e\\377f\\n' >&2; echo out; cat";
    let supervisor =
        Supervisor::start(&format!("[bulkhead.x]\nexec = [\"sh\", \"-c\", \"{script}\"]\n{SHELL}"));
    assert!(bulkhead(&supervisor, &["logs", "x"]).expect(0).stdout.is_empty());
    let following = follow(supervisor.command().args(["logs", "x", "--follow"]));
    // The program's standard output is the result. Only standard error goes to the logs.
    wait_for("the follower has printed a line", || {
        fed(&supervisor, &["submit", "x", "--payload-file", "-"], b"secret").expect(0);
        following.lines.try_recv().ok()
    });
    let pid = supervisor.worker_pids("x")[0].to_string();
    let logs = bulkhead(&supervisor, &["logs", "x"]).expect(0);
    assert!(!logs.text().chars().any(|c| c.is_control() && c != '\n'), "{:?}", logs.text());
    let line = logs.text().lines().next().unwrap();
    assert!(line.contains(&format!("Z x[{pid}] stderr: a")), "{line}");
    assert!(line.contains(r"a\u{1b}[31mb\u{7}c\u{9b}d\u{7f}e") && line.ends_with('f'), "{line}");
    assert!(!logs.text().contains("secret"));
    for object in bulkhead(&supervisor, &["logs", "x", "--json"]).expect(0).objects() {
        assert_eq!((&object["bulkhead"], &object["stream"]), (&"x".into(), &"stderr".into()));
        assert!(object["line"].as_str().unwrap().starts_with("a\u{1b}"), "{object}");
    }
    assert_eq!(following.interrupt(), Some(130));
    bulkhead(&supervisor, &["logs", "nobody"]).expect(66);
    bulkhead(&supervisor, &["logs", "nobody", "--follow"]).expect(66);
}

#[test]
fn drain_resume_restart_and_reset_take_effect() {
    let supervisor = Supervisor::start(&format!(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nprocesses = 2\n\
         [bulkhead.late]\ncommand = [\"sh\", \"-c\", \"test -e flag || exit 3; exec 'MISBEHAVE'\"]\n\
         cwd = \".\"\nrestart = {{ policy = \"never\" }}\n{SHELL}"
    ));
    supervisor.wait_number("b", "limit", 2);
    let run = |verb: &str, name: &str| {
        let told = bulkhead(&supervisor, &[verb, name]).expect(0);
        assert!(told.text().starts_with(&format!("{name}: ")), "{}", told.text());
        let object = bulkhead(&supervisor, &[verb, name, "--json"]).expect(0).object();
        assert_eq!((&object["bulkhead"], &object["done"]), (&name.into(), &verb.into()));
    };
    run("drain", "b");
    assert_eq!(supervisor.snapshot("b")["state"], "draining");
    bulkhead(&supervisor, &["submit", "b"]).expect(75);
    run("resume", "b");
    assert_eq!(supervisor.snapshot("b")["state"], "ready");
    bulkhead(&supervisor, &["submit", "b"]).expect(0);
    let before = supervisor.worker_pids("b");
    run("restart", "b");
    wait_for("both workers are new", || {
        let now = supervisor.worker_pids("b");
        (now.len() == 2 && now.iter().all(|pid| !before.contains(pid))).then_some(())
    });

    assert_eq!(supervisor.snapshot("late")["state"], "failed");
    bulkhead(&supervisor, &["submit", "late"]).expect(75);
    std::fs::write(supervisor.folder.path().join("flag"), "").unwrap();
    run("reset", "late");
    wait_for("the bulkhead is ready", || (supervisor.snapshot("late")["state"] == "ready").then_some(()));
    bulkhead(&supervisor, &["submit", "late"]).expect(0);
    for verb in ["restart", "drain", "resume", "reset"] {
        let told = bulkhead(&supervisor, &[verb, "nobody"]).expect(66);
        assert!(told.stdout.is_empty() && told.stderr.contains("there is no bulkhead 'nobody'"));
    }
}

#[test]
fn bench_prints_throughput_and_latency() {
    let supervisor =
        Supervisor::start("[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_in_flight = 4\nmax_queue = 100\n");
    let load = ["bench", "b", "--duration", "200ms", "--concurrency", "2"];
    // On a busy machine, the bench can finish before any job ends.
    wait_for("the table has all figures", || {
        let text = bulkhead(&supervisor, &load).expect(0);
        let parts = ["jobs/s", "ok", "p50", "p90", "p99", "max"];
        parts.iter().all(|part| text.text().contains(part)).then_some(())
    });
    let object = wait_for("a job ends while the bench runs", || {
        let object = bulkhead(&supervisor, &[&load[..], &["--json"]].concat()).expect(0).object();
        (object["jobs"].as_u64() > Some(0)).then_some(object)
    });
    let jobs = object["jobs"].as_u64().unwrap();
    assert!(object["jobs_per_second"].as_f64() > Some(0.0), "{object}");
    assert_eq!(object["outcomes"]["ok"].as_u64(), Some(jobs), "{object}");
    assert!(object["latency_ms"]["p99"].as_f64() >= object["latency_ms"]["p50"].as_f64(), "{object}");
    assert!(supervisor.number("b", "done") > jobs);
    bulkhead(&supervisor, &["bench", "nobody", "--duration", "10s"]).expect(66);
    // On a busy machine, the bench can finish before any job has failed.
    wait_for("a job fails while the bench runs", || {
        let ran = bulkhead(&supervisor, &["bench", "b", "fail", "--duration", "100ms"]);
        (ran.code == Some(1)).then_some(())
    });
}

#[test]
fn bench_fails_if_the_supervisor_exits() {
    let supervisor = Supervisor::start("[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 100\n");
    let mut command = supervisor.command();
    command.args(["bench", "b", "--duration", "10s", "--concurrency", "1", "--json"]);
    let bench = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // The second job is submitted after the outcome of the first one.
    wait_for("two jobs have run", || (supervisor.number("b", "done") > 1).then_some(()));
    supervisor.signal(Signal::SIGKILL);
    let output = output_of(bench);
    assert_eq!(output.status.code(), Some(69), "{output:?}");
    let object: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(object["outcomes"]["ok"].as_u64() > Some(0), "{object}");
}

// Completions and man pages.

const SUBCOMMANDS: [&str; 20] = [
    "submit",
    "status",
    "top",
    "events",
    "logs",
    "jobs",
    "cancel",
    "is-ready",
    "resize",
    "advise",
    "reload",
    "crashes",
    "replay",
    "restart",
    "drain",
    "resume",
    "reset",
    "bench",
    "completions",
    "man",
];

#[test]
fn every_shell_has_completions() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let ran = spawn(&mut plain(&["completions", shell])).end().expect(0);
        for word in SUBCOMMANDS {
            assert!(ran.text().contains(word), "{shell} does not complete {word}");
        }
        assert!(ran.stderr.is_empty(), "{shell}: {}", ran.stderr);
        let known = Command::new(shell).args(["-n", "-c", ":"]).stdin(Stdio::null()).status();
        if ["bash", "zsh", "fish"].contains(&shell) && known.is_ok_and(|status| status.success()) {
            let mut check = Command::new(shell);
            spawn(check.arg("-n")).feed(&ran.stdout).expect(0);
        } else {
            eprintln!("NOT PARSED: {shell} is not installed, or cannot check a script");
        }
    }
}

#[test]
fn help_fits_into_80_columns() {
    let help = |command: &mut Command| {
        let ran = spawn(command).end().expect(0);
        for line in ran.text().lines() {
            assert!(line.chars().count() <= 80, "{command:?}: {line}");
        }
        assert!(ran.text().contains("Usage:"), "{command:?}");
    };
    for long in ["-h", "--help"] {
        // The width is also limited without a terminal and in a wide terminal.
        help(plain(&[long]).env_remove("COLUMNS"));
        help(plain(&[long]).env("COLUMNS", "200"));
        for name in SUBCOMMANDS {
            help(plain(&[name, long]).env("COLUMNS", "200"));
        }
        for program in ["bulkhead-supervisor", "bulkhead-fleet"] {
            help(Command::new(programs().join(program)).arg(long).env("COLUMNS", "200"));
        }
    }
}

#[test]
fn every_subcommand_has_a_man_page() {
    let folder = tempfile::tempdir().unwrap();
    let pages = folder.path().join("new/man1");
    let ran = spawn(&mut plain(&["man", pages.to_str().unwrap()])).end().expect(0);
    let page =
        |name: &str| std::fs::read_to_string(pages.join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
    assert!(page("bulkhead.1").contains(".TH bulkhead 1"));
    for name in SUBCOMMANDS {
        let file = format!("bulkhead-{name}.1");
        assert!(page(&file).contains(&format!(".TH bulkhead-{name} 1")), "{file}");
        assert!(ran.text().lines().any(|line| line.ends_with(&file)), "{file} is not listed");
    }
    assert!(page("bulkhead-submit.1").contains("idempotent"));
    // The page of the `bulkhead-fleet` program is in section 8, which `man` searches later.
    assert!(!pages.join("bulkhead-fleet.1").exists());
    let told = spawn(&mut plain(&["man", pages.to_str().unwrap(), "--json"])).end().expect(0).object();
    assert_eq!(told["files"].as_array().unwrap().len(), ran.text().lines().count());
    std::fs::write(folder.path().join("file"), "").unwrap();
    spawn(&mut plain(&["man", folder.path().join("file").to_str().unwrap()])).end().expect(74);
}

#[test]
fn submit_rejects_unwritable_output_before_running_job() {
    let supervisor = Supervisor::start("[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\n");
    let folder = supervisor.folder.path();
    let submit = |output: &Path| {
        let mut command = supervisor.command();
        command.args(["submit", "b", "--payload-file", "-", "--output"]).arg(output);
        command
    };
    std::fs::write(folder.join("read-only"), "precious").unwrap();
    for (name, target) in
        [("dangling", "nowhere/x"), ("nested", "dangling"), ("loop", "loop"), ("slash", "new/")]
    {
        symlink(target, folder.join(name)).unwrap();
    }
    let names = ["", "nowhere/x", "read-only/x", "dangling", "nested", "loop", "slash", "new/", "new/."];
    let mut wrong: Vec<_> = names.iter().map(|name| folder.join(name)).collect();
    // Even root cannot create a file here, although the folder exists.
    wrong.push("/proc/bulkhead-result".into());
    for wrong in wrong {
        let ended = spawn(&mut submit(&wrong)).end().expect(74);
        assert!(ended.stderr.contains(wrong.to_str().unwrap()), "{}", ended.stderr);
    }
    assert_eq!(supervisor.number("b", "submitted"), 0, "nothing ran");
    // Opening a dangling link creates the link's target.
    symlink("target", folder.join("link")).unwrap();
    spawn(&mut submit(&folder.join("link"))).end().expect(0);
    assert!(folder.join("target").is_file());
    let ran = spawn(&mut submit(Path::new("-"))).end().expect(0);
    assert!(ran.stdout.is_empty() && !Path::new("-").exists());
    // A write error can also appear after the job has run.
    let mut full = supervisor.command();
    full.args(["submit", "b", "big", "--payload-file", "-", "--output", "/dev/full"]);
    let mut full = spawn(&mut full);
    full.stdin.as_mut().unwrap().write_all(b"100000").unwrap();
    full.end().expect(74);
}
