//! Checks whether this machine meets the prerequisites of tests. Each check prints a missing prerequisite, so
//! that no test is skipped silently.

use std::io::Write;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::{output, programs};

/// Reports that the current test cannot run on this machine. The reason is given as a format string. Writes
/// to standard error directly, because the harness hides the output of passing tests.
#[macro_export]
macro_rules! not_run {
    ($($reason:tt)*) => { $crate::machine::report_not_run(&format!($($reason)*)) };
}

/// Implements [`not_run!`].
pub fn report_not_run(reason: &str) {
    let thread = std::thread::current();
    let line = format!("NOT RUN: {reason} ({})\n", thread.name().unwrap_or("unknown test"));
    std::io::stderr().write_all(line.as_bytes()).expect("standard error is open");
}

/// Returns true if this test runs as root. Otherwise prints a note and returns false.
pub fn is_root() -> bool {
    let is_root = nix::unistd::geteuid().is_root();
    if !is_root {
        not_run!("requires root");
    }
    is_root
}

/// Returns true if the program exists. Otherwise prints a note and returns false.
pub fn has_program(path: &str) -> bool {
    let is_there = Path::new(path).exists();
    if !is_there {
        not_run!("{path} does not exist");
    }
    is_there
}

/// Returns true if this machine supports all `layers`, which are named as in the output of `doctor`. Otherwise
/// prints a note and returns false.
pub fn has_layers(layers: &[&str]) -> bool {
    let mut doctor = Command::new(programs().join("bulkhead-supervisor"));
    let output = output(doctor.args(["doctor", "--json"])).stdout;
    let abilities: Value = serde_json::from_slice(&output).expect("doctor prints JSON");
    let all = abilities["layers"].as_array().or(abilities.as_array()).expect("a list of layers");
    let is_there = |layer: &&&str| all.iter().any(|one| one["layer"] == **layer && one["available"] == true);
    let missing: Vec<_> = layers.iter().filter(|layer| !is_there(layer)).collect();
    if !missing.is_empty() {
        not_run!("this machine lacks the layers {missing:?}");
    }
    missing.is_empty()
}
