//! Router and middleware that the Unix socket and TCP share: admission of requests, time limits, and common
//! response headers.

use std::pin::pin;

use axum::Router;
use axum::extract::connect_info::ConnectInfo;
use axum::extract::{DefaultBodyLimit, Request};
use axum::http::{HeaderValue, StatusCode, Version, header};
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use bulkhead_shared::RejectReason;

use super::connections::{Admission, REQUEST_TIMEOUT};
use super::responses::{JSON, PROBLEM, problem};
use super::{Shared, cross_site, jobs, routes};

/// Maximum size of a request body in bytes. Does not apply to payloads of jobs.
const BODY_BYTES_MAX: usize = 64 * 1024;

/// Builds the router that the Unix socket and TCP share.
pub(super) fn router(control: Shared) -> Router {
    routes::router()
        .fallback(async || problem(StatusCode::NOT_FOUND, "this path does not exist"))
        .method_not_allowed_fallback(async || {
            problem(StatusCode::METHOD_NOT_ALLOWED, "this path does not support this method")
        })
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .layer(from_fn(admit))
        .layer(from_fn(complete))
        .with_state(control)
}

async fn admit(ConnectInfo(admission): ConnectInfo<Admission>, request: Request, next: Next) -> Response {
    if let Some(why) = admission.rejection {
        return jobs::reject_request(&request, RejectReason::Forbidden, &why);
    }
    // The check also applies to the Unix socket, because an operator may forward the socket to a port for a
    // browser.
    if let Some(rejection) = cross_site::rejection(&request) {
        return rejection;
    }
    let mut response = pin!(next.run(request));
    match tokio::time::timeout(REQUEST_TIMEOUT, &mut response).await {
        Ok(response) => response,
        Err(_) if admission.has_no_time_limit() => response.await,
        // For a client that was sent `100 Continue`, this is the only time limit.
        Err(_) => problem(StatusCode::REQUEST_TIMEOUT, "the complete request was not received in time"),
    }
}

/// Completes each response. Errors that the router itself returns, such as those for an invalid query, are
/// converted to problem documents. Retryable errors get a `Retry-After` header.
pub(super) async fn complete(request: Request, next: Next) -> Response {
    let version = request.version();
    let mut response = next.run(request).await;
    let status = response.status();
    let is_plain =
        response.headers().get(header::CONTENT_TYPE).is_none_or(|kind| kind != PROBLEM && kind != JSON);
    if is_plain && (status.is_client_error() || status.is_server_error()) {
        let body = axum::body::to_bytes(response.into_body(), BODY_BYTES_MAX).await.unwrap_or_default();
        response = problem(status, &String::from_utf8_lossy(&body));
    }
    let headers = response.headers_mut();
    // Connections are not kept alive, because an idle connection would hold a permit.
    headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    // Browsers must not interpret results or output as a page or script, because workers can put anything
    // into them.
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.entry(header::CONTENT_SECURITY_POLICY).or_insert(HeaderValue::from_static(INERT));
    if matches!(status, StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS) {
        response.headers_mut().entry(header::RETRY_AFTER).or_insert(HeaderValue::from_static("1"));
    }
    if version == Version::HTTP_10 {
        // If the response had version 1.1, hyper would add `keep-alive` to the `Connection` header for
        // clients that ask for it.
        *response.version_mut() = version;
    }
    response
}

/// Content security policy of all responses except for the dashboard.
const INERT: &str = "default-src 'none'; frame-ancestors 'none'";
