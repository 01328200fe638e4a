//! Divides the limit on open files (`RLIMIT_NOFILE`) among clients, workers and operators. Raises the limit when a
//! standalone supervisor starts, and lowers `max_clients` if the limit is too low. The data plane enforces the
//! resulting maximum numbers.

use std::sync::Arc;

use bulkhead_config::{BulkheadConfig, Config, StartMode, SupervisorConfig};

/// Number of descriptors reserved for the supervisor itself, for operator connections, and for short-lived files.
const DESCRIPTORS_OWN: u64 = 48;

/// Minimum total size of the memory files in a lease, in bytes.
const LEASE_BYTES_MIN: u64 = 512 * 1024;

/// Number of descriptors that a lease needs.
const DESCRIPTORS_PER_LEASE: u64 = 4;

/// Ratio of the limit on open files to the maximum number of leases. Loans that workers have not received yet have the
/// same maximum.
const LIMIT_PER_LEASE: u64 = 16;

/// Ratio of the limit on open files to the maximum number of closed connections with an unread loan. As long as the
/// peer has not read the loan, such a connection still holds the loan's descriptors.
pub const LIMIT_PER_UNREAD: u64 = 32;

/// Returns the maximum number of memory file leases. `limit` is the limit on open files.
pub fn leases_max(limit: u64, max_pooled: u64) -> u64 {
    (max_pooled / LEASE_BYTES_MIN).min(limit / LIMIT_PER_LEASE)
}

/// Number of descriptors to reserve for each worker: both ends of the link, the pidfd, two pipes and the journal, all
/// counted twice because a replacement starts before the old worker exits.
const DESCRIPTORS_PER_WORKER: u64 = 12;

pub fn current_limit() -> u64 {
    rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Returns the highest limit that this process can set.
pub(crate) fn hard_limit() -> u64 {
    rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum.unwrap_or(u64::MAX)
}

/// Returns the number of template processes of a bulkhead. A template needs as many descriptors as a worker.
fn templates(bulkhead: &BulkheadConfig) -> u64 {
    u64::from(bulkhead.start.mode == StartMode::Fork)
}

/// Limit on open files. Also stores the numbers of descriptors reserved for files received from peers and for HTTP over
/// TCP.
#[derive(Clone, Copy, Debug)]
pub struct OpenFiles {
    limit: u64,
    foreign: u64,
    http: fn(&SupervisorConfig) -> u64,
}

impl OpenFiles {
    /// Raises the soft limit to the hard limit. Workers keep the limit that applied when the keeper started. `foreign`
    /// is the maximum number of descriptors from peers that the supervisor holds at the same time. `http` returns the
    /// maximum number of descriptors that HTTP over TCP uses.
    pub fn raise(foreign: u64, http: fn(&SupervisorConfig) -> u64) -> Self {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        let limit = getrlimit(Resource::Nofile);
        // An error is ignored, because `lower_max_clients` logs a warning if the limit is too low.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
        Self::keep(foreign, http)
    }

    /// Keeps the current limit on open files. An embedded supervisor must not change the limit of the application.
    pub fn keep(foreign: u64, http: fn(&SupervisorConfig) -> u64) -> Self {
        let limit = current_limit();
        Self { limit, foreign, http }
    }

    /// Lowers `max_clients` if necessary, so that there are always enough descriptors for workers and operators. Clones
    /// the configuration only if the value changes.
    pub fn lower_max_clients(&self, config: &mut Arc<Config>) {
        let Self { limit, foreign, http } = *self;
        let workers: u64 =
            config.bulkheads.iter().map(|b| b.workers_max() + b.spares_max() + templates(b)).sum();
        let http = http(&config.supervisor);
        let leases = leases_max(limit, config.supervisor.max_pooled);
        let reserved = DESCRIPTORS_OWN
            + http
            + foreign
            + leases * DESCRIPTORS_PER_LEASE
            + if leases > 0 { limit / LIMIT_PER_UNREAD } else { 0 }
            + workers * DESCRIPTORS_PER_WORKER;
        let available = usize::try_from(limit.saturating_sub(reserved)).unwrap_or(usize::MAX).max(1);
        if available < config.supervisor.max_clients {
            tracing::warn!(
                "the limit of {limit} open files is enough for {available} clients, not for max_clients = {}; raise \
                 the limit",
                config.supervisor.max_clients
            );
            Arc::make_mut(config).supervisor.max_clients = available;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_configuration_only_if_max_clients_changes() {
        let text = "[supervisor]\nsocket = '/run/x/jobs.sock'\nmax_clients = 50\nmax_pooled = 0\n\
                    [bulkhead.a]\nexec = ['cat']\n";
        let file = Arc::new(bulkhead_config::parse(text, "/etc/workers.toml".as_ref()).unwrap());
        let used = DESCRIPTORS_OWN + DESCRIPTORS_PER_WORKER;
        for (available, is_same) in [(50, true), (49, false)] {
            let mut bounded = file.clone();
            OpenFiles { limit: used + available, foreign: 0, http: |_| 0 }.lower_max_clients(&mut bounded);
            assert_eq!(bounded.supervisor.max_clients as u64, available);
            assert_eq!(Arc::ptr_eq(&bounded, &file), is_same, "{available}");
        }
        assert_eq!(file.supervisor.max_clients, 50);
    }
}
