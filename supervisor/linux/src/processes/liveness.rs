//! Waits for the exit of another program through an inherited descriptor (`--while-open`). The descriptor is the
//! program's pidfd, or a pipe, socket or terminal whose other end closes when the program exits. The supervisor stops
//! then; this module only reports the exit.

use std::io::{self, IsTerminal};
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::FileType;
use rustix::io::{Errno, FdFlags, fcntl_getfd, fcntl_setfd};
use rustix::net::SocketType;

/// An inherited pipe, socket, terminal or pidfd. A pidfd reports that its process has exited. Any other kind of
/// descriptor reports that the other end was closed. Programs that are started later do not inherit the descriptor.
#[derive(Debug)]
pub struct LivenessDescriptor {
    descriptor: OwnedFd,
    is_pidfd: bool,
}

impl LivenessDescriptor {
    /// Takes over an inherited descriptor. Call this on the first thread, before any other code has opened a
    /// descriptor.
    ///
    /// # Errors
    ///
    /// Fails if the descriptor is not open, or cannot report that its peer is gone. The message says how to fix the
    /// problem.
    #[expect(unsafe_code, reason = "the descriptor's number was passed on the command line")]
    pub fn inherit(number: RawFd) -> io::Result<Self> {
        if number < 0 {
            return Err(not_open(number));
        }
        // SAFETY: the descriptor is only queried. If the number is not open, the call fails.
        let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
        let flags = fcntl_getfd(borrowed).map_err(|_| not_open(number))?;
        let is_pidfd = is_pidfd(number);
        let stat = rustix::fs::fstat(borrowed)?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        let is_terminal = borrowed.is_terminal();
        let ends = match kind {
            FileType::Fifo => true,
            FileType::Socket => is_connected(borrowed),
            _ => is_pidfd || is_terminal,
        };
        if !ends {
            return Err(io::Error::other(format!(
                "descriptor {number} cannot report that its other end was closed: pass a pipe, a socket, a \
                 terminal or a pidfd"
            )));
        }
        fcntl_setfd(borrowed, flags | FdFlags::CLOEXEC)?;
        // SAFETY: the descriptor is open, was inherited for this purpose, and no other code in this process
        // knows of it.
        Ok(Self { descriptor: unsafe { OwnedFd::from_raw_fd(number) }, is_pidfd })
    }

    /// Waits until the other program closes its end or exits. Discards any data that arrives in the meantime.
    pub fn wait(&self) {
        let mut discarded = [0; 4096];
        loop {
            let mut polled = [PollFd::new(&self.descriptor, PollFlags::IN)];
            match poll(&mut polled, None) {
                Err(Errno::INTR | Errno::NOMEM) => continue,
                Err(_) => return,
                Ok(_) => {}
            }
            let revents = polled[0].revents();
            if self.is_pidfd || !revents.contains(PollFlags::IN) {
                return;
            }
            match rustix::io::read(&self.descriptor, &mut discarded) {
                Ok(1..) | Err(Errno::INTR | Errno::AGAIN) => {}
                Ok(0) | Err(_) => return,
            }
        }
    }
}

/// Returns true if the socket has a peer and can report that the peer closes its end.
fn is_connected(socket: BorrowedFd<'_>) -> bool {
    let kind = rustix::net::sockopt::socket_type(socket);
    matches!(kind, Ok(SocketType::STREAM | SocketType::SEQPACKET)) && rustix::net::getpeername(socket).is_ok()
}

fn not_open(number: RawFd) -> io::Error {
    io::Error::other(format!(
        "descriptor {number} is not open: the supervisor must inherit the descriptor (not close-on-exec)"
    ))
}

fn is_pidfd(number: RawFd) -> bool {
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{number}"));
    info.is_ok_and(|info| info.lines().any(|line| line.starts_with("Pid:")))
}

/// Starts a thread that calls `on_end` once the other program has closed its end or has exited.
///
/// # Errors
///
/// Fails if the thread cannot be started.
pub fn spawn_watcher(
    descriptor: LivenessDescriptor,
    on_end: impl FnOnce() + Send + 'static,
) -> io::Result<()> {
    let wait = move || {
        descriptor.wait();
        on_end();
    };
    std::thread::Builder::new().name("while-open".into()).spawn(wait).map(drop)
}
