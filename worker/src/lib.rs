//! SDK for workers. A program passes a handler function to [`serve`], which receives jobs, calls the handler and sends
//! the results.
//!
//! ```no_run
//! fn main() -> std::process::ExitCode {
//!     bulkhead_worker::serve(|job, _ctx| Ok(job.payload().to_ascii_uppercase()))
//! }
//! ```
//!
//! `bulkhead-supervisor` starts the worker, runs at most `max_in_flight` jobs in the worker at a time, and
//! kills the worker if a job hangs. `max_in_flight` can change while the worker is running. The SDK starts
//! handler threads when jobs need them, and stops surplus threads after their current job.
//!
//! A handler can block, use much CPU time, crash or leak memory. This affects only the worker process and the jobs in
//! it. [`Server`] supports several operations and state that is initialised once for all jobs. With the `tokio`
//! feature, handlers can be async functions.

mod context;
mod crash_recorder;
mod files;
mod journal;
mod link;
mod log;
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
