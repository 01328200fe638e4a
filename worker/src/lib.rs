//! The worker SDK: a handler is a function, [`serve`] does the rest.
//!
//! ```no_run
//! fn main() -> std::process::ExitCode {
//!     bulkhead_worker::serve(|job, _ctx| Ok(job.payload().to_ascii_uppercase()))
//! }
//! ```
//!
//! A worker is started by `bulkhead-supervisor`, which gives it at most `max_in_flight` jobs at a time,
//! and kills it when a job in it does not end. That number may change while the worker runs: handler threads
//! are started as jobs need them, and those that are too many end with the job they run. So a handler may
//! block, compute, crash and leak: it costs this process and the jobs in it. [`Server`] has more to offer:
//! several operations, and something to prepare once for all jobs. With feature `tokio`, handlers may be
//! async functions.

mod context;
mod files;
mod journal;
mod link;
mod ownership;
mod pool;
mod progress;
mod reply;
mod rules;
mod seal;
mod server;
mod template;

#[cfg(feature = "tokio")]
mod asynchronous;
#[cfg(feature = "host")]
#[doc(hidden)]
pub mod host;

#[cfg(feature = "tokio")]
pub use asynchronous::serve_async;
pub use bulkhead_shared::{Fault, JobId};
pub use context::{Ctx, Job, StartCtx};
pub use files::{MappedPayload, ResultInPlace};
pub use reply::{HandlerError, Reply};
pub use server::{Blank, Configured, Server, serve};
