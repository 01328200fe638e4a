//! A child process that makes one trial and exits.

use bulkhead_linux::fork::fork_without_sigchld;
use bulkhead_linux::wait::wait_for_exit_code;
use rustix::io::Errno;

use super::explain;

/// Time limit of a trial in seconds, after which the kernel kills the child. A trial takes no time unless it
/// is stuck.
const SECONDS_MAX: libc::c_uint = 3;

/// Exit code for a layer that the kernel accepted but does not enforce. No error has this number.
const UNTRUE: i32 = 255;

/// Reason why a trial failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// Error of the kernel.
    Errno(Errno),
    /// The kernel accepted the layer, but does not enforce it.
    Untrue,
}

impl From<Errno> for Refused {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno)
    }
}

impl Refused {
    /// Returns the reason as text.
    pub(super) fn explain(self) -> String {
        match self {
            Self::Errno(errno) => explain(errno),
            Self::Untrue => {
                "the kernel accepted the layer, but does not enforce the layer: check for a seccomp filter \
                             above this process"
                    .to_owned()
            }
        }
    }
}

/// Runs a trial in a child. `task` must only make system calls, because the child is a copy of one thread of
/// many.
pub(super) fn tried(task: impl FnOnce() -> Result<(), Refused>) -> Result<(), Refused> {
    // SAFETY: the child makes only raw system calls until it exits.
    let child = unsafe { fork_without_sigchld() }?;
    if child == 0 {
        let code = match task() {
            Ok(()) => 0,
            Err(Refused::Errno(errno)) => errno.raw_os_error(),
            Err(Refused::Untrue) => UNTRUE,
        };
        // SAFETY: ends the process without running anything that the parent registered.
        unsafe { libc::_exit(code) }
    }
    match wait_for_exit_code(child)? {
        Some(0) => Ok(()),
        Some(UNTRUE) => Err(Refused::Untrue),
        Some(errno) => Err(Errno::from_raw_os_error(errno).into()),
        None => Err(Errno::CHILD.into()),
    }
}

/// Must be the child's first call. The child then ends with its parent, or at its time limit.
pub(super) fn bound() {
    // SAFETY: sets a flag and a timer of this process. The timer's signal ends the process.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        libc::signal(libc::SIGALRM, libc::SIG_DFL);
        libc::alarm(SECONDS_MAX);
    }
}
