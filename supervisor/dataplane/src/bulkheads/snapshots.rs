//! Takes the snapshots of bulkheads that the admin API shows. A snapshot describes either a single compartment or the
//! sum of all tenants' compartments. The control plane serializes the snapshots.
//!
//! A bulkhead can have thousands of tenants, and visiting all of them at once would delay jobs for too long.
//! [`SnapshotQueue`] therefore visits a bounded number of compartments per iteration. A compartment that is removed
//! before its visit is still counted.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bulkhead_api::{Adaptive, Confinement, Latencies, Rate, Snapshot, Tenant, Text, Worker, millis};
use bulkhead_plane::command::SteerError;
use bulkhead_policy::{
    Activity, AdaptiveLimits, BreakerState, BulkheadState, Counters, TenantView, Time, WorkerId,
};
use bulkhead_shared::RejectReason;
use tokio::sync::oneshot;

use super::{
    BulkheadEntry, BulkheadIndex, Bulkheads, Compartment, CompartmentIndex, Compartments, Isolated, Layout,
    LinkIndex, Presence,
};

/// Maximum number of compartments visited per iteration. The snapshot of a bulkhead with more compartments can
/// contain values from different moments.
const COMPARTMENTS_PER_ITERATION_MAX: usize = 256;

/// Maximum number of tenants in a snapshot.
const TENANTS_SHOWN: usize = 10;

/// Number of tenants to collect before all except the busiest ones are discarded.
const TENANTS_SORTED_MAX: usize = 256;

/// Worker details that policy does not store.
#[derive(Default)]
pub(crate) struct WorkerDetails {
    pub(crate) status: Option<String>,
    pub(crate) confinement: Option<Confinement>,
}

/// Source of [`WorkerDetails`].
pub(crate) trait DescribeWorker {
    /// Returns a worker's details. `link` is the worker's link, or `None` if the worker does not have one.
    fn describe(&self, link: Option<LinkIndex>, worker: WorkerId) -> WorkerDetails;
}

/// Parts of the data plane from which a snapshot is taken.
#[derive(Clone, Copy)]
pub(crate) struct SnapshotSource<'a> {
    bulkheads: &'a Bulkheads,
    compartments: &'a Compartments,
    workers: &'a dyn DescribeWorker,
    now: Time,
}

impl<'a> SnapshotSource<'a> {
    pub(crate) fn new(
        bulkheads: &'a Bulkheads,
        compartments: &'a Compartments,
        workers: &'a dyn DescribeWorker,
        now: Time,
    ) -> Self {
        Self { bulkheads, compartments, workers, now }
    }

    pub(crate) fn snapshot(&self, bulkhead: BulkheadIndex) -> Snapshot {
        let entry = &self.bulkheads[bulkhead];
        let mut sum = Sum::default();
        entry.compartments().iter().for_each(|&index| sum.add(self, &self.compartments[index]));
        if let Some(isolated) = entry.isolated() {
            sum.add_forgotten(isolated);
        }
        self.complete(entry, sum)
    }

