//! `bulkhead bench`: loads a bulkhead for a while, and says how fast it was.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use bulkhead_client::Client;
use serde_json::json;
use tokio::task::JoinSet;

use crate::args::{Args, Bench};
use crate::load::{self, Tally};
use crate::output::{self, Failure, exit};

/// Runs the command; returns its exit code, which is that of a success unless no job was `ok`.
pub(crate) async fn run(args: &Args, bench: &Bench) -> Result<u8, Failure> {
    let payload = match &bench.request.payload_file {
        Some(file) => load::payload(Some(file))?,
        None => vec![b'x'; bench.payload_bytes],
    };
    let client = Client::connect(args.socket()).await?;
    let tally = Arc::new(Mutex::new(Tally::default()));
    let began = Instant::now();
    let until = began + bench.duration;
    let mut lanes = JoinSet::new();
    for _ in 0..bench.concurrency {
        let template = load::job(&client, &bench.request, payload.clone());
        let tally = tally.clone();
        lanes.spawn(async move {
            while Instant::now() < until {
                let (result, took) = load::timed(template.clone()).await;
                tally.lock().unwrap_or_else(PoisonError::into_inner).add(&result, took);
            }
        });
    }
    tokio::select! {
        () = async { while lanes.join_next().await.is_some() {} } => {}
        _ = tokio::signal::ctrl_c() => lanes.shutdown().await,
    }
    let seconds = began.elapsed().as_secs_f64();
    let mut tally = tally.lock().unwrap_or_else(PoisonError::into_inner);
    tally.sort();
    print(args, bench, &tally, seconds);
    Ok(if tally.latencies.is_empty() { exit::FAILED } else { exit::OK })
}

fn print(args: &Args, bench: &Bench, tally: &Tally, seconds: f64) {
    let quantile = |share| tally.quantile(share).map(|latency| latency.as_secs_f64() * 1e3);
    let shares = [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999), ("max", 1.0)];
    let rate = tally.jobs() as f64 / seconds;
    if args.json {
        let latency: serde_json::Map<_, _> =
            shares.iter().map(|(name, share)| ((*name).to_owned(), json!(quantile(*share)))).collect();
        let object = json!({
            "bulkhead": bench.request.name, "concurrency": bench.concurrency, "seconds": seconds,
            "jobs": tally.jobs(), "jobs_per_second": rate, "outcomes": tally.outcomes, "latency_ms": latency,
        });
        output::line(&object.to_string());
        return;
    }
    output::line(&format!(
        "{} jobs in {seconds:.2} s with {} at once: {rate:.0} jobs/s",
        tally.jobs(),
        bench.concurrency
    ));
    for (name, count) in &tally.outcomes {
        output::line(&format!("{count:>10}  {}", output::harmless(name)));
    }
    for (name, share) in shares {
        if let Some(latency) = quantile(share) {
            output::line(&format!("{name:>10}  {latency:.3} ms"));
        }
    }
}
