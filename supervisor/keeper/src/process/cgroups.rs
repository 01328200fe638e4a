//! Creates and removes the control groups of the keeper's workers. Finds the parent group when the first worker needs a
//! group, and retries the removal of groups that are not empty yet. `confine/cgroup.rs` contains the operations on the
//! files. `reaping.rs` kills the processes in a group.

use crate::confine::cgroup::{DelegatedGroup, Failure, Leaf, Limits};
use crate::protocol::confinement::CgroupLimits;
use crate::spawn::SpawnError;

/// The group that contains all worker groups, and the worker groups that still have to be removed.
pub(super) struct WorkerGroups {
    /// PID of the keeper's parent at startup. If the supervisor dies, the keeper is reparented to another process,
    /// whose descendants must not be moved.
    supervisor: u32,
    /// True if the supervisor is embedded in an application. The keeper's parent is then the guard.
    is_embedded: bool,
    root: Option<DelegatedGroup>,
    /// True if groups that were created by previous keepers might be left.
    may_have_stale: bool,
    to_remove: Vec<Leaf>,
}

impl WorkerGroups {
    pub(super) fn new(is_embedded: bool) -> Self {
        let supervisor = rustix::process::getppid().map_or(0, |pid| pid.as_raw_nonzero().get() as u32);
        Self { supervisor, is_embedded, root: None, may_have_stale: false, to_remove: Vec::new() }
    }

    pub(super) fn create(&mut self, worker: u64, limits: &CgroupLimits) -> Result<Leaf, SpawnError> {
        let is_embedded = self.is_embedded;
        let refused = |failure: Failure| {
            let failure = if is_embedded { failure.for_application() } else { failure };
            let Failure { attempted, errno, advice } = failure;
            SpawnError::new(&format!("cgroup: {attempted} ({advice})"), errno)
        };
        if self.root.is_none() {
            self.root = Some(DelegatedGroup::find(self.supervisor).map_err(refused)?);
            self.may_have_stale = true;
            self.remove_stale();
        }
        let Some(root) = &self.root else { return Err(SpawnError::new("cgroup", rustix::io::Errno::NOENT)) };
        let limits = Limits {
            memory_bytes: limits.memory_bytes,
            pids: limits.pids,
            cpu_cores: limits.cpu_millicores.map(|millicores| millicores as f64 / 1000.0),
        };
        root.create_leaf(worker, &limits).map_err(refused)
    }

    /// Creates a group for a worker that already exists, and moves the worker into the group.
    pub(super) fn create_for(
        &mut self,
        worker: u64,
        limits: &CgroupLimits,
        pid: u32,
    ) -> Result<Leaf, SpawnError> {
        let leaf = self.create(worker, limits)?;
        if let Err(failure) = leaf.add_process(pid) {
            self.remove(leaf);
            return Err(SpawnError::new(&format!("cgroup: {}", failure.attempted), failure.errno));
        }
        Ok(leaf)
    }

    /// Removes a group whose processes have all been killed. If the removal fails, [`WorkerGroups::retry_removals`]
    /// tries again.
    pub(super) fn remove(&mut self, leaf: Leaf) {
        if !try_remove(&leaf) {
            self.to_remove.push(leaf);
        }
    }

    /// Repeats the removal of groups that could not be removed earlier, and of groups left by previous keepers. Returns
    /// true if no such groups are left.
    pub(super) fn retry_removals(&mut self) -> bool {
        self.to_remove.retain(|leaf| !try_remove(leaf));
        self.remove_stale();
        self.to_remove.is_empty() && !self.may_have_stale
    }

    fn remove_stale(&mut self) {
        if let (true, Some(root)) = (self.may_have_stale, &self.root) {
            // After an error, gives up on the remaining groups, which belong to previous keepers.
            self.may_have_stale = root.remove_stale_leaves().is_ok_and(|stale| stale.left > 0);
        }
    }
}

/// Tries to remove a group. Returns false if the group still contains processes. Returns true after any other error,
/// because another attempt would not help.
fn try_remove(leaf: &Leaf) -> bool {
    leaf.remove().unwrap_or(true)
}
