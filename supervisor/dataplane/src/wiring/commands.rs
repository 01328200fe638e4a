//! Applies the control plane's commands to bulkheads and compartments: operator commands, changed limits, a stop, and
//! measured memory usage. `commands` receives the commands and limits their number per iteration. Policy decides how a
//! compartment reacts. Reloads and upgrades are handled in `reload.rs` and `handover.rs`.

use bulkhead_api::{
    BreakerMode, Change, ChangedPer, ChangedRate, EventKind, Rate, Severity, Snapshot, TenantChange,
    TenantRate,
};
use bulkhead_config::TenantConfig;
use bulkhead_plane::command::{SteerAction, SteerError};
use bulkhead_plane::notices::Milestone;
use bulkhead_policy::{Event, LimitChange, RateLimit, RatePer};
use bulkhead_shared::JobId;

use crate::operator_events::{forced_breaker_event, job_cancelled_event};
use crate::slab::BulkheadIndex;
use crate::{DataPlane, Incoming};

impl DataPlane {
    fn find_running(&self, name: &str) -> Result<BulkheadIndex, SteerError> {
        let bulkhead = self.bulkheads.find(name).ok_or(SteerError::NotFound)?;
        match self.is_stopping {
            true => Err(SteerError::Stopping),
            false if self.handover.is_under_way() => Err(SteerError::Upgrading),
            false => Ok(bulkhead),
        }
    }

    pub(crate) fn steer(&mut self, name: &str, action: SteerAction) -> Result<(), SteerError> {
        let bulkhead = self.find_running(name)?;
        let is_isolated = self.bulkheads.steer(bulkhead, action);
        for compartment in self.bulkheads[bulkhead].compartments() {
            let event = match action {
                SteerAction::Restart => Event::Restart,
                SteerAction::Drain => Event::Drain,
                SteerAction::Resume => Event::Resume,
                SteerAction::Reset => Event::Reset,
            };
            if action == SteerAction::Restart {
                // The new workers are forked from a new template, which reads the files in `env_files` again.
                self.update_templates(|templates, _| templates.replace(compartment));
            }
            self.apply_quietly(compartment, event);
        }
        // Operators get one event for the whole bulkhead instead of one per tenant.
        let what = match action {
            SteerAction::Drain => EventKind::Draining { drain_timeout_ms: None },
            SteerAction::Resume => EventKind::Resumed {},
            SteerAction::Restart | SteerAction::Reset => return Ok(()),
        };
        if is_isolated {
            self.reporter.bulkhead_event(Severity::Info, &self.bulkheads[bulkhead].name, what);
        }
        Ok(())
    }

    /// Cancels a job on behalf of an operator. The client gets the outcome `cancelled`.
    pub(crate) fn cancel_job(&mut self, name: &str, job: JobId) -> Result<(), SteerError> {
        let (index, view) = self.bulkheads.find_job(&self.compartments, self.now, (name, job))?;
        let what = job_cancelled_event(&view);
        self.apply(index, Event::Cancel { job, unless_begun: false }, Incoming::None);
        let compartment = &self.compartments[index];
        let subject = (&self.bulkheads.owner(compartment).name, &compartment.tenant);
        self.reporter.compartment_event(Severity::Info, subject, what, None);
        Ok(())
    }

    // Limits.

    pub(crate) fn change(&mut self, name: &str, change: &Change) -> Result<Box<Snapshot>, SteerError> {
        let bulkhead = self.find_running(name)?;
        let limits = self.bulkheads[bulkhead].limits(&self.compartments);
        let so_far = limits.rate_limit.map_or(RatePer::Bulkhead, |limit| limit.per);
        let rate_limit =
            change.rate_limit.as_ref().map(|rate| Some(changed_rate_limit(rate.as_ref()?, so_far)));
        let Change { processes, max_in_flight, max_queue, .. } = *change;
        let numbers = LimitChange { processes, max_in_flight, max_queue, rate_limit };
        for (compartment, event) in self.bulkheads[bulkhead].change(&self.compartments, &numbers)? {
            self.apply(compartment, event, Incoming::None);
        }
        if let Some(mode) = change.breaker {
            self.force_breaker(bulkhead, mode == BreakerMode::ForcedOpen);
        }
        self.report_changed_limits(bulkhead, None, &numbers);
        Ok(Box::new(self.snapshot_source().snapshot(bulkhead)))
    }

    fn force_breaker(&mut self, bulkhead: BulkheadIndex, open: bool) {
        let was_open = self.bulkheads.force_breaker(bulkhead, open);
        for compartment in self.bulkheads[bulkhead].compartments() {
            self.apply_quietly(compartment, Event::ForceBreaker { open });
        }
        if let Some((severity, what)) = was_open.and_then(|was_open| forced_breaker_event(was_open, open)) {
            self.reporter.bulkhead_event(severity, &self.bulkheads[bulkhead].name, what);
        }
    }

