//! Memory files: shared memory for large payloads and results, which avoids copies through sockets. This module maps
//! the files and encodes references to them. The data plane decides who gets a file, and creates and revokes the files.
//!
//! A *lease* is a pair of memory files that the supervisor creates for one client and lends to at most one
//! worker of one bulkhead. The client writes payloads into the first file, which the worker can only read.
//! The worker writes results into the second file, which the client can only read. Both files are sealed
//! against shrinking and growing, so that mappings stay valid.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;

use bincode::{BorrowDecode, Encode};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};

/// Number of files in a lease.
pub const FILES_PER_LEASE: usize = 2;

/// Size of an encoded [`LeaseRef`] in bytes.
pub const LEASE_REF_BYTES: usize = 16;

/// [`LEASE`](crate::frame::kind::LEASE): a client's request for a lease. The client chooses the frame number. The reply
/// has the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub struct LeaseRequest<'a> {
    /// Name of the bulkhead.
    pub bulkhead: &'a str,
    /// Tenant that the jobs belong to. Empty if the jobs have no tenant.
    pub tenant: &'a str,
    /// Size of the largest payload that the client wants to send, in bytes.
    pub bytes: u64,
}

/// Reference to a lease, with a size. When a lease is granted, the size is that of each file. In a job or a result, the
/// size is that of the payload or result, which starts at the beginning of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub struct LeaseRef {
    /// Number of the lease, chosen by the supervisor.
    pub lease: u64,
    /// Size in bytes.
    pub bytes: u64,
}

impl LeaseRef {
    /// Encodes the reference as the value of the [`LEASE`](crate::codec::tag::LEASE) extension.
    pub fn to_bytes(self) -> [u8; LEASE_REF_BYTES] {
        let mut bytes = [0; LEASE_REF_BYTES];
        bytes[..8].copy_from_slice(&self.lease.to_le_bytes());
        bytes[8..].copy_from_slice(&self.bytes.to_le_bytes());
        bytes
    }

    /// Decodes the value of the [`LEASE`](crate::codec::tag::LEASE) extension. Returns `None` if the length is wrong.
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

/// Reads from a socket without blocking. Received descriptors replace the contents of `files`. Fails with the errors of
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
            // A message contains the descriptors of a single lease. If descriptors from an earlier read are left, no
            // frame has claimed them, so they are closed.
            files.clear();
            files.extend(rights);
        }
    }
    Ok(received.bytes)
}

/// Minimum size, in bytes, of a buffer for which huge pages are requested. A large buffer of small pages would cause
/// many page faults.
const HUGE_BYTES: usize = 4 * 1024 * 1024;

/// Requests huge pages for a buffer that has not been written to.
fn use_huge_pages(buffer: &Vec<u8>) {
    const PAGE: usize = 4096;
    let start = (buffer.as_ptr() as usize).next_multiple_of(PAGE);
    let end = (buffer.as_ptr() as usize + buffer.capacity()) / PAGE * PAGE;
    // SAFETY: the range covers whole pages of a buffer that this process owns. The call does not change its
    // bytes.
    #[expect(unsafe_code, reason = "madvise(2) has no safe wrapper")]
    let _ = unsafe { madvise(start as *mut _, end.saturating_sub(start), Advice::LinuxHugepage) };
}

/// A sealed memory file, mapped into this process. Other processes can have the file mapped at the same time.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
    is_writable: bool,
}

// SAFETY: the mapping is not tied to a thread, and only the owner of this value writes to it.
#[expect(unsafe_code, reason = "the pointer refers to a mapping that this value owns")]
unsafe impl Send for Mapping {}

