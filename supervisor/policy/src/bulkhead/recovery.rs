//! What becomes of jobs whose worker, or program, died under them: quarantine for a payload that kills again
//! and again, another try for what may run twice, and the truth for all others.
//!
//! A job that may have brought a worker down is a suspect: it is tried again only in a worker that has nothing
//! else, so that an innocent one is not killed twice by the same neighbour and the guilty one is found.

use bulkhead_shared::{JobId, Verdict};

use super::{Bulkhead, Mode};
use crate::jobs::{Before, Place};
use crate::messages::{Action, Note, WorkerId};
use crate::poison::Digest;
use crate::time::Time;
use crate::workers::Apart;

/// How a job was lost.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Loss {
    /// The worker died while it had this job and no other.
    Alone,
    /// Its program died, which ran no other job.
    Program,
    /// It died while it had others as well: each of them may be the cause.
    AmongOthers,
    /// Others are known to be the cause.
    Innocent,
}

impl<T> Bulkhead<T> {
    /// A worker is gone and had this job. It is tried again if it may be, and answered otherwise.
    pub(super) fn job_lost(
        &mut self,
        now: Time,
        index: u32,
        verdict: &Verdict,
        loss: Loss,
        out: &mut Vec<Action<T>>,
    ) {
        self.job_timers.clear(index);
        let is_tried_again = self.judge_loss(now, index, verdict, loss, out);
        if !is_tried_again {
            self.answer(now, index, verdict.clone(), out);
        }
        let job = self.jobs.get(index);
        job.place = Place::Entered;
        let tenant = job.tenant;
        self.count_in_flight(tenant, false);
        if is_tried_again {
            self.wait_again(index);
        } else {
            self.forget(index);
        }
    }

    /// A program died by itself and its worker lives: the same for its job. Returns whether that waits again,
    /// and is out of the worker's hands.
    pub(super) fn recover_program(
        &mut self,
        now: Time,
        index: u32,
        worker: WorkerId,
        verdict: &Verdict,
        out: &mut Vec<Action<T>>,
    ) -> bool {
        if !matches!(verdict, Verdict::Crashed { .. }) {
            return false;
        }
        let is_tried_again = self.judge_loss(now, index, verdict, Loss::Program, out);
        if is_tried_again {
            self.withdraw(index);
            self.wait_again(index);
            self.refresh(worker.place);
        }
        is_tried_again
    }

    /// Remembers what a loss says of the payload, and decides whether the job is tried again. If so, the
    /// attempt is settled.
    fn judge_loss(
        &mut self,
        now: Time,
        index: u32,
        verdict: &Verdict,
        loss: Loss,
        out: &mut Vec<Action<T>>,
    ) -> bool {
        if matches!(loss, Loss::Alone | Loss::Program) {
            self.suspect_payload(now, index);
        }
        if !self.may_be_tried_again(now, index) {
            return false;
        }
        self.tell_breaker(now, index, verdict, out);
        let job = self.jobs.get(index);
        let Place::InFlight { worker, since, .. } = job.place else { return false };
        let ran = job.before.as_ref().map(|before| before.ran).unwrap_or_default() + now.since(since);
        let worker_pid = self.workers[worker as usize].as_ref().and_then(|worker| worker.pid);
        job.before = Some(Box::new(Before { crash: verdict.clone(), ran, worker_pid }));
        job.is_suspect |= matches!(loss, Loss::Alone | Loss::AmongOthers);
        let attempts = job.attempts;
        self.counters.retries += 1;
        let (job, crash) = (self.jobs.id(index), verdict.clone());
        out.push(Action::Note(Note::JobRetried { job, attempts, crash, worker_pid }));
        true
    }

    fn suspect_payload(&mut self, now: Time, index: u32) {
        let Some(digest) = self.jobs.get(index).digest else { return };
        let was_quarantined = self.poison.is_quarantined(now, digest);
        if self.poison.record_crash(now, digest) && !was_quarantined {
            self.late_notes.push(Note::JobQuarantined { job: self.jobs.id(index), digest });
            // Copies of it may be ahead.
            self.takes_all_back = self.ahead > 0;
        }
    }

    pub(super) fn is_quarantined(&self, now: Time, digest: Option<Digest>) -> bool {
        digest.is_some_and(|digest| self.poison.is_quarantined(now, digest))
    }

    /// Whether a job whose worker died goes to another. If so, that is spent of the budget.
    fn may_be_tried_again(&mut self, now: Time, index: u32) -> bool {
        let is_open = self.mode == Mode::Open && self.live_slots > 0;
        let job = self.jobs.get(index);
        let (digest, attempts) = (job.digest, job.attempts);
        let is_fit = job.idempotent && job.is_repeatable && job.cargo.is_some() && job.deadline_at > now;
        is_open && is_fit && !self.is_quarantined(now, digest) && self.retries.try_retry(now, attempts)
    }

