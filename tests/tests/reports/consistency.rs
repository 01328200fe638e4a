//! Consistent names across interfaces: a job's number in its outcome, event, log, crash report and worker, and the
//! fields of the log. Workers that never start share one crash report with a count.

use std::collections::BTreeMap;

use bulkhead_client::blocking::Client;
use bulkhead_tests::http::Place;
use bulkhead_tests::{Supervisor, wait_for};
use serde_json::Value;

const SHELL: &str = r#"
[bulkhead.sh]
exec = ["sh", "-c", "echo \"this is $BULKHEAD_JOB\" >&2; case $BULKHEAD_OPERATION in die) kill -KILL $$;; esac; printf %s $BULKHEAD_JOB"]
env = { PATH = "/usr/bin:/bin" }
deadline = "60s"
"#;

/// Returns the complete lines of the log as JSON objects.
fn log(supervisor: &Supervisor) -> Vec<Value> {
    let log = supervisor.log();
    let whole = log.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let parse = |line: &str| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    whole.lines().map(parse).collect()
}

fn submit(supervisor: &Supervisor, arguments: &[&str]) -> Value {
    let mut command = supervisor.command();
    let output = command.args(["submit", "sh", "-n", "--json"]).args(arguments).output().unwrap();
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

#[test]
fn all_interfaces_show_the_same_job_number() {
    let supervisor = Supervisor::start_as(&["--log-format", "json"], &[], SHELL);
    // Sends enough jobs that the next number contains a hexadecimal letter.
    let client = Client::connect(supervisor.socket()).unwrap();
    for _ in 0..9 {
        client.job("sh", "").send().unwrap();
    }
    let result = supervisor.file("result");
    let ok = submit(&supervisor, &["--output", result.to_str().unwrap()]);
    let number = ok["job"].as_str().expect("a number").to_owned();
    assert!(number.contains(|digit: char| digit.is_ascii_lowercase()), "{number}");
    assert_eq!(std::fs::read_to_string(result).unwrap(), number, "the worker received the same number");

    let died = submit(&supervisor, &["die"]);
    let number = died["job"].as_str().expect("a number");
    assert_eq!(died["outcome"], "crashed", "{died}");
    let event = &supervisor.wait_events("job_crashed", 1)[0];
    assert_eq!(event["job"], number, "{event}");
    let report = event["report"].as_str().expect("a report");
    let report = supervisor.crash_report(report);
    assert_eq!(report["jobs"][0]["job"], number, "{report}");
    wait_for("the log has the event and the output", || {
        let lines = log(&supervisor);
        let said = format!("this is {number}");
        let is_told = lines.iter().any(|line| line["kind"] == "job_crashed" && line["job"] == *number);
        (is_told && lines.iter().any(|line| line["message"] == *said)).then_some(())
    });

    let over_http = Place::of(&supervisor).job("sh", "die", &[], b"");
    let problem = over_http.problem(502);
    assert_eq!(supervisor.wait_events("job_crashed", 2)[1]["job"], problem["job"], "{problem}");
    let told = client.job("sh", "").send().unwrap();
    assert_eq!(told.outcome().job.expect("a number").to_string().as_bytes(), told.payload());
    let refused = submit(&supervisor, &["--deadline", "60s", "--tenant", &"x".repeat(300)]);
    assert_eq!((&refused["outcome"], &refused["job"]), (&"rejected".into(), &Value::Null), "{refused}");
}

#[test]
fn json_log_has_event_fields_and_optional_worker_output() {
    for (arguments, has_output) in
        [(&["--log-format", "json"][..], true), (&["--log-format", "json", "--log-output", "off"], false)]
    {
        let supervisor = Supervisor::start_as(arguments, &[], SHELL);
        let died = submit(&supervisor, &["die"]);
        supervisor.wait_events("job_crashed", 1);
        wait_for("the bulkhead's own log has the output", || {
            let (_, lines) = supervisor.try_get("/v1/bulkheads/sh/logs?follow=false")?;
            lines.contains("this is").then_some(())
        });
        let crashed = wait_for("the crash is logged", || {
            log(&supervisor).into_iter().find(|line| line["kind"] == "job_crashed")
        });
        let told = |field: &str| crashed[field].clone();
        assert_eq!((told("bulkhead"), told("reason")), ("sh".into(), "signal".into()), "{crashed}");
        assert_eq!((told("level"), told("target")), ("WARN".into(), "bulkhead".into()), "{crashed}");
        assert_eq!((told("pid"), told("attempts")), (died["worker_pid"].clone(), 1.into()), "{crashed}");
        assert!(!crashed["message"].as_str().unwrap().contains('='), "{crashed}");
        if has_output {
            let line = wait_for("the output is logged", || {
                log(&supervisor).into_iter().find(|line| line["target"] == "worker")
            });
            assert_eq!(line["bulkhead"], "sh", "{line}");
            assert!(line["pid"].is_number() && line["stream"] == "stderr", "{line}");
            let said = line["message"].as_str().unwrap();
            assert!(said.starts_with("this is "), "{line}");
        } else {
            assert!(log(&supervisor).iter().all(|line| line["target"] != "worker"));
        }
    }
}

#[test]
fn repeated_start_failures_share_one_crash_report() {
    let supervisor = Supervisor::start_with(
        "crash_keep = 2",
        "[bulkhead.good]\ncommand = [\"MISBEHAVE\"]\n\
         [bulkhead.broken]\ncommand = [\"MISBEHAVE\", \"exit-at-start\"]\nprocesses = 3\n\
         restart = { backoff = \"1ms\", backoff_max = \"5ms\", max = 1000 }\n",
    );
    let client = Client::connect(supervisor.socket()).unwrap();
    client.job("good", "").operation("abort").send().unwrap_err();
    let crashes = || supervisor.get("/v1/crashes")["crashes"].as_array().unwrap().clone();
    let is_of = |name: &'static str| move |crash: &&Value| crash["bulkhead"] == name;
    wait_for("the job's crash is kept", || crashes().iter().find(is_of("good")).cloned());
    // Waits for far more failures than the number of crash reports that are kept or written at once.
    wait_for("many workers have failed to start", || {
        let row = crashes().iter().find(is_of("broken")).cloned()?;
        (row["count"].as_u64()? > 20).then_some(())
    });
    let all = crashes();
    assert_eq!(all.iter().filter(is_of("broken")).count(), 1, "{all:#?}");
    assert_eq!(all.iter().find(is_of("good")).expect("the older report is kept")["count"], 1, "{all:#?}");
    let row = all.iter().find(is_of("broken")).unwrap();
    assert_eq!((&row["stage"], &row["exit_code"]), (&"starting".into(), &3.into()), "{row}");
    // Events for later failures name the crash report for the first failure.
    let exits = supervisor.events("worker_exited").into_iter().filter(|event| event["bulkhead"] == "broken");
    let reports: BTreeMap<String, usize> =
        bulkhead_tests::tally(exits.map(|event| event["report"].as_str().unwrap_or("none").to_owned()));
    assert_eq!(reports.keys().collect::<Vec<_>>(), [row["id"].as_str().unwrap()], "{reports:?}");
    let table = supervisor.command().arg("crashes").output().unwrap();
    let table = String::from_utf8(table.stdout).unwrap();
    let line = table.lines().find(|line| line.contains("broken")).unwrap();
    let count: u64 = line.split_whitespace().nth(4).unwrap().parse().expect(line);
    assert!(count > 20, "{table}");
}

#[test]
fn advice_takes_every_rejection_into_account() {
    let supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nrate_limit = { per_second = 0.001, burst = 120 }\n",
    );
    let client = Client::connect(supervisor.socket()).unwrap();
    for _ in 0..150 {
        let _ = client.job("b", "").send();
    }
    let status = supervisor.snapshot("b")["rejected"].clone();
    assert_eq!(supervisor.get("/v1/bulkheads/b/advice")["seen"]["rejected"], status);
    let advice = supervisor.command().args(["advise", "b"]).output().unwrap();
    let advice = String::from_utf8(advice.stdout).unwrap();
    let head = advice.lines().next().unwrap();
    assert!(head.ends_with("; 30 rejected (rate_limited 30)"), "{advice}");
    assert!(advice.contains("no job was rejected because of a full queue (other rejections: "), "{advice}");
}
