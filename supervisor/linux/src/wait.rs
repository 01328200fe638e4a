//! The kernel's raw waits for children: what no safe wrapper has is the usage, and which thread's children are meant.
#![expect(unsafe_code, reason = "wait4 gives the usage, and no safe wrapper passes __WNOTHREAD")]

use rustix::io::Errno;

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
