//! Ranges of user ids.

use std::fmt;

use serde::Serialize;

/// `worker_uids`: user ids from `first` to `last`, at most 1,000,000. `Display` is as in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct UidRange {
    /// The first, at least 1.
    pub first: u32,
    /// The last, at least `first`, below 4294967295.
    pub last: u32,
}

impl fmt::Display for UidRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}
