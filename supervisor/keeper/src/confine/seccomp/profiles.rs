//! The ready-made rules.
//!
//! They deny gently where honest programs probe, with the error that makes these fall back; fatal is
//! what no honest program does, and under `strict` whatever is not listed.
//!
//! Nothing here is about permission to files or about other users' processes: Landlock and identity are.

use rustix::io::Errno;

use super::assembler::Condition::{AtLeast, HasAny, Is};
use super::{Check, Pointer, Rule, Rules, Verdict, flags};

/// They change the kernel.
const FATAL: &str = "bpf delete_module finit_module init_module kexec_file_load kexec_load";

/// C libraries and Node fall back to older calls, whose arguments can be looked at.
const MISSING: &str = "clone3 io_uring_enter io_uring_register io_uring_setup openat2";

/// Each group is refused, since it
const REFUSED: &[&str] = &[
    // changes what file systems there are, or where the root is,
    "chroot fsconfig fsmount fsopen fspick mount mount_setattr move_mount open_tree open_tree_attr \
     pivot_root umount2",
    // enters another namespace; new ones are refused by flags,
    "setns",
    // gets at files past their paths,
    "fanotify_init name_to_handle_at open_by_handle_at",
    // gets at other processes,
    "kcmp pidfd_getfd process_madvise process_vm_readv process_vm_writev",
    // has been a way into the kernel again and again,
    "add_key keyctl perf_event_open request_key userfaultfd",
    // is the machine's administration,
    "acct adjtimex clock_adjtime clock_settime ioperm iopl quotactl quotactl_fd reboot \
     setdomainname sethostname settimeofday swapoff swapon syslog vhangup",
    // or is a relic.
    "lookup_dcookie nfsservctl uselib",
];

/// What they make belongs to all processes of the same user, counts as no process's memory, and stays when all that use
/// it have ended. Kernels can be built without them, so that programs ask first.
const OUTLASTING: &str = "mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedsend mq_unlink msgctl msgget msgrcv \
     msgsnd semctl semget semop semtimedop shmat shmctl shmdt shmget";

/// A deny list that leaves ordinary programs unharmed.
pub(crate) fn default(network: bool) -> Rules {
    let mut rules = Rules::new(Verdict::Allow);
    deny(&mut rules);
    rules.set("sched_setattr sched_setparam sched_setscheduler migrate_pages move_pages", of_itself(0));
    rules.set("ioprio_set", of_one_process(IOPRIO_WHO_PROCESS, of_itself(1)));
    rules.set(OUTLASTING, Verdict::Errno(Errno::NOSYS));
    rules.set("socket", socket(network));
    if !network {
        rules.set(CONNECTING, REFUSE);
    }
    rules.set("ioctl", terminal_tricks());
    flags::refuse(&mut rules);
    rules
}

/// An allow list for computing, in force from before `execve`: it must let a program start, with its
/// libraries and its interpreter. [`sealed`] takes some of that away again.
pub(crate) fn strict(network: bool) -> Rules {
    let mut rules = Rules::new(Verdict::Fatal);
    for names in COMPUTING {
        rules.set(names, Verdict::Allow);
    }
    rules.set(CONNECTING, Verdict::Allow);
    rules.set(REFUSED_TO_COMPUTING, REFUSE);
    rules.set(MISSING_TO_COMPUTING, Verdict::Errno(Errno::NOSYS));
    deny(&mut rules);
    if !network {
        rules.set(CONNECTING, REFUSE);
    }
    rules.set("socket", socket(network));
    rules.set("prctl", only(PROCESS_OPTIONS, Errno::INVAL));
    rules.set("ioctl", only(DESCRIPTOR_REQUESTS, Errno::NOTTY));
    flags::refuse(&mut rules);
    rules
}

/// What comes on top of `strict` when the program is ready for its first job: no other program any more,
/// and no new socket, unless it has the network. `allow` is the list that `strict` was overridden with.
///
/// Nothing in it is fatal, since for a second filter of one process there can be no second listener:
/// what is fatal, the first one tells. Errors: a name that no architecture has.
pub(crate) fn sealed<'n>(network: bool, allow: &[&'n str]) -> Result<Rules, &'n str> {
    let mut rules = Rules::new(Verdict::Allow);
    rules.set("execve execveat", REFUSE);
    if !network {
        rules.set("socket socketpair", NO_FAMILY);
    }
    rules.overridden(allow, &[])
}

/// Nothing is refused.
pub(crate) fn open() -> Rules {
    Rules::new(Verdict::Allow)
}

/// What a template may more than others: to fork a sibling, by exactly these flags.
pub(crate) fn with_siblings(mut rules: Rules) -> Rules {
    const SIBLING: u32 = (libc::CLONE_PARENT | libc::SIGCHLD) as u32;
    rules.narrow("clone", |otherwise| {
        Check { argument: 0, mask: u32::MAX, cases: vec![(Is(SIBLING), Verdict::Allow.into())], otherwise }
            .into()
    });
    rules
}

