//! The cgroup of one worker.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use rustix::io::Errno;

use super::folder::Folder;
use super::{Failure, texts};

/// The cgroup of one worker. It stays until it is [removed](Leaf::remove), whatever becomes of this.
#[derive(Debug)]
pub(crate) struct Leaf {
    folder: Folder,
}

impl Leaf {
    pub(super) fn new(folder: Folder) -> Self {
        Self { folder }
    }

    /// Where it is mounted.
    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// For [`fork_into`](super::fork_into).
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.folder.as_fd()
    }

    /// Moves a process there that has one thread.
    pub(crate) fn take_in(&self, pid: u32) -> Result<(), Failure> {
        self.folder.write("cgroup.procs", &pid.to_string())
    }

    /// Kills all that is in there, in one go: nothing forks its way out, and what is frozen dies as well.
    pub(crate) fn kill(&self) -> Result<(), Failure> {
        self.folder.write("cgroup.kill", "1")
    }

    /// How many processes in there the kernel has killed for want of memory: of the leaf's, or of the
    /// whole machine's. Always 0 where memory is not accounted for.
    pub(crate) fn oom_kills(&self) -> Result<u64, Failure> {
        match self.folder.read("memory.events", texts::oom_kills) {
            Err(Failure { errno: Errno::NOENT, .. }) => Ok(0),
            result => result,
        }
    }

    /// Removes it, and what was made in there; `false`: not all is empty yet, so try again. Once
    /// it is gone, to remove it does nothing.
    pub(crate) fn remove(&self) -> Result<bool, Failure> {
        self.folder.remove()
    }
}
