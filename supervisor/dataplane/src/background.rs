//! Threads for blocking work. The data plane sends them tasks, and handles the results in a later iteration. The
//! `background` thread starts keepers and examines processes. The `memory-files` thread creates and frees memory files;
//! it is separate so that slow file operations do not delay other tasks. Both threads live as long as the data plane,
//! because the kernel sends a keeper its parent-death signal when the thread that started the keeper exits.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use bulkhead_keeper::{Keeper, KeeperLauncher, reap_after_keeper};
use bulkhead_plane::threads::ThreadMonitor;
use bulkhead_policy::WorkerId;
use mio::Waker;

use super::memory_files::Files;
use super::slab::CompartmentIndex;
use super::starvation::Watch;

/// Number of pending tasks at which the data plane stops adding starvation checks. With this many tasks, the machine is
/// overloaded, which already explains why workers are silent.
const LOOKS_WAITING_MAX: usize = 1024;

/// Length of the pause after each task of the `memory-files` thread, as a multiple of the task's duration. The pauses
/// prevent the creation of files from keeping a processor busy.
const FILES_PAUSE: u32 = 1;

/// Maximum time spent retrying a failed keeper start. The failure can be temporary, for example if the keeper was
/// killed during its start or the system was short of memory or processes.
const KEEPER_START_MAX: Duration = Duration::from_secs(10);

/// Delay before the second attempt to start a keeper. Doubles with each further attempt.
const KEEPER_RETRY_PAUSE: Duration = Duration::from_millis(10);

/// Maximum time to wait during shutdown for a keeper that is being started. Killing the processes of the lost keeper
/// and starting another keeper usually takes less time.
const LAST_KEEPER_TIMEOUT: Duration = Duration::from_secs(120);

enum Task {
    /// Kills all processes left behind by a lost keeper.
    SweepKeeper {
        lost: Box<Keeper>,
    },
    /// Starts a new keeper after a pause. Uses the launcher that started the lost keeper.
    StartKeeper {
        pause: Duration,
        launcher: KeeperLauncher,
    },
    /// Records how long each thread of a worker has waited for a processor.
    Watch(Arc<Watch>),
    /// Checks whether a thread of the worker has spent at least half of its time waiting for a processor since `Watch`
    /// was performed.
    Look {
        compartment: CompartmentIndex,
        worker: WorkerId,
        watch: Arc<Watch>,
    },
    /// Creates the memory files of a lease. This is slow, because the kernel zeroes the memory.
    MakeFiles {
        lease: u64,
        bytes: u64,
    },
    FreeFiles(Files),
}

/// Result of a completed task.
pub(super) enum Done {
    KeeperSwept(io::Result<()>),
    Keeper(io::Result<Box<Keeper>>),
    Watched,
    Looked { compartment: CompartmentIndex, worker: WorkerId, is_starved: bool },
    FilesMade { lease: u64, bytes: u64, files: rustix::io::Result<Files> },
    FilesFreed,
}

/// Handle for sending tasks to the background threads and receiving the results.
pub(super) struct Background {
    tasks: Sender<Task>,
    files: Sender<Task>,
    done: Receiver<Done>,
    /// Number of tasks that the thread named `background` has not completed yet.
    waiting: usize,
    threads: ThreadMonitor,
}

/// Tells the thread monitor that the background threads are expected to exit. They exit when the data plane is dropped,
/// even after a panic.
impl Drop for Background {
    fn drop(&mut self) {
        self.threads.begin_shutdown();
    }
}

impl Background {
    /// Starts the threads. Each completed task wakes the data plane through `waker`.
    pub(super) fn start(threads: &ThreadMonitor, waker: Arc<Waker>) -> io::Result<Self> {
        let (sender, done) = channel();
        let tasks = serve("background", 0, threads, (sender.clone(), waker.clone()))?;
        let files = serve("memory-files", FILES_PAUSE, threads, (sender, waker))?;
        Ok(Self { tasks, files, done, waiting: 0, threads: threads.clone() })
    }

