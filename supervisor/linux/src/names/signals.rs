//! Returns the names of signals, for messages and reports. Also restores the default action of SIGCHLD, which the
//! supervisor and the keeper do when they start. The supervisor's `inherited` module manages the signal mask.

use nix::sys::signal::{SigHandler, Signal, signal};

/// Restores the default action of SIGCHLD. If a program inherits an ignored SIGCHLD, the kernel reaps the program's
/// children, and the program cannot wait for them.
pub fn restore_default_sigchld() {
    // SAFETY: installs no handler function.
    #[expect(unsafe_code, reason = "changing the disposition of a signal is unsafe")]
    let _ = unsafe { signal(Signal::SIGCHLD, SigHandler::SigDfl) }; // Cannot fail with these arguments.
}

/// Returns the name of a signal, such as `SIGSEGV`, or `None` if the signal has no name.
pub fn known_name(signal: i32) -> Option<&'static str> {
    Signal::try_from(signal).ok().map(Signal::as_str)
}

/// Returns the name of a signal. If the signal has no name, returns its number as a string.
pub fn name(signal: i32) -> String {
    known_name(signal).map_or_else(|| signal.to_string(), str::to_owned)
}
