//! Jobs over HTTP, with a real supervisor and real workers: every outcome, slow and disconnecting clients,
//! and invalid requests.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use bulkhead_tests::http::{Answer, Place, Socket};
use bulkhead_tests::{PATIENCE, Supervisor, descriptors, wait_for};
use serde_json::{Value, json};

const ONE: &str =
    "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_in_flight = 4\nmax_queue = 0\ndeadline = \"20s\"\n";

const TRACEPARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

/// Checks the fields that are common to all problem documents about jobs.
#[track_caller]
fn check(answer: &Answer, status: u16, outcome: &str, reason: &str, executed: &str) -> Value {
    let problem = answer.problem(status);
    assert_eq!(problem["outcome"], outcome, "{problem}");
    assert_eq!(problem["reason"], reason, "{problem}");
    assert_eq!(problem["executed"], executed, "{problem}");
    assert!(problem["retryable"].is_boolean() && problem["bulkhead"].is_string(), "{problem}");
    for field in ["attempts", "queued_ms", "ran_ms"] {
        assert!(problem[field].is_number(), "{field}: {problem}");
    }
    assert_eq!(answer.header("bulkhead-outcome"), outcome);
    assert_eq!(answer.header("bulkhead-reason"), reason);
    assert_eq!(answer.header("bulkhead-executed"), executed);
    assert_eq!(answer.header("bulkhead-retryable"), problem["retryable"].to_string());
    if matches!(status, 429 | 503) {
        let ms = problem["retry_after_ms"].as_f64().expect("milliseconds");
        let seconds: f64 = answer.header("retry-after").parse().unwrap();
        assert!(seconds * 1000.0 >= ms && seconds * 1000.0 < ms + 1000.0 || seconds == 1.0, "{ms} {seconds}");
        let deadline_ms = problem["deadline_ms"].as_f64().expect("every outcome has a deadline");
        assert!(problem["retryable"] == false || ms <= deadline_ms, "{problem}");
    }
    problem
}

#[test]
fn http_job_returns_result_and_outcome_headers() {
    let supervisor = Supervisor::start(ONE);
    let place = Place::of(&supervisor);
    let sizes = [0, 1, 65_536, 65_537, 3_000_000];
    for size in sizes {
        let payload: Vec<u8> = (0..size).map(|i| (i * 7) as u8).collect();
        let answer = place.job("b", "echo", &[&format!("traceparent: {TRACEPARENT}")], &payload);
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert!(answer.body == payload, "{size} bytes come back unchanged");
        assert_eq!(answer.header("content-type"), "application/octet-stream");
        assert_eq!(answer.header("content-length"), size.to_string());
        assert_eq!(answer.header("bulkhead-outcome"), "ok");
        assert_eq!(answer.header("bulkhead-served-by"), "b");
        assert_eq!(answer.header("bulkhead-attempts"), "1");
        assert_eq!(
            (answer.header("bulkhead-executed"), answer.header("bulkhead-retryable")),
            ("yes", "false")
        );
        assert_eq!(answer.header("traceparent"), TRACEPARENT);
        let pid: u32 = answer.header("bulkhead-worker-pid").parse().unwrap();
        assert_eq!(supervisor.worker_pids("b"), [pid]);
        for name in ["bulkhead-queued-ms", "bulkhead-ran-ms", "bulkhead-deadline-ms"] {
            assert!(answer.header(name).parse::<f64>().is_ok(), "{name}");
        }

        // Sends the payload again in chunks. The number and size of chunks must not matter.
        let mut socket = place.connect();
        socket.send_head("POST", "/v1/bulkheads/b/jobs", &["Transfer-Encoding: chunked"], None);
        for chunk in payload.chunks(100_000) {
            write!(socket, "{:x}\r\n", chunk.len()).unwrap();
            socket.write_all(chunk).unwrap();
            socket.write_all(b"\r\n").unwrap();
        }
        socket.write_all(b"0\r\n\r\n").unwrap();
        let answer = Answer::read(socket).expect("a response");
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert!(answer.body == payload, "{size} bytes come back unchanged");
    }
    assert_eq!(supervisor.number("b", "done"), 2 * sizes.len() as u64);
}

