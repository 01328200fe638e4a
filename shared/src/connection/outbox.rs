//! Queues frames to be sent over a connection, and sends them without blocking. Small frames are combined in one
//! buffer, and large owned payloads are not copied. `inbox` is the receiving half. The caller waits until the
//! connection is writable, and limits the number of queued bytes.

mod in_process;

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::net::{SendAncillaryBuffer, SendFlags};

use super::BufferPool;
use super::pool::{SEGMENT_BYTES_MAX, SEGMENT_CAPACITY};
use crate::codec::{self, CodecError};
use crate::frame::{HEADER_BYTES, Header};
use crate::limits::INLINE_PAYLOAD_BYTES_MAX;

/// Maximum number of buffers per `sendmsg` call.
const WRITE_SEGMENTS_MAX: usize = 16;

/// Maximum number of bytes that one `sendfile` call sends from a file.
const FILE_CHUNK_BYTES_MAX: usize = 1024 * 1024;

/// Maximum number of bytes that are read from a file and sent per call when `sendfile` is not used.
const COPIED_CHUNK_BYTES_MAX: usize = 128 * 1024;

/// Maximum capacity of the coalescing buffer that an idle [`Outbox`] keeps, in bytes. An outbox takes larger buffers
/// from a [`BufferPool`] and returns them after use.
pub(super) const SPARE_BYTES_MAX: usize = 4 * 1024;

/// Space reserved for the metadata of a frame, in bytes. The buffer grows if the metadata is larger.
pub(super) const METADATA_BYTES_TYPICAL: usize = 512;

/// Size, in bytes, to which a socket's send buffer is enlarged if a large payload does not fit. The kernel may set a
/// lower size. With the default of 208 KiB, sender and receiver would wake each other many times per megabyte.
const SEND_BUFFER_BYTES: usize = 1024 * 1024;

/// The payload of a frame to be sent.
#[derive(Debug)]
pub enum Payload<'p> {
    /// Bytes that are copied into the outbox.
    Copied(&'p [u8]),
    /// A buffer whose ownership passes to the outbox. A large buffer is sent without copying.
    Owned(Vec<u8>),
    /// A buffer that the sender also keeps, in case the job has to be sent again. A large buffer is sent without
    /// copying.
    Shared(Arc<Vec<u8>>),
    /// The given number of bytes from the beginning of a file. The file must be at least this long.
    File(Arc<OwnedFd>, usize),
}

impl Payload<'_> {
    /// An empty payload.
    pub const NONE: Payload<'static> = Payload::Copied(&[]);

    /// Returns the size of the payload in bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::Copied(bytes) => bytes.len(),
            Self::Owned(bytes) => bytes.len(),
            Self::Shared(bytes) => bytes.len(),
            Self::File(_, bytes) => *bytes,
        }
    }

    /// Returns true if the payload is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A contiguous part of the queued bytes.
pub(super) enum Segment {
    Bytes(Vec<u8>),
    Shared(Arc<Vec<u8>>),
    /// The given number of bytes from the beginning of a file.
    File(Arc<OwnedFd>, usize),
}

impl Segment {
    fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Shared(bytes) => bytes.len(),
            Self::File(_, bytes) => *bytes,
        }
    }

    pub(super) fn bytes(&self) -> Option<&[u8]> {
        match self {
            Self::Bytes(bytes) => Some(bytes),
            Self::Shared(bytes) => Some(bytes),
            Self::File(..) => None,
        }
    }
}

/// The sending half of a connection.
///
/// ```
/// use bulkhead_shared::connection::{BufferPool, Inbox, Item, Outbox, Payload, Scratch};
/// use bulkhead_shared::{frame::kind, worker_protocol::Empty};
/// use std::os::unix::net::UnixStream;
///
/// let (here, there) = UnixStream::pair()?;
/// let mut outbox = Outbox::default();
/// outbox.push(kind::RESULT, 7, &Empty, &[], Payload::Copied(b"done")).unwrap();
/// outbox.flush(&here, &mut BufferPool::default())?;
///
/// let (mut inbox, mut scratch) = (Inbox::default(), Scratch::default());
/// let (_, mut batch) = inbox.receive(&there, &mut scratch)?;
/// let Ok(Some(Item::Frame { header, payload, .. })) = batch.next() else { panic!() };
/// assert_eq!((header.kind, header.number, payload), (kind::RESULT, 7, &b"done"[..]));
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Default)]
pub struct Outbox {
    pub(super) segments: VecDeque<Segment>,
    /// Number of bytes in the first segment that have already been sent.
    sent: usize,
    /// True if the last segment is a coalescing buffer to which more frames can be appended.
    tail_is_open: bool,
    bytes: usize,
    pub(super) spare: Vec<u8>,
    has_large_send_buffer: bool,
}

impl Outbox {
    /// Returns the number of queued bytes that have not been sent yet.
    pub fn waiting_bytes(&self) -> usize {
        self.bytes
    }

