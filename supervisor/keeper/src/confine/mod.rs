//! Layers of confinement that restrict what a worker can access. `spawn` prepares rules and filters before the fork, and
//! the child applies them before `execve`; `process` creates the control groups. `probe` and the `plane` crate also call
//! these modules. Namespaces, mounts, users, capabilities and rlimits are in `spawn`. The supervisor decides which
//! layers a worker gets.
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
