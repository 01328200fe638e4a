//! Stores the jobs of a bulkhead in a table. A job is identified by its index, which can be reused after the job is
//! removed. `queue` owns the order of waiting jobs. The submodules of `bulkhead` decide about the jobs, and change
//! their states.

use std::collections::BTreeMap;
use std::time::Duration;

use bulkhead_shared::{JobId, Priority, Verdict};

use crate::breaker::Claim;
use crate::limits::Limits;
use crate::messages::{Submission, WorkerId};
use crate::poison::Digest;
use crate::tenants::TenantId;
use crate::time::Time;

/// Number of bits in a [`JobId`] that hold the job's index in the table. Limits the number of jobs in a bulkhead.
const INDEX_BITS: u32 = 24;

/// Maximum number of jobs in a bulkhead.
const JOBS_MAX: usize = 1 << INDEX_BITS;

/// Maximum length of a table that keeps its memory when jobs are removed.
const RETAINED_LEN_MAX: usize = 1024;

pub(crate) struct Job<T> {
    id: JobId,
    /// The caller's record of the job. `None` after the outcome has been sent to the client, even if a worker still has
    /// the job.
    pub(crate) record: Option<T>,
    pub(crate) received: Time,
    /// Time at which the queue timeout expires. Cleared when the job returns to the queue after it held a permit.
    /// Ignored once an attempt of the job has crashed.
    pub(crate) queue_timeout_at: Option<Time>,
    /// Time by which the client must get the outcome.
    pub(crate) deadline_at: Time,
    /// Time after which the worker is killed if the job is still running, even if the worker has other jobs.
    pub(crate) hard_deadline_at: Time,
    /// Maximum time between the dispatch of the job and its outcome.
    pub(crate) run_limit: Duration,
    /// Run time after which the worker is killed if the job is still running, even if the worker has other jobs.
    pub(crate) hard_run_limit: Duration,
    pub(crate) idempotent: bool,
    pub(crate) is_resendable: bool,
    pub(crate) is_fallback: bool,
    pub(crate) digest: Option<Digest>,
    pub(crate) priority: Priority,
    pub(crate) tenant: TenantId,
    pub(crate) cost: u32,
    /// Number of bytes sent to the worker for this job.
    pub(crate) bytes: u32,
    /// Sequence number of the job among all jobs sent to its worker, starting at 1.
    pub(crate) send_number: u64,
    /// Number of times that the job was recalled before a worker started it.
    pub(crate) recalls: u8,
    /// Number of dispatches whose run limit expired before the worker started the job.
    pub(crate) run_limit_expiries: u8,
    /// Worker from which the job was last recalled.
    pub(crate) recalled_from: Option<WorkerId>,
    pub(crate) attempts: u32,
    /// Number of workers that died before reading this job. Not included in `attempts`.
    pub(crate) unread_returns: u32,
    /// True if the job was counted as a call in the retry budget.
    pub(crate) is_counted: bool,
    /// True if the job may have crashed a worker, and therefore must run alone in a worker.
    pub(crate) is_suspect: bool,
    /// Combined result of all attempts before the current one, or `None` if the current attempt is the first.
    pub(crate) earlier_attempts: Option<Box<EarlierAttempts>>,
    /// Claim from the circuit breaker. Present only while a worker has the job and the client waits for the outcome.
    pub(crate) claim: Option<Claim>,
    pub(crate) state: JobState,
}

/// Combined result of the attempts so far.
#[derive(Debug)]
pub(crate) struct EarlierAttempts {
    /// Outcome of the last attempt.
    pub(crate) crash: Verdict,
    /// Total run time of all attempts.
    pub(crate) ran: Duration,
    /// PID of the last worker that had the job.
    pub(crate) worker_pid: Option<u32>,
}

impl<T> Job<T> {
    /// Returns the maximum time from the submission of the job to its outcome.
    pub(crate) fn limit(&self) -> Duration {
        self.deadline_at.since(self.received)
    }

