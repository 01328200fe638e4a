//! Helper functions for handlers, which create problem documents and parse boolean query parameters.

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use bulkhead_api::Problem;
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value, json};

pub(super) const PROBLEM: &str = "application/problem+json";
pub(super) const JSON: &str = "application/json";

/// Status code for a request that the client cancelled. Introduced by nginx, and not part of a standard.
const CLIENT_CLOSED_REQUEST: u16 = 499;

/// Returns a problem document (RFC 9457).
pub(super) fn problem(status: StatusCode, detail: &str) -> Response {
    problem_with(status, detail, Map::new())
}

/// Returns a problem document (RFC 9457) with additional fields.
pub(super) fn problem_with(status: StatusCode, detail: &str, mut fields: Map<String, Value>) -> Response {
    // One second, which is also the default value of the `Retry-After` header in `http::complete`.
    if matches!(status, StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS) {
        fields.entry("retry_after_ms").or_insert(json!(1000.0));
    }
    let title = match status.as_u16() {
        CLIENT_CLOSED_REQUEST => "Client Closed Request",
        _ => status.canonical_reason().unwrap_or("error"),
    };
    let (detail, status_code) = (detail.to_owned(), status.as_u16());
    let body =
        Problem { detail, status: status_code, title: title.into(), kind: "about:blank".into(), fields };
    (status, [(header::CONTENT_TYPE, PROBLEM)], json!(body).to_string()).into_response()
}

pub(super) fn stuck() -> Response {
    problem(StatusCode::SERVICE_UNAVAILABLE, "the data plane does not respond")
}

pub(super) fn not_found(name: &str) -> Response {
    problem(StatusCode::NOT_FOUND, &format!("there is no bulkhead '{}'", name.escape_debug()))
}

/// Parses a boolean query parameter. `?follow`, `?follow=true` and `?follow=1` all mean true.
pub(super) fn switch<'de, D: Deserializer<'de>>(value: D) -> Result<Option<bool>, D::Error> {
    match String::deserialize(value)?.as_str() {
        "" | "1" | "true" => Ok(Some(true)),
        "0" | "false" => Ok(Some(false)),
        _ => Err(serde::de::Error::custom("must be true or false")),
    }
}
