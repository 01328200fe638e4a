//! How much is measured.

use std::time::Duration;

use crate::{attacks, confinement, watched};

/// How much of everything.
pub(crate) struct Plan {
    pub(crate) rounds: usize,
    /// Requests of 64 B and 4 KiB, one at a time, in each round.
    pub(crate) small: usize,
    /// Requests of 1 MiB in each round.
    pub(crate) large: usize,
    /// Requests when many are in flight, in each round.
    pub(crate) many: usize,
    /// Deaths and hangs, all told.
    pub(crate) deaths: usize,
    /// Jobs over four bulkheads in each round.
    pub(crate) crowd: usize,
    /// Jobs of three bulkheads in each round, while the fourth crashes.
    pub(crate) storm: usize,
    /// Jobs for the decisions alone in each round.
    pub(crate) decisions: usize,
    /// Programs in each round.
    pub(crate) programs: usize,
    pub(crate) confinement: confinement::Plan,
    pub(crate) watched: watched::Plan,
    pub(crate) attacks: attacks::Plan,
}

impl Plan {
    pub(crate) fn full(rounds: usize) -> Self {
        Self {
            rounds: rounds.max(1),
            small: 8_000,
            large: 300,
            many: 262_144,
            deaths: 30,
            crowd: 10_000,
            storm: 262_144,
            decisions: 100_000,
            programs: 1_000,
            confinement: confinement::Plan { starts: 50, pairs: 20, one_by_one: 4_000, many: 65_536 },
            watched: watched::Plan { pairs: 20, one_by_one: 16_000, many: 524_288 },
            attacks: attacks::Plan { pairs: 5, lasts: Duration::from_secs(2) },
        }
    }

    pub(crate) fn smoke() -> Self {
        Self {
            rounds: 1,
            small: 200,
            large: 5,
            many: 4_096,
            deaths: 2,
            crowd: 200,
            storm: 4_096,
            decisions: 2_000,
            programs: 20,
            confinement: confinement::Plan { starts: 2, pairs: 2, one_by_one: 200, many: 4_096 },
            watched: watched::Plan { pairs: 2, one_by_one: 200, many: 4_096 },
            attacks: attacks::Plan { pairs: 1, lasts: Duration::from_millis(200) },
        }
    }
}
