//! What crosses a socket between a client, the supervisor and a worker.
//!
//! This crate owns the words and bytes that two processes must agree on: frames ([`frame`]), their
//! metadata ([`codec`]), the messages of the two protocols ([`client_protocol`],
//! [`worker_protocol`]), and what becomes of a job ([`outcome`]), and to which
//! trace it belongs ([`trace`]). [`connection`] turns sockets into
//! frames and back. It decides nothing: admission and the life of workers are elsewhere.
//!
//! `docs/protocol.md` describes the same bytes for people who write a client in another language.

pub mod client_protocol;
pub mod codec;
pub mod connection;
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

pub use job::{JobId, Priority};
pub use outcome::{CrashReason, Executed, Fault, HandlerFailure, Outcome, RejectReason, Verdict};
pub use vocabulary::Vocabulary;
