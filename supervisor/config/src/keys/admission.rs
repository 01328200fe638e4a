//! Declares a bulkhead's tables that control the admission, queueing and rejection of jobs. The `policy` crate applies
//! the values, and defines their types, except for the type of `priority`. `relations/admission.rs` checks rules that
//! involve several keys.

use std::time::Duration;

use bulkhead_policy::{
    AdaptiveLimits, AdaptiveMode, BreakerLimits, PoisonLimits, Pressure, RateLimit, RatePer, RetryLimits,
};
use serde::Serialize;

use super::kinds::*;
use crate::defaults::*;
use crate::key::Kind;
use crate::table::section;

section! {
    /// `priority`: permits reserved for critical jobs.
    PriorityKeys => PriorityConfig, "bulkhead.NAME.priority";

    /// Share of the permits that is reserved for critical jobs. The number of permits is rounded up.
    critical_reserve: f64 as Kind::Share { none: true, all: false }, without "required", such as "0.2";
}

/// Settings in the `priority` table, which reserves permits for critical jobs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PriorityConfig {
    /// Share of the permits that is reserved for critical jobs, from 0 to below 1.
    pub critical_reserve: f64,
}

section! {
    /// `pressure`: queue levels at which the supervisor warns and rejects jobs before the queue is full.
    PressureKeys => Pressure, "bulkhead.NAME.pressure";

    /// Share of `max_queue` at which the supervisor emits the `queue_pressure` event. Must not exceed
    /// `reject`. If `reject` is below the default, `warn` defaults to the value of `reject`.
    warn: f64 as POSITIVE_SHARE, default 0.8;
    /// Share of `max_queue` above which normal and best-effort jobs are rejected as `backpressure`.
    reject: f64 as POSITIVE_SHARE, default 1.0;
}

section! {
    /// `rate_limit`: maximum rate of jobs.
    RateLimitKeys => RateLimit, "bulkhead.NAME.rate_limit";

    /// Sustained rate in jobs per second. Each job counts according to its cost.
    per_second: f64 as Kind::Number(RATE_CEILING), without "required", such as "100";
    /// Maximum number of jobs admitted in one burst after a pause.
    burst: u32 as count(1, RATE_CEILING), without "`per_second`, rounded up", such as "1000";
    /// Scope of the rate limit. `"bulkhead"` applies it to all jobs of the bulkhead together, `"tenant"` to
    /// each tenant separately.
    per: RatePer as one_of::<RatePer>(), default RatePer::Bulkhead;
}

section! {
    /// `breaker`: rejection of jobs after too many failures.
    BreakerKeys => BreakerLimits, "bulkhead.NAME.breaker", by rows;

    /// Period over which the failure rate and the slow rate are computed.
    window: Duration as at_least(BREAKER_WINDOW_MIN), default Duration::from_secs(10);
    /// Minimum number of jobs in the window before the breaker can open.
    min_calls: u32 as count(1, BREAKER_CALLS_CEILING), default 20;
    /// Share of failed jobs at which the breaker opens.
    failure_rate: f64 as POSITIVE_SHARE, default 0.5;
    /// Run time above which a job counts as slow.
    slow_call: Duration as at_least(POSITIVE_DURATION), without "off", such as "\"5s\"";
    /// Share of slow jobs at which the breaker opens. Needs `slow_call`.
    slow_rate: f64 as POSITIVE_SHARE, default 1.0;
    /// Time that the breaker stays open before it admits probes. The time doubles with each consecutive
    /// opening, up to 8 times this value.
    open_for: Duration as at_least(POSITIVE_DURATION), default Duration::from_secs(5);
    /// Number of jobs that a half-open breaker admits as probes.
    probes: u32 as count(1, BREAKER_PROBES_CEILING), default 1;
}

section! {
    /// `retry`: retries of idempotent jobs whose worker crashed.
    RetryKeys => RetryLimits, "bulkhead.NAME.retry", by rows;

    /// Maximum number of attempts to run a job, including the first.
    attempts: u32 as count(2, RETRY_CEILING), default 2;
    /// Maximum number of retries, as a share of all jobs. Once this budget is used up, jobs are not retried.
    budget: f64 as POSITIVE_SHARE, default 0.2;
}

section! {
    /// `poison`: quarantine of payloads that kill workers.
    PoisonKeys => PoisonLimits, "bulkhead.NAME.poison", by rows;

    /// Number of workers that a payload can kill before it is rejected as `quarantined`. The death of a
    /// worker counts only if a single job, with this payload, was in flight in the worker.
    crashes: u32 as count(1, POISON_CEILING), default 3;
    /// Period over which the crashes caused by a payload are counted.
    within: Duration as at_least(POSITIVE_DURATION), default Duration::from_secs(72 * 3600);
}

section! {
    /// `adaptive`: a limit on concurrent jobs that is adjusted based on their run times; see
    /// [below](#adaptive-limit).
    AdaptiveKeys => AdaptiveLimits, "bulkhead.NAME.adaptive";

    /// Minimum value of the adaptive limit. At most `max`.
    min: u32 as count(1, PERMITS_CEILING), default 1;
    /// Maximum and initial value of the adaptive limit. Must not exceed `processes` × `max_in_flight`,
    /// including values set for an isolated tenant or by `resize`.
    max: u32 as count(1, PERMITS_CEILING), without "required", such as "1";
    /// Target for the 90th percentile of a tenant's run times. The limit decreases if most tenants exceed the
    /// target. Otherwise, it increases when jobs reach the limit. At most `deadline_max`.
    target: Duration as at_least(POSITIVE_DURATION), without "required", such as "\"50ms\"";
    /// Effect of the adaptive limit. `"enforce"` applies the limit; `"monitor"` only reports the limit that
    /// would apply.
    mode: AdaptiveMode as one_of::<AdaptiveMode>(), default AdaptiveMode::Enforce;
}
