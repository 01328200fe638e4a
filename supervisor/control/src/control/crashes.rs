//! Handles requests that list or show crash reports, or replay the jobs in a report. `observe/crashes.rs` stores the
//! reports. The data plane runs each replayed job in a new worker. This module selects the jobs to replay, and compares
//! each result with the original crash.

use std::convert::Infallible;

use axum::Extension;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use bulkhead_api::{
    Cause, CauseKind, CrashId, CrashReport, Crashes, EventKind, PAYLOAD_BYTES_MAX, Replay, ReplayVerdict,
    ReplayedJob, Severity,
};
use bulkhead_shared::Verdict;
use futures_util::stream;
use serde::Deserialize;
use serde_json::json;
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use super::Shared;
use super::responses::{JSON, not_found, problem, stuck};
use super::tokens::ReadOnly;
use crate::observe::crashes::ReadError;
use bulkhead_plane::command::{Command, Event, ReplayError, ReplayRequest, ReplayResult};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ListQuery {
    bulkhead: Option<String>,
    limit: Option<usize>,
}

/// Lists the newest `limit` crash reports, oldest first.
pub(super) async fn list(State(control): State<Shared>, Query(query): Query<ListQuery>) -> Response {
    let Some(mut crashes) = control.crashes.list().await else { return busy() };
    if let Some(name) = &query.bulkhead {
        // Some reports may be about bulkheads that are no longer configured.
        crashes.retain(|crash| crash.bulkhead == *name);
        if crashes.is_empty() && !control.reloads.has(name) {
            return not_found(name);
        }
    }
    let surplus = crashes.len().saturating_sub(query.limit.unwrap_or(usize::MAX));
    axum::Json(json!(Crashes { crashes: crashes.split_off(surplus) })).into_response()
}

pub(super) async fn show(
    State(control): State<Shared>,
    Path(id): Path<String>,
    read_only: Option<Extension<ReadOnly>>,
) -> Response {
    match find(&control, &id).await {
        Ok(mut report) => {
            if read_only.is_some() {
                report.jobs.iter_mut().for_each(|job| job.payload = None);
                // Registers can contain parts of the payload.
                let threads = report.native.iter_mut().flat_map(|native| &mut native.threads);
                threads.for_each(|thread| thread.registers.clear());
            }
            axum::Json(report).into_response()
        }
        Err(rejection) => rejection,
    }
}

fn busy() -> Response {
    problem(StatusCode::SERVICE_UNAVAILABLE, "crash reports are being written; retry later")
}

/// Returns the crash report with the given ID. Parses the ID first, so that client input never becomes part of a
/// path.
async fn find(control: &Shared, id: &str) -> Result<Box<CrashReport>, Response> {
    let unknown = || {
        let detail = format!("there is no crash report '{}'", id.escape_debug());
        problem(StatusCode::NOT_FOUND, &detail)
    };
    let parsed: CrashId = id.parse().map_err(|_| unknown())?;
    match control.crashes.get(parsed).await {
        Some(Ok(report)) => Ok(report),
        Some(Err(ReadError::NotFound)) => Err(unknown()),
        Some(Err(error)) => Err(problem(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string())),
        None => Err(busy()),
    }
}

// Replays of jobs.

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ReplayQuery {
    job: Option<usize>,
}

pub(super) async fn replay(
    State(control): State<Shared>,
    Path(id): Path<String>,
    Query(query): Query<ReplayQuery>,
) -> Response {
    let report = match find(&control, &id).await {
        Ok(report) => report,
        Err(rejection) => return rejection,
    };
    let jobs = match select_jobs(&report, query.job) {
        Ok(jobs) => jobs,
        Err(sentence) => return problem(StatusCode::UNPROCESSABLE_ENTITY, &sentence),
    };
    let Ok(permit) = control.replays.clone().try_acquire_owned() else {
        return problem(StatusCode::TOO_MANY_REQUESTS, &ReplayError::Busy.to_string());
    };
    let first = match begin(&control, &report, jobs[0]).await {
        Ok(first) => first,
        Err(rejection) => return rejection,
    };
    // The response header is sent immediately, because a replay can take longer than the time limit for a response.
    let body = stream::once(async move {
        let replay = run(control, report, jobs, first, permit).await;
        Ok::<_, Infallible>(Bytes::from(format!("{}\n", json!(replay))))
    });
    ([(header::CONTENT_TYPE, JSON)], Body::from_stream(body)).into_response()
}

