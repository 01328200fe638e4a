//! What is the same for all of HTTP: which requests are let in, for how long, and what every answer says.

use std::pin::pin;

use axum::Router;
use axum::extract::connect_info::ConnectInfo;
use axum::extract::{DefaultBodyLimit, Request};
use axum::http::{HeaderValue, StatusCode, Version, header};
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use bulkhead_shared::RejectReason;

use super::answers::{JSON, PROBLEM, problem};
use super::connections::{ANSWERED_WITHIN, Entry};
use super::{Shared, browser, jobs, routes};

/// Bytes of a request's body, but for payloads.
const BODY_BYTES_MAX: usize = 64 * 1024;

/// What is the same on all sockets.
pub(super) fn router(control: Shared) -> Router {
    routes::router()
        .fallback(async || problem(StatusCode::NOT_FOUND, "there is nothing at this path"))
        .method_not_allowed_fallback(async || {
            problem(StatusCode::METHOD_NOT_ALLOWED, "this path does not take this method")
        })
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .layer(from_fn(let_in))
        .layer(from_fn(complete))
        .with_state(control)
}

async fn let_in(ConnectInfo(entry): ConnectInfo<Entry>, request: Request, next: Next) -> Response {
    if let Some(why) = entry.refusal {
        return jobs::turned_away(&request, RejectReason::Forbidden, &why);
    }
    // Also on the Unix socket: an operator may have made it a port for a browser.
    if let Some(refusal) = browser::refuse(&request) {
        return refusal;
    }
    let mut answer = pin!(next.run(request));
    match tokio::time::timeout(ANSWERED_WITHIN, &mut answer).await {
        Ok(answer) => answer,
        Err(_) if entry.is_patient() => answer.await,
        // A client that waits for `100 Continue` has had it, so that nothing else looks at the time any more.
        Err(_) => problem(StatusCode::REQUEST_TIMEOUT, "the request did not come whole in time"),
    }
}

/// What the router's own parts refuse, such as a query that makes no sense, is told like everything else;
/// and a client that is put off hears until when.
pub(super) async fn complete(request: Request, next: Next) -> Response {
    let version = request.version();
    let mut response = next.run(request).await;
    let status = response.status();
    let is_plain =
        response.headers().get(header::CONTENT_TYPE).is_none_or(|kind| kind != PROBLEM && kind != JSON);
    if is_plain && (status.is_client_error() || status.is_server_error()) {
        let said = axum::body::to_bytes(response.into_body(), BODY_BYTES_MAX).await.unwrap_or_default();
        response = problem(status, &String::from_utf8_lossy(&said));
    }
    let headers = response.headers_mut();
    // A place is not to be held by a client that may ask again some day.
    headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    // Workers' output and results are theirs: no browser is to make a page or a script of them.
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.entry(header::CONTENT_SECURITY_POLICY).or_insert(HeaderValue::from_static(INERT));
    if matches!(status, StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS) {
        response.headers_mut().entry(header::RETRY_AFTER).or_insert(HeaderValue::from_static("1"));
    }
    if version == Version::HTTP_10 {
        // Otherwise a `keep-alive` is added to our `close` for clients that ask for one.
        *response.version_mut() = version;
    }
    response
}

/// The policy of whatever is not the dashboard.
const INERT: &str = "default-src 'none'; frame-ancestors 'none'";
