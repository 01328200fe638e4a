//! Creates and removes a temporary folder for each `exec` program, inside the worker's own temporary folder, which the
//! keeper provides. `exec` removes a folder after all processes of its program have exited.
//!
//! Removal does not follow symbolic links and does not recurse, so a folder of any depth can be removed. Large folders
//! are removed on a separate thread, unless its queue is full. Until then, the Landlock rules of `rules` deny other
//! programs access to the folder.

use std::collections::hash_map::RandomState;
use std::ffi::CString;
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};

use crate::rules::Rules;

/// Maximum number of entries to remove before the reply is sent. Larger folders are removed in the background.
const ENTRIES_AT_ONCE_MAX: usize = 256;

/// Maximum length of the queue of folders to remove.
const QUEUED_REMOVALS_MAX: usize = 1024;

/// The temporary folders of all programs that the host runs.
pub(super) struct Folders {
    rules: Arc<Rules>,
    removals: SyncSender<CString>,
}

/// A program's temporary folder.
pub(super) struct Folder {
    name: CString,
    place: OwnedFd,
    pub(super) path: PathBuf,
}

impl Folder {
    pub(super) fn place(&self) -> BorrowedFd<'_> {
        self.place.as_fd()
    }

    /// Restores the owner's permissions on the folder, because the program may have removed them.
    pub(super) fn restore_owner_rights(&self) {
        // Ignores errors, because the caller's next operation on the folder fails as well and reports the cause.
        let _ = bulkhead_linux::folder::restrict_to_owner(&self.place);
    }
}

impl Folders {
    pub(super) fn new(rules: Arc<Rules>) -> io::Result<Self> {
        let (removals, names) = sync_channel::<CString>(QUEUED_REMOVALS_MAX);
        let in_thread = rules.clone();
        std::thread::Builder::new().name("remover".into()).spawn(move || {
            for name in names {
                if let Some(temporary) = in_thread.temporary() {
                    temporary.remove(&name, usize::MAX);
                }
            }
        })?;
        Ok(Self { rules, removals })
    }

    /// Creates a folder with an unpredictable name. Returns `None` if the worker has no temporary folder.
    pub(super) fn make(&self) -> io::Result<Option<Folder>> {
        let Some(temporary) = self.rules.temporary() else { return Ok(None) };
        let name = format!("{:016x}", RandomState::new().build_hasher().finish());
        let place = temporary.make(&name)?;
        let path = temporary.path.join(&name);
        Ok(Some(Folder { name: CString::new(name)?, place, path }))
    }

    /// Removes a program's folder. Must be called only after all processes of the program are gone.
    pub(super) fn remove(&self, folder: Folder) {
        let Some(temporary) = self.rules.temporary() else { return };
        drop(folder.place);
        if temporary.remove(&folder.name, ENTRIES_AT_ONCE_MAX) {
            return;
        }
        if let Err(TrySendError::Full(name) | TrySendError::Disconnected(name)) =
            self.removals.try_send(folder.name)
        {
            temporary.remove(&name, usize::MAX);
        }
    }
}
