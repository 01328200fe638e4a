//! What holds for all bulkheads together.

use std::time::Duration;

use crate::config::SupervisorConfig;

/// What all bulkheads share.
pub(crate) struct DataPlaneLimits {
    /// Clients that may be connected.
    pub(crate) clients_max: usize,
    /// Bytes of a payload.
    pub(crate) payload_bytes_max: u64,
    /// The largest payload there ever could be: a result of then may still be on its way.
    pub(crate) result_bytes_max: u64,
    /// Bytes of all payloads that wait.
    pub(crate) buffered_bytes_max: usize,
    /// How long workers may take to end what they have, when all of it ends.
    pub(crate) drain_timeout: Duration,
}

impl DataPlaneLimits {
    /// From the file.
    pub(crate) fn new(config: &SupervisorConfig) -> Self {
        Self {
            clients_max: config.max_clients,
            payload_bytes_max: config.max_payload,
            result_bytes_max: config.max_payload,
            buffered_bytes_max: usize::try_from(config.max_buffered).unwrap_or(usize::MAX),
            drain_timeout: config.drain_timeout,
        }
    }
}
