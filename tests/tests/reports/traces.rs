//! Spans of sampled jobs, with a real supervisor, real workers, and a collector that can be made to misbehave.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bulkhead_client::Executed;
use bulkhead_client::blocking::{Client, Job};
use bulkhead_tests::http::Place;
use bulkhead_tests::{Supervisor, descriptors, wait_for};
use nix::sys::signal::Signal;
use rustix::net::{AddressFamily, SocketType, bind, getsockname, socket};
use serde_json::Value;

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const CALLER: &str = "b7ad6b7169203331";
const SAMPLED: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
const UNSAMPLED: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00";

const LOGGED: &str = "info,bulkhead::job=debug";

/// Configuration of two bulkheads. `b` retries jobs. `full` runs no jobs itself and passes all jobs to its fallback
/// `b`.
const TWO: &str = "[defaults]\ndeadline = \"60s\"\nrestart = { backoff = \"1ms\", max = 1000 }\n\
                   [bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nretry = {}\nmax_payload = 1000\nmax_queue = 100\n\
                   [bulkhead.full]\ncommand = [\"MISBEHAVE\"]\nmax_in_flight = 0\nmax_queue = 0\nfallback = [\"b\"]\n";

// Collector.

/// A trace collector that answers messages with the given statuses in order. The last status applies to all later
/// messages. The collector does not answer if the status is 0.
struct Collector {
    address: SocketAddr,
    messages: Arc<Mutex<Vec<Value>>>,
}

impl Collector {
    fn start(answers: &'static [u16]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let messages = Arc::<Mutex<Vec<Value>>>::default();
        let taken = messages.clone();
        std::thread::spawn(move || {
            let mut silent = Vec::new();
            for (number, socket) in listener.incoming().flatten().enumerate() {
                match answers[number.min(answers.len() - 1)] {
                    0 => silent.push(socket),
                    status => serve(socket, status, &taken),
                }
            }
        });
        Self { address, messages }
    }

    /// Returns the spans in all messages that the collector has accepted.
    fn spans(&self) -> Vec<Value> {
        let messages = self.messages.lock().unwrap();
        messages
            .iter()
            .flat_map(|message| list(&message["resourceSpans"][0]["scopeSpans"][0]["spans"]))
            .collect()
    }

    fn wait_spans(&self, count: usize) -> Vec<Value> {
        wait_for(&format!("{count} spans"), || Some(self.spans()).filter(|spans| spans.len() >= count))
    }
}

fn serve(socket: TcpStream, status: u16, taken: &Mutex<Vec<Value>>) {
    let mut reader = BufReader::new(socket);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") && reader.read_line(&mut head).is_ok_and(|bytes| bytes > 0) {}
    let head = head.to_ascii_lowercase();
    assert!(head.starts_with("post /v1/traces http/1.1\r\n"), "{head}");
    assert!(head.contains("content-type: application/json\r\n"), "{head}");
    let length = head.split_once("content-length: ").and_then(|(_, rest)| rest.split("\r\n").next());
    let mut body = vec![0; length.expect("a length").parse().unwrap()];
    reader.read_exact(&mut body).unwrap();
    // Stores the message before answering, so that a test that has seen the answer finds the spans.
    if status == 200 {
        taken.lock().unwrap().push(serde_json::from_slice(&body).unwrap());
    }
    let _ = write!(reader.get_mut(), "HTTP/1.1 {status} x\r\nContent-Length: 2\r\n\r\n{{}}");
}

fn list(value: &Value) -> Vec<Value> {
    value.as_array().cloned().unwrap_or_default()
}

/// Returns the value of a span's attribute, without its type.
fn attribute(span: &Value, key: &str) -> Value {
    let key = format!("bulkhead.{key}");
    let found = list(&span["attributes"]).into_iter().find(|attribute| attribute["key"] == *key);
    found.map_or(Value::Null, |found| {
        found["value"].as_object().unwrap().values().next().expect("a value").clone()
    })
}

// Supervisor.

