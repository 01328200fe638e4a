//! What holds for all bulkheads together.

use std::time::Duration;

use bulkhead_config::SupervisorConfig;

/// What all bulkheads share.
pub struct DataPlaneLimits {
    /// Clients that may be connected.
    pub clients_max: usize,
    /// Bytes of a payload.
    pub payload_bytes_max: u64,
    /// The largest payload there ever could be: a result of then may still be on its way.
    pub result_bytes_max: u64,
    /// Bytes of all payloads that wait.
    pub buffered_bytes_max: usize,
    /// Bytes of memory files.
    pub pooled_bytes_max: u64,
    /// How long workers may take to end what they have, when all of it ends.
    pub drain_timeout: Duration,
}

impl DataPlaneLimits {
    /// From the file.
    pub fn new(config: &SupervisorConfig) -> Self {
        Self {
            clients_max: config.max_clients,
            payload_bytes_max: config.max_payload,
            result_bytes_max: config.max_payload,
            buffered_bytes_max: usize::try_from(config.max_buffered).unwrap_or(usize::MAX),
            pooled_bytes_max: config.max_pooled,
            drain_timeout: config.drain_timeout,
        }
    }
}