/// Returns the indices of the jobs to replay, in order. If no job is requested, these are the job that caused the crash
/// or, if that job is unknown, all replayable jobs.
fn select_jobs(report: &CrashReport, job: Option<usize>) -> Result<Vec<usize>, String> {
    let count = report.jobs.len();
    if count == 0 {
        return Err("no job was in flight when the worker crashed, so there is no job to replay".into());
    }
    if let Some(job) = job.filter(|job| *job >= count) {
        return Err(format!("this report has no job {job}: its {count} jobs are numbered from 0"));
    }
    match job.or(report.culprit) {
        Some(one) if report.jobs[one].is_replayable() => Ok(vec![one]),
        Some(one) => {
            let job = &report.jobs[one];
            let why = match (job.is_answered, job.payload_bytes) {
                (true, _) => "the outcome was sent to the client before the crash".to_owned(),
                (false, bytes) if bytes <= PAYLOAD_BYTES_MAX as u64 => {
                    format!("the supervisor did not store the payload of {bytes} bytes")
                }
                (false, bytes) => format!("a payload of {bytes} bytes is too large for a report"),
            };
            Err(format!("the report does not contain the payload of job {one}: {why}"))
        }
        None => {
            let all: Vec<usize> = (0..count).filter(|&one| report.jobs[one].is_replayable()).collect();
            if all.is_empty() {
                Err("the report does not contain the payload of any job".into())
            } else {
                Ok(all)
            }
        }
    }
}

type ReplayReceiver = oneshot::Receiver<ReplayResult>;

async fn begin(control: &Shared, report: &CrashReport, index: usize) -> Result<ReplayReceiver, Response> {
    let job = &report.jobs[index];
    let request = ReplayRequest {
        bulkhead: report.bulkhead.clone(),
        operation: job.operation.clone(),
        tenant: job.tenant.clone(),
        payload: job.payload.clone().unwrap_or_default(),
    };
    let (done, receiver) = oneshot::channel();
    match control.commands.request(|accepted| Command::Replay { request, accepted, done }).await {
        Some(Ok(())) => Ok(receiver),
        Some(Err(error)) => {
            let status = match error {
                ReplayError::NotConfigured => StatusCode::NOT_FOUND,
                ReplayError::Stopping => StatusCode::CONFLICT,
                ReplayError::Busy => StatusCode::TOO_MANY_REQUESTS,
            };
            Err(problem(status, &error.to_string()))
        }
        None => Err(stuck()),
    }
}

/// Replays the jobs one at a time, each in a separate worker. Stops once the crash has been reproduced.
async fn run(
    control: Shared,
    report: Box<CrashReport>,
    jobs: Vec<usize>,
    first: ReplayReceiver,
    _permit: OwnedSemaphorePermit,
) -> Replay {
    let (mut replays, mut overall, mut next) = (Vec::new(), ReplayVerdict::NotRun, Some(first));
    for index in jobs {
        let receiver = match next.take() {
            Some(receiver) => Ok(receiver),
            None => begin(&control, &report, index).await,
        };
        let Ok(receiver) = receiver else { break };
        let interrupted = || ReplayResult {
            pid: None,
            verdict: Err("the supervisor stopped before the replay ended".into()),
            cause: None,
            ran: std::time::Duration::ZERO,
        };
        let replayed = receiver.await.unwrap_or_else(|_| interrupted());
        let verdict = compare(&report.cause, &replayed);
        overall = overall.max(verdict);
        let tail = match replayed.pid {
            Some(pid) => control.stderr_tail(pid).await,
            None => None,
        };
        replays.push(describe(&report, index, &replayed, verdict, tail));
        if verdict == ReplayVerdict::Same {
            break;
        }
    }
    control.report_replay(&report, overall);
    Replay {
        before: report.cause,
        bulkhead: report.bulkhead,
        id: report.id,
        replays,
        verdict: overall.into(),
    }
}

fn compare(before: &Cause, replayed: &ReplayResult) -> ReplayVerdict {
    match (&replayed.verdict, &replayed.cause) {
        (Err(_), _) => ReplayVerdict::NotRun,
        (Ok(Verdict::Crashed { .. }), Some(cause)) if before.has_same_cause(cause) => ReplayVerdict::Same,
        (Ok(Verdict::Crashed { .. }), Some(_)) => ReplayVerdict::Different,
        // The worker did not crash on its own: the supervisor stopped it, or the keeper died.
        (Ok(Verdict::Crashed { .. }), None) => ReplayVerdict::NotRun,
        (Ok(Verdict::DeadlineRunning), _) if before.kind == CauseKind::Deadline => ReplayVerdict::Same,
        (Ok(_), _) => ReplayVerdict::NoCrash,
    }
}

