//! The keeper, which starts, watches and kills all workers, and the supervisor's end of the connection to the
//! keeper.
//!
//! The keeper is the supervisor's own program, started again with a hidden argument. Orders and reports go
//! over one `SOCK_SEQPACKET` socket. The keeper knows nothing of jobs, bulkheads or restarts, and leaves all
//! decisions to the supervisor. When the supervisor is gone for any reason, the keeper sees the end of file
//! on the socket, kills all descendants, and exits.
//!
//! - [`client`](Keeper): the supervisor's end.
//! - `detached`: the supervisor's end in an application that embeds a supervisor; `process::guard`: the
//!   process between the application and the keeper.
//! - `process`: the keeper's loop, which executes orders, sends reports, and reaps the descendants of dead
//!   workers in small steps.
//! - `spawn`: the fork, and the steps of the child up to `execve`, with one table row per step.
//! - `confine`, [`confinement`](Confinement): the layers of confinement, and the form in which they are
//!   ordered.
//! - `observe`: the confinement as read back from the kernel.
//! - `subordinate`: user ids for workers if the supervisor has no privileges.
//! - `temporary`: temporary folders of workers.
//! - `probe`: the layers that this machine supports.
//! - `wait`: waits for children, by thread of the keeper, and how they ended.
//! - `socket`: non-blocking exchange of whole messages with descriptors.
//!
//! # Two threads, for a reason
//! The kernel reparents orphans to the first thread of a child subreaper, but a forked process is the child
//! of the thread that forked it. So the second thread forks the workers. The first thread waits with
//! `__WNOTHREAD` and sees exactly the processes that dead workers left behind. `ECHILD` means that nothing is
//! left, so no scan of all processes of the machine is needed. The first thread waits for each fork to
//! return. So the two threads never run at the same time, and a process is known before the first thread can
//! wait for it.
//!
//! Each worker is a child subreaper as well. The orphans of a living worker stay below the worker, and come
//! to the keeper when the worker is dead. So every process that the keeper inherits belongs to a dead worker,
//! and is killed.

mod client;
mod confine;
mod confinement;
mod detached;
mod groups;
mod id_maps;
mod observe;
mod probe;
mod process;
mod socket;
mod spawn;
mod subordinate;
mod temporary;
mod wait;

use bincode::{BorrowDecode, Encode};
use bulkhead_linux::syscalls;
use std::io;

pub use client::{
    Keeper, KeeperLauncher, Report, TemplateMessage, become_subreaper, reap_after_keeper,
    spawn_failure_advice,
};
pub use confinement::{
    CgroupLimits, Confinement, Identity, Layers, Namespaces, Observed, Seccomp, TemporaryFiles,
};
pub use detached::ProbeResult;
pub use probe::{FORKED_WORKERS, LayerSupport, TREE_END, probe};
pub use process::run_as_keeper;
pub use subordinate::{SUBORDINATE_IDS, SubordinateIds};
pub use temporary::temporary_folders;

/// The hidden first argument with which a program must call [`run_as_keeper`].
pub const KEEPER_ARGUMENT: &str = "__keeper";

