//! Runs in a forked process that calls `stat` on each path in place of the keeper, because a path can hang. Writes only
//! a byte after each path and decides nothing. `process::hung_paths` starts and kills this process, and infers hung
//! paths from missing bytes.

use std::ffi::CString;
use std::os::fd::{AsRawFd, OwnedFd};

use bulkhead_linux::descriptors::close_all_except;
use rustix::process::Signal;

use super::exit;

/// Paths to check in a separate process. The process writes a byte to `done` after each path.
pub(crate) struct PathCheck {
    pub(crate) paths: Vec<CString>,
    pub(crate) done: OwnedFd,
}

impl PathCheck {
    /// Runs the process, which makes only system calls.
    pub(super) fn run(&self) -> ! {
        // Fails only if the kernel does not support the setting.
        let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
        // SAFETY: this process uses no other descriptors from here on.
        let _ = unsafe { close_all_except(0, &mut [self.done.as_raw_fd()]) };
        for path in &self.paths {
            // The keeper reports errors when it opens the path.
            let _ = rustix::fs::stat(path.as_c_str());
            if rustix::io::write(&self.done, &[0]).is_err() {
                break;
            }
        }
        exit(0)
    }
}
