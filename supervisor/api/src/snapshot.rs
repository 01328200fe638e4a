//! The state of a bulkhead at one moment. The data plane fills in the values, which is cheap, and another
//! thread serializes them.

use std::collections::BTreeMap;

use bulkhead_policy::{AdaptiveMode, BreakerState, BulkheadState, RateLimit, RatePer, StartMode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Service, Text, Word};

/// Response of `GET /v1/bulkheads`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Bulkheads {
    /// All bulkheads, in the order of the configuration file.
    pub bulkheads: Vec<Snapshot>,
}

/// The state of one bulkhead, as shown by `GET /v1/bulkheads/{name}`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Bulkhead")]
#[serde(default)]
#[expect(missing_docs, reason = "the names are part of the contract and self-explanatory")]
pub struct Snapshot {
    pub name: String,
    /// The isolated tenant, if this is the state of one tenant's part of the bulkhead.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    pub state: Word<BulkheadState>,
    /// Explanation for people why the state is degraded or failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// Service level, from the outcomes of the last minute. Absent for one tenant's part.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service: Option<Word<Service>>,
    /// Explanation for people why `service` is not `ok`: the most frequent outcome and reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service_cause: Option<String>,
    /// Active limits: worker processes, jobs in flight in each, and the rate limit. With isolated tenants,
    /// the limits of one tenant.
    pub processes: u32,
    pub max_in_flight: u32,
    /// The key `start.mode`.
    pub start_mode: Word<StartMode>,
    pub rate_limit: Option<Rate>,
    pub limit: u64,
    /// The adaptive limit, if there is one. With isolated tenants, of all tenants together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adaptive: Option<Adaptive>,
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
    /// Rejected jobs, by reason.
    pub rejected: BTreeMap<Text, u64>,
    pub breaker: Word<BreakerState>,
    /// True if the configuration has a breaker. Otherwise only an operator can open it.
    pub has_breaker: bool,
    /// Worker restarts for reasons other than `recycle`.
    pub restarts: u64,
    /// Jobs dispatched again because their worker died.
    pub retries: u64,
    /// Payloads that are rejected because they kill workers.
    pub quarantined: u64,
    /// Jobs submitted here that are now at a fallback. Their outcomes will count here.
    pub elsewhere: u64,
    pub late_replies: u64,
    pub latency_ms: Latencies,
    /// The busiest tenants.
    pub tenants: Vec<Tenant>,
    pub workers: Vec<Worker>,
}

impl Snapshot {
    /// Returns the number of rejected jobs, for all reasons together.
    pub fn rejections(&self) -> u64 {
        self.rejected.values().fold(0, |sum, count| sum.saturating_add(*count))
    }
}

/// An adaptive limit, which follows the run times of jobs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Adaptive {
    /// Whether the limit is enforced.
    pub mode: Word<AdaptiveMode>,
    /// The key `min`; with isolated tenants, of each tenant.
    pub min: u32,
    /// The key `max`; with isolated tenants, of each tenant.
    pub max: u32,
    /// The key `target`.
    pub target_ms: f64,
    /// Maximum number of running jobs, or the value it would have if the limit were enforced. With isolated
    /// tenants, of all tenants together.
    pub limit: u64,
    /// Number of limits that `limit` is the sum of: one, or with isolated tenants one for each tenant with
    /// workers.
    pub limits: u64,
    /// 90th percentile of run times in the last window: the median over the tenants, or the slowest tenant
    /// where each tenant has a limit.
    pub latency_ms: Option<f64>,
    /// Number of increases of the limit.
    pub raised: u64,
    /// Number of decreases of the limit.
    pub lowered: u64,
}

/// The active rate limit.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[expect(missing_docs, reason = "the names match the configuration")]
pub struct Rate {
    pub per_second: f64,
    pub burst: u32,
    /// `bulkhead` or `tenant`.
    pub per: Text,
}

impl From<RateLimit> for Rate {
    fn from(limit: RateLimit) -> Self {
        let per = match limit.per {
            RatePer::Bulkhead => "bulkhead",
            RatePer::Tenant => "tenant",
        };
        Self { per_second: limit.per_second, burst: limit.burst, per: per.into() }
    }
}

/// A tenant's share of a bulkhead.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[expect(missing_docs, reason = "the names are self-explanatory")]
pub struct Tenant {
    pub name: String,
    pub in_flight: u32,
    pub queued: u64,
    pub submitted: u64,
    pub rejected: u64,
}

