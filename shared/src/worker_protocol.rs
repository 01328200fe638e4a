//! The messages between the supervisor and a worker, version 1. The structures are frozen, one per kind of
//! frame. A worker opens with [`Hello`](crate::client_protocol::Hello) in the role of a worker. The number of
//! every frame about a job is the job's number.
//!
//! `CANCEL_JOB`, `DRAIN`, `READY`, `HEARTBEAT` and `STOPPING` have [`Empty`] metadata. So has `RESULT`, with
//! the result as payload.

use bincode::{BorrowDecode, Encode};

use crate::flat::flat;

/// Environment variable with the descriptor number of the worker's link, a connected socket.
pub const LINK_VARIABLE: &str = "BULKHEAD_LINK_FD";

/// Environment variable with the descriptor number of the program or library that a host runs. Set if the
/// worker's user cannot reach the path.
pub const PROGRAM_VARIABLE: &str = "BULKHEAD_PROGRAM_FD";

/// Capabilities of a worker, sent in its hello.
pub mod capability {
    /// Sends heartbeats from a separate thread, so that the supervisor can require them while jobs run.
    pub const DISPATCH_THREAD: u64 = 1;

    /// Supports [`LIMITS`](crate::frame::kind::LIMITS): the last one sets the number of concurrent jobs.
    /// Other workers keep the limit of their welcome.
    pub const RESIZE: u64 = 2;

    /// Accepts more jobs than it runs at once, and begins jobs in the order of arrival. Begins a job only
    /// when the previous reply is on its link or in its [journal](crate::journal), and only if the journal
    /// does not mark the job as recalled. (In an earlier protocol, 4 had this meaning, and the supervisor
    /// asked for jobs back. 4 is not reused.)
    pub const PREFETCH: u64 = 32;

    /// Supports [memory files](crate::memory_files), and therefore always reads its link with `recvmsg(2)`.
    pub const MEMORY_FILES: u64 = 16;

    /// Can write the time of its last heartbeat into its [journal](crate::journal) instead of sending a
    /// heartbeat.
    pub const JOURNAL_HEARTBEATS: u64 = 8;
}

/// Capabilities of the supervisor, sent in a worker's welcome.
pub mod welcome_capability {
    /// Reads heartbeat times in the [journal](crate::journal). The worker must not send heartbeats.
    pub const JOURNAL_HEARTBEATS: u64 = 1;
}

/// [`WORKER_WELCOME`](crate::frame::kind::WORKER_WELCOME): identity and limits of the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub struct WorkerWelcome<'a> {
    /// Protocol version that both sides will use.
    pub version: u16,
    /// Maximum size of a frame that the supervisor accepts, in bytes after the header.
    pub frame_bytes_max: u32,
    /// Sum of [`welcome_capability`].
    pub capabilities: u64,
    /// Slot of the worker in the bulkhead.
    pub slot: u32,
    /// Generation of the worker.
    pub generation: u32,
    /// Maximum number of concurrent jobs, until a [`Limits`] changes it.
    pub max_in_flight: u32,
    /// Interval between heartbeats in milliseconds; 0 for no heartbeats.
    pub heartbeat_ms: u32,
    /// Maximum size of a result in bytes. The worker must report a larger result as `failed` with the code
    /// [`RESULT_TOO_LARGE`](crate::outcome::RESULT_TOO_LARGE).
    pub result_bytes_max: u64,
    /// Name of the bulkhead.
    pub bulkhead: &'a str,
}

/// Empty metadata, for frames that need only kind and number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Encode, BorrowDecode)]
pub struct Empty;

/// [`JOB`](crate::frame::kind::JOB): a job to run. The payload follows the metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Job<'a> {
    /// Operation for the handler; can be empty.
    pub operation: &'a str,
    /// Tenant; can be empty.
    pub tenant: &'a str,
    /// Time until the deadline, in microseconds.
    pub remaining_us: u64,
}

flat!(Job: [operation, tenant], [remaining_us: u64], []);

/// [`LIMITS`](crate::frame::kind::LIMITS): a change of the welcome's limits. Sent at any time after the
/// welcome, but never to a worker without [`capability::RESIZE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub struct Limits {
    /// New maximum number of concurrent jobs; can be 0. Jobs that the worker already has are not recalled.
    pub max_in_flight: u32,
}

/// [`FAILED`](crate::frame::kind::FAILED): an error from the handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failed<'a> {
    /// Error code for programs, a short word.
    pub code: &'a str,
    /// Message for people.
    pub message: &'a str,
    /// 1 if the same job may succeed later.
    pub retryable: u8,
    /// 1 if the caller is at fault, 2 if the dependency is.
    pub fault: u8,
}

flat!(Failed: [code, message], [retryable: u8, fault: u8], []);

/// [`PROGRESSED`](crate::frame::kind::PROGRESSED): progress of a job. The client gets it as
/// [`Progress`](crate::client_protocol::Progress).
pub type Progressed<'a> = crate::client_protocol::Progress<'a>;

/// [`STATUS`](crate::frame::kind::STATUS): current activity of the worker, for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub struct Status<'a> {
    /// Short text. After a failed initialisation, the reason.
    pub text: &'a str,
}

/// [`EXTEND_START`](crate::frame::kind::EXTEND_START): the initialisation needs more time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub struct Extend {
    /// Additional time from now, in milliseconds; at most the bulkhead's `start.ready` per frame.
    pub more_ms: u32,
}

/// [`PROGRAM_CRASHED`](crate::frame::kind::PROGRAM_CRASHED): a signal killed the program that ran the job.
/// The worker itself is unaffected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub struct ProgramCrashed<'a> {
    /// Signal number, from 1 to 64.
    pub signal: i32,
    /// Message for people, with the tail of the program's standard error.
    pub message: &'a str,
}
