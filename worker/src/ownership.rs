//! Distinguishes the worker process from processes that its code has forked, which must not use the worker's link or
//! journal.
//!
//! A byte in memory marks the worker process. The kernel clears this byte in a forked process (`MADV_WIPEONFORK`), so
//! that the check is a single load.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};

static WORKER_MARK: OnceLock<&'static AtomicBool> = OnceLock::new();

/// Size of the mapping that marks the worker process, in bytes. The kernel rounds the size up to a page.
const MAPPED_BYTES: usize = 1;

/// Marks this process as the worker. A worker forked by a template must call this again.
pub(crate) fn mark_worker() -> io::Result<()> {
    if WORKER_MARK.get().is_none() {
        let _ = WORKER_MARK.set(map()?);
    }
    WORKER_MARK.get().inspect(|mark| mark.store(true, Ordering::Relaxed));
    Ok(())
}

/// Returns true in the worker process, and false in a process forked from it.
pub(crate) fn is_worker() -> bool {
    WORKER_MARK.get().is_none_or(|mark| mark.load(Ordering::Relaxed))
}

/// Exits with an error if the worker's code forked this process. Called after that code has returned.
pub(crate) fn end_forked_process() {
    if !is_worker() {
        exit_with_message(
            "a process forked by this worker returned from its handler; the process exits. End forked \
             processes with _exit(), also when exec() fails\n",
        );
    }
}

/// Kills this process. Called when the supervisor is gone or has violated the protocol.
pub(crate) fn kill_self() -> ! {
    // Not `exit`, which would run the exit handlers of C libraries and might not return.
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    std::process::abort();
}

/// Prints a message and exits. Runs no destructors of the worker's code, because a destructor could hang or,
/// in a forked process, release resources that the worker still needs.
pub(crate) fn exit_with_message(message: &str) -> ! {
    // Bypasses `std::io::stderr`, whose lock another thread may have held during the fork.
    let _ = rustix::io::write(rustix::stdio::stderr(), message.as_bytes());
    // SAFETY: the call terminates the process and does not return.
    #[expect(unsafe_code, reason = "_exit(2) has no safe form")]
    unsafe {
        libc::_exit(1)
    }
}

fn map() -> io::Result<&'static AtomicBool> {
    let (protection, null) = (ProtFlags::READ | ProtFlags::WRITE, std::ptr::null_mut());
    // SAFETY: this creates a new mapping at an address that the kernel chooses, and the mapping is never
    // removed. Zero is a valid `AtomicBool`.
    #[expect(unsafe_code, reason = "mmap(2) and madvise(2) have no safe form")]
    unsafe {
        let base = mmap_anonymous(null, MAPPED_BYTES, protection, MapFlags::PRIVATE)?;
        madvise(base, MAPPED_BYTES, Advice::LinuxWipeOnFork)?;
        Ok(AtomicBool::from_ptr(base.cast()))
    }
}
