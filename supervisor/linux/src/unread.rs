//! What the other side of a socket has not read yet.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use crate::errno;

/// The memory, in bytes, of what was sent through this end of a Unix socket and not read at the other: 0 once all of it
/// was. A look at it by `MSG_PEEK` is not a read. Errors are those of `ioctl(2)` with `SIOCOUTQ`.
///
/// ```
/// use std::io::{Read, Write};
/// use std::os::unix::net::UnixStream;
///
/// let (mut here, mut there) = UnixStream::pair()?;
/// here.write_all(b"word")?;
/// assert!(bulkhead_linux::unread::bytes(&here)? > 0);
/// there.read_exact(&mut [0; 4])?;
/// assert_eq!(bulkhead_linux::unread::bytes(&here)?, 0);
/// # Ok::<(), std::io::Error>(())
/// ```
#[expect(unsafe_code, reason = "SIOCOUTQ has no safe form")]
pub fn bytes(socket: impl AsFd) -> io::Result<usize> {
    let mut unread: libc::c_int = 0;
    // SAFETY: the kernel writes one int to what outlives the call.
    let told = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut unread) };
    errno::check(told)?;
    Ok(usize::try_from(unread).unwrap_or(0))
}