    pub(crate) fn change_tenant(
        &mut self,
        name: &str,
        tenant: &str,
        change: &TenantChange,
    ) -> Result<TenantChange, SteerError> {
        let bulkhead = self.find_running(name)?;
        let rate = change.rate_limit.as_ref();
        let rate_limit = rate.map(|rate| new_rate_limit(rate.per_second, rate.burst, RatePer::Tenant));
        let TenantChange { processes, max_in_flight, max_queue, .. } = *change;
        let change = TenantConfig { processes, max_in_flight, max_queue, rate_limit };
        let (all, event) = self.bulkheads[bulkhead].change_tenant(&self.compartments, tenant, change)?;
        if let Some((compartment, event)) = event {
            self.apply(compartment, event, Incoming::None);
        }
        self.report_changed_limits(bulkhead, Some(tenant), &change.of_workers());
        Ok(TenantChange {
            processes: all.processes,
            max_in_flight: all.max_in_flight,
            max_queue: all.max_queue,
            rate_limit: all
                .rate_limit
                .map(|rate| TenantRate { per_second: rate.per_second, burst: Some(rate.burst) }),
        })
    }

    fn report_changed_limits(
        &mut self,
        bulkhead: BulkheadIndex,
        tenant: Option<&str>,
        numbers: &LimitChange,
    ) {
        if *numbers == LimitChange::default() {
            return;
        }
        let what = EventKind::LimitsChanged {
            max_in_flight: numbers.max_in_flight,
            processes: numbers.processes,
            max_queue: numbers.max_queue,
            rate_limit: numbers.rate_limit.map(|limit| limit.map(Rate::from)),
            tenant: tenant.map(str::to_owned),
        };
        self.reporter.bulkhead_event(Severity::Info, &self.bulkheads[bulkhead].name, what);
    }

    // The supervisor.

    /// Reports a worker's measured memory usage to policy.
    pub(crate) fn report_worker_memory(&mut self, name: &str, pid: u32, generation: u32, rss_bytes: u64) {
        let Some(bulkhead) = self.bulkheads.find(name) else { return };
        for compartment in self.bulkheads[bulkhead].compartments() {
            let views = self.compartments[compartment].policy.workers(self.now);
            let worker = views.iter().find(|v| v.pid == Some(pid) && v.id.generation == generation);
            if let Some(worker) = worker.map(|view| view.id) {
                self.apply(compartment, Event::Memory { worker, rss_bytes }, Incoming::None);
                return;
            }
        }
    }

    /// Stops all bulkheads. The first call gives jobs in flight up to `drain_timeout` to finish. A second call stops
    /// these jobs immediately.
    pub(crate) fn stop(&mut self) {
        let patience = if self.is_stopping { std::time::Duration::ZERO } else { self.limits.drain_timeout };
        if !self.is_stopping {
            self.is_stopping = true;
            self.stop_handover();
            self.reporter.states_have_changed();
            self.reporter.milestone(Milestone::Stopping);
            let drain_timeout_ms = u64::try_from(patience.as_millis()).ok();
            self.reporter.supervisor_event(Severity::Info, EventKind::Draining { drain_timeout_ms });
        }
        let by = self.now + patience;
        for index in self.compartments.indices() {
            self.apply(index, Event::Stop { by }, Incoming::None);
        }
    }

    pub(crate) fn send_summary(&mut self) {
        for bulkhead in self.bulkheads.configured() {
            let snapshot = self.snapshot_source().snapshot(bulkhead);
            let what = EventKind::Summary {
                rejected: snapshot.rejections(),
                workers: snapshot.workers.len(),
                state: snapshot.state,
                service: snapshot.service,
                service_cause: snapshot.service_cause,
                in_flight: snapshot.in_flight,
                limit: snapshot.limit,
                queued: snapshot.queued,
                done: snapshot.done,
                failed: snapshot.failed,
                crashed: snapshot.crashed,
                deadline_exceeded: snapshot.deadline_exceeded,
                cancelled: snapshot.cancelled,
                restarts: snapshot.restarts,
            };
            self.reporter.bulkhead_event(Severity::Info, &self.bulkheads[bulkhead].name, what);
        }
        let what = EventKind::SummaryOfAll {
            clients: self.sessions.clients(),
            buffered_bytes: self.memory.held(),
            undelivered_bytes: self.sessions.unread_bytes(),
            keeper_pid: self.keeper.pid(),
        };
        self.reporter.supervisor_event(Severity::Info, what);
    }
}

fn new_rate_limit(per_second: f64, burst: Option<u32>, per: RatePer) -> RateLimit {
    RateLimit { per_second, burst: burst.unwrap_or_else(|| per_second.ceil() as u32), per }
}

/// Converts a rate limit from a change command. If the command does not specify a scope, the limit keeps its previous
/// scope, `so_far`.
fn changed_rate_limit(rate: &ChangedRate, so_far: RatePer) -> RateLimit {
    let per = match rate.per {
        Some(ChangedPer::Bulkhead) => RatePer::Bulkhead,
        Some(ChangedPer::Tenant) => RatePer::Tenant,
        None => so_far,
    };
    new_rate_limit(rate.per_second, rate.burst, per)
}
