//! Forks a child, and contains the steps of the child until it executes the worker's program.
//!
//! The child contains only the forking thread, and locks that other threads held at the time of the fork stay locked
//! forever. So between the fork and `execve`, the child makes only raw system calls on prepared data, allocates
//! nothing and cannot panic. [`steps`] contains a table of these steps. If a step fails, the worker does not start,
//! and the supervisor receives the name of the step.
//!
//! - `prepared`, `confinement`: everything that the child needs, prepared before the fork.
//! - `forker`: the thread that forks. `clone`: the system call.
//! - `child`: the child, which executes the steps. `plan`: the input of the steps.
//! - `path_check`: a process that checks whether file systems respond.
//! - `progress`: messages between the child and the keeper.
//! - `program_rules`: the Landlock rules that the host of `exec` programs receives.
//! - `mounts`: a private root folder, a private `/proc`, and paths that the worker's user cannot reach.
//! - `user_namespace`: the fork into an existing user namespace.
//! - `init`: the first process of a PID namespace, which is the parent of the worker or of a template.
#![expect(unsafe_code, reason = "fork, execve and the calls in a forked child have no safe wrapper")]

mod child;
mod clone;
mod confinement;
mod forker;
mod init;
mod mounts;
mod path_check;
mod plan;
mod prepared;
mod program_rules;
mod progress;
mod steps;
mod user_namespace;

use std::io;
use std::os::fd::RawFd;

use bulkhead_linux::errno;
use rustix::io::Errno;

pub(crate) use self::confinement::{FilterCache, PreparedConfinement};
pub(crate) use self::forker::{Forker, Job, distinguishes_orphans, fork_step};
pub(crate) use self::init::template::{ChildExit, EXIT_BYTES_MAX, NAMED_CHILDREN_MAX, Order as InitOrder};
pub(crate) use self::init::worker::read_status;
pub(crate) use self::path_check::PathCheck;
pub(crate) use self::plan::{OomSettings, OriginalSettings};
pub(crate) use self::prepared::{ChildConnections, Prepared};
pub(crate) use self::progress::{Progress, let_continue, read as read_progress};
pub(crate) use self::steps::duplicate_to;

/// Descriptor number of the link in a worker. The keeper uses this number for the order socket, so that no other
/// descriptor of the keeper has a number that a child needs.
pub(crate) const LINK_FD: RawFd = 3;

// Names of steps that can fail even before the fork.
const ROOT_STEP: &str = "mount namespace";
const LANDLOCK_STEP: &str = "landlock";
const SECCOMP_STEP: &str = "seccomp";

/// Exit code of a child that has failed before `execve`. The keeper does not report this exit code, but the error of
/// the failed step.
const FAILED_EXIT_CODE: i32 = 127;

/// Error from starting a worker, with the failed step and the error number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SpawnError {
    pub(crate) step: String,
    pub(crate) errno: Errno,
}

impl SpawnError {
    pub(crate) fn new(step: &str, errno: Errno) -> Self {
        Self { step: step.to_owned(), errno }
    }

    pub(crate) fn from_io(step: &str, error: &io::Error) -> Self {
        Self::new(step, errno::from_io(error, Errno::IO))
    }
}

/// Checks that the first process of a template's PID namespace can list its children on this kernel.
pub(crate) fn can_list_children() -> Result<(), Errno> {
    init::template::open_children().map(drop)
}

fn exit(code: i32) -> ! {
    // SAFETY: exits without running the parent's exit handlers.
    unsafe { libc::_exit(code) }
}
