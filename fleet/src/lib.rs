//! Durable jobs on several hosts, over NATS JetStream.
//!
//! A submitter publishes a job to one of the servers' streams. On each host, an [`agent`] takes jobs for the bulkheads
//! of its supervisor and records each outcome in a ledger. The ledger is authoritative; acknowledgements only remove
//! messages from the stream. Each write specifies the record that it replaces, so only one writer succeeds. A job that
//! is not idempotent never begins twice.

pub mod agent;
pub mod decide;
mod fleet;
mod format;
mod job;
pub mod names;
pub mod operate;
mod random;
pub mod record;
mod server;
pub mod settings;

pub use decide::Faults;
pub use fleet::{Fleet, FleetError, FleetJob, Submitted};
pub use job::{DEADLINE_DEFAULT, ID_BYTES_MAX, JobOptions};
pub use server::connection::{ConnectError, check_files};
pub use server::streams::{Finding, InitError};
