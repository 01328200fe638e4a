//! Monitors the essential threads and tasks. If one of them exits early or panics, the whole supervisor shuts down,
//! together with its workers, and reports the reason. Otherwise, a supervisor that no longer works could still appear
//! healthy.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

/// Maximum time for an orderly shutdown. If the shutdown takes longer, the process exits, and the keeper kills the
/// workers.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(20);

/// Exit code if the shutdown hangs: `EX_SOFTWARE` from sysexits.h.
const HUNG_EXIT_CODE: i32 = 70;

/// Monitor for the essential threads. All clones share the same state.
#[derive(Clone, Default)]
pub struct ThreadMonitor(Arc<Shared>);

#[derive(Default)]
struct Shared {
    /// True once all essential threads have started.
    has_started: AtomicBool,
    /// True once shutdown has begun. From then on, essential threads are expected to exit.
    is_shutting_down: AtomicBool,
    /// Name of the first thread that exited early.
    lost: OnceLock<&'static str>,
    /// True if the process belongs to an application that embeds the supervisor. The monitor then never
    /// terminates the process.
    is_embedded: bool,
    waker: OnceLock<Arc<mio::Waker>>,
}

impl ThreadMonitor {
    /// Creates a monitor for an embedded supervisor. The monitor never terminates the application's process.
    pub fn embedded() -> Self {
        Self(Arc::new(Shared { is_embedded: true, ..Shared::default() }))
    }

    /// Sets the waker to call when an essential thread exits early.
    pub fn set_waker(&self, waker: Arc<mio::Waker>) {
        let _ = self.0.waker.set(waker);
    }

    /// Records that startup is complete. From then on, an early exit of an essential thread is reported immediately.
    /// During startup, a thread exits only if startup has failed, which is reported elsewhere.
    pub fn mark_started(&self) {
        self.0.has_started.store(true, Ordering::SeqCst);
    }

    /// Records that shutdown has begun. From then on, essential threads are expected to exit.
    pub fn begin_shutdown(&self) {
        self.0.is_shutting_down.store(true, Ordering::SeqCst);
    }

    /// Returns the name of the first essential thread that exited early, or `None` if there is none.
    pub fn lost(&self) -> Option<&'static str> {
        self.0.lost.get().copied()
    }

    /// Returns a guard for an essential thread or task. If the guard is dropped before shutdown begins, the thread
    /// counts as having exited early.
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
            // A panic does not need to be handled here, because the panic hook has printed the message and the guard
            // reports the thread.
            let _ = catch_unwind(AssertUnwindSafe(run));
            drop(guard);
        })
    }

    /// Wraps an essential task so that an early exit of the task is detected.
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
        tracing::error!(
            "the thread or task '{name}' has exited; the supervisor cannot continue and is stopping"
        );
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
        // An error is ignored, because the new thread matters only if the shutdown hangs.
        let _ = std::thread::Builder::new().name("end".into()).spawn(hangs);
    }
}

/// A guard held by an essential thread or task until it exits.
pub struct ThreadGuard {
    name: &'static str,
    threads: ThreadMonitor,
}

impl Drop for ThreadGuard {
    fn drop(&mut self) {
        self.threads.report_loss(self.name);
    }
}

/// In debug builds, panics once the file named by the environment variable `BULKHEAD_PANIC_<NAME>` exists. Used in
/// tests.
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

    /// Returns a monitor that never terminates the process. An ordinary monitor could end the test process while other
    /// tests are still running.
    fn monitor() -> ThreadMonitor {
        ThreadMonitor::embedded()
    }

    #[test]
    fn reports_early_exit_of_essential_thread() {
        let ends: [(&str, fn()); 2] = [("returns", || {}), ("panics", || panic!("as a test"))];
        for (name, end) in ends {
            let threads = monitor();
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
    fn essential_threads_can_exit_during_shutdown() {
        let threads = ThreadMonitor::default();
        threads.begin_shutdown();
        threads.spawn("returns", || {}).unwrap().join().unwrap();
        assert_eq!(threads.lost(), None);
    }

    async fn panics() {
        panic!("as a test");
    }

    #[test]
    fn reports_panic_of_essential_task() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let threads = monitor();
        let done = runtime.block_on(async {
            threads.mark_started();
            let spawned = tokio::spawn(threads.wrap_task("task", panics()));
            spawned.await.is_err()
        });
        assert!(done && threads.lost() == Some("task"));
    }
}
