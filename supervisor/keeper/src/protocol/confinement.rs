//! Defines the confinement of a worker that the supervisor requests, and the actual confinement that the keeper reads
//! back from the kernel. The keeper applies all requested layers or does not start the worker. It also calls
//! [`Observed::mismatch`], before and after the program is executed; the supervisor only displays the observed values.

use bincode::{BorrowDecode, Encode};

/// Number of descriptors that a worker starts with: standard input, output and error, and the link.
const WORKER_DESCRIPTORS: u32 = 4;

/// The requested confinement of a worker. The default is no confinement.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, BorrowDecode)]
pub struct Confinement<'a> {
    /// Requested layers of confinement, and their parameters.
    pub layers: Layers,
    /// Programs that the worker executes, and the files that these programs execute or load. The worker can read the
    /// folders that contain these files.
    pub programs: Vec<&'a str>,
    /// Additional paths that the worker can read.
    pub read: Vec<&'a str>,
    /// Paths that the worker can write to.
    pub write: Vec<&'a str>,
    /// Paths of the supervisor's own files. No worker can access these paths, even if they are inside a granted folder.
    pub withheld: Vec<&'a str>,
    /// Ports to which the worker can connect by TCP if its network access is [`NetworkAccess::Connections`].
    pub tcp_ports: Vec<u16>,
    /// System calls to allow in addition to the calls that the profile allows.
    pub allow: Vec<&'a str>,
    /// System calls to deny in addition to the calls that the profile denies.
    pub deny: Vec<&'a str>,
}

/// Layers of confinement, and their numeric parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, BorrowDecode)]
pub struct Layers {
    /// True if the worker cannot gain privileges by executing a program (`no_new_privs`).
    pub no_new_privs: bool,
    /// True if the worker has no capabilities, regardless of its user.
    pub no_capabilities: bool,
    /// True if Landlock restricts access to files, and to sockets and processes outside the sandbox.
    pub landlock: bool,
    /// Seccomp filter for the worker's system calls.
    pub seccomp: Seccomp,
    /// True if the keeper reports forbidden system calls by name. Otherwise, the kernel kills the process that made the
    /// call, and the call is not reported.
    pub seccomp_names: bool,
    /// Namespaces that are created for the worker.
    pub namespaces: Namespaces,
    /// User and group of the worker. `None` means the keeper's user and group.
    pub identity: Option<Identity>,
    /// True if `identity` consists of subordinate IDs. The worker then enters the keeper's user namespace for these
    /// IDs, and its other namespaces are created inside it.
    pub subordinate_ids: bool,
    /// Network access of the worker.
    pub network: NetworkAccess,
    /// Location of the worker's temporary files.
    pub temporary: TemporaryFiles,
    /// True if the worker receives a copy of its Landlock rules. The worker uses the copy to confine each program
    /// that it runs.
    pub program_rules: bool,
    /// Limits for the worker and all its descendants together. The keeper applies them with a separate control group.
    /// `None` means no control group.
    pub cgroup: Option<CgroupLimits>,
}

/// Limits of a control group. `None` means unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, BorrowDecode)]
pub struct CgroupLimits {
    /// Maximum memory, in bytes.
    pub memory_bytes: Option<u64>,
    /// Maximum number of processes and threads.
    pub pids: Option<u64>,
    /// Maximum processor time, in thousandths of a processor core.
    pub cpu_millicores: Option<u64>,
}

/// Network access of a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Encode, BorrowDecode)]
pub enum NetworkAccess {
    /// The worker can create no sockets except socket pairs.
    #[default]
    None,
    /// The worker can only make outgoing connections. The allowed ports for TCP are listed in
    /// [`Confinement::tcp_ports`], and UDP is optional.
    Connections {
        /// True if the worker can use UDP.
        udp: bool,
    },
    /// All internet sockets.
    All,
}

/// Kind of seccomp filter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Encode, BorrowDecode)]
pub enum Seccomp {
    /// No filter.
    #[default]
    Off,
    /// The filter denies a list of calls that ordinary programs do not need, and allows all others.
    DenyList,
    /// The filter allows only a list of calls that are needed for computing.
    AllowList,
}

/// Namespaces that are created for a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, BorrowDecode)]
pub struct Namespaces {
    /// User namespace, which allows an unprivileged keeper to create the other namespaces.
    pub user: bool,
    /// PID namespace. Comes with an IPC namespace (System V objects) and a UTS namespace (host name).
    pub pid: bool,
    /// Mount namespace with a private root folder.
    pub mount: bool,
    /// Network namespace that contains only a loopback interface, which is down.
    pub network: bool,
    /// Mount namespace with the system's root folder and a private `/proc`.
    pub proc: bool,
}

impl Namespaces {
    /// Returns true if at least one namespace is created.
    pub fn any(self) -> bool {
        self != Self::default()
    }
}

/// A user and a group, without supplementary groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub struct Identity {
    /// User ID.
    pub uid: u32,
    /// Group ID.
    pub gid: u32,
}

