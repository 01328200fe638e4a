//! Defines a range of user IDs, which is the value of the `worker_uids` key. `values` parses and checks the range. The
//! `plane` crate allocates IDs from the range to workers.

use std::fmt;

use serde::Serialize;

/// Range of at most 1,000,000 user IDs, from the `worker_uids` key. `Display` uses the format of the configuration
/// file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct UidRange {
    /// First ID, at least 1.
    pub first: u32,
    /// Last ID, at least `first` and below 4294967295.
    pub last: u32,
}

impl fmt::Display for UidRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}