#[test]
fn request_headers_set_deadline_tenant_and_trace() {
    let supervisor = Supervisor::start(&format!("{ONE}deadline_max = \"30s\"\n"));
    let place = Place::of(&supervisor);
    let late = place.job(
        "b",
        "sleep",
        &["Bulkhead-Deadline-Ms: 2000", "Bulkhead-Tenant: größe", &format!("traceparent: {TRACEPARENT}")],
        b"20000",
    );
    let problem = check(&late, 504, "deadline_exceeded", "running", "yes");
    assert_eq!(problem["deadline_ms"], 2000.0);
    assert_eq!(problem["trace_id"], &TRACEPARENT[3..35]);
    assert_eq!(problem["retryable"], false);
    let event = &supervisor.wait_events("job_timeout", 1)[0];
    assert_eq!(event["tenant"], "größe");
    assert_eq!(event["trace_id"], &TRACEPARENT[3..35]);

    // Waits until all permits are free, so that the next job does not wait in the queue until its deadline.
    supervisor.wait_number("b", "available", 4);
    let late =
        place.job("b", "sleep", &["Bulkhead-Deadline-Ms: 2000", "Bulkhead-Idempotent: true"], b"20000");
    assert_eq!(check(&late, 504, "deadline_exceeded", "running", "yes")["retryable"], true);

    let traced = format!("traceparent: {TRACEPARENT}");
    assert_eq!(place.job("b", "trace", &[&traced], b"").text(), TRACEPARENT);
    let nonsense = place.job("b", "trace", &["traceparent: 00-nonsense"], b"");
    assert_eq!((nonsense.text(), nonsense.header("traceparent")), ("none".into(), ""));

    for wrong in [
        "Bulkhead-Deadline-Ms: soon",
        "Bulkhead-Deadline-Ms: 0",
        "Bulkhead-Deadline-Ms: +5",
        "Bulkhead-Priority: urgent",
        "Bulkhead-Cost: -1",
        "Bulkhead-Idempotent: perhaps",
        "Bulkhead-Idempotent: 1",
        "Bulkhead-Dealine-Ms: 5",
        "Bulkhead-Operation: twice",
    ] {
        let problem = check(&place.job("b", "echo", &[wrong], b""), 400, "rejected", "invalid", "no");
        let name = wrong.split(':').next().unwrap().to_ascii_lowercase();
        assert!(problem["detail"].as_str().unwrap().contains(&name), "{problem}");
    }
}