/// Location of a worker's temporary files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, BorrowDecode)]
pub enum TemporaryFiles {
    /// The worker has no private folder for temporary files, and can use any folder to which its user can write.
    #[default]
    None,
    /// A private folder on disk. The `TMPDIR` variable contains the folder's path.
    Folder,
    /// A private in-memory file system at `/tmp`, of this size in bytes. Requires a mount namespace.
    PrivateTmp(u64),
    /// An in-memory file system of this size in bytes, mounted over a private folder. The `TMPDIR` variable contains
    /// the folder's path. The worker uses the system's root folder.
    MountedTmpfs(u64),
}

/// A worker's confinement as read from the kernel while the program is running.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, BorrowDecode)]
pub struct Observed {
    /// True if `NoNewPrivs` is set in `/proc/PID/status`.
    pub no_new_privs: bool,
    /// Value of `Seccomp` in `/proc/PID/status`. This is 2 if the worker has a filter, and 0 if not.
    pub seccomp: u32,
    /// Union of the capability sets `CapEff`, `CapPrm`, `CapInh` and `CapAmb`.
    pub capabilities: u64,
    /// Capability bounding set (`CapBnd`).
    pub bounding: u64,
    /// User ID. `None` if the four IDs in `Uid` differ.
    pub uid: Option<u32>,
    /// Group ID. `None` if the four IDs in `Gid` differ.
    pub gid: Option<u32>,
    /// Number of supplementary groups (`Groups`).
    pub groups: u32,
    /// Namespaces that differ from the keeper's.
    pub namespaces: Namespaces,
    /// Version of Landlock whose rules were applied. The keeper fills in this value, because the kernel does not report
    /// it.
    pub landlock: Option<u32>,
    /// True if the worker is in the control group that was created for it.
    pub cgroup: bool,
    /// Number of descriptors that were open when the program was started.
    pub descriptors: u32,
    /// True if the values were read from a template, because the worker was forked from this template.
    pub is_inherited: bool,
}

impl Observed {
    /// Returns the name of the first value that does not match the order. If the value comes from `/proc/PID/status`,
    /// the name is spelled as in this file.
    pub fn mismatch(&self, layers: &Layers) -> Option<&'static str> {
        let wanted = layers.namespaces;
        let found = self.namespaces;
        let is = |identity: Identity| self.uid == Some(identity.uid) && self.gid == Some(identity.gid);
        let filter = if layers.seccomp == Seccomp::Off { 0 } else { SECCOMP_MODE_FILTER };
        let rows = [
            ("NoNewPrivs", !layers.no_new_privs || self.no_new_privs),
            ("capabilities", !layers.no_capabilities || self.capabilities == 0),
            ("Seccomp", self.seccomp >= filter),
            ("Uid or Gid", layers.identity.is_none_or(is)),
            ("Groups", layers.identity.is_none() || self.groups == 0),
            ("user namespace", !(wanted.user || layers.subordinate_ids) || found.user),
            ("pid namespace", !wanted.pid || found.pid),
            ("mount namespace", !(wanted.mount || wanted.proc) || found.mount),
            ("network namespace", !wanted.network || found.network),
            ("Landlock", !layers.landlock || self.landlock.is_some()),
            ("cgroup", layers.cgroup.is_none() || self.cgroup),
            ("descriptors", self.descriptors == WORKER_DESCRIPTORS),
        ];
        rows.iter().find(|(_, is_right)| !is_right).map(|(name, _)| *name)
    }
}

/// Value of `SECCOMP_MODE_FILTER`.
const SECCOMP_MODE_FILTER: u32 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn confinement_mismatch_names_the_wrong_value() {
        let identity = Identity { uid: 7, gid: 8 };
        let everything = Namespaces { user: true, pid: true, mount: true, network: true, proc: false };
        let layers = Layers {
            no_new_privs: true,
            no_capabilities: true,
            landlock: true,
            seccomp: Seccomp::AllowList,
            namespaces: everything,
            identity: Some(identity),
            ..Layers::default()
        };
        let right = Observed {
            no_new_privs: true,
            seccomp: SECCOMP_MODE_FILTER,
            uid: Some(7),
            gid: Some(8),
            namespaces: everything,
            landlock: Some(1),
            descriptors: WORKER_DESCRIPTORS,
            ..Observed::default()
        };
        assert_eq!(right.mismatch(&layers), None);
        let wrong = [
            (Observed { no_new_privs: false, ..right }, "NoNewPrivs"),
            (Observed { capabilities: 1, ..right }, "capabilities"),
            (Observed { seccomp: 0, ..right }, "Seccomp"),
            (Observed { uid: Some(0), ..right }, "Uid or Gid"),
            (Observed { gid: None, ..right }, "Uid or Gid"),
            (Observed { groups: 1, ..right }, "Groups"),
            (Observed { landlock: None, ..right }, "Landlock"),
            (Observed { descriptors: 9, ..right }, "descriptors"),
            (Observed { namespaces: Namespaces { pid: false, ..everything }, ..right }, "pid namespace"),
        ];
        let only_proc = Layers { namespaces: Namespaces { proc: true, ..Namespaces::default() }, ..layers };
        let shared = Observed { namespaces: Namespaces { mount: false, ..everything }, ..right };
        assert_eq!(shared.mismatch(&only_proc), Some("mount namespace"));
        for (observed, name) in wrong {
            assert_eq!(observed.mismatch(&layers), Some(name));
        }
    }
}
