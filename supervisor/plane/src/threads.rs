//! Threads, and tasks, without which a supervisor is none: when one of them ends before all of it does, be it by a
//! panic, the supervisor ends as a whole, with its workers, and says why. One that lives on by half would look well.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long the rest may take to end. Whatever hangs then ends with the process; the keeper ends the workers.
const END_WITHIN: Duration = Duration::from_secs(20);

/// The exit code of a process that could not even end in order: `EX_SOFTWARE` of sysexits.h.
const HANGS: i32 = 70;

/// What all threads of a supervisor share.
#[derive(Clone, Default)]
pub struct Fate(Arc<Shared>);

#[derive(Default)]
struct Shared {
    /// All that is needed has been started.
    is_running: AtomicBool,
    /// From here on threads may end.
    is_ending: AtomicBool,
    /// The one that ended first, and before that.
    lost: OnceLock<&'static str>,
    /// The process is the application's, and goes on.
    is_embedded: bool,
    /// Wakes the data plane.
    waker: OnceLock<Arc<mio::Waker>>,
}

impl Fate {
    /// That of a supervisor in an application, whose process goes on whatever becomes of the supervisor.
    pub fn of_embedded() -> Self {
        Self(Arc::new(Shared { is_embedded: true, ..Shared::default() }))
    }

    /// The waker that is called when a thread is lost.
    pub fn wake_by(&self, waker: Arc<mio::Waker>) {
        let _ = self.0.waker.set(waker);
    }

    /// All that is needed has been started: from here on a loss is told at once. Before that, it is what comes of a
    /// start that fails.
    pub fn begin(&self) {
        self.0.is_running.store(true, Ordering::SeqCst);
    }

    /// The supervisor ends, and so do its threads.
    pub fn expect_end(&self) {
        self.0.is_ending.store(true, Ordering::SeqCst);
    }

    /// The thread that has ended and should not have.
    pub fn lost(&self) -> Option<&'static str> {
        self.0.lost.get().copied()
    }

    /// Notices when its owner is dropped too early, as it is by the end of a thread or task.
    pub fn needs(&self, name: &'static str) -> Needed {
        Needed { name, fate: self.clone() }
    }

    /// Starts a thread that the supervisor needs.
    pub fn spawn(
        &self,
        name: &'static str,
        run: impl FnOnce() + Send + 'static,
    ) -> io::Result<JoinHandle<()>> {
        let needed = self.needs(name);
        std::thread::Builder::new().name(name.into()).spawn(move || {
            // What it was has been said by the panic's own message. To join it finds an end like any other.
            let _ = catch_unwind(AssertUnwindSafe(run));
            drop(needed);
        })
    }

    /// Makes a task one that the supervisor needs.
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
        tracing::error!("the thread or task '{name}' has ended, and the supervisor cannot go on without it");
        if let Some(waker) = self.0.waker.get() {
            let _ = waker.wake();
        }
        self.end_in_time();
    }

    /// Ends the process if the supervisor does not come to its end in order, and the process is the supervisor's.
    pub fn end_in_time(&self) {
        if self.0.is_embedded {
            return;
        }
        let hangs = || {
            std::thread::sleep(END_WITHIN);
            std::process::exit(HANGS);
        };
        // Without it, the supervisor ends if nothing hangs.
        let _ = std::thread::Builder::new().name("end".into()).spawn(hangs);
    }
}

/// Held by a thread or task for as long as it lives.
pub struct Needed {
    name: &'static str,
    fate: Fate,
}

impl Drop for Needed {
    fn drop(&mut self) {
        self.fate.lose(self.name);
    }
}

/// For tests, in debug builds alone: panics once the file exists that `BULKHEAD_PANIC_<NAME>` names.
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
