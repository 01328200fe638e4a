//! Defines the predefined seccomp rules: the `default` and `strict` profiles, and the additions for sealed workers and
//! templates. `spawn/confinement.rs` selects the profile, and `seccomp.rs` compiles the rules to a filter.
//!
//! Ordinary programs try some of the denied calls. These calls fail with an error that makes programs fall back to
//! other calls. Calls that only hostile programs make are fatal. Under `strict`, all unlisted calls are fatal.
//!
//! Access to files and to processes of other users is restricted by Landlock and by the worker's user ID.

use rustix::io::Errno;

use super::assembler::Condition::{AtLeast, HasAny, Is};
use super::{Check, Pointer, Rule, Rules, Verdict, flags};
use crate::protocol::confinement::NetworkAccess;

/// System calls that modify or replace the running kernel.
const FATAL_CALLS: &str = "bpf delete_module finit_module init_module kexec_file_load kexec_load";

/// System calls that fail with ENOSYS. C libraries and Node fall back to older calls, whose arguments a
/// filter can inspect.
const UNAVAILABLE_CALLS: &str = "clone3 io_uring_enter io_uring_register io_uring_setup openat2";

/// Groups of system calls that fail with EPERM.
const REFUSED_CALLS: &[&str] = &[
    // Calls that change the mounted file systems or the root folder.
    "chroot fsconfig fsmount fsopen fspick mount mount_setattr move_mount open_tree open_tree_attr \
     pivot_root umount2",
    // The call that joins an existing namespace. `clone` and `unshare` calls that create a namespace are refused by
    // separate rules.
    "setns",
    // Calls that access files by other means than a path.
    "fanotify_init name_to_handle_at open_by_handle_at",
    // Calls that access other processes.
    "kcmp pidfd_getfd process_madvise process_vm_readv process_vm_writev",
    // Calls that have repeatedly been used for attacks on the kernel.
    "add_key keyctl perf_event_open request_key userfaultfd",
    // Calls that administer the machine.
    "acct adjtimex clock_adjtime clock_settime ioperm iopl quotactl quotactl_fd reboot \
     setdomainname sethostname settimeofday swapoff swapon syslog vhangup",
    // Obsolete calls.
    "lookup_dcookie nfsservctl uselib",
];

/// System calls for System V and POSIX IPC. IPC objects are shared by all processes of a user, are not charged to any
/// process, and outlive the processes that used them. Kernels can be built without these calls, so programs check
/// whether they exist.
const IPC_CALLS: &str = "mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedsend mq_unlink msgctl msgget msgrcv \
     msgsnd semctl semget semop semtimedop shmat shmctl shmdt shmget";

/// Returns the `default` profile: a deny list that does not affect ordinary programs.
pub(crate) fn default(network: NetworkAccess) -> Rules {
    let mut rules = Rules::new(Verdict::Allow);
    deny(&mut rules);
    rules.set("sched_setattr sched_setparam sched_setscheduler migrate_pages move_pages", only_self(0));
    rules.set("ioprio_set", only_process_target(IOPRIO_WHO_PROCESS, only_self(1)));
    rules.set(IPC_CALLS, Verdict::Errno(Errno::NOSYS));
    rules.set("ioctl", deny_terminal_requests());
    restrict_network(&mut rules, network);
    flags::restrict(&mut rules);
    rules
}

/// Returns the `strict` profile: an allow list for programs that only compute. The filter takes effect before
/// `execve`, so it must let the program start and load its libraries and interpreter. [`sealed`] later revokes some of
/// these rights.
pub(crate) fn strict(network: NetworkAccess) -> Rules {
    let mut rules = Rules::new(Verdict::Fatal);
    for names in STRICT_ALLOWED_CALLS {
        rules.set(names, Verdict::Allow);
    }
    rules.set(CONNECTION_CALLS, Verdict::Allow);
    rules.set(STRICT_REFUSED_CALLS, REFUSE);
    rules.set(STRICT_UNAVAILABLE_CALLS, Verdict::Errno(Errno::NOSYS));
    deny(&mut rules);
    restrict_network(&mut rules, network);
    rules.set("prctl", only_requests(PROCESS_OPTIONS, Errno::INVAL));
    rules.set("ioctl", only_requests(DESCRIPTOR_REQUESTS, Errno::NOTTY));
    flags::restrict(&mut rules);
    rules
}

