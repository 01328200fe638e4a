//! Messages between the supervisor and a worker, protocol version 1. The structure of each kind of frame is frozen. A
//! worker's first frame is a [`Hello`](crate::client_protocol::Hello) with the worker role. The number of every frame
//! about a job is the job ID.
//!
//! Frames of the kinds `CANCEL_JOB`, `DRAIN`, `READY`, `HEARTBEAT`, `STOPPING` and `RESULT` have [`Empty`]
//! metadata. The payload of `RESULT` is the result of the job.

use bincode::{BorrowDecode, Encode};

use crate::flat::flat;

/// Environment variable that contains the descriptor number of the worker's link, a connected socket.
pub const LINK_VARIABLE: &str = "BULKHEAD_LINK_FD";

/// Environment variable that contains the descriptor number of the program or library that a host runs. Set only if
/// the worker's user cannot access the program or library by its path.
pub const PROGRAM_VARIABLE: &str = "BULKHEAD_PROGRAM_FD";

/// Capabilities of a worker, sent in its hello.
pub mod capability {
    /// The worker sends heartbeats from a separate thread. The supervisor can therefore require heartbeats while
    /// jobs run.
    pub const DISPATCH_THREAD: u64 = 1;

    /// The worker supports [`LIMITS`](crate::frame::kind::LIMITS) frames, which change the maximum number of concurrent
    /// jobs. Without this capability, the maximum never changes.
    pub const RESIZE: u64 = 2;

    /// The worker accepts more jobs than it can run at once, and begins them in order of arrival. It begins a job
    /// only after the previous reply was sent or written to the [journal](crate::journal), and only if the journal
    /// does not mark the job as recalled. (The value 4 must not be reused. It meant prefetching in an earlier
    /// version of the protocol, in which the supervisor had to ask for jobs back.)
    pub const PREFETCH: u64 = 32;

    /// The worker supports [memory files](crate::memory_files). The worker reads its link only with `recvmsg(2)`,
    /// because messages can contain descriptors.
    pub const MEMORY_FILES: u64 = 16;

    /// The worker can write the time of its last heartbeat into its [journal](crate::journal) instead of sending a
    /// heartbeat.
    pub const JOURNAL_HEARTBEATS: u64 = 8;

    /// The worker writes a [crash record](crate::crash_record) if a signal kills it. The record follows the journal
    /// in the same memory file, which the supervisor makes large enough for both.
    pub const CRASH_RECORDS: u64 = 64;

    /// The worker writes the stacks of its threads as text when it receives [`STACK_SIGNAL`](super::STACK_SIGNAL).
    /// The worker writes the text with `write(2)` to the memory file of its [journal](crate::journal). The
    /// supervisor sets the file offset before each signal, and makes the file large enough for a crash record.
    pub const STACK_TEXT: u64 = 128;
}

/// Number of the signal that tells a worker to write the stacks of its threads. Applies only to workers with
/// [`capability::STACK_TEXT`].
pub const STACK_SIGNAL: i32 = 62;

/// Capabilities of the supervisor, sent in a worker's welcome.
pub mod welcome_capability {
    /// The supervisor reads heartbeat times from the [journal](crate::journal). The worker must therefore not send
    /// heartbeat frames.
    pub const JOURNAL_HEARTBEATS: u64 = 1;
}

/// [`WORKER_WELCOME`](crate::frame::kind::WORKER_WELCOME): identity and limits of the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub struct WorkerWelcome<'a> {
    /// Protocol version that both sides will use.
    pub version: u16,
    /// Maximum size of a frame that the supervisor accepts, in bytes, excluding the header.
    pub frame_bytes_max: u32,
    /// Bit mask of the supervisor's [`welcome_capability`] values.
    pub capabilities: u64,
    /// Index of the worker's slot in the bulkhead.
    pub slot: u32,
    /// Generation of the worker, which distinguishes the worker from earlier workers in the same slot.
    pub generation: u32,
    /// Initial maximum number of concurrent jobs. A [`Limits`] message can change the maximum.
    pub max_in_flight: u32,
    /// Interval between heartbeats in milliseconds, or 0 to disable heartbeats.
    pub heartbeat_ms: u32,
    /// Maximum size of a result in bytes. The worker must report a larger result as `failed` with the code
    /// [`RESULT_TOO_LARGE`](crate::outcome::RESULT_TOO_LARGE).
    pub result_bytes_max: u64,
    /// Name of the bulkhead.
    pub bulkhead: &'a str,
}

/// Empty metadata, for kinds of frames that have no fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Encode, BorrowDecode)]
pub struct Empty;

/// [`JOB`](crate::frame::kind::JOB): a job to run. The payload follows the metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Job<'a> {
    /// Operation that the handler performs, possibly empty.
    pub operation: &'a str,
    /// Tenant that the job belongs to. Empty if the job has no tenant.
    pub tenant: &'a str,
    /// Time until the deadline, in microseconds.
    pub remaining_us: u64,
}

flat!(Job: [operation, tenant], [remaining_us: u64], []);

/// [`LIMITS`](crate::frame::kind::LIMITS): changes limits that were set by the welcome message. The supervisor can send
/// this frame at any time after the welcome, but only to a worker with [`capability::RESIZE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub struct Limits {
    /// New maximum number of concurrent jobs, possibly 0. Jobs already sent to the worker are not recalled.
    pub max_in_flight: u32,
}

/// [`FAILED`](crate::frame::kind::FAILED): an error from the handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failed<'a> {
    /// Short, machine-readable error code.
    pub code: &'a str,
    /// Human-readable message.
    pub message: &'a str,
    /// 1 if resubmitting the job may succeed, otherwise 0.
    pub retryable: u8,
    /// 1 if the caller is at fault, or 2 if the dependency is at fault.
    pub fault: u8,
}

flat!(Failed: [code, message], [retryable: u8, fault: u8], []);

/// [`PROGRESSED`](crate::frame::kind::PROGRESSED): progress of a job. The supervisor forwards the progress to the
/// client as [`Progress`](crate::client_protocol::Progress).
pub type Progressed<'a> = crate::client_protocol::Progress<'a>;

/// [`STATUS`](crate::frame::kind::STATUS): human-readable description of the worker's current activity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub struct Status<'a> {
    /// Short description of the activity, or the reason why the initialisation failed.
    pub text: &'a str,
}

/// [`EXTEND_START`](crate::frame::kind::EXTEND_START): the worker needs more time for its initialisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub struct Extend {
    /// New time limit for the rest of the initialisation, in milliseconds. Must not exceed the value of the bulkhead's
    /// `start.ready` key.
    pub more_ms: u32,
}

/// [`PROGRAM_CRASHED`](crate::frame::kind::PROGRAM_CRASHED): a signal killed the program that ran the job.
/// The worker itself is unaffected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub struct ProgramCrashed<'a> {
    /// Signal number, from 1 to 64.
    pub signal: i32,
    /// Human-readable message that includes the end of the program's standard error output.
    pub message: &'a str,
}
