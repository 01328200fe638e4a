//! Decides when the next worker may start after a failure, and when a slot has failed too often. Also spaces out the
//! restarts of a bulkhead whose workers keep dying during their first jobs. Like the restart intensity of Erlang's
//! `supervisor`, the policy uses only timestamps, without timers. `life` starts the workers.

use std::collections::VecDeque;
use std::time::Duration;

use crate::limits::Restart;
use crate::time::Time;

/// A slot's failure history is cleared once the slot's worker has been ready for this time and has completed a job.
pub(crate) const HISTORY_CLEARED_AFTER: Duration = Duration::from_secs(60);

/// Maximum number of consecutive workers that can die during their first jobs before the bulkhead's restarts are
/// delayed.
const UNSPACED_DEATHS_MAX: u32 = 10;

/// Minimum interval between delayed restarts in a bulkhead. The kernel needs milliseconds to start and end a process,
/// so a machine can handle a hundred starts per second, but not a thousand.
const RESTART_INTERVAL_MIN: Duration = Duration::from_millis(10);

/// Decision on when to start the next worker after a worker has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NextStart {
    /// Start another worker at this time.
    At(Time),
    /// Workers in this slot have failed too often. At `probe_at`, one worker is started as a probe to find out whether
    /// workers can run again.
    Failed { probe_at: Time },
}

/// Failure history of one slot.
#[derive(Debug, Default)]
pub(crate) struct FailureHistory {
    /// Times of the most recent failures, up to `max + 1` of them.
    failures: VecDeque<Time>,
    /// Number of consecutive failures since the history was last cleared.
    streak: u32,
    /// True if workers in this slot have failed too often and the next worker is only a probe.
    is_probing: bool,
}

impl FailureHistory {
    /// Records a failure and returns the decision about the next start. `random` determines the jitter.
    pub(crate) fn record_failure(&mut self, now: Time, limits: &Restart, random: u64) -> NextStart {
        self.streak = self.streak.saturating_add(1);
        self.failures.push_back(now);
        while self.failures.len() > limits.max as usize + 1 {
            self.failures.pop_front();
        }
        let recent = self.failures.iter().filter(|&&at| now.since(at) <= limits.within).count();
        if self.is_probing || recent > limits.max as usize {
            self.is_probing = true;
            // A `backoff_max` of zero must not cause a busy loop.
            let pause = limits.backoff_max.max(Duration::from_millis(100));
            return NextStart::Failed { probe_at: now + pause };
        }
        NextStart::At(now + self.delay(limits, random))
    }

    /// Returns the delay before the next start. There is no delay after the first failure. Each further failure doubles
    /// the maximum delay. The delay is random, between zero and this maximum (full jitter), so that slots that failed
    /// together do not restart together.
    fn delay(&self, limits: &Restart, random: u64) -> Duration {
        let Some(doublings) = self.streak.checked_sub(2) else { return Duration::ZERO };
        let factor = 1_u32.checked_shl(doublings.min(30)).unwrap_or(u32::MAX);
        let ceiling = limits.backoff.saturating_mul(factor).min(limits.backoff_max);
        let share = (random >> 32) as f64 / f64::from(u32::MAX);
        ceiling.mul_f64(share)
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }
}

/// Delays restarts after workers that became ready and then died during their first jobs. The first few such deaths are
/// followed by immediate restarts. If many workers in a row die like this, the jobs are probably the cause, so all
/// restarts in the bulkhead are spaced out, regardless of the number of slots. Clients still get the outcomes of a dead
/// worker's jobs without delay.
#[derive(Debug, Default)]
pub(crate) struct RestartSpacing {
    /// Number of consecutive workers that died during their first jobs.
    early_deaths: u32,
    /// Time of the most recent delayed restart.
    last: Option<Time>,
}

impl RestartSpacing {
    /// Records the death of a worker and returns the time at which the next worker may start. `is_early` is
    /// true if the worker died during its first jobs.
    pub(crate) fn record_death(&mut self, now: Time, is_early: bool) -> Time {
        self.early_deaths = if is_early { self.early_deaths.saturating_add(1) } else { 0 };
        if self.early_deaths <= UNSPACED_DEATHS_MAX {
            return now;
        }
        let next = self.last.map_or(now, |last| now.max(last + RESTART_INTERVAL_MIN));
        self.last = Some(next);
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::Limits;

    /// Restarts are delayed after several consecutive early deaths. A death is early if it happens during a worker's
    /// first jobs.
    #[test]
    fn delays_restarts_after_many_early_deaths() {
        let mut spacing = RestartSpacing::default();
        let now = Time(5_000_000_000);
        for _ in 0..=UNSPACED_DEATHS_MAX {
            assert_eq!(spacing.record_death(now, true), now);
        }
        let soon = now + RESTART_INTERVAL_MIN / 2;
        assert_eq!(spacing.record_death(soon, true), now + RESTART_INTERVAL_MIN);
        assert_eq!(
            spacing.record_death(soon, true),
            now + RESTART_INTERVAL_MIN * 2,
            "the delay must be shared by all slots"
        );
        let later = now + RESTART_INTERVAL_MIN * 5;
        assert_eq!(
            spacing.record_death(later, true),
            later,
            "enough time has passed since the last delayed restart"
        );
        assert_eq!(
            spacing.record_death(later, false),
            later,
            "a worker that has completed a job must not cause a delay"
        );
        assert_eq!(spacing.record_death(later, true), later);
    }

    /// The first restart is immediate. After the slot has failed too often, each further failure causes another probe
    /// after the maximum delay, until the history is cleared.
    #[test]
    fn restart_delay_doubles_until_the_slot_fails() {
        let limits = Limits::default().restart;
        let mut history = FailureHistory::default();
        let most = u64::MAX;
        let mut now = Time::ZERO;
        for expected_ms in [0, 100, 200, 400, 800] {
            let NextStart::At(at) = history.record_failure(now, &limits, most) else {
                panic!("the slot failed too early")
            };
            assert_eq!(at.since(now).as_millis(), expected_ms);
            now = at;
        }
        assert_eq!(
            history.record_failure(now, &limits, most),
            NextStart::Failed { probe_at: now + limits.backoff_max }
        );
        let later = now + limits.backoff_max;
        assert!(
            matches!(history.record_failure(later, &limits, 0), NextStart::Failed { .. }),
            "a failed probe must be followed by another probe"
        );
        history.clear();
        assert_eq!(history.record_failure(later, &limits, most), NextStart::At(later));
    }

    #[test]
    fn old_failures_do_not_stop_the_slot() {
        let limits = Limits::default().restart;
        let mut history = FailureHistory::default();
        for i in 0..100 {
            let now = Time::ZERO + Duration::from_secs(10 * i);
            assert!(
                matches!(history.record_failure(now, &limits, 0), NextStart::At(_)),
                "failure {i} must be followed by a normal restart"
            );
        }
    }
}
