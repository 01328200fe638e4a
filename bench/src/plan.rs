//! Defines how many rounds and jobs each measurement runs. [`Plan::full`] is for figures to publish, and
//! [`Plan::smoke`] only checks that the measurements run. `rounds` ends a measurement early if its rounds take too
//! long. A pair, as in `pairs`, consists of one round of each variant that a measurement compares.

use std::time::Duration;

use crate::rounds::Rounds;
use crate::{attacks, confinement, isolation, scale, watched};

/// Time limit for starting new rounds of a measurement, unless `--rounds` is given.
const ROUNDS_TIME_MAX: Duration = Duration::from_secs(5);

/// Maximum number of rounds per measurement, unless `--rounds` is given.
const ROUNDS: usize = 9;

/// Sizes of all measurements.
pub(crate) struct Plan {
    rounds: usize,
    /// Time limit for starting new rounds of a measurement, or `None` for no limit.
    duration: Option<Duration>,
    /// Number of requests per round that are sent one at a time, with payloads of 64 B or 4 KiB.
    pub(crate) small: usize,
    /// Number of 1 MiB requests per round. The number of 64 MiB requests is 1/32 of this number.
    pub(crate) large: usize,
    /// Number of requests per round when many are in flight.
    pub(crate) many: usize,
    /// Maximum number of times that a measurement kills a worker or lets a job hang.
    pub(crate) deaths: usize,
    /// Total number of jobs per round in the measurement with four bulkheads.
    pub(crate) crowd: usize,
    /// Total number of jobs per round in three bulkheads while the workers of a fourth bulkhead crash.
    pub(crate) storm: usize,
    /// Number of jobs per round when only the decisions of the policy are measured, without running workers.
    pub(crate) decisions: usize,
    /// Number of programs to run per round.
    pub(crate) programs: usize,
    pub(crate) confinement: confinement::Plan,
    /// Plan for the measurements in which other processes read metrics and events.
    pub(crate) watched: watched::Plan,
    pub(crate) attacks: attacks::Plan,
    pub(crate) isolation: isolation::Plan,
    pub(crate) scale: scale::Plan,
}

impl Plan {
    /// Returns the plan for `rounds` rounds. If `rounds` is `None`, the number of rounds depends on the duration of a
    /// round.
    pub(crate) fn full(rounds: Option<usize>) -> Self {
        Self {
            rounds: rounds.unwrap_or(ROUNDS).max(1),
            duration: rounds.is_none().then_some(ROUNDS_TIME_MAX),
            small: 8_000,
            large: 300,
            many: 262_144,
            deaths: 30,
            crowd: 10_000,
            storm: 262_144,
            decisions: 100_000,
            programs: 1_000,
            confinement: confinement::Plan {
                starts: 50,
                pairs: 20,
                duration: rounds.is_none().then_some(ROUNDS_TIME_MAX),
                one_by_one: 4_000,
                many: 65_536,
            },
            watched: watched::Plan { pairs: 20, one_by_one: 16_000, many: 524_288 },
            attacks: attacks::Plan { pairs: 5, duration: Duration::from_secs(2) },
            isolation: isolation::Plan { pairs: rounds.unwrap_or(5).max(1), jobs: 600 },
            scale: scale::Plan {
                rounds: rounds.unwrap_or(5).max(1),
                one_by_one: 8_000,
                many: 65_536,
                bulkheads: 1_000,
                tenants: 10_000,
                active: 500,
                clients: 1_000,
                waiting: 100,
                idle: Duration::from_secs(20),
            },
        }
    }

    /// Returns a plan with very few rounds and jobs, which only serves to check that the measurements run.
    pub(crate) fn smoke() -> Self {
        Self {
            rounds: 1,
            duration: None,
            small: 200,
            large: 5,
            many: 4_096,
            deaths: 2,
            crowd: 200,
            storm: 4_096,
            decisions: 2_000,
            programs: 20,
            confinement: confinement::Plan {
                starts: 2,
                pairs: 2,
                duration: None,
                one_by_one: 200,
                many: 4_096,
            },
            watched: watched::Plan { pairs: 2, one_by_one: 200, many: 4_096 },
            attacks: attacks::Plan { pairs: 1, duration: Duration::from_millis(200) },
            isolation: isolation::Plan { pairs: 1, jobs: 60 },
            scale: scale::Plan {
                rounds: 1,
                one_by_one: 100,
                many: 1_024,
                bulkheads: 3,
                tenants: 20,
                active: 5,
                clients: 4,
                waiting: 20,
                idle: Duration::from_millis(100),
            },
        }
    }

    /// Returns an iterator over the rounds of a measurement.
    pub(crate) fn rounds(&self) -> Rounds {
        self.rounds_of(self.rounds)
    }

    /// Returns an iterator over at most `most` rounds of a measurement.
    pub(crate) fn rounds_of(&self, most: usize) -> Rounds {
        Rounds::new(most, self.duration)
    }
}
