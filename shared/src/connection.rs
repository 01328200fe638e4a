//! Turns a non-blocking stream socket into frames and back, for every party alike.
//!
//! [`Inbox`] keeps what is left of a half-received frame and [`Outbox`] what the socket has not taken
//! yet; neither holds memory while nothing is under way. One read takes as many frames as there are,
//! one write sends as many as wait. Small payloads travel inside the shared buffers; a large one is
//! announced first, so that its receiver can refuse it before a byte of it is stored.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags};

use crate::codec::{self, CodecError};
use crate::frame::{FrameError, HEADER_BYTES, Header};
use crate::limits::{INLINE_PAYLOAD_BYTES_MAX, METADATA_BYTES_MAX, READ_BYTES_MAX};

/// Bytes that a half-received frame leaves behind at most: a small frame, all but its last byte.
const PARTIAL_BYTES_MAX: usize = HEADER_BYTES + METADATA_BYTES_MAX + INLINE_PAYLOAD_BYTES_MAX;

/// Bytes of a large payload's buffer that are cleared at once, so that one read takes no longer than another.
const LARGE_CLEAR_BYTES: usize = 1024 * 1024;

/// The least that a large payload's buffer has room for.
const LARGE_START_BYTES: usize = 4 * 1024;

/// How many times what has arrived of a large payload its buffer may have room for: memory follows what arrives,
/// not what is announced, and few steps lead to the end.
const LARGE_GROWTH: usize = 8;

/// A pooled buffer may be so many times as large as what is asked for: all of it counts as held.
const POOL_FIT_MAX: usize = 2;

/// A coalescing buffer is closed once it holds this many bytes, and the next one opened.
const SEGMENT_BYTES_MAX: usize = 256 * 1024;

/// What a coalescing buffer has room for: the last frame in it may be as large as an inline one can be.
const SEGMENT_CAPACITY: usize = SEGMENT_BYTES_MAX + INLINE_PAYLOAD_BYTES_MAX + 1;

/// Buffers that one write hands to the kernel.
const WRITE_SEGMENTS_MAX: usize = 16;

/// Bytes of a file that one call sends.
const FILE_PIECE_BYTES: usize = 1024 * 1024;

/// Bytes of large buffers that a [`BufferPool`] keeps for reuse.
const POOL_BYTES_MAX: usize = 64 * 1024 * 1024;

/// An empty coalescing buffer up to this many bytes stays with its [`Outbox`]; a larger one comes from a
/// [`BufferPool`] and goes back there.
const SPARE_BYTES_MAX: usize = 4 * 1024;

/// Coalescing buffers that a [`BufferPool`] keeps for reuse.
const POOL_SEGMENTS_MAX: usize = 32;

/// What a small frame may need beside its payload, roughly; one that needs more makes its buffer grow.
const METADATA_BYTES_USUAL: usize = 512;

/// The send buffer of a socket on which a large payload does not fit, in bytes; the kernel may allow less.
/// With the usual 208 KiB, sender and receiver of a megabyte would wake each other many times over.
const SEND_BUFFER_BYTES: usize = 1024 * 1024;

/// Large buffers kept for reuse: a page of fresh memory costs more than the bytes that go into it.
#[derive(Default)]
pub struct BufferPool {
    buffers: Vec<Vec<u8>>,
    bytes: usize,
    segments: Vec<Vec<u8>>,
}

impl BufferPool {
    /// A buffer with room for `bytes`, if the pool has such a one; what it holds is of no meaning.
    pub fn take(&mut self, bytes: usize) -> Vec<u8> {
        // The tightest fit, so that one huge buffer is not spent on many small payloads.
        let fits = bytes..=bytes.saturating_mul(POOL_FIT_MAX);
        let fit = (0..self.buffers.len())
            .filter(|&i| fits.contains(&self.buffers[i].capacity()))
            .min_by_key(|&i| self.buffers[i].capacity());
        match fit {
            Some(i) => {
                let buffer = self.buffers.swap_remove(i);
                self.bytes -= buffer.capacity();
                buffer
            }
            None => Vec::new(),
        }
    }

