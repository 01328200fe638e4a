//! The types that describe the changes made by a reload, listed by configuration key. `bulkhead_plane::reload` compares
//! the configurations, and `POST /v1/reload` and events contain the result.

use bulkhead_shared::vocabulary;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Word;

/// Response of `POST /v1/reload`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Reload")]
#[serde(default)]
pub struct Reloaded {
    /// True if the request was a dry run, so that no change was applied.
    pub dry_run: bool,
    /// Differences between the active configuration and the file.
    #[serde(flatten)]
    pub changes: Changes,
}

/// Fields of the problem document for a configuration with errors.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct RejectedConfig {
    /// All errors in the configuration, sorted by file and line.
    pub errors: Vec<ConfigProblem>,
    /// Path of the configuration file.
    pub file: String,
}

/// An error in the configuration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct ConfigProblem {
    /// Path of the file that contains the error: the configuration file or a file in `conf.d`.
    pub file: String,
    /// Line number, starting at 1. Absent if the file as a whole could not be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<usize>,
    /// Column number in characters, starting at 1. Absent if the file as a whole could not be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub column: Option<usize>,
    /// Description of the error.
    pub message: String,
    /// Suggested correction.
    pub help: Option<String>,
}

/// Changes between two versions of the configuration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Changes {
    /// Changed bulkheads. Removed bulkheads come first, followed by the others in the order in which the file lists
    /// them.
    pub bulkheads: Vec<BulkheadChange>,
    /// Keys of `[supervisor]` that have new values.
    pub supervisor: Vec<String>,
    /// True if the rules in `[[access]]` changed.
    pub access: bool,
    /// Keys of `[supervisor]` whose new values take effect only after a restart.
    pub ignored: Vec<String>,
}

/// Changes to one bulkhead.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct BulkheadChange {
    /// Name of the bulkhead.
    pub bulkhead: String,
    /// Kind of change.
    pub change: Word<ChangeKind>,
    /// Keys of the bulkhead that have new values.
    pub keys: Vec<String>,
    /// True if the reload replaces the workers, one at a time.
    pub replaces_workers: bool,
    /// Keys that an operator changed through the admin API. The reload discards these changes, because they are not
    /// compatible with the new file.
    pub live_dropped: Vec<String>,
}

vocabulary! {
    /// Kind of change to a bulkhead.
    ChangeKind {
        /// The bulkhead is new.
        Added = "added",
        /// The bulkhead accepts no more jobs and is removed once its last job has finished.
        Removed = "removed",
        /// The bulkhead continues to run, with new values.
        Changed = "changed",
        /// Tenant isolation was switched on or off. The bulkhead is removed, and a new bulkhead with the same name
        /// replaces it.
        Rebuilt = "rebuilt",
    }
}

impl Changes {
    /// Returns true if a reload would change nothing. Does not take the keys in `ignored` into account.
    pub fn is_empty(&self) -> bool {
        self.bulkheads.is_empty() && self.supervisor.is_empty() && !self.access
    }
}
