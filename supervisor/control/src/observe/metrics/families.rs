//! Table of all metrics: name, kind, labels, help text and source. The renderer and the documentation use
//! this table.

use bulkhead_plane::scrape::BulkheadNumbers;

use super::itself::Own;
use super::text::{Head, Kind, Page};
use super::{Moment, write_histogram};

/// A metric with all its label values.
#[derive(Debug)]
pub(super) struct Family {
    pub(super) head: Head,
    pub(super) numbers: Numbers,
}

/// Source of a family's samples.
#[derive(Clone, Copy, Debug)]
pub(super) enum Numbers {
    /// A sample for each bulkhead.
    Each(fn(&BulkheadNumbers) -> u64),
    /// A sample for some of the bulkheads.
    Maybe(fn(&BulkheadNumbers) -> Option<u64>),
    /// Several samples for each bulkhead.
    Of(fn(&mut Page, &BulkheadNumbers)),
    /// Samples of the supervisor.
    All(fn(&mut Page, &Moment<'_>)),
    /// A sample from `/proc` about the supervisor's process, if available.
    Process(fn(&Own) -> Option<f64>),
}

/// Declares the families, one row each: kind, name, labels, source and help text.
macro_rules! families {
    ($($kind:ident $name:literal [$($label:literal),*] $numbers:ident $from:expr, $help:literal;)*) => {
        /// All families, in the order of the output.
        pub(super) static ALL: &[Family] = &[$(Family {
            head: Head { name: $name, kind: Kind::$kind, labels: &[$($label),*], help: $help },
            numbers: Numbers::$numbers($from),
        },)*];
    };
}

families! {
    Counter "bulkhead_submitted" ["bulkhead", "priority"] Of super::write_submitted,
        "Jobs that asked to be taken, whatever became of them.";
    Counter "bulkhead_jobs" ["bulkhead", "priority", "outcome"] Of super::write_jobs,
        "Jobs by how they ended, where their clients sent them.";
    Counter "bulkhead_rejected" ["bulkhead", "priority", "reason"] Of super::write_rejected,
        "Jobs that were not taken, or had to leave the queue, by why. Of best-effort and critical, from the first job on.";
    Counter "bulkhead_crashed" ["bulkhead", "reason"] Of super::write_crashed,
        "Jobs whose worker or program died, by how.";
    Counter "bulkhead_tenant_jobs" ["bulkhead", "tenant", "outcome"] All super::write_tenant_jobs,
        "The same jobs by tenant; all that have no label of their own are _other.";
    Counter "bulkhead_evicted" ["bulkhead", "tenant"] All super::write_evicted,
        "Jobs that left a full queue for a newer one, where they waited.";
    Counter "bulkhead_fallback" ["bulkhead", "target", "outcome"] Of super::write_fallback,
        "Jobs that were passed on to another bulkhead, by how they ended there.";
    Counter "bulkhead_retries" ["bulkhead"] Each |of| of.tally.retries,
        "Jobs given to another worker since their own had died.";
    Counter "bulkhead_worker_restarts" ["bulkhead", "cause"] Of super::write_restarts,
        "Workers that followed another, by what became of the one before.";
    Counter "bulkhead_breaker_transitions" ["bulkhead", "from", "to"] Of super::write_transitions,
        "Changes of the breaker's state.";
    Counter "bulkhead_late_replies" ["bulkhead"] Each |of| of.tally.late_replies,
        "Replies of workers for jobs that were answered already, or that they never had.";
    Counter "bulkhead_config_reloads" ["result"] All super::write_reloads,
        "Attempts to put another configuration in force.";
    Gauge "bulkhead_active_calls" ["bulkhead"] Each |of| of.active,
        "Jobs that a worker has and a client waits for.";
    Gauge "bulkhead_limit" ["bulkhead"] Each |of| of.limit,
        "Jobs that may run at once now: max_in_flight for each worker that is ready, and no more than the adaptive limit.";
    Gauge "bulkhead_adaptive_limit" ["bulkhead"] Maybe |of| Some(of.adaptive.as_ref()?.limit),
        "What the adaptive limit is, or with mode = monitor would be. Absent without one.";
    Counter "bulkhead_adaptive_changes" ["bulkhead", "direction"] Of super::write_adaptive_changes,
        "How often the adaptive limit grew (up) and fell (down). Absent without one.";
    Gauge "bulkhead_queue_length" ["bulkhead"] Each |of| of.queued,
        "Jobs that wait.";
    Gauge "bulkhead_queue_capacity" ["bulkhead"] Each |of| of.queue_capacity,
        "Jobs that may wait; where tenants are apart, of those that have workers.";
    Gauge "bulkhead_jobs_elsewhere" ["bulkhead"] Maybe |of| super::possible(of.possible.has_fallback, of.tally.elsewhere),
        "Jobs that a fallback has now, and whose outcome will count here. Absent without a fallback.";
    Gauge "bulkhead_jobs_guests" ["bulkhead"] Maybe |of| super::possible(of.possible.has_guests, of.tally.guests),
        "Jobs of other bulkheads that are active or queued here as their fallback, and count there. Absent where it is none.";
    Gauge "bulkhead_breaker_state" ["bulkhead", "state"] Of super::write_breaker,
        "1 for the state of the breaker, 0 for all others that it can have; of several breakers the one that matters most.";
    Gauge "bulkhead_state" ["bulkhead", "state"] Of super::write_state,
        "1 for the state of its workers (starting, ready, degraded, failed, draining), 0 for the others.";
    Gauge "bulkhead_service" ["bulkhead", "state"] Of super::write_service,
        "1 for how well it serves (ok, degraded, failing: by how the jobs of the last minute ended), 0 for the others.";
    Gauge "bulkhead_workers" ["bulkhead", "state"] Of super::write_workers,
        "Worker processes by what they are doing. Of states other than ready and busy, those that there are.";
    Gauge "bulkhead_spares" ["bulkhead"] Maybe super::spares,
        "Spares that are ready to take over; bulkhead_workers counts them as well. Absent where none are kept.";
    Gauge "bulkhead_worker_rss_bytes" ["bulkhead", "slot"] All super::write_memory,
        "Resident memory of the worker in a slot; 0 if there is none.";
    Gauge "bulkhead_worker_memory_limit_bytes" ["bulkhead"] Maybe |of| of.memory_limit,
        "What a worker may hold: the less of cgroup.memory and recycle.rss. Absent without either.";
    Gauge "bulkhead_clients" [] All |page, now| page.sample(&[], now.scrape.clients),
        "Connections to the jobs socket.";
    Gauge "bulkhead_buffered_bytes" [] All |page, now| page.sample(&[], now.scrape.buffered_bytes),
        "Bytes of all that waits, of payloads, names and records; at max_buffered jobs are rejected overloaded.";
    Gauge "bulkhead_memory_file_bytes" [] All |page, now| page.sample(&[], now.scrape.memory_file_bytes),
        "Bytes of memory files for large payloads and results, in use and idle; at most max_pooled.";
    Gauge "bulkhead_build_info" ["version"] All |page, _| page.sample(&[env!("CARGO_PKG_VERSION")], 1),
        "1; the version is in the label.";
    Gauge "bulkhead_config_last_reload_successful" [] All |page, now| page.sample(&[], u8::from(now.reloads.was_successful)),
        "1 if the configuration that was read last is in force.";
    Histogram "bulkhead_queue_wait_seconds" ["bulkhead"] Of |page, of| write_histogram(page, of, &of.tally.queue_wait),
        "How long jobs that were taken waited, also those that never ran.";
    Histogram "bulkhead_execution_seconds" ["bulkhead"] Of |page, of| write_histogram(page, of, &of.tally.execution),
        "How long workers had jobs, all attempts together, until they were answered.";
    Histogram "bulkhead_job_duration_seconds" ["bulkhead"] Of |page, of| write_histogram(page, of, &of.tally.duration),
        "How long jobs that were taken were here, from their arrival to their answer.";
    Counter "process_cpu_seconds" [] Process |own| Some(own.cpu_seconds),
        "Processor time of the supervisor itself, in seconds.";
    Gauge "process_open_fds" [] Process |_| Own::open_fds(),
        "Open descriptors of the supervisor.";
    Gauge "process_max_fds" [] Process |_| Own::max_fds(),
        "Descriptors that it may have.";
    Gauge "process_virtual_memory_bytes" [] Process |own| Some(own.virtual_bytes),
        "Its virtual memory.";
    Gauge "process_resident_memory_bytes" [] Process |own| Some(own.resident_bytes),
        "Its resident memory.";
    Gauge "process_threads" [] Process |own| Some(own.threads),
        "Its threads.";
    Gauge "process_start_time_seconds" [] Process Own::start_time,
        "When it was started, in seconds since 1970.";
}
