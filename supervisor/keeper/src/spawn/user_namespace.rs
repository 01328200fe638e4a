//! Forks into the existing user namespace with the subordinate IDs.
//!
//! Only a single-threaded process can enter a user namespace, and it cannot leave the namespace afterwards. So an
//! intermediate process enters the namespace and forks the child with `CLONE_PARENT`, which makes the child a child of
//! the forking thread. The intermediate process then reports the child's PID and exits.

use std::os::fd::{AsRawFd, OwnedFd};

use bulkhead_linux::errno::check;
use bulkhead_linux::wait;
use rustix::io::Errno;
use rustix::pipe::PipeFlags;

use super::clone::{self, clone_as};
use super::exit;
use crate::protocol::confinement::Namespaces;

/// Size of the report that the intermediate process sends, in bytes. The report is the child's PID or a negative error
/// number.
const REPORT_BYTES: usize = 4;

/// Forks a child in this user namespace. Otherwise works like [`clone::clone`].
pub(super) fn clone(
    user_namespace: &OwnedFd,
    namespaces: Namespaces,
    cgroup: Option<&OwnedFd>,
) -> Result<u32, Errno> {
    let (reader, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    let intermediate = match clone::clone(Namespaces::default(), None)? {
        0 => match enter(user_namespace).and_then(|()| clone_as(namespaces, cgroup, libc::CLONE_PARENT)) {
            // This is the child. It must close its copy of the pipe, so that the parent sees when the
            // intermediate process has exited.
            Ok(0) => {
                drop(writer);
                return Ok(0);
            }
            result => {
                let word = result.map_or_else(|errno| -errno.raw_os_error(), |pid| pid as i32);
                let _ = rustix::io::write(&writer, &word.to_ne_bytes()); // On error, the parent sees EOF.
                exit(0)
            }
        },
        intermediate => intermediate,
    };
    drop(writer);
    let mut word = [0; REPORT_BYTES];
    let read = rustix::io::retry_on_intr(|| rustix::io::read(&reader, &mut word));
    // The intermediate process has already sent its report and is about to exit.
    let _ = wait::wait_for_exit_code(intermediate as i32);
    match i32::from_ne_bytes(word) {
        pid @ 1.. if read == Ok(REPORT_BYTES) => Ok(pid as u32),
        errno @ ..=-1 if read == Ok(REPORT_BYTES) => Err(Errno::from_raw_os_error(-errno)),
        _ => Err(Errno::CHILD),
    }
}

fn enter(namespace: &OwnedFd) -> Result<(), Errno> {
    // SAFETY: the process has one thread, and shares no state that the call changes.
    check(unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWUSER) })
}
