//! Replays of jobs from crash reports. Each replay runs in a separate compartment with a fresh worker, and is not
//! counted anywhere. The bulkhead must be configured, but the state of the bulkhead does not matter.

use std::time::Duration;

use bulkhead_api::Cause;
use bulkhead_plane::command::{REPLAYS_MAX, ReplayError, ReplayOrder, Replayed};
use bulkhead_plane::crash::cause_of;
use bulkhead_policy::{
    Answer, Event, Limits, Note, Pressure, Recycle, RestartPolicy, Submission, TenantLimits,
};
use bulkhead_shared::Verdict;
use tokio::sync::oneshot;

use super::bulkheads::Compartment;
use super::slab::{BulkheadIndex, CompartmentIndex};
use super::{DataPlane, Held, Incoming, JobData};

/// Time limit for a worker to end after the job.
const END_TIMEOUT: Duration = Duration::from_secs(2);

pub(super) struct Replay {
    pub(super) compartment: CompartmentIndex,
    stage: Stage,
    pid: Option<u32>,
    /// Cause of death of the worker or program.
    cause: Option<Cause>,
    end: Option<(Result<Verdict, String>, Duration)>,
    done: oneshot::Sender<Replayed>,
}

enum Stage {
    /// The worker is starting.
    Starting(ReplayOrder),
    /// The worker is ready for the job.
    Ready(ReplayOrder),
    /// The worker has the job.
    Running,
    /// The worker is ending.
    Ending,
}

impl DataPlane {
    pub(super) fn replay(
        &mut self,
        order: ReplayOrder,
        done: oneshot::Sender<Replayed>,
    ) -> Result<(), ReplayError> {
        let bulkhead =
            *self.bulkheads.by_name.get(order.bulkhead.as_str()).ok_or(ReplayError::NotConfigured)?;
        if self.is_stopping {
            return Err(ReplayError::Stopping);
        }
        if self.commands.replays.len() >= REPLAYS_MAX {
            return Err(ReplayError::Busy);
        }
        let limits = limits_for_one(self.limits_of(bulkhead));
        let compartment = self.open_for_replay(bulkhead, limits);
        let stage = Stage::Starting(order);
        self.commands.replays.push(Replay { compartment, stage, pid: None, cause: None, end: None, done });
        self.apply(compartment, Event::Start, Incoming::None);
        Ok(())
    }

    fn open_for_replay(&mut self, bulkhead: BulkheadIndex, limits: Limits) -> CompartmentIndex {
        let seed = self.compartments.next_seed(self.now);
        let mut compartment = Compartment::new(bulkhead, None, limits, seed, self.now);
        compartment.is_replay = true;
        self.compartments.insert(compartment)
    }

    fn replay_of(&mut self, compartment: CompartmentIndex) -> Option<&mut Replay> {
        self.commands.replays.iter_mut().find(|replay| replay.compartment == compartment)
    }

    /// Handles a note about a replay, which causes no event.
    pub(super) fn handle_replay_note(&mut self, compartment: CompartmentIndex, note: Note) {
        let Some(replay) = self.replay_of(compartment) else { return };
        match note {
            Note::WorkerStarted { pid, .. } => replay.pid = Some(pid),
            Note::WorkerReady { .. } => {
                if let Stage::Starting(order) = std::mem::replace(&mut replay.stage, Stage::Ending) {
                    replay.stage = Stage::Ready(order);
                }
            }
            Note::WorkerNotStarted { message, .. } => replay.fail(message),
            Note::WorkerExited { death, killed, .. } if replay.end.is_none() => {
                replay.cause = cause_of(death, killed.as_ref());
                if matches!(replay.stage, Stage::Starting(_) | Stage::Ready(_)) {
                    replay.fail_unread();
                }
            }
            _ => {}
        }
    }

    /// Records the death of a replayed job's program, while the worker continues.
    pub(super) fn replay_program_died(&mut self, compartment: CompartmentIndex, cause: Option<Cause>) {
        if let Some(replay) = self.replay_of(compartment).filter(|replay| replay.end.is_none()) {
            replay.cause = cause;
        }
    }

