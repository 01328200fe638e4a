//! The tables of a bulkhead about what its workers can reach and use.

use std::path::PathBuf;

use bulkhead_shared::{Vocabulary as _, vocabulary};
use serde::Serialize;

use super::kinds::*;
use crate::defaults::*;
use crate::key::Kind;
use crate::reader::Arguments;
use crate::table::{section, table};

table! {
    /// `sandbox`: how far the workers are confined.
    SandboxKeys, "bulkhead.NAME.sandbox";

    /// How far the workers are confined.
    profile: Profile as one_of::<Profile>(), default Profile::Default, reload ReplacesWorkers;
    /// Whether the workers may use the network.
    network: bool as Kind::Boolean, default false, reload ReplacesWorkers;
    /// Further files and folders that the workers may read. The program, its libraries and its loader come by
    /// themselves.
    read: Arguments as Kind::Paths(SANDBOX_PATHS_MAX), without "`[]`", such as "[\"/usr/share/fonts\"]", reload ReplacesWorkers;
    /// Files and folders that the workers may write, besides their own `/tmp`.
    write: Arguments as Kind::Paths(SANDBOX_PATHS_MAX), without "`[]`", such as "[\"/usr/share/fonts\"]", reload ReplacesWorkers;
    /// A private `/tmp` of this size; 0 for none. With `default` it is a folder on disk that `TMPDIR` names and that
    /// is looked at every second: a worker that has more in it is ended as `crashed`/`violation`; for
    /// workers with ids of `/etc/subuid` it is in memory.
    tmp: u64 as size(0, NUMBER_MAX), default 64 * 1024 * 1024, reload ReplacesWorkers;
    /// Whom the workers run as: `"auto"` for an unprivileged id of each worker's own (with `write` one of the
    /// bulkhead's), where the supervisor may start workers as other users, or `/etc/subuid` gives it
    /// ids; `"shared"` for the supervisor's own user;
    /// or the name of a user. Under root only `"root"` and `"shared"` make a worker root.
    user: String as Kind::Text, without "`\"auto\"`; without a profile `\"shared\"`", such as "\"auto\"", reload ReplacesWorkers;
    /// Layers of the profile that may be missing on this machine; without any other the workers do not start.
    best_effort: Arguments as Kind::Words(Layer::WORDS), without "`[]`", such as "[\"landlock\"]", reload ReplacesWorkers;

    tables { syscalls: SyscallsKeys, }
}

table! {
    /// `sandbox.syscalls`: which system calls the workers have besides those of the profile, or have not.
    SyscallsKeys, "bulkhead.NAME.sandbox.syscalls";

    /// System calls that the workers may make on top of the profile.
    allow: Arguments as Kind::Names(SYSCALLS_MAX), without "`[]`", such as "[\"mlock\"]", reload ReplacesWorkers;
    /// System calls that the workers may not make, though the profile has them.
    deny: Arguments as Kind::Names(SYSCALLS_MAX), without "`[]`", such as "[\"mlock\"]", reload ReplacesWorkers;
}

/// `sandbox`: how far the workers are confined. With [`Profile::None`] all else is empty and says nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SandboxConfig {
    /// Which layers there are.
    pub profile: Profile,
    /// Whether the workers may use the network.
    pub network: bool,
    /// Further paths to read, absolute; they existed when the file was read.
    pub read: Vec<PathBuf>,
    /// Paths to write, absolute; they existed when the file was read.
    pub write: Vec<PathBuf>,
    /// Bytes of a private `/tmp`; 0 for none.
    pub tmp_bytes: u64,
    /// The user of the workers; `None`: nothing is said of it, see [`SandboxConfig::wants_own_ids`].
    pub user: Option<SandboxUser>,
    /// System calls on top of the profile, none of them in `deny`.
    pub allow: Vec<String>,
    /// System calls less than the profile.
    pub deny: Vec<String>,
    /// Layers that may be missing; all others are required.
    pub best_effort: Vec<Layer>,
}

impl SandboxConfig {
    /// Whether the workers are to have ids of their own; without a profile they have the supervisor's user.
    pub fn wants_own_ids(&self) -> bool {
        self.profile != Profile::None && matches!(self.user, None | Some(SandboxUser::Auto))
    }
}

vocabulary! {
    /// How far workers are confined, the loosest first.
    #[derive(Serialize)]
    #[serde(rename_all = "lowercase")]
    Profile {
        /// A session, descriptors and limits of their own.
        None = "none",
        /// What ordinary programs bear, and what needs neither root nor user namespaces.
        Default = "default",
        /// Every layer, and only the system calls that computing needs.
        Strict = "strict",
    }
}

/// The user that workers run as.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SandboxUser {
    /// Each worker as an id of its own; those that may write files that stay, all as one of the bulkhead's.
    Auto,
    /// The supervisor's own user.
    Shared,
    /// A user of the system; there was one when the file was read.
    Named(String),
}

impl SandboxUser {
    /// The word for [`SandboxUser::Auto`].
    pub const AUTO: &str = "auto";

    /// The word for [`SandboxUser::Shared`].
    pub const SHARED: &str = "shared";

    /// The text in the file.
    pub fn name(&self) -> &str {
        match self {
            Self::Auto => Self::AUTO,
            Self::Shared => Self::SHARED,
            Self::Named(name) => name,
        }
    }
}

vocabulary! {
    /// One layer of confinement.
    #[derive(Serialize)]
    #[serde(rename_all = "snake_case")]
    Layer {
        /// What the workers can do with files.
        Landlock = "landlock",
        /// No signals to processes outside, where neither a user nor process ids of their own keep them from it.
        LandlockScopes = "landlock_scopes",
        /// Which system calls they can make.
        Seccomp = "seccomp",
        /// User ids of their own inside.
        UserNamespace = "user_namespace",
        /// Process ids of their own; the whole tree ends with its first process.
        PidNamespace = "pid_namespace",
        /// A root folder of their own.
        MountNamespace = "mount_namespace",
        /// Network interfaces of their own: none.
        NetworkNamespace = "network_namespace",
        /// Another user than the supervisor's.
        Identity = "identity",
        /// A control group with limits.
        Cgroup = "cgroup",
        /// No privileges from the programs that they run.
        NoNewPrivs = "no_new_privs",
        /// What keeps the programs apart that run at once in one worker of `exec`.
        ProgramScopes = "program_scopes",
    }
}

section! {
    /// `cgroup`: what one worker and all that it starts may use together.
    CgroupKeys => CgroupConfig, "bulkhead.NAME.cgroup", by rows;

    /// Memory of one worker and all that it starts, page cache included.
    memory: u64 as size(CGROUP_MEMORY_MIN, NUMBER_MAX), without "no limit", such as "\"8MiB\"", reload ReplacesWorkers;
    /// Processes and threads of one worker and all that it starts.
    pids: u64 as count(1, NUMBER_MAX), without "no limit", such as "32", reload ReplacesWorkers;
    /// Processor cores that one worker and all that it starts may use.
    cpu: f64 as Kind::Number(CGROUP_CPU_CEILING), without "no limit", such as "1.5", reload ReplacesWorkers;
}

/// `cgroup`: what one worker and all that it starts may use together. Each is unlimited when absent.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CgroupConfig {
    /// Bytes of memory, at least 1 MiB.
    pub memory: Option<u64>,
    /// Processes and threads, at least 1.
    pub pids: Option<u64>,
    /// Processor cores, above 0, at most 1024.
    pub cpu: Option<f64>,
}
