//! Commands from the control plane, and the snapshots it asks for.

use bulkhead_policy::{Change as Numbers, Event, RateLimit, RatePer, WorkerId};
use bulkhead_shared::RejectReason;
use serde_json::json;

use super::{Compartment, Incoming, Shard};
use crate::command::{
    BreakerMode, Change, ChangedPer, ChangedRate, Command, Notice, Severity, SteerError, Verb,
};
use crate::snapshot::{Snapshot, TenantSnapshot, WorkerSnapshot};

/// Tenants that a snapshot shows.
const TENANTS_SHOWN: usize = 10;

impl Shard {
    pub(super) fn command(&mut self, command: Command) {
        match command {
            Command::Snapshot { bulkhead, reply } => {
                let wanted = |c: &&Compartment| bulkhead.as_deref().is_none_or(|name| name == &*c.name);
                let snapshots = self.compartments.iter().filter(wanted).map(|c| self.snapshot(c)).collect();
                // Whoever asked may have gone.
                let _ = reply.send(snapshots);
            }
            Command::Steer { bulkhead, verb, reply } => {
                let _ = reply.send(self.steer(&bulkhead, verb));
            }
            Command::Change { bulkhead, change, reply } => {
                let _ = reply.send(self.change(&bulkhead, &change));
            }
            Command::Memory { bulkhead, pid, generation, rss_bytes } => {
                self.memory(&bulkhead, pid, generation, rss_bytes);
            }
            Command::Stop => self.stop(),
            Command::Summarise => self.summarise(),
        }
    }

    fn steer(&mut self, name: &str, verb: Verb) -> Result<(), SteerError> {
        let &index = self.by_name.get(name).ok_or(SteerError::NotFound)?;
        if self.stopping {
            return Err(SteerError::Stopping);
        }
        let event = match verb {
            Verb::Restart => Event::Restart,
            Verb::Drain => Event::Drain,
            Verb::Resume => Event::Resume,
            Verb::Reset => Event::Reset,
        };
        self.apply(index, event, Incoming::None);
        Ok(())
    }

    fn change(&mut self, name: &str, change: &Change) -> Result<Box<Snapshot>, SteerError> {
        let &index = self.by_name.get(name).ok_or(SteerError::NotFound)?;
        if self.stopping {
            return Err(SteerError::Stopping);
        }
        let rate_limit = change.rate_limit.as_ref().map(rate_limit);
        let numbers = Numbers { max_queue: change.max_queue, rate_limit, ..Numbers::default() };
        self.apply(index, Event::Change(numbers), Incoming::None);
        if let Some(mode) = change.breaker {
            let open = mode == BreakerMode::ForcedOpen;
            self.apply(index, Event::ForceBreaker { open }, Incoming::None);
        }
        let mut fields = Vec::new();
        fields.extend(change.max_queue.map(|most| ("max_queue", json!(most))));
        fields.extend(rate_limit.map(|limit| {
            let per = if limit.per == RatePer::Tenant { "tenant" } else { "bulkhead" };
            ("rate_limit", json!({"per_second": limit.per_second, "burst": limit.burst, "per": per}))
        }));
        if !fields.is_empty() {
            self.event(Severity::Info, "limits_changed", Some(index), fields);
        }
        Ok(Box::new(self.snapshot(&self.compartments[index])))
    }

    fn memory(&mut self, name: &str, pid: u32, generation: u32, rss_bytes: u64) {
        let Some(&index) = self.by_name.get(name) else { return };
        let views = self.compartments[index].policy.workers(self.now);
        let worker = views.iter().find(|v| v.pid == Some(pid) && v.id.generation == generation).map(|v| v.id);
        if let Some(worker) = worker {
            self.apply(index, Event::Memory { worker, rss_bytes }, Incoming::None);
        }
    }

    /// The first time in-flight jobs get `drain_timeout`; the second time nothing gets any.
    fn stop(&mut self) {
        let patience = if self.stopping { std::time::Duration::ZERO } else { self.limits.drain_timeout };
        if !self.stopping {
            self.stopping = true;
            self.notify(Notice::Stopping);
            self.event(
                Severity::Info,
                "draining",
                None,
                vec![("drain_timeout_ms", json!(patience.as_millis()))],
            );
        }
        let by = self.now + patience;
        for index in 0..self.compartments.len() {
            self.apply(index, Event::Stop { by }, Incoming::None);
        }
    }

