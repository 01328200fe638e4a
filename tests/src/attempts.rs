//! Attempts by the hostile worker, with the expected result under each profile. This table is the only
//! definition of these results: the tests compare it with a running system, and
//! `docs/confinement/attempts.md` is generated from it.
//!
//! The table assumes a supervisor that runs as root. Except under `strict`, its workers run as root as well,
//! because a separate UID would hide a missing layer. Under `default`, workers have a PID namespace.
//! [`OF_SHARED_PROCESSES`] lists the attempts that succeed without a PID namespace.

use std::fmt;

/// Expected result of an attempt to break out of confinement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// The attempt succeeds.
    Succeeds,
    /// The attempt succeeds or is refused, depending on the kernel configuration and the user.
    Machine,
    /// The attempt fails with one of the listed errors, and the worker keeps running. The text names the layer of
    /// confinement that refuses the attempt. `NOTHING` stands for attempts in which every call succeeds but the goal is
    /// not reached.
    Refused(&'static [&'static str], &'static str),
    /// The supervisor kills the worker because of a violation. The message contains this word, which is usually the
    /// name of a system call.
    Violation(&'static str),
    /// The worker crashes for this reason. `signal or protocol` means that either of these two reasons is accepted.
    Crashes(&'static str),
}

/// Bulkhead configuration for an attempt, except for the profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setting {
    /// Grants read access to some paths and write access to others, and provides a `tmp` folder of 1 MiB.
    Plain,
    /// Like [`Setting::Plain`], but with resource limits: 64 descriptors, files of 1 MiB, and 1 GiB of address space.
    Limited,
}

/// An attempt by the hostile worker to break out of confinement.
#[derive(Clone, Copy, Debug)]
pub struct Attempt {
    /// Name of the operation that makes the hostile worker run this attempt.
    pub name: &'static str,
    /// Description that completes the sentence "it tries to …".
    pub tries: &'static str,
    /// Configuration of the bulkhead.
    pub setting: Setting,
    /// Expected result under `none`.
    pub none: Expected,
    /// Expected result under `default`.
    pub default: Expected,
    /// Expected result under `strict` if the worker is sealed.
    pub strict: Expected,
}

use Expected::{Crashes, Machine, Refused, Succeeds, Violation};

/// Accepted crash reasons of a worker that writes garbage and dies immediately. The actual reason depends on whether
/// the supervisor reads the garbage before it notices the death.
const SEEN_OR_DEAD: &str = "signal or protocol";
const FAMILIES: &str = "seccomp: no sockets";
const FILTER: &str = "seccomp";
const HIDDEN: Expected = Refused(&["ENOENT"], "private root directory");
const HIDDEN_PROCESS: Expected = Refused(&["ENOENT"], "pid namespace");
const LANDLOCK: Expected = Refused(&["EACCES"], "Landlock");
const NO_CAPABILITY: Expected = Refused(&["EPERM"], "no capabilities");
const NO_FAMILY: Expected = Refused(&["EAFNOSUPPORT"], FAMILIES);
const NO_PROCESS: Expected = Refused(&["ESRCH"], "pid namespace");
const NOT_SERVED: Expected = Refused(&["FORBIDDEN"], "the supervisor rejects workers");
/// Expected result of attempts that are refused by Linux 6.16 and later; see [`KERNELS_OWN`].
const NOT_TAKEN: Expected =
    Refused(&["EPERM"], "the kernel; before Linux 6.16, the worker crashes: `protocol`");
const NO_SUCH_CALL: Expected = Refused(&["ENOSYS"], FILTER);
const NOT_PERMITTED: Expected = Refused(&["EPERM"], FILTER);
const NOT_TRACEABLE: Expected = Refused(&["EACCES", "EPERM"], "Landlock: no tracing");
const OUT_OF_SCOPE: Expected = Refused(&["EPERM"], "Landlock: no signals outside");
const READ_ONLY: Expected = Refused(&["EACCES", "EROFS"], "Landlock, read-only root directory");
const RUNNING: Expected = Refused(&["ETXTBSY", "EACCES", "EROFS"], "the kernel");
const SEALED: Expected = Refused(&["EPERM"], "sealed: no other programs");

const fn plain(
    name: &'static str,
    tries: &'static str,
    none: Expected,
    default: Expected,
    strict: Expected,
) -> Attempt {
    Attempt { name, tries, setting: Setting::Plain, none, default, strict }
}

const fn limited(
    name: &'static str,
    tries: &'static str,
    none: Expected,
    default: Expected,
    strict: Expected,
) -> Attempt {
    Attempt { name, tries, setting: Setting::Limited, none, default, strict }
}

/// A heading in the documentation, and the attempts listed under it.
pub type Group = (&'static str, &'static [Attempt]);

