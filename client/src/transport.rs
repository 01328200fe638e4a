//! Reads and writes the bytes of the client's connection to the supervisor, over a socket or within the process.
//! `connection` opens the transport, performs the handshake and reconnects. `requests` handles the frames.

use std::future::poll_fn;
use std::io;
use std::os::fd::OwnedFd;

use bulkhead_shared::connection::{BufferPool, Outbox};
use bulkhead_shared::in_process::Endpoint;
use bulkhead_shared::memory_files::receive_with_files;
use rustix::net::RecvFlags;
use tokio::io::Interest;
use tokio::net::UnixStream;

/// Transport for a connection to the supervisor.
#[derive(Debug)]
pub(crate) enum Transport {
    Socket(UnixStream),
    InProcess(Endpoint),
}

impl Transport {
    pub(crate) async fn readable(&self) -> io::Result<()> {
        match self {
            Self::Socket(socket) => socket.readable().await,
            Self::InProcess(end) => {
                // Consumes tokio's cooperative budget, as tokio's sockets do, so that a busy connection does
                // not starve other tasks.
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

    /// Runs `act`. If `act` returns `WouldBlock`, clears tokio's readiness flag, so that the next wait lasts until
    /// the socket is ready again.
    pub(crate) fn try_io<T>(&self, interest: Interest, act: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        match self {
            Self::Socket(socket) => socket.try_io(interest, act),
            Self::InProcess(_) => act(),
        }
    }

    /// Reads from the connection without blocking. Received descriptors replace the contents of `files`. If
    /// `files` is `None`, received descriptors are discarded.
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

    /// Returns true if all bytes that have arrived have been read.
    pub(crate) fn has_no_unread_bytes(&self) -> bool {
        match self {
            Self::Socket(socket) => rustix::io::ioctl_fionread(socket).is_ok_and(|unread| unread == 0),
            Self::InProcess(end) => end.readable_bytes() == 0,
        }
    }

    /// Writes as many queued bytes as possible without blocking. Returns true if all bytes were written.
    pub(crate) fn flush(&self, outbox: &mut Outbox, pool: &mut BufferPool) -> io::Result<bool> {
        match self {
            Self::Socket(socket) => outbox.flush(socket, pool),
            Self::InProcess(end) => outbox.flush_in_process(end, pool),
        }
    }

    /// Shuts down the connection, including all duplicates of the socket.
    pub(crate) fn close(&self) {
        match self {
            Self::Socket(socket) => {
                let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
            }
            Self::InProcess(end) => end.close(),
        }
    }
}
