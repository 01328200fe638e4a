//! Ends a measurement after a maximum number of rounds, or earlier if the rounds take too long. The time limit never
//! applies to the first three rounds. `plan` and the measurements choose the limits, and run the rounds.

use std::time::{Duration, Instant};

/// Minimum number of rounds, regardless of how long they take. The median of fewer rounds would be meaningless.
const ROUNDS_MIN: usize = 3;

/// Iterator over the round numbers of a measurement, starting with 0. Ends early if the rounds take too long.
pub(crate) struct Rounds {
    done: usize,
    most: usize,
    until: Option<Instant>,
}

impl Rounds {
    /// Prepares up to `most` rounds of a measurement that starts now. After `duration`, another round starts only if
    /// fewer than [`ROUNDS_MIN`] rounds have been run.
    pub(crate) fn new(most: usize, duration: Option<Duration>) -> Self {
        Self { done: 0, most, until: duration.map(|duration| Instant::now() + duration) }
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
