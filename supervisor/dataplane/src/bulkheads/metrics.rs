//! Collects the metrics and the readiness of all bulkheads when the control plane requests them. All values are read at
//! the same time, so that sums are consistent. `counting` updates the counters, and the control plane renders the
//! metrics as text.

use std::collections::HashSet;
use std::sync::Arc;

use bulkhead_api::ShortState;
use bulkhead_plane::command::BulkheadReadiness;
use bulkhead_plane::possible_series::PossibleSeries;
use bulkhead_plane::scrape::BulkheadNumbers;
use bulkhead_policy::{Activity, BreakerState, BulkheadState, Time, WorkerSummary};

use super::snapshots::{CombinedState, worst};
use super::{BulkheadEntry, BulkheadIndex, Bulkheads, Compartment, Compartments, Layout, Presence};

/// Maximum number of workers of a bulkhead for which metrics are exported. No machine can run this many workers.
const WORKERS_SHOWN_MAX: usize = 4096;

impl Bulkheads {
    /// Returns the metrics of all bulkheads. `has_access` is true if the configuration contains access rules.
    pub(crate) fn scrape(
        &mut self,
        compartments: &Compartments,
        now: Time,
        has_access: bool,
    ) -> Vec<BulkheadNumbers> {
        let hosts: HashSet<Arc<str>> =
            self.iter().flat_map(|(_, entry)| entry.fallback.iter().cloned()).collect();
        let mut numbers = Vec::with_capacity(self.values().count());
        for bulkhead in self.with_metrics() {
            let entry = &mut self.slab[bulkhead];
            let possible = entry.possible_now(compartments, has_access, hosts.contains(&entry.name));
            entry.possible.add(&possible);
            numbers.push(entry.numbers(compartments, now));
        }
        numbers
    }

    /// Returns the bulkheads whose metrics are exported. Includes a removed bulkhead unless a bulkhead that was added
    /// later has the same name.
    fn with_metrics(&self) -> Vec<BulkheadIndex> {
        let is_newest = |index, name: &Arc<str>| {
            self.leaving.iter().rfind(|&&other| self[other].name == *name) == Some(&index)
        };
        let is_reported = |index, entry: &BulkheadEntry| match entry.presence {
            Presence::Here => true,
            Presence::Leaving => !self.by_name.contains_key(&entry.name) && is_newest(index, &entry.name),
        };
        self.iter().filter(|(index, entry)| is_reported(*index, entry)).map(|(index, _)| index).collect()
    }

    /// Returns the readiness of each configured bulkhead.
    pub(crate) fn readiness(&self, compartments: &Compartments) -> Vec<BulkheadReadiness> {
        let readiness = |bulkhead: BulkheadIndex| {
            let entry = &self[bulkhead];
            let (state, detail) = entry.state(compartments);
            let state = ShortState { detail, name: entry.name.to_string(), state: state.into() };
            BulkheadReadiness { state, is_serving: entry.is_serving(compartments) }
        };
        self.configured().into_iter().map(readiness).collect()
    }
}

impl BulkheadEntry {
    fn numbers(&self, compartments: &Compartments, now: Time) -> BulkheadNumbers {
        let shown: Vec<&Compartment> = match &self.layout {
            Layout::Shared(index) => vec![&compartments[*index]],
            Layout::Isolated(isolated) => isolated.active.iter().map(|&index| &compartments[index]).collect(),
        };
        let policies = || shown.iter().map(|compartment| &compartment.policy);
        let active = policies().filter(|policy| policy.activity() != Activity::ScaledToZero);
        let is_shared = self.isolated().is_none();
        BulkheadNumbers {
            name: self.name.clone(),
            counters: self.counters.clone(),
            possible: self.possible,
            active: policies().map(|policy| policy.in_flight()).sum(),
            limit: policies().map(|policy| policy.limit()).sum(),
            adaptive: self.adaptive(compartments),
            queued: policies().map(|policy| policy.queued() as u64).sum(),
            queue_capacity: active.map(|policy| u64::from(policy.limits().max_queue)).sum(),
            breaker: self.breaker(compartments),
            state: self.state(compartments).0,
            service: self.service.service(now),
            workers: worker_views(&shown),
            slots: if is_shared { self.limits(compartments).processes } else { 1 },
            memory_limit: self.memory_limit,
        }
    }

    /// Returns the metric series whose values can become nonzero under the current configuration.
    fn possible_now(
        &self,
        compartments: &Compartments,
        has_access: bool,
        has_guests: bool,
    ) -> PossibleSeries {
        let mut possible = PossibleSeries::new(self.limits(compartments), self.tenant_limits().values());
        possible.has_access = has_access;
        possible.has_fallback = !self.fallback.is_empty();
        possible.has_guests = has_guests;
        possible.was_opened = self.breaker(compartments) == BreakerState::ForcedOpen;
        possible
    }

    /// Returns a bulkhead's state, and the reason if the state is not `ready`.
    pub(crate) fn state(&self, compartments: &Compartments) -> (BulkheadState, Option<String>) {
        let mut states = CombinedState::default();
        let mut trouble = None;
        let mut add = |compartment: &Compartment| {
            if let Some(state) = compartment.counted_state() {
                states.add(state);
                trouble = trouble.take().or_else(|| {
                    Some(compartment.policy.last_failure()).filter(|text| !text.is_empty()).map(str::to_owned)
                });
            }
        };
        let mut is_draining = false;
        match &self.layout {
            Layout::Shared(index) => add(&compartments[*index]),
            Layout::Isolated(isolated) => {
                is_draining = isolated.is_draining;
                let shown = isolated.active.union(&isolated.failed);
                shown.for_each(|&index| add(&compartments[index]));
            }
        }
        let state = states.combined();
        let detail = trouble.filter(|_| state != BulkheadState::Ready);
        (if is_draining { BulkheadState::Draining } else { state }, detail)
    }

    /// Returns true if a worker can take a job now. Workers of isolated tenants start on demand, so such a bulkhead is
    /// serving unless it is draining.
    fn is_serving(&self, compartments: &Compartments) -> bool {
        match &self.layout {
            Layout::Shared(index) => compartments[*index].policy.is_serving(),
            Layout::Isolated(isolated) => !isolated.is_draining,
        }
    }

    /// Returns the breaker's state. For isolated tenants, returns the most severe state of all compartments.
    pub(crate) fn breaker(&self, compartments: &Compartments) -> BreakerState {
        match &self.layout {
            Layout::Shared(index) => compartments[*index].policy.breaker(),
            Layout::Isolated(isolated) if isolated.is_forced_open => BreakerState::ForcedOpen,
            Layout::Isolated(isolated) => {
                worst(isolated.tripped.iter().map(|&index| compartments[index].policy.breaker()))
            }
        }
    }
}

/// Returns the workers of all given compartments. Their slots are numbered consecutively across compartments.
fn worker_views(compartments: &[&Compartment]) -> Vec<WorkerSummary> {
    let mut all = Vec::new();
    let mut first = 0;
    for compartment in compartments {
        let room = WORKERS_SHOWN_MAX.saturating_sub(all.len());
        let own = compartment.policy.worker_summaries().take(room);
        all.extend(own.map(|worker| WorkerSummary { slot: worker.slot + first, ..worker }));
        first += compartment.policy.limits().processes;
    }
    all
}
