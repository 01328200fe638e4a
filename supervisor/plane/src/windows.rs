//! Stores a value for the current time window and one for the previous window, so that both cover one to two window
//! lengths. The caller passes the time and fills in the values. Used for demand, latencies and resource usage.

use std::time::Duration;

use bulkhead_policy::Time;

/// Number of seconds in an hour.
pub const HOUR: u64 = 3600;

/// Values for the current and the previous time window, each `SECONDS` long. Windows begin at multiples of their length
/// after [`Time::ZERO`], so that all pairs with windows of the same length switch to the next window at the same time.
#[derive(Clone, Debug, Default)]
pub struct WindowPair<T, const SECONDS: u64 = HOUR> {
    pub current: T,
    pub previous: T,
    index: u64,
}

impl<T: Default, const SECONDS: u64> WindowPair<T, SECONDS> {
    /// Returns true if the current window has ended.
    #[inline]
    pub fn is_over(&self, now: Time) -> bool {
        Self::index_of(now) != self.index
    }

    /// Starts a new window if the current one has ended. Discards values older than the previous window.
    #[inline]
    pub fn roll(&mut self, now: Time) {
        let index = Self::index_of(now);
        if index == self.index {
            return;
        }
        let ended = std::mem::take(&mut self.current);
        self.previous = if index == self.index + 1 { ended } else { T::default() };
        self.index = index;
    }

    /// Returns the time at which the previous window began.
    pub fn began(&self) -> Time {
        Time::ZERO
            + Duration::from_secs(SECONDS) * u32::try_from(self.index.saturating_sub(1)).unwrap_or(u32::MAX)
    }

    #[inline]
    fn index_of(now: Time) -> u64 {
        now.since(Time::ZERO).as_secs() / SECONDS
    }
}

impl<T, const SECONDS: u64> WindowPair<T, SECONDS> {
    /// Returns the current and the previous window.
    #[inline]
    pub fn both(&self) -> [&T; 2] {
        [&self.current, &self.previous]
    }
}
