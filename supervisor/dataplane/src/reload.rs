//! Puts another version of the configuration into force while jobs run.
//!
//! A bulkhead or compartment keeps its index as long as anything is left of it. An index is reused only when there is
//! no job, no worker, and no job in another bulkhead. References that can outlive a bulkhead (a fallback, an entry of
//! `[[access]]`) use its name.

use std::collections::BTreeMap;

use bulkhead_api::{Severity, What};
use bulkhead_config::TenantConfig;
use bulkhead_plane::command::SteerError;
use bulkhead_plane::demand::Demand;
use bulkhead_plane::limits::DataPlaneLimits;
use bulkhead_plane::reload::{BulkheadSpec, LiveDropped, Reconfigured, Reload};
use bulkhead_policy::{Event, Limits};

use super::bulkheads::{BulkheadEntry, Compartment, Layout, Presence};
use super::commands::{FixedSettings, check_limits};
use super::slab::{BulkheadIndex, CompartmentIndex};
use super::{DataPlane, Incoming};

impl DataPlane {
    pub(super) fn apply_reload(&mut self, reload: Reload) -> Result<LiveDropped, SteerError> {
        if self.is_stopping {
            return Err(SteerError::Stopping);
        }
        let dropped = self.dropped_changes(&reload);
        let Reload { removed, changed, added, access, limits } = reload;
        let result_bytes_max = self.limits.result_bytes_max.max(limits.result_bytes_max);
        self.limits = DataPlaneLimits { result_bytes_max, ..limits };
        removed.iter().for_each(|name| self.start_removal(name));
        changed.into_iter().for_each(|reconfigured| self.reconfigure(reconfigured));
        for spec in added {
            let bulkhead = self.add_bulkhead(spec);
            // Other bulkheads may have this bulkhead as a fallback.
            self.recall_leases_needing_bytes(bulkhead);
            if let Layout::Shared(compartment) = self.bulkheads[bulkhead].layout {
                self.apply(compartment, Event::Start, Incoming::None);
            }
        }
        if let Some(access) = access {
            self.acceptor.access = access;
            self.update_grants();
        }
        Ok(dropped)
    }

    /// Returns the live changes that are not compatible with a reload.
    pub(super) fn dropped_changes(&self, reload: &Reload) -> LiveDropped {
        let of = |reconfigured: &Reconfigured| {
            let &bulkhead = self.bulkheads.by_name.get(&reconfigured.spec.name)?;
            let dropped = self.merge_live_changes(bulkhead, reconfigured).dropped;
            (!dropped.is_empty()).then(|| (reconfigured.spec.name.clone(), dropped))
        };
        reload.changed.iter().filter_map(of).collect()
    }

    // Adding bulkheads.

    /// Adds a bulkhead. The workers are not started yet.
    pub(super) fn add_bulkhead(&mut self, spec: BulkheadSpec) -> BulkheadIndex {
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

    fn reconfigure(&mut self, reconfigured: Reconfigured) {
        let Some(&bulkhead) = self.bulkheads.by_name.get(&reconfigured.spec.name) else { return };
        let MergedLimits { limits, own, .. } = self.merge_live_changes(bulkhead, &reconfigured);
        let Reconfigured { spec, replaces_workers, .. } = reconfigured;
        if replaces_workers {
            self.bulkheads[bulkhead].program = spec.program.clone();
            for compartment in self.compartments_of(bulkhead) {
                self.replace_template(compartment);
                self.apply(compartment, Event::Replace, Incoming::None);
            }
        }
        let mut shared = limits.clone();
        if spec.max_active.is_none() {
            shared.tenants.own = own.iter().map(|(tenant, own)| (tenant.clone(), own.of_share())).collect();
        }
        self.bulkheads[bulkhead].put(&spec, limits, own);
        self.recall_leases_needing_bytes(bulkhead);
        for compartment in self.compartments_of(bulkhead) {
            let limits = self.limits_for(bulkhead, compartment).unwrap_or_else(|| shared.clone());
            self.apply(compartment, Event::Reconfigure(Box::new(limits)), Incoming::None);
        }
        self.schedule_tenant_update(bulkhead);
    }

    /// Merges a configuration with live changes. A live change stays if the key is unchanged in the file and the
    /// result is valid.
    fn merge_live_changes(&self, bulkhead: BulkheadIndex, reconfigured: &Reconfigured) -> MergedLimits {
        let Reconfigured { spec, limits_before, own_before, .. } = reconfigured;
        let entry = &self.bulkheads[bulkhead];
        let own = own_with_live(own_before, &spec.own, entry.tenant_limits());
        let limits = limits_with_live(limits_before, &spec.limits, self.limits_of(bulkhead));
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
            MergedLimits { limits: spec.limits.clone(), own: spec.own.clone(), dropped: Vec::new() };
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
    fn start_removal(&mut self, name: &str) {
        if let Some(bulkhead) = self.bulkheads.by_name.remove(name) {
            self.bulkheads[bulkhead].presence = Presence::Leaving;
            self.bulkheads.leaving.push(bulkhead);
        }
    }

    /// Continues the removal of bulkheads as far as possible.
    pub(super) fn continue_removals(&mut self) {
        let mut at = 0;
        while let Some(&bulkhead) = self.bulkheads.leaving.get(at) {
            if self.stop_idle_compartments(bulkhead) {
                self.bulkheads.leaving.swap_remove(at);
                self.finish_removal(bulkhead);
            } else {
                at += 1;
            }
        }
    }

    /// Stops compartments without jobs. Returns true if nothing is left of the bulkhead.
    fn stop_idle_compartments(&mut self, bulkhead: BulkheadIndex) -> bool {
        let by = self.now + self.limits.drain_timeout;
        let is_replayed = |place: CompartmentIndex| self.compartments[place].bulkhead == bulkhead;
        let mut is_over = !self.commands.replays.iter().any(|replay| is_replayed(replay.compartment));
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

    fn finish_removal(&mut self, bulkhead: BulkheadIndex) {
        let snapshot = self.snapshot(bulkhead);
        let what = What::BulkheadRemoved { submitted: snapshot.submitted, done: snapshot.done };
        self.bulkhead_event(Severity::Info, bulkhead, what);
        for compartment in self.compartments_of(bulkhead) {
            self.end_template(compartment);
            self.compartments.vacate(compartment);
        }
        self.acceptor.rejections.forget(bulkhead);
        self.bulkheads.remove(bulkhead);
        self.check_started();
    }
}

/// Result of merging a configuration with live changes.
struct MergedLimits {
    limits: Limits,
    own: BTreeMap<String, TenantConfig>,
    /// Live changes that were dropped.
    dropped: Vec<String>,
}

/// A key that can be changed live, and a function that copies the value.
type LiveLimit = (&'static str, fn(&mut Limits, &Limits));

const LIVE_LIMITS: &[LiveLimit] = &[
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
