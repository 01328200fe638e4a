//! Compares `GET /openapi.json` with the supervisor's behaviour: the tests call every route with valid and
//! invalid requests, and check each answer against the document.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

use bulkhead_tests::http::{Answer, KeptAlive, Place};
use bulkhead_tests::{Supervisor, not_run, wait_for};
use serde_json::Value;

const TOKEN: &str = "a-token-of-the-tests";
const BEARER: &str = "Authorization: Bearer a-token-of-the-tests";

fn start() -> (Supervisor, Place) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("token");
    std::fs::write(&path, TOKEN).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    let supervisor = Supervisor::launch(
        folder,
        "http = \"127.0.0.1:0\"\nhttp_token_file = \"token\"",
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nprocesses = 1\nmax_queue = 5\n\
         [bulkhead.own]\ncommand = [\"MISBEHAVE\"]\ntenants = { isolate = true }\n",
    );
    wait_for("the supervisor is ready", || (supervisor.try_get("/readyz")?.0 == 200).then_some(()));
    let place = Place::tcp(&supervisor);
    (supervisor, place)
}

/// Crashes a worker to create a crash report. Returns the ID of the report.
fn crash(supervisor: &Supervisor, place: &Place) -> String {
    place.job("b", "abort", &[BEARER], b"").problem(502);
    wait_for("there is a crash report", || {
        let crashes = supervisor.get("/v1/crashes");
        Some(crashes["crashes"].get(0)?["id"].as_str()?.to_owned())
    })
}

/// Starts a job that runs until it is cancelled or the connection closes. Returns the connection and the job's number.
fn running_job(supervisor: &Supervisor, place: &Place) -> (KeptAlive, String) {
    let head = [BEARER, "Bulkhead-Operation: yield", "Content-Type: application/octet-stream"];
    let mut connection = place.keep_alive();
    connection.socket().send_head("POST", "/v1/bulkheads/b/jobs", &head, Some(0));
    let number = wait_for("the job runs", || {
        let jobs = supervisor.get("/v1/jobs?state=running");
        Some(jobs["jobs"].get(0)?["job"].as_str()?.to_owned())
    });
    (connection, number)
}

/// Returns the path, method and description of every operation in the OpenAPI document.
fn operations(document: &Value) -> Vec<(String, String, Value)> {
    let paths = document["paths"].as_object().expect("paths");
    let each = paths.iter().flat_map(|(path, methods)| {
        let methods = methods.as_object().expect("methods");
        methods.iter().map(|(method, said)| (path.clone(), method.to_uppercase(), said.clone()))
    });
    each.collect()
}

/// Checks that a response matches the operation's description in the OpenAPI document.
#[track_caller]
fn compare(document: &Value, said: &Value, answer: &Answer, asked: &str) {
    let response = &said["responses"][answer.status.to_string()];
    assert!(response.is_object(), "{asked}: {} is not in the document: {}", answer.status, answer.text());
    let of_jobs =
        |name: &str| name.starts_with("bulkhead-") || ["retry-after", "traceparent"].contains(&name);
    for (name, value) in answer.headers.iter().filter(|(name, _)| of_jobs(name)) {
        let schema = &response["headers"][name]["schema"];
        assert!(schema.is_object(), "{asked}: the {name} header of {} is not in the document", answer.status);
        let value = match schema["type"].as_str() {
            Some("string") => value.clone().into(),
            _ => serde_json::from_str(value)
                .unwrap_or_else(|error| panic!("{asked}: {name}: {value}: {error}")),
        };
        fits(document, schema, &value, &format!("{asked} {name}"));
    }
    let kind = answer.header("content-type");
    let content = &response["content"][kind];
    assert!(content.is_object(), "{asked}: {} as {kind:?} is not in the document", answer.status);
    if matches!(kind, "application/json" | "application/problem+json") {
        fits(document, &content["schema"], &answer.json(), asked);
    }
    if kind == "application/problem+json" {
        answer.problem(answer.status);
    }
}

