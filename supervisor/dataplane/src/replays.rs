//! Tracks replays of jobs from crash reports, and decides the next step of each. Each replay runs in a separate
//! compartment with a new worker, and does not affect any statistics. `wiring/replays.rs` performs the steps. The
//! control plane requests replays and compares the results with the original crash.

use std::time::Duration;

use bulkhead_api::Cause;
use bulkhead_plane::command::{REPLAYS_MAX, ReplayError, ReplayRequest, ReplayResult};
use bulkhead_plane::crash::cause_of;
use bulkhead_policy::{JobOutcome, Limits, OperatorEvent, Pressure, Recycle, RestartPolicy, TenantLimits};
use bulkhead_shared::Verdict;
use tokio::sync::oneshot;

use super::JobData;
use super::slab::CompartmentIndex;

#[derive(Default)]
pub(super) struct Replays(Vec<Replay>);

struct Replay {
    compartment: CompartmentIndex,
    stage: Stage,
    pid: Option<u32>,
    /// The cause of death, if the worker or the program that ran the job has died.
    cause: Option<Cause>,
    end: Option<(Result<Verdict, String>, Duration)>,
    done: oneshot::Sender<ReplayResult>,
}

enum Stage {
    /// The worker is starting.
    Starting(ReplayRequest),
    /// The worker is ready, and the job must be submitted next.
    Ready(ReplayRequest),
    /// The worker is running the job.
    Running,
    /// The job is finished, and the worker is exiting.
    Ending,
}

/// Next step of a replay, to be performed in the replay's own compartment.
pub(super) enum Step {
    Submit(CompartmentIndex, ReplayRequest),
    Stop(CompartmentIndex),
    /// Removes the compartment after the replay.
    Remove(CompartmentIndex),
}

impl Replays {
    /// Returns an error if the maximum number of replays is already in progress.
    pub(super) fn check_room(&self) -> Result<(), ReplayError> {
        if self.0.len() < REPLAYS_MAX { Ok(()) } else { Err(ReplayError::Busy) }
    }

    /// Adds a replay in a new compartment. The result is sent to `done`.
    pub(super) fn add(
        &mut self,
        compartment: CompartmentIndex,
        request: ReplayRequest,
        done: oneshot::Sender<ReplayResult>,
    ) {
        let stage = Stage::Starting(request);
        self.0.push(Replay { compartment, stage, pid: None, cause: None, end: None, done });
    }

    pub(super) fn compartments(&self) -> impl Iterator<Item = CompartmentIndex> {
        self.0.iter().map(|replay| replay.compartment)
    }

    fn of(&mut self, compartment: CompartmentIndex) -> Option<&mut Replay> {
        self.0.iter_mut().find(|replay| replay.compartment == compartment)
    }

    /// Handles an operator event about a replay's compartment.
    pub(super) fn note(&mut self, compartment: CompartmentIndex, note: OperatorEvent) {
        let Some(replay) = self.of(compartment) else { return };
        match note {
            OperatorEvent::WorkerStarted { pid, .. } => replay.pid = Some(pid),
            OperatorEvent::WorkerReady { .. } => {
                if let Stage::Starting(request) = std::mem::replace(&mut replay.stage, Stage::Ending) {
                    replay.stage = Stage::Ready(request);
                }
            }
            OperatorEvent::WorkerNotStarted { message, .. } => replay.fail(message),
            OperatorEvent::WorkerExited { ending, .. } if replay.end.is_none() => {
                replay.cause = cause_of(&ending);
                if matches!(replay.stage, Stage::Starting(_) | Stage::Ready(_)) {
                    replay.fail_unread();
                }
            }
            _ => {}
        }
    }

    /// Records that the program running a replayed job has died. The worker that started the program continues to run.
    pub(super) fn program_died(&mut self, compartment: CompartmentIndex, cause: Cause) {
        if let Some(replay) = self.of(compartment).filter(|replay| replay.end.is_none()) {
            replay.cause = Some(cause);
        }
    }

    pub(super) fn answered(&mut self, compartment: CompartmentIndex, answer: &JobOutcome<Box<JobData>>) {
        let Some(replay) = self.of(compartment) else { return };
        match &answer.verdict {
            Verdict::Rejected { .. } if replay.cause.is_some() => replay.fail_unread(),
            Verdict::Rejected { reason, message } => replay.fail(format!("{reason}: {message}")),
            verdict => drop(replay.end.get_or_insert_with(|| (Ok(verdict.clone()), answer.ran))),
        }
    }

