//! Protocols between clients, the supervisor and workers. Covers the frames that these processes send over sockets, and
//! the contents of the memory that they share.
//!
//! This crate defines the frames ([`frame`]), their metadata ([`codec`]), the messages of the two protocols
//! ([`client_protocol`], [`worker_protocol`]), the outcomes of jobs ([`outcome`]), and trace contexts ([`trace`]).
//! [`connection`] sends and receives frames over sockets. This crate makes no decisions: other crates handle the
//! admission of jobs and the lifecycle of workers.
//!
//! `docs/protocol.md` describes the wire format for authors of clients in other languages.

pub mod client_protocol;
pub mod codec;
pub mod connection;
pub mod crash_record;
pub mod exit;
mod flat;
pub mod frame;
pub mod in_process;
pub mod job;
pub mod journal;
pub mod limits;
pub mod memory_files;
pub mod outcome;
pub mod program_rules;
pub mod template_protocol;
pub mod text;
pub mod trace;
mod vocabulary;
pub mod worker_protocol;

pub use job::{JobId, JobOptions, Priority};
pub use outcome::{CrashReason, Executed, Fault, HandlerFailure, Outcome, RejectReason, Verdict};
pub use vocabulary::Vocabulary;
