//! A supervisor whose data plane is on the caller's thread.

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

use super::parts::{Part, Whole};
use super::{Ready, check_owner, connector};
use crate::supervisor::RunError;

/// Turns in a row in which clients of this process alone are heard.
const HEARD_MAX: usize = 16;

/// How often what is driven together is looked at before others of the runtime have a turn.
const ROUNDS_MAX: usize = 16;

/// A supervisor in this process whose data plane is on the caller's thread: [`super::Builder::start_local`].
///
/// It runs while [`LocalSupervisor::run_until`] does, and stands still in between, with every timer: no deadline passes, no
/// worker is killed, started or heard. When it goes on after more than half a second too late, the event `held_up` tells
/// so; workers are not held to have been silent. Its keeper, and with it the end of its workers when the application
/// ends, does not depend on that.
///
/// Dropped without [`LocalSupervisor::shutdown`], it ends all workers at once, which takes some milliseconds.
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
    /// `None` once it has ended.
    ready: Option<Ready>,
    /// What serves the connections of clients.
    served: Mutex<Vec<Served>>,
    /// The process that has started it.
    owner: u32,
    /// Why it has ended, if that was not as it was told to.
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

    /// A client of its own connection; clones of it share that. Call it within a tokio runtime, best one of the same
    /// thread. Its jobs are served while the supervisor is driven. Once the supervisor has ended, jobs end as
    /// `Disconnected`.
    pub fn client(&self) -> Client {
        match &self.ready {
            Some(ready) => {
                let (client, served) = Client::in_process_served_by(connector(&ready.commander));
                self.served.lock().unwrap_or_else(PoisonError::into_inner).push(Box::pin(served));
                client
            }
            None => Client::in_process(Arc::new(|| Err(io::ErrorKind::NotConnected.into()))),
        }
    }

    /// Drives the supervisor until this future ends, in turns with whatever else the runtime's thread has to do.
    ///
    /// Each poll of this drives it, so that it may be given up and called again; a future that is ready at its first poll
    /// ends it before. Once the supervisor has ended as it was told to, the future is merely awaited. Errors tell why it
    /// has ended otherwise; the future is dropped.
    pub async fn run_until<F: Future>(&mut self, future: F) -> Result<F::Output, RunError> {
        self.check()?;
        let mut future = pin!(future);
        match self.drive_beside(future.as_mut()).await {
            Ok(output) => Ok(output),
            Err(ended) => {
                self.end(ended)?;
                // It was told to stop, which the future may wait for.
                Ok(future.await)
            }
        }
    }

    /// Has it stop: jobs in hand get as long as `drain_timeout`, and new ones are told `draining`; a second time, all is
    /// ended at once. It has to be driven for that.
    pub fn stop(&self) {
        if let Some(ready) = &self.ready {
            // If it is not heard, it has ended.
            let _ = ready.commander.stop();
        }
    }

    /// Has it stop, as [`LocalSupervisor::stop`] does, and drives it until nothing of it is left. Errors tell what has
    /// ended before.
    pub async fn shutdown(mut self) -> Result<(), RunError> {
        self.check()?;
        self.stop();
        match self.drive_beside(std::future::pending::<Infallible>()).await {
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

    /// Drives it, and what serves its clients, until the future ends; or else it has come to its own end, like this.
    async fn drive_beside<F: Future>(&mut self, future: F) -> Result<F::Output, io::Result<()>> {
        let served = self.served.get_mut().unwrap_or_else(PoisonError::into_inner);
        let whole = Arc::<Whole>::default();
        let (mut future, of_future) = (pin!(future), Part::new(&whole));
        let (mut driven, of_driven) = (pin!(drive(&mut self.ready)), Part::new(&whole));
        let mut of_clients: Vec<_> = served.iter().map(|_| Part::new(&whole)).collect();
        poll_fn(|context| {
            whole.enter(context);
            for _ in 0..ROUNDS_MAX {
                // First, since what has come for it may be all that it waits for.
                if let Some(Poll::Ready(output)) = of_future.poll(future.as_mut()) {
                    return Poll::Ready(Ok(output));
                }
                if let Some(Poll::Ready(ended)) = of_driven.poll(driven.as_mut()) {
                    return Poll::Ready(Err(ended));
                }
                for at in (0..served.len()).rev() {
                    if let Some(Poll::Ready(())) = of_clients[at].poll(served[at].as_mut()) {
                        drop((served.swap_remove(at), of_clients.swap_remove(at)));
                    }
                }
                if !is_any_woken(&of_future, &of_driven, &of_clients) {
                    break;
                }
            }
            whole.leave();
            if is_any_woken(&of_future, &of_driven, &of_clients) {
                context.waker().wake_by_ref();
            }
            Poll::Pending
        })
        .await
    }
}

fn is_any_woken(future: &Part, driven: &Part, clients: &[Part]) -> bool {
    future.is_woken() || driven.is_woken() || clients.iter().any(Part::is_woken)
}

/// Returns when it has come to its end.
async fn drive(ready: &mut Option<Ready>) -> io::Result<()> {
    let Some(ready) = ready else { return Ok(()) };
    let data_plane = &mut ready.data_plane;
    #[expect(deprecated, reason = "what follows it is unsafe; an owned descriptor is open as long as this")]
    let arrivals = AsyncFd::with_interest(data_plane.arrivals()?, Interest::READABLE)?;
    // Before anything is awaited: this may be dropped then, and called again.
    if data_plane.goes_on() {
        guarded(data_plane, |it| Ok(it.settle()))?;
        guarded(data_plane, |it| it.take_turn(Some(Duration::ZERO)))?;
    }
    let mut heard = 0;
    while data_plane.goes_on() {
        match guarded(data_plane, |it| Ok(it.settle()))? {
            Some(Duration::ZERO) => tokio::task::yield_now().await,
            patience => {
                let patience = patience.unwrap_or(Duration::MAX);
                match next(data_plane, &arrivals, patience).await? {
                    // Without a system call, but for the others' sake not always.
                    Next::Clients if heard < HEARD_MAX => {
                        heard += 1;
                        guarded(data_plane, DataPlane::hear_clients)?;
                        continue;
                    }
                    Next::Clients => tokio::task::yield_now().await,
                    Next::Other => {}
                }
            }
        }
        heard = 0;
        guarded(data_plane, |it| it.take_turn(Some(Duration::ZERO)))?;
    }
    Ok(())
}

impl LocalSupervisor {
    /// What has come for clients is theirs, and no more will come: the runtime serves them from now on. Without one, their
    /// jobs are told that the connection is lost.
    fn release_clients(&mut self) {
        let served = self.served.get_mut().unwrap_or_else(PoisonError::into_inner);
        for it in served.drain(..) {
            if let Ok(runtime) = tokio::runtime::Handle::try_current() {
                drop(runtime.spawn(it));
            }
        }
    }

    /// It has come to its end: ends the keeper with all workers, and the other threads.
    fn end(&mut self, ended: io::Result<()>) -> Result<(), RunError> {
        let Some(Ready { data_plane, control, span_thread, fate, pulse, .. }) = self.ready.take() else {
            return Ok(());
        };
        self.release_clients();
        let over = catch_unwind(AssertUnwindSafe(|| data_plane.end())).unwrap_or_else(|_| Err(panicked()));
        fate.expect_end();
        pulse.is_over.store(true, Ordering::SeqCst);
        control.join();
        span_thread.into_iter().for_each(bulkhead_control::observe::spans::SpanThread::settle);
        let ended = ended.and(over);
        self.failed = ended.as_ref().err().map(ToString::to_string);
        ended.map_err(failed)
    }
}

fn failed(error: io::Error) -> RunError {
    RunError::System("run the event loop", error)
}

/// What is to be looked at.
enum Next {
    /// Clients of this process, and no more.
    Clients,
    Other,
}

/// Waits until something has come, or as long as that.
async fn next(data_plane: &DataPlane, arrivals: &AsyncFd<OwnedFd>, patience: Duration) -> io::Result<Next> {
    let come = poll_fn(|context| {
        // First, so that it is not missed however much clients send.
        if let Poll::Ready(ready) = arrivals.poll_read_ready(context) {
            ready?.clear_ready();
            return Poll::Ready(Ok(Next::Other));
        }
        data_plane.poll_clients(context).map(|()| Ok(Next::Clients))
    });
    tokio::time::timeout(patience, come).await.unwrap_or(Ok(Next::Other))
}

/// A panic of the data plane is its end, and not the caller's.
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
            // What is forked off has a copy, and no thread to wait for; the keeper is not its own.
            std::mem::forget(self.ready.take());
            std::mem::forget(std::mem::take(&mut self.served));
        }
        if let Some(ready) = &self.ready {
            ready.commander.stop().and_then(|()| ready.commander.stop()).unwrap_or_default();
        }
        let mut ended = Ok(());
        while ended.is_ok()
            && let Some(ready) = &mut self.ready
            && ready.data_plane.goes_on()
        {
            ended = guarded(&mut ready.data_plane, |it| {
                let patience = it.settle();
                it.take_turn(patience)
            });
        }
        if self.ready.is_some()
            && let Err(error) = self.end(ended)
        {
            tracing::error!("{error}");
        }
    }
}
