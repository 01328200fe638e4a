//! Updates the statistics of bulkheads, which are counters for the metrics, recent outcomes, latencies and demand. The
//! wiring calls these functions, for example when a job ends or a worker is restarted. `metrics` and `snapshots` read
//! the statistics. Policy has separate counters in each compartment.

use std::sync::Arc;
use std::time::Duration;

use bulkhead_plane::command::WorkerProcess;
use bulkhead_plane::demand::{Load, Observation, sizes_of};
use bulkhead_policy::{Counters, JobOutcome, OperatorEvent, RestartCause, Time, WorkerId};
use bulkhead_shared::{Priority, RejectReason, Verdict};

use super::{BulkheadEntry, BulkheadIndex, Bulkheads, Compartment, CompartmentIndex, Compartments, Layout};
use crate::JobData;

/// Minimum interval between events about the same fallback.
const FALLBACK_REPORT_INTERVAL: Duration = Duration::from_secs(10);

impl Bulkheads {
    // Jobs.

    /// Counts a job that was rejected before it reached a compartment. `tenant` is empty if the job counts for no tenant,
    /// for example because the client lacks access to the tenant.
    pub(crate) fn count_rejected(
        &mut self,
        compartments: &mut Compartments,
        now: Time,
        bulkhead: BulkheadIndex,
        (priority, tenant): (Priority, &str),
        reason: RejectReason,
    ) {
        let (verdict, label) = (Verdict::rejected(reason), self.label_of(tenant));
        let entry = &mut self.slab[bulkhead];
        entry.counters.count_submitted(priority);
        entry.count_outcome(now, (priority, label), &verdict);
        match &mut entry.layout {
            Layout::Shared(compartment) => compartments[*compartment].policy.count_rejected(tenant, reason),
            // A rejected job creates no compartment for its tenant.
            Layout::Isolated(isolated) => match isolated.by_tenant.get(tenant) {
                Some(compartment) if !tenant.is_empty() => {
                    compartments[*compartment].policy.count_rejected(tenant, reason);
                }
                _ => isolated.forgotten_counters.count_rejected(reason),
            },
        }
    }

    /// Counts the outcome of a job in the bulkhead that handled the job. This bulkhead can be a fallback.
    pub(crate) fn count_answer(&mut self, compartment: &Compartment, answer: &JobOutcome<Box<JobData>>) {
        let counters = &mut self.slab[compartment.bulkhead].counters;
        if answer.job.is_some() {
            counters.record_times(answer.queued, (answer.attempts > 0).then_some(answer.ran));
        }
        let is_evicted = matches!(answer.verdict, Verdict::Rejected { reason: RejectReason::Evicted, .. });
        if is_evicted && let Some(tenant) = counters.tenants.get_mut(answer.record.label as usize) {
            tenant.evicted += 1;
        }
    }

    /// Records the time that a job waited in the queue, and the time for which a worker ran the job.
    pub(crate) fn record_run(
        &mut self,
        compartment: &mut Compartment,
        now: Time,
        answer: &JobOutcome<Box<JobData>>,
    ) {
        let (ran, queued) = (answer.ran, answer.queued);
        if compartment.tenant.is_some() {
            compartment.latency.record(now, ran, queued);
        }
        let entry = &mut self.slab[compartment.bulkhead];
        entry.latency.record(now, ran, queued);
        entry.demand.record_run(ran, queued);
        if answer.verdict == Verdict::DeadlineRunning {
            let own = compartment.policy.limits().deadline;
            let is_long = answer.run_limit.is_some_and(|limit| ran >= limit);
            entry.demand.record_deadline_miss(!is_long && answer.deadline >= own);
        }
    }

    /// Counts the outcome of a job in the bulkhead to which the client submitted the job.
    pub(crate) fn count_end(
        &mut self,
        compartment: &Compartment,
        now: Time,
        record: &JobData,
        verdict: &Verdict,
    ) {
        let bulkhead = record.fallback.as_ref().map_or(compartment.bulkhead, |it| it.origin());
        self.slab[bulkhead].count_outcome(now, (record.priority, record.label), verdict);
    }

    pub(crate) fn count_late_replies(&mut self, compartment: &Compartment, count: u64) {
        if !compartment.is_replay {
            self.slab[compartment.bulkhead].counters.late_replies += count;
        }
    }

    // Fallbacks.

    /// Counts the final outcome of a job that was passed on to a fallback. The outcome is counted for the compartment
    /// to which the client submitted the job.
    pub(crate) fn count_fallback_end(
        &mut self,
        compartments: &mut Compartments,
        now: Time,
        index: CompartmentIndex,
        (tenant, verdict): (&str, &Verdict),
    ) {
        let compartment = &mut compartments[index];
        compartment.policy.count_fallback_outcome(tenant, verdict);
        let counters = &mut self.slab[compartment.bulkhead].counters;
        counters.elsewhere = counters.elsewhere.saturating_sub(1);
        if compartment.tenant.is_some() {
            self.update_tenant(compartments, index, now);
        }
    }

    /// Counts the outcome of a job that `origin` passed on to the fallback `target`. The outcome is added to the
    /// statistics of `origin`.
    pub(crate) fn count_guest_end(
        &mut self,
        compartment: &Compartment,
        (origin, target): (BulkheadIndex, &str),
        verdict: &Verdict,
    ) {
        let host = &mut self.slab[compartment.bulkhead].counters;
        host.guests = host.guests.saturating_sub(1);
        self.slab[origin].counters.count_fallback(target, verdict);
    }