/// Environment variables of the service manager for the supervisor, which other processes must not inherit.
const SERVICE_MANAGER_VARIABLES: [&str; 6] =
    ["NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "WATCHDOG_USEC", "WATCHDOG_PID"];

/// Maximum size of an order in bytes. The configuration allows 96 KiB for arguments and environment. The
/// limits and the paths of a sandbox use the rest.
pub const ORDER_BYTES_MAX: usize = 192 * 1024;

/// Size requested for the socket's buffer, in bytes: the largest order, and the kernel's own share.
const SOCKET_BUFFER_BYTES: usize = 2 * ORDER_BYTES_MAX;

/// Maximum size of a report in bytes. The longest report has the name of a step, possibly with a path, and
/// some numbers.
const REPORT_BYTES_MAX: usize = 1024;

/// Maximum size of a step's name in a report, in bytes.
const STEP_BYTES_MAX: usize = 768;

/// Number of descriptors that come with [`Order::Spawn`]: link, stdout, stderr.
const SPAWN_DESCRIPTORS: usize = 3;

/// Number of descriptors that a worker starts with: standard input, output and error, and the link.
const WORKER_DESCRIPTORS: u32 = 4;

/// An order to start a worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, BorrowDecode)]
pub struct SpawnOrder<'a> {
    /// Spawn number, which identifies the worker in reports. Chosen by the caller, and never used twice.
    pub worker: u64,
    /// Path of the program. `PATH` is not searched.
    pub program: &'a str,
    /// All arguments, including the zeroth (the program's name).
    pub arguments: Vec<&'a str>,
    /// The whole environment as `NAME=value`. Nothing is inherited.
    pub environment: Vec<&'a str>,
    /// Working directory.
    pub directory: &'a str,
    /// Resource limits, set in this order.
    pub rlimits: Vec<Rlimit>,
    /// Confinement of the worker.
    pub confinement: Confinement<'a>,
    /// True if the worker is a template, which forks other workers (see [`Keeper::fork`]). A template has a
    /// socket to the keeper in place of a link.
    pub is_template: bool,
}

/// A limit of `setrlimit(2)`. `u64::MAX` means unlimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub struct Rlimit {
    /// Number of the resource, such as `libc::RLIMIT_AS`.
    pub resource: u32,
    /// Limit in force.
    pub soft: u64,
    /// Maximum to which the process can raise the soft limit.
    pub hard: u64,
}

/// Cause of a worker's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub enum Exit {
    /// The worker exited with this code.
    Code(i32),
    /// A signal killed the worker.
    Signal {
        /// Number of the signal.
        number: i32,
        /// True if the kernel wrote a core file.
        core_dumped: bool,
    },
    /// The kernel killed the worker because its control group had reached the memory limit, or because the
    /// machine was out of memory.
    Oom,
    /// The keeper killed the worker for a system call that the filter forbids; see [`syscall_name`].
    Violation {
        /// Number of the call.
        call: u32,
    },
}

/// Resource usage of a worker, including descendants that the worker has waited for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, BorrowDecode)]
pub struct Usage {
    /// Processor time in user mode, in microseconds.
    pub user_us: u64,
    /// Processor time in the kernel, in microseconds.
    pub system_us: u64,
    /// Peak resident memory of the largest process, in KiB.
    pub maxrss_kib: u64,
}

/// An order of the supervisor. End of file is the order to exit.
#[derive(Debug, PartialEq, Eq, Encode, BorrowDecode)]
enum Order<'a> {
    /// Starts a worker, with link, standard output and standard error.
    Spawn(Box<SpawnOrder<'a>>),
    /// Makes a template fork a worker, with the same descriptors as `Spawn`.
    Fork { worker: u64, template: u64 },
    /// Sends the user namespace that workers with [`Layers::subordinate_ids`] enter, as a descriptor.
    Namespace,
    /// Kills the worker at once. An unknown worker is not an error, because the end has been reported or will
    /// be.
    Kill { worker: u64 },
    /// Requests a `Pong`.
    Ping,
}

impl SpawnOrder<'_> {
    fn texts(&self) -> impl Iterator<Item = &str> {
        let Confinement { programs, read, write, withheld, allow, deny, .. } = &self.confinement;
        let lists = [&self.arguments, &self.environment, programs, read, write, withheld, allow, deny];
        [self.program, self.directory].into_iter().chain(lists.into_iter().flatten().copied())
    }

    fn encode(&self) -> io::Result<Vec<u8>> {
        if self.texts().any(|text| text.contains('\0')) {
            return Err(invalid("a path, an argument or an environment variable contains a NUL byte"));
        }
        let bytes = Order::Spawn(Box::new(self.clone())).encode()?;
        if bytes.len() > ORDER_BYTES_MAX {
            return Err(invalid(
                "the arguments, the environment and the paths of the sandbox are too large together",
            ));
        }
        Ok(bytes)
    }
}