#[test]
fn failed_jobs_return_problem_documents() {
    let supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_payload = \"100KiB\"\nmax_result = 1000\n\
                 deadline = \"20s\"\nmax_queue = 4\n\
                 [bulkhead.protocol]\ncommand = [\"MISBEHAVE\", \"raw\", \"rubbish\"]\n\
                 [bulkhead.hung]\ncommand = [\"MISBEHAVE\"]\nhealth = { heartbeat = \"100ms\", missed = 3 }\n\
                 restart = { max = 1000 }\n\
                 [bulkhead.shared]\ncommand = [\"MISBEHAVE\"]\nmax_in_flight = 2\ndeadline = \"1s\"\ndeadline_max = \"60s\"\n\
                 [bulkhead.fallback]\ncommand = [\"MISBEHAVE\"]\nmax_in_flight = 0\nfallback = [\"b\"]\n\
                 [bulkhead.poison]\ncommand = [\"MISBEHAVE\"]\npoison = { crashes = 1 }\n\
                 [bulkhead.rate]\ncommand = [\"MISBEHAVE\"]\nrate_limit = { per_second = 0.01, burst = 1 }\n\
                 [bulkhead.broken]\ncommand = [\"MISBEHAVE\", \"exit-at-start\"]\nrestart = { max = 1, backoff = \"0s\" }\n",
    );
    let place = Place::of(&supervisor);

    let problem = check(&place.job("b", "fail", &[], b""), 422, "failed", "bad_input", "yes");
    assert_eq!(problem["code"], "bad_input");
    assert_eq!(problem["fault"], "caller");
    assert_eq!(problem["message"], "the input is bad");
    assert_eq!(problem["detail"], "the input is bad");
    assert_eq!(problem["retryable"], false);
    let problem = check(&place.job("b", "big", &[], b"2000"), 422, "failed", "result_too_large", "yes");
    assert_eq!(problem["code"], "result_too_large");

    check(&place.job("nobody", "echo", &[], b""), 404, "rejected", "not_found", "no");
    check(&place.job("NO%20name", "echo", &[], &[0; 100]), 404, "rejected", "not_found", "no");
    check(&place.job(&"x".repeat(70), "echo", &[], b""), 404, "rejected", "not_found", "no");
    check(&place.job("b", "echo", &[], &[0; 102_401]), 413, "rejected", "too_large", "no");
    let mut chunked = place.connect();
    chunked.send_head("POST", "/v1/bulkheads/b/jobs", &["Transfer-Encoding: chunked"], None);
    write!(chunked, "{:x}\r\n", 102_401).and_then(|()| chunked.write_all(&[0; 102_401])).unwrap();
    // The client has not sent the last chunk yet.
    check(&Answer::read(chunked).expect("a response"), 413, "rejected", "too_large", "no");
    check(&place.job("b", &"o".repeat(257), &[], b""), 400, "rejected", "invalid", "no");

    let problem = check(&place.job("b", "exit", &[], b"3"), 502, "crashed", "exit", "unknown");
    assert_eq!(problem["exit_code"], 3);
    assert!(problem["worker_pid"].is_number(), "{problem}");
    let problem = check(&place.job("b", "segv", &[], b""), 502, "crashed", "signal", "unknown");
    assert_eq!(problem["signal"], "SIGSEGV");
    let report = problem["report"].as_str().expect("the problem names a crash report");
    let listed = supervisor.crash_report(report);
    assert_eq!(listed["jobs"][0]["job"], problem["job"], "{listed}");
    let problem = check(
        &place.job("b", "abort", &["Bulkhead-Idempotent: true"], b""),
        502,
        "crashed",
        "signal",
        "unknown",
    );
    assert_eq!((&problem["signal"], &problem["retryable"]), (&"SIGABRT".into(), &true.into()));
    check(&place.job("protocol", "", &[], b""), 502, "crashed", "protocol", "unknown");
    check(&place.job("hung", "stop", &[], b""), 502, "crashed", "hung", "unknown");

    // Another job with a shorter deadline hangs, so the supervisor kills the worker that both jobs share.
    let innocent = {
        let place = place.clone();
        std::thread::spawn(move || place.job("shared", "sleep", &["Bulkhead-Deadline-Ms: 60000"], b"60000"))
    };
    supervisor.wait_number("shared", "in_flight", 1);
    let guilty = place.job("shared", "hang", &[], b"");
    check(&guilty, 504, "deadline_exceeded", "running", "yes");
    check(&innocent.join().unwrap(), 502, "crashed", "collateral", "unknown");

    let answer = place.job("fallback", "echo", &[], b"x");
    assert_eq!((answer.status, answer.header("bulkhead-served-by")), (200, "b"));

    check(&place.job("poison", "abort", &[], b"bad"), 502, "crashed", "signal", "unknown");
    check(&place.job("poison", "abort", &[], b"bad"), 422, "rejected", "quarantined", "no");
    assert_eq!(place.job("rate", "echo", &[], b"").status, 200);
    check(&place.job("rate", "echo", &["Bulkhead-Cost: 0"], b""), 429, "rejected", "rate_limited", "no");
    // A job whose cost exceeds the burst can never be served. The response still contains `retry_after_ms`.
    check(&place.job("rate", "echo", &["Bulkhead-Cost: 9"], b""), 429, "rejected", "rate_limited", "no");
    let broken = "the bulkhead `broken` has failed";
    wait_for(broken, || (supervisor.snapshot("broken")["state"] == "failed").then_some(()));
    check(&place.job("broken", "echo", &[], b""), 503, "rejected", "unavailable", "no");

    let (status, _) = supervisor.post("/v1/bulkheads/hung/drain");
    assert_eq!(status, 200);
    check(&place.job("hung", "echo", &[], b""), 503, "rejected", "draining", "no");
}

/// Occupies a bulkhead's only permit until the file `go` exists, and queues `waiting` further jobs.
fn crowd(
    place: &Place,
    supervisor: &Supervisor,
    bulkhead: &str,
    waiting: u64,
    headers: &'static [&'static str],
) {
    for _ in 0..=waiting {
        let (place, bulkhead) = (place.clone(), bulkhead.to_owned());
        std::thread::spawn(move || place.job(&bulkhead, "steps:wait go", headers, b""));
    }
    supervisor.wait_number(bulkhead, "queued", waiting);
    supervisor.wait_number(bulkhead, "in_flight", 1);
}