/// Returns the rules that are added to `strict` when the program is ready for its first job. These rules deny
/// executing programs, and deny new sockets unless the worker has network access. `allow` contains the calls
/// that the configuration allows in addition to `strict`.
///
/// These rules make no call fatal, because a second filter of a process cannot have its own listener. The
/// first filter continues to report fatal calls. If a name in `allow` does not exist on any architecture,
/// returns that name as the error.
pub(crate) fn sealed<'n>(network: bool, allow: &[&'n str]) -> Result<Rules, &'n str> {
    let mut rules = Rules::new(Verdict::Allow);
    rules.set("execve execveat", REFUSE);
    if !network {
        rules.set("socket socketpair", NO_FAMILY);
    }
    rules.with_overrides(allow, &[])
}

pub(crate) fn allow_all() -> Rules {
    Rules::new(Verdict::Allow)
}

/// Allows a template to fork a worker as its own sibling, by a `clone` call whose flags are exactly `CLONE_PARENT` and
/// `SIGCHLD`.
pub(crate) fn allow_siblings(mut rules: Rules) -> Rules {
    const SIBLING: u32 = (libc::CLONE_PARENT | libc::SIGCHLD) as u32;
    rules.narrow("clone", |otherwise| {
        Check { argument: 0, mask: u32::MAX, cases: vec![(Is(SIBLING), Verdict::Allow.into())], otherwise }
            .into()
    });
    rules
}

/// Denies forking siblings, which [`allow_siblings`] allows. Used for processes that were forked by a template.
pub(crate) fn deny_siblings(mut rules: Rules) -> Rules {
    rules.set("clone", refuse_flags(libc::CLONE_PARENT as u32));
    rules
}

const REFUSE: Verdict = Verdict::Errno(Errno::PERM);

/// Error for a denied address family. With this error, programs behave as on a kernel that does not support the family.
const NO_FAMILY: Verdict = Verdict::Errno(Errno::AFNOSUPPORT);

/// Adds the rules that the `default` and `strict` profiles share.
fn deny(rules: &mut Rules) {
    rules.set(FATAL_CALLS, Verdict::Fatal);
    rules.set(UNAVAILABLE_CALLS, Verdict::Errno(Errno::NOSYS));
    for names in REFUSED_CALLS {
        rules.set(names, REFUSE);
    }
    rules.set("clone", refuse_flags(NEW_NAMESPACES | libc::CLONE_PARENT as u32));
    // `CLONE_NEWTIME` is denied only for `unshare`, because the same bit in the flags of `clone` is part of the signal
    // number.
    rules.set("unshare", refuse_flags(NEW_NAMESPACES | libc::CLONE_NEWTIME as u32));
    rules.set("personality", personality());
    rules.set("ptrace", ptrace());
    let (prlimit, setrlimit) = limits();
    rules.set("prlimit64", prlimit);
    rules.set("setrlimit", setrlimit);
    rules.set("setpriority", only_process_target(libc::PRIO_PROCESS, only_self(1)));
    rules.set("socketpair", socketpair());
    rules.set("bind", bind_address_sizes());
}

const NEW_NAMESPACES: u32 = (libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWUTS) as u32;

/// Refuses calls whose first argument contains any of the given flags. These flags include CLONE_PARENT, which would
/// make the new process a child of the keeper.
fn refuse_flags(flags: u32) -> Rule {
    check(0, vec![(HasAny(flags), REFUSE.into())], Verdict::Allow)
}

/// Allows a process to query its personality, and to set either the normal personality or the one without address
/// randomization, which sanitizers need. Other personalities have been used to weaken the protection of programs.
fn personality() -> Rule {
    const QUERY: u32 = u32::MAX;
    only_values(0, &[QUERY, 0, libc::ADDR_NO_RANDOMIZE as u32], REFUSE)
}

