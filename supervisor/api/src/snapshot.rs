//! What a bulkhead looks like at one moment. The data plane fills it in, which is cheap; another thread writes it.

use std::collections::BTreeMap;

use bulkhead_policy::{AdaptiveMode, BreakerState, BulkheadState, RateLimit, RatePer, StartMode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Service, Text, Word};

/// The answer of `GET /v1/bulkheads`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Bulkheads {
    /// All of them, in the order of the file.
    pub bulkheads: Vec<Snapshot>,
}

/// The state of one bulkhead, as `GET /v1/bulkheads/{name}` shows it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Bulkhead")]
#[serde(default)]
#[expect(missing_docs, reason = "the names are the contract's and say what they hold")]
pub struct Snapshot {
    pub name: String,
    /// Whose part of the bulkhead this is, if it is not all of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    pub state: Word<BulkheadState>,
    /// Why it is degraded or failed, for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// How well it serves, by how the jobs of the last minute ended. Absent from one tenant's part.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service: Option<Word<Service>>,
    /// Why that is not `ok`: the most frequent outcome and reason, for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service_cause: Option<String>,
    /// The numbers in force: worker processes, jobs in flight in each, and the rate limit; of one tenant, where
    /// tenants are apart.
    pub processes: u32,
    pub max_in_flight: u32,
    /// The key `start.mode`.
    pub start_mode: Word<StartMode>,
    pub rate_limit: Option<Rate>,
    pub limit: u64,
    /// The limit that follows how long jobs take, if there is one; where tenants are apart, of all of them together.
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
    /// By reason.
    pub rejected: BTreeMap<Text, u64>,
    pub breaker: Word<BreakerState>,
    /// True if the configuration has a breaker. Without one it opens only by an operator's order.
    pub has_breaker: bool,
    /// Workers that followed another one for a reason other than `recycle`.
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
    pub tenants: Vec<Tenant>,
    pub workers: Vec<Worker>,
}

impl Snapshot {
    /// Jobs that were rejected, for whatever reason.
    pub fn rejections(&self) -> u64 {
        self.rejected.values().fold(0, |sum, count| sum.saturating_add(*count))
    }
}

/// A limit that follows how long jobs take.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Adaptive {
    /// Whether it holds jobs back.
    pub mode: Word<AdaptiveMode>,
    /// As in the file; of each tenant, where tenants are apart.
    pub min: u32,
    /// As in the file; of each tenant, where tenants are apart.
    pub max: u32,
    /// As in the file.
    pub target_ms: f64,
    /// How many jobs may run, or might if it held jobs back; of all tenants together, where they are apart.
    pub limit: u64,
    /// Of how many limits that is the sum: one, or where tenants are apart that of each with workers.
    pub limits: u64,
    /// 90th percentile of run times in the last window: the median over the tenants, or the slowest tenant where each
    /// tenant has a limit.
    pub latency_ms: Option<f64>,
    /// How often the limit grew.
    pub raised: u64,
    /// How often it fell.
    pub lowered: u64,
}

/// A rate limit in force.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[expect(missing_docs, reason = "the names are those of the configuration")]
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

/// One tenant's share of a bulkhead.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[expect(missing_docs, reason = "the names say what they hold")]
pub struct Tenant {
    pub name: String,
    pub in_flight: u32,
    pub queued: u64,
    pub submitted: u64,
    pub rejected: u64,
}

/// How long jobs ran and how long they queued.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[expect(missing_docs, reason = "the names are the contract's and say what they hold")]
pub struct Latencies {
    pub run: Percentiles,
    pub queue: Percentiles,
}

/// Milliseconds; nothing as long as nothing was measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[expect(missing_docs, reason = "the names are the contract's and say what they hold")]
pub struct Percentiles {
    pub p50: Option<f64>,
    pub p90: Option<f64>,
    pub p99: Option<f64>,
    pub max: Option<f64>,
}

/// One worker process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[expect(missing_docs, reason = "the names are the contract's and say what they hold")]
pub struct Worker {
    /// The only tenant that it works for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    pub slot: u32,
    pub generation: u32,
    pub pid: Option<u32>,
    #[schemars(extend("enum" = bulkhead_policy::WORKER_STATES))]
    pub state: Text,
    /// Whether it is kept to take over a slot, and runs no jobs until then.
    pub spare: bool,
    pub uptime_ms: u64,
    pub in_flight: u64,
    pub served: u64,
    pub restarts: u64,
    /// As `/proc` has it.
    pub rss_bytes: Option<u64>,
    /// As `/proc` has it.
    pub cpu_ms: Option<u64>,
    /// What the worker last said of itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<String>,
    /// How the worker before it in this slot ended.
    pub last_exit: Option<String>,
    /// How far it is confined, as read back from the kernel when its program ran.
    pub confinement: Option<Confinement>,
}

/// How far a worker is confined.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Confinement {
    /// What was ordered.
    pub profile: Text,
    /// Whether it gets no privileges by executing something.
    pub no_new_privs: bool,
    /// `filter`, or `none`.
    pub seccomp: Text,
    /// The version of the Landlock rules.
    pub landlock: Option<u32>,
    /// All its capabilities, as a mask in hexadecimal digits.
    pub capabilities: String,
    /// The namespaces that are not the supervisor's.
    pub namespaces: Vec<Text>,
    /// Its user, outside.
    pub uid: Option<u32>,
    /// Its group, outside.
    pub gid: Option<u32>,
    /// Whether it is in a control group of its own.
    pub cgroup: bool,
    /// `own`, or `shared` with the supervisor.
    pub identity: Text,
    /// Layers of the profile that are missing here.
    pub missing: Vec<Text>,
    /// Whether it was forked, and all of this was read of the template that has forked it.
    pub inherited: bool,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_snapshot_of_a_newer_or_an_older_supervisor_is_read() {
        let told = json!({
            "name": "b", "state": "asleep", "service": "splendid", "breaker": "ajar", "mood": {"now": "fine"},
            "rejected": {"too_noisy": 7}, "rate_limit": {"per_second": 1.5, "burst": 2, "per": "planet"},
            "workers": [{"pid": 5, "state": "dreaming", "colour": "red"}],
        });
        let newer: Snapshot = serde_json::from_value(told).unwrap();
        assert_eq!((newer.state.as_str(), newer.breaker.as_str()), ("asleep", "ajar"));
        assert_eq!((newer.service.unwrap().as_str(), newer.rejected["too_noisy"]), ("splendid", 7));
        assert_eq!((newer.workers[0].pid, &*newer.workers[0].state), (Some(5), "dreaming"));
        let older: Snapshot = serde_json::from_value(json!({"name": "b", "state": "ready"})).unwrap();
        assert!(older.state == BulkheadState::Ready && older.service.is_none() && older.workers.is_empty());
    }

    #[test]
    fn a_snapshot_is_read_as_it_was_written() {
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
        let told = serde_json::to_string(&snapshot).unwrap();
        assert_eq!(serde_json::from_str::<Snapshot>(&told).unwrap(), snapshot);
    }
}
