//! Supervises the essential threads and tasks: if one exits early or panics, the whole supervisor shuts down
//! with its workers and reports why. A supervisor that lacks a thread would look healthy without working.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

/// Maximum time for an orderly shutdown. After that the process exits, and the keeper ends the workers.
const END_WITHIN: Duration = Duration::from_secs(20);

/// Exit code if the shutdown hangs: `EX_SOFTWARE` of sysexits.h.
const HANGS: i32 = 70;

/// Monitor of the essential threads. Clones share one state.
#[derive(Clone, Default)]
pub struct Fate(Arc<Shared>);

#[derive(Default)]
struct Shared {
    /// True once all essential threads have started.
    is_running: AtomicBool,
    /// True once threads may end.
    is_ending: AtomicBool,
    /// Name of the first thread that ended early.
    lost: OnceLock<&'static str>,
    /// True if the process belongs to an application and must survive.
    is_embedded: bool,
    waker: OnceLock<Arc<mio::Waker>>,
}

impl Fate {
    /// Creates the monitor of an embedded supervisor. The application's process survives a failure of the
    /// supervisor.
    pub fn of_embedded() -> Self {
        Self(Arc::new(Shared { is_embedded: true, ..Shared::default() }))
    }

    /// Sets the waker to call when a thread is lost.
    pub fn wake_by(&self, waker: Arc<mio::Waker>) {
        let _ = self.0.waker.set(waker);
    }

    /// Marks the start as complete. From now on a lost thread is reported at once. Before that, threads end
    /// because the start has failed.
    pub fn begin(&self) {
        self.0.is_running.store(true, Ordering::SeqCst);
    }

    /// Marks the shutdown, after which threads may end.
    pub fn expect_end(&self) {
        self.0.is_ending.store(true, Ordering::SeqCst);
    }

    /// Returns the name of the thread that ended early, if any.
    pub fn lost(&self) -> Option<&'static str> {
        self.0.lost.get().copied()
    }

    /// Returns a guard that reports the thread or task as lost if it is dropped before the shutdown.
    pub fn needs(&self, name: &'static str) -> Needed {
        Needed { name, fate: self.clone() }
    }

    /// Starts an essential thread.
    pub fn spawn(
        &self,
        name: &'static str,
        run: impl FnOnce() + Send + 'static,
    ) -> io::Result<JoinHandle<()>> {
        let needed = self.needs(name);
        std::thread::Builder::new().name(name.into()).spawn(move || {
            // The panic hook has already printed the message. `join` then succeeds as usual.
            let _ = catch_unwind(AssertUnwindSafe(run));
            drop(needed);
        })
    }

    /// Wraps an essential task.
    pub fn task<F: Future>(&self, name: &'static str, task: F) -> impl Future<Output = F::Output> + use<F> {
        let needed = self.needs(name);
        async move {
            let done = task.await;
            drop(needed);
            done
        }
    }

    fn lose(&self, name: &'static str) {
        if self.0.is_ending.load(Ordering::SeqCst) || self.0.lost.set(name).is_err() {
            return;
        }
        if !self.0.is_running.load(Ordering::SeqCst) {
            return;
        }
        tracing::error!("the thread or task '{name}' has ended; the supervisor cannot continue and stops");
        if let Some(waker) = self.0.waker.get() {
            let _ = waker.wake();
        }
        self.end_in_time();
    }

    /// Exits the process if the orderly shutdown hangs. Does nothing in an embedded supervisor.
    pub fn end_in_time(&self) {
        if self.0.is_embedded {
            return;
        }
        let hangs = || {
            std::thread::sleep(END_WITHIN);
            std::process::exit(HANGS);
        };
        // Best effort: without this thread, a hanging shutdown is not cut short.
        let _ = std::thread::Builder::new().name("end".into()).spawn(hangs);
    }
}

/// Guard that an essential thread or task holds until it ends.
pub struct Needed {
    name: &'static str,
    fate: Fate,
}

impl Drop for Needed {
    fn drop(&mut self) {
        self.fate.lose(self.name);
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
    fn a_thread_that_ends_too_early_is_noticed_however_it_ends() {
        let ends: [(&str, fn()); 2] = [("returns", || {}), ("panics", || panic!("as a test"))];
        for (name, end) in ends {
            let fate = Fate::default();
            let mut poll = mio::Poll::new().unwrap();
            fate.begin();
            fate.wake_by(Arc::new(mio::Waker::new(poll.registry(), mio::Token(7)).unwrap()));
            fate.spawn(name, end).unwrap().join().unwrap();
            assert_eq!(fate.lost(), Some(name));
            let mut events = mio::Events::with_capacity(1);
            poll.poll(&mut events, Some(Duration::from_secs(30))).unwrap();
            assert!(events.iter().any(|event| event.token() == mio::Token(7)));
        }
    }

    #[test]
    fn threads_may_end_when_all_does() {
        let fate = Fate::default();
        fate.expect_end();
        fate.spawn("returns", || {}).unwrap().join().unwrap();
        assert_eq!(fate.lost(), None);
    }

    async fn panics() {
        panic!("as a test");
    }

    #[test]
    fn a_task_that_panics_is_noticed() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let fate = Fate::default();
        let done = runtime.block_on(async {
            fate.begin();
            let spawned = tokio::spawn(fate.task("task", panics()));
            spawned.await.is_err()
        });
        assert!(done && fate.lost() == Some("task"));
    }
}
