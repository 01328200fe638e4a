//! Declares the keys of `[bulkhead.NAME]` and `[defaults]`, except for keys in inner tables. Also defines
//! [`BulkheadConfig`], the validated settings of a bulkhead. `[defaults]` allows neither the keys that select the
//! program nor the tables of individual tenants. `reader` reads the values, and `relations` checks them.

use std::borrow::Cow;
use std::path::PathBuf;
use std::time::Duration;

use bulkhead_linux::rlimits::Resource;
use bulkhead_policy::{
    AdaptiveLimits, BreakerLimits, Health, Overflow, PoisonLimits, Pressure, RateLimit, Recycle, Restart,
    RetryLimits, Start,
};
use bulkhead_shared::limits::PAYLOAD_BYTES_CEILING as PAYLOAD_MAX;
use indexmap::IndexMap;
use serde::Serialize;

use super::kinds::*;
use super::rlimits::RawRlimits;
use super::{admission, confinement, exec, lifecycle, tenants};
use crate::Profile;
use crate::defaults::*;
use crate::key::{BULKHEAD, Kind};
use crate::reader::{Arguments, Environment};
use crate::rlimits::Rlimit;
use crate::table::{as_table, as_table_option, as_word, section};

section! {
    /// Keys of the tables `[bulkhead.NAME]` and `[defaults]`.
    BulkheadKeys => BulkheadConfig, BULKHEAD;

    /// Program built with the worker SDK, and its arguments.
    command: Arguments as Kind::Program, without "none", such as "[\"./worker\", \"--flag\"]", reload ReplacesWorkers, no field;
    /// C library that serves jobs. A host program loads the library and calls the `entry` function for each
    /// job.
    library: String as Kind::Path, without "none", such as "\"./libworker.so\"", reload ReplacesWorkers, no field;
    /// Function of `library` that serves a job.
    entry: Cow<'static, str> as Kind::Text, default Cow::Borrowed("bulkhead_handle"), reload ReplacesWorkers, no field;
    /// Unmodified program, run as a separate process for each job. The program reads the payload from
    /// standard input and writes the result to standard output.
    exec: Arguments as Kind::Program, without "none", such as "[\"./worker\", \"--flag\"]", reload ReplacesWorkers, no field;
    /// Maximum time to wait for an `exec` program's output (standard output, or the file `files.output`) to end after
    /// the program has exited. After this time, processes that still hold the output open are killed, and the job is
    /// `failed` as `output_incomplete`; see [below](#exec).
    output_grace: Duration as at_least(ANY_DURATION), without "`\"1s\"` with `exec`", such as "\"1s\"", reload ReplacesWorkers;
    /// Environment variables for the workers. Workers receive only these variables and a few that the SDK needs. Names
    /// that start with `BULKHEAD_` are reserved.
    env: Environment as Kind::Environment, without "`{}`", such as "{ RUST_LOG = \"info\" }", reload ReplacesWorkers;
    /// Files with the values of further environment variables, such as passwords: a path, or `credential:NAME` for a
    /// credential of the supervisor's systemd unit. The value is the file's contents without a final newline, at most
    /// 64 KiB, and is read each time a worker starts. At most 64 files; see [secrets](#secrets).
    env_files: Environment as Kind::Environment, without "`{}`", such as "{ DB_PASSWORD = \"/etc/bulkhead/secrets/db\" }", reload ReplacesWorkers;
    /// Working directory of the workers.
    cwd: String as Kind::Path, without "the file's directory", such as "\"/srv/work\"", reload ReplacesWorkers;
    /// Number of worker processes.
    processes: u32 as count(1, PROCESSES_CEILING), default 1;
    /// Maximum number of jobs in flight per worker process; 0 rejects every job. `processes` ×
    /// `max_in_flight` is at most 1000000.
    max_in_flight: u32 as count(0, IN_FLIGHT_CEILING), default 1;
    /// Maximum number of queued jobs; 0 disables the queue. A queue needs a `max_in_flight` above 0.
    max_queue: u32 as count(0, QUEUE_CEILING), default 0;
    /// Maximum time that a job waits for a permit.
    queue_timeout: Duration as at_least(POSITIVE_DURATION), without "until the deadline", such as "\"5s\"";
    /// Maximum run time of an attempt, counted from its dispatch, not including time in the queue. A client can request
    /// a shorter limit. After this time, the worker is stopped as after a missed `deadline`, even if it is running
    /// other jobs. At most `deadline_max`. In `[defaults]`, the value applies only to bulkheads whose jobs can run that
    /// long.
    run_limit: Duration as at_least(POSITIVE_DURATION), without "until the deadline", such as "\"1s\"";
    /// Maximum time from the receipt of a job to its outcome, including the time in the queue. A client can
    /// request another value.
    deadline: Duration as at_least(POSITIVE_DURATION), default Duration::from_secs(30);
    /// Maximum deadline that a client can request. Larger requested values are reduced to this maximum. At
    /// least `deadline`.
    deadline_max: Duration as at_least(POSITIVE_DURATION), without "`deadline`", such as "\"5s\"";
    /// Time allowed for a worker to stop after a missed deadline before it is killed; `"0s"` kills the worker
    /// immediately. With `exec`, the program is killed immediately, and its worker only if the program still exists 5 s
    /// later and a client is waiting for another of the worker's jobs.
    grace: Duration as at_least(ANY_DURATION), default Duration::from_millis(100);
    /// Amount of work, in expected run time, that is sent to a busy worker in advance, so that the worker is not idle
    /// between jobs. Applies only to workers that use the SDK, not to `exec`. `"0s"` disables prefetching.
    lookahead: Duration as at_least(ANY_DURATION), default Duration::from_millis(1);
    /// Maximum size of a job's payload. At most the supervisor's `max_payload`.
    max_payload: u64 as size(1, PAYLOAD_MAX), without "the supervisor's `max_payload`", such as "\"8MiB\"";
    /// Maximum size of a job's result. A job with a larger result is `failed` as `result_too_large`. At most
    /// the supervisor's `max_payload`.
    max_result: u64 as size(1, PAYLOAD_MAX), without "the supervisor's `max_payload`", such as "\"8MiB\"", reload ReplacesWorkers;
    /// Behaviour if a job arrives while the queue is full. `"reject"` rejects the new job. `"evict-oldest"`
    /// accepts the new job and evicts the oldest job of the tenant with the most queued jobs; this needs a
    /// `max_queue` above 0.
    overflow: Overflow as one_of::<Overflow>(), default Overflow::Reject;
    /// Bulkheads that take over jobs which this bulkhead rejects as `circuit_open`, `queue_full`,
    /// `backpressure`, `unavailable` or `draining`, and idempotent jobs whose worker crashed. The fallbacks
    /// are tried in order, each at most once per job.
    fallback: Arguments as Kind::Names(FALLBACKS_MAX), without "`[]`", such as "[\"other\"]";

    tables {
        pressure: admission::PressureKeys,
        priority: admission::PriorityKeys,
        rate_limit: admission::RateLimitKeys,
        tenants: tenants::TenantsKeys,
        tenant: Vec<tenants::RawTenant>,
        breaker: admission::BreakerKeys,
        retry: admission::RetryKeys,
        poison: admission::PoisonKeys,
        adaptive: admission::AdaptiveKeys,
        restart: lifecycle::RestartKeys,
        start: lifecycle::StartKeys,
        health: lifecycle::HealthKeys,
        recycle: lifecycle::RecycleKeys,
        exit_status: exec::ExitStatusKeys,
        files: exec::FilesKeys,
        sandbox: confinement::SandboxKeys,
        cgroup: confinement::CgroupKeys,
        rlimits: RawRlimits,
    }
}

