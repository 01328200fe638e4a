//! Orders stack samples of workers that are still running a job at its deadline, or that do not respond, and adds the
//! stacks to reports. `samples` decides whether a worker can be sampled, and which actions wait. The keeper takes the
//! samples. A symbolizer of the control plane adds function names.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::SystemTime;

use bulkhead_api::{CrashId, CrashJob, NativeCrash};
use bulkhead_keeper::Keeper;
use bulkhead_plane::crash::{CrashRecord, RecordKind};
use bulkhead_plane::program::Program;
use bulkhead_policy::{JobOutcome, KillReason, PostMortem, WorkerId};
use bulkhead_shared::JobId;
use bulkhead_shared::crash_record::RECORDS_BYTES_MAX;
use bulkhead_shared::frame::kind;
use bulkhead_shared::worker_protocol::Empty;

use crate::crashes::{CrashContext, Hang, ReportSlot, late_job};
use crate::journal::Journal;
use crate::links::Link;
use crate::memory_files::sealed_file;
use crate::samples::HeldAction;
use crate::slab::{CompartmentIndex, LinkIndex};
use crate::{DataPlane, JobData};

/// Context of a stack sample in progress. Contains the data that is needed to write the report when the sample is
/// complete.
pub(crate) struct SampleSubject {
    compartment: CompartmentIndex,
    worker: WorkerId,
    /// File to which the worker's stacks are written.
    file: OwnedFd,
    program: Arc<Program>,
    /// Report about a late job, if the sample is taken because one of the worker's jobs is late. Otherwise the worker
    /// is unresponsive, and the stacks are added to the report about its death.
    late: Option<Box<LateJob>>,
}

/// A report about a late job, before the stacks are added.
struct LateJob {
    slot: ReportSlot,
    post: PostMortem,
    job: CrashJob,
}

impl DataPlane {
    /// Starts sampling a worker whose job is still running at its deadline. The outcome of the job will contain the ID
    /// of the report.
    pub(crate) fn sample_late_job(&mut self, index: CompartmentIndex, answer: &JobOutcome<Box<JobData>>) {
        let report = self.begin_late_report(index, answer);
        self.samples.set_report(report);
    }

    /// Starts a report about a late job. Returns the report's ID, or `None` if no report will be written.
    fn begin_late_report(
        &mut self,
        index: CompartmentIndex,
        answer: &JobOutcome<Box<JobData>>,
    ) -> Option<CrashId> {
        let (now, bulkhead) = (self.now, self.compartments[index].bulkhead);
        let policy = &mut self.compartments[index].policy;
        let job = answer.job?;
        let worker = policy.worker_of(job)?;
        let (post, held) = (policy.post_mortem(now, worker, 0)?, policy.held_job(now, job)?);
        let link = self.links.of_worker(&self.compartments, (index, worker))?;
        if !self.samples.admit(now, bulkhead, self.links[link].spawn()) {
            return None;
        }
        let slot = self.crashes.begin_hang_report(SystemTime::now())?;
        let id = slot.id();
        let late = LateJob { slot, post, job: late_job(&held, &answer.record) };
        self.begin_sample(link, Some(job), Some(Box::new(late))).then_some(id)
    }

    /// Starts sampling a worker that is about to be killed because it does not respond. Does nothing if the worker is
    /// killed for another reason.
    pub(crate) fn sample_hung_worker(&mut self, link: LinkIndex, reason: &KillReason) {
        let compartment = &self.compartments[self.links[link].compartment()];
        let is_needed = reason.is_hang() && !compartment.is_replay && self.links[link].is_running();
        if is_needed && self.samples.admit(self.now, compartment.bulkhead, self.links[link].spawn()) {
            self.begin_sample(link, None, None);
        }
    }

