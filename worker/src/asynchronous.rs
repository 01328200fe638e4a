//! Handlers that are async functions, with feature `tokio`.
//!
//! Each job in flight has a handler thread, as in every worker, which waits for the handler's future: it
//! costs a stack that is hardly touched, and the future need not be `Send`. What the future waits for is
//! driven by one runtime of the worker's own.
//!
//! When a job is cancelled or past its deadline, its future is dropped at its next `await`: that is how an
//! async handler yields, and what spares the worker from being killed.

use std::process::ExitCode;
use std::sync::OnceLock;

use tokio::runtime::Runtime;

use crate::context::{Ctx, Job};
use crate::reply::HandlerError;
use crate::server::Server;

/// Serves jobs with one async function; see [`crate::serve`].
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
    /// Serves one operation with an async function. A job that is cancelled has its future dropped.
    #[must_use]
    pub fn async_operation<R, F>(self, name: impl Into<String>, handler: F) -> Server<S>
    where
        R: Into<Vec<u8>>,
        F: AsyncFn(&Job, &Ctx<S>) -> Result<R, HandlerError> + Send + Sync + 'static,
    {
        self.operation(name, blocking(handler))
    }

    /// Serves every operation that has no handler of its own with an async function; see
    /// [`Server::handler`].
    #[must_use]
    pub fn async_handler<R, F>(self, handler: F) -> Server<S>
    where
        R: Into<Vec<u8>>,
        F: AsyncFn(&Job, &Ctx<S>) -> Result<R, HandlerError> + Send + Sync + 'static,
    {
        self.handler(blocking(handler))
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
                () = ctx.order.handle.cancelled() => {
                    Err(HandlerError::new("cancelled", "its client no longer waited"))
                }
            }
        })
    }
}

/// The runtime of all async handlers of this worker, started with the first job.
fn runtime() -> std::io::Result<&'static Runtime> {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    if RUNTIME.get().is_none() {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        // Another thread may have been quicker; one of the two is dropped outside of any runtime.
        let _ = RUNTIME.set(runtime);
    }
    RUNTIME.get().ok_or_else(|| std::io::Error::other("no runtime"))
}
