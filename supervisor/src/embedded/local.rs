//! Runs the data plane of an embedded supervisor on the caller's thread, but only inside `run_until` or `shutdown`. The
//! control plane and the keeper run separately. `embedded` starts the parts, and `Supervisor` there uses a thread for
//! the data plane instead.

use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;

use bulkhead_client::Client;
use bulkhead_dataplane::DataPlane;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::parts::{CombinedWaker, PartWaker};
use super::{Ready, check_owner, connector};
use crate::supervisor::RunError;

/// Maximum number of consecutive event loop iterations that serve only in-process clients. The next iteration
/// also serves sockets and timers.
const CLIENT_ITERATIONS_MAX: usize = 16;

/// Maximum number of polls before yielding to other tasks of the runtime.
const POLLS_MAX: usize = 16;

/// A supervisor in the current process whose data plane runs on the caller's thread; see
/// [`super::Builder::start_local`].
///
/// The data plane only makes progress inside [`LocalSupervisor::run_until`]. At other times, no timer fires: no
/// deadline expires, and no worker is started, served or killed. If the data plane resumes more than half a second
/// late, it emits the `held_up` event, and does not consider workers unresponsive because of the delay. The keeper does
/// not depend on the data plane. It kills the workers when the application exits.
///
/// Dropping the supervisor without calling [`LocalSupervisor::shutdown`] kills all workers immediately, which takes a
/// few milliseconds.
///
/// ```no_run
/// use bulkhead_supervisor::{Supervisor, config, keeper_main_if_asked};
///
/// fn main() -> Result<(), Box<dyn std::error::Error>> {
///     keeper_main_if_asked();
///     let config = config::load_embedded("workers.toml".as_ref())?;
///     let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
///     runtime.block_on(async {
///         let mut supervisor = Supervisor::builder(config).start_local()?;
///         let client = supervisor.client();
///         let reply = supervisor.run_until(client.job("thumbnail", b"...".to_vec()).send()).await??;
///         println!("{} bytes", reply.payload().len());
///         Ok(supervisor.shutdown().await?)
///     })
/// }
/// ```
pub struct LocalSupervisor {
    /// Running parts of the supervisor, or `None` once the supervisor has stopped.
    ready: Option<Ready>,
    /// Futures that serve the connections of this supervisor's clients.
    served: Mutex<Vec<Served>>,
    /// PID of the process that created the supervisor.
    owner: u32,
    /// Reason why the supervisor failed, or `None` if it has not failed.
    failed: Option<String>,
}

type Served = Pin<Box<dyn Future<Output = ()> + Send>>;

impl std::fmt::Debug for LocalSupervisor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocalSupervisor").field("has_ended", &self.ready.is_none()).finish()
    }
}

impl LocalSupervisor {
    pub(super) fn new(mut ready: Ready) -> Self {
        ready.data_plane.start();
        Self { ready: Some(ready), served: Mutex::default(), owner: std::process::id(), failed: None }
    }

    /// Creates a client with a new connection, which all clones of the client share. Must be called within a tokio
    /// runtime, preferably on the thread that runs the supervisor. Jobs make progress only inside
    /// [`LocalSupervisor::run_until`]. After the supervisor has stopped, jobs fail with `Disconnected`.
    pub fn client(&self) -> Client {
        match &self.ready {
            Some(ready) => {
                let (client, served) = Client::in_process_served_by(connector(&ready.commands));
                self.served.lock().unwrap_or_else(PoisonError::into_inner).push(Box::pin(served));
                client
            }
            None => Client::in_process(Arc::new(|| Err(io::ErrorKind::NotConnected.into()))),
        }
    }

    /// Runs the supervisor until `future` completes. Regularly yields to other tasks of the runtime.
    ///
    /// This method is cancel safe: the returned future can be dropped, and `run_until` can be called again. `future` is
    /// polled before the supervisor. If `future` is ready immediately, the supervisor does no work. If the supervisor
    /// has already stopped, only `future` is awaited. If the supervisor fails, `future` is dropped and the error
    /// contains the reason.
    pub async fn run_until<F: Future>(&mut self, future: F) -> Result<F::Output, RunError> {
        self.check()?;
        let mut future = pin!(future);
        match self.run_with(future.as_mut()).await {
            Ok(output) => Ok(output),
            Err(ended) => {
                self.end(ended)?;
                // `future` may have been waiting for the supervisor to stop.
                Ok(future.await)
            }
        }
    }

