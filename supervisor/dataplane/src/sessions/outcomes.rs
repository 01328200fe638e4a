//! Encodes job outcomes and job progress, and adds them to the client's outbox. The wiring calls this module, and
//! writes the outboxes to the sockets later. Policy decides the outcome of a job. `wiring/sessions/submissions.rs`
//! decides that of a submission that never becomes a job.

use std::time::Duration;

use bulkhead_shared::JobId;
use bulkhead_shared::client_protocol::{OutcomeMessage, Progress, encode_run_limit};
use bulkhead_shared::codec::tag;
use bulkhead_shared::connection::{BufferPool, Payload};
use bulkhead_shared::frame::kind;
use bulkhead_shared::memory_files::LeaseRef;
use bulkhead_shared::trace::Traceparent;

use super::{Phase, SessionId, SessionIndex, Sessions, UNREAD_BYTES_PAUSE};

/// Extensions of an OUTCOME frame.
#[derive(Default)]
pub(crate) struct OutcomeExtensions {
    pub(crate) job: Option<JobId>,
    pub(crate) span: Option<Traceparent>,
    pub(crate) run_limit: Option<Duration>,
    /// ID of the crash report about the job.
    pub(crate) report: Option<String>,
    /// Location of the result, if the result is in a memory file.
    pub(crate) result: Option<LeaseRef>,
}

impl Sessions {
    /// Sends the outcome of a job to a client, unless the session is being closed.
    pub(crate) fn send_outcome(
        &mut self,
        (index, request): (SessionIndex, u64),
        message: &OutcomeMessage<'_>,
        OutcomeExtensions { job, span, run_limit, report, result }: OutcomeExtensions,
        payload: Payload<'_>,
        pool: &mut BufferPool,
    ) {
        let session = self.slab.get_mut(index).filter(|session| session.phase != Phase::Closing);
        let Some(session) = session else { return };
        // The outcome fits into a frame, because each text was checked against its maximum length when it was received.
        let number = job.map(JobId::to_bytes);
        let run_limit = run_limit.map(encode_run_limit);
        let result = result.map(LeaseRef::to_bytes);
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
        debug_assert!(pushed.is_ok(), "the outcome does not fit into a frame");
        self.schedule_flush(index);
    }

    /// Sends a job's progress to its client. Drops the progress if the client has a large send backlog.
    pub(crate) fn send_progress(&mut self, client: SessionId, request: u64, progress: Progress<'_>) {
        let Some(session) = self.of_mut(client) else { return };
        if session.outbox.waiting_bytes() < UNREAD_BYTES_PAUSE {
            let _ = session.outbox.push(kind::PROGRESS, request, &progress, &[], Payload::NONE);
            self.schedule_flush(client.index);
        }
    }
}
