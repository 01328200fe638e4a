//! Prefetched jobs: the journal that preserves a worker's answers when the worker dies, and the recall of jobs.
//! Policy decides which jobs are prefetched.

use std::os::fd::AsFd;

use bulkhead_policy::{Event, WorkerId};
use bulkhead_shared::JobId;
use bulkhead_shared::connection::{Inbox, Item};
use bulkhead_shared::frame::kind;
use bulkhead_shared::worker_protocol::Empty;

use super::journal::Journal;
use super::links::Stage;
use super::memory_files::lend;
use super::slab::{CompartmentIndex, LinkIndex};
use super::{DataPlane, Incoming};

impl DataPlane {
    /// Lends a journal to a worker that has sent its hello. Without a journal, the worker gets no prefetched jobs,
    /// and none of its jobs are recalled.
    pub(super) fn lend_journal(&mut self, index: LinkIndex, compartment: CompartmentIndex) {
        let link = &mut self.links[index];
        if link.program.runs_programs() || !link.outbox.is_empty() || self.compartments[compartment].is_replay
        {
            return;
        }
        let Ok(journal) = Journal::make() else { return };
        let Ok(sent) = lend(&link.socket, (kind::JOURNAL, 0), &Empty, &[journal.file.as_fd()]) else {
            return;
        };
        link.read_position.add_written(sent);
        link.journal = Some(journal);
    }

    /// Applies the answers in the journal of a dead worker. Must run after everything in the worker's link has been
    /// read. If the bulkhead prefetches jobs, returns the number of jobs that the worker began according to the
    /// journal.
    pub(super) fn apply_journal(&mut self, index: LinkIndex) -> Option<u64> {
        let link = self.links.get_mut(index)?;
        let compartment = link.compartment;
        let (begun, frames) = link.journal.as_ref()?.read();
        if !frames.is_empty() {
            self.apply_journal_frames(index, &frames);
        }
        let is_on = !self.compartments[compartment].policy.limits().lookahead.is_zero();
        // Zero means that the worker has never written the count.
        (is_on && begun > 0).then_some(begun)
    }

    /// Handles the frames of a journal like frames from the link.
    fn apply_journal_frames(&mut self, index: LinkIndex, frames: &[u8]) {
        let (compartment, worker) = (self.links[index].compartment, self.links[index].worker);
        let (mut inbox, mut scratch) = (Inbox::default(), std::mem::take(&mut self.buffers.scratch));
        let read = inbox.receive_by(&mut scratch, |buffer| {
            buffer[..frames.len()].copy_from_slice(frames);
            Ok(frames.len())
        });
        if let Ok((_, mut batch)) = read {
            while let Ok(Some(Item::Frame { header, metadata, payload })) = batch.next() {
                let is_welcomed = matches!(self.links[index].stage, Stage::Welcomed { .. });
                let is_answer = matches!(header.kind, kind::RESULT | kind::FAILED);
                // The journal can also contain answers that came over the link, if the worker died before removing
                // them.
                let is_owed = self.compartments[compartment].policy.holds(worker, JobId(header.number));
                if is_welcomed && is_answer && is_owed {
                    let _ = self.handle_worker_frame(index, header, metadata, Incoming::Borrowed(payload));
                }
            }
        }
        self.buffers.scratch = scratch;
    }

    /// Handles the return of a job that was recalled before the worker began to run the job.
    pub(super) fn job_returned(&mut self, index: LinkIndex, job: JobId, arrival: u64) {
        let link = &mut self.links[index];
        link.unsolicited.charge(0);
        let (compartment, worker) = (link.compartment, link.worker);
        self.apply(compartment, Event::Returned { worker, job, arrival }, Incoming::None);
    }

    /// Ends a worker's access to the memory files of a recalled job. The worker neither reads the payload nor writes
    /// the result.
    pub(super) fn job_recalled(&mut self, compartment: CompartmentIndex, worker: WorkerId, job: JobId) {
        if let Some(index) = self.link_of(compartment, worker) {
            self.end_file_use((compartment, self.links[index].spawn), job);
        }
    }
}

/// Returns the size of a job on a link, given the `own` bytes of its payload and names.
pub(super) fn frame_bytes(own: usize) -> u32 {
    u32::try_from(own + FRAME_BYTES).unwrap_or(u32::MAX)
}

/// Size of header and metadata of a job without names.
const FRAME_BYTES: usize = 128;