    /// Begins to stop the supervisor, without waiting. Running jobs have up to `drain_timeout` to finish. Queued and
    /// new jobs are rejected as `draining`. A second call stops the supervisor immediately. Progress is made only
    /// inside [`LocalSupervisor::run_until`] or [`LocalSupervisor::shutdown`].
    pub fn stop(&self) {
        if let Some(ready) = &self.ready {
            // Fails only if the supervisor has already stopped.
            let _ = ready.commands.stop();
        }
    }

    /// Stops the supervisor like [`LocalSupervisor::stop`], and keeps running it until all processes that it has
    /// started have exited. Returns an error if the supervisor had already failed.
    pub async fn shutdown(mut self) -> Result<(), RunError> {
        self.check()?;
        self.stop();
        match self.run_with(std::future::pending::<Infallible>()).await {
            Err(ended) => self.end(ended),
            Ok(never) => match never {},
        }
    }

    fn check(&self) -> Result<(), RunError> {
        check_owner(self.owner)?;
        match &self.failed {
            None => Ok(()),
            Some(why) => Err(failed(io::Error::other(why.clone()))),
        }
    }

    /// Polls the data plane and the client connections until `future` completes. If the data plane stops first, returns
    /// the result of the data plane as `Err`.
    async fn run_with<F: Future>(&mut self, future: F) -> Result<F::Output, io::Result<()>> {
        let served = self.served.get_mut().unwrap_or_else(PoisonError::into_inner);
        let combined = Arc::<CombinedWaker>::default();
        let (mut future, future_waker) = (pin!(future), PartWaker::new(&combined));
        let (mut driver, driver_waker) = (pin!(drive(&mut self.ready)), PartWaker::new(&combined));
        let mut client_wakers: Vec<_> = served.iter().map(|_| PartWaker::new(&combined)).collect();
        poll_fn(|context| {
            combined.enter(context);
            for _ in 0..POLLS_MAX {
                // The future is polled first, because it may be ready without any work by the data plane.
                if let Some(Poll::Ready(output)) = future_waker.poll(future.as_mut()) {
                    return Poll::Ready(Ok(output));
                }
                if let Some(Poll::Ready(ended)) = driver_waker.poll(driver.as_mut()) {
                    return Poll::Ready(Err(ended));
                }
                for index in (0..served.len()).rev() {
                    if let Some(Poll::Ready(())) = client_wakers[index].poll(served[index].as_mut()) {
                        drop((served.swap_remove(index), client_wakers.swap_remove(index)));
                    }
                }
                if !is_any_woken(&future_waker, &driver_waker, &client_wakers) {
                    break;
                }
            }
            combined.leave();
            if is_any_woken(&future_waker, &driver_waker, &client_wakers) {
                context.waker().wake_by_ref();
            }
            Poll::Pending
        })
        .await
    }
}

fn is_any_woken(future: &PartWaker, driver: &PartWaker, clients: &[PartWaker]) -> bool {
    future.is_woken() || driver.is_woken() || clients.iter().any(PartWaker::is_woken)
}

/// Runs the event loop of the data plane until the data plane has stopped.
async fn drive(ready: &mut Option<Ready>) -> io::Result<()> {
    let Some(ready) = ready else { return Ok(()) };
    let data_plane = &mut ready.data_plane;
    #[expect(
        deprecated,
        reason = "the replacement is unsafe; an owned descriptor stays open as long as this value"
    )]
    let event_descriptor = AsyncFd::with_interest(data_plane.event_descriptor()?, Interest::READABLE)?;
    // Runs one iteration before the first await, so that every call makes progress even if the future is dropped there.
    if data_plane.is_running() {
        guarded(data_plane, |plane| Ok(plane.finish_iteration()))?;
        guarded(data_plane, |plane| plane.run_iteration(Some(Duration::ZERO)))?;
    }
    let mut client_iterations = 0;
    while data_plane.is_running() {
        match guarded(data_plane, |plane| Ok(plane.finish_iteration()))? {
            Some(Duration::ZERO) => tokio::task::yield_now().await,
            timeout => {
                let timeout = timeout.unwrap_or(Duration::MAX);
                match next(data_plane, &event_descriptor, timeout).await? {
                    // An iteration that serves only in-process clients skips the system calls of a full iteration. The
                    // number of such iterations in a row is limited, so that sockets and timers are not starved.
                    Next::Clients if client_iterations < CLIENT_ITERATIONS_MAX => {
                        client_iterations += 1;
                        guarded(data_plane, DataPlane::handle_in_process_clients)?;
                        continue;
                    }
                    Next::Clients => tokio::task::yield_now().await,
                    Next::Other => {}
                }
            }
        }
        client_iterations = 0;
        guarded(data_plane, |plane| plane.run_iteration(Some(Duration::ZERO)))?;
    }
    Ok(())
}

