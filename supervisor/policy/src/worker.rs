//! One worker process: its relation to its slot, the phase of its life, and its jobs.

use std::collections::VecDeque;
use std::time::Duration;

use crate::ending::{Ending, KillReason, RecycleReason};
use crate::limits::{Limits, StartMode};
use crate::messages::{JobJournal, WorkerId};
use crate::tenants::TenantId;
use crate::time::Time;

/// Maximum time until an ordered process runs. Long, because the keeper starts processes one after the other.
/// The time of `start.handshake` begins once the process runs.
const SPAWN_TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum time until a process forked from a template runs. The template may ask for more time to initialise,
/// and the owner of the workers kills a template that takes too long. The start then fails.
const FORK_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

#[derive(Default)]
pub(crate) struct Worker {
    pub(crate) id: WorkerId,
    pub(crate) assignment: Assignment,
    pub(crate) phase: Phase,
    pub(crate) pid: Option<u32>,
    pub(crate) spawned_at: Time,
    pub(crate) ready_at: Option<Time>,
    pub(crate) last_heard_at: Time,
    pub(crate) silence: SilenceCheck,
    /// Number of consecutive silences that were blamed on the machine.
    pub(crate) excused_silences: u32,
    pub(crate) has_dispatch_thread: bool,
    /// Heartbeat interval that the worker was given.
    pub(crate) heartbeat: Duration,
    pub(crate) revision: Revision,
    /// True if the worker can change its `max_in_flight`.
    pub(crate) can_resize: bool,
    /// `max_in_flight` that the worker was last sent. `u32::MAX` before the welcome.
    pub(crate) sent_max_in_flight: u32,
    /// The worker's record of begun jobs. Without a record, jobs are neither prefetched nor recalled.
    pub(crate) journal: Option<Box<dyn JobJournal>>,
    /// Number of jobs sent; number of the last job begun, as last read; number up to which jobs were
    /// recalled.
    pub(crate) sent: u64,
    pub(crate) last_begun: u64,
    pub(crate) recalled_up_to: u64,
    /// Next time to check for jobs that the worker is late to begin.
    pub(crate) next_begin_check: Option<Time>,
    /// True if the worker was late to begin a job with a permit, and has shown no sign of life since.
    pub(crate) is_stalled: bool,
    /// Prefetched jobs, oldest first.
    pub(crate) prefetched: VecDeque<u32>,
    pub(crate) prefetched_bytes: u32,
    /// Last time that the worker was given a job with a permit or answered a job.
    pub(crate) last_progress_at: Time,
    /// Number of checks since `last_progress_at` that found the worker late to begin a job.
    pub(crate) late_checks: u8,
    /// Tenant of the worker's jobs, if all belong to the same tenant.
    pub(crate) tenant: Option<TenantId>,
    /// Exclusive use of the worker by one suspect job.
    pub(crate) exclusivity: Exclusivity,
    /// Indexes of the jobs with a permit.
    pub(crate) jobs: Vec<u32>,
    /// Number of jobs that the dead worker had not begun, according to the worker's own record.
    pub(crate) unbegun: usize,
    /// Number of jobs with a permit that a client still waits for.
    pub(crate) awaited_jobs: u32,
    /// Number of jobs with a permit that have passed the bulkhead's own deadline or run limit.
    pub(crate) overdue_jobs: u32,
    /// Time at which the worker is killed, unless it replies or exits before.
    pub(crate) kill_at: Option<Time>,
    pub(crate) served: u64,
    /// Number of jobs given to the worker.
    pub(crate) jobs_given: u64,
    /// No replacement of this worker is tried before this time. For a successor on standby, the next time to
    /// check if the slot's worker still gets jobs.
    pub(crate) next_replacement_at: Time,
    /// Next time to check `recycle.age`.
    pub(crate) next_age_check: Time,
    /// Last status received before the worker became ready.
    pub(crate) last_start_status: Option<String>,
}

/// Relation of a worker to its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Assignment {
    /// The worker fills a slot for jobs. `is_at_job_limit` is true if the worker was given all jobs that
    /// `recycle.jobs` allows.
    Active { slot: u32, is_at_job_limit: bool },
    /// The worker fills a spare slot.
    Spare { slot: u32 },
    /// The worker takes over the slot once ready. If the reason is `recycle.jobs`, the successor first waits
    /// until the slot's worker was given its last job.
    Successor { slot: u32, reason: RecycleReason },
    /// The worker was replaced, and its running jobs are charged to the last slot that it filled. The slot
    /// waits for the worker until `has_released_slot`.
    Replaced { slot: u32, charged_slot: u32, was_killed: bool, has_released_slot: bool },
    /// The worker was already killed when a spare took over, and fills the spare slot until it is gone. Its
    /// end is charged to the last slot that it filled.
    Displaced { slot: u32, charged_slot: u32, is_at_job_limit: bool },
}

