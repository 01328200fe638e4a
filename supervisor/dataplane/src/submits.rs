//! Jobs from clients: checks before policy gets a job, and rejections.

use std::time::Duration;

use bulkhead_plane::access::{self, Grant};
use bulkhead_plane::entry::{Refusal, SocketKind};
use bulkhead_policy::{Event, Submission};
use bulkhead_shared::client_protocol::{OutcomeMessage, Submit, read_run_limit};
use bulkhead_shared::codec::{self, Extensions, tag};
use bulkhead_shared::connection::Payload;
use bulkhead_shared::frame::Header;
use bulkhead_shared::limits::{INLINE_PAYLOAD_BYTES_MAX, OPERATION_BYTES_MAX, TENANT_BYTES_MAX};
use bulkhead_shared::memory_files::Named;
use bulkhead_shared::trace::Traceparent;
use bulkhead_shared::{Priority, RejectReason, Verdict};

use super::bulkheads::Presence;
use super::fallback::FallbackState;
use super::outcomes::OutcomeExtensions;
use super::sessions::{Stage, Violation};
use super::slab::{BulkheadIndex, SessionId, SessionIndex};
use super::{Charge, DataPlane, Held, Incoming, JobData, memory};

/// Maximum number of unfinished jobs per client.
const REQUESTS_MAX: usize = 1 << 20;

/// Extensions of a submission.
#[derive(Clone, Copy, Default)]
pub(super) struct SubmitExtensions {
    pub(super) traceparent: Option<Traceparent>,
    pub(super) run_limit: Option<Duration>,
    /// Location of a payload in a memory file.
    pub(super) leased: Option<Named>,
}

/// Returns the trace context. An invalid context is ignored, as the W3C specification requires.
pub(super) fn traceparent(extensions: &Extensions<'_>) -> Option<Traceparent> {
    let text = extensions.get(tag::TRACEPARENT).and_then(|bytes| std::str::from_utf8(bytes).ok())?;
    Traceparent::parse(text)
}

