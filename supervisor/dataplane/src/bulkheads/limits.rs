//! Changes the limits of bulkheads and tenants after a reload or an operator's request. Validates each live change, and
//! decides which live changes a reload keeps. The caller applies the returned events to the compartments, where policy
//! enforces the limits.

use std::collections::BTreeMap;
use std::sync::Arc;

use bulkhead_config::defaults::{IN_FLIGHT_CEILING, ISOLATED_WORKERS_CEILING, PERMITS_CEILING};
use bulkhead_config::{self as config, Overflow, TenantConfig};
use bulkhead_plane::command::SteerError;
use bulkhead_plane::confinement::Sandbox;
use bulkhead_plane::reload::{BulkheadSpec, ChangedBulkhead, LimitsBefore, LiveDropped, Reload};
use bulkhead_policy::{Event, LimitChange, Limits, RatePer};
use bulkhead_shared::limits::TENANT_BYTES_MAX;

use super::{BulkheadEntry, Bulkheads, Compartment, CompartmentEvent, Compartments, Isolated, Layout};

/// Maximum number of tenants per bulkhead for which separate limits can be set.
const TENANT_LIMITS_MAX: usize = 16_384;

impl Bulkheads {
    /// Returns the live changes that would be lost if a reload were applied. A change is lost if it conflicts with the
    /// new configuration or if its bulkhead is rebuilt.
    pub(crate) fn dropped_changes(&self, compartments: &Compartments, reload: &Reload) -> LiveDropped {
        let of = |reconfigured: &ChangedBulkhead| {
            let bulkhead = self.find(&reconfigured.spec.name)?;
            let dropped = self[bulkhead].merge_live_changes(compartments, reconfigured).dropped;
            (!dropped.is_empty()).then(|| (reconfigured.spec.name.clone(), dropped))
        };
        let of_rebuilt = |(name, before): &(Arc<str>, LimitsBefore)| {
            let dropped = self[self.find(name)?].live_changes(compartments, before);
            (!dropped.is_empty()).then(|| (name.clone(), dropped))
        };
        let rebuilt = reload.rebuilt.iter().filter_map(of_rebuilt);
        reload.changed.iter().filter_map(of).chain(rebuilt).collect()
    }
}

impl BulkheadEntry {
    /// Returns the current limits of the bulkhead, not including limits that are set for individual tenants.
    pub(crate) fn limits<'a>(&'a self, compartments: &'a Compartments) -> &'a Limits {
        match &self.layout {
            Layout::Shared(compartment) => compartments[*compartment].policy.limits(),
            Layout::Isolated(isolated) => &isolated.limits,
        }
    }

    /// Returns the per-tenant limits, by tenant name.
    pub(crate) fn tenant_limits(&self) -> &BTreeMap<String, TenantConfig> {
        match &self.layout {
            Layout::Shared(_) => &self.own,
            Layout::Isolated(isolated) => &isolated.own,
        }
    }

