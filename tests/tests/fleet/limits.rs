//! Limits of a fleet: backlogs, message sizes, full streams, the number of lanes, and messages that are not jobs.

use std::process::Output;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bulkhead_client::RejectReason;
use bulkhead_fleet::FleetError;
use bulkhead_shared::Verdict;
use bulkhead_tests::fleet::{TestFleet, VERSIONS, result_of, streams};
use bulkhead_tests::{PATIENCE, SAME_NUMBERS, run, tally, wait_for};
use serde_json::Value;

use super::commands::rejected_letter;
use super::jobs::{BULKHEADS, settings, start};

/// Submits jobs from 32 tasks to a fleet without agents. Returns the IDs of the accepted jobs, and the reason for each
/// rejection.
async fn flood(fleet: &TestFleet, jobs: usize, bytes: usize) -> (Vec<String>, Vec<RejectReason>) {
    let client = fleet.connect().await;
    let mut tasks = tokio::task::JoinSet::new();
    for publisher in 0..32 {
        let client = client.clone();
        tasks.spawn(async move {
            let mut results = Vec::new();
            for number in 0..jobs / 32 {
                let id = format!("{publisher}-{number}");
                results
                    .push((id.clone(), client.job("b", vec![b'x'; bytes]).id(id).submit().await.map(drop)));
            }
            results
        });
    }
    let (mut accepted, mut reasons) = (Vec::new(), Vec::new());
    for (id, result) in tasks.join_all().await.into_iter().flatten() {
        match result {
            Ok(()) => accepted.push(id),
            Err(FleetError::Job(error)) => match &error.outcome().unwrap().verdict {
                Verdict::Rejected { reason, .. } => reasons.push(*reason),
                other => panic!("{other:?}"),
            },
            Err(error) => panic!("{error}"),
        }
    }
    (accepted, reasons)
}

/// Floods a fleet without agents, then starts an agent and waits for all results. Returns the number of accepted
/// jobs and the reasons for all rejections.
fn decide_all_accepted(settings: &str, jobs: usize, bytes: usize) -> Option<(usize, Vec<RejectReason>)> {
    let mut fleet = TestFleet::start(VERSIONS[1], 1, settings)?;
    let (accepted, reasons) = run(flood(&fleet, jobs, bytes));
    fleet.add_host("host-a", BULKHEADS);
    fleet.wait_drained("b");
    run(async {
        let client = fleet.connect().await;
        for id in &accepted {
            client.result("", id, PATIENCE).await.unwrap();
        }
    });
    Some((accepted.len(), reasons))
}

#[test]
fn jobs_beyond_the_tenant_backlog_are_rejected() {
    let settings = settings().replace("[streams]\n", "[streams]\ntenant_backlog = 50\n");
    let Some((accepted, reasons)) = decide_all_accepted(&settings, 320, 10) else { return };
    assert_eq!(accepted, 50);
    assert!(reasons.iter().all(|reason| *reason == RejectReason::TenantQuota), "{:?}", tally(&reasons));
}

#[test]
fn full_stream_rejects_jobs_but_loses_none() {
    let settings = settings().replace("max_bytes = \"64MiB\"\nledger", "max_bytes = \"256KiB\"\nledger");
    let Some((accepted, reasons)) = decide_all_accepted(&settings, 320, 2000) else { return };
    assert!((50..160).contains(&accepted), "{accepted}");
    assert!(reasons.iter().all(|reason| *reason == RejectReason::QueueFull), "{:?}", tally(&reasons));
}

