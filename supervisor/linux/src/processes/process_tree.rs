//! Finds and kills the descendants of this process, even if they try to escape.
//!
//! The keeper, and the host for plain programs, are *child subreapers*: they become the parents of orphaned
//! descendants. A child that a subreaper did not start is therefore an orphan of a dead descendant, and must be
//! killed. To cope with processes that fork as fast as possible, all descendants are stopped before any is killed.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

mod killer;

pub use killer::{DescendantKiller, Progress};

/// Maximum number of ancestors to read for one process. Ordinary processes have fewer than twenty ancestors.
const ANCESTORS_MAX: usize = 64;

/// Maximum number of attempts to read the ancestors of a process. An attempt fails if an ancestor exits in the
/// meantime.
const READ_ATTEMPTS_MAX: usize = 8;

/// Initial buffer capacity for reading a process's file in `/proc`, in bytes. A file of up to this size is read with
/// one call.
const INITIAL_BYTES: usize = 4 * 1024;

/// Maximum number of bytes read from a process's file in `/proc`.
const FILE_BYTES_MAX: u64 = 16 * 1024;

#[derive(Clone, Copy)]
struct Process {
    parent: u32,
    session: u32,
    /// Start time of the process. The PID and the start time together identify a process uniquely, even if
    /// the PID is reused.
    started: u64,
    is_zombie: bool,
}

impl Process {
    fn identity(&self, pid: u32) -> ProcessIdentity {
        ProcessIdentity { pid, session: self.session, started: self.started }
    }
}

/// Kills every descendant of this process. Spares children for which `is_spared` returns true, and all descendants of
/// these children. Returns the number of processes killed. The caller must repeat the call until it returns 0, because
/// the children of a killed process get a new parent.
///
/// Reads every process on the machine, which takes a few microseconds per process. [`DescendantKiller`] does the same
/// in small steps. Fails if `/proc` cannot be read.
pub fn kill_descendants(mut is_spared: impl FnMut(u32) -> bool) -> io::Result<usize> {
    let mut killer = DescendantKiller::default();
    killer.begin()?;
    loop {
        if let Progress::Finished(count) = killer.step(usize::MAX, &mut is_spared)? {
            return Ok(count);
        }
    }
}

/// Returns the PIDs of all descendants of `root`, parents before children. Excludes zombies.
pub fn descendants_of(root: u32) -> io::Result<Vec<u32>> {
    let found = descendants(&read_all_processes()?, root, |_| false);
    Ok(found.into_iter().map(|(pid, _)| pid).collect())
}

/// Identity of a process, which stays unique even if the PID is reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessIdentity {
    /// Process ID.
    pub pid: u32,
    /// Session ID.
    pub session: u32,
    /// Start time of the process, in clock ticks since boot.
    pub started: u64,
}

/// Lists the descendants of this process, including zombies, up to 64 generations deep. Each entry includes the PID of
/// the child of this process from which the descendant descends. This child can be the descendant itself. Fails if
/// `/proc` cannot be read.
pub fn list_descendants() -> io::Result<Vec<(ProcessIdentity, u32)>> {
    let (table, own) = (read_all_processes()?, std::process::id());
    let child_above = |pid: u32| {
        let chain = std::iter::successors(Some(pid), |pid| Some(table.get(pid)?.parent));
        chain.take(ANCESTORS_MAX).find(|pid| table.get(pid).is_some_and(|process| process.parent == own))
    };
    let descendant = |(&pid, found): (&u32, &Process)| Some((found.identity(pid), child_above(pid)?));
    Ok(table.iter().filter_map(descendant).collect())
}

/// Returns the identity of a process, or `None` if there is no such process or this user cannot see the
/// process.
pub fn identity_of(pid: u32) -> Option<ProcessIdentity> {
    read_process(pid).map(|process| process.identity(pid))
}

/// Returns the start time of a process, in clock ticks since boot. The PID and the start time together
/// identify a process uniquely. Returns `None` if there is no such process or this user cannot see the
/// process.
pub fn start_time(pid: u32) -> Option<u64> {
    read_process(pid).map(|process| process.started)
}