    /// Counts a job that `origin` passes on to the fallback `target`. If an event about this fallback is due, returns
    /// the number of jobs passed on since the last such event.
    pub(crate) fn count_fallback(
        &mut self,
        now: Time,
        origin: BulkheadIndex,
        target: &Arc<str>,
    ) -> Option<u64> {
        let (reported_at, jobs) = self.slab[origin].fallback_events.entry(target.clone()).or_default();
        *jobs += 1;
        if reported_at.is_some_and(|at| now < at + FALLBACK_REPORT_INTERVAL) {
            self.has_unreported_fallbacks = true;
            return None;
        }
        *reported_at = Some(now);
        Some(std::mem::take(jobs))
    }

    /// Returns true if jobs have been sent to a fallback and no event has reported them yet.
    pub(crate) fn needs_checks(&self) -> bool {
        self.has_unreported_fallbacks
    }

    /// Returns the fallbacks about which an event is due, each with the number of jobs passed on since the last event
    /// about the same fallback.
    pub(crate) fn due_fallback_reports(&mut self, now: Time) -> Vec<(BulkheadIndex, String, u64)> {
        self.has_unreported_fallbacks = false;
        let mut due = Vec::new();
        for index in self.slab.indices() {
            let Some(entry) = self.slab.get_mut(index) else { continue };
            for (target, (reported_at, jobs)) in &mut entry.fallback_events {
                if *jobs > 0 && reported_at.is_some_and(|at| now >= at + FALLBACK_REPORT_INTERVAL) {
                    *reported_at = Some(now);
                    due.push((index, target.as_ref().to_owned(), std::mem::take(jobs)));
                }
                self.has_unreported_fallbacks |= *jobs > 0;
            }
        }
        due.sort_unstable();
        due
    }

    // Workers.

    /// Counts the start of a replacement worker.
    pub(crate) fn count_restart(&mut self, compartment: &Compartment, cause: Option<RestartCause>) {
        if let Some(cause) = cause.filter(|_| !compartment.is_replay) {
            self.slab[compartment.bulkhead].counters.restarts[cause as usize] += 1;
        }
    }

    /// Updates the counters for an event from policy. Ignores events that are counted elsewhere.
    pub(crate) fn count_note(&mut self, compartment: &Compartment, note: &OperatorEvent) {
        let counters = &mut self.slab[compartment.bulkhead].counters;
        match note {
            _ if compartment.is_replay => {}
            OperatorEvent::JobRetried { .. } => counters.retries += 1,
            OperatorEvent::Breaker(transition) => counters.count_transition(transition),
            _ => {}
        }
    }

    // Demand.

    /// Records the load that a compartment has had since the previous call, and then measures the current load. Called
    /// at most once per iteration for each compartment.
    pub(crate) fn record_load(
        &mut self,
        compartments: &mut Compartments,
        index: CompartmentIndex,
        now: Time,
    ) {
        let Some(compartment) = compartments.get_mut(index) else { return };
        let load = Load::of(&compartment.policy, now);
        let before = std::mem::replace(&mut compartment.load, load);
        if compartment.is_replay {
            return;
        }
        let entry = &mut self.slab[compartment.bulkhead];
        if entry.demand.is_due(now, entry.limits(compartments)) {
            entry.update_demand(compartments, now);
        }
        entry.demand.record_load(before, now);
    }

    /// Returns a bulkhead's recent measurements, or `None` if no bulkhead has this name.
    pub(crate) fn observation(
        &mut self,
        compartments: &mut Compartments,
        now: Time,
        name: &str,
    ) -> Option<Box<Observation>> {
        let bulkhead = self.find(name)?;
        for compartment in self.slab[bulkhead].compartments() {
            self.record_load(compartments, compartment, now);
        }
        let entry = &mut self.slab[bulkhead];
        entry.update_demand(compartments, now);
        let (limits, counters) = (entry.limits(compartments), entry.counters(compartments));
        let observation = entry.demand.observation(now, limits, counters);
        Some(Box::new(Observation { adaptive: entry.adaptive(compartments), ..observation }))
    }

    /// Returns a description of the worker process with this PID.
    pub(crate) fn worker_process(
        &self,
        compartment: &Compartment,
        pid: u32,
        worker: WorkerId,
    ) -> WorkerProcess {
        let (jobs_given, unfinished) = compartment.policy.job_counts(worker).unwrap_or_default();
        WorkerProcess {
            bulkhead: self.owner(compartment).name.clone(),
            pid,
            generation: worker.generation,
            jobs_given,
            is_busy: unfinished > 0,
        }
    }
}

impl BulkheadEntry {
    fn count_outcome(&mut self, now: Time, (priority, label): (Priority, u32), verdict: &Verdict) {
        self.counters.count_outcome(priority, label, verdict);
        self.service.count(now, verdict);
    }

    #[cold]
    fn update_demand(&mut self, compartments: &Compartments, now: Time) {
        let (sizes, counters) = (sizes_of(self.limits(compartments)), self.counters(compartments));
        self.demand.update(now, sizes, counters);
    }

    /// Returns the counters accumulated since the supervisor started, including those of removed compartments.
    pub(super) fn counters(&self, compartments: &Compartments) -> Counters {
        let mut sum = Counters::default();
        if let Layout::Isolated(isolated) = &self.layout {
            sum.add(&isolated.forgotten_counters);
        }
        for compartment in self.compartments() {
            sum.add(compartments[compartment].policy.counters());
        }
        sum
    }
}
