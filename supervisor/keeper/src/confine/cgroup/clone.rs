//! Starting a process in a cgroup. To move one there takes the kernel a hundred times as long.
#![expect(unsafe_code, reason = "clone3 has no safe form")]

use std::os::fd::{AsRawFd, BorrowedFd};

use bulkhead_linux::errno;
use rustix::io::Errno;

/// Forks, with the child in this cgroup and in these new namespaces (flags of `clone`) from its first
/// moment on. Returns the child's number, in the child
/// zero.
///
/// # Safety
/// The child is a copy of the calling thread alone, of which not even the C library knows: until `execve`
/// or `_exit` it may make nothing but raw system calls.
pub(crate) unsafe fn fork_into(
    cgroup: BorrowedFd<'_>,
    namespaces: libc::c_int,
) -> Result<libc::pid_t, Errno> {
    const CLONE_INTO_CGROUP: u64 = 1 << 33;
    let arguments = libc::clone_args {
        flags: CLONE_INTO_CGROUP | namespaces as u64,
        // A sibling has that of the caller.
        exit_signal: if namespaces & libc::CLONE_PARENT == 0 { libc::SIGCHLD as u64 } else { 0 },
        cgroup: cgroup.as_raw_fd() as u64,
        // SAFETY: zero is valid for each of these numbers, and says that nothing is wanted.
        ..unsafe { std::mem::zeroed() }
    };
    // SAFETY: like a fork, with a copy of all memory and no stack of its own; the rest is the caller's part.
    match unsafe { libc::syscall(libc::SYS_clone3, &arguments, size_of::<libc::clone_args>()) } {
        -1 => Err(errno::last()),
        pid => Ok(pid as libc::pid_t),
    }
}
