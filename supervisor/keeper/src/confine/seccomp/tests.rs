//! Tests the compiled program against its rules, for every call number. Tests the profiles with real
//! processes: denied calls, programs that must still work, and notifications to the keeper.

use std::io::{IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::IoSlice;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

use super::*;
use crate::protocol::confinement::NetworkAccess;

/// Time after which a test program and its descendants are killed.
const PATIENCE: Duration = Duration::from_secs(600);

// ---- The program against the rules.

/// Interprets a BPF program as the kernel does. Supports only the instructions that filters use.
fn interpret(program: &[sock_filter], architecture: u32, number: u32, arguments: [u64; 6]) -> u32 {
    let halves = arguments.iter().flat_map(|argument| [*argument as u32, (*argument >> 32) as u32]);
    let data: Vec<u32> = [number, architecture, 0, 0].into_iter().chain(halves).collect();
    let (mut at, mut loaded) = (0, 0);
    loop {
        let sock_filter { code, jt, jf, k } = program[at];
        at += 1;
        let code = u32::from(code);
        let jump = |holds: bool| usize::from(if holds { jt } else { jf });
        match code & 7 {
            libc::BPF_LD => loaded = data[k as usize / 4],
            libc::BPF_ALU => loaded &= k,
            libc::BPF_RET => return k,
            _ => {
                at += match code & 0xf0 {
                    libc::BPF_JA => k as usize,
                    libc::BPF_JEQ => jump(loaded == k),
                    libc::BPF_JGE => jump(loaded >= k),
                    libc::BPF_JSET => jump(loaded & k != 0),
                    other => panic!("jump {other:#x}"),
                }
            }
        }
    }
}

fn expected(rules: &Rules, number: u32, arguments: [u64; 6]) -> u32 {
    if cfg!(target_arch = "x86_64") && number >= X32_FIRST {
        return libc::SECCOMP_RET_KILL_PROCESS;
    }
    if number > syscalls::NUMBER_MAX {
        return Verdict::Errno(Errno::NOSYS).action(FatalAction::Notify);
    }
    let mut rule = rules.calls.get(&number).unwrap_or(&rules.otherwise);
    loop {
        match rule {
            Rule::Always(verdict) => return verdict.action(FatalAction::Notify),
            Rule::Check(check) => {
                let value = arguments[usize::from(check.argument)] as u32 & check.mask;
                let holds = |condition: &Condition| match *condition {
                    Condition::Is(number) => value == number,
                    Condition::AtLeast(number) => value >= number,
                    Condition::HasAny(bits) => value & bits != 0,
                };
                let case = check.cases.iter().find(|(condition, _)| holds(condition));
                rule = case.map_or(&check.otherwise, |(_, rule)| rule);
            }
            Rule::Pointer(pointer) => {
                let is_null = arguments[usize::from(pointer.argument)] == 0;
                rule = if is_null { &pointer.null } else { &pointer.otherwise };
            }
        }
    }
}

fn all_profiles() -> Vec<Rules> {
    let (allow, deny) = (["ptrace", "open", "mount"], ["getpid", "ioctl"]);
    vec![
        default(NetworkAccess::None),
        default(NetworkAccess::All),
        strict(NetworkAccess::None),
        strict(NetworkAccess::All),
        deny_truncation(default(NetworkAccess::All)),
        deny_truncation(strict(NetworkAccess::None)),
        sealed(false, &["execve"]).unwrap(),
        sealed(true, &[]).unwrap(),
        allow_siblings(default(NetworkAccess::None)),
        deny_siblings(sealed(false, &[]).unwrap()),
        default(NetworkAccess::None).with_overrides(&allow, &deny).unwrap(),
        Rules::new(Verdict::Allow),
    ]
}

#[test]
fn seccomp_program_matches_rules_for_every_call() {
    const SAMPLES: [u64; 22] = [
        0,
        1,
        2,
        3,
        4,
        5,
        10,
        16,
        17,
        40,
        0x40,
        0x80,
        0x8000,
        0x2_0000,
        0x4_0000,
        0x5401,
        0x5412,
        0x541c,
        0x8_0802,
        0x1_0000_0001,
        0x1000_0011,
        u64::MAX,
    ];
    for rules in all_profiles() {
        let Filter { program, .. } = rules.compile(FatalAction::Notify);
        assert!(program.len() < 1000, "{} instructions", program.len());
        let numbers = (0..600).chain([X32_FIRST - 1, X32_FIRST, X32_FIRST + 39, u32::MAX]);
        for number in numbers {
            let is_checked = matches!(rules.calls.get(&number), Some(Rule::Check(_) | Rule::Pointer(_)));
            let further: &[[u64; 2]] = if is_checked {
                &[[0, 0], [12, 0], [0o4644, 1], [0, 0o2755], [1 << 32, 0], [1 << 32, 1 << 32]]
            } else {
                &[[0, 0]]
            };
            let seconds = if is_checked { &SAMPLES[..] } else { &[0] };
            for (&first, &second) in SAMPLES.iter().flat_map(|a| seconds.iter().map(move |b| (a, b))) {
                for &[third, fourth] in further {
                    let arguments = [first, second, third, fourth, 0, 0];
                    let is = interpret(&program, ARCHITECTURE, number, arguments);
                    assert_eq!(is, expected(&rules, number, arguments), "{number} {arguments:x?}");
                }
            }
        }
    }
}

#[test]
fn foreign_architecture_calls_kill_the_process() {
    for rules in all_profiles() {
        let filter = rules.compile(FatalAction::Notify);
        for foreign in [0, 3 | 0x4000_0000, ARCHITECTURE ^ 1] {
            let action = interpret(&filter.program, foreign, 0, [0; 6]);
            assert_eq!(action, libc::SECCOMP_RET_KILL_PROCESS);
        }
    }
}

#[test]
fn seccomp_lookup_takes_fewer_than_45_instructions() {
    fn depth(block: &[sock_filter]) -> usize {
        let mut steps = vec![0_usize; block.len() + 1];
        for (at, instruction) in block.iter().enumerate().rev() {
            let next = |skip: usize| steps[at + 1 + skip];
            steps[at] = 1 + match u32::from(instruction.code) {
                code if code & 7 == libc::BPF_RET => 0,
                code if code == libc::BPF_JMP | libc::BPF_JA => next(instruction.k as usize),
                code if code & 7 == libc::BPF_JMP => {
                    next(instruction.jt.into()).max(next(instruction.jf.into()))
                }
                _ => next(0),
            };
        }
        steps[0]
    }
    for rules in all_profiles() {
        let filter = rules.compile(FatalAction::Notify);
        // On the longest path, the binary search is followed by a comparison with the longest list of values for a
        // single argument.
        let steps = depth(&filter.program);
        assert!(steps < 45, "{steps} steps in {} instructions", filter.program.len());
    }
}

#[test]
fn seccomp_rules_reject_unknown_call_names() {
    // Building a profile fails an assertion if the profile contains an unknown name.
    all_profiles();
    assert_eq!(default(NetworkAccess::None).with_overrides(&["read"], &["raed"]).err(), Some("raed"));
    assert_eq!(sealed(false, &["raed"]).err(), Some("raed"));
}

// ---- Real processes.

/// A child process that runs under a seccomp filter, and the listener for notifications of this filter.
struct Confined {
    child: Child,
    listener: Option<OwnedFd>,
}

impl Confined {
    fn start(mut command: Command, filter: Filter) -> Self {
        let (ours, theirs) = UnixStream::pair().unwrap();
        // SAFETY: makes raw system calls on prepared data, and allocates nothing.
        unsafe {
            command.pre_exec(move || {
                rustix::thread::set_no_new_privs(true)?;
                let Some(listener) = filter.install()? else { return Ok(()) };
                let listener = [BorrowedFd::borrow_raw(listener)];
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                let mut ancillary = SendAncillaryBuffer::new(&mut space);
                ancillary.push(SendAncillaryMessage::ScmRights(&listener));
                rustix::net::sendmsg(&theirs, &[IoSlice::new(b"l")], &mut ancillary, SendFlags::empty())?;
                Ok(())
            })
        };
        // Puts the child and its descendants into one process group, so that the whole group can be killed at once.
        command.process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().expect("the filter lets a program start");
        Self { child, listener: take_listener(&ours) }
    }

    /// Responds to notifications with this error until the child and its descendants have exited. Returns the names of
    /// the calls in the notifications, and the results that the child printed.
    fn finish(self, errno: Errno) -> Finished {
        let Self { child, listener } = self;
        let pid = child.id() as i32;
        let responder = std::thread::spawn(move || {
            let mut named = Vec::new();
            let start = Instant::now();
            while let Some(listener) = &listener {
                if start.elapsed() > PATIENCE {
                    // SAFETY: accesses no memory. Kills the child's process group, which exists as long as the child or
                    // a descendant in the group does.
                    unsafe { libc::kill(-pid, libc::SIGKILL) };
                }
                let Some(notification) = next_notification(listener) else { break };
                if let Some(Notification { id, number, .. }) = notification {
                    named.push(syscalls::name(number).unwrap_or("unknown"));
                    respond_with_error(listener, id, errno).unwrap();
                }
            }
            named
        });
        let output = child.wait_with_output().unwrap();
        let named = responder.join().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Finished { status: output.status, stdout: text(output.stdout), stderr: text(output.stderr), named }
    }
}

/// Waits for a notification for at most one second. Returns `None` if no process uses the filter any longer, and
/// `Some(None)` if the wait has timed out.
fn next_notification(listener: &OwnedFd) -> Option<Option<Notification>> {
    let mut entries = [PollFd::new(listener, PollFlags::IN)];
    let wait = Timespec { tv_sec: 1, tv_nsec: 0 };
    rustix::io::retry_on_intr(|| poll(&mut entries, Some(&wait))).unwrap();
    let events = entries[0].revents();
    if events.contains(PollFlags::IN) {
        return Some(receive(listener).unwrap());
    }
    (!events.contains(PollFlags::HUP)).then_some(None)
}

fn take_listener(ours: &UnixStream) -> Option<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    rustix::net::recvmsg(ours, &mut [IoSliceMut::new(&mut byte)], &mut ancillary, flags).ok()?;
    ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    })
}