/// Checks a value against a schema. Supports only the parts of JSON Schema that the OpenAPI document uses.
#[track_caller]
fn fits(document: &Value, schema: &Value, value: &Value, asked: &str) {
    if let Some(name) = schema["$ref"].as_str() {
        let named = document.pointer(name.trim_start_matches('#')).expect("the referenced schema exists");
        return fits(document, named, value, asked);
    }
    let is_of = |kind: &Value| match kind.as_str() {
        Some("object") => value.is_object(),
        Some("array") => value.is_array(),
        Some("string") => value.is_string(),
        Some("integer") => value.is_u64() || value.is_i64(),
        Some("number") => value.is_number(),
        Some("boolean") => value.is_boolean(),
        Some("null") => value.is_null(),
        _ => panic!("{asked}: {kind} is not a type"),
    };
    match &schema["type"] {
        Value::Array(kinds) => assert!(kinds.iter().any(is_of), "{asked}: {value} is not one of {kinds:?}"),
        Value::Null => {}
        kind => assert!(is_of(kind), "{asked}: {value} is not of type {kind}"),
    }
    for name in schema["required"].as_array().into_iter().flatten() {
        assert!(value.get(name.as_str().unwrap()).is_some(), "{asked}: {name} is missing in {value}");
    }
    if let Some(words) = schema["enum"].as_array() {
        assert!(words.contains(value), "{asked}: {value} is not one of {words:?}");
    }
    if let (Some(properties), Some(fields)) = (schema["properties"].as_object(), value.as_object()) {
        for (name, value) in fields {
            let property = properties.get(name);
            let property = property.unwrap_or_else(|| panic!("{asked}: {name} is not in the document"));
            fits(document, property, value, &format!("{asked} {name}"));
        }
    }
    for item in value.as_array().into_iter().flatten().filter(|_| schema["items"].is_object()) {
        fits(document, &schema["items"], item, asked);
    }
}

/// Returns a valid value for a request parameter with the given schema.
fn fitting(schema: &Value) -> String {
    if let Some(word) = schema["enum"].get(0) {
        return word.as_str().unwrap().to_owned();
    }
    match schema["type"].as_str() {
        Some("integer") => "1".into(),
        Some("boolean") => "false".into(),
        _ => "x".into(),
    }
}

fn body_of(said: &Value) -> (Vec<String>, &'static [u8]) {
    match said["requestBody"]["content"].as_object().and_then(|content| content.keys().next()) {
        Some(kind) if kind == "application/json" => (vec![format!("Content-Type: {kind}")], b"{}"),
        Some(kind) => (vec![format!("Content-Type: {kind}")], b"payload"),
        None => (Vec::new(), b""),
    }
}