    /// Takes back a buffer that is no longer needed, if it is worth keeping and there is room.
    pub fn give(&mut self, buffer: Vec<u8>) {
        let bytes = buffer.capacity();
        if bytes <= INLINE_PAYLOAD_BYTES_MAX || bytes > POOL_BYTES_MAX {
            return;
        }
        // The oldest go: they are of a size that is not asked for any more.
        let surplus = (self.bytes + bytes).saturating_sub(POOL_BYTES_MAX);
        let mut freed = 0;
        let gone = self.buffers.iter().take_while(|oldest| {
            let is_kept = freed >= surplus;
            freed += if is_kept { 0 } else { oldest.capacity() };
            !is_kept
        });
        let gone = gone.count();
        self.buffers.drain(..gone);
        self.bytes = self.bytes - freed + bytes;
        self.buffers.push(buffer);
    }

    /// An empty coalescing buffer.
    fn take_segment(&mut self) -> Vec<u8> {
        self.segments.pop().unwrap_or_else(|| Vec::with_capacity(SEGMENT_CAPACITY))
    }

    fn give_segment(&mut self, mut segment: Vec<u8>) {
        if self.segments.len() < POOL_SEGMENTS_MAX {
            segment.clear();
            self.segments.push(segment);
        }
    }
}

/// The buffer into which all connections of one thread read. It has no memory before its first use, so
/// that to put an empty one in its place for a while costs nothing.
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
    /// A buffer for reads of `bytes` each; smaller than the default saves memory where few frames
    /// come at once.
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

/// What one call of [`Inbox::receive`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// Bytes came, and there may be more: ask again before waiting.
    More,
    /// All that was there has been read.
    Drained,
    /// The peer has closed its side.
    Closed,
}

/// A frame, or the announcement of one.
#[derive(Debug)]
pub enum Item<'s> {
    /// A frame whose payload is small.
    Frame {
        /// Its header.
        header: Header,
        /// The bytes for [`codec::decode`].
        metadata: &'s [u8],
        /// The payload.
        payload: &'s [u8],
    },
    /// A frame with a large payload begins. Call [`Batch::accept`] to have it stored; otherwise its
    /// payload is thrown away as it comes, and never seen again.
    Announced {
        /// Its header.
        header: Header,
        /// The bytes for [`codec::decode`].
        metadata: &'s [u8],
    },
    /// An accepted large frame is complete.
    Large {
        /// Its header.
        header: Header,
        /// The bytes for [`codec::decode`].
        metadata: Vec<u8>,
        /// The payload.
        payload: Vec<u8>,
    },
}

#[derive(Default)]
enum Stage {
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

/// A large frame of which `filled` bytes of payload have come. The buffer may be longer than that: it
/// is used again and again, and clearing it would cost as much as filling it.
struct Large {
    header: Header,
    metadata: Vec<u8>,
    buffer: Vec<u8>,
    filled: usize,
}

impl Large {
    fn room_for(&self, arrived: usize) -> usize {
        room_for(arrived, self.header.payload_length())
    }

    /// Puts what is there into a larger buffer; returns the one it was in.
    fn move_to(&mut self, mut buffer: Vec<u8>, room: usize) -> Vec<u8> {
        if buffer.capacity() < room {
            buffer = Vec::with_capacity(room);
        }
        let room = buffer.capacity().min(self.header.payload_length());
        let kept = buffer.len().min(self.filled);
        buffer[..kept].copy_from_slice(&self.buffer[..kept]);
        buffer.extend_from_slice(&self.buffer[kept..self.filled]);
        let cleared = room.min(self.filled + LARGE_CLEAR_BYTES);
        buffer.resize(cleared.max(buffer.len()), 0);
        std::mem::replace(&mut self.buffer, buffer)
    }

