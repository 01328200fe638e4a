//! Memory files: shared memory for large payloads and results, which avoids copies through sockets.
//!
//! A *lease* is a pair of memory files, made by the supervisor for one client and one worker of one bulkhead.
//! The client writes payloads into the first file, which the worker can only read. The worker writes results
//! into the second file, which the client can only read. Both files are sealed against shrinking and growing,
//! so that mappings stay valid.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;

use bincode::{BorrowDecode, Encode};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};

/// Number of files of a lease.
pub const FILES_PER_LEASE: usize = 2;

/// Size of an encoded [`LeaseRef`] in bytes.
pub const LEASE_REF_BYTES: usize = 16;

/// [`LEASE`](crate::frame::kind::LEASE): a client's request for a lease. The client chooses the frame's
/// number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub struct LeaseRequest<'a> {
    /// Name of the bulkhead.
    pub bulkhead: &'a str,
    /// Tenant; can be empty.
    pub tenant: &'a str,
    /// Maximum size of a payload, in bytes.
    pub bytes: u64,
}

/// A lease and a number of bytes. When the supervisor gives the lease, this is the size of each file. Later,
/// this is the size of the payload or result at the beginning of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub struct LeaseRef {
    /// Number of the lease, chosen by the supervisor.
    pub lease: u64,
    /// Size in bytes.
    pub bytes: u64,
}

impl LeaseRef {
    /// Encodes the value of the extension [`LEASE`](crate::codec::tag::LEASE).
    pub fn to_bytes(self) -> [u8; LEASE_REF_BYTES] {
        let mut bytes = [0; LEASE_REF_BYTES];
        bytes[..8].copy_from_slice(&self.lease.to_le_bytes());
        bytes[8..].copy_from_slice(&self.bytes.to_le_bytes());
        bytes
    }

    /// Decodes a value of [`LeaseRef::to_bytes`].
    ///
    /// ```
    /// use bulkhead_shared::memory_files::LeaseRef;
    /// let named = LeaseRef { lease: 7, bytes: 1 << 20 };
    /// assert_eq!(LeaseRef::from_bytes(&named.to_bytes()), Some(named));
    /// assert_eq!(LeaseRef::from_bytes(b"short"), None);
    /// ```
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (lease, rest) = bytes.split_first_chunk()?;
        let bytes = rest.try_into().ok()?;
        Some(Self { lease: u64::from_le_bytes(*lease), bytes: u64::from_le_bytes(bytes) })
    }
}

/// Reads without blocking. Received descriptors replace the contents of `files`. Errors are those of
/// `recvmsg(2)`.
pub fn receive_with_files(
    socket: impl AsFd,
    buffer: &mut [u8],
    files: &mut Vec<OwnedFd>,
) -> rustix::io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_PER_LEASE))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, flags)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            // The descriptors of one lease. Unclaimed descriptors from an earlier read are closed.
            files.clear();
            files.extend(rights);
        }
    }
    Ok(received.bytes)
}

/// Minimum size of a buffer for huge pages, in bytes. Each small page costs a page fault.
const HUGE_BYTES: usize = 4 * 1024 * 1024;

/// Requests huge pages for a buffer that has not been written yet.
fn use_huge_pages(buffer: &Vec<u8>) {
    const PAGE: usize = 4096;
    let start = (buffer.as_ptr() as usize).next_multiple_of(PAGE);
    let end = (buffer.as_ptr() as usize + buffer.capacity()) / PAGE * PAGE;
    // SAFETY: the range covers whole pages of a buffer that this process owns. The call does not change its
    // bytes.
    #[expect(unsafe_code, reason = "madvise(2) has no safe form")]
    let _ = unsafe { madvise(start as *mut _, end.saturating_sub(start), Advice::LinuxHugepage) };
}

/// A sealed memory file, mapped into this process. Other processes may have mapped it too.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
    is_writable: bool,
}

// SAFETY: the mapping belongs to no thread, and only the owner of this value writes to it.
#[expect(unsafe_code, reason = "the pointer refers to a mapping that this value owns")]
unsafe impl Send for Mapping {}