    /// Builds a bulkhead's snapshot from the totals of its compartments.
    fn complete(&self, entry: &BulkheadEntry, sum: Sum) -> Snapshot {
        let mut snapshot = sum.snapshot(self, entry);
        snapshot.latency_ms = entry.latency.percentiles();
        let (service, cause) = entry.service.service_with_cause(self.now);
        (snapshot.service, snapshot.service_cause) = (Some(service.into()), cause);
        match &entry.layout {
            Layout::Shared(index) => {
                let views = self.compartments[*index].policy.tenants(TENANTS_SHOWN);
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

    pub(crate) fn tenant_snapshot(&self, name: &str, tenant: &str) -> Result<Box<Snapshot>, SteerError> {
        let entry = &self.bulkheads[self.bulkheads.find(name).ok_or(SteerError::NotFound)?];
        let Some(isolated) = entry.isolated() else {
            let message = "the tenants of this bulkhead share workers: see `tenants` in the bulkhead's \
                           snapshot";
            return Err(SteerError::Conflict(message.into()));
        };
        let compartment = isolated.by_tenant.get(tenant).map(|index| &self.compartments[*index]);
        if compartment.is_none() && !isolated.own.contains_key(tenant) {
            return Err(SteerError::UnknownTenant);
        }
        let mut sum = Sum::default();
        compartment.into_iter().for_each(|compartment| sum.add(self, compartment));
        let mut snapshot = sum.snapshot(self, entry);
        snapshot.tenant = Some(tenant.to_owned());
        if let Some(compartment) = compartment {
            snapshot.state = compartment.policy.state().into();
            snapshot.latency_ms = compartment.latency.percentiles();
        }
        let limits = isolated.limits_of(tenant);
        (snapshot.processes, snapshot.max_in_flight) = (limits.processes, limits.max_in_flight);
        snapshot.max_queue = limits.max_queue;
        snapshot.rate_limit = limits.rate_limit.map(Rate::from);
        if isolated.is_draining {
            snapshot.state = BulkheadState::Draining.into();
        }
        if isolated.is_forced_open {
            snapshot.breaker = BreakerState::ForcedOpen.into();
        }
        Ok(Box::new(snapshot))
    }

    fn workers(&self, compartment: &Compartment) -> Vec<Worker> {
        let views = compartment.policy.workers(self.now);
        views
            .into_iter()
            .map(|view| (self.workers.describe(compartment.link_at(view.id), view.id), view))
            .map(|(WorkerDetails { status, confinement }, view)| Worker {
                tenant: compartment.tenant.as_deref().map(str::to_owned),
                slot: view.slot,
                generation: view.id.generation,
                pid: view.pid,
                state: view.state.into(),
                spare: view.is_spare,
                outdated: view.is_outdated,
                uptime_ms: u64::try_from(view.uptime.as_millis()).unwrap_or(u64::MAX),
                in_flight: view.in_flight.into(),
                max_in_flight: Some(compartment.policy.limits().max_in_flight),
                served: view.served,
                restarts: view.restarts,
                rss_bytes: None,
                cpu_ms: None,
                status,
                last_exit: view.last_exit,
                confinement,
            })
            .collect()
    }
}

/// Queue of requested snapshots, which are taken one after another.
#[derive(Default)]
pub(crate) struct SnapshotQueue(VecDeque<PartialSnapshot>);

struct PartialSnapshot {
    reply: oneshot::Sender<Vec<Snapshot>>,
    /// Bulkheads that have not been visited yet, by index and name.
    wanted: VecDeque<(BulkheadIndex, Arc<str>)>,
    visit: Option<BulkheadVisit>,
    done: Vec<Snapshot>,
}

/// A bulkhead whose compartments are being visited.
struct BulkheadVisit {
    bulkhead: BulkheadIndex,
    name: Arc<str>,
    /// Compartments that have not been visited yet.
    left: Vec<CompartmentIndex>,
    sum: Sum,
}

impl SnapshotQueue {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Requests a snapshot of the bulkhead with this name, or of all bulkheads. If there is no such bulkhead, replies
    /// immediately.
    pub(crate) fn request(
        &mut self,
        source: &SnapshotSource<'_>,
        bulkhead: Option<&str>,
        reply: oneshot::Sender<Vec<Snapshot>>,
    ) {
        let configured = source.bulkheads.configured().into_iter();
        let wanted = configured.map(|index| (index, source.bulkheads[index].name.clone()));
        let wanted: VecDeque<_> =
            wanted.filter(|(_, name)| bulkhead.is_none_or(|wanted| wanted == &**name)).collect();
        if wanted.is_empty() {
            let _ = reply.send(Vec::new());
            return;
        }
        self.0.push_back(PartialSnapshot { reply, wanted, visit: None, done: Vec::new() });
        // If no other snapshot is in progress, the snapshot is usually complete immediately.
        if self.0.len() == 1 {
            self.advance(source);
        }
    }

    /// Continues taking the snapshot that was requested first.
    pub(crate) fn advance(&mut self, source: &SnapshotSource<'_>) {
        let Some(mut snapshot) = self.0.pop_front() else { return };
        if snapshot.reply.is_closed() {
            return;
        }
        let mut budget = COMPARTMENTS_PER_ITERATION_MAX;
        while budget > 0 {
            if snapshot.visit.is_none() {
                let next = snapshot.wanted.pop_front();
                snapshot.visit =
                    next.and_then(|(bulkhead, name)| BulkheadVisit::begin(source, bulkhead, name));
            }
            match snapshot.visit.take() {
                Some(mut visit) => {
                    visit.visit(source, &mut budget);
                    let Some(entry) = visit.entry(source) else { continue };
                    if visit.left.is_empty() {
                        snapshot.done.push(source.complete(entry, visit.sum));
                    } else {
                        snapshot.visit = Some(visit);
                    }
                }
                None if snapshot.wanted.is_empty() => {
                    // Fails only if the requester is gone.
                    let _ = snapshot.reply.send(snapshot.done);
                    return;
                }
                None => {}
            }
        }
        self.0.push_front(snapshot);
    }

    /// Adds the values of a removed compartment to all unfinished snapshots that have not visited the compartment yet.
    pub(crate) fn add_forgotten(
        &mut self,
        source: &SnapshotSource<'_>,
        (bulkhead, index): (BulkheadIndex, CompartmentIndex),
        gone: &Compartment,
    ) {
        for visit in self.0.iter_mut().filter_map(|snapshot| snapshot.visit.as_mut()) {
            if visit.bulkhead == bulkhead
                && let Some(at) = visit.left.iter().position(|&left| left == index)
            {
                visit.left.swap_remove(at);
                visit.sum.add(source, gone);
            }
        }
    }
}

impl BulkheadVisit {
    fn begin(source: &SnapshotSource<'_>, bulkhead: BulkheadIndex, name: Arc<str>) -> Option<Self> {
        let mut visit = Self { bulkhead, name, left: Vec::new(), sum: Sum::default() };
        let entry = visit.entry(source)?;
        visit.left = entry.compartments();
        if let Some(isolated) = entry.isolated() {
            visit.sum.add_forgotten(isolated);
        }
        Some(visit)
    }

    /// Returns the bulkhead's entry, or `None` if the bulkhead was removed.
    fn entry<'a>(&self, source: &SnapshotSource<'a>) -> Option<&'a BulkheadEntry> {
        let entry = source.bulkheads.get(self.bulkhead);
        entry.filter(|entry| entry.presence == Presence::Here && Arc::ptr_eq(&entry.name, &self.name))
    }

    /// Visits at most `budget` more compartments.
    fn visit(&mut self, source: &SnapshotSource<'_>, budget: &mut usize) {
        while *budget > 0
            && let Some(index) = self.left.pop()
        {
            *budget -= 1;
            // The compartment might have been removed in the meantime.
            if let Some(compartment) = source.compartments.get(index) {
                self.sum.add(source, compartment);
            }
        }
    }
}

impl BulkheadEntry {
    /// Returns the combined adaptive limit of all tenants.
    pub(super) fn adaptive(&self, compartments: &Compartments) -> Option<Adaptive> {
        let numbers = self.limits(compartments).adaptive.as_ref()?;
        let mut seen = AdaptiveSeen::default();
        self.compartments().into_iter().for_each(|index| seen.add(&compartments[index]));
        Some(seen.describe(numbers, &self.counters(compartments)))
    }
}

/// Totals for a bulkhead, accumulated one compartment at a time.
#[derive(Default)]
struct Sum {
    counters: Counters,
    restarts: u64,
    states: CombinedState,
    trouble: Option<String>,
    restart_failure: Option<String>,
    limit: u64,
    adaptive: AdaptiveSeen,
    in_flight: u64,
    available: u64,
    queued: u64,
    predecessor_jobs: u64,
    predecessor_waiting: u64,
    capacity: u64,
    breaker: BreakerState,
    quarantined: u64,
    tenants: Vec<Tenant>,
    workers: Vec<Worker>,
}

impl Sum {
    fn add(&mut self, source: &SnapshotSource<'_>, compartment: &Compartment) {
        let now = source.now;
        let policy = &compartment.policy;
        self.counters.add(policy.counters());
        self.restarts += policy.restarts();
        let is_resting = policy.activity() == Activity::ScaledToZero;
        if let Some(state) = compartment.counted_state() {
            self.states.add(state);
        }
        if !is_resting {
            self.capacity += u64::from(policy.limits().max_queue);
        }
        if self.trouble.is_none() {
            self.trouble = Some(policy.last_failure()).filter(|text| !text.is_empty()).map(str::to_owned);
        }
        if self.restart_failure.is_none() {
            self.restart_failure = policy.restart_failure().map(str::to_owned);
        }
        self.limit += policy.limit();
        self.adaptive.add(compartment);
        self.in_flight += policy.in_flight();
        self.available += policy.available();
        self.queued += policy.queued() as u64;
        self.predecessor_jobs += policy.predecessor_jobs();
        self.predecessor_waiting += policy.predecessor_waiting();
        self.breaker = worst([self.breaker, policy.breaker()].into_iter());
        self.quarantined += policy.quarantined(now) as u64;
        self.workers.extend(source.workers(compartment));
        self.tenants.extend(tenant_of(compartment));
        if self.tenants.len() >= TENANTS_SORTED_MAX {
            keep_busiest(&mut self.tenants);
        }
    }

