//! Another version of the file put in force while jobs run.
//!
//! Bulkheads and compartments keep their places for as long as anything of them is there, and a place is used
//! again only when nothing is: no job, no worker, no job of theirs elsewhere. Whatever names a bulkhead for
//! later (a fallback, an entry of `[[access]]`) does so by its name.

use std::collections::BTreeMap;

use bulkhead_policy::{Event, Limits};
use serde_json::json;

use super::named::{Compartment, Layout, Named, Presence};
use super::steer::check_fit;
use super::{Incoming, Shard, ShardLimits};
use crate::command::{Severity, SteerError};
use crate::demand::Demand;
use crate::program::TenantNumbers;
use crate::reload::{Reconfigured, Reload, Settled};

impl Shard {
    pub(super) fn reload(&mut self, reload: Reload) -> Result<(), SteerError> {
        if self.stopping {
            return Err(SteerError::Stopping);
        }
        let Reload { removed, changed, added, access, limits } = reload;
        let result_bytes_max = self.limits.result_bytes_max.max(limits.result_bytes_max);
        self.limits = ShardLimits { result_bytes_max, ..limits };
        removed.iter().for_each(|name| self.retire(name));
        changed.into_iter().for_each(|reconfigured| self.reconfigure(reconfigured));
        for settled in added {
            let named = self.open(settled);
            if let Layout::Shared(compartment) = self.named[named].layout {
                self.apply(compartment, Event::Start, Incoming::None);
            }
        }
        if let Some(access) = access {
            self.access = access;
            self.grant_again();
        }
        Ok(())
    }

    // Coming.

    /// Gives a bulkhead its place. Its workers are still to be started.
    pub(super) fn open(&mut self, settled: Settled) -> usize {
        let limits = settled.max_active.is_none().then(|| settled.limits.clone());
        let name = settled.name.clone();
        let named = self.free_named.pop().unwrap_or(self.named.len());
        let shared = limits.map(|limits| {
            let seed = self.next_seed();
            let compartment = Compartment::new(named, None, limits, seed, self.now);
            self.settle_in(compartment)
        });
        let demand = Demand::new(self.now, &settled.limits);
        let new = Named { demand, ..Named::new(settled, shared) };
        match self.named.get_mut(named) {
            Some(place) => *place = new,
            None => self.named.push(new),
        }
        self.by_name.insert(name, named);
        named
    }

    /// A place for a compartment: one that is free, or a new one.
    pub(super) fn settle_in(&mut self, mut compartment: Compartment) -> usize {
        match self.free_compartments.pop() {
            Some(place) => {
                compartment.is_touched = self.compartments[place].is_touched;
                self.compartments[place] = compartment;
                place
            }
            None => {
                self.compartments.push(compartment);
                self.compartments.len() - 1
            }
        }
    }

    /// No two compartments draw the same numbers.
    pub(super) fn next_seed(&mut self) -> u64 {
        self.seeds += 1;
        self.seed ^ self.seeds.rotate_left(32) ^ self.now.0
    }

    // Other values.

    fn reconfigure(&mut self, reconfigured: Reconfigured) {
        let Reconfigured { settled, limits_before, own_before, replaces_workers } = reconfigured;
        let Some(&named) = self.by_name.get(&settled.name) else { return };
        let (limits, own) = self.with_live(named, &settled, &limits_before, &own_before);
        if replaces_workers {
            self.named[named].program = settled.program.clone();
            for compartment in self.compartments_of(named) {
                self.apply(compartment, Event::Replace, Incoming::None);
            }
        }
        let mut shared = limits.clone();
        if settled.max_active.is_none() {
            shared.tenants.own = own.iter().map(|(tenant, own)| (tenant.clone(), own.of_share())).collect();
        }
        self.named[named].put(&settled, limits, own);
        for compartment in self.compartments_of(named) {
            let limits = self.limits_for(named, compartment).unwrap_or_else(|| shared.clone());
            self.apply(compartment, Event::Reconfigure(Box::new(limits)), Incoming::None);
        }
        self.want_settling(named);
    }