/// Run times and queue times of jobs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[expect(missing_docs, reason = "the names are part of the contract and self-explanatory")]
pub struct Latencies {
    pub run: Percentiles,
    pub queue: Percentiles,
}

/// Percentiles in milliseconds; `null` without measurements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[expect(missing_docs, reason = "the names are part of the contract and self-explanatory")]
pub struct Percentiles {
    pub p50: Option<f64>,
    pub p90: Option<f64>,
    pub p99: Option<f64>,
    pub max: Option<f64>,
}

/// A worker process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[expect(missing_docs, reason = "the names are part of the contract and self-explanatory")]
pub struct Worker {
    /// The only tenant that the worker serves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    pub slot: u32,
    pub generation: u32,
    pub pid: Option<u32>,
    #[schemars(extend("enum" = bulkhead_policy::WORKER_STATES))]
    pub state: Text,
    /// True for a spare, which takes over a slot when needed and runs no jobs before.
    pub spare: bool,
    pub uptime_ms: u64,
    pub in_flight: u64,
    pub served: u64,
    pub restarts: u64,
    /// Resident memory according to `/proc`.
    pub rss_bytes: Option<u64>,
    /// Processor time according to `/proc`.
    pub cpu_ms: Option<u64>,
    /// Last status message of the worker.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<String>,
    /// Cause of death of the previous worker in this slot.
    pub last_exit: Option<String>,
    /// Confinement of the worker, as read back from the kernel when its program started.
    pub confinement: Option<Confinement>,
}

/// Confinement of a worker.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Confinement {
    /// The configured profile.
    pub profile: Text,
    /// True if the worker cannot gain privileges by executing a program.
    pub no_new_privs: bool,
    /// `filter` or `none`.
    pub seccomp: Text,
    /// ABI version of the Landlock rules.
    pub landlock: Option<u32>,
    /// All capabilities, as a hexadecimal mask.
    pub capabilities: String,
    /// Namespaces that are not shared with the supervisor.
    pub namespaces: Vec<Text>,
    /// User id outside of user namespaces.
    pub uid: Option<u32>,
    /// Group id outside of user namespaces.
    pub gid: Option<u32>,
    /// True if the worker has a separate cgroup.
    pub cgroup: bool,
    /// `own`, or `shared` with the supervisor.
    pub identity: Text,
    /// Layers of the profile that are missing on this machine.
    pub missing: Vec<Text>,
    /// True if the worker was forked. The fields then describe its template.
    pub inherited: bool,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn snapshot_of_other_versions_can_be_read() {
        let json = json!({
            "name": "b", "state": "asleep", "service": "splendid", "breaker": "ajar", "mood": {"now": "fine"},
            "rejected": {"too_noisy": 7}, "rate_limit": {"per_second": 1.5, "burst": 2, "per": "planet"},
            "workers": [{"pid": 5, "state": "dreaming", "colour": "red"}],
        });
        let newer: Snapshot = serde_json::from_value(json).unwrap();
        assert_eq!((newer.state.as_str(), newer.breaker.as_str()), ("asleep", "ajar"));
        assert_eq!((newer.service.unwrap().as_str(), newer.rejected["too_noisy"]), ("splendid", 7));
        assert_eq!((newer.workers[0].pid, &*newer.workers[0].state), (Some(5), "dreaming"));
        let older: Snapshot = serde_json::from_value(json!({"name": "b", "state": "ready"})).unwrap();
        assert!(older.state == BulkheadState::Ready && older.service.is_none() && older.workers.is_empty());
    }

    #[test]
    fn snapshot_survives_serialization() {
        let worker = Worker { pid: Some(5), confinement: Some(Confinement::default()), ..Worker::default() };
        let snapshot = Snapshot {
            state: BulkheadState::Degraded.into(),
            service: Some(Service::Failing.into()),
            breaker: BreakerState::HalfOpen.into(),
            rejected: [("queue_full".into(), 3)].into(),
            tenants: vec![Tenant { name: "acme".into(), ..Tenant::default() }],
            workers: vec![worker],
            ..Snapshot::default()
        };
        let json = serde_json::to_string(&snapshot).unwrap();
        assert_eq!(serde_json::from_str::<Snapshot>(&json).unwrap(), snapshot);
    }
}
