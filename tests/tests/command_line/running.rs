//! Helpers that run the `bulkhead` command in tests.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;

use bulkhead_tests::{PATIENCE, Supervisor, kill_pid, programs, wait_for};
use nix::sys::signal::Signal;
use serde_json::Value;

/// Exit code and output of a command.
pub(super) struct Ran {
    pub(super) code: Option<i32>,
    pub(super) stdout: Vec<u8>,
    pub(super) stderr: String,
}

impl Ran {
    pub(super) fn text(&self) -> &str {
        std::str::from_utf8(&self.stdout).expect("text")
    }

    /// Parses standard output, which must consist of one JSON object per line.
    pub(super) fn objects(&self) -> Vec<Value> {
        let parse = |line: &str| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
        self.text()
            .lines()
            .map(parse)
            .inspect(|value: &Value| assert!(value.is_object(), "{value}"))
            .collect()
    }

    pub(super) fn object(&self) -> Value {
        let mut objects = self.objects();
        assert_eq!(objects.len(), 1, "{objects:?} {}", self.stderr);
        objects.remove(0)
    }

    #[track_caller]
    pub(super) fn expect(self, code: i32) -> Self {
        let (stdout, stderr) = (String::from_utf8_lossy(&self.stdout), &self.stderr);
        assert_eq!(self.code, Some(code), "stdout: {stdout}\nstderr: {stderr}");
        self
    }
}

/// A running command. `end` kills the command if it does not exit in time.
pub(super) struct Running {
    pub(super) child: Child,
    pub(super) stdin: Option<ChildStdin>,
    pub(super) stdout: Option<JoinHandle<Vec<u8>>>,
    pub(super) stderr: JoinHandle<Vec<u8>>,
}

pub(super) fn read_all(mut from: impl Read + Send + 'static) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        // After a read error, the test uses the bytes that arrived before the error.
        let _ = from.read_to_end(&mut bytes);
        bytes
    })
}

/// Waits until all processes have closed the pipe's write end. Returns the bytes read from the pipe.
fn all_from(reader: JoinHandle<Vec<u8>>) -> Vec<u8> {
    wait_for("all processes have closed the pipe", || reader.is_finished().then_some(()));
    reader.join().expect("a reader")
}

/// Runs a command whose output is not read, as in `command | true`.
pub(super) fn unread(command: &mut Command) -> Ran {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the command runs");
    // Closes the read end of the pipe before the command can write.
    drop(child.stdout.take());
    read_from(child).end()
}

pub(super) fn spawn(command: &mut Command) -> Running {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    read_from(command.spawn().expect("the command runs"))
}

/// Starts reading the output of a command. Standard error must be a pipe. Standard output is read only if it is a pipe.
fn read_from(mut child: Child) -> Running {
    let stdin = child.stdin.take();
    let stdout = child.stdout.take().map(read_all);
    let stderr = read_all(child.stderr.take().expect("a pipe"));
    Running { child, stdin, stdout, stderr }
}

/// Returns the output of a running command, like [`Child::wait_with_output`]. Standard error must be a pipe. Kills the
/// command and panics if it does not exit in time.
pub(crate) fn output_of(child: Child) -> Output {
    read_from(child).output()
}

impl Running {
    /// Writes `input` to the command's standard input, closes the pipe, and waits for the command to exit.
    pub(super) fn feed(mut self, input: &[u8]) -> Ran {
        let (mut stdin, input) = (self.stdin.take().expect("a pipe"), input.to_vec());
        // Writes on another thread, because the command can hang or exit before it has read everything.
        std::thread::spawn(move || {
            let _ = stdin.write_all(&input);
        });
        self.end()
    }

    pub(super) fn end(self) -> Ran {
        let Output { status, stdout, stderr } = self.output();
        Ran { code: status.code(), stdout, stderr: String::from_utf8_lossy(&stderr).into_owned() }
    }

    fn output(mut self) -> Output {
        drop(self.stdin.take());
        let began = std::time::Instant::now();
        let status = loop {
            match self.child.try_wait().expect("the command is our child") {
                Some(status) => break status,
                None if began.elapsed() > PATIENCE => {
                    let _ = self.child.kill();
                    panic!("the command did not exit: {}", String::from_utf8_lossy(&all_from(self.stderr)));
                }
                None => std::thread::park_timeout(std::time::Duration::from_millis(2)),
            }
        };
        let stdout = self.stdout.take().map(all_from).unwrap_or_default();
        Output { status, stdout, stderr: all_from(self.stderr) }
    }
}

/// Runs the command against `supervisor`.
pub(super) fn bulkhead(supervisor: &Supervisor, arguments: &[&str]) -> Ran {
    spawn(supervisor.command().args(arguments)).end()
}

/// Runs the command against `supervisor` with the given standard input.
pub(super) fn fed(supervisor: &Supervisor, arguments: &[&str], input: &[u8]) -> Ran {
    spawn(supervisor.command().args(arguments)).feed(input)
}

/// Returns a `bulkhead` command without the environment variables that select a supervisor.
pub(super) fn plain(arguments: &[&str]) -> Command {
    let mut command = Command::new(programs().join("bulkhead"));
    command.args(arguments);
    for variable in ["BULKHEAD_SOCKET", "BULKHEAD_ADMIN", "BULKHEAD_HOST", "BULKHEAD_TOKEN_FILE"] {
        command.env_remove(variable);
    }
    command
}

/// Starts a job that runs until the command is interrupted.
pub(super) fn blocker(supervisor: &Supervisor, arguments: &[&str]) -> Running {
    let running = spawn(supervisor.command().args(arguments).arg("-n"));
    supervisor.wait_number(arguments[1], "in_flight", 1);
    running
}

/// A command that prints a stream, and the lines received so far.
pub(super) struct Following {
    pub(super) child: Child,
    pub(super) lines: Receiver<String>,
}

pub(super) fn follow(command: &mut Command) -> Following {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().expect("the command runs");
    let (sender, lines) = channel();
    let stdout = BufReader::new(child.stdout.take().expect("a pipe"));
    std::thread::spawn(move || {
        for line in stdout.lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    Following { child, lines }
}

impl Following {
    /// Waits for a line that contains `part`.
    pub(super) fn line_with(&self, part: &str) -> String {
        loop {
            let line = self.lines.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("no line with {part}"));
            if line.contains(part) {
                return line;
            }
        }
    }

    /// Sends SIGINT and returns the exit code.
    pub(super) fn interrupt(mut self) -> Option<i32> {
        kill_pid(self.child.id(), Signal::SIGINT);
        wait_for("the command exits", || self.child.try_wait().expect("the command is our child")).code()
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        // The command may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
