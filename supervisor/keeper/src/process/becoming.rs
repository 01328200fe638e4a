//! What a process does to become the keeper, before it has a second thread.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use bulkhead_linux::descriptors::close_all_but;
use bulkhead_linux::signals;
use nix::sys::signal::SigSet;
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::spawn::{LINK_FD, Oom, Standing, put_at};

/// The highest `oom_score_adj`: a thousandth is a thousandth of the memory.
const OOM_SCORE_MAX: i32 = 1000;

/// How far the keeper's is above the supervisor's: more than the supervisor uses as a rule.
const OOM_OWN_STEP: i32 = 100;

/// How far the workers' is above the keeper's.
const OOM_WORKER_STEP: i32 = 500;

/// What the keeper watches beside its orders, each of whose ends is its own.
pub(super) struct Owners {
    application: OwnedFd,
    guard: OwnedFd,
}

impl Owners {
    /// For the keeper, while `application` is its standard output.
    pub(super) fn find(guard: Pid, application: impl AsFd) -> io::Result<Self> {
        let guard_process = pidfd_open(guard, PidfdFlags::empty())?;
        if rustix::process::getppid() != Some(guard) {
            return Err(io::Error::other("its guard has ended"));
        }
        let application = rustix::io::fcntl_dupfd_cloexec(application, LINK_FD)?;
        Ok(Self { application, guard: guard_process })
    }

    pub(super) fn each(&self) -> [&OwnedFd; 2] {
        [&self.application, &self.guard]
    }
}

/// Makes the process what it has to be before its second thread starts. Returns the order socket, and
/// how this process stands before it takes precedence.
pub(super) fn prepare(guard: Option<Pid>) -> io::Result<(OwnedFd, Option<Owners>, Standing)> {
    rustix::thread::set_name(c"bulkhead-keeper")?;
    set_signals()?;
    close_inherited()?;
    // The socket came as standard input. Its number has to be this one: see `LINK_FD`.
    let socket = rustix::io::fcntl_dupfd_cloexec(std::io::stdin(), LINK_FD)?;
    assert_eq!(socket.as_raw_fd(), LINK_FD, "everything above standard error was just closed");
    let owners = guard.map(|guard| Owners::find(guard, std::io::stdout())).transpose()?;
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    put_at(&null, libc::STDIN_FILENO)?;
    put_at(&null, libc::STDOUT_FILENO)?;
    rustix::process::chdir("/")?;
    // Fails only for the leader of a process group, which a spawned process becomes by request only.
    let _ = rustix::process::setsid();
    rustix::process::set_child_subreaper(Some(Pid::INIT))?;
    // Should the supervisor be killed while this process is stopped, the end of file would not be seen.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::CONT))?;
    let standing = Standing {
        nice: rustix::process::getpriority_process(None)?,
        oom: stand_before_supervisor(),
        open_files: take_all_descriptors(),
    };
    Ok((socket, owners, standing))
}

/// When memory runs out, the kernel is to take the workers first, then this process, and the supervisor last: the
/// process that is to go first has the higher score, which every process may raise.
fn stand_before_supervisor() -> Oom {
    const FILE: &str = "/proc/self/oom_score_adj";
    let supervisor = std::fs::read_to_string(FILE).ok().and_then(|score| score.trim().parse().ok());
    let supervisor: i32 = supervisor.unwrap_or(0);
    let own = (supervisor + OOM_OWN_STEP).min(OOM_SCORE_MAX);
    let _ = std::fs::write(FILE, own.to_string()); // Without a writable /proc all have the same score.
    Oom { is_spared: supervisor < 0, workers: (own.max(0) + OOM_WORKER_STEP).min(OOM_SCORE_MAX) }
}

/// Raises the limit of open files as far as it goes. What it was before.
fn take_all_descriptors() -> (u64, u64) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let own = getrlimit(Resource::Nofile);
    let all = Rlimit { current: own.maximum, maximum: own.maximum };
    let _ = setrlimit(Resource::Nofile, all); // What there is has to do then.
    (own.current.unwrap_or(u64::MAX), own.maximum.unwrap_or(u64::MAX))
}

/// Nothing but end of file ends the keeper: signals meant for the supervisor's group, or sent by
/// a user who saw the process in a list, must not take the workers away. SIGCHLD is read from a
/// descriptor.
#[expect(unsafe_code, reason = "setting what a signal does")]
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
        // What it writes within a limit of its files fails, and is told so.
        Signal::SIGXFSZ,
    ];
    for number in IGNORED {
        // SAFETY: no function of ours is installed.
        unsafe { signal(number, SigHandler::SigIgn) }?;
    }
    signals::let_children_be_waited_for();
    let mut blocked = SigSet::empty();
    blocked.add(Signal::SIGCHLD);
    blocked.thread_set_mask()?;
    Ok(())
}

/// Descriptors that the supervisor's program did not mark to be closed would live as long as we do,
/// and a connection that the supervisor closes has to be closed.
#[expect(unsafe_code, reason = "closing descriptors by number")]
pub(super) fn close_inherited() -> io::Result<()> {
    // SAFETY: this process has just started and opened nothing of its own yet.
    Ok(unsafe { close_all_but(LINK_FD, &mut []) }?)
}
