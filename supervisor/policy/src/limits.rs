//! The limits and settings of one bulkhead. `bulkhead_config` reads and validates them, the state machine applies them,
//! and operators can change some of them while jobs are running. Only the deadline of a job is computed here.

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
#[expect(missing_docs, reason = "each field corresponds to the configuration key of the same name")]
pub struct Limits {
    pub processes: u32,
    pub max_in_flight: u32,
    pub max_queue: u32,
    pub queue_timeout: Option<Duration>,
    pub run_limit: Option<Duration>,
    pub deadline: Duration,
    pub deadline_max: Duration,
    pub grace: Duration,
    /// True if workers themselves kill all processes of a job when the job ends. This is true for `exec` workers.
    pub worker_ends_jobs: bool,
    pub lookahead: Duration,
    pub restart: Restart,
    pub start: Start,
    pub health: Health,
    pub recycle: Recycle,
    /// Fraction of the permits that is reserved for critical jobs. Must be less than 1.
    pub critical_reserve: f64,
    pub pressure: Pressure,
    pub overflow: Overflow,
    pub rate_limit: Option<RateLimit>,
    pub breaker: Option<BreakerLimits>,
    pub retry: Option<RetryLimits>,
    pub poison: Option<PoisonLimits>,
    pub tenants: TenantLimits,
    pub adaptive: Option<AdaptiveLimits>,
    /// Time without jobs after which the bulkhead is scaled to zero.
    pub idle: Option<Duration>,
}

impl Limits {
    /// Returns a job's deadline. `requested` is the deadline that the client requested, if any.
    pub fn effective_deadline(&self, requested: Option<Duration>) -> Duration {
        requested.map_or(self.deadline, |requested| requested.min(self.deadline_max))
    }

    /// Returns the number of worker slots, not counting slots for spares.
    pub(crate) fn slot_count(&self) -> usize {
        if self.max_in_flight == 0 { 0 } else { self.processes as usize }
    }

    pub(crate) fn spare_count(&self) -> usize {
        if self.max_in_flight == 0 { 0 } else { self.start.spares as usize }
    }

    pub(crate) fn has_spares(&self) -> bool {
        self.spare_count() > 0
    }
}

/// Thresholds for queue pressure, as fractions of the queue's capacity. Above `reject`, only critical jobs are
/// accepted.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "each field corresponds to the configuration key of the same name")]
pub struct Pressure {
    pub warn: f64,
    pub reject: f64,
}

vocabulary! {
    /// Policy for a job that arrives when the queue is full.
    Overflow {
        /// Rejects the new job, unless a job of a lower class is waiting. In that case, the newest waiting job of the
        /// lowest class is rejected instead.
        Reject = "reject",
        /// Behaves like `Reject`, but if no job of a lower class is waiting, evicts the oldest job of the
        /// tenant with the most queued jobs.
        EvictOldest = "evict-oldest",
    }
}

/// Limits per tenant, for a bulkhead whose tenants share workers.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct TenantLimits {
    /// Maximum number of a tenant's jobs in flight. Further jobs wait in the queue.
    pub max_in_flight: Option<u32>,
    /// Maximum number of a tenant's queued jobs. Further jobs are rejected.
    pub max_queue: Option<u32>,
    /// Overrides for individual tenants, by name.
    pub overrides: BTreeMap<String, TenantOverrides>,
    /// Sorted names of the tenants with separate metrics. [`crate::Bulkhead::label`] returns an index into this list.
    /// The list must not change while the bulkhead exists.
    pub labelled: Arc<[String]>,
}

/// Limits for one tenant that override the general limits. `None` means that the general limit applies.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct TenantOverrides {
    /// Override for [`TenantLimits::max_in_flight`].
    pub max_in_flight: Option<u32>,
    /// Override for [`TenantLimits::max_queue`].
    pub max_queue: Option<u32>,
    /// Override for [`Limits::rate_limit`].
    pub rate_limit: Option<RateLimit>,
}

/// Policy for restarting workers that have exited.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "each field corresponds to the configuration key of the same name")]
pub struct Restart {
    pub policy: RestartPolicy,
    pub backoff: Duration,
    pub backoff_max: Duration,
    pub max: u32,
    pub within: Duration,
}

vocabulary! {
    /// Selects the workers to restart after they have exited. A worker that was given all the jobs that `recycle.jobs`
    /// allows and then exits cleanly always gets a successor.
    RestartPolicy {
        /// Restarts a worker no matter how it ended.
        Always = "always",
        /// Restarts a worker, unless it exited with status 0 while it had no jobs.
        OnFailure = "on-failure",
        /// Never restarts a worker.
        Never = "never",
    }
}

vocabulary! {
    /// Method used to start a worker.
    StartMode {
        /// Starts a new process.
        Spawn = "spawn",
        /// Forks the worker from a template process that was initialised once.
        Fork = "fork",
    }
}

/// Timeouts for the start of a worker, and the number of spares.
#[derive(Clone, Debug, PartialEq)]
pub struct Start {
    /// Maximum time from the start of the process to the worker's HELLO message.
    pub handshake: Duration,
    /// Maximum time from the worker's HELLO message to its ready message.
    pub ready: Duration,
    /// Method used to start a worker. Forked workers get more time to start.
    pub mode: StartMode,
    /// Number of spares, in addition to the workers that run jobs.
    pub spares: u32,
}

/// Heartbeat settings.
#[derive(Clone, Debug, PartialEq)]
pub struct Health {
    /// Interval between heartbeats.
    pub heartbeat: Duration,
    /// Number of consecutive missed heartbeats after which a worker counts as hung.
    pub missed: u32,
}

/// Minimum value of [`Health::missed`] at which a worker can be asked to send only every second heartbeat. Three of
/// these heartbeats then fit into the maximum silence.
pub const RARE_HEARTBEATS_MISSED: u32 = 5;

/// Limits that cause a healthy worker to be replaced.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Recycle {
    /// Maximum number of jobs per worker.
    pub jobs: Option<u64>,
    /// Maximum resident set size of a worker, in bytes.
    pub rss: Option<u64>,
    /// Maximum age of a worker, counted from its spawn.
    pub age: Option<Duration>,
}

impl Default for Limits {
    /// Returns limits that equal the default values of the configuration.
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
