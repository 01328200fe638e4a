//! Mounts and restricts parts of a worker's file system, on behalf of the submodules and `steps`. `root` builds a
//! private root folder, `covers` shows unreachable paths, and `proc_entries` hides entries of `/proc`. The keeper
//! decides before the fork what to mount, and the forked child makes the mounts.

pub(super) mod covers;
pub(super) mod proc_entries;
pub(super) mod root;

use std::ffi::CStr;
use std::path::Path;
use std::ptr::null;

use bulkhead_linux::errno::check;
use rustix::fs::StatVfsMountFlags;
use rustix::io::Errno;

use super::SpawnError;

/// Maximum number of entries to show individually if the worker's user cannot access the folder itself.
const ENTRIES_MAX: usize = 4096;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Access {
    Read,
    Device,
    Write,
}

pub(super) fn mount(
    from: Option<&CStr>,
    at: &CStr,
    kind: Option<&CStr>,
    flags: libc::c_ulong,
    options: Option<&CStr>,
) -> Result<(), Errno> {
    let pointer = |text: Option<&CStr>| text.map_or(null(), CStr::as_ptr);
    // SAFETY: the strings are NUL-terminated. A null pointer stands for an argument that this kind of mount does not
    // use.
    check(unsafe { libc::mount(pointer(from), at.as_ptr(), pointer(kind), flags, pointer(options).cast()) })
}

/// Restricts a mount, and all mounts below it, to the rights that `access` requires.
pub(super) fn restrict(at: &CStr, access: Access) -> Result<(), Errno> {
    let restrictions = match access {
        Access::Read => libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV,
        Access::Device => libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NOEXEC,
        Access::Write => libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV,
    };
    let attributes = libc::mount_attr { attr_set: restrictions, attr_clr: 0, propagation: 0, userns_fd: 0 };
    // SAFETY: the string is NUL-terminated, and the pointer refers to a local variable of the given size.
    check(unsafe {
        let (here, below) = (libc::AT_FDCWD, libc::AT_RECURSIVE);
        let (pointer, size) = (&raw const attributes, size_of::<libc::mount_attr>());
        libc::syscall(libc::SYS_mount_setattr, here, at.as_ptr(), below, pointer, size)
    } as i32)?;
    // Checks the effect, because the seccomp filter of an outer sandbox can make the call succeed without doing
    // anything.
    let found = rustix::fs::statvfs(at)?.f_flag;
    let rows = [
        (libc::MOUNT_ATTR_RDONLY, StatVfsMountFlags::RDONLY),
        (libc::MOUNT_ATTR_NOSUID, StatVfsMountFlags::NOSUID),
        (libc::MOUNT_ATTR_NODEV, StatVfsMountFlags::NODEV),
        (libc::MOUNT_ATTR_NOEXEC, StatVfsMountFlags::NOEXEC),
    ];
    let is_enforced = |(attribute, flag)| restrictions & attribute == 0 || found.contains(flag);
    if rows.into_iter().all(is_enforced) { Ok(()) } else { Err(Errno::PERM) }
}

/// Returns the error for a folder whose entries cannot be shown individually, because there are too many.
fn too_many_entries(folder: &Path) -> SpawnError {
    let folder = folder.display();
    let step = format!(
        "{folder} has more than {ENTRIES_MAX} entries, and the worker's user cannot list the directory: run `chmod \
         go+rx {folder}`, or set `user` in `sandbox` to a user that can"
    );
    SpawnError::new(&step, Errno::ACCESS)
}
