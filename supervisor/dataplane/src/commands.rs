//! Takes commands from the control plane's channel. Only a few are returned per iteration, so that a large number of
//! commands does not delay jobs for long. Skips commands whose sender no longer waits for a reply. The event loop
//! executes the commands, with `wiring/commands.rs` for those of operators.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::Receiver;

use bulkhead_plane::command::Command;

/// Maximum total weight of the commands handled per iteration (see `Command::weight`).
const WEIGHT_PER_ITERATION_MAX: usize = 16;

/// Maximum number of commands taken from the channel per iteration. A separate limit is needed because a command
/// has no weight if its sender no longer waits for a reply.
const COMMANDS_PER_ITERATION_MAX: usize = 1024;

pub(super) struct CommandQueue {
    receiver: Receiver<Command>,
    /// True if the channel might contain commands.
    has_commands: bool,
    /// Number of commands taken in the current iteration, and their total weight.
    taken: usize,
    weight: usize,
    /// Number of stop requests received since the last call to `take_stops`.
    stops: Arc<AtomicU32>,
}

impl CommandQueue {
    pub(super) fn new(receiver: Receiver<Command>, stops: Arc<AtomicU32>) -> Self {
        Self { receiver, has_commands: false, taken: 0, weight: 0, stops }
    }

    /// Records that the channel might contain commands.
    pub(super) fn arrived(&mut self) {
        self.has_commands = true;
    }

    pub(super) fn is_waiting(&self) -> bool {
        self.has_commands
    }

    /// Returns the number of stop requests received since the last call. The result is at most two, because further
    /// stop requests have no effect.
    pub(super) fn take_stops(&self) -> u32 {
        self.stops.swap(0, Ordering::SeqCst).min(2)
    }

    /// Returns the next command. If there is no command, or if the maximum for this iteration has been reached, returns
    /// `None` and resets the counts for the next iteration.
    pub(super) fn next(&mut self) -> Option<Command> {
        while self.has_commands
            && self.taken < COMMANDS_PER_ITERATION_MAX
            && self.weight < WEIGHT_PER_ITERATION_MAX
        {
            self.taken += 1;
            match self.receiver.try_recv() {
                Ok(command) if command.is_abandoned() => {}
                Ok(command) => {
                    self.weight += command.weight();
                    return Some(command);
                }
                Err(_) => self.has_commands = false,
            }
        }
        (self.taken, self.weight) = (0, 0);
        None
    }

    /// Returns the next command, even if the maximum per iteration is reached. Used in the last iteration.
    pub(super) fn next_unlimited(&mut self) -> Option<Command> {
        self.receiver.try_recv().ok()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use super::*;

    #[test]
    fn limits_total_weight_of_commands_per_iteration() {
        let (sender, receiver) = sync_channel(64);
        let mut queue = CommandQueue::new(receiver, Arc::default());
        (0..40).for_each(|_| sender.try_send(Command::Summarise).unwrap());
        assert!(queue.next().is_none(), "the arrival of commands was not recorded");
        queue.arrived();
        let mut iterations = 0;
        let mut taken = 0;
        while queue.is_waiting() {
            let before = taken;
            taken += std::iter::from_fn(|| queue.next()).count();
            assert!(taken - before <= WEIGHT_PER_ITERATION_MAX);
            iterations += 1;
        }
        assert_eq!(taken, 40);
        assert!(iterations > 1);
    }
}
