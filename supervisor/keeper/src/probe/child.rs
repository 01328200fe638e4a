//! A child that tries one thing and ends.

use bulkhead_linux::fork::fork_unheard;
use bulkhead_linux::wait::exit_code;
use rustix::io::Errno;

use super::explain;

/// What is tried takes no time; a child that is stuck all the same is ended by the kernel after so many seconds.
const SECONDS_MAX: libc::c_uint = 3;

/// The exit code for what was said to be in force and is not. No error has this number.
const UNTRUE: i32 = 255;

/// Why a try did not succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// The kernel said so.
    Errno(Errno),
    /// The kernel said that it is in force, and it is not.
    Untrue,
}

impl From<Errno> for Refused {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno)
    }
}

impl Refused {
    /// In words.
    pub(super) fn explain(self) -> String {
        match self {
            Self::Errno(errno) => explain(errno),
            Self::Untrue => {
                "the kernel says that it is in force, and it is not: is there a filter of system calls \
                             above this process?"
                    .to_owned()
            }
        }
    }
}

/// Tries it in a child. `task` may only make system calls: the child is a copy of one thread of many.
pub(super) fn tried(task: impl FnOnce() -> Result<(), Refused>) -> Result<(), Refused> {
    // SAFETY: the child makes nothing but raw calls until it is gone.
    let child = unsafe { fork_unheard() }?;
    if child == 0 {
        let code = match task() {
            Ok(()) => 0,
            Err(Refused::Errno(errno)) => errno.raw_os_error(),
            Err(Refused::Untrue) => UNTRUE,
        };
        // SAFETY: ends the process, without a thing being run that the parent registered.
        unsafe { libc::_exit(code) }
    }
    match exit_code(child)? {
        Some(0) => Ok(()),
        Some(UNTRUE) => Err(Refused::Untrue),
        Some(errno) => Err(Errno::from_raw_os_error(errno).into()),
        None => Err(Errno::CHILD.into()),
    }
}

/// The child's first call: it does not outlive its parent, nor its time.
pub(super) fn bound() {
    // SAFETY: sets a flag and a timer of this process; the timer's signal ends it.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        libc::signal(libc::SIGALRM, libc::SIG_DFL);
        libc::alarm(SECONDS_MAX);
    }
}
