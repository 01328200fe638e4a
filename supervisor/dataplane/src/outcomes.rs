//! Sends the outcomes of jobs to clients.

use std::time::Duration;

use bulkhead_api::CrashId;
use bulkhead_policy::Answer;
use bulkhead_shared::client_protocol::{OutcomeMessage, Progress, run_limit_bytes};
use bulkhead_shared::codec::tag;
use bulkhead_shared::connection::{BufferPool, Payload};
use bulkhead_shared::frame::kind;
use bulkhead_shared::memory_files::Named;
use bulkhead_shared::trace::Traceparent;
use bulkhead_shared::{JobId, Verdict};

use super::session_table::Sessions;
use super::sessions::{Stage, UNREAD_BYTES_PAUSE};
use super::slab::{CompartmentIndex, SessionId, SessionIndex};
use super::{DataPlane, Endpoint, Incoming, JobData};

/// Capacity up to which a client's request table never shrinks.
const REQUESTS_CAPACITY_KEPT: usize = 1024;

/// Returns the payload of an answer: the result, or the data that the handler sent with a failure.
fn result_payload<'p>(verdict: &Verdict, incoming: &mut Incoming<'p>) -> Payload<'p> {
    match verdict {
        Verdict::Ok | Verdict::Failed(_) => incoming.take(),
        _ => Payload::NONE,
    }
}

/// Extensions of an outcome frame.
#[derive(Default)]
pub(super) struct OutcomeExtensions {
    pub(super) job: Option<JobId>,
    pub(super) span: Option<Traceparent>,
    pub(super) run_limit: Option<Duration>,
    /// Id of the crash report.
    pub(super) report: Option<String>,
    /// Location of a result in a memory file.
    pub(super) result: Option<Named>,
}

impl DataPlane {
    /// Returns the exit status of the program that ran a job, if the program's own answer ended the job. A worker can
    /// send a status with an answer that is then rejected.
    pub(super) fn exit_status(answer: &Answer<Box<JobData>>) -> Option<i32> {
        answer.cargo.status.filter(|_| matches!(answer.verdict, Verdict::Ok | Verdict::Failed(_)))
    }

    pub(super) fn answer(
        &mut self,
        compartment: CompartmentIndex,
        answer: Answer<Box<JobData>>,
        incoming: &mut Incoming<'_>,
    ) {
        let mut answer = answer;
        if self.compartments[compartment].is_replay {
            return self.replay_answered(compartment, answer);
        }
        self.count_answer(compartment, &answer);
        if answer.cargo.fallback.is_some() {
            match self.pass_to_fallback(compartment, answer, incoming) {
                Some(own) => answer = own,
                None => return,
            }
        }
        self.free_job(&mut answer.cargo);
        let leased = answer.cargo.held.file.take();
        let result = leased.and_then(|leased| self.end_leased_job(*leased, answer.job, &answer.verdict));
        if answer.attempts > 0 {
            let (now, entry) = (self.now, &mut self.compartments[compartment]);
            let (ran, queued) = (answer.ran, answer.queued);
            if entry.tenant.is_some() {
                entry.latency.record(now, ran, queued);
            }
            let own = entry.policy.limits().deadline;
            let is_long = answer.run_limit.is_some_and(|limit| ran >= limit);
            let bulkhead = &mut self.bulkheads[entry.bulkhead];
            bulkhead.latency.record(now, ran, queued);
            bulkhead.demand.served(ran, queued);
            if answer.verdict == Verdict::DeadlineRunning {
                bulkhead.demand.was_late(!is_long && answer.deadline >= own);
            }
        }
        if matches!(answer.verdict, Verdict::DeadlineRunning | Verdict::Crashed { .. }) {
            self.report_failed_job(compartment, &answer);
            self.reporter.last_crashed =
                answer.job.map(|job| (job, answer.cargo.operation.clone(), answer.cargo.tenant.clone()));
        }
        let (id, request) = (answer.cargo.session, answer.cargo.request);
        let index = id.index;
        let is_there = match self.sessions.of_mut(id) {
            Some(session) => {
                session.requests.remove(&request);
                // Frees the memory of a burst of requests.
                let (len, capacity) = (session.requests.len(), session.requests.capacity());
                if capacity > REQUESTS_CAPACITY_KEPT && len < capacity / 8 {
                    session.requests.shrink_to(2 * len);
                }
                true
            }
            None => false,
        };
        let span = answer.cargo.span();
        if answer.cargo.fallback.is_some() || span.is_some() {
            let outcome = self.combined_outcome(compartment, &answer);
            self.count_end(compartment, &answer.cargo, &outcome.verdict);
            if span.is_some() {
                self.end_span(compartment, &mut answer.cargo, &outcome);
            }
            if is_there {
                let payload = result_payload(&outcome.verdict, incoming);
                let report = outcome.report.clone();
                let about = OutcomeExtensions {
                    job: outcome.job,
                    span,
                    run_limit: outcome.run_limit,
                    report,
                    result,
                };
                self.send_outcome(index, request, &OutcomeMessage::from_outcome(&outcome), about, payload);
            }
            self.buffers.keep_record(answer.cargo);
            return;
        }
        self.count_end(compartment, &answer.cargo, &answer.verdict);
        if is_there {
            let owner = &self.bulkheads[self.compartments[compartment].bulkhead];
            let message = OutcomeMessage {
                retryable: answer.retryable.into(),
                attempts: answer.attempts,
                worker_pid: answer.worker_pid.unwrap_or(0),
                ..OutcomeMessage::of_verdict(&answer.verdict, &owner.name)
            };
            let message = message.with_times(answer.queued, answer.ran, answer.deadline, answer.retry_after);
            let message = message.with_status(Self::exit_status(&answer));
            let payload = result_payload(&answer.verdict, incoming);
            let report = self.report_of(&answer).map(|id| id.to_string());
            let about = OutcomeExtensions {
                job: answer.job,
                run_limit: answer.run_limit,
                span: None,
                report,
                result,
            };
            let pool = &mut self.buffers.pool;
            push_outcome(&mut self.sessions, pool, (index, request), &message, about, payload);
            self.schedule_flush(Endpoint::Session(index));
        }
        self.buffers.keep_record(answer.cargo);
    }

