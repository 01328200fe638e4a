//! Checks the jobs that clients submit, passes accepted jobs on to policy, and rejects the others. Also passes on
//! cancellations. `frames` calls this for each job, and for a large job also before the payload is received. Policy
//! decides whether an accepted job runs, waits or is rejected, and `outcomes` sends that outcome.

use std::time::{Duration, SystemTime};

use bulkhead_plane::access::{self, Grant};
use bulkhead_plane::peer_check::{ClientRejection, SocketKind};
use bulkhead_policy::{Event, Submission};
use bulkhead_shared::client_protocol::Submit;
use bulkhead_shared::connection::Payload;
use bulkhead_shared::frame::Header;
use bulkhead_shared::limits::{INLINE_PAYLOAD_BYTES_MAX, truncate};
use bulkhead_shared::{Priority, RejectReason, Verdict};

use crate::fallback::FallbackState;
use crate::links::JobPosition;
use crate::memory::{self, Charge, memory_full_rejection};
use crate::sessions::{OutcomeExtensions, Phase, REQUESTS_MAX, Violation};
use crate::slab::{BulkheadIndex, SessionIndex};
use crate::submissions::{self, SubmitExtensions};
use crate::{DataPlane, HeldPayload, Incoming, JobData, link_bytes};

impl DataPlane {
    pub(super) fn submit(
        &mut self,
        index: SessionIndex,
        header: Header,
        metadata: &[u8],
        payload: Incoming<'_>,
    ) -> Result<(), Violation> {
        self.check_request_number(index, header.number)?;
        let id = self.sessions.id(index);
        let has_room = self.sessions[index].requests.len() < REQUESTS_MAX;
        let (bulkhead, submit, extensions) = match self.check_submission(index, header, metadata) {
            Ok(_) if !has_room => {
                let message = format!("this client already has {REQUESTS_MAX} unfinished jobs");
                self.reject_submission(index, header, metadata, RejectReason::Overloaded, &message);
                return Ok(());
            }
            Ok(checked) => checked,
            Err((reason, message)) => {
                self.reject_submission(index, header, metadata, reason, &message);
                return Ok(());
            }
        };
        let leased = extensions.leased.and_then(|named| self.begin_leased_job(named));
        let (mut file, preferred_worker) = leased.unzip();
        let payload_bytes = file.as_ref().map_or(payload.len(), |file| file.bytes());
        let (priority, idempotent) =
            (Priority::from_code(submit.priority).unwrap_or_default(), submit.idempotent != 0);
        let compartment = self.compartment_for(bulkhead, submit.tenant);
        let policy = &mut self.compartments[compartment].policy;
        let tenant = policy.tenant(submit.tenant);
        let label = policy.label(tenant) as u32;
        let entry = &mut self.bulkheads[bulkhead];
        entry.counters.count_submitted(priority);
        let has_fallback = !entry.fallback.is_empty();
        let keeps_payload = idempotent && (entry.has_retries || has_fallback);
        file.iter_mut().for_each(|file| file.set_kept(keeps_payload));
        let is_resendable = keeps_payload || payload.len() <= INLINE_PAYLOAD_BYTES_MAX;
        let digest = if file.is_none() { entry.digest(submit.operation, payload.bytes()) } else { None };
        let deadline = submissions::requested_deadline(&submit);
        let fallback = has_fallback.then(|| {
            let limit = policy.limits().effective_deadline(deadline);
            let origin = (bulkhead, compartment);
            let wishes = (extensions.run_limit, priority, idempotent, submit.cost);
            Box::new(FallbackState::new(origin, entry.fallback.clone(), (self.now, limit), wishes))
        });
        let submission = Submission {
            sequence: self.compartments.next_job(),
            record: self.buffers.record(JobData {
                session: id,
                request: header.number,
                operation: submit.operation.into(),
                tenant: submit.tenant.into(),
                trace: self.spans.start((self.now, SystemTime::now), extensions.traceparent),
                payload_bytes,
                priority,
                label,
                held: HeldPayload { is_resendable, file, ..HeldPayload::default() },
                position: JobPosition::default(),
                charge: Charge::default(),
                status: None,
                fallback,
            }),
            deadline,
            run_limit: extensions.run_limit,
            priority,
            idempotent,
            tenant,
            cost: submit.cost,
            bytes: link_bytes(payload_bytes + submit.operation.len() + submit.tenant.len()),
            is_resendable,
            digest,
            is_fallback: false,
            preferred_worker: preferred_worker.flatten(),
        };
        if let Some(job) = self.submit_to_compartment(compartment, submission, payload) {
            self.sessions.record_job(id, header.number, (compartment, job), bulkhead);
        }
        Ok(())
    }

    /// Returns a violation if the request number belongs to an unfinished job. The client could not tell the outcomes
    /// of two jobs with the same number apart.
    pub(super) fn check_request_number(&self, index: SessionIndex, number: u64) -> Result<(), Violation> {
        match self.sessions.request(index, number) {
            Some(_) => {
                let message = format!("request number {number} is already in use");
                Err(Violation(RejectReason::Invalid, message))
            }
            None => Ok(()),
        }
    }

