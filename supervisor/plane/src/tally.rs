//! What is counted of a bulkhead for its metrics, since the start: plain numbers in arrays of fixed size, each
//! at the place that a code names. Counting a job costs a few additions; nothing here formats or looks up.

use std::sync::Arc;
use std::time::Duration;

use bulkhead_policy::{BreakerState, RestartCause, Transition};
use bulkhead_shared::{CrashReason, Priority, RejectReason, Verdict};

/// The outcomes of the contract, by [`outcome`].
pub const OUTCOMES: [&str; 6] = ["ok", "failed", "rejected", "deadline_exceeded", "crashed", "cancelled"];

const PRIORITIES: usize = Priority::ALL.len();
// Codes begin at 1 and leave no gap.
const REJECT_REASONS: usize = RejectReason::ALL.len() + 1;
const CRASH_REASONS: usize = CrashReason::ALL.len() + 1;
const CAUSES: usize = RestartCause::ALL.len();
const BREAKER_STATES: usize = BreakerState::ALL.len();

/// The place of a verdict's outcome in [`OUTCOMES`].
pub const fn outcome(verdict: &Verdict) -> usize {
    match verdict {
        Verdict::Ok => 0,
        Verdict::Failed(_) => 1,
        Verdict::Rejected { .. } => 2,
        Verdict::DeadlineQueued | Verdict::DeadlineRunning => 3,
        Verdict::Crashed { .. } => 4,
        Verdict::Cancelled { .. } => 5,
    }
}

/// What is counted of one bulkhead, all its tenants together.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Jobs that asked to be taken, by priority.
    pub submitted: [u64; PRIORITIES],
    /// How they ended.
    pub jobs: [[u64; OUTCOMES.len()]; PRIORITIES],
    /// Why they were not taken, by the code of the reason.
    pub rejected: [[u64; REJECT_REASONS]; PRIORITIES],
    /// How their workers ended, by the code of the reason.
    pub crashed: [u64; CRASH_REASONS],
    /// By a tenant's label; the last is for all that have none.
    pub tenants: Vec<TenantTally>,
    /// How jobs ended that another bulkhead had instead. One that is no fallback any more keeps its counts.
    pub fallback: Vec<FallbackTally>,
    /// Jobs that were sent here, that a fallback has now, and whose outcome will count here.
    pub elsewhere: u64,
    /// Jobs of other bulkheads that are here as their fallback, and count there.
    pub guests: u64,
    /// Jobs given to another worker since their own had died.
    pub retries: u64,
    /// Replies for jobs that were answered already, or that the worker never had.
    pub late_replies: u64,
    /// Workers that followed another, by why.
    pub restarts: [u64; CAUSES],
    /// By state before and after.
    pub breaker: [[u64; BREAKER_STATES]; BREAKER_STATES],
    pub queue_wait: Histogram,
    pub execution: Histogram,
    pub duration: Histogram,
}

/// What is counted of the jobs that one fallback had.
#[derive(Clone, Debug)]
pub struct FallbackTally {
    pub target: Arc<str>,
    pub jobs: [u64; OUTCOMES.len()],
}

/// What is counted of the tenants under one label.
#[derive(Clone, Copy, Debug, Default)]
pub struct TenantTally {
    pub jobs: [u64; OUTCOMES.len()],
    /// Jobs that left a full queue for a newer one.
    pub evicted: u64,
}

impl Tally {
    /// Nothing yet, of so many labelled tenants.
    pub fn new(labels: usize) -> Self {
        Self { tenants: vec![TenantTally::default(); labels + 1], ..Self::default() }
    }

    /// Makes room for these fallbacks, if there is none.
    pub fn name_fallbacks(&mut self, targets: &[Arc<str>]) {
        for target in targets {
            if self.fallback.iter().all(|known| known.target != *target) {
                self.fallback.push(FallbackTally { target: target.clone(), jobs: [0; OUTCOMES.len()] });
            }
        }
    }

    /// Counts how a job ended at a fallback.
    pub fn fallback(&mut self, target: &str, verdict: &Verdict) {
        if let Some(tally) = self.fallback.iter_mut().find(|tally| &*tally.target == target) {
            tally.jobs[outcome(verdict)] += 1;
        }
    }

    #[inline]
    pub fn submit(&mut self, priority: Priority) {
        self.submitted[priority as usize] += 1;
    }

    /// Counts how a job ended that was submitted before.
    #[inline]
    pub fn end(&mut self, priority: Priority, label: u32, verdict: &Verdict) {
        let (priority, outcome) = (priority as usize, outcome(verdict));
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

    /// Counts how long a job was here that was taken, whatever became of it.
    #[inline]
    pub fn time(&mut self, queued: Duration, ran: Option<Duration>) {
        self.queue_wait.record(queued);
        if let Some(ran) = ran {
            self.execution.record(ran);
        }
        self.duration.record(queued + ran.unwrap_or_default());
    }

    pub fn breaker(&mut self, transition: &Transition) {
        self.breaker[transition.from as usize][transition.to as usize] += 1;
    }
}

/// The upper bounds of the histograms, which belong to their buckets: in nanoseconds, and in seconds as they
/// are written. Values that are larger have a bucket without a bound.
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

/// How many values lie in which bucket. Those of `latency` are for percentiles of the last minutes; these have
/// the bounds that are told, exactly, and never forget.
#[derive(Clone, Copy, Debug, Default)]
pub struct Histogram {
    /// One bucket for each of [`BOUNDS`], not cumulative, and one for what is larger.
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
    fn a_bound_belongs_to_its_bucket() {
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
    fn bounds_are_written_as_what_they_are() {
        for (nanos, text) in BOUNDS {
            let seconds: f64 = text.parse().unwrap();
            assert_eq!((seconds * 1e9).round() as u64, nanos, "{text}");
        }
        assert!(BOUNDS.is_sorted_by(|(a, _), (b, _)| a < b));
    }

    #[test]
    fn outcomes_are_those_of_verdicts() {
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
        let mut tally = Tally::new(1);
        for verdict in &verdicts {
            assert_eq!(OUTCOMES[outcome(verdict)], verdict.name());
            tally.submit(Priority::Critical);
            tally.end(Priority::Critical, 1, verdict);
        }
        assert_eq!(tally.jobs[2], [1; 6]);
        assert_eq!(tally.tenants[1].jobs, [1; 6]);
        assert_eq!(tally.tenants[0].jobs, [0; 6]);
        assert_eq!(
            (tally.rejected[2][RejectReason::QueueFull.code() as usize], tally.submitted),
            (1, [0, 0, 6])
        );
        assert_eq!(tally.crashed[CrashReason::Oom.code() as usize], 1);
    }

    #[test]
    fn codes_are_places() {
        assert!(Priority::ALL.iter().enumerate().all(|(i, &priority)| priority as usize == i));
        assert!(RestartCause::ALL.iter().enumerate().all(|(i, &cause)| cause as usize == i));
        assert!(BreakerState::ALL.iter().enumerate().all(|(i, &state)| state as usize == i));
        assert!(RejectReason::ALL.iter().all(|reason| usize::from(reason.code()) < REJECT_REASONS));
        assert!(CrashReason::ALL.iter().all(|reason| usize::from(reason.code()) < CRASH_REASONS));
    }
}