/// All groups of attempts.
#[rustfmt::skip] // One row each.
pub const ATTEMPTS: &[Group] = &[
    (
        "Files",
        &[
            plain("read-shadow", "read `/etc/shadow`", Succeeds, LANDLOCK, HIDDEN),
            plain("list-root-home", "list `/root`", Succeeds, LANDLOCK, HIDDEN),
            plain("list-temporary-files", "list the host's `/tmp`", Succeeds, LANDLOCK, Refused(&["NOTHING"], "private `/tmp`")),
            plain("read-neighbour", "read a file of another bulkhead or tenant", Succeeds, LANDLOCK, HIDDEN),
            plain("list-neighbour", "list the directory of another bulkhead", Succeeds, LANDLOCK, HIDDEN),
            plain("read-by-symlink", "read another bulkhead's file through its own symbolic link", Succeeds, LANDLOCK, HIDDEN),
            plain("read-by-hard-link", "read another bulkhead's file through a hard link in its own directory", Succeeds, Refused(&["EACCES", "EXDEV", "EPERM"], "Landlock"), HIDDEN),
            plain("read-by-root-link", "read another bulkhead's file through `/proc/self/root`", Succeeds, LANDLOCK, HIDDEN),
            plain("read-by-parent-root", "read another bulkhead's file through its parent's `/proc/N/root`", Succeeds, NOT_TRACEABLE, Refused(&["EACCES", "EPERM", "ENOENT"], "private root directory")),
            plain("read-by-dots", "read another bulkhead's file through `../../..`", Succeeds, LANDLOCK, HIDDEN),
            plain("read-by-handle", "open another bulkhead's file by its handle, without a path (\"shocker\")", Succeeds, NOT_PERMITTED, NOT_PERMITTED),
            plain("stat-neighbour", "read the size and times of another bulkhead's file", Succeeds, Succeeds, HIDDEN),
            plain("watch-neighbour", "watch another bulkhead's directory (inotify)", Succeeds, Succeeds, HIDDEN),
            plain("chmod-neighbour", "change the mode of another bulkhead's file", Succeeds, Succeeds, HIDDEN),
            plain("chmod-configuration", "change the mode of the supervisor's configuration", Succeeds, Succeeds, HIDDEN),
            plain("remove-neighbour", "remove another bulkhead's directory", Succeeds, LANDLOCK, HIDDEN),
            plain("write-outside", "create a file in a world-writable directory", Succeeds, LANDLOCK, HIDDEN),
            plain("write-to-usr", "create a file in `/usr/share`", Succeeds, LANDLOCK, READ_ONLY),
            plain("read-shared-memory", "read another program's shared memory in `/dev/shm`", Succeeds, Refused(&["ENOENT", "EACCES"], "private `/dev/shm`"), HIDDEN),
            plain("write-beside-own-program", "create a file next to its own program", Succeeds, LANDLOCK, READ_ONLY),
            plain("link-beside-own-program", "create a symbolic link next to its own program", Succeeds, LANDLOCK, READ_ONLY),
            plain("write-to-own-program", "modify its own program while the program is running", RUNNING, RUNNING, RUNNING),
            plain("write-to-working-folder", "create a file in its working directory", Succeeds, LANDLOCK, READ_ONLY),
            plain("read-what-is-given", "read a path listed in `read`", Succeeds, Succeeds, Succeeds),
            plain("write-to-what-is-only-read", "write to a path listed in `read`", Succeeds, LANDLOCK, READ_ONLY),
            plain("truncate-what-is-only-read", "truncate a file listed in `read`", Succeeds, LANDLOCK, READ_ONLY),
            plain("replace-what-is-only-read", "rename a path listed in `read`", Succeeds, LANDLOCK, Refused(&["EACCES", "EROFS", "EXDEV", "EBUSY"], "Landlock, read-only root directory")),
            plain("write-to-what-is-given", "write to a path listed in `write`", Succeeds, Succeeds, Succeeds),
            plain("write-to-own-temporary-folder", "write to its own temporary directory", Succeeds, Succeeds, Succeeds),
            plain("fill-temporary-folder", "write more than `tmp` to its own temporary directory", Succeeds, Violation("tmp"), Refused(&["ENOSPC"], "`tmp`")),
            plain("make-a-device", "create a device node", Succeeds, Refused(&["EACCES", "EPERM"], "Landlock, no capabilities"), NOT_PERMITTED),
            plain("give-a-file-away", "change the owner of a file", Succeeds, NO_CAPABILITY, NOT_PERMITTED),
            plain("set-id-by-mode", "set the set-user-id or set-group-id bit of a file (`chmod` and its variants)", Succeeds, NOT_PERMITTED, NOT_PERMITTED),
            plain("set-group-id-of-a-folder", "set the set-group-id bit of a directory", Succeeds, NOT_PERMITTED, NOT_PERMITTED),
            plain("set-id-from-the-start", "create a file with a set-user-id or set-group-id bit (`open`, `creat`, `mknod`)", Succeeds, NOT_PERMITTED, NOT_PERMITTED),
            plain("set-id-past-the-filter", "create a file with such a bit through `openat2`, whose arguments a filter cannot see", Succeeds, NO_SUCH_CALL, NO_SUCH_CALL),
            plain("inherited-descriptors", "find an inherited descriptor that is not meant for it", Refused(&["NOTHING"], "all descriptors are closed"), Refused(&["NOTHING"], "all descriptors are closed"), Refused(&["NOTHING"], "all descriptors are closed")),
        ],
    ),
    (
        "Devices and the kernel's files",
        &[
            plain("open-physical-memory", "open `/dev/mem`", Machine, Refused(&["EACCES", "ENOENT"], "Landlock"), HIDDEN),
            plain("open-kernel-log", "open `/dev/kmsg`", Machine, LANDLOCK, HIDDEN),
            plain("open-kernel-core", "open `/proc/kcore`", Machine, Refused(&["EACCES", "EPERM", "ENOENT"], "no capabilities"), Refused(&["EACCES", "EPERM", "ENOENT"], "no capabilities")),
            plain("open-a-disk", "open a disk", Machine, Refused(&["EACCES", "ENOENT"], "Landlock"), HIDDEN),
            plain("write-to-random-pool", "open `/dev/urandom` for writing", Succeeds, LANDLOCK, READ_ONLY),
            plain("type-into-a-terminal", "type into a terminal (TIOCSTI)", Machine, LANDLOCK, HIDDEN),
            plain("list-devices-of-the-machine", "list `/sys`", Succeeds, LANDLOCK, HIDDEN),
            plain("write-to-sys", "write to `/sys`", Machine, LANDLOCK, HIDDEN),
            plain("write-core-pattern", "write `core_pattern` in `/proc/sys`", Succeeds, LANDLOCK, READ_ONLY),
            plain("write-magic-key", "write to `/proc/sysrq-trigger`", Machine, Refused(&["EACCES", "ENOENT"], "Landlock"), Refused(&["EACCES", "EROFS", "ENOENT"], "Landlock")),
            plain("write-own-oom-score", "write its own `oom_score_adj`", Succeeds, LANDLOCK, READ_ONLY),
            plain("leave-the-cgroup", "open `cgroup.procs` to leave its cgroup", Machine, Refused(&["EACCES", "ENOENT"], "Landlock"), HIDDEN),
            plain("read-boot-parameters", "read the boot parameters (`/proc/cmdline`)", Succeeds, Succeeds, Refused(&["EACCES"], "hidden in the private `/proc`")),
            plain("list-devices-in-proc", "list the machine's devices in `/proc/bus`", Machine, Machine, Refused(&["EACCES", "ENOENT"], "hidden in the private `/proc`")),
            plain("find-its-cgroup", "find the path of its control group on the host", Machine, Machine, Refused(&["NOTHING"], "cgroup namespace")),
            plain("read-kernel-addresses", "read addresses from `/proc/kallsyms`", Machine, Refused(&["NOTHING"], "no capabilities"), Refused(&["EACCES"], "hidden in the private `/proc`")),
        ],
    ),
    (
        "Network",
        &[
            plain("connect-by-tcp", "connect over TCP", Succeeds, NO_FAMILY, NO_FAMILY),
            plain("listen-on-tcp", "listen on TCP", Succeeds, NO_FAMILY, NO_FAMILY),
            plain("listen-on-any-port", "listen on a TCP port that the kernel chooses", Succeeds, NO_FAMILY, NO_FAMILY),
            plain("connect-by-mptcp", "connect over Multipath TCP", Machine, NO_FAMILY, NO_FAMILY),
            plain("connect-by-fast-open", "connect with TCP Fast Open, without `connect`", Machine, NO_FAMILY, NO_FAMILY),
            plain("send-by-udp", "send over UDP", Succeeds, NO_FAMILY, NO_FAMILY),
            plain("connect-to-abstract-socket", "connect to an abstract Unix socket", Succeeds, NO_FAMILY, NO_FAMILY),
            plain("take-an-abstract-name", "take the name of an abstract Unix socket before its owner does", Succeeds, NOT_PERMITTED, Refused(&["EAFNOSUPPORT", "EPERM"], FAMILIES)),
            plain("connect-to-path-socket", "connect to a Unix socket by its path", Succeeds, NO_FAMILY, NO_FAMILY),
            plain("send-to-path-socket", "send to a Unix socket by its path, from a socket pair", Succeeds, Refused(&["ESOCKTNOSUPPORT"], FAMILIES), Refused(&["EAFNOSUPPORT", "ESOCKTNOSUPPORT"], FAMILIES)),
            plain("submit-jobs", "connect to the supervisor's jobs socket", NOT_SERVED, NO_FAMILY, NO_FAMILY),
            plain("administer", "connect to the supervisor's admin socket", NOT_SERVED, NO_FAMILY, NO_FAMILY),
            plain("pair-of-sockets", "create a pair of connected sockets", Succeeds, Succeeds, Refused(&["EAFNOSUPPORT"], "sealed: no new sockets")),
            plain("raw-socket", "create a raw socket", Machine, NO_FAMILY, NO_FAMILY),
            plain("packet-socket", "create a packet socket", Machine, NO_FAMILY, NO_FAMILY),
            plain("routing-socket", "create a netlink socket for routes", Succeeds, NO_FAMILY, NO_FAMILY),
            plain("netfilter-socket", "create a netlink socket for the firewall", Machine, NO_FAMILY, NO_FAMILY),
            plain("virtual-machine-socket", "create a vsock socket", Machine, NO_FAMILY, NO_FAMILY),
            plain("cryptography-socket", "create an AF_ALG socket", Machine, NO_FAMILY, NO_FAMILY),
        ],
    ),
    (
        "Other processes",
        &[
            plain("list-processes", "find the supervisor in `/proc`", Succeeds, Refused(&["NOTHING"], "private `/proc`"), Refused(&["NOTHING"], "private `/proc`")),
            plain("read-arguments-of-supervisor", "read the supervisor's arguments", Succeeds, HIDDEN_PROCESS, HIDDEN_PROCESS),
            plain("read-environment-of-supervisor", "read the supervisor's environment", Succeeds, HIDDEN_PROCESS, HIDDEN_PROCESS),
            plain("read-environment-of-sibling", "read the environment of another worker", Succeeds, HIDDEN_PROCESS, HIDDEN_PROCESS),
            plain("read-maps-of-keeper", "read the keeper's memory map", Succeeds, HIDDEN_PROCESS, HIDDEN_PROCESS),
            plain("open-memory-of-supervisor", "open the supervisor's memory", Succeeds, HIDDEN_PROCESS, HIDDEN_PROCESS),
            plain("open-memory-of-sibling", "open the memory of another worker", Succeeds, HIDDEN_PROCESS, HIDDEN_PROCESS),
            plain("look-at-descriptors-of-supervisor", "list the supervisor's open descriptors", Succeeds, HIDDEN_PROCESS, HIDDEN_PROCESS),
            plain("look-at-descriptors-of-sibling", "list another worker's open descriptors", Succeeds, HIDDEN_PROCESS, HIDDEN_PROCESS),
            plain("trace-sibling", "trace another worker", Succeeds, Violation("ptrace"), Violation("ptrace")),
            plain("ask-to-be-traced", "be traced by its parent", Succeeds, NOT_PERMITTED, NOT_PERMITTED),
            plain("read-sibling-directly", "read the memory of another worker (process_vm_readv)", Succeeds, NOT_PERMITTED, NOT_PERMITTED),
            plain("write-sibling-directly", "write the memory of another worker (process_vm_writev)", Succeeds, NOT_PERMITTED, NOT_PERMITTED),
            plain("compare-with-sibling", "learn about kernel addresses with kcmp", Machine, NOT_PERMITTED, NOT_PERMITTED),
            plain("take-descriptor-of-sibling", "copy a descriptor from another worker", Succeeds, Refused(&["ESRCH", "EPERM", "EINVAL"], "seccomp, pid namespace"), Refused(&["ESRCH", "EPERM", "EINVAL"], "seccomp, pid namespace")),
            plain("signal-supervisor", "signal the supervisor", Succeeds, NO_PROCESS, NO_PROCESS),
            plain("signal-keeper", "signal the keeper", Succeeds, NO_PROCESS, NO_PROCESS),
            plain("signal-sibling", "signal another worker", Succeeds, NO_PROCESS, NO_PROCESS),
            plain("signal-sibling-by-descriptor", "signal another worker through a pidfd", Succeeds, Refused(&["ESRCH", "EINVAL"], "pid namespace"), Refused(&["ESRCH", "EINVAL"], "pid namespace")),
            plain("kill-parent", "kill its parent", Succeeds, OUT_OF_SCOPE, Refused(&["EPERM", "NOTHING"], "Landlock: no signals outside")),
            plain("kill-everything", "kill every process", Succeeds, Refused(&["NOTHING", "EPERM", "ESRCH"], "Landlock: no signals outside"), Refused(&["NOTHING", "EPERM", "ESRCH"], "pid namespace")),
            plain("limit-supervisor", "limit the supervisor's CPU time (prlimit)", Succeeds, Refused(&["ESRCH", "EPERM"], "pid namespace"), Refused(&["ESRCH", "EPERM"], "pid namespace")),
            plain("renice-supervisor", "lower the supervisor's priority", Succeeds, Refused(&["ESRCH", "EPERM"], "pid namespace"), Refused(&["ESRCH", "EPERM"], "pid namespace")),
            plain("reschedule-supervisor", "change the supervisor's scheduling policy", Succeeds, Refused(&["ESRCH", "EPERM"], "pid namespace"), Refused(&["ESRCH", "EPERM"], "pid namespace")),
            plain("pin-supervisor", "change the supervisor's CPU affinity", Succeeds, Refused(&["ESRCH", "EPERM"], "pid namespace"), Refused(&["ESRCH", "EPERM"], "pid namespace")),
            plain("become-child-of-keeper", "create a process that the keeper must wait for", Succeeds, NOT_PERMITTED, NOT_PERMITTED),
            plain("leave-the-session", "leave its session and process group (the keeper still finds it)", Succeeds, Succeeds, Succeeds),
            plain("outlive-the-parent", "clear its parent-death signal (the keeper still kills it)", Succeeds, Succeeds, Succeeds),
            plain("let-anybody-trace", "allow any process to trace it (PR_SET_PTRACER)", Machine, Machine, Refused(&["EINVAL"], FILTER)),
            plain("become-dumpable", "make itself traceable (by processes that are allowed to trace it anyway)", Succeeds, Succeeds, Succeeds),
        ],
    ),
    (
        "Privileges",
        &[
            plain("become-another-user", "become another user", Succeeds, NO_CAPABILITY, NOT_PERMITTED),
            plain("change-groups", "change its groups", Succeeds, NO_CAPABILITY, NOT_PERMITTED),
            plain("regain-capabilities", "regain capabilities", Succeeds, NO_CAPABILITY, NOT_PERMITTED),
            plain("new-user-namespace", "create a user namespace in which it is root", Succeeds, NOT_PERMITTED, NOT_PERMITTED),
            plain("new-user-namespace-by-clone3", "create a user namespace with clone3", Succeeds, NO_SUCH_CALL, NO_SUCH_CALL),
            plain("new-namespaces", "create mount, network, ipc and uts namespaces", Succeeds, NOT_PERMITTED, NOT_PERMITTED),
            plain("enter-a-namespace", "enter a namespace", Succeeds, NOT_PERMITTED, NOT_PERMITTED),
            plain("open-namespace-of-supervisor", "open the supervisor's namespace", Succeeds, HIDDEN_PROCESS, HIDDEN_PROCESS),
            plain("mount", "mount a file system", Succeeds, NOT_PERMITTED, NOT_PERMITTED),
            plain("unmount", "unmount a file system", Succeeds, NOT_PERMITTED, NOT_PERMITTED),
            plain("mount-by-the-new-calls", "prepare a mount (fsopen)", Succeeds, NOT_PERMITTED, NOT_PERMITTED),
            plain("copy-of-the-mounts", "copy a mount (open_tree)", Succeeds, NOT_PERMITTED, NOT_PERMITTED),
            plain("change-the-root", "change the root directory", Succeeds, NOT_PERMITTED, NOT_PERMITTED),
            plain("pivot-the-root", "pivot the root directory", Succeeds, NOT_PERMITTED, NOT_PERMITTED),
            plain("real-time-scheduling", "switch to real-time scheduling", Machine, NO_CAPABILITY, NOT_PERMITTED),
            plain("higher-priority", "raise its own priority", Machine, Refused(&["EACCES", "EPERM"], "no capabilities"), Refused(&["EACCES", "EPERM"], "no capabilities")),
            plain("real-time-disk", "get real-time priority for disk access", Machine, NO_CAPABILITY, NOT_PERMITTED),
            plain("raise-a-limit", "raise a hard limit", Machine, NO_CAPABILITY, NO_CAPABILITY),
            plain("lower-the-dump-limit", "lower its core dump limit from 1 to 0, so that the kernel runs the program in `core_pattern`", Succeeds, Refused(&["NOTHING"], "seccomp: the limit stays 1"), Refused(&["NOTHING"], "seccomp: the limit stays 1")),
            plain("lower-and-raise-a-limit", "lower a hard limit and raise it again", Machine, NO_CAPABILITY, NO_CAPABILITY),
        ],
    ),
    (
        "The kernel and the machine",
        &[
            plain("io-uring", "create an io_uring", Machine, NO_SUCH_CALL, NO_SUCH_CALL),
            plain("load-bpf", "load a BPF program", Succeeds, Violation("bpf"), Violation("bpf")),
            plain("load-bpf-in-a-thread", "load a BPF program in another thread", Succeeds, Violation("bpf"), Violation("bpf")),
            plain("load-bpf-in-a-child", "load a BPF program in a child process (only the child is killed)", Succeeds, Refused(&["SIGKILL", "SIGSYS"], FILTER), Refused(&["SIGKILL", "SIGSYS"], FILTER)),
            plain("handle-page-faults", "handle page faults (userfaultfd)", Machine, NOT_PERMITTED, NOT_PERMITTED),
            plain("handle-page-faults-by-device", "open `/dev/userfaultfd`", Machine, Refused(&["EACCES", "ENOENT"], "Landlock"), HIDDEN),
            plain("keyring", "use the kernel keyring", Machine, NOT_PERMITTED, NOT_PERMITTED),
            plain("add-a-key", "store a key in the kernel keyring", Machine, NOT_PERMITTED, NOT_PERMITTED),
            plain("performance-events", "monitor performance events", Machine, NOT_PERMITTED, NOT_PERMITTED),
            plain("load-another-kernel", "load another kernel (kexec)", Machine, Violation("kexec_load"), Violation("kexec_load")),
            plain("load-a-module", "load a kernel module", Machine, Violation("init_module"), Violation("init_module")),
            plain("load-a-module-by-descriptor", "load a kernel module from a descriptor", Machine, Violation("finit_module"), Violation("finit_module")),
            plain("remove-a-module", "remove a kernel module", Machine, Violation("delete_module"), Violation("delete_module")),
            plain("x32-call", "make an x32 system call", Succeeds, Violation(""), Violation("")),
            plain("32-bit-call", "make a 32-bit system call (`int 0x80`)", Machine, Violation(""), Violation("")),
            plain("reboot", "reboot the machine", Succeeds, NOT_PERMITTED, NOT_PERMITTED),
            plain("set-the-time", "set the time", Succeeds, NOT_PERMITTED, NOT_PERMITTED),
            plain("set-the-host-name", "set the host name", Succeeds, NOT_PERMITTED, NOT_PERMITTED),
            plain("read-kernel-log", "read the kernel log", Succeeds, NOT_PERMITTED, NOT_PERMITTED),
            plain("disk-quotas", "manage disk quotas", Machine, NOT_PERMITTED, NOT_PERMITTED),
            plain("swap", "add swap", Machine, NOT_PERMITTED, NOT_PERMITTED),
            plain("accounting", "enable process accounting (acct)", Machine, NOT_PERMITTED, NOT_PERMITTED),
            plain("ports-of-devices", "access I/O ports (iopl)", Machine, NOT_PERMITTED, NOT_PERMITTED),
            plain("segment-descriptors", "use segment descriptors (modify_ldt)", Machine, Machine, Violation("modify_ldt")),
            plain("weaken-memory", "make all memory executable (personality)", Succeeds, NOT_PERMITTED, NOT_PERMITTED),
            plain("watch-all-files", "watch all files (fanotify)", Machine, NOT_PERMITTED, NOT_PERMITTED),
            plain("shared-memory-by-number", "create System V shared memory", Machine, NO_SUCH_CALL, Violation("shmget")),
            plain("message-queue", "create a POSIX message queue", Machine, NO_SUCH_CALL, NO_SUCH_CALL),
        ],
    ),
    (
        "Programs",
        &[
            plain("run-a-program", "run another program", Succeeds, Succeeds, SEALED),
            plain("run-from-temporary-folder", "write a program and run it", Succeeds, Succeeds, SEALED),
            plain("run-from-memory", "run a program from memory (memfd)", Succeeds, Succeeds, SEALED),
        ],
    ),
    (
        "Resource limits",
        &[
            limited("open-many-descriptors", "open more descriptors than `nofile`", Refused(&["EMFILE"], "`nofile`"), Refused(&["EMFILE"], "`nofile`"), Refused(&["EMFILE"], "`nofile`")),
            limited("reserve-much-memory", "map more memory than `as`", Refused(&["ENOMEM"], "`as`"), Refused(&["ENOMEM"], "`as`"), Refused(&["ENOMEM"], "`as`")),
            limited("grow-a-file", "create a file of 1 TiB", Refused(&["EFBIG"], "`fsize`"), Refused(&["EFBIG"], "`fsize`"), Refused(&["EFBIG"], "`fsize`")),
        ],
    ),
    (
        "The link",
        &[
            plain("garbage-on-the-link", "write garbage to its link", Crashes("protocol"), Crashes("protocol"), Crashes("protocol")),
            plain("garbage-in-the-journal", "write garbage to its journal and die", Crashes(SEEN_OR_DEAD), Crashes(SEEN_OR_DEAD), Crashes(SEEN_OR_DEAD)),
            plain("urgent-data", "send urgent data (`MSG_OOB`), which stalls the reader of a Unix socket", Succeeds, Refused(&["EOPNOTSUPP"], FILTER), Refused(&["EOPNOTSUPP"], FILTER)),
            plain("pass-descriptors", "pass descriptors to the supervisor", NOT_TAKEN, NOT_TAKEN, NOT_TAKEN),
            plain("pass-lingering-socket", "pass the supervisor a socket that takes ten minutes to close", NOT_TAKEN, NO_FAMILY, NO_FAMILY),
        ],
    ),
];

