//! The control plane's turn: a few commands, one piece of what it wants to see, and then jobs go on. Whoever asks
//! all the time waits by itself.

use std::sync::atomic::Ordering;

use bulkhead_policy::{Activity, BulkheadState};

use super::Shard;
use super::named::{Compartment, Layout};
use super::view::States;
use crate::command::StateInShort;

/// What one turn of the loop obeys, by `Command::weight`.
const WEIGHT_PER_TURN: usize = 16;

/// Those that nobody waits for any more cost nothing; yet a turn looks at no more than so many.
const ABANDONED_PER_TURN: usize = 1024;

impl Shard {
    /// Whether the control plane still wants something.
    pub(super) fn has_orders(&self) -> bool {
        self.has_commands || !self.snapshots.is_empty()
    }

    /// Does a bounded part of what the control plane wants.
    pub(super) fn obey(&mut self) {
        for _ in 0..self.stops.swap(0, Ordering::SeqCst).min(2) {
            self.stop();
        }
        self.show_a_piece();
        let mut weight = 0;
        for _ in 0..ABANDONED_PER_TURN {
            if !self.has_commands || weight >= WEIGHT_PER_TURN {
                return;
            }
            match self.commands.try_recv() {
                Ok(command) if command.is_abandoned() => {}
                Ok(command) => {
                    weight += command.weight();
                    self.command(command);
                }
                Err(_) => self.has_commands = false,
            }
        }
    }

    /// What was seen of the states of bulkheads is not true any more.
    pub(super) fn states_have_changed(&self) {
        self.pulse.revision.fetch_add(1, Ordering::SeqCst);
    }

    /// Each bulkhead in a word.
    pub(super) fn states(&self) -> Vec<StateInShort> {
        self.present().into_iter().map(|named| self.state_in_short(named)).collect()
    }

    fn state_in_short(&self, named: usize) -> StateInShort {
        let (state, detail) = self.state_of(named);
        StateInShort { name: self.named[named].name.clone(), state: state.name(), detail }
    }

    /// The state of a bulkhead in one word, and why it is not `ready`.
    pub(super) fn state_of(&self, named: usize) -> (BulkheadState, Option<String>) {
        let entry = &self.named[named];
        let mut states = States::default();
        let mut trouble = None;
        let mut look = |part: &Compartment| {
            if part.tenant.is_none() || part.policy.activity() != Activity::Resting {
                states.add(part.policy.state());
                trouble = trouble.take().or_else(|| {
                    Some(part.policy.last_trouble()).filter(|text| !text.is_empty()).map(str::to_owned)
                });
            }
        };
        let mut is_draining = false;
        match &entry.layout {
            Layout::Shared(place) => look(&self.compartments[*place]),
            Layout::Isolated(isolated) => {
                is_draining = isolated.is_draining;
                isolated.awake.iter().for_each(|&place| look(&self.compartments[place]));
            }
        }
        let state = states.in_one();
        let detail = trouble.filter(|_| state != BulkheadState::Ready);
        (if is_draining { BulkheadState::Draining } else { state }, detail)
    }
}
