//! The keeper process, which starts, watches and kills all workers. Also contains the supervisor's end of the
//! connection to the keeper.
//!
//! The keeper is the supervisor's own program, started again with a hidden argument. Orders and reports go over one
//! `SOCK_SEQPACKET` socket. The keeper knows nothing about jobs, bulkheads or restarts, and leaves all decisions to
//! the supervisor. When the supervisor is gone for any reason, the keeper reads end of file from the socket, kills all
//! descendants, and exits.
//!
//! - [`client`](Keeper): the supervisor's end.
//! - `client::detached`: the supervisor's end in an application that embeds a supervisor; `process::guard`:
//!   the process between the application and the keeper.
//! - `process`: the keeper's loop, which executes orders, sends reports, and reaps the descendants of dead
//!   workers in small steps.
//! - `spawn`: the fork, and a table of the steps that the child executes before `execve`.
//! - `confine`: the layers of confinement.
//! - `subordinate_ids`: user IDs for workers if the supervisor has no privileges.
//! - `probe`: the layers that this machine supports.
//! - `sample`: samples the stacks of a worker's processes.
//! - `wait`: waits for children, and determines why they exited.
//! - `protocol`: orders, reports, and the socket for whole messages with descriptors.
//!
//! # Why the keeper has two threads
//! The kernel reparents orphans to the first thread of a child subreaper, but a forked process is the child of the
//! thread that forked it. So the second thread forks the workers. The first thread asks with `__WNOTHREAD` for its own
//! children, which are exactly the processes that dead workers left behind. `ECHILD` means that no such process is left,
//! so the keeper does not need to scan all processes on the machine. The first thread blocks during each fork. So the
//! two threads never run at the same time, and a process is known before the first thread can wait for it.
//!
//! Each worker is a child subreaper as well, so its orphans become its children. They are reparented to the keeper
//! only when the worker dies. Every process that the keeper inherits was therefore left behind by a dead worker, and
//! is killed.

mod client;
mod confine;
mod probe;
mod process;
mod protocol;
mod sample;
mod spawn;
mod subordinate_ids;
mod wait;

pub use client::detached::ProbeResult;
pub use client::{Keeper, KeeperLauncher, become_subreaper, reap_after_keeper, spawn_failure_advice};
pub use confine::paths::is_fixed;
pub use confine::reach::can_list;
pub use confine::seccomp::{Seal, seal};
pub use probe::{FORKED_WORKERS, TREE_END, probe};
pub use process::run_as_keeper;
pub use process::temporary::temporary_folders;
pub use protocol::confinement::{
    CgroupLimits, Confinement, Identity, Layers, Namespaces, NetworkAccess, Observed, Seccomp, TemporaryFiles,
};
pub use protocol::{
    Exit, KEEPER_ARGUMENT, LayerSupport, ORDER_BYTES_MAX, Report, Rlimit, SpawnOrder, TemplateReport, Usage,
};
pub use subordinate_ids::{SUBORDINATE_IDS, SubordinateIds};

/// Returns the name of a system call, or an empty string if the number has no name on this architecture.
pub fn syscall_name(number: u32) -> &'static str {
    bulkhead_linux::syscalls::name(number).unwrap_or_default()
}