    fn summarise(&mut self) {
        for index in 0..self.compartments.len() {
            let s = self.snapshot(&self.compartments[index]);
            let fields = vec![
                ("state", json!(s.state)),
                ("workers", json!(s.workers.len())),
                ("in_flight", json!(s.in_flight)),
                ("limit", json!(s.limit)),
                ("queued", json!(s.queued)),
                ("done", json!(s.done)),
                ("failed", json!(s.failed)),
                ("crashed", json!(s.crashed)),
                ("deadline_exceeded", json!(s.deadline_exceeded)),
                ("cancelled", json!(s.cancelled)),
                ("rejected", json!(s.rejected.values().sum::<u64>())),
                ("restarts", json!(s.restarts)),
            ];
            self.event(Severity::Info, "summary", Some(index), fields);
        }
        let fields = vec![
            ("clients", json!(self.clients)),
            ("buffered_bytes", json!(self.buffered)),
            ("undelivered_bytes", json!(self.undelivered)),
            ("keeper_pid", json!(self.keeper.pid())),
        ];
        self.event(Severity::Info, "summary", None, fields);
    }

    fn snapshot(&self, compartment: &Compartment) -> Snapshot {
        let policy = &compartment.policy;
        let counters = policy.counters();
        let rejected = RejectReason::ALL
            .iter()
            .map(|reason| (reason.name(), counters.rejected[reason.code() as usize]))
            .filter(|(_, count)| *count > 0)
            .collect();
        let (queued, capacity) = (policy.queued() as u64, u64::from(policy.limits().max_queue));
        let state = policy.state();
        let detail = (!policy.last_trouble().is_empty()
            && !matches!(state, bulkhead_policy::BulkheadState::Ready))
        .then(|| policy.last_trouble().to_owned());
        Snapshot {
            name: compartment.name.as_ref().to_owned(),
            state: state.name(),
            detail,
            limit: policy.limit(),
            in_flight: policy.in_flight(),
            available: policy.available(),
            queued,
            queue_capacity: capacity,
            queue_available: capacity.saturating_sub(queued),
            submitted: counters.submitted,
            done: counters.ok,
            failed: counters.failed,
            crashed: counters.crashed,
            deadline_exceeded: counters.deadline_exceeded,
            cancelled: counters.cancelled,
            rejected,
            breaker: policy.breaker().name(),
            restarts: policy.restarts(),
            late_replies: counters.late_replies,
            latency_ms: compartment.latency.percentiles(),
            tenants: policy.tenants(TENANTS_SHOWN).into_iter().map(tenant_snapshot).collect(),
            workers: self.worker_snapshots(compartment),
        }
    }

    fn worker_snapshots(&self, compartment: &Compartment) -> Vec<WorkerSnapshot> {
        let views = compartment.policy.workers(self.now);
        views
            .into_iter()
            .map(|view| WorkerSnapshot {
                slot: view.slot,
                generation: view.id.generation,
                pid: view.pid,
                state: view.state,
                uptime_ms: u64::try_from(view.uptime.as_millis()).unwrap_or(u64::MAX),
                in_flight: view.in_flight.into(),
                served: view.served,
                restarts: view.restarts,
                rss_bytes: None,
                cpu_ms: None,
                status: self.status_of(compartment, view.id),
                last_exit: view.last_exit,
            })
            .collect()
    }

    fn status_of(&self, compartment: &Compartment, worker: WorkerId) -> Option<String> {
        let index = (*compartment.links.get(worker.place as usize)?)?;
        let link = self.links[index].as_ref().filter(|link| link.worker == worker)?;
        link.status.clone()
    }
}

fn tenant_snapshot(view: bulkhead_policy::TenantView) -> TenantSnapshot {
    let bulkhead_policy::TenantView { name, in_flight, queued, submitted, rejected } = view;
    TenantSnapshot { name: name.as_ref().to_owned(), in_flight, queued: queued as u64, submitted, rejected }
}

fn rate_limit(rate: &ChangedRate) -> RateLimit {
    let burst = rate.burst.unwrap_or_else(|| rate.per_second.ceil() as u32);
    let per = match rate.per {
        ChangedPer::Bulkhead => RatePer::Bulkhead,
        ChangedPer::Tenant => RatePer::Tenant,
    };
    RateLimit { per_second: rate.per_second, burst, per }
}
