//! What is the same for all of HTTP: who is let in, problem documents, and the routes that belong to no other part.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Router;
use axum::body::Bytes;
use axum::extract::connect_info::ConnectInfo;
use axum::extract::{DefaultBodyLimit, Path, Query, Request, State};
use axum::http::{HeaderValue, StatusCode, Version, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use bulkhead_api::{Bulkheads, Done, Problem, Readiness, ShortState};
use bulkhead_policy::BulkheadState;
use bulkhead_shared::RejectReason;
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value, json};
use tokio::sync::oneshot;

use super::connections::{ANSWERED_WITHIN, Entry};
use super::{Control, browser, jobs, routes};
use bulkhead_plane::command::{Command, SteerError, Verb, problem_of_change, problem_of_tenant_change};

/// Bytes of a request's body, but for payloads.
const BODY_BYTES_MAX: usize = 64 * 1024;

pub(super) type Shared = Arc<Control>;

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
    // Also on the Unix socket: somebody may have made it a port for their browser.
    if let Some(refusal) = browser::refuse(&request) {
        return refusal;
    }
    let mut answer = pin!(next.run(request));
    match tokio::time::timeout(ANSWERED_WITHIN, &mut answer).await {
        Ok(answer) => answer,
        Err(_) if entry.is_patient() => answer.await,
        // Who waits for `100 Continue` has had it, so that nothing else looks at the time any more.
        Err(_) => problem(StatusCode::REQUEST_TIMEOUT, "the request did not come whole in time"),
    }
}

// Answers.

pub(super) const PROBLEM: &str = "application/problem+json";
pub(super) const JSON: &str = "application/json";

/// A status that is only ours and a few proxies'.
const CLIENT_CLOSED_REQUEST: u16 = 499;

/// A problem document (RFC 9457).
pub(super) fn problem(status: StatusCode, detail: &str) -> Response {
    problem_with(status, detail, Map::new())
}

/// The same with fields of its own.
pub(super) fn problem_with(status: StatusCode, detail: &str, fields: Map<String, Value>) -> Response {
    let title = match status.as_u16() {
        CLIENT_CLOSED_REQUEST => "Client Closed Request",
        _ => status.canonical_reason().unwrap_or("error"),
    };
    let (detail, status_code) = (detail.to_owned(), status.as_u16());
    let body =
        Problem { detail, status: status_code, title: title.into(), kind: "about:blank".into(), fields };
    (status, [(header::CONTENT_TYPE, PROBLEM)], json!(body).to_string()).into_response()
}

/// What the router's own parts refuse, such as a query that makes no sense, is told like everything else;
/// and whoever is put off hears until when.
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
    // A place is not to be held by whoever may ask again some day.
    headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    // Workers' output and results are theirs: no browser is to make a page or a script of them.
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.entry(header::CONTENT_SECURITY_POLICY).or_insert(HeaderValue::from_static(INERT));
    if matches!(status, StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS) {
        response.headers_mut().entry(header::RETRY_AFTER).or_insert(HeaderValue::from_static("1"));
    }
    if version == Version::HTTP_10 {
        // Otherwise a `keep-alive` is added to our `close` for those who ask for one.
        *response.version_mut() = version;
    }
    response
}

/// The policy of whatever is not the dashboard.
const INERT: &str = "default-src 'none'; frame-ancestors 'none'";

pub(super) fn stuck() -> Response {
    problem(StatusCode::SERVICE_UNAVAILABLE, "the data plane does not answer")
}

pub(super) fn not_found(name: &str) -> Response {
    problem(StatusCode::NOT_FOUND, &format!("there is no bulkhead '{}'", name.escape_debug()))
}

pub(super) async fn healthz(State(control): State<Shared>) -> Response {
    match control.snapshots(Some("")).await {
        Some(_) => "ok\n".into_response(),
        None => stuck(),
    }
}

#[derive(Deserialize)]
pub(super) struct ReadyQuery {
    bulkhead: Option<String>,
}

pub(super) async fn readyz(State(control): State<Shared>, Query(query): Query<ReadyQuery>) -> Response {
    let name = query.bulkhead.as_deref();
    let Some(states) = control.readiness.states(&control.commander, &control.pulse).await else {
        return stuck();
    };
    let mut states = states.to_vec();
    states.retain(|it| name.is_none_or(|name| name == it.name));
    let is_serving =
        |one: &ShortState| one.state == BulkheadState::Ready || one.state == BulkheadState::Degraded;
    let (is_ready, status) = match name {
        Some(name) => match states.first() {
            None => return not_found(name),
            Some(one) => (is_serving(one), one.state.clone()),
        },
        None if control.is_stopping.load(Ordering::SeqCst) => (false, BulkheadState::Draining.into()),
        None if control.is_started.load(Ordering::SeqCst) => (true, BulkheadState::Ready.into()),
        None => (false, BulkheadState::Starting.into()),
    };
    states.retain(|it| it.state != BulkheadState::Ready);
    let code = if is_ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (code, axum::Json(json!(Readiness { degraded: states, status }))).into_response()
}

pub(super) async fn bulkheads(State(control): State<Shared>) -> Response {
    match control.snapshots(None).await {
        Some(bulkheads) => axum::Json(json!(Bulkheads { bulkheads })).into_response(),
        None => stuck(),
    }
}

