//! Stores all compartments by index, together with their timers and the numbering of jobs. Also lists the compartments
//! whose timers must be updated. The event loop applies events to the compartments, and `policy` inside each
//! compartment decides. `bulkheads` knows which compartments belong to which bulkhead and tenant.

use bulkhead_policy::{Time, Timers};
use bulkhead_shared::JobId;

use super::{Compartment, CompartmentIndex, Slab, owns_slab};
use crate::slab::SlabIndex;

#[derive(Default)]
pub(crate) struct Compartments {
    slab: Slab<CompartmentIndex, Compartment>,
    timers: Timers,
    /// Compartments to which an event was applied after their timer was last set.
    touched: Vec<CompartmentIndex>,
    /// Random seed for this run of the supervisor.
    seed: u64,
    /// Number of seeds that have been derived from `seed` for compartments.
    seeds: u64,
    /// Number of jobs submitted so far to all compartments, including compartments that were removed.
    jobs: u64,
}

owns_slab!(Compartments, CompartmentIndex, Compartment);

impl Compartments {
    pub(crate) fn new(seed: u64) -> Self {
        Self { seed, ..Self::default() }
    }

    /// Returns a unique seed for a new compartment.
    pub(crate) fn next_seed(&mut self, now: Time) -> u64 {
        self.seeds += 1;
        self.seed ^ self.seeds.rotate_left(32) ^ now.0
    }

    /// Returns the sequence number of the next job. The number is unique within a run of the supervisor.
    #[inline]
    pub(crate) fn next_job(&mut self) -> u64 {
        self.jobs += 1;
        self.jobs
    }

    /// Returns the sequence number of the most recent job.
    pub(crate) fn last_job(&self) -> u64 {
        self.jobs
    }

    /// Continues the numbering of jobs after the last number that the predecessor used.
    pub(crate) fn continue_after(&mut self, number: u64) {
        self.jobs = self.jobs.max(number);
    }

    /// Marks a compartment as touched after an event was applied to it.
    #[inline]
    pub(crate) fn touch(&mut self, index: CompartmentIndex) {
        if !std::mem::replace(&mut self.slab[index].is_touched, true) {
            self.touched.push(index);
        }
    }

    /// Returns the next touched compartment and clears its mark. The compartment might already have been
    /// removed.
    pub(crate) fn next_touched(&mut self) -> Option<CompartmentIndex> {
        let index = self.touched.pop()?;
        if let Some(compartment) = self.slab.get_mut(index) {
            compartment.is_touched = false;
        }
        Some(index)
    }

    /// Sets a compartment's timer to the next deadline of the compartment's policy.
    pub(crate) fn set_timer(&mut self, index: CompartmentIndex) {
        match self.slab.get(index).and_then(|compartment| compartment.policy.next_deadline()) {
            Some(at) => self.timers.set(index.number() as u32, at),
            None => self.timers.clear(index.number() as u32),
        }
    }

    pub(crate) fn next_timer(&self) -> Option<Time> {
        self.timers.next()
    }

    /// Removes an expired timer and returns the timer's compartment. Returns `None` if no timer has expired.
    pub(crate) fn pop_due(&mut self, now: Time) -> Option<CompartmentIndex> {
        self.timers.pop_due(now).map(|number| CompartmentIndex::from_number(number as usize))
    }

    /// Returns true if a job has run in another bulkhead, which then passed the job on to this compartment. Policy knows
    /// only the attempts in this compartment.
    pub(crate) fn has_run_elsewhere(&mut self, index: CompartmentIndex, job: JobId) -> bool {
        self.slab[index].policy.record_mut(job).is_some_and(|record| record.earlier_attempts > 0)
    }

    /// Removes a compartment that has no jobs and no workers. Its index can be reused immediately.
    pub(crate) fn vacate(&mut self, index: CompartmentIndex) {
        self.timers.clear(index.number() as u32);
        drop(self.slab.remove(index));
    }
}
