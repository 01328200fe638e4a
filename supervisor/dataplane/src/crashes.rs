//! Decides which deaths are reported, and collects the contents of each crash report. `wiring::reports` and
//! `wiring::samples` call this file. The control plane adds the last output of the process and stores the report.
//!
//! A report contains the state of a worker at the time of its death, including the payloads that are still in memory.
//! Each crash costs a process, so crashes are usually rare. If crashes are frequent, most of them are only counted.

mod start_failures;

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bulkhead_api::{
    Cause, Confinement, CrashId, CrashJob, CrashReport, NativeCrash, PAYLOAD_BYTES_MAX, PAYLOADS_BYTES_MAX,
    Stage, Victim,
};
use bulkhead_keeper::Usage;
use bulkhead_plane::command::DroppableNotice;
use bulkhead_plane::crash::{
    self, CrashRecord, REPORTS_WAITING_MAX, RecordKind, cause_of, late_job_cause, recorded_signal,
};
use bulkhead_plane::program::Program;
use bulkhead_policy::{
    Bulkhead, Death, Ending, HeldJob, JobOutcome, KillReason, OperatorEvent, PostMortem, Time, WorkerId,
};
use bulkhead_shared::{JobId, Verdict};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::JobData;
use super::slab::BulkheadIndex;
use start_failures::StartFailures;

/// Maximum burst of crash reports per bulkhead. After a burst, the limit is one report per second.
const REPORT_BURST_MAX: u32 = 10;

/// Minimum interval between events about crashes without a report.
const REPEAT_INTERVAL: Duration = Duration::from_secs(10);

pub(super) struct Crashes {
    /// Number of crash reports created so far. Used to generate IDs.
    reports: u32,
    /// Permits for storing crash reports. Each report holds a permit until it has been stored.
    permits: Arc<Semaphore>,
    /// State of crash reporting for each bulkhead that has had a crash.
    by_bulkhead: HashMap<BulkheadIndex, BulkheadCrashes>,
    /// Total number of crashes that have no report and have not been included in an event yet.
    skipped: u64,
    /// PID of the process whose death is currently being handled, and the ID of the crash report about this death.
    /// Events about the death contain the ID.
    last_report: Option<(u32, CrashId)>,
    /// ID, operation and tenant of the most recent job that crashed or exceeded its deadline. Kept because the next
    /// event might concern this job.
    last_failed: Option<(JobId, Box<str>, Box<str>)>,
}

#[derive(Default)]
struct BulkheadCrashes {
    limit: ReportLimit,
    /// Deaths of workers that occurred before the workers became ready.
    start_failures: StartFailures,
}

/// A crash after which a job is retried.
pub(super) struct RetriedCrash {
    /// Number of attempts in the bulkhead so far, including the attempt that crashed.
    attempts: u32,
    report: Option<CrashId>,
}

/// Permission to create a single crash report.
pub(super) struct ReportSlot {
    id: CrashId,
    at: SystemTime,
    /// Number of start failures with the same cause so far.
    count: u32,
    permit: OwnedSemaphorePermit,
}

impl ReportSlot {
    pub(super) fn id(&self) -> CrashId {
        self.id
    }
}

/// Rate limit for crash reports (token bucket).
#[derive(Debug)]
struct ReportLimit {
    left: u32,
    /// Time at which the bucket was last refilled.
    filled_to: Time,
    /// Number of crashes that have no report and have not been included in an event yet.
    skipped: u64,
    reported_at: Option<Time>,
}

impl Default for ReportLimit {
    fn default() -> Self {
        Self { left: REPORT_BURST_MAX, filled_to: Time::ZERO, skipped: 0, reported_at: None }
    }
}

impl ReportLimit {
    fn take(&mut self, now: Time) -> bool {
        let seconds = now.since(self.filled_to).as_secs();
        self.filled_to = self.filled_to + Duration::from_secs(seconds);
        self.left =
            self.left.saturating_add(u32::try_from(seconds).unwrap_or(u32::MAX)).min(REPORT_BURST_MAX);
        let has_some = self.left > 0;
        self.left -= u32::from(has_some);
        has_some
    }

    /// If an event about crashes without a report is due, returns the number of such crashes since the last event.
    fn take_unreported(&mut self, now: Time) -> Option<u64> {
        let is_due = self.reported_at.is_none_or(|at| now.since(at) >= REPEAT_INTERVAL);
        if self.skipped == 0 || !is_due {
            return None;
        }
        self.reported_at = Some(now);
        Some(std::mem::take(&mut self.skipped))
    }
}

/// Circumstances of a crash, or of a job that was still running at its deadline.
pub(super) struct CrashContext {
    victim: Victim,
    cause: Cause,
    stage: Stage,
    culprit: Option<usize>,
    usage: Option<Usage>,
    stderr_tail: Option<String>,
    /// Reason why the report contains no backtrace. Set if a signal killed the process and there is no crash record.
    native: Option<NativeCrash>,
    record: Option<CrashRecord>,
    /// Stacks of the worker's threads, if the worker wrote them as text.
    runtime_stack: Option<String>,
}

