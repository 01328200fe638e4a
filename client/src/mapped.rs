//! Gives access to a result that stays in the memory file to which the worker wrote it. The worker can still change the
//! bytes, and the supervisor can revoke the file. Dropping the result returns the file. All other results are copied
//! into `Reply`.

use std::fmt;
use std::sync::Weak;

use crate::leases::{Lease, LeaseOwner};

/// A result in the memory file to which the worker wrote it. **A misbehaving worker can change the result at any
/// time.** A parser must not rely on reading the same bytes twice. The memory file is not used for other jobs while
/// this value exists.
pub struct MappedResult {
    pub(crate) lease: Option<Box<Lease>>,
    pub(crate) bytes: usize,
    pub(crate) requests: Weak<dyn LeaseOwner>,
}

impl MappedResult {
    /// Returns the size of the result in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Returns true if the result is empty.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Copies bytes of the result, starting at offset `at`, until `into` is full. Panics if the result is too
    /// short.
    ///
    /// Returns an error if the supervisor has revoked the file. The supervisor can revoke the file when the
    /// connection is lost, or at the earliest five seconds after the job ends. After an error, `into` can
    /// contain zeros.
    pub fn read(&self, at: usize, into: &mut [u8]) -> std::io::Result<()> {
        assert!(
            at <= self.bytes && into.len() <= self.bytes - at,
            "the requested range is beyond the end of the result"
        );
        if let Some(lease) = &self.lease {
            lease.result.read(at, into);
        }
        if self.is_whole() {
            Ok(())
        } else {
            Err(std::io::Error::other("the supervisor revoked the result before this program read it"))
        }
    }

    /// Returns true if the supervisor has not revoked the file. If so, all bytes read before this call were
    /// valid, including those read through [`MappedResult::as_ptr`]. The supervisor can revoke the file when
    /// the connection is lost, or at the earliest five seconds after the job ends. A revoked file contains
    /// zeros.
    pub fn is_whole(&self) -> bool {
        self.lease.as_ref().is_none_or(|lease| lease.is_whole())
    }

    /// Returns a pointer to the first byte, for code that reads the result without copying. After reading,
    /// call [`MappedResult::is_whole`] to check that the bytes were valid.
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
            requests.release_lease(*lease);
        }
    }
}
