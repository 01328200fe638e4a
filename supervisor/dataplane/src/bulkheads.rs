//! All bulkheads and their compartments. If tenants are isolated, a bulkhead has one compartment for each tenant.
//! Otherwise, a bulkhead has a single compartment.
//!
//! This module does not apply events to compartments. The wiring applies the events that [`Bulkheads::next_effect`] and
//! [`Bulkheads::next_assignment`] return.

mod compartments;
mod counting;
mod job_list;
mod limits;
mod metrics;
mod snapshots;
mod tenants;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bulkhead_config::TenantConfig;
use bulkhead_plane::bulkhead_counters::BulkheadCounters;
use bulkhead_plane::command::SteerAction;
use bulkhead_plane::demand::{Demand, Load};
use bulkhead_plane::handover::ClosedByOperator;
use bulkhead_plane::latency::Latency;
use bulkhead_plane::possible_series::PossibleSeries;
use bulkhead_plane::program::Program;
use bulkhead_plane::reload::BulkheadSpec;
use bulkhead_plane::service::Window;
use bulkhead_policy::{
    Activity, BreakerState, Bulkhead, BulkheadState, Counters, Digest, Event, Limits, Time, WorkerId,
};
use foldhash::quality::RandomState;

pub(super) use compartments::Compartments;
pub(super) use job_list::{JobListQueue, JobListSource};
pub(super) use snapshots::{DescribeWorker, SnapshotQueue, SnapshotSource, WorkerDetails};
pub(super) use tenants::Effect;

use super::JobData;
use super::slab::{BulkheadIndex, CompartmentIndex, LinkIndex, Slab, owns_slab};
use tenants::TenantState;

/// An event, and the index of the compartment to which the event must be applied.
pub(super) type CompartmentEvent = (CompartmentIndex, Event<Box<JobData>>);

/// All bulkheads, by index and by name.
pub(super) struct Bulkheads {
    slab: Slab<BulkheadIndex, BulkheadEntry>,
    /// Bulkheads that accept jobs, by name.
    by_name: HashMap<Arc<str>, BulkheadIndex, RandomState>,
    /// Bulkheads that were removed from the configuration but still have jobs or workers.
    leaving: Vec<BulkheadIndex>,
    /// Bulkheads with isolated tenants in which workers might have to be reassigned from one tenant to another.
    needing_update: Vec<BulkheadIndex>,
    /// Names of the tenants that have metrics of their own, sorted.
    labels: Arc<[String]>,
    /// True if jobs have been sent to a fallback and no event has reported them yet.
    has_unreported_fallbacks: bool,
    effects: VecDeque<Effect>,
}

owns_slab!(Bulkheads, BulkheadIndex, BulkheadEntry);

/// Configuration and statistics of a bulkhead.
pub(super) struct BulkheadEntry {
    pub(super) name: Arc<str>,
    presence: Presence,
    /// Program with which new workers are started.
    pub(super) program: Arc<Program>,
    pub(super) max_payload: u64,
    pub(super) max_result: u64,
    pub(super) heartbeat: Duration,
    /// Names of the fallback bulkheads, in the order in which they are tried. Missing bulkheads are skipped.
    pub(super) fallback: Arc<[Arc<str>]>,
    /// Time of the last event about each fallback, and the number of jobs sent to the fallback since this event.
    fallback_events: HashMap<Arc<str>, (Option<Time>, u64)>,
    pub(super) has_retries: bool,
    has_poison_detection: bool,
    latency: Latency,
    /// Outcomes of the jobs that ended in the last minute.
    service: Window,
    pub(super) counters: BulkheadCounters,
    /// Metric series that may have had a nonzero value in an earlier scrape. They are still exported when their values
    /// can no longer change.
    possible: PossibleSeries,
    /// True if the configuration sets `pressure` for this bulkhead. A bulkhead with this setting must have a queue.
    has_own_pressure: bool,
    /// Memory limit per worker, in bytes. A worker that exceeds the limit is replaced or killed.
    memory_limit: Option<u64>,
    /// Maximum total size of the memory files lent to a worker, in bytes.
    pub(super) loaned_bytes_max: Option<u64>,
    demand: Demand,
    /// Limits set for individual tenants. Used only if all tenants share the workers.
    own: BTreeMap<String, TenantConfig>,
    layout: Layout,
}

/// Presence of a bulkhead in the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Presence {
    /// The bulkhead is configured and accepts jobs.
    Here,
    /// The bulkhead was removed from the configuration and is completing its remaining jobs.
    Leaving,
}

