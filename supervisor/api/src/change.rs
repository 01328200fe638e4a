//! What a client of the admin API asks to have changed.

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

/// What can be changed while a bulkhead runs. What is absent stays.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Change {
    /// Jobs in flight per worker process. Where there are more, as many go on until they end.
    pub max_in_flight: Option<u32>,
    /// Worker processes. Those that are too many finish what they have.
    #[schemars(range(min = 1))]
    pub processes: Option<u32>,
    /// Jobs that may wait. Those that wait already stay.
    pub max_queue: Option<u32>,
    /// How fast jobs may come; `null` for as fast as they like.
    #[serde(default, deserialize_with = "named")]
    #[schemars(with = "Option<ChangedRate>")]
    pub rate_limit: Option<Option<ChangedRate>>,
    /// `forced_open`, or `auto` to leave it to itself.
    pub breaker: Option<BreakerMode>,
}

/// `rate_limit`, as in the configuration.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ChangedRate {
    /// Above 0.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub per_second: f64,
    /// At least 1; `per_second`, rounded up, if absent.
    #[schemars(range(min = 1))]
    pub burst: Option<u32>,
    /// The jobs that share it; if absent, those that do so far, or else all.
    pub per: Option<ChangedPer>,
}

/// The jobs that share a rate limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ChangedPer {
    /// All jobs.
    Bulkhead,
    /// The jobs of each tenant.
    Tenant,
}

/// What decides whether a breaker is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum BreakerMode {
    /// It is open until further notice.
    ForcedOpen,
    /// What it sees.
    Auto,
}

/// One tenant's own numbers, in place of the bulkhead's. What is absent stays.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TenantChange {
    /// Jobs of the tenant in flight; per worker process, if it has workers of its own.
    #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "u32", range(min = 1))]
    pub max_in_flight: Option<u32>,
    /// Its worker processes, if it has its own.
    #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "u32", range(min = 1))]
    pub processes: Option<u32>,
    /// Jobs of it that may wait.
    #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "u32")]
    pub max_queue: Option<u32>,
    /// How fast its jobs may come.
    #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "TenantRate")]
    pub rate_limit: Option<TenantRate>,
}

/// A tenant's own `rate_limit`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TenantRate {
    /// Above 0.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub per_second: f64,
    /// At least 1; `per_second`, rounded up, if absent.
    #[schemars(range(min = 1))]
    pub burst: Option<u32>,
}

/// A key that is there, be it with `null`.
fn named<'de, D: Deserializer<'de>, T: Deserialize<'de>>(value: D) -> Result<Option<Option<T>>, D::Error> {
    Option::deserialize(value).map(Some)
}

/// A key that is absent or has a value: there is no number in whose place a tenant's own could be taken away.
fn given<'de, D: Deserializer<'de>, T: Deserialize<'de>>(value: D) -> Result<Option<T>, D::Error> {
    let given = Option::deserialize(value)?;
    let nothing =
        || serde::de::Error::custom("null is no number: a tenant's own can be changed, not taken away");
    given.map(Some).ok_or_else(nothing)
}
