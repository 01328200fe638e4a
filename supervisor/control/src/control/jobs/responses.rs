//! Creates the HTTP responses to job requests. A result becomes the body, and any other outcome becomes a problem
//! document. `jobs` runs the jobs, and the data plane decides their outcomes. This module creates an outcome only if
//! the data plane has returned none.

use std::io;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bulkhead_api::JobOutcome;
use bulkhead_shared::limits::{BULKHEAD_NAME_BYTES_MAX, truncate};
use bulkhead_shared::trace::Traceparent;
use bulkhead_shared::{CrashReason, Outcome, RejectReason, Verdict};
use futures_util::stream::{self, Stream};
use serde_json::{Map, Value, json};
use tokio::io::AsyncReadExt;

use super::session::{Session, SessionSlot};
use super::{Failure, UPLOAD_TIMEOUT};
use crate::control::responses::{EXECUTED, RETRYABLE, problem, problem_with};

/// Maximum size of the chunks in which a result is sent to the client, in bytes.
const CHUNK_BYTES: usize = 64 * 1024;

/// Returns the fields of an outcome as JSON, including the payload of a failed job.
fn fields(outcome: &Outcome, payload: Vec<u8>) -> Map<String, Value> {
    let signal = match &outcome.verdict {
        Verdict::Crashed { reason: CrashReason::Signal, status, .. } => {
            status.map(bulkhead_linux::signals::name)
        }
        _ => None,
    };
    let payload = (!payload.is_empty()).then_some(payload);
    match json!(JobOutcome { signal, payload, ..JobOutcome::new(outcome) }) {
        Value::Object(fields) => fields,
        _ => unreachable!("structs serialize to objects"),
    }
}

/// Returns the response headers for an outcome. Only some fields of an outcome have a corresponding header.
fn headers(fields: &Map<String, Value>) -> HeaderMap {
    let names = [
        ("bulkhead-outcome", "outcome"),
        (EXECUTED, "executed"),
        (RETRYABLE, "retryable"),
        ("bulkhead-reason", "reason"),
        ("bulkhead-job", "job"),
        ("bulkhead-served-by", "bulkhead"),
        ("bulkhead-attempts", "attempts"),
        ("bulkhead-queued-ms", "queued_ms"),
        ("bulkhead-ran-ms", "ran_ms"),
        ("bulkhead-deadline-ms", "deadline_ms"),
        ("bulkhead-run-limit-ms", "run_limit_ms"),
        ("bulkhead-worker-pid", "worker_pid"),
        ("bulkhead-status", "status"),
        ("bulkhead-report", "report"),
    ];
    let value = |field: &str| match fields.get(field)? {
        Value::Null => None,
        // A code from a handler can contain characters that are invalid in a header.
        Value::String(text) => HeaderValue::from_str(text)
            .or_else(|_| HeaderValue::from_str(&text.escape_default().to_string()))
            .ok(),
        other => HeaderValue::from_str(&other.to_string()).ok(),
    };
    names
        .into_iter()
        .filter_map(|(name, field)| Some((HeaderName::from_static(name), value(field)?)))
        .collect()
}

/// Returns the response to a job whose outcome is `ok`. The body is read from the session.
pub(super) async fn result(
    outcome: &Outcome,
    bytes: u64,
    mut session: Session,
    slot: Option<SessionSlot>,
) -> Result<Response, Failure> {
    let body = if bytes <= CHUNK_BYTES as u64 {
        let mut result = Vec::with_capacity(bytes as usize);
        let count = (&mut session.reader).take(bytes).read_to_end(&mut result).await;
        if count.map_err(|_| Failure::Dropped)? as u64 != bytes {
            return Err(Failure::Dropped);
        }
        if let Some(slot) = slot {
            slot.put(session);
        }
        Body::from(result)
    } else {
        Body::from_stream(chunks(session, slot, bytes))
    };
    let mut response = body.into_response();
    response.headers_mut().extend(headers(&fields(outcome, Vec::new())));
    let kind = HeaderValue::from_static("application/octet-stream");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response.headers_mut().insert(header::CONTENT_LENGTH, bytes.into());
    Ok(response)
}

/// Reads a result in chunks. Once the last chunk has been read, the session can be used for another job.
fn chunks(
    session: Session,
    slot: Option<SessionSlot>,
    bytes: u64,
) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
    stream::unfold((Some((session, slot)), bytes), async |(session, left)| {
        let (mut session, slot) = session?;
        let mut chunk = Vec::with_capacity(CHUNK_BYTES.min(usize::try_from(left).unwrap_or(CHUNK_BYTES)));
        match (&mut session.reader).take(left).read_buf(&mut chunk).await {
            Ok(0) => Some((Err(io::Error::from(io::ErrorKind::UnexpectedEof)), (None, 0))),
            Err(error) => Some((Err(error), (None, 0))),
            Ok(count) => {
                let left = left - count as u64;
                let mut rest = Some((session, slot));
                // The body might not be polled again after the last byte.
                if left == 0
                    && let Some((session, Some(slot))) = rest.take()
                {
                    slot.put(session);
                }
                Some((Ok(Bytes::from(chunk)), (rest, left)))
            }
        }
    })
}

