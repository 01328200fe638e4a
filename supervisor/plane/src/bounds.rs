//! What confined workers are held to unless `rlimits` and `cgroup` say otherwise: numbers that honest programs do
//! not notice, and that keep one worker from using up what all share.

use rustix::process::getrlimit;

use crate::confinement::Sandbox;
use bulkhead_config::{BulkheadConfig, Resource, Rlimit};

/// The limits of a bulkhead's workers: those of the file, and ours where it has none. Never more than the
/// supervisor's own, which it could not give.
pub fn rlimits(bulkhead: &BulkheadConfig, sandbox: &Sandbox) -> Vec<Rlimit> {
    let mut rlimits = bulkhead.rlimits.clone();
    for Rlimit { resource, limit } in bulkhead.sandbox_rlimits() {
        if resource == Resource::Nproc && !sandbox.counts_its_processes() {
            continue;
        }
        let most = getrlimit(resource.kernel()).maximum.unwrap_or(u64::MAX);
        rlimits.push(Rlimit { resource, limit: limit.map(|limit| limit.min(most)) });
    }
    rlimits
}
