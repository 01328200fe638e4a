//! How a slot's failures become delays and, when there are too many, a stop. A pure function of
//! moments, like the restart intensity of Erlang's `supervisor`: no timers.

use std::collections::VecDeque;
use std::time::Duration;

use crate::limits::Restart;
use crate::time::Time;

/// A worker that was up for so long and did a job has proved itself.
pub(crate) const PROVEN_AFTER: Duration = Duration::from_secs(60);

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::Limits;

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
