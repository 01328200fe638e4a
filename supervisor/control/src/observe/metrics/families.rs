//! Every metric: its name, kind, labels, and what it says. The renderer and the documentation take them from
//! here.

/// How the samples of a family are to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Only ever grows; its samples end in `_total`.
    Counter,
    Gauge,
    Histogram,
}

impl Kind {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// One metric with all its label values.
#[derive(Debug)]
pub(super) struct Family {
    /// Without `_total`.
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    pub(super) labels: &'static [&'static str],
    pub(super) help: &'static str,
}

macro_rules! families {
    ($($constant:ident = $kind:ident $name:literal [$($label:literal),*] $help:literal;)*) => {
        $(pub(super) const $constant: Family =
            Family { name: $name, kind: Kind::$kind, labels: &[$($label),*], help: $help };)*

        /// All of them, in the order in which they are told.
        #[cfg(test)]
        pub(super) const ALL: &[&Family] = &[$(&$constant,)*];
    };
}

families! {
    SUBMITTED = Counter "bulkhead_submitted" ["bulkhead", "priority"]
        "Jobs that asked to be taken, whatever became of them.";
    JOBS = Counter "bulkhead_jobs" ["bulkhead", "priority", "outcome"]
        "Jobs by how they ended, where their clients sent them.";
    REJECTED = Counter "bulkhead_rejected" ["bulkhead", "priority", "reason"]
        "Jobs that were not taken, or had to leave the queue, by why.";
    CRASHED = Counter "bulkhead_crashed" ["bulkhead", "reason"]
        "Jobs whose worker or program died, by how.";
    TENANT_JOBS = Counter "bulkhead_tenant_jobs" ["bulkhead", "tenant", "outcome"]
        "The same jobs by tenant; all that have no label of their own are _other.";
    EVICTED = Counter "bulkhead_evicted" ["bulkhead", "tenant"]
        "Jobs that left a full queue for a newer one, where they waited.";
    FALLBACK = Counter "bulkhead_fallback" ["bulkhead", "target", "outcome"]
        "Jobs that were passed on to another bulkhead, by how they ended there.";
    RETRIES = Counter "bulkhead_retries" ["bulkhead"]
        "Jobs given to another worker since their own had died.";
    RESTARTS = Counter "bulkhead_worker_restarts" ["bulkhead", "cause"]
        "Workers that followed another, by what became of the one before.";
    TRANSITIONS = Counter "bulkhead_breaker_transitions" ["bulkhead", "from", "to"]
        "Changes of the breaker's state.";
    LATE_REPLIES = Counter "bulkhead_late_replies" ["bulkhead"]
        "Replies of workers for jobs that were answered already, or that they never had.";
    RELOADS = Counter "bulkhead_config_reloads" ["result"]
        "Attempts to put another configuration in force.";
    ACTIVE = Gauge "bulkhead_active_calls" ["bulkhead"]
        "Jobs that a worker has and a client waits for.";
    LIMIT = Gauge "bulkhead_limit" ["bulkhead"]
        "Jobs that may run at once now: max_in_flight for each worker that is ready.";
    QUEUE_LENGTH = Gauge "bulkhead_queue_length" ["bulkhead"]
        "Jobs that wait.";
    QUEUE_CAPACITY = Gauge "bulkhead_queue_capacity" ["bulkhead"]
        "Jobs that may wait; where tenants are apart, of those that have workers.";
    ELSEWHERE = Gauge "bulkhead_jobs_elsewhere" ["bulkhead"]
        "Jobs that a fallback has now, and whose outcome will count here.";
    GUESTS = Gauge "bulkhead_jobs_guests" ["bulkhead"]
        "Jobs of other bulkheads that are active or queued here as their fallback, and count there.";
    BREAKER = Gauge "bulkhead_breaker_state" ["bulkhead", "state"]
        "1 for the state of the breaker, 0 for all others; of several breakers the one that matters most.";
    STATE = Gauge "bulkhead_state" ["bulkhead", "state"]
        "1 for the state of its workers (starting, ready, degraded, failed, draining), 0 for the others.";
    SERVICE = Gauge "bulkhead_service" ["bulkhead", "state"]
        "1 for how well it serves (ok, degraded, failing: by how the jobs of the last minute ended), 0 for the others.";
    WORKERS = Gauge "bulkhead_workers" ["bulkhead", "state"]
        "Worker processes by what they are doing.";
    WORKER_RSS = Gauge "bulkhead_worker_rss_bytes" ["bulkhead", "slot"]
        "Resident memory of the worker in a slot; 0 if there is none.";
    MEMORY_LIMIT = Gauge "bulkhead_worker_memory_limit_bytes" ["bulkhead"]
        "What a worker may hold: the less of cgroup.memory and recycle.rss. Absent without either.";
    CLIENTS = Gauge "bulkhead_clients" []
        "Connections to the jobs socket.";
    BUILD_INFO = Gauge "bulkhead_build_info" ["version"]
        "1; the version is in the label.";
    LAST_RELOAD = Gauge "bulkhead_config_last_reload_successful" []
        "1 if the configuration that was read last is in force.";
    QUEUE_WAIT = Histogram "bulkhead_queue_wait_seconds" ["bulkhead"]
        "How long jobs that were taken waited, also those that never ran.";
    EXECUTION = Histogram "bulkhead_execution_seconds" ["bulkhead"]
        "How long workers had jobs, all attempts together, until they were answered.";
    DURATION = Histogram "bulkhead_job_duration_seconds" ["bulkhead"]
        "How long jobs that were taken were here, from their arrival to their answer.";
    CPU = Counter "process_cpu_seconds" []
        "Processor time of the supervisor itself, in seconds.";
    OPEN_FDS = Gauge "process_open_fds" []
        "Open descriptors of the supervisor.";
    MAX_FDS = Gauge "process_max_fds" []
        "Descriptors that it may have.";
    VIRTUAL = Gauge "process_virtual_memory_bytes" []
        "Its virtual memory.";
    RESIDENT = Gauge "process_resident_memory_bytes" []
        "Its resident memory.";
    THREADS = Gauge "process_threads" []
        "Its threads.";
    START_TIME = Gauge "process_start_time_seconds" []
        "When it was started, in seconds since 1970.";
}