/// Attempts by an `exec` program to attack its host or another program in the same worker. The other program is
/// called `sibling`.
#[rustfmt::skip] // One row each.
pub const BETWEEN_PROGRAMS: &[Attempt] = &[
    plain("list-temporary-folders", "list the temporary directories of all programs", Succeeds, LANDLOCK, LANDLOCK),
    plain("read-temporary-file-of-sibling", "read a temporary file of another program", Succeeds, LANDLOCK, LANDLOCK),
    plain("open-memory-of-sibling", "open the memory of another program, which contains its payload", Succeeds, NOT_TRACEABLE, NOT_TRACEABLE),
    plain("read-environment-of-sibling", "read the environment of another program", Succeeds, NOT_TRACEABLE, NOT_TRACEABLE),
    plain("look-at-descriptors-of-sibling", "list another program's open descriptors", Succeeds, NOT_TRACEABLE, NOT_TRACEABLE),
    plain("write-result-of-sibling", "write to another program's result", Succeeds, NOT_TRACEABLE, NOT_TRACEABLE),
    plain("trace-sibling", "trace another program", Succeeds, Violation("ptrace"), Violation("ptrace")),
    plain("read-sibling-directly", "read the memory of another program (process_vm_readv)", Succeeds, NOT_PERMITTED, NOT_PERMITTED),
    plain("take-descriptor-of-sibling", "copy a descriptor from another program", Succeeds, NOT_PERMITTED, NOT_PERMITTED),
    plain("signal-sibling", "signal another program", Succeeds, OUT_OF_SCOPE, OUT_OF_SCOPE),
    plain("signal-sibling-by-descriptor", "signal another program through a pidfd", Succeeds, OUT_OF_SCOPE, OUT_OF_SCOPE),
    plain("kill-parent", "kill the host process of both programs", Succeeds, OUT_OF_SCOPE, OUT_OF_SCOPE),
    plain("read-environment-of-host", "read the environment of the host", Succeeds, NOT_TRACEABLE, NOT_TRACEABLE),
    plain("open-memory-of-host", "open the memory of the host, to get access to the link", Machine, NOT_TRACEABLE, NOT_TRACEABLE),
    plain("shut-temporary-folders", "remove the permissions of the directory that contains all temporary directories (`chmod`; the host restores them)", Refused(&["NOTHING"], "no such directory"), Succeeds, Succeeds),
];

