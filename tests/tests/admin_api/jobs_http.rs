//! Jobs over HTTP at `jobs_http`: keep-alive connections, tokens, connection limits, and hostile clients.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use bulkhead_tests::http::{Answer, KeptAlive, Place};
use bulkhead_tests::{PATIENCE, Supervisor, wait_for};
use nix::sys::signal::Signal;

const ONE: &str = "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_in_flight = 4\nmax_queue = 2000\ncwd = \".\"\n\
                   deadline = \"60s\"\n";

const JOBS: &str = "/v1/bulkheads/b/jobs";
const TOKEN: &str = "Authorization: Bearer a-token-for-the-jobs";
const READER: &str = "Authorization: Bearer a-token-for-readers";
const ADMIN: &str = "Authorization: Bearer a-token-for-operators";

/// Returns a folder that contains three token files.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let tokens = [
        ("jobs", "a-token-for-the-jobs"),
        ("read", "a-token-for-readers"),
        ("admin", "a-token-for-operators"),
    ];
    for (name, token) in tokens {
        write_token(folder.path(), name, token);
    }
    folder
}

fn write_token(folder: &std::path::Path, name: &str, token: &str) {
    let path = folder.join(name);
    std::fs::write(&path, token).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
}

/// Configuration keys for two TCP listeners: one for jobs, and one for the admin API.
const LISTENERS: &str = "jobs_http = \"127.0.0.1:0\"\nhttp = \"127.0.0.1:0\"\nhttp_token_file = \"admin\"\n";

/// Starts a supervisor with two tokens and two TCP listeners.
fn start_with(keys: &str, bulkheads: &str) -> (Supervisor, Place) {
    let entries = "[[access]]\ntoken_file = \"jobs\"\n[[access]]\ntoken_file = \"read\"\nrole = \"read\"\n";
    let bulkheads = format!("{entries}{bulkheads}");
    let supervisor = Supervisor::launch(folder(), &format!("{LISTENERS}{keys}"), &bulkheads).until_ready();
    let place = Place::jobs_http(&supervisor);
    (supervisor, place)
}

fn start() -> (Supervisor, Place) {
    start_with("", ONE)
}

/// Sends a job with the token over a keep-alive connection.
fn job(connection: &mut KeptAlive, operation: &str, payload: &[u8]) -> Option<Answer> {
    connection.ask("POST", JOBS, &[TOKEN, &format!("Bulkhead-Operation: {operation}")], payload)
}

/// Sends a job that runs until the file `go` exists. Does not wait for the answer.
fn begin_job(place: &Place) -> KeptAlive {
    let mut connection = place.keep_alive();
    let headers = [TOKEN, "Bulkhead-Operation: steps:wait go"];
    connection.socket().send_head("POST", JOBS, &headers, Some(0));
    connection
}

#[test]
fn kept_alive_connection_serves_jobs_of_any_size() {
    let (supervisor, place) = start();
    let mut connection = place.keep_alive();
    let sizes = [0, 1, 65_536, 65_537, 3_000_000, 7];
    for size in sizes {
        let payload: Vec<u8> = (0..size).map(|i| (i * 7) as u8).collect();
        let answer = job(&mut connection, "echo", &payload).expect("an answer");
        assert_eq!((answer.status, answer.header("connection")), (200, ""), "{}", answer.text());
        assert!(answer.body == payload, "{size} bytes come back unchanged");
        assert_eq!(
            (answer.header("bulkhead-executed"), answer.header("bulkhead-retryable")),
            ("yes", "false")
        );
        // Failures and rejections do not close the connection.
        let failed = job(&mut connection, "fail", b"").expect("an answer");
        failed.problem(422);
        assert_eq!(failed.header("bulkhead-executed"), "yes");
        let unknown = connection.ask("POST", "/v1/bulkheads/x/jobs", &[TOKEN], &payload).expect("an answer");
        unknown.problem(404);
        assert_eq!(
            (unknown.header("bulkhead-executed"), unknown.header("bulkhead-reason")),
            ("no", "not_found")
        );
        if size > 65_536 {
            // The payload of a rejected job was not read, so the connection must close.
            assert_eq!(unknown.header("connection"), "close");
            connection = place.keep_alive();
        } else {
            assert_eq!(connection.ask("GET", "/healthz", &[], b"").unwrap().status, 200);
        }
        let mut head = connection.socket();
        head.send_head("POST", JOBS, &[TOKEN, "Transfer-Encoding: chunked"], None);
        for chunk in payload.chunks(100_000) {
            write!(head, "{:x}\r\n", chunk.len()).unwrap();
            head.write_all(chunk).unwrap();
            head.write_all(b"\r\n").unwrap();
        }
        head = connection.socket();
        head.write_all(b"0\r\n\r\n").unwrap();
        let answer = connection.answer().expect("an answer");
        assert!(answer.status == 200 && answer.body == payload, "{size} bytes in chunks: {}", answer.status);
    }
    assert_eq!(supervisor.number("b", "done"), 2 * sizes.len() as u64);
}

