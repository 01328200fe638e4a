//! Counts the sent bytes that the peer of a Unix socket has not read yet. `unread_loans` in the data plane uses the
//! count to limit the number of descriptors in transit. Nothing is read here.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use crate::errno;

/// Returns the total size, in bytes, of the kernel buffers with data that was sent through this end of a Unix socket
/// and that the peer has not read. Returns 0 if the peer has read everything. Reading with `MSG_PEEK` does not count.
/// Fails if `ioctl(2)` with `SIOCOUTQ` fails.
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
#[expect(unsafe_code, reason = "SIOCOUTQ has no safe wrapper")]
pub fn bytes(socket: impl AsFd) -> io::Result<usize> {
    let mut unread: libc::c_int = 0;
    // SAFETY: the kernel writes one int to `unread`, which outlives the call.
    let result = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut unread) };
    errno::check(result)?;
    Ok(usize::try_from(unread).unwrap_or(0))
}
