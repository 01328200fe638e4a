//! Implements `bulkhead status` and `bulkhead resize`. Also contains the formatting of values, events and tables that
//! other commands share, such as `top`, `crashes` and `jobs`. `requests` sends the requests, and `steer` implements the
//! commands that restart, drain or resume a bulkhead.

use std::cmp::Reverse;
use std::fmt::Display;
use std::io::{self, IsTerminal};
use std::time::Duration;

use bulkhead_api::{Adaptive, BreakerState, Bulkheads, Event, Snapshot, Tenant, Worker};
use comfy_table::{ColumnConstraint, ContentArrangement, Table, presets};
use hyper::Method;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::args::{Args, Resize, Sort, Status};
use crate::output::{self, Failure, escape, exit};
use crate::requests::{get, get_lines, parse_failure, percent_encoded, read_confirmation, request_with};
use crate::severity;

/// Number of events that `status NAME` shows.
const EVENTS_SHOWN: usize = 10;

pub(crate) async fn status(args: &Args, status: &Status) -> Result<u8, Failure> {
    match &status.name {
        Some(name) => status_of_one(args, name, status.tenant.as_deref()).await,
        None => status_of_all(args, status).await,
    }
}

async fn status_of_all(args: &Args, status: &Status) -> Result<u8, Failure> {
    let mut document: Value = get(args, "/v1/bulkheads").await?;
    let Bulkheads { bulkheads } = Bulkheads::deserialize(&document).map_err(|error| parse_failure(&error))?;
    let mut rows: Vec<(usize, Snapshot)> = bulkheads.into_iter().enumerate().collect();
    rows.retain(|(_, row)| !status.failed || severity::is_failed(row));
    let by_default = if args.json { None } else { Some(Sort::Trouble) };
    if let Some(order) = status.sort.or(by_default) {
        sort(&mut rows, order);
    }
    if args.json {
        document["bulkheads"] = rows.iter().map(|(index, _)| document["bulkheads"][*index].clone()).collect();
        output::json(&document)?;
        return Ok(exit::OK);
    }
    let rows: Vec<Snapshot> = rows.into_iter().map(|(_, row)| row).collect();
    output::line(&bulkhead_table(&rows, terminal_columns()))?;
    print_health_problems(&rows.iter().flat_map(health_problems).collect::<Vec<_>>())?;
    Ok(exit::OK)
}

fn sort(rows: &mut [(usize, Snapshot)], order: Sort) {
    let key = |row: &Snapshot| match order {
        Sort::Trouble => (Reverse(severity::rank(row)), Reverse(0)),
        Sort::Name => (Reverse((0, 0)), Reverse(0)),
        Sort::Queue => (Reverse((0, 0)), Reverse(row.queued)),
        Sort::Rejected => (Reverse((0, 0)), Reverse(row.rejections())),
    };
    rows.sort_by_cached_key(|(_, row)| (key(row), row.name.clone()));
}

async fn status_of_one(args: &Args, name: &str, tenant: Option<&str>) -> Result<u8, Failure> {
    let name = percent_encoded(name);
    let whose = tenant.map(|tenant| format!("?tenant={}", percent_encoded(tenant))).unwrap_or_default();
    let one: Value = get(args, &format!("/v1/bulkheads/{name}{whose}")).await?;
    let path = format!("/v1/events?bulkhead={name}&limit={EVENTS_SHOWN}&follow=false");
    let events = get_lines(args, &path).await?;
    if args.json {
        let mut one = one;
        one["events"] = events.iter().filter_map(|line| serde_json::from_str::<Value>(line).ok()).collect();
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
    events.iter().try_for_each(|line| print_event(args, line))?;
    Ok(exit::OK)
}

/// Requests a JSON document and prints it unchanged, including fields that this version does not know.
pub(crate) async fn print_json(args: &Args, path: &str) -> Result<u8, Failure> {
    output::json(&get::<Value>(args, path).await?)?;
    Ok(exit::OK)
}

/// Formats the state of a bulkhead's adaptive limit as a single line.
pub(crate) fn adaptive_line(adaptive: &Adaptive) -> String {
    let Adaptive { min, max, limit, limits, target_ms, raised, lowered, .. } = adaptive;
    let each = if *limits > 1 { format!(" for each of {limits} tenants") } else { String::new() };
    let latency = adaptive.latency_ms.map_or_else(|| "-".to_owned(), |ms| format!("{ms}ms"));
    format!(
        "adaptive  {} limit {limit} of {min}..{max}{each}  p90 {latency} target {target_ms}ms  raised {raised}  lowered {lowered}",
        shown(&adaptive.mode)
    )
}

/// Returns a line for each problem of an unhealthy bulkhead.
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

/// Escapes an untrusted value and formats it as a single line.
pub(crate) fn shown(value: &impl Display) -> String {
    escape(&value.to_string()).replace('\n', " ")
}

/// Formats a value like [`shown`]. Returns a dash if there is no value.
pub(crate) fn known(value: &Option<impl Display>) -> String {
    value.as_ref().map_or_else(|| "-".to_owned(), shown)
}

pub(crate) fn millis(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |ms| format!("{ms:.2}ms"))
}

