//! A temporary folder for each program, and its end: nothing that one program wrote is there for the next.
//!
//! What a program leaves is removed when nothing of the program lives any more, without following a link and
//! without recursion, however deep it is. What takes long is taken out of all programs' reach at once, since no
//! program is given another one's folder, and removed on a thread of its own.

use std::collections::hash_map::RandomState;
use std::ffi::{CStr, CString};
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};

use bulkhead_linux::folder::{self, FOLDER};
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;

use super::rules::{Rules, Temporary};

/// Entries that are removed before a program's outcome is told.
const AT_ONCE_MAX: usize = 256;

/// Folders that may wait for their removal.
const DOOMED_MAX: usize = 1024;

/// The folders of all programs.
pub(super) struct Folders {
    rules: Arc<Rules>,
    doomed: SyncSender<CString>,
}

/// The folder of one program.
pub(super) struct Folder {
    name: CString,
    place: OwnedFd,
    pub(super) path: PathBuf,
}

impl Folder {
    pub(super) fn place(&self) -> BorrowedFd<'_> {
        self.place.as_fd()
    }
}

impl Folders {
    pub(super) fn new(rules: Arc<Rules>) -> io::Result<Self> {
        let (doomed, names) = sync_channel::<CString>(DOOMED_MAX);
        let in_thread = rules.clone();
        std::thread::Builder::new().name("remover".into()).spawn(move || {
            for name in names {
                if let Some(temporary) = in_thread.temporary() {
                    remove(temporary, &name, usize::MAX);
                }
            }
        })?;
        Ok(Self { rules, doomed })
    }

    /// Makes one, with a name that cannot be guessed. `None`: the worker has no temporary folder.
    pub(super) fn make(&self) -> io::Result<Option<Folder>> {
        let Some(temporary) = self.rules.temporary() else { return Ok(None) };
        open_up(temporary);
        let name = format!("{:016x}", RandomState::new().build_hasher().finish());
        rustix::fs::mkdirat(&temporary.folder, &name, Mode::RWXU)?;
        let place = rustix::fs::openat(&temporary.folder, &name, FOLDER | OFlags::PATH, Mode::empty())?;
        let path = temporary.path.join(&name);
        Ok(Some(Folder { name: CString::new(name)?, place, path }))
    }

    /// Removes the folder of a program of which nothing is left.
    pub(super) fn remove(&self, folder: Folder) {
        let Some(temporary) = self.rules.temporary() else { return };
        drop(folder.place);
        if remove(temporary, &folder.name, AT_ONCE_MAX) {
            return;
        }
        if let Err(TrySendError::Full(name) | TrySendError::Disconnected(name)) =
            self.doomed.try_send(folder.name)
        {
            remove(temporary, &name, usize::MAX);
        }
    }
}

/// Programs have the host's user, and may have shut the folder that theirs lie in.
fn open_up(temporary: &Temporary) {
    let is_open = rustix::fs::fstat(&temporary.folder)
        .is_ok_and(|found| Mode::from_raw_mode(found.st_mode).contains(Mode::RWXU));
    if !is_open {
        let _ = folder::give_to_owner(&temporary.folder);
    }
}

/// Removes a folder, unless it has many entries; whether nothing is left to do.
fn remove(temporary: &Temporary, name: &CStr, entries_max: usize) -> bool {
    let parent = temporary.folder.as_fd();
    open_up(temporary);
    if rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR) != Err(Errno::NOTEMPTY) {
        return true;
    }
    let Ok(folder) = folder::open(parent, name, Mode::RWXU) else { return true };
    // What cannot be removed goes with the worker's own folder.
    if folder::empty(&folder, entries_max) == Ok(false) {
        return false;
    }
    let _ = rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR);
    true
}
