//! Connects to the jobs socket in special ways: with other credentials, from a process that exits
//! immediately, or many times.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};

use nix::unistd::{Gid, Uid, setgid, setgroups, setuid};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match arguments[..] {
        // Executes a program as the given user, with the given group and comma-separated supplementary groups.
        ["as", uid, gid, groups, program, ref rest @ ..] => become_user(uid, gid, groups, program, rest),
        // Connects, passes the connection to another process, and exits.
        ["leave", socket] => leave(socket),
        // Copies standard input to standard output.
        ["listen"] => std::io::copy(&mut std::io::stdin(), &mut std::io::stdout()).map(drop),
        // Connects `times` times. Prints the number of connections that received a reply.
        ["knock", socket, times] => knock(socket, times),
        _ => return ExitCode::from(2),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "caller: {error}");
            ExitCode::FAILURE
        }
    }
}

fn number(text: &str) -> std::io::Result<u32> {
    text.parse().map_err(std::io::Error::other)
}

fn become_user(uid: &str, gid: &str, groups: &str, program: &str, rest: &[&str]) -> std::io::Result<()> {
    let groups = groups.split(',').filter(|group| !group.is_empty()).map(number);
    let groups: std::io::Result<Vec<Gid>> = groups.map(|group| group.map(Gid::from_raw)).collect();
    setgroups(&groups?)?;
    setgid(Gid::from_raw(number(gid)?))?;
    setuid(Uid::from_raw(number(uid)?))?;
    Err(Command::new(program).args(rest).exec())
}

fn leave(socket: &str) -> std::io::Result<()> {
    let socket = UnixStream::connect(socket)?;
    let mut heir = Command::new(std::env::current_exe()?);
    heir.arg("listen").stdin(Stdio::from(OwnedFd::from(socket))).spawn().map(drop)
}

fn knock(socket: &str, times: &str) -> std::io::Result<()> {
    let mut told = 0;
    for _ in 0..number(times)? {
        let mut answer = Vec::new();
        let mut socket = UnixStream::connect(socket)?;
        told += u32::from(socket.read_to_end(&mut answer).is_ok_and(|bytes| bytes > 0));
    }
    writeln!(std::io::stdout(), "{told}")
}
