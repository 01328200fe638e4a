//! Records the demand for a bulkhead over the last one to two hours. This includes how many jobs were in flight and
//! queued, weighted by time, and how long jobs waited and ran. In the data plane, recording takes a few nanoseconds per
//! iteration and per job. The control plane computes advice from these values on another thread.

use std::time::Duration;

use bulkhead_api::Histogram;
use bulkhead_policy::{AdaptiveMode, Bulkhead, Counters, Limits, Time};

use crate::windows::WindowPair;

/// Load of a compartment, which is a bulkhead or an isolated tenant. The values have not changed since `since`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Load {
    since: Time,
    in_flight: u32,
    queued: u32,
    /// True if a new job of normal priority would have to wait or be rejected.
    has_no_permit: bool,
    /// True if fewer workers are running than configured.
    lacks_workers: bool,
}

impl Load {
    /// Returns the current load of a compartment.
    pub fn of<T>(policy: &Bulkhead<T>, now: Time) -> Self {
        Self {
            since: now,
            in_flight: policy.permits_held(),
            queued: u32::try_from(policy.queued()).unwrap_or(u32::MAX),
            has_no_permit: policy.is_full(),
            lacks_workers: policy.is_short_of_workers(),
        }
    }
}

/// Observations of one time window. If tenants are isolated, the observed times of all tenants are added up, because
/// `processes`, `max_in_flight` and `max_queue` apply to each tenant separately. Time without jobs is not recorded,
/// because an idle night says nothing about demand during the day.
#[derive(Clone, Debug, Default)]
pub struct Window {
    /// Distribution of the number of jobs in flight or queued, weighted by time in nanoseconds.
    pub demand: Histogram,
    /// Distribution of the number of queued jobs, weighted by time in nanoseconds.
    pub queued: Histogram,
    /// Distribution of run times, in microseconds.
    pub run_us: Histogram,
    /// Distribution of queue times, in microseconds.
    pub wait_us: Histogram,
    /// Time that jobs spent in flight, summed over all jobs, in nanoseconds.
    pub in_flight_ns: u128,
    /// Observations since the limits last changed.
    pub under_limits: LimitedWindow,
}

/// Observations that are valid only for the current limits. They are discarded when the limits change.
#[derive(Clone, Debug, Default)]
pub struct LimitedWindow {
    /// Distribution of the number of jobs in flight, weighted by time in nanoseconds. The total weight is the
    /// time during which the bulkhead had jobs.
    pub in_flight: Histogram,
    /// Total time during which the bulkhead had jobs and no permit was free although all workers were running, in
    /// nanoseconds.
    pub no_permit_ns: u64,
    /// Total time during which the bulkhead had jobs but fewer workers than configured were running, in nanoseconds.
    pub workers_missing_ns: u64,
    /// Number of jobs that missed their deadline while running.
    pub deadline_misses: u64,
    /// Number of jobs that missed the bulkhead's default deadline while running.
    pub own_deadline_misses: u64,
    /// Counters at the beginning of the window.
    base: Counters,
}

/// Values of `processes`, `max_in_flight`, `max_queue`, and of `adaptive.max` if the adaptive limit is enforced.
pub type Sizes = (u32, u32, u32, Option<u32>);

/// Demand for a bulkhead in the current and the previous hour.
#[derive(Default)]
pub struct Demand {
    windows: WindowPair<Window>,
    /// Time at which recording began.
    started_at: Time,
    /// Time at which the limits last changed.
    changed_at: Option<Time>,
    sizes: Sizes,
}

impl Demand {
    /// Creates a record that contains no observations yet.
    pub fn new(now: Time, limits: &Limits) -> Self {
        let mut demand = Self { started_at: now, sizes: sizes_of(limits), ..Self::default() };
        demand.windows.roll(now);
        demand
    }

    /// Returns true if the caller must call [`Self::update`], either because the window has ended or because the limits
    /// have changed.
    #[inline]
    pub fn is_due(&self, now: Time, limits: &Limits) -> bool {
        self.windows.is_over(now) || self.sizes != sizes_of(limits)
    }

    /// Starts a new window if the current window is over. If the limits have changed, discards observations that depend
    /// on the old limits. `counters` contains the bulkhead's current counters.
    pub fn update(&mut self, now: Time, sizes: Sizes, counters: Counters) {
        if self.windows.is_over(now) {
            self.windows.roll(now);
            self.windows.current.under_limits.base = counters.clone();
            // If the previous window has no observations, its base counters are outdated too.
            let previous = &mut self.windows.previous;
            if previous.demand.total() == 0 {
                previous.under_limits.base = counters.clone();
            }
        }
        if self.sizes != sizes {
            self.sizes = sizes;
            self.changed_at = Some(now);
            self.windows.previous.under_limits =
                LimitedWindow { base: counters.clone(), ..LimitedWindow::default() };
            self.windows.current.under_limits = LimitedWindow { base: counters, ..LimitedWindow::default() };
        }
    }

