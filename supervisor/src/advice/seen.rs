//! The numbers that advice rests on, derived from what both planes have counted.

use std::collections::BTreeMap;
use std::time::Duration;

use bulkhead_shared::RejectReason;
use serde::Serialize;

use super::{ENOUGH_JOBS, ENOUGH_TIME, SHRINK_AFTER};
use crate::config::format_duration;
use crate::demand::{Observation, Weights};

/// Reasons of rejections that more permits or more places in the queue would have spared.
const TURNED_AWAY: [RejectReason; 4] =
    [RejectReason::QueueFull, RejectReason::Backpressure, RejectReason::Shed, RejectReason::Evicted];

/// What workers used, as the control plane has looked at it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Work {
    /// Processor time of all of them.
    pub(crate) cpu_ms: u64,
    /// The most that one of them held; `None` if the memory of workers says nothing.
    pub(crate) rss_max_bytes: Option<u64>,
}

/// A distribution, by its marks.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Marks<T> {
    pub(crate) p50: T,
    pub(crate) p99: T,
    pub(crate) max: T,
}

/// Jobs that missed their deadline.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Late {
    pub(crate) queued: u64,
    pub(crate) running: u64,
    /// Those of them that ran and had as long as the bulkhead gives.
    #[serde(skip)]
    pub(crate) by_own: u64,
}

/// What was seen of a bulkhead. Shares of time are of the time in which it had jobs.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Seen {
    #[serde(skip)]
    pub(crate) watched: Duration,
    #[serde(skip)]
    pub(crate) was_changed: bool,
    #[serde(skip)]
    pub(crate) jobs: u64,
    /// How long there were jobs; summed over tenants, where they are apart.
    pub(crate) busy_ms: u64,
    /// Jobs in flight, under the numbers in force.
    pub(crate) concurrency: Marks<u64>,
    /// Jobs in flight and waiting together.
    pub(crate) demand: Marks<u64>,
    pub(crate) queued: Marks<u64>,
    /// Jobs that may be in flight.
    pub(crate) limit: u64,
    /// The share of time in which no permit was free, and in which workers were missing.
    pub(crate) time_at_limit: f64,
    pub(crate) time_short_of_workers: f64,
    /// How many jobs a worker had.
    pub(crate) ran: u64,
    pub(crate) queue_ms: Marks<f64>,
    pub(crate) run_ms: Marks<f64>,
    pub(crate) run_mean_ms: f64,
    pub(crate) rejected: BTreeMap<&'static str, u64>,
    pub(crate) deadline_exceeded: Late,
    /// Processors that a job in flight used; `None` if it is not known.
    pub(crate) processors_per_job: Option<f64>,
    pub(crate) rss_max_bytes: Option<u64>,
}

impl Seen {
    /// From what the data plane has counted and what its workers used.
    pub(crate) fn new(observation: &Observation, work: Work) -> Self {
        let [current, previous] = observation.windows.both();
        let whole = |of: fn(&crate::demand::Window) -> &Weights| of(current).clone().and(of(previous));
        let (run, wait) = (whole(|w| &w.run_us), whole(|w| &w.wait_us));
        let in_flight = whole(|w| &w.bound.in_flight);
        let busy_ns = in_flight.total();
        let sum = |of: fn(&crate::demand::Bound) -> u64| of(&current.bound) + of(&previous.bound);
        let in_flight_ms = (current.in_flight_ns + previous.in_flight_ns) as f64 / 1e6;
        let (now, base) = (&observation.counters, &observation.base);
        let late = now.deadline_exceeded.saturating_sub(base.deadline_exceeded);
        let running = sum(|b| b.late).min(late);
        let numbers = &observation.numbers;
        Self {
            watched: observation.watched,
            was_changed: observation.was_changed,
            jobs: now.submitted.saturating_sub(base.submitted),
            busy_ms: busy_ns / 1_000_000,
            concurrency: counts(&in_flight),
            demand: counts(&whole(|w| &w.demand)),
            queued: counts(&whole(|w| &w.queued)),
            limit: u64::from(numbers.processes) * u64::from(numbers.max_in_flight),
            time_at_limit: share(sum(|b| b.full_ns), busy_ns),
            time_short_of_workers: share(sum(|b| b.short_ns), busy_ns),
            ran: run.total(),
            queue_ms: millis(&wait),
            run_ms: millis(&run),
            run_mean_ms: rounded(in_flight_ms / run.total().max(1) as f64),
            rejected: rejected(&now.rejected, &base.rejected),
            deadline_exceeded: Late { queued: late - running, running, by_own: sum(|b| b.late_by_own) },
            processors_per_job: (in_flight_ms >= 1000.0).then(|| rounded(work.cpu_ms as f64 / in_flight_ms)),
            rss_max_bytes: work.rss_max_bytes,
        }
    }