/// Stacks of a hung worker or program, or the reason why no stacks were recorded.
pub(super) struct Hang {
    /// Stacks of all threads, as recorded by the keeper.
    record: Option<CrashRecord>,
    /// Reason why the keeper could not record the stacks.
    native: Option<NativeCrash>,
    /// Stacks of the worker's threads, if the worker wrote them as text.
    runtime_stack: Option<String>,
}

impl Hang {
    pub(super) fn new(
        record: Option<CrashRecord>,
        native: Option<NativeCrash>,
        runtime_stack: Option<String>,
    ) -> Self {
        Self { record, native, runtime_stack }
    }
}

impl CrashContext {
    /// Returns the circumstances of a worker's death, or `None` if the worker exited normally. `file` contains the
    /// worker's crash record, if the worker can write one. `hang` contains the stacks that were recorded before the
    /// worker was killed.
    pub(super) fn of_worker(
        post: &PostMortem,
        death: Death,
        usage: Usage,
        (file, program): (Option<OwnedFd>, Arc<Program>),
        hang: Option<Hang>,
    ) -> Option<Self> {
        const WHY: &str = "the worker's library does not record crashes, or the worker died before the \
                           handshake was complete";
        let cause = crash_cause(post, death)?;
        let signal = recorded_signal(&Ending { death, killed: post.killed.clone() });
        let record = file.zip(signal).map(|(file, signal)| CrashRecord {
            file,
            kind: RecordKind::Crash { signal },
            program,
        });
        let has_none = signal.is_some() && record.is_none();
        let native = has_none.then(|| NativeCrash::unavailable(WHY));
        let none = Hang { record: None, native: None, runtime_stack: None };
        let hang = hang.filter(|_| post.killed.as_ref().is_some_and(KillReason::is_hang)).unwrap_or(none);
        let stage = match (post.was_ready, post.in_flight) {
            (false, _) => Stage::Starting,
            (true, 0) => Stage::Idle,
            (true, _) => Stage::Working,
        };
        let culprit = post.jobs.iter().position(|job| !job.is_unread).filter(|_| post.begun == 1);
        Some(Self {
            victim: Victim::Worker,
            cause,
            stage,
            culprit,
            usage: Some(usage),
            stderr_tail: None,
            native: native.or(hang.native),
            record: record.or(hang.record),
            runtime_stack: hang.runtime_stack,
        })
    }

    /// Returns the context of a crash report about a job that was still running at its deadline.
    pub(super) fn of_late_job(is_program: bool, hang: Hang) -> Self {
        Self {
            victim: if is_program { Victim::Program } else { Victim::Worker },
            cause: late_job_cause(),
            stage: Stage::Working,
            culprit: Some(0),
            usage: None,
            stderr_tail: None,
            native: hang.native,
            record: hang.record,
            runtime_stack: hang.runtime_stack,
        }
    }

    /// Returns the context of a crash report about a program that died. `message` is the description that the worker
    /// sent.
    pub(super) fn of_program(death: Death, cause: Cause, message: &str) -> Self {
        const WHY: &str = "an `exec` program has no library that records crashes";
        let output = message.strip_prefix(&format!("the program was {}", cause.message)).unwrap_or(message);
        let output = output.trim_start_matches(": ");
        let stderr_tail = (!output.is_empty()).then(|| output.to_owned());
        let (victim, stage) = (Victim::Program, Stage::Working);
        let native = recorded_signal(&death.into()).map(|_| NativeCrash::unavailable(WHY));
        Self {
            victim,
            cause,
            stage,
            culprit: Some(0),
            usage: None,
            stderr_tail,
            native,
            record: None,
            runtime_stack: None,
        }
    }

    /// Returns the notice that contains the crash report. `names` contains the names of the bulkhead and the tenant.
    pub(super) fn report(
        self,
        slot: ReportSlot,
        names: (&str, Option<&str>),
        (worker, post): (WorkerId, &PostMortem),
        confinement: Option<Confinement>,
        jobs: Vec<CrashJob>,
    ) -> DroppableNotice {
        let report = CrashReport {
            id: slot.id,
            at: slot.at,
            count: slot.count,
            bulkhead: names.0.to_owned(),
            tenant: names.1.map(str::to_owned),
            victim: self.victim.into(),
            stage: self.stage.into(),
            cause: self.cause,
            pid: post.pid,
            slot: post.slot,
            generation: worker.generation,
            uptime_ms: millis(post.uptime),
            served: post.served,
            usage: self.usage.map(crash::usage),
            in_flight: post.in_flight,
            culprit: self.culprit,
            jobs,
            stderr_tail: self.stderr_tail,
            runtime_stack: self.runtime_stack,
            native: self.native,
            confinement: confinement.and_then(|it| serde_json::to_value(it).ok()),
        };
        DroppableNotice::Crash { report: Box::new(report), permit: slot.permit, record: self.record }
    }
}

