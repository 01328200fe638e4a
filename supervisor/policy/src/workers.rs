//! The workers of a bulkhead and the slots they fill. A worker is one process; a slot is the place that
//! is to have one. While a worker is being replaced, the slot's successor and the worker that leaves
//! stand beside it in the table.

use std::collections::VecDeque;
use std::time::Duration;

use crate::limits::{Limits, StartMode};
use crate::messages::{Claims, KillReason, RecycleReason, RestartCause, WorkerId};
use crate::restart::History;
use crate::tenants::TenantId;
use crate::time::Time;

/// How long it may take until an ordered process runs: the keeper starts one after the other.
/// `start.handshake` begins when it runs.
const SPAWN_PATIENCE: Duration = Duration::from_secs(60);

/// The same where it is forked: its template may ask for more time to initialise, and is ended when it takes too much by what
/// owns the workers, with which the start fails.
const FORK_PATIENCE: Duration = Duration::from_secs(24 * 60 * 60);

#[derive(Default)]
pub(crate) struct Worker {
    pub(crate) id: WorkerId,
    pub(crate) slot: u32,
    /// The slot that bears what it still runs, and answers for how it ends: the last that it filled.
    pub(crate) owes: u32,
    /// Whether its slot is of the reserve.
    pub(crate) is_spare: bool,
    pub(crate) role: Role,
    pub(crate) phase: Phase,
    pub(crate) pid: Option<u32>,
    pub(crate) spawned_at: Time,
    pub(crate) ready_at: Option<Time>,
    pub(crate) last_heard: Time,
    pub(crate) silence: Silence,
    /// How often in a row its silence was the machine's.
    pub(crate) forgiven: u32,
    pub(crate) has_dispatch_thread: bool,
    /// How often it was told to be heard.
    pub(crate) heartbeat: Duration,
    pub(crate) revision: Revision,
    /// Whether it can be told another `max_in_flight`.
    pub(crate) can_resize: bool,
    /// How many jobs at once it was told to expect; nothing yet without a limit.
    pub(crate) promised: u32,
    /// The worker's record of begun jobs, if there is one: then jobs may be sent ahead and taken back.
    pub(crate) claims: Option<Box<dyn Claims>>,
    /// Number of jobs sent; number of the last job begun, as last read; number up to which jobs were taken back.
    pub(crate) sent: u64,
    pub(crate) begun_last: u64,
    pub(crate) taken: u64,
    /// Next time to check for jobs that the worker is late to begin.
    pub(crate) check_at: Option<Time>,
    /// True if the worker was late to begin a job with a permit, and has shown no sign of life since.
    pub(crate) is_stalled: bool,
    /// Jobs ahead of the worker, oldest first.
    pub(crate) ahead: VecDeque<u32>,
    pub(crate) ahead_bytes: u32,
    /// Its level in the table of those that may have more ahead.
    pub(crate) room: Option<u32>,
    /// When it was last given a job, or answered for one.
    pub(crate) turned_at: Time,
    /// Number of checks since `turned_at` that found the worker late to begin a job.
    pub(crate) lag: u8,
    /// Whose jobs it has, if they are all of one.
    pub(crate) tenant: Option<TenantId>,
    /// Whether it is kept for a job that is to be alone.
    pub(crate) apart: Apart,
    /// Indexes of the jobs it holds.
    pub(crate) jobs: Vec<u32>,
    /// How many of those it had not begun, by its own word alone; it is gone.
    pub(crate) unbegun: usize,
    /// How many of those a client still waits for.
    pub(crate) wanted: u32,
    /// How many of those have passed the bulkhead's own deadline.
    pub(crate) overdue: u32,
    /// When it is killed, unless it does what it should before.
    pub(crate) kill_at: Option<Time>,
    pub(crate) served: u64,
    /// Jobs that it was given.
    pub(crate) begun: u64,
    /// Whether those are as many as it may be given.
    pub(crate) is_spent: bool,
    /// No replacement is tried before this. Of one that waits for its turn: when it is seen whether that still
    /// comes.
    pub(crate) succession_after: Time,
    /// When it is looked at next whether it is too old.
    pub(crate) age_after: Time,
    /// Its level in the table of those that may take a job.
    pub(crate) listed: Option<u32>,
    /// Whether it counts towards the limit.
    pub(crate) counted: bool,
    /// True if the slot no longer waits for the exit of this worker, which was replaced and has answered for all jobs.
    pub(crate) has_left: bool,
    /// Whether it had been sent SIGKILL when another took its slot: what it has is no debt.
    pub(crate) is_written_off: bool,
    /// Permits that it adds to the limit.
    pub(crate) permits: u32,
    /// Jobs that it adds to the debt of its slot.
    pub(crate) debt: u32,
    /// What it said last before it was ready.
    pub(crate) last_words: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Role {
    /// It fills its slot.
    #[default]
    Current,
    /// It will fill its slot once it is ready; if that is to have begun only so many jobs, not before it has.
    Successor(RecycleReason),
    /// It has been replaced.
    Retired,
}

/// What a worker runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Revision {
    /// What is to be run now.
    #[default]
    New,
    /// What was to be run before. If a replacement did not start, the next one is tried at `again_at`.
    Old { again_at: Option<Time> },
}

