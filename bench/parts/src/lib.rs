//! Programs that the bench starts repeatedly: a worker, and its counterparts in bare chains. They are
//! separate from the bench program, which contains a supervisor and a client, because its pages and
//! relocations would make each start and each fork slower.

pub mod echo;
pub mod fork_server;
mod layers;
pub mod worker;

/// Result type of `main`. An error is printed and ends the program.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Maximum number of bytes per read or write in the bare chain.
pub const READ_BYTES: usize = 256 * 1024;

/// Size of a job for the bare fork server and of its reply, in bytes.
pub const JOB_BYTES: usize = 64;

/// First byte of a job that makes its process kill itself.
pub const KILLS: u8 = b'k';
