//! What the rest of the supervisor works with: plain values, resolved and verified. Nothing here knows
//! TOML, and nothing here can be impossible: whoever holds a [`Config`] checks nothing again.

mod access;
mod admission;
mod confinement;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;

pub use super::rlimits::{Resource, Rlimit};
use super::units;
pub use access::{AccessConfig, Who};
pub use admission::{
    BreakerConfig, IsolationConfig, Overflow, PoisonConfig, PressureConfig, PriorityConfig, RateLimitConfig,
    RatePer, RetryConfig, TenantConfig, TenantsConfig,
};
pub use confinement::{CgroupConfig, Layer, Profile, SandboxConfig, SandboxUser, UidRange};

/// What metrics call all tenants that have no label of their own, and jobs without a tenant.
pub const OTHER_TENANTS: &str = "_other";

/// A whole configuration file.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Config {
    /// The file it came from, absolute.
    pub path: PathBuf,
    /// `[supervisor]`.
    pub supervisor: SupervisorConfig,
    /// `[[access]]`, in the order of the file; empty: the supervisor's own user and root may do all.
    pub access: Vec<AccessConfig>,
    /// The bulkheads, in the order of the file; at least one, no name twice.
    pub bulkheads: Vec<BulkheadConfig>,
}

impl Config {
    /// The tenants that metrics name, sorted: the first `tenant_labels` that the file names. Nobody else gets a
    /// label, so that strangers cannot fill the table.
    pub fn labelled_tenants(&self) -> Vec<String> {
        let of_bulkheads = self.bulkheads.iter().flat_map(|bulkhead| bulkhead.tenant.keys());
        let of_access = self.access.iter().filter_map(|entry| entry.tenants.as_ref()).flatten();
        let mut named = BTreeSet::new();
        for tenant in of_bulkheads.chain(of_access) {
            if named.len() == self.supervisor.tenant_labels {
                break;
            }
            if tenant != OTHER_TENANTS {
                named.insert(tenant.clone());
            }
        }
        named.into_iter().collect()
    }
}

/// `[supervisor]`: sockets, and the bounds that all bulkheads share.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SupervisorConfig {
    /// The jobs socket, absolute, short enough to bind.
    pub socket: PathBuf,
    /// Its mode, for example `0o600`; what `access` asks for unless the file says otherwise.
    pub socket_mode: u32,
    /// The mode of its folder, if that is missing: `0o755` where `access` lets others in, else `0o700`.
    pub folder_mode: u32,
    /// The admin socket, another path than `socket`.
    pub admin: PathBuf,
    /// The admin API over TCP; `None`: it is not.
    pub http: Option<HttpConfig>,
    /// How long a stop waits for jobs in flight; zero stops at once.
    #[serde(serialize_with = "units::serialize_duration")]
    pub drain_timeout: Duration,
    /// Clients served at once.
    pub max_clients: usize,
    /// Bytes of one payload.
    pub max_payload: u64,
    /// Bytes of all waiting payloads together, at least `max_payload`.
    pub max_buffered: u64,
    /// Where crash reports are kept, absolute; what exists there is a folder. `None`: in memory only.
    pub crash_dir: Option<PathBuf>,
    /// Crash reports that are kept, at least 1.
    pub crash_keep: usize,
    /// Tenants that have a label of their own in the metrics; see [`Config::labelled_tenants`].
    pub tenant_labels: usize,
    /// The ids that workers with [`SandboxUser::Auto`] get; `None`: those of [`defaults::WORKER_UIDS`](super::defaults::WORKER_UIDS), if
    /// the supervisor may start workers as other users.
    pub worker_uids: Option<UidRange>,
}

/// The admin API over TCP.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct HttpConfig {
    /// Where it is served.
    pub address: SocketAddr,
    /// The file of the token, absolute; it held one when the file was read.
    pub token_file: PathBuf,
}

