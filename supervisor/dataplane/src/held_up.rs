//! Detects pauses of the supervisor (SIGSTOP, CPU starvation, suspend), so that they are not mistaken for
//! unresponsive workers or clients. Reports pauses to operators.

use std::time::Duration;

use bulkhead_api::{EventKind, Severity};
use bulkhead_policy::{Event, Time};
use rustix::time::{ClockId, clock_gettime};

use super::{DataPlane, Incoming};

/// Minimum delay of an iteration that counts as a pause of the supervisor.
const HELD_UP: Duration = Duration::from_millis(500);

/// Minimum interval between events about pauses.
const TOLD_EVERY: Duration = Duration::from_secs(1);

/// State of the pause detection.
#[derive(Default)]
pub(super) struct Pauses {
    /// Difference between `CLOCK_BOOTTIME`, which includes suspended time, and the data plane's clock, in
    /// nanoseconds.
    ahead_ns: Option<u64>,
    told_at: Option<Time>,
    /// True if the previous iteration came too late.
    is_over: bool,
}

impl Pauses {
    /// Returns how long the machine was suspended since the last call. The data plane's clock, and with it every
    /// deadline, stood still during that time.
    fn suspended(&mut self, now: Time) -> Duration {
        let clock = clock_gettime(ClockId::Boottime);
        let since_boot_ns = clock.tv_sec as u64 * 1_000_000_000 + clock.tv_nsec as u64;
        let ahead_ns = since_boot_ns.saturating_sub(now.0);
        let before_ns = self.ahead_ns.replace(ahead_ns).unwrap_or(ahead_ns);
        Duration::from_nanos(ahead_ns.saturating_sub(before_ns))
    }
}

impl DataPlane {
    /// Checks for a pause at the beginning of an iteration that was due at `due`. Returns true if timers must wait
    /// for the next iteration, because answers that arrived during the pause may be unread and take precedence.
    pub(super) fn mind_pause(&mut self, due: Option<Time>) -> bool {
        let suspended = self.pauses.suspended(self.now);
        let late = due.map_or(Duration::ZERO, |at| self.now.since(at));
        self.pauses.is_over = late.max(suspended) > HELD_UP && !self.pauses.is_over;
        if !self.pauses.is_over {
            return false;
        }
        self.keeper.excuse(self.now);
        for session in self.sessions.values_mut() {
            session.excuse(late, self.now);
        }
        for index in self.compartments.indices() {
            self.apply(index, Event::SupervisorPaused, Incoming::None);
        }
        if self.pauses.told_at.is_none_or(|at| self.now.since(at) >= TOLD_EVERY) {
            self.pauses.told_at = Some(self.now);
            let suspended_ms = (suspended > HELD_UP).then_some(suspended.as_millis() as u64);
            let what = EventKind::HeldUp { late_ms: late.as_millis() as u64, suspended_ms };
            self.event(Severity::Warning, None, what);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use bulkhead_plane::access::Grant;
    use bulkhead_shared::in_process;

    use super::*;
    use crate::client_end::ClientEnd;
    use crate::sessions::{Session, Stage};
    use crate::shares::{Owner, Shares};

    #[test]
    fn a_pause_is_not_held_against_clients() {
        let at = |seconds: u64| Time::ZERO + Duration::from_secs(seconds);
        let (end, _client) = in_process::pair();
        let holder = Shares::default().open(Owner::User(1), 1);
        let stage = Stage::AwaitingHello { since: at(1) };
        let end = ClientEnd::InProcess(end);
        let mut session =
            Session::new(end, (None, Grant::Unrestricted), stage, (Owner::User(1), holder), (1, at(1)));
        session.mid_frame_since = Some(at(2));
        // This time lies within the pause, so it moves to the current time at most.
        session.unread_since = Some(at(50));
        session.excuse(Duration::from_secs(40), at(60));
        assert!(session.stage == Stage::AwaitingHello { since: at(41) });
        assert_eq!((session.mid_frame_since, session.unread_since), (Some(at(42)), Some(at(60))));
    }
}
