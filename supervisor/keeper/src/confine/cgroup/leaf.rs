//! Accesses the control group of one worker: adds a process, kills all processes, counts out-of-memory kills, and
//! removes the group. `DelegatedGroup` creates the group and sets the limits. The keeper's `process` module decides
//! when the group is killed or removed.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use rustix::io::Errno;

use super::folder::Folder;
use super::{Failure, parse};

/// The control group of one worker. Dropping this value does not [remove](Leaf::remove) the group.
#[derive(Debug)]
pub(crate) struct Leaf {
    folder: Folder,
}

impl Leaf {
    pub(super) fn new(folder: Folder) -> Self {
        Self { folder }
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Returns the group's descriptor, for use with [`fork_into`](super::fork_into).
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.folder.as_fd()
    }

    /// Moves a single-threaded process into the group.
    pub(crate) fn add_process(&self, pid: u32) -> Result<(), Failure> {
        self.folder.write("cgroup.procs", &pid.to_string())
    }

    /// Kills all processes in the group at once. No process can escape by forking, and frozen processes are killed as
    /// well.
    pub(crate) fn kill(&self) -> Result<(), Failure> {
        self.folder.write("cgroup.kill", "1")
    }

    /// Returns the number of processes in the group that the kernel has killed because the group or the
    /// machine was out of memory. Always 0 if the kernel does not account for the group's memory.
    pub(crate) fn oom_kills(&self) -> Result<u64, Failure> {
        match self.folder.read("memory.events", parse::oom_kills) {
            Err(Failure { errno: Errno::NOENT, .. }) => Ok(0),
            result => result,
        }
    }

    /// Removes the group and all groups inside it. Returns `false` if processes are still in the group; in that case,
    /// try again later. Returns `true` if the group does not exist.
    pub(crate) fn remove(&self) -> Result<bool, Failure> {
        self.folder.remove()
    }
}
