//! Sends requests in a closed loop and measures the latencies. Requests are sent on one or more lanes. A lane sends the
//! next request only after the reply to the previous one.

use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use crate::Result;

/// Results of one round of requests.
pub(crate) struct Round {
    /// Latencies of the requests that count, in ascending order. With [`run`], all requests count.
    latencies: Vec<Duration>,
    took: Duration,
}

impl Round {
    /// Merges the results of consecutive rounds.
    pub(crate) fn merged(rounds: Vec<Self>) -> Self {
        let took = rounds.iter().map(|round| round.took).sum();
        let mut latencies: Vec<Duration> = rounds.into_iter().flat_map(|round| round.latencies).collect();
        latencies.sort_unstable();
        Self { latencies, took }
    }

    /// Returns the `share` quantile of the latencies in µs. `share` is a fraction from 0 to 1.
    pub(crate) fn quantile(&self, share: f64) -> f64 {
        let rank = (self.latencies.len() as f64 * share).ceil() as usize;
        self.latencies[rank.clamp(1, self.latencies.len()) - 1].as_secs_f64() * 1e6
    }

    /// Returns the number of counted requests per second.
    pub(crate) fn rate(&self) -> f64 {
        self.latencies.len() as f64 / self.took.as_secs_f64()
    }

    pub(crate) fn requests(&self) -> usize {
        self.latencies.len()
    }
}

/// Runs `lanes` concurrent tasks, each of which sends `total / lanes` requests (rounded down) one at a time. Must be
/// called within a `LocalSet`.
pub(crate) async fn run<F, A>(lanes: usize, total: usize, call: F) -> Result<Round>
where
    F: Fn() -> A + Clone + 'static,
    A: Future<Output = Result<()>>,
{
    run_counting(lanes, total, move || {
        let call = call();
        async move { call.await.map(|()| true) }
    })
    .await
}

/// Sends requests like [`run`], but counts only the requests for which `call` returns true.
pub(crate) async fn run_counting<F, A>(lanes: usize, total: usize, call: F) -> Result<Round>
where
    F: Fn() -> A + Clone + 'static,
    A: Future<Output = Result<bool>>,
{
    let began = Instant::now();
    let mut running = JoinSet::new();
    for _ in 0..lanes {
        let call = call.clone();
        running.spawn_local(async move {
            let mut latencies = Vec::with_capacity(total / lanes);
            for _ in 0..total / lanes {
                let began = Instant::now();
                let counts = call().await.map_err(|error| error.to_string())?;
                if counts {
                    latencies.push(began.elapsed());
                }
            }
            Ok::<_, String>(latencies)
        });
    }
    let mut latencies = Vec::with_capacity(total);
    while let Some(lane) = running.join_next().await {
        latencies.extend(lane??);
    }
    let took = began.elapsed();
    latencies.sort_unstable();
    Ok(Round { latencies, took })
}

/// Returns the median. For an even number of values, returns the larger of the two middle values.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
