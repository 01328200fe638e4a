//! Sockets to which no peer can pass descriptors. A passed descriptor can be slow to close (a TCP socket that
//! lingers, a large memory file). The kernel closes each descriptor that the receiver does not take.

use std::os::fd::{AsFd, AsRawFd};

use crate::errno;

/// `SO_PASSRIGHTS`, which no library defines yet. The few architectures with a different numbering of socket
/// options use another value.
const SO_PASSRIGHTS: libc::c_int = 83;

/// Makes a Unix socket refuse descriptors: a peer that sends any gets `EPERM`. Accepted connections inherit
/// the option from the listener. Errors are those of `setsockopt(2)`: `ENOPROTOOPT` before Linux 6.16.
#[expect(unsafe_code, reason = "SO_PASSRIGHTS has no safe wrapper")]
pub fn refuse_descriptors(socket: &impl AsFd) -> rustix::io::Result<()> {
    let (fd, none): (_, libc::c_int) = (socket.as_fd().as_raw_fd(), 0);
    let bytes = size_of_val(&none) as libc::socklen_t;
    // SAFETY: the kernel reads `bytes` bytes from `none`, which outlives the call.
    let result =
        unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, SO_PASSRIGHTS, (&raw const none).cast(), bytes) };
    errno::check(result)
}