    /// Returns the next step of a replay, which the caller must perform before the next call. Must be called until it
    /// returns `None`, because a replay that ends immediately does not cause another event.
    pub(super) fn next_step(&mut self, is_stopped: impl Fn(CompartmentIndex) -> bool) -> Option<Step> {
        if let Some(at) = self.0.iter().position(|replay| is_stopped(replay.compartment)) {
            let replay = self.0.remove(at);
            let compartment = replay.compartment;
            replay.finish();
            return Some(Step::Remove(compartment));
        }
        self.0.iter_mut().find_map(Replay::next_step)
    }
}

impl Replay {
    fn next_step(&mut self) -> Option<Step> {
        let next = if self.end.is_some() { Stage::Ending } else { Stage::Running };
        match (std::mem::replace(&mut self.stage, next), self.end.is_some()) {
            (Stage::Ready(request), false) => Some(Step::Submit(self.compartment, request)),
            (stage @ (Stage::Starting(_) | Stage::Running), false) | (stage @ Stage::Ending, _) => {
                self.stage = stage;
                None
            }
            (_, true) => Some(Step::Stop(self.compartment)),
        }
    }

    fn fail(&mut self, message: String) {
        self.end.get_or_insert((Err(message), Duration::ZERO));
    }

    fn fail_unread(&mut self) {
        let how = self.cause.as_ref().map_or("the worker was stopped", |cause| &cause.message);
        self.fail(format!("the worker terminated before it received the job: {how}"));
    }

    fn finish(self) {
        let stopping = || (Err("the supervisor is stopping".to_owned()), Duration::ZERO);
        let (verdict, ran) = self.end.unwrap_or_else(stopping);
        let is_crash = matches!(verdict, Ok(Verdict::Crashed { .. }));
        let cause = self.cause.filter(|_| is_crash);
        // Fails only if the requester is gone.
        let _ = self.done.send(ReplayResult { pid: self.pid, verdict, cause, ran });
    }
}

/// Returns a copy of a bulkhead's limits for a single worker that runs a single job. Changes all limits that could
/// cause the job to be rejected, such as the queue timeout.
pub(super) fn limits_for_one(limits: &Limits) -> Limits {
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

#[cfg(test)]
mod tests {
    use bulkhead_policy::{Death, WorkerId};

    use super::*;
    use crate::slab::SlabIndex;

    fn replay() -> (Replays, CompartmentIndex, oneshot::Receiver<ReplayResult>) {
        let (compartment, (done, result)) = (CompartmentIndex::from_number(3), oneshot::channel());
        let request = ReplayRequest {
            bulkhead: "b".into(),
            operation: "resize".into(),
            tenant: String::new(),
            payload: vec![1],
        };
        let mut replays = Replays::default();
        replays.add(compartment, request, done);
        (replays, compartment, result)
    }

    #[test]
    fn replay_runs_job_and_removes_its_compartment() {
        let (mut replays, compartment, mut result) = replay();
        assert!(replays.next_step(|_| false).is_none());
        let worker = WorkerId { place: 0, generation: 1 };
        replays.note(compartment, OperatorEvent::WorkerStarted { worker, slot: 0, pid: 7 });
        replays.note(compartment, OperatorEvent::WorkerReady { worker, pid: 7, after: Duration::ZERO });
        assert!(matches!(replays.next_step(|_| false), Some(Step::Submit(..))));
        assert!(replays.next_step(|_| false).is_none());
        assert!(matches!(replays.next_step(|_| true), Some(Step::Remove(index)) if index == compartment));
        assert_eq!(result.try_recv().unwrap().pid, Some(7));
    }

    #[test]
    fn replay_ends_if_worker_dies_before_running_the_job() {
        let (mut replays, compartment, _result) = replay();
        let worker = WorkerId { place: 0, generation: 1 };
        replays.note(
            compartment,
            OperatorEvent::WorkerExited {
                worker,
                slot: 0,
                pid: 7,
                ending: Death::Signal(11).into(),
                uptime: Duration::ZERO,
                served: 0,
                in_flight: 0,
            },
        );
        assert!(matches!(replays.next_step(|_| false), Some(Step::Stop(_))));
        assert!(replays.next_step(|_| false).is_none());
    }
}
