//! Implements `bulkhead events`, which prints stored and new events, filtered by bulkhead, kind, severity and time.

use std::time::SystemTime;

use bulkhead_api::{Event, Severity, Word};

use crate::admin::print_event;
use crate::args::{Args, Events};
use crate::follow::{Line, follow_across_upgrades};
use crate::output::{self, Failure, escape, exit};
use crate::requests::{get_lines, percent_encoded};

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
    follow_across_upgrades(
        args,
        last,
        async || Ok(Vec::new()),
        |line| match line {
            Line::Event(json, event) if is_wanted(events, event) => print_event(args, json),
            Line::Comment(comment) => {
                output::to_stderr(&escape(comment));
                Ok(())
            }
            Line::Event(..) | Line::Other(_) => Ok(()),
        },
    )
    .await
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
