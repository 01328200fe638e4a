//! The first process of a pid namespace, from the fork of the worker on.
//!
//! The first process reaps every process that ends in the namespace. When the worker has ended, the first
//! process reports how, and exits. The kernel then kills everything else in the namespace. The first process
//! is a copy of the keeper without rights. Signals from the namespace do not reach it. The code makes only
//! system calls.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use bulkhead_linux::descriptors::close_all_except;
use rustix::io::Errno;
use rustix::thread::{CapabilitySet, CapabilitySets};

use super::exit;
use crate::wait;
use crate::{Exit, Usage};

/// Size of a report in bytes: the status of `wait(2)`, and three numbers of the usage.
pub(super) const STATUS_BYTES: usize = 4 + 3 * 8;

/// Becomes the first process, with the child `worker`.
pub(super) fn run(worker: u32, status: &OwnedFd) -> ! {
    become_init(CapabilitySet::empty(), &mut [status.as_raw_fd()]);
    loop {
        match bulkhead_linux::wait::wait4(-1, 0) {
            Ok((pid, status_word, rusage)) if pid == worker => {
                let bytes = encode(status_word, &wait::usage(&rusage));
                let _ = rustix::io::write(status, &bytes); // An error means that the keeper is gone.
                exit(0)
            }
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => exit(0),
        }
    }
}

/// Reduces this process to these capabilities, or to none if these are not available, and to these
/// descriptors.
pub(super) fn become_init(capabilities: CapabilitySet, kept: &mut [RawFd]) {
    let none = CapabilitySet::empty();
    let set = |all| {
        let sets = CapabilitySets { effective: all, permitted: all, inheritable: none };
        rustix::thread::set_capabilities(None, sets)
    };
    // Fails only if there is nothing to give up.
    let _ = set(capabilities).or_else(|_| set(none));
    // Name in process lists. Cannot fail with a name this short.
    let _ = rustix::thread::set_name(c"bulkhead-init");
    // SAFETY: sets a flag of this process, so that no process in the namespace can inspect it.
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) };
    // SAFETY: nothing in this process uses the other descriptors any more.
    let _ = unsafe { close_all_except(0, kept) };
}

pub(super) fn encode(status: i32, usage: &Usage) -> [u8; STATUS_BYTES] {
    let mut bytes = [0; STATUS_BYTES];
    let (head, tail) = bytes.split_at_mut(4);
    head.copy_from_slice(&status.to_le_bytes());
    let numbers = [usage.user_us, usage.system_us, usage.maxrss_kib];
    for (to, from) in tail.chunks_exact_mut(8).zip(numbers) {
        to.copy_from_slice(&from.to_le_bytes());
    }
    bytes
}

/// Returns `None` if the bytes are not the status of an ended process.
pub(super) fn decode(bytes: &[u8; STATUS_BYTES]) -> Option<(Exit, Usage)> {
    let (status, numbers) = bytes.split_first_chunk()?;
    let (&[user, system, resident], []) = numbers.as_chunks::<8>() else { return None };
    let [user_us, system_us, maxrss_kib] = [user, system, resident].map(u64::from_le_bytes);
    Some((wait::exit(i32::from_le_bytes(*status))?, Usage { user_us, system_us, maxrss_kib }))
}

/// Reads the first process's report on how the worker ended. Returns `None` if the first process was killed
/// before the worker ended.
pub(crate) fn read_status(status: &OwnedFd) -> Option<(Exit, Usage)> {
    let mut bytes = [0; STATUS_BYTES];
    let read = rustix::io::retry_on_intr(|| rustix::io::read(status, &mut bytes));
    (read == Ok(STATUS_BYTES)).then(|| decode(&bytes))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_written_status() {
        let (ours, theirs) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK).unwrap();
        assert_eq!(read_status(&ours), None);
        let usage = Usage { user_us: 1, system_us: u64::MAX, maxrss_kib: 3 };
        rustix::io::write(&theirs, &encode(libc::SIGSEGV | 0x80, &usage)).unwrap();
        let exit = Exit::Signal { number: libc::SIGSEGV, core_dumped: true };
        assert_eq!(read_status(&ours), Some((exit, usage)));
        rustix::io::write(&theirs, &encode(3 << 8, &usage)).unwrap();
        assert_eq!(read_status(&ours), Some((Exit::Code(3), usage)));
    }
}