impl Crashes {
    pub(super) fn new() -> Self {
        Self {
            reports: 0,
            permits: Arc::new(Semaphore::new(REPORTS_WAITING_MAX)),
            by_bulkhead: HashMap::new(),
            skipped: 0,
            last_report: None,
            last_failed: None,
        }
    }

    // Reports.

    /// Counts the death of process `pid`. Returns permission to send a crash report, or `None` if there are too many
    /// reports. Half of the permits are reserved for workers that were ready when they died.
    pub(super) fn begin_report(
        &mut self,
        (now, at): (Time, SystemTime),
        bulkhead: BulkheadIndex,
        context: &CrashContext,
        pid: u32,
    ) -> Option<ReportSlot> {
        let crashes = self.by_bulkhead.entry(bulkhead).or_default();
        let is_start = context.stage == Stage::Starting;
        let (limit, spared) = match is_start {
            true => (&mut crashes.start_failures.limit, REPORTS_WAITING_MAX / 2),
            false => (&mut crashes.limit, 0),
        };
        let is_allowed = limit.take(now) && self.permits.available_permits() > spared;
        let permit = self.permits.clone().try_acquire_owned().ok().filter(|_| is_allowed);
        let is_skipped = u64::from(permit.is_none());
        limit.skipped += is_skipped;
        self.skipped += is_skipped;
        let known = if is_start { crashes.start_failures.count_again(&context.cause) } else { None };
        if let Some((id, _)) = known {
            self.last_report = Some((pid, id));
        }
        let permit = permit?;
        let (id, count) = known.unwrap_or_else(|| {
            self.reports = self.reports.wrapping_add(1);
            (CrashId::new(at, self.reports), 1)
        });
        if is_start && known.is_none() {
            crashes.start_failures.begin(context.cause.clone(), id);
        }
        self.last_report = Some((pid, id));
        Some(ReportSlot { id, at, count, permit })
    }

    /// Returns a slot for a report about a late job, or `None` if too many reports are waiting to be stored. Half of
    /// the permits are reserved for crashes.
    pub(super) fn begin_hang_report(&mut self, at: SystemTime) -> Option<ReportSlot> {
        let has_room = self.permits.available_permits() > REPORTS_WAITING_MAX / 2;
        let permit = self.permits.clone().try_acquire_owned().ok().filter(|_| has_room)?;
        self.reports = self.reports.wrapping_add(1);
        Some(ReportSlot { id: CrashId::new(at, self.reports), at, count: 1, permit })
    }

    /// Returns the ID of the crash report about a process. Returns `None` unless the death of this process is currently
    /// being handled.
    pub(super) fn report_about(&self, pid: Option<u32>) -> Option<CrashId> {
        let (dead, id) = self.last_report?;
        (pid == Some(dead)).then_some(id)
    }

    /// If `event` reports a retry, records the crash in the job's record. Also adds the attempts in other bulkheads to
    /// the event.
    pub(super) fn record_retry(&self, policy: &mut Bulkhead<Box<JobData>>, event: &mut OperatorEvent) {
        if let OperatorEvent::JobRetried { job, attempts, worker_pid, .. } = event
            && let Some(record) = policy.record_mut(*job)
        {
            let report = self.report_about(*worker_pid);
            record.retried = Some(Box::new(RetriedCrash { attempts: *attempts, report }));
            *attempts += record.earlier_attempts;
        }
    }

    /// Returns the ID of the crash report about the last attempt of a crashed job. This crash is currently being
    /// handled, unless a retry was decided but never ran.
    pub(super) fn report_of(&self, answer: &JobOutcome<Box<JobData>>) -> Option<CrashId> {
        if !matches!(answer.verdict, Verdict::Crashed { .. }) {
            return None;
        }
        match answer.record.retried.as_deref().filter(|crash| crash.attempts == answer.attempts) {
            Some(crash) => crash.report,
            None => self.report_about(answer.worker_pid),
        }
    }

    /// Records that a death has been handled. Later events do not contain the ID of its crash report.
    pub(super) fn death_applied(&mut self) {
        self.last_report = None;
    }

    // Jobs.

    /// Records the operation and the tenant of a job that crashed or exceeded its deadline.
    pub(super) fn record_failed_job(&mut self, answer: &JobOutcome<Box<JobData>>) {
        let names = |job| (job, answer.record.operation.clone(), answer.record.tenant.clone());
        self.last_failed = answer.job.map(names);
    }

