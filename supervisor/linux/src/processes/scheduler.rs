//! Sets the scheduler time slice of the calling thread. The supervisor calls this once at the start, so that its
//! threads run sooner after they become runnable. Priorities and policies of threads are not changed.

use std::time::Duration;

use crate::errno;

/// Requests a shorter time slice for the calling thread and for threads that it starts.
///
/// With a shorter slice, this thread runs sooner after it becomes runnable, and other threads wait less for it. The
/// thread's share of processor time does not change. Does nothing for a thread whose scheduling policy is neither
/// `SCHED_OTHER` nor `SCHED_BATCH`. Fails if `sched_setattr(2)` fails. Linux before 6.12 accepts the slice but ignores
/// it.
#[expect(unsafe_code, reason = "sched_setattr has no safe wrapper")]
pub fn set_time_slice(slice: Duration) -> rustix::io::Result<()> {
    let size = size_of::<libc::sched_attr>();
    // SAFETY: the structure contains only numbers, for which zero is a valid value.
    let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes at most `size` bytes to `attributes`, which outlives the call.
    let result = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) };
    errno::check(result)?;
    if ![libc::SCHED_OTHER, libc::SCHED_BATCH].contains(&(attributes.sched_policy as i32)) {
        return Ok(());
    }
    attributes.size = size as u32;
    attributes.sched_runtime = u64::try_from(slice.as_nanos()).unwrap_or(u64::MAX);
    // SAFETY: the kernel reads `attributes.size` bytes of `attributes`, which outlives the call.
    errno::check(unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) })
}

#[cfg(test)]
#[expect(unsafe_code, reason = "sched_getattr has no safe wrapper")]
mod tests {
    use super::*;

    #[test]
    fn threads_inherit_the_time_slice() {
        let query = || {
            let size = size_of::<libc::sched_attr>();
            // SAFETY: as in `set_time_slice`.
            let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
            // SAFETY: as in `set_time_slice`.
            unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) };
            (attributes.sched_policy, attributes.sched_nice, attributes.sched_runtime)
        };
        std::thread::spawn(move || {
            let (policy, nice, before) = query();
            set_time_slice(Duration::from_micros(100)).unwrap();
            // Linux before 6.12 reports no slice.
            let expected = (policy, nice, if before == 0 { 0 } else { 100_000 });
            assert_eq!(query(), expected);
            assert_eq!(std::thread::spawn(query).join().unwrap(), expected);
        })
        .join()
        .unwrap();
    }
}