/// What is done about a worker that should have been heard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Silence {
    /// Nothing: it was heard.
    #[default]
    None,
    /// Until then it is watched.
    Watched { until: Time },
    /// The shell was asked what it saw.
    Asked,
}

/// Whether a worker takes jobs beside each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Apart {
    /// It does.
    #[default]
    No,
    /// It finishes what it has, for one that is to be alone.
    Reserved,
    /// One that is to be alone runs.
    Taken,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Ordered or spawned, not heard yet.
    Handshaking { until: Time },
    /// Has said hello.
    Initializing { until: Time },
    /// Takes jobs.
    Ready,
    /// Finishes what it has, and exits.
    Draining,
    /// Killed, and not yet gone.
    Killing(KillReason),
    /// Gone and reported; what it left behind is being swept up.
    Dead(End),
}

impl Default for Phase {
    fn default() -> Self {
        Self::Handshaking { until: Time::ZERO }
    }
}

/// What the end of a worker says of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct End {
    /// It is not fit for work: it would not start, or ended without a reason.
    pub(crate) is_unfit: bool,
    /// It exited with 0 while it had nothing to do.
    pub(crate) is_clean: bool,
    /// It died of its first jobs.
    pub(crate) is_in_vain: bool,
    /// It was ended before it had begun, for one that runs something else.
    pub(crate) is_unwanted: bool,
    /// It had begun as many jobs as it may.
    pub(crate) is_spent: bool,
}

impl End {
    /// Of one that did not even start.
    pub(crate) const NOT_STARTED: Self =
        Self { is_unfit: true, is_clean: false, is_in_vain: false, is_unwanted: false, is_spent: false };
}

impl Worker {
    pub(crate) fn new(id: WorkerId, slot: u32, role: Role, now: Time, limits: &Limits) -> Self {
        let patience = match limits.start.mode {
            StartMode::Spawn => SPAWN_PATIENCE,
            StartMode::Fork => FORK_PATIENCE,
        };
        Self {
            id,
            slot,
            owes: slot,
            role,
            phase: Phase::Handshaking { until: now + limits.start.handshake.max(patience) },
            spawned_at: now,
            last_heard: now,
            heartbeat: limits.health.heartbeat,
            promised: u32::MAX,
            turned_at: now,
            ..Self::default()
        }
    }

    /// Whether it has no job and none is ahead of it.
    pub(crate) fn is_idle(&self) -> bool {
        self.jobs.is_empty() && self.ahead.is_empty()
    }

    /// Whether its process is gone.
    pub(crate) fn is_dead(&self) -> bool {
        matches!(self.phase, Phase::Dead(_))
    }

    /// Why it was killed, until its end is reported.
    pub(crate) fn killed(&self) -> Option<KillReason> {
        match &self.phase {
            Phase::Killing(reason) => Some(reason.clone()),
            _ => None,
        }
    }

