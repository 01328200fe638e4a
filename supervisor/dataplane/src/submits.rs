//! Jobs from clients: checks before policy gets a job, and rejections.

use std::time::Duration;

use bulkhead_plane::access::{self, Grant};
use bulkhead_plane::peer_check::{ClientRejection, SocketKind};
use bulkhead_policy::{Event, Submission};
use bulkhead_shared::client_protocol::{OutcomeMessage, Submit, decode_run_limit};
use bulkhead_shared::codec::{self, Extensions, tag};
use bulkhead_shared::connection::Payload;
use bulkhead_shared::frame::Header;
use bulkhead_shared::limits::{INLINE_PAYLOAD_BYTES_MAX, OPERATION_BYTES_MAX, TENANT_BYTES_MAX};
use bulkhead_shared::memory_files::LeaseRef;
use bulkhead_shared::trace::Traceparent;
use bulkhead_shared::{Priority, RejectReason, Verdict};

use super::bulkheads::Presence;
use super::fallback::FallbackState;
use super::outcomes::About;
use super::sessions::{Breach, Stage};
use super::slab::{BulkheadIndex, SessionId, SessionIndex};
use super::{Charge, DataPlane, Held, Incoming, JobData, memory};

/// Maximum number of unfinished jobs per client.
const REQUESTS_MAX: usize = 1 << 20;

