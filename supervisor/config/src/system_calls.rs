//! System calls by name.

/// Whether there is such a system call; not every architecture has each of them.
pub(super) fn is_system_call(name: &str) -> bool {
    bulkhead_linux::syscalls::is_known(name)
}

/// Calls without which no worker comes to its first job, or tells what became of it.
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
