//! Receives bytes from a connection and splits them into frames. Limits the memory for incomplete frames, and discards
//! a large payload unless the caller accepts it. Clients, workers and the data plane use an [`Inbox`]. The caller
//! decodes the metadata and decides what a frame means.

use std::io;
use std::os::fd::AsFd;

use rustix::net::RecvFlags;

use super::BufferPool;
use crate::frame::{FrameError, HEADER_BYTES, Header};
use crate::limits::{INLINE_PAYLOAD_BYTES_MAX, METADATA_BYTES_MAX, READ_BYTES_MAX};

/// Maximum size of a small frame, in bytes. A buffer of this size can hold any incomplete small frame.
const PARTIAL_BYTES_MAX: usize = HEADER_BYTES + METADATA_BYTES_MAX + INLINE_PAYLOAD_BYTES_MAX;

/// Maximum number of bytes of a payload buffer that are zeroed before a read. Limits the duration of a read.
const LARGE_ZEROED_BYTES_MAX: usize = 1024 * 1024;

/// Minimum capacity of a large payload's buffer, in bytes.
pub(super) const LARGE_BUFFER_BYTES_MIN: usize = 4 * 1024;

/// Maximum ratio between the capacity of a payload buffer and the number of bytes received. Prevents a peer from
/// causing large allocations by announcing a payload without sending it.
pub(super) const LARGE_GROWTH_FACTOR_MAX: usize = 8;

/// Read buffer shared by all connections of a thread. Allocated on first use, so that creating a default value does not
/// allocate memory.
pub struct Scratch {
    buffer: Vec<u8>,
    bytes: usize,
}

impl Default for Scratch {
    fn default() -> Self {
        Self::with_read_bytes(READ_BYTES_MAX)
    }
}

impl Scratch {
    /// Creates a buffer for reads of up to `bytes` bytes. A value below the default saves memory on connections where
    /// few frames arrive at once.
    pub fn with_read_bytes(bytes: usize) -> Self {
        Self { buffer: Vec::new(), bytes: PARTIAL_BYTES_MAX + bytes }
    }

    fn buffer(&mut self) -> &mut [u8] {
        if self.buffer.is_empty() {
            self.buffer = vec![0; self.bytes];
        }
        &mut self.buffer
    }
}

/// Result of [`Inbox::receive`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// More bytes may be available. Call [`Inbox::receive`] again before waiting for the socket.
    More,
    /// All available bytes have been read. If the read returned descriptors, more bytes may be available, because such
    /// a read ends early.
    Drained,
    /// The peer has closed its side of the connection.
    Closed,
}

/// A received item: a complete frame, or only the beginning of a frame with a large payload.
#[derive(Debug)]
pub enum Item<'s> {
    /// A frame with a small payload.
    Frame {
        /// Header of the frame.
        header: Header,
        /// Encoded metadata, to be decoded with [`codec::decode`](crate::codec::decode).
        metadata: &'s [u8],
        /// Payload of the frame.
        payload: &'s [u8],
    },
    /// The beginning of a frame with a large payload. Unless [`Batch::accept`] is called, the payload is discarded as
    /// it arrives.
    Announced {
        /// Header of the frame.
        header: Header,
        /// Encoded metadata, to be decoded with [`codec::decode`](crate::codec::decode).
        metadata: &'s [u8],
    },
    /// The payload of an accepted large frame has arrived completely.
    Large {
        /// Header of the frame.
        header: Header,
        /// Encoded metadata, to be decoded with [`codec::decode`](crate::codec::decode).
        metadata: Vec<u8>,
        /// Payload of the frame.
        payload: Vec<u8>,
    },
}

#[derive(Default)]
enum ReceiveState {
    #[default]
    Frames,
    Announced {
        header: Header,
        metadata: Vec<u8>,
    },
    Storing(Large),
    Skipping {
        bytes_left: usize,
    },
}

/// A large frame whose payload is being received. Only the first `filled` bytes of the buffer are valid. Beyond these
/// bytes, a reused buffer keeps its old contents, because zeroing would cost as much as filling the buffer.
struct Large {
    header: Header,
    metadata: Vec<u8>,
    buffer: Vec<u8>,
    filled: usize,
}

impl Large {
    fn large_capacity(&self, arrived: usize) -> usize {
        large_capacity(arrived, self.header.payload_length())
    }

    /// Moves the received bytes to a larger buffer, and returns the old buffer.
    fn move_into(&mut self, mut buffer: Vec<u8>, room: usize) -> Vec<u8> {
        if buffer.capacity() < room {
            buffer = Vec::with_capacity(room);
        }
        let room = buffer.capacity().min(self.header.payload_length());
        let kept = buffer.len().min(self.filled);
        buffer[..kept].copy_from_slice(&self.buffer[..kept]);
        buffer.extend_from_slice(&self.buffer[kept..self.filled]);
        let cleared = room.min(self.filled + LARGE_ZEROED_BYTES_MAX);
        buffer.resize(cleared.max(buffer.len()), 0);
        std::mem::replace(&mut self.buffer, buffer)
    }

