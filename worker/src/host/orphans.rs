//! What the programs of jobs leave behind. The host is a child subreaper: when a program dies, what is
//! left of its tree becomes the host's. The kernel hands such orphans to the first thread of a process,
//! while a program is the child of the thread that started it. So the first thread starts nothing, waits
//! for nothing but its own children (`__WNOTHREAD`), and "no child" means that nothing is left.

use std::collections::HashSet;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bulkhead_linux::process_tree::kill_descendants;
use bulkhead_linux::wait::wait4;
use rustix::io::Errno;

/// A process that survives SIGKILL for so long sits in the kernel; nothing is gained by more patience.
const PATIENCE: Duration = Duration::from_secs(2);

/// The programs that run, and the way to the thread that sweeps up after those that ran.
pub(super) struct Orphans {
    programs: Mutex<HashSet<u32>>,
    requests: SyncSender<SyncSender<()>>,
}

impl Orphans {
    pub(super) fn new() -> (Self, Receiver<SyncSender<()>>) {
        let (requests, received) = sync_channel(0);
        (Self { programs: Mutex::default(), requests }, received)
    }

    /// The programs that run. A thread that starts one does it with this lock held, and enters it: a program
    /// that is not entered is taken for an orphan.
    pub(super) fn programs(&self) -> MutexGuard<'_, HashSet<u32>> {
        self.programs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns when nothing is left of the programs that have ended.
    pub(super) fn sweep(&self) {
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
                    let programs = self.programs();
                    // An error means that /proc cannot be read; the next round asks again.
                    let _ = kill_descendants(&programs);
                    drop(programs);
                    std::thread::sleep(Duration::from_micros(500));
                }
                Ok((0, ..)) => return,
                Ok(_) | Err(Errno::INTR) => {}
                Err(_) => return,
            }
        }
    }
}
