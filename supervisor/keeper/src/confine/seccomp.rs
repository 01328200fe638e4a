//! Seccomp filters, which the kernel runs on each system call of a worker to decide whether to execute the
//! call.
//!
//! - [`Rules`] determine the result of each call; `profiles` contains predefined rules.
//! - [`Filter`] is the BPF program compiled from the rules. It is compiled before the fork and installed by
//!   the child.
//! - `flags`: single bits of arguments that no profile allows.
//! - `assembler`: the required instructions of classic BPF.
//! - `notification`: reports a fatal call to the keeper.
//! - `seal`: the stricter filter that a worker installs before its first job.
//!
//! A filter sees the number and the arguments of a system call, but never the data that a pointer refers to.
//! Rules compare only the lower half of an argument, because the kernel ignores the upper half of the
//! compared arguments. Pointers can only be compared with null.
#![expect(unsafe_code, reason = "seccomp(2) and the probing fork have no safe wrapper")]

mod assembler;
mod flags;
mod notification;
mod profiles;
mod seal;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::os::fd::RawFd;

use libc::sock_filter;
use rustix::io::Errno;

use self::assembler::{Block, Condition};
use bulkhead_linux::errno;
use bulkhead_linux::syscalls;

pub(crate) use self::flags::deny_truncation;
pub(crate) use self::notification::{
    ListenerState, Notification, check_pending, poll_listener, receive, respond_with_error,
};
pub(crate) use self::profiles::{
    allow_all, allow_siblings, default, deny_siblings, deny_unix_sockets, sealed, strict,
};
pub use self::seal::{Seal, seal};

/// Value of `AUDIT_ARCH` for this architecture. Consists of the ELF machine number and the flags for 64-bit and
/// little-endian.
#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: u32 = 62 | 0xc000_0000;
#[cfg(target_arch = "aarch64")]
const ARCHITECTURE: u32 = 183 | 0xc000_0000;

#[cfg(target_endian = "big")]
compile_error!("the lower half of an argument would be the second one");

/// First system call number of the x32 ABI. Calls with these numbers appear under the 64-bit architecture,
/// and would bypass the rules for the corresponding calls.
const X32_FIRST: u32 = 0x4000_0000;

/// The filter's decision on a system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The kernel executes the call.
    Allow,
    /// The call fails with this error, and has no effect.
    Errno(Errno),
    /// The call returns zero, and has no effect.
    Ignore,
    /// The system call causes the worker to be killed in the way that [`FatalAction`] specifies. Used for calls that
    /// only hostile programs make.
    Fatal,
}

/// Specifies who kills a worker that has made a fatal system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FatalAction {
    /// The kernel kills the worker. The call itself is not reported, and can be recognised only by the worker's death
    /// from SIGSYS.
    Kill,
    /// The call blocks until the keeper has received a notification and killed the worker. If the keeper made the
    /// call fail instead, the worker would survive.
    Notify,
}

/// Rule by which the filter decides on a system call. Can depend on the arguments of the call.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Rule {
    Always(Verdict),
    Check(Box<Check>),
    Pointer(Box<Pointer>),
}

/// A rule that depends on whether a pointer argument is null.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Pointer {
    argument: u8,
    null: Rule,
    otherwise: Rule,
}

/// A rule that depends on the lower half of an argument. After masking with `mask`, the first matching case determines
/// the rule to apply.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Check {
    argument: u8,
    mask: u32,
    cases: Vec<(Condition, Rule)>,
    otherwise: Rule,
}

impl From<Verdict> for Rule {
    fn from(verdict: Verdict) -> Self {
        Self::Always(verdict)
    }
}

impl From<Check> for Rule {
    fn from(check: Check) -> Self {
        Self::Check(Box::new(check))
    }
}

impl From<Pointer> for Rule {
    fn from(pointer: Pointer) -> Self {
        Self::Pointer(Box::new(pointer))
    }
}

