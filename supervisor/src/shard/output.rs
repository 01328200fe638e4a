//! The reading ends of workers' output, on their way to the control plane. What finds no room there stays with its
//! worker and is offered again: a worker that cannot write would die of it.

use super::Shard;
use crate::notices::WorkerOutput;

impl Shard {
    /// Hands a worker's output over, if that was not done yet.
    pub(super) fn hand_output_over(&mut self, index: usize) {
        let Some(link) = self.links[index].as_mut() else { return };
        let Some(pid) = link.pid else { return };
        let Some((stdout, stderr)) = link.output.take() else { return };
        let compartment = link.compartment;
        let bulkhead = self.owner(compartment).name.clone();
        let offered = self.notices.output(WorkerOutput { bulkhead, pid, stdout, stderr });
        if let Err(WorkerOutput { stdout, stderr, .. }) = offered {
            if let Some(link) = self.links[index].as_mut() {
                link.output = Some((stdout, stderr));
            }
            self.has_outputs = true;
            self.want_housekeeping();
        }
    }

    /// Offers again what found no room.
    pub(super) fn hand_outputs_over(&mut self) {
        if std::mem::take(&mut self.has_outputs) {
            (0..self.links.len()).for_each(|index| self.hand_output_over(index));
        }
    }
}