/// Returns the name of a system call, or an empty text if the number has no name on this architecture.
pub fn syscall_name(number: u32) -> &'static str {
    syscalls::name(number).unwrap_or_default()
}

/// A stricter filter that a worker installs itself when it is ready for its first job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seal<'a> {
    /// True if the worker has [`Seccomp::AllowList`]. The seal then also forbids to execute programs and to
    /// create sockets.
    pub is_strict: bool,
    /// True if the worker has the network, and so can create sockets.
    pub network: bool,
    /// Names of system calls that stay allowed.
    pub allow: &'a [&'a str],
    /// True if a template forked the worker. The seal then forbids to fork siblings, which the template may
    /// do.
    pub is_forked: bool,
}

/// Compiles a seal into a filter program for the kernel.
pub fn seal(seal: &Seal<'_>) -> Vec<u8> {
    let Seal { is_strict, network, allow, is_forked } = *seal;
    let known: Vec<&str> = allow.iter().copied().filter(|name| syscalls::is_known(name)).collect();
    // Fails only for an unknown name.
    let strict = is_strict.then(|| confine::seccomp::sealed(network, &known).ok()).flatten();
    let rules = strict.unwrap_or_else(confine::seccomp::allow_all);
    let rules = if is_forked { confine::seccomp::deny_siblings(rules) } else { rules };
    rules.compile(confine::seccomp::FatalAction::Kill).bytes()
}

/// A report of the keeper: [`Report`] as sent over the socket, without the pidfd that comes with `Spawned`.
#[derive(Debug, PartialEq, Eq, Encode, BorrowDecode)]
enum ReportMessage<'a> {
    Started { scan_always: bool },
    Spawned { worker: u64, pid: u32, observed: Observed },
    Violation { worker: u64, process: u32, call: u32 },
    SpawnFailed { worker: u64, step: &'a str, errno: i32 },
    Exited { worker: u64, exit: Exit, usage: Usage },
    Reaped { worker: u64 },
    Template { worker: u64, message: TemplateMessage },
    Unkillable { count: u64 },
    Pong,
}

/// Encoding of orders. The limit bounds the memory allocated for an order of [`ORDER_BYTES_MAX`] bytes in
/// which each byte is a text.
fn coding() -> impl bincode::config::Config {
    bincode::config::standard().with_limit::<{ size_of::<&str>() * ORDER_BYTES_MAX }>()
}

impl Order<'_> {
    fn encode(&self) -> io::Result<Vec<u8>> {
        bincode::encode_to_vec(self, coding()).map_err(io::Error::other)
    }

    /// Returns `None` if the bytes are not an order.
    fn decode(bytes: &[u8]) -> Option<Order<'_>> {
        let (order, used) = bincode::borrow_decode_from_slice(bytes, coding()).ok()?;
        (used == bytes.len()).then_some(order)
    }
}

fn invalid(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decodes_encoded_orders_and_rejects_garbage() {
        let order = SpawnOrder {
            worker: 7,
            program: "/bin/sh",
            directory: "/",
            arguments: vec!["sh"],
            environment: vec!["A=b"],
            rlimits: vec![Rlimit { resource: 9, soft: 1, hard: u64::MAX }],
            confinement: Confinement {
                read: vec!["/a", "/b"],
                deny: vec!["mount"],
                ..Confinement::default()
            },
            is_template: false,
        };
        let bytes = order.encode().unwrap();
        assert_eq!(Order::decode(&bytes), Some(Order::Spawn(Box::new(order.clone()))));
        assert_eq!(Order::decode(&[&bytes[..], &[0]].concat()), None);
        for length in 0..bytes.len() {
            assert_eq!(Order::decode(&bytes[..length]), None);
        }
        assert_eq!(Order::decode(&[255; 100]), None);
        assert!(SpawnOrder { arguments: vec!["a\0b"], ..order.clone() }.encode().is_err());
        let long = "x".repeat(ORDER_BYTES_MAX);
        assert!(SpawnOrder { arguments: vec![&long], ..order }.encode().is_err());
    }
}
