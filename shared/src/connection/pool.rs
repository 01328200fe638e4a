//! Buffers that are used again.

use crate::limits::INLINE_PAYLOAD_BYTES_MAX;

/// A pooled buffer may be so many times as large as what is asked for: all of it counts as held.
pub(super) const POOL_FIT_MAX: usize = 2;

/// Bytes of large buffers that a [`BufferPool`] keeps for reuse.
pub(super) const POOL_BYTES_MAX: usize = 64 * 1024 * 1024;

/// Coalescing buffers that a [`BufferPool`] keeps for reuse.
const POOL_SEGMENTS_MAX: usize = 32;

/// Small coalescing buffers that a [`BufferPool`] keeps for reuse: for connections that have something to send at once.
pub(super) const POOL_SPARES_MAX: usize = 128;

/// A coalescing buffer is closed once it holds this many bytes, and the next one opened.
pub(super) const SEGMENT_BYTES_MAX: usize = 256 * 1024;

/// What a coalescing buffer has room for: the last frame in it may be as large as an inline one can be.
pub(super) const SEGMENT_CAPACITY: usize = SEGMENT_BYTES_MAX + INLINE_PAYLOAD_BYTES_MAX + 1;

/// Large buffers kept for reuse: a page of fresh memory costs more than the bytes that go into it.
#[derive(Default)]
pub struct BufferPool {
    pub(super) buffers: Vec<Vec<u8>>,
    pub(super) bytes: usize,
    segments: Vec<Vec<u8>>,
    /// Small coalescing buffers of connections that rest.
    pub(super) spares: Vec<Vec<u8>>,
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
    pub(super) fn take_segment(&mut self) -> Vec<u8> {
        self.segments.pop().unwrap_or_else(|| Vec::with_capacity(SEGMENT_CAPACITY))
    }

    /// An empty small coalescing buffer.
    pub(super) fn take_spare(&mut self) -> Vec<u8> {
        self.spares.pop().unwrap_or_default()
    }

    /// Takes one back.
    pub(super) fn give_spare(&mut self, spare: Vec<u8>) {
        if self.spares.len() < POOL_SPARES_MAX {
            self.spares.push(spare);
        }
    }

    pub(super) fn give_segment(&mut self, mut segment: Vec<u8>) {
        if self.segments.len() < POOL_SEGMENTS_MAX {
            segment.clear();
            self.segments.push(segment);
        }
    }
}