#[derive(Debug)]
struct Finished {
    status: ExitStatus,
    stdout: String,
    stderr: String,
    named: Vec<&'static str>,
}

impl Finished {
    /// Returns the results that [`helper_child_makes_system_calls`] printed. Each result is a call's error number, or
    /// 0 on success.
    fn outcomes(&self) -> Vec<i32> {
        let outcome = |line: &str| line.split_once("outcome ").map(|(_, number)| number.parse().unwrap());
        self.stdout.lines().filter_map(outcome).collect()
    }
}

const CALLS: &str = "BULKHEAD_TEST_CALLS";
const SEAL: &str = "BULKHEAD_TEST_SEAL";

/// Not a test. A test starts this program again with an environment variable that lists system calls, and
/// this function makes the calls.
#[test]
fn helper_child_makes_system_calls() {
    let Ok(calls) = std::env::var(CALLS) else { return };
    if std::env::var_os(SEAL).is_some() {
        rustix::thread::set_no_new_privs(true).unwrap();
        sealed(false, &[]).unwrap().compile(FatalAction::Kill).install().unwrap();
        assert_eq!(std::thread::spawn(|| 7).join().unwrap(), 7);
    }
    for call in calls.lines() {
        let mut numbers = call.split(' ').map(|number| number.parse::<u64>().unwrap());
        let number = numbers.next().unwrap();
        if number == INT_80 {
            enter_with_32_bits();
        }
        let [a, b, c]: [u64; 3] = std::array::from_fn(|_| numbers.next().unwrap());
        // SAFETY: with these arguments, the calls in the tests only fail or create a descriptor.
        let result = unsafe { libc::syscall(number as _, a, b, c, c, c, c) };
        println!("\noutcome {}", if result == -1 { errno::last().raw_os_error() } else { 0 });
        std::io::stdout().flush().unwrap();
    }
}