/// Validated settings of one bulkhead, merged from `[bulkhead.NAME]` and `[defaults]`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BulkheadConfig {
    /// Name of the bulkhead, which matches `[a-z0-9._-]{1,64}`.
    pub name: String,
    /// Program that the workers run.
    pub program: Program,
    /// Environment variables of the workers, sorted by name.
    pub env: Vec<(String, String)>,
    /// Absolute paths of files that contain the values of additional environment variables, sorted by variable name.
    /// The files were valid when the configuration was read.
    pub env_files: Vec<(String, PathBuf)>,
    /// Absolute path of the workers' working directory, which existed when the configuration was read.
    pub cwd: PathBuf,
    /// Number of worker processes, at least 1.
    pub processes: u32,
    /// Maximum number of jobs in flight per worker; 0 rejects every job.
    pub max_in_flight: u32,
    /// Maximum number of queued jobs. Always 0 if `max_in_flight` is 0.
    pub max_queue: u32,
    /// Maximum time that a job waits for a permit. `None` means that the job can wait until its deadline.
    #[serde(serialize_with = "crate::units::serialize_duration_option")]
    pub queue_timeout: Option<Duration>,
    /// Maximum run time of each attempt at a job, measured from the dispatch. `None` means that an attempt can run
    /// until the job's deadline.
    #[serde(serialize_with = "crate::units::serialize_duration_option")]
    pub run_limit: Option<Duration>,
    /// Maximum time from the receipt of a job to its outcome, unless the client requests another value.
    #[serde(serialize_with = "crate::units::serialize_duration")]
    pub deadline: Duration,
    /// Maximum deadline that a client can request, at least `deadline`.
    #[serde(serialize_with = "crate::units::serialize_duration")]
    pub deadline_max: Duration,
    /// True if the file sets `deadline_max`. Otherwise, `deadline` is also the maximum.
    #[serde(skip)]
    pub has_deadline_max: bool,
    /// Time that a worker has to stop a job whose deadline has passed. After this time, the worker is killed. Zero
    /// means that the worker is killed immediately.
    #[serde(serialize_with = "crate::units::serialize_duration")]
    pub grace: Duration,
    /// Amount of work to prefetch to a busy worker, measured as the total expected run time of the prefetched jobs.
    /// Zero disables prefetching.
    #[serde(serialize_with = "crate::units::serialize_duration")]
    pub lookahead: Duration,
    /// Maximum size of a payload in bytes, at most the supervisor's `max_payload`.
    pub max_payload: u64,
    /// Maximum size of a result in bytes, at most the supervisor's `max_payload`.
    pub max_result: u64,
    /// Behaviour if a job arrives while the queue is full. Always [`Overflow::Reject`] if `max_queue` is 0.
    #[serde(serialize_with = "as_word")]
    pub overflow: Overflow,
    /// Names of the fallback bulkheads, in the order in which they are tried. The list contains at most 8 names and
    /// no duplicates. It never contains this bulkhead.
    pub fallback: Vec<String>,
    /// Share of the permits that is reserved for critical jobs. `None` means that no permits are reserved.
    pub priority: Option<admission::PriorityConfig>,
    /// Queue levels at which the supervisor emits a warning or rejects jobs before the queue is full. Ignored if
    /// `max_queue` is 0.
    #[serde(serialize_with = "as_table")]
    pub pressure: Pressure,
    /// True if `pressure` is set in the bulkhead's own table rather than in `[defaults]`. In that case, the bulkhead
    /// must have a queue.
    #[serde(skip)]
    pub has_own_pressure: bool,
    /// Maximum rate at which jobs are admitted. `None` means no limit.
    #[serde(serialize_with = "as_table_option")]
    pub rate_limit: Option<RateLimit>,
    /// Limits that apply to each tenant, or settings for isolating tenants. `None` means that tenants share the workers
    /// and have no individual limits.
    pub tenants: Option<tenants::TenantsConfig>,
    /// Per-tenant settings, by tenant name and in file order. At most 1024 tenants.
    pub tenant: IndexMap<String, tenants::TenantConfig>,
    /// Settings of the circuit breaker. `None` means no breaker.
    #[serde(serialize_with = "as_table_option")]
    pub breaker: Option<BreakerLimits>,
    /// Limits on retries of idempotent jobs whose worker crashed. `None` means that jobs are not retried.
    #[serde(serialize_with = "as_table_option")]
    pub retry: Option<RetryLimits>,
    /// Settings of the quarantine for payloads that kill workers. `None` means no quarantine.
    #[serde(serialize_with = "as_table_option")]
    pub poison: Option<PoisonLimits>,
    /// Settings of the adaptive limit on concurrent jobs. `None` means no adaptive limit.
    #[serde(serialize_with = "as_table_option")]
    pub adaptive: Option<AdaptiveLimits>,
    /// Rules for restarting dead workers.
    #[serde(serialize_with = "as_table")]
    pub restart: Restart,
    /// Settings for starting workers: time limits, method, and spares.
    #[serde(serialize_with = "as_table")]
    pub start: Start,
    /// Heartbeat settings for detecting unresponsive workers.
    #[serde(serialize_with = "as_table")]
    pub health: Health,
    /// Limits at which a healthy worker is replaced.
    #[serde(serialize_with = "as_table")]
    pub recycle: Recycle,
    /// Resource limits of the workers, in the order of [`Resource::ALL`](crate::Resource::ALL). Each value is both the
    /// soft and the hard limit. `core` is always included, with a limit of 0.
    pub rlimits: Vec<Rlimit>,
    /// Confinement of the workers.
    pub sandbox: confinement::SandboxConfig,
    /// Limits of each worker's control group. `None` means that workers have no control groups.
    pub cgroup: Option<confinement::CgroupConfig>,
    /// Maximum time to wait for the end of a program's output after the program has exited. `None` if the workers do
    /// not run an `exec` program.
    #[serde(serialize_with = "crate::units::serialize_duration_option")]
    pub output_grace: Option<Duration>,
    /// Meaning of a program's exit statuses. `None` if the workers do not run an `exec` program.
    pub exit_status: Option<exec::ExitStatus>,
    /// Names of the files that hold a program's payload and result. `None` means that the program uses standard input
    /// and output.
    pub files: Option<exec::Files>,
}