/// Assignment of a bulkhead's tenants to compartments.
enum Layout {
    /// All tenants share one compartment.
    Shared(CompartmentIndex),
    /// Each tenant has a separate compartment.
    Isolated(Box<Isolated>),
}

/// Compartments of a bulkhead with isolated tenants.
#[derive(Default)]
struct Isolated {
    /// Limits for tenants that have no limits of their own.
    limits: Limits,
    own: BTreeMap<String, TenantConfig>,
    by_tenant: HashMap<Arc<str>, CompartmentIndex, RandomState>,
    max_active: usize,
    /// Compartments with workers but no jobs, ordered by the time at which they became idle.
    idle: BTreeSet<(Time, CompartmentIndex)>,
    /// Compartments that have neither workers nor jobs, ordered by the time at which they became unused.
    unused: BTreeSet<(Time, CompartmentIndex)>,
    /// Compartments that have workers or jobs or are waiting for workers. Compartments not in this list have been
    /// scaled to zero.
    active: BTreeSet<CompartmentIndex>,
    /// Compartments whose breaker is open, half open or forced open.
    tripped: BTreeSet<CompartmentIndex>,
    /// Compartments that have been scaled to zero, but with failed slots that reject jobs.
    failed: BTreeSet<CompartmentIndex>,
    /// Compartments waiting for another compartment to release its workers.
    waiting: VecDeque<CompartmentIndex>,
    /// Number of compartments with workers, including those whose workers are exiting.
    running: usize,
    /// Number of compartments whose workers are all exiting.
    ending: usize,
    /// Sums of the counters of tenants whose compartments were removed.
    forgotten_counters: Counters,
    forgotten_restarts: u64,
    is_draining: bool,
    is_forced_open: bool,
    needs_update: bool,
}

/// A policy state machine and its workers.
pub(super) struct Compartment {
    pub(super) bulkhead: BulkheadIndex,
    /// Tenant of the compartment, or `None` if several tenants share it.
    pub(super) tenant: Option<Arc<str>>,
    /// True if the compartment exists only to replay jobs from a crash report.
    pub(super) is_replay: bool,
    pub(super) policy: Bulkhead<Box<JobData>>,
    /// Link of each worker, indexed by the worker's position in the table that policy keeps.
    links: Vec<Option<LinkIndex>>,
    /// True if an event has been applied to the compartment since its timer was last set.
    is_touched: bool,
    /// Latency of the compartment's jobs. Measured only if the compartment belongs to a single tenant.
    latency: Latency,
    /// Most recently measured load.
    load: Load,
    /// State of the compartment when the lists in [`Isolated`] were last updated. Used only if tenants are isolated.
    tenant_state: TenantState,
    /// True if this compartment is currently listed in `Isolated::tripped`.
    is_listed_tripped: bool,
    /// True if this compartment is currently listed in `Isolated::failed`.
    is_listed_failed: bool,
}

impl Compartment {
    pub(super) fn new(
        bulkhead: BulkheadIndex,
        tenant: Option<Arc<str>>,
        limits: Limits,
        seed: u64,
        now: Time,
    ) -> Self {
        Self {
            bulkhead,
            tenant,
            is_replay: false,
            policy: Bulkhead::new(limits, seed),
            links: Vec::new(),
            is_touched: false,
            latency: Latency::default(),
            load: Load::default(),
            tenant_state: TenantState::Unused(now),
            is_listed_tripped: false,
            is_listed_failed: false,
        }
    }

    /// Returns the compartment's contribution to the bulkhead's state, or `None` if the compartment's tenant has no
    /// workers and needs none. Failed slots of such a tenant only degrade the bulkhead, because they affect no other
    /// tenant.
    fn counted_state(&self) -> Option<BulkheadState> {
        let state = self.policy.state();
        if self.tenant.is_none() || self.policy.activity() != Activity::ScaledToZero {
            return Some(state);
        }
        let is_failed = matches!(state, BulkheadState::Degraded | BulkheadState::Failed);
        is_failed.then_some(BulkheadState::Degraded)
    }

    /// Returns false if the supervisor is not ready because of this compartment. Compartments of isolated tenants do not
    /// count. Jobs create them at any time, so one of them is often starting.
    pub(super) fn has_started(&self) -> bool {
        self.is_replay || self.tenant.is_some() || self.policy.has_settled()
    }

    /// Returns the link stored for the worker's position in policy's table. The link might belong to an earlier worker
    /// that had the same position.
    #[inline]
    pub(super) fn link_at(&self, worker: WorkerId) -> Option<LinkIndex> {
        *self.links.get(worker.place as usize)?
    }

