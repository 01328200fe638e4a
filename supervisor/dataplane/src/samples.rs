//! Decides when a worker's stacks can be sampled, and delays actions until the sample is complete. Sampled workers are
//! still running a job at its deadline, or are about to be killed because they do not respond.
//!
//! The keeper needs a few milliseconds for a sample. In the meantime, for at most [`SAMPLE_TIMEOUT`], the supervisor
//! neither cancels the job nor kills the worker. `wiring/samples.rs` sends the orders and the reports.

use std::collections::HashMap;
use std::time::Duration;

use bulkhead_api::CrashId;
use bulkhead_policy::Time;
use bulkhead_shared::JobId;

use super::slab::BulkheadIndex;

/// Maximum time for sampling a worker's stacks. The limit is short because sampling can delay the cancellation of a job
/// or the killing of the worker.
pub(super) const SAMPLE_TIMEOUT: Duration = Duration::from_millis(20);

/// Minimum interval between samples of workers in the same bulkhead.
const INTERVAL: Duration = Duration::from_secs(1);

/// An action that is delayed until a worker's stacks have been sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HeldAction {
    Cancel(JobId),
    Kill,
}

/// A sample in progress. `subject` is context that the caller gets back when the sample ends.
struct Running<S> {
    due: Time,
    subject: S,
    held: Vec<HeldAction>,
}

/// Samples in progress.
pub(super) struct Samples<S> {
    /// Samples in progress, keyed by the spawn number of the sampled worker.
    running: HashMap<u64, Running<S>>,
    /// Time of the most recent sample in each bulkhead.
    last: HashMap<BulkheadIndex, Time>,
    /// ID of the crash report about a job that exceeded its deadline. Set only while the outcome of this job is being
    /// sent.
    report: Option<CrashId>,
}

impl<S> Samples<S> {
    pub(super) fn new() -> Self {
        Self { running: HashMap::new(), last: HashMap::new(), report: None }
    }

    /// Returns true if the caller is allowed to sample the worker now. In this case, the next sample in the same
    /// bulkhead is allowed one second later.
    pub(super) fn admit(&mut self, now: Time, bulkhead: BulkheadIndex, spawn: u64) -> bool {
        let is_early = self.last.get(&bulkhead).is_some_and(|last| now < *last + INTERVAL);
        if is_early || self.running.contains_key(&spawn) {
            return false;
        }
        self.last.insert(bulkhead, now);
        true
    }

    pub(super) fn begin(&mut self, now: Time, spawn: u64, subject: S) {
        let due = now + SAMPLE_TIMEOUT;
        self.running.insert(spawn, Running { due, subject, held: Vec::new() });
    }

    /// Delays an action until the worker has been sampled. Returns false if no sample is in progress, in which case the
    /// caller must perform the action immediately.
    pub(super) fn hold(&mut self, spawn: u64, action: HeldAction) -> bool {
        let Some(running) = self.running.get_mut(&spawn) else { return false };
        if !running.held.contains(&action) {
            running.held.push(action);
        }
        true
    }

    /// Ends a sample. Returns the sample's context and delayed actions, or `None` if the sample has already
    /// ended.
    pub(super) fn finish(&mut self, spawn: u64) -> Option<(S, Vec<HeldAction>)> {
        self.running.remove(&spawn).map(|running| (running.subject, running.held))
    }

    /// Returns the spawn number of a worker whose sample has exceeded its time limit.
    pub(super) fn next_late(&self, now: Time) -> Option<u64> {
        let mut late = self.running.iter().filter(|(_, running)| running.due <= now);
        late.next().map(|(spawn, _)| *spawn)
    }

    /// Returns the earliest time at which a pending sample exceeds its time limit.
    pub(super) fn next_due(&self) -> Option<Time> {
        self.running.values().map(|running| running.due).min()
    }

    /// Sets the crash report to which the outcome of a late job refers. `None` means that there is no report about the
    /// job.
    pub(super) fn set_report(&mut self, report: Option<CrashId>) {
        self.report = report;
    }

    /// Returns the crash report to which the outcome that is being sent refers.
    pub(super) fn report(&self) -> Option<CrashId> {
        self.report
    }

    /// Removes the state of a bulkhead whose index will be reused.
    pub(super) fn forget(&mut self, bulkhead: BulkheadIndex) {
        self.last.remove(&bulkhead);
    }
}

#[cfg(test)]
mod tests {
    use super::super::slab::SlabIndex;
    use super::*;

    const START: Time = Time::ZERO;

    fn after(ms: u64) -> Time {
        START + Duration::from_millis(ms)
    }

    #[test]
    fn samples_each_bulkhead_at_most_once_per_second() {
        let mut samples = Samples::<()>::new();
        let [first, second] = [0, 1].map(BulkheadIndex::from_number);
        assert!(samples.admit(START, first, 1));
        assert!(!samples.admit(after(999), first, 2) && samples.admit(after(999), second, 3));
        assert!(samples.admit(after(1000), first, 2));
        samples.begin(after(1000), 2, ());
        assert!(!samples.admit(after(3000), first, 2), "a sample of this worker is in progress");
        samples.forget(first);
        assert!(samples.admit(after(1001), first, 4));
    }

    #[test]
    fn delays_actions_on_worker_during_its_sample() {
        let mut samples = Samples::new();
        samples.begin(START, 1, "subject");
        let cancel = HeldAction::Cancel(JobId(7));
        assert!(samples.hold(1, cancel) && samples.hold(1, HeldAction::Kill));
        assert!(samples.hold(1, HeldAction::Kill) && !samples.hold(2, cancel));
        assert_eq!(samples.finish(1), Some(("subject", vec![cancel, HeldAction::Kill])));
        assert!(samples.finish(1).is_none() && !samples.hold(1, cancel));
    }

    #[test]
    fn sample_ends_after_timeout() {
        let mut samples = Samples::new();
        samples.begin(START, 1, ());
        samples.begin(after(5), 2, ());
        assert_eq!((samples.next_due(), samples.next_late(after(19))), (Some(after(20)), None));
        assert_eq!(samples.next_late(after(20)), Some(1));
        samples.finish(1);
        assert_eq!((samples.next_due(), samples.next_late(after(20))), (Some(after(25)), None));
    }
}
