//! Passes the reading ends of workers' output to the control plane. If there is no room, the reading ends stay open
//! and are offered again, because a worker that cannot write output would die.

use bulkhead_plane::notices::WorkerOutput;

use super::DataPlane;
use super::slab::LinkIndex;

impl DataPlane {
    /// Passes a worker's output to the control plane, unless that was done already.
    pub(super) fn forward_output(&mut self, index: LinkIndex) {
        // The worker may be gone when the output is offered again.
        let Some(link) = self.links.get_mut(index) else { return };
        let compartment = link.compartment;
        let Some(running) = link.running_mut() else { return };
        let pid = running.pid;
        let Some((stdout, stderr)) = running.output.take() else { return };
        let bulkhead = self.owner(compartment).name.clone();
        let output = WorkerOutput { bulkhead, pid, is_template: false, stdout, stderr };
        let offered = self.reporter.notices.output(output);
        if let Err(WorkerOutput { stdout, stderr, .. }) = offered {
            if let Some(running) = self.links[index].running_mut() {
                running.output = Some((stdout, stderr));
            }
            self.reporter.has_outputs = true;
            self.schedule_checks();
        }
    }

    /// Offers the output again that found no room.
    pub(super) fn forward_pending_outputs(&mut self) {
        if std::mem::take(&mut self.reporter.has_outputs) {
            self.links.indices().for_each(|index| self.forward_output(index));
        }
    }
}