    /// Orders the keeper to sample a worker. Returns false if the file for the stacks cannot be created.
    fn begin_sample(&mut self, index: LinkIndex, job: Option<JobId>, late: Option<Box<LateJob>>) -> bool {
        let link = &self.links[index];
        let (spawn, program) = (link.spawn(), link.program().clone());
        let (compartment, worker) = link.key();
        let job = job.filter(|_| program.runs_programs()).map(|job| job.to_string());
        let text = link.journal.as_ref().and_then(Journal::expect_stack_text);
        let file = sealed_file(c"sample", (size_of::<u64>() + RECORDS_BYTES_MAX) as u64);
        let Ok((file, theirs)) = file.map_err(io::Error::from).and_then(|it| Ok((it.try_clone()?, it)))
        else {
            return false;
        };
        let subject = SampleSubject { compartment, worker, file, program, late };
        self.samples.begin(self.now, spawn, subject);
        let order = |keeper: &mut Keeper| keeper.sample(spawn, job.as_deref(), theirs, text);
        if let Err(error) = self.keeper.serving().and_then(order) {
            self.sample_taken(spawn, Some(Err(error)));
        }
        true
    }

    /// Delays an action until the worker's current sample is complete. Returns false if no sample of the worker is in
    /// progress.
    pub(crate) fn is_held(&mut self, link: Option<LinkIndex>, action: HeldAction) -> bool {
        link.is_some_and(|link| self.samples.hold(self.links[link].spawn(), action))
    }

    /// Ends a sample. Sends the report if the sample was about a late job, and performs the actions that were delayed
    /// by the sample. `result` is `None` if the keeper did not reply in time.
    pub(crate) fn sample_taken(&mut self, spawn: u64, result: Option<io::Result<()>>) {
        let Some((subject, held)) = self.samples.finish(spawn) else { return };
        let SampleSubject { compartment, worker, file, program, late } = subject;
        let index = self.links.index_of_spawn(spawn);
        let native = result.and_then(Result::err).map(|error| NativeCrash::unavailable(&reason(&error)));
        let record = native.is_none().then_some(CrashRecord { file, kind: RecordKind::Sample, program });
        let link = index.and_then(|index| self.links.get_mut(index));
        let text = link.as_ref().and_then(|link| link.journal.as_ref()).and_then(Journal::stack_text);
        let hang = Hang::new(record, native, text);
        match (late, link) {
            (Some(late), _) => self.report_late_job(compartment, worker, *late, hang),
            (None, Some(link)) => link.set_hang(hang),
            (None, None) => {}
        }
        for action in held {
            match action {
                HeldAction::Cancel(job) => {
                    self.send((compartment, worker), (kind::CANCEL_JOB, job.0), &Empty)
                }
                HeldAction::Kill => self.keeper.kill(spawn, self.now),
            }
        }
    }

    fn report_late_job(&mut self, index: CompartmentIndex, worker: WorkerId, late: LateJob, hang: Hang) {
        let Some(compartment) = self.compartments.get(index) else { return };
        let names = (&*self.bulkheads[compartment.bulkhead].name, compartment.tenant.as_deref());
        let link = self.links.of_worker(&self.compartments, (index, worker));
        let link = link.and_then(|link| self.links.get(link));
        let runs_programs = link.is_some_and(|link| link.program().runs_programs());
        let confinement = link.and_then(Link::confinement);
        let context = CrashContext::of_late_job(runs_programs, hang);
        let LateJob { slot, post, job } = late;
        self.reporter.notify(context.report(slot, names, (worker, &post), confinement, vec![job]));
    }

    /// Ends the samples that have exceeded their time limit.
    pub(crate) fn check_samples(&mut self) {
        while let Some(spawn) = self.samples.next_late(self.now) {
            self.sample_taken(spawn, None);
        }
    }
}

fn reason(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            "the supervisor is not allowed to trace the process; `bulkhead-supervisor \
                                             doctor` names the cause"
                .to_owned()
        }
        Some(libc::ESRCH) => "the process had exited".to_owned(),
        Some(libc::EBUSY) => "the stacks of too many other processes were being recorded".to_owned(),
        _ => format!("failed to record the stacks: {error}"),
    }
}
