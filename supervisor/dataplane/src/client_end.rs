//! Our end of a client's connection: a socket, or memory of this process.

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use bulkhead_shared::connection::{BufferPool, Outbox};
use bulkhead_shared::in_process;
use bulkhead_shared::memory_files::{FILES, Named};
use mio::unix::SourceFd;
use mio::{Registry, Token};
use rustix::io::Errno;

use super::descriptors::Intake;
use super::lends::{Lends, Unread};
use super::{INTEREST, memory_files};

pub(super) enum ClientEnd {
    Socket(UnixStream),
    /// Of a client in the application that this is in.
    InProcess(in_process::End),
}

impl ClientEnd {
    /// Has its events told. Those of one in this process come by the bell.
    pub(super) fn register(&self, registry: &Registry, token: Token) -> io::Result<()> {
        match self {
            Self::Socket(socket) => registry.register(&mut SourceFd(&socket.as_raw_fd()), token, INTEREST),
            Self::InProcess(_) => Ok(()),
        }
    }

    /// Reads without waiting. Errors are those of [`Intake::receive`].
    pub(super) fn receive(&self, intake: &Intake, buffer: &mut [u8]) -> rustix::io::Result<usize> {
        match self {
            Self::Socket(socket) => intake.receive(socket, buffer),
            Self::InProcess(end) => end.read(buffer, &mut Vec::new()),
        }
    }

    /// Whether nothing has come that was not read, and it is open.
    pub(super) fn is_quiet(&self) -> bool {
        match self {
            Self::Socket(socket) => {
                let flags = rustix::net::RecvFlags::PEEK | rustix::net::RecvFlags::DONTWAIT;
                matches!(rustix::net::recv(socket, &mut [0], flags), Err(Errno::AGAIN))
            }
            Self::InProcess(end) => end.readable_bytes() == 0 && !end.is_closed(),
        }
    }

    /// Writes what there is room for; returns whether that is all.
    pub(super) fn flush(&self, outbox: &mut Outbox, pool: &mut BufferPool) -> io::Result<bool> {
        match self {
            Self::Socket(socket) => outbox.flush(socket, pool),
            Self::InProcess(end) => outbox.flush_in_process(end, pool),
        }
    }

    /// Says that nothing more will be written. The client hears of it when it has read all; of an end in this process,
    /// that is when it is dropped.
    pub(super) fn finish(&self) {
        if let Self::Socket(socket) = self {
            let _ = socket.shutdown(Shutdown::Write);
        }
    }

    /// Whether a memory file may be lent to this client.
    pub(super) fn may_lend(&self, lends: &mut Lends, receiver: &mut Unread) -> bool {
        match self {
            Self::Socket(socket) => lends.may_lend(socket, receiver),
            // No socket has them on its way.
            Self::InProcess(_) => true,
        }
    }

    /// Lends the files, with the frame that says so. Nothing waits to be written.
    pub(super) fn lend(
        &self,
        said: (u8, u64),
        named: Named,
        files: [BorrowedFd<'_>; FILES],
        (lends, receiver): (&mut Lends, &mut Unread),
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

    /// It is to be closed. What was lent and is unread stays on its way.
    pub(super) fn let_go(&self, lends: &mut Lends, receiver: &mut Unread) {
        if let Self::Socket(socket) = self {
            lends.close(socket, receiver);
        }
    }

    /// Closes it.
    pub(super) fn close(self, registry: &Registry, intake: &Intake) {
        match self {
            Self::Socket(socket) => {
                let _ = registry.deregister(&mut SourceFd(&socket.as_raw_fd()));
                intake.close(socket);
            }
            Self::InProcess(end) => end.close(),
        }
    }
}
