//! The journal of a worker: a small memory file, made by the supervisor, in which the worker keeps unsent
//! replies. The supervisor reads these replies only after the worker's exit. So no finished job loses its
//! result, although replies are sent in batches.
//!
//! The journal also holds the number of jobs that the worker has begun, in the order of arrival. The
//! supervisor can recall later jobs and give them to another worker, even while this worker lives. For a
//! recall the supervisor writes the arrival number up to which unbegun jobs are recalled.
//!
//! ```text
//! offset  0                       8                 16                 24                  64
//!         bytes of frames, u64    jobs begun, u64   last beat, u64     taken back, u64     frames, as they are sent
//! ```
//!
//! All numbers are little-endian. The last beat is a time of `CLOCK_MONOTONIC` in nanoseconds and replaces
//! heartbeats. The supervisor reads the time only after a long silence of the worker, so that an idle worker
//! wakes no other process.

/// Size of the file in bytes.
pub const JOURNAL_BYTES: usize = 68 * 1024;

/// Offset of the number of begun jobs.
pub const BEGUN_OFFSET: usize = 8;

/// Offset of the time of the last heartbeat.
pub const HEARTBEAT_OFFSET: usize = 16;

/// Offset of the arrival number up to which jobs were recalled. The supervisor writes only this number.
pub const RECALLED_OFFSET: usize = 24;

/// Offset of the frames.
pub const FRAMES_OFFSET: usize = 64;

/// Maximum total size of frames, in bytes.
pub const FRAMES_BYTES_MAX: usize = JOURNAL_BYTES - FRAMES_OFFSET;
