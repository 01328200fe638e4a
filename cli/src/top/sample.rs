//! Requests a supervisor's state and events over the admin API, and converts them to plain data with escaped text. Also
//! computes the rates between two samples. `top` and its non-interactive mode take the samples. `app` keeps the latest
//! sample, and `draw` shows it.

use std::time::{Duration, Instant};

use bulkhead_api::{Percentiles, Snapshot, Tenant};
use serde::Deserialize;
use serde_json::Value;

use super::events::{EVENTS_MAX, Event};
use super::text::clean;
use crate::admin::{adaptive_line, breaker, known, millis, rejected_line, shown, worker_cells};
use crate::args::Args;
use crate::output::Failure;
use crate::requests::{get, get_lines};
use crate::severity::rank;
use crate::target::Target;

/// State of all bulkheads at a point in time, and the events since the previous sample.
#[derive(Debug)]
pub(super) struct Sample {
    pub(super) at: Instant,
    pub(super) bulkheads: Vec<Bulkhead>,
    /// Events since the previous sample.
    pub(super) events: Vec<Event>,
    /// True if the supervisor has been restarted since the previous sample. A restart resets the counters.
    pub(super) was_restarted: bool,
}

/// Number of jobs by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Counts<T> {
    pub(super) ok: T,
    pub(super) rejected: T,
    pub(super) failed: T,
    /// Number of jobs that missed their deadline.
    pub(super) late: T,
    pub(super) crashed: T,
}

/// State of a bulkhead at the time of the sample.
#[derive(Clone, Debug)]
pub(super) struct Bulkhead {
    pub(super) name: String,
    pub(super) state: String,
    pub(super) service: String,
    /// Severity of the bulkhead's state, used to sort the table.
    pub(super) rank: (u8, u8),
    pub(super) detail: Option<String>,
    pub(super) service_cause: Option<String>,
    pub(super) in_flight: u64,
    pub(super) limit: u64,
    pub(super) queued: u64,
    pub(super) capacity: u64,
    pub(super) counts: Counts<u64>,
    /// Rates per second since the previous sample; `None` if unknown.
    pub(super) rates: Option<Counts<f64>>,
    pub(super) restarts: u64,
    pub(super) breaker: String,
    /// Median run time.
    pub(super) p50: String,
    pub(super) p99: String,
    /// Additional information to show on the bulkhead's page, one fact per line.
    pub(super) facts: Vec<String>,
    pub(super) tenants: Vec<Tenant>,
    pub(super) workers: Vec<Worker>,
}

/// A worker process.
#[derive(Clone, Debug)]
pub(super) struct Worker {
    pub(super) tenant: Option<String>,
    /// The worker's row in the worker table, one string per cell, as in `bulkhead status`.
    pub(super) cells: [String; 8],
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or(0)
}

impl Bulkhead {
    pub(super) fn new(snapshot: &Snapshot) -> Self {
        Self {
            name: clean(&snapshot.name),
            state: clean(&shown(&snapshot.state)),
            service: clean(&known(&snapshot.service)),
            rank: rank(snapshot),
            detail: snapshot.detail.as_deref().map(clean),
            service_cause: snapshot.service_cause.as_deref().map(clean),
            in_flight: snapshot.in_flight,
            limit: snapshot.limit,
            queued: snapshot.queued,
            capacity: snapshot.queue_capacity,
            counts: counts(snapshot),
            rates: None,
            restarts: snapshot.restarts,
            breaker: clean(&breaker(snapshot)),
            p50: millis(snapshot.latency_ms.run.p50),
            p99: millis(snapshot.latency_ms.run.p99),
            facts: facts(snapshot),
            tenants: snapshot.tenants.iter().map(tenant).collect(),
            workers: snapshot.workers.iter().map(worker).collect(),
        }
    }

    /// Returns the fraction of permits in use.
    pub(super) fn utilisation(&self) -> f64 {
        match (self.in_flight, self.limit) {
            (0, _) => 0.0,
            (_, 0) => 1.0,
            (used, limit) => used as f64 / limit as f64,
        }
    }
}

pub(super) fn counts(snapshot: &Snapshot) -> Counts<u64> {
    Counts {
        ok: snapshot.done,
        rejected: snapshot.rejections(),
        failed: snapshot.failed,
        late: snapshot.deadline_exceeded,
        crashed: snapshot.crashed,
    }
}