    /// What a file says, but for what was changed live and is the same in the file as before. If the two do not
    /// go together, the file wins.
    fn with_live(
        &self,
        named: usize,
        settled: &Settled,
        limits_before: &Limits,
        own_before: &BTreeMap<String, TenantNumbers>,
    ) -> (Limits, BTreeMap<String, TenantNumbers>) {
        let entry = &self.named[named];
        let own = own_with_live(own_before, &settled.own, entry.own_numbers());
        let limits = limits_with_live(limits_before, &settled.limits, self.limits_of(named));
        match check_fit(&limits, &own, settled.max_active) {
            Ok(()) => (limits, own),
            Err(_) => (settled.limits.clone(), settled.own.clone()),
        }
    }

    /// The numbers for a tenant's compartment, as its bulkhead has them now.
    fn limits_for(&self, named: usize, compartment: usize) -> Option<Limits> {
        let Layout::Isolated(isolated) = &self.named[named].layout else { return None };
        Some(isolated.limits_of(self.compartments[compartment].tenant.as_deref()?))
    }

    // Going.

    /// A bulkhead takes no more jobs: nobody finds it any more.
    fn retire(&mut self, name: &str) {
        if let Some(named) = self.by_name.remove(name) {
            self.named[named].presence = Presence::Leaving;
            self.leaving.push(named);
        }
    }

    /// Brings bulkheads that are to go on as far as they are.
    pub(super) fn settle_leaving(&mut self) {
        let mut at = 0;
        while let Some(&named) = self.leaving.get(at) {
            if self.wind_up(named) {
                self.leaving.swap_remove(at);
                self.vacate(named);
            } else {
                at += 1;
            }
        }
    }

    /// Stops what has no job any more. Returns whether nothing is left.
    fn wind_up(&mut self, named: usize) -> bool {
        let by = self.now + self.limits.drain_timeout;
        let is_replayed = |place: usize| self.compartments[place].named == named;
        let mut is_over = !self.replays.iter().any(|replay| is_replayed(replay.compartment));
        for compartment in self.compartments_of(named) {
            let policy = &self.compartments[compartment].policy;
            if policy.has_no_jobs() && !policy.is_stopping() {
                self.apply(compartment, Event::Stop { by }, Incoming::None);
            }
            let policy = &self.compartments[compartment].policy;
            // One whose jobs are elsewhere is still to hear of them.
            is_over &= policy.is_stopped() && policy.counters().elsewhere == 0;
        }
        is_over
    }

    fn vacate(&mut self, named: usize) {
        let snapshot = self.snapshot(named);
        let fields = vec![("submitted", json!(snapshot.submitted)), ("done", json!(snapshot.done))];
        self.named_event(Severity::Info, "bulkhead_removed", named, fields);
        for compartment in self.compartments_of(named) {
            self.vacate_compartment(compartment);
        }
        self.refusals.forget(named);
        self.named[named].presence = Presence::Gone;
        self.free_named.push(named);
        self.check_started();
    }

    /// Nothing of it is left.
    pub(super) fn vacate_compartment(&mut self, place: usize) {
        let mut vacant = Compartment::vacant(self.now);
        vacant.is_touched = self.compartments[place].is_touched;
        self.compartments[place] = vacant;
        self.timers.clear(place as u32);
        self.free_compartments.push(place);
    }
}

/// What was changed live stays, unless its key is another in the file.
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
    before: &BTreeMap<String, TenantNumbers>,
    after: &BTreeMap<String, TenantNumbers>,
    live: &BTreeMap<String, TenantNumbers>,
) -> BTreeMap<String, TenantNumbers> {
    let of = |numbers: &BTreeMap<String, TenantNumbers>, tenant: &String| {
        numbers.get(tenant).copied().unwrap_or_default()
    };
    let tenants = after.keys().chain(live.keys());
    let merged = tenants.map(|tenant| {
        let (before, after, live) = (of(before, tenant), of(after, tenant), of(live, tenant));
        let numbers = TenantNumbers {
            processes: kept(&before.processes, &after.processes, &live.processes),
            max_in_flight: kept(&before.max_in_flight, &after.max_in_flight, &live.max_in_flight),
            max_queue: kept(&before.max_queue, &after.max_queue, &live.max_queue),
            rate_limit: kept(&before.rate_limit, &after.rate_limit, &live.rate_limit),
        };
        (tenant.clone(), numbers)
    });
    merged.filter(|(_, numbers)| *numbers != TenantNumbers::default()).collect()
}