/// Attempts by a forked worker to attack its template or another worker from the same template. The other
/// worker is called `sibling`.
#[rustfmt::skip] // One row each.
pub const BETWEEN_FORKED: &[Attempt] = &[
    plain("list-temporary-folders", "list the temporary directories of all workers", Succeeds, LANDLOCK, LANDLOCK),
    plain("read-temporary-file-of-sibling", "read a temporary file of another worker", Succeeds, LANDLOCK, LANDLOCK),
    plain("write-temporary-file-of-sibling", "write to a temporary file of another worker", Succeeds, LANDLOCK, LANDLOCK),
    plain("make-temporary-file-for-sibling", "create a file in the temporary directory of another worker", Succeeds, LANDLOCK, LANDLOCK),
    plain("open-memory-of-sibling", "open the memory of another worker, to get access to its payload and link", Succeeds, NOT_TRACEABLE, NOT_TRACEABLE),
    plain("read-environment-of-sibling", "read the environment of another worker", Succeeds, NOT_TRACEABLE, NOT_TRACEABLE),
    plain("look-at-descriptors-of-sibling", "list another worker's open descriptors", Succeeds, NOT_TRACEABLE, NOT_TRACEABLE),
    plain("write-result-of-sibling", "write to the standard output of another worker", Succeeds, NOT_TRACEABLE, NOT_TRACEABLE),
    plain("trace-sibling", "trace another worker", Succeeds, Violation("ptrace"), Violation("ptrace")),
    plain("read-sibling-directly", "read the memory of another worker (process_vm_readv)", Succeeds, NOT_PERMITTED, NOT_PERMITTED),
    plain("write-sibling-directly", "write the memory of another worker (process_vm_writev)", Succeeds, NOT_PERMITTED, NOT_PERMITTED),
    plain("take-descriptor-of-sibling", "copy a descriptor from another worker", Succeeds, NOT_PERMITTED, NOT_PERMITTED),
    plain("signal-sibling", "signal another worker", Succeeds, OUT_OF_SCOPE, OUT_OF_SCOPE),
    plain("signal-sibling-by-descriptor", "signal another worker through a pidfd", Succeeds, OUT_OF_SCOPE, OUT_OF_SCOPE),
    plain("renice-sibling", "lower another worker's priority", Succeeds, NOT_PERMITTED, NOT_PERMITTED),
    plain("limit-sibling", "limit another worker's CPU time (prlimit)", Succeeds, NOT_PERMITTED, NOT_PERMITTED),
    plain("pin-sibling", "change another worker's CPU affinity", Succeeds, Succeeds, Succeeds),
    plain("pin-template", "change the template's CPU affinity (the keeper restores it before the next fork)", Succeeds, Succeeds, Succeeds),
    plain("renice-template", "lower the template's priority", Succeeds, NOT_PERMITTED, NOT_PERMITTED),
    plain("serve-template-last", "lower the template's disk priority", Succeeds, NOT_PERMITTED, NOT_PERMITTED),
    plain("limit-template", "limit the template's CPU time (prlimit)", Succeeds, NOT_PERMITTED, NOT_PERMITTED),
    plain("score-template", "make the kernel kill the template first when memory runs out (`oom_score_adj`)", Succeeds, LANDLOCK, Refused(&["EROFS"], "private `/proc`, read-only")),
    plain("slacken-template", "delay the template's timers (`timerslack_ns`)", Succeeds, LANDLOCK, Refused(&["EROFS"], "private `/proc`, read-only")),
    plain("signal-template", "signal the template", Succeeds, OUT_OF_SCOPE, OUT_OF_SCOPE),
    plain("open-memory-of-template", "open the memory of the template", Succeeds, NOT_TRACEABLE, NOT_TRACEABLE),
    plain("kill-parent", "kill the parent of all workers", Succeeds, OUT_OF_SCOPE, OUT_OF_SCOPE),
    plain("become-child-of-keeper", "fork a sibling, as the template does", Succeeds, Refused(&["EPERM"], "the worker's own filter"), Refused(&["EPERM"], "the worker's own filter")),
];

