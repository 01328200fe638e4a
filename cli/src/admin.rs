//! Commands of the admin socket: status, events, logs, restart, drain, resume, reset and resize.

use std::fmt::Display;
use std::io::{self, IsTerminal};
use std::path::Path;
use std::pin::pin;
use std::time::Duration;

use bulkhead_api::{Adaptive, BreakerState, Bulkheads, Event, LogLine, Problem, Snapshot, Tenant, Worker};
use comfy_table::{ColumnConstraint, ContentArrangement, Table, presets};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request, Response, StatusCode, header};
use hyper_util::rt::TokioIo;
use interprocess::local_socket::tokio::Stream;
use interprocess::local_socket::tokio::prelude::*;
use interprocess::local_socket::{GenericFilePath, ToFsName};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use crate::args::{Args, Resize};
use crate::output::{self, Failure, escape, exit};
use crate::severity;

/// Maximum length of a line in a stream, in bytes. A longer line cannot come from a supervisor.
const LINE_BYTES_MAX: usize = 1 << 20;

/// Maximum time for the supervisor to begin its response.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum size of a response that is read completely, in bytes. A larger response cannot come from a
/// supervisor.
const RESPONSE_BYTES_MAX: usize = 256 << 20;

/// Number of events that `status NAME` shows.
const EVENTS_SHOWN: usize = 10;

/// Sends a request and returns the response. The body is not read yet.
pub(crate) async fn request(args: &Args, method: Method, path: &str) -> Result<Response<Incoming>, Failure> {
    request_with(args, method, path, String::new()).await
}

async fn request_with(
    args: &Args,
    method: Method,
    path: &str,
    body: String,
) -> Result<Response<Incoming>, Failure> {
    let socket = args.admin();
    let response = tokio::time::timeout(RESPONSE_TIMEOUT, send(&socket, method, path, body)).await;
    let response = response.unwrap_or_else(|_| {
        Err(unreachable(
            &socket,
            &format!("the supervisor did not respond within {} s", RESPONSE_TIMEOUT.as_secs()),
        ))
    })?;
    if response.status().is_success() {
        return Ok(response);
    }
    let status = response.status();
    let body = read(response).await.unwrap_or_default();
    let problem: Problem = serde_json::from_slice(&body).unwrap_or_default();
    let detail = if problem.detail.is_empty() { status.as_str() } else { &problem.detail };
    let code = match status {
        StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY => exit::INVALID,
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => exit::FORBIDDEN,
        StatusCode::NOT_FOUND => exit::NOT_FOUND,
        StatusCode::CONFLICT | StatusCode::TOO_MANY_REQUESTS => exit::TRY_LATER,
        StatusCode::SERVICE_UNAVAILABLE => exit::UNREACHABLE,
        _ => exit::FAILED,
    };
    Err(Failure::new(code, escape(detail)))
}

pub(crate) fn unreachable(socket: &Path, error: &dyn std::fmt::Display) -> Failure {
    let socket = socket.display();
    let message = format!(
        "failed to reach the admin socket {socket}: {error}; is the supervisor running? If the socket is elsewhere, \
         use --admin or BULKHEAD_ADMIN, or name the jobs socket in the same folder with --socket or BULKHEAD_SOCKET"
    );
    Failure::new(exit::UNREACHABLE, message)
}

async fn send(
    socket: &Path,
    method: Method,
    path: &str,
    body: String,
) -> Result<Response<Incoming>, Failure> {
    let connected = match socket.to_fs_name::<GenericFilePath>() {
        Ok(name) => Stream::connect(name).await,
        Err(error) => Err(error),
    };
    let stream = connected.map_err(|error| match error.kind() {
        std::io::ErrorKind::PermissionDenied => Failure::new(
            exit::FORBIDDEN,
            format!(
                "this user has no permission to use the admin socket {}: run the command as the supervisor's \
                 user or as root",
                socket.display()
            ),
        ),
        _ => unreachable(socket, &error),
    })?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|error| unreachable(socket, &error))?;
    tokio::spawn(connection);
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(header::HOST, "bulkhead")
        .header(header::ACCEPT, "application/json")
        .header(header::CONTENT_TYPE, "application/json")
        .body(Full::new(Bytes::from(body)))
        .map_err(|error| Failure::new(exit::USAGE, error.to_string()))?;
    sender.send_request(request).await.map_err(|error| unreachable(socket, &error))
}