#[test]
fn pipelined_jobs_are_answered_in_order() {
    let (supervisor, place) = start();
    let mut connection = place.keep_alive();
    let request = |payload: &str| {
        let length = payload.len();
        format!("POST {JOBS} HTTP/1.1\r\n{TOKEN}\r\nContent-Length: {length}\r\n\r\n{payload}")
    };
    let payloads: Vec<String> = (0..20).map(|n| format!("payload {n}")).collect();
    let all: String = payloads.iter().map(|payload| request(payload)).collect();
    connection.socket().write_all(all.as_bytes()).unwrap();
    for payload in &payloads {
        assert_eq!(connection.answer().expect("an answer").text(), *payload);
    }
    assert_eq!(supervisor.number("b", "done"), 20);
}

#[test]
fn jobs_listener_serves_only_jobs_and_health_checks() {
    let (supervisor, place) = start();
    for path in ["/healthz", "/readyz", "/readyz?bulkhead=b"] {
        for host in ["Host: evil.example", "Host: 10.0.0.1:1", "Host:"] {
            assert_eq!(place.ask("GET", path, &[host], b"").status, 200, "{path} {host}");
        }
        assert_eq!(place.ask("POST", path, &[TOKEN], b"").status, 404, "{path}");
    }
    let others = [
        ("GET", "/"),
        ("GET", "/metrics"),
        ("GET", "/openapi.json"),
        ("GET", "/v1/config"),
        ("GET", "/v1/bulkheads"),
        ("GET", "/v1/bulkheads/b"),
        ("PATCH", "/v1/bulkheads/b"),
        ("GET", "/v1/bulkheads/b/logs"),
        ("POST", "/v1/bulkheads/b/drain"),
        ("GET", JOBS),
        ("PUT", JOBS),
        ("OPTIONS", JOBS),
        ("GET", "/v1/crashes"),
        ("GET", "/v1/events?follow=false"),
        ("POST", "/v1/reload"),
        ("POST", "/v1/bulkheads/b/jobs/"),
        ("POST", "//v1/bulkheads/b/jobs"),
        ("POST", "/v1/bulkheads/b/../b/jobs"),
        ("POST", "/healthz/../v1/bulkheads/b/drain"),
        ("POST", "/v1/crashes/1/replay"),
    ];
    for token in [TOKEN, READER, ADMIN, "X-None: 1"] {
        for (method, path) in others {
            let answer = place.ask(method, path, &[token], b"");
            assert_eq!(answer.status, 404, "{method} {path} {token}");
            assert_eq!(answer.header("bulkhead-executed"), "no", "{method} {path}");
        }
    }
    assert_eq!(supervisor.snapshot("b")["state"], "ready");
    assert_eq!(supervisor.number("b", "submitted"), 0);
}

#[test]
fn jobs_require_a_token_that_permits_jobs() {
    let (supervisor, place) = start();
    let basic = "Authorization: Basic bWU6YS10b2tlbi1mb3ItdGhlLWpvYnM=";
    let wrong = [
        "X-None: 1",
        "Authorization: Bearer",
        "Authorization: Bearer a-token-for-the-job",
        "Authorization: Bearer a-token-for-the-jobs-and-more",
        "Authorization: Bearer A-TOKEN-FOR-THE-JOBS",
        "Authorization: a-token-for-the-jobs",
        ADMIN,
        basic,
    ];
    let mut connection = place.keep_alive();
    for header in wrong {
        let answer = connection.ask("POST", JOBS, &[header], b"").expect("an answer");
        let problem = answer.problem(401);
        assert_eq!((&problem["reason"], &problem["executed"]), (&"unauthenticated".into(), &"no".into()));
        assert_eq!(
            (answer.header("bulkhead-executed"), answer.header("bulkhead-retryable")),
            ("no", "false")
        );
        assert_eq!(answer.header("www-authenticate"), "Bearer realm=\"bulkhead\"");
        assert!(!answer.text().contains("a-token"), "{}", answer.text());
    }
    let reader = connection.ask("POST", JOBS, &[READER], b"").expect("an answer");
    assert_eq!(
        (&reader.problem(403)["reason"], reader.header("bulkhead-executed")),
        (&"forbidden".into(), "no")
    );
    assert_eq!(job(&mut connection, "echo", b"x").unwrap().status, 200);
    assert_eq!(supervisor.number("b", "submitted"), 1);
    let metrics = supervisor.try_get("/metrics").unwrap().1;
    let refused = format!("bulkhead_jobs_http_refused_total{{reason=\"unauthenticated\"}} {}", wrong.len());
    assert!(metrics.contains(&refused), "{metrics}");
    assert!(metrics.contains("bulkhead_jobs_http_connections 1"), "{metrics}");
}