    pub(super) fn replay_answered(
        &mut self,
        compartment: CompartmentIndex,
        mut answer: Answer<Box<JobData>>,
    ) {
        self.free_job(&mut answer.cargo);
        if let Some(replay) = self.replay_of(compartment) {
            match answer.verdict {
                Verdict::Rejected { .. } if replay.cause.is_some() => replay.fail_unread(),
                Verdict::Rejected { reason, message } => replay.fail(format!("{reason}: {message}")),
                verdict => drop(replay.end.get_or_insert((Ok(verdict), answer.ran))),
            }
        }
        self.buffers.keep_record(answer.cargo);
    }

    /// Advances each replay as far as possible, because a replay that ends at once causes no further event.
    pub(super) fn advance_replays(&mut self) {
        while (0..self.commands.replays.len()).any(|index| self.advance_replay(index)) {}
    }

    /// Advances a replay. Returns true if there was a step.
    fn advance_replay(&mut self, index: usize) -> bool {
        let replay = &mut self.commands.replays[index];
        let compartment = replay.compartment;
        if self.compartments[compartment].policy.is_stopped() {
            let replay = self.commands.replays.remove(index);
            self.compartments.vacate(compartment);
            replay.finish();
            return true;
        }
        let next = if replay.end.is_some() { Stage::Ending } else { Stage::Running };
        match (std::mem::replace(&mut replay.stage, next), replay.end.is_some()) {
            (Stage::Ready(order), false) => self.submit_replay(compartment, order),
            (stage @ (Stage::Starting(_) | Stage::Running), false) | (stage @ Stage::Ending, _) => {
                replay.stage = stage;
                return false;
            }
            (_, true) => {
                let by = self.now + END_TIMEOUT;
                self.apply(compartment, Event::Stop { by }, Incoming::None);
            }
        }
        true
    }

    fn submit_replay(&mut self, compartment: CompartmentIndex, order: ReplayOrder) {
        let ReplayOrder { operation, tenant, payload, .. } = order;
        let cargo = self.buffers.record(JobData {
            operation: operation.into(),
            tenant: tenant.as_str().into(),
            payload_bytes: payload.len(),
            held: Held { is_repeatable: true, ..Held::default() },
            ..JobData::default()
        });
        let tenant = self.compartments[compartment].policy.tenant(&tenant);
        let sequence = self.compartments.next_job();
        let submission = Submission { sequence, tenant, ..Submission::new(cargo) };
        self.apply(compartment, Event::Submit(submission), Incoming::Owned(payload));
    }
}

impl Replay {
    fn fail(&mut self, message: String) {
        self.end.get_or_insert((Err(message), Duration::ZERO));
    }

    fn fail_unread(&mut self) {
        let how = self.cause.as_ref().map_or("the worker was ended", |cause| &cause.message);
        self.fail(format!("the worker ended before receiving the job: {how}"));
    }

    fn finish(self) {
        let stopping = || (Err("the supervisor is stopping".to_owned()), Duration::ZERO);
        let (end, ran) = self.end.unwrap_or_else(stopping);
        let is_crash = matches!(end, Ok(Verdict::Crashed { .. }));
        let cause = self.cause.filter(|_| is_crash);
        // The caller may have gone.
        let _ = self.done.send(Replayed { pid: self.pid, end, cause, ran });
    }
}

/// Returns limits for a worker with a single job. Timeouts are unchanged, and nothing can reject the job.
fn limits_for_one(limits: &Limits) -> Limits {
    let mut limits = limits.clone();
    limits.processes = 1;
    limits.max_in_flight = 1;
    limits.max_queue = 0;
    limits.queue_timeout = None;
    limits.deadline_max = limits.deadline;
    limits.restart.policy = RestartPolicy::Never;
    limits.start.spares = 0;
    limits.recycle = Recycle::default();
    limits.critical_reserve = 0.0;
    limits.pressure = Pressure { warn: 1.0, reject: 1.0 };
    limits.rate_limit = None;
    limits.breaker = None;
    limits.retry = None;
    limits.poison = None;
    limits.tenants = TenantLimits::default();
    limits.idle = None;
    limits
}
