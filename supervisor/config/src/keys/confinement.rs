//! Tables of a bulkhead about the confinement and the resources of its workers.

use std::path::PathBuf;

use bulkhead_shared::{Vocabulary as _, vocabulary};
use serde::Serialize;

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
    /// True if the workers can use the network.
    network: bool as Kind::Boolean, default false, reload ReplacesWorkers;
    /// Additional files and folders that the workers can read. The program, its libraries and its loader are
    /// always readable.
    read: Arguments as Kind::Paths(SANDBOX_PATHS_MAX), without "`[]`", such as "[\"/usr/share/fonts\"]", reload ReplacesWorkers;
    /// Files and folders that the workers can write, besides their private `/tmp`.
    write: Arguments as Kind::Paths(SANDBOX_PATHS_MAX), without "`[]`", such as "[\"/usr/share/fonts\"]", reload ReplacesWorkers;
    /// Size of a private `/tmp`; 0 for none. With the profile `default` it is a folder on disk that `TMPDIR`
    /// names. The size of the folder is checked every second, and a worker that exceeds it is ended as
    /// `crashed`/`violation`. For workers with ids of `/etc/subuid`, `/tmp` is in memory.
    tmp: u64 as size(0, NUMBER_MAX), default 64 * 1024 * 1024, reload ReplacesWorkers;
    /// User of the workers. `"auto"`: an unprivileged user id for each worker, or one id for the bulkhead if
    /// `write` is set; available if the supervisor can start workers as other users, or has ids in
    /// `/etc/subuid`. `"shared"`: the supervisor's own user. Any other value is the name of a user. If the
    /// supervisor runs as root, only `"root"` and `"shared"` make a worker root.
    user: String as Kind::Text, without "`\"auto\"`; without a profile `\"shared\"`", such as "\"auto\"", reload ReplacesWorkers;
    /// Layers of the profile that can be missing on this machine. If any other layer is missing, the workers
    /// do not start.
    best_effort: Arguments as Kind::Words(Layer::WORDS), without "`[]`", such as "[\"landlock\"]", reload ReplacesWorkers;

    tables { syscalls: SyscallsKeys, }
}

table! {
    /// `sandbox.syscalls`: system calls to add to the profile or to remove from it.
    SyscallsKeys, "bulkhead.NAME.sandbox.syscalls";

    /// System calls that the workers can make in addition to those of the profile.
    allow: Arguments as Kind::Names(SYSCALLS_MAX), without "`[]`", such as "[\"mlock\"]", reload ReplacesWorkers;
    /// System calls of the profile that the workers cannot make.
    deny: Arguments as Kind::Names(SYSCALLS_MAX), without "`[]`", such as "[\"mlock\"]", reload ReplacesWorkers;
}

/// `sandbox`: confinement of the workers. With [`Profile::None`] all other fields are empty and unused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SandboxConfig {
    /// Profile, which selects the layers.
    pub profile: Profile,
    /// True if the workers can use the network.
    pub network: bool,
    /// Additional readable paths. Absolute; they existed when the file was read.
    pub read: Vec<PathBuf>,
    /// Writable paths. Absolute; they existed when the file was read.
    pub write: Vec<PathBuf>,
    /// Size of a private `/tmp` in bytes; 0 for none.
    pub tmp_bytes: u64,
    /// User of the workers. `None` if the file does not set it; see [`SandboxConfig::wants_own_ids`].
    pub user: Option<SandboxUser>,
    /// System calls to add to the profile. None of them is in `deny`.
    pub allow: Vec<String>,
    /// System calls to remove from the profile.
    pub deny: Vec<String>,
    /// Layers that can be missing; all others are required.
    pub best_effort: Vec<Layer>,
}

impl SandboxConfig {
    /// Returns true if the workers need separate user ids. Without a profile, they run as the supervisor's
    /// user.
    pub fn wants_own_ids(&self) -> bool {
        self.profile != Profile::None && matches!(self.user, None | Some(SandboxUser::Auto))
    }
}

vocabulary! {
    /// Level of confinement of workers, from the loosest to the strictest.
    #[derive(Serialize)]
    #[serde(rename_all = "lowercase")]
    Profile {
        /// Separate session, descriptors and limits only.
        None = "none",
        /// Layers that ordinary programs tolerate and that need neither root nor user namespaces.
        Default = "default",
        /// All layers, and only the system calls that computation needs.
        Strict = "strict",
    }
}

/// User of the workers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SandboxUser {
    /// A separate id for each worker. If workers can write permanent files, one id for the bulkhead.
    Auto,
    /// The supervisor's own user.
    Shared,
    /// A user of the system, who existed when the file was read.
    Named(String),
}

impl SandboxUser {
    /// The word for [`SandboxUser::Auto`].
    pub const AUTO: &str = "auto";

    /// The word for [`SandboxUser::Shared`].
    pub const SHARED: &str = "shared";

    /// Returns the text in the file.
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
        /// Access to files.
        Landlock = "landlock",
        /// No signals to processes outside, if neither a user nor a pid namespace prevents them.
        LandlockScopes = "landlock_scopes",
        /// Permitted system calls.
        Seccomp = "seccomp",
        /// Separate user ids inside a user namespace.
        UserNamespace = "user_namespace",
        /// Separate process ids. The whole tree ends with its first process.
        PidNamespace = "pid_namespace",
        /// Separate root folder.
        MountNamespace = "mount_namespace",
        /// Separate network namespace, without interfaces.
        NetworkNamespace = "network_namespace",
        /// Another user than the supervisor's.
        Identity = "identity",
        /// Control group with limits.
        Cgroup = "cgroup",
        /// No privileges from executed programs.
        NoNewPrivs = "no_new_privs",
        /// Separation of the programs that run at the same time in one `exec` worker.
        ProgramScopes = "program_scopes",
    }
}

section! {
    /// `cgroup`: resource limits of one worker with all its descendants.
    CgroupKeys => CgroupConfig, "bulkhead.NAME.cgroup", by rows;

    /// Maximum memory of one worker with all its descendants, including page cache.
    memory: u64 as size(CGROUP_MEMORY_MIN, NUMBER_MAX), without "no limit", such as "\"8MiB\"", reload ReplacesWorkers;
    /// Maximum number of processes and threads of one worker with all its descendants.
    pids: u64 as count(1, NUMBER_MAX), without "no limit", such as "32", reload ReplacesWorkers;
    /// Maximum number of processor cores that one worker with all its descendants can use.
    cpu: f64 as Kind::Number(CGROUP_CPU_CEILING), without "no limit", such as "1.5", reload ReplacesWorkers;
}

/// `cgroup`: resource limits of one worker with all its descendants. An absent value means no limit.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CgroupConfig {
    /// Bytes of memory, at least 1 MiB.
    pub memory: Option<u64>,
    /// Number of processes and threads, at least 1.
    pub pids: Option<u64>,
    /// Number of processor cores, above 0 and at most 1024.
    pub cpu: Option<f64>,
}
