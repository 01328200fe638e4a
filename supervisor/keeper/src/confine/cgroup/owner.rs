//! Identifies the keeper process that created a leaf, which is the control group of one worker. The leaf's name
//! contains this identity, so that a later keeper can recognise the leaves of a dead keeper. `cgroup` finds and removes
//! such leaves.

use bulkhead_linux::process_tree;
use rustix::io::Errno;

use super::{Failure, failure};

const PREFIX: &str = "bulkhead";

/// Identity of a process. Remains unique even if the PID is reused, or if a process in another PID namespace has the
/// same PID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owner {
    /// Inode of the PID namespace.
    pub(super) namespace: u64,
    pub(super) pid: u32,
    /// Start time of the process, in clock ticks since boot.
    pub(super) started: u64,
}

impl Owner {
    pub(super) fn this_process() -> Result<Self, Failure> {
        let pid = std::process::id();
        let namespace = rustix::fs::stat("/proc/self/ns/pid")
            .map_err(|errno| failure("inspect /proc/self/ns/pid".into(), errno))?;
        let started = process_tree::start_time(pid)
            .ok_or_else(|| failure(format!("read the start time from /proc/{pid}/stat"), Errno::SRCH))?;
        Ok(Self { namespace: namespace.st_ino, pid, started })
    }

    /// Returns the name of the leaf group that this keeper creates for `worker`.
    pub(super) fn leaf_name(&self, worker: u64) -> String {
        let Self { namespace, pid, started } = self;
        format!("{PREFIX}-{namespace}-{pid}-{started}-{worker}")
    }

    /// Returns the keeper that created the leaf group `name`, or `None` if `name` is not the name of a leaf group.
    pub(super) fn from_leaf_name(name: &str) -> Option<Self> {
        let mut parts = name.strip_prefix(PREFIX)?.strip_prefix('-')?.split('-');
        let namespace = parts.next()?.parse().ok()?;
        let (pid, started) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        let worker = parts.next()?.parse().ok()?;
        let owner = Self { namespace, pid, started };
        // Rejects names with additional parts, or with numbers in another format.
        (owner.leaf_name(worker) == name).then_some(owner)
    }

    /// Returns true if `other` is known to have exited. Returns false if `other` is in another PID namespace, because
    /// its state is not visible from this process.
    pub(super) fn outlived(&self, other: &Self) -> bool {
        other.namespace == self.namespace && !process_tree::is_alive(other.pid, other.started)
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn cgroup_leaf_name_identifies_its_keeper() {
        let owner = Owner { namespace: 4026531836, pid: 17, started: 42 };
        let name = owner.leaf_name(3);
        assert_eq!(name, "bulkhead-4026531836-17-42-3");
        assert_eq!(Owner::from_leaf_name(&name), Some(owner));
        for other in [
            "bulkhead-main",
            "bulkhead-probe-17",
            "bulkhead-1-17-42",
            "bulkhead-1-17-42-3-4",
            "bulkhead-1-17-42-+3",
            "bulkhead-1-017-42-3",
            "bulkhead-1--17-42-3",
            "bulkhead-1-17-42-3.scope",
            "xbulkhead-1-17-42-3",
            "bulkhead",
            "",
        ] {
            assert_eq!(Owner::from_leaf_name(other), None, "{other}");
        }
    }

    #[test]
    fn only_dead_keepers_in_same_namespace_are_stale() {
        let own = Owner::this_process().unwrap();
        assert!(!own.outlived(&own));
        assert!(own.outlived(&Owner { started: own.started + 1, ..own }), "the pid was reused");
        assert!(own.outlived(&Owner { pid: u32::MAX, ..own }));
        assert!(!own.outlived(&Owner { pid: u32::MAX, namespace: own.namespace + 1, ..own }));
    }

    #[test]
    fn unreaped_keeper_counts_as_dead() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let own = Owner::this_process().unwrap();
        let started = process_tree::start_time(child.id()).unwrap();
        let other = Owner { pid: child.id(), started, ..own };
        assert!(!own.outlived(&other));
        child.kill().unwrap();
        let until = Instant::now() + Duration::from_secs(60);
        while !own.outlived(&other) {
            assert!(Instant::now() < until, "the killed process does not count as dead");
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(own.outlived(&other));
    }
}
