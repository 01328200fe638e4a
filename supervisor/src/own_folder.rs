//! The private folder given by `--own-folder`. The supervisor removes the folder before it exits, because the program
//! that created the folder might have been killed.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use bulkhead_linux::folder;
use rustix::fs::{AtFlags, CWD, Mode, OFlags};

/// Maximum number of directory entries to remove. A folder normally contains about a dozen entries: sockets, locks, and
/// files of the program that created the folder.
const ENTRIES_MAX: usize = 100_000;

/// A folder that is removed on drop, including all its contents.
#[derive(Debug)]
pub struct OwnFolder {
    path: PathBuf,
    folder: OwnedFd,
}

impl OwnFolder {
    /// Opens the folder. Rejects a folder that another user owns or can access, because such a folder was not created
    /// for this purpose.
    pub fn open(path: &Path) -> Result<Self, String> {
        let path = std::path::absolute(path).map_err(|error| error.to_string())?;
        let shown = path.display();
        let opened = rustix::fs::open(&path, folder::FOLDER_FLAGS | OFlags::RDONLY, Mode::empty());
        let folder = opened.map_err(|errno| format!("failed to open the directory {shown}: {errno}"))?;
        let found =
            rustix::fs::fstat(&folder).map_err(|errno| format!("failed to inspect {shown}: {errno}"))?;
        let is_own = found.st_uid == rustix::process::geteuid().as_raw();
        // A folder inherits the setgid bit from its parent.
        let mode = Mode::from_raw_mode(found.st_mode).difference(Mode::SGID);
        if !is_own || mode != Mode::RWXU {
            return Err(format!(
                "the directory {shown} is removed when the supervisor exits, so it must belong to this user and \
                 have mode 0700"
            ));
        }
        Ok(Self { path, folder })
    }
}

impl Drop for OwnFolder {
    fn drop(&mut self) {
        // A file system that is mounted inside the folder is not emptied, so the folder cannot be removed.
        let emptied = folder::empty(&self.folder, ENTRIES_MAX);
        let removed = emptied.and_then(|_| rustix::fs::unlinkat(CWD, &self.path, AtFlags::REMOVEDIR));
        if let Err(errno) = removed
            && errno != rustix::io::Errno::NOENT
        {
            tracing::warn!(folder = %self.path.display(), "failed to remove the supervisor's own directory: {errno}");
            // The warning is written now, because the program is about to exit, which stops the logging thread.
            bulkhead_control::observe::logging::finish();
        }
    }
}
