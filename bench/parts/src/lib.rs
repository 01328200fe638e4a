//! Programs that the bench starts repeatedly: a worker, and its counterparts in bare chains. These programs
//! are separate from the bench program, because the bench's supervisor and client would add pages and
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
