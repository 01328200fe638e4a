//! Names and numbers of the kernel.

pub mod rlimits;
pub mod signals;
pub mod syscalls;
