//! The record of a job in the ledger. The record decides: a job has the outcome that its `decided` record has. This
//! module does no I/O and knows no message format.

use bulkhead_shared::Outcome;
use bytes::Bytes;

/// State of a job, as the ledger has it.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// Distinguishes this write from every other write, so that a writer recognises its record.
    pub nonce: String,
    /// Name of the agent that wrote the record.
    pub agent: String,
    /// Number of counted attempts. The current attempt of a claim is included.
    pub attempts: u32,
    /// The phase of the job.
    pub phase: Phase,
}

/// Phase of a job.
#[derive(Clone, Debug, PartialEq)]
pub enum Phase {
    /// An agent holds the job, and may have submitted the job to its supervisor.
    Claimed {
        /// Sequence of the claimed message in the stream of jobs.
        stream_sequence: u64,
        /// Number of deliveries of the message, up to the claim.
        delivery: u64,
        /// Outcome of the previous attempt, if there was one.
        previous: Option<Outcome>,
    },
    /// The job waits for another attempt.
    Returned {
        /// Outcome of the previous attempt.
        previous: Outcome,
    },
    /// The job has ended. This phase is final.
    Decided(Ending),
}

/// The end of a job.
#[derive(Clone, Debug, PartialEq)]
pub struct Ending {
    /// Outcome of the job.
    pub outcome: Outcome,
    /// Result if the outcome is `ok`, payload of the failure if the outcome is `failed`.
    pub payload: Bytes,
}

/// A record with its position in the ledger.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    /// Sequence of the record in the ledger stream.
    pub sequence: u64,
    /// The record.
    pub record: Record,
}
