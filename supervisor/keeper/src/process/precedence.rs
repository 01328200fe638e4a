//! Scheduling priority of the keeper: highest while it kills resisting processes, ordinary otherwise.
//!
//! A keeper that kills a fork bomb must not compete with a thousand processes for the processor. A keeper
//! that starts one worker after another for a crashing bulkhead must not delay other processes. Without the
//! necessary privileges, the priority is always ordinary.

use std::fs;

/// Nice value with the highest priority.
const FIRST: i32 = -20;

/// File with the nice value of the keeper's session. With autogroups (a kernel setting), each session has a
/// share of the processor.
const AUTOGROUP: &str = "/proc/self/autogroup";

/// Priority of the keeper's thread.
#[derive(Debug)]
pub(super) struct Precedence {
    usual: i32,
    usual_group: Option<i32>,
    is_taken: bool,
    may_be_taken: bool,
}

impl Precedence {
    /// `usual` is the nice value that the thread has now.
    pub(super) fn new(usual: i32) -> Self {
        let text = fs::read_to_string(AUTOGROUP).unwrap_or_default();
        let usual_group = text.split_whitespace().last().and_then(|nice| nice.parse().ok());
        Self { usual, usual_group, is_taken: false, may_be_taken: true }
    }

    /// Takes the highest priority, if this is permitted.
    pub(super) fn take(&mut self) {
        if self.may_be_taken && !self.is_taken {
            self.may_be_taken = rustix::process::setpriority_process(None, FIRST).is_ok();
            self.is_taken = self.may_be_taken;
            self.weigh(FIRST);
        }
    }

    /// Restores the usual priority.
    pub(super) fn give_back(&mut self) {
        if self.is_taken {
            self.is_taken = false;
            // Lowering the priority is always permitted.
            let _ = rustix::process::setpriority_process(None, self.usual);
            self.usual_group.into_iter().for_each(|usual| self.weigh(usual));
        }
    }

    fn weigh(&self, nice: i32) {
        if self.may_be_taken && self.usual_group.is_some() {
            let _ = fs::write(AUTOGROUP, nice.to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_is_given_back() {
        // Affects only this thread. Without the privilege nothing changes.
        let nice = || rustix::process::getpriority_process(None).unwrap();
        let group = || fs::read_to_string(AUTOGROUP).unwrap_or_default();
        let (before, group_before) = (nice(), group());
        let mut precedence = Precedence::new(before);
        precedence.take();
        precedence.take();
        if precedence.is_taken {
            assert_eq!(nice(), FIRST);
        }
        assert!(precedence.is_taken || nice() == before);
        precedence.give_back();
        precedence.give_back();
        assert_eq!((nice(), group()), (before, group_before));
    }
}
