//! Names and numbers of system calls, resource limits and signals.

pub mod rlimits;
pub mod signals;
pub mod syscalls;
