//! Determines which jobs a dead worker cannot have started. The worker cannot have started a job if it did not read any
//! byte of the job's frame.
//!
//! The supervisor keeps a duplicate of the worker's end of the link. When the worker is gone, the supervisor reads the
//! remaining bytes from the duplicate. Their number shows how far the worker had read, and the worker's descendants can
//! no longer read them. As long as the duplicate is open, the supervisor does not receive an end of file when a worker
//! closes its end. The supervisor notices such a worker when the keeper reports its death or when heartbeats are
//! missing.

use std::io;
use std::os::fd::OwnedFd;

use rustix::net::RecvFlags;

/// Size of the buffer for reading the bytes that a dead worker left unread.
const TAKEN_BYTES: usize = 16 * 1024;

/// Tracks how many bytes a worker has read from its link.
pub(crate) struct ReadPosition {
    /// Duplicate of the worker's end of the link. Closed once the worker is gone.
    theirs: Option<OwnedFd>,
    /// Total number of bytes that the supervisor has written to the link.
    written: u64,
    /// Number of jobs queued on the link so far.
    jobs: u64,
}

/// Position of a job among the bytes and jobs sent over a link.
#[derive(Clone, Copy, Default)]
pub(crate) struct JobPosition {
    /// Number of bytes written to the link before the job's frame.
    offset: u64,
    /// Sequence number of the job among all jobs sent over the link.
    number: u64,
    /// True if the worker has reported that it started the job.
    has_started: bool,
}

impl JobPosition {
    /// Records that the worker has reported starting the job.
    pub(crate) fn start(&mut self) {
        self.has_started = true;
    }

    /// Returns true if a worker cannot have started the job after reading only `read` bytes.
    pub(crate) fn is_unread(&self, read: u64) -> bool {
        !self.has_started && self.offset >= read
    }

    /// Returns true if the job is not among the first `begun` jobs, which are the only jobs that the worker has
    /// started.
    pub(crate) fn is_unbegun(&self, begun: Option<u64>) -> bool {
        !self.has_started && begun.is_some_and(|begun| self.number > begun)
    }
}

impl ReadPosition {
    pub(crate) fn of(theirs: &OwnedFd) -> io::Result<Self> {
        Ok(Self { theirs: Some(theirs.try_clone()?), written: 0, jobs: 0 })
    }

    /// Counts bytes that were written to the socket.
    pub(crate) fn add_written(&mut self, bytes: usize) {
        self.written += bytes as u64;
    }

    /// Returns the position of a job that is queued after `waiting` bytes that have not been sent yet.
    pub(crate) fn position_behind(&mut self, waiting: usize) -> JobPosition {
        self.jobs += 1;
        JobPosition { offset: self.written + waiting as u64, number: self.jobs, has_started: false }
    }

    /// Determines how many bytes the worker has read, by counting the bytes that the worker left unread. Called when
    /// the worker is gone or must stop reading.
    pub(crate) fn end(&mut self) -> u64 {
        let Some(theirs) = self.theirs.take() else { return self.written };
        let mut left = 0;
        let mut bytes = [0; TAKEN_BYTES];
        // The loop terminates, because nothing more is written and the socket holds a bounded number of bytes.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recognises_unread_jobs_and_jobs_not_started() {
        let mut link = ReadPosition { theirs: None, written: 0, jobs: 0 };
        let first = link.position_behind(0);
        link.add_written(100);
        let mut second = link.position_behind(20);
        assert!(first.is_unread(0) && !first.is_unread(1));
        assert!(second.is_unread(120) && !second.is_unread(121));
        assert!(!first.is_unbegun(Some(1)) && second.is_unbegun(Some(1)) && !second.is_unbegun(None));
        second.start();
        assert!(!second.is_unread(0) && !second.is_unbegun(Some(1)));
        assert_eq!(link.end(), 100);
    }
}
