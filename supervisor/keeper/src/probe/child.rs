//! Runs a single trial of a confinement layer in a child process, so that the trial cannot change the supervisor. The
//! other modules of `probe` define the trials and interpret the results. Each trial must first call `limit_run_time`,
//! so that the kernel kills a trial that blocks.

use bulkhead_linux::fork::fork_without_sigchld;
use bulkhead_linux::wait::wait_for_exit_code;
use rustix::io::Errno;

use super::error_text;

/// Time limit for a trial, in seconds. The kernel then kills the child process. A trial takes milliseconds unless it
/// blocks.
const TRIAL_SECONDS_MAX: libc::c_uint = 3;

/// Exit code of a trial whose layer the kernel accepts but does not enforce. This value is not an error number.
const NOT_ENFORCED: i32 = 255;

/// Reason why a trial failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TrialError {
    Errno(Errno),
    /// The kernel accepted the layer, but does not enforce it.
    NotEnforced,
}

impl From<Errno> for TrialError {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno)
    }
}

impl TrialError {
    pub(super) fn error_text(self) -> String {
        match self {
            Self::Errno(errno) => error_text(errno),
            Self::NotEnforced => {
                "the kernel accepted the layer but does not enforce it: check for a seccomp \
                 filter that this process inherited"
                    .to_owned()
            }
        }
    }
}

/// Runs a trial in a child process. `task` must make only system calls, because locks held by other threads are never
/// released in the child.
pub(super) fn run_trial(task: impl FnOnce() -> Result<(), TrialError>) -> Result<(), TrialError> {
    // SAFETY: the child makes only raw system calls until it exits.
    let child = unsafe { fork_without_sigchld() }?;
    if child == 0 {
        let code = match task() {
            Ok(()) => 0,
            Err(TrialError::Errno(errno)) => errno.raw_os_error(),
            Err(TrialError::NotEnforced) => NOT_ENFORCED,
        };
        // SAFETY: exits without running the parent's exit handlers.
        unsafe { libc::_exit(code) }
    }
    match wait_for_exit_code(child)? {
        Some(0) => Ok(()),
        Some(NOT_ENFORCED) => Err(TrialError::NotEnforced),
        Some(errno) => Err(Errno::from_raw_os_error(errno).into()),
        None => Err(Errno::CHILD.into()),
    }
}

/// Makes the kernel kill the child when its parent exits or the time limit is reached. Must be the child's
/// first call.
pub(super) fn limit_run_time() {
    // SAFETY: sets a flag and a timer of this process. The timer's signal terminates the process.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        libc::signal(libc::SIGALRM, libc::SIG_DFL);
        libc::alarm(TRIAL_SECONDS_MAX);
    }
}
