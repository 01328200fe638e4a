//! The keeper's turn at the processor: before all others while it ends what resists, like others' otherwise.
//!
//! A keeper that ends a fork bomb must not wait for its turn behind a thousand processes. A keeper that starts one
//! worker after the other for a bulkhead that crashes must not be in the way of other processes. Where privileges are
//! missing, the keeper takes its turn like others all the time.

use std::fs;

/// The nice value that comes before all others.
const FIRST: i32 = -20;

/// With autogroups (a setting of the kernel's) each session has a share, and this file says what ours weighs.
const AUTOGROUP: &str = "/proc/self/autogroup";

/// Whether the keeper's thread goes before others, if it may.
#[derive(Debug)]
pub(super) struct Precedence {
    usual: i32,
    usual_group: Option<i32>,
    is_taken: bool,
    may_be_taken: bool,
}

impl Precedence {
    /// Of a thread whose nice value is this.
    pub(super) fn new(usual: i32) -> Self {
        let text = fs::read_to_string(AUTOGROUP).unwrap_or_default();
        let usual_group = text.split_whitespace().last().and_then(|nice| nice.parse().ok());
        Self { usual, usual_group, is_taken: false, may_be_taken: true }
    }

    /// Goes before all others from here on.
    pub(super) fn take(&mut self) {
        if self.may_be_taken && !self.is_taken {
            self.may_be_taken = rustix::process::setpriority_process(None, FIRST).is_ok();
            self.is_taken = self.may_be_taken;
            self.weigh(FIRST);
        }
    }

    /// Waits for its turn again.
    pub(super) fn give_back(&mut self) {
        if self.is_taken {
            self.is_taken = false;
            // To take less is never refused.
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
        // Of this thread alone; without the privilege nothing happens at all.
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
