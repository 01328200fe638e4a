//! Sockets to which no peer can pass descriptors. The kernel closes each passed descriptor that the receiver
//! does not take, and closing can be slow (a TCP socket that lingers, a large memory file).

use std::os::fd::{AsFd, AsRawFd};

use crate::errno;

/// `SO_PASSRIGHTS`, which no library defines yet. A few architectures number socket options differently, and
/// have another value.
const SO_PASSRIGHTS: libc::c_int = 83;

/// Makes a Unix socket refuse descriptors. A peer that sends a descriptor gets `EPERM`. Accepted connections
/// inherit the option from the listener. Fails if `setsockopt(2)` fails, which returns `ENOPROTOOPT` before
/// Linux 6.16.
#[expect(unsafe_code, reason = "SO_PASSRIGHTS has no safe wrapper")]
pub fn refuse_descriptors(socket: &impl AsFd) -> rustix::io::Result<()> {
    let (fd, none): (_, libc::c_int) = (socket.as_fd().as_raw_fd(), 0);
    let bytes = size_of_val(&none) as libc::socklen_t;
    // SAFETY: the kernel reads `bytes` bytes from `none`, which outlives the call.
    let result =
        unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, SO_PASSRIGHTS, (&raw const none).cast(), bytes) };
    errno::check(result)
}
