//! Short responses of the admin API.

use bulkhead_policy::BulkheadState;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Text, Word};

/// Response of `GET /readyz`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Readiness {
    /// Bulkheads that are not ready.
    pub degraded: Vec<ShortState>,
    /// State of the supervisor, or of the requested bulkhead.
    pub status: Word<BulkheadState>,
    /// Milliseconds after which to ask again, if no jobs can be sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<f64>,
}

/// The short state of a bulkhead.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ShortState {
    /// The reason if the bulkhead is degraded or failed.
    pub detail: Option<String>,
    /// Name of the bulkhead.
    pub name: String,
    /// State, as in the snapshot.
    pub state: Word<BulkheadState>,
}

/// Response to an operator's action.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Done {
    /// Name of the bulkhead.
    pub bulkhead: String,
    /// The action that was carried out.
    pub done: Text,
}

/// A line of `GET /v1/bulkheads/{name}/logs`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LogLine {
    /// Number of lines dropped because the reader was too slow. All other fields are then absent.
    pub dropped: Option<u64>,
    /// Text of the line.
    pub line: String,
    /// Process id of the writer.
    pub pid: u32,
    /// `stdout` or `stderr`.
    pub stream: Text,
}
