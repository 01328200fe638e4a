//! Finds the user and group IDs that `/etc/subuid` and `/etc/subgid` assign to the user of an unprivileged supervisor.
//! The `plane` crate gives these IDs to workers.
//!
//! A single user namespace contains all of these IDs and the supervisor's own user. It is created once at
//! startup, with the help of `newuidmap` and `newgidmap`, which have the rights that the user lacks. A
//! worker's process enters the namespace before it executes the program. Inside, it has the same rights that
//! a worker started by root has on the machine.
#![expect(unsafe_code, reason = "a fork has no safe wrapper")]

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use bulkhead_linux::errno;
use bulkhead_linux::fork::fork_without_sigchld;
use bulkhead_linux::wait::{wait_for_exit_code, wait_until_readable};
use nix::unistd::User;
use rustix::io::{Errno, retry_on_intr};
use rustix::process::Pid;

use crate::probe::DISABLED_LAYERS;
use crate::wait::exits_within;

/// Name of the subordinate IDs in the output of `doctor`, which lists the sandbox layers.
pub const SUBORDINATE_IDS: &str = "subordinate ids";

/// Maximum time that `newuidmap` or `newgidmap` may run. These programs might query a directory service over the
/// network.
const MAP_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum time that a child may take to create an empty user namespace.
const CHILD_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum number of bytes of a program's standard error output to include in an error message.
const STDERR_BYTES_MAX: u64 = 512;

/// A range of IDs. Includes the first and the last ID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct IdRange {
    first: u32,
    last: u32,
}

/// A user namespace with subordinate IDs for workers.
#[derive(Debug)]
pub struct SubordinateIds {
    /// First ID of the range, both for users and for groups.
    pub first: u32,
    /// Last ID of the range.
    pub last: u32,
    namespace: OwnedFd,
}

impl SubordinateIds {
    /// Finds the subordinate IDs of this user and creates the user namespace. The error message says how to
    /// fix the problem.
    ///
    /// Forks once and runs two programs, which takes a few milliseconds. Must be called before the process starts a
    /// second thread.
    pub fn find() -> Result<Self, String> {
        if rustix::process::geteuid().is_root() {
            return Err("root does not need subordinate IDs".to_owned());
        }
        if std::env::var(DISABLED_LAYERS).is_ok_and(|layers| layers.contains("subordinate_ids")) {
            return Err(format!("{} disables subordinate IDs", DISABLED_LAYERS));
        }
        // The keeper needs the kernel's descriptor count, because it has no right to list the descriptors of another
        // user's process.
        if std::fs::metadata("/proc/self/fd").map_or(0, |found| found.len()) == 0 {
            return Err(
                "the kernel does not count descriptors of other users' processes: run kernel 6.2 or later"
                    .to_owned(),
            );
        }
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let name = User::from_uid(uid.into()).ok().flatten().map(|user| user.name);
        let ranges = |path: &str| {
            let text = std::fs::read_to_string(path).unwrap_or_default();
            let found = parse_ranges(&text, name.as_deref(), uid);
            if found.is_empty() { Err(format!("{path} contains no range for this user")) } else { Ok(found) }
        };
        let common = largest_common(&ranges("/etc/subuid")?, &ranges("/etc/subgid")?);
        let IdRange { first, last } =
            common.ok_or("/etc/subuid and /etc/subgid have no common ID for this user")?;
        let namespace = create_namespace(&[("newuidmap", uid), ("newgidmap", gid)], IdRange { first, last })?;
        Ok(Self { first, last, namespace })
    }

    /// Takes over the user namespace that the guard process has created, and the range of IDs in this namespace.
    pub(crate) fn from_guard((first, last): (u32, u32), namespace: OwnedFd) -> Self {
        Self { first, last, namespace }
    }

    /// Returns a new descriptor that refers to the user namespace.
    pub(crate) fn namespace(&self) -> io::Result<OwnedFd> {
        self.namespace.try_clone()
    }
}

/// Parses the text of a file such as `/etc/subuid`. Returns the ranges that the file assigns to the user. A line can
/// identify the user by name or by number.
fn parse_ranges(text: &str, name: Option<&str>, uid: u32) -> Vec<IdRange> {
    let range = |line: &str| {
        let mut fields = line.trim().split(':');
        let user = fields.next()?;
        let (first, count) = (fields.next()?.parse::<u32>().ok()?, fields.next()?.parse::<u32>().ok()?);
        let is_ours = Some(user) == name || user.parse() == Ok(uid);
        let last = first.checked_add(count.checked_sub(1)?)?;
        (is_ours && first > 0).then_some(IdRange { first, last })
    };
    text.lines().filter_map(range).collect()
}

/// Returns the largest contiguous range of IDs that both lists contain.
fn largest_common(users: &[IdRange], groups: &[IdRange]) -> Option<IdRange> {
    let both = |one: &IdRange, other: &IdRange| IdRange {
        first: one.first.max(other.first),
        last: one.last.min(other.last),
    };
    let all = users.iter().flat_map(|user| groups.iter().map(move |group| both(user, group)));
    all.filter(|range| range.first <= range.last).max_by_key(|range| range.last - range.first)
}

