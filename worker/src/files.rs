//! Maps the memory files that the supervisor lends to this worker, with payloads to read and results to write. `pool`
//! receives the files and sends the results. The supervisor decides which files are lent. If a file cannot be mapped,
//! payloads arrive over the link instead.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use bulkhead_shared::codec;
use bulkhead_shared::memory_files::{FILES_PER_LEASE, LeaseRef, Mapping};

use crate::log;

/// The mapped files of one lease.
pub(crate) struct LeaseFiles {
    payload: Mapping,
    result: Mutex<Mapping>,
}

impl LeaseFiles {
    fn map(lease_ref: LeaseRef, files: Vec<OwnedFd>) -> io::Result<Self> {
        let [payload, result] = <[OwnedFd; FILES_PER_LEASE]>::try_from(files)
            .map_err(|_| io::Error::other("the message contains fewer memory files than it announces"))?;
        Ok(Self {
            payload: Mapping::new(&payload, lease_ref.bytes, false)?,
            result: Mutex::new(Mapping::new(&result, lease_ref.bytes, true)?),
        })
    }

    fn result(&self) -> MutexGuard<'_, Mapping> {
        self.result.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The memory files lent to this worker, by lease number.
#[derive(Default)]
pub(crate) struct Loans {
    files: HashMap<u64, Arc<LeaseFiles>>,
    /// Descriptors received before the worker processed the frame that describes them.
    pub(crate) received_files: Vec<OwnedFd>,
    /// Leases whose files are mapped but have not been confirmed to the supervisor.
    pub(crate) unconfirmed: Vec<u64>,
}

impl Loans {
    /// Maps the received files of a lease. If mapping fails, the worker does not confirm the lease, and the
    /// supervisor sends payloads over the link instead.
    pub(crate) fn receive(&mut self, metadata: &[u8]) {
        let received_files = std::mem::take(&mut self.received_files);
        let Ok((lease_ref, _)) = codec::decode::<LeaseRef>(metadata, &[]) else { return };
        match LeaseFiles::map(lease_ref, received_files) {
            Ok(files) => {
                self.files.insert(lease_ref.lease, Arc::new(files));
                self.unconfirmed.push(lease_ref.lease);
            }
            Err(error) => log::line(format_args!("memory files cannot be used: {error}")),
        }
    }

    pub(crate) fn end(&mut self, lease: u64) {
        self.files.remove(&lease);
    }

    /// Returns a payload that the client sent in a memory file, or `None` if the lease is unknown or the file is
    /// smaller than the payload.
    pub(crate) fn payload(&self, lease_ref: LeaseRef) -> Option<Box<Loan>> {
        let files = self.files.get(&lease_ref.lease)?.clone();
        let bytes = usize::try_from(lease_ref.bytes).ok().filter(|bytes| *bytes <= files.payload.len())?;
        Some(Box::new(Loan {
            lease: lease_ref.lease,
            bytes,
            files,
            copy: OnceLock::new(),
            copy_buffer: Mutex::default(),
            in_place: AtomicU64::new(0),
        }))
    }
}

/// A job's payload file and result file, which are memory files.
pub(crate) struct Loan {
    lease: u64,
    bytes: usize,
    files: Arc<LeaseFiles>,
    copy: OnceLock<Vec<u8>>,
    /// Reusable buffer for copying the payload.
    pub(crate) copy_buffer: Mutex<Vec<u8>>,
    /// Size in bytes of the result that the handler wrote in place, or 0 if the handler wrote none.
    in_place: AtomicU64,
}

impl Loan {
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns a private copy of the payload. The client cannot modify the copy.
    pub(crate) fn copy(&self) -> &[u8] {
        self.copy.get_or_init(|| {
            let mut copy_buffer = self.copy_buffer.lock().unwrap_or_else(PoisonError::into_inner);
            let mut copy = std::mem::take(&mut *copy_buffer);
            copy.clear();
            self.files.payload.copy_to(self.bytes, &mut copy);
            copy
        })
    }

    pub(crate) fn is_in_place(&self) -> bool {
        self.in_place.load(Ordering::Acquire) > 0
    }

    /// Returns the location of the result in the memory file. If the handler has not written its result in place,
    /// copies `result` to this location. Returns `None` if `result` does not fit.
    pub(crate) fn result(&self, result: &[u8]) -> Option<LeaseRef> {
        let in_place = self.in_place.load(Ordering::Acquire);
        if in_place > 0 {
            return Some(LeaseRef { lease: self.lease, bytes: in_place });
        }
        let mut file = self.files.result();
        if result.len() > file.len() {
            return None;
        }
        file.first_mut(result.len()).copy_from_slice(result);
        Some(LeaseRef { lease: self.lease, bytes: result.len() as u64 })
    }

    /// Consumes the loan. Returns its buffers, which later jobs reuse.
    pub(crate) fn into_buffers(self) -> [Vec<u8>; 2] {
        let copy_buffer = self.copy_buffer.into_inner().unwrap_or_else(PoisonError::into_inner);
        [copy_buffer, self.copy.into_inner().unwrap_or_default()]
    }
}

/// A payload in a memory file that the client can write to. **The contents can change at any time.** A parser
/// must not rely on reading the same bytes twice. [`Job::payload`](crate::Job::payload) returns a copy that
/// cannot change.
#[derive(Clone, Copy)]
pub struct MappedPayload<'j>(pub(crate) &'j Loan);

impl MappedPayload<'_> {
    /// Returns the size of the payload in bytes.
    pub fn len(&self) -> usize {
        self.0.bytes
    }

    /// Returns true if the payload is empty.
    pub fn is_empty(&self) -> bool {
        self.0.bytes == 0
    }

    /// Fills `into` with payload bytes, starting at offset `at`. Panics if the payload is too short.
    pub fn read(&self, at: usize, into: &mut [u8]) {
        assert!(
            at <= self.len() && into.len() <= self.len() - at,
            "the requested range is beyond the end of the payload"
        );
        self.0.files.payload.read(at, into);
    }

    /// Returns a pointer to the first byte of the payload, for code that reads the payload without copying.
    pub fn as_ptr(&self) -> *const u8 {
        self.0.files.payload.as_ptr()
    }
}

impl fmt::Debug for MappedPayload<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MappedPayload({} bytes)", self.len())
    }
}

/// Buffer for writing a result into a memory file that the client reads. The result is sent only if
/// [`ResultInPlace::finish`] is called.
pub struct ResultInPlace<'j> {
    loan: &'j Loan,
    file: MutexGuard<'j, Mapping>,
    bytes: usize,
}

impl<'j> ResultInPlace<'j> {
    pub(crate) fn new(loan: &'j Loan, bytes: usize) -> Option<Self> {
        let file = loan.files.result();
        (bytes <= file.len() && bytes > 0).then_some(Self { loan, file, bytes })
    }

    /// Marks the result as complete. If the handler then returns `Ok`, the value in `Ok` is ignored.
    pub fn finish(self) {
        self.loan.in_place.store(self.bytes as u64, Ordering::Release);
    }
}

impl Deref for ResultInPlace<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.file.first(self.bytes)
    }
}

impl DerefMut for ResultInPlace<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.file.first_mut(self.bytes)
    }
}

impl fmt::Debug for ResultInPlace<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ResultInPlace({} bytes)", self.bytes)
    }
}