fn facts(snapshot: &Snapshot) -> Vec<String> {
    let Snapshot { submitted, done, failed, crashed, .. } = snapshot;
    let Snapshot { deadline_exceeded, cancelled, retries, quarantined, .. } = snapshot;
    let latency = |which: &str, Percentiles { p50, p90, p99, max }| {
        let [p50, p90, p99, max] = [p50, p90, p99, max].map(millis);
        format!("{which:9} p50 {p50}  p90 {p90}  p99 {p99}  max {max}")
    };
    let mut facts = vec![
        format!("jobs      submitted {submitted}  done {done}  failed {failed}  crashed {crashed}"),
        format!(
            "          deadline_exceeded {deadline_exceeded}  cancelled {cancelled}  retries {retries}  \
             quarantined {quarantined}"
        ),
        latency("run", snapshot.latency_ms.run),
        latency("queue", snapshot.latency_ms.queue),
    ];
    facts.extend(snapshot.adaptive.as_ref().map(|adaptive| clean(&adaptive_line(adaptive))));
    facts.extend(rejected_line(snapshot).as_deref().map(clean));
    facts
}

fn tenant(tenant: &Tenant) -> Tenant {
    Tenant { name: clean(&tenant.name), ..tenant.clone() }
}

fn worker(worker: &bulkhead_api::Worker) -> Worker {
    let tenant = worker.tenant.as_deref().map(clean);
    Worker { tenant, cells: worker_cells(worker).map(|cell| clean(&cell)) }
}

/// Returns the rates per second between two samples, or `None` if a counter was reset or no time has passed.
pub(super) fn rates(before: &Counts<u64>, now: &Counts<u64>, elapsed: Duration) -> Option<Counts<f64>> {
    let seconds = elapsed.as_secs_f64();
    let rate = |before: u64, now: u64| {
        let more = now.checked_sub(before)?;
        (seconds > 0.0).then(|| more as f64 / seconds)
    };
    Some(Counts {
        ok: rate(before.ok, now.ok)?,
        rejected: rate(before.rejected, now.rejected)?,
        failed: rate(before.failed, now.failed)?,
        late: rate(before.late, now.late)?,
        crashed: rate(before.crashed, now.crashed)?,
    })
}

/// The supervisor's responses for one sample.
pub(super) struct RawSample {
    pub(super) at: Instant,
    /// JSON documents that describe the bulkheads.
    pub(super) bulkheads: Vec<Value>,
    /// Snapshots that were parsed from `bulkheads`. A malformed document yields an empty snapshot.
    pub(super) snapshots: Vec<Snapshot>,
    pub(super) events: Vec<Value>,
    pub(super) was_restarted: bool,
}

/// Parses a snapshot. Returns an empty snapshot if the document is malformed.
fn parse_snapshot(document: &Value) -> Snapshot {
    Snapshot::deserialize(document).unwrap_or_default()
}

impl From<RawSample> for Sample {
    fn from(raw: RawSample) -> Self {
        Self {
            at: raw.at,
            bulkheads: raw.snapshots.iter().map(Bulkhead::new).collect(),
            events: raw.events.iter().filter_map(Event::new).collect(),
            was_restarted: raw.was_restarted,
        }
    }
}

/// Source of samples of the supervisor's state. Keeps the last event received, to detect a restart of the supervisor.
#[derive(Debug)]
pub(super) struct Sampler<'a> {
    args: &'a Args,
    last: Option<Value>,
}

impl<'a> Sampler<'a> {
    pub(super) fn new(args: &'a Args) -> Self {
        Self { args, last: None }
    }

    /// Returns the address of the supervisor.
    pub(super) fn target(&self) -> Result<Target, Failure> {
        self.args.target()
    }

    pub(super) async fn sample(&mut self) -> Result<Sample, Failure> {
        self.fetch().await.map(Sample::from)
    }

    pub(super) async fn fetch(&mut self) -> Result<RawSample, Failure> {
        let mut all: Value = get(self.args, "/v1/bulkheads").await?;
        let at = Instant::now();
        let bulkheads = match all["bulkheads"].take() {
            Value::Array(bulkheads) => bulkheads,
            _ => Vec::new(),
        };
        // The request includes the last known event, so that a restart of the supervisor can be detected.
        let since = self.last.as_ref().map_or(0, |event| number(&event["seq"]).saturating_sub(1));
        let (events, was_restarted) = match new_events(self.last.as_ref(), self.events(since).await?) {
            EventLog::Same(events) => (events, false),
            EventLog::Restarted => (self.events(0).await?, true),
        };
        if let Some(last) = events.last() {
            self.last = Some(last.clone());
        }
        let snapshots = bulkheads.iter().map(parse_snapshot).collect();
        Ok(RawSample { at, bulkheads, snapshots, events, was_restarted })
    }

    async fn events(&self, since: u64) -> Result<Vec<Value>, Failure> {
        let path = format!("/v1/events?since={since}&limit={EVENTS_MAX}&follow=false");
        let lines = get_lines(self.args, &path).await?;
        Ok(lines.iter().filter_map(|line| serde_json::from_str(line).ok()).collect())
    }
}

