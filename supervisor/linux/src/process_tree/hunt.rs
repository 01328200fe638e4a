//! Kills all descendants of this process in small steps, so that the caller can do other work between the
//! steps.
//!
//! A hunt scans all processes and stops each descendant that is not spared. It scans again until no new
//! descendant appears, and then kills all of them. A hunt remembers which processes it has seen before. So if
//! a process dies during a hunt, the caller can tell the processes it left behind from processes found
//! earlier.

use std::collections::HashMap;
use std::fs::ReadDir;
use std::io;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::{Process, descendants, read_process};

/// Maximum number of scans for processes that were forked while their parents were being stopped.
const STOP_ROUNDS_MAX: usize = 32;

/// Finds and kills the descendants of this process. One value performs one hunt after another; see
/// [`Hunt::begin`].
#[derive(Default)]
pub struct Hunt {
    stage: Stage,
    /// Number of scans begun in this hunt.
    rounds: usize,
    /// Number of scans begun in all hunts.
    looks: u64,
    /// Descendants that existed in the latest complete scan.
    found: HashMap<u32, Found>,
    /// Highest `seen` of all processes in `found`.
    newest: u64,
}

#[derive(Default)]
enum Stage {
    #[default]
    Over,
    /// Reads the table of all processes.
    Looking { entries: ReadDir, table: HashMap<u32, Process> },
    /// Sends `signal` to the targets, from last to first.
    Ending { targets: Vec<u32>, signal: Signal },
}

struct Found {
    started: u64,
    parent: u32,
    /// Number of the scan that saw the process first.
    seen: u64,
    /// True if the process was sent SIGSTOP. The signal can have failed.
    is_stopped: bool,
}

/// State of a hunt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The hunt is not finished.
    Underway,
    /// The hunt is not finished, and a scan is complete. Only now can the answer of
    /// [`Hunt::has_nothing_since`] change.
    Looked,
    /// The hunt is finished, with the number of processes killed. 0 means that nothing was left.
    Over(usize),
}

impl std::fmt::Debug for Hunt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hunt").field("looks", &self.looks).field("found", &self.found.len()).finish()
    }
}

impl Hunt {
    /// Begins the next hunt. Errors: `/proc` cannot be read.
    pub fn begin(&mut self) -> io::Result<()> {
        self.rounds = 0;
        self.look()
    }

    /// True if a hunt is in progress.
    pub fn is_on(&self) -> bool {
        !matches!(self.stage, Stage::Over)
    }

    /// Returns the number of scans begun so far, which identifies this moment for
    /// [`Hunt::has_nothing_since`].
    pub fn moment(&self) -> u64 {
        self.looks
    }

    /// True if the latest scan began after `moment` and found only processes that had been seen before. In
    /// that case, a process that died at `moment` has left nothing behind. Call this when a scan is complete.
    pub fn has_nothing_since(&self, moment: u64) -> bool {
        self.looks > moment && self.newest <= moment
    }

    /// Performs a step of the hunt, with at most `processes_max` processes. Children for which `is_spared`
    /// returns true are left alone, with their descendants. An error (`/proc` cannot be read) ends the hunt.
    pub fn step(&mut self, processes_max: usize, is_spared: impl FnMut(u32) -> bool) -> io::Result<Progress> {
        match std::mem::take(&mut self.stage) {
            Stage::Over => Ok(Progress::Over(self.found.len())),
            Stage::Looking { mut entries, mut table } => {
                for entry in entries.by_ref().take(processes_max) {
                    let pid = entry?.file_name().to_str().and_then(|name| name.parse().ok());
                    if let Some(pid) = pid
                        && let Some(process) = read_process(pid)
                    {
                        table.insert(pid, process);
                    }
                }
                match entries.next() {
                    None => Ok(self.looked(&table, is_spared)),
                    Some(entry) => {
                        let pid = entry?.file_name().to_str().and_then(|name| name.parse().ok());
                        table.extend(pid.and_then(|pid| Some((pid, read_process(pid)?))));
                        self.stage = Stage::Looking { entries, table };
                        Ok(Progress::Underway)
                    }
                }
            }
            Stage::Ending { mut targets, signal } => {
                for _ in 0..processes_max {
                    let Some(pid) = targets.pop() else { break };
                    self.send(pid, signal);
                }
                if !targets.is_empty() {
                    self.stage = Stage::Ending { targets, signal };
                } else if signal == Signal::STOP {
                    self.look()?;
                } else {
                    return Ok(Progress::Over(self.found.len()));
                }
                Ok(Progress::Underway)
            }
        }
    }

    fn look(&mut self) -> io::Result<()> {
        self.stage = Stage::Over;
        let entries = std::fs::read_dir("/proc")?;
        self.rounds += 1;
        self.looks += 1;
        self.stage = Stage::Looking { entries, table: HashMap::new() };
        Ok(())
    }

