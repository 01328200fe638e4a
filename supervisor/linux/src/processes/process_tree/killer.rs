//! Kills all descendants of this process in small steps, between which the caller can do other work.
//!
//! A run scans all processes and stops each descendant that is not spared, until a scan finds no new descendant. Then
//! it kills all stopped descendants. The killer remembers which processes earlier scans have found, so that the caller
//! can tell whether a dead worker has left new processes behind.

use std::collections::HashMap;
use std::fs::ReadDir;
use std::io;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::{Process, descendants, read_process};

/// Maximum number of scans in a run before the stopped processes are killed. A single scan misses processes that are
/// forked while others are being stopped.
const STOP_SCANS_MAX: usize = 32;

/// Finds and kills the descendants of this process. Each call to [`DescendantKiller::begin`] starts a new run of scans.
#[derive(Default)]
pub struct DescendantKiller {
    stage: Stage,
    /// Number of scans that have been started in the current run.
    run_scans: usize,
    /// Number of scans that have been started in all runs.
    scans: u64,
    /// Descendants that were found by the latest complete scan.
    found: HashMap<u32, Found>,
    /// Highest `first_seen` of all processes in `found`.
    latest_first_seen: u64,
}

#[derive(Default)]
enum Stage {
    #[default]
    Idle,
    /// The killer is reading the table of all processes.
    Scanning { entries: ReadDir, table: HashMap<u32, Process> },
    /// The killer is sending `signal` to the target processes, in reverse order of the list.
    Signalling { targets: Vec<u32>, signal: Signal },
}

struct Found {
    started: u64,
    parent: u32,
    /// Number of the scan in which the process was first found.
    first_seen: u64,
    /// True if the killer has tried to send SIGSTOP to the process.
    is_stopped: bool,
}

/// Result of one step of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The run is not finished.
    InProgress,
    /// The run is not finished, but a scan has just been completed. Only a completed scan can change the result of
    /// [`DescendantKiller::has_nothing_new_since`].
    ScanComplete,
    /// The run is finished. Contains the number of killed processes, which is 0 if there were no descendants left.
    Finished(usize),
}

impl std::fmt::Debug for DescendantKiller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DescendantKiller")
            .field("scans", &self.scans)
            .field("found", &self.found.len())
            .finish()
    }
}

impl DescendantKiller {
    /// Begins the next run. Fails if `/proc` cannot be read.
    pub fn begin(&mut self) -> io::Result<()> {
        self.run_scans = 0;
        self.begin_scan()
    }

    /// Returns true if a run is in progress.
    pub fn is_active(&self) -> bool {
        !matches!(self.stage, Stage::Idle)
    }

    /// Returns the total number of scans started so far, which serves as an argument for
    /// [`DescendantKiller::has_nothing_new_since`].
    pub fn scan_number(&self) -> u64 {
        self.scans
    }

    /// Returns true if the latest scan began after scan `scan_number` and found only processes that earlier scans up to
    /// `scan_number` had already found. In that case, a process that died during scan `scan_number` has left no
    /// processes behind. Call this when a scan is complete.
    pub fn has_nothing_new_since(&self, scan_number: u64) -> bool {
        self.scans > scan_number && self.latest_first_seen <= scan_number
    }

    /// Performs one step of the run, on at most `processes_max` processes. Spares children for which `is_spared`
    /// returns true, and their descendants. If `/proc` cannot be read, the step fails and the run ends.
    pub fn step(&mut self, processes_max: usize, is_spared: impl FnMut(u32) -> bool) -> io::Result<Progress> {
        match std::mem::take(&mut self.stage) {
            Stage::Idle => Ok(Progress::Finished(self.found.len())),
            Stage::Scanning { mut entries, mut table } => {
                for entry in entries.by_ref().take(processes_max) {
                    let pid = entry?.file_name().to_str().and_then(|name| name.parse().ok());
                    if let Some(pid) = pid
                        && let Some(process) = read_process(pid)
                    {
                        table.insert(pid, process);
                    }
                }
                match entries.next() {
                    None => Ok(self.evaluate_scan(&table, is_spared)),
                    Some(entry) => {
                        let pid = entry?.file_name().to_str().and_then(|name| name.parse().ok());
                        table.extend(pid.and_then(|pid| Some((pid, read_process(pid)?))));
                        self.stage = Stage::Scanning { entries, table };
                        Ok(Progress::InProgress)
                    }
                }
            }
            Stage::Signalling { mut targets, signal } => {
                for _ in 0..processes_max {
                    let Some(pid) = targets.pop() else { break };
                    self.signal(pid, signal);
                }
                if !targets.is_empty() {
                    self.stage = Stage::Signalling { targets, signal };
                } else if signal == Signal::STOP {
                    self.begin_scan()?;
                } else {
                    return Ok(Progress::Finished(self.found.len()));
                }
                Ok(Progress::InProgress)
            }
        }
    }

    fn begin_scan(&mut self) -> io::Result<()> {
        self.stage = Stage::Idle;
        let entries = std::fs::read_dir("/proc")?;
        self.run_scans += 1;
        self.scans += 1;
        self.stage = Stage::Scanning { entries, table: HashMap::new() };
        Ok(())
    }

