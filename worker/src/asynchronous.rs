//! Async handlers (`tokio` feature).
//!
//! As in every worker, each job in flight occupies one handler thread. The thread blocks on the handler's
//! future, which need not be `Send`. A blocked thread uses little memory, because most of its stack is never
//! touched. One runtime per worker drives timers and I/O. It starts after `init` and before the first job, because
//! it can need sockets, which a strictly confined worker cannot create later.
//!
//! When a job is cancelled or its deadline passes, the SDK drops the future at the next `await`. This stops
//! the handler, so that the supervisor does not have to kill the worker.

use std::process::ExitCode;
use std::sync::OnceLock;

use tokio::runtime::Runtime;

use crate::context::{Ctx, Job};
use crate::reply::HandlerError;
use crate::server::Server;

/// Serves jobs of all operations with one async function; see [`crate::serve`].
///
/// ```no_run
/// use std::time::Duration;
///
/// fn main() -> std::process::ExitCode {
///     bulkhead_worker::serve_async(async |job, _ctx| {
///         tokio::time::sleep(Duration::from_millis(10)).await;
///         Ok(job.payload().to_vec())
///     })
/// }
/// ```
pub fn serve_async<R, F>(handler: F) -> ExitCode
where
    R: Into<Vec<u8>>,
    F: AsyncFn(&Job, &Ctx) -> Result<R, HandlerError> + Send + Sync + 'static,
{
    Server::new().async_handler(handler).serve()
}

impl<S: Send + Sync + 'static, Stage> Server<S, Stage> {
    /// Sets an async handler for one operation. The future is dropped when the job is cancelled.
    #[must_use]
    pub fn async_operation<R, F>(self, name: impl Into<String>, handler: F) -> Server<S>
    where
        R: Into<Vec<u8>>,
        F: AsyncFn(&Job, &Ctx<S>) -> Result<R, HandlerError> + Send + Sync + 'static,
    {
        self.operation(name, blocking(handler)).before_seal(start_runtime)
    }

    /// Sets an async handler for all operations without a specific handler; see [`Server::handler`].
    #[must_use]
    pub fn async_handler<R, F>(self, handler: F) -> Server<S>
    where
        R: Into<Vec<u8>>,
        F: AsyncFn(&Job, &Ctx<S>) -> Result<R, HandlerError> + Send + Sync + 'static,
    {
        self.handler(blocking(handler)).before_seal(start_runtime)
    }
}

fn blocking<S, R, F>(handler: F) -> impl Fn(&Job, &Ctx<S>) -> Result<R, HandlerError> + Send + Sync + 'static
where
    S: Send + Sync + 'static,
    F: AsyncFn(&Job, &Ctx<S>) -> Result<R, HandlerError> + Send + Sync + 'static,
{
    move |job, ctx| {
        runtime()?.block_on(async {
            tokio::select! {
                result = handler(job, ctx) => result,
                () = ctx.metadata.handle.cancelled() => {
                    Err(HandlerError::new("cancelled", "the client is no longer waiting for the job"))
                }
            }
        })
    }
}

fn start_runtime() -> Result<(), HandlerError> {
    let failed =
        |error| HandlerError::new("async_runtime", format!("the async runtime cannot start: {error}"));
    runtime().map(drop).map_err(failed)
}

/// Returns the runtime that all async handlers of this worker share. The first call starts the runtime.
fn runtime() -> std::io::Result<&'static Runtime> {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    if RUNTIME.get().is_none() {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        // If another thread has already stored its runtime, this drops the unused one. That is safe here,
        // outside of any async context.
        let _ = RUNTIME.set(runtime);
    }
    RUNTIME.get().ok_or_else(|| std::io::Error::other("the async runtime was not started"))
}
