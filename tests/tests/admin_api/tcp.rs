//! The admin API over TCP: authentication, protection against foreign web pages, and malformed or stalled
//! requests.

use serde_json::json;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::Duration;

use bulkhead_tests::http::{Answer, Place};
use bulkhead_tests::{PATIENCE, Supervisor, not_run, programs, wait_for};
use tempfile::TempDir;

const TOKEN: &str = "a-token-of-the-tests";
const BEARER: &str = "Authorization: Bearer a-token-of-the-tests";
/// Header for HTTP basic authentication with the user `me` and with the token as the password.
const BASIC: &str = "Authorization: Basic bWU6YS10b2tlbi1vZi10aGUtdGVzdHM=";
const CHALLENGES: &str = "Bearer realm=\"bulkhead\", Basic realm=\"bulkhead\", charset=\"UTF-8\"";
const ONE: &str = "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_in_flight = 2\nenv = { KEY = \"sesame\" }\n";

fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("token");
    std::fs::write(&path, format!("{TOKEN}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    folder
}

fn start_at(address: &str, bulkheads: &str) -> (Supervisor, Place) {
    let keys = format!("http = \"{address}\"\nhttp_token_file = \"token\"");
    let supervisor = Supervisor::launch(folder(), &keys, bulkheads);
    wait_for("the supervisor is ready", || (supervisor.try_get("/readyz")?.0 == 200).then_some(()));
    let place = Place::tcp(&supervisor);
    (supervisor, place)
}

fn start() -> (Supervisor, Place) {
    start_at("127.0.0.1:0", ONE)
}

/// Sends `request` and returns the complete response.
fn raw(place: &Place, request: &str) -> String {
    let mut socket = place.connect();
    socket.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn health_checks_need_no_host_header() {
    let (_supervisor, place) = start();
    for request in [
        "GET /healthz HTTP/1.0\r\n\r\n",
        "GET /healthz HTTP/1.1\r\n\r\n",
        "HEAD /readyz HTTP/1.0\r\n\r\n",
        "GET /healthz HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    ] {
        let answer = raw(&place, request);
        assert!(answer.lines().next().unwrap().ends_with(" 200 OK"), "{request:?}: {answer}");
    }
    // Load balancers send health checks with any host name.
    for request in [
        "GET /healthz HTTP/1.1\r\nHost: any.example\r\n\r\n",
        "GET /readyz?bulkhead=b HTTP/1.1\r\nHost: 10.1.2.3:80\r\n\r\n",
        "HEAD /healthz HTTP/1.1\r\nHost: \r\n\r\n",
    ] {
        let answer = raw(&place, request);
        assert!(answer.lines().next().unwrap().ends_with(" 200 OK"), "{request:?}: {answer}");
    }
    // Browsers always send a Host header. Without a Host header, only health checks are permitted, even with the token.
    for request in [
        "GET /metrics HTTP/1.1\r\nHost: evil.example\r\n\r\n".to_owned(),
        "POST /healthz HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 0\r\n\r\n".to_owned(),
        "GET /metrics HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n".to_owned(),
        format!("GET /v1/bulkheads HTTP/1.0\r\n{BEARER}\r\n\r\n"),
    ] {
        let answer = raw(&place, &request);
        assert!(answer.lines().next().unwrap().ends_with(" 403 Forbidden"), "{request:?}: {answer}");
    }
}

#[test]
fn response_has_exactly_one_connection_close_header() {
    let (supervisor, place) = start();
    for place in [place, Place::of(&supervisor)] {
        for path in ["/healthz", "/v1/nothing"] {
            let request = format!("GET {path} HTTP/1.0\r\nHost: localhost\r\nConnection: keep-alive\r\n\r\n");
            let answer = raw(&place, &request).to_ascii_lowercase();
            let told: Vec<_> = answer.lines().filter(|line| line.starts_with("connection:")).collect();
            assert_eq!(told, ["connection: close"], "{answer}");
        }
    }
}

#[test]
fn routes_except_health_checks_require_the_token() {
    let (supervisor, place) = start();
    for open in ["/healthz", "/readyz", "/readyz?bulkhead=b"] {
        assert_eq!(place.ask("GET", open, &[], b"").status, 200, "{open}");
    }
    // The metrics may not be available yet, but the request needs no token.
    assert_ne!(place.ask("GET", "/metrics", &[], b"").status, 401);
    let closed = [
        ("GET", "/v1/bulkheads"),
        ("GET", "/v1/bulkheads/b"),
        ("GET", "/v1/config"),
        ("GET", "/v1/events?follow=false"),
        ("GET", "/v1/bulkheads/b/logs"),
        ("GET", "/v1/crashes"),
        ("GET", "/openapi.json"),
        ("POST", "/v1/bulkheads/b/jobs"),
        ("POST", "/v1/bulkheads/b/drain"),
        ("POST", "/v1/upgrade"),
        ("PATCH", "/v1/bulkheads/b"),
        ("GET", "/v1/nothing"),
        ("GET", "/"),
        ("GET", "/v1/watch"),
        ("GET", "/healthz/"),
        ("GET", "//healthz"),
        ("GET", "/healthz/../v1/bulkheads"),
        ("OPTIONS", "/v1/bulkheads"),
        ("DELETE", "/v1/bulkheads"),
    ];
    let wrong = [
        "X-None: 1",
        "Authorization: Bearer",
        "Authorization: Bearer a-token-of-the-test",
        "Authorization: Bearer a-token-of-the-tests-and-more",
        "Authorization: Bearer A-TOKEN-OF-THE-TESTS",
        "Authorization: Basic a-token-of-the-tests",
        // Decoded: "me:a-token-of-the-test", "a-token-of-the-tests", "a-token-of-the-tests:".
        "Authorization: Basic bWU6YS10b2tlbi1vZi10aGUtdGVzdA==",
        "Authorization: Basic YS10b2tlbi1vZi10aGUtdGVzdHM=",
        "Authorization: Basic YS10b2tlbi1vZi10aGUtdGVzdHM6",
        "Authorization: a-token-of-the-tests",
        "Cookie: token=a-token-of-the-tests",
    ];
    for (method, path) in closed {
        for header in wrong {
            let answer = place.ask(method, path, &[header], b"");
            let problem = answer.problem(401);
            assert_eq!(answer.header("www-authenticate"), CHALLENGES);
            assert!(!problem.to_string().contains(TOKEN), "{problem}");
        }
    }
    place.ask("GET", &format!("/v1/bulkheads?token={TOKEN}"), &[], b"").problem(401);
    // A job rejected over TCP also has an outcome.
    let told = |problem: &serde_json::Value| {
        json!(["outcome", "reason", "bulkhead", "executed", "retryable"].map(|field| &problem[field]))
    };
    let ends = |reason: &str| json!(["rejected", reason, "b", "no", false]);
    assert_eq!(told(&place.job("b", "echo", &[], b"").problem(401)), ends("unauthenticated"));
    let other = ["Origin: http://evil.example", BEARER];
    assert_eq!(told(&place.job("b", "echo", &other, b"").problem(403)), ends("forbidden"));
    assert_eq!(supervisor.number("b", "submitted"), 0);

    let answer = place.ask("GET", "/v1/bulkheads/b", &[BEARER], b"");
    assert_eq!((answer.status, answer.json()["name"].as_str()), (200, Some("b")));
    place.ask("GET", "/v1/nothing", &[BEARER], b"").problem(404);
    place.ask("POST", "/v1/upgrade", &[BEARER], b"").problem(403);
    let answer = place.job("b", "echo", &[BEARER], b"over tcp");
    assert_eq!((answer.status, &answer.body[..]), (200, &b"over tcp"[..]));
    assert_eq!(place.job("b", "echo", &["authorization: bearer a-token-of-the-tests"], b"").status, 200);
    assert_eq!(place.ask("GET", "/", &[BASIC], b"").header("content-type"), "text/html; charset=utf-8");
    assert_eq!(place.job("b", "echo", &[BASIC], b"").status, 200);
    place.job("b", "fail", &[BEARER], b"").problem(422);
    assert!(!supervisor.log().contains(TOKEN), "the log does not contain the token");
    // The Unix socket needs no token.
    assert_eq!(Place::of(&supervisor).job("b", "echo", &[], b"").status, 200);
}

#[test]
fn requests_from_foreign_web_pages_are_forbidden() {
    let (supervisor, place) = start();
    let Place::Tcp(address) = &place else { panic!() };
    // DNS rebinding: the Host header contains a foreign name that resolves to the supervisor's address.
    for host in [
        "Host: evil.example",
        "Host: evil.example:9464",
        "Host: 127.0.0.1.evil.example",
        "Host: 10.1.2.3",
        "Host:",
    ] {
        for path in ["/metrics", "/v1/bulkheads"] {
            place.ask("GET", path, &[host, BEARER], b"").problem(403);
        }
        assert_eq!(place.ask("GET", "/healthz", &[host], b"").status, 200, "{host}");
    }
    for host in ["Host: localhost", "Host: LOCALHOST:1", "Host: 127.0.0.1:8080", "Host: [::1]"] {
        assert_eq!(place.ask("GET", "/v1/bulkheads", &[host, BEARER], b"").status, 200, "{host}");
    }
    // Cross-origin requests from scripts and forms on other sites.
    let host = format!("Host: {address}");
    for origin in ["http://evil.example", "null", "https://localhost", "http://127.0.0.1:1"] {
        let origin = format!("Origin: {origin}");
        for path in ["restart", "drain", "jobs"] {
            let path = format!("/v1/bulkheads/b/{path}");
            place.ask("POST", &path, &[&host, &origin, BEARER], b"").problem(403);
            place.ask("POST", &path, &[&host, &origin], b"").problem(403);
        }
        let kind = "Content-Type: application/json";
        place.ask("PATCH", "/v1/bulkheads/b", &[&host, &origin, BEARER, kind], b"{}").problem(403);
    }
    let same = format!("Origin: http://{address}");
    assert_eq!(place.ask("POST", "/v1/bulkheads/b/reset", &[&host, &same, BEARER], b"").status, 200);

    // Changes require the content type `application/json`, which a form on another site cannot send.
    let change = br#"{"max_queue": 5}"#;
    for kind in [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "",
        "text/application/json",
    ] {
        let kind = format!("Content-Type: {kind}");
        place.ask("PATCH", "/v1/bulkheads/b", &[BEARER, &kind], change).problem(415);
    }
    place.ask("PATCH", "/v1/bulkheads/b", &[BEARER], change).problem(415);
    for kind in ["application/json", "Application/JSON; charset=utf-8"] {
        let kind = format!("Content-Type: {kind}");
        assert_eq!(place.ask("PATCH", "/v1/bulkheads/b", &[BEARER, &kind], change).status, 200);
    }
    // A browser adds saved credentials to a request even if a form on another site sends the request.
    for from in [
        "Origin: http://evil.example",
        "Origin: null",
        "Sec-Fetch-Site: cross-site",
        "Sec-Fetch-Site: same-site",
    ] {
        for kind in [
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data; boundary=x",
            "application/json",
        ] {
            let kind = format!("Content-Type: {kind}");
            place.ask("POST", "/v1/bulkheads/b/jobs", &[&host, from, BASIC, &kind], b"payload").problem(403);
        }
        for verb in ["restart", "drain"] {
            place.ask("POST", &format!("/v1/bulkheads/b/{verb}"), &[&host, from, BASIC], b"").problem(403);
        }
    }
    // Other sites may link to the dashboard, but must not embed its pages or read its streams.
    let link = ["Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: document", BASIC];
    assert_eq!(place.ask("GET", "/", &link, b"").status, 200);
    let frame = ["Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: iframe", BASIC];
    place.ask("GET", "/", &frame, b"").problem(403);
    for path in ["/v1/watch", "/v1/config", "/v1/bulkheads/b/logs"] {
        place
            .ask("GET", path, &["Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: no-cors", BASIC], b"")
            .problem(403);
    }
    // The same rules apply on the Unix socket, because a user can forward a local TCP port to the socket.
    let unix = Place::of(&supervisor);
    unix.ask("POST", "/v1/bulkheads/b/drain", &["Host: localhost:1", "Origin: http://evil.example"], b"")
        .problem(403);
    unix.ask("POST", "/v1/bulkheads/b/drain", &["Sec-Fetch-Site: cross-site"], b"").problem(403);

    // A CORS preflight request from another site is rejected.
    let ask = [
        "Origin: http://evil.example",
        "Access-Control-Request-Method: POST",
        "Access-Control-Request-Headers: authorization",
    ];
    let answer = place.ask("OPTIONS", "/v1/bulkheads/b/jobs", &ask, b"");
    assert!(answer.status >= 400 && !answer.headers.keys().any(|name| name.starts_with("access-control")));
    assert_eq!(supervisor.number("b", "submitted"), 0);
    assert_eq!(supervisor.number("b", "queue_capacity"), 5);
}

/// Occupies all connections with clients that stall in the middle of a request. Then opens hundreds of further
/// connections without sending anything.
#[test]
fn idle_connections_do_not_block_health_checks() {
    let (_supervisor, place) = start();
    let Place::Tcp(address) = place else { panic!() };
    let begin = |bytes: &[u8]| {
        let mut socket = TcpStream::connect(address).unwrap();
        socket.write_all(bytes).unwrap();
        socket.set_nonblocking(true).unwrap();
        socket
    };
    let is_open = |mut socket: &TcpStream| {
        socket.read(&mut [0]).is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
    };
    let begun: Vec<_> = (0..384).map(|_| begin(b"GET /v1/bulkheads HTTP/1.1\r\n")).collect();
    let also = begin(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n");
    let mut silent: Vec<_> = (0..300).map(|_| begin(b"")).collect();
    for page in ["/healthz", "/readyz"] {
        assert_eq!(place.ask("GET", page, &[], b"").status, 200, "{page}");
        silent.extend((0..100).map(|_| begin(b"")));
    }
    // Most of the clients that have begun a request are still connected.
    let open = begun.iter().filter(|socket| is_open(socket)).count();
    assert!(open > 384 / 2, "{open} of {} are still open", begun.len());
    // The supervisor closed the oldest silent connections and kept the newest.
    wait_for("the oldest silent connection is closed", || (!is_open(&silent[0])).then_some(()));
    assert!(is_open(silent.last().unwrap()));
    drop(also);
}

/// Occupies all connections with clients that do not read the metrics, which do not fit in the buffers of a connection.
#[test]
fn clients_that_do_not_read_do_not_block_others() {
    let bulkheads: String = (0..32).map(|n| format!("[bulkhead.b{n}]\nexec = [\"cat\"]\n")).collect();
    let (_supervisor, place) = start_at("127.0.0.1:0", &bulkheads);
    let stall = || {
        let mut socket = place.connect_with_small_buffers();
        socket.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        // Waits until the response has begun.
        assert_eq!(socket.peek(&mut [0]).unwrap(), 1);
        socket
    };
    let strangers: Vec<_> = (0..384).map(|_| stall()).collect();
    for _ in 0..10 {
        assert_eq!(place.ask("GET", "/v1/bulkheads", &[BEARER], b"").status, 200);
    }
    drop(strangers);
}

#[test]
fn config_response_redacts_secrets() {
    let (supervisor, place) = start();
    for place in [place, Place::of(&supervisor)] {
        let answer = place.ask("GET", "/v1/config", &[BEARER], b"");
        assert_eq!((answer.status, answer.header("content-type")), (200, "application/json"));
        let text = answer.text();
        assert!(!text.contains("sesame") && !text.contains(TOKEN), "{text}");
        let config = answer.json();
        assert_eq!(config["bulkheads"][0]["name"], "b");
        assert_eq!(config["bulkheads"][0]["env"]["KEY"], "[redacted]");
        assert_eq!(config["supervisor"]["http"]["address"], "127.0.0.1:0");
        let file = config["supervisor"]["http"]["token_file"].as_str().unwrap();
        assert!(file.ends_with("/token"), "{file}");
    }
}

#[test]
fn worker_cannot_read_the_token() {
    let (_supervisor, place) = start_at(
        "127.0.0.1:0",
        "[bulkhead.x]\nexec = [\"cat\", \"token\"]\ncwd = \".\"\nenv = { PATH = \"/usr/bin:/bin\" }\n\
         [defaults.sandbox]\nprofile = \"default\"\n\
         [bulkhead.y]\nexec = [\"cat\", \"workers.toml\"]\ncwd = \".\"\nenv = { PATH = \"/usr/bin:/bin\" }\n",
    );
    for bulkhead in ["x", "y"] {
        let answer = place.ask("POST", &format!("/v1/bulkheads/{bulkhead}/jobs"), &[BEARER], b"");
        assert!(!answer.text().contains(TOKEN), "{}", answer.text());
        assert_ne!(answer.status, 200, "{}", answer.text());
    }
}

#[test]
fn start_fails_if_http_address_is_unavailable() {
    let (_first, place) = start();
    let Place::Tcp(address) = place else { panic!() };
    for (address, hint) in [
        (address.to_string(), "choose another port"),
        ("192.0.2.1:9464".into(), "the address does not belong to this machine"),
    ] {
        let folder = folder();
        let config = format!(
            "[supervisor]\nsocket = \"jobs.sock\"\nhttp = \"{address}\"\nhttp_token_file = \"token\"\n\
             [bulkhead.b]\nexec = [\"cat\"]\n"
        );
        std::fs::write(folder.path().join("workers.toml"), config).unwrap();
        let mut command = Command::new(programs().join("bulkhead-supervisor"));
        let output = bulkhead_tests::output(command.arg("--config").arg(folder.path().join("workers.toml")));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(&address) && said.contains(hint), "{said}");
        assert!(!folder.path().join("jobs.sock").exists(), "the failed start leaves no socket");
    }
}

#[test]
fn malformed_and_stalled_requests_do_not_block_others() {
    let (supervisor, place) = start();
    let mut held = Vec::new();
    for begin in [
        "",
        "GET",
        "GET /healthz HTTP/1.1\r\nHost: localhost\r\n",
        "POST /v1/bulkheads/b/drain HTTP/1.1\r\nContent-Length: 9\r\n",
    ] {
        for _ in 0..20 {
            let mut socket = place.connect();
            socket.write_all(begin.as_bytes()).unwrap();
            held.push(socket);
        }
    }
    // A payload without a token is rejected long before its last byte.
    let mut socket = place.connect();
    socket.send_head("POST", "/v1/bulkheads/b/jobs", &[], Some(1 << 30));
    let piece = vec![0; 1 << 20];
    let mut sent = 0;
    while sent < 64 && socket.write_all(&piece).is_ok() {
        sent += 1;
    }
    if let Some(answer) = Answer::read(socket) {
        answer.problem(401);
    }
    assert!(sent < 64, "the connection was closed");

    for rubbish in [
        &b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"[..],
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"BULKHEAD\0\0\0\0",
        &[0xff; 9000],
    ] {
        let mut socket = place.connect();
        socket.give_up_after(PATIENCE);
        let _ = socket.write_all(rubbish);
        socket.end_sending();
        let mut bytes = Vec::new();
        let _ = socket.read_to_end(&mut bytes);
        assert!(bytes.is_empty() || bytes.starts_with(b"HTTP/1.1 4"), "{bytes:?}");
    }
    // Only the first of several pipelined requests is served.
    let mut socket = place.connect();
    let one = format!(
        "POST /v1/bulkheads/b/jobs HTTP/1.1\r\nHost: localhost\r\n{BEARER}\r\nContent-Length: 1\r\n\r\nx"
    );
    socket.write_all(one.repeat(3).as_bytes()).unwrap();
    let mut text = String::new();
    socket.read_to_string(&mut text).unwrap();
    assert_eq!(text.matches("HTTP/1.1 ").count(), 1, "{text}");

    assert_eq!(place.ask("GET", "/healthz", &[], b"").status, 200);
    wait_for("stalled clients are disconnected", || {
        held.retain_mut(|socket| {
            socket.give_up_after(Duration::from_millis(1));
            let mut byte = [0];
            !matches!(socket.read(&mut byte), Ok(0)) && !matches!(socket.read(&mut byte), Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset)
        });
        held.is_empty().then_some(())
    });
    assert_eq!(supervisor.snapshot("b")["state"], "ready");
}

#[test]
fn admin_api_listens_on_ipv6() {
    if std::net::TcpListener::bind("[::1]:0").is_err() {
        not_run!("this machine has no ::1");
        return;
    }
    let (_supervisor, place) = start_at("[::1]:0", ONE);
    assert_eq!(place.ask("GET", "/v1/bulkheads", &["Host: [::1]:1", BEARER], b"").status, 200);
    place.ask("GET", "/v1/bulkheads", &["Host: [::2]:1", BEARER], b"").problem(403);
}