/// Refuses `PTRACE_TRACEME` with an error, because programs use this request to detect a debugger. All other requests
/// are fatal, because only debuggers make them.
fn ptrace() -> Rule {
    const TRACE_ME: u32 = 0;
    check(0, vec![(Is(TRACE_ME), REFUSE.into())], Verdict::Fatal)
}

/// Allows only the calling process or thread as the target. Otherwise, a process could kill another process of the
/// supervisor's user by setting a limit, or starve it by changing its priority. Neither Landlock nor missing
/// capabilities prevent this. (Processor affinity cannot be restricted in this way, because threads of one process set
/// each other's affinity.)
fn only_self(argument: u8) -> Rule {
    const SELF_TARGET: u32 = 0;
    only_values(argument, &[SELF_TARGET], REFUSE)
}

/// Allows a process to set its own limits with `prlimit64` and `setrlimit`, except the core dump limit, which
/// stays at 1 byte. With 1 byte, the kernel writes no dump and does not start the program in
/// `kernel.core_pattern`. With 0, the kernel would start that program. Setting the limit to 0 is ignored,
/// because there is no dump anyway.
fn limits() -> (Rule, Rule) {
    #[allow(clippy::unnecessary_cast, reason = "glibc has an unsigned type here, musl a signed one")]
    const CORE: u32 = libc::RLIMIT_CORE as u32;
    let is_core = |argument, set: Rule| -> Rule { check(argument, vec![(Is(CORE), set)], Verdict::Allow) };
    // An ignored call would not store the old limit, and the caller would read an undefined value. So the
    // call is refused if it requests the old limit.
    let old_limit = Pointer { argument: 3, null: Verdict::Ignore.into(), otherwise: REFUSE.into() };
    let new_limit = Pointer { argument: 2, null: Verdict::Allow.into(), otherwise: old_limit.into() };
    let only_self = check(0, vec![(Is(0), is_core(1, new_limit.into()))], REFUSE);
    (only_self, is_core(0, Verdict::Ignore.into()))
}

/// Allows only a single process as the target. Process groups and all processes of a user are denied.
fn only_process_target(kind: impl TryInto<u32>, rule: Rule) -> Rule {
    let kind = kind.try_into().unwrap_or_default();
    check(0, vec![(Is(kind), rule)], REFUSE)
}

const IOPRIO_WHO_PROCESS: u32 = 1;

/// Adds the rules for network access.
///
/// With [`NetworkAccess::Connections`], Landlock limits the ports that a worker can connect to. Landlock checks only
/// `connect` and `bind` of plain TCP sockets, so these rules deny calls that would bypass these checks.
///
/// - Sockets cannot use another protocol, such as MPTCP, or change to one (`TCP_ULP`).
/// - Sends cannot open a connection with TCP fast open.
/// - `listen` is refused, because it would choose a port for a socket that is not bound.
fn restrict_network(rules: &mut Rules, network: NetworkAccess) {
    rules.set("socket", socket(network));
    match network {
        NetworkAccess::None => rules.set(CONNECTION_CALLS, REFUSE),
        NetworkAccess::Connections { udp } => {
            rules.set("accept accept4 listen", REFUSE);
            if !udp {
                rules.set("bind", only_values(2, &[ROUTES_ADDRESS_SIZE], REFUSE));
            }
            rules.narrow("setsockopt", deny_protocol_change);
            flags::deny_fast_open(rules);
        }
        NetworkAccess::All => {}
    }
}

/// Allows sockets of the internet families, Unix sockets, and netlink sockets for querying addresses and
/// routes.
///
/// Without network access, all families are denied. Unix sockets are included, because a worker could use
/// them to reach any program of its user that listens on a path. As a result, programs cannot list network
/// interfaces. (Node throws an exception when this fails.)
fn socket(network: NetworkAccess) -> Rule {
    if network == NetworkAccess::None {
        return NO_FAMILY.into();
    }
    let mut cases = internet_families(network);
    cases.push((Is(libc::AF_UNIX as u32), Verdict::Allow.into()));
    check(0, cases, NO_FAMILY)
}