    /// Evaluates a complete scan. Stops the processes that have not been stopped yet. Once all processes have been
    /// stopped, or after too many scans, kills all of them.
    fn evaluate_scan(
        &mut self,
        table: &HashMap<u32, Process>,
        is_spared: impl FnMut(u32) -> bool,
    ) -> Progress {
        let own = std::process::id();
        let mut before = std::mem::take(&mut self.found);
        // Parents come first, so that each process is stopped after its parent.
        let mut fresh = Vec::new();
        for (pid, started) in descendants(table, own, is_spared) {
            let known = before.remove(&pid).filter(|found| found.started == started);
            let parent = table[&pid].parent;
            let unseen = Found { started, parent, first_seen: self.scans, is_stopped: false };
            let found = Found { parent, ..known.unwrap_or(unseen) };
            if !found.is_stopped {
                fresh.push(pid);
            }
            self.found.insert(pid, found);
        }
        self.latest_first_seen = self.found.values().map(|found| found.first_seen).max().unwrap_or(0);
        if self.found.is_empty() {
            return Progress::Finished(0);
        }
        if fresh.is_empty() || self.run_scans >= STOP_SCANS_MAX {
            let targets = self.found.keys().copied().collect();
            self.stage = Stage::Signalling { targets, signal: Signal::KILL };
        } else {
            fresh.reverse();
            self.stage = Stage::Signalling { targets: fresh, signal: Signal::STOP };
        }
        Progress::ScanComplete
    }

    /// Sends a signal to a process that was found by a scan, unless its PID has been reused. If the process is not
    /// stopped yet and now has another parent, it may no longer be a descendant, and is left to the next scan.
    fn signal(&mut self, pid: u32, signal: Signal) {
        let Some(found) = self.found.get_mut(&pid) else { return };
        let Some(number) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return };
        // The descriptor is opened before `/proc` is read, so that it refers to the process whose start time is
        // checked.
        let Ok(descriptor) = pidfd_open(number, PidfdFlags::empty()) else { return };
        let Some(process) = read_process(pid).filter(|process| process.started == found.started) else {
            self.found.remove(&pid);
            return;
        };
        let has_its_parent = process.parent == found.parent || process.parent == std::process::id();
        if found.is_stopped || has_its_parent {
            // An error is ignored. Either the process has exited, or it runs a set-user-ID program that an unprivileged
            // subreaper cannot signal. The next run then finds it again.
            let _ = pidfd_send_signal(&descriptor, signal);
            found.is_stopped = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::wait_for_descendants;
    use super::*;
    use std::process::{Command, Stdio};

    /// Performs a whole run.
    fn run_all(killer: &mut DescendantKiller, is_spared: impl Fn(u32) -> bool) -> usize {
        killer.begin().unwrap();
        loop {
            if let Progress::Finished(count) = killer.step(3, &is_spared).unwrap() {
                return count;
            }
        }
    }

    /// Runs a test case in a separate process, because the case would otherwise also kill the child processes of other
    /// tests.
    fn in_separate_process(case: &str, run: impl FnOnce()) {
        if std::env::var_os("BULKHEAD_TEST_CASE").is_some_and(|chosen| chosen == case) {
            return run();
        }
        let name = format!("{}::{case}", module_path!().split_once("::").unwrap().1);
        let mut command = Command::new("/proc/self/exe");
        command.args(["--exact", &name, "--nocapture", "--test-threads=1"]).env("BULKHEAD_TEST_CASE", case);
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
    }

    /// Starts a shell without standard output and standard error. The outer process reads these streams of the
    /// separate process to their end. If the case fails, the shell's processes must not keep them open.
    fn shell(script: &str) -> std::process::Child {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().unwrap()
    }

    #[test]
    fn killer_spares_chosen_descendants() {
        in_separate_process("killer_spares_chosen_descendants", || {
            let script = "for i in 1 2 3 4 5 6 7 8 9 10; do sleep 1000 & done; wait";
            let (mut goes, mut stays) = (shell(script), shell(script));
            [goes.id(), stays.id()].into_iter().for_each(|pid| drop(wait_for_descendants(pid, 10)));
            let spared = stays.id();
            let mut killer = DescendantKiller::default();
            assert_eq!(run_all(&mut killer, |pid| pid == spared), 11);
            goes.wait().unwrap();
            assert_eq!(super::super::descendants_of(spared).unwrap().len(), 10);
            assert_eq!(run_all(&mut killer, |_| false), 11);
            stays.wait().unwrap();
        });
    }

    #[test]
    fn killer_distinguishes_new_processes_from_known_ones() {
        in_separate_process("killer_distinguishes_new_processes_from_known_ones", || {
            let mut first = shell("exec sleep 1000");
            let mut killer = DescendantKiller::default();
            killer.begin().unwrap();
            while killer.step(usize::MAX, |_| false).unwrap() != Progress::ScanComplete {}
            let scan_number = killer.scan_number();
            assert!(!killer.has_nothing_new_since(scan_number), "the scan began before the number was read");
            // The second scan finds the stopped process again. It does not count as new, because the first scan has
            // already found it.
            assert_eq!(killer.step(usize::MAX, |_| false).unwrap(), Progress::InProgress);
            assert_eq!(killer.step(usize::MAX, |_| false).unwrap(), Progress::ScanComplete);
            assert!(killer.has_nothing_new_since(scan_number) && !killer.has_nothing_new_since(0));
            let mut second = shell("exec sleep 1000");
            assert_eq!(run_all(&mut killer, |_| false), 2);
            assert!(!killer.has_nothing_new_since(scan_number));
            first.wait().unwrap();
            second.wait().unwrap();
        });
    }
}