    /// Records that a compartment had this load from `load.since` until `now`.
    #[inline]
    pub fn record_load(&mut self, load: Load, now: Time) {
        let ns = u64::try_from(now.since(load.since).as_nanos()).unwrap_or(u64::MAX);
        let demand = u64::from(load.in_flight) + u64::from(load.queued);
        if ns == 0 || demand == 0 {
            return;
        }
        let window = &mut self.windows.current;
        window.demand.record(demand, ns);
        window.queued.record(load.queued.into(), ns);
        window.in_flight_ns += u128::from(load.in_flight) * u128::from(ns);
        window.under_limits.in_flight.record(load.in_flight.into(), ns);
        if load.lacks_workers {
            window.under_limits.workers_missing_ns += ns;
        } else if load.has_no_permit {
            window.under_limits.no_permit_ns += ns;
        }
    }

    /// Records the run time and the queue time of a job that ran.
    #[inline]
    pub fn record_run(&mut self, ran: Duration, waited: Duration) {
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.windows.current.run_us.record(micros(ran), 1);
        self.windows.current.wait_us.record(micros(waited), 1);
    }

    /// Records a job that missed its deadline or run limit while running. `is_own_deadline` is true if the job had the
    /// bulkhead's default deadline.
    #[inline]
    pub fn record_deadline_miss(&mut self, is_own_deadline: bool) {
        let under_limits = &mut self.windows.current.under_limits;
        under_limits.deadline_misses += 1;
        under_limits.own_deadline_misses += u64::from(is_own_deadline);
    }

    /// Returns all observations. The caller must call [`Self::update`] first.
    pub fn observation(&self, now: Time, limits: &Limits, counters: Counters) -> Observation {
        let since = self.windows.began().max(self.started_at).max(self.changed_at.unwrap_or(Time::ZERO));
        let current = CurrentLimits {
            processes: limits.processes,
            max_in_flight: limits.max_in_flight,
            max_queue: limits.max_queue,
            queue_timeout: limits.queue_timeout,
            deadline: limits.deadline,
            deadline_max: limits.deadline_max,
        };
        Observation {
            duration: now.since(since),
            starts_with_change: self.changed_at.is_some_and(|at| at >= since),
            base: self.windows.previous.under_limits.base.clone(),
            counters,
            windows: self.windows.clone(),
            limits: current,
            adaptive: None,
        }
    }
}

/// Returns the limits on which the observations in a [`LimitedWindow`] depend.
pub fn sizes_of(limits: &Limits) -> Sizes {
    let enforced = limits.adaptive.as_ref().filter(|adaptive| adaptive.mode == AdaptiveMode::Enforce);
    (limits.processes, limits.max_in_flight, limits.max_queue, enforced.map(|adaptive| adaptive.max))
}

/// Limits that sizing advice can propose to change. If tenants are isolated, the limits apply to each tenant
/// separately.
#[derive(Clone, Debug)]
pub struct CurrentLimits {
    pub processes: u32,
    pub max_in_flight: u32,
    pub max_queue: u32,
    pub queue_timeout: Option<Duration>,
    pub deadline: Duration,
    pub deadline_max: Duration,
}

/// Observed demand for a bulkhead. Another thread uses the observations to compute sizing advice.
#[derive(Debug)]
pub struct Observation {
    /// Length of the observation period, which begins no earlier than the last change to the limits.
    pub duration: Duration,
    /// True if the observation period began when the limits were changed.
    pub starts_with_change: bool,
    /// Counters at the beginning (`base`) and at the end (`counters`) of the observation period.
    pub base: Counters,
    pub counters: Counters,
    pub windows: WindowPair<Window>,
    pub limits: CurrentLimits,
    /// State of the adaptive limit, or `None` if the bulkhead has no adaptive limit.
    pub adaptive: Option<bulkhead_api::Adaptive>,
}

#[cfg(test)]
mod tests {
    use bulkhead_policy::AdaptiveLimits;

    use super::*;

    fn at(seconds: u64) -> Time {
        Time::ZERO + Duration::from_secs(seconds)
    }

