//! The keeper: the process that starts, watches and ends all workers, and the supervisor's end of it.
//!
//! It is the supervisor's own program, started again under a hidden argument, with one `SOCK_SEQPACKET`
//! socket to take orders from and report to. It knows nothing of jobs, bulkheads or restarts, and
//! decides nothing: the supervisor does. When that is gone, in whatever way, the end of file on
//! the socket tells, and the keeper kills whatever descends from it before it ends.
//!
//! - [`client`](Keeper): the supervisor's end.
//! - `detached`: the same in an application that is no supervisor otherwise; `process::guard`: the process that stands
//!   between that and the keeper.
//! - `process`: the keeper's loop: orders in, reports out, sweeping up after the dead in pieces.
//! - `spawn`: the fork, and the steps of the child up to its `execve`, one table row each.
//! - `confine`, [`confinement`](Confinement): what a worker is barred by, and how that is ordered.
//! - `observe`: what the kernel says of it.
//! - `subordinate`: ids of workers where the supervisor has no privileges.
//! - `temporary`: its folder for temporary files.
//! - `probe`: what of all that this machine can do.
//! - `wait`: which thread of the keeper has which children, and how they ended.
//! - `socket`: whole messages with descriptors, never blocking.
//!
//! # Two threads, for a reason
//! The kernel hands orphans to the first thread of a child subreaper, while a process is the child of
//! the very thread that forked it. So the second thread forks the workers, and the first one, asking
//! with `__WNOTHREAD`, sees exactly what a worker left behind: `ECHILD` means that nothing is left,
//! without a look at every process of the machine. The first thread waits for each fork to return, so
//! that the two never run at the same time and a process is known before the first thread can wait for it.
//!
//! Each worker is a child subreaper as well: its orphans stay below it while it lives and come to the
//! keeper when it is dead. What the keeper adopts thus belongs to the dead, and goes.

mod client;
mod confine;
mod confinement;
mod detached;
mod groups;
mod maps;
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

pub use client::{Keeper, KeeperOrigin, Report, TemplateWord, advice, become_subreaper, sweep_after_keeper};
pub use confinement::{Cgroup, Confinement, Identity, Namespaces, Observed, Seccomp, Temporary, Terms};
pub use detached::Found;
pub use probe::{Ability, FORKED, TREE_END, probe};
pub use process::run_as_keeper;
pub use subordinate::{SUBORDINATE_IDS, SubordinateIds};
pub use temporary::folders as temporary_folders;

/// The hidden first argument under which a program must call [`run_as_keeper`].
pub const KEEPER_ARGUMENT: &str = "__keeper";

/// What the service manager tells the supervisor by its environment is not meant for other processes.
const WITHHELD: [&str; 6] =
    ["NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "WATCHDOG_USEC", "WATCHDOG_PID"];

/// Bytes of one order: arguments and environment (96 KiB at most, says the configuration), the limits,
/// and what is left for the paths of a sandbox.
pub const ORDER_BYTES_MAX: usize = 192 * 1024;

/// Asked of the kernel for the socket's buffer: the largest order, and the kernel's own share of it.
const SOCKET_BUFFER_BYTES: usize = 2 * ORDER_BYTES_MAX;

/// Bytes of one report: the longest is a step's name, perhaps with a path in it, and some numbers.
const REPORT_BYTES_MAX: usize = 1024;

/// Bytes of a step's name in a report.
const STEP_BYTES_MAX: usize = 768;

/// Descriptors that come with [`Order::Spawn`]: link, stdout, stderr.
const SPAWN_DESCRIPTORS: usize = 3;

/// Descriptors that a worker starts with: standard input, output and error, and its link.
const WORKER_DESCRIPTORS: u32 = 4;

/// A worker to start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, BorrowDecode)]
pub struct SpawnOrder<'a> {
    /// Names the worker in the reports; the caller's choice, and never used twice.
    pub worker: u64,
    /// The program's path; there is no search.
    pub program: &'a str,
    /// All arguments, the zeroth (the program's name) included.
    pub arguments: Vec<&'a str>,
    /// The whole environment, each as `NAME=value`: nothing is inherited.
    pub environment: Vec<&'a str>,
    /// The working directory.
    pub directory: &'a str,
    /// Limits, set in this order.
    pub rlimits: Vec<Rlimit>,
    /// What it is barred from.
    pub confinement: Confinement<'a>,
    /// Whether it forks other workers, see [`Keeper::fork`], and has the keeper's socket in place of a link.
    pub is_template: bool,
}

