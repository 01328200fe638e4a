//! Names of signals, and the default action of SIGCHLD.

use nix::sys::signal::{SigHandler, Signal, signal};

/// Restores the default action of SIGCHLD. A program can be started with SIGCHLD ignored, and inherits that:
/// its children would then disappear unnoticed, and a wait for a child would fail.
pub fn restore_default_sigchld() {
    // SAFETY: no function is installed.
    #[expect(unsafe_code, reason = "setting the disposition of a signal")]
    let _ = unsafe { signal(Signal::SIGCHLD, SigHandler::SigDfl) }; // It cannot fail with these arguments.
}

/// Returns the name, such as `SIGSEGV`, or `None` if the signal has no name.
pub fn known_name(signal: i32) -> Option<&'static str> {
    Signal::try_from(signal).ok().map(Signal::as_str)
}

/// Returns the name, or the number as text if the signal has no name.
pub fn name(signal: i32) -> String {
    known_name(signal).map_or_else(|| signal.to_string(), str::to_owned)
}
