//! Bulkheads by name, and the compartments they consist of: one that all tenants share, or one for each tenant.

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
use super::crashes::Allowance;
use super::slab::{BulkheadIndex, CompartmentIndex, LinkIndex, Slab, owns_slab};
use super::start_failures::StartFailures;

/// All bulkheads: by their places and by name.
pub(super) struct Bulkheads {
    slab: Slab<BulkheadIndex, BulkheadEntry>,
    /// Those that take jobs.
    pub(super) by_name: HashMap<Arc<str>, BulkheadIndex, RandomState>,
    /// Those that are not in the file any more, and of which something is left.
    pub(super) leaving: Vec<BulkheadIndex>,
    /// Those whose tenants take turns at having workers, where something has changed.
    pub(super) unsettled: Vec<BulkheadIndex>,
    /// The tenants that metrics name, sorted.
    pub(super) labels: Arc<[String]>,
}

impl Bulkheads {
    pub(super) fn new(labels: Arc<[String]>) -> Self {
        let (slab, by_name) = (Slab::default(), HashMap::default());
        Self { slab, by_name, leaving: Vec::new(), unsettled: Vec::new(), labels }
    }
}

owns_slab!(Bulkheads, BulkheadIndex, BulkheadEntry);

/// One bulkhead as its users know it.
pub(super) struct BulkheadEntry {
    pub(super) name: Arc<str>,
    pub(super) presence: Presence,
    /// What workers are started with from here on.
    pub(super) program: Arc<Program>,
    pub(super) max_payload: u64,
    pub(super) max_result: u64,
    pub(super) heartbeat: Duration,
    /// Where its jobs go that it cannot take, in this order, as far as it is there.
    pub(super) fallback: Arc<[Arc<str>]>,
    /// When it was last told that jobs go there, and how many have since.
    pub(super) fallback_told: HashMap<Arc<str>, (Option<Time>, u64)>,
    /// Whether its jobs may be tried again.
    pub(super) retries: bool,
    /// Whether payloads that kill are to be recognised.
    pub(super) knows_poison: bool,
    pub(super) latency: Latency,
    /// How its jobs ended lately.
    pub(super) service: Window,
    /// What its metrics count.
    pub(super) tally: Tally,
    /// What could be counted at any scrape so far.
    pub(super) possible: Possible,
    /// Whether `pressure` is written for it, which needs a queue.
    pub(super) has_own_pressure: bool,
    /// How many bytes a worker may hold before it is replaced or ended, if that is bounded.
    pub(super) memory_limit: Option<u64>,
    /// Bytes of memory files that one worker may be lent.
    pub(super) lent_max: Option<u64>,
    /// What it was asked for lately.
    pub(super) demand: Demand,
    /// How many more of its crashes are reported now.
    pub(super) crash_allowance: Allowance,
    /// Those of workers that were never ready.
    pub(super) start_failures: StartFailures,
    /// What single tenants have of their own, if all share its workers.
    pub(super) own: BTreeMap<String, TenantConfig>,
    pub(super) layout: Layout,
}

/// Whether a bulkhead takes jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Presence {
    /// It takes jobs.
    Here,
    /// It is not in the file any more, and finishes what it has.
    Leaving,
}

/// What shares the workers of a bulkhead.
pub(super) enum Layout {
    /// All tenants, in this compartment.
    Shared(CompartmentIndex),
    /// Not one: each tenant has a compartment.
    Isolated(Box<Isolated>),
}

/// The compartments of a bulkhead whose tenants are kept apart.
#[derive(Default)]
pub(super) struct Isolated {
    /// The numbers of a tenant that has none of its own.
    pub(super) limits: Limits,
    pub(super) own: BTreeMap<String, TenantConfig>,
    pub(super) by_tenant: HashMap<Arc<str>, CompartmentIndex, RandomState>,
    pub(super) max_active: usize,
    /// Compartments with workers that have no job, by how long.
    pub(super) idle: BTreeSet<(Time, CompartmentIndex)>,
    /// Compartments without workers, by how long.
    pub(super) resting: BTreeSet<(Time, CompartmentIndex)>,
    /// Compartments with workers or jobs, or that wait for some: all others rest.
    pub(super) awake: BTreeSet<CompartmentIndex>,
    /// Compartments whose breaker is not closed.
    pub(super) tripped: BTreeSet<CompartmentIndex>,
    /// Compartments that wait until another has no workers any more.
    pub(super) awaiting: VecDeque<CompartmentIndex>,
    /// How many have workers, be they wanted or on their way out.
    pub(super) running: usize,
    /// How many of those have only workers on their way out.
    pub(super) leaving: usize,
    /// What was counted in compartments that are another tenant's now.
    pub(super) past: Counters,
    pub(super) past_restarts: u64,
    pub(super) is_draining: bool,
    pub(super) is_forced_open: bool,
    pub(super) is_unsettled: bool,
}

