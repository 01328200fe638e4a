//! Crash reports: the data plane records the state of a worker at the time of death, with the payloads that are still
//! in memory. A crash costs a process, so reports are normally rare. If crashes are frequent, most are only counted.

use std::time::{Duration, SystemTime};

use bulkhead_api::{
    Cause, CrashId, CrashJob, CrashReport, JOBS_MAX, PAYLOAD_BYTES_MAX, PAYLOADS_BYTES_MAX, Severity, Stage,
    Victim, What,
};
use bulkhead_keeper::Usage;
use bulkhead_plane::command::Notice;
use bulkhead_plane::crash::{self, REPORTS_WAITING_MAX, cause_of};
use bulkhead_policy::{Death, HeldJob, PostMortem, Time, WorkerId};
use bulkhead_shared::JobId;
use tokio::sync::OwnedSemaphorePermit;

use super::links::Link;
use super::slab::{BulkheadIndex, CompartmentIndex};
use super::{DataPlane, JobData};

/// Maximum number of consecutive crash reports of a bulkhead. The rate is then limited to one report per second.
const REPORT_BURST_MAX: u32 = 10;

/// Minimum interval between events about unreported crashes.
const REPEAT_INTERVAL: Duration = Duration::from_secs(10);

/// Rate limit of crash reports (token bucket).
#[derive(Debug)]
pub(super) struct ReportLimit {
    left: u32,
    /// Time up to which the bucket has been refilled.
    filled_to: Time,
    /// Number of unreported crashes since the last event about unreported crashes.
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

    /// Returns the number of unreported crashes, if an event is due.
    fn take_unreported(&mut self, now: Time) -> Option<u64> {
        let is_due = self.reported_at.is_none_or(|at| now.since(at) >= REPEAT_INTERVAL);
        if self.skipped == 0 || !is_due {
            return None;
        }
        self.reported_at = Some(now);
        Some(std::mem::take(&mut self.skipped))
    }
}

/// Circumstances of a death.
struct CrashContext {
    victim: Victim,
    cause: Cause,
    stage: Stage,
    culprit: Option<usize>,
    usage: Option<Usage>,
    stderr_tail: Option<String>,
}

impl DataPlane {
    /// Reports the death of a worker, unless the worker ended normally. Must run before policy gets the event.
    pub(super) fn report_death(&mut self, link: &Link, death: Death, usage: Usage) {
        let (compartment, worker) = (link.compartment, link.worker);
        let (now, entry) = (self.now, &mut self.compartments[compartment]);
        if entry.is_replay {
            return;
        }
        let Some(post) = entry.policy.post_mortem(now, worker, JOBS_MAX) else { return };
        let Some(cause) = crash_cause(&post, death) else { return };
        let stage = match (post.was_ready, post.in_flight) {
            (false, _) => Stage::Starting,
            (true, 0) => Stage::Idle,
            (true, _) => Stage::Working,
        };
        let culprit = post.jobs.iter().position(|job| !job.is_unread).filter(|_| post.begun == 1);
        let death = CrashContext {
            victim: Victim::Worker,
            cause,
            stage,
            culprit,
            usage: Some(usage),
            stderr_tail: None,
        };
        self.send_crash_report(compartment, worker, (&post, Some(link)), death);
    }

    /// Reports that a program was killed by a signal, while the worker continues.
    pub(super) fn report_program(
        &mut self,
        compartment: CompartmentIndex,
        worker: WorkerId,
        job: JobId,
        death: Death,
        message: &str,
    ) {
        let (now, policy) = (self.now, &mut self.compartments[compartment].policy);
        // If the client already has an answer, the supervisor itself ended the program.
        if !policy.holds(worker, job) || policy.cargo_mut(job).is_none() {
            return;
        }
        let Some(mut post) = policy.post_mortem(now, worker, 0) else { return };
        post.jobs.extend(policy.held(now, job));
        let Some(cause) = cause_of(death, None) else { return };
        if self.compartments[compartment].is_replay {
            return self.replay_program_died(compartment, Some(cause));
        }
        let said = message.strip_prefix(&format!("the program was {}", cause.message)).unwrap_or(message);
        let said = said.trim_start_matches(": ");
        let stderr_tail = (!said.is_empty()).then(|| said.to_owned());
        let death = CrashContext {
            victim: Victim::Program,
            cause,
            stage: Stage::Working,
            culprit: Some(0),
            usage: None,
            stderr_tail,
        };
        self.send_crash_report(compartment, worker, (&post, None), death);
    }

