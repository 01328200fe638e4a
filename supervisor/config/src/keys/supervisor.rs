//! `[supervisor]`: sockets, and limits that all bulkheads share.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use bulkhead_shared::limits::PAYLOAD_BYTES_CEILING as PAYLOAD_MAX;
use serde::Serialize;

use super::kinds::*;
use crate::defaults::*;
use crate::ids::UidRange;
use crate::key::{Kind, SUPERVISOR};
use crate::table::section;

section! {
    /// `[supervisor]`.
    SupervisorKeys => SupervisorConfig, SUPERVISOR;

    /// Unix socket for jobs. At most 107 bytes.
    socket: String as Kind::Path, without "`$XDG_RUNTIME_DIR/bulkhead/jobs.sock`; for root `/run/bulkhead/jobs.sock`", such as "\"/run/bulkhead/jobs.sock\"", reload NeedsRestart;
    /// Mode of `socket`, in octal digits; with `[[access]]` the default is 0666. A missing folder of the
    /// socket is created with mode 0700, or 0755 if `[[access]]` and the mode admit other users.
    socket_mode: u32 as Kind::Mode, default SOCKET_MODE, reload NeedsRestart;
    /// Unix socket of the admin API, with mode 0600. At most 107 bytes, and different from `socket`.
    admin: String as Kind::Path, without "`admin.sock` next to `socket`", such as "\"/run/bulkhead/admin.sock\"", reload NeedsRestart;
    /// Address and port at which the admin API is also served over TCP, such as `127.0.0.1:9464`. Needs
    /// `http_token_file`.
    http: String as Kind::Text, without "off", such as "\"127.0.0.1:9464\"", reload NeedsRestart, no field;
    /// File with the token that requests over TCP must contain: 16 to 4096 visible ASCII characters. Only the
    /// file's owner and group can have read permission. Needs `http`.
    http_token_file: String as Kind::Path, without "none", such as "\"/etc/bulkhead/token\"", reload NeedsRestart, no field;
    /// Address and port at which jobs are served over HTTP, such as `0.0.0.0:9465`: only
    /// `POST /v1/bulkheads/NAME/jobs`, `/healthz` and `/readyz`. Needs an `[[access]]` entry with `token_file`; see
    /// [behind a load balancer](load-balancer.md).
    jobs_http: String as Kind::Text, without "off", such as "\"0.0.0.0:9465\"", reload NeedsRestart;
    /// Maximum number of connections to `jobs_http`. At the limit, the longest-idle connection is closed for a new
    /// connection. If none is idle, the new connection gets the response 503 `overloaded`.
    jobs_http_max: usize as count(1, CLIENTS_CEILING), default 1024, reload NeedsRestart;
    /// Time between the signal to stop and the drain. `/readyz` responds 503, and jobs are still accepted, so that
    /// load balancers choose another host first.
    drain_notice: Duration as at_least(ANY_DURATION), default Duration::ZERO;
    /// Maximum time that a stop waits for jobs in flight; `"0s"` does not wait.
    drain_timeout: Duration as at_least(ANY_DURATION), default Duration::from_secs(30);
    /// Maximum number of connected clients. A single user can use all of them. If another user finds none
    /// free, the longest-idle connection of the user with the most connections is closed. Only if none is
    /// idle, the new client is rejected as `overloaded`.
    max_clients: usize as count(1, CLIENTS_CEILING), default 1024;
    /// Maximum payload of any job, and upper bound for `max_payload` and `max_result` of each bulkhead.
    max_payload: u64 as size(1, PAYLOAD_MAX), default 64 * 1024 * 1024;
    /// Maximum size of all waiting data: payloads as far as they have arrived, names and records. Above it,
    /// jobs are rejected as `overloaded`. A single client can use all of it. If a client below an equal share
    /// needs room, the client furthest above its share gives it up. At least `max_payload`.
    max_buffered: u64 as size(1, NUMBER_MAX), default 512 * 1024 * 1024;
    /// Maximum size of all memory files for large payloads and results, see
    /// [protocol](protocol-extensions.md#memory-files). At least 512 KiB, or 0 for none. Memory files that no job uses
    /// are freed when another client needs one, and before a job is rejected as `overloaded`.
    max_pooled: u64 as size(0, NUMBER_MAX), default 256 * 1024 * 1024;
    /// Folder for crash reports; created with mode 0700 if it is missing. A report holds the payload of the
    /// job.
    crash_dir: String as Kind::Path, without "none, reports are kept in memory", such as "\"/var/lib/bulkhead/crashes\"", reload NeedsRestart;
    /// Number of newest crash reports to keep. In addition, the same number of reports about workers that
    /// never started is kept.
    crash_keep: usize as count(1, CRASH_KEEP_CEILING), default 100, reload NeedsRestart;
    /// True if crash reports hold the payloads of jobs. Without payloads a report holds only their sizes, and
    /// its jobs cannot be replayed.
    crash_payloads: bool as Kind::Boolean, default true, reload NeedsRestart;
    /// Maximum number of tenants with a separate label in the metrics. Tenants of the bulkheads come first,
    /// in the order of the file and then by name, followed by tenants of `[[access]]`. All others share the
    /// label `_other`.
    tenant_labels: usize as count(0, TENANT_LABELS_CEILING), default 50, reload NeedsRestart;
    /// First and last user id of the range for workers with `sandbox.user = "auto"`, which get one id each.
    /// From 1 to 4294967294, at most 1000000 ids. Ids of existing users, of processes and of other
    /// supervisors on this host are skipped. Without privileges, the ids must be in the range that
    /// `/etc/subuid` gives the supervisor's user.
    worker_uids: UidRange as Kind::Ids, without "`\"61184-65519\"` if the supervisor can start workers as other users; otherwise the ids of `/etc/subuid`", such as "\"200000-200999\"", reload NeedsRestart;
}

