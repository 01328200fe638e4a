//! Stores a distribution of values in logarithmic buckets, from which the supervisor and the `bulkhead` command compute
//! quantiles. The histograms on the metrics page have fixed buckets, and are defined in the `plane` crate.

use std::ops::Range;

/// Number of buckets in an allocation unit. Memory is allocated only for whole units.
const BUCKETS_PER_ALLOCATION: usize = 8;

/// A weighted histogram that keeps the `PRECISION_BITS` most significant bits of each value. A quantile
/// exceeds the exact value by less than 1 / 2^(`PRECISION_BITS` − 1) of the value. Memory is allocated only
/// for the buckets between the smallest and the largest value.
#[derive(Clone, Debug, Default)]
pub struct Histogram<const PRECISION_BITS: u32 = 5> {
    /// Index of the first allocated bucket.
    first: usize,
    buckets: Vec<u64>,
    total: u64,
    max: u64,
}

impl<const PRECISION_BITS: u32> Histogram<PRECISION_BITS> {
    /// Number of buckets per doubling of the value.
    const STEPS: usize = 1 << (PRECISION_BITS - 1);

    /// Adds `weight` to the bucket that contains `value`.
    #[inline]
    pub fn record(&mut self, value: u64, weight: u64) {
        let bucket = Self::bucket_of(value);
        if !self.range().contains(&bucket) {
            self.allocate(bucket..bucket + 1);
        }
        let weights = &mut self.buckets[bucket - self.first];
        *weights = weights.saturating_add(weight);
        self.total = self.total.saturating_add(weight);
        self.max = self.max.max(value);
    }

    /// Returns a histogram that contains the values of both histograms.
    pub fn merged(mut self, other: &Self) -> Self {
        if !other.buckets.is_empty() {
            self.allocate(other.range());
            let from = other.first - self.first;
            for (own, others) in self.buckets[from..].iter_mut().zip(&other.buckets) {
                *own = own.saturating_add(*others);
            }
        }
        self.total = self.total.saturating_add(other.total);
        self.max = self.max.max(other.max);
        self
    }

    /// Returns the total weight.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Returns the largest value, or 0 if the histogram is empty.
    pub fn max(&self) -> u64 {
        self.max
    }

    /// Returns the quantile for `share`, a fraction from 0 to 1. The result is rounded up to the precision of the
    /// buckets. Returns 0 if the histogram is empty.
    pub fn quantile(&self, share: f64) -> u64 {
        let rank = ((self.total as f64 * share).ceil() as u64).max(1);
        let mut cumulative = 0_u64;
        let bucket = self.buckets.iter().position(|weight| {
            cumulative = cumulative.saturating_add(*weight);
            cumulative >= rank
        });
        bucket.map_or(self.max, |bucket| Self::upper_bound(self.first + bucket).min(self.max))
    }

    /// Returns the indices of the allocated buckets.
    #[inline]
    fn range(&self) -> Range<usize> {
        self.first..self.first + self.buckets.len()
    }

    /// Allocates the buckets in the range `wanted`. Extends the range at both ends to whole allocation units.
    #[cold]
    fn allocate(&mut self, wanted: Range<usize>) {
        let allocated = if self.buckets.is_empty() { wanted.clone() } else { self.range() };
        let first = allocated.start.min(wanted.start) / BUCKETS_PER_ALLOCATION * BUCKETS_PER_ALLOCATION;
        let end = allocated.end.max(wanted.end).next_multiple_of(BUCKETS_PER_ALLOCATION);
        let mut buckets = vec![0; end - first];
        buckets[allocated.start - first..][..self.buckets.len()].copy_from_slice(&self.buckets);
        (self.first, self.buckets) = (first, buckets);
    }

    fn bucket_of(value: u64) -> usize {
        let shift = (u64::BITS - value.leading_zeros()).saturating_sub(PRECISION_BITS);
        shift as usize * Self::STEPS + (value >> shift) as usize
    }

    /// Returns the largest value that falls into a bucket.
    fn upper_bound(bucket: usize) -> u64 {
        let shift = (bucket / Self::STEPS).saturating_sub(1);
        let significant = (bucket - shift * Self::STEPS) as u64;
        (significant << shift) + ((1 << shift) - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn buckets_contain_their_values<const PRECISION_BITS: u32>() {
        let error = 1.0 / Histogram::<PRECISION_BITS>::STEPS as f64;
        let mut last = 0;
        let values = (0..63).flat_map(|bit| [(1_u64 << bit) - 1, 1 << bit, (1 << bit) + (1 << bit) / 3]);
        for value in values.chain([u64::MAX]) {
            let bucket = Histogram::<PRECISION_BITS>::bucket_of(value);
            let actual = Histogram::<PRECISION_BITS>::upper_bound(bucket);
            assert!(bucket >= last, "{value}");
            assert!(
                actual >= value && actual as f64 <= value as f64 * (1.0 + error) + 1.0,
                "{value}: {actual}"
            );
            assert_eq!(Histogram::<PRECISION_BITS>::bucket_of(actual), bucket);
            last = bucket;
        }
        let largest = Histogram::<PRECISION_BITS>::bucket_of(u64::MAX);
        assert_eq!(Histogram::<PRECISION_BITS>::upper_bound(largest), u64::MAX);
    }

    #[test]
    fn histogram_buckets_have_documented_precision() {
        buckets_contain_their_values::<5>();
        buckets_contain_their_values::<7>();
    }

    #[test]
    fn histogram_accepts_values_in_any_order() {
        let values = [40_000, 41_000, 900, 70_000_000, 0, u64::MAX, 5_000];
        let mut sorted = values;
        sorted.sort_unstable();
        let mut both = (Histogram::<5>::default(), Histogram::<5>::default());
        for (at, value) in values.into_iter().enumerate() {
            both.0.record(value, 1);
            if at == 1 {
                assert_eq!(both.0.buckets.len(), BUCKETS_PER_ALLOCATION, "close values share an allocation");
            }
            let mut one = Histogram::default();
            one.record(value, 1);
            both.1 = if at % 2 == 0 { both.1.merged(&one) } else { one.merged(&both.1) };
        }
        for cumulative in [both.0, both.1] {
            assert_eq!((cumulative.total(), cumulative.max()), (7, u64::MAX));
            for (rank, value) in sorted.into_iter().enumerate() {
                let actual = cumulative.quantile((rank + 1) as f64 / 7.0);
                assert_eq!(Histogram::<5>::bucket_of(actual), Histogram::<5>::bucket_of(value), "{rank}");
            }
        }
        let neither = Histogram::<5>::default().merged(&Histogram::default());
        assert!(neither.buckets.is_empty());
    }

    #[test]
    fn histogram_quantiles_respect_weights() {
        let mut histogram = Histogram::<5>::default();
        assert_eq!((histogram.quantile(0.99), histogram.max(), histogram.total()), (0, 0, 0));
        histogram.record(3, 985);
        histogram.record(7, 10);
        histogram.record(1_000_000, 5);
        assert_eq!((histogram.quantile(0.5), histogram.quantile(0.985)), (3, 3));
        assert_eq!((histogram.quantile(0.99), histogram.quantile(1.0)), (7, 1_000_000));
        let mut other = Histogram::default();
        other.record(3, u64::MAX);
        assert_eq!(histogram.merged(&other).total(), u64::MAX, "the total saturates");
    }
}