fn internet_families(network: NetworkAccess) -> Vec<(super::Condition, Rule)> {
    let (v4, v6) = match network {
        NetworkAccess::Connections { udp } => (only_connections(udp), only_connections(udp)),
        NetworkAccess::None | NetworkAccess::All => (deny_packet_sockets(), Verdict::Allow.into()),
    };
    vec![
        (Is(libc::AF_INET as u32), v4),
        (Is(libc::AF_INET6 as u32), v6),
        (Is(libc::AF_NETLINK as u32), routes_only()),
    ]
}

/// Allows TCP sockets, and UDP sockets if `udp` is true. All other types and protocols are denied.
fn only_connections(udp: bool) -> Rule {
    const DEFAULT_PROTOCOL: u32 = 0;
    let protocol = |number: i32| {
        only_values(2, &[DEFAULT_PROTOCOL, number as u32], Verdict::Errno(Errno::PROTONOSUPPORT))
    };
    let mut cases = vec![(Is(libc::SOCK_STREAM as u32), protocol(libc::IPPROTO_TCP))];
    if udp {
        cases.push((Is(libc::SOCK_DGRAM as u32), protocol(libc::IPPROTO_UDP)));
    }
    let otherwise = Verdict::Errno(Errno::SOCKTNOSUPPORT).into();
    Check { argument: 1, mask: SOCKET_TYPE_MASK, cases, otherwise }.into()
}

/// Denies replacing the protocol of a TCP socket. The call fails as it does on a kernel without the requested
/// protocol, a case that libraries with kernel TLS handle.
fn deny_protocol_change(otherwise: Rule) -> Rule {
    let no_protocol = Verdict::Errno(Errno::NOENT).into();
    let cases = vec![(Is(libc::TCP_ULP as u32), no_protocol)];
    let option = Check { argument: 2, mask: u32::MAX, cases, otherwise: otherwise.clone() };
    let cases = vec![(Is(libc::IPPROTO_TCP as u32), option.into())];
    Check { argument: 1, mask: u32::MAX, cases, otherwise }.into()
}

/// Denies Unix sockets, but not the internet families. Used if no other layer protects the sockets of other
/// programs of the same user, such as a message bus that can start programs.
pub(crate) fn deny_unix_sockets(mut rules: Rules, network: NetworkAccess) -> Rules {
    rules.set("socket", check(0, internet_families(network), NO_FAMILY));
    rules
}

const SOCKET_TYPE_MASK: u32 = 0xf;

/// Denies `SOCK_PACKET`, a socket type of the internet family that the kernel treats like the packet family.
fn deny_packet_sockets() -> Rule {
    const SOCK_PACKET: u32 = 10;
    let cases = vec![(Is(SOCK_PACKET), NO_FAMILY.into())];
    Check { argument: 1, mask: SOCKET_TYPE_MASK, cases, otherwise: Verdict::Allow.into() }.into()
}

fn routes_only() -> Rule {
    const NETLINK_ROUTE: u32 = 0;
    only_values(2, &[NETLINK_ROUTE], Verdict::Errno(Errno::PROTONOSUPPORT))
}

/// Size of a netlink socket address. Programs use netlink sockets to query network addresses and routes.
const ROUTES_ADDRESS_SIZE: u32 = size_of::<libc::sockaddr_nl>() as u32;

/// Allows `bind` only with the address sizes of the internet families and netlink, or with a size larger than
/// any Unix address, which some programs pass for all families. Most Unix addresses have another size, so
/// binding them is refused.
///
/// An abstract Unix name belongs to the first process on the machine that binds it. Without this rule, a
/// worker could take the name of another program, because neither file permissions nor Landlock apply to
/// binding such names. The ends of a socket pair can be bound as well.
fn bind_address_sizes() -> Rule {
    const INTERNET: [u32; 2] =
        [size_of::<libc::sockaddr_in>() as u32, size_of::<libc::sockaddr_in6>() as u32];
    const LONGER_THAN_UNIX: u32 = size_of::<libc::sockaddr_un>() as u32 + 1;
    let sizes = [Is(INTERNET[0]), Is(INTERNET[1]), Is(ROUTES_ADDRESS_SIZE), AtLeast(LONGER_THAN_UNIX)];
    check(2, sizes.into_iter().map(|size| (size, Verdict::Allow.into())).collect(), REFUSE)
}

