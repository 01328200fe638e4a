//! Implements `bulkhead-fleet submit` and `bulkhead-fleet result`, which submit jobs to a fleet and print results.
//! `fleet` sends the jobs and reads the ledger. The agents run the jobs.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::path::Path;
use std::time::Duration;

use bulkhead_client::{PAYLOAD_BYTES_CEILING, Reply};
use bulkhead_fleet::settings::Settings;
use bulkhead_fleet::{Fleet, FleetError, FleetJob};
use bulkhead_linux::blocking::Blocking;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use serde_json::json;

use super::args::{ResultOf, Submit};
use super::output::{self, Failure, exit};

/// Runs `submit`. Returns the exit code of the first job whose outcome is not `ok`, or 0 if all outcomes are `ok`.
pub(crate) async fn run(settings: &Settings, submit: &Submit, is_json: bool) -> Result<u8, Failure> {
    let (payload, fleet) = match prepare(settings, submit).await {
        Ok(prepared) => prepared,
        Err(failure) => {
            if is_json {
                let outcome = if failure.code() == exit::UNREACHABLE { "unreachable" } else { "error" };
                let printed = output::json(&json!({
                    "bulkhead": submit.name, "executed": "no", "message": failure.message(), "outcome": outcome,
                    "retryable": failure.code() == exit::UNREACHABLE,
                }));
                printed.or_else(Failure::unless_closed_pipe)?;
            }
            return Err(failure);
        }
    };
    let run = Run { submit, is_json, next: Cell::new(0), first_failure: Cell::new(None) };
    tokio::select! {
        result = run.all(&fleet, &payload) => result?,
        _ = tokio::signal::ctrl_c() => {
            let message = "interrupted; accepted jobs continue, and `result ID` prints their outcomes";
            return Err(Failure::new(exit::CANCELLED, message));
        }
    }
    Ok(run.first_failure.get().map_or(exit::OK, |(_, code)| code))
}

async fn prepare(settings: &Settings, submit: &Submit) -> Result<(Vec<u8>, Fleet), Failure> {
    let payload = match &submit.payload_file {
        Some(file) => read(file)?,
        None if submit.no_input || io::stdin().is_terminal() => Vec::new(),
        None => read(Path::new("-"))?,
    };
    let fleet = Fleet::connect_with(&settings.nats, &settings.streams).await;
    Ok((payload, fleet.map_err(Failure::unreachable)?))
}

fn read(file: &Path) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    let max = PAYLOAD_BYTES_CEILING + 1;
    let read = match file == Path::new("-") {
        true => Blocking(io::stdin().lock()).take(max).read_to_end(&mut bytes),
        false => File::open(file).and_then(|file| file.take(max).read_to_end(&mut bytes)),
    };
    read.map_err(|error| {
        Failure::new(exit::USAGE, format!("failed to read the payload from {}: {error}", file.display()))
    })?;
    Ok(bytes)
}

struct Run<'a> {
    submit: &'a Submit,
    is_json: bool,
    /// Index of the next job to submit.
    next: Cell<u64>,
    /// Index and exit code of the first job whose outcome is not `ok`.
    first_failure: Cell<Option<(u64, u8)>>,
}

impl Run<'_> {
    async fn all(&self, fleet: &Fleet, payload: &[u8]) -> Result<(), Failure> {
        let loops = self.submit.repeat.unwrap_or(1).min(u64::from(self.submit.concurrency));
        let mut loops: FuturesUnordered<_> = (0..loops).map(|_| self.submit_loop(fleet, payload)).collect();
        while let Some(result) = loops.next().await {
            result?;
        }
        Ok(())
    }

    async fn submit_loop(&self, fleet: &Fleet, payload: &[u8]) -> Result<(), Failure> {
        while self.next.get() < self.submit.repeat.unwrap_or(1) {
            let index = self.next.replace(self.next.get() + 1);
            let code = self.one(job(fleet, self.submit, payload)).await;
            let code = code.map_err(|failure| self.output_failure(failure))?;
            if code != exit::OK && self.first_failure.get().is_none_or(|(first, _)| index < first) {
                self.first_failure.set(Some((index, code)));
            }
        }
        Ok(())
    }

    /// Describes a failure to print a result or ID. Also reports how many jobs are not submitted because of the failure.
    fn output_failure(&self, failure: Failure) -> Failure {
        let failure = failure.or_lost_output();
        match self.submit.repeat.unwrap_or(1) - self.next.get() {
            0 => failure,
            count => failure.with_note(&format!("jobs not submitted: {count}")),
        }
    }

    async fn one(&self, job: FleetJob) -> Result<u8, Failure> {
        let id = job.options().id.clone();
        let submitted = match job.submit().await {
            Ok(submitted) => submitted,
            Err(error) => return print(&self.submit.name, &id, &Err(error), self.output(), self.is_json),
        };
        if self.submit.detach {
            match self.is_json {
                true => output::json(&json!({"id": id, "outcome": "accepted"}))?,
                false => output::line(&id)?,
            }
            return Ok(exit::OK);
        }
        print(&self.submit.name, &id, &submitted.result().await, self.output(), self.is_json)
    }

    fn output(&self) -> Option<&Path> {
        self.submit.output.as_deref()
    }
}

fn job(fleet: &Fleet, submit: &Submit, payload: &[u8]) -> FleetJob {
    let mut job = fleet
        .job(&submit.name, payload)
        .operation(&submit.operation)
        .priority(submit.priority)
        .cost(submit.cost)
        .idempotent(submit.idempotent);
    if let Some(tenant) = &submit.tenant {
        job = job.tenant(tenant);
    }
    if let Some(id) = &submit.id {
        job = job.id(id);
    }
    if let Some(deadline) = submit.deadline {
        job = job.deadline(deadline);
    }
    if let Some(limit) = submit.run_limit {
        job = job.run_limit(limit);
    }
    job
}

/// Prints the result of a job and returns its exit code.
fn print(
    bulkhead: &str,
    id: &str,
    result: &Result<Reply, FleetError>,
    file: Option<&Path>,
    is_json: bool,
) -> Result<u8, Failure> {
    let code = output::code(result);
    if is_json {
        output::json(&output::outcome_json(bulkhead, id, result))?;
    } else {
        output::to_stderr(&output::describe(id, result));
    }
    let payload = match result {
        Ok(reply) => Some(reply.payload()),
        Err(FleetError::Job(error)) => Some(error.payload()).filter(|payload| !payload.is_empty()),
        Err(_) => None,
    };
    match payload {
        // With `--json`, standard output contains only the outcome.
        Some(payload) if !is_json || file.is_some() => {
            output::payload(file, payload)?;
        }
        _ => {}
    }
    Ok(code)
}

/// Runs `result`.
pub(crate) async fn result(settings: &Settings, of: &ResultOf, is_json: bool) -> Result<u8, Failure> {
    let fleet = Fleet::connect_with(&settings.nats, &settings.streams).await.map_err(Failure::unreachable)?;
    let tenant = of.tenant.clone().or_else(|| settings.nats.tenant.clone()).unwrap_or_default();
    // Reads the ledger at least once, even if `wait` is zero.
    let result = fleet.result(&tenant, &of.id, of.wait.max(Duration::from_millis(1))).await;
    // The result remains in the ledger, so it is not lost if nothing reads the output.
    let code = output::code(&result);
    print("", &of.id, &result, of.output.as_deref(), is_json).map_err(|failure| failure.or_code(code))
}
