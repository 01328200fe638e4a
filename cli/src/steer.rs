//! The `restart`, `drain`, `resume`, `reset` and `is-ready` commands. `restart` and `drain` can wait until they have
//! taken effect, and `is-ready` until a bulkhead is ready.

use std::time::Duration;

use bulkhead_api::{BulkheadState, Bulkheads, Problem, Readiness, Snapshot, Word};
use hyper::{Method, StatusCode};
use tokio::time::Instant;

use crate::admin::shown;
use crate::args::{Args, Drain, IsReady, Restart};
use crate::output::{self, Failure, escape, exit};
use crate::requests::{document, get, get_any, percent_encoded, read_confirmation, request};

/// Interval between polls of a bulkhead's state.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Minimum time to wait for the response to a poll, even if the command's time limit expires earlier.
const LOOK_TIME_MIN: Duration = Duration::from_secs(3);

/// Time at which a wait ends, or `None` for an unlimited wait.
#[derive(Clone, Copy)]
struct WaitLimit(Option<Instant>);

impl WaitLimit {
    fn new(limit: Option<Duration>) -> Self {
        Self(limit.and_then(|limit| Instant::now().checked_add(limit)))
    }

    fn is_over(self) -> bool {
        self.0.is_some_and(|at| at <= Instant::now())
    }

    /// Waits for the response to a poll. If the wait has a time limit, returns an error when the supervisor does
    /// not respond in time.
    async fn look<T>(self, response: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
        let Some(end) = self.0 else { return response.await };
        let end = end.max(Instant::now() + LOOK_TIME_MIN);
        tokio::time::timeout_at(end, response).await.unwrap_or_else(|_| {
            let message = "the supervisor did not respond in time: check that its process is not suspended";
            Err(Failure::new(exit::UNREACHABLE, message))
        })
    }

    /// Sleeps until the next poll or the end of the wait, whichever is earlier.
    async fn pause(self) {
        let next = Instant::now() + POLL_INTERVAL;
        tokio::time::sleep_until(self.0.map_or(next, |at| at.min(next))).await;
    }
}

fn path_of(name: &str) -> String {
    format!("/v1/bulkheads/{}", percent_encoded(name))
}

async fn post(args: &Args, name: &str, action: &str) -> Result<String, Failure> {
    let path = format!("{}/{action}", path_of(name));
    read_confirmation(request(args, Method::POST, &path).await?).await
}

fn print(args: &Args, name: &str, json: &str, text: &str) -> Result<(), Failure> {
    if args.json { output::json(json) } else { output::line(&format!("{}: {text}", escape(name))) }
}

pub(crate) async fn resume(args: &Args, name: &str) -> Result<u8, Failure> {
    let json = post(args, name, "resume").await?;
    print(args, name, &json, "jobs are accepted again")?;
    Ok(exit::OK)
}

pub(crate) async fn reset(args: &Args, name: &str) -> Result<u8, Failure> {
    let json = post(args, name, "reset").await?;
    let text =
        "the breaker, restart history and quarantine have been reset, and failed workers are restarting";
    print(args, name, &json, text)?;
    Ok(exit::OK)
}

// Drain.

pub(crate) async fn drain(args: &Args, drain: &Drain) -> Result<u8, Failure> {
    let names = match &drain.name {
        Some(name) => vec![name.clone()],
        None => {
            let Bulkheads { bulkheads } = get(args, "/v1/bulkheads").await?;
            bulkheads.into_iter().map(|bulkhead| bulkhead.name).collect()
        }
    };
    // Bulkheads that were removed after their names had been listed are skipped. A bulkhead named on the command line
    // must exist.
    let is_removed = |failure: &Failure| drain.name.is_none() && failure.code() == exit::NOT_FOUND;
    let limit = drain.wait.map(WaitLimit::new);
    let mut draining = Vec::new();
    let mut first_failure = None;
    for name in names {
        match post(args, &name, "drain").await {
            Ok(json) => draining.push((name, json)),
            Err(failure) if is_removed(&failure) => {}
            Err(failure) => {
                first_failure = Some(failure);
                break;
            }
        }
    }
    for (name, json) in &draining {
        let text = match limit {
            Some(limit) if first_failure.is_none() => match wait_until_drained(args, name, limit).await {
                Ok(()) => "drained: no jobs are left, and new jobs are rejected",
                Err(failure) if is_removed(&failure) => continue,
                Err(failure) => {
                    first_failure = Some(failure);
                    continue;
                }
            },
            _ => "new and queued jobs are rejected; running jobs can finish",
        };
        // The command waits for all bulkheads even if its output is no longer read.
        print(args, name, json, text).or_else(Failure::unless_closed_pipe)?;
    }
    first_failure.map_or(Ok(exit::OK), Err)
}

