//! Repairs inherited process state that would impair a supervisor. Replaces the signal mask, raises low resource limits
//! as far as possible, and logs a warning about limits that remain too low. Workers keep the original limits, because
//! the keeper starts first. An embedded supervisor only logs the warnings.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use bulkhead_config::Config;
use bulkhead_control::control::HANDLED_SIGNALS;
use nix::sys::signal::{SigSet, Signal as NixSignal};
use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};

/// Address space that the supervisor needs for threads, tables and the program itself, in bytes. Does not
/// include `max_buffered`.
const ADDRESS_SPACE_BYTES: u64 = 1 << 30;

/// Minimum value of `RLIMIT_FSIZE`, in bytes. Large enough for the log and for a crash report with payloads.
const FILE_BYTES: u64 = 64 << 20;

/// Blocks the signals that the control plane handles, until [`unblock_signals`] is called. A signal that arrives during
/// the start would otherwise kill the process, or be lost if this is process 1. Unblocks all other signals.
///
/// Must be called before other threads are started, because threads inherit the signal mask.
pub(crate) fn defer_signals() -> io::Result<()> {
    let handled = HANDLED_SIGNALS.into_iter().filter_map(|number| NixSignal::try_from(number).ok());
    Ok(handled.collect::<SigSet>().thread_set_mask()?)
}

/// Unblocks all signals for this thread. Signals that arrived while the supervisor was starting then take effect.
pub(crate) fn unblock_signals() -> io::Result<()> {
    Ok(SigSet::empty().thread_set_mask()?)
}

/// Replaces the inherited signal mask as [`defer_signals`] does. Handles SIGXFSZ so that a write beyond the file size
/// limit fails with an error instead of killing the process.
pub(crate) fn reset_signals() -> io::Result<()> {
    defer_signals()?;
    // With a handler for SIGXFSZ, a write over the limit fails with EFBIG instead of killing the process. Workers do
    // not inherit the handler.
    signal_hook::flag::register(Signal::XFSZ.as_raw(), Arc::new(AtomicBool::new(false)))?;
    Ok(())
}

/// Minimum value of `RLIMIT_NOFILE`. With a lower limit, workers do not start, because setting up a sandbox briefly
/// opens about a hundred files.
const OPEN_FILES_MIN: u64 = 128;

/// Returns an error if the hard limit on open files is too low. Without this check, the supervisor would become ready
/// but could not run any jobs.
pub(crate) fn require_open_files() -> io::Result<()> {
    match getrlimit(Resource::Nofile).maximum {
        Some(max) if max < OPEN_FILES_MIN => Err(io::Error::other(format!(
            "the limit is {max} files, but a supervisor with workers needs at least {OPEN_FILES_MIN}; raise the \
             limit (`ulimit -n`, LimitNOFILE= in systemd)"
        ))),
        _ => Ok(()),
    }
}

/// Raises the soft resource limits to the hard limits. Logs a warning for each limit that is still too low for the
/// supervisor.
pub(crate) fn raise_limits(config: &Config) {
    for (resource, ..) in required_limits(config) {
        let limit = getrlimit(resource);
        if limit.current.is_some() {
            let _ = setrlimit(resource, Rlimit { current: limit.maximum, maximum: limit.maximum });
        }
    }
    warn_about_limits(config);
}

/// Logs a warning for each resource limit that is too low for the supervisor.
pub(crate) fn warn_about_limits(config: &Config) {
    for (resource, name, min, consequence) in required_limits(config) {
        if let Some(bytes) = getrlimit(resource).current.filter(|&bytes| bytes < min) {
            tracing::warn!("the inherited limit {name} is {bytes} bytes: {consequence}; raise the limit");
        }
    }
}

/// Returns the resources for which the supervisor requires a minimum limit. Each entry contains the name of the limit,
/// the minimum in bytes, and the consequence of a lower limit.
fn required_limits(config: &Config) -> [(Resource, &'static str, u64, &'static str); 3] {
    const NO_MEMORY: &str =
        "with less than max_buffered plus 1 GiB, the supervisor can run out of memory and exit";
    let memory = config.supervisor.max_buffered.saturating_add(ADDRESS_SPACE_BYTES);
    [
        (Resource::Fsize, "RLIMIT_FSIZE", FILE_BYTES, "crash reports and the log are cut off at that size"),
        (Resource::As, "RLIMIT_AS", memory, NO_MEMORY),
        (Resource::Data, "RLIMIT_DATA", memory, NO_MEMORY),
    ]
}
