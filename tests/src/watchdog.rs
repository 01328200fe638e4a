//! Watchdog for tests that hang. Long after all tests should have finished, the watchdog names the tests that are still
//! running, and shows the system calls and processes for which the tests are waiting. The watchdog then kills these
//! processes, so that each test fails with its own message.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{read_link, read_to_string};
use std::io::Write as _;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nix::sys::signal::Signal;
use nix::unistd::gettid;

use crate::{children, kill_pid, name};

/// Maximum run time of a test program. All tests together take half of this time on a slow machine.
const RUN_TIME_MAX: Duration = Duration::from_secs(25 * 60);

/// Time allowed for the tests to fail after the watchdog has killed their processes.
const FAILURE_TIME: Duration = Duration::from_secs(150);

/// Maximum length of a command line in a report, in characters.
const COMMAND_LINE_MAX: usize = 160;

/// Names of the tests that have used one of the workspace's programs, by thread ID.
static TESTS: Mutex<BTreeMap<i32, String>> = Mutex::new(BTreeMap::new());

/// Records the test that runs in this thread. The test harness names each thread after its test.
pub(crate) fn record_test() {
    if let Some(name) = std::thread::current().name() {
        let mut tests = TESTS.lock().unwrap_or_else(PoisonError::into_inner);
        tests.insert(gettid().as_raw(), name.to_owned());
    }
}

/// Starts the watchdog of this test program.
pub(crate) fn start() {
    std::thread::spawn(|| {
        std::thread::sleep(RUN_TIME_MAX);
        report("the test program has not finished after 25 minutes; still running:");
        let processes = descendants(std::process::id());
        for (pid, _) in processes {
            kill_pid(pid, Signal::SIGKILL);
        }
        std::thread::sleep(FAILURE_TIME);
        report("tests hang even though their processes have been killed:");
        std::process::abort();
    });
}

/// Writes the running tests and processes to standard error.
fn report(problem: &str) {
    let mut text = format!("\n{problem}\n");
    let tests = TESTS.lock().unwrap_or_else(PoisonError::into_inner);
    for (thread, test) in tests.iter() {
        let task = format!("/proc/self/task/{thread}");
        if std::fs::exists(&task).is_ok_and(|exists| exists) {
            let _ = writeln!(text, "test {test}: {}", describe_wait(&task));
        }
    }
    for (pid, parent) in descendants(std::process::id()) {
        let task = format!("/proc/{pid}");
        let line = read_to_string(format!("{task}/cmdline")).unwrap_or_default().replace('\0', " ");
        let line: String = line.chars().take(COMMAND_LINE_MAX).collect();
        let name = name(pid).unwrap_or_default();
        let _ = writeln!(text, "process {pid} of {parent}: {name}: {}: {line}", describe_wait(&task));
    }
    // `eprintln` would add the report to the captured output of the test that started the watchdog.
    let _ = std::io::stderr().write_all(text.as_bytes());
}

/// Returns the kernel function and the system call that a thread waits in. If the first argument of the call can be
/// a descriptor, also returns the file.
fn describe_wait(task: &str) -> String {
    let read = |file: &str| read_to_string(format!("{task}/{file}")).unwrap_or_default();
    let call = read("syscall");
    let argument = call.split(' ').nth(1).and_then(|number| number.strip_prefix("0x"));
    let descriptor = argument.and_then(|number| i32::from_str_radix(number, 16).ok());
    let file = descriptor.and_then(|descriptor| read_link(format!("{task}/fd/{descriptor}")).ok());
    let file = file.map_or_else(String::new, |file| format!(" ({})", file.display()));
    format!("{} in system call {}{file}", read("wchan"), call.trim_end())
}

/// Returns the PIDs of a process's living descendants, each with the PID of its parent.
fn descendants(of: u32) -> Vec<(u32, u32)> {
    let mut found: Vec<(u32, u32)> = children(of).into_iter().map(|child| (child, of)).collect();
    let mut next = 0;
    while let Some(&(parent, _)) = found.get(next) {
        found.extend(children(parent).into_iter().map(|child| (child, parent)));
        next += 1;
    }
    found
}
