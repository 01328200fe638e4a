//! Creates problem documents and other responses that HTTP handlers share, and parses boolean query parameters.
//! `outcomes` adds the fields of an outcome to them. The handlers decide which response to send.

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use bulkhead_api::Problem;
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value, json};

pub(super) const PROBLEM: &str = "application/problem+json";
pub(super) const JSON: &str = "application/json";

/// Maximum size of a request body and of an error message, in bytes. Does not apply to job payloads.
pub(super) const BODY_BYTES_MAX: usize = 64 * 1024;

/// Response header that says whether the job's handler started.
pub(super) const EXECUTED: &str = "bulkhead-executed";

/// Response header that says whether the same job can be sent again.
pub(super) const RETRYABLE: &str = "bulkhead-retryable";

const RETRY_AFTER: &str = "retry-after";

/// Status code for a request that the client cancelled. Introduced by nginx; not part of any standard.
const CLIENT_CLOSED_REQUEST: u16 = 499;

/// Returns a problem document (RFC 9457).
pub(super) fn problem(status: StatusCode, detail: &str) -> Response {
    problem_with(status, detail, Map::new())
}

/// Returns a problem document (RFC 9457) with additional fields.
pub(super) fn problem_with(status: StatusCode, detail: &str, fields: Map<String, Value>) -> Response {
    (status, [(header::CONTENT_TYPE, PROBLEM)], document(status, detail, fields)).into_response()
}

/// Returns the body of a problem document with additional fields.
pub(super) fn document(status: StatusCode, detail: &str, mut fields: Map<String, Value>) -> String {
    // One second, which is also the default value of the `Retry-After` header in `http::complete`.
    if is_retryable(status) {
        fields.entry("retry_after_ms").or_insert(json!(1000.0));
    }
    let title = match status.as_u16() {
        CLIENT_CLOSED_REQUEST => "Client Closed Request",
        _ => status.canonical_reason().unwrap_or("error"),
    };
    let (detail, status_code) = (detail.to_owned(), status.as_u16());
    let body =
        Problem { detail, status: status_code, title: title.into(), kind: "about:blank".into(), fields };
    json!(body).to_string()
}

/// Returns true if this status tells the client that its request was not processed and can be sent again later.
pub(super) fn is_retryable(status: StatusCode) -> bool {
    matches!(status, StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS)
}

/// Returns the headers that say whether the client can repeat the request, each with the default value. Every response
/// with this status has these headers. A response without an outcome means that no job started.
pub(super) fn retry_headers(
    is_job: bool,
    status: StatusCode,
) -> impl Iterator<Item = (&'static str, &'static str)> {
    let is_retryable = is_retryable(status);
    let is_about_jobs = is_job || is_retryable;
    let all = [
        (is_retryable, RETRY_AFTER, "1"),
        (is_about_jobs, EXECUTED, "no"),
        (is_about_jobs, RETRYABLE, if is_retryable { "true" } else { "false" }),
    ];
    all.into_iter().filter_map(|(is_present, name, value)| is_present.then_some((name, value)))
}

/// Returns the response for a data plane that does not reply in time.
pub(super) fn stuck() -> Response {
    problem(StatusCode::SERVICE_UNAVAILABLE, "the data plane is not responding")
}

pub(super) fn not_found(name: &str) -> Response {
    problem(StatusCode::NOT_FOUND, &format!("there is no bulkhead '{}'", name.escape_debug()))
}

/// Parses a boolean query parameter.
pub(super) fn parse_bool<'de, D: Deserializer<'de>>(value: D) -> Result<Option<bool>, D::Error> {
    let value = String::deserialize(value)?.parse();
    value.map(Some).map_err(|_| serde::de::Error::custom("must be true or false"))
}
