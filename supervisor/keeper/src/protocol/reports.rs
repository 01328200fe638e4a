//! Defines the types and the size limits of the reports that the keeper sends to the supervisor. A report names the
//! cause of a worker's exit and the worker's resource usage. `process` encodes and sends the messages, and `client`
//! decodes them for the data plane. The keeper never expects a reply to a report.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use bincode::{BorrowDecode, Encode};

use super::confinement::Observed;

/// Maximum size of a report in bytes. The longest report contains the name of a step, which can include a path, and
/// some numbers.
pub(crate) const REPORT_BYTES_MAX: usize = 1024;

/// Maximum size of a step's name in a report, in bytes.
pub(crate) const STEP_BYTES_MAX: usize = 768;

/// Cause of a worker's exit.
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
    /// The keeper killed the worker because the worker made a forbidden system call; see
    /// [`syscall_name`](crate::syscall_name).
    Violation {
        /// Number of the system call.
        call: u32,
    },
}

/// Resource usage of a worker. Includes those descendants whose exit status was collected with a `wait` call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, BorrowDecode)]
pub struct Usage {
    /// Processor time in user mode, in microseconds.
    pub user_us: u64,
    /// Processor time in the kernel, in microseconds.
    pub system_us: u64,
    /// Peak resident memory in KiB. If there were several processes, this is the peak of the largest one.
    pub maxrss_kib: u64,
}

/// A report from the keeper.
///
/// For each successful call to [`Keeper::spawn`](crate::Keeper::spawn),
/// [`Keeper::spawn_template`](crate::Keeper::spawn_template) or [`Keeper::fork`](crate::Keeper::fork), there is either
/// `SpawnFailed`, or `Spawned`, `Exited` and `Reaped` in this order.
#[derive(Debug)]
pub enum Report {
    /// The keeper is running. This is always the first report.
    Started {
        /// True if this kernel does not reparent orphans to the first thread of the new parent process. If so, the
        /// keeper scans all processes on the machine after each exit.
        scan_always: bool,
    },
    /// The worker's program is running.
    Spawned {
        /// Spawn number of the worker.
        worker: u64,
        /// Process ID of the worker.
        pid: u32,
        /// Pidfd of the worker, which identifies the process even if the PID is reused. Becomes readable when
        /// the process exits.
        pidfd: OwnedFd,
        /// The worker's confinement as read back from the kernel.
        observed: Observed,
    },
    /// A process of the worker made a forbidden system call. The keeper kills this process.
    Violation {
        /// Spawn number of the worker.
        worker: u64,
        /// Process ID as seen inside the worker's PID namespace.
        process: u32,
        /// Number of the system call; see [`syscall_name`](crate::syscall_name).
        call: u32,
    },
    /// The start of the worker failed.
    SpawnFailed {
        /// Spawn number of the worker.
        worker: u64,
        /// The step that failed, such as `exec` or `rlimit as`. The step `pidfd` comes from the client, if the
        /// supervisor had no free descriptor for the worker's pidfd.
        step: String,
        /// Error with which the step failed.
        error: io::Error,
    },
    /// The worker is dead. The keeper is killing the worker's remaining descendants.
    Exited {
        /// Spawn number of the worker.
        worker: u64,
        /// Cause of the exit.
        exit: Exit,
        /// Resource usage of the worker.
        usage: Usage,
    },
    /// All descendants of a dead worker are gone.
    Reaped {
        /// Spawn number of the worker.
        worker: u64,
    },
    /// A message from a template.
    Template {
        /// Spawn number of the template.
        worker: u64,
        /// Contents of the message.
        message: TemplateReport,
    },
    /// Reply to [`Keeper::sample`](crate::Keeper::sample).
    Sampled {
        /// Spawn number of the worker.
        worker: u64,
        /// Result of the sample. This is an error if no thread could be sampled.
        result: io::Result<()>,
    },
    /// Reply to [`Keeper::ping`](crate::Keeper::ping).
    Pong,
    /// Some processes were still running two seconds after SIGKILL. The workers to which they belong are nevertheless
    /// reported as `Reaped` next.
    Unkillable {
        /// Number of processes that survived.
        count: u64,
    },
}

/// A message about a template that forks workers; see [`Keeper::fork`](crate::Keeper::fork). The keeper forwards
/// `Status` and `Extend` even after `Ready`.
#[derive(Clone, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub enum TemplateReport {
    /// The template is ready to fork workers.
    Ready,
    /// Text that describes the current state of the initialisation.
    Status(String),
    /// Reason why the template is about to exit. Comes from the template if its start failed, or at any time from the
    /// keeper, if the keeper kills the template because of a protocol error.
    Refused(String),
    /// Requests that the deadline for the start be extended to at least this long from now.
    Extend(Duration),
}

/// A report as encoded for the socket. Corresponds to [`Report`], except that the pidfd of `Spawned` is sent as a
/// descriptor.
#[derive(Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub(crate) enum ReportMessage<'a> {
    Started { scan_always: bool },
    Spawned { worker: u64, pid: u32, observed: Observed },
    Violation { worker: u64, process: u32, call: u32 },
    SpawnFailed { worker: u64, step: &'a str, errno: i32 },
    Exited { worker: u64, exit: Exit, usage: Usage },
    Reaped { worker: u64 },
    Template { worker: u64, message: TemplateReport },
    Unkillable { count: u64 },
    Sampled { worker: u64, errno: i32 },
    Pong,
}