impl Rule {
    fn assemble(&self, fatal_action: FatalAction) -> Block {
        match self {
            Self::Always(verdict) => vec![assembler::return_action(verdict.action(fatal_action))],
            Self::Check(check) => {
                let Check { argument, mask, cases, otherwise } = &**check;
                let tests =
                    cases.iter().rev().fold(otherwise.assemble(fatal_action), |rest, (condition, rule)| {
                        assembler::branch(*condition, rule.assemble(fatal_action), rest)
                    });
                let mut block = assembler::load_argument(*argument, *mask);
                block.extend(tests);
                block
            }
            Self::Pointer(pointer) => {
                let Pointer { argument, null, otherwise } = &**pointer;
                assembler::branch_on_null(
                    *argument,
                    null.assemble(fatal_action),
                    otherwise.assemble(fatal_action),
                )
            }
        }
    }
}

impl Verdict {
    fn action(self, fatal_action: FatalAction) -> u32 {
        match (self, fatal_action) {
            (Self::Allow, _) => libc::SECCOMP_RET_ALLOW,
            (Self::Errno(errno), _) => libc::SECCOMP_RET_ERRNO | errno.raw_os_error() as u32,
            (Self::Ignore, _) => libc::SECCOMP_RET_ERRNO,
            (Self::Fatal, FatalAction::Kill) => libc::SECCOMP_RET_KILL_PROCESS,
            (Self::Fatal, FatalAction::Notify) => libc::SECCOMP_RET_USER_NOTIF,
        }
    }
}

/// Rules for all system calls. A call that is newer than the table in `syscalls` fails with ENOSYS, because
/// its effects have not been reviewed. Programs can handle this error, because older kernels return it.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    calls: BTreeMap<u32, Rule>,
    otherwise: Rule,
}

impl Rules {
    fn new(otherwise: Verdict) -> Self {
        Self { calls: BTreeMap::new(), otherwise: otherwise.into() }
    }

    /// Sets the rule for the system calls in `names`, which are separated by spaces. Skips names that this
    /// architecture lacks.
    fn set(&mut self, names: &str, rule: impl Into<Rule>) {
        let rule = rule.into();
        for name in names.split_ascii_whitespace() {
            debug_assert!(syscalls::is_known(name), "unknown system call {name}");
            if let Some(number) = syscalls::number(name) {
                self.calls.insert(number, rule.clone());
            }
        }
    }

    /// Replaces the rule of each system call in `names`. `narrower` receives the current rule and returns the new one.
    fn narrow(&mut self, names: &str, narrower: impl Fn(Rule) -> Rule) {
        for name in names.split_ascii_whitespace() {
            debug_assert!(syscalls::is_known(name), "unknown system call {name}");
            if let Some(number) = syscalls::number(name) {
                let rule = self.rule(number).clone();
                self.calls.insert(number, narrower(rule));
            }
        }
    }

    /// Allows the calls in `allow` with any arguments, and makes the calls in `deny` fatal. If no
    /// architecture has a call with one of these names, returns that name as the error.
    pub(crate) fn with_overrides<'n>(mut self, allow: &[&'n str], deny: &[&'n str]) -> Result<Self, &'n str> {
        if let Some(&unknown) = allow.iter().chain(deny).find(|name| !syscalls::is_known(name)) {
            return Err(unknown);
        }
        for name in allow {
            self.set(name, Verdict::Allow);
        }
        for name in deny {
            self.set(name, Verdict::Fatal);
        }
        Ok(self)
    }

    /// Compiles the rules. The number of comparisons per call is logarithmic in the number of rules. The
    /// kernel caches the result for calls that are allowed regardless of their arguments.
    pub(crate) fn compile(&self, fatal_action: FatalAction) -> Filter {
        let kill = libc::SECCOMP_RET_KILL_PROCESS;
        let mut program = vec![assembler::load_architecture()];
        program.extend(assembler::return_unless(Condition::Is(ARCHITECTURE), kill));
        program.push(assembler::load_number());
        if cfg!(target_arch = "x86_64") {
            program.extend(assembler::return_if(Condition::AtLeast(X32_FIRST), kill));
        }
        program.extend(search(&self.ranges(), fatal_action));
        Filter { program, fatal_action }
    }

    /// Returns the ranges of consecutive system call numbers that have the same rule, in ascending order. Each range
    /// is represented by its first number.
    fn ranges(&self) -> Vec<(u32, &Rule)> {
        const UNKNOWN_CALL: Rule = Rule::Always(Verdict::Errno(Errno::NOSYS));
        let known = (0..=syscalls::NUMBER_MAX).map(|number| (number, self.rule(number)));
        let mut ranges: Vec<_> = known.chain([(syscalls::NUMBER_MAX + 1, &UNKNOWN_CALL)]).collect();
        ranges.dedup_by_key(|(_, rule)| *rule);
        ranges
    }

    fn rule(&self, number: u32) -> &Rule {
        self.calls.get(&number).unwrap_or(&self.otherwise)
    }
}

