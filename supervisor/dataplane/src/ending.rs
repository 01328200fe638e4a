//! The last turn: what has come in by now, and was not heard of yet, is told that it is not begun any more.

use bulkhead_plane::command::Command;
use bulkhead_shared::RejectReason;

use super::DataPlane;

impl DataPlane {
    /// Every bulkhead has stopped, so that whatever is a job by now is rejected.
    pub(super) fn hear_the_last(&mut self) {
        while let Ok(command) = self.orders.commands.try_recv() {
            if let Command::Client { .. } | Command::Connect { .. } = command {
                self.command(command);
            }
        }
        for index in self.sessions.indices() {
            self.session_readable(index, usize::MAX);
            // One that sends without end has its answers so far, and is closed with the others.
            self.give_up_frame(index, RejectReason::Draining, "the supervisor is stopping");
        }
    }
}
