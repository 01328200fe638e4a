//! The decisions of an agent about one message: no I/O, no clock, no randomness.
//!
//! [`delivery`] and [`outcome`] are the two tables of the design. [`Handling`] applies them to one message: the agent
//! passes in each event with the time, and performs the returned step. The simulator of the tests runs the same code.

pub mod delivery;
mod handling;
pub mod outcome;
#[cfg(test)]
mod tests;

use std::time::Duration;

pub use handling::{Action, Conclusion, Event, Handling, Step, Write, WriteResult};

/// Time since the Unix epoch, by the clock of the server.
pub type Timestamp = Duration;

/// A delivered message of the stream of jobs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Sequence of the message in the stream.
    pub stream_sequence: u64,
    /// Number of deliveries of the message, this one included.
    pub delivery: u64,
    /// Time at which the server stored the message.
    pub published: Timestamp,
}

/// The options of a job that influence decisions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Name of the bulkhead.
    pub bulkhead: String,
    /// Time limit from publication to outcome.
    pub deadline: Duration,
    /// True if the job can safely run twice.
    pub is_idempotent: bool,
}

/// The settings of a fleet that influence decisions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Time after which the server delivers a message again if no agent holds the message.
    pub ack_wait: Duration,
    /// Time after which a host without a sign of life is lost.
    pub host_lost_after: Duration,
    /// Maximum number of attempts of an idempotent job.
    pub attempts_max: u32,
    /// Maximum size of a result, in bytes. The server rejects larger messages.
    pub result_bytes_max: usize,
    /// Planted faults, for tests.
    #[doc(hidden)]
    pub faults: Faults,
}

/// Faults that tests plant in order to prove that they would be found. No configuration sets them.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Acknowledges the message before the outcome is recorded.
    pub acknowledges_before_record: bool,
    /// Claims a job without naming the expected record.
    pub claims_without_expectation: bool,
    /// Takes over a foreign claim at the first later delivery.
    pub takes_over_at_first_redelivery: bool,
    /// Takes "a write is in process" for the success of another writer.
    pub mistakes_pending_write_for_refusal: bool,
}

/// Shortest delay before a returned job is delivered again.
pub const RETURN_DELAY_MIN: Duration = Duration::from_millis(250);

/// Longest delay before a returned job is delivered again.
pub const RETURN_DELAY_MAX: Duration = Duration::from_secs(60);

impl Terms {
    /// Returns the remaining time of a job, zero if the deadline has passed.
    pub fn time_left(&self, message: &Message, now: Timestamp) -> Duration {
        (message.published + self.deadline).saturating_sub(now)
    }
}