#[test]
fn admin_api_is_read_only_for_access_tokens() {
    let crash = "[bulkhead.c]\ncommand = [\"MISBEHAVE\"]\n";
    let (supervisor, place) = start_with("", &format!("{ONE}{crash}"));
    let admin = Place::tcp(&supervisor);
    let payload = b"a payload that nobody may read";
    place.ask("POST", "/v1/bulkheads/c/jobs", &[TOKEN, "Bulkhead-Operation: segv"], payload).problem(502);
    let report = wait_for("the crash is reported with its backtrace", || {
        let crashes = supervisor.get("/v1/crashes");
        let report = format!("/v1/crashes/{}", crashes["crashes"].as_array()?.first()?["id"].as_str()?);
        supervisor.get(&report).get("native").is_some().then_some(report)
    });
    let pages = [
        "/v1/bulkheads",
        "/v1/bulkheads/b",
        "/v1/bulkheads/b/logs",
        "/v1/bulkheads/b/advice",
        "/v1/config",
        "/v1/crashes",
        "/v1/events?follow=false",
        "/openapi.json",
        "/metrics",
        "/",
        &report,
    ];
    for page in pages {
        for method in ["GET", "HEAD"] {
            let answer = admin.connect();
            let mut answer = answer;
            answer.send_head(method, page, &[READER], None);
            let mut text = String::new();
            answer.read_to_string(&mut text).unwrap();
            assert!(text.starts_with("HTTP/1.1 200"), "{method} {page}: {text}");
        }
        if page != "/metrics" {
            admin.ask("GET", page, &[TOKEN], b"").problem(403);
        }
    }
    let with_payload = admin.ask("GET", &report, &[ADMIN], b"").json();
    assert!(with_payload["jobs"][0]["payload"].is_string(), "{with_payload}");
    let mut without = admin.ask("GET", &report, &[READER], b"").json();
    assert!(without["jobs"][0]["payload"].is_null(), "{without}");
    assert_eq!(without["jobs"][0]["payload_bytes"], payload.len());
    without["jobs"][0]["payload"] = with_payload["jobs"][0]["payload"].clone();
    let registers = with_payload.pointer("/native/threads/0/registers");
    if let Some(hidden) = without.pointer_mut("/native/threads/0/registers") {
        assert_eq!(*hidden, serde_json::json!({}));
        *hidden = registers.expect("registers").clone();
    }
    assert_eq!(without, with_payload);

    let json = "Content-Type: application/json";
    let changes = [
        ("POST", "/v1/bulkheads/b/drain"),
        ("POST", "/v1/bulkheads/b/restart"),
        ("POST", JOBS),
        ("PATCH", "/v1/bulkheads/b"),
        ("PATCH", "/v1/bulkheads/b/tenants/t"),
        ("POST", "/v1/reload"),
        ("POST", &format!("{report}/replay")),
        ("DELETE", "/v1/bulkheads/b"),
    ];
    for token in [READER, TOKEN] {
        for (method, path) in changes {
            admin.ask(method, path, &[token, json], b"{\"max_queue\": 1}").problem(403);
        }
    }
    assert_eq!(supervisor.snapshot("b")["state"], "ready");
    assert_eq!((supervisor.number("b", "submitted"), supervisor.number("b", "queue_capacity")), (0, 2000));
}

