//! Implements `bulkhead events`, which prints stored and new events, filtered by bulkhead, kind, severity and time.

use std::time::SystemTime;

use bulkhead_api::{Event, Severity, Word};

use crate::admin::print_event;
use crate::args::{Args, Events};
use crate::output::{self, Failure, escape, exit};
use crate::requests::{follow, get_lines, percent_encoded, request};
use hyper::Method;
use serde_json::Value;

pub(crate) async fn run(args: &Args, events: &Events) -> Result<u8, Failure> {
    if let Some(name) = &events.bulkhead {
        // This request fails if the bulkhead does not exist.
        let name = percent_encoded(name);
        get_lines(args, &format!("/v1/events?follow=false&limit=1&bulkhead={name}")).await?;
    }
    let mut kept: Vec<(String, Option<Event>)> = get_lines(args, "/v1/events?follow=false")
        .await?
        .into_iter()
        .map(|line| {
            let event = serde_json::from_str(&line).ok();
            (line, event)
        })
        .collect();
    let last = kept.iter().rev().find_map(|(_, event)| Some(event.as_ref()?.seq)).unwrap_or(0);
    kept.retain(|(_, event)| event.as_ref().is_some_and(|event| is_wanted(events, event)));
    let surplus = kept.len().saturating_sub(events.lines.unwrap_or(usize::MAX));
    kept[surplus..].iter().try_for_each(|(line, _)| print_event(args, line))?;
    if !events.follow {
        return Ok(exit::OK);
    }
    let mut progress = Progress { last, successor: None, is_upgraded: false };
    // A single response contains both the stored events after the last one and the new events, so that none are lost.
    // It contains the events of all bulkheads, because `upgrade_switched` belongs to no bulkhead.
    let connect =
        async |last: u64| request(args, Method::GET, &format!("/v1/events?follow=true&since={last}")).await;
    let mut response = connect(last).await?;
    // Waits for ^C in a separate task, because a signal that arrives between two streams would otherwise be missed.
    let mut interrupt = tokio::spawn(tokio::signal::ctrl_c());
    loop {
        progress.is_upgraded = false;
        let code = follow(vec![response], |line| print_line(args, events, &mut progress, line)).await?;
        if code != exit::OK || !progress.is_upgraded {
            return Ok(code);
        }
        // The stream ended because an upgrade replaced the supervisor's program. The new program continues the
        // numbering of the events.
        let connected = tokio::select! {
            biased;
            _ = &mut interrupt => return Ok(exit::CANCELLED),
            connected = connect(progress.last) => connected,
        };
        response = match connected {
            Err(failure) if failure.code() == exit::UNREACHABLE => return Ok(code),
            connected => connected?,
        };
    }
}

/// State of a followed stream.
struct Progress {
    /// Sequence number of the last event received.
    last: u64,
    /// PID of the program that took over in the last upgrade.
    successor: Option<u64>,
    /// True if another program has taken over the admin API since the stream began.
    is_upgraded: bool,
}

impl Progress {
    fn note(&mut self, event: &Event) {
        self.last = event.seq;
        if event.kind == "upgrade_switched" {
            let pid = event.fields.get("pid").and_then(Value::as_u64);
            // Both the old and the new program report an upgrade. Only the old program's report announces the end of a
            // stream.
            self.is_upgraded |= pid != self.successor;
            self.successor = pid;
        }
    }
}

fn print_line(args: &Args, events: &Events, progress: &mut Progress, line: &str) -> Result<(), Failure> {
    let data = line.strip_prefix("data:").map(str::trim_start);
    let Some(data) = data.or_else(|| line.starts_with('{').then_some(line)) else {
        // A comment reports missed events. All other lines without data are IDs or keep-alives.
        if let Some(comment) = line.strip_prefix(": ") {
            output::to_stderr(&escape(comment));
        }
        return Ok(());
    };
    let Ok(event) = serde_json::from_str::<Event>(data) else { return Ok(()) };
    progress.note(&event);
    if is_wanted(events, &event) { print_event(args, data) } else { Ok(()) }
}

fn is_wanted(events: &Events, event: &Event) -> bool {
    let is_since = |since: SystemTime| humantime::parse_rfc3339(&event.at).is_ok_and(|at| at >= since);
    let is_severe = |least: Severity| match &event.severity {
        Word::Known(severity) => *severity >= least,
        // An event of unknown severity is shown, because it could be important.
        Word::Other(_) => true,
    };
    (events.bulkhead.is_none() || events.bulkhead == event.bulkhead)
        && (events.kind.is_empty() || events.kind.iter().any(|kind| *kind == event.kind))
        && events.severity.is_none_or(is_severe)
        && events.since.is_none_or(is_since)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn successors_report_of_its_own_upgrade_is_no_further_upgrade() {
        let mut progress = Progress { last: 0, successor: None, is_upgraded: false };
        let mut is_upgraded = |seq: u64, pid: u32| {
            let event = json!({"seq": seq, "kind": "upgrade_switched", "pid": pid});
            progress.is_upgraded = false;
            progress.note(&serde_json::from_value(event).unwrap());
            assert_eq!(progress.last, seq);
            progress.is_upgraded
        };
        assert!(is_upgraded(5, 700));
        assert!(!is_upgraded(9, 700));
        assert!(is_upgraded(12, 800));
    }
}
