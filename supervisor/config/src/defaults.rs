//! What a file that leaves a key out gets, and the bounds no file may pass. Each number is written here
//! once: the reader, the reference and the documentation take it from here.

use std::time::Duration;

use super::checked::UidRange;

/// Mode of the jobs socket.
pub const SOCKET_MODE: u32 = 0o600;
/// File name of the jobs socket inside its folder.
pub const SOCKET_NAME: &str = "jobs.sock";
/// File name of the admin socket, beside the jobs socket.
pub const ADMIN_NAME: &str = "admin.sock";
/// Name of the folder below `$XDG_RUNTIME_DIR` or [`RUNTIME_DIR_OF_ROOT`].
pub const RUNTIME_FOLDER: &str = "bulkhead";
/// Where root's sockets live.
pub const RUNTIME_DIR_OF_ROOT: &str = "/run";
/// How long a stop waits for jobs in flight.
pub const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);
/// Clients served at once.
pub const CLIENTS_MAX: u64 = 1024;
/// Bytes of one payload.
pub const PAYLOAD_BYTES_MAX: u64 = 64 * 1024 * 1024;
/// Bytes of all waiting payloads together.
pub const BUFFERED_BYTES_MAX: u64 = 512 * 1024 * 1024;

/// Mode of the admin socket.
pub const ADMIN_MODE: u32 = 0o600;
/// Mode of the jobs socket where the file has entries of `[[access]]`: who may is decided by them.
pub const SOCKET_MODE_WITH_ACCESS: u32 = 0o666;
/// Mode of the jobs socket's folder, if it is missing.
pub const FOLDER_MODE: u32 = 0o700;
/// The same where `[[access]]` lets others in.
pub const FOLDER_MODE_WITH_ACCESS: u32 = 0o755;
/// Crash reports that are kept.
pub const CRASH_KEEP: u64 = 100;
/// Tenants that have a label of their own in the metrics.
pub const TENANT_LABELS: u64 = 50;

/// The symbol of a C library that serves jobs.
pub const ENTRY: &str = "bulkhead_handle";
/// Worker processes of a bulkhead.
pub const PROCESSES: u64 = 1;
/// Jobs in flight per worker.
pub const IN_FLIGHT_MAX: u64 = 1;
/// Jobs that may wait.
pub const QUEUE_MAX: u64 = 0;
/// From a job's receipt to its answer.
pub const DEADLINE: Duration = Duration::from_secs(30);
/// Between asking a late worker to stop and killing it.
pub const GRACE: Duration = Duration::from_millis(100);

/// Share of `max_queue` from which a queue is told to be under pressure.
pub const PRESSURE_WARN: f64 = 0.8;
/// Share of `max_queue` above which only critical jobs are taken.
pub const PRESSURE_REJECT: f64 = 1.0;
/// What a full queue does with the next job.
pub const OVERFLOW: &str = "reject";
/// Who shares a rate limit.
pub const RATE_PER: &str = "bulkhead";

/// How far back a breaker looks.
pub const BREAKER_WINDOW: Duration = Duration::from_secs(10);
/// Jobs in the window before a breaker judges.
pub const BREAKER_MIN_CALLS: u64 = 20;
/// Share of failed jobs that opens a breaker.
pub const BREAKER_FAILURE_RATE: f64 = 0.5;
/// Share of slow jobs that opens a breaker.
pub const BREAKER_SLOW_RATE: f64 = 1.0;
/// How long a breaker stays open the first time.
pub const BREAKER_OPEN_FOR: Duration = Duration::from_secs(5);
/// Jobs that a half-open breaker lets through.
pub const BREAKER_PROBES: u64 = 1;

/// How often an idempotent job is tried, the first time included.
pub const RETRY_ATTEMPTS: u64 = 2;
/// Retries as a share of jobs.
pub const RETRY_BUDGET: f64 = 0.2;

/// Workers that a payload may kill before it is quarantined.
pub const POISON_CRASHES: u64 = 3;
/// The window in which they are counted.
pub const POISON_WITHIN: Duration = Duration::from_secs(72 * 3600);

/// Whether each tenant has workers of its own.
pub const TENANTS_ISOLATE: bool = false;
/// Isolated tenants that have workers at once.
pub const TENANTS_ACTIVE_MAX: u64 = 64;
/// How long an isolated tenant's workers stay without a job.
pub const TENANTS_IDLE: Duration = Duration::from_secs(60);

/// Which deaths are followed by a restart.
pub const RESTART_POLICY: &str = "always";
/// The pause before the second restart in a row.
pub const RESTART_BACKOFF: Duration = Duration::from_millis(100);
/// The longest pause between restarts.
pub const RESTART_BACKOFF_MAX: Duration = Duration::from_secs(30);
/// Deaths within [`RESTART_WITHIN`] after which a worker slot has failed.
pub const RESTART_MAX: u64 = 5;
/// The window in which deaths are counted.
pub const RESTART_WITHIN: Duration = Duration::from_secs(30);

/// From the start of a process to its hello.
pub const START_HANDSHAKE: Duration = Duration::from_secs(5);
/// From the hello to ready.
pub const START_READY: Duration = Duration::from_secs(60);

/// Between two heartbeats.
pub const HEALTH_HEARTBEAT: Duration = Duration::from_secs(1);
/// Heartbeats missed in a row after which a worker is hung.
pub const HEALTH_MISSED: u64 = 5;

