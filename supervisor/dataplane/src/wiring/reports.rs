//! Reports deaths of workers and programs, failed jobs, and operator events from policy to operators. `crashes` decides
//! which deaths get a crash report, and limits the rate. `reporter` sends the events and reports to the control plane,
//! which stores and formats them.

use std::time::SystemTime;

use bulkhead_api::{CrashId, EventKind, JOBS_MAX, Severity};
use bulkhead_keeper::Usage;
use bulkhead_plane::crash::cause_of;
use bulkhead_policy::{Death, JobOutcome, OperatorEvent, PostMortem, WorkerId};
use bulkhead_shared::{JobId, Verdict};

use crate::crashes::{CrashContext, crash_jobs};
use crate::links::Link;
use crate::operator_events::{describe, failed_job_event};
use crate::slab::CompartmentIndex;
use crate::{DataPlane, JobData};

impl DataPlane {
    /// Reports a worker's death, unless the worker exited normally. Must be called before the exit event is passed to
    /// policy.
    pub(crate) fn report_death(&mut self, link: &mut Link, death: Death, usage: Usage) {
        let compartment = &mut self.compartments[link.compartment()];
        if compartment.is_replay {
            return;
        }
        let Some(post) = compartment.policy.post_mortem(self.now, link.worker(), JOBS_MAX) else { return };
        let record = (link.take_crash_record(), link.program().clone());
        if let Some(context) = CrashContext::of_worker(&post, death, usage, record, link.take_hang()) {
            self.send_crash_report(link.compartment(), (link.worker(), &post), Some(link), context);
        }
    }

    /// Reports that a program was killed by a signal. The worker that started the program is still running.
    pub(crate) fn report_program_death(
        &mut self,
        index: CompartmentIndex,
        worker: WorkerId,
        job: JobId,
        (death, message): (Death, &str),
    ) {
        let (now, compartment) = (self.now, &mut self.compartments[index]);
        let (policy, is_replay) = (&mut compartment.policy, compartment.is_replay);
        // No report is needed if the client already has the outcome, because the supervisor itself then killed the
        // program.
        if !policy.holds(worker, job) || policy.record_mut(job).is_none() {
            return;
        }
        let Some(mut post) = policy.post_mortem(now, worker, 0) else { return };
        post.jobs.extend(policy.held_job(now, job));
        let Some(cause) = cause_of(&death.into()) else { return };
        if is_replay {
            return self.replays.program_died(index, cause);
        }
        let context = CrashContext::of_program(death, cause, message);
        self.send_crash_report(index, (worker, &post), None, context);
    }

    /// Sends a crash report. `link` is the worker's link, and is required if the link has already been removed from the
    /// table.
    fn send_crash_report(
        &mut self,
        index: CompartmentIndex,
        (worker, post): (WorkerId, &PostMortem),
        link: Option<&Link>,
        context: CrashContext,
    ) {
        let bulkhead = self.compartments[index].bulkhead;
        let times = (self.now, SystemTime::now());
        let Some(slot) = self.crashes.begin_report(times, bulkhead, &context, post.pid) else { return };
        let of_living = || self.links.get(self.links.of_worker(&self.compartments, (index, worker))?);
        let confinement = link.or_else(of_living).and_then(Link::confinement);
        let jobs = crash_jobs(&mut self.compartments[index].policy, &post.jobs);
        let tenant = self.compartments[index].tenant.as_deref();
        let names = (&*self.bulkheads[bulkhead].name, tenant);
        self.reporter.notify(context.report(slot, names, (worker, post), confinement, jobs));
    }

    /// Reports, for each bulkhead, the number of crashes for which no crash report was written. Skips bulkheads for
    /// which such an event is not due yet.
    pub(crate) fn report_skipped_crashes(&mut self) {
        for (bulkhead, crashes) in self.crashes.take_skipped(self.now) {
            let what = EventKind::CrashesNotReported { crashes, reported_per_second: 1 };
            self.reporter.bulkhead_event(Severity::Warning, &self.bulkheads[bulkhead].name, what);
        }
    }

    // Events for operators.

    pub(crate) fn report_note(&mut self, index: CompartmentIndex, mut note: OperatorEvent) {
        let compartment = &self.compartments[index];
        self.bulkheads.count_note(compartment, &note);
        if self.reporter.is_suppressed(&note) {
            return;
        }
        if compartment.is_replay {
            return self.replays.note(index, note);
        }
        let dead = match &note {
            OperatorEvent::WorkerExited { pid, .. } => Some(*pid),
            OperatorEvent::JobRetried { worker_pid, .. } => *worker_pid,
            _ => None,
        };
        let names = match &note {
            OperatorEvent::JobRetried { job, .. } | OperatorEvent::JobQuarantined { job, .. } => {
                self.job_names(index, *job)
            }
            _ => None,
        };
        self.crashes.record_retry(&mut self.compartments[index].policy, &mut note);
        let (severity, what) = describe(note, names);
        let compartment = &self.compartments[index];
        let subject = (&self.bulkheads.owner(compartment).name, &compartment.tenant);
        self.reporter.compartment_event(severity, subject, what, self.crashes.report_about(dead));
    }

    /// Returns the operation and the tenant of a job that has just crashed or whose worker has just died.
    fn job_names(&mut self, index: CompartmentIndex, job: JobId) -> Option<(String, String)> {
        match self.compartments[index].policy.record_mut(job) {
            Some(record) => Some((record.operation.to_string(), record.tenant.to_string())),
            None => self.crashes.names_of(job),
        }
    }

    /// Returns the ID of the crash report that explains a job's outcome. The report is about the crash that ended the
    /// job, or about a job that was still running at its deadline.
    pub(crate) fn report_of(&self, answer: &JobOutcome<Box<JobData>>) -> Option<CrashId> {
        match answer.verdict {
            Verdict::DeadlineRunning => self.samples.report(),
            _ => self.crashes.report_of(answer),
        }
    }

    /// Reports a job that crashed while running or exceeded its deadline.
    pub(crate) fn report_failed_job(&mut self, index: CompartmentIndex, answer: &JobOutcome<Box<JobData>>) {
        if let Some(what) = failed_job_event(answer) {
            let compartment = &self.compartments[index];
            let subject = (&self.bulkheads.owner(compartment).name, &compartment.tenant);
            let report = self.report_of(answer);
            self.reporter.compartment_event(Severity::Warning, subject, what, report);
        }
    }
}
