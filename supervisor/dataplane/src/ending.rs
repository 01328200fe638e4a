//! The last iteration, which rejects jobs that have arrived but were not handled yet.

use bulkhead_plane::command::Command;
use bulkhead_shared::RejectReason;

use super::DataPlane;

impl DataPlane {
    /// Reads from all clients once more. Every bulkhead has stopped, so each job is rejected.
    pub(super) fn hear_the_last(&mut self) {
        while let Ok(command) = self.orders.commands.try_recv() {
            if let Command::AddClient { .. } | Command::AddInProcessClient { .. } = command {
                self.command(command);
            }
        }
        for index in self.sessions.indices() {
            self.session_readable(index, usize::MAX);
            // A client that keeps sending has its answers so far, and is disconnected with the others.
            self.give_up_frame(index, RejectReason::Draining, "the supervisor is stopping");
        }
    }
}