impl DataPlane {
    pub(super) fn submit(
        &mut self,
        index: SessionIndex,
        header: Header,
        metadata: &[u8],
        payload: Incoming<'_>,
    ) -> Result<(), Violation> {
        self.check_request_number(index, header.number)?;
        let session = &self.sessions[index];
        let id = SessionId { index, epoch: session.epoch };
        let has_room = session.requests.len() < REQUESTS_MAX;
        let (bulkhead, submit, extras) = match self.check_submit(index, header, metadata) {
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
        let mut file = extras.leased.and_then(|named| self.begin_leased_job(named));
        let prefers = extras.leased.and_then(|named| self.user_of(named.lease));
        let payload_bytes = file.as_ref().map_or(payload.len(), |file| file.bytes);
        let (priority, idempotent) =
            (Priority::from_code(submit.priority).unwrap_or_default(), submit.idempotent != 0);
        let compartment = self.compartment_for(bulkhead, submit.tenant);
        let tenant = self.compartments[compartment].policy.tenant(submit.tenant);
        let label = self.compartments[compartment].policy.label(tenant) as u32;
        let entry = &mut self.bulkheads[bulkhead];
        entry.tally.submit(priority);
        let has_fallback = !entry.fallback.is_empty();
        let keeps_payload = idempotent && (entry.retries || has_fallback);
        file.iter_mut().for_each(|file| file.is_kept = keeps_payload);
        let is_repeatable = keeps_payload || payload.len() <= INLINE_PAYLOAD_BYTES_MAX;
        let digest = if file.is_none() { entry.digest(submit.operation, payload.bytes()) } else { None };
        let deadline = (submit.deadline_us > 0).then(|| Duration::from_micros(submit.deadline_us));
        let fallback = has_fallback.then(|| {
            let limits = self.compartments[compartment].policy.limits();
            Box::new(FallbackState {
                entry: (bulkhead, compartment),
                chain: entry.fallback.clone(),
                next: 0,
                received: self.now,
                run_limit: extras.run_limit,
                limit: deadline.map_or(limits.deadline, |asked| asked.min(limits.deadline_max)),
                priority,
                idempotent,
                cost: submit.cost,
                earlier: None,
            })
        });
        let trace = self.start_trace(extras.traceparent);
        let submission = Submission {
            sequence: self.compartments.next_job(),
            cargo: self.buffers.record(JobData {
                session: id,
                request: header.number,
                operation: submit.operation.into(),
                tenant: submit.tenant.into(),
                trace,
                payload_bytes,
                priority,
                label,
                held: Held { is_repeatable, file, ..Held::default() },
                position: super::read_position::JobPosition::default(),
                charge: Charge::default(),
                status: None,
                fallback,
            }),
            deadline,
            run_limit: extras.run_limit,
            priority,
            idempotent,
            tenant,
            cost: submit.cost,
            bytes: super::prefetch::frame_bytes(payload_bytes + submit.operation.len() + submit.tenant.len()),
            is_repeatable,
            digest,
            is_guest: false,
            prefers,
        };
        let job = self.submit_to_compartment(compartment, submission, payload);
        if let Some(job) = job {
            self.sessions.record_request(id, header.number, compartment, job);
            if let Some(session) = self.sessions.get_mut(index) {
                session.queue_state.count_job();
                session.frame_for = Some(bulkhead);
            }
        }
        Ok(())
    }

    /// Returns true if the client of a job is still connected.
    pub(super) fn is_client_connected(&self, cargo: &JobData) -> bool {
        self.sessions.of(cargo.session).is_some_and(|session| session.stage == Stage::Open)
    }

    /// Rejects a request number that is in use, because a number must not get two outcomes.
    pub(super) fn check_request_number(&self, index: SessionIndex, number: u64) -> Result<(), Violation> {
        match self.sessions.get(index) {
            Some(session) if session.requests.contains_key(&number) => {
                let message = format!("the request number {number} is in use already");
                Err(Violation(RejectReason::Invalid, message))
            }
            _ => Ok(()),
        }
    }

    /// Checks the shape of a submission and the permissions of the client.
    pub(super) fn check_submit<'m>(
        &self,
        index: SessionIndex,
        header: Header,
        metadata: &'m [u8],
    ) -> Result<(BulkheadIndex, Submit<'m>, SubmitExtensions), (RejectReason, String)> {
        let session = &self.sessions[index];
        let (submit, extensions) = codec::decode::<Submit<'_>>(metadata, &[tag::LEASE])
            .map_err(|error| (RejectReason::Invalid, error.to_string()))?;
        // Consecutive jobs are usually for the same bulkhead.
        let is_again = |index: &BulkheadIndex| {
            let entry = self.bulkheads.get(*index);
            entry.is_some_and(|entry| *entry.name == *submit.bulkhead && entry.presence == Presence::Here)
        };
        let again = session.frame_for.filter(is_again);
        let found = again.or_else(|| self.bulkheads.by_name.get(submit.bulkhead).copied());
        if let Grant::Entries(entries) = &session.grant
            && let Some(message) = access::refusal(entries, (submit.bulkhead, found.is_some()), submit.tenant)
        {
            return Err((RejectReason::Forbidden, message));
        }
        let Some(bulkhead) = found else {
            let name = bulkhead_shared::limits::cut(submit.bulkhead, 64);
            return Err((RejectReason::NotFound, format!("there is no bulkhead '{}'", name.escape_debug())));
        };
        let invalid = |message: String| Err((RejectReason::Invalid, message));
        if submit.operation.len() > OPERATION_BYTES_MAX {
            return invalid(format!("the operation's name is longer than {OPERATION_BYTES_MAX} bytes"));
        }
        if submit.tenant.len() > TENANT_BYTES_MAX {
            return invalid(format!("the tenant's name is longer than {TENANT_BYTES_MAX} bytes"));
        }
        if submit.operation.contains('\0') || submit.tenant.contains('\0') {
            return invalid("the names of operation and tenant must not hold a NUL byte".into());
        }
        if Priority::from_code(submit.priority).is_none() {
            return invalid(format!("there is no priority {}", submit.priority));
        }
        let run_limit = extensions.get(tag::RUN_LIMIT).map(read_run_limit);
        if run_limit == Some(None) {
            return invalid("the run limit must be 8 bytes that count microseconds, at least 1".into());
        }
        let mut size = header.payload_length() as u64;
        let leased = match extensions.get(tag::LEASE).map(Named::from_bytes) {
            None => None,
            Some(named) => {
                let id = SessionId { index, epoch: session.epoch };
                let checked = self.check_leased(id, &submit, (named, header.payload_length()));
                let named = checked?;
                size = named.bytes;
                Some(named)
            }
        };
        let most = self.bulkheads[bulkhead].max_payload;
        if size > most {
            return Err((RejectReason::TooLarge, format!("{size} bytes of payload; max_payload is {most}")));
        }
        // Part of the frame may be held already.
        let more = (size as usize + memory::JOB_BYTES).saturating_sub(session.counted_frame.bytes);
        if !self.can_hold(session.holder, Some(bulkhead), more) {
            return Err(self.memory_full_rejection());
        }
        let extras = SubmitExtensions {
            traceparent: traceparent(&extensions),
            run_limit: run_limit.flatten(),
            leased,
        };
        Ok((bulkhead, submit, extras))
    }

