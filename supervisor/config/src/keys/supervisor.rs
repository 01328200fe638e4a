//! Declares the keys of `[supervisor]`, with types, defaults and descriptions, and the type of the checked settings.
//! The keys configure sockets and limits that all bulkheads share. `relations` checks rules between keys, and the
//! supervisor applies the settings.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use bulkhead_shared::limits::PAYLOAD_BYTES_CEILING as PAYLOAD_MAX;
use serde::Serialize;

use super::kinds::*;
use crate::defaults::*;
use crate::ids::UidRange;
use crate::key::{Kind, SUPERVISOR};
use crate::reader::Arguments;
use crate::table::section;
use crate::token::Token;

section! {
    /// Keys of `[supervisor]`.
    SupervisorKeys => SupervisorConfig, SUPERVISOR;

    /// Path of the Unix socket for jobs, at most 107 bytes.
    socket: String as Kind::Path, without "`$XDG_RUNTIME_DIR/bulkhead/jobs.sock`; for root `/run/bulkhead/jobs.sock`", such as "\"/run/bulkhead/jobs.sock\"", reload NeedsRestart;
    /// File mode of `socket`, in octal digits. With `[[access]]`, the default is 0666. If the socket's
    /// directory does not exist, it is created with mode 0700, or with mode 0755 if `[[access]]` and the
    /// socket's mode let other users connect.
    socket_mode: u32 as Kind::Mode, default SOCKET_MODE, reload NeedsRestart;
    /// Path of the Unix socket for the admin API, at most 107 bytes and different from `socket`. The file
    /// mode is 0600.
    admin: String as Kind::Path, without "`admin.sock` next to `socket`", such as "\"/run/bulkhead/admin.sock\"", reload NeedsRestart;
    /// Address and port at which the supervisor serves the admin API over TCP as well, such as
    /// `127.0.0.1:9464`. Needs `http_token_file`.
    http: String as Kind::Text, without "off", such as "\"127.0.0.1:9464\"", reload NeedsRestart, no field;
    /// File with the token that requests over TCP must contain. The token consists of 16 to 4096 visible
    /// ASCII characters. The file must be readable only by its owner and group. Needs `http`.
    http_token_file: String as Kind::Path, without "none", such as "\"/etc/bulkhead/token\"", reload NeedsRestart, no field;
    /// Address and port at which jobs are served over HTTP, such as `0.0.0.0:9465`: only
    /// `POST /v1/bulkheads/NAME/jobs`, `/healthz` and `/readyz`. Needs an `[[access]]` entry with `token_file`; see
    /// [behind a load balancer](load-balancer.md).
    jobs_http: String as Kind::Text, without "off", such as "\"0.0.0.0:9465\"", reload NeedsRestart;
    /// Maximum number of connections to `jobs_http`. At the limit, the longest-idle connection is closed to
    /// make room for a new connection. If no connection is idle, the new connection receives 503
    /// `overloaded`.
    jobs_http_max: usize as count(1, CLIENTS_CEILING), default 1024, reload NeedsRestart;
    /// Time between the signal to stop and the drain. `/readyz` responds 503, and jobs are still accepted, so that
    /// load balancers choose another host first.
    drain_notice: Duration as at_least(ANY_DURATION), default Duration::ZERO;
    /// Maximum time that the supervisor waits for jobs in flight when it stops; with `"0s"` it does not wait.
    drain_timeout: Duration as at_least(ANY_DURATION), default Duration::from_secs(30);
    /// Maximum number of connected clients. A single user can use all connections. To make room for a client
    /// of another user, the supervisor closes the longest-idle connection of the user with the most
    /// connections. If that user has no idle connection, or no more connections than the new client's user,
    /// the new client is rejected as `overloaded`.
    max_clients: usize as count(1, CLIENTS_CEILING), default 1024;
    /// Maximum size of any job's payload, and upper bound for `max_payload` and `max_result` of each
    /// bulkhead.
    max_payload: u64 as size(1, PAYLOAD_MAX), default 64 * 1024 * 1024;
    /// Maximum total size of the data buffered in the supervisor: received parts of payloads, names and
    /// records. Jobs that would exceed the maximum are rejected as `overloaded`. A single client can use all
    /// of this memory. If a client that uses less than an equal share needs memory, the client furthest above
    /// its share gives up memory. At least `max_payload`.
    max_buffered: u64 as size(1, NUMBER_MAX), default 512 * 1024 * 1024;
    /// Maximum total size of the memory files for large payloads and results; see
    /// [protocol](protocol-extensions.md#memory-files). At least 512 KiB, or 0 for none. Memory files that no
    /// job uses are freed when another client needs a memory file, and before a job is rejected as
    /// `overloaded`.
    max_pooled: u64 as size(0, NUMBER_MAX), default 256 * 1024 * 1024;
    /// Directory for crash reports. If the directory does not exist, it is created with mode 0700. A crash
    /// report contains the job's payload.
    crash_dir: String as Kind::Path, without "none; reports are kept in memory", such as "\"/var/lib/bulkhead/crashes\"", reload NeedsRestart;
    /// Number of crash reports to keep. Older reports are deleted. Reports about failed starts of workers (the same
    /// number) and about missed deadlines (at most 20) are kept separately.
    crash_keep: usize as count(1, CRASH_KEEP_CEILING), default 100, reload NeedsRestart;
    /// True if crash reports contain job payloads. Otherwise, a report contains only the sizes of the
    /// payloads, and the jobs cannot be replayed.
    crash_payloads: bool as Kind::Boolean, default true, reload NeedsRestart;
    /// Paths with separate debug information for [backtraces](operations/incidents.md#backtraces), in the layout of
    /// `/usr/lib/debug`: `.build-id/ab/cdef….debug`. At most 8. `/usr/lib/debug` is always read.
    crash_symbols: Arguments as Kind::Paths(CRASH_SYMBOLS_MAX), without "`[]`", such as "[\"/srv/debug\"]", reload NeedsRestart;
    /// Maximum number of tenants with a separate label in the metrics. Labels are given first to the tenants
    /// of the bulkheads, in file order, and then to the tenants in `[[access]]`. All other tenants share the
    /// `_other` label.
    tenant_labels: usize as count(0, TENANT_LABELS_CEILING), default 50, reload NeedsRestart;
    /// First and last user ID of the range from which workers with `sandbox.user = "auto"` get their IDs.
    /// From 1 to 4294967294, at most 1000000 IDs. IDs that belong to existing users, to processes or to other
    /// supervisors on this host are skipped. If the supervisor is unprivileged, the IDs must be in the range
    /// that `/etc/subuid` assigns to the supervisor's user.
    worker_uids: UidRange as Kind::Ids, without "`\"61184-65519\"` if the supervisor can start workers as other users; otherwise the IDs in `/etc/subuid`", such as "\"200000-200999\"", reload NeedsRestart;
}

