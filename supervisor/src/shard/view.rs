//! What a bulkhead looks like from outside: one compartment, or the sum of its tenants'.

use std::collections::BTreeMap;

use bulkhead_policy::{Activity, BreakerState, BulkheadState, Counters, TenantView, WorkerId};
use bulkhead_shared::RejectReason;

use super::Shard;
use super::links::Link;
use super::named::{Compartment, Layout};
use crate::command::SteerError;
use crate::snapshot::{
    ConfinementSnapshot, Latencies, RateSnapshot, Snapshot, TenantSnapshot, WorkerSnapshot,
};

/// Tenants that a snapshot shows.
const TENANTS_SHOWN: usize = 10;

impl Shard {
    /// A whole bulkhead.
    pub(super) fn snapshot(&self, named: usize) -> Snapshot {
        let places = self.compartments_of(named);
        let parts: Vec<&Compartment> = places.iter().map(|&place| &self.compartments[place]).collect();
        let mut snapshot = self.sum(named, &parts);
        snapshot.latency_ms = self.named[named].latency.percentiles();
        let (service, cause) = self.named[named].service.told(self.now);
        (snapshot.service, snapshot.service_cause) = (Some(service.name()), cause);
        match &self.named[named].layout {
            Layout::Shared(place) => {
                let views = self.compartments[*place].policy.tenants(TENANTS_SHOWN);
                snapshot.tenants = views.into_iter().map(share).collect();
            }
            Layout::Isolated(isolated) => {
                snapshot.tenants = busiest(&parts);
                snapshot.add(&isolated.past, isolated.past_restarts);
                if isolated.is_draining {
                    snapshot.state = BulkheadState::Draining.name();
                }
                snapshot.breaker = self.breaker_of(named).name();
            }
        }
        snapshot
    }

    /// One tenant's part of a bulkhead.
    pub(super) fn tenant_snapshot(&self, name: &str, tenant: &str) -> Result<Box<Snapshot>, SteerError> {
        let &named = self.by_name.get(name).ok_or(SteerError::NotFound)?;
        let Layout::Isolated(isolated) = &self.named[named].layout else {
            let message = "the tenants of this bulkhead share its workers: see `tenants` in its snapshot";
            return Err(SteerError::Unfit(message.into()));
        };
        let &place = isolated.by_tenant.get(tenant).ok_or(SteerError::NoTenant)?;
        let part = &self.compartments[place];
        let mut snapshot = self.sum(named, &[part]);
        snapshot.tenant = Some(tenant.to_owned());
        snapshot.latency_ms = part.latency.percentiles();
        let limits = part.policy.limits();
        (snapshot.processes, snapshot.max_in_flight) = (limits.processes, limits.max_in_flight);
        snapshot.rate_limit = limits.rate_limit.map(RateSnapshot::from);
        if isolated.is_draining {
            snapshot.state = BulkheadState::Draining.name();
        }
        snapshot.tenants = busiest(&[part]);
        Ok(Box::new(snapshot))
    }

    /// The breaker of a bulkhead; of several the one that matters most.
    pub(super) fn breaker_of(&self, named: usize) -> BreakerState {
        let breaker = |place: usize| self.compartments[place].policy.breaker();
        match &self.named[named].layout {
            Layout::Shared(place) => breaker(*place),
            Layout::Isolated(isolated) if isolated.is_forced_open => BreakerState::ForcedOpen,
            Layout::Isolated(isolated) => worst(isolated.by_tenant.values().map(|&place| breaker(place))),
        }
    }

    /// The state of a bulkhead in one word.
    pub(super) fn state_of(&self, named: usize) -> BulkheadState {
        match &self.named[named].layout {
            Layout::Isolated(isolated) if isolated.is_draining => BulkheadState::Draining,
            _ => {
                let places = self.compartments_of(named);
                state(&places.iter().map(|&place| &self.compartments[place]).collect::<Vec<_>>())
            }
        }
    }

    fn sum(&self, named: usize, parts: &[&Compartment]) -> Snapshot {
        let mut counters = Counters::default();
        parts.iter().for_each(|part| counters.add(part.policy.counters()));
        let restarts = parts.iter().map(|part| part.policy.restarts()).sum::<u64>();
        let policies = || parts.iter().map(|part| &part.policy);
        let active = policies().filter(|policy| policy.activity() != Activity::Resting);
        let capacity: u64 = active.map(|policy| u64::from(policy.limits().max_queue)).sum();
        let queued = policies().map(|policy| policy.queued() as u64).sum();
        let state = state(parts);
        let trouble = policies().map(|policy| policy.last_trouble()).find(|trouble| !trouble.is_empty());
        let is_fine = state == BulkheadState::Ready;
        let limits = self.limits_of(named);
        Snapshot {
            name: self.named[named].name.as_ref().to_owned(),
            tenant: None,
            state: state.name(),
            detail: trouble.filter(|_| !is_fine).map(str::to_owned),
            service: None,
            service_cause: None,
            processes: limits.processes,
            max_in_flight: limits.max_in_flight,
            rate_limit: limits.rate_limit.map(RateSnapshot::from),
            limit: policies().map(|policy| policy.limit()).sum(),
            in_flight: policies().map(|policy| policy.in_flight()).sum(),
            available: policies().map(|policy| policy.available()).sum(),
            queued,
            queue_capacity: capacity,
            queue_available: capacity.saturating_sub(queued),
            submitted: counters.submitted,
            done: counters.ok,
            failed: counters.failed,
            crashed: counters.crashed,
            deadline_exceeded: counters.deadline_exceeded,
            cancelled: counters.cancelled,
            rejected: rejected(&counters),
            breaker: worst(policies().map(|policy| policy.breaker())).name(),
            restarts,
            retries: counters.retries,
            quarantined: policies().map(|policy| policy.quarantined(self.now) as u64).sum(),
            elsewhere: counters.elsewhere,
            late_replies: counters.late_replies,
            latency_ms: Latencies::default(),
            tenants: Vec::new(),
            workers: parts.iter().flat_map(|part| self.worker_snapshots(part)).collect(),
        }
    }

