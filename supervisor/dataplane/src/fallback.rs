//! Fallbacks: a job that a bulkhead cannot take, or that crashed there, goes to other bulkheads. Each is tried once,
//! in the order of the configuration, within the remaining time. If none takes the job, the client gets the first
//! answer.

use std::sync::Arc;
use std::time::Duration;

use bulkhead_api::{Severity, What};
use bulkhead_policy::{Answer, Submission, Time};
use bulkhead_shared::limits::INLINE_PAYLOAD_BYTES_MAX;
use bulkhead_shared::{Outcome, Priority, RejectReason, Verdict};

use super::slab::{BulkheadIndex, CompartmentIndex};
use super::{DataPlane, Incoming, JobData};

/// Minimum interval between events about a fallback.
const REPEAT_INTERVAL: Duration = Duration::from_secs(10);

/// State of a job that can go to a fallback.
pub(super) struct FallbackState {
    /// Bulkhead and compartment to which the client sent the job. The job is counted there.
    pub(super) entry: (BulkheadIndex, CompartmentIndex),
    pub(super) chain: Arc<[Arc<str>]>,
    /// Position of the next bulkhead in `chain`.
    pub(super) next: usize,
    pub(super) received: Time,
    pub(super) limit: Duration,
    /// Run limit that the client requested.
    pub(super) run_limit: Option<Duration>,
    pub(super) priority: Priority,
    pub(super) idempotent: bool,
    pub(super) cost: u32,
    /// Result of earlier bulkheads. `None` in the first bulkhead.
    pub(super) earlier: Option<EarlierResult>,
}

/// Result of a job in earlier bulkheads.
pub(super) struct EarlierResult {
    /// First answer. The client gets this answer if no fallback gives a better answer.
    first: Outcome,
    attempts: u32,
    ran: Duration,
    worker_pid: Option<u32>,
}

/// Returns true if another bulkhead may have more success.
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

impl DataPlane {
    /// Passes a job to the next fallback. Returns the answer if the client should get the answer instead.
    pub(super) fn pass_to_fallback(
        &mut self,
        compartment: CompartmentIndex,
        mut answer: Answer<Box<JobData>>,
        incoming: &mut Incoming<'_>,
    ) -> Option<Answer<Box<JobData>>> {
        let Some(mut fallback) = answer.cargo.fallback.take() else { return Some(answer) };
        let next = self.next_target(&fallback, &answer);
        // Only the payload of a job that was rejected on arrival is still in `incoming`.
        let has_payload = answer.job.is_none() || !answer.cargo.held.is_empty();
        let (Some((place, target, left)), true, false) = (next, has_payload, self.is_stopping) else {
            answer.cargo.fallback = Some(fallback);
            return Some(answer);
        };
        if let Some(wait) = self.charge_origin(&fallback, &answer) {
            answer.retryable = wait <= left;
            answer.retry_after = (wait < Duration::MAX).then_some(wait);
            answer.verdict = Verdict::rejected(RejectReason::RateLimited);
            answer.cargo.fallback = Some(fallback);
            return Some(answer);
        }
        self.report_fallback(&fallback, place, &answer.verdict);
        match fallback.earlier {
            Some(_) => {
                let target_before = fallback.chain[fallback.next - 1].clone();
                self.count_guest_end(compartment, (fallback.entry.0, &target_before), &answer.verdict);
            }
            None => self.bulkheads[fallback.entry.0].tally.elsewhere += 1,
        }
        if matches!(answer.verdict, Verdict::Crashed { .. }) {
            self.report_failed_job(compartment, &answer);
        }
        let payload = self.take_payload(&mut answer.cargo, incoming);
        let Answer { cargo, attempts, ran, worker_pid, .. } = &answer;
        let (attempts, ran, worker_pid) = (*attempts, *ran, *worker_pid);
        debug_assert!(cargo.held.payload.is_none() && cargo.held.copy.is_none());
        match &mut fallback.earlier {
            Some(earlier) => {
                earlier.attempts += attempts;
                earlier.ran += ran;
                earlier.worker_pid = worker_pid.or(earlier.worker_pid);
            }
            None => {
                let first = self.outcome_of(compartment, &answer);
                fallback.earlier = Some(EarlierResult { first, attempts, ran, worker_pid });
                self.compartments[fallback.entry.1].policy.passed_on(&answer.verdict);
            }
        }
        fallback.next = place + 1;
        answer.cargo.status = None;
        self.submit_to_fallback(target, left, answer.cargo, fallback, payload);
        None
    }

