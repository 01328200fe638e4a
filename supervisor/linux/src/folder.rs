//! Empties folders with untrusted contents, such as the temporary folders of workers and programs. Follows no links,
//! does not recurse, and handles any depth and any mode. Leaves mounted file systems alone, and does not remove the top
//! folder itself.

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
/// million levels therefore needs no recursion, and no more descriptors than a flat folder. If moves are denied,
/// subfolders are removed in place, which takes longer.
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
                if remove_file(folder.as_fd(), &inner, kind)? {
                    continue;
                }
                match move_to_top(&folder, &inner, top) {
                    // Landlock before version 2 (Linux 5.19) denies moves to another folder.
                    Err(Errno::XDEV) if !remove_in_place(&folder, &inner, &mut seen, entries_max)? => {
                        return Ok(false);
                    }
                    Err(Errno::XDEV) => {}
                    moved => moved?,
                }
            }
            remove_empty(top.as_fd(), &name)?;
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
    let rename = || match rustix::fs::renameat_with(folder, inner, top, name.as_str(), RenameFlags::NOREPLACE)
    {
        // The file system does not support `RENAME_NOREPLACE`. No other entry has the random name.
        Err(Errno::INVAL) => rustix::fs::renameat(folder, inner, top, name.as_str()),
        renamed => renamed,
    };
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

/// Removes a nested folder that cannot be moved. Repeatedly walks down to a folder without subfolders and empties it, so
/// that only two descriptors are needed at any depth. Returns false if any entries are left when `seen` reaches
/// `entries_max`.
fn remove_in_place(top: &OwnedFd, first: &CStr, seen: &mut usize, entries_max: usize) -> Result<bool> {
    while !remove_empty(top.as_fd(), first)? {
        *seen += 1;
        let mut next = Some((rustix::io::fcntl_dupfd_cloexec(top, 0)?, first.to_owned()));
        while let Some((parent, name)) = next.take() {
            match open_by(parent.as_fd(), name.as_c_str(), Mode::RWXU, ResolveFlags::NO_XDEV) {
                Err(Errno::NOENT) => {}
                opened => {
                    let folder = opened?;
                    next = remove_until_subfolder(&folder, seen, entries_max)?.map(|inner| (folder, inner));
                }
            }
            if *seen > entries_max {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

/// Removes files and empty subfolders until it finds a subfolder with contents, which it returns. Counts the removed
/// entries in `seen`, and stops once there are more than `entries_max`.
fn remove_until_subfolder(folder: &OwnedFd, seen: &mut usize, entries_max: usize) -> Result<Option<CString>> {
    for entry in entries(folder)? {
        let (name, kind) = entry?;
        if !remove_file(folder.as_fd(), &name, kind)? && !remove_empty(folder.as_fd(), &name)? {
            return Ok(Some(name));
        }
        *seen += 1;
        if *seen > entries_max {
            break;
        }
    }
    Ok(None)
}

/// Removes a folder if it is empty. Returns false if it is not.
fn remove_empty(parent: BorrowedFd<'_>, name: &CStr) -> Result<bool> {
    match rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR) {
        Err(Errno::NOTEMPTY) => Ok(false),
        Err(Errno::NOENT) => Ok(true),
        result => result.map(|()| true),
    }
}

/// Returns the names of at most `NAMES_MAX` entries. The caller must remove these entries and call this function
/// again until no entries are left.
fn list_names(folder: &OwnedFd) -> Result<Vec<(CString, FileType)>> {
    entries(folder)?.take(NAMES_MAX).collect()
}

fn entries(folder: &OwnedFd) -> Result<impl Iterator<Item = Result<(CString, FileType)>>> {
    let all = Dir::read_from(folder)?
        .filter(|entry| !entry.as_ref().is_ok_and(|entry| [c".", c".."].contains(&entry.file_name())));
    Ok(all.map(|entry| entry.map(|entry| (entry.file_name().to_owned(), entry.file_type()))))
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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    use super::*;
    use crate::landlock::{self, HandledAccess};

    /// Number of nested folders in the deepest branch of the test's tree.
    const DEPTH: usize = 200;

    /// Creates files and nested folders, some of which are not accessible.
    fn create_tree(top: &Path) {
        for name in ["one", "other"] {
            let folder = top.join(name);
            std::fs::create_dir_all(folder.join("a/".repeat(DEPTH))).unwrap();
            std::fs::create_dir_all(folder.join("a/b/c")).unwrap();
            std::fs::create_dir_all(folder.join("a/d")).unwrap();
            for file in ["file", "a/file", "a/b/file", "a/b/c/file"] {
                std::fs::write(folder.join(file), "x").unwrap();
            }
            std::fs::set_permissions(folder.join("a/b"), std::fs::Permissions::from_mode(0o0)).unwrap();
        }
    }

    /// Empties a tree in a thread that `restrict` has restricted. The restrictions end with the thread.
    fn check_that_restricted_thread_empties(restrict: fn() -> Result<()>) {
        let parent = tempfile::tempdir().unwrap();
        create_tree(parent.path());
        let top = open(CWD, parent.path(), Mode::RWXU).unwrap();
        let emptied = std::thread::scope(|scope| {
            scope.spawn(|| restrict().map(|()| (empty(&top, 3), empty(&top, usize::MAX)))).join().unwrap()
        });
        assert_eq!(emptied.unwrap(), (Ok(false), Ok(true)));
        assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0);
    }

    #[test]
    fn empties_tree_without_right_to_move_folders() {
        if landlock::abi_version().is_err() {
            return println!("NOT RUN: this kernel does not support Landlock");
        }
        // A ruleset that does not mention LANDLOCK_ACCESS_FS_REFER denies moves between folders, as Landlock 1 does.
        check_that_restricted_thread_empties(|| {
            const MAKE_FOLDERS: u64 = 1 << 7;
            rustix::thread::set_no_new_privs(true)?;
            let rules =
                landlock::create_ruleset(HandledAccess { files: MAKE_FOLDERS, ..Default::default() })?;
            let root = open(CWD, "/", Mode::empty())?;
            landlock::add_path_rule(rules.as_fd(), root.as_fd(), MAKE_FOLDERS)?;
            landlock::restrict_self(rules.as_fd(), 0)
        });
    }

    /// A seccomp filter makes `renameat2` fail with the same error as file systems that do not support its flags.
    #[test]
    fn empties_tree_on_file_system_without_noreplace() {
        check_that_restricted_thread_empties(|| {
            rustix::thread::set_no_new_privs(true)?;
            deny_rename_flags()
        });
    }

    #[expect(unsafe_code, reason = "no safe wrapper installs a seccomp filter")]
    fn deny_rename_flags() -> Result<()> {
        const CALL: u32 = 0;
        const FIFTH_ARGUMENT: u32 = 16 + 4 * 8;
        let load = |offset| (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, offset);
        let is_equal = |value, skipped| (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, skipped, value);
        let give = |result| (libc::BPF_RET | libc::BPF_K, 0, 0, result);
        let program = [
            load(CALL),
            is_equal(libc::SYS_renameat2 as u32, 3),
            load(FIFTH_ARGUMENT),
            is_equal(libc::RENAME_NOREPLACE, 1),
            give(libc::SECCOMP_RET_ERRNO | libc::EINVAL as u32),
            give(libc::SECCOMP_RET_ALLOW),
        ];
        let mut filter = program.map(|(code, jt, jf, k)| libc::sock_filter { code: code as u16, jt, jf, k });
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
        // SAFETY: the pointers refer to local variables, which the kernel copies.
        crate::errno::check(unsafe {
            libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program)
        })
    }
}
