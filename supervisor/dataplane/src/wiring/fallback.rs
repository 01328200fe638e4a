//! Passes jobs from a bulkhead to its fallbacks, and combines the outcomes of all bulkheads into one.
//! `wiring::sessions::outcomes` calls this before it sends an outcome to a client. The policy of a bulkhead knows
//! nothing about fallbacks, except that a job was passed on.

use std::time::Duration;

use bulkhead_api::{EventKind, Severity};
use bulkhead_policy::{JobOutcome, Submission};
use bulkhead_shared::limits::INLINE_PAYLOAD_BYTES_MAX;
use bulkhead_shared::{Outcome, RejectReason, Verdict};

use crate::fallback::FallbackState;
use crate::slab::{BulkheadIndex, CompartmentIndex};
use crate::{DataPlane, Incoming, JobData};

impl DataPlane {
    /// Passes a job on to the next fallback. If the job cannot be passed on, returns the outcome for the client.
    pub(crate) fn pass_to_fallback(
        &mut self,
        index: CompartmentIndex,
        mut answer: JobOutcome<Box<JobData>>,
        incoming: &mut Incoming<'_>,
    ) -> Option<JobOutcome<Box<JobData>>> {
        let Some(mut fallback) = answer.record.fallback.take() else { return Some(answer) };
        // A job can be passed on only with its payload. If the job was rejected on arrival, the payload is still in
        // `incoming`.
        let has_payload = answer.job.is_none() || !answer.record.held.is_empty();
        let next = self
            .next_fallback(&fallback, &answer)
            .filter(|_| has_payload && !self.is_stopping && !self.handover.has_switched());
        let Some((position, target, left)) = next else {
            answer.record.fallback = Some(fallback);
            return Some(answer);
        };
        let origin = fallback.origin();
        if let Some(wait) = self.charge_origin(&fallback, &answer) {
            answer.retryable = wait <= left;
            answer.retry_after = (wait < Duration::MAX).then_some(wait);
            answer.verdict = Verdict::rejected(RejectReason::RateLimited);
            answer.record.fallback = Some(fallback);
            return Some(answer);
        }
        self.report_fallback(origin, &fallback, position, &answer.verdict);
        match fallback.current_target() {
            Some(current) => {
                let compartment = &self.compartments[index];
                self.bulkheads.count_guest_end(compartment, (origin, current), &answer.verdict);
            }
            None => self.bulkheads[origin].counters.elsewhere += 1,
        }
        if matches!(answer.verdict, Verdict::Crashed { .. }) {
            self.report_failed_job(index, &answer);
        }
        let payload = self.take_payload(&mut answer.record, incoming);
        if !fallback.is_at_fallback() {
            let policy = &mut self.compartments[fallback.origin_compartment()].policy;
            policy.count_fallback(&answer.record.tenant, &answer.verdict);
        }
        fallback.pass_on(position, &answer, || self.outcome_of(index, &answer));
        answer.record.pass_on(answer.attempts);
        self.submit_to_fallback(target, left, answer.record, fallback, payload);
        None
    }

    fn next_fallback(
        &self,
        fallback: &FallbackState,
        answer: &JobOutcome<Box<JobData>>,
    ) -> Option<(usize, BulkheadIndex, Duration)> {
        let size = answer.record.payload_bytes as u64;
        let find = |name: &str| {
            self.bulkheads.find(name).filter(|target| self.bulkheads[*target].max_payload >= size)
        };
        let next = fallback.next_target(self.now, &answer.verdict, find)?;
        self.is_client_connected(&answer.record).then_some(next)
    }

    /// Charges a job's cost to the rate limit of the bulkhead to which the client submitted the job, unless the cost
    /// was already charged. If the limit is exceeded, returns the time to wait.
    fn charge_origin(
        &mut self,
        fallback: &FallbackState,
        answer: &JobOutcome<Box<JobData>>,
    ) -> Option<Duration> {
        let cost = fallback.due_cost(answer)?;
        let policy = &mut self.compartments[fallback.origin_compartment()].policy;
        policy.charge_fallback(self.now, &answer.record.tenant, cost, &answer.verdict)
    }

