//! Many jobs at once over one connection: the part that `submit --repeat` and `bench` share.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use bulkhead_client::{Client, Job, JobError, Reply};

use crate::args::Request;
use crate::output::{Failure, exit};

/// Reads a job's payload; `-` is standard input.
pub(crate) fn payload(file: Option<&Path>) -> Result<Vec<u8>, Failure> {
    let Some(file) = file else { return Ok(Vec::new()) };
    let read = if file == Path::new("-") {
        let mut bytes = Vec::new();
        std::io::Read::read_to_end(&mut std::io::stdin().lock(), &mut bytes).map(|_| bytes)
    } else {
        std::fs::read(file)
    };
    let fail =
        |error| Failure::new(exit::USAGE, format!("failed to read the payload {}: {error}", file.display()));
    read.map_err(fail)
}

/// The job that a command line asks for.
pub(crate) fn job(client: &Client, request: &Request, payload: Vec<u8>) -> Job {
    let job = client
        .job(&request.name, payload)
        .operation(&request.operation)
        .priority(request.priority)
        .tenant(&request.tenant)
        .cost(request.cost)
        .idempotent(request.idempotent);
    match request.deadline {
        Some(limit) => job.deadline(limit),
        None => job,
    }
}

/// Counts and times of many jobs.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    /// Jobs by outcome and reason.
    pub(crate) outcomes: BTreeMap<String, u64>,
    /// How long those took that ended `ok`.
    pub(crate) latencies: Vec<Duration>,
}

impl Tally {
    pub(crate) fn add(&mut self, result: &Result<Reply, JobError>, took: Duration) {
        *self.outcomes.entry(name(result)).or_default() += 1;
        if result.is_ok() {
            self.latencies.push(took);
        }
    }

    pub(crate) fn jobs(&self) -> u64 {
        self.outcomes.values().sum()
    }

    pub(crate) fn sort(&mut self) {
        self.latencies.sort_unstable();
    }

    /// The latency below which this share of the jobs lies; call [`Tally::sort`] before.
    pub(crate) fn quantile(&self, share: f64) -> Option<Duration> {
        let last = self.latencies.len().checked_sub(1)?;
        let rank = (self.latencies.len() as f64 * share).ceil() as usize;
        Some(self.latencies[rank.saturating_sub(1).min(last)])
    }
}

/// `ok`, or outcome and reason: `rejected/queue_full`.
pub(crate) fn name(result: &Result<Reply, JobError>) -> String {
    match result.as_ref().map_err(JobError::outcome) {
        Ok(_) => "ok".to_owned(),
        Err(None) => "unreachable".to_owned(),
        Err(Some(outcome)) => match outcome.verdict.reason() {
            Some(reason) => format!("{}/{reason}", outcome.verdict.name()),
            None => outcome.verdict.name().to_owned(),
        },
    }
}

/// Sends a job and times it.
pub(crate) async fn timed(job: Job) -> (Result<Reply, JobError>, Duration) {
    let began = Instant::now();
    let result = job.send().await;
    (result, began.elapsed())
}
