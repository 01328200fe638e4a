//! Time limits for waits that the standard library does not limit. Without a limit, the failure of one test would
//! prevent the whole test program from ending, and no message would name the test.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::{PATIENCE, wait_for};

/// Sets a flag when dropped. A thread scope waits for its threads even if the test panics, so threads that run until a
/// flag is set need this guard. The guard must be a local variable of the scope's closure.
pub struct SetOnDrop<'a>(pub &'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Calls a function on another thread, and returns the result. Panics if the function has not returned after
/// [`PATIENCE`]. The thread then continues to run.
pub fn in_time<T: Send + 'static>(what: &str, call: impl FnOnce() -> T + Send + 'static) -> T {
    let thread = std::thread::spawn(call);
    wait_for(what, || thread.is_finished().then_some(()));
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Runs a program without input to its end, and returns its output. Kills the program and panics with the
/// output if the program takes much longer than [`PATIENCE`].
pub fn output(command: &mut Command) -> Output {
    output_within(3 * PATIENCE, command.stdin(Stdio::null()))
}

/// Runs a program to its end, and returns its output. Does not change the program's standard input. Kills the program
/// and panics with the output if the program takes longer than `limit`. The output goes to files, because a descendant
/// that outlives the program could keep a pipe open.
pub fn output_within(limit: Duration, command: &mut Command) -> Output {
    let [stdout, stderr] = [(); 2].map(|()| tempfile::tempfile().expect("a temporary file"));
    let share = |file: &File| Stdio::from(file.try_clone().expect("an open file"));
    command.stdout(share(&stdout)).stderr(share(&stderr));
    let mut child = command.spawn().expect("the program runs");
    let began = Instant::now();
    let ended = loop {
        let ended = child.try_wait().expect("our own child");
        if ended.is_some() || began.elapsed() > limit {
            break ended;
        }
        std::thread::park_timeout(Duration::from_millis(5));
    };
    // Fails if the program has exited.
    let _ = child.kill();
    let status = child.wait().expect("our own child");
    let [stdout, stderr] = [stdout, stderr].map(content);
    let output = Output { status, stdout, stderr };
    assert!(ended.is_some(), "the program was killed after {limit:?}: {command:?}: {output:?}");
    output
}

/// Reads a file without moving its offset. Other processes share the offset and might still write to the file.
fn content(file: File) -> Vec<u8> {
    let bytes = file.metadata().map_or(0, |about| about.len());
    let mut content = vec![0; bytes as usize];
    file.read_exact_at(&mut content, 0).expect("a readable file");
    content
}
