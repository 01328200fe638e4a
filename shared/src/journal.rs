//! The journal of a worker: a small memory file, created by the supervisor, in which the worker stores replies that it
//! has not sent yet. The supervisor reads these replies only after the worker has exited. A worker can therefore send
//! replies in batches, and no results are lost if it dies.
//!
//! The journal also contains the arrival number of the last job that the worker has begun. The supervisor can
//! recall jobs that arrived later and send them to another worker, even while the first worker is running.
//! For a recall, the supervisor writes the arrival number of the last recalled job into the journal.
//!
//! ```text
//! offset  0                       8                 16                 24                  64
//!         bytes of frames, u64    last begun, u64   last beat, u64     last recalled, u64  frames, as they are sent
//! ```
//!
//! All numbers are little-endian. `last beat` is the `CLOCK_MONOTONIC` time of the last heartbeat in
//! nanoseconds, and replaces heartbeat frames. The supervisor reads this time only if no frame has arrived
//! from the worker for a long time. An idle worker therefore does not wake the supervisor.

/// Size of a journal in bytes.
pub const JOURNAL_BYTES: usize = 68 * 1024;

/// Offset of the arrival number of the job that the worker has begun most recently.
pub const BEGUN_OFFSET: usize = 8;

/// Offset of the time of the last heartbeat.
pub const HEARTBEAT_OFFSET: usize = 16;

/// Offset of the arrival number of the last recalled job. This number is the only part of the journal that the
/// supervisor writes.
pub const RECALLED_OFFSET: usize = 24;

/// Offset of the frames that the worker has not sent yet.
pub const FRAMES_OFFSET: usize = 64;

/// Maximum total size of the frames in a journal, in bytes.
pub const FRAMES_BYTES_MAX: usize = JOURNAL_BYTES - FRAMES_OFFSET;
