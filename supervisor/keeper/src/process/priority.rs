//! Scheduling priority of the keeper. The priority is raised while the keeper kills processes.
//!
//! A keeper that kills a fork bomb must not compete with a thousand processes for the processor. A keeper that starts
//! one worker after another for a crashing bulkhead must not delay other processes, so such a keeper runs at normal
//! priority. Without the necessary privileges, the priority never changes.

use std::fs;

/// Nice value that gives a process the highest priority.
const HIGHEST: i32 = -20;

/// File that contains the nice value of the keeper's session. With the kernel's autogroup setting, processor time is
/// divided among sessions by their nice values.
const AUTOGROUP: &str = "/proc/self/autogroup";

/// Raises and restores the scheduling priority of the keeper's thread.
#[derive(Debug)]
pub(super) struct PriorityBoost {
    normal: i32,
    normal_group: Option<i32>,
    is_raised: bool,
    can_be_raised: bool,
}

impl PriorityBoost {
    /// Creates the state for a keeper at normal priority. `normal` is the current nice value of the thread.
    pub(super) fn new(normal: i32) -> Self {
        let text = fs::read_to_string(AUTOGROUP).unwrap_or_default();
        let normal_group = text.split_whitespace().last().and_then(|nice| nice.parse().ok());
        Self { normal, normal_group, is_raised: false, can_be_raised: true }
    }

    /// Gives the keeper the highest priority. Does nothing if the keeper lacks the privileges.
    pub(super) fn raise(&mut self) {
        if self.can_be_raised && !self.is_raised {
            self.can_be_raised = rustix::process::setpriority_process(None, HIGHEST).is_ok();
            self.is_raised = self.can_be_raised;
            self.set_autogroup_nice(HIGHEST);
        }
    }

    pub(super) fn restore(&mut self) {
        if self.is_raised {
            self.is_raised = false;
            // Lowering the priority is always permitted.
            let _ = rustix::process::setpriority_process(None, self.normal);
            self.normal_group.into_iter().for_each(|normal| self.set_autogroup_nice(normal));
        }
    }

    fn set_autogroup_nice(&self, nice: i32) {
        if self.can_be_raised && self.normal_group.is_some() {
            let _ = fs::write(AUTOGROUP, nice.to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn raised_keeper_priority_is_restored() {
        // The test changes the priority only if it has the necessary privilege, and only for the thread that runs the
        // test.
        let nice = || rustix::process::getpriority_process(None).unwrap();
        let group = || fs::read_to_string(AUTOGROUP).unwrap_or_default();
        let (before, group_before) = (nice(), group());
        let mut priority = PriorityBoost::new(before);
        priority.raise();
        priority.raise();
        if priority.is_raised {
            assert_eq!(nice(), HIGHEST);
        }
        assert!(priority.is_raised || nice() == before);
        priority.restore();
        priority.restore();
        assert_eq!((nice(), group()), (before, group_before));
    }
}
