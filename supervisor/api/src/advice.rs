//! Defines the document that recommends limits for a bulkhead, with the observations behind the advice. The control
//! plane computes the advice, and `bulkhead advise` shows the document. This module contains only types.

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
    /// Length of the observation in milliseconds.
    pub watched_ms: u64,
    /// Number of observed jobs.
    pub jobs: u64,
    /// True if the observation was long enough and included enough jobs. Otherwise the advice is provisional.
    pub enough: bool,
    /// Sentence that says which observations are still missing. Present if `enough` is false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub missing: Option<String>,
    /// Observations that the advice is based on.
    pub seen: Observations,
    /// Keys whose values should change.
    pub advice: Vec<Proposal<S>>,
    /// Keys whose values should stay the same.
    pub kept: Vec<Kept<S>>,
}

/// A key whose value should change.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Proposal<S: Default = Setting> {
    /// Name of the key in the configuration file.
    pub key: Text,
    /// Current value.
    pub now: S,
    /// Proposed value.
    pub proposed: S,
    /// The reason for the proposal.
    pub reason: String,
}

/// A key whose value should stay the same.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Kept<S: Default = Setting> {
    /// Name of the key in the configuration file.
    pub key: Text,
    /// Current value.
    pub now: S,
    /// The reason for keeping the current value.
    pub reason: String,
}

/// The value of a key, written as in the configuration file.
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

/// Observations of a bulkhead. Each share of time is a fraction of `busy_ms`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(rename = "Seen")]
pub struct Observations {
    /// Length of the observation. Not serialized, because [`Advice`] contains it as `watched_ms`.
    #[serde(skip)]
    pub watched: Duration,
    /// True if a change to the limits started this observation. Not serialized.
    #[serde(skip)]
    pub was_changed: bool,
    /// Number of submitted jobs. Not serialized, because [`Advice`] contains it as `jobs`.
    #[serde(skip)]
    pub jobs: u64,
    /// Time in milliseconds during which the bulkhead had at least one job. If tenants are isolated, the sum over all
    /// tenants.
    pub busy_ms: u64,
    /// Median, 99th percentile and maximum of the number of jobs in flight since the last change to the limits.
    pub concurrency: Marks<u64>,
    /// Median, 99th percentile and maximum of the number of jobs in flight or queued.
    pub demand: Marks<u64>,
    /// Number of queued jobs.
    pub queued: Marks<u64>,
    /// Limit on the number of jobs in flight: `processes` × `max_in_flight`.
    pub limit: u64,
    /// Fraction of `busy_ms` during which no permit was free, although there were enough workers.
    pub time_at_limit: f64,
    /// Fraction of `busy_ms` during which there were too few workers.
    pub time_short_of_workers: f64,
    /// Number of jobs that workers ran.
    pub ran: u64,
    /// Times that jobs spent in the queue, in milliseconds.
    pub queue_ms: Marks<f64>,
    /// Run times of jobs in milliseconds.
    pub run_ms: Marks<f64>,
    /// Mean run time of jobs in milliseconds.
    pub run_mean_ms: f64,
    /// Number of rejected jobs for each reason.
    pub rejected: BTreeMap<Text, u64>,
    /// Number of jobs that missed their deadline.
    pub deadline_exceeded: DeadlineMisses,
    /// Average number of processors that a job in flight used. Absent if jobs ran for less than a second in
    /// total, or if most jobs ran in workers that exited too early to be measured.
    pub processors_per_job: Option<f64>,
    /// Largest resident memory of a single worker in bytes. Absent for `exec` bulkheads, whose jobs run in
    /// other processes.
    pub rss_max_bytes: Option<u64>,
}

/// Median, 99th percentile and maximum of a measured quantity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[expect(missing_docs, reason = "the names are self-explanatory")]
pub struct Marks<T: Default> {
    pub p50: T,
    pub p99: T,
    pub max: T,
}

/// Number of jobs that missed their deadline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(rename = "Late")]
pub struct DeadlineMisses {
    /// Number of jobs that missed their deadline while queued.
    pub queued: u64,
    /// Number of jobs that missed their deadline while running.
    pub running: u64,
    /// Number of jobs that missed the bulkhead's default deadline while running. Not serialized.
    #[serde(skip)]
    pub by_own: u64,
}
