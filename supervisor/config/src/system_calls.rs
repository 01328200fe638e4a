//! Lists the system calls that workers need, and checks the names in `sandbox.syscalls`.
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

/// Further system calls that the host of an `exec` bulkhead makes for a job. They start the program, wait for it, and
/// remove the processes and files that are left. `dup3` replaces `dup2` on AArch64.
pub(super) const NEEDED_FOR_EXEC: [&str; 20] = [
    "clock_nanosleep",
    "dup2",
    "dup3",
    "epoll_pwait",
    "fchdir",
    "fchmodat",
    "getdents64",
    "getppid",
    "landlock_restrict_self",
    "mkdirat",
    "openat2",
    "pidfd_open",
    "pidfd_send_signal",
    "pipe2",
    "renameat2",
    "sched_yield",
    "setsid",
    "unlinkat",
    "wait4",
    "waitid",
];
