//! Errors of raw system calls. No function allocates memory, so all functions can be used between `fork` and `execve`.

use std::io;

use rustix::io::Errno;

/// Returns the error of this thread's last failed system call.
#[inline]
#[expect(unsafe_code, reason = "no safe wrapper returns the C library's errno without allocating memory")]
pub fn last() -> Errno {
    // SAFETY: the address of this thread's `errno` is always valid.
    Errno::from_raw_os_error(unsafe { *libc::__errno_location() })
}

/// Converts the return value of a system call to a result. The call must return -1 on error.
#[inline]
pub fn check(result: impl Into<i64>) -> rustix::io::Result<()> {
    if result.into() == -1 { Err(last()) } else { Ok(()) }
}

/// Returns the error number of `error`, or `otherwise` if `error` has no error number.
pub fn from_io(error: &io::Error, otherwise: Errno) -> Errno {
    error.raw_os_error().map_or(otherwise, Errno::from_raw_os_error)
}