    /// Stores the bytes at the beginning of `bytes` that belong to the payload. Returns the number of stored bytes.
    fn store(&mut self, bytes: &[u8]) -> usize {
        let count = bytes.len().min(self.header.payload_length() - self.filled);
        if self.buffer.capacity() < self.filled + count {
            let more = self.large_capacity(self.filled + count) - self.buffer.len();
            self.buffer.reserve_exact(more);
        }
        let (over, beyond) = bytes[..count].split_at(count.min(self.buffer.len() - self.filled));
        self.buffer[self.filled..self.filled + over.len()].copy_from_slice(over);
        self.buffer.extend_from_slice(beyond);
        self.filled += count;
        count
    }
}

/// Returns the buffer capacity for a payload of `total` bytes, of which `arrived` bytes have been received so far. The
/// capacity grows in proportion to `arrived`, up to `total`.
fn large_capacity(arrived: usize, total: usize) -> usize {
    let room = arrived.saturating_mul(LARGE_GROWTH_FACTOR_MAX).max(LARGE_BUFFER_BYTES_MIN);
    if room >= total - total / 4 { total } else { room }
}

/// The receiving half of a connection.
#[derive(Default)]
pub struct Inbox {
    pub(super) partial: Vec<u8>,
    state: ReceiveState,
    begun: u64,
}

impl Inbox {
    /// Reads once from the socket and returns the received frames as a batch. The caller must call [`Batch::next`]
    /// until it returns `None`. Returns the errors of `recv(2)`, except `EAGAIN` and `EINTR`.
    pub fn receive<'b>(
        &'b mut self,
        socket: impl AsFd,
        scratch: &'b mut Scratch,
    ) -> io::Result<(Received, Batch<'b>)> {
        self.receive_by(scratch, |buffer| {
            rustix::net::recv(&socket, buffer, RecvFlags::DONTWAIT).map(|(_, count)| count)
        })
    }

    /// Receives frames like [`Inbox::receive`], but gets the bytes from `read` instead of a socket. `read` must not
    /// block.
    pub fn receive_by<'b>(
        &'b mut self,
        scratch: &'b mut Scratch,
        read: impl FnOnce(&mut [u8]) -> rustix::io::Result<usize>,
    ) -> io::Result<(Received, Batch<'b>)> {
        if let ReceiveState::Storing(large) = &mut self.state {
            let received = receive_large(read, large)?;
            return Ok((received, Batch { inbox: self, bytes: &[], at: 0, frame_at: 0 }));
        }
        let kept = self.partial.len();
        let buffer = scratch.buffer();
        buffer[..kept].copy_from_slice(&self.partial);
        let (received, count) = receive_frames(read, &mut buffer[kept..])?;
        self.partial.clear();
        let bytes = &buffer[..kept + count];
        Ok((received, Batch { inbox: self, bytes, at: 0, frame_at: 0 }))
    }

    /// Returns true if only part of a frame has arrived. The caller should disconnect a peer that leaves a frame
    /// incomplete for a long time.
    pub fn is_mid_frame(&self) -> bool {
        !self.partial.is_empty() || !matches!(self.state, ReceiveState::Frames)
    }

    /// Returns the number of bytes that are missing from an incomplete small frame, or from the metadata of a
    /// large frame. Returns 0 until the header has arrived.
    pub fn missing_bytes(&self) -> usize {
        let Some(header) = self.pending_header() else { return 0 };
        let length = header.length as usize;
        let is_large = length.saturating_sub(header.metadata_length.into()) > INLINE_PAYLOAD_BYTES_MAX;
        let whole = HEADER_BYTES + if is_large { header.metadata_length.into() } else { length };
        whole.saturating_sub(self.partial.len())
    }

    /// Returns true if the next bytes belong to the payload of a large frame.
    pub fn is_within_large(&self) -> bool {
        !matches!(self.state, ReceiveState::Frames)
    }

    /// Returns the total capacity of the buffers that hold an incomplete frame, in bytes.
    pub fn held_bytes(&self) -> usize {
        let large = match &self.state {
            ReceiveState::Storing(large) => large.buffer.capacity() + large.metadata.capacity(),
            _ => 0,
        };
        self.partial.capacity() + large
    }

    /// Returns true if the payload of a large frame is being stored.
    pub fn is_storing(&self) -> bool {
        matches!(self.state, ReceiveState::Storing(_))
    }

    /// Returns the number of bytes by which the next [`Inbox::receive`] would enlarge the buffer of a large
    /// frame. Returns 0 while the buffer has free space.
    pub fn growth_bytes(&self) -> usize {
        match &self.state {
            ReceiveState::Storing(large) if large.buffer.capacity() == large.filled => {
                large.large_capacity(large.filled) - large.filled
            }
            _ => 0,
        }
    }

    /// Replaces the full buffer of a large frame with a larger buffer, which is taken from `pool` if possible. The old
    /// buffer is returned to the pool. Does nothing while the buffer has free space.
    pub fn grow(&mut self, pool: &mut BufferPool) {
        let growth = self.growth_bytes();
        if let ReceiveState::Storing(large) = &mut self.state
            && growth > 0
        {
            let room = large.filled + growth;
            let fit = pool.take(room);
            pool.put(large.move_into(fit, room));
        }
    }

    /// Returns the number of received frames. A large frame counts as received as soon as its metadata has arrived.
    pub fn frames_begun(&self) -> u64 {
        self.begun
    }

    /// Creates an inbox from the bytes that [`Inbox::take_partial`] returned for another inbox. The next
    /// [`Inbox::receive`] returns the frames in these bytes, even if no further bytes arrive.
    pub fn with_partial(bytes: Vec<u8>) -> Self {
        Self { partial: bytes, ..Self::default() }
    }

    /// Removes and returns the bytes that have been received but not yet returned as frames. Must not be called while a
    /// large frame is incomplete.
    pub fn take_partial(&mut self) -> Vec<u8> {
        debug_assert!(!self.is_within_large(), "called while a large frame is incomplete");
        std::mem::take(&mut self.partial)
    }

    /// Returns the metadata of the large frame whose payload is being stored, or `None` if there is no such frame.
    pub fn storing_metadata(&self) -> Option<&[u8]> {
        match &self.state {
            ReceiveState::Storing(large) => Some(&large.metadata),
            _ => None,
        }
    }

    /// Returns the header of a small frame that is incomplete, or of a large frame whose metadata is incomplete. The
    /// header is unchecked. Returns `None` until the header has arrived.
    pub fn pending_header(&self) -> Option<Header> {
        self.partial.first_chunk::<HEADER_BYTES>().map(Header::decode)
    }

    /// Stops storing a large frame. Frees the payload received so far, and discards the rest of the payload
    /// as it arrives. Returns the header and metadata of the frame, or `None` if no large frame is being
    /// stored.
    pub fn abandon_large(&mut self) -> Option<(Header, Vec<u8>)> {
        match std::mem::take(&mut self.state) {
            ReceiveState::Storing(large) => {
                self.state =
                    ReceiveState::Skipping { bytes_left: large.header.payload_length() - large.filled };
                Some((large.header, large.metadata))
            }
            other => {
                self.state = other;
                None
            }
        }
    }
}

