//! Constants of the configuration: limits, fixed file modes, paths and names, and a few defaults that other modules
//! need as well. All other defaults are declared with their keys, in `keys`.
//!
//! A name that ends in `_CEILING` is the maximum value of a key, or of a product or total of several keys. `_MAX` is
//! any other maximum, and `_MIN` is a minimum.

use std::time::Duration;

use super::ids::UidRange;

/// Default mode of the jobs socket if the configuration has no `[[access]]` rules.
pub const SOCKET_MODE: u32 = 0o600;
/// Default file name of the jobs socket.
pub const SOCKET_NAME: &str = "jobs.sock";
/// Default file name of the admin socket, which is in the same folder as the jobs socket.
pub const ADMIN_NAME: &str = "admin.sock";
/// Name of the folder for sockets. The folder is in `$XDG_RUNTIME_DIR` or, for root, in [`RUNTIME_DIR_OF_ROOT`].
pub const RUNTIME_FOLDER: &str = "bulkhead";
/// Parent of the socket folder if the supervisor runs as root.
pub const RUNTIME_DIR_OF_ROOT: &str = "/run";

/// Mode of the admin socket.
pub const ADMIN_MODE: u32 = 0o600;
/// Default mode of the jobs socket if the configuration has `[[access]]` rules. The rules then decide which clients are
/// accepted.
pub const SOCKET_MODE_WITH_ACCESS: u32 = 0o666;
/// Mode with which the supervisor creates the folder of the jobs socket or the admin socket.
pub const FOLDER_MODE: u32 = 0o700;
/// Mode of the jobs socket's folder if users other than the supervisor's user can connect to the socket.
pub const FOLDER_MODE_WITH_ACCESS: u32 = 0o755;

/// Default limit on the number of processes and threads of a confined worker. Applies only if the kernel keeps a
/// separate count for each worker.
pub const RLIMIT_NPROC: u64 = 1024;
/// Default maximum size of each file that a confined worker writes, in bytes.
pub const RLIMIT_FSIZE_BYTES: u64 = 4 << 30;
/// Default range of user IDs for workers. systemd reserves this range for dynamically allocated users.
pub const WORKER_UIDS: UidRange = UidRange { first: 61_184, last: 65_519 };

