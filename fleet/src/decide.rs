//! An agent's decisions about one message, without I/O, a clock or randomness.
//!
//! [`delivery`] and [`outcome`] contain the two decision tables. [`Handling`] applies them to one message. The agent
//! passes in each event with the current time, and performs the step that is returned. The simulator in the tests runs
//! the same code.

pub mod delivery;
mod handling;
pub mod outcome;
#[cfg(test)]
mod tests;

use std::time::Duration;

pub use handling::{Action, Conclusion, Event, Handling, Step, Write, WriteResult};

/// Time since the Unix epoch, according to the server's clock.
pub type Timestamp = Duration;

/// A message delivered from the stream of jobs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Stream sequence number of the message.
    pub stream_sequence: u64,
    /// Number of times that the message has been delivered, including this delivery.
    pub delivery: u64,
    /// Time at which the server stored the message.
    pub published: Timestamp,
}

/// Job options that influence decisions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Name of the bulkhead.
    pub bulkhead: String,
    /// Time limit from the publication of the job to the outcome.
    pub deadline: Duration,
    /// True if the job can safely run twice.
    pub is_idempotent: bool,
}

/// Fleet settings that influence decisions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Time without an acknowledgement after which the server redelivers a message.
    pub ack_wait: Duration,
    /// Time without a heartbeat after which a host is considered lost.
    pub host_lost_after: Duration,
    /// Maximum number of attempts to run an idempotent job.
    pub attempts_max: u32,
    /// Maximum size of a result, in bytes. The server rejects larger messages. Changes when the server's limit changes.
    pub result_bytes_max: usize,
    /// True if the bulkhead has one rate limit for all tenants. A job that exceeds this limit delays other tenants.
    pub is_rate_limit_shared: bool,
    /// True if each tenant has its own workers, so that a rejection says nothing about other tenants.
    pub is_isolated: bool,
    /// Injected faults, for tests.
    #[doc(hidden)]
    pub faults: Faults,
}

/// Faults that tests inject to verify that the simulation detects the resulting bugs. No configuration can enable
/// these faults.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Acknowledges the message before the outcome is recorded.
    pub acknowledges_before_record: bool,
    /// Claims a job without specifying the expected sequence number of the job's record.
    pub claims_without_expectation: bool,
    /// Takes over another agent's claim at the first redelivery of the message.
    pub takes_over_at_first_redelivery: bool,
    /// Treats a write that is still pending as if another agent had written the record.
    pub mistakes_pending_write_for_refusal: bool,
    /// Runs a job whose record cannot be decoded.
    pub claims_despite_unreadable_record: bool,
    /// Stores the dead letter again for each message with the same ID.
    pub restores_dead_letters: bool,
}

/// Minimum delay before a returned job is delivered again.
pub const RETURN_DELAY_MIN: Duration = Duration::from_millis(250);

/// Maximum delay before a returned job is delivered again.
pub const RETURN_DELAY_MAX: Duration = Duration::from_secs(60);

impl Terms {
    /// Returns the time left until the job's deadline, or zero if the deadline has passed.
    pub fn time_left(&self, message: &Message, now: Timestamp) -> Duration {
        message.published.saturating_add(self.deadline).saturating_sub(now)
    }
}
