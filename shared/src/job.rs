//! What a job is called and how urgent it is.

use std::fmt;

use crate::Vocabulary as _;
use crate::vocabulary::codes;

/// Names one job inside one bulkhead of one supervisor; it appears in outcomes, events, logs, crash reports and on the
/// worker's link, and is written in one way only: that of its [`Display`](fmt::Display).
///
/// The low 24 bits are a place in the supervisor's table of the bulkhead and the rest counts up, so
/// that a reply which comes too late never finds another job under its number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct JobId(pub u64);

impl JobId {
    /// The bytes of [`tag::JOB`](crate::codec::tag::JOB).
    pub const fn to_bytes(self) -> [u8; 8] {
        self.0.to_le_bytes()
    }

    /// The number in those bytes.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        Some(Self(u64::from_le_bytes(bytes.try_into().ok()?)))
    }
}

impl fmt::Debug for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "job-{:x}", self.0)
    }
}

/// The only notation of a job's number, wherever people or programs read it: hexadecimal digits.
impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

codes! {
    /// How much it matters that a job runs now; the lowest first.
    #[derive(Default)]
    Priority {
        /// Shed first.
        BestEffort = 0 "best-effort",
        /// What a client gets that says nothing.
        #[default]
        Normal = 1 "normal",
        /// Shed last.
        Critical = 2 "critical",
    }
}

impl std::str::FromStr for Priority {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::of(text)
            .ok_or_else(|| format!("'{text}' is no priority: write critical, normal or best-effort"))
    }
}
