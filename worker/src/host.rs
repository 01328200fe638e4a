//! Parses the command line of the host, a worker whose handler is a program (`exec`) or a function in a C library
//! (`library`). The supervisor starts the host for bulkheads with these keys. The submodules `exec` and `library` run
//! the jobs.
//!
//! ```text
//! bulkhead-worker exec [--rlimit NAME=VALUE | --ok STATUS | OPTION VALUE]... -- PROGRAM [ARGUMENT]...
//! bulkhead-worker library --entry SYMBOL -- PATH
//! ```

mod exec;
mod folder;
mod launch;
mod library;
mod log_lines;
mod orphans;

use std::os::fd::{AsRawFd, OwnedFd};
use std::process::ExitCode;

use bulkhead_shared::worker_protocol::PROGRAM_VARIABLE;

use crate::link;
use crate::log;

const USAGE: u8 = 2;

/// Runs the host. `arguments` does not include the name of the program.
pub fn main(arguments: impl Iterator<Item = String>) -> ExitCode {
    let arguments: Vec<String> = arguments.collect();
    let texts: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match texts[..] {
        ["library", "--entry", entry, "--", path] => library::run(path, entry),
        ["exec", ref rest @ ..] => match exec::Plan::parse(rest) {
            Some(plan) => exec::run(plan),
            None => usage(),
        },
        _ => usage(),
    }
}

/// Returns the inherited descriptor of the program or library. The supervisor passes a descriptor if the
/// worker's user cannot access the program or library by its path.
fn inherited_program() -> Option<OwnedFd> {
    link::inherited(PROGRAM_VARIABLE)
}

/// Returns the path of a descriptor in `/proc/self/fd`. The path can be opened or executed.
fn place(descriptor: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", descriptor.as_raw_fd())
}

fn usage() -> ExitCode {
    log::line(
        "this program is the host for `exec` and `library` bulkheads; bulkhead-supervisor starts it \
         automatically",
    );
    ExitCode::from(USAGE)
}