/// `[bulkhead.NAME]`, with `[defaults]` already in it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BulkheadConfig {
    /// Its name, `[a-z0-9._-]{1,64}`.
    pub name: String,
    /// What its workers run.
    pub program: Program,
    /// The environment of its workers, sorted by name.
    pub env: Vec<(String, String)>,
    /// The folder its workers start in, absolute; it existed when the file was read.
    pub cwd: PathBuf,
    /// Worker processes, at least 1.
    pub processes: u32,
    /// Jobs in flight per worker; 0 rejects every job.
    pub max_in_flight: u32,
    /// Jobs that may wait; 0 when `max_in_flight` is 0.
    pub max_queue: u32,
    /// The longest wait for a permit; `None`: until the deadline.
    #[serde(serialize_with = "units::serialize_duration_option")]
    pub queue_timeout: Option<Duration>,
    /// From receipt to answer, unless the client asks for less.
    #[serde(serialize_with = "units::serialize_duration")]
    pub deadline: Duration,
    /// The most a client may ask for, at least `deadline`.
    #[serde(serialize_with = "units::serialize_duration")]
    pub deadline_max: Duration,
    /// Between asking a late worker to stop and killing it; zero kills at once.
    #[serde(serialize_with = "units::serialize_duration")]
    pub grace: Duration,
    /// Bytes of one payload, at most the supervisor's.
    pub max_payload: u64,
    /// Bytes of one result, at most the supervisor's `max_payload`.
    pub max_result: u64,
    /// What a full queue does; [`Overflow::Reject`] when `max_queue` is 0.
    pub overflow: Overflow,
    /// Other bulkheads, tried in order; at most 8, none twice, this one not among them.
    pub fallback: Vec<String>,
    /// What is kept for critical jobs; `None`: nothing.
    pub priority: Option<PriorityConfig>,
    /// What a filling queue does. It rests when `max_queue` is 0.
    pub pressure: PressureConfig,
    /// How fast jobs may come; `None`: as fast as they like.
    pub rate_limit: Option<RateLimitConfig>,
    /// How much of the bulkhead one tenant may have; `None`: all of it.
    pub tenants: Option<TenantsConfig>,
    /// Tenants with numbers of their own, by name; at most 1024.
    pub tenant: BTreeMap<String, TenantConfig>,
    /// When jobs are turned away because those before them failed; `None`: never.
    pub breaker: Option<BreakerConfig>,
    /// When an idempotent job whose worker crashed is tried again; `None`: never.
    pub retry: Option<RetryConfig>,
    /// When a payload that kills workers is quarantined; `None`: never.
    pub poison: Option<PoisonConfig>,
    /// When a dead worker is started again.
    pub restart: Restart,
    /// How long a start may take.
    pub start: Start,
    /// When a silent worker counts as hung.
    pub health: Health,
    /// When a worker that works is replaced all the same.
    pub recycle: Recycle,
    /// Resource limits, hard = soft, in the order of [`Resource::ALL`]; `core` is always there, as 0.
    pub rlimits: Vec<Rlimit>,
    /// How far the workers are confined.
    pub sandbox: SandboxConfig,
    /// A control group for each worker; `None`: none of its own.
    pub cgroup: Option<CgroupConfig>,
}

impl BulkheadConfig {
    /// How tenants are isolated; `None`: they share the workers.
    pub fn isolation(&self) -> Option<&IsolationConfig> {
        self.tenants.as_ref()?.isolation.as_ref()
    }

    /// Worker processes that there can be at once; with isolated tenants those of the `max_active` largest.
    pub fn workers_max(&self) -> u64 {
        let Some(isolation) = self.isolation() else { return u64::from(self.processes) };
        let own = self.tenant.values().filter_map(|tenant| tenant.processes);
        let mut larger: Vec<u32> = own.filter(|processes| *processes > self.processes).collect();
        larger.sort_unstable_by(|a, b| b.cmp(a));
        let others = std::iter::repeat(self.processes);
        larger.into_iter().chain(others).take(isolation.max_active as usize).map(u64::from).sum()
    }
}

/// What a bulkhead runs. Paths are absolute and existed when the file was read.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Program {
    /// A program built with the worker SDK.
    Command {
        /// Its arguments as written, the program first.
        argv: Vec<String>,
        /// The program that was found for `argv[0]`.
        path: PathBuf,
    },
    /// A C library, loaded by the host.
    Library {
        /// The library.
        path: PathBuf,
        /// The symbol that serves jobs.
        entry: String,
    },
    /// An unmodified program, one process per job.
    Exec {
        /// Its arguments as written, the program first.
        argv: Vec<String>,
        /// The program that was found for `argv[0]`.
        path: PathBuf,
    },
}

/// `restart`: when a dead worker is started again.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Restart {
    /// Which deaths are followed by a restart.
    pub policy: RestartPolicy,
    /// The pause before the second restart in a row; it doubles from there.
    #[serde(serialize_with = "units::serialize_duration")]
    pub backoff: Duration,
    /// The longest pause, at least `backoff`.
    #[serde(serialize_with = "units::serialize_duration")]
    pub backoff_max: Duration,
    /// Deaths within `within` after which the slot has failed.
    pub max: u32,
    /// The window in which deaths are counted.
    #[serde(serialize_with = "units::serialize_duration")]
    pub within: Duration,
}

/// Which deaths are followed by a restart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RestartPolicy {
    /// Every death.
    Always,
    /// Every death but a clean exit.
    OnFailure,
    /// None.
    Never,
}

impl RestartPolicy {
    /// Every policy.
    pub const ALL: [RestartPolicy; 3] = [Self::Always, Self::OnFailure, Self::Never];

    /// The word in the file.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Always => "always",
            Self::OnFailure => "on-failure",
            Self::Never => "never",
        }
    }
}

/// `start`: how long a start may take.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Start {
    /// From the start of the process to its hello.
    #[serde(serialize_with = "units::serialize_duration")]
    pub handshake: Duration,
    /// From the hello to ready, unless the worker extends it.
    #[serde(serialize_with = "units::serialize_duration")]
    pub ready: Duration,
}

/// `health`: when a silent worker counts as hung.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Health {
    /// Between two heartbeats.
    #[serde(serialize_with = "units::serialize_duration")]
    pub heartbeat: Duration,
    /// Heartbeats missed in a row, at least 1.
    pub missed: u32,
}

/// `recycle`: when a worker that works is replaced all the same. Each is off when absent.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Recycle {
    /// Jobs served, at least 1.
    pub jobs: Option<u64>,
    /// Bytes of resident memory.
    pub rss: Option<u64>,
    /// Time since it was started.
    #[serde(serialize_with = "units::serialize_duration_option")]
    pub age: Option<Duration>,
}