    fn worker_snapshots(&self, compartment: &Compartment) -> Vec<WorkerSnapshot> {
        let views = compartment.policy.workers(self.now);
        views
            .into_iter()
            .map(|view| WorkerSnapshot {
                tenant: compartment.tenant.as_deref().map(str::to_owned),
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
                confinement: self.confinement_of(compartment, view.id),
            })
            .collect()
    }

    fn status_of(&self, compartment: &Compartment, worker: WorkerId) -> Option<String> {
        self.link_in(compartment, worker)?.status.clone()
    }

    fn confinement_of(&self, compartment: &Compartment, worker: WorkerId) -> Option<ConfinementSnapshot> {
        let link = self.link_in(compartment, worker)?;
        Some(link.program.sandbox().describe(link.observed.as_ref()?))
    }

    fn link_in(&self, compartment: &Compartment, worker: WorkerId) -> Option<&Link> {
        let index = (*compartment.links.get(worker.place as usize)?)?;
        self.links[index].as_ref().filter(|link| link.worker == worker)
    }
}

impl Snapshot {
    /// Adds what was counted in parts that are gone.
    fn add(&mut self, past: &Counters, restarts: u64) {
        self.submitted += past.submitted;
        self.done += past.ok;
        self.failed += past.failed;
        self.crashed += past.crashed;
        self.deadline_exceeded += past.deadline_exceeded;
        self.cancelled += past.cancelled;
        self.retries += past.retries;
        self.late_replies += past.late_replies;
        self.restarts += restarts;
        for (reason, count) in rejected(past) {
            *self.rejected.entry(reason).or_default() += count;
        }
    }
}

fn rejected(counters: &Counters) -> BTreeMap<&'static str, u64> {
    let count = |reason: &RejectReason| (reason.name(), counters.rejected[reason.code() as usize]);
    RejectReason::ALL.iter().map(count).filter(|(_, count)| *count > 0).collect()
}

/// The state of the parts in one word. Tenants without workers say nothing: none are wanted.
fn state(parts: &[&Compartment]) -> BulkheadState {
    let states: Vec<BulkheadState> = parts
        .iter()
        .filter(|part| part.tenant.is_none() || part.policy.activity() != Activity::Resting)
        .map(|part| part.policy.state())
        .collect();
    let Some(&first) = states.first() else { return BulkheadState::Ready };
    if states.iter().all(|&state| state == first) {
        return first;
    }
    let is_well = |state: &BulkheadState| matches!(state, BulkheadState::Ready | BulkheadState::Starting);
    // Somebody's first worker is always about to start.
    if states.iter().all(is_well) { BulkheadState::Ready } else { BulkheadState::Degraded }
}

/// The breaker that matters most.
fn worst(breakers: impl Iterator<Item = BreakerState>) -> BreakerState {
    let weight = |state: &BreakerState| match state {
        BreakerState::Closed => 0,
        BreakerState::HalfOpen => 1,
        BreakerState::Open => 2,
        BreakerState::ForcedOpen => 3,
    };
    breakers.max_by_key(weight).unwrap_or(BreakerState::Closed)
}

fn share(view: TenantView) -> TenantSnapshot {
    let TenantView { name, in_flight, queued, submitted, rejected } = view;
    TenantSnapshot { name: name.as_ref().to_owned(), in_flight, queued: queued as u64, submitted, rejected }
}

fn busiest(parts: &[&Compartment]) -> Vec<TenantSnapshot> {
    let mut tenants: Vec<TenantSnapshot> = parts.iter().filter_map(|part| of_its_own(part)).collect();
    let load = |tenant: &TenantSnapshot| (u64::from(tenant.in_flight) + tenant.queued, tenant.submitted);
    tenants.sort_by(|a, b| load(b).cmp(&load(a)).then_with(|| a.name.cmp(&b.name)));
    tenants.truncate(TENANTS_SHOWN);
    tenants
}

fn of_its_own(part: &Compartment) -> Option<TenantSnapshot> {
    let counters = part.policy.counters();
    Some(TenantSnapshot {
        name: part.tenant.as_deref()?.to_owned(),
        in_flight: u32::try_from(part.policy.in_flight()).unwrap_or(u32::MAX),
        queued: part.policy.queued() as u64,
        submitted: counters.submitted,
        rejected: counters.rejected.iter().sum(),
    })
}
