//! Starts and stops the keeper of an application that embeds a supervisor. Neither the keeper nor its guard is a child
//! of the application, so this process holds a pidfd of each. `client` sends the orders. `process::guard` kills the
//! processes that a dead keeper leaves behind.

use std::ffi::{CString, OsString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bulkhead_linux::wait::wait_until_readable;
use bulkhead_linux::{errno, vfork};
use bulkhead_shared::codec;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid};

use crate::SubordinateIds;
use crate::protocol::socket::{self, OrderSocket, Received};
use crate::protocol::{
    GUARDED_ARGUMENT, GuardReady, KEEPER_ARGUMENT, LayerSupport, ORDER_BYTES_MAX, PROBE_ARGUMENT,
    SERVICE_MANAGER_VARIABLES, VERSION,
};

/// Maximum time to wait until the keeper is running. This includes the time for probing the machine, which usually
/// takes milliseconds, but can take seconds if a trial process hangs.
const READY_TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum time to wait for the keeper and the guard to exit after a failed start, or when the [`DetachedKeeper`] is
/// dropped. Both processes usually exit within milliseconds.
const DROP_TIMEOUT: Duration = Duration::from_secs(10);

/// Lowest descriptor number above standard input, output and error.
const DESCRIPTOR_MIN: i32 = 3;

/// Results of the guard's probe of the machine.
#[derive(Debug)]
pub struct ProbeResult {
    /// Layers of confinement that the machine supports.
    pub layers: Vec<LayerSupport>,
    /// Subordinate user IDs for workers, or the reason why none are available.
    pub ids: Result<Arc<SubordinateIds>, String>,
}

/// Whether the guard probes the machine to find out which layers of confinement are supported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProbeMachine {
    Yes,
    No,
}

/// The processes of the keeper and its guard. Dropping this value waits until both have exited, so that an application
/// that adopts orphans is not left with zombies. The socket must be dropped first.
#[derive(Debug)]
pub(crate) struct DetachedKeeper {
    guard: OwnedFd,
    keeper: OwnedFd,
    keeper_pid: u32,
}

impl DetachedKeeper {
    /// Starts the guard and the keeper, and waits until both are running. `theirs` is the keeper's end of the socket
    /// pair.
    pub(crate) fn start(
        program: &Path,
        probe: ProbeMachine,
        socket: &OrderSocket,
        theirs: OwnedFd,
    ) -> io::Result<(Self, ProbeResult)> {
        let guard = start_guard(program, probe, theirs).map_err(|error| {
            io::Error::new(error.kind(), format!("failed to run {}: {error}", program.display()))
        })?;
        let started = receive_ready(&guard, socket).and_then(|(message, mut descriptors)| {
            let (ready, _) = codec::decode::<GuardReady>(&message, &[]).map_err(|_| not_a_keeper(program))?;
            let namespace = ready.ids.as_ref().ok().and_then(|_| descriptors.pop());
            let keeper = descriptors.pop().ok_or_else(|| io::Error::from(rustix::io::Errno::MFILE))?;
            let ids = ready.ids.and_then(|ids| match namespace {
                Some(namespace) => Ok(Arc::new(SubordinateIds::from_guard(ids, namespace))),
                None => Err(String::new()),
            });
            Ok((keeper, ready.keeper, ProbeResult { layers: ready.layers, ids }))
        });
        match started {
            Ok((keeper, keeper_pid, found)) => Ok((Self { guard, keeper, keeper_pid }, found)),
            Err(error) => {
                // A guard waits for its keeper, which exits because the socket is disconnected. A program that is not
                // a guard might not exit, so it is killed.
                socket.shut_down();
                if !matches!(reap_within(&guard, DROP_TIMEOUT), Ok(true)) {
                    let _ = pidfd_send_signal(&guard, Signal::KILL);
                    let _ = reap_within(&guard, DROP_TIMEOUT);
                }
                let is_silent = error.kind() == io::ErrorKind::UnexpectedEof;
                Err(if is_silent { not_a_keeper(program) } else { error })
            }
        }
    }

    pub(crate) fn keeper_pid(&self) -> u32 {
        self.keeper_pid
    }

