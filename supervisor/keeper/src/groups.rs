//! The control groups of the keeper's workers: found when the first one is wanted, removed when they are
//! empty, and again looked after if they are not yet.

use super::confine::cgroup::{Failure, Leaf, Limits, Root};
use super::confinement::Cgroup;
use super::spawn::Refusal;

/// The group that all others are in, and those that could not be removed yet.
#[derive(Default)]
pub(super) struct Groups {
    root: Option<Root>,
    /// Whether leaves of keepers that are gone may be left.
    is_unswept: bool,
    left: Vec<Leaf>,
}

impl Groups {
    /// Makes a group for a worker.
    pub(super) fn make(&mut self, worker: u64, limits: &Cgroup) -> Result<Leaf, Refusal> {
        let refused = |failure: Failure| {
            let Failure { attempted, errno, what_to_do } = failure;
            Refusal::new(&format!("cgroup: {attempted} ({what_to_do})"), errno)
        };
        if self.root.is_none() {
            let supervisor = rustix::process::getppid().map_or(0, |pid| pid.as_raw_nonzero().get() as u32);
            self.root = Some(Root::find(supervisor).map_err(refused)?);
            self.is_unswept = true;
            self.sweep();
        }
        let Some(root) = &self.root else { return Err(Refusal::new("cgroup", rustix::io::Errno::NOENT)) };
        let limits = Limits {
            memory_bytes: limits.memory_bytes,
            pids: limits.pids,
            cpu_cores: limits.cpu_thousandths.map(|thousandths| thousandths as f64 / 1000.0),
        };
        root.leaf(worker, &limits).map_err(refused)
    }

    /// Removes a group of which all have been killed, now or with [`Groups::retry`].
    pub(super) fn remove(&mut self, leaf: Leaf) {
        if !is_gone(&leaf) {
            self.left.push(leaf);
        }
    }

    /// Tries again what could not be removed. Whether nothing is left of it.
    pub(super) fn retry(&mut self) -> bool {
        self.left.retain(|leaf| !is_gone(leaf));
        self.sweep();
        self.left.is_empty() && !self.is_unswept
    }

    fn sweep(&mut self) {
        if let (true, Some(root)) = (self.is_unswept, &self.root) {
            // One that cannot be swept is not ours to sweep.
            self.is_unswept = root.sweep().is_ok_and(|swept| swept.left > 0);
        }
    }
}

/// Removes a group if that can be done; one that cannot be removed for another reason than that it is not
/// empty never will be.
fn is_gone(leaf: &Leaf) -> bool {
    leaf.remove().unwrap_or(true)
}
