//! All compartments: by their places, with their timers.

use bulkhead_policy::{Time, Timers};

use super::bulkheads::Compartment;
use super::slab::{CompartmentIndex, Slab, SlabIndex, owns_slab};

#[derive(Default)]
pub(super) struct Compartments {
    slab: Slab<CompartmentIndex, Compartment>,
    timers: Timers,
    /// Those whose timers may not be right any more.
    touched: Vec<CompartmentIndex>,
    /// Differs from run to run.
    seed: u64,
    /// How many numbers were drawn from it.
    seeds: u64,
    /// Number of jobs so far in all compartments, including removed ones.
    jobs: u64,
}

owns_slab!(Compartments, CompartmentIndex, Compartment);

impl Compartments {
    pub(super) fn new(seed: u64) -> Self {
        Self { seed, ..Self::default() }
    }

    /// No two compartments draw the same numbers.
    pub(super) fn next_seed(&mut self, now: Time) -> u64 {
        self.seeds += 1;
        self.seed ^ self.seeds.rotate_left(32) ^ now.0
    }

    /// The sequence number of the next job. No two jobs of a supervisor have the same.
    #[inline]
    pub(super) fn next_job(&mut self) -> u64 {
        self.jobs += 1;
        self.jobs
    }

    /// Something has happened in it.
    #[inline]
    pub(super) fn touch(&mut self, index: CompartmentIndex) {
        if !std::mem::replace(&mut self.slab[index].is_touched, true) {
            self.touched.push(index);
        }
    }

    /// One of those where something has happened since they were last asked for. It may be gone.
    pub(super) fn next_touched(&mut self) -> Option<CompartmentIndex> {
        let index = self.touched.pop()?;
        if let Some(compartment) = self.slab.get_mut(index) {
            compartment.is_touched = false;
        }
        Some(index)
    }

    /// Sets the timer by what its policy waits for.
    pub(super) fn set_timer(&mut self, index: CompartmentIndex) {
        match self.slab.get(index).and_then(|compartment| compartment.policy.next_deadline()) {
            Some(at) => self.timers.set(index.number() as u32, at),
            None => self.timers.clear(index.number() as u32),
        }
    }

    pub(super) fn next_timer(&self) -> Option<Time> {
        self.timers.next()
    }

    /// One whose time has come.
    pub(super) fn pop_due(&mut self, now: Time) -> Option<CompartmentIndex> {
        self.timers.pop_due(now).map(|number| CompartmentIndex::from_number(number as usize))
    }

    /// Nothing of it is left. Its place may be another's at once.
    pub(super) fn vacate(&mut self, index: CompartmentIndex) {
        self.timers.clear(index.number() as u32);
        drop(self.slab.remove(index));
    }
}