/// Number that stands for a call through `int 0x80`, by which 32-bit programs make system calls.
const INT_80: u64 = 1 << 40;

fn enter_with_32_bits() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: queries the process ID, and has no other effect.
    unsafe {
        std::arch::asm!("int 0x80", inlateout("eax") 20 => _, out("r8") _, out("r9") _, out("r10") _, out("r11") _)
    };
}

fn helper_command(calls: &[(u64, [u64; 3])]) -> Command {
    let lines: Vec<_> = calls.iter().map(|(number, [a, b, c])| format!("{number} {a} {b} {c}")).collect();
    let mut command = Command::new(std::env::current_exe().unwrap());
    let name = format!("{}::helper_child_makes_system_calls", module_path!().split_once("::").unwrap().1);
    command.args(["--exact", &name, "--nocapture", "--test-threads=1"]).env(CALLS, lines.join("\n"));
    command
}

/// Arguments that are invalid for all system calls. A call that uses its arguments therefore fails if the kernel
/// executes it.
const INVALID_ARGUMENTS: [u64; 3] = [u64::MAX; 3];

fn call(name: &str, arguments: [u64; 3]) -> Option<(u64, [u64; 3])> {
    assert!(syscalls::is_known(name), "{name}");
    syscalls::number(name).map(|number| (u64::from(number), arguments))
}

/// Makes each call in a child process under the filter, and compares the call's error number with the expected one.
fn assert_outcomes(filter: Filter, expectations: &[(&str, [u64; 3], i32)]) {
    let here: Vec<_> = expectations
        .iter()
        .filter_map(|&(name, arguments, errno)| Some((call(name, arguments)?, errno)))
        .collect();
    let calls: Vec<_> = here.iter().map(|(call, _)| *call).collect();
    let finished = Confined::start(helper_command(&calls), filter).finish(Errno::XDEV);
    let outcomes = finished.outcomes();
    assert_eq!(outcomes.len(), here.len(), "{finished:?}");
    for (((number, arguments), expected), outcome) in here.iter().zip(outcomes) {
        let name = syscalls::name(*number as u32).unwrap();
        assert_eq!(outcome, *expected, "{name} {arguments:x?}, errors as numbers");
    }
}

const UNIX: u64 = libc::AF_UNIX as u64;
const INET: u64 = libc::AF_INET as u64;
const NETLINK: u64 = libc::AF_NETLINK as u64;
const STREAM: u64 = libc::SOCK_STREAM as u64;
const DATAGRAM: u64 = libc::SOCK_DGRAM as u64;
const CORE: u64 = libc::RLIMIT_CORE as u64;
const CLOEXEC: u64 = libc::SOCK_CLOEXEC as u64;

/// Error with which the tests respond to seccomp notifications. No tested call returns this error on its own.
const NOTIFIED: i32 = libc::EXDEV;