    /// Checks a submission, including the client's permission to submit the job.
    pub(super) fn check_submission<'m>(
        &self,
        index: SessionIndex,
        header: Header,
        metadata: &'m [u8],
    ) -> Result<(BulkheadIndex, Submit<'m>, SubmitExtensions), (RejectReason, String)> {
        let session = &self.sessions[index];
        let (submit, extensions) =
            submissions::decode(metadata).map_err(|error| (RejectReason::Invalid, error.to_string()))?;
        // Looks up the bulkhead of the client's previous job first, because consecutive jobs are usually for the same
        // bulkhead.
        let found = self.bulkheads.find_recent(session.frame_for, submit.bulkhead);
        if let Grant::Rules(rules) = &session.grant
            && let Some(message) =
                access::rejection_message(rules, (submit.bulkhead, found.is_some()), submit.tenant)
        {
            return Err((RejectReason::Forbidden, message));
        }
        let Some(bulkhead) = found else {
            let name = truncate(submit.bulkhead, 64);
            return Err((RejectReason::NotFound, format!("there is no bulkhead '{}'", name.escape_debug())));
        };
        let extensions = submissions::check_form(&submit, &extensions)?;
        let mut size = header.payload_length() as u64;
        if let Some(named) = extensions.leased {
            let (client, target) = (self.sessions.id(index), (submit.bulkhead, submit.tenant));
            let checked = self.leases.check_job(self.now, client, target, (named, header.payload_length()));
            checked.map_err(|(reason, message)| (reason, message.to_owned()))?;
            size = named.bytes;
        }
        let most = self.bulkheads[bulkhead].max_payload;
        if size > most {
            return Err((RejectReason::TooLarge, submissions::too_large_message(size, most)));
        }
        // Part of the frame's memory might already be charged to the client.
        let more = (size as usize + memory::JOB_BYTES).saturating_sub(session.counted_frame.bytes());
        let budget = self.limits.buffered_bytes_max;
        if !self.memory.can_hold(session.holder, Some(bulkhead), more, budget) {
            return Err(memory_full_rejection(budget));
        }
        Ok((bulkhead, submit, extensions))
    }

    /// Rejects a submission that has not been passed to policy.
    pub(super) fn reject_submission(
        &mut self,
        index: SessionIndex,
        header: Header,
        metadata: &[u8],
        reason: RejectReason,
        message: &str,
    ) {
        let decoded = submissions::decode(metadata).ok();
        let name = decoded.as_ref().map_or("", |(submit, _)| submit.bulkhead);
        let mut deadline = decoded.as_ref().and_then(|(submit, _)| submissions::requested_deadline(submit));
        if let Some((submit, _)) = &decoded
            && let Some(bulkhead) = self.bulkheads.find(name)
        {
            let priority = Priority::from_code(submit.priority).unwrap_or_default();
            // A client without permission must not learn that the bulkhead exists.
            let is_forbidden = reason == RejectReason::Forbidden;
            let limits = self.bulkheads[bulkhead].limits(&self.compartments);
            deadline = if is_forbidden { deadline } else { Some(limits.effective_deadline(deadline)) };
            let key = (priority, submissions::counted_tenant(submit, reason));
            self.bulkheads.count_rejected(&mut self.compartments, self.now, bulkhead, key, reason);
        }
        self.sessions.count_rejection(index);
        let peer = self.sessions.get(index).and_then(|session| session.peer);
        if let (RejectReason::Forbidden, Some(peer)) = (reason, peer) {
            self.report_rejection(SocketKind::Jobs, ClientRejection::forbidden(peer, message.to_owned()));
        }
        let verdict = Verdict::Rejected { reason, message: message.to_owned() };
        let retry_after = reason.is_retryable().then_some(Duration::from_secs(1));
        let name = truncate(name, 64);
        let span = decoded.and_then(|(submit, extensions)| {
            let (given, bytes) = (submissions::traceparent(&extensions), header.payload_length());
            self.spans.send_rejected((self.now, SystemTime::now), &submit, given, bytes, &verdict)
        });
        let message = submissions::rejection(&verdict, name, deadline, retry_after);
        let extensions = OutcomeExtensions { span, ..OutcomeExtensions::default() };
        let (request, pool) = ((index, header.number), &mut self.buffers.pool);
        self.sessions.send_outcome(request, &message, extensions, Payload::NONE, pool);
    }

    pub(super) fn cancel_request(&mut self, index: SessionIndex, number: u64, unless_begun: bool) {
        let Some((compartment, job)) = self.sessions.request(index, number) else {
            return self.sessions.count_rejection(index);
        };
        if !unless_begun || !self.compartments.has_run_elsewhere(compartment, job) {
            self.apply(compartment, Event::Cancel { job, unless_begun }, Incoming::None);
        }
    }

    /// Returns true if the client that submitted a job is still connected.
    pub(crate) fn is_client_connected(&self, record: &JobData) -> bool {
        self.sessions.of(record.session).is_some_and(|session| session.phase == Phase::Open)
    }
}
