//! How far a worker is to be confined, as it is ordered, and how far it is, as the kernel says.
//!
//! The supervisor decides what is wanted, and what may be missing; the keeper does what is ordered, all
//! of it, or starts nothing.

use bincode::{BorrowDecode, Encode};

/// What a worker is barred from. The default is nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, BorrowDecode)]
pub struct Confinement<'a> {
    /// Which layers there are.
    pub terms: Terms,
    /// What it executes, and what that executes or loads in turn; their folders are read.
    pub programs: Vec<&'a str>,
    /// Further paths to read.
    pub read: Vec<&'a str>,
    /// Paths to write.
    pub write: Vec<&'a str>,
    /// What is given to no worker, though it may lie in a folder that is: the supervisor's own files.
    pub withheld: Vec<&'a str>,
    /// System calls more than the profile has.
    pub allow: Vec<&'a str>,
    /// System calls less.
    pub deny: Vec<&'a str>,
}

/// The layers, and what there is to say of them in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, BorrowDecode)]
pub struct Terms {
    /// No privileges from programs that it executes.
    pub no_new_privs: bool,
    /// No capability, whatever its user.
    pub no_capabilities: bool,
    /// Which files, and which sockets and processes outside, it reaches.
    pub landlock: bool,
    /// Which system calls it can make.
    pub seccomp: Seccomp,
    /// Whether a forbidden call is told by name; if not, the kernel ends the process that makes it.
    pub seccomp_names: bool,
    /// Which namespaces are its own.
    pub namespaces: Namespaces,
    /// The user it runs as; `None`: the keeper's.
    pub identity: Option<Identity>,
    /// Whether that one is of the keeper's user namespace of subordinate ids, which it enters. Other namespaces are
    /// made in there, and no further one of users.
    pub subordinate: bool,
    /// Whether it may use the network.
    pub network: bool,
    /// Where it can write temporary files.
    pub temporary: Temporary,
    /// Whether it is told its own rules, so that it can put each program that it runs under rules apart from
    /// those of the others.
    pub programs_apart: bool,
    /// What it may use together with all that it starts, in a control group of its own; `None`: no group.
    pub cgroup: Option<Cgroup>,
}

/// The limits of a control group; unlimited where nothing is said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, BorrowDecode)]
pub struct Cgroup {
    /// Bytes of memory.
    pub memory_bytes: Option<u64>,
    /// Processes and threads.
    pub pids: Option<u64>,
    /// Thousandths of a processor core.
    pub cpu_thousandths: Option<u64>,
}

/// A filter of system calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Encode, BorrowDecode)]
pub enum Seccomp {
    /// None.
    #[default]
    Off,
    /// A deny list that ordinary programs do not notice.
    Deny,
    /// What computing needs.
    Allow,
}

/// Namespaces that are a worker's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, BorrowDecode)]
pub struct Namespaces {
    /// Users: what makes the others possible without root.
    pub user: bool,
    /// Processes, and with them System V objects and host names.
    pub pid: bool,
    /// Mounts: a root folder of its own.
    pub mount: bool,
    /// The network: no interface but a loopback that is down.
    pub network: bool,
    /// Mounts as well, but of them only a `/proc` of its own, on the system's root folder.
    pub proc: bool,
}

impl Namespaces {
    /// Whether there is any.
    pub fn any(self) -> bool {
        self != Self::default()
    }
}

/// A user and a group; there are no others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub struct Identity {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

/// Where a worker can write temporary files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, BorrowDecode)]
pub enum Temporary {
    /// Nowhere, or wherever its user can.
    #[default]
    None,
    /// A folder of its own on disk, which `TMPDIR` names.
    Folder,
    /// A `/tmp` of its own in memory, of so many bytes. It takes a mount namespace.
    FileSystem(u64),
    /// The same in the place of a folder, which `TMPDIR` names, on the system's root folder.
    Mounted(u64),
}

/// What the kernel says of a worker, read back when its program ran.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, BorrowDecode)]
pub struct Observed {
    /// `NoNewPrivs`.
    pub no_new_privs: bool,
    /// `Seccomp`: 0 for none, 2 for a filter.
    pub seccomp: u32,
    /// `CapEff`, `CapPrm`, `CapInh` and `CapAmb` together.
    pub capabilities: u64,
    /// `CapBnd`.
    pub bounding: u64,
    /// The four of `Uid`, if they are one.
    pub uid: Option<u32>,
    /// The four of `Gid`, if they are one.
    pub gid: Option<u32>,
    /// How many there are in `Groups`.
    pub groups: u32,
    /// Which namespaces are not the keeper's.
    pub namespaces: Namespaces,
    /// The version of the Landlock rules that it was put under; the kernel does not tell it.
    pub landlock: Option<u32>,
    /// Whether it is in the control group that was made for it.
    pub cgroup: bool,
    /// Descriptors that it started its program with.
    pub descriptors: u32,
    /// Whether all that was read of the template that has forked it.
    pub is_inherited: bool,
}

impl Observed {
    /// What is not as ordered: a name, as in `/proc/PID/status` where it is there.
    pub fn mismatch(&self, terms: &Terms) -> Option<&'static str> {
        let wanted = terms.namespaces;
        let found = self.namespaces;
        let is = |identity: Identity| self.uid == Some(identity.uid) && self.gid == Some(identity.gid);
        let filter = if terms.seccomp == Seccomp::Off { 0 } else { FILTER };
        let rows = [
            ("NoNewPrivs", !terms.no_new_privs || self.no_new_privs),
            ("capabilities", !terms.no_capabilities || self.capabilities == 0),
            ("Seccomp", self.seccomp >= filter),
            ("Uid or Gid", terms.identity.is_none_or(is)),
            ("Groups", terms.identity.is_none() || self.groups == 0),
            ("user namespace", !(wanted.user || terms.subordinate) || found.user),
            ("pid namespace", !wanted.pid || found.pid),
            ("mount namespace", !(wanted.mount || wanted.proc) || found.mount),
            ("network namespace", !wanted.network || found.network),
            ("Landlock", !terms.landlock || self.landlock.is_some()),
            ("cgroup", terms.cgroup.is_none() || self.cgroup),
            ("descriptors", self.descriptors == super::WORKER_DESCRIPTORS),
        ];
        rows.iter().find(|(_, is_right)| !is_right).map(|(name, _)| *name)
    }
}

/// The number of `SECCOMP_MODE_FILTER`.
const FILTER: u32 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_is_missing_is_named() {
        let identity = Identity { uid: 7, gid: 8 };
        let everything = Namespaces { user: true, pid: true, mount: true, network: true, proc: false };
        let terms = Terms {
            no_new_privs: true,
            no_capabilities: true,
            landlock: true,
            seccomp: Seccomp::Allow,
            namespaces: everything,
            identity: Some(identity),
            ..Terms::default()
        };
        let right = Observed {
            no_new_privs: true,
            seccomp: FILTER,
            uid: Some(7),
            gid: Some(8),
            namespaces: everything,
            landlock: Some(1),
            descriptors: super::super::WORKER_DESCRIPTORS,
            ..Observed::default()
        };
        assert_eq!(right.mismatch(&terms), None);
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
        let only_proc = Terms { namespaces: Namespaces { proc: true, ..Namespaces::default() }, ..terms };
        let shared = Observed { namespaces: Namespaces { mount: false, ..everything }, ..right };
        assert_eq!(shared.mismatch(&only_proc), Some("mount namespace"));
        for (observed, name) in wrong {
            assert_eq!(observed.mismatch(&terms), Some(name));
        }
    }
}