    pub(super) fn set_link(&mut self, worker: WorkerId, link: LinkIndex) {
        let place = worker.place as usize;
        if self.links.len() <= place {
            self.links.resize(place + 1, None);
        }
        self.links[place] = Some(link);
    }

    /// Removes a worker's link. Does nothing if a different link is stored at the worker's position in policy's
    /// table.
    pub(super) fn clear_link(&mut self, worker: WorkerId, link: LinkIndex) {
        if self.link_at(worker) == Some(link) {
            self.links[worker.place as usize] = None;
        }
    }
}

impl Bulkheads {
    pub(super) fn new(labels: Arc<[String]>) -> Self {
        Self {
            slab: Slab::default(),
            by_name: HashMap::default(),
            leaving: Vec::new(),
            needing_update: Vec::new(),
            labels,
            has_unreported_fallbacks: false,
            effects: VecDeque::new(),
        }
    }

    pub(super) fn labels(&self) -> &Arc<[String]> {
        &self.labels
    }

    /// Returns the index of a tenant's label in the metrics. Used if a job was rejected before it reached policy.
    fn label_of(&self, tenant: &str) -> u32 {
        let found = self.labels.binary_search_by(|label| label.as_str().cmp(tenant));
        found.unwrap_or(self.labels.len()) as u32
    }

    /// Returns the bulkhead with this name if it accepts jobs.
    pub(super) fn find(&self, name: &str) -> Option<BulkheadIndex> {
        self.by_name.get(name).copied()
    }

    /// Finds a bulkhead by name, like [`Self::find`]. Avoids the lookup if `recent` is the bulkhead with this name.
    #[inline]
    pub(super) fn find_recent(&self, recent: Option<BulkheadIndex>, name: &str) -> Option<BulkheadIndex> {
        let is_again = |index: &BulkheadIndex| {
            let entry = self.slab.get(*index);
            entry.is_some_and(|entry| *entry.name == *name && entry.presence == Presence::Here)
        };
        recent.filter(is_again).or_else(|| self.find(name))
    }

    pub(super) fn configured(&self) -> Vec<BulkheadIndex> {
        let here = self.iter().filter(|(_, entry)| entry.presence == Presence::Here);
        here.map(|(index, _)| index).collect()
    }

    #[inline]
    pub(super) fn owner(&self, compartment: &Compartment) -> &BulkheadEntry {
        &self.slab[compartment.bulkhead]
    }

    /// Adds a bulkhead without starting its workers.
    pub(super) fn add(
        &mut self,
        compartments: &mut Compartments,
        spec: BulkheadSpec,
        now: Time,
    ) -> BulkheadIndex {
        let bulkhead = self.next();
        let shared = spec.max_active.is_none().then(|| {
            let seed = compartments.next_seed(now);
            compartments.insert(Compartment::new(bulkhead, None, spec.limits.clone(), seed, now))
        });
        let demand = Demand::new(now, &spec.limits);
        self.by_name.insert(spec.name.clone(), bulkhead);
        self.slab.insert(BulkheadEntry { demand, ..BulkheadEntry::new(spec, shared) })
    }

    /// Returns whether an operator has drained the bulkhead, and whether an operator has forced its breaker open.
    pub(super) fn closed_by_operator(&self, compartments: &Compartments, name: &str) -> ClosedByOperator {
        let entry = self.find(name).map(|bulkhead| &self[bulkhead]);
        entry.map_or_else(ClosedByOperator::default, |entry| ClosedByOperator {
            is_draining: entry.state(compartments).0 == BulkheadState::Draining,
            is_forced_open: entry.breaker(compartments) == BreakerState::ForcedOpen,
        })
    }

    /// Drains a rebuilt bulkhead or forces its breaker open again, if an operator had done so before the bulkhead was
    /// rebuilt. Returns the events that must then be applied to the compartments.
    pub(super) fn close_again(&mut self, name: &str, closed: ClosedByOperator) -> Vec<CompartmentEvent> {
        let Some(bulkhead) = self.find(name) else { return Vec::new() };
        if closed.is_draining {
            self.steer(bulkhead, SteerAction::Drain);
        }
        if closed.is_forced_open {
            self.force_breaker(bulkhead, true);
        }
        let events = |compartment| {
            let drain = closed.is_draining.then_some((compartment, Event::Drain));
            let force = closed.is_forced_open.then_some((compartment, Event::ForceBreaker { open: true }));
            drain.into_iter().chain(force)
        };
        self[bulkhead].compartments().into_iter().flat_map(events).collect()
    }

    /// Starts removing a bulkhead. The bulkhead accepts no further jobs.
    pub(super) fn start_removal(&mut self, name: &str) {
        if let Some(bulkhead) = self.by_name.remove(name) {
            self.slab[bulkhead].presence = Presence::Leaving;
            self.leaving.push(bulkhead);
        }
    }

