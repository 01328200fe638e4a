//! The journal of a worker: a small file in memory, made by the supervisor, into which the worker puts what it has
//! answered and not sent yet. It is read when the worker is gone, and not before: so no job that was done loses its
//! result because answers leave together. It says as well how many of the jobs that came were begun, in the order they
//! came: what came behind the last of them is given to another worker, also while this one lives. For that the
//! supervisor writes how many of the jobs that it sent it takes back unless they were begun.
//!
//! ```text
//! offset  0                       8                 16                 24                  64
//!         bytes of frames, u64    jobs begun, u64   last beat, u64     taken back, u64     frames, as they are sent
//! ```
//!
//! All numbers are little-endian. The last beat is a time of `CLOCK_MONOTONIC` in nanoseconds, and stands in place of
//! heartbeats: it is looked up when the worker has been silent for long, so that an idle worker wakes nothing.

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
