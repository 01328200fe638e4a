//! Decides whether a job fits into a rate limit, by the generic cell rate algorithm (ITU-T I.371). For requests, see
//! Brandur Leach, "Rate limiting, cells, and GCRA". In any period `t`, jobs with a total cost of at most
//! `per_second × t + burst` pass, regardless of when they arrive. `tenants` stores the buckets, and `admission` rejects
//! the jobs.

use std::time::Duration;

use bulkhead_shared::vocabulary;

use crate::time::Time;

/// Rate limit for a bulkhead or tenant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RateLimit {
    /// Maximum sustained rate, as the total cost of jobs per second. Must be greater than 0.
    pub per_second: f64,
    /// Maximum total cost of a burst of jobs after a pause. Must be at least 1.
    pub burst: u32,
    /// Scope of the limit.
    pub per: RatePer,
}

vocabulary! {
    /// Scope of a rate limit.
    RatePer {
        /// All jobs of the bulkhead share one limit.
        Bulkhead = "bulkhead",
        /// Each tenant has a separate limit.
        Tenant = "tenant",
    }
}

/// Result for a job that exceeds the rate limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Excess {
    /// The job can pass after this delay if no other job passes in the meantime.
    RetryIn(Duration),
    /// The job costs more than the burst allows, so it will never pass.
    Never,
}

/// Leaky bucket, represented by the time at which it will be empty, in nanoseconds on the clock of [`Time`]. If this
/// time has passed, the bucket is empty. With 128 bits, the time cannot overflow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Bucket {
    empty_at: u128,
    /// Value that `empty_at` would have if the burst had never been lowered. Restored when the burst is raised again.
    uncapped_empty_at: u128,
}

impl Bucket {
    /// Charges the bucket for a job. If the job exceeds the limit, charges nothing and returns the [`Excess`].
    pub(crate) fn take(&mut self, now: Time, limit: &RateLimit, cost: u32) -> Result<(), Excess> {
        if cost > limit.burst {
            return Err(Excess::Never);
        }
        let now = u128::from(now.0);
        let drained = self.empty_at.max(now) + limit.nanos_for(cost);
        match (drained - now).checked_sub(limit.nanos_for(limit.burst)) {
            None | Some(0) => {
                self.empty_at = drained;
                self.uncapped_empty_at = self.uncapped_empty_at.max(now) + limit.nanos_for(cost);
                Ok(())
            }
            Some(wait) => Err(Excess::RetryIn(Duration::from_nanos(u64::try_from(wait).unwrap_or(u64::MAX)))),
        }
    }

    /// Converts the bucket to another limit. The cost of earlier charges that have not drained yet drains at the new
    /// rate. At most the new burst of this cost delays jobs, but a higher burst later includes the rest. If there was
    /// no limit before, empties the bucket, because the limit under which the bucket was charged is unknown.
    pub(crate) fn rescale(&mut self, now: Time, before: Option<&RateLimit>, after: &RateLimit) {
        let Some(before) = before else {
            *self = Self::default();
            return;
        };
        let now = u128::from(now.0);
        let owed = self.uncapped_empty_at.saturating_sub(now);
        let (old, new) = (before.nanos_for(1), after.nanos_for(1));
        let rescaled = owed.checked_mul(new).map_or(u128::MAX, |product| product / old.max(1));
        self.uncapped_empty_at = now.saturating_add(rescaled);
        self.empty_at = now.saturating_add(rescaled.min(after.nanos_for(after.burst)));
    }
}

impl RateLimit {
    /// Returns the time that a job of this cost takes to drain from the bucket. The time per unit of cost is at most
    /// about six centuries, and is rounded up to whole nanoseconds so that the rate is never exceeded.
    fn nanos_for(&self, cost: u32) -> u128 {
        u128::from((1e9 / self.per_second).ceil() as u64) * u128::from(cost)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: RateLimit = RateLimit { per_second: 166.0, burst: 200, per: RatePer::Bulkhead };

    fn ms(ms: u64) -> Time {
        Time::ZERO + Duration::from_millis(ms)
    }

    #[test]
    fn burst_passes_before_the_rate_applies() {
        let mut bucket = Bucket::default();
        let passed = (0..1000).filter(|_| bucket.take(ms(5), &LIMIT, 1).is_ok()).count();
        assert_eq!(passed, 200);
        let passed = (5..1005).filter(|&t| bucket.take(ms(t), &LIMIT, 1).is_ok()).count();
        assert!((164..=166).contains(&passed), "{passed}");
    }

    #[test]
    fn job_passes_exactly_after_the_reported_wait() {
        let mut bucket = Bucket::default();
        let mut now = ms(0);
        let mut state = 1_u64;
        for _ in 0..10_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let cost = (state >> 40) as u32 % 7 + 1;
            let before = bucket;
            match bucket.take(now, &LIMIT, cost) {
                Ok(()) => now = now + Duration::from_micros((state >> 50) % 900),
                Err(Excess::Never) => unreachable!("a cost cannot be this large"),
                Err(Excess::RetryIn(wait)) => {
                    let early = now + wait.saturating_sub(Duration::from_nanos(1));
                    assert_eq!(bucket, before, "a rejected job must not be charged");
                    assert!(bucket.clone().take(early, &LIMIT, cost).is_err());
                    now = now + wait;
                    assert!(bucket.take(now, &LIMIT, cost).is_ok());
                }
            }
        }
    }

