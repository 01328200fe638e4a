//! How a slot's failures become delays and, when there are too many, a stop. A pure function of
//! moments, like the restart intensity of Erlang's `supervisor`: no timers.

use std::collections::VecDeque;
use std::time::Duration;

use crate::limits::Restart;
use crate::time::Time;

/// A worker that was up for so long and did a job has proved itself.
pub(crate) const PROVEN_AFTER: Duration = Duration::from_secs(60);

/// Workers of a bulkhead that may die in vain one after the other, each under its first jobs, before starts are
/// spaced.
const IN_VAIN_AT_ONCE: u32 = 10;

/// From then on, from one start in the bulkhead to the next. The kernel works on starts and ends of processes for
/// milliseconds that it does not give back to others: a hundred a second can be borne, a thousand cannot.
const IN_VAIN_PACE: Duration = Duration::from_millis(10);

/// What to do after a death that says the worker is unfit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Start another one at this moment.
    At(Time),
    /// It failed too often: probe again at this moment.
    Failed { probe_at: Time },
}

/// The failures of one slot.
#[derive(Debug, Default)]
pub(crate) struct History {
    /// The moments of the newest failures, at most `max + 1`.
    failures: VecDeque<Time>,
    /// Failures since the worker last proved itself.
    streak: u32,
    /// Whether the slot has failed and its next worker is a probe.
    is_probing: bool,
}

impl History {
    /// Counts a failure. `random` decides the jitter.
    pub(crate) fn failed(&mut self, now: Time, limits: &Restart, random: u64) -> Next {
        self.streak = self.streak.saturating_add(1);
        self.failures.push_back(now);
        while self.failures.len() > limits.max as usize + 1 {
            self.failures.pop_front();
        }
        let recent = self.failures.iter().filter(|&&at| now.since(at) <= limits.within).count();
        if self.is_probing || recent > limits.max as usize {
            self.is_probing = true;
            // A backoff of nothing must not become a loop.
            let pause = limits.backoff_max.max(Duration::from_millis(100));
            return Next::Failed { probe_at: now + pause };
        }
        Next::At(now + self.delay(limits, random))
    }

    /// The first failure is answered at once; then the ceiling doubles, and chance picks below it
    /// (full jitter, so that slots which failed together do not return together).
    fn delay(&self, limits: &Restart, random: u64) -> Duration {
        let Some(doublings) = self.streak.checked_sub(2) else { return Duration::ZERO };
        let factor = 1_u32.checked_shl(doublings.min(30)).unwrap_or(u32::MAX);
        let ceiling = limits.backoff.saturating_mul(factor).min(limits.backoff_max);
        let share = (random >> 32) as f64 / f64::from(u32::MAX);
        ceiling.mul_f64(share)
    }

    /// The worker proved itself.
    pub(crate) fn proven(&mut self) {
        *self = Self::default();
    }
}

/// How a bulkhead answers workers that were fit, and died under their first jobs all the same: at once; but when
/// there are many in a row, it is the jobs, and the starts are spaced, whatever the number of slots. Each job is
/// told at once what became of it; what waits is the next worker.
#[derive(Debug, Default)]
pub(crate) struct Spacing {
    /// Workers that died in vain since another end.
    in_vain: u32,
    /// The last start that was spaced.
    last: Option<Time>,
}

impl Spacing {
    /// Counts the end of a worker: in vain, if it did no job. Returns when the next may start.
    pub(crate) fn died(&mut self, now: Time, in_vain: bool) -> Time {
        self.in_vain = if in_vain { self.in_vain.saturating_add(1) } else { 0 };
        if self.in_vain <= IN_VAIN_AT_ONCE {
            return now;
        }
        let next = self.last.map_or(now, |last| now.max(last + IN_VAIN_PACE));
        self.last = Some(next);
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::Limits;

    #[test]
    fn deaths_in_vain_are_answered_at_once_until_there_are_many_in_a_row() {
        let mut spacing = Spacing::default();
        let now = Time(5_000_000_000);
        for _ in 0..=IN_VAIN_AT_ONCE {
            assert_eq!(spacing.died(now, true), now);
        }
        let soon = now + IN_VAIN_PACE / 2;
        assert_eq!(spacing.died(soon, true), now + IN_VAIN_PACE);
        assert_eq!(spacing.died(soon, true), now + IN_VAIN_PACE * 2, "in whatever slot");
        let later = now + IN_VAIN_PACE * 5;
        assert_eq!(spacing.died(later, true), later, "long enough after the last");
        assert_eq!(spacing.died(later, false), later, "it did a job");
        assert_eq!(spacing.died(later, true), later);
    }

    #[test]
    fn the_first_at_once_then_doubling_below_the_ceiling_then_failed() {
        let limits = Limits::default().restart;
        let mut history = History::default();
        let most = u64::MAX;
        let mut now = Time::ZERO;
        for expected_ms in [0, 100, 200, 400, 800] {
            let Next::At(at) = history.failed(now, &limits, most) else { panic!("gave up early") };
            assert_eq!(at.since(now).as_millis(), expected_ms);
            now = at;
        }
        assert_eq!(history.failed(now, &limits, most), Next::Failed { probe_at: now + limits.backoff_max });
        let later = now + limits.backoff_max;
        assert!(matches!(history.failed(later, &limits, 0), Next::Failed { .. }), "a probe is the only try");
        history.proven();
        assert_eq!(history.failed(later, &limits, most), Next::At(later));
    }

    #[test]
    fn old_failures_do_not_count_towards_the_limit() {
        let limits = Limits::default().restart;
        let mut history = History::default();
        for i in 0..100 {
            let now = Time::ZERO + Duration::from_secs(10 * i);
            assert!(matches!(history.failed(now, &limits, 0), Next::At(_)), "failure {i}");
        }
    }
}
