//! Finding and ending processes that descend from this one, whatever they did to get away.
//!
//! Both the supervisor's keeper and the host for plain programs are *child subreapers*: when a process
//! below them dies, its children become theirs. What they have not started themselves must therefore
//! be what a process below left behind, and goes. A process that forks as fast as it can is stopped first,
//! all of it, and killed then.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

mod hunt;

pub use hunt::{Hunt, Progress};

/// Ancestors that are looked up for one process; the deepest sessions of honest people have some twenty.
const ANCESTORS_MAX: usize = 64;

/// Looks at a process's ancestors while some of them die.
const LOOKS_MAX: usize = 8;

/// Bytes of a file of `/proc` about a process, as a rule: it is read with one call.
const USUAL_BYTES: usize = 4 * 1024;

/// The most bytes of such a file that are read.
const FILE_BYTES_MAX: u64 = 16 * 1024;

#[derive(Clone, Copy)]
struct Process {
    parent: u32,
    session: u32,
    /// With the number, this names one process for ever: numbers are used again.
    started: u64,
    is_zombie: bool,
}

impl Process {
    fn identity(&self, pid: u32) -> Identity {
        Identity { pid, session: self.session, started: self.started }
    }
}

/// Kills every process that descends from this one, except the children that `is_spared` and what descends
/// from them. Returns how many it killed; 0 means that none is left. Call it until then: killing
/// hands the victims' children upwards.
///
/// Takes a look at every process of the machine, some microseconds for each; [`Hunt`] does the same in pieces.
/// Errors: `/proc` cannot be read.
pub fn kill_descendants(mut is_spared: impl FnMut(u32) -> bool) -> io::Result<usize> {
    let mut hunt = Hunt::default();
    hunt.begin()?;
    loop {
        if let Progress::Over(count) = hunt.step(usize::MAX, &mut is_spared)? {
            return Ok(count);
        }
    }
}

/// The processes that descend from `root`, nearest first, by number. Zombies are left out.
pub fn descendants_of(root: u32) -> io::Result<Vec<u32>> {
    let found = descendants(&processes()?, root, |_| false);
    Ok(found.into_iter().map(|(pid, _)| pid).collect())
}

/// The identity of a process, also after its number is used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Number of the process.
    pub pid: u32,
    /// Number of its session.
    pub session: u32,
    /// Start of the process, in the kernel's ticks: the number can be used again.
    pub started: u64,
}

/// Lists the descendants of this process, including zombies, up to 64 generations deep. Each comes with the child of
/// this process at the top of its branch. Errors: `/proc` cannot be read.
pub fn list_descendants() -> io::Result<Vec<(Identity, u32)>> {
    let (table, own) = (processes()?, std::process::id());
    let child_above = |pid: u32| {
        let line = std::iter::successors(Some(pid), |pid| Some(table.get(pid)?.parent));
        line.take(ANCESTORS_MAX).find(|pid| table.get(pid).is_some_and(|process| process.parent == own))
    };
    let descendant = |(&pid, found): (&u32, &Process)| Some((found.identity(pid), child_above(pid)?));
    Ok(table.iter().filter_map(descendant).collect())
}

/// Returns the identity of a process; `None` if there is no such process, or this user cannot see it.
pub fn identity_of(pid: u32) -> Option<Identity> {
    read_process(pid).map(|process| process.identity(pid))
}

/// When this process started, in the kernel's ticks: together with its number, this names one process for
/// ever. `None`: there is no such process, or this user cannot see it.
pub fn started(pid: u32) -> Option<u64> {
    read_process(pid).map(|process| process.started)
}

/// Whether the process that had this number, and [`started`] then, still runs; a zombie does not. Where
/// this user cannot see it, that counts as running.
pub fn is_alive(pid: u32, started: u64) -> bool {
    match read_process(pid) {
        Some(process) => process.started == started && !process.is_zombie,
        None => {
            let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
            pid.is_some_and(|pid| test_kill_process(pid) != Err(Errno::SRCH))
        }
    }
}

/// A process and its ancestors, nearest first, up to `root`, or else to the outermost that can be seen from
/// here. The line is true of one moment, provided that the process itself has lived all the while: that is
/// for the caller to know.
///
/// Takes some microseconds for each. Errors: one of them is not to be seen in `/proc`, they are more than 64,
/// or they kept changing.
pub fn lineage(pid: u32, root: u32) -> io::Result<Vec<u32>> {
    let mut trouble = None;
    for _ in 0..LOOKS_MAX {
        match look_up(pid, root) {
            Ok(line) if is_still(&line) => return Ok(line),
            Ok(_) => trouble = None,
            // An ancestor may have died just then.
            Err(error) => trouble = Some(error),
        }
    }
    Err(trouble.unwrap_or_else(|| io::Error::other("its ancestors kept changing")))
}

fn look_up(pid: u32, root: u32) -> io::Result<Vec<u32>> {
    let mut line = vec![pid];
    let mut last = pid;
    while last != root {
        match parent_of(last)? {
            0 => break,
            _ if line.len() > ANCESTORS_MAX => {
                return Err(io::Error::other(format!("it has more than {ANCESTORS_MAX} ancestors")));
            }
            parent => last = parent,
        }
        line.push(last);
    }
    Ok(line)
}

