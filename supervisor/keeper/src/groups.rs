//! Control groups of the keeper's workers. The parent group is found when the first worker needs one. Empty
//! groups are removed. If a group is not empty yet, the removal is retried.

use super::confine::cgroup::{Failure, Leaf, Limits, DelegatedGroup};
use super::confinement::CgroupLimits;
use super::spawn::Refusal;

/// The parent of all groups, and the groups that could not be removed yet.
#[derive(Default)]
pub(super) struct Groups {
    root: Option<DelegatedGroup>,
    /// True if groups of previous keepers may be left.
    is_unswept: bool,
    left: Vec<Leaf>,
}

impl Groups {
    /// Creates a group for a worker.
    pub(super) fn make(&mut self, worker: u64, limits: &CgroupLimits) -> Result<Leaf, Refusal> {
        let refused = |failure: Failure| {
            let Failure { attempted, errno, advice } = failure;
            Refusal::new(&format!("cgroup: {attempted} ({advice})"), errno)
        };
        if self.root.is_none() {
            let supervisor = rustix::process::getppid().map_or(0, |pid| pid.as_raw_nonzero().get() as u32);
            self.root = Some(DelegatedGroup::find(supervisor).map_err(refused)?);
            self.is_unswept = true;
            self.sweep();
        }
        let Some(root) = &self.root else { return Err(Refusal::new("cgroup", rustix::io::Errno::NOENT)) };
        let limits = Limits {
            memory_bytes: limits.memory_bytes,
            pids: limits.pids,
            cpu_cores: limits.cpu_millicores.map(|millicores| millicores as f64 / 1000.0),
        };
        root.create_leaf(worker, &limits).map_err(refused)
    }

    /// Removes a group in which all processes have been killed. If this fails, [`Groups::retry`] tries again.
    pub(super) fn remove(&mut self, leaf: Leaf) {
        if !is_gone(&leaf) {
            self.left.push(leaf);
        }
    }

    /// Tries again to remove groups. Returns true if none is left.
    pub(super) fn retry(&mut self) -> bool {
        self.left.retain(|leaf| !is_gone(leaf));
        self.sweep();
        self.left.is_empty() && !self.is_unswept
    }

    fn sweep(&mut self) {
        if let (true, Some(root)) = (self.is_unswept, &self.root) {
            // Groups that cannot be removed because of an error do not belong to this keeper.
            self.is_unswept = root.remove_stale_leaves().is_ok_and(|stale| stale.left > 0);
        }
    }
}

/// Removes a group if possible. Returns false only if the group is not empty, because any other error is
/// permanent.
fn is_gone(leaf: &Leaf) -> bool {
    leaf.remove().unwrap_or(true)
}
