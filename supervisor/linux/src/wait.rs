//! Waits for children and descriptors. Of those for children no safe wrapper has the usage, or which thread's children
//! are meant.
#![expect(unsafe_code, reason = "wait4 gives the usage, and no safe wrapper passes __WNOTHREAD")]

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, retry_on_intr};

use crate::errno;

/// Looks at what `waitid` says of these children, and leaves it there to be waited for: the number of one that has
/// ended, 0 if none has. Errors: there is no such child.
fn look(kind: libc::idtype_t, pid: u32, flags: i32) -> Result<u32, Errno> {
    let flags = flags | libc::WEXITED | libc::WNOHANG | libc::WNOWAIT | libc::__WALL;
    // SAFETY: all zeros is a valid `siginfo_t`, which the call fills at most; if it succeeds, the number
    // is that of a child, or still zero.
    unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        errno::check(libc::waitid(kind, pid, &mut info, flags))?;
        Ok(info.si_pid() as u32)
    }
}

/// A child of this process of which there is news, which stays as it is: dead or not, the number is
/// still its own.
pub fn peek() -> Option<u32> {
    look(libc::P_ALL, 0, 0).ok().filter(|&pid| pid != 0)
}

/// Whether this child has ended and was not waited for.
pub fn has_ended(pid: u32) -> bool {
    look(libc::P_PID, pid, 0).is_ok_and(|pid| pid != 0)
}

/// Whether there is such a child, dead or alive, that was not waited for.
pub fn is_child(pid: u32) -> bool {
    look(libc::P_PID, pid, 0).is_ok()
}

/// Whether the calling thread itself has children, dead or alive.
pub fn thread_has_children() -> bool {
    look(libc::P_ALL, 0, libc::__WNOTHREAD).is_ok()
}

/// `wait4`, with children of every kind: whose news (0: there is none yet), the status, the usage.
pub fn wait4(pid: i32, flags: i32) -> Result<(u32, i32, libc::rusage), Errno> {
    let mut status = 0;
    // SAFETY: all zeros is a valid `rusage`.
    let mut rusage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are to variables of this function, of the types that the call fills.
    let pid = unsafe { libc::wait4(pid, &mut status, flags | libc::__WALL, &mut rusage) };
    errno::check(pid)?;
    Ok((pid as u32, status, rusage))
}

/// Waits for a child to end. Returns its exit code, or `None` if a signal ended it.
pub fn exit_code(pid: i32) -> Result<Option<i32>, Errno> {
    let (_, status, _) = retry_on_intr(|| wait4(pid, 0))?;
    Ok(libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status)))
}

/// Waits for up to `patience` until the descriptor is readable. A pidfd is readable once its process has ended.
pub fn is_readable(descriptor: impl AsFd, patience: Duration) -> io::Result<bool> {
    let limit = Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: patience.subsec_nanos().into() };
    let mut events = [PollFd::new(&descriptor, PollFlags::IN)];
    Ok(retry_on_intr(|| poll(&mut events, Some(&limit)))? > 0)
}
