//! Advice on the limits of a bulkhead, with the observations behind it.

use std::collections::BTreeMap;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Text;

/// Response of `GET /v1/bulkheads/{name}/advice`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Advice<S: Default = Setting> {
    /// Name of the bulkhead.
    pub bulkhead: String,
    /// Length of the observation.
    pub watched_ms: u64,
    /// Number of observed jobs.
    pub jobs: u64,
    /// True if the observation is sufficient to rely on. Otherwise the advice is provisional.
    pub enough: bool,
    /// The reason why the observation is not sufficient.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub missing: Option<String>,
    /// Observations that the advice is based on.
    pub seen: Observations,
    /// Keys that should have another value.
    pub advice: Vec<Proposal<S>>,
    /// Keys that should keep their value.
    pub kept: Vec<Kept<S>>,
}

/// A key that should have another value.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Proposal<S: Default = Setting> {
    /// Key in the configuration file.
    pub key: Text,
    /// Current value.
    pub now: S,
    /// Proposed value.
    pub proposed: S,
    /// The reason for the proposal.
    pub reason: String,
}

/// A key that should keep its value.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Kept<S: Default = Setting> {
    /// Key in the configuration file.
    pub key: Text,
    /// Current value.
    pub now: S,
    /// The reason to keep the value.
    pub reason: String,
}

/// The value of a key, as in the configuration file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Setting {
    /// The key is not set.
    #[default]
    Unset,
    /// A number.
    Count(u64),
    /// A duration or size.
    Text(String),
}

/// Observations of a bulkhead. Shares of time refer to the time with jobs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(rename = "Seen")]
pub struct Observations {
    /// Length of the observation. Not serialized, because [`Advice`] has it.
    #[serde(skip)]
    pub watched: Duration,
    /// True if the limits changed at the beginning of the observation. Not serialized.
    #[serde(skip)]
    pub was_changed: bool,
    /// Number of submitted jobs. Not serialized, because [`Advice`] has it.
    #[serde(skip)]
    pub jobs: u64,
    /// Time with jobs, summed over isolated tenants.
    pub busy_ms: u64,
    /// Jobs in flight under the current limits.
    pub concurrency: Marks<u64>,
    /// Jobs in flight and queued.
    pub demand: Marks<u64>,
    /// Queued jobs.
    pub queued: Marks<u64>,
    /// Maximum number of jobs in flight.
    pub limit: u64,
    /// Share of time without a free permit.
    pub time_at_limit: f64,
    /// Share of time with missing workers.
    pub time_short_of_workers: f64,
    /// Number of jobs that a worker ran.
    pub ran: u64,
    /// Waiting times of jobs.
    pub queue_ms: Marks<f64>,
    /// Run times of jobs.
    pub run_ms: Marks<f64>,
    /// Mean run time.
    pub run_mean_ms: f64,
    /// Rejected jobs, by reason.
    pub rejected: BTreeMap<Text, u64>,
    /// Jobs that missed their deadline.
    pub deadline_exceeded: DeadlineMisses,
    /// Processors used per job in flight, if known.
    pub processors_per_job: Option<f64>,
    /// Largest resident memory of one worker, if meaningful.
    pub rss_max_bytes: Option<u64>,
}

/// A distribution, by its quantiles and maximum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[expect(missing_docs, reason = "the names are self-explanatory")]
pub struct Marks<T: Default> {
    pub p50: T,
    pub p99: T,
    pub max: T,
}

/// Jobs that missed their deadline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(rename = "Late")]
pub struct DeadlineMisses {
    /// Jobs that missed their deadline while queued.
    pub queued: u64,
    /// Jobs that missed their deadline while running.
    pub running: u64,
    /// Running jobs that had the bulkhead's own deadline. Not serialized.
    #[serde(skip)]
    pub by_own: u64,
}