#[test]
fn oversized_payload_and_result_are_refused_with_a_reason() {
    let Some(mut fleet) = TestFleet::start(VERSIONS[0], 1, &settings()) else { return };
    fleet.add_host("host-a", BULKHEADS);
    run(async {
        let client = fleet.connect().await;
        let error = client.job("b", vec![0; 1 << 20]).submit().await.unwrap_err();
        assert_eq!(error.exit_code(), 65, "{error}");
        let submitted = client.job("b", vec![7; 900_000]).submit().await.unwrap();
        let reply = result_of(submitted).await.unwrap();
        assert_eq!(reply.payload().len(), 900_000);
        let job = client.job("b", "1100000").operation("big").id("big").idempotent(true);
        let error = result_of(job.submit().await.unwrap()).await.unwrap_err();
        assert!(error.to_string().contains("result_too_large"), "{error}");
    });
}

#[test]
fn size_of_a_result_is_checked_against_the_current_limit() {
    let Some(mut fleet) = start() else { return };
    let [begun, go] = ["begun", "go"].map(|name| fleet.hosts[0].supervisor.file(name));
    run(async {
        fleet.servers[0].restart_with_max_payload(8 << 20);
        let client = fleet.connect().await;
        let submitted = client.job("b", "2000000").operation("big").submit().await.unwrap();
        assert_eq!(result_of(submitted).await.unwrap().payload().len(), 2_000_000);

        let operation = format!("steps:trace {};wait {};echo", begun.display(), go.display());
        let job = client.job("b", vec![7; 2_000_000]).operation(operation).id("large");
        job.submit().await.unwrap();
        wait_for("the job has begun", || begun.exists().then_some(()));
        fleet.servers[0].restart_with_max_payload(1 << 20);
        std::fs::write(&go, "").unwrap();
        let client = fleet.connect().await;
        let error = client.result("", "large", PATIENCE).await.unwrap_err();
        assert!(error.to_string().contains("result_too_large"), "{error}");
    });
    fleet.wait_drained("b");
}

#[test]
fn full_backlog_does_not_stop_the_requeue_of_other_letters() {
    let settings = settings().replace("[streams]\n", "[streams]\ntenant_backlog = 1\n");
    for version in VERSIONS {
        let Some(fleet) = TestFleet::start(version, 1, &settings) else { return };
        assert_eq!(fleet.json(&["submit", "b", "-n", "--tenant", "full", "--detach"]).0, 0);
        let letters = [("b", "full", "a"), ("b", "full", "b"), ("gone", "full", "c"), ("b", "quiet", "d")];
        for (bulkhead, tenant, id) in letters {
            fleet.send(&rejected_letter(bulkhead, tenant, id, "quarantined"));
        }
        wait_for("the letters are stored", || (fleet.json(&["dead", "list"]).1.len() == 4).then_some(()));
        let output = fleet.command(&["dead", "requeue", "--all"]);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(75), "{errors}");
        assert!(
            errors.contains("dead letter a: the tenant has too many waiting jobs; try again"),
            "{errors}"
        );
        assert!(errors.contains("dead letter c: the fleet has no bulkhead gone"), "{errors}");
        let (_, kept) = fleet.json(&["dead", "list"]);
        assert_eq!(kept.len(), 3, "{kept:?}");
        assert!(kept.iter().all(|letter| letter["id"] != "d"), "{kept:?}");
    }
}

#[test]
fn dead_letter_without_its_payload_cannot_be_requeued() {
    let Some(fleet) = start() else { return };
    let head = "NATS/1.0\r\nBulkhead-Id: large\r\nBulkhead-Operation: fail\r\n\r\n";
    // The message has the maximum size that the server accepts. The dead letter would be larger, because it has more
    // headers.
    let payload = vec![b'x'; (1 << 20) - head.len()];
    let answer = fleet.request(b"bh.job.b.n.3.=", head.as_bytes(), &payload);
    assert!(answer.contains("\"seq\""), "{answer}");
    fleet.wait_drained("b");
    let (_, letters) = fleet.json(&["dead", "list"]);
    let sizes = [&letters[0]["payload_bytes"], &letters[0]["dropped_payload_bytes"]];
    assert_eq!(sizes, [0, payload.len()], "{letters:?}");
    assert_eq!(fleet.json(&["dead", "requeue", "large"]).0, 65);
    assert_eq!(fleet.command(&["dead", "show", "large", "--output", "-"]).status.code(), Some(66));
    assert_eq!(fleet.json(&["dead", "list"]).1, letters);
}