/// Attempts that need special checks and are covered by other tests.
pub const ELSEWHERE: &[&str] = &[
    "booby-trap-temporary-folder",
    "kill-sibling-by-input",
    "leave-processes-behind",
    "limit-sibling",
    "limit-template",
    "list-temporary-folders",
    "make-many-processes",
    "make-shared-memory",
    "make-temporary-file-for-sibling",
    "open-memory-of-host",
    "open-memory-of-template",
    "pin-sibling",
    "pin-template",
    "read-environment-of-host",
    "read-temporary-file-of-sibling",
    "renice-sibling",
    "renice-template",
    "run-set-user-id-program",
    "score-template",
    "serve-template-last",
    "shut-temporary-folders",
    "signal-template",
    "slacken-template",
    "touch-much-memory",
    "write-result-of-sibling",
    "write-temporary-file-of-sibling",
];

/// Attempts that only recent kernels refuse. An older kernel permits the attempt, and the supervisor then kills the
/// worker.
pub const KERNELS_OWN: &[&str] = &["pass-descriptors", "pass-lingering-socket"];

/// Attempts whose results differ in `exec` programs, because these programs are not sealed. Each row contains the
/// results under `default` and `strict`.
pub const OF_PROGRAMS: &[(&str, Expected, Expected)] = &[
    ("pair-of-sockets", Succeeds, Succeeds),
    ("list-temporary-files", LANDLOCK, LANDLOCK),
    ("run-a-program", Succeeds, Succeeds),
    ("run-from-temporary-folder", Succeeds, Refused(&["EACCES"], "no programs in `/tmp`")),
    ("run-from-memory", Succeeds, Succeeds),
];

