//! Default resource limits for confined workers, where `rlimits` and `cgroup` set none. They are high enough
//! for well-behaved programs, and keep one worker from exhausting shared resources.

use rustix::process::getrlimit;

use crate::confinement::Sandbox;
use bulkhead_config::{BulkheadConfig, Resource, Rlimit};

/// Returns the limits of a bulkhead's workers: the configured ones, and defaults for the rest. Defaults never
/// exceed the supervisor's own hard limits, because a child cannot raise those.
pub fn for_workers(bulkhead: &BulkheadConfig, sandbox: &Sandbox) -> Vec<Rlimit> {
    let mut rlimits = bulkhead.rlimits.clone();
    for Rlimit { resource, limit } in bulkhead.sandbox_rlimits() {
        if resource == Resource::Nproc && !sandbox.limits_process_count() {
            continue;
        }
        let max = getrlimit(resource.to_rustix()).maximum.unwrap_or(u64::MAX);
        rlimits.push(Rlimit { resource, limit: limit.map(|limit| limit.min(max)) });
    }
    rlimits
}
