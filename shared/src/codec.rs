//! Encodes and decodes frame metadata for clients, workers and the supervisor. The keeper also uses this module for its
//! reports. The messages of jobs are defined in `client_protocol` and `worker_protocol`, and `frame` encodes the
//! header.
//!
//! The metadata of a message is a frozen version-1 structure, followed by a list of extensions. Structures use
//! bincode's little-endian format with fixed-size integers; a string is a 64-bit length followed by the bytes. The list
//! begins with the number of extensions (64 bits). Each extension consists of a 16-bit tag, a 64-bit length and the
//! value. A receiver skips extensions with an unknown tag, unless the highest bit of the tag is set. This keeps old and
//! new peers compatible.
//!
//! Decoding enforces a byte limit, rejects trailing bytes, and allocates memory only in proportion to the received
//! bytes. Strings are borrowed from the frame.

use bincode::config::{Configuration, Fixint, Limit, LittleEndian};
use bincode::error::DecodeError;
use bincode::{BorrowDecode, Encode};

use crate::limits::METADATA_BYTES_MAX;

type Config = Configuration<LittleEndian, Fixint, Limit<METADATA_BYTES_MAX>>;

const CONFIG: Config = bincode::config::standard()
    .with_little_endian()
    .with_fixed_int_encoding()
    .with_limit::<METADATA_BYTES_MAX>();

/// Size of the buffer in which small messages are encoded, in bytes.
const SMALL_BYTES: usize = 192;

/// Combined size of the tag and length fields of an extension, in bytes.
const EXTENSION_BYTES: usize = 2 + 8;

/// Bit that marks an extension's tag as critical. A receiver must reject a message that contains a critical extension
/// with an unknown tag.
pub const TAG_CRITICAL: u16 = 0x8000;

/// Extension tags.
pub mod tag {
    /// Trace context as text (W3C `traceparent`). Sent with SUBMIT, with JOB, and with the OUTCOME of a traced job.
    pub const TRACEPARENT: u16 = 1;
    /// Seccomp filter in the kernel's format, which the worker must install for all threads before READY. Sent with
    /// WORKER_WELCOME.
    pub const SEAL: u16 = 2;
    /// PID of the crashed program in the worker's PID namespace, encoded in 4 bytes. Sent with PROGRAM_CRASHED.
    pub const PROCESS: u16 = 3;
    /// ID of the job (see [`JobId`](crate::JobId)), encoded in 8 bytes. Sent with the outcome of an accepted job.
    pub const JOB: u16 = 4;
    /// Maximum run time of each attempt in microseconds, measured from dispatch. Encoded in 8 bytes and never 0.
    /// SUBMIT contains the requested limit. OUTCOME contains the limit that applied: the lower of the requested
    /// limit and the bulkhead's limit.
    pub const RUN_LIMIT: u16 = 5;
    /// Arrival number of a job, encoded in 8 bytes. The first job sent to a worker has the number 1, and the second job
    /// the number 2. Sent with RETURNED.
    pub const ARRIVAL: u16 = 10;
    /// Lease of the memory file that contains the payload or result, and size of the payload or result, as a
    /// [`LeaseRef`](crate::memory_files::LeaseRef); 16 bytes. A frame with this extension has no payload.
    pub const LEASE: u16 = super::TAG_CRITICAL | 6;
    /// Makes a CANCEL request take effect only if the job has not started. The extension has no value.
    pub const UNLESS_BEGUN: u16 = super::TAG_CRITICAL | 7;
    /// Exit status of the program that ran a job, encoded as a 4-byte `i32`. Sent with a result or a failure.
    pub const STATUS: u16 = 9;
    /// ID of the job's crash report, as text. Sent with the outcome of a crashed job.
    pub const CRASH_REPORT: u16 = 8;
}