#[test]
fn every_route_matches_the_openapi_document() {
    let (supervisor, place) = start();
    let id = crash(&supervisor, &place);
    let document = place.ask("GET", "/openapi.json", &[BEARER], b"").json();
    let mut operations = operations(&document);
    assert!(operations.len() >= 20, "{}", operations.len());
    // `/v1/watch` is an endless stream, which `watch.rs` tests. `/v1/upgrade` is not served over TCP, and
    // `lifecycle/upgrade.rs` tests it.
    operations.retain(|(path, ..)| path != "/v1/watch" && path != "/v1/upgrade");
    // Sorts `drain` last, so that all other requests find the bulkhead ready.
    operations.sort_by_key(|(path, ..)| path.ends_with("drain"));
    for (path, method, said) in &operations {
        let asked = format!("{method} {path}");
        let (kind, body) = body_of(said);
        let with = |more: &[String], path: &str, body: &[u8]| {
            let mut headers: Vec<&str> = kind.iter().chain(more).map(String::as_str).collect();
            headers.push(BEARER);
            place.ask(method, path, &headers, body)
        };
        let is_stream = path == "/v1/events";
        let end = if is_stream { "?follow=false" } else { "" };

        // Valid requests.
        let right = path.replace("{name}", "b").replace("{id}", &id).replace("{tenant}", "acme");
        let right = right.replace("{file}", "main.js") + end;
        let job = path.contains("{job}").then(|| running_job(&supervisor, &place));
        let right = job.as_ref().map_or(right.clone(), |(_, number)| right.replace("{job}", number));
        let answer = with(&[], &right, body);
        assert_eq!(answer.status, 200, "{asked}: {}", answer.text());
        compare(&document, said, &answer, &asked);
        let parameters: Vec<&Value> = said["parameters"].as_array().unwrap().iter().collect();
        let of = |place: &'static str| parameters.iter().filter(move |parameter| parameter["in"] == place);
        for parameter in of("query") {
            let name = parameter["name"].as_str().unwrap();
            let joined = |value: &str| match end {
                "" => format!("{right}?{name}={value}"),
                _ if name == "follow" => format!("{}?{name}={value}", right.trim_end_matches(end)),
                _ => format!("{right}&{name}={value}"),
            };
            let answer = with(&[], &joined(&fitting(&parameter["schema"])), body);
            compare(&document, said, &answer, &format!("{asked}?{name}"));
            // `ä` is a valid value only for strings.
            if parameter["schema"]["type"] != "string" {
                let answer = with(&[], &joined("%C3%A4"), body);
                assert_eq!(answer.status, 400, "{asked}?{name}: {}", answer.text());
                compare(&document, said, &answer, &format!("{asked}?{name}"));
            }
        }
        for parameter in of("header") {
            let name = parameter["name"].as_str().unwrap();
            let answer = with(&[format!("{name}: {}", fitting(&parameter["schema"]))], &right, body);
            compare(&document, said, &answer, &format!("{asked} {name}"));
            if parameter["schema"]["type"] != "string" || parameter["schema"]["enum"].is_array() {
                let answer = with(&[format!("{name}: no")], &right, body);
                assert_eq!(answer.status, 400, "{asked} {name}: {}", answer.text());
                compare(&document, said, &answer, &format!("{asked} {name}"));
            }
        }

        // Invalid requests.
        if path.contains('{') {
            for name in ["nobody", "%00", "%F0%9F%98%80", &"n".repeat(300)] {
                let wrong = path.replace("{name}", name).replace("{id}", name).replace("{tenant}", name);
                let wrong = wrong.replace("{file}", name).replace("{job}", name) + end;
                let answer = with(&[], &wrong, body);
                assert_eq!(answer.status, 404, "{asked} of {name}: {}", answer.text());
                compare(&document, said, &answer, &asked);
            }
        }
        if said["requestBody"]["content"]["application/json"].is_object() {
            let huge = vec![b' '; 100_000];
            for (wrong, status) in [
                (&b""[..], 400),
                (b"[]", 400),
                (b"{", 400),
                (b"{\"nonsense\": 1}", 400),
                (b"{\"max_queue\": -1}", 400),
                (b"{\"max_queue\": \"5\"}", 400),
                (b"\xff", 400),
                (&huge, 413),
            ] {
                let answer = with(&[], &right, wrong);
                assert_eq!(answer.status, status, "{asked}: {}", answer.text());
                compare(&document, said, &answer, &asked);
            }
            let answer = place.ask(method, &right, &[BEARER, "Content-Type: text/plain"], body);
            assert_eq!(answer.status, 415, "{asked}");
            compare(&document, said, &answer, &asked);
        }
        let is_open = said["security"].as_array().unwrap().is_empty();
        let answer = place.ask(method, &right, &[], body);
        assert_eq!(answer.status, if is_open { 200 } else { 401 }, "{asked}");
        compare(&document, said, &answer, &asked);
        let answer = place.ask(method, &right, &["Host: evil.example", BEARER], body);
        // Health checks need no token, and accept any host name.
        let is_health = ["/healthz", "/readyz"].contains(&path.as_str());
        assert_eq!(answer.status, if is_health { 200 } else { 403 }, "{asked}");
        compare(&document, said, &answer, &asked);
        let methods = document["paths"][path].as_object().unwrap();
        for other in ["DELETE", "PUT", "POST", "PATCH"]
            .into_iter()
            .filter(|m| !methods.contains_key(&m.to_lowercase()))
        {
            let answer = place.ask(other, &right, &[BEARER], b"");
            answer.problem(405);
            for method in methods.keys() {
                assert!(answer.header("allow").contains(&method.to_uppercase()), "{other} {path}");
            }
        }
    }
    // Calls all operations again, for a bulkhead with isolated tenants.
    for (path, method, said) in &operations {
        let path = path.replace("{name}", "own").replace("{id}", &id).replace("{tenant}", "acme");
        let path = path.replace("{file}", "style.css").replace("{job}", "1000001");
        let (kind, body) = body_of(said);
        let mut headers: Vec<&str> = kind.iter().map(String::as_str).collect();
        headers.extend([BEARER, "Bulkhead-Tenant: acme"]);
        let path = if path == "/v1/events" { path + "?follow=false" } else { path };
        let answer = place.ask(method, &path, &headers, body);
        compare(&document, said, &answer, &format!("{method} {path}"));
    }
    // Responses that need a certain state: a job with a trace, a bulkhead that drains, and an invalid configuration.
    let ask = |method: &str, path: &str, headers: &[&str], query: &str| {
        let description = &document["paths"][path][method.to_lowercase()];
        let answer = place.ask(method, &(path.replace("{name}", "b") + query), headers, b"");
        compare(&document, description, &answer, &format!("{method} {path}"));
        answer
    };
    let traced = [BEARER, "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"];
    supervisor.post("/v1/bulkheads/b/drain");
    let answer = ask("POST", "/v1/bulkheads/{name}/jobs", &traced, "");
    answer.rejected(503, "draining");
    assert!(answer.headers.contains_key("traceparent"), "{answer:?}");
    let answer = ask("GET", "/readyz", &[], "?bulkhead=b");
    assert_eq!((answer.status, answer.header("bulkhead-executed")), (503, "no"), "{answer:?}");
    supervisor.post("/v1/bulkheads/b/resume");
    let answer = ask("POST", "/v1/bulkheads/{name}/jobs", &traced, "");
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(answer.headers.contains_key("bulkhead-worker-pid"), "{answer:?}");
    supervisor.configure("", "[bulkhead.b]\nunknown = 1\n");
    let problem = ask("POST", "/v1/reload", &[BEARER], "").problem(422);
    assert!(problem["errors"][0]["line"].is_u64(), "{problem}");
}

