//! The workers of a bulkhead and the slots that they fill. A worker is one process. A slot is a position that
//! should have a worker. While a worker is being replaced, the table of workers also has the slot's successor
//! and the worker that leaves.

use std::collections::VecDeque;
use std::time::Duration;

use crate::limits::{Limits, StartMode};
use crate::messages::{JobJournal, KillReason, RecycleReason, RestartCause, WorkerId};
use crate::restart::FailureHistory;
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
    pub(crate) slot: u32,
    /// Last slot that the worker filled. Running jobs and the end of the worker are accounted to this slot.
    pub(crate) charged_slot: u32,
    /// True if the worker's slot is a reserve slot, for spares.
    pub(crate) is_spare: bool,
    pub(crate) role: Role,
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
    /// Level of the worker in the table of workers with free prefetch slots.
    pub(crate) prefetch_level: Option<u32>,
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
    /// True if the worker has been given all jobs that `recycle.jobs` allows.
    pub(crate) is_at_job_limit: bool,
    /// No replacement of this worker is tried before this time. For a successor on standby, the next time to
    /// check if the slot's worker still gets jobs.
    pub(crate) next_replacement_at: Time,
    /// Next time to check `recycle.age`.
    pub(crate) next_age_check: Time,
    /// Level of the worker in the table of workers that may take a job.
    pub(crate) load_level: Option<u32>,
    /// True if the worker counts towards the limit.
    pub(crate) counts_towards_limit: bool,
    /// True if `Bulkhead::stalled` counts the worker.
    pub(crate) counted_as_stalled: bool,
    /// True if the slot no longer waits for the exit of this worker, which was replaced and has answered all
    /// jobs.
    pub(crate) has_released_slot: bool,
    /// True if the worker was already sent SIGKILL when its slot was reassigned. The worker's jobs then do
    /// not count towards the limit.
    pub(crate) killed_before_replacement: bool,
    /// Number of permits that the worker adds to the limit.
    pub(crate) permits: u32,
    /// Number of jobs that the worker adds to the overcommit of its slot.
    pub(crate) overcommit: u32,
    /// Last status received before the worker became ready.
    pub(crate) last_start_status: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Role {
    /// The worker fills its slot.
    #[default]
    Current,
    /// The worker takes over the slot once ready. If the reason is `recycle.jobs`, the successor first waits
    /// until the current worker was given its last job.
    Successor(RecycleReason),
    /// The worker was replaced.
    Replaced,
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
    Dead(End),
}

impl Default for Phase {
    fn default() -> Self {
        Self::Handshaking { until: Time::ZERO }
    }
}

/// Consequences of a worker's end for its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct End {
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

impl End {
    /// End of a worker whose process could not be started.
    pub(crate) const NOT_STARTED: Self = Self {
        is_failure: true,
        is_clean: false,
        is_early_death: false,
        is_not_needed: false,
        is_at_job_limit: false,
    };
}

impl Worker {
    pub(crate) fn new(id: WorkerId, slot: u32, role: Role, now: Time, limits: &Limits) -> Self {
        let patience = match limits.start.mode {
            StartMode::Spawn => SPAWN_TIMEOUT,
            StartMode::Fork => FORK_TIMEOUT,
        };
        Self {
            id,
            slot,
            charged_slot: slot,
            role,
            phase: Phase::Handshaking { until: now + limits.start.handshake.max(patience) },
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

    /// Returns true if the worker's permits are part of the limit.
    pub(crate) fn is_available(&self) -> bool {
        let is_at_work = self.role == Role::Current && !self.is_spare;
        self.phase == Phase::Ready && self.kill_at.is_none() && is_at_work
    }

    /// Returns true if the worker is in the reserve, unless it was moved there while being killed or dead.
    pub(crate) fn is_kept_spare(&self) -> bool {
        self.is_spare && self.role == Role::Current && !self.killed_before_replacement
    }

    /// Returns true if the worker is a spare that is ready for jobs.
    pub(crate) fn is_ready_spare(&self) -> bool {
        self.phase == Phase::Ready && self.role == Role::Current && self.is_spare
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
        match (self.revision, self.role) {
            (Revision::Outdated { retry_at }, Role::Current) => retry_at,
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

#[derive(Default)]
pub(crate) struct Slot {
    pub(crate) state: SlotState,
    /// True if the slot belongs to the reserve, for spares.
    pub(crate) is_spare_slot: bool,
    pub(crate) successor: Option<u32>,
    /// Number of replaced workers that have neither exited nor [left](Worker::has_released_slot).
    pub(crate) replaced: u32,
    /// Overcommit: number of jobs still running in replaced workers.
    pub(crate) overcommit: u32,
    /// Number of permits of the limit that the slot's workers use.
    pub(crate) in_use: u32,
    /// Number of permits that the slot's workers hold, whether part of the limit or not.
    pub(crate) permits_held: u32,
    pub(crate) history: FailureHistory,
    pub(crate) restarts: u64,
    /// State before the bulkhead rested, if the next worker was not due then.
    pub(crate) saved_state: Option<SlotState>,
    /// True if the next worker is a restart.
    pub(crate) has_had_worker: bool,
    /// Cause of the last worker's end.
    pub(crate) last_end: Option<RestartCause>,
    /// True if the first start has succeeded or failed.
    pub(crate) has_settled: bool,
    pub(crate) last_exit: Option<String>,
}

#[derive(Clone, Copy, Default)]
pub(crate) enum SlotState {
    /// The bulkhead has not started, rests, or stops.
    #[default]
    Empty,
    /// A worker will start at [`Event::Start`](crate::Event::Start), or once the previous worker is gone.
    Awaiting,
    /// The slot exceeds the configured number of workers.
    Closed,
    /// This worker fills the slot.
    Occupied(u32),
    /// The next worker starts at this time.
    Backoff { until: Time },
    /// Workers failed too often, or `restart.policy` forbids a restart. The next probe starts at `probe_at`,
    /// if at all.
    Stopped { probe_at: Option<Time> },
}

impl SlotState {
    /// Returns the place of the worker that fills the slot.
    pub(crate) fn worker(&self) -> Option<u32> {
        if let Self::Occupied(place) = self { Some(*place) } else { None }
    }

    /// Returns true if the slot has a worker or will get one without a probe.
    pub(crate) fn is_live(&self) -> bool {
        matches!(self, Self::Occupied(_) | Self::Backoff { .. } | Self::Awaiting)
    }

    /// Returns true if the slot has a worker or gets one once the previous worker is gone.
    pub(crate) fn is_occupied(&self) -> bool {
        matches!(self, Self::Occupied(_) | Self::Awaiting)
    }

    /// Returns true if the slot should have a worker, even if none will start.
    pub(crate) fn is_wanted(&self) -> bool {
        !matches!(self, Self::Empty | Self::Closed)
    }
}
