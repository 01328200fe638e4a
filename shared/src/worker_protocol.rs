//! The messages between the supervisor and a worker, version 1: frozen structures, one per kind of
//! frame. A worker opens with [`Hello`](crate::client_protocol::Hello) in the role of a worker; the
//! number of every frame about a job is the job's.
//!
//! `CANCEL_JOB`, `DRAIN`, `READY`, `HEARTBEAT` and `STOPPING` have [`Empty`] metadata;
//! `RESULT` too, with the result as payload.

use bincode::{BorrowDecode, Encode};

use crate::flat::flat;

/// The environment variable that names the descriptor of the worker's link, a connected socket.
pub const LINK_VARIABLE: &str = "BULKHEAD_LINK_FD";

/// The environment variable that names a descriptor of what a host loads or runs, where its user cannot reach that by
/// its path.
pub const PROGRAM_VARIABLE: &str = "BULKHEAD_PROGRAM_FD";

/// What a worker can say of itself in its hello.
pub mod capability {
    /// Heartbeats come from a thread apart from the handlers, so that they can be demanded while jobs
    /// run.
    pub const DISPATCH_THREAD: u64 = 1;

    /// Understands [`LIMITS`](crate::frame::kind::LIMITS): as many jobs as the last one said may come at
    /// once. A worker without it is held to its welcome.
    pub const RESIZE: u64 = 2;

    /// Takes more jobs than it may run, and begins jobs in the order of arrival. Begins a job only when the previous
    /// answer is on its link or in its [journal](crate::journal), and only if the journal does not say that the job was
    /// taken back. (4 meant the same in an earlier protocol, in which the supervisor asked for jobs back; it is not
    /// used again.)
    pub const CLAIMS: u64 = 32;

    /// Takes [memory files](crate::memory_files): it reads its link by `recvmsg(2)`, as long as it lives.
    pub const MEMORY_FILES: u64 = 16;

    /// Can write the time of its last heartbeat into its [journal](crate::journal) instead of sending one.
    pub const JOURNAL_BEATS: u64 = 8;
}

/// What the supervisor can say of itself in a worker's welcome.
pub mod welcome_capability {
    /// Looks up heartbeats in the [journal](crate::journal): none are to be sent.
    pub const JOURNAL_BEATS: u64 = 1;
}

/// [`WORKER_WELCOME`](crate::frame::kind::WORKER_WELCOME): the worker's identity and what is expected of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub struct WorkerWelcome<'a> {
    /// The version that both will speak.
    pub version: u16,
    /// The largest frame accepted, in bytes behind the header.
    pub frame_bytes_max: u32,
    /// A sum of [`welcome_capability`].
    pub capabilities: u64,
    /// Which of the bulkhead's processes this is.
    pub slot: u32,
    /// Which incarnation of it.
    pub generation: u32,
    /// How many jobs the worker will be given at once, until [`Limits`] say otherwise.
    pub max_in_flight: u32,
    /// How often it must send a heartbeat, in milliseconds; 0 for never.
    pub heartbeat_ms: u32,
    /// The largest result accepted, in bytes; what is larger is to be reported as `failed` with the
    /// code [`RESULT_TOO_LARGE`](crate::outcome::RESULT_TOO_LARGE).
    pub result_bytes_max: u64,
    /// The bulkhead's name.
    pub bulkhead: &'a str,
}

/// The metadata of a frame that says all by its kind and number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Encode, BorrowDecode)]
pub struct Empty;

/// [`JOB`](crate::frame::kind::JOB): run this; the payload follows the metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Job<'a> {
    /// What to do; may be empty.
    pub operation: &'a str,
    /// The tenant; may be empty.
    pub tenant: &'a str,
    /// The time that remains until the deadline, in microseconds.
    pub remaining_us: u64,
}

flat!(Job: [operation, tenant], [remaining_us: u64], []);

/// [`LIMITS`](crate::frame::kind::LIMITS): what the welcome said has changed. Comes at any time after the
/// welcome, and never to a worker without [`capability::RESIZE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub struct Limits {
    /// How many jobs the worker will be given at once from now on; 0 for none. Those that it has are not
    /// taken back.
    pub max_in_flight: u32,
}

/// [`FAILED`](crate::frame::kind::FAILED): the handler cannot do the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failed<'a> {
    /// A short word for programs.
    pub code: &'a str,
    /// A sentence for people.
    pub message: &'a str,
    /// 1 if the same job may succeed later.
    pub retryable: u8,
    /// 1 the caller's fault, 2 the dependency's.
    pub fault: u8,
}

flat!(Failed: [code, message], [retryable: u8, fault: u8], []);

/// [`PROGRESSED`](crate::frame::kind::PROGRESSED): how far a job is; the client gets it as
/// [`Progress`](crate::client_protocol::Progress).
pub type Progressed<'a> = crate::client_protocol::Progress<'a>;

/// [`STATUS`](crate::frame::kind::STATUS): what the worker is doing, for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub struct Status<'a> {
    /// A few words. In answer to a failed initialisation, why it failed.
    pub text: &'a str,
}

/// [`EXTEND_START`](crate::frame::kind::EXTEND_START): initialisation needs more time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub struct Extend {
    /// How much longer than now, in milliseconds; at most the bulkhead's `start.ready` each time.
    pub more_ms: u32,
}

/// [`PROGRAM_CRASHED`](crate::frame::kind::PROGRAM_CRASHED): the program that ran the job died by a
/// signal; the worker itself is well.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub struct ProgramCrashed<'a> {
    /// The signal's number, from 1 to 64.
    pub signal: i32,
    /// A sentence for people, with the tail of what the program wrote to its standard error.
    pub message: &'a str,
}
