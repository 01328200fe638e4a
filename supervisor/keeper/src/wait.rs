//! Waiting for children by the kernel's raw calls, and ending all of them.
//!
//! This knows which thread of the keeper has which children; it does not know what a worker is.
#![expect(unsafe_code, reason = "wait4 gives the usage, and no safe wrapper passes __WNOTHREAD")]

use std::collections::HashSet;
use std::io;
use std::time::{Duration, Instant};

use bulkhead_shared::process_tree::kill_descendants;
use rustix::io::Errno;
use rustix::process::{Pid, Signal};

use super::spawn::{Forker, Job};
use super::{Exit, Usage};

/// While all are being killed, every process of the machine is looked at this often.
const RESCAN: Duration = Duration::from_millis(10);

/// How long to sleep between two looks at what has died of it.
const PAUSE: Duration = Duration::from_millis(1);

/// The news of a child.
#[derive(Debug)]
pub(super) enum Waited {
    /// There is no child at all.
    NoChild,
    /// There are children, and no news.
    Nothing,
    /// A child has ended, and its number is free again.
    Ended { pid: u32, exit: Exit, usage: Usage },
    /// A child asked to be traced by its parent and has stopped, which no honest one does.
    Stopped { pid: u32 },
}

/// A child of this process of which there is news, which stays as it is: dead or not, the number is
/// still its own.
pub(super) fn peek() -> Option<u32> {
    // SAFETY: all zeros is a valid `siginfo_t`, which the call fills at most; if it succeeds, the number
    // is that of a child, or still zero.
    let pid = unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT | libc::__WALL;
        if libc::waitid(libc::P_ALL, 0, &mut info, flags) == 0 { info.si_pid() } else { 0 }
    };
    (pid != 0).then_some(pid as u32)
}

/// Whether this child has ended and was not waited for.
pub(super) fn has_ended(pid: u32) -> bool {
    // SAFETY: all zeros is a valid `siginfo_t`, which the call fills at most; if it succeeds, the number
    // is that of the child, or still zero.
    unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT | libc::__WALL;
        libc::waitid(libc::P_PID, pid, &mut info, flags) == 0 && info.si_pid() != 0
    }
}

/// Takes the news of this child, without waiting.
pub(super) fn take(pid: u32) -> Waited {
    wait(pid as i32, libc::WNOHANG)
}

fn wait(pid: i32, flags: i32) -> Waited {
    loop {
        match wait_raw(pid, flags) {
            Ok((0, ..)) => return Waited::Nothing,
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

/// The bare call: whose news (0: nobody's yet), the status, the usage.
pub(super) fn wait_raw(pid: i32, flags: i32) -> Result<(u32, i32, libc::rusage), Errno> {
    let mut status = 0;
    // SAFETY: all zeros is a valid `rusage`.
    let mut rusage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are to variables of this function, of the types that the call fills.
    match unsafe { libc::wait4(pid, &mut status, flags | libc::__WALL, &mut rusage) } {
        // SAFETY: the address of this thread's `errno`, always there.
        -1 => Err(Errno::from_raw_os_error(unsafe { *libc::__errno_location() })),
        pid => Ok((pid as u32, status, rusage)),
    }
}

/// How a process ended. `None`: it did not.
pub(super) fn exit(status: i32) -> Option<Exit> {
    if libc::WIFEXITED(status) {
        Some(Exit::Code(libc::WEXITSTATUS(status)))
    } else if libc::WIFSIGNALED(status) {
        Some(Exit::Signal { number: libc::WTERMSIG(status), core_dumped: libc::WCOREDUMP(status) })
    } else {
        None
    }
}

/// What a process has used, in our units.
pub(super) fn usage(rusage: &libc::rusage) -> Usage {
    let us = |time: libc::timeval| time.tv_sec as u64 * 1_000_000 + time.tv_usec as u64;
    Usage {
        user_us: us(rusage.ru_utime),
        system_us: us(rusage.ru_stime),
        maxrss_kib: rusage.ru_maxrss as u64,
    }
}

/// Whether the calling thread itself has children, dead or alive. For the first thread of the keeper:
/// whether it has adopted any.
pub(super) fn has_own_children() -> bool {
    let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT | libc::__WNOTHREAD | libc::__WALL;
    // SAFETY: all zeros is a valid `siginfo_t`, and the call fills this one at most.
    unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        libc::waitid(libc::P_ALL, 0, &mut info, flags) == 0
    }
}

/// Tries whether this kernel tells the workers from what they leave behind as `keeper` says. Called on
/// the first thread, before there is any worker.
pub(super) fn tells_orphans_apart(forker: &Forker) -> io::Result<bool> {
    let child = forker.fork(Job::Child)?;
    let sees_workers = has_own_children();
    wait(child as i32, 0);
    let child = forker.fork(Job::Grandchild)?;
    wait(child as i32, 0);
    // Now the grandchild is an orphan: dead or about to be.
    let sees_orphans = matches!(wait(-1, libc::__WNOTHREAD), Waited::Ended { .. });
    while !matches!(wait(-1, 0), Waited::NoChild) {}
    Ok(!sees_workers && sees_orphans)
}

/// Sends SIGKILL to a child that has not been waited for, so that the number is still its own.
pub(super) fn kill_child(pid: u32) {
    if let Some(pid) = Pid::from_raw(pid as i32) {
        // The only failures are that it is dead already, or changed its identity: then nothing helps.
        let _ = rustix::process::kill_process(pid, Signal::KILL);
    }
}

/// Sends SIGKILL to a worker, which leads a process group, and to that group. The worker may be dead,
/// but must not have been waited for.
///
/// The kernel does this in one go, during which nothing in the group can fork. So most fork bombs are
/// over before anybody has to look for processes while they have the processors.
pub(super) fn kill_group(pid: u32) {
    if let Some(group) = Pid::from_raw(pid as i32) {
        // It fails if the worker does not lead its group yet: then the group is the worker alone.
        let _ = rustix::process::kill_process_group(group, Signal::KILL);
    }
    kill_child(pid);
}

/// Kills whatever descends from this process until nothing is left, and reaps it.
pub(super) fn end_all(patience: Duration) -> io::Result<()> {
    let start = Instant::now();
    loop {
        let scan = kill_descendants(&HashSet::new());
        let scanned = Instant::now();
        while scanned.elapsed() < RESCAN {
            match wait(-1, libc::WNOHANG) {
                Waited::NoChild => return Ok(()),
                Waited::Ended { .. } => {}
                Waited::Stopped { pid } => kill_child(pid),
                Waited::Nothing => std::thread::sleep(PAUSE),
            }
        }
        if start.elapsed() > patience {
            let left = scan?;
            let text = format!("{left} processes are still there {patience:?} after they were killed");
            return Err(io::Error::new(io::ErrorKind::TimedOut, text));
        }
    }
}