// SAFETY: the mapping is not tied to a thread, and a shared reference only allows reading.
#[expect(unsafe_code, reason = "the pointer refers to a mapping that this value owns")]
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps a memory file that the supervisor has sent. Returns an error if `mmap(2)` fails or if the file
    /// size differs from `bytes`.
    pub fn new(file: &OwnedFd, bytes: u64, is_writable: bool) -> io::Result<Self> {
        let odd = || io::Error::other("a memory file has an unexpected size");
        if bytes == 0 || u64::try_from(rustix::fs::fstat(file)?.st_size) != Ok(bytes) {
            return Err(odd());
        }
        let bytes = usize::try_from(bytes).map_err(|_| odd())?;
        let protection = ProtFlags::READ | if is_writable { ProtFlags::WRITE } else { ProtFlags::empty() };
        // SAFETY: this creates a new mapping at an address that the kernel chooses. The file has the mapped
        // size, and the supervisor has sealed it against shrinking.
        #[expect(unsafe_code, reason = "mmap(2) has no safe wrapper")]
        let base = unsafe { mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, file, 0) }?;
        let base = NonNull::new(base.cast()).ok_or_else(odd)?;
        Ok(Self { base, bytes, is_writable })
    }

    /// Returns the size of the memory file in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Always returns false, because a mapping is never empty.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Returns a pointer to the first byte. Another process can change the bytes at any time.
    pub fn as_ptr(&self) -> *const u8 {
        self.base.as_ptr()
    }

    /// Fills `into` with bytes of the mapping, starting at offset `at`. Panics if the mapping is too short.
    pub fn read(&self, at: usize, into: &mut [u8]) {
        assert!(
            at <= self.bytes && into.len() <= self.bytes - at,
            "the requested range is beyond the end of the memory file"
        );
        // SAFETY: both ranges have `into.len()` bytes, and `into` cannot overlap the mapping. Concurrent
        // writes by another process can change the copied values, but any value is a valid byte.
        #[expect(unsafe_code, reason = "another process can access the same memory at the same time")]
        unsafe {
            std::ptr::copy_nonoverlapping(self.base.as_ptr().add(at), into.as_mut_ptr(), into.len());
        }
    }

    /// Appends the first `count` bytes of the mapping to `out`. Panics if the mapping is shorter.
    pub fn copy_to(&self, count: usize, out: &mut Vec<u8>) {
        assert!(count <= self.bytes, "the requested range is beyond the end of the memory file");
        let is_fresh = out.capacity() < out.len() + count;
        out.reserve_exact(count);
        if is_fresh && count >= HUGE_BYTES {
            use_huge_pages(out);
        }
        // SAFETY: the mapping has `count` bytes, the vector has capacity for them, and exactly the copied
        // bytes become part of the vector.
        #[expect(unsafe_code, reason = "another process can access the same memory at the same time")]
        unsafe {
            std::ptr::copy_nonoverlapping(self.base.as_ptr(), out.as_mut_ptr().add(out.len()), count);
            out.set_len(out.len() + count);
        }
    }

    /// Returns the first `count` bytes of a file that only this process writes. Panics if the mapping is
    /// shorter or read-only.
    pub fn first(&self, count: usize) -> &[u8] {
        assert!(self.is_writable && count <= self.bytes, "the memory file is read-only or too short");
        // SAFETY: the slice is within the mapping, which lives as long as this value. Other processes can
        // only read the file.
        #[expect(unsafe_code, reason = "this value owns the mapping")]
        unsafe {
            std::slice::from_raw_parts(self.base.as_ptr(), count)
        }
    }

    /// Returns the first `count` bytes of the mapping as a mutable slice. Panics if the mapping is shorter or
    /// read-only.
    pub fn first_mut(&mut self, count: usize) -> &mut [u8] {
        assert!(self.is_writable && count <= self.bytes, "the memory file is read-only or too short");
        // SAFETY: the slice is within the mapping, which lives as long as this value. Other processes can
        // only read the file.
        #[expect(unsafe_code, reason = "this value owns the mapping")]
        unsafe {
            std::slice::from_raw_parts_mut(self.base.as_ptr(), count)
        }
    }
}

/// Returns true if the supervisor has not revoked this result file. Call this after reading the result. The supervisor
/// changes the file's mode before it truncates the file, so everything read before a successful check is valid.
pub fn is_whole(result: &OwnedFd) -> bool {
    rustix::fs::fstat(result).is_ok_and(|found| found.st_mode & 0o777 == 0)
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `new` has mapped exactly this range, and no pointer into the mapping is left.
        #[expect(unsafe_code, reason = "munmap(2) has no safe wrapper")]
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}