    /// Adds the counters of tenants whose compartments were removed.
    fn add_forgotten(&mut self, isolated: &Isolated) {
        self.counters.add(&isolated.forgotten_counters);
        self.restarts += isolated.forgotten_restarts;
    }

    fn snapshot(mut self, source: &SnapshotSource<'_>, entry: &BulkheadEntry) -> Snapshot {
        let state = self.states.combined();
        let is_fine = state == BulkheadState::Ready;
        let limits = entry.limits(source.compartments);
        keep_busiest(&mut self.tenants);
        Snapshot {
            name: entry.name.as_ref().to_owned(),
            tenant: None,
            isolated: entry.isolated().is_some(),
            state: state.into(),
            detail: self.trouble.filter(|_| !is_fine),
            service: None,
            service_cause: None,
            processes: limits.processes,
            max_in_flight: limits.max_in_flight,
            max_queue: limits.max_queue,
            start_mode: limits.start.mode.into(),
            rate_limit: limits.rate_limit.map(Rate::from),
            limit: self.limit,
            adaptive: limits.adaptive.as_ref().map(|numbers| self.adaptive.describe(numbers, &self.counters)),
            in_flight: self.in_flight,
            available: self.available,
            queued: self.queued,
            queue_capacity: self.capacity,
            queue_available: self.capacity.saturating_sub(self.queued + self.predecessor_waiting),
            submitted: self.counters.submitted,
            done: self.counters.ok,
            failed: self.counters.failed,
            crashed: self.counters.crashed,
            deadline_exceeded: self.counters.deadline_exceeded,
            cancelled: self.counters.cancelled,
            rejected: rejected(&self.counters),
            breaker: self.breaker.into(),
            has_breaker: limits.breaker.is_some(),
            restart_failure: self.restart_failure,
            restarts: self.restarts,
            retries: self.counters.retries,
            quarantined: self.quarantined,
            elsewhere: self.counters.elsewhere,
            predecessor_jobs: self.predecessor_jobs,
            late_replies: self.counters.late_replies,
            latency_ms: Latencies::default(),
            tenants: self.tenants,
            workers: self.workers,
        }
    }
}

/// Combination of the adaptive limits of several compartments. Consists of the sum of the limits and the highest
/// latency.
#[derive(Default)]
struct AdaptiveSeen {
    limit: u64,
    limits: u64,
    latency: Option<Duration>,
}

impl AdaptiveSeen {
    fn add(&mut self, compartment: &Compartment) {
        let is_resting = compartment.policy.activity() == Activity::ScaledToZero;
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

/// Combination of the states of several compartments. Does not include tenants that currently need no workers.
#[derive(Default)]
pub(super) struct CombinedState {
    first: Option<BulkheadState>,
    differ: bool,
    any_unhealthy: bool,
}

impl CombinedState {
    pub(super) fn add(&mut self, state: BulkheadState) {
        self.differ |= *self.first.get_or_insert(state) != state;
        self.any_unhealthy |= !matches!(state, BulkheadState::Ready | BulkheadState::Starting);
    }

    /// Returns a single state that summarizes the states of all compartments.
    pub(super) fn combined(&self) -> BulkheadState {
        match self.first {
            None => BulkheadState::Ready,
            Some(state) if !self.differ => state,
            Some(_) if self.any_unhealthy => BulkheadState::Degraded,
            // With many tenants, there is almost always one whose first worker is still starting.
            Some(_) => BulkheadState::Ready,
        }
    }
}

/// Returns the most severe of the given states.
pub(super) fn worst(breakers: impl Iterator<Item = BreakerState>) -> BreakerState {
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
