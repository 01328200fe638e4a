//! Forks a child that sends no SIGCHLD, so that other code in this process does not notice the child. The keeper crate
//! uses such children to try out layers of confinement and to create a user namespace. Workers are forked in the
//! keeper's `spawn` module instead.
#![expect(unsafe_code, reason = "a fork without an exit signal has no safe wrapper")]

use rustix::io::Errno;

use crate::errno;

/// Forks a child without an exit signal. Returns the child's PID in the parent, and zero in the child.
///
/// The child's exit raises no SIGCHLD, and a `waitpid(-1)` in another thread does not reap the child. The caller waits
/// for the child with `__WALL`, which works even if SIGCHLD is ignored. An embedded supervisor needs this, because it
/// cannot know how the application handles signals.
///
/// # Errors
/// Fails if `clone(2)` fails.
///
/// # Safety
/// The child contains only a copy of the calling thread, and the C library does not know about the fork. Until
/// `execve` or `_exit`, the child must make only raw system calls.
pub unsafe fn fork_without_sigchld() -> Result<libc::pid_t, Errno> {
    const NONE: libc::c_long = 0;
    // SAFETY: without a stack or shared memory, this call is a fork. The caller upholds the other
    // requirements.
    match unsafe { libc::syscall(libc::SYS_clone, NONE, NONE, NONE, NONE, NONE) } {
        -1 => Err(errno::last()),
        pid => Ok(pid as libc::pid_t),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn child_without_sigchld_is_reaped_only_with_wall() {
        // SAFETY: the child only exits.
        let pid = unsafe { fork_without_sigchld() }.unwrap();
        if pid == 0 {
            // SAFETY: exits without running the parent's exit handlers.
            unsafe { libc::_exit(7) };
        }
        let mut status = 0;
        // SAFETY: the pointer refers to a local variable. Waits only for this PID, because other tests of this process
        // can have ordinary children.
        let reaped = unsafe { libc::waitpid(pid, &mut status, 0) };
        assert_eq!((reaped, errno::last()), (-1, Errno::CHILD));
        // SAFETY: as above.
        assert_eq!(unsafe { libc::waitpid(pid, &mut status, libc::__WALL) }, pid);
        assert_eq!(libc::WEXITSTATUS(status), 7);
    }
}
