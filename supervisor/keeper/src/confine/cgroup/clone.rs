//! Forks a process directly into a control group. Moving a process afterwards would take the kernel a hundred times as
//! long. `spawn/clone.rs` calls this for workers that have a control group. The caller creates the group and decides
//! what the child executes.
#![expect(unsafe_code, reason = "clone3 has no safe wrapper")]

use std::os::fd::{AsRawFd, BorrowedFd};

use bulkhead_linux::errno;
use rustix::io::Errno;

/// Forks a child that starts in the control group `cgroup` and in the new namespaces that `namespaces` selects (flags
/// of `clone`). Returns the child's PID in the parent, and zero in the child.
///
/// # Safety
///
/// The child contains only a copy of the calling thread, and the C library does not know about the fork. Until
/// `execve` or `_exit`, the child must make only raw system calls.
pub(crate) unsafe fn fork_into(
    cgroup: BorrowedFd<'_>,
    namespaces: libc::c_int,
) -> Result<libc::pid_t, Errno> {
    const CLONE_INTO_CGROUP: u64 = 1 << 33;
    let arguments = libc::clone_args {
        flags: CLONE_INTO_CGROUP | namespaces as u64,
        // With `CLONE_PARENT`, the child inherits the caller's exit signal.
        exit_signal: if namespaces & libc::CLONE_PARENT == 0 { libc::SIGCHLD as u64 } else { 0 },
        cgroup: cgroup.as_raw_fd() as u64,
        // SAFETY: zero is valid for each of the remaining fields, and disables the corresponding feature.
        ..unsafe { std::mem::zeroed() }
    };
    // SAFETY: works like `fork`. The child gets a copy of all memory, and no separate stack. The caller
    // upholds the other requirements.
    match unsafe { libc::syscall(libc::SYS_clone3, &arguments, size_of::<libc::clone_args>()) } {
        -1 => Err(errno::last()),
        pid => Ok(pid as libc::pid_t),
    }
}
