//! Creates, sends and frees memory files. `leases` decides about the files of leases, `background` creates and frees
//! them on the `memory-files` thread, and `wiring` and `sessions` send them. `journal` and `wiring::samples` also create
//! files here. The supervisor does not map lease files. Mode and owner of a lease file keep unprivileged processes from
//! reopening the file. If the owner cannot be changed, processes of the supervisor's user can still reopen the file.

use std::ffi::CStr;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use bulkhead_shared::codec;
use bulkhead_shared::frame::{HEADER_BYTES, Header};
use bulkhead_shared::memory_files::FILES_PER_LEASE;
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use rustix::process::{Resource, getrlimit};

/// UID that no process uses. Becomes the owner of the memory files if the supervisor is allowed to change file owners.
const NOBODY_AT_ALL: u32 = u32::MAX - 1;

/// A memory file with one descriptor for writing and one for reading.
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
        // Fails if the supervisor is not allowed to change the owner. A worker that runs as the supervisor's user can
        // then reopen the file.
        let _ = rustix::fs::fchown(&written, Some(nobody), None);
        Ok(Self { written, read: Arc::new(read) })
    }
}

/// Creates a memory file of fixed size. Fails with `EFBIG` if the size exceeds the file size limit (`RLIMIT_FSIZE`).
pub(super) fn sealed_file(name: &CStr, bytes: u64) -> rustix::io::Result<OwnedFd> {
    // In an embedded supervisor, this can run on the application's own thread. Without this check, `ftruncate` would
    // kill the application with SIGXFSZ.
    if getrlimit(Resource::Fsize).current.is_some_and(|limit| bytes > limit) {
        return Err(Errno::FBIG);
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Kernels before 6.3 do not support `MFD_NOEXEC_SEAL`.
    let file = rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL)
        .or_else(|_| rustix::fs::memfd_create(name, flags))?;
    rustix::fs::ftruncate(&file, bytes)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

/// The payload file and the result file of a lease. Both files have the same size.
pub(super) struct Files {
    payload: File,
    result: File,
    bytes: u64,
}

impl Files {
    /// Creates both files. Also allocates the payload file's memory, which takes a long time.
    pub(super) fn make(bytes: u64) -> rustix::io::Result<Self> {
        let files = Self { payload: File::make(bytes)?, result: File::make(bytes)?, bytes };
        rustix::fs::fallocate(&files.payload.written, FallocateFlags::empty(), 0, bytes)?;
        Ok(files)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the descriptors to send to the client.
    pub(super) fn of_client(&self) -> [BorrowedFd<'_>; FILES_PER_LEASE] {
        [self.payload.written.as_fd(), self.result.read.as_fd()]
    }

    /// Returns the descriptors to send to a worker.
    pub(super) fn of_worker(&self) -> [BorrowedFd<'_>; FILES_PER_LEASE] {
        [self.payload.read.as_fd(), self.result.written.as_fd()]
    }

    /// Returns a descriptor from which the payload can be read and sent as bytes.
    pub(super) fn payload(&self) -> Arc<OwnedFd> {
        self.payload.read.clone()
    }

    /// Frees the memory of the files, even if other processes have mapped them. This is slow. A client that has copied
    /// a result can check the file's mode to find out whether the result was complete (see
    /// [`bulkhead_shared::memory_files::is_whole`]).
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

/// Returns a frame that announces the files. The files are sent in the same message as the frame.
pub(super) fn lend_frame((kind, number): (u8, u64), message: &impl bincode::Encode) -> io::Result<Vec<u8>> {
    let mut frame = vec![0; HEADER_BYTES];
    codec::encode(message, &[], &mut frame).map_err(io::Error::other)?;
    let length = frame.len() - HEADER_BYTES;
    let header = Header { length: length as u32, kind, flags: 0, metadata_length: length as u16, number };
    frame[..HEADER_BYTES].copy_from_slice(&header.encode());
    Ok(frame)
}

/// Sends a frame along with the files that it announces, which belong to a single lease. The socket must be empty, so
/// that the frame normally fits. Returns the number of bytes sent.
pub(super) fn lend(
    socket: impl AsFd,
    said: (u8, u64),
    message: &impl bincode::Encode,
    files: &[BorrowedFd<'_>],
) -> io::Result<usize> {
    let frame = lend_frame(said, message)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_PER_LEASE))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(files));
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let sent = rustix::net::sendmsg(socket, &[IoSlice::new(&frame)], &mut control, flags)?;
    if sent == frame.len() { Ok(sent) } else { Err(io::Error::other("only part of the frame was sent")) }
}
