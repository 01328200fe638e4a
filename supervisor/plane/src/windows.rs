//! What was seen lately, and forgotten when it is old.

use std::time::Duration;

use bulkhead_policy::Time;

/// The seconds of an hour.
pub const HOUR: u64 = 3600;

/// Something in the present window of so many seconds and in the one before it. The windows of all begin together.
#[derive(Clone, Debug, Default)]
pub struct Pair<T, const SECONDS: u64 = HOUR> {
    pub current: T,
    pub previous: T,
    number: u64,
}

impl<T: Default, const SECONDS: u64> Pair<T, SECONDS> {
    /// Whether the present window is another one by now.
    #[inline]
    pub fn is_over(&self, now: Time) -> bool {
        Self::number_of(now) != self.number
    }

    /// Forgets what is too old.
    #[inline]
    pub fn roll(&mut self, now: Time) {
        let number = Self::number_of(now);
        if number == self.number {
            return;
        }
        let full = std::mem::take(&mut self.current);
        self.previous = if number == self.number + 1 { full } else { T::default() };
        self.number = number;
    }

    /// Since when there may be something in it.
    pub fn began(&self) -> Time {
        Time::ZERO
            + Duration::from_secs(SECONDS) * u32::try_from(self.number.saturating_sub(1)).unwrap_or(u32::MAX)
    }

    #[inline]
    fn number_of(now: Time) -> u64 {
        now.since(Time::ZERO).as_secs() / SECONDS
    }
}

impl<T, const SECONDS: u64> Pair<T, SECONDS> {
    /// The present window and the one before it.
    #[inline]
    pub fn both(&self) -> [&T; 2] {
        [&self.current, &self.previous]
    }
}
