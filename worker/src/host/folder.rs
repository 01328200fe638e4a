//! A temporary folder for each program, and its end: nothing that one program wrote is there for the next.
//!
//! What a program leaves is removed when nothing of the program lives any more, without following a link and
//! without recursion, however deep it is. What takes long is taken out of all programs' reach at once, since no
//! program is given another one's folder, and removed on a thread of its own.

use std::collections::hash_map::RandomState;
use std::ffi::CString;
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};

use crate::rules::Rules;

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

    /// Opens the folder to its owner, from whom the program may have closed it.
    pub(super) fn open_up(&self) {
        // If that fails, so does whatever is tried next.
        let _ = bulkhead_linux::folder::give_to_owner(&self.place);
    }
}

impl Folders {
    pub(super) fn new(rules: Arc<Rules>) -> io::Result<Self> {
        let (doomed, names) = sync_channel::<CString>(DOOMED_MAX);
        let in_thread = rules.clone();
        std::thread::Builder::new().name("remover".into()).spawn(move || {
            for name in names {
                if let Some(temporary) = in_thread.temporary() {
                    temporary.remove(&name, usize::MAX);
                }
            }
        })?;
        Ok(Self { rules, doomed })
    }

    /// Makes one, with a name that cannot be guessed. `None`: the worker has no temporary folder.
    pub(super) fn make(&self) -> io::Result<Option<Folder>> {
        let Some(temporary) = self.rules.temporary() else { return Ok(None) };
        let name = format!("{:016x}", RandomState::new().build_hasher().finish());
        let place = temporary.make(&name)?;
        let path = temporary.path.join(&name);
        Ok(Some(Folder { name: CString::new(name)?, place, path }))
    }

    /// Removes the folder of a program of which nothing is left.
    pub(super) fn remove(&self, folder: Folder) {
        let Some(temporary) = self.rules.temporary() else { return };
        drop(folder.place);
        if temporary.remove(&folder.name, AT_ONCE_MAX) {
            return;
        }
        if let Err(TrySendError::Full(name) | TrySendError::Disconnected(name)) =
            self.doomed.try_send(folder.name)
        {
            temporary.remove(&name, usize::MAX);
        }
    }
}