#[test]
fn invalid_options_never_reach_the_servers() {
    let Some(fleet) = TestFleet::start(VERSIONS[0], 1, &settings()) else { return };
    run(async {
        let client = fleet.connect().await;
        let long = "x".repeat(129);
        for job in [
            client.job("b", "").id(""),
            client.job("b", "").id(long),
            client.job("b", "").operation("a\nb"),
            client.job("", ""),
            client.job("b", "").tenant("t\r\nBulkhead-Id: other"),
        ] {
            let error = job.submit().await.unwrap_err();
            assert_eq!(error.exit_code(), 65, "{error}");
        }
    });
    assert_eq!(fleet.pending("b"), Some(0));
}

/// Publishes a message with arbitrary headers, which need not be valid for a job.
fn publish_raw(fleet: &TestFleet, subject: &str, headers: &[&str]) {
    let lines: String = headers.iter().map(|line| format!("{line}\r\n")).collect();
    let head = if headers.is_empty() { String::new() } else { format!("NATS/1.0\r\n{lines}\r\n") };
    let answer = fleet.request(subject.as_bytes(), head.as_bytes(), b"hi");
    assert!(answer.contains("\"seq\""), "{answer}");
}

#[test]
fn message_that_is_not_a_valid_job_becomes_a_dead_letter() {
    let Some(mut fleet) = TestFleet::start(VERSIONS[0], 1, &settings()) else { return };
    let subject = "bh.job.b.n.3.=";
    publish_raw(&fleet, subject, &[]);
    publish_raw(&fleet, subject, &["Bulkhead-Id: late", "Bulkhead-Deadline-Ms: never"]);
    publish_raw(&fleet, subject, &["Bulkhead-Id: twice", "Bulkhead-Idempotent: perhaps"]);
    publish_raw(&fleet, "bh.job.b.n.3.=zz", &["Bulkhead-Id: stranger"]);
    fleet.add_host("host-a", BULKHEADS);
    wait_for("three messages are decided", || {
        let (_, letters) = fleet.json(&["dead", "list"]);
        (letters.len() >= 3).then_some(())
    });
    let (_, letters) = fleet.json(&["dead", "list"]);
    assert!(letters.iter().all(|letter| letter["reason"] == "invalid"), "{letters:?}");
    for id in ["message-1", "late", "twice"] {
        assert!(letters.iter().any(|letter| letter["id"] == id), "{id}: {letters:?}");
    }
    // These letters cannot be requeued, because they do not contain the options of the jobs.
    let (code, lines) = fleet.json(&["dead", "requeue", "--all"]);
    assert!(code == 65 && lines.iter().all(|line| line["reason"] == "invalid"), "{lines:?}");
    assert_eq!(fleet.json(&["dead", "list"]).1, letters);
    // The agent still works.
    run(async {
        let client = fleet.connect().await;
        result_of(client.job("b", "").submit().await.unwrap()).await.unwrap();
    });
}

#[test]
fn lanes_let_a_quiet_tenant_overtake_a_busy_one() {
    let settings = format!("{}[bulkhead.b]\nlanes = 16\n", streams(1));
    let Some(mut fleet) = TestFleet::start(VERSIONS[0], 1, &settings) else { return };
    run(async {
        let client = fleet.connect().await;
        let mut busy = Vec::new();
        for _ in 0..100 {
            let job = client.job("b", "").operation("steps:ledger order 50 busy").tenant("acme");
            busy.push(job.submit().await.unwrap());
        }
        // The tenant `quiet` is in a different lane.
        let job = client.job("b", "").operation("steps:ledger order 0 quiet").tenant("quiet");
        let quiet = job.submit().await.unwrap();
        let bulkheads = BULKHEADS.replace("max_in_flight = 4", "max_in_flight = 1");
        fleet.add_host("host-a", &bulkheads);
        result_of(quiet).await.unwrap();
        result_of(busy.pop().unwrap()).await.unwrap();
        let order = std::fs::read_to_string(fleet.hosts[0].supervisor.file("order")).unwrap();
        let (_, after) = order.split_once("begin quiet\n").unwrap();
        assert!(after.contains("begin busy\n"), "{order}");
    });
}

