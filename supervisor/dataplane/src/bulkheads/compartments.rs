//! All compartments by index, with timers.

use bulkhead_policy::{Time, Timers};

use super::{Compartment, CompartmentIndex, Slab, owns_slab};
use crate::slab::SlabIndex;

#[derive(Default)]
pub(crate) struct Compartments {
    slab: Slab<CompartmentIndex, Compartment>,
    timers: Timers,
    /// Compartments whose timers may be outdated.
    touched: Vec<CompartmentIndex>,
    /// Seed that differs between runs.
    seed: u64,
    /// Number of seeds derived from `seed`.
    seeds: u64,
    /// Number of jobs so far in all compartments, including removed ones.
    jobs: u64,
}

owns_slab!(Compartments, CompartmentIndex, Compartment);

impl Compartments {
    pub(crate) fn new(seed: u64) -> Self {
        Self { seed, ..Self::default() }
    }

    /// Returns a seed for a new compartment. No two compartments get equal seeds.
    pub(crate) fn next_seed(&mut self, now: Time) -> u64 {
        self.seeds += 1;
        self.seed ^ self.seeds.rotate_left(32) ^ now.0
    }

    /// Returns the sequence number of the next job, which is unique within a supervisor.
    #[inline]
    pub(crate) fn next_job(&mut self) -> u64 {
        self.jobs += 1;
        self.jobs
    }

    /// Marks a compartment in which an event was applied.
    #[inline]
    pub(crate) fn touch(&mut self, index: CompartmentIndex) {
        if !std::mem::replace(&mut self.slab[index].is_touched, true) {
            self.touched.push(index);
        }
    }

    /// Returns and unmarks a marked compartment, which may have been removed.
    pub(crate) fn next_touched(&mut self) -> Option<CompartmentIndex> {
        let index = self.touched.pop()?;
        if let Some(compartment) = self.slab.get_mut(index) {
            compartment.is_touched = false;
        }
        Some(index)
    }

    /// Sets the timer to the policy's next deadline.
    pub(crate) fn set_timer(&mut self, index: CompartmentIndex) {
        match self.slab.get(index).and_then(|compartment| compartment.policy.next_deadline()) {
            Some(at) => self.timers.set(index.number() as u32, at),
            None => self.timers.clear(index.number() as u32),
        }
    }

    pub(crate) fn next_timer(&self) -> Option<Time> {
        self.timers.next()
    }

    /// Returns a compartment whose timer has expired.
    pub(crate) fn pop_due(&mut self, now: Time) -> Option<CompartmentIndex> {
        self.timers.pop_due(now).map(|number| CompartmentIndex::from_number(number as usize))
    }

    /// Removes an empty compartment. The index can be reused at once.
    pub(crate) fn vacate(&mut self, index: CompartmentIndex) {
        self.timers.clear(index.number() as u32);
        drop(self.slab.remove(index));
    }
}