/// Error that occurred while encoding or decoding metadata.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    /// The bytes do not have the structure that this kind of frame requires.
    #[error("the metadata is malformed: {0}")]
    Malformed(String),
    /// The metadata contains extra bytes after the last extension.
    #[error("{0} unexpected bytes follow the metadata")]
    LeftOver(usize),
    /// The peer sent a critical extension that this version does not know.
    #[error("the peer requires extension {0:#06x}, which this version does not support")]
    UnknownCritical(u16),
    /// The metadata does not fit in a frame.
    #[error("the metadata would be longer than {METADATA_BYTES_MAX} bytes")]
    TooLong,
}

/// A message that can serve as the metadata of a frame.
///
/// Implemented for the structures of [`crate::client_protocol`] and [`crate::worker_protocol`].
pub trait Message<'a>: Encode + BorrowDecode<'a, ()> {}

impl<'a, T: Encode + BorrowDecode<'a, ()>> Message<'a> for T {}

/// The extensions of a received message, each with a tag and a value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Extensions<'a> {
    /// First extension. Stored inline, because most messages have at most one extension and then need no allocation.
    first: Option<(u16, &'a [u8])>,
    others: Vec<(u16, &'a [u8])>,
}

impl<'a> Extensions<'a> {
    /// Returns the value of the extension with this tag. Returns `None` if the peer did not send the
    /// extension.
    pub fn get(&self, tag: u16) -> Option<&'a [u8]> {
        self.first.iter().chain(&self.others).find(|(t, _)| *t == tag).map(|(_, bytes)| *bytes)
    }

    fn push(&mut self, extension: (u16, &'a [u8])) {
        match &self.first {
            None => self.first = Some(extension),
            Some(_) => self.others.push(extension),
        }
    }
}

/// Appends `message` and its extensions to `out`. On error, `out` is unchanged.
///
/// ```
/// use bulkhead_shared::{client_protocol::Progress, codec};
/// let mut out = Vec::new();
/// codec::encode(&Progress { fraction: 0.5, text: "page 1" }, &[], &mut out)?;
/// let (message, _) = codec::decode::<Progress>(&out, &[])?;
/// assert_eq!(message.text, "page 1");
/// # Ok::<(), codec::CodecError>(())
/// ```
pub fn encode<M: Encode>(
    message: &M,
    extensions: &[(u16, &[u8])],
    out: &mut Vec<u8>,
) -> Result<(), CodecError> {
    let before = out.len();
    let written = encode_parts(message, extensions, out);
    if written.is_err() || out.len() - before > METADATA_BYTES_MAX {
        out.truncate(before);
        return Err(CodecError::TooLong);
    }
    Ok(())
}

fn encode_parts<M: Encode>(
    message: &M,
    extensions: &[(u16, &[u8])],
    out: &mut Vec<u8>,
) -> Result<(), bincode::error::EncodeError> {
    // Most messages are small. Encoding such a message into a buffer on the stack and copying the result takes half as
    // long as encoding into the vector.
    let mut small = [0; SMALL_BYTES];
    match bincode::encode_into_slice(message, &mut small, CONFIG) {
        Ok(length) => out.extend_from_slice(&small[..length]),
        Err(_) => drop(bincode::encode_into_std_write(message, out, CONFIG)?),
    }
    out.extend_from_slice(&(extensions.len() as u64).to_le_bytes());
    for (tag, bytes) in extensions {
        let mut begin = [0; EXTENSION_BYTES];
        begin[..2].copy_from_slice(&tag.to_le_bytes());
        begin[2..].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
        out.extend_from_slice(&begin);
        out.extend_from_slice(bytes);
    }
    Ok(())
}

/// Decodes a message and its extensions. `known` lists the tags of critical extensions that the caller supports.
pub fn decode<'a, M: BorrowDecode<'a, ()>>(
    bytes: &'a [u8],
    known: &[u16],
) -> Result<(M, Extensions<'a>), CodecError> {
    let (message, used) =
        bincode::borrow_decode_from_slice::<M, _>(bytes, CONFIG).map_err(|error| malformed(&error))?;
    let mut rest = &bytes[used..];
    let count = u64::from_le_bytes(*take(&mut rest)?);
    let mut extensions = Extensions::default();
    // The loop ends even if the count is invalid, because each extension consumes at least `EXTENSION_BYTES` of the
    // input.
    for _ in 0..count {
        let tag = u16::from_le_bytes(*take(&mut rest)?);
        let length = u64::from_le_bytes(*take(&mut rest)?);
        let value =
            usize::try_from(length).ok().and_then(|length| rest.split_off(..length)).ok_or_else(cut_off)?;
        if tag & TAG_CRITICAL != 0 && !known.contains(&tag) {
            return Err(CodecError::UnknownCritical(tag));
        }
        extensions.push((tag, value));
    }
    if !rest.is_empty() {
        return Err(CodecError::LeftOver(rest.len()));
    }
    Ok((message, extensions))
}

fn take<'a, const BYTES: usize>(rest: &mut &'a [u8]) -> Result<&'a [u8; BYTES], CodecError> {
    let (taken, left) = rest.split_first_chunk().ok_or_else(cut_off)?;
    *rest = left;
    Ok(taken)
}