    /// Frees the buffers that are kept for later frames. Does nothing if unsent bytes are queued.
    pub fn free_buffers(&mut self) {
        if self.bytes == 0 {
            (self.segments, self.spare, self.tail_is_open) = (VecDeque::new(), Vec::new(), false);
        }
    }

    /// Moves the buffer that is kept for later frames into `pool`, so that idle connections share buffers.
    /// Does nothing if unsent bytes are queued. Intended for connections that queue frames with
    /// [`Outbox::push_pooled`].
    pub fn release_buffer(&mut self, pool: &mut BufferPool) {
        if self.bytes == 0 && self.spare.capacity() > 0 {
            pool.put_spare(std::mem::take(&mut self.spare));
        }
    }

    /// Returns true if no unsent bytes are queued.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Returns the last `bytes` queued bytes. Returns `None` if these bytes are not all in the last buffer.
    pub fn tail_bytes(&self, bytes: usize) -> Option<&[u8]> {
        let tail = self.segments.back()?.bytes()?;
        tail.get(tail.len().checked_sub(bytes)?..)
    }

    /// Queues a frame. To send the queued frames, call [`Outbox::flush`].
    pub fn push<M: bincode::Encode>(
        &mut self,
        kind: u8,
        number: u64,
        message: &M,
        extensions: &[(u16, &[u8])],
        payload: Payload<'_>,
    ) -> Result<(), CodecError> {
        self.push_frame(kind, number, message, extensions, payload, None)
    }

    /// Queues a frame like [`Outbox::push`], but takes buffers from `pool`. Intended for connections that
    /// send many frames at once.
    pub fn push_pooled<M: bincode::Encode>(
        &mut self,
        kind: u8,
        number: u64,
        message: &M,
        extensions: &[(u16, &[u8])],
        payload: Payload<'_>,
        pool: &mut BufferPool,
    ) -> Result<(), CodecError> {
        self.push_frame(kind, number, message, extensions, payload, Some(pool))
    }

    fn push_frame<M: bincode::Encode>(
        &mut self,
        kind: u8,
        number: u64,
        message: &M,
        extensions: &[(u16, &[u8])],
        payload: Payload<'_>,
        pool: Option<&mut BufferPool>,
    ) -> Result<(), CodecError> {
        let inline_bytes = if payload.len() <= INLINE_PAYLOAD_BYTES_MAX { payload.len() } else { 0 };
        let tail = self.open_tail(HEADER_BYTES + METADATA_BYTES_TYPICAL + inline_bytes, pool);
        let start = tail.len();
        tail.extend_from_slice(&[0; HEADER_BYTES]);
        if let Err(error) = codec::encode(message, extensions, tail) {
            tail.truncate(start);
            return Err(error);
        }
        let metadata_bytes = tail.len() - start - HEADER_BYTES;
        let Ok(length) = u32::try_from(metadata_bytes + payload.len()) else {
            tail.truncate(start);
            return Err(CodecError::TooLong);
        };
        let metadata_length = metadata_bytes as u16; // `codec::encode` ensures that the metadata fits.
        let header = Header { length, kind, flags: 0, metadata_length, number };
        tail[start..start + HEADER_BYTES].copy_from_slice(&header.encode());
        self.bytes += HEADER_BYTES + length as usize;
        self.push_payload(payload);
        Ok(())
    }

    fn push_payload(&mut self, payload: Payload<'_>) {
        match payload {
            Payload::Owned(buffer) if buffer.len() > INLINE_PAYLOAD_BYTES_MAX => {
                self.segments.push_back(Segment::Bytes(buffer));
                self.tail_is_open = false;
            }
            Payload::Owned(buffer) => self.append(&buffer),
            Payload::Shared(buffer) if buffer.len() > INLINE_PAYLOAD_BYTES_MAX => {
                self.segments.push_back(Segment::Shared(buffer));
                self.tail_is_open = false;
            }
            Payload::Shared(buffer) => self.append(&buffer),
            Payload::Copied(bytes) => self.append(bytes),
            Payload::File(file, bytes) => {
                self.segments.push_back(Segment::File(file, bytes));
                self.tail_is_open = false;
            }
        }
    }

    fn append(&mut self, bytes: &[u8]) {
        if let Some(Segment::Bytes(tail)) = self.segments.back_mut() {
            tail.extend_from_slice(bytes);
            self.tail_is_open = tail.len() < SEGMENT_BYTES_MAX;
        }
    }

