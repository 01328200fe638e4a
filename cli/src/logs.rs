//! Implements `bulkhead logs`, which shows the output of the workers of one or more bulkheads, ordered by time.
//! Requests the lines from the admin API, and filters them by time and stream. The supervisor decides which lines are
//! stored. With `--follow`, also prints new lines as they arrive.

use std::time::SystemTime;

use bulkhead_api::{Bulkheads, LogLine};
use hyper::Method;

use crate::admin::shown;
use crate::args::{Args, LogFormat, Logs};
use crate::output::{self, Failure, exit};
use crate::requests::{follow, get, get_lines, percent_encoded, request};

/// Maximum number of bulkheads to follow. Each one needs a stream, and the supervisor permits 128 streams for all
/// clients together.
const FOLLOWED_MAX: usize = 64;

/// A stored log line, as text and in parsed form.
type StoredLine = (String, LogLine);

pub(crate) async fn run(args: &Args, logs: &Logs) -> Result<u8, Failure> {
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
    let mut lines = Vec::new();
    // For each bulkhead, the path from which to request the lines that follow the stored lines.
    let mut rest = Vec::new();
    for name in names {
        let path = format!("/v1/bulkheads/{}/logs", percent_encoded(&name));
        let stored = match stored_lines(args, &path, logs).await {
            Ok(stored) => stored,
            // The bulkhead has been removed since the list of bulkheads was fetched.
            Err(failure) if logs.names.is_empty() && failure.code() == exit::NOT_FOUND => continue,
            Err(failure) => return Err(failure),
        };
        let last = stored.iter().filter_map(|(_, line)| line.seq).max().unwrap_or(0);
        rest.push(format!("{path}?follow=true&since={last}"));
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
    let mut responses = Vec::new();
    for path in rest {
        responses.push(request(args, Method::GET, &path).await?);
    }
    follow(responses, |text| match serde_json::from_str::<LogLine>(text) {
        Ok(line) if is_wanted(logs, &line) => print(args, logs, text, &line),
        _ => Ok(()),
    })
    .await
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
