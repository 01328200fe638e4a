//! Supervises the essential threads and tasks: if one exits early or panics, the whole supervisor shuts down
//! with its workers and reports why. A supervisor that lacks a thread would look healthy without working.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

/// Maximum time for an orderly shutdown. After that the process exits, and the keeper ends the workers.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(20);

/// Exit code if the shutdown hangs: `EX_SOFTWARE` of sysexits.h.
const HUNG_EXIT_CODE: i32 = 70;

/// Monitor of the essential threads. Clones share one state.
#[derive(Clone, Default)]
pub struct ThreadMonitor(Arc<Shared>);

#[derive(Default)]
struct Shared {
    /// True once all essential threads have started.
    has_started: AtomicBool,
    /// True once threads may end.
    is_shutting_down: AtomicBool,
    /// Name of the first thread that ended early.
    lost: OnceLock<&'static str>,
    /// True if the process belongs to an application and must survive.
    is_embedded: bool,
    waker: OnceLock<Arc<mio::Waker>>,
}

impl ThreadMonitor {
    /// Creates the monitor of an embedded supervisor. The application's process survives a failure of the
    /// supervisor.
    pub fn embedded() -> Self {
        Self(Arc::new(Shared { is_embedded: true, ..Shared::default() }))
    }

    /// Sets the waker to call when a thread is lost.
    pub fn set_waker(&self, waker: Arc<mio::Waker>) {
        let _ = self.0.waker.set(waker);
    }

    /// Marks the start as complete. From now on a lost thread is reported at once. Before that, threads end
    /// because the start has failed.
    pub fn mark_started(&self) {
        self.0.has_started.store(true, Ordering::SeqCst);
    }

    /// Marks the shutdown, after which threads may end.
    pub fn begin_shutdown(&self) {
        self.0.is_shutting_down.store(true, Ordering::SeqCst);
    }

    /// Returns the name of the thread that ended early, if any.
    pub fn lost(&self) -> Option<&'static str> {
        self.0.lost.get().copied()
    }

    /// Returns a guard that reports the thread or task as lost if it is dropped before the shutdown.
    pub fn guard(&self, name: &'static str) -> ThreadGuard {
        ThreadGuard { name, threads: self.clone() }
    }

    /// Starts an essential thread.
    pub fn spawn(
        &self,
        name: &'static str,
        run: impl FnOnce() + Send + 'static,
    ) -> io::Result<JoinHandle<()>> {
        let guard = self.guard(name);
        std::thread::Builder::new().name(name.into()).spawn(move || {
            // The panic hook has already printed the message. `join` then succeeds as usual.
            let _ = catch_unwind(AssertUnwindSafe(run));
            drop(guard);
        })
    }

    /// Wraps an essential task.
    pub fn wrap_task<F: Future>(
        &self,
        name: &'static str,
        task: F,
    ) -> impl Future<Output = F::Output> + use<F> {
        let guard = self.guard(name);
        async move {
            let done = task.await;
            drop(guard);
            done
        }
    }

    fn report_loss(&self, name: &'static str) {
        if self.0.is_shutting_down.load(Ordering::SeqCst) || self.0.lost.set(name).is_err() {
            return;
        }
        if !self.0.has_started.load(Ordering::SeqCst) {
            return;
        }
        tracing::error!("the thread or task '{name}' has ended; the supervisor cannot continue and stops");
        if let Some(waker) = self.0.waker.get() {
            let _ = waker.wake();
        }
        self.exit_after_timeout();
    }

    /// Exits the process if the orderly shutdown hangs. Does nothing in an embedded supervisor.
    pub fn exit_after_timeout(&self) {
        if self.0.is_embedded {
            return;
        }
        let hangs = || {
            std::thread::sleep(SHUTDOWN_TIMEOUT);
            std::process::exit(HUNG_EXIT_CODE);
        };
        // Best effort: without this thread, a hanging shutdown is not cut short.
        let _ = std::thread::Builder::new().name("end".into()).spawn(hangs);
    }
}

/// Guard that an essential thread or task holds until it ends.
pub struct ThreadGuard {
    name: &'static str,
    threads: ThreadMonitor,
}

impl Drop for ThreadGuard {
    fn drop(&mut self) {
        self.threads.report_loss(self.name);
    }
}

/// For tests in debug builds: panics once the file named by the variable `BULKHEAD_PANIC_<NAME>` exists.
pub async fn panic_on_request(name: &'static str) {
    let file = if cfg!(debug_assertions) { std::env::var_os(format!("BULKHEAD_PANIC_{name}")) } else { None };
    let Some(file) = file else { return std::future::pending().await };
    while !std::path::Path::new(&file).exists() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("asked to");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn early_end_of_essential_thread_is_reported() {
        let ends: [(&str, fn()); 2] = [("returns", || {}), ("panics", || panic!("as a test"))];
        for (name, end) in ends {
            let threads = ThreadMonitor::default();
            let mut poll = mio::Poll::new().unwrap();
            threads.mark_started();
            threads.set_waker(Arc::new(mio::Waker::new(poll.registry(), mio::Token(7)).unwrap()));
            threads.spawn(name, end).unwrap().join().unwrap();
            assert_eq!(threads.lost(), Some(name));
            let mut events = mio::Events::with_capacity(1);
            poll.poll(&mut events, Some(Duration::from_secs(30))).unwrap();
            assert!(events.iter().any(|event| event.token() == mio::Token(7)));
        }
    }

    #[test]
    fn essential_threads_can_end_during_shutdown() {
        let threads = ThreadMonitor::default();
        threads.begin_shutdown();
        threads.spawn("returns", || {}).unwrap().join().unwrap();
        assert_eq!(threads.lost(), None);
    }

    async fn panics() {
        panic!("as a test");
    }

    #[test]
    fn panic_of_essential_task_is_reported() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let threads = ThreadMonitor::default();
        let done = runtime.block_on(async {
            threads.mark_started();
            let spawned = tokio::spawn(threads.wrap_task("task", panics()));
            spawned.await.is_err()
        });
        assert!(done && threads.lost() == Some("task"));
    }
}
