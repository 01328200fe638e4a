//! The fork into a user namespace that there is already: that of subordinate ids.
//!
//! Only a process of one thread can enter it, and one that has entered it cannot come back. So a process in between
//! enters it, forks the child as its own sibling, which makes it the forking thread's child, tells its number and ends.

use std::os::fd::{AsRawFd, OwnedFd};

use bulkhead_linux::errno::check;
use bulkhead_linux::wait;
use rustix::io::Errno;
use rustix::pipe::PipeFlags;

use super::{Namespaces, clone_as, exit};

/// Bytes of what is told: the child's number, or an error's below zero.
const BYTES: usize = 4;

/// As [`super::clone`], with the child in this user namespace.
pub(super) fn clone(
    entered: &OwnedFd,
    namespaces: Namespaces,
    cgroup: Option<&OwnedFd>,
) -> Result<u32, Errno> {
    let (told, tell) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    let between = match super::clone(Namespaces::default(), None)? {
        0 => match enter(entered).and_then(|()| clone_as(namespaces, cgroup, libc::CLONE_PARENT)) {
            // The child. Its copy of the pipe would hide the end of the process in between.
            Ok(0) => {
                drop(tell);
                return Ok(0);
            }
            result => {
                let word = result.map_or_else(|errno| -errno.raw_os_error(), |pid| pid as i32);
                let _ = rustix::io::write(&tell, &word.to_ne_bytes()); // Silence tells as well.
                exit(0)
            }
        },
        between => between,
    };
    drop(tell);
    let mut word = [0; BYTES];
    let read = rustix::io::retry_on_intr(|| rustix::io::read(&told, &mut word));
    // It has nothing left to do but to end.
    let _ = wait::exit_code(between as i32);
    match i32::from_ne_bytes(word) {
        pid @ 1.. if read == Ok(BYTES) => Ok(pid as u32),
        errno @ ..=-1 if read == Ok(BYTES) => Err(Errno::from_raw_os_error(-errno)),
        _ => Err(Errno::CHILD),
    }
}

fn enter(namespace: &OwnedFd) -> Result<(), Errno> {
    // SAFETY: the process has one thread, and does not share what it leaves.
    check(unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWUSER) })
}