#[test]
fn overload_rejection_names_the_reason() {
    let supervisor = Supervisor::start_with(
        "max_payload = \"4MiB\"\nmax_buffered = \"6MiB\"\n",
        "[defaults]\ndeadline = \"10m\"\ncwd = \".\"\n\
         [bulkhead.full]\ncommand = [\"MISBEHAVE\"]\n\
         [bulkhead.pressed]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 3\npressure = { reject = 0.5 }\n\
         [bulkhead.slow]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 2\nqueue_timeout = \"100ms\"\n\
         [bulkhead.late]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 9\n\
         [bulkhead.shed]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 1\n\
         [bulkhead.evict]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 1\noverflow = \"evict-oldest\"\n\
         [bulkhead.tenants]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 9\ntenants = { max_queue = 1 }\n\
         [bulkhead.breaker]\ncommand = [\"MISBEHAVE\"]\nbreaker = { min_calls = 1000 }\n",
    );
    let place = Place::of(&supervisor);
    let queued = |bulkhead: &'static str, headers: &'static [&'static str]| {
        let place = place.clone();
        std::thread::spawn(move || place.job(bulkhead, "steps:wait go", headers, b""))
    };

    crowd(&place, &supervisor, "full", 0, &[]);
    check(&place.job("full", "echo", &[], b""), 503, "rejected", "queue_full", "no");
    crowd(&place, &supervisor, "pressed", 2, &[]);
    check(&place.job("pressed", "echo", &[], b""), 429, "rejected", "backpressure", "no");
    crowd(&place, &supervisor, "slow", 0, &[]);
    check(&place.job("slow", "echo", &[], b""), 503, "rejected", "queue_timeout", "no");
    crowd(&place, &supervisor, "late", 0, &[]);
    let late = place.job("late", "echo", &["Bulkhead-Deadline-Ms: 100"], b"");
    assert_eq!(check(&late, 504, "deadline_exceeded", "queued", "no")["retryable"], true);

    crowd(&place, &supervisor, "shed", 0, &[]);
    let unlucky = queued("shed", &["Bulkhead-Priority: best-effort"]);
    supervisor.wait_number("shed", "queued", 1);
    let lucky = queued("shed", &["Bulkhead-Priority: critical"]);
    check(&unlucky.join().unwrap(), 503, "rejected", "shed", "no");

    crowd(&place, &supervisor, "evict", 0, &[]);
    let unlucky = queued("evict", &[]);
    supervisor.wait_number("evict", "queued", 1);
    let second = queued("evict", &[]);
    check(&unlucky.join().unwrap(), 503, "rejected", "evicted", "no");

    crowd(&place, &supervisor, "tenants", 1, &["Bulkhead-Tenant: acme"]);
    let refused = place.job("tenants", "echo", &["Bulkhead-Tenant: acme"], b"");
    check(&refused, 429, "rejected", "tenant_quota", "no");

    supervisor.resize("breaker", r#"{"breaker": "forced_open"}"#);
    check(&place.job("breaker", "echo", &[], b""), 503, "rejected", "circuit_open", "no");

    // The memory budget holds one of these payloads, but not two.
    let waiting = {
        let place = place.clone();
        std::thread::spawn(move || place.job("late", "echo", &[], &vec![1; 4 << 20]))
    };
    supervisor.wait_number("late", "queued", 1);
    for headers in [&[][..], &["Bulkhead-Deadline-Ms: 500"][..]] {
        let refused = place.job("late", "echo", headers, &vec![2; 4 << 20]);
        check(&refused, 503, "rejected", "overloaded", "no");
    }
    let mut chunked = place.connect();
    chunked.send_head("POST", "/v1/bulkheads/late/jobs", &["Transfer-Encoding: chunked"], None);
    let piece = vec![3; 1 << 20];
    for _ in 0..4 {
        let sent = write!(chunked, "{:x}\r\n", piece.len()).and_then(|()| chunked.write_all(&piece));
        if sent.and_then(|()| chunked.write_all(b"\r\n")).is_err() {
            break;
        }
    }
    let _ = chunked.write_all(b"0\r\n\r\n");
    check(&Answer::read(chunked).expect("a response"), 503, "rejected", "overloaded", "no");

    supervisor.touch("go");
    for waited in [lucky, second, waiting] {
        assert_eq!(waited.join().unwrap().status, 200);
    }
}

#[test]
fn oversized_payload_is_rejected_before_it_arrives() {
    let supervisor = Supervisor::start(&format!("{ONE}max_payload = 1000\n"));
    let place = Place::of(&supervisor);
    let begin = |headers: &[&str], length: Option<usize>| {
        let mut socket = place.connect();
        socket.send_head("POST", "/v1/bulkheads/b/jobs", headers, length);
        socket
    };
    for length in [1001, 65_537, 1 << 30, (1 << 30) + 1, usize::MAX >> 8] {
        // The client does not send any of the payload.
        let problem =
            check(&Answer::read(begin(&[], Some(length))).unwrap(), 413, "rejected", "too_large", "no");
        let detail = problem["detail"].as_str().unwrap();
        assert!(detail.contains(&length.to_string()) && detail.contains("1000"), "{detail}");
        // A client that sends `Expect: 100-continue` gets the rejection instead of `100 Continue`.
        let mut socket = begin(&["Expect: 100-continue"], Some(length));
        let mut text = String::new();
        socket.read_to_string(&mut text).unwrap();
        assert!(text.starts_with("HTTP/1.1 413"), "{text}");
    }
    // The client never sends the last chunk.
    let mut socket = begin(&["Transfer-Encoding: chunked"], None);
    socket.write_all(b"3e9\r\n").unwrap();
    socket.write_all(&[0; 1001]).unwrap();
    let problem = check(&Answer::read(socket).unwrap(), 413, "rejected", "too_large", "no");
    assert!(problem["detail"].as_str().unwrap().contains("max_payload (1000 bytes)"), "{problem}");
    let rejected = supervisor.snapshot("b")["rejected"]["too_large"].as_u64().unwrap();
    assert_eq!(rejected, 11, "all rejections have the reason `too_large`");

    // No bulkhead means no size limit, but the payload is not awaited either.
    for headers in [&["Expect: 100-continue"][..], &[]] {
        for (header, length) in
            [(None, Some(65_537)), (None, Some(1 << 30)), (Some("Transfer-Encoding: chunked"), None)]
        {
            let mut socket = place.connect();
            let headers: Vec<&str> = headers.iter().copied().chain(header).collect();
            socket.send_head("POST", "/v1/bulkheads/nobody/jobs", &headers, length);
            let mut text = String::new();
            socket.read_to_string(&mut text).unwrap();
            assert!(text.starts_with("HTTP/1.1 404") && text.contains("not_found"), "{text}");
        }
    }

    // A client that never stops sending can still read the rejection.
    let mut socket = begin(&[], Some(64 << 20));
    let piece = vec![0; 1 << 20];
    let began = Instant::now();
    while socket.write_all(&piece).is_ok() {
        assert!(began.elapsed() < PATIENCE, "the supervisor never stops reading");
    }
    check(&Answer::read(socket).unwrap(), 413, "rejected", "too_large", "no");
}

#[test]
fn disconnecting_client_cancels_its_job() {
    let supervisor = Supervisor::start(&format!("{ONE}grace = \"10s\"\n"));
    let place = Place::of(&supervisor);
    let begin = |bytes: usize, more: &[u8]| {
        let mut socket = place.connect();
        let headers = ["Bulkhead-Operation: yield"];
        socket.send_head("POST", "/v1/bulkheads/b/jobs", &headers, Some(bytes));
        socket.write_all(&vec![0; bytes]).unwrap();
        socket.write_all(more).unwrap();
        socket
    };
    for (count, bytes) in [(1, 0), (2, 10), (3, 200_000)] {
        let socket = begin(bytes, b"");
        supervisor.wait_number("b", "in_flight", 1);
        drop(socket);
        supervisor.wait_number("b", "cancelled", count);
        supervisor.wait_number("b", "in_flight", 0);
    }
    // Over HTTP, the supervisor cannot tell a half-closed connection from a client that has left.
    let socket = begin(5, b"");
    supervisor.wait_number("b", "in_flight", 1);
    socket.end_sending();
    supervisor.wait_number("b", "cancelled", 4);
    assert!(Answer::read(socket).is_none());
    // Waits until all permits are free, because a cancelled job that still holds its permit could cause the rejection
    // of the next job.
    supervisor.wait_number("b", "available", 4);

    // An incomplete payload never becomes a job.
    for bytes in [10, 300_000] {
        let mut socket = place.connect();
        socket.send_head("POST", "/v1/bulkheads/b/jobs", &[], Some(bytes));
        socket.write_all(&vec![0; bytes / 2]).unwrap();
        drop(socket);
    }
    wait_for("another job is accepted", || (place.job("b", "echo", &[], b"x").status == 200).then_some(()));
    assert_eq!(supervisor.number("b", "submitted"), 5);
}

#[test]
fn admin_http_connection_serves_only_one_job() {
    let supervisor = Supervisor::start(ONE);
    let place = Place::of(&supervisor);
    let mut socket = place.connect();
    let one = "POST /v1/bulkheads/b/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc";
    socket.write_all(format!("{one}{one}").as_bytes()).unwrap();
    let mut text = String::new();
    socket.read_to_string(&mut text).unwrap();
    assert_eq!(text.matches("HTTP/1.1").count(), 1, "{text}");
    assert!(text.contains("connection: close") && text.ends_with("abc"), "{text}");
    assert_eq!(supervisor.number("b", "submitted"), 1);
}

#[test]
fn malformed_requests_are_rejected() {
    let supervisor = Supervisor::start(ONE);
    let place = Place::of(&supervisor);
    for method in ["GET", "PUT", "DELETE", "OPTIONS"] {
        let answer = place.ask(method, "/v1/bulkheads/b/jobs", &[], b"");
        answer.problem(405);
        assert_eq!(answer.header("allow"), "POST");
    }
    assert_eq!(place.ask("OPTIONS", "/healthz", &[], b"").header("allow"), "GET,HEAD");
    place.ask("POST", "/v1/nothing", &[], b"").problem(404);
    place.ask("GET", "/v1/events?limit=x", &[], b"").problem(400);

    let head_of = |method: &str, path: &str| {
        let mut socket = place.connect();
        socket.send_head(method, path, &[], None);
        let mut text = String::new();
        socket.read_to_string(&mut text).unwrap();
        text
    };
    let head = head_of("HEAD", "/v1/bulkheads/b");
    assert!(head.starts_with("HTTP/1.1 200") && head.ends_with("\r\n\r\n"), "{head}");
    let head = head_of("HEAD", "/v1/nothing");
    assert!(head.starts_with("HTTP/1.1 404") && head.ends_with("\r\n\r\n"), "{head}");

    for rubbish in [
        "\0\0\0\0\r\n\r\n",
        "GET\r\n\r\n",
        "POST /v1/bulkheads/b/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        "POST /v1/bulkheads/b/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        "POST /v1/bulkheads/b/jobs HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        "POST /v1/bulkheads/b/jobs HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
    ] {
        let mut socket = place.connect();
        socket.write_all(rubbish.as_bytes()).unwrap();
        if let Some(answer) = Answer::read(socket) {
            assert!((400..500).contains(&answer.status), "{rubbish:?}: {}", answer.status);
        }
    }
    let mut socket = place.connect();
    let huge = format!("X-Huge: {}", "x".repeat(4 << 20));
    socket.send_head("GET", "/healthz", &[&huge], None);
    let refused = Answer::read(socket).map_or(431, |answer| answer.status);
    assert_eq!(refused, 431);
    let mut socket = place.connect();
    socket.send_head("GET", "/healthz", &["X-Many: 1"; 150], None);
    assert_eq!(Answer::read(socket).map(|answer| answer.status), Some(431));
    assert_eq!(supervisor.number("b", "submitted"), 0);
}

/// Reads from a connection until it closes. Returns all bytes.
fn drain(mut socket: Socket) -> Vec<u8> {
    socket.give_up_after(2 * PATIENCE);
    let mut bytes = Vec::new();
    let _ = socket.read_to_end(&mut bytes);
    bytes
}

/// The metrics include jobs that the control plane rejects, although these jobs never reach the data plane.
#[test]
fn metrics_count_jobs_that_are_invalid_http_requests() {
    let supervisor = Supervisor::start(ONE);
    let place = Place::of(&supervisor);
    for _ in 0..3 {
        assert_eq!(place.job("b", "echo", &["Bulkhead-Cost: much"], b"x").status, 400);
        assert_eq!(place.job("nobody", "echo", &["Bulkhead-Cost: much"], b"x").status, 400);
        let query = place.ask("POST", "/v1/bulkheads/b/jobs?x=1", &[], b"x");
        let problem = check(&query, 400, "rejected", "invalid", "no");
        assert_eq!((&problem["bulkhead"], &problem["retryable"]), (&"b".into(), &false.into()));
        assert!(problem["detail"].as_str().unwrap().contains("x=1"), "{problem}");
        let mut encoded = place.connect();
        encoded.send_head("POST", "/v1/bulkheads/b/jobs", &["Transfer-Encoding: gzip, chunked"], None);
        let _ = encoded.write_all(b"2\r\nhi\r\n0\r\n\r\n");
        check(&Answer::read(encoded).expect("a response"), 400, "rejected", "invalid", "no");
    }
    assert_eq!(place.job("b", "echo", &[], b"x").status, 200);
    assert_eq!(supervisor.snapshot("b")["rejected"], json!({"invalid": 9}));
    let metrics = supervisor.try_get("/metrics").unwrap().1;
    let submitted = "bulkhead_submitted_total{bulkhead=\"b\",priority=\"normal\"} 10";
    let rejected = "bulkhead_rejected_total{bulkhead=\"b\",priority=\"normal\",reason=\"invalid\"} 9";
    assert!(
        metrics.contains(submitted) && metrics.contains(rejected) && !metrics.contains("nobody"),
        "{metrics}"
    );
}

#[test]
fn slow_clients_are_disconnected_without_delaying_others() {
    let supervisor = Supervisor::start(&format!("{ONE}max_result = \"64MiB\"\n"));
    let place = Place::of(&supervisor);
    let head = |length: Option<usize>, headers: &[&str]| {
        let mut socket = place.connect();
        socket.send_head("POST", "/v1/bulkheads/b/jobs", headers, length);
        socket
    };
    let before = descriptors(supervisor.pid());
    let began = Instant::now();
    let mut slow =
        [head(Some(100), &[]), head(Some(1 << 20), &[]), head(None, &["Transfer-Encoding: chunked"])];
    for socket in &mut slow {
        let _ = socket.write_all(b"1\r\n");
    }
    let mut reader = head(Some(8), &["Bulkhead-Operation: big"]);
    reader.write_all(b"50000000").unwrap();
    supervisor.wait_number("b", "done", 1);
    let mut begun = place.connect();
    begun.write_all(b"POST /v1/bulkheads/b/jobs HTTP/1.1\r\nHost: x\r\nX-Begun: ").unwrap();
    let mut changes = place.connect();
    changes.send_head("PATCH", "/v1/bulkheads/b", &["Expect: 100-continue"], Some(10));

    // In the meantime, other clients are served.
    assert_eq!(place.job("b", "echo", &[], b"x").status, 200);
    let waiters: Vec<_> = slow.into_iter().map(|socket| std::thread::spawn(move || drain(socket))).collect();
    let changes = std::thread::spawn(move || drain(changes));
    for waiter in waiters {
        let text = String::from_utf8_lossy(&waiter.join().unwrap()).into_owned();
        assert!(text.starts_with("HTTP/1.1 408"), "{text}");
        let body: Value = serde_json::from_str(text.split("\r\n\r\n").nth(1).unwrap()).unwrap();
        let told = ["outcome", "reason", "executed", "retryable"].map(|field| &body[field]);
        assert_eq!(json!(told), json!(["rejected", "invalid", "no", false]), "{text}");
    }
    Answer::read(begun).expect("an answer").rejected(408, "invalid");
    let text = String::from_utf8_lossy(&changes.join().unwrap()).into_owned();
    assert!(text.is_empty() || text.starts_with("HTTP/1.1 100") && text.contains("HTTP/1.1 408"), "{text}");
    assert!(began.elapsed() >= Duration::from_secs(9));
    // A client that stops reading gets only bytes that were already in the socket buffers.
    wait_for("all slow clients are disconnected", || (descriptors(supervisor.pid()) <= before).then_some(()));
    assert!(drain(reader).len() < 50_000_000);
    assert_eq!(place.job("b", "echo", &[], b"x").status, 200);
}

#[test]
fn http_job_is_rejected_while_128_other_jobs_are_pending() {
    let supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 1000\ncwd = \".\"\ndeadline = \"60s\"\n\
         [bulkhead.b.tenant.acme]\nmax_in_flight = 1\n",
    );
    let place = Place::of(&supervisor);
    let mut held: Vec<Socket> = (0..128)
        .map(|_| {
            let mut socket = place.connect();
            let headers = ["Bulkhead-Operation: steps:wait go"];
            socket.send_head("POST", "/v1/bulkheads/b/jobs", &headers, Some(0));
            socket
        })
        .collect();
    supervisor.wait_number("b", "queued", 127);
    let rejected = place.job("b", "echo", &["Bulkhead-Tenant: acme"], b"");
    check(&rejected, 503, "rejected", "overloaded", "no");
    let metrics = place.ask("GET", "/metrics", &[], b"").text();
    let counts_acme = |line: &str| line.contains("tenant=\"acme\"") && line.contains("outcome=\"rejected\"");
    let line =
        metrics.lines().find(|line| line.starts_with("bulkhead_tenant_jobs_total") && counts_acme(line));
    assert!(line.is_some_and(|line| line.ends_with(" 1")), "{line:?}");
    for (headers, deadline_ms) in [(&[][..], 60_000), (&["Bulkhead-Deadline-Ms: 500"][..], 500)] {
        let problem = check(&place.job("b", "echo", headers, b""), 503, "rejected", "overloaded", "no");
        assert_eq!(problem["deadline_ms"].as_f64(), Some(f64::from(deadline_ms)), "{problem}");
        assert_eq!(problem["retryable"], deadline_ms >= 1000, "{problem}");
    }
    // The jobs socket and other HTTP requests are not affected.
    let client = bulkhead_client::blocking::Client::connect(supervisor.socket()).unwrap();
    let by_socket = client.job("b", "x").start().unwrap();
    supervisor.wait_number("b", "queued", 128);
    assert_eq!(place.ask("GET", "/healthz", &[], b"").status, 200);
    held.truncate(64);
    supervisor.wait_number("b", "cancelled", 64);
    supervisor.touch("go");
    assert!(by_socket.wait().is_ok());
    for socket in held {
        assert_eq!(Answer::read(socket).expect("a response").status, 200);
    }
}