/// One limit of `setrlimit(2)`; `u64::MAX` means unlimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub struct Rlimit {
    /// The kernel's number, such as `libc::RLIMIT_AS`.
    pub resource: u32,
    /// What is in force.
    pub soft: u64,
    /// How far the process may raise it.
    pub hard: u64,
}

/// How a worker ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub enum Exit {
    /// By itself, with this exit code.
    Code(i32),
    /// By a signal.
    Signal {
        /// The signal's number.
        number: i32,
        /// Whether the kernel wrote a core file.
        core_dumped: bool,
    },
    /// Killed by the kernel, since its control group had all the memory that it may, or there was no more.
    Oom,
    /// Killed by the keeper for a system call that its filter forbids; see [`call_name`].
    Violation {
        /// The call's number.
        call: u32,
    },
}

/// What a worker and those of its descendants that it waited for have used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, BorrowDecode)]
pub struct Usage {
    /// Microseconds of processor time in the program.
    pub user_us: u64,
    /// Microseconds of processor time in the kernel.
    pub system_us: u64,
    /// The most memory resident at a time, of the largest process.
    pub maxrss_kib: u64,
}

/// What the supervisor orders. End of file is the order to end.
#[derive(Debug, PartialEq, Eq, Encode, BorrowDecode)]
enum Order<'a> {
    /// Start a worker, with its link, standard output and standard error.
    Spawn(Box<SpawnOrder<'a>>),
    /// Have a template fork a worker, with the same descriptors.
    Fork { worker: u64, template: u64 },
    /// The user namespace that workers enter with [`Terms::subordinate`]: the descriptor that comes along.
    Namespace,
    /// Kill the worker at once. One that is not there (any more) is no error: its end is reported.
    Kill { worker: u64 },
    /// Say that you are there.
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
            return Err(invalid("a path, an argument or a variable of the environment contains a NUL"));
        }
        let bytes = Order::Spawn(Box::new(self.clone())).encode()?;
        if bytes.len() > ORDER_BYTES_MAX {
            return Err(invalid(
                "the arguments, the environment and the paths of the sandbox take too many bytes together",
            ));
        }
        Ok(bytes)
    }
}

/// The name of a system call, or an empty text if it has none here.
pub fn call_name(number: u32) -> &'static str {
    syscalls::name(number).unwrap_or_default()
}

/// What a worker puts in force by itself when it is ready for its first job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seal<'a> {
    /// On top of [`Seccomp::Allow`]: no other program any more, and no socket.
    pub is_strict: bool,
    /// Whether it has the network, and so makes sockets.
    pub network: bool,
    /// Names of system calls that it may make all the same.
    pub allow: &'a [&'a str],
    /// Whether it was forked by a template, and may not fork as that does.
    pub is_forked: bool,
}

/// That, as a filter that the kernel takes.
pub fn seal(seal: &Seal<'_>) -> Vec<u8> {
    let Seal { is_strict, network, allow, is_forked } = *seal;
    let known: Vec<&str> = allow.iter().copied().filter(|name| syscalls::is_known(name)).collect();
    // Only a name that is not known is an error.
    let strict = is_strict.then(|| confine::seccomp::sealed(network, &known).ok()).flatten();
    let rules = strict.unwrap_or_else(confine::seccomp::open);
    let rules = if is_forked { confine::seccomp::without_siblings(rules) } else { rules };
    rules.compile(confine::seccomp::Ending::Kill).bytes()
}

/// What the keeper reports; [`Report`] on the wire, without the pidfd that comes with `Spawned`.
#[derive(Debug, PartialEq, Eq, Encode, BorrowDecode)]
enum ReportMessage<'a> {
    Started { scan_always: bool },
    Spawned { worker: u64, pid: u32, observed: Observed },
    Violation { worker: u64, process: u32, call: u32 },
    SpawnFailed { worker: u64, step: &'a str, errno: i32 },
    Exited { worker: u64, exit: Exit, usage: Usage },
    Swept { worker: u64 },
    Template { worker: u64, word: TemplateWord },
    Remains { count: u64 },
    Pong,
}

/// The coding of orders. The limit bounds what is allocated for one of [`ORDER_BYTES_MAX`] bytes, each of them a text.
fn coding() -> impl bincode::config::Config {
    bincode::config::standard().with_limit::<{ size_of::<&str>() * ORDER_BYTES_MAX }>()
}

impl Order<'_> {
    fn encode(&self) -> io::Result<Vec<u8>> {
        bincode::encode_to_vec(self, coding()).map_err(io::Error::other)
    }

    /// `None`: this is not an order.
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
    fn an_order_survives_the_way_and_garbage_does_not() {
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
