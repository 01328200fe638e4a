//! `[bulkhead.NAME]`, but for the tables in it. `[defaults]` has the same keys, except those that say what runs.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use bulkhead_linux::rlimits::Resource;
use bulkhead_policy::{
    AdaptiveLimits, BreakerLimits, Health, Overflow, PoisonLimits, Pressure, RateLimit, Recycle, Restart,
    RetryLimits, Start,
};
use bulkhead_shared::limits::PAYLOAD_BYTES_CEILING as PAYLOAD_MAX;
use serde::Serialize;

use super::kinds::*;
use super::rlimits::RawRlimits;
use super::{admission, confinement, exec, life, tenants};
use crate::Profile;
use crate::defaults::*;
use crate::key::{BULKHEAD, Kind};
use crate::reader::{Arguments, Environment};
use crate::rlimits::Rlimit;
use crate::table::{as_table, as_table_option, as_word, section};

section! {
    /// `[bulkhead.NAME]`, or `[defaults]`.
    BulkheadKeys => BulkheadConfig, BULKHEAD;

    /// A program built with the worker SDK, and its arguments.
    command: Arguments as Kind::Program, without "none", such as "[\"./worker\", \"--flag\"]", reload ReplacesWorkers, kept elsewhere;
    /// A C library; the host loads it and calls `entry`.
    library: String as Kind::Path, without "none", such as "\"./libworker.so\"", reload ReplacesWorkers, kept elsewhere;
    /// The function of `library` that serves a job.
    entry: Cow<'static, str> as Kind::Text, default Cow::Borrowed("bulkhead_handle"), reload ReplacesWorkers, kept elsewhere;
    /// An unmodified program, one process per job: the payload is its standard input, its standard output the result.
    exec: Arguments as Kind::Program, without "none", such as "[\"./worker\", \"--flag\"]", reload ReplacesWorkers, kept elsewhere;
    /// Time for which the output of an `exec` program (standard output, or the file `files.output`) is awaited after the
    /// program's exit. A process that still holds the output open after that is killed, and the job is `failed` as
    /// `output_incomplete`; see [below](#exec).
    output_grace: Duration as at_least(ANY), without "`\"1s\"` with `exec`", such as "\"1s\"", reload ReplacesWorkers;
    /// The environment of the workers. It is empty but for this and the few variables the SDK needs; names that start
    /// with `BULKHEAD_` are reserved.
    env: Environment as Kind::Environment, without "`{}`", such as "{ RUST_LOG = \"info\" }", reload ReplacesWorkers;
    /// The folder the workers start in.
    cwd: String as Kind::Path, without "the file's folder", such as "\"/srv/work\"", reload ReplacesWorkers;
    /// Worker processes.
    processes: u32 as count(1, PROCESSES_CEILING), default 1;
    /// Jobs in flight per worker process; 0 rejects every job. `processes` × `max_in_flight` is at most 1000000.
    max_in_flight: u32 as count(0, IN_FLIGHT_CEILING), default 1;
    /// Jobs that may wait; 0 means none. Needs a `max_in_flight` above 0.
    max_queue: u32 as count(0, QUEUE_CEILING), default 0;
    /// The longest wait for a permit.
    queue_timeout: Duration as at_least(SOME), without "until the deadline", such as "\"5s\"";
    /// The longest run of an attempt, from its dispatch, whatever it waited before; a client may ask for less. Past it the
    /// worker is ended as at `deadline`, whatever else runs in it. At most `deadline_max`; in `[defaults]` it is for those
    /// bulkheads whose jobs may take so long.
    run_limit: Duration as at_least(SOME), without "until the deadline", such as "\"1s\"";
    /// From a job's receipt to its answer, the wait included, unless the client asks for another.
    deadline: Duration as at_least(SOME), default Duration::from_secs(30);
    /// The most a client may ask for; more is cut to it. At least `deadline`.
    deadline_max: Duration as at_least(SOME), without "`deadline`", such as "\"5s\"";
    /// After a missed deadline the worker is asked to stop, and killed this much later; `"0s"` kills at once.
    /// With `exec` its program is killed at once, and the worker only if the program is not gone within 5 s while a
    /// client waits for another one in it.
    grace: Duration as at_least(ANY), default Duration::from_millis(100);
    /// How much work may be sent ahead of a worker that is busy, by how long its jobs take, so that it need not be waited
    /// for between two jobs. Of workers with the SDK, and so not with `exec`; `"0s"` is off.
    lookahead: Duration as at_least(ANY), default Duration::from_millis(1);
    /// The largest payload of a job. At most the supervisor's.
    max_payload: u64 as size(1, PAYLOAD_MAX), without "the supervisor's `max_payload`", such as "\"8MiB\"";
    /// The largest result of a job; a larger one is `failed` as `result_too_large`. At most the supervisor's
    /// `max_payload`.
    max_result: u64 as size(1, PAYLOAD_MAX), without "the supervisor's `max_payload`", such as "\"8MiB\"", reload ReplacesWorkers;
    /// What a full queue does: reject the next job, or take it in place of the oldest job of the tenant that holds
    /// most of the queue. `"evict-oldest"` needs a `max_queue` above 0.
    overflow: Overflow as one_of::<Overflow>(), default Overflow::Reject;
    /// Bulkheads that take a job which this one turns away as `circuit_open`, `queue_full`, `backpressure`,
    /// `unavailable` or `draining`, and an idempotent one whose worker crashed: tried in order, each at most once.
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
        restart: life::RestartKeys,
        start: life::StartKeys,
        health: life::HealthKeys,
        recycle: life::RecycleKeys,
        exit_status: exec::ExitStatusKeys,
        files: exec::FilesKeys,
        sandbox: confinement::SandboxKeys,
        cgroup: confinement::CgroupKeys,
        rlimits: RawRlimits,
    }
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
    #[serde(serialize_with = "crate::units::serialize_duration_option")]
    pub queue_timeout: Option<Duration>,
    /// The longest run of an attempt, from its dispatch; `None`: until the deadline.
    #[serde(serialize_with = "crate::units::serialize_duration_option")]
    pub run_limit: Option<Duration>,
    /// From receipt to answer, unless the client asks for less.
    #[serde(serialize_with = "crate::units::serialize_duration")]
    pub deadline: Duration,
    /// The most a client may ask for, at least `deadline`.
    #[serde(serialize_with = "crate::units::serialize_duration")]
    pub deadline_max: Duration,
    /// Between asking a late worker to stop and killing it; zero kills at once.
    #[serde(serialize_with = "crate::units::serialize_duration")]
    pub grace: Duration,
    /// How much work may be ahead of a worker; zero for none.
    #[serde(serialize_with = "crate::units::serialize_duration")]
    pub lookahead: Duration,
    /// Bytes of one payload, at most the supervisor's.
    pub max_payload: u64,
    /// Bytes of one result, at most the supervisor's `max_payload`.
    pub max_result: u64,
    /// What a full queue does; [`Overflow::Reject`] when `max_queue` is 0.
    #[serde(serialize_with = "as_word")]
    pub overflow: Overflow,
    /// Other bulkheads, tried in order; at most 8, none twice, this one not among them.
    pub fallback: Vec<String>,
    /// What is kept for critical jobs; `None`: nothing.
    pub priority: Option<admission::PriorityConfig>,
    /// What a filling queue does. It rests when `max_queue` is 0.
    #[serde(serialize_with = "as_table")]
    pub pressure: Pressure,
    /// Whether `pressure` is written for it, and not in `[defaults]`: then it needs a queue.
    #[serde(skip)]
    pub has_own_pressure: bool,
    /// How fast jobs may come; `None`: as fast as they like.
    #[serde(serialize_with = "as_table_option")]
    pub rate_limit: Option<RateLimit>,
    /// How much of the bulkhead one tenant may have; `None`: all of it.
    pub tenants: Option<tenants::TenantsConfig>,
    /// Tenants with numbers of their own, by name; at most 1024.
    pub tenant: BTreeMap<String, tenants::TenantConfig>,
    /// When jobs are turned away because those before them failed; `None`: never.
    #[serde(serialize_with = "as_table_option")]
    pub breaker: Option<BreakerLimits>,
    /// When an idempotent job whose worker crashed is tried again; `None`: never.
    #[serde(serialize_with = "as_table_option")]
    pub retry: Option<RetryLimits>,
    /// When a payload that kills workers is quarantined; `None`: never.
    #[serde(serialize_with = "as_table_option")]
    pub poison: Option<PoisonLimits>,
    /// How many jobs may run at once, by how long they take; `None`: always as many.
    #[serde(serialize_with = "as_table_option")]
    pub adaptive: Option<AdaptiveLimits>,
    /// When a dead worker is started again.
    #[serde(serialize_with = "as_table")]
    pub restart: Restart,
    /// How long a start may take.
    #[serde(serialize_with = "as_table")]
    pub start: Start,
    /// When a silent worker counts as hung.
    #[serde(serialize_with = "as_table")]
    pub health: Health,
    /// When a worker that works is replaced all the same.
    #[serde(serialize_with = "as_table")]
    pub recycle: Recycle,
    /// Resource limits, hard = soft, in the order of [`Resource::ALL`](crate::Resource::ALL); `core` is always there, as 0.
    pub rlimits: Vec<Rlimit>,
    /// How far the workers are confined.
    pub sandbox: confinement::SandboxConfig,
    /// A control group for each worker; `None`: none of its own.
    pub cgroup: Option<confinement::CgroupConfig>,
    /// Time for which a program's standard output is read after the program's exit; `None` without `exec`.
    #[serde(serialize_with = "crate::units::serialize_duration_option")]
    pub output_grace: Option<Duration>,
    /// The meaning of a program's exit status; `None` without `exec`.
    pub exit_status: Option<exec::ExitStatus>,
    /// Payload and result of a program as files; `None`: it reads and writes pipes.
    pub files: Option<exec::Files>,
}

impl BulkheadConfig {
    /// How tenants are isolated; `None`: they share the workers.
    pub fn isolation(&self) -> Option<&tenants::IsolationConfig> {
        self.tenants.as_ref()?.isolation.as_ref()
    }

    /// The resource limits that the sandbox has where `rlimits` says nothing. That of processes (`nproc`) holds where it
    /// counts for each worker.
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

    /// Worker processes that there can be at once; with isolated tenants those of the `max_active` largest.
    ///
    /// Spares are not among them.
    pub fn workers_max(&self) -> u64 {
        let Some(isolation) = self.isolation() else { return u64::from(self.processes) };
        let own = self.tenant.values().filter_map(|tenant| tenant.processes);
        let mut larger: Vec<u32> = own.filter(|processes| *processes > self.processes).collect();
        larger.sort_unstable_by(|a, b| b.cmp(a));
        let others = std::iter::repeat(self.processes);
        larger.into_iter().chain(others).take(isolation.max_active as usize).map(u64::from).sum()
    }

    /// How many spares there may be beside them.
    pub fn spares_max(&self) -> u64 {
        let sets = self.isolation().map_or(1, |isolation| isolation.max_active);
        u64::from(self.start.spares) * u64::from(sets)
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
