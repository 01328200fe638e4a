//! Determines the minimum time that a client should wait after a rejection caused by load. The value starts at one
//! second, doubles while many jobs are rejected, and decreases by one second when few are. `admission` decides which
//! jobs are rejected, and may ask for a longer wait. The algorithm is modelled on Kubernetes' API Priority and Fairness
//! and on TCP's congestion window.

use std::time::Duration;

use crate::time::Time;

/// Maximum value of `Retry-After`, in seconds. Also the length of the rejection history, in seconds.
const SECONDS_MAX: u64 = 32;

/// State of the adaptive `Retry-After` value for one priority class.
#[derive(Clone, Debug)]
pub(crate) struct RetryAfter {
    seconds: u64,
    /// Time at which the value was last doubled, in whole seconds.
    raised_at: u64,
    current: u64,
    count: u64,
    /// Number of rejections in each recent second, stored with that second's time. The index is the time modulo
    /// the array's length.
    history: [(u64, u64); SECONDS_MAX as usize],
}

impl Default for RetryAfter {
    fn default() -> Self {
        Self { seconds: 1, raised_at: 0, current: 0, count: 0, history: [(0, 0); SECONDS_MAX as usize] }
    }
}

impl RetryAfter {
    /// Counts a rejected job. Returns the time that its client should wait before retrying.
    pub(crate) fn record(&mut self, now: Time) -> Duration {
        let second = now.0 / 1_000_000_000;
        if second != self.current {
            self.history[(self.current % SECONDS_MAX) as usize] = (self.current, self.count);
            (self.current, self.count) = (second, 0);
            self.adapt(second);
        }
        self.count += 1;
        Duration::from_secs(self.seconds)
    }

    /// Raises or lowers the `Retry-After` value, depending on the number of rejections during the last `self.seconds`
    /// seconds.
    fn adapt(&mut self, second: u64) {
        let is_recent = |at: u64| at < second && second - at <= self.seconds;
        let recent: u64 = self.history.iter().filter(|(at, _)| is_recent(*at)).map(|(_, count)| count).sum();
        let has_settled = second - self.raised_at >= self.seconds;
        if has_settled && recent >= 3 * self.seconds {
            self.seconds = (2 * self.seconds).min(SECONDS_MAX);
            self.raised_at = second;
        } else if recent < self.seconds && self.seconds > 1 {
            self.seconds -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Test table from `TestDroppedRequestsTracker` in Kubernetes. Each row contains a second, the number of rejections
    /// in that second, and the expected value.
    #[test]
    fn retry_after_matches_kubernetes_test_table() {
        let table = [
            (0, 5, 1),
            (1, 11, 2),
            (2, 1, 2),
            (3, 11, 4),
            (4, 1, 4),
            (7, 1, 8),
            (11, 1, 8),
            (15, 1, 7),
            (17, 1, 6),
            (21, 14, 5),
            (22, 1, 10),
        ];
        let mut retry_after_values = RetryAfter::default();
        for (second, count, expected) in table {
            let now = Time::ZERO + Duration::from_secs(second);
            let asked = (0..count).fold(Duration::ZERO, |_, _| retry_after_values.record(now));
            assert_eq!(asked, Duration::from_secs(expected), "wrong value in second {second}");
        }
    }

    #[test]
    fn retry_after_rises_to_32_seconds_and_falls_again() {
        let mut retry_after_values = RetryAfter::default();
        let at = |second| Time::ZERO + Duration::from_secs(second);
        for second in 0..200 {
            for _ in 0..100 {
                retry_after_values.record(at(second));
            }
        }
        assert_eq!(retry_after_values.record(at(200)), Duration::from_secs(32));
        for step in 0..40 {
            retry_after_values.record(at(300 + 50 * step));
        }
        assert_eq!(retry_after_values.record(at(10_000)), Duration::from_secs(1));
    }
}