// SAFETY: as above. A shared reference only allows reading.
#[expect(unsafe_code, reason = "the pointer refers to a mapping that this value owns")]
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps a memory file from the supervisor, which must have `bytes` bytes. Errors are those of `mmap(2)`,
    /// or a wrong size.
    pub fn new(file: &OwnedFd, bytes: u64, is_writable: bool) -> io::Result<Self> {
        let odd = || io::Error::other("a memory file has an unexpected size");
        if bytes == 0 || u64::try_from(rustix::fs::fstat(file)?.st_size) != Ok(bytes) {
            return Err(odd());
        }
        let bytes = usize::try_from(bytes).map_err(|_| odd())?;
        let protection = ProtFlags::READ | if is_writable { ProtFlags::WRITE } else { ProtFlags::empty() };
        // SAFETY: a new mapping at an address of the kernel's choice. The file has this size, and the
        // supervisor sealed it against shrinking.
        #[expect(unsafe_code, reason = "mmap(2) has no safe form")]
        let base = unsafe { mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, file, 0) }?;
        let base = NonNull::new(base.cast()).ok_or_else(odd)?;
        Ok(Self { base, bytes, is_writable })
    }

    /// Returns the size in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Returns false, because no mapping is empty.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Returns a pointer to the first byte. The other side can change the bytes at any time.
    pub fn as_ptr(&self) -> *const u8 {
        self.base.as_ptr()
    }

    /// Copies bytes from offset `at` until `into` is full. Panics if the mapping ends before that.
    pub fn read(&self, at: usize, into: &mut [u8]) {
        assert!(
            at <= self.bytes && into.len() <= self.bytes - at,
            "the requested range is beyond the end of the memory file"
        );
        // SAFETY: both ranges have this length, and `into` cannot overlap the mapping. Concurrent writes of
        // the other side can change the copied values, but any value is a valid byte.
        #[expect(unsafe_code, reason = "the other side can access the same memory at the same time")]
        unsafe {
            std::ptr::copy_nonoverlapping(self.base.as_ptr().add(at), into.as_mut_ptr(), into.len());
        }
    }

    /// Appends the first `count` bytes to a buffer. Panics if the mapping is shorter.
    pub fn copy_to(&self, count: usize, out: &mut Vec<u8>) {
        assert!(count <= self.bytes, "the requested range is beyond the end of the memory file");
        let is_fresh = out.capacity() < out.len() + count;
        out.reserve_exact(count);
        if is_fresh && count >= HUGE_BYTES {
            use_huge_pages(out);
        }
        // SAFETY: the mapping has `count` bytes, the vector has capacity for them, and exactly the copied
        // bytes become part of the vector.
        #[expect(unsafe_code, reason = "the other side can access the same memory at the same time")]
        unsafe {
            std::ptr::copy_nonoverlapping(self.base.as_ptr(), out.as_mut_ptr().add(out.len()), count);
            out.set_len(out.len() + count);
        }
    }

    /// Returns the first `count` bytes of a file that only this process writes. Panics if the mapping is
    /// shorter or read-only.
    pub fn first(&self, count: usize) -> &[u8] {
        assert!(self.is_writable && count <= self.bytes, "the memory file is read-only or too short");
        // SAFETY: within the mapping, which this value owns, and which lives as long as this value. The other
        // side can only read the file.
        #[expect(unsafe_code, reason = "this value owns the mapping")]
        unsafe {
            std::slice::from_raw_parts(self.base.as_ptr(), count)
        }
    }

    /// Returns the first `count` bytes for writing. Panics if the mapping is shorter or read-only.
    pub fn first_mut(&mut self, count: usize) -> &mut [u8] {
        assert!(self.is_writable && count <= self.bytes, "the memory file is read-only or too short");
        // SAFETY: within the mapping, which this value owns, and which lives as long as this value. The other
        // side can only read the file.
        #[expect(unsafe_code, reason = "this value owns the mapping")]
        unsafe {
            std::slice::from_raw_parts_mut(self.base.as_ptr(), count)
        }
    }
}

/// Returns true if the result of a lease has not been revoked. Must be called after the result was read. The
/// check is reliable because the supervisor changes the mode of the file before it empties the file.
pub fn is_whole(result: &OwnedFd) -> bool {
    rustix::fs::fstat(result).is_ok_and(|found| found.st_mode & 0o777 == 0)
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length, and no pointer into the mapping is left.
        #[expect(unsafe_code, reason = "munmap(2) has no safe form")]
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}
