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

    /// Stops all that is in there, or lets it go on. It takes effect a little later.
    #[cfg(test)]
    pub(crate) fn freeze(&self, is_frozen: bool) -> Result<(), Failure> {
        self.folder.write("cgroup.freeze", if is_frozen { "1" } else { "0" })
    }

    /// Whether no process is in there that still runs. The dead may still have to be waited for.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> Result<bool, Failure> {
        Ok(!self.folder.read_events()?.is_populated)
    }

    /// Whether all that is in there has stopped.
    #[cfg(test)]
    pub(crate) fn is_frozen(&self) -> Result<bool, Failure> {
        Ok(self.folder.read_events()?.is_frozen)
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