/// Calls that both profiles deny, with and without network access.
fn denied_by_both() -> Vec<(&'static str, [u64; 3], i32)> {
    let refused = "chroot fsconfig fsmount fsopen fspick mount mount_setattr move_mount open_tree \
                   open_tree_attr pivot_root umount2 setns fanotify_init name_to_handle_at \
                   open_by_handle_at kcmp pidfd_getfd process_madvise process_vm_readv \
                   process_vm_writev add_key keyctl perf_event_open request_key userfaultfd acct \
                   adjtimex clock_adjtime clock_settime ioperm iopl quotactl quotactl_fd reboot \
                   setdomainname sethostname settimeofday swapoff swapon syslog vhangup";
    let fatal = "bpf delete_module finit_module init_module kexec_file_load kexec_load";
    let missing = "clone3 io_uring_enter io_uring_register io_uring_setup openat2";
    let mut all = Vec::new();
    for (names, errno) in [(refused, libc::EPERM), (fatal, NOTIFIED), (missing, libc::ENOSYS)] {
        all.extend(
            names.split(' ').filter(|name| !name.is_empty()).map(|name| (name, INVALID_ARGUMENTS, errno)),
        );
    }
    for flag in [libc::CLONE_NEWNS, libc::CLONE_NEWUSER, libc::CLONE_NEWPID, libc::CLONE_NEWNET] {
        // Adds an invalid combination of flags, so that the call fails even if the filter allows it.
        let broken = (flag | libc::CLONE_SIGHAND) as u64;
        all.extend([("clone", [broken, 0, 0], libc::EPERM), ("unshare", [flag as u64, 0, 0], libc::EPERM)]);
    }
    all.extend([
        ("clone", [libc::CLONE_PARENT as u64 | libc::CLONE_SIGHAND as u64, 0, 0], libc::EPERM),
        ("clone", [libc::CLONE_SIGHAND as u64, 0, 0], libc::EINVAL),
        ("unshare", [libc::CLONE_NEWTIME as u64, 0, 0], libc::EPERM),
        ("personality", [0xffff_ffff, 0, 0], 0),
        ("personality", [0, 0, 0], 0),
        ("personality", [0x0040_0000, 0, 0], libc::EPERM),
        ("ptrace", [libc::PTRACE_TRACEME as u64, 0, 0], libc::EPERM),
        ("ptrace", [libc::PTRACE_ATTACH as u64, 0, 0], NOTIFIED),
        ("socketpair", [UNIX, DATAGRAM, 0], libc::ESOCKTNOSUPPORT),
        ("socketpair", [UNIX, STREAM | CLOEXEC, 0], libc::EFAULT),
        ("socketpair", [libc::AF_TIPC as u64, STREAM, 0], libc::EAFNOSUPPORT),
        ("getpid", [0; 3], 0),
        // The limit for core dumps can be read but not set. The limit is set if either half of the pointer to the new
        // limit is nonzero.
        ("prlimit64", [0, CORE, 0], 0),
        ("prlimit64", [0, CORE, 1], libc::EPERM),
        ("prlimit64", [0, CORE, 1 << 32], libc::EPERM),
        ("prlimit64", [1, CORE, 0], libc::EPERM),
        ("prlimit64", [0, libc::RLIMIT_NOFILE as u64, 1], libc::EFAULT),
        ("setrlimit", [CORE, 0, 0], 0),
        ("setrlimit", [libc::RLIMIT_NOFILE as u64, 0, 0], libc::EFAULT),
    ]);
    all.extend(set_id());
    all
}

/// Calls that set a file mode, with and without the set-user-ID or set-group-ID bit. Allowed calls fail because the
/// path is a null pointer or the descriptor is invalid.
fn set_id() -> Vec<(&'static str, [u64; 3], i32)> {
    let here = libc::AT_FDCWD as u64;
    let mut all = Vec::new();
    for (mode, errno) in [(0o4755, libc::EPERM), (0o2644, libc::EPERM), (0o1777, libc::EFAULT)] {
        all.extend([("chmod", [0, mode, 0], errno), ("creat", [0, mode, 0], errno)]);
        all.extend([("mkdir", [0, mode, 0], errno), ("mkdirat", [here, 0, mode], errno)]);
        all.push(("fchmodat", [here, 0, mode], errno));
        all.push(("open", [0, libc::O_CREAT as u64, mode], errno));
        all.push(("open", [0, (libc::O_TMPFILE | libc::O_WRONLY) as u64, mode], errno));
        // The mode argument is ignored unless the flags create a file.
        all.push(("open", [0, libc::O_DIRECTORY as u64, mode], libc::EFAULT));
    }
    all.push(("fchmodat2", [here, 0, 0o4755], libc::EPERM));
    all.push(("fchmod", [u64::MAX, 0o4755, 0], libc::EPERM));
    all.push(("fchmod", [u64::MAX, 0o755, 0], libc::EBADF));
    all.push(("sendmsg", [u64::MAX, 0, libc::MSG_OOB as u64], libc::EOPNOTSUPP));
    all
}

fn without_network() -> Vec<(&'static str, [u64; 3], i32)> {
    let calls = ["bind", "connect", "listen", "accept", "accept4"];
    let mut all = calls.map(|name| (name, [u64::MAX, 0, 16], libc::EPERM)).to_vec();
    let families = [UNIX, INET, libc::AF_INET6 as u64, NETLINK, libc::AF_VSOCK as u64, libc::AF_ALG as u64];
    all.extend(families.map(|family| ("socket", [family, STREAM, 0], libc::EAFNOSUPPORT)));
    all
}

