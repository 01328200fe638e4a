//! Counts a bulkhead's jobs, restarts and breaker transitions for the metrics. The counters are integers in fixed-size
//! arrays, indexed by codes, so that counting a job takes only a few additions. The data plane counts, and the control
//! plane writes the metrics page. `latency` keeps the values of the last minutes.

use std::sync::Arc;
use std::time::Duration;

use bulkhead_policy::{BreakerState, RestartCause, Transition};
use bulkhead_shared::{CrashReason, Priority, RejectReason, Verdict};

/// Outcome names used in metrics, indexed by [`outcome_index`].
pub const OUTCOMES: [&str; 6] = ["ok", "failed", "rejected", "deadline_exceeded", "crashed", "cancelled"];

const PRIORITIES: usize = Priority::ALL.len();
// Reason codes are contiguous and start at 1, so the array has one entry more than there are reasons.
const REJECT_REASONS: usize = RejectReason::ALL.len() + 1;
const CRASH_REASONS: usize = CrashReason::ALL.len() + 1;
const CAUSES: usize = RestartCause::ALL.len();
const BREAKER_STATES: usize = BreakerState::ALL.len();

/// Returns the index of a verdict's outcome in [`OUTCOMES`].
pub const fn outcome_index(verdict: &Verdict) -> usize {
    match verdict {
        Verdict::Ok => 0,
        Verdict::Failed(_) => 1,
        Verdict::Rejected { .. } => 2,
        Verdict::DeadlineQueued | Verdict::DeadlineRunning => 3,
        Verdict::Crashed { .. } => 4,
        Verdict::Cancelled { .. } => 5,
    }
}

/// Counters for one bulkhead. They include the jobs of all tenants.
#[derive(Clone, Debug, Default)]
pub struct BulkheadCounters {
    /// Number of submitted jobs, by priority.
    pub submitted: [u64; PRIORITIES],
    /// Number of jobs that have ended, by priority and outcome.
    pub jobs: [[u64; OUTCOMES.len()]; PRIORITIES],
    /// Number of rejected jobs, by priority and reason code.
    pub rejected: [[u64; REJECT_REASONS]; PRIORITIES],
    /// Number of crashed jobs, by reason code.
    pub crashed: [u64; CRASH_REASONS],
    /// Counters for each tenant label. The last entry covers all tenants without a label.
    pub tenants: Vec<TenantCounters>,
    /// Outcomes of the jobs passed on to each fallback. The counts are kept even if a reload removes the fallback.
    pub fallback: Vec<FallbackCounters>,
    /// Number of this bulkhead's jobs that are currently in a fallback. Each job's outcome will be counted for
    /// this bulkhead.
    pub elsewhere: u64,
    /// Number of jobs passed on to this bulkhead by bulkheads that use it as a fallback. Each job's outcome is
    /// counted for the original bulkhead.
    pub guests: u64,
    /// Number of retries of jobs whose workers died.
    pub retries: u64,
    /// Number of worker replies that were ignored because the job already had an outcome or was never sent to the
    /// worker.
    pub late_replies: u64,
    /// Number of worker restarts, by cause.
    pub restarts: [u64; CAUSES],
    /// Number of breaker transitions, by old state and new state.
    pub breaker: [[u64; BREAKER_STATES]; BREAKER_STATES],
    pub queue_wait: Histogram,
    pub execution: Histogram,
    pub duration: Histogram,
}

/// Number of jobs passed on to one fallback, by outcome.
#[derive(Clone, Debug)]
pub struct FallbackCounters {
    pub target: Arc<str>,
    pub jobs: [u64; OUTCOMES.len()],
}

/// Counters for one tenant label.
#[derive(Clone, Copy, Debug, Default)]
pub struct TenantCounters {
    pub jobs: [u64; OUTCOMES.len()],
    /// Number of jobs evicted from a full queue to make room for a newer job.
    pub evicted: u64,
}

impl BulkheadCounters {
    /// Creates counters that start at zero. `labels` is the number of tenant labels.
    pub fn new(labels: usize) -> Self {
        Self { tenants: vec![TenantCounters::default(); labels + 1], ..Self::default() }
    }

    /// Adds counters for each fallback in `targets` that does not have counters yet.
    pub fn add_fallbacks(&mut self, targets: &[Arc<str>]) {
        for target in targets {
            if self.fallback.iter().all(|known| known.target != *target) {
                self.fallback.push(FallbackCounters { target: target.clone(), jobs: [0; OUTCOMES.len()] });
            }
        }
    }

    /// Counts the outcome of a job that was passed on to the fallback `target`.
    pub fn count_fallback(&mut self, target: &str, verdict: &Verdict) {
        if let Some(counters) = self.fallback.iter_mut().find(|counters| &*counters.target == target) {
            counters.jobs[outcome_index(verdict)] += 1;
        }
    }

    #[inline]
    pub fn count_submitted(&mut self, priority: Priority) {
        self.submitted[priority as usize] += 1;
    }

    /// Counts the outcome of a submitted job.
    #[inline]
    pub fn count_outcome(&mut self, priority: Priority, label: u32, verdict: &Verdict) {
        let (priority, outcome) = (priority as usize, outcome_index(verdict));
        self.jobs[priority][outcome] += 1;
        if let Some(tenant) = self.tenants.get_mut(label as usize) {
            tenant.jobs[outcome] += 1;
        }
        match verdict {
            Verdict::Rejected { reason, .. } => self.rejected[priority][reason.code() as usize] += 1,
            Verdict::Crashed { reason, .. } => self.crashed[reason.code() as usize] += 1,
            _ => {}
        }
    }

