//! What a bulkhead looks like at one moment, as plain data: taken on the data plane's thread, which
//! is cheap, and rendered on another one, which is not.

use std::collections::BTreeMap;

use bulkhead_policy::{RateLimit, RatePer};
use serde::Serialize;

/// The state of one bulkhead, as `GET /v1/bulkheads/{name}` shows it.
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "the names are the contract's and say what they hold")]
pub struct Snapshot {
    pub name: String,
    /// Whose part of the bulkhead this is, if it is not all of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// `starting`, `ready`, `degraded`, `failed` or `draining`.
    pub state: &'static str,
    /// Why it is degraded or failed, for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// How well it serves: `ok`, `degraded` or `failing`, by how the jobs of the last minute ended. Absent from one
    /// tenant's part.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service: Option<&'static str>,
    /// Why that is not `ok`: the most frequent outcome and reason, for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service_cause: Option<String>,
    /// The numbers in force: worker processes, jobs in flight in each, and the rate limit; of one tenant, where
    /// tenants are apart.
    pub processes: u32,
    pub max_in_flight: u32,
    pub rate_limit: Option<RateSnapshot>,
    pub limit: u64,
    pub in_flight: u64,
    pub available: u64,
    pub queued: u64,
    pub queue_capacity: u64,
    pub queue_available: u64,
    pub submitted: u64,
    pub done: u64,
    pub failed: u64,
    pub crashed: u64,
    pub deadline_exceeded: u64,
    pub cancelled: u64,
    pub rejected: BTreeMap<&'static str, u64>,
    /// `closed`, `open`, `half_open` or `forced_open`.
    pub breaker: &'static str,
    pub restarts: u64,
    /// Jobs given to another worker since their own had died.
    pub retries: u64,
    /// Payloads kept out since they kill workers.
    pub quarantined: u64,
    /// Jobs that were sent here, that a fallback has now, and whose outcome will count here.
    pub elsewhere: u64,
    pub late_replies: u64,
    pub latency_ms: Latencies,
    /// The busiest.
    pub tenants: Vec<TenantSnapshot>,
    pub workers: Vec<WorkerSnapshot>,
}

/// A rate limit in force.
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "the names are those of the configuration")]
pub struct RateSnapshot {
    pub per_second: f64,
    pub burst: u32,
    pub per: &'static str,
}

impl From<RateLimit> for RateSnapshot {
    fn from(limit: RateLimit) -> Self {
        let per = match limit.per {
            RatePer::Bulkhead => "bulkhead",
            RatePer::Tenant => "tenant",
        };
        Self { per_second: limit.per_second, burst: limit.burst, per }
    }
}

/// One tenant's share of a bulkhead.
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "the names say what they hold")]
pub struct TenantSnapshot {
    pub name: String,
    pub in_flight: u32,
    pub queued: u64,
    pub submitted: u64,
    pub rejected: u64,
}

/// How long jobs ran and how long they queued.
#[derive(Clone, Debug, Default, Serialize)]
#[expect(missing_docs, reason = "the names are the contract's and say what they hold")]
pub struct Latencies {
    pub run: Percentiles,
    pub queue: Percentiles,
}

/// Milliseconds; `None` when nothing was measured yet.
#[derive(Clone, Copy, Debug, Default, Serialize)]
#[expect(missing_docs, reason = "the names are the contract's and say what they hold")]
pub struct Percentiles {
    pub p50: Option<f64>,
    pub p90: Option<f64>,
    pub p99: Option<f64>,
    pub max: Option<f64>,
}

/// One worker process.
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "the names are the contract's and say what they hold")]
pub struct WorkerSnapshot {
    /// The only tenant that it works for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    pub slot: u32,
    pub generation: u32,
    pub pid: Option<u32>,
    pub state: &'static str,
    pub uptime_ms: u64,
    pub in_flight: u64,
    pub served: u64,
    pub restarts: u64,
    /// Filled in from `/proc` by whoever renders this.
    pub rss_bytes: Option<u64>,
    /// Filled in from `/proc` by whoever renders this.
    pub cpu_ms: Option<u64>,
    /// What the worker last said of itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<String>,
    pub last_exit: Option<String>,
    /// How far it is confined, as read back from the kernel when its program ran.
    pub confinement: Option<ConfinementSnapshot>,
}

/// How far a worker is confined.
#[derive(Clone, Debug, Serialize)]
pub struct ConfinementSnapshot {
    /// What was ordered.
    pub profile: &'static str,
    /// Whether it gets no privileges by executing something.
    pub no_new_privs: bool,
    /// `filter`, or `none`.
    pub seccomp: &'static str,
    /// The version of the Landlock rules.
    pub landlock: Option<u32>,
    /// All its capabilities, as a mask in hexadecimal digits.
    pub capabilities: String,
    /// The namespaces that are not the supervisor's.
    pub namespaces: Vec<&'static str>,
    /// Its user, outside.
    pub uid: Option<u32>,
    /// Its group, outside.
    pub gid: Option<u32>,
    /// Whether it is in a control group of its own.
    pub cgroup: bool,
    /// `own`, or `shared` with the supervisor.
    pub identity: &'static str,
    /// Layers of the profile that are missing here.
    pub missing: Vec<&'static str>,
}