    /// Returns the time by which the client must get the outcome of a job that was dispatched at `since`.
    pub(crate) fn answer_by(&self, since: Time) -> Time {
        self.deadline_at.min(since + self.run_limit)
    }

    /// Returns the time after which the worker is killed if a job that was dispatched at `since` is still running.
    pub(crate) fn kill_by(&self, since: Time) -> Time {
        self.hard_deadline_at.min(since + self.hard_run_limit)
    }
}

/// State of a job.
#[derive(Clone, Copy)]
pub(crate) enum JobState {
    Unplaced,
    Queued,
    /// The job may have crashed a worker. It waits until it can run alone in an idle worker.
    WaitingSuspect,
    /// The job was prefetched to a worker, which starts the job after replying to all earlier jobs.
    Prefetched {
        worker: u32,
    },
    InFlight {
        worker: u32,
        /// The job's index in the worker's list of jobs.
        index: u32,
        since: Time,
        /// True if the job has exceeded the bulkhead's own deadline or run limit.
        is_overdue: bool,
        /// True if the worker died before it could start the job.
        is_unread: bool,
        /// True if the client already has the outcome, but the worker is still sending an oversized result.
        is_oversized: bool,
    },
}

pub(crate) struct Jobs<T> {
    table: Vec<Option<Job<T>>>,
    free: Vec<u32>,
    /// Indexes of the jobs whose ID names another index, because another bulkhead assigned the ID.
    passed_on: BTreeMap<JobId, u32>,
    sequence: u64,
    /// Maximum number of remaining jobs at which a removal tries to shrink the table. After each attempt, this value is
    /// set to half the current number of jobs.
    shrink_below: usize,
}

impl<T> Default for Jobs<T> {
    fn default() -> Self {
        Self {
            table: Vec::new(),
            free: Vec::new(),
            passed_on: BTreeMap::new(),
            sequence: 0,
            shrink_below: usize::MAX,
        }
    }
}

impl<T> Jobs<T> {
    pub(crate) fn is_empty(&self) -> bool {
        self.free.len() == self.table.len()
    }

    pub(crate) fn len(&self) -> u32 {
        (self.table.len() - self.free.len()) as u32
    }

    pub(crate) fn is_full(&self) -> bool {
        self.free.is_empty() && self.table.len() >= JOBS_MAX
    }

    /// Adds a job whose deadline is `now` + `limit`. Returns the job's index. The table must not be full.
    pub(crate) fn insert(
        &mut self,
        now: Time,
        submission: Submission<T>,
        limit: Duration,
        limits: &Limits,
    ) -> u32 {
        let index = self.free.pop().unwrap_or_else(|| {
            debug_assert!(self.table.len() < JOBS_MAX);
            if self.table.is_empty() {
                // Reserves only one entry, because most bulkheads never have more than one job at a time.
                self.table.reserve_exact(1);
            }
            self.table.push(None);
            self.table.len() as u32 - 1
        });
        let id = submission.job.unwrap_or_else(|| {
            self.sequence = submission.sequence.max(self.sequence + 1);
            JobId(self.sequence << INDEX_BITS | u64::from(index))
        });
        if index_in(id) != index {
            self.passed_on.insert(id, index);
        }
        let hard_run_limit = limits.run_limit.unwrap_or(Duration::MAX);
        self.table[index as usize] = Some(Job {
            id,
            record: Some(submission.record),
            received: now,
            queue_timeout_at: limits.queue_timeout.map(|timeout| now + timeout),
            deadline_at: now + limit,
            hard_deadline_at: now + limit.max(limits.deadline),
            run_limit: submission.run_limit.map_or(hard_run_limit, |asked| asked.min(hard_run_limit)),
            hard_run_limit,
            idempotent: submission.idempotent,
            is_resendable: submission.is_resendable,
            is_fallback: submission.is_fallback,
            digest: submission.digest,
            priority: submission.priority,
            tenant: submission.tenant,
            cost: submission.cost,
            bytes: submission.bytes,
            send_number: 0,
            recalls: 0,
            run_limit_expiries: 0,
            recalled_from: None,
            attempts: 0,
            unread_returns: 0,
            is_counted: false,
            is_suspect: false,
            earlier_attempts: None,
            claim: None,
            state: JobState::Unplaced,
        });
        index
    }

