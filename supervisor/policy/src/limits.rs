//! What a bulkhead is allowed and how it is kept alive, as plain verified values.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bulkhead_shared::vocabulary;

use crate::adaptive::AdaptiveLimits;
use crate::breaker::BreakerLimits;
use crate::budget::RetryLimits;
use crate::poison::PoisonLimits;
use crate::rate::RateLimit;

/// The numbers of one bulkhead. Their meaning is that of the configuration's keys of the same names.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "each is the configuration's key of the same name")]
pub struct Limits {
    pub processes: u32,
    pub max_in_flight: u32,
    pub max_queue: u32,
    pub queue_timeout: Option<Duration>,
    pub run_limit: Option<Duration>,
    pub deadline: Duration,
    pub deadline_max: Duration,
    pub grace: Duration,
    /// Whether a worker ends each job by itself, with all that it has started, as it does for `exec`.
    pub jobs_end_alone: bool,
    pub lookahead: Duration,
    pub restart: Restart,
    pub start: Start,
    pub health: Health,
    pub recycle: Recycle,
    /// The share of the permits that only critical jobs get; below 1.
    pub critical_reserve: f64,
    pub pressure: Pressure,
    pub overflow: Overflow,
    pub rate_limit: Option<RateLimit>,
    pub breaker: Option<BreakerLimits>,
    pub retry: Option<RetryLimits>,
    pub poison: Option<PoisonLimits>,
    pub tenants: TenantLimits,
    pub adaptive: Option<AdaptiveLimits>,
    /// After so long without a job its workers are stopped; see [`crate::Event::Rest`].
    pub idle: Option<Duration>,
}

/// When a filling queue is told, and when it is closed to all but critical jobs: shares of its capacity.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "each is the configuration's key of the same name")]
pub struct Pressure {
    pub warn: f64,
    pub reject: f64,
}

vocabulary! {
    /// What a full queue does with the next job.
    Overflow {
        /// Turns it away, unless a job of a lower class waits, which then leaves.
        Reject = "reject",
        /// The same, but the oldest job of the tenant that holds most of the queue leaves.
        EvictOldest = "evict-oldest",
    }
}

/// A tenant's share of common workers.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct TenantLimits {
    /// Over it a job waits.
    pub max_in_flight: Option<u32>,
    /// Over it a job is turned away.
    pub max_queue: Option<u32>,
    /// Tenants, by name, that have numbers of their own.
    pub own: BTreeMap<String, OwnNumbers>,
    /// Tenants, sorted by name, that the caller counts by themselves, from start to stop; see
    /// [`crate::Bulkhead::label`].
    pub labelled: Arc<[String]>,
}

/// One tenant's own numbers, each in place of what holds for all of them.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct OwnNumbers {
    /// In place of [`TenantLimits::max_in_flight`].
    pub max_in_flight: Option<u32>,
    /// In place of [`TenantLimits::max_queue`].
    pub max_queue: Option<u32>,
    /// In place of [`Limits::rate_limit`].
    pub rate_limit: Option<RateLimit>,
}

/// When and how fast a dead worker is replaced.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "each is the configuration's key of the same name")]
pub struct Restart {
    pub policy: RestartPolicy,
    pub backoff: Duration,
    pub backoff_max: Duration,
    pub max: u32,
    pub within: Duration,
}

vocabulary! {
    /// Which deaths are followed by a replacement.
    RestartPolicy {
        /// All.
        Always = "always",
        /// All but an exit with status 0 while idle.
        OnFailure = "on-failure",
        /// None.
        Never = "never",
    }
}

vocabulary! {
    /// How a worker comes to be.
    StartMode {
        /// Each process is started anew.
        Spawn = "spawn",
        /// Each process is forked from a template, which is initialised once.
        Fork = "fork",
    }
}

/// How long a worker may take to begin, and how many are kept ready.
#[derive(Clone, Debug, PartialEq)]
pub struct Start {
    /// Until its hello.
    pub handshake: Duration,
    /// From its hello until it is ready.
    pub ready: Duration,
    /// How a worker comes to be; for the owner of the workers.
    pub mode: StartMode,
    /// Workers that are kept ready beside those that run jobs.
    pub spares: u32,
}

/// How often a worker must be heard.
#[derive(Clone, Debug, PartialEq)]
pub struct Health {
    /// The interval of its heartbeats.
    pub heartbeat: Duration,
    /// So many missed ones in a row mean that it hangs.
    pub missed: u32,
}

/// When a worker that works is replaced all the same.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Recycle {
    /// After so many jobs.
    pub jobs: Option<u64>,
    /// When it holds so many bytes.
    pub rss: Option<u64>,
    /// When it is so old.
    pub age: Option<Duration>,
}

impl Default for Limits {
    /// The configuration's defaults.
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self {
            processes: 1,
            max_in_flight: 1,
            max_queue: 0,
            queue_timeout: None,
            run_limit: None,
            deadline: seconds(30),
            deadline_max: seconds(30),
            grace: Duration::from_millis(100),
            jobs_end_alone: false,
            lookahead: Duration::ZERO,
            restart: Restart {
                policy: RestartPolicy::Always,
                backoff: Duration::from_millis(100),
                backoff_max: seconds(30),
                max: 5,
                within: seconds(30),
            },
            start: Start { handshake: seconds(5), ready: seconds(60), mode: StartMode::Spawn, spares: 0 },
            health: Health { heartbeat: seconds(1), missed: 5 },
            recycle: Recycle::default(),
            critical_reserve: 0.0,
            pressure: Pressure { warn: 0.8, reject: 1.0 },
            overflow: Overflow::Reject,
            rate_limit: None,
            breaker: None,
            retry: None,
            poison: None,
            tenants: TenantLimits::default(),
            adaptive: None,
            idle: None,
        }
    }
}
