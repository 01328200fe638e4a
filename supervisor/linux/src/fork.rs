//! A fork that nothing in this process hears of but its caller.
#![expect(unsafe_code, reason = "a fork without an exit signal has no safe form")]

use rustix::io::Errno;

use crate::errno;

/// Forks a child without an exit signal. Its end raises no SIGCHLD, a `waitpid(-1)` of another thread does not find it,
/// and where SIGCHLD is ignored it is there to be waited for all the same, with `__WALL`: of an application that a
/// supervisor is embedded in nothing of this can be known. Returns the child's number, in the child zero.
///
/// # Errors
/// Those of `clone(2)`.
///
/// # Safety
/// The child is a copy of the calling thread alone, of which not even the C library knows: until `execve` or `_exit` it
/// may make nothing but raw system calls.
pub unsafe fn fork_unheard() -> Result<libc::pid_t, Errno> {
    const NONE: libc::c_long = 0;
    // SAFETY: without a stack and without shared memory this is a fork; the rest is the caller's part.
    match unsafe { libc::syscall(libc::SYS_clone, NONE, NONE, NONE, NONE, NONE) } {
        -1 => Err(errno::last()),
        pid => Ok(pid as libc::pid_t),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_waited_for_by_its_number_alone() {
        // SAFETY: the child only exits.
        let pid = unsafe { fork_unheard() }.unwrap();
        if pid == 0 {
            // SAFETY: ends the process, without a thing being run that the parent registered.
            unsafe { libc::_exit(7) };
        }
        let mut status = 0;
        // SAFETY: the pointer is to a local. Other tests of this process may have children of the usual kind.
        let any = unsafe { libc::waitpid(pid, &mut status, 0) };
        assert_eq!((any, errno::last()), (-1, Errno::CHILD));
        // SAFETY: as above.
        assert_eq!(unsafe { libc::waitpid(pid, &mut status, libc::__WALL) }, pid);
        assert_eq!(libc::WEXITSTATUS(status), 7);
    }
}