/// Longest duration that a configuration file can contain. Small enough that adding a few durations to a clock time
/// cannot overflow.
pub const DURATION_MAX: Duration = Duration::from_secs(365 * 24 * 3600);
/// Shortest duration for configuration keys that must not be zero.
pub const DURATION_MIN: Duration = Duration::from_millis(1);
/// Largest integer that TOML supports.
pub const NUMBER_MAX: u64 = i64::MAX as u64;
/// Environment variable in which systemd passes the path of the folder with a unit's credentials.
pub const CREDENTIALS_VARIABLE: &str = "CREDENTIALS_DIRECTORY";
/// Environment variable with the path of the configuration file, used if the command line does not specify a path.
pub const CONFIG_VARIABLE: &str = "BULKHEAD_CONFIG";
/// Default path of root's configuration file.
pub const CONFIG_OF_ROOT: &str = "/etc/bulkhead/workers.toml";
/// Default path of a non-root user's configuration file, in the user's configuration folder.
pub const CONFIG_OF_USER: &str = "bulkhead/workers.toml";
/// Name of the folder, next to the configuration file, for files with additional bulkheads and access rules.
pub const FRAGMENTS_FOLDER: &str = "conf.d";
/// Maximum number of configuration files in the `conf.d` folder.
pub const FRAGMENTS_MAX: usize = 256;
/// Maximum size of a configuration file, in bytes.
pub const FILE_BYTES_MAX: u64 = 4 * 1024 * 1024;
/// Maximum number of bulkheads.
pub const BULKHEADS_MAX: usize = 1024;
/// Maximum value of the `max_clients` and `jobs_http_max` keys.
pub const CLIENTS_CEILING: u64 = 1_000_000;
/// Maximum value of the `processes` key.
pub const PROCESSES_CEILING: u64 = 1024;
/// Maximum value of the `start.spares` key.
pub const SPARES_CEILING: u64 = 64;
/// Maximum value of a bulkhead's `max_in_flight` key, which limits each worker separately.
pub const IN_FLIGHT_CEILING: u64 = bulkhead_shared::limits::IN_FLIGHT_CEILING as u64;
/// Maximum value of the `max_queue` keys of bulkheads and tenants.
pub const QUEUE_CEILING: u64 = 1_000_000;
/// Maximum number of permits of a bulkhead, which is the product `processes` × `max_in_flight`. Also the maximum value
/// of keys that limit permits, such as `adaptive.max`.
pub const PERMITS_CEILING: u64 = 1_000_000;
/// Maximum value of the `rate_limit.per_second` key, in jobs per second, and of the `rate_limit.burst` key, in jobs.
pub const RATE_CEILING: u64 = 1_000_000_000;
/// Minimum value of the `breaker.window` key. Shorter windows would mostly measure timing noise.
pub const BREAKER_WINDOW_MIN: Duration = Duration::from_millis(100);
/// Maximum value of the `breaker.min_calls` key.
pub const BREAKER_CALLS_CEILING: u64 = 1_000_000;
/// Maximum value of the `breaker.probes` key.
pub const BREAKER_PROBES_CEILING: u64 = 1000;
/// Maximum value of the `retry.attempts` key.
pub const RETRY_CEILING: u64 = 100;
/// Maximum value of the `poison.crashes` key.
pub const POISON_CEILING: u64 = 1000;
/// Maximum number of names in the `fallback` key.
pub const FALLBACKS_MAX: usize = 8;
/// Maximum value of the `tenants.max_active` key.
pub const TENANTS_ACTIVE_CEILING: u64 = 1024;
/// Maximum total number of worker processes and spares of all isolated tenants of a bulkhead. This total depends on
/// `processes`, `start.spares` and `tenants.max_active`.
pub const ISOLATED_WORKERS_CEILING: u64 = 16_384;
/// Maximum number of `[bulkhead.NAME.tenant.TENANT]` tables in a bulkhead.
pub const TENANT_TABLES_MAX: usize = 1024;
/// Maximum value of the `restart.max` key.
pub const RESTART_CEILING: u64 = 1000;
/// Maximum value of the `health.missed` key.
pub const MISSED_CEILING: u64 = 1000;
/// Maximum value of the `crash_keep` key.
pub const CRASH_KEEP_CEILING: u64 = 10_000;
/// Maximum value of the `tenant_labels` key. Each label adds several lines per bulkhead to the metrics page.
pub const TENANT_LABELS_CEILING: u64 = 1000;
/// Maximum user or group ID. The kernel uses `u32::MAX` for "no ID".
pub const ID_MAX: u64 = u32::MAX as u64 - 1;
/// Maximum number of IDs in `worker_uids`.
pub const WORKER_UIDS_MAX: u64 = 1_000_000;
/// Maximum number of `[[access]]` rules in the configuration, including the files in `conf.d`.
pub const ACCESS_MAX: usize = 1024;
/// Maximum number of tenants in an `[[access]]` rule.
pub const ACCESS_TENANTS_MAX: usize = 1024;
/// Maximum number of paths in `crash_symbols`.
pub const CRASH_SYMBOLS_MAX: usize = 8;

/// Maximum number of paths in each of `sandbox.read` and `sandbox.write`.
pub const SANDBOX_PATHS_MAX: usize = 256;
/// Maximum number of ports in `sandbox.network.tcp_ports`.
pub const TCP_PORTS_MAX: usize = 256;
/// Maximum number of files in `env_files`, each of at most 64 KiB.
pub const ENV_FILES_MAX: usize = 64;
/// Maximum number of system calls in each of `sandbox.syscalls.allow` and `sandbox.syscalls.deny`.
pub const SYSCALLS_MAX: usize = 512;
/// Minimum value of the `cgroup.memory` key, in bytes.
pub const CGROUP_MEMORY_MIN: u64 = 1024 * 1024;
/// Maximum value of the `cgroup.cpu` key.
pub const CGROUP_CPU_CEILING: u64 = 1024;
/// Maximum length of a Unix socket's path in bytes: the size of `sun_path` minus the terminating NUL.
pub const SOCKET_PATH_BYTES_MAX: usize = 107;
/// Maximum total size of a program's arguments and environment in bytes.
pub const ARGUMENT_BYTES_MAX: usize = 96 * 1024;
/// Search path for programs if `PATH` is not set in the supervisor's environment. Similar to the default of `execvp`.
pub const SEARCH_PATH: &str = "/usr/local/bin:/usr/bin:/bin";
/// Default value of the `output_grace` key in an `exec` bulkhead.
pub const OUTPUT_GRACE: Duration = Duration::from_secs(1);
