//! Programs that the bench starts repeatedly: a worker, and the counterparts in bare chains. The programs are
//! separate from the bench, because the bench contains a supervisor and a client. Their pages and relocations would
//! count in each start and each fork.

pub mod echo;
pub mod fork_server;
mod layers;
pub mod worker;

/// Result whose error is printed and ends the program.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Maximum number of bytes per read or write of the bare chain.
pub const READ_BYTES: usize = 256 * 1024;

/// Size of a job for a bare fork server, and of its answer.
pub const JOB_BYTES: usize = 64;

/// First byte of a job that kills its process.
pub const KILLS: u8 = b'k';
