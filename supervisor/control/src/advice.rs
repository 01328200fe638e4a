//! Recommends limits for a bulkhead, based on observed demand. Each recommendation includes a sentence that gives the
//! reason. The module consists of pure functions that perform no I/O and change no settings. `control::advice` collects
//! the input and serves the result over HTTP.

mod adaptive;
mod observations;
mod rules;
#[cfg(test)]
mod tests;

use std::time::Duration;

use serde::{Serialize, Serializer};

use bulkhead_config::{format_duration, format_size};

use bulkhead_api::Adaptive;
pub(crate) use bulkhead_api::Observations;
pub(crate) use observations::{ResourceUsage, observations};

/// Minimum number of jobs and minimum observation time for reliable advice.
pub(crate) const SUFFICIENT_JOBS: u64 = 1000;
pub(crate) const SUFFICIENT_TIME: Duration = Duration::from_secs(600);

/// Minimum number of observed jobs before any advice is given.
pub(crate) const PROVISIONAL_JOBS: u64 = 100;

/// Minimum observation time before the advice proposes a lower value.
pub(crate) const LOWER_AFTER: Duration = Duration::from_secs(3600);

/// Current settings of a bulkhead. If tenants are isolated, each limit applies to every tenant separately.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) processes: u32,
    pub(crate) max_in_flight: u32,
    pub(crate) max_queue: u32,
    pub(crate) queue_timeout: Option<Duration>,
    pub(crate) deadline: Duration,
    pub(crate) deadline_max: Duration,
    /// True if the configuration sets `deadline_max`. Otherwise, `deadline_max` equals `deadline`.
    pub(crate) has_deadline_max: bool,
    /// Lowest permitted value of `deadline_max`, which is the higher of `run_limit` and `adaptive.target`.
    pub(crate) deadline_max_least: Duration,
    /// State of the adaptive limit. `None` if no adaptive limit is configured.
    pub(crate) adaptive: Option<Adaptive>,
    /// Highest permitted value of `adaptive.max`. A higher value would exceed the number of permits of a tenant.
    pub(crate) adaptive_ceiling: u64,
    /// Number of sets of workers that can exist at the same time. This is `tenants.max_active` if tenants are
    /// isolated, otherwise 1.
    pub(crate) worker_sets: u32,
    /// Number of spare workers in each set of workers.
    pub(crate) spares: u32,
    /// Value of the `cgroup.memory` key, in bytes.
    pub(crate) cgroup_memory: Option<u64>,
    /// True if `recycle.rss`, `rlimits.as` or `rlimits.data` limits the memory of a worker.
    pub(crate) has_memory_limit: bool,
}

impl Settings {
    /// Returns the number of permits, which is the maximum number of jobs in flight.
    fn permits(&self) -> u64 {
        u64::from(self.processes) * u64::from(self.max_in_flight)
    }
}

/// Resources of this machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Machine {
    pub(crate) processors: u32,
    pub(crate) memory_bytes: Option<u64>,
}

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

/// Advice about all limits of one bulkhead.
pub(crate) type Advice = bulkhead_api::Advice<Setting>;
pub(crate) type Proposal = bulkhead_api::Proposal<Setting>;
pub(crate) type Kept = bulkhead_api::Kept<Setting>;

/// Computes advice for a bulkhead from the observations in `seen`.
pub(crate) fn advise(bulkhead: String, seen: Observations, settings: &Settings, machine: &Machine) -> Advice {
    let missing = observations::missing(&seen);
    let (advice, kept) = match seen.jobs >= PROVISIONAL_JOBS {
        true => rules::advise(&seen, settings, machine),
        false => Default::default(),
    };
    let watched_ms = u64::try_from(seen.watched.as_millis()).unwrap_or(u64::MAX);
    Advice { bulkhead, watched_ms, jobs: seen.jobs, enough: missing.is_none(), missing, seen, advice, kept }
}