    /// Charges the rate limit of the bulkhead that the client addressed, if the job was rejected before the charge.
    /// Returns the necessary wait if the job is over the rate.
    fn charge_origin(&mut self, fallback: &FallbackState, answer: &Answer<Box<JobData>>) -> Option<Duration> {
        let is_early = matches!(
            &answer.verdict,
            Verdict::Rejected { reason: RejectReason::CircuitOpen | RejectReason::Draining, .. }
        );
        if fallback.earlier.is_some() || answer.job.is_some() || !is_early {
            return None;
        }
        let (now, policy) = (self.now, &mut self.compartments[fallback.entry.1].policy);
        policy.charge_late(now, &answer.cargo.tenant, fallback.cost, &answer.verdict)
    }

    /// Returns the next bulkhead for a job: its position in the chain, its index, and the remaining time.
    fn next_target(
        &self,
        fallback: &FallbackState,
        answer: &Answer<Box<JobData>>,
    ) -> Option<(usize, BulkheadIndex, Duration)> {
        if !is_worth_another(&answer.verdict, fallback.idempotent) || !self.is_client_connected(&answer.cargo)
        {
            return None;
        }
        let left = fallback.limit.checked_sub(self.now.since(fallback.received))?;
        let size = answer.cargo.payload_bytes as u64;
        let (place, target) = (fallback.next..fallback.chain.len()).find_map(|place| {
            // The bulkhead may have been removed.
            let &target = self.bulkheads.by_name.get(&fallback.chain[place])?;
            (self.bulkheads[target].max_payload >= size).then_some((place, target))
        })?;
        (!left.is_zero()).then_some((place, target, left))
    }

