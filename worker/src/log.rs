//! Writes messages to standard error, which the supervisor adds to its log.

use std::fmt::Display;
use std::io::{self, Write as _};

use bulkhead_linux::blocking::Blocking;

/// Writes a line. Ignores errors, unlike `eprintln!`, which would panic and end the worker.
pub(crate) fn line(text: impl Display) {
    let _ = writeln!(Blocking(io::stderr()), "{text}");
}