/// Writes a configuration in which the table of the bulkhead `b` is replaced. Returns the path of the file.
fn changed_config(fleet: &TestFleet, tables: &str) -> String {
    let text = std::fs::read_to_string(fleet.config()).unwrap();
    let file = fleet.folder.path().join("changed.toml");
    std::fs::write(&file, text.replace("[bulkhead.b]\n", tables)).unwrap();
    file.to_str().unwrap().to_owned()
}

/// Runs `init` with a different number of lanes.
fn change_lanes(fleet: &TestFleet, lanes: &str) -> Output {
    let config = changed_config(fleet, &format!("[bulkhead.b]\nlanes = {lanes}\n"));
    fleet.command(&["--config", &config, "init"])
}

#[test]
fn lanes_can_change_only_while_no_jobs_are_waiting() {
    let Some(fleet) = TestFleet::start(VERSIONS[0], 1, &settings()) else { return };
    assert!(change_lanes(&fleet, "4").status.success());
    let (code, _) = fleet.json(&["submit", "b", "-n", "--detach"]);
    assert_eq!(code, 0);
    let refused = change_lanes(&fleet, "2");
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stdout).contains("1 jobs are waiting"), "{refused:?}");

    // Everything else is applied, also for bulkheads that come later in the order of names.
    let tables = "[bulkhead.a]\n[bulkhead.b]\nlanes = 2\n[bulkhead.z]\n";
    let (code, findings) = fleet.json(&["--config", &changed_config(&fleet, tables), "init"]);
    assert_eq!(code, 2, "{findings:?}");
    let state = |name: &str| {
        let finding = findings.iter().find(|finding| finding["name"] == name);
        finding.unwrap_or_else(|| panic!("{name}: {findings:?}"))["state"].as_str().unwrap()
    };
    assert_eq!([state("BH_JOBS/a_n_0"), state("BH_JOBS/z_n_0")], ["created"; 2]);
    assert_eq!([state("[bulkhead.b]"), state("BH_JOBS/other_n_0")], ["differs", "unchanged"]);
    let differences = findings.iter().find(|finding| finding["state"] == "differs").unwrap();
    assert!(differences["differences"][0].as_str().unwrap().contains("1 jobs are waiting"), "{differences}");
}

#[test]
fn running_agent_warns_after_a_change_of_lanes() {
    let Some(fleet) = start() else { return };
    assert!(change_lanes(&fleet, "4").status.success());
    wait_for("the agent warns", || {
        fleet.hosts[0].log().contains("was created for a different number of lanes").then_some(())
    });
}

#[test]
fn interrupted_change_of_lanes_can_be_repeated() {
    let Some(fleet) = TestFleet::start(VERSIONS[0], 1, &settings()) else { return };
    assert!(change_lanes(&fleet, "4").status.success());
    for deleted in ["b_n_0", "b_n_2"] {
        fleet.request(format!("$JS.API.CONSUMER.DELETE.BH_JOBS.{deleted}").as_bytes(), b"", b"");
    }
    // No consumer can deliver this job, which belongs to the first of four lanes.
    assert_eq!(fleet.json(&["submit", "b", "-n", "--detach"]).0, 0);
    for _ in 0..2 {
        let changed = change_lanes(&fleet, "2");
        assert!(changed.status.success(), "{changed:?}");
    }
}