#[test]
fn access_entry_restricts_jobs_with_its_token() {
    let entries = "[[access]]\ntoken_file = \"jobs\"\nbulkheads = [\"b\"]\ntenants = [\"acme\"]\n\
                   [[access]]\ntoken_file = \"jobs\"\nbulkheads = [\"c\"]\n\
                   [[access]]\ntoken_file = \"read\"\n";
    let other = "[bulkhead.c]\ncommand = [\"MISBEHAVE\"]\n[bulkhead.d]\ncommand = [\"MISBEHAVE\"]\n";
    let text = format!("{entries}{ONE}{other}");
    let keys = "jobs_http = \"127.0.0.1:0\"";
    let supervisor = Supervisor::launch(folder(), keys, &text).until_ready();
    let place = Place::jobs_http(&supervisor);
    let mut connection = place.keep_alive();
    let mut ask = |bulkhead: &str, token: &str, tenant: &str| {
        let path = format!("/v1/bulkheads/{bulkhead}/jobs");
        let tenant = format!("Bulkhead-Tenant: {tenant}");
        let headers = if tenant.ends_with(' ') { vec![token] } else { vec![token, tenant.as_str()] };
        connection.ask("POST", &path, &headers, b"x").expect("an answer")
    };
    for (bulkhead, token, tenant, status) in [
        ("b", TOKEN, "acme", 200),
        ("b", TOKEN, "other", 403),
        ("b", TOKEN, "", 403),
        ("c", TOKEN, "other", 200),
        ("c", TOKEN, "", 200),
        ("d", TOKEN, "acme", 403),
        ("nothing", TOKEN, "", 403),
        ("d", READER, "", 200),
        ("nothing", READER, "", 404),
        ("b", TOKEN, "acme", 200),
    ] {
        let answer = ask(bulkhead, token, tenant);
        assert_eq!(answer.status, status, "{bulkhead} {tenant}: {}", answer.text());
        let executed = if status == 200 { "yes" } else { "no" };
        assert_eq!(answer.header("bulkhead-executed"), executed, "{bulkhead} {tenant}");
    }
    // Access entries with tokens do not apply to the jobs socket.
    assert!(bulkhead_client::blocking::Client::connect(supervisor.socket()).is_ok());
}

#[test]
fn reload_replaces_tokens_at_once() {
    let (supervisor, place) = start();
    let mut connection = place.keep_alive();
    assert_eq!(job(&mut connection, "echo", b"x").unwrap().status, 200);
    write_token(supervisor.folder.path(), "jobs", "another-token-for-jobs");
    assert_eq!(job(&mut connection, "echo", b"x").unwrap().status, 200, "the file alone changes nothing");
    supervisor.signal(Signal::SIGHUP);
    let event = &supervisor.wait_events("config_reloaded", 1)[0];
    assert_eq!(event["changes"]["access"], true, "{event}");
    assert_eq!(job(&mut connection, "echo", b"x").unwrap().status, 401);
    let another = "Authorization: Bearer another-token-for-jobs";
    assert_eq!(connection.ask("POST", JOBS, &[another], b"x").unwrap().status, 200);
    // Changed permissions apply to the next job on a connection.
    let entries = "[[access]]\ntoken_file = \"jobs\"\ntenants = [\"acme\"]\n";
    supervisor.configure(LISTENERS, &format!("{entries}{ONE}"));
    supervisor.signal(Signal::SIGHUP);
    supervisor.wait_events("config_reloaded", 2);
    assert_eq!(connection.ask("POST", JOBS, &[another], b"x").unwrap().status, 403);
    assert_eq!(connection.ask("POST", JOBS, &[another, "Bulkhead-Tenant: acme"], b"x").unwrap().status, 200);
    // If a token file is missing, the previous configuration stays in force.
    std::fs::remove_file(supervisor.file("jobs")).unwrap();
    supervisor.signal(Signal::SIGHUP);
    let rejected = &supervisor.wait_events("config_rejected", 1)[0];
    assert!(rejected["message"].as_str().unwrap().contains("access.token_file"), "{rejected}");
    assert_eq!(connection.ask("POST", JOBS, &[another, "Bulkhead-Tenant: acme"], b"x").unwrap().status, 200);
}