    fn send(&mut self, task: Task) {
        let is_of_files = matches!(task, Task::MakeFiles { .. } | Task::FreeFiles(_));
        self.waiting += usize::from(!is_of_files);
        // Fails only if the thread has exited. In that case, the supervisor is shutting down (see [`ThreadMonitor`]).
        let _ = if is_of_files { self.files.send(task) } else { self.tasks.send(task) };
    }

    /// Kills all processes left behind by a lost keeper, and then starts a new keeper. The results arrive as
    /// [`Done::KeeperSwept`] and [`Done::Keeper`].
    pub(super) fn replace_keeper(&mut self, lost: Box<Keeper>, pause: Duration) {
        let launcher = lost.launcher();
        self.send(Task::SweepKeeper { lost });
        self.send(Task::StartKeeper { pause, launcher });
    }

    /// Starts observing a worker's processor time. Returns false if too many tasks are pending.
    pub(super) fn watch(&mut self, watch: &Arc<Watch>) -> bool {
        let has_room = self.waiting < LOOKS_WAITING_MAX;
        if has_room {
            self.send(Task::Watch(watch.clone()));
        }
        has_room
    }

    /// Checks whether an observed worker gets too little processor time. The result arrives as
    /// [`Done::Looked`].
    pub(super) fn check_starvation(
        &mut self,
        compartment: CompartmentIndex,
        worker: WorkerId,
        watch: Arc<Watch>,
    ) {
        self.send(Task::Look { compartment, worker, watch });
    }

    /// Creates the memory files of a lease. The result arrives as [`Done::FilesMade`].
    pub(super) fn make_files(&mut self, lease: u64, bytes: u64) {
        self.send(Task::MakeFiles { lease, bytes });
    }

    /// Frees the memory files of a lease.
    pub(super) fn free_files(&mut self, files: Files) {
        self.send(Task::FreeFiles(files));
    }

    /// Returns the result of a completed task, or `None` if no result is available.
    pub(super) fn done(&mut self) -> Option<Done> {
        let done = self.done.try_recv().ok()?;
        self.waiting -= usize::from(!matches!(done, Done::FilesMade { .. } | Done::FilesFreed));
        Some(done)
    }

    /// Waits until the new keeper has started, and returns the keeper. Called during shutdown if the keeper is just
    /// being replaced.
    pub(super) fn last_keeper(&self) -> io::Result<Box<Keeper>> {
        let until = Instant::now() + LAST_KEEPER_TIMEOUT;
        loop {
            match self.done.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(Done::Keeper(keeper)) => return keeper,
                Ok(_) => {}
                // The timeout has expired, or the threads have exited.
                Err(_) => return Err(io::Error::other("no keeper started in time")),
            }
        }
    }
}

/// Starts a thread that performs tasks one after another. The thread sleeps after each task, for the duration of the
/// task multiplied by `pause`.
fn serve(
    name: &'static str,
    pause: u32,
    threads: &ThreadMonitor,
    (done, waker): (Sender<Done>, Arc<Waker>),
) -> io::Result<Sender<Task>> {
    let (tasks, received) = channel::<Task>();
    threads.spawn(name, move || {
        for task in received {
            let begun_at = Instant::now();
            // The data plane is gone, so the remaining tasks are dropped.
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
        Task::SweepKeeper { lost } => Done::KeeperSwept(reap_after_keeper(*lost)),
        Task::StartKeeper { pause, launcher } => {
            std::thread::sleep(pause);
            Done::Keeper(start_keeper(&launcher))
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

/// Starts a keeper. Retries failed attempts for up to [`KEEPER_START_MAX`].
fn start_keeper(launcher: &KeeperLauncher) -> io::Result<Box<Keeper>> {
    let until = Instant::now() + KEEPER_START_MAX;
    let mut pause = KEEPER_RETRY_PAUSE;
    loop {
        match launcher.start() {
            Ok(keeper) => return Ok(Box::new(keeper)),
            Err(error) if Instant::now() + pause >= until => return Err(error),
            Err(error) => tracing::warn!("failed to start the keeper; trying again: {error}"),
        }
        std::thread::sleep(pause);
        pause *= 2;
    }
}