    /// Takes what belongs to it from the front of `bytes`; returns how many those were.
    fn store(&mut self, bytes: &[u8]) -> usize {
        let count = bytes.len().min(self.header.payload_length() - self.filled);
        if self.buffer.capacity() < self.filled + count {
            let more = self.room_for(self.filled + count) - self.buffer.len();
            self.buffer.reserve_exact(more);
        }
        let (over, beyond) = bytes[..count].split_at(count.min(self.buffer.len() - self.filled));
        self.buffer[self.filled..self.filled + over.len()].copy_from_slice(over);
        self.buffer.extend_from_slice(beyond);
        self.filled += count;
        count
    }
}

/// How large the buffer of a payload is to be once `arrived` bytes of it are there: not much more than these, and all
/// of it when the end is near.
fn room_for(arrived: usize, total: usize) -> usize {
    let room = arrived.saturating_mul(LARGE_GROWTH).max(LARGE_START_BYTES);
    if room >= total - total / 4 { total } else { room }
}

/// The receiving half of a connection.
#[derive(Default)]
pub struct Inbox {
    partial: Vec<u8>,
    stage: Stage,
    begun: u64,
}

impl Inbox {
    /// Reads once from the socket. The frames found are in the batch; it must be asked for them until
    /// it has no more. Errors are those of `recv(2)`, without `EAGAIN` and `EINTR`.
    pub fn receive<'b>(
        &'b mut self,
        socket: impl AsFd,
        scratch: &'b mut Scratch,
    ) -> io::Result<(Received, Batch<'b>)> {
        self.receive_by(scratch, |buffer| {
            rustix::net::recv(&socket, buffer, RecvFlags::DONTWAIT).map(|(_, count)| count)
        })
    }

    /// The same, where bytes are read in a way of the caller's, which does not wait.
    pub fn receive_by<'b>(
        &'b mut self,
        scratch: &'b mut Scratch,
        read: impl FnOnce(&mut [u8]) -> rustix::io::Result<usize>,
    ) -> io::Result<(Received, Batch<'b>)> {
        if let Stage::Storing(large) = &mut self.stage {
            let received = receive_large(read, large)?;
            return Ok((received, Batch { inbox: self, bytes: &[], at: 0 }));
        }
        let kept = self.partial.len();
        let buffer = scratch.buffer();
        buffer[..kept].copy_from_slice(&self.partial);
        let (received, count) = receive_some(read, &mut buffer[kept..])?;
        self.partial.clear();
        let bytes = &buffer[..kept + count];
        Ok((received, Batch { inbox: self, bytes, at: 0 }))
    }

    /// The header of a small frame, or of the metadata of a large one, that has begun and not ended, if all of it is
    /// there. It is not checked.
    pub fn begun_header(&self) -> Option<Header> {
        self.partial.first_chunk::<HEADER_BYTES>().map(Header::decode)
    }

    /// Whether a frame has begun and not ended: a peer that leaves it so for long is to be cut off.
    pub fn is_mid_frame(&self) -> bool {
        !self.partial.is_empty() || !matches!(self.stage, Stage::Frames)
    }

    /// Bytes that are still to come of a small frame, or of the metadata of a large one, whose header is there.
    pub fn missing_bytes(&self) -> usize {
        let Some(header) = self.pending_header() else { return 0 };
        let length = header.length as usize;
        let is_large = length.saturating_sub(header.metadata_length.into()) > INLINE_PAYLOAD_BYTES_MAX;
        let whole = HEADER_BYTES + if is_large { header.metadata_length.into() } else { length };
        whole.saturating_sub(self.partial.len())
    }

    /// Whether bytes that come next are payload of a large frame.
    pub fn is_within_large(&self) -> bool {
        !matches!(self.stage, Stage::Frames)
    }

    /// Bytes held for a half-received frame: all of its buffers, whether the peer has filled them or not.
    pub fn held_bytes(&self) -> usize {
        let large = match &self.stage {
            Stage::Storing(large) => large.buffer.capacity() + large.metadata.capacity(),
            _ => 0,
        };
        self.partial.capacity() + large
    }

    /// Whether the frame that has begun is a large one that is stored.
    pub fn is_storing(&self) -> bool {
        matches!(self.stage, Stage::Storing(_))
    }

    /// Bytes by which the next [`Inbox::receive`] makes the buffer of a large frame grow: nothing, as long as there
    /// is room in it.
    pub fn growth(&self) -> usize {
        match &self.stage {
            Stage::Storing(large) if large.buffer.capacity() == large.filled => {
                large.room_for(large.filled) - large.filled
            }
            _ => 0,
        }
    }

    /// Lets it grow now, from a pool, which gets the smaller buffer.
    pub fn grow(&mut self, pool: &mut BufferPool) {
        let growth = self.growth();
        if let Stage::Storing(large) = &mut self.stage
            && growth > 0
        {
            let room = large.filled + growth;
            let fit = pool.take(room);
            pool.give(large.move_to(fit, room));
        }
    }

    /// Frames whose header was handled. It stays the same as long as a frame that has begun does not end.
    pub fn frames_begun(&self) -> u64 {
        self.begun
    }

    /// The header of a frame that has begun and of which nothing else was handled yet.
    pub fn pending_header(&self) -> Option<Header> {
        self.partial.first_chunk::<HEADER_BYTES>().map(Header::decode)
    }

    /// Gives up the large frame that is being stored, if one is: its memory goes at once, the rest of
    /// its bytes are thrown away as they come. Returns its header and metadata.
    pub fn abandon_large(&mut self) -> Option<(Header, Vec<u8>)> {
        match std::mem::take(&mut self.stage) {
            Stage::Storing(large) => {
                self.stage = Stage::Skipping { bytes_left: large.header.payload_length() - large.filled };
                Some((large.header, large.metadata))
            }
            other => {
                self.stage = other;
                None
            }
        }
    }
}

