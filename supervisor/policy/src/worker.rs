//! Records the state of one worker process, including its slot, lifecycle phase and jobs. Also answers questions about
//! this state, such as whether the worker can be given jobs. `workers` owns all workers and their permits.
//! `bulkhead/life.rs` decides when the phase changes.

use std::collections::VecDeque;
use std::time::Duration;

use crate::ending::{Ending, KillReason, RecycleReason};
use crate::limits::{Limits, StartMode};
use crate::messages::{JobJournal, WorkerId};
use crate::tenants::TenantId;
use crate::time::Time;

/// Maximum time between the request to start a process and the report that it is running. The timeout is long because
/// the keeper starts one process at a time. The `start.handshake` timeout begins once the process is running.
const SPAWN_TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum time between the request to fork a process from a template and the report that it is running. The timeout is
/// long because the template may request more time to initialise. If a template takes too long, the caller kills it,
/// and the worker's start then fails.
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
    /// Number of consecutive times that the worker's silence was attributed to a busy machine.
    pub(crate) excused_silences: u32,
    pub(crate) has_dispatch_thread: bool,
    /// Value of `health.heartbeat` when the worker received its welcome message.
    pub(crate) heartbeat: Duration,
    /// Minimum number of heartbeats that the worker must miss before it counts as hung. Greater than 0 if the welcome
    /// message allowed the worker to send only every second heartbeat.
    pub(crate) missed_min: u32,
    pub(crate) revision: Revision,
    /// True if the worker can change its `max_in_flight` while it is running.
    pub(crate) can_resize: bool,
    /// Most recent `max_in_flight` sent to the worker, or `u32::MAX` before the welcome message.
    pub(crate) sent_max_in_flight: u32,
    /// Journal of the jobs that the worker has started. Without a journal, no jobs are prefetched to the worker or
    /// recalled from it.
    pub(crate) journal: Option<Box<dyn JobJournal>>,
    /// Number of jobs sent to the worker.
    pub(crate) sent: u64,
    /// Sequence number of the last job that the worker is known to have started.
    pub(crate) last_begun: u64,
    /// Sequence number of the last job sent to the worker before the most recent recall of all jobs.
    pub(crate) recalled_up_to: u64,
    /// Time of the next check for jobs that the worker is late in starting.
    pub(crate) next_begin_check: Option<Time>,
    /// True if the worker was late in starting a job and has not shown a sign of life since then.
    pub(crate) is_stalled: bool,
    /// Prefetched jobs, oldest first.
    pub(crate) prefetched: VecDeque<u32>,
    pub(crate) prefetched_bytes: u32,
    /// Time at which the worker last received a job with a permit, sent a result or returned a job.
    pub(crate) last_progress_at: Time,
    /// Number of checks since `last_progress_at` that found the worker late in starting a job.
    pub(crate) late_checks: u8,
    /// Tenant to which all the worker's jobs belong, or `None` if the jobs belong to different tenants.
    pub(crate) tenant: Option<TenantId>,
    /// Whether the worker is reserved for a single suspect job.
    pub(crate) exclusivity: Exclusivity,
    /// Indexes of the jobs in flight.
    pub(crate) jobs: Vec<u32>,
    /// Number of jobs that the worker had not started when it died, according to the worker's own record.
    pub(crate) unbegun: usize,
    /// Number of jobs in flight whose clients are still waiting.
    pub(crate) awaited_jobs: u32,
    /// Number of jobs in flight that have exceeded the bulkhead's own deadline or run limit.
    pub(crate) overdue_jobs: u32,
    /// Time at which the worker will be killed if the reason for the kill still applies.
    pub(crate) kill_at: Option<Time>,
    pub(crate) served: u64,
    pub(crate) jobs_given: u64,
    /// Earliest time of the next attempt to replace this worker. If the worker is a standby, the next time to check
    /// whether the worker in its slot is idle.
    pub(crate) next_replacement_at: Time,
    /// Next time to check whether the worker has exceeded `recycle.age`.
    pub(crate) next_age_check: Time,
    /// Last status message that the worker sent during initialisation.
    pub(crate) last_start_status: Option<String>,
}