    /// Returns the index of a job, or `None` if the job was removed.
    pub(crate) fn find(&self, id: JobId) -> Option<u32> {
        let index = index_in(id);
        let is_there = self.at(index as usize).is_some_and(|job| job.id == id);
        if is_there { Some(index) } else { self.passed_on.get(&id).copied() }
    }

    /// Returns the job at an index. The job must not have been removed.
    #[expect(clippy::expect_used, reason = "an index that refers to no job is a bug in this crate")]
    pub(crate) fn get(&mut self, index: u32) -> &mut Job<T> {
        self.table[index as usize].as_mut().expect("each index in use has a job")
    }

    /// Returns the length of the table, including free entries.
    pub(crate) fn positions(&self) -> usize {
        self.table.len()
    }

    /// Returns the job at a position in the table, if there is one.
    pub(crate) fn at(&self, position: usize) -> Option<&Job<T>> {
        self.table.get(position)?.as_ref()
    }

    pub(crate) fn state(&self, index: u32) -> Option<JobState> {
        self.table.get(index as usize)?.as_ref().map(|job| job.state)
    }

    /// Returns true if a worker is still sending an oversized result for this job.
    pub(crate) fn is_oversized(&self, index: u32) -> bool {
        matches!(self.state(index), Some(JobState::InFlight { is_oversized: true, .. }))
    }

    pub(crate) fn digest(&self, index: u32) -> Option<Digest> {
        self.table[index as usize].as_ref().and_then(|job| job.digest)
    }

    pub(crate) fn tenant(&self, index: u32) -> TenantId {
        self.table[index as usize].as_ref().map_or(TenantId::NONE, |job| job.tenant)
    }

    pub(crate) fn id(&self, index: u32) -> JobId {
        self.table[index as usize].as_ref().map_or(JobId(0), |job| job.id)
    }

    /// Removes a job that is in neither a queue nor a worker.
    pub(crate) fn remove(&mut self, index: u32) {
        debug_assert!(matches!(self.get(index).state, JobState::Unplaced));
        if !self.passed_on.is_empty() {
            let id = self.id(index);
            self.passed_on.remove(&id);
        }
        self.table[index as usize] = None;
        self.free.push(index);
        if self.free.len() == self.table.len() && self.table.len() > RETAINED_LEN_MAX {
            // The table has grown during a burst and is now empty, so its memory is released.
            *self = Self { sequence: self.sequence, ..Self::default() };
            return;
        }
        let in_use = self.table.len() - self.free.len();
        if in_use > self.table.len() / 8 {
            self.shrink_below = usize::MAX;
        } else if self.table.len() > RETAINED_LEN_MAX && in_use <= self.shrink_below {
            self.shrink_below = in_use / 2;
            self.shrink();
        }
    }

    /// Truncates the table after the last used entry. New jobs then use the free entries with the lowest indexes.
    fn shrink(&mut self) {
        let len = self.table.iter().rposition(Option::is_some).map_or(0, |last| last + 1);
        self.table.truncate(len);
        self.table.shrink_to_fit();
        self.free = (0..len as u32).rev().filter(|&index| self.table[index as usize].is_none()).collect();
    }

    /// Returns the indexes of all waiting jobs, in no particular order.
    pub(crate) fn queued(&self) -> Vec<u32> {
        let is_queued = |job: &Job<T>| matches!(job.state, JobState::Queued | JobState::WaitingSuspect);
        (0..self.table.len() as u32)
            .filter(|&index| self.table[index as usize].as_ref().is_some_and(is_queued))
            .collect()
    }
}

