//! Results that are too large. The client gets its answer as soon as such a result begins. The permit stays
//! in use until the whole result has arrived, because the worker does nothing else until then.

use std::time::Duration;

use bulkhead_shared::{HandlerFailure, JobId, Verdict};

use super::Bulkhead;
use crate::jobs::Place;
use crate::messages::{Action, WorkerId};
use crate::time::Time;
use crate::workers::Phase;

/// Minimum time that a worker sending such a result has for its next bytes, however short `grace` is.
const STALL_PATIENCE: Duration = Duration::from_secs(1);

/// Minimum time that a worker that ends each job itself has to do so while a client waits for another of its
/// jobs. A process with gigabytes of memory, or a large number of processes, dies slowly.
const SLOW_END_PATIENCE: Duration = Duration::from_secs(5);

impl<T> Bulkhead<T> {
    /// Handles the beginning of a result that is too large. Answers the client with `failure`. The job stays
    /// in its worker, like a cancelled job, until the worker has replied.
    pub(super) fn oversized(
        &mut self,
        now: Time,
        worker: WorkerId,
        job: JobId,
        failure: HandlerFailure,
        out: &mut Vec<Action<T>>,
    ) {
        self.heard(now, worker);
        let Some((index, Place::InFlight { since, .. })) = self.find_at(worker, job) else { return };
        if self.jobs.get(index).cargo.is_none() {
            return;
        }
        self.answer(now, index, Verdict::Failed(failure), out);
        let entry = self.jobs.get(index);
        let end_by = entry.end_by(since);
        if let Place::InFlight { is_oversized, .. } = &mut entry.place {
            *is_oversized = true;
        }
        self.job_timers.set(index, end_by);
        if let Some(worker) = self.worker_mut(worker) {
            worker.wanted -= 1;
        }
        self.review(now, worker.place);
    }

    /// Extends the time of a worker that sends a result that is too large, because data has arrived. The
    /// worker is then killed only if no more data arrives, or if a job has passed the bulkhead's own deadline
    /// or run limit.
    pub(super) fn sends_on(&mut self, now: Time, id: WorkerId) {
        let Some(worker) = self.worker(id) else { return };
        let is_awaited = matches!(worker.phase, Phase::Ready | Phase::Draining) && worker.kill_at.is_some();
        if !is_awaited || !self.is_sending(id.place) {
            return;
        }
        let kill_at = now + self.patience(id.place);
        if let Some(worker) = self.worker_mut(id) {
            worker.kill_at = Some(kill_at);
        }
        self.arm(id.place);
    }

    /// Returns the time before a worker is killed because no client waits for its jobs, or because a job has
    /// run too long.
    pub(super) fn patience(&self, place: u32) -> Duration {
        let grace = self.limits.grace;
        let is_wanted = self.workers[place as usize].as_ref().is_some_and(|worker| worker.wanted > 0);
        if self.limits.jobs_end_alone && is_wanted {
            grace.max(SLOW_END_PATIENCE)
        } else if self.is_sending(place) {
            grace.max(STALL_PATIENCE)
        } else {
            grace
        }
    }

    fn is_sending(&self, place: u32) -> bool {
        self.workers[place as usize].as_ref().is_some_and(|worker| {
            worker.overdue == 0 && worker.jobs.iter().any(|&job| self.jobs.is_oversized(job))
        })
    }
}