/// Returns a problem document with the fields of an outcome. The HTTP status is `status` or, if that is `None`, the
/// status that corresponds to the verdict.
pub(super) fn outcome_problem(
    status: Option<StatusCode>,
    outcome: &Outcome,
    payload: Vec<u8>,
    traceparent: Option<Traceparent>,
) -> Response {
    // The conversion can fail in principle, because statuses such as 499 are not standard.
    let status = status.or_else(|| StatusCode::from_u16(outcome.verdict.http_status()).ok());
    let status = status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut fields = fields(outcome, payload);
    let outcome_headers = headers(&fields);
    // The outcome's `status` field is removed, because problem documents use a field of this name for the HTTP status.
    fields.remove("status");
    fields.extend(traceparent.map(|trace| ("trace_id".to_owned(), json!(trace.trace_id()))));
    let detail = outcome.verdict.message().map_or_else(|| outcome.to_string(), str::to_owned);
    let mut response = problem_with(status, &detail, fields);
    response.headers_mut().extend(outcome_headers);
    if let Some(wait) = outcome.retry_after {
        let seconds = wait.as_nanos().div_ceil(1_000_000_000).max(1) as u64;
        response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
    }
    response
}

/// Returns the name of the bulkhead in a job request, or `None` for any other request.
pub(in crate::control) fn bulkhead_of(request: &Request) -> Option<&str> {
    let path = request.uri().path();
    let name = path.strip_prefix("/v1/bulkheads/").and_then(|rest| rest.strip_suffix("/jobs"));
    name.filter(|name| request.method() == Method::POST && !name.contains('/'))
}

/// Returns the response to a request that is rejected before its handler runs. The response to a job request contains
/// the fields of an outcome.
pub(in crate::control) fn reject_request(request: &Request, reason: RejectReason, message: &str) -> Response {
    match bulkhead_of(request) {
        Some(name) => rejected(name, None, reason, message.to_owned()),
        None if reason == RejectReason::Unauthenticated => problem(StatusCode::UNAUTHORIZED, message),
        None => problem(StatusCode::FORBIDDEN, message),
    }
}

/// Returns the response for a job that was rejected without involving the data plane. `deadline` is the job's deadline,
/// or `None` if the deadline is unknown.
pub(in crate::control) fn rejected(
    name: &str,
    deadline: Option<Duration>,
    reason: RejectReason,
    message: String,
) -> Response {
    let retry_after = reason.is_retryable().then_some(Duration::from_secs(1));
    local_outcome_response(name, deadline, Verdict::Rejected { reason, message }, retry_after)
}

/// Returns a response with HTTP status 408 for a job whose payload did not arrive in time.
pub(super) fn upload_timed_out(name: &str, deadline: Option<Duration>) -> Response {
    let message = format!("the payload did not arrive within {} s", UPLOAD_TIMEOUT.as_secs());
    let verdict = Verdict::Rejected { reason: RejectReason::Invalid, message };
    let outcome = local_outcome(name, deadline, verdict, None);
    outcome_problem(Some(StatusCode::REQUEST_TIMEOUT), &outcome, Vec::new(), None)
}

/// Returns the response for a job whose connection was closed by the data plane before it sent an outcome. The data
/// plane does this if it shuts down or has no memory for the result.
pub(super) fn dropped(name: &str, deadline: Option<Duration>, is_idempotent: bool) -> Response {
    let message = "the supervisor is stopping or out of memory; the job may have run".into();
    let verdict = Verdict::Crashed { reason: CrashReason::Stopped, status: None, message };
    let retryable = verdict.is_retryable(is_idempotent);
    let outcome = Outcome { retryable, ..local_outcome(name, deadline, verdict, None) };
    outcome_problem(None, &outcome, Vec::new(), None)
}

/// Returns a response with an outcome created by the control plane itself.
fn local_outcome_response(
    name: &str,
    deadline: Option<Duration>,
    verdict: Verdict,
    retry_after: Option<Duration>,
) -> Response {
    outcome_problem(None, &local_outcome(name, deadline, verdict, retry_after), Vec::new(), None)
}

fn local_outcome(
    name: &str,
    deadline: Option<Duration>,
    verdict: Verdict,
    retry_after: Option<Duration>,
) -> Outcome {
    let is_too_late = retry_after.zip(deadline).is_some_and(|(wait, deadline)| wait > deadline);
    Outcome {
        job: None,
        bulkhead: truncate(name, BULKHEAD_NAME_BYTES_MAX).to_owned(),
        attempts: 0,
        queued: Duration::ZERO,
        ran: Duration::ZERO,
        worker_pid: None,
        retryable: verdict.is_retryable(false) && !is_too_late,
        retry_after,
        deadline: deadline.unwrap_or_default(),
        run_limit: None,
        status: None,
        report: None,
        verdict,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idempotent_job_without_an_outcome_is_retryable() {
        for (is_idempotent, retryable) in [(false, "false"), (true, "true")] {
            let response = dropped("b", None, is_idempotent);
            assert_eq!(response.headers()["bulkhead-retryable"], retryable);
        }
    }
}
