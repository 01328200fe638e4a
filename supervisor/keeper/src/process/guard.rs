//! The guard: the process between an application that embeds a supervisor and the keeper of that supervisor.
//!
//! When a keeper is killed, a supervisor that is a separate program inherits the processes left behind, and kills them.
//! An application cannot do this, because it has other children and might not want to adopt orphans. So the guard
//! inherits these processes instead.
//!
//! The guard also probes which layers of confinement the machine supports. The probe forks, so it must run in a
//! process with one thread, and before the keeper starts.
//!
//! The guard sleeps until the keeper is killed. Then it kills the remaining processes and exits.

use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::time::Duration;

use bulkhead_linux::errno;
use bulkhead_linux::wait::{wait_for_exit_code, wait_until_readable};
use bulkhead_shared::codec;
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{Mode, OFlags};
use rustix::pipe::PipeFlags;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::{KILL_ALL_TIMEOUT, setup};
use crate::protocol::socket::Outbox;
use crate::protocol::{GuardReady, LayerSupport, VERSION};
use crate::spawn::duplicate_to;
use crate::{SubordinateIds, wait};

/// Additional time for the keeper to exit after the application has exited. Added to the keeper's own time limit for
/// killing all processes.
const KEEPER_EXIT_GRACE: Duration = Duration::from_secs(5);

/// Forks the keeper and turns this process into the guard. Returns only in the keeper, with the guard's PID.
/// Standard input must be the socket, and standard output the pidfd of the application.
pub(super) fn become_guard(version: Option<&str>, probe: bool) -> io::Result<Pid> {
    if version != Some(VERSION) {
        let theirs = version.map_or("an unknown version".to_owned(), |theirs| format!("version {theirs}"));
        return Err(io::Error::other(format!(
            "the application's library has {theirs}, but this keeper has version {VERSION}: use a keeper \
             with the library's version"
        )));
    }
    rustix::thread::set_name(c"bulkhead-guard")?;
    setup::set_signals()?;
    setup::close_inherited()?;
    // `setsid` fails only for a process group leader.
    let _ = rustix::process::setsid();
    rustix::process::set_child_subreaper(Some(Pid::INIT))?;
    let layers = if probe { crate::probe() } else { Vec::new() };
    let ids = match probe {
        true => SubordinateIds::find(),
        false => Err(String::new()),
    };
    rustix::process::chdir("/")?;
    let own = rustix::process::getpid();
    let (reader, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    match fork()? {
        None => {
            // Waits until the guard has sent its message, because the keeper's reports use the same socket
            // and must follow that message. The pipe also closes if the guard exits.
            drop(writer);
            rustix::io::retry_on_intr(|| rustix::io::read(&reader, &mut [0]))?;
            Ok(own)
        }
        Some(keeper) => {
            drop(reader);
            let ended = watch_keeper(keeper, layers, ids, writer);
            if let Err(error) = &ended {
                // Unlike `eprintln!`, this does not panic if the write fails.
                let _ = writeln!(io::stderr(), "bulkhead-keeper: failed to guard the keeper: {error}");
            }
            std::process::exit(i32::from(!matches!(ended, Ok(true))))
        }
    }
}

/// Forks this process. Returns the child's PID in the parent, and `None` in the child.
#[expect(unsafe_code, reason = "a fork has no safe wrapper")]
fn fork() -> io::Result<Option<Pid>> {
    // SAFETY: this process has one thread, which continues in both processes.
    let pid = unsafe { libc::fork() };
    errno::check(pid)?;
    Ok(Pid::from_raw(pid))
}

/// Sends the ready message to the application, and closes `writer`, which lets the keeper continue. Then waits until
/// the keeper or the application exits. Returns true if the keeper exited without an error.
fn watch_keeper(
    keeper: Pid,
    layers: Vec<LayerSupport>,
    ids: Result<SubordinateIds, String>,
    writer: OwnedFd,
) -> io::Result<bool> {
    let process = pidfd_open(keeper, PidfdFlags::empty())?;
    send_ready(keeper, &process, layers, ids)?;
    drop(writer);
    // Closes the guard's copy of the order socket. Otherwise, the application would not read end of file when the
    // keeper exits.
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    duplicate_to(&null, libc::STDIN_FILENO)?;
    let application = std::io::stdout();
    let mut polled = [PollFd::new(&process, PollFlags::IN), PollFd::new(&application, PollFlags::IN)];
    rustix::io::retry_on_intr(|| rustix::event::poll(&mut polled, None))?;
    if polled[0].revents().is_empty() {
        // Sends SIGCONT in case the keeper has been stopped by a signal. Otherwise, the keeper exits by itself when the
        // application exits.
        let _ = pidfd_send_signal(&process, Signal::CONT);
        if !wait_until_readable(&process, KILL_ALL_TIMEOUT + KEEPER_EXIT_GRACE)? {
            let _ = pidfd_send_signal(&process, Signal::KILL);
        }
    }
    if wait_for_exit_code(keeper.as_raw_pid())? == Some(0) {
        return Ok(true);
    }
    wait::kill_all_descendants(KILL_ALL_TIMEOUT)?;
    Ok(false)
}

fn send_ready(
    keeper: Pid,
    process: &OwnedFd,
    layers: Vec<LayerSupport>,
    ids: Result<SubordinateIds, String>,
) -> io::Result<()> {
    let mut descriptors = vec![process.try_clone()?];
    if let Ok(ids) = &ids {
        descriptors.push(ids.namespace()?);
    }
    let ids = ids.map(|ids| (ids.first, ids.last));
    let ready = GuardReady { keeper: keeper.as_raw_pid() as u32, layers, ids };
    let mut message = Vec::new();
    codec::encode(&ready, &[], &mut message).map_err(io::Error::other)?;
    let mut outbox = Outbox::default();
    outbox.push(message, descriptors);
    let socket = std::io::stdin();
    while !outbox.flush(&socket)? {
        let mut polled = [PollFd::new(&socket, PollFlags::OUT)];
        rustix::io::retry_on_intr(|| rustix::event::poll(&mut polled, None))?;
    }
    Ok(())
}