fn with_network() -> Vec<(&'static str, [u64; 3], i32)> {
    let barred =
        [libc::AF_VSOCK, libc::AF_ALG, libc::AF_PACKET, libc::AF_BLUETOOTH, libc::AF_CAN, libc::AF_XDP];
    let mut all: Vec<_> =
        barred.map(|family| ("socket", [family as u64, DATAGRAM, 0], libc::EAFNOSUPPORT)).to_vec();
    all.extend([
        ("socket", [UNIX, STREAM | CLOEXEC, 0], 0),
        ("socket", [INET, STREAM, 0], 0),
        ("socket", [INET, 10, 0], libc::EAFNOSUPPORT),
        ("socket", [INET, 10 | CLOEXEC, 0], libc::EAFNOSUPPORT),
        ("socket", [NETLINK, libc::SOCK_RAW as u64, 0], 0),
        ("socket", [NETLINK, libc::SOCK_RAW as u64, 12], libc::EPROTONOSUPPORT),
        // The rule checks only the size of the address, and denies only sizes that indicate a Unix address.
        ("bind", [u64::MAX, 0, 12], libc::EBADF),
        ("bind", [u64::MAX, 0, 16], libc::EBADF),
        ("bind", [u64::MAX, 0, 28], libc::EBADF),
        ("bind", [u64::MAX, 0, 128], libc::EBADF),
        ("bind", [u64::MAX, 0, 2], libc::EPERM),
        ("bind", [u64::MAX, 0, 20], libc::EPERM),
        ("bind", [u64::MAX, 0, 110], libc::EPERM),
    ]);
    all
}

/// Returns calls that could bypass Landlock's port rules, and related calls that are allowed.
fn with_connections(udp: bool) -> Vec<(&'static str, [u64; 3], i32)> {
    const MPTCP: u64 = 262;
    const SMC: u64 = 256;
    const AF_SMC: i32 = 43;
    const SCTP: u64 = libc::IPPROTO_SCTP as u64;
    const DCCP: u64 = 6;
    const INET6: u64 = libc::AF_INET6 as u64;
    const TCP: u64 = libc::IPPROTO_TCP as u64;
    const FAST_OPEN: u64 = libc::MSG_FASTOPEN as u64;
    let (kind, protocol) = (libc::ESOCKTNOSUPPORT, libc::EPROTONOSUPPORT);
    let of_udp = |errno| if udp { errno } else { kind };
    let mut all = Vec::new();
    for family in [INET, INET6] {
        all.extend([
            ("socket", [family, STREAM | CLOEXEC | libc::SOCK_NONBLOCK as u64, 0], 0),
            ("socket", [family, STREAM, TCP], 0),
            ("socket", [family, STREAM, MPTCP], protocol),
            // The kernel ignores the upper half of an argument.
            ("socket", [family, STREAM, MPTCP | 1 << 32], protocol),
            ("socket", [family, STREAM, SMC], protocol),
            ("socket", [family, STREAM, SCTP], protocol),
            ("socket", [family, libc::SOCK_SEQPACKET as u64, SCTP], kind),
            ("socket", [family, DCCP, libc::IPPROTO_DCCP as u64], kind),
            ("socket", [family, libc::SOCK_RAW as u64, libc::IPPROTO_ICMP as u64], kind),
            ("socket", [family, libc::SOCK_RAW as u64, TCP], kind),
            ("socket", [family, 10, 0], kind),
            ("socket", [family, DATAGRAM | CLOEXEC, 0], of_udp(0)),
            ("socket", [family, DATAGRAM, libc::IPPROTO_UDP as u64], of_udp(0)),
            ("socket", [family, DATAGRAM, libc::IPPROTO_UDPLITE as u64], of_udp(protocol)),
            ("socket", [family, DATAGRAM, libc::IPPROTO_ICMP as u64], of_udp(protocol)),
        ]);
    }
    let others = [libc::AF_VSOCK, libc::AF_ALG, libc::AF_PACKET, libc::AF_RDS, libc::AF_TIPC, AF_SMC];
    all.extend(others.map(|family| ("socket", [family as u64, STREAM, 0], libc::EAFNOSUPPORT)));
    all.extend(["listen", "accept", "accept4"].map(|name| (name, [u64::MAX, 1, 0], libc::EPERM)));
    let bind = if udp { libc::EBADF } else { libc::EPERM };
    all.extend([("bind", [u64::MAX, 0, 12], libc::EBADF), ("bind", [u64::MAX, 0, 110], libc::EPERM)]);
    all.extend([16, 28, 128].map(|size| ("bind", [u64::MAX, 0, size], bind)));
    all.extend([
        ("setsockopt", [u64::MAX, TCP, libc::TCP_ULP as u64], libc::ENOENT),
        ("setsockopt", [u64::MAX, TCP | 1 << 32, libc::TCP_ULP as u64 | 1 << 32], libc::ENOENT),
        ("setsockopt", [u64::MAX, TCP, libc::TCP_NODELAY as u64], libc::EBADF),
        ("setsockopt", [u64::MAX, libc::SOL_SOCKET as u64, libc::TCP_ULP as u64], libc::EBADF),
        ("sendmsg", [u64::MAX, 0, FAST_OPEN], libc::EOPNOTSUPP),
        ("sendmsg", [u64::MAX, 0, FAST_OPEN | libc::MSG_NOSIGNAL as u64], libc::EOPNOTSUPP),
        ("sendmsg", [u64::MAX, 0, libc::MSG_NOSIGNAL as u64], libc::EBADF),
        ("io_uring_setup", INVALID_ARGUMENTS, libc::ENOSYS),
    ]);
    all
}