    /// Returns the operation and the tenant of `job`. Returns `None` unless this job is the most recent job that
    /// crashed or exceeded its deadline.
    pub(super) fn names_of(&self, job: JobId) -> Option<(String, String)> {
        let (_, operation, tenant) = self.last_failed.as_ref().filter(|(id, ..)| *id == job)?;
        Some((operation.to_string(), tenant.to_string()))
    }

    // Crashes without a report.

    /// Returns true if there are crashes that have no report and have not been included in an event yet.
    pub(super) fn needs_checks(&self) -> bool {
        self.skipped > 0
    }

    /// Returns the bulkheads for which an event about crashes without a report is due. Each is returned with the number
    /// of such crashes since the last event.
    pub(super) fn take_skipped(&mut self, now: Time) -> Vec<(BulkheadIndex, u64)> {
        let mut due = Vec::new();
        for (&bulkhead, crashes) in &mut self.by_bulkhead {
            for limit in [&mut crashes.limit, &mut crashes.start_failures.limit] {
                due.extend(limit.take_unreported(now).map(|skipped| (bulkhead, skipped)));
            }
        }
        due.sort_unstable();
        self.skipped -= due.iter().map(|(_, skipped)| skipped).sum::<u64>();
        due
    }

    /// Removes the state of a bulkhead because its index will be reused.
    pub(super) fn forget(&mut self, bulkhead: BulkheadIndex) {
        if let Some(crashes) = self.by_bulkhead.remove(&bulkhead) {
            self.skipped -= crashes.limit.skipped + crashes.start_failures.limit.skipped;
        }
    }
}

/// Returns a crash report's entries for a dead worker's jobs. The total size of the included payloads is
/// limited.
pub(super) fn crash_jobs(policy: &mut Bulkhead<Box<JobData>>, jobs: &[HeldJob]) -> Vec<CrashJob> {
    let mut room = PAYLOADS_BYTES_MAX;
    jobs.iter()
        .map(|job| crash_job(job, policy.record_mut(job.id).map(|record| &**record), &mut room))
        .collect()
}

/// Returns the cause of a worker's death, or `None` for a normal exit. An exit is normal if the worker was ready, had
/// not started any of its jobs, was not killed, and exited with status 0.
fn crash_cause(post: &PostMortem, death: Death) -> Option<Cause> {
    let ending = Ending { death, killed: post.killed.clone() };
    let is_fine = ending.is_clean() && post.begun == 0 && post.was_ready;
    if is_fine { None } else { cause_of(&ending) }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Returns a crash report's entry for a job that is still running at its deadline.
pub(super) fn late_job(job: &HeldJob, record: &JobData) -> CrashJob {
    crash_job(job, Some(record), &mut { PAYLOADS_BYTES_MAX })
}

/// Returns a crash report's entry for a job that a worker held. Includes the payload if it fits, and subtracts
/// its size from `room`.
fn crash_job(held: &HeldJob, record: Option<&JobData>, room: &mut usize) -> CrashJob {
    let text = |text: Option<&str>| text.unwrap_or_default().to_owned();
    let payload = record.and_then(JobData::payload).filter(|bytes| {
        let fits = bytes.len() <= PAYLOAD_BYTES_MAX.min(*room);
        *room -= if fits { bytes.len() } else { 0 };
        fits
    });
    CrashJob {
        job: held.id.to_string(),
        operation: text(record.map(|record| &*record.operation)),
        tenant: text(record.map(|record| &*record.tenant)),
        trace_id: record.and_then(JobData::trace_id).map(str::to_owned),
        attempts: record.map_or(0, |record| record.earlier_attempts) + held.attempts,
        ran_ms: millis(held.ran),
        is_answered: record.is_none(),
        is_unread: held.is_unread,
        payload_bytes: record.map_or(0, |record| record.payload_bytes as u64),
        payload: payload.map(<[u8]>::to_vec),
        blake3: None,
        digest: held.digest.map(|digest| digest.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_crashes_beyond_the_rate_limit() {
        let mut report_limit = ReportLimit::default();
        let (mut reported, mut told) = (0, 0);
        // Simulates one minute with one hundred crashes per second.
        for tick in 0..6000 {
            let now = Time::ZERO + Duration::from_millis(10 * tick);
            let is_reported = report_limit.take(now);
            reported += u32::from(is_reported);
            report_limit.skipped += u64::from(!is_reported);
            told += report_limit.take_unreported(now).unwrap_or(0);
        }
        assert_eq!(reported, REPORT_BURST_MAX + 59);
        let later = Time::ZERO + Duration::from_secs(90);
        assert_eq!(told + report_limit.take_unreported(later).unwrap_or(0), 6000 - u64::from(reported));
        assert!(
            (0..20).filter(|_| report_limit.take(later)).count() == REPORT_BURST_MAX as usize,
            "a pause must refill the bucket"
        );
    }
}
