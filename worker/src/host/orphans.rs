//! What the programs of jobs leave behind. The host is a child subreaper: when a program dies, what is
//! left of its tree becomes the host's. The kernel hands such orphans to the first thread of a process,
//! while a program is the child of the thread that started it. So the first thread starts nothing, waits
//! for nothing but its own children (`__WNOTHREAD`), and "no child" means that nothing is left. The kernel tells the
//! children of a thread in `/proc`, so that the first thread is not woken for programs that leave nothing behind.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use bulkhead_linux::process_tree::kill_descendants;
use bulkhead_linux::wait::wait4;
use rustix::io::Errno;

/// A process that survives SIGKILL for so long sits in the kernel; nothing is gained by more patience.
const PATIENCE: Duration = Duration::from_secs(2);

/// The programs that run, and the way to the thread that sweeps up after those that ran.
pub(super) struct Orphans {
    programs: Mutex<HashSet<u32>>,
    /// Held by threads that start a program, all at once, and by the one that kills what is not entered.
    starting: RwLock<()>,
    /// The numbers of the children of the first thread, dead ones included, if the kernel tells.
    left: Option<File>,
    requests: SyncSender<SyncSender<()>>,
}

impl Orphans {
    /// To be called on the process's first thread.
    pub(super) fn new() -> (Self, Receiver<SyncSender<()>>) {
        let (requests, received) = sync_channel(0);
        let left = File::open("/proc/thread-self/children").ok();
        (Self { programs: Mutex::default(), starting: RwLock::default(), left, requests }, received)
    }

    /// Starts a program and enters its number: one that is not entered is taken for an orphan.
    pub(super) fn start<P>(
        &self,
        start: impl FnOnce() -> io::Result<P>,
        number: impl FnOnce(&P) -> u32,
    ) -> io::Result<P> {
        let _starting = self.starting.read().unwrap_or_else(PoisonError::into_inner);
        let program = start()?;
        self.programs.lock().unwrap_or_else(PoisonError::into_inner).insert(number(&program));
        Ok(program)
    }

    /// A program has ended and was waited for.
    pub(super) fn ended(&self, number: u32) {
        self.programs.lock().unwrap_or_else(PoisonError::into_inner).remove(&number);
    }

    /// Whether the first thread has no child. A program's children are handed over before its end is seen.
    fn is_nothing_left(&self) -> bool {
        self.left.as_ref().is_some_and(|children| children.read_at(&mut [0], 0).is_ok_and(|count| count == 0))
    }

    /// Returns when nothing is left of the programs that have ended.
    pub(super) fn sweep(&self) {
        if self.is_nothing_left() {
            return;
        }
        let (done, wait) = sync_channel(0);
        // The receiver lives as long as the process.
        if self.requests.send(done).is_ok() {
            let _ = wait.recv();
        }
    }

    /// Serves the requests of [`Orphans::sweep`]. To be called on the process's first thread.
    pub(super) fn serve(&self, requests: &Receiver<SyncSender<()>>) {
        while let Ok(done) = requests.recv() {
            self.sweep_here();
            let _ = done.send(());
        }
    }

    fn sweep_here(&self) {
        let until = Instant::now() + PATIENCE;
        loop {
            match wait4(-1, libc::WNOHANG | libc::__WNOTHREAD) {
                Ok((0, ..)) if Instant::now() < until => {
                    let starting = self.starting.write().unwrap_or_else(PoisonError::into_inner);
                    let programs = self.programs.lock().unwrap_or_else(PoisonError::into_inner);
                    // An error means that /proc cannot be read; the next round asks again.
                    let _ = kill_descendants(&programs);
                    drop((programs, starting));
                    std::thread::sleep(Duration::from_micros(500));
                }
                Ok((0, ..)) => return,
                Ok(_) | Err(Errno::INTR) => {}
                Err(_) => return,
            }
        }
    }
}
