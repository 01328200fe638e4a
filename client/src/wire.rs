//! What a connection's bytes go through: a socket, or memory of this process.

use std::future::poll_fn;
use std::io;
use std::os::fd::OwnedFd;

use bulkhead_shared::connection::{BufferPool, Outbox};
use bulkhead_shared::in_process::End;
use bulkhead_shared::memory_files::receive_with_files;
use rustix::net::RecvFlags;
use tokio::io::Interest;
use tokio::net::UnixStream;

/// To the supervisor.
#[derive(Debug)]
pub(crate) enum Wire {
    Socket(UnixStream),
    InProcess(End),
}

impl Wire {
    pub(crate) async fn readable(&self) -> io::Result<()> {
        match self {
            Self::Socket(socket) => socket.readable().await,
            Self::InProcess(end) => {
                // As a socket does: others of the runtime have their turns.
                tokio::task::coop::consume_budget().await;
                poll_fn(|context| end.poll_readable(context)).await;
                Ok(())
            }
        }
    }

    pub(crate) async fn writable(&self) -> io::Result<()> {
        match self {
            Self::Socket(socket) => socket.writable().await,
            Self::InProcess(end) => {
                poll_fn(|context| end.poll_writable(context)).await;
                Ok(())
            }
        }
    }

    /// Has the next wait be one if this finds nothing to do, which is an error of the kind `WouldBlock`.
    pub(crate) fn try_io<T>(&self, interest: Interest, act: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        match self {
            Self::Socket(socket) => socket.try_io(interest, act),
            Self::InProcess(_) => act(),
        }
    }

    /// Reads without waiting. Files that come take the place of those that are there; if none are expected, they are not
    /// taken.
    pub(crate) fn receive(
        &self,
        buffer: &mut [u8],
        files: Option<&mut Vec<OwnedFd>>,
    ) -> rustix::io::Result<usize> {
        match (self, files) {
            (Self::Socket(socket), Some(files)) => receive_with_files(socket, buffer, files),
            (Self::Socket(socket), None) => {
                rustix::net::recv(socket, buffer, RecvFlags::DONTWAIT).map(|(_, count)| count)
            }
            (Self::InProcess(end), Some(files)) => end.read(buffer, files),
            (Self::InProcess(end), None) => end.read(buffer, &mut Vec::new()),
        }
    }

    /// Whether all that came was read.
    pub(crate) fn is_read(&self) -> bool {
        match self {
            Self::Socket(socket) => rustix::io::ioctl_fionread(socket).is_ok_and(|unread| unread == 0),
            Self::InProcess(end) => end.readable_bytes() == 0,
        }
    }

    /// Writes what there is room for; returns whether that is all.
    pub(crate) fn flush(&self, outbox: &mut Outbox, pool: &mut BufferPool) -> io::Result<bool> {
        match self {
            Self::Socket(socket) => outbox.flush(socket, pool),
            Self::InProcess(end) => outbox.flush_in_process(end, pool),
        }
    }

    /// Ends the connection, whichever copies of it there are.
    pub(crate) fn close(&self) {
        match self {
            Self::Socket(socket) => {
                let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
            }
            Self::InProcess(end) => end.close(),
        }
    }
}
