//! Writes messages to standard error, which the supervisor adds to its log.

use std::fmt::Display;
use std::io::{self, Write as _};

use bulkhead_linux::blocking::Blocking;

/// Writes a line. Ignores errors, unlike `eprintln!`, which would panic and end the worker.
pub(crate) fn line(text: impl Display) {
    // One write, because other threads may be writing at the same time.
    let _ = Blocking(io::stderr()).write_all(format!("{text}\n").as_bytes());
}
