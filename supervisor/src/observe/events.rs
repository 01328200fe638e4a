//! The ring of events: numbered, rendered once, kept for those who ask, sent to those who follow.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use serde_json::{Map, Value, json};
use tokio::sync::broadcast;

use crate::command::{Event, Severity};

/// Events that are kept.
pub const EVENTS_MAX: usize = 4096;

/// Log lines a second for one kind of event of one bulkhead; the ring has them all.
const LOG_LINES_PER_SECOND: u32 = 20;

/// One event, rendered.
#[derive(Debug)]
pub struct Rendered {
    /// Its number; the first is 1.
    pub seq: u64,
    /// Whose it is, if anybody's.
    pub bulkhead: Option<Arc<str>>,
    /// One JSON object, without a line's end.
    pub json: String,
}

/// The ring.
#[derive(Debug)]
pub struct Events {
    ring: Mutex<Ring>,
    live: broadcast::Sender<Arc<Rendered>>,
}

type LogKey = (&'static str, Option<Arc<str>>);

#[derive(Debug, Default)]
struct Ring {
    kept: VecDeque<Arc<Rendered>>,
    seq: u64,
    /// For each kind and bulkhead: the second, and the lines logged in it.
    logged: HashMap<LogKey, (u64, u32)>,
}

impl Default for Events {
    fn default() -> Self {
        Self { ring: Mutex::default(), live: broadcast::channel(1024).0 }
    }
}

impl Events {
    fn lock(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes an event in: numbers, renders, keeps, logs and sends it.
    pub fn add(&self, event: Event) {
        let mut ring = self.lock();
        ring.seq += 1;
        let seq = ring.seq;
        let rendered =
            Arc::new(Rendered { seq, bulkhead: event.bulkhead.clone(), json: render(&event, seq) });
        ring.kept.push_back(rendered.clone());
        if ring.kept.len() > EVENTS_MAX {
            ring.kept.pop_front();
        }
        let is_logged = ring.may_log(&event);
        // Nobody may be following.
        let _ = self.live.send(rendered);
        drop(ring);
        if is_logged {
            log(&event);
        }
    }

    /// Forgets how often events of other bulkheads were logged. The events stay.
    pub fn keep_only(&self, bulkheads: &[String]) {
        let is_kept = |name: &str| bulkheads.iter().any(|kept| kept == name);
        self.lock().logged.retain(|(_, name), _| name.as_deref().is_none_or(is_kept));
    }

    /// The events after `since`, the newest `limit` of them, and the way to those that come. There is
    /// neither a gap nor a repetition between the two.
    pub fn follow(
        &self,
        since: u64,
        bulkhead: Option<&str>,
        limit: usize,
    ) -> (Vec<Arc<Rendered>>, broadcast::Receiver<Arc<Rendered>>) {
        let ring = self.lock();
        let matches = |event: &&Arc<Rendered>| {
            event.seq > since && bulkhead.is_none_or(|name| event.bulkhead.as_deref() == Some(name))
        };
        let mut kept: Vec<_> = ring.kept.iter().rev().filter(matches).take(limit).cloned().collect();
        kept.reverse();
        (kept, self.live.subscribe())
    }
}

impl Ring {
    /// Keeps a storm readable.
    fn may_log(&mut self, event: &Event) -> bool {
        let since_epoch = event.at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let second = since_epoch.as_secs();
        let entry = self.logged.entry((event.kind, event.bulkhead.clone())).or_default();
        if entry.0 != second {
            let suppressed = entry.1.saturating_sub(LOG_LINES_PER_SECOND);
            if suppressed > 0 {
                let bulkhead = event.bulkhead.as_deref().unwrap_or("");
                tracing::warn!(kind = event.kind, bulkhead, suppressed, "events were not logged one by one");
            }
            *entry = (second, 0);
        }
        entry.1 += 1;
        entry.1 <= LOG_LINES_PER_SECOND
    }
}

/// RFC 3339, in UTC, with milliseconds.
pub fn rfc3339(at: SystemTime) -> String {
    humantime::format_rfc3339_millis(at).to_string()
}

fn render(event: &Event, seq: u64) -> String {
    let mut object = Map::new();
    object.insert("at".into(), json!(rfc3339(event.at)));
    object.insert("seq".into(), json!(seq));
    object.insert("severity".into(), json!(event.severity));
    object.insert("kind".into(), json!(event.kind));
    object.insert("bulkhead".into(), json!(event.bulkhead.as_deref()));
    for (name, value) in &event.fields {
        object.insert((*name).into(), value.clone());
    }
    line(&Value::Object(object))
}

/// JSON in one line that no terminal obeys.
pub fn line(value: &Value) -> String {
    escaped(&value.to_string())
}

/// The same JSON without a control character: JSON itself escapes only the first half of them.
pub(super) fn escaped(json: &str) -> String {
    let mut line = String::new();
    for c in json.chars() {
        match c.is_control() {
            // Never outside of a string.
            true => line.push_str(&format!("\\u{:04x}", u32::from(c))),
            false => line.push(c),
        }
    }
    line
}

fn log(event: &Event) {
    let bulkhead = event.bulkhead.as_deref();
    let mut text = event.kind.to_owned();
    for (name, value) in &event.fields {
        if !value.is_null() {
            text.push_str(&format!(" {name}={}", line(value)));
        }
    }
    match event.severity {
        Severity::Info => tracing::info!(target: "bulkhead", bulkhead, "{text}"),
        Severity::Warning => tracing::warn!(target: "bulkhead", bulkhead, "{text}"),
        Severity::Critical => tracing::error!(target: "bulkhead", bulkhead, "{text}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(bulkhead: &str, text: &str) -> Event {
        Event {
            at: SystemTime::now(),
            severity: Severity::Info,
            kind: "worker_started",
            bulkhead: Some(bulkhead.into()),
            fields: vec![("text", json!(text))],
        }
    }

    #[test]
    fn the_ring_is_bounded_and_numbers_go_on() {
        let events = Events::default();
        for i in 0..EVENTS_MAX + 10 {
            events.add(event(if i % 2 == 0 { "a" } else { "b" }, "x"));
        }
        let (all, _) = events.follow(0, None, usize::MAX);
        assert_eq!(all.len(), EVENTS_MAX);
        assert_eq!(all[0].seq, 11);
        let (some, mut live) = events.follow(EVENTS_MAX as u64, Some("a"), usize::MAX);
        assert_eq!(some.len(), 5);
        let hostile = "\u{1b}[31m\u{9b}31m\u{7f}<script>";
        events.add(event("a", hostile));
        let next = live.try_recv().unwrap();
        assert_eq!(next.seq, EVENTS_MAX as u64 + 11);
        assert!(!next.json.contains(char::is_control), "{}", next.json);
        assert_eq!(serde_json::from_str::<Value>(&next.json).unwrap()["text"], hostile);
    }
}
