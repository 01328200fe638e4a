//! Bulkheads by name, and the compartments of each: a shared one, or one for each tenant.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bulkhead_config::TenantConfig;
use bulkhead_plane::demand::{Demand, Level};
use bulkhead_plane::latency::Latency;
use bulkhead_plane::possible::Possible;
use bulkhead_plane::program::Program;
use bulkhead_plane::reload::BulkheadSpec;
use bulkhead_plane::service::Window;
use bulkhead_plane::tally::Tally;
use bulkhead_policy::{Activity, Bulkhead, Counters, Digest, Limits, Time};
use foldhash::quality::RandomState;

use super::JobData;
use super::crashes::ReportLimit;
use super::slab::{BulkheadIndex, CompartmentIndex, LinkIndex, Slab, owns_slab};
use super::start_failures::StartFailures;

/// All bulkheads, by index and by name.
pub(super) struct Bulkheads {
    slab: Slab<BulkheadIndex, BulkheadEntry>,
    /// Bulkheads that take jobs.
    pub(super) by_name: HashMap<Arc<str>, BulkheadIndex, RandomState>,
    /// Bulkheads that were removed from the configuration and still have jobs or workers.
    pub(super) leaving: Vec<BulkheadIndex>,
    /// Bulkheads with isolated tenants in which the assignment of workers must be updated.
    pub(super) needing_update: Vec<BulkheadIndex>,
    /// Sorted names of the tenants that metrics report.
    pub(super) labels: Arc<[String]>,
}

impl Bulkheads {
    pub(super) fn new(labels: Arc<[String]>) -> Self {
        let (slab, by_name) = (Slab::default(), HashMap::default());
        Self { slab, by_name, leaving: Vec::new(), needing_update: Vec::new(), labels }
    }
}

owns_slab!(Bulkheads, BulkheadIndex, BulkheadEntry);

/// Configuration and statistics of a bulkhead.
pub(super) struct BulkheadEntry {
    pub(super) name: Arc<str>,
    pub(super) presence: Presence,
    /// Program of workers started from now on.
    pub(super) program: Arc<Program>,
    pub(super) max_payload: u64,
    pub(super) max_result: u64,
    pub(super) heartbeat: Duration,
    /// Bulkheads that get the jobs that this bulkhead cannot take, in this order. Names of missing bulkheads are
    /// skipped.
    pub(super) fallback: Arc<[Arc<str>]>,
    /// For each fallback: time of the last event, and number of jobs sent there since.
    pub(super) fallback_events: HashMap<Arc<str>, (Option<Time>, u64)>,
    /// True if jobs can be retried.
    pub(super) retries: bool,
    /// True if poison detection is on.
    pub(super) has_poison_detection: bool,
    pub(super) latency: Latency,
    /// Recent outcomes.
    pub(super) service: Window,
    /// Counters for the metrics.
    pub(super) tally: Tally,
    /// Metric series that were possible at some scrape so far.
    pub(super) possible: Possible,
    /// True if the configuration sets `pressure` for this bulkhead, which requires a queue.
    pub(super) has_own_pressure: bool,
    /// Memory limit of a worker, in bytes. A worker above the limit is replaced or killed.
    pub(super) memory_limit: Option<u64>,
    /// Maximum total size of the memory files lent to a worker, in bytes.
    pub(super) loaned_bytes_max: Option<u64>,
    pub(super) demand: Demand,
    /// Rate limit of crash reports.
    pub(super) crash_report_limit: ReportLimit,
    /// Crashes of workers that were never ready.
    pub(super) start_failures: StartFailures,
    /// Individual limits of tenants, if all tenants share the workers.
    pub(super) own: BTreeMap<String, TenantConfig>,
    pub(super) layout: Layout,
}

/// Presence of a bulkhead in the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Presence {
    /// Configured; takes jobs.
    Here,
    /// Removed from the configuration; finishes the remaining jobs.
    Leaving,
}

/// Assignment of tenants to compartments.
pub(super) enum Layout {
    /// All tenants share a compartment.
    Shared(CompartmentIndex),
    /// Each tenant has a separate compartment.
    Isolated(Box<Isolated>),
}

/// Compartments of a bulkhead with isolated tenants.
#[derive(Default)]
pub(super) struct Isolated {
    /// Limits of tenants without individual limits.
    pub(super) limits: Limits,
    pub(super) own: BTreeMap<String, TenantConfig>,
    pub(super) by_tenant: HashMap<Arc<str>, CompartmentIndex, RandomState>,
    pub(super) max_active: usize,
    /// Compartments with workers and without jobs, ordered by the time of the last job.
    pub(super) idle: BTreeSet<(Time, CompartmentIndex)>,
    /// Compartments without workers, ordered by the time of the last worker.
    pub(super) resting: BTreeSet<(Time, CompartmentIndex)>,
    /// Compartments that have workers or jobs, or that wait for workers. All others rest.
    pub(super) active: BTreeSet<CompartmentIndex>,
    /// Compartments whose breaker is not closed.
    pub(super) tripped: BTreeSet<CompartmentIndex>,
    /// Compartments that wait until another compartment has no workers left.
    pub(super) waiting: VecDeque<CompartmentIndex>,
    /// Number of compartments with workers, including workers that are ending.
    pub(super) running: usize,
    /// Number of compartments in which all workers are ending.
    pub(super) ending: usize,
    /// Counters of forgotten tenants.
    pub(super) forgotten_counters: Counters,
    pub(super) forgotten_restarts: u64,
    pub(super) is_draining: bool,
    pub(super) is_forced_open: bool,
    pub(super) needs_update: bool,
}

