//! Snapshots of bulkheads: a single compartment, or the sum of all tenants' compartments.

use std::collections::BTreeMap;
use std::time::Duration;

use bulkhead_api::{Adaptive, Latencies, Rate, Snapshot, Tenant, Text, Worker, millis};
use bulkhead_plane::command::SteerError;
use bulkhead_policy::{
    Activity, AdaptiveLimits, BreakerState, BulkheadState, Counters, TenantView, Time, WorkerId,
};
use bulkhead_shared::RejectReason;

use super::DataPlane;
use super::bulkheads::{Compartment, Isolated, Layout};
use super::link_table::Links;
use super::links::Link;
use super::slab::{BulkheadIndex, CompartmentIndex};

/// Maximum number of tenants in a snapshot.
const TENANTS_SHOWN: usize = 10;

/// Maximum number of tenants collected before all but the busiest are dropped.
const TENANTS_SORTED_MAX: usize = 256;

impl DataPlane {
    /// Returns the snapshot of a whole bulkhead.
    pub(super) fn snapshot(&self, bulkhead: BulkheadIndex) -> Snapshot {
        let places = self.compartments_of(bulkhead);
        let compartments: Vec<&Compartment> = places.iter().map(|&place| &self.compartments[place]).collect();
        let mut sum = self.sum(&compartments);
        if let Layout::Isolated(isolated) = &self.bulkheads[bulkhead].layout {
            sum.add_past(isolated);
        }
        self.complete_snapshot(bulkhead, sum)
    }

    /// Completes the snapshot of a whole bulkhead from the sum of the parts.
    pub(super) fn complete_snapshot(&self, bulkhead: BulkheadIndex, sum: Sum) -> Snapshot {
        let mut snapshot = sum.snapshot(self, bulkhead);
        snapshot.latency_ms = self.bulkheads[bulkhead].latency.percentiles();
        let (service, cause) = self.bulkheads[bulkhead].service.told(self.now);
        (snapshot.service, snapshot.service_cause) = (Some(service.into()), cause);
        match &self.bulkheads[bulkhead].layout {
            Layout::Shared(place) => {
                let views = self.compartments[*place].policy.tenants(TENANTS_SHOWN);
                snapshot.tenants = views.into_iter().map(share).collect();
            }
            Layout::Isolated(isolated) => {
                if isolated.is_draining {
                    snapshot.state = BulkheadState::Draining.into();
                }
                if isolated.is_forced_open {
                    snapshot.breaker = BreakerState::ForcedOpen.into();
                }
            }
        }
        snapshot
    }

    /// Returns the snapshot of an isolated tenant.
    pub(super) fn tenant_snapshot(&self, name: &str, tenant: &str) -> Result<Box<Snapshot>, SteerError> {
        let &bulkhead = self.bulkheads.by_name.get(name).ok_or(SteerError::NotFound)?;
        let Layout::Isolated(isolated) = &self.bulkheads[bulkhead].layout else {
            let message = "the tenants of this bulkhead share workers: see `tenants` in the bulkhead's \
                           snapshot";
            return Err(SteerError::Unfit(message.into()));
        };
        let &place = isolated.by_tenant.get(tenant).ok_or(SteerError::NoTenant)?;
        let compartment = &self.compartments[place];
        let mut snapshot = self.sum(&[compartment]).snapshot(self, bulkhead);
        snapshot.tenant = Some(tenant.to_owned());
        snapshot.latency_ms = compartment.latency.percentiles();
        let limits = compartment.policy.limits();
        (snapshot.processes, snapshot.max_in_flight) = (limits.processes, limits.max_in_flight);
        snapshot.rate_limit = limits.rate_limit.map(Rate::from);
        if isolated.is_draining {
            snapshot.state = BulkheadState::Draining.into();
        }
        Ok(Box::new(snapshot))
    }

    /// Returns the state of a bulkhead's breaker. With isolated tenants, returns the most severe state.
    pub(super) fn breaker_of(&self, bulkhead: BulkheadIndex) -> BreakerState {
        let breaker = |place: CompartmentIndex| self.compartments[place].policy.breaker();
        match &self.bulkheads[bulkhead].layout {
            Layout::Shared(place) => breaker(*place),
            Layout::Isolated(isolated) if isolated.is_forced_open => BreakerState::ForcedOpen,
            Layout::Isolated(isolated) => worst(isolated.tripped.iter().map(|&place| breaker(place))),
        }
    }

