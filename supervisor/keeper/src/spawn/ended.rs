//! The first process of a pid namespace, from the fork of the worker on.
//!
//! It waits for whatever ends in there. When the worker has ended it tells how, and ends itself, with
//! which the kernel ends everything else in the namespace. It is a copy of the keeper without rights,
//! which no signal from in there reaches, and makes nothing but system calls.

use std::os::fd::{AsRawFd, OwnedFd};

use rustix::io::Errno;
use rustix::thread::{CapabilitySet, CapabilitySets};

use super::exit;
use crate::wait;
use crate::{Exit, Usage};

/// Bytes of what is told: the status as of `wait(2)`, and three numbers of the usage.
const BYTES: usize = 4 + 3 * 8;

/// Becomes the first process, whose child `worker` is.
pub(super) fn keep(worker: u32, status: &OwnedFd) -> ! {
    // Either fails only where there is nothing to give up.
    let none = CapabilitySet::empty();
    let _ = rustix::thread::set_capabilities(
        None,
        CapabilitySets { effective: none, permitted: none, inheritable: none },
    );
    // What it is called in lists of processes. It cannot fail with a name this short.
    let _ = rustix::thread::set_name(c"bulkhead-init");
    // SAFETY: sets a flag of this process: no process in there is to look into it.
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) };
    close_all_but(status);
    loop {
        match bulkhead_linux::wait::wait4(-1, 0) {
            Ok((pid, status_word, rusage)) if pid == worker => {
                let bytes = encode(status_word, &wait::usage(&rusage));
                let _ = rustix::io::write(status, &bytes); // The keeper is gone: then the end is of no interest.
                exit(0)
            }
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => exit(0),
        }
    }
}

fn close_all_but(status: &OwnedFd) {
    let kept = status.as_raw_fd() as libc::c_uint;
    let ranges = [(0, kept.wrapping_sub(1)), (kept + 1, libc::c_uint::MAX)];
    for (first, last) in ranges {
        // SAFETY: nothing of this process uses any of them any more.
        unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
    }
}

fn encode(status: i32, usage: &Usage) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    let (head, tail) = bytes.split_at_mut(4);
    head.copy_from_slice(&status.to_le_bytes());
    let numbers = [usage.user_us, usage.system_us, usage.maxrss_kib];
    for (to, from) in tail.chunks_exact_mut(8).zip(numbers) {
        to.copy_from_slice(&from.to_le_bytes());
    }
    bytes
}

/// How the worker ended, as its first process has told. `None`: that one was ended before the worker.
pub(crate) fn read(status: &OwnedFd) -> Option<(Exit, Usage)> {
    let mut bytes = [0; BYTES];
    if rustix::io::retry_on_intr(|| rustix::io::read(status, &mut bytes)) != Ok(BYTES) {
        return None;
    }
    let (status, numbers) = bytes.split_first_chunk::<4>()?;
    let number = |at: usize| {
        let bytes = numbers.get(8 * at..8 * at + 8).and_then(|bytes| bytes.try_into().ok());
        u64::from_le_bytes(bytes.unwrap_or_default())
    };
    let exit = wait::exit(i32::from_le_bytes(*status))?;
    Some((exit, Usage { user_us: number(0), system_us: number(1), maxrss_kib: number(2) }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_is_read() {
        let (ours, theirs) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK).unwrap();
        assert_eq!(read(&ours), None);
        let usage = Usage { user_us: 1, system_us: u64::MAX, maxrss_kib: 3 };
        rustix::io::write(&theirs, &encode(libc::SIGSEGV | 0x80, &usage)).unwrap();
        let exit = Exit::Signal { number: libc::SIGSEGV, core_dumped: true };
        assert_eq!(read(&ours), Some((exit, usage)));
        rustix::io::write(&theirs, &encode(3 << 8, &usage)).unwrap();
        assert_eq!(read(&ours), Some((Exit::Code(3), usage)));
    }
}
