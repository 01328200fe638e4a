//! What a worker is barred from, apart from its limits: prepared in the keeper before the fork, put in
//! force by the child right before `execve`.
//!
//! - [`cgroup`]: what it may use together with all that it starts.
//! - [`landlock`]: which files and sockets it can reach.
//! - [`seccomp`]: which system calls it can make.
//! - `elf`: what of programs and libraries needs no path.
//! - [`paths`]: what every program needs of the file system.
//! - [`reach`]: what of that the worker's user can reach by itself.

pub(super) mod cgroup;
mod elf;
pub(super) mod landlock;
pub(super) mod paths;
pub(super) mod reach;
pub(super) mod seccomp;
