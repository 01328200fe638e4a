//! Sockets to which no peer can pass descriptors. One that is passed may be slow to close (a TCP socket that
//! lingers, a large file in memory), and the kernel closes what its receiver does not take.

use std::os::fd::{AsFd, AsRawFd};

use crate::errno;

/// `SO_PASSRIGHTS`, which no library has yet. The few machines with numbers of their own have others.
const SO_PASSRIGHTS: libc::c_int = 83;

/// From here on, a peer that sends descriptors to this Unix socket gets `EPERM`; connections inherit it from their
/// listener. Errors are those of `setsockopt(2)`: `ENOPROTOOPT` before Linux 6.16.
#[expect(unsafe_code, reason = "SO_PASSRIGHTS has no safe form")]
pub fn refuse_descriptors(socket: &impl AsFd) -> rustix::io::Result<()> {
    let (fd, none): (_, libc::c_int) = (socket.as_fd().as_raw_fd(), 0);
    let bytes = size_of_val(&none) as libc::socklen_t;
    // SAFETY: the kernel reads a number of that many bytes, which outlives the call.
    let done =
        unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, SO_PASSRIGHTS, (&raw const none).cast(), bytes) };
    errno::check(done)
}
