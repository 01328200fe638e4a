//! Sources from which `bulkhead submit` reads the payload if the command line names no file.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::channel;

use bulkhead_tests::{PATIENCE, Supervisor, programs, wait_for};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::pty::openpty;

use super::running::{output_of, read_all};

fn supervisor() -> Supervisor {
    Supervisor::start(
        "[bulkhead.cat]\nexec = [\"cat\"]\nenv = { PATH = \"/usr/bin:/bin\" }\ndeadline = \"60s\"\n",
    )
}

fn submit(supervisor: &Supervisor, arguments: &[&str]) -> Command {
    let mut command = supervisor.command();
    command.args(["submit", "cat"]).args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[track_caller]
fn result(output: Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn submit_reads_payload_from_standard_input() {
    let supervisor = supervisor();
    let (file, other) = (supervisor.file("input"), supervisor.file("other"));
    std::fs::write(&file, "from the file\n").unwrap();
    std::fs::write(&other, "from the other\n").unwrap();
    let with = |arguments: &[&str], input: Stdio| {
        result(output_of(submit(&supervisor, arguments).stdin(input).spawn().unwrap()))
    };
    let input = || Stdio::from(File::open(&file).unwrap());
    assert_eq!(with(&[], input()), "from the file\n");
    assert_eq!(with(&["--payload-file", "-"], input()), "from the file\n");
    assert_eq!(with(&["--payload-file", other.to_str().unwrap()], input()), "from the other\n");
    assert_eq!(with(&["-n"], input()), "");
    assert_eq!(with(&[], Stdio::null()), "");
    // The command reads its input once for all jobs.
    assert_eq!(with(&["--repeat", "3"], input()), "from the file\n".repeat(3));
    let both = submit(&supervisor, &["-n", "--payload-file", "-"]).stdin(input()).spawn().unwrap();
    let both = output_of(both);
    assert_eq!(both.status.code(), Some(2), "{both:?}");
}

/// Other processes that share the streams, such as an asyncio program, can make them non-blocking.
#[test]
fn submit_waits_for_non_blocking_streams() {
    let supervisor = supervisor();
    let payload = "0123456789abcdef".repeat(1 << 16);
    let (input, mut feeder) = std::io::pipe().unwrap();
    let (mut reader, output) = std::io::pipe().unwrap();
    let (mut messages, errors) = std::io::pipe().unwrap();
    for descriptor in [input.as_fd(), output.as_fd(), errors.as_fd()] {
        fcntl(descriptor, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).unwrap();
    }
    // Nothing fits into standard error until the test reads.
    let mut filler = errors.try_clone().unwrap();
    while filler.write(b".").is_ok() {}
    drop(filler);
    let mut command = submit(&supervisor, &[]);
    let mut child = command.stdin(input).stdout(output).stderr(errors).spawn().unwrap();
    // Closes this process's copies of the command's streams.
    drop(command);
    let (bytes, pid) = (payload.clone(), child.id());
    let writer = std::thread::spawn(move || {
        wait_for("the command waits for its input", || is_asleep(pid).then_some(()));
        feeder.write_all(bytes.as_bytes())
    });
    wait_for("the job is done", || (supervisor.number("cat", "done") == 1).then_some(()));
    wait_for("the command waits for its reader", || is_asleep(pid).then_some(()));
    let stderr = std::thread::spawn(move || {
        let mut text = String::new();
        messages.read_to_string(&mut text).map(|_| text)
    });
    let mut result = String::new();
    reader.read_to_string(&mut result).unwrap();
    let message = stderr.join().unwrap().unwrap();
    assert!(child.wait().unwrap().success(), "{message}");
    assert!(result == payload, "{} bytes", result.len());
    assert!(message.contains("ok: cat"), "{message}");
    writer.join().unwrap().unwrap();
}

/// Returns true if the main thread of a process is asleep.
fn is_asleep(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('S'))
}

#[test]
fn submit_with_n_does_not_read_standard_input() {
    let supervisor = supervisor();
    let script =
        "while read -r line; do echo \"$line\"; \"$BULKHEAD\" submit cat $N 2> /dev/null; done < list";
    std::fs::write(supervisor.file("list"), "one\ntwo\nthree\n").unwrap();
    let run = |n: &str| {
        let mut shell = Command::new("sh");
        shell.args(["-c", script]).env("N", n).env("BULKHEAD", programs().join("bulkhead"));
        shell.env("BULKHEAD_SOCKET", supervisor.socket()).current_dir(supervisor.folder.path());
        result(bulkhead_tests::output(&mut shell))
    };
    assert_eq!(run("-n"), "one\ntwo\nthree\n");
    assert_eq!(run(""), "one\ntwo\nthree\n", "the first job reads the rest of the list");
    let told = submit(&supervisor, &["-n"]).stdin(Stdio::piped()).spawn().unwrap();
    assert_eq!(result(output_of(told)), "");
}

/// The command neither reads a payload from a terminal nor waits for input.
#[test]
fn submit_reads_no_payload_from_a_terminal() {
    let supervisor = supervisor();
    let terminal = openpty(None, None).expect("a pseudoterminal");
    let mut child = submit(&supervisor, &[]).stdin(terminal.slave).spawn().unwrap();
    wait_for("the command exits", || child.try_wait().unwrap());
    assert_eq!(result(output_of(child)), "");
    drop(terminal.master);
}

#[test]
fn submit_reports_that_it_is_waiting_for_standard_input() {
    let supervisor = supervisor();
    let mut child = submit(&supervisor, &[]).stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"begun, ").unwrap();
    let stdout = read_all(child.stdout.take().unwrap());
    let stderr = BufReader::new(child.stderr.take().unwrap());
    let (sender, lines) = channel();
    std::thread::spawn(move || stderr.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
    let line = lines.recv_timeout(PATIENCE).expect("the command prints a line");
    assert!(line.contains("reading the payload from standard input") && line.contains("-n"), "{line}");
    stdin.write_all(b"ended").unwrap();
    drop(stdin);
    let status = wait_for("the command exits", || child.try_wait().unwrap());
    assert!(status.success(), "{status}");
    assert_eq!(stdout.join().expect("a reader"), b"begun, ended");
    let rest: Vec<String> = std::iter::from_fn(|| lines.recv_timeout(PATIENCE).ok()).collect();
    assert_eq!(rest.len(), 1, "the summary: {rest:?}");
}
