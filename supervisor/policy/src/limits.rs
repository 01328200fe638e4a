//! Limits and settings of a bulkhead, as plain validated values.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bulkhead_shared::vocabulary;

use crate::adaptive::AdaptiveLimits;
use crate::breaker::BreakerLimits;
use crate::budget::RetryLimits;
use crate::poison::PoisonLimits;
use crate::rate::RateLimit;

/// Limits of one bulkhead.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "each field is the configuration key of the same name")]
pub struct Limits {
    pub processes: u32,
    pub max_in_flight: u32,
    pub max_queue: u32,
    pub queue_timeout: Option<Duration>,
    pub run_limit: Option<Duration>,
    pub deadline: Duration,
    pub deadline_max: Duration,
    pub grace: Duration,
    /// True if a worker kills all processes of a job itself, as a worker for `exec` does.
    pub worker_ends_jobs: bool,
    pub lookahead: Duration,
    pub restart: Restart,
    pub start: Start,
    pub health: Health,
    pub recycle: Recycle,
    /// Share of the permits that is reserved for critical jobs; below 1.
    pub critical_reserve: f64,
    pub pressure: Pressure,
    pub overflow: Overflow,
    pub rate_limit: Option<RateLimit>,
    pub breaker: Option<BreakerLimits>,
    pub retry: Option<RetryLimits>,
    pub poison: Option<PoisonLimits>,
    pub tenants: TenantLimits,
    pub adaptive: Option<AdaptiveLimits>,
    /// Time without a job after which the workers are stopped; see [`crate::Event::ScaleToZero`].
    pub idle: Option<Duration>,
}

impl Limits {
    /// Returns the number of slots for jobs.
    pub(crate) fn slot_count(&self) -> usize {
        if self.max_in_flight == 0 { 0 } else { self.processes as usize }
    }

    /// Returns the number of spare slots.
    pub(crate) fn spare_count(&self) -> usize {
        if self.max_in_flight == 0 { 0 } else { self.start.spares as usize }
    }

    pub(crate) fn has_spares(&self) -> bool {
        self.spare_count() > 0
    }
}

/// Thresholds for queue pressure, as shares of the queue's capacity. Above `reject`, only critical jobs are
/// accepted.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "each field is the configuration key of the same name")]
pub struct Pressure {
    pub warn: f64,
    pub reject: f64,
}

vocabulary! {
    /// Handling of a job that arrives at a full queue.
    Overflow {
        /// Rejects the job, unless a job of a lower class waits. The newest such job is then rejected
        /// instead.
        Reject = "reject",
        /// Like `Reject`, but if no job of a lower class waits, the oldest job of the tenant with the most
        /// queued jobs is evicted.
        EvictOldest = "evict-oldest",
    }
}

/// Limits of each tenant that shares the bulkhead's workers.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct TenantLimits {
    /// Maximum number of jobs in flight. Further jobs wait.
    pub max_in_flight: Option<u32>,
    /// Maximum number of queued jobs. Further jobs are rejected.
    pub max_queue: Option<u32>,
    /// Overrides for single tenants, by name.
    pub overrides: BTreeMap<String, TenantOverrides>,
    /// Sorted names of the tenants with separate metrics; see [`crate::Bulkhead::label`]. Must not change
    /// while the bulkhead exists.
    pub labelled: Arc<[String]>,
}

/// Overrides for one tenant. `None` leaves the general limit in force.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct TenantOverrides {
    /// Override for [`TenantLimits::max_in_flight`].
    pub max_in_flight: Option<u32>,
    /// Override for [`TenantLimits::max_queue`].
    pub max_queue: Option<u32>,
    /// Override for [`Limits::rate_limit`].
    pub rate_limit: Option<RateLimit>,
}

/// Restart policy for workers that have ended.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "each field is the configuration key of the same name")]
pub struct Restart {
    pub policy: RestartPolicy,
    pub backoff: Duration,
    pub backoff_max: Duration,
    pub max: u32,
    pub within: Duration,
}

vocabulary! {
    /// Ends after which a worker is restarted. Whatever the policy, a worker that was given all jobs that
    /// `recycle.jobs` allows and then exits cleanly is followed by another.
    RestartPolicy {
        /// Every end.
        Always = "always",
        /// Every end except an exit with status 0 while idle.
        OnFailure = "on-failure",
        /// No end.
        Never = "never",
    }
}

vocabulary! {
    /// Method of starting a worker.
    StartMode {
        /// Starts a new process.
        Spawn = "spawn",
        /// Forks a process from a template that was initialised once.
        Fork = "fork",
    }
}

/// Limits for the start of a worker, and the number of spares.
#[derive(Clone, Debug, PartialEq)]
pub struct Start {
    /// Maximum time from the start of the process to the hello.
    pub handshake: Duration,
    /// Maximum time from the hello until the worker is ready.
    pub ready: Duration,
    /// Method of starting a worker. Policy only uses this to allow more time for forks.
    pub mode: StartMode,
    /// Number of spares, in addition to the workers that run jobs.
    pub spares: u32,
}

/// Limits for heartbeats.
#[derive(Clone, Debug, PartialEq)]
pub struct Health {
    /// Heartbeat interval.
    pub heartbeat: Duration,
    /// Number of consecutive missed heartbeats after which a worker counts as hung.
    pub missed: u32,
}

/// Limits after which a healthy worker is replaced.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Recycle {
    /// Number of jobs.
    pub jobs: Option<u64>,
    /// Resident set size, in bytes.
    pub rss: Option<u64>,
    /// Time since the spawn.
    pub age: Option<Duration>,
}

impl Default for Limits {
    /// Returns the defaults of the configuration.
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
            worker_ends_jobs: false,
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