#[derive(Deserialize)]
pub(super) struct TenantQuery {
    tenant: Option<String>,
}

pub(super) async fn bulkhead(
    State(control): State<Shared>,
    Path(name): Path<String>,
    Query(query): Query<TenantQuery>,
) -> Response {
    if let Some(tenant) = query.tenant {
        return match control.tenant_snapshot(&name, tenant).await {
            Some(Ok(snapshot)) => axum::Json(snapshot).into_response(),
            Some(Err(error)) => not_done(&name, &error),
            None => stuck(),
        };
    }
    match control.snapshots(Some(&name)).await {
        Some(snapshots) => match snapshots.first() {
            Some(snapshot) => axum::Json(snapshot).into_response(),
            None => not_found(&name),
        },
        None => stuck(),
    }
}

pub(super) async fn change(State(control): State<Shared>, Path(name): Path<String>, body: Bytes) -> Response {
    let change = match read_body(&body, problem_of_change) {
        Ok(change) => change,
        Err(sentence) => return problem(StatusCode::BAD_REQUEST, &sentence),
    };
    let (reply, answer) = oneshot::channel();
    let command = Command::Change { bulkhead: name.clone(), change, reply };
    changed(&control, &name, command, answer).await
}

pub(super) async fn change_tenant(
    State(control): State<Shared>,
    Path((name, tenant)): Path<(String, String)>,
    body: Bytes,
) -> Response {
    let change = match read_body(&body, problem_of_tenant_change) {
        Ok(change) => change,
        Err(sentence) => return problem(StatusCode::BAD_REQUEST, &sentence),
    };
    let (reply, answer) = oneshot::channel();
    let command = Command::ChangeTenant { bulkhead: name.clone(), tenant, change, reply };
    changed(&control, &name, command, answer).await
}

/// Sends a command, and tells what came of it.
async fn changed<T: serde::Serialize>(
    control: &Control,
    name: &str,
    command: Command,
    answer: oneshot::Receiver<Result<T, SteerError>>,
) -> Response {
    if control.commander.send(command).is_err() {
        return stuck();
    }
    match tokio::time::timeout(super::ANSWER_WITHIN, answer).await {
        Ok(Ok(Ok(state))) => axum::Json(state).into_response(),
        Ok(Ok(Err(error))) => not_done(name, &error),
        Ok(Err(_)) | Err(_) => stuck(),
    }
}

/// Reads what to change; in one sentence, what is wrong with it.
fn read_body<T: serde::de::DeserializeOwned>(
    body: &[u8],
    judge: impl Fn(&T) -> Option<String>,
) -> Result<T, String> {
    let value: serde_json::Value =
        serde_json::from_slice(body).map_err(|error| format!("the body is not JSON: {error}"))?;
    if !value.is_object() {
        return Err("the body is no JSON object: write {…} with the fields that are to change".into());
    }
    let change: T = serde_path_to_error::deserialize(value).map_err(|error| error.to_string())?;
    match judge(&change) {
        Some(problem) => Err(problem),
        None => Ok(change),
    }
}

fn not_done(name: &str, error: &SteerError) -> Response {
    match error {
        SteerError::NotFound => not_found(name),
        SteerError::Stopping => problem(StatusCode::CONFLICT, &error.to_string()),
        SteerError::NoTenant => problem(StatusCode::NOT_FOUND, &error.to_string()),
        SteerError::Unfit(sentence) => problem(StatusCode::BAD_REQUEST, sentence),
    }
}

pub(super) async fn restart(State(control): State<Shared>, Path(name): Path<String>) -> Response {
    steer(&control, name, Verb::Restart, "restart").await
}

pub(super) async fn drain(State(control): State<Shared>, Path(name): Path<String>) -> Response {
    steer(&control, name, Verb::Drain, "drain").await
}

pub(super) async fn resume(State(control): State<Shared>, Path(name): Path<String>) -> Response {
    steer(&control, name, Verb::Resume, "resume").await
}

pub(super) async fn reset(State(control): State<Shared>, Path(name): Path<String>) -> Response {
    steer(&control, name, Verb::Reset, "reset").await
}

async fn steer(control: &Control, name: String, verb: Verb, done: &'static str) -> Response {
    let (reply, answer) = oneshot::channel();
    if control.commander.send(Command::Steer { bulkhead: name.clone(), verb, reply }).is_err() {
        return stuck();
    }
    match tokio::time::timeout(super::ANSWER_WITHIN, answer).await {
        Ok(Ok(Ok(()))) => axum::Json(Done { bulkhead: name, done: done.into() }).into_response(),
        Ok(Ok(Err(error))) => not_done(&name, &error),
        Ok(Err(_)) | Err(_) => stuck(),
    }
}

// Streams.

/// `?follow`, `?follow=true` and `?follow=1` are the same.
pub(super) fn switch<'de, D: Deserializer<'de>>(value: D) -> Result<Option<bool>, D::Error> {
    match String::deserialize(value)?.as_str() {
        "" | "1" | "true" => Ok(Some(true)),
        "0" | "false" => Ok(Some(false)),
        _ => Err(serde::de::Error::custom("must be true or false")),
    }
}
