//! The workers of a bulkhead and the slots they fill. A worker is one process; a slot is the place that
//! is to have one. While a worker is being replaced, the slot's successor and the worker that leaves
//! stand beside it in the table.

use std::time::Duration;

use crate::messages::{KillReason, RecycleReason, WorkerId};
use crate::restart::History;
use crate::time::Time;

pub(crate) struct Worker {
    pub(crate) id: WorkerId,
    pub(crate) slot: u32,
    pub(crate) role: Role,
    pub(crate) phase: Phase,
    pub(crate) pid: Option<u32>,
    pub(crate) spawned_at: Time,
    pub(crate) ready_at: Option<Time>,
    pub(crate) last_heard: Time,
    pub(crate) has_dispatch_thread: bool,
    /// Indexes of the jobs it holds.
    pub(crate) jobs: Vec<u32>,
    /// How many of those a client still waits for.
    pub(crate) wanted: u32,
    /// How many of those have passed the bulkhead's own deadline.
    pub(crate) overdue: u32,
    /// When it is killed, unless it does what it should before.
    pub(crate) kill_at: Option<Time>,
    pub(crate) served: u64,
    /// No replacement is tried before this.
    pub(crate) succession_after: Time,
    /// Its level in the table of those that may take a job.
    pub(crate) listed: Option<u32>,
    /// Whether it counts towards the limit.
    pub(crate) counted: bool,
    /// Permits it has taken of the limit.
    pub(crate) in_use: u32,
    /// What it said last before it was ready.
    pub(crate) last_words: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// It fills its slot.
    Current,
    /// It will fill its slot once it is ready.
    Successor(RecycleReason),
    /// It has been replaced.
    Retired,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Spawned, not heard yet.
    Handshaking { until: Time },
    /// Has said hello.
    Initializing { until: Time },
    /// Takes jobs.
    Ready,
    /// Finishes what it has, and exits.
    Draining,
    /// Killed, and not yet gone.
    Killing(KillReason),
}

impl Worker {
    pub(crate) fn new(id: WorkerId, slot: u32, role: Role, now: Time, handshake: Duration) -> Self {
        Self {
            id,
            slot,
            role,
            phase: Phase::Handshaking { until: now + handshake },
            pid: None,
            spawned_at: now,
            ready_at: None,
            last_heard: now,
            has_dispatch_thread: false,
            jobs: Vec::new(),
            wanted: 0,
            overdue: 0,
            kill_at: None,
            served: 0,
            succession_after: Time::ZERO,
            listed: None,
            counted: false,
            in_use: 0,
            last_words: None,
        }
    }

    /// Whether its permits are part of the limit.
    pub(crate) fn is_available(&self) -> bool {
        self.phase == Phase::Ready && self.kill_at.is_none()
    }

    /// Whether it has to be heard: always, if its heartbeats do not depend on its handlers.
    pub(crate) fn owes_heartbeats(&self) -> bool {
        self.has_dispatch_thread || self.jobs.is_empty()
    }

    pub(crate) fn state_name(&self) -> &'static str {
        match self.phase {
            Phase::Handshaking { .. } if self.pid.is_none() => "spawning",
            Phase::Handshaking { .. } => "handshaking",
            Phase::Initializing { .. } => "initializing",
            Phase::Ready if self.kill_at.is_some() => "terminating",
            Phase::Ready if self.jobs.is_empty() => "ready",
            Phase::Ready => "busy",
            Phase::Draining => "draining",
            Phase::Killing(_) => "killing",
        }
    }
}

#[derive(Default)]
pub(crate) struct Slot {
    pub(crate) state: SlotState,
    pub(crate) successor: Option<u32>,
    /// How many workers it has replaced that are not gone yet.
    pub(crate) retired: u32,
    pub(crate) history: History,
    pub(crate) spawns: u64,
    /// Whether its first start has ended, well or not.
    pub(crate) has_settled: bool,
    pub(crate) last_exit: Option<String>,
}

#[derive(Default)]
pub(crate) enum SlotState {
    /// Before the start.
    #[default]
    Empty,
    /// This worker fills it.
    Occupied(u32),
    /// The next worker is started at this moment.
    Backoff { until: Time },
    /// Too many failures; probed again at `probe_at`, if ever.
    Stopped { probe_at: Option<Time> },
}

impl SlotState {
    /// Whether a worker is here or will come in the ordinary way.
    pub(crate) fn is_live(&self) -> bool {
        matches!(self, Self::Occupied(_) | Self::Backoff { .. })
    }
}