/// Sends raw bytes. Returns the complete response, or the I/O error.
fn raw(place: &Place, request: &[u8]) -> std::io::Result<String> {
    let mut socket = place.connect();
    let _ = socket.write_all(request);
    let mut answer = Vec::new();
    socket.read_to_end(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

#[test]
fn invalid_requests_are_answered_and_run_no_job() {
    let (supervisor, place) = start_with("", &format!("{ONE}max_payload = 1000\n"));
    let head = format!("POST {JOBS} HTTP/1.1\r\nHost: x\r\n{TOKEN}\r\n");
    let long = |n: usize| "x".repeat(n);
    let close = "Content-Length: 0\r\nConnection: close\r\n\r\n";
    let cases: Vec<(String, u16)> = vec![
        ("\0\0\0\0\r\n\r\n".into(), 400),
        ("GET\r\n\r\n".into(), 400),
        (format!("{head}Content-Length: -1\r\n\r\n"), 400),
        (format!("{head}Content-Length: 1\r\nContent-Length: 2\r\n\r\nab"), 400),
        (format!("{head}Content-Length: 1, 1\r\n\r\na"), 400),
        (format!("{head}Transfer-Encoding: gzip\r\n\r\n"), 400),
        (format!("{head}Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"), 400),
        (format!("{head}Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"), 400),
        (format!("{head}Transfer-Encoding: chunked\r\n\r\nzz\r\n"), 400),
        (format!("{head}Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n"), 400),
        (format!("{head}Content-Length: 1001\r\n\r\n{}", long(1001)), 413),
        (format!("{head}Content-Length: 100000000\r\n\r\n"), 413),
        (format!("{head}X-Huge: {}\r\n\r\n", long(4 << 20)), 431),
        (format!("{head}{}\r\n", "X-Many: 1\r\n".repeat(150)), 431),
        (format!("POST /{} HTTP/1.1\r\n\r\n", long(70_000)), 414),
        (format!("{head}Bulkhead-Deadline: 5\r\n{close}"), 400),
        (format!("{head}Bulkhead-Cost: 1\r\nBulkhead-Cost: 1\r\n{close}"), 400),
        (format!("POST {JOBS}?x=y HTTP/1.1\r\n{TOKEN}\r\n{close}"), 400),
        (format!("POST {JOBS}/1 HTTP/1.1\r\n{TOKEN}\r\n{close}"), 404),
        (format!("PUT {JOBS} HTTP/1.1\r\n{TOKEN}\r\n{close}"), 404),
        (format!("POST /v1/bulkheads/%ff/jobs HTTP/1.1\r\n{TOKEN}\r\n{close}"), 400),
    ];
    for (request, status) in cases {
        let shown = &request[..request.len().min(200)];
        let mut socket = place.connect();
        // The supervisor may respond before the whole request is sent.
        let _ = socket.write_all(request.as_bytes());
        let answer = Answer::read(socket).unwrap_or_else(|| panic!("no answer to {shown:?}"));
        // A path that exceeds the maximum size of the request head can be rejected with either status.
        let status = if status == 414 { answer.status.clamp(414, 431) } else { status };
        let reason = match status {
            404 => "not_found",
            413 => "too_large",
            _ => "invalid",
        };
        answer.rejected(status, reason);
    }
    assert_eq!(supervisor.number("b", "done"), 0);
    let mut connection = place.keep_alive();
    assert_eq!(job(&mut connection, "echo", b"x").unwrap().status, 200);
}

#[test]
fn malformed_request_counts_only_where_its_token_has_access() {
    let bulkheads = format!(
        "[[access]]\ntoken_file = \"jobs\"\nbulkheads = [\"c\"]\ntenants = [\"t\"]\n{ONE}\
         [bulkhead.c]\ncommand = [\"MISBEHAVE\"]\n"
    );
    let supervisor = Supervisor::launch(folder(), LISTENERS, &bulkheads).until_ready();
    let place = Place::jobs_http(&supervisor);
    for bulkhead in ["b", "c"] {
        let path = format!("/v1/bulkheads/{bulkhead}/jobs");
        place.ask("POST", &format!("{path}?x=1"), &[TOKEN], b"").rejected(400, "invalid");
        place.ask("POST", &path, &[TOKEN, "Bulkhead-Cost: much"], b"").rejected(400, "invalid");
        let mut encoded = place.connect();
        encoded.send_head("POST", &path, &[TOKEN, "Transfer-Encoding: gzip, chunked"], None);
        Answer::read(encoded).expect("a response").rejected(400, "invalid");
    }
    assert_eq!(supervisor.snapshot("c")["rejected"], serde_json::json!({"invalid": 3}));
    assert_eq!(supervisor.snapshot("b")["rejected"], serde_json::json!({}));
}

/// If a request has both `Content-Length` and `Transfer-Encoding`, the latter takes precedence, so no part of the
/// payload is parsed as another request.
#[test]
fn smuggled_request_is_never_served() {
    let (supervisor, place) = start();
    let inner = format!("POST {JOBS} HTTP/1.1\r\nHost: x\r\n{TOKEN}\r\nContent-Length: 1\r\n\r\n!");
    for order in [
        format!("Content-Length: {}\r\nTransfer-Encoding: chunked", inner.len() + 5),
        format!("Transfer-Encoding: chunked\r\nContent-Length: {}", inner.len() + 5),
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\nContent-Length: 4".to_owned(),
        "Transfer-Encoding : chunked\r\nContent-Length: 4".to_owned(),
        "Transfer-Encoding: xchunked\r\nContent-Length: 4".to_owned(),
    ] {
        // A reader that trusts the length sees a payload. A reader that trusts the encoding sees another request.
        let request = format!(
            "POST {JOBS} HTTP/1.1\r\nHost: x\r\n{TOKEN}\r\nConnection: close\r\n{order}\r\n\r\n0\r\n\r\n{inner}"
        );
        let answer = raw(&place, request.as_bytes()).expect("no reset");
        assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{order}: {answer}");
        assert!(!answer.ends_with('!'), "{order}: {answer}");
    }
    assert!(supervisor.number("b", "done") <= 2);
}

#[test]
fn disconnect_or_half_close_cancels_the_job() {
    let (supervisor, place) = start();
    let gone = begin_job(&place);
    let mut half_closed = begin_job(&place);
    supervisor.wait_number("b", "in_flight", 2);
    drop(gone);
    supervisor.wait_number("b", "cancelled", 1);
    half_closed.socket().end_sending();
    supervisor.wait_number("b", "cancelled", 2);
    assert_eq!(supervisor.number("b", "in_flight"), 0);
}

#[test]
fn connections_beyond_the_maximum_are_refused_without_a_reset() {
    let (supervisor, place) = start_with("jobs_http_max = 2", ONE);
    let mut running = [begin_job(&place), begin_job(&place)];
    supervisor.wait_number("b", "in_flight", 2);
    for _ in 0..20 {
        let refused = place.job("b", "echo", &[TOKEN], b"x");
        let problem = refused.rejected(503, "overloaded");
        assert!(problem["detail"].as_str().unwrap().contains("jobs_http_max"), "{problem}");
        assert_eq!(place.ask("GET", "/readyz", &[], b"").status, 200);
    }
    // Opens more silent connections than the supervisor allows. The oldest connections are refused, and health checks
    // are still served.
    let mut silent: Vec<KeptAlive> = (0..10).map(|_| place.keep_alive()).collect();
    assert_eq!(silent[0].answer().expect("the oldest is refused").status, 503);
    assert_eq!(place.ask("GET", "/healthz", &[], b"").status, 200);
    let metrics = supervisor.try_get("/metrics").unwrap().1;
    let refused =
        metrics.lines().find(|line| line.contains("jobs_http_refused_total{reason=\"overloaded\"}"));
    let refused: u64 = refused.unwrap().split(' ').next_back().unwrap().parse().unwrap();
    assert!(refused >= 21, "{refused}");
    supervisor.touch("go");
    for connection in &mut running {
        assert_eq!(connection.answer().expect("an answer").status, 200);
    }
    drop(silent);
    // An idle connection is closed to make room for a new connection. A connection becomes idle shortly after its
    // response.
    let _later = wait_for("a further connection is served", || {
        let mut later = place.keep_alive();
        (job(&mut later, "echo", b"x").unwrap().status == 200).then_some(later)
    });
    let closed = wait_for("an idle connection has closed", || {
        running.iter_mut().position(|connection| {
            connection.socket().give_up_after(Duration::from_millis(50));
            connection.is_closed()
        })
    });
    let other = &mut running[1 - closed];
    other.socket().give_up_after(PATIENCE);
    assert_eq!(job(other, "echo", b"x").expect("the other connection is still open").status, 200);
}

#[test]
fn clients_without_a_token_cannot_hold_connections() {
    let (_supervisor, place) = start_with("jobs_http_max = 8", ONE);
    let mut known = place.keep_alive();
    assert_eq!(job(&mut known, "echo", b"x").unwrap().status, 200);
    // Opens connections that begin a request, send a wrong token, or stay silent.
    let mut strangers: Vec<KeptAlive> = Vec::new();
    for n in 0..40 {
        let mut stranger = place.keep_alive();
        match n % 3 {
            0 => stranger.socket().write_all(b"POST /v1/bulkheads/b/jobs HTTP/1.1\r\nX: ").unwrap(),
            1 => drop(stranger.ask("POST", JOBS, &["Authorization: Bearer wrong-token-here"], b"")),
            _ => {}
        }
        strangers.push(stranger);
        if n % 10 == 0 {
            let mut another = place.keep_alive();
            assert_eq!(job(&mut another, "echo", b"x").unwrap().status, 200, "{n}");
        }
    }
    assert_eq!(job(&mut known, "echo", b"x").expect("still open").status, 200);
    assert_eq!(place.ask("GET", "/healthz", &[], b"").status, 200);
}

/// Sends hundreds of requests without a token. Returns when the first response has arrived, without reading it.
fn send_without_reading(place: &Place) -> TcpStream {
    let mut stranger = place.connect_with_small_buffers();
    stranger.write_all("GET /x HTTP/1.1\r\nHost: x\r\n\r\n".repeat(400).as_bytes()).unwrap();
    wait_for("a response has arrived", || (stranger.peek(&mut [0; 256]).unwrap() == 256).then_some(()));
    stranger
}

#[test]
fn clients_that_do_not_read_cannot_hold_connections() {
    let (_supervisor, place) = start_with("jobs_http_max = 8", ONE);
    let mut known = place.keep_alive();
    assert_eq!(job(&mut known, "echo", b"x").unwrap().status, 200);
    let _strangers: Vec<_> = (0..20).map(|_| send_without_reading(&place)).collect();
    let mut others: Vec<KeptAlive> = (0..7).map(|_| place.keep_alive()).collect();
    for other in &mut others {
        assert_eq!(job(other, "echo", b"x").expect("an answer").status, 200);
    }
    for connection in others.iter_mut().chain([&mut known]) {
        assert_eq!(job(connection, "echo", b"x").expect("still open").status, 200);
    }
}

/// The supervisor does not count the connection of a health check as idle, because closing it frees no permit for a job.
#[test]
fn health_checks_do_not_prevent_closing_idle_connections() {
    let (_supervisor, place) = start_with("jobs_http_max = 1", ONE);
    let mut idle = place.keep_alive();
    assert_eq!(job(&mut idle, "echo", b"x").expect("an answer").status, 200);
    let check = || {
        let mut check = place.keep_alive();
        assert_eq!(check.ask("GET", "/healthz", &[], b"").expect("an answer").status, 200);
        check
    };
    wait_for("the idle connection is closed for another client", || {
        // The supervisor has answered these clients and waits until they close their connections.
        let _checks: Vec<KeptAlive> = (0..8).map(|_| check()).collect();
        (job(&mut place.keep_alive(), "echo", b"x")?.status == 200).then_some(())
    });
}

#[test]
fn a_thousand_connections_are_served_at_once() {
    let (supervisor, place) = start();
    let mut connections: Vec<KeptAlive> = (0..1000).map(|_| place.keep_alive()).collect();
    let headers = [TOKEN, "Bulkhead-Operation: steps:wait go"];
    for connection in &mut connections {
        connection.socket().send_head("POST", JOBS, &headers, Some(0));
    }
    supervisor.wait_number("b", "queued", 996);
    assert_eq!(place.ask("GET", "/readyz", &[], b"").status, 200);
    supervisor.touch("go");
    for (n, connection) in connections.iter_mut().enumerate() {
        let answer = connection.answer().unwrap_or_else(|| panic!("no answer to job {n}"));
        assert_eq!((answer.status, answer.header("connection")), (200, ""), "{n}: {}", answer.text());
    }
    let payloads = connections.iter_mut().enumerate().map(|(n, connection)| {
        let payload = n.to_string();
        (job(connection, "echo", payload.as_bytes()).expect("an answer").text(), payload)
    });
    assert!(payloads.into_iter().all(|(answer, payload)| answer == payload));
    assert_eq!(supervisor.number("b", "done"), 2000);
}

#[test]
fn jobs_are_accepted_during_the_drain_notice() {
    let (mut supervisor, place) = start_with("drain_notice = \"1s\"", ONE);
    let mut connection = place.keep_alive();
    let mut later = place.keep_alive();
    let mut idle = place.keep_alive();
    assert_eq!(job(&mut later, "echo", b"x").unwrap().status, 200);
    assert_eq!(job(&mut idle, "echo", b"x").unwrap().status, 200);
    let mut running = begin_job(&place);
    supervisor.wait_number("b", "in_flight", 1);
    supervisor.signal(Signal::SIGTERM);
    wait_for("the notice has begun", || (place.ask("GET", "/readyz", &[], b"").status == 503).then_some(()));
    assert_eq!(place.ask("GET", "/readyz?bulkhead=b", &[], b"").status, 503);
    assert_eq!(place.ask("GET", "/healthz", &[], b"").status, 200);
    let answer = job(&mut connection, "echo", b"x").expect("an answer");
    if answer.status == 503 {
        // The machine was busy for the whole notice period.
        assert_eq!(answer.header("bulkhead-reason"), "draining");
    } else {
        assert_eq!((answer.status, answer.header("connection")), (200, "close"));
        assert!(connection.is_closed());
    }
    // During the drain, connections are still accepted, but jobs are rejected.
    wait_for("the drain has begun", || {
        let answer = place.job("b", "echo", &[TOKEN], b"x");
        (answer.status == 503).then(|| {
            assert_eq!(answer.header("bulkhead-executed"), "no");
            assert_eq!(
                (answer.header("bulkhead-reason"), answer.header("connection")),
                ("draining", "close")
            );
        })
    });
    let refused = job(&mut later, "echo", b"x").expect("an answer");
    assert_eq!((refused.status, refused.header("bulkhead-reason")), (503, "draining"));
    supervisor.touch("go");
    assert_eq!(running.answer().expect("the running job has an answer").status, 200);
    assert!(idle.is_closed(), "an idle connection is closed without an error");
    assert_eq!(supervisor.wait().code(), Some(0));
    let error = std::net::TcpStream::connect(match place {
        Place::Tcp(address) => address,
        Place::Unix(_) => unreachable!(),
    });
    assert!(error.is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused));
}

#[test]
fn second_signal_ends_the_drain_notice_period() {
    let (mut supervisor, place) = start_with("drain_notice = \"1h\"\ndrain_timeout = \"1h\"", ONE);
    let mut running = begin_job(&place);
    supervisor.wait_number("b", "in_flight", 1);
    supervisor.signal(Signal::SIGTERM);
    wait_for("the notice has begun", || (place.ask("GET", "/readyz", &[], b"").status == 503).then_some(()));
    supervisor.signal(Signal::SIGTERM);
    let stopped = running.answer().expect("an answer");
    assert_eq!((stopped.status, stopped.header("bulkhead-reason")), (502, "stopped"));
    assert_eq!(stopped.header("bulkhead-executed"), "unknown");
    assert_eq!(supervisor.wait().code(), Some(0));
}

/// A client that sends chunked payloads with a token can use up only its own share of the memory. The supervisor's own
/// user keeps a share.
#[test]
fn token_holder_cannot_use_another_users_memory_share() {
    let (supervisor, place) = start_with("max_payload = \"4MiB\"\nmax_buffered = \"16MiB\"", ONE);
    let piece = vec![7; 1 << 20];
    let senders: Vec<_> = (0..12)
        .map(|_| {
            let (place, piece) = (place.clone(), piece.clone());
            std::thread::spawn(move || {
                let mut socket = place.connect();
                socket.send_head("POST", JOBS, &[TOKEN, "Transfer-Encoding: chunked"], None);
                for _ in 0..3 {
                    let sent =
                        write!(socket, "{:x}\r\n", piece.len()).and_then(|()| socket.write_all(&piece));
                    if sent.and_then(|()| socket.write_all(b"\r\n")).is_err() {
                        break;
                    }
                }
                socket
            })
        })
        .collect();
    let sockets: Vec<_> = senders.into_iter().map(|sender| sender.join().unwrap()).collect();
    // The supervisor's own user uses less than an equal share, so its job is served regardless of the token's payloads.
    let own = Place::of(&supervisor);
    for _ in 0..3 {
        let answer = own.job("b", "echo", &[], &vec![1; 4 << 20]);
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    let statuses = sockets.into_iter().map(|mut socket| {
        let _ = socket.write_all(b"0\r\n\r\n");
        let answer = Answer::read(socket).expect("an answer");
        assert_eq!(answer.header("bulkhead-executed"), if answer.status == 200 { "yes" } else { "no" });
        answer.status
    });
    let statuses: Vec<u16> = statuses.collect();
    assert!(statuses.iter().all(|status| [200, 503].contains(status)), "{statuses:?}");
    assert!(statuses.contains(&503), "{statuses:?}");
}
