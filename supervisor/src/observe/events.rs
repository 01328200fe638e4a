//! The ring of events: numbered, rendered once, kept for those who ask, sent to those who follow. A storm of one
//! kind in one bulkhead is told in part, with the number of the rest, and pushes out nothing but its own.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use serde_json::{Map, Value, json};
use tokio::sync::broadcast;

use crate::command::{Event, Severity};

/// Events that are kept.
pub const EVENTS_MAX: usize = 4096;

/// Log lines a second for one kind of event of one bulkhead; the ring may have more.
const LOG_LINES_PER_SECOND: u32 = 20;

/// Kinds that come with single jobs and workers, and so as often as those do. All others change what is the case,
/// and every one of them is told.
const FREQUENT: [&str; 12] = [
    "worker_started",
    "worker_ready",
    "worker_exited",
    "worker_killed",
    "worker_recycled",
    "restart_backoff",
    "job_timeout",
    "job_crashed",
    "job_retried",
    "queue_pressure",
    "tenant_throttled",
    "sandbox_violation",
];

/// Of a frequent kind: events of one bulkhead that are told at once, and a second in the long run.
const FREQUENT_BURST: u64 = 512;
const FREQUENT_PER_SECOND: u64 = 10;

/// How many were left out is told by the next event of the kind; if none comes for so long, by one of its own.
const UNTOLD_SECONDS_MAX: u64 = 2;

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

