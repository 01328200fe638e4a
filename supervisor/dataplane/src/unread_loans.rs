//! Limits the number of descriptors in transit. A descriptor of a memory file is in transit until the receiver reads
//! the message that contains it. `wiring::leases` asks this file before each loan. `leases` decides which files are
//! lent.
//!
//! The descriptors that an unprivileged supervisor has in transit, to all receivers together, cannot exceed its limit
//! on open files. A single receiver that never reads could exhaust this limit, and then no descriptor could be sent to
//! the keeper. Each receiver is therefore sent only a few descriptors until the kernel reports that the receiver has
//! read everything. All receivers together can use only part of the limit. When a connection is closed, its unread
//! loans still count until the peer has closed the connection too.

use std::os::fd::{AsFd, OwnedFd};

use bulkhead_linux::unread;

/// Maximum number of loans that can be sent to a receiver before the receiver reads any of them.
const UNREAD_MAX: u8 = 4;

/// Number of memory-file loans that a receiver might not have read yet.
#[derive(Debug, Default)]
pub(super) struct ReceiverLoans(u8);

/// Counts the memory-file loans that receivers might not have read yet.
#[derive(Debug)]
pub(super) struct UnreadLoans {
    unread: usize,
    most: usize,
    /// Connections that were closed on this side while the peer still had unread data.
    closed: Vec<(OwnedFd, ReceiverLoans)>,
}

impl UnreadLoans {
    /// Creates a counter that allows at most `most` unread loans in total.
    pub(super) fn new(most: usize) -> Self {
        Self { unread: 0, most, closed: Vec::new() }
    }

    /// Returns true if another loan can be sent to the receiver.
    pub(super) fn can_lend(&mut self, socket: impl AsFd, receiver: &mut ReceiverLoans) -> bool {
        if receiver.0 > 0 && is_read(socket) {
            self.unread -= usize::from(std::mem::take(receiver).0);
        }
        receiver.0 < UNREAD_MAX && self.unread < self.most
    }

    /// Counts a loan that has been sent.
    pub(super) fn lent(&mut self, receiver: &mut ReceiverLoans) {
        receiver.0 += 1;
        self.unread += 1;
    }

    /// Stops counting the loans of a receiver whose connection was handed over to another process.
    pub(super) fn forget(&mut self, receiver: &mut ReceiverLoans) {
        self.unread -= usize::from(std::mem::take(receiver).0);
    }

    /// Prepares to close a connection. Loans that the receiver has not read continue to count as unread.
    pub(super) fn close(&mut self, socket: impl AsFd, receiver: &mut ReceiverLoans) {
        let left = std::mem::take(receiver);
        if left.0 == 0 {
            return;
        }
        match socket.as_fd().try_clone_to_owned() {
            Ok(kept) if !is_read(&kept) => {
                // For the receiver, the effect is the same as if the socket were closed.
                let _ = rustix::net::shutdown(&kept, rustix::net::Shutdown::Both);
                self.closed.push((kept, left));
            }
            _ => self.unread -= usize::from(left.0),
        }
    }

    /// Returns true if there might be closed connections with unread loans.
    pub(super) fn needs_checks(&self) -> bool {
        !self.closed.is_empty()
    }

    /// Removes closed connections whose receivers have read everything or closed their own end.
    pub(super) fn remove_closed(&mut self) {
        let unread = &mut self.unread;
        self.closed.retain(|(socket, left)| {
            let is_read = is_read(socket);
            *unread -= if is_read { usize::from(left.0) } else { 0 };
            !is_read
        });
    }
}

fn is_read(socket: impl AsFd) -> bool {
    unread::bytes(socket).is_ok_and(|bytes| bytes == 0)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::time::{Duration, Instant};

    use super::*;

    /// A receiver cannot get around the limit by opening a new connection, because unread loans on its closed
    /// connections still count.
    #[test]
    fn receiver_that_does_not_read_is_sent_few_loans() {
        let mut lends = UnreadLoans::new(2 * usize::from(UNREAD_MAX));
        let mut others = Vec::new();
        for _ in 0..2 {
            let (mut here, there) = UnixStream::pair().unwrap();
            let mut unread = ReceiverLoans::default();
            for _ in 0..UNREAD_MAX {
                assert!(lends.can_lend(&here, &mut unread));
                here.write_all(b"lent").unwrap();
                lends.lent(&mut unread);
            }
            assert!(!lends.can_lend(&here, &mut unread));
            lends.close(&here, &mut unread);
            others.push(there);
        }
        let (here, _there) = UnixStream::pair().unwrap();
        assert!(
            !lends.can_lend(&here, &mut ReceiverLoans::default()),
            "the limit for all receivers together must be reached"
        );
        lends.remove_closed();
        assert!(lends.needs_checks());
        others[0].read_to_end(&mut Vec::new()).unwrap();
        others.pop();
        // A child that another test has forked can still have a copy of the closed socket.
        let until = Instant::now() + Duration::from_secs(60);
        while lends.needs_checks() {
            assert!(Instant::now() < until, "the loans of a receiver that closed its end still count");
            lends.remove_closed();
            std::thread::yield_now();
        }
        assert!(lends.can_lend(&here, &mut ReceiverLoans::default()));
    }

    #[test]
    fn receiver_that_reads_is_sent_any_number_of_loans() {
        let mut lends = UnreadLoans::new(1);
        let (mut here, mut there) = UnixStream::pair().unwrap();
        let mut unread = ReceiverLoans::default();
        for _ in 0..3 {
            assert!(lends.can_lend(&here, &mut unread));
            here.write_all(b"lent").unwrap();
            lends.lent(&mut unread);
            assert!(!lends.can_lend(&here, &mut unread));
            there.read_exact(&mut [0; 4]).unwrap();
        }
        lends.close(&here, &mut unread);
        lends.remove_closed();
        assert!(!lends.needs_checks());
    }
}
