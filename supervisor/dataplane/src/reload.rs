//! Puts another version of the configuration into force while jobs run.
//!
//! A bulkhead or compartment keeps its index as long as anything is left of it. An index is reused only when there is
//! no job, no worker, and no job in another bulkhead. References that can outlive a bulkhead (a fallback, an entry of
//! `[[access]]`) use its name.

use std::collections::BTreeMap;

use bulkhead_api::{EventKind, Severity};
use bulkhead_config::TenantConfig;
use bulkhead_plane::command::SteerError;
use bulkhead_plane::demand::Demand;
use bulkhead_plane::limits::DataPlaneLimits;
use bulkhead_plane::reload::{BulkheadSpec, ChangedBulkhead, LiveDropped, Reload};
use bulkhead_policy::{Event, Limits};

use super::bulkheads::{BulkheadEntry, Compartment, Layout, Presence};
use super::slab::{BulkheadIndex, CompartmentIndex};
use super::steer::{Fixed, check_fit};
use super::{DataPlane, Incoming};

impl DataPlane {
    pub(super) fn reload(&mut self, reload: Reload) -> Result<LiveDropped, SteerError> {
        if self.stopping {
            return Err(SteerError::Stopping);
        }
        let dropped = self.would_drop(&reload);
        let Reload { removed, changed, added, access, limits } = reload;
        let result_bytes_max = self.limits.result_bytes_max.max(limits.result_bytes_max);
        self.limits = DataPlaneLimits { result_bytes_max, ..limits };
        removed.iter().for_each(|name| self.retire(name));
        changed.into_iter().for_each(|reconfigured| self.reconfigure(reconfigured));
        for spec in added {
            let bulkhead = self.open(spec);
            // Other bulkheads may have this bulkhead as a fallback.
            self.end_leases_of_bytes_needed(bulkhead);
            if let Layout::Shared(compartment) = self.bulkheads[bulkhead].layout {
                self.apply(compartment, Event::Start, Incoming::None);
            }
        }
        if let Some(access) = access {
            self.entrance.access = access;
            self.grant_again();
        }
        Ok(dropped)
    }

    /// Returns the live changes that are not compatible with a reload.
    pub(super) fn would_drop(&self, reload: &Reload) -> LiveDropped {
        let of = |reconfigured: &ChangedBulkhead| {
            let &bulkhead = self.bulkheads.by_name.get(&reconfigured.spec.name)?;
            let dropped = self.with_live(bulkhead, reconfigured).dropped;
            (!dropped.is_empty()).then(|| (reconfigured.spec.name.clone(), dropped))
        };
        reload.changed.iter().filter_map(of).collect()
    }

    // Adding bulkheads.

    /// Adds a bulkhead. The workers are not started yet.
    pub(super) fn open(&mut self, spec: BulkheadSpec) -> BulkheadIndex {
        let limits = spec.max_active.is_none().then(|| spec.limits.clone());
        let name = spec.name.clone();
        let bulkhead = self.bulkheads.next();
        let shared = limits.map(|limits| {
            let seed = self.compartments.next_seed(self.now);
            self.compartments.insert(Compartment::new(bulkhead, None, limits, seed, self.now))
        });
        let demand = Demand::new(self.now, &spec.limits);
        self.bulkheads.insert(BulkheadEntry { demand, ..BulkheadEntry::new(spec, shared) });
        self.bulkheads.by_name.insert(name, bulkhead);
        bulkhead
    }

    // Changing bulkheads.

    fn reconfigure(&mut self, reconfigured: ChangedBulkhead) {
        let Some(&bulkhead) = self.bulkheads.by_name.get(&reconfigured.spec.name) else { return };
        let Merged { limits, own, .. } = self.with_live(bulkhead, &reconfigured);
        let ChangedBulkhead { spec, replaces_workers, .. } = reconfigured;
        if replaces_workers {
            self.bulkheads[bulkhead].program = spec.program.clone();
            for compartment in self.compartments_of(bulkhead) {
                self.replace_template(compartment);
                self.apply(compartment, Event::ReplaceWorkers, Incoming::None);
            }
        }
        let mut shared = limits.clone();
        if spec.max_active.is_none() {
            shared.tenants.overrides =
                own.iter().map(|(tenant, own)| (tenant.clone(), own.of_share())).collect();
        }
        self.bulkheads[bulkhead].put(&spec, limits, own);
        self.end_leases_of_bytes_needed(bulkhead);
        for compartment in self.compartments_of(bulkhead) {
            let limits = self.limits_for(bulkhead, compartment).unwrap_or_else(|| shared.clone());
            self.apply(compartment, Event::Reconfigure(Box::new(limits)), Incoming::None);
        }
        self.want_settling(bulkhead);
    }