/// Role of a worker in its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Assignment {
    /// The worker fills a job slot. `is_at_job_limit` is true if the worker has been given all the jobs that
    /// `recycle.jobs` allows.
    Active { slot: u32, is_at_job_limit: bool },
    /// The worker fills a spare slot.
    Spare { slot: u32 },
    /// Once the worker is ready, it takes over the slot. If the reason is `recycle.jobs`, the worker remains a standby
    /// until the slot's current worker has been given its last job.
    Successor { slot: u32, reason: RecycleReason },
    /// The worker has been replaced. Its running jobs are charged to the last slot that it filled. Unless
    /// `has_released_slot` is set, the slot waits for the worker to leave.
    Replaced { slot: u32, charged_slot: u32, was_killed: bool, has_released_slot: bool },
    /// The worker had already been killed when a spare took over its slot. The worker occupies the spare slot until it
    /// is gone. Its death is charged to the last slot that it filled.
    Displaced { slot: u32, charged_slot: u32, is_at_job_limit: bool },
}

/// Exchange of two slots' numbers.
#[derive(Clone, Copy)]
pub(crate) struct SlotExchange(pub(crate) u32, pub(crate) u32);

impl SlotExchange {
    pub(crate) fn apply(self, slot: &mut u32) {
        if *slot == self.0 {
            *slot = self.1;
        } else if *slot == self.1 {
            *slot = self.0;
        }
    }
}

impl Default for Assignment {
    fn default() -> Self {
        Self::Spare { slot: 0 }
    }
}

impl Assignment {
    /// Returns the assignment for a worker in a slot that has no other worker.
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

    /// Returns the last slot that the worker filled. The worker's running jobs and its death are charged to this slot.
    pub(crate) fn charged_slot(self) -> u32 {
        match self {
            Self::Replaced { charged_slot, .. } | Self::Displaced { charged_slot, .. } => charged_slot,
            _ => self.slot(),
        }
    }

    /// Applies an exchange of two slots' numbers.
    pub(crate) fn renumber(&mut self, exchange: SlotExchange) {
        match self {
            Self::Active { slot, .. } | Self::Spare { slot } | Self::Successor { slot, .. } => {
                exchange.apply(slot);
            }
            Self::Replaced { slot, charged_slot, .. } | Self::Displaced { slot, charged_slot, .. } => {
                exchange.apply(slot);
                exchange.apply(charged_slot);
            }
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

    /// Returns true if the worker has been given all the jobs that `recycle.jobs` allows.
    pub(crate) fn is_at_job_limit(self) -> bool {
        matches!(
            self,
            Self::Active { is_at_job_limit: true, .. } | Self::Displaced { is_at_job_limit: true, .. }
        )
    }

    /// Returns true if the worker's running jobs count as overcommit of the last slot that the worker filled.
    pub(crate) fn is_overcommit(self) -> bool {
        matches!(self, Self::Replaced { was_killed: false, .. })
    }

    /// Returns the slot that is waiting for this replaced worker to leave, or `None` if no slot is waiting.
    pub(crate) fn unreleased_slot(self) -> Option<u32> {
        match self {
            Self::Replaced { slot, has_released_slot: false, .. } => Some(slot),
            _ => None,
        }
    }
}

/// Whether a worker runs with the current program, configuration and secrets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Revision {
    /// The worker was started after the last restart and after the last configuration change.
    #[default]
    UpToDate,
    /// The worker was started before the last restart. If a replacement fails to start, no further attempt is made to
    /// replace the worker.
    BeforeRestart,
    /// The worker has a previous program or configuration. If a replacement failed to start, `retry_at` is the time of
    /// the next attempt to replace the worker.
    BeforeReload { retry_at: Option<Time> },
}

/// Progress of the check that determines why the worker missed heartbeats.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum SilenceCheck {
    /// No check is in progress, because the worker is not silent.
    #[default]
    None,
    /// The worker is silent, and the supervisor is measuring how much processor time the worker uses. The measurement
    /// ends at this time.
    Observing { until: Time },
    /// The measurement has ended, and the caller has been asked how much processor time the worker used.
    AwaitingResult,
}

/// Whether a worker is reserved for a single suspect job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Exclusivity {
    /// The worker runs ordinary jobs.
    #[default]
    Shared,
    /// The worker receives no new jobs until it is idle. It then runs the suspect job alone.
    Draining,
    /// The worker runs one suspect job and receives no other jobs.
    Exclusive,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The process is starting or running but has not sent HELLO yet.
    Handshaking { until: Time },
    /// The worker has sent HELLO and is initialising.
    Initializing { until: Time },
    /// The worker accepts jobs.
    Ready,
    /// The worker is finishing its jobs and will then exit.
    Draining,
    /// The worker was sent SIGKILL and has not exited yet.
    Killing(KillReason),
    /// The worker's process has exited, and its descendants are being reaped.
    Dead(EndEffect),
}