#[cold]
fn malformed(error: &DecodeError) -> CodecError {
    CodecError::Malformed(match error {
        DecodeError::Utf8 { .. } => "a text field is not valid UTF-8".to_owned(),
        DecodeError::UnexpectedEnd { .. } => "unexpected end".to_owned(),
        other => other.to_string(),
    })
}

#[cold]
fn cut_off() -> CodecError {
    CodecError::Malformed("unexpected end within the extensions".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker_protocol::Extend;

    #[test]
    fn decoder_skips_unknown_extension_unless_critical() {
        let mut out = Vec::new();
        encode(&Extend { more_ms: 7 }, &[(9, b"new"), (tag::TRACEPARENT, b"00-")], &mut out).unwrap();
        let (message, extensions) = decode::<Extend>(&out, &[]).unwrap();
        assert_eq!(message.more_ms, 7);
        assert_eq!(extensions.get(tag::TRACEPARENT), Some(&b"00-"[..]));

        out.clear();
        encode(&Extend { more_ms: 7 }, &[(9 | TAG_CRITICAL, b"new")], &mut out).unwrap();
        assert_eq!(decode::<Extend>(&out, &[]).unwrap_err(), CodecError::UnknownCritical(0x8009));
        assert!(decode::<Extend>(&out, &[0x8009]).is_ok());
    }

    #[test]
    fn decoder_rejects_trailing_bytes_and_wrong_lengths() {
        let mut out = Vec::new();
        encode(&Extend { more_ms: 7 }, &[], &mut out).unwrap();
        out.push(0);
        assert_eq!(decode::<Extend>(&out, &[]).unwrap_err(), CodecError::LeftOver(1));

        // The message consists of a number and a string. The string has a single byte, which is not valid UTF-8.
        let bytes = [0, 1, 0, 0, 0, 0, 0, 0, 0, 0xFF];
        let error = decode::<crate::client_protocol::Refused<'_>>(&bytes, &[]).unwrap_err();
        assert_eq!(error.to_string(), "the metadata is malformed: a text field is not valid UTF-8");

        // The message announces 2^56 extensions, but contains none.
        let bytes = [7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
        assert!(matches!(decode::<Extend>(&bytes, &[]), Err(CodecError::Malformed(_))));
    }

    #[test]
    fn failed_encode_leaves_buffer_unchanged() {
        let text = "x".repeat(METADATA_BYTES_MAX);
        let mut out = vec![1];
        let status = crate::worker_protocol::Status { text: &text };
        assert_eq!(encode(&status, &[], &mut out), Err(CodecError::TooLong));
        assert_eq!(out, [1]);
    }
}
