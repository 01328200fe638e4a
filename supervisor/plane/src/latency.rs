//! Latency histograms: logarithmic buckets, sixteen to an octave, so that a percentile is off by at most
//! a sixteenth. Recording costs a few nanoseconds; the memory is fixed. What is shown covers the last one
//! to two minutes, so that old times do not hide new ones.

use std::time::Duration;

use bulkhead_api::{Latencies, Percentiles};
use bulkhead_policy::Time;

const PER_OCTAVE_BITS: u32 = 4;
const BUCKETS: usize = (65 - PER_OCTAVE_BITS as usize) << PER_OCTAVE_BITS;
const WINDOW: Duration = Duration::from_secs(60);

/// How long the jobs of a bulkhead ran and queued lately.
#[derive(Default)]
pub struct Latency {
    run: Windows,
    queue: Windows,
}

impl Latency {
    /// Counts a job that a worker had.
    #[inline]
    pub fn record(&mut self, now: Time, run: Duration, queue: Duration) {
        self.run.record(now, run);
        self.queue.record(now, queue);
    }

    /// What was seen lately.
    pub fn percentiles(&self) -> Latencies {
        Latencies { run: self.run.percentiles(), queue: self.queue.percentiles() }
    }
}

#[derive(Default)]
struct Windows {
    current: Histogram,
    previous: Histogram,
    began: Time,
}

impl Windows {
    fn record(&mut self, now: Time, value: Duration) {
        let age = now.since(self.began);
        if age >= WINDOW {
            let full = std::mem::take(&mut self.current);
            self.previous = if age < 2 * WINDOW { full } else { Histogram::default() };
            self.began = now;
        }
        self.current.record(value);
    }

    fn percentiles(&self) -> Percentiles {
        let total = self.current.count + self.previous.count;
        if total == 0 {
            return Percentiles::default();
        }
        let quantile = |share: f64| Some(self.quantile(((total as f64 * share).ceil() as u64).max(1)));
        Percentiles {
            p50: quantile(0.5),
            p90: quantile(0.9),
            p99: quantile(0.99),
            max: Some(self.current.max.max(self.previous.max) as f64 / 1e6),
        }
    }

    /// The value below which `rank` values lie, in milliseconds.
    fn quantile(&self, rank: u64) -> f64 {
        let mut seen = 0;
        let max = self.current.max.max(self.previous.max);
        for bucket in 0..BUCKETS {
            seen += u64::from(self.current.at(bucket)) + u64::from(self.previous.at(bucket));
            if seen >= rank {
                return upper_bound(bucket).min(max) as f64 / 1e6;
            }
        }
        max as f64 / 1e6
    }
}

#[derive(Default)]
struct Histogram {
    /// Allocated with the first value: most bulkheads of many are idle.
    buckets: Vec<u32>,
    count: u64,
    max: u64,
}

impl Histogram {
    fn record(&mut self, value: Duration) {
        let nanos = u64::try_from(value.as_nanos()).unwrap_or(u64::MAX);
        if self.buckets.is_empty() {
            self.buckets = vec![0; BUCKETS];
        }
        let bucket = &mut self.buckets[bucket_of(nanos)];
        *bucket = bucket.saturating_add(1);
        self.count += 1;
        self.max = self.max.max(nanos);
    }

    fn at(&self, bucket: usize) -> u32 {
        self.buckets.get(bucket).copied().unwrap_or(0)
    }
}

/// The bucket of a value.
#[inline]
pub fn bucket_of(nanos: u64) -> usize {
    let octave = (u64::BITS - 1).saturating_sub((nanos | 1).leading_zeros());
    if octave < PER_OCTAVE_BITS {
        return nanos as usize;
    }
    let shift = octave - PER_OCTAVE_BITS;
    ((shift as usize) << PER_OCTAVE_BITS) + (nanos >> shift) as usize
}

/// The largest value of a bucket.
pub fn upper_bound(bucket: usize) -> u64 {
    let octave = bucket >> PER_OCTAVE_BITS;
    if octave < 2 {
        return bucket as u64;
    }
    let shift = octave as u32 - 1;
    let mantissa = (bucket - ((shift as usize) << PER_OCTAVE_BITS)) as u64;
    ((u128::from(mantissa) + 1) << shift).min(u128::from(u64::MAX)) as u64 - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_lies_within_a_sixteenth_below_its_buckets_bound() {
        let mut value = 1_u64;
        while value < u64::MAX / 17 {
            let bound = upper_bound(bucket_of(value));
            assert!(bound >= value && bound - value <= value / 16 + 1, "{value}: {bound}");
            value = value * 17 / 16 + 1;
        }
        assert!(bucket_of(u64::MAX) < BUCKETS);
    }

    #[test]
    fn percentiles_of_a_ramp() {
        let mut latency = Latency::default();
        for ms in 1..=1000 {
            latency.record(Time::ZERO, Duration::from_millis(ms), Duration::ZERO);
        }
        let run = latency.percentiles().run;
        assert!((run.p50.unwrap() - 500.0).abs() < 35.0, "{run:?}");
        assert!((run.p99.unwrap() - 990.0).abs() < 65.0, "{run:?}");
        assert_eq!(run.max, Some(1000.0));
    }
}