/// Allows pairs of connected Unix sockets, which work like bidirectional pipes. Denies pairs of datagram sockets,
/// because such a socket can send to any path.
fn socketpair() -> Rule {
    let kinds = [libc::SOCK_STREAM, libc::SOCK_SEQPACKET];
    let cases = kinds.into_iter().map(|kind| (Is(kind as u32), Verdict::Allow.into())).collect();
    let otherwise = Verdict::Errno(Errno::SOCKTNOSUPPORT).into();
    let connected = Check { argument: 1, mask: SOCKET_TYPE_MASK, cases, otherwise };
    check(0, vec![(Is(libc::AF_UNIX as u32), connected.into())], NO_FAMILY)
}

/// Denies terminal requests that insert input, paste into a console, or load a line discipline. Each of them has been
/// used to escape from a sandbox.
fn deny_terminal_requests() -> Rule {
    let requests = [libc::TIOCSTI, libc::TIOCLINUX, libc::TIOCSETD];
    check(
        1,
        requests.into_iter().map(|request| (Is(request as u32), REFUSE.into())).collect(),
        Verdict::Allow,
    )
}

fn check(argument: u8, cases: Vec<(super::Condition, Rule)>, otherwise: Verdict) -> Rule {
    Check { argument, mask: u32::MAX, cases, otherwise: otherwise.into() }.into()
}

fn only_values(argument: u8, values: &[u32], otherwise: Verdict) -> Rule {
    check(argument, values.iter().map(|&value| (Is(value), Verdict::Allow.into())).collect(), otherwise)
}

