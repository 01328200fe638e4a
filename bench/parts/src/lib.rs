//! Code of `bulkhead-bench-parts`, the program that `bulkhead-bench` starts for each part of a chain: the worker, the
//! echo process or the bare fork server. `main` runs the requested part. `bulkhead-bench` shares the constants and takes
//! all measurements. The program is separate, because the supervisor and client in `bulkhead-bench` would add pages and
//! relocations to each start and each fork.

pub mod echo;
pub mod fork_server;
mod layers;
pub mod worker;

/// Result type of `main`. If `main` returns an error, the error is printed and the program exits.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Maximum number of bytes per read or write in the bare chain, which forwards requests without a supervisor.
pub const READ_BYTES: usize = 256 * 1024;

/// Size of each job sent to the bare fork server and of each reply, in bytes.
pub const JOB_BYTES: usize = 64;

/// If the first byte of a job has this value, the process that runs the job kills itself.
pub const KILLS: u8 = b'k';