    pub(crate) fn kill_keeper(&self) -> io::Result<()> {
        match pidfd_send_signal(&self.keeper, Signal::KILL) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits until the guard and the keeper have exited. Returns false if one of them is still running after
    /// `timeout`.
    pub(crate) fn wait(&self, timeout: Duration) -> io::Result<bool> {
        let until = Instant::now() + timeout;
        for process in [&self.keeper, &self.guard] {
            if !reap_within(process, until.saturating_duration_since(Instant::now()))? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Kills the keeper, and waits until the guard has killed the processes that the keeper left behind.
    pub(crate) fn kill_and_wait(&self, timeout: Duration) -> io::Result<()> {
        self.kill_keeper()?;
        // Sends SIGCONT in case the guard has been stopped by a signal.
        let _ = pidfd_send_signal(&self.guard, Signal::CONT);
        if self.wait(timeout)? {
            return Ok(());
        }
        let _ = pidfd_send_signal(&self.guard, Signal::KILL);
        Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "the keeper's guard failed to kill the processes that the keeper left behind",
        ))
    }
}

impl Drop for DetachedKeeper {
    fn drop(&mut self) {
        // If the wait fails, the processes exit later, and the guard can remain as a zombie.
        let _ = self.wait(DROP_TIMEOUT);
    }
}

/// Waits until a process has exited, and reaps the process if it is a child of this process. Returns false if the
/// process is still running after `timeout`.
fn reap_within(process: &OwnedFd, timeout: Duration) -> io::Result<bool> {
    if !wait_until_readable(process, timeout)? {
        return Ok(false);
    }
    // Fails if another process adopts orphans, because that process then reaps the exited process.
    let _ = waitid(WaitId::PidFd(process.as_fd()), WaitIdOptions::EXITED | WaitIdOptions::NOHANG);
    Ok(true)
}

fn not_a_keeper(program: &Path) -> io::Error {
    io::Error::other(format!(
        "{} did not become a keeper: the program must use the same version of this library as the application, and \
         call `keeper_main_if_asked` first in `main`; see the messages on the program's standard error",
        program.display()
    ))
}

/// Waits for the guard's `GuardReady` message. Fails with [`io::ErrorKind::UnexpectedEof`] if the program is not a
/// guard.
fn receive_ready(guard: &OwnedFd, socket: &OrderSocket) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let until = Instant::now() + READY_TIMEOUT;
    let mut buffer = vec![0; ORDER_BYTES_MAX];
    loop {
        match socket::receive(socket, &mut buffer)? {
            Received::Message(length, descriptors) => {
                buffer.truncate(length);
                return Ok((buffer, descriptors));
            }
            Received::Closed => return Err(io::ErrorKind::UnexpectedEof.into()),
            Received::Nothing => {}
        }
        let left = until.saturating_duration_since(Instant::now());
        let limit = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        let mut polled = [PollFd::new(socket, PollFlags::IN), PollFd::new(guard, PollFlags::IN)];
        match rustix::event::poll(&mut polled, Some(&limit)) {
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            // The guard has exited. The socket can still be open, because a process that another thread of the
            // application has just forked may hold a copy.
            Ok(_) if polled[0].revents().is_empty() => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => {}
        }
    }
}

/// Starts `program` as the guard. The new process is an orphan, not a child of this process.
#[expect(unsafe_code, reason = "execve, and the calls before execve, have no safe wrapper")]
fn start_guard(program: &Path, probe: ProbeMachine, theirs: OwnedFd) -> io::Result<OwnedFd> {
    let application = pidfd_open(rustix::process::getpid(), PidfdFlags::empty())?;
    // Duplicates both descriptors to numbers above 2. Otherwise, the first `dup2` could overwrite the source of the
    // second.
    let above = |descriptor: OwnedFd| rustix::io::fcntl_dupfd_cloexec(&descriptor, DESCRIPTOR_MIN);
    let (socket, application) = (above(theirs)?, above(application)?);
    let path = CString::new(program.as_os_str().as_bytes())?;
    let mut arguments = vec![c"bulkhead-keeper".to_owned()];
    for argument in [KEEPER_ARGUMENT, GUARDED_ARGUMENT, VERSION] {
        arguments.push(CString::new(argument)?);
    }
    if probe == ProbeMachine::Yes {
        arguments.push(CString::new(PROBE_ARGUMENT)?);
    }
    let environment = environment();
    let (argv, envp) = (vfork::null_terminated(&arguments), vfork::null_terminated(&environment));
    let [socket_number, application_number] = [&socket, &application].map(|it| it.as_raw_fd());
    // SAFETY: the child makes only three system calls. Their argument lists were prepared in advance and are
    // null-terminated.
    let started = unsafe {
        vfork::spawn_orphan(|| {
            for (from, to) in [(socket_number, libc::STDIN_FILENO), (application_number, libc::STDOUT_FILENO)]
            {
                if libc::dup2(from, to) < 0 {
                    return errno::last();
                }
            }
            libc::execve(path.as_ptr(), argv.as_ptr(), envp.as_ptr());
            errno::last()
        })
    };
    Ok(started?.pidfd)
}

/// Returns the environment of this process without the variables that other processes must not inherit.
fn environment() -> Vec<CString> {
    let kept = std::env::vars_os()
        .filter(|(name, _)| !SERVICE_MANAGER_VARIABLES.iter().any(|withheld| name == withheld));
    let joined = kept.map(|(mut entry, value): (OsString, OsString)| {
        entry.push("=");
        entry.push(value);
        CString::new(entry.into_vec())
    });
    // Omits variables that contain a NUL, because they cannot be passed to `execve`.
    joined.filter_map(Result::ok).collect()
}
