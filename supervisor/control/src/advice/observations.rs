//! Computes the observations that advice is based on, from the counters of the data plane and from samples of the
//! workers' resource usage. Also determines if there are enough observations. `rules` proposes the values.

use std::collections::BTreeMap;
use std::time::Duration;

use bulkhead_api::{DeadlineMisses, Histogram, Marks, Observations, Text};
use bulkhead_shared::RejectReason;

use super::{LOWER_AFTER, SUFFICIENT_JOBS, SUFFICIENT_TIME};
use bulkhead_config::format_duration;
use bulkhead_plane::demand::Observation;

/// Reasons for rejecting jobs that would have been accepted with more permits or a longer queue.
const CAPACITY_REJECTIONS: [RejectReason; 4] =
    [RejectReason::QueueFull, RejectReason::Backpressure, RejectReason::Shed, RejectReason::Evicted];

/// Resource usage of a bulkhead's workers, sampled by the control plane.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ResourceUsage {
    /// Total processor time that all workers used between consecutive samples, in milliseconds.
    pub(crate) cpu_ms: u64,
    /// Number of samples of workers that had jobs since the previous sample.
    pub(crate) samples: u64,
    /// Number of samples, out of `samples`, that were preceded by another sample of the same worker. Only these
    /// contribute to `cpu_ms`.
    pub(crate) repeated_samples: u64,
    /// Largest resident size of any worker in bytes. `None` if no worker was measured, or if jobs do not run
    /// in the worker process itself.
    pub(crate) rss_max_bytes: Option<u64>,
}

/// Combines the counters of the data plane with the resource usage of the workers.
pub(crate) fn observations(observation: &Observation, usage: ResourceUsage) -> Observations {
    let [current, previous] = observation.windows.both();
    let whole =
        |of: fn(&bulkhead_plane::demand::Window) -> &Histogram| of(current).clone().merged(of(previous));
    let (run, wait) = (whole(|w| &w.run_us), whole(|w| &w.wait_us));
    let in_flight = whole(|w| &w.under_limits.in_flight);
    let busy_ns = in_flight.total();
    let sum = |of: fn(&bulkhead_plane::demand::LimitedWindow) -> u64| {
        of(&current.under_limits) + of(&previous.under_limits)
    };
    let in_flight_ms = (current.in_flight_ns + previous.in_flight_ns) as f64 / 1e6;
    let (now, base) = (&observation.counters, &observation.base);
    let late = now.deadline_exceeded.saturating_sub(base.deadline_exceeded);
    let running = sum(|b| b.deadline_misses).min(late);
    let limits = &observation.limits;
    Observations {
        watched: observation.duration,
        was_changed: observation.starts_with_change,
        jobs: now.submitted.saturating_sub(base.submitted),
        busy_ms: busy_ns / 1_000_000,
        concurrency: counts(&in_flight),
        demand: counts(&whole(|w| &w.demand)),
        queued: counts(&whole(|w| &w.queued)),
        limit: u64::from(limits.processes) * u64::from(limits.max_in_flight),
        time_at_limit: share(sum(|b| b.no_permit_ns), busy_ns),
        time_short_of_workers: share(sum(|b| b.workers_missing_ns), busy_ns),
        ran: run.total(),
        queue_ms: millis(&wait),
        run_ms: millis(&run),
        run_mean_ms: rounded(in_flight_ms / run.total().max(1) as f64),
        rejected: rejected(&now.rejected, &base.rejected),
        deadline_exceeded: DeadlineMisses {
            queued: late - running,
            running,
            by_own: sum(|b| b.own_deadline_misses),
        },
        processors_per_job: processors_per_job(usage, in_flight_ms),
        rss_max_bytes: usage.rss_max_bytes,
    }
}

/// Returns the average number of processors that a job in flight used. Returns `None` if jobs ran for less than a
/// second in total, or if most jobs ran in workers that exited before their second sample.
fn processors_per_job(usage: ResourceUsage, in_flight_ms: f64) -> Option<f64> {
    let ResourceUsage { cpu_ms, samples, repeated_samples, .. } = usage;
    let is_measured = repeated_samples > 0 && 2 * repeated_samples >= samples;
    let measured_ms = in_flight_ms * repeated_samples as f64 / samples.max(1) as f64;
    (in_flight_ms >= 1000.0 && is_measured).then(|| rounded(cpu_ms as f64 / measured_ms))
}

