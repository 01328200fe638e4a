//! Defines short documents of the admin API, for readiness, steps of an upgrade, completed actions and lines of output.
//! The control plane sends them, and clients such as the `bulkhead` command read them. Longer documents have separate
//! files.

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
    /// Milliseconds to wait before checking again. Present only if no jobs can be sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<f64>,
}

/// Name and state of a bulkhead.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ShortState {
    /// Reason why the bulkhead is degraded or failed.
    pub detail: Option<String>,
    /// Name of the bulkhead.
    pub name: String,
    /// State of the bulkhead, as reported by `GET /v1/bulkheads/{name}`.
    pub state: Word<BulkheadState>,
}

/// A line of the response to `POST /v1/upgrade`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct UpgradeStep {
    /// The step that was reached: `started`, `ready`, `switched` or `finished`. The value is `failed` if the old
    /// program continues to serve, and `stopped` if the supervisor stops.
    pub step: Text,
    /// Process ID of the new program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Version of the new program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Reason for a failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

impl UpgradeStep {
    /// Creates a response line for the given step. All other fields are empty.
    pub fn new(step: &'static str) -> Self {
        Self { step: step.into(), ..Self::default() }
    }
}

/// Response to a request that acts on a bulkhead.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Done {
    /// Name of the bulkhead.
    pub bulkhead: String,
    /// The action that was carried out.
    pub done: Text,
    /// ID of the job that the action affected, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub job: Option<String>,
}

/// A line of output, as shown by `GET /v1/bulkheads/{name}/logs`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LogLine {
    /// Time at which the line was read, in UTC, formatted as in RFC 3339.
    pub at: String,
    /// Name of the bulkhead.
    pub bulkhead: String,
    /// Number of lines that were dropped because there were too many or the reader was too slow. An object with this
    /// field contains no line.
    pub dropped: Option<u64>,
    /// Text of the line.
    pub line: String,
    /// Process ID of the worker that wrote the line.
    pub pid: u32,
    /// Sequence number of the line within its bulkhead, starting at 1. Absent if the object reports lines that were
    /// dropped because the reader was too slow.
    pub seq: Option<u64>,
    /// Stream to which the line was written: `stdout` or `stderr`.
    pub stream: Text,
}
