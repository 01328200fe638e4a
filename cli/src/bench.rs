//! Implements `bulkhead bench`, which submits jobs to one bulkhead for a given time, and prints throughput and latency.
//! `load` builds and times each job. The separate program `bulkhead-bench` measures the cost of the supervisor itself.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use bulkhead_client::{Client, Job, JobError};
use serde_json::json;
use tokio::task::JoinSet;

use crate::args::{Args, Bench};
use crate::load::{self, JobStats};
use crate::output::{self, Failure, exit};
use crate::payload;

/// Runs the command. Returns 69 if the supervisor was unreachable for any job, 0 if any job was `ok`, and otherwise
/// the exit code of the last job. After ^C, returns a separate exit code.
pub(crate) async fn run(args: &Args, bench: &Bench) -> Result<u8, Failure> {
    let payload = match &bench.request.payload_file {
        Some(file) => payload::read(file)?,
        None => vec![b'x'; bench.payload_bytes],
    };
    let client = Client::connect(args.jobs_socket()?).await?;
    let shared = Arc::new(Mutex::new(BenchState::default()));
    let start = Instant::now();
    let deadline = start + bench.duration;
    let mut loops = JoinSet::new();
    for _ in 0..bench.concurrency {
        let template = load::job(&client, &bench.request, payload.clone());
        loops.spawn(submit_loop(template, deadline, shared.clone()));
    }
    let is_interrupted = tokio::select! {
        () = async { while loops.join_next().await.is_some() {} } => false,
        _ = tokio::signal::ctrl_c() => {
            loops.shutdown().await;
            true
        }
    };
    let seconds = start.elapsed().as_secs_f64();
    let state = shared.lock().unwrap_or_else(PoisonError::into_inner);
    let code = match state.last_failure {
        _ if is_interrupted => exit::CANCELLED,
        _ if state.is_unreachable => exit::UNREACHABLE,
        Some(code) if state.stats.latencies.total() == 0 => code,
        _ => exit::OK,
    };
    print(args, bench, &state.stats, seconds).map_err(|failure| failure.or_code(code))?;
    Ok(code)
}

#[derive(Default)]
struct BenchState {
    stats: JobStats,
    /// Exit code of the last job whose outcome was not `ok`.
    last_failure: Option<u8>,
    /// True if the supervisor was unreachable for any job.
    is_unreachable: bool,
}

async fn submit_loop(template: Job, deadline: Instant, state: Arc<Mutex<BenchState>>) {
    while Instant::now() < deadline {
        let (result, took) = load::timed(template.clone()).await;
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        state.stats.add(&result, took);
        if let Err(error) = result {
            state.last_failure = Some(error.exit_code());
            state.is_unreachable |= error.outcome().is_none();
            // A permanent rejection, for example because the bulkhead name is unknown, applies to all further jobs as
            // well.
            if matches!(error, JobError::Rejected(_))
                && !error.is_retryable()
                && error.retry_after().is_none()
            {
                return;
            }
        }
    }
}

fn print(args: &Args, bench: &Bench, stats: &JobStats, seconds: f64) -> Result<(), Failure> {
    let shares = [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999), ("max", 1.0)];
    let rate = stats.jobs() as f64 / seconds;
    if args.json {
        let latency: serde_json::Map<_, _> = shares
            .iter()
            .map(|(name, share)| ((*name).to_owned(), json!(stats.quantile_ms(*share))))
            .collect();
        let object = json!({
            "bulkhead": bench.request.name, "concurrency": bench.concurrency, "seconds": seconds,
            "jobs": stats.jobs(), "jobs_per_second": rate, "outcomes": stats.outcomes, "latency_ms": latency,
        });
        return output::json(&object);
    }
    output::line(&format!(
        "{} jobs in {seconds:.2} s with {} in flight: {rate:.0} jobs/s",
        stats.jobs(),
        bench.concurrency
    ))?;
    for (name, count) in &stats.outcomes {
        output::line(&format!("{count:>10}  {}", output::escape(name)))?;
    }
    for (name, share) in shares {
        if let Some(latency) = stats.quantile_ms(share) {
            output::line(&format!("{name:>10}  {latency:.3} ms"))?;
        }
    }
    Ok(())
}
