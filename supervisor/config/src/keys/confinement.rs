//! Declares the `sandbox`, `sandbox.syscalls` and `cgroup` tables of a bulkhead, and the types of their validated
//! values. `relations/confinement.rs` checks the values. The `plane` crate turns them into orders for the keeper, which
//! confines the workers.

use std::path::PathBuf;

use bulkhead_shared::{Vocabulary as _, vocabulary};
use serde::ser::SerializeStruct as _;
use serde::{Serialize, Serializer};

use super::kinds::*;
use crate::defaults::*;
use crate::key::Kind;
use crate::reader::Arguments;
use crate::table::{section, table};

table! {
    /// `sandbox`: confinement of the workers.
    SandboxKeys, "bulkhead.NAME.sandbox";

    /// Level of confinement of the workers.
    profile: Profile as one_of::<Profile>(), default Profile::Default, reload ReplacesWorkers;
    /// Network access of the workers. A table permits only outgoing TCP connections, to the ports in
    /// `tcp_ports`, and UDP to all addresses with `udp = true`. Without UDP, DNS works only over TCP. A bulkhead's
    /// value replaces that of `[defaults]`; see [only some ports](confinement/layers.md#only-some-ports).
    network: Network as Kind::Network, default Network::None, reload ReplacesWorkers;
    /// Additional files and directories that the workers can read. The program, its libraries and its loader
    /// are always readable.
    read: Arguments as Kind::Paths(SANDBOX_PATHS_MAX), without "`[]`", such as "[\"/usr/share/fonts\"]", reload ReplacesWorkers;
    /// Files and directories that the workers can write to, besides their private `/tmp`.
    write: Arguments as Kind::Paths(SANDBOX_PATHS_MAX), without "`[]`", such as "[\"/usr/share/fonts\"]", reload ReplacesWorkers;
    /// Maximum size of each worker's private `/tmp`; 0 for none. With the `default` profile, the private
    /// `/tmp` is a directory on disk whose path is in `TMPDIR`. Its size is checked every second, and a
    /// worker that exceeds the maximum is killed as `crashed`/`violation`. For workers with user IDs from
    /// `/etc/subuid`, `/tmp` is in memory.
    tmp: u64 as size(0, NUMBER_MAX), default 64 * 1024 * 1024, reload ReplacesWorkers;
    /// User that the workers run as. `"auto"`: an unprivileged user ID for each worker, or one ID for the
    /// whole bulkhead if `write` is set; available if the supervisor can start workers as other users, or has
    /// IDs in `/etc/subuid`. `"shared"`: the supervisor's own user. Any other value is the name of a user. If
    /// the supervisor runs as root, workers run as root only with `"root"` or `"shared"`.
    user: String as Kind::Text, without "`\"auto\"`; without a profile `\"shared\"`", such as "\"auto\"", reload ReplacesWorkers;
    /// Layers of the profile that workers can start without if this machine does not support them. If any
    /// other layer is missing, the workers do not start.
    best_effort: Arguments as Kind::Words(Layer::WORDS), without "`[]`", such as "[\"landlock\"]", reload ReplacesWorkers;

    tables { syscalls: SyscallsKeys, }
}

table! {
    /// `sandbox.syscalls`: system calls to add to the profile or to remove from it.
    SyscallsKeys, "bulkhead.NAME.sandbox.syscalls";

    /// System calls that the workers can make in addition to those that the profile allows.
    allow: Arguments as Kind::Names(SYSCALLS_MAX), without "`[]`", such as "[\"mlock\"]", reload ReplacesWorkers;
    /// System calls that the profile allows but the workers cannot make.
    deny: Arguments as Kind::Names(SYSCALLS_MAX), without "`[]`", such as "[\"mlock\"]", reload ReplacesWorkers;
}

/// Settings in the `sandbox` table. If the profile is [`Profile::None`], all other fields are empty and unused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SandboxConfig {
    /// Profile that selects the layers of confinement.
    pub profile: Profile,
    /// Network access of the workers.
    pub network: Network,
    /// Absolute paths of additional files and folders that the workers can read. The paths existed when the
    /// configuration was read.
    pub read: Vec<PathBuf>,
    /// Absolute paths of files and folders that the workers can write to. The paths existed when the configuration was
    /// read.
    pub write: Vec<PathBuf>,
    /// Maximum size of each worker's private `/tmp` in bytes. 0 means that workers have no private `/tmp`.
    pub tmp_bytes: u64,
    /// User that the workers run as. `None` if the configuration does not set the key; see
    /// [`SandboxConfig::wants_own_ids`].
    pub user: Option<SandboxUser>,
    /// System calls that are allowed in addition to those in the profile. None of these system calls is in `deny`.
    pub allow: Vec<String>,
    /// System calls that the profile allows but the configuration forbids.
    pub deny: Vec<String>,
    /// Confinement layers that are optional. Workers start even if the machine does not support these layers. All
    /// other layers of the profile are required.
    pub best_effort: Vec<Layer>,
}