/// How far the workers of a bulkhead that says nothing are confined.
pub const SANDBOX_PROFILE: &str = "default";
/// Whether confined workers may use the network.
pub const SANDBOX_NETWORK: bool = false;
/// Processes and threads of a confined worker, where they are counted for each worker.
pub const RLIMIT_NPROC: u64 = 1024;
/// Bytes of a file that a confined worker writes.
pub const RLIMIT_FSIZE_BYTES: u64 = 4 << 30;
/// The ids of workers where the file names none: those that systemd sets aside for the same purpose.
pub const WORKER_UIDS: UidRange = UidRange { first: 61_184, last: 65_519 };
/// Bytes of the private `/tmp` of confined workers.
pub const SANDBOX_TMP_BYTES: u64 = 64 * 1024 * 1024;

/// The longest duration a file may name, so that adding a few of them to a clock never overflows.
pub const DURATION_MAX: Duration = Duration::from_secs(365 * 24 * 3600);
/// The shortest duration where nothing at all makes no sense: the resolution of deadlines on the wire.
pub const DURATION_MIN: Duration = Duration::from_millis(1);
/// The largest number that a TOML file can hold.
pub const NUMBER_MAX: u64 = i64::MAX as u64;
/// Bytes of a configuration file.
pub const FILE_BYTES_MAX: u64 = 4 * 1024 * 1024;
/// Bulkheads of one file.
pub const BULKHEADS_MAX: usize = 1024;
/// The most clients that can be allowed at once.
pub const CLIENTS_CEILING: u64 = 1_000_000;
/// The most worker processes of one bulkhead.
pub const PROCESSES_CEILING: u64 = 1024;
/// The most jobs in flight per worker.
pub const IN_FLIGHT_CEILING: u64 = bulkhead_shared::limits::IN_FLIGHT_CEILING as u64;
/// The most jobs that may wait in one bulkhead.
pub const QUEUE_CEILING: u64 = 1_000_000;
/// The most permits of one bulkhead: processes × jobs in flight.
pub const PERMITS_CEILING: u64 = 1_000_000;
/// The most jobs a second that a rate limit can say, and the largest burst.
pub const RATE_CEILING: u64 = 1_000_000_000;
/// The shortest window of a breaker: below it the clock is all it would measure.
pub const BREAKER_WINDOW_MIN: Duration = Duration::from_millis(100);
/// The most jobs a breaker may want to see before it judges.
pub const BREAKER_CALLS_CEILING: u64 = 1_000_000;
/// The most jobs that a half-open breaker may let through.
pub const BREAKER_PROBES_CEILING: u64 = 1000;
/// The most often that one job may be tried.
pub const RETRY_CEILING: u64 = 100;
/// The most crashes of a payload that are remembered.
pub const POISON_CEILING: u64 = 1000;
/// The most bulkheads that one falls back to.
pub const FALLBACKS_MAX: usize = 8;
/// The most isolated tenants that may have workers at once.
pub const TENANTS_ACTIVE_CEILING: u64 = 1024;
/// The most worker processes of one bulkhead whose tenants are isolated, those of all tenants together.
pub const ISOLATED_WORKERS_CEILING: u64 = 16_384;
/// Tenants of one bulkhead with numbers of their own.
pub const TENANT_TABLES_MAX: usize = 1024;
/// The most deaths that a restart history remembers.
pub const RESTART_CEILING: u64 = 1000;
/// The most heartbeats that may be missed.
pub const MISSED_CEILING: u64 = 1000;
/// The most crash reports that may be kept.
pub const CRASH_KEEP_CEILING: u64 = 10_000;
/// The most tenants that may have a label of their own in the metrics: each has some lines for each bulkhead.
pub const TENANT_LABELS_CEILING: u64 = 1000;
/// The largest id of a user or a group: the kernel takes the one above for none.
pub const ID_MAX: u64 = u32::MAX as u64 - 1;
/// The most ids that `worker_uids` may name.
pub const WORKER_UIDS_MAX: u64 = 1_000_000;
/// Entries of `[[access]]` in one file.
pub const ACCESS_MAX: usize = 1024;
/// Tenants that one entry of `[[access]]` may name.
pub const ACCESS_TENANTS_MAX: usize = 1024;
/// Paths that `sandbox.read` and `sandbox.write` may name, each.
pub const SANDBOX_PATHS_MAX: usize = 256;
/// System calls that `sandbox.syscalls` may allow and deny, each.
pub const SYSCALLS_MAX: usize = 512;
/// The least memory that a worker's control group may be given.
pub const CGROUP_MEMORY_MIN: u64 = 1024 * 1024;
/// The most processor cores that a worker's control group may be given.
pub const CGROUP_CPU_CEILING: u64 = 1024;
/// Bytes of a path of a Unix socket: `sun_path` less its closing NUL.
pub const SOCKET_PATH_BYTES_MAX: usize = 107;
/// Bytes of arguments and environment of one program together.
pub const ARGUMENT_BYTES_MAX: usize = 96 * 1024;
/// Where a bare program name is looked for when the supervisor itself has no `PATH`, as `execvp` does.
pub const SEARCH_PATH: &str = "/usr/local/bin:/usr/bin:/bin";
