//! What the limits of a bulkhead should be, and what was seen of it that says so.

use std::collections::BTreeMap;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Text;

/// The answer of `GET /v1/bulkheads/{name}/advice`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Advice<S: Default = Setting> {
    /// On which.
    pub bulkhead: String,
    /// For how long it was seen.
    pub watched_ms: u64,
    /// Jobs that were seen.
    pub jobs: u64,
    /// Whether that is enough to rely on; otherwise what is said is provisional.
    pub enough: bool,
    /// What there is too little of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub missing: Option<String>,
    /// What the advice rests on.
    pub seen: Seen,
    /// Keys that should have another value.
    pub advice: Vec<Proposal<S>>,
    /// Keys that are right as they are, as far as one can tell.
    pub kept: Vec<Kept<S>>,
}

/// One key that should have another value.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Proposal<S: Default = Setting> {
    /// As in the file.
    pub key: Text,
    /// The value in force.
    pub now: S,
    /// The better one.
    pub proposed: S,
    /// Why.
    pub reason: String,
}

/// One key that is right as it is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Kept<S: Default = Setting> {
    /// As in the file.
    pub key: Text,
    /// The value in force.
    pub now: S,
    /// Why.
    pub reason: String,
}

/// The value of a key, as the file has it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Setting {
    /// It is not there.
    #[default]
    Unset,
    /// A number.
    Count(u64),
    /// A duration or a size.
    Text(String),
}

/// What was seen of a bulkhead. Shares of time are of the time in which it had jobs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Seen {
    /// For how long; told beside this.
    #[serde(skip)]
    pub watched: Duration,
    /// Whether the limits were changed before that; not told.
    #[serde(skip)]
    pub was_changed: bool,
    /// Jobs that came; told beside this.
    #[serde(skip)]
    pub jobs: u64,
    /// How long there were jobs; summed over tenants, where they are apart.
    pub busy_ms: u64,
    /// Jobs in flight, under the numbers in force.
    pub concurrency: Marks<u64>,
    /// Jobs in flight and waiting together.
    pub demand: Marks<u64>,
    /// Jobs that waited.
    pub queued: Marks<u64>,
    /// Jobs that may be in flight.
    pub limit: u64,
    /// The share of time in which no permit was free.
    pub time_at_limit: f64,
    /// The share of time in which workers were missing.
    pub time_short_of_workers: f64,
    /// How many jobs a worker had.
    pub ran: u64,
    /// How long jobs waited.
    pub queue_ms: Marks<f64>,
    /// How long they ran.
    pub run_ms: Marks<f64>,
    /// The same, on average.
    pub run_mean_ms: f64,
    /// By reason.
    pub rejected: BTreeMap<Text, u64>,
    /// Jobs that missed their deadline.
    pub deadline_exceeded: Late,
    /// Processors that a job in flight used, if that is known.
    pub processors_per_job: Option<f64>,
    /// The most that one worker held, if that says anything.
    pub rss_max_bytes: Option<u64>,
}

/// A distribution, by its marks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Marks<T: Default> {
    pub p50: T,
    pub p99: T,
    pub max: T,
}

/// Jobs that missed their deadline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Late {
    /// While they waited.
    pub queued: u64,
    /// While they ran.
    pub running: u64,
    /// Those that ran and had as long as the bulkhead gives; not told.
    #[serde(skip)]
    pub by_own: u64,
}