pub(crate) async fn read(response: Response<Incoming>) -> Result<Vec<u8>, Failure> {
    let body = Limited::new(response.into_body(), RESPONSE_BYTES_MAX).collect().await;
    let body = body.map_err(|error| {
        Failure::new(exit::UNREACHABLE, format!("failed to read the supervisor's response: {error}"))
    })?;
    Ok(body.to_bytes().to_vec())
}

/// Requests a JSON document from the supervisor.
pub(crate) async fn get<T: DeserializeOwned>(args: &Args, path: &str) -> Result<T, Failure> {
    document(&read(request(args, Method::GET, path).await?).await?)
}

/// Parses the body of a response.
pub(crate) fn document<T: DeserializeOwned>(body: &[u8]) -> Result<T, Failure> {
    serde_json::from_slice(body).map_err(|error| parse_failure(&error))
}

fn parse_failure(error: &serde_json::Error) -> Failure {
    Failure::new(exit::FAILED, format!("failed to parse the supervisor's response: {error}"))
}

/// Percent-encodes a name for use in a path.
pub(crate) fn percent_encoded(name: &str) -> String {
    let is_plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    name.bytes().map(|b| if is_plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}

// status

pub(crate) async fn status(args: &Args, name: Option<&str>, tenant: Option<&str>) -> Result<u8, Failure> {
    let Some(name) = name else {
        if args.json {
            return print_json(args, "/v1/bulkheads").await;
        }
        let Bulkheads { bulkheads: mut rows } = get(args, "/v1/bulkheads").await?;
        severity::sort(&mut rows);
        output::line(&bulkhead_table(&rows, terminal_columns()))?;
        print_health_problems(&rows.iter().flat_map(health_problems).collect::<Vec<_>>())?;
        return Ok(exit::OK);
    };
    let name = percent_encoded(name);
    let whose = tenant.map(|tenant| format!("?tenant={}", percent_encoded(tenant))).unwrap_or_default();
    let one: Value = get(args, &format!("/v1/bulkheads/{name}{whose}")).await?;
    let path = format!("/v1/events?bulkhead={name}&limit={EVENTS_SHOWN}&follow=false");
    let events = read(request(args, Method::GET, &path).await?).await?;
    let events = String::from_utf8_lossy(&events);
    if args.json {
        let mut one = one;
        one["events"] = events.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()).collect();
        output::json(&one)?;
        return Ok(exit::OK);
    }
    let one = Snapshot::deserialize(&one).map_err(|error| parse_failure(&error))?;
    output::line(&bulkhead_table(std::slice::from_ref(&one), terminal_columns()))?;
    print_health_problems(&health_problems(&one))?;
    output::line(&format!("\n{}", facts(&one).join("\n")))?;
    if let Some(adaptive) = &one.adaptive {
        output::line(&format!("\n{}", adaptive_line(adaptive)))?;
    }
    output::line(&format!("\n{}", worker_table(&one.workers)))?;
    if let Some(uid) = shared_user(&one.workers) {
        output::line(&format!("\nuser: shared, the workers run as the supervisor's own user (uid {uid})"))?;
    }
    output::line("")?;
    for line in events.lines() {
        print_event(args, line)?;
    }
    Ok(exit::OK)
}

/// Requests a JSON document and prints all fields, including unknown ones.
pub(crate) async fn print_json(args: &Args, path: &str) -> Result<u8, Failure> {
    output::json(&get::<Value>(args, path).await?)?;
    Ok(exit::OK)
}

/// Describes the adaptive limit in one line.
pub(crate) fn adaptive_line(adaptive: &Adaptive) -> String {
    let Adaptive { min, max, limit, limits, target_ms, raised, lowered, .. } = adaptive;
    let each = if *limits > 1 { format!(" for each of {limits} tenants") } else { String::new() };
    let latency = adaptive.latency_ms.map_or_else(|| "-".to_owned(), |ms| format!("{ms}ms"));
    format!(
        "adaptive  {} limit {limit} of {min}..{max}{each}  p90 {latency} target {target_ms}ms  raised {raised}  lowered {lowered}",
        shown(&adaptive.mode)
    )
}