    /// Records how long an accepted job waited and ran, regardless of its outcome.
    #[inline]
    pub fn record_times(&mut self, queued: Duration, ran: Option<Duration>) {
        self.queue_wait.record(queued);
        if let Some(ran) = ran {
            self.execution.record(ran);
        }
        self.duration.record(queued + ran.unwrap_or_default());
    }

    pub fn count_transition(&mut self, transition: &Transition) {
        self.breaker[transition.from as usize][transition.to as usize] += 1;
    }
}

/// Inclusive upper bounds of the histogram buckets, each as a number of nanoseconds and as text in seconds. Values
/// above the last bound are counted in an additional bucket.
pub const BOUNDS: [(u64, &str); 21] = [
    (10_000, "1e-05"),
    (25_000, "2.5e-05"),
    (50_000, "5e-05"),
    (100_000, "0.0001"),
    (250_000, "0.00025"),
    (500_000, "0.0005"),
    (1_000_000, "0.001"),
    (2_500_000, "0.0025"),
    (5_000_000, "0.005"),
    (10_000_000, "0.01"),
    (25_000_000, "0.025"),
    (50_000_000, "0.05"),
    (100_000_000, "0.1"),
    (250_000_000, "0.25"),
    (500_000_000, "0.5"),
    (1_000_000_000, "1.0"),
    (2_500_000_000, "2.5"),
    (5_000_000_000, "5.0"),
    (10_000_000_000, "10.0"),
    (30_000_000_000, "30.0"),
    (60_000_000_000, "60.0"),
];

/// A histogram of durations with the bucket bounds in [`BOUNDS`]. Unlike the histograms in the `latency` module, which
/// provide percentiles for the last one to two minutes, its counts never decrease.
#[derive(Clone, Copy, Debug, Default)]
pub struct Histogram {
    /// Number of values in each bucket. The counts are not cumulative. The last entry counts the values above the last
    /// bound in [`BOUNDS`].
    pub buckets: [u64; BOUNDS.len() + 1],
    pub sum_ns: u128,
}

impl Histogram {
    fn record(&mut self, value: Duration) {
        let nanos = u64::try_from(value.as_nanos()).unwrap_or(u64::MAX);
        self.buckets[BOUNDS.partition_point(|&(bound, _)| bound < nanos)] += 1;
        self.sum_ns += u128::from(nanos);
    }
}

#[cfg(test)]
mod tests {
    use bulkhead_shared::{Executed, Fault, HandlerFailure};

    use super::*;

    #[test]
    fn histogram_bucket_includes_its_upper_bound() {
        let mut histogram = Histogram::default();
        for (bound, _) in BOUNDS {
            histogram.record(Duration::from_nanos(bound));
        }
        assert!(histogram.buckets[..BOUNDS.len()].iter().all(|&count| count == 1), "{histogram:?}");
        for (bound, _) in BOUNDS {
            histogram.record(Duration::from_nanos(bound + 1));
        }
        histogram.record(Duration::ZERO);
        histogram.record(Duration::MAX);
        assert!(histogram.buckets.iter().all(|&count| count == 2), "{histogram:?}");
    }

    #[test]
    fn histogram_bound_texts_match_their_nanoseconds() {
        for (nanos, text) in BOUNDS {
            let seconds: f64 = text.parse().unwrap();
            assert_eq!((seconds * 1e9).round() as u64, nanos, "{text}");
        }
        assert!(BOUNDS.is_sorted_by(|(a, _), (b, _)| a < b));
    }

    #[test]
    fn outcome_counters_match_verdicts() {
        let verdicts = [
            Verdict::Ok,
            Verdict::Failed(HandlerFailure {
                code: String::new(),
                message: String::new(),
                retryable: false,
                fault: Fault::Caller,
            }),
            Verdict::rejected(RejectReason::QueueFull),
            Verdict::DeadlineRunning,
            Verdict::Crashed { reason: CrashReason::Oom, status: None, message: String::new() },
            Verdict::Cancelled { executed: Executed::No },
        ];
        let mut counters = BulkheadCounters::new(1);
        for verdict in &verdicts {
            assert_eq!(OUTCOMES[outcome_index(verdict)], verdict.name());
            counters.count_submitted(Priority::Critical);
            counters.count_outcome(Priority::Critical, 1, verdict);
        }
        assert_eq!(counters.jobs[2], [1; 6]);
        assert_eq!(counters.tenants[1].jobs, [1; 6]);
        assert_eq!(counters.tenants[0].jobs, [0; 6]);
        assert_eq!(
            (counters.rejected[2][RejectReason::QueueFull.code() as usize], counters.submitted),
            (1, [0, 0, 6])
        );
        assert_eq!(counters.crashed[CrashReason::Oom.code() as usize], 1);
    }

    #[test]
    fn enum_codes_are_valid_counter_indices() {
        assert!(Priority::ALL.iter().enumerate().all(|(i, &priority)| priority as usize == i));
        assert!(RestartCause::ALL.iter().enumerate().all(|(i, &cause)| cause as usize == i));
        assert!(BreakerState::ALL.iter().enumerate().all(|(i, &state)| state as usize == i));
        assert!(RejectReason::ALL.iter().all(|reason| usize::from(reason.code()) < REJECT_REASONS));
        assert!(CrashReason::ALL.iter().all(|reason| usize::from(reason.code()) < CRASH_REASONS));
    }
}