/// Returns the path of the `schemathesis` program, which generates requests from the OpenAPI document.
fn schemathesis() -> Option<PathBuf> {
    let named = std::env::var_os("SCHEMATHESIS").map(PathBuf::from);
    let search_path = std::env::var_os("PATH")?;
    let in_path = std::env::split_paths(&search_path).map(|folder| folder.join("schemathesis"));
    named.into_iter().chain(in_path).find(|path| path.is_file())
}

#[test]
fn generated_requests_match_the_openapi_document() {
    let Some(program) = schemathesis() else {
        not_run!(
            "schemathesis is not installed: run `pip install schemathesis`, and add the program to PATH or \
             name the program in SCHEMATHESIS"
        );
        return;
    };
    let (supervisor, place) = start();
    let Place::Tcp(address) = &place else { panic!() };
    // The requests name an existing bulkhead and crash report. Otherwise most responses would have status 404.
    let names = format!("[parameters]\nname = \"b\"\nid = \"{}\"\n", crash(&supervisor, &place));
    std::fs::write(supervisor.file("schemathesis.toml"), names).unwrap();
    let output = Command::new("timeout")
        .args(["--kill-after=20", "240"])
        .arg(program)
        .args(["run", &format!("http://{address}/openapi.json"), "-H", BEARER])
        .args(["--checks", "status_code_conformance,content_type_conformance,response_schema_conformance"])
        // Excludes endless streams, and operations after which later jobs would be rejected.
        .args(["--exclude-operation-id", "events", "--exclude-operation-id", "showLogs"])
        .args(["--exclude-operation-id", "watch"])
        .args(["--exclude-operation-id", "drain", "--exclude-operation-id", "replayCrash"])
        .args(["--phases", "examples,coverage,fuzzing", "--max-examples", "20", "--seed", "1", "--no-color"])
        .args(["--request-timeout", "20"])
        .current_dir(supervisor.folder.path())
        .output()
        .expect("schemathesis runs");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    println!("{said}");
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(supervisor.try_get("/healthz").unwrap().0, 200);
}
