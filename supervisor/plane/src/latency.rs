//! Keeps a bulkhead's run times and queue times over the current and the previous minute. The data plane records each
//! job that ran, and shows the percentiles in snapshots. The cumulative counters for the metrics are in
//! `bulkhead_counters`.

use std::time::Duration;

use bulkhead_api::{Histogram, Latencies, Percentiles};
use bulkhead_policy::Time;

use crate::windows::WindowPair;

/// Run times and queue times of a bulkhead's jobs in the current and the previous minute.
#[derive(Default)]
pub struct Latency(WindowPair<Histograms, 60>);

/// Histograms of the run times and queue times in one window, in nanoseconds.
#[derive(Default)]
struct Histograms {
    run: Histogram,
    queue: Histogram,
}

impl Latency {
    /// Records the run time and the queue time of a job that ran.
    #[inline]
    pub fn record(&mut self, now: Time, run: Duration, queue: Duration) {
        let nanos = |value: Duration| u64::try_from(value.as_nanos()).unwrap_or(u64::MAX);
        self.0.roll(now);
        self.0.current.run.record(nanos(run), 1);
        self.0.current.queue.record(nanos(queue), 1);
    }

    /// Returns the percentiles over the current and the previous minute.
    pub fn percentiles(&self) -> Latencies {
        let [current, previous] = self.0.both();
        Latencies {
            run: percentiles(&current.run.clone().merged(&previous.run)),
            queue: percentiles(&current.queue.clone().merged(&previous.queue)),
        }
    }
}

/// Returns the percentiles in milliseconds.
fn percentiles(histogram: &Histogram) -> Percentiles {
    let millis = |nanos: u64| (histogram.total() > 0).then_some(nanos as f64 / 1e6);
    let quantile = |share| millis(histogram.quantile(share));
    Percentiles { p50: quantile(0.5), p90: quantile(0.9), p99: quantile(0.99), max: millis(histogram.max()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latency_percentiles_match_uniform_values() {
        let mut latency = Latency::default();
        for ms in 1..=1000 {
            latency.record(Time::ZERO, Duration::from_millis(ms), Duration::ZERO);
        }
        let run = latency.percentiles().run;
        assert!((run.p50.unwrap() - 500.0).abs() < 35.0, "{run:?}");
        assert!((run.p99.unwrap() - 990.0).abs() < 65.0, "{run:?}");
        assert_eq!(run.max, Some(1000.0));
    }

    #[test]
    fn latency_window_discards_old_values() {
        let mut latency = Latency::default();
        assert_eq!(latency.percentiles().run.max, None);
        for (second, ran_ms, max_ms) in [(50, 9, 9.0), (110, 5, 9.0), (130, 3, 5.0), (500, 1, 1.0)] {
            let at = Time::ZERO + Duration::from_secs(second);
            latency.record(at, Duration::from_millis(ran_ms), Duration::ZERO);
            assert_eq!(latency.percentiles().run.max, Some(max_ms), "{second}");
        }
    }
}
