//! Names of signals, and the default action of SIGCHLD.

use nix::sys::signal::{SigHandler, Signal, signal};

/// Restores the default action of SIGCHLD. A program that has inherited an ignored SIGCHLD cannot wait for its
/// children, because the kernel reaps them.
pub fn restore_default_sigchld() {
    // SAFETY: installs no handler function.
    #[expect(unsafe_code, reason = "setting the disposition of a signal")]
    let _ = unsafe { signal(Signal::SIGCHLD, SigHandler::SigDfl) }; // Cannot fail with these arguments.
}

/// Returns the name of a signal, such as `SIGSEGV`, or `None` if the signal has no name.
pub fn known_name(signal: i32) -> Option<&'static str> {
    Signal::try_from(signal).ok().map(Signal::as_str)
}

/// Returns the name of a signal, or its number as a string if the signal has no name.
pub fn name(signal: i32) -> String {
    known_name(signal).map_or_else(|| signal.to_string(), str::to_owned)
}
