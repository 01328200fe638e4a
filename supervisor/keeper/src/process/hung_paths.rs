//! Checks that the file systems of a worker's paths respond, before the keeper opens the paths.
//!
//! If a server of a network file system or a FUSE file system does not respond, each system call on the file system
//! blocks. A separate process therefore makes the first calls, so that the keeper is blocked only for a limited time.

use std::collections::HashMap;
use std::ffi::CString;
use std::io;
use std::time::{Duration, Instant};

use bulkhead_linux::process_tree::{is_alive, start_time};
use bulkhead_linux::wait::wait_until_readable;
use rustix::io::{Errno, retry_on_intr};
use rustix::pipe::PipeFlags;

use crate::protocol::SpawnOrder;
use crate::protocol::confinement::Layers;
use crate::spawn::{Forker, Job, PathCheck, SpawnError};
use crate::wait;

/// Maximum time to wait until the file systems of all paths of an order respond.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum time to wait while other paths are known not to respond. This is short, so that the keeper remains
/// responsive if many paths are on a hung file system.
const LATER_TIMEOUT: Duration = Duration::from_millis(500);

/// Time for which orders with a path that does not respond are rejected without another check.
const RETRY_PAUSE: Duration = Duration::from_secs(10);

/// Types of network file systems. Types of FUSE file systems are recognised by their names.
const NETWORK_FILE_SYSTEMS: [&str; 12] =
    ["9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "lustre", "nfs", "nfs4", "ocfs2", "smb3", "virtiofs"];

/// Paths that did not respond.
#[derive(Default)]
pub(super) struct HungPaths(HashMap<String, HungPath>);

/// State of a path that did not respond.
struct HungPath {
    next_check_at: Instant,
    /// Process that made the last check. As long as the process survives SIGKILL, the file system has not responded.
    check: Check,
}

/// PID and start time of a process that checks paths.
#[derive(Clone, Copy)]
struct Check {
    pid: u32,
    started: Option<u64>,
}

impl HungPaths {
    /// Fails if a path that the keeper opens for this order does not respond. Does nothing if no network or FUSE file
    /// system is mounted.
    pub(super) fn check(&mut self, forker: &Forker, order: &SpawnOrder<'_>) -> Result<(), SpawnError> {
        let paths = paths_of(order);
        if paths.is_empty() || !has_remote_mount(&std::fs::read("/proc/self/mountinfo").unwrap_or_default()) {
            return Ok(());
        }
        let hung = |path: &str| {
            Err(SpawnError::new(&format!("{path}: the file system does not respond"), Errno::TIMEDOUT))
        };
        let timeout = if self.0.is_empty() { TIMEOUT } else { LATER_TIMEOUT };
        let now = Instant::now();
        self.0.retain(|_, known| now < known.next_check_at || known.check.is_alive());
        if let Some(known) = paths.iter().find(|path| self.0.contains_key(**path)) {
            return hung(known);
        }
        let failed = |error: io::Error| SpawnError::from_io("path check", &error);
        let Some((path, check, is_starved)) = find_hung(forker, &paths, timeout).map_err(failed)? else {
            return Ok(());
        };
        // If the check had not been scheduled yet, the path is not known to be hung.
        if !is_starved {
            self.0.insert(path.to_owned(), HungPath { next_check_at: Instant::now() + RETRY_PAUSE, check });
        }
        hung(path)
    }

    /// Returns true if a process checks paths. Such a process is not a leftover process of a worker.
    pub(super) fn is_check(&self, pid: u32) -> bool {
        self.0.values().any(|known| known.check.pid == pid && known.check.is_alive())
    }
}

impl Check {
    fn is_alive(self) -> bool {
        self.started.is_some_and(|started| is_alive(self.pid, started))
    }

    /// Returns true if the process is waiting for a processor.
    fn is_starved(self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('R'))
    }
}

/// Returns the paths that the keeper opens for an order.
fn paths_of<'o>(order: &SpawnOrder<'o>) -> Vec<&'o str> {
    let mut paths: Vec<&str> = order.environment_files.iter().map(|(_, path)| *path).collect();
    let confinement = &order.confinement;
    if confinement.layers != Layers::default() {
        paths.extend([order.program, order.directory]);
        let granted = [&confinement.programs, &confinement.read, &confinement.write, &confinement.withheld];
        paths.extend(granted.into_iter().flatten());
    }
    paths
}

/// Returns true if a network or FUSE file system is mounted or can be mounted automatically, according to the text of
/// `/proc/self/mountinfo`.
fn has_remote_mount(mounts: &[u8]) -> bool {
    String::from_utf8_lossy(mounts).lines().any(|line| {
        // The type of the file system follows the optional fields, which end with a hyphen.
        let kind = line.split_once(" - ").and_then(|(_, rest)| rest.split(' ').next()).unwrap_or_default();
        let is_fuse = matches!(kind, "fuse" | "fuseblk") || kind.starts_with("fuse.");
        // An access can mount a network file system here. Most machines have the exception.
        let is_automount = kind == "autofs" && line.split(' ').nth(4) != Some("/proc/sys/fs/binfmt_misc");
        is_fuse || is_automount || NETWORK_FILE_SYSTEMS.contains(&kind)
    })
}

/// Returns the first path that does not respond, the process that made the check, and true if the process was waiting
/// for a processor.
fn find_hung<'p>(
    forker: &Forker,
    paths: &[&'p str],
    timeout: Duration,
) -> io::Result<Option<(&'p str, Check, bool)>> {
    let names = paths.iter().map(|path| CString::new(*path)).collect::<Result<_, _>>()?;
    let (reader, done) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    let pid = forker.fork(Job::PathCheck(PathCheck { paths: names, done }))?;
    let until = Instant::now() + timeout;
    let (mut checked, mut buffer) = (0, [0; 64]);
    while let Some(path) = paths.get(checked) {
        let left = until.saturating_duration_since(Instant::now());
        if !wait_until_readable(&reader, left)? {
            let check = Check { pid, started: start_time(pid) };
            let is_starved = check.is_starved();
            // The event loop reaps the process once it is dead.
            wait::kill_child(pid);
            return Ok(Some((path, check, is_starved)));
        }
        match retry_on_intr(|| rustix::io::read(&reader, &mut buffer))? {
            0 => break,
            count => checked += count,
        }
    }
    wait::wait(pid as i32, 0);
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remote_mounts_are_recognised() {
        let line = |kind: &str| format!("36 35 98:0 / /mnt rw,noatime master:1 - {kind} source rw\n");
        let automount = line("autofs").replace("/mnt", "/proc/sys/fs/binfmt_misc");
        let local = [line("ext4"), line("fusectl"), line("overlay"), automount].concat();
        assert!(!has_remote_mount(local.as_bytes()));
        for kind in ["nfs4", "fuse", "fuse.sshfs", "cifs", "9p", "autofs"] {
            assert!(has_remote_mount(format!("{local}{}", line(kind)).as_bytes()), "{kind}");
        }
    }

    #[test]
    fn checked_paths_are_those_that_the_keeper_opens() {
        let mut order = SpawnOrder {
            program: "/program",
            directory: "/folder",
            environment_files: vec![("A", "/secret")],
            ..SpawnOrder::default()
        };
        order.confinement.read = vec!["/read"];
        assert_eq!(paths_of(&order), ["/secret"]);
        order.confinement.layers.landlock = true;
        assert_eq!(paths_of(&order), ["/secret", "/program", "/folder", "/read"]);
    }
}
