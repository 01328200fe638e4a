//! The errors of raw system calls. Safe to use between `fork` and `execve`: nothing here allocates.

use std::io;

use rustix::io::Errno;

/// The error of the last system call of this thread that failed.
#[inline]
#[expect(unsafe_code, reason = "the C library's errno has no safe form without an allocation")]
pub fn last() -> Errno {
    // SAFETY: the address of this thread's `errno`, always there.
    Errno::from_raw_os_error(unsafe { *libc::__errno_location() })
}

/// What a call that returns -1 for an error has returned.
#[inline]
pub fn check(result: impl Into<i64>) -> rustix::io::Result<()> {
    if result.into() == -1 { Err(last()) } else { Ok(()) }
}

/// The error's number, or `otherwise` if it has none.
pub fn of(error: &io::Error, otherwise: Errno) -> Errno {
    error.raw_os_error().map_or(otherwise, Errno::from_raw_os_error)
}