impl Default for Assignment {
    fn default() -> Self {
        Self::Spare { slot: 0 }
    }
}

impl Assignment {
    /// Returns the assignment of the only worker of a slot.
    pub(crate) fn of_slot(slot: u32, is_spare_slot: bool) -> Self {
        if is_spare_slot { Self::Spare { slot } } else { Self::Active { slot, is_at_job_limit: false } }
    }

    pub(crate) fn slot(self) -> u32 {
        let (Self::Active { slot, .. }
        | Self::Spare { slot }
        | Self::Successor { slot, .. }
        | Self::Replaced { slot, .. }
        | Self::Displaced { slot, .. }) = self;
        slot
    }

    /// Returns the last slot that the worker filled. Running jobs and the end of the worker are charged to
    /// this slot.
    pub(crate) fn charged_slot(self) -> u32 {
        match self {
            Self::Replaced { charged_slot, .. } | Self::Displaced { charged_slot, .. } => charged_slot,
            _ => self.slot(),
        }
    }

    pub(crate) fn is_active(self) -> bool {
        matches!(self, Self::Active { .. })
    }

    pub(crate) fn is_spare(self) -> bool {
        matches!(self, Self::Spare { .. })
    }

    pub(crate) fn is_replaced(self) -> bool {
        matches!(self, Self::Replaced { .. })
    }

    /// Returns true if the worker fills its slot.
    pub(crate) fn is_current(self) -> bool {
        matches!(self, Self::Active { .. } | Self::Spare { .. } | Self::Displaced { .. })
    }

    /// Returns true if the worker was given all jobs that `recycle.jobs` allows.
    pub(crate) fn is_at_job_limit(self) -> bool {
        matches!(
            self,
            Self::Active { is_at_job_limit: true, .. } | Self::Displaced { is_at_job_limit: true, .. }
        )
    }

    /// Returns true if the running jobs are an overcommit of the charged slot.
    pub(crate) fn is_overcommit(self) -> bool {
        matches!(self, Self::Replaced { was_killed: false, .. })
    }

    /// Returns the slot that waits for this replaced worker.
    pub(crate) fn unreleased_slot(self) -> Option<u32> {
        match self {
            Self::Replaced { slot, has_released_slot: false, .. } => Some(slot),
            _ => None,
        }
    }
}

/// Program and configuration that a worker runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Revision {
    /// Current program and configuration.
    #[default]
    UpToDate,
    /// Outdated program or configuration. If a replacement failed to start, the next attempt is made at
    /// `retry_at`.
    Outdated { retry_at: Option<Time> },
}

/// State of the check of a worker that missed its heartbeats.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum SilenceCheck {
    /// The worker is not silent.
    #[default]
    None,
    /// Processor time is being observed until this time.
    Observing { until: Time },
    /// The caller was asked for the result of the observation.
    AwaitingResult,
}

/// Exclusive use of a worker by one suspect job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Exclusivity {
    /// The worker runs ordinary jobs.
    #[default]
    Shared,
    /// The worker takes no new jobs, so that it becomes idle for a suspect.
    Draining,
    /// A suspect runs alone in the worker.
    Exclusive,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The process was ordered or spawned, and has sent no hello.
    Handshaking { until: Time },
    /// The worker has sent its hello and initialises.
    Initializing { until: Time },
    /// The worker takes jobs.
    Ready,
    /// The worker finishes its jobs and exits.
    Draining,
    /// The worker was sent SIGKILL and has not exited.
    Killing(KillReason),
    /// The worker has exited, and its descendants are being reaped.
    Dead(EndEffect),
}

impl Default for Phase {
    fn default() -> Self {
        Self::Handshaking { until: Time::ZERO }
    }
}

/// Consequences of a worker's end for its slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct EndEffect {
    /// The worker did not start, or ended without having done a job.
    pub(crate) is_failure: bool,
    /// The worker exited with status 0 while idle.
    pub(crate) is_clean: bool,
    /// The worker became ready and died during its first jobs.
    pub(crate) is_early_death: bool,
    /// The worker was killed before it had begun a job, because it was no longer needed.
    pub(crate) is_not_needed: bool,
    /// The worker had been given all jobs that `recycle.jobs` allows.
    pub(crate) is_at_job_limit: bool,
}

impl EndEffect {
    pub(crate) fn of(worker: &Worker, ending: &Ending) -> Self {
        let (was_ready, is_idle) = (worker.ready_at.is_some(), worker.jobs.is_empty());
        let is_fault = ending.is_fault_of_worker() && !worker.assignment.is_replaced();
        let is_failure = is_fault && (!was_ready || is_idle && worker.served == 0);
        let is_due_to_jobs = is_fault || ending.killed == Some(KillReason::Deadline);
        Self {
            is_failure,
            is_clean: ending.is_clean() && is_idle && was_ready,
            is_early_death: is_due_to_jobs && !is_failure && worker.served == 0,
            is_not_needed: ending.killed == Some(KillReason::NotNeeded),
            is_at_job_limit: worker.assignment.is_at_job_limit(),
        }
    }
}