/// A policy state machine with workers.
pub(super) struct Compartment {
    pub(super) bulkhead: BulkheadIndex,
    /// The tenant, if the compartment serves a single tenant.
    pub(super) tenant: Option<Arc<str>>,
    /// True if the compartment exists only to replay a job of a crash report.
    pub(super) is_replay: bool,
    pub(super) policy: Bulkhead<Box<JobData>>,
    /// Links, indexed by the worker's place.
    pub(super) links: Vec<Option<LinkIndex>>,
    /// True if an event was applied after the timer was set.
    pub(super) is_touched: bool,
    /// Latency of jobs, if the compartment serves a single tenant.
    pub(super) latency: Latency,
    /// Load since the last event.
    pub(super) level: Level,
    /// State as recorded in [`Isolated`].
    pub(super) tenant_state: TenantState,
    /// True if [`Isolated`] lists the compartment as tripped.
    pub(super) is_listed_tripped: bool,
}

/// State of a tenant's compartment, as recorded in [`Isolated`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TenantState {
    /// No workers since this time.
    Resting(Time),
    /// No workers, and waits for some.
    Awaiting,
    /// Workers, but no jobs since this time.
    Idle(Time),
    /// Workers and jobs.
    Busy,
    /// All workers are ending.
    Leaving,
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
            level: Level::default(),
            tenant_state: TenantState::Resting(now),
            is_listed_tripped: false,
        }
    }

    /// Returns the current state. If the compartment has just started to rest, the state contains `now`.
    pub(super) fn current_tenant_state(&self, now: Time) -> TenantState {
        match (self.policy.activity(), self.policy.idle_since()) {
            (Activity::Started, Some(since)) => TenantState::Idle(since),
            (Activity::Started, None) => TenantState::Busy,
            (_, _) if !self.policy.has_no_workers() => TenantState::Leaving,
            (Activity::Awaiting, _) => TenantState::Awaiting,
            (Activity::Resting, _) => match self.tenant_state {
                TenantState::Resting(since) => TenantState::Resting(since),
                _ => TenantState::Resting(now),
            },
        }
    }
}

impl BulkheadEntry {
    /// Creates a bulkhead with a shared compartment, or with a compartment for each tenant if `shared` is `None`.
    pub(super) fn new(spec: BulkheadSpec, shared: Option<CompartmentIndex>) -> Self {
        let layout = match shared {
            Some(compartment) => Layout::Shared(compartment),
            None => Layout::Isolated(Box::new(Isolated {
                limits: spec.limits.clone(),
                own: spec.own.clone(),
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
            retries: false,
            has_poison_detection: false,
            latency: Latency::default(),
            service: Window::default(),
            tally: Tally::new(spec.limits.tenants.labelled.len()),
            possible: Possible::default(),
            has_own_pressure: false,
            memory_limit: None,
            loaned_bytes_max: None,
            demand: Demand::default(),
            crash_report_limit: ReportLimit::default(),
            start_failures: StartFailures::default(),
            own: BTreeMap::new(),
            layout,
        };
        bulkhead.put(&spec, spec.limits.clone(), spec.own.clone());
        bulkhead
    }

    /// Applies a configuration, except for the program of workers and the limits in compartments.
    pub(super) fn put(&mut self, spec: &BulkheadSpec, limits: Limits, own: BTreeMap<String, TenantConfig>) {
        self.max_payload = spec.max_payload;
        self.max_result = spec.max_result;
        self.heartbeat = limits.health.heartbeat;
        self.retries = limits.retry.is_some();
        self.has_poison_detection = limits.poison.is_some();
        self.has_own_pressure = spec.has_own_pressure;
        self.memory_limit = spec.memory_limit;
        self.loaned_bytes_max = spec.lent_max;
        self.tally.name_fallbacks(&spec.fallback);
        if self.fallback != spec.fallback {
            self.fallback = spec.fallback.clone();
            self.fallback_events.clear();
        }
        if let (Layout::Isolated(isolated), Some(max_active)) = (&mut self.layout, spec.max_active) {
            isolated.max_active = max_active;
            isolated.limits = limits;
            isolated.own.clone_from(&own);
        }
        self.own = own;
    }

    /// Returns the individual limits of tenants.
    pub(super) fn tenant_limits(&self) -> &BTreeMap<String, TenantConfig> {
        match &self.layout {
            Layout::Shared(_) => &self.own,
            Layout::Isolated(isolated) => &isolated.own,
        }
    }

    /// Returns the tenants' compartments, if tenants are isolated.
    pub(super) fn isolated(&mut self) -> Option<&mut Isolated> {
        match &mut self.layout {
            Layout::Shared(_) => None,
            Layout::Isolated(isolated) => Some(isolated),
        }
    }

    /// Returns the tenants' compartments. Panics if tenants are not isolated, so the caller must have a compartment
    /// of a tenant.
    pub(super) fn tenants(&mut self) -> &mut Isolated {
        match self.isolated() {
            Some(isolated) => isolated,
            None => unreachable!("the layout of a bulkhead never changes"),
        }
    }

    /// Returns the digest that identifies an operation with a payload, if poison detection is on.
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

impl Isolated {
    /// Returns the limits of a tenant, including individual limits.
    pub(super) fn limits_of(&self, tenant: &str) -> Limits {
        let mut limits = self.limits.clone();
        if let Some(own) = self.own.get(tenant) {
            own.of_workers().put_into(&mut limits);
        }
        limits
    }
}
