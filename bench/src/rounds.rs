//! How often a measurement is taken.

use std::time::{Duration, Instant};

/// Rounds of a measurement that are taken however long they last: a median of fewer says nothing.
const ROUNDS_MIN: usize = 3;

/// The rounds of a measurement, counted from 0: as many as are planned, or fewer if they last too long.
pub(crate) struct Rounds {
    done: usize,
    most: usize,
    until: Option<Instant>,
}

impl Rounds {
    /// Rounds of a measurement that begins now: so many, or, if that is said, as many as can begin in so long.
    pub(crate) fn new(most: usize, lasts: Option<Duration>) -> Self {
        Self { done: 0, most, until: lasts.map(|lasts| Instant::now() + lasts) }
    }
}

impl Iterator for Rounds {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        let is_late = self.done >= ROUNDS_MIN && self.until.is_some_and(|until| Instant::now() >= until);
        if self.done >= self.most || is_late {
            return None;
        }
        self.done += 1;
        Some(self.done - 1)
    }
}
