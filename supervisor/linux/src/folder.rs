//! Empties folders with untrusted contents. Follows no links, does not recurse, and handles any depth and any mode.
//! Leaves mounted file systems alone.

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, RenameFlags, ResolveFlags};
use rustix::io::{Errno, Result};
use rustix::path::Arg;
use rustix::rand::{GetRandomFlags, getrandom};

/// Flags for opening a folder. Opening fails if the last component of the path is a symbolic link.
pub const FOLDER_FLAGS: OFlags = OFlags::DIRECTORY.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Maximum number of entry names held in memory while a folder is being emptied.
const NAMES_MAX: usize = 16 * 1024;

/// Opens a folder for listing. If the folder's mode lacks `rights`, first changes the mode to 0700.
pub fn open(parent: BorrowedFd<'_>, path: impl Arg + Copy, rights: Mode) -> Result<OwnedFd> {
    open_by(parent, path, rights, ResolveFlags::empty())
}

fn open_by(
    parent: BorrowedFd<'_>,
    path: impl Arg + Copy,
    rights: Mode,
    resolve: ResolveFlags,
) -> Result<OwnedFd> {
    let flags = FOLDER_FLAGS | OFlags::RDONLY;
    // A worker's seccomp filter denies `openat2`. The fallback is safe, because nothing can be mounted in a worker's
    // folder.
    let open = || match rustix::fs::openat2(parent, path, flags, Mode::empty(), resolve) {
        Err(Errno::NOSYS) => rustix::fs::openat(parent, path, flags, Mode::empty()),
        opened => opened,
    };
    let folder = open().or_else(|errno| match errno {
        Errno::XDEV => Err(errno),
        _ => make_accessible(parent, path).and_then(|()| open()),
    })?;
    if !Mode::from_raw_mode(rustix::fs::fstat(&folder)?.st_mode).contains(rights) {
        let _ = rustix::fs::fchmod(&folder, Mode::RWXU);
    }
    Ok(folder)
}

fn make_accessible(parent: BorrowedFd<'_>, path: impl Arg) -> Result<()> {
    // Changes the mode through a descriptor, because another file may have replaced the folder under this name in the
    // meantime.
    restrict_to_owner(&rustix::fs::openat(parent, path, FOLDER_FLAGS | OFlags::PATH, Mode::empty())?)
}

/// Sets the mode of a folder to 0700. Also works for a descriptor opened with `O_PATH`.
pub fn restrict_to_owner(folder: &OwnedFd) -> Result<()> {
    let link = format!("/proc/self/fd/{}", folder.as_raw_fd());
    rustix::fs::chmodat(CWD, link, Mode::RWXU, AtFlags::empty())
}

/// Empties a folder. Several processes and threads can empty the same folder at the same time. Processes at most
/// `entries_max` entries, and returns false if any entries are left.
///
/// Entries of a subfolder are first moved up to the top, so that there are never more than two levels. A tree with a
/// million levels therefore needs no recursion, and no more descriptors than a flat folder.
///
/// Fails with `XDEV` if a file system is mounted on a subfolder, and with `BUSY` if something is mounted on a
/// file. The mount is not changed.
pub fn empty(top: &OwnedFd, entries_max: usize) -> Result<bool> {
    let mut seen = 0;
    loop {
        let mut is_empty = true;
        for (name, kind) in list_names(top)? {
            is_empty = false;
            seen += 1;
            if seen > entries_max {
                return Ok(false);
            }
            if remove_file(top.as_fd(), &name, kind)? {
                continue;
            }
            let folder = match open_by(top.as_fd(), name.as_c_str(), Mode::RWXU, ResolveFlags::NO_XDEV) {
                Err(Errno::NOENT) => continue,
                opened => opened?,
            };
            for (inner, kind) in list_names(&folder)? {
                seen += 1;
                if seen > entries_max {
                    return Ok(false);
                }
                if !remove_file(folder.as_fd(), &inner, kind)? {
                    move_to_top(&folder, &inner, top)?;
                }
            }
            match rustix::fs::unlinkat(top, name.as_c_str(), AtFlags::REMOVEDIR) {
                Err(Errno::NOTEMPTY | Errno::NOENT) => {}
                result => result?,
            }
        }
        if is_empty {
            return Ok(true);
        }
    }
}

/// Moves a nested folder to the top level of the folder that is being emptied, and gives it a random name. If the name
/// were predictable, the untrusted process could create an entry of this name to block the move.
fn move_to_top(folder: &OwnedFd, inner: &CStr, top: &OwnedFd) -> Result<()> {
    let mut random = [0; 16];
    getrandom(&mut random, GetRandomFlags::empty())?;
    let name = format!(".bulkhead-{:032x}", u128::from_ne_bytes(random));
    let rename = || rustix::fs::renameat_with(folder, inner, top, name.as_str(), RenameFlags::NOREPLACE);
    let moved = rename().or_else(|errno| match errno {
        // Moving a folder to another parent changes the folder's `..` entry, which requires write permission on the
        // folder itself.
        Errno::ACCESS => make_accessible(folder.as_fd(), inner).and_then(|()| rename()),
        errno => Err(errno),
    });
    match moved {
        Err(Errno::NOENT) => Ok(()),
        result => result,
    }
}

/// Returns the names of at most `NAMES_MAX` entries. The caller must remove these entries and call this function
/// again until no entries are left.
fn list_names(folder: &OwnedFd) -> Result<Vec<(CString, FileType)>> {
    let entries = Dir::read_from(folder)?
        .filter(|entry| !entry.as_ref().is_ok_and(|entry| [c".", c".."].contains(&entry.file_name())));
    let named = entries
        .take(NAMES_MAX)
        .map(|entry| entry.map(|entry| (entry.file_name().to_owned(), entry.file_type())));
    named.collect()
}

/// Removes an entry that is not a folder. Returns `false` if the entry is a folder.
fn remove_file(parent: BorrowedFd<'_>, name: &CStr, kind: FileType) -> Result<bool> {
    if kind == FileType::Directory {
        return Ok(false);
    }
    match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
        Err(Errno::ISDIR) => Ok(false),
        Err(Errno::NOENT) => Ok(true),
        result => result.map(|()| true),
    }
}
