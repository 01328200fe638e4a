//! Handles results that exceed the size limit, which the data plane detects. The client gets its outcome as soon as
//! such a result starts to arrive. The permit stays in use until the whole result has arrived, because the worker is
//! busy sending it. Also sets the delay after which a stuck worker is killed.

use std::time::Duration;

use bulkhead_shared::{HandlerFailure, JobId, Verdict};

use super::Bulkhead;
use crate::jobs::JobState;
use crate::messages::WorkerId;
use crate::time::Time;
use crate::worker::Phase;

/// Minimum stall timeout for a worker that is sending an oversized result. Used if `grace` is shorter.
const STALL_TIMEOUT: Duration = Duration::from_secs(1);

/// Minimum grace period for an `exec` worker that also has jobs whose clients are waiting. Such a worker kills the
/// processes of an overdue job itself. This can take a long time if the processes use gigabytes of memory, or if there
/// are many processes.
const SLOW_END_TIMEOUT: Duration = Duration::from_secs(5);

impl<T> Bulkhead<T> {
    /// Handles the start of an oversized result. The client gets `failure` as the outcome. Like a cancelled job, the
    /// job stays in its worker. It leaves once the whole result has arrived.
    pub(super) fn result_too_large(
        &mut self,
        now: Time,
        worker: WorkerId,
        job: JobId,
        failure: HandlerFailure,
    ) {
        self.record_sign_of_life(now, worker);
        let Some((index, JobState::InFlight { since, .. })) = self.find_at(worker, job) else { return };
        if self.jobs.get(index).record.is_none() {
            return;
        }
        self.send_outcome(now, index, Verdict::Failed(failure));
        let entry = self.jobs.get(index);
        let kill_by = entry.kill_by(since);
        if let JobState::InFlight { is_oversized, .. } = &mut entry.state {
            *is_oversized = true;
        }
        self.job_timers.set(index, kill_by);
        self.edit_by_id(worker, |worker| worker.awaited_jobs -= 1);
        self.update_kill_time(now, worker.place);
    }

    /// Postpones killing a worker because more data of an oversized result has arrived. The worker is killed if no more
    /// data arrives, or if a job has exceeded the bulkhead's own deadline or run limit.
    pub(super) fn extend_kill_time(&mut self, now: Time, id: WorkerId) {
        let Some(worker) = self.workers.by_id(id) else { return };
        let is_awaited = matches!(worker.phase, Phase::Ready | Phase::Draining) && worker.kill_at.is_some();
        if !is_awaited || !self.is_sending(id.place) {
            return;
        }
        let kill_at = now + self.kill_delay(id.place);
        self.edit_timing(id.place, |worker| worker.kill_at = Some(kill_at));
    }

    /// Returns the delay after which a stuck worker (`Worker::is_stuck`) is killed.
    pub(super) fn kill_delay(&self, place: u32) -> Duration {
        let grace = self.limits.grace;
        let is_wanted = self.workers.get(place).is_some_and(|worker| worker.awaited_jobs > 0);
        if self.limits.worker_ends_jobs && is_wanted {
            grace.max(SLOW_END_TIMEOUT)
        } else if self.is_sending(place) {
            grace.max(STALL_TIMEOUT)
        } else {
            grace
        }
    }

    fn is_sending(&self, place: u32) -> bool {
        self.workers.get(place).is_some_and(|worker| {
            worker.overdue_jobs == 0 && worker.jobs.iter().any(|&job| self.jobs.is_oversized(job))
        })
    }
}