/// Returns the reasons why a bulkhead is unhealthy, one per line.
fn health_problems(bulkhead: &Snapshot) -> Vec<String> {
    let line = |what: &str, word: String, why: &Option<String>| {
        Some(format!("{}: {what} {word}: {}", shown(&bulkhead.name), escape(why.as_ref()?)))
    };
    let state = line("state", shown(&bulkhead.state), &bulkhead.detail);
    let service = line("service", known(&bulkhead.service), &bulkhead.service_cause);
    [state, service].into_iter().flatten().collect()
}

fn print_health_problems(health_problems: &[String]) -> Result<(), Failure> {
    if health_problems.is_empty() {
        return Ok(());
    }
    output::line(&format!("\n{}", health_problems.join("\n")))
}

pub(crate) fn table(head: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled).set_header(head);
    table
}

/// Formats a value from outside this program as a single, escaped line.
pub(crate) fn shown(value: &impl Display) -> String {
    escape(&value.to_string()).replace('\n', " ")
}

/// Formats a value from outside this program, or a dash if it is absent.
pub(crate) fn known(value: &Option<impl Display>) -> String {
    value.as_ref().map_or_else(|| "-".to_owned(), shown)
}

pub(crate) fn millis(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |ms| format!("{ms:.2}ms"))
}

/// Formats the number of rejections for each reason, in one line.
pub(crate) fn rejected_line(one: &Snapshot) -> Option<String> {
    let by: Vec<_> =
        one.rejected.iter().map(|(reason, count)| format!("{} {count}", shown(reason))).collect();
    (!by.is_empty()).then(|| format!("rejected  {}", by.join("  ")))
}

/// Returns facts about a bulkhead for which the table of bulkheads has no column, one per line.
fn facts(one: &Snapshot) -> Vec<String> {
    let mut facts = vec![format!("start     {}", shown(&one.start_mode))];
    facts.extend(rejected_line(one));
    if one.quarantined > 0 {
        let (count, name) = (one.quarantined, shown(&one.name));
        facts.push(format!(
            "quarantine  {count} payloads that killed workers; `bulkhead reset {name}` clears the quarantine"
        ));
    }
    facts.extend(one.tenants.iter().map(|tenant| {
        let Tenant { name, in_flight, queued, submitted, rejected } = tenant;
        let name = shown(name);
        format!("tenant    '{name}'  in flight {in_flight}  queued {queued}  submitted {submitted}  rejected {rejected}")
    }));
    facts
}

/// Returns the width of the terminal on standard output, if there is one.
fn terminal_columns() -> Option<usize> {
    let size = io::stdout().is_terminal().then(ratatui::crossterm::terminal::size)?;
    size.ok().map(|(columns, _)| usize::from(columns)).filter(|columns| *columns > 0)
}

/// Returns the state of a bulkhead's circuit breaker, or a dash if the bulkhead has none.
pub(crate) fn breaker(bulkhead: &Snapshot) -> String {
    let is_absent = !bulkhead.has_breaker && bulkhead.breaker == BreakerState::Closed;
    if is_absent { "-".to_owned() } else { shown(&bulkhead.breaker) }
}

/// Formats the bulkheads as a table. If the table is wider than the terminal, omits columns that contain only
/// zeros, from the right, until the table fits.
fn bulkhead_table(rows: &[Snapshot], columns_max: Option<usize>) -> String {
    let mut table = table(&[
        "NAME",
        "STATE",
        "SERVICE",
        "WORKERS",
        "INFLIGHT/LIMIT",
        "QUEUE",
        "DONE",
        "FAILED",
        "LATE",
        "REJECTED",
        "CRASHED",
        "RESTARTS",
        "BREAKER",
        "P50",
        "P99",
    ]);
    for row in rows {
        table.add_row([
            shown(&row.name),
            shown(&row.state),
            known(&row.service),
            row.workers.len().to_string(),
            format!("{}/{}", row.in_flight, row.limit),
            format!("{}/{}", row.queued, row.queue_capacity),
            row.done.to_string(),
            row.failed.to_string(),
            row.deadline_exceeded.to_string(),
            row.rejections().to_string(),
            row.crashed.to_string(),
            row.restarts.to_string(),
            breaker(row),
            millis(row.latency_ms.run.p50),
            millis(row.latency_ms.run.p99),
        ]);
    }
    let is_empty = |cell: &str| matches!(cell, "0" | "0/0" | "-");
    for index in (0..table.column_count()).rev() {
        let is_wide = |table: &Table| table.lines().any(|line| Some(line.trim_end().len()) > columns_max);
        let mut cells = table.row_iter().filter_map(|row| row.cell_iter().nth(index));
        if columns_max.is_some() && is_wide(&table) && cells.all(|cell| is_empty(&cell.content())) {
            table.column_mut(index).into_iter().for_each(|column| {
                column.set_constraint(ColumnConstraint::Hidden);
            });
        }
    }
    table.trim_fmt()
}

