//! Closes all descriptors of this process from a given number upwards, except those that the caller names. The keeper
//! uses this for itself and in its forked children, so that no inherited descriptor stays open. Nothing checks whether
//! other code still uses a descriptor.
#![expect(unsafe_code, reason = "close_range(2) has no safe wrapper")]

use std::os::fd::RawFd;

use rustix::io::Result;

use crate::errno;

/// Closes all descriptors numbered `first` or higher, except those in `kept`. Allocates no memory.
///
/// # Safety
///
/// No code in this process may use a closed descriptor afterwards.
pub unsafe fn close_all_except(first: RawFd, kept: &mut [RawFd]) -> Result<()> {
    let close = |low: RawFd, high: RawFd| {
        if low > high {
            return Ok(());
        }
        // SAFETY: guaranteed by the caller.
        errno::check(unsafe { libc::syscall(libc::SYS_close_range, low, high, 0) })
    };
    kept.sort_unstable();
    let mut low = first;
    for kept in kept {
        close(low, *kept - 1)?;
        low = low.max(*kept + 1);
    }
    close(low, RawFd::MAX)
}
