//! Starting a process in a cgroup. To move one there takes the kernel a hundred times as long.
#![expect(unsafe_code, reason = "clone3 has no safe form")]

use std::os::fd::{AsRawFd, BorrowedFd};

use bulkhead_linux::errno;
use rustix::io::Errno;

/// What `clone3(2)` takes.
#[repr(C)]
#[derive(Default)]
struct CloneArguments {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

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
    let arguments = CloneArguments {
        flags: CLONE_INTO_CGROUP | namespaces as u64,
        // A sibling has that of the caller.
        exit_signal: if namespaces & libc::CLONE_PARENT == 0 { libc::SIGCHLD as u64 } else { 0 },
        cgroup: cgroup.as_raw_fd() as u64,
        ..CloneArguments::default()
    };
    // SAFETY: like a fork, with a copy of all memory and no stack of its own; the rest is the caller's part.
    match unsafe { libc::syscall(libc::SYS_clone3, &arguments, size_of::<CloneArguments>()) } {
        -1 => Err(errno::last()),
        pid => Ok(pid as libc::pid_t),
    }
}