/// Evaluates the rules directly, because the helper process that other tests use cannot set the fourth argument on its
/// own.
#[test]
fn all_send_calls_refuse_tcp_fast_open() {
    let flag = libc::MSG_FASTOPEN as u64;
    for (name, arguments) in [
        ("sendto", [3, 0, 0, flag, 0, 0]),
        ("sendmmsg", [3, 0, 0, flag, 0, 0]),
        ("sendmsg", [3, 0, flag, 0, 0, 0]),
    ] {
        let number = syscalls::number(name).unwrap();
        let unsupported = Verdict::Errno(Errno::OPNOTSUPP).action(FatalAction::Notify);
        let allowed = Verdict::Allow.action(FatalAction::Notify);
        for network in [NetworkAccess::Connections { udp: true }, NetworkAccess::Connections { udp: false }] {
            for rules in [default(network), strict(network)] {
                assert_eq!(expected(&rules, number, arguments), unsupported, "{name}");
                assert_eq!(expected(&rules, number, [3, 0, 0, 0, 0, 0]), allowed, "{name}");
            }
        }
        let rules = default(NetworkAccess::All);
        assert_eq!(expected(&rules, number, arguments), allowed, "{name}");
    }
}

#[test]
fn denied_system_calls_fail_with_expected_errors() {
    let terminal = [
        ("ioctl", [0, libc::TIOCSTI, 0], libc::EPERM),
        ("ioctl", [0, libc::TIOCLINUX, 0], libc::EPERM),
        // The kernel ignores the upper half of a request, so a nonzero upper half must not bypass the rule.
        ("ioctl", [0, libc::TIOCSTI | 1 << 32, 0], libc::EPERM),
    ];
    let outgoing = |udp| NetworkAccess::Connections { udp };
    for (network, sockets) in [
        (NetworkAccess::None, without_network()),
        (NetworkAccess::All, with_network()),
        (outgoing(false), with_connections(false)),
        (outgoing(true), with_connections(true)),
    ] {
        let common: Vec<_> = denied_by_both().into_iter().chain(sockets).collect();
        let filter = default(network).compile(FatalAction::Notify);
        assert_outcomes(filter, &[&common[..], &terminal].concat());
        let filter = strict(network).compile(FatalAction::Notify);
        let listed = [
            ("ioctl", [0, libc::TIOCSTI, 0], libc::ENOTTY),
            ("prctl", [0x7fff_0000, 0, 0], libc::EINVAL),
            ("setuid", INVALID_ARGUMENTS, libc::EPERM),
            (
                "connect",
                INVALID_ARGUMENTS,
                if network == NetworkAccess::None { libc::EPERM } else { libc::EBADF },
            ),
            ("msgget", INVALID_ARGUMENTS, NOTIFIED),
            ("modify_ldt", INVALID_ARGUMENTS, NOTIFIED),
        ];
        assert_outcomes(filter, &[&common[..], &listed].concat());
    }
}

/// Tests the filter that denies truncating files. The filter is needed on kernels whose version of Landlock cannot deny
/// it.
#[test]
fn seccomp_denies_truncation_of_read_only_files() {
    let (cut, here) = (libc::O_TRUNC as u64, libc::AT_FDCWD as u64);
    let expectations = [
        ("truncate", [0, 0, 0], libc::EPERM),
        ("ftruncate", [u64::MAX, 0, 0], libc::EBADF),
        ("open", [0, cut, 0], libc::EPERM),
        ("open", [0, cut | libc::O_ACCMODE as u64, 0], libc::EPERM),
        ("open", [0, cut | libc::O_WRONLY as u64, 0], libc::EFAULT),
        ("open", [0, libc::O_RDONLY as u64, 0], libc::EFAULT),
        ("openat", [here, 0, cut], libc::EPERM),
        ("openat", [here, 0, cut | libc::O_RDWR as u64], libc::EFAULT),
        ("creat", [0, 0o600, 0], libc::EFAULT),
    ];
    for rules in [default(NetworkAccess::None), strict(NetworkAccess::None)] {
        assert_outcomes(deny_truncation(rules).compile(FatalAction::Notify), &expectations);
    }
}

#[test]
fn seal_denies_only_programs_and_sockets() {
    let names =
        [("execve", libc::EPERM), ("socketpair", libc::EAFNOSUPPORT), ("bpf", NOTIFIED), ("getppid", 0)];
    let calls: Vec<_> = names.iter().filter_map(|(name, _)| call(name, INVALID_ARGUMENTS)).collect();
    let mut command = helper_command(&calls);
    command.env(SEAL, "");
    let finished = Confined::start(command, strict(NetworkAccess::None).compile(FatalAction::Notify))
        .finish(Errno::XDEV);
    assert_eq!(finished.outcomes(), names.map(|(_, errno)| errno), "{finished:?}");
    // The listener of the first filter is notified even after the second filter was installed.
    assert_eq!(finished.named, ["bpf"], "{finished:?}");
}

