//! Measures the demand for each bulkhead. Runs once per iteration for each compartment with events.

use bulkhead_plane::command::WorkerProcess;
use bulkhead_plane::demand::{Level, Observation, numbers_of};
use bulkhead_policy::Counters;

use super::DataPlane;
use super::bulkheads::Layout;
use super::links::Link;
use super::slab::{BulkheadIndex, CompartmentIndex};

impl DataPlane {
    /// Records the load of a compartment up to now.
    pub(super) fn record_load(&mut self, index: CompartmentIndex) {
        let Some(compartment) = self.compartments.get_mut(index) else { return };
        let level = Level::of(&compartment.policy, self.now);
        let before = std::mem::replace(&mut compartment.level, level);
        if compartment.is_replay {
            return;
        }
        let bulkhead = compartment.bulkhead;
        if self.bulkheads[bulkhead].demand.is_due(self.now, self.limits_of(bulkhead)) {
            self.update_demand(bulkhead);
        }
        self.bulkheads[bulkhead].demand.stood(before, self.now);
    }

    #[cold]
    fn update_demand(&mut self, bulkhead: BulkheadIndex) {
        let (numbers, counters) = (numbers_of(self.limits_of(bulkhead)), self.counters_of(bulkhead));
        self.bulkheads[bulkhead].demand.settle(self.now, numbers, counters);
    }

    /// Returns the recent measurements of a bulkhead, or `None` if there is no bulkhead with this name.
    pub(super) fn observation(&mut self, name: &str) -> Option<Box<Observation>> {
        let &bulkhead = self.bulkheads.by_name.get(name)?;
        for compartment in self.compartments_of(bulkhead) {
            self.record_load(compartment);
        }
        self.update_demand(bulkhead);
        let (limits, counters) = (self.limits_of(bulkhead), self.counters_of(bulkhead));
        let observation = self.bulkheads[bulkhead].demand.observation(self.now, limits, counters);
        Some(Box::new(Observation { adaptive: self.adaptive_of(bulkhead), ..observation }))
    }

    /// Returns the counters since the start, including forgotten tenants.
    pub(super) fn counters_of(&self, bulkhead: BulkheadIndex) -> Counters {
        let mut sum = Counters::default();
        if let Layout::Isolated(isolated) = &self.bulkheads[bulkhead].layout {
            sum.add(&isolated.forgotten_counters);
        }
        for compartment in self.compartments_of(bulkhead) {
            sum.add(self.compartments[compartment].policy.counters());
        }
        sum
    }

    /// Returns the processes of all workers, with the bulkhead of each.
    pub(super) fn worker_processes(&self) -> Vec<WorkerProcess> {
        let process = |link: &Link| {
            let owner = self.owner(link.compartment);
            Some(WorkerProcess {
                bulkhead: owner.name.clone(),
                pid: link.pid()?,
                generation: link.worker.generation,
                answered: owner.tally.duration.buckets.iter().sum(),
                is_busy: self.compartments[link.compartment].policy.in_flight() > 0,
            })
        };
        self.links.values().filter_map(process).collect()
    }
}