fn receive_frames(
    read: impl FnOnce(&mut [u8]) -> rustix::io::Result<usize>,
    buffer: &mut [u8],
) -> io::Result<(Received, usize)> {
    match read(&mut *buffer) {
        Ok(0) => Ok((Received::Closed, 0)),
        Ok(count) if count == buffer.len() => Ok((Received::More, count)),
        Ok(count) => Ok((Received::Drained, count)),
        Err(error) => without_transient_errors(error).map(|received| (received, 0)),
    }
}

fn receive_large(
    read: impl FnOnce(&mut [u8]) -> rustix::io::Result<usize>,
    large: &mut Large,
) -> io::Result<Received> {
    let wanted = large.header.payload_length() - large.filled;
    if large.buffer.len() == large.filled {
        if large.buffer.capacity() == large.filled {
            large.buffer.reserve_exact(large.large_capacity(large.filled) - large.filled);
        }
        let room = large.buffer.capacity().min(large.header.payload_length());
        large.buffer.resize(room.min(large.filled + LARGE_ZEROED_BYTES_MAX), 0);
    }
    let room = wanted.min(large.buffer.len() - large.filled);
    let into = &mut large.buffer[large.filled..large.filled + room];
    match read(into) {
        Ok(0) => Ok(Received::Closed),
        Ok(count) => {
            large.filled += count;
            Ok(if count == room { Received::More } else { Received::Drained })
        }
        Err(error) => without_transient_errors(error),
    }
}

fn without_transient_errors(error: rustix::io::Errno) -> io::Result<Received> {
    match error {
        rustix::io::Errno::AGAIN => Ok(Received::Drained),
        rustix::io::Errno::INTR => Ok(Received::More),
        other => Err(other.into()),
    }
}

/// The frames received by one read, in order.
pub struct Batch<'b> {
    inbox: &'b mut Inbox,
    bytes: &'b [u8],
    at: usize,
    /// Position at which the most recently returned or announced frame starts.
    frame_at: usize,
}

