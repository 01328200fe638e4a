//! Decodes submissions and checks their form, and builds the message for a rejected submission. These functions need no
//! state. `wiring::sessions::submissions` calls them, and checks permissions and memory.

use std::time::Duration;

use bulkhead_shared::client_protocol::{OutcomeMessage, Submit, decode_run_limit};
use bulkhead_shared::codec::{self, Extensions, tag};
use bulkhead_shared::limits::{OPERATION_BYTES_MAX, PAYLOAD_BYTES_CEILING, TENANT_BYTES_MAX};
use bulkhead_shared::memory_files::LeaseRef;
use bulkhead_shared::trace::Traceparent;
use bulkhead_shared::{Priority, RejectReason, Verdict};

/// Extensions of a SUBMIT frame.
#[derive(Clone, Copy, Default)]
pub(super) struct SubmitExtensions {
    pub(super) traceparent: Option<Traceparent>,
    pub(super) run_limit: Option<Duration>,
    /// Location of the payload, if the payload is in a memory file.
    pub(super) leased: Option<LeaseRef>,
}

pub(super) fn decode(metadata: &[u8]) -> Result<(Submit<'_>, Extensions<'_>), codec::CodecError> {
    codec::decode::<Submit<'_>>(metadata, &[tag::LEASE])
}

/// Returns the deadline that the client requested, or `None` if the bulkhead's default applies.
pub(super) fn requested_deadline(submit: &Submit<'_>) -> Option<Duration> {
    (submit.deadline_us > 0).then(|| Duration::from_micros(submit.deadline_us))
}

/// Returns the outcome of a submission that was rejected before it became a job. `deadline` is the job's deadline, or
/// `None` if the deadline is unknown.
pub(super) fn rejection<'m>(
    verdict: &'m Verdict,
    bulkhead: &'m str,
    deadline: Option<Duration>,
    retry_after: Option<Duration>,
) -> OutcomeMessage<'m> {
    let is_too_late = retry_after.zip(deadline).is_some_and(|(wait, deadline)| wait > deadline);
    let message = OutcomeMessage {
        retryable: (verdict.is_retryable(false) && !is_too_late).into(),
        ..OutcomeMessage::from_verdict(verdict, bulkhead)
    };
    message.with_times(Duration::ZERO, Duration::ZERO, deadline.unwrap_or_default(), retry_after)
}

/// Returns the message for a payload of `size` bytes that exceeds `max_payload`. A size above the highest `max_payload`
/// only says that the control plane does not send the payload, so the message does not contain it.
pub(super) fn too_large_message(size: u64, max_payload: u64) -> String {
    let of = if size <= PAYLOAD_BYTES_CEILING { format!(" of {size} bytes") } else { String::new() };
    format!("the payload{of} is larger than max_payload ({max_payload} bytes)")
}

/// Returns the trace context. Ignores an invalid context, as the W3C specification requires.
pub(super) fn traceparent(extensions: &Extensions<'_>) -> Option<Traceparent> {
    let text = extensions.get(tag::TRACEPARENT).and_then(|bytes| std::str::from_utf8(bytes).ok())?;
    Traceparent::parse(text)
}

/// Returns the tenant for which a rejected submission is counted, or an empty name if it counts for no tenant. A client
/// without permission must not affect a tenant's counters, and an invalid name must not be stored.
pub(super) fn counted_tenant<'m>(submit: &Submit<'m>, reason: RejectReason) -> &'m str {
    let is_name = submit.tenant.len() <= TENANT_BYTES_MAX && !submit.tenant.contains('\0');
    if is_name && reason != RejectReason::Forbidden { submit.tenant } else { "" }
}

/// Checks that a submission is well-formed. Returns its extensions, or the reason for rejecting the job.
pub(super) fn check_form(
    submit: &Submit<'_>,
    extensions: &Extensions<'_>,
) -> Result<SubmitExtensions, (RejectReason, String)> {
    let invalid = |message: String| Err((RejectReason::Invalid, message));
    if submit.operation.len() > OPERATION_BYTES_MAX {
        return invalid(format!("the operation's name is longer than {OPERATION_BYTES_MAX} bytes"));
    }
    if submit.tenant.len() > TENANT_BYTES_MAX {
        return invalid(format!("the tenant's name is longer than {TENANT_BYTES_MAX} bytes"));
    }
    if submit.operation.contains('\0') || submit.tenant.contains('\0') {
        return invalid("the names of the operation and the tenant must not contain a NUL byte".into());
    }
    if Priority::from_code(submit.priority).is_none() {
        return invalid(format!("unknown priority {}", submit.priority));
    }
    let run_limit = extensions.get(tag::RUN_LIMIT).map(decode_run_limit);
    if run_limit == Some(None) {
        return invalid("the run limit must be at least 1 microsecond, encoded as an 8-byte number".into());
    }
    let leased = match extensions.get(tag::LEASE).map(LeaseRef::from_bytes) {
        Some(None) => return invalid("a lease name must be 16 bytes long".into()),
        leased => leased.flatten(),
    };
    Ok(SubmitExtensions { traceparent: traceparent(extensions), run_limit: run_limit.flatten(), leased })
}

#[cfg(test)]
mod tests {
    use bulkhead_shared::JobOptions;

    use super::*;

    #[test]
    fn forbidden_jobs_and_invalid_names_count_for_no_tenant() {
        let counted = |tenant: &str, reason| {
            let options = JobOptions { tenant: tenant.to_owned(), ..JobOptions::default() };
            counted_tenant(&Submit::new("b", &options), reason).to_owned()
        };
        let longest = "x".repeat(TENANT_BYTES_MAX);
        assert_eq!(counted(&longest, RejectReason::TooLarge), longest);
        assert_eq!(counted("acme", RejectReason::Invalid), "acme");
        assert_eq!(counted("acme", RejectReason::Forbidden), "");
        assert_eq!(counted(&format!("{longest}x"), RejectReason::Invalid), "");
        assert_eq!(counted("acme\0", RejectReason::Invalid), "");
    }
}
