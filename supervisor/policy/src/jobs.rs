//! The jobs of a bulkhead and the order in which they wait. Every operation is O(1): the queue is a
//! linked list through the table, so that a job leaves its middle without a search.

use std::time::Duration;

use bulkhead_shared::JobId;

use crate::time::Time;

/// Bits of a [`JobId`] that are the place in the table; also bounds how many jobs there can be.
const INDEX_BITS: u32 = 24;

const NONE: u32 = u32::MAX;

/// Jobs that a bulkhead can hold at once.
const JOBS_MAX: usize = 1 << INDEX_BITS;

pub(crate) struct Job<T> {
    id: JobId,
    /// The caller's record; gone once the client has its answer, though a worker may still be at it.
    pub(crate) cargo: Option<T>,
    pub(crate) received: Time,
    /// When the client is answered at the latest.
    pub(crate) deadline_at: Time,
    /// When the worker is ended for it, whatever else runs there.
    pub(crate) hard_deadline_at: Time,
    pub(crate) idempotent: bool,
    pub(crate) attempts: u32,
    pub(crate) place: Place,
}

impl<T> Job<T> {
    /// The time limit that applies.
    pub(crate) fn limit(&self) -> Duration {
        self.deadline_at.since(self.received)
    }
}

/// Where a job is.
#[derive(Clone, Copy)]
pub(crate) enum Place {
    Entered,
    Queued {
        before: u32,
        after: u32,
    },
    InFlight {
        worker: u32,
        /// Where in the worker's list.
        index: u32,
        since: Time,
        /// Whether the bulkhead's own deadline has passed for it.
        is_overdue: bool,
    },
}

pub(crate) struct Jobs<T> {
    table: Vec<Option<Job<T>>>,
    free: Vec<u32>,
    sequence: u64,
    first: u32,
    last: u32,
    queued: usize,
}

impl<T> Default for Jobs<T> {
    fn default() -> Self {
        Self { table: Vec::new(), free: Vec::new(), sequence: 0, first: NONE, last: NONE, queued: 0 }
    }
}

impl<T> Jobs<T> {
    /// Whether there can be no further job.
    pub(crate) fn is_full(&self) -> bool {
        self.free.is_empty() && self.table.len() >= JOBS_MAX
    }

    /// Enters a job and returns its index. The table must not be full.
    pub(crate) fn insert(
        &mut self,
        cargo: T,
        idempotent: bool,
        received: Time,
        limit: Duration,
        hard_limit: Duration,
    ) -> u32 {
        let index = self.free.pop().unwrap_or_else(|| {
            debug_assert!(self.table.len() < JOBS_MAX);
            self.table.push(None);
            self.table.len() as u32 - 1
        });
        self.sequence += 1;
        self.table[index as usize] = Some(Job {
            id: JobId(self.sequence << INDEX_BITS | u64::from(index)),
            cargo: Some(cargo),
            received,
            deadline_at: received + limit,
            hard_deadline_at: received + hard_limit,
            idempotent,
            attempts: 0,
            place: Place::Entered,
        });
        index
    }

    /// The index of a job, if it is still here.
    pub(crate) fn find(&self, id: JobId) -> Option<u32> {
        let index = (id.0 & ((1 << INDEX_BITS) - 1)) as u32;
        let job = self.table.get(index as usize)?.as_ref()?;
        (job.id == id).then_some(index)
    }

    /// The job at an index that was taken from this table and not removed since.
    #[expect(clippy::expect_used, reason = "an index without a job is a bug in this crate")]
    pub(crate) fn get(&mut self, index: u32) -> &mut Job<T> {
        self.table[index as usize].as_mut().expect("a job stands at each index in use")
    }

    pub(crate) fn id(&self, index: u32) -> JobId {
        self.table[index as usize].as_ref().map_or(JobId(0), |job| job.id)
    }

    /// Removes a job that is not queued.
    pub(crate) fn remove(&mut self, index: u32) {
        debug_assert!(!matches!(self.get(index).place, Place::Queued { .. }));
        self.table[index as usize] = None;
        self.free.push(index);
        if self.free.len() == self.table.len() && self.table.len() > 1024 {
            // Nothing is left of a flood; neither is its memory.
            *self = Self { sequence: self.sequence, ..Self::default() };
        }
    }

    pub(crate) fn queued(&self) -> usize {
        self.queued
    }

    pub(crate) fn first_queued(&self) -> Option<u32> {
        (self.first != NONE).then_some(self.first)
    }

    pub(crate) fn enqueue(&mut self, index: u32) {
        let before = self.last;
        self.get(index).place = Place::Queued { before, after: NONE };
        self.link(before, Some(index), None);
        self.last = index;
        if before == NONE {
            self.first = index;
        }
        self.queued += 1;
    }

    /// Puts a job before all others: it has waited already.
    pub(crate) fn enqueue_first(&mut self, index: u32) {
        let after = self.first;
        self.get(index).place = Place::Queued { before: NONE, after };
        self.link(after, None, Some(index));
        self.first = index;
        if after == NONE {
            self.last = index;
        }
        self.queued += 1;
    }

    pub(crate) fn dequeue(&mut self, index: u32) {
        let Place::Queued { before, after } = self.get(index).place else { return };
        self.get(index).place = Place::Entered;
        self.link(before, Some(after), None);
        self.link(after, None, Some(before));
        if self.first == index {
            self.first = after;
        }
        if self.last == index {
            self.last = before;
        }
        self.queued -= 1;
    }

    fn link(&mut self, index: u32, new_after: Option<u32>, new_before: Option<u32>) {
        if index == NONE {
            return;
        }
        if let Place::Queued { before, after } = &mut self.get(index).place {
            *before = new_before.unwrap_or(*before);
            *after = new_after.unwrap_or(*after);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_leave_the_middle_of_the_queue_and_numbers_are_never_used_twice() {
        let mut jobs = Jobs::default();
        let second = Duration::from_secs(1);
        let all: Vec<u32> = (0..5).map(|i| jobs.insert(i, false, Time::ZERO, second, second)).collect();
        all.iter().for_each(|&i| jobs.enqueue(i));
        for &i in &[all[2], all[0], all[4]] {
            jobs.dequeue(i);
        }
        assert_eq!((jobs.queued(), jobs.first_queued()), (2, Some(all[1])));
        let old = jobs.id(all[2]);
        jobs.remove(all[2]);
        let again = jobs.insert(9, false, Time::ZERO, second, second);
        assert_eq!(again, all[2]);
        assert_eq!(jobs.find(old), None);
        jobs.enqueue_first(again);
        assert_eq!(jobs.first_queued(), Some(again));
        for index in [all[1], again, all[3]] {
            jobs.dequeue(index);
        }
        assert_eq!((jobs.queued(), jobs.first_queued()), (0, None));
    }
}
