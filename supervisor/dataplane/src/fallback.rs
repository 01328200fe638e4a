//! Decides whether and to which bulkhead a job is passed on after a rejection or a crash. Each fallback is tried once,
//! in the configured order, within the job's remaining time. If no fallback completes the job, the client gets the
//! first crash or, if the job has not run, the first outcome. `wiring::fallback` moves the job.

use std::sync::Arc;
use std::time::Duration;

use bulkhead_policy::{JobOutcome, Submission, Time};
use bulkhead_shared::{Executed, JobId, Outcome, Priority, RejectReason, Verdict};

use super::slab::{BulkheadIndex, CompartmentIndex};
use super::{JobData, link_bytes};

/// State kept for a job that can be passed on to a fallback.
pub(super) struct FallbackState {
    /// Bulkhead and compartment to which the client submitted the job, and for which the outcome is counted.
    entry: (BulkheadIndex, CompartmentIndex),
    chain: Arc<[Arc<str>]>,
    /// Index in `chain` of the bulkhead to try next.
    next: usize,
    received: Time,
    limit: Duration,
    /// Run limit that the client requested.
    run_limit: Option<Duration>,
    priority: Priority,
    idempotent: bool,
    cost: u32,
    /// ID that the job got in the first bulkhead that accepted the job. All later bulkheads use the same ID.
    job: Option<JobId>,
    /// Combined result of all bulkheads that passed the job on. `None` if the job is still in the bulkhead to which it
    /// was submitted.
    earlier: Option<EarlierResult>,
}

/// Combined result of a job in all bulkheads that passed the job on.
struct EarlierResult {
    /// First crash or, if the job has not run, the outcome in the bulkhead to which the job was submitted. The client
    /// receives this outcome if no fallback produces a better one.
    outcome: Outcome,
    ran: Duration,
    worker_pid: Option<u32>,
}

/// Returns true if the job might succeed in another bulkhead.
fn is_worth_another(verdict: &Verdict, idempotent: bool) -> bool {
    match verdict {
        Verdict::Rejected { reason, .. } => matches!(
            reason,
            RejectReason::CircuitOpen
                | RejectReason::QueueFull
                | RejectReason::Backpressure
                | RejectReason::Unavailable
                | RejectReason::Draining
        ),
        Verdict::Crashed { .. } => idempotent,
        _ => false,
    }
}

fn is_crash(verdict: &Verdict) -> bool {
    matches!(verdict, Verdict::Crashed { .. })
}

impl FallbackState {
    /// Creates the fallback state of a submitted job. `wishes` contains the requested run limit, priority and cost, and
    /// whether the job is idempotent.
    pub(super) fn new(
        entry: (BulkheadIndex, CompartmentIndex),
        chain: Arc<[Arc<str>]>,
        (received, limit): (Time, Duration),
        (run_limit, priority, idempotent, cost): (Option<Duration>, Priority, bool, u32),
    ) -> Self {
        Self {
            entry,
            chain,
            next: 0,
            received,
            limit,
            run_limit,
            priority,
            idempotent,
            cost,
            job: None,
            earlier: None,
        }
    }

    /// Returns the bulkhead to which the client submitted the job.
    pub(super) fn origin(&self) -> BulkheadIndex {
        self.entry.0
    }

    /// Returns the compartment to which the client submitted the job.
    pub(super) fn origin_compartment(&self) -> CompartmentIndex {
        self.entry.1
    }

    /// Returns the time at which the supervisor received the job.
    pub(super) fn received(&self) -> Time {
        self.received
    }

    /// Returns true if the job was already passed on to a fallback.
    pub(super) fn is_at_fallback(&self) -> bool {
        self.earlier.is_some()
    }

    /// Returns the name of the fallback that has the job, or `None` if the job was not passed on.
    pub(super) fn current_target(&self) -> Option<&Arc<str>> {
        self.earlier.as_ref().map(|_| &self.chain[self.next - 1])
    }

