//! A job's record in the ledger, independent of how the record is encoded. A `decided` record contains the final
//! outcome. `decide` determines the next record, `format` encodes it, and `server::ledger` stores it.

use std::fmt;

use bulkhead_shared::Outcome;
use bytes::Bytes;

/// State of a job in the ledger.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// Unique value for each write. A writer recognizes its own record by this value.
    pub nonce: String,
    /// Name of the agent that wrote the record.
    pub agent: String,
    /// Number of attempts that count towards the limit, including any attempt in progress.
    pub attempts: u32,
    /// The phase of the job.
    pub phase: Phase,
}

/// Phase of a job.
#[derive(Clone, Debug, PartialEq)]
pub enum Phase {
    /// An agent has claimed the job. The agent may already have submitted the job to its supervisor.
    Claimed {
        /// Stream sequence number of the claimed message.
        stream_sequence: u64,
        /// Number of times the message had been delivered when the job was claimed.
        delivery: u64,
        /// Outcome of the previous attempt, if there was one.
        previous: Option<Outcome>,
    },
    /// The job is waiting for another attempt.
    Returned {
        /// Outcome of the previous attempt.
        previous: Outcome,
        /// The delivery after which the job was returned. `None` if an earlier version of this program wrote the record.
        delivery: Option<Delivery>,
    },
    /// The job has a final outcome, which never changes.
    Decided {
        /// Outcome of the job.
        ending: Ending,
        /// Stream sequence number of the message whose handling led to the outcome. `None` if an earlier version of this
        /// program wrote the record.
        stream_sequence: Option<u64>,
    },
}

/// Identifies a delivery of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delivery {
    /// Stream sequence number of the message.
    pub stream_sequence: u64,
    /// Number of times the message had been delivered, including this delivery.
    pub number: u64,
}

/// Final outcome of a job, with the result or the error payload.
#[derive(Clone, Debug, PartialEq)]
pub struct Ending {
    /// Outcome of the job.
    pub outcome: Outcome,
    /// The result if the outcome is `ok`, or the error payload if the outcome is `failed`.
    pub payload: Bytes,
}

/// A record with its sequence number in the ledger.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    /// Stream sequence number of the record.
    pub sequence: u64,
    /// The record.
    pub record: Record,
}

/// Failure to read a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReadError {
    /// The server did not respond, or returned an error.
    Failed(String),
    /// The ledger contains a message that this program cannot decode.
    Unreadable {
        /// Stream sequence number of the message.
        sequence: u64,
        /// True if the message claims to contain the job's final outcome. A later version of this program could have
        /// written such a message.
        is_decided: bool,
        /// Human-readable reason.
        message: String,
    },
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(message) | Self::Unreadable { message, .. } => f.write_str(message),
        }
    }
}

impl std::error::Error for ReadError {}