impl BulkheadConfig {
    /// Returns the settings for isolated tenants, or `None` if tenants share the workers.
    pub fn isolation(&self) -> Option<&tenants::IsolationConfig> {
        self.tenants.as_ref()?.isolation.as_ref()
    }

    /// Returns the resource limits that the sandbox sets if the bulkhead's `rlimits` do not. The limit on processes
    /// (`nproc`) applies only where the kernel counts processes separately for each worker.
    pub fn sandbox_rlimits(&self) -> Vec<Rlimit> {
        if self.sandbox.profile == Profile::None {
            return Vec::new();
        }
        let all = [(Resource::Fsize, RLIMIT_FSIZE_BYTES), (Resource::Nproc, RLIMIT_NPROC)];
        let is_free = |resource| self.rlimits.iter().all(|rlimit| rlimit.resource != resource);
        all.into_iter()
            .filter(|(resource, _)| is_free(*resource))
            .map(|(resource, limit)| Rlimit { resource, limit: Some(limit) })
            .collect()
    }

    /// Returns the maximum number of worker processes that can exist at the same time, not counting spares.
    ///
    /// If tenants are isolated, this is the total for the `max_active` tenants that have the most processes.
    pub fn workers_max(&self) -> u64 {
        let Some(isolation) = self.isolation() else { return u64::from(self.processes) };
        let own = self.tenant.values().filter_map(|tenant| tenant.processes);
        let mut larger: Vec<u32> = own.filter(|processes| *processes > self.processes).collect();
        larger.sort_unstable_by(|a, b| b.cmp(a));
        let others = std::iter::repeat(self.processes);
        larger.into_iter().chain(others).take(isolation.max_active as usize).map(u64::from).sum()
    }

    /// Returns the maximum number of spares that can exist at the same time.
    pub fn spares_max(&self) -> u64 {
        let sets = self.isolation().map_or(1, |isolation| isolation.max_active);
        u64::from(self.start.spares) * u64::from(sets)
    }
}

/// Program that the workers of a bulkhead run. All paths are absolute, and each path existed when the configuration was
/// read.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Program {
    /// A program built with the worker SDK.
    Command {
        /// Program and arguments, as written in the configuration file.
        argv: Vec<String>,
        /// Resolved path of `argv[0]`.
        path: PathBuf,
    },
    /// A C library that is loaded by a host program.
    Library {
        /// Path of the library.
        path: PathBuf,
        /// Name of the library's function that serves jobs.
        entry: String,
    },
    /// An unmodified program, run as a separate process for each job.
    Exec {
        /// Program and arguments, as written in the configuration file.
        argv: Vec<String>,
        /// Resolved path of `argv[0]`.
        path: PathBuf,
    },
}