/// On top of what a template forks: it takes back what [`with_siblings`] gives.
pub(crate) fn without_siblings(mut rules: Rules) -> Rules {
    rules.set("clone", without(libc::CLONE_PARENT as u32));
    rules
}

const REFUSE: Verdict = Verdict::Errno(Errno::PERM);

/// Programs take it for a kernel built without that family, and do without.
const NO_FAMILY: Verdict = Verdict::Errno(Errno::AFNOSUPPORT);

/// What both profiles deny.
fn deny(rules: &mut Rules) {
    rules.set(FATAL, Verdict::Fatal);
    rules.set(MISSING, Verdict::Errno(Errno::NOSYS));
    for names in REFUSED {
        rules.set(names, REFUSE);
    }
    rules.set("clone", without(NEW_NAMESPACES | libc::CLONE_PARENT as u32));
    // Among the flags of `clone`, this bit belongs to a signal's number.
    rules.set("unshare", without(NEW_NAMESPACES | libc::CLONE_NEWTIME as u32));
    rules.set("personality", personality());
    rules.set("ptrace", trace());
    let (prlimit, setrlimit) = limits();
    rules.set("prlimit64", prlimit);
    rules.set("setrlimit", setrlimit);
    rules.set("setpriority", of_one_process(libc::PRIO_PROCESS, of_itself(1)));
    rules.set("socketpair", socketpair());
    rules.set("bind", named_by_number());
}

const NEW_NAMESPACES: u32 = (libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWUTS) as u32;

/// No flag of these in the first argument. CLONE_PARENT is one: its child would be the keeper's own.
fn without(flags: u32) -> Rule {
    check(0, vec![(HasAny(flags), REFUSE.into())], Verdict::Allow)
}

/// Asking which one it is, the normal one, and addresses that are not random, as sanitizers want them.
/// Others have weakened programs that were meant to be safe.
fn personality() -> Rule {
    const ASK: u32 = u32::MAX;
    only_these(0, &[ASK, 0, libc::ADDR_NO_RANDOMIZE as u32], REFUSE)
}

/// Asking to be traced is a way to find out whether one is. The rest is for debuggers.
fn trace() -> Rule {
    const TRACE_ME: u32 = 0;
    check(0, vec![(Is(TRACE_ME), REFUSE.into())], Verdict::Fatal)
}

/// Of the process, or the thread, that asks. A limit of another one can end it, and a priority starve it, and
/// any process of the supervisor's user may set them: neither Landlock nor missing capabilities stand
/// in the way. (To which processors another one is bound cannot be told from here: threads of one process
/// bind each other.)
fn of_itself(argument: u8) -> Rule {
    const ITSELF: u32 = 0;
    only_these(argument, &[ITSELF], REFUSE)
}

/// The limits of the process itself, by `prlimit64` and by `setrlimit`, except that of core dumps. That is 1 byte,
/// with which the kernel writes no dump and starts no program of `kernel.core_pattern`; with 0 it starts that
/// program. Programs that set it to 0 want no dump and have that already, so their call is ignored.
fn limits() -> (Rule, Rule) {
    #[allow(clippy::unnecessary_cast, reason = "glibc has an unsigned type here, musl a signed one")]
    const CORE: u32 = libc::RLIMIT_CORE as u32;
    let is_core = |argument, set: Rule| -> Rule { check(argument, vec![(Is(CORE), set)], Verdict::Allow) };
    // A caller who asks for the old limit as well would take what it does not get for that.
    let set = Pointer { argument: 3, null: Verdict::Ignore.into(), otherwise: REFUSE.into() };
    let asked = Pointer { argument: 2, null: Verdict::Allow.into(), otherwise: set.into() };
    let of_itself = check(0, vec![(Is(0), is_core(1, asked.into()))], REFUSE);
    (of_itself, is_core(0, Verdict::Ignore.into()))
}

/// Not of a group, nor of all processes of a user.
fn of_one_process(kind: impl TryInto<u32>, rule: Rule) -> Rule {
    let kind = kind.try_into().unwrap_or_default();
    check(0, vec![(Is(kind), rule)], REFUSE)
}

const IOPRIO_WHO_PROCESS: u32 = 1;

/// The families of the internet, Unix sockets, and the questions after addresses and routes.
///
/// Without the network there is none at all, not even of Unix sockets, with which a worker could reach
/// whatever of its user listens on a path. Programs that list interfaces get an error then; for Node
/// that is an exception, with whatever error.
fn socket(network: bool) -> Rule {
    if !network {
        return NO_FAMILY.into();
    }
    let mut cases = internet();
    cases.push((Is(libc::AF_UNIX as u32), Verdict::Allow.into()));
    check(0, cases, NO_FAMILY)
}

fn internet() -> Vec<(super::Condition, Rule)> {
    vec![
        (Is(libc::AF_INET as u32), no_packets()),
        (Is(libc::AF_INET6 as u32), Verdict::Allow.into()),
        (Is(libc::AF_NETLINK as u32), routes_only()),
    ]
}