    fn fixed_settings(&self) -> FixedSettings<'_> {
        FixedSettings {
            sandbox: self.program.sandbox(),
            max_active: self.isolated().map(|isolated| isolated.max_active),
            has_own_pressure: self.has_own_pressure,
        }
    }

    // The configuration.

    /// Applies a new configuration to this bulkhead. Changes neither the worker program nor the limits of compartments.
    pub(super) fn configure(
        &mut self,
        spec: &BulkheadSpec,
        limits: Limits,
        own: BTreeMap<String, TenantConfig>,
    ) {
        self.max_payload = spec.max_payload;
        self.max_result = spec.max_result;
        self.heartbeat = limits.health.heartbeat;
        self.has_retries = limits.retry.is_some();
        self.has_poison_detection = limits.poison.is_some();
        self.has_own_pressure = spec.has_own_pressure;
        self.memory_limit = spec.memory_limit;
        self.loaned_bytes_max = spec.lent_max;
        self.counters.add_fallbacks(&spec.fallback);
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

    /// Applies a reloaded configuration. Returns the events that must then be applied to the compartments.
    pub(crate) fn reconfigure(
        &mut self,
        compartments: &Compartments,
        spec: &BulkheadSpec,
        merged: MergedLimits,
    ) -> Vec<CompartmentEvent> {
        let MergedLimits { limits, own, .. } = merged;
        let mut shared = limits.clone();
        if spec.max_active.is_none() {
            shared.tenants.overrides =
                own.iter().map(|(tenant, own)| (tenant.clone(), own.of_share())).collect();
        }
        self.configure(spec, limits, own);
        let limits_of = |compartment: &Compartment| {
            let tenant = compartment.tenant.as_deref();
            self.isolated()
                .zip(tenant)
                .map_or_else(|| shared.clone(), |(isolated, it)| isolated.limits_of(it))
        };
        let event = |index| (index, Event::Reconfigure(Box::new(limits_of(&compartments[index]))));
        self.compartments().into_iter().map(event).collect()
    }

    /// Returns the keys of all limits that an operator has changed while the supervisor was running.
    fn live_changes(&self, compartments: &Compartments, before: &LimitsBefore) -> Vec<String> {
        let live = self.limits(compartments);
        let is_changed = |(_, take): &&LiveLimit| {
            let mut with = before.limits.clone();
            take(&mut with, live);
            with != before.limits
        };
        let keys = LIVE_LIMITS.iter().filter(is_changed).map(|(key, _)| *key);
        let tenant = (*self.tenant_limits() != before.tenants).then_some("tenant");
        keys.chain(tenant).map(str::to_owned).collect()
    }

    /// Merges a configuration with live changes. Keeps a live change only if its key has the same value in the old and
    /// the new configuration file, and if the merged limits are valid.
    pub(crate) fn merge_live_changes(
        &self,
        compartments: &Compartments,
        reconfigured: &ChangedBulkhead,
    ) -> MergedLimits {
        let ChangedBulkhead { spec, before, .. } = reconfigured;
        let own = own_with_live(&before.tenants, &spec.tenants, self.tenant_limits());
        let limits = limits_with_live(&before.limits, &spec.limits, self.limits(compartments));
        let fixed = FixedSettings {
            sandbox: spec.program.sandbox(),
            max_active: spec.max_active,
            has_own_pressure: spec.has_own_pressure,
        };
        let fits = |limits: &Limits, own: &BTreeMap<_, _>| check_limits(limits, own, fixed).is_ok();
        if fits(&limits, &own) {
            return MergedLimits { limits, own, dropped: Vec::new() };
        }
        let mut merged =
            MergedLimits { limits: spec.limits.clone(), own: spec.tenants.clone(), dropped: Vec::new() };
        for (key, take) in LIVE_LIMITS {
            let mut with = merged.limits.clone();
            take(&mut with, &limits);
            if with == merged.limits {
                continue;
            }
            match fits(&with, &merged.own) {
                true => merged.limits = with,
                false => merged.dropped.push((*key).to_owned()),
            }
        }
        // Live changes for tenants are either all kept or all discarded, because there can be thousands of them.
        if fits(&merged.limits, &own) {
            merged.own = own;
        } else if merged.own != own {
            merged.dropped.push("tenant".to_owned());
        }
        merged
    }

    // Live changes.

    /// Validates a live change to the whole bulkhead and applies it. Keeps limits set for individual tenants. Returns
    /// the events that must then be applied to the compartments.
    pub(crate) fn change(
        &mut self,
        compartments: &Compartments,
        numbers: &LimitChange,
    ) -> Result<Vec<CompartmentEvent>, SteerError> {
        let mut limits = self.limits(compartments).clone();
        numbers.apply_to(&mut limits);
        check_limits(&limits, self.tenant_limits(), self.fixed_settings())?;
        let event = |index| {
            let own = self.own_limits_of(&compartments[index]);
            let numbers = LimitChange {
                processes: numbers.processes.filter(|_| own.processes.is_none()),
                max_in_flight: numbers.max_in_flight.filter(|_| own.max_in_flight.is_none()),
                max_queue: numbers.max_queue.filter(|_| own.max_queue.is_none()),
                rate_limit: numbers.rate_limit.filter(|_| own.rate_limit.is_none()),
            };
            (index, Event::ChangeLimits(numbers))
        };
        let events = self.compartments().into_iter().map(event).collect();
        if let Some(isolated) = self.isolated_mut() {
            numbers.apply_to(&mut isolated.limits);
        }
        Ok(events)
    }

    /// Returns the limits set for a compartment's tenant. Returns no limits if the compartment is shared.
    fn own_limits_of(&self, compartment: &Compartment) -> TenantConfig {
        match (self.isolated(), &compartment.tenant) {
            (Some(isolated), Some(tenant)) => isolated.own.get(&**tenant).copied().unwrap_or_default(),
            _ => TenantConfig::default(),
        }
    }

    /// Validates a live change to one tenant's limits and applies it. Returns all limits set for the tenant, and the
    /// event that must then be applied to the tenant's compartment.
    pub(crate) fn change_tenant(
        &mut self,
        compartments: &Compartments,
        tenant: &str,
        change: TenantConfig,
    ) -> Result<(TenantConfig, Option<CompartmentEvent>), SteerError> {
        let numbers = change.of_workers();
        self.check_tenant(compartments, tenant, &numbers)?;
        Ok(match &mut self.layout {
            Layout::Isolated(isolated) => {
                let own = isolated.own.entry(tenant.to_owned()).or_default();
                *own = change.or(*own);
                let compartment = isolated.by_tenant.get(tenant).copied();
                (*own, compartment.map(|compartment| (compartment, Event::ChangeLimits(numbers))))
            }
            Layout::Shared(compartment) => {
                let own = self.own.entry(tenant.to_owned()).or_default();
                *own = change.or(*own);
                let event =
                    Event::ChangeTenantLimits { tenant: tenant.to_owned(), overrides: own.of_share() };
                (*own, Some((*compartment, event)))
            }
        })
    }

    fn check_tenant(
        &self,
        compartments: &Compartments,
        tenant: &str,
        numbers: &LimitChange,
    ) -> Result<(), SteerError> {
        let unfit = |message: String| Err(SteerError::Conflict(message));
        if tenant.is_empty() || tenant.len() > TENANT_BYTES_MAX || tenant.contains('\0') {
            return unfit(format!(
                "a tenant's name must be 1 to {TENANT_BYTES_MAX} bytes long and must not contain a NUL byte"
            ));
        }
        match &self.layout {
            Layout::Isolated(isolated) => {
                let is_new = !isolated.own.contains_key(tenant);
                if is_new && isolated.own.len() >= TENANT_LIMITS_MAX {
                    return unfit(format!(
                        "{TENANT_LIMITS_MAX} tenants already have separate limits, which is the maximum"
                    ));
                }
                let mut limits = isolated.limits_of(tenant);
                numbers.apply_to(&mut limits);
                if u64::from(limits.max_in_flight) > IN_FLIGHT_CEILING {
                    return unfit(format!("max_in_flight (per worker) must be at most {IN_FLIGHT_CEILING}"));
                }
                check_tenant_permits(tenant, &limits, self.program.sandbox())?;
                let Some(processes) = numbers.processes else { return Ok(()) };
                let others = isolated.own.iter().filter(|(other, _)| *other != tenant);
                let own = others.filter_map(|(_, own)| own.processes).chain([processes]);
                check_workers(&isolated.limits, own, isolated.max_active)
            }
            Layout::Shared(compartment) => {
                let own = &self.own;
                if !own.contains_key(tenant) && own.len() >= TENANT_LIMITS_MAX {
                    return unfit(format!(
                        "{TENANT_LIMITS_MAX} tenants already have separate limits, which is the maximum"
                    ));
                }
                if numbers.processes.is_some() {
                    return unfit("separate processes for a tenant need tenants.isolate = true".into());
                }
                let limit = compartments[*compartment].policy.limits().rate_limit;
                let is_common = limit.is_some_and(|limit| limit.per == RatePer::Bulkhead);
                if numbers.rate_limit.is_some() && is_common {
                    return unfit(
                        "a separate rate_limit for a tenant needs rate_limit.per = \"tenant\"".into(),
                    );
                }
                Ok(())
            }
        }
    }
}

