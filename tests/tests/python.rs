//! The Python package: its own tests, run by pytest against this build's supervisor, and checks of its style and types.

use std::path::{Path, PathBuf};
use std::process::Command;

use bulkhead_tests::{not_run, programs};

/// Returns the Python interpreter named in `BULKHEAD_PYTHON`. The default is the interpreter in the virtual
/// environment that `.ci/run` creates in the target folder.
fn interpreter() -> Option<PathBuf> {
    let named = std::env::var_os("BULKHEAD_PYTHON").map(PathBuf::from);
    let found = named.unwrap_or_else(|| programs().join("../python/bin/python"));
    let has_pytest = Command::new(&found).args(["-c", "import pytest, mypy, xdist"]).output();
    if has_pytest.is_ok_and(|ran| ran.status.success()) {
        return Some(found);
    }
    not_run!(
        "tests of the Python package: {} has no pytest, pytest-xdist and mypy. Run `.ci/run`, or name another interpreter \
         (3.10 or later) in BULKHEAD_PYTHON",
        found.display()
    );
    None
}

/// Number of Python tests to run at the same time. The number can exceed the number of processors, because the tests
/// spend most of their time waiting.
const PROCESSES: &str = "6";

fn run(command: &mut Command) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../python");
    let ran = command
        .current_dir(&folder)
        .env("BULKHEAD_SUPERVISOR", programs().join("bulkhead-supervisor"))
        .env("PYTHONPATH", folder.join("src"))
        .output()
        .expect("the interpreter runs");
    let said = format!("{}{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    println!("{said}");
    assert!(ran.status.success(), "{command:?}: {}\n{said}", ran.status);
}

#[test]
fn python_package_tests_pass() {
    let Some(python) = interpreter() else { return };
    let spread = ["-n", PROCESSES, "--dist", "worksteal"];
    run(Command::new(python)
        .args(["-m", "pytest", "-p", "no:cacheprovider", "-rs", "--durations=5"])
        .args(spread));
}

#[test]
fn python_package_passes_mypy_and_ruff() {
    let Some(python) = interpreter() else { return };
    let caches = tempfile::tempdir().unwrap();
    run(Command::new(&python).args(["-m", "mypy", "--cache-dir"]).arg(caches.path()));
    run(Command::new(&python).args(["-m", "ruff", "check", "--no-cache", "."]));
    run(Command::new(&python).args(["-m", "ruff", "format", "--no-cache", "--check", "."]));
}
