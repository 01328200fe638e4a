//! Defines the ID, the priority and the options of a job, and the text form of an ID and a priority. Clients, the
//! supervisor and workers share these types. The messages that contain the options are in `client_protocol` and
//! `worker_protocol`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::Vocabulary as _;
use crate::vocabulary::codes;

/// Job ID, unique within one supervisor. Used in outcomes, events, logs and crash reports, and on the worker's link.
/// [`Display`](fmt::Display) defines the text form.
///
/// The low 24 bits are an index into the job table of the bulkhead that first accepted the job. The other bits are a
/// sequence number, so that a late reply never matches another job. A fallback does not change the ID.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct JobId(pub u64);

impl JobId {
    /// Encodes the ID as the value of the [`tag::JOB`](crate::codec::tag::JOB) extension.
    pub const fn to_bytes(self) -> [u8; 8] {
        self.0.to_le_bytes()
    }

    /// Decodes a job ID from the value of the [`tag::JOB`](crate::codec::tag::JOB) extension. Returns `None` if the
    /// length is wrong.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        Some(Self(u64::from_le_bytes(bytes.try_into().ok()?)))
    }
}

impl fmt::Debug for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "job-{:x}", self.0)
    }
}

/// Formats the ID in hexadecimal. All human-readable and machine-readable output uses this format.
impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

/// Error for text that is not a valid job ID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidJobId;

impl fmt::Display for InvalidJobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("this is not a job ID; a job ID consists of up to 16 hexadecimal digits")
    }
}

impl std::error::Error for InvalidJobId {}

impl FromStr for JobId {
    type Err = InvalidJobId;

    fn from_str(text: &str) -> Result<Self, InvalidJobId> {
        // Checks the characters separately, because the standard library's parser also accepts a plus sign.
        if !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(InvalidJobId);
        }
        u64::from_str_radix(text, 16).map(Self).map_err(|_| InvalidJobId)
    }
}

codes! {
    /// Priority of a job. The variants are ordered from the lowest to the highest priority.
    #[derive(Default)]
    Priority {
        /// Jobs of this priority are shed first.
        BestEffort = 0 "best-effort",
        /// Default priority if the client does not set one.
        #[default]
        Normal = 1 "normal",
        /// Jobs of this priority are shed last.
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
    /// Operation that the handler performs, possibly empty.
    pub operation: T,
    /// Tenant that the job belongs to. Empty if the job has no tenant.
    pub tenant: T,
    /// Time limit for the job, measured from receipt. `None` selects the bulkhead's default.
    pub deadline: Option<Duration>,
    /// Maximum run time of each attempt, measured from dispatch. `None` selects the bulkhead's limit.
    pub run_limit: Option<Duration>,
    /// Priority of the job in the queue.
    pub priority: Priority,
    /// Cost of the job for rate limiting. An ordinary job costs 1. A value of 0 is treated as 1.
    pub cost: u32,
    /// True if the job can safely run twice.
    pub is_idempotent: bool,
}

/// Parses a number in a header of a job. Accepts only digits, whereas [`FromStr`] also accepts a leading `+`.
pub fn header_number<N: FromStr>(value: &str) -> Option<N> {
    value.bytes().all(|byte| byte.is_ascii_digit()).then(|| value.parse().ok()).flatten()
}
