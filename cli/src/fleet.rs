//! Implements `bulkhead fleet`, which replaces this process with `bulkhead-fleet`.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use crate::args::Args;
use crate::output::{Failure, exit};

const PROGRAM: &str = "bulkhead-fleet";

/// Replaces this process with `bulkhead-fleet`. Returns only on failure.
pub(crate) fn run(args: &Args, arguments: &[OsString]) -> Failure {
    let program = program();
    let mut command = Command::new(&program);
    if args.json {
        command.arg("--json");
    }
    let error = command.args(arguments).exec();
    let message = format!(
        "failed to run {}: {error}; install {PROGRAM} next to bulkhead or in PATH",
        program.display()
    );
    Failure::new(exit::FAILED, message)
}

/// Returns the path of the program next to this executable. If that file does not exist, returns only the program's
/// name, which is then looked up in PATH.
fn program() -> PathBuf {
    let own = std::env::current_exe().ok();
    own.map(|own| own.with_file_name(PROGRAM)).filter(|path| path.exists()).unwrap_or_else(|| PROGRAM.into())
}