impl Isolated {
    /// Returns the limits that apply to a tenant, including any limits set for this tenant alone.
    pub(super) fn limits_of(&self, tenant: &str) -> Limits {
        let mut limits = self.limits.clone();
        if let Some(own) = self.own.get(tenant) {
            own.of_workers().apply_to(&mut limits);
        }
        limits
    }
}

/// Limits that result from merging a new configuration with live changes.
pub(crate) struct MergedLimits {
    limits: Limits,
    own: BTreeMap<String, TenantConfig>,
    /// Keys of the discarded live changes.
    dropped: Vec<String>,
}

/// Key of a limit that can be changed live, and a function that copies this limit. The function copies from its second
/// argument to its first argument.
type LiveLimit = (&'static str, fn(&mut Limits, &Limits));

const LIVE_LIMITS: &[LiveLimit] = &[
    ("max_in_flight", |to, live| to.max_in_flight = live.max_in_flight),
    ("processes", |to, live| to.processes = live.processes),
    ("max_queue", |to, live| to.max_queue = live.max_queue),
    ("rate_limit", |to, live| to.rate_limit = live.rate_limit),
];

/// Returns the live value if the key has the same value in the old configuration file and the new one. Otherwise,
/// returns the value from the new file.
fn kept<T: PartialEq + Clone>(before: &T, after: &T, live: &T) -> T {
    if before == after { live.clone() } else { after.clone() }
}

fn limits_with_live(before: &Limits, after: &Limits, live: &Limits) -> Limits {
    Limits {
        processes: kept(&before.processes, &after.processes, &live.processes),
        max_in_flight: kept(&before.max_in_flight, &after.max_in_flight, &live.max_in_flight),
        max_queue: kept(&before.max_queue, &after.max_queue, &live.max_queue),
        rate_limit: kept(&before.rate_limit, &after.rate_limit, &live.rate_limit),
        ..after.clone()
    }
}

fn own_with_live(
    before: &BTreeMap<String, TenantConfig>,
    after: &BTreeMap<String, TenantConfig>,
    live: &BTreeMap<String, TenantConfig>,
) -> BTreeMap<String, TenantConfig> {
    let of = |numbers: &BTreeMap<String, TenantConfig>, tenant: &String| {
        numbers.get(tenant).copied().unwrap_or_default()
    };
    let tenants = after.keys().chain(live.keys());
    let merged = tenants.map(|tenant| {
        let (before, after, live) = (of(before, tenant), of(after, tenant), of(live, tenant));
        let numbers = TenantConfig {
            processes: kept(&before.processes, &after.processes, &live.processes),
            max_in_flight: kept(&before.max_in_flight, &after.max_in_flight, &live.max_in_flight),
            max_queue: kept(&before.max_queue, &after.max_queue, &live.max_queue),
            rate_limit: kept(&before.rate_limit, &after.rate_limit, &live.rate_limit),
        };
        (tenant.clone(), numbers)
    });
    merged.filter(|(_, numbers)| *numbers != TenantConfig::default()).collect()
}

/// Returns an error if a worker could run several programs concurrently although the sandbox would not isolate them
/// from each other.
fn check_programs(sandbox: &Sandbox, max_in_flight: u32) -> Result<(), SteerError> {
    match sandbox.why_single_program() {
        Some(why) if max_in_flight > 1 => Err(SteerError::Conflict(format!(
            "max_in_flight must not exceed 1: programs in the same worker would not be isolated from each other \
             ({why})"
        ))),
        _ => Ok(()),
    }
}

/// Checks that the permits and the queue length of a bulkhead or isolated tenant are valid and consistent.
fn check_permits(limits: &Limits, sandbox: &Sandbox) -> Result<(), SteerError> {
    if limits.max_in_flight == 0 && limits.max_queue > 0 {
        let message = "max_in_flight is 0, so queued jobs would never run: set max_queue to 0, or max_in_flight to at \
                       least 1";
        return Err(SteerError::Conflict(message.into()));
    }
    check_programs(sandbox, limits.max_in_flight)?;
    let most = u64::from(limits.processes) * u64::from(limits.max_in_flight);
    if most > PERMITS_CEILING {
        let message = format!("processes x max_in_flight must be at most {PERMITS_CEILING}");
        return Err(SteerError::Conflict(message));
    }
    check_adaptive(limits, most)
}

/// Checks that the permits and the queue length of an isolated tenant are valid and consistent. Error messages contain
/// the tenant's name.
fn check_tenant_permits(tenant: &str, limits: &Limits, sandbox: &Sandbox) -> Result<(), SteerError> {
    check_permits(limits, sandbox).map_err(|error| match error {
        SteerError::Conflict(why) => {
            SteerError::Conflict(format!("tenant '{}': {why}", tenant.escape_debug()))
        }
        other => other,
    })
}

/// Returns an error if the adaptive limit's maximum exceeds the number of permits, `most`.
fn check_adaptive(limits: &Limits, most: u64) -> Result<(), SteerError> {
    match &limits.adaptive {
        Some(adaptive) if u64::from(adaptive.max) > most => Err(SteerError::Conflict(format!(
            "adaptive.max ({}) would be above processes x max_in_flight ({most}): lower adaptive.max in the \
             configuration file first",
            adaptive.max
        ))),
        _ => Ok(()),
    }
}

/// Returns an error if a bulkhead with isolated tenants could have too many workers, including spares. Only
/// `max_active` tenants have workers at the same time, so the maximum is reached by the tenants with the most
/// processes. `own` contains the numbers of processes that were set for individual tenants.
fn check_workers(
    limits: &Limits,
    own: impl Iterator<Item = u32>,
    max_active: usize,
) -> Result<(), SteerError> {
    let mut larger: Vec<u32> = own.filter(|processes| *processes > limits.processes).collect();
    larger.sort_unstable_by(|a, b| b.cmp(a));
    let of_each = larger.into_iter().chain(std::iter::repeat(limits.processes)).take(max_active);
    let spares = u64::from(limits.start.spares);
    let workers: u64 = of_each.map(|processes| u64::from(processes) + spares).sum();
    if workers <= ISOLATED_WORKERS_CEILING {
        return Ok(());
    }
    let common = (u64::from(limits.processes) + spares) * max_active as u64;
    let message = match common <= ISOLATED_WORKERS_CEILING {
        true => format!(
            "with the processes set for individual tenants, there could be {workers} workers at the same time, above \
             {ISOLATED_WORKERS_CEILING}: reduce processes, here or for other tenants"
        ),
        false => format!(
            "(processes + start.spares) x tenants.max_active must be at most {ISOLATED_WORKERS_CEILING}"
        ),
    };
    Err(SteerError::Conflict(message))
}

/// Bulkhead settings that cannot be changed live.
#[derive(Clone, Copy)]
struct FixedSettings<'s> {
    sandbox: &'s Sandbox,
    /// Maximum number of tenants that can have workers at the same time, or `None` if tenants are not isolated.
    max_active: Option<usize>,
    has_own_pressure: bool,
}

