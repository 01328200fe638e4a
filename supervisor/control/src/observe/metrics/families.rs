//! Table of all metrics, with their names, kinds, labels, help texts and sources. The metrics page and the
//! documentation are generated from this table.

use bulkhead_plane::scrape::BulkheadNumbers;

use super::own_process::OwnProcess;
use super::text::{FamilyInfo, Kind, Page};
use super::{MetricInputs, write_histogram};

/// A metric family, which consists of all samples of one metric.
#[derive(Debug)]
pub(super) struct Family {
    pub(super) info: FamilyInfo,
    pub(super) source: SampleSource,
}

/// Source of the samples in a metric family.
#[derive(Clone, Copy, Debug)]
pub(super) enum SampleSource {
    /// One sample per bulkhead.
    Single(fn(&BulkheadNumbers) -> u64),
    /// A sample for each bulkhead, except for bulkheads for which the function returns `None`.
    Optional(fn(&BulkheadNumbers) -> Option<u64>),
    /// Several samples per bulkhead.
    Several(fn(&mut Page, &BulkheadNumbers)),
    /// Samples that are not about a particular bulkhead.
    Global(fn(&mut Page, &MetricInputs<'_>)),
    /// A sample about the supervisor's own process, read from `/proc`. Omitted if the value is not available.
    Process(fn(&OwnProcess) -> Option<f64>),
}

/// Declares the metric families. Each row contains the kind, name, labels, source and help text of one family.
macro_rules! families {
    ($($kind:ident $name:literal [$($label:literal),*] $source:ident $from:expr, $help:literal;)*) => {
        /// All metric families, in the order in which they are written.
        pub(super) static ALL: &[Family] = &[$(Family {
            info: FamilyInfo { name: $name, kind: Kind::$kind, labels: &[$($label),*], help: $help },
            source: SampleSource::$source($from),
        },)*];
    };
}

families! {
    Counter "bulkhead_submitted" ["bulkhead", "priority"] Several super::write_submitted,
        "Submitted jobs, whatever their outcome.";
    Counter "bulkhead_jobs" ["bulkhead", "priority", "outcome"] Several super::write_jobs,
        "Jobs by outcome, including rejected jobs. A job counts towards the bulkhead that the client \
         sent it to.";
    Counter "bulkhead_rejected" ["bulkhead", "priority", "reason"] Several super::write_rejected,
        "Rejected and evicted jobs by reason. For best-effort and critical, the series begin with the first such job.";
    Counter "bulkhead_crashed" ["bulkhead", "reason"] Several super::write_crashed,
        "Jobs whose worker or program died, by reason.";
    Counter "bulkhead_tenant_jobs" ["bulkhead", "tenant", "outcome"] Global super::write_tenant_jobs,
        "Jobs by tenant and outcome. Tenants without a label, and jobs without a tenant, count as _other.";
    Counter "bulkhead_evicted" ["bulkhead", "tenant"] Global super::write_evicted,
        "Jobs evicted from a full queue by a newer job. A job counts towards the bulkhead where it was queued.";
    Counter "bulkhead_fallback" ["bulkhead", "target", "outcome"] Several super::write_fallback,
        "Jobs forwarded to a fallback, by the outcome there.";
    Counter "bulkhead_retries" ["bulkhead"] Single |of| of.counters.retries,
        "Jobs dispatched to another worker because the first worker died.";
    Counter "bulkhead_worker_restarts" ["bulkhead", "cause"] Several super::write_restarts,
        "Workers started to replace another worker, by how the previous worker ended.";
    Counter "bulkhead_breaker_transitions" ["bulkhead", "from", "to"] Several super::write_transitions,
        "State changes of the breaker.";
    Counter "bulkhead_late_replies" ["bulkhead"] Single |of| of.counters.late_replies,
        "Replies from workers for jobs that already had an outcome or that were never sent to the worker.";
    Counter "bulkhead_config_reloads" ["result"] Global super::write_reloads,
        "Attempts to reload the configuration, by result.";
    Gauge "bulkhead_active_calls" ["bulkhead"] Single |of| of.active,
        "Jobs in flight in workers for which a client is waiting.";
    Gauge "bulkhead_limit" ["bulkhead"] Single |of| of.limit,
        "Current maximum number of concurrent jobs: max_in_flight for each ready worker, but at most the \
         adaptive limit.";
    Gauge "bulkhead_adaptive_limit" ["bulkhead"] Optional |of| Some(of.adaptive.as_ref()?.limit),
        "Adaptive limit; with mode = monitor, the limit that would apply. Absent if there is no adaptive limit.";
    Counter "bulkhead_adaptive_changes" ["bulkhead", "direction"] Several super::write_adaptive_changes,
        "Increases (up) and decreases (down) of the adaptive limit. Absent if there is no adaptive limit.";
    Gauge "bulkhead_queue_length" ["bulkhead"] Single |of| of.queued,
        "Queued jobs.";
    Gauge "bulkhead_queue_capacity" ["bulkhead"] Single |of| of.queue_capacity,
        "Maximum number of queued jobs. If tenants are isolated, the sum over all tenants with workers.";
    Gauge "bulkhead_jobs_elsewhere" ["bulkhead"] Optional |of| super::number_if_possible(of.possible.has_fallback, of.counters.elsewhere),
        "Jobs of this bulkhead that are currently at a fallback and whose outcome will count here. Absent if there is \
         no fallback.";
    Gauge "bulkhead_jobs_guests" ["bulkhead"] Optional |of| super::number_if_possible(of.possible.has_guests, of.counters.guests),
        "Jobs of other bulkheads that are active or queued here as their fallback. Absent if this bulkhead \
         is not a fallback.";
    Gauge "bulkhead_breaker_state" ["bulkhead", "state"] Several super::write_breaker,
        "1 for the state of the breaker, 0 for all other possible states. If there are several breakers, the most severe state.";
    Gauge "bulkhead_state" ["bulkhead", "state"] Several super::write_state,
        "1 for the state of the workers (starting, ready, degraded, failed, draining), 0 for the others.";
    Gauge "bulkhead_service" ["bulkhead", "state"] Several super::write_service,
        "1 for the service state (ok, degraded or failing, based on the outcomes of the last minute), 0 for the others.";
    Gauge "bulkhead_workers" ["bulkhead", "state"] Several super::write_workers,
        "Worker processes by state. States other than ready and busy are present only while a worker is in that state.";
    Gauge "bulkhead_spares" ["bulkhead"] Optional super::spares,
        "Spares that are ready to take over; also counted in bulkhead_workers. Absent if there are no spares.";
    Gauge "bulkhead_worker_rss_bytes" ["bulkhead", "slot"] Global super::write_memory,
        "Resident memory of the worker in a slot, in bytes; 0 if there is no worker.";
    Gauge "bulkhead_worker_memory_limit_bytes" ["bulkhead"] Optional |of| of.memory_limit,
        "Memory limit of a worker in bytes: the lower of cgroup.memory and recycle.rss. Absent if neither is \
         set.";
    Gauge "bulkhead_clients" [] Global |page, inputs| page.sample(&[], inputs.scrape.clients),
        "Connections to the jobs socket.";
    Gauge "bulkhead_jobs_http_connections" [] Global super::write_jobs_http_connections,
        "Connections to jobs_http; at most jobs_http_max. Absent if jobs_http is not set.";
    Counter "bulkhead_jobs_http_refused" ["reason"] Global super::write_jobs_http_refused,
        "Connections that jobs_http rejected because all connections were in use (overloaded), and jobs without a valid token (unauthenticated). Absent if jobs_http is not set.";
    Gauge "bulkhead_buffered_bytes" [] Global |page, inputs| page.sample(&[], inputs.scrape.buffered_bytes),
        "Total size of waiting payloads, names and records, in bytes. At max_buffered, jobs are rejected as overloaded.";
    Gauge "bulkhead_memory_file_bytes" [] Global |page, inputs| page.sample(&[], inputs.scrape.memory_file_bytes),
        "Total size of memory files for large payloads and results, in use and idle, in bytes; at most max_pooled.";
    Gauge "bulkhead_build_info" ["version"] Global |page, _| page.sample(&[env!("CARGO_PKG_VERSION")], 1),
        "Always 1; the version is in the label.";
    Gauge "bulkhead_config_last_reload_successful" [] Global |page, inputs| page.sample(&[], u8::from(inputs.reloads.was_successful)),
        "1 if the most recently read configuration is in effect, otherwise 0.";
    Histogram "bulkhead_queue_wait_seconds" ["bulkhead"] Several |page, of| write_histogram(page, of, &of.counters.queue_wait),
        "Time that accepted jobs waited, including jobs that never ran.";
    Histogram "bulkhead_execution_seconds" ["bulkhead"] Several |page, of| write_histogram(page, of, &of.counters.execution),
        "Time that jobs spent in workers until the reply, summed over all attempts.";
    Histogram "bulkhead_job_duration_seconds" ["bulkhead"] Several |page, of| write_histogram(page, of, &of.counters.duration),
        "Time from the arrival of an accepted job to its outcome.";
    Counter "process_cpu_seconds" [] Process |own| Some(own.cpu_seconds),
        "CPU time of the supervisor process, in seconds.";
    Gauge "process_open_fds" [] Process |_| OwnProcess::open_fds(),
        "Open file descriptors of the supervisor process.";
    Gauge "process_max_fds" [] Process |_| OwnProcess::max_fds(),
        "Maximum number of open file descriptors of the supervisor process.";
    Gauge "process_virtual_memory_bytes" [] Process |own| Some(own.virtual_bytes),
        "Virtual memory of the supervisor process, in bytes.";
    Gauge "process_resident_memory_bytes" [] Process |own| Some(own.resident_bytes),
        "Resident memory of the supervisor process, in bytes.";
    Gauge "process_threads" [] Process |own| Some(own.threads),
        "Threads of the supervisor process.";
    Gauge "process_start_time_seconds" [] Process OwnProcess::start_time,
        "Start time of the supervisor process, in seconds since 1970.";
}