/// Formats a duration without spaces, so that programs can split a line of output into columns.
pub(crate) fn short_duration(ms: u64) -> String {
    // Milliseconds are shown only for durations below one second.
    let ms = if ms < 1000 { ms } else { ms / 1000 * 1000 };
    humantime::format_duration(Duration::from_millis(ms)).to_string().replace(' ', "")
}

/// Formats the number of rejections per reason on one line. Returns `None` if there were none.
pub(crate) fn rejected_line(one: &Snapshot) -> Option<String> {
    let by: Vec<_> =
        one.rejected.iter().map(|(reason, count)| format!("{} {count}", shown(reason))).collect();
    (!by.is_empty()).then(|| format!("rejected  {}", by.join("  ")))
}

/// Formats additional information that has no column in the bulkhead table, one fact per line.
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

/// Returns the width of the terminal that standard output is connected to, if any.
fn terminal_columns() -> Option<usize> {
    let size = io::stdout().is_terminal().then(ratatui::crossterm::terminal::size)?;
    size.ok().map(|(columns, _)| usize::from(columns)).filter(|columns| *columns > 0)
}

/// Returns the state of a bulkhead's circuit breaker, or a dash if there is no breaker.
pub(crate) fn breaker(bulkhead: &Snapshot) -> String {
    let is_absent = !bulkhead.has_breaker && bulkhead.breaker == BreakerState::Closed;
    if is_absent { "-".to_owned() } else { shown(&bulkhead.breaker) }
}

/// Formats the bulkheads as a table. If the table is wider than the terminal, omits columns that contain only zeros,
/// from right to left, until it fits.
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

/// Columns of the worker table.
pub(crate) const WORKER_COLUMNS: [&str; 8] =
    ["PID", "STATE", "UPTIME", "INFLIGHT", "SERVED", "RESTARTS", "RSS", "LAST-EXIT"];

pub(crate) fn worker_cells(worker: &Worker) -> [String; 8] {
    [
        known(&worker.pid),
        if worker.spare && worker.state == "ready" { "spare".to_owned() } else { shown(&worker.state) },
        short_duration(worker.uptime_ms / 1000 * 1000),
        worker.in_flight.to_string(),
        worker.served.to_string(),
        worker.restarts.to_string(),
        known(&worker.rss_bytes.map(|bytes| format!("{:.1}MiB", bytes as f64 / 1_048_576.0))),
        known(&worker.last_exit),
    ]
}

/// Returns the supervisor's user ID if any confined worker runs under this ID.
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

// events

/// Prints an event on one line.
pub(crate) fn print_event(args: &Args, line: &str) -> Result<(), Failure> {
    if args.json {
        return output::json(line);
    }
    let Ok(event) = serde_json::from_str::<Event>(line) else { return Ok(()) };
    output::line(&format!("{} {}", shown(&event.at), event_words(&event)))
}

/// Formats an event on one line, without the time.
pub(crate) fn event_words(event: &Event) -> String {
    let severity = format!("{:8}", shown(&event.severity));
    let mut words = vec![severity, shown(&event.kind), known(&event.bulkhead)];
    let fields = event.fields.iter().filter(|(_, value)| !value.is_null());
    words.extend(fields.map(|(name, value)| format!("{}={}", escape(name), escape(&value.to_string()))));
    words.join(" ")
}

// resize

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
    let response = request_with(args, Method::PATCH, &path, body.clone()).await?;
    let confirmation = read_confirmation(response).await?;
    if args.json {
        output::json(confirmation)?;
    } else {
        output::line(&format!("{}: now in effect: {body}", escape(&resize.name)))?;
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