    /// A worker that is gone cannot have begun a job.
    pub(super) fn unread(&mut self, worker: WorkerId, job: JobId) {
        if let Some((index, _)) = self.find_at(worker, job)
            && let Place::InFlight { is_unread, .. } = &mut self.jobs.get(index).place
        {
            *is_unread = true;
            // It ends next: what becomes of its jobs is decided then.
            if let Some(worker) = self.worker_mut(worker) {
                worker.claims = None;
            }
            self.mind_room(worker.place);
        }
    }

    /// The same by its own word: whom that leaves alone is not blamed for it.
    pub(super) fn unbegun(&mut self, id: WorkerId, job: JobId) {
        // Such a word is taken once for a job: one that has it said each time would be given out again and again.
        if self.jobs.find(job).is_some_and(|index| self.jobs.get(index).taken_back > 0) {
            return;
        }
        self.unread(id, job);
        if self.holds(id, job)
            && let Some(worker) = self.worker_mut(id)
        {
            worker.unbegun += 1;
        }
    }

    /// Of the jobs of a worker that is gone, those that it left unread are as good as never given, and go to the
    /// next worker in the order in which they came. Returns those that it left unread and that cannot be given
    /// again, and those that it may have begun.
    pub(super) fn take_back_unread(&mut self, jobs: Vec<u32>) -> (Vec<u32>, Vec<u32>) {
        let (mut unread, begun): (Vec<_>, Vec<_>) = jobs.into_iter().partition(|&index| {
            matches!(self.jobs.get(index).place, Place::InFlight { is_unread: true, .. })
        });
        if self.mode == Mode::Open && self.live_slots > 0 {
            unread.sort_unstable_by_key(|&index| std::cmp::Reverse(self.jobs.id(index)));
            unread.retain(|&index| !self.give_again(index));
        }
        (unread, begun)
    }

    /// Whether a job can be given again: not if its client has been told already.
    fn give_again(&mut self, index: u32) -> bool {
        let job = self.jobs.get(index);
        if job.cargo.is_none() || !job.is_repeatable || job.taken_back >= UNREAD_ATTEMPTS_MAX {
            return false;
        }
        // What never began was no attempt.
        job.attempts -= 1;
        job.taken_back += 1;
        job.place = Place::Entered;
        let (tenant, claim) = (job.tenant, job.claim.take());
        if let Some(claim) = claim {
            self.breaker.give_back(claim);
        }
        self.count_in_flight(tenant, false);
        self.wait_again(index);
        true
    }

    /// Puts a job that had its turn, for nothing, before those that had none.
    pub(super) fn wait_again(&mut self, index: u32) {
        let job = self.jobs.get(index);
        if !job.is_suspect {
            return self.enqueue_first(index);
        }
        job.place = Place::Apart;
        let deadline_at = job.deadline_at;
        self.suspects.push_back(index);
        self.job_timers.set(index, deadline_at);
    }

    /// What is told of a job that does not run: if it did before, that is what counts.
    pub(super) fn verdict_in_all(&mut self, index: u32, verdict: Verdict) -> Verdict {
        let job = self.jobs.get(index);
        match (&job.place, &job.before, verdict) {
            (Place::InFlight { .. }, _, verdict) | (_, None, verdict) => verdict,
            (_, Some(_), Verdict::Cancelled { .. }) => {
                Verdict::Cancelled { executed: bulkhead_shared::Executed::Yes }
            }
            (_, Some(before), _) => before.crash.clone(),
        }
    }

    // Workers for one job alone.

    /// Gives suspects to workers that have nothing else. If there is none, the least loaded one finishes
    /// what it has and takes nothing new.
    pub(super) fn place_suspects(&mut self, now: Time, out: &mut Vec<Action<T>>) {
        while let Some(at) = self.next_suspect()
            && let Some(place) = self.idle_worker()
            && let Some(index) = self.suspects.remove(at)
        {
            self.unreserve();
            self.jobs.get(index).place = Place::Entered;
            self.job_timers.clear(index);
            if self.jobs.get(index).deadline_at <= now {
                self.answer(now, index, Verdict::DeadlineQueued, out);
                self.forget(index);
            } else {
                self.give(now, index, place, out);
            }
        }
        if self.next_suspect().is_none() {
            self.unreserve();
        } else if self.reserved.is_none()
            && let Some(place) = self.load.least()
            && let Some(worker) = self.workers[place as usize].as_mut()
        {
            worker.apart = Apart::Reserved;
            self.reserved = Some(place);
            self.refresh(place);
        }
    }

    /// Position of the oldest suspect whose tenant is below its share.
    pub(super) fn next_suspect(&self) -> Option<usize> {
        self.suspects.iter().position(|&index| !self.is_at_its_share(self.jobs.tenant(index)))
    }

    fn unreserve(&mut self) {
        let Some(place) = self.reserved.take() else { return };
        if let Some(worker) = self.workers[place as usize].as_mut() {
            worker.apart = Apart::No;
        }
        self.refresh(place);
    }
}

/// A job that so many workers left unread when they died is not given to another.
const UNREAD_ATTEMPTS_MAX: u32 = 3;
