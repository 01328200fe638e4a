//! Standard output, if the program was started with one. In the place of a closed one the runtime of Rust opens
//! /dev/null before `main`, so that what is written there is lost in silence; this looks before that.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

static WAS_CLOSED: AtomicBool = AtomicBool::new(false);

/// Runs before the runtime's start.
#[used]
#[expect(unsafe_code, reason = "there is no safe way to run before the runtime")]
// SAFETY: the section holds pointers to functions of this type, which the loader calls one after the other; this one
// makes a system call and stores a flag, and needs nothing of the runtime.
#[unsafe(link_section = ".init_array")]
static LOOK: extern "C" fn() = look;

extern "C" fn look() {
    let is_closed = rustix::io::fcntl_getfd(rustix::stdio::stdout()).is_err();
    WAS_CLOSED.store(is_closed, Ordering::Relaxed);
}

/// Standard output, to be written to.
///
/// # Errors
///
/// If the program was started without one.
pub fn get() -> io::Result<io::Stdout> {
    match WAS_CLOSED.load(Ordering::Relaxed) {
        true => Err(io::Error::new(
            io::ErrorKind::NotConnected,
            "it is closed; redirect what is not wanted to /dev/null",
        )),
        false => Ok(io::stdout()),
    }
}
