//! Requests from the control plane. Each iteration performs only a few commands and a piece of a snapshot, so that
//! many requests cannot starve jobs.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::Receiver;

use bulkhead_api::ShortState;
use bulkhead_plane::command::Command;
use bulkhead_policy::{Activity, BulkheadState};

use super::DataPlane;
use super::bulkheads::{Compartment, Layout};
use super::replay::Replay;
use super::slab::BulkheadIndex;
use super::snapshot_sums::States;
use super::snapshots::PartialSnapshot;

/// Maximum total weight of commands per iteration (`Command::weight`).
const WEIGHT_PER_ITERATION_MAX: usize = 16;

/// Maximum number of commands taken per iteration. A command whose caller has gone has no weight.
const COMMANDS_PER_ITERATION_MAX: usize = 1024;

/// Pending requests of the control plane.
pub(super) struct CommandQueue {
    pub(super) receiver: Receiver<Command>,
    /// True if the channel may contain more commands.
    pub(super) has_commands: bool,
    /// Number of stop requests.
    stops: Arc<AtomicU32>,
    /// Snapshots in progress.
    pub(super) snapshots: VecDeque<PartialSnapshot>,
    /// Replays of jobs from crash reports.
    pub(super) replays: Vec<Replay>,
}

impl CommandQueue {
    pub(super) fn new(commands: Receiver<Command>, stops: Arc<AtomicU32>) -> Self {
        Self {
            receiver: commands,
            has_commands: false,
            stops,
            snapshots: VecDeque::new(),
            replays: Vec::new(),
        }
    }

    /// Returns true if requests are pending.
    pub(super) fn is_waiting(&self) -> bool {
        self.has_commands || !self.snapshots.is_empty()
    }
}

impl DataPlane {
    /// Performs a bounded part of the pending requests.
    pub(super) fn run_commands(&mut self) {
        for _ in 0..self.commands.stops.swap(0, Ordering::SeqCst).min(2) {
            self.stop();
        }
        self.continue_snapshot();
        let mut weight = 0;
        for _ in 0..COMMANDS_PER_ITERATION_MAX {
            if !self.commands.has_commands || weight >= WEIGHT_PER_ITERATION_MAX {
                return;
            }
            match self.commands.receiver.try_recv() {
                Ok(command) if command.is_abandoned() => {}
                Ok(command) => {
                    weight += command.weight();
                    self.run_command(command);
                }
                Err(_) => self.commands.has_commands = false,
            }
        }
    }

    /// Returns a short description of each bulkhead's state.
    pub(super) fn short_states(&self) -> Vec<ShortState> {
        self.configured_bulkheads().into_iter().map(|bulkhead| self.short_state(bulkhead)).collect()
    }

    fn short_state(&self, bulkhead: BulkheadIndex) -> ShortState {
        let (state, detail) = self.state_of(bulkhead);
        ShortState { detail, name: self.bulkheads[bulkhead].name.to_string(), state: state.into() }
    }

    /// Returns the state of a bulkhead, and the reason if the state is not `ready`.
    pub(super) fn state_of(&self, bulkhead: BulkheadIndex) -> (BulkheadState, Option<String>) {
        let entry = &self.bulkheads[bulkhead];
        let mut states = States::default();
        let mut trouble = None;
        let mut look = |compartment: &Compartment| {
            if compartment.tenant.is_none() || compartment.policy.activity() != Activity::Resting {
                states.add(compartment.policy.state());
                trouble = trouble.take().or_else(|| {
                    Some(compartment.policy.last_trouble()).filter(|text| !text.is_empty()).map(str::to_owned)
                });
            }
        };
        let mut is_draining = false;
        match &entry.layout {
            Layout::Shared(place) => look(&self.compartments[*place]),
            Layout::Isolated(isolated) => {
                is_draining = isolated.is_draining;
                isolated.active.iter().for_each(|&place| look(&self.compartments[place]));
            }
        }
        let state = states.combined();
        let detail = trouble.filter(|_| state != BulkheadState::Ready);
        (if is_draining { BulkheadState::Draining } else { state }, detail)
    }
}
