//! `bulkhead bench`: loads a bulkhead for a while, and prints throughput and latency.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use bulkhead_client::{Client, Job, JobError};
use serde_json::json;
use tokio::task::JoinSet;

use crate::args::{Args, Bench};
use crate::load::{self, Tally};
use crate::output::{self, Failure, exit};
use crate::payload;

/// Runs the command. Returns 0 if any job was `ok`, otherwise the exit code of the last job.
pub(crate) async fn run(args: &Args, bench: &Bench) -> Result<u8, Failure> {
    let payload = match &bench.request.payload_file {
        Some(file) => payload::read(file)?,
        None => vec![b'x'; bench.payload_bytes],
    };
    let client = Client::connect(args.socket()).await?;
    let shared = Arc::new(Mutex::new(Seen::default()));
    let began = Instant::now();
    let until = began + bench.duration;
    let mut lanes = JoinSet::new();
    for _ in 0..bench.concurrency {
        let template = load::job(&client, &bench.request, payload.clone());
        lanes.spawn(lane(template, until, shared.clone()));
    }
    let is_cut_short = tokio::select! {
        () = async { while lanes.join_next().await.is_some() {} } => false,
        _ = tokio::signal::ctrl_c() => {
            lanes.shutdown().await;
            true
        }
    };
    let seconds = began.elapsed().as_secs_f64();
    let seen = shared.lock().unwrap_or_else(PoisonError::into_inner);
    print(args, bench, &seen.tally, seconds)?;
    Ok(match seen.last_bad {
        _ if is_cut_short => exit::CANCELLED,
        Some(code) if seen.tally.latencies.total() == 0 => code,
        _ => exit::OK,
    })
}

#[derive(Default)]
struct Seen {
    tally: Tally,
    /// Exit code of the last job that was not `ok`.
    last_bad: Option<u8>,
}

async fn lane(template: Job, until: Instant, seen: Arc<Mutex<Seen>>) {
    while Instant::now() < until {
        let (result, took) = load::timed(template.clone()).await;
        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.tally.add(&result, took);
        if let Err(error) = result {
            seen.last_bad = Some(error.exit_code());
            // A permanent rejection, for example because of an unknown name, would only be repeated.
            if matches!(error, JobError::Rejected(_))
                && !error.is_retryable()
                && error.retry_after().is_none()
            {
                return;
            }
        }
    }
}

fn print(args: &Args, bench: &Bench, tally: &Tally, seconds: f64) -> Result<(), Failure> {
    let shares = [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999), ("max", 1.0)];
    let rate = tally.jobs() as f64 / seconds;
    if args.json {
        let latency: serde_json::Map<_, _> = shares
            .iter()
            .map(|(name, share)| ((*name).to_owned(), json!(tally.quantile_ms(*share))))
            .collect();
        let object = json!({
            "bulkhead": bench.request.name, "concurrency": bench.concurrency, "seconds": seconds,
            "jobs": tally.jobs(), "jobs_per_second": rate, "outcomes": tally.outcomes, "latency_ms": latency,
        });
        return output::json(&object);
    }
    output::line(&format!(
        "{} jobs in {seconds:.2} s with {} at once: {rate:.0} jobs/s",
        tally.jobs(),
        bench.concurrency
    ))?;
    for (name, count) in &tally.outcomes {
        output::line(&format!("{count:>10}  {}", output::harmless(name)))?;
    }
    for (name, share) in shares {
        if let Some(latency) = tally.quantile_ms(share) {
            output::line(&format!("{name:>10}  {latency:.3} ms"))?;
        }
    }
    Ok(())
}