/// Creates a user namespace that maps this process's own user and group, and the IDs in `range`.
fn create_namespace(programs: &[(&str, u32)], range: IdRange) -> Result<OwnedFd, String> {
    let child =
        NamespaceHolder::start().map_err(|error| format!("failed to create a user namespace: {error}"))?;
    for (program, own) in programs {
        run_map_program(program, child.pid, *own, range)?;
    }
    let namespace = File::open(format!("/proc/{}/ns/user", child.pid));
    Ok(namespace.map_err(|error| format!("failed to open the new user namespace: {error}"))?.into())
}

/// Runs `newuidmap` or `newgidmap` to write an ID map. Maps each ID to itself.
fn run_map_program(
    program: &str,
    pid: i32,
    own: u32,
    IdRange { first, last }: IdRange,
) -> Result<(), String> {
    let count = u64::from(last - first) + 1;
    let numbers = [u64::from(own), own.into(), 1, first.into(), first.into(), count];
    let mut command = Command::new(program);
    command.arg(pid.to_string()).args(numbers.map(|number| number.to_string()));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).process_group(0);
    let mut running = command.spawn().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            format!("{program} is not installed: install the uidmap package (shadow-utils)")
        }
        _ => format!("failed to run {program}: {error}"),
    })?;
    if !exits_within(&running, MAP_TIMEOUT).map_err(|error| format!("{program}: {error}"))? {
        let _ = running.kill(); // The program may have exited by now.
        let _ = running.wait();
        return Err(format!("{program} took more than {MAP_TIMEOUT:?}"));
    }
    let status = running.wait().map_err(|error| format!("{program}: {error}"))?;
    if status.success() {
        return Ok(());
    }
    let mut message = Vec::new();
    if let Some(stderr) = running.stderr.take() {
        let _ = stderr.take(STDERR_BYTES_MAX).read_to_end(&mut message); // Output that cannot be read is omitted.
    }
    let message = String::from_utf8_lossy(&message).trim().replace('\n', "; ");
    let hint = match rustix::thread::no_new_privs() {
        Ok(true) => "; this process cannot gain privileges (NoNewPrivileges= in the unit)",
        _ => "",
    };
    Err(format!("{program} failed with {status}: {message}{hint}"))
}

/// A child process that keeps a user namespace alive. Dropping this value kills the child.
struct NamespaceHolder {
    pid: libc::pid_t,
}

impl NamespaceHolder {
    fn start() -> io::Result<Self> {
        let flags = rustix::pipe::PipeFlags::CLOEXEC;
        let (reader, writer) = rustix::pipe::pipe_with(flags)?;
        let parent = rustix::process::getpid();
        // SAFETY: the child makes only raw system calls until it is killed.
        let pid = match unsafe { fork_without_sigchld() }? {
            0 => hold_namespace(&writer, parent),
            pid => pid,
        };
        let holder = Self { pid };
        drop(writer);
        let mut errno = [0; 4];
        let is_reported = wait_until_readable(&reader, CHILD_TIMEOUT)?
            && retry_on_intr(|| rustix::io::read(&reader, &mut errno))? == errno.len();
        match i32::from_ne_bytes(errno) {
            0 if is_reported => Ok(holder),
            0 => Err(Errno::TIMEDOUT.into()),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }
}

impl Drop for NamespaceHolder {
    fn drop(&mut self) {
        // SAFETY: the child has not been waited for, so the PID still belongs to it.
        unsafe { libc::kill(self.pid, libc::SIGKILL) };
        let _ = wait_for_exit_code(self.pid); // Fails only if there is no such child.
    }
}

/// Runs in the child. Enters a new user namespace, reports the result, and waits to be killed.
fn hold_namespace(writer: &OwnedFd, parent: Pid) -> ! {
    // SAFETY: only numbers are passed, and this process has one thread. The process ends with its parent.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        // If the parent died before the call above, the kernel never sends the signal.
        if rustix::process::getppid() != Some(parent) {
            libc::_exit(1);
        }
        let errno = errno::check(libc::unshare(libc::CLONE_NEWUSER)).err().map_or(0, Errno::raw_os_error);
        let _ = rustix::io::write(writer, &errno.to_ne_bytes()); // If this fails, the parent sees a timeout.
        loop {
            libc::pause();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subordinate_id_ranges_are_found_by_name_and_uid() {
        let text =
            "root:1:5\nann:100000:65536\n# x\n1000:300000:10\nbob:7:1\nann:0:5\nann:9:0\nann:4294967295:9\n";
        let range = |first, last| IdRange { first, last };
        assert_eq!(parse_ranges(text, Some("ann"), 1000), [range(100_000, 165_535), range(300_000, 300_009)]);
        assert_eq!(parse_ranges(text, None, 1000), [range(300_000, 300_009)]);
        assert_eq!(parse_ranges("", Some("ann"), 1000), []);
    }

    #[test]
    fn largest_common_id_range_is_found() {
        let range = |first, last| IdRange { first, last };
        let users = [range(1000, 1099), range(5000, 5999)];
        assert_eq!(largest_common(&users, &[range(5500, 9000), range(1000, 1200)]), Some(range(5500, 5999)));
        assert_eq!(largest_common(&users, &[range(2000, 3000)]), None);
        assert_eq!(largest_common(&users, &[]), None);
    }

    #[test]
    fn error_names_failed_id_map_program() {
        let range = IdRange { first: 5, last: 9 };
        let failed = |program| run_map_program(program, 1, 0, range).unwrap_err();
        assert!(failed("newuidmap-of-nowhere").contains("install the uidmap package"));
        let why = failed("false");
        assert!(why.starts_with("false failed with"), "{why}");
    }
}