    fn load(since: u64, in_flight: u32, queued: u32) -> Load {
        Load { since: at(since), in_flight, queued, has_no_permit: in_flight >= 4, lacks_workers: false }
    }

    fn counters(submitted: u64) -> Counters {
        Counters { submitted, ..Counters::default() }
    }

    fn concurrency(observation: &Observation) -> Histogram {
        let [current, previous] = observation.windows.both();
        current.under_limits.in_flight.clone().merged(&previous.under_limits.in_flight)
    }

    #[test]
    fn demand_ignores_time_without_jobs() {
        let limits = Limits { processes: 4, ..Limits::default() };
        let mut demand = Demand::new(at(0), &limits);
        demand.record_load(load(0, 0, 0), at(1000));
        demand.record_load(load(1000, 2, 0), at(1090));
        demand.record_load(load(1090, 4, 6), at(1100));
        let observation = demand.observation(at(1100), &limits, counters(9));
        assert_eq!(observation.duration, Duration::from_secs(1100));
        let [current, _] = observation.windows.both();
        assert_eq!(current.demand.total(), 100_000_000_000);
        assert_eq!((current.demand.quantile(0.9), current.demand.quantile(0.99)), (2, 10));
        assert_eq!((current.queued.max(), current.under_limits.no_permit_ns), (6, 10_000_000_000));
        assert_eq!(current.in_flight_ns, (2 * 90 + 4 * 10) * 1_000_000_000);
    }

    #[test]
    fn demand_discards_old_windows() {
        let limits = Limits { processes: 4, ..Limits::default() };
        let mut demand = Demand::new(at(0), &limits);
        demand.record_load(load(0, 4, 0), at(10));
        assert!(!demand.is_due(at(3599), &limits) && demand.is_due(at(3600), &limits));
        demand.update(at(3600), sizes_of(&limits), counters(100));
        demand.record_load(load(3600, 1, 0), at(3610));
        let observation = demand.observation(at(7199), &limits, counters(150));
        assert_eq!(concurrency(&observation).max(), 4);
        assert_eq!((observation.base.submitted, observation.duration.as_secs()), (0, 7199));
        demand.update(at(7200), sizes_of(&limits), counters(150));
        let observation = demand.observation(at(7300), &limits, counters(170));
        assert_eq!(concurrency(&observation).max(), 1);
        assert_eq!((observation.base.submitted, observation.duration.as_secs()), (100, 3700));
        // All observations are discarded if no update occurs for more than two windows.
        demand.update(at(40_000), sizes_of(&limits), counters(170));
        let observation = demand.observation(at(40_000), &limits, counters(175));
        assert_eq!(concurrency(&observation).total(), 0);
        assert_eq!(observation.base.submitted, 170);
    }

    #[test]
    fn changed_limits_reset_observations_except_demand() {
        let limits = Limits { processes: 4, ..Limits::default() };
        let mut demand = Demand::new(at(0), &limits);
        demand.record_load(load(0, 4, 20), at(100));
        demand.record_deadline_miss(true);
        let more = Limits { processes: 8, ..limits };
        assert!(demand.is_due(at(100), &more));
        demand.update(at(100), sizes_of(&more), counters(500));
        demand.record_load(load(100, 3, 0), at(160));
        let observation = demand.observation(at(160), &more, counters(530));
        let [current, _] = observation.windows.both();
        assert_eq!((current.demand.max(), current.under_limits.in_flight.max()), (24, 3));
        assert_eq!((current.under_limits.no_permit_ns, current.under_limits.deadline_misses), (0, 0));
        assert_eq!((observation.base.submitted, observation.duration.as_secs()), (500, 60));
        assert!(observation.starts_with_change);
    }

    #[test]
    fn changed_adaptive_maximum_resets_observations() {
        let with = |max, mode| {
            let adaptive = AdaptiveLimits { min: 1, max, target: Duration::from_secs(1), mode };
            Limits { processes: 4, adaptive: Some(adaptive), ..Limits::default() }
        };
        let limits = with(2, AdaptiveMode::Enforce);
        let mut demand = Demand::new(at(0), &limits);
        demand.record_load(load(0, 2, 20), at(100));
        assert!(!demand.is_due(at(100), &limits));
        let more = with(4, AdaptiveMode::Enforce);
        assert!(demand.is_due(at(100), &more) && demand.is_due(at(100), &with(2, AdaptiveMode::Monitor)));
        demand.update(at(100), sizes_of(&more), counters(500));
        assert_eq!(concurrency(&demand.observation(at(160), &more, counters(530))).total(), 0);
    }
}
