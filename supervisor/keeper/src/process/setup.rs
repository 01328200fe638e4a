//! Turns this process into the keeper, before the process has a second thread. Sets up signals, descriptors, the umask,
//! the session and the out-of-memory score, and makes the process a child subreaper. The guard uses some of these
//! functions as well. Workers get their own settings in `spawn/steps.rs`.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use bulkhead_linux::descriptors::close_all_except;
use bulkhead_linux::signals;
use nix::sys::signal::SigSet;
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::spawn::{LINK_FD, OomSettings, OriginalSettings, duplicate_to};

/// Maximum value of `oom_score_adj`. Each point corresponds to a thousandth of the machine's memory.
const OOM_SCORE_MAX: i32 = 1000;

/// Amount by which the keeper's out-of-memory score exceeds the supervisor's. This amount corresponds to more memory
/// than the supervisor usually uses.
const OOM_KEEPER_STEP: i32 = 100;

/// Amount by which a worker's out-of-memory score exceeds the keeper's.
const OOM_WORKER_STEP: i32 = 500;

/// Processes that the keeper watches in addition to the order socket. The keeper exits when any of them exits.
pub(super) struct WatchedProcesses {
    application: OwnedFd,
    guard: OwnedFd,
}

impl WatchedProcesses {
    /// Opens a pidfd of the guard, and duplicates the pidfd of the application. `application` is still open as the
    /// keeper's standard output.
    pub(super) fn open(guard: Pid, application: impl AsFd) -> io::Result<Self> {
        let guard_process = pidfd_open(guard, PidfdFlags::empty())?;
        if rustix::process::getppid() != Some(guard) {
            return Err(io::Error::other("the keeper's guard has exited"));
        }
        let application = rustix::io::fcntl_dupfd_cloexec(application, LINK_FD)?;
        Ok(Self { application, guard: guard_process })
    }

    pub(super) fn all(&self) -> [&OwnedFd; 2] {
        [&self.application, &self.guard]
    }
}

/// Prepares the process for the start of the second thread. Returns the order socket, the watched processes,
/// and the previous scheduling and memory settings of the keeper.
pub(super) fn set_up(
    guard: Option<Pid>,
) -> io::Result<(OwnedFd, Option<WatchedProcesses>, OriginalSettings)> {
    rustix::thread::set_name(c"bulkhead-keeper")?;
    set_signals()?;
    close_inherited()?;
    // The order socket is standard input. The duplicate must have the number `LINK_FD`.
    let socket = rustix::io::fcntl_dupfd_cloexec(std::io::stdin(), LINK_FD)?;
    assert_eq!(socket.as_raw_fd(), LINK_FD, "the first free descriptor must directly follow standard error");
    let watched = guard.map(|guard| WatchedProcesses::open(guard, std::io::stdout())).transpose()?;
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    duplicate_to(&null, libc::STDIN_FILENO)?;
    duplicate_to(&null, libc::STDOUT_FILENO)?;
    rustix::process::chdir("/")?;
    // Removes the owner's bits from the umask. Otherwise, the keeper and the workers might be unable to use the folders
    // that the keeper creates.
    let umask = rustix::process::umask(Mode::empty());
    rustix::process::umask(umask.difference(Mode::RWXU));
    // `setsid` fails only for a process group leader. A spawned process leads a group only if the caller requests it.
    let _ = rustix::process::setsid();
    rustix::process::set_child_subreaper(Some(Pid::INIT))?;
    // A stopped keeper could not read end of file when the supervisor is killed, so the kernel sends SIGCONT to resume
    // the keeper.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::CONT))?;
    let original = OriginalSettings {
        nice: rustix::process::getpriority_process(None)?,
        oom: raise_oom_score(),
        open_files: raise_open_files_limit(),
    };
    Ok((socket, watched, original))
}

/// Makes the kernel kill the workers first when memory runs out, the keeper next, and the supervisor last. A process
/// can only raise its own score, so processes that must be killed earlier get higher scores.
fn raise_oom_score() -> OomSettings {
    const FILE: &str = "/proc/self/oom_score_adj";
    let supervisor = std::fs::read_to_string(FILE).ok().and_then(|score| score.trim().parse().ok());
    let supervisor: i32 = supervisor.unwrap_or(0);
    let own = (supervisor + OOM_KEEPER_STEP).min(OOM_SCORE_MAX);
    let _ = std::fs::write(FILE, own.to_string()); // If /proc is not writable, all scores stay equal.
    OomSettings {
        is_protected: supervisor < 0,
        worker_score: (own.max(0) + OOM_WORKER_STEP).min(OOM_SCORE_MAX),
    }
}

/// Raises the soft limit on open files to the hard limit. Returns the previous soft and hard limits.
fn raise_open_files_limit() -> (u64, u64) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let own = getrlimit(Resource::Nofile);
    let all = Rlimit { current: own.maximum, maximum: own.maximum };
    let _ = setrlimit(Resource::Nofile, all); // If this fails, the keeper continues with the current limit.
    (own.current.unwrap_or(u64::MAX), own.maximum.unwrap_or(u64::MAX))
}

/// Makes the keeper ignore signals, so that it exits only at end of file on its socket. Otherwise, a signal to the
/// supervisor's process group could kill the workers, and so could a signal from a user who finds the keeper in a
/// process list. SIGCHLD is blocked and read from a descriptor.
#[expect(unsafe_code, reason = "changing the disposition of a signal is unsafe")]
pub(super) fn set_signals() -> io::Result<()> {
    use nix::sys::signal::{SigHandler, Signal, signal};
    const IGNORED: [Signal; 12] = [
        Signal::SIGHUP,
        Signal::SIGINT,
        Signal::SIGQUIT,
        Signal::SIGPIPE,
        Signal::SIGALRM,
        Signal::SIGTERM,
        Signal::SIGUSR1,
        Signal::SIGUSR2,
        Signal::SIGTSTP,
        Signal::SIGTTIN,
        Signal::SIGTTOU,
        // With SIGXFSZ ignored, a write beyond the file size limit fails with an error.
        Signal::SIGXFSZ,
    ];
    for number in IGNORED {
        // SAFETY: no handler function is installed.
        unsafe { signal(number, SigHandler::SigIgn) }?;
    }
    signals::restore_default_sigchld();
    let mut blocked = SigSet::empty();
    blocked.add(Signal::SIGCHLD);
    blocked.thread_set_mask()?;
    Ok(())
}

/// Closes inherited descriptors. If the supervisor's program forgot to mark a connection as close-on-exec, the keeper's
/// copy would keep the connection open even after the supervisor has closed it.
#[expect(unsafe_code, reason = "closing descriptors by number")]
pub(super) fn close_inherited() -> io::Result<()> {
    // SAFETY: this process has just started, and has opened no descriptors yet.
    Ok(unsafe { close_all_except(LINK_FD, &mut []) }?)
}
