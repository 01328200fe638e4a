//! Retry budget for a bulkhead. Limits retries to a fraction of the recent calls, so that retries do not multiply the
//! load on a failing dependency. Computing the fraction over a window follows Finagle's `RetryBudget`, and the minimum
//! number of retries follows failsafe-go.

use std::ops::Add;
use std::time::Duration;

use crate::breaker::{Window, share};
use crate::time::Time;

/// Length of the window over which calls and retries are counted (Finagle's `ttl`).
const WINDOW: Duration = Duration::from_secs(10);

/// Number of retries that are always allowed in a window. With few calls, the configured fraction would not allow even
/// one retry, although each job of a crashed worker should be retried once. The value is a tenth of Finagle's, because
/// each retry can kill another worker.
const RETRIES_FLOOR: u32 = 10;

/// Retry limits.
#[derive(Clone, Debug, PartialEq)]
pub struct RetryLimits {
    /// Maximum number of attempts to run a job, including the first.
    pub attempts: u32,
    /// Maximum ratio of retries to calls.
    pub budget: f64,
}

/// Budget for the retries of one bulkhead. Counts calls and retries.
#[derive(Debug)]
pub(crate) struct RetryBudget {
    /// Configuration of the budget. If this is `None`, no retries are allowed.
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
    pub(crate) fn new(limits: Option<RetryLimits>) -> Self {
        Self { limits, window: Window::new(WINDOW) }
    }

    /// Replaces the limits and keeps the counts.
    pub(crate) fn reconfigure(&mut self, limits: Option<RetryLimits>) {
        self.limits = limits;
    }

    /// Counts the first attempt of a job as a call. Retries do not count as calls, because each retry would then permit
    /// further retries.
    pub(crate) fn call(&mut self, now: Time) {
        if self.limits.is_none() {
            return;
        }
        let bucket = self.window.bucket(now);
        bucket.calls = bucket.calls.saturating_add(1);
    }

    /// Returns true if a job can be retried after `attempts` attempts. If so, charges the retry to the budget.
    pub(crate) fn try_retry(&mut self, now: Time, attempts: u32) -> bool {
        let is_allowed = self.allows(now, attempts);
        if is_allowed {
            let bucket = self.window.bucket(now);
            bucket.retries = bucket.retries.saturating_add(1);
        }
        is_allowed
    }

    /// Returns true if the budget allows one more retry of a job that has had `attempts` attempts. A `budget` of 0 does
    /// not allow any retries, not even [`RETRIES_FLOOR`].
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

    /// Retries until the budget is used up, and returns the number of retries that were allowed.
    fn spend(budget: &mut RetryBudget, now: Time) -> u32 {
        (0..10_000).take_while(|_| budget.try_retry(now, 1)).count() as u32
    }

    /// This test is adapted from `WithMinConcurrency` in failsafe-go. The minimum number of retries is allowed even if
    /// there are no calls.
    #[test]
    fn low_volume_allows_the_minimum_number_of_retries() {
        let mut budget = budget(2, 0.2);
        assert_eq!(spend(&mut budget, Time::ZERO), RETRIES_FLOOR);
        for _ in 0..5 * RETRIES_FLOOR {
            budget.call(Time::ZERO);
        }
        assert_eq!(
            spend(&mut budget, Time::ZERO),
            0,
            "the configured share must not exceed the minimum number of retries"
        );
    }

    /// This test is adapted from Finagle's `RetryBudget`, which allows retries for about `percentCanRetry` of the
    /// requests.
    #[test]
    fn high_volume_allows_the_configured_share_of_retries() {
        for (share, expected) in [(0.2, 200), (0.29, 290), (0.001, RETRIES_FLOOR), (1.0, 1000)] {
            let mut budget = budget(2, share);
            for _ in 0..1000 {
                budget.call(Time::ZERO);
            }
            assert_eq!(
                spend(&mut budget, Time::ZERO),
                expected,
                "wrong number of retries for a share of {share}"
            );
        }
    }

    /// This test is adapted from Finagle, where calls (deposits) expire after `ttl`. Here, retries (withdrawals) expire
    /// as well.
    #[test]
    fn old_calls_and_retries_expire() {
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
    fn number_of_attempts_includes_the_first_attempt() {
        let mut budget = budget(3, 1.0);
        assert!(budget.try_retry(Time::ZERO, 1));
        assert!(budget.try_retry(Time::ZERO, 2));
        assert!(!budget.try_retry(Time::ZERO, 3));
    }

    /// Taken from Finagle's `RetryBudget.Empty`.
    #[test]
    fn missing_limits_or_zero_budget_forbid_retries() {
        assert_eq!(spend(&mut RetryBudget::new(None), Time::ZERO), 0);
        assert_eq!(spend(&mut budget(5, 0.0), Time::ZERO), 0);
    }
}
