//! Layers of confinement, except namespaces and rlimits, which are in `spawn`. The keeper prepares the layers before
//! the fork. A child that the keeper forks starts in its control group, and applies the other layers right before
//! `execve`. The supervisor decides which layers a worker gets.
//!
//! - [`cgroup`]: limits for a worker and all its descendants together.
//! - [`landlock`]: access to files and sockets.
//! - [`seccomp`]: allowed system calls.
//! - `acl`: access control lists of files.
//! - `elf`: checks whether programs and libraries work without access by path.
//! - [`paths`]: paths that every program needs.
//! - [`reach`]: granted paths that the worker's user cannot reach.

mod acl;
pub(crate) mod cgroup;
mod elf;
pub(crate) mod landlock;
pub(crate) mod paths;
pub(crate) mod reach;
pub(crate) mod seccomp;
