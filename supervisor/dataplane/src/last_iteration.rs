//! The last iteration, which rejects jobs that have arrived but were not handled yet.

use bulkhead_plane::command::Command;
use bulkhead_shared::RejectReason;

use super::DataPlane;

impl DataPlane {
    /// Reads from all clients once more. Every bulkhead has stopped, so each job is rejected.
    pub(super) fn handle_last_events(&mut self) {
        while let Ok(command) = self.commands.receiver.try_recv() {
            if let Command::Client { .. } | Command::Connect { .. } = command {
                self.run_command(command);
            }
        }
        for index in self.sessions.indices() {
            self.read_session_input(index, usize::MAX);
            // A client that keeps sending has its answers so far, and is disconnected with the others.
            self.abandon_frame(index, RejectReason::Draining, "the supervisor is stopping");
        }
    }
}
