//! Keeping account of how many jobs each bulkhead has: once in a turn for those where something happened.

use std::sync::Arc;

use bulkhead_policy::Counters;

use super::Shard;
use super::named::Layout;
use crate::demand::{Level, Observation, numbers_of};

impl Shard {
    /// Counts how a compartment stood until now.
    pub(super) fn count_demand(&mut self, index: usize) {
        let compartment = &mut self.compartments[index];
        let level = Level::of(&compartment.policy, self.now);
        let before = std::mem::replace(&mut compartment.level, level);
        if compartment.is_replay {
            return;
        }
        let named = compartment.named;
        if self.named[named].demand.is_due(self.now, self.limits_of(named)) {
            self.settle_demand(named);
        }
        self.named[named].demand.stood(before, self.now);
    }

    #[cold]
    fn settle_demand(&mut self, named: usize) {
        let (numbers, counters) = (numbers_of(self.limits_of(named)), self.counters_of(named));
        self.named[named].demand.settle(self.now, numbers, counters);
    }

    /// What was seen of a bulkhead lately; `None` if there is none of that name.
    pub(super) fn observation(&mut self, name: &str) -> Option<Box<Observation>> {
        let &named = self.by_name.get(name)?;
        for compartment in self.compartments_of(named) {
            self.count_demand(compartment);
        }
        self.settle_demand(named);
        let (limits, counters) = (self.limits_of(named), self.counters_of(named));
        Some(Box::new(self.named[named].demand.observation(self.now, limits, counters)))
    }

    /// What was counted since the start, tenants that are forgotten included.
    fn counters_of(&self, named: usize) -> Counters {
        let mut sum = Counters::default();
        if let Layout::Isolated(isolated) = &self.named[named].layout {
            sum.add(&isolated.past);
        }
        for compartment in self.compartments_of(named) {
            sum.add(self.compartments[compartment].policy.counters());
        }
        sum
    }

    /// The processes of all workers, and whose they are.
    pub(super) fn worker_processes(&self) -> Vec<(Arc<str>, u32)> {
        let links = self.links.iter().flatten();
        links.filter_map(|link| Some((self.owner(link.compartment).name.clone(), link.pid?))).collect()
    }
}