/// One policy with its workers.
pub(super) struct Compartment {
    /// Whose it is.
    pub(super) bulkhead: BulkheadIndex,
    /// The only tenant that it serves, if that is so.
    pub(super) tenant: Option<Arc<str>>,
    /// Whether it is there for one job of a crash report, and for nothing else.
    pub(super) is_replay: bool,
    pub(super) policy: Bulkhead<Box<JobData>>,
    /// By a worker's place: its link.
    pub(super) links: Vec<Option<LinkIndex>>,
    /// Whether something has happened since its timer was set.
    pub(super) is_touched: bool,
    /// Of its own jobs, if it serves one tenant only.
    pub(super) latency: Latency,
    /// How it has stood since something happened last.
    pub(super) level: Level,
    /// As last entered in the books of its bulkhead.
    pub(super) standing: Standing,
    /// The same of its breaker: whether it was not closed.
    pub(super) was_tripped: bool,
}

/// Where a tenant's compartment stands in the books of its bulkhead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// No workers, since then.
    Resting(Time),
    /// No workers, and some are waited for.
    Awaiting,
    /// Workers, and no job since then.
    Idle(Time),
    /// Workers and jobs.
    Busy,
    /// Workers that go.
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
            standing: Standing::Resting(now),
            was_tripped: false,
        }
    }

    /// Where it stands now, if it rested it would be since `now`.
    pub(super) fn standing_now(&self, now: Time) -> Standing {
        match (self.policy.activity(), self.policy.idle_since()) {
            (Activity::Started, Some(since)) => Standing::Idle(since),
            (Activity::Started, None) => Standing::Busy,
            (_, _) if !self.policy.has_no_workers() => Standing::Leaving,
            (Activity::Awaiting, _) => Standing::Awaiting,
            (Activity::Resting, _) => match self.standing {
                Standing::Resting(since) => Standing::Resting(since),
                _ => Standing::Resting(now),
            },
        }
    }
}

impl BulkheadEntry {
    /// A bulkhead with the compartment that all its tenants share, or none.
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
            fallback_told: HashMap::new(),
            retries: false,
            knows_poison: false,
            latency: Latency::default(),
            service: Window::default(),
            tally: Tally::new(spec.limits.tenants.labelled.len()),
            possible: Possible::default(),
            has_own_pressure: false,
            memory_limit: None,
            lent_max: None,
            demand: Demand::default(),
            crash_allowance: Allowance::default(),
            start_failures: StartFailures::default(),
            own: BTreeMap::new(),
            layout,
        };
        bulkhead.put(&spec, spec.limits.clone(), spec.own.clone());
        bulkhead
    }

    /// Puts all in force that is not up to its compartments, nor for workers that are started.
    pub(super) fn put(&mut self, spec: &BulkheadSpec, limits: Limits, own: BTreeMap<String, TenantConfig>) {
        self.max_payload = spec.max_payload;
        self.max_result = spec.max_result;
        self.heartbeat = limits.health.heartbeat;
        self.retries = limits.retry.is_some();
        self.knows_poison = limits.poison.is_some();
        self.has_own_pressure = spec.has_own_pressure;
        self.memory_limit = spec.memory_limit;
        self.lent_max = spec.lent_max;
        self.tally.name_fallbacks(&spec.fallback);
        if self.fallback != spec.fallback {
            self.fallback = spec.fallback.clone();
            self.fallback_told.clear();
        }
        if let (Layout::Isolated(isolated), Some(max_active)) = (&mut self.layout, spec.max_active) {
            isolated.max_active = max_active;
            isolated.limits = limits;
            isolated.own.clone_from(&own);
        }
        self.own = own;
    }

    /// The numbers that single tenants have of their own now.
    pub(super) fn own_numbers(&self) -> &BTreeMap<String, TenantConfig> {
        match &self.layout {
            Layout::Shared(_) => &self.own,
            Layout::Isolated(isolated) => &isolated.own,
        }
    }

    /// Its tenants' compartments, if they are kept apart.
    pub(super) fn isolated(&mut self) -> Option<&mut Isolated> {
        match &mut self.layout {
            Layout::Shared(_) => None,
            Layout::Isolated(isolated) => Some(isolated),
        }
    }

    /// The same of a bulkhead that is known to keep them apart: it has a compartment of a tenant.
    pub(super) fn tenants(&mut self) -> &mut Isolated {
        match self.isolated() {
            Some(isolated) => isolated,
            None => unreachable!("a bulkhead whose layout changes is another one"),
        }
    }

    /// What tells a payload from all others, if that is wanted here.
    pub(super) fn digest(&self, operation: &str, payload: &[u8]) -> Option<Digest> {
        self.knows_poison.then(|| {
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
    /// The numbers of a tenant.
    pub(super) fn limits_of(&self, tenant: &str) -> Limits {
        let mut limits = self.limits.clone();
        if let Some(own) = self.own.get(tenant) {
            own.of_workers().put_into(&mut limits);
        }
        limits
    }
}
