//! Sends and receives whole messages with descriptors over a `SOCK_SEQPACKET` socket. The supervisor uses such sockets
//! to talk to its keeper, and to the other supervisor during an upgrade. The users of this module define the content of
//! the messages.
//!
//! No function blocks. Messages that the socket does not accept yet wait in an [`Outbox`], whose owner has to limit
//! their number.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};

/// Maximum number of descriptors in a message.
pub const DESCRIPTORS_MAX: usize = 3;

/// Creates a pair of connected close-on-exec sockets. `message_bytes_max` is the maximum size in bytes of a message
/// that the first socket sends.
pub fn pair(message_bytes_max: usize) -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC;
    let (here, there) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    // Leaves room for the kernel's overhead. The default is enough for the other direction, whose messages are small.
    // The kernel's maximum is large enough by default.
    rustix::net::sockopt::set_socket_send_buffer_size(&here, 2 * message_bytes_max)?;
    Ok((here, there))
}

/// Messages that are waiting to be sent over the socket, each with its descriptors.
#[derive(Debug, Default)]
pub struct Outbox(VecDeque<(Vec<u8>, Vec<OwnedFd>)>);

impl Outbox {
    /// Returns the number of messages that are waiting to be sent.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns true if no messages are waiting to be sent.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a message with at most [`DESCRIPTORS_MAX`] descriptors.
    pub fn push(&mut self, message: Vec<u8>, descriptors: Vec<OwnedFd>) {
        debug_assert!(descriptors.len() <= DESCRIPTORS_MAX);
        self.0.push_back((message, descriptors));
    }

    /// Sends messages until the socket is full. Returns true if all messages have been sent. Otherwise, the caller must
    /// call this function again when the socket is writable. Returns the errors of `sendmsg(2)`.
    pub fn flush(&mut self, socket: impl AsFd) -> io::Result<bool> {
        while let Some((message, descriptors)) = self.0.front() {
            match send(&socket, message, descriptors) {
                Ok(()) => drop(self.0.pop_front()),
                // An unprivileged user can have only a limited number of descriptors in flight, so the peer must
                // receive some first.
                Err(Errno::AGAIN | Errno::TOOMANYREFS) => return Ok(false),
                Err(Errno::INTR) => {}
                // The peer has closed its end while messages were still unread.
                Err(Errno::CONNRESET) => return Err(Errno::PIPE.into()),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }
}

fn send(socket: impl AsFd, message: &[u8], descriptors: &[OwnedFd]) -> rustix::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    if !borrowed.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(&borrowed)) {
        return Err(Errno::INVAL);
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::net::sendmsg(socket, &[IoSlice::new(message)], &mut ancillary, flags).map(drop)
}

/// Result of [`receive`].
pub enum Received {
    /// A message was received. Contains the message's size in bytes, and the descriptors. Descriptors are missing if
    /// this process has reached its descriptor limit.
    Message(usize, Vec<OwnedFd>),
    /// No message is available yet.
    Nothing,
    /// The peer is gone.
    Closed,
}

/// Receives the next message into `buffer`. Returns an error if `recvmsg(2)` fails, or if the message is longer than
/// the buffer.
pub fn receive(socket: impl AsFd, buffer: &mut [u8]) -> io::Result<Received> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = loop {
        let mut slices = [IoSliceMut::new(buffer)];
        match rustix::net::recvmsg(&socket, &mut slices, &mut ancillary, flags) {
            Ok(received) => break received,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(Received::Nothing),
            // The peer has closed its end while messages were still unread.
            Err(Errno::CONNRESET) => return Ok(Received::Closed),
            Err(error) => return Err(error.into()),
        }
    };
    if received.flags.contains(ReturnFlags::TRUNC) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "a message is longer than the receive buffer",
        ));
    }
    if received.bytes == 0 {
        return Ok(Received::Closed); // Messages are never empty.
    }
    let mut descriptors = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    Ok(Received::Message(received.bytes, descriptors))
}