fn receive_some(
    read: impl FnOnce(&mut [u8]) -> rustix::io::Result<usize>,
    buffer: &mut [u8],
) -> io::Result<(Received, usize)> {
    match read(&mut *buffer) {
        Ok(0) => Ok((Received::Closed, 0)),
        Ok(count) if count == buffer.len() => Ok((Received::More, count)),
        Ok(count) => Ok((Received::Drained, count)),
        Err(error) => quiet(error).map(|received| (received, 0)),
    }
}

fn receive_large(
    read: impl FnOnce(&mut [u8]) -> rustix::io::Result<usize>,
    large: &mut Large,
) -> io::Result<Received> {
    let wanted = large.header.payload_length() - large.filled;
    if large.buffer.len() == large.filled {
        if large.buffer.capacity() == large.filled {
            large.buffer.reserve_exact(large.room_for(large.filled) - large.filled);
        }
        let room = large.buffer.capacity().min(large.header.payload_length());
        large.buffer.resize(room.min(large.filled + LARGE_CLEAR_BYTES), 0);
    }
    let room = wanted.min(large.buffer.len() - large.filled);
    let into = &mut large.buffer[large.filled..large.filled + room];
    match read(into) {
        Ok(0) => Ok(Received::Closed),
        Ok(count) => {
            large.filled += count;
            Ok(if count == room { Received::More } else { Received::Drained })
        }
        Err(error) => quiet(error),
    }
}

fn quiet(error: rustix::io::Errno) -> io::Result<Received> {
    match error {
        rustix::io::Errno::AGAIN => Ok(Received::Drained),
        rustix::io::Errno::INTR => Ok(Received::More),
        other => Err(other.into()),
    }
}

/// The frames that one read brought, in order.
pub struct Batch<'b> {
    inbox: &'b mut Inbox,
    bytes: &'b [u8],
    at: usize,
}

impl<'b> Batch<'b> {
    /// The next frame; `None` when the bytes are used up, and what is left of them is kept for the
    /// next read. After an error the connection is of no more use.
    #[expect(
        clippy::should_implement_trait,
        reason = "the items are told apart from an error that ends them"
    )]
    pub fn next(&mut self) -> Result<Option<Item<'b>>, FrameError> {
        loop {
            match &mut self.inbox.stage {
                Stage::Frames => match self.next_frame()? {
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
                Stage::Announced { header, .. } => {
                    self.inbox.stage = Stage::Skipping { bytes_left: header.payload_length() };
                }
                Stage::Skipping { bytes_left } => {
                    let count = (*bytes_left).min(self.bytes.len() - self.at);
                    self.at += count;
                    *bytes_left -= count;
                    if *bytes_left > 0 {
                        return Ok(None);
                    }
                    self.inbox.stage = Stage::Frames;
                }
                Stage::Storing(large) => {
                    self.at += large.store(&self.bytes[self.at..]);
                    if large.filled < large.header.payload_length() {
                        return Ok(None);
                    }
                    if let Stage::Storing(mut large) = std::mem::take(&mut self.inbox.stage) {
                        large.buffer.truncate(large.filled);
                        let Large { header, metadata, buffer: payload, .. } = large;
                        return Ok(Some(Item::Large { header, metadata, payload }));
                    }
                }
            }
        }
    }

    /// Whether the payload of a large frame is thrown away, and has not come to its end.
    pub fn is_skipping(&self) -> bool {
        matches!(self.inbox.stage, Stage::Skipping { .. } | Stage::Announced { .. })
    }

    /// Keeps the bytes behind the last frame for the next [`Inbox::receive`], which has them even if nothing
    /// more has come. Only for a reader that stops at a small frame.
    pub fn leave_rest(self) {
        debug_assert!(matches!(self.inbox.stage, Stage::Frames), "the rest belongs to a large frame");
        self.inbox.partial.extend_from_slice(&self.bytes[self.at..]);
    }

    /// How large a buffer for [`Batch::accept`] is worth to be looked for in a pool: as large as what has come with
    /// the announcement asks for.
    pub fn buffer_bytes(&self) -> usize {
        match &self.inbox.stage {
            Stage::Announced { header, .. } => {
                let total = header.payload_length();
                let arrived = (self.bytes.len() - self.at).min(total);
                room_for(arrived, total)
            }
            _ => 0,
        }
    }

    /// Has the payload of the frame just announced stored in `buffer`, over whatever it holds.
    pub fn accept(&mut self, buffer: Vec<u8>) {
        if let Stage::Announced { header, metadata } = std::mem::take(&mut self.inbox.stage) {
            self.inbox.stage = Stage::Storing(Large { header, metadata, buffer, filled: 0 });
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
        self.at += end;
        self.inbox.begun += 1;
        let metadata = &rest[HEADER_BYTES..metadata_end];
        if is_large {
            self.inbox.stage = Stage::Announced { header, metadata: metadata.to_vec() };
            return Ok(Some(Item::Announced { header, metadata }));
        }
        Ok(Some(Item::Frame { header, metadata, payload: &rest[metadata_end..end] }))
    }
}

