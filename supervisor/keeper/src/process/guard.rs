//! The guard: the process between an application with a supervisor in it and that one's keeper.
//!
//! A supervisor that is a program of its own inherits what a killed keeper leaves behind, and ends it. An application
//! has children of its own, and what it inherits is its own choice; so the guard inherits in its place. It also does,
//! with one thread, what takes a fork before there is a keeper: it finds out what this machine can confine workers by.
//! While the keeper lives it sleeps; when the keeper is killed, it ends what is left, and itself.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use bincode::{BorrowDecode, Encode};
use bulkhead_linux::errno;
use bulkhead_linux::wait::{exit_code, is_readable};
use bulkhead_shared::codec;
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{Mode, OFlags};
use rustix::pipe::PipeFlags;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::{END_PATIENCE, becoming};
use crate::socket::Outbox;
use crate::spawn::put_at;
use crate::{Ability, SubordinateIds, wait};

/// The second argument of a keeper that has a guard; the third is [`VERSION`].
pub(crate) const GUARDED_ARGUMENT: &str = "guarded";

/// The fourth argument where the first message is to say what this machine can do.
pub(crate) const FIRST_ARGUMENT: &str = "first";

/// Orders and reports have no version, since both ends are of one program; where the keeper's is another one, it has to be
/// of the same.
pub(crate) const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "/2");

/// How long after the application's end the keeper may take to be gone, beyond its own patience.
const KEEPER_TIME_MORE: Duration = Duration::from_secs(5);

/// The guard's one message. Descriptors come along: the keeper's process, and the namespace of `ids` if there is one.
#[derive(Debug, Encode, BorrowDecode)]
pub(crate) struct Ready {
    pub(crate) keeper: u32,
    pub(crate) abilities: Vec<Ability>,
    /// The first and the last of the subordinate ids, or why there are none.
    pub(crate) ids: Result<(u32, u32), String>,
}

/// Becomes the guard, and forks the keeper: this returns in the keeper alone. Standard input is the socket, and standard
/// output the application's end.
pub(super) fn guard(version: Option<&str>, is_first: bool) -> io::Result<Pid> {
    if version != Some(VERSION) {
        let theirs = version.map_or("of no version".to_owned(), |theirs| format!("of {theirs}"));
        return Err(io::Error::other(format!(
            "the application's library is {theirs}, and this keeper of {VERSION}: name the keeper of that version"
        )));
    }
    rustix::thread::set_name(c"bulkhead-guard")?;
    becoming::set_signals()?;
    becoming::close_inherited()?;
    // Fails only for the leader of a process group.
    let _ = rustix::process::setsid();
    rustix::process::set_child_subreaper(Some(Pid::INIT))?;
    let abilities = if is_first { crate::probe() } else { Vec::new() };
    let ids = match is_first {
        true => SubordinateIds::find(),
        false => Err(String::new()),
    };
    rustix::process::chdir("/")?;
    let own = rustix::process::getpid();
    let (told, tells) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    match fork()? {
        None => {
            // What the keeper reports is behind what the guard tells, on the same socket. A guard that ends tells, too.
            drop(tells);
            rustix::io::retry_on_intr(|| rustix::io::read(&told, &mut [0]))?;
            Ok(own)
        }
        Some(keeper) => {
            drop(told);
            let ended = attend(keeper, abilities, ids, tells);
            if let Err(error) = &ended {
                eprintln!("bulkhead-keeper: failed to guard the keeper: {error}");
            }
            std::process::exit(i32::from(!matches!(ended, Ok(true))))
        }
    }
}

/// Forks; `None` in the child.
#[expect(unsafe_code, reason = "a fork has no safe form")]
fn fork() -> io::Result<Option<Pid>> {
    // SAFETY: this process has one thread, which goes on in both.
    let pid = unsafe { libc::fork() };
    errno::check(pid)?;
    Ok(Pid::from_raw(pid))
}

/// Tells the application, then the keeper by closing `tells`, and waits for the end of either. Returns whether the keeper
/// ended in order.
fn attend(
    keeper: Pid,
    abilities: Vec<Ability>,
    ids: Result<SubordinateIds, String>,
    tells: OwnedFd,
) -> io::Result<bool> {
    let process = pidfd_open(keeper, PidfdFlags::empty())?;
    tell(keeper, &process, abilities, ids)?;
    drop(tells);
    // The application is to see the end of the keeper's socket when the keeper has ended.
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    put_at(&null, libc::STDIN_FILENO)?;
    let application = std::io::stdout();
    let mut polled = [PollFd::new(&process, PollFlags::IN), PollFd::new(&application, PollFlags::IN)];
    rustix::io::retry_on_intr(|| rustix::event::poll(&mut polled, None))?;
    if polled[0].revents().is_empty() {
        // It notices by itself, unless it is stopped.
        let _ = pidfd_send_signal(&process, Signal::CONT);
        if !is_readable(&process, END_PATIENCE + KEEPER_TIME_MORE)? {
            let _ = pidfd_send_signal(&process, Signal::KILL);
        }
    }
    if exit_code(keeper.as_raw_pid())? == Some(0) {
        return Ok(true);
    }
    wait::end_all(END_PATIENCE)?;
    Ok(false)
}

fn tell(
    keeper: Pid,
    process: &OwnedFd,
    abilities: Vec<Ability>,
    ids: Result<SubordinateIds, String>,
) -> io::Result<()> {
    let mut descriptors = vec![process.try_clone()?];
    if let Ok(ids) = &ids {
        descriptors.push(ids.namespace()?);
    }
    let ids = ids.map(|ids| (ids.first, ids.last));
    let ready = Ready { keeper: keeper.as_raw_pid() as u32, abilities, ids };
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
