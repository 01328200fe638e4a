//! The journal of a worker: a small file in memory, made by the supervisor, into which the worker puts what it has
//! answered and not sent yet. It is read when the worker is gone, and not before: so no job that was done loses its
//! result because answers leave together. It says as well how many of the jobs that came were begun, in the order they
//! came: what came behind the last of them is given to another worker.
//!
//! ```text
//! offset  0                       8                 64
//!         bytes of frames, u64    jobs begun, u64   frames, as they are sent (little-endian throughout)
//! ```

/// Bytes of the whole file.
pub const JOURNAL_BYTES: usize = 68 * 1024;

/// Where it stands how many jobs were begun.
pub const BEGUN_AT: usize = 8;

/// Where the frames begin.
pub const FRAMES_AT: usize = 64;

/// Bytes of frames that fit.
pub const FRAMES_BYTES_MAX: usize = JOURNAL_BYTES - FRAMES_AT;