/// Tests that the rule compares all flags of `clone` at once.
#[test]
fn only_templates_can_fork_siblings() {
    let Some(clone) = syscalls::number("clone") else { panic!("there is no clone") };
    let sibling = (libc::CLONE_PARENT | libc::SIGCHLD) as u64;
    let refused = Verdict::Errno(Errno::PERM).action(FatalAction::Notify);
    let allowed = Verdict::Allow.action(FatalAction::Notify);
    for rules in [default(NetworkAccess::None), default(NetworkAccess::All), strict(NetworkAccess::None)] {
        let template = allow_siblings(rules.clone());
        let of = |rules: &Rules, flags: i32| expected(rules, clone, [flags as u64, 0, 0, 0, 0, 0]);
        assert_eq!(expected(&template, clone, [sibling, 0, 0, 0, 0, 0]), allowed);
        let worker = deny_siblings(Rules::new(Verdict::Allow));
        assert_eq!(expected(&worker, clone, [sibling, 0, 0, 0, 0, 0]), refused);
        for more in
            [libc::CLONE_VM, libc::CLONE_FILES, libc::CLONE_NEWUSER, libc::CLONE_NEWPID, libc::CLONE_PTRACE]
        {
            let flags = libc::CLONE_PARENT | libc::SIGCHLD | more;
            assert_eq!(of(&template, flags), refused, "{more:x}");
        }
        assert_eq!(of(&template, libc::CLONE_PARENT), refused);
        assert_eq!(of(&template, libc::CLONE_PARENT | libc::SIGKILL), refused);
        assert_eq!(of(&template, libc::SIGCHLD), allowed);
        assert_eq!(of(&worker, libc::SIGCHLD), allowed);
        let Some(clone3) = syscalls::number("clone3") else { continue };
        let missing = Verdict::Errno(Errno::NOSYS).action(FatalAction::Notify);
        assert_eq!(expected(&template, clone3, [0; 6]), missing);
    }
    // The filter must be short, because it is installed for each worker, and the kernel takes longer to check a longer
    // filter.
    let length = deny_siblings(allow_all()).compile(FatalAction::Kill).program.len();
    assert!(length <= 20, "{length} instructions");
}

#[test]
fn fatal_system_call_is_reported_with_arguments() {
    let command = helper_command(&[call("bpf", [77, 0, 1]).unwrap()]);
    let mut confined = Confined::start(command, default(NetworkAccess::None).compile(FatalAction::Notify));
    let listener = confined.listener.as_ref().unwrap();
    let start = Instant::now();
    let notification = loop {
        assert!(start.elapsed() < PATIENCE, "the process has not made the call");
        if let Some(notification) = next_notification(listener).expect("the process has exited") {
            break notification;
        }
    };
    assert_eq!(syscalls::name(notification.number), Some("bpf"));
    assert_eq!(notification.arguments[..3], [77, 0, 1]);
    // The thread is not the main thread, because the test harness runs each test in a separate thread.
    assert!(
        std::path::Path::new(&format!("/proc/{}/task/{}", confined.child.id(), notification.thread)).exists()
    );
    assert_eq!(confined.child.try_wait().unwrap(), None);
    confined.child.kill().unwrap();
    confined.child.wait().unwrap();
    // Responding to a call that no longer waits is not an error.
    respond_with_error(confined.listener.as_ref().unwrap(), notification.id, Errno::PERM).unwrap();
}

#[test]
fn fatal_system_call_without_listener_kills_process() {
    let command = helper_command(&[
        call("getppid", INVALID_ARGUMENTS).unwrap(),
        call("bpf", INVALID_ARGUMENTS).unwrap(),
    ]);
    let finished =
        Confined::start(command, default(NetworkAccess::None).compile(FatalAction::Kill)).finish(Errno::XDEV);
    assert_eq!(finished.outcomes(), [0]);
    assert_eq!(finished.status.signal(), Some(libc::SIGSYS), "{finished:?}");
}

#[cfg(target_arch = "x86_64")]
#[test]
fn calls_through_32_bit_and_x32_abi_kill_the_process() {
    let start = |number| {
        let command = helper_command(&[(number, [0; 3])]);
        Confined::start(command, default(NetworkAccess::All).compile(FatalAction::Notify)).finish(Errno::XDEV)
    };
    let finished = start(u64::from(X32_FIRST) + libc::SYS_getpid as u64);
    assert_eq!(finished.status.signal(), Some(libc::SIGSYS), "{finished:?}");
    let finished = start(INT_80);
    if finished.status.signal() == Some(libc::SIGSEGV) {
        eprintln!("NOT RUN: this kernel does not support 32-bit system calls");
        return;
    }
    assert_eq!(finished.status.signal(), Some(libc::SIGSYS), "{finished:?}");
}

#[test]
fn configured_system_calls_override_profile() {
    let rules = default(NetworkAccess::None).with_overrides(&["socket", "setns"], &["getppid"]).unwrap();
    let expectations = [
        ("socket", [INET, STREAM, 0], 0),
        ("setns", INVALID_ARGUMENTS, libc::EBADF),
        ("getppid", [0; 3], NOTIFIED),
        ("mount", INVALID_ARGUMENTS, libc::EPERM),
    ];
    assert_outcomes(rules.compile(FatalAction::Notify), &expectations);
}

// ---- Ordinary programs.

const SHELL: &str = r#"
    set -e
    directory=$(mktemp -d); trap 'rm -r "$directory"' EXIT
    seq 1 2000 | sort -rn | (head -1; cat > /dev/null) > "$directory/a"; cp "$directory/a" "$directory/b"
    test "$(cat "$directory/b")" = 2000; sleep 0.01 & wait; ls -l "$directory" > /dev/null
    id > /dev/null; date > /dev/null; echo unharmed
"#;

