//! The files of a lease: made, lent and freed. What they are for stands in [`bulkhead_shared::memory_files`].
//!
//! Nothing of them is mapped here. Each is open twice: as who writes it gets it, and as who reads it does. Their mode
//! lets nobody open them a third time.

use std::ffi::CStr;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use bulkhead_shared::codec;
use bulkhead_shared::frame::{HEADER_BYTES, Header};
use bulkhead_shared::memory_files::FILES;
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

/// The id that no process has: where we may give files away, it has them.
const NOBODY_AT_ALL: u32 = u32::MAX - 1;

/// One of the files.
struct File {
    written: OwnedFd,
    read: Arc<OwnedFd>,
}

impl File {
    fn make(bytes: u64) -> rustix::io::Result<Self> {
        let written = sealed_file(c"lease", bytes)?;
        let path = format!("/proc/self/fd/{}", written.as_raw_fd());
        let read = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        rustix::fs::fchmod(&written, Mode::empty())?;
        let nobody = rustix::fs::Uid::from_raw(NOBODY_AT_ALL);
        // Without the right to do so it stays ours: a worker of our own user can open it anew.
        let _ = rustix::fs::fchown(&written, Some(nobody), None);
        Ok(Self { written, read: Arc::new(read) })
    }
}

/// A file of this process alone, of a size that stays.
pub(super) fn sealed_file(name: &CStr, bytes: u64) -> rustix::io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Kernels before 6.3 do not know the last flag.
    let file = rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL)
        .or_else(|_| rustix::fs::memfd_create(name, flags))?;
    rustix::fs::ftruncate(&file, bytes)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

/// The files of one lease, of the same size.
pub(super) struct Files {
    payload: File,
    result: File,
    pub(super) bytes: u64,
}

impl Files {
    /// Makes them, with memory for a payload: to have it all there takes its time.
    pub(super) fn make(bytes: u64) -> rustix::io::Result<Self> {
        let files = Self { payload: File::make(bytes)?, result: File::make(bytes)?, bytes };
        rustix::fs::fallocate(&files.payload.written, FallocateFlags::empty(), 0, bytes)?;
        Ok(files)
    }

    /// For the client.
    pub(super) fn of_client(&self) -> [BorrowedFd<'_>; FILES] {
        [self.payload.written.as_fd(), self.result.read.as_fd()]
    }

    /// For the worker.
    pub(super) fn of_worker(&self) -> [BorrowedFd<'_>; FILES] {
        [self.payload.read.as_fd(), self.result.written.as_fd()]
    }

    /// Where the payload is read for those that get it as bytes.
    pub(super) fn payload(&self) -> Arc<OwnedFd> {
        self.payload.read.clone()
    }

    /// Gives the memory back, also of what others still have mapped. Takes its time. A client that has copied a result
    /// sees by the file's mode whether it was still there: see [`bulkhead_shared::memory_files::is_whole`].
    pub(super) fn free(self) {
        let empty = |file: &File| {
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let _ = rustix::fs::fallocate(&file.written, hole, 0, self.bytes);
        };
        empty(&self.payload);
        if rustix::fs::fchmod(&self.result.written, Mode::RUSR).is_ok() {
            empty(&self.result);
        }
    }
}

/// Whether a worker of a link can be lent files.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Lending {
    /// It cannot take them, or they cannot be sent to it.
    #[default]
    Never,
    Open,
    /// It has not said that it has those that were sent last.
    Unacknowledged,
}

/// The frame that says which files come with it.
pub(super) fn lend_frame((kind, number): (u8, u64), message: &impl bincode::Encode) -> io::Result<Vec<u8>> {
    let mut frame = vec![0; HEADER_BYTES];
    codec::encode(message, &[], &mut frame).map_err(io::Error::other)?;
    let length = frame.len() - HEADER_BYTES;
    let header = Header { length: length as u32, kind, flags: 0, metadata_length: length as u16, number };
    frame[..HEADER_BYTES].copy_from_slice(&header.encode());
    Ok(frame)
}

/// Sends files, as many as a lease has at most, with the frame that says so. The socket is empty, so that it has room as
/// a rule. Returns how many bytes that were.
pub(super) fn lend(
    socket: impl AsFd,
    said: (u8, u64),
    message: &impl bincode::Encode,
    files: &[BorrowedFd<'_>],
) -> io::Result<usize> {
    let frame = lend_frame(said, message)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(files));
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let sent = rustix::net::sendmsg(socket, &[IoSlice::new(&frame)], &mut control, flags)?;
    if sent == frame.len() { Ok(sent) } else { Err(io::Error::other("a part of the frame was sent")) }
}
