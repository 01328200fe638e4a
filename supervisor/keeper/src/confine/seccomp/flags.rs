//! Adds seccomp rules that deny calls because of single bits in an argument, such as set-user-ID modes, urgent data and
//! truncation. `profiles` and `spawn/confinement.rs` add these rules to a profile. The profile's other rules for these
//! calls continue to apply.

use rustix::io::Errno;

use super::assembler::Condition::{HasAny, Is};
use super::{Check, Rule, Rules, Verdict};

/// Mode bits that make a program run as the owner or group of its file. If a worker created such a program, anyone
/// could run it outside the sandbox with the rights of the worker's user, which can be root.
const SET_ID_BITS: u32 = libc::S_ISUID | libc::S_ISGID;

/// System calls that take a file mode, grouped by the index of the mode argument.
const CALLS_WITH_MODE: [(u8, &str); 2] =
    [(1, "chmod creat fchmod mkdir mknod"), (2, "fchmodat fchmodat2 mkdirat mknodat")];

/// System calls that open a file, each with the indexes of the flags argument and the mode argument. The kernel uses
/// the mode only if the flags create a file.
const OPEN_CALLS: [(u8, u8, &str); 2] = [(1, 2, "open"), (2, 3, "openat")];

/// Flags with which a call creates a file. Excludes `O_DIRECTORY`, which is part of `O_TMPFILE`.
const CREATE_FLAGS: u32 = (libc::O_CREAT | libc::O_TMPFILE & !libc::O_DIRECTORY) as u32;

/// System calls that send data on a socket, grouped by the index of the flags argument.
const SEND_CALLS: [(u8, &str); 2] = [(2, "sendmsg"), (3, "sendto sendmmsg")];

/// Restricts all calls that could create a program with another user's rights, or could send urgent data. Urgent data
/// is a byte outside the stream, which programs that read from Unix sockets do not expect.
///
/// `openat2` could create such programs as well, but takes the mode from memory, which a filter cannot see.
/// So `openat2` fails as if the kernel did not have it.
pub(super) fn restrict(rules: &mut Rules) {
    let refused = Verdict::Errno(Errno::PERM);
    for (argument, names) in CALLS_WITH_MODE {
        rules.narrow(names, |rule| if_any_bit(argument, SET_ID_BITS, refused.into(), rule));
    }
    for (flags, mode, names) in OPEN_CALLS {
        rules.narrow(names, |rule| {
            let made = if_any_bit(mode, SET_ID_BITS, refused.into(), rule.clone());
            if_any_bit(flags, CREATE_FLAGS, made, rule)
        });
    }
    for (flags, names) in SEND_CALLS {
        let unsupported = Verdict::Errno(Errno::OPNOTSUPP);
        rules.narrow(names, |rule| if_any_bit(flags, libc::MSG_OOB as u32, unsupported.into(), rule));
    }
}

/// Denies TCP fast open with `MSG_FASTOPEN`, which connects without a call to `connect`. The call fails as it does on
/// a kernel where fast open is disabled.
pub(super) fn deny_fast_open(rules: &mut Rules) {
    for (flags, names) in SEND_CALLS {
        let unsupported = Verdict::Errno(Errno::OPNOTSUPP);
        rules.narrow(names, |rule| if_any_bit(flags, libc::MSG_FASTOPEN as u32, unsupported.into(), rule));
    }
}

/// Denies `truncate`, and `O_TRUNC` without write access. Needed on kernels whose Landlock version does not control
/// truncation, because a worker could otherwise truncate files that it can only read.
pub(crate) fn deny_truncation(mut rules: Rules) -> Rules {
    const TRUNCATE: u32 = libc::O_TRUNC as u32;
    /// File access mode 3. The kernel checks the permissions to read and to write, but the file cannot be read or
    /// written through the descriptor.
    const NO_ACCESS: u32 = libc::O_ACCMODE as u32;
    let refused = || Rule::from(Verdict::Errno(Errno::PERM));
    rules.narrow("truncate", |_| refused());
    for (argument, _, names) in OPEN_CALLS {
        rules.narrow(names, |otherwise| {
            let cases = vec![(Is(TRUNCATE), refused()), (Is(TRUNCATE | NO_ACCESS), refused())];
            Check { argument, mask: TRUNCATE | NO_ACCESS, cases, otherwise }.into()
        });
    }
    rules
}

/// Returns a rule that applies `with` if the argument has any of these bits, and `otherwise` if not.
fn if_any_bit(argument: u8, bits: u32, with: Rule, otherwise: Rule) -> Rule {
    Check { argument, mask: u32::MAX, cases: vec![(HasAny(bits), with)], otherwise }.into()
}
