//! The receiving half of a connection.

use std::io;
use std::os::fd::AsFd;

use rustix::net::RecvFlags;

use super::BufferPool;
use crate::frame::{FrameError, HEADER_BYTES, Header};
use crate::limits::{INLINE_PAYLOAD_BYTES_MAX, METADATA_BYTES_MAX, READ_BYTES_MAX};

/// Bytes that a half-received frame leaves behind at most: a small frame, all but its last byte.
const PARTIAL_BYTES_MAX: usize = HEADER_BYTES + METADATA_BYTES_MAX + INLINE_PAYLOAD_BYTES_MAX;

/// Bytes of a large payload's buffer that are cleared at once, so that one read takes no longer than another.
const LARGE_CLEAR_BYTES: usize = 1024 * 1024;

/// The least that a large payload's buffer has room for.
pub(super) const LARGE_START_BYTES: usize = 4 * 1024;

/// How many times what has arrived of a large payload its buffer may have room for: memory follows what arrives,
/// not what is announced, and few steps lead to the end.
pub(super) const LARGE_GROWTH: usize = 8;

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
        /// The bytes for [`codec::decode`](crate::codec::decode).
        metadata: &'s [u8],
        /// The payload.
        payload: &'s [u8],
    },
    /// A frame with a large payload begins. Call [`Batch::accept`] to have it stored; otherwise its
    /// payload is thrown away as it comes, and never seen again.
    Announced {
        /// Its header.
        header: Header,
        /// The bytes for [`codec::decode`](crate::codec::decode).
        metadata: &'s [u8],
    },
    /// An accepted large frame is complete.
    Large {
        /// Its header.
        header: Header,
        /// The bytes for [`codec::decode`](crate::codec::decode).
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
    pub(super) partial: Vec<u8>,
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

    /// The header of a small frame, or of the metadata of a large one, that has begun and not ended, if all of it is
    /// there. It is not checked.
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