/// Returns the headers of a waiting job.
pub(crate) fn stored_headers(fleet: &TestFleet, sequence: u64) -> String {
    let request = format!("{{\"seq\": {sequence}}}");
    let stored = fleet.request(b"$JS.API.STREAM.MSG.GET.BH_JOBS", b"", request.as_bytes());
    let stored: Value = serde_json::from_str(&stored).unwrap();
    let headers = STANDARD.decode(stored["message"]["hdrs"].as_str().unwrap()).unwrap();
    String::from_utf8(headers).unwrap()
}

#[test]
fn library_always_sends_a_deadline() {
    let Some(fleet) = TestFleet::start(VERSIONS[0], 1, &settings()) else { return };
    run(async {
        let client = fleet.connect().await;
        client.job("b", "").submit().await.unwrap();
        client.job("b", "").deadline(Duration::MAX).submit().await.unwrap();
    });
    for (sequence, millis) in [(1, 3_600_000), (2, u64::MAX)] {
        let headers = stored_headers(&fleet, sequence);
        assert!(headers.contains(&format!("Bulkhead-Deadline-Ms: {millis}\r\n")), "{headers}");
    }
}

#[test]
fn nearly_full_ledger_stops_pulls_before_records_are_lost() {
    let settings = settings()
        .replace("ledger_max_bytes = \"64MiB\"", "ledger_max_bytes = \"64KiB\"\nledger_keep = \"1m\"")
        .replace("[bulkhead.b]\n[bulkhead.other]\n", "[bulkhead.b]\ndeadline_max = \"50s\"\n");
    let Some(mut fleet) = TestFleet::start(VERSIONS[0], 1, &settings) else { return };
    fleet.add_host("host-a", &format!("{BULKHEADS}{SAME_NUMBERS}"));
    let [marker, begun, go] = ["ran", "begun", "go"].map(|name| fleet.folder.path().join(name));
    run(async {
        let client = fleet.connect().await;
        let operation = format!("steps:trace {};wait {};echo", begun.display(), go.display());
        let running = client.job("b", vec![b'x'; 3500]).operation(operation).submit().await.unwrap();
        wait_for("the job has begun", || begun.exists().then_some(()));
        // Each record contains the result and about 600 further bytes.
        for _ in 0..15 {
            let submitted = client.job("b", vec![b'x'; 3500]).submit().await.unwrap();
            result_of(submitted).await.unwrap();
        }
        wait_for("the agent stops pulling", || {
            fleet.hosts[0].log().contains("no new jobs are accepted").then_some(())
        });
        let operation = format!("steps:trace {}", marker.display());
        let waiting = client.job("b", "").operation(operation).submit().await.unwrap();
        assert_eq!(fleet.pending("b"), Some(2));
        assert!(!marker.exists());
        assert!(!fleet.hosts[0].log().contains("failed to store the record"));

        // Other records fill the ledger completely, so that it refuses the outcome of the running job.
        for bytes in [3000, 300, 0] {
            let fill = |number: u32| {
                let subject = format!("bh.ledger.=.filler-{bytes}-{number}");
                fleet.request(subject.as_bytes(), b"", &vec![b'x'; bytes])
            };
            assert!((0..).map(fill).any(|answer| answer.contains("maximum bytes exceeded")));
        }
        std::fs::write(&go, "").unwrap();
        wait_for("the outcome is refused", || {
            fleet.hosts[0].log().contains("failed to store the record").then_some(())
        });
        let info = fleet.request(b"$JS.API.STREAM.INFO.BH_LEDGER", b"", b"");
        let mut config = serde_json::from_str::<Value>(&info).unwrap()["config"].take();
        config["max_bytes"] = (1 << 20).into();
        let updated = fleet.request(b"$JS.API.STREAM.UPDATE.BH_LEDGER", b"", config.to_string().as_bytes());
        assert!(!updated.contains("error"), "{updated}");
        assert_eq!(result_of(running).await.unwrap().payload().len(), 3500);
        result_of(waiting).await.unwrap();
    });
    assert!(marker.exists());
    assert_eq!(std::fs::read_to_string(begun).unwrap().lines().count(), 1);
}
