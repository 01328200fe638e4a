//! Single bits of arguments that no worker may pass, whatever else its profile says of the call.

use rustix::io::Errno;

use super::assembler::Condition::{HasAny, Is};
use super::{Check, Rule, Rules, Verdict};

/// The bits of a mode that give a program its file's user or group. A user who runs it outside of the sandbox gets
/// the worker's rights, and those of root where that is the worker's user.
const SET_ID: u32 = libc::S_ISUID | libc::S_ISGID;

/// Calls that take a mode, by the number of the argument.
const MODES: [(u8, &str); 2] =
    [(1, "chmod creat fchmod mkdir mknod"), (2, "fchmodat fchmodat2 mkdirat mknodat")];

/// Calls that open a file: the arguments of the flags and of the mode. The kernel looks at the mode only where
/// the flags make a file.
const OPENING: [(u8, u8, &str); 2] = [(1, 2, "open"), (2, 3, "openat")];

/// Flags that make a file. `O_TMPFILE` is a bit of its own and that of folders.
const MAKING: u32 = (libc::O_CREAT | libc::O_TMPFILE & !libc::O_DIRECTORY) as u32;

/// Calls that send, by the number of the argument with the flags.
const SENDING: [(u8, &str); 2] = [(2, "sendmsg"), (3, "sendto sendmmsg")];

/// Narrows the rules of all calls that could make a program of another user's rights, or urgent data: that is
/// a byte beside the stream, which readers of Unix sockets are not prepared for.
///
/// `openat2` can do the first as well, and its mode is in memory, where a filter does not see it: it is among the
/// calls that do not exist.
pub(super) fn refuse(rules: &mut Rules) {
    let refused = Verdict::Errno(Errno::PERM);
    for (argument, names) in MODES {
        rules.narrow(names, |rule| unless_any(argument, SET_ID, refused.into(), rule));
    }
    for (flags, mode, names) in OPENING {
        rules.narrow(names, |rule| {
            let made = unless_any(mode, SET_ID, refused.into(), rule.clone());
            unless_any(flags, MAKING, made, rule)
        });
    }
    for (flags, names) in SENDING {
        let unsupported = Verdict::Errno(Errno::OPNOTSUPP);
        rules.narrow(names, |rule| unless_any(flags, libc::MSG_OOB as u32, unsupported.into(), rule));
    }
}

/// These rules, without what cuts a file that may only be read: for where Landlock has no say in that.
pub(crate) fn without_truncation(mut rules: Rules) -> Rules {
    const TRUNCATE: u32 = libc::O_TRUNC as u32;
    /// As good as for reading and writing, but neither.
    const FOR_NOTHING: u32 = libc::O_ACCMODE as u32;
    let refused = || Rule::from(Verdict::Errno(Errno::PERM));
    rules.narrow("truncate", |_| refused());
    for (argument, _, names) in OPENING {
        rules.narrow(names, |otherwise| {
            let cases = vec![(Is(TRUNCATE), refused()), (Is(TRUNCATE | FOR_NOTHING), refused())];
            Check { argument, mask: TRUNCATE | FOR_NOTHING, cases, otherwise }.into()
        });
    }
    rules
}

/// One rule where the argument has any of these bits, another one else.
fn unless_any(argument: u8, bits: u32, with: Rule, otherwise: Rule) -> Rule {
    Check { argument, mask: u32::MAX, cases: vec![(HasAny(bits), with)], otherwise }.into()
}
