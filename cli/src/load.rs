//! Many jobs at once over one connection: the part that `submit --repeat` and `bench` share.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use bulkhead_client::{Client, Job, JobError, Reply};

use crate::args::Request;

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

/// Counts and times of many jobs, in the same memory however many they are.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    /// Jobs by outcome and reason.
    pub(crate) outcomes: BTreeMap<String, u64>,
    /// How long those took that ended `ok`.
    pub(crate) latencies: Latencies,
}

impl Tally {
    pub(crate) fn add(&mut self, result: &Result<Reply, JobError>, took: Duration) {
        *self.outcomes.entry(name(result)).or_default() += 1;
        if result.is_ok() {
            self.latencies.add(took);
        }
    }

    pub(crate) fn jobs(&self) -> u64 {
        self.outcomes.values().sum()
    }
}

/// Significant bits of a latency that are kept: what is told is less than 2 % too long.
const KEPT_BITS: u32 = 7;

/// Values of the kept bits that are not found in the bucket before at half the width.
const STEPS: usize = 1 << (KEPT_BITS - 1);

/// A histogram of nanoseconds whose buckets grow with what they hold.
#[derive(Debug)]
pub(crate) struct Latencies {
    buckets: Vec<u64>,
    count: u64,
    max: Duration,
}

impl Default for Latencies {
    fn default() -> Self {
        Self { buckets: vec![0; bucket(u64::MAX) + 1], count: 0, max: Duration::ZERO }
    }
}

impl Latencies {
    fn add(&mut self, took: Duration) {
        self.buckets[bucket(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX))] += 1;
        self.count += 1;
        self.max = self.max.max(took);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The latency within which this share of the jobs ended.
    pub(crate) fn quantile(&self, share: f64) -> Option<Duration> {
        let rank = ((self.count as f64 * share).ceil() as u64).max(1);
        let mut seen = 0;
        let index = self.buckets.iter().position(|count| {
            seen += count;
            seen >= rank
        })?;
        Some(Duration::from_nanos(longest_in(index)).min(self.max))
    }
}

fn bucket(nanos: u64) -> usize {
    let shift = (u64::BITS - nanos.leading_zeros()).saturating_sub(KEPT_BITS);
    shift as usize * STEPS + (nanos >> shift) as usize
}

fn longest_in(bucket: usize) -> u64 {
    let shift = (bucket / STEPS).saturating_sub(1);
    let kept = (bucket - shift * STEPS) as u64;
    (kept << shift) + ((1 << shift) - 1)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_latency_has_a_bucket_that_is_hardly_wider() {
        let mut last = 0;
        for nanos in (0..63).flat_map(|bit| [(1_u64 << bit) - 1, 1 << bit, (1 << bit) + (1 << bit) / 3]) {
            let index = bucket(nanos);
            assert!(index >= last || nanos < longest_in(last), "{nanos}");
            let told = longest_in(index);
            assert!(told >= nanos && told as f64 <= nanos as f64 * 1.016 + 1.0, "{nanos} is told as {told}");
            assert_eq!(bucket(told), index);
            last = index;
        }
        assert_eq!(longest_in(bucket(u64::MAX)), u64::MAX);
    }

    #[test]
    fn quantiles() {
        let mut latencies = Latencies::default();
        assert_eq!(latencies.quantile(0.5), None);
        for millis in 1..=100 {
            latencies.add(Duration::from_millis(millis));
        }
        let told = |share| latencies.quantile(share).unwrap().as_secs_f64() * 1e3;
        for (share, millis) in [(0.0, 1.0), (0.5, 50.0), (0.99, 99.0), (1.0, 100.0)] {
            assert!((millis..millis * 1.016).contains(&told(share)), "{share}: {}", told(share));
        }
        assert_eq!(latencies.quantile(1.0), Some(Duration::from_millis(100)), "the longest is exact");
    }
}
