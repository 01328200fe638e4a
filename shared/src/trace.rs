//! Parses a W3C `traceparent`, returns the fields, and replaces the span ID. This module never starts a trace.

use std::fmt;
use std::num::NonZeroU64;

/// Length of a version 00 `traceparent` in bytes. The fields are version, trace ID, span ID and flags,
/// separated by dashes.
const BYTES: usize = 55;

/// Offsets of the dashes in a `traceparent`.
const DASHES: [usize; 3] = [2, 35, 52];

/// Bit mask of the trace flags that are forwarded: "sampled" and "random trace ID".
const FLAGS_KNOWN: u8 = 0b11;

/// A `traceparent` that is valid according to W3C Trace Context.
///
/// ```
/// use bulkhead_shared::trace::Traceparent;
/// let given = Traceparent::parse("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01").unwrap();
/// assert_eq!(given.trace_id(), "0af7651916cd43dd8448eb211c80319c");
/// assert_eq!(given.span_id(), "b7ad6b7169203331");
/// assert!(given.is_sampled());
/// assert!(Traceparent::parse("00-nonsense").is_none());
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Traceparent([u8; BYTES]);

impl Traceparent {
    /// Parses a `traceparent`: four fields of lower-case hexadecimal digits, with a nonzero trace ID and span
    /// ID. Versions after 00 can have further fields, which are ignored.
    pub fn parse(text: &str) -> Option<Self> {
        let text = match text.split_at_checked(BYTES) {
            Some((known, more)) if more.starts_with('-') && !known.starts_with("00") => known,
            _ => text,
        };
        let read = Self(text.as_bytes().try_into().ok()?);
        let is_well_formed = text.bytes().enumerate().all(|(at, byte)| match DASHES.contains(&at) {
            true => byte == b'-',
            false => matches!(byte, b'0'..=b'9' | b'a'..=b'f'),
        });
        let is_zero = |id: &str| id.bytes().all(|byte| byte == b'0');
        let is_sensible = is_well_formed
            && !text.starts_with("ff")
            && !is_zero(read.trace_id())
            && !is_zero(read.span_id());
        is_sensible.then_some(read)
    }

    /// Returns the `traceparent` as text.
    pub fn as_str(&self) -> &str {
        // The bytes are always ASCII.
        std::str::from_utf8(&self.0).unwrap_or_default()
    }

    /// Returns the trace ID, which has 32 hexadecimal digits.
    pub fn trace_id(&self) -> &str {
        &self.as_str()[DASHES[0] + 1..DASHES[1]]
    }

    /// Returns the span ID, which has 16 hexadecimal digits. The receiver's spans use this ID as their parent.
    pub fn span_id(&self) -> &str {
        &self.as_str()[DASHES[1] + 1..DASHES[2]]
    }

    /// Returns true if the sampled flag is set, which means that the sender may have recorded the trace.
    pub fn is_sampled(&self) -> bool {
        self.flags() & 1 != 0
    }

    /// Returns a `traceparent` with the same trace ID, but with `span` as the span ID. The result has version 00,
    /// because later versions are unknown to this module. Of the flags, only "sampled" and "random trace ID" are kept.
    #[must_use]
    pub fn with_span(&self, span: NonZeroU64) -> Self {
        let mut bytes = self.0;
        bytes[..DASHES[0]].fill(b'0');
        for (at, byte) in bytes[DASHES[1] + 1..DASHES[2]].iter_mut().enumerate() {
            let digit = (span.get() >> (60 - 4 * at)) as usize & 0xf;
            *byte = b"0123456789abcdef"[digit];
        }
        bytes[BYTES - 2] = b'0';
        bytes[BYTES - 1] = b'0' + (self.flags() & FLAGS_KNOWN);
        Self(bytes)
    }

    /// Returns the lower four bits of the flags. The upper bits have no defined meaning.
    fn flags(&self) -> u8 {
        (self.0[BYTES - 1] as char).to_digit(16).map_or(0, |digit| digit as u8)
    }
}

impl fmt::Debug for Traceparent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn invalid_traceparents_are_rejected() {
        assert_eq!(Traceparent::parse(GOOD).unwrap().as_str(), GOOD);
        for bad in [
            "",
            "00",
            &GOOD.to_uppercase(),
            &GOOD.replace("00-", "ff-"),
            &GOOD[1..],
            &format!("{GOOD}-"),
            &GOOD.replacen('-', "_", 1),
            &GOOD.replace("b7ad6b71", "b7ad-b71"),
            &GOOD.replace("b7ad6b7", "b7ad6ö"),
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
        ] {
            assert!(Traceparent::parse(bad).is_none(), "{bad}");
        }
    }

    #[test]
    fn later_traceparent_versions_keep_known_fields() {
        let later = GOOD.replace("00-", "01-");
        for text in [later.clone(), format!("{later}-"), format!("{later}-what-comes-then")] {
            assert_eq!(Traceparent::parse(&text).unwrap().as_str(), later, "{text}");
        }
        for bad in [format!("{later}x"), format!("{GOOD}-x"), format!("{}-x", GOOD.replace("00-", "ff-"))] {
            assert!(Traceparent::parse(&bad).is_none(), "{bad}");
        }
    }

    #[test]
    fn sampled_flag_is_the_lowest_bit() {
        for (flags, is_sampled) in [("00", false), ("01", true), ("02", false), ("03", true), ("fe", false)] {
            let text = format!("{}{flags}", &GOOD[..53]);
            assert_eq!(Traceparent::parse(&text).unwrap().is_sampled(), is_sampled, "{flags}");
        }
    }

    #[test]
    fn new_span_keeps_trace_id() {
        let given = Traceparent::parse(&GOOD.replace("00-", "cc-").replace("-01", "-ff")).unwrap();
        let own = given.with_span(NonZeroU64::new(0x0123_4567_89ab_cdef).unwrap());
        assert_eq!(own.as_str(), "00-0af7651916cd43dd8448eb211c80319c-0123456789abcdef-03");
        assert_eq!(Traceparent::parse(own.as_str()), Some(own));
        let least = given.with_span(NonZeroU64::MIN);
        assert_eq!(least.span_id(), "0000000000000001");
    }
}
