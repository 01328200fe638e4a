//! Stores recent events in a ring buffer in memory, and logs them. The control plane adds each event, and followers
//! read the ring at their own pace. The events of one kind in one bulkhead are a flow. In a flow of a frequent kind,
//! excess events are only counted. A full ring evicts the oldest event of the largest flow.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use axum::body::Bytes;
use bulkhead_api::{EventKind, Severity};
use serde_json::{Map, Value, json};
use tokio::sync::{Notify, watch};

use super::logging;
use bulkhead_plane::command::Event;

/// Maximum number of events kept in memory.
pub const EVENTS_MAX: usize = 4096;

/// Maximum number of log lines per second for each kind of event in each bulkhead. Events above this rate are stored
/// but not logged.
const LOG_LINES_PER_SECOND: u32 = 20;

/// Rate limit for frequent kinds of events, applied to each kind in each bulkhead: the burst size, and the
/// number of events per second.
const FREQUENT_BURST: u64 = 512;
const FREQUENT_PER_SECOND: u64 = 10;

/// Time, in seconds, after which a separate event reports the number of suppressed events. If another event of the same
/// kind occurs earlier, the number is reported in that event instead.
const UNREPORTED_SECONDS_MAX: u64 = 2;

/// Delay between a new event and the wake-up of its readers, so that events in quick succession are delivered together.
const WAKE_DELAY: Duration = Duration::from_millis(50);

/// Maximum number of events in a [`Piece`].
const PIECE_EVENTS_MAX: usize = 64;

/// A rendered event.
#[derive(Debug)]
pub struct Rendered {
    /// Sequence number of the event, starting at 1.
    seq: u64,
    /// Name of the bulkhead that the event concerns, if any.
    bulkhead: Option<Arc<str>>,
    /// The event in the format of server-sent events, with the sequence number as its ID.
    frame: Bytes,
    /// Offset in `frame` at which the event's JSON object begins, in bytes.
    json: usize,
}

impl Rendered {
    fn new(event: &Event, seq: u64) -> Self {
        Self::from_json(&render(event, seq), seq, event.bulkhead.clone())
    }

    fn from_json(json: &str, seq: u64, bulkhead: Option<Arc<str>>) -> Self {
        let head = format!("id: {seq}\ndata: ");
        let frame = format!("{head}{json}\n\n").into();
        Self { seq, bulkhead, frame, json: head.len() }
    }

    fn renumbered(&self, increment: u64) -> Self {
        let seq = self.seq + increment;
        // The pattern matches only the field itself, because quotation marks inside texts are escaped.
        let (old, new) = (format!("\"seq\":{}", self.seq), format!("\"seq\":{seq}"));
        let json = String::from_utf8_lossy(self.json()).replacen(&old, &new, 1);
        Self::from_json(&json, seq, self.bulkhead.clone())
    }

    /// Returns the event as a JSON object, without a newline.
    pub fn json(&self) -> &[u8] {
        &self.frame[self.json..self.frame.len() - 2]
    }

    /// Returns the event in the format of server-sent events, without an event type.
    pub fn frame(&self) -> &Bytes {
        &self.frame
    }

    fn is_of(&self, bulkhead: Option<&str>) -> bool {
        bulkhead.is_none_or(|name| self.bulkhead.as_deref() == Some(name))
    }
}

/// The ring of events.
#[derive(Debug)]
pub struct Events {
    ring: Mutex<EventRing>,
    /// Notified when an event has been added and its readers must be woken.
    new_events: Notify,
    /// Sequence number of the newest event about which readers have been notified.
    announced: watch::Sender<u64>,
}

/// A reader of events. Keeps track of its read position.
#[derive(Debug)]
pub struct Reader {
    bulkhead: Option<String>,
    /// Sequence number of the last event that the reader has received or skipped.
    last_seq: u64,
    /// Sequence number of the newest event at the time when the reader was created. Events up to this number do not
    /// count as missed if they have been evicted.
    joined: u64,
    announced: watch::Receiver<u64>,
}

/// A group of events that are delivered to a reader together.
#[derive(Debug, Default)]
pub struct Piece {
    /// Number of events that were evicted before this reader received them, including events of other bulkheads.
    pub missed: u64,
    /// Delivered events, oldest first.
    pub events: Vec<Arc<Rendered>>,
}