/// Columns of the table of workers.
pub(crate) const WORKER_COLUMNS: [&str; 8] =
    ["PID", "STATE", "UPTIME", "INFLIGHT", "SERVED", "RESTARTS", "RSS", "LAST-EXIT"];

pub(crate) fn worker_cells(worker: &Worker) -> [String; 8] {
    let uptime = Duration::from_secs(worker.uptime_ms / 1000);
    [
        known(&worker.pid),
        if worker.spare && worker.state == "ready" { "spare".to_owned() } else { shown(&worker.state) },
        // Spaces are removed, so that programs can split the columns.
        humantime::format_duration(uptime).to_string().replace(' ', ""),
        worker.in_flight.to_string(),
        worker.served.to_string(),
        worker.restarts.to_string(),
        known(&worker.rss_bytes.map(|bytes| format!("{:.1}MiB", bytes as f64 / 1_048_576.0))),
        known(&worker.last_exit),
    ]
}

/// Returns the supervisor's user id if confined workers run as the same user.
fn shared_user(workers: &[Worker]) -> Option<u32> {
    let mut confined = workers.iter().filter_map(|worker| worker.confinement.as_ref());
    confined.find(|confinement| confinement.identity == "shared" && confinement.profile != "none")?.uid
}

fn worker_table(workers: &[Worker]) -> String {
    // If tenants have separate workers, a column names the tenant.
    let has_tenants = workers.iter().any(|worker| worker.tenant.is_some());
    let mut table = match has_tenants {
        true => table(&[&["TENANT"], &WORKER_COLUMNS[..]].concat()),
        false => table(&WORKER_COLUMNS),
    };
    for worker in workers {
        let tenant = has_tenants.then(|| format!("'{}'", known(&worker.tenant)));
        table.add_row(tenant.into_iter().chain(worker_cells(worker)));
    }
    table.trim_fmt()
}

// events and logs

pub(crate) async fn events(args: &Args, follow: bool) -> Result<u8, Failure> {
    let response = request(args, Method::GET, &format!("/v1/events?follow={follow}")).await?;
    lines(response, |line| match line.strip_prefix("data:") {
        Some(data) => print_event(args, data.trim_start()),
        None if line.starts_with('{') => print_event(args, line),
        // Other lines of server-sent events are ids, keep-alives and comments. Comments report missed events.
        None => {
            if let Some(comment) = line.strip_prefix(": ") {
                output::to_stderr(&escape(comment));
            }
            Ok(())
        }
    })
    .await
}

fn print_event(args: &Args, line: &str) -> Result<(), Failure> {
    if args.json {
        return output::json(line);
    }
    let Ok(event) = serde_json::from_str::<Event>(line) else { return Ok(()) };
    output::line(&format!("{} {}", shown(&event.at), event_words(&event)))
}

/// Formats an event in one line, without the time.
pub(crate) fn event_words(event: &Event) -> String {
    let severity = format!("{:8}", shown(&event.severity));
    let mut words = vec![severity, shown(&event.kind), known(&event.bulkhead)];
    let fields = event.fields.iter().filter(|(_, value)| !value.is_null());
    words.extend(fields.map(|(name, value)| format!("{}={}", escape(name), escape(&value.to_string()))));
    words.join(" ")
}

pub(crate) async fn logs(args: &Args, name: &str, follow: bool) -> Result<u8, Failure> {
    let path = format!("/v1/bulkheads/{}/logs?follow={follow}", percent_encoded(name));
    let response = request(args, Method::GET, &path).await?;
    lines(response, |line| {
        if args.json {
            return output::json(line);
        }
        let Ok(line_document) = serde_json::from_str::<LogLine>(line) else { return Ok(()) };
        if let Some(count) = line_document.dropped {
            output::to_stderr(&format!(
                "{count} lines of output were skipped, because the output was not read fast enough"
            ));
            return Ok(());
        }
        let (stream, line) = (shown(&line_document.stream), shown(&line_document.line));
        output::line(&format!("{} {stream}| {line}", line_document.pid))
    })
    .await
}

