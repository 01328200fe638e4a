//! Implements `with-parent`, with which `try` starts programs that must not outlive it.

use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::{Signal, getppid, set_parent_process_death_signal};

use super::args::WithParent;
use super::output::{Failure, exit};

/// Replaces this process with a program that the kernel kills when the parent exits. Returns only on failure.
pub(crate) fn run(options: &WithParent) -> Failure {
    let fail = |error: std::io::Error| {
        Failure::new(exit::FAILED, format!("failed to run {}: {error}", options.program.display()))
    };
    if let Err(error) = set_parent_process_death_signal(Some(Signal::KILL)) {
        return fail(error.into());
    }
    // The parent may have exited before the signal was set.
    if getppid().is_none_or(|parent| parent.as_raw_nonzero().get() != options.parent) {
        return Failure::new(exit::FAILED, "the parent process has exited");
    }
    fail(Command::new(&options.program).args(&options.arguments).exec())
}
