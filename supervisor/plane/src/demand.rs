//! What a bulkhead was asked for: how many jobs were in flight and waiting for how long, and how long they ran
//! and waited, over the last one to two hours. Kept on the data plane at a few nanoseconds for each turn and
//! each job; what to make of it is for `advice`, on another thread.

use std::time::Duration;

use bulkhead_api::Histogram;
use bulkhead_policy::{Bulkhead, Counters, Limits, Time};

use crate::windows::Pair;

/// How a compartment stands since some moment.
#[derive(Clone, Copy, Debug, Default)]
pub struct Level {
    since: Time,
    in_flight: u32,
    queued: u32,
    /// Whether an ordinary job would have to wait, or be turned away.
    is_full: bool,
    /// Whether workers are missing that there should be.
    is_short: bool,
}

impl Level {
    /// How it stands now.
    pub fn of<T>(policy: &Bulkhead<T>, now: Time) -> Self {
        Self {
            since: now,
            in_flight: policy.permits_taken(),
            queued: u32::try_from(policy.queued()).unwrap_or(u32::MAX),
            is_full: policy.is_full(),
            is_short: policy.is_short_of_workers(),
        }
    }
}

/// What was seen in one window of time. Where tenants are apart, each tenant's time counts by itself, since
/// `processes`, `max_in_flight` and `max_queue` are each tenant's. Only time with jobs counts at all: a night
/// without any says nothing about what the day needs.
#[derive(Clone, Debug, Default)]
pub struct Window {
    /// By jobs in flight and waiting together, in nanoseconds.
    pub demand: Histogram,
    /// By jobs waiting, in nanoseconds.
    pub queued: Histogram,
    /// By microseconds that a job ran, and that it waited before.
    pub run_us: Histogram,
    pub wait_us: Histogram,
    /// How long jobs were in flight, all of them together, in nanoseconds.
    pub in_flight_ns: u128,
    /// What the limits in force had to do with.
    pub bound: Bound,
}

/// What was seen under the limits in force.
#[derive(Clone, Debug, Default)]
pub struct Bound {
    /// By jobs in flight, in nanoseconds. Its total is the time with jobs.
    pub in_flight: Histogram,
    /// How long no permit was free, and how long workers were missing.
    pub full_ns: u64,
    pub short_ns: u64,
    /// Jobs that missed their deadline in a worker's hands, and those of them that had all of the bulkhead's own.
    pub late: u64,
    pub late_by_own: u64,
    /// What was counted before it.
    base: Counters,
}

/// `processes`, `max_in_flight` and `max_queue`.
pub type Numbers = (u32, u32, u32);

/// What a bulkhead was asked for lately.
#[derive(Default)]
pub struct Demand {
    windows: Pair<Window>,
    /// Since when there is anything, and since when the numbers are what they are.
    began: Time,
    changed: Option<Time>,
    numbers: Numbers,
}

impl Demand {
    /// Nothing, from now on.
    pub fn new(now: Time, limits: &Limits) -> Self {
        let mut demand = Self { began: now, numbers: numbers_of(limits), ..Self::default() };
        demand.windows.roll(now);
        demand
    }

    /// Whether [`Self::settle`] has something to do.
    #[inline]
    pub fn is_due(&self, now: Time, limits: &Limits) -> bool {
        self.windows.is_over(now) || self.numbers != numbers_of(limits)
    }

    /// Begins another window if it is time, and forgets what other numbers than those in force had to do with.
    /// `counters` are those of now.
    pub fn settle(&mut self, now: Time, numbers: Numbers, counters: Counters) {
        if self.windows.is_over(now) {
            self.windows.roll(now);
            self.windows.current.bound.base = counters.clone();
            // One that was passed over has nothing of its own.
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

    /// Counts the time that a compartment stood so.
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

    /// Counts a job that a worker had.
    #[inline]
    pub fn served(&mut self, ran: Duration, waited: Duration) {
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.windows.current.run_us.record(micros(ran), 1);
        self.windows.current.wait_us.record(micros(waited), 1);
    }

    /// Counts a job that missed its deadline or run limit while it ran, and whether it was the bulkhead's own
    /// deadline.
    #[inline]
    pub fn was_late(&mut self, is_by_own: bool) {
        let bound = &mut self.windows.current.bound;
        bound.late += 1;
        bound.late_by_own += u64::from(is_by_own);
    }

    /// All that was seen. [`Self::settle`] comes before it.
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

/// Those of them that decide how many jobs there can be.
pub fn numbers_of(limits: &Limits) -> Numbers {
    (limits.processes, limits.max_in_flight, limits.max_queue)
}

/// The limits of a bulkhead that advice is about; each tenant's, where tenants are apart.
#[derive(Clone, Debug)]
pub struct InForce {
    pub processes: u32,
    pub max_in_flight: u32,
    pub max_queue: u32,
    pub queue_timeout: Option<Duration>,
    pub deadline: Duration,
    pub deadline_max: Duration,
}

/// What the data plane has seen of a bulkhead, for another thread to make something of.
#[derive(Debug)]
pub struct Observation {
    /// How long, under the limits in force.
    pub watched: Duration,
    /// Whether that is since they were changed.
    pub was_changed: bool,
    /// What was counted before, and is now.
    pub base: Counters,
    pub counters: Counters,
    pub windows: Pair<Window>,
    pub numbers: InForce,
    /// The limit that follows how long jobs take, if there is one.
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
        // All of it is, after a pause.
        demand.settle(at(40_000), numbers_of(&limits), counters(170));
        let observation = demand.observation(at(40_000), &limits, counters(175));
        assert_eq!(concurrency(&observation).total(), 0);
        assert_eq!(observation.base.submitted, 170);
    }

    #[test]
    fn other_limits_leave_the_demand_and_forget_what_the_old_ones_did() {
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
