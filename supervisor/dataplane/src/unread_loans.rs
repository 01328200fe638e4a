//! Descriptors in transit: memory files in messages that the receivers have not read.
//!
//! A supervisor without privileges can have at most as many descriptors in transit, to all receivers together, as its
//! limit of open files. A single receiver that never reads could use up this limit, and then no descriptor could be
//! sent to the keeper. Each receiver is therefore sent a few descriptors, and no more until the kernel reports that
//! everything has been read. All receivers together get a part of the limit. Unread lends of a closed connection
//! count until the peer has closed it too.

use std::os::fd::{AsFd, OwnedFd};

use bulkhead_linux::unread;

/// Maximum number of unread lends per receiver.
const UNREAD_MAX: u8 = 4;

/// Number of lends that a receiver may not have read yet.
#[derive(Debug, Default)]
pub(super) struct ReceiverLoans(u8);

/// Lends that the receivers may not have read yet.
#[derive(Debug)]
pub(super) struct UnreadLoans {
    unread: usize,
    most: usize,
    /// Connections that are closed here but still have unread data at the peer.
    closed: Vec<(OwnedFd, ReceiverLoans)>,
}

impl UnreadLoans {
    /// Limits the number of unread lends to `most`.
    pub(super) fn new(most: usize) -> Self {
        Self { unread: 0, most, closed: Vec::new() }
    }

    /// Returns true if another lend can be sent.
    pub(super) fn can_lend(&mut self, socket: impl AsFd, receiver: &mut ReceiverLoans) -> bool {
        if receiver.0 > 0 && is_read(socket) {
            self.unread -= usize::from(std::mem::take(receiver).0);
        }
        receiver.0 < UNREAD_MAX && self.unread < self.most
    }

    /// Counts a lend that was sent.
    pub(super) fn lent(&mut self, receiver: &mut ReceiverLoans) {
        receiver.0 += 1;
        self.unread += 1;
    }

    /// Prepares a connection for closing. Lends that the receiver has not read still count as in transit.
    pub(super) fn close(&mut self, socket: impl AsFd, receiver: &mut ReceiverLoans) {
        let left = std::mem::take(receiver);
        if left.0 == 0 {
            return;
        }
        match socket.as_fd().try_clone_to_owned() {
            Ok(kept) if !is_read(&kept) => {
                // The receiver sees the end as if the socket were closed.
                let _ = rustix::net::shutdown(&kept, rustix::net::Shutdown::Both);
                self.closed.push((kept, left));
            }
            _ => self.unread -= usize::from(left.0),
        }
    }

    /// Returns true if some closed connections may have unread loans.
    pub(super) fn needs_checks(&self) -> bool {
        !self.closed.is_empty()
    }

    /// Removes connections that the receivers have read completely or closed.
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

    use super::*;

    /// Reconnecting does not help, because unread lends of a closed connection still count.
    #[test]
    fn receiver_that_does_not_read_gets_few_lends() {
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
            "all together have used up what there is"
        );
        lends.remove_closed();
        assert!(lends.needs_checks());
        others[0].read_to_end(&mut Vec::new()).unwrap();
        others.pop();
        lends.remove_closed();
        assert!(!lends.needs_checks());
        assert!(lends.can_lend(&here, &mut ReceiverLoans::default()));
    }

    #[test]
    fn one_that_reads_is_lent_to_for_ever() {
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