    /// Its process, while there is one.
    pub(crate) fn living_pid(&self) -> Option<u32> {
        self.pid.filter(|_| !self.is_dead())
    }

    /// Whether its permits are part of the limit.
    pub(crate) fn is_available(&self) -> bool {
        let is_at_work = self.role == Role::Current && !self.is_spare;
        self.phase == Phase::Ready && self.kill_at.is_none() && is_at_work
    }

    /// Whether it is in the reserve, and was not put there as it died.
    pub(crate) fn is_kept_spare(&self) -> bool {
        self.is_spare && self.role == Role::Current && !self.is_written_off
    }

    /// Whether it waits in the reserve.
    pub(crate) fn is_ready_spare(&self) -> bool {
        self.phase == Phase::Ready && self.role == Role::Current && self.is_spare
    }

    /// How many jobs it may still be given.
    pub(crate) fn jobs_left(&self, limits: &Limits) -> u64 {
        limits.recycle.jobs.map_or(u64::MAX, |most| most.saturating_sub(self.begun))
    }

    /// How long it may be silent: the beats it may miss, and one on its way.
    pub(crate) fn silence_max(&self, missed: u32) -> Duration {
        self.heartbeat.saturating_mul(missed.saturating_add(1))
    }

    /// When it is to be replaced, after an attempt that failed.
    pub(crate) fn replaced_again_at(&self) -> Option<Time> {
        match (self.revision, self.role) {
            (Revision::Old { again_at }, Role::Current) => again_at,
            _ => None,
        }
    }

    /// Whether it has to be heard: always, if its heartbeats do not depend on its handlers.
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

/// What a worker can be doing, in the words used in every interface.
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
    /// Whether its worker is a spare.
    pub(crate) is_reserve: bool,
    pub(crate) successor: Option<u32>,
    /// Number of replaced workers that are neither gone nor [without jobs](Worker::has_left).
    pub(crate) retired: u32,
    /// Jobs that those still run.
    pub(crate) debt: u32,
    /// Permits that all its workers have taken of the limit.
    pub(crate) in_use: u32,
    /// Permits that all its workers hold, be they part of the limit or not.
    pub(crate) held: u32,
    pub(crate) history: History,
    pub(crate) restarts: u64,
    /// How it stood when it was put to rest, if its worker was not to start then.
    pub(crate) resting: Option<SlotState>,
    /// Whether its next worker follows another.
    pub(crate) has_had_worker: bool,
    /// What became of the last worker that ended.
    pub(crate) last_end: Option<RestartCause>,
    /// Whether its first start has ended, well or not.
    pub(crate) has_settled: bool,
    pub(crate) last_exit: Option<String>,
}

#[derive(Clone, Copy, Default)]
pub(crate) enum SlotState {
    /// Before the start, and at rest.
    #[default]
    Empty,
    /// It is to have a worker once it may, or once the one before is gone.
    Awaiting,
    /// There are more slots than are wanted now.
    Closed,
    /// This worker fills it.
    Occupied(u32),
    /// The next worker is started at this moment.
    Backoff { until: Time },
    /// Too many failures; probed again at `probe_at`, if ever.
    Stopped { probe_at: Option<Time> },
}

impl SlotState {
    /// The place of the slot's worker.
    pub(crate) fn worker(&self) -> Option<u32> {
        if let Self::Occupied(place) = self { Some(*place) } else { None }
    }

    /// Whether a worker is here or will come in the ordinary way.
    pub(crate) fn is_live(&self) -> bool {
        matches!(self, Self::Occupied(_) | Self::Backoff { .. } | Self::Awaiting)
    }

    /// Whether a worker is here, or comes once the one before is gone.
    pub(crate) fn is_occupied(&self) -> bool {
        matches!(self, Self::Occupied(_) | Self::Awaiting)
    }

    /// Whether there is to be a worker at some time, come what may.
    pub(crate) fn is_wanted(&self) -> bool {
        !matches!(self, Self::Empty | Self::Closed)
    }
}
