//! SplitMix64 random number generator (Steele et al. 2014). A single seed determines all random numbers in a
//! simulation.

use std::time::Duration;

pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a random number from `low` to `high`, inclusive.
    pub(crate) fn range(&mut self, low: u64, high: u64) -> u64 {
        low + self.draw() % (high - low + 1)
    }

    pub(crate) fn percent(&mut self, chance: u64) -> bool {
        self.draw() % 100 < chance
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[(self.draw() % from.len() as u64) as usize]
    }

    /// Returns a random duration from `low` to `high` milliseconds, with a resolution of one microsecond.
    pub(crate) fn millis(&mut self, low: u64, high: u64) -> Duration {
        Duration::from_micros(self.range(low * 1000, high * 1000))
    }
}