/// These rules, with the network but without Unix sockets: for where nothing else keeps a worker from those
/// that others of its user listen on, such as a message bus that starts programs.
pub(crate) fn without_unix_sockets(mut rules: Rules) -> Rules {
    rules.set("socket", check(0, internet(), NO_FAMILY));
    rules
}

const SOCKET_TYPE_MASK: u32 = 0xf;

/// The kernel takes this type of the internet's family for the packet family.
fn no_packets() -> Rule {
    const SOCK_PACKET: u32 = 10;
    let cases = vec![(Is(SOCK_PACKET), NO_FAMILY.into())];
    Check { argument: 1, mask: SOCKET_TYPE_MASK, cases, otherwise: Verdict::Allow.into() }.into()
}

fn routes_only() -> Rule {
    const NETLINK_ROUTE: u32 = 0;
    only_these(2, &[NETLINK_ROUTE], Verdict::Errno(Errno::PROTONOSUPPORT))
}

/// Addresses of the internet, for questions after routes, and of the size that fits all; Unix sockets have longer
/// ones, and of any size. A name without a path is the first process's that takes it, on the whole machine, and neither
/// a folder nor Landlock keeps a worker from taking another's; each end of a pair can have one as well.
fn named_by_number() -> Rule {
    const INTERNET: [u32; 2] =
        [size_of::<libc::sockaddr_in>() as u32, size_of::<libc::sockaddr_in6>() as u32];
    const ROUTES: u32 = size_of::<libc::sockaddr_nl>() as u32;
    const LONGER_THAN_UNIX: u32 = size_of::<libc::sockaddr_un>() as u32 + 1;
    let sizes = [Is(INTERNET[0]), Is(INTERNET[1]), Is(ROUTES), AtLeast(LONGER_THAN_UNIX)];
    check(2, sizes.into_iter().map(|size| (size, Verdict::Allow.into())).collect(), REFUSE)
}

/// Pairs are pipes that go both ways. Those of datagrams are more: they can send to any path, and so
/// they are what `socket` is.
fn socketpair() -> Rule {
    let kinds = [libc::SOCK_STREAM, libc::SOCK_SEQPACKET];
    let cases = kinds.into_iter().map(|kind| (Is(kind as u32), Verdict::Allow.into())).collect();
    let otherwise = Verdict::Errno(Errno::SOCKTNOSUPPORT).into();
    let connected = Check { argument: 1, mask: SOCKET_TYPE_MASK, cases, otherwise };
    check(0, vec![(Is(libc::AF_UNIX as u32), connected.into())], NO_FAMILY)
}

/// Typing into a terminal, pasting into a console, and loading what drives a line, each of which has
/// led out of sandboxes.
fn terminal_tricks() -> Rule {
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

fn only_these(argument: u8, values: &[u32], otherwise: Verdict) -> Rule {
    check(argument, values.iter().map(|&value| (Is(value), Verdict::Allow.into())).collect(), otherwise)
}

/// Requests that come as one of the first two arguments; which one, their list says.
type Requests = (u8, &'static [u32]);

fn only((argument, requests): Requests, errno: Errno) -> Rule {
    only_these(argument, requests, Verdict::Errno(errno))
}

/// About the process itself: names, memory, and giving up more.
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

/// What a program asks of its descriptors without knowing what they are: terminals answer some, which
/// is how it finds out.
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

/// As [`libc::TCGETS`], in newer C libraries.
const TCGETS2: u32 = 0x802c_542a;

/// What it takes to compute: memory, files, threads, time, and the sockets that one was given.
const COMPUTING: &[&str] = &[
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
    // Threads, processes and programs; `clone` has a rule of its own.
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
    // The process itself, its limits, and what it can give up.
    "capget getegid geteuid getgid getgroups getpgid getpgrp getpid getppid getpriority getrandom \
     getresgid getresuid getrlimit getrusage getsid gettid getuid ioprio_get landlock_add_rule \
     landlock_create_ruleset landlock_restrict_self prlimit64 seccomp setpgid setpriority setrlimit \
     setsid sysinfo uname",
    // Sockets that are there.
    "getpeername getsockname getsockopt recvfrom recvmmsg recvmsg sendmmsg sendmsg sendto \
     setsockopt shutdown",
];

/// Only of use to sockets that were made with the network; without it, an end of a pair could still take a name.
const CONNECTING: &str = "accept accept4 bind connect listen";

/// Honest programs try these, and go on without: on top of what no worker may.
const REFUSED_TO_COMPUTING: &str = "capset chown fchown fchownat file_setattr fremovexattr fsetxattr ioprio_set lchown lremovexattr \
     lsetxattr mknod mknodat removexattr removexattrat sched_setattr sched_setparam \
     sched_setscheduler setfsgid setfsuid setgid setgroups setregid setresgid setresuid setreuid \
     setuid setxattr setxattrat sync";

/// As [`MISSING`]: there are older ways.
const MISSING_TO_COMPUTING: &str = "io_setup listmount memfd_secret mq_open statmount";
