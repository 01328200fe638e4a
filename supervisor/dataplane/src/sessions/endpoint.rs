//! Reads, writes and closes the supervisor's end of a client connection. The connection is a socket, or memory shared
//! with an in-process client, and callers do not have to distinguish the two. The wiring decides when to read and
//! write. Frames are decoded elsewhere, in the session's inbox.

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use bulkhead_shared::connection::{BufferPool, Outbox};
use bulkhead_shared::in_process;
use bulkhead_shared::memory_files::{FILES_PER_LEASE, LeaseRef};
use mio::unix::SourceFd;
use mio::{Registry, Token};
use rustix::io::Errno;

use crate::descriptors::Intake;
use crate::unread_loans::{ReceiverLoans, UnreadLoans};
use crate::{INTEREST, memory_files};

pub(crate) enum ClientEndpoint {
    Socket(UnixStream),
    /// Connection to a client in the supervisor's own process.
    InProcess(in_process::Endpoint),
}

impl ClientEndpoint {
    /// Registers the client's socket with the event loop. Does nothing for an in-process client, which uses
    /// `InProcessWaker` to wake the event loop.
    pub(crate) fn register(&self, registry: &Registry, token: Token) -> io::Result<()> {
        match self {
            Self::Socket(socket) => registry.register(&mut SourceFd(&socket.as_raw_fd()), token, INTEREST),
            Self::InProcess(_) => Ok(()),
        }
    }

    /// Reads without blocking. Fails with the same errors as [`Intake::receive`].
    pub(crate) fn receive(&self, intake: &Intake, buffer: &mut [u8]) -> rustix::io::Result<usize> {
        match self {
            Self::Socket(socket) => intake.receive(socket, buffer),
            Self::InProcess(end) => end.read(buffer, &mut Vec::new()),
        }
    }

    /// Returns true if the connection is open and has no unread bytes.
    pub(crate) fn is_quiet(&self) -> bool {
        match self {
            Self::Socket(socket) => {
                let flags = rustix::net::RecvFlags::PEEK | rustix::net::RecvFlags::DONTWAIT;
                matches!(rustix::net::recv(socket, &mut [0], flags), Err(Errno::AGAIN))
            }
            Self::InProcess(end) => end.readable_bytes() == 0 && !end.is_closed(),
        }
    }

    /// Writes as many bytes as the connection accepts. Returns true if the outbox is empty afterwards.
    pub(crate) fn flush(&self, outbox: &mut Outbox, pool: &mut BufferPool) -> io::Result<bool> {
        match self {
            Self::Socket(socket) => outbox.flush(socket, pool),
            Self::InProcess(end) => outbox.flush_in_process(end, pool),
        }
    }

    /// Shuts down the sending side of a socket, so that the client sees the end of the stream after reading everything.
    /// An in-process connection ends when this value is dropped.
    pub(crate) fn finish(&self) {
        if let Self::Socket(socket) = self {
            let _ = socket.shutdown(Shutdown::Write);
        }
    }

    /// Returns true if memory files can currently be lent to this client.
    pub(crate) fn can_lend(&self, lends: &mut UnreadLoans, receiver: &mut ReceiverLoans) -> bool {
        match self {
            Self::Socket(socket) => lends.can_lend(socket, receiver),
            // In-process clients receive descriptors without a socket, so none are in transit.
            Self::InProcess(_) => true,
        }
    }

    /// Sends a frame along with the memory files that it announces. The outbox must be empty.
    pub(crate) fn lend(
        &self,
        said: (u8, u64),
        named: LeaseRef,
        files: [BorrowedFd<'_>; FILES_PER_LEASE],
        (lends, receiver): (&mut UnreadLoans, &mut ReceiverLoans),
    ) -> io::Result<()> {
        match self {
            Self::Socket(socket) => {
                memory_files::lend(socket, said, &named, &files)?;
                lends.lent(receiver);
                Ok(())
            }
            Self::InProcess(end) => {
                let frame = memory_files::lend_frame(said, &named)?;
                let copies = files.iter().map(|file| file.try_clone_to_owned());
                end.write_with_files(&frame, copies.collect::<io::Result<_>>()?)?;
                Ok(())
            }
        }
    }

    /// Prepares to close the connection. Loans that the client has not received yet still count as unread.
    pub(crate) fn release_files(&self, lends: &mut UnreadLoans, receiver: &mut ReceiverLoans) {
        if let Self::Socket(socket) = self {
            lends.close(socket, receiver);
        }
    }

    pub(crate) fn close(self, registry: &Registry, intake: &Intake) {
        match self {
            Self::Socket(socket) => {
                let _ = registry.deregister(&mut SourceFd(&socket.as_raw_fd()));
                intake.close(socket);
            }
            Self::InProcess(end) => end.close(),
        }
    }
}