/// Returns true if the process with this PID and this start time ([`start_time`]) is still running. A zombie does not
/// count as running, but a process that this user cannot see does.
pub fn is_alive(pid: u32, started: u64) -> bool {
    match read_process(pid) {
        Some(process) => process.started == started && !process.is_zombie,
        None => {
            let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
            pid.is_some_and(|pid| test_kill_process(pid) != Err(Errno::SRCH))
        }
    }
}

/// Returns the PIDs of a process and its ancestors, nearest first. The list ends with `root`, or with the outermost
/// visible ancestor if `root` is not an ancestor. The caller must keep the process alive during the call, so that the
/// list is consistent: at some point during the call, each process was the parent of the one before it.
///
/// Takes a few microseconds per process. Fails if a process in the list cannot be read in `/proc`, if there are more
/// than 64 ancestors, or if the ancestors keep changing.
pub fn ancestors(pid: u32, root: u32) -> io::Result<Vec<u32>> {
    let mut last_error = None;
    for _ in 0..READ_ATTEMPTS_MAX {
        match read_ancestors(pid, root) {
            Ok(chain) if is_unchanged(&chain) => return Ok(chain),
            Ok(_) => last_error = None,
            // Reading fails if an ancestor dies just before its file is read.
            Err(error) => last_error = Some(error),
        }
    }
    Err(last_error.unwrap_or_else(|| io::Error::other("the ancestors of the process kept changing")))
}

fn read_ancestors(pid: u32, root: u32) -> io::Result<Vec<u32>> {
    let mut chain = vec![pid];
    let mut last = pid;
    while last != root {
        match parent_of(last)? {
            0 => break,
            _ if chain.len() > ANCESTORS_MAX => {
                return Err(io::Error::other(format!("the process has more than {ANCESTORS_MAX} ancestors")));
            }
            parent => last = parent,
        }
        chain.push(last);
    }
    Ok(chain)
}

/// Returns true if each process in `chain` is still a child of the next one. Checks the outermost ancestor first.
///
/// If a process has the same parent in both reads, the parent was alive in between, so its PID was not reused before
/// its own parent was read. The process cannot have been reparented to another process with the same PID either,
/// because an orphan's new parent is an ancestor that was alive at the same time as the previous parent.
fn is_unchanged(chain: &[u32]) -> bool {
    chain.windows(2).rev().all(|pair| parent_of(pair[0]).is_ok_and(|parent| parent == pair[1]))
}

/// Returns the PID of a process's parent. Reads the main thread's file, because reading the process's file takes longer
/// if there are many threads.
fn parent_of(pid: u32) -> io::Result<u32> {
    let path = format!("/proc/{pid}/task/{pid}/stat");
    let stat = read_proc_file(&path)
        .map_err(|error| io::Error::new(error.kind(), format!("{path} cannot be read: {error}")))?;
    let process = parse_stat(&stat);
    process.map(|process| process.parent).ok_or_else(|| io::Error::other(format!("{path} is malformed")))
}

fn descendants(
    table: &HashMap<u32, Process>,
    root: u32,
    mut is_spared: impl FnMut(u32) -> bool,
) -> Vec<(u32, u64)> {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    for (&pid, process) in table {
        children.entry(process.parent).or_default().push(pid);
    }
    let mut found = Vec::new();
    let mut pending = vec![root];
    while let Some(parent) = pending.pop() {
        for &pid in children.get(&parent).into_iter().flatten() {
            if parent == root && is_spared(pid) {
                continue;
            }
            let process = table[&pid];
            if !process.is_zombie {
                found.push((pid, process.started));
            }
            pending.push(pid);
        }
    }
    found
}

fn read_all_processes() -> io::Result<HashMap<u32, Process>> {
    let mut table = HashMap::new();
    for entry in std::fs::read_dir("/proc")? {
        let pid = entry?.file_name().to_str().and_then(|name| name.parse().ok());
        if let Some(pid) = pid
            && let Some(process) = read_process(pid)
        {
            table.insert(pid, process);
        }
    }
    Ok(table)
}

/// Reads `/proc/PID/stat`. Returns `None` if the process does not exist.
fn read_process(pid: u32) -> Option<Process> {
    parse_stat(&read_proc_file(&format!("/proc/{pid}/stat")).ok()?)
}

