//! Keeps buffers for large payloads and for queued frames, so that connections can reuse them. `inbox` takes buffers
//! for payloads, and `outbox` for frames. The pool limits only the buffers that it keeps, not the buffers in use.

use crate::limits::INLINE_PAYLOAD_BYTES_MAX;

/// Maximum ratio of a pooled buffer's size to the requested size. A larger buffer would waste memory, because its whole
/// size counts towards the memory limit.
pub(super) const POOL_OVERSIZE_FACTOR_MAX: usize = 2;

/// Maximum total size of the large buffers that a [`BufferPool`] keeps, in bytes.
pub(super) const POOL_BYTES_MAX: usize = 64 * 1024 * 1024;

/// Maximum number of coalescing buffers that a [`BufferPool`] keeps.
const POOL_SEGMENTS_MAX: usize = 32;

/// Maximum number of small coalescing buffers that a [`BufferPool`] keeps.
pub(super) const POOL_SPARES_MAX: usize = 128;

/// Size in bytes at which a coalescing buffer is considered full. No more frames are appended to a full buffer.
pub(super) const SEGMENT_BYTES_MAX: usize = 256 * 1024;

/// Capacity of a coalescing buffer in bytes. A buffer that is almost full still has room for one frame with an inline
/// payload of the maximum size.
pub(super) const SEGMENT_CAPACITY: usize = SEGMENT_BYTES_MAX + INLINE_PAYLOAD_BYTES_MAX + 1;

/// Pool of reusable buffers. Reuse avoids page faults in new buffers, which would take longer than copying the
/// payloads.
#[derive(Default)]
pub struct BufferPool {
    pub(super) buffers: Vec<Vec<u8>>,
    pub(super) bytes: usize,
    segments: Vec<Vec<u8>>,
    /// Small coalescing buffers that idle connections have returned.
    pub(super) spares: Vec<Vec<u8>>,
}

impl BufferPool {
    /// Takes a buffer with a capacity of at least `bytes` from the pool. Returns an empty buffer if the pool
    /// has no such buffer. The contents of a pooled buffer are unspecified.
    pub fn take(&mut self, bytes: usize) -> Vec<u8> {
        // Takes the smallest buffer that fits, so that small payloads do not use up the large buffers.
        let fits = bytes..=bytes.saturating_mul(POOL_OVERSIZE_FACTOR_MAX);
        let fit = (0..self.buffers.len())
            .filter(|&i| fits.contains(&self.buffers[i].capacity()))
            .min_by_key(|&i| self.buffers[i].capacity());
        match fit {
            Some(i) => {
                let buffer = self.buffers.remove(i);
                self.bytes -= buffer.capacity();
                buffer
            }
            None => Vec::new(),
        }
    }

    /// Puts a buffer into the pool, unless the buffer is too small or too large. Drops the oldest buffers if
    /// the total size exceeds `POOL_BYTES_MAX`.
    pub fn put(&mut self, buffer: Vec<u8>) {
        let bytes = buffer.capacity();
        if bytes <= INLINE_PAYLOAD_BYTES_MAX || bytes > POOL_BYTES_MAX {
            return;
        }
        self.buffers.push(buffer);
        self.bytes += bytes;
        // Drops the oldest buffers, because buffers of their sizes have not been requested recently.
        while self.bytes > POOL_BYTES_MAX {
            self.bytes -= self.buffers.remove(0).capacity();
        }
    }

    /// Takes an empty coalescing buffer from the pool, or creates one.
    pub(super) fn take_segment(&mut self) -> Vec<u8> {
        self.segments.pop().unwrap_or_else(|| Vec::with_capacity(SEGMENT_CAPACITY))
    }

    /// Takes an empty small coalescing buffer from the pool, or creates one.
    pub(super) fn take_spare(&mut self) -> Vec<u8> {
        self.spares.pop().unwrap_or_default()
    }

    /// Puts a small coalescing buffer into the pool, unless the pool is full.
    pub(super) fn put_spare(&mut self, spare: Vec<u8>) {
        if self.spares.len() < POOL_SPARES_MAX {
            self.spares.push(spare);
        }
    }

    pub(super) fn put_segment(&mut self, mut segment: Vec<u8>) {
        if self.segments.len() < POOL_SEGMENTS_MAX {
            segment.clear();
            self.segments.push(segment);
        }
    }
}