    /// Rejects a submission that has not reached policy.
    pub(super) fn reject_submission(
        &mut self,
        index: SessionIndex,
        header: Header,
        metadata: &[u8],
        reason: RejectReason,
        message: &str,
    ) {
        let decoded = codec::decode::<Submit<'_>>(metadata, &[tag::LEASE]).ok();
        let name = decoded.as_ref().map_or("", |(submit, _)| submit.bulkhead);
        if let Some((submit, _)) = &decoded
            && let Some(&bulkhead) = self.bulkheads.by_name.get(name)
        {
            let priority = Priority::from_code(submit.priority).unwrap_or_default();
            // A client without permission for a tenant must not change the tenant's counts.
            let is_forbidden = reason == RejectReason::Forbidden;
            let tenant = if is_forbidden { "" } else { submit.tenant };
            self.count_refused(bulkhead, (priority, self.label_of(tenant)), reason);
        }
        let session = self.sessions.get_mut(index);
        let peer = session.and_then(|session| {
            session.queue_state.count_rejection();
            session.peer
        });
        if let (RejectReason::Forbidden, Some(peer)) = (reason, peer) {
            self.report_rejection(SocketKind::Jobs, Refusal::forbidden(peer, message.to_owned()));
        }
        let verdict = Verdict::Rejected { reason, message: message.to_owned() };
        let retry_after = reason.is_retryable().then_some(Duration::from_secs(1));
        let name = bulkhead_shared::limits::cut(name, 64);
        let span = decoded.and_then(|(submit, extensions)| {
            self.send_rejected_span(&submit, traceparent(&extensions), header.payload_length(), &verdict)
        });
        let message = OutcomeMessage {
            retryable: verdict.is_retryable(false).into(),
            ..OutcomeMessage::of_verdict(&verdict, name)
        };
        let message = message.with_times(Duration::ZERO, Duration::ZERO, Duration::ZERO, retry_after);
        let about = OutcomeExtensions { span, ..OutcomeExtensions::default() };
        self.send_outcome(index, header.number, &message, about, Payload::NONE);
    }

    pub(super) fn cancel_request(&mut self, index: SessionIndex, number: u64, unless_begun: bool) {
        let request = self.sessions.get(index).and_then(|s| s.requests.get(&number).copied());
        if let Some((compartment, job)) = request {
            self.apply(compartment, Event::Cancel { job, unless_begun }, Incoming::None);
        } else if let Some(session) = self.sessions.get_mut(index) {
            session.queue_state.count_rejection();
        }
    }
}
