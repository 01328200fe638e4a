//! What a file that leaves a key out gets, and the bounds no file may pass. Each number is written here
//! once: the reader, the reference and the documentation take it from here.

use std::time::Duration;

use super::ids::UidRange;

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

/// Mode of the admin socket.
pub const ADMIN_MODE: u32 = 0o600;
/// Mode of the jobs socket where the file has entries of `[[access]]`: they decide which clients may connect.
pub const SOCKET_MODE_WITH_ACCESS: u32 = 0o666;
/// Mode of the jobs socket's folder, if it is missing.
pub const FOLDER_MODE: u32 = 0o700;
/// The same where `[[access]]` lets others in.
pub const FOLDER_MODE_WITH_ACCESS: u32 = 0o755;

/// How far the workers of a bulkhead that says nothing are confined.
pub const SANDBOX_PROFILE: &str = "default";
/// Processes and threads of a confined worker, where they are counted for each worker.
pub const RLIMIT_NPROC: u64 = 1024;
/// Bytes of a file that a confined worker writes.
pub const RLIMIT_FSIZE_BYTES: u64 = 4 << 30;
/// The ids of workers where the file names none: those that systemd sets aside for the same purpose.
pub const WORKER_UIDS: UidRange = UidRange { first: 61_184, last: 65_519 };

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
/// The most spares of one set of workers.
pub const SPARES_CEILING: u64 = 64;
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
/// The default of `output_grace`.
pub const OUTPUT_GRACE: Duration = Duration::from_secs(1);
