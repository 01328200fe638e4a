//! Defines the data that a forked child's steps need. `forker` collects the data before the fork, because the child
//! must not allocate memory. `prepared` contains the part that depends on the order, and `steps` contains the steps.

use std::ffi::c_char;

use rustix::process::Pid;

use super::prepared::Prepared;
use crate::protocol::confinement::{Identity, Layers, Namespaces};

/// Data that the child's steps need. Borrows everything that was prepared before the fork.
pub(super) struct Plan<'p> {
    pub(super) prepared: &'p Prepared,
    pub(super) arguments: Vec<*const c_char>,
    pub(super) environment: Vec<*const c_char>,
    pub(super) keeper: Pid,
    /// User and group of the keeper.
    pub(super) keeper_identity: Identity,
    pub(super) original: OriginalSettings,
}

impl Plan<'_> {
    pub(super) fn layers(&self) -> &Layers {
        &self.prepared.confinement.layers
    }

    /// Returns the namespaces to create when forking. A user namespace can also be created later.
    pub(super) fn fork_namespaces(&self) -> Namespaces {
        let wanted = self.layers().namespaces;
        Namespaces { user: wanted.user && !self.prepared.confinement.makes_root_first(), ..wanted }
    }
}

/// Scheduling and memory settings that the keeper had when it was started.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OriginalSettings {
    /// Nice value with which the keeper was started, and with which workers run.
    pub(crate) nice: i32,
    /// Out-of-memory settings for workers.
    pub(crate) oom: OomSettings,
    /// Soft limit and hard limit on open files.
    pub(crate) open_files: (u64, u64),
}

/// Settings that influence which processes the kernel kills when memory runs out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OomSettings {
    /// True if a negative out-of-memory score protects the supervisor. Workers must not inherit this score.
    pub(crate) is_protected: bool,
    /// `oom_score_adj` of workers.
    pub(crate) worker_score: i32,
}