/// `[supervisor]`: sockets, and limits that all bulkheads share.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SupervisorConfig {
    /// The jobs socket. Absolute and short enough to bind; empty for an embedded supervisor.
    pub socket: PathBuf,
    /// Mode of the jobs socket, for example `0o600`. Depends on `access` unless the file sets it.
    pub socket_mode: u32,
    /// Mode of the socket's folder if it must be created: `0o755` if `access` allows other users, else
    /// `0o700`.
    pub folder_mode: u32,
    /// The admin socket. Different from `socket`; empty for an embedded supervisor.
    pub admin: PathBuf,
    /// The admin API over TCP. `None`: not served over TCP.
    pub http: Option<HttpConfig>,
    /// Listening address for jobs over HTTP. `None`: no such listener.
    pub jobs_http: Option<SocketAddr>,
    /// Maximum number of connections to `jobs_http`.
    pub jobs_http_max: usize,
    /// Time between the signal to stop and the drain.
    #[serde(serialize_with = "crate::units::serialize_duration")]
    pub drain_notice: Duration,
    /// Maximum time that a stop waits for jobs in flight. Zero stops immediately.
    #[serde(serialize_with = "crate::units::serialize_duration")]
    pub drain_timeout: Duration,
    /// Maximum number of connected clients.
    pub max_clients: usize,
    /// Maximum size of a payload in bytes.
    pub max_payload: u64,
    /// Maximum size of all waiting data in bytes, at least `max_payload`.
    pub max_buffered: u64,
    /// Maximum size of all memory files in bytes.
    pub max_pooled: u64,
    /// Folder for crash reports. Absolute; if the path exists, it is a folder. `None`: reports are kept in
    /// memory only.
    pub crash_dir: Option<PathBuf>,
    /// Number of crash reports to keep, at least 1.
    pub crash_keep: usize,
    /// True if crash reports hold payloads.
    pub crash_payloads: bool,
    /// Maximum number of tenants with a separate label in the metrics; see
    /// [`Config::labelled_tenants`](crate::Config::labelled_tenants).
    pub tenant_labels: usize,
    /// User ids of workers with [`SandboxUser::Auto`](crate::SandboxUser::Auto). `None`: the ids of
    /// [`defaults::WORKER_UIDS`](crate::defaults::WORKER_UIDS), if the supervisor can start workers as other
    /// users.
    pub worker_uids: Option<UidRange>,
}

/// The admin API over TCP.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct HttpConfig {
    /// Listening address.
    pub address: SocketAddr,
    /// File with the token. Absolute; it contained a token when the file was read.
    pub token_file: PathBuf,
}