/// A kind, and whose events of it.
type Key = (&'static str, Option<Arc<str>>);

#[derive(Debug, Default)]
struct Ring {
    kept: BTreeMap<u64, Arc<Rendered>>,
    seq: u64,
    flows: HashMap<Key, Flow>,
}

/// The events of one kind of one bulkhead.
#[derive(Debug)]
struct Flow {
    /// Those that are kept, by number.
    kept: VecDeque<u64>,
    /// How many more may be told now.
    allowance: u64,
    /// How many were not told since the last one.
    suppressed: u64,
    /// The second of the last one, and the lines that were to be logged in it.
    second: u64,
    lines: u32,
}

impl Default for Flow {
    fn default() -> Self {
        Self { kept: VecDeque::new(), allowance: FREQUENT_BURST, suppressed: 0, second: 0, lines: 0 }
    }
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

    /// Takes an event in: numbers, renders, keeps, logs and sends it, unless there are too many of its kind.
    pub fn add(&self, mut event: Event) {
        let mut ring = self.lock();
        let Some(Admitted { suppressed, is_logged }) = ring.admit(&event) else { return };
        if suppressed > 0 {
            event.fields.push(("suppressed", json!(suppressed)));
        }
        let rendered = ring.keep(&event);
        // Nobody may be following.
        let _ = self.live.send(rendered);
        drop(ring);
        if is_logged {
            log(&event);
        }
    }

    /// Tells of storms that are over how many of their events were left out last.
    pub fn tell_suppressed(&self) {
        let at = SystemTime::now();
        let due = self.lock().take_untold(second_of(at));
        for ((kind, bulkhead), suppressed) in due {
            let fields = vec![("of", json!(kind)), ("suppressed", json!(suppressed))];
            self.add(Event { at, severity: Severity::Info, kind: "events_suppressed", bulkhead, fields });
        }
    }

    /// Forgets how often events of other bulkheads came. The events stay.
    pub fn keep_only(&self, bulkheads: &[String]) {
        let is_kept = |name: &str| bulkheads.iter().any(|kept| kept == name);
        self.lock()
            .flows
            .retain(|(_, name), flow| !flow.kept.is_empty() || name.as_deref().is_none_or(is_kept));
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
        let mut kept: Vec<_> = ring.kept.values().rev().filter(matches).take(limit).cloned().collect();
        kept.reverse();
        (kept, self.live.subscribe())
    }
}

/// An event that is told.
struct Admitted {
    /// How many before it were not.
    suppressed: u64,
    is_logged: bool,
}

impl Ring {
    /// Keeps a storm readable. `None`: the event is only counted.
    fn admit(&mut self, event: &Event) -> Option<Admitted> {
        let flow = self.flows.entry((event.kind, event.bulkhead.clone())).or_default();
        flow.turn_to(second_of(event.at), event);
        if FREQUENT.contains(&event.kind) {
            if flow.allowance == 0 {
                flow.suppressed += 1;
                return None;
            }
            flow.allowance -= 1;
        }
        flow.lines += 1;
        let is_logged = flow.lines <= LOG_LINES_PER_SECOND;
        Some(Admitted { suppressed: std::mem::take(&mut flow.suppressed), is_logged })
    }

    fn keep(&mut self, event: &Event) -> Arc<Rendered> {
        self.seq += 1;
        let (seq, bulkhead) = (self.seq, event.bulkhead.clone());
        let rendered = Arc::new(Rendered { seq, bulkhead: bulkhead.clone(), json: render(event, seq) });
        self.kept.insert(seq, rendered.clone());
        self.flows.entry((event.kind, bulkhead)).or_default().kept.push_back(seq);
        if self.kept.len() > EVENTS_MAX {
            self.drop_one();
        }
        rendered
    }

    /// Forgets the oldest of those that there are most of.
    fn drop_one(&mut self) {
        let weight =
            |flow: &&mut Flow| (flow.kept.len(), flow.kept.front().map(|seq| std::cmp::Reverse(*seq)));
        let oldest = self.flows.values_mut().max_by_key(weight).and_then(|flow| flow.kept.pop_front());
        if let Some(oldest) = oldest {
            self.kept.remove(&oldest);
        }
    }

    /// Those who have left something out and nothing has come since.
    fn take_untold(&mut self, second: u64) -> Vec<(Key, u64)> {
        let is_due =
            |flow: &Flow| flow.suppressed > 0 && second.saturating_sub(flow.second) >= UNTOLD_SECONDS_MAX;
        let due = self.flows.iter_mut().filter(|(_, flow)| is_due(flow));
        due.map(|(key, flow)| (key.clone(), std::mem::take(&mut flow.suppressed))).collect()
    }
}

impl Flow {
    /// A new second gives it more.
    fn turn_to(&mut self, second: u64, event: &Event) {
        if second == self.second {
            return;
        }
        let unlogged = self.lines.saturating_sub(LOG_LINES_PER_SECOND);
        if unlogged > 0 {
            let bulkhead = event.bulkhead.as_deref().unwrap_or("");
            tracing::warn!(
                kind = event.kind,
                bulkhead,
                suppressed = unlogged,
                "events were not logged one by one"
            );
        }
        let more = second.saturating_sub(self.second).saturating_mul(FREQUENT_PER_SECOND);
        self.allowance = self.allowance.saturating_add(more).min(FREQUENT_BURST);
        self.second = second;
        self.lines = 0;
    }
}

fn second_of(at: SystemTime) -> u64 {
    at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
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
        of_kind("limits_changed", bulkhead, text)
    }

    fn of_kind(kind: &'static str, bulkhead: &str, text: &str) -> Event {
        Event {
            at: SystemTime::now(),
            severity: Severity::Info,
            kind,
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

    fn kinds(events: &Events, bulkhead: &str) -> HashMap<String, usize> {
        let (kept, _) = events.follow(0, Some(bulkhead), usize::MAX);
        let mut counts = HashMap::new();
        for event in kept {
            let kind =
                serde_json::from_str::<Value>(&event.json).unwrap()["kind"].as_str().unwrap().to_owned();
            *counts.entry(kind).or_default() += 1;
        }
        counts
    }

    /// Ten minutes in which workers of one bulkhead die 600 times a second.
    #[test]
    fn a_storm_pushes_out_nothing_but_its_own() {
        let events = Events::default();
        let began = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000);
        for i in 0..50 {
            events.add(of_kind("worker_exited", "quiet", &i.to_string()));
            events.add(of_kind("breaker_opened", "storm", &i.to_string()));
        }
        for second in 0..600 {
            let at = began + std::time::Duration::from_secs(second);
            for _ in 0..600 {
                for kind in ["worker_started", "worker_ready", "worker_exited", "job_crashed"] {
                    events.add(Event { at, ..of_kind(kind, "storm", "") });
                }
            }
        }
        assert_eq!(kinds(&events, "quiet")["worker_exited"], 50);
        let storm = kinds(&events, "storm");
        assert_eq!(storm["breaker_opened"], 50);
        assert!(storm["worker_exited"] > 900, "{storm:?}");
        let (all, _) = events.follow(0, None, usize::MAX);
        assert_eq!(all.len(), EVENTS_MAX);
        assert!(all.is_sorted_by_key(|event| event.seq));
        // Told and counted together are all; what is not told yet is told when it is over.
        let numbers = all.last().unwrap().seq;
        assert!(numbers < 4 * (FREQUENT_BURST + 600 * FREQUENT_PER_SECOND) + 200, "{numbers}");
        events.tell_suppressed();
        let (after, _) = events.follow(numbers, None, usize::MAX);
        assert_eq!(after.len(), 4);
        for event in &after {
            let told: Value = serde_json::from_str(&event.json).unwrap();
            assert_eq!((&told["kind"], &told["bulkhead"]), (&"events_suppressed".into(), &"storm".into()));
            assert_eq!(told["suppressed"], 600 - FREQUENT_PER_SECOND);
        }
        events.tell_suppressed();
        assert!(events.follow(numbers + 4, None, usize::MAX).0.is_empty());
    }

    #[test]
    fn what_is_left_out_is_counted_by_the_next() {
        let events = Events::default();
        let told = FREQUENT_BURST as usize;
        let began = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000);
        let add = |seconds: u64| {
            let at = began + std::time::Duration::from_secs(seconds);
            events.add(Event { at, ..of_kind("job_timeout", "b", "") });
        };
        (0..told + 88).for_each(|_| add(0));
        assert_eq!(kinds(&events, "b")["job_timeout"], told);
        add(1);
        add(1);
        let (last, _) = events.follow(told as u64, None, usize::MAX);
        let suppressed =
            |place: usize| serde_json::from_str::<Value>(&last[place].json).unwrap()["suppressed"].clone();
        assert_eq!((last.len(), suppressed(0), suppressed(1)), (2, json!(88), Value::Null));
    }
}