/// Returns an error if the bulkhead has no queue but a setting requires one.
fn check_queue(limits: &Limits, has_own_pressure: bool) -> Result<(), SteerError> {
    let unfit = |(what, help): (String, String)| Err(SteerError::Conflict(format!("{what}: {help}")));
    match limits.max_queue {
        0 if limits.overflow == Overflow::EvictOldest => unfit(config::overflow_needs_queue(
            format_args!("\"{}\"", limits.overflow.name()),
            limits.max_queue,
        )),
        0 if has_own_pressure => unfit(config::pressure_needs_queue(limits.max_queue)),
        _ => Ok(()),
    }
}

/// Checks that limits do not contradict each other. Limits in a configuration file must pass the same checks.
fn check_limits(
    limits: &Limits,
    own: &BTreeMap<String, TenantConfig>,
    fixed: FixedSettings<'_>,
) -> Result<(), SteerError> {
    check_queue(limits, fixed.has_own_pressure)?;
    check_permits(limits, fixed.sandbox)?;
    if let Some(max_active) = fixed.max_active {
        for (tenant, own) in own {
            let mut limits = limits.clone();
            own.of_workers().apply_to(&mut limits);
            check_tenant_permits(tenant, &limits, fixed.sandbox)?;
        }
        return check_workers(limits, own.values().filter_map(|own| own.processes), max_active);
    }
    let is_common = limits.rate_limit.is_some_and(|limit| limit.per == RatePer::Bulkhead);
    if is_common && own.values().any(|own| own.rate_limit.is_some()) {
        let message = "some tenants have a separate rate limit, which requires rate_limit.per = \"tenant\"";
        return Err(SteerError::Conflict(message.into()));
    }
    Ok(())
}