/// Index of a system call argument, which is the first or the second, and the values that are allowed for the argument.
type Requests = (u8, &'static [u32]);

fn only_requests((argument, requests): Requests, errno: Errno) -> Rule {
    only_values(argument, requests, Verdict::Errno(errno))
}

/// `prctl` options that concern only the calling process, such as options for the name, for memory, and for giving up
/// privileges.
const PROCESS_OPTIONS: Requests = (
    0,
    &[
        libc::PR_CAPBSET_READ as u32,
        libc::PR_GET_DUMPABLE as u32,
        libc::PR_GET_NAME as u32,
        libc::PR_GET_NO_NEW_PRIVS as u32,
        libc::PR_GET_PDEATHSIG as u32,
        libc::PR_GET_SECCOMP as u32,
        libc::PR_GET_THP_DISABLE as u32,
        libc::PR_GET_TIMERSLACK as u32,
        libc::PR_SET_CHILD_SUBREAPER as u32,
        libc::PR_SET_DUMPABLE as u32,
        libc::PR_SET_NAME as u32,
        libc::PR_SET_NO_NEW_PRIVS as u32,
        libc::PR_SET_PDEATHSIG as u32,
        libc::PR_SET_SECCOMP as u32,
        libc::PR_SET_THP_DISABLE as u32,
        libc::PR_SET_TIMERSLACK as u32,
        libc::PR_SET_VMA as u32,
    ],
);

/// `ioctl` requests that programs make on a descriptor without knowing the type of the file, for example to detect a
/// terminal.
const DESCRIPTOR_REQUESTS: Requests = (
    1,
    &[
        libc::FIOCLEX as u32,
        libc::FIONBIO as u32,
        libc::FIONCLEX as u32,
        libc::FIONREAD as u32,
        libc::TCGETS as u32,
        TCGETS2,
        libc::TIOCGPGRP as u32,
        libc::TIOCGWINSZ as u32,
    ],
);

/// Request that newer C libraries use instead of [`libc::TCGETS`].
const TCGETS2: u32 = 0x802c_542a;

/// Calls needed for computing: memory, files, threads, time, and existing sockets.
const STRICT_ALLOWED_CALLS: &[&str] = &[
    // Memory.
    "brk cachestat get_mempolicy madvise map_shadow_stack mbind membarrier memfd_create mincore \
     mlock mlock2 mlockall mmap mprotect mremap mseal msync munlock munlockall munmap pkey_alloc \
     pkey_free pkey_mprotect set_mempolicy",
    // Files, and pipes.
    "access chdir chmod close close_range copy_file_range creat dup dup2 dup3 faccessat faccessat2 \
     fadvise64 fallocate fchdir fchmod fchmodat fchmodat2 fcntl fdatasync fgetxattr file_getattr \
     flistxattr flock fstat fstatfs fsync ftruncate futimesat getcwd getdents getdents64 getxattr \
     getxattrat inotify_add_watch inotify_init inotify_init1 inotify_rm_watch lgetxattr link linkat \
     listxattr listxattrat llistxattr lseek lstat mkdir mkdirat newfstatat open openat pipe pipe2 \
     pread64 preadv preadv2 pwrite64 pwritev pwritev2 read readahead readlink readlinkat \
     readv rename renameat renameat2 rmdir sendfile splice stat statfs statx symlink symlinkat \
     sync_file_range syncfs tee truncate umask unlink unlinkat utime utimensat utimes vmsplice \
     write writev",
    // Waiting.
    "epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 \
     pause poll ppoll pselect6 select signalfd signalfd4 timerfd_create timerfd_gettime \
     timerfd_settime",
    // Calls for threads, processes and programs. `clone` is not listed, because it has a separate rule.
    "arch_prctl execve execveat exit exit_group fork futex futex_requeue futex_wait futex_waitv \
     futex_wake get_robust_list getcpu restart_syscall rseq sched_get_priority_max \
     sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler \
     sched_rr_get_interval sched_setaffinity sched_yield set_robust_list set_tid_address vfork \
     wait4 waitid",
    // Signals.
    "kill pidfd_open pidfd_send_signal rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo \
     rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sigaltstack tgkill tkill",
    // Time.
    "alarm clock_getres clock_gettime clock_nanosleep getitimer gettimeofday nanosleep setitimer \
     time timer_create timer_delete timer_getoverrun timer_gettime timer_settime times",
    // Calls that query the process itself, set its limits, or give up rights.
    "capget getegid geteuid getgid getgroups getpgid getpgrp getpid getppid getpriority getrandom \
     getresgid getresuid getrlimit getrusage getsid gettid getuid ioprio_get landlock_add_rule \
     landlock_create_ruleset landlock_restrict_self prlimit64 seccomp setpgid setpriority setrlimit \
     setsid sysinfo uname",
    // Existing sockets.
    "getpeername getsockname getsockopt recvfrom recvmmsg recvmsg sendmmsg sendmsg sendto \
     setsockopt shutdown",
];

/// System calls that are useful only for network sockets. Denied without network access, because `bind` could give a
/// name to a socket of a socket pair.
const CONNECTION_CALLS: &str = "accept accept4 bind connect listen";

/// System calls that ordinary programs try but do not need. The `strict` profile refuses these calls in addition to the
/// calls that both profiles refuse.
const STRICT_REFUSED_CALLS: &str = "capset chown fchown fchownat file_setattr fremovexattr fsetxattr ioprio_set lchown lremovexattr \
     lsetxattr mknod mknodat removexattr removexattrat sched_setattr sched_setparam \
     sched_setscheduler setfsgid setfsuid setgid setgroups setregid setresgid setresuid setreuid \
     setuid setxattr setxattrat sync";

/// System calls that fail with ENOSYS under the `strict` profile, in addition to [`UNAVAILABLE_CALLS`]. Programs then
/// use older calls instead.
const STRICT_UNAVAILABLE_CALLS: &str = "io_setup listmount memfd_secret mq_open statmount";
