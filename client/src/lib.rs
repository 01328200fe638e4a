//! Client library that submits jobs to a `bulkhead-supervisor`.
//!
//! ```no_run
//! use std::time::Duration;
//!
//! # async fn example(picture: Vec<u8>) -> Result<(), Box<dyn std::error::Error>> {
//! let client = bulkhead_client::Client::connect("/run/bulkhead/jobs.sock").await?;
//! let reply = client
//!     .job("thumbnail", picture)
//!     .operation("decode")
//!     .deadline(Duration::from_millis(500))
//!     .tenant("acme")
//!     .idempotent(true)
//!     .send()
//!     .await?;
//! println!("{} bytes after {:?}", reply.payload().len(), reply.outcome().ran);
//! # Ok(())
//! # }
//! ```
//!
//! A client has a single connection, shared by all clones of the client and any number of concurrent jobs.
//! Dropping a job's future or handle cancels the job. When the connection is lost, the client reconnects, and
//! sends unsent and idempotent jobs again; all other jobs end as [`JobError::Disconnected`]. [`Job::retry`]
//! retries rejected jobs within a budget. [`blocking`] provides the same functions without async.

pub mod blocking;
mod budget;
mod connection;
mod handle;
mod job;
mod job_request;
mod leases;
mod mapped;
mod reply;
mod requests;
mod success;
mod transport;
mod waiters;

pub use bulkhead_shared::limits::PAYLOAD_BYTES_CEILING;
pub use bulkhead_shared::{
    CrashReason, Executed, Fault, HandlerFailure, JobId, Outcome, Priority, RejectReason, Verdict,
};
pub use connection::{Client, ConnectError, Connector};
pub use handle::JobHandle;
pub use job::Job;
pub use mapped::MappedResult;
pub use reply::{Failure, JobError, Progress, Reply};