    /// Returns the adaptive limit of a bulkhead, for all tenants together.
    pub(super) fn adaptive_of(&self, bulkhead: BulkheadIndex) -> Option<Adaptive> {
        let numbers = self.limits_of(bulkhead).adaptive.as_ref()?;
        let mut seen = AdaptiveSeen::default();
        self.compartments_of(bulkhead).into_iter().for_each(|place| seen.add(&self.compartments[place]));
        Some(seen.describe(numbers, &self.counters_of(bulkhead)))
    }

    fn sum(&self, compartments: &[&Compartment]) -> Sum {
        let mut sum = Sum::default();
        compartments.iter().for_each(|compartment| sum.add(&self.links, compartment, self.now));
        sum
    }
}

impl Links {
    fn worker_snapshots(&self, compartment: &Compartment, now: Time) -> Vec<Worker> {
        let views = compartment.policy.workers(now);
        views
            .into_iter()
            .map(|view| (self.link_in(compartment, view.id), view))
            .map(|(link, view)| Worker {
                tenant: compartment.tenant.as_deref().map(str::to_owned),
                slot: view.slot,
                generation: view.id.generation,
                pid: view.pid,
                state: view.state.into(),
                spare: view.is_spare,
                uptime_ms: u64::try_from(view.uptime.as_millis()).unwrap_or(u64::MAX),
                in_flight: view.in_flight.into(),
                served: view.served,
                restarts: view.restarts,
                rss_bytes: None,
                cpu_ms: None,
                status: link.and_then(|link| link.status.clone()),
                last_exit: view.last_exit,
                confinement: link.and_then(Link::confinement),
            })
            .collect()
    }

    fn link_in(&self, compartment: &Compartment, worker: WorkerId) -> Option<&Link> {
        let index = (*compartment.links.get(worker.place as usize)?)?;
        self.get(index).filter(|link| link.worker == worker)
    }
}

/// Sum of the parts of a bulkhead.
#[derive(Default)]
pub(super) struct Sum {
    counters: Counters,
    restarts: u64,
    states: States,
    trouble: Option<String>,
    limit: u64,
    adaptive: AdaptiveSeen,
    in_flight: u64,
    available: u64,
    queued: u64,
    capacity: u64,
    breaker: BreakerState,
    quarantined: u64,
    tenants: Vec<Tenant>,
    workers: Vec<Worker>,
}

impl Sum {
    pub(super) fn add(&mut self, links: &Links, compartment: &Compartment, now: Time) {
        let policy = &compartment.policy;
        self.counters.add(policy.counters());
        self.restarts += policy.restarts();
        let is_resting = policy.activity() == Activity::Resting;
        if compartment.tenant.is_none() || !is_resting {
            self.states.add(policy.state());
        }
        if !is_resting {
            self.capacity += u64::from(policy.limits().max_queue);
        }
        if self.trouble.is_none() {
            self.trouble = Some(policy.last_trouble()).filter(|text| !text.is_empty()).map(str::to_owned);
        }
        self.limit += policy.limit();
        self.adaptive.add(compartment);
        self.in_flight += policy.in_flight();
        self.available += policy.available();
        self.queued += policy.queued() as u64;
        self.breaker = worst([self.breaker, policy.breaker()].into_iter());
        self.quarantined += policy.quarantined(now) as u64;
        self.workers.extend(links.worker_snapshots(compartment, now));
        self.tenants.extend(tenant_of(compartment));
        if self.tenants.len() >= TENANTS_SORTED_MAX {
            keep_busiest(&mut self.tenants);
        }
    }

    /// Adds the counters of forgotten parts.
    pub(super) fn add_past(&mut self, isolated: &Isolated) {
        self.counters.add(&isolated.forgotten_counters);
        self.restarts += isolated.forgotten_restarts;
    }