/// The payload of a frame to be sent.
#[derive(Debug)]
pub enum Payload<'p> {
    /// Bytes to copy.
    Copied(&'p [u8]),
    /// A buffer to hand over.
    Owned(Vec<u8>),
    /// The first bytes of a file, which is at least as long as that.
    File(Arc<OwnedFd>, usize),
}

impl Payload<'_> {
    /// No bytes at all.
    pub const NONE: Payload<'static> = Payload::Copied(&[]);

    /// Bytes of payload.
    pub fn len(&self) -> usize {
        match self {
            Self::Copied(bytes) => bytes.len(),
            Self::Owned(bytes) => bytes.len(),
            Self::File(_, bytes) => *bytes,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What leaves in one piece.
enum Segment {
    Bytes(Vec<u8>),
    /// So many bytes of a file, from its beginning on.
    File(Arc<OwnedFd>, usize),
}

impl Segment {
    fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::File(_, bytes) => *bytes,
        }
    }

    fn bytes(&self) -> Option<&[u8]> {
        match self {
            Self::Bytes(bytes) => Some(bytes),
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
    segments: VecDeque<Segment>,
    /// Bytes of the first segment that are sent.
    sent: usize,
    /// Whether the last segment is a coalescing buffer that has room.
    tail_is_open: bool,
    bytes: usize,
    spare: Vec<u8>,
    is_widened: bool,
}

impl Outbox {
    /// Bytes that wait for the socket.
    pub fn waiting_bytes(&self) -> usize {
        self.bytes
    }

    /// Gives back the memory that is kept for what comes next, if nothing waits.
    pub fn give_back(&mut self) {
        if self.bytes == 0 {
            (self.segments, self.spare, self.tail_is_open) = (VecDeque::new(), Vec::new(), false);
        }
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The last bytes that wait, if so many were put there in one piece.
    pub fn last(&self, bytes: usize) -> Option<&[u8]> {
        let tail = self.segments.back()?.bytes()?;
        tail.get(tail.len().checked_sub(bytes)?..)
    }

    /// Appends a frame. It is not sent before [`Outbox::flush`].
    pub fn push<M: bincode::Encode>(
        &mut self,
        kind: u8,
        number: u64,
        message: &M,
        extensions: &[(u16, &[u8])],
        payload: Payload<'_>,
    ) -> Result<(), CodecError> {
        self.push_within(kind, number, message, extensions, payload, None)
    }

    /// The same, for those that send many frames at once: buffers come from the pool that they go back to.
    pub fn push_pooled<M: bincode::Encode>(
        &mut self,
        kind: u8,
        number: u64,
        message: &M,
        extensions: &[(u16, &[u8])],
        payload: Payload<'_>,
        pool: &mut BufferPool,
    ) -> Result<(), CodecError> {
        self.push_within(kind, number, message, extensions, payload, Some(pool))
    }

    fn push_within<M: bincode::Encode>(
        &mut self,
        kind: u8,
        number: u64,
        message: &M,
        extensions: &[(u16, &[u8])],
        payload: Payload<'_>,
        pool: Option<&mut BufferPool>,
    ) -> Result<(), CodecError> {
        let inline_bytes = if payload.len() <= INLINE_PAYLOAD_BYTES_MAX { payload.len() } else { 0 };
        let tail = self.open_tail(HEADER_BYTES + METADATA_BYTES_USUAL + inline_bytes, pool);
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
        let metadata_length = metadata_bytes as u16; // `codec::encode` has checked it.
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

    /// The buffer to append to. Many small frames share one, and few one that is small itself.
    fn open_tail(&mut self, more: usize, pool: Option<&mut BufferPool>) -> &mut Vec<u8> {
        let may_grow = pool.is_none();
        let has_room = |tail: &Vec<u8>| may_grow || tail.len() + more <= SPARE_BYTES_MAX.max(tail.capacity());
        let is_open = matches!(self.segments.back(), Some(Segment::Bytes(tail)) if has_room(tail));
        if !self.tail_is_open || !is_open {
            let fresh = match pool {
                Some(pool) if !self.segments.is_empty() || more > SPARE_BYTES_MAX => pool.take_segment(),
                _ => std::mem::take(&mut self.spare),
            };
            self.segments.push_back(Segment::Bytes(fresh));
            self.tail_is_open = true;
        }
        let Some(Segment::Bytes(tail)) = self.segments.back_mut() else {
            unreachable!("the last segment is one of bytes, as was just seen")
        };
        // Grown by powers of two, so that one that could be a spare does not become too large for that.
        let needed = tail.len() + more;
        if needed > tail.capacity() && needed <= SPARE_BYTES_MAX {
            tail.reserve_exact(needed.next_power_of_two() - tail.len());
        }
        tail
    }

    /// Sends what the socket takes. Returns whether all is sent; if not, wait until the socket is
    /// writable. Errors are those of `sendmsg(2)`, without `EAGAIN` and `EINTR`.
    pub fn flush(&mut self, socket: impl AsFd, pool: &mut BufferPool) -> io::Result<bool> {
        while self.bytes > 0 {
            match self.send_once(&socket) {
                Ok(count) => self.advance(count, pool),
                Err(rustix::io::Errno::AGAIN) if !self.widen(&socket) => return Ok(false),
                Err(rustix::io::Errno::AGAIN) => {}
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }

    /// Has the kernel take more at once, if a large payload waits; returns whether it is worth another try.
    fn widen(&mut self, socket: &impl AsFd) -> bool {
        if self.is_widened || self.bytes <= INLINE_PAYLOAD_BYTES_MAX {
            return false;
        }
        self.is_widened = true;
        rustix::net::sockopt::set_socket_send_buffer_size(socket, SEND_BUFFER_BYTES).is_ok()
    }

    fn send_once(&self, socket: &impl AsFd) -> rustix::io::Result<usize> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let first = match &self.segments[0] {
            Segment::Bytes(bytes) => &bytes[self.sent..],
            Segment::File(file, bytes) => return send_piece(socket, file, self.sent..*bytes),
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
                pool.give_segment(buffer);
            } else {
                pool.give(buffer);
            }
        }
        self.tail_is_open = false;
    }
}

mod in_process;

/// Sends some of a file. The socket does not wait.
fn send_piece(
    socket: &impl AsFd,
    file: &OwnedFd,
    range: std::ops::Range<usize>,
) -> rustix::io::Result<usize> {
    let mut at = range.start as u64;
    match rustix::fs::sendfile(socket, file, Some(&mut at), range.len().min(FILE_PIECE_BYTES)) {
        // It is shorter than was said.
        Ok(0) => Err(rustix::io::Errno::IO),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::kind;
    use crate::worker_protocol::{Empty, Status};
    use std::os::unix::net::UnixStream;

    struct Owned(Header, Vec<u8>);

    fn drain(inbox: &mut Inbox, socket: &UnixStream, scratch: &mut Scratch) -> (Vec<Owned>, Received) {
        let mut found = Vec::new();
        loop {
            let (received, mut batch) = inbox.receive(socket, scratch).unwrap();
            while let Some(item) = batch.next().unwrap() {
                match item {
                    Item::Frame { header, payload, .. } => found.push(Owned(header, payload.to_vec())),
                    Item::Announced { .. } => batch.accept(Vec::new()),
                    Item::Large { header, payload, .. } => found.push(Owned(header, payload)),
                }
            }
            if received != Received::More {
                return (found, received);
            }
        }
    }

    #[test]
    fn frames_of_every_size_arrive_in_order_however_they_are_cut() {
        let sizes = [0, 1, 100, 65_536, 65_537, 300_000, 3, 2_000_000, 0, 70_000];
        let (here, there) = UnixStream::pair().unwrap();
        here.set_nonblocking(true).unwrap();
        let (mut outbox, mut inbox) = (Outbox::default(), Inbox::default());
        let (mut pool, mut scratch) = (BufferPool::default(), Scratch::with_read_bytes(7_777));
        for (i, &size) in sizes.iter().enumerate() {
            let payload = vec![i as u8; size];
            let payload = if i % 2 == 0 { Payload::Owned(payload) } else { Payload::Copied(&payload) };
            outbox.push(kind::RESULT, i as u64, &Status { text: "x" }, &[], payload).unwrap();
        }
        let mut found = Vec::new();
        while found.len() < sizes.len() {
            outbox.flush(&here, &mut pool).unwrap();
            found.extend(drain(&mut inbox, &there, &mut scratch).0);
        }
        for (i, &size) in sizes.iter().enumerate() {
            assert_eq!(found[i].0.number, i as u64);
            assert_eq!(found[i].1, vec![i as u8; size]);
        }
        assert!(outbox.is_empty() && !inbox.is_mid_frame());
        drop(here);
        // Another test that starts a process holds a copy for a moment.
        let began = std::time::Instant::now();
        while drain(&mut inbox, &there, &mut scratch).1 != Received::Closed {
            assert!(began.elapsed().as_secs() < 30, "the end of the stream is not seen");
            std::thread::yield_now();
        }
    }

    #[test]
    fn what_is_left_behind_a_frame_comes_with_the_next_receive() {
        let (here, there) = UnixStream::pair().unwrap();
        let (mut outbox, mut inbox) = (Outbox::default(), Inbox::default());
        let (mut pool, mut scratch) = (BufferPool::default(), Scratch::with_read_bytes(7_777));
        for (number, size) in [(1, 0), (2, 20_000), (3, 0), (4, 100_000)] {
            outbox.push(kind::RESULT, number, &Empty, &[], Payload::Copied(&vec![7; size])).unwrap();
        }
        here.set_nonblocking(true).unwrap();
        outbox.flush(&here, &mut pool).unwrap();
        let (_, mut batch) = inbox.receive(&there, &mut scratch).unwrap();
        assert!(matches!(batch.next().unwrap(), Some(Item::Frame { header: Header { number: 1, .. }, .. })));
        batch.leave_rest();
        let mut numbers = Vec::new();
        while numbers.len() < 3 {
            outbox.flush(&here, &mut pool).unwrap();
            numbers.extend(drain(&mut inbox, &there, &mut scratch).0.iter().map(|frame| frame.0.number));
        }
        assert_eq!(numbers, [2, 3, 4]);

        // Nothing more comes on the socket, and yet there is a frame.
        outbox.push(kind::RESULT, 5, &Empty, &[], Payload::NONE).unwrap();
        outbox.push(kind::RESULT, 6, &Empty, &[], Payload::NONE).unwrap();
        assert!(outbox.flush(&here, &mut pool).unwrap());
        let (_, mut batch) = inbox.receive(&there, &mut scratch).unwrap();
        assert!(batch.next().unwrap().is_some());
        batch.leave_rest();
        assert_eq!(drain(&mut inbox, &there, &mut scratch).0[0].0.number, 6);
        assert_eq!(inbox.partial.capacity(), 0);
    }

    #[test]
    fn a_large_payload_that_is_not_accepted_is_never_stored() {
        let (here, there) = UnixStream::pair().unwrap();
        let mut outbox = Outbox::default();
        outbox.push(kind::SUBMIT, 1, &Empty, &[], Payload::Owned(vec![1; 1_000_000])).unwrap();
        outbox.push(kind::CANCEL, 2, &Empty, &[], Payload::NONE).unwrap();
        let (mut inbox, mut scratch, mut pool) =
            (Inbox::default(), Scratch::default(), BufferPool::default());
        here.set_nonblocking(true).unwrap();
        let mut seen = Vec::new();
        while seen.len() < 2 {
            outbox.flush(&here, &mut pool).unwrap();
            let (_, mut batch) = inbox.receive(&there, &mut scratch).unwrap();
            while let Some(item) = batch.next().unwrap() {
                match item {
                    Item::Announced { header, .. } | Item::Frame { header, .. } => seen.push(header.number),
                    Item::Large { .. } => panic!("stored"),
                }
            }
            assert!(inbox.held_bytes() < 100);
        }
        assert_eq!(seen, [1, 2]);
    }

    #[test]
    fn what_is_announced_is_held_only_as_far_as_it_has_arrived() {
        let total = 8 << 20;
        let mut announcement = Outbox::default();
        announcement.push(kind::SUBMIT, 1, &Empty, &[], Payload::Owned(vec![7; total])).unwrap();
        let mut bytes: Vec<u8> =
            announcement.segments.iter().filter_map(Segment::bytes).flatten().copied().collect();
        let payload_at = bytes.len() - total;
        bytes[payload_at..].iter_mut().enumerate().for_each(|(i, byte)| *byte = i as u8);
        let (mut here, there) = UnixStream::pair().unwrap();
        let (mut inbox, mut scratch, mut pool) =
            (Inbox::default(), Scratch::default(), BufferPool::default());
        // Neither what was used before, nor what is announced, is held for two bytes.
        pool.give(vec![1; total]);
        let mut sent = 0;
        for arrived in [2, 100, 5_000, 70_000, 500_000, 3_000_000, total] {
            let end = payload_at + arrived;
            while sent < end {
                let piece = (end - sent).min(50_000);
                std::io::Write::write_all(&mut here, &bytes[sent..sent + piece]).unwrap();
                sent += piece;
                inbox.grow(&mut pool);
                let (_, mut batch) = inbox.receive(&there, &mut scratch).unwrap();
                match batch.next().unwrap() {
                    Some(Item::Announced { .. }) => {
                        let fit = pool.take(batch.buffer_bytes());
                        batch.accept(fit);
                        assert!(batch.next().unwrap().is_none());
                    }
                    Some(Item::Large { payload, .. }) => {
                        assert!(arrived == total && payload == bytes[payload_at..]);
                        assert!(pool.bytes < total, "the pool's buffer has served");
                        return;
                    }
                    _ => {}
                }
            }
            let most = POOL_FIT_MAX * LARGE_GROWTH * arrived.max(LARGE_START_BYTES) + METADATA_BYTES_USUAL;
            assert!(inbox.held_bytes() <= most, "{arrived} came, {} are held", inbox.held_bytes());
        }
        panic!("the frame did not end");
    }

    #[test]
    fn a_pool_gives_up_what_is_of_no_use() {
        let mut pool = BufferPool::default();
        pool.give(Vec::with_capacity(POOL_BYTES_MAX));
        assert_eq!(pool.take(100_000).capacity(), 0, "far too large for that");
        (0..3).for_each(|_| pool.give(Vec::with_capacity(1 << 20)));
        assert_eq!((pool.buffers.len(), pool.bytes), (3, 3 << 20));
        assert!(pool.take(600_000).capacity() == 1 << 20);
        assert_eq!((pool.buffers.len(), pool.bytes), (2, 2 << 20));
    }

    #[test]
    fn idle_connections_hold_no_memory() {
        let (here, there) = UnixStream::pair().unwrap();
        let (mut outbox, mut inbox) = (Outbox::default(), Inbox::default());
        let (mut pool, mut scratch) = (BufferPool::default(), Scratch::default());
        outbox.push(kind::RESULT, 1, &Empty, &[], Payload::Copied(&[7; 50_000])).unwrap();
        assert!(outbox.flush(&here, &mut pool).unwrap());
        drain(&mut inbox, &there, &mut scratch);
        assert!(outbox.spare.capacity() <= SPARE_BYTES_MAX && outbox.segments.is_empty());
        outbox.give_back();
        assert_eq!((outbox.spare.capacity(), outbox.segments.capacity()), (0, 0));
        assert_eq!(inbox.partial.capacity(), 0);
    }
}
