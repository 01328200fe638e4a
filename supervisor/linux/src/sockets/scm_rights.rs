//! Makes sockets refuse descriptors. Otherwise, the kernel would close each descriptor that the receiver does not take,
//! which can be slow (for a lingering TCP socket or a large memory file).

use std::os::fd::{AsFd, AsRawFd};

use crate::errno;

/// Value of the socket option `SO_PASSRIGHTS`, which no crate defines yet. A few architectures use a different value.
const SO_PASSRIGHTS: libc::c_int = 83;

/// Makes a Unix socket refuse descriptors, so that a peer that sends one gets `EPERM`. Accepted connections inherit the
/// option from the listener. Fails if `setsockopt(2)` fails, with `ENOPROTOOPT` before Linux 6.16.
#[expect(unsafe_code, reason = "SO_PASSRIGHTS has no safe wrapper")]
pub fn refuse_descriptors(socket: &impl AsFd) -> rustix::io::Result<()> {
    let (fd, none): (_, libc::c_int) = (socket.as_fd().as_raw_fd(), 0);
    let bytes = size_of_val(&none) as libc::socklen_t;
    // SAFETY: the kernel reads `bytes` bytes from `none`, which outlives the call.
    let result =
        unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, SO_PASSRIGHTS, (&raw const none).cast(), bytes) };
    errno::check(result)
}
