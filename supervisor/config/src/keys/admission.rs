//! The tables of a bulkhead about which jobs are let in, wait, and are turned away. What they become are policy's
//! own types.

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
    /// `priority`: what is kept for critical jobs.
    PriorityKeys => PriorityConfig, "bulkhead.NAME.priority";

    /// The share of permits that only critical jobs may take, rounded up.
    critical_reserve: f64 as Kind::Share { none: true, all: false }, without "required", such as "0.2";
}

/// `priority`: what is kept for critical jobs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PriorityConfig {
    /// Share of the permits that only critical jobs may take, from 0 to below 1.
    pub critical_reserve: f64,
}

section! {
    /// `pressure`: what a filling queue does before it is full.
    PressureKeys => Pressure, "bulkhead.NAME.pressure";

    /// The share of `max_queue` at which a `queue_pressure` event is told. At most `reject`, also without being
    /// written.
    warn: f64 as PART, default 0.8;
    /// The share of `max_queue` above which normal and best-effort jobs are rejected `backpressure`.
    reject: f64 as PART, default 1.0;
}

section! {
    /// `rate_limit`: how fast jobs may come.
    RateLimitKeys => RateLimit, "bulkhead.NAME.rate_limit";

    /// Jobs a second in the long run, each counted by its cost.
    per_second: f64 as Kind::Number(RATE_CEILING), without "required", such as "100";
    /// Jobs that may come at once after a pause.
    burst: u32 as count(1, RATE_CEILING), without "`per_second`, rounded up", such as "1000";
    /// Who shares the limit: all jobs of the bulkhead, or those of one tenant.
    per: RatePer as one_of::<RatePer>(), default RatePer::Bulkhead;
}

section! {
    /// `breaker`: when jobs are turned away because those before them failed.
    BreakerKeys => BreakerLimits, "bulkhead.NAME.breaker", by rows;

    /// How far back the rates look.
    window: Duration as at_least(BREAKER_WINDOW_MIN), default Duration::from_secs(10);
    /// Jobs in the window before the rates say anything.
    min_calls: u32 as count(1, BREAKER_CALLS_CEILING), default 20;
    /// The share of failed jobs that opens the breaker.
    failure_rate: f64 as PART, default 0.5;
    /// A job that runs longer than this is slow.
    slow_call: Duration as at_least(SOME), without "off", such as "\"5s\"";
    /// The share of slow jobs that opens the breaker. Needs `slow_call`.
    slow_rate: f64 as PART, default 1.0;
    /// How long the breaker stays open before it tries again; doubles with each opening in a row, up to 8 times this.
    open_for: Duration as at_least(SOME), default Duration::from_secs(5);
    /// Jobs let through to try.
    probes: u32 as count(1, BREAKER_PROBES_CEILING), default 1;
}

section! {
    /// `retry`: when an idempotent job whose worker crashed is tried again.
    RetryKeys => RetryLimits, "bulkhead.NAME.retry", by rows;

    /// How often a job is tried at most; counts the first time.
    attempts: u32 as count(2, RETRY_CEILING), default 2;
    /// Retries as a share of jobs; what is beyond is not retried.
    budget: f64 as PART, default 0.2;
}

section! {
    /// `poison`: when a payload that kills workers is quarantined.
    PoisonKeys => PoisonLimits, "bulkhead.NAME.poison", by rows;

    /// A payload that killed this many workers, alone in each, is rejected `quarantined`.
    crashes: u32 as count(1, POISON_CEILING), default 3;
    /// The window in which its crashes are counted.
    within: Duration as at_least(SOME), default Duration::from_secs(72 * 3600);
}

section! {
    /// `adaptive`: how many jobs run at once follows how long they take; see [below](#adaptive-limit).
    AdaptiveKeys => AdaptiveLimits, "bulkhead.NAME.adaptive";

    /// The least that the limit may be. At most `max`.
    min: u32 as count(1, PERMITS_CEILING), default 1;
    /// The most that it may be, and what it begins with. At most `processes` × `max_in_flight`, also of each isolated
    /// tenant and after a `resize`.
    max: u32 as count(1, PERMITS_CEILING), without "required", such as "1";
    /// Target for the 90th percentile of a tenant's run times. The limit falls when most tenants are above the target,
    /// and grows while they are not and the limit is reached. At most `deadline_max`.
    target: Duration as at_least(SOME), without "required", such as "\"50ms\"";
    /// Whether the limit holds jobs back, or only is told.
    mode: AdaptiveMode as one_of::<AdaptiveMode>(), default AdaptiveMode::Enforce;
}
