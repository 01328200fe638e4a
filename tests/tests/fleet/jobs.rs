//! Jobs in a fleet with one server and one or two hosts.

use bulkhead_fleet::FleetError;
use bulkhead_tests::fleet::{TestFleet, VERSIONS, result_of, streams};
use bulkhead_tests::{run, wait_for};

/// Configuration of a bulkhead whose worker misbehaves in the way that a job requests.
pub(crate) const BULKHEADS: &str = "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_in_flight = 4\nprocesses = 1\ndeadline = \"30s\"\n\
                         max_queue = 10\n";

pub(crate) fn settings() -> String {
    format!("{}[bulkhead.b]\n[bulkhead.other]\n", streams(1))
}

/// Starts a fleet with one server and one host, and connects a client.
pub(crate) fn start() -> Option<TestFleet> {
    let mut fleet = TestFleet::start(VERSIONS[0], 1, &settings())?;
    fleet.add_host("host-a", BULKHEADS);
    Some(fleet)
}

#[test]
fn job_returns_its_result() {
    for version in VERSIONS {
        let Some(mut fleet) = TestFleet::start(version, 1, &settings()) else { return };
        fleet.add_host("host-a", BULKHEADS);
        run(async {
            let client = fleet.connect().await;
            let submitted = client.job("b", b"hello".to_vec()).submit().await.unwrap();
            let reply = result_of(submitted).await.unwrap();
            assert_eq!(reply.payload(), b"hello");
            assert_eq!(reply.outcome().bulkhead, "b");
        });
        fleet.wait_drained("b");
    }
}

#[test]
fn failure_has_the_same_type_as_a_local_failure() {
    let Some(fleet) = start() else { return };
    run(async {
        let client = fleet.connect().await;
        let job = client.job("b", b"x".to_vec()).operation("segv").id("dies");
        let error = result_of(job.submit().await.unwrap()).await.unwrap_err();
        let FleetError::Job(error) = error else { panic!("{error}") };
        assert_eq!(error.outcome().unwrap().verdict.reason(), Some("signal"));
        assert_eq!(error.exit_code(), 70);
    });
    let letters = wait_for("the dead letter is stored", || {
        let (code, letters) = fleet.json(&["dead", "list"]);
        (code == 0 && !letters.is_empty()).then_some(letters)
    });
    assert_eq!(letters.len(), 1);
    assert_eq!((&letters[0]["id"], &letters[0]["reason"]), (&"dies".into(), &"signal".into()));
}

#[test]
fn same_id_runs_once_per_tenant() {
    let Some(fleet) = start() else { return };
    let file = fleet.hosts[0].supervisor.file("count");
    run(async {
        let client = fleet.connect().await;
        for tenant in ["acme", "acme", "other", "acme"] {
            let operation = format!("steps:trace {}", file.display());
            let job = client.job("b", "").operation(operation).id("same").tenant(tenant);
            result_of(job.submit().await.unwrap()).await.unwrap();
        }
    });
    fleet.wait_drained("b");
    assert_eq!(std::fs::read_to_string(file).unwrap().lines().count(), 2);
}

#[test]
fn unknown_bulkhead_is_rejected_immediately() {
    let Some(fleet) = start() else { return };
    run(async {
        let client = fleet.connect().await;
        let error = client.job("nowhere", "").submit().await.unwrap_err();
        assert_eq!(error.exit_code(), 66, "{error}");
    });
}

#[test]
fn result_is_available_after_the_submitter_has_exited() {
    let Some(fleet) = start() else { return };
    let output = fleet.command(&["submit", "b", "--id", "later", "--detach", "-n"]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "later\n");
    wait_for("the job is decided", || {
        let (code, lines) = fleet.json(&["result", "later"]);
        (code == 0 && lines[0]["outcome"] == "ok").then_some(())
    });
    let (code, lines) = fleet.json(&["result", "never-submitted"]);
    assert_eq!((code, &lines[0]["executed"]), (124, &"unknown".into()));
}