/// Returns the index that a job ID contains.
fn index_in(id: JobId) -> u32 {
    (id.0 & ((1 << INDEX_BITS) - 1)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn insert(jobs: &mut Jobs<u32>, record: u32) -> u32 {
        jobs.insert(Time::ZERO, Submission::new(record), Duration::from_secs(1), &Limits::default())
    }

    #[test]
    fn reused_index_gets_a_new_job_id() {
        let mut jobs = Jobs::default();
        let all: Vec<u32> = (0..5).map(|n| insert(&mut jobs, n)).collect();
        let old = jobs.id(all[2]);
        jobs.remove(all[2]);
        let again = insert(&mut jobs, 9);
        assert_eq!(again, all[2]);
        assert_eq!((jobs.find(old), jobs.find(jobs.id(again))), (None, Some(again)));
        jobs.get(all[1]).state = JobState::Queued;
        assert_eq!(jobs.queued(), [all[1]]);
    }

    #[test]
    fn job_from_another_bulkhead_keeps_its_id() {
        let (mut other, mut jobs) = (Jobs::default(), Jobs::default());
        let others: Vec<u32> = (0..3).map(|n| insert(&mut other, n)).collect();
        let ids: Vec<JobId> = others.into_iter().map(|index| other.id(index)).collect();
        let own = insert(&mut jobs, 3);
        let pass_on = |jobs: &mut Jobs<u32>, id| {
            let submission = Submission { job: Some(id), sequence: 9, ..Submission::new(4) };
            jobs.insert(Time::ZERO, submission, Duration::from_secs(1), &Limits::default())
        };
        // Each of the two jobs gets the index that the other job's ID contains.
        let passed_on: Vec<u32> = [ids[2], ids[1]].map(|id| pass_on(&mut jobs, id)).into();
        assert_eq!(passed_on.iter().map(|&index| jobs.id(index)).collect::<Vec<_>>(), [ids[2], ids[1]]);
        assert_eq!([ids[2], ids[1]].map(|id| jobs.find(id)), [Some(passed_on[0]), Some(passed_on[1])]);
        assert_eq!(jobs.find(jobs.id(own)), Some(own));
        passed_on.iter().for_each(|&index| jobs.remove(index));
        assert_eq!((jobs.find(ids[1]), jobs.find(ids[2]), jobs.passed_on.len()), (None, None, 0));
    }

    #[test]
    fn table_shrinks_when_last_job_of_a_burst_ends() {
        let mut jobs = Jobs::default();
        let all: Vec<u32> = (0..10_000).map(|n| insert(&mut jobs, n)).collect();
        let (staying, cancelled): (Vec<u32>, Vec<u32>) = all.iter().partition(|&n| !(500..9500).contains(n));
        cancelled.into_iter().for_each(|index| jobs.remove(index));
        let newest = jobs.id(staying[999]);
        staying.into_iter().for_each(|index| jobs.remove(index));
        assert_eq!((jobs.table.capacity(), jobs.free.capacity()), (0, 0));
        let next = insert(&mut jobs, 7);
        assert!(jobs.id(next).0 > newest.0 && !jobs.is_empty(), "a job ID must not be used twice");
    }

    #[test]
    fn table_shrinks_while_a_few_jobs_remain() {
        let mut jobs = Jobs::default();
        let all: Vec<u32> = (0..10_000).map(|n| insert(&mut jobs, n)).collect();
        let stays = all[3];
        let number = jobs.id(stays);
        all.into_iter().filter(|&index| index != stays).for_each(|index| jobs.remove(index));
        assert!(jobs.table.capacity() < 2 * RETAINED_LEN_MAX, "{}", jobs.table.capacity());
        assert_eq!(jobs.find(number), Some(stays));
        let next: Vec<u32> = (0..2000).map(|n| insert(&mut jobs, n)).collect();
        assert!(!next.contains(&stays) && jobs.table.len() == 2001, "a table entry must not be used twice");
    }
}
