//! Determines the resource limits for the workers of a bulkhead. Adds defaults for confined workers to the configured
//! limits, where neither `rlimits` nor `cgroup` sets a limit. The defaults keep a single worker from exhausting shared
//! resources. The forked child applies the limits.

use rustix::process::getrlimit;

use crate::confinement::Sandbox;
use bulkhead_config::{BulkheadConfig, Resource, Rlimit};

/// Returns the resource limits for a bulkhead's workers: the configured limits, and defaults for other resources. A
/// default is reduced to the supervisor's own hard limit, because a child process cannot raise that limit.
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