fn start(endpoint: &str) -> Supervisor {
    let variables = [("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint), ("OTEL_SERVICE_NAME", "tests")];
    Supervisor::start_as(&[], &variables, TWO)
}

fn start_for(collector: &Collector) -> Supervisor {
    start(&format!("http://{}", collector.address))
}

fn connect(supervisor: &Supervisor) -> Client {
    Client::connect(supervisor.socket()).unwrap()
}

fn sampled(client: &Client, bulkhead: &str, operation: &str) -> Job {
    client.job(bulkhead, "").operation(operation).traceparent(SAMPLED)
}

/// Checks that a `traceparent` belongs to the test's trace, and returns its span ID.
#[track_caller]
fn span_of(traceparent: &str) -> String {
    let parts: Vec<&str> = traceparent.trim().split('-').collect();
    let [version, trace, span, flags] = parts[..] else { panic!("{traceparent:?}") };
    assert_eq!((version, trace, flags), ("00", TRACE, "01"));
    assert!(span.len() == 16 && span != CALLER && span != "0000000000000000", "{traceparent}");
    span.to_owned()
}

#[test]
fn span_of_sampled_job_connects_caller_and_worker() {
    let collector = Collector::start(&[200]);
    let supervisor = start_for(&collector);
    let client = connect(&supervisor);
    let plain = client.job("b", "").operation("trace");
    let by_socket = sampled(&client, "b", "trace").tenant("acme").send().unwrap();
    let place = Place::of(&supervisor);
    let header = |text: &str| format!("traceparent: {text}");
    let by_http = place.job("b", "trace", &[&header(SAMPLED), "Bulkhead-Priority: critical"], b"12345");

    // An unsampled trace is passed on unchanged, and an invalid trace is dropped.
    let other = client.job("b", "").operation("trace");
    assert_eq!(other.traceparent(UNSAMPLED).send().unwrap().payload(), UNSAMPLED.as_bytes());
    assert_eq!(plain.traceparent("00-nonsense-01").send().unwrap().payload(), b"none");
    let unsampled = place.job("b", "trace", &[&header(UNSAMPLED)], b"");
    assert_eq!((unsampled.text(), unsampled.header("traceparent")), (UNSAMPLED.into(), UNSAMPLED));

    let by_socket_span = span_of(&String::from_utf8_lossy(by_socket.payload()));
    let by_http_span = span_of(&by_http.text());
    assert_eq!(by_http.header("traceparent"), by_http.text(), "the response has the same header");
    assert_ne!(by_socket_span, by_http_span);

    // Sends a third sampled job last. If the unsampled jobs had spans, more than three would arrive.
    sampled(&client, "b", "echo").send().unwrap();
    let spans = collector.wait_spans(3);
    assert_eq!(spans.len(), 3, "{spans:?}");
    for span in &spans {
        assert_eq!((&span["traceId"], &span["parentSpanId"]), (&TRACE.into(), &CALLER.into()), "{span}");
        assert_eq!((&span["name"], &span["kind"]), (&"job b".into(), &2.into()), "{span}");
        let nanos = |field: &str| span[field].as_str().unwrap().parse::<u64>().unwrap();
        assert!(nanos("endTimeUnixNano") >= nanos("startTimeUnixNano"), "{span}");
        assert!(nanos("startTimeUnixNano") > 1_700_000_000_000_000_000, "{span}");
        assert_eq!(attribute(span, "name"), "b");
        assert_eq!(attribute(span, "served_by"), "b");
        assert_eq!(attribute(span, "outcome"), "ok");
        assert_eq!(attribute(span, "reason"), Value::Null);
        assert_eq!(attribute(span, "executed"), "yes");
        assert_eq!(attribute(span, "attempts"), "1");
        assert_eq!(attribute(span, "worker_pid"), supervisor.worker_pids("b")[0].to_string());
        assert!(attribute(span, "queued_ms").is_f64() && attribute(span, "ran_ms").is_f64(), "{span}");
        assert_eq!(span["status"], serde_json::json!({}));
    }
    assert_eq!(spans[0]["spanId"], by_socket_span);
    assert_eq!(attribute(&spans[0], "operation"), "trace");
    assert_eq!(attribute(&spans[0], "tenant"), "acme");
    assert_eq!(attribute(&spans[0], "priority"), "normal");
    assert_eq!(spans[1]["spanId"], by_http_span);
    assert_eq!(attribute(&spans[1], "priority"), "critical");
    assert_eq!(attribute(&spans[1], "payload_bytes"), "5");
    let message = &collector.messages.lock().unwrap()[0];
    let resource = &message["resourceSpans"][0]["resource"]["attributes"][0];
    assert_eq!(resource, &serde_json::json!({"key": "service.name", "value": {"stringValue": "tests"}}));
}

#[test]
fn each_outcome_produces_exactly_one_span() {
    let collector = Collector::start(&[200]);
    let supervisor = start_for(&collector);
    let client = connect(&supervisor);
    let operation = |bulkhead: &str, operation: &str| sampled(&client, bulkhead, operation);

    operation("b", "steps:trace given;die-first 1 died").idempotent(true).send().unwrap();
    operation("b", "abort").send().unwrap_err();
    // The next deadline must pass while the job is running, not while its worker is starting.
    supervisor.wait_number("b", "available", 1);
    // On a busy machine, the deadline can pass before the worker has begun the job.
    let hang = || operation("b", "hang").deadline(Duration::from_secs(2)).send().unwrap_err();
    let unbegun = (0..60).take_while(|_| hang().executed() == Executed::No).count();
    operation("b", "fail").send().unwrap_err();
    operation("full", "echo").send().unwrap();
    operation("missing", "echo").send().unwrap_err();
    let large = client.job("b", vec![0; 1001]).traceparent(SAMPLED);
    large.send().unwrap_err();
    let running = operation("b", "steps:count begun;wait never").start().unwrap();
    wait_for("the job has begun", || (supervisor.file_bytes("begun") == 1).then_some(()));
    running.cancel();
    running.wait().unwrap_err();
    assert_eq!(supervisor.post("/v1/bulkheads/b/drain").0, 200);
    operation("b", "echo").send().unwrap_err();
    let place = Place::of(&supervisor);
    let refused = place.job("b", "echo", &[&format!("traceparent: {SAMPLED}")], b"");
    let refused_span = span_of(refused.header("traceparent"));
    assert_eq!(refused.problem(503)["trace_id"], TRACE);

    let mut spans = collector.wait_spans(10 + unbegun);
    spans.retain(|span| attribute(span, "reason") != "queued");
    assert_eq!(spans.len(), 10, "{spans:?}");
    let told = |span: &Value| {
        let text = |key: &str| attribute(span, key).as_str().unwrap_or("-").to_owned();
        let (of, by) = (text("name"), text("served_by"));
        let error = if span["status"]["code"] == 2 { "error" } else { "fine" };
        let (outcome, reason, executed) = (text("outcome"), text("reason"), text("executed"));
        format!("{of} {by} {outcome} {reason} {executed} {} {error}", text("attempts"))
    };
    let all: Vec<String> = spans.iter().map(told).collect();
    let expected = [
        "b b ok - yes 2 fine",
        "b b crashed signal unknown 1 error",
        "b b deadline_exceeded running yes 1 error",
        "b b failed bad_input yes 1 fine",
        "full b ok - yes 1 fine",
        "missing missing rejected not_found no 0 fine",
        "b b rejected too_large no 0 fine",
        "b b cancelled - yes 1 fine",
        "b b rejected draining no 0 error",
        "b b rejected draining no 0 error",
    ];
    assert_eq!(all, expected);
    for (span, line) in spans.iter().zip(&all) {
        assert_eq!((&span["traceId"], &span["parentSpanId"]), (&TRACE.into(), &CALLER.into()), "{span}");
        let has_worker = attribute(span, "worker_pid").is_string();
        assert_eq!(has_worker, !line.contains("rejected"), "{span}");
    }
    // Both attempts were given the same span.
    let given = std::fs::read_to_string(supervisor.file("given")).unwrap();
    let given: Vec<String> = given.lines().map(span_of).collect();
    assert_eq!(given.len(), 2);
    assert!(given.iter().all(|span| spans[0]["spanId"] == **span), "{given:?} {}", spans[0]);
    assert_eq!(spans[9]["spanId"], refused_span);
    let mut ids: Vec<_> = spans.iter().map(|span| span["spanId"].as_str().unwrap()).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 10);
}

// The log.

const HOSTILE: &str = "\u{1b}[31m\r\n{\"level\":\"ERROR\"}\u{9b}31m\u{7f}\u{202e}\"";

/// Runs a job with hostile names and a job that is not sampled. Returns the log lines about jobs.
fn logged(arguments: &[&str]) -> Vec<String> {
    let mut supervisor = Supervisor::start_as(arguments, &[], TWO);
    let client = connect(&supervisor);
    let seen = sampled(&client, "b", "trace").send().unwrap();
    client.job("b", "").operation("trace").traceparent(UNSAMPLED).send().unwrap();
    sampled(&client, "b", HOSTILE).tenant(HOSTILE).send().unwrap_err();
    drop(client);
    supervisor.signal(Signal::SIGTERM);
    assert_eq!(supervisor.wait().code(), Some(0));
    let log = supervisor.log();
    assert!(!log.contains(|c: char| c.is_control() && c != '\n'), "{}", log.escape_debug());
    let lines: Vec<String> = log.lines().filter(|l| l.contains("bulkhead::job")).map(str::to_owned).collect();
    assert_eq!(lines.len(), 2, "{log}");
    assert!(lines[0].contains(&span_of(&String::from_utf8_lossy(seen.payload()))), "{}", lines[0]);
    lines
}

#[test]
fn debug_level_logs_one_line_per_span() {
    let lines = logged(&["--log-format", "json", "--log-level", LOGGED]);
    let [line, hostile] = [&lines[0], &lines[1]].map(|line| serde_json::from_str::<Value>(line).unwrap());
    for (field, value) in [
        ("level", "DEBUG"),
        ("target", "bulkhead::job"),
        ("trace_id", TRACE),
        ("parent_span_id", CALLER),
        ("name", "job b"),
        ("kind", "server"),
        ("bulkhead", "b"),
        ("served_by", "b"),
        ("operation", "trace"),
        ("tenant", ""),
        ("priority", "normal"),
        ("outcome", "ok"),
        ("executed", "yes"),
    ] {
        assert_eq!(line[field], value, "{field}: {line}");
    }
    for field in ["duration_ms", "queued_ms", "ran_ms", "attempts", "worker_pid", "payload_bytes"] {
        assert!(line[field].is_number(), "{field}: {line}");
    }
    assert!(line["start_time"].as_str().unwrap().ends_with('Z'), "{line}");
    assert_eq!((&hostile["operation"], &hostile["tenant"]), (&HOSTILE.into(), &HOSTILE.into()));
    assert_eq!((&hostile["outcome"], &hostile["reason"]), (&"failed".into(), &"unknown_operation".into()));

    let lines = logged(&["--log-level", LOGGED]);
    assert!(lines[0].contains(&format!("trace_id=\"{TRACE}\"")), "{}", lines[0]);
}

#[test]
fn traceparent_is_unchanged_without_collector() {
    // A new parent would be unknown to the backend that receives the worker's spans.
    let supervisor = Supervisor::start(TWO);
    let client = connect(&supervisor);
    assert_eq!(sampled(&client, "b", "trace").send().unwrap().payload(), SAMPLED.as_bytes());

    let supervisor = start("https://127.0.0.1:1");
    wait_for("the log has a warning", || supervisor.log().contains("must start with http://").then_some(()));
    let client = connect(&supervisor);
    assert_eq!(sampled(&client, "b", "trace").send().unwrap().payload(), SAMPLED.as_bytes());
}

// Missing and misbehaving collectors.

/// Returns an address on which no process listens. The returned socket keeps other processes from using the address.
fn unserved() -> (SocketAddr, OwnedFd) {
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind(&socket, &SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    (getsockname(&socket).unwrap().try_into().unwrap(), socket)
}

/// Returns the total number of lost spans that the log reports.
fn lost(log: &str) -> u64 {
    let before = log.lines().filter_map(|line| line.split_once(" job spans were dropped"));
    before.map(|(line, _)| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum()
}

#[test]
fn unavailable_collector_loses_spans_but_no_jobs() {
    let silent = Collector::start(&[0]);
    let (gone, _kept) = unserved();
    let refuses = Collector::start(&[400]);
    for address in [silent.address, gone, refuses.address] {
        let mut supervisor = start(&format!("http://{address}"));
        let client = connect(&supervisor);
        // Sends more spans than fit into one message.
        for _ in 0..600 {
            sampled(&client, "b", "echo").send().unwrap();
        }
        drop(client);
        if address != silent.address {
            wait_for("the failure is logged", || {
                supervisor.log().contains("failed to send job spans").then_some(())
            });
        }
        let few = descriptors(supervisor.pid());
        assert!(few < 100, "{few} descriptors");
        supervisor.signal(Signal::SIGTERM);
        assert_eq!(supervisor.wait().code(), Some(0));
        let log = supervisor.log();
        assert_eq!(lost(&log), 600, "{log}");
    }
}

#[test]
fn recovered_collector_receives_buffered_spans() {
    let collector = Collector::start(&[503, 429, 200]);
    let supervisor = start_for(&collector);
    let client = connect(&supervisor);
    sampled(&client, "b", "echo").send().unwrap();
    let spans = collector.wait_spans(1);
    assert_eq!(spans.len(), 1);
    assert_eq!(lost(&supervisor.log()), 0);
}

#[test]
fn shutdown_sends_remaining_spans() {
    // During shutdown, the supervisor sends spans for one second, which can be too short on a very busy machine.
    assert!((0..5).any(|_| sent_at_the_end() == 100));
}

fn sent_at_the_end() -> usize {
    let collector = Collector::start(&[200]);
    let mut supervisor = start_for(&collector);
    let client = connect(&supervisor);
    let jobs: Vec<_> = (0..100).map(|_| sampled(&client, "b", "echo").start().unwrap()).collect();
    jobs.into_iter().for_each(|job| drop(job.wait().unwrap()));
    supervisor.signal(Signal::SIGTERM);
    assert_eq!(supervisor.wait().code(), Some(0));
    collector.spans().len()
}
