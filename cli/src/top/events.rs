//! Keeps the most recent events, formatted as lines. `sample` requests the events, and `draw` shows them. When the
//! supervisor is restarted, new events are appended to the events from before the restart.

use std::collections::VecDeque;

use bulkhead_api::{Severity, Word};
use serde::Deserialize;
use serde_json::Value;

use super::text::clean;
use crate::admin::event_words;

/// Maximum number of events to keep. The supervisor keeps the same number.
pub(super) const EVENTS_MAX: usize = 4096;

/// An event, formatted for display.
#[derive(Clone, Debug)]
pub(super) struct Event {
    pub(super) bulkhead: Option<String>,
    pub(super) severity: Word<Severity>,
    pub(super) line: String,
}

impl Event {
    /// Formats an event for display. Returns `None` if the event is malformed.
    pub(super) fn new(event: &Value) -> Option<Self> {
        let event = bulkhead_api::Event::deserialize(event).ok()?;
        // Shows only the time of day, to the second.
        let at = event.at.get(11..19).unwrap_or(&event.at);
        let line = clean(&format!("{at} {}", event_words(&event)));
        Some(Self { bulkhead: event.bulkhead.as_deref().map(clean), severity: event.severity, line })
    }
}

/// The most recent events, oldest first.
#[derive(Debug, Default)]
pub(super) struct Events {
    events: VecDeque<Event>,
}

impl Events {
    pub(super) fn add(&mut self, events: Vec<Event>) {
        self.events.extend(events);
        let surplus = self.events.len().saturating_sub(EVENTS_MAX);
        self.events.drain(..surplus);
    }

    /// Returns the last `count` events of `bulkhead`, or of all bulkheads.
    pub(super) fn newest(&self, count: usize, bulkhead: Option<&str>) -> Vec<&Event> {
        let is_wanted = |event: &&Event| bulkhead.is_none() || event.bulkhead.as_deref() == bulkhead;
        let mut newest: Vec<&Event> = self.events.iter().rev().filter(is_wanted).take(count).collect();
        newest.reverse();
        newest
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn event(seq: usize, bulkhead: &str) -> Event {
        let event = json!({
            "at": "2026-11-21T14:07:35.187Z", "seq": seq, "severity": "warning", "kind": "worker_exited",
            "bulkhead": bulkhead, "operation": "\u{1b}]0;x\u{7}\u{202e}", "report": null,
        });
        Event::new(&event).unwrap()
    }

    #[test]
    fn event_is_formatted_as_one_escaped_line() {
        let one = event(1, "b");
        assert!(one.line.starts_with("14:07:35 warning  worker_exited b operation="), "{}", one.line);
        assert!(one.line.is_ascii() && !one.line.contains(char::is_control), "{}", one.line);
        assert_eq!(one.severity, Severity::Warning);
        assert!(Event::new(&json!("x")).is_none());
        assert!(Event::new(&json!({"severity": "info", "at": "naïve 東京東京東京"})).is_some());
    }

    #[test]
    fn event_list_keeps_newest_events() {
        let mut events = Events::default();
        for seq in 0..EVENTS_MAX + 10 {
            events.add(vec![event(seq, if seq % 2 == 0 { "even" } else { "odd" })]);
        }
        assert_eq!(events.events.len(), EVENTS_MAX);
        assert_eq!(events.newest(3, None).len(), 3);
        let odd = events.newest(usize::MAX, Some("odd"));
        assert_eq!(odd.len(), EVENTS_MAX / 2);
        assert!(odd.iter().all(|event| event.bulkhead.as_deref() == Some("odd")));
    }
}
