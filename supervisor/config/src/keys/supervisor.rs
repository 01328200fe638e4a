//! `[supervisor]`: sockets, and the bounds that all bulkheads share.

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

    /// The Unix socket that jobs come in by. At most 107 bytes.
    socket: String as Kind::Path, without "`$XDG_RUNTIME_DIR/bulkhead/jobs.sock`; for root `/run/bulkhead/jobs.sock`", such as "\"/run/bulkhead/jobs.sock\"", reload Waits;
    /// The mode of `socket`, as octal digits. Its folder is made 0700 if it is missing.
    socket_mode: u32 as Kind::Mode, default SOCKET_MODE, reload Waits;
    /// The Unix socket of the admin API, mode 0600. At most 107 bytes, and not `socket`.
    admin: String as Kind::Path, without "`admin.sock` beside `socket`", such as "\"/run/bulkhead/admin.sock\"", reload Waits;
    /// The address and port that the admin API is served on over TCP too, as in `127.0.0.1:9464`. Needs
    /// `http_token_file`.
    http: String as Kind::Text, without "off", such as "\"127.0.0.1:9464\"", reload Waits, kept elsewhere;
    /// The file that holds the token which requests over TCP must have, 16 to 4096 visible ASCII characters. Others
    /// may not read it; its group may. Needs `http`.
    http_token_file: String as Kind::Path, without "none", such as "\"/etc/bulkhead/token\"", reload Waits, kept elsewhere;
    /// How long a stop waits for jobs in flight; `"0s"` does not wait.
    drain_timeout: Duration as at_least(ANY), default Duration::from_secs(30);
    /// Clients served at once. One user alone may have all; when another finds none free, the longest-idle connection
    /// of the user with most is closed, and only if none is idle the newcomer is told `overloaded`.
    max_clients: usize as count(1, CLIENTS_CEILING), default 1024;
    /// The largest payload of any job, and the largest `max_payload` and `max_result` of any bulkhead.
    max_payload: u64 as size(1, PAYLOAD_MAX), default 64 * 1024 * 1024;
    /// What all that waits holds: payloads as far as they have arrived, names and records; beyond it jobs are
    /// rejected `overloaded`. One client alone may use all; one below an equal share gets room, and the one furthest
    /// over gives. At least `max_payload`.
    max_buffered: u64 as size(1, NUMBER_MAX), default 512 * 1024 * 1024;
    /// What memory files for large payloads and results take, see [protocol](protocol.md#memory-files): at least
    /// 512 KiB, or 0 for none. Those that no job uses go when another client wants some, and before a job is rejected
    /// `overloaded`.
    max_pooled: u64 as size(0, NUMBER_MAX), default 256 * 1024 * 1024;
    /// The folder that crash reports are kept in; made 0700 if it is missing. A report holds the payload of the job.
    crash_dir: String as Kind::Path, without "none, reports are kept in memory", such as "\"/var/lib/bulkhead/crashes\"", reload Waits;
    /// Crash reports that are kept: the newest, and beside them as many of workers that never started.
    crash_keep: usize as count(1, CRASH_KEEP_CEILING), default 100, reload Waits;
    /// Whether crash reports hold the payloads of jobs. Without them a report has their sizes, and no job of it can be
    /// run again.
    crash_payloads: bool as Kind::Boolean, default true, reload Waits;
    /// How many tenants have a label of their own in the metrics: those that the file names, from its first bulkhead
    /// to its last, by name, and then those of `[[access]]`. All others are `_other`.
    tenant_labels: usize as count(0, TENANT_LABELS_CEILING), default 50, reload Waits;
    /// The ids that workers with `sandbox.user = "auto"` get, one each: the first and the last, from 1 to 4294967294,
    /// at most 1000000. Those that a user, a process or another supervisor of this host has are passed over. Without
    /// privileges they have to be of the range that `/etc/subuid` gives the supervisor's user.
    worker_uids: UidRange as Kind::Ids, without "`\"61184-65519\"` if the supervisor may start workers as other users; else those of `/etc/subuid`", such as "\"200000-200999\"", reload Waits;
}

/// `[supervisor]`: sockets, and the bounds that all bulkheads share.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SupervisorConfig {
    /// The jobs socket, absolute, short enough to bind; empty for an embedded supervisor.
    pub socket: PathBuf,
    /// Its mode, for example `0o600`; what `access` asks for unless the file says otherwise.
    pub socket_mode: u32,
    /// The mode of its folder, if that is missing: `0o755` where `access` lets others in, else `0o700`.
    pub folder_mode: u32,
    /// The admin socket, another path than `socket`; empty for an embedded supervisor.
    pub admin: PathBuf,
    /// The admin API over TCP; `None`: it is not.
    pub http: Option<HttpConfig>,
    /// How long a stop waits for jobs in flight; zero stops at once.
    #[serde(serialize_with = "crate::units::serialize_duration")]
    pub drain_timeout: Duration,
    /// Clients served at once.
    pub max_clients: usize,
    /// Bytes of one payload.
    pub max_payload: u64,
    /// Bytes of all waiting payloads together, at least `max_payload`.
    pub max_buffered: u64,
    /// Bytes of memory files.
    pub max_pooled: u64,
    /// Where crash reports are kept, absolute; what exists there is a folder. `None`: in memory only.
    pub crash_dir: Option<PathBuf>,
    /// Crash reports that are kept, at least 1.
    pub crash_keep: usize,
    /// Whether they hold payloads.
    pub crash_payloads: bool,
    /// Tenants that have a label of their own in the metrics; see [`Config::labelled_tenants`](crate::Config::labelled_tenants).
    pub tenant_labels: usize,
    /// The ids that workers with [`SandboxUser::Auto`](crate::SandboxUser::Auto) get; `None`: those of [`defaults::WORKER_UIDS`](crate::defaults::WORKER_UIDS), if
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
