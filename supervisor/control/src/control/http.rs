//! Builds the router for the Unix socket and TCP, with middleware that refuses forbidden requests, limits their time
//! and adds common response headers. `routes` names the handlers. `tcp` checks tokens, and `connections` serves the
//! connections.

use std::pin::pin;
use std::sync::Arc;

use axum::Router;
use axum::extract::connect_info::ConnectInfo;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{HeaderValue, StatusCode, Version, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::Response;
use bulkhead_plane::counters::SharedCounters;
use bulkhead_shared::RejectReason;

use super::connections::{Admission, REQUEST_TIMEOUT};
use super::outcomes::{OUTCOME, bulkhead_of, reject_early, reject_request};
use super::responses::{BODY_BYTES_MAX, EXECUTED, JSON, PROBLEM, RETRYABLE, is_retryable, problem};
use super::{Shared, cross_site, routes};

/// Builds the router shared by the Unix socket and TCP.
pub(super) fn router(control: Shared) -> Router {
    routes::router()
        .fallback(async || problem(StatusCode::NOT_FOUND, "this path does not exist"))
        .method_not_allowed_fallback(async || {
            problem(StatusCode::METHOD_NOT_ALLOWED, "this path does not support this method")
        })
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .layer(from_fn(limit_time))
        .layer(from_fn(admit))
        .layer(from_fn_with_state(control.counters.clone(), complete))
        .with_state(control)
}

async fn admit(ConnectInfo(admission): ConnectInfo<Admission>, request: Request, next: Next) -> Response {
    if let Some(why) = admission.rejection {
        return reject_request(&request, RejectReason::Forbidden, &why);
    }
    // The check also applies to the Unix socket, because an operator may forward a port to the socket for use in a
    // browser.
    if let Some(rejection) = cross_site::rejection(&request) {
        return rejection;
    }
    next.run(request).await
}

/// Enforces the time limit for a request, unless the handler has disabled it.
pub(super) async fn limit_time(
    ConnectInfo(admission): ConnectInfo<Admission>,
    request: Request,
    next: Next,
) -> Response {
    let mut response = pin!(next.run(request));
    match tokio::time::timeout(REQUEST_TIMEOUT, &mut response).await {
        Ok(response) => response,
        Err(_) if admission.progress.has_no_time_limit() => response.await,
        // This is the only time limit for a client that was sent `100 Continue`.
        Err(_) => problem(StatusCode::REQUEST_TIMEOUT, "the complete request was not received in time"),
    }
}

/// Adds the headers common to all responses of the admin API, and closes the connection after the response.
pub(super) async fn complete(
    State(counters): State<Arc<SharedCounters>>,
    request: Request,
    next: Next,
) -> Response {
    let is_job = bulkhead_of(&request).is_some();
    // Connections are not kept alive, because an idle connection would hold a permit.
    complete_with(request, next, (&counters, |_: &_, _: &_| true), is_job, || true).await
}

/// Completes a response. An error from the router itself, such as an invalid query, becomes a problem document. A
/// retryable error gets a `Retry-After` header. An error in response to a job gets the fields of an outcome, and the job
/// is counted if `has_access` returns true for the response and the bulkhead.
pub(super) async fn complete_with(
    request: Request,
    next: Next,
    (counters, has_access): (&SharedCounters, impl FnOnce(&Response, &str) -> bool),
    is_job: bool,
    closes: impl FnOnce() -> bool,
) -> Response {
    let version = request.version();
    let bulkhead = bulkhead_of(&request).map(str::to_owned);
    let mut response = next.run(request).await;
    let status = response.status();
    let is_plain =
        response.headers().get(header::CONTENT_TYPE).is_none_or(|kind| kind != PROBLEM && kind != JSON);
    let is_rejection = status.is_client_error() || is_retryable(status);
    if is_job && is_rejection && !response.headers().contains_key(OUTCOME) {
        let counters = bulkhead.as_deref().filter(|name| has_access(&response, name)).map(|_| counters);
        response = reject_early(response, bulkhead.as_deref(), counters).await;
    } else if is_plain && (status.is_client_error() || status.is_server_error()) {
        let body = axum::body::to_bytes(response.into_body(), BODY_BYTES_MAX).await.unwrap_or_default();
        response = problem(status, &String::from_utf8_lossy(&body));
    }
    let headers = response.headers_mut();
    let closes = closes();
    if closes {
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    // Browsers must not interpret results or output as a page or script, because workers control the contents.
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.entry(header::CONTENT_SECURITY_POLICY).or_insert(HeaderValue::from_static(INERT));
    if is_retryable(status) {
        headers.entry(header::RETRY_AFTER).or_insert(HeaderValue::from_static("1"));
    }
    // A response that contains an outcome already has these headers. Any other response means that no job started.
    if is_job || is_retryable(status) {
        let retryable = if is_retryable(status) { "true" } else { "false" };
        headers.entry(EXECUTED).or_insert(HeaderValue::from_static("no"));
        headers.entry(RETRYABLE).or_insert(HeaderValue::from_static(retryable));
    }
    if version == Version::HTTP_10 && closes {
        // If the response had version 1.1, hyper would add `keep-alive` to the `Connection` header for
        // clients that ask for it.
        *response.version_mut() = version;
    }
    response
}

/// Content security policy for all responses except the dashboard.
const INERT: &str = "default-src 'none'; frame-ancestors 'none'";

#[cfg(test)]
mod tests {
    use std::path::Path;

    use axum::body::Body;
    use axum::routing;
    use bulkhead_shared::{CrashReason, Executed, HandlerFailure, Verdict};
    use hyper::service::Service as _;
    use hyper_util::service::TowerToHyperService;

    use super::super::outcomes;
    use super::*;

    /// Number of places in each file where a request is answered with 503 or 429. Such a response tells the client that
    /// no job has begun, so before you add a place, make sure that this is true.
    const PLACES: &[(&str, usize)] = &[
        // The data plane did not reply to a request for counters or limits.
        ("advice.rs", 2),
        ("bulkheads.rs", 4),
        ("metrics.rs", 1),
        // Health checks.
        ("readiness.rs", 3),
        // No crash report was read, or a replay was not accepted. A replay begins only while a client is waiting for
        // it.
        ("crashes.rs", 4),
        ("reload.rs", 3),
        ("streams.rs", 1),
        // Jobs without a permit or memory, and jobs that the data plane did not receive.
        ("jobs.rs", 3),
        ("session.rs", 5),
        ("upload.rs", 1),
        // Rejected connections.
        ("waiting.rs", 1),
        // Helpers.
        ("responses.rs", 1),
    ];

    fn count_places(folder: &Path, into: &mut Vec<(String, usize)>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                count_places(&path, into);
            } else if path.extension().is_some_and(|extension| extension == "rs")
                && !path.ends_with("http.rs")
            {
                let text = std::fs::read_to_string(&path).unwrap();
                let code = text.split("#[cfg(test)]").next().unwrap();
                let words = [
                    "StatusCode::SERVICE_UNAVAILABLE",
                    "StatusCode::TOO_MANY_REQUESTS",
                    "stuck()",
                    "Failure::Overloaded(",
                    "Failure::Draining",
                ];
                let is_definition = |line: &&str| !line.contains("fn stuck") && !line.contains("matches!");
                let lines = code.lines().filter(is_definition);
                let count = lines.filter(|line| words.iter().any(|word| line.contains(word))).count();
                if count > 0 {
                    into.push((path.file_name().unwrap().to_str().unwrap().to_owned(), count));
                }
            }
        }
    }

    #[test]
    fn list_of_places_that_respond_503_or_429_is_complete() {
        let mut found = Vec::new();
        count_places(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/control"), &mut found);
        let mut listed: Vec<_> = PLACES.iter().map(|(file, count)| ((*file).to_owned(), *count)).collect();
        found.sort();
        listed.sort();
        assert_eq!(found, listed, "left: the source; right: the list");
    }

    /// Sends a request through [`complete`] to `handler` and returns the response.
    async fn completed<H: axum::handler::Handler<T, ()>, T: 'static>(path: &str, handler: H) -> Response {
        let router = Router::new().fallback_service(routing::any(handler));
        let router = router.layer(from_fn_with_state(Arc::<SharedCounters>::default(), complete));
        let request = Request::builder().method("POST").uri(path).body(Body::empty()).unwrap();
        TowerToHyperService::new(router).call(request).await.unwrap()
    }

    #[tokio::test]
    async fn response_503_or_429_says_no_job_began() {
        let retryable = [StatusCode::SERVICE_UNAVAILABLE, StatusCode::TOO_MANY_REQUESTS];
        for path in ["/v1/bulkheads/b/jobs", "/v1/reload", "/readyz"] {
            for status in retryable {
                let response = completed(path, async move || problem(status, "no")).await;
                assert_eq!(response.headers()[EXECUTED], "no", "{path} {status}");
                assert_eq!(response.headers()[RETRYABLE], "true", "{path} {status}");
                let raw = String::from_utf8(outcomes::raw(status, "no")).unwrap();
                assert!(raw.contains("bulkhead-executed: no\r\nbulkhead-retryable: true\r\n"), "{raw}");
            }
        }
        for status in [400, 404, 405, 408, 413, 415, 500].map(|code| StatusCode::from_u16(code).unwrap()) {
            let response = completed("/v1/bulkheads/b/jobs", async move || status).await;
            assert_eq!(response.headers().contains_key(OUTCOME), status.is_client_error(), "{status}");
            assert_eq!(response.headers()[EXECUTED], "no", "{status}");
            assert_eq!(response.headers()[RETRYABLE], "false", "{status}");
            assert_eq!(response.headers()[header::CONTENT_TYPE], PROBLEM, "{status}");
            let other = completed("/v1/reload", async move || status).await;
            assert!(!other.headers().contains_key(EXECUTED), "{status}");
        }
        for reason in RejectReason::ALL {
            let response = outcomes::rejected("b", None, reason, String::new());
            assert_eq!(response.headers()[EXECUTED], "no", "{reason}");
            let is_retryable = retryable.contains(&response.status());
            assert_eq!(response.headers()[RETRYABLE], is_retryable.to_string(), "{reason}");
        }
        // All other verdicts lead to other status codes.
        let failure = HandlerFailure {
            code: "code".into(),
            message: String::new(),
            retryable: true,
            fault: bulkhead_shared::Fault::Caller,
        };
        let mut verdicts =
            vec![Verdict::Ok, Verdict::Failed(failure), Verdict::DeadlineQueued, Verdict::DeadlineRunning];
        verdicts.extend(CrashReason::ALL.map(|reason| Verdict::Crashed {
            reason,
            status: None,
            message: String::new(),
        }));
        verdicts.extend(Executed::ALL.map(|executed| Verdict::Cancelled { executed }));
        assert!(verdicts.iter().all(|verdict| ![503, 429].contains(&verdict.http_status())));
    }
}