/// Attempts that succeed under `default` if workers have no PID namespace.
pub const OF_SHARED_PROCESSES: &[&str] = &["list-processes", "read-arguments-of-supervisor"];

/// Additional attempts that succeed without a PID namespace if the supervisor and its workers run as the same
/// unprivileged user. A supervisor that runs as root is protected, because it has capabilities that its workers do not
/// have.
pub const OF_ONE_USER: &[&str] = &["pin-supervisor"];

/// Attempts that succeed under `default` if workers run as the supervisor's user. If workers run as separate users,
/// these attempts are refused.
pub const OF_A_SHARED_ID: &[&str] =
    &["stat-neighbour", "watch-neighbour", "chmod-neighbour", "chmod-configuration"];

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Succeeds => f.write_str("succeeds"),
            Machine => f.write_str("up to the kernel"),
            Refused(["NOTHING" | "FORBIDDEN", ..], by) => f.write_str(by),
            Refused(errors, by) => write!(f, "`{}`: {by}", errors[0]),
            Violation("") => f.write_str("**violation**"),
            Violation(call) => write!(f, "**violation** `{call}`"),
            Crashes(reason) => write!(f, "worker crashes: `{}`", reason.replace(" or ", "` or `")),
        }
    }
}

/// Returns the tables for the documentation, one for each group of attempts.
pub fn markdown() -> String {
    use fmt::Write as _;
    let mut text = String::new();
    let of_workers = ATTEMPTS.iter().map(|(heading, attempts)| (*heading, "worker", *attempts));
    let all = of_workers.chain([
        ("Programs in the same worker", "program run by `exec`", BETWEEN_PROGRAMS),
        ("Workers of the same template", "forked worker", BETWEEN_FORKED),
    ]);
    for (heading, who, attempts) in all {
        let _ = write!(text, "\n**{heading}.** A {who} tries to …\n\n");
        text.push_str("| … | `none` | `default` | `strict` |\n| --- | --- | --- | --- |\n");
        for Attempt { tries, none, default, strict, .. } in attempts {
            let _ = writeln!(text, "| {tries} | {none} | {default} | {strict} |");
        }
    }
    text
}
