//! Lists the system calls that every worker needs, and checks the names in `sandbox.syscalls`.
//! `relations/confinement.rs` uses both to reject invalid keys. The keeper builds the seccomp filters from separate
//! lists.

/// Returns true if any supported architecture has a system call with this name.
pub(super) fn is_system_call(name: &str) -> bool {
    bulkhead_linux::syscalls::is_known(name)
}

/// System calls that every worker needs to start, to run its first job or to send the result.
pub(super) const NEEDED: [&str; 18] = [
    "brk",
    "close",
    "execve",
    "exit",
    "exit_group",
    "futex",
    "mmap",
    "mprotect",
    "munmap",
    "openat",
    "poll",
    "prctl",
    "prlimit64",
    "read",
    "recvfrom",
    "rt_sigreturn",
    "sendmsg",
    "write",
];
