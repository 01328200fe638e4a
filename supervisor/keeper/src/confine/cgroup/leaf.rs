//! The control group of one worker.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use rustix::io::Errno;

use super::folder::Folder;
use super::{Failure, parse};

/// The control group of one worker. The group exists until it is [removed](Leaf::remove), even if this value
/// is dropped.
#[derive(Debug)]
pub(crate) struct Leaf {
    folder: Folder,
}

impl Leaf {
    pub(super) fn new(folder: Folder) -> Self {
        Self { folder }
    }

    /// Returns the mounted path.
    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Returns the descriptor, for [`fork_into`](super::fork_into).
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.folder.as_fd()
    }

    /// Moves a process with a single thread into the group.
    pub(crate) fn add_process(&self, pid: u32) -> Result<(), Failure> {
        self.folder.write("cgroup.procs", &pid.to_string())
    }

    /// Kills all processes in the group at once. No process can escape by forking, and frozen processes die
    /// too.
    pub(crate) fn kill(&self) -> Result<(), Failure> {
        self.folder.write("cgroup.kill", "1")
    }

    /// Returns the number of processes in the group that the kernel has killed for lack of memory, of the
    /// group or of the whole machine. Always 0 if memory is not accounted for.
    pub(crate) fn oom_kills(&self) -> Result<u64, Failure> {
        match self.folder.read("memory.events", parse::oom_kills) {
            Err(Failure { errno: Errno::NOENT, .. }) => Ok(0),
            result => result,
        }
    }

    /// Removes the group, and groups created inside. Returns `false` if the group is not empty yet; try again
    /// later. Does nothing if the group is already gone.
    pub(crate) fn remove(&self) -> Result<bool, Failure> {
        self.folder.remove()
    }
}
