//! The socket between supervisor and keeper.

use std::io;
use std::os::fd::OwnedFd;

use bulkhead_linux::packets;

use super::ORDER_BYTES_MAX;

pub(crate) use bulkhead_linux::packets::{Outbox, Received, receive};

/// Creates a pair of connected sockets. The first sends orders, and the second sends reports, which are smaller.
pub(crate) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    packets::pair(ORDER_BYTES_MAX)
}
