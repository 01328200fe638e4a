//! Handles HTTP requests that show, change or steer bulkheads, and requests that list or cancel jobs. `routes` assigns
//! the handlers to paths. A handler checks the form of the request and the ranges of its numbers. During an upgrade,
//! it refuses to change or steer a bulkhead. Otherwise, the data plane carries out the request. `jobs` handles the
//! submission of jobs over HTTP.

use axum::body::Bytes;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use bulkhead_api::{Bulkheads, Done, JobProgress, Vocabulary as _};
use bulkhead_plane::command::{
    Command, JOBS_LISTED_MAX, JobsRequest, SteerAction, SteerError, change_problem, tenant_change_problem,
};
use bulkhead_shared::JobId;
use serde::Deserialize;
use serde_json::json;

use super::responses::{not_found, problem, stuck};
use super::{Control, Shared};

pub(super) async fn bulkheads(State(control): State<Shared>) -> Response {
    match control.snapshots(None).await {
        Some(bulkheads) => axum::Json(json!(Bulkheads { bulkheads })).into_response(),
        None => stuck(),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TenantQuery {
    tenant: Option<String>,
}

pub(super) async fn bulkhead(
    State(control): State<Shared>,
    Path(name): Path<String>,
    Query(query): Query<TenantQuery>,
) -> Response {
    if let Some(tenant) = query.tenant {
        return done(&name, control.tenant_snapshot(&name, tenant).await);
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
    let change = match read_body(&body, change_problem) {
        Ok(change) => change,
        Err(sentence) => return problem(StatusCode::BAD_REQUEST, &sentence),
    };
    if control.handover.is_upgrading() {
        return done::<()>(&name, Some(Err(SteerError::Upgrading)));
    }
    let bulkhead = name.clone();
    let changed = control.commands.request(|reply| Command::Change { bulkhead, change, reply }).await;
    done(&name, changed)
}

pub(super) async fn change_tenant(
    State(control): State<Shared>,
    Path((name, tenant)): Path<(String, String)>,
    body: Bytes,
) -> Response {
    let change = match read_body(&body, tenant_change_problem) {
        Ok(change) => change,
        Err(sentence) => return problem(StatusCode::BAD_REQUEST, &sentence),
    };
    if control.handover.is_upgrading() {
        return done::<()>(&name, Some(Err(SteerError::Upgrading)));
    }
    let bulkhead = name.clone();
    let command = |reply| Command::ChangeTenant { bulkhead, tenant, change, reply };
    done(&name, control.commands.request(command).await)
}

/// Converts the data plane's reply to a command into an HTTP response.
fn done<T: serde::Serialize>(name: &str, answer: Option<Result<T, SteerError>>) -> Response {
    match answer {
        Some(Ok(state)) => axum::Json(state).into_response(),
        Some(Err(SteerError::NotFound)) => not_found(name),
        Some(Err(error @ (SteerError::Stopping | SteerError::Upgrading))) => {
            problem(StatusCode::CONFLICT, &error.to_string())
        }
        Some(Err(error @ SteerError::UnknownTenant)) => problem(StatusCode::NOT_FOUND, &error.to_string()),
        Some(Err(error @ SteerError::UnknownJob { .. })) => {
            problem(StatusCode::NOT_FOUND, &error.to_string())
        }
        Some(Err(SteerError::Conflict(sentence))) => problem(StatusCode::BAD_REQUEST, &sentence),
        None => stuck(),
    }
}

/// Parses and checks the body of a request. The error is a message for the client.
fn read_body<T: serde::de::DeserializeOwned>(
    body: &[u8],
    judge: impl Fn(&T) -> Option<String>,
) -> Result<T, String> {
    let value: serde_json::Value =
        serde_json::from_slice(body).map_err(|error| format!("the body is not JSON: {error}"))?;
    if !value.is_object() {
        return Err("the body is not a JSON object: send {…} with the fields to change".into());
    }
    let change: T = serde_path_to_error::deserialize(value).map_err(|error| error.to_string())?;
    match judge(&change) {
        Some(problem) => Err(problem),
        None => Ok(change),
    }
}

pub(super) async fn restart(State(control): State<Shared>, Path(name): Path<String>) -> Response {
    steer(&control, name, SteerAction::Restart, "restart").await
}

pub(super) async fn drain(State(control): State<Shared>, Path(name): Path<String>) -> Response {
    steer(&control, name, SteerAction::Drain, "drain").await
}

pub(super) async fn resume(State(control): State<Shared>, Path(name): Path<String>) -> Response {
    steer(&control, name, SteerAction::Resume, "resume").await
}

pub(super) async fn reset(State(control): State<Shared>, Path(name): Path<String>) -> Response {
    steer(&control, name, SteerAction::Reset, "reset").await
}

async fn steer(control: &Control, name: String, action: SteerAction, action_name: &'static str) -> Response {
    if control.handover.is_upgrading() {
        return done::<()>(&name, Some(Err(SteerError::Upgrading)));
    }
    let bulkhead = name.clone();
    let steered = control.commands.request(|reply| Command::Steer { bulkhead, action, reply }).await;
    let document = |()| Done { bulkhead: name.clone(), done: action_name.into(), job: None };
    done(&name, steered.map(|steered| steered.map(document)))
}

// Jobs.

/// Maximum number of jobs in one response, unless the client requests another number.
const JOBS_LISTED_DEFAULT: usize = 100;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct JobsQuery {
    bulkhead: Option<String>,
    #[serde(default, deserialize_with = "progress")]
    state: Option<JobProgress>,
    limit: Option<usize>,
}

fn progress<'de, D: serde::Deserializer<'de>>(value: D) -> Result<Option<JobProgress>, D::Error> {
    let word = String::deserialize(value)?;
    let words = JobProgress::WORDS.join(", ");
    JobProgress::from_word(&word)
        .map(Some)
        .ok_or_else(|| serde::de::Error::custom(format!("`state` must be one of: {words}")))
}

pub(super) async fn jobs(State(control): State<Shared>, Query(query): Query<JobsQuery>) -> Response {
    let unknown = query.bulkhead.clone().filter(|name| !control.reloads.has(name));
    let limit = query.limit.unwrap_or(JOBS_LISTED_DEFAULT).min(JOBS_LISTED_MAX);
    let request = JobsRequest { bulkhead: query.bulkhead, progress: query.state, limit };
    match control.commands.request(|reply| Command::ListJobs { request, reply }).await {
        // A bulkhead that was removed from the configuration may still have jobs.
        Some(jobs) => match unknown.filter(|_| jobs.total == 0) {
            Some(name) => not_found(&name),
            None => axum::Json(json!(jobs)).into_response(),
        },
        None => stuck(),
    }
}

pub(super) async fn cancel(
    State(control): State<Shared>,
    Path((name, job)): Path<(String, String)>,
) -> Response {
    let Ok(id) = job.parse::<JobId>() else {
        return problem(StatusCode::NOT_FOUND, &SteerError::UnknownJob { holder: None }.to_string());
    };
    let bulkhead = name.clone();
    let cancelled = control.commands.request(|reply| Command::CancelJob { bulkhead, job: id, reply }).await;
    let document = |()| Done { bulkhead: name.clone(), done: "cancel".into(), job: Some(id.to_string()) };
    done(&name, cancelled.map(|cancelled| cancelled.map(document)))
}
