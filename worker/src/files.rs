//! Memory files that this worker was lent: payloads that are read in them, and results that are written there.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use bulkhead_shared::codec;
use bulkhead_shared::memory_files::{FILES, Mapping, Named};

/// The two files of a lease.
pub(crate) struct Files {
    payload: Mapping,
    result: Mutex<Mapping>,
}

impl Files {
    fn map(named: Named, files: Vec<OwnedFd>) -> io::Result<Self> {
        let [payload, result] =
            <[OwnedFd; FILES]>::try_from(files).map_err(|_| io::Error::other("they did not come along"))?;
        Ok(Self {
            payload: Mapping::new(&payload, named.bytes, false)?,
            result: Mutex::new(Mapping::new(&result, named.bytes, true)?),
        })
    }

    fn result(&self) -> MutexGuard<'_, Mapping> {
        self.result.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// All that was lent, by the numbers of the leases.
#[derive(Default)]
pub(crate) struct Lent {
    files: HashMap<u64, Arc<Files>>,
    /// Descriptors that came, for the frame that says what they are.
    pub(crate) coming: Vec<OwnedFd>,
    /// What the supervisor is to be told of.
    pub(crate) taken: Vec<u64>,
}

impl Lent {
    /// The supervisor lends files. Without them its jobs come as bytes.
    pub(crate) fn take(&mut self, metadata: &[u8]) {
        let coming = std::mem::take(&mut self.coming);
        let Ok((named, _)) = codec::decode::<Named>(metadata, &[]) else { return };
        match Files::map(named, coming) {
            Ok(files) => {
                self.files.insert(named.lease, Arc::new(files));
                self.taken.push(named.lease);
            }
            Err(error) => eprintln!("memory files cannot be used: {error}"),
        }
    }

    pub(crate) fn end(&mut self, lease: u64) {
        self.files.remove(&lease);
    }

    /// The payload of a job that stands in a file.
    pub(crate) fn payload(&self, named: Named) -> Option<Box<Leased>> {
        let files = self.files.get(&named.lease)?.clone();
        let bytes = usize::try_from(named.bytes).ok().filter(|bytes| *bytes <= files.payload.len())?;
        Some(Box::new(Leased {
            lease: named.lease,
            bytes,
            files,
            copy: OnceLock::new(),
            spare: Mutex::default(),
            in_place: AtomicU64::new(0),
        }))
    }
}

/// A job's payload in a file.
pub(crate) struct Leased {
    lease: u64,
    bytes: usize,
    files: Arc<Files>,
    copy: OnceLock<Vec<u8>>,
    /// A buffer that can be used for the copy.
    pub(crate) spare: Mutex<Vec<u8>>,
    /// Bytes of the result that was written in place.
    in_place: AtomicU64,
}

impl Leased {
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// A copy, which does not change.
    pub(crate) fn copy(&self) -> &[u8] {
        self.copy.get_or_init(|| {
            let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
            let mut copy = std::mem::take(&mut *spare);
            copy.clear();
            self.files.payload.copy_to(self.bytes, &mut copy);
            copy
        })
    }

    pub(crate) fn is_in_place(&self) -> bool {
        self.in_place.load(Ordering::Acquire) > 0
    }

    /// Where the result stands that was written in place, or is written now, if it fits.
    pub(crate) fn result(&self, result: &[u8]) -> Option<Named> {
        let in_place = self.in_place.load(Ordering::Acquire);
        if in_place > 0 {
            return Some(Named { lease: self.lease, bytes: in_place });
        }
        let mut file = self.files.result();
        if result.len() > file.len() {
            return None;
        }
        file.first_mut(result.len()).copy_from_slice(result);
        Some(Named { lease: self.lease, bytes: result.len() as u64 })
    }

    /// The buffers that it used.
    pub(crate) fn into_buffers(self) -> [Vec<u8>; 2] {
        let spare = self.spare.into_inner().unwrap_or_else(PoisonError::into_inner);
        [spare, self.copy.into_inner().unwrap_or_default()]
    }
}

/// A payload where it stands: in a file that the client can write to. **It may change while it is read.** Who parses
/// it must not rely on reading the same bytes twice; [`Job::payload`](crate::Job::payload) is a copy.
#[derive(Clone, Copy)]
pub struct MappedPayload<'j>(pub(crate) &'j Leased);

impl MappedPayload<'_> {
    /// How many bytes it has.
    pub fn len(&self) -> usize {
        self.0.bytes
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.0.bytes == 0
    }

    /// Copies bytes from `at` on, as many as `into` has. Panics if there are not so many.
    pub fn read(&self, at: usize, into: &mut [u8]) {
        assert!(at <= self.len() && into.len() <= self.len() - at, "beyond the end of the payload");
        self.0.files.payload.read(at, into);
    }

    /// Its first byte, for those that read it as it is.
    pub fn as_ptr(&self) -> *const u8 {
        self.0.files.payload.as_ptr()
    }
}

impl fmt::Debug for MappedPayload<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MappedPayload({} bytes)", self.len())
    }
}

/// Room for a result in the file that the client reads it from. It counts once [`ResultInPlace::finish`] was called.
pub struct ResultInPlace<'j> {
    leased: &'j Leased,
    file: MutexGuard<'j, Mapping>,
    bytes: usize,
}

impl<'j> ResultInPlace<'j> {
    pub(crate) fn new(leased: &'j Leased, bytes: usize) -> Option<Self> {
        let file = leased.files.result();
        (bytes <= file.len() && bytes > 0).then_some(Self { leased, file, bytes })
    }

    /// It is written: what the handler returns with `Ok` does not matter.
    pub fn finish(self) {
        self.leased.in_place.store(self.bytes as u64, Ordering::Release);
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