/// Result of reading the event log: either the new events, or a restart of the supervisor.
enum EventLog {
    /// The supervisor was not restarted. Contains the new events.
    Same(Vec<Value>),
    /// The supervisor was restarted, and event numbers start at 1 again.
    Restarted,
}

fn new_events(last: Option<&Value>, mut events: Vec<Value>) -> EventLog {
    let Some(last) = last else { return EventLog::Same(events) };
    match events.first() {
        // Only a restarted supervisor of an earlier version returns an empty list. Any other list contains at least the
        // newest event, which a supervisor always keeps.
        None => EventLog::Restarted,
        Some(first) if first == last => {
            events.remove(0);
            EventLog::Same(events)
        }
        // A restarted supervisor whose event numbers have not reached the last known number sends all its events.
        Some(first) if number(&first["seq"]) <= number(&last["seq"]) => EventLog::Restarted,
        // The last known event is missing, because the supervisor keeps only a limited number of events.
        Some(_) => EventLog::Same(events),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::json;

    use super::*;

    /// Creates a bulkhead from a document that may be malformed.
    pub(in super::super) fn bulkhead(document: &Value) -> Bulkhead {
        Bulkhead::new(&parse_snapshot(document))
    }

    #[test]
    fn malformed_snapshot_yields_default_values() {
        for odd in [json!({}), json!(null), json!({"workers": 3, "rejected": [], "limit": -1, "name": ["x"]})]
        {
            let bulkhead = bulkhead(&odd);
            assert_eq!((bulkhead.limit, bulkhead.workers.len(), bulkhead.utilisation()), (0, 0, 0.0));
        }
    }

    #[test]
    fn snapshot_text_contains_no_control_characters() {
        let evil = "\u{1b}[2J\n\u{202e}evil";
        let odd = json!({
            "name": evil, "state": evil, "service": evil, "detail": evil, "service_cause": evil, "breaker": evil, "rejected": {evil: 1},
            "tenants": [{"name": evil}],
            "workers": [{"tenant": evil, "state": evil, "last_exit": evil}],
        });
        let document = format!("{:#?}", bulkhead(&odd));
        assert!(
            !document.contains("\\u{1b}[2J\\n")
                && !document.contains('\u{202e}')
                && !document.contains('\u{1b}'),
            "{document}"
        );
        assert_eq!(document.matches("evil").count(), 11, "{document}");
        assert!(!format!("{:#?}", bulkhead(&json!({"name": "b", "done": evil}))).contains("evil"));
    }

    #[test]
    fn lower_counters_yield_no_rates() {
        let before = Counts { ok: 10, rejected: 5, failed: 0, late: 2, crashed: 1 };
        let now = Counts { ok: 30, rejected: 5, failed: 1, late: 5, crashed: 1 };
        let two = Duration::from_secs(2);
        assert_eq!(
            rates(&before, &now, two),
            Some(Counts { ok: 10.0, rejected: 0.0, failed: 0.5, late: 1.5, crashed: 0.0 })
        );
        assert_eq!(rates(&now, &before, two), None);
        assert_eq!(rates(&before, &Counts { ok: 100, ..Counts::default() }, two), None);
        assert_eq!(rates(&before, &now, Duration::ZERO), None);
    }

    #[test]
    fn utilisation_divides_in_flight_jobs_by_limit() {
        let share = |in_flight: u64, limit: u64| {
            bulkhead(&json!({"in_flight": in_flight, "limit": limit})).utilisation()
        };
        assert_eq!((share(0, 0), share(1, 0), share(1, 4), share(6, 4)), (0.0, 1.0, 0.25, 1.5));
    }

    #[test]
    fn event_log_detects_restarted_supervisor() {
        let event = |seq: u64, at: &str| json!({"seq": seq, "at": at});
        let last = event(7, "noon");
        let same = |events: Vec<Value>| match new_events(Some(&last), events) {
            EventLog::Same(events) => Some(events.len()),
            EventLog::Restarted => None,
        };
        assert_eq!(same(vec![event(7, "noon")]), Some(0));
        assert_eq!(same(vec![event(7, "noon"), event(8, "one")]), Some(1));
        assert_eq!(same(vec![event(90, "two"), event(91, "two")]), Some(2));
        assert_eq!(same(vec![]), None);
        assert_eq!(same(vec![event(7, "three")]), None);
        assert_eq!(same(vec![event(1, "three"), event(2, "three")]), None);
        assert!(
            matches!(new_events(None, vec![event(1, "noon")]), EventLog::Same(events) if events.len() == 1)
        );
    }
}
