//! Lists the fixed limits of the wire protocol, which cannot be negotiated or configured. Clients, the supervisor and
//! workers check them. The limits of a bulkhead are in `bulkhead_policy` instead.

/// Maximum size of a frame's metadata, in bytes. The 16-bit length field cannot hold a larger size.
pub const METADATA_BYTES_MAX: usize = u16::MAX as usize;

/// Maximum length of an operation's name, in bytes.
pub const OPERATION_BYTES_MAX: usize = 256;

/// Maximum length of a tenant's name, in bytes.
pub const TENANT_BYTES_MAX: usize = 256;

/// Maximum length of a bulkhead's name, in bytes.
pub const BULKHEAD_NAME_BYTES_MAX: usize = 64;

/// Maximum length of a handler's error code, in bytes. Longer codes are truncated.
pub const CODE_BYTES_MAX: usize = 128;

/// Maximum length of a handler's error message, status text or progress text, in bytes. Longer text is truncated.
pub const MESSAGE_BYTES_MAX: usize = 8 * 1024;

/// Maximum size of an inline payload or result, in bytes. Inline payloads share coalescing buffers. A larger
/// payload is passed in a memory file if the client has a lease. Otherwise the payload is stored in a
/// separate buffer, which the supervisor passes on to the other socket without copying.
pub const INLINE_PAYLOAD_BYTES_MAX: usize = 64 * 1024;

/// Maximum number of bytes per read from a socket. Determines the size of the shared read buffer.
pub const READ_BYTES_MAX: usize = 128 * 1024;

/// Upper limit for `max_payload` and `max_result`, in bytes. Larger data would fit in a frame, whose length field has
/// 32 bits, but should be passed in files.
pub const PAYLOAD_BYTES_CEILING: u64 = 1024 * 1024 * 1024;

/// Maximum number of concurrent jobs in one worker. Each job needs a thread.
pub const IN_FLIGHT_CEILING: u32 = 4096;

/// Maximum combined size of a frame's header and metadata, in bytes.
pub const FRAME_OVERHEAD_BYTES_MAX: usize = crate::frame::HEADER_BYTES + METADATA_BYTES_MAX;

/// Maximum length of a line of worker output in the log, in bytes. Longer lines are truncated.
pub const OUTPUT_LINE_BYTES_MAX: usize = 8 * 1024;

/// Truncates `text` to at most `bytes_max` bytes, at a character boundary.
///
/// ```
/// assert_eq!(bulkhead_shared::limits::truncate("größe", 4), "grö");
/// assert_eq!(bulkhead_shared::limits::truncate("größe", 3), "gr");
/// ```
pub fn truncate(text: &str, bytes_max: usize) -> &str {
    let mut end = text.len().min(bytes_max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Returns true if `name` is a valid bulkhead name: `[a-z0-9._-]{1,64}`.
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
