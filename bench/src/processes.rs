//! Builds and starts the programs that the measurements need, and kills each one when its value is dropped. Also reads
//! CPU times and memory sizes of processes from `/proc`. Other modules take the measurements.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};

use crate::Result;

/// Maximum duration of any wait. Most waits end almost immediately.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Name of the package that implements the processes of the chains. The package's program has the same name.
const PARTS: &str = "bulkhead-bench-parts";

/// A child process that is killed when the value is dropped.
pub(crate) struct Process(Child);

impl Process {
    pub(crate) fn start(command: &mut Command) -> Result<Self> {
        Ok(Self(command.spawn()?))
    }

    /// Starts the separate program `bulkhead-bench-parts` (see `../parts`) in one of its roles, such as the echo
    /// process.
    pub(crate) fn part(arguments: &[&str]) -> Result<Self> {
        Self::start(parts()?.args(arguments).stdin(Stdio::null()))
    }

    /// Starts another instance of `bulkhead-bench` with one of its hidden subcommands, such as the relay.
    pub(crate) fn role(arguments: &[&str]) -> Result<Self> {
        Self::start(own()?.args(arguments).stdin(Stdio::null()))
    }

    /// Starts a process like [`Process::role`]. Returns the process and its standard output.
    pub(crate) fn role_with_output(arguments: &[&str]) -> Result<(Self, ChildStdout)> {
        let mut child = own()?.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
        let stdout = child.stdout.take().ok_or("the child has no pipe for standard output")?;
        Ok((Self(child), stdout))
    }

    /// Starts an echo process, and returns a socket that is connected to it.
    pub(crate) fn echo() -> Result<(Self, UnixStream)> {
        let (ours, theirs) = UnixStream::pair()?;
        let echo = Self::start(parts()?.arg("echo").stdin(Stdio::from(OwnedFd::from(theirs))))?;
        Ok((echo, ours))
    }

    pub(crate) fn pid(&self) -> u32 {
        self.0.id()
    }

