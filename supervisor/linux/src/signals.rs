//! Signals by name, and what one of them has to do.

use nix::sys::signal::{SigHandler, Signal, signal};

/// Has SIGCHLD do what it does by default. A program may have been started with it ignored, which is inherited: its
/// children would vanish unseen, and a wait for one would fail.
pub fn let_children_be_waited_for() {
    // SAFETY: no function is installed.
    #[expect(unsafe_code, reason = "setting what a signal does")]
    let _ = unsafe { signal(Signal::SIGCHLD, SigHandler::SigDfl) }; // It cannot fail with these arguments.
}

/// `SIGSEGV`; `None` for one without a name.
pub fn known(signal: i32) -> Option<&'static str> {
    Signal::try_from(signal).ok().map(Signal::as_str)
}

/// The same, or the number where there is no name.
pub fn name(signal: i32) -> String {
    known(signal).map_or_else(|| signal.to_string(), str::to_owned)
}