impl Worker {
    pub(crate) fn new(id: WorkerId, assignment: Assignment, now: Time, limits: &Limits) -> Self {
        let spawn_timeout = match limits.start.mode {
            StartMode::Spawn => SPAWN_TIMEOUT,
            StartMode::Fork => FORK_TIMEOUT,
        };
        Self {
            id,
            assignment,
            phase: Phase::Handshaking { until: now + limits.start.handshake.max(spawn_timeout) },
            spawned_at: now,
            last_heard_at: now,
            heartbeat: limits.health.heartbeat,
            sent_max_in_flight: u32::MAX,
            last_progress_at: now,
            ..Self::default()
        }
    }

    /// Returns true if the worker has neither running nor prefetched jobs.
    pub(crate) fn is_idle(&self) -> bool {
        self.jobs.is_empty() && self.prefetched.is_empty()
    }

    /// Returns true if the process has exited.
    pub(crate) fn is_dead(&self) -> bool {
        matches!(self.phase, Phase::Dead(_))
    }

    /// Returns the reason of a kill that has not been followed by an exit.
    pub(crate) fn killed(&self) -> Option<KillReason> {
        match &self.phase {
            Phase::Killing(reason) => Some(reason.clone()),
            _ => None,
        }
    }

    /// Returns the process id while the process runs.
    pub(crate) fn living_pid(&self) -> Option<u32> {
        self.pid.filter(|_| !self.is_dead())
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.phase == Phase::Ready
    }

    /// Returns true if the worker was started and is not ready yet.
    pub(crate) fn is_starting(&self) -> bool {
        matches!(self.phase, Phase::Handshaking { .. } | Phase::Initializing { .. })
    }

    /// Returns true if the worker was sent SIGKILL or has exited.
    pub(crate) fn is_ending(&self) -> bool {
        matches!(self.phase, Phase::Killing(_) | Phase::Dead(_))
    }

    /// Returns true if the worker's permits are part of the limit.
    pub(crate) fn is_available(&self) -> bool {
        self.is_ready() && self.kill_at.is_none() && self.assignment.is_active()
    }

    /// Returns true if the worker is a spare that is ready for jobs.
    pub(crate) fn is_ready_spare(&self) -> bool {
        self.is_ready() && self.assignment.is_spare()
    }

    /// Returns true if the worker is a successor that is ready and waits for the slot.
    pub(crate) fn is_standby(&self) -> bool {
        self.is_ready() && matches!(self.assignment, Assignment::Successor { .. })
    }

    /// Returns true if the worker exits because it was given its last job.
    pub(crate) fn is_leaving_at_job_limit(&self) -> bool {
        self.phase == Phase::Draining && self.assignment.is_at_job_limit()
    }

    /// Returns true if the worker was replaced, has finished its jobs, and still occupies its slot.
    pub(crate) fn is_finished(&self) -> bool {
        self.assignment.unreleased_slot().is_some() && self.phase == Phase::Draining && self.is_idle()
    }

    /// Returns true if the worker may be given another job as far as its permits allow.
    pub(crate) fn takes_jobs(&self) -> bool {
        self.is_available() && self.exclusivity == Exclusivity::Shared && !self.is_stalled
    }

    /// Returns true if the worker can prefetch jobs: all its permits are used, but not more. With more jobs
    /// than permits, a reply would not free a permit for a prefetched job.
    pub(crate) fn can_prefetch(&self, permits: u32) -> bool {
        self.journal.is_some()
            && self.is_available()
            && self.exclusivity == Exclusivity::Shared
            && !self.jobs.is_empty()
            && self.jobs.len() as u32 == permits
            && self.served > 0
            && self.late_checks == 0
    }

    /// Returns true if no client waits for any of the worker's jobs, or if a job has passed the bulkhead's own
    /// deadline or run limit.
    pub(crate) fn is_stuck(&self) -> bool {
        !self.jobs.is_empty() && (self.awaited_jobs == 0 || self.overdue_jobs > 0)
    }

    /// Marks the worker as replaced. The worker stays in `slot` until it has finished its jobs.
    pub(crate) fn replace(&mut self, slot: u32, was_killed: bool) {
        let was_killed = was_killed || matches!(self.assignment, Assignment::Displaced { .. });
        let charged_slot = self.assignment.charged_slot();
        self.assignment = Assignment::Replaced { slot, charged_slot, was_killed, has_released_slot: false };
    }