impl<'b> Batch<'b> {
    /// Returns the next frame. If no complete frame is left, keeps the remaining bytes for the next read and
    /// returns `None`. After an error, the connection is unusable.
    #[expect(
        clippy::should_implement_trait,
        reason = "an `Iterator` could continue after an error, but a connection cannot"
    )]
    pub fn next(&mut self) -> Result<Option<Item<'b>>, FrameError> {
        loop {
            match &mut self.inbox.state {
                ReceiveState::Frames => match self.next_frame()? {
                    Some(item) => return Ok(Some(item)),
                    None => {
                        self.inbox.partial.extend_from_slice(&self.bytes[self.at..]);
                        if self.inbox.partial.is_empty() {
                            self.inbox.partial = Vec::new();
                        }
                        self.at = self.bytes.len();
                        return Ok(None);
                    }
                },
                ReceiveState::Announced { header, .. } => {
                    self.inbox.state = ReceiveState::Skipping { bytes_left: header.payload_length() };
                }
                ReceiveState::Skipping { bytes_left } => {
                    let count = (*bytes_left).min(self.bytes.len() - self.at);
                    self.at += count;
                    *bytes_left -= count;
                    if *bytes_left > 0 {
                        return Ok(None);
                    }
                    self.inbox.state = ReceiveState::Frames;
                }
                ReceiveState::Storing(large) => {
                    self.at += large.store(&self.bytes[self.at..]);
                    if large.filled < large.header.payload_length() {
                        return Ok(None);
                    }
                    if let ReceiveState::Storing(mut large) = std::mem::take(&mut self.inbox.state) {
                        large.buffer.truncate(large.filled);
                        let Large { header, metadata, buffer: payload, .. } = large;
                        return Ok(Some(Item::Large { header, metadata, payload }));
                    }
                }
            }
        }
    }

    /// Returns true if the payload of a large frame is being discarded.
    pub fn is_skipping(&self) -> bool {
        matches!(self.inbox.state, ReceiveState::Skipping { .. } | ReceiveState::Announced { .. })
    }

    /// Keeps the unprocessed bytes of this batch, so that the next [`Inbox::receive`] returns their frames even if
    /// nothing else arrives. Must be called only after a small frame.
    pub fn keep_rest(self) {
        debug_assert!(
            matches!(self.inbox.state, ReceiveState::Frames),
            "the remaining bytes belong to a large frame"
        );
        self.inbox.partial.extend_from_slice(&self.bytes[self.at..]);
    }

    /// Puts back the last frame that was returned or announced, and all bytes after it, as if they had not been read.
    /// Must not be called after [`Item::Large`].
    pub fn return_frame(self) {
        debug_assert!(
            matches!(self.inbox.state, ReceiveState::Frames | ReceiveState::Announced { .. }),
            "called after a large frame"
        );
        self.inbox.state = ReceiveState::Frames;
        self.inbox.begun -= 1;
        self.inbox.partial.extend_from_slice(&self.bytes[self.frame_at..]);
    }

    /// Returns the recommended capacity of the buffer for [`Batch::accept`]. The capacity depends on the number of
    /// payload bytes that have already arrived.
    pub fn buffer_bytes(&self) -> usize {
        match &self.inbox.state {
            ReceiveState::Announced { header, .. } => {
                let total = header.payload_length();
                let arrived = (self.bytes.len() - self.at).min(total);
                large_capacity(arrived, total)
            }
            _ => 0,
        }
    }

    /// Accepts the payload of the announced frame. The payload is stored in `buffer` and overwrites the previous
    /// contents.
    pub fn accept(&mut self, buffer: Vec<u8>) {
        if let ReceiveState::Announced { header, metadata } = std::mem::take(&mut self.inbox.state) {
            self.inbox.state = ReceiveState::Storing(Large { header, metadata, buffer, filled: 0 });
        }
    }

    fn next_frame(&mut self) -> Result<Option<Item<'b>>, FrameError> {
        let rest = &self.bytes[self.at..];
        let Some(bytes) = rest.first_chunk::<HEADER_BYTES>() else {
            return Ok(None);
        };
        let header = Header::decode(bytes).check()?;
        let metadata_end = HEADER_BYTES + usize::from(header.metadata_length);
        let is_large = header.payload_length() > INLINE_PAYLOAD_BYTES_MAX;
        let end = if is_large { metadata_end } else { HEADER_BYTES + header.length as usize };
        if rest.len() < end {
            return Ok(None);
        }
        self.frame_at = self.at;
        self.at += end;
        self.inbox.begun += 1;
        let metadata = &rest[HEADER_BYTES..metadata_end];
        if is_large {
            self.inbox.state = ReceiveState::Announced { header, metadata: metadata.to_vec() };
            return Ok(Some(Item::Announced { header, metadata }));
        }
        Ok(Some(Item::Frame { header, metadata, payload: &rest[metadata_end..end] }))
    }
}
