//! What the limits of a bulkhead should be, from what was seen of it: pure rules on plain numbers, each with the
//! sentence that says why. It looks at nothing itself and changes nothing.

mod adaptive;
mod rules;
mod seen;
#[cfg(test)]
mod tests;

use std::time::Duration;

use serde::{Serialize, Serializer};

use bulkhead_config::{format_duration, format_size};

use bulkhead_api::Adaptive;
pub(crate) use bulkhead_api::Seen;
pub(crate) use seen::{Work, seen};

/// Jobs and time that are enough to rely on.
pub(crate) const ENOUGH_JOBS: u64 = 1000;
pub(crate) const ENOUGH_TIME: Duration = Duration::from_secs(600);

/// With fewer jobs nothing is said at all.
pub(crate) const PROVISIONAL_JOBS: u64 = 100;

/// What has not been needed for so long is too much.
pub(crate) const SHRINK_AFTER: Duration = Duration::from_secs(3600);

/// What the bulkhead is, beside what was seen of it. Where tenants are apart, the numbers are each tenant's.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) processes: u32,
    pub(crate) max_in_flight: u32,
    pub(crate) max_queue: u32,
    pub(crate) queue_timeout: Option<Duration>,
    pub(crate) deadline: Duration,
    pub(crate) deadline_max: Duration,
    /// The limit that follows how long jobs take, if there is one.
    pub(crate) adaptive: Option<Adaptive>,
    /// How many tenants may have workers at once, if they are apart; else 1.
    pub(crate) sets_of_workers: u32,
    /// Spares of each of them.
    pub(crate) spares: u32,
    /// Bytes, where that is set.
    pub(crate) cgroup_memory: Option<u64>,
    /// Whether anything else bounds what a worker holds: `recycle.rss`, `rlimits.as` or `rlimits.data`.
    pub(crate) is_memory_bounded: bool,
}

impl Setup {
    /// Jobs in flight at most.
    fn permits(&self) -> u64 {
        u64::from(self.processes) * u64::from(self.max_in_flight)
    }
}

/// What there is to have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Machine {
    pub(crate) processors: u32,
    pub(crate) memory_bytes: Option<u64>,
}

/// The value of a key.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub(crate) enum Setting {
    #[default]
    Unset,
    Count(u64),
    Time(Duration),
    Bytes(u64),
}

impl Serialize for Setting {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Unset => serializer.serialize_none(),
            Self::Count(count) => serializer.serialize_u64(*count),
            Self::Time(time) => serializer.serialize_str(&format_duration(*time)),
            Self::Bytes(bytes) => serializer.serialize_str(&format_size(*bytes)),
        }
    }
}

/// All that there is to say.
pub(crate) type Advice = bulkhead_api::Advice<Setting>;
pub(crate) type Proposal = bulkhead_api::Proposal<Setting>;
pub(crate) type Kept = bulkhead_api::Kept<Setting>;

/// What follows from what was seen.
pub(crate) fn advise(bulkhead: String, seen: Seen, setup: &Setup, machine: &Machine) -> Advice {
    let missing = seen::missing(&seen);
    let (advice, kept) = match seen.jobs >= PROVISIONAL_JOBS {
        true => rules::judge(&seen, setup, machine),
        false => Default::default(),
    };
    let watched_ms = u64::try_from(seen.watched.as_millis()).unwrap_or(u64::MAX);
    Advice { bulkhead, watched_ms, jobs: seen.jobs, enough: missing.is_none(), missing, seen, advice, kept }
}
