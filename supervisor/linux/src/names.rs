//! Tables with the names and numbers of system calls, resource limits and signals. `signals` also resets the action for
//! SIGCHLD. Nothing here sets a limit or sends a signal.

pub mod rlimits;
pub mod signals;
pub mod syscalls;
