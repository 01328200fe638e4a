//! Signals by name.

use nix::sys::signal::Signal;

/// `SIGSEGV`; `None` for one without a name.
pub fn known(signal: i32) -> Option<&'static str> {
    Signal::try_from(signal).ok().map(Signal::as_str)
}

/// The same, or the number where there is no name.
pub fn name(signal: i32) -> String {
    known(signal).map_or_else(|| signal.to_string(), str::to_owned)
}