    /// Releases the slot of a replaced worker, and returns the slot.
    pub(crate) fn release_slot(&mut self) -> u32 {
        if let Assignment::Replaced { has_released_slot, .. } = &mut self.assignment {
            *has_released_slot = true;
        }
        self.assignment.slot()
    }

    /// Adds a job with a permit, and returns its index in the list of jobs.
    pub(crate) fn add_job(&mut self, now: Time, index: u32, tenant: TenantId, is_suspect: bool) -> u32 {
        let is_of_same = self.jobs.is_empty() || self.tenant == Some(tenant);
        self.tenant = is_of_same.then_some(tenant);
        self.last_progress_at = now;
        self.late_checks = if self.jobs.is_empty() { 0 } else { self.late_checks };
        self.jobs.push(index);
        self.awaited_jobs += 1;
        self.jobs_given += 1;
        if is_suspect {
            self.exclusivity = Exclusivity::Exclusive;
        }
        self.jobs.len() as u32 - 1
    }

    /// Removes the job at `at` in the list of jobs. Returns the job that has moved to `at`.
    pub(crate) fn remove_job(&mut self, at: u32, is_overdue: bool, is_suspect: bool) -> Option<u32> {
        self.jobs.swap_remove(at as usize);
        self.overdue_jobs -= u32::from(is_overdue);
        if is_suspect {
            self.exclusivity = Exclusivity::Shared;
        }
        self.jobs.get(at as usize).copied()
    }

    /// Returns the number of the next job in the order of sending. With `check_at`, schedules a check for
    /// jobs that should have begun.
    pub(crate) fn send(&mut self, check_at: Option<Time>) -> (WorkerId, u64) {
        self.sent += 1;
        if let Some(at) = check_at {
            self.schedule_begin_check(at);
        }
        (self.id, self.sent)
    }

    /// Schedules a check for jobs that the worker should have begun, unless one is scheduled.
    pub(crate) fn schedule_begin_check(&mut self, at: Time) {
        if self.journal.is_some() && self.next_begin_check.is_none() && self.may_have_unbegun() {
            self.next_begin_check = Some(at);
        }
    }

    /// Records that the worker has begun or answered a job. A worker that was late is checked again at
    /// `check_at`.
    pub(crate) fn record_progress(&mut self, now: Time, check_at: Time) {
        self.last_progress_at = now;
        if std::mem::take(&mut self.late_checks) > 0 {
            self.next_begin_check = None;
            self.schedule_begin_check(check_at);
        }
    }

    /// Returns true if some jobs of the worker had not begun at the last reading.
    pub(crate) fn may_have_unbegun(&self) -> bool {
        self.last_begun.max(self.recalled_up_to) < self.sent
    }

    /// Returns true if the worker has missed its heartbeats.
    pub(crate) fn is_silent(&self, now: Time, missed: u32) -> bool {
        self.last_heard_at + self.silence_max(missed) <= now
    }

    /// Returns the number of jobs that the worker may still be given.
    pub(crate) fn jobs_left(&self, limits: &Limits) -> u64 {
        limits.recycle.jobs.map_or(u64::MAX, |most| most.saturating_sub(self.jobs_given))
    }

    /// Returns the maximum silence: the time of `missed` heartbeats, plus one that may be in transit.
    pub(crate) fn silence_max(&self, missed: u32) -> Duration {
        self.heartbeat.saturating_mul(missed.saturating_add(1))
    }

    /// Returns the time of the next attempt to replace an outdated worker after a failed attempt.
    pub(crate) fn retry_replacement_at(&self) -> Option<Time> {
        match self.revision {
            Revision::Outdated { retry_at } if self.assignment.is_current() => retry_at,
            _ => None,
        }
    }

    /// Returns true if the worker must send heartbeats. A worker without a dispatch thread must send
    /// heartbeats only while idle.
    pub(crate) fn owes_heartbeats(&self) -> bool {
        self.has_dispatch_thread || self.jobs.is_empty()
    }

    pub(crate) fn state_name(&self) -> &'static str {
        let [spawning, handshaking, initializing, ready, busy, draining, terminating, killing, reaping] =
            WORKER_STATES;
        match self.phase {
            Phase::Handshaking { .. } if self.pid.is_none() => spawning,
            Phase::Handshaking { .. } => handshaking,
            Phase::Initializing { .. } => initializing,
            Phase::Ready if self.kill_at.is_some() => terminating,
            Phase::Ready if self.jobs.is_empty() => ready,
            Phase::Ready => busy,
            Phase::Draining => draining,
            Phase::Killing(_) => killing,
            Phase::Dead(_) => reaping,
        }
    }
}

/// Names of worker states, as used in every interface.
pub const WORKER_STATES: [&str; 9] = [
    "spawning",
    "handshaking",
    "initializing",
    "ready",
    "busy",
    "draining",
    "terminating",
    "killing",
    "reaping",
];
