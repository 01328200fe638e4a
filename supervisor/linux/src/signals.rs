//! Signals by name.

/// `SIGSEGV`, or the number where there is no name.
pub fn name(signal: i32) -> String {
    nix::sys::signal::Signal::try_from(signal).map_or_else(|_| signal.to_string(), |s| s.as_str().to_owned())
}
