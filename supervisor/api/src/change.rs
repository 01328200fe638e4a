//! Bodies of requests that change limits through the admin API.

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

/// Limits of a running bulkhead to change. Absent fields stay unchanged.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Change {
    /// Jobs in flight per worker process. Excess jobs already in flight run to their end.
    pub max_in_flight: Option<u32>,
    /// Number of worker processes. Excess workers finish their jobs first.
    #[schemars(range(min = 1))]
    pub processes: Option<u32>,
    /// Maximum number of queued jobs. Excess jobs already in the queue stay.
    pub max_queue: Option<u32>,
    /// Rate limit of the bulkhead, or `null` for none.
    #[serde(default, deserialize_with = "nullable")]
    #[schemars(with = "Option<ChangedRate>")]
    pub rate_limit: Option<Option<ChangedRate>>,
    /// `forced_open`, or `auto` to let the breaker follow its own measurements.
    pub breaker: Option<BreakerMode>,
}

/// `rate_limit`, as in the configuration.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ChangedRate {
    /// Jobs per second, above 0.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub per_second: f64,
    /// Burst size, at least 1. The default is `per_second`, rounded up.
    #[schemars(range(min = 1))]
    pub burst: Option<u32>,
    /// The jobs that share the limit. The default is the current setting, or all jobs.
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

/// Control of a breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum BreakerMode {
    /// The breaker stays open until further notice.
    ForcedOpen,
    /// The breaker follows its own measurements.
    Auto,
}

/// Limits of one tenant, in place of the bulkhead's. Absent fields stay unchanged.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TenantChange {
    /// Jobs of the tenant in flight; per worker process, if the tenant has separate workers.
    #[serde(default, deserialize_with = "non_null", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "u32", range(min = 1))]
    pub max_in_flight: Option<u32>,
    /// Number of worker processes, if the tenant has separate workers.
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

/// `rate_limit` of one tenant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TenantRate {
    /// Jobs per second, above 0.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub per_second: f64,
    /// Burst size, at least 1. The default is `per_second`, rounded up.
    #[schemars(range(min = 1))]
    pub burst: Option<u32>,
}

/// Deserializes a present key, which can be `null`.
fn nullable<'de, D: Deserializer<'de>, T: Deserialize<'de>>(value: D) -> Result<Option<Option<T>>, D::Error> {
    Option::deserialize(value).map(Some)
}

/// Deserializes a present key and rejects `null`, because a tenant's limit can be changed but not removed.
fn non_null<'de, D: Deserializer<'de>, T: Deserialize<'de>>(value: D) -> Result<Option<T>, D::Error> {
    let value = Option::deserialize(value)?;
    let null_error =
        || serde::de::Error::custom("null is not allowed: a tenant's limit can be changed, but not removed");
    value.map(Some).ok_or_else(null_error)
}
