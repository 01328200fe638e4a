//! Builds a job from the command line, and counts outcomes and latencies, for `submit` and `bench`. Only `bench` uses
//! `timed`. The loops that send jobs concurrently, and the output, are in the modules of the two commands.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use bulkhead_api::Histogram;
use bulkhead_client::{Client, Job, JobError, Reply};

use crate::args::Request;

/// Creates the job that the command line describes.
pub(crate) fn job(client: &Client, request: &Request, payload: Vec<u8>) -> Job {
    let job = client
        .job(&request.name, payload)
        .operation(&request.operation)
        .priority(request.priority)
        .tenant(&request.tenant)
        .cost(request.cost)
        .idempotent(request.idempotent);
    let job = match request.run_limit {
        Some(limit) => job.run_limit(limit),
        None => job,
    };
    match request.deadline {
        Some(limit) => job.deadline(limit),
        None => job,
    }
}

/// Job counts by outcome, and the distribution of latencies. Memory use does not grow with the number of jobs.
#[derive(Debug, Default)]
pub(crate) struct JobStats {
    /// Number of jobs by outcome and reason.
    pub(crate) outcomes: BTreeMap<String, u64>,
    /// Latencies of jobs whose outcome was `ok`, in nanoseconds. Each latency is rounded up by less than 2 %.
    pub(crate) latencies: Histogram<7>,
}

impl JobStats {
    pub(crate) fn add(&mut self, result: &Result<Reply, JobError>, took: Duration) {
        *self.outcomes.entry(name(result)).or_default() += 1;
        if result.is_ok() {
            self.latencies.record(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX), 1);
        }
    }

    pub(crate) fn jobs(&self) -> u64 {
        self.outcomes.values().sum()
    }

    /// Returns a latency quantile in milliseconds, or `None` if no outcome was `ok`.
    pub(crate) fn quantile_ms(&self, share: f64) -> Option<f64> {
        let quantile = Duration::from_nanos(self.latencies.quantile(share));
        (self.latencies.total() > 0).then_some(quantile.as_secs_f64() * 1e3)
    }
}

/// Returns the name of the outcome, followed by the reason if there is one, such as `ok` or `rejected/queue_full`.
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

/// Sends a job and measures the time until its outcome arrives.
pub(crate) async fn timed(job: Job) -> (Result<Reply, JobError>, Duration) {
    let start = Instant::now();
    let result = job.send().await;
    (result, start.elapsed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latency_quantiles_are_within_two_percent() {
        let mut stats = JobStats::default();
        assert_eq!(stats.quantile_ms(0.5), None);
        for millis in 1..=100 {
            stats.latencies.record(millis * 1_000_000, 1);
        }
        for (share, millis) in [(0.0, 1.0), (0.5, 50.0), (0.99, 99.0), (1.0, 100.0)] {
            let actual = stats.quantile_ms(share).unwrap();
            assert!((millis..millis * 1.016).contains(&actual), "{share}: {actual}");
        }
        assert_eq!(stats.quantile_ms(1.0), Some(100.0), "the maximum is exact");
    }
}
