//! Ranges of user ids.

use std::fmt;

use serde::Serialize;

/// The range of user ids in the key `worker_uids`, at most 1,000,000 ids. `Display` writes the range as in
/// the file.
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
