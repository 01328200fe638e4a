//! Completes jobs whose outcome policy has decided. Counts and reports the outcome, releases the job's memory and
//! lease, and sends the outcome to the client. A job with a fallback can be passed on to the fallback instead.
//! `sessions/outcomes.rs` encodes the frame.

use bulkhead_policy::JobOutcome;
use bulkhead_shared::client_protocol::OutcomeMessage;
use bulkhead_shared::connection::Payload;
use bulkhead_shared::{Outcome, Verdict};

use crate::sessions::OutcomeExtensions;
use crate::slab::CompartmentIndex;
use crate::{DataPlane, Incoming, JobData};

/// Returns the payload of an outcome. This is either the result, or the data that the handler sent with a failure.
fn result_payload<'p>(verdict: &Verdict, incoming: &mut Incoming<'p>) -> Payload<'p> {
    match verdict {
        Verdict::Ok | Verdict::Failed(_) => incoming.take(),
        _ => Payload::NONE,
    }
}

/// Returns the exit status of the program that ran a job. Returns `None` if the outcome was not decided by the
/// program's result. For example, a worker can send a status along with a result that is then rejected.
fn exit_status(answer: &JobOutcome<Box<JobData>>) -> Option<i32> {
    answer.record.status.filter(|_| matches!(answer.verdict, Verdict::Ok | Verdict::Failed(_)))
}

impl DataPlane {
    pub(crate) fn answer(
        &mut self,
        index: CompartmentIndex,
        mut answer: JobOutcome<Box<JobData>>,
        incoming: &mut Incoming<'_>,
    ) {
        if self.compartments[index].is_replay {
            self.replays.answered(index, &answer);
            self.memory.discharge(&mut answer.record.charge);
            return self.buffers.keep_record(answer.record);
        }
        if answer.verdict == Verdict::DeadlineRunning {
            self.sample_late_job(index, &answer);
        }
        self.bulkheads.count_answer(&self.compartments[index], &answer);
        if answer.record.fallback.is_some() {
            match self.pass_to_fallback(index, answer, incoming) {
                Some(own) => answer = own,
                None => return,
            }
        }
        self.memory.discharge(&mut answer.record.charge);
        let payload = answer.record.held.payload.take();
        payload.into_iter().for_each(|payload| self.buffers.pool.put(payload));
        let leased = answer.record.held.file.take();
        let result = leased.and_then(|leased| self.end_leased_job(*leased, answer.job, &answer.verdict));
        if answer.attempts > 0 {
            self.bulkheads.record_run(&mut self.compartments[index], self.now, &answer);
        }
        if matches!(answer.verdict, Verdict::DeadlineRunning | Verdict::Crashed { .. }) {
            self.report_failed_job(index, &answer);
            self.crashes.record_failed_job(&answer);
        }
        let (id, number) = (answer.record.session, answer.record.request);
        let is_connected = self.sessions.finish_request(id, number);
        let (request, span) = ((id.index, number), answer.record.span());
        if answer.record.fallback.is_some() || span.is_some() {
            let outcome = self.combined_outcome(index, &answer);
            let compartment = &self.compartments[index];
            self.bulkheads.count_end(compartment, self.now, &answer.record, &outcome.verdict);
            if span.is_some() {
                let fallback = answer.record.fallback.as_ref();
                let entered = fallback.map_or(compartment.bulkhead, |fallback| fallback.origin());
                let name = self.bulkheads[entered].name.clone();
                self.spans.send(self.now, name, &mut answer.record, &outcome);
            }
            if is_connected {
                let payload = result_payload(&outcome.verdict, incoming);
                let (job, run_limit, report) = (outcome.job, outcome.run_limit, outcome.report.clone());
                let extensions = OutcomeExtensions { job, span, run_limit, report, result };
                let message = OutcomeMessage::from_outcome(&outcome);
                self.sessions.send_outcome(request, &message, extensions, payload, &mut self.buffers.pool);
            }
            return self.buffers.keep_record(answer.record);
        }
        let compartment = &self.compartments[index];
        self.bulkheads.count_end(compartment, self.now, &answer.record, &answer.verdict);
        if is_connected {
            let message = OutcomeMessage {
                retryable: answer.retryable.into(),
                attempts: answer.attempts,
                worker_pid: answer.worker_pid.unwrap_or(0),
                ..OutcomeMessage::from_verdict(&answer.verdict, &self.bulkheads.owner(compartment).name)
            };
            let message = message.with_times(answer.queued, answer.ran, answer.deadline, answer.retry_after);
            let message = message.with_status(exit_status(&answer));
            let payload = result_payload(&answer.verdict, incoming);
            let report = self.report_of(&answer).map(|id| id.to_string());
            let (job, run_limit) = (answer.job, answer.run_limit);
            let extensions = OutcomeExtensions { job, run_limit, span: None, report, result };
            self.sessions.send_outcome(request, &message, extensions, payload, &mut self.buffers.pool);
        }
        self.buffers.keep_record(answer.record);
    }

    pub(crate) fn outcome_of(&self, index: CompartmentIndex, answer: &JobOutcome<Box<JobData>>) -> Outcome {
        Outcome {
            verdict: answer.verdict.clone(),
            job: answer.job,
            bulkhead: self.bulkheads.owner(&self.compartments[index]).name.as_ref().to_owned(),
            attempts: answer.attempts,
            queued: answer.queued,
            ran: answer.ran,
            worker_pid: answer.worker_pid,
            retryable: answer.retryable,
            retry_after: answer.retry_after,
            deadline: answer.deadline,
            run_limit: answer.run_limit,
            status: exit_status(answer),
            report: self.report_of(answer).map(|id| id.to_string()),
        }
    }
}
