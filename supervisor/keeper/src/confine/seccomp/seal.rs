//! Compiles the seal, a stricter filter that a worker installs when it is ready for its first job. The supervisor sends
//! the compiled seal over the worker's link. The worker's library installs it, and the keeper does not.

use bulkhead_linux::syscalls;

use super::{FatalAction, allow_all, deny_siblings, sealed};

/// A stricter filter that a worker installs itself when it is ready for its first job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seal<'a> {
    /// True if the worker has [`Seccomp::AllowList`](crate::Seccomp::AllowList). The seal then also denies executing
    /// programs and creating sockets.
    pub is_strict: bool,
    /// True if the worker has network access and can therefore create sockets.
    pub network: bool,
    /// Names of the system calls that remain allowed.
    pub allow: &'a [&'a str],
    /// True if the worker was forked by a template. The seal then denies forking siblings, because only the template
    /// is allowed to do so.
    pub is_forked: bool,
}

/// Compiles a seal into a filter program for the kernel.
pub fn seal(seal: &Seal<'_>) -> Vec<u8> {
    let Seal { is_strict, network, allow, is_forked } = *seal;
    let known: Vec<&str> = allow.iter().copied().filter(|name| syscalls::is_known(name)).collect();
    // `sealed` fails only for unknown names, which were filtered out.
    let strict = is_strict.then(|| sealed(network, &known).ok()).flatten();
    let rules = strict.unwrap_or_else(allow_all);
    let rules = if is_forked { deny_siblings(rules) } else { rules };
    rules.compile(FatalAction::Kill).bytes()
}
