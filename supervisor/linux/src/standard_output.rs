//! Returns standard output, or an error if the program was started without it. If descriptor 1 is closed, Rust's
//! runtime opens /dev/null in its place before `main`, and all output is lost silently. This module therefore checks
//! the descriptor before the runtime starts.

use std::io::{self, Write as _};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::blocking::Blocking;

static WAS_CLOSED: AtomicBool = AtomicBool::new(false);

/// Makes the loader run `check_descriptor` before the Rust runtime starts.
#[used]
#[expect(unsafe_code, reason = "there is no safe way to run code before the Rust runtime starts")]
// SAFETY: the section holds pointers to functions of this type, which the loader calls one after another. This function
// makes a system call and stores a flag, and does not need the runtime.
#[unsafe(link_section = ".init_array")]
static CHECK_BEFORE_MAIN: extern "C" fn() = check_descriptor;

extern "C" fn check_descriptor() {
    let is_closed = rustix::io::fcntl_getfd(rustix::stdio::stdout()).is_err();
    WAS_CLOSED.store(is_closed, Ordering::Relaxed);
}

/// Returns standard output for writing. Writes wait for the reader even if the descriptor is non-blocking.
///
/// # Errors
///
/// Fails if the program was started without standard output.
pub fn get() -> io::Result<Blocking<io::Stdout>> {
    match WAS_CLOSED.load(Ordering::Relaxed) {
        true => Err(io::Error::new(
            io::ErrorKind::NotConnected,
            "standard output is closed; redirect unwanted output to /dev/null",
        )),
        false => Ok(Blocking(io::stdout())),
    }
}

/// Writes bytes to standard output and flushes it. Writing zero bytes succeeds even if standard output is closed.
///
/// # Errors
///
/// Fails if the program was started without standard output, or if the bytes cannot be written.
pub fn write(bytes: &[u8]) -> io::Result<()> {
    if bytes.is_empty() {
        return Ok(());
    }
    let mut output = Blocking(get()?.0.lock());
    output.write_all(bytes)?;
    output.flush()
}