/// Returns the peak resident memory of a process, in MiB.
fn peak_mib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("the supervisor runs");
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).expect("VmHWM is listed");
    line.split_ascii_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).expect("a number") / 1024
}

#[test]
fn chunked_payloads_stay_within_memory_budget() {
    let supervisor = Supervisor::start_with("max_payload = \"4MiB\"\nmax_buffered = \"16MiB\"\n", ONE);
    let place = Place::of(&supervisor);
    let before = peak_mib(supervisor.pid());
    let piece = vec![7; 1 << 20];
    // The payloads have a total size of 240 MiB.
    let senders: Vec<_> = (0..80)
        .map(|_| {
            let (place, piece) = (place.clone(), piece.clone());
            std::thread::spawn(move || {
                let mut socket = place.connect();
                socket.send_head("POST", "/v1/bulkheads/b/jobs", &["Transfer-Encoding: chunked"], None);
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
    let sockets: Vec<Socket> = senders.into_iter().map(|sender| sender.join().unwrap()).collect();
    let grown = peak_mib(supervisor.pid()) - before;
    assert!(grown < 100, "memory grew by {grown} MiB");
    // Accepted senders can finish. The others have been rejected.
    let statuses = sockets.into_iter().map(|mut socket| {
        let _ = socket.write_all(b"0\r\n\r\n");
        Answer::read(socket).expect("a response").status
    });
    let statuses: Vec<u16> = statuses.collect();
    assert!(statuses.iter().all(|status| [200, 503].contains(status)), "{statuses:?}");
    assert!(statuses.iter().filter(|status| **status == 503).count() >= 64, "{statuses:?}");
    // All of the memory budget is free again.
    assert_eq!(place.job("b", "echo", &[], &vec![1; 4 << 20]).status, 200);
    println!(
        "memory grew by at most {grown} MiB, {} served",
        statuses.iter().filter(|status| **status == 200).count()
    );
}

#[test]
fn access_rules_do_not_apply_to_admin_socket() {
    let supervisor = Supervisor::start(&format!("[[access]]\nuid = 4242\n{ONE}"));
    assert!(bulkhead_client::blocking::Client::connect(supervisor.socket()).is_err());
    let answer = Place::of(&supervisor).job("b", "echo", &["Bulkhead-Tenant: any"], b"x");
    assert_eq!((answer.status, &answer.body[..]), (200, &b"x"[..]));
}

#[test]
fn shutdown_answers_all_http_jobs() {
    let mut supervisor = Supervisor::start(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 9\ncwd = \".\"\ndeadline = \"60s\"\n",
    );
    let place = Place::of(&supervisor);
    let ask = |operation: &'static str| {
        let place = place.clone();
        std::thread::spawn(move || place.job("b", operation, &[], b""))
    };
    let running = ask("steps:wait go");
    supervisor.wait_number("b", "in_flight", 1);
    let queued = ask("echo");
    supervisor.wait_number("b", "queued", 1);
    supervisor.signal(nix::sys::signal::Signal::SIGTERM);
    check(&queued.join().unwrap(), 503, "rejected", "draining", "no");
    supervisor.touch("go");
    assert_eq!(running.join().unwrap().status, 200);
    assert_eq!(supervisor.wait().code(), Some(0));

    let mut supervisor = Supervisor::start_with("drain_timeout = \"100ms\"", ONE);
    let place = Place::of(&supervisor);
    let running = std::thread::spawn(move || place.job("b", "sleep", &[], b"20000"));
    supervisor.wait_number("b", "in_flight", 1);
    supervisor.signal(nix::sys::signal::Signal::SIGTERM);
    check(&running.join().unwrap(), 502, "crashed", "stopped", "unknown");
    assert_eq!(supervisor.wait().code(), Some(0));
}