    /// Returns the crash report about the death that ends this job. Valid only while this death is applied.
    pub(super) fn report_of(&self, answer: &Answer<Box<JobData>>) -> Option<CrashId> {
        let has_crashed = matches!(answer.verdict, Verdict::Crashed { .. });
        self.reporter.report_about(answer.worker_pid.filter(|_| has_crashed))
    }

    pub(super) fn send_outcome(
        &mut self,
        index: SessionIndex,
        request: u64,
        message: &OutcomeMessage<'_>,
        about: OutcomeExtensions,
        payload: Payload<'_>,
    ) {
        let pool = &mut self.buffers.pool;
        push_outcome(&mut self.sessions, pool, (index, request), message, about, payload);
        self.schedule_flush(Endpoint::Session(index));
    }

    pub(super) fn send_progress(&mut self, session: SessionId, request: u64, progress: Progress<'_>) {
        let Some(entry) = self.sessions.of_mut(session) else { return };
        // Progress is optional, so clients with a large backlog get none.
        if entry.outbox.waiting_bytes() < UNREAD_BYTES_PAUSE {
            let _ = entry.outbox.push(kind::PROGRESS, request, &progress, &[], Payload::NONE);
            self.schedule_flush(Endpoint::Session(session.index));
        }
    }
}

/// Queues an outcome for a client, unless the session is closing.
fn push_outcome(
    sessions: &mut Sessions,
    pool: &mut BufferPool,
    (index, request): (SessionIndex, u64),
    message: &OutcomeMessage<'_>,
    OutcomeExtensions { job, span, run_limit, report, result }: OutcomeExtensions,
    payload: Payload<'_>,
) {
    let Some(session) = sessions.get_mut(index).filter(|session| session.stage != Stage::Closing) else {
        return;
    };
    // Every text in an outcome was limited on arrival, so the metadata fits.
    let number = job.map(JobId::to_bytes);
    let run_limit = run_limit.map(run_limit_bytes);
    let result = result.map(Named::to_bytes);
    let given = [
        number.as_ref().map(|number| (tag::JOB, &number[..])),
        span.as_ref().map(|span| (tag::TRACEPARENT, span.as_str().as_bytes())),
        run_limit.as_ref().map(|limit| (tag::RUN_LIMIT, &limit[..])),
        result.as_ref().map(|result| (tag::LEASE, &result[..])),
        report.as_ref().map(|id| (tag::CRASH_REPORT, id.as_bytes())),
    ];
    let (mut extensions, mut count) = ([(0, &[][..]); 5], 0);
    for extension in given.into_iter().flatten() {
        extensions[count] = extension;
        count += 1;
    }
    let pushed =
        session.outbox.push_pooled(kind::OUTCOME, request, message, &extensions[..count], payload, pool);
    debug_assert!(pushed.is_ok(), "an outcome did not fit");
}
