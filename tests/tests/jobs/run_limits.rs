//! `run_limit`, the maximum duration of one attempt. The configuration sets the limit, and clients can request a
//! shorter limit over any interface.

use std::time::{Duration, Instant};

use bulkhead_client::blocking::Client;
use bulkhead_client::{JobError, Reply};
use bulkhead_tests::http::Place;
use bulkhead_tests::{Supervisor, wait_for};
use serde_json::Value;

const LIMITED: &str = "[defaults]\ndeadline = \"60s\"\n\
    [bulkhead.own]\ncommand = [\"MISBEHAVE\"]\nmax_in_flight = 2\nmax_queue = 5\nrun_limit = \"3s\"\n\
    grace = \"50ms\"\n\
    [bulkhead.asked]\ncommand = [\"MISBEHAVE\"]\nmax_in_flight = 2\ngrace = \"50ms\"\n\
    [bulkhead.single]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 5\n\
    [bulkhead.program]\nexec = [\"/bin/sh\", \"-c\", \"echo $BULKHEAD_DEADLINE_MS; exec sleep $BULKHEAD_OPERATION\"]\n";

const LIMIT: Duration = Duration::from_secs(2);

fn late(result: Result<Reply, JobError>) -> bulkhead_client::Outcome {
    let error = result.expect_err("the job runs for longer than its limit");
    let outcome = error.outcome().expect("the error contains the outcome").clone();
    assert_eq!((outcome.verdict.name(), outcome.verdict.reason()), ("deadline_exceeded", Some("running")));
    outcome
}

#[test]
fn job_that_exceeds_its_run_limit_is_stopped() {
    let supervisor = Supervisor::start(LIMITED);
    let client = Client::connect(supervisor.socket()).unwrap();
    let error = client.job("own", "").operation("yield").send().unwrap_err();
    assert!(error.to_string().contains("the job reached the run limit of 3000 ms"), "{error}");
    let outcome = late(Err(error));
    assert_eq!(
        (outcome.run_limit, outcome.deadline),
        (Some(Duration::from_secs(3)), Duration::from_secs(60))
    );
    assert!(outcome.ran >= Duration::from_secs(3), "{outcome:?}");
    // A client can request a shorter limit, but not a longer one.
    let limits = [(LIMIT, LIMIT), (Duration::from_secs(30), Duration::from_secs(3))];
    for (asked, told) in limits {
        let outcome = late(client.job("own", "").operation("yield").run_limit(asked).send());
        assert_eq!(outcome.run_limit, Some(told));
    }
    let quick =
        wait_for("a job ends within the run limit", || client.job("own", "x").operation("echo").send().ok());
    assert_eq!(quick.outcome().run_limit, Some(Duration::from_secs(3)));
    let unlimited = client.job("single", "x").operation("echo").send().unwrap();
    assert_eq!(unlimited.outcome().run_limit, None);
    let events = supervisor.wait_events("job_timeout", 3);
    assert_eq!((&events[0]["run_limit_ms"], &events[0]["timeout_ms"]), (&3000.0.into(), &60000.0.into()));
}

#[test]
fn run_limit_excludes_queue_time() {
    let supervisor = Supervisor::start(LIMITED);
    let client = Client::connect(supervisor.socket()).unwrap();
    let blocker = client.job("single", "").operation("steps:wait end").start().unwrap();
    supervisor.wait_number("single", "in_flight", 1);
    let waiting = client.job("single", "x").operation("echo").run_limit(LIMIT).start().unwrap();
    supervisor.wait_number("single", "queued", 1);
    let began = Instant::now();
    wait_for("the job has waited for longer than its run limit", || (began.elapsed() > LIMIT).then_some(()));
    supervisor.touch("end");
    let waited = waiting.wait().unwrap();
    assert!(waited.outcome().queued > LIMIT, "{:?}", waited.outcome());
    assert_eq!(waited.outcome().run_limit, Some(LIMIT));
    blocker.wait().unwrap();
}

/// If the run limit comes from the client, only this client's job ends when the limit is exceeded. If the limit comes
/// from the bulkhead, the worker is killed, together with all of its jobs.
#[test]
fn only_the_bulkheads_run_limit_kills_a_shared_worker() {
    let supervisor = Supervisor::start(LIMITED);
    let client = Client::connect(supervisor.socket()).unwrap();
    let neighbour = client.job("asked", "5000").operation("sleep").start().unwrap();
    supervisor.wait_number("asked", "in_flight", 1);
    late(client.job("asked", "").operation("hang").run_limit(LIMIT).send());
    assert_eq!(neighbour.wait().unwrap().payload(), b"done");

    let neighbour =
        client.job("own", "100000").operation("sleep").run_limit(Duration::from_secs(50)).start().unwrap();
    supervisor.wait_number("own", "in_flight", 1);
    let outcome = late(neighbour.wait());
    assert_eq!(outcome.run_limit, Some(Duration::from_secs(3)));
    supervisor.wait_number("own", "restarts", 1);
}

#[test]
fn program_receives_its_remaining_run_time() {
    let supervisor = Supervisor::start(LIMITED);
    let client = Client::connect(supervisor.socket()).unwrap();
    let reply = client.job("program", "").operation("0").run_limit(Duration::from_secs(50)).send().unwrap();
    let left: u64 = String::from_utf8_lossy(reply.payload()).trim().parse().unwrap();
    assert!((1..=50_000).contains(&left), "{left} ms");
    late(client.job("program", "").operation("1000").run_limit(LIMIT).send());
    supervisor.wait_number("program", "available", 1);
}

#[test]
fn run_limit_can_be_set_by_http_and_command_line() {
    let supervisor = Supervisor::start(LIMITED);
    let place = Place::of(&supervisor);
    let answer = place.job("asked", "yield", &["Bulkhead-Run-Limit-Ms: 2000"], b"");
    let problem = answer.problem(504);
    assert_eq!(
        (&problem["reason"], &problem["run_limit_ms"]),
        (&"running".into(), &2000.0.into()),
        "{problem}"
    );
    assert_eq!(answer.header("bulkhead-run-limit-ms"), "2000.0");
    for wrong in ["0", "-1", "200ms", "99999999999999999999"] {
        let answer = place.job("asked", "echo", &[&format!("Bulkhead-Run-Limit-Ms: {wrong}")], b"");
        assert!(answer.problem(400)["detail"].as_str().unwrap().contains("bulkhead-run-limit-ms"), "{wrong}");
    }
    let submit = |limit: &str| {
        let mut command = supervisor.command();
        command.args(["submit", "asked", "yield", "--json", "-n", "--run-limit", limit]).output().unwrap()
    };
    let told = submit("2s");
    assert_eq!(told.status.code(), Some(124), "{told:?}");
    let object: Value = serde_json::from_slice(&told.stdout).unwrap();
    assert_eq!((&object["reason"], &object["run_limit_ms"]), (&"running".into(), &2000.0.into()), "{object}");
    assert_eq!(submit("2000").status.code(), Some(2), "a duration without a unit is rejected");
    let negative = submit("-1s");
    let said = String::from_utf8_lossy(&negative.stderr);
    assert!(negative.status.code() == Some(2) && said.contains("must be greater than zero"), "{said}");
}