/// Name of an event kind and name of a bulkhead. Each pair identifies a flow of events.
type FlowKey = (&'static str, Option<Arc<str>>);

#[derive(Debug, Default)]
struct EventRing {
    kept: BTreeMap<u64, Arc<Rendered>>,
    seq: u64,
    flows: HashMap<FlowKey, EventFlow>,
}

/// A flow of events, which consists of all events of one kind in one bulkhead. Each flow has a separate rate limit.
#[derive(Debug)]
struct EventFlow {
    /// Sequence numbers of the events that are still in memory.
    kept: VecDeque<u64>,
    /// Number of events that the rate limit still allows to be stored.
    allowance: u64,
    /// Number of events suppressed since an event was last stored.
    suppressed: u64,
    /// Time of the last event, in seconds since 1970, and the number of events stored in that second.
    second: u64,
    lines: u32,
}

impl Default for EventFlow {
    fn default() -> Self {
        Self { kept: VecDeque::new(), allowance: FREQUENT_BURST, suppressed: 0, second: 0, lines: 0 }
    }
}

impl Default for Events {
    fn default() -> Self {
        Self { ring: Mutex::default(), new_events: Notify::new(), announced: watch::channel(0).0 }
    }
}

impl Events {
    fn lock(&self) -> MutexGuard<'_, EventRing> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores and logs an event. An event that exceeds the rate limit is counted but not stored.
    pub fn add(&self, mut event: Event) {
        let mut ring = self.lock();
        let Some(Admitted { suppressed, is_logged }) = ring.admit(&event) else { return };
        if suppressed > 0 {
            event.suppressed = Some(suppressed);
        }
        ring.keep(&event);
        drop(ring);
        self.new_events.notify_one();
        if is_logged {
            log(&event);
        }
    }

    /// Returns the sequence number of the newest event.
    pub fn last_number(&self) -> u64 {
        self.lock().seq
    }

    /// Continues the numbering of events after `number`, which follows the last number that the previous supervisor
    /// used. Also changes the numbers of the stored events, which no client can have read before the upgrade.
    pub fn continue_after(&self, number: u64) {
        self.lock().add_to_numbers(number);
    }

    /// Adds an event for each kind and bulkhead whose suppressed events have not been reported yet. The event contains
    /// their number. Skips kinds of events that occurred recently.
    pub fn report_suppressed(&self) {
        let due = self.lock().take_unreported(second_of(SystemTime::now()));
        for ((kind, bulkhead), suppressed) in due {
            let what = EventKind::EventsSuppressed { of: kind.into(), suppressed };
            self.add(Event::new(Severity::Info, bulkhead, what));
        }
    }

    /// Removes the records of flows in bulkheads that are not in `bulkheads`. Keeps the record of a flow if any of the
    /// flow's events are still in memory.
    pub fn keep_only(&self, bulkheads: &HashSet<&str>) {
        let is_kept = |name: &str| bulkheads.contains(name);
        self.lock()
            .flows
            .retain(|(_, name), flow| !flow.kept.is_empty() || name.as_deref().is_none_or(is_kept));
    }

    /// Returns events with sequence numbers greater than `since`. If there are more than `limit`, only the
    /// newest are returned.
    pub fn kept(&self, since: u64, bulkhead: Option<&str>, limit: usize) -> Vec<Arc<Rendered>> {
        let ring = self.lock();
        let mut kept: Vec<_> = ring.newest(since, bulkhead).take(limit).cloned().collect();
        kept.reverse();
        kept
    }

    /// Returns a reader that first delivers the events after the sequence number `since`, but at most the newest
    /// `limit`. It then delivers all later events, without gaps or duplicates.
    pub fn reader(&self, since: u64, bulkhead: Option<String>, limit: usize) -> Reader {
        self.wake_readers();
        let ring = self.lock();
        let joined = ring.seq;
        let first = ring.newest(since, bulkhead.as_deref()).take(limit).last();
        let last_seq = first.map_or(joined, |first| first.seq - 1);
        drop(ring);
        Reader { bulkhead, last_seq, joined, announced: self.announced.subscribe() }
    }

    /// Wakes readers when new events arrive, at most once per `WAKE_DELAY`.
    pub async fn wake_readers_periodically(&self) {
        loop {
            self.new_events.notified().await;
            tokio::time::sleep(WAKE_DELAY).await;
            self.wake_readers();
        }
    }

    /// Wakes readers immediately if there are new events.
    pub fn wake_readers(&self) {
        let newest = self.lock().seq;
        self.announced.send_if_modified(|announced| {
            // Several threads call this function, and the announced number must never decrease.
            let is_new = *announced < newest;
            *announced = newest.max(*announced);
            is_new
        });
    }
}

impl Reader {
    /// Waits until there are new events for this reader, and returns them.
    pub async fn next(&mut self, events: &Events) -> Piece {
        loop {
            // The value is marked as seen before the ring is read, so that no wake-up is lost.
            if *self.announced.borrow_and_update() > self.last_seq {
                let piece = self.take(&events.lock());
                if piece.missed > 0 || !piece.events.is_empty() {
                    return piece;
                }
            } else if self.announced.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    fn take(&mut self, ring: &EventRing) -> Piece {
        let mut piece = Piece::default();
        for (seq, event) in ring.kept.range(self.last_seq + 1..) {
            if piece.events.len() == PIECE_EVENTS_MAX {
                return piece;
            }
            piece.missed += self.skip_to(seq - 1);
            self.last_seq = *seq;
            if event.is_of(self.bulkhead.as_deref()) {
                piece.events.push(event.clone());
            }
        }
        piece.missed += self.skip_to(ring.seq);
        piece
    }

    /// Advances the reader past evicted events, up to and including event `seq`. Returns the number of events that this
    /// reader missed.
    fn skip_to(&mut self, seq: u64) -> u64 {
        let missed = seq.saturating_sub(self.last_seq.max(self.joined));
        self.last_seq = self.last_seq.max(seq);
        missed
    }
}

/// Information about an event that passed the rate limit.
struct Admitted {
    /// Number of events of the same kind that were suppressed immediately before this event.
    suppressed: u64,
    is_logged: bool,
}

impl EventRing {
    /// Applies the rate limit to an event. Returns `None` if the event is suppressed.
    fn admit(&mut self, event: &Event) -> Option<Admitted> {
        let flow = self.flows.entry((event.kind.name(), event.bulkhead.clone())).or_default();
        flow.advance_to(second_of(event.at), (event.kind.name(), event.bulkhead.as_deref()));
        if event.kind.is_frequent() {
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

    fn keep(&mut self, event: &Event) {
        self.seq += 1;
        self.kept.insert(self.seq, Arc::new(Rendered::new(event, self.seq)));
        self.flows.entry((event.kind.name(), event.bulkhead.clone())).or_default().kept.push_back(self.seq);
        if self.kept.len() > EVENTS_MAX {
            self.evict_one();
        }
    }

    fn add_to_numbers(&mut self, increment: u64) {
        self.seq += increment;
        let kept = std::mem::take(&mut self.kept).into_values();
        self.kept =
            kept.map(|event| (event.seq + increment, Arc::new(event.renumbered(increment)))).collect();
        for flow in self.flows.values_mut() {
            flow.kept.iter_mut().for_each(|seq| *seq += increment);
        }
    }

    /// Returns the sequence number after which a client continues. If `last_seen` is above the newest number, it comes
    /// from an earlier supervisor, and the client has seen none of the stored events.
    fn since(&self, last_seen: u64) -> u64 {
        if last_seen > self.seq { 0 } else { last_seen }
    }

    /// Returns the events whose sequence numbers are above `since`, newest first.
    fn newest(&self, since: u64, bulkhead: Option<&str>) -> impl Iterator<Item = &Arc<Rendered>> {
        let after = self.since(since).saturating_add(1);
        self.kept.range(after..).rev().map(|(_, event)| event).filter(move |event| event.is_of(bulkhead))
    }

    /// Evicts an event from memory. Selects the flow with the most events in memory, and evicts the oldest event of
    /// this flow.
    fn evict_one(&mut self) {
        let weight =
            |flow: &&mut EventFlow| (flow.kept.len(), flow.kept.front().map(|seq| std::cmp::Reverse(*seq)));
        let oldest = self.flows.values_mut().max_by_key(weight).and_then(|flow| flow.kept.pop_front());
        if let Some(oldest) = oldest {
            self.kept.remove(&oldest);
        }
    }

    /// Returns the flows (each a kind of event in a bulkhead) that have unreported suppressed events, with the number
    /// of these events. Omits flows that had an event within the last `UNREPORTED_SECONDS_MAX`.
    fn take_unreported(&mut self, second: u64) -> Vec<(FlowKey, u64)> {
        for ((kind, bulkhead), flow) in &mut self.flows {
            if flow.second < second {
                flow.report_unlogged((kind, bulkhead.as_deref()));
            }
        }
        let is_due = |flow: &EventFlow| {
            flow.suppressed > 0 && second.saturating_sub(flow.second) >= UNREPORTED_SECONDS_MAX
        };
        let due = self.flows.iter_mut().filter(|(_, flow)| is_due(flow));
        due.map(|(key, flow)| (key.clone(), std::mem::take(&mut flow.suppressed))).collect()
    }
}

impl EventFlow {
    /// Advances a flow to the given second. For each second that has passed, increases the number of events that can be
    /// stored.
    fn advance_to(&mut self, second: u64, key: (&'static str, Option<&str>)) {
        if second == self.second {
            return;
        }
        self.report_unlogged(key);
        let more = second.saturating_sub(self.second).saturating_mul(FREQUENT_PER_SECOND);
        self.allowance = self.allowance.saturating_add(more).min(FREQUENT_BURST);
        self.second = second;
    }

    fn report_unlogged(&mut self, (kind, bulkhead): (&'static str, Option<&str>)) {
        let unlogged = std::mem::take(&mut self.lines).saturating_sub(LOG_LINES_PER_SECOND);
        if unlogged > 0 {
            let bulkhead = bulkhead.unwrap_or("");
            tracing::warn!(
                kind,
                bulkhead,
                suppressed = unlogged,
                "events were not logged because too many occurred"
            );
        }
    }
}

fn second_of(at: SystemTime) -> u64 {
    at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Formats a time in UTC with milliseconds, as in RFC 3339.
pub fn rfc3339(at: SystemTime) -> String {
    humantime::format_rfc3339_millis(at).to_string()
}

fn render(event: &Event, seq: u64) -> String {
    let document = bulkhead_api::Event {
        at: rfc3339(event.at),
        seq,
        severity: event.severity.into(),
        kind: event.kind.name().into(),
        bulkhead: event.bulkhead.as_deref().map(str::to_owned),
        fields: event.fields().into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
    };
    line(&json!(document))
}

/// Formats a JSON value as a single line without control characters.
pub fn line(value: &Value) -> String {
    bulkhead_shared::text::escape_json(&value.to_string())
}

fn log(event: &Event) {
    if logging::is_json() {
        return log_json(event);
    }
    let bulkhead = event.bulkhead.as_deref();
    let mut text = event.kind.name().to_owned();
    for (name, value) in &event.fields() {
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

/// Logs an event as a JSON object whose top-level fields are the event's fields. The log message is the event's
/// `message` field or, if there is none, the kind of the event.
fn log_json(event: &Event) {
    let level = match event.severity {
        Severity::Info if tracing::enabled!(target: "bulkhead", tracing::Level::INFO) => tracing::Level::INFO,
        Severity::Warning if tracing::enabled!(target: "bulkhead", tracing::Level::WARN) => {
            tracing::Level::WARN
        }
        Severity::Critical if tracing::enabled!(target: "bulkhead", tracing::Level::ERROR) => {
            tracing::Level::ERROR
        }
        _ => return,
    };
    let mut fields = Map::new();
    fields.insert("message".into(), json!(event.kind.name()));
    fields.insert("kind".into(), json!(event.kind.name()));
    if let Some(bulkhead) = &event.bulkhead {
        fields.insert("bulkhead".into(), json!(&**bulkhead));
    }
    let own = event.fields().into_iter().filter(|(_, value)| !value.is_null());
    fields.extend(own.map(|(name, value)| (log_field_name(name), value)));
    logging::write_json(&level, "bulkhead", fields);
}

/// Returns the name to use for an event's field in a log line. Adds a prefix if every log line already has a field with
/// this name.
fn log_field_name(name: &str) -> String {
    if logging::LINE_FIELDS.contains(&name) { format!("event_{name}") } else { name.to_owned() }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn event(bulkhead: &str, text: &str) -> Event {
        of_kind("limits_changed", bulkhead, text)
    }

    fn of_kind(kind: &'static str, bulkhead: &str, text: &str) -> Event {
        let what = bulkhead_api::Event { kind: kind.into(), ..Default::default() }.event_kind();
        let event = Event::new(Severity::Info, Some(bulkhead.into()), what);
        Event { stderr_tail: Some(text.to_owned()), ..event }
    }

    #[test]
    fn full_event_ring_discards_oldest_events() {
        let events = Events::default();
        for i in 0..EVENTS_MAX + 10 {
            events.add(event(if i % 2 == 0 { "a" } else { "b" }, "x"));
        }
        let all = events.kept(0, None, usize::MAX);
        assert_eq!(all.len(), EVENTS_MAX);
        assert_eq!(all[0].seq, 11);
        assert_eq!(events.kept(EVENTS_MAX as u64, Some("a"), usize::MAX).len(), 5);
        let hostile = "\u{1b}[31m\u{9b}31m\u{7f}<script>";
        events.add(event("a", hostile));
        let newest = &events.kept(0, None, 1)[0];
        assert_eq!(newest.seq, EVENTS_MAX as u64 + 11);
        let json = std::str::from_utf8(newest.json()).unwrap();
        assert!(!json.contains(char::is_control), "{json}");
        assert_eq!(announced(newest)["stderr_tail"], hostile);
        assert_eq!(newest.frame(), format!("id: {}\ndata: {json}\n\n", newest.seq).as_bytes());
    }

    fn announced(event: &Rendered) -> Value {
        serde_json::from_slice(event.json()).unwrap()
    }

    /// Reads all events that are immediately available to a reader. Returns their sequence numbers, and the number of
    /// events that the reader missed.
    fn read(reader: &mut Reader, events: &Events) -> (Vec<u64>, u64) {
        events.wake_readers();
        let mut context = Context::from_waker(Waker::noop());
        let (mut numbers, mut missed) = (Vec::new(), 0);
        while let Poll::Ready(piece) = pin!(reader.next(events)).poll(&mut context) {
            assert!(piece.events.len() <= PIECE_EVENTS_MAX);
            numbers.extend(piece.events.iter().map(|event| event.seq));
            missed += piece.missed;
        }
        (numbers, missed)
    }

    #[test]
    fn event_reader_receives_stored_and_new_events() {
        let events = Events::default();
        let add = |count: usize| (0..count).for_each(|i| events.add(event(["a", "b"][i % 2], "")));
        let ever = |numbers: std::ops::RangeInclusive<u64>| (numbers.collect::<Vec<_>>(), 0);
        let mut early = events.reader(0, None, usize::MAX);
        assert_eq!(read(&mut early, &events), (vec![], 0));
        add(300);
        let mut of_b = events.reader(290, Some("b".into()), usize::MAX);
        let mut newest = events.reader(0, None, 2);
        let mut none = events.reader(0, None, 0);
        assert_eq!(read(&mut early, &events), ever(1..=300));
        assert_eq!(read(&mut of_b, &events), (vec![292, 294, 296, 298, 300], 0));
        assert_eq!(read(&mut newest, &events), ever(299..=300));
        add(1);
        assert_eq!(read(&mut of_b, &events), (vec![], 0));
        add(2);
        for reader in [&mut early, &mut newest, &mut none] {
            assert_eq!(read(reader, &events), ever(301..=303));
            assert_eq!(read(reader, &events), (vec![], 0));
        }
        assert_eq!(read(&mut of_b, &events), (vec![303], 0));
    }

    #[test]
    fn events_before_an_upgrade_get_new_numbers() {
        let events = Events::default();
        ["\"seq\":1", "b"].into_iter().for_each(|name| events.add(event(name, "")));
        events.continue_after(500);
        events.add(event("b", ""));
        let kept = events.kept(0, None, usize::MAX);
        let numbers: Vec<_> = kept.iter().map(|event| announced(event)["seq"].as_u64().unwrap()).collect();
        assert_eq!(numbers, [501, 502, 503]);
        assert!(
            kept.iter()
                .zip(numbers)
                .all(|(event, seq)| event.frame().starts_with(format!("id: {seq}\n").as_bytes()))
        );
        assert_eq!(announced(&kept[0])["bulkhead"], "\"seq\":1");
        assert_eq!(read(&mut events.reader(501, Some("b".into()), usize::MAX), &events), (vec![502, 503], 0));
    }

    #[test]
    fn client_of_an_earlier_supervisor_receives_all_stored_events() {
        let events = Events::default();
        (0..3).for_each(|_| events.add(event("a", "")));
        assert_eq!(events.kept(1_000_000, None, usize::MAX).len(), 3);
        assert_eq!(read(&mut events.reader(4, None, usize::MAX), &events), (vec![1, 2, 3], 0));
        assert_eq!(read(&mut events.reader(3, None, usize::MAX), &events), (vec![], 0));
    }

    #[test]
    fn slow_reader_receives_number_of_missed_events() {
        let events = Events::default();
        let add = |count: usize| (0..count).for_each(|_| events.add(event("a", "")));
        add(10);
        let (mut early, mut of_b) =
            (events.reader(0, None, usize::MAX), events.reader(0, Some("b".into()), usize::MAX));
        add(EVENTS_MAX + 5);
        // The first ten events were added before the reader was created, so they do not count as missed.
        let (numbers, missed) = read(&mut early, &events);
        assert_eq!((numbers.len(), numbers[0], missed), (EVENTS_MAX, 16, 5));
        assert_eq!(read(&mut of_b, &events), (vec![], 5));
        assert_eq!(read(&mut early, &events), (vec![], 0));
        let mut late = events.reader(0, None, usize::MAX);
        assert_eq!(read(&mut late, &events).1, 0);
    }

    #[tokio::test]
    async fn events_in_same_interval_arrive_together() {
        let events = Arc::new(Events::default());
        let mut reader = events.reader(0, None, usize::MAX);
        tokio::spawn({
            let events = events.clone();
            async move { events.wake_readers_periodically().await }
        });
        for round in 0..3 {
            for _ in 0..4 {
                events.add(event("a", ""));
                tokio::task::yield_now().await;
            }
            let piece = reader.next(&events).await;
            assert_eq!((piece.events.len(), piece.missed), (4, 0), "{round}");
        }
    }

    fn kinds(events: &Events, bulkhead: &str) -> HashMap<String, usize> {
        let mut counts = HashMap::new();
        for event in events.kept(0, Some(bulkhead), usize::MAX) {
            *counts.entry(announced(&event)["kind"].as_str().unwrap().to_owned()).or_default() += 1;
        }
        counts
    }

    /// Simulates a bulkhead in which 600 workers die per second for ten minutes.
    #[test]
    fn event_storm_evicts_only_its_own_events() {
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
        let all = events.kept(0, None, usize::MAX);
        assert_eq!(all.len(), EVENTS_MAX);
        assert!(all.is_sorted_by_key(|event| event.seq));
        // Every event is either delivered or counted as suppressed. Suppressed events that no later event has reported
        // are reported by a separate event.
        let numbers = all.last().unwrap().seq;
        assert!(numbers < 4 * (FREQUENT_BURST + 600 * FREQUENT_PER_SECOND) + 200, "{numbers}");
        events.report_suppressed();
        let after = events.kept(numbers, None, usize::MAX);
        assert_eq!(after.len(), 4);
        for event in &after {
            let announced = announced(event);
            assert_eq!(
                (&announced["kind"], &announced["bulkhead"]),
                (&"events_suppressed".into(), &"storm".into())
            );
            assert_eq!(announced["suppressed"], 600 - FREQUENT_PER_SECOND);
        }
        events.report_suppressed();
        assert!(events.kept(numbers + 4, None, usize::MAX).is_empty());
    }

    #[test]
    fn next_event_reports_number_of_suppressed_events() {
        let events = Events::default();
        let at_once = FREQUENT_BURST as usize;
        let began = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000);
        let add = |seconds: u64| {
            let at = began + std::time::Duration::from_secs(seconds);
            events.add(Event { at, ..of_kind("job_timeout", "b", "") });
        };
        (0..at_once + 88).for_each(|_| add(0));
        assert_eq!(kinds(&events, "b")["job_timeout"], at_once);
        add(1);
        add(1);
        let last = events.kept(at_once as u64, None, usize::MAX);
        let suppressed = |place: usize| announced(&last[place])["suppressed"].clone();
        assert_eq!((last.len(), suppressed(0), suppressed(1)), (2, json!(88), Value::Null));
    }
}
