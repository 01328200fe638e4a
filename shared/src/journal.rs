//! The journal of a worker: a small memory file, made by the supervisor, in which the worker keeps answers that are not
//! sent yet. The supervisor reads these answers only after the worker's exit, so that no finished job loses its result
//! although answers are sent in batches. The journal also holds the number of jobs that the worker has begun, in the
//! order of arrival. Later jobs can be given to another worker, also while this worker lives. For this the supervisor
//! writes the number up to which unbegun jobs are taken back.
//!
//! ```text
//! offset  0                       8                 16                 24                  64
//!         bytes of frames, u64    jobs begun, u64   last beat, u64     taken back, u64     frames, as they are sent
//! ```
//!
//! All numbers are little-endian. The last beat is a time of `CLOCK_MONOTONIC` in nanoseconds and replaces heartbeats.
//! The supervisor reads the time only after a long silence of the worker, so that an idle worker wakes no other
//! process.

/// Bytes of the whole file.
pub const JOURNAL_BYTES: usize = 68 * 1024;

/// Where it stands how many jobs were begun.
pub const BEGUN_AT: usize = 8;

/// Where the time of the last beat stands.
pub const BEAT_AT: usize = 16;

/// Offset of the number up to which jobs were taken back. The supervisor writes it, and nothing else.
pub const TAKEN_AT: usize = 24;

/// Where the frames begin.
pub const FRAMES_AT: usize = 64;

/// Bytes of frames that fit.
pub const FRAMES_BYTES_MAX: usize = JOURNAL_BYTES - FRAMES_AT;
