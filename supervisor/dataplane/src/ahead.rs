//! Jobs sent ahead to a worker: the journal that preserves answers when the worker dies, and jobs that are taken back.
//! The policy decides which jobs these are.

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
    /// Lends a journal to a worker that has said hello. Without a journal, no job is sent ahead to the worker or taken
    /// back.
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
        link.reading.written(sent);
        link.journal = Some(journal);
    }

    /// A worker is gone, and all that it sent was heard: what it had answered and not sent counts as well.
    /// Returns how many of the jobs that it was sent it says to have begun, where something may be ahead.
    pub(super) fn read_journal(&mut self, index: LinkIndex) -> Option<u64> {
        let link = self.links.get_mut(index)?;
        let compartment = link.compartment;
        let (begun, frames) = link.journal.as_ref()?.read();
        if !frames.is_empty() {
            self.hear_journal(index, &frames);
        }
        let is_on = !self.compartments[compartment].policy.limits().lookahead.is_zero();
        // One that never said so says nothing.
        (is_on && begun > 0).then_some(begun)
    }

    /// The frames of a journal, as if they had come by the link.
    fn hear_journal(&mut self, index: LinkIndex, frames: &[u8]) {
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
                // What it had sent is in there as well, if it died before it could say so.
                let is_owed = self.compartments[compartment].policy.holds(worker, JobId(header.number));
                if is_welcomed && is_answer && is_owed {
                    let _ = self.worker_frame(index, header, metadata, Incoming::Borrowed(payload));
                }
            }
        }
        self.buffers.scratch = scratch;
    }

    /// A worker gives back a job that was taken back as it was about to begin it.
    pub(super) fn job_returned(&mut self, index: LinkIndex, job: JobId, arrival: u64) {
        let link = &mut self.links[index];
        link.notices.spend(0);
        let (compartment, worker) = (link.compartment, link.worker);
        self.apply(compartment, Event::Returned { worker, job, arrival }, Incoming::None);
    }

    /// A worker neither reads a job's payload nor writes its result.
    pub(super) fn job_taken_back(&mut self, compartment: CompartmentIndex, worker: WorkerId, job: JobId) {
        if let Some(index) = self.link_of(compartment, worker) {
            self.leave_files((compartment, self.links[index].spawn), job);
        }
    }
}

/// What a job with so many bytes of its own takes on a link.
pub(super) fn link_bytes(own: usize) -> u32 {
    u32::try_from(own + FRAME_BYTES).unwrap_or(u32::MAX)
}

/// Header and metadata of a job without names.
const FRAME_BYTES: usize = 128;
