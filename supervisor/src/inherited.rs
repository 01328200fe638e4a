//! What a supervisor inherits from the program that starts it, and could not work with: blocked signals, and limits
//! that are too low. What can be mended is; of the rest the log warns. Workers get none of it, but for limits that
//! were in force before.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use bulkhead_config::Config;
use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};

/// Address space that a supervisor takes beside what it buffers: its threads, its tables, its program.
const ADDRESS_SPACE_BYTES: u64 = 1 << 30;

/// Bytes of a file that it writes (a log, a crash report with its payloads) as a rule.
const FILE_BYTES: u64 = 64 << 20;

/// Lets all signals come, and has a file that became too large be an error of the write. For the first thread, before
/// there is another one.
pub(crate) fn reset_signals() -> io::Result<()> {
    nix::sys::signal::SigSet::empty().thread_set_mask()?;
    // Caught, it does not end the process, and is not inherited: a write is told of it by its error.
    signal_hook::flag::register(Signal::XFSZ.as_raw(), Arc::new(AtomicBool::new(false)))?;
    Ok(())
}

/// Open files without which workers do not start: the rules of a sandbox take some hundred for a moment.
const OPEN_FILES_MIN: u64 = 128;

/// With fewer a supervisor would say that it is ready, and serve no job.
pub(crate) fn require_open_files() -> io::Result<()> {
    match getrlimit(Resource::Nofile).maximum {
        Some(most) if most < OPEN_FILES_MIN => Err(io::Error::other(format!(
            "there may be {most} at once, and a supervisor and its workers take {OPEN_FILES_MIN} at least; raise the \
             limit (`ulimit -n`, LimitNOFILE= of systemd)"
        ))),
        _ => Ok(()),
    }
}

/// Raises limits as far as they go, and warns of those that stay too low.
pub(crate) fn raise_limits(config: &Config) {
    for (resource, ..) in needed(config) {
        let limit = getrlimit(resource);
        if limit.current.is_some() {
            let _ = setrlimit(resource, Rlimit { current: limit.maximum, maximum: limit.maximum });
        }
    }
    warn_of_limits(config);
}

/// Warns of limits that are too low.
pub(crate) fn warn_of_limits(config: &Config) {
    for (resource, name, least, consequence) in needed(config) {
        if let Some(bytes) = getrlimit(resource).current.filter(|&bytes| bytes < least) {
            tracing::warn!("the inherited limit {name} is {bytes} bytes: {consequence}; raise it");
        }
    }
}

/// What a limit is to be at least, and why.
fn needed(config: &Config) -> [(Resource, &'static str, u64, &'static str); 3] {
    const NO_MEMORY: &str =
        "with less than max_buffered and 1 GiB the supervisor may find no memory, and end";
    let memory = config.supervisor.max_buffered.saturating_add(ADDRESS_SPACE_BYTES);
    [
        (Resource::Fsize, "RLIMIT_FSIZE", FILE_BYTES, "crash reports and the log are cut off there"),
        (Resource::As, "RLIMIT_AS", memory, NO_MEMORY),
        (Resource::Data, "RLIMIT_DATA", memory, NO_MEMORY),
    ]
}
