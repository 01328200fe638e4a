//! The socket between supervisor and keeper.

use std::io;
use std::os::fd::OwnedFd;

use bulkhead_linux::packets;

use super::ORDER_BYTES_MAX;

pub(crate) use bulkhead_linux::packets::{Outbox, Received, receive};

/// Creates a pair of connected sockets. The first one sends orders, the second one the smaller reports.
pub(crate) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    packets::pair(ORDER_BYTES_MAX)
}