    /// Sends a crash report. `link` is the worker's link if the table does not contain it any more.
    fn send_crash_report(
        &mut self,
        compartment: CompartmentIndex,
        worker: WorkerId,
        (post, link): (&PostMortem, Option<&Link>),
        death: CrashContext,
    ) {
        let entry = &self.compartments[compartment];
        let bulkhead = entry.bulkhead;
        let tenant = entry.tenant.as_deref().map(str::to_owned);
        let place = self.report_permit_for(bulkhead, death.stage);
        let before = match death.stage {
            Stage::Starting => self.bulkheads[bulkhead].start_failures.count_again(&death.cause),
            _ => None,
        };
        if let Some((id, _)) = before {
            self.reporter.last_report = Some((post.pid, id));
        }
        let Some(place) = place else { return self.schedule_checks() };
        let at = SystemTime::now();
        let (id, count) = before.unwrap_or_else(|| {
            self.reporter.crashes = self.reporter.crashes.wrapping_add(1);
            (CrashId::new(at, self.reporter.crashes), 1)
        });
        if death.stage == Stage::Starting && before.is_none() {
            self.bulkheads[bulkhead].start_failures.begin(death.cause.clone(), id);
        }
        let CrashContext { victim, cause, stage, culprit, usage, stderr_tail } = death;
        let of_living = || self.links.get(self.link_of(compartment, worker)?);
        let confinement = link.or_else(of_living).and_then(Link::confinement);
        let report = CrashReport {
            id,
            at,
            count,
            bulkhead: self.bulkheads[bulkhead].name.as_ref().to_owned(),
            tenant,
            victim: victim.into(),
            stage: stage.into(),
            cause,
            pid: post.pid,
            slot: post.slot,
            generation: worker.generation,
            uptime_ms: millis(post.uptime),
            served: post.served,
            usage: usage.map(crash::usage),
            in_flight: post.in_flight,
            culprit,
            jobs: self.crash_jobs(compartment, &post.jobs),
            stderr_tail,
            confinement: confinement.and_then(|it| serde_json::to_value(it).ok()),
        };
        self.reporter.last_report = Some((post.pid, id));
        self.reporter.notify(Notice::Crash { report: Box::new(report), place });
    }

    /// Returns a permit for a report that waits to be stored, unless the bulkhead is over the rate limit. Half of the
    /// permits are reserved for workers that had been ready.
    fn report_permit_for(&mut self, bulkhead: BulkheadIndex, stage: Stage) -> Option<OwnedSemaphorePermit> {
        let (now, bulkhead) = (self.now, &mut self.bulkheads[bulkhead]);
        let (report_limit, spared) = match stage {
            Stage::Starting => (&mut bulkhead.start_failures.report_limit, REPORTS_WAITING_MAX / 2),
            Stage::Idle | Stage::Working => (&mut bulkhead.crash_report_limit, 0),
        };
        let is_allowed = report_limit.take(now) && self.reporter.report_permits.available_permits() > spared;
        let place = self.reporter.report_permit().filter(|_| is_allowed);
        report_limit.skipped += u64::from(place.is_none());
        place
    }

    fn crash_jobs(&mut self, compartment: CompartmentIndex, jobs: &[HeldJob]) -> Vec<CrashJob> {
        let mut room = PAYLOADS_BYTES_MAX;
        let policy = &mut self.compartments[compartment].policy;
        jobs.iter().map(|job| crash_job(job, policy.cargo_mut(job.id), &mut room)).collect()
    }

    /// Reports at intervals the number of unreported crashes and of further jobs sent to fallbacks.
    pub(super) fn report_skipped_crashes(&mut self) {
        let now = self.now;
        for bulkhead in self.bulkheads.indices() {
            let Some(entry) = self.bulkheads.get_mut(bulkhead) else { continue };
            let report_limits = [&mut entry.crash_report_limit, &mut entry.start_failures.report_limit];
            let unreported = report_limits
                .map(|report_limit| (report_limit.take_unreported(now), report_limit.skipped > 0));
            for (skipped, is_waiting) in unreported {
                if let Some(skipped) = skipped {
                    let what = What::CrashesNotReported { crashes: skipped, reported_per_second: 1 };
                    self.bulkhead_event(Severity::Warning, bulkhead, what);
                } else if is_waiting {
                    self.schedule_checks();
                }
            }
            self.report_skipped_fallbacks(bulkhead);
        }
    }
}

/// Returns the cause of a worker's death. Returns `None` for a normal end: the worker was ready, had begun no job,
/// was not killed, and exited with status 0.
fn crash_cause(post: &PostMortem, death: Death) -> Option<Cause> {
    let is_fine = post.killed.is_none() && death == Death::Exit(0) && post.begun == 0 && post.was_ready;
    if is_fine { None } else { cause_of(death, post.killed.as_ref()) }
}

/// Describes a job of a dead worker. Includes the payload if it fits into `room`.
fn crash_job(held: &HeldJob, record: Option<&mut Box<JobData>>, room: &mut usize) -> CrashJob {
    let record = record.map(|record| &**record);
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
        attempts: held.attempts,
        ran_ms: millis(held.ran),
        is_answered: record.is_none(),
        is_unread: held.is_unread,
        payload_bytes: record.map_or(0, |record| record.payload_bytes as u64),
        payload: payload.map(<[u8]>::to_vec),
        blake3: None,
        digest: held.digest.map(|digest| digest.to_string()),
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_storm_is_reported_in_part_and_counted_as_a_whole() {
        let mut report_limit = ReportLimit::default();
        let (mut reported, mut told) = (0, 0);
        // A hundred crashes per second for a minute.
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
            "a pause fills it up"
        );
    }
}