/// Reads at most the first 16 KiB of a file in `/proc`, with half as many system calls as
/// [`std::fs::read_to_string`]. Replaces bytes that are not UTF-8, which program names can contain.
///
/// ```
/// let stat = bulkhead_linux::process_tree::read_proc_file("/proc/self/stat")?;
/// assert!(stat.starts_with(&format!("{} (", std::process::id())));
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn read_proc_file(path: &str) -> io::Result<String> {
    let mut bytes = Vec::with_capacity(INITIAL_BYTES);
    File::open(path)?.take(FILE_BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(String::from_utf8(bytes)
        .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
}

fn parse_stat(stat: &str) -> Option<Process> {
    // The second field is the program's name. It is enclosed in parentheses, and can itself contain parentheses and
    // spaces.
    let mut fields = stat[stat.rfind(')')? + 1..].split_ascii_whitespace();
    let state = fields.next()?;
    let parent = fields.next()?.parse().ok()?;
    let session = fields.nth(1)?.parse().ok()?;
    let started = fields.nth(15)?.parse().ok()?;
    Some(Process { parent, session, started, is_zombie: matches!(state, "Z" | "X") })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
    use std::process::Command;
    use std::time::{Duration, Instant};

    /// Waits until a process has at least `count` descendants, and returns their PIDs, parents before children.
    pub(super) fn wait_for_descendants(of: u32, count: usize) -> Vec<u32> {
        let until = Instant::now() + Duration::from_secs(300);
        loop {
            let found = descendants_of(of).unwrap();
            if found.len() >= count {
                return found;
            }
            assert!(Instant::now() < until, "process {of} has {} descendants, not {count}", found.len());
            std::thread::yield_now();
        }
    }

    /// Sends a signal to a process, unless its PID has been reused by another process.
    fn signal(pid: u32, started: u64, signal: Signal) {
        let number = Pid::from_raw(pid as i32).unwrap();
        let Ok(descriptor) = pidfd_open(number, PidfdFlags::empty()) else { return };
        if super::start_time(pid) == Some(started) {
            let _ = pidfd_send_signal(&descriptor, signal);
        }
    }

    #[test]
    fn process_tree_lists_only_descendants() {
        let mut child = Command::new("sh").args(["-c", "sleep 1000 & sleep 1000 & wait"]).spawn().unwrap();
        let found = wait_for_descendants(child.id(), 2);
        assert_eq!(found.len(), 2);
        let table = read_all_processes().unwrap();
        for pid in found {
            assert_eq!(table[&pid].parent, child.id());
            signal(pid, table[&pid].started + 1, Signal::KILL);
            assert!(read_process(pid).is_some(), "a process with another start time was killed");
            signal(pid, table[&pid].started, Signal::KILL);
        }
        child.wait().unwrap();
    }

    #[test]
    fn ancestor_chain_ends_at_given_or_outermost_process() {
        let own = std::process::id();
        let mut child = Command::new("sh").args(["-c", "(sleep 1000 & wait) & wait"]).spawn().unwrap();
        let deepest = wait_for_descendants(child.id(), 2)[1];
        let chain = ancestors(deepest, own).unwrap();
        assert_eq!((chain.len(), chain[0], chain[2], chain[3]), (4, deepest, child.id(), own));
        // No process has PID 0, so the search does not stop before the outermost process.
        let whole = ancestors(deepest, 0).unwrap();
        assert!(whole.len() >= 4 && whole[..4] == chain[..], "{whole:?} {chain:?}");
        assert_eq!(parent_of(*whole.last().unwrap()).unwrap(), 0);
        for pid in chain[..3].iter().rev() {
            signal(*pid, read_process(*pid).unwrap().started, Signal::KILL);
        }
        child.wait().unwrap();
        assert!(ancestors(child.id(), own).unwrap_err().to_string().contains("cannot be read"));
    }

    #[test]
    fn more_than_64_ancestors_are_an_error() {
        let script = "[ $0 = 0 ] && exec sleep 1000; sh -c \"$1\" $(($0 - 1)) \"$1\" & wait";
        let mut child = Command::new("sh").args(["-c", script, "70", script]).spawn().unwrap();
        let deepest = wait_for_descendants(child.id(), 70)[69];
        let error = ancestors(deepest, std::process::id()).unwrap_err().to_string();
        assert!(error.contains("more than 64 ancestors"), "{error}");
        for (pid, started) in descendants(&read_all_processes().unwrap(), child.id(), |_| false) {
            signal(pid, started, Signal::KILL);
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
