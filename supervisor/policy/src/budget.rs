//! How many retries a bulkhead may afford: a share of its recent calls, so that a dependency which fails
//! everything is not asked for everything twice. A share of a window as in Finagle's `RetryBudget`, with
//! a floor as failsafe-go's budgets have one.

use std::ops::Add;
use std::time::Duration;

use crate::breaker::{Window, share};
use crate::time::Time;

/// How far back calls and retries count (Finagle's `ttl`).
const WINDOW: Duration = Duration::from_secs(10);

/// So many retries in a window are always allowed: a share of few calls is less than one retry, and the
/// neighbours of one crash must all be able to try again. A retry may cost a worker, so this is a tenth
/// of Finagle's.
const RETRIES_FLOOR: u32 = 10;

/// Which retries are allowed.
#[derive(Clone, Debug, PartialEq)]
pub struct RetryLimits {
    /// How often a job may be tried, the first time included.
    pub attempts: u32,
    /// Retries may be this share of the calls.
    pub budget: f64,
}

/// The calls and retries of one bulkhead.
#[derive(Debug)]
pub(crate) struct RetryBudget {
    /// Without limits there are no retries.
    limits: Option<RetryLimits>,
    window: Window<Spent>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Spent {
    calls: u32,
    retries: u32,
}

impl Add for Spent {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            calls: self.calls.saturating_add(other.calls),
            retries: self.retries.saturating_add(other.retries),
        }
    }
}

impl RetryBudget {
    /// A budget of which nothing is spent.
    pub(crate) fn new(limits: Option<RetryLimits>) -> Self {
        Self { limits, window: Window::new(WINDOW) }
    }

    /// What was spent stays spent.
    pub(crate) fn reconfigure(&mut self, limits: Option<RetryLimits>) {
        self.limits = limits;
    }

    /// Counts the first attempt of a job. Retries are no calls: they must not pay for further ones.
    pub(crate) fn call(&mut self, now: Time) {
        if self.limits.is_none() {
            return;
        }
        let bucket = self.window.bucket(now);
        bucket.calls = bucket.calls.saturating_add(1);
    }

    /// Whether a job that was tried so often may be tried again. If so, that is spent.
    pub(crate) fn try_retry(&mut self, now: Time, attempts: u32) -> bool {
        let is_allowed = self.allows(now, attempts);
        if is_allowed {
            let bucket = self.window.bucket(now);
            bucket.retries = bucket.retries.saturating_add(1);
        }
        is_allowed
    }

    /// A budget of nothing has no floor either: an operator who writes 0 means it.
    fn allows(&self, now: Time, attempts: u32) -> bool {
        let Some(limits) = &self.limits else { return false };
        if attempts >= limits.attempts || limits.budget <= 0.0 {
            return false;
        }
        let Spent { calls, retries } = self.window.sum(now);
        let retries = retries.saturating_add(1);
        retries <= RETRIES_FLOOR || (calls > 0 && share(retries, calls) <= limits.budget)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn budget(attempts: u32, budget: f64) -> RetryBudget {
        RetryBudget::new(Some(RetryLimits { attempts, budget }))
    }

    /// How many retries pass if as many as possible are wanted now.
    fn spend(budget: &mut RetryBudget, now: Time) -> u32 {
        (0..10_000).take_while(|_| budget.try_retry(now, 1)).count() as u32
    }

    /// failsafe-go, `WithMinConcurrency`: so many retries whatever the share, with no call at all.
    #[test]
    fn at_low_volume_the_floor_is_allowed() {
        let mut budget = budget(2, 0.2);
        assert_eq!(spend(&mut budget, Time::ZERO), RETRIES_FLOOR);
        for _ in 0..5 * RETRIES_FLOOR {
            budget.call(Time::ZERO);
        }
        assert_eq!(spend(&mut budget, Time::ZERO), 0, "the share is no more than the floor");
    }

    /// Finagle, `RetryBudget`: about `percentCanRetry` of the requests.
    #[test]
    fn at_high_volume_the_share_is_allowed() {
        for (share, expected) in [(0.2, 200), (0.29, 290), (0.001, RETRIES_FLOOR), (1.0, 1000)] {
            let mut budget = budget(2, share);
            for _ in 0..1000 {
                budget.call(Time::ZERO);
            }
            assert_eq!(spend(&mut budget, Time::ZERO), expected, "a share of {share}");
        }
    }

    /// Finagle: deposits expire after `ttl`. Withdrawals do as well.
    #[test]
    fn what_is_long_ago_does_not_count() {
        let mut budget = budget(2, 0.2);
        for _ in 0..1000 {
            budget.call(Time::ZERO);
        }
        assert_eq!(spend(&mut budget, Time::ZERO), 200);
        assert_eq!(spend(&mut budget, Time::ZERO + SECOND), 0);
        assert_eq!(spend(&mut budget, Time::ZERO + WINDOW), RETRIES_FLOOR);
        assert_eq!(spend(&mut budget, Time::ZERO + WINDOW + WINDOW), RETRIES_FLOOR);
    }

    #[test]
    fn attempts_count_the_first() {
        let mut budget = budget(3, 1.0);
        assert!(budget.try_retry(Time::ZERO, 1));
        assert!(budget.try_retry(Time::ZERO, 2));
        assert!(!budget.try_retry(Time::ZERO, 3));
    }

    /// Finagle, `RetryBudget.Empty`.
    #[test]
    fn without_limits_or_with_a_budget_of_nothing_there_are_no_retries() {
        assert_eq!(spend(&mut RetryBudget::new(None), Time::ZERO), 0);
        assert_eq!(spend(&mut budget(5, 0.0), Time::ZERO), 0);
    }
}