    /// Returns the bulkheads that are being removed.
    pub(super) fn leaving(&self) -> Vec<BulkheadIndex> {
        self.leaving.clone()
    }

    /// Completes the removal of a bulkhead that has no compartments left. Its index can be reused immediately.
    pub(super) fn finish_removal(&mut self, bulkhead: BulkheadIndex) {
        self.leaving.retain(|leaving| *leaving != bulkhead);
        self.slab.remove(bulkhead);
    }

    /// Returns true if this bulkhead or one of its fallbacks needs payload digests.
    pub(super) fn needs_payload_bytes(&self, bulkhead: BulkheadIndex) -> bool {
        let entry = &self[bulkhead];
        let mut targets = entry.fallback.iter().filter_map(|name| self.find(name));
        entry.has_poison_detection || targets.any(|target| self[target].has_poison_detection)
    }

    /// Returns the name of this bulkhead, if it needs payload digests. If poison detection is on for this bulkhead,
    /// also returns the names of the bulkheads that use it as a fallback.
    pub(super) fn needing_payload_bytes(&self, bulkhead: BulkheadIndex) -> Vec<Arc<str>> {
        let entry = &self[bulkhead];
        let own = self.needs_payload_bytes(bulkhead).then_some(bulkhead);
        let falls_back =
            |other: &BulkheadIndex| entry.has_poison_detection && self[*other].fallback.contains(&entry.name);
        let others = self.by_name.values().copied().filter(falls_back);
        own.into_iter().chain(others).map(|index| self[index].name.clone()).collect()
    }
}

impl BulkheadEntry {
    /// Creates a bulkhead. If `shared` is `None`, each tenant gets a separate compartment.
    fn new(spec: BulkheadSpec, shared: Option<CompartmentIndex>) -> Self {
        let layout = match shared {
            Some(compartment) => Layout::Shared(compartment),
            None => Layout::Isolated(Box::new(Isolated {
                limits: spec.limits.clone(),
                own: spec.tenants.clone(),
                max_active: spec.max_active.unwrap_or_default(),
                ..Isolated::default()
            })),
        };
        let mut bulkhead = Self {
            name: spec.name.clone(),
            presence: Presence::Here,
            program: spec.program.clone(),
            max_payload: 0,
            max_result: 0,
            heartbeat: Duration::ZERO,
            fallback: Arc::default(),
            fallback_events: HashMap::new(),
            has_retries: false,
            has_poison_detection: false,
            latency: Latency::default(),
            service: Window::default(),
            counters: BulkheadCounters::new(spec.limits.tenants.labelled.len()),
            possible: PossibleSeries::default(),
            has_own_pressure: false,
            memory_limit: None,
            loaned_bytes_max: None,
            demand: Demand::default(),
            own: BTreeMap::new(),
            layout,
        };
        bulkhead.configure(&spec, spec.limits.clone(), spec.tenants.clone());
        bulkhead
    }

    pub(super) fn compartments(&self) -> Vec<CompartmentIndex> {
        match &self.layout {
            Layout::Shared(compartment) => vec![*compartment],
            Layout::Isolated(isolated) => isolated.by_tenant.values().copied().collect(),
        }
    }

    /// Returns the compartment shared by all tenants, or `None` if tenants are isolated.
    pub(super) fn shared_compartment(&self) -> Option<CompartmentIndex> {
        match &self.layout {
            Layout::Shared(compartment) => Some(*compartment),
            Layout::Isolated(_) => None,
        }
    }

    /// Returns the compartments of isolated tenants, or `None` if all tenants share a compartment.
    fn isolated(&self) -> Option<&Isolated> {
        match &self.layout {
            Layout::Shared(_) => None,
            Layout::Isolated(isolated) => Some(isolated),
        }
    }

    fn isolated_mut(&mut self) -> Option<&mut Isolated> {
        match &mut self.layout {
            Layout::Shared(_) => None,
            Layout::Isolated(isolated) => Some(isolated),
        }
    }

    /// Returns the digest of an operation name and a payload. Returns `None` if poison detection is off.
    pub(super) fn digest(&self, operation: &str, payload: &[u8]) -> Option<Digest> {
        self.has_poison_detection.then(|| {
            let mut hasher = blake3::Hasher::new();
            hasher.update(&(operation.len() as u64).to_le_bytes());
            hasher.update(operation.as_bytes());
            hasher.update(payload);
            let mut digest = [0; 16];
            digest.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
            u128::from_be_bytes(digest).into()
        })
    }
}