impl SandboxConfig {
    /// Returns true if the workers should run with separate user IDs. Workers without a sandbox run as the
    /// supervisor's user.
    pub fn wants_own_ids(&self) -> bool {
        self.profile != Profile::None && matches!(self.user, None | Some(SandboxUser::Auto))
    }
}

vocabulary! {
    /// Level of confinement for the workers, ordered from the loosest to the strictest.
    #[derive(Serialize)]
    #[serde(rename_all = "lowercase")]
    Profile {
        /// No sandbox. A worker still gets its own session and its resource limits, and inherits no descriptors.
        None = "none",
        /// Layers of confinement that ordinary programs tolerate and that require neither root nor user namespaces.
        Default = "default",
        /// All layers of confinement. The seccomp filter allows only the system calls that are needed for computation.
        Strict = "strict",
    }
}

/// Network access of workers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Network {
    /// Workers cannot create any sockets except socket pairs.
    None,
    /// Workers can open connections but cannot accept any.
    Connections {
        /// TCP ports to which workers can connect, at any address. No port is 0 or listed twice.
        tcp_ports: Vec<u16>,
        /// True if workers can use UDP, with any address and port.
        udp: bool,
    },
    /// Workers can use all internet sockets.
    All,
}

impl Serialize for Network {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::None => serializer.serialize_bool(false),
            Self::All => serializer.serialize_bool(true),
            Self::Connections { tcp_ports, udp } => {
                let mut table = serializer.serialize_struct("Network", 2)?;
                table.serialize_field("tcp_ports", tcp_ports)?;
                table.serialize_field("udp", udp)?;
                table.end()
            }
        }
    }
}

/// User that the workers run as.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SandboxUser {
    /// A separate user ID for each worker, or one ID for the whole bulkhead if its workers can write to permanent
    /// files.
    Auto,
    /// The supervisor's own user.
    Shared,
    /// A user specified by name, who existed when the configuration was read.
    Named(String),
}

impl SandboxUser {
    /// Value of the `sandbox.user` key that selects [`SandboxUser::Auto`].
    pub const AUTO: &str = "auto";

    /// Value of the `sandbox.user` key that selects [`SandboxUser::Shared`].
    pub const SHARED: &str = "shared";

    /// Returns the value of the `sandbox.user` key that selects this user.
    pub fn name(&self) -> &str {
        match self {
            Self::Auto => Self::AUTO,
            Self::Shared => Self::SHARED,
            Self::Named(name) => name,
        }
    }
}

vocabulary! {
    /// A layer of confinement.
    #[derive(Serialize)]
    #[serde(rename_all = "snake_case")]
    Layer {
        /// Landlock rules that restrict access to files.
        Landlock = "landlock",
        /// Landlock scopes that prevent workers from sending signals to processes outside the sandbox. Used unless a
        /// separate user ID or a pid namespace already prevents such signals.
        LandlockScopes = "landlock_scopes",
        /// Landlock rules that restrict TCP connections to the ports in `network.tcp_ports`. Used only if
        /// `network` is a table.
        LandlockTcp = "landlock_tcp",
        /// Seccomp filter that restricts system calls.
        Seccomp = "seccomp",
        /// User namespace, with separate user IDs.
        UserNamespace = "user_namespace",
        /// PID namespace, with separate process IDs. When the first process of the namespace exits, the kernel kills
        /// all other processes of the namespace.
        PidNamespace = "pid_namespace",
        /// Mount namespace, with a separate root folder.
        MountNamespace = "mount_namespace",
        /// Network namespace without interfaces.
        NetworkNamespace = "network_namespace",
        /// Separate user, so that workers do not run as the supervisor's user.
        Identity = "identity",
        /// Control group with resource limits.
        Cgroup = "cgroup",
        /// The `no_new_privs` flag, which ensures that executing a program never adds privileges.
        NoNewPrivs = "no_new_privs",
        /// Isolation between concurrently running programs of an `exec` worker.
        ProgramScopes = "program_scopes",
    }
}

section! {
    /// `cgroup`: resource limits that each worker shares with all its descendants.
    CgroupKeys => CgroupConfig, "bulkhead.NAME.cgroup", by rows;

    /// Maximum memory that a worker and its descendants use together, including page cache.
    memory: u64 as size(CGROUP_MEMORY_MIN, NUMBER_MAX), without "no limit", such as "\"8MiB\"", reload ReplacesWorkers;
    /// Maximum total number of processes and threads of a worker and its descendants.
    pids: u64 as count(1, NUMBER_MAX), without "no limit", such as "32", reload ReplacesWorkers;
    /// Maximum number of processor cores that a worker and its descendants use together.
    cpu: f64 as Kind::Number(CGROUP_CPU_CEILING), without "no limit", such as "1.5", reload ReplacesWorkers;
}

/// Resource limits that each worker shares with all its descendants. `None` in a field means no limit.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CgroupConfig {
    /// Maximum memory in bytes, at least 1 MiB.
    pub memory: Option<u64>,
    /// Maximum number of processes and threads, at least 1.
    pub pids: Option<u64>,
    /// Maximum number of processor cores, above 0 and at most 1024.
    pub cpu: Option<f64>,
}
