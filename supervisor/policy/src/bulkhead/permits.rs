//! Chooses the worker for the next job, within the limit on running jobs. `workers` counts permits, `adapt` computes
//! the limit, and `queue` chooses the job.

use super::Bulkhead;
use crate::messages::WorkerId;

impl<T> Bulkhead<T> {
    /// Returns the worker for the next job. Returns `None` if no worker has a free permit, or if the limit on running
    /// jobs has been reached.
    pub(super) fn next_worker(&self) -> Option<u32> {
        self.workers.least_loaded().filter(|_| u64::from(self.workers.totals().in_use) < self.limit())
    }

    /// Returns the worker for a job: `preferred_worker` if it has a free permit, and otherwise the least loaded worker.
    /// Returns `None` if no worker can take the job.
    pub(super) fn next_worker_for(&self, preferred_worker: Option<WorkerId>) -> Option<u32> {
        let next = self.next_worker()?;
        Some(preferred_worker.filter(|&id| self.workers.can_take_job(id)).map_or(next, |id| id.place))
    }

    /// Returns an idle worker for a job that must run alone. A worker that is reserved for a suspect job can be
    /// returned too.
    pub(super) fn idle_worker(&self) -> Option<u32> {
        let is_idle = |&place: &u32| {
            self.workers.get(place).is_some_and(|worker| worker.jobs.is_empty() && !worker.is_stalled)
        };
        self.next_worker().filter(is_idle).or_else(|| {
            let place = self.workers.reserved().filter(is_idle)?;
            let others = u64::from(self.workers.totals().in_use - self.workers.permits_of(place));
            (others < self.limit()).then_some(place)
        })
    }
}
