//! How far workers are confined: the keys of `sandbox` and `cgroup`, as plain values.

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

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
    /// Whom the workers run as; `None`: nothing is said of it, see [`SandboxConfig::wants_own_ids`].
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

/// How far workers are confined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Profile {
    /// A session, descriptors and limits of their own.
    None,
    /// What ordinary programs bear, and what needs neither root nor user namespaces.
    Default,
    /// Every layer, and only the system calls that computing needs.
    Strict,
}

impl Profile {
    /// Every profile, the loosest first.
    pub const ALL: [Profile; 3] = [Self::None, Self::Default, Self::Strict];

    /// The word in the file.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Default => "default",
            Self::Strict => "strict",
        }
    }
}

/// Whom workers run as.
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

/// One layer of confinement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Layer {
    /// What the workers can do with files.
    Landlock,
    /// No signals to processes outside, where neither a user nor process ids of their own keep them from it.
    LandlockScopes,
    /// Which system calls they can make.
    Seccomp,
    /// User ids of their own inside.
    UserNamespace,
    /// Process ids of their own; the whole tree ends with its first process.
    PidNamespace,
    /// A root folder of their own.
    MountNamespace,
    /// Network interfaces of their own: none.
    NetworkNamespace,
    /// Another user than the supervisor's.
    Identity,
    /// A control group with limits.
    Cgroup,
    /// No privileges from the programs that they run.
    NoNewPrivs,
    /// What keeps the programs apart that run at once in one worker of `exec`.
    ProgramScopes,
}

impl Layer {
    /// Every layer.
    pub const ALL: [Layer; 11] = [
        Self::Landlock,
        Self::LandlockScopes,
        Self::Seccomp,
        Self::UserNamespace,
        Self::PidNamespace,
        Self::MountNamespace,
        Self::NetworkNamespace,
        Self::Identity,
        Self::Cgroup,
        Self::NoNewPrivs,
        Self::ProgramScopes,
    ];

    /// The word in the file.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Landlock => "landlock",
            Self::LandlockScopes => "landlock_scopes",
            Self::Seccomp => "seccomp",
            Self::UserNamespace => "user_namespace",
            Self::PidNamespace => "pid_namespace",
            Self::MountNamespace => "mount_namespace",
            Self::NetworkNamespace => "network_namespace",
            Self::Identity => "identity",
            Self::Cgroup => "cgroup",
            Self::NoNewPrivs => "no_new_privs",
            Self::ProgramScopes => "program_scopes",
        }
    }
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

/// `worker_uids`: user ids from `first` to `last`, at most 1,000,000. `Display` is as in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct UidRange {
    /// The first, at least 1.
    pub first: u32,
    /// The last, at least `first`, below 4294967295.
    pub last: u32,
}

impl fmt::Display for UidRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}
