//! Waits for children, determines how they ended, and kills a child, a process group or all descendants of this
//! process. The keeper, its guard and the first process of a PID namespace use this file. `client` uses it in the
//! supervisor, to wait for the keeper and to kill the processes that a lost keeper has left. The table of workers is in
//! `process`.

use std::io;
use std::process::Child;
use std::time::{Duration, Instant};

use bulkhead_linux::process_tree::kill_descendants;
use bulkhead_linux::wait::{wait_until_readable, wait4};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal};

use crate::protocol::{Exit, Usage};

/// Interval between scans of all processes on the machine while this process's descendants are being killed.
const SCAN_INTERVAL: Duration = Duration::from_millis(10);

/// Pause between checks for dead processes.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Result of waiting for a child.
#[derive(Debug)]
pub(crate) enum Waited {
    /// The requested child does not exist, or there are no children at all.
    NoChild,
    /// There are children, but none of them has exited or stopped.
    NoChange,
    /// A child has exited, and its PID can be reused.
    Ended { pid: u32, exit: Exit, usage: Usage },
    /// A child has stopped because it asked its parent to trace it. Only hostile programs do this.
    Stopped { pid: u32 },
}

/// Reaps this child if it has exited. Does not block.
pub(crate) fn try_reap(pid: u32) -> Waited {
    wait(pid as i32, libc::WNOHANG)
}

pub(crate) fn wait(pid: i32, flags: i32) -> Waited {
    loop {
        match wait4(pid, flags) {
            Ok((0, ..)) => return Waited::NoChange,
            Err(Errno::INTR) => {}
            Err(_) => return Waited::NoChild,
            Ok((pid, status, rusage)) => {
                return match exit(status) {
                    Some(exit) => Waited::Ended { pid, exit, usage: usage(&rusage) },
                    None => Waited::Stopped { pid },
                };
            }
        }
    }
}

/// Converts a wait status into the cause of the exit. Returns `None` if the process has not exited.
pub(crate) fn exit(status: i32) -> Option<Exit> {
    if libc::WIFEXITED(status) {
        Some(Exit::Code(libc::WEXITSTATUS(status)))
    } else if libc::WIFSIGNALED(status) {
        Some(Exit::Signal { number: libc::WTERMSIG(status), core_dumped: libc::WCOREDUMP(status) })
    } else {
        None
    }
}

/// Converts a process's resource usage into the units of [`Usage`].
pub(crate) fn usage(rusage: &libc::rusage) -> Usage {
    let us = |time: libc::timeval| time.tv_sec as u64 * 1_000_000 + time.tv_usec as u64;
    Usage {
        user_us: us(rusage.ru_utime),
        system_us: us(rusage.ru_stime),
        maxrss_kib: rusage.ru_maxrss as u64,
    }
}

/// Returns true if the process exits within `timeout`.
pub(crate) fn exits_within(process: &Child, timeout: Duration) -> io::Result<bool> {
    let pid = Pid::from_raw(process.id() as i32).ok_or(Errno::SRCH)?;
    wait_until_readable(rustix::process::pidfd_open(pid, PidfdFlags::empty())?, timeout)
}

/// Sends SIGKILL to a child that has not been reaped. The PID of such a child cannot belong to another process.
pub(crate) fn kill_child(pid: u32) {
    if let Some(pid) = Pid::from_raw(pid as i32) {
        // Fails only if the child is already dead or has changed its user. The keeper can do nothing else in
        // either case.
        let _ = rustix::process::kill_process(pid, Signal::KILL);
    }
}

/// Sends SIGKILL to a worker and to the process group that it leads. The worker may already be dead, but must not have
/// been reaped yet.
///
/// The kernel signals the whole group at once, and no process in the group can fork in the meantime. This stops most
/// fork bombs before the keeper scans for descendants. Otherwise, the scan would have to compete with the fork bomb for
/// processor time.
pub(crate) fn kill_group(pid: u32) {
    if let Some(group) = Pid::from_raw(pid as i32) {
        // Fails if the worker does not lead a process group yet. In that case, the worker has no other processes to
        // kill.
        let _ = rustix::process::kill_process_group(group, Signal::KILL);
    }
    kill_child(pid);
}

/// Kills and reaps all descendants of this process until none is left.
pub(crate) fn kill_all_descendants(timeout: Duration) -> io::Result<()> {
    let start = Instant::now();
    loop {
        let scan = kill_descendants(|_| false);
        let scanned = Instant::now();
        while scanned.elapsed() < SCAN_INTERVAL {
            match wait(-1, libc::WNOHANG) {
                Waited::NoChild => return Ok(()),
                Waited::Ended { .. } => {}
                Waited::Stopped { pid } => kill_child(pid),
                Waited::NoChange => std::thread::sleep(POLL_INTERVAL),
            }
        }
        if start.elapsed() > timeout {
            let left = scan?;
            let text = format!("{left} processes are still alive {timeout:?} after SIGKILL");
            return Err(io::Error::new(io::ErrorKind::TimedOut, text));
        }
    }
}
