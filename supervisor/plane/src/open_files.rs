//! The limit of open files: raised as far as it may be, and shared between clients, workers and operators.

use std::sync::Arc;

use bulkhead_config::{BulkheadConfig, Config, StartMode};

/// Descriptors of the supervisor itself, of operators' connections, and for what comes and goes.
const DESCRIPTORS_OWN: u64 = 48;

/// The smallest lease of memory files, in bytes, and what each takes.
const LEASE_BYTES_MIN: u64 = 512 * 1024;
const DESCRIPTORS_PER_LEASE: u64 = 4;

/// A part of the limit, one to so many, may be leases; and another may be lends on their way.
const LIMIT_PER_LEASE: u64 = 16;

/// One in so many open files may be a connection that is closed and holds a lend that its receiver has not read.
pub const LIMIT_PER_UNREAD: u64 = 32;

/// Leases of memory files that there may be at once, with such a limit of open files.
pub fn leases_max(limit: u64, max_pooled: u64) -> u64 {
    (max_pooled / LEASE_BYTES_MIN).min(limit / LIMIT_PER_LEASE)
}

/// Descriptors of a worker: both ends of its link, pidfd, two pipes, its journal; twice, for the one that replaces it.
const DESCRIPTORS_PER_WORKER: u64 = 12;

/// Open files that this process may have.
pub fn limit_in_force() -> u64 {
    rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// A template takes what a worker takes.
fn templates(bulkhead: &BulkheadConfig) -> u64 {
    u64::from(bulkhead.start.mode == StartMode::Fork)
}

/// Open files that this process may have, and those that neither clients nor workers may take up.
#[derive(Clone, Copy, Debug)]
pub struct OpenFiles {
    limit: u64,
    foreign: u64,
    http: u64,
}

impl OpenFiles {
    /// Raises the limit as far as it may be. Each worker takes a handful; workers themselves keep the limit that the
    /// keeper was started with. `foreign` are descriptors of others that may be held at once, `http` those of the
    /// admin API over TCP, where it is served.
    pub fn raise(foreign: u64, http: u64) -> Self {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        let limit = getrlimit(Resource::Nofile);
        // Without the right to raise it, there is what there is; that it is used up is told then.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
        Self::keep(foreign, http)
    }

    /// The same with the limit as it is, which is an application's.
    pub fn keep(foreign: u64, http: u64) -> Self {
        let limit = limit_in_force();
        Self { limit, foreign, http }
    }

    /// Takes no more clients than leave descriptors for workers and operators. The configuration stays the same one where
    /// that is so.
    pub fn leave_room(&self, config: &mut Arc<Config>) {
        let Self { limit, foreign, http } = *self;
        let workers: u64 =
            config.bulkheads.iter().map(|b| b.workers_max() + b.spares_max() + templates(b)).sum();
        let http = if config.supervisor.http.is_some() { http } else { 0 };
        let leases = leases_max(limit, config.supervisor.max_pooled);
        let kept = DESCRIPTORS_OWN
            + http
            + foreign
            + leases * DESCRIPTORS_PER_LEASE
            + if leases > 0 { limit / LIMIT_PER_UNREAD } else { 0 }
            + workers * DESCRIPTORS_PER_WORKER;
        let room = usize::try_from(limit.saturating_sub(kept)).unwrap_or(usize::MAX).max(1);
        if room < config.supervisor.max_clients {
            tracing::warn!(
                "the limit of {limit} open files leaves room for {room} clients, not for max_clients = {}",
                config.supervisor.max_clients
            );
            Arc::make_mut(config).supervisor.max_clients = room;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_is_copied_only_where_it_becomes_another() {
        let text = "[supervisor]\nsocket = '/run/x/jobs.sock'\nmax_clients = 50\nmax_pooled = 0\n\
                    [bulkhead.a]\nexec = ['cat']\n";
        let file = Arc::new(bulkhead_config::parse(text, "/etc/workers.toml".as_ref()).unwrap());
        let taken = DESCRIPTORS_OWN + DESCRIPTORS_PER_WORKER;
        for (room, is_same) in [(50, true), (49, false)] {
            let mut bounded = file.clone();
            OpenFiles { limit: taken + room, foreign: 0, http: 0 }.leave_room(&mut bounded);
            assert_eq!(bounded.supervisor.max_clients as u64, room);
            assert_eq!(Arc::ptr_eq(&bounded, &file), is_same, "{room}");
        }
        assert_eq!(file.supervisor.max_clients, 50);
    }
}