fn describe(
    report: &CrashReport,
    index: usize,
    replayed: &ReplayResult,
    verdict: ReplayVerdict,
    stderr_tail: Option<String>,
) -> ReplayedJob {
    let job = &report.jobs[index];
    let (outcome, reason, message) = match &replayed.verdict {
        Ok(verdict) => {
            let reason = verdict.reason().map(str::to_owned);
            (Some(verdict.name().into()), Some(reason), verdict.message().map(str::to_owned))
        }
        Err(message) => (None, None, Some(message.clone())),
    };
    ReplayedJob {
        cause: replayed.cause.clone(),
        job: index,
        message,
        operation: job.operation.clone(),
        outcome,
        payload_bytes: job.payload_bytes,
        ran_ms: bulkhead_api::millis(replayed.ran),
        reason,
        stderr_tail,
        tenant: job.tenant.clone(),
        verdict: verdict.into(),
        worker_pid: replayed.pid,
    }
}

impl super::Control {
    fn report_replay(&self, report: &CrashReport, overall: ReplayVerdict) {
        let what = EventKind::CrashReplayed { report: Some(report.id), verdict: overall.into() };
        self.events.add(Event::new(Severity::Info, Some(report.bulkhead.as_str().into()), what));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bulkhead_plane::crash::cause_of;
    use bulkhead_plane::crash::sample_report as report;
    use bulkhead_policy::{Death, Ending, KillReason};
    use bulkhead_shared::CrashReason;

    #[test]
    fn replay_verdict_compares_crash_causes() {
        let segv = cause_of(&Death::Signal(11).into()).unwrap();
        let crashed = |cause| {
            let verdict =
                Verdict::Crashed { reason: CrashReason::Signal, status: None, message: String::new() };
            ReplayResult { pid: Some(1), verdict: Ok(verdict), cause, ran: std::time::Duration::ZERO }
        };
        let other = cause_of(&Ending { death: Death::Signal(9), killed: Some(KillReason::Hung) });
        assert_eq!(compare(&segv, &crashed(Some(segv.clone()))), ReplayVerdict::Same);
        assert_eq!(compare(&segv, &crashed(other)), ReplayVerdict::Different);
        assert_eq!(compare(&segv, &crashed(None)), ReplayVerdict::NotRun);
        let ended = |verdict| ReplayResult { verdict, ..crashed(None) };
        assert_eq!(compare(&segv, &ended(Ok(Verdict::DeadlineRunning))), ReplayVerdict::NoCrash);
        let late = bulkhead_plane::crash::late_job_cause();
        assert_eq!(compare(&late, &ended(Ok(Verdict::DeadlineRunning))), ReplayVerdict::Same);
        assert_eq!(compare(&late, &ended(Ok(Verdict::Ok))), ReplayVerdict::NoCrash);
        assert_eq!(compare(&segv, &ended(Ok(Verdict::Ok))), ReplayVerdict::NoCrash);
        assert_eq!(compare(&segv, &ended(Err("no worker".into()))), ReplayVerdict::NotRun);
    }

    #[test]
    fn replay_prefers_requested_job_over_culprit() {
        let mut crash = report(1, 1, b"x");
        assert_eq!(select_jobs(&crash, None), Ok(vec![0]));
        assert!(select_jobs(&crash, Some(1)).unwrap_err().contains("no job 1"));
        crash.jobs.push(crash.jobs[0].clone());
        crash.jobs.push(crash.jobs[0].clone());
        crash.jobs[1].payload = None;
        crash.jobs[1].payload_bytes = 1 << 20;
        crash.culprit = None;
        assert_eq!(select_jobs(&crash, None), Ok(vec![0, 2]));
        assert_eq!(select_jobs(&crash, Some(2)), Ok(vec![2]));
        assert!(select_jobs(&crash, Some(1)).unwrap_err().contains("1048576 bytes"));
        crash.jobs.clear();
        assert!(select_jobs(&crash, None).unwrap_err().contains("no job was in flight"));
    }
}