    /// Returns the position and index of the next bulkhead to try, and the time that is left for the job. `find` looks
    /// up a bulkhead by name, and returns `None` if there is no such bulkhead or the payload is too large for it.
    pub(super) fn next_target(
        &self,
        now: Time,
        verdict: &Verdict,
        find: impl Fn(&str) -> Option<BulkheadIndex>,
    ) -> Option<(usize, BulkheadIndex, Duration)> {
        if !is_worth_another(verdict, self.idempotent) {
            return None;
        }
        let left = self.limit.checked_sub(now.since(self.received))?;
        let (position, target) = (self.next..self.chain.len())
            .find_map(|position| Some((position, find(&self.chain[position])?)))?;
        (!left.is_zero()).then_some((position, target, left))
    }

    pub(super) fn target_name(&self, position: usize) -> &Arc<str> {
        &self.chain[position]
    }

    /// Returns the job's cost if the first bulkhead's rate limit must be charged before the job is passed on.
    /// Returns `None` if there is nothing to charge.
    pub(super) fn due_cost(&self, answer: &JobOutcome<Box<JobData>>) -> Option<u32> {
        let is_early = matches!(
            &answer.verdict,
            Verdict::Rejected { reason: RejectReason::CircuitOpen | RejectReason::Draining, .. }
        );
        (self.earlier.is_none() && answer.job.is_none() && is_early).then_some(self.cost)
    }

    /// Records the job's outcome in the current bulkhead before the job is passed on to the fallback at `position`.
    /// Calls `outcome` only if the outcome must be kept.
    pub(super) fn pass_on(
        &mut self,
        position: usize,
        answer: &JobOutcome<Box<JobData>>,
        outcome: impl FnOnce() -> Outcome,
    ) {
        let (ran, worker_pid) = (answer.ran, answer.worker_pid);
        match &mut self.earlier {
            Some(earlier) => {
                earlier.ran += ran;
                earlier.worker_pid = worker_pid.or(earlier.worker_pid);
                if is_crash(&answer.verdict) && !is_crash(&earlier.outcome.verdict) {
                    earlier.outcome = outcome();
                }
            }
            None => self.earlier = Some(EarlierResult { outcome: outcome(), ran, worker_pid }),
        }
        self.job = self.job.or(answer.job);
        self.next = position + 1;
    }

    /// Returns true if the payload must be kept in memory because another worker or bulkhead might need it.
    pub(super) fn keeps_payload(&self, has_retries: bool) -> bool {
        self.idempotent && (has_retries || self.next < self.chain.len())
    }

    /// Returns the submission to send to a fallback. `left` is the time that remains until the deadline.
    pub(super) fn submission(&self, left: Duration, record: Box<JobData>) -> Submission<Box<JobData>> {
        Submission {
            job: self.job,
            deadline: Some(left),
            run_limit: self.run_limit,
            priority: self.priority,
            idempotent: self.idempotent,
            is_resendable: record.held.is_resendable,
            is_fallback: true,
            cost: self.cost,
            bytes: link_bytes(record.payload_bytes + record.operation.len() + record.tenant.len()),
            ..Submission::new(record)
        }
    }

    /// Combines an outcome with the results of the bulkheads that passed the job on. The numbers of attempts and the
    /// times are added up. The outcome names the job even if only a fallback has accepted the job. Returns `None` if the
    /// job was never passed on.
    pub(super) fn combine(&self, now: Time, outcome: &Outcome, record: &JobData) -> Option<Outcome> {
        let earlier = self.earlier.as_ref()?;
        let has_crashed = is_crash(&earlier.outcome.verdict);
        let is_rejected = match &outcome.verdict {
            Verdict::Rejected { .. } => true,
            Verdict::DeadlineQueued => has_crashed,
            _ => false,
        };
        let mut combined = if is_rejected { earlier.outcome.clone() } else { outcome.clone() };
        combined.job = self.job.or(outcome.job);
        combined.attempts = record.earlier_attempts + outcome.attempts;
        combined.ran = earlier.ran + outcome.ran;
        combined.queued = now.since(self.received).saturating_sub(combined.ran);
        combined.worker_pid = outcome.worker_pid.or(earlier.worker_pid);
        combined.deadline = self.limit;
        if let (Verdict::Cancelled { executed }, true) = (&mut combined.verdict, record.earlier_attempts > 0)
        {
            *executed = Executed::Yes;
        }
        Some(combined)
    }
}
