//! What the bench starts again and again, in a program of its own: a worker, and what bare chains have in its place. The
//! bench itself holds a supervisor and a client, whose pages and relocations would count in each start and each fork.

pub mod echo;
pub mod fork_server;
mod layers;
pub mod worker;

/// Any failure; it is told and ends the program.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// One read or write of the bare chain moves at most this much.
pub const READ_BYTES: usize = 256 * 1024;

/// Bytes of a job for a bare fork server, and of its answer.
pub const JOB_BYTES: usize = 64;

/// The first byte of a job that kills its process.
pub const KILLS: u8 = b'k';