    /// Merges a configuration with live changes. A live change stays if the key is unchanged in the file and the
    /// result is valid.
    fn with_live(&self, bulkhead: BulkheadIndex, reconfigured: &ChangedBulkhead) -> Merged {
        let ChangedBulkhead { spec, limits_before, tenants_before, .. } = reconfigured;
        let entry = &self.bulkheads[bulkhead];
        let own = own_with_live(tenants_before, &spec.tenants, entry.own_numbers());
        let limits = limits_with_live(limits_before, &spec.limits, self.limits_of(bulkhead));
        let fixed = Fixed {
            sandbox: spec.program.sandbox(),
            max_active: spec.max_active,
            has_own_pressure: spec.has_own_pressure,
        };
        let fits = |limits: &Limits, own: &BTreeMap<_, _>| check_fit(limits, own, fixed).is_ok();
        if fits(&limits, &own) {
            return Merged { limits, own, dropped: Vec::new() };
        }
        let mut merged =
            Merged { limits: spec.limits.clone(), own: spec.tenants.clone(), dropped: Vec::new() };
        for (key, take) in NUMBERS {
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
        // There can be thousands of tenants, so either all live changes of tenants stay or none.
        if fits(&merged.limits, &own) {
            merged.own = own;
        } else if merged.own != own {
            merged.dropped.push("tenant".to_owned());
        }
        merged
    }

    /// Returns the current limits for the compartment of a tenant.
    fn limits_for(&self, bulkhead: BulkheadIndex, compartment: CompartmentIndex) -> Option<Limits> {
        let Layout::Isolated(isolated) = &self.bulkheads[bulkhead].layout else { return None };
        Some(isolated.limits_of(self.compartments[compartment].tenant.as_deref()?))
    }

    // Removing bulkheads.

    /// Starts to remove a bulkhead, which clients can no longer find.
    fn retire(&mut self, name: &str) {
        if let Some(bulkhead) = self.bulkheads.by_name.remove(name) {
            self.bulkheads[bulkhead].presence = Presence::Leaving;
            self.bulkheads.leaving.push(bulkhead);
        }
    }

    /// Continues the removal of bulkheads as far as possible.
    pub(super) fn settle_leaving(&mut self) {
        let mut at = 0;
        while let Some(&bulkhead) = self.bulkheads.leaving.get(at) {
            if self.wind_up(bulkhead) {
                self.bulkheads.leaving.swap_remove(at);
                self.vacate(bulkhead);
            } else {
                at += 1;
            }
        }
    }

    /// Stops compartments without jobs. Returns true if nothing is left of the bulkhead.
    fn wind_up(&mut self, bulkhead: BulkheadIndex) -> bool {
        let by = self.now + self.limits.drain_timeout;
        let is_replayed = |place: CompartmentIndex| self.compartments[place].bulkhead == bulkhead;
        let mut is_over = !self.orders.replays.iter().any(|replay| is_replayed(replay.compartment));
        for compartment in self.compartments_of(bulkhead) {
            let policy = &self.compartments[compartment].policy;
            if policy.has_no_jobs() && !policy.is_stopping() {
                self.apply(compartment, Event::Stop { by }, Incoming::None);
            }
            let policy = &self.compartments[compartment].policy;
            // A compartment with jobs in other bulkheads still has to count the ends of these jobs.
            is_over &= policy.is_stopped() && policy.counters().elsewhere == 0;
        }
        is_over
    }

    fn vacate(&mut self, bulkhead: BulkheadIndex) {
        let snapshot = self.snapshot(bulkhead);
        let what = EventKind::BulkheadRemoved { submitted: snapshot.submitted, done: snapshot.done };
        self.bulkhead_event(Severity::Info, bulkhead, what);
        for compartment in self.compartments_of(bulkhead) {
            self.end_template(compartment);
            self.compartments.vacate(compartment);
        }
        self.entrance.refusals.forget(bulkhead);
        self.bulkheads.remove(bulkhead);
        self.check_started();
    }
}

/// Result of merging a configuration with live changes.
struct Merged {
    limits: Limits,
    own: BTreeMap<String, TenantConfig>,
    /// Live changes that were dropped.
    dropped: Vec<String>,
}

/// A key that can be changed live, and a function that copies the value.
type Number = (&'static str, fn(&mut Limits, &Limits));

const NUMBERS: &[Number] = &[
    ("max_in_flight", |to, live| to.max_in_flight = live.max_in_flight),
    ("processes", |to, live| to.processes = live.processes),
    ("max_queue", |to, live| to.max_queue = live.max_queue),
    ("rate_limit", |to, live| to.rate_limit = live.rate_limit),
];

/// Returns the live value, unless the file has changed the key.
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
