//! Time budgets for work that clients can cause in large amounts at no cost, and that can wait: accepting
//! connections, cleaning up after closed connections, and answering rejected frames. Each budget is a fixed share of
//! a processor. Without a budget, the data plane would never sleep under such load. On a machine with no idle
//! processor, this would slow down workers and clients.

use std::time::{Duration, Instant};

use bulkhead_policy::Time;

/// Maximum budget that can accumulate, enough to accept two dozen connections at once. Other jobs can be delayed by
/// this time.
const SAVED_MAX_NS: i64 = 250_000;

/// Maximum time charged for a piece of work. If a piece took longer, the thread was usually interrupted.
const PIECE_MAX: Duration = Duration::from_millis(1);

/// Time budget for a kind of work.
pub(super) struct Allowance {
    /// Reciprocal of the processor share.
    part: i64,
    /// Remaining time in nanoseconds. If negative, work must pause.
    left: i64,
    filled_at: Time,
}

impl Allowance {
    /// Creates a budget of `1 / part` of a processor's time.
    pub(super) const fn one_in(part: i64) -> Self {
        Self { part, left: SAVED_MAX_NS, filled_at: Time::ZERO }
    }

    /// Refills the budget. Returns true if any time is left.
    pub(super) fn may_work(&mut self, now: Time) -> bool {
        let passed = i64::try_from(now.since(self.filled_at).as_nanos()).unwrap_or(i64::MAX);
        self.left = (self.left.saturating_add(passed / self.part)).min(SAVED_MAX_NS);
        self.filled_at = now;
        self.left > 0
    }

    /// Charges the time since `began`.
    pub(super) fn spend(&mut self, began: Instant) {
        self.spend_time(began.elapsed());
    }

    fn spend_time(&mut self, took: Duration) {
        self.left -= took.min(PIECE_MAX).as_nanos() as i64;
    }

    /// Returns the earliest time at which work can continue.
    pub(super) fn resume_at(&self) -> Time {
        let owed = (1 - self.left).max(0) * self.part;
        self.filled_at + Duration::from_nanos(owed.unsigned_abs())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_has_its_share_of_the_time_and_no_more() {
        let mut allowance = Allowance::one_in(4);
        let (mut now, mut worked) = (Time::ZERO + Duration::from_secs(60), Duration::ZERO);
        let end = now + Duration::from_secs(10);
        let piece = Duration::from_micros(90);
        while now < end {
            if allowance.may_work(now) {
                allowance.spend_time(piece);
                worked += piece;
                now = now + piece;
            } else {
                let resume_at = allowance.resume_at();
                assert!(resume_at > now);
                now = resume_at;
            }
        }
        let share = worked.as_secs_f64() / 10.0;
        assert!((0.24..0.26).contains(&share), "{share}");
    }

    #[test]
    fn a_crowd_after_a_quiet_hour_does_not_hold_up_a_turn() {
        let mut allowance = Allowance::one_in(8);
        let now = Time::ZERO + Duration::from_secs(3600);
        let piece = Duration::from_micros(10);
        let mut at_once = 0;
        while allowance.may_work(now) {
            allowance.spend_time(piece);
            at_once += 1;
        }
        assert!((20..=30).contains(&at_once), "{at_once}");
    }

    #[test]
    fn a_pause_of_the_machine_is_not_made_up_for() {
        let mut allowance = Allowance::one_in(4);
        let now = Time::ZERO + Duration::from_secs(1);
        assert!(allowance.may_work(now));
        allowance.spend_time(Duration::from_secs(3600));
        allowance.spend_time(Duration::from_secs(3600));
        assert!(allowance.may_work(now + Duration::from_millis(10)));
    }
}