    #[test]
    fn new_rate_limit_keeps_the_cost_of_earlier_charges() {
        let slow = RateLimit { per_second: 1.0, burst: 120, per: RatePer::Bulkhead };
        let fast = RateLimit { per_second: 1000.0, burst: 1000, per: RatePer::Bulkhead };
        let mut bucket = Bucket::default();
        assert_eq!(bucket.take(ms(0), &slow, 120), Ok(()));
        let mut other = bucket;
        other.rescale(ms(0), Some(&slow), &fast);
        assert_eq!(other.take(ms(0), &fast, 880), Ok(()), "120 of 1000 are used up");
        assert!(other.take(ms(0), &fast, 1).is_err());
        let mut forgotten = bucket;
        forgotten.rescale(ms(0), None, &fast);
        assert_eq!(forgotten, Bucket::default(), "without a limit, the bucket's time has no cost");
        // When the limit changes, the remaining charges are reduced to at most the new burst.
        bucket.rescale(ms(0), Some(&slow), &RateLimit { burst: 10, ..slow });
        assert_eq!(bucket.take(ms(1000), &RateLimit { burst: 10, ..slow }, 1), Ok(()));
    }

    #[test]
    fn every_window_is_bounded_by_rate_and_burst() {
        let limit = RateLimit { per_second: 50.0, burst: 10, per: RatePer::Tenant };
        let mut bucket = Bucket::default();
        let passed: Vec<u64> = (0..20_000).filter(|&t| bucket.take(ms(t), &limit, 1).is_ok()).collect();
        for (i, from) in passed.iter().enumerate() {
            for (j, to) in passed.iter().enumerate().skip(i).step_by(7) {
                let most = 50.0 * (to - from) as f64 / 1000.0 + 10.0;
                assert!(
                    (j - i + 1) as f64 <= most + 1e-6,
                    "{} jobs passed within {} ms",
                    j - i + 1,
                    to - from
                );
            }
        }
    }

    /// Checks the bound for limits that change while jobs pass. The largest rate and burst that were in force apply.
    #[test]
    fn every_window_is_bounded_while_the_limit_changes() {
        let limit = |burst| RateLimit { per_second: 50.0, burst, per: RatePer::Bulkhead };
        for seed in 1..200_u64 {
            let (mut bucket, mut current, mut state) = (Bucket::default(), limit(10), seed);
            let mut passed = Vec::new();
            for t in 0..1000 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                if (state >> 33).is_multiple_of(20) {
                    let next = limit((state >> 40) as u32 % 10 + 1);
                    bucket.rescale(ms(t), Some(&current), &next);
                    current = next;
                }
                let jobs = (state >> 50) % 15;
                passed.extend((0..jobs).filter(|_| bucket.take(ms(t), &current, 1).is_ok()).map(|_| t));
            }
            for (i, from) in passed.iter().enumerate() {
                for (j, to) in passed.iter().enumerate().skip(i) {
                    let most = 50.0 * (to - from) as f64 / 1000.0 + 10.0;
                    assert!(
                        (j - i + 1) as f64 <= most + 1e-6,
                        "seed {seed}: {} jobs in {} ms",
                        j - i + 1,
                        to - from
                    );
                }
            }
        }
    }

    #[test]
    fn raised_burst_includes_charges_from_before_it_was_lowered() {
        let limit = |burst| RateLimit { per_second: 1.0, burst, per: RatePer::Bulkhead };
        let mut bucket = Bucket::default();
        assert_eq!(bucket.take(ms(0), &limit(10), 10), Ok(()));
        bucket.rescale(ms(0), Some(&limit(10)), &limit(3));
        assert_eq!(
            bucket.take(ms(1000), &limit(3), 1),
            Ok(()),
            "a lower burst must not delay jobs for longer"
        );
        bucket.rescale(ms(1000), Some(&limit(3)), &limit(10));
        assert!(bucket.take(ms(1000), &limit(10), 1).is_err());
        assert_eq!(bucket.take(ms(2000), &limit(10), 1), Ok(()));
    }

    #[test]
    fn cost_above_burst_never_passes() {
        let mut bucket = Bucket::default();
        assert_eq!(bucket.take(ms(9), &LIMIT, 201), Err(Excess::Never));
        assert_eq!(bucket, Bucket::default());
        assert_eq!(bucket.take(ms(9), &LIMIT, 200), Ok(()));
        let glacial = RateLimit { per_second: 1e-300, burst: 1_000_000_000, per: RatePer::Bulkhead };
        assert_eq!(bucket.take(ms(9), &glacial, 999_999_999), Ok(()));
        assert_eq!(bucket.take(ms(9), &glacial, 2), Err(Excess::RetryIn(Duration::from_nanos(u64::MAX))));
    }
}
