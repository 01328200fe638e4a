//! Default values and limits of the configuration. Each number is defined once here, for the reader, the
//! reference and the documentation.

use std::time::Duration;

use super::ids::UidRange;

/// Mode of the jobs socket.
pub const SOCKET_MODE: u32 = 0o600;
/// File name of the jobs socket inside its folder.
pub const SOCKET_NAME: &str = "jobs.sock";
/// File name of the admin socket, in the folder of the jobs socket.
pub const ADMIN_NAME: &str = "admin.sock";
/// Name of the folder in `$XDG_RUNTIME_DIR` or [`RUNTIME_DIR_OF_ROOT`].
pub const RUNTIME_FOLDER: &str = "bulkhead";
/// Parent of the folder for root's sockets.
pub const RUNTIME_DIR_OF_ROOT: &str = "/run";

/// Mode of the admin socket.
pub const ADMIN_MODE: u32 = 0o600;
/// Mode of the jobs socket if the file contains `[[access]]`. The entries then decide which clients can
/// connect.
pub const SOCKET_MODE_WITH_ACCESS: u32 = 0o666;
/// Mode of the jobs socket's folder if the supervisor creates it.
pub const FOLDER_MODE: u32 = 0o700;
/// Mode of the jobs socket's folder if `[[access]]` allows other users.
pub const FOLDER_MODE_WITH_ACCESS: u32 = 0o755;

/// Default sandbox profile.
pub const SANDBOX_PROFILE: &str = "default";
/// Maximum number of processes and threads of a confined worker, where they are counted for each worker.
pub const RLIMIT_NPROC: u64 = 1024;
/// Maximum size of a file that a confined worker writes, in bytes.
pub const RLIMIT_FSIZE_BYTES: u64 = 4 << 30;
/// Default user ids of workers. systemd reserves this range for the same purpose.
pub const WORKER_UIDS: UidRange = UidRange { first: 61_184, last: 65_519 };

/// Maximum duration in a file. Adding a few of them to a clock never overflows.
pub const DURATION_MAX: Duration = Duration::from_secs(365 * 24 * 3600);
/// Minimum duration of keys that do not allow zero. Equals the resolution of deadlines in the protocol.
pub const DURATION_MIN: Duration = Duration::from_millis(1);
/// Maximum integer of TOML.
pub const NUMBER_MAX: u64 = i64::MAX as u64;
/// Maximum size of a configuration file, in bytes.
pub const FILE_BYTES_MAX: u64 = 4 * 1024 * 1024;
/// Maximum number of bulkheads.
pub const BULKHEADS_MAX: usize = 1024;
/// Maximum of `max_clients`.
pub const CLIENTS_CEILING: u64 = 1_000_000;
/// Maximum number of worker processes of a bulkhead.
pub const PROCESSES_CEILING: u64 = 1024;
/// Maximum number of spares of one set of workers.
pub const SPARES_CEILING: u64 = 64;
/// Maximum number of jobs in flight per worker.
pub const IN_FLIGHT_CEILING: u64 = bulkhead_shared::limits::IN_FLIGHT_CEILING as u64;
/// Maximum number of queued jobs of a bulkhead.
pub const QUEUE_CEILING: u64 = 1_000_000;
/// Maximum number of permits of a bulkhead: processes × jobs in flight.
pub const PERMITS_CEILING: u64 = 1_000_000;
/// Maximum rate of a rate limit in jobs per second, and maximum burst.
pub const RATE_CEILING: u64 = 1_000_000_000;
/// Minimum window of a breaker. Shorter windows would mostly measure timing noise.
pub const BREAKER_WINDOW_MIN: Duration = Duration::from_millis(100);
/// Maximum of `breaker.min_calls`.
pub const BREAKER_CALLS_CEILING: u64 = 1_000_000;
/// Maximum number of probes of a half-open breaker.
pub const BREAKER_PROBES_CEILING: u64 = 1000;
/// Maximum number of attempts of a job.
pub const RETRY_CEILING: u64 = 100;
/// Maximum of `poison.crashes`.
pub const POISON_CEILING: u64 = 1000;
/// Maximum number of fallbacks of a bulkhead.
pub const FALLBACKS_MAX: usize = 8;
/// Maximum number of isolated tenants with workers at the same time.
pub const TENANTS_ACTIVE_CEILING: u64 = 1024;
/// Maximum number of worker processes of a bulkhead with isolated tenants, over all tenants.
pub const ISOLATED_WORKERS_CEILING: u64 = 16_384;
/// Maximum number of `[bulkhead.NAME.tenant.TENANT]` tables of a bulkhead.
pub const TENANT_TABLES_MAX: usize = 1024;
/// Maximum of `restart.max`.
pub const RESTART_CEILING: u64 = 1000;
/// Maximum of `health.missed`.
pub const MISSED_CEILING: u64 = 1000;
/// Maximum of `crash_keep`.
pub const CRASH_KEEP_CEILING: u64 = 10_000;
/// Maximum number of tenants with a separate metrics label. Each adds some lines for each bulkhead.
pub const TENANT_LABELS_CEILING: u64 = 1000;
/// Maximum id of a user or a group. The kernel uses the next value for "no id".
pub const ID_MAX: u64 = u32::MAX as u64 - 1;
/// Maximum number of ids in `worker_uids`.
pub const WORKER_UIDS_MAX: u64 = 1_000_000;
/// Maximum number of `[[access]]` entries.
pub const ACCESS_MAX: usize = 1024;
/// Maximum number of tenants in an `[[access]]` entry.
pub const ACCESS_TENANTS_MAX: usize = 1024;
/// Maximum number of paths in `sandbox.read`, and in `sandbox.write`.
pub const SANDBOX_PATHS_MAX: usize = 256;
/// Maximum number of system calls in `sandbox.syscalls.allow`, and in `sandbox.syscalls.deny`.
pub const SYSCALLS_MAX: usize = 512;
/// Minimum of `cgroup.memory`.
pub const CGROUP_MEMORY_MIN: u64 = 1024 * 1024;
/// Maximum of `cgroup.cpu`.
pub const CGROUP_CPU_CEILING: u64 = 1024;
/// Maximum length of the path of a Unix socket, in bytes: the size of `sun_path` without the closing NUL.
pub const SOCKET_PATH_BYTES_MAX: usize = 107;
/// Maximum size of a program's arguments and environment together, in bytes.
pub const ARGUMENT_BYTES_MAX: usize = 96 * 1024;
/// Search path for programs if the supervisor has no `PATH`. `execvp` has a similar default.
pub const SEARCH_PATH: &str = "/usr/local/bin:/usr/bin:/bin";
/// Default of `output_grace`.
pub const OUTPUT_GRACE: Duration = Duration::from_secs(1);
