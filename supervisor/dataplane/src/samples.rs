//! Stacks of workers that are being taken: of workers that run a job at its deadline, and of workers that are about
//! to be killed because they do not respond.
//!
//! The keeper takes the stacks within some milliseconds. Until then, the supervisor neither cancels the job nor kills
//! the worker, but not longer than [`SAMPLE_TIMEOUT`]. `wiring/samples.rs` sends the orders and the reports.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use bulkhead_api::{CrashId, CrashJob};
use bulkhead_plane::program::Program;
use bulkhead_policy::{PostMortem, Time, WorkerId};
use bulkhead_shared::JobId;

use super::crashes::ReportSlot;
use super::slab::{BulkheadIndex, CompartmentIndex};

/// Maximum time by which a cancellation or a kill is delayed.
pub(super) const SAMPLE_TIMEOUT: Duration = Duration::from_millis(20);

/// Minimum time between the stacks of two workers of a bulkhead.
const INTERVAL: Duration = Duration::from_secs(1);

/// An action that waits until the stacks of a worker have been taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HeldAction {
    /// Cancel a job of the worker.
    Cancel(JobId),
    /// Kill the worker.
    Kill,
}

/// What is needed when the stacks of a worker have been taken.
pub(super) struct SampleSubject {
    pub(super) compartment: CompartmentIndex,
    pub(super) worker: WorkerId,
    /// File that receives the stacks.
    pub(super) file: OwnedFd,
    pub(super) program: Arc<Program>,
    /// Set if a job of the worker is late. Otherwise, the worker does not respond, and its death is reported.
    pub(super) late: Option<Box<LateJob>>,
}

/// A report about a job that is late, without the stacks.
pub(super) struct LateJob {
    pub(super) slot: ReportSlot,
    pub(super) post: PostMortem,
    pub(super) job: CrashJob,
}

/// A worker whose stacks are being taken. `subject` is what the caller needs when they have been taken.
struct Running<S> {
    due: Time,
    subject: S,
    held: Vec<HeldAction>,
}

/// Workers whose stacks are being taken.
pub(super) struct Samples<S> {
    /// Workers by spawn number.
    running: HashMap<u64, Running<S>>,
    /// Time at which stacks were last taken in a bulkhead.
    last: HashMap<BulkheadIndex, Time>,
    /// The job that was last found to be late, and its report.
    late_job: Option<(JobId, CrashId)>,
}

impl<S> Samples<S> {
    pub(super) fn new() -> Self {
        Self { running: HashMap::new(), last: HashMap::new(), late_job: None }
    }

    /// Returns true if the stacks of this worker can be taken now. From then on, those of no other worker of the
    /// bulkhead can be taken for a second.
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

    /// Keeps an action until the stacks of the worker have been taken. Returns false if the action must be performed
    /// now.
    pub(super) fn hold(&mut self, spawn: u64, action: HeldAction) -> bool {
        let Some(running) = self.running.get_mut(&spawn) else { return false };
        if !running.held.contains(&action) {
            running.held.push(action);
        }
        true
    }

    /// Ends the wait for the stacks of a worker. Returns `None` if it has ended before.
    pub(super) fn finish(&mut self, spawn: u64) -> Option<(S, Vec<HeldAction>)> {
        self.running.remove(&spawn).map(|running| (running.subject, running.held))
    }

    /// Returns a worker for which the wait ends now.
    pub(super) fn next_late(&self, now: Time) -> Option<u64> {
        let mut late = self.running.iter().filter(|(_, running)| running.due <= now);
        late.next().map(|(spawn, _)| *spawn)
    }

    /// Returns the time at which the next wait ends.
    pub(super) fn next_due(&self) -> Option<Time> {
        self.running.values().map(|running| running.due).min()
    }

    /// Remembers the report about a job, because the outcome of the job names it.
    pub(super) fn set_report(&mut self, job: JobId, report: CrashId) {
        self.late_job = Some((job, report));
    }

    /// Returns the report about a job that was late.
    pub(super) fn report_of(&self, job: Option<JobId>) -> Option<CrashId> {
        let (late, report) = self.late_job?;
        (job == Some(late)).then_some(report)
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
    fn stacks_are_taken_once_a_second_for_each_bulkhead() {
        let mut samples = Samples::<()>::new();
        let [first, second] = [0, 1].map(BulkheadIndex::from_number);
        assert!(samples.admit(START, first, 1));
        assert!(!samples.admit(after(999), first, 2) && samples.admit(after(999), second, 3));
        assert!(samples.admit(after(1000), first, 2));
        samples.begin(after(1000), 2, ());
        assert!(!samples.admit(after(3000), first, 2), "the stacks are being taken");
        samples.forget(first);
        assert!(samples.admit(after(1001), first, 4));
    }

    #[test]
    fn actions_wait_for_the_stacks_of_their_worker() {
        let mut samples = Samples::new();
        samples.begin(START, 1, "subject");
        let cancel = HeldAction::Cancel(JobId(7));
        assert!(samples.hold(1, cancel) && samples.hold(1, HeldAction::Kill));
        assert!(samples.hold(1, HeldAction::Kill) && !samples.hold(2, cancel));
        assert_eq!(samples.finish(1), Some(("subject", vec![cancel, HeldAction::Kill])));
        assert!(samples.finish(1).is_none() && !samples.hold(1, cancel));
    }

    #[test]
    fn wait_ends_after_the_time_limit() {
        let mut samples = Samples::new();
        samples.begin(START, 1, ());
        samples.begin(after(5), 2, ());
        assert_eq!((samples.next_due(), samples.next_late(after(19))), (Some(after(20)), None));
        assert_eq!(samples.next_late(after(20)), Some(1));
        samples.finish(1);
        assert_eq!((samples.next_due(), samples.next_late(after(20))), (Some(after(25)), None));
    }

    #[test]
    fn only_the_outcome_of_the_late_job_names_the_report() {
        let mut samples = Samples::<()>::new();
        let id = CrashId::new(std::time::SystemTime::UNIX_EPOCH, 1);
        samples.set_report(JobId(7), id);
        assert_eq!(samples.report_of(Some(JobId(7))), Some(id));
        assert!(samples.report_of(Some(JobId(8))).is_none() && samples.report_of(None).is_none());
    }
}
