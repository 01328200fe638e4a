//! Results that are too large. The client is told when such a one begins. The worker has the permit until all of it
//! has come, since it does nothing else until then.

use std::time::Duration;

use bulkhead_shared::{HandlerFailure, JobId, Verdict};

use super::Bulkhead;
use crate::jobs::Place;
use crate::messages::{Action, WorkerId};
use crate::time::Time;
use crate::workers::Phase;

/// A worker that sends such a result has at least so long for its next bytes, however short `grace` is.
const STALL_PATIENCE: Duration = Duration::from_secs(1);

/// A worker that ends each job by itself has at least so long for it while a client waits for another job in it: what
/// has gigabytes, or a crowd of processes, dies slowly.
const SLOW_END_PATIENCE: Duration = Duration::from_secs(5);

impl<T> Bulkhead<T> {
    /// Answers the job. It stays in the worker's hands, as one that was cancelled does, until the worker has
    /// replied.
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

    /// A worker was heard. While it sends a result that is too large, that was a part of it: it is killed only if
    /// no more comes, or when a job in it has passed the bulkhead's own deadline.
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

    /// How long a worker lives on when no client waits for its jobs, or one of them has gone on for too long.
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