    /// What there is too little of, for people.
    pub(super) fn missing(&self) -> Option<String> {
        let jobs = (self.jobs < ENOUGH_JOBS).then(|| format!("{} of {ENOUGH_JOBS} jobs", self.jobs));
        let time = (self.watched < ENOUGH_TIME).then(|| {
            let watched = format_duration(Duration::from_secs(self.watched.as_secs()));
            format!("{watched} of {}", format_duration(ENOUGH_TIME))
        });
        let missing: Vec<String> = jobs.into_iter().chain(time).collect();
        let since = if self.was_changed { " since its limits were changed" } else { "" };
        (!missing.is_empty()).then(|| format!("seen too little{since}: {}", missing.join(", ")))
    }

    /// Whether there was time enough to call something too much.
    pub(super) fn may_shrink(&self) -> bool {
        self.missing().is_none() && self.watched >= SHRINK_AFTER
    }

    /// Jobs that were turned away since there was no place for them, by reason.
    pub(super) fn turned_away_by(&self) -> impl Iterator<Item = (&'static str, u64)> {
        TURNED_AWAY.iter().filter_map(|reason| Some((reason.name(), *self.rejected.get(reason.name())?)))
    }

    /// How many.
    pub(super) fn turned_away(&self) -> u64 {
        self.turned_away_by().map(|(_, count)| count).sum()
    }

    /// Jobs that waited for nothing, by reason.
    fn waited_in_vain_by(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let timed_out = RejectReason::QueueTimeout.name();
        let late = Some(("deadline_exceeded/queued", self.deadline_exceeded.queued));
        let counted = [self.rejected.get(timed_out).map(|count| (timed_out, *count)), late];
        counted.into_iter().flatten().filter(|(_, count)| *count > 0)
    }

    /// How many.
    pub(super) fn waited_in_vain(&self) -> u64 {
        self.waited_in_vain_by().map(|(_, count)| count).sum()
    }

    /// All jobs that more permits would have served, by reason.
    pub(super) fn lost(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.turned_away_by().chain(self.waited_in_vain_by())
    }
}

fn counts(weights: &Weights) -> Marks<u64> {
    Marks { p50: weights.quantile(0.5), p99: weights.quantile(0.99), max: weights.max() }
}

fn millis(micros: &Weights) -> Marks<f64> {
    let Marks { p50, p99, max } = counts(micros);
    Marks { p50: p50 as f64 / 1e3, p99: p99 as f64 / 1e3, max: max as f64 / 1e3 }
}

/// A part of a whole.
fn share(part: u64, whole: u64) -> f64 {
    let share = if whole == 0 { 0.0 } else { (part as f64 / whole as f64).min(1.0) };
    rounded(share)
}

/// To four digits behind the point.
fn rounded(number: f64) -> f64 {
    (number * 1e4).round() / 1e4
}

fn rejected(now: &[u64], base: &[u64]) -> BTreeMap<&'static str, u64> {
    let count = |reason: &RejectReason| {
        let place = reason.code() as usize;
        let count = now.get(place)?.saturating_sub(base.get(place).copied().unwrap_or(0));
        (count > 0).then_some((reason.name(), count))
    };
    RejectReason::ALL.iter().filter_map(count).collect()
}