const PYTHON: &str = r#"
import asyncio, ctypes, hashlib, json, multiprocessing, os, resource, shutil, socket, sqlite3, ssl
import subprocess, sys, tempfile, threading, time, concurrent.futures, getpass, pwd, platform, mmap
threads = [threading.Thread(target=time.sleep, args=(0.001,)) for _ in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
assert subprocess.run(["sh", "-c", "echo a | tr a b"], capture_output=True).stdout == b"b\n"
assert subprocess.run(["true"], close_fds=False).returncode == 0
ssl.create_default_context(); hashlib.sha256(b"x").hexdigest()
async def main():
    process = await asyncio.create_subprocess_exec("cat", stdin=-1, stdout=-1)
    assert (await process.communicate(b"x"))[0] == b"x"
    await asyncio.to_thread(time.sleep, 0.001)
asyncio.run(main())
with tempfile.TemporaryDirectory() as d:
    open(d + "/a", "w").write("x"); shutil.copy2(d + "/a", d + "/b"); shutil.copytree(d, d + "/c")
    c = sqlite3.connect(d + "/db"); c.execute("create table t(x)"); c.commit(); c.close()
with concurrent.futures.ThreadPoolExecutor(4) as pool: assert list(pool.map(abs, [-1, 2])) == [1, 2]
a, b = multiprocessing.Pipe()
p = multiprocessing.Process(target=b.send, args=(5,)); p.start(); assert a.recv() == 5; p.join()
mmap.mmap(-1, 4096).close(); pwd.getpwuid(os.getuid()); platform.platform(); resource.getrusage(0)
socket.socketpair(); sys.stdout.isatty()
print("unharmed")
"#;

const NODE: &str = r#"
const { Worker } = require('worker_threads');
const { execFileSync, spawn } = require('child_process');
const fs = require('fs'), os = require('os'), crypto = require('crypto'), zlib = require('zlib');
const worker = new Worker("require('worker_threads').parentPort.postMessage(6 * 7)", { eval: true });
worker.on('message', async (answer) => {
  if (answer !== 42) process.exit(2);
  if (execFileSync('echo', ['a']).toString() !== 'a\n') process.exit(3);
  const child = spawn('cat'); child.stdin.end('b');
  let text = ''; for await (const chunk of child.stdout) text += chunk;
  if (text !== 'b') process.exit(4);
  const directory = fs.mkdtempSync(os.tmpdir() + '/x'); fs.writeFileSync(directory + '/a', 'x');
  await fs.promises.copyFile(directory + '/a', directory + '/b'); fs.rmSync(directory, { recursive: true });
  await new Promise((done) => crypto.pbkdf2('a', 'b', 10, 10, 'sha256', done));
  zlib.gzipSync('x'); os.cpus(); os.userInfo(); os.totalmem(); fetch;
  console.log('unharmed');
});
"#;

/// Runs a program under a filter that is compiled from these rules. Returns `None` if the program is not installed.
fn run(program: &str, arguments: &[&str], rules: &Rules) -> Option<Finished> {
    let mut command = Command::new(program);
    command.args(arguments);
    if Command::new("which").arg(program).stdout(Stdio::null()).status().is_ok_and(|found| !found.success()) {
        eprintln!("NOT RUN: {program} is not installed");
        return None;
    }
    Some(Confined::start(command, rules.compile(FatalAction::Notify)).finish(Errno::NOSYS))
}

fn assert_succeeds(program: &str, arguments: &[&str], rules: &Rules) {
    if let Some(finished) = run(program, arguments, rules) {
        assert!(finished.status.success() && finished.named.is_empty(), "{program}: {finished:#?}");
        assert!(finished.stdout.contains("unharmed"), "{program}: {finished:#?}");
    }
}

#[test]
fn ordinary_programs_work_under_each_seccomp_profile() {
    for (profile, rules) in [
        ("default", default(NetworkAccess::None)),
        ("default with the network", default(NetworkAccess::All)),
        ("strict", strict(NetworkAccess::None)),
        ("strict with the network", strict(NetworkAccess::All)),
        ("default with TCP", default(NetworkAccess::Connections { udp: false })),
        ("strict with TCP", strict(NetworkAccess::Connections { udp: false })),
    ] {
        eprintln!("under {profile}");
        assert_succeeds("sh", &["-c", SHELL], &rules);
        assert_succeeds("python3", &["-c", PYTHON], &rules);
        assert_succeeds("node", &["-e", NODE], &rules);
    }
}

#[test]
fn java_starts_under_default_seccomp_profile() {
    let Some(finished) = run("java", &["-Xmx64m", "-version"], &default(NetworkAccess::None)) else { return };
    assert!(finished.status.success() && finished.named.is_empty(), "{finished:#?}");
    assert!(finished.stderr.contains("version"), "{finished:#?}");
}

#[test]
fn network_profile_allows_loopback_connections() {
    const TALK: &str = r#"
import socket
listener = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listener.getsockname()); server, _ = listener.accept()
client.send(b"x"); assert server.recv(1) == b"x"
socket.getaddrinfo("localhost", 80); socket.if_nameindex()
print("unharmed")
"#;
    for rules in [default(NetworkAccess::All), strict(NetworkAccess::All)] {
        assert_succeeds("python3", &["-c", TALK], &rules);
    }
}
