//! Creates problem documents with the fields of an outcome: for jobs that did not end as `ok`, and for requests that
//! are rejected before they become jobs. `jobs` runs the jobs, and the data plane decides their outcomes. `http`,
//! `connections` and `waiting` report requests that no handler received.

use std::time::Duration;

use axum::body::to_bytes;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bulkhead_api::{JobOutcome, Problem};
use bulkhead_plane::counters::{RejectedJob, SharedCounters};
use bulkhead_shared::limits::{BULKHEAD_NAME_BYTES_MAX, truncate};
use bulkhead_shared::trace::Traceparent;
use bulkhead_shared::{CrashReason, Outcome, Priority, RejectReason, Verdict};
use serde_json::{Map, Value, json};

use super::responses::{BODY_BYTES_MAX, EXECUTED, PROBLEM, RETRYABLE, document, is_retryable, problem};

/// Response header with the name of a job's outcome. Present in each response that contains an outcome.
pub(super) const OUTCOME: &str = "bulkhead-outcome";

/// Returns the fields of an outcome as JSON, including the payload of a failed job.
pub(super) fn fields(outcome: &Outcome, payload: Vec<u8>) -> Map<String, Value> {
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
pub(super) fn headers(fields: &Map<String, Value>) -> HeaderMap {
    let names = [
        (OUTCOME, "outcome"),
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
    let (headers, body) = outcome_document(status, outcome, payload, traceparent);
    (status, headers, body).into_response()
}

/// Returns the headers and the body of a problem document with the fields of an outcome.
fn outcome_document(
    status: StatusCode,
    outcome: &Outcome,
    payload: Vec<u8>,
    traceparent: Option<Traceparent>,
) -> (HeaderMap, String) {
    let mut fields = fields(outcome, payload);
    if outcome.bulkhead.is_empty() {
        // The request names no bulkhead, so the deadline is also unknown.
        fields.remove("bulkhead");
        fields.remove("deadline_ms");
    }
    let mut headers = headers(&fields);
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(PROBLEM));
    if let Some(wait) = outcome.retry_after {
        let seconds = wait.as_nanos().div_ceil(1_000_000_000).max(1) as u64;
        headers.insert(header::RETRY_AFTER, seconds.into());
    }
    // The outcome's `status` field is removed, because problem documents use a field of this name for the HTTP status.
    fields.remove("status");
    fields.extend(traceparent.map(|trace| ("trace_id".to_owned(), json!(trace.trace_id()))));
    let detail = outcome.verdict.message().map_or_else(|| outcome.to_string(), str::to_owned);
    (headers, document(status, &detail, fields))
}

/// Returns the name of the bulkhead in a job request, or `None` for any other request.
pub(super) fn bulkhead_of(request: &Request) -> Option<&str> {
    let path = request.uri().path();
    let name = path.strip_prefix("/v1/bulkheads/").and_then(|rest| rest.strip_suffix("/jobs"));
    name.filter(|name| request.method() == Method::POST && !name.contains('/'))
}

/// Returns the response to a request that is rejected before its handler runs. The response to a job request contains
/// the fields of an outcome.
pub(super) fn reject_request(request: &Request, reason: RejectReason, message: &str) -> Response {
    match bulkhead_of(request) {
        Some(name) => rejected(name, None, reason, message.to_owned()),
        None if reason == RejectReason::Unauthenticated => problem(StatusCode::UNAUTHORIZED, message),
        None => problem(StatusCode::FORBIDDEN, message),
    }
}

/// Adds the fields of an outcome to an error that occurred before the request became a job. `bulkhead` is the bulkhead
/// that the request names. Counts the job in `counters`, which is `None` if the client has no access to the bulkhead.
pub(super) async fn reject_early(
    error: Response,
    bulkhead: Option<&str>,
    counters: Option<&SharedCounters>,
) -> Response {
    let (mut parts, body) = error.into_parts();
    let body = to_bytes(body, BODY_BYTES_MAX).await.unwrap_or_default();
    let is_problem = parts.headers.get(header::CONTENT_TYPE).is_some_and(|kind| kind == PROBLEM);
    let detail = match serde_json::from_slice::<Problem>(&body) {
        Ok(document) if is_problem => document.detail,
        _ => String::from_utf8_lossy(&body).into_owned(),
    };
    let reason = early_reason(parts.status);
    if let (Some(bulkhead), Some(counters)) = (bulkhead, counters) {
        let (tenant, priority) = (String::new(), Priority::default());
        counters.rejected_jobs.count(RejectedJob { bulkhead: bulkhead.to_owned(), tenant, priority, reason });
    }
    let outcome = rejection(bulkhead.unwrap_or_default(), None, reason, detail);
    let (headers, body) = outcome_document(parts.status, &outcome, Vec::new(), None);
    // Keeps the other headers of the error, such as `Allow`.
    parts.headers.remove(header::CONTENT_LENGTH);
    parts.headers.extend(headers);
    (parts.status, parts.headers, body).into_response()
}

/// Returns a complete HTTP response for a request that does not reach the router. The response says that no job began,
/// and closes the connection.
pub(super) fn raw(status: StatusCode, detail: &str) -> Vec<u8> {
    let outcome = rejection("", None, early_reason(status), detail.to_owned());
    let (headers, body) = outcome_document(status, &outcome, Vec::new(), None);
    let length = body.len();
    let head = format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\nconnection: close\r\n");
    let mut response = head.into_bytes();
    for (name, value) in &headers {
        response.extend([name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"].concat());
    }
    response.extend(b"x-content-type-options: nosniff\r\n\r\n");
    response.extend(body.into_bytes());
    response
}

/// Returns the reason that corresponds to the status of an error that occurred before the request became a job.
fn early_reason(status: StatusCode) -> RejectReason {
    match status {
        StatusCode::UNAUTHORIZED => RejectReason::Unauthenticated,
        StatusCode::FORBIDDEN => RejectReason::Forbidden,
        StatusCode::NOT_FOUND => RejectReason::NotFound,
        StatusCode::PAYLOAD_TOO_LARGE => RejectReason::TooLarge,
        _ if is_retryable(status) => RejectReason::Overloaded,
        _ => RejectReason::Invalid,
    }
}

/// Returns the response for a job that was rejected without involving the data plane. `deadline` is the job's deadline,
/// or `None` if the deadline is unknown.
pub(super) fn rejected(
    name: &str,
    deadline: Option<Duration>,
    reason: RejectReason,
    message: String,
) -> Response {
    outcome_problem(None, &rejection(name, deadline, reason, message), Vec::new(), None)
}

fn rejection(name: &str, deadline: Option<Duration>, reason: RejectReason, message: String) -> Outcome {
    let retry_after = reason.is_retryable().then_some(Duration::from_secs(1));
    local_outcome(name, deadline, Verdict::Rejected { reason, message }, retry_after)
}

/// Returns an outcome created by the control plane itself.
pub(super) fn local_outcome(
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
