//! Implements `bulkhead logs`, which shows the output of the workers of one or more bulkheads, ordered by time.
//! Requests the lines from the admin API, and filters them by time and stream. The supervisor decides which lines are
//! stored. With `--follow`, also prints new lines as they arrive.

use std::time::SystemTime;

use bulkhead_api::{Bulkheads, Event, LogLine};
use hyper::Method;

use crate::admin::shown;
use crate::args::{Args, LogFormat, Logs};
use crate::follow::{Line, follow_across_upgrades};
use crate::output::{self, Failure, exit};
use crate::requests::{get, get_lines, percent_encoded, request};

/// Maximum number of bulkheads to follow. Each one needs a stream, as do the events, and the supervisor permits 128
/// streams for all clients together.
const FOLLOWED_MAX: usize = 64;

/// A stored log line, as text and in parsed form.
type StoredLine = (String, LogLine);

pub(crate) async fn run(args: &Args, logs: &Logs) -> Result<u8, Failure> {
    let names = bulkhead_names(args, logs).await?;
    // Read before the lines, so that an upgrade in the meantime is noticed.
    let last_event = if logs.follow { last_event(args).await? } else { 0 };
    let mut lines = Vec::new();
    // The paths from which to request the lines that follow the stored lines.
    let mut rest = Vec::new();
    for name in names {
        let path = path_of(&name);
        let Some(stored) = unless_removed(logs, stored_lines(args, &path, logs).await)? else { continue };
        let last = stored.iter().filter_map(|(_, line)| line.seq).max().unwrap_or(0);
        rest.push(path_since(&path, last));
        lines.extend(stored);
    }
    lines.retain(|(_, line)| is_wanted(logs, line));
    // Compares the times as text, because they all have the same format. The sort is stable.
    lines.sort_by(|(_, a), (_, b)| a.at.cmp(&b.at));
    let surplus = lines.len().saturating_sub(logs.lines.unwrap_or(usize::MAX));
    lines[surplus..].iter().try_for_each(|(text, line)| print(args, logs, text, line))?;
    if !logs.follow {
        return Ok(exit::OK);
    }
    let mut rest = Some(rest);
    let connect = async || {
        let paths = match rest.take() {
            Some(rest) => rest,
            // The streams ended because of an upgrade. The new program stores only new lines, numbered from 1.
            None => {
                let names = bulkhead_names(args, logs).await?;
                names.iter().map(|name| path_since(&path_of(name), 0)).collect::<Vec<_>>()
            }
        };
        let mut responses = Vec::new();
        for path in paths {
            responses.extend(unless_removed(logs, request(args, Method::GET, &path).await)?);
        }
        Ok(responses)
    };
    follow_across_upgrades(args, last_event, connect, |line| match line {
        Line::Other(text) => match serde_json::from_str::<LogLine>(text) {
            Ok(line) if is_wanted(logs, &line) => print(args, logs, text, &line),
            _ => Ok(()),
        },
        Line::Event(..) | Line::Comment(_) => Ok(()),
    })
    .await
}

/// Returns the bulkheads named on the command line, or all bulkheads.
async fn bulkhead_names(args: &Args, logs: &Logs) -> Result<Vec<String>, Failure> {
    let mut names = logs.names.clone();
    if names.is_empty() {
        let Bulkheads { bulkheads } = get(args, "/v1/bulkheads").await?;
        names = bulkheads.into_iter().map(|bulkhead| bulkhead.name).collect();
    }
    names.sort();
    names.dedup();
    if logs.follow && names.len() > FOLLOWED_MAX {
        let count = names.len();
        let message = format!(
            "--follow cannot follow {count} bulkheads at once: name at most {FOLLOWED_MAX} bulkheads"
        );
        return Err(Failure::new(exit::USAGE, message));
    }
    Ok(names)
}

fn path_of(name: &str) -> String {
    format!("/v1/bulkheads/{}/logs", percent_encoded(name))
}

fn path_since(path: &str, last: u64) -> String {
    format!("{path}?follow=true&since={last}")
}

/// Returns the number of the newest event.
async fn last_event(args: &Args) -> Result<u64, Failure> {
    let lines = get_lines(args, "/v1/events?follow=false&limit=1").await?;
    let newest = lines.iter().rev().find_map(|line| serde_json::from_str::<Event>(line).ok());
    Ok(newest.map_or(0, |event| event.seq))
}

/// Returns `None` if a bulkhead that is not named on the command line has been removed since the bulkheads were listed.
fn unless_removed<T>(logs: &Logs, result: Result<T, Failure>) -> Result<Option<T>, Failure> {
    match result {
        Err(failure) if logs.names.is_empty() && failure.code() == exit::NOT_FOUND => Ok(None),
        result => result.map(Some),
    }
}

async fn stored_lines(args: &Args, path: &str, logs: &Logs) -> Result<Vec<StoredLine>, Failure> {
    let has_filter = logs.since.is_some() || logs.until.is_some() || logs.stream.is_some();
    let limit = logs.lines.filter(|_| !has_filter).map(|limit| format!("?limit={}", limit.max(1)));
    let lines = get_lines(args, &format!("{path}{}", limit.unwrap_or_default())).await?;
    let parsed = lines.into_iter().filter_map(|text| {
        let line = serde_json::from_str(&text).ok()?;
        Some((text, line))
    });
    Ok(parsed.collect())
}

fn is_wanted(logs: &Logs, line: &LogLine) -> bool {
    let is_within = |limit: Option<SystemTime>, test: fn(&SystemTime, &SystemTime) -> bool| {
        limit.is_none_or(|limit| humantime::parse_rfc3339(&line.at).is_ok_and(|at| test(&at, &limit)))
    };
    let is_of_stream =
        logs.stream.is_none_or(|stream| line.dropped.is_some() || line.stream == stream.name());
    is_of_stream && is_within(logs.since, SystemTime::ge) && is_within(logs.until, SystemTime::le)
}

fn print(args: &Args, logs: &Logs, text: &str, line: &LogLine) -> Result<(), Failure> {
    if args.json {
        return output::json(text);
    }
    let (bulkhead, at) = (shown(&line.bulkhead), shown(&line.at));
    if let Some(count) = line.dropped {
        output::to_stderr(&format!(
            "{at} {bulkhead}: {count} lines of output were skipped because output arrived too fast"
        ));
        return Ok(());
    }
    match logs.format {
        LogFormat::Cat => output::line(&shown(&line.line)),
        LogFormat::Short => {
            let (stream, text) = (shown(&line.stream), shown(&line.line));
            output::line(&format!("{at} {bulkhead}[{}] {stream}: {text}", line.pid))
        }
    }
}
