//! The first process of a worker's PID namespace.
//!
//! The first process reaps its children, which include all orphans in the namespace. When the worker exits,
//! the first process reports the exit status to the keeper and exits as well. The kernel then kills all other
//! processes in the namespace.
//!
//! The first process is a fork of the keeper without capabilities. It cannot be signalled from inside the
//! namespace. Its code makes only system calls.

use std::os::fd::{AsRawFd, OwnedFd};

use rustix::io::Errno;
use rustix::thread::CapabilitySet;

use super::super::exit;
use super::{STATUS_BYTES, become_init, decode, encode};
use crate::protocol::{Exit, Usage};
use crate::wait;

/// Runs the first process of the namespace. `worker` is the PID of the child that becomes the worker.
pub(crate) fn run(worker: u32, status: &OwnedFd) -> ! {
    become_init(CapabilitySet::empty(), &mut [status.as_raw_fd()]);
    loop {
        match bulkhead_linux::wait::wait4(-1, 0) {
            // A process stops only if it has asked this process to trace it (`PTRACE_TRACEME`), which only hostile
            // programs do.
            Ok((pid, status, _)) if libc::WIFSTOPPED(status) => wait::kill_child(pid),
            Ok((pid, end, rusage)) if pid == worker => {
                let bytes = encode(end, &wait::usage(&rusage));
                let _ = rustix::io::write(status, &bytes); // An error means that the keeper is gone.
                exit(0)
            }
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => exit(0),
        }
    }
}

/// Reads the report that the first process of a namespace has sent about the worker's exit. Returns `None` if the first
/// process was killed before the worker exited.
pub(crate) fn read_status(status: &OwnedFd) -> Option<(Exit, Usage)> {
    let mut bytes = [0; STATUS_BYTES];
    let read = rustix::io::retry_on_intr(|| rustix::io::read(status, &mut bytes));
    (read == Ok(STATUS_BYTES)).then(|| decode(&bytes))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_exit_status_can_be_read() {
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
