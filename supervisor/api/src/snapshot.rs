//! Defines the documents that describe the state of a bulkhead at a point in time. The data plane fills in the values,
//! except for the memory and processor time of workers. The control plane adds these two values and serializes the
//! documents. `bulkhead status` and `bulkhead top` show the documents.

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
#[expect(missing_docs, reason = "the field names are part of the contract and are self-explanatory")]
pub struct Snapshot {
    pub name: String,
    /// Name of the isolated tenant, if the snapshot covers only this tenant's part of the bulkhead.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// True if tenants are isolated, so that each tenant has its own workers.
    pub isolated: bool,
    pub state: Word<BulkheadState>,
    /// Human-readable reason why the bulkhead is degraded or failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// Service level, computed from the outcomes of the last minute. Absent if the snapshot covers a single
    /// tenant.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service: Option<Word<Service>>,
    /// Human-readable reason why `service` is not `ok`: the most frequent outcome and its reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service_cause: Option<String>,
    /// Number of worker processes. Like `max_in_flight`, `max_queue` and `rate_limit`, this is the value in effect,
    /// which an operator may have changed. If tenants are isolated, these limits apply to each tenant.
    pub processes: u32,
    pub max_in_flight: u32,
    pub max_queue: u32,
    /// Value of the `start.mode` key.
    pub start_mode: Word<StartMode>,
    pub rate_limit: Option<Rate>,
    pub limit: u64,
    /// Adaptive limit. Absent if none is configured. If tenants are isolated, combines the limits of all tenants.
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
    /// Number of rejected jobs for each reason.
    pub rejected: BTreeMap<Text, u64>,
    pub breaker: Word<BreakerState>,
    /// True if the configuration has a `breaker` table. Otherwise only an operator can open the breaker.
    pub has_breaker: bool,
    /// Human-readable reason why the last restart of the bulkhead stopped before all workers were replaced. Absent if it
    /// did not stop.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restart_failure: Option<String>,
    /// Number of worker restarts for reasons other than `recycle`.
    pub restarts: u64,
    /// Number of times that a job was retried because its worker had died.
    pub retries: u64,
    /// Number of payloads that are quarantined because they killed workers.
    pub quarantined: u64,
    /// Number of unfinished jobs that this bulkhead passed on to a fallback. Their outcomes will be counted for this
    /// bulkhead.
    pub elsewhere: u64,
    /// Number of unfinished jobs in the program that this supervisor replaced in an upgrade. `in_flight` and `queued` do
    /// not include these jobs, but `limit` and `queue_available` are reduced by them.
    pub predecessor_jobs: u64,
    pub late_replies: u64,
    pub latency_ms: Latencies,
    /// The busiest tenants, at most ten.
    pub tenants: Vec<Tenant>,
    pub workers: Vec<Worker>,
}

impl Snapshot {
    /// Returns the total number of rejected jobs.
    pub fn rejections(&self) -> u64 {
        self.rejected.values().fold(0, |sum, count| sum.saturating_add(*count))
    }
}

/// An adaptive limit on running jobs, adjusted according to their run times.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Adaptive {
    /// Mode of the adaptive limit, which determines whether the limit is enforced.
    pub mode: Word<AdaptiveMode>,
    /// Value of the `min` key. If tenants are isolated, the value applies to each tenant.
    pub min: u32,
    /// Value of the `max` key. If tenants are isolated, the value applies to each tenant.
    pub max: u32,
    /// Value of the `target` key, in milliseconds.
    pub target_ms: f64,
    /// Current limit on the number of running jobs, or the limit that would apply if it were enforced. If tenants are
    /// isolated, the sum of all tenants' limits.
    pub limit: u64,
    /// Number of separate limits whose sum is `limit`. If tenants are isolated, there is one limit for each tenant with
    /// workers, otherwise a single limit.
    pub limits: u64,
    /// 90th percentile of run times in the last window, in milliseconds. If tenants share workers, the median of the
    /// tenants' percentiles. If tenants are isolated, the percentile of the slowest tenant.
    pub latency_ms: Option<f64>,
    /// Number of times that the limit was raised.
    pub raised: u64,
    /// Number of times that the limit was lowered.
    pub lowered: u64,
}

/// The active rate limit.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[expect(missing_docs, reason = "the names match the configuration")]
pub struct Rate {
    pub per_second: f64,
    pub burst: u32,
    /// Scope of the rate limit: `bulkhead` or `tenant`.
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

/// Job counts of one tenant in a bulkhead.
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
#[expect(missing_docs, reason = "the field names are part of the contract and are self-explanatory")]
pub struct Latencies {
    pub run: Percentiles,
    pub queue: Percentiles,
}

/// Percentiles of a duration, in milliseconds. Each percentile is `null` if nothing was measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[expect(missing_docs, reason = "the field names are part of the contract and are self-explanatory")]
pub struct Percentiles {
    pub p50: Option<f64>,
    pub p90: Option<f64>,
    pub p99: Option<f64>,
    pub max: Option<f64>,
}

/// A worker process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[expect(missing_docs, reason = "the field names are part of the contract and are self-explanatory")]
pub struct Worker {
    /// Name of the tenant that the worker is reserved for, if tenants are isolated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    pub slot: u32,
    pub generation: u32,
    pub pid: Option<u32>,
    #[schemars(extend("enum" = bulkhead_policy::WORKER_STATES))]
    pub state: Text,
    /// True if the worker is a spare, which runs no jobs until it takes over a slot.
    pub spare: bool,
    /// True if the worker was started before the bulkhead was last restarted, or before a reload that replaces the
    /// workers.
    pub outdated: bool,
    pub uptime_ms: u64,
    pub in_flight: u64,
    /// Maximum number of jobs that the worker runs at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_in_flight: Option<u32>,
    pub served: u64,
    pub restarts: u64,
    /// Resident memory in bytes, read from `/proc`.
    pub rss_bytes: Option<u64>,
    /// Processor time in milliseconds, read from `/proc`.
    pub cpu_ms: Option<u64>,
    /// Last status message that the worker sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<String>,
    /// Reason why the previous worker in this slot exited.
    pub last_exit: Option<String>,
    /// Confinement of the worker, as read back from the kernel when its program started.
    pub confinement: Option<Confinement>,
}

/// Confinement of a worker.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Confinement {
    /// Name of the configured sandbox profile.
    pub profile: Text,
    /// True if the worker cannot gain privileges by executing a program.
    pub no_new_privs: bool,
    /// Seccomp mode of the worker: `filter` or `none`.
    pub seccomp: Text,
    /// ABI version of the Landlock rules. Absent if Landlock is not used.
    pub landlock: Option<u32>,
    /// Capabilities of the worker, as a hexadecimal mask.
    pub capabilities: String,
    /// Namespaces that are not shared with the supervisor.
    pub namespaces: Vec<Text>,
    /// User ID of the worker, as seen outside its user namespace.
    pub uid: Option<u32>,
    /// Group ID of the worker, as seen outside its user namespace.
    pub gid: Option<u32>,
    /// True if the worker has a separate cgroup.
    pub cgroup: bool,
    /// `own` if the worker has a separate user ID, or `shared` if it runs with the supervisor's user ID.
    pub identity: Text,
    /// Layers of the sandbox profile that are not available on this machine.
    pub missing: Vec<Text>,
    /// True if the worker was forked from a template. The other fields then describe the template.
    pub inherited: bool,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn snapshots_from_other_versions_can_be_read() {
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
