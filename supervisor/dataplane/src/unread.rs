//! Which jobs a worker that is gone cannot have begun: those of whose frames it has read nothing.
//!
//! A duplicate of the worker's end of its link is kept. When the worker is gone, the bytes that wait there are
//! taken out of it: so nothing else can read them any more, be it a descendant that the worker left behind, and
//! how many they were tells how far the worker had read. As long as the duplicate is held, a worker that closes
//! its end is not noticed by an end of file: its death is reported by the keeper, and without one its heartbeats
//! are missed.

use std::io;
use std::os::fd::OwnedFd;

use bulkhead_policy::{Event, WorkerId};
use rustix::net::RecvFlags;

use super::slab::CompartmentIndex;
use super::{DataPlane, Incoming};

/// Bytes that one call takes out of a dead worker's end.
const TAKEN_BYTES: usize = 16 * 1024;

/// How far a worker has read.
pub(super) struct Reading {
    /// The worker's end of its link, until the worker is gone.
    theirs: Option<OwnedFd>,
    /// Bytes that the link has taken in all.
    written: u64,
    /// Jobs that were put there.
    jobs: u64,
}

/// Where a job stands on its worker's link.
#[derive(Clone, Copy, Default)]
pub(super) struct Given {
    /// Bytes of the link before its frame.
    behind: u64,
    /// The how many-th job of the link it is.
    arrival: u64,
    /// Whether the worker has said that it began it.
    pub(super) has_begun: bool,
}

impl Reading {
    pub(super) fn of(theirs: &OwnedFd) -> io::Result<Self> {
        Ok(Self { theirs: Some(theirs.try_clone()?), written: 0, jobs: 0 })
    }

    /// So many bytes have left our buffer.
    pub(super) fn written(&mut self, bytes: usize) {
        self.written += bytes as u64;
    }

    /// A job that is put behind so many bytes that have not left our buffer yet.
    pub(super) fn given_behind(&mut self, waiting: usize) -> Given {
        self.jobs += 1;
        Given { behind: self.written + waiting as u64, arrival: self.jobs, has_begun: false }
    }

    /// The worker is gone, or is not to read any more: takes back what it left, and returns how many bytes it
    /// had read.
    pub(super) fn end(&mut self) -> u64 {
        let Some(theirs) = self.theirs.take() else { return self.written };
        let mut left = 0;
        let mut bytes = [0; TAKEN_BYTES];
        // It ends: nothing more is written, and what a socket holds is bounded.
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
    /// Tells which jobs a worker that has read so many bytes cannot have begun.
    /// Where it has a journal, also which it says that it did not begin: of so many jobs that came, it begun those.
    pub(super) fn tell_unread(
        &mut self,
        compartment: CompartmentIndex,
        worker: WorkerId,
        read: u64,
        begun: Option<u64>,
    ) {
        for job in self.compartments[compartment].policy.jobs_of(worker) {
            let Some(record) = self.compartments[compartment].policy.cargo_mut(job) else { continue };
            let given = record.given;
            if given.has_begun {
                continue;
            }
            if given.behind >= read {
                self.apply(compartment, Event::Unread { worker, job }, Incoming::None);
            } else if begun.is_some_and(|begun| given.arrival > begun) {
                self.apply(compartment, Event::Unbegun { worker, job }, Incoming::None);
            }
        }
    }
}
