//! Single bits of arguments that no worker may pass, even if its profile allows the call.

use rustix::io::Errno;

use super::assembler::Condition::{HasAny, Is};
use super::{Check, Rule, Rules, Verdict};

/// Mode bits that give a program the user or group of its file. A user who runs such a program outside of the
/// sandbox would get the rights of the worker's user, which can be root.
const SET_ID_BITS: u32 = libc::S_ISUID | libc::S_ISGID;

/// Calls that take a mode, with the index of the argument.
const CALLS_WITH_MODE: [(u8, &str); 2] =
    [(1, "chmod creat fchmod mkdir mknod"), (2, "fchmodat fchmodat2 mkdirat mknodat")];

/// Calls that open a file, with the indexes of the flags and the mode. The kernel uses the mode only if the
/// flags create a file.
const OPEN_CALLS: [(u8, u8, &str); 2] = [(1, 2, "open"), (2, 3, "openat")];

/// Flags that create a file. `O_TMPFILE` consists of a separate bit and `O_DIRECTORY`.
const CREATE_FLAGS: u32 = (libc::O_CREAT | libc::O_TMPFILE & !libc::O_DIRECTORY) as u32;

/// Calls that send, with the index of the flags.
const SEND_CALLS: [(u8, &str); 2] = [(2, "sendmsg"), (3, "sendto sendmmsg")];

/// Restricts all calls that could create a program with another user's rights, or send urgent data. Urgent
/// data is a byte outside of the stream, which readers of Unix sockets do not expect.
///
/// `openat2` can create such programs too, and takes the mode from memory, which a filter cannot see. So
/// `openat2` is reported as missing.
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

/// Denies truncating a file that may only be read. For kernels whose Landlock does not control this.
pub(crate) fn deny_truncation(mut rules: Rules) -> Rules {
    const TRUNCATE: u32 = libc::O_TRUNC as u32;
    /// Access mode that allows neither reading nor writing, but requires the rights for both.
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

/// Applies one rule if the argument has any of these bits, and another one otherwise.
fn if_any_bit(argument: u8, bits: u32, with: Rule, otherwise: Rule) -> Rule {
    Check { argument, mask: u32::MAX, cases: vec![(HasAny(bits), with)], otherwise }.into()
}
