//! After a death: waiting for the dead, killing what they left behind, and reporting those of whom nothing is
//! left.

use std::collections::HashSet;
use std::io;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use bulkhead_shared::process_tree::kill_descendants;
use mio::unix::SourceFd;

use super::{Child, Leaving, Process, Stage};
use crate::keeper::confine::cgroup::Leaf;
use crate::keeper::spawn;
use crate::keeper::wait::{self, Waited};
use crate::keeper::{Exit, ReportMessage, Usage};

/// Something that survives SIGKILL this long is left to the kernel, and its worker reported.
pub(super) const SWEEP_PATIENCE: Duration = Duration::from_secs(2);

/// The pauses between two looks at all processes while something is being swept up.
pub(super) const SCAN_PAUSE_MIN: Duration = Duration::from_millis(2);
const SCAN_PAUSE_MAX: Duration = Duration::from_millis(64);

/// After a death all processes are looked at once more, so late and at most so often: a worker that
/// forks with CLONE_PARENT makes siblings of itself instead of descendants.
const AUDIT_PAUSE: Duration = Duration::from_secs(1);

impl Process {
    /// Waits for whatever has ended, worker or orphan.
    pub(super) fn reap(&mut self, now: Instant) {
        while let Some(pid) = wait::peek() {
            if self.children.contains_key(&pid) {
                // What it said at the start, it said before it ended.
                self.look_at_start(pid);
                wait::kill_group(pid);
            }
            match wait::take(pid) {
                Waited::NoChild | Waited::Nothing => return,
                Waited::Stopped { pid } => wait::kill_child(pid),
                Waited::Ended { pid, exit, usage } => {
                    if let Some(child) = self.children.remove(&pid) {
                        self.left(child, (exit, usage), now);
                    }
                }
            }
        }
    }

    /// A child has been waited for.
    pub(super) fn left(&mut self, child: Child, (exit, usage): (Exit, Usage), now: Instant) {
        if let Some(listener) = &child.listener {
            let _ = self.poll.registry().deregister(&mut SourceFd(&listener.as_raw_fd()));
        }
        let Child { worker, stage, violation, status, folder, leaf, .. } = child;
        // What it leaves behind goes with it.
        leaf.iter().for_each(|leaf| _ = leaf.kill());
        if !matches!(stage, Stage::Running) {
            self.precedence.give_back();
            return self.clear(folder, leaf);
        }
        // The first process of a pid namespace has told of the worker; if not, it was killed first.
        let (exit, usage) = status.as_ref().and_then(spawn::read_status).unwrap_or((exit, usage));
        let exit = match (exit, violation) {
            (_, Some(call)) => Exit::Violation { call },
            (Exit::Signal { number: libc::SIGKILL, .. }, None)
                if leaf.as_ref().is_some_and(is_out_of_memory) =>
            {
                Exit::Oom
            }
            (exit, None) => exit,
        };
        self.leaving.push(Leaving { worker, exit, usage, folder, leaf, since: now });
        self.scans.audit.get_or_insert(now + AUDIT_PAUSE);
    }

    /// Kills what the dead left behind, and reports those of whom nothing is left.
    pub(super) fn sweep(&mut self, now: Instant) {
        if self.leaving.is_empty() {
            return self.audit(now);
        }
        if self.is_swept(now) {
            for gone in std::mem::take(&mut self.leaving) {
                self.report_exit(gone);
            }
        } else {
            self.precedence.take();
            self.give_up_on_overdue(now);
        }
        if self.leaving.is_empty() {
            self.scans.next = None;
            self.scans.pause = SCAN_PAUSE_MIN;
            self.precedence.give_back();
        }
    }

    /// Whether nothing is left behind. If something is, kills it; its death wakes us.
    pub(super) fn is_swept(&mut self, now: Instant) -> bool {
        if !self.scans.always && !wait::has_own_children() {
            self.scans.stuck = 0;
            return true;
        }
        if self.scans.next.is_some_and(|next| now < next) {
            return false;
        }
        self.scans.next = Some(now + self.scans.pause);
        self.scans.pause = (self.scans.pause * 2).min(SCAN_PAUSE_MAX);
        self.scan().is_ok_and(|found| found <= self.scans.stuck)
    }

    pub(super) fn scan(&mut self) -> io::Result<usize> {
        let living: HashSet<u32> = self.children.keys().copied().collect();
        self.scans.found = kill_descendants(&living)?;
        Ok(self.scans.found)
    }

    pub(super) fn give_up_on_overdue(&mut self, now: Instant) {
        let (overdue, waiting) =
            std::mem::take(&mut self.leaving).into_iter().partition(|l| now >= l.since + SWEEP_PATIENCE);
        self.leaving = waiting;
        let overdue: Vec<Leaving> = overdue;
        if overdue.is_empty() {
            return;
        }
        self.scans.stuck = self.scans.found.max(1);
        self.report(&ReportMessage::Remains { count: self.scans.stuck as u64 }, None);
        for gone in overdue {
            self.report_exit(gone);
        }
    }

    pub(super) fn report_exit(&mut self, gone: Leaving) {
        let Leaving { worker, exit, usage, folder, leaf, .. } = gone;
        self.clear(folder, leaf);
        self.report(&ReportMessage::Exited { worker, exit, usage }, None);
    }

    /// Removes what a worker had, when nothing is left of it.
    pub(super) fn clear(&mut self, folder: Option<PathBuf>, leaf: Option<Leaf>) {
        folder.into_iter().for_each(|folder| self.folders.remove(folder));
        leaf.into_iter().for_each(|leaf| self.groups.remove(leaf));
    }

    /// Kills a worker and all that it has started, as far as one call reaches.
    pub(super) fn kill(&self, pid: u32) {
        if let Some(Child { leaf: Some(leaf), .. }) = self.children.get(&pid) {
            // What it misses the other ways reach.
            let _ = leaf.kill();
        }
        wait::kill_group(pid);
    }

    pub(super) fn audit(&mut self, now: Instant) {
        if self.scans.audit.is_some_and(|due| due <= now) {
            // Until a look finds nothing: who kills, finds the victims' children the next time.
            let found_something = !matches!(self.scan(), Ok(0)) | !self.groups.retry();
            self.scans.audit = found_something.then(|| now + AUDIT_PAUSE);
            if found_something { self.precedence.take() } else { self.precedence.give_back() }
        }
    }
}

/// Whether the kernel has killed something in a worker's group for want of memory.
fn is_out_of_memory(leaf: &Leaf) -> bool {
    leaf.oom_kills().is_ok_and(|kills| kills > 0)
}