    fn take_payload<'p>(&mut self, cargo: &mut JobData, incoming: &mut Incoming<'p>) -> Incoming<'p> {
        self.memory.discharge(&mut cargo.charge);
        if cargo.held.file.is_some() {
            // The file stays with the job.
            cargo.held.payload = None;
            return Incoming::Owned(Vec::new());
        }
        if let Some(payload) = cargo.held.payload.take() {
            return Incoming::Owned(payload);
        }
        match cargo.held.copy.take() {
            Some(copy) => Incoming::Owned(copy.into_vec()),
            None => std::mem::replace(incoming, Incoming::None),
        }
    }

    fn submit_to_fallback(
        &mut self,
        bulkhead: BulkheadIndex,
        left: Duration,
        mut cargo: Box<JobData>,
        fallback: Box<FallbackState>,
        payload: Incoming<'_>,
    ) {
        let compartment = self.compartment_for(bulkhead, &cargo.tenant);
        self.bulkheads[bulkhead].tally.guests += 1;
        let FallbackState { priority, idempotent, cost, run_limit, .. } = *fallback;
        let keeps = idempotent && (self.bulkheads[bulkhead].retries || fallback.next < fallback.chain.len());
        cargo.held.is_repeatable = keeps || payload.len() <= INLINE_PAYLOAD_BYTES_MAX;
        cargo.fallback = Some(fallback);
        let (session, request) = (cargo.session, cargo.request);
        let submission = Submission {
            sequence: self.compartments.next_job(),
            deadline: Some(left),
            run_limit,
            priority,
            idempotent,
            is_repeatable: cargo.held.is_repeatable,
            digest: match &cargo.held.file {
                None => self.bulkheads[bulkhead].digest(&cargo.operation, payload.bytes()),
                Some(_) => None,
            },
            is_guest: true,
            prefers: None,
            tenant: self.compartments[compartment].policy.tenant(&cargo.tenant),
            cost,
            bytes: super::prefetch::frame_bytes(
                cargo.payload_bytes + cargo.operation.len() + cargo.tenant.len(),
            ),
            cargo,
        };
        let job = self.submit_to_compartment(compartment, submission, payload);
        if let Some(job) = job {
            self.sessions.record_request(session, request, compartment, job);
        }
    }

    /// Returns the outcome for the client. For a job that was in several bulkheads, attempts and times are added up.
    pub(super) fn combined_outcome(
        &mut self,
        compartment: CompartmentIndex,
        answer: &Answer<Box<JobData>>,
    ) -> Outcome {
        let outcome = self.outcome_of(compartment, answer);
        let Some(fallback) = &answer.cargo.fallback else { return outcome };
        let Some(earlier) = &fallback.earlier else { return outcome };
        let has_crashed = matches!(earlier.first.verdict, Verdict::Crashed { .. });
        let (entry, target_before) = (fallback.entry.0, fallback.chain[fallback.next - 1].clone());
        let is_refused = match &outcome.verdict {
            Verdict::Rejected { .. } => true,
            Verdict::DeadlineQueued => has_crashed,
            _ => false,
        };
        let mut told = if is_refused { earlier.first.clone() } else { outcome.clone() };
        told.attempts = earlier.attempts + outcome.attempts;
        told.ran = earlier.ran + outcome.ran;
        told.queued = self.now.since(fallback.received).saturating_sub(told.ran);
        told.worker_pid = outcome.worker_pid.or(earlier.worker_pid);
        told.deadline = fallback.limit;
        if let (Verdict::Cancelled { executed }, true) = (&mut told.verdict, earlier.attempts > 0) {
            *executed = bulkhead_shared::Executed::Yes;
        }
        self.compartments[fallback.entry.1].policy.came_back(&told.verdict);
        let counts = &mut self.bulkheads[entry].tally;
        counts.elsewhere = counts.elsewhere.saturating_sub(1);
        self.count_guest_end(compartment, (entry, &target_before), &outcome.verdict);
        told
    }

    pub(super) fn outcome_of(&self, compartment: CompartmentIndex, answer: &Answer<Box<JobData>>) -> Outcome {
        Outcome {
            verdict: answer.verdict.clone(),
            job: answer.job,
            bulkhead: self.owner(compartment).name.as_ref().to_owned(),
            attempts: answer.attempts,
            queued: answer.queued,
            ran: answer.ran,
            worker_pid: answer.worker_pid,
            retryable: answer.retryable,
            retry_after: answer.retry_after,
            deadline: answer.deadline,
            run_limit: answer.run_limit,
            status: Self::exit_status(answer),
            report: self.report_of(answer).map(|id| id.to_string()),
        }
    }

    /// Reports that jobs go to another bulkhead. Repeated events are rate-limited and contain the number of jobs.
    fn report_fallback(&mut self, fallback: &FallbackState, place: usize, verdict: &Verdict) {
        let (entry, target) = (fallback.entry.0, fallback.chain[place].clone());
        let now = self.now;
        let (reported_at, jobs) = self.bulkheads[entry].fallback_events.entry(target.clone()).or_default();
        *jobs += 1;
        if reported_at.is_some_and(|at| now < at + REPEAT_INTERVAL) {
            return self.schedule_checks();
        }
        *reported_at = Some(now);
        let jobs = std::mem::take(jobs);
        let reason = verdict.reason().map(|reason| reason.to_owned().into());
        let what = What::FallbackUsed { target: target.as_ref().to_owned(), reason, jobs };
        self.bulkhead_event(Severity::Warning, entry, what);
    }

    /// Reports, when due, the jobs sent to fallbacks since the last report.
    pub(super) fn report_skipped_fallbacks(&mut self, bulkhead: BulkheadIndex) {
        let (now, mut due, mut is_waiting) = (self.now, Vec::new(), false);
        for (target, (reported_at, jobs)) in &mut self.bulkheads[bulkhead].fallback_events {
            if *jobs > 0 && reported_at.is_some_and(|at| now >= at + REPEAT_INTERVAL) {
                *reported_at = Some(now);
                due.push((target.as_ref().to_owned(), std::mem::take(jobs)));
            }
            is_waiting |= *jobs > 0;
        }
        for (target, jobs) in due {
            let what = What::FallbackUsed { target, reason: None, jobs };
            self.bulkhead_event(Severity::Warning, bulkhead, what);
        }
        if is_waiting {
            self.schedule_checks();
        }
    }
}
