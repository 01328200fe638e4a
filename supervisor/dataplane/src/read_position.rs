//! Determines which jobs a dead worker cannot have begun, because the worker has read nothing of the frames.
//!
//! The supervisor keeps a duplicate of the worker's end of the link. When the worker is gone, the supervisor reads
//! the remaining bytes from the duplicate. No descendant of the worker can read these bytes any more, and the number
//! of bytes tells how far the worker had read. While the duplicate is open, there is no end of file if a worker
//! closes its end. The keeper reports the worker's death, and otherwise heartbeats are missed.

use std::io;
use std::os::fd::OwnedFd;

use bulkhead_policy::{Event, WorkerId};
use rustix::net::RecvFlags;

use super::slab::CompartmentIndex;
use super::{DataPlane, Incoming};

/// Size of the buffer for reading the rest from a dead worker's end.
const TAKEN_BYTES: usize = 16 * 1024;

/// Tracks how far a worker has read.
pub(super) struct ReadPosition {
    /// Duplicate of the worker's end of the link, until the worker is gone.
    theirs: Option<OwnedFd>,
    /// Total number of bytes written to the link.
    written: u64,
    /// Number of jobs queued on the link.
    jobs: u64,
}

/// Position of a job on the worker's link.
#[derive(Clone, Copy, Default)]
pub(super) struct JobPosition {
    /// Number of bytes on the link before the job's frame.
    offset: u64,
    /// Sequence number of the job on the link.
    number: u64,
    /// True if the worker has reported the beginning of the job.
    pub(super) has_started: bool,
}

impl ReadPosition {
    pub(super) fn of(theirs: &OwnedFd) -> io::Result<Self> {
        Ok(Self { theirs: Some(theirs.try_clone()?), written: 0, jobs: 0 })
    }

    /// Counts bytes that were written to the socket.
    pub(super) fn add_written(&mut self, bytes: usize) {
        self.written += bytes as u64;
    }

    /// Returns the position of a job that is queued behind `waiting` unsent bytes.
    pub(super) fn position_behind(&mut self, waiting: usize) -> JobPosition {
        self.jobs += 1;
        JobPosition { offset: self.written + waiting as u64, number: self.jobs, has_started: false }
    }

    /// Takes back all unread bytes when the worker is gone or must not read any more. Returns the number of bytes
    /// that the worker has read.
    pub(super) fn end(&mut self) -> u64 {
        let Some(theirs) = self.theirs.take() else { return self.written };
        let mut left = 0;
        let mut bytes = [0; TAKEN_BYTES];
        // This loop ends because nothing more is written and a socket holds a bounded number of bytes.
        loop {
            match rustix::net::recv(&theirs, &mut bytes[..], RecvFlags::DONTWAIT) {
                Ok((_, 0)) => break,
                Ok((_, count)) => left += count as u64,
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => break,
            }
        }
        self.written.saturating_sub(left)
    }
}

impl DataPlane {
    /// Reports to policy the jobs that a worker cannot have begun after reading `read` bytes. With a journal, also
    /// reports the jobs beyond the number that the worker has begun.
    pub(super) fn report_unread_jobs(
        &mut self,
        compartment: CompartmentIndex,
        worker: WorkerId,
        read: u64,
        begun: Option<u64>,
    ) {
        for job in self.compartments[compartment].policy.jobs_of(worker) {
            let Some(record) = self.compartments[compartment].policy.cargo_mut(job) else { continue };
            let position = record.position;
            if position.has_started {
                continue;
            }
            if position.offset >= read {
                self.apply(compartment, Event::Unread { worker, job }, Incoming::None);
            } else if begun.is_some_and(|begun| position.number > begun) {
                self.apply(compartment, Event::Unbegun { worker, job }, Incoming::None);
            }
        }
    }
}
