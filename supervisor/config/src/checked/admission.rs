//! Who is let in, who waits and who is turned away: the keys of admission control, as plain values.

use std::time::Duration;

use serde::Serialize;

use crate::units;

/// `priority`: what is kept for critical jobs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PriorityConfig {
    /// Share of the permits that only critical jobs may take, from 0 to below 1.
    pub critical_reserve: f64,
}

/// `pressure`: what a filling queue does before it is full.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PressureConfig {
    /// Share of `max_queue` at which it is told, above 0, at most `reject`.
    pub warn: f64,
    /// Share of `max_queue` above which only critical jobs are taken, above 0, at most 1.
    pub reject: f64,
}

/// `overflow`: what a full queue does with the next job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Overflow {
    /// Rejects it.
    Reject,
    /// Takes it, and drops the oldest job of the tenant that holds most of the queue.
    EvictOldest,
}

impl Overflow {
    /// Every rule.
    pub const ALL: [Overflow; 2] = [Self::Reject, Self::EvictOldest];

    /// The word in the file.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Reject => "reject",
            Self::EvictOldest => "evict-oldest",
        }
    }
}

/// `rate_limit`: how fast jobs may come.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RateLimitConfig {
    /// Jobs a second in the long run, above 0.
    pub per_second: f64,
    /// Jobs at once after a pause, at least 1.
    pub burst: u32,
    /// Who shares it.
    pub per: RatePer,
}

/// Who shares a rate limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum RatePer {
    /// All jobs of the bulkhead.
    Bulkhead,
    /// The jobs of one tenant; each tenant has a limit of its own.
    Tenant,
}

impl RatePer {
    /// Everyone who can share one.
    pub const ALL: [RatePer; 2] = [Self::Bulkhead, Self::Tenant];

    /// The word in the file.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bulkhead => "bulkhead",
            Self::Tenant => "tenant",
        }
    }
}

/// `tenants`: how much of common workers one tenant may have, or that it has its own; at least one is set,
/// and `isolation` only alone.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TenantsConfig {
    /// Jobs of one tenant in flight in the whole bulkhead, at least 1; `None`: as many as there are permits.
    pub max_in_flight: Option<u32>,
    /// Jobs of one tenant that may wait; `None`: as many as there are places.
    pub max_queue: Option<u32>,
    /// Workers for each tenant; `None`: the workers are common.
    pub isolation: Option<IsolationConfig>,
}

impl TenantsConfig {
    pub(crate) fn says_something(&self) -> bool {
        self.max_in_flight.is_some() || self.max_queue.is_some() || self.isolation.is_some()
    }
}

/// `tenants.isolate = true`: what the bulkhead says of processes, jobs in flight, queue, rate, breaker and
/// restarts is said of each tenant.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct IsolationConfig {
    /// Tenants that have workers at once, at least 1.
    pub max_active: u32,
    /// How long a tenant's workers stay without a job, at least 1 ms.
    #[serde(serialize_with = "units::serialize_duration")]
    pub idle: Duration,
}

/// `[bulkhead.NAME.tenant.TENANT]`: one tenant's own numbers, each in place of what every tenant has.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TenantConfig {
    /// At least 1. Jobs of this tenant in flight: with isolation per worker, else in the whole bulkhead.
    pub max_in_flight: Option<u32>,
    /// Jobs of this tenant that may wait.
    pub max_queue: Option<u32>,
    /// Worker processes of this tenant, at least 1; `None` without isolation.
    pub processes: Option<u32>,
    /// How fast jobs of this tenant may come; always per tenant.
    pub rate_limit: Option<RateLimitConfig>,
}

/// `breaker`: when jobs are turned away because those before them failed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BreakerConfig {
    /// How far back the rates look, at least 100 ms.
    #[serde(serialize_with = "units::serialize_duration")]
    pub window: Duration,
    /// Jobs in the window before the rates say anything, at least 1.
    pub min_calls: u32,
    /// Share of failed jobs that opens it, above 0, at most 1.
    pub failure_rate: f64,
    /// A job that runs longer is slow; `None`: no job is.
    #[serde(serialize_with = "units::serialize_duration_option")]
    pub slow_call: Option<Duration>,
    /// Share of slow jobs that opens it, above 0, at most 1. Says nothing without `slow_call`.
    pub slow_rate: f64,
    /// How long it stays open the first time, at least 1 ms.
    #[serde(serialize_with = "units::serialize_duration")]
    pub open_for: Duration,
    /// Jobs that it lets through half-open, at least 1.
    pub probes: u32,
}

/// `retry`: when an idempotent job whose worker crashed is tried again.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RetryConfig {
    /// Times a job is tried at most, the first included: 2 to 100.
    pub attempts: u32,
    /// Retries as a share of jobs, above 0, at most 1.
    pub budget: f64,
}

/// `poison`: when a payload that kills workers is quarantined.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PoisonConfig {
    /// Workers that it killed, at least 1.
    pub crashes: u32,
    /// The window in which they are counted, at least 1 ms.
    #[serde(serialize_with = "units::serialize_duration")]
    pub within: Duration,
}
