//! Forks a child in new namespaces and in a control group with a raw system call. `child`, `forker` and
//! `user_namespace` call it. `child` sets up the namespaces and executes the program.

use std::os::fd::{AsFd, OwnedFd};

use bulkhead_linux::errno;
use rustix::io::Errno;

use crate::confine::cgroup;
use crate::protocol::confinement::Namespaces;

/// Forks a child that starts in new namespaces and in the given control group. Returns 0 in the child.
///
/// This is the raw system call, without the C library's handlers for `fork`. The child contains only this
/// thread, and must make only system calls until it executes a program or exits.
pub(super) fn clone(namespaces: Namespaces, cgroup: Option<&OwnedFd>) -> Result<u32, Errno> {
    clone_as(namespaces, cgroup, 0)
}

/// Forks a child like `clone`, but with the additional flag `flag`.
pub(super) fn clone_as(
    namespaces: Namespaces,
    cgroup: Option<&OwnedFd>,
    flag: libc::c_int,
) -> Result<u32, Errno> {
    let rows = [
        (namespaces.user, libc::CLONE_NEWUSER),
        (namespaces.pid, libc::CLONE_NEWPID | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS),
        (namespaces.mount || namespaces.proc, libc::CLONE_NEWNS),
        (namespaces.network, libc::CLONE_NEWNET),
    ];
    let wanted = rows.iter().filter(|(is_wanted, _)| *is_wanted);
    let flags = wanted.fold(flag, |flags, (_, flag)| flags | flag);
    if let Some(cgroup) = cgroup {
        // SAFETY: see `clone` for the child.
        return unsafe { cgroup::fork_into(cgroup.as_fd(), flags) }.map(|pid| pid as u32);
    }
    let flags = flags | libc::SIGCHLD;
    const NONE: usize = 0;
    // SAFETY: without a stack or shared memory, this call is a fork; see `clone` for the child.
    match unsafe { libc::syscall(libc::SYS_clone, flags as usize, NONE, NONE, NONE, NONE) } {
        -1 => Err(errno::last()),
        pid => Ok(pid as u32),
    }
}