    /// Returns the buffer to which the next frame is appended. `more` is the expected size of the frame. Uses a small
    /// buffer for a few small frames, and a large buffer otherwise.
    fn open_tail(&mut self, more: usize, pool: Option<&mut BufferPool>) -> &mut Vec<u8> {
        let may_grow = pool.is_none();
        let has_room = |tail: &Vec<u8>| may_grow || tail.len() + more <= SPARE_BYTES_MAX.max(tail.capacity());
        let is_open = matches!(self.segments.back(), Some(Segment::Bytes(tail)) if has_room(tail));
        if !self.tail_is_open || !is_open {
            let fresh = match pool {
                Some(pool) if !self.segments.is_empty() || more > SPARE_BYTES_MAX => pool.take_segment(),
                Some(pool) if self.spare.capacity() == 0 => pool.take_spare(),
                _ => std::mem::take(&mut self.spare),
            };
            self.segments.push_back(Segment::Bytes(fresh));
            self.tail_is_open = true;
        }
        let Some(Segment::Bytes(tail)) = self.segments.back_mut() else {
            unreachable!("the code above ensures that the last segment holds bytes")
        };
        // Grows in powers of two, but only up to `SPARE_BYTES_MAX`, because an idle connection does not keep a larger
        // buffer.
        let needed = tail.len() + more;
        if needed > tail.capacity() && needed <= SPARE_BYTES_MAX {
            tail.reserve_exact(needed.next_power_of_two() - tail.len());
        }
        tail
    }

    /// Sends as many queued bytes as the socket accepts. Returns true if all bytes were sent. Otherwise the
    /// caller must wait until the socket is writable and call this function again. Returns the errors of
    /// `sendmsg(2)`, except `EAGAIN` and `EINTR`.
    pub fn flush(&mut self, socket: impl AsFd, pool: &mut BufferPool) -> io::Result<bool> {
        while self.bytes > 0 {
            match self.send_once(&socket) {
                Ok(count) => self.advance(count, pool),
                Err(rustix::io::Errno::AGAIN) if !self.enlarge_send_buffer(&socket) => return Ok(false),
                Err(rustix::io::Errno::AGAIN) => {}
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }

    /// Enlarges the socket's send buffer if a large payload is queued. Returns true if the buffer was
    /// enlarged, so that the caller can try to send again.
    fn enlarge_send_buffer(&mut self, socket: &impl AsFd) -> bool {
        if self.has_large_send_buffer || self.bytes <= INLINE_PAYLOAD_BYTES_MAX {
            return false;
        }
        self.has_large_send_buffer = true;
        rustix::net::sockopt::set_socket_send_buffer_size(socket, SEND_BUFFER_BYTES).is_ok()
    }

    fn send_once(&self, socket: &impl AsFd) -> rustix::io::Result<usize> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let first = match &self.segments[0] {
            Segment::Bytes(bytes) => &bytes[self.sent..],
            Segment::Shared(bytes) => &bytes[self.sent..],
            Segment::File(file, bytes) => return send_file_chunk(socket, file, self.sent..*bytes),
        };
        if self.segments.len() == 1 {
            return rustix::net::send(socket, first, flags);
        }
        let rest = self.segments.iter().skip(1).map_while(Segment::bytes).take(WRITE_SEGMENTS_MAX - 1);
        let slices: Vec<IoSlice<'_>> =
            std::iter::once(IoSlice::new(first)).chain(rest.map(IoSlice::new)).collect();
        rustix::net::sendmsg(socket, &slices, &mut SendAncillaryBuffer::default(), flags)
    }

    fn advance(&mut self, mut count: usize, pool: &mut BufferPool) {
        self.bytes -= count;
        while let Some(first) = self.segments.front() {
            let left = first.len() - self.sent;
            if count < left {
                self.sent += count;
                return;
            }
            count -= left;
            self.sent = 0;
            let Some(Segment::Bytes(mut buffer)) = self.segments.pop_front() else { continue };
            if buffer.capacity() <= SPARE_BYTES_MAX {
                buffer.clear();
                self.spare = buffer;
            } else if buffer.capacity() == SEGMENT_CAPACITY {
                pool.put_segment(buffer);
            } else {
                pool.put(buffer);
            }
        }
        self.tail_is_open = false;
    }
}

/// True if `sendfile(2)` must not be used in this process.
static SENDFILE_IS_DISABLED: AtomicBool = AtomicBool::new(false);

/// Disables `sendfile(2)` in this process, so that no later write raises SIGPIPE. `sendfile(2)` has no
/// equivalent of `MSG_NOSIGNAL`. An application whose threads neither block nor ignore SIGPIPE must call this
/// function.
pub fn disable_sendfile() {
    SENDFILE_IS_DISABLED.store(true, Ordering::Relaxed);
}

/// Sends part of a file. The socket must be non-blocking.
fn send_file_chunk(
    socket: &impl AsFd,
    file: &OwnedFd,
    range: std::ops::Range<usize>,
) -> rustix::io::Result<usize> {
    let mut at = range.start as u64;
    if SENDFILE_IS_DISABLED.load(Ordering::Relaxed) {
        let mut chunk = vec![0; range.len().min(COPIED_CHUNK_BYTES_MAX)];
        return match rustix::io::pread(file, &mut chunk[..], at)? {
            0 => Err(rustix::io::Errno::IO),
            count => rustix::net::send(socket, &chunk[..count], SendFlags::DONTWAIT | SendFlags::NOSIGNAL),
        };
    }
    match rustix::fs::sendfile(socket, file, Some(&mut at), range.len().min(FILE_CHUNK_BYTES_MAX)) {
        // Reports an error, because the file is shorter than announced.
        Ok(0) => Err(rustix::io::Errno::IO),
        other => other,
    }
}
