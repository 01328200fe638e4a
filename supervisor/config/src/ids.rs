//! Ranges of user ids.

use std::fmt;

use serde::Serialize;

/// `worker_uids`: user ids from `first` to `last`, at most 1,000,000. `Display` uses the format of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct UidRange {
    /// First id, at least 1.
    pub first: u32,
    /// Last id, at least `first` and below 4294967295.
    pub last: u32,
}

impl fmt::Display for UidRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}