async fn wait_until_drained(args: &Args, name: &str, limit: WaitLimit) -> Result<(), Failure> {
    loop {
        let bulkhead: Snapshot = limit.look(get(args, &path_of(name))).await?;
        if bulkhead.state != BulkheadState::Draining {
            let message = format!("{}: the bulkhead was resumed before the drain was complete", escape(name));
            return Err(Failure::new(exit::FAILED, message));
        }
        // Workers may still be running jobs whose clients already have the outcome.
        let in_workers: u64 = bulkhead.workers.iter().map(|worker| worker.in_flight).sum();
        let left = bulkhead.in_flight.max(in_workers) + bulkhead.queued + bulkhead.predecessor_jobs;
        if left == 0 {
            return Ok(());
        }
        if limit.is_over() {
            let message = format!("{}: not drained in time; jobs left: {left}", escape(name));
            return Err(Failure::new(exit::TIMED_OUT, message));
        }
        limit.pause().await;
    }
}

// Restart.

pub(crate) async fn restart(args: &Args, restart: &Restart) -> Result<u8, Failure> {
    let name = &restart.name;
    let limit = restart.wait.map(WaitLimit::new);
    let json = post(args, name, "restart").await?;
    let text = match limit {
        Some(limit) => {
            wait_until_replaced(args, name, limit).await?;
            "all workers have been replaced"
        }
        None => "workers are being replaced one at a time",
    };
    print(args, name, &json, text)?;
    Ok(exit::OK)
}

async fn wait_until_replaced(args: &Args, name: &str, limit: WaitLimit) -> Result<(), Failure> {
    loop {
        let bulkhead: Snapshot = limit.look(get(args, &path_of(name))).await?;
        let left = bulkhead.workers.iter().filter(|worker| worker.outdated).count();
        let has_ready_workers =
            bulkhead.workers.iter().all(|worker| worker.state == "ready" || worker.state == "busy");
        match (&bulkhead.state, &bulkhead.restart_failure) {
            (Word::Known(BulkheadState::Ready), _) if left == 0 => return Ok(()),
            // A draining bulkhead never leaves this state on its own.
            (Word::Known(BulkheadState::Draining), _) if left == 0 && has_ready_workers => return Ok(()),
            (Word::Known(BulkheadState::Failed), _) => {
                let cause = bulkhead.detail.as_ref().map(shown).unwrap_or_default();
                let message = format!("{}: the restart failed: {cause}", escape(name));
                return Err(Failure::new(exit::FAILED, message));
            }
            (_, Some(cause)) if left > 0 => {
                let message = format!(
                    "{}: the restart stopped because a replacement failed to start: {}; the old workers continue to \
                     serve",
                    escape(name),
                    shown(cause)
                );
                return Err(Failure::new(exit::FAILED, message));
            }
            _ if limit.is_over() => {
                let state = shown(&bulkhead.state);
                let message = format!(
                    "{}: not restarted in time; old workers left: {left}, state: {state}",
                    escape(name)
                );
                return Err(Failure::new(exit::TIMED_OUT, message));
            }
            _ => limit.pause().await,
        }
    }
}

// Readiness.

pub(crate) async fn is_ready(args: &Args, is_ready: &IsReady) -> Result<u8, Failure> {
    let of = is_ready.name.as_ref().map(|name| format!("?bulkhead={}", percent_encoded(name)));
    let path = format!("/readyz{}", of.unwrap_or_default());
    let limit = WaitLimit::new(Some(is_ready.wait.unwrap_or_default()));
    let (is_now_ready, body) = loop {
        match limit.look(readiness(args, &path)).await {
            Ok((false, _)) if !limit.is_over() => {}
            Ok(readiness) => break readiness,
            // The supervisor may still be starting.
            Err(failure) if failure.code() == exit::UNREACHABLE && !limit.is_over() => {}
            Err(failure) => return Err(failure),
        }
        limit.pause().await;
    };
    let code = if is_now_ready { exit::OK } else { exit::NOT_READY };
    print_readiness(args, &body).map_err(|failure| failure.or_code(code))?;
    Ok(code)
}

fn print_readiness(args: &Args, body: &[u8]) -> Result<(), Failure> {
    if args.json {
        return output::json(String::from_utf8_lossy(body).trim_end());
    }
    let Readiness { degraded, status, .. } = document(body)?;
    output::line(&shown(&status))?;
    for one in degraded {
        let detail = one.detail.map(|detail| format!(": {}", shown(&detail))).unwrap_or_default();
        output::line(&format!("{}: {}{detail}", shown(&one.name), shown(&one.state)))?;
    }
    Ok(())
}

/// Returns whether the supervisor or bulkhead is ready, and the response body.
async fn readiness(args: &Args, path: &str) -> Result<(bool, Vec<u8>), Failure> {
    let (status, body) = get_any(args, path).await?;
    if let Err(failure) = document::<Readiness>(&body) {
        if status == StatusCode::OK {
            return Err(failure);
        }
        let problem: Problem = serde_json::from_slice(&body).unwrap_or_default();
        return Err(Failure::new(exit::UNREACHABLE, escape(&problem.detail)));
    }
    Ok((status == StatusCode::OK, body))
}
