//! Layers of confinement, except rlimits. The keeper prepares the layers before the fork, and the child applies
//! them right before `execve`.
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