    /// Evaluates a complete scan. Stops the processes that the scan found for the first time. If there are
    /// none, kills all.
    fn looked(&mut self, table: &HashMap<u32, Process>, is_spared: impl FnMut(u32) -> bool) -> Progress {
        let own = std::process::id();
        let mut before = std::mem::take(&mut self.found);
        // Parents come before children, so that the parent of each process has been stopped before the
        // process is.
        let mut fresh = Vec::new();
        for (pid, started) in descendants(table, own, is_spared) {
            let known = before.remove(&pid).filter(|found| found.started == started);
            let parent = table[&pid].parent;
            let unseen = Found { started, parent, seen: self.looks, is_stopped: false };
            let found = Found { parent, ..known.unwrap_or(unseen) };
            if !found.is_stopped {
                fresh.push(pid);
            }
            self.found.insert(pid, found);
        }
        self.newest = self.found.values().map(|found| found.seen).max().unwrap_or(0);
        if self.found.is_empty() {
            return Progress::Over(0);
        }
        if fresh.is_empty() || self.rounds >= STOP_ROUNDS_MAX {
            let targets = self.found.keys().copied().collect();
            self.stage = Stage::Ending { targets, signal: Signal::KILL };
        } else {
            fresh.reverse();
            self.stage = Stage::Ending { targets: fresh, signal: Signal::STOP };
        }
        Progress::Looked
    }

    /// Sends a signal to a process that was found, if the pid still belongs to that process. Pids are reused,
    /// and some time has passed since the scan. A process that was not yet stopped and now has another parent
    /// may not be a descendant, so it is left to the next scan.
    fn send(&mut self, pid: u32, signal: Signal) {
        let Some(found) = self.found.get_mut(&pid) else { return };
        let Some(number) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return };
        // From here on the descriptor identifies the process, so the following read of `/proc` is decisive.
        let Ok(descriptor) = pidfd_open(number, PidfdFlags::empty()) else { return };
        let Some(process) = read_process(pid).filter(|process| process.started == found.started) else {
            self.found.remove(&pid);
            return;
        };
        let has_its_parent = process.parent == found.parent || process.parent == std::process::id();
        if found.is_stopped || has_its_parent {
            // The signal fails if the process has exited in the meantime. It also fails for a set-user-id
            // program, which a subreaper without privileges cannot signal; the next hunt finds the program
            // again.
            let _ = pidfd_send_signal(&descriptor, signal);
            found.is_stopped = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// Performs a whole hunt in small steps.
    fn all(hunt: &mut Hunt, is_spared: impl Fn(u32) -> bool) -> usize {
        hunt.begin().unwrap();
        loop {
            if let Progress::Over(count) = hunt.step(3, &is_spared).unwrap() {
                return count;
            }
        }
    }

    /// Runs the case in a separate process, because a hunt kills all other descendants of this process.
    fn alone(case: &str, run: impl FnOnce()) {
        if std::env::var_os("BULKHEAD_HUNTER").is_some_and(|hunter| hunter == case) {
            return run();
        }
        let name = format!("process_tree::hunt::tests::{case}");
        let mut command = Command::new("/proc/self/exe");
        command.args(["--exact", &name, "--nocapture", "--test-threads=1"]).env("BULKHEAD_HUNTER", case);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }

    fn shell(script: &str) -> std::process::Child {
        Command::new("sh").args(["-c", script]).spawn().unwrap()
    }

    fn wait_for_descendants(of: u32, count: usize) {
        while super::super::descendants_of(of).unwrap().len() < count {
            std::thread::yield_now();
        }
    }

    #[test]
    fn ends_what_is_not_spared_in_pieces() {
        alone("ends_what_is_not_spared_in_pieces", || {
            let script = "for i in 1 2 3 4 5 6 7 8 9 10; do sleep 1000 & done; wait";
            let (mut goes, mut stays) = (shell(script), shell(script));
            [goes.id(), stays.id()].into_iter().for_each(|pid| wait_for_descendants(pid, 10));
            let spared = stays.id();
            let mut hunt = Hunt::default();
            assert_eq!(all(&mut hunt, |pid| pid == spared), 11);
            goes.wait().unwrap();
            assert_eq!(super::super::descendants_of(spared).unwrap().len(), 10);
            assert_eq!(all(&mut hunt, |_| false), 11);
            stays.wait().unwrap();
        });
    }

    #[test]
    fn tells_what_it_hunts_already_from_what_is_new() {
        alone("tells_what_it_hunts_already_from_what_is_new", || {
            let mut first = shell("exec sleep 1000");
            let mut hunt = Hunt::default();
            hunt.begin().unwrap();
            while hunt.step(usize::MAX, |_| false).unwrap() != Progress::Looked {}
            let moment = hunt.moment();
            assert!(!hunt.has_nothing_since(moment), "the look was begun before");
            // The process is stopped and scanned again. It is not new, because the first scan has seen it.
            assert_eq!(hunt.step(usize::MAX, |_| false).unwrap(), Progress::Underway);
            assert_eq!(hunt.step(usize::MAX, |_| false).unwrap(), Progress::Looked);
            assert!(hunt.has_nothing_since(moment) && !hunt.has_nothing_since(0));
            let mut second = shell("exec sleep 1000");
            assert_eq!(all(&mut hunt, |_| false), 2);
            assert!(!hunt.has_nothing_since(moment));
            first.wait().unwrap();
            second.wait().unwrap();
        });
    }
}