    fn snapshot(mut self, plane: &DataPlane, bulkhead: BulkheadIndex) -> Snapshot {
        let state = self.states.combined();
        let is_fine = state == BulkheadState::Ready;
        let limits = plane.limits_of(bulkhead);
        keep_busiest(&mut self.tenants);
        Snapshot {
            name: plane.bulkheads[bulkhead].name.as_ref().to_owned(),
            tenant: None,
            state: state.into(),
            detail: self.trouble.filter(|_| !is_fine),
            service: None,
            service_cause: None,
            processes: limits.processes,
            max_in_flight: limits.max_in_flight,
            start_mode: limits.start.mode.into(),
            rate_limit: limits.rate_limit.map(Rate::from),
            limit: self.limit,
            adaptive: limits.adaptive.as_ref().map(|numbers| self.adaptive.describe(numbers, &self.counters)),
            in_flight: self.in_flight,
            available: self.available,
            queued: self.queued,
            queue_capacity: self.capacity,
            queue_available: self.capacity.saturating_sub(self.queued),
            submitted: self.counters.submitted,
            done: self.counters.ok,
            failed: self.counters.failed,
            crashed: self.counters.crashed,
            deadline_exceeded: self.counters.deadline_exceeded,
            cancelled: self.counters.cancelled,
            rejected: rejected(&self.counters),
            breaker: self.breaker.into(),
            has_breaker: limits.breaker.is_some(),
            restarts: self.restarts,
            retries: self.counters.retries,
            quarantined: self.quarantined,
            elsewhere: self.counters.elsewhere,
            late_replies: self.counters.late_replies,
            latency_ms: Latencies::default(),
            tenants: self.tenants,
            workers: self.workers,
        }
    }
}

/// Adaptive limits of all parts: the sum of the limits, and the latency of the slowest part.
#[derive(Default)]
struct AdaptiveSeen {
    limit: u64,
    limits: u64,
    latency: Option<Duration>,
}

impl AdaptiveSeen {
    fn add(&mut self, compartment: &Compartment) {
        let is_resting = compartment.policy.activity() == Activity::Resting;
        if let Some(view) = compartment.policy.adaptive().filter(|_| !is_resting) {
            self.limit += u64::from(view.limit);
            self.limits += 1;
            self.latency = self.latency.max(view.latency);
        }
    }

    fn describe(&self, numbers: &AdaptiveLimits, counters: &Counters) -> Adaptive {
        Adaptive {
            mode: numbers.mode.into(),
            min: numbers.min,
            max: numbers.max,
            target_ms: millis(numbers.target),
            limit: self.limit,
            limits: self.limits,
            latency_ms: self.latency.map(millis),
            raised: counters.limit_raised,
            lowered: counters.limit_lowered,
        }
    }
}

fn rejected(counters: &Counters) -> BTreeMap<Text, u64> {
    let count = |reason: &RejectReason| (reason.name().into(), counters.rejected[reason.code() as usize]);
    RejectReason::ALL.iter().map(count).filter(|(_, count)| *count > 0).collect()
}

/// States of the parts. Callers skip tenants without workers, because these tenants need no workers.
#[derive(Default)]
pub(super) struct States {
    first: Option<BulkheadState>,
    differ: bool,
    any_unhealthy: bool,
}

impl States {
    pub(super) fn add(&mut self, state: BulkheadState) {
        self.differ |= *self.first.get_or_insert(state) != state;
        self.any_unhealthy |= !matches!(state, BulkheadState::Ready | BulkheadState::Starting);
    }

    /// Returns a single state for all parts.
    pub(super) fn combined(&self) -> BulkheadState {
        match self.first {
            None => BulkheadState::Ready,
            Some(state) if !self.differ => state,
            Some(_) if self.any_unhealthy => BulkheadState::Degraded,
            // The first worker of some tenant is always starting.
            Some(_) => BulkheadState::Ready,
        }
    }
}

/// Returns the most severe state.
fn worst(breakers: impl Iterator<Item = BreakerState>) -> BreakerState {
    let weight = |state: &BreakerState| match state {
        BreakerState::Closed => 0,
        BreakerState::HalfOpen => 1,
        BreakerState::Open => 2,
        BreakerState::ForcedOpen => 3,
    };
    breakers.max_by_key(weight).unwrap_or_default()
}

fn share(view: TenantView) -> Tenant {
    let TenantView { name, in_flight, queued, submitted, rejected } = view;
    Tenant { name: name.as_ref().to_owned(), in_flight, queued: queued as u64, submitted, rejected }
}

fn keep_busiest(tenants: &mut Vec<Tenant>) {
    let load = |tenant: &Tenant| (u64::from(tenant.in_flight) + tenant.queued, tenant.submitted);
    tenants.sort_by(|a, b| load(b).cmp(&load(a)).then_with(|| a.name.cmp(&b.name)));
    tenants.truncate(TENANTS_SHOWN);
}

fn tenant_of(compartment: &Compartment) -> Option<Tenant> {
    let counters = compartment.policy.counters();
    Some(Tenant {
        name: compartment.tenant.as_deref()?.to_owned(),
        in_flight: u32::try_from(compartment.policy.in_flight()).unwrap_or(u32::MAX),
        queued: compartment.policy.queued() as u64,
        submitted: counters.submitted,
        rejected: counters.rejected.iter().sum(),
    })
}