    pub(crate) fn has_ended(&mut self) -> Result<bool> {
        Ok(self.0.try_wait()?.is_some())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process may have exited already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns a command that runs `bulkhead-bench-parts`. [`programs`] builds this program into the folder that contains
/// the bench.
pub(crate) fn parts() -> Result<Command> {
    Ok(Command::new(folder()?.join(PARTS)))
}

/// Returns the worker's command as the elements of a TOML array for the `command` key.
pub(crate) fn worker() -> Result<String> {
    part_of("worker")
}

/// Returns the command that runs the program from `../parts` in the given role, as the elements of a TOML array for
/// the `command` key.
pub(crate) fn part_of(role: &str) -> Result<String> {
    let parts = folder()?.join(PARTS);
    let parts = parts.to_str().ok_or("the path of this program is not UTF-8")?;
    Ok(format!("{parts:?}, {role:?}"))
}

fn folder() -> Result<PathBuf> {
    Ok(std::env::current_exe()?.parent().ok_or("the path of this program has no folder")?.to_owned())
}

fn own() -> Result<Command> {
    Ok(Command::new(std::env::current_exe()?))
}

/// Waits until a file exists.
pub(crate) fn wait_for(path: &Path) -> Result<()> {
    let began = Instant::now();
    while !path.exists() {
        if began.elapsed() > TIMEOUT {
            return Err(format!("{} did not appear within {TIMEOUT:?}", path.display()).into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Builds the workspace's programs with this program's build profile. Returns the folder that contains the programs.
pub(crate) fn programs() -> Result<PathBuf> {
    let folder = folder()?;
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--bins"]);
    match folder.file_name().and_then(|name| name.to_str()) {
        // Selects the same features as `cargo test --workspace`, so that nothing is compiled twice.
        None | Some("debug") => drop(cargo.args(["--workspace", "--test", "architecture"])),
        Some(profile) => {
            let packages = ["bulkhead-supervisor", "bulkhead-worker", PARTS];
            cargo.args(packages.map(|package| ["--package", package]).as_flattened());
            cargo.args(["--profile", profile]);
        }
    }
    let status = cargo.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("..")).status()?;
    if status.success() { Ok(folder) } else { Err("failed to build the supervisor".into()) }
}

/// Returns the CPU time of all threads of a process.
pub(crate) fn cpu(pid: u32) -> Result<Duration> {
    let mut used = Duration::ZERO;
    for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let thread = thread?;
        let is_first = thread.file_name().to_str() == Some(&pid.to_string());
        match std::fs::read_to_string(thread.path().join("schedstat")) {
            Ok(line) => used += scheduled_time(&line)?,
            // The thread has exited.
            Err(error)
                if !is_first && matches!(Errno::from_io_error(&error), Some(Errno::NOENT | Errno::SRCH)) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(used)
}

fn read(file: &str) -> Result<String> {
    std::fs::read_to_string(file).map_err(|error| format!("failed to read {file}: {error}").into())
}

/// Returns the CPU time of the first thread of a process.
pub(crate) fn first_thread_cpu(pid: u32) -> Result<Duration> {
    scheduled_time(&read(&format!("/proc/{pid}/task/{pid}/schedstat"))?)
}

/// Returns the CPU time of a thread from its `schedstat` file.
fn scheduled_time(line: &str) -> Result<Duration> {
    Ok(Duration::from_nanos(line.split(' ').next().unwrap_or_default().parse()?))
}

/// Returns the proportional set size (PSS) of a process in bytes.
pub(crate) fn proportional_bytes(pid: u32) -> Result<u64> {
    let rollup = read(&format!("/proc/{pid}/smaps_rollup"))?;
    let line = rollup
        .lines()
        .find_map(|line| line.strip_prefix("Pss:"))
        .ok_or("`smaps_rollup` has no line `Pss:`")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? * 1024)
}

/// Returns the anonymous memory of a process in bytes.
pub(crate) fn own_bytes(pid: u32) -> Result<u64> {
    let rollup = read(&format!("/proc/{pid}/smaps_rollup"))?;
    let line = rollup
        .lines()
        .find_map(|line| line.strip_prefix("Anonymous:"))
        .ok_or("`smaps_rollup` has no line `Anonymous:`")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? * 1024)
}

/// Returns the PID of the first process in the PID namespace that contains `pid`. Returns `None` if `pid` itself is
/// that first process, or if the namespace is that of the bench.
pub(crate) fn init_of(pid: u32) -> Result<Option<u32>> {
    let numbers = |pid: u32| -> Result<Vec<u32>> {
        let text = field(pid, "NSpid:")?;
        Ok(text.split_whitespace().map(str::parse).collect::<std::result::Result<_, _>>()?)
    };
    let own = numbers(pid)?;
    if own.len() < 2 || own.last() == Some(&1) {
        return Ok(None);
    }
    // In a worker's PID namespace, the first process is the worker's parent.
    let parent = field(pid, "PPid:")?.trim().parse()?;
    if numbers(parent)?.last() == Some(&1) {
        Ok(Some(parent))
    } else {
        Err(format!("process {pid} is in a namespace whose first process is not the parent {parent}").into())
    }
}

fn field(pid: u32, name: &str) -> Result<String> {
    let status = read(&format!("/proc/{pid}/status"))?;
    let found = status.lines().find_map(|line| line.strip_prefix(name));
    found.map(str::to_owned).ok_or_else(|| format!("`/proc/{pid}/status` has no line `{name}`").into())
}

/// Sends SIGKILL to a process.
pub(crate) fn kill(pid: u32) -> Result<()> {
    let pid = Pid::from_raw(i32::try_from(pid)?).ok_or("the PID is 0")?;
    Ok(kill_process(pid, Signal::KILL)?)
}

/// Sends SIGTERM to a process.
pub(crate) fn terminate(pid: u32) -> Result<()> {
    let pid = Pid::from_raw(i32::try_from(pid)?).ok_or("the PID is 0")?;
    Ok(kill_process(pid, Signal::TERM)?)
}
