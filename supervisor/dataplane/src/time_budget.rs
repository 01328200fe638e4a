//! Limits the processor time for work that can be delayed and that clients can cause at little cost. `acceptor` has a
//! budget for new connections. `sessions` has one for clients that have closed their side or mostly send rejected
//! frames. Without budgets, the data plane would never sleep under such load, and would slow down workers and other
//! clients.

use std::time::{Duration, Instant};

use bulkhead_policy::Time;

/// Maximum budget that can accumulate, in nanoseconds. Enough to accept about two dozen connections in a row. Other
/// work can be delayed by this amount of time.
const BALANCE_NS_MAX: i64 = 250_000;

/// Maximum time charged for one piece of work. A longer measured time most likely means that the thread was
/// preempted.
const CHARGE_MAX: Duration = Duration::from_millis(1);

/// Limit on the share of a processor's time for one kind of work.
pub(super) struct TimeBudget {
    /// Divisor of the budget. The work can use at most one processor's time divided by this number.
    divisor: i64,
    /// Remaining time, in nanoseconds. The work must pause while the remaining time is zero or negative.
    remaining_ns: i64,
    filled_at: Time,
}

impl TimeBudget {
    /// Creates a budget that allows the work to use `1 / divisor` of one processor's time.
    pub(super) const fn one_in(divisor: i64) -> Self {
        Self { divisor, remaining_ns: BALANCE_NS_MAX, filled_at: Time::ZERO }
    }

    /// Refills the budget. Returns true if any time is left.
    pub(super) fn has_time(&mut self, now: Time) -> bool {
        let passed = i64::try_from(now.since(self.filled_at).as_nanos()).unwrap_or(i64::MAX);
        self.remaining_ns = (self.remaining_ns.saturating_add(passed / self.divisor)).min(BALANCE_NS_MAX);
        self.filled_at = now;
        self.remaining_ns > 0
    }

    /// Charges the time since `began` to the budget.
    pub(super) fn charge(&mut self, began: Instant) {
        self.charge_duration(began.elapsed());
    }

    fn charge_duration(&mut self, took: Duration) {
        self.remaining_ns -= took.min(CHARGE_MAX).as_nanos() as i64;
    }

    /// Returns the earliest time at which the work can continue.
    pub(super) fn resume_at(&self) -> Time {
        let missing_ns = (1 - self.remaining_ns).max(0) * self.divisor;
        self.filled_at + Duration::from_nanos(missing_ns.unsigned_abs())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_gets_exactly_its_share_of_time() {
        let mut budget = TimeBudget::one_in(4);
        let (mut now, mut worked) = (Time::ZERO + Duration::from_secs(60), Duration::ZERO);
        let end = now + Duration::from_secs(10);
        let piece = Duration::from_micros(90);
        while now < end {
            if budget.has_time(now) {
                budget.charge_duration(piece);
                worked += piece;
                now = now + piece;
            } else {
                let resume_at = budget.resume_at();
                assert!(resume_at > now);
                now = resume_at;
            }
        }
        let share = worked.as_secs_f64() / 10.0;
        assert!((0.24..0.26).contains(&share), "{share}");
    }

    #[test]
    fn unused_budget_accumulates_up_to_a_maximum() {
        let mut budget = TimeBudget::one_in(8);
        let now = Time::ZERO + Duration::from_secs(3600);
        let piece = Duration::from_micros(10);
        let mut at_once = 0;
        while budget.has_time(now) {
            budget.charge_duration(piece);
            at_once += 1;
        }
        assert!((20..=30).contains(&at_once), "{at_once}");
    }

    #[test]
    fn limits_charge_for_a_single_piece_of_work() {
        let mut budget = TimeBudget::one_in(4);
        let now = Time::ZERO + Duration::from_secs(1);
        assert!(budget.has_time(now));
        budget.charge_duration(Duration::from_secs(3600));
        budget.charge_duration(Duration::from_secs(3600));
        assert!(budget.has_time(now + Duration::from_millis(10)));
    }
}
