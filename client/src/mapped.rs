//! A result where it stands.

use std::fmt;
use std::sync::Weak;

use crate::leases::{Lease, TakesBack};

/// A result where the worker wrote it. **It may change while it is read**, by a worker that does not behave. Who parses
/// it must not rely on reading the same bytes twice. As long as it is there, its file serves no other job.
pub struct MappedResult {
    pub(crate) lease: Option<Box<Lease>>,
    pub(crate) bytes: usize,
    pub(crate) requests: Weak<dyn TakesBack>,
}

impl MappedResult {
    /// How many bytes it has.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Copies bytes from `at` on, as many as `into` has. Panics if there are not so many. An error means that the
    /// supervisor has taken the file back, which it may do after five seconds, or when the connection is lost: what is in
    /// `into` may be zeros then.
    pub fn read(&self, at: usize, into: &mut [u8]) -> std::io::Result<()> {
        assert!(at <= self.bytes && into.len() <= self.bytes - at, "beyond the end of the result");
        if let Some(lease) = &self.lease {
            lease.result.read(at, into);
        }
        if self.is_whole() {
            Ok(())
        } else {
            Err(std::io::Error::other("the result was taken back before it was read"))
        }
    }

    /// Whether all that was read of it before this was there, be it by [`MappedResult::as_ptr`]: five seconds after its
    /// job has ended, or with the connection, the supervisor may take the file back, which is zeros from then on.
    pub fn is_whole(&self) -> bool {
        self.lease.as_ref().is_none_or(|lease| lease.is_whole())
    }

    /// Its first byte, for those that read it as it is, and ask [`MappedResult::is_whole`] when they have.
    pub fn as_ptr(&self) -> *const u8 {
        self.lease.as_ref().map_or(std::ptr::null(), |lease| lease.result.as_ptr())
    }
}

impl fmt::Debug for MappedResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MappedResult({} bytes)", self.bytes)
    }
}

impl Drop for MappedResult {
    fn drop(&mut self) {
        if let (Some(lease), Some(requests)) = (self.lease.take(), self.requests.upgrade()) {
            requests.take_back(*lease);
        }
    }
}
