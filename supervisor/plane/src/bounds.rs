//! What confined workers are held to unless `rlimits` and `cgroup` say otherwise: numbers that honest programs do
//! not notice, and that keep one worker from using up what all share.

use rustix::process::getrlimit;

use crate::confinement::Sandbox;
use bulkhead_config::defaults::{RLIMIT_FSIZE_BYTES, RLIMIT_NPROC};
use bulkhead_config::{BulkheadConfig, Profile, Resource, Rlimit};

/// The limits of a bulkhead's workers: those of the file, and ours where it has none. Never more than the
/// supervisor's own, which it could not give.
pub fn rlimits(bulkhead: &BulkheadConfig, sandbox: &Sandbox) -> Vec<Rlimit> {
    let mut rlimits = bulkhead.rlimits.clone();
    if bulkhead.sandbox.profile == Profile::None {
        return rlimits;
    }
    let is_free = |resource| bulkhead.rlimits.iter().all(|rlimit| rlimit.resource != resource);
    let mut add = |resource: Resource, limit: u64| {
        if is_free(resource) {
            let most = getrlimit(resource.kernel()).maximum.unwrap_or(u64::MAX);
            rlimits.push(Rlimit { resource, limit: Some(limit.min(most)) });
        }
    };
    add(Resource::Fsize, RLIMIT_FSIZE_BYTES);
    if sandbox.counts_its_processes() {
        add(Resource::Nproc, RLIMIT_NPROC);
    }
    rlimits
}