impl LocalSupervisor {
    /// Hands the client connections over to tasks of the tokio runtime, so that clients can still read their last
    /// replies. If there is no runtime, drops the connections, and the clients' jobs fail with `Disconnected`.
    fn release_clients(&mut self) {
        let served = self.served.get_mut().unwrap_or_else(PoisonError::into_inner);
        for connection in served.drain(..) {
            if let Ok(runtime) = tokio::runtime::Handle::try_current() {
                drop(runtime.spawn(connection));
            }
        }
    }

    /// Stops the keeper, which kills all workers, and joins the other threads. `ended` is the result that the data
    /// plane returned.
    fn end(&mut self, ended: io::Result<()>) -> Result<(), RunError> {
        let Some(Ready { data_plane, control, span_thread, threads, counters, .. }) = self.ready.take()
        else {
            return Ok(());
        };
        self.release_clients();
        let end_result =
            catch_unwind(AssertUnwindSafe(|| data_plane.end())).unwrap_or_else(|_| Err(panicked()));
        threads.begin_shutdown();
        counters.has_ended.store(true, Ordering::SeqCst);
        control.join();
        span_thread.into_iter().for_each(bulkhead_control::observe::spans::SpanThread::finish);
        let ended = ended.and(end_result);
        self.failed = ended.as_ref().err().map(ToString::to_string);
        ended.map_err(failed)
    }
}

fn failed(error: io::Error) -> RunError {
    RunError::System("run the event loop", error)
}

/// Kind of work that the next iteration of the event loop must do.
enum Next {
    /// Only in-process clients need to be served.
    Clients,
    Other,
}

/// Waits up to `timeout` for an event. Returns the kind of work that the event requires.
async fn next(
    data_plane: &DataPlane,
    event_descriptor: &AsyncFd<OwnedFd>,
    timeout: Duration,
) -> io::Result<Next> {
    let event = poll_fn(|context| {
        // Sockets come first, so that a flood of in-process jobs cannot starve other events.
        if let Poll::Ready(ready) = event_descriptor.poll_read_ready(context) {
            ready?.clear_ready();
            return Poll::Ready(Ok(Next::Other));
        }
        data_plane.poll_in_process_clients(context).map(|()| Ok(Next::Clients))
    });
    tokio::time::timeout(timeout, event).await.unwrap_or(Ok(Next::Other))
}

/// Runs `act`, and converts a panic into an error so that a panic in the data plane does not terminate the caller's
/// thread.
fn guarded<T>(
    data_plane: &mut DataPlane,
    act: impl FnOnce(&mut DataPlane) -> io::Result<T>,
) -> io::Result<T> {
    catch_unwind(AssertUnwindSafe(|| act(data_plane))).unwrap_or_else(|_| Err(panicked()))
}

fn panicked() -> io::Error {
    io::Error::other("the data plane panicked")
}

impl Drop for LocalSupervisor {
    fn drop(&mut self) {
        if self.owner != std::process::id() {
            // A forked child must not drop anything here, because it does not have the threads and does not own the
            // keeper.
            std::mem::forget(self.ready.take());
            std::mem::forget(std::mem::take(&mut self.served));
        }
        if let Some(ready) = &self.ready {
            ready.commands.stop().and_then(|()| ready.commands.stop()).unwrap_or_default();
        }
        let mut ended = Ok(());
        while ended.is_ok()
            && let Some(ready) = &mut self.ready
            && ready.data_plane.is_running()
        {
            ended = guarded(&mut ready.data_plane, |plane| {
                let timeout = plane.finish_iteration();
                plane.run_iteration(timeout)
            });
        }
        if self.ready.is_some()
            && let Err(error) = self.end(ended)
        {
            tracing::error!("{error}");
        }
    }
}
