//! What another version of the file changes, told in the file's own keys.

use bulkhead_shared::vocabulary;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Word;

/// The answer of `POST /v1/reload`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Reload")]
#[serde(default)]
pub struct Reloaded {
    /// Whether it was only asked what would change.
    pub dry_run: bool,
    /// What is different.
    #[serde(flatten)]
    pub changes: Changes,
}

/// What a file changes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Changes {
    /// Bulkheads with changes: first those that go, then the others in the order of the file.
    pub bulkheads: Vec<BulkheadChange>,
    /// Keys of `[supervisor]` that have another value now.
    pub supervisor: Vec<String>,
    /// Whether `[[access]]` is another.
    pub access: bool,
    /// Keys of `[supervisor]` that have another value in the file, and keep the one they had at the start.
    pub ignored: Vec<String>,
}

/// What a file changes about one bulkhead.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct BulkheadChange {
    /// Which.
    pub bulkhead: String,
    /// In one word.
    pub change: Word<ChangeKind>,
    /// The keys that have another value.
    pub keys: Vec<String>,
    /// Whether its workers are replaced, one after the other.
    pub replaces_workers: bool,
    /// Keys that were set live and do not go together with the file: its own values hold from here on.
    pub live_dropped: Vec<String>,
}

vocabulary! {
    /// What becomes of a bulkhead.
    ChangeKind {
        /// It is new.
        Added = "added",
        /// It takes no more jobs, and goes when it has none.
        Removed = "removed",
        /// It goes on with other values.
        Changed = "changed",
        /// Its tenants are kept apart now, or are not any more: it goes as if removed, and a new one takes its name.
        Rebuilt = "rebuilt",
    }
}

impl Changes {
    /// Whether there is nothing to be done.
    pub fn is_empty(&self) -> bool {
        self.bulkheads.is_empty() && self.supervisor.is_empty() && !self.access
    }
}
