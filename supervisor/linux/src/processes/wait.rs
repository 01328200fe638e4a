//! Waits for children and descriptors. Uses raw system calls to wait for children, because no safe wrapper returns the
//! resource usage or considers only the calling thread's children. The keeper, its client and its probes call these
//! functions and interpret the results.
#![expect(unsafe_code, reason = "no safe wrapper returns the resource usage or passes __WNOTHREAD")]

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, retry_on_intr};

use crate::errno;

/// Calls `waitid` without reaping the child. Returns the PID of a child that has exited, or 0 if there is none. Also
/// returns the `si_code`, because the kernel reports children that this process traces when they stop. Fails if there
/// is no matching child at all.
fn peek_child(kind: libc::idtype_t, pid: u32, flags: i32) -> Result<(u32, i32), Errno> {
    let flags = flags | libc::WEXITED | libc::WNOHANG | libc::WNOWAIT | libc::__WALL;
    // SAFETY: an all-zero `siginfo_t` is valid, and the call may fill it. If the call succeeds, the PID is that of a
    // child, or still zero.
    unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        errno::check(libc::waitid(kind, pid, &mut info, flags))?;
        Ok((info.si_pid() as u32, info.si_code))
    }
}

/// Returns the PID of a child that has exited, but does not reap the child. The PID cannot be reused until the child
/// is reaped. The child can also be a stopped process that this process traces.
pub fn peek_ended() -> Option<u32> {
    peek_child(libc::P_ALL, 0, 0).ok().map(|(pid, _)| pid).filter(|&pid| pid != 0)
}

/// Returns true if the child with this PID has exited and has not been reaped.
pub fn has_ended(pid: u32) -> bool {
    const EXITS: [i32; 3] = [libc::CLD_EXITED, libc::CLD_KILLED, libc::CLD_DUMPED];
    peek_child(libc::P_PID, pid, 0).is_ok_and(|(pid, code)| pid != 0 && EXITS.contains(&code))
}

/// Returns true if this process has an unreaped child with this PID, alive or dead.
pub fn is_child(pid: u32) -> bool {
    peek_child(libc::P_PID, pid, 0).is_ok()
}

/// Returns true if the calling thread itself has an unreaped child with this PID, alive or dead.
pub fn is_child_of_thread(pid: u32) -> bool {
    peek_child(libc::P_PID, pid, libc::__WNOTHREAD).is_ok()
}

/// Returns true if the calling thread itself has children, alive or dead.
pub fn thread_has_children() -> bool {
    peek_child(libc::P_ALL, 0, libc::__WNOTHREAD).is_ok()
}

/// Calls `wait4` for children of all kinds, including those that send no SIGCHLD. Returns the child's PID (0 if no
/// child has changed state), the status and the resource usage.
pub fn wait4(pid: i32, flags: i32) -> Result<(u32, i32, libc::rusage), Errno> {
    let mut status = 0;
    // SAFETY: an all-zero `rusage` is valid.
    let mut rusage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers refer to local variables of the types that the call fills.
    let pid = unsafe { libc::wait4(pid, &mut status, flags | libc::__WALL, &mut rusage) };
    errno::check(pid)?;
    Ok((pid as u32, status, rusage))
}

/// Waits until a child exits, and reaps it. Returns the exit code, or `None` if a signal killed the child.
pub fn wait_for_exit_code(pid: i32) -> Result<Option<i32>, Errno> {
    let (_, status, _) = retry_on_intr(|| wait4(pid, 0))?;
    Ok(libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status)))
}

/// Waits until the descriptor is readable. Returns false after `timeout`. A pidfd becomes readable when its process
/// exits.
pub fn wait_until_readable(descriptor: impl AsFd, timeout: Duration) -> io::Result<bool> {
    let limit = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
    let mut events = [PollFd::new(&descriptor, PollFlags::IN)];
    Ok(retry_on_intr(|| poll(&mut events, Some(&limit)))? > 0)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    fn wait_until(mut is_so: impl FnMut() -> bool) {
        let until = Instant::now() + Duration::from_secs(120);
        while !is_so() {
            assert!(Instant::now() < until, "the process did not change its state");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn traced_and_stopped_child_has_not_ended() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = child.id();
        // SAFETY: neither call accesses memory of this process.
        let ptrace = |request: libc::c_uint| unsafe { libc::ptrace(request, pid as libc::pid_t, 0, 0) };
        assert_eq!([libc::PTRACE_SEIZE, libc::PTRACE_INTERRUPT].map(ptrace), [0, 0]);
        wait_until(|| peek_child(libc::P_PID, pid, 0).is_ok_and(|(found, _)| found == pid));
        assert!(!has_ended(pid));
        child.kill().unwrap();
        wait_until(|| has_ended(pid));
        child.wait().unwrap();
    }
}
