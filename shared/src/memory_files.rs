//! Memory files: how large payloads and results cross without being copied from socket to socket.
//!
//! A *lease* is two files in memory, made by the supervisor for one client and one worker of one bulkhead. The client
//! writes payloads into the first, which the worker can only read; the worker writes results into the second, which the
//! client can only read. Both are sealed: neither becomes shorter or longer, so that a mapping stays good.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;

use bincode::{BorrowDecode, Encode};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};

/// A payload or result of more bytes than this is worth a file: what is smaller travels within shared buffers.
pub const WORTH_A_FILE_BYTES: usize = crate::limits::INLINE_PAYLOAD_BYTES_MAX;

/// The files of a lease.
pub const FILES: usize = 2;

/// Bytes of a [`Named`] as an extension.
pub const NAMED_BYTES: usize = 16;

/// A client asks for a lease: [`LEASE`](crate::frame::kind::LEASE), with a number of its own choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub struct LeaseWanted<'a> {
    /// The bulkhead's name.
    pub bulkhead: &'a str,
    /// The tenant; may be empty.
    pub tenant: &'a str,
    /// The largest payload, in bytes.
    pub bytes: u64,
}

/// A lease, and a number of bytes: of each of its files where it is lent, or of the payload or result that stands at
/// the beginning of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub struct Named {
    /// The supervisor's number of the lease.
    pub lease: u64,
    /// How many bytes.
    pub bytes: u64,
}

impl Named {
    /// As the value of the extension [`LEASE`](crate::codec::tag::LEASE).
    pub fn to_bytes(self) -> [u8; NAMED_BYTES] {
        let mut bytes = [0; NAMED_BYTES];
        bytes[..8].copy_from_slice(&self.lease.to_le_bytes());
        bytes[8..].copy_from_slice(&self.bytes.to_le_bytes());
        bytes
    }

    /// What [`Named::to_bytes`] wrote.
    ///
    /// ```
    /// use bulkhead_shared::memory_files::Named;
    /// let named = Named { lease: 7, bytes: 1 << 20 };
    /// assert_eq!(Named::from_bytes(&named.to_bytes()), Some(named));
    /// assert_eq!(Named::from_bytes(b"short"), None);
    /// ```
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (lease, rest) = bytes.split_first_chunk()?;
        let bytes = rest.try_into().ok()?;
        Some(Self { lease: u64::from_le_bytes(*lease), bytes: u64::from_le_bytes(bytes) })
    }
}

/// Reads without waiting, with the descriptors that come along. Errors are those of `recvmsg(2)`.
pub fn receive_with_files(
    socket: impl AsFd,
    buffer: &mut [u8],
    files: &mut Vec<OwnedFd>,
) -> rustix::io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, flags)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            // Those of one lease: what came before and was not asked for is closed.
            files.clear();
            files.extend(rights);
        }
    }
    Ok(received.bytes)
}

/// A buffer of so many bytes is worth huge pages: each small one costs a fault.
const HUGE_BYTES: usize = 4 * 1024 * 1024;

/// Asks for huge pages for a buffer of which nothing was used yet.
fn use_huge_pages(buffer: &Vec<u8>) {
    const PAGE: usize = 4096;
    let start = (buffer.as_ptr() as usize).next_multiple_of(PAGE);
    let end = (buffer.as_ptr() as usize + buffer.capacity()) / PAGE * PAGE;
    // SAFETY: whole pages of a buffer of our own, whose bytes this does not change.
    #[expect(unsafe_code, reason = "madvise(2) has no safe form")]
    let _ = unsafe { madvise(start as *mut _, end.saturating_sub(start), Advice::LinuxHugepage) };
}

/// A sealed file in this process's memory. Another process may have it, too.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
    is_writable: bool,
}

// SAFETY: the mapping belongs to no thread, and is written to by the owner of this value alone.
#[expect(unsafe_code, reason = "a pointer to a mapping of our own")]
unsafe impl Send for Mapping {}

