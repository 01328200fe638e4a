//! The limits of the data plane that all bulkheads share, copied from the configuration. A reload replaces them. The
//! data plane enforces them, and `bulkhead_policy::Limits` contains the limits of a single bulkhead.

use std::time::Duration;

use bulkhead_config::SupervisorConfig;

/// Memory in bytes that a job needs in addition to its payload, such as for its record, names and buffers, and for the
/// unused part of the last segment of a payload that arrives in chunks (256 KiB).
const JOB_RECORD_BYTES_MAX: u64 = (64 + 256) << 10;

/// Limits of the data plane that are shared by all bulkheads.
pub struct DataPlaneLimits {
    /// Maximum number of connected clients.
    pub clients_max: usize,
    /// Maximum size of a payload, in bytes.
    pub payload_bytes_max: u64,
    /// Highest `max_payload` since the supervisor started, in bytes. Needed because results accepted under an earlier,
    /// higher limit may not have reached their clients yet.
    pub result_bytes_max: u64,
    /// Maximum total size of waiting payloads, in bytes.
    pub buffered_bytes_max: usize,
    /// Maximum total size of memory files, in bytes.
    pub pooled_bytes_max: u64,
    /// Maximum time that a stopping supervisor waits for jobs in flight.
    pub drain_timeout: Duration,
}

impl DataPlaneLimits {
    /// Creates the limits from the configuration.
    pub fn new(config: &SupervisorConfig) -> Self {
        // A job of the maximum size must fit even if `max_buffered` is not above `max_payload`.
        let largest_job = config.max_payload.saturating_add(JOB_RECORD_BYTES_MAX);
        Self {
            clients_max: config.max_clients,
            payload_bytes_max: config.max_payload,
            result_bytes_max: config.max_payload,
            buffered_bytes_max: usize::try_from(config.max_buffered.max(largest_job)).unwrap_or(usize::MAX),
            pooled_bytes_max: config.max_pooled,
            drain_timeout: config.drain_timeout,
        }
    }
}