/// Returns instructions that find the range to which the loaded system call number belongs, and then apply the rule of
/// this range.
fn search(ranges: &[(u32, &Rule)], fatal_action: FatalAction) -> Block {
    if let [(_, rule)] = ranges {
        return rule.assemble(fatal_action);
    }
    let (low, high) = ranges.split_at(ranges.len() / 2);
    let (first, _) = high[0];
    assembler::branch(Condition::AtLeast(first), search(high, fatal_action), search(low, fatal_action))
}

/// A BPF program that the kernel runs on each system call.
#[derive(Clone)]
pub(crate) struct Filter {
    program: Vec<sock_filter>,
    fatal_action: FatalAction,
}

impl Filter {
    /// Returns the instructions in the kernel's binary format, for a worker that installs the filter itself.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let instruction = |&sock_filter { code, jt, jf, k }: &sock_filter| {
            let [low, high] = code.to_ne_bytes();
            let [a, b, c, d] = k.to_ne_bytes();
            [low, high, jt, jf, a, b, c, d]
        };
        self.program.iter().flat_map(instruction).collect()
    }

    /// Enforces the filter on the calling thread, and on everything that it starts or executes. This cannot be undone.
    /// Safe in a forked child, because it makes only raw system calls and allocates nothing. The thread must have set
    /// `no_new_privs`.
    ///
    /// If fatal calls are reported, returns the listener as a close-on-exec descriptor. The child must send
    /// it to the keeper; otherwise, no process responds to the notifications. Installing a second listener in
    /// the same process fails with EBUSY.
    pub(crate) fn install(&self) -> Result<Option<RawFd>, Errno> {
        let flags: &[libc::c_ulong] = match self.fatal_action {
            FatalAction::Kill => &[0],
            // With `WAIT_KILLABLE_RECV`, only fatal signals interrupt a call after its notification was received.
            // Otherwise, the keeper could miss calls by a process that constantly receives signals.
            FatalAction::Notify => &[
                libc::SECCOMP_FILTER_FLAG_NEW_LISTENER | libc::SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV,
                libc::SECCOMP_FILTER_FLAG_NEW_LISTENER, // Before Linux 5.19.
            ],
        };
        // The length fits into 16 bits, because filters are far shorter than 65,536 instructions.
        let program =
            libc::sock_fprog { len: self.program.len() as u16, filter: self.program.as_ptr().cast_mut() };
        let mut refused = Errno::INVAL;
        for flags in flags {
            // SAFETY: the pointer refers to a local structure, which describes a program of the given length. The
            // kernel copies both and writes to neither.
            let result = unsafe {
                libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, *flags, &raw const program)
            };
            match (result, self.fatal_action) {
                (-1, _) => refused = errno::last(),
                (_, FatalAction::Kill) => return Ok(None),
                (listener, FatalAction::Notify) => return Ok(Some(listener as RawFd)),
            }
            if refused != Errno::INVAL {
                break;
            }
        }
        Err(refused)
    }
}

/// Returns a filter for testing whether filters take effect. Under this filter, a system call fails that would
/// otherwise always succeed; see [`is_test_filter_active`].
pub(crate) fn test_filter(fatal_action: FatalAction) -> Filter {
    let mut rules = Rules::new(Verdict::Allow);
    rules.set("getppid", Verdict::Errno(Errno::NOSYS));
    rules.compile(fatal_action)
}

/// Returns true if the filter from [`test_filter`] is in effect.
pub(crate) fn is_test_filter_active() -> bool {
    // SAFETY: the call takes no arguments.
    unsafe { libc::syscall(libc::SYS_getppid) == -1 }
}