/// Whether each is still the child of the next, looked at from the far end: a process that has been the parent of
/// one alive from one look to the other has lived all the while as well, so that its number, too, was
/// its own when its parent was read. A process that loses its parent never gets one of the same number: its
/// next one is an ancestor, which lived beside the dead one.
fn is_still(line: &[u32]) -> bool {
    line.windows(2).rev().all(|pair| parent_of(pair[0]).is_ok_and(|parent| parent == pair[1]))
}

/// The file about the first thread costs the same however many threads there are.
fn parent_of(pid: u32) -> io::Result<u32> {
    let path = format!("/proc/{pid}/task/{pid}/stat");
    let stat = read_small(&path)
        .map_err(|error| io::Error::new(error.kind(), format!("{path} cannot be read: {error}")))?;
    let process = parse(&stat);
    process.map(|process| process.parent).ok_or_else(|| io::Error::other(format!("{path} makes no sense")))
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
    let mut open = vec![root];
    while let Some(parent) = open.pop() {
        for &pid in children.get(&parent).into_iter().flatten() {
            if parent == root && is_spared(pid) {
                continue;
            }
            let process = table[&pid];
            if !process.is_zombie {
                found.push((pid, process.started));
            }
            open.push(pid);
        }
    }
    found
}

fn processes() -> io::Result<HashMap<u32, Process>> {
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

/// Reads `/proc/PID/stat`; `None` if there is no such process (any more).
fn read_process(pid: u32) -> Option<Process> {
    parse(&read_small(&format!("/proc/{pid}/stat")).ok()?)
}

/// Reads a small file of `/proc`, no more than its first 16 KiB, in half as many system calls as
/// [`std::fs::read_to_string`]. What is not UTF-8, such as the name of a program, is replaced.
///
/// ```
/// let stat = bulkhead_linux::process_tree::read_small("/proc/self/stat")?;
/// assert!(stat.starts_with(&format!("{} (", std::process::id())));
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn read_small(path: &str) -> io::Result<String> {
    let mut bytes = Vec::with_capacity(USUAL_BYTES);
    File::open(path)?.take(FILE_BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(String::from_utf8(bytes)
        .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
}

fn parse(stat: &str) -> Option<Process> {
    // The second field is the program's name in parentheses, which may itself hold any of them.
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

    /// Sends a signal to the process that had this number when it was looked up, or to none.
    fn signal(pid: u32, started: u64, signal: Signal) {
        let number = Pid::from_raw(pid as i32).unwrap();
        let Ok(descriptor) = pidfd_open(number, PidfdFlags::empty()) else { return };
        if super::started(pid) == Some(started) {
            let _ = pidfd_send_signal(&descriptor, signal);
        }
    }

    #[test]
    fn finds_grandchildren_and_only_those() {
        let mut child = Command::new("sh").args(["-c", "sleep 100 & sleep 100 & wait"]).spawn().unwrap();
        let found = loop {
            let found = descendants_of(child.id()).unwrap();
            if found.len() == 2 {
                break found;
            }
            std::thread::yield_now();
        };
        let table = processes().unwrap();
        for pid in found {
            assert_eq!(table[&pid].parent, child.id());
            signal(pid, table[&pid].started + 1, Signal::KILL);
            assert!(read_process(pid).is_some(), "a process of another time was killed");
            signal(pid, table[&pid].started, Signal::KILL);
        }
        child.wait().unwrap();
    }
    #[test]
    fn a_line_goes_up_to_its_root_or_to_the_outermost() {
        let own = std::process::id();
        let mut child = Command::new("sh").args(["-c", "(sleep 100 & wait) & wait"]).spawn().unwrap();
        let deepest = loop {
            match descendants_of(child.id()).unwrap()[..] {
                [_, deepest] => break deepest,
                _ => std::thread::yield_now(),
            }
        };
        let line = lineage(deepest, own).unwrap();
        assert_eq!((line.len(), line[0], line[2], line[3]), (4, deepest, child.id(), own));
        // No process has the number 0, so that it is never met.
        let whole = lineage(deepest, 0).unwrap();
        assert!(whole.len() >= 4 && whole[..4] == line[..], "{whole:?} {line:?}");
        assert_eq!(parent_of(*whole.last().unwrap()).unwrap(), 0);
        for pid in line[..3].iter().rev() {
            signal(*pid, read_process(*pid).unwrap().started, Signal::KILL);
        }
        child.wait().unwrap();
        assert!(lineage(child.id(), own).unwrap_err().to_string().contains("cannot be read"));
    }

    #[test]
    fn a_line_that_is_too_long_is_no_line() {
        let script = "[ $0 = 0 ] && exec sleep 100; sh -c \"$1\" $(($0 - 1)) \"$1\" & wait";
        let mut child = Command::new("sh").args(["-c", script, "70", script]).spawn().unwrap();
        let deepest = loop {
            match descendants_of(child.id()).unwrap() {
                found if found.len() == 70 => break found[69],
                _ => std::thread::yield_now(),
            }
        };
        let error = lineage(deepest, std::process::id()).unwrap_err().to_string();
        assert!(error.contains("more than 64 ancestors"), "{error}");
        for (pid, started) in descendants(&processes().unwrap(), child.id(), |_| false) {
            signal(pid, started, Signal::KILL);
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
