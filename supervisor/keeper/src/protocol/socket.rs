//! Creates the socket pair between supervisor and keeper. Closing the supervisor's end makes the keeper exit. `orders`
//! and `reports` define the messages, and `bulkhead_linux::packets` sends and receives them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bulkhead_linux::packets;
use rustix::net::Shutdown;

use super::ORDER_BYTES_MAX;

pub(crate) use bulkhead_linux::packets::{Outbox, Received, receive};

/// The supervisor's end of the socket. Dropping this value disconnects the keeper, which then exits.
#[derive(Debug)]
pub(crate) struct OrderSocket(OwnedFd);

impl OrderSocket {
    /// Creates a pair of connected sockets. The second socket is the keeper's end.
    pub(crate) fn pair() -> io::Result<(Self, OwnedFd)> {
        pair().map(|(orders, reports)| (Self(orders), reports))
    }

    /// Disconnects the keeper. Closing the descriptor would not be enough, because a forked child of the application
    /// can hold a copy.
    pub(crate) fn shut_down(&self) {
        // Fails only if the socket is not connected.
        let _ = rustix::net::shutdown(&self.0, Shutdown::Both);
    }
}

impl Drop for OrderSocket {
    fn drop(&mut self) {
        self.shut_down();
    }
}

impl AsFd for OrderSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Creates a pair of connected sockets. The first socket sends orders. The second socket sends reports, which are
/// smaller than orders.
pub(crate) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    packets::pair(ORDER_BYTES_MAX)
}
