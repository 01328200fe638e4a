//! Follows the event stream, and other streams together with it, across upgrades of the supervisor.

use bulkhead_api::Event;
use hyper::body::Incoming;
use hyper::{Method, Response};
use serde_json::Value;

use crate::args::Args;
use crate::output::{Failure, exit};
use crate::requests::{follow, request};

/// A line that arrived on a followed stream.
pub(crate) enum Line<'a> {
    /// An event, as text and in parsed form.
    Event(&'a str, &'a Event),
    /// A comment in the event stream, which reports missed events.
    Comment(&'a str),
    /// A line of another stream.
    Other(&'a str),
}

/// Position in the event stream.
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

/// Passes each event after number `last`, and each line of the streams that `others` opens, to `handle`. Connects to
/// the new program and calls `others` again if the streams end because of an upgrade. Returns when the streams end for
/// any other reason or when the user presses ^C.
pub(crate) async fn follow_across_upgrades(
    args: &Args,
    last: u64,
    mut others: impl AsyncFnMut() -> Result<Vec<Response<Incoming>>, Failure>,
    mut handle: impl FnMut(Line<'_>) -> Result<(), Failure>,
) -> Result<u8, Failure> {
    let mut progress = Progress { last, successor: None, is_upgraded: false };
    let mut connect = async |last: u64| {
        // A single response contains both the stored events after the last one and the new events, so that none are
        // lost. It contains the events of all bulkheads, because `upgrade_switched` belongs to no bulkhead.
        let path = format!("/v1/events?follow=true&since={last}");
        let mut responses = vec![request(args, Method::GET, &path).await?];
        responses.extend(others().await?);
        Ok::<_, Failure>(responses)
    };
    let mut responses = connect(last).await?;
    // Waits for ^C in a separate task, because a signal that arrives between two connections would otherwise be missed.
    let mut interrupt = tokio::spawn(tokio::signal::ctrl_c());
    loop {
        progress.is_upgraded = false;
        let code = follow(responses, |stream, line| match stream {
            0 => handle_event_line(line, &mut progress, &mut handle),
            _ => handle(Line::Other(line)),
        });
        let code = code.await?;
        if code != exit::OK || !progress.is_upgraded {
            return Ok(code);
        }
        // The new program continues the numbering of the events.
        let connected = tokio::select! {
            biased;
            _ = &mut interrupt => return Ok(exit::CANCELLED),
            connected = connect(progress.last) => connected,
        };
        responses = match connected {
            Err(failure) if failure.code() == exit::UNREACHABLE => return Ok(code),
            connected => connected?,
        };
    }
}

fn handle_event_line(
    line: &str,
    progress: &mut Progress,
    handle: &mut impl FnMut(Line<'_>) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let data = line.strip_prefix("data:").map(str::trim_start);
    let Some(data) = data.or_else(|| line.starts_with('{').then_some(line)) else {
        // All other lines without data are IDs or keep-alives.
        return line.strip_prefix(": ").map_or(Ok(()), |comment| handle(Line::Comment(comment)));
    };
    let Ok(event) = serde_json::from_str::<Event>(data) else { return Ok(()) };
    progress.note(&event);
    handle(Line::Event(data, &event))
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