/// Returns a sentence that lists the observations still missing for reliable advice, or `None` if there are enough
/// observations.
pub(super) fn missing(seen: &Observations) -> Option<String> {
    let jobs = (seen.jobs < SUFFICIENT_JOBS).then(|| format!("{} of {SUFFICIENT_JOBS} jobs", seen.jobs));
    let time = (seen.watched < SUFFICIENT_TIME).then(|| {
        let watched = format_duration(Duration::from_secs(seen.watched.as_secs()));
        format!("{watched} of {}", format_duration(SUFFICIENT_TIME))
    });
    let missing: Vec<String> = jobs.into_iter().chain(time).collect();
    let since = if seen.was_changed { " since the limits were changed" } else { "" };
    (!missing.is_empty()).then(|| format!("not enough observations{since}: {}", missing.join(", ")))
}

/// Returns true if there are enough observations to propose a lower value for a limit.
pub(super) fn can_lower(seen: &Observations) -> bool {
    missing(seen).is_none() && seen.watched >= LOWER_AFTER
}

/// Returns the number of jobs that were rejected because there was no free permit or place in the queue, by reason.
pub(super) fn rejections_by_reason(seen: &Observations) -> impl Iterator<Item = (&'static str, u64)> {
    CAPACITY_REJECTIONS.iter().filter_map(|reason| Some((reason.name(), *seen.rejected.get(reason.name())?)))
}

/// Returns the total number of jobs that were rejected because there was no free permit or place in the queue.
pub(super) fn rejections(seen: &Observations) -> u64 {
    rejections_by_reason(seen).map(|(_, count)| count).sum()
}

/// Returns the number of jobs that waited in the queue but never ran, by reason.
fn expired_by_reason(seen: &Observations) -> impl Iterator<Item = (&'static str, u64)> {
    let timed_out = RejectReason::QueueTimeout.name();
    let late = Some(("deadline_exceeded/queued", seen.deadline_exceeded.queued));
    let counted = [seen.rejected.get(timed_out).map(|count| (timed_out, *count)), late];
    counted.into_iter().flatten().filter(|(_, count)| *count > 0)
}

/// Returns the total number of jobs that waited in the queue but never ran.
pub(super) fn expired(seen: &Observations) -> u64 {
    expired_by_reason(seen).map(|(_, count)| count).sum()
}

/// Returns the number of jobs that did not run but might have run with more permits, by reason.
pub(super) fn not_served(seen: &Observations) -> impl Iterator<Item = (&'static str, u64)> {
    rejections_by_reason(seen).chain(expired_by_reason(seen))
}

fn counts(weights: &Histogram) -> Marks<u64> {
    Marks { p50: weights.quantile(0.5), p99: weights.quantile(0.99), max: weights.max() }
}

fn millis(micros: &Histogram) -> Marks<f64> {
    let Marks { p50, p99, max } = counts(micros);
    Marks { p50: p50 as f64 / 1e3, p99: p99 as f64 / 1e3, max: max as f64 / 1e3 }
}

/// Returns `part` as a fraction of `whole`, at most 1.
fn share(part: u64, whole: u64) -> f64 {
    let share = if whole == 0 { 0.0 } else { (part as f64 / whole as f64).min(1.0) };
    rounded(share)
}

/// Rounds to four decimal places.
fn rounded(number: f64) -> f64 {
    (number * 1e4).round() / 1e4
}

fn rejected(now: &[u64], base: &[u64]) -> BTreeMap<Text, u64> {
    let count = |reason: &RejectReason| {
        let place = reason.code() as usize;
        let count = now.get(place)?.saturating_sub(base.get(place).copied().unwrap_or(0));
        (count > 0).then_some((reason.name().into(), count))
    };
    RejectReason::ALL.iter().filter_map(count).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_per_job_needs_workers_sampled_twice() {
        let of = |samples, repeated_samples| {
            let usage = ResourceUsage { cpu_ms: 6000, samples, repeated_samples, rss_max_bytes: None };
            processors_per_job(usage, 10_000.0)
        };
        assert_eq!((of(0, 0), of(10, 0), of(10, 4)), (None, None, None));
        assert_eq!(of(10, 10), Some(0.6));
        // The processor time of three quarters of the jobs was measured.
        assert_eq!(of(8, 6), Some(0.8));
        let short = ResourceUsage { cpu_ms: 600, samples: 9, repeated_samples: 8, rss_max_bytes: None };
        assert_eq!(processors_per_job(short, 999.0), None);
    }
}