/// Passes each line of a response to `handle` as it arrives, until the response ends or the user presses ^C.
pub(crate) async fn lines(
    response: Response<Incoming>,
    mut handle: impl FnMut(&str) -> Result<(), Failure>,
) -> Result<u8, Failure> {
    let mut body = response.into_body();
    let mut partial = Vec::new();
    // All iterations use a single future, because a signal between two futures would be missed.
    let mut interrupt = pin!(tokio::signal::ctrl_c());
    loop {
        let frame = tokio::select! {
            biased;
            _ = &mut interrupt => return Ok(exit::CANCELLED),
            frame = body.frame() => frame,
        };
        let Some(frame) = frame else { return Ok(exit::OK) };
        let fail = |error| {
            Failure::new(exit::UNREACHABLE, format!("failed to read the supervisor's response: {error}"))
        };
        let Ok(data) = frame.map_err(fail)?.into_data() else { continue };
        partial.extend_from_slice(&data);
        while let Some(end) = partial.iter().position(|&b| b == b'\n') {
            let line: Vec<u8> = partial.drain(..=end).collect();
            handle(String::from_utf8_lossy(&line).trim_end())?;
        }
        if partial.len() > LINE_BYTES_MAX {
            return Err(Failure::new(exit::FAILED, "the supervisor sent a line that is too long"));
        }
    }
}

// actions

pub(crate) async fn steer(args: &Args, name: &str, action: &str) -> Result<u8, Failure> {
    let path = format!("/v1/bulkheads/{}/{action}", percent_encoded(name));
    let body = read(request(args, Method::POST, &path).await?).await?;
    if args.json {
        output::json(String::from_utf8_lossy(&body).trim_end())?;
    } else {
        let done = match action {
            "restart" => "workers are being replaced one after the other",
            "drain" => "new and queued jobs are rejected; running jobs can finish",
            "resume" => "jobs are accepted again",
            _ => {
                "the breaker, the restart history and the quarantine are reset, and failed workers start \
                 again"
            }
        };
        output::line(&format!("{}: {done}", escape(name)))?;
    }
    Ok(exit::OK)
}

pub(crate) async fn resize(args: &Args, resize: &Resize) -> Result<u8, Failure> {
    let mut change = Map::new();
    let numbers = [
        ("max_in_flight", resize.max_in_flight),
        ("processes", resize.processes),
        ("max_queue", resize.max_queue),
    ];
    change.extend(numbers.into_iter().filter_map(|(key, value)| Some((key.to_owned(), json!(value?)))));
    if let Some(per_second) = resize.rate {
        let mut rate = json!({"per_second": per_second});
        if let Some(burst) = resize.burst {
            rate["burst"] = json!(burst);
        }
        change.insert("rate_limit".to_owned(), rate);
    }
    change.extend(resize.breaker.as_ref().map(|mode| ("breaker".to_owned(), json!(mode))));
    let name = percent_encoded(&resize.name);
    let path = match &resize.tenant {
        Some(tenant) => format!("/v1/bulkheads/{name}/tenants/{}", percent_encoded(tenant)),
        None => format!("/v1/bulkheads/{name}"),
    };
    let body = Value::Object(change).to_string();
    let response = read(request_with(args, Method::PATCH, &path, body.clone()).await?).await?;
    if args.json {
        output::json(String::from_utf8_lossy(&response).trim_end())?;
    } else {
        output::line(&format!("{}: the change is in force: {body}", escape(&resize.name)))?;
    }
    Ok(exit::OK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrow_terminal_hides_columns_of_zeros() {
        let healthy =
            Snapshot { name: "thumbnail".into(), done: 7, failed: 0, crashed: 3, ..Snapshot::default() };
        let of = |columns| bulkhead_table(std::slice::from_ref(&healthy), columns);
        assert!(of(None).contains("LATE") && of(None).lines().any(|line| line.len() > 80));
        assert_eq!(of(Some(200)), of(None));
        let narrow = of(Some(70));
        assert!(narrow.lines().all(|line| line.len() <= 70), "{narrow}");
        assert!(narrow.contains("NAME") && narrow.contains("CRASHED") && narrow.contains("DONE"), "{narrow}");
        assert!(!narrow.contains("LATE"), "{narrow}");
        assert_eq!(
            of(None).lines().nth(1).unwrap().split_whitespace().nth(12),
            Some("-"),
            "there is no breaker"
        );
    }
}
