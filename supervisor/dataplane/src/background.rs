//! What blocks or reads files, on threads of its own: the data plane hands them a task, and hears what came of it in a
//! later turn. One has the keeper and looks at processes; the other has memory files, and keeps nothing else waiting.
//! The threads live as long as the data plane does: a keeper is told by the kernel when the thread that started it ends.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use bulkhead_keeper::{Keeper, KeeperOrigin, sweep_after_keeper};
use bulkhead_plane::threads::Fate;
use bulkhead_policy::WorkerId;
use mio::Waker;

use super::memory_files::Files;
use super::slab::CompartmentIndex;
use super::starvation::Watch;

/// Looks at workers that may wait. On a machine where more do, workers are silent since they do not run.
const LOOKS_WAITING_MAX: usize = 1024;

/// To make memory files takes a processor: the thread that does it waits as long as it has worked, so many times.
const FILES_PAUSE: u32 = 1;

enum Task {
    /// Ends what a keeper that is lost has left behind.
    SweepKeeper {
        lost: Box<Keeper>,
    },
    /// Starts another, after a pause, and hands it what the lost one had.
    StartKeeper {
        pause: Duration,
        origin: KeeperOrigin,
    },
    /// How long the threads of a worker have waited so far.
    Watch(Arc<Watch>),
    /// Whether they have waited most of the time since.
    Look {
        compartment: CompartmentIndex,
        worker: WorkerId,
        watch: Arc<Watch>,
    },
    /// Makes the files of a lease, which takes as long as to clear them.
    MakeFiles {
        lease: u64,
        bytes: u64,
    },
    FreeFiles(Files),
}

/// What came of a task.
pub(super) enum Done {
    KeeperSwept(io::Result<()>),
    Keeper(io::Result<Box<Keeper>>),
    Watched,
    Looked { compartment: CompartmentIndex, worker: WorkerId, is_starved: bool },
    FilesMade { lease: u64, bytes: u64, files: rustix::io::Result<Files> },
    FilesFreed,
}

/// The threads, as the data plane has them.
pub(super) struct Background {
    tasks: Sender<Task>,
    files: Sender<Task>,
    done: Receiver<Done>,
    /// Tasks of which nothing was heard yet, but for those of memory files.
    waiting: usize,
    fate: Fate,
}

/// The data plane ends, be it by a panic, and the threads with it: that is no loss to be told.
impl Drop for Background {
    fn drop(&mut self) {
        self.fate.expect_end();
    }
}

impl Background {
    /// Starts the threads, which wake the data plane by `waker` after each task.
    pub(super) fn start(fate: &Fate, waker: Arc<Waker>) -> io::Result<Self> {
        let (sender, done) = channel();
        let tasks = serve("background", 0, fate, (sender.clone(), waker.clone()))?;
        let files = serve("memory-files", FILES_PAUSE, fate, (sender, waker))?;
        Ok(Self { tasks, files, done, waiting: 0, fate: fate.clone() })
    }

    fn send(&mut self, task: Task) {
        let is_of_files = matches!(task, Task::MakeFiles { .. } | Task::FreeFiles(_));
        self.waiting += usize::from(!is_of_files);
        // A thread that has ended ends the supervisor, see `Fate`.
        let _ = if is_of_files { self.files.send(task) } else { self.tasks.send(task) };
    }

    /// Ends what is left of a keeper, and starts another: [`Done::KeeperSwept`] and [`Done::Keeper`] follow.
    pub(super) fn replace_keeper(&mut self, lost: Box<Keeper>, pause: Duration) {
        let origin = lost.origin();
        self.send(Task::SweepKeeper { lost });
        self.send(Task::StartKeeper { pause, origin });
    }

    /// Begins to watch a worker. Returns whether it is watched.
    pub(super) fn watch(&mut self, watch: &Arc<Watch>) -> bool {
        let has_room = self.waiting < LOOKS_WAITING_MAX;
        if has_room {
            self.send(Task::Watch(watch.clone()));
        }
        has_room
    }

    /// Compares; [`Done::Looked`] follows.
    pub(super) fn look(&mut self, compartment: CompartmentIndex, worker: WorkerId, watch: Arc<Watch>) {
        self.send(Task::Look { compartment, worker, watch });
    }

    /// Makes the files of a lease; [`Done::FilesMade`] follows.
    pub(super) fn make_files(&mut self, lease: u64, bytes: u64) {
        self.send(Task::MakeFiles { lease, bytes });
    }

    /// Gives their memory back.
    pub(super) fn free_files(&mut self, files: Files) {
        self.send(Task::FreeFiles(files));
    }

    /// What came of a task, if one is done.
    pub(super) fn done(&mut self) -> Option<Done> {
        let done = self.done.try_recv().ok()?;
        self.waiting -= usize::from(!matches!(done, Done::FilesMade { .. } | Done::FilesFreed));
        Some(done)
    }

    /// Waits for the keeper that was ordered last. For the end of the supervisor.
    pub(super) fn last_keeper(&self) -> io::Result<Box<Keeper>> {
        let keeper = self.done.iter().find_map(|done| match done {
            Done::Keeper(keeper) => Some(keeper),
            _ => None,
        });
        keeper.unwrap_or_else(|| Err(io::Error::other("the thread that starts it has ended")))
    }
}

/// A thread that does what it is sent, and then pauses as long as that took, so many times.
fn serve(
    name: &'static str,
    pause: u32,
    fate: &Fate,
    (done, waker): (Sender<Done>, Arc<Waker>),
) -> io::Result<Sender<Task>> {
    let (tasks, received) = channel::<Task>();
    fate.spawn(name, move || {
        for task in received {
            let begun_at = Instant::now();
            // The data plane has ended; what it had ordered ends with it.
            if done.send(perform(task)).is_err() {
                return;
            }
            let _ = waker.wake();
            if pause > 0 {
                std::thread::sleep(begun_at.elapsed() * pause);
            }
        }
    })?;
    Ok(tasks)
}

fn perform(task: Task) -> Done {
    match task {
        Task::SweepKeeper { lost } => Done::KeeperSwept(sweep_after_keeper(*lost)),
        Task::StartKeeper { pause, origin } => {
            std::thread::sleep(pause);
            Done::Keeper(origin.start().map(Box::new))
        }
        Task::Watch(watch) => {
            watch.begin();
            Done::Watched
        }
        Task::Look { compartment, worker, watch } => {
            Done::Looked { compartment, worker, is_starved: watch.is_starved() }
        }
        Task::MakeFiles { lease, bytes } => Done::FilesMade { lease, bytes, files: Files::make(bytes) },
        Task::FreeFiles(files) => {
            files.free();
            Done::FilesFreed
        }
    }
}