/// Validated settings of `[supervisor]`: the sockets, and the limits shared by all bulkheads.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SupervisorConfig {
    /// Absolute path of the jobs socket, short enough for a Unix socket address. Empty for an embedded supervisor.
    pub socket: PathBuf,
    /// File mode of the jobs socket, for example `0o600`. By default, all users can connect if `[[access]]` decides
    /// which of them are accepted; otherwise, only the supervisor's user can.
    pub socket_mode: u32,
    /// Mode of the jobs socket's folder if the supervisor creates the folder. `0o755` if other users can connect,
    /// otherwise `0o700`.
    pub folder_mode: u32,
    /// Absolute path of the admin socket, different from `socket`. Empty for an embedded supervisor.
    pub admin: PathBuf,
    /// Settings for serving the admin API over TCP. `None` means that the admin API is not served over TCP.
    pub http: Option<HttpConfig>,
    /// Address on which to listen for jobs over HTTP. `None` means that jobs are not accepted over HTTP.
    pub jobs_http: Option<SocketAddr>,
    /// Maximum number of connections to `jobs_http`.
    pub jobs_http_max: usize,
    /// Delay between the stop signal and the start of the drain. The supervisor still accepts jobs during this time.
    #[serde(serialize_with = "crate::units::serialize_duration")]
    pub drain_notice: Duration,
    /// Maximum time that a stopping supervisor waits for jobs in flight. Zero means that the supervisor does not wait.
    #[serde(serialize_with = "crate::units::serialize_duration")]
    pub drain_timeout: Duration,
    /// Maximum number of connected clients.
    pub max_clients: usize,
    /// Maximum size of a payload in bytes.
    pub max_payload: u64,
    /// Maximum total size of buffered data in bytes, at least `max_payload`.
    pub max_buffered: u64,
    /// Maximum total size of all memory files, in bytes.
    pub max_pooled: u64,
    /// Absolute path of the folder for crash reports. If the path exists, it is a folder. `None` means that reports are
    /// kept only in memory.
    pub crash_dir: Option<PathBuf>,
    /// Number of crash reports to keep, at least 1.
    pub crash_keep: usize,
    /// True if crash reports contain the payloads of jobs.
    pub crash_payloads: bool,
    /// Absolute paths of folders with separate debug information.
    pub crash_symbols: Vec<PathBuf>,
    /// Maximum number of tenants that get their own label in the metrics; see
    /// [`Config::labelled_tenants`](crate::Config::labelled_tenants).
    pub tenant_labels: usize,
    /// Range of user IDs for workers with [`SandboxUser::Auto`](crate::SandboxUser::Auto). `None` means
    /// [`defaults::WORKER_UIDS`](crate::defaults::WORKER_UIDS) if the supervisor can start workers as other users, and
    /// otherwise the supervisor's IDs in `/etc/subuid`.
    pub worker_uids: Option<UidRange>,
}

/// Settings for serving the admin API over TCP.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct HttpConfig {
    /// Address and port to listen on.
    pub address: SocketAddr,
    /// Absolute path of the file that contains the token. The token was valid when the configuration was read.
    pub token_file: PathBuf,
    /// Token that the file contained when the configuration was read.
    #[serde(skip)]
    pub token: Token,
}
