//! The type for points in time, in nanoseconds since an origin chosen by the caller. This crate never reads a clock.
//! The caller passes the time with each event.

use std::ops::{Add, Sub};
use std::time::Duration;

/// Point in time, in nanoseconds since an origin chosen by the caller. Arithmetic saturates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Time(pub u64);

impl Time {
    /// Origin of the clock, which the caller chooses.
    pub const ZERO: Time = Time(0);

    /// Returns the time from `earlier` to `self`, or zero if `self` is not later.
    pub fn since(self, earlier: Time) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Time {
    type Output = Time;

    fn add(self, duration: Duration) -> Time {
        Time(self.0.saturating_add(nanos(duration)))
    }
}

impl Sub<Duration> for Time {
    type Output = Time;

    fn sub(self, duration: Duration) -> Time {
        Time(self.0.saturating_sub(nanos(duration)))
    }
}

/// Returns the earlier of two times. If one of them is `None`, returns the other.
pub(crate) fn earlier<T: Ord>(a: Option<T>, b: Option<T>) -> Option<T> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// Returns the duration in nanoseconds, or `u64::MAX` on overflow.
fn nanos(duration: Duration) -> u64 {
    duration.as_secs().saturating_mul(1_000_000_000).saturating_add(duration.subsec_nanos().into())
}
