//! Detects pauses of the supervisor (SIGSTOP, CPU starvation, suspend), so that they are not mistaken for unresponsive
//! workers or clients. The event loop calls the detector at the beginning of each iteration. After a pause, the loop
//! extends timeouts and notifies policy. This module only detects the pause.

use std::time::Duration;

use bulkhead_api::EventKind;
use bulkhead_policy::Time;

/// A pause is detected if an iteration is delayed, or the machine is suspended, for longer than this time.
const PAUSE_MIN: Duration = Duration::from_millis(500);

/// Minimum interval between events about pauses.
const EVENT_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(super) struct PauseDetector {
    /// Difference in nanoseconds between `CLOCK_BOOTTIME`, which includes suspended time, and the data plane's clock.
    suspended_ns: Option<u64>,
    reported_at: Option<Time>,
    /// True if a pause was detected in the previous iteration.
    was_late: bool,
}

impl PauseDetector {
    /// Checks at the beginning of an iteration whether the supervisor was paused. Returns the length of the pause, if
    /// any, and an event, unless one was sent recently. `due` is the time at which the iteration should have started,
    /// and `boot_ns` is the time since boot, including suspended time. The data plane's clock stands still while the
    /// machine is suspended, so no deadlines expire.
    pub(super) fn detect(
        &mut self,
        now: Time,
        boot_ns: u64,
        due: Option<Time>,
    ) -> Option<(Duration, Option<EventKind>)> {
        let suspended_ns = boot_ns.saturating_sub(now.0);
        let before_ns = self.suspended_ns.replace(suspended_ns).unwrap_or(suspended_ns);
        let suspended = Duration::from_nanos(suspended_ns.saturating_sub(before_ns));
        let late = due.map_or(Duration::ZERO, |at| now.since(at));
        self.was_late = late.max(suspended) > PAUSE_MIN && !self.was_late;
        if !self.was_late {
            return None;
        }
        let is_reported = self.reported_at.is_none_or(|at| now.since(at) >= EVENT_INTERVAL);
        let event = is_reported.then(|| {
            self.reported_at = Some(now);
            let suspended_ms = (suspended > PAUSE_MIN).then_some(suspended.as_millis() as u64);
            EventKind::HeldUp { late_ms: late.as_millis() as u64, suspended_ms }
        });
        Some((late, event))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Time {
        Time::ZERO + Duration::from_millis(ms)
    }

    /// Calls `PauseDetector::detect` as if the machine had been suspended for a total of `suspended_ms` since boot.
    fn detect(
        detector: &mut PauseDetector,
        now_ms: u64,
        suspended_ms: u64,
        due_ms: u64,
    ) -> Option<(Duration, Option<EventKind>)> {
        detector.detect(at(now_ms), (now_ms + suspended_ms) * 1_000_000, Some(at(due_ms)))
    }

    #[test]
    fn reports_late_iteration_once() {
        let mut detector = PauseDetector::default();
        assert!(detect(&mut detector, 1500, 0, 1000).is_none(), "half a second does not count as a pause");
        let pause = detect(&mut detector, 2600, 0, 2000).unwrap();
        assert_eq!(pause.0, Duration::from_millis(600));
        assert!(matches!(pause.1, Some(EventKind::HeldUp { late_ms: 600, suspended_ms: None })));
        assert!(
            detect(&mut detector, 3200, 0, 2600).is_none(),
            "the iteration after a pause is also late, but must not be reported"
        );
        assert!(
            detect(&mut detector, 3201, 0, 2600).unwrap().1.is_none(),
            "a pause was reported a short time ago"
        );
    }

    #[test]
    fn reports_suspension_of_the_machine() {
        let mut detector = PauseDetector::default();
        assert!(
            detect(&mut detector, 1000, 100, 1000).is_none(),
            "time suspended before the first call must not count"
        );
        let pause = detect(&mut detector, 1100, 60_100, 1100).unwrap();
        assert!(matches!(pause.1, Some(EventKind::HeldUp { late_ms: 0, suspended_ms: Some(60_000) })));
    }
}
