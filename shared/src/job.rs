//! Identity, priority and options of a job.

use std::fmt;
use std::time::Duration;

use crate::Vocabulary as _;
use crate::vocabulary::codes;

/// The id of a job, unique within one bulkhead of one supervisor. Outcomes, events, logs, crash reports and
/// the worker's link use this id. [`Display`](fmt::Display) gives its only notation.
///
/// The low 24 bits are an index into the supervisor's job table of the bulkhead, and the other bits count up.
/// So a late reply never matches another job.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct JobId(pub u64);

impl JobId {
    /// Encodes the id as [`tag::JOB`](crate::codec::tag::JOB).
    pub const fn to_bytes(self) -> [u8; 8] {
        self.0.to_le_bytes()
    }

    /// Decodes the id from [`tag::JOB`](crate::codec::tag::JOB).
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        Some(Self(u64::from_le_bytes(bytes.try_into().ok()?)))
    }
}

impl fmt::Debug for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "job-{:x}", self.0)
    }
}

/// Formats the id in hexadecimal digits, the only notation of job numbers for people and programs.
impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

codes! {
    /// Importance of running a job now, lowest first.
    #[derive(Default)]
    Priority {
        /// Shed first.
        BestEffort = 0 "best-effort",
        /// Default for jobs without a priority.
        #[default]
        Normal = 1 "normal",
        /// Shed last.
        Critical = 2 "critical",
    }
}

impl std::str::FromStr for Priority {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::from_word(text)
            .ok_or_else(|| format!("'{text}' is not a priority: write critical, normal or best-effort"))
    }
}

/// The options that a client chooses for a job.
#[derive(Clone, Debug, Default)]
pub struct JobOptions<T> {
    /// Operation for the handler; can be empty.
    pub operation: T,
    /// Tenant; can be empty.
    pub tenant: T,
    /// Time limit from receipt. `None` for the bulkhead's default.
    pub deadline: Option<Duration>,
    /// Maximum run time of each attempt, from dispatch. `None` for the bulkhead's limit.
    pub run_limit: Option<Duration>,
    /// Priority in the queue.
    pub priority: Priority,
    /// Cost of the job against a rate limit; 0 counts as 1.
    pub cost: u32,
    /// True if the job can safely run twice.
    pub is_idempotent: bool,
}