/// Extensions of a submission.
#[derive(Clone, Copy, Default)]
pub(super) struct Extras {
    pub(super) traceparent: Option<Traceparent>,
    pub(super) run_limit: Option<Duration>,
    /// Location of a payload in a memory file.
    pub(super) leased: Option<LeaseRef>,
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
    ) -> Result<(), Breach> {
        self.check_number(index, header.number)?;
        let session = &self.sessions[index];
        let id = SessionId { index, epoch: session.epoch };
        let has_room = session.requests.len() < REQUESTS_MAX;
        let (bulkhead, submit, extras) = match self.check_submit(index, header, metadata) {
            Ok(_) if !has_room => {
                let message = format!("this client already has {REQUESTS_MAX} unfinished jobs");
                self.reject_frame(index, header, metadata, RejectReason::Overloaded, &message);
                return Ok(());
            }
            Ok(checked) => checked,
            Err((reason, message)) => {
                self.reject_frame(index, header, metadata, reason, &message);
                return Ok(());
            }
        };
        let mut file = extras.leased.and_then(|named| self.use_lease(named));
        let preferred_worker = extras.leased.and_then(|named| self.user_of(named.lease));
        let payload_bytes = file.as_ref().map_or(payload.len(), |file| file.bytes);
        let (priority, idempotent) =
            (Priority::from_code(submit.priority).unwrap_or_default(), submit.idempotent != 0);
        let compartment = self.compartment_for(bulkhead, submit.tenant);
        let tenant = self.compartments[compartment].policy.tenant(submit.tenant);
        let label = self.compartments[compartment].policy.label(tenant) as u32;
        let entry = &mut self.bulkheads[bulkhead];
        entry.counters.count_submitted(priority);
        let has_chain = !entry.fallback.is_empty();
        let keeps = idempotent && (entry.retries || has_chain);
        file.iter_mut().for_each(|file| file.is_kept = keeps);
        let is_resendable = keeps || payload.len() <= INLINE_PAYLOAD_BYTES_MAX;
        let digest = if file.is_none() { entry.digest(submit.operation, payload.bytes()) } else { None };
        let deadline = (submit.deadline_us > 0).then(|| Duration::from_micros(submit.deadline_us));
        let fallback = has_chain.then(|| {
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
                before: None,
            })
        });
        let trace = self.trace(extras.traceparent);
        let submission = Submission {
            sequence: self.compartments.next_job(),
            record: self.buffers.record(JobData {
                session: id,
                request: header.number,
                operation: submit.operation.into(),
                tenant: submit.tenant.into(),
                trace,
                payload_bytes,
                priority,
                label,
                held: Held { is_resendable, file, ..Held::default() },
                given: super::unread::Given::default(),
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
            bytes: super::ahead::link_bytes(payload_bytes + submit.operation.len() + submit.tenant.len()),
            is_resendable,
            digest,
            is_fallback: false,
            preferred_worker,
        };
        let job = self.enter(compartment, submission, payload);
        if let Some(job) = job {
            self.sessions.remember_request(id, header.number, compartment, job);
            if let Some(session) = self.sessions.get_mut(index) {
                session.standing.take_job();
                session.frame_for = Some(bulkhead);
            }
        }
        Ok(())
    }

    /// Returns true if the client of a job is still connected.
    pub(super) fn is_awaited(&self, record: &JobData) -> bool {
        self.sessions.of(record.session).is_some_and(|session| session.stage == Stage::Open)
    }

    /// Rejects a request number that is in use, because a number must not get two outcomes.
    pub(super) fn check_number(&self, index: SessionIndex, number: u64) -> Result<(), Breach> {
        match self.sessions.get(index) {
            Some(session) if session.requests.contains_key(&number) => {
                let message = format!("the request number {number} is in use already");
                Err(Breach(RejectReason::Invalid, message))
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
    ) -> Result<(BulkheadIndex, Submit<'m>, Extras), (RejectReason, String)> {
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
        if let Grant::Rules(rules) = &session.grant
            && let Some(message) =
                access::rejection_message(rules, (submit.bulkhead, found.is_some()), submit.tenant)
        {
            return Err((RejectReason::Forbidden, message));
        }
        let Some(bulkhead) = found else {
            let name = bulkhead_shared::limits::truncate(submit.bulkhead, 64);
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
        let run_limit = extensions.get(tag::RUN_LIMIT).map(decode_run_limit);
        if run_limit == Some(None) {
            return invalid("the run limit must be 8 bytes that count microseconds, at least 1".into());
        }
        let mut size = header.payload_length() as u64;
        let leased = match extensions.get(tag::LEASE).map(LeaseRef::from_bytes) {
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
            return Err((
                RejectReason::TooLarge,
                format!("a payload of {size} bytes; max_payload is {most}"),
            ));
        }
        // Part of the frame may be held already.
        let more = (size as usize + memory::JOB_BYTES).saturating_sub(session.counted_held.bytes);
        if !self.may_hold(session.holder, Some(bulkhead), more) {
            return Err(self.memory_full());
        }
        let extras = Extras { traceparent: traceparent(&extensions), run_limit: run_limit.flatten(), leased };
        Ok((bulkhead, submit, extras))
    }

    /// Rejects a submission that has not reached policy.
    pub(super) fn reject_frame(
        &mut self,
        index: SessionIndex,
        header: Header,
        metadata: &[u8],
        reason: RejectReason,
        message: &str,
    ) {
        let told = codec::decode::<Submit<'_>>(metadata, &[tag::LEASE]).ok();
        let name = told.as_ref().map_or("", |(submit, _)| submit.bulkhead);
        if let Some((submit, _)) = &told
            && let Some(&bulkhead) = self.bulkheads.by_name.get(name)
        {
            let priority = Priority::from_code(submit.priority).unwrap_or_default();
            // A client without permission for a tenant must not change the tenant's counts.
            let is_forbidden = reason == RejectReason::Forbidden;
            let tenant = if is_forbidden { "" } else { submit.tenant };
            self.count_rejected(bulkhead, (priority, self.label_of(tenant)), reason);
        }
        let session = self.sessions.get_mut(index);
        let peer = session.and_then(|session| {
            session.standing.refuse();
            session.peer
        });
        if let (RejectReason::Forbidden, Some(peer)) = (reason, peer) {
            self.note_refusal(SocketKind::Jobs, ClientRejection::forbidden(peer, message.to_owned()));
        }
        let verdict = Verdict::Rejected { reason, message: message.to_owned() };
        let retry_after = reason.is_retryable().then_some(Duration::from_secs(1));
        let name = bulkhead_shared::limits::truncate(name, 64);
        let span = told.and_then(|(submit, extensions)| {
            self.span_of_refused(&submit, traceparent(&extensions), header.payload_length(), &verdict)
        });
        let message = OutcomeMessage {
            retryable: verdict.is_retryable(false).into(),
            ..OutcomeMessage::from_verdict(&verdict, name)
        };
        let message = message.with_times(Duration::ZERO, Duration::ZERO, Duration::ZERO, retry_after);
        let about = About { span, ..About::default() };
        self.send_outcome(index, header.number, &message, about, Payload::NONE);
    }

    pub(super) fn cancel_request(&mut self, index: SessionIndex, number: u64, unless_begun: bool) {
        let request = self.sessions.get(index).and_then(|s| s.requests.get(&number).copied());
        if let Some((compartment, job)) = request {
            self.apply(compartment, Event::Cancel { job, unless_begun }, Incoming::None);
        } else if let Some(session) = self.sessions.get_mut(index) {
            session.standing.refuse();
        }
    }
}
