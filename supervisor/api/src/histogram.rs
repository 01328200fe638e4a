//! Where values lie, in logarithmic buckets: what quantiles are told from, here and in the command.

/// How much weight lies at which value, of which so many significant bits are kept: what is told lies less than
/// 1 / 2^(`KEPT_BITS` − 1) above it. It has as many buckets as the largest value needs, and none while there is no value.
#[derive(Clone, Debug, Default)]
pub struct Histogram<const KEPT_BITS: u32 = 5> {
    buckets: Vec<u64>,
    total: u64,
    max: u64,
}

impl<const KEPT_BITS: u32> Histogram<KEPT_BITS> {
    /// Values of the kept bits that are not found in the bucket before at half the width.
    const STEPS: usize = 1 << (KEPT_BITS - 1);

    /// Adds weight at a value.
    #[inline]
    pub fn record(&mut self, value: u64, weight: u64) {
        let bucket = Self::bucket_of(value);
        if self.buckets.len() <= bucket {
            self.buckets.resize(bucket + 1, 0);
        }
        self.buckets[bucket] = self.buckets[bucket].saturating_add(weight);
        self.total = self.total.saturating_add(weight);
        self.max = self.max.max(value);
    }

    /// Both together.
    pub fn and(mut self, other: &Self) -> Self {
        if self.buckets.len() < other.buckets.len() {
            self.buckets.resize(other.buckets.len(), 0);
        }
        for (own, others) in self.buckets.iter_mut().zip(&other.buckets) {
            *own = own.saturating_add(*others);
        }
        self.total = self.total.saturating_add(other.total);
        self.max = self.max.max(other.max);
        self
    }

    /// The weight of all.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// The largest value; 0 if there is none.
    pub fn max(&self) -> u64 {
        self.max
    }

    /// The value that this share of the weight lies at or below; 0 if there is none.
    pub fn quantile(&self, share: f64) -> u64 {
        let rank = ((self.total as f64 * share).ceil() as u64).max(1);
        let mut seen = 0_u64;
        let bucket = self.buckets.iter().position(|weight| {
            seen = seen.saturating_add(*weight);
            seen >= rank
        });
        bucket.map_or(self.max, |bucket| Self::upper_bound(bucket).min(self.max))
    }

    fn bucket_of(value: u64) -> usize {
        let shift = (u64::BITS - value.leading_zeros()).saturating_sub(KEPT_BITS);
        shift as usize * Self::STEPS + (value >> shift) as usize
    }

    /// The largest value of a bucket.
    fn upper_bound(bucket: usize) -> u64 {
        let shift = (bucket / Self::STEPS).saturating_sub(1);
        let kept = (bucket - shift * Self::STEPS) as u64;
        (kept << shift) + ((1 << shift) - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn every_value_has_a_bucket_that_is_hardly_wider<const KEPT_BITS: u32>() {
        let error = 1.0 / Histogram::<KEPT_BITS>::STEPS as f64;
        let mut last = 0;
        let values = (0..63).flat_map(|bit| [(1_u64 << bit) - 1, 1 << bit, (1 << bit) + (1 << bit) / 3]);
        for value in values.chain([u64::MAX]) {
            let bucket = Histogram::<KEPT_BITS>::bucket_of(value);
            let told = Histogram::<KEPT_BITS>::upper_bound(bucket);
            assert!(bucket >= last, "{value}");
            assert!(told >= value && told as f64 <= value as f64 * (1.0 + error) + 1.0, "{value}: {told}");
            assert_eq!(Histogram::<KEPT_BITS>::bucket_of(told), bucket);
            last = bucket;
        }
        let largest = Histogram::<KEPT_BITS>::bucket_of(u64::MAX);
        assert_eq!(Histogram::<KEPT_BITS>::upper_bound(largest), u64::MAX);
    }

    #[test]
    fn values_are_told_as_exactly_as_is_promised() {
        every_value_has_a_bucket_that_is_hardly_wider::<5>();
        every_value_has_a_bucket_that_is_hardly_wider::<7>();
    }

    #[test]
    fn quantiles_are_those_of_the_weight() {
        let mut histogram = Histogram::<5>::default();
        assert_eq!((histogram.quantile(0.99), histogram.max(), histogram.total()), (0, 0, 0));
        histogram.record(3, 985);
        histogram.record(7, 10);
        histogram.record(1_000_000, 5);
        assert_eq!((histogram.quantile(0.5), histogram.quantile(0.985)), (3, 3));
        assert_eq!((histogram.quantile(0.99), histogram.quantile(1.0)), (7, 1_000_000));
        let mut other = Histogram::default();
        other.record(3, u64::MAX);
        assert_eq!(histogram.and(&other).total(), u64::MAX, "sums stay where they are at their end");
    }
}
