//! Defines the bodies of requests that change limits through the admin API. The control plane's `bulkheads` receives
//! such requests. The data plane validates and applies the changes.

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

/// New limits of a running bulkhead. Limits whose fields are absent stay unchanged.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Change {
    /// Maximum number of jobs in flight per worker process. If the maximum is lowered, excess jobs still run to
    /// completion.
    #[serde(default, deserialize_with = "non_null")]
    #[schemars(with = "u32")]
    pub max_in_flight: Option<u32>,
    /// Number of worker processes. If the number is lowered, excess workers finish their jobs before they exit.
    #[serde(default, deserialize_with = "non_null")]
    #[schemars(with = "u32", range(min = 1))]
    pub processes: Option<u32>,
    /// Maximum number of queued jobs. If the maximum is lowered, jobs that are already queued stay in the queue.
    #[serde(default, deserialize_with = "non_null")]
    #[schemars(with = "u32")]
    pub max_queue: Option<u32>,
    /// Rate limit of the bulkhead, or `null` to remove the rate limit.
    #[serde(default, deserialize_with = "nullable")]
    #[schemars(with = "Option<ChangedRate>")]
    pub rate_limit: Option<Option<ChangedRate>>,
    /// Operating mode of the circuit breaker: `forced_open` keeps the breaker open, and `auto` lets it follow its own
    /// measurements.
    #[serde(default, deserialize_with = "non_null")]
    #[schemars(with = "BreakerMode")]
    pub breaker: Option<BreakerMode>,
}

/// A rate limit, as in the `rate_limit` table of the configuration.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ChangedRate {
    /// Maximum number of jobs per second, above 0.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub per_second: f64,
    /// Burst size, at least 1. The default is `per_second`, rounded up.
    #[schemars(range(min = 1))]
    pub burst: Option<u32>,
    /// Jobs that share the rate limit. If absent, the current setting is kept. If there is no current rate limit, all
    /// jobs of the bulkhead share the new one.
    pub per: Option<ChangedPer>,
}

/// The jobs that share a rate limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ChangedPer {
    /// All jobs of the bulkhead share one rate limit.
    Bulkhead,
    /// Each tenant has a separate rate limit.
    Tenant,
}

/// Operating mode of a circuit breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum BreakerMode {
    /// The breaker stays open until an operator sets the mode to `auto`.
    ForcedOpen,
    /// The breaker follows its own measurements.
    Auto,
}

/// New limits for one tenant, which apply instead of the bulkhead's limits. Limits whose fields are absent stay
/// unchanged.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TenantChange {
    /// Maximum number of the tenant's jobs in flight. If the tenant has separate workers, the limit applies
    /// to each worker process.
    #[serde(default, deserialize_with = "non_null", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "u32", range(min = 1))]
    pub max_in_flight: Option<u32>,
    /// Number of worker processes of the tenant. Only valid if the tenant has separate workers.
    #[serde(default, deserialize_with = "non_null", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "u32", range(min = 1))]
    pub processes: Option<u32>,
    /// Maximum number of queued jobs of the tenant.
    #[serde(default, deserialize_with = "non_null", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "u32")]
    pub max_queue: Option<u32>,
    /// Rate limit of the tenant.
    #[serde(default, deserialize_with = "non_null", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "TenantRate")]
    pub rate_limit: Option<TenantRate>,
}

/// A rate limit for a single tenant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TenantRate {
    /// Maximum number of jobs per second, above 0.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub per_second: f64,
    /// Burst size, at least 1. The default is `per_second`, rounded up.
    #[schemars(range(min = 1))]
    pub burst: Option<u32>,
}

/// Deserializes a field that is present but can be `null`. A `null` becomes `Some(None)`, so that the field differs
/// from an absent field.
fn nullable<'de, D: Deserializer<'de>, T: Deserialize<'de>>(value: D) -> Result<Option<Option<T>>, D::Error> {
    Option::deserialize(value).map(Some)
}

/// Deserializes a field that is present. Rejects `null`, because the setting can be changed but not removed.
fn non_null<'de, D: Deserializer<'de>, T: Deserialize<'de>>(value: D) -> Result<Option<T>, D::Error> {
    let value = Option::deserialize(value)?;
    let null_error =
        || serde::de::Error::custom("null is not allowed: this setting can be changed but not removed");
    value.map(Some).ok_or_else(null_error)
}
