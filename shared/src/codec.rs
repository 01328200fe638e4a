//! Metadata: the one file that names the serializer.
//!
//! A message's metadata is a frozen version-1 structure in bincode's fixed-integer little-endian
//! form (integers as they are, text as a 64-bit length and its bytes), followed by a list of
//! extensions: a 64-bit count, then for each a 16-bit tag, a 64-bit length and that many bytes. A tag
//! that is not known is skipped, unless its highest bit is set. So an old and a new peer understand
//! each other.
//!
//! Decoding has a byte limit, checks that every byte was consumed, and allocates nothing that the
//! bytes at hand do not cover: texts are borrowed from the frame.

use bincode::config::{Configuration, Fixint, Limit, LittleEndian};
use bincode::error::DecodeError;
use bincode::{BorrowDecode, Encode};

use crate::limits::METADATA_BYTES_MAX;

type Config = Configuration<LittleEndian, Fixint, Limit<METADATA_BYTES_MAX>>;

const CONFIG: Config = bincode::config::standard()
    .with_little_endian()
    .with_fixed_int_encoding()
    .with_limit::<METADATA_BYTES_MAX>();

/// Messages up to this size are encoded the short way.
const SMALL_BYTES: usize = 192;

/// Bytes of an extension before its own: the tag and the length.
const EXTENSION_BYTES: usize = 2 + 8;

/// An extension whose tag has this bit must be understood, or the message refused.
pub const TAG_CRITICAL: u16 = 0x8000;

/// The extensions a message may carry, beyond its frozen structure.
pub mod tag {
    /// A W3C `traceparent`, as text; on a submit, on a job, and on the outcome of a job that has a span.
    pub const TRACEPARENT: u16 = 1;
    /// A filter of system calls, as the kernel takes it, that the worker is to put in force for all its
    /// threads before it says that it is ready; on a worker's welcome.
    pub const SEAL: u16 = 2;
    /// The process that a program was, as the worker numbers it: 4 bytes; on a program's crash.
    pub const PROCESS: u16 = 3;
    /// The number of a job, as a [`JobId`](crate::JobId): 8 bytes; on the outcome of a job that was taken.
    pub const JOB: u16 = 4;
    /// The longest run of each attempt, from its dispatch, in microseconds: 8 bytes, not 0. On a submit what is asked
    /// for; on an outcome the lower of that and the bulkhead's own, if there is one.
    pub const RUN_LIMIT: u16 = 5;
    /// Number of a returned job in the order in which the worker's jobs were sent; 8 bytes.
    pub const ARRIVAL: u16 = 10;
    /// The lease in whose file the payload or result stands, and how many bytes it has, as a
    /// [`Named`](crate::memory_files::Named): 16 bytes; the frame has no payload then.
    pub const LEASE: u16 = super::TAG_CRITICAL | 6;
    /// Cancel only if the job has not begun; on a cancellation, without bytes.
    pub const UNLESS_BEGUN: u16 = super::TAG_CRITICAL | 7;
    /// The exit status of the program that ran a job, as an `i32`: 4 bytes; on a result and on a failure.
    pub const STATUS: u16 = 9;
    /// The id of the crash report about the death that ended the job, as text; on the outcome of a job that crashed.
    pub const CRASH_REPORT: u16 = 8;
}

/// Why metadata could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    /// The bytes are not the structure that the kind of frame announces.
    #[error("the metadata is malformed: {0}")]
    Malformed(String),
    /// Bytes are left over.
    #[error("{0} bytes of metadata are left over")]
    LeftOver(usize),
    /// An extension that must be understood is not.
    #[error("the peer requires the extension {0:#06x}, which this version does not have")]
    UnknownCritical(u16),
    /// More than a frame can carry.
    #[error("the metadata would take more than {METADATA_BYTES_MAX} bytes")]
    TooLong,
}

/// A message that can stand in the metadata of a frame.
///
/// Implemented for the structures of [`crate::client_protocol`] and [`crate::worker_protocol`].
pub trait Message<'a>: Encode + BorrowDecode<'a, ()> {}

impl<'a, T: Encode + BorrowDecode<'a, ()>> Message<'a> for T {}

/// The extensions of a received message, each a tag and its bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Extensions<'a> {
    /// The first one lies here, so that a single one takes no memory of its own: every outcome has one.
    first: Option<(u16, &'a [u8])>,
    others: Vec<(u16, &'a [u8])>,
}

impl<'a> Extensions<'a> {
    /// The bytes under a tag, if the peer sent it.
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

/// Appends `message` and its extensions to `out`; on an error `out` is as it was.
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
    // Most messages are small: written to a place of known size and copied once, they cost half as much.
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

/// Reads a message and its extensions; `known` lists the critical tags that the caller understands.
pub fn decode<'a, M: BorrowDecode<'a, ()>>(
    bytes: &'a [u8],
    known: &[u16],
) -> Result<(M, Extensions<'a>), CodecError> {
    let (message, used) =
        bincode::borrow_decode_from_slice::<M, _>(bytes, CONFIG).map_err(|error| malformed(&error))?;
    let mut rest = &bytes[used..];
    let count = u64::from_le_bytes(*take(&mut rest)?);
    let mut extensions = Extensions::default();
    // Each extension takes bytes of its own, so that a made-up count ends at the end of the bytes.
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

/// The next bytes.
fn take<'a, const BYTES: usize>(rest: &mut &'a [u8]) -> Result<&'a [u8; BYTES], CodecError> {
    let (taken, left) = rest.split_first_chunk().ok_or_else(cut_off)?;
    *rest = left;
    Ok(taken)
}

#[cold]
fn malformed(error: &DecodeError) -> CodecError {
    CodecError::Malformed(match error {
        DecodeError::Utf8 { .. } => "a text in it is not UTF-8".to_owned(),
        DecodeError::UnexpectedEnd { .. } => "it ends too soon".to_owned(),
        other => other.to_string(),
    })
}

#[cold]
fn cut_off() -> CodecError {
    CodecError::Malformed("it ends within its extensions".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker_protocol::Extend;

    #[test]
    fn an_unknown_extension_is_skipped_and_a_critical_one_refused() {
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
    fn left_over_bytes_and_made_up_lengths_are_refused() {
        let mut out = Vec::new();
        encode(&Extend { more_ms: 7 }, &[], &mut out).unwrap();
        out.push(0);
        assert_eq!(decode::<Extend>(&out, &[]).unwrap_err(), CodecError::LeftOver(1));

        // A reason, and a text of one byte.
        let bytes = [0, 1, 0, 0, 0, 0, 0, 0, 0, 0xFF];
        let told = decode::<crate::client_protocol::Refused<'_>>(&bytes, &[]).unwrap_err();
        assert_eq!(told.to_string(), "the metadata is malformed: a text in it is not UTF-8");

        // A count of 2^56 extensions, with none behind it.
        let bytes = [7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
        assert!(matches!(decode::<Extend>(&bytes, &[]), Err(CodecError::Malformed(_))));
    }

    #[test]
    fn what_does_not_fit_leaves_no_trace() {
        let text = "x".repeat(METADATA_BYTES_MAX);
        let mut out = vec![1];
        let status = crate::worker_protocol::Status { text: &text };
        assert_eq!(encode(&status, &[], &mut out), Err(CodecError::TooLong));
        assert_eq!(out, [1]);
    }
}
