//! A temporary folder for each program, and its end: nothing that one program wrote is there for the next.
//!
//! What a program leaves is removed when nothing of the program lives any more, without following a link and
//! without recursion, however deep it is. What takes long is taken out of everybody's reach at once, since no
//! program is given another one's folder, and removed on a thread of its own.

use std::collections::hash_map::RandomState;
use std::ffi::{CStr, CString};
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use super::rules::{Rules, Temporary};

/// Entries that are removed before a program's outcome is told.
const AT_ONCE_MAX: usize = 256;

/// Folders that may wait for their removal.
const DOOMED_MAX: usize = 1024;

/// Names of a folder's entries that are held at a time.
const NAMES_MAX: usize = 16 * 1024;

const FOLDER: OFlags = OFlags::DIRECTORY.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

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
        // By descriptor, which is one that opens nothing.
        let link = format!("/proc/self/fd/{}", temporary.folder.as_raw_fd());
        let _ = rustix::fs::chmodat(rustix::fs::CWD, link, Mode::RWXU, AtFlags::empty());
    }
}

/// Removes a folder, unless it has many entries; whether nothing is left to do.
fn remove(temporary: &Temporary, name: &CStr, entries_max: usize) -> bool {
    let parent = temporary.folder.as_fd();
    open_up(temporary);
    if rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR) != Err(Errno::NOTEMPTY) {
        return true;
    }
    let Ok(folder) = open_folder(parent, name) else { return true };
    // What cannot be removed goes with the worker's own folder.
    if empty(&folder, entries_max) == Ok(false) {
        return false;
    }
    let _ = rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR);
    true
}

/// Opens a folder whose mode may forbid that.
fn open_folder(parent: BorrowedFd<'_>, name: &CStr) -> rustix::io::Result<OwnedFd> {
    let open = || rustix::fs::openat(parent, name, FOLDER | OFlags::RDONLY, Mode::empty());
    let folder = open().or_else(|_| {
        // Nothing that could put a link in its place lives any more.
        rustix::fs::openat(parent, name, FOLDER | OFlags::PATH, Mode::empty())?;
        rustix::fs::chmodat(parent, name, Mode::RWXU, AtFlags::empty())?;
        open()
    })?;
    let _ = rustix::fs::fchmod(&folder, Mode::RWXU);
    Ok(folder)
}

/// Empties a folder; `false` if it has more entries than are to be removed. What is in a folder in it is
/// brought up first, so that a tree that is a million deep takes no more descriptors than a flat one.
fn empty(top: &OwnedFd, entries_max: usize) -> rustix::io::Result<bool> {
    let (mut number, mut seen) = (0_u64, 0);
    loop {
        let mut is_empty = true;
        for (name, kind) in names(top)? {
            is_empty = false;
            seen += 1;
            if seen > entries_max {
                return Ok(false);
            }
            if remove_file(top.as_fd(), &name, kind)? {
                continue;
            }
            let folder = open_folder(top.as_fd(), &name)?;
            for (inner, kind) in names(&folder)? {
                seen += 1;
                if seen > entries_max {
                    return Ok(false);
                }
                if !remove_file(folder.as_fd(), &inner, kind)? {
                    number += 1;
                    bring_up(&folder, &inner, top, number)?;
                }
            }
            match rustix::fs::unlinkat(top, name.as_c_str(), AtFlags::REMOVEDIR) {
                Err(Errno::NOTEMPTY) => {}
                result => result?,
            }
        }
        if is_empty {
            return Ok(true);
        }
    }
}

/// Moves a folder to the top, under a name with this number; if that is taken, the next round tries the next.
fn bring_up(folder: &OwnedFd, inner: &CStr, top: &OwnedFd, number: u64) -> rustix::io::Result<()> {
    let free = format!(".bulkhead-{number}");
    let bring = || rustix::fs::renameat_with(folder, inner, top, free.as_str(), RenameFlags::NOREPLACE);
    let brought = bring().or_else(|errno| match errno {
        // What may not be written to cannot get another parent.
        Errno::ACCESS => open_folder(folder.as_fd(), inner).and_then(|_| bring()),
        errno => Err(errno),
    });
    match brought {
        Err(Errno::EXIST) => Ok(()),
        result => result,
    }
}

/// The names of a folder's first entries; those behind them come when these are gone.
fn names(folder: &OwnedFd) -> rustix::io::Result<Vec<(CString, FileType)>> {
    let entries = Dir::read_from(folder)?
        .filter(|entry| !entry.as_ref().is_ok_and(|entry| [c".", c".."].contains(&entry.file_name())));
    let named = entries
        .take(NAMES_MAX)
        .map(|entry| entry.map(|entry| (entry.file_name().to_owned(), entry.file_type())));
    named.collect()
}

/// Removes what is not a folder; whether it was none.
fn remove_file(parent: BorrowedFd<'_>, name: &CStr, kind: FileType) -> rustix::io::Result<bool> {
    if kind == FileType::Directory {
        return Ok(false);
    }
    match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
        Err(Errno::ISDIR) => Ok(false),
        result => result.map(|()| true),
    }
}