impl Default for Phase {
    fn default() -> Self {
        Self::Handshaking { until: Time::ZERO }
    }
}

/// Details of a worker's exit that determine how its slot is refilled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct EndEffect {
    /// The worker failed to start, or exited while idle without having completed a job.
    pub(crate) is_failure: bool,
    /// The worker was not started because no user ID was free.
    pub(crate) lacks_id: bool,
    /// The worker exited with status 0 while idle.
    pub(crate) is_clean: bool,
    /// The worker became ready and died during its first jobs.
    pub(crate) is_early_death: bool,
    /// The worker was no longer needed, and was killed before it had started any job.
    pub(crate) is_not_needed: bool,
    /// The worker had been given all the jobs that `recycle.jobs` allows.
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
            lacks_id: false,
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

    /// Returns true if the worker has neither jobs in flight nor prefetched jobs.
    pub(crate) fn is_idle(&self) -> bool {
        self.jobs.is_empty() && self.prefetched.is_empty()
    }

    /// Returns true if the process has exited.
    pub(crate) fn is_dead(&self) -> bool {
        matches!(self.phase, Phase::Dead(_))
    }

    /// Returns the reason for killing the worker, or `None` if the worker is not being killed.
    pub(crate) fn killed(&self) -> Option<KillReason> {
        match &self.phase {
            Phase::Killing(reason) => Some(reason.clone()),
            _ => None,
        }
    }

    /// Returns the PID of the worker's process, or `None` if the process is not running.
    pub(crate) fn living_pid(&self) -> Option<u32> {
        self.pid.filter(|_| !self.is_dead())
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.phase == Phase::Ready
    }

    /// Returns true if the worker was started but is not ready yet.
    pub(crate) fn is_starting(&self) -> bool {
        matches!(self.phase, Phase::Handshaking { .. } | Phase::Initializing { .. })
    }

    /// Returns true if the worker was sent SIGKILL or has exited.
    pub(crate) fn is_ending(&self) -> bool {
        matches!(self.phase, Phase::Killing(_) | Phase::Dead(_))
    }

    /// Returns true if the worker's permits count towards the limit.
    pub(crate) fn is_available(&self) -> bool {
        self.is_ready() && self.kill_at.is_none() && self.assignment.is_active()
    }

    pub(crate) fn is_ready_spare(&self) -> bool {
        self.is_ready() && self.assignment.is_spare()
    }

    /// Returns true if the worker is a ready successor that is waiting to take over the slot.
    pub(crate) fn is_standby(&self) -> bool {
        self.is_ready() && matches!(self.assignment, Assignment::Successor { .. })
    }

    /// Returns true if the worker is draining because it has been given its last job.
    pub(crate) fn is_leaving_at_job_limit(&self) -> bool {
        self.phase == Phase::Draining && self.assignment.is_at_job_limit()
    }

    /// Returns true if the worker was replaced and has finished its jobs, but still occupies its slot.
    pub(crate) fn is_finished(&self) -> bool {
        self.assignment.unreleased_slot().is_some() && self.phase == Phase::Draining && self.is_idle()
    }

    /// Returns true if the worker can be given jobs. Does not check for free permits.
    pub(crate) fn takes_jobs(&self) -> bool {
        self.is_available() && self.exclusivity == Exclusivity::Shared && !self.is_stalled
    }

    /// Returns true if jobs can be prefetched to the worker. The number of running jobs must equal the number of
    /// permits, because with more running jobs, a reply would not free a permit.
    pub(crate) fn can_prefetch(&self, permits: u32) -> bool {
        self.journal.is_some()
            && self.is_available()
            && self.exclusivity == Exclusivity::Shared
            && !self.jobs.is_empty()
            && self.jobs.len() as u32 == permits
            && self.served > 0
            && self.late_checks == 0
    }

    /// Returns true if the worker has jobs but no client is waiting for any of them, or if one of the jobs has exceeded
    /// the bulkhead's own deadline or run limit.
    pub(crate) fn is_stuck(&self) -> bool {
        !self.jobs.is_empty() && (self.awaited_jobs == 0 || self.overdue_jobs > 0)
    }

    /// Marks the worker as replaced. The worker stays in `slot` until it has finished its jobs.
    pub(crate) fn replace(&mut self, slot: u32, was_killed: bool) {
        let was_killed = was_killed || matches!(self.assignment, Assignment::Displaced { .. });
        let charged_slot = self.assignment.charged_slot();
        self.assignment = Assignment::Replaced { slot, charged_slot, was_killed, has_released_slot: false };
    }

    /// Records that a replaced worker has released its slot. Returns the slot.
    pub(crate) fn release_slot(&mut self) -> u32 {
        if let Assignment::Replaced { has_released_slot, .. } = &mut self.assignment {
            *has_released_slot = true;
        }
        self.assignment.slot()
    }

    /// Adds a job in flight and returns its index in the list of jobs.
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

    /// Removes the job at index `at` from the list of jobs. Returns the job that has moved to this index, if any.
    pub(crate) fn remove_job(&mut self, at: u32, is_overdue: bool, is_suspect: bool) -> Option<u32> {
        self.jobs.swap_remove(at as usize);
        self.overdue_jobs -= u32::from(is_overdue);
        if is_suspect {
            self.exclusivity = Exclusivity::Shared;
        }
        self.jobs.get(at as usize).copied()
    }

    /// Assigns a number to the next job sent to the worker. If `check_at` is set, schedules a check at that time for
    /// jobs that the worker has not started.
    pub(crate) fn send(&mut self, check_at: Option<Time>) -> (WorkerId, u64) {
        self.sent += 1;
        if let Some(at) = check_at {
            self.schedule_begin_check(at);
        }
        (self.id, self.sent)
    }

    /// Schedules a check at `at` for jobs that the worker has not started. Does nothing if a check is already
    /// scheduled.
    pub(crate) fn schedule_begin_check(&mut self, at: Time) {
        if self.journal.is_some() && self.next_begin_check.is_none() && self.may_have_unbegun() {
            self.next_begin_check = Some(at);
        }
    }

    /// Records that the worker sent a result or returned a job. If the worker was late in starting a job, schedules the
    /// next check at `check_at`.
    pub(crate) fn record_progress(&mut self, now: Time, check_at: Time) {
        self.last_progress_at = now;
        if std::mem::take(&mut self.late_checks) > 0 {
            self.next_begin_check = None;
            self.schedule_begin_check(check_at);
        }
    }

    /// Returns true if the worker had not started all its jobs when its journal was last read.
    pub(crate) fn may_have_unbegun(&self) -> bool {
        self.last_begun.max(self.recalled_up_to) < self.sent
    }

    /// Returns true if the worker has been silent for long enough to have missed `missed` heartbeats.
    pub(crate) fn is_silent(&self, now: Time, missed: u32) -> bool {
        self.last_heard_at + self.silence_max(missed) <= now
    }

    /// Returns the number of jobs that the worker can still be given under `recycle.jobs`.
    pub(crate) fn jobs_left(&self, limits: &Limits) -> u64 {
        limits.recycle.jobs.map_or(u64::MAX, |most| most.saturating_sub(self.jobs_given))
    }

    /// Returns the maximum time that the worker can be silent: `missed` heartbeat intervals, plus one for a
    /// heartbeat in transit.
    pub(crate) fn silence_max(&self, missed: u32) -> Duration {
        self.heartbeat.saturating_mul(missed.max(self.missed_min).saturating_add(1))
    }

    /// Returns true if the worker must be replaced, because it was started before an operator's `restart` command or
    /// runs an earlier version of the program or configuration.
    pub(crate) fn is_outdated(&self) -> bool {
        self.revision != Revision::UpToDate
    }

    /// Returns the time of the next attempt to replace an outdated worker, or `None` if no further attempt
    /// is scheduled.
    pub(crate) fn retry_replacement_at(&self) -> Option<Time> {
        match self.revision {
            Revision::BeforeReload { retry_at } if self.assignment.is_current() => retry_at,
            _ => None,
        }
    }

    /// Returns true if the worker must currently send heartbeats. A worker without a dispatch thread must send
    /// heartbeats only while it is idle.
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

/// Names of worker states, as used in all interfaces.
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
