//! The demand of a bulkhead over the last one to two hours: jobs in flight and queued, weighted by time, and
//! the run and waiting times of jobs. Recording costs the data plane a few nanoseconds per iteration and job.
//! `advice` evaluates the numbers on another thread.

use std::time::Duration;

use bulkhead_api::Histogram;
use bulkhead_policy::{Bulkhead, Counters, Limits, Time};

use crate::windows::Pair;

/// The load of a compartment since some moment.
#[derive(Clone, Copy, Debug, Default)]
pub struct Level {
    since: Time,
    in_flight: u32,
    queued: u32,
    /// True if an ordinary job would have to wait or be rejected.
    is_full: bool,
    /// True if fewer workers run than configured.
    is_short: bool,
}

impl Level {
    /// Returns the current load.
    pub fn of<T>(policy: &Bulkhead<T>, now: Time) -> Self {
        Self {
            since: now,
            in_flight: policy.permits_held(),
            queued: u32::try_from(policy.queued()).unwrap_or(u32::MAX),
            is_full: policy.is_full(),
            is_short: policy.is_short_of_workers(),
        }
    }
}

/// Observations of one time window. With isolated tenants, the time of each tenant counts separately, because
/// `processes`, `max_in_flight` and `max_queue` apply to each tenant. Time without jobs does not count,
/// because an idle night says nothing about the demand of the day.
#[derive(Clone, Debug, Default)]
pub struct Window {
    /// Nanoseconds by number of jobs in flight and queued.
    pub demand: Histogram,
    /// Nanoseconds by number of queued jobs.
    pub queued: Histogram,
    /// Number of jobs by run time, and by waiting time, in microseconds.
    pub run_us: Histogram,
    pub wait_us: Histogram,
    /// Sum of the time that each job was in flight, in nanoseconds.
    pub in_flight_ns: u128,
    /// Observations that depend on the current limits.
    pub bound: Bound,
}

/// Observations that depend on the current limits.
#[derive(Clone, Debug, Default)]
pub struct Bound {
    /// Nanoseconds by number of jobs in flight. The total is the time with jobs.
    pub in_flight: Histogram,
    /// Time without a free permit, and time with missing workers, in nanoseconds.
    pub full_ns: u64,
    pub short_ns: u64,
    /// Number of jobs that missed their deadline while running, and how many of these had the bulkhead's own
    /// deadline.
    pub late: u64,
    pub late_by_own: u64,
    /// Counters at the beginning of the window.
    base: Counters,
}

/// Values of `processes`, `max_in_flight` and `max_queue`.
pub type Numbers = (u32, u32, u32);

/// The recent demand of a bulkhead.
#[derive(Default)]
pub struct Demand {
    windows: Pair<Window>,
    /// Time of creation, and of the last change of the limits.
    began: Time,
    changed: Option<Time>,
    numbers: Numbers,
}

impl Demand {
    /// Starts an empty record.
    pub fn new(now: Time, limits: &Limits) -> Self {
        let mut demand = Self { began: now, numbers: numbers_of(limits), ..Self::default() };
        demand.windows.roll(now);
        demand
    }

    /// True if [`Self::settle`] has work to do.
    #[inline]
    pub fn is_due(&self, now: Time, limits: &Limits) -> bool {
        self.windows.is_over(now) || self.numbers != numbers_of(limits)
    }

    /// Starts a new window if it is time, and discards observations made under other limits. `counters` are
    /// the current ones.
    pub fn settle(&mut self, now: Time, numbers: Numbers, counters: Counters) {
        if self.windows.is_over(now) {
            self.windows.roll(now);
            self.windows.current.bound.base = counters.clone();
            // An empty window has no baseline yet.
            let previous = &mut self.windows.previous;
            if previous.demand.total() == 0 {
                previous.bound.base = counters.clone();
            }
        }
        if self.numbers != numbers {
            self.numbers = numbers;
            self.changed = Some(now);
            self.windows.previous.bound = Bound { base: counters.clone(), ..Bound::default() };
            self.windows.current.bound = Bound { base: counters, ..Bound::default() };
        }
    }

    /// Records the load of a compartment for the time since `level` was taken.
    #[inline]
    pub fn stood(&mut self, level: Level, now: Time) {
        let ns = u64::try_from(now.since(level.since).as_nanos()).unwrap_or(u64::MAX);
        let demand = u64::from(level.in_flight) + u64::from(level.queued);
        if ns == 0 || demand == 0 {
            return;
        }
        let window = &mut self.windows.current;
        window.demand.record(demand, ns);
        window.queued.record(level.queued.into(), ns);
        window.in_flight_ns += u128::from(level.in_flight) * u128::from(ns);
        window.bound.in_flight.record(level.in_flight.into(), ns);
        if level.is_short {
            window.bound.short_ns += ns;
        } else if level.is_full {
            window.bound.full_ns += ns;
        }
    }

    /// Records a job that a worker ran.
    #[inline]
    pub fn served(&mut self, ran: Duration, waited: Duration) {
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.windows.current.run_us.record(micros(ran), 1);
        self.windows.current.wait_us.record(micros(waited), 1);
    }

    /// Records a job that missed its deadline or run limit while running. `is_by_own` is true for the
    /// bulkhead's own deadline.
    #[inline]
    pub fn was_late(&mut self, is_by_own: bool) {
        let bound = &mut self.windows.current.bound;
        bound.late += 1;
        bound.late_by_own += u64::from(is_by_own);
    }

