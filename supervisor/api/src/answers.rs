//! Short answers.

use bulkhead_policy::BulkheadState;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Text, Word};

/// The answer of `GET /readyz`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Readiness {
    /// The bulkheads that are not ready.
    pub degraded: Vec<ShortState>,
    /// Of the supervisor, or of the bulkhead that was asked for.
    pub status: Word<BulkheadState>,
    /// Milliseconds after which to ask again, if no jobs can be sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<f64>,
}

/// The state of a bulkhead in short.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ShortState {
    /// Why it is not well, if it is not.
    pub detail: Option<String>,
    /// Which.
    pub name: String,
    /// As in its snapshot.
    pub state: Word<BulkheadState>,
}

/// The answer to a verb.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Done {
    /// To which bulkhead.
    pub bulkhead: String,
    /// What was done.
    pub done: Text,
}

/// One line of `GET /v1/bulkheads/{name}/logs`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LogLine {
    /// Lines that the reader was too slow for; all else is absent then.
    pub dropped: Option<u64>,
    /// What was written.
    pub line: String,
    /// By which process.
    pub pid: u32,
    /// To `stdout` or `stderr`.
    pub stream: Text,
}
