//! Limits for waits that have none. Without a limit, the failure of one test would prevent the whole test program from
//! ending, and no message would name the test.

use std::fs::File;
use std::io::{Read, Seek};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bulkhead_tests::wait_for;

/// Maximum run time of a program. The limit is above the five minutes after which the test application ends itself.
const RUN_TIME_MAX: Duration = Duration::from_secs(360);

/// Sets a flag when dropped. A thread scope waits for its threads even if the test panics, so threads that run until a
/// flag is set need this guard. The guard must be a local variable of the scope's closure.
pub(crate) struct SetOnDrop<'a>(pub(crate) &'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Calls a function on another thread, and returns the result. Panics if the function has not returned after
/// [`bulkhead_tests::PATIENCE`]. The thread then continues to run.
pub(crate) fn in_time<T: Send + 'static>(what: &str, call: impl FnOnce() -> T + Send + 'static) -> T {
    let thread = std::thread::spawn(call);
    wait_for(what, || thread.is_finished().then_some(()));
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Runs a program like [`Command::output`], except that standard input is inherited by default. Kills the program and
/// panics if it is still running after [`RUN_TIME_MAX`].
///
/// The output goes to files, because a pipe would also have to be closed by every process that the program has left
/// behind.
pub(crate) fn output(command: &mut Command) -> Output {
    let (stdout, stderr) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    command.stdout(stdout.try_clone().unwrap()).stderr(stderr.try_clone().unwrap());
    let mut child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let began = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if began.elapsed() >= RUN_TIME_MAX {
            let _ = child.kill();
            let _ = child.wait();
            let [stdout, stderr] =
                [content(stdout), content(stderr)].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
            panic!("{command:?} did not exit within {RUN_TIME_MAX:?}:\n{stdout}\n{stderr}");
        }
        std::thread::park_timeout(Duration::from_millis(5));
    };
    Output { status, stdout: content(stdout), stderr: content(stderr) }
}

fn content(mut file: File) -> Vec<u8> {
    let mut bytes = Vec::new();
    file.rewind().unwrap();
    file.read_to_end(&mut bytes).unwrap();
    bytes
}