    /// Returns all observations. Call [`Self::settle`] first.
    pub fn observation(&self, now: Time, limits: &Limits, counters: Counters) -> Observation {
        let since = self.windows.began().max(self.began).max(self.changed.unwrap_or(Time::ZERO));
        let numbers = InForce {
            processes: limits.processes,
            max_in_flight: limits.max_in_flight,
            max_queue: limits.max_queue,
            queue_timeout: limits.queue_timeout,
            deadline: limits.deadline,
            deadline_max: limits.deadline_max,
        };
        Observation {
            watched: now.since(since),
            was_changed: self.changed.is_some_and(|at| at >= since),
            base: self.windows.previous.bound.base.clone(),
            counters,
            windows: self.windows.clone(),
            numbers,
            adaptive: None,
        }
    }
}

/// Returns the limits that determine the number of jobs.
pub fn numbers_of(limits: &Limits) -> Numbers {
    (limits.processes, limits.max_in_flight, limits.max_queue)
}

/// Limits of a bulkhead, or of each isolated tenant, that advice can be about.
#[derive(Clone, Debug)]
pub struct InForce {
    pub processes: u32,
    pub max_in_flight: u32,
    pub max_queue: u32,
    pub queue_timeout: Option<Duration>,
    pub deadline: Duration,
    pub deadline_max: Duration,
}

/// Observations of a bulkhead, for evaluation on another thread.
#[derive(Debug)]
pub struct Observation {
    /// Length of the observation under the current limits.
    pub watched: Duration,
    /// True if the observation begins with a change of the limits.
    pub was_changed: bool,
    /// Counters at the beginning of the observation, and now.
    pub base: Counters,
    pub counters: Counters,
    pub windows: Pair<Window>,
    pub numbers: InForce,
    /// State of the adaptive limit, if there is one.
    pub adaptive: Option<bulkhead_api::Adaptive>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Time {
        Time::ZERO + Duration::from_secs(seconds)
    }

    fn level(since: u64, in_flight: u32, queued: u32) -> Level {
        Level { since: at(since), in_flight, queued, is_full: in_flight >= 4, is_short: false }
    }

    fn counters(submitted: u64) -> Counters {
        Counters { submitted, ..Counters::default() }
    }

    fn concurrency(observation: &Observation) -> Histogram {
        let [current, previous] = observation.windows.both();
        current.bound.in_flight.clone().and(&previous.bound.in_flight)
    }

    #[test]
    fn time_without_jobs_counts_for_nothing() {
        let limits = Limits { processes: 4, ..Limits::default() };
        let mut demand = Demand::new(at(0), &limits);
        demand.stood(level(0, 0, 0), at(1000));
        demand.stood(level(1000, 2, 0), at(1090));
        demand.stood(level(1090, 4, 6), at(1100));
        let observation = demand.observation(at(1100), &limits, counters(9));
        assert_eq!(observation.watched, Duration::from_secs(1100));
        let [current, _] = observation.windows.both();
        assert_eq!(current.demand.total(), 100_000_000_000);
        assert_eq!((current.demand.quantile(0.9), current.demand.quantile(0.99)), (2, 10));
        assert_eq!((current.queued.max(), current.bound.full_ns), (6, 10_000_000_000));
        assert_eq!(current.in_flight_ns, (2 * 90 + 4 * 10) * 1_000_000_000);
    }

    #[test]
    fn what_is_old_is_forgotten() {
        let limits = Limits { processes: 4, ..Limits::default() };
        let mut demand = Demand::new(at(0), &limits);
        demand.stood(level(0, 4, 0), at(10));
        assert!(!demand.is_due(at(3599), &limits) && demand.is_due(at(3600), &limits));
        demand.settle(at(3600), numbers_of(&limits), counters(100));
        demand.stood(level(3600, 1, 0), at(3610));
        let observation = demand.observation(at(7199), &limits, counters(150));
        assert_eq!(concurrency(&observation).max(), 4);
        assert_eq!((observation.base.submitted, observation.watched.as_secs()), (0, 7199));
        demand.settle(at(7200), numbers_of(&limits), counters(150));
        let observation = demand.observation(at(7300), &limits, counters(170));
        assert_eq!(concurrency(&observation).max(), 1);
        assert_eq!((observation.base.submitted, observation.watched.as_secs()), (100, 3700));
        // A long pause discards everything.
        demand.settle(at(40_000), numbers_of(&limits), counters(170));
        let observation = demand.observation(at(40_000), &limits, counters(175));
        assert_eq!(concurrency(&observation).total(), 0);
        assert_eq!(observation.base.submitted, 170);
    }

    #[test]
    fn changed_limits_keep_demand_and_discard_old_observations() {
        let limits = Limits { processes: 4, ..Limits::default() };
        let mut demand = Demand::new(at(0), &limits);
        demand.stood(level(0, 4, 20), at(100));
        demand.was_late(true);
        let more = Limits { processes: 8, ..limits };
        assert!(demand.is_due(at(100), &more));
        demand.settle(at(100), numbers_of(&more), counters(500));
        demand.stood(level(100, 3, 0), at(160));
        let observation = demand.observation(at(160), &more, counters(530));
        let [current, _] = observation.windows.both();
        assert_eq!((current.demand.max(), current.bound.in_flight.max()), (24, 3));
        assert_eq!((current.bound.full_ns, current.bound.late), (0, 0));
        assert_eq!((observation.base.submitted, observation.watched.as_secs()), (500, 60));
        assert!(observation.was_changed);
    }
}