// SAFETY: as above: shared, it is only read.
#[expect(unsafe_code, reason = "a pointer to a mapping of our own")]
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps a file that the supervisor lent, of so many bytes. Errors are those of `mmap(2)`, and an odd size.
    pub fn new(file: &OwnedFd, bytes: u64, is_writable: bool) -> io::Result<Self> {
        let odd = || io::Error::other("a memory file has an odd size");
        if bytes == 0 || u64::try_from(rustix::fs::fstat(file)?.st_size) != Ok(bytes) {
            return Err(odd());
        }
        let bytes = usize::try_from(bytes).map_err(|_| odd())?;
        let protection = ProtFlags::READ | if is_writable { ProtFlags::WRITE } else { ProtFlags::empty() };
        // SAFETY: a new mapping at an address of the kernel's choice, of a file as long as that, which the supervisor
        // sealed against becoming shorter.
        #[expect(unsafe_code, reason = "mmap(2) has no safe form")]
        let base = unsafe { mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, file, 0) }?;
        let base = NonNull::new(base.cast()).ok_or_else(odd)?;
        Ok(Self { base, bytes, is_writable })
    }

    /// How many bytes it has.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it has none, which no mapping does.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Its first byte. What it points to may change at any time by what the other side does.
    pub fn as_ptr(&self) -> *const u8 {
        self.base.as_ptr()
    }

    /// Copies as many bytes as `into` has, from `at` on. Panics if there are not so many.
    pub fn read(&self, at: usize, into: &mut [u8]) {
        assert!(at <= self.bytes && into.len() <= self.bytes - at, "beyond the end of a memory file");
        // SAFETY: both are as long as that, and memory of this process's own is no part of the mapping. Bytes that the
        // other side changes meanwhile are bytes.
        #[expect(unsafe_code, reason = "the other side may write what is read")]
        unsafe {
            std::ptr::copy_nonoverlapping(self.base.as_ptr().add(at), into.as_mut_ptr(), into.len());
        }
    }

    /// The first bytes, appended to a buffer. Panics if there are not so many.
    pub fn copy_to(&self, count: usize, out: &mut Vec<u8>) {
        assert!(count <= self.bytes, "beyond the end of a memory file");
        let is_fresh = out.capacity() < out.len() + count;
        out.reserve_exact(count);
        if is_fresh && count >= HUGE_BYTES {
            use_huge_pages(out);
        }
        // SAFETY: the mapping is as long as that, there is room for it, and what is copied is what becomes part of the
        // vector.
        #[expect(unsafe_code, reason = "the other side may write what is read")]
        unsafe {
            std::ptr::copy_nonoverlapping(self.base.as_ptr(), out.as_mut_ptr().add(out.len()), count);
            out.set_len(out.len() + count);
        }
    }

    /// The first bytes of one that this process alone writes. Panics if there are not so many, or if another writes it.
    pub fn first(&self, count: usize) -> &[u8] {
        assert!(self.is_writable && count <= self.bytes, "not within a memory file that is to be written");
        // SAFETY: within the mapping, which this value owns, and lives as long as it. The other side has the file only
        // to be read.
        #[expect(unsafe_code, reason = "a mapping of our own")]
        unsafe {
            std::slice::from_raw_parts(self.base.as_ptr(), count)
        }
    }

    /// The first bytes, to be written. Panics if there are not so many, or if they are only to be read.
    pub fn first_mut(&mut self, count: usize) -> &mut [u8] {
        assert!(self.is_writable && count <= self.bytes, "not within a memory file that is to be written");
        // SAFETY: within the mapping, which this value owns, and lives as long as it. The other side has the file only
        // to be read.
        #[expect(unsafe_code, reason = "a mapping of our own")]
        unsafe {
            std::slice::from_raw_parts_mut(self.base.as_ptr(), count)
        }
    }
}

/// Whether what was read of a lease's result before this was there. The supervisor gives the file a mode before it
/// empties it.
pub fn is_whole(result: &OwnedFd) -> bool {
    rustix::fs::fstat(result).is_ok_and(|found| found.st_mode & 0o777 == 0)
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length, and nothing points into it any more.
        #[expect(unsafe_code, reason = "munmap(2) has no safe form")]
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}
