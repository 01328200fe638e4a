//! Implements `bulkhead-fleet submit` and `bulkhead-fleet result`, which submit jobs to a fleet and print results.
//! `fleet` sends the jobs and reads the ledger. The agents run the jobs.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::path::Path;
use std::time::Duration;

use bulkhead_api::text::escape;
use bulkhead_client::{Executed, PAYLOAD_BYTES_CEILING, Reply};
use bulkhead_fleet::{Fleet, FleetError, FleetJob};
use bulkhead_linux::blocking::Blocking;
use bulkhead_linux::output_file;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use serde_json::{Value, json};

use super::args::{Args, ResultOf, Submit};
use super::output::{self, Failure, exit};
use super::settings;

/// Runs `submit`. Returns the exit code of the first job whose outcome is not `ok`, or 0 if all outcomes are `ok`.
pub(crate) async fn run(args: &Args, submit: &Submit) -> Result<u8, Failure> {
    let (payload, fleet) = match prepare(args, submit).await {
        Ok(prepared) => prepared,
        Err(failure) => {
            let document = failure.job_json(&submit.name, submit.id.as_deref(), Executed::No);
            return Err(print_failure(failure, &document, args.json));
        }
    };
    let (next, unfinished, first_failure) = (Cell::new(0), RefCell::default(), Cell::new(None));
    let run = Run { submit, is_json: args.json, next, unfinished, first_failure };
    let result = tokio::select! {
        // The signal is polled first, so that ^C reports every job whose outcome was not printed.
        biased;
        _ = tokio::signal::ctrl_c() => Err(Failure::new(exit::CANCELLED, "interrupted; accepted jobs continue")),
        result = run.all(&fleet, &payload) => result,
    };
    if let Err(failure) = result {
        run.print_unfinished();
        return Err(failure);
    }
    Ok(run.first_failure.get().map_or(exit::OK, |(_, code)| code))
}

async fn prepare(args: &Args, submit: &Submit) -> Result<(Vec<u8>, Fleet), Failure> {
    let settings = settings(args)?;
    if let Some(path) = submit.output.as_deref().filter(|path| *path != Path::new("-")) {
        check_output(path)?;
    }
    let payload = match &submit.payload_file {
        Some(file) => read(file)?,
        None if submit.no_input || io::stdin().is_terminal() => Vec::new(),
        None => read(Path::new("-"))?,
    };
    let fleet = Fleet::connect_with(&settings.nats, &settings.streams).await;
    Ok((payload, fleet.map_err(Failure::unreachable)?))
}

/// Checks that the result can be written to `path`, so that the command can fail before it submits a job.
fn check_output(path: &Path) -> Result<(), Failure> {
    output_file::check(path).map_err(|error| {
        let message = format!("the result cannot be written to {}: {error}", path.display());
        Failure::new(exit::OUTPUT_FAILED, message)
    })
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
    /// Jobs whose outcome was not printed, by index.
    unfinished: RefCell<BTreeMap<u64, Unfinished>>,
    /// Index and exit code of the first job whose outcome is not `ok`.
    first_failure: Cell<Option<(u64, u8)>>,
}

/// A job whose outcome was not printed.
struct Unfinished {
    id: String,
    /// True if the servers have acknowledged the job.
    is_accepted: bool,
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
            let code = self.one(index, job(fleet, self.submit, payload)).await;
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

    async fn one(&self, index: u64, job: FleetJob) -> Result<u8, Failure> {
        let id = job.options().id.clone();
        let set_unfinished = |is_accepted| {
            self.unfinished.borrow_mut().insert(index, Unfinished { id: id.clone(), is_accepted });
        };
        set_unfinished(false);
        let submitted = match job.submit().await {
            Ok(submitted) => submitted,
            Err(error) => {
                if error.executed() == Executed::No {
                    self.unfinished.borrow_mut().remove(&index);
                }
                return self.print(index, &id, &Err(error));
            }
        };
        set_unfinished(true);
        if self.submit.detach {
            match self.is_json {
                true => output::json(&json!({"id": id, "outcome": "accepted"}))?,
                false => output::line(&id)?,
            }
            self.unfinished.borrow_mut().remove(&index);
            return Ok(exit::OK);
        }
        let result = submitted.result().await;
        self.print(index, &id, &result)
    }

    fn print(&self, index: u64, id: &str, result: &Result<Reply, FleetError>) -> Result<u8, Failure> {
        let code = print(&self.submit.name, id, result, self.output(), self.is_json)?;
        self.unfinished.borrow_mut().remove(&index);
        Ok(code)
    }

    /// Prints the ID of each job whose outcome was not printed, because random IDs would otherwise be lost.
    fn print_unfinished(&self) {
        for Unfinished { id, is_accepted } in self.unfinished.borrow().values() {
            let (state, message) = match is_accepted {
                true => (
                    "accepted",
                    format!("the job {id} was accepted; for its outcome, run: bulkhead fleet result {id}"),
                ),
                false => (
                    "unreachable",
                    format!(
                        "the job {id} may have been accepted; to run the job at most once, submit it again with this ID"
                    ),
                ),
            };
            let document = output::unfinished_json(state, &self.submit.name, id, message.clone());
            // Nothing may read standard output any more.
            if !self.is_json || output::json(&document).is_err() {
                output::to_stderr(&format!("bulkhead-fleet: {}", escape(&message)));
            }
        }
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
    match output::payload_of(result) {
        // With `--json`, standard output contains only the outcome.
        Some(payload) if !is_json || file.is_some() => {
            output::payload(file, payload)?;
        }
        _ => {}
    }
    Ok(code)
}

/// Runs `result`.
pub(crate) async fn result(args: &Args, of: &ResultOf) -> Result<u8, Failure> {
    let (tenant, fleet) = match connect(args, of).await {
        Ok(connected) => connected,
        Err(failure) => {
            let document = failure.job_json("", Some(&of.id), Executed::Unknown);
            return Err(print_failure(failure, &document, args.json));
        }
    };
    // Reads the ledger at least once, even if `wait` is zero.
    let result = fleet.result(&tenant, &of.id, of.wait.max(Duration::from_millis(1))).await;
    // The result remains in the ledger, so it is not lost if nothing reads the output.
    let code = output::code(&result);
    print("", &of.id, &result, of.output.as_deref(), args.json).map_err(|failure| failure.or_code(code))
}

/// Returns the tenant that the job belongs to, and a connection to the fleet.
async fn connect(args: &Args, of: &ResultOf) -> Result<(String, Fleet), Failure> {
    let settings = settings(args)?;
    let fleet = Fleet::connect_with(&settings.nats, &settings.streams).await;
    let tenant = of.tenant.clone().or(settings.nats.tenant).unwrap_or_default();
    Ok((tenant, fleet.map_err(Failure::unreachable)?))
}

/// Prints the document of a job if `is_json` is true. Returns the failure.
fn print_failure(failure: Failure, document: &Value, is_json: bool) -> Failure {
    if is_json {
        // Ignores write errors, because the message is also written to standard error.
        let _ = output::json(document);
    }
    failure
}
