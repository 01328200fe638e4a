//! The named bounds of the wire, in one place: nothing here is negotiable by a peer.

/// Bytes of metadata a frame can carry: its length field has 16 bits.
pub const METADATA_BYTES_MAX: usize = u16::MAX as usize;

/// Bytes of an operation's name.
pub const OPERATION_BYTES_MAX: usize = 256;

/// Bytes of a tenant's name.
pub const TENANT_BYTES_MAX: usize = 256;

/// Bytes of a bulkhead's name.
pub const BULKHEAD_NAME_BYTES_MAX: usize = 64;

/// Bytes of a handler's error code; what is longer is cut.
pub const CODE_BYTES_MAX: usize = 128;

/// Bytes of a handler's error message, a status text or a progress text; what is longer is cut.
pub const MESSAGE_BYTES_MAX: usize = 8 * 1024;

/// A payload up to this many bytes travels inside the coalesced buffers; a larger one has a buffer
/// of its own and is never copied between the two sockets of the supervisor.
pub const INLINE_PAYLOAD_BYTES_MAX: usize = 64 * 1024;

/// Bytes that one read takes at most, and so the size of the buffer that all connections share.
pub const READ_BYTES_MAX: usize = 128 * 1024;

/// The largest `max_payload` and `max_result` that can be configured: a frame's length has 32 bits,
/// and a single job beyond this wants a file, not a message.
pub const PAYLOAD_BYTES_CEILING: u64 = 1024 * 1024 * 1024;

/// Jobs that one worker can be given at once, whatever it is told: each has a thread in it.
pub const IN_FLIGHT_CEILING: u32 = 4096;

/// Bytes of a bulkhead frame that are not payload: the header and the largest metadata.
pub const FRAME_OVERHEAD_BYTES_MAX: usize = crate::frame::HEADER_BYTES + METADATA_BYTES_MAX;

/// Cuts `text` to at most `bytes_max` bytes without splitting a character.
///
/// ```
/// assert_eq!(bulkhead_shared::limits::cut("größe", 4), "grö");
/// assert_eq!(bulkhead_shared::limits::cut("größe", 3), "gr");
/// ```
pub fn cut(text: &str, bytes_max: usize) -> &str {
    let mut end = text.len().min(bytes_max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Whether `name` can name a bulkhead: `[a-z0-9._-]{1,64}`.
///
/// ```
/// use bulkhead_shared::limits::is_bulkhead_name;
/// assert!(is_bulkhead_name("pdf-to.text_2"));
/// assert!(!is_bulkhead_name("PDF") && !is_bulkhead_name(""));
/// ```
pub fn is_bulkhead_name(name: &str) -> bool {
    (1..=BULKHEAD_NAME_BYTES_MAX).contains(&name.len())
        && name.bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'_' | b'-'))
}