    fn take_payload<'p>(&mut self, record: &mut JobData, incoming: &mut Incoming<'p>) -> Incoming<'p> {
        self.memory.discharge(&mut record.charge);
        if record.held.file.is_some() {
            // The job keeps its memory file, which contains the payload.
            record.held.payload = None;
            return Incoming::Owned(Vec::new());
        }
        if let Some(payload) = record.held.payload.take() {
            return Incoming::Owned(payload);
        }
        match record.held.copy.take() {
            Some(copy) => Incoming::Owned(copy.into_vec()),
            None => std::mem::replace(incoming, Incoming::None),
        }
    }

    fn submit_to_fallback(
        &mut self,
        bulkhead: BulkheadIndex,
        left: Duration,
        mut record: Box<JobData>,
        fallback: Box<FallbackState>,
        payload: Incoming<'_>,
    ) {
        let compartment = self.compartment_for(bulkhead, &record.tenant);
        let entry = &mut self.bulkheads[bulkhead];
        entry.counters.guests += 1;
        let keeps_payload = fallback.keeps_payload(entry.has_retries);
        record.held.is_resendable = keeps_payload || payload.len() <= INLINE_PAYLOAD_BYTES_MAX;
        let digest = match &record.held.file {
            None => entry.digest(&record.operation, payload.bytes()),
            Some(_) => None,
        };
        let tenant = self.compartments[compartment].policy.tenant(&record.tenant);
        let sequence = self.compartments.next_job();
        let (session, request) = (record.session, record.request);
        let mut submission = Submission { sequence, tenant, digest, ..fallback.submission(left, record) };
        submission.record.fallback = Some(fallback);
        if let Some(job) = self.submit_to_compartment(compartment, submission, payload) {
            self.sessions.record_request(session, request, compartment, job);
        }
    }

    /// Returns the outcome for the client. For a job that was passed on, the outcome contains the total number of
    /// attempts and the total times of all bulkheads.
    pub(crate) fn combined_outcome(
        &mut self,
        index: CompartmentIndex,
        answer: &JobOutcome<Box<JobData>>,
    ) -> Outcome {
        let outcome = self.outcome_of(index, answer);
        let Some(fallback) = &answer.record.fallback else { return outcome };
        let Some(combined) = fallback.combine(self.now, &outcome, &answer.record) else { return outcome };
        let (entered, ended) = (fallback.origin_compartment(), (&*answer.record.tenant, &combined.verdict));
        self.bulkheads.count_fallback_end(&mut self.compartments, self.now, entered, ended);
        if let Some(target) = fallback.current_target() {
            let (compartment, origin) = (&self.compartments[index], fallback.origin());
            self.bulkheads.count_guest_end(compartment, (origin, target), &outcome.verdict);
        }
        combined
    }

    /// Reports that jobs are being passed on to another bulkhead. Events are rate-limited. Each event contains the
    /// number of jobs passed on since the previous event.
    fn report_fallback(
        &mut self,
        origin: BulkheadIndex,
        fallback: &FallbackState,
        position: usize,
        verdict: &Verdict,
    ) {
        let target = fallback.target_name(position);
        let Some(jobs) = self.bulkheads.count_fallback(self.now, origin, target) else { return };
        let reason = verdict.reason().map(|reason| reason.to_owned().into());
        let what = EventKind::FallbackUsed { target: target.as_ref().to_owned(), reason, jobs };
        self.reporter.bulkhead_event(Severity::Warning, &self.bulkheads[origin].name, what);
    }

    /// Sends any due events about jobs that were passed on to fallbacks.
    pub(crate) fn report_skipped_fallbacks(&mut self) {
        for (bulkhead, target, jobs) in self.bulkheads.due_fallback_reports(self.now) {
            let what = EventKind::FallbackUsed { target, reason: None, jobs };
            self.reporter.bulkhead_event(Severity::Warning, &self.bulkheads[bulkhead].name, what);
        }
    }
}
